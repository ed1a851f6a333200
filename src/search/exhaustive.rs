//! The reference: every arm in every block of the search, then the finalists on fresh launches.

use super::{
    CONFIDENCE, CUT_SHORT, SearchContext, Standing, Strategy, Want, complete_blocks, half_width, living, outdoes,
    pooled_spread, standings,
};
use crate::evidence::Evidence;
use crate::record::{Arm, ArmId, DropReason, Phase, PointKey};
use crate::stats;
use crate::wording::plural;

/// Fewest and most paired launches of a finalist. The most are planned where the noise is unknown: too
/// few would let regressions pass on a noisy machine.
pub(super) const LAUNCHES: (u32, u32) = (6, 24);
/// Confidence of the interval that drops a finalist early.
const DROP_CONFIDENCE: f64 = 0.99;

/// See the module's first line.
#[derive(Debug, Clone, Copy, Default)]
pub struct Exhaustive;

impl Strategy for Exhaustive {
    fn next(&self, context: &SearchContext, evidence: &Evidence) -> Want {
        match evidence.finalists() {
            None => search(context, evidence),
            Some((finalists, launches, _)) => finals(context, evidence, finalists, launches),
        }
    }
}

fn search(context: &SearchContext, evidence: &Evidence) -> Want {
    let mut living = living(context, evidence);
    if !living.remove(&context.default) {
        // Without a default there is nothing to compare with.
        return Want::Done { budget: false };
    }
    let done = |arm: &ArmId| complete_blocks(context, evidence, Phase::Search, arm) as u32;
    let mut behind: Vec<ArmId> =
        living.iter().filter(|arm| done(arm) < context.settings.search_blocks).cloned().collect();
    // Blocks in which the default was measured: alone, it still needs its repeats.
    let default_blocks = context
        .points
        .iter()
        .map(|point| evidence.values(Phase::Search, &context.default, *point).len() as u32)
        .min()
        .unwrap_or(0);
    let default_alone = living.is_empty() && default_blocks < context.settings.search_blocks;
    if !behind.is_empty() || default_alone {
        if default_blocks > 0 && !time_for_another_search_block(context, evidence) {
            return choose(context, evidence, CUT_SHORT);
        }
        behind.push(context.default.clone());
        return Want::Block { phase: Phase::Search, arms: behind };
    }
    choose(context, evidence, "")
}

/// Whether another block of the search leaves time for the smallest final.
pub(super) fn time_for_another_search_block(context: &SearchContext, evidence: &Evidence) -> bool {
    let Some(budget) = context.budget_s else { return true };
    let blocks = evidence.ended_blocks(Phase::Search).len().max(1) as f64;
    let block_s = evidence.duration_s() / blocks;
    let launch_s = evidence.duration_s() / f64::from(evidence.launches().max(1));
    let final_s = launch_s * f64::from(LAUNCHES.0) * f64::from(context.settings.finalists + 1);
    evidence.duration_s() + block_s + final_s <= budget
}

