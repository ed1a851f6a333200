//! How often racing misses the best arm, what it measures for that, and how often a verdict is wrong.
//!
//!     cargo run --release --example regret                      (racing, 100 seeds a landscape)
//!     cargo run --release --example regret -- exhaustive 100    (the reference)
//!     cargo run --release --example regret -- warm 100          (racing behind an earlier race, and behind a change)
//!     cargo run --release --example regret -- honesty 1000      (the verdict, under fixed noise)
//!     cargo run --release --example regret -- check 100         (an update that costs 5 %, told from one that costs nothing)
//!
//! Truths are the medians of recorded grids, those with the values of each variable permuted, and planted effects;
//! noise is drawn anew for each arm in each launch. Nothing here is a measurement of a GPU.
#![expect(clippy::print_stdout, reason = "a stand-alone program that prints")]

mod lab;

use std::collections::BTreeMap;
use std::error::Error;
use std::path::Path;

use lab::{Landscape, WITHIN, grid, racing};
use nccltune::record::{Arm, Settings, UpdateVerdict, VerdictKind};
use nccltune::space::arm_of;

const GRIDS: [&str; 3] = ["h200x2-host-memory", "h200x2-host-memory-bench", "h200x2-host-memory-kimi-space"];

fn main() -> Result<(), Box<dyn Error>> {
    let mut words = std::env::args().skip(1);
    let what = words.next().unwrap_or_else(|| "racing".to_owned());
    let runs: u64 = words.next().map_or(Ok(if what == "honesty" { 1000 } else { 100 }), |word| word.parse())?;
    let first: u64 = words.next().map_or(Ok(0), |word| word.parse())?;
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("results/recorded");
    let recorded: Result<Vec<Landscape>, _> =
        GRIDS.iter().map(|name| Landscape::recorded(&folder.join(name))).collect();
    let recorded = recorded?;
    if what == "honesty" {
        honesty(&recorded[0], runs);
        return Ok(());
    }
    if what == "check" {
        check(&recorded[0], runs);
        return Ok(());
    }
    let is_warm = what == "warm";
    let settings = if is_warm { racing() } else { Settings { strategy: what, ..racing() } };
    let permuted: Vec<Landscape> = recorded.iter().map(|landscape| landscape.permuted(1)).collect();
    let planted = planted(&recorded[0]);
    // With what each begins: nothing; an earlier race on the same; one on another, which misleads.
    let pairs: Vec<(String, &Landscape, Option<&Landscape>)> = if is_warm {
        let same = recorded.iter().chain(&planted).map(|one| (one.name.clone(), one, Some(one)));
        let changed = recorded.iter().zip(&permuted);
        let changed = changed.map(|(one, other)| (format!("{} after a change", one.name), one, Some(other)));
        same.chain(changed).collect()
    } else {
        recorded.iter().chain(&permuted).chain(&planted).map(|one| (one.name.clone(), one, None)).collect()
    };
    println!("| landscape | arms | within 1 % | mean regret | share of the grid, mean | most | harmful | no answer |");
    println!("|---|---|---|---|---|---|---|---|");
    for (name, landscape, before) in pairs {
        let outcomes: Vec<lab::Outcome> = (first..first + runs)
            .map(|seed| {
                // Seeds of their own, so that no noise is met twice.
                let earlier = before.map(|before| before.campaign(seed + 1_000_000, &settings).earlier);
                landscape.campaign_after(seed, &settings, earlier.unwrap_or_default())
            })
            .collect();
        let count = |holds: &dyn Fn(&lab::Outcome) -> bool| outcomes.iter().filter(|outcome| holds(outcome)).count();
        let mean = |of: &dyn Fn(&lab::Outcome) -> f64| outcomes.iter().map(of).sum::<f64>() / outcomes.len() as f64;
        println!(
            "| {} | {} | {} of {runs} | {:.2} % | {:.1} % | {:.1} % | {} | {} |",
            name,
            landscape.manifest.arms.len(),
            count(&|outcome| outcome.regret.exp() - 1.0 <= WITHIN),
            mean(&|outcome| outcome.regret.exp() - 1.0) * 100.0,
            mean(&|outcome| outcome.share) * 100.0,
            outcomes.iter().map(|outcome| outcome.share).fold(0.0, f64::max) * 100.0,
            count(&|outcome| outcome.worst.exp() > 1.0 + settings.max_regression + 1e-9),
            count(&|outcome| outcome.choice.verdict != VerdictKind::Adopt),
        );
    }
    Ok(())
}

/// Effects that were made up, on larger grids, with the noise that a recorded run shows and with the fixed one.
fn planted(base: &Landscape) -> Vec<Landscape> {
    let axes: [(&str, &[&str]); 5] = [
        ("NCCL_MIN_NCHANNELS", &["unset", "4", "8", "16", "32"]),
        ("NCCL_PROTO", &["unset", "allreduce:LL", "allreduce:Simple"]),
        ("NCCL_NTHREADS", &["unset", "128", "256"]),
        ("NCCL_THREAD_THRESHOLDS", &["unset", "-1-1-1+2", "-1-1-1+8"]),
        ("NCCL_BUFFSIZE", &["unset", "1048576"]),
    ];
    let points = 5;
    let has = |arm: &Arm, name: &str, value: &str| arm.env.get(name).is_some_and(|set| set == value);
    // Channels gain most at 16, LL gains on small messages and loses on large ones, and two settings gain together
    // what neither does alone.
    let effect = |arm: &Arm| -> Vec<f64> {
        (0..points)
            .map(|size| {
                let mut log: f64 = 0.0;
                for (value, gain) in [("4", -0.02), ("8", -0.06), ("16", -0.10), ("32", -0.08)] {
                    log += if has(arm, "NCCL_MIN_NCHANNELS", value) { gain } else { 0.0 };
                }
                if has(arm, "NCCL_PROTO", "allreduce:LL") {
                    log += if size < 3 { -0.05 } else { 0.7 };
                }
                log += if has(arm, "NCCL_PROTO", "allreduce:Simple") { 0.3 } else { 0.0 };
                log += if has(arm, "NCCL_NTHREADS", "128") { 0.03 } else { 0.0 };
                if has(arm, "NCCL_THREAD_THRESHOLDS", "-1-1-1+2") {
                    log += if has(arm, "NCCL_BUFFSIZE", "1048576") { -0.05 } else { 0.0 };
                }
                log
            })
            .collect()
    };
    let fixed = Landscape::planted(&base.manifest, "planted, fixed noise", grid(&axes), points, &effect);
    let measured = Landscape { name: "planted, measured noise".to_owned(), noise: base.noise.clone(), ..fixed.clone() };
    vec![measured, fixed]
}

