//! Every figure of NCCL's that the model uses, by release, with the file of NCCL's source it stands in.
//!
//! Taken from the public source of NCCL (github.com/NVIDIA/nccl) at the tags 2.19.3, 2.20.5, 2.21.5,
//! 2.22.3, 2.23.4, 2.24.3, 2.25.1, 2.26.2 to 2.26.6, 2.27.3 to 2.27.7, 2.28.3 to 2.28.9, 2.29.2 to 2.29.7
//! and 2.30.3 to 2.30.7. "since" is the first tag that has a figure. Bandwidths are GB/s, times are
//! microseconds. NCCL calculates in single precision, and where its rounding decides, so must this.

use crate::machine::{Architecture, CpuNode, CpuVendor, NcclVersion, PathKind};

use super::{Algorithm, Protocol};

/// A device with itself. `graph/topo.h`, LOC_BW.
pub(super) const LOCAL_GBPS: f32 = 5000.0;
/// Sixteen lanes of PCIe generation 3: at or below it, rings of Simple take half the threads.
/// `graph/topo.h`, PCI_BW; `graph/tuning.cc`, ncclTopoTuneModel.
pub(super) const SLOW_RING_GBPS: f32 = 12.0;
/// What NCCL takes a channel for that no search found. `graph/search.cc`, end of ncclTopoCompute.
pub const FALLBACK_GBPS: f32 = 0.1;

/// Threads of a warp.
pub(super) const WARP: u32 = 32;
/// Most threads of a block. `include/device.h`, NCCL_MAX_NTHREADS.
pub(super) const MAX_THREADS: u32 = 640;
/// Most threads of LL and of Simple, before its extra warps. `include/device.h`.
pub(super) const PLAIN_THREADS: u32 = 512;
/// Most threads of LL128. `include/device.h`.
pub(super) const LL128_THREADS: u32 = 640;

/// Steps one search may take in all, and one attempt with equal and with different channels.
/// `graph/search.cc`.
pub(super) const SEARCH_STEPS_IN_ALL: i64 = 1 << 19;
pub(super) const SEARCH_STEPS: i64 = 1 << 14;
pub(super) const SEARCH_STEPS_SAME_CHANNELS: i64 = 1 << 8;

/// Most GPUs that may head an NVLS channel. `include/device.h`, NCCL_MAX_NVLS_ARITY.
pub(super) const NVLS_HEADS: usize = 32;

/// Hundreds of Mbit/s a lane by PCIe generation. `graph/topo.cc`, kvDictPciGen.
const PCIE_LANE: [u32; 7] = [0, 15, 30, 60, 120, 240, 480];

/// GB/s of a PCIe link in one direction. `graph/topo.cc`, ncclTopoAddPci.
pub fn pcie_gbps(generation: u32, width: u32) -> f32 {
    let lane = PCIE_LANE.get(generation as usize).copied().unwrap_or(60);
    (f64::from(width * lane) / 80.0) as f32
}

/// GB/s between two GPUs by way of an Intel host bridge cost this much of the links. `graph/topo.h`,
/// INTEL_P2P_OVERHEAD.
pub(super) fn intel_overhead(gbps: f32) -> f32 {
    gbps * 6.0 / 5.0
}

/// Speeds a search tries, fastest first. `graph/search.cc`, speedArrayIntra and its like.
const LADDER: &[f32] = &[40.0, 30.0, 20.0, 18.0, 15.0, 12.0, 10.0, 9.0, 7.0, 6.0, 5.0, 4.0, 3.0];
const LADDER_SM90_2_19: &[f32] = &[60.0, 50.0, 40.0, 30.0, 24.0, 20.0, 15.0, 12.0, 6.0, 3.0];
const LADDER_SM90: &[f32] = &[60.0, 50.0, 40.0, 30.0, 24.0, 20.0, 15.0, 12.0, 11.0, 6.0, 3.0];
const LADDER_SM100_2_25: &[f32] = &[90.0, 80.0, 70.0, 60.0, 50.0, 40.0, 30.0, 24.0, 20.0, 19.0];
const LADDER_SM100_2_27: &[f32] = &[90.0, 80.0, 70.0, 60.0, 50.0, 40.0, 30.0, 24.0, 20.0, 19.0, 18.0];
const LADDER_SM100: &[f32] = &[90.0, 80.0, 70.0, 60.0, 50.0, 45.0, 40.0, 30.0, 24.0, 20.0, 19.0, 18.0];

