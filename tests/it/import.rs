//! Outputs of nccl-tests through the whole program. The shapes of `tests/it/nccl-tests/` are read one by
//! one beside the reader; here they become runs, which are reported and judged, and what is refused
//! must leave nothing behind.

use std::path::{Path, PathBuf};

use fs_err as fs;
use nccltune::evidence::Evidence;
use nccltune::record::{OutcomeKind, Phase, VerdictKind};

use crate::command::{Ended, Scene, journal_in, manifest_in};

fn shape(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/it/nccl-tests").join(name)
}

/// A launch of the current form whose times are those of the shape times a factor: in place they are
/// 20.92 to 47.91 us. Each differs a little, as launches do, and so do the files.
fn launch(scene: &Scene, name: &str, factor: f64) {
    let text = fs::read_to_string(shape("current.txt")).expect("a shape");
    let scaled: Vec<String> = text
        .lines()
        .map(|line| {
            let words: Vec<&str> = line.split_whitespace().collect();
            match words.as_slice() {
                [bytes, ..] if !line.starts_with('#') && bytes.parse::<u64>().is_ok() => {
                    let time = |at: usize| words[at].parse::<f64>().expect("a time") * factor;
                    format!(
                        "{} {} {} sum -1 {:.2} 1.0 1.0 0 {:.2} 1.0 1.0 0",
                        words[0],
                        words[1],
                        words[2],
                        time(5),
                        time(9)
                    )
                }
                _ => line.to_owned(),
            }
        })
        .collect();
    // No two starts print the same: process numbers differ.
    scene.write(name, format!("# process {name}\n{}\n", scaled.join("\n")));
}

/// Eight launches of the default and of an arm that takes `ratio` of its time.
fn two_arms(scene: &Scene, ratio: f64) {
    let noise = [1.0, 1.004, 0.997, 1.006, 0.994, 1.002, 0.999, 1.003];
    let mut names = [String::new(), String::new()];
    for (index, noise) in noise.into_iter().enumerate() {
        launch(scene, &format!("default-{index}.txt"), noise);
        launch(scene, &format!("arm-{index}.txt"), noise * ratio * (1.0 + 0.001 * index as f64));
        names[0].push_str(&format!(" default-{index}.txt"));
        names[1].push_str(&format!(" arm-{index}.txt"));
    }
    scene.run(&format!("import --out run{}", names[0])).ok();
    scene.run(&format!("import --out run --env NCCL_MIN_NCHANNELS=32{}", names[1])).ok();
}

#[test]
fn an_imported_run_is_judged_like_any_other() {
    let scene = Scene::new();
    two_arms(&scene, 0.8);
    let manifest = manifest_in(&scene.path("run"));
    assert_eq!(manifest.arms.iter().map(|arm| arm.name.as_str()).collect::<Vec<_>>(), ["default", "MIN_NCHANNELS=32"]);
    assert_eq!(manifest.workload.points.len(), 5);
    assert_eq!(manifest.machine.name, "8x NVIDIA RTX PRO 6000 Blackwell");
    assert_eq!((manifest.imported_files.len(), manifest.settings.search_blocks), (16, 2));
    let evidence = Evidence::of(&journal_in(&scene.path("run")));
    assert_eq!(evidence.ended_blocks(Phase::Search).len(), 2);
    assert_eq!(evidence.ended_blocks(Phase::Final).len(), 6);

    let told = scene.run("tune --backend replay --recorded run --out judged").ok();
    for text in [&told.stdout, &scene.read("judged/tuned.env"), &scene.read("judged/report.html")] {
        assert!(text.contains("IMPORTED: measured by nccl-tests") && text.contains("REPLAYED"), "{text}");
    }
    let choice = scene.choice("judged");
    assert_eq!((choice.verdict, choice.statistics.launches), (VerdictKind::Adopt, 6), "{}", choice.reason);
    assert_eq!(choice.env.get("NCCL_MIN_NCHANNELS").map(String::as_str), Some("32"));
    let ratio = choice.objective.ratio.expect("a ratio");
    assert!((ratio - 0.8036).abs() < 0.002, "{ratio}");
}

#[test]
fn no_difference_is_no_gain() {
    let scene = Scene::new();
    two_arms(&scene, 1.0);
    scene.run("tune --backend replay --recorded run --out judged").ok();
    assert_eq!(scene.choice("judged").verdict, VerdictKind::KeepDefault);
}

