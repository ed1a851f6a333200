//! Machines of format 2: a topology from which NCCL's choices follow, and a class of devices from which
//! times follow.

use std::cell::RefCell;
use std::collections::{BTreeMap, HashMap};
use std::path::{Path, PathBuf};
use std::rc::Rc;

use serde::{Deserialize, Serialize};

use super::trouble::Trouble;
use super::{Cost, LATENCIES_US, Noise, PassRates, SimulatedPeers};
use crate::collective::Collective;
use crate::knob::{Lists, ReadValue};
use crate::machine::{CpuNode, Gpu, Layout, Machine, NcclVersion, NvLinkEnd, PcieLink, PeerAccess, Topology};
use crate::nccl_model::timing::{Law, Link, LinkTiming, Operation, Timings};
use crate::nccl_model::{Communicator, GraphFile, ModelError, Override, Release, Settings, Transport};
use crate::record::{Effective, Flag, SetLine};
use crate::units::nearest_name;

/// Bytes of a channel's buffer for Simple where `NCCL_BUFFSIZE` says nothing.
const BUFFER_BYTES: u64 = 4 << 20;
/// Communicators that are kept: a search has some hundred arms.
const KEPT: usize = 1024;
/// Largest graph file that is read.
const GRAPH_FILE_LIMIT_BYTES: u64 = 1 << 20;

/// A machine as its file describes it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct ModelledMachine {
    format: u32,
    pub(super) name: String,
    /// What it stands for and what it does not claim.
    pub(super) description: String,
    /// What of it nobody measured; absent where all of it was.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) extrapolated: Option<String>,
    gpu: String,
    memory_mib: u64,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    cpu: Option<String>,
    /// The release of NCCL whose choices it makes.
    nccl: String,
    /// The class of devices in the table of timings.
    timing: String,
    pub(super) noise: Noise,
    pub(super) cost: Cost,
    /// Without it the machine cannot be tried in a forward pass.
    #[serde(default)]
    pub(super) pass: Option<PassRates>,
    /// What a test of peer access across the host bridge would come to; not told without it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) peer_access: Option<SimulatedPeers>,
    /// A common layout; this or a topology.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    layout: Option<LayoutTable>,
    /// Everything device by device.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    topology: Option<Topology>,
    /// What goes wrong.
    #[serde(default, rename = "trouble", skip_serializing_if = "Vec::is_empty")]
    pub(super) troubles: Vec<Trouble>,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct LayoutTable {
    kind: Layout,
    gpus: usize,
    compute_capability: [u32; 2],
    pcie: PcieLink,
    cpu: CpuNode,
    #[serde(default)]
    peer_access: PeerAccess,
}

/// How one arm's communicator carries messages.
pub(super) struct Seen {
    communicator: Communicator,
    /// Constants of the link its rings go over.
    timing: &'static LinkTiming,
    law: &'static Law,
    transport: Option<String>,
    buffer_bytes: u64,
    /// Whether an event is recorded after each captured collective.
    has_events: bool,
    /// What `NCCL_ALGO` and `NCCL_PROTO` ask for.
    asked: [Option<Lists>; 2],
    /// Variables that leave no trace, by name.
    unread: Vec<String>,
    pub(super) set_lines: Vec<SetLine>,
}

/// What one message takes, and how it was carried.
pub(super) struct Carried {
    pub(super) latency_us: f64,
    pub(super) effective: Effective,
    pub(super) flags: Vec<Flag>,
}

/// An environment, and a number of ranks.
type Key = (BTreeMap<String, String>, u32);

/// The communicators of a machine, each found once; rings and trees are searched once for all arms that
/// change nothing about them.
pub(super) struct Cache {
    searched: RefCell<HashMap<Key, Communicator>>,
    /// Where files are looked for that an environment does not name by a whole path.
    folder: Option<PathBuf>,
    known: RefCell<HashMap<Key, Rc<Result<Seen, String>>>>,
}

impl Cache {
    pub(super) fn new(folder: Option<PathBuf>) -> Self {
        Self { searched: RefCell::default(), folder, known: RefCell::default() }
    }

