//! NCCL on this machine's GPUs: one worker process per GPU, fresh ones for every launch.

mod calls;
mod checks;

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};
use std::io::{Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::time::Duration;

use itertools::Itertools;
use nccl_abi::control;

use super::room::Room;
use super::simulated::round_us;
use super::{
    Backend, BackendError, COLLECTIVES_PER_CHECK, CommunicatorPlan, LaunchPlan, PassPlan, Sink, collectives_per_graph,
    expected_on_gpus_s,
};
use crate::clock::{Clock, Deadline};
use crate::discovery::{gpus_answer, keep_contexts};
use crate::file_kind::FileKind;
use crate::knob::{self, Proof, Way};
use crate::machine::{Gpu, NcclLibrary, NcclVersion};
use crate::nccl_log::{self, NcclLog, Symptom};
use crate::probe::normal_address;
use crate::process::{ChildEvent, ChildSpec, Exit, Group, Supervisor};
use crate::record::{
    Arm, ArmId, BufferKind, CellMeasurement, Effective, Event, Flag, GatePass, GatePoint, GpuState, Outcome,
    OutcomeKind, OverlapCheck, PassMeasurement, PassVariant, Phase, PointKey, SetLine,
};
use crate::shared_memory::SharedMemory;
use crate::space;
use crate::worker::protocol::{Answer, FailureKind, Order, PROTOCOL, RankGroup, WORKER_ARGUMENT, WorkPhase};

/// Wait for an order that does no work worth a phase.
const PLAIN_WAIT: Duration = Duration::from_secs(10);
/// Between a polite end, SIGTERM and SIGKILL.
const GRACE: Duration = Duration::from_secs(2);
/// How often a wait looks whether the user asked for a stop.
const SLICE: Duration = Duration::from_millis(200);
/// After one rank failed, how long the others may take to say why, too.
const ECHO: Duration = Duration::from_millis(300);
/// Bytes that are copied, reduced and compared in a second at the very least.
const SLOWEST_BYTES_PER_S: f64 = 50e6;
/// How long the driver may take to give back the memory of processes that were killed, how often it is
/// asked, and how much may be missing: other programs come and go.
const MEMORY_WAIT: Duration = Duration::from_secs(15);
const MEMORY_PAUSE: Duration = Duration::from_millis(500);
const MEMORY_SLACK_MIB: u64 = 512;
/// Timed replays of a cell: enough for a median, few enough for a guard point of a hundred megabytes.
const REPLAYS: (f64, f64) = (8.0, 200.0);
/// What a pass of hundreds of products and collectives may take beside a phase's own limit.
const PASS_EXPECTED: Duration = Duration::from_secs(20);
/// Milliseconds of timed passes per case, and how many at least and at most.
const PASS_TIME_MS: f64 = 400.0;
const PASS_RUNS: (f64, f64) = (5.0, 60.0);
/// What NCCL is asked to log: enough to read back what ran, nothing per replay.
const DEBUG_SUBSYSTEMS: &str = "INIT,ENV,TUNING";
/// The same, and what its search for channels comes to.
const DEBUG_SUBSYSTEMS_WITH_SEARCHES: &str = "INIT,ENV,TUNING,GRAPH";

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
    /// Where the files of arms lie: the run directory, as a path that leads there from anywhere.
    pub files: PathBuf,
    /// The longest any phase of a step may take; the tool's own limits where there is none.
    pub phase_limit: Option<Duration>,
    /// Whose memory messages lie in.
    pub buffers: BufferKind,
}

/// The backend on GPUs.
pub struct NcclBackend {
    setup: NcclSetup,
    budgets: RefCell<Budgets>,
    /// Keeps contexts open, so that the driver is not loaded anew for every launch.
    _keeper: Option<Group>,
    /// The GPUs when no launch uses them.
    idle: Vec<Gpu>,
    /// Heard and asked while a launch borrows the rest.
    room: RefCell<Room>,
    /// What NCCL logs.
    debug_subsystems: &'static str,
    /// Of the last launch's first rank.
    last_log: NcclLog,
    /// What each rank's NCCL logged as its way to others in the last launch.
    transports: RefCell<Vec<Vec<String>>>,
}

/// How long each phase of a worker's step may take before the launch is given up.
///
/// At first that is long: a context on a cold machine with many GPUs takes seconds each, and the first
/// use of an algorithm connects every channel. What a phase took at its longest is remembered, and ten
/// times as much is enough afterwards, so that a hang costs seconds and not minutes.
struct Budgets {
    longest: BTreeMap<WorkPhase, Duration>,
    limit: Option<Duration>,
}

impl Budgets {
    /// Fewest and most seconds for a phase.
    const fn bounds_s(phase: WorkPhase) -> (u64, u64) {
        match phase {
            WorkPhase::Context | WorkPhase::Init => (10, 90),
            WorkPhase::Connect => (5, 60),
            WorkPhase::Capture | WorkPhase::Destroy => (5, 30),
            WorkPhase::Check | WorkPhase::Replay => (4, 20),
            WorkPhase::Plan => (15, 120),
        }
    }

