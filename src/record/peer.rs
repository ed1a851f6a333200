//! Whether GPUs may write into each other's memory across the host bridge, and how that was found out.

use serde::{Deserialize, Serialize};

/// How the question ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum PeerOutcome {
    /// Every tier held, twice, in fresh processes.
    Passed,
    /// NCCL uses peer access between all ranks without being told: there is nothing to try.
    InUse,
    /// Something did not hold.
    Failed,
    /// It was not tested.
    Skipped,
}

impl PeerOutcome {
    /// The name in files and tables.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Passed => "passed",
            Self::InUse => "in-use",
            Self::Failed => "failed",
            Self::Skipped => "skipped",
        }
    }
}

/// What is asked, the cheapest first: each is asked only where the one before held.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum PeerTier {
    /// Driver and NVML grant access, both ways between every two GPUs.
    Granted,
    /// Bytes were copied and read back, both ways between every two GPUs.
    Copied,
    /// A communicator of all ranks used it, and its sums were right on every rank.
    Reduced,
}

impl PeerTier {
    /// In words.
    pub const fn words(self) -> &'static str {
        match self {
            Self::Granted => "access granted",
            Self::Copied => "bytes moved and read back",
            Self::Reduced => "collectives checked",
        }
    }
}

/// One tier in one round.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct PeerStep {
    /// Counts from 1.
    pub round: u32,
    /// Which.
    pub tier: PeerTier,
    /// Whether it held.
    pub passed: bool,
    /// What was seen.
    pub detail: String,
    /// Seconds it cost.
    pub duration_s: f64,
}

/// The gate in front of `NCCL_P2P_LEVEL`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct PeerReport {
    /// How it ended.
    pub outcome: PeerOutcome,
    /// Why, in words.
    pub reason: String,
    /// Ranks it was tested with; those of the server.
    pub ranks: u32,
    /// What spoke against peer access before anything was tried, in words.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub suspicions: Vec<String>,
    /// What was tried, in order.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub steps: Vec<PeerStep>,
}

/// What NCCL's search for channels came to for one pattern.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ChannelSearch {
    /// The pattern in words ("ring").
    pub pattern: String,
    /// Channels found.
    pub channels: u32,
    /// Gigabytes per second of each.
    pub bandwidth_gb_per_s: f64,
    /// The longest kind of path between two GPUs ("PHB").
    pub path: String,
}

/// What NCCL found on GPUs that had been idle, and on GPUs that had just been busy.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct ColdAndWarm {
    /// After idling.
    pub cold: Vec<ChannelSearch>,
    /// After copies that keep the links busy.
    pub warm: Vec<ChannelSearch>,
}

/// Captured and uncaptured collectives of one communicator, made to overlap.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct OverlapCheck {
    /// Rounds whose data were right on every rank.
    pub rounds: u32,
    /// Seconds they took.
    pub duration_s: f64,
    /// What failed; none where no failure was seen, which proves nothing.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub failure: Option<super::Outcome>,
}
