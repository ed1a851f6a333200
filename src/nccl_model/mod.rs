//! NCCL's own mind on one machine: which rings it finds, and which algorithm, protocol and channels
//! it chooses for a message.
//!
//! Pure: a [`Topology`](crate::machine::Topology), [`Settings`] read from variables, and a [`Release`] go in; a
//! [`Communicator`] comes out that answers for every size what NCCL would choose, at which predicted
//! time, what came second, and why. The rules are those of NCCL's public source, release by release;
//! the constants stand in one place, `constants`, with where they come from. Times are NCCL's own
//! predictions, which it uses to choose: they are no measurements and no promise.
//!
//! Not modelled: several machines, network adapters, CollNet, GPUs reached by C2C, several ranks on a
//! GPU, user buffers that are registered, symmetric kernels, several collectives in one group.

mod communicator;
mod constants;
mod error;
mod finding;
pub mod graph_file;
mod release;
mod search;
mod settings;
mod spread;
mod system;
pub mod timing;
mod tuning;

use crate::machine::PathKind;

pub use communicator::Communicator;
pub use constants::{FALLBACK_GBPS, pcie_gbps};
pub use error::ModelError;
pub use finding::Finding;
pub use graph_file::{GraphFile, GraphFileError};
pub use release::Release;
pub use settings::{Override, Settings};

/// Largest message that is asked about.
pub const MAX_BYTES: u64 = 1 << 40;

/// An algorithm of NCCL's.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Algorithm {
    /// A tree; on one machine it is a chain.
    Tree,
    /// A ring.
    Ring,
    /// NVSwitch multicast and reduction in the switch.
    Nvls,
}

impl Algorithm {
    /// Those of the model, in NCCL's order: of equal times the first wins.
    pub const ALL: [Self; 3] = [Self::Tree, Self::Ring, Self::Nvls];

    /// The name in files and tables, as journals have it.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Tree => "tree",
            Self::Ring => "ring",
            Self::Nvls => "nvls",
        }
    }

    /// The word in `NCCL_ALGO`.
    pub const fn nccl_name(self) -> &'static str {
        match self {
            Self::Tree => "Tree",
            Self::Ring => "Ring",
            Self::Nvls => "NVLS",
        }
    }
}

impl std::fmt::Display for Algorithm {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.pad(self.name())
    }
}

/// A protocol of NCCL's.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Protocol {
    /// Eight bytes at a time, half of them flags: the least latency.
    Ll,
    /// 128 bytes at a time, eight of them flags.
    Ll128,
    /// Whole slices, with a flag after each: the most bandwidth.
    Simple,
}

impl Protocol {
    /// All, in NCCL's order: of equal times the first wins.
    pub const ALL: [Self; 3] = [Self::Ll, Self::Ll128, Self::Simple];

    /// The name in files and tables, as journals have it.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Ll => "ll",
            Self::Ll128 => "ll128",
            Self::Simple => "simple",
        }
    }

    /// The word in `NCCL_PROTO`.
    pub const fn nccl_name(self) -> &'static str {
        match self {
            Self::Ll => "LL",
            Self::Ll128 => "LL128",
            Self::Simple => "Simple",
        }
    }
}

impl std::fmt::Display for Protocol {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.pad(self.name())
    }
}

/// The shape a graph was searched for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Pattern {
    /// 1: a tree whose middle spreads over two GPUs; on one machine a chain.
    BalancedTree,
    /// 2: the same with one GPU on each side.
    SplitTree,
    /// 3: a plain chain.
    Tree,
    /// 4: a ring.
    Ring,
    /// 5: NVSwitch multicast.
    Nvls,
}

impl Pattern {
    /// NCCL's number, in its log and in graph files.
    pub const fn number(self) -> u32 {
        match self {
            Self::BalancedTree => 1,
            Self::SplitTree => 2,
            Self::Tree => 3,
            Self::Ring => 4,
            Self::Nvls => 5,
        }
    }

    /// The pattern of a number.
    pub const fn of(number: u32) -> Option<Self> {
        match number {
            1 => Some(Self::BalancedTree),
            2 => Some(Self::SplitTree),
            3 => Some(Self::Tree),
            4 => Some(Self::Ring),
            5 => Some(Self::Nvls),
            _ => None,
        }
    }
}

