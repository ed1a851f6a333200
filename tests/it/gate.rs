//! The smoke gate: an arm that is best at what is tuned for and breaks what a server issues beside it is
//! never adopted, on the stand-in for driver and NCCL; and in simulation, replay and after a cut nothing
//! else comes out.

use fs_err as fs;
use nccltune::record::{Choice, Event, GatePass, JournalLine, OutcomeKind, Phase, VerdictKind};

use crate::command::{Scene, journal_text};
use crate::fakes::Machine;

/// More channels, which gain at 64 KiB, alone and beside a setting that is of no use to anybody.
fn space(more: &str) -> String {
    format!(
        "format = 1\nname = \"gate\"\ndescription = \"a gain, and a gain that breaks something\"\n\
         [[arm]]\nname = \"default\"\nenv = {{}}\n\
         [[arm]]\nname = \"channels\"\nenv = {{ NCCL_MIN_NCHANNELS = \"16\" }}\n\
         [[arm]]\nname = \"broken\"\nenv = {{ {more} }}\n"
    )
}

const TUNE: &str = "--sizes 64K --engine none --space space.toml --no-trial --final-launches 4 --search-blocks 2";

fn gates(lines: &[JournalLine]) -> Vec<&GatePass> {
    let passed = lines.iter().filter_map(|line| match &line.event {
        Event::GatePassed(gate) => Some(gate),
        _ => None,
    });
    passed.collect()
}

/// Why an arm may not ship.
#[track_caller]
fn veto<'a>(choice: &'a Choice, arm: &str) -> &'a str {
    let veto = choice.vetoed.iter().find(|veto| veto.name == arm);
    veto.map_or_else(|| panic!("{arm} is not vetoed: {:?}", choice.vetoed), |veto| &veto.reason)
}

/// NCCL itself says no: a list that leaves all-gather without an algorithm shows nowhere else, since only
/// all-reduces are tuned for.
#[test]
fn an_algorithm_that_another_collective_lacks_is_refused_with_nccls_words() {
    let machine = Machine::new("devices = 2\nmachine = \"gate-tree\"\n");
    machine.scene.write("space.toml", space("NCCL_MIN_NCHANNELS = \"16\", NCCL_ALGO = \"allgather:Tree\""));
    let (status, said) = machine.tune(TUNE);
    assert_eq!(status, Some(0), "{said}");
    let choice = machine.scene.choice("X");
    assert_eq!((choice.verdict, choice.winner.as_deref()), (VerdictKind::Adopt, Some("channels")), "{said}");
    let reason = veto(&choice, "broken");
    assert!(reason.starts_with("refused: smoke gate, all-gather"), "{reason}");
    assert!(reason.contains("No algorithm/protocol available for function AllGather"), "{reason}");
    let lines = machine.scene.journal("X");
    let passed = gates(&lines);
    assert_eq!(passed.len(), 2, "the default and the other arm");
    assert!(passed.iter().all(|gate| gate.checks > 40 && gate.ll128_checks == 0 && !gate.simulated));
    assert_eq!(choice.gate.as_ref().map(|gate| gate.checks), Some(passed[0].checks));
    assert!(machine.scene.read("X/tuned.env").contains("# smoke gate: "), "{said}");
    // It comes before anybody is a finalist, and what it broke never was one.
    let chosen = lines.iter().position(|line| matches!(line.event, Event::FinalistsChosen { .. })).unwrap();
    let gate = lines.iter().position(|line| matches!(line.event, Event::GatePassed(_))).unwrap();
    assert!(gate < chosen);

    // A replay comes to the same, gate included.
    let replay = |scene: &Scene, out: &str| {
        scene.run(&format!("tune --backend replay --recorded X --out {out}")).ok();
        scene.choice(out)
    };
    let again = replay(&machine.scene, "again");
    assert_eq!((again.verdict, &again.winner, &again.gate), (choice.verdict, &choice.winner, &choice.gate));
    assert_eq!(veto(&again, "broken"), reason);
    // And the same without one: a run of a version that had none stays what it was.
    machine.scene.copy_run(&machine.scene.path("X"), "older", &[]);
    let mut manifest: serde_json::Value = serde_json::from_str(&machine.scene.read("X/manifest.json")).unwrap();
    manifest.as_object_mut().unwrap().remove("gate").expect("a gate in the manifest");
    machine.scene.write("older/manifest.json", serde_json::to_string(&manifest).unwrap());
    let gate_block = lines.iter().find_map(|line| match line.event {
        Event::BlockPlanned { block, phase: Phase::Gate, .. } => Some(block),
        _ => None,
    });
    let is_gate_block = |block: u32| Some(block) == gate_block;
    let kept: Vec<JournalLine> = lines
        .iter()
        .filter(|line| match &line.event {
            Event::BlockPlanned { block, .. }
            | Event::BlockEnded { block }
            | Event::LaunchStarted { block, .. }
            | Event::CellFailed { block, .. } => !is_gate_block(*block),
            Event::GatePassed(_) => false,
            _ => true,
        })
        .zip(0..)
        .map(|(line, sequence)| JournalLine { sequence, ..line.clone() })
        .collect();
    machine.scene.write("older/run.jsonl", journal_text(&kept));
    machine.scene.run("tune --backend replay --recorded older --out older-again").ok();
    let older = machine.scene.choice("older-again");
    assert_eq!((older.verdict, older.gate), (VerdictKind::Adopt, None));
}

