//! What the events add up to: a fold, and the only thing that search, choice and report know about
//! samples.
//!
//! The launch is the unit. A cell's value is the median over its replays of the slowest rank's time;
//! pairs are formed inside a block only, never across a resume, since a block is what was measured
//! side by side.

use std::collections::BTreeMap;

use crate::record::{
    Arm, ArmId, CellMeasurement, DropReason, Effective, Event, Flag, GatePass, JournalLine, OutcomeKind, OverlapCheck,
    PassCase, PassKey, PassMeasurement, Phase, Point, PointKey, SetLine, Workload,
};
use crate::stats;

/// One arm at one point in one launch.
#[derive(Debug, Clone, PartialEq)]
pub struct LaunchValue {
    /// The block it belongs to.
    pub block: u32,
    /// The launch.
    pub launch: u32,
    /// Median over replays, microseconds per collective.
    pub median_us: f64,
    /// Mean over replays.
    pub mean_us: f64,
    /// 99th percentile over replays.
    pub p99_us: f64,
    /// What ran.
    pub effective: Effective,
    /// What was odd.
    pub flags: Vec<Flag>,
}

/// One arm's pass in one launch.
#[derive(Debug, Clone, PartialEq)]
pub struct PassValue {
    /// The block it belongs to.
    pub block: u32,
    /// The launch.
    pub launch: u32,
    /// Median over runs, milliseconds.
    pub median_ms: f64,
    /// Median over runs without collectives.
    pub floor_ms: f64,
    /// Median over runs with products beside each collective.
    pub crowded_ms: Option<f64>,
    /// Why clocks were held down on any GPU, sorted.
    pub throttle: Vec<String>,
    /// Bytes of weights the products walked through.
    pub arena_bytes: u64,
}

/// A failure that was seen.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Failure {
    /// Which arm.
    pub arm: ArmId,
    /// In which block.
    pub block: u32,
    /// How.
    pub kind: OutcomeKind,
    /// In words.
    pub detail: String,
}

/// The fold.
#[derive(Debug, Clone, Default)]
pub struct Evidence {
    phases: BTreeMap<u32, Phase>,
    /// By what compares fast first: readers ask for one cell many times.
    cells: BTreeMap<(Phase, PointKey), BTreeMap<ArmId, Vec<LaunchValue>>>,
    failures: Vec<Failure>,
    /// Failures before the last repair, which are not held against anybody.
    forgiven: usize,
    repairs: Vec<(String, String, String)>,
    /// Per arm: device bytes per rank and shared bytes, of each launch that held nothing else.
    memory: BTreeMap<ArmId, Vec<(u64, u64)>>,
    passes: BTreeMap<(ArmId, PassKey), Vec<PassValue>>,
    gates: BTreeMap<ArmId, GatePass>,
    voided: BTreeMap<u32, String>,
    trial: Option<(Vec<ArmId>, String)>,
    planned: BTreeMap<u32, Vec<ArmId>>,
    ended_blocks: Vec<u32>,
    finalists: Option<(Vec<ArmId>, u32, String)>,
    dropped: Vec<(ArmId, String)>,
    outraced: Vec<(ArmId, DropReason, String)>,
    overlaps: BTreeMap<ArmId, OverlapCheck>,
    set_lines: BTreeMap<u32, Vec<SetLine>>,
    launches: u32,
    next_launch: u32,
    measured_cells: u32,
    duration_s: f64,
    segments: u32,
}

impl Evidence {
    /// Everything in a journal.
    pub fn of(lines: &[JournalLine]) -> Self {
        let mut evidence = Self::default();
        for line in lines {
            evidence.tell(&line.event);
        }
        evidence
    }