    /// The wait for a phase; `expected` is what its size alone asks for.
    fn wait(&self, phase: WorkPhase, expected: Duration) -> Duration {
        let (fewest, most) = Self::bounds_s(phase);
        let (fewest, most) = (Duration::from_secs(fewest), Duration::from_secs(most));
        let known = self.longest.get(&phase).map_or(most, |longest| *longest * 10 + Duration::from_secs(1));
        let wait = known.clamp(fewest, most) + expected;
        self.limit.map_or(wait, |limit| wait.min(limit))
    }

    fn learn(&mut self, phase: WorkPhase, took: Duration) {
        let longest = self.longest.entry(phase).or_default();
        *longest = took.max(*longest);
    }
}

/// A rank that is waited for.
struct Waiting {
    phase: Option<WorkPhase>,
    since: Clock,
    wait: Duration,
    deadline: Deadline,
}

impl Waiting {
    fn new(phase: Option<WorkPhase>, wait: Duration) -> Self {
        Self { phase, since: Clock::real(), wait, deadline: Deadline::after(wait) }
    }
}

/// What went wrong on one rank.
enum Trouble {
    /// It said so.
    Said { at_us: u64, failure: FailureKind, detail: String, log: String },
    /// It ended.
    Ended(Exit),
    /// It sent what is no answer.
    Nonsense(String),
}

/// Why a step did not come to its end.
struct Broken {
    outcome: Outcome,
    /// A hang or a crash may leave a GPU that spins for ever.
    gpu_suspect: bool,
}

impl NcclBackend {
    /// A backend. Where the driver would be unloaded between launches, a child keeps it loaded from
    /// here on; nothing else is started before the first launch.
    pub fn new(setup: NcclSetup) -> Self {
        let budgets = RefCell::new(Budgets { longest: BTreeMap::new(), limit: setup.phase_limit });
        let sleepy = setup.gpus.iter().any(|gpu| gpu.persistence == Some(false));
        let devices: Vec<u32> = setup.gpus.iter().map(|gpu| gpu.index).collect();
        // Launches are slower without it, nothing else.
        let kept = sleepy.then(|| keep_contexts(&setup.supervisor, &devices, &setup.environment)).flatten();
        let (keeper, idle) = kept.map_or_else(|| (None, setup.gpus.clone()), |(group, gpus)| (Some(group), gpus));
        let version = NcclVersion::from_code(setup.nccl.version);
        let room = RefCell::new(Room::new(SharedMemory::of_this_machine(), version, setup.gpus.len() as u32));
        let debug_subsystems = DEBUG_SUBSYSTEMS;
        Self {
            setup,
            budgets,
            _keeper: keeper,
            idle,
            room,
            debug_subsystems,
            last_log: NcclLog::default(),
            transports: RefCell::default(),
        }
    }

    /// Has NCCL log what its search for channels comes to.
    #[must_use]
    pub fn with_searches_logged(self) -> Self {
        Self { debug_subsystems: DEBUG_SUBSYSTEMS_WITH_SEARCHES, ..self }
    }

    /// What the first rank's NCCL logged in the last launch.
    pub const fn last_log(&self) -> &NcclLog {
        &self.last_log
    }

    /// Proves that each GPU answers and that the memory of a launch that was ended by force is back.
    fn prove_gpus(&self) -> Result<(), BackendError> {
        let devices: Vec<u32> = self.setup.gpus.iter().map(|gpu| gpu.index).collect();
        let deadline = Deadline::after(MEMORY_WAIT);
        loop {
            let seen = gpus_answer(&self.setup.supervisor, &devices, &self.setup.environment)
                .map_err(|error| BackendError::GpuUnusable(error.to_string()))?;
            let used = |gpu: &&Gpu| self.setup.gpus.iter().any(|known| known.pci_bus_id == gpu.pci_bus_id);
            let held = self.idle.iter().filter(used).find_map(|gpu| {
                let now = seen.iter().find(|known| known.pci_bus_id == gpu.pci_bus_id)?;
                let missing_mib = gpu.memory_free_mib?.saturating_sub(now.memory_free_mib?);
                (missing_mib > MEMORY_SLACK_MIB).then(|| {
                    let holders = match now.process_ids.as_slice() {
                        [] => "no process shows as its owner".to_owned(),
                        ids => format!("processes on it: {}", ids.iter().join(", ")),
                    };
                    format!(
                        "GPU {} still holds {missing_mib} MiB more than before, {} s after its workers were ended; {holders}",
                        gpu.index,
                        MEMORY_WAIT.as_secs()
                    )
                })
            });
            match held {
                None => return Ok(()),
                Some(held) if deadline.is_over() => return Err(BackendError::GpuUnusable(held)),
                Some(_) => std::thread::sleep(MEMORY_PAUSE),
            }
        }
    }

