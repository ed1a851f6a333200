//! Boxes that NCCL misjudges, and the graph file that sets it right.
//!
//! NCCL goes by constants for what it cannot see, above all for the link between two sockets: 16 GB/s
//! between AMD's, whatever generation they are. Where no ring fits the speeds that it tries, it goes on
//! with the ranks as they come at 0.1 GB/s, and then chooses as if the links were next to nothing: few
//! channels, and the Simple protocol from some kilobytes on. A graph file (`NCCL_GRAPH_FILE`) says what
//! the search should have found. Nothing here measures: what a file is worth is for a run to say.
//!
//! The ring of the file goes through the GPUs socket by socket, and switch by switch within a socket, so
//! that it crosses each link between them once in each direction. What it may claim is the slowest of
//!
//! - each GPU's own link: width x GB/s per lane of its generation, at the speed it is built for, not the
//!   one it idles at (16 lanes: 12, 24, 48 GB/s for generations 3, 4, 5);
//! - the upward link of each switch with GPUs on both its sides;
//! - what really lies between sockets ([`between_sockets_gbps`]);
//!
//! and five sixths of that where Intel CPUs stand between two GPUs, which NCCL itself counts. It is spread
//! over two channels above 24 GB/s and given to one up to there, in whole GB/s, as NCCL's search does with
//! the same GPUs below one CPU: 2 x 24 for eight x16 cards of generation 5.

use std::collections::BTreeSet;

use crate::machine::{CpuNode, CpuVendor, Gpu, PathKind, PcieLink, Topology, Upstream};
use crate::nccl_log::NcclLog;
use crate::nccl_model::graph_file::FileGraph;
use crate::nccl_model::{self, Communicator, Graph, GraphFile, Pattern, Transport};

/// Below this share of what the links carry, NCCL counts on too little.
const TOO_LITTLE: f64 = 0.6;
/// The most that one channel is given.
const CHANNEL_GBPS: f64 = 24.0;
/// What is left of a link's rate between two GPUs below Intel CPUs.
const INTEL_SHARE: f64 = 5.0 / 6.0;
/// Levels of switches that are looked through.
const MOST_LEVELS: usize = 16;

/// What NCCL found for its rings.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Found {
    /// GB/s of all channels together.
    pub ring_gbps: f64,
    /// Whether nothing fitted, and the ranks were taken as they come.
    pub is_fallback: bool,
    /// Whether ranks write into each other's memory; nothing where that was not told.
    pub is_direct: Option<bool>,
}

impl Found {
    /// By the model of NCCL.
    pub fn by_model(communicator: &Communicator) -> Self {
        let ring: &Graph = &communicator.graphs().ring;
        let ranks = communicator.ranks();
        let next = |rank: u32| (rank + 1) % ranks.max(1);
        let is_direct = (0..ranks).all(|rank| communicator.transport(rank, next(rank)) == Some(Transport::P2p));
        Self { ring_gbps: ring.bandwidth_gbps(), is_fallback: ring.is_fallback, is_direct: Some(is_direct) }
    }

    /// By NCCL's own log, where it tells.
    pub fn by_log(log: &NcclLog) -> Option<Self> {
        let ring = log.graphs.iter().find(|graph| graph.pattern == Pattern::Ring.number())?;
        let ring_gbps = f64::from(ring.channels) * ring.bandwidth_gb_per_s;
        let is_nominal = (ring.bandwidth_gb_per_s - f64::from(nccl_model::FALLBACK_GBPS)).abs() < 1e-6;
        Some(Self { ring_gbps, is_fallback: is_nominal || log.fell_back_to_simple_order, is_direct: None })
    }
}

/// The best ring that the links carry.
#[derive(Debug, Clone, PartialEq)]
pub struct Ring {
    /// Ranks in the order of the ring.
    pub order: Vec<u32>,
    /// Channels.
    pub channels: u32,
    /// GB/s of each.
    pub channel_gbps: f64,
    /// The longest kind of path between two neighbours.
    pub path: PathKind,
    /// NUMA nodes it goes through; 0 where that is not known.
    pub nodes: usize,
    /// Who made the CPUs.
    vendor: CpuVendor,
}

impl Ring {
    /// GB/s of all channels together.
    pub fn gbps(&self) -> f64 {
        f64::from(self.channels) * self.channel_gbps
    }

