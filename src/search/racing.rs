//! Racing: few launches for what is lost, more for what may win.
//!
//! 1. A star: the default, and every arm that no smaller arm is part of. One launch each tells what each
//!    variable does alone.
//! 2. Moves: arms that were not measured and that the variables' own effects, added up, put near the best,
//!    those next to a survivor first. How near is near follows from the noise and from how well such sums were
//!    right. What is predicted far away is left out and not said to be worse.
//! 3. Repeats of the best and of whoever may be better than it looks, until the interval is tight, only one is
//!    left, or the search has had its share. Where the best are known and noise alone keeps them apart, a few of
//!    the arms that were left out are looked at beside them: variables may do together what none does alone.
//!
//! A race that knows an earlier run begins with that run's best instead of a star, and with a few arms that tell
//! whether it is still a guide; where it is none, the star follows. Earlier figures order, and judge nobody.
//!
//! An arm is dropped where an interval of the pooled spread excludes it. Each look at the growing sample
//! spends a part of the error that all looks may have together (Lan & DeMets, Biometrika 70, 1983, with
//! their spending function of the Pocock kind). The final is that of the exhaustive search: same launches,
//! same rules; only fewer arms reach it.

use std::collections::{BTreeMap, BTreeSet};

use super::exhaustive::{finals, planned_launches, time_for_another_search_block, variables};
use super::layout::{Fitted, Layout};
use super::{CUT_SHORT, NORMAL_95, SearchContext, Strategy, Want, living, outdoes};
use crate::evidence::Evidence;
use crate::file_kind::FileKind;
use crate::record::{Arm, ArmId, DropReason, EarlierArm, Phase};
use crate::stats;
use crate::wording::plural;

/// Share of the full grid (every arm in twelve launches, and the final) that a run aims at: 15 % less what a final
/// that turns out longer than expected adds.
const MOST_SHARE: f64 = 0.148;
/// Launches of every arm in that grid.
const GRID_LAUNCHES: f64 = 12.0;
/// Launches beside the star that the search of a small space has in any case: its final alone would use up
/// the share.
const LEAST_REPEATS: usize = 12;
/// Degrees of freedom below which a spread plans nothing and drops nobody.
const LEAST_DEGREES: usize = 5;
/// Error that all looks at one arm may have together.
const ERROR: f64 = 0.05;
/// Log of the objective above the best within which a predicted arm is near, beside what noise leaves open: additive
/// effects are off by that much, as far as is known.
const NEAR: f64 = 0.06;
/// The least of that, once arms of several settings tell how far off they really are.
const LEAST_NEAR: f64 = 0.02;
/// So many times the usual misfit.
const MISFITS: f64 = 2.0;
/// Arms of several settings that tell it.
const LEAST_MISFITS: usize = 6;
/// And beyond the allowed regression, at any point.
const NEAR_POINT: f64 = 0.10;
/// Most moves of a block: later ones know more.
const MOST_MOVES: usize = 8;
/// Moves of a block wherever they lead, while the best are known and cannot be told apart: settings may do together
/// what none of them does alone.
const FAR_MOVES: usize = 3;
/// Launches after which one of the best is known well enough to look elsewhere.
const KNOWN: usize = 4;
/// Arms that are repeated in a block.
const FRONT: usize = 3;
/// How strongly effects are drawn to nothing, in launches.
const RIDGE: f64 = 0.1;
/// Passes of their fit.
const PASSES: usize = 60;
/// Arms that were best in an earlier run, and are looked at first.
const EARLIER_BEST: usize = 6;
/// Arms of the star that are measured beside them, to see whether the earlier run still holds.
const EARLIER_CHECKS: usize = 6;
/// What an arm of the earlier run weighs in the fit of effects, in launches.
const EARLIER_WEIGHT: f64 = 0.5;
/// Of the arms that both runs measured, one in so many may have moved by more than [`NEAR`] (a slow launch does that
/// to one in ten); with more of them the earlier run is no guide.
const ONE_IN_MOVED: usize = 3;

/// See the module's first lines.
#[derive(Debug, Clone, Copy, Default)]
pub struct Racing;

impl Strategy for Racing {
    fn next(&self, context: &SearchContext, evidence: &Evidence) -> Want {
        match evidence.finalists() {
            None => search(context, evidence),
            Some((finalists, launches, _)) => finals(context, evidence, finalists, launches),
        }
    }
}