    /// Takes in one event.
    pub fn tell(&mut self, event: &Event) {
        match event {
            Event::BlockPlanned { block, phase, launches } => {
                self.phases.insert(*block, *phase);
                for launch in launches {
                    self.next_launch = self.next_launch.max(launch.launch + 1);
                }
                let arms = launches.iter().flat_map(|launch| launch.arms.iter().cloned()).collect();
                self.planned.insert(*block, arms);
            }
            Event::CellMeasured(cell) => self.tell_cell(cell),
            Event::PassMeasured(pass) => self.tell_pass(pass),
            Event::GatePassed(gate) => {
                if self.phases.get(&gate.block) == Some(&Phase::Gate) {
                    self.gates.insert(gate.arm.clone(), gate.clone());
                }
            }
            Event::BlockVoided { block, reason } => {
                self.voided.insert(*block, reason.clone());
            }
            Event::TrialChosen { arms, reason } => self.trial = Some((arms.clone(), reason.clone())),
            Event::CellFailed { arm, block, outcome, .. } => self.failures.push(Failure {
                arm: arm.clone(),
                block: *block,
                kind: outcome.kind,
                detail: outcome.detail.clone(),
            }),
            Event::LaunchEnded { launch, duration_s, set_by_environment, .. } => {
                self.launches += 1;
                self.duration_s += duration_s;
                self.set_lines.insert(*launch, set_by_environment.clone());
            }
            Event::MemoryMeasured { arm, block, device_bytes_per_rank, shared_bytes, .. } => {
                // Launches of the search hold several communicators, the first of which loads NCCL's
                // kernels for all.
                if self.phases.get(block) == Some(&Phase::Final) {
                    self.memory.entry(arm.clone()).or_default().push((*device_bytes_per_rank, *shared_bytes));
                }
            }
            Event::RepairTried { variable, value, evidence } => {
                self.forgiven = self.failures.len();
                self.repairs.push((variable.clone(), value.clone(), evidence.clone()));
            }
            Event::OverlapChecked { arm, check } => {
                self.overlaps.insert(arm.clone(), check.clone());
            }
            Event::BlockEnded { block } => self.ended_blocks.push(*block),
            Event::FinalistsChosen { arms, launches, reason } => {
                self.finalists = Some((arms.clone(), *launches, reason.clone()));
            }
            Event::FinalistDropped { arm, detail, .. } => self.dropped.push((arm.clone(), detail.clone())),
            Event::ArmDropped { arm, reason, detail } => self.outraced.push((arm.clone(), *reason, detail.clone())),
            Event::RunResumed { segment, .. } => {
                self.segments = *segment;
            }
            Event::LaunchStarted { launch, .. } => self.next_launch = self.next_launch.max(launch + 1),
            Event::RunOpened { .. } | Event::RunInterrupted { .. } | Event::RunFinished => {}
        }
    }

    fn tell_cell(&mut self, cell: &CellMeasurement) {
        let Some(phase) = self.phases.get(&cell.block).copied() else { return };
        let (Some(median_us), Some(mean_us), Some(p99_us)) =
            (stats::median(&cell.replays_us), stats::mean(&cell.replays_us), stats::quantile(&cell.replays_us, 0.99))
        else {
            return;
        };
        let values = self.cells.entry((phase, cell.point)).or_default().entry(cell.arm.clone()).or_default();
        if values.iter().any(|value| value.block == cell.block) {
            // A block holds a cell once. The same one again, in an edited journal, is no new launch:
            // counted, it would narrow intervals.
            return;
        }
        self.measured_cells += 1;
        values.push(LaunchValue {
            block: cell.block,
            launch: cell.launch,
            median_us,
            mean_us,
            p99_us,
            effective: cell.effective.clone(),
            flags: cell.flags.clone(),
        });
    }

    fn tell_pass(&mut self, pass: &PassMeasurement) {
        if self.phases.get(&pass.block) != Some(&Phase::Trial) {
            return;
        }
        let (Some(median_ms), Some(floor_ms)) =
            (stats::median(&pass.runs_ms), stats::median(&pass.without_collectives_ms))
        else {
            return;
        };
        let mut throttle: Vec<String> = pass.states.iter().flat_map(|state| state.throttle.clone()).collect();
        throttle.sort();
        throttle.dedup();
        let values = self.passes.entry((pass.arm.clone(), pass.pass)).or_default();
        if values.iter().any(|value| value.block == pass.block) {
            // Once per block, as for cells.
            return;
        }
        self.measured_cells += 1;
        values.push(PassValue {
            block: pass.block,
            launch: pass.launch,
            median_ms,
            floor_ms,
            crowded_ms: stats::median(&pass.crowded_ms),
            throttle,
            arena_bytes: pass.arena_bytes,
        });
    }

