//! Arms and blocks as a two-way layout: what an arm takes, and how far one launch strays from it.
//!
//! Racing does not measure every arm in every block, and blocks drift. Each log time is taken as the sum of
//! its arm's effect, its block's and noise, fitted by least squares (Scheffé, The Analysis of Variance, 1959,
//! chapter 4, unequal numbers), by alternating means. Every arm of a block helps to level it, so that the
//! noise of the default alone is not in every comparison.

use std::collections::{BTreeMap, BTreeSet};

use super::SearchContext;
use crate::evidence::Evidence;
use crate::record::{ArmId, Phase, PointKey};
use crate::stats;

/// Passes of the fit; layouts joined by the default in every block settle within a few.
const PASSES: usize = 40;

/// An arm's place in the layout.
#[derive(Debug, Clone)]
pub(super) struct Fitted {
    /// Mean log of the objective's time, levelled over blocks.
    pub(super) objective: f64,
    /// The same at each point of the context, in its order.
    pub(super) points: Vec<f64>,
    /// Blocks it was measured in.
    pub(super) blocks: usize,
}

impl Fitted {
    /// The logs of its ratios to another arm: of the objective, and at each point.
    pub(super) fn beside(&self, other: &Self) -> (f64, Vec<f64>) {
        let points = self.points.iter().zip(&other.points).map(|(own, other)| own - other);
        (self.objective - other.objective, points.collect())
    }
}

/// The fit of everything that the search measured whole.
#[derive(Debug, Clone, Default)]
pub(super) struct Layout {
    /// Arms that were measured at all points.
    pub(super) arms: BTreeMap<ArmId, Fitted>,
    /// Arms in each block, in the order of blocks.
    pub(super) block_sizes: Vec<usize>,
    /// Standard deviation of the log of one arm's launch: of the objective.
    objective_spread: f64,
    /// And at each point.
    point_spreads: Vec<f64>,
    /// The same of the objective, then of each point, as the interval of a final will see it: one slow launch is
    /// trimmed there.
    trimmed_spreads: Vec<Option<f64>>,
    /// Degrees of freedom of the spreads.
    pub(super) degrees: usize,
}