/// Arms that no smaller arm but the default is part of; and tuner tables, which are made because they are worth a look.
fn star(context: &SearchContext) -> Vec<ArmId> {
    let within = |part: &Arm, whole: &Arm| {
        part.env.len() + part.files.len() < whole.env.len() + whole.files.len()
            && part.env.iter().all(|(name, value)| whole.env.get(name) == Some(value))
            && part.files.iter().all(|(kind, sha256)| whole.files.get(kind) == Some(sha256))
    };
    let is_default = |arm: &Arm| arm.id == context.default;
    // Few arms are minimal, and any that is not contains one that is: no need to compare all with all.
    let mut by_size: Vec<&Arm> = context.arms.iter().filter(|arm| !is_default(arm)).collect();
    by_size.sort_by_key(|arm| arm.env.len() + arm.files.len());
    let mut star: Vec<&Arm> = Vec::new();
    for arm in by_size {
        if arm.files.contains_key(&FileKind::TunerTable) || !star.iter().any(|part| within(part, arm)) {
            star.push(arm);
        }
    }
    star.into_iter().map(|arm| arm.id.clone()).collect()
}

/// The first block: the star, or what an earlier run says is worth a look, with a part of the star that tells whether
/// it may say so, and with what of the star it never saw.
fn opening(context: &SearchContext, star: &[ArmId], living: &BTreeSet<ArmId>) -> Vec<ArmId> {
    if context.earlier.is_empty() {
        return star.to_vec();
    }
    let limit = (1.0 + context.settings.max_regression).ln();
    let worst = |earlier: &EarlierArm| earlier.point_logs.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let mut known: Vec<&EarlierArm> = context.earlier.iter().filter(|one| living.contains(&one.arm.id)).collect();
    known.sort_by(|left, right| {
        (worst(left) > limit)
            .cmp(&(worst(right) > limit))
            .then(left.objective_log.total_cmp(&right.objective_log))
            .then_with(|| left.arm.id.cmp(&right.arm.id))
    });
    let mut opening: Vec<ArmId> = known.iter().take(EARLIER_BEST).map(|one| one.arm.id.clone()).collect();
    // From the best to the worst in even steps: what became of all is told by more than the best.
    let of_star: Vec<&ArmId> = known.iter().map(|one| &one.arm.id).filter(|arm| star.contains(arm)).collect();
    let checks = EARLIER_CHECKS.min(of_star.len());
    opening.extend((0..checks).map(|index| of_star[index * of_star.len() / checks].clone()));
    opening.extend(star.iter().filter(|arm| !context.earlier.iter().any(|one| one.arm.id == **arm)).cloned());
    opening.sort_unstable();
    opening.dedup();
    opening
}

/// Most arm-launches of the search: what the share leaves beside a final of so many launches, and what a small
/// space needs in any case.
fn allowance(context: &SearchContext, star: usize, launches: f64) -> usize {
    let arms = context.arms.len();
    let least = (context.settings.search_blocks as usize * arms).min(star + 1 + LEAST_REPEATS);
    (share_left(arms, 1, launches).max(0.0) as usize).max(least)
}

/// The same before anything is known of the noise.
pub(super) fn expected_launches(context: &SearchContext) -> usize {
    let launches = context.settings.final_launches.map_or(GRID_LAUNCHES, f64::from);
    allowance(context, star(context).len(), launches)
}

/// How the race stands; a pure function of evidence.
struct Race<'a> {
    context: &'a SearchContext,
    layout: Layout,
    default: Fitted,
    /// Measured, living, not dropped, the default not among them; best first.
    open: Vec<ArmId>,
    /// Launches of the final as planned by now.
    planned: u32,
    /// Why so many.
    why: &'static str,
    /// Arm-launches that the search may have in all.
    allowance: usize,
    /// What an earlier run saw, while that is a guide.
    earlier: BTreeMap<&'a ArmId, &'a EarlierArm>,
}