/// Kinds of path a release has, nearest first. `graph/topo.h`: C2C since 2.26.2, P2C since 2.27.3.
const KINDS: [PathKind; 8] = [
    PathKind::Loc,
    PathKind::Nvl,
    PathKind::Nvb,
    PathKind::Pix,
    PathKind::Pxb,
    PathKind::Pxn,
    PathKind::Phb,
    PathKind::Sys,
];

/// How much slower trees are than their bandwidth, from 64 B on, by powers of two. `graph/tuning.cc`,
/// treeCorrectionFactor; in this form in every release here.
const TREE_CORRECTION: [[f32; 23]; 3] = [
    [1.0, 1.0, 1.0, 1.0, 0.9, 0.8, 0.7, 0.7, 0.7, 0.7, 0.6, 0.5, 0.4, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.0, 1.0, 1.0],
    [1.0, 1.0, 1.0, 1.0, 1.0, 0.9, 0.8, 0.8, 0.8, 0.7, 0.6, 0.6, 0.6, 0.6, 0.6, 0.6, 0.8, 0.9, 0.9, 0.9, 0.9, 1.0, 1.0],
    [0.9, 0.9, 0.9, 0.9, 0.9, 0.9, 0.9, 0.8, 0.7, 0.6, 0.6, 0.5, 0.5, 0.5, 0.5, 0.6, 0.7, 0.8, 0.7, 0.7, 0.8, 0.9, 0.9],
];

/// The factor for a message; 1 outside the table. Before 2.22 a message below 64 B reads past the
/// table's beginning, which is taken for 1 too.
pub(super) fn tree_correction(protocol: Protocol, bytes: u64) -> f32 {
    (bytes >> 6)
        .checked_ilog2()
        .and_then(|at| TREE_CORRECTION[protocol as usize].get(at as usize))
        .copied()
        .unwrap_or(1.0)
}

/// Generations of GPUs as the tables below count them. `graph/tuning.cc`, compCapIndex.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Generation {
    Volta,
    Ampere,
    Hopper,
    Blackwell,
}

/// What one release goes by.
#[derive(Debug, Clone, Copy)]
pub(super) struct Rules {
    version: NcclVersion,
}

impl Rules {
    pub(super) const fn of(version: NcclVersion) -> Self {
        Self { version }
    }

    fn since(self, minor: u32, patch: u32) -> bool {
        self.version >= NcclVersion::v2(minor, patch)
    }

    // The machine.

    /// Whether GPUs hang below nodes of their own, and paths are chosen by kind before bandwidth.
    /// `graph/topo.h`, node type DEV, since 2.30.3.
    pub(super) fn has_device_nodes(self) -> bool {
        self.since(30, 3)
    }

    /// Whether a GPU's PCIe generation and width are those it runs at now. `graph/xml.cc`,
    /// ncclTopoGetXmlFromSys, since 2.30.7; before, the most that both ends can do.
    pub(super) fn reads_current_link(self) -> bool {
        self.since(30, 7)
    }

    /// GB/s of one NVLink. `graph/topo.h`, ncclTopoNVLinkBw.
    pub(super) fn nvlink_gbps(self, sm: u32) -> f32 {
        match sm {
            100.. if self.since(27, 3) => 40.1,
            100.. if self.since(25, 1) => 40.0,
            90.. if self.since(20, 3) => 20.6,
            86 => 12.0,
            60..70 => 18.0,
            _ => 20.0,
        }
    }

    /// GB/s from one NUMA node to another. `graph/topo.cc`, ncclTopoGetInterCpuBw; Intel's generations
    /// from Sapphire Rapids on are told apart since 2.26.2.
    pub(super) fn between_cpus_gbps(self, cpu: &CpuNode) -> f32 {
        match (cpu.architecture, cpu.vendor) {
            (Architecture::Power, _) => 32.0,
            (Architecture::X86_64, CpuVendor::Intel) => match (cpu.family, cpu.model) {
                (6, 0xCF..) if self.since(26, 2) => 40.0,
                (6, 0x8F..) if self.since(26, 2) => 22.0,
                (6, 0x55..) => 10.0,
                _ => 6.0,
            },
            (Architecture::X86_64, CpuVendor::Amd) => 16.0,
            (Architecture::X86_64, CpuVendor::Zhaoxin) if (cpu.family, cpu.model) == (7, 0x5B) => 9.0,
            (Architecture::X86_64, CpuVendor::Zhaoxin) | (Architecture::Arm64, _) => 6.0,
            (Architecture::X86_64, CpuVendor::Other) => LOCAL_GBPS,
        }
    }

