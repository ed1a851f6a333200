//! Racing against landscapes whose truth is known, a smaller version of `examples/regret`, and whole runs of it.

#[path = "../../examples/regret/lab.rs"]
mod lab;

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use nccltune::record::{Arm, ArmId, Event, JournalLine, UpdateVerdict, VerdictKind};

use self::lab::{Landscape, WITHIN, grid, racing};
use crate::command::{Scene, cells, journal_text, manifest_in, recorded};

fn bench() -> Landscape {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("results/recorded/h200x2-host-memory-bench");
    Landscape::recorded(&folder).expect("a recorded grid")
}

#[test]
fn it_finds_what_the_full_grid_would_with_a_sixth_of_its_cells() {
    for landscape in [bench(), bench().permuted(1)] {
        let (mut within, mut share) = (0, 0.0);
        for seed in 0..10 {
            let outcome = landscape.campaign(seed, &racing());
            within += u32::from(outcome.regret.exp() - 1.0 <= WITHIN);
            share += outcome.share / 10.0;
            assert!(outcome.worst.exp() <= 1.02, "{}, seed {seed}: harms a point", landscape.name);
        }
        assert!(within >= 9, "{}: {within} of 10", landscape.name);
        assert!(share < 1.0 / 6.0, "{}: {share}", landscape.name);
    }
}

#[test]
fn what_two_settings_gain_together_is_found_among_hundreds_of_arms() {
    let axes: [(&str, &[&str]); 4] = [
        ("NCCL_MIN_NCHANNELS", &["unset", "4", "8", "16"]),
        ("NCCL_NTHREADS", &["unset", "128", "256"]),
        ("NCCL_THREAD_THRESHOLDS", &["unset", "-1-1-1+2", "-1-1-1+8"]),
        ("NCCL_BUFFSIZE", &["unset", "1048576"]),
    ];
    let together = |arm: &Arm| {
        arm.env.get("NCCL_THREAD_THRESHOLDS").is_some_and(|value| value == "-1-1-1+2")
            && arm.env.contains_key("NCCL_BUFFSIZE")
    };
    let effect = |arm: &Arm| vec![if together(arm) { -0.08 } else { 0.0 }; 5];
    let planted = Landscape::planted(&bench().manifest, "pair", grid(&axes), 5, &effect);
    let planted = Landscape { noise: bench().noise, ..planted };
    for seed in 0..5 {
        let outcome = planted.campaign(seed, &racing());
        assert!(outcome.regret <= WITHIN, "seed {seed}: {}", outcome.choice.reason);
        assert!(outcome.share < 0.155, "seed {seed}: {}", outcome.share);
    }
}

#[test]
fn under_fixed_noise_nothing_is_adopted_for_nothing_and_no_landmine_ships() {
    let values = ["unset", "1", "2", "4", "8", "16", "24", "32"];
    let arms = || grid(&[("NCCL_MIN_NCHANNELS", &values)]);
    let mut mine = vec![0.92_f64.ln(); 12];
    mine[5] = 1.05_f64.ln();
    let cases = BTreeMap::from([("nothing", vec![0.0; 12]), ("landmine", mine), ("gain", vec![0.92_f64.ln(); 12])]);
    for (name, logs) in cases {
        let has = |arm: &Arm| arm.env.get("NCCL_MIN_NCHANNELS").is_some_and(|value| value == "16");
        let effect = |arm: &Arm| if has(arm) { logs.clone() } else { vec![0.0; 12] };
        let landscape = Landscape::planted(&bench().manifest, name, arms(), 12, &effect);
        let adopted = (0..40).filter(|seed| landscape.campaign(*seed, &racing()).choice.verdict == VerdictKind::Adopt);
        let adopted = adopted.count();
        match name {
            "gain" => assert!(adopted >= 30, "{name}: {adopted} of 40"),
            _ => assert_eq!(adopted, 0, "{name}"),
        }
    }
}

