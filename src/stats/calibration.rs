//! Does the method do what it says? Seeded simulations of intervals and of whole judgements.
//!
//! The judgement itself lives on a higher floor; its two rules are repeated here in one line each,
//! because they are the claim that the numbers of this floor have to carry.

use rand::RngExt;
use rand_chacha::ChaCha8Rng;

use super::{drift, noise_floor, paired_ratio, trimmed};
use crate::seed::Seed;

/// Standard deviation of one launch's log time.
const NOISE: f64 = 0.018;
/// The share of launches that are slow.
const SLOW_SHARE: f64 = 0.075;
const MIN_GAIN: f64 = 0.02;
const MAX_REGRESSION: f64 = 0.02;
const CONFIDENCE: f64 = 0.95;
const LAUNCHES: usize = 12;

fn draws(id: &str) -> ChaCha8Rng {
    Seed(20_260_101).derive("stats-calibration", id)
}

/// A standard normal value (Box & Muller 1958).
fn normal(random: &mut ChaCha8Rng) -> f64 {
    // 1 - u, because u may be 0 and never 1.
    let radius = (-2.0 * (1.0 - random.random::<f64>()).ln()).sqrt();
    radius * (std::f64::consts::TAU * random.random::<f64>()).cos()
}

/// The time of one launch whose true time is `time`, slow by `slow_factor` now and then.
fn launch(random: &mut ChaCha8Rng, time: f64, slow_factor: f64) -> f64 {
    let slow = random.random::<f64>() < SLOW_SHARE;
    time * (NOISE * normal(random)).exp() * if slow { slow_factor } else { 1.0 }
}

/// Paired launches of an arm with this true ratio to the default.
fn paired(random: &mut ChaCha8Rng, true_ratio: f64, slow_factor: f64, launches: usize) -> Vec<(f64, f64)> {
    (0..launches)
        .map(|_| (launch(random, 100.0 * true_ratio, slow_factor), launch(random, 100.0, slow_factor)))
        .collect()
}

/// The share of runs for which something holds.
fn share_of(runs: u32, mut holds: impl FnMut() -> bool) -> f64 {
    f64::from((0..runs).map(|_| u32::from(holds())).sum::<u32>()) / f64::from(runs)
}

#[test]
fn the_interval_covers_as_often_as_it_says_on_normal_values() {
    for launches in [6, 9, 10, LAUNCHES, 24] {
        let mut random = draws(&format!("normal-{launches}"));
        let covered = share_of(4000, || {
            let values: Vec<f64> = (0..launches).map(|_| 3.0 + 0.5 * normal(&mut random)).collect();
            trimmed(&values).unwrap().interval(CONFIDENCE).contains(3.0)
        });
        assert!((0.93..=0.97).contains(&covered), "{covered} at {launches} launches");
    }
}

#[test]
fn the_interval_covers_with_slow_launches_too() {
    for launches in [6, LAUNCHES, 24] {
        let mut random = draws(&format!("slow-{launches}"));
        let covered = share_of(4000, || {
            let pairs = paired(&mut random, 0.97, 1.1, launches);
            paired_ratio(&pairs, CONFIDENCE).unwrap().interval().contains(0.97)
        });
        assert!((0.93..=0.98).contains(&covered), "{covered} at {launches} launches");
    }
}

/// How often an arm with this true ratio is adopted: the upper bound shows at least the minimum gain.
fn adopted(id: &str, true_ratio: f64) -> f64 {
    let mut random = draws(id);
    share_of(500, || {
        let pairs = paired(&mut random, true_ratio, 1.08, LAUNCHES);
        paired_ratio(&pairs, CONFIDENCE).unwrap().high < 1.0 - MIN_GAIN
    })
}

/// How often an arm with this true ratio at one point is vetoed: the estimate exceeds the limit there.
fn vetoed(id: &str, true_ratio: f64, launches: usize) -> f64 {
    let mut random = draws(id);
    share_of(2000, || {
        let pairs = paired(&mut random, true_ratio, 1.08, launches);
        paired_ratio(&pairs, CONFIDENCE).unwrap().ratio > 1.0 + MAX_REGRESSION
    })
}

#[test]
fn a_real_gain_is_adopted_and_none_is_not() {
    let found = adopted("gain", 0.94);
    assert!(found >= 0.85, "a true gain of 6 % was adopted in {found}");
    let false_alarm = adopted("no-gain", 1.0);
    assert!(false_alarm <= 0.01, "no gain was adopted in {false_alarm}");
    // At the threshold itself the one-sided error of a two-sided 95 % interval: 2.5 %.
    let at_threshold = adopted("threshold", 1.0 - MIN_GAIN);
    assert!(at_threshold <= 0.05, "a gain of just the minimum was adopted in {at_threshold}");
}

#[test]
fn a_landmine_is_vetoed() {
    let five = vetoed("landmine-5", 1.05, LAUNCHES);
    assert!(five >= 0.98, "a regression of 5 % was vetoed in {five}");
    let four = vetoed("landmine-4", 1.04, LAUNCHES);
    assert!(four >= 0.95, "a regression of 4 % was vetoed in {four}");
    let four_in_24 = vetoed("landmine-4-24", 1.04, 24);
    assert!(four_in_24 >= 0.99, "a regression of 4 % over 24 launches was vetoed in {four_in_24}");
    let harmless = vetoed("harmless", 1.0, LAUNCHES);
    assert!(harmless <= 0.03, "a harmless point was vetoed in {harmless}");
}

#[test]
fn the_noise_floor_is_the_half_width_of_default_against_default() {
    let mut random = draws("noise-floor");
    let (mut floors, mut half_widths) = (Vec::new(), Vec::new());
    for _ in 0..3000 {
        let default: Vec<f64> = (0..LAUNCHES).map(|_| launch(&mut random, 100.0, 1.0)).collect();
        floors.push(noise_floor(&default, LAUNCHES, CONFIDENCE).unwrap());
        let pairs = paired(&mut random, 1.0, 1.0, LAUNCHES);
        half_widths.push(paired_ratio(&pairs, CONFIDENCE).unwrap().smallest_visible_regression());
    }
    let ratio = super::median(&floors).unwrap() / super::median(&half_widths).unwrap();
    assert!((0.95..=1.05).contains(&ratio), "{ratio}");
}

#[test]
fn a_steady_machine_rarely_drifts() {
    let mut random = draws("drift");
    let alarms = share_of(2000, || {
        let series: Vec<f64> = (0..LAUNCHES).map(|_| launch(&mut random, 100.0, 1.08)).collect();
        drift(&series).unwrap().beyond_noise
    });
    assert!(alarms <= 0.02, "{alarms}");
    let seen = share_of(500, || {
        let series: Vec<f64> =
            (0..LAUNCHES).map(|i| launch(&mut random, 100.0 + if i < 6 { 0.0 } else { 10.0 }, 1.0)).collect();
        drift(&series).unwrap().beyond_noise
    });
    assert!(seen >= 0.85, "{seen}");
}
