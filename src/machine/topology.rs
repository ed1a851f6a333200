//! How GPUs hang together: links, switches, sockets, and who may reach whom.
//!
//! The description is the one NCCL works from: NUMA nodes ("CPUs"), PCI switches, GPUs, NVLinks. It
//! can be written by hand (TOML or JSON), built for a common layout ([`Topology::of_layout`]) or read
//! from a machine. It says what is there; what NCCL makes of it is for `nccl_model` to say.

use std::collections::BTreeSet;

use serde::{Deserialize, Serialize};

/// Most GPUs of one machine that are understood.
pub const MAX_GPUS: usize = 32;
/// Most PCI switches of one machine that are understood.
pub const MAX_SWITCHES: usize = 64;
/// Most NUMA nodes with GPUs.
const MAX_CPUS: usize = 32;
/// Most switches on the way from a GPU to its CPU.
const MAX_DEPTH: usize = 8;
/// Most NVLinks between two ends; the largest GPUs of today have 18.
const MAX_LINKS: u32 = 64;

/// The machine as NCCL sees it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Topology {
    /// NUMA nodes that have GPUs below them: what NCCL calls a CPU. Two nodes of one socket are two
    /// entries, and NCCL takes the link between them for one between sockets.
    pub cpus: Vec<CpuNode>,
    /// PCI switches. Root ports are none: a GPU in a slot of the CPU hangs on the CPU. A switch counts
    /// once, although the kernel shows a port upwards and a port downwards.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub switches: Vec<PciSwitch>,
    /// GPUs in the order of the ranks.
    pub gpus: Vec<GpuNode>,
    /// Which pairs the driver lets read and write each other's memory.
    #[serde(default)]
    pub peer_access: PeerAccess,
    /// Whether the driver offers NVSwitch multicast, which NCCL needs for NVLS.
    #[serde(default)]
    pub has_multicast: bool,
}

/// A NUMA node.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CpuNode {
    /// The kernel's number of the node.
    pub numa_node: u32,
    /// Its instruction set.
    pub architecture: Architecture,
    /// Who made it.
    pub vendor: CpuVendor,
    /// "cpu family" of /proc/cpuinfo.
    #[serde(default)]
    pub family: u32,
    /// "model" of /proc/cpuinfo. NCCL tells Intel's generations by it.
    #[serde(default)]
    pub model: u32,
}

impl CpuNode {
    /// An AMD EPYC; NCCL makes no difference between their generations.
    pub const fn amd(numa_node: u32) -> Self {
        Self { numa_node, architecture: Architecture::X86_64, vendor: CpuVendor::Amd, family: 25, model: 17 }
    }

    /// An Intel Xeon of a model: 0x55 Skylake, 0x6A Ice Lake, 0x8F Sapphire Rapids, 0xCF Emerald Rapids.
    pub const fn intel(numa_node: u32, model: u32) -> Self {
        Self { numa_node, architecture: Architecture::X86_64, vendor: CpuVendor::Intel, family: 6, model }
    }
}

/// An instruction set, as NCCL tells them apart.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Architecture {
    /// x86-64.
    #[serde(rename = "x86_64")]
    X86_64,
    /// 64-bit ARM.
    #[serde(rename = "arm64")]
    Arm64,
    /// 64-bit POWER.
    #[serde(rename = "ppc64")]
    Power,
}

/// Who made a CPU, as NCCL tells them apart.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum CpuVendor {
    /// GenuineIntel.
    Intel,
    /// AuthenticAMD.
    Amd,
    /// CentaurHauls and Shanghai.
    Zhaoxin,
    /// Anybody else, ARM and POWER included.
    Other,
}

/// What a device hangs on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Upstream {
    /// The CPU at this place in [`Topology::cpus`].
    Cpu(usize),
    /// The switch at this place in [`Topology::switches`].
    Switch(usize),
}

/// A PCI Express link.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PcieLink {
    /// The fastest generation both ends can do: 1 to 6.
    pub generation: u32,
    /// Lanes.
    pub width: u32,
    /// The generation the link runs at now, where it is known: an idle GPU slows its link down.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub generation_now: Option<u32>,
}

