//! How this machine's GPUs hang together: from what the kernel shows of the PCI tree, and from what a
//! probe was told about NVLink and peer access.
//!
//! The tree is read as NCCL reads it, so that both see the same machine: a switch is its port upwards, a
//! root port is none, a link is as fast as the slower of its two ends. Where the kernel says nothing,
//! NCCL goes by an assumption of its own; so does this reader, and notes it. What NCCL learns
//! elsewhere and this reader does not is unknown, and then there is no topology: nothing is guessed.

use std::collections::{BTreeMap, BTreeSet};
use std::io::Read;
use std::path::{Path, PathBuf};

use crate::machine::{
    Architecture, CpuNode, CpuVendor, Gpu, GpuNode, NvLink, NvLinkEnd, PciSwitch, PcieLink, PeerAccess, Topology,
    Upstream,
};
use crate::probe::ProbeReport;

/// Longest file below /sys/devices that is read; they hold a word.
const WORD_BYTES: u64 = 256;
/// So much of /proc/cpuinfo describes the first processor at least.
const PROCESSOR_BYTES: u64 = 64 << 10;
/// Most folders on the way to a device.
const MOST_STEPS: usize = 32;
/// What NCCL takes a link for whose speed and width nobody tells.
const ASSUMED_GENERATION: u32 = 3;
const ASSUMED_WIDTH: u32 = 16;
/// Beginning of the class of NVLink switches in the PCI tree.
const SWITCH_CLASS: &str = "0x0680";

/// A machine's wiring, as far as it could be read.
#[derive(Debug, Clone, PartialEq)]
pub struct Wiring {
    /// The wiring; else what could not be read, one sentence each.
    pub topology: Result<Topology, Vec<String>>,
    /// What the kernel does not tell, and NCCL assumes in its place.
    pub assumptions: Vec<String>,
}

/// Reads the wiring of these GPUs, in the order of the ranks, below a root folder ("/", or a copy of
/// another machine's /sys and /proc).
pub fn wiring_of(root: &Path, gpus: &[Gpu], report: &ProbeReport) -> Wiring {
    let mut reading = Reading {
        files: Files { root: fs_err::canonicalize(root).unwrap_or_else(|_| root.to_owned()) },
        switches: Vec::new(),
        nodes: BTreeMap::new(),
        unknown: Vec::new(),
        assumptions: Vec::new(),
    };
    let topology = reading.topology(gpus, report);
    let Reading { unknown, mut assumptions, .. } = reading;
    assumptions.sort();
    assumptions.dedup();
    let topology = match topology {
        Some(topology) if unknown.is_empty() => match topology.validate() {
            Ok(()) => Ok(topology),
            Err(error) => Err(vec![error.to_string()]),
        },
        _ => Err(unknown),
    };
    Wiring { topology, assumptions }
}

/// Files below the root.
pub(super) struct Files {
    pub(super) root: PathBuf,
}

impl Files {
    /// The beginning of a file, trimmed; nothing where there is none, or it is empty.
    pub(super) fn text(&self, path: &Path, most: u64) -> Option<String> {
        let path = self.root.join(path);
        // Opening what is no file may wait forever.
        fs_err::metadata(&path).ok().filter(std::fs::Metadata::is_file)?;
        let mut bytes = Vec::new();
        fs_err::File::open(&path).ok()?.take(most).read_to_end(&mut bytes).ok()?;
        let text = String::from_utf8_lossy(&bytes).trim().to_owned();
        (!text.is_empty()).then_some(text)
    }

    /// Folders on the way to a PCI device, from the root of the tree to the device itself; nothing where
    /// the kernel does not show the device.
    pub(super) fn steps_to(&self, address: &str) -> Option<Vec<String>> {
        if !is_address(address) {
            return None;
        }
        let real = fs_err::canonicalize(self.root.join("sys/bus/pci/devices").join(address)).ok()?;
        let steps: Option<Vec<String>> = real
            .strip_prefix(self.root.join("sys/devices"))
            .ok()?
            .components()
            .map(|step| step.as_os_str().to_str().map(str::to_owned))
            .collect();
        steps.filter(|steps| !steps.is_empty() && steps.len() <= MOST_STEPS)
    }

