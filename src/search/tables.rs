//! Tuner tables from what the search saw: for each size what ran there under the arm that did best, where it did
//! better than leaving the choice to NCCL.
//!
//! A table can change algorithm, protocol and channels of a message and nothing else. So it stands beside the
//! variables of an arm of the search, its *base*, and takes its rows from arms that differ from the base in nothing
//! but what a table can express. The figures of a table that is proposed here are a forecast: it is measured like any
//! other arm, and what is adopted is what was measured.

use std::collections::BTreeMap;

use super::{SearchContext, Standing, Strategy, Want, pooled_spread, standings};
use crate::evidence::Evidence;
use crate::file_kind::FileKind;
use crate::quarantine::quarantined;
use crate::record::{Arm, ArmId, Effective, Phase, PointKey};
use crate::space;
use crate::stats;
use crate::tuner_table::{BYTES_MAX, Decision, Row, collective_index, decision_of, is_ll128};

/// Variables whose doing a table can express.
const EXPRESSED: [&str; 9] = [
    "NCCL_ALGO",
    "NCCL_PROTO",
    "NCCL_MIN_NCHANNELS",
    "NCCL_MAX_NCHANNELS",
    "NCCL_MIN_NRINGS",
    "NCCL_MAX_NRINGS",
    "NCCL_MIN_CTAS",
    "NCCL_MAX_CTAS",
    "NCCL_THREAD_THRESHOLDS",
];
/// Variables that take something from NCCL's choice, so that a table beside them could not choose it.
const EXCLUDING: [&str; 2] = ["NCCL_ALGO", "NCCL_PROTO"];
/// Standard errors by which a row must be better: the best of some dozens of arms is looked at.
const ERRORS: f64 = 3.0;
/// The least that a row is worth, as a share of the time.
const LEAST: f64 = 0.01;
/// By which share a table must be expected to do better than any arm that needs no plugin.
const WORTH: f64 = 0.01;
/// How far a row reaches from a size that was measured, as a factor, where no other is nearer. Farther away nobody
/// knows what NCCL would have done, nor what would have been better.
const REACH: u64 = 2;
/// Arms beside the default that a table is thought of beside: the best ones.
const BASES: usize = 6;
/// Most tables of a run.
const MOST: usize = 2;

/// Algorithm, protocol and channels: a decision that can be sorted.
type Kernel = (usize, usize, u32);
/// By decision: mean log ratio to the base, and how uncertain it is.
type Estimates = BTreeMap<Kernel, (f64, f64)>;

/// A table that is worth measuring.
#[derive(Debug, Clone, PartialEq)]
pub struct ProposedTable {
    /// The arm whose variables and files stand beside it.
    pub base: ArmId,
    /// Its rows.
    pub rows: Vec<Row>,
    /// Log ratio of the objective to the default's that the search lets expect.
    pub expected_log: f64,
}

/// Holds a strategy where it leaves its search, so that tables can be made of what it saw; and has the variables
/// beside a table that became a finalist judged without the plugin, too.
pub struct WithTables<'a> {
    /// Who searches.
    pub inner: &'a dyn Strategy,
    /// Whether tables were made, or are not wanted.
    pub made: bool,
}

impl Strategy for WithTables<'_> {
    fn next(&self, context: &SearchContext, evidence: &Evidence) -> Want {
        let want = self.inner.next(context, evidence);
        // Whoever drops an arm before there are finalists goes on searching.
        let searches = matches!(want, Want::Block { phase: Phase::Search, .. } | Want::Drop { .. } | Want::Done { .. });
        if !self.made && !searches && evidence.finalists().is_none() {
            return Want::Pause;
        }
        match want {
            Want::Finalists { arms, launches, reason } => {
                Want::Finalists { arms: with_bases(context, arms), launches, reason }
            }
            other => other,
        }
    }
}

/// The finalists, and the variables beside each table among them as an arm of their own: a server that does not find
/// the plugin runs with those.
fn with_bases(context: &SearchContext, mut finalists: Vec<ArmId>) -> Vec<ArmId> {
    for id in finalists.clone() {
        let base = context.arms.iter().find(|arm| arm.id == id).and_then(space::without_table);
        if let Some(base) = base
            && base.id != context.default
            && !finalists.contains(&base.id)
            && context.arms.iter().any(|arm| arm.id == base.id)
        {
            finalists.push(base.id);
        }
    }
    finalists
}

