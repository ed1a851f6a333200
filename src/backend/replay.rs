//! A recorded run as a backend: the same campaign over numbers that were measured earlier.
//!
//! A block of this run is given the arms of one recorded block, the first of its phase that was not
//! given out yet: what was measured side by side stays side by side, also where an arm failed in a
//! block or an interrupt tore one. An arm that the block lacks is left to a later one that holds it. A
//! plan that wants more than was recorded gets nothing: drawing recorded launches again would make
//! intervals narrower than the evidence. With an assumed noise every launch is redrawn around the
//! recorded ones with that spread, which the verdict says.

use std::collections::{BTreeMap, BTreeSet};

use itertools::Itertools;
use rand::RngExt;

use super::{Backend, BackendError, CommunicatorPlan, LaunchPlan, Sink};
use crate::record::{
    Arm, ArmId, CellMeasurement, Event, GatePass, JournalLine, Outcome, OutcomeKind, OverlapCheck, PassKey,
    PassMeasurement, Phase, PointKey,
};
use crate::seed::Seed;

/// What one arm was measured at in one block.
type Measured<Key, Value> = BTreeMap<Key, Value>;

/// The recorded blocks of a phase.
#[derive(Debug)]
struct Blocks<Key, Value> {
    /// What each holds.
    arms: BTreeMap<u32, BTreeMap<ArmId, Measured<Key, Value>>>,
    /// Recorded blocks that no block of this run was given.
    unused: BTreeSet<u32>,
    /// Blocks of this run, with what each was given.
    given: BTreeMap<u32, u32>,
}

impl<Key, Value> Default for Blocks<Key, Value> {
    fn default() -> Self {
        Self { arms: BTreeMap::new(), unused: BTreeSet::new(), given: BTreeMap::new() }
    }
}

/// What a block of this run has of an arm.
enum Share<'a, Key, Value> {
    /// This.
    Here(&'a Measured<Key, Value>),
    /// Nothing, but a later block may.
    Later,
    /// Nothing, and no later block has any: this is what was wanted and is not there.
    Never(Key),
}

impl<Key: Copy + Ord, Value> Blocks<Key, Value> {
    /// A block holds a measurement once; the same again, in an edited journal, is no other.
    fn add(&mut self, block: u32, arm: &ArmId, key: Key, value: Value) {
        self.unused.insert(block);
        self.arms.entry(block).or_default().entry(arm.clone()).or_default().entry(key).or_insert(value);
    }

    fn launch(&self, block: u32, arm: &ArmId) -> Option<&Measured<Key, Value>> {
        self.arms.get(&block)?.get(arm)
    }

    /// Launches of an arm, whole or not.
    fn launches<'a>(&'a self, arm: &'a ArmId) -> impl Iterator<Item = &'a Measured<Key, Value>> {
        self.arms.values().filter_map(|arms| arms.get(arm))
    }

    /// Gives a block of this run its recorded one, with the first launch that can be served.
    fn give(&mut self, block: u32, arms: &[&ArmId], wanted: &[Key]) {
        if self.given.contains_key(&block) {
            return;
        }
        let serves = |recorded: &u32| {
            arms.iter().any(|arm| {
                self.launch(*recorded, arm).is_some_and(|launch| wanted.iter().any(|key| launch.contains_key(key)))
            })
        };
        if let Some(recorded) = self.unused.iter().copied().find(serves) {
            self.unused.remove(&recorded);
            self.given.insert(block, recorded);
        }
    }

    /// An arm's share in a block of this run. A launch that an interrupt tore is handed out as it was
    /// recorded.
    fn share(&self, block: u32, arm: &ArmId, wanted: &[Key]) -> Option<Share<'_, Key, Value>> {
        // What no launch of the arm ever held is no matter of blocks.
        if let Some(never) = wanted.iter().find(|key| self.launches(arm).all(|launch| !launch.contains_key(key))) {
            return Some(Share::Never(*never));
        }
        if let Some(launch) = self.given.get(&block).and_then(|recorded| self.launch(*recorded, arm)) {
            return Some(Share::Here(launch));
        }
        if self.unused.iter().any(|recorded| self.launch(*recorded, arm).is_some()) {
            return Some(Share::Later);
        }
        wanted.first().map(|first| Share::Never(*first))
    }

    /// Blocks in which two arms were measured whole, or one where none was ever beside another: what a
    /// verdict can rest on.
    fn paired(&self) -> Option<u32> {
        let fullest = self.arms.values().flat_map(|arms| arms.values().map(BTreeMap::len)).max()?;
        let whole = |arms: &BTreeMap<ArmId, Measured<Key, Value>>| {
            arms.values().filter(|launch| launch.len() == fullest).count()
        };
        let at_least = |arms: usize| self.arms.values().filter(|block| whole(block) >= arms).count() as u32;
        Some(at_least(2)).filter(|pairs| *pairs > 0).or_else(|| Some(at_least(1)))
    }
}

