//! NCCL on this machine's GPUs: one worker process per GPU, fresh ones for every launch.

use std::collections::{BTreeMap, BTreeSet};
use std::io::{Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::time::Duration;

use itertools::Itertools;

use super::simulated::round_us;
use super::{Backend, BackendError, CommunicatorPlan, LaunchPlan, PassPlan, Sink, collectives_per_graph};
use crate::clock::{Clock, Deadline};
use crate::discovery::gpus_answer;
use crate::knob::{self, Proof, Way};
use crate::machine::{Gpu, NcclLibrary, NcclVersion};
use crate::nccl_log::{self, NcclLog, Symptom};
use crate::probe::normal_address;
use crate::process::{ChildEvent, ChildSpec, Exit, Group, Supervisor};
use crate::record::{
    Arm, CellMeasurement, Effective, Event, Flag, GpuState, Outcome, OutcomeKind, PassMeasurement, PassVariant,
    PointKey, SetLine,
};
use crate::worker::protocol::{Answer, FailureKind, Order, PROTOCOL, WORKER_ARGUMENT};

/// How long each step may take before the launch is given up. A context on a cold machine with many
/// GPUs takes seconds each; the first use of an algorithm connects every channel.
const OPEN_WAIT: Duration = Duration::from_secs(90);
const JOIN_WAIT: Duration = Duration::from_secs(90);
const PREPARE_WAIT: Duration = Duration::from_secs(60);
const REPLAY_WAIT: Duration = Duration::from_secs(20);
const CLOSE_WAIT: Duration = Duration::from_secs(30);
/// Between a polite end, SIGTERM and SIGKILL.
const GRACE: Duration = Duration::from_secs(2);
/// How often a wait looks whether the user asked for a stop.
const SLICE: Duration = Duration::from_millis(200);
/// After one rank failed, how long the others may take to say why, too.
const ECHO: Duration = Duration::from_millis(300);
/// Timed replays of a cell: enough for a median, few enough for a guard point of a hundred megabytes.
const REPLAYS: (f64, f64) = (8.0, 200.0);
/// Planning, first run and capture of a pass of hundreds of products and collectives.
const PASS_WAIT: Duration = Duration::from_secs(120);
/// Milliseconds of timed passes per case, and how many at least and at most.
const PASS_TIME_MS: f64 = 400.0;
const PASS_RUNS: (f64, f64) = (5.0, 60.0);
/// What NCCL is asked to log: enough to read back what ran, nothing per replay.
const DEBUG_SUBSYSTEMS: &str = "INIT,ENV,TUNING";

/// What a backend on GPUs needs to know.
pub struct NcclSetup {
    /// Starts and ends workers.
    pub supervisor: Rc<Supervisor>,
    /// The environment of every worker: the allowed part of the user's, the engine's variables, the
    /// pins. The arm's variables come on top.
    pub environment: BTreeMap<String, String>,
    /// The GPUs used, in rank order.
    pub gpus: Vec<Gpu>,
    /// The library.
    pub nccl: NcclLibrary,
    /// libcublasLt for forward passes, by path or by the loader's name.
    pub cublaslt: String,
    /// Where captured logs of failed launches go.
    pub logs: PathBuf,
}

/// The backend on GPUs.
pub struct NcclBackend {
    setup: NcclSetup,
}

/// Why a step did not come to its end.
struct Broken {
    outcome: Outcome,
    /// A hang or a crash may leave a GPU that spins for ever.
    gpu_suspect: bool,
}

impl NcclBackend {
    /// A backend; nothing is started before the first launch.
    pub const fn new(setup: NcclSetup) -> Self {
        Self { setup }
    }

    fn version(&self) -> NcclVersion {
        NcclVersion::from_code(self.setup.nccl.version)
    }
}

impl Backend for NcclBackend {
    fn run(&mut self, plan: &LaunchPlan, sink: Sink<'_>) -> Result<(), BackendError> {
        let started = Event::LaunchStarted { launch: plan.launch, block: plan.block, env: plan.environment.clone() };
        if sink(started).is_break() {
            return Ok(());
        }
        let clock = Clock::real();
        let mut launch = Launch::start(self, plan)?;
        let broken = launch.measure(sink).err();
        let set_by_environment = launch.set_lines();
        launch.end(broken.as_ref(), &self.setup.logs)?;
        let suspect = broken.as_ref().is_some_and(|broken| broken.gpu_suspect);
        let _ = sink(Event::LaunchEnded {
            launch: plan.launch,
            duration_s: clock.elapsed_s(),
            set_by_environment,
            outcome: broken.map(|broken| broken.outcome),
        });
        if suspect {
            let devices: Vec<u32> = self.setup.gpus.iter().map(|gpu| gpu.index).collect();
            gpus_answer(&self.setup.supervisor, &devices, &self.setup.environment)
                .map_err(|error| BackendError::GpuUnusable(error.to_string()))?;
        }
        Ok(())
    }

    fn expected_s(&self, plan: &LaunchPlan) -> f64 {
        // Seen on two H200: 2.5 s for processes, contexts and the first communicator, 0.5 s for each
        // further one with its connections, and the data checks of big messages.
        let cells: f64 = plan
            .communicators
            .iter()
            .flat_map(|communicator| &communicator.points)
            .map(|point| plan.cell_time_ms / 1000.0 + 0.03 + point.bytes as f64 / 4e8)
            .sum();
        let passes: usize = plan.communicators.iter().map(|communicator| communicator.passes.len()).sum();
        2.5 + 0.5 * plan.communicators.len() as f64 + cells + 2.0 * passes as f64
    }
}

/// One launch under way.
struct Launch<'a> {
    backend: &'a NcclBackend,
    plan: &'a LaunchPlan,
    group: Group,
    /// NCCL's log files live here and go with it.
    folder: tempfile::TempDir,
    ranks: usize,
    /// Everything each rank's NCCL logged in this launch.
    logs: Vec<NcclLog>,
}

