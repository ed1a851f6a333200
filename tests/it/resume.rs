//! A run that was cut off goes on: at every kind of place in its journal, by a kill, by Ctrl-C. It
//! comes to the same verdict, loses nothing that was whole, measures nothing twice and pairs nothing
//! across the seam.
//!
//! A simulated run is over in milliseconds, too fast to be killed at a chosen moment. So most tests
//! cut the journal of a finished run instead, which leaves what a kill at that moment would have
//! left; a few send real signals.

use std::collections::{BTreeMap, BTreeSet};

use fs_err as fs;
use fs_err::os::unix::fs::OpenOptionsExt as _;
use nccltune::record::{ArmId, Event, JournalLine, Phase, PointKey, VerdictKind};
use nix::sys::signal::Signal;

use crate::command::{Ended, Running, Scene, cells, wait_for};

const TUNE: &str = "tune --backend simulated --machine machine.toml --space space.toml --sizes 16K,256K --seed 3";

/// A machine on which one setting helps and another does not.
pub(crate) fn clear_machine(noise: &str, more: &str) -> String {
    format!(
        "format = 1\nname = \"clear\"\ndescription = \"one setting helps\"\ngpu = \"Test GPU\"\ngpus = 4\n\
         memory_mib = 98304\ncompute_capability = [12, 0]\nsizes_bytes = [4096, 65536, 1048576]\n\
         default_latency_us = [20.0, 30.0, 120.0]\n\
         [noise]\n{noise}slow_launch_probability = 0.0\nslow_launch_factor = 1.0\nreplay_log_sd = 0.01\n\
         [cost]\nlaunch_s = 2.0\ncommunicator_s = 0.5\ncell_s = 0.05\n{more}\
         [[effect]]\nwhen = {{ NCCL_PROTO = \"allreduce:Simple\" }}\nfactor = [1.5, 1.3, 1.2]\n"
    )
}

/// Launches that several arms share, so that blocks can be torn inside one.
pub(crate) const FEW_ARMS: &str = "format = 1\nname = \"few\"\ndescription = \"arms of a test\"\n\
     [[axis]]\nvariable = \"NCCL_MIN_NCHANNELS\"\nvalues = [\"unset\", \"8\", \"16\"]\n\
     [[axis]]\nvariable = \"NCCL_PROTO\"\nvalues = [\"unset\", \"allreduce:Simple\"]\n";

/// One clear winner among a few arms, so that another draw of noise after the seam cannot change the
/// verdict.
fn scene() -> Scene {
    let scene = Scene::new();
    let effect = "[[effect]]\nwhen = { NCCL_MIN_NCHANNELS = \"16\" }\nfactor = [0.8, 0.8, 0.8]\n";
    scene.write("machine.toml", clear_machine("launch_log_sd = 0.01\ncell_log_sd = 0.004\n", effect));
    scene.write("space.toml", FEW_ARMS);
    scene
}

/// A finished run in `whole`.
fn finished() -> Scene {
    let scene = scene();
    scene.run(&format!("{TUNE} --out whole")).ok();
    let choice = scene.choice("whole");
    assert_eq!((choice.verdict, choice.winner.as_deref()), (VerdictKind::Adopt, Some("MIN_NCHANNELS=16")));
    scene
}

/// What a kill leaves after this many bytes of the journal.
fn cut(scene: &Scene, run: &str, bytes: usize) {
    scene.copy_run(&scene.path("whole"), run, &["manifest.json", "machine.toml"]);
    let journal = scene.read("whole/run.jsonl");
    scene.write(&format!("{run}/run.jsonl"), &journal[..bytes]);
}

fn resume(scene: &Scene, run: &str) -> Ended {
    scene.run(&format!("tune --resume --out {run}"))
}

