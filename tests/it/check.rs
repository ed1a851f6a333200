//! After an update: what changed is said, and whether the gain is still there is measured, on machines whose truth was
//! planted before and after, and on the stand-in for NCCL.

use fs_err as fs;
use serde_json::Value;

use crate::command::{Ended, Scene, assert_shown, recorded, skipped_beside_a_driver};
use crate::fakes::Machine;

const TUNE: &str = "tune --backend simulated --machine before.toml --space space.toml --sizes 64K,1M --seed 1 \
                    --pin NCCL_IB_DISABLE=1 --out X";

/// A machine on which sixteen channels take `factor` of the default's time at each of two sizes.
fn machine(name: &str, factor: [f64; 2], more: &str) -> String {
    format!(
        "format = 1\nname = \"planted\"\ndescription = \"planted by a test: {name}\"\ngpu = \"Test GPU\"\ngpus = 2\n\
         memory_mib = 98304\ncompute_capability = [12, 0]\nsizes_bytes = [65536, 1048576]\n\
         default_latency_us = [30.0, 120.0]\n\
         [noise]\nlaunch_log_sd = 0.018\nslow_launch_probability = 0.075\nslow_launch_factor = 1.08\n\
         cell_log_sd = 0.004\nreplay_log_sd = 0.01\n\
         [cost]\nlaunch_s = 1.8\ncommunicator_s = 0.3\ncell_s = 0.03\n\
         [[effect]]\nwhen = {{ NCCL_MIN_NCHANNELS = \"16\" }}\nfactor = {factor:?}\n{more}"
    )
}

/// A run that adopted sixteen channels for 8 %.
fn tuned() -> Scene {
    let scene = Scene::new();
    scene.write("before.toml", machine("before", [0.92, 0.92], ""));
    let space = "format = 1\nname = \"planted\"\ndescription = \"arms of a test\"\n\
                 [[axis]]\nvariable = \"NCCL_MIN_NCHANNELS\"\nvalues = [\"unset\", \"16\"]\n";
    scene.write("space.toml", space);
    scene.run(TUNE).ok();
    assert_eq!(scene.choice("X").winner.as_deref(), Some("MIN_NCHANNELS=16"));
    scene
}

fn check(scene: &Scene, more: &str) -> (Option<i32>, Value) {
    let ended = scene.run(&format!("check --env-file X/tuned.env --format json {more}"));
    let json = if ended.stdout.is_empty() { Value::Null } else { ended.json() };
    assert!(!json.is_null(), "{}", ended.stderr);
    (ended.status, json)
}

#[test]
fn each_update_has_its_verdict_its_status_and_its_next_step() {
    let scene = tuned();
    for (name, factor, verdict, status) in [
        ("harmless", [0.92, 0.92], "better-still", 0),
        ("gone", [1.0, 1.0], "no-longer-better", 7),
        ("worse", [1.1, 1.1], "worse-or-failing", 7),
        ("one-point", [0.85, 1.1], "worse-or-failing", 7),
    ] {
        scene.write(&format!("{name}.toml"), machine(name, factor, ""));
        let (ended, found) = check(&scene, &format!("--machine {name}.toml"));
        assert_eq!((ended, found["verdict"].as_str()), (Some(status), Some(verdict)), "{found:#}");
        assert_eq!(found["changed"][0]["part"], "simulation", "{found:#}");
        assert_eq!(found["labels"][0], "SIMULATED");
        assert!(found["wall_s"].as_f64().unwrap() < 120.0, "{found:#}");
        assert_eq!(found["points"].as_array().unwrap().len(), 2);
        let command = found["command"].as_str();
        assert_eq!(command.is_some(), status == 7, "{found:#}");
        let Some(command) = command else { continue };
        // What is printed is what can be typed: it tunes anew on the machine as it is.
        assert!(command.contains("--warm-start X") && command.contains("--pin NCCL_IB_DISABLE=1"), "{command}");
        let words: Vec<&str> = command.split_whitespace().skip(1).chain(["--out", name, "--quiet"]).collect();
        scene.run_words(&words).ok();
        assert!(scene.path(name).join("choice.json").exists());
    }
    let (status, found) = check(&scene, "");
    assert_eq!((status, found["verdict"].as_str()), (Some(0), Some("valid")), "{found:#}");
    assert_eq!(found["changed"], serde_json::json!([]));
    assert_eq!(found["not_compared"], serde_json::json!([]));
    assert!(!scene.path("X/check").exists() && found["command"].is_null());
}