impl<'a> Launch<'a> {
    fn start(backend: &'a NcclBackend, plan: &'a LaunchPlan) -> Result<Self, BackendError> {
        let system = |what: &str, error: &dyn std::fmt::Display| BackendError::System(format!("{what}: {error}"));
        let folder = tempfile::Builder::new()
            .prefix("nccltune-")
            .tempdir()
            .map_err(|error| system("could not make a folder for NCCL's logs", &error))?;
        let ranks = backend.setup.gpus.len();
        let several = plan.communicators.len() > 1;
        let specs = (0..ranks)
            .map(|rank| {
                let mut environment = backend.setup.environment.clone();
                environment.extend(plan.environment.clone());
                environment.insert("NCCL_DEBUG".to_owned(), "INFO".to_owned());
                environment.insert("NCCL_DEBUG_SUBSYS".to_owned(), DEBUG_SUBSYSTEMS.to_owned());
                environment.insert("NCCL_DEBUG_FILE".to_owned(), text_of(&log_path(folder.path(), rank)));
                environment.insert("CUDA_DEVICE_ORDER".to_owned(), "PCI_BUS_ID".to_owned());
                if several {
                    // NCCL's monitoring thread reads the environment; it must not run while a living
                    // worker changes it between communicators, whoever else asked for it. Finals keep it,
                    // as servers do.
                    environment.insert("NCCL_RAS_ENABLE".to_owned(), "0".to_owned());
                }
                ChildSpec { arguments: vec![WORKER_ARGUMENT.to_owned()], environment }
            })
            .collect();
        let group =
            backend.setup.supervisor.start_group(specs).map_err(|error| BackendError::System(error.to_string()))?;
        let logs = (0..ranks).map(|_| NcclLog::default()).collect();
        Ok(Self { backend, plan, group, folder, ranks, logs })
    }

    fn folder(&self) -> &Path {
        self.folder.path()
    }

    /// Carries out the plan. Every failure is told as an event of the arm it happened to.
    fn measure(&mut self, sink: Sink<'_>) -> Result<(), Broken> {
        let clock = Clock::real();
        let plan = self.plan;
        let Some(first) = plan.communicators.first() else { return Ok(()) };
        if let Err(broken) = self.hello() {
            let _ = sink(self.failed(&first.arm, None, &broken, clock.elapsed_s()));
            return Err(broken);
        }
        let mut position = 0;
        for (index, communicator) in plan.communicators.iter().enumerate() {
            let clock = Clock::real();
            let mut point_now = None;
            let measured = self.measure_communicator(communicator, index, &mut position, &mut point_now, sink);
            match measured {
                Ok(true) => {}
                Ok(false) => return Ok(()),
                Err(broken) => {
                    let _ = sink(self.failed(&communicator.arm, point_now, &broken, clock.elapsed_s()));
                    return Err(broken);
                }
            }
        }
        self.step(|_| Order::Finish, CLOSE_WAIT).map(|_| ())
    }