    /// An arm's passes in blocks that count.
    pub fn passes(&self, arm: &ArmId, pass: PassKey) -> Vec<&PassValue> {
        self.passes
            .get(&(arm.clone(), pass))
            .into_iter()
            .flatten()
            .filter(|value| !self.voided.contains_key(&value.block))
            .collect()
    }

    /// Log ratios of an arm's pass to the default's, one per block that counts.
    pub fn pass_log_ratios(&self, arm: &ArmId, default: &ArmId, pass: PassKey) -> Vec<f64> {
        let baseline = self.passes(default, pass);
        self.passes(arm, pass)
            .into_iter()
            .filter_map(|value| {
                let beside = baseline.iter().find(|other| other.block == value.block)?;
                Some((value.median_ms / beside.median_ms).ln())
            })
            .collect()
    }

    /// The weighted mean over cases of the log ratio, one per block in which all were timed.
    pub fn trial_log_ratios(&self, arm: &ArmId, default: &ArmId, cases: &[PassCase]) -> Vec<f64> {
        let weighted: Vec<&PassCase> = cases.iter().filter(|case| case.weight > 0.0).collect();
        let total: f64 = weighted.iter().map(|case| case.weight).sum();
        let blocks = self.phases.iter().filter(|(_, phase)| **phase == Phase::Trial).map(|(block, _)| *block);
        blocks
            .filter_map(|block| {
                let value = |arm: &ArmId, pass: PassKey| {
                    self.passes(arm, pass).into_iter().find(|value| value.block == block).map(|value| value.median_ms)
                };
                weighted.iter().try_fold(0.0, |sum, case| {
                    let ratio = value(arm, case.key())? / value(default, case.key())?;
                    Some(sum + case.weight / total * ratio.ln())
                })
            })
            .collect()
    }

    /// Blocks of the trial in which an arm and the default were timed in every case.
    pub fn trial_blocks(&self, arm: &ArmId, default: &ArmId, cases: &[PassCase]) -> usize {
        let both = |case: &PassCase| -> Vec<u32> {
            let baseline: Vec<u32> = self.passes(default, case.key()).iter().map(|value| value.block).collect();
            self.passes(arm, case.key())
                .iter()
                .map(|value| value.block)
                .filter(|block| baseline.contains(block))
                .collect()
        };
        let mut cases = cases.iter();
        let Some(first) = cases.next() else { return 0 };
        cases
            .fold(both(first), |common, case| {
                let here = both(case);
                common.into_iter().filter(|block| here.contains(block)).collect()
            })
            .len()
    }

    /// How an arm passed the smoke gate, if it did.
    pub fn gate(&self, arm: &ArmId) -> Option<&GatePass> {
        self.gates.get(arm)
    }

    /// Arms that passed the smoke gate.
    pub fn gates_passed(&self) -> u32 {
        self.gates.len() as u32
    }

    /// What came of making an arm's captured and uncaptured collectives overlap, where that was tried.
    pub fn overlap(&self, arm: &ArmId) -> Option<&OverlapCheck> {
        self.overlaps.get(arm)
    }

    /// Blocks that count for nothing, with the reason.
    pub const fn voided(&self) -> &BTreeMap<u32, String> {
        &self.voided
    }

    /// What held clocks down in a block, where it was not the same for all its launches.
    pub fn throttle_difference(&self, block: u32) -> Option<String> {
        let mut launches: BTreeMap<u32, Vec<String>> = BTreeMap::new();
        for value in self.passes.values().flatten().filter(|value| value.block == block) {
            let reasons = launches.entry(value.launch).or_default();
            reasons.extend(value.throttle.clone());
            reasons.sort();
            reasons.dedup();
        }
        let mut states = launches.values();
        let first = states.next()?;
        let other = states.find(|state| *state != first)?;
        let name = |state: &Vec<String>| if state.is_empty() { "nothing".to_owned() } else { state.join(", ") };
        Some(format!("clocks were held down by {} in one launch and by {} in another", name(first), name(other)))
    }

    /// Arms of the trial and the reason, once chosen.
    pub fn trial(&self) -> Option<(&[ArmId], &str)> {
        self.trial.as_ref().map(|(arms, reason)| (arms.as_slice(), reason.as_str()))
    }