impl PcieLink {
    /// Sixteen lanes of a generation, at full speed.
    pub const fn x16(generation: u32) -> Self {
        Self { generation, width: 16, generation_now: None }
    }
}

/// A PCI switch.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PciSwitch {
    /// PCI address of its port upwards ("0000:01:00.0").
    pub pci_bus_id: String,
    /// What it hangs on.
    pub upstream: Upstream,
    /// The link upwards.
    pub link: PcieLink,
    /// Vendor, device, and the vendor and device of the subsystem: NCCL flattens certain Broadcom
    /// switches that show themselves in two levels.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub device: Option<[u16; 4]>,
}

/// A GPU.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct GpuNode {
    /// PCI address ("0000:21:00.0").
    pub pci_bus_id: String,
    /// Compute capability, such as [12, 0].
    pub compute_capability: [u32; 2],
    /// What it hangs on.
    pub upstream: Upstream,
    /// Its PCI Express link.
    pub link: PcieLink,
    /// NVLinks, by where they lead.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub nvlinks: Vec<NvLink>,
}

impl GpuNode {
    /// The capability as NCCL writes it: 89 for [8, 9].
    pub const fn sm(&self) -> u32 {
        self.compute_capability[0] * 10 + self.compute_capability[1]
    }
}

/// NVLinks of one GPU that lead to one place.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct NvLink {
    /// Where they lead. Between two GPUs both ends are listed.
    pub to: NvLinkEnd,
    /// How many there are.
    pub links: u32,
}

/// Where an NVLink leads.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum NvLinkEnd {
    /// To the GPU at this place in [`Topology::gpus`].
    Gpu(usize),
    /// To an NVSwitch. NCCL takes all of a machine's switches for one.
    Switch,
}

/// Which pairs of GPUs the driver grants peer access (read and write).
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum PeerAccess {
    /// All pairs.
    #[default]
    All,
    /// None: GeForce cards with the common driver, most virtual machines.
    None,
    /// These pairs, in both directions, by place in [`Topology::gpus`].
    Pairs(Vec<[usize; 2]>),
}

impl PeerAccess {
    /// Whether two different GPUs may reach each other's memory.
    pub fn is_granted(&self, a: usize, b: usize) -> bool {
        match self {
            Self::All => true,
            Self::None => false,
            Self::Pairs(pairs) => pairs.iter().any(|pair| *pair == [a, b] || *pair == [b, a]),
        }
    }
}

/// How far apart two devices are, nearest first, in NCCL's words.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "UPPERCASE")]
pub enum PathKind {
    /// The same device.
    Loc,
    /// NVLink, through NVSwitch or not.
    Nvl,
    /// NVLink by way of another GPU.
    Nvb,
    /// The coherent link between a Grace CPU and its GPU.
    C2c,
    /// One PCI switch.
    Pix,
    /// Several PCI switches.
    Pxb,
    /// To a network adapter by way of C2C.
    P2c,
    /// To a network adapter by way of another GPU.
    Pxn,
    /// By way of the CPU's host bridge.
    Phb,
    /// From one NUMA node to another.
    Sys,
    /// Only over the network.
    Net,
    /// Not at all.
    Dis,
}

impl PathKind {
    /// The word NCCL uses, in logs, graph files and `NCCL_P2P_LEVEL`.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Loc => "LOC",
            Self::Nvl => "NVL",
            Self::Nvb => "NVB",
            Self::C2c => "C2C",
            Self::Pix => "PIX",
            Self::Pxb => "PXB",
            Self::P2c => "P2C",
            Self::Pxn => "PXN",
            Self::Phb => "PHB",
            Self::Sys => "SYS",
            Self::Net => "NET",
            Self::Dis => "DIS",
        }
    }

    /// The kind NCCL calls by this word, exactly.
    pub fn of(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|kind| kind.name() == name)
    }

    /// All kinds, nearest first.
    pub const ALL: [Self; 12] = [
        Self::Loc,
        Self::Nvl,
        Self::Nvb,
        Self::C2c,
        Self::Pix,
        Self::Pxb,
        Self::P2c,
        Self::Pxn,
        Self::Phb,
        Self::Sys,
        Self::Net,
        Self::Dis,
    ];

    /// What lies between the two devices, in words.
    pub const fn describe(self) -> &'static str {
        match self {
            Self::Loc => "the same device",
            Self::Nvl => "NVLink",
            Self::Nvb => "NVLink through another GPU",
            Self::C2c => "C2C",
            Self::Pix => "one PCI switch",
            Self::Pxb => "several PCI switches",
            Self::P2c => "C2C and PCI",
            Self::Pxn => "another GPU's network path",
            Self::Phb => "the CPU's host bridge",
            Self::Sys => "the link between sockets",
            Self::Net => "the network",
            Self::Dis => "nothing",
        }
    }
}

