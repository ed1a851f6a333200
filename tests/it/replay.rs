//! Recorded runs through the whole program: the recorded verdict comes out again, and another one
//! where the numbers are others. A replay that only repeated choice.json would pass the first and
//! fail the second.

use std::collections::BTreeSet;
use std::path::Path;

use fs_err as fs;
use nccltune::evidence::{Evidence, Objective, default_arm, measured_points};
use nccltune::record::{Arm, ArmId, Choice, Event, JournalLine, Manifest, Phase, Trial, VerdictKind};
use nccltune::search::{SearchContext, pooled_half_width, standings};

use crate::command::{Scene, cells, choice_in, journal_in, journal_text, manifest_in, recorded};

const HOST_MEMORY: &str = "h200x2-host-memory";
const RECIPE: &str = "copied-recipe";

fn replay(scene: &Scene, run: &Path, out: &str, more: &str) -> Choice {
    scene.run(&format!("tune --backend replay --recorded {} --out {out} {more}", run.display())).ok();
    scene.choice(out)
}

/// A copy of a recorded run with other events.
fn changed(scene: &Scene, name: &str, change: impl FnMut(&mut JournalLine)) {
    let run = recorded(HOST_MEMORY);
    scene.copy_run(&run, name, &["manifest.json"]);
    let mut lines = journal_in(&run);
    lines.iter_mut().for_each(change);
    scene.write(&format!("{name}/run.jsonl"), journal_text(&lines));
}

fn arm<'a>(manifest: &'a Manifest, name: &str) -> &'a Arm {
    manifest.arms.iter().find(|arm| arm.name == name).unwrap_or_else(|| panic!("no arm {name}"))
}

/// The search of a run, as whoever judged it saw it.
fn searched(run: &Path) -> (Manifest, SearchContext, Evidence) {
    let manifest = manifest_in(run);
    let context = SearchContext {
        default: default_arm(&manifest.arms).expect("a default").id.clone(),
        objective: Objective::of(&manifest.workload).expect("an objective"),
        points: measured_points(&manifest.workload),
        settings: manifest.settings.clone(),
        most_launches: None,
        gate: None,
        most_trial_launches: None,
        trial: None,
        budget_s: None,
        earlier: Vec::new(),
        arms: manifest.arms.clone(),
    };
    let evidence = Evidence::of(&journal_in(run));
    (manifest, context, evidence)
}

fn assert_close(left: Option<f64>, right: Option<f64>, what: &str) {
    match (left, right) {
        (Some(left), Some(right)) => assert!((left - right).abs() < 1e-9, "{what}: {left} and {right}"),
        (left, right) => assert_eq!(left, right, "{what}"),
    }
}

#[test]
fn a_replay_comes_to_the_recorded_verdict() {
    let scene = Scene::new();
    let run = recorded(HOST_MEMORY);
    let (before, after) = (choice_in(&run), replay(&scene, &run, "X", ""));
    assert_eq!(after.verdict, VerdictKind::Adopt);
    assert_eq!((after.verdict, &after.winner, &after.env), (before.verdict, &before.winner, &before.env));
    assert_eq!(after.required_environment, before.required_environment);
    assert_eq!(after.fingerprint, before.fingerprint, "the answer belongs to the machine it was measured on");
    assert_close(after.objective.ratio, before.objective.ratio, "objective");
    for (after, before) in after.points.iter().chain(&after.guard).zip(before.points.iter().chain(&before.guard)) {
        assert_eq!((after.bytes, after.collective), (before.bytes, before.collective));
        assert_close(after.ratio, before.ratio, &format!("{} of {} bytes", after.collective, after.bytes));
        assert_close(after.winner_us, before.winner_us, &format!("{} bytes", after.bytes));
        assert_eq!(after.effective, before.effective, "what ran is what was recorded to have run");
    }
    let names = |choice: &Choice| choice.vetoed.iter().map(|veto| veto.name.clone()).collect::<BTreeSet<_>>();
    assert_eq!(names(&after), names(&before));
    // And again, to the bit.
    let again = replay(&scene, &run, "Y", "");
    assert_eq!(again, after);
    assert_eq!(scene.read("X/run.jsonl"), scene.read("Y/run.jsonl"));
}