#[test]
fn the_kth_launches_of_all_arms_are_a_block_however_they_came() {
    let scene = Scene::new();
    for index in 0..4 {
        launch(&scene, &format!("d{index}.txt"), 1.0 + 0.001 * f64::from(index));
        launch(&scene, &format!("a{index}.txt"), 0.9 + 0.001 * f64::from(index));
    }
    scene.run("import --out once d0.txt d1.txt d2.txt d3.txt").ok();
    scene.run("import --out once --env NCCL_PROTO=LL a0.txt a1.txt a2.txt a3.txt").ok();
    for step in
        ["d0.txt", "--env NCCL_PROTO=LL a0.txt a1.txt", "d1.txt d2.txt", "d3.txt", "--env NCCL_PROTO=LL a2.txt a3.txt"]
    {
        scene.run(&format!("import --out steps {step}")).ok();
    }
    let cells =
        |run: &str| scene.read(&format!("{run}/run.jsonl")).lines().skip(1).map(str::to_owned).collect::<Vec<_>>();
    assert_eq!(cells("once"), cells("steps"));
    assert_eq!(scene.read("once/summary.csv"), scene.read("steps/summary.csv"));
    let lines = journal_in(&scene.path("once"));
    let blocks = lines.iter().filter(|line| matches!(line.event, nccltune::record::Event::BlockPlanned { .. }));
    assert_eq!(blocks.count(), 4);
}

#[test]
fn wrong_data_and_failed_tests_are_held_against_their_arm() {
    let scene = Scene::new();
    for index in 0..6 {
        launch(&scene, &format!("d{index}.txt"), 1.0 + 0.001 * f64::from(index));
    }
    scene.run("import --out run d0.txt d1.txt d2.txt d3.txt d4.txt d5.txt").ok();
    let wrong = shape("wrong-data.txt");
    scene.run(&format!("import --out run --env NCCL_PROTO=LL {}", wrong.display())).ok();
    let failed =
        scene.run(&format!("import --out run --env NCCL_ALGO=Tree {}", shape("failed-at-once.txt").display())).ok();
    assert!(failed.stdout.contains("the launch failed: node0: Test NCCL failure"), "{}", failed.stdout);
    let evidence = Evidence::of(&journal_in(&scene.path("run")));
    let kinds: Vec<OutcomeKind> = evidence.failures().iter().map(|failure| failure.kind).collect();
    assert_eq!(kinds, [OutcomeKind::WrongResult, OutcomeKind::Crashed]);
    let report = scene.run("report run").ok().stdout;
    for words in ["What failed", "nccl-tests counted 512 wrong elements in-place", "Verdict: none yet", "IMPORTED"] {
        assert!(report.contains(words), "{words}\n{report}");
    }
    // What is much faster and wrong once, in enough launches for a verdict, may not win.
    for index in 0..6 {
        launch(&scene, &format!("t{index}.txt"), 0.8 + 0.001 * f64::from(index));
    }
    let fast = scene.read("t3.txt");
    let row = fast.lines().find(|line| line.trim_start().starts_with("4096 ")).expect("a row of 4 KiB");
    let at = row.rfind('0').expect("no wrong element");
    scene.write("t3.txt", fast.replace(row, &format!("{}512", &row[..at])));
    scene.run("import --out run --env NCCL_NTHREADS=256 t0.txt t1.txt t2.txt t3.txt t4.txt t5.txt").ok();
    scene.run("tune --backend replay --recorded run --out judged").ok();
    let choice = scene.choice("judged");
    assert_ne!(choice.winner.as_deref(), Some("NTHREADS=256"), "{}", choice.reason);
    let veto = choice.vetoed.iter().find(|veto| veto.name == "NTHREADS=256").expect("it is vetoed");
    assert!(veto.reason.contains("wrong"), "{}", veto.reason);
}

#[track_caller]
fn refused(scene: &Scene, line: &str, words: &[&str]) -> Ended {
    let before = scene.contents();
    let ended = scene.run(line);
    assert_eq!((ended.status, ended.stdout.as_str()), (Some(2), ""), "{line}\n{}", ended.stderr);
    for word in words {
        assert!(ended.stderr.contains(word), "{line}: no {word:?} in\n{}", ended.stderr);
    }
    assert!(scene.contents() == before, "{line} left something behind");
    ended
}

