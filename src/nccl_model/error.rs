//! Why the model has no answer.

use crate::collective::Collective;
use crate::error_kind::{Classified, ErrorKind};
use crate::machine::{NcclVersion, TopologyError};
use crate::units::format_size;

use super::MAX_BYTES;

/// Why the model has no answer.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum ModelError {
    /// A release whose rules are not known.
    #[error("NCCL {version} is not modelled: its rules are known from {oldest} to {newest}")]
    UnknownRelease {
        /// What was asked for.
        version: NcclVersion,
        /// The oldest known.
        oldest: NcclVersion,
        /// The newest known.
        newest: NcclVersion,
    },
    /// A machine that cannot be.
    #[error("the topology cannot be: {0}")]
    Topology(#[from] TopologyError),
    /// A size nobody sends.
    #[error("a message of {bytes} bytes: there must be 1 byte to {}", format_size(MAX_BYTES))]
    Size {
        /// What was asked for.
        bytes: u64,
    },
    /// Not a collective that NCCL chooses an algorithm for.
    #[error("NCCL has no choice to make for {collective}: it is sent from one rank to another")]
    Collective {
        /// What was asked for.
        collective: Collective,
    },
    /// NCCL refuses to start a communicator with this variable.
    #[error("NCCL does not start with {variable}={text}: {reason}")]
    Refused {
        /// Its name.
        variable: String,
        /// What it was set to.
        text: String,
        /// Why.
        reason: String,
    },
    /// A communicator of one rank copies, and chooses nothing.
    #[error("one GPU alone has nothing to exchange, and NCCL nothing to choose")]
    OneRank,
    /// NCCL takes it for broken hardware.
    #[error(
        "NCCL does not start: GPUs {} and {} are joined by NVLink, and the driver grants no peer access between them",
        ranks[0],
        ranks[1]
    )]
    NvLinkWithoutPeerAccess {
        /// Which.
        ranks: [u32; 2],
    },
    /// Neither peer access nor host memory is left between two GPUs.
    #[error(
        "GPUs {} and {} could exchange data through the network alone, which is not modelled: \
         peer access does not reach, and NCCL_SHM_DISABLE=1 takes host memory away",
        ranks[0],
        ranks[1]
    )]
    Network {
        /// Which.
        ranks: [u32; 2],
    },
    /// NCCL cannot use the graph file.
    #[error("NCCL cannot use the graph file: {reason}")]
    GraphFile {
        /// Why.
        reason: String,
    },
    /// NCCL fails at the call: nothing is left to choose from.
    #[error("NCCL fails at the first {collective}: {reason}")]
    NothingLeft {
        /// The collective.
        collective: Collective,
        /// What leaves nothing.
        reason: String,
    },
}

impl Classified for ModelError {
    fn kind(&self) -> ErrorKind {
        ErrorKind::Usage
    }
}