/// One arm whose truth is planted beside seven that do nothing.
fn honesty(base: &Landscape, runs: u64) {
    let points = 12;
    let arms = || -> Vec<Arm> {
        let values = ["1", "2", "4", "8", "16", "24", "32"];
        let env = |value: &&str| BTreeMap::from([("NCCL_MIN_NCHANNELS".to_owned(), (*value).to_owned())]);
        std::iter::once(BTreeMap::new()).chain(values.iter().map(env)).map(arm_of).collect()
    };
    let special = |arm: &Arm| arm.env.get("NCCL_MIN_NCHANNELS").is_some_and(|value| value == "16");
    let all = |log: f64| vec![log; points];
    let landmine = |worse: f64| {
        let mut logs = vec![0.92_f64.ln(); points];
        logs[5] = worse.ln();
        logs
    };
    let cases: [(&str, Vec<f64>, Settings); 5] = [
        ("nothing to gain", all(0.0), racing()),
        ("a gain of 6 %", all(0.94_f64.ln()), racing()),
        ("a gain, and one point 5 % worse", landmine(1.05), racing()),
        ("a gain, and one point 4 % worse", landmine(1.04), racing()),
        (
            "a gain, and one point 4 % worse, 24 launches",
            landmine(1.04),
            Settings { final_launches: Some(24), ..racing() },
        ),
    ];
    println!("| truth | adopted | the planted arm adopted | launches of the final, mean |");
    println!("|---|---|---|---|");
    for (name, logs, settings) in cases {
        let effect = |arm: &Arm| if special(arm) { logs.clone() } else { vec![0.0; points] };
        let landscape = Landscape::planted(&base.manifest, name, arms(), points, &effect);
        let outcomes: Vec<lab::Outcome> = (0..runs).map(|seed| landscape.campaign(seed, &settings)).collect();
        let adopted = outcomes.iter().filter(|outcome| outcome.choice.verdict == VerdictKind::Adopt);
        let own = adopted.clone().filter(|outcome| outcome.choice.winner.as_deref() == Some("MIN_NCHANNELS=16"));
        let finals: Vec<f64> = outcomes
            .iter()
            .filter(|outcome| outcome.choice.statistics.launches > 0)
            .map(|outcome| f64::from(outcome.choice.statistics.launches))
            .collect();
        let share = |count: usize| count as f64 / runs as f64 * 100.0;
        println!(
            "| {name} | {:.1} % | {:.1} % | {:.1} |",
            share(adopted.count()),
            share(own.count()),
            finals.iter().sum::<f64>() / finals.len().max(1) as f64
        );
    }
}

/// Updates after which an arm does what it did, or less: how often `check` says so.
fn check(base: &Landscape, runs: u64) {
    let arms = || grid(&[("NCCL_MIN_NCHANNELS", &["unset", "16"])]);
    let special = |arm: &Arm| !arm.env.is_empty();
    println!("| recorded gain | update | still better | stale | undecided | paired launches, mean | most |");
    println!("|---|---|---|---|---|---|---|");
    for (gain, cost) in [(0.05, 0.0), (0.05, 0.05), (0.05, 0.025), (0.1, 0.0), (0.1, 0.1), (0.03, 0.0), (0.03, 0.03)] {
        let recorded = (1.0_f64 - gain).ln();
        let now = recorded * (1.0 - cost / gain);
        let effect = |arm: &Arm| vec![if special(arm) { now } else { 0.0 }; 5];
        let landscape = Landscape::planted(&base.manifest, "update", arms(), 5, &effect);
        let arm = landscape.manifest.arms.iter().find(|arm| special(arm)).expect("it was planted").clone();
        let seeds = (cost * 1e6) as u64;
        let found: Vec<(UpdateVerdict, u32)> =
            (0..runs).map(|seed| landscape.check(seed + seeds * 1000, &arm, recorded)).collect();
        let count = |holds: &dyn Fn(UpdateVerdict) -> bool| found.iter().filter(|(verdict, _)| holds(*verdict)).count();
        let launches: Vec<u32> = found.iter().map(|(_, launches)| *launches).collect();
        println!(
            "| {:.0} % | costs {:.1} % | {} of {runs} | {} of {runs} | {} of {runs} | {:.1} | {} |",
            gain * 100.0,
            cost * 100.0,
            count(&|verdict| verdict == UpdateVerdict::BetterStill),
            count(&UpdateVerdict::is_stale),
            count(&|verdict| verdict == UpdateVerdict::Undecided),
            f64::from(launches.iter().sum::<u32>()) / runs as f64,
            launches.iter().max().copied().unwrap_or_default()
        );
    }
}