/// The replay backend.
pub struct ReplayBackend {
    cells: BTreeMap<Phase, Blocks<PointKey, CellMeasurement>>,
    passes: Blocks<PassKey, PassMeasurement>,
    failures: BTreeMap<ArmId, Outcome>,
    /// Where arms gave wrong results while they were timed: however many launches went well, that is what they do.
    wrong: BTreeMap<ArmId, (Option<PointKey>, Outcome)>,
    gates: BTreeMap<ArmId, GatePass>,
    /// What made arms fail in the gate.
    gate_failures: BTreeMap<ArmId, Outcome>,
    overlaps: BTreeMap<ArmId, OverlapCheck>,
    seed: Seed,
    /// Launches are redrawn around the recorded medians with this spread, where a run holds too few.
    assumed_noise: Option<f64>,
    missing: BTreeSet<ArmId>,
}

impl ReplayBackend {
    /// From the journal of a recorded run.
    pub fn new(lines: &[JournalLine], seed: Seed, assumed_noise: Option<f64>) -> Result<Self, BackendError> {
        let mut phases: BTreeMap<u32, Phase> = BTreeMap::new();
        let mut cells: BTreeMap<Phase, Blocks<PointKey, CellMeasurement>> = BTreeMap::new();
        let mut passes = Blocks::default();
        let voided: BTreeSet<u32> = lines
            .iter()
            .filter_map(|line| match &line.event {
                Event::BlockVoided { block, .. } => Some(*block),
                _ => None,
            })
            .collect();
        let (mut failures, mut overlaps) = (BTreeMap::new(), BTreeMap::new());
        let mut wrong = BTreeMap::new();
        let (mut gates, mut gate_failures) = (BTreeMap::new(), BTreeMap::new());
        for line in lines {
            match &line.event {
                Event::BlockPlanned { block, phase, .. } => {
                    phases.insert(*block, *phase);
                }
                Event::CellMeasured(cell) => {
                    let Some(phase) = phases.get(&cell.block) else { continue };
                    cells.entry(*phase).or_default().add(cell.block, &cell.arm, cell.point, cell.clone());
                }
                // What did not count then does not count now.
                Event::PassMeasured(pass) if !voided.contains(&pass.block) => {
                    passes.add(pass.block, &pass.arm, pass.pass, pass.clone());
                }
                Event::GatePassed(gate) => {
                    gates.insert(gate.arm.clone(), gate.clone());
                }
                // What was repaired is not held against anybody.
                Event::RepairTried { .. } => wrong.clear(),
                Event::CellFailed { arm, point, outcome, block, .. } => {
                    match phases.get(block) {
                        Some(Phase::Gate) => {
                            gate_failures.insert(arm.clone(), outcome.clone());
                        }
                        Some(Phase::Search | Phase::Final) if outcome.kind == OutcomeKind::WrongResult => {
                            wrong.insert(arm.clone(), (*point, outcome.clone()));
                        }
                        _ => {}
                    }
                    failures.insert(arm.clone(), outcome.clone());
                }
                Event::OverlapChecked { arm, check } => {
                    overlaps.insert(arm.clone(), check.clone());
                }
                _ => {}
            }
        }
        if cells.is_empty() {
            return Err(BackendError::Unusable("the recorded run holds no measurement".to_owned()));
        }
        Ok(Self {
            cells,
            passes,
            failures,
            wrong,
            gates,
            gate_failures,
            overlaps,
            seed,
            assumed_noise,
            missing: BTreeSet::new(),
        })
    }

    /// Most paired launches that were recorded in the final.
    pub fn most_final_launches(&self) -> Option<u32> {
        if self.assumed_noise.is_some() {
            return None;
        }
        self.cells.get(&Phase::Final)?.paired()
    }

    /// Most paired launches that were recorded in the trial.
    pub fn most_trial_launches(&self) -> Option<u32> {
        self.passes.paired()
    }