#[test]
fn what_fails_after_an_update_is_told_apart_from_a_machine_that_fails() {
    let scene = Scene::new();
    scene.run("tune --backend simulated --seed 1 --no-trial --out X").ok();
    let (name, value) = scene.choice("X").env.into_iter().next().expect("it adopts something");
    let own = include_str!("../../search-spaces/machines/rtx-pro-6000-x8.toml");
    let corrupt = format!("{own}\n[[trouble]]\nkind = \"corruption\"\nprobability = 1.0\n");
    scene.write("corrupt.toml", format!("{corrupt}when = {{ {name} = \"{value}\" }}\n"));
    let (status, found) = check(&scene, "--machine corrupt.toml");
    assert_eq!((status, found["verdict"].as_str()), (Some(7), Some("worse-or-failing")), "{found:#}");
    let reason = found["reason"].as_str().unwrap();
    assert!(reason.contains("fail here, and the default runs: it gave a wrong result"), "{found:#}");
    scene.write("dead.toml", corrupt);
    let ended = scene.run("check --env-file X/tuned.env --machine dead.toml");
    assert_eq!((ended.status, ended.stdout.as_str()), (Some(4), ""), "{}", ended.stderr);
    assert!(ended.stderr.contains("the default itself does not run here"), "{}", ended.stderr);
}

#[test]
fn noise_that_hides_the_answer_is_no_answer() {
    let scene = tuned();
    let wild = machine("wild", [0.92, 0.92], "").replace("launch_log_sd = 0.018", "launch_log_sd = 0.3");
    scene.write("wild.toml", wild);
    let (status, found) = check(&scene, "--machine wild.toml");
    assert_eq!((status, found["verdict"].as_str()), (Some(0), Some("undecided")), "{found:#}");
    assert!(found["command"].as_str().unwrap().starts_with("nccltune tune "), "{found:#}");
    assert_eq!(check(&scene, "--machine wild.toml --require-decision").0, Some(5));
}

#[test]
fn without_its_run_a_file_tells_what_changed_and_no_more() {
    let scene = tuned();
    fs::create_dir(scene.path("away")).unwrap();
    fs::copy(scene.path("X/tuned.env"), scene.path("away/tuned.env")).unwrap();
    let of = |more: &str| {
        let ended = scene.run(&format!("check --env-file away/tuned.env --format json {more}"));
        (ended.status, ended.json())
    };
    let (status, found) = of("--machine before.toml");
    assert_eq!((status, found["verdict"].as_str()), (Some(0), Some("undecided")), "{found:#}");
    assert!(found["reason"].as_str().unwrap().contains("nothing that its header tells has changed"), "{found:#}");
    scene.write("after.toml", machine("after", [1.0, 1.0], ""));
    let (_, found) = of("--machine after.toml");
    assert_eq!(found["changed"][0]["part"], "simulation", "{found:#}");
    assert_eq!(found["points"], serde_json::json!([]));
    // Named, the run tells the rest.
    assert_eq!(of("--run X").1["verdict"], "valid");
    // A pipe where a run has its manifest is no run, and hangs nobody.
    nix::unistd::mkfifo(&scene.path("away/manifest.json"), nix::sys::stat::Mode::S_IRWXU).unwrap();
    assert_eq!(of("--machine before.toml").0, Some(0));
}

#[test]
fn a_file_of_real_gpus_is_not_held_against_a_machine_that_nobody_has() {
    if skipped_beside_a_driver("a file of real GPUs") {
        return;
    }
    let scene = Scene::new();
    let run = recorded("h200x2-host-memory");
    scene.write("tuned.env", scene.run(&format!("emit --run {}", run.display())).ok().stdout);
    for more in [String::new(), format!("--run {}", run.display())] {
        let ended = scene.run(&format!("check --env-file tuned.env {more}"));
        assert_eq!((ended.status, ended.stdout.as_str()), (Some(3), ""), "{}", ended.stderr);
        assert!(ended.stderr.contains("no NVIDIA driver is installed here"), "{}", ended.stderr);
    }
}

