//! The answer of a run: choice.json.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::{ArmId, ColdAndWarm, Effective, GateRecord, PeerReport, PointPhase, QuarantinedArm};
use crate::collective::{Collective, DataType, Form};
use crate::file_kind::FileKind;

/// What the run says.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum VerdictKind {
    /// An arm won by more than the minimum gain and regresses nowhere.
    Adopt,
    /// No arm did, and this was shown.
    KeepDefault,
    /// The evidence does not reach either.
    Undecided,
}

impl VerdictKind {
    /// The name in files and tables.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Adopt => "adopt",
            Self::KeepDefault => "keep-default",
            Self::Undecided => "undecided",
        }
    }
}

/// In which form an answer is deployed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum AnswerKind {
    /// Environment variables alone.
    #[serde(rename = "env")]
    Env,
    /// Environment variables and a tuner table.
    #[serde(rename = "env+table")]
    EnvTable,
    /// Environment variables and another file.
    #[serde(rename = "env+file")]
    EnvFile,
    /// Server arguments.
    #[serde(rename = "server")]
    Server,
}

/// One deployable answer.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Answer {
    /// For which profile.
    pub profile: String,
    /// In which form.
    pub kind: AnswerKind,
    /// The variables.
    pub env: BTreeMap<String, String>,
    /// Tuner table, by file name.
    pub table: Option<String>,
    /// Files that variables point at, by their names in the run directory.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub files: BTreeMap<FileKind, String>,
    /// Server arguments.
    pub server_args: Vec<String>,
}

/// The objective for one batch.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct BatchObjective {
    /// Concurrent sequences.
    pub batch: u32,
    /// Its share.
    pub weight: f64,
    /// Default, microseconds of measured collectives per pass.
    pub baseline_us: Option<f64>,
    /// The winner's; none unless adopted.
    pub winner_us: Option<f64>,
}

/// The objective: a weighted geometric mean over batches.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Objective {
    /// Always "us_per_pass".
    pub unit: String,
    /// Weight per batch.
    pub weights: BTreeMap<String, f64>,
    /// Weighted geometric mean over batches, default.
    pub baseline: Option<f64>,
    /// The same for the winner; none unless adopted.
    pub winner: Option<f64>,
    /// Winner (or, without one, the best finalist) over default.
    pub ratio: Option<f64>,
    /// Its interval.
    pub ratio_ci95: Option<[f64; 2]>,
    /// Baseline and winner for each batch.
    pub batches: Vec<BatchObjective>,
}

/// One point or guard point of the verdict.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct PointVerdict {
    /// The operation.
    pub collective: Collective,
    /// The element type.
    pub dtype: DataType,
    /// Message size.
    pub bytes: u64,
    /// Concurrent sequences.
    pub batch: u32,
    /// Calls per pass.
    pub calls_per_pass: u32,
    /// The batch's weight.
    pub weight: f64,
    /// Which part of serving.
    pub phase: PointPhase,
    /// Whether it was measured at all.
    pub measured: bool,
    /// Default.
    pub baseline_us: Option<f64>,
    /// Winner, or without one the best finalist that `env` does not hold.
    pub winner_us: Option<f64>,
    /// Trimmed mean ratio, and its interval.
    pub ratio: Option<f64>,
    /// Interval of the ratio.
    pub ratio_ci95: Option<[f64; 2]>,
    /// The smallest regression this run could have seen here, as a share.
    pub margin: Option<f64>,
    /// Whether the interval excludes a regression beyond the threshold.
    pub safe: Option<bool>,
    /// What ran.
    pub effective: Option<Effective>,
    /// What ran under the default.
    pub effective_default: Option<Effective>,
    /// Captured or eager, in place or not.
    #[serde(default, skip_serializing_if = "Form::is_plain")]
    pub form: Form,
}

/// An arm that may not ship.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Veto {
    /// Which arm.
    pub arm: ArmId,
    /// Its name.
    pub name: String,
    /// Its variables; those that point at its files name them as the run directory does.
    pub env: BTreeMap<String, String>,
    /// Why, with figures.
    pub reason: String,
}

/// What one variable of the winner adds, told by the search: the winner and the arm that lacks only
/// this variable, side by side.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Contribution {
    /// The variable.
    pub variable: String,
    /// Objective over default with it, in the search.
    pub ratio_with: f64,
    /// Objective over default without it, in the search.
    pub ratio_without: f64,
}

/// The thresholds that were applied.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Thresholds {
    /// Smallest gain worth shipping.
    pub min_gain: f64,
    /// Largest regression allowed.
    pub max_regression: f64,
}

/// How it was judged.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Statistics {
    /// The method, in words.
    pub method: String,
    /// Paired launches behind the verdict.
    pub launches: u32,
    /// Confidence of the intervals.
    pub confidence: f64,
    /// The seed of the run.
    pub seed: u64,
}

