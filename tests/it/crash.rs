//! A run that is cut off at a hundred places: after chosen events of search, final and trial, in the
//! middle of a line, by SIGKILL; then by signals that ask it to stop, and by a disk that is full. What it
//! held is kept, nothing whole is measured twice, and it comes to the same answer.
//!
//! A kill leaves what was written by then, and every line is written by one call, so a journal that is
//! cut at a byte stands for a kill at that moment. To be hit at a place that is meant, a real process is
//! held back by the pipe it tells its events to, which the test empties line by line.

use std::collections::{BTreeMap, BTreeSet};
use std::io::{BufRead as _, BufReader, PipeReader, Read as _};
use std::process::Stdio;
use std::time::Duration;

use fs_err as fs;
use nccltune::evidence::{Evidence, default_arm, measured_points};
use nccltune::record::{ArmId, Choice, Event, GpuState, JournalLine, Manifest, PassCase, Phase, PointKey, VerdictKind};
use nccltune::seed::Seed;
use nix::fcntl::{FcntlArg, fcntl};
use nix::sys::signal::Signal;
use rand::RngExt as _;
use rand::seq::{IndexedRandom as _, SliceRandom as _};

use crate::command::{Running, Scene, choice_in, journal_in, journal_text, manifest_in};
use crate::resume::{FEW_ARMS, assert_sound, clear_machine};

/// Places of the first test in all.
const PLACES: usize = 100;
/// How many of them are kills of a real process.
const KILLS: usize = 5;
/// And how many are inside a character, which simulated runs write none of: what NCCL said of a failure.
const CHARACTERS: usize = 3;
/// Paired launches of final and trial.
const PAIRS: usize = 4;
/// Longer than two signals may be apart to count as one.
const ANOTHER_PRESS: Duration = Duration::from_millis(300);
const WINNER: &str = "MIN_NCHANNELS=16";

/// One clear winner, in the benchmark and in the forward pass, so that another draw of noise cannot
/// change the answer.
fn scene() -> Scene {
    let scene = Scene::new();
    let more = "[pass]\nweights_gb_per_s = 1350.0\narithmetic_tflop_per_s = 300.0\nproduct_us = 3.0\ncrowding = 1.1\n\
                [[effect]]\nwhen = { NCCL_MIN_NCHANNELS = \"16\" }\nfactor = [0.7, 0.7, 0.7]\n";
    scene.write("machine.toml", clear_machine("launch_log_sd = 0.004\ncell_log_sd = 0.002\n", more));
    let topology = "[[arm]]\nname = \"topology\"\nenv = { NCCL_TOPO_FILE = \"/srv/box.xml\" }\n";
    scene.write("space.toml", format!("{FEW_ARMS}{topology}"));
    scene.write(
        "model.json",
        "{\"architectures\":[\"LlamaForCausalLM\"],\"hidden_size\":2048,\"intermediate_size\":4096,\
         \"num_hidden_layers\":4,\"num_attention_heads\":16,\"num_key_value_heads\":8,\"vocab_size\":8192,\
         \"torch_dtype\":\"bfloat16\"}",
    );
    scene
}

fn tune(more: &str) -> String {
    format!(
        "tune --backend simulated --machine machine.toml --space space.toml --model model.json --engine none \
         --batch 1,4 --chunk 512 --final-launches {PAIRS} --trial-launches {PAIRS} --seed 3 {more}"
    )
}

/// A run that nobody disturbed, in `whole`.
struct Whole {
    scene: Scene,
    journal: String,
    choice: Choice,
    manifest: Manifest,
    points: Vec<PointKey>,
    passes: Vec<PassCase>,
}

impl Whole {
    fn new() -> Self {
        let scene = scene();
        scene.run(&tune("--out whole")).ok();
        let (choice, manifest) = (scene.choice("whole"), manifest_in(&scene.path("whole")));
        assert_eq!((choice.verdict, choice.winner.as_deref()), (VerdictKind::Adopt, Some(WINNER)), "{}", choice.reason);
        let points = measured_points(&manifest.workload);
        let passes = manifest.trial.as_ref().expect("a trial").cases.clone();
        Self { journal: scene.read("whole/run.jsonl"), scene, choice, manifest, points, passes }
    }

