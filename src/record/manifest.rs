//! What a run is: everything needed to understand, repeat or resume it.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::{Arm, ArmId, CheckReport, ColdAndWarm, GatePlan, PeerReport, QuarantinedArm, Space, TrialPlan, Workload};
use crate::machine::{Machine, NcclLibrary};

/// What did the measuring.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum BackendKind {
    /// NCCL on this machine's GPUs.
    Nccl,
    /// A committed latency table with seeded noise.
    Simulated,
    /// A recorded run.
    Replay,
}

/// What every output must say about where its numbers come from.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Labels {
    /// No GPU was involved.
    pub simulated: bool,
    /// Numbers come from a recorded run.
    pub replayed: bool,
    /// GPU peer access was switched off by a pin: buffers lie in host memory.
    pub host_memory: bool,
    /// Another program measured: nothing but its figures is known.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub imported: bool,
    /// Launches were drawn anew around the recorded ones, with a noise that somebody assumed.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub redrawn: bool,
}

impl Labels {
    /// The labels as the words that stand in outputs.
    pub fn words(self) -> Vec<&'static str> {
        [
            (self.simulated, "SIMULATED"),
            (self.replayed, "REPLAYED"),
            (self.redrawn, "REDRAWN"),
            (self.imported, "IMPORTED"),
            (self.host_memory, "HOST-MEMORY"),
        ]
        .into_iter()
        .filter_map(|(on, word)| on.then_some(word))
        .collect()
    }
}

/// Who set a variable that holds in every arm.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Origin {
    /// `--pin`.
    Pin,
    /// It was set where the tool was started.
    Inherited,
    /// The engine sets it itself.
    Engine,
    /// `~/.nccl.conf` or `$NCCL_CONF_FILE`.
    UserConf,
    /// `/etc/nccl.conf`.
    SystemConf,
}

/// A variable that holds in every arm, default included.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Pin {
    /// The variable.
    pub variable: String,
    /// Its value.
    pub value: String,
    /// Who set it.
    pub origin: Origin,
}

/// An axis that does nothing on a machine, by NCCL's rules.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct DeadAxis {
    /// Its variable.
    pub variable: String,
    /// Why it does nothing at any point.
    pub rule: String,
    /// The arm that is measured all the same, to see whether that holds.
    pub spot_check: ArmId,
    /// Arms that were left out.
    pub left_out: u32,
}

/// What an earlier run saw. It orders a race, and judges nothing.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct WarmStart {
    /// Name of its directory.
    pub run: String,
    /// When it began, RFC 3339.
    pub created: String,
    /// Its arms.
    pub earlier: Vec<EarlierArm>,
}

/// How an arm stood in the search of an earlier run.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct EarlierArm {
    /// The arm.
    pub arm: Arm,
    /// Mean log ratio of the objective to the default's.
    pub objective_log: f64,
    /// The same at each measured point of the run that is warmed, in the order of
    /// [`measured_points`](crate::evidence::measured_points).
    pub point_logs: Vec<f64>,
}

/// The parts of the machine fingerprint, each named, so that a change can be named.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct FingerprintParts {
    /// Fingerprint over all parts.
    pub combined: String,
    /// The parts in plain text.
    pub parts: BTreeMap<String, String>,
}

/// Which answer of the forward pass the files hold, where there are several.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Profile {
    /// The best on the weighted mix of all batches.
    #[default]
    Balanced,
    /// The best at the smallest batch.
    Latency,
    /// The best at the largest batch.
    Throughput,
}

impl Profile {
    /// Its name in records and on the command line.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Balanced => "balanced",
            Self::Latency => "latency",
            Self::Throughput => "throughput",
        }
    }

    /// For serde: the usual one is left out, so that records of older versions keep their fingerprint.
    #[expect(clippy::trivially_copy_pass_by_ref, reason = "serde passes a reference")]
    const fn is_balanced(&self) -> bool {
        matches!(self, Self::Balanced)
    }
}