fn choose(context: &SearchContext, evidence: &Evidence, prefix: &str) -> Want {
    let settings = &context.settings;
    let standings = standings(context, evidence);
    let spread = pooled_spread(context, evidence, None);
    let half_width = |standing: &Standing| half_width(spread, standing.blocks);
    let gain = (1.0 - settings.min_gain).ln();
    let limit = (1.0 + settings.max_regression).ln();
    // Left out: what cannot reach the smallest gain, and what was shown to regress somewhere.
    let open: Vec<&Standing> = standings
        .iter()
        .filter(|standing| standing.objective_log - half_width(standing) < gain && standing.objective_log < 0.0)
        .filter(|standing| standing.worst.is_none_or(|(_, log, half_width)| log - half_width <= limit))
        .collect();
    let (calm, doubtful): (Vec<&Standing>, Vec<&Standing>) =
        open.into_iter().partition(|standing| standing.worst.is_none_or(|(_, log, _)| log <= limit));
    let ranked: Vec<&Standing> = calm.into_iter().chain(doubtful).collect();
    // What another arm does as well, and is much faster where the objective does not look, comes after it.
    let is_outdone = |standing: &&Standing| {
        ranked.iter().any(|other| {
            let width = half_width(other).max(half_width(standing));
            other.objective_log - standing.objective_log <= width
                && outdoes(context, evidence, Phase::Search, &other.arm, &standing.arm)
        })
    };
    let (outdone, better): (Vec<&Standing>, Vec<&Standing>) = ranked.iter().copied().partition(is_outdone);
    let ranked: Vec<&Standing> = better.iter().chain(&outdone).copied().collect();
    let wanted = settings.finalists as usize;
    let mut finalists: Vec<&Standing> = ranked.iter().copied().take(wanted).collect();
    // The simplest arm that the search cannot tell from the best deserves its chance: with equal
    // times, fewer variables win.
    if let Some(best) = finalists.first().copied() {
        let simplest = better
            .iter()
            .copied()
            .filter(|standing| {
                // As certain as the one of which less is known.
                let width = half_width(standing).max(half_width(best));
                standing.objective_log - best.objective_log <= width
            })
            .filter(|standing| standing.worst.is_none_or(|(_, log, _)| log <= limit))
            .min_by_key(|standing| (variables(context, &standing.arm), standing.arm.clone()));
        if let Some(simplest) = simplest
            && !finalists.contains(&simplest)
        {
            finalists.truncate(wanted.saturating_sub(1).max(1));
            finalists.push(simplest);
        }
    }
    if let Some(gate) = super::gate::next(context, evidence, finalists.iter().map(|standing| &standing.arm)) {
        return gate;
    }
    let (launches, why) = match settings.final_launches {
        Some(launches) => (launches, "as asked"),
        None => planned_launches(
            context,
            pooled_spread(context, evidence, None),
            &|point| pooled_spread(context, evidence, context.points.get(point).copied()),
            &|_| None,
            finalists.first().map(|best| best.objective_log),
        ),
    };
    // Those that an arm was compared in; where none was, those that were tried.
    let blocks = standings.iter().map(|standing| standing.blocks).max();
    let blocks = blocks.unwrap_or_else(|| evidence.ended_blocks(Phase::Search).len());
    let blocks_text = format!("{blocks} {}", plural(blocks as u32, "block", "blocks"));
    let reason = if context.arms.len() == 1 {
        format!("{prefix}there is no arm beside the default")
    } else if finalists.is_empty() {
        format!("{prefix}no arm looked faster than the default by the smallest gain in {blocks_text}")
    } else {
        format!("{prefix}best of {} arms over {blocks_text}; {launches} paired launches {why}", standings.len())
    };
    Want::Finalists { arms: finalists.into_iter().map(|standing| standing.arm.clone()).collect(), launches, reason }
}

pub(super) fn variables(context: &SearchContext, id: &ArmId) -> usize {
    context.arms.iter().find(|arm| arm.id == *id).map_or(usize::MAX, |arm: &Arm| arm.env.len() + arm.files.len())
}