    /// Leaves in `run` what a kill after so many bytes of the journal leaves.
    fn cut(&self, run: &str, bytes: usize) {
        self.scene.copy_run(&self.scene.path("whole"), run, &["manifest.json", "machine.toml"]);
        self.scene.write(&format!("{run}/run.jsonl"), &self.journal.as_bytes()[..bytes]);
        let length = fs::metadata(self.scene.path(run).join("run.jsonl")).expect("a journal").len();
        assert!(length == bytes as u64 && bytes < self.journal.len(), "the journal was not cut");
    }

    /// Takes the run up again and checks everything that may be asked of it.
    #[track_caller]
    fn check_resumed(&self, run: &str, what: &str) -> Choice {
        let file = format!("{run}/run.jsonl");
        let before = fs::read(self.scene.path(&file)).expect("a journal");
        let kept = before.iter().rposition(|byte| *byte == b'\n').expect("a first line") + 1;
        assert!(kept < self.journal.len(), "{what}: the journal was not cut");
        assert_eq!(before[..kept], self.journal.as_bytes()[..kept], "{what}: a simulated run repeats itself");
        let held = journal_in(&self.scene.path(run));

        self.scene.run(&format!("tune --resume --out {run}")).ok();
        let after = fs::read(self.scene.path(&file)).expect("a journal");
        assert_eq!(after[..kept], before[..kept], "{what}: whole lines stay as they are");
        let lines = self.scene.journal(run);
        assert_sound(&lines, what);
        let dropped: Vec<u64> = lines.iter().filter_map(dropped_bytes).collect();
        assert_eq!(dropped, [(before.len() - kept) as u64], "{what}: what was torn is told");
        self.assert_measured_once(&lines, what);

        let choice = self.scene.choice(run);
        let answer = |choice: &Choice| (choice.verdict, choice.winner.clone(), choice.env.clone());
        assert_eq!(answer(&choice), answer(&self.choice), "{what}: {}", choice.reason);
        assert!(choice.notes.iter().any(|note| note.contains("resumed 1 time;")), "{what}: {:?}", choice.notes);
        // Noise is drawn by the numbers of block and launch. A torn block takes a number of its own, so
        // that what follows is drawn anew; without one every figure is that of the unbroken run.
        let open = Evidence::of(&held).open_block(&self.points, &self.passes);
        if open.is_none_or(|(_, _, missing)| missing.is_empty()) {
            let figures = |choice: &Choice| {
                let Choice { objective, points, guard, trials, vetoed, .. } = choice.clone();
                (objective, points, guard, trials, vetoed)
            };
            assert_eq!(figures(&choice), figures(&self.choice), "{what}: the figures are the same");
        } else {
            let ratio = |choice: &Choice| choice.objective.ratio.expect("a winner has a ratio");
            let off = (ratio(&choice) / ratio(&self.choice) - 1.0).abs();
            assert!(off < 0.02, "{what}: {} and {}", ratio(&choice), ratio(&self.choice));
        }
        choice
    }

