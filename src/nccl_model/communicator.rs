//! A communicator: what NCCL finds once, and chooses for each message.

use crate::collective::Collective;
use crate::machine::{PathKind, Topology};

use super::constants::{self, Rules};
use super::finding::Finding;
use super::graph_file::{FileGraph, GraphFile};
use super::search::{self, Asked};
use super::settings::{Nvls, Settings};
use super::spread::{Message, spread};
use super::system::System;
use super::tuning::{COLLECTIVES, Tuning, tune};
use super::{
    Algorithm, Candidate, Choice, Disabled, Graph, Graphs, MAX_BYTES, ModelError, Override, Pattern, Protocol, Release,
    RunnerUp, Transport,
};

/// Numbers of graphs in a graph file.
const RING: u32 = 0;
const TREE: u32 = 1;
const NVLS: u32 = 3;

/// What NCCL makes of one machine with one environment: one rank on each GPU.
#[derive(Debug, Clone)]
pub struct Communicator {
    rules: Rules,
    graphs: Graphs,
    channels: u32,
    /// What rings and trees have of them.
    ring_channels: u32,
    nvls_channels: u32,
    tuning: Tuning,
    ranks: u32,
    /// By rank and rank.
    paths: Vec<Vec<(PathKind, f64)>>,
    transports: Vec<Vec<Transport>>,
    findings: Vec<Finding>,
}

impl Communicator {
    /// Finds rings and trees, and rates algorithms and protocols, as NCCL does when a communicator
    /// starts. A graph file stands in for the searches it has an answer to, as `NCCL_GRAPH_FILE` does;
    /// reading the file that the variable names is for the caller.
    pub fn new(
        topology: &Topology,
        settings: &Settings,
        release: Release,
        file: Option<&GraphFile>,
    ) -> Result<Self, ModelError> {
        Self::with_graphs(topology, settings, release, file, None)
    }

    /// The same machine and release under other variables, which must be equal in those that
    /// [`Settings::decides_graphs`] names: what was found once is not searched again.
    pub fn under(&self, topology: &Topology, settings: &Settings, release: Release) -> Result<Self, ModelError> {
        Self::with_graphs(topology, settings, release, None, Some(self.graphs.clone()))
    }

    fn with_graphs(
        topology: &Topology,
        settings: &Settings,
        release: Release,
        file: Option<&GraphFile>,
        known: Option<Graphs>,
    ) -> Result<Self, ModelError> {
        topology.validate()?;
        settings.refused()?;
        let count = topology.gpus.len();
        if count == 1 {
            return Err(ModelError::OneRank);
        }
        let rules = Rules::of(release.rules());
        let system = System::build(topology, settings.peer_rules(), rules)?;
        let transports = transports(&system, topology, settings)?;
        let limits = settings.channel_limits(rules.most_channels());
        let graphs = match known {
            Some(graphs) => graphs,
            None => find_graphs(&system, topology, settings, rules, file)?,
        };
        let graph_channels = graphs.ring.channels.min(graphs.tree.channels);
        let mut channels = (graph_channels * 2).min(rules.most_channels()).min(limits.most).max(limits.least);
        let nvls_channels = if graphs.nvls.is_some() {
            let wanted = settings.nvls_channels().unwrap_or_else(|| rules.nvls_channels(system.most_sm));
            wanted.min(limits.most_blocks).max(limits.least_blocks)
        } else {
            0
        };
        let before = channels;
        if rules.raises_channels_to_nvls() {
            channels = channels.max(nvls_channels);
        }
        let ring_channels = if rules.uses_raised_channels() { channels } else { before };
        let mut graphs = graphs;
        // NCCL goes on with as many channels as both have.
        graphs.ring.channels = graph_channels;
        graphs.tree.channels = graph_channels;
        let tuning = tune(&system, &graphs, settings, rules);
        let by_rank = |a: usize, b: usize| {
            let place = |rank: usize| system.place_of(rank as u32).unwrap_or(rank);
            let path = &system.paths[place(a)][place(b)];
            (path.kind, f64::from(path.gbps))
        };
        let paths = (0..count).map(|a| (0..count).map(|b| by_rank(a, b)).collect()).collect();
        let findings = findings(&system, topology, &graphs, release, rules);
        Ok(Self {
            rules,
            graphs,
            channels,
            ring_channels,
            nvls_channels,
            tuning,
            ranks: count as u32,
            paths,
            transports,
            findings,
        })
    }