/// What must be true of the journal of every run that was ever resumed.
#[track_caller]
pub(crate) fn assert_sound(lines: &[JournalLine], what: &str) {
    for (position, line) in lines.iter().enumerate() {
        assert_eq!(line.sequence, position as u64, "{what}: the sequence has a gap");
    }
    assert!(lines.is_sorted_by(|before, after| before.at_s <= after.at_s), "{what}: the clock ran backwards");
    let mut seen = BTreeSet::new();
    for cell in cells(lines) {
        let key = (cell.arm.clone(), cell.point, cell.block);
        assert!(seen.insert(key), "{what}: {} at {} twice in block {}", cell.arm, cell.point, cell.block);
    }
    // Launches and blocks are started once, whatever happened to them.
    let (mut launches, mut planned, mut ended) = (BTreeSet::new(), BTreeMap::new(), BTreeSet::new());
    let mut passes = BTreeSet::new();
    let mut segment_of_block = BTreeMap::new();
    let mut segment = 0;
    for line in lines {
        match &line.event {
            Event::RunResumed { segment: number, .. } => {
                assert_eq!(*number, segment + 1, "{what}: resumes are counted");
                segment = *number;
            }
            Event::BlockPlanned { block, phase, .. } => {
                assert!(planned.insert(*block, *phase).is_none(), "{what}: block {block} is planned twice");
                segment_of_block.insert(*block, segment);
            }
            Event::LaunchStarted { launch, .. } => {
                assert!(launches.insert(*launch), "{what}: launch {launch} is started twice");
            }
            // Pairs are formed inside a block, so a block on one side of the seam means pairs on one
            // side.
            Event::CellMeasured(cell) => {
                assert_eq!(segment_of_block.get(&cell.block), Some(&segment), "{what}: block {}", cell.block);
            }
            Event::PassMeasured(pass) => {
                assert_eq!(segment_of_block.get(&pass.block), Some(&segment), "{what}: block {}", pass.block);
                let key = (pass.arm.clone(), pass.pass, pass.block);
                assert!(passes.insert(key), "{what}: a pass of {} twice in block {}", pass.arm, pass.block);
            }
            Event::BlockEnded { block } => assert!(ended.insert(*block), "{what}: block {block} ended twice"),
            _ => {}
        }
    }
    assert!(planned.keys().all(|block| ended.contains(block)), "{what}: a block was left open");
}

/// Every finalist has as many launches beside the default as were planned, whole ones.
#[track_caller]
fn assert_finals_complete(lines: &[JournalLine], what: &str) {
    let Some((finalists, launches)) = lines.iter().find_map(|line| match &line.event {
        Event::FinalistsChosen { arms, launches, .. } => Some((arms.clone(), *launches as usize)),
        _ => None,
    }) else {
        panic!("{what}: no finalists")
    };
    let finals: BTreeSet<u32> = lines
        .iter()
        .filter_map(|line| match line.event {
            Event::BlockPlanned { block, phase: Phase::Final, .. } => Some(block),
            _ => None,
        })
        .collect();
    // Per arm: its points per block.
    let mut points: BTreeMap<&ArmId, BTreeMap<u32, u32>> = BTreeMap::new();
    for cell in cells(lines).filter(|cell| finals.contains(&cell.block)) {
        *points.entry(&cell.arm).or_default().entry(cell.block).or_default() += 1;
    }
    let whole = |arm: &ArmId| -> BTreeSet<u32> {
        points[arm].iter().filter(|(_, points)| **points == 2).map(|(block, _)| *block).collect()
    };
    let default = points.keys().find(|arm| !finalists.contains(arm)).expect("the default runs beside finalists");
    let left_early: BTreeSet<&ArmId> = lines
        .iter()
        .filter_map(|line| match &line.event {
            Event::FinalistDropped { arm, .. } => Some(arm),
            _ => None,
        })
        .collect();
    for arm in &finalists {
        let paired = whole(arm).intersection(&whole(default)).count();
        let enough = if left_early.contains(arm) { paired < launches } else { paired == launches };
        assert!(enough, "{what}: {paired} paired launches of {arm}, {launches} were planned");
    }
}

/// How often each arm was searched at each point.
fn searches(lines: &[JournalLine]) -> BTreeMap<(&ArmId, PointKey), usize> {
    let mut searches = BTreeMap::new();
    let chosen = lines.iter().position(|line| matches!(line.event, Event::FinalistsChosen { .. }));
    for cell in cells(&lines[..chosen.unwrap_or(lines.len())]) {
        *searches.entry((&cell.arm, cell.point)).or_default() += 1;
    }
    searches
}