    /// Every arm has as many pairs as were planned and not one more: what was whole before the cut was
    /// not measured again, and what was torn was.
    #[track_caller]
    fn assert_measured_once(&self, lines: &[JournalLine], what: &str) {
        let evidence = Evidence::of(lines);
        let default = &default_arm(&self.manifest.arms).expect("a default").id;
        let blocks = |phase: Phase, arm: &ArmId| {
            let at = |point: &PointKey| -> BTreeSet<u32> {
                evidence.pairs(phase, arm, default, *point).into_iter().map(|(block, _, _)| block).collect()
            };
            self.points.iter().map(at).reduce(|common, here| &common & &here).expect("points").len()
        };
        let (finalists, launches, _) = evidence.finalists().expect("finalists");
        let (tried, _) = evidence.trial().expect("a trial");
        assert_eq!(launches as usize, PAIRS);
        for arm in self.manifest.arms.iter().map(|arm| &arm.id).filter(|arm| *arm != default) {
            let wanted = |among: &[ArmId]| if among.contains(arm) { PAIRS } else { 0 };
            assert_eq!(blocks(Phase::Search, arm), 3, "{what}: searches of {arm}");
            assert_eq!(blocks(Phase::Final, arm), wanted(finalists), "{what}: finals of {arm}");
            let trials = evidence.trial_blocks(arm, default, &self.passes);
            assert_eq!(trials, wanted(tried), "{what}: trials of {arm}");
        }
    }
}

fn dropped_bytes(line: &JournalLine) -> Option<u64> {
    match line.event {
        Event::RunResumed { dropped_bytes, .. } => Some(dropped_bytes),
        _ => None,
    }
}

/// One line of the journal of a whole run.
struct Place {
    event: &'static str,
    /// Its phase; that of the block before it where it belongs to none.
    phase: Phase,
    start: usize,
    /// After its line end.
    end: usize,
    /// Whether it stands inside a block that goes on after it and before its last launch ended.
    inside: bool,
}

fn places(journal: &str) -> Vec<Place> {
    let mut phase = Phase::Search;
    let mut is_open = false;
    let mut start = 0;
    let mut places: Vec<Place> = Vec::new();
    for text in journal.split_inclusive('\n') {
        let line: JournalLine = serde_json::from_str(text).expect("a line of a journal");
        let event = match line.event {
            Event::BlockPlanned { phase: planned, .. } => {
                (phase, is_open) = (planned, true);
                "planned"
            }
            Event::CellMeasured(_) | Event::PassMeasured(_) => "measured",
            Event::LaunchStarted { .. } => "started",
            Event::LaunchEnded { .. } => "launch-ended",
            Event::BlockEnded { .. } => {
                is_open = false;
                if let Some(last) = places.last_mut() {
                    // Only the news of the block's end is missing.
                    (last.event, last.inside) = ("last", false);
                }
                "ended"
            }
            Event::FinalistsChosen { .. } | Event::TrialChosen { .. } => "chosen",
            _ => "other",
        };
        places.push(Place { event, phase, start, end: start + text.len(), inside: is_open });
        start += text.len();
    }
    places
}

/// Where to cut: bytes of the journal that are left, and what for.
fn chosen_places(journal: &str, seed: u64) -> BTreeMap<usize, String> {
    let mut random = Seed(seed).derive("places of crashes", "all");
    let places = places(journal);
    let mut chosen = BTreeMap::new();
    // After events.
    for phase in [Phase::Search, Phase::Final, Phase::Trial] {
        let mut add = |count: usize, name: &str, fits: &dyn Fn(&Place) -> bool| {
            let mut fitting: Vec<&Place> = places.iter().filter(|place| place.phase == phase && fits(place)).collect();
            fitting.shuffle(&mut random);
            assert!(fitting.len() >= count, "{phase:?}: {} places {name}", fitting.len());
            for place in &fitting[..count] {
                chosen.insert(place.end, format!("{phase:?}, {name}"));
            }
        };
        add(3, "a block was just planned", &|place| place.event == "planned");
        add(10, "inside a block", &|place| place.event == "measured" && place.inside);
        add(2, "a launch was just begun", &|place| place.event == "started");
        add(3, "just before a block ended", &|place| place.event == "last");
        add(3, "a block has just ended", &|place| place.event == "ended");
    }
    for place in places.iter().filter(|place| place.event == "chosen") {
        chosen.insert(place.end, "finalists were just chosen".to_owned());
    }
    // In the middle of a write: no byte of the line was written, one, some, all but its end, all but two.
    let mut kind = 0;
    while chosen.len() < PLACES - KILLS - CHARACTERS {
        let phase = [Phase::Search, Phase::Final, Phase::Trial][kind % 3];
        let lines: Vec<&Place> = places.iter().skip(1).filter(|place| place.phase == phase).collect();
        let line = lines.choose(&mut random).expect("lines of every phase");
        let length = line.end - line.start;
        let byte = match kind / 3 % 5 {
            0 => 0,
            1 => 1,
            2 => length - 1,
            3 => length - 2,
            _ => random.random_range(2..length - 2),
        };
        if chosen.insert(line.start + byte, format!("{phase:?}, at byte {byte} of {length} of a line")).is_none() {
            kind += 1;
        }
    }
    chosen
}