/// Launches after which the intervals should be narrow enough, from the spread seen in the search.
/// Fixed before the final begins, so that nobody stops when the figures happen to look good.
pub(super) fn planned_launches(
    context: &SearchContext,
    objective_spread: Option<f64>,
    point_spread: &dyn Fn(usize) -> Option<f64>,
    point_log: &dyn Fn(usize) -> Option<f64>,
    best_log: Option<f64>,
) -> (u32, &'static str) {
    let settings = &context.settings;
    let limited = |launches: u32, why: &'static str| match context.most_launches {
        Some(most) if most < launches => (most, "are all that were recorded"),
        _ => (launches, why),
    };
    let Some(objective_spread) = objective_spread else {
        return limited(LAUNCHES.1, "to be safe: so few arms tell too little of the noise");
    };
    let needed = |spread: f64, target: f64| {
        stats::launches_needed(spread, target.max(0.002), CONFIDENCE, LAUNCHES.0, LAUNCHES.1)
    };
    // The objective's interval must clear the smallest gain from where the best arm seems to be.
    let distance = best_log.map_or(settings.min_gain, |log| ((1.0 - settings.min_gain).ln() - log).abs());
    let for_objective = needed(objective_spread, (distance / 1.5).min(settings.min_gain));
    // A neutral point must not be taken for a regression by noise alone, nor a regression for a neutral point; one
    // that is known to be far on the right side needs less.
    let limit = (1.0 + settings.max_regression).ln();
    let away = |point: usize| point_log(point).map_or(0.0, |log| (limit - log) / 1.5);
    let for_points = (0..context.points.len())
        .filter_map(|point| Some(needed(point_spread(point)?, away(point).max(settings.max_regression))))
        .max()
        .unwrap_or(LAUNCHES.1);
    limited(for_objective.max(for_points), "follow from the noise seen")
}

pub(super) fn finals(context: &SearchContext, evidence: &Evidence, finalists: &[ArmId], launches: u32) -> Want {
    let living = living(context, evidence);
    let gone: Vec<&ArmId> = evidence.dropped().iter().map(|(arm, _)| arm).collect();
    let mut behind = Vec::new();
    for arm in finalists.iter().filter(|arm| !gone.contains(arm)) {
        if complete_blocks(context, evidence, Phase::Final, arm) as u32 >= launches {
            // Whatever happens to it later, its final is over.
            continue;
        }
        if !living.contains(arm) {
            let detail = evidence.failures_of(arm).last().map(|failure| failure.detail.clone()).unwrap_or_default();
            return Want::Drop { arm: arm.clone(), reason: DropReason::Failing, detail };
        }
        let done = complete_blocks(context, evidence, Phase::Final, arm) as u32;
        if done >= LAUNCHES.0
            && done < launches
            && let Some(detail) = hopeless(context, evidence, arm)
        {
            return Want::Drop { arm: arm.clone(), reason: DropReason::Hopeless, detail };
        }
        if done < launches {
            behind.push(arm.clone());
        }
    }
    if behind.is_empty() {
        return super::trial::next(context, evidence, finalists);
    }
    if !living.contains(&context.default) {
        return Want::Done { budget: false };
    }
    if context.budget_s.is_some_and(|budget| evidence.duration_s() >= budget) {
        return Want::Done { budget: true };
    }
    // Those of a run whose time was up when they were chosen.
    if let Some(gate) = super::gate::next(context, evidence, behind.iter()) {
        return gate;
    }
    behind.push(context.default.clone());
    Want::Block { phase: Phase::Final, arms: behind }
}