impl<'a> Race<'a> {
    fn of(context: &'a SearchContext, evidence: &Evidence, living: &BTreeSet<ArmId>, star: usize) -> Option<Self> {
        let layout = Layout::of(context, evidence);
        let default = layout.arms.get(&context.default)?.clone();
        let gone: BTreeSet<&ArmId> = evidence.outraced().iter().map(|(arm, _, _)| arm).collect();
        let mut open: Vec<ArmId> = layout
            .arms
            .keys()
            .filter(|arm| **arm != context.default && living.contains(*arm) && !gone.contains(arm))
            .cloned()
            .collect();
        let limit = (1.0 + context.settings.max_regression).ln();
        let worst = |arm: &ArmId| worst(&layout.arms[arm], &default).1;
        open.sort_by(|left, right| {
            // What may not ship as it looks comes after what may.
            (worst(left) > limit)
                .cmp(&(worst(right) > limit))
                .then(layout.arms[left].objective.total_cmp(&layout.arms[right].objective))
                .then(left.cmp(right))
        });
        let known = |spread: Option<f64>| spread.filter(|_| layout.degrees >= LEAST_DEGREES);
        let best = open.first().map(|arm| layout.arms[arm].objective - default.objective);
        // Where the best arm gains a lot, few launches show that it does not harm.
        let point_log = |point: usize| {
            let arm = &layout.arms[open.first()?];
            Some(arm.points[point] - default.points[point] + layout.point_error(point, arm, &default))
        };
        // A spread of few degrees may be too small by chance; its own standard error is added.
        let above = 1.0 + 1.0 / (2.0 * layout.degrees.max(1) as f64).sqrt();
        let (planned, why) = match context.settings.final_launches {
            Some(launches) => (launches, "as asked"),
            None => planned_launches(
                context,
                known(layout.paired_objective_spread().map(|spread| spread * above)),
                &|point| known(layout.paired_point_spread(point)),
                &point_log,
                best,
            ),
        };
        // Nothing is known of the noise at first: the usual final.
        let expected = if layout.degrees >= LEAST_DEGREES { f64::from(planned) } else { GRID_LAUNCHES };
        let allowance = allowance(context, star, expected);
        let mut race = Self { context, layout, default, open, planned, why, allowance, earlier: BTreeMap::new() };
        race.earlier = race.guide();
        Some(race)
    }

    /// What the earlier run saw of each arm, if it is a guide: of the arms that both measured, few moved.
    fn guide(&self) -> BTreeMap<&'a ArmId, &'a EarlierArm> {
        let both = |earlier: &&EarlierArm| self.layout.arms.contains_key(&earlier.arm.id);
        let moved = |earlier: &&EarlierArm| {
            let (objective_log, _) = self.fitted(&earlier.arm.id).beside(&self.default);
            (objective_log - earlier.objective_log).abs() > NEAR
        };
        let of_both = self.context.earlier.iter().filter(both);
        if of_both.clone().filter(moved).count() * ONE_IN_MOVED > of_both.count() {
            return BTreeMap::new();
        }
        self.context.earlier.iter().map(|earlier| (&earlier.arm.id, earlier)).collect()
    }

    fn fitted(&self, arm: &ArmId) -> &Fitted {
        self.layout.arms.get(arm).unwrap_or(&self.default)
    }

    /// The best that may ship as it looks: an open arm, or the default.
    fn best(&self) -> &Fitted {
        let limit = (1.0 + self.context.settings.max_regression).ln();
        self.open
            .iter()
            .map(|arm| self.fitted(arm))
            .find(|arm| worst(arm, &self.default).1 <= limit && arm.objective < self.default.objective)
            .unwrap_or(&self.default)
    }

    /// Standard errors that an interval of this look reaches to either side.
    fn reach(&self) -> f64 {
        if self.layout.degrees < LEAST_DEGREES {
            return f64::INFINITY;
        }
        let spent = |launches: usize| {
            let share = (launches as f64 / self.allowance.max(1) as f64).min(1.0);
            ERROR * ((std::f64::consts::E - 1.0) * share).ln_1p()
        };
        let now = self.layout.launches();
        let before = now - self.layout.block_sizes.last().copied().unwrap_or(0);
        // A look that came when everything was spent still has a little.
        let error = (spent(now) - spent(before)).max(ERROR / 100.0);
        stats::student_quantile(1.0 - error / 2.0, self.layout.degrees as f64).unwrap_or(f64::INFINITY)
    }

