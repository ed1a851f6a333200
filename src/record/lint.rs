//! What `lint` found.

use serde::{Deserialize, Serialize};

/// How bad a finding is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum LintSeverity {
    /// The process sees, or NCCL does, something else than the text says.
    Error,
    /// Something to know.
    Warning,
}

impl LintSeverity {
    /// The name in files and tables.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Error => "error",
            Self::Warning => "warning",
        }
    }
}

/// One thing that is wrong.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct LintFinding {
    /// The file as it was named.
    pub file: String,
    /// Line, from 1; 0 for the file as a whole.
    pub line: usize,
    /// The variable it is about.
    pub variable: Option<String>,
    /// How bad.
    pub severity: LintSeverity,
    /// What is wrong.
    pub message: String,
    /// What to write instead, where that is known.
    pub suggestion: Option<String>,
}

/// Findings of all files.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct LintReport {
    /// Format of this record.
    pub format: u32,
    /// In order of files and lines.
    pub findings: Vec<LintFinding>,
}