impl std::fmt::Display for PathKind {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.pad(self.name())
    }
}

/// Common ways to put GPUs into a box.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Layout {
    /// All GPUs in slots of one CPU.
    Phb1,
    /// All GPUs on one switch.
    Pix1,
    /// Two switches below a third one.
    Pxb1,
    /// Half of the GPUs in slots of each of two NUMA nodes.
    Sys2,
    /// One switch on each of two NUMA nodes.
    Pix2,
    /// A quarter of the GPUs in slots of each of four NUMA nodes.
    Sys4,
    /// One switch on each of four NUMA nodes.
    Pix4,
    /// Two NUMA nodes, and every GPU on an NVSwitch with 18 links (12 before Hopper).
    NvSwitch,
    /// Two GPUs a NUMA node at most, joined in pairs by four NVLinks, as by a bridge.
    NvLinkPairs,
}

impl Layout {
    const fn cpu_count(self) -> usize {
        match self {
            Self::Phb1 | Self::Pix1 | Self::Pxb1 => 1,
            Self::Sys2 | Self::Pix2 | Self::NvSwitch | Self::NvLinkPairs => 2,
            Self::Sys4 | Self::Pix4 => 4,
        }
    }
}

/// Why a topology cannot be.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum TopologyError {
    /// Too few or too many of something.
    #[error("{count} {what}: there must be {least} to {most}")]
    Count {
        /// What is counted.
        what: &'static str,
        /// How many there are.
        count: usize,
        /// Fewest.
        least: usize,
        /// Most.
        most: usize,
    },
    /// A value that no machine has.
    #[error("{place}: {reason}")]
    Value {
        /// Where.
        place: String,
        /// What is wrong.
        reason: String,
    },
}

impl Topology {
    /// A machine with alike GPUs in a common layout, peer access granted to all.
    ///
    /// The CPU is repeated for each NUMA node. GPUs are spread evenly, which must be possible.
    pub fn of_layout(
        layout: Layout,
        gpu_count: usize,
        compute_capability: [u32; 2],
        link: PcieLink,
        cpu: &CpuNode,
    ) -> Result<Self, TopologyError> {
        let cpus = layout.cpu_count();
        if gpu_count == 0 || gpu_count > MAX_GPUS || !gpu_count.is_multiple_of(cpus) {
            return Err(TopologyError::Value {
                place: "gpu_count".to_owned(),
                reason: format!("{gpu_count} GPUs cannot be spread over {cpus} NUMA nodes (at most {MAX_GPUS})"),
            });
        }
        let bus = |cpu: usize, number: usize| format!("0000:{:02x}:00.0", cpu * 0x40 + number);
        let per_cpu = gpu_count / cpus;
        let mut switches = Vec::new();
        let mut gpus = Vec::new();
        for cpu in 0..cpus {
            let first = switches.len();
            let upstream = Upstream::Cpu(cpu);
            match layout {
                Layout::Pix1 | Layout::Pix2 | Layout::Pix4 => {
                    switches.push(PciSwitch { pci_bus_id: bus(cpu, 1), upstream, link, device: None });
                }
                Layout::Pxb1 => {
                    switches.push(PciSwitch { pci_bus_id: bus(cpu, 1), upstream, link, device: None });
                    for leaf in 0..2 {
                        let upstream = Upstream::Switch(first);
                        switches.push(PciSwitch { pci_bus_id: bus(cpu, 2 + leaf), upstream, link, device: None });
                    }
                }
                _ => {}
            }
            for place in 0..per_cpu {
                let upstream = match layout {
                    Layout::Pix1 | Layout::Pix2 | Layout::Pix4 => Upstream::Switch(first),
                    Layout::Pxb1 => Upstream::Switch(first + 1 + usize::from(place * 2 >= per_cpu)),
                    _ => upstream,
                };
                let own = gpus.len();
                let nvlinks = match layout {
                    Layout::NvSwitch => {
                        vec![NvLink { to: NvLinkEnd::Switch, links: if compute_capability[0] >= 9 { 18 } else { 12 } }]
                    }
                    Layout::NvLinkPairs if (own ^ 1) < gpu_count => {
                        vec![NvLink { to: NvLinkEnd::Gpu(own ^ 1), links: 4 }]
                    }
                    _ => Vec::new(),
                };
                gpus.push(GpuNode { pci_bus_id: bus(cpu, 8 + place), compute_capability, upstream, link, nvlinks });
            }
        }
        let cpus = (0..cpus).map(|node| CpuNode { numa_node: node as u32, ..cpu.clone() }).collect();
        let has_multicast = layout == Layout::NvSwitch && compute_capability[0] >= 9;
        let topology = Self { cpus, switches, gpus, peer_access: PeerAccess::All, has_multicast };
        topology.validate()?;
        Ok(topology)
    }

