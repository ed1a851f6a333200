//! What doctor found.

use serde::{Deserialize, Serialize};

/// How a check ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum CheckVerdict {
    /// As it should be.
    Pass,
    /// Measurements will work but may disappoint or mislead.
    Warn,
    /// Do not measure before this is mended.
    Fail,
    /// Could not be found out.
    Unknown,
}

impl CheckVerdict {
    /// The name in files and tables.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Pass => "pass",
            Self::Warn => "warn",
            Self::Fail => "fail",
            Self::Unknown => "unknown",
        }
    }
}

/// One question asked of the machine.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Check {
    /// Stable name ("gpu-idle").
    pub name: String,
    /// What it belongs to ("gpu", "nccl", "system").
    pub group: String,
    /// The answer.
    pub verdict: CheckVerdict,
    /// The question, in words.
    pub question: String,
    /// What was seen.
    pub evidence: String,
    /// What to do; empty where nothing needs doing.
    pub advice: String,
}

/// All checks of one visit.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct CheckReport {
    /// Format of this record.
    pub format: u32,
    /// The checks, in the order they ran.
    pub checks: Vec<Check>,
}