    /// The first open arm that an interval excludes, with why.
    fn lost(&self) -> Option<(ArmId, DropReason, String)> {
        let reach = self.reach();
        let settings = &self.context.settings;
        let (gain, limit) = ((1.0 - settings.min_gain).ln(), (1.0 + settings.max_regression).ln());
        let best = self.best();
        let blocks = |arm: &Fitted| {
            let count = arm.blocks as u32;
            format!("{count} {}", plural(count, "launch", "launches"))
        };
        self.open.iter().find_map(|id| {
            let arm = self.fitted(id);
            let (point, worst) = worst(arm, &self.default);
            let worst_low = worst - reach * self.layout.point_error(point, arm, &self.default);
            if worst_low > limit {
                let key = self.context.points[point];
                let detail = format!(
                    "{} of {} bytes takes {:.3} of the default's time, at least {:.3}, over {}",
                    key.collective,
                    key.bytes,
                    worst.exp(),
                    worst_low.exp(),
                    blocks(arm)
                );
                return Some((id.clone(), DropReason::Regressing, detail));
            }
            let ratio = arm.objective - self.default.objective;
            let low = ratio - reach * self.layout.objective_error(arm, &self.default);
            if low > gain {
                let detail = format!(
                    "the objective is {:.3} of the default's, at least {:.3}, over {}",
                    ratio.exp(),
                    low.exp(),
                    blocks(arm)
                );
                return Some((id.clone(), DropReason::Hopeless, detail));
            }
            let behind = arm.objective - best.objective;
            let low = behind - reach * self.layout.objective_error(arm, best);
            (low > 0.0).then(|| {
                let detail = format!(
                    "the objective is {:.3} of the best arm's, at least {:.3}, over {}",
                    behind.exp(),
                    low.exp(),
                    blocks(arm)
                );
                (id.clone(), DropReason::Outraced, detail)
            })
        })
    }

    /// Living arms that were not measured: those predicted near the best, next to survivors first, and
    /// the others that promise no harm. The most promising first.
    fn moves(&self, living: &BTreeSet<ArmId>) -> (Vec<ArmId>, Vec<ArmId>) {
        let effects = Effects::of(self);
        let near = effects.misfit(self).map_or(NEAR, |misfit| (MISFITS * misfit).clamp(LEAST_NEAR, NEAR));
        let limit = (1.0 + self.context.settings.max_regression).ln();
        let best = self.best().objective - self.default.objective;
        let survivors: Vec<&Arm> = self
            .context
            .arms
            .iter()
            .filter(|arm| arm.id == self.context.default || self.open.contains(&arm.id))
            .collect();
        let mut moves: Vec<(bool, usize, f64, &ArmId)> = self
            .context
            .arms
            .iter()
            .filter(|arm| living.contains(&arm.id) && !self.layout.arms.contains_key(&arm.id))
            .filter_map(|arm| {
                let predicted = match self.earlier.get(&arm.id) {
                    Some(earlier) => row_of(earlier.objective_log, &earlier.point_logs),
                    None => effects.predict(arm),
                };
                let worst = predicted[1..].iter().copied().fold(f64::NEG_INFINITY, f64::max);
                let slack = effects.error(arm) * self.layout.launch_spread();
                if worst > limit + NEAR_POINT + slack {
                    return None;
                }
                let is_far = predicted[0] > best + near + slack;
                let steps = || survivors.iter().map(|survivor| distance(survivor, arm)).min().unwrap_or(usize::MAX);
                Some((is_far, if is_far { 0 } else { steps() }, predicted[0], &arm.id))
            })
            .collect();
        moves.sort_by(|left, right| {
            (left.0, left.1).cmp(&(right.0, right.1)).then(left.2.total_cmp(&right.2)).then_with(|| left.3.cmp(right.3))
        });
        let (far, near): (Vec<_>, Vec<_>) = moves.into_iter().partition(|(is_far, ..)| *is_far);
        let ids = |moves: Vec<(bool, usize, f64, &ArmId)>| moves.into_iter().map(|(.., arm)| arm.clone()).collect();
        (ids(near), ids(far))
    }