    /// Rings and trees.
    pub const fn graphs(&self) -> &Graphs {
        &self.graphs
    }

    /// Channels of the communicator, after doubling and the limits: "4 coll channels" in NCCL's log.
    pub const fn channels(&self) -> u32 {
        self.channels
    }

    /// Channels of NVLS: "16 nvls channels" in NCCL's log.
    pub const fn nvls_channels(&self) -> u32 {
        self.nvls_channels
    }

    /// Ranks: one on each GPU.
    pub const fn ranks(&self) -> u32 {
        self.ranks
    }

    /// How two ranks exchange data; nothing for a rank with itself or one that is not there.
    pub fn transport(&self, from: u32, to: u32) -> Option<Transport> {
        if from == to {
            return None;
        }
        self.transports.get(from as usize)?.get(to as usize).copied()
    }

    /// The path between two ranks as NCCL goes by it, and its bandwidth in GB/s.
    pub fn path(&self, from: u32, to: u32) -> Option<(PathKind, f64)> {
        self.paths.get(from as usize)?.get(to as usize).copied()
    }

    /// Transports that neighbours in the rings use: what NCCL's log shows after "via".
    pub fn ring_transports(&self) -> Vec<Transport> {
        let mut found = Vec::new();
        for order in &self.graphs.ring.orders {
            for (at, from) in order.iter().enumerate() {
                let to = order[(at + 1) % order.len()];
                if let Some(transport) = self.transport(*from, to).filter(|transport| !found.contains(transport)) {
                    found.push(transport);
                }
            }
        }
        found
    }

    /// Every algorithm with every protocol, as NCCL rates them for a message.
    ///
    /// `bytes` is the larger of send and receive buffer per rank, as everywhere in this tool.
    pub fn candidates(&self, collective: Collective, bytes: u64) -> Result<Vec<Candidate>, ModelError> {
        let index = Self::check(collective, bytes)?;
        let mut candidates = Vec::with_capacity(9);
        for algorithm in Algorithm::ALL {
            for protocol in Protocol::ALL {
                let rating = self.tuning.rating(index, algorithm, protocol);
                let gbps = corrected_gbps(algorithm, protocol, bytes, rating.gbps);
                let time_us = self.time_us(index, algorithm, protocol, bytes).map(f64::from);
                candidates.push(Candidate {
                    algorithm,
                    protocol,
                    latency_us: f64::from(rating.latency_us),
                    bandwidth_gbps: f64::from(gbps),
                    time_us: time_us.ok_or_else(|| rating.disabled.clone().unwrap_or(Disabled::NotImplemented)),
                });
            }
        }
        Ok(candidates)
    }

    /// What NCCL chooses for a message; `bytes` as in [`Self::candidates`].
    pub fn choose(&self, collective: Collective, bytes: u64) -> Result<Choice, ModelError> {
        self.choose_with(collective, bytes, Override::default())
    }