/// Why a finalist cannot be adopted any more, with figures. Dropping only ever leads away from a
/// change, so looking often costs nothing but a chance.
fn hopeless(context: &SearchContext, evidence: &Evidence, arm: &ArmId) -> Option<String> {
    let settings = &context.settings;
    let ratios = evidence.objective_log_ratios(Phase::Final, arm, &context.default, &context.objective);
    let objective = stats::log_ratio_estimate(&ratios, DROP_CONFIDENCE)?;
    if objective.low > 1.0 - settings.min_gain {
        return Some(format!(
            "the objective is {:.3} of the default's (99 % interval {:.3} to {:.3})",
            objective.ratio, objective.low, objective.high
        ));
    }
    context.points.iter().find_map(|point: &PointKey| {
        let logs = super::point_log_ratios(evidence, Phase::Final, arm, &context.default, *point);
        let estimate = stats::log_ratio_estimate(&logs, DROP_CONFIDENCE)?;
        (estimate.low > 1.0 + settings.max_regression).then(|| {
            format!(
                "{} of {} bytes takes {:.3} of the default's time (99 % interval {:.3} to {:.3})",
                point.collective, point.bytes, estimate.ratio, estimate.low, estimate.high
            )
        })
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::collective::{Collective, DataType, Form};
    use crate::evidence::Objective;
    use crate::record::{BlockLaunch, CellMeasurement, Event, Point, PointPhase, Settings, Workload};
    use crate::wording::fixtures;

    const DEFAULT: &str = "default";

    fn id(name: &str) -> ArmId {
        ArmId(name.to_owned())
    }

    /// Arms without a name for their effect, at one size; the budget is used up.
    fn context(names: &[&str]) -> SearchContext {
        let point = Point {
            collective: Collective::AllReduce,
            dtype: DataType::Bf16,
            bytes: 57_344,
            ranks: 2,
            calls_per_pass: 1,
            batch: 1,
            weight: 1.0,
            phase: PointPhase::Decode,
            measured: true,
            origin: String::new(),
            form: Form::default(),
        };
        let workload = Workload {
            format: 1,
            model: String::new(),
            engine: String::new(),
            tensor_parallel: 2,
            verify_tokens: 1,
            points: vec![point.clone()],
            guard: Vec::new(),
            assumptions: Vec::new(),
            ..Workload::default()
        };
        let arm = |name: &&str| fixtures::arm(name, &[]);
        SearchContext {
            arms: [DEFAULT].iter().chain(names).map(arm).collect(),
            default: id(DEFAULT),
            objective: Objective::of(&workload).unwrap(),
            points: vec![point.key()],
            settings: Settings { final_launches: Some(6), cell_time_ms: 1.0, ..Settings::default() },
            most_trial_launches: None,
            trial: None,
            most_launches: None,
            gate: None,
            budget_s: Some(0.0),
            earlier: Vec::new(),
        }
    }

    /// A block that ended, with these arms in it.
    fn tell_block(evidence: &mut Evidence, point: PointKey, block: u32, arms: &[(&str, f64)]) {
        let launches = vec![BlockLaunch { launch: block, arms: arms.iter().map(|(name, _)| id(name)).collect() }];
        evidence.tell(&Event::BlockPlanned { block, phase: Phase::Search, launches });
        for (name, us) in arms {
            evidence.tell(&Event::CellMeasured(CellMeasurement {
                point,
                block,
                launch: block,
                replays_us: vec![*us],
                ..fixtures::cell(name)
            }));
        }
        evidence.tell(&Event::LaunchEnded {
            launch: block,
            duration_s: 1.0,
            set_by_environment: Vec::new(),
            outcome: None,
        });
        evidence.tell(&Event::BlockEnded { block });
    }

    #[test]
    fn an_arm_that_a_torn_block_lacks_is_known_less_well() {
        let context = context(&["steady", "other", "rare"]);
        let point = context.points[0];
        let mut evidence = Evidence::default();
        // A spread of a hundredth: half of 1.96 times that over three blocks, and all of it over one.
        for (block, wobble) in [(0, -0.01_f64), (1, 0.0), (2, 0.01)] {
            let others =
                [(DEFAULT, 100.0), ("steady", 100.0 * (0.1 + wobble).exp()), ("other", 100.0 * (0.1 - wobble).exp())];
            tell_block(&mut evidence, point, block, &others);
        }
        // A gain of half a hundredth, seen once, in a block that a resume closed.
        tell_block(&mut evidence, point, 3, &[(DEFAULT, 100.0), ("rare", 99.5)]);
        let Want::Finalists { arms, reason, .. } = Exhaustive.next(&context, &evidence) else {
            panic!("the budget ended the search")
        };
        // Four blocks would make it certain that it cannot reach two hundredths.
        assert_eq!(arms, [id("rare")], "{reason}");
        assert!(reason.contains("over 3 blocks"), "{reason}");
    }
}