    /// A word about the device at the end of these steps.
    pub(super) fn word(&self, steps: &[String], name: &str) -> Option<String> {
        let folder: PathBuf = ["sys", "devices"].iter().copied().chain(steps.iter().map(String::as_str)).collect();
        self.text(&folder.join(name), WORD_BYTES)
    }

    /// The same as a hexadecimal number of four digits.
    fn number(&self, steps: &[String], name: &str) -> Option<u16> {
        u16::from_str_radix(self.word(steps, name)?.strip_prefix("0x")?, 16).ok()
    }
}

/// "0000:3b:00.0", the only shape that NCCL takes for a device on the way up.
fn is_address(name: &str) -> bool {
    name.len() == 12
        && name.bytes().enumerate().all(|(at, byte)| match at {
            4 | 7 => byte == b':',
            10 => byte == b'.',
            _ => byte.is_ascii_hexdigit(),
        })
}

/// "32.0 GT/s PCIe": the number; "Unknown" has none.
fn transfers_per_second(text: &str) -> Option<f64> {
    text.split_whitespace().next()?.parse().ok().filter(|speed: &f64| speed.is_finite() && *speed > 0.0)
}

/// The PCIe generation with this many gigatransfers a second in each lane.
fn generation_of(gigatransfers_per_s: f64) -> Option<u32> {
    const SPEEDS: [f64; 6] = [2.5, 5.0, 8.0, 16.0, 32.0, 64.0];
    SPEEDS.iter().position(|speed| (speed - gigatransfers_per_s).abs() < 0.01).map(|at| at as u32 + 1)
}

/// A node of memory as the kernel numbers it; "-1", an empty text and no text are all "none".
type NumaNode = Option<u32>;

struct Reading {
    files: Files,
    switches: Vec<PciSwitch>,
    /// NUMA nodes that devices hang on, by their place among the CPUs.
    nodes: BTreeMap<NumaNode, usize>,
    unknown: Vec<String>,
    assumptions: Vec<String>,
}

impl Reading {
    fn topology(&mut self, gpus: &[Gpu], report: &ProbeReport) -> Option<Topology> {
        let nodes: Vec<Option<GpuNode>> = gpus.iter().map(|gpu| self.gpu(gpu, gpus, report)).collect();
        let cpu = self.processor();
        let peer_access = self.peer_access(gpus, report);
        let gpu_nodes = nodes.into_iter().collect::<Option<Vec<_>>>()?;
        let has_switch = gpu_nodes.iter().flat_map(|gpu| &gpu.nvlinks).any(|link| link.to == NvLinkEnd::Switch);
        if has_switch && report.multicast.is_none() {
            self.assumptions.push("the driver does not know of NVLink multicast, so NCCL does without NVLS".to_owned());
        }
        Some(Topology {
            cpus: self.cpus(&cpu?),
            switches: std::mem::take(&mut self.switches),
            gpus: gpu_nodes,
            peer_access: peer_access?,
            has_multicast: report.multicast == Some(true),
        })
    }

    fn gpu(&mut self, gpu: &Gpu, all: &[Gpu], report: &ProbeReport) -> Option<GpuNode> {
        let address = &gpu.pci_bus_id;
        let steps = self.files.steps_to(address);
        if steps.is_none() {
            self.assumptions.push(format!(
                "the kernel does not show where GPU {} ({address}) sits: NCCL takes it for PCIe {ASSUMED_GENERATION}.0 \
                 x{ASSUMED_WIDTH} on a CPU of unknown number",
                gpu.index
            ));
        }
        let upstream = match &steps {
            Some(steps) => self.upstream(steps),
            None => Upstream::Cpu(self.cpu(None)),
        };
        let now = gpu.pcie_generation.map(|[now, _]| now);
        let link = match &steps {
            Some(steps) => self.link(steps, now),
            None => PcieLink { generation: ASSUMED_GENERATION, width: ASSUMED_WIDTH, generation_now: None },
        };
        let Some([major, minor]) = gpu.compute_capability else {
            self.unknown.push(format!("the compute capability of GPU {} could not be read", gpu.index));
            return None;
        };
        Some(GpuNode {
            pci_bus_id: address.clone(),
            compute_capability: [major.unsigned_abs(), minor.unsigned_abs()],
            upstream,
            link,
            nvlinks: self.nvlinks(address, all, report)?,
        })
    }