    /// The graph file that claims it. `devices` holds, by rank, the numbers by which NCCL calls the GPUs.
    ///
    /// Trees get the same order and speed: a communicator has as many channels as the poorer of its two
    /// graphs, so a ring alone would be cut down to what the search for trees comes to.
    pub fn graph_file(&self, devices: &[u32]) -> Option<GraphFile> {
        let order: Option<Vec<u32>> =
            self.order.iter().map(|rank| devices.get(usize::try_from(*rank).ok()?).copied()).collect();
        let order = order?;
        let graph = |id: u32, pattern: Pattern| FileGraph {
            id,
            pattern,
            cross_nic: 0,
            speed_intra_gbps: self.channel_gbps,
            speed_inter_gbps: self.channel_gbps,
            latency_inter_us: 0.0,
            type_intra: self.path,
            type_inter: PathKind::Pix,
            same_channels: true,
            orders: vec![order.clone(); self.channels as usize],
        };
        Some(GraphFile { graphs: vec![graph(0, Pattern::Ring), graph(1, Pattern::BalancedTree)] })
    }
}

/// GB/s of a PCIe link in each direction, in NCCL's units, at the speed it is built for.
fn link_gbps(link: PcieLink) -> Option<f64> {
    (1..=6).contains(&link.generation).then(|| f64::from(nccl_model::pcie_gbps(link.generation, link.width)))
}

/// GB/s in each direction between two sockets, at the least that boards of a generation are built with;
/// nothing where that is not known.
///
/// AMD, from the architecture overviews of EPYC 7002, 7003, 9004 and 9005: xGMI links of 16 lanes at 16,
/// 18 and 32 GT/s, of which boards join two or more (three or more since 9004). Intel, from the product
/// briefs of its Xeon generations: UPI links of 20 lanes at 9.6 (QPI), 10.4, 16 GT/s and more, of which
/// boards join two or more (three or more since Sapphire Rapids).
pub const fn between_sockets_gbps(cpu: &CpuNode) -> Option<f64> {
    match (cpu.vendor, cpu.family, cpu.model) {
        // Zen 1 says 0x17 too, and is slower than what came after it.
        (CpuVendor::Amd, 0x17, 0x00..=0x2f) => Some(37.0),
        (CpuVendor::Amd, 0x17, _) => Some(64.0),
        (CpuVendor::Amd, 0x19, 0x00..=0x0f) => Some(72.0),
        (CpuVendor::Amd, 0x19 | 0x1a, _) => Some(192.0),
        (CpuVendor::Intel, 6, 0x00..=0x54) => Some(38.4),
        (CpuVendor::Intel, 6, 0x55..=0x8e) => Some(41.6),
        (CpuVendor::Intel, 6, _) => Some(96.0),
        _ => None,
    }
}

/// The best ring that the links of a machine carry; nothing where GPUs have NVLink, where there are fewer
/// than two, or where it is not known what a link carries.
pub fn best_ring(topology: &Topology) -> Option<Ring> {
    let gpus = &topology.gpus;
    if gpus.len() < 2 || gpus.iter().any(|gpu| !gpu.nvlinks.is_empty()) {
        return None;
    }
    let ways: Vec<Way> = (0..gpus.len()).map(|gpu| Way::up(topology, gpu)).collect::<Option<_>>()?;
    let mut order: Vec<usize> = (0..gpus.len()).collect();
    order.sort_by_key(|gpu| (ways[*gpu].clone(), gpus[*gpu].pci_bus_id.clone()));
    let nodes: BTreeSet<u32> = ways.iter().map(|way| way.node).collect();
    let mut gbps = f64::INFINITY;
    for gpu in gpus {
        gbps = gbps.min(link_gbps(gpu.link)?);
    }
    for (index, switch) in topology.switches.iter().enumerate() {
        let below = ways.iter().filter(|way| way.switches.contains(&index)).count();
        if (1..gpus.len()).contains(&below) {
            gbps = gbps.min(link_gbps(switch.link)?);
        }
    }
    let cpus = || topology.cpus.iter().filter(|cpu| nodes.contains(&cpu.numa_node));
    if nodes.len() > 1 {
        for cpu in cpus() {
            gbps = gbps.min(between_sockets_gbps(cpu)?);
        }
    }
    let neighbours = order.iter().zip(order.iter().cycle().skip(1));
    let path = neighbours.map(|(one, other)| ways[*one].path_to(&ways[*other])).max()?;
    let vendor = cpus().next()?.vendor;
    if path >= PathKind::Phb && vendor == CpuVendor::Intel {
        gbps *= INTEL_SHARE;
    }
    let (channels, channel_gbps) = spread(gbps);
    let order: Vec<u32> = order.into_iter().map(u32::try_from).collect::<Result<_, _>>().ok()?;
    (channel_gbps >= 1.0).then_some(Ring { order, channels, channel_gbps, path, nodes: nodes.len(), vendor })
}

