//! Levels of a search. What arms share within a launch must change nothing about what runs: the same space is searched
//! with fresh processes for each arm and with one communicator for as many as can share one, by the real workers and the
//! real plugin on the stand-in, and cell by cell the same must have run.

use std::collections::{BTreeMap, BTreeSet};

use nccltune::file_kind::PLUGIN_FILE;
use nccltune::record::{
    CellMeasurement, CheapestLevel, Effective, Event, JournalLine, OutcomeKind, Phase, PointKey, VerdictKind,
};

use nccltune::stats::{mean, median};

use crate::command::{Scene, cells, journal_text, manifest_in};
use crate::fakes::Machine;

/// Every form in which an arm can say channels, beside arms that a plugin cannot stand for.
fn space() -> String {
    let mut text =
        "format = 1\nname = \"levels\"\ndescription = \"arms of a test\"\n[[arm]]\nname = \"default\"\nenv = {}\n"
            .to_owned();
    let mut arm = |name: &str, env: &str| {
        text.push_str(&format!("[[arm]]\nname = \"{name}\"\nenv = {{ {env} }}\n"));
    };
    for (algo, proto) in [("Ring", "LL"), ("Ring", "Simple"), ("Tree", "LL"), ("Tree", "Simple")] {
        let lists = format!("NCCL_ALGO = \"allreduce:{algo}\", NCCL_PROTO = \"{proto}\"");
        arm(&format!("{algo} {proto}"), &lists);
        for channels in [1, 2, 16] {
            let both = format!("NCCL_MIN_NCHANNELS = \"{channels}\", NCCL_MAX_NCHANNELS = \"{channels}\"");
            arm(&format!("{algo} {proto} {channels}"), &format!("{lists}, {both}"));
        }
    }
    arm("at least two", "NCCL_ALGO = \"Ring\", NCCL_PROTO = \"LL\", NCCL_MIN_NCHANNELS = \"2\"");
    arm("at most two", "NCCL_ALGO = \"Ring\", NCCL_PROTO = \"LL\", NCCL_MAX_NCHANNELS = \"2\"");
    arm("channels alone", "NCCL_MIN_NCHANNELS = \"8\"");
    let thresholds = "NCCL_THREAD_THRESHOLDS = \"-1-1-1+2\"";
    arm("spread", &format!("NCCL_ALGO = \"Ring\", NCCL_PROTO = \"LL\", NCCL_MIN_NCHANNELS = \"16\", {thresholds}"));
    // Not for a plugin: a list alone, no list, what is read once a process.
    arm("protocol alone", "NCCL_PROTO = \"allreduce:Simple\"");
    arm("thresholds alone", thresholds);
    arm("threads", "NCCL_ALGO = \"Ring\", NCCL_PROTO = \"LL\", NCCL_NTHREADS = \"256\"");
    text
}

const TUNE: &str = "--sizes 4K,43008,256K --engine none --space space.toml --tables never --no-trial --final-launches 5 \
                    --search-blocks 1";

fn searched(machine: &str, level: &str) -> Machine {
    let machine = Machine::new(&format!("devices = 2\nmachine = \"{machine}\"\nnoise = 0.004\n"));
    machine.scene.write("space.toml", space());
    let (status, said) = machine.tune(&format!("{TUNE} --cheapest-level {level}"));
    assert_eq!(status, Some(0), "{said}");
    machine
}

/// The cells of the search.
fn search_cells(lines: &[JournalLine]) -> Vec<CellMeasurement> {
    let blocks: BTreeSet<u32> = lines
        .iter()
        .filter_map(|line| match &line.event {
            Event::BlockPlanned { block, phase: Phase::Search, .. } => Some(*block),
            _ => None,
        })
        .collect();
    cells(lines).filter(|cell| blocks.contains(&cell.block)).cloned().collect()
}

fn ran(lines: &[JournalLine]) -> BTreeMap<(String, PointKey), Effective> {
    search_cells(lines).into_iter().map(|cell| ((cell.arm.0, cell.point), cell.effective)).collect()
}

fn launches(lines: &[JournalLine]) -> BTreeSet<u32> {
    search_cells(lines).iter().map(|cell| cell.launch).collect()
}