/// Tables worth measuring, best first; none where no table is expected to do better than variables alone.
pub fn propose(context: &SearchContext, evidence: &Evidence) -> Vec<ProposedTable> {
    let out = quarantined(evidence);
    let has_table = |arm: &Arm| arm.files.contains_key(&FileKind::TunerTable);
    let arms: Vec<&Arm> = context.arms.iter().filter(|arm| !out.contains(&arm.id) && !has_table(arm)).collect();
    let limit = (1.0 + context.settings.max_regression).ln();
    let standings = standings(context, evidence);
    let is_calm = |standing: &&Standing| standing.worst.is_none_or(|(_, log, _)| log <= limit);
    let alone = standings.iter().filter(is_calm).map(|standing| standing.objective_log).fold(0.0, f64::min);
    let find = |id: &ArmId| arms.iter().copied().find(|arm| arm.id == *id);
    let excludes = |arm: &&Arm| arm.env.keys().any(|name| EXCLUDING.contains(&name.as_str()));
    let best = standings.iter().filter(is_calm).filter_map(|standing| find(&standing.arm));
    let bases = find(&context.default).into_iter().chain(best.filter(|arm| !excludes(arm)).take(BASES));
    let mut proposed: Vec<ProposedTable> = bases
        .filter_map(|base| Bench { context, evidence, arms: &arms, base }.propose())
        .filter(|table| {
            let gain = (1.0 - context.settings.min_gain).ln();
            table.expected_log < gain && table.expected_log < alone + (1.0 - WORTH).ln()
        })
        .collect();
    // Of tables that are expected to do the same, the one with fewer variables beside it comes first.
    let variables = |table: &ProposedTable| {
        arms.iter().find(|arm| arm.id == table.base).map_or(usize::MAX, |arm| arm.env.len() + arm.files.len())
    };
    proposed.sort_by(|left, right| {
        left.expected_log.total_cmp(&right.expected_log).then_with(|| variables(left).cmp(&variables(right)))
    });
    let Some(best) = proposed.first().cloned() else { return Vec::new() };
    // The best, and beside it the simplest: a table without variables changes nothing where it says nothing.
    let simplest =
        proposed.iter().min_by_key(|table| variables(table)).filter(|table| table.base != best.base).cloned();
    std::iter::once(best).chain(simplest).take(MOST).collect()
}

/// What is known of one size of a collective.
struct Known {
    /// By decision: mean log ratio to the base at each of the points of this size.
    better: BTreeMap<Kernel, f64>,
}

/// One base, and what the search knows beside it.
struct Bench<'a> {
    context: &'a SearchContext,
    evidence: &'a Evidence,
    arms: &'a [&'a Arm],
    base: &'a Arm,
}