/// A ring in the order of the ranks, at the speed of the slowest GPU's own link: what can be said where
/// nobody tells how the GPUs hang together, as in many virtual machines. Ranks follow PCI addresses, and
/// those mostly follow sockets. Nothing where a link's speed is not known, or where there is NVLink.
pub fn plain_ring(gpus: &[Gpu]) -> Option<Ring> {
    if gpus.len() < 2 || gpus.iter().any(|gpu| gpu.nvlinks.is_some_and(|links| links > 0)) {
        return None;
    }
    let mut gbps = f64::INFINITY;
    for gpu in gpus {
        let ([_, generation], [_, width]) = (gpu.pcie_generation?, gpu.pcie_width?);
        gbps = gbps.min(link_gbps(PcieLink { generation, width, generation_now: None })?);
    }
    let (channels, channel_gbps) = spread(gbps);
    let order = (0..gpus.len()).map(u32::try_from).collect::<Result<_, _>>().ok()?;
    let (path, vendor) = (PathKind::Sys, CpuVendor::Other);
    (channel_gbps >= 1.0).then_some(Ring { order, channels, channel_gbps, path, nodes: 0, vendor })
}

/// Channels, and whole GB/s of each.
fn spread(gbps: f64) -> (u32, f64) {
    let channels = if gbps > CHANNEL_GBPS { 2 } else { 1 };
    (channels, (gbps / f64::from(channels) + 1e-9).floor())
}

/// The way from a GPU up to its CPU. Sorts socket by socket, and switch by switch within.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
struct Way {
    node: u32,
    /// From the top down, by place in the topology.
    switches: Vec<usize>,
}

impl Way {
    fn up(topology: &Topology, gpu: usize) -> Option<Self> {
        let mut switches = Vec::new();
        let mut at = topology.gpus.get(gpu)?.upstream;
        while switches.len() < MOST_LEVELS {
            match at {
                Upstream::Cpu(cpu) => {
                    switches.reverse();
                    return Some(Self { node: topology.cpus.get(cpu)?.numa_node, switches });
                }
                Upstream::Switch(switch) => {
                    switches.push(switch);
                    at = topology.switches.get(switch)?.upstream;
                }
            }
        }
        None
    }

    fn path_to(&self, other: &Self) -> PathKind {
        match (self.node == other.node, self.switches.first() == other.switches.first(), self.switches.is_empty()) {
            (false, ..) => PathKind::Sys,
            (true, _, true) | (true, false, _) => PathKind::Phb,
            (true, true, false) if self.switches == other.switches => PathKind::Pix,
            (true, true, false) => PathKind::Pxb,
        }
    }
}