    /// What NCCL chooses where a tuner plugin answers with this.
    pub fn choose_with(&self, collective: Collective, bytes: u64, answer: Override) -> Result<Choice, ModelError> {
        let index = Self::check(collective, bytes)?;
        let mut best: Option<RunnerUp> = None;
        let mut second: Option<RunnerUp> = None;
        for algorithm in Algorithm::ALL {
            for protocol in Protocol::ALL {
                let Some(time_us) = self.time_us(index, algorithm, protocol, bytes) else { continue };
                let candidate = RunnerUp { algorithm, protocol, predicted_us: f64::from(time_us) };
                if best.is_none_or(|best| candidate.predicted_us < best.predicted_us) {
                    second = best;
                    best = Some(candidate);
                } else if second.is_none_or(|second| candidate.predicted_us < second.predicted_us) {
                    second = Some(candidate);
                }
            }
        }
        let Some(mut chosen) = best else {
            return Err(ModelError::NothingLeft { collective, reason: self.why_nothing(index) });
        };
        if let Some((algorithm, protocol)) = answer.kernel
            && let Some(time_us) = self.time_us(index, algorithm, protocol, bytes)
            && (algorithm, protocol) != (chosen.algorithm, chosen.protocol)
        {
            second = Some(chosen);
            chosen = RunnerUp { algorithm, protocol, predicted_us: f64::from(time_us) };
        }
        let message = Message {
            collective,
            bytes,
            ranks: u64::from(self.ranks),
            algorithm: chosen.algorithm,
            protocol: chosen.protocol,
            most_threads: self.tuning.threads(chosen.algorithm, chosen.protocol),
            threshold: self.tuning.threshold(chosen.algorithm, chosen.protocol),
            channels: if chosen.algorithm == Algorithm::Nvls { self.nvls_channels } else { self.ring_channels },
            plugin_channels: answer.channels.filter(|channels| *channels > 0),
        };
        let (channels, threads) = spread(&message, self.rules);
        Ok(Choice {
            algorithm: chosen.algorithm,
            protocol: chosen.protocol,
            channels,
            threads,
            predicted_us: chosen.predicted_us,
            runner_up: second,
        })
    }

    /// The threshold of an algorithm and protocol: bytes a thread and channel below which NCCL takes
    /// fewer channels, then fewer threads.
    pub fn threshold(&self, algorithm: Algorithm, protocol: Protocol) -> i64 {
        self.tuning.threshold(algorithm, protocol)
    }

    /// The most threads NCCL takes for an algorithm and protocol.
    pub fn max_threads(&self, algorithm: Algorithm, protocol: Protocol) -> u32 {
        self.tuning.threads(algorithm, protocol)
    }

    /// Latency in microseconds and bandwidth in GB/s of message, as NCCL's log tabulates them: 0 GB/s
    /// where a combination is out of the question.
    pub fn rating(&self, collective: Collective, algorithm: Algorithm, protocol: Protocol) -> Option<(f64, f64)> {
        let index = COLLECTIVES.iter().position(|known| *known == collective)?;
        let rating = self.tuning.rating(index, algorithm, protocol);
        Some((f64::from(rating.latency_us), f64::from(rating.gbps)))
    }

    /// Whether the variables leave nothing for a collective, and this release takes a ring nevertheless,
    /// without a word.
    pub fn is_backup(&self, collective: Collective) -> bool {
        COLLECTIVES.iter().position(|known| *known == collective).is_some_and(|index| self.tuning.is_backup(index))
    }

    /// What is worth telling about what NCCL made of this machine, worst first.
    pub fn findings(&self) -> &[Finding] {
        &self.findings
    }

    fn check(collective: Collective, bytes: u64) -> Result<usize, ModelError> {
        if bytes == 0 || bytes > MAX_BYTES {
            return Err(ModelError::Size { bytes });
        }
        COLLECTIVES.iter().position(|known| *known == collective).ok_or(ModelError::Collective { collective })
    }

    /// NCCL's time, in its own precision.
    fn time_us(&self, index: usize, algorithm: Algorithm, protocol: Protocol, bytes: u64) -> Option<f32> {
        let rating = self.tuning.rating(index, algorithm, protocol);
        if rating.gbps <= 0.0 {
            return None;
        }
        let gbps = corrected_gbps(algorithm, protocol, bytes, rating.gbps);
        Some(rating.latency_us + bytes as f32 / (1000.0 * gbps))
    }

