//! A command is started with a file's variables where the file belongs, and nowhere else.
//!
//! Files come from a recorded run on real GPUs; the machine they belong to is planted below a folder, part by part, and
//! changed one part at a time.

use std::os::unix::process::CommandExt as _;
use std::process::Stdio;

use fs_err as fs;

use crate::command::{Ended, Scene, recorded};

const RUN: &str = "h200x2-host-memory";
const ADDRESSES: [&str; 2] = ["0000:00:06.0", "0000:00:07.0"];

/// The machine of the recorded run, as its kernel would show it, and the run's answer.
fn planted() -> Scene {
    let scene = Scene::new();
    let emitted = scene.run(&format!("emit --run {}", recorded(RUN).display())).ok().stdout;
    scene.write("tuned.env", &emitted);
    let part = |name: &str| {
        let line = format!("# measured with: {name} = ");
        emitted.lines().find_map(|known| known.strip_prefix(&line)).expect("recorded").to_owned()
    };
    scene.write("box/proc/cpuinfo", format!("vendor_id\t: GenuineIntel\nmodel name\t: {}\n", part("cpu")));
    scene.write(
        "box/proc/driver/nvidia/version",
        format!("NVRM version: NVIDIA UNIX x86_64 Kernel Module  {}  Thu Jan 1\n", part("driver")),
    );
    let (gpus, identities) = (part("gpus"), part("gpu-identities"));
    for ((address, gpu), identity) in ADDRESSES.iter().zip(gpus.split(", ")).zip(identities.split(", ")) {
        scene.write(
            &format!("box/proc/driver/nvidia/gpus/{address}/information"),
            format!("Model: \t\t {gpu}\nGPU UUID: \t {identity}\n"),
        );
    }
    scene
}

/// Starts a shell that tells what it was given.
fn start(scene: &Scene, more: &str, outside: &[(&str, &str)]) -> Ended {
    let line = format!("exec --env-file tuned.env --root box {more} -- sh -c");
    let mut words: Vec<&str> = line.split_whitespace().collect();
    words.push("env | grep ^NCCL_ | sort; exit 9");
    let output = scene.command(&words).envs(outside.iter().copied()).output().expect("the program starts");
    Ended {
        words: line,
        status: output.status.code(),
        stdout: String::from_utf8_lossy(&output.stdout).into_owned(),
        stderr: String::from_utf8_lossy(&output.stderr).into_owned(),
    }
}

fn set_lines(text: &str) -> String {
    let mut lines: Vec<&str> = text.lines().filter(|line| line.starts_with("NCCL_")).collect();
    lines.sort_unstable();
    lines.join("\n") + "\n"
}

#[test]
fn where_the_file_belongs_the_command_gets_its_variables_and_says_how_it_ended() {
    let scene = planted();
    let ended = start(&scene, "", &[]);
    assert_eq!(ended.status, Some(9), "{}", ended.stderr);
    assert_eq!(ended.stdout, set_lines(&scene.read("tuned.env")));
    assert!(ended.stdout.contains("NCCL_MIN_NCHANNELS="), "the run adopted something");
    // What was recorded and needs a driver is named; the library lies nowhere here.
    assert!(ended.stderr.contains("not compared, because no GPU is asked here"), "{}", ended.stderr);
    assert!(!ended.stderr.contains("warning"), "{}", ended.stderr);
}

#[test]
fn it_is_the_process_itself_that_becomes_the_command() {
    let scene = planted();
    let mut command = scene.command(&["exec", "--env-file", "tuned.env", "--root", "box", "--quiet", "--"]);
    command.args(["sh", "-c", "echo $$; kill -TERM $$"]);
    let child = command.stdout(Stdio::piped()).process_group(0).spawn().expect("the program starts");
    let process_id = child.id();
    let output = child.wait_with_output().expect("it ends");
    assert_eq!(String::from_utf8_lossy(&output.stdout).trim(), process_id.to_string());
    assert_eq!(std::os::unix::process::ExitStatusExt::signal(&output.status), Some(15));
}

