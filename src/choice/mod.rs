//! From evidence to a verdict: adopt, keep the default, or undecided, with reasons.
//!
//! The launch is the unit. Finalists ran beside the default on fresh launches in deployed form; per
//! pair of launches there is one log ratio of the objective and one per point; trimmed means and
//! Yuen's interval judge them (`stats`). An arm is adopted if the upper end of its objective's
//! interval lies below 1 - min_gain, unless the estimate at any point or guard point exceeds
//! 1 + max_regression: intervals do not soften a veto, they only say which points were not shown
//! safe.

mod mixing;
mod table;
mod trial;
mod update;

use std::collections::BTreeMap;

use crate::engine::Engine;
use crate::evidence::{Evidence, Objective};
use crate::file_kind::FileKind;
use crate::quarantine::quarantined;
use crate::record::{
    Answer, AnswerKind, Arm, ArmId, BatchObjective, Choice, Contribution, Effective, FORMAT, Flag, GateRecord,
    Manifest, Memory, Objective as ObjectiveRecord, Origin, OutcomeKind, Phase, Point, PointKey, PointPhase,
    PointVerdict, RepairRecord, SearchSummary, Statistics, Thresholds, VerdictKind, Veto,
};
use crate::search::{CONFIDENCE, SearchContext, outdoes, point_log_ratios, shown_regressions};
use crate::shared_memory::{LL_BYTES, LL128_BYTES, SIMPLE_BYTES};
use crate::space;
use crate::stats::{self, RatioEstimate};
use crate::units::group_thousands;
use crate::wording::plural;

pub use mixing::mixes_unsafely;
pub use update::{JudgedUpdate, judge_update, ratio_at};

/// Fewer paired launches than this decide nothing.
const FEWEST_LAUNCHES: usize = 4;
/// Cells of the full grid per arm and point.
const GRID_LAUNCHES: u32 = 12;
/// Most vetoed arms that are listed.
const MOST_VETOES: usize = 64;

/// What the campaign adds to the evidence.
#[derive(Debug, Clone, PartialEq)]
pub struct CampaignFacts {
    /// "complete", "budget" or "interrupt".
    pub stopped_by: String,
    /// Seconds on the run's clock.
    pub wall_s: f64,
    /// Findings of the backend.
    pub notes: Vec<String>,
}

/// One finalist's figures.
struct Candidate<'a> {
    arm: &'a Arm,
    objective: RatioEstimate,
    points: Vec<(PointKey, RatioEstimate)>,
    veto: Option<String>,
    unsafe_points: Vec<PointKey>,
}