/// The most memory that the program holds while it plans a run over a million arms.
#[test]
fn a_space_of_a_million_arms_streams_in_little_memory() {
    let scene = Scene::new();
    let mut text = "format = 1\nname = \"million\"\ndescription = \"a million arms\"\n".to_owned();
    let count = |range: std::ops::RangeInclusive<u64>, form: &dyn Fn(u64) -> String| range.map(form).collect();
    // 40 x 16 x 16 x 16 x 8 combinations.
    let axes: [(&str, Vec<String>); 5] = [
        ("NCCL_MIN_NCHANNELS", count(1..=39, &|value| value.to_string())),
        ("NCCL_NTHREADS", count(2..=16, &|value| (32 * value).to_string())),
        ("NCCL_BUFFSIZE", count(16..=30, &|power| (1_u64 << power).to_string())),
        ("NCCL_THREAD_THRESHOLDS", count(1..=15, &|value| format!("-1-1-1+{value}"))),
        ("NCCL_CGA_CLUSTER_SIZE", count(1..=7, &|value| value.to_string())),
    ];
    for (variable, mut values) in axes {
        values.push("unset".to_owned());
        text.push_str(&format!("[[axis]]\nvariable = \"{variable}\"\nvalues = {values:?}\n"));
    }
    scene.write("million.toml", text);
    let mut child = std::process::Command::new(env!("CARGO_BIN_EXE_nccltune"))
        .args(["tune", "--backend", "simulated", "--strategy", "racing", "--space", "million.toml", "--dry-run"])
        .current_dir(scene.path("."))
        .env_clear()
        .stdout(std::process::Stdio::piped())
        .stderr(std::process::Stdio::piped())
        .spawn()
        .expect("the program starts");
    let status = format!("/proc/{}/status", child.id());
    let told = std::thread::spawn({
        let mut errors = child.stderr.take().expect("it is piped");
        move || {
            let mut text = String::new();
            let _ = std::io::Read::read_to_string(&mut errors, &mut text);
            text
        }
    });
    let planned = std::thread::spawn({
        let mut output = child.stdout.take().expect("it is piped");
        move || {
            let mut text = String::new();
            let _ = std::io::Read::read_to_string(&mut output, &mut text);
            text
        }
    });
    let mut most_kib = 0_u64;
    let ended = loop {
        let text = std::fs::read_to_string(&status).unwrap_or_default();
        let peak = text.lines().find_map(|line| line.strip_prefix("VmHWM:")?.trim().strip_suffix(" kB")?.parse().ok());
        most_kib = most_kib.max(peak.unwrap_or(0));
        if let Some(ended) = child.try_wait().expect("it can be waited for") {
            break ended;
        }
        std::thread::sleep(std::time::Duration::from_millis(2));
    };
    let (told, planned) = (told.join().expect("read"), planned.join().expect("read"));
    assert!(ended.success(), "{told}");
    assert!(told.contains("the space has 1310720 arms"), "{told}");
    assert!(planned.contains("4096 arms with the default"), "{}", planned.lines().take(8).collect::<String>());
    assert!(most_kib > 5_000, "a peak of {most_kib} KiB was not seen right");
    assert!(most_kib < 200_000, "{most_kib} KiB at most");
    println!("peak: {most_kib} KiB");
}

const RUN: &str = "tune --backend simulated --no-trial --space host-memory --pin NCCL_P2P_DISABLE=1 --strategy racing \
     --repair-graph never --tables never";

#[test]
fn tables_that_a_race_made_are_measured_too() {
    let scene = Scene::new();
    scene.run(&format!("{} --out run", RUN.replace("--tables never", "--tables auto"))).ok();
    let made = manifest_in(&scene.path("run")).tables.expect("tables were made").arms;
    assert!(!made.is_empty());
    let lines = scene.journal("run");
    for arm in &made {
        assert!(cells(&lines).any(|cell| cell.arm == arm.id), "{} was not measured", arm.name);
    }
}

