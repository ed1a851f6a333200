//! Whether an answer still holds after an update, from paired launches of the default and of its arm.

use crate::evidence::Evidence;
use crate::quarantine::{failure_words, quarantined};
use crate::record::{Arm, ArmId, CheckedObjective, Phase, PointKey, UpdateVerdict};
use crate::search::{CONFIDENCE, SearchContext, Side, point_log_ratios, side};
use crate::stats;
use crate::units::{format_change, group_thousands};
use crate::wording::plural;

/// The verdict and what it rests on.
#[derive(Debug, Clone)]
pub struct JudgedUpdate {
    /// The verdict.
    pub verdict: UpdateVerdict,
    /// Why, in a sentence.
    pub reason: String,
    /// The figures.
    pub objective: CheckedObjective,
}

/// Judges an answer anew: `arm` gained `recorded` (a ratio below 1) when it was tuned. An error says how the default failed.
pub fn judge_update(
    context: &SearchContext,
    evidence: &Evidence,
    arm: &Arm,
    recorded: f64,
    something_changed: bool,
) -> Result<JudgedUpdate, String> {
    let logs = evidence.objective_log_ratios(Phase::Final, &arm.id, &context.default, &context.objective);
    let estimate = stats::log_ratio_estimate(&logs, CONFIDENCE);
    let objective = CheckedObjective {
        recorded_ratio: Some(recorded),
        midpoint_ratio: Some(recorded.sqrt()),
        ratio: estimate.map(|estimate| estimate.ratio),
        ratio_ci95: estimate.map(|estimate| [estimate.low, estimate.high]),
        launches: logs.len() as u32,
    };
    let told = |verdict, reason| Ok(JudgedUpdate { verdict, reason, objective: objective.clone() });
    let out = quarantined(evidence);
    let failed = |arm: &ArmId| {
        let last =
            evidence.failures_of(arm).last().map(|failure| (failure_words(failure.kind), failure.detail.clone()));
        last.map_or_else(|| "failed".to_owned(), |(what, detail)| format!("{what}: {detail}"))
    };
    if out.contains(&context.default) {
        return Err(failed(&context.default));
    }
    if out.contains(&arm.id) {
        let why = format!("the file's settings fail here, and the default runs: it {}", failed(&arm.id));
        return told(UpdateVerdict::WorseOrFailing, why);
    }
    let Some(estimate) = estimate else {
        return told(
            UpdateVerdict::Undecided,
            "too few launches succeeded to say anything; `nccltune doctor` may know why".to_owned(),
        );
    };
    let limit = 1.0 + context.settings.max_regression;
    let figures = format!(
        "{} against the default now (95 % interval {} to {}, {} paired {}); {} when it was tuned",
        format_change(estimate.ratio),
        format_change(estimate.low),
        format_change(estimate.high),
        estimate.count,
        plural(estimate.count as u32, "launch", "launches"),
        format_change(recorded)
    );
    if estimate.low > 1.0 {
        return told(UpdateVerdict::WorseOrFailing, format!("it takes longer than the default: {figures}"));
    }
    // As many points may be wrong at once as there are: each is held to its share.
    let confidence = stats::sequential_confidence(CONFIDENCE, context.points.len() as u32);
    let worse = context.points.iter().find_map(|point| {
        let ratio = ratio_at(context, evidence, arm, *point, confidence)?;
        (ratio.low > 1.0 && ratio.ratio > limit).then_some((point, ratio))
    });
    if let Some((point, ratio)) = worse {
        let place = format!("{} of {} bytes", point.collective.name(), group_thousands(point.bytes));
        return told(
            UpdateVerdict::WorseOrFailing,
            format!("it takes longer than the default at {place}: {}; in all {figures}", format_change(ratio.ratio)),
        );
    }
    match side(&logs, recorded.ln(), true) {
        Some(Side::Gain) if something_changed => {
            told(UpdateVerdict::BetterStill, format!("something changed, and the gain is still there: {figures}"))
        }
        Some(Side::Gain) => {
            told(UpdateVerdict::Valid, format!("nothing that decides changed, and the gain is still there: {figures}"))
        }
        Some(Side::NoGain) => {
            told(UpdateVerdict::NoLongerBetter, format!("most or all of the gain is gone: {figures}"))
        }
        None => told(
            UpdateVerdict::Undecided,
            format!(
                "noise hides whether the gain is still there: {figures}; the border is {}. More time may tell \
                 (--time-budget), a new `tune` will",
                format_change(recorded.sqrt())
            ),
        ),
    }
}

/// The ratio of an arm to the default at a point, in a final.
pub fn ratio_at(
    context: &SearchContext,
    evidence: &Evidence,
    arm: &Arm,
    point: PointKey,
    confidence: f64,
) -> Option<stats::RatioEstimate> {
    let logs = point_log_ratios(evidence, Phase::Final, &arm.id, &context.default, point);
    stats::log_ratio_estimate(&logs, confidence)
}