    fn version(&self) -> NcclVersion {
        NcclVersion::from_code(self.setup.nccl.version)
    }

    /// A value as a worker must see it: what names a file of the run leads there.
    fn seen(&self, name: &str, value: &str) -> String {
        space::file_in(&self.setup.files, name, value).map_or_else(|| value.to_owned(), |path| text_of(&path))
    }
}

impl Backend for NcclBackend {
    fn run(&mut self, plan: &LaunchPlan, sink: Sink<'_>) -> Result<(), BackendError> {
        let started = Event::LaunchStarted { launch: plan.launch, block: plan.block, env: plan.environment.clone() };
        if sink(started).is_break() {
            return Ok(());
        }
        let clock = Clock::real();
        if self.room.get_mut().refuse(plan, &self.setup.environment, sink) {
            return Ok(());
        }
        let mut launch = Launch::start(self, plan)?;
        let mut heard = |event: Event| {
            self.room.borrow_mut().hear(plan, &event);
            sink(event)
        };
        let broken = launch.measure(&mut heard).err();
        let unusable = launch.unusable.take();
        let set_by_environment = launch.set_lines();
        let ways = launch.logs.iter().map(|log| log.transports.iter().cloned().collect()).collect();
        self.transports.replace(ways);
        let log = launch.logs.drain(..).next().unwrap_or_default();
        launch.end(broken.as_ref(), &self.setup.logs)?;
        self.last_log = log;
        self.room.get_mut().clear(plan.launch, broken.is_some(), &self.setup.logs);
        let suspect = broken.as_ref().is_some_and(|broken| broken.gpu_suspect);
        let _ = sink(Event::LaunchEnded {
            launch: plan.launch,
            duration_s: clock.elapsed_s(),
            set_by_environment,
            outcome: broken.map(|broken| broken.outcome),
        });
        match unusable {
            Some(why) => Err(BackendError::Unusable(why)),
            None if suspect => self.prove_gpus(),
            None => Ok(()),
        }
    }

    fn expected_s(&self, plan: &LaunchPlan) -> f64 {
        expected_on_gpus_s(plan)
    }

    fn notes(&self) -> Vec<String> {
        self.room.borrow().notes()
    }

    fn check_overlap(
        &mut self,
        _arm: &ArmId,
        environment: &BTreeMap<String, String>,
        seconds: f64,
        launch: u32,
        seed: u64,
    ) -> Result<Option<OverlapCheck>, BackendError> {
        self.overlap(environment, seconds, launch, seed).map(Some)
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
    /// Decisions of each rank's tuner plugin that were heard of so far.
    decisions: Vec<u64>,
    /// Why no further launch of this kind makes sense.
    unusable: Option<String>,
}

/// What is being measured, for the event of a failure.
struct Now<'a> {
    arm: &'a Arm,
    point: Option<PointKey>,
}

impl<'a> Launch<'a> {
    fn start(backend: &'a NcclBackend, plan: &'a LaunchPlan) -> Result<Self, BackendError> {
        let system = |what: &str, error: &dyn std::fmt::Display| BackendError::System(format!("{what}: {error}"));
        let folder = tempfile::Builder::new()
            .prefix("nccltune-")
            .tempdir()
            .map_err(|error| system("could not make a folder for NCCL's logs", &error))?;
        let ranks = backend.setup.gpus.len();
        // What the search for channels found is told at length, and asked for by launches that time nothing.
        let subsystems = if plan.cell_count() == 0 { DEBUG_SUBSYSTEMS_WITH_SEARCHES } else { backend.debug_subsystems };
        let changes = plan.communicators.iter().any(|communicator| !communicator.variables.is_empty());
        let has_calls = plan.communicators.iter().any(|communicator| communicator.call.is_some());
        let specs = (0..ranks)
            .map(|rank| {
                let mut environment = backend.setup.environment.clone();
                let seen = |(name, value): (&String, &String)| (name.clone(), backend.seen(name, value));
                environment.extend(plan.environment.iter().map(seen));
                environment.insert("NCCL_DEBUG".to_owned(), "INFO".to_owned());
                environment.insert("NCCL_DEBUG_SUBSYS".to_owned(), subsystems.to_owned());
                environment.insert("NCCL_DEBUG_FILE".to_owned(), text_of(&log_path(folder.path(), rank)));
                environment.insert("CUDA_DEVICE_ORDER".to_owned(), "PCI_BUS_ID".to_owned());
                if changes {
                    // NCCL's monitoring thread reads the environment; it must not run while a living
                    // worker changes it between communicators, whoever else asked for it. Finals keep it,
                    // as servers do.
                    environment.insert("NCCL_RAS_ENABLE".to_owned(), "0".to_owned());
                }
                if has_calls {
                    let path = text_of(&control_path(folder.path(), rank));
                    environment.insert(control::FILE_VARIABLE.to_owned(), path);
                }
                ChildSpec { arguments: vec![WORKER_ARGUMENT.to_owned()], environment }
            })
            .collect();
        let group =
            backend.setup.supervisor.start_group(specs).map_err(|error| BackendError::System(error.to_string()))?;
        let logs = (0..ranks).map(|_| NcclLog::default()).collect();
        Ok(Self { backend, plan, group, folder, ranks, logs, decisions: vec![0; ranks], unusable: None })
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
        let mut gate: Option<GatePass> = None;
        for (index, shared) in plan.shared().enumerate() {
            let clock = Clock::real();
            let communicator = &shared[0];
            let mut now = Now { arm: &communicator.arm, point: None };
            let measured = if communicator.call.is_some() {
                self.measure_calls(shared, index, &mut position, &mut now, sink)
            } else {
                self.measure_communicator(communicator, index, &mut position, &mut now, sink)
            };
            match measured {
                Ok(true) if !communicator.checks.is_empty() => {
                    let passed = self.passed(gate.take(), communicator, clock.elapsed_s());
                    let goes_on = plan.communicators.get(index + 1).is_some_and(|next| next.arm.id == passed.arm);
                    if goes_on {
                        gate = Some(passed);
                    } else if sink(Event::GatePassed(passed)).is_break() {
                        return Ok(());
                    }
                }
                Ok(true) => {}
                Ok(false) => return Ok(()),
                Err(broken) => {
                    let _ = sink(self.failed(now.arm, now.point, &broken, clock.elapsed_s()));
                    return Err(broken);
                }
            }
        }
        self.step(|_| Order::Finish, Duration::ZERO).map(|_| ())
    }