    /// Launch values of an arm at a point, in the order they were measured.
    pub fn values(&self, phase: Phase, arm: &ArmId, point: PointKey) -> &[LaunchValue] {
        self.cells.get(&(phase, point)).and_then(|arms| arms.get(arm)).map_or(&[], Vec::as_slice)
    }

    /// Launch values of both phases: what a table shows for an arm that never reached the final.
    pub fn all_values(&self, arm: &ArmId, point: PointKey) -> Vec<&LaunchValue> {
        [Phase::Search, Phase::Final].into_iter().flat_map(|phase| self.values(phase, arm, point)).collect()
    }

    /// (arm, default) medians of the same block, with the block.
    pub fn pairs(&self, phase: Phase, arm: &ArmId, default: &ArmId, point: PointKey) -> Vec<(u32, f64, f64)> {
        let baseline = self.values(phase, default, point);
        self.values(phase, arm, point)
            .iter()
            .filter_map(|value| {
                let beside = baseline.iter().find(|other| other.block == value.block)?;
                Some((value.block, value.median_us, beside.median_us))
            })
            .collect()
    }

    /// The objective of an arm against the default, one log ratio per block in which both were
    /// measured at every point of the objective: the weighted mean over batches of
    /// ln(sum of calls x median / the default's).
    pub fn objective_log_ratios(&self, phase: Phase, arm: &ArmId, default: &ArmId, objective: &Objective) -> Vec<f64> {
        // Looked up once: a search asks for every arm after every block.
        let cells: BTreeMap<PointKey, [&[LaunchValue]; 2]> = objective
            .batches
            .iter()
            .flat_map(|batch| batch.calls.iter().map(|(point, _)| *point))
            .map(|point| (point, [arm, default].map(|arm| self.values(phase, arm, point))))
            .collect();
        let mut blocks: Vec<u32> =
            cells.values().next().into_iter().flat_map(|[arm, _]| arm.iter()).map(|value| value.block).collect();
        blocks.sort_unstable();
        blocks
            .into_iter()
            .filter_map(|block| {
                let value = |values: &[LaunchValue]| {
                    values.iter().find(|value| value.block == block).map(|value| value.median_us)
                };
                objective.log_ratio(|point| {
                    let [arm, default] = cells.get(&point)?;
                    Some((value(arm)?, value(default)?))
                })
            })
            .collect()
    }

    /// Whether an arm was measured anywhere.
    pub fn was_measured(&self, arm: &ArmId) -> bool {
        self.cells.values().any(|arms| arms.contains_key(arm))
    }

    /// Failures of an arm.
    pub fn failures_of(&self, arm: &ArmId) -> Vec<&Failure> {
        self.failures.iter().filter(|failure| failure.arm == *arm).collect()
    }

    /// Failures of an arm while the micro-benchmark ran: a forward pass that cannot be timed says
    /// nothing against an arm's collectives.
    pub fn benchmark_failures_of(&self, arm: &ArmId) -> Vec<&Failure> {
        let in_trial = |failure: &&Failure| self.phases.get(&failure.block) == Some(&Phase::Trial);
        self.failures.iter().filter(|failure| failure.arm == *arm && !in_trial(failure)).collect()
    }

    /// Failures that count: those after the last repair.
    pub fn failures_that_count(&self) -> &[Failure] {
        &self.failures[self.forgiven.min(self.failures.len())..]
    }

    /// Repairs in force: variable, value, and the line that told.
    pub fn repairs(&self) -> &[(String, String, String)] {
        &self.repairs
    }

    /// What an arm's communicator takes, over its launches in the final: median device bytes per rank
    /// and median shared bytes.
    pub fn memory(&self, arm: &ArmId) -> Option<(f64, f64)> {
        let seen = self.memory.get(arm)?;
        let median = |pick: &dyn Fn(&(u64, u64)) -> u64| {
            stats::median(&seen.iter().map(|taken| pick(taken) as f64).collect::<Vec<f64>>())
        };
        Some((median(&|taken| taken.0)?, median(&|taken| taken.1)?))
    }

    /// All failures.
    pub fn failures(&self) -> &[Failure] {
        &self.failures
    }

