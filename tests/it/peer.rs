//! The gate in front of peer access, collectives that overlap, and links that were asleep: whole runs on
//! the stand-in, with each tier holding, failing and hanging, and what must come of it.

use std::time::{Duration, Instant};

use fs_err as fs;
use nccltune::record::{Event, Manifest, OutcomeKind, PeerOutcome, PeerReport, PeerTier, QuarantineFile, VerdictKind};

use crate::command::{Scene, cells, manifest_in};
use crate::fakes::Machine;
use crate::faults::processes_in;

const SPACE: &str = "format = 1\nname = \"peers\"\ndescription = \"a path behind a gate, and one that is not\"\n\
                     [[axis]]\nvariable = \"NCCL_P2P_LEVEL\"\nvalues = [\"unset\", \"SYS\"]\n\
                     [[axis]]\nvariable = \"NCCL_MIN_NCHANNELS\"\nvalues = [\"unset\", \"16\"]\n";
/// The longest a phase may take where something hangs, and what a run may take beside it on a busy machine.
const PHASE_LIMIT: &str = "--phase-limit 6s";
const PATIENCE: Duration = Duration::from_secs(240);

/// A short run on a machine whose GPUs reach each other across the host bridge, unless it says otherwise.
fn run(name: &str, scenario: &str, more: &str) -> (Machine, Option<i32>, String) {
    let transport = if scenario.contains("transport") { "" } else { "transport = \"bridge\"\n" };
    let machine = Machine::new(&format!("devices = 2\nmachine = \"peer-{name}\"\n{transport}{scenario}"));
    machine.scene.write("space.toml", SPACE);
    let (status, said) = again(&machine, more);
    (machine, status, said)
}

fn again(machine: &Machine, more: &str) -> (Option<i32>, String) {
    let started = Instant::now();
    let end = machine.tune(&format!(
        "--sizes 4K,64K --engine none --space space.toml --no-trial --search-blocks 1 --final-launches 4 {more}"
    ));
    assert!(started.elapsed() < PATIENCE, "{:?}: {}", started.elapsed(), end.1);
    assert_eq!(processes_in(&machine.scene.path("")), None, "{}", end.1);
    end
}

fn manifest(machine: &Machine) -> Manifest {
    manifest_in(&machine.scene.path("X"))
}

fn has_peers(manifest: &Manifest) -> bool {
    manifest.arms.iter().any(|arm| arm.env.contains_key("NCCL_P2P_LEVEL"))
}

/// The report of a run whose gate stayed shut: the other arms were measured, and the answer tells why.
#[track_caller]
fn shut(machine: &Machine, (status, said): (Option<i32>, &str)) -> PeerReport {
    assert_eq!(status, Some(0), "{said}");
    let manifest = manifest(machine);
    assert!(!has_peers(&manifest), "{:?}", manifest.arms);
    assert_eq!(manifest.arms.len(), 2, "the rest of the space is measured: {said}");
    let report = manifest.peer_access.expect("a report");
    assert!(said.contains(&format!("NCCL_P2P_LEVEL is left out: peer access: {}", report.reason)), "{said}");
    assert_eq!(machine.scene.choice("X").peer_access.as_ref(), Some(&report));
    report
}

fn remembered(scene: &Scene) -> Vec<(OutcomeKind, String)> {
    let Ok(text) = fs::read_to_string(scene.path("remembered/quarantine.json")) else { return Vec::new() };
    let file: QuarantineFile = serde_json::from_str(&text).expect("a file that can be read");
    file.entries.into_iter().map(|entry| (entry.outcome.kind, entry.outcome.detail)).collect()
}

