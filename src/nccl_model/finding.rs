//! Why NCCL took a machine for what it took it for: what is worth telling a person.

use std::fmt;

use crate::machine::{NcclVersion, PathKind};

use super::Pattern;

/// Something worth telling about what NCCL made of a machine.
#[derive(Debug, Clone, PartialEq)]
pub enum Finding {
    /// No ring (or tree) fits any speed this release tries.
    Fallback {
        /// Which search.
        pattern: Pattern,
        /// The speed a search ends with, in GB/s: nothing slower is tried.
        least_tried_gbps: f64,
        /// The slowest link between any two GPUs next to each other, in GB/s.
        slowest_gbps: f64,
        /// The kind of path it is on.
        slowest: PathKind,
        /// What NCCL then goes by, in GB/s.
        assumed_gbps: f64,
    },
    /// A GPU's link runs below what it can do, and this release goes by what it runs at.
    SlowedLink {
        /// The GPUs, by rank.
        ranks: Vec<u32>,
        /// The lowest PCIe generation now.
        generation_now: u32,
        /// The PCIe generation it can do.
        generation: u32,
    },
    /// The driver grants peer access between pairs that NCCL does not use it between.
    PeerAccessUnused {
        /// Pairs of GPUs.
        pairs: u32,
        /// The farthest of them.
        path: PathKind,
        /// The farthest that NCCL uses peer access over here.
        level: PathKind,
    },
    /// The driver grants no peer access between pairs that NCCL would use it between.
    PeerAccessDenied {
        /// Pairs of GPUs.
        pairs: u32,
    },
    /// The release is not known to the model; the nearest known one stands in.
    NearestRelease {
        /// What was asked for.
        wanted: NcclVersion,
        /// Whose rules were used.
        used: NcclVersion,
    },
}

impl fmt::Display for Finding {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Fallback { pattern, least_tried_gbps, slowest_gbps, slowest, assumed_gbps } => {
                let what = if *pattern == Pattern::Ring { "ring" } else { "tree" };
                let between = match slowest {
                    PathKind::Sys => "the slowest link between sockets",
                    PathKind::Phb => "the slowest link through a host bridge",
                    PathKind::Pix | PathKind::Pxb => "the slowest link through a PCI switch",
                    _ => "the slowest link",
                };
                write!(
                    formatter,
                    "no {what} fits the speeds this release tries ({least_tried_gbps} GB/s and up; {between} has \
                     {slowest_gbps} GB/s), so NCCL goes on with the GPUs in simple order at {assumed_gbps} GB/s",
                )
            }
            Self::SlowedLink { ranks, generation_now, generation } => write!(
                formatter,
                "{} of the GPUs run their PCIe link at generation {generation_now} of {generation} because they are \
                 idle, and this release goes by that: keep them busy while a communicator starts",
                ranks.len(),
            ),
            Self::PeerAccessUnused { pairs, path, level } => write!(
                formatter,
                "{pairs} pairs of GPUs could use peer access through {} and use host memory, because NCCL reaches no \
                 farther than {level} here (NCCL_P2P_LEVEL={path} would change that)",
                path.describe(),
            ),
            Self::PeerAccessDenied { pairs } => write!(
                formatter,
                "{pairs} pairs of GPUs use host memory because the driver grants no peer access between them"
            ),
            Self::NearestRelease { wanted, used } => {
                write!(formatter, "NCCL {wanted} is not known here; {used} is the nearest that is, and stands in")
            }
        }
    }
}