/// Judges a run.
pub fn judge(manifest: &Manifest, context: &SearchContext, evidence: &Evidence, facts: &CampaignFacts) -> Choice {
    let settings = &manifest.settings;
    let finalists = evidence.finalists().map(|(arms, _, _)| arms.to_vec()).unwrap_or_default();
    let candidates: Vec<Candidate<'_>> = finalists
        .iter()
        .filter_map(|id| context.arms.iter().find(|arm| arm.id == *id))
        .filter_map(|arm| candidate(manifest, context, evidence, arm))
        .collect();
    let adoptable = |candidate: &&Candidate<'_>| {
        candidate.objective.count >= FEWEST_LAUNCHES
            && candidate.objective.high < 1.0 - settings.min_gain
            && candidate.veto.is_none()
            && (!settings.strict || candidate.unsafe_points.is_empty())
            && !evidence.dropped().iter().any(|(arm, _)| *arm == candidate.arm.id)
    };
    let micro_winner = candidates
        .iter()
        .filter(adoptable)
        .min_by(|left, right| left.objective.ratio.total_cmp(&right.objective.ratio))
        .map(|best| simplest_tie(context, evidence, best, candidates.iter().filter(adoptable)));
    let allowed: Vec<&ArmId> = candidates.iter().filter(adoptable).map(|candidate| &candidate.arm.id).collect();
    let judged = trial::judge(context, evidence, &allowed);
    let adoptable_arm = |arm: &ArmId| candidates.iter().filter(adoptable).find(|candidate| candidate.arm.id == *arm);
    // What wins in the benchmark must win in the pass, where it was tried.
    let balanced = match &judged {
        None => micro_winner,
        Some(judged) if judged.untried => micro_winner,
        Some(judged) => judged.winner.as_ref().and_then(adoptable_arm),
    };
    // Who asked for a profile gets its answer where it has one of its own.
    let wanted = settings.profile.name();
    let own = judged.as_ref().and_then(|judged| judged.profiles.iter().find(|(profile, _)| profile == wanted));
    let winner = own.and_then(|(_, arm)| adoptable_arm(arm)).or(balanced);
    let best = winner
        .or_else(|| candidates.iter().min_by(|left, right| left.objective.ratio.total_cmp(&right.objective.ratio)));
    let (mut verdict, mut reason) =
        verdict_of(manifest, evidence, &context.default, &finalists, &candidates, winner.or(micro_winner));
    if let Some(judged) = &judged {
        (verdict, reason) = judged.verdict(verdict, reason, balanced.map(|winner| winner.arm.name.as_str()));
        if let (Some((profile, _)), Some(winner)) = (own, winner) {
            reason.push_str(&format!("; the files hold {}, which is faster for {profile}", winner.arm.name));
        }
    }
    let mut vetoed = judged.as_ref().map(|judged| judged.vetoed.clone()).unwrap_or_default();
    vetoed.extend(vetoes(manifest, context, evidence, &candidates));
    vetoed.truncate(MOST_VETOES);

    let env_of = |arm: Option<&Arm>| env_of(manifest, evidence, arm);
    let answer = |profile: &str, arm: &Arm| answer(manifest, evidence, profile, arm);
    let mut answers: Vec<Answer> = balanced.map(|balanced| answer("balanced", balanced.arm)).into_iter().collect();
    for (profile, arm) in judged.iter().flat_map(|judged| &judged.profiles) {
        // A profile is an answer of its own only where it disagrees with the balanced one.
        if let Some(arm) = context.arms.iter().find(|known| known.id == *arm)
            && balanced.is_none_or(|balanced| balanced.arm.id != arm.id)
        {
            answers.push(answer(profile, arm));
        }
    }
    let fell: Vec<&ArmId> = judged.iter().flat_map(|judged| &judged.vetoed).map(|veto| &veto.arm).collect();
    let plain = without_plugin(candidates.iter().filter(adoptable), &fell).map(|arm| answer("balanced", arm));
    // Beside an answer with a table, the best that needs no plugin.
    let has_table = answers.iter().any(|answer| answer.table.is_some());
    answers.extend(plain.filter(|plain| has_table && !answers.contains(plain)));
    let verdict_for = |point: &Point| point_verdict(manifest, context, evidence, best, point);
    let points: Vec<PointVerdict> = manifest.workload.points.iter().map(verdict_for).collect();
    let guard: Vec<PointVerdict> = manifest.workload.guard.iter().map(verdict_for).collect();
    // A space that one run cannot hold is counted whole.
    let arms = manifest.space_arms.unwrap_or(context.arms.len() as u32);
    let cells = arms
        .saturating_mul(context.points.len() as u32)
        .saturating_mul(GRID_LAUNCHES)
        .saturating_add(evidence_final_cells(context, evidence));
    Choice {
        format: FORMAT,
        verdict,
        reason,
        misjudged: misjudged(manifest, winner),
        simulated: manifest.labels.simulated,
        replayed: manifest.labels.replayed,
        labels: manifest.labels.words().into_iter().map(str::to_owned).collect(),
        env: env_of(winner.map(|winner| winner.arm)),
        files: winner.map(|winner| file_names(winner.arm)).unwrap_or_default(),
        required_environment: pins(manifest, false),
        winner: winner.map(|winner| winner.arm.name.clone()),
        best_finalist: best.filter(|_| winner.is_none()).map(|best| best.arm.name.clone()),
        answers,
        contributions: winner.map(|winner| contributions(context, evidence, winner.arm)).unwrap_or_default(),
        objective: objective_record(context, evidence, winner, best),
        points,
        guard,
        unmeasured: unmeasured(manifest),
        vetoed,
        quarantined: manifest.quarantined.clone(),
        gate: best.and_then(|best| gate(evidence, best.arm)),
        noise_floor: noise_floor(context, evidence, best),
        thresholds: Thresholds { min_gain: settings.min_gain, max_regression: settings.max_regression },
        statistics: Statistics {
            method: "paired launches; 20 %-trimmed mean of log ratios, Yuen's t interval".to_owned(),
            launches: best.map_or(0, |best| best.objective.count as u32),
            confidence: CONFIDENCE,
            seed: manifest.seed,
        },
        memory: winner.map_or_else(Memory::default, |winner| memory(manifest, context, evidence, winner.arm)),
        repairs: repairs(evidence),
        warnings: winner
            .into_iter()
            .flat_map(|winner| {
                let table = table::warnings(manifest, context, winner.arm);
                mixing::warning(manifest, evidence, winner.arm).into_iter().chain(table)
            })
            .collect(),
        peer_access: manifest.peer_access.clone(),
        cold_and_warm: manifest.cold_and_warm.clone(),
        fingerprint: manifest.fingerprint.combined.clone(),
        search: SearchSummary {
            arms,
            measured_cells: evidence.measured_cells(),
            full_grid_cells: cells,
            wall_s: facts.wall_s,
            launches: evidence.launches(),
            stopped_by: facts.stopped_by.clone(),
        },
        trials: judged.as_ref().map(|judged| judged.trials.clone()).unwrap_or_default(),
        notes: [notes(context, evidence, facts, best), judged.map(|judged| judged.notes).unwrap_or_default()].concat(),
    }
}

