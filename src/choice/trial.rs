//! What a forward pass says of the finalists.
//!
//! The same rules as for points, on the pass's own quantities: per pair of launches one log ratio of
//! each pass and one of the weighted mix; trimmed means and Yuen's interval; a pass that decides and
//! regresses is a veto; a prefill pass, of which there are only a few runs per launch, is one where the
//! regression is shown.

use super::FEWEST_LAUNCHES;
use crate::collective::{Collective, DataType};
use crate::evidence::{Evidence, PassValue};
use crate::quarantine::quarantined;
use crate::record::{Arm, ArmId, PassCase, PassStep, Phase, PointKey, PointPhase, Trial, TrialPlan, VerdictKind, Veto};
use crate::search::{CONFIDENCE, SearchContext, outdoes};
use crate::space;
use crate::stats::{self, RatioEstimate};
use crate::wording::plural;
use crate::workload::pass_steps;

/// A coefficient of variation of the default's pass beyond this is reported.
const QUIET: f64 = 0.01;
/// Predicted and measured gain that differ by more than this factor are pointed out.
const MISMATCH: f64 = 2.0;
/// Gains below this are too small to compare predictions with.
const COMPARABLE_GAIN: f64 = 0.01;

/// What the trial says.
pub(super) struct Judged {
    /// The arm that wins the weighted mix and regresses nowhere.
    pub(super) winner: Option<ArmId>,
    /// Best arm per profile.
    pub(super) profiles: Vec<(String, ArmId)>,
    /// Every pass of every arm.
    pub(super) trials: Vec<Trial>,
    /// Arms that regress in a pass.
    pub(super) vetoed: Vec<Veto>,
    /// Findings.
    pub(super) notes: Vec<String>,
    /// Why no arm wins, where none does.
    reason: String,
    /// Whether the trial itself could not be made.
    pub(super) untried: bool,
    /// Whether some arm stands on both sides of the smallest gain.
    open: bool,
}

impl Judged {
    /// The verdict of the run, given that of the micro-benchmark.
    pub(super) fn verdict(&self, micro: VerdictKind, reason: String, winner: Option<&str>) -> (VerdictKind, String) {
        match (micro, winner) {
            (VerdictKind::Adopt, _) if self.untried => (micro, format!("{reason}; UNTRIED in a forward pass")),
            (VerdictKind::Adopt, Some(name)) => {
                (micro, format!("{reason}; in the forward pass {name} {}", self.reason))
            }
            (VerdictKind::Adopt, None) if self.open => (
                VerdictKind::Undecided,
                format!("the micro-benchmark gains, the forward pass does not decide: {}", self.reason),
            ),
            (VerdictKind::Adopt, None) => (
                VerdictKind::KeepDefault,
                format!("the micro-benchmark gains, the forward pass does not: {}", self.reason),
            ),
            (other, _) => (other, reason),
        }
    }
}

struct Tried<'a> {
    arm: &'a Arm,
    mix: RatioEstimate,
    passes: Vec<(&'a PassCase, RatioEstimate)>,
    veto: Option<String>,
}