    fn failed(&self, arm: &Arm, point: Option<PointKey>, broken: &Broken, duration_s: f64) -> Event {
        Event::CellFailed {
            arm: arm.id.clone(),
            point,
            block: self.plan.block,
            launch: self.plan.launch,
            outcome: broken.outcome.clone(),
            duration_s,
        }
    }

    fn hello(&mut self) -> Result<(), Broken> {
        let setup = &self.backend.setup;
        let largest_bytes = self
            .plan
            .communicators
            .iter()
            .flat_map(|communicator| &communicator.points)
            .map(|point| point.bytes)
            .max()
            .unwrap_or(0);
        let folder = self.folder().to_owned();
        let hello = |rank: usize| Order::Hello {
            protocol: PROTOCOL,
            rank: rank as u32,
            ranks: setup.gpus.len() as u32,
            device: setup.gpus[rank].index,
            nccl_path: setup.nccl.path.clone(),
            log_path: text_of(&log_path(&folder, rank)),
            data_seed: self.plan.data_seed,
            largest_bytes,
        };
        let orders: Vec<Order> = (0..self.ranks).map(hello).collect();
        let answers = self.step(|rank| orders[rank].clone(), OPEN_WAIT)?;
        for (rank, answer) in answers.into_iter().enumerate() {
            let Answer::Ready { nccl_version, pci_bus_id, .. } = answer else {
                return Err(unexpected(rank, &answer));
            };
            let gpu = &self.backend.setup.gpus[rank];
            if nccl_version != self.backend.setup.nccl.version || normal_address(&pci_bus_id) != gpu.pci_bus_id {
                let detail = format!(
                    "rank {rank} found NCCL {nccl_version} and a GPU at {pci_bus_id}, expected NCCL {} at {}",
                    self.backend.setup.nccl.version, gpu.pci_bus_id
                );
                return Err(Broken { outcome: Outcome { kind: OutcomeKind::Refused, detail }, gpu_suspect: false });
            }
        }
        Ok(())
    }

    /// One arm at its points. `Ok(false)` if the sink asked for an end.
    fn measure_communicator(
        &mut self,
        communicator: &CommunicatorPlan,
        index: usize,
        position: &mut u32,
        point_now: &mut Option<PointKey>,
        sink: Sink<'_>,
    ) -> Result<bool, Broken> {
        let set = Order::SetVariables { variables: communicator.variables.clone() };
        for (rank, answer) in self.step(|_| set.clone(), CLOSE_WAIT)?.into_iter().enumerate() {
            let Answer::VariablesSet = answer else { return Err(unexpected(rank, &answer)) };
        }
        let unique_id = self.unique_id()?;
        // What this communicator logs, beside what the launch has logged so far.
        let mut own = NcclLog::default();
        let open = Order::OpenCommunicator { unique_id };
        let answers = self.step(|_| open.clone(), JOIN_WAIT)?;
        for (rank, answer) in answers.into_iter().enumerate() {
            let Answer::Opened { log } = answer else { return Err(unexpected(rank, &answer)) };
            self.note_log(rank, &log, &mut own);
        }
        for point in &communicator.points {
            *point_now = Some(*point);
            let clock = Clock::real();
            let (collectives, replays_us) = self.measure_cell(*point, &mut own)?;
            let effective = effective_of(&own, *point);
            let flags = self.flags(&communicator.arm, *point, &effective, &own);
            let measured = Event::CellMeasured(CellMeasurement {
                arm: communicator.arm.id.clone(),
                point: *point,
                block: self.plan.block,
                launch: self.plan.launch,
                communicator: index as u32,
                position: *position,
                collectives_per_replay: collectives,
                replays_us,
                effective,
                flags,
                duration_s: round_us(clock.elapsed_s()),
            });
            *position += 1;
            if sink(measured).is_break() {
                return Ok(false);
            }
        }
        *point_now = None;
        for pass in &communicator.passes {
            let measured = self.measure_pass(&communicator.arm, pass, &mut own)?;
            if sink(Event::PassMeasured(measured)).is_break() {
                return Ok(false);
            }
        }
        self.step(|_| Order::CloseCommunicator, CLOSE_WAIT)?;
        Ok(true)
    }

