//! What hung, crashed or corrupted in earlier runs: quarantine.json, and what a run leaves out for it.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::{ArmId, FingerprintParts, Outcome};

/// quarantine.json: one file per user, for every machine that shares the folder.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct QuarantineFile {
    /// Format of this record.
    pub format: u32,
    /// What is remembered, oldest first.
    #[serde(default)]
    pub entries: Vec<QuarantineEntry>,
}

/// One set of variables that failed on one machine.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct QuarantineEntry {
    /// GPUs, driver and NCCL it failed with: where one of them is another, the entry does not count.
    pub machine: FingerprintParts,
    /// Name of the arm, for people.
    pub arm: String,
    /// Every variable that was in force: the arm's, and those that held in every arm of its run. One that
    /// points at a file of the arm holds its name in a run directory, which is made of its SHA-256.
    pub env: BTreeMap<String, String>,
    /// How it failed: timed out, crashed, or a wrong result.
    pub outcome: Outcome,
    /// RFC 3339 time of the first failure.
    pub since: String,
    /// Directory of the run it failed in last.
    pub run: String,
}

/// An arm that a run left out because it failed in an earlier one.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct QuarantinedArm {
    /// Which arm.
    pub arm: ArmId,
    /// Its name.
    pub name: String,
    /// Its variables, and its files as above.
    pub env: BTreeMap<String, String>,
    /// What happened, and in which run.
    pub reason: String,
    /// RFC 3339 time of the first failure.
    pub since: String,
}
