//! What processes of a server were started with, on planted trees of /proc and on real processes.

use std::process::{Child, Command, Stdio};

use fs_err as fs;
use serde_json::Value;

use crate::command::{Scene, wait_for};

const NCCL: &str = "/opt/nccl/libnccl.so.2";

/// A file that sets two variables, with the hash of the library it was measured with.
fn scene() -> Scene {
    let scene = Scene::new();
    let hash = nccltune::canonical::Fingerprint::of_bytes(b"library");
    let header = format!("# nccltune 0.1.0: x\n# measured with: nccl = 2.28.9 {}\n", hash.as_str());
    scene.write("tuned.env", format!("{header}NCCL_PROTO=LL\nNCCL_MIN_NCHANNELS=16\n"));
    scene.write("box/opt/nccl/libnccl.so.2", "library");
    scene
}

/// A process: its id and parent, its title, its environment with | for zeros, and the libraries it has mapped.
fn plant(scene: &Scene, (id, parent): (u32, u32), title: &str, environment: Option<&str>, libraries: &[&str]) {
    let folder = format!("box/proc/{id}");
    scene.write(&format!("{folder}/stat"), format!("{id} ({title}) S {parent} 1\n"));
    scene.write(&format!("{folder}/cmdline"), title);
    if let Some(environment) = environment {
        scene.write(&format!("{folder}/environ"), environment.replace('|', "\0"));
    }
    let maps: Vec<String> =
        libraries.iter().map(|path| format!("7f00-7f10 r-xp 00000000 08:01 123          {path}\n")).collect();
    scene.write(&format!("{folder}/maps"), maps.concat());
}

const WHOLE: &str = "PATH=/bin|NCCL_PROTO=LL|NCCL_MIN_NCHANNELS=16|";

fn verify(scene: &Scene, more: &str) -> (Option<i32>, Value) {
    let ended = scene.run(&format!("exec --env-file tuned.env --verify --root box --format json {more}"));
    assert!(!ended.stdout.is_empty(), "{}", ended.stderr);
    (ended.status, ended.json())
}

fn process(found: &Value, id: u32) -> &Value {
    let processes = found["processes"].as_array().expect("a list");
    processes.iter().find(|process| process["process_id"] == id).unwrap_or_else(|| panic!("{id}: {found:#}"))
}

#[test]
fn a_tree_whose_ranks_have_everything_is_shown() {
    let scene = scene();
    plant(&scene, (10, 1), "launcher", Some("PATH=/bin|"), &["/lib/libc.so.6"]);
    plant(&scene, (11, 10), "sglang::scheduler_TP0", Some(WHOLE), &[NCCL, "/opt/nccl/libnccl-net.so"]);
    plant(&scene, (12, 10), "sglang::scheduler_TP1", Some(WHOLE), &[NCCL]);
    plant(&scene, (20, 1), "somebody else's", Some(""), &["/other/libnccl.so.2"]);
    let (status, found) = verify(&scene, "--pid 10");
    assert_eq!((status, found["verdict"].as_str()), (Some(0), Some("shown")), "{found:#}");
    assert_eq!(found["processes"].as_array().unwrap().len(), 3);
    // Without an id whatever has a libnccl counts, and the other one lacks everything.
    let (status, found) = verify(&scene, "");
    assert_eq!((status, found["verdict"].as_str()), (Some(3), Some("lacking")), "{found:#}");
    assert_eq!(found["processes"].as_array().unwrap().len(), 3, "the launcher has no NCCL: {found:#}");
    let ended = scene.run("exec --env-file tuned.env --verify --root box --pid 77");
    assert!(ended.status == Some(2) && ended.stderr.contains("there is no process 77"), "{}", ended.stderr);
}

