//! What to measure next. A strategy is a pure function of the evidence, so a resumed run asks it the
//! same question an unbroken one would and gets the same answer.

mod confirm;
mod exhaustive;
mod gate;
mod layout;
mod racing;
pub mod tables;
mod trial;

pub use confirm::{Confirm, PAIRS, Side, side};
pub use exhaustive::Exhaustive;
pub use racing::Racing;

use std::collections::BTreeSet;

use crate::evidence::{Evidence, Objective};
use crate::quarantine::quarantined;
use crate::record::{Arm, ArmId, DropReason, EarlierArm, GatePlan, PassCase, Phase, PointKey, Settings, TrialPlan};
use crate::stats;

/// Pooled intervals of the search need this many repeats in all before they mean anything.
const FEWEST_RESIDUALS: usize = 6;
/// Confidence of every interval that a verdict rests on.
pub const CONFIDENCE: f64 = 0.95;
/// Two-sided normal quantile of 95 %. The pooled spread rests on many arms, so its own uncertainty
/// is small against it.
const NORMAL_95: f64 = 1.959_964;

/// How the reason for the finalists begins where the time budget left no time for the whole search.
pub const CUT_SHORT: &str = "the time budget ended the search early; ";

/// What does not change during a run.
#[derive(Debug, Clone)]
pub struct SearchContext {
    /// All arms.
    pub arms: Vec<Arm>,
    /// The default's id.
    pub default: ArmId,
    /// What is optimised.
    pub objective: Objective,
    /// Every point that is measured, guard points included.
    pub points: Vec<PointKey>,
    /// Thresholds and sizes.
    pub settings: Settings,
    /// Most launches of a trial that can be had, where that is limited.
    pub most_trial_launches: Option<u32>,
    /// The trial in a forward pass that follows the final, where one is wanted.
    pub trial: Option<TrialPlan>,
    /// What finalists must get right beside their points, where a gate is wanted.
    pub gate: Option<GatePlan>,
    /// Most paired launches that can be had, where that is limited: a replay has no more than were
    /// recorded.
    pub most_launches: Option<u32>,
    /// Seconds the run may take in all.
    pub budget_s: Option<f64>,
    /// What an earlier run saw of arms at these points; it orders a race.
    pub earlier: Vec<EarlierArm>,
}

impl SearchContext {
    /// The passes of the trial; none without one.
    pub fn passes(&self) -> &[PassCase] {
        self.trial.as_ref().map_or(&[], |trial| trial.cases.as_slice())
    }
}

/// What a strategy wants.
#[derive(Debug, Clone, PartialEq)]
pub enum Want {
    /// A block that holds these arms; the default is among them.
    Block {
        /// What for.
        phase: Phase,
        /// Which arms, in no particular order.
        arms: Vec<ArmId>,
    },
    /// The search is over: these compete.
    Finalists {
        /// Best first.
        arms: Vec<ArmId>,
        /// Paired launches each.
        launches: u32,
        /// Why.
        reason: String,
    },
    /// The final is over: these go into the trial. None may be left, and then there is no trial.
    Trial {
        /// Best first.
        arms: Vec<ArmId>,
        /// Why these.
        reason: String,
    },
    /// An arm of the search, or a finalist, cannot win any more.
    Drop {
        /// Which.
        arm: ArmId,
        /// Why.
        reason: DropReason,
        /// The figures.
        detail: String,
    },
    /// That whoever runs the campaign adds what can be made of the search before it goes on.
    Pause,
    /// Nothing more.
    Done {
        /// Whether the time budget ended it.
        budget: bool,
    },
}

/// Decides what to measure next.
pub trait Strategy {
    /// The next want, from everything that is known.
    fn next(&self, context: &SearchContext, evidence: &Evidence) -> Want;
}

/// The strategy of a run's settings; one that a newer version wrote and this one does not know is the reference.
pub fn strategy(settings: &Settings) -> &'static dyn Strategy {
    if settings.strategy == RACING { &Racing } else { &Exhaustive }
}