/// One arm in one forward pass.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Trial {
    /// "verify-pass".
    pub kind: String,
    /// Which arm; the default's own rows carry its name and no ratio.
    pub arm: String,
    /// Tokens of the pass; none on the row of the weighted mix.
    pub tokens: Option<u64>,
    /// Decode, verify or prefill; none on the row of the weighted mix.
    pub phase: Option<PointPhase>,
    /// Whether the pass was one graph.
    pub captured: bool,
    /// The case's weight.
    pub weight: f64,
    /// Default, milliseconds per pass.
    pub baseline_ms: Option<f64>,
    /// The arm.
    pub winner_ms: Option<f64>,
    /// Trimmed mean ratio.
    pub ratio: Option<f64>,
    /// Its interval.
    pub ratio_ci95: Option<[f64; 2]>,
    /// Paired launches.
    pub launches: u32,
    /// Share of the default's pass that its collectives take.
    pub communication_share: Option<f64>,
    /// Milliseconds of the pass without collectives: what no NCCL setting can pass.
    pub floor_ms: Option<f64>,
    /// Milliseconds with products beside each collective, default and arm.
    pub crowded_ms: Option<[f64; 2]>,
    /// Gain that the micro-benchmark predicted for this pass, as a share.
    pub predicted_gain: Option<f64>,
    /// Gain that was measured, as a share.
    pub measured_gain: Option<f64>,
}

/// What the answer costs in memory beside the default.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
pub struct Memory {
    /// Additional device memory per rank, MiB, of all communicators.
    pub device_mib_per_rank: Option<f64>,
    /// Additional host memory, MiB, of all ranks and communicators.
    pub host_mib: Option<f64>,
    /// Whether the device memory was measured; estimated from channels and buffers otherwise.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub device_measured: bool,
    /// Whether the host memory was measured.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub host_measured: bool,
    /// Communicators that the engine opens.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub communicators: Option<u32>,
    /// Tokens of key-value cache that no longer fit on each rank, where the model tells their size.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cache_tokens_lost: Option<u64>,
}

/// A variable that had to be set for the default to run at all.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct RepairRecord {
    /// Its name.
    pub variable: String,
    /// Its value.
    pub value: String,
    /// The line that told.
    pub evidence: String,
}

/// What the search cost.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct SearchSummary {
    /// Arms, the default included.
    pub arms: u32,
    /// Cells measured, finals included.
    pub measured_cells: u32,
    /// Arms x points x 12, plus finals.
    pub full_grid_cells: u32,
    /// Seconds on the run's clock.
    pub wall_s: f64,
    /// Launches.
    pub launches: u32,
    /// "complete", "budget" or "interrupt".
    pub stopped_by: String,
}

/// choice.json.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Choice {
    /// Format of this record.
    pub format: u32,
    /// The verdict.
    pub verdict: VerdictKind,
    /// Why, in a sentence or two.
    pub reason: String,
    /// Why NCCL's own choice was wrong on this box, and what setting it right costs prefill: one sentence,
    /// where NCCL misjudges the box and a file was made for it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub misjudged: Option<String>,
    /// No GPU was involved.
    pub simulated: bool,
    /// Numbers come from a recorded run.
    pub replayed: bool,
    /// Every label, in words.
    pub labels: Vec<String>,
    /// The winner's variables and the explicit pins.
    pub env: BTreeMap<String, String>,
    /// The winner's files, by their names in the run directory; each has a variable that points at it.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub files: BTreeMap<FileKind, String>,
    /// Inherited, configured or engine variables the verdict holds under.
    pub required_environment: BTreeMap<String, String>,
    /// Name of the adopted arm.
    pub winner: Option<String>,
    /// Name of the best finalist, where none was adopted: the arm that the figures below are of.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub best_finalist: Option<String>,
    /// Deployable answers.
    pub answers: Vec<Answer>,
    /// What each variable of the winner adds; those the search can tell.
    #[serde(default)]
    pub contributions: Vec<Contribution>,
    /// The objective.
    pub objective: Objective,
    /// Each point.
    pub points: Vec<PointVerdict>,
    /// Each guard point.
    pub guard: Vec<PointVerdict>,
    /// Points the workers of this version cannot measure.
    pub unmeasured: Vec<String>,
    /// Arms that may not ship.
    pub vetoed: Vec<Veto>,
    /// Arms that were not tried because they failed in an earlier run.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub quarantined: Vec<QuarantinedArm>,
    /// What the smoke gate said of the arm the figures are of; none where no gate was made.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gate: Option<GateRecord>,
    /// Half-width of default against default at this launch count, as a share.
    pub noise_floor: Option<f64>,
    /// Thresholds applied.
    pub thresholds: Thresholds,
    /// How it was judged.
    pub statistics: Statistics,
    /// What it costs in memory.
    pub memory: Memory,
    /// What had to be set in every arm, the default included, for NCCL to run here.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub repairs: Vec<RepairRecord>,
    /// What whoever deploys the answer must know, in words; it stands in every file.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub warnings: Vec<String>,
    /// Whether `NCCL_P2P_LEVEL` could be tried here, where the space asked for that.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub peer_access: Option<PeerReport>,
    /// What NCCL's search for channels found on idle and on busy GPUs, where that was compared.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cold_and_warm: Option<ColdAndWarm>,
    /// Fingerprint of the machine.
    pub fingerprint: String,
    /// What the search cost.
    pub search: SearchSummary,
    /// Trials in a forward pass; empty where none was made.
    pub trials: Vec<Trial>,
    /// Findings a reader should know: drift, resumed, redrawn launches.
    pub notes: Vec<String>,
}