#[test]
fn a_replay_says_that_it_is_one_and_that_messages_went_through_host_memory() {
    let scene = Scene::new();
    let run = recorded(HOST_MEMORY);
    for format in ["text", "json", "csv", "markdown"] {
        let out = format!("run-{format}");
        let line = format!("tune --backend replay --recorded {} --out {out} --format {format}", run.display());
        let shown = scene.run(&line).ok().stdout;
        for word in ["REPLAYED", "HOST-MEMORY"] {
            assert!(shown.contains(word), "{format}: no {word}\n{shown}");
            for file in ["tuned.env", "tuned.sh", "choice.json"] {
                assert!(scene.read(&format!("{out}/{file}")).contains(word), "{file}: no {word}");
            }
        }
        let choice = scene.choice(&out);
        assert_eq!(choice.labels, ["REPLAYED", "HOST-MEMORY"]);
        assert!(choice.replayed && !choice.simulated);
        assert!(!shown.contains("SIMULATED"));
    }
    let manifest = manifest_in(&scene.path("run-text"));
    assert!(manifest.labels.replayed && manifest.labels.host_memory);
    assert_eq!(manifest.recorded.as_deref(), Some(HOST_MEMORY));
}

#[test]
fn the_copied_recipe_is_vetoed_for_what_it_does_to_prefill() {
    let scene = Scene::new();
    let run = recorded(HOST_MEMORY);
    let choice = replay(&scene, &run, "X", "");
    let veto = choice.vetoed.iter().find(|veto| veto.name == RECIPE).expect("the copied recipe is vetoed");
    assert_eq!(veto.env, arm(&manifest_in(&run), RECIPE).env);
    // "in the search all-reduce of 117,440,512 bytes took 3.34 times as long as with the default"
    let (before, after) = veto.reason.split_once(" bytes took ").unwrap_or_else(|| panic!("{}", veto.reason));
    let bytes: u64 = before.rsplit(' ').next().unwrap().replace(',', "").parse().unwrap();
    let times: f64 = after.split(' ').next().unwrap().parse().unwrap();
    assert!(times > 2.0, "{}", veto.reason);
    let guard = &manifest_in(&run).workload.guard;
    assert!(guard.iter().any(|point| point.bytes == bytes && point.measured), "{bytes} is a prefill size");
}

#[test]
fn what_was_measured_side_by_side_stays_so_where_an_arm_lacks_a_block() {
    let scene = Scene::new();
    let run = recorded(HOST_MEMORY);
    let (manifest, context, before) = searched(&run);
    let winner = &arm(&manifest, &choice_in(&run).winner.unwrap()).id;
    let finals = before.ended_blocks(Phase::Final);
    // As if the winner had failed in one block and the default in another: neither makes a pair.
    let lacks = |line: &JournalLine| match &line.event {
        Event::CellMeasured(cell) => {
            (cell.arm == *winner && cell.block == finals[1]) || (cell.arm == context.default && cell.block == finals[3])
        }
        _ => false,
    };
    let mut lines: Vec<JournalLine> = journal_in(&run).into_iter().filter(|line| !lacks(line)).collect();
    for (sequence, line) in (0..).zip(&mut lines) {
        line.sequence = sequence;
    }
    scene.copy_run(&run, "gaps", &["manifest.json"]);
    scene.write("gaps/run.jsonl", journal_text(&lines));
    let ratios =
        |evidence: &Evidence| evidence.objective_log_ratios(Phase::Final, winner, &context.default, &context.objective);
    let expected = ratios(&Evidence::of(&lines));
    assert_eq!(expected.len(), finals.len() - 2);
    // Every pair is one that was recorded, and none is made of two halves.
    replay(&scene, &scene.path("gaps"), "X", "");
    let again = ratios(&Evidence::of(&scene.journal("X")));
    assert_eq!(again, expected);
}

