//! The machine as NCCL builds it: nodes, links with bandwidth, and the path between any two GPUs.
//!
//! After `graph/topo.cc` and `graph/paths.cc`. Links keep NCCL's order, because paths of equal worth
//! are told apart by it.

use std::collections::BTreeMap;

use crate::machine::{Architecture, CpuNode, CpuVendor, NvLinkEnd, PathKind, PcieLink, Topology, Upstream, pci_number};

use super::constants::{self, LOCAL_GBPS, Rules};
use super::{ModelError, PeerRules};

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum NodeKind {
    Gpu,
    /// What a GPU hangs below, in releases that tell the two apart.
    Device,
    Pci,
    NvSwitch,
    Cpu,
}

#[derive(Debug, Clone, Copy)]
pub(super) struct Link {
    /// The kind of a path that is this link alone.
    pub kind: PathKind,
    /// What is left of it, while a search counts.
    pub gbps: f32,
    pub to: usize,
}

#[derive(Debug, Clone)]
pub(super) struct Node {
    pub kind: NodeKind,
    pub links: Vec<Link>,
    /// Where it is an Intel CPU of x86-64.
    pub is_intel: bool,
    /// Broadcom switches are told by it.
    device: Option<[u16; 4]>,
}

/// A way from one node to another.
#[derive(Debug, Clone)]
pub(super) struct Path {
    pub kind: PathKind,
    pub gbps: f32,
    /// Links in order: the node each leaves, and its place there.
    pub steps: Vec<(usize, usize)>,
}

impl Path {
    const fn none() -> Self {
        Self { kind: PathKind::Dis, gbps: 0.0, steps: Vec::new() }
    }
}

#[derive(Debug, Clone)]
pub(super) struct System {
    pub nodes: Vec<Node>,
    /// GPUs by their place in NCCL's list.
    pub gpus: Vec<usize>,
    /// The rank of each.
    pub ranks: Vec<u32>,
    pub nv_switch: Option<usize>,
    /// From each GPU to each, by place.
    pub paths: Vec<Vec<Path>>,
    /// From each GPU to the NVSwitch and back.
    pub to_switch: Vec<Path>,
    pub from_switch: Vec<Path>,
    /// The most one channel could have, and the most a GPU has.
    pub most_gbps: f32,
    pub total_gbps: f32,
    pub least_sm: u32,
    pub most_sm: u32,
    /// Whether NCCL takes the machine's CPUs for AMD's.
    pub is_amd: bool,
    pub is_power: bool,
    /// Whether each pair may use peer access, by NCCL's judgement, by place.
    pub peers: Vec<Vec<bool>>,
    /// The farthest that peer access is used.
    pub level: PathKind,
    /// Paths as they were before what cannot use peer access was led through a CPU, by place.
    pub direct: Vec<Vec<(PathKind, f32)>>,
}

/// A system while it is built, with the places of NCCL's lists.
struct Builder {
    rules: Rules,
    nodes: Vec<Node>,
    gpus: Vec<usize>,
    ranks: Vec<u32>,
    /// The nodes that links of a GPU leave: itself, or its device.
    ends: Vec<usize>,
    cpus: Vec<usize>,
    nv_switch: Option<usize>,
}

impl Builder {
    fn add(&mut self, kind: NodeKind) -> usize {
        self.nodes.push(Node { kind, links: Vec::new(), is_intel: false, device: None });
        self.nodes.len() - 1
    }

    /// Adds to the link where there is one, and keeps links by falling bandwidth.
    fn connect(&mut self, from: usize, to: usize, kind: PathKind, gbps: f32) {
        let links = &mut self.nodes[from].links;
        let known = links.iter().position(|link| link.to == to && link.kind == kind);
        let mut at = known.unwrap_or_else(|| {
            links.push(Link { kind, gbps: 0.0, to });
            links.len() - 1
        });
        links[at].gbps += gbps;
        while at > 0 && links[at - 1].gbps < links[at].gbps {
            links.swap(at - 1, at);
            at -= 1;
        }
    }