    /// Open arms to repeat: the best, then those that may be better than it looks by the most. What is known
    /// least is looked at again first, and whoever stays behind gets no more launches.
    fn front(&self) -> Vec<ArmId> {
        let hopeful = |arm: &ArmId| {
            let fitted = self.fitted(arm);
            fitted.objective - self.layout.objective_error(fitted, fitted) / std::f64::consts::SQRT_2
        };
        let mut front: Vec<&ArmId> = self.open.iter().skip(1).collect();
        front.sort_by(|left, right| hopeful(left).total_cmp(&hopeful(right)).then_with(|| left.cmp(right)));
        self.open.iter().take(1).chain(front).take(FRONT).cloned().collect()
    }

    /// Whether more repeats would settle nothing that matters.
    fn is_settled(&self) -> bool {
        let Some(first) = self.open.first() else { return true };
        let reach = self.reach();
        let best = self.fitted(first);
        let tight = self.context.settings.min_gain / 4.0;
        self.open[1..].iter().all(|arm| reach * self.layout.objective_error(self.fitted(arm), best) <= tight)
            && reach * self.layout.objective_error(best, &self.default) <= tight
    }
}

/// Arm-launches that a share of the full grid leaves for the search beside a final.
fn share_left(arms: usize, finalists: u32, launches: f64) -> f64 {
    let last = f64::from(finalists + 1) * launches;
    MOST_SHARE * (GRID_LAUNCHES * arms as f64 + last) - last
}

/// The point at which an arm is worst against another, and the log ratio there.
fn worst(arm: &Fitted, default: &Fitted) -> (usize, f64) {
    arm.points
        .iter()
        .zip(&default.points)
        .map(|(arm, default)| arm - default)
        .enumerate()
        .max_by(|left, right| left.1.total_cmp(&right.1))
        .unwrap_or((0, 0.0))
}

/// Variables and files in which two arms differ.
fn distance(one: &Arm, other: &Arm) -> usize {
    let names: BTreeSet<&String> = one.env.keys().chain(other.env.keys()).collect();
    let kinds: BTreeSet<_> = one.files.keys().chain(other.files.keys()).collect();
    names.iter().filter(|name| one.env.get(**name) != other.env.get(**name)).count()
        + kinds.iter().filter(|kind| one.files.get(**kind) != other.files.get(**kind)).count()
}

/// What each setting adds to the logs of the objective and of every point, fitted to the measured arms.
struct Effects {
    /// Of each setting, on the objective and on each point.
    logs: BTreeMap<(String, String), Vec<f64>>,
    /// Launches of arms that have the setting.
    launches: BTreeMap<(String, String), f64>,
}

/// A measured arm: its settings, launches, and what the effects leave of its logs.
type Row = (Vec<(String, String)>, f64, Vec<f64>);

/// The objective's log ratio, then those of the points.
fn row_of(objective_log: f64, point_logs: &[f64]) -> Vec<f64> {
    [&[objective_log], point_logs].concat()
}

/// An arm's settings, as the keys of effects.
fn settings_of(arm: &Arm) -> impl Iterator<Item = (String, String)> + '_ {
    let files = arm.files.iter().map(|(kind, sha256)| (kind.variable().to_owned(), sha256.clone()));
    arm.env.iter().map(|(name, value)| (name.clone(), value.clone())).chain(files)
}

impl Effects {
    fn of(race: &Race<'_>) -> Self {
        let (context, layout) = (race.context, &race.layout);
        let columns = 1 + context.points.len();
        let measured = context.arms.iter().filter_map(|arm| {
            let fitted = layout.arms.get(&arm.id).filter(|_| arm.id != context.default)?;
            let (objective_log, point_logs) = fitted.beside(&race.default);
            Some((settings_of(arm).collect(), fitted.blocks as f64, row_of(objective_log, &point_logs)))
        });
        let unmeasured = race.earlier.values().filter(|earlier| !layout.arms.contains_key(&earlier.arm.id));
        let seen_before = unmeasured.map(|earlier| {
            (settings_of(&earlier.arm).collect(), EARLIER_WEIGHT, row_of(earlier.objective_log, &earlier.point_logs))
        });
        let mut rows: Vec<Row> = measured.chain(seen_before).collect();
        let mut effects: BTreeMap<(String, String), Vec<f64>> = BTreeMap::new();
        let mut launches: BTreeMap<(String, String), f64> = BTreeMap::new();
        for (settings, weight, _) in &rows {
            for setting in settings {
                *launches.entry(setting.clone()).or_insert(0.0) += weight;
                effects.entry(setting.clone()).or_insert_with(|| vec![0.0; columns]);
            }
        }
        // Coordinate descent: each effect takes what the others leave of the arms that have it.
        for _ in 0..PASSES {
            for (setting, effect) in &mut effects {
                let has = |row: &&mut Row| row.0.contains(setting);
                let (mut weight, mut sums) = (RIDGE, vec![0.0; columns]);
                for (_, blocks, residual) in rows.iter_mut().filter(has) {
                    weight += *blocks;
                    for (sum, (residual, effect)) in sums.iter_mut().zip(residual.iter().zip(effect.iter())) {
                        *sum += *blocks * (residual + effect);
                    }
                }
                let new: Vec<f64> = sums.into_iter().map(|sum| sum / weight).collect();
                for (_, _, residual) in rows.iter_mut().filter(has) {
                    for (residual, (new, old)) in residual.iter_mut().zip(new.iter().zip(effect.iter())) {
                        *residual -= new - old;
                    }
                }
                *effect = new;
            }
        }
        Self { logs: effects, launches }
    }