/// Why NCCL's default is wrong on a machine, as one sentence without its full stop; nothing where it is
/// not: where it found a ring of its own, that must be one between ranks that write into each other's
/// memory, and far below what the links carry.
pub fn why_misjudged(found: &Found, ring: &Ring) -> Option<String> {
    let carried = ring.gbps();
    let per = format!("{} x {} GB/s", ring.channels, ring.channel_gbps);
    let between = match (ring.nodes, ring.vendor) {
        (0, _) => "takes some link of this box for slower than it is",
        (1, _) => "takes the GPUs' links for slower than they are",
        (_, CpuVendor::Amd) => "takes any link between AMD sockets for 16 GB/s",
        _ => "underrates the link between the sockets",
    };
    if found.is_fallback {
        return Some(format!(
            "NCCL {between}, finds no ring at the speeds it tries for these GPUs, and goes on as if the links carried \
             0.1 GB/s, so it picks the Simple protocol for messages of a few kilobytes, where LL is faster: the links \
             carry {per}"
        ));
    }
    let is_low = found.ring_gbps < TOO_LITTLE * carried;
    (is_low && found.is_direct == Some(true)).then(|| {
        format!(
            "NCCL {between}, so it counts on {:.0} GB/s around the ring, where the links carry {per}, and gives up \
             the LL protocol too early",
            found.ring_gbps
        )
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::machine::{GpuNode, Layout, NvLink, NvLinkEnd};
    use crate::nccl_log;
    use crate::wording::fixtures;

    const TURIN: CpuNode = CpuNode { family: 0x1a, model: 2, ..CpuNode::amd(0) };

    fn topology(layout: Layout, generation: u32, cpu: &CpuNode) -> Topology {
        Topology::of_layout(layout, 8, [12, 0], PcieLink::x16(generation), cpu).unwrap()
    }

    fn shape(layout: Layout, generation: u32, cpu: &CpuNode) -> (u32, f64, PathKind) {
        let ring = best_ring(&topology(layout, generation, cpu)).unwrap();
        (ring.channels, ring.channel_gbps, ring.path)
    }

    #[test]
    fn the_ring_claims_what_the_links_carry() {
        assert_eq!(shape(Layout::Sys2, 5, &TURIN), (2, 24.0, PathKind::Sys));
        assert_eq!(shape(Layout::Pix2, 5, &TURIN), (2, 24.0, PathKind::Sys));
        assert_eq!(shape(Layout::Phb1, 5, &TURIN), (2, 24.0, PathKind::Phb));
        assert_eq!(shape(Layout::Pix1, 5, &TURIN), (2, 24.0, PathKind::Pix));
        assert_eq!(shape(Layout::Sys2, 4, &TURIN), (1, 24.0, PathKind::Sys));
        assert_eq!(shape(Layout::Sys2, 3, &TURIN), (1, 12.0, PathKind::Sys));
        // Intel's share, and what lies between its sockets.
        assert_eq!(shape(Layout::Phb1, 5, &CpuNode::intel(0, 0x8f)), (2, 20.0, PathKind::Phb));
        assert_eq!(shape(Layout::Sys2, 5, &CpuNode::intel(0, 0x6a)), (2, 17.0, PathKind::Sys));
        let unknown = CpuNode { vendor: CpuVendor::Other, ..TURIN };
        assert_eq!(best_ring(&topology(Layout::Sys2, 5, &unknown)), None);
        assert!(best_ring(&topology(Layout::Phb1, 5, &unknown)).is_some(), "one socket needs no link between two");
    }

    #[test]
    fn an_idle_link_counts_for_what_it_is_built_for_and_a_narrow_one_for_what_it_is() {
        let mut topology = topology(Layout::Sys2, 5, &TURIN);
        topology.gpus[3].link.generation_now = Some(1);
        assert!((best_ring(&topology).unwrap().gbps() - 48.0).abs() < 1e-9);
        topology.gpus[3].link.width = 8;
        assert!((best_ring(&topology).unwrap().gbps() - 24.0).abs() < 1e-9);
        topology.gpus[0].nvlinks = vec![NvLink { to: NvLinkEnd::Switch, links: 18 }];
        assert_eq!(best_ring(&topology), None);
    }

    #[test]
    fn a_shared_way_up_is_a_limit_only_where_the_ring_leaves_the_switch() {
        let mut two = topology(Layout::Pix2, 5, &TURIN);
        two.switches[0].link = PcieLink::x16(4);
        assert!((best_ring(&two).unwrap().gbps() - 24.0).abs() < 1e-9);
        let mut one = topology(Layout::Pix1, 5, &TURIN);
        one.switches[0].link = PcieLink::x16(4);
        assert!((best_ring(&one).unwrap().gbps() - 48.0).abs() < 1e-9);
    }

    /// However the ranks lie, each socket is entered and left once.
    #[test]
    fn the_order_goes_socket_by_socket() {
        let mut mixed = topology(Layout::Sys2, 5, &TURIN);
        mixed.gpus.swap(1, 6);
        mixed.gpus.swap(2, 4);
        let ring = best_ring(&mixed).unwrap();
        let node = |rank: &u32| match mixed.gpus[*rank as usize] {
            GpuNode { upstream: Upstream::Cpu(cpu), .. } => cpu,
            _ => panic!("a slot"),
        };
        let crossings =
            ring.order.iter().zip(ring.order.iter().cycle().skip(1)).filter(|(one, other)| node(one) != node(other));
        assert_eq!(crossings.count(), 2, "{:?}", ring.order);
        let ranks: BTreeSet<u32> = ring.order.iter().copied().collect();
        assert_eq!(ranks, (0..8).collect());
    }

    #[test]
    fn the_file_names_the_gpus_as_nccl_does_and_has_a_tree_of_the_same_shape() {
        let ring = best_ring(&topology(Layout::Sys2, 5, &TURIN)).unwrap();
        let devices: Vec<u32> = (8..16).collect();
        let file = ring.graph_file(&devices).unwrap();
        assert_eq!(
            file.graphs.iter().map(|graph| (graph.id, graph.orders.len())).collect::<Vec<_>>(),
            [(0, 2), (1, 2)]
        );
        for graph in &file.graphs {
            assert_eq!(graph.orders, vec![devices.clone(); 2]);
            assert_eq!((graph.speed_intra_gbps, graph.type_intra), (24.0, PathKind::Sys));
        }
        assert_eq!(ring.graph_file(&devices[1..]), None);
        let read = GraphFile::read(&file.write()).unwrap();
        assert_eq!(read, file);
    }

    #[test]
    fn without_a_wiring_the_ring_follows_the_ranks_at_the_slowest_link() {
        let gpu = |index, generation| Gpu {
            pcie_generation: Some([1, generation]),
            pcie_width: Some([16, 16]),
            nvlinks: None,
            ..fixtures::gpu(index)
        };
        let ring = plain_ring(&[gpu(0, 5), gpu(1, 5)]).unwrap();
        assert_eq!((ring.channels, ring.channel_gbps, ring.order.as_slice()), (2, 24.0, &[0, 1][..]));
        assert!((plain_ring(&[gpu(0, 5), gpu(1, 4)]).unwrap().gbps() - 24.0).abs() < 1e-9);
        assert_eq!(plain_ring(&[gpu(0, 5), Gpu { pcie_width: None, ..gpu(1, 5) }]), None);
        assert_eq!(plain_ring(&[gpu(0, 5), Gpu { nvlinks: Some(4), ..gpu(1, 5) }]), None);
        assert_eq!(plain_ring(&[gpu(0, 5)]), None);
    }

    #[test]
    fn only_a_fallback_or_a_link_taken_for_far_too_slow_is_a_misjudgement() {
        let ring = best_ring(&topology(Layout::Sys2, 5, &TURIN)).unwrap();
        let found = |ring_gbps: f64, is_fallback: bool, is_direct| Found { ring_gbps, is_fallback, is_direct };
        let why = why_misjudged(&found(0.1, true, None), &ring).unwrap();
        assert!(why.contains("0.1 GB/s") && why.contains("2 x 24 GB/s") && why.contains("AMD sockets"), "{why}");
        assert!(!why.contains(". "), "one sentence: {why}");
        let why = why_misjudged(&found(15.0, false, Some(true)), &ring).unwrap();
        assert!(why.contains("15 GB/s"), "{why}");
        // By way of host memory the links carry less, and how much is for nobody here to say.
        assert_eq!(why_misjudged(&found(15.0, false, Some(false)), &ring), None);
        assert_eq!(why_misjudged(&found(15.0, false, None), &ring), None);
        assert_eq!(why_misjudged(&found(40.0, false, Some(true)), &ring), None);
    }

    #[test]
    fn nccls_own_log_tells_the_fallback() {
        let lines = |channels: u32, bandwidth: &str| {
            let line = format!("Pattern 4, crossNic 0, nChannels {channels}, bw {bandwidth}/{bandwidth}, type SYS/PIX");
            nccl_log::parse(format!("box:1:1 [0] NCCL INFO {line}, sameChannels 1\n"))
        };
        assert_eq!(Found::by_log(&nccl_log::parse("")), None);
        let fallen = Found::by_log(&lines(1, "0.100000")).unwrap();
        assert!(fallen.is_fallback && (fallen.ring_gbps - 0.1).abs() < 1e-9);
        let sound = Found::by_log(&lines(2, "24.000000")).unwrap();
        assert!(!sound.is_fallback && (sound.ring_gbps - 48.0).abs() < 1e-9);
    }
}