#[test]
fn a_winner_whose_samples_take_longer_does_not_win() {
    let scene = Scene::new();
    let run = recorded(HOST_MEMORY);
    let winner = choice_in(&run).winner.unwrap();
    let id = arm(&manifest_in(&run), &winner).id.clone();
    changed(&scene, "slower", |line| {
        if let Event::CellMeasured(cell) = &mut line.event
            && cell.arm == id
        {
            cell.replays_us.iter_mut().for_each(|us| *us *= 1.3);
        }
    });
    let choice = replay(&scene, &scene.path("slower"), "X", "");
    assert_ne!(choice.winner.as_deref(), Some(winner.as_str()), "{}", choice.reason);
    assert_ne!(choice.env, choice_in(&run).env);
    // All its samples shrunk instead: it wins by more.
    changed(&scene, "faster", |line| {
        if let Event::CellMeasured(cell) = &mut line.event
            && cell.arm == id
        {
            cell.replays_us.iter_mut().for_each(|us| *us *= 0.9);
        }
    });
    let faster = replay(&scene, &scene.path("faster"), "Y", "");
    assert_eq!(faster.winner, Some(winner));
    assert_close(faster.objective.ratio, choice_in(&run).objective.ratio.map(|ratio| ratio * 0.9), "objective");
}

#[test]
fn a_default_that_is_as_fast_as_the_rest_is_kept() {
    let scene = Scene::new();
    let default = default_arm(&manifest_in(&recorded(HOST_MEMORY)).arms).unwrap().id.clone();
    changed(&scene, "fast-default", |line| {
        if let Event::CellMeasured(cell) = &mut line.event
            && cell.arm == default
        {
            cell.replays_us.iter_mut().for_each(|us| *us *= 0.6);
        }
    });
    let choice = replay(&scene, &scene.path("fast-default"), "X", "");
    assert_eq!(choice.verdict, VerdictKind::KeepDefault, "{}", choice.reason);
    assert_eq!((choice.winner, choice.objective.winner), (None, None));
    assert_eq!(choice.env.keys().collect::<Vec<_>>(), ["NCCL_P2P_DISABLE"], "the pin alone");
}

#[test]
fn arms_that_swap_their_samples_swap_their_fate() {
    let scene = Scene::new();
    let run = recorded(HOST_MEMORY);
    let manifest = manifest_in(&run);
    let before = choice_in(&run);
    let winner = before.winner.clone().unwrap();
    let (winner_id, recipe_id) = (arm(&manifest, &winner).id.clone(), arm(&manifest, RECIPE).id.clone());
    let swapped = |id: &ArmId| match id {
        id if *id == winner_id => recipe_id.clone(),
        id if *id == recipe_id => winner_id.clone(),
        id => id.clone(),
    };
    changed(&scene, "swapped", |line| {
        if let Event::CellMeasured(cell) = &mut line.event {
            cell.arm = swapped(&cell.arm);
        }
    });
    let choice = replay(&scene, &scene.path("swapped"), "X", "");
    assert_eq!((choice.verdict, choice.winner.as_deref()), (VerdictKind::Adopt, Some(RECIPE)), "{}", choice.reason);
    let mut env = arm(&manifest, RECIPE).env.clone();
    env.insert("NCCL_P2P_DISABLE".to_owned(), "1".to_owned());
    assert_eq!(choice.env, env);
    assert_close(choice.objective.ratio, before.objective.ratio, "the same samples under another name");
    assert!(choice.vetoed.iter().any(|veto| veto.name == winner), "what the recipe does to prefill is now the other's");
    assert!(!choice.vetoed.iter().any(|veto| veto.name == RECIPE));
}

#[test]
fn launches_that_were_never_recorded_are_called_so() {
    let scene = Scene::new();
    let run = recorded(HOST_MEMORY);
    let plain = replay(&scene, &run, "plain", "");
    assert!(plain.notes.is_empty(), "{:?}", plain.notes);

    let assumed = replay(&scene, &run, "assumed", "--assume-noise 1.8%");
    assert!(assumed.replayed);
    let note = "launches were redrawn around the recorded ones with an assumed noise of 1.8 %";
    assert!(assumed.notes.iter().any(|known| known == note), "{:?}", assumed.notes);
    assert_eq!(assumed.verdict, VerdictKind::Adopt, "{}", assumed.reason);
    let floor = |choice: &Choice| choice.noise_floor.unwrap();
    assert!(floor(&assumed) > floor(&plain), "assumed noise widens the floor");
    // Everybody who reads the answer is told, not only who reads the JSON.
    let text = scene.run(&format!("tune --backend replay --recorded {} --out told --assume-noise 1.8%", run.display()));
    let told = text.ok().stdout;
    assert!(told.contains(note), "{told}");
    assert!(told.contains("REDRAWN: launches were drawn"), "{told}");
    let file = scene.read("told/tuned.env");
    assert!(file.contains("REDRAWN") && file.contains("do not deploy"), "{file}");

    // More launches than there are: what is missing is not made up, and nobody is told a reason that
    // is not true.
    let longer = replay(&scene, &run, "longer", "--final-launches 20");
    assert_eq!(longer.verdict, VerdictKind::Undecided, "{}", longer.reason);
    assert!(longer.reason.contains("cannot be judged: the recorded run has no further launch"), "{}", longer.reason);
    assert!(longer.answers.is_empty() && longer.winner.is_none());
}