    fn unique_id(&mut self) -> Result<String, Broken> {
        self.send(0, &Order::UniqueId);
        match self.collect(&[0], Order::UniqueId.step(), CLOSE_WAIT)?.pop() {
            Some(Answer::UniqueId { unique_id }) => Ok(unique_id),
            Some(other) => Err(unexpected(0, &other)),
            None => Err(interrupted()),
        }
    }

    /// Times one cell. Returns the collectives per replay and, per replay, the slowest rank's time
    /// over them.
    fn measure_cell(&mut self, point: PointKey, own: &mut NcclLog) -> Result<(u32, Vec<f64>), Broken> {
        let collectives = collectives_per_graph(point);
        let answers = self.step(|_| Order::Prepare { point, collectives }, PREPARE_WAIT)?;
        let mut slowest_us: f64 = 0.0;
        for (rank, answer) in answers.into_iter().enumerate() {
            let Answer::Prepared { replay_us, log } = answer else { return Err(unexpected(rank, &answer)) };
            slowest_us = slowest_us.max(replay_us);
            self.note_log(rank, &log, own);
        }
        if !(slowest_us.is_finite() && slowest_us > 0.0) {
            return Err(broken(OutcomeKind::Refused, format!("a warm-up replay took {slowest_us} us"), false));
        }
        let replays = (self.plan.cell_time_ms * 1000.0 / slowest_us).clamp(REPLAYS.0, REPLAYS.1) as u32;
        let wait = REPLAY_WAIT + Duration::from_micros((slowest_us * f64::from(replays) * 10.0) as u64);
        let answers = self.step(|_| Order::Replay { replays }, wait)?;
        let mut slowest = vec![0.0_f64; replays as usize];
        for (rank, answer) in answers.into_iter().enumerate() {
            let Answer::Replayed { replays_us } = answer else { return Err(unexpected(rank, &answer)) };
            if replays_us.len() != slowest.len() || replays_us.iter().any(|us| !us.is_finite() || *us <= 0.0) {
                return Err(broken(OutcomeKind::Refused, format!("rank {rank} sent impossible timings"), false));
            }
            for (slowest, us) in slowest.iter_mut().zip(replays_us) {
                *slowest = slowest.max(us);
            }
        }
        Ok((collectives, slowest.into_iter().map(|us| round_us(us / f64::from(collectives))).collect()))
    }

    /// Times one forward pass in its variants.
    fn measure_pass(&mut self, arm: &Arm, pass: &PassPlan, own: &mut NcclLog) -> Result<PassMeasurement, Broken> {
        let clock = Clock::real();
        let order = Order::PreparePass {
            steps: pass.steps.clone(),
            stream: pass.stream,
            captured: pass.case.captured,
            cublaslt_path: self.backend.setup.cublaslt.clone(),
        };
        let answers = self.step(|_| order.clone(), PASS_WAIT)?;
        let (mut slowest_us, mut arena) = (0.0_f64, u64::MAX);
        for (rank, answer) in answers.into_iter().enumerate() {
            let Answer::PassPrepared { replay_us, arena_bytes, log, .. } = answer else {
                return Err(unexpected(rank, &answer));
            };
            slowest_us = slowest_us.max(replay_us);
            arena = arena.min(arena_bytes);
            self.note_log(rank, &log, own);
        }
        if !(slowest_us.is_finite() && slowest_us > 0.0) {
            return Err(broken(OutcomeKind::Refused, format!("a warm-up pass took {slowest_us} us"), false));
        }
        let (runs_ms, states) = self.time_pass(PassVariant::Full, slowest_us, PASS_TIME_MS)?;
        let (without_collectives_ms, _) =
            self.time_pass(PassVariant::WithoutCollectives, slowest_us, PASS_TIME_MS / 3.0)?;
        let crowded_ms = if pass.case.captured {
            self.time_pass(PassVariant::Crowded, slowest_us, PASS_TIME_MS / 3.0)?.0
        } else {
            Vec::new()
        };
        Ok(PassMeasurement {
            arm: arm.id.clone(),
            pass: pass.case.key(),
            block: self.plan.block,
            launch: self.plan.launch,
            runs_ms,
            without_collectives_ms,
            crowded_ms,
            arena_bytes: arena,
            states,
            duration_s: round_us(clock.elapsed_s()),
        })
    }

