//! The event stream of a run. Resume, replay, tables and verdict are all folds over it.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::{GatePass, OverlapCheck, PassMeasurement, PointKey};
use crate::file_kind::FileKind;

/// The short fingerprint of an arm's environment, files and server arguments.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct ArmId(pub String);

impl std::fmt::Display for ArmId {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.pad(&self.0)
    }
}

/// One thing that could be deployed. The empty arm, the default, is in every run.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Arm {
    /// Fingerprint over everything below but the name.
    pub id: ArmId,
    /// A name for people; grid arms are named by what they set.
    pub name: String,
    /// Variables, as emitted: plain decimals, no blanks.
    pub env: BTreeMap<String, String>,
    /// Files beside the environment, by SHA-256: `file_kind` says which variable points at each.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub files: BTreeMap<FileKind, String>,
    /// Server arguments.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub server_args: Vec<String>,
}

/// Part of a campaign.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Phase {
    /// Looking for finalists; several arms may share a launch.
    Search,
    /// The smoke gate: arms that would be finalists at the collectives a server issues, in deployed form.
    Gate,
    /// Judging finalists: fresh launches, one arm a launch, in deployed form.
    Final,
    /// Finalists inside a model's forward pass.
    Trial,
}

/// How a cell, a launch or an arm ended. A closed list; a value, never an exception.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum OutcomeKind {
    /// Measured; flags say what was odd.
    Measured,
    /// Left out by a rule before anything ran.
    Rejected,
    /// NCCL said no.
    Refused,
    /// The data check failed.
    WrongResult,
    /// A worker died.
    Crashed,
    /// A deadline passed.
    TimedOut,
    /// Device or host memory ran out.
    OutOfMemory,
    /// This version cannot measure it.
    Unsupported,
    /// The user or a budget ended it.
    Interrupted,
    /// Replay holds no recording of it.
    NotRecorded,
}

impl OutcomeKind {
    /// The name in files and tables.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Measured => "measured",
            Self::Rejected => "rejected",
            Self::Refused => "refused",
            Self::WrongResult => "wrong-result",
            Self::Crashed => "crashed",
            Self::TimedOut => "timed-out",
            Self::OutOfMemory => "out-of-memory",
            Self::Unsupported => "unsupported",
            Self::Interrupted => "interrupted",
            Self::NotRecorded => "not-recorded",
        }
    }
}

/// An outcome with its story.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Outcome {
    /// Which of the closed list.
    pub kind: OutcomeKind,
    /// What was said: NCCL's text, the signal, the deadline that passed.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub detail: String,
}

/// What was odd about a measurement.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Flag {
    /// NCCL ran another algorithm or protocol than the arm asked for.
    Substituted,
    /// A variable of the arm left no "set by environment" line: NCCL did not read it.
    Ignored,
}

/// What really ran, read back from NCCL's log in the same launch.
#[derive(Debug, Clone, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Effective {
    /// Transports between ranks, such as "SHM/direct/direct".
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub transport: Option<String>,
    /// Channels of the communicator.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub communicator_channels: Option<u32>,
    /// Algorithm, lower case ("ring").
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub algo: Option<String>,
    /// Protocol, lower case ("ll").
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub proto: Option<String>,
    /// Channels this operation used.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub channels: Option<u32>,
    /// Threads per channel, where a model predicts them (NCCL does not log them).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub threads: Option<u32>,
}

/// One arm at one point in one launch.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct CellMeasurement {
    /// Which arm.
    pub arm: ArmId,
    /// Which point.
    pub point: PointKey,
    /// Block, launch, communicator within the launch, position within the launch.
    pub block: u32,
    /// The launch.
    pub launch: u32,
    /// Index of the communicator within the launch.
    pub communicator: u32,
    /// Position of the cell within the launch.
    pub position: u32,
    /// Collectives captured in the replayed graph.
    pub collectives_per_replay: u32,
    /// Per replay: slowest rank's time over the collectives in it, in microseconds.
    pub replays_us: Vec<f64>,
    /// What ran.
    pub effective: Effective,
    /// What was odd.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub flags: Vec<Flag>,
    /// What the tuner plugin was told in place of the arm's variables, where the arm shared its communicator with
    /// others; none where it had one of its own, under its own variables.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub call: Option<CallTold>,
    /// Seconds this cell cost, preparation and checks included.
    pub duration_s: f64,
}

/// What the tuner plugin was told for a cell that was measured at call level. What ran is in [`Effective`], as ever.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct CallTold {
    /// Algorithm, lower case; none where NCCL's own choice stood.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub algo: Option<String>,
    /// Protocol, likewise.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub proto: Option<String>,
    /// Channels; none where they were left to NCCL, which takes as many as it would under the arm's variables.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub channels: Option<u32>,
}

/// One launch as a block plans it. The order of launches and of cells is the journal's, so that a
/// reader never has to trust a seed to know it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct BlockLaunch {
    /// Number of the launch in the run.
    pub launch: u32,
    /// Arms in the order in which they are measured.
    pub arms: Vec<ArmId>,
}

/// A "set by environment" line, as NCCL wrote it.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct SetLine {
    /// The variable.
    pub variable: String,
    /// The value as NCCL understood it.
    pub value: String,
}

