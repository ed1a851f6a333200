//! Machines whose truth is known because it was planted: what is there is found, and what is not
//! there is never adopted. Each claim holds over twenty seeds, which are in the test; one lucky seed
//! shows nothing.

use std::collections::BTreeMap;

use nccltune::record::{Choice, Event, VerdictKind};

use crate::command::{Scene, cells};

const SEEDS: std::ops::Range<u64> = 100..120;

/// The noise of fresh launches as seen on real machines, and how often one is slow as a whole.
const USUAL: &str = "launch_log_sd = 0.018\nslow_launch_probability = 0.075\nslow_launch_factor = 1.08\n\
                     cell_log_sd = 0.004\nreplay_log_sd = 0.01\n";

/// Message sizes of every table below.
const SIZES: &str = "[4096, 65536, 1048576, 16777216, 268435456]";

/// Variables and their values, and the factor on the latency at each size while all of them are set.
type Effect<'a> = (&'a [(&'a str, &'a str)], [f64; 5]);

/// A machine on which settings do what `effects` say.
fn machine(noise: &str, effects: &[Effect<'_>]) -> String {
    let mut text = format!(
        "format = 1\nname = \"planted\"\ndescription = \"effects planted by a test\"\ngpu = \"Test GPU\"\ngpus = 8\n\
         memory_mib = 98304\ncompute_capability = [12, 0]\nsizes_bytes = {SIZES}\n\
         default_latency_us = [20.0, 30.0, 120.0, 1400.0, 22000.0]\n\
         [noise]\n{noise}[cost]\nlaunch_s = 2.0\ncommunicator_s = 0.5\ncell_s = 0.05\n"
    );
    for (when, factor) in effects {
        let when: Vec<String> = when.iter().map(|(name, value)| format!("{name} = \"{value}\"")).collect();
        text.push_str(&format!("[[effect]]\nwhen = {{ {} }}\nfactor = {factor:?}\n", when.join(", ")));
    }
    text
}

fn space(axes: &[(&str, &[&str])]) -> String {
    let mut text = "format = 1\nname = \"planted\"\ndescription = \"arms of a test\"\n".to_owned();
    for (variable, values) in axes {
        text.push_str(&format!("[[axis]]\nvariable = \"{variable}\"\nvalues = {values:?}\n"));
    }
    text
}

/// Named arms instead of a grid.
fn arms(arms: &[(&str, &[(&str, &str)])]) -> String {
    let mut text = space(&[]);
    for (name, env) in arms {
        let env: Vec<String> = env.iter().map(|(name, value)| format!("{name} = \"{value}\"")).collect();
        text.push_str(&format!("[[arm]]\nname = \"{name}\"\nenv = {{ {} }}\n", env.join(", ")));
    }
    text
}

/// One run per seed on a planted machine.
fn choices(machine: &str, space: &str, more: &str) -> Vec<(u64, Choice)> {
    choices_of(SEEDS, machine, space, more)
}

fn choices_of(seeds: std::ops::Range<u64>, machine: &str, space: &str, more: &str) -> Vec<(u64, Choice)> {
    let scene = Scene::new();
    scene.write("machine.toml", machine);
    scene.write("space.toml", space);
    seeds
        .map(|seed| {
            let line = format!(
                "tune --backend simulated --machine machine.toml --space space.toml --seed {seed} --out {seed} {more}"
            );
            scene.run(&line).ok();
            (seed, scene.choice(&seed.to_string()))
        })
        .collect()
}

/// How often each (verdict, winner) came out.
fn outcomes(choices: &[(u64, Choice)]) -> BTreeMap<(&'static str, Option<String>), usize> {
    let mut outcomes = BTreeMap::new();
    for (_, choice) in choices {
        *outcomes.entry((choice.verdict.name(), choice.winner.clone())).or_default() += 1;
    }
    outcomes
}

#[track_caller]
fn assert_never_adopted(choices: &[(u64, Choice)]) {
    for (seed, choice) in choices {
        assert_ne!(choice.verdict, VerdictKind::Adopt, "seed {seed}: {}", choice.reason);
        assert!(choice.env.is_empty() && choice.answers.is_empty(), "seed {seed}");
    }
}

/// Arms that differ in nothing but their name for the machine: NCCL_NTHREADS has no effect anywhere.
const GRID: &[(&str, &[&str])] = &[
    ("NCCL_MIN_NCHANNELS", &["unset", "8", "16"]),
    ("NCCL_PROTO", &["unset", "allreduce:LL", "allreduce:Simple"]),
    ("NCCL_NTHREADS", &["unset", "256"]),
];
const SMALL: &str = "--sizes 64K,1M";

#[test]
fn a_planted_winner_is_found() {
    // 16 channels gain a tenth; LL gains as much again on small messages and loses more on large
    // ones, which is the trap; Simple only loses.
    let machine = machine(
        USUAL,
        &[
            (&[("NCCL_MIN_NCHANNELS", "8")], [1.0, 0.97, 0.96, 1.0, 1.0]),
            (&[("NCCL_MIN_NCHANNELS", "16")], [1.0, 0.9, 0.9, 0.95, 0.95]),
            (&[("NCCL_PROTO", "allreduce:LL")], [0.9, 0.85, 1.2, 2.0, 2.5]),
            (&[("NCCL_PROTO", "allreduce:Simple")], [2.0, 1.5, 1.1, 1.0, 1.0]),
            (&[("NCCL_NTHREADS", "256")], [1.02, 1.02, 1.02, 1.02, 1.02]),
        ],
    );
    let choices = choices(&machine, &space(GRID), SMALL);
    let found = choices
        .iter()
        .filter(|(_, choice)| choice.winner.as_deref() == Some("MIN_NCHANNELS=16") && choice.env.len() == 1)
        .count();
    assert!(found >= 18, "found {found} times of 20: {:?}", outcomes(&choices));
    for (seed, choice) in &choices {
        assert!(!choice.env.contains_key("NCCL_PROTO"), "seed {seed} walked into the trap: {}", choice.reason);
        let [low, high] = choice.objective.ratio_ci95.unwrap();
        assert!(low < 0.95 && high > 0.85, "seed {seed}: the interval {low:.3} to {high:.3} is nowhere near 0.9");
    }
}

#[test]
fn where_nothing_has_an_effect_nothing_is_adopted() {
    let choices = choices(&machine(USUAL, &[]), &space(GRID), SMALL);
    assert_never_adopted(&choices);
    // The best of eighteen looks better than it is, so that some runs end undecided; most must not.
    let kept = choices.iter().filter(|(_, choice)| choice.verdict == VerdictKind::KeepDefault).count();
    assert!(kept >= 11, "{:?}", outcomes(&choices));
}

#[test]
fn a_gain_that_costs_prefill_is_never_adopted() {
    // Six per cent less at every size of decoding, five per cent more at the sizes of prefill.
    let machine = machine(USUAL, &[(&[("NCCL_MIN_NCHANNELS", "16")], [0.94, 0.94, 0.94, 1.05, 1.05])]);
    let space = space(&[("NCCL_MIN_NCHANNELS", &["unset", "16"])]);
    let choices = choices(&machine, &space, "--model kimi-k2.5 --tp 8 --batch 1,4,16");
    assert_never_adopted(&choices);
    // And where it could be told at all, the guard set is why.
    let blamed = choices.iter().filter(|(_, choice)| {
        choice.vetoed.iter().any(|veto| veto.name == "MIN_NCHANNELS=16" && veto.reason.contains("bytes"))
    });
    assert!(blamed.count() >= 15, "{:?}", outcomes(&choices));
    // The same gain without the cost is adopted, or the test above would show nothing.
    let harmless = self::machine(USUAL, &[(&[("NCCL_MIN_NCHANNELS", "16")], [0.94, 0.94, 0.94, 1.0, 1.0])]);
    let adopted = self::choices(&harmless, &space, "--model kimi-k2.5 --tp 8 --batch 1,4,16");
    let adopted = adopted.iter().filter(|(_, choice)| choice.verdict == VerdictKind::Adopt).count();
    assert!(adopted >= 16, "{adopted}");
}

#[test]
fn a_gain_below_the_threshold_is_not_adopted() {
    let machine = machine(USUAL, &[(&[("NCCL_MIN_NCHANNELS", "16")], [0.99; 5])]);
    assert_never_adopted(&choices(&machine, &space(GRID), SMALL));
}

#[test]
fn the_threshold_is_the_users() {
    // A gain of six per cent in silence: adopted by default, not where ten are asked for.
    let quiet = "launch_log_sd = 0.002\nslow_launch_probability = 0.0\nslow_launch_factor = 1.0\n\
                 cell_log_sd = 0.001\nreplay_log_sd = 0.002\n";
    let machine = machine(quiet, &[(&[("NCCL_MIN_NCHANNELS", "16")], [0.94; 5])]);
    let space = space(&[("NCCL_MIN_NCHANNELS", &["unset", "16"])]);
    let adopted = choices(&machine, &space, SMALL);
    assert!(adopted.iter().all(|(_, choice)| choice.verdict == VerdictKind::Adopt), "{:?}", outcomes(&adopted));
    let kept = choices(&machine, &space, &format!("{SMALL} --min-gain 10%"));
    assert!(kept.iter().all(|(_, choice)| choice.verdict == VerdictKind::KeepDefault), "{:?}", outcomes(&kept));
    // Silence is seen as such, noise too.
    assert!(adopted.iter().all(|(_, choice)| choice.noise_floor.unwrap() < 0.005));
}

#[test]
fn a_very_noisy_machine_decides_nothing_by_chance() {
    let noisy = "launch_log_sd = 0.15\nslow_launch_probability = 0.3\nslow_launch_factor = 1.5\n\
                 cell_log_sd = 0.05\nreplay_log_sd = 0.1\n";
    let choices = choices_of(100..300, &machine(noisy, &[]), &space(GRID), SMALL);
    // Eighteen arms compete 200 times under noise that is ten times what is looked for, and that no pair shares: what
    // an interval of 95 % may err is what may happen.
    let adopted = choices.iter().filter(|(_, choice)| choice.verdict == VerdictKind::Adopt).count();
    assert!(adopted * 100 <= choices.len() * 3, "{adopted} of {}: {:?}", choices.len(), outcomes(&choices));
    assert!(choices.iter().all(|(_, choice)| choice.noise_floor.is_none_or(|floor| floor > 0.02)), "and says so");
}

#[test]
fn of_two_equal_arms_the_simpler_is_chosen() {
    let machine = machine(USUAL, &[(&[("NCCL_MIN_NCHANNELS", "16")], [0.85; 5])]);
    let space = arms(&[
        ("crowded", &[("NCCL_MIN_NCHANNELS", "16"), ("NCCL_NTHREADS", "256"), ("NCCL_MAX_NCHANNELS", "32")]),
        ("plain", &[("NCCL_MIN_NCHANNELS", "16")]),
        ("crowded-too", &[("NCCL_MIN_NCHANNELS", "16"), ("NCCL_NTHREADS", "512")]),
    ]);
    let choices = choices(&machine, &space, SMALL);
    let simple = choices.iter().filter(|(_, choice)| choice.winner.as_deref() == Some("plain")).count();
    assert!(simple >= 18, "{:?}", outcomes(&choices));
}

#[test]
fn what_a_pin_does_is_not_credited_to_an_arm() {
    // The pin brings the gain to the default as well, so nothing is left to gain.
    let machine = machine(USUAL, &[(&[("NCCL_MIN_NCHANNELS", "16")], [0.85; 5])]);
    let space = space(GRID);
    for (seed, choice) in choices(&machine, &space, &format!("{SMALL} --pin NCCL_MIN_NCHANNELS=16")) {
        assert_ne!(choice.verdict, VerdictKind::Adopt, "seed {seed}: {}", choice.reason);
    }
}

#[test]
fn a_budget_ends_a_run_with_a_verdict_or_says_how_to_go_on() {
    let scene = Scene::new();
    let machine = machine(USUAL, &[(&[("NCCL_MIN_NCHANNELS", "16")], [0.8; 5])]);
    scene.write("machine.toml", &machine);
    scene.write("space.toml", space(GRID));
    let line = "tune --backend simulated --machine machine.toml --space space.toml --sizes 64K,1M --seed 7";
    let whole = {
        scene.run(&format!("{line} --out whole")).ok();
        scene.choice("whole")
    };
    assert_eq!(whole.search.stopped_by, "complete");
    assert_eq!(whole.env.get("NCCL_MIN_NCHANNELS").map(String::as_str), Some("16"), "{}", whole.reason);
    let (mut stopped, mut shortened) = (0, 0);
    // From far too little to more than enough.
    for seconds in [1, 20, 60, 100, 110, 120, 130, 150, 200, 400, 4000] {
        let run = format!("run-{seconds}");
        let ended = scene.run(&format!("{line} --out {run} --time-budget {seconds}s"));
        let lines = scene.journal(&run);
        let spent: f64 = lines
            .iter()
            .map(|line| match &line.event {
                Event::LaunchEnded { duration_s, .. } => *duration_s,
                _ => 0.0,
            })
            .sum();
        match ended.status {
            Some(6) => {
                stopped += 1;
                assert_eq!(ended.stdout, "");
                assert!(ended.stderr.contains(&format!("--resume --out {run}")), "{}", ended.stderr);
                assert!(!scene.path(&format!("{run}/choice.json")).exists());
                // More time, asked for or unlimited, reaches the verdict.
                let again = scene.run(&format!("tune --resume --out {run} --time-budget 1s"));
                assert_eq!(again.status, Some(6), "no time is still no time");
                scene.run(&format!("tune --resume --out {run}")).ok();
                // Noise may add a variable without an effect; what was planted is there.
                assert_eq!(scene.choice(&run).env.get("NCCL_MIN_NCHANNELS").map(String::as_str), Some("16"));
                let more = scene.journal(&run);
                assert!(cells(&more).count() > cells(&lines).count());
            }
            Some(0) => {
                let choice = scene.choice(&run);
                assert_eq!(choice.verdict, VerdictKind::Adopt, "{seconds} s: {}", choice.reason);
                if choice.search.stopped_by == "budget" {
                    shortened += 1;
                    assert!(choice.search.measured_cells < whole.search.measured_cells);
                } else {
                    assert_eq!(choice.search.stopped_by, "complete");
                    assert_eq!(choice.search.measured_cells, whole.search.measured_cells, "{seconds} s");
                }
                assert!((choice.search.wall_s - spent).abs() < 1.0, "{} and {spent}", choice.search.wall_s);
            }
            other => panic!("{seconds} s: status {other:?}\n{}", ended.stderr),
        }
        // The first block is measured whole; after it a block is begun only while time is left.
        let longest_block = 60.0;
        assert!(spent < f64::from(seconds) + longest_block, "{seconds} s of budget, {spent} s spent");
    }
    assert!(stopped >= 1 && shortened >= 1, "{stopped} stopped, {shortened} shortened");
}

#[test]
fn undecided_is_an_answer_unless_a_decision_is_required() {
    // A true gain of two and a half per cent is close to where the threshold lies: six launches cannot tell.
    let scene = Scene::new();
    scene.write("machine.toml", machine(USUAL, &[(&[("NCCL_MIN_NCHANNELS", "16")], [0.975; 5])]));
    scene.write("space.toml", space(&[("NCCL_MIN_NCHANNELS", &["unset", "16"])]));
    let mut undecided = 0;
    for seed in SEEDS {
        let line = format!(
            "tune --backend simulated --machine machine.toml --space space.toml --sizes 64K,1M --seed {seed} \
             --final-launches 6 --quiet --format csv"
        );
        let answered = scene.run(&format!("{line} --out {seed}")).ok();
        let required = scene.run(&format!("{line} --out {seed}-required --require-decision"));
        let choice = scene.choice(&seed.to_string());
        if choice.verdict == VerdictKind::Undecided {
            undecided += 1;
            assert_eq!(required.status, Some(5), "{}", required.stderr);
            assert!(choice.env.is_empty() && choice.winner.is_none());
            let file = scene.read(&format!("{seed}/tuned.env"));
            assert!(file.contains("nothing was shown to be better") && file.lines().all(|line| line.starts_with('#')));
        } else {
            assert_eq!(required.status, Some(0), "{}", required.stderr);
        }
        assert_eq!(required.stdout, answered.stdout, "the answer is printed all the same");
    }
    assert!(undecided >= 3, "{undecided} of 20 undecided: the test shows too little");
}

/// One arm is for small messages, the other for large ones: each answers for its profile, the mix has
/// one of them, and `--profile` decides which of the answers the files hold.
#[test]
fn a_profile_gets_the_answer_that_is_faster_for_it() {
    const QUIET: &str = "launch_log_sd = 0.004\nslow_launch_probability = 0.0\nslow_launch_factor = 1.0\n\
                         cell_log_sd = 0.002\nreplay_log_sd = 0.005\n";
    let (small, large) = ([("NCCL_NTHREADS", "256")], [("NCCL_MIN_NCHANNELS", "16")]);
    let machine = machine(QUIET, &[(&small, [0.7, 0.75, 1.0, 1.0, 1.0]), (&large, [1.0, 1.0, 0.75, 1.0, 1.0])])
        + "[pass]\nweights_gb_per_s = 6000.0\narithmetic_tflop_per_s = 1000.0\nproduct_us = 1.0\ncrowding = 1.1\n";
    let scene = Scene::new();
    scene.write("machine.toml", &machine);
    scene.write("space.toml", arms(&[("for-small", &small), ("for-large", &large)]));
    let run = |out: &str, more: &str| -> Choice {
        scene
            .run(&format!(
                "tune --backend simulated --machine machine.toml --space space.toml --model bench --engine none \
                 --batch 1,64 --out {out} {more}"
            ))
            .ok();
        scene.choice(out)
    };
    let balanced = run("balanced", "");
    assert_eq!(balanced.verdict, VerdictKind::Adopt, "{}", balanced.reason);
    let winner = balanced.winner.clone().unwrap();
    let other = if winner == "for-small" { ("throughput", "for-large") } else { ("latency", "for-small") };
    let profiles: Vec<&str> = balanced.answers.iter().map(|answer| answer.profile.as_str()).collect();
    assert_eq!(profiles, ["balanced", other.0], "{winner}");

    let own = run("own", &format!("--profile {}", other.0));
    assert_eq!(own.winner.as_deref(), Some(other.1), "{}", own.reason);
    assert_eq!(own.env, own.answers[1].env);
    assert_eq!(own.answers, balanced.answers, "what is known does not depend on what was asked for");
    assert!(own.reason.ends_with(&format!("the files hold {}, which is faster for {}", other.1, other.0)));
    let line = if other.1 == "for-small" { "NCCL_NTHREADS=256" } else { "NCCL_MIN_NCHANNELS=16" };
    assert!(scene.read("own/tuned.env").lines().any(|known| known == line));
    assert!(!scene.read("balanced/tuned.env").lines().any(|known| known == line));
    // A profile that has no answer of its own gets the balanced one.
    let same = if other.0 == "latency" { "throughput" } else { "latency" };
    assert_eq!(run("same", &format!("--profile {same}")).winner, Some(winner));
}