    /// What an arm's communicator of so many ranks is like, or why NCCL refuses.
    pub(super) fn seen(
        &self,
        machine: &ModelledMachine,
        environment: &BTreeMap<String, String>,
        ranks: u32,
    ) -> Rc<Result<Seen, String>> {
        let key = (environment.clone(), ranks);
        if let Some(known) = self.known.borrow().get(&key) {
            return Rc::clone(known);
        }
        let deciding = environment.iter().filter(|(name, _)| Settings::decides_graphs(name));
        let search = (deciding.map(|(name, value)| (name.clone(), value.clone())).collect(), ranks);
        let like = self.searched.borrow().get(&search).cloned();
        let seen = machine.seen(environment, ranks, self.folder.as_deref(), like.as_ref());
        if let (None, Ok(seen)) = (like, &seen) {
            self.searched.borrow_mut().insert(search, seen.communicator.clone());
        }
        let seen = Rc::new(seen.map_err(|error| error.to_string()));
        let mut known = self.known.borrow_mut();
        if known.len() >= KEPT {
            known.clear();
        }
        known.insert(key, Rc::clone(&seen));
        seen
    }
}

impl ModelledMachine {
    /// What is wrong with it, beside what every machine must keep to.
    pub(super) fn check(&self) -> Result<(), String> {
        self.release()?;
        let topology = self.topology()?;
        topology.validate().map_err(|error| error.to_string())?;
        if topology.gpus.len() > 16 {
            return Err("1 to 16 GPUs".to_owned());
        }
        if self.memory_mib == 0 || self.memory_mib > 1 << 24 {
            return Err("memory_mib must lie between 1 and 16777216".to_owned());
        }
        let timings = Timings::compiled_in();
        if !timings.devices().any(|device| device == self.timing) {
            let known: Vec<&str> = timings.devices().collect();
            let near = nearest_name(&self.timing, known.iter().copied());
            let near = near.map(|near| format!("did you mean {near:?}? ")).unwrap_or_default();
            return Err(format!("no timings of {:?}; {near}known: {}", self.timing, known.join(", ")));
        }
        self.troubles.iter().try_for_each(Trouble::check)?;
        // What NCCL makes of it must be known before anything is measured.
        self.seen(&BTreeMap::new(), topology.gpus.len() as u32, None, None).map_err(|error| error.to_string())?;
        Ok(())
    }

    fn release(&self) -> Result<Release, String> {
        let numbers: Option<Vec<u32>> = self.nccl.split('.').map(|number| number.parse().ok()).collect();
        let Some([major, minor, patch]) = numbers.as_deref() else {
            return Err(format!("nccl = {:?}: a release looks like \"2.28.9\"", self.nccl));
        };
        let version = NcclVersion { major: *major, minor: *minor, patch: *patch };
        Release::of(version).map_err(|error| error.to_string())
    }

    /// The release of NCCL that it runs.
    pub(super) fn nccl_version(&self) -> Option<NcclVersion> {
        self.release().ok().map(Release::version)
    }

    pub(super) fn topology(&self) -> Result<Topology, String> {
        match (&self.layout, &self.topology) {
            (Some(layout), None) => {
                let built =
                    Topology::of_layout(layout.kind, layout.gpus, layout.compute_capability, layout.pcie, &layout.cpu);
                let built = built.map_err(|error| format!("layout: {error}"))?;
                Ok(Topology { peer_access: layout.peer_access.clone(), ..built })
            }
            (None, Some(topology)) => Ok(topology.clone()),
            _ => Err("either [layout] or [topology] says how the GPUs hang together".to_owned()),
        }
    }

    /// The machine as a run records it.
    pub(super) fn machine(&self) -> Machine {
        // What was parsed was checked.
        let topology = self.topology().ok();
        let nodes = topology.map(|topology| topology.gpus).unwrap_or_default();
        let gpus: Vec<Gpu> = (0..)
            .zip(&nodes)
            .map(|(index, node)| Gpu {
                index,
                uuid: format!("SIMULATED-{}-{index}", self.name),
                name: self.gpu.clone(),
                pci_bus_id: node.pci_bus_id.clone(),
                memory_total_mib: Some(self.memory_mib),
                memory_free_mib: Some(self.memory_mib),
                compute_capability: Some(node.compute_capability.map(|number| number as i32)),
                pcie_generation: Some([node.link.generation_now.unwrap_or(node.link.generation), node.link.generation]),
                pcie_width: Some([node.link.width, node.link.width]),
                nvlinks: Some(node.nvlinks.iter().map(|link| link.links).sum()),
                persistence: None,
                utilization_percent: None,
                process_ids: Vec::new(),
            })
            .collect();
        Machine {
            name: format!("SIMULATED {}x {} ({})", gpus.len(), self.gpu, self.name),
            driver: None,
            cuda_driver_version: None,
            cpu: self.cpu.clone(),
            gpus,
        }
    }