#[test]
fn a_journal_cut_anywhere_leads_to_the_same_verdict() {
    let scene = finished();
    let journal = scene.read("whole/run.jsonl");
    let whole = scene.choice("whole");
    let ends: Vec<usize> = journal.match_indices('\n').map(|(at, _)| at + 1).collect();
    let opened = ends[0];
    // Every boundary of a block, and around it: a block just begun, a launch just begun, one cell
    // into a launch, one before the end.
    let mut places = BTreeSet::from([opened]);
    for (number, line) in journal.lines().enumerate() {
        let is = |event: &str| line.contains(&format!("\"event\":\"{event}\""));
        if is("block-ended") || is("block-planned") || is("finalists-chosen") || is("run-finished") {
            places.extend([ends[number - 1], ends[number]]);
        }
    }
    // Inside blocks, at whole lines and inside lines, spread over the run.
    let step = journal.len() / 60;
    for place in (opened..journal.len()).step_by(step.max(1)) {
        places.insert(place);
        if let Some(end) = ends.iter().find(|end| **end >= place) {
            places.extend([*end, end - 1]);
        }
    }
    // One byte into a line, and all but its end.
    places.extend([ends[1] + 1, ends[5] - 1, ends[5] + 1]);
    assert!(places.len() > 100, "{}", places.len());
    let mut torn = 0;
    for place in places.range(opened..journal.len()).copied() {
        let run = format!("cut-{place}");
        let what = format!("cut after {place} of {} bytes", journal.len());
        cut(&scene, &run, place);
        let ended = resume(&scene, &run);
        assert_eq!(ended.status, Some(0), "{what}: {}", ended.stderr);
        let choice = scene.choice(&run);
        assert_eq!((choice.verdict, &choice.env), (whole.verdict, &whole.env), "{what}: {}", choice.reason);
        let kept = ends.iter().rev().find(|end| **end <= place).copied().unwrap();
        let after = scene.read(&format!("{run}/run.jsonl"));
        assert_eq!(after[..kept], journal[..kept], "{what}: whole lines are kept as they are");
        let lines = scene.journal(&run);
        assert_sound(&lines, &what);
        assert_finals_complete(&lines, &what);
        let resumed: Vec<u64> = lines
            .iter()
            .filter_map(|line| match line.event {
                Event::RunResumed { dropped_bytes, .. } => Some(dropped_bytes),
                _ => None,
            })
            .collect();
        assert_eq!(resumed, [(place - kept) as u64], "{what}: what was torn is told");
        torn += usize::from(place > kept);
        assert!(choice.notes.iter().any(|note| note.contains("resumed 1 time;")), "{what}: {:?}", choice.notes);
        // No finished block is measured again: three blocks of the search, and one more where one was
        // torn.
        let open = journal[..kept].matches("block-planned").count() - journal[..kept].matches("block-ended").count();
        let most = searches(&lines).into_values().max();
        assert!(most <= Some(3 + open), "{what}: {most:?} searches with {open} torn blocks");
        fs::remove_dir_all(scene.path(&run)).unwrap();
    }
    assert!(torn > 30, "only {torn} cuts were inside a line");
}

#[test]
fn a_journal_cut_before_its_first_line_is_refused_and_left_alone() {
    let scene = finished();
    let first = scene.read("whole/run.jsonl").find('\n').unwrap() + 1;
    for place in [0, 1, first - 1] {
        let run = format!("cut-{place}");
        cut(&scene, &run, place);
        let before = scene.contents();
        let ended = resume(&scene, &run);
        assert_eq!((ended.status, ended.stdout.as_str()), (Some(2), ""), "{}", ended.stderr);
        assert!(ended.stderr.contains("empty journal"), "{}", ended.stderr);
        assert_eq!(scene.contents(), before);
    }
}