#[test]
fn what_passed_every_tier_twice_is_measured_like_any_axis() {
    let (machine, status, said) = run("passes", "", "--peer-access test");
    assert_eq!(status, Some(0), "{said}");
    let whole = manifest(&machine);
    let report = whole.peer_access.clone().expect("a report");
    assert_eq!((report.outcome, report.ranks), (PeerOutcome::Passed, 2), "{report:?}");
    let steps: Vec<(u32, PeerTier)> = report.steps.iter().map(|step| (step.round, step.tier)).collect();
    let tiers = [PeerTier::Granted, PeerTier::Copied, PeerTier::Reduced];
    let twice: Vec<(u32, PeerTier)> = [1, 2].into_iter().flat_map(|round| tiers.map(|tier| (round, tier))).collect();
    assert_eq!(steps, twice);
    assert!(report.steps.iter().all(|step| step.passed), "{report:?}");
    assert!(report.steps[2].detail.contains("via P2P/CUMEM"), "{report:?}");
    assert_eq!(whole.arms.len(), 4);
    let lines = machine.scene.journal("X");
    for cell in cells(&lines) {
        let arm = whole.arms.iter().find(|arm| arm.id == cell.arm).expect("an arm of the run");
        let way = cell.effective.transport.as_deref().expect("a transport");
        assert_eq!(way.starts_with("P2P/"), arm.env.contains_key("NCCL_P2P_LEVEL"), "{}: {way}", arm.name);
    }
    assert_eq!(machine.scene.choice("X").peer_access, Some(report));
    assert!(said.contains("passed: access granted, bytes moved and read back, collectives checked"), "{said}");
    assert!(remembered(&machine.scene).is_empty());

    // Whoever goes on does not test again.
    let (status, said) = again(&machine, "--resume --peer-access test");
    assert_eq!(status, Some(0), "{said}");
    assert!(!said.contains("testing whether"), "{said}");
    assert_eq!(manifest(&machine).peer_access, whole.peer_access);
}

#[test]
fn what_the_driver_or_nvml_does_not_grant_is_not_tried() {
    let (machine, status, said) = run("denied", "transport = \"shm\"\n", "--peer-access test");
    let report = shut(&machine, (status, &said));
    assert_eq!(report.outcome, PeerOutcome::Failed);
    assert!(report.reason.contains("the driver denies it from GPU 0 to GPU 1"), "{report:?}");
    assert_eq!(report.steps.len(), 1);

    let silent = "[[fault]]\nkind = \"probe-not-supported\"\ncall = \"nvmlDeviceGetP2PStatus\"\n";
    let (machine, status, said) = run("unknown", silent, "--peer-access test");
    let report = shut(&machine, (status, &said));
    assert!(report.reason.contains("NVML does not say from GPU 0 to GPU 1"), "{report:?}");
    assert!(remembered(&machine.scene).is_empty(), "what fails fast is found out anew");
}

#[test]
fn bytes_that_do_not_arrive_shut_the_gate_and_later_runs_do_not_try() {
    let lost = "[[fault]]\nkind = \"lost-copy\"\nat = 3\n";
    let (machine, status, said) = run("lost", lost, "--peer-access test");
    let report = shut(&machine, (status, &said));
    assert_eq!(report.outcome, PeerOutcome::Failed);
    assert!(report.reason.contains("1048576 bytes that were pushed from GPU 0 to GPU 1"), "{report:?}");
    assert!(said.contains("failed: not bytes moved and read back"), "{said}");
    assert_eq!(remembered(&machine.scene)[0].0, OutcomeKind::WrongResult);
    fs::remove_dir_all(machine.scene.path("X")).unwrap();
    let (status, said) = again(&machine, "");
    let report = shut(&machine, (status, &said));
    assert_eq!(report.outcome, PeerOutcome::Skipped);
    assert!(report.suspicions.iter().any(|why| why.contains("gave a wrong result here")), "{report:?}");
    assert!(report.steps.is_empty() && report.reason.contains("--peer-access test"), "{report:?}");
}

#[test]
fn copies_that_hang_or_are_refused_shut_the_gate() {
    let hang = "[[fault]]\nkind = \"hang\"\ncall = \"cuMemcpyPeerAsync\"\n";
    let (machine, status, said) = run("copy-hangs", hang, &format!("--peer-access test {PHASE_LIMIT}"));
    let report = shut(&machine, (status, &said));
    assert!(report.reason.contains("no answer within 18 s while copying between GPUs"), "{report:?}");
    assert_eq!(remembered(&machine.scene)[0].0, OutcomeKind::TimedOut);
    let refused = "[[fault]]\nkind = \"error\"\ncall = \"cuCtxEnablePeerAccess\"\ncode = 217\n";
    let (machine, status, said) = run("refused", refused, "--peer-access test");
    let report = shut(&machine, (status, &said));
    assert!(report.reason.contains("CUDA_ERROR_PEER_ACCESS_UNSUPPORTED"), "{report:?}");
}