#[test]
fn what_cannot_be_checked_is_refused_with_the_reason() {
    let scene = tuned();
    let refused = |line: &str, says: &str| {
        let ended: Ended = scene.run(line);
        assert_eq!((ended.status, ended.stdout.as_str()), (Some(2), ""), "{line}: {}", ended.stderr);
        assert!(ended.stderr.contains(says), "{line}: {}", ended.stderr);
    };
    refused("check --env-file X/tuned.env --backend replay", "a replay cannot tell whether a file still holds");
    scene.write("hand.env", "NCCL_PROTO=LL\n");
    refused("check --env-file hand.env", "was not written by nccltune");
    refused("check --env-file nowhere.env", "cannot be read");
    let edited = scene.read("X/tuned.env").replace("NCCL_MIN_NCHANNELS=16", "NCCL_MIN_NCHANNELS=32");
    scene.write("X/tuned.env", edited);
    refused("check --env-file X/tuned.env", "was edited: NCCL_MIN_NCHANNELS is not as its run found it");
    let other = recorded("h200x2-host-memory").display().to_string();
    refused(&format!("check --env-file X/tuned.env --run {other}"), "is not of the run in");
}

#[test]
fn a_file_that_keeps_the_default_is_valid_until_something_changes() {
    let scene = Scene::new();
    scene.write("before.toml", machine("before", [1.0, 1.0], ""));
    scene.write("after.toml", machine("after", [0.9, 0.9], ""));
    scene.run("tune --backend simulated --machine before.toml --sizes 64K --seed 1 --out X").ok();
    assert!(scene.choice("X").winner.is_none());
    assert_eq!(check(&scene, "").1["verdict"], "valid");
    let (status, found) = check(&scene, "--machine after.toml");
    assert_eq!((status, found["verdict"].as_str()), (Some(0), Some("undecided")), "{found:#}");
    assert!(found["command"].as_str().unwrap().contains("--machine after.toml"), "{found:#}");
}

/// Figures with three digits: the rest is another compiler's business.
fn rounded(value: &mut Value) {
    match value {
        Value::Number(number) if number.is_f64() => {
            let figure = number.as_f64().unwrap_or_default();
            *value = serde_json::json!((figure * 1000.0).round() / 1000.0);
        }
        Value::Array(values) => values.iter_mut().for_each(rounded),
        Value::Object(entries) => entries.values_mut().for_each(rounded),
        _ => {}
    }
}

#[test]
fn a_check_is_told_in_every_format() {
    let scene = tuned();
    scene.write("after.toml", machine("after", [0.93, 0.93], ""));
    for format in ["text", "markdown", "csv"] {
        let ended = scene.run(&format!("check --env-file X/tuned.env --machine after.toml --format {format}")).ok();
        assert_shown(&format!("check-{format}"), &ended.stdout);
    }
    let (_, mut found) = check(&scene, "--machine after.toml");
    rounded(&mut found);
    assert_shown("check-json", &format!("{found:#}"));
}

#[test]
fn on_the_stand_in_for_nccl_launches_are_as_deployed_and_what_changed_is_named() {
    let machine = Machine::new("devices = 2\nmachine = \"check\"\nnoise = 0.005\n");
    let (status, said) = machine
        .tune("--sizes 64K,256K --space baseline --search-blocks 1 --no-trial --final-launches 6 --tables never");
    assert_eq!(status, Some(0), "{said}");
    let line = format!("check --env-file X/tuned.env --format json --nccl-lib {}", machine.library("libnccl.so.2"));
    let output = machine.command(&line.split_whitespace().collect::<Vec<_>>()).output().expect("the program starts");
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    let found: Value = serde_json::from_slice(&output.stdout).unwrap_or_else(|error| panic!("{error}: {said}"));
    assert_eq!(found["verdict"], "valid", "{found:#}");
    let manifest: Value = serde_json::from_str(&machine.scene.read("X/manifest.json")).unwrap();
    let parts = &manifest["fingerprint"]["parts"];
    for part in ["gpus", "nccl", "pcie-width", "gpu-memory-mib", "inherited-variables", "engine", "kernel"] {
        assert!(parts[part].is_string(), "{part}: {parts:#}");
    }
    // Another library, byte by byte.
    let mut manifest = manifest.clone();
    let text = parts["nccl"].as_str().unwrap().to_owned();
    let header = machine.scene.read("X/tuned.env");
    machine.scene.write("X/tuned.env", header.replace(&text, "2.20.5 0123"));
    manifest["fingerprint"]["parts"]["nccl"] = Value::from("2.20.5 0123");
    let output = machine.command(&line.split_whitespace().collect::<Vec<_>>()).output().expect("the program starts");
    let found: Value = serde_json::from_slice(&output.stdout).expect("JSON");
    assert_eq!(found["verdict"], "undecided", "{found:#}");
    assert_eq!((&found["changed"][0]["part"], &found["changed"][0]["before"]), (&"nccl".into(), &"2.20.5 0123".into()));
}