    /// Standard error of a prediction, in standard deviations of a launch: each setting is as well known as by the
    /// launches that had it.
    fn error(&self, arm: &Arm) -> f64 {
        let variance = |setting| self.launches.get(&setting).map_or(0.0, |launches| 1.0 / launches);
        settings_of(arm).map(variance).sum::<f64>().sqrt()
    }

    /// How far measured arms of several settings are from what the settings add up to, noise included.
    fn misfit(&self, race: &Race<'_>) -> Option<f64> {
        let compound = race.context.arms.iter().filter(|arm| arm.env.len() + arm.files.len() > 1);
        let squares: Vec<f64> = compound
            .filter_map(|arm| {
                let fitted = race.layout.arms.get(&arm.id)?;
                let (log, _) = fitted.beside(&race.default);
                Some((log - self.predict(arm)[0]).powi(2))
            })
            .collect();
        stats::mean(&squares).filter(|_| squares.len() >= LEAST_MISFITS).map(f64::sqrt)
    }

    /// The logs that an arm would have against the default; a setting that nobody measured adds nothing.
    fn predict(&self, arm: &Arm) -> Vec<f64> {
        let columns = self.logs.values().next().map_or(1, Vec::len);
        let mut sums = vec![0.0; columns];
        for setting in settings_of(arm) {
            for (sum, effect) in sums.iter_mut().zip(self.logs.get(&setting).into_iter().flatten()) {
                *sum += effect;
            }
        }
        sums
    }
}

fn search(context: &SearchContext, evidence: &Evidence) -> Want {
    let living = living(context, evidence);
    if !living.contains(&context.default) {
        return Want::Done { budget: false };
    }
    let star = star(context);
    let block = |mut arms: Vec<ArmId>| {
        arms.push(context.default.clone());
        Want::Block { phase: Phase::Search, arms }
    };
    let Some(race) = Race::of(context, evidence, &living, star.len()) else {
        let opening = opening(context, &star, &living);
        return block(opening.into_iter().filter(|arm| living.contains(arm)).collect());
    };
    if let Some((arm, reason, detail)) = race.lost() {
        return Want::Drop { arm, reason, detail };
    }
    if !time_for_another_search_block(context, evidence) {
        return choose(&race, evidence, &living, CUT_SHORT);
    }
    // What a resume or a failure left of the first block, or all of the star where the earlier run turned out to be no
    // guide.
    let first = if race.earlier.is_empty() { star } else { opening(context, &star, &living) };
    let missing: Vec<ArmId> =
        first.iter().filter(|arm| living.contains(*arm) && !race.layout.arms.contains_key(*arm)).cloned().collect();
    if !missing.is_empty() {
        return block(missing);
    }
    if race.layout.arms.len() == 1 && race.default.blocks < context.settings.search_blocks as usize {
        // Alone, the default still needs its repeats.
        return block(Vec::new());
    }
    // Room for the default is always kept.
    let left = race.allowance.saturating_sub(race.layout.launches() + 1);
    let (near, far) = race.moves(&living);
    if left == 0 || near.is_empty() && race.is_settled() {
        return choose(&race, evidence, &living, "");
    }
    let mut arms: Vec<ArmId> = near.into_iter().take(MOST_MOVES.min(left)).collect();
    let front = race.front();
    if arms.is_empty() && front.iter().all(|arm| race.fitted(arm).blocks >= KNOWN) {
        arms.extend(far.into_iter().take(FAR_MOVES.min(left)));
    }
    arms.extend(front.into_iter().take(left - arms.len()));
    if arms.is_empty() { choose(&race, evidence, &living, "") } else { block(arms) }
}