    /// Blocks of a phase that are over; one that a resume closed may lack launches.
    pub fn ended_blocks(&self, phase: Phase) -> Vec<u32> {
        self.ended_blocks.iter().copied().filter(|block| self.phases.get(block) == Some(&phase)).collect()
    }

    /// The number the next block gets.
    pub fn next_block(&self) -> u32 {
        self.phases.keys().next_back().map_or(0, |last| last + 1)
    }

    /// The block that was begun last, with its phase.
    pub fn last_block(&self) -> Option<(u32, Phase)> {
        self.phases.last_key_value().map(|(block, phase)| (*block, *phase))
    }

    /// A block that was begun and not ended: its number, phase, and the arms that have neither a
    /// complete measurement nor a failure in it.
    pub fn open_block(&self, points: &[PointKey], passes: &[PassCase]) -> Option<(u32, Phase, Vec<ArmId>)> {
        let (block, arms) = self.planned.iter().next_back()?;
        if self.ended_blocks.contains(block) {
            return None;
        }
        let phase = *self.phases.get(block)?;
        let missing = arms
            .iter()
            .filter(|arm| {
                let cell = |point: &PointKey| self.values(phase, arm, *point).iter().any(|value| value.block == *block);
                let pass = |case: &PassCase| self.passes(arm, case.key()).iter().any(|value| value.block == *block);
                let measured = match phase {
                    Phase::Search | Phase::Final => points.iter().all(cell),
                    Phase::Trial => passes.iter().all(pass),
                    Phase::Gate => self.gates.get(*arm).is_some_and(|gate| gate.block == *block),
                };
                let failed = self.failures.iter().any(|failure| failure.arm == **arm && failure.block == *block);
                !measured && !failed
            })
            .cloned()
            .collect();
        Some((*block, phase, missing))
    }

    /// Finalists, planned launches and the reason, once chosen.
    pub fn finalists(&self) -> Option<(&[ArmId], u32, &str)> {
        self.finalists.as_ref().map(|(arms, launches, reason)| (arms.as_slice(), *launches, reason.as_str()))
    }

    /// Finalists that left early, with the figures behind it.
    pub fn dropped(&self) -> &[(ArmId, String)] {
        &self.dropped
    }

    /// Arms that left the race of the search, with the figures behind it.
    pub fn outraced(&self) -> &[(ArmId, DropReason, String)] {
        &self.outraced
    }

    /// "set by environment" lines of a launch.
    pub fn set_lines(&self, launch: u32) -> &[SetLine] {
        self.set_lines.get(&launch).map_or(&[], Vec::as_slice)
    }

    /// Launches that ended.
    pub const fn launches(&self) -> u32 {
        self.launches
    }

    /// The number the next launch gets: above every number that was planned or started, also where a
    /// block was torn and its launches never ended.
    pub const fn next_launch(&self) -> u32 {
        self.next_launch
    }

    /// Cells measured.
    pub const fn measured_cells(&self) -> u32 {
        self.measured_cells
    }

    /// Seconds spent in launches.
    pub const fn duration_s(&self) -> f64 {
        self.duration_s
    }

    /// How often the run was resumed.
    pub const fn segments(&self) -> u32 {
        self.segments
    }

    /// Median over launches of the launch median, for a table.
    pub fn median_us(&self, phase: Phase, arm: &ArmId, point: PointKey) -> Option<f64> {
        let medians: Vec<f64> = self.values(phase, arm, point).iter().map(|value| value.median_us).collect();
        stats::median(&medians)
    }
}

/// The objective: which points count how much. Built from the workload's measured points.
#[derive(Debug, Clone, PartialEq)]
pub struct Objective {
    batches: Vec<Batch>,
}

/// One batch of the objective.
#[derive(Debug, Clone, PartialEq)]
pub struct Batch {
    /// Concurrent sequences.
    pub batch: u32,
    /// Its share; shares sum to 1.
    pub weight: f64,
    /// Calls per pass at each point.
    pub calls: Vec<(PointKey, u32)>,
}

