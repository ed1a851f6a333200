//! What carries out a launch plan: NCCL on GPUs, a simulation, or a recorded run.
//!
//! All of them sit behind one method, so that everything above (search, journal, judgement, files)
//! is the same code whatever measures.

mod cost;
pub mod nccl;
pub mod replay;
mod room;
pub mod simulated;

use std::collections::BTreeMap;
use std::ops::ControlFlow;

pub use cost::expected_on_gpus_s;

use crate::error_kind::{Classified, ErrorKind};
use crate::knob::{CallCell, CallForm};
use crate::record::{
    Arm, ArmId, CallTold, Event, GatePoint, OverlapCheck, PassCase, PassStep, PassStream, Phase, PointKey,
};

/// One launch: fresh processes, and what they measure in which order.
#[derive(Debug, Clone, PartialEq)]
pub struct LaunchPlan {
    /// Number of the launch in the run.
    pub launch: u32,
    /// Number of its block.
    pub block: u32,
    /// What the block is for.
    pub phase: Phase,
    /// Variables of the arms that must be there at process start; equal for all of them. Files stand by
    /// their names in the run directory.
    pub environment: BTreeMap<String, String>,
    /// Communicators in order.
    pub communicators: Vec<CommunicatorPlan>,
    /// Milliseconds of timed replays per cell.
    pub cell_time_ms: f64,
    /// Seed of the data of this launch.
    pub data_seed: u64,
}

/// One arm at its points, in a communicator of its own or, at call level, in one that it shares with its neighbours.
#[derive(Debug, Clone, PartialEq)]
pub struct CommunicatorPlan {
    /// The arm, whole.
    pub arm: Arm,
    /// Communicator-level variables: set, or taken out because an earlier communicator set them.
    pub variables: BTreeMap<String, Option<String>>,
    /// Points in order. All of them, and all checks, are over the same number of ranks.
    pub points: Vec<PointKey>,
    /// What is run and checked, without timing, before the passes.
    pub checks: Vec<GatePoint>,
    /// Forward passes in order, after the points.
    pub passes: Vec<PassPlan>,
    /// What the tuner plugin is told in place of those variables of the arm that it can stand for. Neighbours that
    /// have this, and nothing else between them, share one communicator.
    pub call: Option<CallForm>,
}

impl CommunicatorPlan {
    /// Whether it is measured in the same communicator as its neighbour.
    fn shares_with(&self, other: &Self) -> bool {
        let is_called = self.call.is_some() && other.call.is_some();
        is_called && self.variables == other.variables && self.ranks() == other.ranks()
    }

    /// Ranks that take part, in groups of so many; none for all of them.
    pub fn ranks(&self) -> Option<u32> {
        let of_check = self.checks.first().map(|check| check.point.ranks);
        self.points.first().map(|point| point.ranks).or(of_check)
    }
}

/// One forward pass to be timed.
#[derive(Debug, Clone, PartialEq)]
pub struct PassPlan {
    /// Which.
    pub case: PassCase,
    /// Its steps.
    pub steps: Vec<PassStep>,
    /// Where its collectives are issued.
    pub stream: PassStream,
}

impl LaunchPlan {
    /// A launch that belongs to no block of a campaign: one communicator under these variables, which is called
    /// `name` wherever it fails, at these points with as few replays as there may be.
    pub fn alone(name: &str, environment: BTreeMap<String, String>, points: Vec<PointKey>) -> Self {
        let arm = Arm {
            id: ArmId(name.to_owned()),
            name: name.to_owned(),
            env: environment.clone(),
            files: BTreeMap::new(),
            server_args: Vec::new(),
        };
        let communicator = CommunicatorPlan {
            arm,
            variables: BTreeMap::new(),
            points,
            checks: Vec::new(),
            passes: Vec::new(),
            call: None,
        };
        Self {
            launch: 0,
            block: 0,
            phase: Phase::Search,
            environment,
            communicators: vec![communicator],
            cell_time_ms: 0.0,
            data_seed: 0,
        }
    }

    /// What the launch measures, communicator by communicator: several arms where they share one.
    pub fn shared(&self) -> impl Iterator<Item = &[CommunicatorPlan]> {
        self.communicators.chunk_by(CommunicatorPlan::shares_with)
    }