    /// What an arm is given in a launch: cells, nothing for now, or the failure.
    fn cells(
        &mut self,
        plan: &LaunchPlan,
        communicator: &CommunicatorPlan,
    ) -> Result<Vec<CellMeasurement>, Box<Event>> {
        let (arm, points) = (&communicator.arm.id, communicator.points.as_slice());
        if let Some((point, outcome)) = self.wrong.get(arm) {
            return Err(Box::new(failed(plan, &communicator.arm, *point, outcome.clone())));
        }
        let share = match self.assumed_noise {
            None => self.cells.get(&plan.phase).and_then(|blocks| blocks.share(plan.block, arm, points)),
            Some(_) => self.drawn(plan, arm, points).map(Share::Here),
        };
        let never = match share {
            Some(Share::Here(launch)) => {
                let cells = points.iter().filter_map(|point| launch.get(point));
                return Ok(cells.sorted_by_key(|cell| cell.position).cloned().collect());
            }
            Some(Share::Later) => return Ok(Vec::new()),
            Some(Share::Never(point)) => Some(point),
            None => points.first().copied(),
        };
        let Some(point) = never else { return Ok(Vec::new()) };
        // What the recorded run could not measure failed then; what it never tried is another matter.
        let outcome = self.failures.get(arm).cloned().unwrap_or_else(|| {
            self.missing.insert(arm.clone());
            Outcome {
                kind: OutcomeKind::NotRecorded,
                detail: format!(
                    "the recorded run has no further launch of this arm at {} of {} bytes; --assume-noise redraws",
                    point.collective, point.bytes
                ),
            }
        });
        Err(Box::new(failed(plan, &communicator.arm, Some(point), outcome)))
    }

    /// A recorded launch by the block's own draw, the same for every arm of the block: arms that were
    /// measured side by side stay side by side. Only whole launches are drawn.
    fn drawn(
        &self,
        plan: &LaunchPlan,
        arm: &ArmId,
        points: &[PointKey],
    ) -> Option<&Measured<PointKey, CellMeasurement>> {
        // A finalist of this replay may not have been one in the recorded run; its search launches
        // then stand in.
        let other = match plan.phase {
            Phase::Search => Phase::Final,
            Phase::Gate | Phase::Final | Phase::Trial => Phase::Search,
        };
        let draw: u32 = self.seed.derive("replay-block", &plan.block.to_string()).random();
        [plan.phase, other].into_iter().find_map(|phase| {
            let blocks = &self.cells.get(&phase)?.arms;
            let first = draw as usize % blocks.len().max(1);
            let launches = blocks.values().cycle().skip(first).take(blocks.len()).filter_map(|arms| arms.get(arm));
            launches.into_iter().find(|launch| points.iter().all(|point| launch.contains_key(point)))
        })
    }

    /// What the recorded gate said of an arm.
    fn gate(&mut self, plan: &LaunchPlan, arm: &Arm) -> Event {
        if let Some(gate) = self.gates.get(&arm.id) {
            return Event::GatePassed(GatePass { block: plan.block, launch: plan.launch, ..gate.clone() });
        }
        let failed_then = self.gate_failures.get(&arm.id).cloned();
        if failed_then.is_none() && self.assumed_noise.is_some() {
            // Who asks for redrawn launches asks for arms that were no finalists then; that nothing was
            // checked shows in the count.
            return Event::GatePassed(GatePass {
                arm: arm.id.clone(),
                block: plan.block,
                launch: plan.launch,
                checks: 0,
                ll128_checks: 0,
                simulated: false,
                duration_s: 0.0,
            });
        }
        let outcome = failed_then.unwrap_or_else(|| {
            self.missing.insert(arm.id.clone());
            let detail = "the recorded run holds no smoke gate of this arm".to_owned();
            Outcome { kind: OutcomeKind::NotRecorded, detail }
        });
        failed(plan, arm, None, outcome)
    }

    /// The same for the passes of a trial.
    fn passes(
        &mut self,
        plan: &LaunchPlan,
        communicator: &CommunicatorPlan,
    ) -> Result<Vec<PassMeasurement>, Box<Event>> {
        let arm = &communicator.arm.id;
        let wanted: Vec<PassKey> = communicator.passes.iter().map(|pass| pass.case.key()).collect();
        match self.passes.share(plan.block, arm, &wanted) {
            Some(Share::Here(launch)) => Ok(wanted.iter().filter_map(|key| launch.get(key)).cloned().collect()),
            Some(Share::Later) | None => Ok(Vec::new()),
            Some(Share::Never(_)) => {
                let not_recorded = Outcome {
                    kind: OutcomeKind::NotRecorded,
                    detail: "the recorded run holds no forward pass of this arm".to_owned(),
                };
                let was_timed = self.passes.launches(arm).next().is_some();
                let outcome = self.failures.get(arm).filter(|_| !was_timed).cloned().unwrap_or(not_recorded);
                if !was_timed {
                    self.missing.insert(arm.clone());
                }
                Err(Box::new(failed(plan, &communicator.arm, None, outcome)))
            }
        }
    }
}