#[test]
fn a_race_drops_arms_in_the_journal_and_a_resumed_one_goes_on_alike() {
    let scene = Scene::new();
    scene.run(&format!("{RUN} --out whole")).ok();
    let lines = scene.journal("whole");
    let dropped = lines.iter().filter(|line| matches!(line.event, Event::ArmDropped { .. })).count();
    assert!(dropped > 0, "nobody was dropped");
    let choice = scene.choice("whole");
    assert!(choice.search.measured_cells * 4 < choice.search.full_grid_cells, "{:?}", choice.search);
    // Cut off after the third block, it asks for what the whole run asked for.
    let ends = |line: &JournalLine| matches!(line.event, Event::BlockEnded { block: 2 });
    let last = lines.iter().position(ends).unwrap();
    scene.copy_run(&scene.path("whole"), "cut", &["manifest.json"]);
    scene.write("cut/run.jsonl", journal_text(&lines[..=last]));
    // It goes on as it began, without tables, unasked.
    scene.run("tune --resume --no-trial --out cut").ok();
    assert_eq!((scene.choice("cut").winner, scene.choice("cut").reason), (choice.winner, choice.reason));
    // To the bit, where no block was torn.
    assert_eq!(events(&scene.journal("cut")), events(&lines));
    // Another strategy is another run.
    let refused = scene.run("tune --resume --out cut --strategy exhaustive");
    assert_eq!(refused.status, Some(2), "{}", refused.stderr);
}

/// What happened, whether or not it was stopped in between.
fn events(lines: &[JournalLine]) -> Vec<Event> {
    let events = lines.iter().map(|line| line.event.clone());
    events.filter(|event| !matches!(event, Event::RunResumed { .. })).collect()
}

/// The arms of a race's first block.
fn opening(lines: &[JournalLine]) -> BTreeSet<ArmId> {
    let planned = lines.iter().find_map(|line| match &line.event {
        Event::BlockPlanned { launches, .. } => Some(launches.iter().flat_map(|launch| launch.arms.clone()).collect()),
        _ => None,
    });
    planned.expect("a block")
}

#[test]
fn a_race_that_knows_an_earlier_one_begins_with_its_best_and_goes_on_so() {
    let scene = Scene::new();
    scene.run(&format!("{RUN} --out before")).ok();
    let mut best: Vec<(f64, ArmId)> = Vec::new();
    let warm = RUN.replace(" --strategy racing", " --seed 5 --warm-start before");
    let told = scene.run(&format!("{warm} --out warm")).ok().stderr;
    assert!(told.contains("the race begins with what before saw of"), "{told}");
    let manifest = manifest_in(&scene.path("warm"));
    assert_eq!(manifest.settings.strategy, "racing");
    let limit = (1.0 + manifest.settings.max_regression).ln();
    for earlier in manifest.warm_start.expect("it was warmed").earlier {
        if earlier.point_logs.iter().all(|log| *log <= limit) {
            best.push((earlier.objective_log, earlier.arm.id));
        }
    }
    assert!(best.len() > 6, "{best:?}");
    best.sort_by(|left, right| left.0.total_cmp(&right.0));
    let lines = scene.journal("warm");
    let (cold, first) = (opening(&scene.journal("before")), opening(&lines));
    let early = |opening: &BTreeSet<ArmId>| best.iter().take(6).filter(|(_, arm)| opening.contains(arm)).count();
    // What two settings do together is no part of a star.
    assert!(early(&first) == 6 && early(&cold) < 6, "{} and {}", early(&first), early(&cold));

    // Stopped behind its second block it goes on as it began, though the earlier run is gone.
    let ends = |line: &JournalLine| matches!(line.event, Event::BlockEnded { block: 1 });
    let last = lines.iter().position(ends).unwrap();
    scene.copy_run(&scene.path("warm"), "cut", &["manifest.json"]);
    scene.write("cut/run.jsonl", journal_text(&lines[..=last]));
    fs_err::remove_dir_all(scene.path("before")).unwrap();
    scene.run("tune --resume --no-trial --out cut").ok();
    assert_eq!(events(&scene.journal("cut")), events(&lines));
    let on_gpus = recorded("h200x2-host-memory-bench");
    let on_gpus = format!("tune --recorded {} --warm-start warm --out gpus", on_gpus.display());
    for (line, told) in [
        (on_gpus.as_str(), "it says nothing of these GPUs"),
        ("tune --resume --no-trial --out cut --warm-start warm", "keeps the beginning it had"),
        ("tune --backend simulated --strategy exhaustive --warm-start warm", "--strategy racing, which it implies"),
        ("tune --backend simulated --sizes 1K --warm-start warm", "measured no arm at all points of this run"),
        ("tune --backend simulated --warm-start nowhere", "nowhere/manifest.json"),
    ] {
        let refused = scene.run(line);
        assert_eq!(refused.status, Some(2), "{line}: {}", refused.stderr);
        assert!(refused.stderr.contains(told), "{line}: {}", refused.stderr);
    }
}