/// A collective that computes nonsense under a setting, in one element, on one rank.
#[test]
fn a_wrong_element_in_a_collective_that_nobody_tunes_for_is_refused() {
    let machine = Machine::new(
        "devices = 2\nmachine = \"gate-wrong\"\n\
         [[fault]]\nkind = \"wrong-sum\"\ncollective = \"Broadcast\"\nrank = 1\nwhen = { NCCL_NTHREADS = \"256\" }\n",
    );
    machine.scene.write("space.toml", space("NCCL_MIN_NCHANNELS = \"16\", NCCL_NTHREADS = \"256\""));
    let (status, said) = machine.tune(TUNE);
    assert_eq!(status, Some(0), "{said}");
    let choice = machine.scene.choice("X");
    assert_eq!(choice.winner.as_deref(), Some("channels"), "{said}");
    let reason = veto(&choice, "broken");
    assert!(reason.starts_with("wrong-result: smoke gate, broadcast") && reason.contains("1 of "), "{reason}");

    // A run that was cut in the gate goes on with what is left of it.
    let lines = machine.scene.journal("X");
    let first = lines.iter().position(|line| matches!(line.event, Event::GatePassed(_))).unwrap();
    machine.scene.copy_run(&machine.scene.path("X"), "cut", &["manifest.json"]);
    machine.scene.write("cut/run.jsonl", journal_text(&lines[..=first]));
    let mut resumed = machine.tune_command("--resume");
    fs::rename(machine.scene.path("X"), machine.scene.path("whole")).unwrap();
    fs::rename(machine.scene.path("cut"), machine.scene.path("X")).unwrap();
    let output = resumed.output().unwrap();
    assert_eq!(output.status.code(), Some(0), "{}", String::from_utf8_lossy(&output.stderr));
    let after = machine.scene.choice("X");
    assert_eq!((after.verdict, &after.winner), (choice.verdict, &choice.winner));
    let lines = machine.scene.journal("X");
    let mut passed: Vec<String> = gates(&lines).iter().map(|gate| gate.arm.0.clone()).collect();
    let all = passed.len();
    passed.sort();
    passed.dedup();
    assert_eq!((all, passed.len()), (2, 2), "nobody passes twice");
}