#[test]
fn the_same_runs_whatever_arms_share() {
    let (apart, together) = (searched("apart", "launch"), searched("together", "call"));
    let (lines, shared) = (apart.scene.journal("X"), together.scene.journal("X"));
    let names: BTreeMap<String, String> =
        manifest_in(&together.scene.path("X")).arms.into_iter().map(|arm| (arm.id.0, arm.name)).collect();
    let (expected, found) = (ran(&lines), ran(&shared));
    assert_eq!(expected.len(), 24 * 3, "every arm at every point");
    for ((arm, point), effective) in &expected {
        assert_eq!(found.get(&(arm.clone(), *point)), Some(effective), "{} at {point}", names[arm]);
    }
    assert_eq!(found.len(), expected.len());
    // The finals are those of any other run, and so is the answer.
    let (one, other) = (apart.scene.choice("X"), together.scene.choice("X"));
    assert_eq!((one.verdict, &one.winner), (other.verdict, &other.winner));
    assert_eq!(one.verdict, VerdictKind::Adopt, "{}", one.reason);

    // The journal tells who shared what.
    let mut communicators: BTreeMap<(u32, u32), BTreeSet<&str>> = BTreeMap::new();
    let measured = search_cells(&shared);
    for cell in measured.iter().filter(|cell| cell.call.is_some()) {
        communicators.entry((cell.launch, cell.communicator)).or_default().insert(&names[&cell.arm.0]);
    }
    let mut sizes: Vec<usize> = communicators.values().map(BTreeSet::len).collect();
    sizes.sort_unstable();
    // Thresholds want a communicator, and threads a process, of their own.
    assert_eq!(sizes, [1, 1, 19], "{communicators:?}");
    for (name, told) in [("default", false), ("protocol alone", false), ("thresholds alone", false), ("threads", true)]
    {
        let of = measured.iter().filter(|cell| names[&cell.arm.0] == name).collect::<Vec<_>>();
        assert!(of.len() == 3 && of.iter().all(|cell| cell.call.is_some() == told), "{name}");
        let alone = of.iter().all(|cell| {
            let beside =
                |other: &&CellMeasurement| (other.launch, other.communicator) == (cell.launch, cell.communicator);
            measured.iter().filter(beside).all(|other| other.arm == cell.arm)
        });
        assert!(alone, "{name} has a communicator of its own");
    }
    assert!(measured.iter().all(|cell| cell.flags.is_empty()));
    assert_eq!((launches(&lines).len(), launches(&shared).len()), (24, 2));
    assert!(cells(&lines).all(|cell| cell.call.is_none()));
    let finals: Vec<_> = cells(&shared).filter(|cell| !measured.contains(cell)).collect();
    assert!(!finals.is_empty() && finals.iter().all(|cell| cell.call.is_none()), "as they are deployed");

    // Where channels were asked for, it is told; where the message leaves no use for them, they were not.
    let told = |name: &str, bytes: u64| {
        let cell = measured.iter().find(|cell| names[&cell.arm.0] == name && cell.point.bytes == bytes).expect(name);
        (cell.call.as_ref().and_then(|call| call.channels), cell.effective.channels)
    };
    assert_eq!(told("Ring LL 2", 256 << 10), (Some(2), Some(2)));
    assert_eq!(told("Ring LL 16", 256 << 10), (None, Some(16)));
    // Sixteen are of no use to so few bytes: thread thresholds leave five, as they do in the environment.
    assert_eq!(told("Ring LL 16", 43_008), (None, Some(5)));
    assert_eq!(told("at least two", 256 << 10), (Some(4), Some(4)), "the least alone takes none away");
    assert_eq!(told("at most two", 256 << 10), (Some(2), Some(2)));
    assert_eq!(told("channels alone", 256 << 10), (Some(8), Some(8)));
}

#[test]
fn what_nccl_cannot_run_fails_its_arm_and_nothing_else() {
    let machine = Machine::new("devices = 2\nmachine = \"refuses\"\nnoise = 0.004\n");
    // There is no tree for all-gather: with the variables the communicator refuses, with the plugin NCCL would go on
    // with its own choice.
    machine.scene.write(
        "space.toml",
        "format = 1\nname = \"x\"\ndescription = \"arms of a test\"\n[[arm]]\nname = \"default\"\nenv = {}\n\
         [[arm]]\nname = \"tree\"\nenv = { NCCL_ALGO = \"Tree\", NCCL_PROTO = \"LL\" }\n\
         [[arm]]\nname = \"ring\"\nenv = { NCCL_ALGO = \"Ring\", NCCL_PROTO = \"Simple\" }\n",
    );
    let (status, said) = machine.tune(
        "--sizes 64K,256K --collective all_gather --engine none --space space.toml --tables never --no-trial \
         --final-launches 5 --search-blocks 2 --cheapest-level call",
    );
    assert!(matches!(status, Some(0 | 1)), "{said}");
    let lines = machine.scene.journal("X");
    let arms = manifest_in(&machine.scene.path("X")).arms;
    let id = |name: &str| arms.iter().find(|arm| arm.name == name).map(|arm| arm.id.clone()).expect(name);
    let failures: Vec<_> = lines
        .iter()
        .filter_map(|line| match &line.event {
            Event::CellFailed { arm, point, outcome, .. } => Some((arm.clone(), point.is_some(), outcome.clone())),
            _ => None,
        })
        .collect();
    assert_eq!(failures.len(), 1, "what NCCL refuses is not tried again: {failures:?}");
    for (arm, has_point, outcome) in failures {
        assert_eq!((arm, has_point, outcome.kind), (id("tree"), true, OutcomeKind::Refused));
        assert!(outcome.detail.contains("NCCL cannot run tree with ll here"), "{}", outcome.detail);
    }
    let measured = search_cells(&lines);
    assert!(!measured.iter().any(|cell| cell.arm == id("tree")), "no wrong measurement");
    assert_eq!(measured.iter().filter(|cell| cell.arm == id("ring")).count(), 4);
    let ended = |line: &&JournalLine| matches!(&line.event, Event::LaunchEnded { outcome: Some(_), .. });
    assert_eq!(lines.iter().filter(ended).count(), 0, "no launch was lost over it");
}

