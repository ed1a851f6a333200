//! The one loop: ask the strategy, plan launches, run them, journal what happens, tell who listens.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::ControlFlow;

use itertools::Itertools;
use rand::RngExt;
use rand::seq::SliceRandom;

use crate::backend::{Backend, BackendError, CommunicatorPlan, LaunchPlan, PassPlan};
use crate::clock::Clock;
use crate::collective::Collective;
use crate::error_kind::{Classified, ErrorKind};
use crate::evidence::{Evidence, Failure};
use crate::file_kind::{PLUGIN_FILE, PLUGIN_VARIABLE};
use crate::journal::{Journal, JournalError};
use crate::knob::{self, CALL_VARIABLES, CallForm, Risk, Way};
use crate::machine::NcclVersion;
use crate::quarantine::quarantined;
use crate::record::{
    Arm, ArmId, BlockLaunch, CheapestLevel, Event, GatePoint, JournalLine, Outcome, OutcomeKind, Phase, PointKey,
};
use crate::repair;
use crate::search::{SearchContext, Strategy, Want};
use crate::seed::Seed;
use crate::space;
use crate::workload::{gate_points, pass_steps};

/// Launches that one block may need beyond the planned ones, where failures tear launches apart.
const EXTRA_LAUNCHES: usize = 64;

/// Blocks that may be voided; a machine whose clocks never agree is judged as it is, which is noted.
const MOST_VOIDED: usize = 4;

/// Why a campaign stopped before its end.
#[derive(Debug, thiserror::Error)]
pub enum CampaignError {
    /// The journal could not be written; what is in it is complete.
    #[error(transparent)]
    Journal(#[from] JournalError),
    /// No further launch makes sense.
    #[error(transparent)]
    Backend(#[from] BackendError),
}

impl Classified for CampaignError {
    fn kind(&self) -> ErrorKind {
        match self {
            // Something was measured and is safe: the run can be resumed.
            Self::Journal(JournalError::Io { .. }) => ErrorKind::Stopped,
            Self::Journal(error) => error.kind(),
            Self::Backend(error) => error.kind(),
        }
    }

    fn hint(&self) -> Option<String> {
        match self {
            Self::Journal(error) => error.hint(),
            Self::Backend(error) => error.hint(),
        }
    }
}

/// How a campaign ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Ending {
    /// The strategy wanted nothing more.
    Complete,
    /// The time budget was used up.
    Budget,
    /// The user asked for an orderly stop.
    Interrupt,
    /// None yet: the strategy waits for what can be made of the search.
    Paused,
}

impl Ending {
    /// The word in choice.json.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Complete => "complete",
            Self::Budget => "budget",
            Self::Interrupt => "interrupt",
            Self::Paused => "paused",
        }
    }
}

/// What the user wants of a campaign that runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Stop {
    /// That it goes on.
    No,
    /// That it ends as soon as what it began is of use: a block that is torn is measured again in part.
    AfterBlock,
    /// That it ends at once.
    Now,
}

/// What a listener hears.
#[derive(Debug)]
pub enum News<'a> {
    /// The user asked for a stop, and the block that runs is finished first.
    Stopping,
    /// A block begins; so many cells will be measured in it.
    Block {
        /// What for.
        phase: Phase,
        /// Cells planned.
        cells: usize,
        /// Seconds it may take.
        expected_s: f64,
    },
    /// An event was journalled.
    Line(&'a JournalLine),
}

/// Everything a campaign needs beside its backend and journal.
pub struct Campaign<'a> {
    /// What is searched and judged.
    pub context: &'a SearchContext,
    /// Seed of orders and data.
    pub seed: Seed,
    /// Version that decides which variables a living worker can change.
    pub nccl_version: NcclVersion,
    /// Variables that hold in every arm.
    pub pinned: &'a BTreeMap<String, String>,
    /// What the user wants by now.
    pub stop: &'a dyn Fn() -> Stop,
    /// Who listens.
    pub listener: &'a mut dyn FnMut(News<'_>),
}