    /// Cells of the launch.
    pub fn cell_count(&self) -> usize {
        let has_checks = |communicator: &CommunicatorPlan| usize::from(!communicator.checks.is_empty());
        let cells = |communicator: &CommunicatorPlan| communicator.points.len() + communicator.passes.len();
        self.communicators.iter().map(|communicator| cells(communicator) + has_checks(communicator)).sum()
    }
}

/// Why no further launch makes sense. Everything that concerns one arm is an event instead.
#[derive(Debug, thiserror::Error)]
pub enum BackendError {
    /// The GPUs are in a state nothing can be measured in.
    #[error("the GPUs no longer answer: {0}")]
    GpuUnusable(String),
    /// A process or file could not be made.
    #[error("{0}")]
    System(String),
    /// A table or recording cannot be used.
    #[error("{0}")]
    Unusable(String),
}

impl Classified for BackendError {
    fn kind(&self) -> ErrorKind {
        match self {
            Self::GpuUnusable(_) => ErrorKind::MachineUnfit,
            Self::System(_) => ErrorKind::Unexpected,
            Self::Unusable(_) => ErrorKind::Usage,
        }
    }

    fn hint(&self) -> Option<String> {
        match self {
            Self::GpuUnusable(_) => Some(
                "a hung GPU needs a reset or a reboot, which this tool never does; \
                 what was measured is in the journal, and --resume goes on from there"
                    .to_owned(),
            ),
            _ => None,
        }
    }
}

/// Where events go. `Break` asks the backend to end the launch at once.
pub type Sink<'sink> = &'sink mut dyn FnMut(Event) -> ControlFlow<()>;

/// Carries out launch plans.
pub trait Backend {
    /// Runs one launch to its end and tells everything that happens, from launch-started to
    /// launch-ended.
    fn run(&mut self, plan: &LaunchPlan, sink: Sink<'_>) -> Result<(), BackendError>;

    /// Seconds a launch is likely to take, for plans and progress bars.
    fn expected_s(&self, plan: &LaunchPlan) -> f64;

    /// Most paired launches of a finalist that can be had, where that is limited.
    fn most_final_launches(&self) -> Option<u32> {
        None
    }

    /// Most launches of a trial that can be had, likewise.
    fn most_trial_launches(&self) -> Option<u32> {
        None
    }

    /// Makes captured and uncaptured collectives of one communicator overlap for so many seconds, with
    /// these variables (those of the arm, and of repairs). None where this backend cannot.
    fn check_overlap(
        &mut self,
        _arm: &ArmId,
        _environment: &BTreeMap<String, String>,
        _seconds: f64,
        _launch: u32,
        _seed: u64,
    ) -> Result<Option<OverlapCheck>, BackendError> {
        Ok(None)
    }

    /// Findings about the backend itself that the verdict must carry ("3 launches were drawn again").
    fn notes(&self) -> Vec<String> {
        Vec::new()
    }
}

/// What a tuner plugin is told, as the journal says it; no channels where they are left to NCCL.
fn told(cell: Option<CallCell>, channels: u32) -> CallTold {
    let name = |names: &[&str], number: u32| names.get(number as usize).map(|name| (*name).to_owned());
    CallTold {
        algo: cell.and_then(|cell| name(&nccl_abi::ALGORITHMS, cell.algorithm)),
        proto: cell.and_then(|cell| name(&nccl_abi::PROTOCOLS, cell.protocol)),
        channels: cell.map(|_| channels).filter(|channels| *channels > 0),
    }
}

/// Collectives of one run of the smoke gate: more than one, since what a graph chains may go wrong where a
/// single one does not.
pub const COLLECTIVES_PER_CHECK: u32 = 4;

/// Collectives captured in one graph: enough to make the launch of the graph negligible, few enough
/// to keep a replay of a big message short. It depends on nothing but the message, so that every arm
/// is timed over the same graph.
pub fn collectives_per_graph(point: PointKey) -> u32 {
    let by_size = match point.bytes {
        0..=1_048_576 => 64,
        1_048_577..=4_194_304 => 32,
        4_194_305..=16_777_216 => 8,
        _ => 4,
    };
    // Longer chains of 16 ranks would leave bfloat16's range (worker/data_check.rs).
    if point.ranks > 8 { by_size.min(48) } else { by_size }
}