/// Why NCCL's own choice is wrong on a box that it misjudges, and what the file that sets it right was
/// measured to cost prefill: one sentence without its full stop.
fn misjudged(manifest: &Manifest, winner: Option<&Candidate<'_>>) -> Option<String> {
    let known = manifest.misjudged.as_ref()?;
    let why = &known.reason;
    let Some(winner) = winner.filter(|winner| known.arms.contains(&winner.arm.id)) else {
        return Some(format!("{why}; a graph file that says so was tried, and is not the answer"));
    };
    let is_prefill = |key: PointKey| {
        let mut points = manifest.workload.points.iter().chain(&manifest.workload.guard);
        points.any(|point| point.phase == PointPhase::Prefill && point.key() == key)
    };
    let prefill = || winner.points.iter().filter(|(point, _)| is_prefill(*point));
    let cost = match prefill().max_by(|left, right| left.1.ratio.total_cmp(&right.1.ratio)) {
        None => "what it costs prefill was not measured".to_owned(),
        Some((point, worst)) => {
            let sizes = prefill().count() as u32;
            let where_measured = format!(
                "{:.3} of the default's time at {}, the worst of {sizes} {} measured",
                worst.ratio,
                describe(*point),
                plural(sizes, "size", "sizes")
            );
            // A cost is what is shown to be one.
            if worst.low > 1.0 {
                format!("it costs prefill {:.1} % ({where_measured})", (worst.ratio - 1.0) * 100.0)
            } else {
                format!("it costs prefill nothing ({where_measured})")
            }
        }
    };
    Some(format!("{why}; a graph file sets that right, and {cost}"))
}

/// What an arm's answer sets: explicit pins, repairs, the arm's own.
fn env_of(manifest: &Manifest, evidence: &Evidence, arm: Option<&Arm>) -> BTreeMap<String, String> {
    let mut env = pins(manifest, true);
    env.extend(evidence.repairs().iter().map(|(variable, value, _)| (variable.clone(), value.clone())));
    env.extend(arm.into_iter().flat_map(|arm| arm.env.clone()));
    env
}

/// An arm as it is deployed.
fn answer(manifest: &Manifest, evidence: &Evidence, profile: &str, arm: &Arm) -> Answer {
    let table = arm.files.get(&FileKind::TunerTable);
    Answer {
        profile: profile.to_owned(),
        kind: match (arm.files.is_empty(), table) {
            (true, _) => AnswerKind::Env,
            (false, Some(_)) => AnswerKind::EnvTable,
            (false, None) => AnswerKind::EnvFile,
        },
        env: env_of(manifest, evidence, Some(arm)),
        files: file_names(arm),
        table: table.map(|sha256| FileKind::TunerTable.file_name(sha256)),
        server_args: Vec::new(),
    }
}

/// The best of adoptable arms that sets variables alone, and did not fall in the trial.
fn without_plugin<'a, 'b>(adoptable: impl Iterator<Item = &'b Candidate<'a>>, fell: &[&ArmId]) -> Option<&'a Arm>
where
    'a: 'b,
{
    adoptable
        .filter(|candidate| candidate.arm.files.is_empty() && !fell.contains(&&candidate.arm.id))
        .min_by(|left, right| left.objective.ratio.total_cmp(&right.objective.ratio))
        .map(|best| best.arm)
}

/// An arm's files by their names in the run directory.
fn file_names(arm: &Arm) -> BTreeMap<FileKind, String> {
    arm.files.iter().map(|(kind, sha256)| (*kind, kind.file_name(sha256))).collect()
}

/// What the smoke gate said of an arm.
fn gate(evidence: &Evidence, arm: &Arm) -> Option<GateRecord> {
    let passed = evidence.gate(&arm.id)?;
    Some(GateRecord {
        arm: arm.name.clone(),
        checks: passed.checks,
        ll128_checks: passed.ll128_checks,
        simulated: passed.simulated,
    })
}

fn repairs(evidence: &Evidence) -> Vec<RepairRecord> {
    let record = |(variable, value, evidence): &(String, String, String)| RepairRecord {
        variable: variable.clone(),
        value: value.clone(),
        evidence: evidence.clone(),
    };
    evidence.repairs().iter().map(record).collect()
}