/// How the arms of this context stand after their search, as a later race may begin with: each at every point.
pub fn earlier_arms(context: &SearchContext, evidence: &Evidence) -> Vec<EarlierArm> {
    let layout = layout::Layout::of(context, evidence);
    let Some(default) = layout.arms.get(&context.default) else { return Vec::new() };
    let arms = context.arms.iter().filter(|arm| arm.id != context.default);
    arms.filter_map(|arm| {
        let fitted = layout.arms.get(&arm.id)?;
        let (objective_log, point_logs) = fitted.beside(default);
        Some(EarlierArm { arm: arm.clone(), objective_log, point_logs })
    })
    .collect()
}

/// Most arm-launches of a search that races, with a final of the usual length; none where every arm is in every
/// block.
pub fn racing_launches(context: &SearchContext) -> Option<usize> {
    (context.settings.strategy == RACING).then(|| racing::expected_launches(context))
}

/// The name of racing in settings.
pub const RACING: &str = "racing";
/// The name of the reference.
pub const EXHAUSTIVE: &str = "exhaustive";

/// How an arm stands after the search.
#[derive(Debug, Clone, PartialEq)]
pub struct Standing {
    /// Which arm.
    pub arm: ArmId,
    /// Mean log ratio of the objective to the default.
    pub objective_log: f64,
    /// Blocks that mean rests on. A block that a resume closed holds some arms and not others.
    pub blocks: usize,
    /// The worst point: (point, mean log ratio, half-width).
    pub worst: Option<(PointKey, f64, f64)>,
}

/// Every arm that was measured at all points, with its mean log ratios; best objective first.
pub fn standings(context: &SearchContext, evidence: &Evidence) -> Vec<Standing> {
    let quarantined = quarantined(evidence);
    let spreads: Vec<Option<f64>> =
        context.points.iter().map(|point| pooled_spread(context, evidence, Some(*point))).collect();
    let mut standings: Vec<Standing> = context
        .arms
        .iter()
        .filter(|arm| arm.id != context.default && !quarantined.contains(&arm.id))
        .filter_map(|arm| {
            let ratios = evidence.objective_log_ratios(Phase::Search, &arm.id, &context.default, &context.objective);
            let objective_log = stats::mean(&ratios)?;
            let worst = context
                .points
                .iter()
                .zip(&spreads)
                .filter_map(|(point, spread)| {
                    let logs = point_log_ratios(evidence, Phase::Search, &arm.id, &context.default, *point);
                    let mean = stats::mean(&logs)?;
                    Some((*point, mean, half_width(*spread, logs.len())))
                })
                .max_by(|left, right| left.1.total_cmp(&right.1));
            Some(Standing { arm: arm.id.clone(), objective_log, blocks: ratios.len(), worst })
        })
        .collect();
    standings.sort_by(|left, right| {
        left.objective_log.total_cmp(&right.objective_log).then_with(|| left.arm.cmp(&right.arm))
    });
    standings
}

/// Arms whose regression at some point was already shown by the search: (standing, point, share,
/// lower bound).
pub fn shown_regressions(context: &SearchContext, evidence: &Evidence) -> Vec<(Standing, PointKey, f64, f64)> {
    let limit = (1.0 + context.settings.max_regression).ln();
    standings(context, evidence)
        .into_iter()
        .filter_map(|standing| {
            let (point, log, half_width) = standing.worst?;
            (log - half_width > limit).then(|| (standing, point, log.exp(), (log - half_width).exp()))
        })
        .collect()
}

/// Share by which an arm must be faster at every guard point for the search to prefer it: what is less the
/// final may settle.
const MUCH: f64 = 0.25;

/// Whether an arm is shown to be faster than another at every guard point: much, in the search, and by the
/// smallest gain worth having afterwards. The objective does not look there; of two arms that it cannot
/// tell apart, this is the better.
pub fn outdoes(context: &SearchContext, evidence: &Evidence, phase: Phase, arm: &ArmId, other: &ArmId) -> bool {
    let counts = |point: &PointKey| {
        context.objective.batches().iter().any(|batch| batch.calls.iter().any(|(key, _)| key == point))
    };
    let is_faster = |point: &PointKey| {
        let logs = point_log_ratios(evidence, phase, arm, other, *point);
        match phase {
            // Two or three blocks are too few for a spread of their own.
            Phase::Search => stats::mean(&logs).is_some_and(|mean| {
                let high = mean + pooled_half_width(context, evidence, Some(*point), logs.len());
                high.exp() < 1.0 - MUCH
            }),
            Phase::Gate | Phase::Final | Phase::Trial => stats::log_ratio_estimate(&logs, CONFIDENCE)
                .is_some_and(|estimate| estimate.high < 1.0 - context.settings.min_gain),
        }
    };
    let mut guard = context.points.iter().filter(|point| !counts(point)).peekable();
    arm != other && guard.peek().is_some() && guard.all(is_faster)
}