#[test]
fn an_arm_that_was_never_recorded_is_not_invented() {
    let scene = Scene::new();
    let run = recorded(HOST_MEMORY);
    scene.write(
        "space.toml",
        "format = 1\nname = \"more\"\ndescription = \"one arm that was recorded and one that was not\"\n\
         [[arm]]\nname = \"recorded\"\nenv = { NCCL_MIN_NCHANNELS = \"16\" }\n\
         [[arm]]\nname = \"never\"\nenv = { NCCL_MIN_NCHANNELS = \"24\" }\n",
    );
    // It was recorded while searching only, so nothing can be said of it on launches of its own.
    let choice = replay(&scene, &run, "X", "--space space.toml");
    assert_eq!(choice.verdict, VerdictKind::Undecided, "{}", choice.reason);
    assert!(choice.reason.starts_with("recorded cannot be judged"), "{}", choice.reason);
    let veto = choice.vetoed.iter().find(|veto| veto.name == "never").expect("listed as an arm that may not ship");
    assert!(veto.reason.starts_with("not-recorded"), "{}", veto.reason);
    let summary = scene.read("X/summary.csv");
    assert!(summary.lines().filter(|row| row.starts_with("never,")).all(|row| row.contains(",not-recorded,")));
    // With an assumed noise its search launches stand in.
    let assumed = replay(&scene, &run, "Y", "--space space.toml --assume-noise 1%");
    assert_eq!(assumed.winner.as_deref(), Some("recorded"), "{}", assumed.reason);
    assert!(assumed.vetoed.iter().any(|veto| veto.name == "never"));
}

#[test]
fn the_adopted_arm_is_as_good_as_the_best_of_the_full_grid() {
    let run = recorded(HOST_MEMORY);
    let (manifest, context, evidence) = searched(&run);
    let choice = choice_in(&run);
    let winner = arm(&manifest, &choice.winner.unwrap()).id.clone();
    let blocks = evidence.ended_blocks(Phase::Search).len();
    assert_eq!(blocks, 3);
    let grid = standings(&context, &evidence);
    assert_eq!(grid.len(), manifest.arms.len() - 1, "every arm of the grid was measured at every point");
    // Eligible: not shown to regress anywhere.
    let limit = (1.0 + manifest.settings.max_regression).ln();
    let best = grid
        .iter()
        .find(|standing| standing.worst.is_none_or(|(_, log, half_width)| log - half_width <= limit))
        .unwrap();
    let adopted = grid.iter().find(|standing| standing.arm == winner).unwrap();
    // Both means scatter, so their difference does by the root of two more.
    let noise = pooled_half_width(&context, &evidence, None, blocks) * std::f64::consts::SQRT_2;
    let behind = adopted.objective_log - best.objective_log;
    assert!(behind <= noise, "{behind:.4} behind the best of the grid, with noise of {noise:.4}");
    assert!(noise < 0.02, "{noise}: a grid this noisy would show nothing");
}