/// What is changed, to what, and what must be said.
type Change = (&'static str, &'static str, &'static str, &'static str);

#[test]
fn a_machine_that_is_another_or_was_changed_is_told_part_by_part() {
    const CHANGES: [Change; 4] = [
        ("box/proc/driver/nvidia/version", "580.159.04", "595.58.03", "is stale: the driver was 580.159.04 and is 595"),
        ("box/proc/cpuinfo", "Intel(R) Xeon(R) Processor", "EPYC", "another machine: the CPU was Intel(R) Xeon(R)"),
        ("box/proc/driver/nvidia/gpus/0000:00:07.0/information", "GPU-438896be", "GPU-0", "the identities of the GPUs"),
        (
            "box/proc/driver/nvidia/gpus/0000:00:07.0/information",
            "H200",
            "H100",
            "the GPUs were NVIDIA H200, NVIDIA H200",
        ),
    ];
    for (file, old, new, says) in CHANGES {
        let scene = planted();
        let text = scene.read(file);
        assert!(text.contains(old), "{file}: {text}");
        scene.write(file, text.replace(old, new));
        let refused = start(&scene, "", &[]);
        assert_eq!((refused.status, refused.stdout.as_str()), (Some(3), ""), "{file}: {}", refused.stderr);
        assert!(refused.stderr.contains(says) && refused.stderr.contains("--force"), "{}", refused.stderr);
        let forced = start(&scene, "--force --quiet", &[]);
        assert_eq!(forced.status, Some(9), "{}", forced.stderr);
        assert!(forced.stderr.contains("warning: started with --force although") && forced.stderr.contains(says));
    }
    // A GPU that is gone, and a machine without a driver.
    let scene = planted();
    fs::remove_dir_all(scene.path("box/proc/driver/nvidia/gpus/0000:00:07.0")).unwrap();
    let told = start(&scene, "", &[]).stderr;
    assert!(told.contains("were 0000:00:06.0, 0000:00:07.0 and are 0000:00:06.0, none"), "{told}");
    fs::remove_dir_all(scene.path("box/proc/driver")).unwrap();
    let refused = start(&scene, "", &[]);
    assert!(refused.stderr.contains("no NVIDIA driver shows its GPUs here"), "{}", refused.stderr);
    assert_eq!(refused.status, Some(3));
}

#[test]
fn another_library_makes_the_file_stale_and_the_same_one_does_not() {
    let scene = planted();
    scene.write("libnccl.so.2", "another build");
    let refused = start(&scene, "--nccl-lib libnccl.so.2", &[]);
    assert_eq!(refused.status, Some(3));
    assert!(refused.stderr.contains("is stale: the NCCL library was 2."), "{}", refused.stderr);
    let hash = nccltune::canonical::Fingerprint::of_bytes(b"another build");
    let text = scene.read("tuned.env");
    let known = text.lines().find(|line| line.starts_with("# measured with: nccl = ")).expect("recorded").to_owned();
    scene.write("tuned.env", text.replace(&known, &format!("# measured with: nccl = 2.28.9 {}", hash.as_str())));
    assert_eq!(start(&scene, "--nccl-lib libnccl.so.2", &[]).status, Some(9));
}