/// Judges the trial; `None` where none was wanted or it never began. Only the `allowed` arms, which the
/// final lets ship, can win.
pub(super) fn judge(context: &SearchContext, evidence: &Evidence, allowed: &[&ArmId]) -> Option<Judged> {
    let plan = context.trial.as_ref()?;
    let (arms, _) = evidence.trial()?;
    let default_passes = |case: &PassCase| evidence.passes(&context.default, case.key());
    let mut notes: Vec<String> = plan.shape.notes.iter().map(|note| format!("forward pass: {note}")).collect();
    let deciding: Vec<&PassCase> = plan.cases.iter().filter(|case| case.weight > 0.0).collect();
    if deciding.iter().any(|case| default_passes(case).is_empty()) {
        let failure = evidence
            .failures()
            .iter()
            .rev()
            .find(|failure| arms.contains(&failure.arm) || failure.arm == context.default)
            .map_or_else(
                || "it was not reached".to_owned(),
                |failure| format!("{}: {}", failure.kind.name(), failure.detail),
            );
        notes.push(format!(
            "UNTRIED: the forward pass could not be timed ({failure}); the verdict rests on the micro-benchmark alone"
        ));
        return Some(Judged {
            winner: None,
            profiles: Vec::new(),
            trials: Vec::new(),
            vetoed: Vec::new(),
            notes,
            reason: "was not tried".to_owned(),
            untried: true,
            open: false,
        });
    }
    let tried: Vec<Tried<'_>> = arms
        .iter()
        .filter_map(|id| context.arms.iter().find(|arm| arm.id == *id))
        .filter_map(|arm| weigh(context, evidence, plan, arm))
        .collect();
    let gain = 1.0 - context.settings.min_gain;
    let may_win = |tried: &&Tried<'_>| tried.veto.is_none() && allowed.contains(&&tried.arm.id);
    let enough = |tried: &&Tried<'_>| tried.mix.count >= FEWEST_LAUNCHES && may_win(tried);
    let winner = tried
        .iter()
        .filter(enough)
        .filter(|tried| tried.mix.high < gain)
        .min_by(|left, right| left.mix.ratio.total_cmp(&right.mix.ratio))
        // Arms that cannot be told from the best in the pass: what none of them outdoes on the guard set,
        // and the simplest of those.
        .map(|best| {
            let tied = |tried: &&Tried<'_>| {
                let ratios = evidence.trial_log_ratios(&tried.arm.id, &best.arm.id, &plan.cases);
                tried.arm.id == best.arm.id
                    || stats::log_ratio_estimate(&ratios, CONFIDENCE).is_some_and(|estimate| estimate.low <= 1.0)
            };
            let tied: Vec<&Tried<'_>> =
                tried.iter().filter(enough).filter(|tried| tried.mix.high < gain).filter(tied).collect();
            let is_outdone = |tried: &&&Tried<'_>| {
                tied.iter().any(|other| outdoes(context, evidence, Phase::Final, &other.arm.id, &tried.arm.id))
            };
            let left = tied.iter().filter(|tried| !is_outdone(tried));
            left.copied().min_by_key(|tried| super::simplicity(context, evidence, tried.arm)).unwrap_or(best)
        });
    let best =
        winner.or_else(|| tried.iter().filter(enough).min_by(|left, right| left.mix.ratio.total_cmp(&right.mix.ratio)));
    let reason = best.map_or_else(
        || format!("no arm was timed in {FEWEST_LAUNCHES} paired launches without regressing"),
        |best| {
            format!(
                "takes {:.1} % less time per pass on the weighted mix (95 % interval {:.1} % to {:.1} %, {} paired launches)",
                (1.0 - best.mix.ratio) * 100.0,
                (1.0 - best.mix.high) * 100.0,
                (1.0 - best.mix.low) * 100.0,
                best.mix.count
            )
        },
    );
    let reason = match (winner, best) {
        (None, Some(best)) => format!("{} {reason}", best.arm.name),
        _ => reason,
    };
    let trials = rows(context, evidence, plan, &tried);
    notes.extend(noise(context, evidence, &deciding));
    notes.extend(mismatches(&trials));
    notes.extend(crowding(&trials));
    if !evidence.voided().is_empty() {
        let voided = evidence.voided().len() as u32;
        let blocks = plural(voided, "block of the trial was", "blocks of the trial were");
        notes.push(format!("{voided} {blocks} voided because clocks differed"));
    }
    let uneven = evidence
        .ended_blocks(Phase::Trial)
        .into_iter()
        .filter(|block| !evidence.voided().contains_key(block) && evidence.throttle_difference(*block).is_some())
        .count() as u32;
    if uneven > 0 {
        let blocks = plural(uneven, "block", "blocks");
        notes.push(format!("{uneven} {blocks} of the trial counted although clocks differed between its launches"));
    }
    Some(Judged {
        winner: winner.map(|winner| winner.arm.id.clone()),
        profiles: winner.map_or_else(Vec::new, |winner| {
            let able: Vec<&Tried<'_>> = tried.iter().filter(may_win).collect();
            profiles(evidence, &deciding, &able, gain, &winner.arm.id)
        }),
        vetoed: tried
            .iter()
            .filter_map(|tried| {
                Some(Veto {
                    arm: tried.arm.id.clone(),
                    name: tried.arm.name.clone(),
                    env: space::variables(tried.arm),
                    reason: tried.veto.clone()?,
                })
            })
            .collect(),
        trials,
        notes,
        reason,
        untried: false,
        // Settled is an arm that was timed often enough and lies on one side, regresses, or cannot run.
        open: arms.iter().filter(|arm| allowed.contains(arm) && !quarantined(evidence).contains(*arm)).any(|arm| {
            tried.iter().find(|tried| tried.arm.id == *arm).is_none_or(|tried| {
                let straddles = tried.mix.low < gain && tried.mix.high > gain;
                may_win(&tried) && (tried.mix.count < FEWEST_LAUNCHES || straddles)
            })
        }),
    })
}

