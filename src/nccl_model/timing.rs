//! How long a collective takes, by calibrated constants: what NCCL's own prediction is not meant to be.
//!
//! A law with a few constants for each class of devices and kind of link, in `search-spaces/timings.toml`;
//! nothing in it knows a row of anybody's table. `examples/fit_timing.rs` fits the constants and prints
//! how far they are off at sizes that were left out.
//!
//! One step of a ring costs `step_us` of latency and the time its bytes need, of which a part is hidden:
//! the two are joined by a norm whose exponent is `overlap` (1: nothing is hidden). Bytes on the wire are
//! twice the message's with LL and 16/15 of it with LL128. A channel alone does not fill a link, fewer
//! threads move less, and channels together approach the link's rate by a norm as well.

use std::sync::LazyLock;

use serde::{Deserialize, Serialize};

use super::{Algorithm, Communicator, Protocol, Transport};
use crate::collective::Collective;
use crate::machine::PathKind;

/// What a ring's slowest edge goes over: constants are kept for each.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Link {
    /// NVLink, through NVSwitch or not.
    Nvlink,
    /// Peer access over PCI Express within a NUMA node.
    Pcie,
    /// Peer access over PCI Express from one NUMA node to another.
    PcieSockets,
    /// Buffers in host memory.
    HostMemory,
}

impl Link {
    /// The slowest kind of edge of a communicator's rings; ranks alone have none.
    pub fn of(communicator: &Communicator) -> Self {
        let orders = &communicator.graphs().ring.orders;
        let edges = orders.iter().flat_map(|order| order.iter().zip(order.iter().cycle().skip(1)));
        edges
            .filter_map(|(&from, &to)| {
                Some(match communicator.transport(from, to)? {
                    Transport::Shm => Self::HostMemory,
                    Transport::P2p => match communicator.path(from, to)?.0 {
                        PathKind::Loc | PathKind::Nvl | PathKind::Nvb | PathKind::C2c => Self::Nvlink,
                        PathKind::Sys => Self::PcieSockets,
                        _ => Self::Pcie,
                    },
                })
            })
            .max()
            .unwrap_or(Self::Pcie)
    }

    /// The name in the table.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Nvlink => "nvlink",
            Self::Pcie => "pcie",
            Self::PcieSockets => "pcie-sockets",
            Self::HostMemory => "host-memory",
        }
    }
}

/// A message, and how it is carried.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Operation {
    /// The collective.
    pub collective: Collective,
    /// The larger of send and receive buffer per rank, in bytes.
    pub bytes: u64,
    /// Ranks.
    pub ranks: u32,
    /// NCCL's algorithm.
    pub algorithm: Algorithm,
    /// NCCL's protocol.
    pub protocol: Protocol,
    /// Channels that carry it.
    pub channels: u32,
    /// Threads of each block.
    pub threads: u32,
    /// Bytes of a channel's buffer for Simple (`NCCL_BUFFSIZE`).
    pub buffer_bytes: u64,
}

/// Constants of one protocol that hold on every device.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ProtocolLaw {
    /// Microseconds of a collective beside its steps: launch, first and last synchronisation.
    pub start_us: f64,
    /// How a channel's rate grows with its threads: the exponent of their share.
    pub thread_exponent: f64,
    /// A tree's rate as a share of the ring's.
    pub tree_rate: f64,
    /// A tree's latency per hop as a share of the ring's.
    pub tree_step: f64,
    /// Bytes of a channel that go up a tree before any come down, in KiB.
    pub tree_chunk_kib: f64,
    /// The share of their time that is not hidden.
    pub tree_fill: f64,
}

/// Constants that hold on every device.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Law {
    /// Exponent of the norm by which channels share a link.
    pub sharing: f64,
    /// Share of a Simple step's latency that does not grow with the threads that must meet in it.
    pub simple_step_base: f64,
    /// Exponent by which host memory slows down as the buffers of all channels outgrow the caches.
    pub footprint_exponent: f64,
    /// Buffers up to which it does not, in MiB.
    pub footprint_free_mib: f64,
    /// Microseconds of NVLS beside its bytes.
    pub nvls_start_us: f64,
    /// Microseconds of the event that NCCL records after each captured collective, which
    /// `NCCL_GRAPH_MIXING_SUPPORT=0` leaves out.
    pub event_us: f64,
    /// LL.
    pub ll: ProtocolLaw,
    /// LL128.
    pub ll128: ProtocolLaw,
    /// Simple.
    pub simple: ProtocolLaw,
}