#[test]
fn what_ran_otherwise_than_it_was_told_is_no_measurement() {
    let machine = Machine::new(
        "devices = 2\nmachine = \"otherwise\"\nnoise = 0.004\n\
         [[fault]]\nkind = \"substituted\"\nprotocol = \"Simple\"\nrun_channels = 4\n",
    );
    machine.scene.write("space.toml", space());
    machine.tune(&format!("{TUNE} --cheapest-level call"));
    let lines = machine.scene.journal("X");
    let arms = manifest_in(&machine.scene.path("X")).arms;
    let mut failed: Vec<&str> = Vec::new();
    for line in &lines {
        let Event::CellFailed { arm, outcome, .. } = &line.event else { continue };
        assert_eq!(outcome.kind, OutcomeKind::Refused);
        assert!(outcome.detail.contains("4 channels ran where the tuner plugin chose"), "{}", outcome.detail);
        failed.push(&arms.iter().find(|known| known.id == *arm).expect("an arm").name);
    }
    failed.sort_unstable();
    assert_eq!(failed, ["Ring Simple 1", "Ring Simple 2", "Tree Simple 1", "Tree Simple 2"]);
}

#[test]
fn a_worker_that_dies_among_many_arms_costs_one_of_them() {
    let machine = Machine::new(
        "devices = 2\nmachine = \"dies\"\nnoise = 0.004\n\
         [[fault]]\nkind = \"die\"\nphase = \"capture\"\nrank = 1\nat = 3500\n",
    );
    machine.scene.write("space.toml", space());
    let (status, said) = machine.tune(&format!("{TUNE} --cheapest-level call"));
    assert_eq!(status, Some(0), "{said}");
    let lines = machine.scene.journal("X");
    let failed: Vec<_> = lines
        .iter()
        .filter_map(|line| match &line.event {
            Event::CellFailed { arm, outcome, .. } => Some((arm.clone(), outcome.kind)),
            _ => None,
        })
        .collect();
    assert!(matches!(failed[..], [(_, OutcomeKind::Crashed)]), "{failed:?}: {said}");
    let whole = search_cells(&lines);
    let arms: BTreeSet<_> = whole.iter().map(|cell| cell.arm.clone()).collect();
    assert!(arms.len() >= 23 && whole.len() >= 23 * 3, "{} arms in {} cells", arms.len(), whole.len());
    // What the launch had not tried went on together in a fresh one.
    let of = |launch: u32| whole.iter().filter(|cell| cell.launch == launch && cell.call.is_some()).count();
    assert!(launches(&lines).into_iter().filter(|launch| of(*launch) > 3).count() >= 2, "{said}");
}

#[test]
fn without_a_plugin_that_can_do_it_nothing_begins() {
    let machine = Machine::new("devices = 2\nmachine = \"none\"\n");
    machine.scene.write("space.toml", space());
    let refused = |more: &str, says: &str| {
        let (status, said) = machine.tune(&format!("{TUNE} --cheapest-level call {more}"));
        assert!(status == Some(2) && said.contains(says), "{more}: {status:?} {said}");
        assert!(!machine.scene.path("X").join("run.jsonl").exists() || more.contains("broken"), "{more}");
    };
    let nowhere = machine.scene.path("nowhere.so").display().to_string();
    refused(&format!("--plugin {nowhere}"), "nowhere.so");
    refused("--pin NCCL_PROTO=LL", "NCCL_PROTO is fixed");
    refused("--pin NCCL_MIN_CTAS=4", "NCCL_MIN_CTAS is fixed");
    // It looks like the plugin, and no loader takes it: NCCL would go on in silence.
    let broken = machine.scene.path("broken.so");
    let mark = format!("\x7fELF ncclTunerPlugin_v5 nccltune tuner plugin {}\0", env!("CARGO_PKG_VERSION"));
    machine.scene.write("broken.so", mark);
    refused(&format!("--plugin {}", broken.display()), "NCCL did not load the tuner plugin");
    let old = Machine::new("devices = 2\nmachine = \"old\"\nnccl_version = 22304\n");
    old.scene.write("space.toml", space());
    let (status, said) = old.tune(&format!("{TUNE} --cheapest-level call"));
    assert!(status == Some(2) && said.contains("does not log how many channels"), "{said}");
}