    /// Runs of a variant for about so many milliseconds: slowest rank of each, and what the GPUs did.
    fn time_pass(
        &mut self,
        variant: PassVariant,
        slowest_us: f64,
        time_ms: f64,
    ) -> Result<(Vec<f64>, Vec<GpuState>), Broken> {
        let replays = (time_ms * 1000.0 / slowest_us).clamp(PASS_RUNS.0, PASS_RUNS.1) as u32;
        let wait = REPLAY_WAIT + Duration::from_micros((slowest_us * f64::from(replays) * 10.0) as u64);
        let answers = self.step(|_| Order::ReplayPass { variant, replays }, wait)?;
        let mut slowest = vec![0.0_f64; replays as usize];
        let mut states = Vec::new();
        for (rank, answer) in answers.into_iter().enumerate() {
            let Answer::PassReplayed { replays_us, state } = answer else { return Err(unexpected(rank, &answer)) };
            if replays_us.len() != slowest.len() || replays_us.iter().any(|us| !us.is_finite() || *us <= 0.0) {
                return Err(broken(OutcomeKind::Refused, format!("rank {rank} sent impossible timings"), false));
            }
            for (slowest, us) in slowest.iter_mut().zip(replays_us) {
                *slowest = slowest.max(us);
            }
            states.extend(state);
        }
        // Microseconds to the nanosecond, as milliseconds.
        Ok((slowest.into_iter().map(|us| round_us(us).max(0.001) / 1000.0).collect(), states))
    }

    fn note_log(&mut self, rank: usize, text: &str, own: &mut NcclLog) {
        for line in text.lines() {
            self.logs[rank].add_line(line);
            // Only the first rank logs which algorithm ran.
            if rank == 0 {
                own.add_line(line);
            }
        }
    }

    /// What was odd about a cell: variables that some rank's NCCL did not read, and an algorithm or
    /// protocol that is not among those the arm allows.
    fn flags(&self, arm: &Arm, point: PointKey, effective: &Effective, own: &NcclLog) -> Vec<Flag> {
        let version = self.backend.version();
        let mut flags = BTreeSet::new();
        for (name, value) in &arm.env {
            let reading = knob::read_as_nccl(name, value, version);
            let proof = knob::find(name)
                .and_then(|knob| knob.routes(version).find(|route| route.way == Way::LaunchEnvironment))
                .map_or(Proof::SetByEnvironment, |route| route.proof);
            // A living worker's variables are read at every communicator; the others once a process.
            let living = !self.plan.environment.contains_key(name);
            let proven = self.logs.iter().enumerate().all(|(rank, log)| {
                let log = if living && rank == 0 { own } else { log };
                log.proves(name, proof, &reading).unwrap_or(true)
            });
            if !proven {
                flags.insert(Flag::Ignored);
            }
            if let knob::ReadValue::Lists(lists) = &reading.value
                && let Some(allowed) = lists.selected_for(point.collective.log_name())
            {
                let ran = match name.as_str() {
                    "NCCL_ALGO" => effective.algo.as_deref(),
                    "NCCL_PROTO" => effective.proto.as_deref(),
                    _ => None,
                };
                if ran.is_some_and(|ran| !allowed.iter().any(|word| normal_word(word) == normal_word(ran))) {
                    flags.insert(Flag::Substituted);
                }
            }
        }
        flags.into_iter().collect()
    }

    /// "set by environment" lines that every rank wrote.
    fn set_lines(&self) -> Vec<SetLine> {
        let Some((first, others)) = self.logs.split_first() else { return Vec::new() };
        first
            .set_by_environment
            .iter()
            .filter(|line| !line.variable.starts_with("NCCL_DEBUG"))
            .filter(|line| others.iter().all(|log| log.set_by_environment.contains(line)))
            .cloned()
            .sorted()
            .dedup()
            .collect()
    }