/// What one protocol reaches over one link.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Rates {
    /// Microseconds of latency from one rank to the next.
    pub step_us: f64,
    /// GB/s on the wire of one channel at its most threads.
    pub channel_gb_per_s: f64,
    /// GB/s on the wire of all channels together.
    pub link_gb_per_s: f64,
}

/// Constants of one class of devices over one kind of link.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LinkTiming {
    /// The class of devices ("h200").
    pub device: String,
    /// The kind of link.
    pub link: Link,
    /// Where the figures come from that the constants were fitted to.
    pub source: String,
    /// What of it nobody measured; absent where all of it was.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub extrapolated: Option<String>,
    /// Exponent of the norm that joins a step's latency with its bytes.
    pub overlap: f64,
    /// Microseconds for each doubling of the channels in use.
    pub channels_us: f64,
    /// GB/s of message that NVLS reaches, where there is an NVSwitch.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub nvls_gb_per_s: Option<f64>,
    /// LL.
    pub ll: Rates,
    /// LL128.
    pub ll128: Rates,
    /// Simple.
    pub simple: Rates,
}

/// The whole table.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Timings {
    /// What holds everywhere.
    pub law: Law,
    /// What holds for a class of devices and a kind of link.
    #[serde(rename = "timing")]
    pub classes: Vec<LinkTiming>,
}

/// The table that is compiled in.
static COMPILED_IN: LazyLock<Timings> = LazyLock::new(|| {
    toml::from_str(include_str!("../../search-spaces/timings.toml")).expect("the compiled-in table is tested")
});

impl Timings {
    /// The table that is compiled in.
    pub fn compiled_in() -> &'static Self {
        &COMPILED_IN
    }

    /// The constants of a class of devices over a kind of link.
    pub fn find(&self, device: &str, link: Link) -> Option<&LinkTiming> {
        self.classes.iter().find(|class| class.device == device && class.link == link)
    }

    /// The same, or those of another class of devices over the same kind of link where this class has none:
    /// a machine's variables may send its messages where nobody measured it.
    pub fn nearest(&self, device: &str, link: Link) -> Option<&LinkTiming> {
        self.find(device, link).or_else(|| self.classes.iter().find(|class| class.link == link))
    }

    /// Classes of devices, each once.
    pub fn devices(&self) -> impl Iterator<Item = &str> {
        let earlier = |index: usize, device: &str| self.classes[..index].iter().any(|class| class.device == device);
        self.classes
            .iter()
            .enumerate()
            .filter(move |(index, class)| !earlier(*index, &class.device))
            .map(|(_, class)| class.device.as_str())
    }
}

impl Law {
    const fn of(&self, protocol: Protocol) -> &ProtocolLaw {
        match protocol {
            Protocol::Ll => &self.ll,
            Protocol::Ll128 => &self.ll128,
            Protocol::Simple => &self.simple,
        }
    }

    /// Every constant that is fitted, with its name.
    pub fn constants_mut(&mut self) -> Vec<(&'static str, &mut f64)> {
        let mut all = vec![
            ("sharing", &mut self.sharing),
            ("simple_step_base", &mut self.simple_step_base),
            ("footprint_exponent", &mut self.footprint_exponent),
            ("nvls_start_us", &mut self.nvls_start_us),
        ];
        for law in [&mut self.ll, &mut self.ll128, &mut self.simple] {
            all.extend([
                ("start_us", &mut law.start_us),
                ("thread_exponent", &mut law.thread_exponent),
                ("tree_rate", &mut law.tree_rate),
                ("tree_step", &mut law.tree_step),
                ("tree_chunk_kib", &mut law.tree_chunk_kib),
                ("tree_fill", &mut law.tree_fill),
            ]);
        }
        all
    }
}

impl LinkTiming {
    const fn of(&self, protocol: Protocol) -> &Rates {
        match protocol {
            Protocol::Ll => &self.ll,
            Protocol::Ll128 => &self.ll128,
            Protocol::Simple => &self.simple,
        }
    }