    /// What NCCL makes of an environment on the first GPUs of the machine, where `like` has the same rings
    /// and trees.
    pub(super) fn seen(
        &self,
        environment: &BTreeMap<String, String>,
        ranks: u32,
        folder: Option<&Path>,
        like: Option<&Communicator>,
    ) -> Result<Seen, SeenError> {
        let release = self.release().map_err(SeenError::File)?;
        let settings = Settings::read(environment, release.version());
        let topology = first_gpus(self.topology().map_err(SeenError::File)?, ranks);
        let mut graph = None;
        let (mut buffer_bytes, mut has_events, mut cumem) = (BUFFER_BYTES, true, true);
        let (mut asked, mut unread, mut set_lines) = ([None, None], Vec::new(), Vec::new());
        for (name, _, reading) in settings.readings() {
            match (name, &reading.value) {
                ("NCCL_GRAPH_FILE", ReadValue::Text(path)) => graph = Some(read_graph(path, folder)?),
                ("NCCL_BUFFSIZE", ReadValue::Integer(bytes)) if *bytes > 0 => buffer_bytes = bytes.unsigned_abs(),
                ("NCCL_GRAPH_MIXING_SUPPORT", ReadValue::Integer(0)) => has_events = false,
                ("NCCL_CUMEM_ENABLE", ReadValue::Integer(0)) => cumem = false,
                ("NCCL_ALGO", ReadValue::Lists(lists)) => asked[0] = Some(lists.clone()),
                ("NCCL_PROTO", ReadValue::Lists(lists)) => asked[1] = Some(lists.clone()),
                (_, ReadValue::Ignored { .. } | ReadValue::NotRead { .. }) => unread.push(name.to_owned()),
                _ => {}
            }
            let line = |value: &String| SetLine { variable: name.to_owned(), value: value.clone() };
            set_lines.extend(reading.logged.as_ref().map(line));
        }
        let communicator = match like {
            Some(like) => like.under(&topology, &settings, release)?,
            None => Communicator::new(&topology, &settings, release, graph.as_ref())?,
        };
        let timings = Timings::compiled_in();
        let timing = timings.nearest(&self.timing, Link::of(&communicator)).ok_or_else(|| {
            SeenError::File(format!("no timings of {} over {}", self.timing, Link::of(&communicator).name()))
        })?;
        let transport = transport(&communicator, release.rules(), cumem);
        Ok(Seen {
            communicator,
            timing,
            law: &timings.law,
            transport,
            buffer_bytes,
            has_events,
            asked,
            unread,
            set_lines,
        })
    }
}

/// Why there is no communicator.
#[derive(Debug, thiserror::Error)]
pub(super) enum SeenError {
    /// NCCL says no.
    #[error(transparent)]
    Model(#[from] ModelError),
    /// A file of this tool's cannot be used.
    #[error("{0}")]
    File(String),
}

impl Seen {
    /// The operation that carries a message.
    pub(super) fn operation(&self, collective: Collective, bytes: u64) -> Result<(&str, Link, Operation), ModelError> {
        let choice = self.communicator.choose(collective, bytes)?;
        Ok((&self.timing.device, self.timing.link, self.as_operation(collective, bytes, &choice)))
    }

    /// What a message takes as NCCL chooses to carry it.
    pub(super) fn time_us(&self, collective: Collective, bytes: u64) -> Result<f64, ModelError> {
        let choice = self.communicator.choose(collective, bytes)?;
        Ok(self.timing.time_us(self.law, &self.as_operation(collective, bytes, &choice)))
    }

    fn as_operation(&self, collective: Collective, bytes: u64, choice: &crate::nccl_model::Choice) -> Operation {
        Operation {
            collective,
            bytes,
            ranks: self.communicator.ranks(),
            algorithm: choice.algorithm,
            protocol: choice.protocol,
            channels: choice.channels,
            threads: choice.threads,
            buffer_bytes: self.buffer_bytes,
        }
    }