    fn add_pci(&mut self, topology: &Topology, under: Upstream, parent: usize) {
        let mut children: Vec<(u64, Child)> = Vec::new();
        for (index, switch) in topology.switches.iter().enumerate().filter(|(_, switch)| switch.upstream == under) {
            children.push((pci_number(&switch.pci_bus_id).unwrap_or(0), Child::Switch(index)));
        }
        for (index, gpu) in topology.gpus.iter().enumerate().filter(|(_, gpu)| gpu.upstream == under) {
            children.push((pci_number(&gpu.pci_bus_id).unwrap_or(0), Child::Gpu(index)));
        }
        // NCCL keeps the devices below a switch by their address.
        children.sort_unstable_by_key(|(address, _)| *address);
        for (_, child) in children {
            match child {
                Child::Switch(index) => {
                    let switch = &topology.switches[index];
                    // A switch without a GPU below it is never seen.
                    if !holds_a_gpu(topology, index) {
                        continue;
                    }
                    let node = self.add(NodeKind::Pci);
                    self.nodes[node].device = switch.device;
                    self.add_pci(topology, Upstream::Switch(index), node);
                    self.connect_pci(node, parent, constants::pcie_gbps(switch.link.generation, switch.link.width));
                }
                Child::Gpu(index) => self.add_gpu(topology, index, parent),
            }
        }
    }

    fn add_gpu(&mut self, topology: &Topology, index: usize, parent: usize) {
        let gbps = gpu_link_gbps(topology.gpus[index].link, self.rules);
        let gpu = if self.rules.has_device_nodes() {
            let device = self.add(NodeKind::Device);
            self.connect_pci(device, parent, gbps);
            let gpu = self.add(NodeKind::Gpu);
            self.connect(device, gpu, PathKind::Loc, LOCAL_GBPS);
            self.connect(gpu, device, PathKind::Loc, LOCAL_GBPS);
            self.ends.push(device);
            gpu
        } else {
            let gpu = self.add(NodeKind::Gpu);
            self.connect_pci(gpu, parent, gbps);
            self.ends.push(gpu);
            gpu
        };
        self.gpus.push(gpu);
        self.ranks.push(index as u32);
    }

    fn connect_pci(&mut self, below: usize, above: usize, gbps: f32) {
        self.connect(below, above, PathKind::Pix, gbps);
        self.connect(above, below, PathKind::Pix, gbps);
    }

    fn add_nvlinks(&mut self, topology: &Topology) {
        for place in 0..self.gpus.len() {
            let gpu = &topology.gpus[self.ranks[place] as usize];
            let one = self.rules.nvlink_gbps(gpu.sm());
            for link in &gpu.nvlinks {
                let gbps = link.links as f32 * one;
                match link.to {
                    NvLinkEnd::Gpu(other) => {
                        let Some(other) = self.ranks.iter().position(|rank| *rank as usize == other) else { continue };
                        self.connect(self.ends[place], self.ends[other], PathKind::Nvl, gbps);
                    }
                    NvLinkEnd::Switch => {
                        let switch = match self.nv_switch {
                            Some(switch) => switch,
                            None => self.add(NodeKind::NvSwitch),
                        };
                        self.nv_switch = Some(switch);
                        self.connect(self.ends[place], switch, PathKind::Nvl, gbps);
                        self.connect(switch, self.ends[place], PathKind::Nvl, gbps);
                    }
                }
            }
        }
    }

    /// Broadcom switches that show themselves in two levels become one.
    fn flatten_broadcom(&mut self) {
        for switch in 0..self.nodes.len() {
            let Some(generation) =
                self.nodes[switch].device.and_then(|device| self.rules.broadcom_generation(device, 0))
            else {
                continue;
            };
            let subs: Vec<usize> = self.nodes[switch]
                .links
                .iter()
                .map(|link| link.to)
                .filter(|to| {
                    let device = self.nodes[*to].device;
                    device.and_then(|device| self.rules.broadcom_generation(device, 1)) == Some(generation)
                })
                .collect();
            for sub in subs {
                self.nodes[switch].links.retain(|link| link.to != sub);
                let moved: Vec<Link> = std::mem::take(&mut self.nodes[sub].links);
                self.nodes[sub].device = None;
                for link in moved.into_iter().filter(|link| link.to != switch) {
                    self.nodes[switch].links.push(link);
                    if let Some(back) = self.nodes[link.to].links.iter_mut().find(|back| back.to == sub) {
                        back.to = switch;
                    }
                }
            }
        }
    }

    fn connect_cpus(&mut self, cpus: &[&CpuNode]) {
        for (from, cpu) in cpus.iter().enumerate() {
            for to in (0..self.cpus.len()).filter(|to| *to != from) {
                let gbps = self.rules.between_cpus_gbps(cpu);
                self.connect(self.cpus[from], self.cpus[to], PathKind::Sys, gbps);
            }
        }
    }