impl Objective {
    /// From the points the workers can measure. `None` if there are none.
    pub fn of(workload: &Workload) -> Option<Self> {
        let mut batches: Vec<Batch> = Vec::new();
        for point in workload.points.iter().filter(|point| point.measured) {
            // Points the user named directly have no batch in common; each is a batch of its own.
            let same =
                |batch: &&mut Batch| batch.batch == point.batch && point.phase != crate::record::PointPhase::Size;
            match batches.iter_mut().find(same) {
                Some(batch) => batch.calls.push((point.key(), point.calls_per_pass)),
                None => batches.push(Batch {
                    batch: point.batch,
                    weight: point.weight,
                    calls: vec![(point.key(), point.calls_per_pass)],
                }),
            }
        }
        let total: f64 = batches.iter().map(|batch| batch.weight).sum();
        if batches.is_empty() || total <= 0.0 {
            return None;
        }
        for batch in &mut batches {
            batch.weight /= total;
        }
        Some(Self { batches })
    }

    /// The batches.
    pub fn batches(&self) -> &[Batch] {
        &self.batches
    }

    /// The log ratio for one launch pair; `of` gives (arm, default) at a point. `None` if a point is
    /// missing: an objective over some of the points would be another objective.
    pub fn log_ratio(&self, of: impl Fn(PointKey) -> Option<(f64, f64)>) -> Option<f64> {
        let mut sum = 0.0;
        for batch in &self.batches {
            let (mut arm_us, mut default_us) = (0.0, 0.0);
            for (point, calls) in &batch.calls {
                let (arm, default) = of(*point)?;
                arm_us += f64::from(*calls) * arm;
                default_us += f64::from(*calls) * default;
            }
            sum += batch.weight * (arm_us / default_us).ln();
        }
        sum.is_finite().then_some(sum)
    }

    /// Microseconds of measured collectives in one pass of a batch.
    pub fn batch_us(batch: &Batch, of: impl Fn(PointKey) -> Option<f64>) -> Option<f64> {
        batch.calls.iter().try_fold(0.0, |sum, (point, calls)| Some(sum + f64::from(*calls) * of(*point)?))
    }
}

/// Every distinct measurement that a workload asks for, largest message last so that cheap cells
/// come first.
pub fn measured_points(workload: &Workload) -> Vec<PointKey> {
    let mut keys: Vec<PointKey> =
        workload.points.iter().chain(&workload.guard).filter(|point| point.measured).map(Point::key).collect();
    keys.sort_unstable();
    keys.dedup();
    keys
}