#[test]
fn a_run_cut_off_at_a_hundred_places_comes_to_the_same_answer() {
    let seed = 20;
    let whole = Whole::new();
    let chosen = chosen_places(&whole.journal, seed);
    println!("seed {seed}, a journal of {} bytes", whole.journal.len());
    let (mut torn, mut replayed) = (0, 0);
    for (number, (bytes, place)) in chosen.iter().enumerate() {
        let what = format!("cut {number}, after {bytes} bytes ({place})");
        println!("{what}");
        let run = format!("cut-{number}");
        whole.cut(&run, *bytes);
        let is_torn = whole.journal.as_bytes()[bytes - 1] != b'\n';
        torn += usize::from(is_torn);
        let choice = whole.check_resumed(&run, &what);
        // A block that was torn holds some arms and not others; a replay pairs what was measured side by
        // side all the same.
        if number % 6 == 0 {
            whole.scene.run(&format!("tune --backend replay --recorded {run} --out again-{number}")).ok();
            let again = whole.scene.choice(&format!("again-{number}"));
            assert_eq!((&again.winner, again.verdict), (&choice.winner, choice.verdict), "{what}: {}", again.reason);
            assert_eq!((again.objective, again.points), (choice.objective, choice.points), "{what}: replayed");
            assert_eq!(again.trials, choice.trials, "{what}: replayed");
            replayed += 1;
        }
        fs::remove_dir_all(whole.scene.path(&run)).expect("a run that is no longer wanted");
    }
    assert!(torn >= 20 && replayed > 10, "{torn} cuts were inside a line, {replayed} runs were replayed");
    // In the middle of a character: what is left of its line is no UTF-8.
    for (number, bytes) in
        [0, 40, 80].map(|number| *chosen.keys().nth(number).expect("a place")).into_iter().enumerate()
    {
        let run = format!("character-{number}");
        let end = whole.journal[..bytes].rfind('\n').expect("a first line") + 1;
        whole.cut(&run, end);
        let mut journal = fs::read(whole.scene.path(&run).join("run.jsonl")).expect("a journal");
        journal
            .extend_from_slice(&"{\"sequence\":9,\"at_s\":1.0,\"event\":\"cell-failed\",\"arm\":\"é".as_bytes()[..55]);
        assert!(
            std::str::from_utf8(&journal).is_err_and(|error| error.error_len().is_none()),
            "not inside a character"
        );
        whole.scene.write(&format!("{run}/run.jsonl"), &journal);
        whole.check_resumed(&run, &format!("inside a character after {end} bytes"));
    }
    // The same by a signal that nobody can catch.
    let kills = [(Phase::Search, 3), (Phase::Search, 40), (Phase::Final, 20), (Phase::Trial, 1), (Phase::Trial, 30)];
    assert_eq!(chosen.len() + CHARACTERS + kills.len(), PLACES);
    for (phase, events) in kills {
        let run = format!("killed-{phase:?}-{events}");
        let mut held = HeldBack::start(&whole.scene, &tune(&format!("--out {run}")));
        held.read_to(phase, events);
        held.running.signal(Signal::SIGKILL);
        assert_eq!(held.running.wait().code(), None, "nothing but the signal ended it");
        let what = format!("killed {events} events into {phase:?}");
        let last = Evidence::of(&whole.scene.journal(&run)).last_block().expect("a block");
        assert_eq!(last.1, phase, "{what}: it was killed elsewhere");
        whole.check_resumed(&run, &what);
    }
}