    /// What the device at the end of these steps hangs on. The kernel shows a switch as a port upwards and
    /// ports downwards, so the switch is two steps up; a port of the CPU has nothing above it.
    fn upstream(&mut self, steps: &[String]) -> Upstream {
        let is_device = |up: usize| steps.len().checked_sub(1 + up).is_some_and(|at| is_address(&steps[at]));
        if !(is_device(1) && is_device(2)) {
            let node = self.files.word(steps, "numa_node").and_then(|node| node.parse().ok());
            return Upstream::Cpu(self.cpu(node));
        }
        let above = &steps[..steps.len() - 2];
        let address = &above[above.len() - 1];
        if let Some(known) = self.switches.iter().position(|switch| switch.pci_bus_id == *address) {
            return Upstream::Switch(known);
        }
        let upstream = self.upstream(above);
        let link = self.link(above, None);
        let device =
            ["vendor", "device", "subsystem_vendor", "subsystem_device"].map(|name| self.files.number(above, name));
        let device = if let [Some(a), Some(b), Some(c), Some(d)] = device { Some([a, b, c, d]) } else { None };
        self.switches.push(PciSwitch { pci_bus_id: address.clone(), upstream, link, device });
        Upstream::Switch(self.switches.len() - 1)
    }

    /// The place of a node among the CPUs.
    fn cpu(&mut self, node: NumaNode) -> usize {
        let next = self.nodes.len();
        *self.nodes.entry(node).or_insert(next)
    }

    /// The link from the device at the end of these steps to the port above it; `now` is the generation
    /// it is known to run at.
    fn link(&mut self, steps: &[String], now: Option<u32>) -> PcieLink {
        let port = &steps[..steps.len() - 1];
        let device = steps.last().map_or("", String::as_str);
        let speed = |steps: &[String]| transfers_per_second(&self.files.word(steps, "max_link_speed")?);
        let slower = [speed(steps), speed(port)].into_iter().flatten().reduce(f64::min);
        let generation = slower.and_then(generation_of);
        let lanes = |steps: &[String]| self.files.word(steps, "max_link_width")?.parse::<u32>().ok();
        let width = lanes(steps).zip(lanes(port)).map(|(one, other)| one.min(other)).filter(|width| *width > 0);
        let current = self.files.word(steps, "current_link_speed");
        let now = now.or_else(|| generation_of(transfers_per_second(&current?)?));
        if generation.is_none() {
            self.assumptions.push(format!(
                "the kernel does not tell the fastest speed of {device}'s link: NCCL takes it for PCIe \
                 {ASSUMED_GENERATION}.0"
            ));
        }
        if width.is_none() {
            self.assumptions.push(format!(
                "the kernel does not tell the lanes of {device}'s link at both ends: NCCL takes it for x{ASSUMED_WIDTH}"
            ));
        }
        let generation = generation.unwrap_or(ASSUMED_GENERATION);
        PcieLink {
            generation,
            width: width.unwrap_or(ASSUMED_WIDTH),
            generation_now: now.filter(|now| (1..=generation).contains(now)),
        }
    }

    /// NVLinks of a GPU. Links to GPUs that take no part are none to NCCL.
    fn nvlinks(&mut self, address: &str, gpus: &[Gpu], report: &ProbeReport) -> Option<Vec<NvLink>> {
        let Some(links) = &report.nvlinks else {
            let unknown = "the driver does not tell which GPUs NVLink connects";
            if !self.unknown.iter().any(|known| known == unknown) {
                self.unknown.push(unknown.to_owned());
            }
            return None;
        };
        let mut found: Vec<NvLink> = Vec::new();
        for link in links.iter().filter(|link| link.gpu == address) {
            let to = match gpus.iter().position(|gpu| gpu.pci_bus_id == link.remote) {
                Some(other) => NvLinkEnd::Gpu(other),
                None => match self.files.steps_to(&link.remote) {
                    // What a virtual machine does not show is a switch.
                    None => NvLinkEnd::Switch,
                    Some(steps) => match self.files.word(&steps, "class") {
                        Some(class) if class.starts_with(SWITCH_CLASS) => NvLinkEnd::Switch,
                        _ => continue,
                    },
                },
            };
            match found.iter_mut().find(|known| known.to == to) {
                Some(known) => known.links = known.links.saturating_add(link.links),
                None => found.push(NvLink { to, links: link.links }),
            }
        }
        Some(found)
    }

