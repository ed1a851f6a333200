//! Whether an answer still holds: paired launches of the default and of one arm, until it is told which of two things is
//! true, or until time is up.
//!
//! ```text
//!   the gain that was recorded          midpoint            no gain
//!   ln r -------------- distance -------- ln r / 2 -------- distance -------- 0
//! ```
//!
//! A mean of log ratios belongs to the side of the midpoint on which it lies. That is said where noise allows it: where
//! each end would be told from the midpoint with [`PLAN_CONFIDENCE`], and the mean is not so near to the midpoint that
//! it may as well lie on the other side ([`BAND_CONFIDENCE`]). So the number of launches follows from the noise and from
//! the size of the gain. `examples/regret -- check` says how often this is right.

use super::{SearchContext, Strategy, Want};
use crate::evidence::Evidence;
use crate::quarantine::quarantined;
use crate::record::{ArmId, Phase};
use crate::stats;

/// Fewest paired launches that are judged, and most that are made.
pub const PAIRS: (usize, usize) = (6, 24);
/// Paired launches without which nothing is judged, however little time there was.
const FEWEST_IN_HASTE: usize = 4;
/// Two-sided confidences: of telling an end from the midpoint while there is time for more, and where there is none;
/// and of the band around the midpoint that belongs to neither side.
const PLAN_CONFIDENCE: f64 = 0.99;
const LAST_CONFIDENCE: f64 = 0.90;
const BAND_CONFIDENCE: f64 = 0.80;

/// Which of the two is true.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Side {
    /// The gain is still there.
    Gain,
    /// It is not.
    NoGain,
}

/// The side of the midpoint between a recorded gain (the log of its ratio, below 0) and none; nothing where more
/// launches are needed, or where these were the last and do not tell.
pub fn side(log_ratios: &[f64], recorded_log: f64, is_last: bool) -> Option<Side> {
    let fewest = if is_last { FEWEST_IN_HASTE } else { PAIRS.0 };
    let seen = stats::trimmed(log_ratios).filter(|seen| seen.count >= fewest)?;
    let midpoint = recorded_log / 2.0;
    let off = seen.mean - midpoint;
    let needed = seen.half_width(if is_last { LAST_CONFIDENCE } else { PLAN_CONFIDENCE });
    let is_told = recorded_log < 0.0 && midpoint.abs() >= needed && off.abs() >= seen.half_width(BAND_CONFIDENCE);
    is_told.then_some(if off < 0.0 { Side::Gain } else { Side::NoGain })
}

/// Measures the default and other arms in paired launches.
#[derive(Debug, Clone)]
pub struct Confirm {
    /// The arm whose gain is in question.
    pub arm: ArmId,
    /// The log of the ratio that was recorded; without one, all launches are made that time allows.
    pub recorded_log: Option<f64>,
    /// Paired launches at most.
    pub most_pairs: usize,
}

impl Strategy for Confirm {
    fn next(&self, context: &SearchContext, evidence: &Evidence) -> Want {
        let out = quarantined(evidence);
        let done = Want::Done { budget: false };
        if out.contains(&context.default) || out.contains(&self.arm) {
            return done;
        }
        let logs = evidence.objective_log_ratios(Phase::Final, &self.arm, &context.default, &context.objective);
        let blocks = evidence.ended_blocks(Phase::Final).len();
        if blocks >= self.most_pairs || self.recorded_log.is_some_and(|log| side(&logs, log, false).is_some()) {
            return done;
        }
        let block_s = evidence.duration_s() / blocks.max(1) as f64;
        if blocks > 0 && context.budget_s.is_some_and(|budget| evidence.duration_s() + block_s > budget) {
            return Want::Done { budget: true };
        }
        let arms = context.arms.iter().map(|arm| arm.id.clone()).filter(|id| !out.contains(id)).collect();
        Want::Block { phase: Phase::Final, arms }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_side_of_the_midpoint_is_told_and_what_lies_on_it_is_not() {
        let recorded = 0.95_f64.ln();
        let around = |mean: f64| [-0.006, -0.002, 0.0, 0.002, 0.006, 0.001].map(|noise| mean + noise);
        assert_eq!(side(&around(recorded), recorded, false), Some(Side::Gain));
        assert_eq!(side(&around(0.0), recorded, false), Some(Side::NoGain));
        assert_eq!(side(&around(0.2), recorded, false), Some(Side::NoGain));
        assert_eq!(side(&around(recorded / 2.0), recorded, true), None);
        // What was no gain has no middle, and few launches say nothing.
        assert_eq!(side(&around(0.0), 0.0, true), None);
        assert_eq!(side(&around(0.0)[..5], recorded, false), None);
        assert_eq!(side(&around(0.0)[..5], recorded, true), Some(Side::NoGain));
        assert_eq!(side(&around(0.0)[..3], recorded, true), None);
        // Noise that could hide the whole distance.
        let wild = around(0.0).map(|log| log * 20.0);
        assert_eq!(side(&wild, recorded, true), None);
        assert_eq!(side(&[f64::NAN; 8], recorded, true), None);
    }
}