/// Log ratios of an arm to the default at a point, one per block.
pub fn point_log_ratios(evidence: &Evidence, phase: Phase, arm: &ArmId, default: &ArmId, point: PointKey) -> Vec<f64> {
    let pairs: Vec<(f64, f64)> =
        evidence.pairs(phase, arm, default, point).into_iter().map(|(_, arm, default)| (arm, default)).collect();
    stats::paired_log_ratios(&pairs).unwrap_or_default()
}

/// Spread of one block's log ratio around its arm's mean, pooled over all arms; of the objective, or
/// of one point. A single arm has two or three blocks in the search, far too few for a spread of its
/// own; noise belongs to the machine rather than to the arm, so all arms together tell it.
pub fn pooled_spread(context: &SearchContext, evidence: &Evidence, point: Option<PointKey>) -> Option<f64> {
    let (mut squares, mut degrees, mut residuals) = (0.0, 0_usize, 0_usize);
    for arm in context.arms.iter().filter(|arm| arm.id != context.default) {
        let logs = match point {
            Some(point) => point_log_ratios(evidence, Phase::Search, &arm.id, &context.default, point),
            None => evidence.objective_log_ratios(Phase::Search, &arm.id, &context.default, &context.objective),
        };
        let Some(mean) = stats::mean(&logs) else { continue };
        squares += logs.iter().map(|log| (log - mean).powi(2)).sum::<f64>();
        degrees += logs.len() - 1;
        residuals += logs.len();
    }
    (residuals >= FEWEST_RESIDUALS && degrees > 0).then(|| (squares / degrees as f64).sqrt())
}

/// Half-width of a 95 % interval for a mean of `count` log ratios; infinite where nothing is known.
pub fn pooled_half_width(context: &SearchContext, evidence: &Evidence, point: Option<PointKey>, count: usize) -> f64 {
    half_width(pooled_spread(context, evidence, point), count)
}

/// How an arm that should equal the default stands after the search: the log of its objective, and the half-width of
/// the interval around it, infinite where the noise is unknown. None where it was not measured.
pub fn spot_check(context: &SearchContext, evidence: &Evidence, arm: &ArmId) -> Option<(f64, f64)> {
    let logs = evidence.objective_log_ratios(Phase::Search, arm, &context.default, &context.objective);
    Some((stats::mean(&logs)?, pooled_half_width(context, evidence, None, logs.len())))
}

fn half_width(spread: Option<f64>, count: usize) -> f64 {
    match spread {
        Some(spread) if count > 0 => NORMAL_95 * spread / (count as f64).sqrt(),
        _ => f64::INFINITY,
    }
}

/// Arms that can still be measured.
fn living(context: &SearchContext, evidence: &Evidence) -> BTreeSet<ArmId> {
    let quarantined = quarantined(evidence);
    context.arms.iter().map(|arm| arm.id.clone()).filter(|id| !quarantined.contains(id)).collect()
}

/// Blocks in which an arm was measured at every point beside the default.
fn complete_blocks(context: &SearchContext, evidence: &Evidence, phase: Phase, arm: &ArmId) -> usize {
    let blocks_at = |point: &PointKey| -> BTreeSet<u32> {
        evidence.pairs(phase, arm, &context.default, *point).into_iter().map(|(block, _, _)| block).collect()
    };
    let mut points = context.points.iter();
    let Some(first) = points.next() else { return 0 };
    points.fold(blocks_at(first), |common, point| common.intersection(&blocks_at(point)).copied().collect()).len()
}