    fn send(&self, rank: usize, order: &Order) {
        // Orders are this crate's own types and always serialize.
        if let Ok(line) = serde_json::to_string(order) {
            self.group.send(rank, line);
        }
    }

    /// Sends an order to every rank and waits for every answer.
    fn step(&mut self, order: impl Fn(usize) -> Order, wait: Duration) -> Result<Vec<Answer>, Broken> {
        let ranks: Vec<usize> = (0..self.ranks).collect();
        for rank in &ranks {
            self.send(*rank, &order(*rank));
        }
        let step = order(0).step();
        self.collect(&ranks, step, wait)
    }

    fn ended(&self, rank: usize, exit: Exit, step: &str) -> Broken {
        let words = self.group.last_log_lines(rank, 3);
        let mut detail = format!("rank {rank} ended with {exit} while {step}");
        if !words.is_empty() {
            detail.push_str(&format!("; last words: {words}"));
        }
        broken(OutcomeKind::Crashed, detail, true)
    }

    fn collect(&mut self, ranks: &[usize], step: &str, wait: Duration) -> Result<Vec<Answer>, Broken> {
        let deadline = Deadline::after(wait);
        let mut answers: BTreeMap<usize, Answer> = BTreeMap::new();
        // A rank may have ended between its last answer and this step; nothing more is heard of it then.
        if let Some((rank, exit)) = ranks.iter().find_map(|rank| Some((*rank, self.group.exit_of(*rank)?))) {
            return Err(self.ended(rank, exit, step));
        }
        while answers.len() < ranks.len() {
            let slice = Deadline::after(SLICE.min(deadline.remaining()));
            let event = self.group.receive(slice);
            // Looked at after receiving: workers that the user had killed did not crash.
            if self.backend.setup.supervisor.killed() {
                return Err(interrupted());
            }
            match event {
                Some(ChildEvent::Frame { child, line }) => match serde_json::from_str(&line) {
                    Ok(Answer::Failed { failure, detail, log }) => {
                        return Err(self.explain_failure(child, step, failure, &detail, &log));
                    }
                    Ok(answer) => {
                        answers.insert(child, answer);
                    }
                    Err(error) => {
                        return Err(broken(
                            OutcomeKind::Crashed,
                            format!("rank {child} answered nonsense while {step}: {error}"),
                            true,
                        ));
                    }
                },
                Some(ChildEvent::BadFrame { child, reason }) => {
                    return Err(broken(OutcomeKind::Crashed, format!("rank {child} while {step}: {reason}"), true));
                }
                // A worker that was told to finish ends right after its answer.
                Some(ChildEvent::Exited { child, .. }) if answers.contains_key(&child) => {}
                Some(ChildEvent::Exited { child, exit }) => return Err(self.ended(child, exit, step)),
                None if deadline.is_over() => {
                    let silent = ranks.iter().filter(|rank| !answers.contains_key(rank)).join(", ");
                    return Err(broken(
                        OutcomeKind::TimedOut,
                        format!("no answer from rank {silent} within {} s while {step}", wait.as_secs()),
                        true,
                    ));
                }
                None => {}
            }
        }
        Ok(ranks.iter().filter_map(|rank| answers.remove(rank)).collect())
    }

