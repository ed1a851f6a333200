//! What earlier runs remember of arms that hung, crashed or corrupted: where it lies, who reads it, and
//! that no content of the file harms anybody.
//!
//! Without a GPU nothing can hang, so the file is planted. Which arms it keeps out of a run, and how a
//! run writes it, is tested where the code is (`src/quarantine/`, `src/flow/quarantine.rs`).

use std::collections::BTreeMap;

use nccltune::record::{FORMAT, FingerprintParts, Outcome, OutcomeKind, QuarantineEntry, QuarantineFile, VerdictKind};
use serde_json::Value;

use crate::command::{Scene, skipped_beside_a_driver};

const SIMULATED: &str = "tune --backend simulated --space baseline --sizes 64K --retry-quarantined --out run";

fn file(names: &[&str]) -> String {
    let entry = |name: &&str| QuarantineEntry {
        machine: FingerprintParts { combined: "0".repeat(64), parts: BTreeMap::new() },
        arm: (*name).to_owned(),
        env: BTreeMap::from([("NCCL_MIN_NCHANNELS".to_owned(), "32".to_owned())]),
        outcome: Outcome { kind: OutcomeKind::TimedOut, detail: "no answer from rank 1".to_owned() },
        since: "2026-11-30T09:14:07Z".to_owned(),
        run: "/srv/results/box".to_owned(),
    };
    let file = QuarantineFile { format: FORMAT, entries: names.iter().map(entry).collect() };
    serde_json::to_string_pretty(&file).expect("a record is JSON")
}

/// What doctor says of it, with these variables; paths are below the scene.
#[track_caller]
fn doctor(scene: &Scene, variables: &[(&str, &str)]) -> Value {
    let mut command = scene.command(&["doctor", "--format", "json"]);
    for (name, folder) in variables {
        command.env(name, scene.path(folder));
    }
    let output = command.output().expect("the program starts");
    assert!(matches!(output.status.code(), Some(0 | 3)), "{}", String::from_utf8_lossy(&output.stderr));
    let report: Value = serde_json::from_slice(&output.stdout).expect("JSON");
    let checks = report["checks"].as_array().expect("a list");
    checks.iter().find(|check| check["name"] == "quarantine").expect("the check").clone()
}

#[test]
fn doctor_finds_the_file_where_the_environment_says() {
    if skipped_beside_a_driver("doctor_finds_the_file_where_the_environment_says") {
        return;
    }
    let scene = Scene::new();
    scene.write("own/quarantine.json", file(&["own"]));
    scene.write("desktop/nccltune/quarantine.json", file(&["desktop"]));
    scene.write("home/.local/state/nccltune/quarantine.json", file(&["home"]));
    let (own, desktop, home) = (("NCCLTUNE_STATE_DIR", "own"), ("XDG_STATE_HOME", "desktop"), ("HOME", "home"));
    for (variables, name) in [(&[own, desktop, home][..], "own"), (&[desktop, home], "desktop"), (&[home], "home")] {
        let check = doctor(&scene, variables);
        assert_eq!(check["verdict"], "warn", "{check}");
        let evidence = check["evidence"].as_str().expect("text");
        let words = format!("1 setting failed in earlier runs: {name} hung (2026-11-30T09:14:07Z)");
        assert!(evidence.starts_with(&words), "{evidence}");
        let advice = check["advice"].as_str().expect("text");
        assert!(advice.contains("--retry-quarantined") && advice.contains("quarantine.json"), "{advice}");
    }
    assert_eq!(doctor(&scene, &[("NCCLTUNE_STATE_DIR", "none")])["verdict"], "pass");
    assert_eq!(doctor(&scene, &[])["verdict"], "unknown");
    assert!(!scene.path("none").exists(), "looking makes nothing");
}

#[test]
fn no_content_of_the_file_harms_doctor() {
    let scene = Scene::new();
    let large = format!("{{\"format\": 1, \"entries\": [], \"more\": \"{}\"}}", "x".repeat(1 << 20));
    let deep = "[".repeat(100_000);
    let hostile = file(&["\u{1b}[2J\u{202e}\n"]);
    let contents: [&[u8]; 8] = [
        b"",
        b"\xff\xfe\x00",
        b"null",
        b"{\"format\": 1, \"entries\": 1}",
        b"{\"format\": 2}",
        deep.as_bytes(),
        large.as_bytes(),
        hostile.as_bytes(),
    ];
    for content in contents {
        scene.write("state/quarantine.json", content);
        let check = doctor(&scene, &[("NCCLTUNE_STATE_DIR", "state")]);
        let shown = format!("{check}");
        if content != hostile.as_bytes() {
            assert_eq!(check["verdict"], "warn", "{shown}");
            assert!(shown.contains("quarantine.json"), "{shown}");
        }
        assert!(!shown.contains("\\u001b") && !shown.contains('\u{202e}'), "{shown}");
        assert_eq!(fs_err::read(scene.path("state/quarantine.json")).expect("the file"), content);
    }
}

#[test]
fn simulated_and_replayed_runs_neither_read_nor_write_it() {
    let scene = Scene::new();
    // A file that would be complained of.
    scene.write("state/quarantine.json", "garbage");
    let run = |line: &str, state: &str| {
        let mut command = scene.command(&line.split_whitespace().collect::<Vec<_>>());
        command.env("NCCLTUNE_STATE_DIR", scene.path(state));
        let output = command.output().expect("the program starts");
        let said = String::from_utf8(output.stderr).expect("text");
        assert!(output.status.success(), "{said}");
        assert!(!said.contains("quarantine.json"), "{said}");
    };
    run(SIMULATED, "state");
    assert_eq!(scene.read("state/quarantine.json"), "garbage");
    run(&SIMULATED.replace("--out run", "--out other"), "none");
    run("tune --recorded run --out replayed", "none");
    assert!(!scene.path("none").exists());
    let choice = scene.choice("run");
    assert_ne!(choice.verdict, VerdictKind::Adopt);
    assert!(choice.quarantined.is_empty());
    assert!(!scene.read("run/choice.json").contains("quarantined"), "an empty list is not written");
    assert!(!scene.read("run/manifest.json").contains("\"quarantined\""));
}
