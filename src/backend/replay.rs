//! A recorded run as a backend: the same campaign over numbers that were measured earlier.
//!
//! Keyed by (arm, point). Launches of an arm are handed out in the order in which they were
//! recorded, all points of one launch together. A plan that wants more launches than were recorded
//! gets none: drawing recorded ones again would make intervals narrower than the evidence. With an
//! assumed noise every launch is redrawn around the recorded ones with that spread, which the verdict
//! says.

use std::collections::{BTreeMap, BTreeSet};

use itertools::Itertools;
use rand::RngExt;

use super::{Backend, BackendError, CommunicatorPlan, LaunchPlan, Sink};
use crate::record::{
    ArmId, CellMeasurement, Event, JournalLine, Outcome, OutcomeKind, PassKey, PassMeasurement, Phase, PointKey,
};
use crate::seed::Seed;

/// The launches of one arm in one phase.
#[derive(Debug, Default)]
struct Recorded {
    /// Per launch: its block and its cells.
    launches: Vec<(u32, BTreeMap<PointKey, CellMeasurement>)>,
    handed_out: usize,
}

/// The passes of one arm, launch by launch.
#[derive(Debug, Default)]
struct RecordedPasses {
    launches: Vec<(u32, BTreeMap<PassKey, PassMeasurement>)>,
    handed_out: usize,
}

/// The replay backend.
pub struct ReplayBackend {
    recorded: BTreeMap<(Phase, ArmId), Recorded>,
    passes: BTreeMap<ArmId, RecordedPasses>,
    failures: BTreeMap<ArmId, Outcome>,
    seed: Seed,
    /// Launches are redrawn around the recorded medians with this spread, where a run holds too few.
    assumed_noise: Option<f64>,
    blocks: BTreeMap<u32, u32>,
    missing: BTreeSet<ArmId>,
}

impl ReplayBackend {
    /// From the journal of a recorded run.
    pub fn new(lines: &[JournalLine], seed: Seed, assumed_noise: Option<f64>) -> Result<Self, BackendError> {
        let mut phases: BTreeMap<u32, Phase> = BTreeMap::new();
        let mut recorded: BTreeMap<(Phase, ArmId), Recorded> = BTreeMap::new();
        let mut passes: BTreeMap<ArmId, RecordedPasses> = BTreeMap::new();
        let voided: BTreeSet<u32> = lines
            .iter()
            .filter_map(|line| match &line.event {
                Event::BlockVoided { block, .. } => Some(*block),
                _ => None,
            })
            .collect();
        let mut failures = BTreeMap::new();
        for line in lines {
            match &line.event {
                Event::BlockPlanned { block, phase, .. } => {
                    phases.insert(*block, *phase);
                }
                Event::CellMeasured(cell) => {
                    let Some(phase) = phases.get(&cell.block) else { continue };
                    let of_arm = &mut recorded.entry((*phase, cell.arm.clone())).or_default().launches;
                    match of_arm.last_mut() {
                        Some((block, cells)) if *block == cell.block => {
                            cells.insert(cell.point, cell.clone());
                        }
                        _ => of_arm.push((cell.block, BTreeMap::from([(cell.point, cell.clone())]))),
                    }
                }
                // What did not count then does not count now.
                Event::PassMeasured(pass) if !voided.contains(&pass.block) => {
                    let of_arm = &mut passes.entry(pass.arm.clone()).or_default().launches;
                    match of_arm.last_mut() {
                        Some((block, passes)) if *block == pass.block => {
                            passes.insert(pass.pass, pass.clone());
                        }
                        _ => of_arm.push((pass.block, BTreeMap::from([(pass.pass, pass.clone())]))),
                    }
                }
                Event::CellFailed { arm, outcome, .. } => {
                    failures.insert(arm.clone(), outcome.clone());
                }
                _ => {}
            }
        }
        if recorded.is_empty() {
            return Err(BackendError::Unusable("the recorded run holds no measurement".to_owned()));
        }
        Ok(Self { recorded, passes, failures, seed, assumed_noise, blocks: BTreeMap::new(), missing: BTreeSet::new() })
    }

    /// Most launches that any arm was recorded with in the final: what a verdict can rest on.
    pub fn most_final_launches(&self) -> Option<u32> {
        if self.assumed_noise.is_some() {
            return None;
        }
        let finals = self.recorded.iter().filter(|((phase, _), _)| *phase == Phase::Final);
        finals.map(|(_, recorded)| recorded.launches.len() as u32).max()
    }

    /// Most launches of the trial that any arm was recorded with.
    pub fn most_trial_launches(&self) -> Option<u32> {
        self.passes.values().map(|recorded| recorded.launches.len() as u32).max()
    }