/// Why a finalist left before the planned number of launches.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum DropReason {
    /// It failed too often.
    Failing,
    /// It can no longer be adopted.
    Hopeless,
    /// It takes too long at a point.
    Regressing,
    /// Another arm is shown to be better.
    Outraced,
}

/// One thing that happened.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "event", rename_all = "kebab-case")]
pub enum Event {
    /// The first line of every journal.
    RunOpened {
        /// Format of the journal.
        format: u32,
        /// Version of the tool that wrote it.
        tool_version: String,
        /// Seed of the run.
        seed: u64,
        /// Fingerprint of everything that may not change on resume.
        identity: String,
        /// Whether the numbers are simulated: they stay labelled whatever becomes of the manifest.
        #[serde(default, skip_serializing_if = "std::ops::Not::not")]
        simulated: bool,
    },
    /// The run was taken up again.
    RunResumed {
        /// Counts from 1 at the first resume.
        segment: u32,
        /// Bytes of a torn last line that were dropped.
        dropped_bytes: u64,
    },
    /// A block begins, with the order of everything in it.
    BlockPlanned {
        /// Number of the block.
        block: u32,
        /// What it is for.
        phase: Phase,
        /// Launches in order.
        launches: Vec<BlockLaunch>,
    },
    /// Fresh processes start.
    LaunchStarted {
        /// Number of the launch.
        launch: u32,
        /// Its block.
        block: u32,
        /// The arm's variables that had to be there at process start.
        env: BTreeMap<String, String>,
    },
    /// A cell was measured.
    CellMeasured(CellMeasurement),
    /// A forward pass was timed.
    PassMeasured(PassMeasurement),
    /// An arm got every collective of the smoke gate right.
    GatePassed(GatePass),
    /// The arms of a block ran under different conditions: it counts for nothing.
    BlockVoided {
        /// Number of the block.
        block: u32,
        /// What differed.
        reason: String,
    },
    /// The final is over: these are tried in a forward pass.
    TrialChosen {
        /// Which, best first.
        arms: Vec<ArmId>,
        /// Why these.
        reason: String,
    },
    /// A cell was not measured.
    CellFailed {
        /// Which arm.
        arm: ArmId,
        /// Which point; none where the whole communicator failed.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        point: Option<PointKey>,
        /// Its block.
        block: u32,
        /// Its launch.
        launch: u32,
        /// How.
        outcome: Outcome,
        /// Seconds it cost.
        duration_s: f64,
    },
    /// What memory a communicator took, connections included.
    MemoryMeasured {
        /// Which arm's.
        arm: ArmId,
        /// Its block.
        block: u32,
        /// Its launch.
        launch: u32,
        /// Device memory in bytes, of the rank that took most.
        device_bytes_per_rank: u64,
        /// Shared host memory in bytes that showed in the ranks' mappings, of all ranks. Memory that the
        /// driver allocates on the host does not show there.
        shared_bytes: u64,
    },
    /// Something that the field knows a repair for went wrong; from here on every launch has it.
    RepairTried {
        /// The variable that is set in every arm.
        variable: String,
        /// Its value.
        value: String,
        /// The line that told.
        evidence: String,
    },
    /// Captured and uncaptured collectives of one communicator were made to overlap.
    OverlapChecked {
        /// With which arm's variables.
        arm: ArmId,
        /// What came of it.
        #[serde(flatten)]
        check: OverlapCheck,
    },
    /// Fresh processes ended.
    LaunchEnded {
        /// Number of the launch.
        launch: u32,
        /// Seconds from start to end, failed ones included: budgets are sums of these.
        duration_s: f64,
        /// "set by environment" lines that every rank wrote.
        #[serde(default, skip_serializing_if = "Vec::is_empty")]
        set_by_environment: Vec<SetLine>,
        /// How the processes ended, where not as planned.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        outcome: Option<Outcome>,
    },
    /// A block is over and on disk: complete, or closed as it stood when a run was taken up again.
    BlockEnded {
        /// Number of the block.
        block: u32,
    },
    /// The search is over.
    FinalistsChosen {
        /// Finalists, best first.
        arms: Vec<ArmId>,
        /// Paired launches planned for each, from the noise seen while searching.
        launches: u32,
        /// Why these, why so many.
        reason: String,
    },
    /// A finalist left early.
    FinalistDropped {
        /// Which.
        arm: ArmId,
        /// Why.
        reason: DropReason,
        /// The figures behind it.
        detail: String,
    },
    /// An arm left the race before there were finalists.
    ArmDropped {
        /// Which.
        arm: ArmId,
        /// Why.
        reason: DropReason,
        /// The figures behind it.
        detail: String,
    },
    /// The run was interrupted in an orderly way.
    RunInterrupted {
        /// "interrupt" or "budget".
        reason: String,
    },
    /// The campaign came to its end.
    RunFinished,
}

/// One line of run.jsonl.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct JournalLine {
    /// Position in the journal, from 0 without gaps.
    pub sequence: u64,
    /// Seconds on the run's clock (virtual in simulated and replayed runs).
    pub at_s: f64,
    /// What happened.
    #[serde(flatten)]
    pub event: Event,
}