impl Bench<'_> {
    fn propose(&self) -> Option<ProposedTable> {
        let mut rows = Vec::new();
        let mut gains: BTreeMap<PointKey, f64> = BTreeMap::new();
        for ((collective, ranks), sizes) in self.sorts() {
            let known: Vec<Known> = sizes.values().map(|points| self.known(points)).collect();
            let decisions = decide(&known);
            for (decided, (known, points)) in decisions.iter().zip(known.iter().zip(sizes.values())) {
                let Some(decided) = decided else { continue };
                let gain = known.better.get(decided).copied().unwrap_or(0.0);
                gains.extend(points.iter().map(|point| (*point, gain)));
            }
            let measured: Vec<u64> = sizes.keys().copied().collect();
            rows.extend(ranges(&measured, &decisions).into_iter().map(|(min_bytes, max_bytes, decided)| Row {
                collective,
                min_bytes,
                max_bytes,
                algorithm: decided.0,
                protocol: decided.1,
                channels: decided.2,
                nodes: Some(1),
                ranks: Some(u64::from(ranks)),
            }));
        }
        if rows.is_empty() {
            return None;
        }
        let default = &self.context.default;
        let expected_log = self.context.objective.log_ratio(|point| {
            let default_us = self.evidence.median_us(Phase::Search, default, point)?;
            let of_base = stats::mean(&self.logs(&self.base.id, default, point)).unwrap_or(0.0);
            Some((default_us * (of_base + gains.get(&point).copied().unwrap_or(0.0)).exp(), default_us))
        })?;
        Some(ProposedTable { base: self.base.id.clone(), rows, expected_log })
    }

    /// The points that a table can tell apart: by collective and ranks, then by size. Types and forms of one size are
    /// one to it.
    fn sorts(&self) -> BTreeMap<(usize, u32), BTreeMap<u64, Vec<PointKey>>> {
        let mut sorts: BTreeMap<(usize, u32), BTreeMap<u64, Vec<PointKey>>> = BTreeMap::new();
        for point in &self.context.points {
            if let Some(collective) = collective_index(point.collective) {
                sorts.entry((collective, point.ranks)).or_default().entry(point.bytes).or_default().push(*point);
            }
        }
        sorts
    }

    /// What is shown to be better than the base at a size, over all points of it.
    fn known(&self, points: &[PointKey]) -> Known {
        let at_points: Vec<Estimates> = points.iter().map(|point| self.at(*point)).collect();
        let mut better = BTreeMap::new();
        let Some((first, others)) = at_points.split_first() else { return Known { better } };
        for (decision, estimate) in first {
            let everywhere: Option<Vec<(f64, f64)>> =
                std::iter::once(Some(*estimate)).chain(others.iter().map(|at| at.get(decision).copied())).collect();
            let Some(everywhere) = everywhere else { continue };
            let shown = everywhere.iter().all(|(mean, _)| *mean < 0.0)
                && everywhere.iter().any(|(mean, width)| mean + width < 0.0 && *mean < (1.0 - LEAST).ln());
            let mean = stats::mean(&everywhere.iter().map(|(mean, _)| *mean).collect::<Vec<f64>>());
            if let (true, Some(mean)) = (shown, mean) {
                better.insert(*decision, mean);
            }
        }
        Known { better }
    }

    /// By decision, what arms took with it at a point, as mean log ratio to the base and its uncertainty.
    fn at(&self, point: PointKey) -> Estimates {
        let own = self.ran(&self.base.id, point);
        let trusts_ll128 = self.ran(&self.context.default, point).is_some_and(is_ll128);
        let most_channels = self
            .context
            .points
            .iter()
            .filter_map(|point| self.effective(&self.base.id, *point)?.communicator_channels)
            .max();
        let mut blocks: BTreeMap<Kernel, BTreeMap<u32, Vec<f64>>> = BTreeMap::new();
        for arm in self.arms.iter().filter(|arm| self.is_alike(arm)) {
            let Some(ran) = self.ran(&arm.id, point).filter(|ran| Some(*ran) != own) else { continue };
            // NCCL cannot be given more channels than the communicator has, nor LL128 where it does not take it itself.
            if most_channels.is_some_and(|most| ran.channels > most) || is_ll128(ran) && !trusts_ll128 {
                continue;
            }
            let of_arm = blocks.entry((ran.algorithm, ran.protocol, ran.channels)).or_default();
            for (block, arm_us, base_us) in self.evidence.pairs(Phase::Search, &arm.id, &self.base.id, point) {
                of_arm.entry(block).or_default().push((arm_us / base_us).ln());
            }
        }
        let Some(spread) = pooled_spread(self.context, self.evidence, Some(point)) else { return BTreeMap::new() };
        blocks
            .into_iter()
            .filter_map(|(decision, blocks)| {
                // Arms of one block are held against the same launch of the base, so a block counts once.
                let means: Vec<f64> = blocks.values().filter_map(|logs| stats::mean(logs)).collect();
                let mean = stats::mean(&means)?;
                Some((decision, (mean, ERRORS * spread / (means.len() as f64).sqrt())))
            })
            .collect()
    }

    /// Whether an arm differs from the base in nothing but what a table can express.
    fn is_alike(&self, arm: &Arm) -> bool {
        let rest = |arm: &Arm| -> BTreeMap<String, String> {
            let others = arm.env.iter().filter(|(name, _)| !EXPRESSED.contains(&name.as_str()));
            others.map(|(name, value)| (name.clone(), value.clone())).collect()
        };
        arm.files == self.base.files && rest(arm) == rest(self.base)
    }

    fn effective(&self, arm: &ArmId, point: PointKey) -> Option<&Effective> {
        self.evidence.values(Phase::Search, arm, point).last().map(|value| &value.effective)
    }

    fn ran(&self, arm: &ArmId, point: PointKey) -> Option<Decision> {
        decision_of(self.effective(arm, point)?)
    }

    fn logs(&self, arm: &ArmId, other: &ArmId, point: PointKey) -> Vec<f64> {
        if arm == other {
            return vec![0.0];
        }
        super::point_log_ratios(self.evidence, Phase::Search, arm, other, point)
    }
}