fn weigh<'a>(context: &SearchContext, evidence: &Evidence, plan: &'a TrialPlan, arm: &'a Arm) -> Option<Tried<'a>> {
    let limit = 1.0 + context.settings.max_regression;
    let mix =
        stats::log_ratio_estimate(&evidence.trial_log_ratios(&arm.id, &context.default, &plan.cases), CONFIDENCE)?;
    let passes: Vec<(&PassCase, RatioEstimate)> = plan
        .cases
        .iter()
        .filter_map(|case| {
            let logs = evidence.pass_log_ratios(&arm.id, &context.default, case.key());
            Some((case, stats::log_ratio_estimate(&logs, CONFIDENCE)?))
        })
        .collect();
    let veto = passes
        .iter()
        .filter(|(case, estimate)| estimate.ratio > limit && (case.captured || estimate.low > 1.0))
        .max_by(|left, right| left.1.ratio.total_cmp(&right.1.ratio))
        .map(|(case, estimate)| {
            format!(
                "in the forward pass of {} ({}) it takes {:.3} of the default's time \
                 (95 % interval {:.3} to {:.3}, {} paired launches; allowed {limit:.2})",
                tokens(case.tokens),
                case.phase.name(),
                estimate.ratio,
                estimate.low,
                estimate.high,
                estimate.count
            )
        });
    Some(Tried { arm, mix, passes, veto })
}

/// The best arm for the smallest batch (latency) and for the largest (throughput), where one is shown
/// to gain there and to be faster than the balanced winner.
fn profiles(
    evidence: &Evidence,
    deciding: &[&PassCase],
    tried: &[&Tried<'_>],
    gain: f64,
    winner: &ArmId,
) -> Vec<(String, ArmId)> {
    let ends = [
        ("latency", deciding.iter().min_by_key(|case| case.tokens)),
        ("throughput", deciding.iter().max_by_key(|case| case.tokens)),
    ];
    ends.into_iter()
        .filter_map(|(profile, case)| {
            let case = case?;
            let at = |tried: &Tried<'_>| {
                tried.passes.iter().find(|(known, _)| known.key() == case.key()).map(|(_, estimate)| *estimate)
            };
            let best = tried
                .iter()
                .filter_map(|tried| Some((at(tried)?, tried)))
                .filter(|(estimate, _)| estimate.high < gain && estimate.count >= FEWEST_LAUNCHES)
                .min_by(|left, right| left.0.ratio.total_cmp(&right.0.ratio))?;
            // The balanced winner answers for a profile too, unless another is shown to be faster there.
            let ratios = evidence.pass_log_ratios(&best.1.arm.id, winner, case.key());
            let own = stats::log_ratio_estimate(&ratios, CONFIDENCE).is_some_and(|estimate| estimate.high < 1.0);
            own.then(|| (profile.to_owned(), best.1.arm.id.clone()))
        })
        .collect()
}