/// Whose memory messages lie in: what the engine's framework allocates its tensors from.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum BufferKind {
    /// The driver's plain memory (cuMemAlloc), PyTorch's usual.
    #[default]
    Plain,
    /// Segments of virtual memory, PyTorch's with `expandable_segments:True`.
    Vmm,
    /// NCCL's own allocator (ncclMemAlloc), as memory pools for NCCL use it.
    Nccl,
}

impl BufferKind {
    /// Every kind.
    pub const ALL: [Self; 3] = [Self::Plain, Self::Vmm, Self::Nccl];

    /// Its name in records and on the command line.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Plain => "plain",
            Self::Vmm => "vmm",
            Self::Nccl => "nccl",
        }
    }

    /// For serde: the usual one is left out, so that records of older versions keep their fingerprint.
    #[expect(clippy::trivially_copy_pass_by_ref, reason = "serde passes a reference")]
    const fn is_plain(&self) -> bool {
        matches!(self, Self::Plain)
    }
}

/// The cheapest level at which arms of the search may differ within one launch: what a change costs, see
/// [`Level`](crate::knob::Level).
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum CheapestLevel {
    /// Fresh processes for each arm.
    Launch,
    /// A communicator of its own for each arm, where a living process can change what the arm sets.
    #[default]
    Communicator,
    /// One communicator for all arms whose variables the tuner plugin can stand for, one graph after another.
    Call,
}

impl CheapestLevel {
    /// Every level.
    pub const ALL: [Self; 3] = [Self::Launch, Self::Communicator, Self::Call];

    /// Its name in records and on the command line.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Launch => "launch",
            Self::Communicator => "communicator",
            Self::Call => "call",
        }
    }

    /// For serde: the usual one is left out, so that records of older versions keep their fingerprint.
    #[expect(clippy::trivially_copy_pass_by_ref, reason = "serde passes a reference")]
    const fn is_communicator(&self) -> bool {
        matches!(self, Self::Communicator)
    }
}

/// What decides how a run is measured and judged; all of it is part of its identity.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Settings {
    /// Smallest gain worth shipping, as a share.
    pub min_gain: f64,
    /// Largest regression of any point or guard point, as a share.
    pub max_regression: f64,
    /// Every point must be shown safe, not only estimated so.
    pub strict: bool,
    /// Which answer the files hold.
    #[serde(default, skip_serializing_if = "Profile::is_balanced")]
    pub profile: Profile,
    /// Search strategy.
    pub strategy: String,
    /// Blocks of the search.
    pub search_blocks: u32,
    /// Finalists at most.
    pub finalists: u32,
    /// Paired launches per finalist, where fixed; otherwise from the noise, 6 to 24.
    pub final_launches: Option<u32>,
    /// Most MiB of memory, on a GPU or of the host, that an answer may take beside the default.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max_extra_memory_mib: Option<f64>,
    /// Milliseconds of timed replays per cell.
    pub cell_time_ms: f64,
    /// Whose memory messages lie in.
    #[serde(default, skip_serializing_if = "BufferKind::is_plain")]
    pub buffers: BufferKind,
    /// The cheapest level at which arms of the search may differ within one launch.
    #[serde(default, skip_serializing_if = "CheapestLevel::is_communicator")]
    pub cheapest_level: CheapestLevel,
}

impl Default for Settings {
    /// What a run without flags goes by.
    fn default() -> Self {
        Self {
            min_gain: 0.02,
            max_regression: 0.02,
            strict: false,
            profile: Profile::Balanced,
            strategy: "exhaustive".to_owned(),
            search_blocks: 3,
            finalists: 3,
            final_launches: None,
            max_extra_memory_mib: None,
            cell_time_ms: 40.0,
            buffers: BufferKind::Plain,
            cheapest_level: CheapestLevel::Communicator,
        }
    }
}