    /// The cells of the next recorded launch of an arm. With an assumed noise, a launch is drawn by
    /// the block's own draw, the same for every arm of the block: arms that were measured side by side
    /// stay side by side.
    fn next_launch(&mut self, phase: Phase, arm: &ArmId, block: u32) -> Option<BTreeMap<PointKey, CellMeasurement>> {
        let key = (phase, arm.clone());
        if self.assumed_noise.is_none() {
            let recorded = self.recorded.get_mut(&key)?;
            let position = recorded.handed_out;
            recorded.handed_out += 1;
            return recorded.launches.get(position).map(|(_, cells)| cells.clone());
        }
        // A finalist of this replay may not have been one in the recorded run; its search launches
        // then stand in.
        let other = match phase {
            Phase::Search => Phase::Final,
            Phase::Final | Phase::Trial => Phase::Search,
        };
        let recorded = self.recorded.get(&key).or_else(|| self.recorded.get(&(other, arm.clone())))?;
        let draw =
            *self.blocks.entry(block).or_insert_with(|| self.seed.derive("replay-block", &block.to_string()).random());
        let index = draw as usize % recorded.launches.len();
        Some(recorded.launches[index].1.clone())
    }
}

impl ReplayBackend {
    /// The recorded passes of the next launch of an arm, in the order of the plan; the failure where
    /// one was never timed.
    fn replay_passes(
        &mut self,
        plan: &LaunchPlan,
        communicator: &CommunicatorPlan,
        duration_s: &mut f64,
    ) -> Result<Vec<PassMeasurement>, Box<Event>> {
        let arm = &communicator.arm.id;
        let failed = |outcome: Outcome| {
            Box::new(Event::CellFailed {
                arm: arm.clone(),
                point: None,
                block: plan.block,
                launch: plan.launch,
                outcome,
                duration_s: 0.0,
            })
        };
        let not_recorded = Outcome {
            kind: OutcomeKind::NotRecorded,
            detail: "the recorded run holds no forward pass of this arm".to_owned(),
        };
        let Some(recorded) = self.passes.get_mut(arm).filter(|recorded| !recorded.launches.is_empty()) else {
            self.missing.insert(arm.clone());
            return Err(failed(self.failures.get(arm).cloned().unwrap_or(not_recorded)));
        };
        let position = recorded.handed_out;
        recorded.handed_out += 1;
        let Some((_, passes)) = recorded.launches.get(position) else { return Err(failed(not_recorded)) };
        communicator
            .passes
            .iter()
            .map(|wanted| {
                let pass = passes.get(&wanted.case.key()).ok_or_else(|| failed(not_recorded.clone()))?;
                *duration_s += pass.duration_s;
                Ok(PassMeasurement { block: plan.block, launch: plan.launch, ..pass.clone() })
            })
            .collect()
    }
}

impl Backend for ReplayBackend {
    fn run(&mut self, plan: &LaunchPlan, sink: Sink<'_>) -> Result<(), BackendError> {
        let started = Event::LaunchStarted { launch: plan.launch, block: plan.block, env: plan.environment.clone() };
        if sink(started).is_break() {
            return Ok(());
        }
        let mut duration_s = 0.0;
        let mut position = 0;
        for (index, communicator) in plan.communicators.iter().enumerate() {
            if communicator.points.is_empty() {
                continue;
            }
            let arm = &communicator.arm.id;
            let cells = self.next_launch(plan.phase, arm, plan.block);
            let missing =
                communicator.points.iter().find(|point| cells.as_ref().is_none_or(|cells| !cells.contains_key(point)));
            if let Some(point) = missing {
                // What the recorded run could not measure failed then; what it never tried is
                // another matter.
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
                let failed = Event::CellFailed {
                    arm: arm.clone(),
                    point: Some(*point),
                    block: plan.block,
                    launch: plan.launch,
                    outcome,
                    duration_s: 0.0,
                };
                if sink(failed).is_break() {
                    return Ok(());
                }
                continue;
            }
            let factor = self.assumed_noise.map_or(1.0, |log_sd| {
                let mut random = self.seed.derive("replay-noise", &format!("{}-{}-{arm}", plan.block, plan.launch));
                let sum: f64 = (0..12).map(|_| random.random::<f64>()).sum();
                ((sum - 6.0) * log_sd).exp()
            });
            for (point, cell) in cells.into_iter().flatten().sorted_by_key(|(_, cell)| cell.position) {
                if !communicator.points.contains(&point) {
                    continue;
                }
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
            match self.replay_passes(plan, communicator, &mut duration_s) {
                Ok(measured) => {
                    for pass in measured {
                        if sink(Event::PassMeasured(pass)).is_break() {
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