/// A program that tells its events and can go no further than somebody listens.
struct HeldBack {
    running: Running,
    events: BufReader<PipeReader>,
    phase: Option<Phase>,
}

impl HeldBack {
    fn start(scene: &Scene, line: &str) -> Self {
        let line = format!("{line} --verbose");
        let mut command = scene.command(&line.split_whitespace().collect::<Vec<_>>());
        // As little as a pipe can hold, about ten events, and that before anything is in it.
        let (events, stderr) = std::io::pipe().expect("a pipe");
        fcntl(&stderr, FcntlArg::F_SETPIPE_SZ(4096)).expect("a pipe of one page");
        let child = command.stdout(Stdio::null()).stderr(stderr).spawn().expect("the program starts");
        // With the command goes this side's end for writing: the program's end is then seen.
        drop(command);
        Self { running: child.into(), events: BufReader::with_capacity(64, events), phase: None }
    }

    /// The next line it tells; none at its end.
    fn next(&mut self) -> Option<String> {
        let mut line = String::new();
        self.events.read_line(&mut line).expect("it tells UTF-8");
        if let Ok(JournalLine { event: Event::BlockPlanned { phase, .. }, .. }) = serde_json::from_str(&line) {
            self.phase = Some(phase);
        }
        (!line.is_empty()).then_some(line)
    }

    /// Listens until so many events of a phase were told.
    #[track_caller]
    fn read_to(&mut self, phase: Phase, events: usize) {
        let mut seen = 0;
        while seen < events {
            let line = self.next().expect("the run ended before it could be hit");
            seen += usize::from(self.phase == Some(phase) && line.starts_with('{'));
        }
    }

    /// Listens slowly, so that a signal that was sent is noticed before much more is told, until a line
    /// holds this text.
    #[track_caller]
    fn read_slowly_to(&mut self, text: &str) {
        let mut last = String::new();
        loop {
            std::thread::sleep(Duration::from_millis(20));
            let line = self.next().unwrap_or_else(|| panic!("the run ended without a word of it; at last: {last}"));
            if line.contains(text) {
                return;
            }
            last = line;
        }
    }

    /// Listens to its end; what it said beside events, and its exit status.
    fn read_out(&mut self, pause: Duration) -> (String, Option<i32>) {
        let mut said = String::new();
        while let Some(line) = self.next() {
            if !line.starts_with('{') {
                said.push_str(&line);
            }
            std::thread::sleep(pause);
        }
        let mut rest = Vec::new();
        self.events.read_to_end(&mut rest).expect("the end");
        (said, self.running.wait().code())
    }
}

const FINISHING: &str = "finishing the block that runs; press again to stop at once";

/// Starts a run with blocks of many cells and stops listening inside its second block.
fn held_in_a_block(scene: &Scene) -> HeldBack {
    let sizes = "4K,8K,12K,16K,24K,32K,48K,64K,96K,128K,192K,256K,384K,512K,768K,1M";
    let line = tune("--out run").replace("--model model.json", &format!("--sizes {sizes}")).replace("--batch 1,4", "");
    let line = line.replace("--chunk 512", "");
    let mut held = HeldBack::start(scene, &line);
    held.read_to(Phase::Search, 150);
    held
}

/// The last block of the run that was stopped: its number, whether it ended, and its cells.
fn stopped_in(scene: &Scene) -> (u32, bool, usize) {
    let lines = scene.journal("run");
    let interrupted = Event::RunInterrupted { reason: "interrupt".to_owned() };
    assert_eq!(lines.last().map(|line| &line.event), Some(&interrupted), "the last event says why");
    assert!(scene.read("run/run.jsonl").ends_with('\n'), "a stop tears no line");
    assert!(!scene.path("run/choice.json").exists());
    let evidence = Evidence::of(&lines);
    let (block, phase) = evidence.last_block().expect("a block");
    let cells = crate::command::cells(&lines).filter(|cell| cell.block == block).count();
    (block, evidence.ended_blocks(phase).contains(&block), cells)
}