#[test]
fn a_simulated_and_a_foreign_file_are_refused() {
    let scene = planted();
    let own = scene.read("tuned.env");
    scene.run("tune --backend simulated --seed 1 --out X").ok();
    scene.write("tuned.env", scene.read("X/tuned.env"));
    let refused = start(&scene, "", &[]);
    assert!(refused.status == Some(3) && refused.stderr.contains("is simulated"), "{}", refused.stderr);
    scene.write("tuned.env", "NCCL_PROTO=LL\n");
    let refused = start(&scene, "", &[]);
    assert!(refused.status == Some(3) && refused.stderr.contains("is foreign"), "{}", refused.stderr);
    assert_eq!(start(&scene, "--force", &[]).stdout, "NCCL_PROTO=LL\n");
    // A file of a version that did not write its parts: its run tells, where it lies beside it.
    let without: Vec<&str> = own.lines().filter(|line| !line.starts_with("# measured with: ")).collect();
    scene.write("tuned.env", without.join("\n") + "\n");
    let refused = start(&scene, "", &[]);
    assert!(refused.status == Some(3) && refused.stderr.contains("does not say on which GPUs"), "{}", refused.stderr);
    let run = recorded(RUN).display().to_string();
    assert_eq!(start(&scene, &format!("--run {run}"), &[]).status, Some(9));
    let other = recorded("h200x2-host-memory-kimi").display().to_string();
    let refused = start(&scene, &format!("--run {other}"), &[]);
    assert!(refused.status == Some(2) && refused.stderr.contains("is not of the run in"), "{}", refused.stderr);
}

#[test]
fn what_is_inherited_never_undoes_the_file() {
    let scene = planted();
    let outside = [
        ("NCCL_MIN_NCHANNELS", "1"),
        ("NCCL_MAX_NCHANNELS", "2"),
        ("NCCL_SOCKET_IFNAME", "eth0"),
        ("NCCL_DEBUG", "WARN"),
        ("NCCL_CUMEM_ENABLE", "1"),
        ("CUDA_DEVICE_MAX_CONNECTIONS", "8"),
    ];
    let ended = start(&scene, "", &outside);
    assert_eq!(ended.status, Some(9), "{}", ended.stderr);
    let own = set_lines(&scene.read("tuned.env"));
    assert!(own.lines().all(|line| ended.stdout.contains(&format!("{line}\n"))), "{}", ended.stdout);
    assert!(!ended.stdout.contains("NCCL_MAX_NCHANNELS"), "it excludes the file's: {}", ended.stdout);
    assert!(ended.stdout.contains("NCCL_SOCKET_IFNAME=eth0") && ended.stdout.contains("NCCL_DEBUG=WARN"));
    for told in [
        "NCCL_MIN_NCHANNELS=1 is inherited; the file's",
        "NCCL_MAX_NCHANNELS=2 is inherited and taken out: ",
        "NCCL_SOCKET_IFNAME=eth0 is inherited, and was not set when the file was measured; it stays",
        "NCCL_CUMEM_ENABLE=1 is inherited, and the file was measured with NCCL_CUMEM_ENABLE=0",
    ] {
        assert!(ended.stderr.contains(told), "{told}: {}", ended.stderr);
    }
    assert!(!ended.stderr.contains("NCCL_DEBUG") && !ended.stderr.contains("MAX_CONNECTIONS"), "{}", ended.stderr);
}

