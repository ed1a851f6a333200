//! What `exec --verify` saw of processes that run.

use serde::{Deserialize, Serialize};

/// Whether the processes have what the file sets.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum DeploymentVerdict {
    /// Every process with an NCCL has every variable, and the one library that was measured.
    Shown,
    /// Some process lacks something, or has another library.
    Lacking,
    /// Some process does not show what it has, or none has an NCCL.
    Unknown,
}

impl DeploymentVerdict {
    /// The name in JSON and tables.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Shown => "shown",
            Self::Lacking => "lacking",
            Self::Unknown => "unknown",
        }
    }
}

/// A variable that a process does not have as the file sets it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct LackingVariable {
    /// The variable.
    pub variable: String,
    /// What the file sets.
    pub expected: String,
    /// What the process has; null where it has none.
    pub found: Option<String>,
}

/// A process.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct DeployedProcess {
    /// Its id.
    pub process_id: u32,
    /// Its parent's.
    pub parent_process_id: u32,
    /// Its title, or its command.
    pub name: String,
    /// "read", "overwritten", "denied" or "gone".
    pub environment: String,
    /// What it lacks.
    pub lacking: Vec<LackingVariable>,
    /// The libnccls it has mapped; null where its mappings cannot be read.
    pub nccl: Option<Vec<String>>,
    /// What is wrong with it, or cannot be told, in words.
    pub remarks: Vec<String>,
}

/// What was seen.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct DeploymentCheck {
    /// Format of this record.
    pub format: u32,
    /// The verdict.
    pub verdict: DeploymentVerdict,
    /// Why, in a sentence.
    pub reason: String,
    /// The processes, by id.
    pub processes: Vec<DeployedProcess>,
}