#[test]
fn collectives_that_hang_or_add_up_wrong_shut_the_gate() {
    let hang = "[[fault]]\nkind = \"hang\"\nphase = \"collective\"\nat = 1\nwhen = { NCCL_P2P_LEVEL = \"SYS\" }\n";
    let (machine, status, said) = run("hangs", hang, &format!("--peer-access test {PHASE_LIMIT}"));
    let report = shut(&machine, (status, &said));
    assert!(report.reason.contains("not collectives checked: timed-out"), "{report:?}");
    assert_eq!(report.steps.last().map(|step| (step.tier, step.passed)), Some((PeerTier::Reduced, false)));
    assert!(report.steps[2].duration_s < 40.0, "{report:?}");
    assert_eq!(remembered(&machine.scene)[0].0, OutcomeKind::TimedOut);
    assert!(
        machine
            .scene
            .path("X/logs")
            .read_dir()
            .unwrap()
            .flatten()
            .any(|entry| { entry.file_name().to_string_lossy().starts_with("before-launch") }),
        "what the workers printed is kept"
    );

    // Once is not enough: the second round is a launch of its own.
    let second = "[[fault]]\nkind = \"wrong-sum\"\nlaunches = [3, 3]\nwhen = { NCCL_P2P_LEVEL = \"SYS\" }\n";
    let (machine, status, said) = run("second", second, "--peer-access test");
    let report = shut(&machine, (status, &said));
    assert_eq!(report.steps.len(), 6, "{report:?}");
    assert!(report.reason.contains("wrong-result"), "{report:?}");
}

#[test]
fn a_gpu_that_no_longer_answers_ends_everything_and_is_remembered() {
    let wedged = "[[fault]]\nkind = \"die\"\nphase = \"collective\"\nrank = 1\nwhen = { NCCL_P2P_LEVEL = \"SYS\" }\n\
                  [[fault]]\nkind = \"busy-after-kill\"\nmebibytes = 4096\n";
    let (machine, status, said) = run("wedged", wedged, &format!("--peer-access test {PHASE_LIMIT}"));
    assert_eq!(status, Some(3), "{said}");
    assert!(said.contains("no longer answers after peer access was tested") && said.contains("reset"), "{said}");
    assert!(!machine.scene.path("X/run.jsonl").exists(), "nothing was measured");
    let [(kind, detail)] = &remembered(&machine.scene)[..] else { panic!("one entry") };
    assert_eq!(*kind, OutcomeKind::TimedOut);
    assert!(detail.contains("never ended"), "{detail}");
}

#[test]
fn where_it_is_in_use_pinned_off_or_unwanted_there_is_no_gate() {
    let (machine, status, said) = run("in-use", "transport = \"p2p\"\n", "--peer-access test");
    let report = shut(&machine, (status, &said));
    assert_eq!(report.outcome, PeerOutcome::InUse);

    let (machine, status, said) = run("never", "", "--peer-access never --allow-risk hang-prone");
    assert_eq!(shut(&machine, (status, &said)).outcome, PeerOutcome::Skipped);

    let (machine, status, said) = run("pinned", "", "--peer-access test --pin NCCL_P2P_DISABLE=1");
    assert_eq!(status, Some(0), "{said}");
    assert!(!has_peers(&manifest(&machine)) && manifest(&machine).peer_access.is_none());
    assert!(said.contains("NCCL_P2P_LEVEL has no effect while NCCL_P2P_DISABLE=1"), "{said}");

    // A risk that is taken by name is taken as before.
    let (machine, status, said) = run("risk", "", "--allow-risk hang-prone");
    assert_eq!(status, Some(0), "{said}");
    assert!(has_peers(&manifest(&machine)) && manifest(&machine).peer_access.is_none());
}

#[test]
fn a_plan_tells_of_the_gate_and_tries_nothing() {
    let machine = Machine::new("devices = 2\nmachine = \"peer-plan\"\ntransport = \"bridge\"\n");
    machine.scene.write("space.toml", SPACE);
    let (status, said) = again(&machine, "--dry-run --peer-access test");
    assert_eq!(status, Some(0), "{said}");
    assert!(said.contains("2 arms wait for a test of peer access"), "{said}");
    assert!(!said.contains("testing whether") && !machine.scene.path("X").exists(), "{said}");
}