impl Campaign<'_> {
    /// Runs until the strategy wants nothing more, the user stops it, or nothing more makes sense.
    /// `evidence` is what the journal already holds, and holds everything afterwards.
    pub fn run(
        &mut self,
        strategy: &dyn Strategy,
        backend: &mut dyn Backend,
        journal: &mut Journal,
        clock: &mut Clock,
        evidence: &mut Evidence,
    ) -> Result<Ending, CampaignError> {
        let mut next_launch = evidence.next_launch();
        self.close_last_block(journal, clock, evidence)?;
        loop {
            let want = match (self.stop)() {
                Stop::No => Some(strategy.next(self.context, evidence)),
                // Where nothing is left to measure the verdict costs no time. Nothing else is decided any
                // more: with a longer budget the resumed run may decide otherwise.
                Stop::AfterBlock => {
                    Some(strategy.next(self.context, evidence)).filter(|want| *want == Want::Done { budget: false })
                }
                Stop::Now => None,
            };
            let Some(want) = want else {
                self.journal(journal, clock, evidence, Event::RunInterrupted { reason: "interrupt".to_owned() })?;
                journal.sync()?;
                return Ok(Ending::Interrupt);
            };
            match want {
                Want::Block { phase, arms } => {
                    // A block that was torn by a stop shows at the top of the loop.
                    self.run_block(phase, &arms, &mut next_launch, backend, journal, clock, evidence)?;
                }
                Want::Finalists { arms, launches, reason } => {
                    self.journal(journal, clock, evidence, Event::FinalistsChosen { arms, launches, reason })?;
                }
                Want::Trial { arms, reason } => {
                    self.journal(journal, clock, evidence, Event::TrialChosen { arms, reason })?;
                }
                Want::Drop { arm, reason, detail } => {
                    let event = match evidence.finalists() {
                        Some(_) => Event::FinalistDropped { arm, reason, detail },
                        None => Event::ArmDropped { arm, reason, detail },
                    };
                    self.journal(journal, clock, evidence, event)?;
                }
                Want::Pause => return Ok(Ending::Paused),
                Want::Done { budget } => {
                    let event =
                        if budget { Event::RunInterrupted { reason: "budget".to_owned() } } else { Event::RunFinished };
                    self.journal(journal, clock, evidence, event)?;
                    journal.sync()?;
                    return Ok(if budget { Ending::Budget } else { Ending::Complete });
                }
            }
        }
    }

    /// A block that an earlier process left open is closed as it is: what it lacks is measured in a
    /// block of its own, beside a default of its own, so that no pair spans the seam. What is in it
    /// must have been measured under equal conditions, as in any block; that may be left to say even
    /// where its end was written.
    fn close_last_block(
        &mut self,
        journal: &mut Journal,
        clock: &mut Clock,
        evidence: &mut Evidence,
    ) -> Result<(), CampaignError> {
        let Some((block, phase)) = evidence.last_block() else { return Ok(()) };
        if !evidence.ended_blocks(phase).contains(&block) {
            self.journal(journal, clock, evidence, Event::BlockEnded { block })?;
        }
        self.void_if_uneven(block, phase, journal, clock, evidence)?;
        journal.sync()?;
        Ok(())
    }

    /// A block of the trial whose launches saw different clock limits counts for nothing.
    fn void_if_uneven(
        &mut self,
        block: u32,
        phase: Phase,
        journal: &mut Journal,
        clock: &mut Clock,
        evidence: &mut Evidence,
    ) -> Result<(), CampaignError> {
        if phase == Phase::Trial
            && !evidence.voided().contains_key(&block)
            && evidence.voided().len() < MOST_VOIDED
            && let Some(reason) = evidence.throttle_difference(block)
        {
            self.journal(journal, clock, evidence, Event::BlockVoided { block, reason })?;
        }
        Ok(())
    }

    /// One block, or the part of it before the user wanted an end at once.
    #[expect(clippy::too_many_arguments, reason = "the loop's state, passed on as it is")]
    fn run_block(
        &mut self,
        phase: Phase,
        arms: &[ArmId],
        next_launch: &mut u32,
        backend: &mut dyn Backend,
        journal: &mut Journal,
        clock: &mut Clock,
        evidence: &mut Evidence,
    ) -> Result<(), CampaignError> {
        let block = evidence.next_block();
        let known = progress(evidence);
        let mut plans = self.plan_block(block, phase, arms, next_launch);
        let launches = plans
            .iter()
            .map(|plan| BlockLaunch {
                launch: plan.launch,
                arms: plan.communicators.iter().map(|communicator| communicator.arm.id.clone()).unique().collect(),
            })
            .collect();
        self.journal(journal, clock, evidence, Event::BlockPlanned { block, phase, launches })?;
        (self.listener)(News::Block {
            phase,
            cells: plans.iter().map(LaunchPlan::cell_count).sum(),
            expected_s: plans.iter().map(|plan| backend.expected_s(plan)).sum(),
        });
        plans.reverse();
        let mut extra = 0;
        let mut told = false;
        while let Some(plan) = plans.pop() {
            let failures = evidence.failures().len();
            self.run_launch(&plan, backend, journal, clock, evidence, &mut told)?;
            if (self.stop)() == Stop::Now {
                return Ok(());
            }
            let mut again = None;
            if evidence.failures().len() > failures {
                self.condemn(block, plan.launch, journal, clock, evidence)?;
                let ran_and_failed =
                    |failure: &Failure| failure.arm == self.context.default && failure.kind != OutcomeKind::NotRecorded;
                if evidence.failures()[failures..].iter().any(ran_and_failed)
                    && quarantined(evidence).contains(&self.context.default)
                {
                    // Nothing can be compared with a default that does not run: the machine is at fault.
                    break;
                }
                let arms = if self.repair(failures, journal, clock, evidence)? {
                    // What the launch had not tried yet is the remainder's business, below.
                    evidence.failures()[failures..].iter().map(|failure| failure.arm.clone()).collect()
                } else {
                    self.to_be_confirmed(failures, evidence)
                };
                // What hung after it was measured, while leaving, has its cells in this block already.
                let arms: Vec<ArmId> =
                    arms.into_iter().filter(|arm| !measured_in_block(&plan, arm, evidence)).collect();
                again = self.replan(&plan, &arms, next_launch);
                let out = quarantined(evidence);
                plans.retain_mut(|plan| {
                    plan.communicators.retain(|communicator| !out.contains(&communicator.arm.id));
                    !plan.communicators.is_empty()
                });
            }
            // A launch that broke leaves arms that nobody tried: they get a fresh one. What is to be
            // confirmed comes before it, since it may condemn them.
            for plan in self.remainder(&plan, evidence, next_launch).into_iter().chain(again) {
                if extra < EXTRA_LAUNCHES {
                    extra += 1;
                    plans.push(plan);
                }
            }
        }
        self.journal(journal, clock, evidence, Event::BlockEnded { block })?;
        self.void_if_uneven(block, phase, journal, clock, evidence)?;
        journal.sync()?;
        if progress(evidence) == known {
            // The strategy would want the same block again, for ever.
            return Err(BackendError::System(format!("block {block} neither measured nor failed anything")).into());
        }
        Ok(())
    }

    /// Tries what the field knows to help with a failure since `known`; says whether there was anything.
    fn repair(
        &mut self,
        known: usize,
        journal: &mut Journal,
        clock: &Clock,
        evidence: &mut Evidence,
    ) -> Result<bool, CampaignError> {
        let proposed = evidence.failures()[known..].iter().find_map(|failure| {
            let arm = self.context.arms.iter().find(|arm| arm.id == failure.arm)?;
            let outcome = Outcome { kind: failure.kind, detail: failure.detail.clone() };
            let fixed = |name: &str| {
                self.pinned.contains_key(name) || evidence.repairs().iter().any(|(variable, _, _)| variable == name)
            };
            repair::propose(arm, &outcome, self.nccl_version, fixed)
        });
        let Some(repair) = proposed else { return Ok(false) };
        let event = Event::RepairTried {
            variable: repair.variable.to_owned(),
            value: repair.value.to_owned(),
            evidence: repair.evidence,
        };
        self.journal(journal, clock, evidence, event)?;
        Ok(true)
    }

    /// Arms whose first hang or crash since `known` needs a second look at once, in fresh processes: the
    /// default, whose second failure ends the campaign, and arms that choose how GPUs reach each other,
    /// whose second hang condemns every arm that needs the same path.
    fn to_be_confirmed(&self, known: usize, evidence: &Evidence) -> Vec<ArmId> {
        let out = quarantined(evidence);
        evidence.failures()[known..]
            .iter()
            .filter(|failure| matches!(failure.kind, OutcomeKind::TimedOut | OutcomeKind::Crashed))
            .filter(|failure| !out.contains(&failure.arm))
            .filter(|failure| {
                failure.arm == self.context.default
                    || failure.kind == OutcomeKind::TimedOut && !self.path(&failure.arm).is_empty()
            })
            .map(|failure| failure.arm.clone())
            .collect()
    }

    /// Leaves out what needs a path that hung twice.
    fn condemn(
        &mut self,
        block: u32,
        launch: u32,
        journal: &mut Journal,
        clock: &Clock,
        evidence: &mut Evidence,
    ) -> Result<(), CampaignError> {
        let hung: Vec<&Failure> =
            evidence.failures_that_count().iter().filter(|failure| failure.kind == OutcomeKind::TimedOut).collect();
        let paths: BTreeSet<Vec<(&String, &String)>> = hung.iter().map(|failure| self.path(&failure.arm)).collect();
        let needs = |arm: &ArmId, path: &[(&String, &String)]| {
            let own = self.path(arm);
            path.iter().all(|setting| own.contains(setting))
        };
        let twice = |path: &Vec<(&String, &String)>| {
            !path.is_empty() && hung.iter().filter(|failure| needs(&failure.arm, path)).count() >= 2
        };
        let mut condemnations = Vec::new();
        for path in paths.into_iter().filter(twice) {
            let out = quarantined(evidence);
            let condemned: Vec<ArmId> = self
                .context
                .arms
                .iter()
                .filter(|arm| !out.contains(&arm.id) && needs(&arm.id, &path))
                .map(|arm| arm.id.clone())
                .collect();
            let settings = path.iter().map(|(name, value)| format!("{name}={value}")).join(" ");
            condemnations.extend(condemned.into_iter().map(|arm| (arm, settings.clone())));
        }
        for (arm, settings) in condemnations {
            let detail = format!("it needs the path of {settings}, which hung twice");
            let outcome = Outcome { kind: OutcomeKind::Rejected, detail };
            let event = Event::CellFailed { arm, point: None, block, launch, outcome, duration_s: 0.0 };
            self.journal(journal, clock, evidence, event)?;
        }
        Ok(())
    }

    /// The variables of an arm that decide how GPUs reach each other.
    fn path(&self, arm: &ArmId) -> Vec<(&String, &String)> {
        let arm = self.context.arms.iter().find(|known| known.id == *arm);
        arm.map_or_else(Vec::new, |arm| arm.env.iter().filter(|(name, _)| knob::changes_transport(name)).collect())
    }

    /// Some arms of a launch, in a launch of their own.
    fn replan(&self, plan: &LaunchPlan, arms: &[ArmId], next_launch: &mut u32) -> Option<LaunchPlan> {
        let members: Vec<&Arm> = plan
            .communicators
            .iter()
            .map(|communicator| &communicator.arm)
            .filter(|arm| arms.contains(&arm.id))
            .unique_by(|arm| &arm.id)
            .collect();
        if members.is_empty() {
            return None;
        }
        let launch = *next_launch;
        *next_launch += 1;
        Some(self.plan_launch(launch, plan.block, plan.phase, plan.environment.clone(), &members))
    }

    fn run_launch(
        &mut self,
        plan: &LaunchPlan,
        backend: &mut dyn Backend,
        journal: &mut Journal,
        clock: &mut Clock,
        evidence: &mut Evidence,
        told: &mut bool,
    ) -> Result<(), CampaignError> {
        let mut failure = None;
        let launch_start_s = clock.elapsed_s();
        let mut plan = plan.clone();
        for (variable, value, _) in evidence.repairs() {
            plan.environment.entry(variable.clone()).or_insert_with(|| value.clone());
        }
        let ran = backend.run(&plan, &mut |event| {
            match &event {
                Event::CellMeasured(cell) => clock.advance_s(cell.duration_s),
                Event::PassMeasured(pass) => clock.advance_s(pass.duration_s),
                Event::GatePassed(gate) => clock.advance_s(gate.duration_s),
                Event::CellFailed { duration_s, .. } => clock.advance_s(*duration_s),
                Event::LaunchEnded { duration_s, .. } => {
                    let spent = clock.elapsed_s() - launch_start_s;
                    clock.advance_s(duration_s - spent);
                }
                _ => {}
            }
            if let Err(error) = self.journal(journal, clock, evidence, event) {
                failure = Some(error);
                return ControlFlow::Break(());
            }
            match (self.stop)() {
                Stop::No => {}
                Stop::AfterBlock => {
                    if !std::mem::replace(told, true) {
                        (self.listener)(News::Stopping);
                    }
                }
                Stop::Now => return ControlFlow::Break(()),
            }
            ControlFlow::Continue(())
        });
        if let Some(error) = failure {
            return Err(error.into());
        }
        ran.map_err(CampaignError::from)
    }

    fn journal(
        &mut self,
        journal: &mut Journal,
        clock: &Clock,
        evidence: &mut Evidence,
        event: Event,
    ) -> Result<(), JournalError> {
        let line = journal.append(clock.elapsed_s(), event)?;
        evidence.tell(&line.event);
        (self.listener)(News::Line(&line));
        Ok(())
    }

    /// The launches of a block, in order: the costliest level changes least. In the search, arms that differ only in
    /// what a living worker can change share a launch, and at call level those that differ only in what the tuner
    /// plugin can choose share a communicator; in the final, every arm has a launch of its own.
    pub fn plan_block(&self, block: u32, phase: Phase, arms: &[ArmId], next_launch: &mut u32) -> Vec<LaunchPlan> {
        let arms: Vec<&Arm> = arms.iter().filter_map(|id| self.context.arms.iter().find(|arm| arm.id == *id)).collect();
        let is_shared = phase == Phase::Search && self.context.settings.cheapest_level != CheapestLevel::Launch;
        let mut groups: Vec<(BTreeMap<String, String>, Vec<&Arm>)> = Vec::new();
        for arm in arms.into_iter().sorted_by(|left, right| left.id.cmp(&right.id)) {
            let environment = match phase {
                Phase::Search if is_shared => self.launch_variables(arm),
                Phase::Search | Phase::Gate | Phase::Final | Phase::Trial => space::variables(arm),
            };
            match groups.iter_mut().find(|(known, _)| is_shared && *known == environment) {
                Some((_, members)) => members.push(arm),
                None => groups.push((environment, vec![arm])),
            }
        }
        // Blocks of a trial are few, so chance alone would not balance their order: every second one
        // is the mirror image of the one before.
        let (order, mirrored) = match phase {
            Phase::Search | Phase::Gate | Phase::Final => (block, false),
            Phase::Trial => (block / 2, block % 2 == 1),
        };
        let mut random = self.seed.derive("block-order", &order.to_string());
        groups.shuffle(&mut random);
        if mirrored {
            groups.reverse();
        }
        // What may hang a GPU comes last: if it does, the rest of the block is measured already.
        groups.sort_by_key(|(_, members)| members.iter().any(|arm| may_hang(arm)));
        groups
            .into_iter()
            .map(|(environment, mut members)| {
                members.shuffle(&mut random);
                let launch = *next_launch;
                *next_launch += 1;
                self.plan_launch(launch, block, phase, environment, &members)
            })
            .collect()
    }

    fn plan_launch(
        &self,
        launch: u32,
        block: u32,
        phase: Phase,
        environment: BTreeMap<String, String>,
        members: &[&Arm],
    ) -> LaunchPlan {
        // Every variable that any communicator of the launch sets is set or taken out at each.
        let call = |arm: &Arm| self.call_form(arm).filter(|_| phase == Phase::Search);
        let communicator_level = |arm: &Arm| -> BTreeMap<String, String> {
            let own = space::variables(arm).into_iter().filter(|(name, _)| !environment.contains_key(name));
            if call(arm).is_none() {
                return own.collect();
            }
            // What the plugin stands for is nowhere in the environment, and the plugin in no other communicator's.
            own.filter(|(name, _)| !CALL_VARIABLES.contains(&name.as_str()))
                .chain([(PLUGIN_VARIABLE.to_owned(), PLUGIN_FILE.to_owned())])
                .collect()
        };
        let names: BTreeSet<String> = members.iter().flat_map(|arm| communicator_level(arm).into_keys()).collect();
        let mut communicators: Vec<CommunicatorPlan> = members
            .iter()
            .flat_map(|arm| {
                let own = communicator_level(arm);
                let plan = CommunicatorPlan {
                    arm: (*arm).clone(),
                    variables: names.iter().map(|name| (name.clone(), own.get(name).cloned())).collect(),
                    points: Vec::new(),
                    checks: Vec::new(),
                    passes: Vec::new(),
                    call: call(arm),
                };
                match phase {
                    Phase::Search | Phase::Final => by_ranks(&self.context.points, |point| point.ranks)
                        .into_iter()
                        .map(|points| CommunicatorPlan { points, ..plan.clone() })
                        .collect(),
                    Phase::Gate => by_ranks(&self.checks(arm), |check| check.point.ranks)
                        .into_iter()
                        .map(|checks| CommunicatorPlan { checks, ..plan.clone() })
                        .collect(),
                    Phase::Trial => vec![CommunicatorPlan { passes: self.passes(), ..plan }],
                }
            })
            .collect();
        // Arms that share a communicator stand together, and these communicators come first: where one without a
        // plugin was made before, NCCL looks for none any more.
        let shared: Vec<_> = communicators
            .iter()
            .filter(|plan| plan.call.is_some())
            .map(|plan| plan.variables.clone())
            .unique()
            .collect();
        communicators.sort_by_key(|plan| match plan.call {
            Some(_) => shared.iter().position(|variables| *variables == plan.variables),
            None => Some(shared.len()),
        });
        LaunchPlan {
            launch,
            block,
            phase,
            communicators,
            cell_time_ms: self.context.settings.cell_time_ms,
            data_seed: self.seed.derive("data", &format!("block-{block}-launch-{launch}")).random(),
            environment,
        }
    }

    /// What an arm must get right in the smoke gate: what all must, and the long check of LL128 for each
    /// collective that the arm opens to it.
    fn checks(&self, arm: &Arm) -> Vec<GatePoint> {
        let Some(plan) = &self.context.gate else { return Vec::new() };
        let opened = |check: &&GatePoint| self.opens_ll128(arm, check.point);
        let points = gate_points(plan);
        points.all.iter().chain(points.ll128.iter().filter(opened)).copied().collect()
    }

    /// Whether an arm lets NCCL run a collective with LL128 where it may not trust the link.
    fn opens_ll128(&self, arm: &Arm, point: PointKey) -> bool {
        arm.env
            .get("NCCL_PROTO")
            .is_some_and(|text| knob::opens_ll128(text, self.nccl_version, point.collective.log_name()))
    }

    /// The passes of a trial, the one that reads the most weights first: what it needs is what is
    /// allocated.
    fn passes(&self) -> Vec<PassPlan> {
        let Some(trial) = &self.context.trial else { return Vec::new() };
        let mut passes: Vec<PassPlan> = trial
            .cases
            .iter()
            .map(|case| PassPlan {
                case: case.clone(),
                steps: pass_steps(&trial.shape, case),
                stream: if case.captured { trial.stream } else { trial.eager_stream },
            })
            .collect();
        passes.sort_by_key(|pass| std::cmp::Reverse(pass.case.tokens));
        passes
    }

    /// What the tuner plugin can say in place of an arm's variables, where the search may ask it. The default says
    /// nothing, and has a communicator of its own.
    fn call_form(&self, arm: &Arm) -> Option<CallForm> {
        if self.context.settings.cheapest_level != CheapestLevel::Call {
            return None;
        }
        let form = CallForm::of(&space::variables(arm), self.nccl_version)?;
        let points = &self.context.points;
        // How many channels send and receive have is decided once a communicator, and no plugin is asked.
        let holds = |point: &PointKey| {
            form.cell(point.collective.log_name()).is_some()
                && !(form.sets_channels() && point.collective == Collective::SendRecv)
        };
        let is_one_group = points.iter().map(|point| point.ranks).all_equal();
        (is_one_group && !points.is_empty() && points.iter().all(holds)).then_some(form)
    }

    /// Variables of an arm that must be there at process start.
    fn launch_variables(&self, arm: &Arm) -> BTreeMap<String, String> {
        let is_called = self.call_form(arm).is_some();
        space::variables(arm)
            .into_iter()
            .filter(|(name, _)| !(is_called && CALL_VARIABLES.contains(&name.as_str())))
            .filter(|(name, _)| {
                !knob::find(name).is_some_and(|knob| {
                    knob.routes(self.nccl_version).any(|route| route.way == Way::CommunicatorEnvironment)
                })
            })
            .collect()
    }

    /// What a broken launch left untried, as a launch of its own.
    fn remainder(&self, plan: &LaunchPlan, evidence: &Evidence, next_launch: &mut u32) -> Option<LaunchPlan> {
        let (_, _, missing) = evidence.open_block(&self.context.points, self.context.passes())?;
        let untried = |communicator: &&CommunicatorPlan| {
            let arm = &communicator.arm.id;
            missing.contains(arm) && !measured_in_block(plan, arm, evidence)
        };
        let members: Vec<ArmId> =
            plan.communicators.iter().filter(untried).map(|communicator| communicator.arm.id.clone()).collect();
        if members.len() == plan.communicators.len() {
            // Nothing at all was tried: a launch that fails before its first communicator would fail again.
            return None;
        }
        self.replan(plan, &members, next_launch)
    }
}