/// Variables that hold in every arm: those the user pinned, or all others.
fn pins(manifest: &Manifest, explicit: bool) -> BTreeMap<String, String> {
    let wanted = manifest.pins.iter().filter(|pin| (pin.origin == Origin::Pin) == explicit);
    wanted.map(|pin| (pin.variable.clone(), pin.value.clone())).collect()
}

/// What each variable adds: the winner against the arm that lacks it alone, both from the search,
/// where the whole grid was measured side by side.
fn contributions(context: &SearchContext, evidence: &Evidence, winner: &Arm) -> Vec<Contribution> {
    let ratio = |arm: &Arm| {
        if arm.id == context.default {
            return Some(1.0);
        }
        let logs = evidence.objective_log_ratios(Phase::Search, &arm.id, &context.default, &context.objective);
        stats::mean(&logs).map(f64::exp)
    };
    let Some(ratio_with) = ratio(winner) else { return Vec::new() };
    let all = space::variables(winner);
    let contribution = |variable: &String| {
        let mut without = all.clone();
        without.remove(variable);
        let arm = context.arms.iter().find(|arm| space::variables(arm) == without)?;
        Some(Contribution { variable: variable.clone(), ratio_with, ratio_without: ratio(arm)? })
    };
    all.keys().filter_map(contribution).collect()
}

/// A message as a person would say it.
fn describe(point: PointKey) -> String {
    format!("{} of {} bytes", point.collective, group_thousands(point.bytes))
}

fn candidate<'a>(
    manifest: &Manifest,
    context: &SearchContext,
    evidence: &Evidence,
    arm: &'a Arm,
) -> Option<Candidate<'a>> {
    let limit = 1.0 + context.settings.max_regression;
    let ratios = evidence.objective_log_ratios(Phase::Final, &arm.id, &context.default, &context.objective);
    let objective = stats::log_ratio_estimate(&ratios, CONFIDENCE)?;
    let points: Vec<(PointKey, RatioEstimate)> = context
        .points
        .iter()
        .filter_map(|point| Some((*point, point_estimate(context, evidence, &arm.id, *point)?)))
        .collect();
    let worst = points.iter().max_by(|left, right| left.1.ratio.total_cmp(&right.1.ratio));
    let veto = worst.filter(|(_, estimate)| estimate.ratio > limit).map(|(point, estimate)| {
        format!(
            "{} at {} of the default's time, {:.1} % more than the {:.1} % allowed regression permits \
             (95 % interval {:.3} to {:.3}, {} paired launches)",
            describe(*point),
            format_args!("{:.3}", estimate.ratio),
            (estimate.ratio / limit - 1.0) * 100.0,
            context.settings.max_regression * 100.0,
            estimate.low,
            estimate.high,
            estimate.count,
        )
    });
    let veto = veto
        .or_else(|| memory_veto(manifest, context, evidence, arm))
        .or_else(|| unread_file_veto(context, evidence, arm))
        .or_else(|| mixing::veto(manifest, evidence, arm))
        .or_else(|| table::veto(manifest, context, evidence, arm));
    let unsafe_points = points.iter().filter(|(_, estimate)| estimate.high > limit).map(|(point, _)| *point).collect();
    Some(Candidate { arm, objective, points, veto, unsafe_points })
}

fn point_estimate(context: &SearchContext, evidence: &Evidence, arm: &ArmId, point: PointKey) -> Option<RatioEstimate> {
    stats::log_ratio_estimate(&point_log_ratios(evidence, Phase::Final, arm, &context.default, point), CONFIDENCE)
}

/// Among arms that cannot be told from the best: first those that none of them outdoes on the guard set,
/// then the one with the fewest channels, least memory and fewest variables.
fn simplest_tie<'a, 'b>(
    context: &SearchContext,
    evidence: &Evidence,
    best: &'b Candidate<'a>,
    adoptable: impl Iterator<Item = &'b Candidate<'a>>,
) -> &'b Candidate<'a> {
    let tied = adoptable.filter(|candidate| {
        candidate.arm.id == best.arm.id || {
            let ratios =
                evidence.objective_log_ratios(Phase::Final, &candidate.arm.id, &best.arm.id, &context.objective);
            stats::log_ratio_estimate(&ratios, CONFIDENCE).is_some_and(|estimate| estimate.low <= 1.0)
        }
    });
    let tied: Vec<&Candidate<'_>> = tied.collect();
    let is_outdone = |candidate: &&&Candidate<'_>| {
        tied.iter().any(|other| outdoes(context, evidence, Phase::Final, &other.arm.id, &candidate.arm.id))
    };
    let left = tied.iter().filter(|candidate| !is_outdone(candidate));
    left.copied().min_by_key(|candidate| simplicity(context, evidence, candidate.arm)).unwrap_or(best)
}