#[test]
fn which_process_lacks_what_is_told() {
    let of = |environment: Option<&str>, libraries: &[&str]| {
        let scene = scene();
        plant(&scene, (10, 1), "server", Some(WHOLE), &[]);
        plant(&scene, (11, 10), "rank", environment, libraries);
        let (_, found) = verify(&scene, "--pid 10");
        (found["verdict"].as_str().unwrap().to_owned(), process(&found, 11).clone())
    };
    let (verdict, rank) = of(Some("PATH=/bin|NCCL_PROTO=Simple|"), &[NCCL]);
    assert_eq!(verdict, "lacking");
    let lacking = rank["lacking"].as_array().unwrap();
    assert_eq!((lacking[0]["variable"].as_str(), lacking[0]["found"].as_str()), (Some("NCCL_PROTO"), Some("Simple")));
    assert_eq!((lacking[1]["variable"].as_str(), lacking[1]["found"].as_str()), (Some("NCCL_MIN_NCHANNELS"), None));
    for (environment, libraries, verdict, says) in [
        (Some(WHOLE), &[NCCL, "/usr/lib/libnccl.so.2"][..], "lacking", "2 libnccls are mapped at once"),
        (Some(WHOLE), &["/usr/lib/libnccl.so.2"], "unknown", "cannot be read, so whether it was measured"),
        (Some(WHOLE), &["/opt/nccl/libnccl.so.2 (deleted)"], "lacking", "its file was replaced"),
        (Some("|||||otal_TP0|PATH=/bin|"), &[NCCL], "unknown", "SPT_NOENV=1"),
        (Some("|||||otal_TP0|NCCL_PROTO=Simple|"), &[NCCL], "lacking", "SPT_NOENV=1"),
        (None, &[NCCL], "unknown", "shows no environment"),
    ] {
        let (found, rank) = of(environment, libraries);
        assert_eq!(found, verdict, "{rank:#}");
        assert!(rank["remarks"].to_string().contains(says), "{says}: {rank:#}");
    }
    // Another library than the one that was measured, by what it holds and not by its path.
    let scene = scene();
    scene.write("box/opt/nccl/libnccl.so.2", "another");
    plant(&scene, (11, 1), "rank", Some(WHOLE), &[NCCL]);
    let (status, found) = verify(&scene, "--pid 11");
    assert_eq!((status, found["verdict"].as_str()), (Some(3), Some("lacking")), "{found:#}");
    assert!(process(&found, 11)["remarks"].to_string().contains("another libnccl than the one"), "{found:#}");
    // The plugin of a table must be mapped, or the table is ignored in silence.
    scene.write("box/opt/nccl/libnccl.so.2", "library");
    let own = scene.read("tuned.env");
    scene.write("tuned.env", format!("{own}NCCL_TUNER_PLUGIN=/opt/run/libnccltune_tuner.so\n"));
    let with = format!("{WHOLE}NCCL_TUNER_PLUGIN=/opt/run/libnccltune_tuner.so|");
    plant(&scene, (11, 1), "rank", Some(&with), &[NCCL]);
    assert_eq!(verify(&scene, "--pid 11").1["verdict"], "lacking");
    plant(&scene, (11, 1), "rank", Some(&with), &[NCCL, "/opt/run/libnccltune_tuner.so"]);
    assert_eq!(verify(&scene, "--pid 11").1["verdict"], "shown");
}

#[test]
fn a_server_without_nccl_and_hostile_trees_are_no_proof() {
    let scene = scene();
    plant(&scene, (10, 1), "server", Some(WHOLE), &["/lib/libc.so.6"]);
    let (status, found) = verify(&scene, "--pid 10");
    assert_eq!((status, found["verdict"].as_str()), (Some(3), Some("unknown")), "{found:#}");
    assert!(found["reason"].as_str().unwrap().contains("no process that can be seen has a libnccl"), "{found:#}");
    // A pipe hangs nobody, a link in a circle and a folder are nothing that can be read, a loop of parents ends.
    plant(&scene, (11, 12), "a", None, &[NCCL]);
    plant(&scene, (12, 11), "b\u{1b}[2J", Some(WHOLE), &[]);
    nix::unistd::mkfifo(&scene.path("box/proc/11/environ"), nix::sys::stat::Mode::S_IRWXU).unwrap();
    fs::remove_file(scene.path("box/proc/12/maps")).unwrap();
    fs::os::unix::fs::symlink("maps", scene.path("box/proc/12/maps")).unwrap();
    fs::create_dir_all(scene.path("box/proc/13/stat")).unwrap();
    let (status, found) = verify(&scene, "--pid 11");
    assert_eq!((status, found["processes"].as_array().unwrap().len()), (Some(3), 2), "{found:#}");
    let text = scene.run("exec --env-file tuned.env --verify --root box --pid 11").stdout;
    assert!(!text.contains('\u{1b}'), "{text:?}");
}

/// Ended when it is dropped.
struct Tree(Child);

impl Drop for Tree {
    fn drop(&mut self) {
        // Its children are of its group, and end with it.
        let group = nix::unistd::Pid::from_raw(i32::try_from(self.0.id()).expect("a process id"));
        let _ = nix::sys::signal::killpg(group, nix::sys::signal::Signal::SIGKILL);
        let _ = self.0.wait();
    }
}

#[test]
fn real_processes_are_read_and_one_that_cleared_its_environment_is_named() {
    let scene = scene();
    let script = "sleep 60 & env -i sleep 61 & wait";
    let mut command: Command = scene.command(&["exec", "--env-file", "tuned.env", "--force", "--quiet", "--"]);
    command.args(["sh", "-c", script]).stdout(Stdio::null()).stderr(Stdio::null());
    std::os::unix::process::CommandExt::process_group(&mut command, 0);
    let tree = Tree(command.spawn().expect("the program starts"));
    let line = format!("exec --env-file tuned.env --verify --format json --pid {}", tree.0.id());
    let found = wait_for("both have begun", || {
        let found = scene.run(&line).json();
        let names: Vec<String> =
            found["processes"].as_array()?.iter().map(|process| process["name"].to_string()).collect();
        let both = ["\"sleep 60\"", "\"sleep 61\""].iter().all(|name| names.iter().any(|known| known == name));
        both.then_some(found)
    });
    let of = |name: &str| {
        let processes = found["processes"].as_array().unwrap();
        processes.iter().find(|process| process["name"] == name).unwrap()["lacking"].as_array().unwrap().len()
    };
    assert_eq!((of("sleep 60"), of("sleep 61")), (0, 2), "{found:#}");
}