/// The empty arm of a run.
pub fn default_arm(arms: &[Arm]) -> Option<&Arm> {
    arms.iter().find(|arm| arm.env.is_empty() && arm.files.is_empty() && arm.server_args.is_empty())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::collective::{Collective, DataType, Form};
    use crate::record::{BlockLaunch, PointPhase};

    fn key(bytes: u64) -> PointKey {
        PointKey::usual(Collective::AllReduce, DataType::Bf16, bytes, 2)
    }

    fn arm(name: &str) -> ArmId {
        ArmId(name.to_owned())
    }

    fn planned(block: u32, arms: &[&str]) -> Event {
        let launches = arms
            .iter()
            .enumerate()
            .map(|(index, name)| BlockLaunch { launch: index as u32, arms: vec![arm(name)] })
            .collect();
        Event::BlockPlanned { block, phase: Phase::Final, launches }
    }

    fn cell(name: &str, block: u32, bytes: u64, us: f64) -> Event {
        Event::CellMeasured(CellMeasurement {
            arm: arm(name),
            point: key(bytes),
            block,
            launch: 0,
            communicator: 0,
            position: 0,
            collectives_per_replay: 64,
            replays_us: vec![us, us * 1.01, us * 0.99],
            effective: Effective::default(),
            flags: Vec::new(),
            call: None,
            duration_s: 0.1,
        })
    }

    fn workload() -> Workload {
        let point = |bytes, batch, weight| Point {
            collective: Collective::AllReduce,
            dtype: DataType::Bf16,
            bytes,
            ranks: 2,
            calls_per_pass: 10,
            batch,
            weight,
            phase: PointPhase::Decode,
            measured: true,
            origin: String::new(),
            form: Form::default(),
        };
        Workload {
            format: 1,
            model: "m".to_owned(),
            engine: "none".to_owned(),
            tensor_parallel: 2,
            verify_tokens: 1,
            points: vec![point(1024, 1, 0.5), point(1_048_576, 64, 0.5)],
            guard: Vec::new(),
            assumptions: Vec::new(),
            ..Workload::default()
        }
    }

    #[test]
    fn pairs_never_leave_their_block() {
        let mut evidence = Evidence::default();
        for event in [
            planned(0, &["default", "a"]),
            cell("default", 0, 1024, 10.0),
            cell("a", 0, 1024, 9.0),
            planned(1, &["default", "a"]),
            cell("default", 1, 1024, 20.0),
        ] {
            evidence.tell(&event);
        }
        assert_eq!(evidence.pairs(Phase::Final, &arm("a"), &arm("default"), key(1024)), [(0, 9.0, 10.0)]);
        let (block, _, missing) = evidence.open_block(&[key(1024)], &[]).unwrap();
        assert_eq!((block, missing), (1, vec![arm("a")]));
    }

    #[test]
    fn a_cell_that_stands_twice_counts_once() {
        let mut evidence = Evidence::default();
        for event in [
            planned(0, &["default", "a"]),
            cell("default", 0, 1024, 10.0),
            cell("a", 0, 1024, 9.0),
            cell("a", 0, 1024, 5.0),
            cell("default", 0, 1024, 20.0),
        ] {
            evidence.tell(&event);
        }
        assert_eq!(evidence.pairs(Phase::Final, &arm("a"), &arm("default"), key(1024)), [(0, 9.0, 10.0)]);
        assert_eq!(evidence.measured_cells(), 2);
    }

    #[test]
    fn a_pass_counts_once_and_in_blocks_of_the_trial_only() {
        let pass = PassKey { tokens: 1, captured: true };
        let timed = |name: &str, block: u32, ms: f64| {
            Event::PassMeasured(PassMeasurement {
                arm: arm(name),
                pass,
                block,
                launch: 0,
                runs_ms: vec![ms],
                without_collectives_ms: vec![ms / 2.0],
                crowded_ms: Vec::new(),
                arena_bytes: 0,
                states: Vec::new(),
                duration_s: 0.1,
            })
        };
        let mut evidence = Evidence::default();
        let trial = Event::BlockPlanned { block: 1, phase: Phase::Trial, launches: Vec::new() };
        for event in [planned(0, &["default", "a"]), timed("a", 0, 1.0), trial, timed("default", 1, 10.0)] {
            evidence.tell(&event);
        }
        for event in [timed("a", 1, 9.0), timed("a", 1, 5.0), timed("a", 2, 1.0)] {
            evidence.tell(&event);
        }
        assert_eq!(evidence.pass_log_ratios(&arm("a"), &arm("default"), pass), [0.9_f64.ln()]);
        assert_eq!(evidence.measured_cells(), 2);
    }

    #[test]
    fn no_batch_decides_by_its_size() {
        // The big message is 100 times slower; a 10 % gain at the small one must weigh as much as a
        // 10 % loss at the big one.
        let objective = Objective::of(&workload()).unwrap();
        let ratio = objective
            .log_ratio(|point| if point.bytes == 1024 { Some((9.0, 10.0)) } else { Some((1000.0 / 0.9, 1000.0)) })
            .unwrap();
        assert!(ratio.abs() < 1e-12, "{ratio}");
        assert!(objective.log_ratio(|point| (point.bytes == 1024).then_some((1.0, 1.0))).is_none());
    }

    #[test]
    fn the_objective_is_one_number_per_block() {
        let mut evidence = Evidence::default();
        for block in 0..3 {
            evidence.tell(&planned(block, &["default", "a"]));
            for bytes in [1024, 1_048_576] {
                evidence.tell(&cell("default", block, bytes, 10.0));
                evidence.tell(&cell("a", block, bytes, 8.0));
            }
            evidence.tell(&Event::BlockEnded { block });
        }
        let objective = Objective::of(&workload()).unwrap();
        let ratios = evidence.objective_log_ratios(Phase::Final, &arm("a"), &arm("default"), &objective);
        assert_eq!(ratios.len(), 3);
        assert!((ratios[0].exp() - 0.8).abs() < 1e-12);
        assert!(evidence.open_block(&[key(1024)], &[]).is_none());
        assert_eq!(evidence.ended_blocks(Phase::Final), [0, 1, 2]);
        assert_eq!(evidence.next_block(), 3);
    }
}