    /// Refuses what cannot be: to be called on whatever was read from a file.
    pub fn validate(&self) -> Result<(), TopologyError> {
        let count = |what, count, least, most| {
            if (least..=most).contains(&count) {
                Ok(())
            } else {
                Err(TopologyError::Count { what, count, least, most })
            }
        };
        count("GPUs", self.gpus.len(), 1, MAX_GPUS)?;
        count("CPUs", self.cpus.len(), 1, MAX_CPUS)?;
        count("switches", self.switches.len(), 0, MAX_SWITCHES)?;
        let mut nodes = BTreeSet::new();
        for cpu in &self.cpus {
            if !nodes.insert(cpu.numa_node) {
                return Err(wrong("cpus", format!("NUMA node {} stands twice", cpu.numa_node)));
            }
        }
        let mut addresses = BTreeSet::new();
        for (index, switch) in self.switches.iter().enumerate() {
            let place = || format!("switches[{index}]");
            check_address(&switch.pci_bus_id, &mut addresses).map_err(|reason| wrong(place(), reason))?;
            check_link(switch.link).map_err(|reason| wrong(place(), reason))?;
            self.check_upstream(switch.upstream).map_err(|reason| wrong(place(), reason))?;
            if self.depth(Upstream::Switch(index)).is_none() {
                return Err(wrong(place(), format!("more than {MAX_DEPTH} switches above it, or a circle")));
            }
        }
        for (index, gpu) in self.gpus.iter().enumerate() {
            let place = || format!("gpus[{index}]");
            check_address(&gpu.pci_bus_id, &mut addresses).map_err(|reason| wrong(place(), reason))?;
            check_link(gpu.link).map_err(|reason| wrong(place(), reason))?;
            self.check_upstream(gpu.upstream).map_err(|reason| wrong(place(), reason))?;
            let [major, minor] = gpu.compute_capability;
            if !(5..=20).contains(&major) || minor > 9 {
                return Err(wrong(place(), format!("no GPU has compute capability {major}.{minor}")));
            }
            self.check_nvlinks(index).map_err(|reason| wrong(place(), reason))?;
        }
        if let PeerAccess::Pairs(pairs) = &self.peer_access {
            if pairs.len() > MAX_GPUS * MAX_GPUS {
                return Err(wrong("peer_access", "more pairs than there can be".to_owned()));
            }
            if let Some([a, b]) = pairs.iter().find(|[a, b]| a == b || *a.max(b) >= self.gpus.len()) {
                return Err(wrong("peer_access", format!("[{a}, {b}] is no pair of different GPUs")));
            }
        }
        Ok(())
    }

    fn check_upstream(&self, upstream: Upstream) -> Result<(), String> {
        match upstream {
            Upstream::Cpu(cpu) if cpu >= self.cpus.len() => Err(format!("there is no CPU {cpu}")),
            Upstream::Switch(switch) if switch >= self.switches.len() => Err(format!("there is no switch {switch}")),
            _ => Ok(()),
        }
    }