/// Arms and sizes of [`held_in_a_block`].
const CELLS: usize = 7 * 16;

#[test]
fn the_first_signal_finishes_the_block_however_it_is_sent() {
    // `timeout` sends its own twice, to the process and to its group: that is one wish.
    for signals in [&[Signal::SIGINT][..], &[Signal::SIGTERM], &[Signal::SIGTERM, Signal::SIGTERM]] {
        let scene = scene();
        let mut held = held_in_a_block(&scene);
        for signal in signals {
            held.running.signal(*signal);
            // Far enough for each to be seen by itself.
            std::thread::sleep(Duration::from_millis(10));
        }
        held.read_slowly_to(FINISHING);
        let (said, status) = held.read_out(Duration::ZERO);
        assert_eq!(status, Some(6), "{signals:?}: {said}");
        assert!(said.contains("nccltune tune --resume --out run"), "{signals:?}: {said}");
        assert_eq!(stopped_in(&scene), (1, true, CELLS), "{signals:?}: the block is whole");
        scene.run("tune --resume --out run").ok();
        let lines = scene.journal("run");
        assert_sound(&lines, "stopped after a block");
        assert_eq!(scene.choice("run").winner.as_deref(), Some(WINNER));
        // Nothing was torn, so that no arm was searched more than three times, the default included.
        assert_eq!(Evidence::of(&lines).ended_blocks(Phase::Search).len(), 3);
    }
}

#[test]
fn the_second_signal_stops_at_once_and_the_run_goes_on_all_the_same() {
    let scene = scene();
    let mut held = held_in_a_block(&scene);
    held.running.signal(Signal::SIGTERM);
    held.read_slowly_to(FINISHING);
    std::thread::sleep(ANOTHER_PRESS);
    held.running.signal(Signal::SIGINT);
    let (said, status) = held.read_out(Duration::from_millis(20));
    assert_eq!(status, Some(6), "{said}");
    assert!(said.contains("nccltune tune --resume --out run"), "{said}");
    let (block, ended, cells) = stopped_in(&scene);
    assert_eq!((block, ended), (1, false), "the block is left as it was");
    assert!(cells < CELLS, "{cells}: it was finished all the same");
    scene.run("tune --resume --out run").ok();
    assert_sound(&scene.journal("run"), "stopped inside a block");
    assert_eq!(scene.choice("run").winner.as_deref(), Some(WINNER));
}

#[test]
fn a_signal_while_the_last_block_runs_costs_no_verdict() {
    let scene = scene();
    // Passes enough that a block of the trial is far larger than the pipe.
    let line = |out: &str| tune(&format!("--out {out}")).replace("--batch 1,4", "--batch 1,2,3,4,5,6,7,8,9,10,11,12");
    // The trial of an unbroken run: where its last block begins.
    scene.run(&line("whole")).ok();
    let places = places(&scene.read("whole/run.jsonl"));
    let trial: Vec<&Place> = places.iter().filter(|place| place.phase == Phase::Trial).collect();
    let last = trial.iter().rposition(|place| place.event == "planned").expect("a block of the trial");
    assert!(trial.last().expect("events").end - trial[last].end > 10_000, "the last block is too small to be hit");
    let mut held = HeldBack::start(&scene, &line("run"));
    held.read_to(Phase::Trial, last + 2);
    held.running.signal(Signal::SIGINT);
    held.read_slowly_to(FINISHING);
    let (said, status) = held.read_out(Duration::ZERO);
    assert_eq!(status, Some(0), "everything was measured: {said}");
    assert_eq!(scene.choice("run").winner.as_deref(), Some(WINNER));
}