    /// The way up stands last at every device, below the CPUs.
    fn sort(&mut self, node: usize, above: Option<usize>) {
        if let Some(above) = above {
            let links = &mut self.nodes[node].links;
            if let Some(at) = links.iter().position(|link| link.to == above) {
                let up = links.remove(at);
                links.push(up);
            }
        }
        let below: Vec<usize> = self.nodes[node]
            .links
            .iter()
            .filter(|link| link.kind == PathKind::Pix && Some(link.to) != above)
            .map(|link| link.to)
            .collect();
        for next in below {
            self.sort(next, Some(node));
        }
    }

    /// Paths from every node to one, by breadth.
    fn paths_to(&self, base: usize, base_end: usize, has_nvb: bool) -> Vec<Path> {
        let mut paths = vec![Path::none(); self.nodes.len()];
        paths[base] = Path { kind: PathKind::Loc, gbps: LOCAL_GBPS, steps: Vec::new() };
        // A path may lead through one GPU on the way, which is one step longer where the GPU hangs
        // below a device.
        let farthest_through = if self.nodes[base].kind == NodeKind::Gpu && base != base_end { 2 } else { 1 };
        let mut wave = vec![base];
        while !wave.is_empty() {
            let mut next_wave = Vec::new();
            for &node in &wave {
                for link in &self.nodes[node].links {
                    let path = &paths[node];
                    let far = link.to;
                    let gbps = path.gbps.min(link.gbps);
                    let is_through = if self.rules.has_device_nodes() {
                        node != base_end
                            && self.nodes[node].kind == NodeKind::Device
                            && (link.kind != PathKind::Loc || self.nodes[far].kind != NodeKind::Gpu)
                    } else {
                        node != base && self.nodes[node].kind == NodeKind::Gpu
                    };
                    let end = if self.rules.has_device_nodes() { NodeKind::Device } else { NodeKind::Gpu };
                    let may_lead_through = has_nvb
                        && link.kind == PathKind::Nvl
                        && self.nodes[far].kind == end
                        && path.steps.len() <= farthest_through;
                    if is_through && !may_lead_through {
                        continue;
                    }
                    let kind = self.kind_with(path, node, link, end, farthest_through);
                    let known = &paths[far];
                    let is_better = if self.rules.has_device_nodes() {
                        kind < known.kind
                            || (kind == known.kind && known.gbps < gbps)
                            || (kind == known.kind
                                && (known.gbps - gbps).abs() < f32::EPSILON
                                && known.steps.len() > path.steps.len() + 1)
                    } else {
                        (known.gbps <= 0.0 || known.steps.len() > path.steps.len()) && known.gbps < gbps
                    };
                    if !is_better {
                        continue;
                    }
                    let back = self.nodes[far].links.iter().position(|back| back.to == node && back.kind == link.kind);
                    let Some(back) = back else { continue };
                    let mut steps = Vec::with_capacity(path.steps.len() + 1);
                    steps.push((far, back));
                    steps.extend_from_slice(&path.steps);
                    paths[far] = Path { kind, gbps, steps };
                    if !next_wave.contains(&far) {
                        next_wave.push(far);
                    }
                }
            }
            wave = next_wave;
        }
        paths
    }

    fn kind_with(&self, path: &Path, node: usize, link: &Link, end: NodeKind, farthest_through: usize) -> PathKind {
        let (near, far) = (self.nodes[node].kind, self.nodes[link.to].kind);
        let mut kind = link.kind;
        if near == NodeKind::Pci && far == NodeKind::Pci {
            kind = PathKind::Pxb;
        }
        if link.kind == PathKind::Pix && (near == NodeKind::Cpu || far == NodeKind::Cpu) {
            kind = PathKind::Phb;
        }
        let is_second =
            if self.rules.has_device_nodes() { path.steps.len() == farthest_through } else { !path.steps.is_empty() };
        if near == end && path.kind == PathKind::Nvl && kind == PathKind::Nvl && is_second {
            kind = PathKind::Nvb;
        }
        path.kind.max(kind)
    }

    /// The CPU a GPU's data goes through where peer access is not used, by place.
    fn local_cpu(&self, to_cpus: &[Vec<Path>], gpu: usize) -> usize {
        let places = 0..to_cpus.len();
        let path = |cpu: usize| &to_cpus[cpu][gpu];
        let best = if self.rules.has_device_nodes() {
            places.min_by(|a, b| {
                let (a, b) = (path(*a), path(*b));
                b.gbps.total_cmp(&a.gbps).then(a.kind.cmp(&b.kind)).then(a.steps.len().cmp(&b.steps.len()))
            })
        } else {
            places.filter(|cpu| !path(*cpu).steps.is_empty()).min_by_key(|cpu| path(*cpu).steps.len())
        };
        best.unwrap_or(0)
    }
}