/// A run whose arm no longer keeps captured and uncaptured collectives apart.
fn mixing(name: &str, scenario: &str, more: &str) -> (Machine, String) {
    let machine = Machine::new(&format!("devices = 2\nnoise = 0.002\nmachine = \"mixing-{name}\"\n{scenario}"));
    machine.scene.write(
        "space.toml",
        "format = 1\nname = \"mixing\"\ndescription = \"one arm\"\n\
         [[arm]]\nname = \"mixing-off\"\nenv = { NCCL_GRAPH_MIXING_SUPPORT = \"0\" }\n",
    );
    let (status, said) = machine.tune(&format!(
        "--sizes 4K --space space.toml --no-trial --search-blocks 1 --final-launches 6 --allow-risk unsafe-mixing \
         --overlap-time 1s {more}"
    ));
    assert_eq!(status, Some(0), "{said}");
    assert_eq!(processes_in(&machine.scene.path("")), None, "{said}");
    (machine, said)
}

#[test]
fn mixing_off_ships_only_for_a_release_that_was_read_and_never_as_safe() {
    let (machine, said) = mixing("known", "", "--engine sglang --engine-version 0.5.3");
    let choice = machine.scene.choice("X");
    assert_eq!((choice.verdict, choice.winner.as_deref()), (VerdictKind::Adopt, Some("mixing-off")), "{said}");
    let checked = machine.scene.journal("X").into_iter().find_map(|line| match line.event {
        Event::OverlapChecked { check, .. } => Some(check),
        _ => None,
    });
    let check = checked.expect("a check");
    assert!(check.failure.is_none() && check.rounds >= 10 && check.duration_s >= 1.0, "{check:?}");
    let file = machine.scene.read("X/tuned.env");
    assert!(file.contains("# WARNING: right only for SGLang 0.5.3 without --enable-symm-mem"), "{file}");
    assert!(file.contains("no failure seen in") && said.contains("which is no proof"), "{file}\n{said}");

    for (name, engine, says) in [
        ("vllm", "--engine vllm --engine-version 0.11.0", "one communicator"),
        ("unread", "--engine sglang --engine-version 0.5.4", "known: 0.4.9, 0.5.3"),
    ] {
        let (machine, said) = mixing(name, "", engine);
        let choice = machine.scene.choice("X");
        assert_eq!(choice.verdict, VerdictKind::KeepDefault, "{said}");
        assert!(choice.env.is_empty() || !choice.env.contains_key("NCCL_GRAPH_MIXING_SUPPORT"), "{said}");
        assert!(choice.vetoed[0].reason.contains(says), "{:?}", choice.vetoed);
        assert!(choice.objective.ratio.is_some_and(|ratio| ratio < 0.98), "it is measured and reported");
    }
}

#[test]
fn overlap_that_corrupts_or_hangs_is_seen_and_ships_nothing() {
    let wrong =
        "[[fault]]\nkind = \"overlap\"\neffect = \"wrong-data\"\nwhen = { NCCL_GRAPH_MIXING_SUPPORT = \"0\" }\n";
    let hang =
        "[[fault]]\nkind = \"overlap\"\neffect = \"hang\"\nat = 7\nwhen = { NCCL_GRAPH_MIXING_SUPPORT = \"0\" }\n";
    for (name, scenario, says) in [("wrong", wrong, "wrong-result"), ("hang", hang, "timed-out")] {
        let (machine, said) = mixing(name, scenario, &format!("--engine sglang --engine-version 0.5.3 {PHASE_LIMIT}"));
        let choice = machine.scene.choice("X");
        assert_eq!(choice.verdict, VerdictKind::KeepDefault, "{said}");
        assert!(choice.vetoed[0].reason.contains(says), "{:?}", choice.vetoed);
    }
}