/// Whether anything of an arm of a launch was measured in the launch's block.
fn measured_in_block(plan: &LaunchPlan, arm: &ArmId, evidence: &Evidence) -> bool {
    plan.communicators.iter().filter(|communicator| communicator.arm.id == *arm).any(|communicator| {
        communicator.points.iter().any(|point: &PointKey| {
            evidence.values(plan.phase, arm, *point).iter().any(|value| value.block == plan.block)
        }) || communicator
            .passes
            .iter()
            .any(|pass| evidence.passes(arm, pass.case.key()).iter().any(|value| value.block == plan.block))
            || !communicator.checks.is_empty() && evidence.gate(arm).is_some_and(|gate| gate.block == plan.block)
    })
}

/// What a block must add to: cells that were measured, arms that passed the gate, failures.
fn progress(evidence: &Evidence) -> u32 {
    evidence.measured_cells() + evidence.gates_passed() + evidence.failures().len() as u32
}

/// Parts of a list over the same number of ranks each, most ranks first: each is a communicator.
fn by_ranks<T: Copy>(all: &[T], ranks: impl Fn(&T) -> u32) -> Vec<Vec<T>> {
    let sizes: Vec<u32> =
        all.iter().map(&ranks).sorted_unstable_by_key(|size| std::cmp::Reverse(*size)).dedup().collect();
    if sizes.is_empty() {
        // An arm without points still has its communicator.
        return vec![Vec::new()];
    }
    sizes.into_iter().map(|size| all.iter().copied().filter(|of| ranks(of) == size).collect()).collect()
}