/// Where everything has changed the earlier run is no guide, and the whole star is measured after all.
#[test]
fn an_earlier_run_that_no_longer_holds_misleads_nobody() {
    let channels = ["unset", "1", "2", "3", "4", "6", "8", "10", "12", "16", "24", "32"];
    let axes: [(&str, &[&str]); 2] = [("NCCL_MIN_NCHANNELS", &channels), ("NCCL_NTHREADS", &["unset", "128", "256"])];
    // From -0.2 for the first value to 0.2 for the last, or the other way round.
    let of = |sign: f64| {
        move |arm: &Arm| {
            let set = arm.env.get("NCCL_MIN_NCHANNELS");
            let value = set.and_then(|set| channels[1..].iter().position(|known| known == set));
            let threads = if arm.env.contains_key("NCCL_NTHREADS") { 0.1 } else { 0.0 };
            vec![value.map_or(0.0, |index| sign * (0.04 * index as f64 - 0.2)) + threads; 4]
        }
    };
    let (before, now) = (of(1.0), of(-1.0));
    let base = bench();
    let planted = |effect: &dyn Fn(&Arm) -> Vec<f64>| {
        let landscape = Landscape::planted(&base.manifest, "changed", grid(&axes), 4, effect);
        Landscape { noise: base.noise.clone(), ..landscape }
    };
    for seed in 0..5 {
        let earlier = planted(&before).campaign(seed + 100, &racing()).earlier;
        let best = earlier.iter().min_by(|left, right| left.objective_log.total_cmp(&right.objective_log));
        assert_eq!(best.map(|best| best.arm.name.as_str()), Some("MIN_NCHANNELS=1"));
        let outcome = planted(&now).campaign_after(seed, &racing(), earlier);
        assert!(outcome.regret <= WITHIN, "seed {seed}: {}", outcome.choice.reason);
    }
}

/// A race that is stopped behind any block, before or after its tables were made, goes on as if nothing had happened.
#[test]
fn a_race_with_tables_goes_on_alike_from_every_block() {
    let scene = Scene::new();
    let line =
        "tune --machine l40s-x8 --space pcie-throughput --strategy racing --seed 8 --no-trial --sizes 16K,256K,4M";
    scene.run(&format!("{line} --out whole")).ok();
    let lines = scene.journal("whole");
    let made = manifest_in(&scene.path("whole")).tables.expect("tables were made").arms;
    let plans_table = |line: &JournalLine| match &line.event {
        Event::BlockPlanned { launches, .. } => {
            launches.iter().flat_map(|launch| &launch.arms).any(|arm| made.iter().any(|table| table.id == *arm))
        }
        _ => false,
    };
    let table = lines.iter().position(plans_table).expect("a table is measured");
    let ends = |line: &JournalLine| matches!(line.event, Event::BlockEnded { .. } | Event::ArmDropped { .. });
    let kept = scene.contents();
    let (mut before, mut after) = (0, 0);
    for cut in (0..lines.len()).filter(|index| ends(&lines[*index])).step_by(3) {
        let run = format!("cut-{cut}");
        for (name, bytes) in kept.iter().filter_map(|(name, bytes)| Some((name.strip_prefix("whole/")?, bytes))) {
            let is_of_the_table = name.contains("tuner");
            if name == "manifest.json" && cut < table {
                let mut manifest: serde_json::Value = serde_json::from_slice(bytes).expect("JSON");
                manifest.as_object_mut().expect("an object").remove("tables");
                scene.write(&format!("{run}/{name}"), manifest.to_string());
            } else if name == "manifest.json" || is_of_the_table && cut >= table {
                scene.write(&format!("{run}/{name}"), bytes);
            }
        }
        scene.write(&format!("{run}/run.jsonl"), journal_text(&lines[..=cut]));
        scene.run(&format!("tune --resume --no-trial --out {run}")).ok();
        assert_eq!(events(&scene.journal(&run)), events(&lines), "cut behind line {cut} of {}", lines.len());
        if cut < table { before += 1 } else { after += 1 }
    }
    assert!(before > 0 && after > 0, "{before} before the table, {after} after it");
}