/// The default fails: that is the machine's fault, and nothing is adopted.
#[test]
fn a_default_that_fails_the_gate_leaves_the_run_undecided() {
    let machine = Machine::new(
        "devices = 2\nmachine = \"gate-default\"\n\
         [[fault]]\nkind = \"error\"\ncall = \"ncclReduceScatter\"\ncode = 3\ntext = \"reduce-scatter is ill\"\n",
    );
    machine.scene.write("space.toml", space("NCCL_MIN_NCHANNELS = \"8\""));
    let (status, said) = machine.tune(TUNE);
    assert_eq!(status, Some(0), "{said}");
    let choice = machine.scene.choice("X");
    assert_eq!((choice.verdict, choice.winner), (VerdictKind::Undecided, None));
    assert!(
        choice.reason.contains("the default itself fails") && choice.reason.contains("is ill"),
        "{}",
        choice.reason
    );
}

/// LL128 by name goes through many sizes, repeats and both placements, and is said with its result.
#[test]
fn ll128_is_adopted_only_behind_its_long_check() {
    let tune = |name: &str, fault: &str| {
        let machine = Machine::new(&format!("devices = 2\nmachine = \"{name}\"\n{fault}"));
        let arm = "NCCL_PROTO = \"allreduce:LL128\", NCCL_MIN_NCHANNELS = \"16\"";
        machine.scene.write("space.toml", space(arm));
        // At this size LL128 carries more than LL, which NCCL would choose.
        let tune = TUNE.replace("64K", "256K");
        let (status, said) = machine.tune(&format!("{tune} --allow-risk unverified-platform"));
        assert_eq!(status, Some(0), "{said}");
        machine
    };
    let machine = tune("gate-ll128", "");
    let choice = machine.scene.choice("X");
    let lines = machine.scene.journal("X");
    let long: Vec<_> = gates(&lines).into_iter().filter(|gate| gate.ll128_checks > 0).collect();
    assert_eq!(long.len(), 1, "the arm that enables it and no other");
    assert!(long[0].ll128_checks > 200 && long[0].checks > long[0].ll128_checks);
    assert_eq!(choice.winner.as_deref(), Some("broken"), "{}", choice.reason);
    assert_eq!(choice.gate.as_ref().map(|gate| gate.ll128_checks), Some(long[0].ll128_checks));
    assert!(machine.scene.read("X/tuned.env").contains("# LL128 check: "));

    // One element in one of many runs: no cell of search and final issues so many.
    let rare = "[[fault]]\nkind = \"wrong-sum\"\nprotocol = \"LL128\"\nat = 70\n";
    let machine = tune("gate-ll128-rare", rare);
    let choice = machine.scene.choice("X");
    assert_eq!(choice.winner.as_deref(), Some("channels"), "{}", choice.reason);
    let reason = veto(&choice, "broken");
    assert!(reason.starts_with("wrong-result: smoke gate, all-reduce") && reason.contains("in repeat"), "{reason}");
    let failed: Vec<_> = machine
        .scene
        .journal("X")
        .into_iter()
        .filter_map(|line| match line.event {
            Event::CellFailed { outcome, point, .. } => Some((outcome.kind, point)),
            _ => None,
        })
        .collect();
    assert!(matches!(failed.as_slice(), [(OutcomeKind::WrongResult, Some(_))]), "{failed:?}");
}

#[test]
fn in_simulation_the_gate_is_passed_and_nobody_takes_it_for_a_check() {
    let scene = Scene::new();
    scene.run("tune --backend simulated --out X").ok();
    let choice = scene.choice("X");
    let lines = scene.journal("X");
    let passed = gates(&lines);
    assert!(!passed.is_empty() && passed.iter().all(|gate| gate.simulated));
    assert!(choice.gate.as_ref().expect("the winner passed it").simulated);
    assert!(choice.notes.iter().any(|note| note.contains("without checking anything")), "{:?}", choice.notes);
    let file = scene.read("X/tuned.env");
    assert!(file.contains("smoke gate: passed in simulation only; nothing was checked"), "{file}");
    assert!(!file.contains("every element right"), "{file}");
}