/// Why the default was never measured, where that is so: then the machine is at fault, not an arm.
fn default_failure(evidence: &Evidence, default: &ArmId) -> Option<String> {
    let failure = evidence.failures_of(default).last().copied()?;
    let measured = evidence.was_measured(default);
    (!measured).then(|| format!("{}: {}", failure.kind.name(), failure.detail))
}

/// Why an arm with a file may not ship although it gained: what NCCL did not say that it read may have had
/// no part in the gain, and a file that is not read is not found by anybody later.
fn unread_file_veto(context: &SearchContext, evidence: &Evidence, arm: &Arm) -> Option<String> {
    if arm.files.is_empty() {
        return None;
    }
    let values = context.points.iter().flat_map(|point| evidence.values(Phase::Final, &arm.id, *point));
    let unread = values.filter(|value| value.flags.contains(&Flag::Ignored)).count();
    let names = arm.files.keys().map(|kind| kind.words()).collect::<Vec<_>>().join(" and ");
    (unread > 0).then(|| format!("NCCL did not say on every rank that it read the {names}"))
}

/// What ties are broken by, least first: channels of the communicator, buffer bytes, variables and files.
fn simplicity(context: &SearchContext, evidence: &Evidence, arm: &Arm) -> (u32, u64, usize, ArmId) {
    let channels = context
        .points
        .iter()
        .filter_map(|point| effective(evidence, &arm.id, *point)?.communicator_channels)
        .max()
        .unwrap_or(0);
    (channels, simple_buffer_bytes(arm), arm.env.len() + arm.files.len(), arm.id.clone())
}

/// Bytes of an arm's Simple buffers; NCCL's own size where it sets none.
fn simple_buffer_bytes(arm: &Arm) -> u64 {
    arm.env.get("NCCL_BUFFSIZE").and_then(|text| text.parse().ok()).unwrap_or(SIMPLE_BYTES)
}