#[test]
fn a_torn_block_of_the_trial_whose_clocks_differed_counts_for_nothing() {
    let whole = Whole::new();
    let places = places(&whole.journal);
    let trial =
        |event: &'static str| places.iter().filter(move |place| place.phase == Phase::Trial && place.event == event);
    // Before the block's end, and after it but before what follows from it could be written.
    for (number, place) in [trial("last").nth(1), trial("ended").nth(1)].into_iter().enumerate() {
        let run = format!("run-{number}");
        whole.cut(&run, place.expect("a second block of the trial").end);
        let mut lines = whole.scene.journal(&run);
        let (block, phase) = Evidence::of(&lines).last_block().expect("a block");
        assert_eq!(phase, Phase::Trial);
        let mut launch = None;
        for line in &mut lines {
            if let Event::PassMeasured(pass) = &mut line.event
                && pass.block == block
                && *launch.get_or_insert(pass.launch) == pass.launch
            {
                pass.states = vec![GpuState { throttle: vec!["power".to_owned()], ..GpuState::default() }];
            }
        }
        whole.scene.write(&format!("{run}/run.jsonl"), journal_text(&lines));
        whole.scene.run(&format!("tune --resume --out {run}")).ok();
        let lines = whole.scene.journal(&run);
        let evidence = Evidence::of(&lines);
        assert_eq!(evidence.voided().keys().copied().collect::<Vec<_>>(), [block], "{run}");
        // It is measured again.
        whole.assert_measured_once(&lines, &run);
        assert_eq!(evidence.ended_blocks(Phase::Trial).len(), PAIRS + 1);
        assert_eq!(choice_in(&whole.scene.path(&run)).winner.as_deref(), Some(WINNER));
    }
}

#[test]
fn a_disk_that_is_full_anywhere_loses_nothing() {
    let whole = Whole::new();
    let scene = &whole.scene;
    // In steps of the shell's blocks, whatever their size, from nothing to all of it.
    let most = (whole.journal.len() / 512) as u32 + 2;
    let mut statuses = BTreeMap::new();
    for blocks in (1..=most).step_by((most / 10) as usize).chain([2 * most]) {
        let run = format!("run-{blocks}");
        let ended = scene.run_on_full_disk(blocks, &tune(&format!("--out {run}")));
        *statuses.entry(ended.status).or_insert(0) += 1;
        match ended.status {
            Some(0) => assert_eq!(scene.choice(&run).winner.as_deref(), Some(WINNER)),
            Some(2) => {
                assert!(ended.stderr.contains(&run) && ended.stderr.contains("free some space"), "{}", ended.stderr);
                assert!(!scene.path(&run).exists(), "{blocks}: nothing is left of a run that did not begin");
            }
            Some(6) => {
                let hint = format!("nccltune tune --resume --out {run}");
                assert!(ended.stderr.contains("run.jsonl") && ended.stderr.contains(&hint), "{}", ended.stderr);
                // Room for the resume to say that it is one is missing too: no better, and no worse.
                let before = fs::read(scene.path(&format!("{run}/run.jsonl"))).expect("a journal");
                let again = scene.run_on_full_disk(blocks, &format!("tune --resume --out {run}"));
                assert_eq!(again.status, Some(6), "{}", again.stderr);
                assert!(again.stderr.contains("run.jsonl") && again.stderr.contains(&hint), "{}", again.stderr);
                let kept = before.iter().rposition(|byte| *byte == b'\n').expect("a first line") + 1;
                let after = fs::read(scene.path(&format!("{run}/run.jsonl"))).expect("a journal");
                assert_eq!(after[..kept], before[..kept], "{blocks}: what was measured is kept");
                scene.run(&format!("tune --resume --out {run}")).ok();
                let lines = scene.journal(&run);
                assert_sound(&lines, &run);
                whole.assert_measured_once(&lines, &run);
                assert_eq!(scene.choice(&run).winner.as_deref(), Some(WINNER));
            }
            other => panic!("{blocks}: {other:?}: {}", ended.stderr),
        }
    }
    let seen: Vec<Option<i32>> = statuses.keys().copied().collect();
    assert_eq!(seen, [Some(0), Some(2), Some(6)], "{statuses:?}");
}