#[test]
fn a_run_may_be_cut_off_again_and_again() {
    let scene = finished();
    let size = fs::metadata(scene.path("whole/run.jsonl")).unwrap().len() as usize;
    cut(&scene, "run", size / 10);
    // Each time a tenth further, inside whatever line that is.
    for tenth in 2..=9 {
        resume(&scene, "run").ok();
        let path = scene.path("run/run.jsonl");
        let bytes = fs::read(&path).unwrap();
        fs::write(&path, &bytes[..bytes.len() * tenth / 10]).unwrap();
        fs::remove_file(scene.path("run/choice.json")).unwrap();
    }
    resume(&scene, "run").ok();
    let lines = scene.journal("run");
    assert_sound(&lines, "nine cuts");
    let choice = scene.choice("run");
    assert_eq!(choice.env, scene.choice("whole").env);
    let resumed = lines.iter().filter(|line| matches!(line.event, Event::RunResumed { .. })).count();
    assert!(resumed >= 3, "{resumed}");
    assert!(choice.notes.iter().any(|note| note.contains(&format!("resumed {resumed} times"))), "{:?}", choice.notes);
}

#[test]
fn a_finished_run_is_answered_again_and_not_measured_again() {
    let scene = finished();
    let (before, choice) = (scene.journal("whole"), scene.choice("whole"));
    for file in ["choice.json", "summary.csv", "tuned.env", "tuned.sh"] {
        fs::remove_file(scene.path(&format!("whole/{file}"))).unwrap();
    }
    let first = resume(&scene, "whole").ok();
    let after = scene.journal("whole");
    assert!(cells(&before).eq(cells(&after)), "nothing was measured");
    assert_eq!(after[..before.len()], before);
    let again = scene.choice("whole");
    assert_eq!((again.verdict, &again.env, &again.points), (choice.verdict, &choice.env, &choice.points));
    for file in ["summary.csv", "tuned.env", "tuned.sh"] {
        assert!(scene.path(&format!("whole/{file}")).exists(), "{file} is back");
    }
    assert_eq!(resume(&scene, "whole").ok().stdout.lines().next(), first.stdout.lines().next());
    assert_sound(&scene.journal("whole"), "resumed twice when finished");
}

#[test]
fn a_resume_says_each_thing_once() {
    let scene = finished();
    let ended = resume(&scene, "whole").ok();
    let notes: Vec<&str> = ended.stderr.lines().collect();
    let unique: BTreeSet<&&str> = notes.iter().collect();
    assert_eq!(notes.len(), unique.len(), "{}", ended.stderr);
}

#[test]
fn a_resume_finds_its_machine_and_space_from_anywhere() {
    let scene = finished();
    cut(&scene, "elsewhere/run", 5000);
    let mut command = scene.command(&["tune", "--resume", "--out", "run"]);
    let output = command.current_dir(scene.path("elsewhere")).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    assert_eq!(scene.choice("elsewhere/run").env, scene.choice("whole").env);
    // Its machine is the one it began with, whatever becomes of the file that was named then.
    cut(&scene, "run", 5000);
    let other = scene.read("machine.toml").replace("0.8, 0.8, 0.8", "0.7, 0.8, 0.8");
    scene.write("machine.toml", &other);
    resume(&scene, "run").ok();
    assert_eq!(scene.choice("run").objective.ratio, scene.choice("elsewhere/run").objective.ratio);
    // And a machine that was changed is another machine, for all that its name says.
    cut(&scene, "changed", 5000);
    scene.write("changed/machine.toml", &other);
    let refused = resume(&scene, "changed");
    assert_eq!(refused.status, Some(2), "{}", refused.stderr);
    assert!(refused.stderr.contains("the machine"), "{}", refused.stderr);
}

/// A run long enough to be hit: about a second, of which the journal's first tenth is waited for.
fn start_long(scene: &Scene, run: &str, journal_bytes: u64) -> Running {
    let line = format!("tune --backend simulated --no-trial --search-blocks 100 --final-launches 100 --out {run}");
    let mut running = scene.start(&line);
    let journal = scene.path(&format!("{run}/run.jsonl"));
    wait_for("the journal has grown", || {
        assert!(running.ended().is_none(), "the run ended before it could be hit");
        let length = fs::metadata(&journal).ok()?.len();
        (length >= journal_bytes).then_some(())
    });
    running
}