    /// Pairs that both NVML and CUDA let reach each other, both ways.
    fn peer_access(&mut self, gpus: &[Gpu], report: &ProbeReport) -> Option<PeerAccess> {
        let mut granted = Vec::new();
        let mut all = true;
        for from in 0..gpus.len() {
            for to in from + 1..gpus.len() {
                let ways = [(from, to), (to, from)].map(|(from, to)| {
                    let (from, to) = (&gpus[from].pci_bus_id, &gpus[to].pci_bus_id);
                    let answer = report.peers.iter().find(|pair| pair.from == *from && pair.to == *to)?;
                    // Either may say no; a yes of one counts where the other could not be asked.
                    match (answer.nvml, answer.cuda) {
                        (None, None) => None,
                        (nvml, cuda) => Some(nvml.unwrap_or(true) && cuda.unwrap_or(true)),
                    }
                });
                match ways {
                    [Some(one), Some(other)] if one && other => granted.push([from, to]),
                    [Some(_), Some(_)] => all = false,
                    _ => {
                        self.unknown.push(format!(
                            "whether GPU {} and GPU {} may reach each other's memory could not be asked",
                            gpus[from].index, gpus[to].index
                        ));
                        return None;
                    }
                }
            }
        }
        Some(match (all, granted.is_empty()) {
            (true, _) => PeerAccess::All,
            (false, true) => PeerAccess::None,
            (false, false) => PeerAccess::Pairs(granted),
        })
    }

    /// CPUs by their place. A node without a number gets one that no other has.
    fn cpus(&mut self, processor: &CpuNode) -> Vec<CpuNode> {
        let numbers: BTreeSet<u32> = self.nodes.keys().copied().flatten().collect();
        let free = (0..=numbers.len() as u32).find(|number| !numbers.contains(number)).unwrap_or(0);
        let mut nodes: Vec<(usize, NumaNode)> = self.nodes.iter().map(|(node, place)| (*place, *node)).collect();
        nodes.sort_unstable();
        if nodes.len() > 1 && self.nodes.contains_key(&None) {
            self.assumptions.push(
                "the kernel tells the NUMA node of some GPUs only: NCCL takes the others for those of one more node"
                    .to_owned(),
            );
        }
        nodes.into_iter().map(|(_, node)| CpuNode { numa_node: node.unwrap_or(free), ..processor.clone() }).collect()
    }