/// In simulation: the same figures at every level, and less time for them.
#[test]
fn a_simulated_search_takes_less_time_at_call_level_and_sees_the_same() {
    let scene = Scene::new();
    scene.write("space.toml", space());
    let tune = "tune --backend simulated --machine h200-x2-host-memory --space space.toml --sizes 4K,43008,256K --engine none \
                --tables never --no-trial --final-launches 5 --search-blocks 2";
    for level in ["launch", "communicator", "call"] {
        scene.run(&format!("{tune} --cheapest-level {level} --out {level}")).ok();
    }
    let [launch, communicator, call] = ["launch", "communicator", "call"].map(|level| scene.journal(level));
    assert_eq!(ran(&launch), ran(&call));
    assert_eq!(ran(&communicator), ran(&call));
    let search_s = |lines: &[JournalLine]| -> f64 {
        let of = launches(lines);
        let spent = lines.iter().filter_map(|line| match &line.event {
            Event::LaunchEnded { launch, duration_s, .. } if of.contains(launch) => Some(*duration_s),
            _ => None,
        });
        spent.sum()
    };
    let spent = [&launch, &communicator, &call].map(|lines| search_s(lines));
    assert!(spent[0] > 1.3 * spent[1] && spent[1] > 2.5 * spent[2], "{spent:?}");
    // Launches draw their own noise, cell by cell; over all of them it cancels.
    let mean_log = |lines: &[JournalLine]| {
        let logs: Vec<f64> =
            search_cells(lines).iter().filter_map(|cell| median(&cell.replays_us)).map(f64::ln).collect();
        mean(&logs).expect("cells")
    };
    assert!((mean_log(&launch) - mean_log(&call)).abs() < 0.02, "{} {}", mean_log(&launch), mean_log(&call));
    assert!(["launch", "call"].iter().all(|level| scene.choice(level).verdict == VerdictKind::Adopt));
    // A run that says nothing of levels is the one it always was.
    scene.run(&format!("{tune} --out usual")).ok();
    assert_eq!(scene.read("usual/run.jsonl"), scene.read("communicator/run.jsonl"));
    assert!(!scene.read("usual/manifest.json").contains("cheapest_level"));
    assert_eq!(manifest_in(&scene.path("call")).settings.cheapest_level, CheapestLevel::Call);
    let shown = scene.run("report --run call").ok().stdout;
    assert!(shown.contains("call level"), "{shown}");
    assert!(!scene.run("report --run usual").ok().stdout.contains("call level"));

    // What was stopped goes on as it began, and as no other.
    let lines = scene.journal("call");
    scene.copy_run(&scene.path("call"), "stopped", &["manifest.json"]);
    scene.write("stopped/run.jsonl", journal_text(&lines[..lines.len() / 3]));
    let ended = scene.run("tune --backend simulated --resume --out stopped --no-trial --cheapest-level launch");
    assert!(ended.status == Some(2) && ended.stderr.contains("the thresholds and sizes"), "{}", ended.stderr);
    scene.run("tune --backend simulated --resume --out stopped --no-trial").ok();
    assert_eq!(scene.choice("stopped").verdict, VerdictKind::Adopt);
    let of_default = search_cells(&scene.journal("stopped")).iter().filter(|cell| cell.call.is_none()).count();
    assert!(of_default < 8 * 3 * 3, "what was measured after it was stopped shared communicators, too");
    // A replay knows what was shared, and needs no plugin.
    scene.run("tune --recorded call --no-trial --out again").ok();
    assert_eq!(scene.choice("again").winner, scene.choice("call").winner);
    assert!(cells(&scene.journal("again")).any(|cell| cell.call.is_some()));
}

/// A run directory holds the plugin that its arms were measured with, and goes on with no other.
#[test]
fn a_run_keeps_its_plugin() {
    let machine = searched("keeps", "call");
    let plugin = machine.scene.path("X").join(PLUGIN_FILE);
    assert!(plugin.is_file());
    let record = manifest_in(&machine.scene.path("X")).call_plugin.expect("in the manifest");
    assert_eq!(record.version, env!("CARGO_PKG_VERSION"));
    fs_err::remove_file(&plugin).unwrap();
    let (status, said) = machine.tune("--resume --no-trial");
    assert!(status == Some(2) && said.contains("the tuner plugin of the run cannot be had"), "{said}");
}