    /// Turns a worker's failure into an outcome. The rank that answers first is not always the one
    /// with the cause, so the others get a moment to say theirs.
    fn explain_failure(&mut self, rank: usize, step: &str, failure: FailureKind, detail: &str, log: &str) -> Broken {
        let mut own = NcclLog::default();
        self.note_log(rank, log, &mut own);
        let parsed = nccl_log::parse(log);
        let mut others = Vec::new();
        let deadline = Deadline::after(ECHO);
        while let Some(event) = self.group.receive(deadline) {
            if let ChildEvent::Frame { child, line } = event
                && let Ok(Answer::Failed { detail: other, .. }) = serde_json::from_str(&line)
                && other != detail
            {
                others.push(format!("rank {child}: {other}"));
            }
        }
        let symptom = |wanted: Symptom| parsed.symptoms.contains(&wanted);
        let kind = match failure {
            FailureKind::OutOfMemory => OutcomeKind::OutOfMemory,
            FailureKind::WrongResult => OutcomeKind::WrongResult,
            FailureKind::Unsupported | FailureKind::CublasLt => OutcomeKind::Unsupported,
            FailureKind::Cuda => OutcomeKind::Crashed,
            FailureKind::Nccl if symptom(Symptom::OutOfMemory) || symptom(Symptom::SharedMemoryFailed) => {
                OutcomeKind::OutOfMemory
            }
            FailureKind::Nccl | FailureKind::Protocol => OutcomeKind::Refused,
        };
        let mut text = format!("rank {rank} while {step}: {detail}");
        if let Some(warning) = parsed.warnings.first() {
            text.push_str(&format!("; NCCL says: {warning}"));
        }
        for other in others {
            text.push_str(&format!("; {other}"));
        }
        Broken {
            outcome: Outcome { kind, detail: text.chars().take(2000).collect() },
            gpu_suspect: matches!(failure, FailureKind::Cuda | FailureKind::WrongResult),
        }
    }

    /// Ends the workers; keeps what they printed where something went wrong.
    fn end(self, broken: Option<&Broken>, logs: &Path) -> Result<(), BackendError> {
        let mut kept = Vec::new();
        if broken.is_some() {
            for rank in 0..self.ranks {
                kept.push((rank, self.group.log(rank), bounded_log(&log_path(self.folder(), rank))));
            }
        }
        let launch = self.plan.launch;
        let exits = self.group.stop(GRACE);
        for (rank, printed, nccl) in kept {
            // Logs help a person; a run does not fail for want of them.
            let path = logs.join(format!("launch-{launch:04}-rank-{rank}.log"));
            let _ = fs_err::create_dir_all(logs);
            let _ = fs_err::write(path, format!("{printed}\n--- NCCL's log ---\n{nccl}"));
        }
        if exits.iter().any(Option::is_none) {
            return Err(BackendError::GpuUnusable(
                "a worker process could not be ended even by SIGKILL; the driver holds it".to_owned(),
            ));
        }
        Ok(())
    }
}

fn log_path(folder: &Path, rank: usize) -> PathBuf {
    folder.join(format!("rank-{rank}.log"))
}

fn text_of(path: &Path) -> String {
    path.to_string_lossy().into_owned()
}

/// The last 64 KiB of a file.
fn bounded_log(path: &Path) -> String {
    const KEPT: u64 = 64 * 1024;
    let read = || -> std::io::Result<Vec<u8>> {
        let mut file = fs_err::File::open(path)?;
        let length = file.metadata()?.len();
        file.seek(SeekFrom::Start(length.saturating_sub(KEPT)))?;
        let mut bytes = Vec::new();
        file.take(KEPT).read_to_end(&mut bytes)?;
        Ok(bytes)
    };
    String::from_utf8_lossy(&read().unwrap_or_default()).into_owned()
}

fn broken(kind: OutcomeKind, detail: String, gpu_suspect: bool) -> Broken {
    Broken { outcome: Outcome { kind, detail }, gpu_suspect }
}

fn interrupted() -> Broken {
    broken(OutcomeKind::Interrupted, "stopped by the user".to_owned(), false)
}

fn unexpected(rank: usize, answer: &Answer) -> Broken {
    broken(OutcomeKind::Crashed, format!("rank {rank} gave an answer to another order: {answer:?}"), true)
}

/// "NVLSTree", "nvls_tree" and "nvls-tree" are one word.
fn normal_word(word: &str) -> String {
    word.chars().filter(char::is_ascii_alphanumeric).map(|c| c.to_ascii_lowercase()).collect()
}

fn effective_of(log: &NcclLog, point: PointKey) -> Effective {
    let operation = log.operation(point.collective, point.bytes);
    Effective {
        transport: log.transport(),
        communicator_channels: log.communicator_channels(),
        algo: operation.map(|operation| operation.algo.clone()).filter(|algo| !algo.is_empty()),
        proto: operation.and_then(|operation| operation.proto.clone()),
        channels: operation.and_then(|operation| operation.channels),
        threads: None,
    }
}