    /// Switches on the way up, this one included; nothing where there are too many or a circle.
    fn depth(&self, from: Upstream) -> Option<usize> {
        let mut at = from;
        for depth in 0..=MAX_DEPTH {
            match at {
                Upstream::Cpu(_) => return Some(depth),
                Upstream::Switch(switch) => at = self.switches.get(switch)?.upstream,
            }
        }
        None
    }

    fn check_nvlinks(&self, index: usize) -> Result<(), String> {
        let gpu = &self.gpus[index];
        if gpu.nvlinks.len() > MAX_GPUS {
            return Err("more NVLinks than a GPU can have".to_owned());
        }
        for (position, link) in gpu.nvlinks.iter().enumerate() {
            if link.links == 0 || link.links > MAX_LINKS {
                return Err(format!("{} NVLinks: there must be 1 to {MAX_LINKS}", link.links));
            }
            if gpu.nvlinks[..position].iter().any(|earlier| earlier.to == link.to) {
                return Err("NVLinks to one place stand twice".to_owned());
            }
            let NvLinkEnd::Gpu(other) = link.to else { continue };
            if other == index {
                return Err("an NVLink leads back to the GPU itself".to_owned());
            }
            let back =
                self.gpus.get(other).ok_or_else(|| format!("an NVLink leads to GPU {other}, which is not there"))?;
            let returned = back.nvlinks.iter().find(|back| back.to == NvLinkEnd::Gpu(index)).map(|back| back.links);
            if returned != Some(link.links) {
                return Err(format!("{} NVLinks lead to GPU {other}, and {} back", link.links, returned.unwrap_or(0)));
            }
        }
        Ok(())
    }

    /// The CPU (by place in [`Topology::cpus`]) that a GPU hangs below.
    pub fn cpu_of(&self, gpu: usize) -> Option<usize> {
        let mut at = self.gpus.get(gpu)?.upstream;
        for _ in 0..=MAX_DEPTH {
            match at {
                Upstream::Cpu(cpu) => return Some(cpu),
                Upstream::Switch(switch) => at = self.switches.get(switch)?.upstream,
            }
        }
        None
    }
}

fn wrong(place: impl Into<String>, reason: String) -> TopologyError {
    TopologyError::Value { place: place.into(), reason }
}

fn check_link(link: PcieLink) -> Result<(), String> {
    if !(1..=6).contains(&link.generation) {
        return Err(format!("PCIe generation {}: there are 1 to 6", link.generation));
    }
    if ![1, 2, 4, 8, 16].contains(&link.width) {
        return Err(format!("a PCIe link of {} lanes: there are 1, 2, 4, 8 and 16", link.width));
    }
    match link.generation_now {
        Some(now) if now == 0 || now > link.generation => {
            Err(format!("the link cannot run at PCIe generation {now} if {} is its fastest", link.generation))
        }
        _ => Ok(()),
    }
}

fn check_address(address: &str, seen: &mut BTreeSet<u64>) -> Result<(), String> {
    let Some(number) = pci_number(address) else {
        let shown: String = address.chars().take(40).collect();
        return Err(format!("{shown:?} is no PCI address; one looks like \"0000:21:00.0\""));
    };
    if seen.insert(number) { Ok(()) } else { Err(format!("two devices have the PCI address {address}")) }
}

/// "0000:21:00.0" as the number NCCL compares and sorts by.
pub(crate) fn pci_number(address: &str) -> Option<u64> {
    let (domain, rest) = address.split_once(':')?;
    let (bus, rest) = rest.split_once(':')?;
    let (device, function) = rest.split_once('.')?;
    let lengths = (4..=8).contains(&domain.len()) && bus.len() == 2 && device.len() == 2 && function.len() == 1;
    let digits = [domain, bus, device, function].iter().all(|part| part.chars().all(|c| c.is_ascii_hexdigit()));
    if !lengths || !digits {
        return None;
    }
    let number = |part: &str| u64::from_str_radix(part, 16).ok();
    Some((number(domain)? << 20) | (number(bus)? << 12) | (number(device)? << 4) | number(function)?)
}