    /// Every constant with its name, for those who fit them.
    pub fn constants_mut(&mut self) -> Vec<(&'static str, &mut f64)> {
        let mut all = vec![("overlap", &mut self.overlap), ("channels_us", &mut self.channels_us)];
        all.extend(self.nvls_gb_per_s.as_mut().map(|rate| ("nvls_gb_per_s", rate)));
        for rates in [&mut self.ll, &mut self.ll128, &mut self.simple] {
            all.extend([
                ("step_us", &mut rates.step_us),
                ("channel_gb_per_s", &mut rates.channel_gb_per_s),
                ("link_gb_per_s", &mut rates.link_gb_per_s),
            ]);
        }
        all
    }

    /// How long an operation takes in the steady state of back-to-back collectives, in microseconds.
    pub fn time_us(&self, law: &Law, operation: &Operation) -> f64 {
        let ranks = f64::from(operation.ranks.max(1));
        let channels = f64::from(operation.channels.max(1));
        let bytes = operation.bytes as f64;
        if operation.algorithm == Algorithm::Nvls {
            let rate = self.nvls_gb_per_s.unwrap_or(self.simple.link_gb_per_s) * 1e3;
            return norm(law.nvls_start_us, bytes / rate, self.overlap);
        }
        let (rates, own) = (self.of(operation.protocol), law.of(operation.protocol));
        let (wire, most_threads) = match operation.protocol {
            Protocol::Ll => (2.0, 512.0),
            Protocol::Ll128 => (16.0 / 15.0, 640.0),
            Protocol::Simple => (1.0, 512.0),
        };
        let threads = (f64::from(operation.threads.max(1)) / most_threads).min(1.0);
        let channel = rates.channel_gb_per_s * threads.powf(own.thread_exponent);
        let mut step_us = rates.step_us;
        let mut hindrance = 1.0;
        if operation.protocol == Protocol::Simple {
            if operation.algorithm == Algorithm::Ring {
                step_us *= law.simple_step_base + (1.0 - law.simple_step_base) * threads;
            }
            if self.link == Link::HostMemory {
                let footprint_mib = channels * operation.buffer_bytes as f64 / MIB;
                hindrance = (footprint_mib / law.footprint_free_mib).max(1.0).powf(law.footprint_exponent);
            }
        }
        let start_us = own.start_us + self.channels_us * channels.log2();
        // Inverse rates add up in a norm: microseconds per byte.
        let cost = |channel: f64| {
            norm(1.0 / (channels * channel), 1.0 / rates.link_gb_per_s, law.sharing) / 1e3 * wire * hindrance
        };
        // Steps of a ring, and the share of the message that moves in each.
        let steps = match operation.collective {
            Collective::AllReduce => 2.0 * (ranks - 1.0),
            Collective::SendRecv => 1.0,
            _ => ranks - 1.0,
        };
        if operation.algorithm == Algorithm::Ring {
            let share = match operation.collective {
                Collective::AllReduce | Collective::AllGather | Collective::ReduceScatter => bytes / ranks,
                // Pieces follow each other around the ring, all of them through every link.
                Collective::Broadcast | Collective::Reduce => bytes / steps.max(1.0),
                Collective::SendRecv => bytes,
            };
            return start_us + steps * norm(step_us, share * cost(channel), self.overlap);
        }
        let channel = channel * own.tree_rate;
        let piece = (bytes / channels).min(own.tree_chunk_kib * 1024.0);
        let fill_us = own.tree_fill * (ranks - 1.0) * piece * wire / (channel * 1e3);
        start_us + norm(steps * step_us * own.tree_step, bytes * cost(channel), self.overlap) + fill_us
    }
}

const MIB: f64 = 1_048_576.0;

/// (a^p + b^p)^(1/p) of two positive numbers, with the larger taken out so that no power overflows.
fn norm(a: f64, b: f64, p: f64) -> f64 {
    let (small, large) = if a < b { (a, b) } else { (b, a) };
    if large <= 0.0 { 0.0 } else { large * (1.0 + (small / large).powf(p)).powf(1.0 / p) }
}