    /// What a message takes without noise, where a tuner plugin answers with `decided`. With `substituted`, what
    /// came second is carried out, as on machines where NCCL does not do what was asked for.
    pub(super) fn carry(
        &self,
        arm: &BTreeMap<String, String>,
        (collective, bytes): (Collective, u64),
        decided: Override,
        substituted: bool,
    ) -> Result<Carried, ModelError> {
        // The plugin leaves alone what NCCL cannot run, channels included.
        let can_run = |(algorithm, protocol)| {
            let known = self.communicator.candidates(collective, bytes).unwrap_or_default();
            known
                .iter()
                .any(|other| (other.algorithm, other.protocol) == (algorithm, protocol) && other.bandwidth_gbps > 0.0)
        };
        let decided = if decided.kernel.is_none_or(can_run) { decided } else { Override::default() };
        let mut choice = self.communicator.choose_with(collective, bytes, decided)?;
        if substituted
            && let Some(other) = self
                .communicator
                .candidates(collective, bytes)?
                .into_iter()
                .filter(|other| (other.algorithm, other.protocol) != (choice.algorithm, choice.protocol))
                .filter(|other| other.bandwidth_gbps > 0.0)
                .min_by(|a, b| a.latency_us.total_cmp(&b.latency_us))
        {
            let answer = Override { kernel: Some((other.algorithm, other.protocol)), channels: None };
            choice = self.communicator.choose_with(collective, bytes, answer)?;
        }
        let us = self.timing.time_us(self.law, &self.as_operation(collective, bytes, &choice));
        let event_us = if self.has_events { 0.0 } else { self.law.event_us };
        let (algorithm, protocol) = (choice.algorithm.name(), choice.protocol.name());
        let mut flags = Vec::new();
        for (lists, ran) in self.asked.iter().zip([algorithm, protocol]) {
            let allowed = lists.as_ref().and_then(|lists| lists.selected_for(collective.log_name()));
            if allowed.is_some_and(|allowed| !allowed.iter().any(|word| word.eq_ignore_ascii_case(ran))) {
                flags.push(Flag::Substituted);
            }
        }
        if self.unread.iter().any(|name| arm.contains_key(name)) {
            flags.push(Flag::Ignored);
        }
        flags.sort_unstable_by_key(|flag| *flag as u8);
        flags.dedup();
        Ok(Carried {
            latency_us: (us - event_us).clamp(*LATENCIES_US.start(), *LATENCIES_US.end()),
            effective: Effective {
                transport: self.transport.clone(),
                communicator_channels: Some(self.communicator.channels()),
                algo: Some(algorithm.to_owned()),
                proto: Some(protocol.to_owned()),
                channels: Some(choice.channels),
                threads: Some(choice.threads),
            },
            flags,
        })
    }
}

/// The first GPUs of a machine, in the order of the ranks, as engines take them.
fn first_gpus(topology: Topology, ranks: u32) -> Topology {
    let count = ranks as usize;
    let mut gpus: Vec<_> = topology.gpus.into_iter().take(count).collect();
    for gpu in &mut gpus {
        gpu.nvlinks.retain(|link| !matches!(link.to, NvLinkEnd::Gpu(other) if other >= count));
    }
    let peer_access = match topology.peer_access {
        PeerAccess::Pairs(pairs) => {
            PeerAccess::Pairs(pairs.into_iter().filter(|pair| pair.iter().all(|gpu| *gpu < count)).collect())
        }
        all_or_none => all_or_none,
    };
    Topology { gpus, peer_access, ..topology }
}

/// Transports of the rings' edges, as a log names them.
fn transport(communicator: &Communicator, version: NcclVersion, cumem: bool) -> Option<String> {
    let ranks = communicator.ranks();
    let orders = &communicator.graphs().ring.orders;
    let plain: Vec<u32> = (0..ranks).collect();
    let orders = if orders.is_empty() { std::slice::from_ref(&plain) } else { orders };
    let mut names = std::collections::BTreeSet::new();
    for order in orders {
        for (&from, &to) in order.iter().zip(order.iter().cycle().skip(1)) {
            names.extend(communicator.transport(from, to).map(|transport| match transport {
                Transport::P2p if cumem && version >= NcclVersion::v2(19, 0) => "P2P/CUMEM",
                Transport::P2p => "P2P/IPC",
                Transport::Shm => "SHM/direct/direct",
            }));
        }
    }
    (!names.is_empty()).then(|| names.into_iter().collect::<Vec<_>>().join("+"))
}

/// A graph file, by the path that the variable holds; one that is not whole lies in the folder.
fn read_graph(path: &str, folder: Option<&Path>) -> Result<GraphFile, SeenError> {
    let whole = folder.map_or_else(|| PathBuf::from(path), |folder| folder.join(path));
    let file = |error: std::io::Error| SeenError::File(format!("NCCL cannot read its graph file: {error}"));
    let bytes = super::read_file(&whole, GRAPH_FILE_LIMIT_BYTES).map_err(file)?;
    let text = String::from_utf8(bytes).map_err(|error| file(std::io::Error::other(error)))?;
    GraphFile::read(&text).map_err(|error| SeenError::File(format!("NCCL cannot use {path}: {error}")))
}