    /// Which Broadcom switch this is at a level of its tree, if it is one that NCCL flattens.
    /// `graph/topo.cc`, getBcmGen, since 2.20.3; before, generation 4 alone.
    pub(super) fn broadcom_generation(self, device: [u16; 4], level: u64) -> Option<u32> {
        let id = device.iter().fold(0_u64, |id, part| (id << 16) | u64::from(*part)) & 0xffff_ffff_ffff_f000;
        if id == 0x1000_c010_1000_a000 {
            Some(4)
        } else if self.since(20, 3) && id == 0x1000_c030_1000_0000 | (level * 0x1000) {
            Some(5)
        } else {
            None
        }
    }

    /// The farthest that peer access is used by default. `graph/paths.cc`, ncclTopoCheckP2p.
    pub(super) fn peer_level(self, cpu: &CpuNode, gpus: usize) -> PathKind {
        let is_amd = cpu.architecture == Architecture::X86_64 && cpu.vendor == CpuVendor::Amd;
        if self.since(23, 4) {
            return if is_amd && gpus <= 2 { PathKind::Sys } else { PathKind::Pxb };
        }
        let is_near = match cpu.architecture {
            Architecture::Arm64 => true,
            Architecture::X86_64 => matches!(cpu.vendor, CpuVendor::Intel | CpuVendor::Zhaoxin),
            Architecture::Power => false,
        };
        if is_near { PathKind::Pxb } else { PathKind::Sys }
    }

    // The search.

    /// Most channels. `include/device.h`, MAXCHANNELS.
    pub(super) fn most_channels(self) -> u32 {
        if self.since(25, 1) { 64 } else { 32 }
    }