/// Whether an arm sets something that is known to hang machines.
fn may_hang(arm: &Arm) -> bool {
    arm.env.iter().any(|(name, value)| knob::find(name).is_some_and(|knob| knob.risk_of(value) == Risk::HangProne))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backend::Sink;
    use crate::collective::{Collective, DataType, Form};
    use crate::evidence::Objective;
    use crate::record::{CellMeasurement, Effective, Outcome, OutcomeKind, Point, PointPhase, Settings, Workload};
    use crate::search::Exhaustive;
    use crate::wording::fixtures::arm;

    /// A backend that follows a script: factors per arm, and how some arms fail.
    struct Scripted {
        factors: BTreeMap<String, f64>,
        failures: BTreeMap<String, OutcomeKind>,
        launches: Vec<Vec<String>>,
    }

    impl Backend for Scripted {
        fn run(&mut self, plan: &LaunchPlan, sink: Sink<'_>) -> Result<(), BackendError> {
            self.launches.push(plan.communicators.iter().map(|communicator| communicator.arm.name.clone()).collect());
            let _ =
                sink(Event::LaunchStarted { launch: plan.launch, block: plan.block, env: plan.environment.clone() });
            let mut outcome = None;
            for (index, communicator) in plan.communicators.iter().enumerate() {
                let arm = &communicator.arm;
                if let Some(kind) = self.failures.get(&arm.name) {
                    let failed = Outcome { kind: *kind, detail: "as scripted".to_owned() };
                    outcome = Some(failed.clone());
                    let _ = sink(Event::CellFailed {
                        arm: arm.id.clone(),
                        point: None,
                        block: plan.block,
                        launch: plan.launch,
                        outcome: failed,
                        duration_s: 1.0,
                    });
                    // A worker that fails takes its launch with it.
                    break;
                }
                for point in &communicator.points {
                    let wobble = 1.0 + 0.001 * f64::from(plan.launch % 5);
                    let us = 10.0 * wobble * self.factors.get(&arm.name).copied().unwrap_or(1.0);
                    let _ = sink(Event::CellMeasured(CellMeasurement {
                        arm: arm.id.clone(),
                        point: *point,
                        block: plan.block,
                        launch: plan.launch,
                        communicator: index as u32,
                        position: index as u32,
                        collectives_per_replay: 64,
                        replays_us: vec![us, us * 1.001],
                        effective: Effective::default(),
                        flags: Vec::new(),
                        call: None,
                        duration_s: 0.1,
                    }));
                }
            }
            let _ = sink(Event::LaunchEnded {
                launch: plan.launch,
                duration_s: 1.0,
                set_by_environment: Vec::new(),
                outcome,
            });
            Ok(())
        }

        fn expected_s(&self, _plan: &LaunchPlan) -> f64 {
            1.0
        }
    }

    fn context(arms: Vec<Arm>) -> SearchContext {
        let point = Point {
            collective: Collective::AllReduce,
            dtype: DataType::Bf16,
            bytes: 57_344,
            ranks: 2,
            calls_per_pass: 123,
            batch: 1,
            weight: 1.0,
            phase: PointPhase::Decode,
            measured: true,
            origin: String::new(),
            form: Form::default(),
        };
        let key = point.key();
        let workload = Workload {
            format: 1,
            model: "m".to_owned(),
            engine: "none".to_owned(),
            tensor_parallel: 2,
            verify_tokens: 1,
            points: vec![point],
            guard: Vec::new(),
            assumptions: Vec::new(),
            ..Workload::default()
        };
        SearchContext {
            arms,
            default: ArmId("default".to_owned()),
            objective: Objective::of(&workload).unwrap(),
            points: vec![key],
            settings: Settings { final_launches: Some(6), cell_time_ms: 1.0, ..Settings::default() },
            most_trial_launches: None,
            trial: None,
            most_launches: None,
            gate: None,
            budget_s: None,
            earlier: Vec::new(),
        }
    }

    fn run(context: &SearchContext, backend: &mut Scripted) -> (Ending, Evidence) {
        let folder = tempfile::tempdir().unwrap();
        let mut journal = Journal::create(folder.path()).unwrap();
        let opened = Event::RunOpened {
            format: 1,
            tool_version: String::new(),
            seed: 1,
            identity: String::new(),
            simulated: true,
        };
        journal.append(0.0, opened).unwrap();
        let mut evidence = Evidence::default();
        let ending = Campaign {
            context,
            seed: Seed(1),
            nccl_version: NcclVersion::v2(28, 9),
            pinned: &BTreeMap::new(),
            stop: &|| Stop::No,
            listener: &mut |_| {},
        }
        .run(&Exhaustive, backend, &mut journal, &mut Clock::virtual_time(), &mut evidence)
        .unwrap();
        let lines = crate::journal::read(folder.path()).unwrap();
        assert_eq!(Evidence::of(&lines).measured_cells(), evidence.measured_cells(), "the journal holds it all");
        (ending, evidence)
    }

    fn arms() -> Vec<Arm> {
        vec![
            arm("default", &[]),
            arm("thresholds", &[("NCCL_THREAD_THRESHOLDS", "-1-1-1+2")]),
            arm("ll", &[("NCCL_PROTO", "allreduce:LL")]),
            arm("channels", &[("NCCL_MIN_NCHANNELS", "16")]),
        ]
    }

    #[test]
    fn arms_that_a_living_worker_can_change_share_a_launch_only_while_searching() {
        let context = context(arms());
        let factors = BTreeMap::from([("channels".to_owned(), 0.8)]);
        let mut backend = Scripted { factors, failures: BTreeMap::new(), launches: Vec::new() };
        let (ending, evidence) = run(&context, &mut backend);
        assert_eq!(ending, Ending::Complete);
        let mut first_block: Vec<Vec<String>> = backend.launches[..2].to_vec();
        for launch in &mut first_block {
            launch.sort();
        }
        first_block.sort();
        assert_eq!(first_block, [vec!["channels"], vec!["default", "ll", "thresholds"]]);
        assert_eq!(evidence.finalists().unwrap().0, [ArmId("channels".to_owned())]);
        let finals = &backend.launches[6..];
        assert_eq!(finals.len(), 12, "six paired launches");
        assert!(finals.iter().all(|launch| launch.len() == 1), "one arm a launch: {finals:?}");
    }

    /// The launches of a search's block, each as its communicators, each as the names of its arms.
    fn planned(context: &SearchContext, block: u32) -> Vec<Vec<Vec<String>>> {
        let campaign = Campaign {
            context,
            seed: Seed(1),
            nccl_version: NcclVersion::v2(28, 9),
            pinned: &BTreeMap::new(),
            stop: &|| Stop::No,
            listener: &mut |_| {},
        };
        let arms: Vec<ArmId> = context.arms.iter().map(|arm| arm.id.clone()).collect();
        let plans = campaign.plan_block(block, Phase::Search, &arms, &mut 0);
        let mut launches: Vec<Vec<Vec<String>>> = plans
            .iter()
            .map(|plan| {
                let names = |shared: &[CommunicatorPlan]| shared.iter().map(|plan| plan.arm.name.clone()).collect();
                plan.shared().map(names).collect()
            })
            .collect();
        launches.sort_by_key(Vec::len);
        launches
    }

    fn levelled(level: CheapestLevel) -> SearchContext {
        let ring_ll = [("NCCL_ALGO", "Ring"), ("NCCL_PROTO", "LL")];
        let with = |name: &str, more: &[(&str, &str)]| arm(name, &[ring_ll.as_slice(), more].concat());
        let mut context = context(vec![
            arm("default", &[]),
            arm("thresholds", &[("NCCL_THREAD_THRESHOLDS", "-1-1-1+2")]),
            with("ring", &[]),
            with("eight", &[("NCCL_MIN_NCHANNELS", "8"), ("NCCL_MAX_NCHANNELS", "8")]),
            with("spread", &[("NCCL_THREAD_THRESHOLDS", "-1-1-1+2")]),
            with("threads", &[("NCCL_NTHREADS", "256")]),
        ]);
        context.settings.cheapest_level = level;
        context
    }

    #[test]
    fn the_costliest_level_changes_least_and_the_default_is_alone() {
        for block in 0..8 {
            let [threads, rest] = planned(&levelled(CheapestLevel::Call), block).try_into().expect("two launches");
            assert_eq!(threads, [["threads"]]);
            assert_eq!(rest.len(), 4, "{rest:?}");
            // Where one without a plugin was made before, NCCL looks for none any more.
            let (shared, others) = rest.split_at(2);
            let sorted = |communicators: &[Vec<String>]| {
                let mut all: Vec<Vec<&str>> = communicators
                    .iter()
                    .map(|arms| arms.iter().map(String::as_str).sorted_unstable().collect())
                    .collect();
                all.sort();
                all.into_iter().map(|arms| arms.join(" ")).collect::<Vec<_>>()
            };
            assert_eq!(sorted(shared), ["eight ring", "spread"]);
            assert_eq!(sorted(others), ["default", "thresholds"]);
        }
        let count = |level| planned(&levelled(level), 0).iter().map(Vec::len).collect::<Vec<_>>();
        assert_eq!(count(CheapestLevel::Communicator), [1, 1, 4]);
        assert_eq!(count(CheapestLevel::Launch), [1; 6]);
    }

    #[test]
    fn what_a_plugin_cannot_stand_for_at_every_point_has_a_communicator_of_its_own() {
        let launches = |points: &[PointKey]| {
            let mut context = levelled(CheapestLevel::Call);
            context.points = points.to_vec();
            planned(&context, 0).iter().map(Vec::len).collect::<Vec<_>>()
        };
        let point = |collective, ranks| PointKey::usual(collective, DataType::Bf16, 57_344, ranks);
        let reduce = point(Collective::AllReduce, 2);
        assert_eq!(launches(&[reduce, point(Collective::AllGather, 2)]), [1, 4]);
        // No plugin is asked about sending and receiving, whose channels are those of the communicator.
        assert_eq!(launches(&[reduce, point(Collective::SendRecv, 2)]), [1, 1, 4]);
        // Groups of two sizes want two communicators each.
        assert_eq!(launches(&[reduce, point(Collective::AllReduce, 4)]), [2, 2, 8]);
    }

    #[test]
    fn a_crashing_arm_costs_its_own_measurement_and_nothing_else() {
        let context = context(arms());
        let failures = BTreeMap::from([("ll".to_owned(), OutcomeKind::Crashed)]);
        let factors = BTreeMap::from([("thresholds".to_owned(), 0.9)]);
        let mut backend = Scripted { factors, failures, launches: Vec::new() };
        let (ending, evidence) = run(&context, &mut backend);
        assert_eq!(ending, Ending::Complete);
        let blocks = |name: &str| evidence.values(Phase::Search, &ArmId(name.to_owned()), context.points[0]).len();
        assert_eq!((blocks("default"), blocks("thresholds"), blocks("channels")), (3, 3, 3));
        assert_eq!(evidence.failures_of(&ArmId("ll".to_owned())).len(), 2, "tried again once, then left alone");
        assert_eq!(evidence.finalists().unwrap().0, [ArmId("thresholds".to_owned())]);
    }

    #[test]
    fn a_default_that_fails_ends_the_campaign() {
        let context = context(arms());
        let failures = BTreeMap::from([("default".to_owned(), OutcomeKind::Refused)]);
        let mut backend = Scripted { factors: BTreeMap::new(), failures, launches: Vec::new() };
        let (ending, evidence) = run(&context, &mut backend);
        assert_eq!(ending, Ending::Complete);
        assert!(evidence.finalists().is_none());
        assert!(backend.launches.len() < 10, "{}", backend.launches.len());
    }

    #[test]
    fn a_finalist_that_only_looked_good_is_dropped_and_the_others_go_on() {
        struct Flattered(Scripted, u32);
        impl Backend for Flattered {
            fn run(&mut self, plan: &LaunchPlan, sink: Sink<'_>) -> Result<(), BackendError> {
                if plan.phase == Phase::Final {
                    self.0.factors.insert("channels".to_owned(), 1.1);
                }
                self.1 += 1;
                self.0.run(plan, sink)
            }

            fn expected_s(&self, _plan: &LaunchPlan) -> f64 {
                1.0
            }
        }
        let mut context = context(arms());
        context.settings.final_launches = Some(12);
        let factors = BTreeMap::from([("channels".to_owned(), 0.8), ("ll".to_owned(), 0.85)]);
        let mut backend = Flattered(Scripted { factors, failures: BTreeMap::new(), launches: Vec::new() }, 0);
        let folder = tempfile::tempdir().unwrap();
        let mut journal = Journal::create(folder.path()).unwrap();
        let mut evidence = Evidence::default();
        Campaign {
            context: &context,
            seed: Seed(1),
            nccl_version: NcclVersion::v2(28, 9),
            pinned: &BTreeMap::new(),
            stop: &|| Stop::No,
            listener: &mut |_| {},
        }
        .run(&Exhaustive, &mut backend, &mut journal, &mut Clock::virtual_time(), &mut evidence)
        .unwrap();
        assert_eq!(evidence.dropped().len(), 1);
        assert_eq!(evidence.dropped()[0].0, ArmId("channels".to_owned()));
        let finals = |name: &str| evidence.values(Phase::Final, &ArmId(name.to_owned()), context.points[0]).len();
        assert_eq!((finals("channels"), finals("ll")), (6, 12));
    }
}