fn choose(race: &Race<'_>, evidence: &Evidence, living: &BTreeSet<ArmId>, prefix: &str) -> Want {
    let context = race.context;
    let settings = &context.settings;
    let (gain, limit) = ((1.0 - settings.min_gain).ln(), (1.0 + settings.max_regression).ln());
    let ratio = |arm: &ArmId| race.fitted(arm).objective - race.default.objective;
    let can_gain = |arm: &&ArmId| {
        let width = NORMAL_95 * race.layout.objective_error(race.fitted(arm), &race.default);
        ratio(arm) < 0.0 && ratio(arm) - width < gain
    };
    let may_ship = |arm: &&ArmId| {
        let (point, worst) = worst(race.fitted(arm), &race.default);
        worst - NORMAL_95 * race.layout.point_error(point, race.fitted(arm), &race.default) <= limit
    };
    let ranked: Vec<&ArmId> = race.open.iter().filter(can_gain).filter(may_ship).collect();
    // What another arm does as well, and is much faster where the objective does not look, comes after it.
    let is_outdone = |arm: &&ArmId| {
        ranked.iter().any(|other| {
            let width = NORMAL_95 * race.layout.objective_error(race.fitted(arm), race.fitted(other));
            ratio(other) - ratio(arm) <= width && outdoes(context, evidence, Phase::Search, other, arm)
        })
    };
    let (outdone, better): (Vec<&ArmId>, Vec<&ArmId>) = ranked.iter().copied().partition(is_outdone);
    // As many as the share pays for: each costs as much as a dozen launches of the search.
    let used = race.layout.launches() as f64;
    let fits = |finalists: &u32| used <= share_left(context.arms.len(), *finalists, f64::from(race.planned));
    let wanted = (2..=settings.finalists).take_while(fits).last().unwrap_or(1) as usize;
    let mut finalists: Vec<ArmId> = better.iter().chain(&outdone).take(wanted).map(|arm| (*arm).clone()).collect();
    if wanted > 1
        && let Some(best) = finalists.first().cloned()
    {
        // The simplest arm that cannot be told from the best deserves its chance.
        let is_tied = |arm: &&&ArmId| {
            let width = NORMAL_95 * race.layout.objective_error(race.fitted(arm), race.fitted(&best));
            ratio(arm) - ratio(&best) <= width && worst(race.fitted(arm), &race.default).1 <= limit
        };
        let simplest = better.iter().filter(is_tied).min_by_key(|arm| (variables(context, arm), (**arm).clone()));
        if let Some(simplest) = simplest
            && !finalists.contains(simplest)
        {
            finalists.truncate(wanted - 1);
            finalists.push((*simplest).clone());
        }
    }
    if let Some(gate) = super::gate::next(context, evidence, finalists.iter()) {
        return gate;
    }
    let blocks = race.layout.block_sizes.len() as u32;
    let blocks_text = format!("{blocks} {}", plural(blocks, "block", "blocks"));
    let unmeasured = living.iter().filter(|arm| !race.layout.arms.contains_key(*arm)).count();
    let left_out = if unmeasured == 0 {
        String::new()
    } else {
        format!("; {unmeasured} {} not measured", plural(unmeasured as u32, "arm was", "arms were"))
    };
    let reason = if context.arms.len() == 1 {
        format!("{prefix}there is no arm beside the default")
    } else if finalists.is_empty() {
        format!("{prefix}no arm looked faster than the default by the smallest gain in {blocks_text}{left_out}")
    } else {
        let (raced, launches, why) = (race.layout.arms.len() - 1, race.planned, race.why);
        format!("{prefix}best of {raced} raced arms over {blocks_text}{left_out}; {launches} paired launches {why}")
    };
    Want::Finalists { arms: finalists, launches: race.planned, reason }
}