enum Child {
    Switch(usize),
    Gpu(usize),
}

fn holds_a_gpu(topology: &Topology, switch: usize) -> bool {
    let under = Upstream::Switch(switch);
    topology.gpus.iter().any(|gpu| gpu.upstream == under)
        || topology
            .switches
            .iter()
            .enumerate()
            .any(|(index, below)| below.upstream == under && index != switch && holds_a_gpu(topology, index))
}

/// GB/s of the link of a GPU, as a release reads it.
pub(super) fn gpu_link_gbps(link: PcieLink, rules: Rules) -> f32 {
    let generation = match link.generation_now {
        Some(now) if rules.reads_current_link() => now,
        _ => link.generation,
    };
    constants::pcie_gbps(generation, link.width)
}

impl System {
    /// Builds the system of a valid topology, with its paths.
    pub(super) fn build(topology: &Topology, peer: PeerRules, rules: Rules) -> Result<Self, ModelError> {
        let mut builder = Builder {
            rules,
            nodes: Vec::new(),
            gpus: Vec::new(),
            ranks: Vec::new(),
            ends: Vec::new(),
            cpus: Vec::new(),
            nv_switch: None,
        };
        // NCCL meets a CPU with the first rank below it.
        let mut cpus: Vec<usize> = Vec::new();
        for gpu in 0..topology.gpus.len() {
            if let Some(cpu) = topology.cpu_of(gpu).filter(|cpu| !cpus.contains(cpu)) {
                cpus.push(cpu);
            }
        }
        let described: Vec<&CpuNode> = cpus.iter().map(|cpu| &topology.cpus[*cpu]).collect();
        for (cpu, node) in cpus.iter().zip(&described) {
            let at = builder.add(NodeKind::Cpu);
            builder.nodes[at].is_intel = node.architecture == Architecture::X86_64 && node.vendor == CpuVendor::Intel;
            builder.cpus.push(at);
            builder.add_pci(topology, Upstream::Cpu(*cpu), at);
        }
        builder.add_nvlinks(topology);
        builder.flatten_broadcom();
        builder.connect_cpus(&described);
        for cpu in builder.cpus.clone() {
            builder.sort(cpu, None);
        }
        let first = described.first().map_or_else(|| CpuNode::amd(0), |cpu| (*cpu).clone());
        let sms: BTreeMap<u32, u32> = topology.gpus.iter().map(|gpu| (gpu.sm(), 0)).collect();
        let mut system = Self {
            nodes: Vec::new(),
            gpus: builder.gpus.clone(),
            ranks: builder.ranks.clone(),
            nv_switch: builder.nv_switch,
            paths: Vec::new(),
            to_switch: Vec::new(),
            from_switch: Vec::new(),
            most_gbps: LOCAL_GBPS,
            total_gbps: LOCAL_GBPS,
            least_sm: *sms.keys().next().unwrap_or(&0),
            most_sm: *sms.keys().next_back().unwrap_or(&0),
            is_amd: first.architecture == Architecture::X86_64 && first.vendor == CpuVendor::Amd,
            is_power: first.architecture == Architecture::Power,
            peers: Vec::new(),
            level: peer.level.unwrap_or_else(|| rules.peer_level(&first, topology.gpus.len())),
            direct: Vec::new(),
        };
        system.find_paths(&builder, topology, peer)?;
        system.nodes = builder.nodes;
        Ok(system)
    }