#[test]
fn what_cannot_be_imported_leaves_nothing_behind() {
    let scene = Scene::new();
    launch(&scene, "d.txt", 1.0);
    launch(&scene, "a.txt", 0.9);
    let file = |name: &str| shape(name).display().to_string();
    refused(&scene, &format!("import --out new {}", file("without-devices.txt")), &["without-devices.txt", "--ranks"]);
    refused(&scene, &format!("import --out new {}", file("without-a-name.txt")), &["--collective all-reduce"]);
    refused(&scene, &format!("import --out new d.txt {}", file("another-program.txt")), &["no output of nccl-tests"]);
    refused(&scene, "import --out new missing.txt", &["missing.txt"]);
    refused(&scene, "import --out new .", &["."]);
    refused(&scene, "import --out new --env NCCL_PROTOO=LL d.txt", &["--env NCCL_PROTOO", "did you mean NCCL_PROTO?"]);
    refused(&scene, "import --out new --env NCCL_BUFFSIZE=4M d.txt", &["--env NCCL_BUFFSIZE=4M"]);
    refused(&scene, "import --out new --env NCCL_PROTO d.txt", &["--env \"NCCL_PROTO\" is not NAME=VALUE"]);
    refused(&scene, "import --out new --env NCCL_PROTO=LL --pin NCCL_PROTO=LL d.txt", &["both as --env and as --pin"]);
    refused(&scene, "import --out new --ranks 4 d.txt", &["of 8 ranks, not of 4"]);
    refused(&scene, "import --out new d.txt d.txt", &["was imported before, as d.txt"]);
    // What the file says itself.
    refused(
        &scene,
        &format!("import --out new {}", file("json-with-variables.json")),
        &["it ran with NCCL_MIN_NCHANNELS=16, which neither --env nor --pin says"],
    );
    refused(
        &scene,
        &format!("import --out new --env NCCL_PROTO=LL {}", file("json-eight-processes.json")),
        &["it ran without NCCL_PROTO"],
    );
    refused(
        &scene,
        &format!("import --out new {}", file("log-inside-rows.txt")),
        &["NCCL read NCCL_MIN_NCHANNELS=16 in it"],
    );
    scene.run(&format!("import --out said --pin NCCL_MIN_NCHANNELS=16 {}", file("json-with-variables.json"))).ok();
    scene.run(&format!("import --out said2 --env NCCL_MIN_NCHANNELS=16 {}", file("log-inside-rows.txt"))).ok();

    // Into a run that is there.
    scene.run("import --out run d.txt").ok();
    refused(&scene, "import --out run d.txt", &["d.txt was imported before", "counts once"]);
    let four = file("2019-all-reduce.txt");
    refused(&scene, &format!("import --out run --env NCCL_PROTO=LL {four}"), &["is of 4 ranks, the others are of 8"]);
    refused(&scene, "import --out run --placement out-of-place a.txt", &["--placement"]);
    refused(&scene, "import --out run --pin NCCL_P2P_DISABLE=1 a.txt", &["same --pin", "without any"]);
    let zero = file("per-iteration.txt");
    refused(&scene, &format!("import --out run --env NCCL_PROTO=LL {zero}"), &["no size of PROTO=LL"]);
    scene.run("tune --backend simulated --sizes 4K --space baseline --out measured").ok();
    refused(&scene, "import --out measured a.txt", &["was not imported"]);
    scene.write("thesis/thesis.txt", "mine");
    refused(&scene, "import --out thesis a.txt", &["is not empty"]);
    refused(&scene, "tune --resume --out run", &["a replay needs no resume"]);
}

#[test]
fn import_answers_in_every_format_and_says_what_comes_next() {
    let scene = Scene::new();
    launch(&scene, "d.txt", 1.0);
    launch(&scene, "a.txt", 0.9);
    let text = scene.run("import --out run d.txt").ok().stdout;
    assert!(text.contains("*** IMPORTED") && text.contains("with --env NAME=VALUE, into run"), "{text}");
    let markdown = scene.run("import --out run --env NCCL_PROTO=LL --format markdown a.txt").ok().stdout;
    assert!(markdown.contains("> **IMPORTED") && markdown.contains("a verdict needs 5 launches"), "{markdown}");
    let named = "import --out other --machine-name box --pin NCCL_P2P_DISABLE=1";
    let json = scene.run(&format!("{named} --format json d.txt")).ok().json();
    assert_eq!(json["labels"], serde_json::json!(["IMPORTED", "HOST-MEMORY"]));
    assert_eq!((json["points"].as_array().map(Vec::len), &json["arm"]["name"]), (Some(5), &"default".into()));
    assert_eq!(manifest_in(&scene.path("other")).machine.name, "box");
    let csv = scene.run("import --out third --format csv d.txt").ok().stdout;
    assert_eq!(csv, scene.read("third/summary.csv"));
    assert!(csv.contains("default,all-reduce,bf16,4096,1,20.920,"), "{csv}");
}

#[test]
fn what_ran_is_taken_from_a_log_in_the_file() {
    let scene = Scene::new();
    let log = "node0:4200:4311 [0] NCCL INFO AllReduce: 4096 Bytes -> Algo RING proto LL channel{Lo..Hi}={0..3}\n";
    let text = fs::read_to_string(shape("current.txt")).expect("a shape");
    scene.write("d.txt", format!("{log}{text}"));
    scene.run("import --out run d.txt").ok();
    let summary = scene.read("run/summary.csv");
    assert!(summary.lines().any(|line| line.contains(",4096,1,") && line.contains(",ring,ll,4,")), "{summary}");
}

#[test]
fn a_crash_between_manifest_and_journal_loses_nothing() {
    let scene = Scene::new();
    launch(&scene, "d.txt", 1.0);
    launch(&scene, "e.txt", 1.01);
    scene.run("import --out run d.txt").ok();
    let journal = scene.read("run/run.jsonl");
    scene.run("import --out run e.txt").ok();
    let whole = scene.read("run/run.jsonl");
    // As if the second import had ended behind its manifest.
    scene.write("run/run.jsonl", journal);
    scene.run("report run").ok();
    scene.run("import --out run e.txt").ok();
    assert_eq!(manifest_in(&scene.path("run")).imported_files.len(), 2);
    let behind_the_head = |text: &str| text.lines().skip(1).map(str::to_owned).collect::<Vec<_>>();
    assert_eq!(behind_the_head(&scene.read("run/run.jsonl")), behind_the_head(&whole));
}