/// A block that was torn may hold arms and no default: nothing is told from that alone.
#[test]
fn arms_of_a_torn_block_without_its_default_are_measured_again() {
    let scene = Scene::new();
    scene.run(&format!("{RUN} --out whole")).ok();
    let lines = scene.journal("whole");
    let default = manifest_in(&scene.path("whole")).arms[0].id.clone();
    let first = lines.iter().position(|line| matches!(line.event, Event::BlockPlanned { block: 1, .. })).unwrap();
    let mut without_default = 0;
    for cut in (first..).take(24).step_by(4) {
        let run = format!("torn-{cut}");
        scene.copy_run(&scene.path("whole"), &run, &["manifest.json"]);
        scene.write(&format!("{run}/run.jsonl"), journal_text(&lines[..=cut]));
        scene.run(&format!("tune --resume --out {run}")).ok();
        let resumed = scene.journal(&run);
        let chosen = resumed.iter().position(|line| matches!(line.event, Event::FinalistsChosen { .. })).unwrap();
        let mut blocks: BTreeMap<ArmId, BTreeSet<u32>> = BTreeMap::new();
        for cell in cells(&resumed[..chosen]) {
            blocks.entry(cell.arm.clone()).or_default().insert(cell.block);
        }
        let beside = blocks[&default].clone();
        for (arm, own) in &blocks {
            assert!(own.iter().any(|block| beside.contains(block)), "cut at {cut}: {arm} was never beside the default");
            without_default += usize::from(own.iter().any(|block| !beside.contains(block)));
        }
    }
    assert!(without_default > 0, "no block was torn so");
}

#[test]
fn an_update_that_costs_five_per_cent_is_told_from_one_that_costs_nothing() {
    let special = |arm: &Arm| !arm.env.is_empty();
    let recorded = 0.95_f64.ln();
    for (now, expected) in [(recorded, UpdateVerdict::BetterStill), (0.0, UpdateVerdict::NoLongerBetter)] {
        let effect = |arm: &Arm| vec![if special(arm) { now } else { 0.0 }; 5];
        let arms = grid(&[("NCCL_MIN_NCHANNELS", &["unset", "16"])]);
        let landscape = Landscape::planted(&bench().manifest, "update", arms, 5, &effect);
        let arm = landscape.manifest.arms.iter().find(|arm| special(arm)).expect("it was planted").clone();
        let found: Vec<(UpdateVerdict, u32)> = (0..40).map(|seed| landscape.check(seed, &arm, recorded)).collect();
        // By chance no gain may also be shown to be a loss, which is as stale.
        let right = found.iter().filter(|(verdict, _)| verdict.is_stale() == expected.is_stale());
        let right = right.filter(|(verdict, _)| *verdict != UpdateVerdict::Undecided).count();
        assert!(right >= 38, "{now}: {right} of 40: {found:?}");
        assert!(found.iter().all(|(_, launches)| (6..=20).contains(launches)), "in two minutes: {found:?}");
    }
}