fn verdict_of(
    manifest: &Manifest,
    evidence: &Evidence,
    default: &ArmId,
    finalists: &[ArmId],
    candidates: &[Candidate<'_>],
    winner: Option<&Candidate<'_>>,
) -> (VerdictKind, String) {
    let settings = &manifest.settings;
    let gain = 1.0 - settings.min_gain;
    if let Some(winner) = winner {
        let estimate = &winner.objective;
        let mut reason = format!(
            "{} takes {:.1} % less time in collectives per pass than the default (95 % interval {:.1} % to {:.1} %, {} paired launches)",
            winner.arm.name,
            (1.0 - estimate.ratio) * 100.0,
            (1.0 - estimate.high) * 100.0,
            (1.0 - estimate.low) * 100.0,
            estimate.count,
        );
        if !winner.unsafe_points.is_empty() {
            reason.push_str(&format!(
                "; {} of {} points are not shown safe",
                winner.unsafe_points.len(),
                winner.points.len()
            ));
        }
        return (VerdictKind::Adopt, reason);
    }
    if let Some(failure) = default_failure(evidence, default) {
        return (
            VerdictKind::Undecided,
            format!("the default itself could not be measured, so nothing can be compared with it: {failure}"),
        );
    }
    let Some((_, _, choice_reason)) = evidence.finalists() else {
        if quarantined(evidence).contains(default)
            && let Some(failure) = evidence.failures_of(default).last()
        {
            // Found by the smoke gate, as a rule: the search had measured it.
            let reason = format!(
                "the default itself fails, so nothing can be compared with it: {}: {}",
                failure.kind.name(),
                failure.detail
            );
            return (VerdictKind::Undecided, reason);
        }
        return (VerdictKind::Undecided, "the search did not come to its end".to_owned());
    };
    if finalists.is_empty() {
        return if evidence.ended_blocks(Phase::Search).is_empty() {
            (VerdictKind::Undecided, "nothing was measured".to_owned())
        } else {
            (VerdictKind::KeepDefault, choice_reason.to_owned())
        };
    }
    // A finalist is settled if it is vetoed, dropped, or shown to stay above the smallest gain.
    let open = finalists.iter().find_map(|id| {
        if let Some(failure) = evidence.failures_of(id).last()
            && failure.kind == OutcomeKind::NotRecorded
        {
            // The recording ends before the question does: no finding about the arm.
            let name = manifest.arms.iter().find(|arm| arm.id == *id).map_or(id.0.as_str(), |arm| arm.name.as_str());
            return Some(format!("{name} cannot be judged: {}", failure.detail));
        }
        if evidence.dropped().iter().any(|(arm, _)| arm == id) {
            return None;
        }
        match candidates.iter().find(|candidate| candidate.arm.id == *id) {
            Some(candidate) if candidate.objective.count < FEWEST_LAUNCHES => {
                Some(format!("{} has only {} paired launches", candidate.arm.name, candidate.objective.count))
            }
            Some(candidate) if candidate.veto.is_some() || candidate.objective.low > gain => None,
            Some(candidate) if candidate.objective.high < gain => Some(format!(
                "{} gains, but {} points are not shown safe and --strict wants them all",
                candidate.arm.name,
                candidate.unsafe_points.len()
            )),
            Some(candidate) => Some(format!(
                "{} stands at {:.3} of the default (95 % interval {:.3} to {:.3}), on both sides of the smallest gain {:.3}",
                candidate.arm.name, candidate.objective.ratio, candidate.objective.low, candidate.objective.high, gain
            )),
            None => Some("a finalist was never measured beside the default".to_owned()),
        }
    });
    if let Some(reason) = open {
        return (VerdictKind::Undecided, reason);
    }
    let vetoed = candidates.iter().filter(|candidate| candidate.veto.is_some()).count();
    let failed = finalists
        .iter()
        .filter(|id| evidence.dropped().iter().any(|(arm, _)| arm == *id) && !evidence.failures_of(id).is_empty())
        .filter(|id| !candidates.iter().any(|candidate| candidate.arm.id == **id && candidate.veto.is_some()))
        .count();
    let mut why = Vec::new();
    if vetoed > 0 {
        why.push(format!("{vetoed} of {} {} vetoed", finalists.len(), plural(vetoed as u32, "is", "are")));
    }
    if failed > 0 {
        why.push(format!("{failed} of {} failed", finalists.len()));
    }
    if vetoed + failed < finalists.len() {
        why.push("the others do not gain enough".to_owned());
    }
    let reason = if vetoed + failed > 0 {
        format!("no finalist may ship: {}", why.join(", "))
    } else {
        format!("no finalist gains {:.1} % or more", settings.min_gain * 100.0)
    };
    (VerdictKind::KeepDefault, reason)
}

fn vetoes(
    manifest: &Manifest,
    context: &SearchContext,
    evidence: &Evidence,
    candidates: &[Candidate<'_>],
) -> Vec<Veto> {
    let veto = |arm: &Arm, reason: String| Veto {
        arm: arm.id.clone(),
        name: arm.name.clone(),
        env: space::variables(arm),
        reason,
    };
    let mut vetoes: Vec<Veto> =
        candidates.iter().filter_map(|candidate| Some(veto(candidate.arm, candidate.veto.clone()?))).collect();
    for (standing, point, ratio, low) in shown_regressions(context, evidence) {
        let Some(arm) = context.arms.iter().find(|arm| arm.id == standing.arm) else { continue };
        if vetoes.iter().any(|known| known.arm == arm.id) || candidates.iter().any(|known| known.arm.id == arm.id) {
            continue;
        }
        let change = (standing.objective_log.exp() - 1.0) * 100.0;
        vetoes.push(veto(
            arm,
            format!(
                "in the search {} took {ratio:.2} times as long as with the default (lower bound {low:.2}; \
                 allowed {:.2}), with {change:+.1} % on the objective",
                describe(point),
                1.0 + manifest.settings.max_regression
            ),
        ));
    }
    for arm in &context.arms {
        let failures = evidence.benchmark_failures_of(&arm.id);
        if let Some(failure) = failures.last()
            && !vetoes.iter().any(|known| known.arm == arm.id)
        {
            vetoes.push(veto(arm, format!("{}: {}", failure.kind.name(), failure.detail)));
        }
    }
    // Named arms first: people look for the recipe they know.
    let named: Vec<&str> = manifest.space.arm.iter().map(|arm| arm.name.as_str()).collect();
    vetoes.sort_by_key(|veto| (!named.contains(&veto.name.as_str()), veto.name.clone()));
    vetoes
}

fn objective_record(
    context: &SearchContext,
    evidence: &Evidence,
    winner: Option<&Candidate<'_>>,
    best: Option<&Candidate<'_>>,
) -> ObjectiveRecord {
    let phase = if best.is_some() { Phase::Final } else { Phase::Search };
    let of = |arm: &ArmId, batch: &crate::evidence::Batch| {
        Objective::batch_us(batch, |point| evidence.median_us(phase, arm, point))
    };
    let batches: Vec<BatchObjective> = context
        .objective
        .batches()
        .iter()
        .map(|batch| BatchObjective {
            batch: batch.batch,
            weight: batch.weight,
            baseline_us: of(&context.default, batch),
            winner_us: winner.and_then(|winner| of(&winner.arm.id, batch)),
        })
        .collect();
    let mean = |value: &dyn Fn(&BatchObjective) -> Option<f64>| {
        let weighted: Option<Vec<(f64, f64)>> =
            batches.iter().map(|batch| Some((value(batch)?, batch.weight))).collect();
        stats::weighted_geometric_mean(&weighted?)
    };
    ObjectiveRecord {
        unit: "us_per_pass".to_owned(),
        weights: batches.iter().map(|batch| (batch.batch.to_string(), batch.weight)).collect(),
        baseline: mean(&|batch| batch.baseline_us),
        winner: mean(&|batch| batch.winner_us),
        ratio: best.map(|best| best.objective.ratio),
        ratio_ci95: best.map(|best| [best.objective.low, best.objective.high]),
        batches,
    }
}

fn point_verdict(
    manifest: &Manifest,
    context: &SearchContext,
    evidence: &Evidence,
    best: Option<&Candidate<'_>>,
    point: &Point,
) -> PointVerdict {
    let key = point.key();
    let estimate = best.and_then(|best| best.points.iter().find(|(known, _)| *known == key)).map(|(_, found)| found);
    let phase = if best.is_some() { Phase::Final } else { Phase::Search };
    PointVerdict {
        collective: point.collective,
        dtype: point.dtype,
        bytes: point.bytes,
        batch: point.batch,
        calls_per_pass: point.calls_per_pass,
        weight: point.weight,
        phase: point.phase,
        measured: point.measured,
        baseline_us: evidence.median_us(phase, &context.default, key),
        winner_us: best.and_then(|best| evidence.median_us(Phase::Final, &best.arm.id, key)),
        ratio: estimate.map(|estimate| estimate.ratio),
        ratio_ci95: estimate.map(|estimate| [estimate.low, estimate.high]),
        margin: estimate.map(RatioEstimate::smallest_visible_regression),
        safe: estimate.map(|estimate| estimate.high <= 1.0 + manifest.settings.max_regression),
        effective: best.and_then(|best| effective(evidence, &best.arm.id, key)),
        effective_default: effective(evidence, &context.default, key),
        form: point.form,
    }
}

/// What ran, where all launches agree; the first launch's otherwise.
fn effective(evidence: &Evidence, arm: &ArmId, point: PointKey) -> Option<Effective> {
    evidence.all_values(arm, point).last().map(|value| value.effective.clone())
}

fn unmeasured(manifest: &Manifest) -> Vec<String> {
    let mut list: Vec<String> = manifest
        .workload
        .points
        .iter()
        .chain(&manifest.workload.guard)
        .filter(|point| !point.measured)
        .map(|point| {
            format!("{} {} of {} bytes ({})", point.collective, point.dtype, group_thousands(point.bytes), point.origin)
        })
        .collect();
    list.dedup();
    list
}

/// Half-width of default against default, on the objective, at the launch count of the verdict.
fn noise_floor(context: &SearchContext, evidence: &Evidence, best: Option<&Candidate<'_>>) -> Option<f64> {
    let phase = if best.is_some() { Phase::Final } else { Phase::Search };
    let mut launches: BTreeMap<u32, BTreeMap<PointKey, f64>> = BTreeMap::new();
    for point in &context.points {
        for value in evidence.values(phase, &context.default, *point) {
            launches.entry(value.launch).or_default().insert(*point, value.median_us);
        }
    }
    let objectives: Vec<f64> = launches
        .values()
        .filter_map(|medians| {
            let batches: Option<Vec<(f64, f64)>> = context
                .objective
                .batches()
                .iter()
                .map(|batch| Some((Objective::batch_us(batch, |point| medians.get(&point).copied())?, batch.weight)))
                .collect();
            stats::weighted_geometric_mean(&batches?)
        })
        .collect();
    let count = best.map_or(objectives.len(), |best| best.objective.count);
    stats::noise_floor(&objectives, count, CONFIDENCE)
}

/// What an arm takes in memory beside the default, for all communicators that the engine opens.
///
/// Device memory is what the final saw free before and after a communicator was joined. Host memory
/// shows in a process only as far as it is shared memory that was touched; where nothing shows and ranks
/// meet in host memory, it is estimated from the channels NCCL reported: per channel one set of buffers
/// for the ring and two for the tree.
fn memory(manifest: &Manifest, context: &SearchContext, evidence: &Evidence, arm: &Arm) -> Memory {
    const MIB: f64 = (1 << 20) as f64;
    let of = |id: &ArmId| context.points.iter().find_map(|point| effective(evidence, id, *point));
    let (winner, default) = (of(&arm.id), of(&context.default));
    let channels = |effective: &Option<Effective>| effective.as_ref()?.communicator_channels;
    let set = |simple: u64| (simple + LL_BYTES + LL128_BYTES) as f64 * 3.0 / MIB;
    let estimated = channels(&winner).zip(channels(&default)).map(|(channels, before)| {
        f64::from(channels) * set(simple_buffer_bytes(arm)) - f64::from(before) * set(SIMPLE_BYTES)
    });
    let host = winner
        .as_ref()
        .and_then(|effective| effective.transport.as_deref())
        .is_some_and(|transport| transport.contains("SHM"));
    let measured = evidence.memory(&arm.id).zip(evidence.memory(&context.default));
    let communicators = Engine::parse(&manifest.workload.engine).map_or(1, Engine::communicators);
    let ranks = f64::from(context.points.first().map_or(1, |point| point.ranks));
    let device = match (measured, host) {
        (Some((with, without)), _) => Some((with.0 - without.0) / MIB),
        (None, true) => estimated.map(|_| 0.0),
        (None, false) => estimated,
    };
    let shared = measured.filter(|(with, without)| with.1 > 0.0 || without.1 > 0.0);
    let host_mib = match (shared, host) {
        (Some((with, without)), _) => Some((with.1 - without.1) / MIB),
        (None, true) => estimated.map(|mib| mib * ranks),
        (None, false) => estimated.map(|_| 0.0),
    };
    let all = |mib: f64| mib * f64::from(communicators);
    let cache_bytes_per_token: u64 = manifest
        .trial
        .iter()
        .flat_map(|trial| &trial.shape.layers)
        .fold(0, |sum, run| sum.saturating_add(u64::from(run.count).saturating_mul(run.cache_bytes_per_token)));
    Memory {
        device_mib_per_rank: device.map(all),
        host_mib: host_mib.map(all),
        device_measured: measured.is_some(),
        host_measured: shared.is_some(),
        communicators: Some(communicators),
        cache_tokens_lost: device
            .map(all)
            .filter(|mib| *mib > 0.0 && cache_bytes_per_token > 0)
            .map(|mib| (mib * MIB) as u64 / cache_bytes_per_token),
    }
}

/// Why an arm takes more memory than it may.
fn memory_veto(manifest: &Manifest, context: &SearchContext, evidence: &Evidence, arm: &Arm) -> Option<String> {
    let most = context.settings.max_extra_memory_mib?;
    let taken = memory(manifest, context, evidence, arm);
    [(taken.device_mib_per_rank, "device memory per rank"), (taken.host_mib, "host memory")].into_iter().find_map(
        |(mib, what)| {
            let mib = mib.filter(|mib| *mib > most)?;
            Some(format!("it takes {mib:.0} MiB more {what} than the default; {most:.0} MiB are allowed"))
        },
    )
}

fn evidence_final_cells(context: &SearchContext, evidence: &Evidence) -> u32 {
    context
        .arms
        .iter()
        .flat_map(|arm| context.points.iter().map(move |point| (arm, point)))
        .map(|(arm, point)| evidence.values(Phase::Final, &arm.id, *point).len() as u32)
        .sum()
}

fn notes(
    context: &SearchContext,
    evidence: &Evidence,
    facts: &CampaignFacts,
    best: Option<&Candidate<'_>>,
) -> Vec<String> {
    let mut notes = facts.notes.clone();
    if evidence.segments() > 0 {
        notes.push(format!(
            "the run was resumed {} {}; no pair spans a resume",
            evidence.segments(),
            plural(evidence.segments(), "time", "times")
        ));
    }
    let phase = if best.is_some() { Phase::Final } else { Phase::Search };
    for point in &context.points {
        let medians: Vec<f64> =
            evidence.values(phase, &context.default, *point).iter().map(|value| value.median_us).collect();
        if let Some(drift) = stats::drift(&medians)
            && drift.beyond_noise
        {
            notes.push(format!(
                "the default drifted at {}: its last third took {:.3} of the first third's time; \
                 pairs are side by side, so the verdict is not touched by it",
                describe(*point),
                drift.ratio
            ));
        }
    }
    if let Some(best) = best {
        if gate(evidence, best.arm).is_some_and(|gate| gate.simulated) {
            notes.push(format!("{}: the smoke gate is passed in simulation without checking anything", best.arm.name));
        }
        for value in context.points.iter().flat_map(|point| evidence.values(Phase::Final, &best.arm.id, *point)) {
            for flag in &value.flags {
                let note = match flag {
                    Flag::Ignored => {
                        format!("{}: NCCL left no sign of having read every variable", best.arm.name)
                    }
                    Flag::Substituted => {
                        format!("{}: NCCL ran another algorithm or protocol than was asked for", best.arm.name)
                    }
                };
                if !notes.contains(&note) {
                    notes.push(note);
                }
            }
        }
    }
    notes
}