    fn why_nothing(&self, index: usize) -> String {
        let names = |wanted: fn(&Disabled) -> bool| {
            let all = Algorithm::ALL.into_iter().flat_map(|a| Protocol::ALL.into_iter().map(move |p| (a, p)));
            all.into_iter().any(|(a, p)| self.tuning.rating(index, a, p).disabled.as_ref().is_some_and(wanted))
        };
        match (names(|why| *why == Disabled::Algorithm), names(|why| *why == Disabled::Protocol)) {
            (true, true) => "NCCL_ALGO and NCCL_PROTO together leave nothing that implements it".to_owned(),
            (true, false) => "NCCL_ALGO leaves no algorithm that implements it".to_owned(),
            (false, true) => "NCCL_PROTO leaves no protocol for it".to_owned(),
            (false, false) => "nothing implements it on this machine".to_owned(),
        }
    }
}

/// Bandwidth at a size: only trees fall behind theirs.
fn corrected_gbps(algorithm: Algorithm, protocol: Protocol, bytes: u64, gbps: f32) -> f32 {
    if algorithm == Algorithm::Tree { gbps * constants::tree_correction(protocol, bytes) } else { gbps }
}

/// How each pair exchanges data, by rank.
fn transports(system: &System, topology: &Topology, settings: &Settings) -> Result<Vec<Vec<Transport>>, ModelError> {
    let count = system.gpus.len();
    let mut transports = vec![vec![Transport::Shm; count]; count];
    for from in 0..count {
        for to in (0..count).filter(|to| *to != from) {
            let ranks = [system.ranks[from], system.ranks[to]];
            let [a, b] = ranks.map(|rank| rank as usize);
            // CUDA is asked as well, whatever NCCL was told to ignore; by way of another GPU it is not.
            let is_joined = system.paths[from][to].kind == PathKind::Nvb || topology.peer_access.is_granted(a, b);
            transports[a][b] = if system.peers[from][to] && is_joined {
                Transport::P2p
            } else if settings.may_use_host_memory() {
                Transport::Shm
            } else {
                return Err(ModelError::Network { ranks });
            };
        }
    }
    Ok(transports)
}

fn find_graphs(
    system: &System,
    topology: &Topology,
    settings: &Settings,
    rules: Rules,
    file: Option<&GraphFile>,
) -> Result<Graphs, ModelError> {
    let given = |id: u32| -> Result<Option<Graph>, ModelError> {
        match file.and_then(|file| file.graph(id)).filter(|graph| !graph.orders.is_empty()) {
            Some(graph) => from_file(graph, system, rules).map(Some),
            None => Ok(None),
        }
    };
    let searched = |pattern, least_channels, most_channels| {
        search::search(system, rules, Asked { pattern, least_channels, most_channels })
    };
    let missing = || ModelError::GraphFile { reason: "no graph was found".to_owned() };
    let ring = match given(RING)? {
        Some(ring) => ring,
        None => searched(Pattern::Ring, 1, rules.most_channels() / 2).ok_or_else(missing)?,
    };
    let tree = match given(TREE)? {
        Some(tree) => tree,
        None => searched(Pattern::BalancedTree, ring.channels, ring.channels).ok_or_else(missing)?,
    };
    let wants_nvls = match settings.nvls() {
        Nvls::Off => false,
        Nvls::WherePresent => topology.has_multicast,
        Nvls::Forced if topology.has_multicast => true,
        Nvls::Forced => {
            return Err(ModelError::Refused {
                variable: "NCCL_NVLS_ENABLE".to_owned(),
                text: "1".to_owned(),
                reason: "the machine has no NVSwitch multicast".to_owned(),
            });
        }
    };
    let nvls = if wants_nvls && system.gpus.len() >= rules.nvls_least_gpus() {
        match given(NVLS)? {
            Some(nvls) => Some(nvls),
            None => searched(Pattern::Nvls, 1, rules.most_channels()),
        }
    } else {
        None
    };
    Ok(Graphs { ring, tree, nvls })
}