    /// The kind of processor. NCCL asks the processor itself, so an unreadable file leaves it unknown.
    fn processor(&mut self) -> Option<CpuNode> {
        let text = self.files.text(Path::new("proc/cpuinfo"), PROCESSOR_BYTES).unwrap_or_default();
        let value = |name: &str| {
            let line = text.lines().filter_map(|line| line.split_once(':')).find(|(known, _)| known.trim() == name);
            line.map(|(_, value)| value.trim().to_owned())
        };
        let node =
            |architecture, vendor, family, model| Some(CpuNode { numa_node: 0, architecture, vendor, family, model });
        if let Some(vendor) = value("vendor_id") {
            let number = |name: &str| value(name).and_then(|number| number.parse::<u32>().ok());
            let vendor = match vendor.as_str() {
                "GenuineIntel" => CpuVendor::Intel,
                "AuthenticAMD" => CpuVendor::Amd,
                "CentaurHauls" | "Shanghai" => CpuVendor::Zhaoxin,
                _ => CpuVendor::Other,
            };
            if let (Some(family), Some(model)) = (number("cpu family"), number("model")) {
                return node(Architecture::X86_64, vendor, family, model);
            }
        } else if value("CPU implementer").is_some() {
            return node(Architecture::Arm64, CpuVendor::Other, 0, 0);
        } else if value("cpu").is_some_and(|cpu| cpu.starts_with("POWER")) {
            return node(Architecture::Power, CpuVendor::Other, 0, 0);
        }
        self.unknown.push("the kind of processor could not be read from /proc/cpuinfo".to_owned());
        None
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use tempfile::TempDir;

    use super::*;
    use crate::machine::PathKind;
    use crate::probe::{NvLinks, PeerAccess as PeerAnswer};

    /// A /sys and /proc of a machine that is not there.
    struct Tree {
        root: TempDir,
    }

    impl Tree {
        fn new(processor: &str) -> Self {
            let tree = Self { root: tempfile::tempdir().unwrap() };
            tree.write("proc/cpuinfo", processor);
            fs_err::create_dir_all(tree.root.path().join("sys/bus/pci/devices")).unwrap();
            tree
        }

        fn write(&self, path: &str, text: &str) {
            let path = self.root.path().join(path);
            fs_err::create_dir_all(path.parent().unwrap()).unwrap();
            fs_err::write(path, text).unwrap();
        }

        /// A device at the end of a path, with words about it.
        fn device(&self, path: &str, words: &[(&str, &str)]) {
            let folder = format!("sys/devices/{path}");
            fs_err::create_dir_all(self.root.path().join(&folder)).unwrap();
            for (name, word) in words {
                self.write(&format!("{folder}/{name}"), &format!("{word}\n"));
            }
            let address = path.rsplit('/').next().unwrap();
            let link = self.root.path().join("sys/bus/pci/devices").join(address);
            symlink(format!("../../../devices/{path}"), link).unwrap();
        }

        fn wiring(&self, gpus: &[Gpu], report: &ProbeReport) -> Wiring {
            wiring_of(self.root.path(), gpus, report)
        }
    }

    const TURIN: &str =
        "processor\t: 0\nvendor_id\t: AuthenticAMD\ncpu family\t: 26\nmodel\t\t: 2\nmodel name\t: AMD EPYC 9575F\n";

    fn gpu(index: u32, address: &str) -> Gpu {
        Gpu {
            index,
            uuid: format!("GPU-{index}"),
            name: "NVIDIA Test".to_owned(),
            pci_bus_id: address.to_owned(),
            memory_total_mib: None,
            memory_free_mib: None,
            compute_capability: Some([12, 0]),
            pcie_generation: Some([1, 5]),
            pcie_width: None,
            nvlinks: None,
            persistence: None,
            utilization_percent: None,
            process_ids: Vec::new(),
        }
    }

    /// What a probe says of GPUs without NVLink, where `granted` tells who reaches whom.
    fn report(gpus: &[Gpu], granted: impl Fn(usize, usize) -> Option<bool>) -> ProbeReport {
        let mut report = ProbeReport { nvlinks: Some(Vec::new()), multicast: Some(false), ..ProbeReport::default() };
        for from in 0..gpus.len() {
            for to in (0..gpus.len()).filter(|to| *to != from) {
                let (from, to, answer) = (&gpus[from], &gpus[to], granted(from, to));
                report.peers.push(PeerAnswer {
                    from: from.pci_bus_id.clone(),
                    to: to.pci_bus_id.clone(),
                    cuda: answer,
                    nvml: answer,
                });
            }
        }
        report
    }

    const FAST: [(&str, &str); 3] =
        [("max_link_speed", "32.0 GT/s PCIe"), ("max_link_width", "16"), ("current_link_speed", "2.5 GT/s PCIe")];

    #[test]
    fn slots_of_two_sockets() {
        let tree = Tree::new(TURIN);
        for (root, node) in [("pci0000:00", "0"), ("pci0000:80", "1")] {
            let domain = &root[3..10];
            tree.device(
                &format!("{root}/{domain}:01.1"),
                &[("max_link_speed", "16.0 GT/s PCIe"), ("max_link_width", "16")],
            );
            let bus = if node == "0" { "01" } else { "81" };
            let words: Vec<_> = FAST.iter().copied().chain([("numa_node", node)]).collect();
            tree.device(&format!("{root}/{domain}:01.1/0000:{bus}:00.0"), &words);
        }
        let gpus = [gpu(0, "0000:01:00.0"), gpu(1, "0000:81:00.0")];
        let wiring = tree.wiring(&gpus, &report(&gpus, |_, _| Some(true)));
        let topology = wiring.topology.unwrap();
        assert_eq!(wiring.assumptions, [""; 0]);
        assert!(topology.switches.is_empty(), "root ports are no switches");
        let nodes: Vec<u32> = topology.cpus.iter().map(|cpu| cpu.numa_node).collect();
        assert_eq!((nodes.as_slice(), topology.cpu_of(1)), ([0, 1].as_slice(), Some(1)));
        assert_eq!((topology.cpus[0].vendor, topology.cpus[0].family, topology.cpus[0].model), (CpuVendor::Amd, 26, 2));
        // The slower end counts; the link idles at its first generation, as NVML says.
        let link = PcieLink { generation: 4, width: 16, generation_now: Some(1) };
        assert_eq!(topology.gpus.iter().map(|gpu| gpu.link).collect::<Vec<_>>(), [link, link]);
        assert_eq!(topology.peer_access, PeerAccess::All);
        assert_eq!(PathKind::of("SYS"), Some(PathKind::Sys));
    }

    #[test]
    fn switches_in_two_levels_keep_their_names_and_devices() {
        let tree = Tree::new("vendor_id : GenuineIntel\ncpu family : 6\nmodel : 143\n");
        let root = "pci0000:10";
        let outer = format!("{root}/0000:10:01.0/0000:11:00.0");
        let broadcom = [
            ("vendor", "0x1000"),
            ("device", "0xc030"),
            ("subsystem_vendor", "0x1000"),
            ("subsystem_device", "0x0003"),
        ];
        tree.device(&format!("{root}/0000:10:01.0"), &FAST);
        let words: Vec<_> = FAST.into_iter().chain(broadcom).chain([("numa_node", "-1")]).collect();
        tree.device(&outer, &words);
        for (number, inner) in ["00", "01"].into_iter().enumerate() {
            let (up, down, leaf) = (13 + number, 20 + number, 30 + number);
            let switch = format!("{outer}/0000:12:{inner}.0/0000:{up}:00.0");
            tree.device(&format!("{outer}/0000:12:{inner}.0"), &FAST);
            tree.device(&switch, &words);
            tree.device(&format!("{switch}/0000:{down}:00.0"), &FAST);
            tree.device(&format!("{switch}/0000:{down}:00.0/0000:{leaf}:00.0"), &FAST);
        }
        let gpus = [gpu(0, "0000:30:00.0"), gpu(1, "0000:31:00.0")];
        let wiring = tree.wiring(&gpus, &report(&gpus, |_, _| Some(false)));
        let topology = wiring.topology.unwrap();
        let names: Vec<&str> = topology.switches.iter().map(|switch| switch.pci_bus_id.as_str()).collect();
        assert_eq!(names, ["0000:11:00.0", "0000:13:00.0", "0000:14:00.0"]);
        assert_eq!(topology.gpus[1].upstream, Upstream::Switch(2));
        assert_eq!(topology.switches[2].upstream, Upstream::Switch(0));
        assert_eq!(topology.switches[0].upstream, Upstream::Cpu(0));
        assert_eq!(topology.switches[0].device, Some([0x1000, 0xc030, 0x1000, 3]));
        assert_eq!(topology.switches[0].link.generation_now, Some(1));
        assert_eq!(topology.cpus.len(), 1, "a machine that numbers no node has one");
        assert_eq!(topology.peer_access, PeerAccess::None);
    }

    #[test]
    fn what_the_kernel_does_not_tell_is_what_nccl_assumes() {
        let tree = Tree::new(TURIN);
        tree.device("pci0000:00/0000:00:05.0", &[("max_link_speed", "Unknown"), ("max_link_width", "0")]);
        let gpus = [gpu(0, "0000:00:05.0"), gpu(1, "0000:00:06.0")];
        let wiring = tree.wiring(&gpus, &report(&gpus, |_, _| Some(true)));
        let topology = wiring.topology.unwrap();
        for gpu in &topology.gpus {
            assert_eq!((gpu.link.generation, gpu.link.width, gpu.upstream), (3, 16, Upstream::Cpu(0)));
        }
        let told = wiring.assumptions.join("\n");
        for part in ["fastest speed of 0000:00:05.0", "lanes of 0000:00:05.0", "where GPU 1 (0000:00:06.0) sits"] {
            assert!(told.contains(part), "{told}");
        }
    }

    #[test]
    fn what_nccl_learns_elsewhere_stays_unknown() {
        let tree = Tree::new("flags : none\n");
        let mut gpus = [gpu(0, "0000:00:05.0"), gpu(1, "0000:00:06.0")];
        gpus[1].compute_capability = None;
        let mut report = report(&gpus, |_, _| None);
        report.nvlinks = None;
        let unknown = tree.wiring(&gpus, &report).topology.unwrap_err();
        assert_eq!(
            unknown,
            [
                "the driver does not tell which GPUs NVLink connects",
                "the compute capability of GPU 1 could not be read",
                "the kind of processor could not be read from /proc/cpuinfo",
                "whether GPU 0 and GPU 1 may reach each other's memory could not be asked",
            ]
        );
    }

    #[test]
    fn nvlinks_lead_to_gpus_and_switches() {
        let tree = Tree::new(TURIN);
        tree.device("pci0000:20/0000:20:00.0", &[("class", "0x068000")]);
        tree.device("pci0000:20/0000:20:01.0", &[("class", "0x030200")]);
        let gpus = [gpu(0, "0000:00:05.0"), gpu(1, "0000:00:06.0"), gpu(2, "0000:00:07.0")];
        let mut report = report(&gpus, |from, to| Some(from + to < 3));
        let link = |gpu: &str, remote: &str, links| NvLinks { gpu: gpu.to_owned(), remote: remote.to_owned(), links };
        report.nvlinks = Some(vec![
            link("0000:00:05.0", "0000:00:06.0", 4),
            link("0000:00:06.0", "0000:00:05.0", 4),
            link("0000:00:05.0", "0000:20:00.0", 5),
            link("0000:00:05.0", "ffff:ff:ff.0", 6),
            link("0000:00:05.0", "0000:20:01.0", 7),
        ]);
        let topology = tree.wiring(&gpus, &report).topology.unwrap();
        let to = |to, links| NvLink { to, links };
        assert_eq!(topology.gpus[0].nvlinks, [to(NvLinkEnd::Gpu(1), 4), to(NvLinkEnd::Switch, 11)]);
        assert_eq!(topology.gpus[1].nvlinks, [to(NvLinkEnd::Gpu(0), 4)]);
        assert_eq!(topology.peer_access, PeerAccess::Pairs(vec![[0, 1], [0, 2]]));
        // Either of the two may say no, and in one direction alone.
        report.peers.iter_mut().find(|pair| pair.from.ends_with("07.0")).unwrap().cuda = Some(false);
        let topology = tree.wiring(&gpus, &report).topology.unwrap();
        assert_eq!(topology.peer_access, PeerAccess::Pairs(vec![[0, 1]]));
        // A link that leads one way only is no link that anybody could use.
        report.nvlinks.as_mut().unwrap().remove(1);
        assert!(tree.wiring(&gpus, &report).topology.is_err());
    }

    #[test]
    fn nothing_outside_the_root_is_read() {
        let tree = Tree::new(TURIN);
        let link = |name: &str, target: &str| {
            symlink(target, tree.root.path().join("sys/bus/pci/devices").join(name)).unwrap();
        };
        link("0000:00:05.0", "/");
        link("0000:00:06.0", "0000:00:06.0");
        for address in ["0000:00:05.0", "0000:00:06.0", "../../../..", ""] {
            let gpus = [gpu(0, address)];
            let wiring = tree.wiring(&gpus, &report(&gpus, |_, _| Some(true)));
            assert!(wiring.assumptions[0].contains("does not show where GPU 0"), "{address}");
        }
    }

    #[test]
    fn speeds_have_generations() {
        for (text, generation) in [
            ("2.5 GT/s PCIe", Some(1)),
            ("5 GT/s", Some(2)),
            ("8.0 GT/s PCIe", Some(3)),
            ("64.0 GT/s PCIe", Some(6)),
            ("Unknown", None),
            ("NaN GT/s", None),
            ("7 GT/s", None),
        ] {
            assert_eq!(transfers_per_second(text).and_then(generation_of), generation, "{text}");
        }
    }
}