    fn find_paths(&mut self, builder: &Builder, topology: &Topology, peer: PeerRules) -> Result<(), ModelError> {
        let count = self.gpus.len();
        let to_gpus: Vec<Vec<Path>> =
            (0..count).map(|gpu| builder.paths_to(self.gpus[gpu], builder.ends[gpu], peer.has_nvb)).collect();
        let to_cpus: Vec<Vec<Path>> =
            builder.cpus.iter().map(|cpu| builder.paths_to(*cpu, *cpu, peer.has_nvb)).collect();
        if let Some(switch) = builder.nv_switch {
            let paths = builder.paths_to(switch, switch, peer.has_nvb);
            self.to_switch = self.gpus.iter().map(|gpu| paths[*gpu].clone()).collect();
            self.from_switch = (0..count).map(|gpu| to_gpus[gpu][switch].clone()).collect();
        }
        self.paths =
            (0..count).map(|from| (0..count).map(|to| to_gpus[to][self.gpus[from]].clone()).collect()).collect();
        self.direct = self.paths.iter().map(|row| row.iter().map(|path| (path.kind, path.gbps)).collect()).collect();
        self.peers = vec![vec![true; count]; count];
        for (to, to_gpu) in to_gpus.iter().enumerate() {
            for from in (0..count).filter(|from| *from != to) {
                let granted = self.is_granted(builder, topology, peer, from, to)?;
                self.peers[from][to] = granted;
                if granted {
                    continue;
                }
                // Through the CPU nearest to the receiver.
                let cpu = builder.local_cpu(&to_cpus, self.gpus[to]);
                let (up, down) = (&to_cpus[cpu][self.gpus[from]], &to_gpu[builder.cpus[cpu]]);
                self.paths[from][to] = Path {
                    kind: up.kind.max(down.kind),
                    gbps: up.gbps.min(down.gbps),
                    steps: up.steps.iter().chain(&down.steps).copied().collect(),
                };
            }
        }
        if count > 1 {
            self.most_gbps = 0.0;
            self.total_gbps = 0.0;
        }
        // Where GPUs hang below devices, the devices' paths count, which never lead through a CPU for want
        // of peer access.
        let ends = &builder.ends;
        let to_ends: Vec<Vec<Path>> = if builder.rules.has_device_nodes() {
            ends.iter().map(|end| builder.paths_to(*end, *end, peer.has_nvb)).collect()
        } else {
            Vec::new()
        };
        for from in 0..count {
            let row: Vec<f32> = if builder.rules.has_device_nodes() {
                (0..count).filter(|to| *to != from).map(|to| to_ends[to][ends[from]].gbps).collect()
            } else {
                (0..count).filter(|to| *to != from).map(|to| self.paths[from][to].gbps).collect()
            };
            self.most_gbps = row.into_iter().fold(self.most_gbps, f32::max);
            let links = &builder.nodes[builder.ends[from]].links;
            let nvlink: f32 = links.iter().filter(|link| link.kind == PathKind::Nvl).map(|link| link.gbps).sum();
            let pcie = links.iter().filter(|link| link.kind == PathKind::Pix).map(|link| link.gbps).fold(0.0, f32::max);
            if count > 1 {
                self.total_gbps = self.total_gbps.max(nvlink.max(pcie));
            }
        }
        Ok(())
    }

    /// Whether NCCL uses peer access from one GPU to another.
    fn is_granted(
        &self,
        builder: &Builder,
        topology: &Topology,
        peer: PeerRules,
        from: usize,
        to: usize,
    ) -> Result<bool, ModelError> {
        let path = &self.paths[from][to];
        if path.kind > self.level {
            return Ok(false);
        }
        if peer.skips_driver {
            return Ok(true);
        }
        let mut hops = vec![from];
        if path.kind == PathKind::Nvb {
            // The link of each step leaves its node towards the next.
            let through = path.steps.iter().map(|(node, link)| builder.nodes[*node].links[*link].to);
            hops.extend(
                through.filter_map(|node| builder.ends.iter().position(|end| *end == node)).filter(|gpu| *gpu != to),
            );
        }
        hops.push(to);
        let granted = hops.windows(2).all(|pair| {
            let [a, b] = [pair[0], pair[1]].map(|place| self.ranks[place] as usize);
            a == b || topology.peer_access.is_granted(a, b)
        });
        if !granted && path.kind <= PathKind::Nvb && !peer.mutes_driver {
            return Err(ModelError::NvLinkWithoutPeerAccess { ranks: [self.ranks[from], self.ranks[to]] });
        }
        Ok(granted)
    }

    /// The place of a rank in NCCL's list.
    pub(super) fn place_of(&self, rank: u32) -> Option<usize> {
        self.ranks.iter().position(|known| *known == rank)
    }

    /// Whether NVLink joins GPUs in two islands.
    pub(super) fn has_two_islands(&self) -> bool {
        let count = self.gpus.len();
        let mut island: Vec<usize> = (0..count).collect();
        for gpu in 0..count {
            for other in gpu + 1..count {
                if self.paths[gpu][other].kind == PathKind::Nvl {
                    island[other] = island[gpu];
                }
            }
        }
        (0..count).filter(|name| island.iter().filter(|of| *of == name).count() > 1).count() == 2
    }
}