/// A graph of a file, as NCCL takes it: nothing is searched, nothing doubled, nothing checked.
fn from_file(graph: &FileGraph, system: &System, rules: Rules) -> Result<Graph, ModelError> {
    let refused = |reason: String| ModelError::GraphFile { reason };
    let most = rules.most_channels() / 2;
    if graph.orders.len() > most as usize {
        return Err(refused(format!("{} channels; this release has room for {most}", graph.orders.len())));
    }
    if !rules.kinds().contains(&graph.type_intra) {
        return Err(refused(format!("this release knows no path of kind {}", graph.type_intra)));
    }
    let gpus = system.gpus.len();
    for (channel, order) in graph.orders.iter().enumerate() {
        if let Some(device) = order.iter().find(|device| system.place_of(**device).is_none()) {
            return Err(refused(format!("channel {channel} names GPU {device}, which the communicator does not have")));
        }
        // NVLS names the head of each channel alone.
        if (graph.id != NVLS && order.len() != gpus) || order.is_empty() {
            return Err(refused(format!("channel {channel} has {} of {gpus} GPUs", order.len())));
        }
    }
    Ok(Graph {
        pattern: graph.pattern,
        channels: graph.orders.len() as u32,
        channel_bandwidth_gbps: graph.speed_intra_gbps,
        outward_bandwidth_gbps: graph.speed_inter_gbps,
        path_kind: graph.type_intra,
        same_channels: graph.same_channels,
        is_fallback: false,
        orders: graph.orders.clone(),
    })
}

fn findings(system: &System, topology: &Topology, graphs: &Graphs, release: Release, rules: Rules) -> Vec<Finding> {
    let mut findings = Vec::new();
    let count = system.gpus.len();
    let pairs = || (0..count).flat_map(|a| (a + 1..count).map(move |b| (a, b)));
    // The tree asks for no more than the ring has, and fails for the same reason.
    if let Some(graph) = [&graphs.ring, &graphs.tree].into_iter().find(|graph| graph.is_fallback) {
        let tried = search::speeds_tried(system, rules);
        let slowest = pairs().map(|(a, b)| &system.paths[a][b]).min_by(|a, b| a.gbps.total_cmp(&b.gbps));
        findings.push(Finding::Fallback {
            pattern: graph.pattern,
            least_tried_gbps: tried.last().map_or(0.0, |speed| f64::from(*speed)),
            slowest_gbps: slowest.map_or(0.0, |path| f64::from(path.gbps)),
            slowest: slowest.map_or(PathKind::Dis, |path| path.kind),
            // Single precision has more digits than it means.
            assumed_gbps: (graph.channel_bandwidth_gbps * 1000.0).round() / 1000.0,
        });
    }
    if rules.reads_current_link() {
        let is_slowed = |gpu: usize| {
            topology.gpus[gpu].link.generation_now.is_some_and(|now| now < topology.gpus[gpu].link.generation)
        };
        let ranks: Vec<u32> = (0..count).filter(|gpu| is_slowed(*gpu)).map(|gpu| gpu as u32).collect();
        if let Some(first) = ranks.first().map(|rank| topology.gpus[*rank as usize].link) {
            let now = ranks.iter().filter_map(|rank| topology.gpus[*rank as usize].link.generation_now).min();
            let generation_now = now.unwrap_or(first.generation);
            findings.push(Finding::SlowedLink { ranks, generation_now, generation: first.generation });
        }
    }
    let granted =
        |a: usize, b: usize| topology.peer_access.is_granted(system.ranks[a] as usize, system.ranks[b] as usize);
    let unused: Vec<PathKind> = pairs()
        .filter(|(a, b)| granted(*a, *b) && !system.peers[*a][*b])
        .map(|(a, b)| system.direct[a][b].0)
        .filter(|kind| *kind > system.level)
        .collect();
    if let Some(path) = unused.iter().max() {
        let pairs = unused.len() as u32;
        findings.push(Finding::PeerAccessUnused { pairs, path: *path, level: system.level });
    }
    let denied = pairs().filter(|(a, b)| !granted(*a, *b) && system.direct[*a][*b].0 <= system.level).count();
    if denied > 0 {
        findings.push(Finding::PeerAccessDenied { pairs: denied as u32 });
    }
    if release.stands_in() {
        findings.push(Finding::NearestRelease { wanted: release.version(), used: release.rules() });
    }
    findings
}