fn median(values: &[&PassValue], of: impl Fn(&PassValue) -> Option<f64>) -> Option<f64> {
    let values: Vec<f64> = values.iter().filter_map(|value| of(value)).collect();
    stats::median(&values)
}

/// The default's own rows, then for each arm its passes and the weighted mix.
fn rows(context: &SearchContext, evidence: &Evidence, plan: &TrialPlan, tried: &[Tried<'_>]) -> Vec<Trial> {
    let row = |arm: &Arm, case: &PassCase, estimate: Option<&RatioEstimate>| {
        let default = evidence.passes(&context.default, case.key());
        let values = evidence.passes(&arm.id, case.key());
        let baseline_ms = median(&default, |value| Some(value.median_ms));
        let floor_ms = median(&default, |value| Some(value.floor_ms));
        let crowded = |values: &[&PassValue]| median(values, |value| value.crowded_ms);
        let predicted_gain = baseline_ms.and_then(|pass_ms| {
            let saved_us = predicted_saving_us(context, evidence, plan, arm, case)?;
            Some(saved_us / 1000.0 / pass_ms)
        });
        Trial {
            kind: "verify-pass".to_owned(),
            arm: arm.name.clone(),
            tokens: Some(case.tokens),
            phase: Some(case.phase),
            captured: case.captured,
            weight: case.weight,
            baseline_ms,
            winner_ms: estimate.and_then(|_| median(&values, |value| Some(value.median_ms))),
            ratio: estimate.map(|estimate| estimate.ratio),
            ratio_ci95: estimate.map(|estimate| [estimate.low, estimate.high]),
            launches: estimate.map_or(default.len() as u32, |estimate| estimate.count as u32),
            communication_share: baseline_ms.zip(floor_ms).map(|(pass, floor)| (pass - floor) / pass),
            floor_ms,
            crowded_ms: crowded(&default).zip(crowded(&values)).map(|(default, arm)| [default, arm]),
            predicted_gain: predicted_gain.filter(|_| estimate.is_some()),
            measured_gain: estimate.map(|estimate| 1.0 - estimate.ratio),
        }
    };
    let mut rows = Vec::new();
    if let Some(default) = context.arms.iter().find(|arm| arm.id == context.default) {
        rows.extend(plan.cases.iter().map(|case| row(default, case, None)));
    }
    for tried in tried {
        rows.extend(tried.passes.iter().map(|(case, estimate)| row(tried.arm, case, Some(estimate))));
        rows.push(Trial {
            kind: "verify-pass".to_owned(),
            arm: tried.arm.name.clone(),
            tokens: None,
            phase: None,
            captured: true,
            weight: 1.0,
            baseline_ms: None,
            winner_ms: None,
            ratio: Some(tried.mix.ratio),
            ratio_ci95: Some([tried.mix.low, tried.mix.high]),
            launches: tried.mix.count as u32,
            communication_share: None,
            floor_ms: None,
            crowded_ms: None,
            predicted_gain: None,
            measured_gain: Some(1.0 - tried.mix.ratio),
        });
    }
    rows
}

/// Microseconds that the micro-benchmark says the arm saves in this pass: its all-reduces at the sizes
/// that were measured. `None` if a size of the pass was not.
fn predicted_saving_us(
    context: &SearchContext,
    evidence: &Evidence,
    plan: &TrialPlan,
    arm: &Arm,
    case: &PassCase,
) -> Option<f64> {
    let ranks = context.points.first()?.ranks;
    let (mut saved_us, mut known, mut unknown) = (0.0, 0_u32, 0_u32);
    for step in pass_steps(&plan.shape, case) {
        let PassStep::Reduce { elements } = step else { continue };
        let captured = PointKey::usual(Collective::AllReduce, DataType::Bf16, elements * 2, ranks);
        let eager = PointKey { form: captured.form.eager(), ..captured };
        // As the pass issues it where that was measured, else as it was.
        let forms = if case.captured { [captured, eager] } else { [eager, captured] };
        let of = |id: &ArmId| forms.iter().find_map(|point| evidence.median_us(Phase::Final, id, *point));
        match of(&context.default).zip(of(&arm.id)) {
            Some((default, tuned)) => {
                saved_us += default - tuned;
                known += 1;
            }
            None => unknown += 1,
        }
    }
    // Draft passes reduce sizes of their own; a pass whose main size is unknown predicts nothing.
    (known > unknown).then_some(saved_us)
}

/// "1 token", "4 tokens".
fn tokens(count: u64) -> String {
    format!("{count} {}", plural(u32::try_from(count).unwrap_or(u32::MAX), "token", "tokens"))
}

/// How much the default's pass scatters from launch to launch.
fn noise(context: &SearchContext, evidence: &Evidence, deciding: &[&PassCase]) -> Vec<String> {
    deciding
        .iter()
        .filter_map(|case| {
            let medians: Vec<f64> =
                evidence.passes(&context.default, case.key()).iter().map(|value| value.median_ms).collect();
            let variation = stats::standard_deviation(&medians)? / stats::mean(&medians)?;
            let verdict = if variation <= QUIET { "quiet" } else { "take it as the noise floor of the trial" };
            Some(format!(
                "forward pass of {}: the default varies by {:.2} % from launch to launch over {} launches ({verdict})",
                tokens(case.tokens),
                variation * 100.0,
                medians.len()
            ))
        })
        .collect()
}

/// What products beside each collective cost, default against arm, at the largest pass.
fn crowding(trials: &[Trial]) -> Option<String> {
    let trial = trials
        .iter()
        .filter(|trial| trial.ratio.is_some() && trial.crowded_ms.is_some())
        .max_by_key(|trial| trial.tokens)?;
    let ([default, arm], baseline, tuned) = (trial.crowded_ms?, trial.baseline_ms?, trial.winner_ms?);
    Some(format!(
        "with products running beside each collective, the pass of {} takes {default:.3} ms by default \
         ({:+.1} %) and {arm:.3} ms with {} ({:+.1} %)",
        tokens(trial.tokens?),
        (default / baseline - 1.0) * 100.0,
        trial.arm,
        (arm / tuned - 1.0) * 100.0
    ))
}

/// Gains that the micro-benchmark promised and the pass did not keep, or the other way round.
fn mismatches(trials: &[Trial]) -> Vec<String> {
    trials
        .iter()
        .filter_map(|trial| {
            let (predicted, measured) = (trial.predicted_gain?, trial.measured_gain?);
            // What the interval holds is no contradiction, and needs no cause.
            let [low, high] = trial.ratio_ci95?;
            if (low..=high).contains(&(1.0 - predicted)) {
                return None;
            }
            if predicted.abs().max(measured.abs()) < COMPARABLE_GAIN {
                return None;
            }
            let cause = if trial.phase == Some(PointPhase::Prefill) && measured.abs() * MISMATCH < predicted.abs() {
                "calls are issued one by one here, so the launches themselves bound the pass"
            } else if measured * MISMATCH < predicted {
                "products and collectives share multiprocessors and memory in a pass, or clocks fell under load"
            } else if predicted * MISMATCH < measured {
                "collectives wait less for each other in a pass than back to back, or they are forked to a stream of their own"
            } else {
                return None;
            };
            Some(format!(
                "{}, {}: the micro-benchmark predicts {:+.1} % time per pass, {:+.1} % was measured; likely because {cause}",
                trial.arm,
                tokens(trial.tokens?),
                -predicted * 100.0,
                -measured * 100.0
            ))
        })
        .collect()
}