    /// Speeds a search tries for GPUs of which the least has this capability.
    pub(super) fn ladder(self, sm: u32) -> &'static [f32] {
        match sm {
            100.. if self.since(29, 2) => LADDER_SM100,
            100.. if self.since(27, 3) => LADDER_SM100_2_27,
            100.. if self.since(25, 1) => LADDER_SM100_2_25,
            90.. if self.since(21, 5) => LADDER_SM90,
            90.. => LADDER_SM90_2_19,
            _ => LADDER,
        }
    }

    /// Kinds of path, nearest first.
    pub(super) fn kinds(self) -> Vec<PathKind> {
        let mut kinds = KINDS.to_vec();
        if self.since(27, 3) {
            kinds.push(PathKind::P2c);
        }
        if self.since(26, 2) {
            kinds.push(PathKind::C2c);
        }
        kinds.sort_unstable();
        kinds
    }

    /// Whether a search begins with the nearest kind of path there is and ends with the farthest.
    /// `graph/search.cc`, ncclTopoCompute, since 2.25.1; before, from NVLink to between sockets.
    pub(super) fn searches_between_kinds_present(self) -> bool {
        self.since(25, 1)
    }

    /// Whether a GPU on NVSwitch looks at its neighbours alone. `graph/search.cc`,
    /// ncclTopoSearchNextGpuSort, since 2.21.5.
    pub(super) fn looks_at_neighbours_alone(self) -> bool {
        self.since(21, 5)
    }

    /// Whether rings over two islands of NVLink need two channels. `graph/search.cc`, since 2.26.2.
    pub(super) fn doubles_rings_over_islands(self) -> bool {
        self.since(26, 2)
    }

    /// Whether NVLS channels may not exceed [`NVLS_HEADS`]. Since 2.25.1.
    pub(super) fn limits_nvls_heads(self) -> bool {
        self.since(25, 1)
    }

    // NVLS.

    /// Fewest GPUs that NVLS is set up for. `transport/nvls.cc`, ncclNvlsInit.
    pub(super) fn nvls_least_gpus(self) -> usize {
        if self.since(28, 7) { 2 } else { 3 }
    }

    /// Channels of NVLS where no variable says otherwise. `transport/nvls.cc`.
    pub(super) fn nvls_channels(self, sm: u32) -> u32 {
        match sm {
            100.. if self.since(27, 3) => 24,
            100.. if self.since(25, 1) => 32,
            _ => 16,
        }
    }

    /// Whether a communicator gets as many channels as NVLS has. `graph/connect.cc`, 2.20.3 to 2.27.7.
    pub(super) fn raises_channels_to_nvls(self) -> bool {
        self.since(20, 3) && !self.since(28, 3)
    }

    /// Whether rings and trees may use the channels so added. `enqueue.cc`, since 2.22.3.
    pub(super) fn uses_raised_channels(self) -> bool {
        self.since(22, 3)
    }

    // Latency and bandwidth: `graph/tuning.cc`, ncclTopoTuneModel.

    fn generation(self, sm: u32) -> Generation {
        match sm {
            100.. if self.since(25, 1) => Generation::Blackwell,
            90.. => Generation::Hopper,
            80.. => Generation::Ampere,
            _ => Generation::Volta,
        }
    }

    /// Latency before the first step. baseLat: tree of Simple had none until 2.23.4.
    pub(super) fn base_latency_us(self, algorithm: Algorithm, protocol: Protocol) -> f32 {
        match (algorithm, protocol) {
            (Algorithm::Nvls, _) => 0.0,
            (Algorithm::Tree, Protocol::Simple) if !self.since(23, 4) => 0.0,
            (Algorithm::Tree, Protocol::Ll) => 6.8,
            (Algorithm::Ring, Protocol::Ll) => 6.6,
            (_, Protocol::Ll128) => 14.0,
            (_, Protocol::Simple) => 8.4,
        }
    }

    /// Latency of each step. hwLat, rows NVLink and PCI.
    pub(super) fn step_latency_us(
        self,
        algorithm: Algorithm,
        protocol: Protocol,
        is_nvlink: bool,
        is_power: bool,
    ) -> f32 {
        match (algorithm, protocol, is_nvlink) {
            (Algorithm::Tree | Algorithm::Ring, Protocol::Ll, true) => 0.6,
            (Algorithm::Tree | Algorithm::Ring, Protocol::Ll, false) => 1.0,
            (Algorithm::Tree, Protocol::Ll128, true) => 1.25,
            (Algorithm::Tree, Protocol::Ll128, false) | (Algorithm::Ring, Protocol::Ll128, true) => 1.9,
            (Algorithm::Ring, Protocol::Ll128, false) => 2.5,
            (Algorithm::Ring, Protocol::Simple, true) => 3.4,
            (Algorithm::Ring, Protocol::Simple, false) => 5.7,
            (Algorithm::Tree, Protocol::Simple, false) if is_power => 5.7,
            (Algorithm::Tree, Protocol::Simple, _) if self.since(23, 4) => 4.0,
            (Algorithm::Tree, Protocol::Simple, _) => 28.0,
            (Algorithm::Nvls, Protocol::Simple, true) if self.since(21, 5) => 25.0,
            (Algorithm::Nvls, Protocol::Simple, true) => 23.0,
            (Algorithm::Nvls, _, _) => 0.0,
        }
    }

    /// Most of LL, all channels together, on one machine. llMaxBws.
    pub(super) fn ll_most_gbps(self, sm: u32) -> f64 {
        match self.generation(sm) {
            Generation::Volta => 39.0,
            Generation::Hopper if self.since(21, 5) => 141.0,
            Generation::Ampere | Generation::Hopper => 87.7,
            Generation::Blackwell => 282.0,
        }
    }

    /// Share of a ring's bandwidth that LL gets.
    pub(super) fn ring_ll_share(self, is_reduced_whole: bool) -> f64 {
        match (self.since(21, 5), is_reduced_whole) {
            (true, _) => 0.5,
            (false, true) => 1.0 / 4.0,
            (false, false) => 1.0 / 3.0,
        }
    }

    /// Most of LL128 in a ring, a channel. perChMaxRingLL128Bws.
    pub(super) fn ring_ll128_most_gbps(self, sm: u32) -> f64 {
        match self.generation(sm) {
            Generation::Volta | Generation::Ampere => 20.0,
            Generation::Hopper => 36.7,
            Generation::Blackwell if self.since(29, 2) => 40.0,
            Generation::Blackwell => 2.0 * 36.7,
        }
    }

    /// Most of LL128 in a tree, a channel. perChMaxTreeLL128Bws.
    pub(super) fn tree_ll128_most_gbps(self, sm: u32) -> f64 {
        match self.generation(sm) {
            Generation::Volta | Generation::Ampere => 20.0,
            Generation::Hopper => 36.7,
            Generation::Blackwell if self.since(28, 3) => 55.6,
            Generation::Blackwell => 2.0 * 36.7,
        }
    }

    /// Most of a tree, a channel. perChMaxTreeBws.
    pub(super) fn tree_most_gbps(self, sm: u32) -> f64 {
        match self.generation(sm) {
            Generation::Volta => 26.5,
            Generation::Ampere => 24.0,
            Generation::Hopper => 38.7,
            Generation::Blackwell if self.since(28, 3) => 70.0,
            Generation::Blackwell => 2.0 * 38.7,
        }
    }

    /// Share of the switches' bandwidth that NVLS gets; nothing where the older rule holds.
    /// nvlsEfficiency, since 2.28.3.
    pub(super) fn nvls_efficiency(self, sm: u32) -> Option<f32> {
        self.since(28, 3).then(|| match self.generation(sm) {
            Generation::Volta | Generation::Ampere => 0.0,
            Generation::Hopper => 0.85,
            Generation::Blackwell => 0.74,
        })
    }

    /// Whether NVLS of gathering and scattering is rated apart. Since 2.27.3.
    pub(super) fn rates_nvls_by_collective(self) -> bool {
        self.since(27, 3)
    }

    /// Whether NVLS of gathering and scattering is rated without a ratio. Since 2.23.4.
    pub(super) fn nvls_gathers_without_ratio(self) -> bool {
        self.since(23, 4)
    }

    /// Why LL128 stays off by default on GPUs of these capabilities, links aside. `graph/tuning.cc`.
    pub(super) fn ll128_refuses(self, least_sm: u32, most_sm: u32) -> Option<String> {
        let is_known = if self.since(27, 3) {
            least_sm >= 70
        } else if self.since(25, 1) {
            [70, 80, 90, 100, 120].contains(&least_sm)
        } else {
            [70, 80, 90].contains(&least_sm)
        };
        if !is_known {
            return Some(format!("this release does not enable it on compute capability {}", capability(least_sm)));
        }
        let may_differ = self.since(30, 3) && least_sm >= 90;
        (least_sm != most_sm && !may_differ)
            .then(|| format!("the GPUs differ: {} and {}", capability(least_sm), capability(most_sm)))
    }

    // Fallbacks of releases without per-collective lists.

    /// Whether a call for which nothing is left fails. Since 2.24.3; before, a ring is taken.
    pub(super) fn fails_without_choice(self) -> bool {
        self.since(24, 3)
    }

    /// Whether the ring taken then keeps to the protocols that are enabled. Since 2.22.3.
    pub(super) fn backup_keeps_to_protocols(self) -> bool {
        self.since(22, 3)
    }

    // Channels and threads of one message: `enqueue.cc`.

    /// How a message is spread over channels.
    pub(super) fn spreading(self) -> Spreading {
        if self.since(29, 2) {
            Spreading::Cells { least_traffic_bytes: 32 << 10, counts_ll_fourfold: true, keeps_least_in_sum: true }
        } else if self.since(26, 2) {
            Spreading::Cells { least_traffic_bytes: 16 << 10, counts_ll_fourfold: true, keeps_least_in_sum: false }
        } else if self.since(23, 4) {
            Spreading::Cells { least_traffic_bytes: 16 << 10, counts_ll_fourfold: false, keeps_least_in_sum: false }
        } else if self.since(22, 3) {
            Spreading::SmallCells { least_traffic_bytes: 512 }
        } else if self.since(20, 3) {
            Spreading::Evenly
        } else {
            Spreading::AsChosen
        }
    }

    /// Whether a kernel of a tree always has [`MAX_THREADS`]. Since 2.22.3.
    pub(super) fn trees_take_all_threads(self) -> bool {
        self.since(22, 3)
    }
}

/// How a message is spread over channels, once their largest number is known.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Spreading {
    /// 2.19: over as many as were chosen.
    AsChosen,
    /// 2.20 and 2.21: the same bytes to each, in whole units of the kernel's.
    Evenly,
    /// 2.22: in cells of 16 bytes, with at least so much traffic a channel.
    SmallCells {
        /// Traffic in bytes.
        least_traffic_bytes: u64,
    },
    /// Since 2.23: in cells of the least traffic a channel.
    Cells {
        /// Traffic in bytes.
        least_traffic_bytes: u64,
        /// Whether a byte of LL counts for four. Since 2.26.2.
        counts_ll_fourfold: bool,
        /// Whether the least traffic counts in the sum alone. Since 2.29.2.
        keeps_least_in_sum: bool,
    },
}

/// 89 as "8.9".
fn capability(sm: u32) -> String {
    format!("{}.{}", sm / 10, sm % 10)
}