impl Layout {
    pub(super) fn of(context: &SearchContext, evidence: &Evidence) -> Self {
        let columns = 1 + context.points.len();
        // (arm, block) -> the log of the objective, then of each point.
        let mut seen: Vec<(usize, u32, Vec<f64>)> = Vec::new();
        let mut ids: Vec<&ArmId> = Vec::new();
        for arm in &context.arms {
            let Some(first) = context.points.first() else { continue };
            let mut is_new = true;
            for value in evidence.values(Phase::Search, &arm.id, *first) {
                // A block that was torn and lacks the default holds its arms against nothing.
                let has_default = |point: &PointKey| {
                    let default = evidence.values(Phase::Search, &context.default, *point);
                    default.iter().any(|other| other.block == value.block)
                };
                if !context.points.iter().all(has_default) {
                    continue;
                }
                let logs: Option<Vec<f64>> = context
                    .points
                    .iter()
                    .map(|point| {
                        let values = evidence.values(Phase::Search, &arm.id, *point);
                        values.iter().find(|other| other.block == value.block).map(|value| value.median_us.ln())
                    })
                    .collect();
                let Some(logs) = logs else { continue };
                let us = |key| context.points.iter().position(|point| *point == key).map(|index| logs[index].exp());
                let Some(objective) = context.objective.log_ratio(|key| Some((us(key)?, 1.0))) else { continue };
                if std::mem::take(&mut is_new) {
                    ids.push(&arm.id);
                }
                seen.push((ids.len() - 1, value.block, [vec![objective], logs].concat()));
            }
        }
        let blocks: BTreeSet<u32> = seen.iter().map(|(_, block, _)| *block).collect();
        let blocks: Vec<u32> = blocks.into_iter().collect();
        let at = |block: u32| blocks.iter().position(|known| *known == block).unwrap_or(0);
        let seen: Vec<(usize, usize, Vec<f64>)> =
            seen.into_iter().map(|(arm, block, logs)| (arm, at(block), logs)).collect();
        let mut arm_effects = vec![vec![0.0; columns]; ids.len()];
        let mut block_effects = vec![vec![0.0; columns]; blocks.len()];
        let (mut arm_counts, mut block_sizes) = (vec![0_usize; ids.len()], vec![0_usize; blocks.len()]);
        for (arm, block, _) in &seen {
            arm_counts[*arm] += 1;
            block_sizes[*block] += 1;
        }
        for _ in 0..PASSES {
            let mut sums = vec![vec![0.0; columns]; ids.len()];
            for (arm, block, logs) in &seen {
                for column in 0..columns {
                    sums[*arm][column] += logs[column] - block_effects[*block][column];
                }
            }
            for (arm, sum) in sums.into_iter().enumerate() {
                arm_effects[arm] = sum.into_iter().map(|sum| sum / arm_counts[arm] as f64).collect();
            }
            let mut sums = vec![vec![0.0; columns]; blocks.len()];
            for (arm, block, logs) in &seen {
                for column in 0..columns {
                    sums[*block][column] += logs[column] - arm_effects[*arm][column];
                }
            }
            for (block, sum) in sums.into_iter().enumerate() {
                block_effects[block] = sum.into_iter().map(|sum| sum / block_sizes[block] as f64).collect();
            }
        }
        let degrees = (seen.len() + 1).saturating_sub(ids.len() + blocks.len());
        let spread = |column: usize| {
            let residual = |(arm, block, logs): &(usize, usize, Vec<f64>)| {
                logs[column] - arm_effects[*arm][column] - block_effects[*block][column]
            };
            let squares: f64 = seen.iter().map(|entry| residual(entry).powi(2)).sum();
            if degrees == 0 { f64::INFINITY } else { (squares / degrees as f64).sqrt() }
        };
        let trimmed_spread = |column: usize| {
            let repeated = seen.iter().filter(|(arm, _, _)| arm_counts[*arm] > 1);
            let residuals: Vec<f64> = repeated
                .map(|(arm, block, logs)| {
                    // About a mean of its own, a residual is too small.
                    let count = arm_counts[*arm] as f64;
                    (logs[column] - arm_effects[*arm][column] - block_effects[*block][column])
                        * (count / (count - 1.0)).sqrt()
                })
                .collect();
            stats::trimmed(&residuals).map(|trimmed| trimmed.spread())
        };
        Self {
            trimmed_spreads: (0..columns).map(trimmed_spread).collect(),
            objective_spread: spread(0),
            point_spreads: (1..columns).map(spread).collect(),
            degrees,
            arms: ids
                .into_iter()
                .zip(arm_effects)
                .zip(arm_counts)
                .map(|((id, effects), blocks)| {
                    (id.clone(), Fitted { objective: effects[0], points: effects[1..].to_vec(), blocks })
                })
                .collect(),
            block_sizes,
        }
    }

    /// Arm-launches so far.
    pub(super) fn launches(&self) -> usize {
        self.block_sizes.iter().sum()
    }

    /// Standard deviation of the log ratio of two arms in one pair of launches: of the objective.
    pub(super) fn paired_objective_spread(&self) -> Option<f64> {
        (self.degrees > 0).then_some(self.objective_spread * std::f64::consts::SQRT_2)
    }

    /// Standard deviation of the log of the objective of one launch; nothing while it is unknown.
    pub(super) fn launch_spread(&self) -> f64 {
        if self.degrees > 0 { self.objective_spread } else { 0.0 }
    }

    /// And at a point of the context.
    pub(super) fn paired_point_spread(&self, point: usize) -> Option<f64> {
        (*self.trimmed_spreads.get(point + 1)?).map(|spread| spread * std::f64::consts::SQRT_2)
    }

    /// Standard error of the difference of two arms' objectives.
    pub(super) fn objective_error(&self, arm: &Fitted, other: &Fitted) -> f64 {
        self.objective_spread * (1.0 / arm.blocks as f64 + 1.0 / other.blocks as f64).sqrt()
    }

    /// And at a point of the context.
    pub(super) fn point_error(&self, point: usize, arm: &Fitted, other: &Fitted) -> f64 {
        let spread = self.point_spreads.get(point).copied().unwrap_or(f64::INFINITY);
        spread * (1.0 / arm.blocks as f64 + 1.0 / other.blocks as f64).sqrt()
    }
}