    /// What an arm passed with this communicator, beside what it passed with those before.
    fn passed(&self, before: Option<GatePass>, communicator: &CommunicatorPlan, duration_s: f64) -> GatePass {
        let sum = |long: bool| -> u32 {
            communicator.checks.iter().filter(|check| !long || check.repeats > 1).map(|check| check.repeats).sum()
        };
        let before = before.unwrap_or(GatePass {
            arm: communicator.arm.id.clone(),
            block: self.plan.block,
            launch: self.plan.launch,
            checks: 0,
            ll128_checks: 0,
            simulated: false,
            duration_s: 0.0,
        });
        GatePass {
            checks: before.checks + sum(false),
            // Only the long check repeats anything.
            ll128_checks: before.ll128_checks + sum(true),
            duration_s: round_us(before.duration_s + duration_s),
            ..before
        }
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
            .flat_map(|communicator| {
                let checked = communicator.checks.iter().map(|check| check.point);
                communicator.points.iter().copied().chain(checked)
            })
            .map(|point| point.bytes)
            .max()
            .unwrap_or(0);
        let folder = self.folder().to_owned();
        let has_calls = self.plan.communicators.iter().any(|communicator| communicator.call.is_some());
        let hello = |rank: usize| Order::Hello {
            protocol: PROTOCOL,
            rank: rank as u32,
            ranks: setup.gpus.len() as u32,
            device: setup.gpus[rank].index,
            nccl_path: setup.nccl.path.clone(),
            log_path: text_of(&log_path(&folder, rank)),
            data_seed: self.plan.data_seed,
            largest_bytes,
            buffers: setup.buffers,
            control_path: has_calls.then(|| text_of(&control_path(&folder, rank))),
        };
        let orders: Vec<Order> = (0..self.ranks).map(hello).collect();
        let answers = self.step(|rank| orders[rank].clone(), seconds(largest_bytes as f64 / SLOWEST_BYTES_PER_S))?;
        for (rank, answer) in answers.into_iter().enumerate() {
            let Answer::Ready { protocol, nccl_version, pci_bus_id, .. } = answer else {
                return Err(unexpected(rank, &answer));
            };
            if protocol != PROTOCOL {
                let detail = format!("rank {rank} speaks protocol {protocol}, not {PROTOCOL}");
                return Err(broken(OutcomeKind::Crashed, detail, false));
            }
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
        now: &mut Now<'_>,
        sink: Sink<'_>,
    ) -> Result<bool, Broken> {
        let mut own = self.open(communicator, None)?;
        for point in &communicator.points {
            now.point = Some(*point);
            let clock = Clock::real();
            let (collectives, replays_us) = self.measure_cell(*point, &mut own)?;
            let effective = effective_of(&own, *point);
            let flags = self.flags(&communicator.arm, *point, &effective, &own, &[]);
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
                call: None,
                duration_s: round_us(clock.elapsed_s()),
            });
            *position += 1;
            if sink(measured).is_break() {
                return Ok(false);
            }
        }
        for check in &communicator.checks {
            now.point = Some(check.point);
            self.check(*check, &mut own)?;
        }
        now.point = None;
        for pass in &communicator.passes {
            let measured = self.measure_pass(&communicator.arm, pass, &mut own)?;
            if sink(Event::PassMeasured(measured)).is_break() {
                return Ok(false);
            }
        }
        self.close_communicator(&communicator.arm, index, sink)
    }

    /// Opens a communicator under its variables, with so many channels at least where that is said. Returns what it
    /// logged, beside what the launch has logged so far.
    fn open(&mut self, communicator: &CommunicatorPlan, channels_min: Option<u32>) -> Result<NcclLog, Broken> {
        let seen = |(name, value): (&String, &Option<String>)| {
            (name.clone(), value.as_ref().map(|value| self.backend.seen(name, value)))
        };
        let set = Order::SetVariables { variables: communicator.variables.iter().map(seen).collect() };
        for (rank, answer) in self.step(|_| set.clone(), Duration::ZERO)?.into_iter().enumerate() {
            let Answer::VariablesSet = answer else { return Err(unexpected(rank, &answer)) };
        }
        // Where the ranks meet in groups, each has an id; the first rank makes all of them.
        let group_ranks = communicator.ranks().map_or(self.ranks, |ranks| ranks as usize);
        if group_ranks == 0 || !self.ranks.is_multiple_of(group_ranks) {
            let detail = format!("{} ranks do not part into groups of {group_ranks}", self.ranks);
            return Err(broken(OutcomeKind::Unsupported, detail, false));
        }
        let unique_ids: Vec<String> =
            (0..self.ranks / group_ranks).map(|_| self.unique_id()).collect::<Result<_, _>>()?;
        let mut own = NcclLog::default();
        let all_ranks = self.ranks;
        let open = |rank: usize| Order::OpenCommunicator {
            unique_id: unique_ids[rank / group_ranks].clone(),
            group: (group_ranks < all_ranks).then_some(RankGroup {
                number: (rank / group_ranks) as u32,
                rank: (rank % group_ranks) as u32,
                ranks: group_ranks as u32,
            }),
            channels_min,
        };
        let answers = self.step(open, Duration::ZERO)?;
        for (rank, answer) in answers.into_iter().enumerate() {
            let Answer::Opened { log } = answer else { return Err(unexpected(rank, &answer)) };
            self.note_log(rank, &log, &mut own);
        }
        Ok(own)
    }

    fn unique_id(&mut self) -> Result<String, Broken> {
        self.send(0, &Order::UniqueId);
        match self.collect(&[0], Order::UniqueId.step(), Duration::ZERO)?.pop() {
            Some(Answer::UniqueId { unique_id }) => Ok(unique_id),
            Some(other) => Err(unexpected(0, &other)),
            None => Err(interrupted()),
        }
    }

    /// Times one cell. Returns the collectives per replay and, per replay, the slowest rank's time
    /// over them.
    fn measure_cell(&mut self, point: PointKey, own: &mut NcclLog) -> Result<(u32, Vec<f64>), Broken> {
        let (collectives, slowest_us) = self.prepare(point, own)?;
        let replays = (self.plan.cell_time_ms * 1000.0 / slowest_us).clamp(REPLAYS.0, REPLAYS.1) as u32;
        let expected = seconds(slowest_us * f64::from(replays) * 10e-6 + point.bytes as f64 / SLOWEST_BYTES_PER_S);
        let answers = self.step(|_| Order::Replay { replays }, expected)?;
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

    /// Captures a point's graph and checks its data. Returns the collectives in it, and the microseconds of a replay.
    fn prepare(&mut self, point: PointKey, own: &mut NcclLog) -> Result<(u32, f64), Broken> {
        let collectives = collectives_per_graph(point);
        let moved = seconds(point.bytes as f64 * f64::from(collectives) / SLOWEST_BYTES_PER_S);
        let answers = self.step(|_| Order::Prepare { point, collectives }, moved)?;
        let mut slowest_us: f64 = 0.0;
        for (rank, answer) in answers.into_iter().enumerate() {
            let Answer::Prepared { replay_us, log } = answer else { return Err(unexpected(rank, &answer)) };
            slowest_us = slowest_us.max(replay_us);
            self.note_log(rank, &log, own);
        }
        if !(slowest_us.is_finite() && slowest_us > 0.0) {
            return Err(broken(OutcomeKind::Refused, format!("a warm-up replay took {slowest_us} us"), false));
        }
        Ok((collectives, slowest_us))
    }

    /// Runs one collective of the smoke gate, as often as it says.
    fn check(&mut self, check: GatePoint, own: &mut NcclLog) -> Result<(), Broken> {
        let GatePoint { point, repeats } = check;
        let order = Order::Check { point, collectives: COLLECTIVES_PER_CHECK, repeats };
        let moved = seconds(point.bytes as f64 * f64::from(COLLECTIVES_PER_CHECK) / SLOWEST_BYTES_PER_S);
        let answers = self.step(|_| order.clone(), moved).map_err(|broken| {
            let detail = format!("smoke gate, {point}: {}", broken.outcome.detail);
            Broken { outcome: Outcome { detail, ..broken.outcome }, ..broken }
        })?;
        for (rank, answer) in answers.into_iter().enumerate() {
            let Answer::Checked { log } = answer else { return Err(unexpected(rank, &answer)) };
            self.note_log(rank, &log, own);
        }
        Ok(())
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
        let answers = self.step(|_| order.clone(), PASS_EXPECTED)?;
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
        let expected = seconds(slowest_us * f64::from(replays) * 10e-6);
        let answers = self.step(|_| Order::ReplayPass { variant, replays }, expected)?;
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
    /// Variables that somebody else was `told` in their place leave no line.
    fn flags(&self, arm: &Arm, point: PointKey, effective: &Effective, own: &NcclLog, told: &[&str]) -> Vec<Flag> {
        let version = self.backend.version();
        let mut flags = BTreeSet::new();
        for (name, value) in &space::variables(arm) {
            let reading = knob::read_as_nccl(name, &self.backend.seen(name, value), version);
            let proof = knob::find(name)
                .and_then(|knob| knob.routes(version).find(|route| route.way == Way::LaunchEnvironment))
                .map_or(Proof::SetByEnvironment, |route| route.proof);
            // A living worker's variables are read at every communicator; the others once a process.
            let living = !self.plan.environment.contains_key(name);
            let table = FileKind::TunerTable.sha256_of(value).filter(|_| name == FileKind::TunerTable.variable());
            let proven = told.contains(&name.as_str())
                || self.logs.iter().enumerate().all(|(rank, log)| {
                    let log = if living && rank == 0 { own } else { log };
                    if let Some(sha256) = table {
                        return log.read_table(sha256);
                    }
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

    /// Leaves the communicator, and tells what memory it took.
    fn close_communicator(&mut self, arm: &Arm, index: usize, sink: Sink<'_>) -> Result<bool, Broken> {
        let (mut device, mut shared) = (Vec::new(), Vec::new());
        for (rank, answer) in self.step(|_| Order::CloseCommunicator, Duration::ZERO)?.into_iter().enumerate() {
            let Answer::Closed { device_bytes, shared_bytes } = answer else { return Err(unexpected(rank, &answer)) };
            device.extend(device_bytes);
            shared.extend(shared_bytes);
        }
        // A communicator of some ranks, or a second one, tells nothing about what an engine opens.
        let is_first = self.plan.phase != Phase::Final || index == 0;
        let complete = is_first && device.len() == self.ranks && shared.len() == self.ranks;
        let (Some(device_bytes_per_rank), true) = (device.into_iter().max(), complete) else { return Ok(true) };
        let measured = Event::MemoryMeasured {
            arm: arm.id.clone(),
            block: self.plan.block,
            launch: self.plan.launch,
            device_bytes_per_rank,
            // Ranks share segments pairwise: each is mapped by two of them.
            shared_bytes: shared.into_iter().sum::<u64>() / 2,
        };
        Ok(sink(measured).is_continue())
    }

    /// Sends an order to every rank and waits for every answer. `expected` is what the size of the work
    /// asks for beside what each phase may take anyway.
    fn step(&mut self, order: impl Fn(usize) -> Order, expected: Duration) -> Result<Vec<Answer>, Broken> {
        let ranks: Vec<usize> = (0..self.ranks).collect();
        for rank in &ranks {
            self.send(*rank, &order(*rank));
        }
        let step = order(0).step();
        self.collect(&ranks, step, expected)
    }

    /// Waits for an answer of each of these ranks, each phase of theirs within its limit.
    fn collect(&mut self, ranks: &[usize], step: &str, expected: Duration) -> Result<Vec<Answer>, Broken> {
        let mut answers: BTreeMap<usize, Answer> = BTreeMap::new();
        let plain = self.backend.setup.phase_limit.map_or(PLAIN_WAIT, |limit| limit.min(PLAIN_WAIT)) + expected;
        let mut waiting: BTreeMap<usize, Waiting> =
            ranks.iter().map(|rank| (*rank, Waiting::new(None, plain))).collect();
        // A rank may have ended between its last answer and this step; nothing more is heard of it then.
        if let Some((rank, exit)) = ranks.iter().find_map(|rank| Some((*rank, self.group.exit_of(*rank)?))) {
            return Err(self.explain(step, rank, Trouble::Ended(exit)));
        }
        while !waiting.is_empty() {
            let next = waiting.values().map(|rank| rank.deadline.remaining()).min().unwrap_or_default();
            let event = self.group.receive(Deadline::after(SLICE.min(next)));
            // Looked at after receiving: workers that the user had killed did not crash.
            if self.backend.setup.supervisor.killed() {
                return Err(interrupted());
            }
            let (child, trouble) = match event {
                Some(ChildEvent::Frame { child, line }) => match serde_json::from_str(&line) {
                    Ok(Answer::Progress { phase }) => {
                        if let Some(rank) = waiting.get_mut(&child) {
                            let mut budgets = self.backend.budgets.borrow_mut();
                            if let Some(before) = rank.phase {
                                budgets.learn(before, seconds(rank.since.elapsed_s()));
                            }
                            *rank = Waiting::new(Some(phase), budgets.wait(phase, expected));
                        }
                        continue;
                    }
                    Ok(Answer::Failed { at_us, failure, detail, log }) => {
                        (child, Trouble::Said { at_us, failure, detail, log })
                    }
                    Ok(answer) => {
                        if let Some(rank) = waiting.remove(&child) {
                            if let Some(phase) = rank.phase {
                                self.backend.budgets.borrow_mut().learn(phase, seconds(rank.since.elapsed_s()));
                            }
                            answers.insert(child, answer);
                        }
                        continue;
                    }
                    Err(error) => (child, Trouble::Nonsense(format!("no answer: {error}"))),
                },
                Some(ChildEvent::BadFrame { child, reason }) => (child, Trouble::Nonsense(reason)),
                // A worker that was told to finish ends right after its answer.
                Some(ChildEvent::Exited { child, .. }) if answers.contains_key(&child) => continue,
                Some(ChildEvent::Exited { child, exit }) => (child, Trouble::Ended(exit)),
                None => match waiting.iter().find(|(_, rank)| rank.deadline.is_over()) {
                    Some((_, late)) => return Err(silent(step, late, &waiting)),
                    None => continue,
                },
            };
            return Err(self.explain(step, child, trouble));
        }
        Ok(ranks.iter().filter_map(|rank| answers.remove(rank)).collect())
    }

    /// Turns what went wrong into an outcome. The rank that is heard first is not always the one with
    /// the cause, so the others get a moment; then a rank that died decides over those whose NCCL only
    /// lost it, and among failures the earliest.
    fn explain(&mut self, step: &str, rank: usize, first: Trouble) -> Broken {
        let mut troubles = vec![(rank, first)];
        let deadline = Deadline::after(ECHO);
        while let Some(event) = self.group.receive(deadline) {
            match event {
                ChildEvent::Frame { child, line } => {
                    if let Ok(Answer::Failed { at_us, failure, detail, log }) = serde_json::from_str(&line) {
                        troubles.push((child, Trouble::Said { at_us, failure, detail, log }));
                    }
                }
                // A worker ends by itself after it said what was wrong.
                ChildEvent::Exited { child, exit } if !troubles.iter().any(|(known, _)| *known == child) => {
                    troubles.push((child, Trouble::Ended(exit)));
                }
                ChildEvent::Exited { .. } | ChildEvent::BadFrame { .. } => {}
            }
        }
        // What every rank logged helps a person, and may hold the line that tells the cause.
        let mut own = NcclLog::default();
        for (rank, trouble) in &troubles {
            if let Trouble::Said { log, .. } = trouble {
                self.note_log(*rank, log, &mut own);
            }
        }
        troubles.sort_by_key(|(_, trouble)| severity(trouble));
        let mut told = troubles.iter();
        let Some((rank, decisive)) = told.next() else { return interrupted() };
        let (kind, mut text, gpu_suspect) = match decisive {
            Trouble::Said { failure, detail, log, .. } => {
                let parsed = nccl_log::parse(log);
                let mut text = format!("rank {rank} while {step}: {detail}");
                if let Some(line) = parsed.warnings.first() {
                    text.push_str(&format!("; NCCL says: {line}"));
                }
                let suspect = matches!(failure, FailureKind::Cuda | FailureKind::WrongResult);
                (kind_of(*failure, &parsed), text, suspect)
            }
            Trouble::Ended(exit) => {
                let mut text = format!("rank {rank} ended with {exit} while {step}");
                let words = self.group.last_log_lines(*rank, 3);
                if !words.is_empty() {
                    text.push_str(&format!("; last words: {words}"));
                }
                (OutcomeKind::Crashed, text, true)
            }
            Trouble::Nonsense(what) => (OutcomeKind::Crashed, format!("rank {rank} while {step}: {what}"), true),
        };
        for (rank, trouble) in told {
            match trouble {
                Trouble::Said { detail, .. } if !text.contains(detail.as_str()) => {
                    text.push_str(&format!("; rank {rank}: {detail}"));
                }
                Trouble::Ended(exit) => text.push_str(&format!("; rank {rank} ended with {exit}")),
                _ => {}
            }
        }
        broken(kind, text.chars().take(2000).collect(), gpu_suspect)
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

/// Where a rank's worker and its tuner plugin meet.
fn control_path(folder: &Path, rank: usize) -> PathBuf {
    folder.join(format!("control-{rank}"))
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

/// What decides among troubles, smallest first: a death, then the earliest failure; NCCL's word that a
/// peer is gone comes last.
fn severity(trouble: &Trouble) -> (u8, u64) {
    /// `ncclRemoteError`, as the error text names it.
    const LOST_PEER: &str = "returned 6 ";
    match trouble {
        Trouble::Said { at_us, failure: FailureKind::Nccl, detail, .. } if detail.contains(LOST_PEER) => (2, *at_us),
        Trouble::Said { at_us, .. } => (1, *at_us),
        Trouble::Ended(_) | Trouble::Nonsense(_) => (0, 0),
    }
}

fn kind_of(failure: FailureKind, log: &NcclLog) -> OutcomeKind {
    let symptom = |wanted: Symptom| log.symptoms.contains(&wanted);
    match failure {
        FailureKind::OutOfMemory => OutcomeKind::OutOfMemory,
        FailureKind::WrongResult => OutcomeKind::WrongResult,
        FailureKind::Unsupported | FailureKind::CublasLt => OutcomeKind::Unsupported,
        FailureKind::Cuda => OutcomeKind::Crashed,
        FailureKind::Nccl if symptom(Symptom::OutOfMemory) || symptom(Symptom::SharedMemoryFailed) => {
            OutcomeKind::OutOfMemory
        }
        FailureKind::Nccl | FailureKind::Protocol => OutcomeKind::Refused,
    }
}

/// Ranks that did not answer in time, and what each was at.
fn silent(step: &str, late: &Waiting, waiting: &BTreeMap<usize, Waiting>) -> Broken {
    let at = |rank: &Waiting| rank.phase.map_or("nothing it told", WorkPhase::name);
    let ranks = waiting.iter().map(|(rank, state)| format!("{rank} (at {})", at(state))).join(", ");
    let detail = format!("no answer from rank {ranks} within {:.0} s while {step}", late.wait.as_secs_f64().ceil());
    broken(OutcomeKind::TimedOut, detail, true)
}

/// A duration; what is no duration is none.
fn seconds(seconds: f64) -> Duration {
    Duration::try_from_secs_f64(seconds).unwrap_or_default()
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
    let operation = log.operation_of(point);
    Effective {
        transport: log.transport(),
        communicator_channels: log.communicator_channels(),
        algo: operation.map(|operation| operation.algo.clone()).filter(|algo| !algo.is_empty()),
        proto: operation.and_then(|operation| operation.proto.clone()),
        channels: operation.and_then(|operation| operation.channels),
        threads: None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn said(at_us: u64, failure: FailureKind, detail: &str) -> Trouble {
        Trouble::Said { at_us, failure, detail: detail.to_owned(), log: String::new() }
    }

    #[test]
    fn a_death_decides_then_the_earliest_failure_and_a_lost_peer_last() {
        let mut troubles = [
            said(1, FailureKind::Nccl, "ncclAllReduce returned 6 (remote process exited)"),
            said(30, FailureKind::Cuda, "late"),
            said(20, FailureKind::Nccl, "ncclCommInitRank returned 3 (internal error)"),
            Trouble::Ended(Exit::Signal(9)),
        ];
        troubles.sort_by_key(severity);
        assert!(matches!(troubles[0], Trouble::Ended(_)));
        let times = troubles[1..].iter().map(|trouble| match trouble {
            Trouble::Said { at_us, .. } => *at_us,
            _ => 0,
        });
        assert_eq!(times.collect::<Vec<_>>(), [20, 30, 1]);
    }

    #[test]
    fn limits_are_generous_at_first_then_learned_within_bounds_and_capped() {
        let mut budgets = Budgets { longest: BTreeMap::new(), limit: None };
        let wait = |budgets: &Budgets| budgets.wait(WorkPhase::Init, Duration::ZERO).as_secs_f64();
        assert!((wait(&budgets) - 90.0).abs() < f64::EPSILON);
        budgets.learn(WorkPhase::Init, Duration::from_millis(100));
        assert!((wait(&budgets) - 10.0).abs() < f64::EPSILON, "never too short for a busy machine");
        budgets.learn(WorkPhase::Init, Duration::from_secs(2));
        budgets.learn(WorkPhase::Init, Duration::from_secs(1));
        assert!((wait(&budgets) - 21.0).abs() < f64::EPSILON, "ten times the longest, and a second");
        let large = budgets.wait(WorkPhase::Init, Duration::from_secs(4)).as_secs_f64();
        assert!((large - 25.0).abs() < f64::EPSILON, "what the size asks for comes on top");
        budgets.limit = Some(Duration::from_secs(3));
        assert!((wait(&budgets) - 3.0).abs() < f64::EPSILON);
    }
}