#[test]
fn a_file_that_a_variable_points_at_must_be_there_and_be_what_was_measured() {
    let scene = planted();
    let text = b"<graphs version=\"1\"/>\n";
    let sha256 = nccltune::canonical::Fingerprint::of_bytes(text);
    let path = scene.path(&format!("run/graph-{}.xml", sha256.as_str()));
    let own = scene.read("tuned.env");
    let with = |value: &str| scene.write("tuned.env", format!("{own}NCCL_GRAPH_FILE={value}\n"));
    with(&path.display().to_string());
    let missing = start(&scene, "--force", &[]);
    assert_eq!((missing.status, missing.stdout.as_str()), (Some(3), ""), "no flag helps: {}", missing.stderr);
    assert!(missing.stderr.contains("NCCL_GRAPH_FILE: ") && missing.stderr.contains("nothing was started"));
    fs::create_dir_all(path.parent().unwrap()).unwrap();
    fs::write(&path, text).unwrap();
    assert_eq!(start(&scene, "", &[]).status, Some(9));
    fs::write(&path, "<graphs version=\"2\"/>\n").unwrap();
    let changed = start(&scene, "", &[]);
    assert!(changed.status == Some(3) && changed.stderr.contains("is not what was measured"), "{}", changed.stderr);
    with("graph.xml");
    let relative = start(&scene, "", &[]);
    assert!(relative.status == Some(3) && relative.stderr.contains("is no absolute path"), "{}", relative.stderr);
    // The plugin's hash stands in the header.
    let plugin = scene.path("run/libnccltune_tuner.so");
    fs::write(&plugin, "plugin").unwrap();
    let header = format!("# nccltune 0.1.0: x\n# tuner plugin: SHA-256 {}\n", "0".repeat(64));
    scene.write("tuned.env", format!("{header}NCCL_TUNER_PLUGIN={}\n", plugin.display()));
    let changed = start(&scene, "--force", &[]);
    assert!(changed.status == Some(3) && changed.stderr.contains("is not what was measured"), "{}", changed.stderr);
}

#[test]
fn what_cannot_be_started_says_so_as_shells_do() {
    let scene = planted();
    let run = |words: &[&str]| {
        let line = ["exec", "--env-file", "tuned.env", "--root", "box", "--quiet", "--"];
        let output = scene.command(&[&line, words].concat()).output().expect("the program starts");
        (output.status.code(), String::from_utf8_lossy(&output.stderr).into_owned())
    };
    let (status, told) = run(&["no-such-program-here"]);
    assert!(status == Some(127) && told.contains("no-such-program-here could not be started"), "{told}");
    scene.write("plain", "no program");
    assert_eq!(run(&["./plain"]).0, Some(126));
    assert_eq!(run(&[]).0, Some(2));
}

#[test]
fn hostile_files_are_refused_and_nothing_is_started() {
    let scene = planted();
    let refused = |says: &str| {
        let ended = start(&scene, "--force", &[]);
        assert_eq!((ended.status, ended.stdout.as_str()), (Some(2), ""), "{says}: {}", ended.stderr);
        assert!(ended.stderr.contains(says), "{says}: {}", ended.stderr);
    };
    let own = scene.read("tuned.env");
    for (text, says) in [
        ("NCCL_PROTO=\"LL\"\n", "line "),
        ("export NCCL_PROTO=LL\n", "shell syntax"),
        ("NCCL_PROTO=$(touch started)\n", "do not read alike"),
        ("NCCL_PROTO=LL\nNCCL_PROTO=LL\n", "already set on line"),
        ("NCCL_PROTO=LL\r\n", "carriage return"),
        ("a\0b\n", "is no text"),
    ] {
        scene.write("tuned.env", format!("{own}{text}"));
        refused(says);
    }
    scene.write("tuned.env", [0xff, 0xfe]);
    refused("is no text");
    let large = fs::File::create(scene.path("tuned.env")).unwrap();
    large.set_len(100 << 20).unwrap();
    refused("which no file of settings has");
    fs::remove_file(scene.path("tuned.env")).unwrap();
    refused("cannot be read");
    fs::os::unix::fs::symlink("tuned.env", scene.path("tuned.env")).unwrap();
    refused("cannot be read");
    fs::remove_file(scene.path("tuned.env")).unwrap();
    nix::unistd::mkfifo(&scene.path("tuned.env"), nix::sys::stat::Mode::S_IRWXU).unwrap();
    refused("is no regular file");
    assert!(!scene.path("started").exists());
    // A pipe beside the file where a run would have its manifest hangs nobody.
    fs::remove_file(scene.path("tuned.env")).unwrap();
    scene.write("tuned.env", &own);
    nix::unistd::mkfifo(&scene.path("manifest.json"), nix::sys::stat::Mode::S_IRWXU).unwrap();
    assert_eq!(start(&scene, "", &[]).status, Some(9));
}
