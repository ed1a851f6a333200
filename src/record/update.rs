//! What `check` found after an update.

use serde::{Deserialize, Serialize};

use crate::collective::{Collective, DataType};

/// Whether an answer still holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum UpdateVerdict {
    /// Nothing that decides changed, and the gain is still there.
    Valid,
    /// Something changed, and the gain is still there.
    BetterStill,
    /// The gain is gone.
    NoLongerBetter,
    /// It takes longer than the default, everywhere or at some point, or it fails.
    WorseOrFailing,
    /// What was measured tells neither.
    Undecided,
}

impl UpdateVerdict {
    /// The name in JSON and tables.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Valid => "valid",
            Self::BetterStill => "better-still",
            Self::NoLongerBetter => "no-longer-better",
            Self::WorseOrFailing => "worse-or-failing",
            Self::Undecided => "undecided",
        }
    }

    /// Whether the file is to be tuned anew.
    pub const fn is_stale(self) -> bool {
        matches!(self, Self::NoLongerBetter | Self::WorseOrFailing)
    }
}

/// A part of the fingerprint, then and now.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PartChange {
    /// Its name.
    pub part: String,
    /// What it is, in words.
    pub words: String,
    /// "machine", "deciding" or "informing".
    pub weight: String,
    /// What it was; null where it was not recorded.
    pub before: Option<String>,
    /// What it is; null where it cannot be read.
    pub now: Option<String>,
}

/// One of the file's points, measured anew.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct CheckedPoint {
    /// Collective.
    pub collective: Collective,
    /// Element type.
    pub dtype: DataType,
    /// Bytes, as nccl-tests counts them.
    pub bytes: u64,
    /// Whether it is a guard point.
    pub guard: bool,
    /// Default, microseconds.
    pub baseline_us: Option<f64>,
    /// The file, microseconds.
    pub winner_us: Option<f64>,
    /// Trimmed mean ratio.
    pub ratio: Option<f64>,
    /// Its interval.
    pub ratio_ci95: Option<[f64; 2]>,
    /// The ratio that the run recorded.
    pub recorded_ratio: Option<f64>,
}

/// The objective, measured anew.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct CheckedObjective {
    /// The ratio that the run recorded.
    pub recorded_ratio: Option<f64>,
    /// Halfway from there to no gain, on the log scale: the border of the verdict.
    pub midpoint_ratio: Option<f64>,
    /// The ratio now.
    pub ratio: Option<f64>,
    /// Its interval.
    pub ratio_ci95: Option<[f64; 2]>,
    /// Paired launches behind it.
    pub launches: u32,
}

/// What `check` says.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct UpdateCheck {
    /// Format of this record.
    pub format: u32,
    /// The verdict.
    pub verdict: UpdateVerdict,
    /// Why, in a sentence or two.
    pub reason: String,
    /// No GPU was involved.
    pub simulated: bool,
    /// Every label, in words.
    pub labels: Vec<String>,
    /// Parts that are not as they were.
    pub changed: Vec<PartChange>,
    /// Parts that could not be compared.
    pub not_compared: Vec<PartChange>,
    /// The objective; none where nothing was measured.
    pub objective: Option<CheckedObjective>,
    /// The points; empty where nothing was measured.
    pub points: Vec<CheckedPoint>,
    /// Seconds of launches.
    pub wall_s: f64,
    /// The command that tunes anew, where that is advised.
    pub command: Option<String>,
}