/// What a search (or a graph file) came to.
#[derive(Debug, Clone, PartialEq)]
pub struct Graph {
    /// Its shape.
    pub pattern: Pattern,
    /// Channels found, before NCCL doubles them.
    pub channels: u32,
    /// GB/s that NCCL counts on in each channel.
    pub channel_bandwidth_gbps: f64,
    /// The same towards an NVSwitch, for NVLS; towards the network where there is one.
    pub outward_bandwidth_gbps: f64,
    /// The longest kind of path the search allowed.
    pub path_kind: PathKind,
    /// Whether every channel has the same order of GPUs.
    pub same_channels: bool,
    /// Whether nothing fitted, and NCCL went on with the ranks in plain order at 0.1 GB/s.
    pub is_fallback: bool,
    /// The GPUs of each channel, in order, by rank.
    pub orders: Vec<Vec<u32>>,
}

impl Graph {
    /// GB/s of all channels together.
    pub fn bandwidth_gbps(&self) -> f64 {
        f64::from(self.channels) * self.channel_bandwidth_gbps
    }
}

/// The graphs of a communicator.
#[derive(Debug, Clone, PartialEq)]
pub struct Graphs {
    /// NCCL's graph 0.
    pub ring: Graph,
    /// NCCL's graph 1.
    pub tree: Graph,
    /// NCCL's graph 3, where the machine has NVSwitch multicast and the release and variables allow it.
    pub nvls: Option<Graph>,
}

/// How two GPUs exchange data.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Transport {
    /// Straight into each other's memory.
    P2p,
    /// By way of host memory.
    Shm,
}

impl Transport {
    /// The word in NCCL's log.
    pub const fn name(self) -> &'static str {
        match self {
            Self::P2p => "P2P",
            Self::Shm => "SHM",
        }
    }
}

impl std::fmt::Display for Transport {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.pad(self.name())
    }
}

/// One algorithm with one protocol, as NCCL rates it for a message.
#[derive(Debug, Clone, PartialEq)]
pub struct Candidate {
    /// The algorithm.
    pub algorithm: Algorithm,
    /// The protocol.
    pub protocol: Protocol,
    /// NCCL's latency for it, in microseconds.
    pub latency_us: f64,
    /// NCCL's bandwidth for it at this size, in GB/s of message.
    pub bandwidth_gbps: f64,
    /// NCCL's time for it, or why it is out of the question.
    pub time_us: Result<f64, Disabled>,
}

/// Why NCCL does not consider an algorithm with a protocol.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum Disabled {
    /// NCCL has no such kernel for this collective.
    NotImplemented,
    /// `NCCL_ALGO` leaves it out.
    Algorithm,
    /// `NCCL_PROTO` leaves it out.
    Protocol,
    /// LL128 is on by default only where stores of 128 bytes are known to arrive whole.
    Ll128Gate {
        /// Which condition is not met.
        reason: String,
    },
    /// The machine lacks what it needs.
    Machine {
        /// What.
        reason: String,
    },
}

/// What NCCL chooses for a message.
#[derive(Debug, Clone, PartialEq)]
pub struct Choice {
    /// The algorithm.
    pub algorithm: Algorithm,
    /// The protocol.
    pub protocol: Protocol,
    /// Channels that carry the message: one more than `Hi` in NCCL's log.
    pub channels: u32,
    /// Threads of each block of the kernel.
    pub threads: u32,
    /// NCCL's own prediction, in microseconds.
    pub predicted_us: f64,
    /// What came second, where there was a second.
    pub runner_up: Option<RunnerUp>,
}

/// The second best, by NCCL's own prediction.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct RunnerUp {
    /// The algorithm.
    pub algorithm: Algorithm,
    /// The protocol.
    pub protocol: Protocol,
    /// NCCL's own prediction, in microseconds.
    pub predicted_us: f64,
}

/// How far peer access may reach, as variables have it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct PeerRules {
    /// `NCCL_P2P_LEVEL` and `NCCL_P2P_DISABLE`; nothing: NCCL's own.
    level: Option<PathKind>,
    /// `NCCL_IGNORE_DISABLED_P2P=2`: the driver is not asked.
    skips_driver: bool,
    /// Any other value but 0: what the driver says is no error.
    mutes_driver: bool,
    /// Whether data may take NVLink by way of another GPU.
    has_nvb: bool,
}