fn failed(plan: &LaunchPlan, arm: &Arm, point: Option<PointKey>, outcome: Outcome) -> Event {
    Event::CellFailed { arm: arm.id.clone(), point, block: plan.block, launch: plan.launch, outcome, duration_s: 0.0 }
}

impl Backend for ReplayBackend {
    fn run(&mut self, plan: &LaunchPlan, sink: Sink<'_>) -> Result<(), BackendError> {
        let started = Event::LaunchStarted { launch: plan.launch, block: plan.block, env: plan.environment.clone() };
        if sink(started).is_break() {
            return Ok(());
        }
        let arms: Vec<&ArmId> = plan.communicators.iter().map(|communicator| &communicator.arm.id).collect();
        if self.assumed_noise.is_none()
            && let Some(blocks) = self.cells.get_mut(&plan.phase)
        {
            let points = plan.communicators.iter().flat_map(|communicator| communicator.points.iter().copied());
            blocks.give(plan.block, &arms, &points.collect_vec());
        }
        let passes = plan.communicators.iter().flat_map(|communicator| &communicator.passes);
        self.passes.give(plan.block, &arms, &passes.map(|pass| pass.case.key()).collect_vec());
        let mut duration_s = 0.0;
        let mut position = 0;
        let gated = plan.communicators.iter().filter(|communicator| !communicator.checks.is_empty());
        for arm in gated.map(|communicator| &communicator.arm).unique_by(|arm| &arm.id) {
            let event = self.gate(plan, arm);
            if let Event::GatePassed(gate) = &event {
                duration_s += gate.duration_s;
            }
            if sink(event).is_break() {
                return Ok(());
            }
        }
        let shared = plan.shared().enumerate();
        for (index, communicator) in shared.flat_map(|(index, shared)| shared.iter().map(move |one| (index, one))) {
            if communicator.points.is_empty() {
                continue;
            }
            let cells = match self.cells(plan, communicator) {
                Ok(cells) => cells,
                Err(failed) => {
                    if sink(*failed).is_break() {
                        return Ok(());
                    }
                    continue;
                }
            };
            let arm = &communicator.arm.id;
            let factor = self.assumed_noise.map_or(1.0, |log_sd| {
                let mut random = self.seed.derive("replay-noise", &format!("{}-{}-{arm}", plan.block, plan.launch));
                let sum: f64 = (0..12).map(|_| random.random::<f64>()).sum();
                ((sum - 6.0) * log_sd).exp()
            });
            for cell in cells {
                duration_s += cell.duration_s;
                let replays_us = cell.replays_us.iter().map(|us| us * factor).collect();
                let replayed = Event::CellMeasured(CellMeasurement {
                    block: plan.block,
                    launch: plan.launch,
                    communicator: index as u32,
                    position,
                    replays_us,
                    ..cell
                });
                position += 1;
                if sink(replayed).is_break() {
                    return Ok(());
                }
            }
        }
        for communicator in plan.communicators.iter().filter(|communicator| !communicator.passes.is_empty()) {
            match self.passes(plan, communicator) {
                Ok(measured) => {
                    for pass in measured {
                        duration_s += pass.duration_s;
                        let replayed = PassMeasurement { block: plan.block, launch: plan.launch, ..pass };
                        if sink(Event::PassMeasured(replayed)).is_break() {
                            return Ok(());
                        }
                    }
                }
                Err(failed) => {
                    if sink(*failed).is_break() {
                        return Ok(());
                    }
                }
            }
        }
        let _ =
            sink(Event::LaunchEnded { launch: plan.launch, duration_s, set_by_environment: Vec::new(), outcome: None });
        Ok(())
    }

    fn check_overlap(
        &mut self,
        arm: &ArmId,
        _environment: &BTreeMap<String, String>,
        _seconds: f64,
        _launch: u32,
        _seed: u64,
    ) -> Result<Option<OverlapCheck>, BackendError> {
        Ok(self.overlaps.get(arm).cloned())
    }

    fn expected_s(&self, _plan: &LaunchPlan) -> f64 {
        0.0
    }

    fn most_final_launches(&self) -> Option<u32> {
        ReplayBackend::most_final_launches(self)
    }

    fn most_trial_launches(&self) -> Option<u32> {
        ReplayBackend::most_trial_launches(self)
    }

    fn notes(&self) -> Vec<String> {
        let mut notes = Vec::new();
        if let Some(noise) = self.assumed_noise {
            notes.push(format!(
                "launches were redrawn around the recorded ones with an assumed noise of {:.1} %",
                noise * 100.0
            ));
        }
        if !self.missing.is_empty() {
            notes
                .push(format!("not in the recorded run: {}", self.missing.iter().map(|arm| arm.0.as_str()).join(", ")));
        }
        notes
    }
}