/// A box that NCCL misjudges, and what was done about it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct MisjudgedBox {
    /// Why the default is wrong, as one sentence without its full stop.
    pub reason: String,
    /// How that is known: "log" where NCCL itself said so, "model" where its rules say so.
    pub source: String,
    /// Arms that carry the file made for it.
    pub arms: Vec<ArmId>,
}

/// The tuner plugin that reads a run's tables.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PluginRecord {
    /// Its version.
    pub version: String,
    /// The SHA-256 of its file.
    pub sha256: String,
}

/// Tuner tables of a run.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct TableRecord {
    /// What reads them: a copy lies in the run directory.
    pub plugin: PluginRecord,
    /// Arms that were made of what the search saw. They are no part of the run's identity, which is known before.
    pub arms: Vec<Arm>,
}

/// A file of another program that became a launch.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ImportedFile {
    /// Its name, without folders.
    pub file: String,
    /// Its SHA-256: the same launch counts once.
    pub sha256: String,
    /// The arm it is of.
    pub arm: ArmId,
    /// Which launch of the arm it is, from 0.
    pub position: u32,
}

/// manifest.json.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Manifest {
    /// Format of this record.
    pub format: u32,
    /// Version of the tool.
    pub tool_version: String,
    /// Commit it was built from, where known.
    pub commit: Option<String>,
    /// RFC 3339 time of the start.
    pub created: String,
    /// What was typed.
    pub arguments: Vec<String>,
    /// Seed of the run.
    pub seed: u64,
    /// What did the measuring.
    pub backend: BackendKind,
    /// What every output must say.
    pub labels: Labels,
    /// The machine.
    pub machine: Machine,
    /// Its fingerprint.
    pub fingerprint: FingerprintParts,
    /// The NCCL library, where one was loaded.
    pub nccl: Option<NcclLibrary>,
    /// Variables that hold in every arm.
    pub pins: Vec<Pin>,
    /// Variables let through to the workers beside the usual ones.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub kept_environment: Vec<String>,
    /// Positions of the GPUs used, in PCI order.
    pub devices: Vec<u32>,
    /// The workload.
    pub workload: Workload,
    /// The space.
    pub space: Space,
    /// The arms it yields; the default first.
    pub arms: Vec<Arm>,
    /// Arms of the whole space, where it has more than one run can hold.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub space_arms: Option<u32>,
    /// Axes whose arms were left out because they do nothing here by NCCL's rules.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub dead_axes: Vec<DeadAxis>,
    /// Arms of the space that were left out because they failed in an earlier run.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub quarantined: Vec<QuarantinedArm>,
    /// That NCCL misjudges this box, where it does and something was done about it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub misjudged: Option<MisjudgedBox>,
    /// Tuner tables, where there are any.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tables: Option<TableRecord>,
    /// The earlier run by whose figures the race was begun, where there is one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub warm_start: Option<WarmStart>,
    /// Whether tables are made where the search ends: a run that is taken up again goes on as it began.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub makes_tables: bool,
    /// The tuner plugin that a search at call level tells what to run, a copy of which is in the run directory.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub call_plugin: Option<PluginRecord>,
    /// What pruning and rules left out, in words.
    pub notices: Vec<String>,
    /// How it is measured and judged.
    pub settings: Settings,
    /// The trial in a forward pass, where one is planned.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub trial: Option<TrialPlan>,
    /// What finalists must get right beside their points; none in runs of versions that had no gate.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gate: Option<GatePlan>,
    /// What doctor found beforehand.
    pub checks: CheckReport,
    /// Whether `NCCL_P2P_LEVEL` may be tried here, where a space asks for that.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub peer_access: Option<PeerReport>,
    /// What NCCL's search for channels found on idle and on busy GPUs, where that was compared.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cold_and_warm: Option<ColdAndWarm>,
    /// The recorded run behind a replay.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub recorded: Option<String>,
    /// The files behind an imported run.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub imported_files: Vec<ImportedFile>,
}