#[test]
fn every_recorded_run_can_be_read_and_replayed() {
    let folder = recorded("");
    let mut seen = 0;
    for entry in fs::read_dir(&folder).unwrap() {
        let run = entry.unwrap().path();
        if run.is_file() {
            // The page that says what the runs are.
            continue;
        }
        let name = run.file_name().unwrap().to_string_lossy().into_owned();
        let (manifest, choice) = (manifest_in(&run), choice_in(&run));
        let lines = journal_in(&run);
        assert_eq!((manifest.format, choice.format), (1, 1), "{name}");
        let Some(Event::RunOpened { format: 1, .. }) = lines.first().map(|line| &line.event) else {
            panic!("{name} begins with {:?}", lines.first());
        };
        assert_eq!(choice.fingerprint, manifest.fingerprint.combined, "{name}");
        let passes = lines.iter().filter(|line| matches!(line.event, Event::PassMeasured(_))).count();
        assert_eq!(cells(&lines).count() + passes, choice.search.measured_cells as usize, "{name}");
        let ids: BTreeSet<&ArmId> = manifest.arms.iter().map(|arm| &arm.id).collect();
        assert!(cells(&lines).all(|cell| ids.contains(&cell.arm)), "{name} measured an arm that it does not describe");
        // What a run without a winner derives is not worth keeping: a replay writes it again.
        for file in ["summary.csv", "tuned.env", "tuned.sh"] {
            assert!(choice.winner.is_none() || run.join(file).exists(), "{name}/{file}");
        }
        let size: u64 = fs::read_dir(&run).unwrap().map(|file| file.unwrap().metadata().unwrap().len()).sum();
        assert!(size < 2 << 20, "{name} has {size} bytes; recorded runs are kept small");
        let scene = Scene::new();
        let again = replay(&scene, &run, "X", "");
        assert_eq!(again.verdict, choice.verdict, "{name}: {}", again.reason);
        assert_eq!(again.winner, choice.winner, "{name}: {}", again.reason);
        let passes = |trials: &[Trial]| -> Vec<(String, Option<u64>, Option<f64>)> {
            trials.iter().map(|trial| (trial.arm.clone(), trial.tokens, trial.ratio)).collect()
        };
        assert_eq!(passes(&again.trials), passes(&choice.trials), "{name}");
        for emit_as in ["env", "shell"] {
            scene.run(&format!("emit --run {} --as {emit_as}", run.display())).ok();
        }
        seen += 1;
    }
    assert!(seen > 0, "no recorded run in {}", folder.display());
}

#[test]
fn simulated_numbers_stay_labelled_under_another_manifest() {
    let scene = Scene::new();
    scene.run("tune --backend simulated --space baseline --no-trial --out run").ok();
    let manifest = scene
        .read("run/manifest.json")
        .replacen("\"backend\": \"simulated\"", "\"backend\": \"nccl\"", 1)
        .replacen("\"simulated\": true", "\"simulated\": false", 1);
    scene.write("run/manifest.json", manifest);
    let ended = scene.run("tune --backend replay --recorded run --out again").ok();
    assert!(ended.stdout.contains("*** SIMULATED"), "{}", ended.shown());
    assert!(scene.choice("again").simulated);
}

/// The journal of a whole run up to the end of so many blocks of its trial.
fn cut_in_the_trial(scene: &Scene, to: &str, blocks: usize) {
    let lines = scene.journal("run");
    let trial: BTreeSet<u32> = lines
        .iter()
        .filter_map(|line| match &line.event {
            Event::BlockPlanned { block, phase: Phase::Trial, .. } => Some(*block),
            _ => None,
        })
        .collect();
    let ends = |line: &JournalLine| matches!(&line.event, Event::BlockEnded { block } if trial.contains(block));
    let last = lines.iter().enumerate().filter(|(_, line)| ends(line)).nth(blocks - 1).expect("so many blocks").0;
    scene.copy_run(&scene.path("run"), to, &["manifest.json"]);
    scene.write(&format!("{to}/run.jsonl"), journal_text(&lines[..=last]));
}

#[test]
fn a_trial_cut_short_settles_nothing() {
    let scene = Scene::new();
    scene.run("tune --backend simulated --out run").ok();
    assert_eq!(scene.choice("run").verdict, VerdictKind::Adopt);
    for blocks in 1..4 {
        cut_in_the_trial(&scene, &format!("cut-{blocks}"), blocks);
        let choice = replay(&scene, &scene.path(&format!("cut-{blocks}")), &format!("again-{blocks}"), "");
        assert_eq!(choice.verdict, VerdictKind::Undecided, "{blocks}: {}", choice.reason);
        assert!(choice.answers.is_empty(), "{:?}", choice.answers);
    }
}
