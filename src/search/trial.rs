//! After the final: the best arms inside a model's forward pass.

use super::{CONFIDENCE, SearchContext, Want, living, point_log_ratios};
use crate::evidence::Evidence;
use crate::record::{ArmId, PassCase, Phase, TrialPlan};
use crate::stats;

/// The next want of the trial.
pub(super) fn next(context: &SearchContext, evidence: &Evidence, finalists: &[ArmId]) -> Want {
    let Some(plan) = &context.trial else { return Want::Done { budget: false } };
    let Some((arms, _)) = evidence.trial() else { return choose(context, evidence, finalists) };
    let living = living(context, evidence);
    if !living.contains(&context.default) {
        return Want::Done { budget: false };
    }
    let default_blocks = evidence.trial_blocks(&context.default, &context.default, &plan.cases) as u32;
    let wanted = planned_launches(context, evidence, plan, arms);
    let mut behind: Vec<ArmId> = arms
        .iter()
        .filter(|arm| living.contains(arm))
        .filter(|arm| (evidence.trial_blocks(arm, &context.default, &plan.cases) as u32) < wanted)
        .cloned()
        .collect();
    // Without arms the default is timed alone: what does this model's pass take here?
    let alone = arms.is_empty() && default_blocks < plan.launches;
    if behind.is_empty() && !alone {
        return Want::Done { budget: false };
    }
    if context.budget_s.is_some_and(|budget| evidence.duration_s() >= budget) {
        return Want::Done { budget: true };
    }
    behind.push(context.default.clone());
    Want::Block { phase: Phase::Trial, arms: behind }
}

/// Launches that make the intervals of the deciding passes as narrow as the regression they guard
/// against, from the spread of the first few. Only the spread of those is looked at, never their
/// mean, so that nobody stops when the figures happen to look good.
fn planned_launches(context: &SearchContext, evidence: &Evidence, plan: &TrialPlan, arms: &[ArmId]) -> u32 {
    let first = plan.launches as usize;
    let spread = |arm: &ArmId, case: &PassCase| {
        let logs = evidence.pass_log_ratios(arm, &context.default, case.key());
        stats::trimmed(logs.get(..first)?).map(|trimmed| trimmed.spread())
    };
    let deciding = plan.cases.iter().filter(|case| case.weight > 0.0);
    let widest = deciding.flat_map(|case| arms.iter().filter_map(move |arm| spread(arm, case))).max_by(f64::total_cmp);
    let mix = arms
        .iter()
        .filter_map(|arm| {
            let logs = evidence.trial_log_ratios(arm, &context.default, &plan.cases);
            stats::trimmed(logs.get(..first)?).map(|trimmed| trimmed.spread())
        })
        .max_by(f64::total_cmp);
    let needed = |spread: Option<f64>, target: f64| {
        spread.map_or(plan.launches, |spread| {
            let most = plan.most_launches.max(plan.launches);
            stats::launches_needed(spread, target.max(0.005), CONFIDENCE, plan.launches, most)
        })
    };
    // The mix decides about a gain of a few per cent, so its interval has to be half as wide.
    let launches = needed(widest, context.settings.max_regression).max(needed(mix, context.settings.min_gain / 2.0));
    context.most_trial_launches.map_or(launches, |most| launches.min(most))
}

/// Finalists that gain in the final and regress nowhere in it, best first.
fn choose(context: &SearchContext, evidence: &Evidence, finalists: &[ArmId]) -> Want {
    let most = context.trial.as_ref().map_or(0, |plan| plan.finalists as usize);
    let limit = 1.0 + context.settings.max_regression;
    let living = living(context, evidence);
    let mut ranked: Vec<(f64, &ArmId)> = finalists
        .iter()
        .filter(|arm| living.contains(arm) && !evidence.dropped().iter().any(|(dropped, _)| dropped == *arm))
        .filter_map(|arm| {
            let ratios = evidence.objective_log_ratios(Phase::Final, arm, &context.default, &context.objective);
            let objective = stats::log_ratio_estimate(&ratios, CONFIDENCE)?;
            let regresses = context.points.iter().any(|point| {
                let logs = point_log_ratios(evidence, Phase::Final, arm, &context.default, *point);
                stats::log_ratio_estimate(&logs, CONFIDENCE).is_some_and(|estimate| {
                    // What --strict would not let ship is not worth a trial.
                    let end = if context.settings.strict { estimate.high } else { estimate.ratio };
                    end > limit
                })
            });
            (objective.high < 1.0 - context.settings.min_gain && !regresses).then_some((objective.ratio, arm))
        })
        .collect();
    ranked.sort_by(|left, right| left.0.total_cmp(&right.0).then_with(|| left.1.cmp(right.1)));
    let arms: Vec<ArmId> = ranked.into_iter().take(most).map(|(_, arm)| arm.clone()).collect();
    let reason = if arms.is_empty() {
        "no finalist gains enough to be tried; the default's pass is timed alone".to_owned()
    } else {
        "the finalists that gain without regressing at any point".to_owned()
    };
    Want::Trial { arms, reason }
}