#[test]
fn a_killed_run_goes_on() {
    let scene = Scene::new();
    for (number, journal_bytes) in [1, 300_000, 1_500_000].into_iter().enumerate() {
        let run = format!("run-{number}");
        let mut running = start_long(&scene, &run, journal_bytes);
        running.signal(Signal::SIGKILL);
        assert_eq!(running.wait().code(), None, "nothing but the signal ended it");
        assert!(!scene.path(&format!("{run}/choice.json")).exists());
        let before = fs::read(scene.path(&format!("{run}/run.jsonl"))).unwrap();
        // The lock went with the process.
        let choice = {
            resume(&scene, &run).ok();
            scene.choice(&run)
        };
        assert_eq!(choice.verdict, VerdictKind::Adopt, "{}", choice.reason);
        let lines = scene.journal(&run);
        assert_sound(&lines, &run);
        let after = fs::read(scene.path(&format!("{run}/run.jsonl"))).unwrap();
        let kept = before.iter().rposition(|byte| *byte == b'\n').map_or(0, |last| last + 1);
        assert_eq!(after[..kept], before[..kept]);
    }
}

#[test]
fn an_interrupted_run_stops_in_order_and_goes_on() {
    let scene = Scene::new();
    let mut running = start_long(&scene, "run", 500_000);
    running.signal(Signal::SIGINT);
    assert_eq!(running.wait().code(), Some(6), "stopped without a verdict, and it can go on");
    let lines = scene.journal("run");
    let last = &lines.last().unwrap().event;
    assert_eq!(*last, Event::RunInterrupted { reason: "interrupt".to_owned() }, "the last event says why");
    let text = scene.read("run/run.jsonl");
    assert!(text.ends_with('\n'), "an orderly stop tears no line");
    assert!(!scene.path("run/choice.json").exists());
    resume(&scene, "run").ok();
    assert_eq!(scene.choice("run").verdict, VerdictKind::Adopt);
    assert_sound(&scene.journal("run"), "interrupted");
}

#[test]
fn a_question_that_hangs_can_be_stopped() {
    let scene = Scene::new();
    // Whoever opens a pipe without a writer waits: a library that hangs, with nothing to compile.
    let library = scene.path("libnccl.so.2");
    nix::unistd::mkfifo(&library, nix::sys::stat::Mode::S_IRWXU).expect("a pipe");
    let mut running = scene.start(&format!("doctor --nccl-lib {}", library.display()));
    let asks = || fs::OpenOptions::new().write(true).custom_flags(nix::libc::O_NONBLOCK).open(&library).ok();
    let writer = wait_for("the library is being opened", asks);
    running.signal(Signal::SIGINT);
    assert_eq!(running.wait().code(), Some(6), "stopped before an answer");
    drop(writer);
}

#[test]
fn a_budget_never_adopts_on_fewer_than_four_pairs() {
    // Without noise every interval is a point, so that two pairs look as certain as twelve.
    let scene = scene();
    let quiet = scene
        .read("machine.toml")
        .replace("launch_log_sd = 0.01", "launch_log_sd = 0.0")
        .replace("cell_log_sd = 0.004", "cell_log_sd = 0.0")
        .replace("replay_log_sd = 0.01", "replay_log_sd = 0.0");
    scene.write("machine.toml", quiet);
    let (mut adopted, mut stopped) = (0, 0);
    for seconds in (5..150).step_by(5) {
        let run = format!("run-{seconds}");
        let ended = scene.run(&format!("{TUNE} --time-budget {seconds}s --out {run}"));
        if ended.status == Some(6) {
            stopped += 1;
            continue;
        }
        let choice = scene.choice(&run);
        assert!(choice.statistics.launches >= 4, "{seconds} s: {} after {}", choice.reason, choice.statistics.launches);
        adopted += u32::from(choice.verdict == VerdictKind::Adopt);
    }
    assert!(adopted > 0 && stopped > 0, "{adopted} adopted, {stopped} stopped");
}