/// What a table is to say at each size: the best, or what is said at the size before where that is as good.
fn decide(known: &[Known]) -> Vec<Option<Kernel>> {
    let mut before = None;
    known
        .iter()
        .map(|known| {
            let best = known.better.iter().min_by(|left, right| left.1.total_cmp(right.1));
            let same = before.filter(|decision| {
                let (mean, least) = (known.better.get(decision), best.map(|(_, mean)| *mean));
                mean.zip(least).is_some_and(|(mean, least)| mean - least <= LEAST)
            });
            before = same.or(best.map(|(decision, _)| *decision));
            before
        })
        .collect()
}

/// Ranges of sizes with what they are to run: each measured size reaches half way to its neighbours (as ratios go)
/// and at most by [`REACH`].
fn ranges(measured: &[u64], decisions: &[Option<Kernel>]) -> Vec<(u64, u64, Kernel)> {
    let middle = |low: u64, high: u64| (low as f64 * high as f64).sqrt() as u64;
    let mut found: Vec<(u64, u64, Kernel)> = Vec::new();
    for (index, (bytes, decided)) in measured.iter().zip(decisions).enumerate() {
        let Some(decided) = decided else { continue };
        let farthest = (bytes / REACH, bytes.saturating_mul(REACH).min(BYTES_MAX));
        let low = match index.checked_sub(1).map(|before| middle(measured[before], *bytes) + 1) {
            Some(middle) => middle.max(farthest.0),
            None => farthest.0,
        };
        let high = measured.get(index + 1).map_or(farthest.1, |next| middle(*bytes, *next).min(farthest.1));
        match found.last_mut() {
            Some((_, last, same)) if *last + 1 == low && same == decided => *last = high,
            _ => found.push((low, high, *decided)),
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    const LL: Kernel = (1, 0, 4);
    const SIMPLE: Kernel = (1, 2, 16);

    fn known(better: &[(Kernel, f64)]) -> Known {
        Known { better: better.iter().copied().collect() }
    }

    #[test]
    fn what_was_said_before_is_said_again_where_it_is_as_good() {
        let sizes = [
            known(&[(LL, -0.3)]),
            known(&[(LL, -0.195), (SIMPLE, -0.2)]),
            known(&[(LL, -0.1), (SIMPLE, -0.2)]),
            known(&[]),
            known(&[(LL, -0.1), (SIMPLE, -0.101)]),
        ];
        let expected = [Some(LL), Some(LL), Some(SIMPLE), None, Some(SIMPLE)];
        assert_eq!(decide(&sizes), expected);
    }

    #[test]
    fn rows_meet_where_sizes_are_near_and_end_where_nobody_knows() {
        let (kib, mib) = (1 << 10, 1 << 20);
        let decided = [Some(LL), Some(LL), Some(SIMPLE), None, Some(SIMPLE)];
        let found = ranges(&[kib, 2 * kib, 4 * kib, 8 * kib, mib], &decided);
        let half_way = |low: u64, high: u64| ((low * high) as f64).sqrt() as u64;
        let first = half_way(2 * kib, 4 * kib);
        assert_eq!(
            found,
            [
                // One row for neighbours that say the same, and no gap to the next.
                (kib / 2, first, LL),
                (first + 1, half_way(4 * kib, 8 * kib), SIMPLE),
                // Far from everything: twice as far as the size itself.
                (mib / 2, 2 * mib, SIMPLE),
            ]
        );
        assert_eq!(ranges(&[BYTES_MAX - 1], &[Some(LL)]), [((BYTES_MAX - 1) / 2, BYTES_MAX, LL)]);
        assert_eq!(ranges(&[4], &[None]), []);
    }
}