#[test]
fn links_that_were_asleep_are_told_and_taken_into_the_answer() {
    let asleep = "nccl_version = 23007\nidle_links = 0.125\n";
    let (machine, status, said) = run("asleep", asleep, "--peer-access never");
    assert_eq!(status, Some(0), "{said}");
    let found = manifest(&machine).cold_and_warm.expect("both searches");
    let ring =
        |all: &[nccltune::record::ChannelSearch]| all.iter().find(|found| found.pattern == "ring").unwrap().clone();
    assert!((ring(&found.cold).bandwidth_gb_per_s - 1.5).abs() < 1e-9, "{found:?}");
    assert!((ring(&found.warm).bandwidth_gb_per_s - 12.0).abs() < 1e-9, "{found:?}");
    assert!(said.contains("NCCL takes the speed of idle links for their own"), "{said}");
    assert!(said.contains("NCCL_TOPO_FILE"), "{said}");
    assert_eq!(machine.scene.choice("X").cold_and_warm, Some(found));

    let (machine, status, said) = run("awake", "nccl_version = 23007\n", "--peer-access never");
    assert_eq!(status, Some(0), "{said}");
    let found = manifest(&machine).cold_and_warm.expect("both searches");
    assert_eq!(found.cold, found.warm);
    assert!(!said.contains("idle links"), "{said}");
    let (machine, _, _) = run("old", "", "--peer-access never");
    assert!(manifest(&machine).cold_and_warm.is_none(), "earlier releases read what a link is built for");
}

/// What the simulated machine's file says is what the gate comes to.
#[test]
fn a_simulated_machine_answers_from_its_description() {
    let machine = |peers: &str| {
        let text =
            fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/search-spaces/machines/rtx-pro-6000-x8.toml"))
                .expect("the machine's file");
        text.replacen("\n[layout]\n", &format!("{peers}\n[layout]\n"), 1)
    };
    for (peers, outcome, says) in [
        ("peer_access = \"works\"\n", PeerOutcome::Passed, ""),
        ("peer_access = \"in-use\"\n", PeerOutcome::InUse, "nothing to try"),
        ("peer_access = \"denied\"\n", PeerOutcome::Failed, "not access granted"),
        ("peer_access = \"wrong-bytes\"\n", PeerOutcome::Failed, "not bytes moved and read back"),
        ("peer_access = \"hangs\"\n", PeerOutcome::Failed, "not collectives checked"),
        ("", PeerOutcome::Skipped, "does not say whether it works"),
    ] {
        let scene = Scene::new();
        scene.write("machine.toml", machine(peers));
        scene.write("space.toml", SPACE);
        let ended = scene
            .run("tune --backend simulated --machine machine.toml --space space.toml --sizes 64K --no-trial --out X")
            .ok();
        let manifest = manifest_in(&scene.path("X"));
        let report = manifest.peer_access.clone().expect("a report");
        assert_eq!(report.outcome, outcome, "{peers}");
        assert_eq!(has_peers(&manifest), outcome == PeerOutcome::Passed, "{peers}");
        assert!(ended.stderr.contains(says), "{peers}: {}", ended.stderr);
    }
}

#[test]
fn doctor_tests_when_it_is_asked_and_tells_like_any_check() {
    let check = |report: &serde_json::Value, name: &str| {
        let checks = report["checks"].as_array().expect("a list").iter();
        checks.into_iter().find(|check| check["name"] == name).cloned()
    };
    let machine = Machine::new(
        "devices = 2\nmachine = \"peer-doctor\"\ntransport = \"bridge\"\nnccl_version = 23007\nidle_links = 0.25\n",
    );
    let (report, said) = machine.doctor("");
    assert!(check(&report, "peer-access").is_none() && !said.contains("testing whether"), "{said}");
    let (report, said) = machine.doctor("--live --peer-access test");
    let peers = check(&report, "peer-access").unwrap_or_else(|| panic!("{report}\n{said}"));
    assert_eq!(peers["verdict"], "pass", "{peers}");
    let links = check(&report, "idle-links").expect("a check");
    assert_eq!(links["verdict"], "warn", "{links}");
    assert!(links["advice"].as_str().is_some_and(|advice| advice.contains("NCCL_TOPO_FILE")), "{links}");
    let (report, _) = machine.doctor("--live --peer-access never");
    assert_eq!(check(&report, "peer-access").expect("a check")["verdict"], "unknown");

    let broken = Machine::new(
        "devices = 2\nmachine = \"peer-doctor\"\ntransport = \"bridge\"\n[[fault]]\nkind = \"lost-copy\"\n",
    );
    let (report, said) = broken.doctor("--live --peer-access test");
    let peers = check(&report, "peer-access").unwrap_or_else(|| panic!("{report}\n{said}"));
    assert_eq!(peers["verdict"], "warn", "{peers}");
    assert_eq!(check(&report, "idle-links").expect("a check")["verdict"], "unknown");
    assert_eq!(processes_in(&broken.scene.path("")), None);
}
