//! Latency and bandwidth that NCCL goes by for each algorithm and protocol, after `graph/tuning.cc`.

use crate::collective::Collective;
use crate::machine::PathKind;

use super::constants::{self, Rules};
use super::settings::Settings;
use super::system::System;
use super::{Algorithm, Disabled, Graph, Graphs, Protocol};

/// Collectives of the model, in the order of its tables.
pub(super) const COLLECTIVES: [Collective; 5] = [
    Collective::AllReduce,
    Collective::AllGather,
    Collective::ReduceScatter,
    Collective::Broadcast,
    Collective::Reduce,
];

/// One algorithm with one protocol for one collective.
#[derive(Debug, Clone)]
pub(super) struct Rating {
    pub latency_us: f32,
    /// GB/s of message, before any correction by size; 0 where it is out of the question.
    pub gbps: f32,
    pub disabled: Option<Disabled>,
}

/// All ratings of a communicator, with threads and thresholds.
#[derive(Debug, Clone)]
pub(super) struct Tuning {
    /// By collective, algorithm, protocol.
    ratings: Vec<Rating>,
    /// By algorithm and protocol.
    threads: [[u32; 3]; 3],
    thresholds: [[i64; 3]; 3],
    /// By collective: what is taken where nothing is left, in releases that do so.
    backups: [Option<Protocol>; 5],
}

impl Tuning {
    pub(super) fn rating(&self, collective: usize, algorithm: Algorithm, protocol: Protocol) -> &Rating {
        &self.ratings[(collective * 3 + algorithm as usize) * 3 + protocol as usize]
    }

    pub(super) fn threads(&self, algorithm: Algorithm, protocol: Protocol) -> u32 {
        self.threads[algorithm as usize][protocol as usize]
    }

    pub(super) fn threshold(&self, algorithm: Algorithm, protocol: Protocol) -> i64 {
        self.thresholds[algorithm as usize][protocol as usize]
    }
}

/// Rates everything for a communicator.
pub(super) fn tune(system: &System, graphs: &Graphs, settings: &Settings, rules: Rules) -> Tuning {
    let model = Model { system, graphs, settings, rules, ranks: system.gpus.len() as u32 };
    let mut ratings = Vec::with_capacity(COLLECTIVES.len() * 9);
    for collective in COLLECTIVES {
        for algorithm in Algorithm::ALL {
            for protocol in Protocol::ALL {
                ratings.push(model.rate(collective, algorithm, protocol));
            }
        }
    }
    let mut tuning = Tuning { ratings, threads: model.threads(), thresholds: model.thresholds(), backups: [None; 5] };
    if !rules.fails_without_choice() {
        for (index, collective) in COLLECTIVES.into_iter().enumerate() {
            model.fill_backup(&mut tuning, index, collective);
        }
    }
    tuning
}

struct Model<'a> {
    system: &'a System,
    graphs: &'a Graphs,
    settings: &'a Settings,
    rules: Rules,
    ranks: u32,
}

impl Model<'_> {
    fn graph(&self, algorithm: Algorithm) -> Option<&Graph> {
        match algorithm {
            Algorithm::Tree => Some(&self.graphs.tree),
            Algorithm::Ring => Some(&self.graphs.ring),
            Algorithm::Nvls => self.graphs.nvls.as_ref(),
        }
    }

    fn rate(&self, collective: Collective, algorithm: Algorithm, protocol: Protocol) -> Rating {
        let out = |disabled| Rating { latency_us: 0.0, gbps: 0.0, disabled: Some(disabled) };
        let is_implemented = match (algorithm, collective) {
            (Algorithm::Ring, _) => true,
            (Algorithm::Tree, _) => collective == Collective::AllReduce,
            (Algorithm::Nvls, Collective::Broadcast | Collective::Reduce) => false,
            (Algorithm::Nvls, _) => protocol == Protocol::Simple,
        };
        if !is_implemented {
            return out(Disabled::NotImplemented);
        }
        let Some(graph) = self.graph(algorithm) else {
            return out(Disabled::Machine { reason: self.no_nvls() });
        };
        let gbps = self.gbps(collective, algorithm, protocol, graph);
        let latency_us = self.latency_us(collective, algorithm, protocol, graph);
        let disabled = if gbps <= 0.0 {
            Some(Disabled::Machine { reason: "NVLS needs two channels".to_owned() })
        } else {
            self.disabled(collective, algorithm, protocol, graph)
        };
        Rating { latency_us, gbps: if disabled.is_some() { 0.0 } else { gbps }, disabled }
    }

    fn no_nvls(&self) -> String {
        if self.system.nv_switch.is_none() {
            "there is no NVSwitch".to_owned()
        } else if self.system.least_sm < 90 {
            "NVLS needs GPUs of compute capability 9.0".to_owned()
        } else if self.system.gpus.len() < self.rules.nvls_least_gpus() {
            "this release sets up NVLS for three GPUs or more".to_owned()
        } else {
            "NVSwitch multicast is off, or not offered by the driver".to_owned()
        }
    }

    /// GB/s of message, as NCCL rounds it on the way.
    fn gbps(&self, collective: Collective, algorithm: Algorithm, protocol: Protocol, graph: &Graph) -> f32 {
        let rules = self.rules;
        let sm = self.system.least_sm;
        let ranks = self.ranks as f32;
        let channels = graph.channels as f32;
        let channel = graph.channel_bandwidth_gbps as f32;
        let steps = match collective {
            Collective::AllReduce => 2 * (self.ranks - 1),
            Collective::AllGather | Collective::ReduceScatter => self.ranks - 1,
            _ => self.ranks,
        };
        let is_reduced_by_all = collective == Collective::AllReduce;
        let gathers = matches!(collective, Collective::AllGather | Collective::ReduceScatter);
        let capped = |share: f64, bus: f32, most_a_channel: f64| {
            (f64::from(bus) * share).min(f64::from(graph.channels) * most_a_channel) as f32
        };
        match algorithm {
            Algorithm::Ring => {
                let bus = channels * channel;
                let bus = match protocol {
                    Protocol::Ll => {
                        let share = rules.ring_ll_share(is_reduced_by_all || collective == Collective::Reduce);
                        (f64::from(bus) * share).min(rules.ll_most_gbps(sm)) as f32
                    }
                    Protocol::Ll128 => capped(0.92, bus, rules.ring_ll128_most_gbps(sm)),
                    Protocol::Simple => bus,
                };
                bus * ((f64::from(self.ranks) / f64::from(steps)) as f32)
            }
            Algorithm::Tree => {
                let bus = capped(0.92, channels * channel, rules.tree_most_gbps(sm));
                let bus = match protocol {
                    Protocol::Ll => (f64::from(bus) / 3.8).min(rules.ll_most_gbps(sm)) as f32,
                    Protocol::Ll128 => capped(7.0 / 9.0, bus, rules.tree_ll128_most_gbps(sm)),
                    Protocol::Simple => bus,
                };
                let bus = if graph.pattern == super::Pattern::Tree { (f64::from(bus) * 0.85) as f32 } else { bus };
                bus * 0.5
            }
            Algorithm::Nvls => {
                let outward = graph.outward_bandwidth_gbps as f32;
                if let Some(efficiency) = rules.nvls_efficiency(sm) {
                    if graph.channels < 2 {
                        return 0.0;
                    }
                    let inward = channel * efficiency * (channels - 1.0) / channels;
                    let inward = if is_reduced_by_all { inward * 2.0 } else { inward * ((ranks - 1.0) / ranks) };
                    let bus = channels * inward.min(outward);
                    return if gathers { bus } else { bus * ((f64::from(self.ranks) / f64::from(steps)) as f32) };
                }
                let each = if gathers && rules.rates_nvls_by_collective() {
                    (channel * (ranks - 1.0) / ranks).min(outward * 0.9)
                } else {
                    channel.min(outward)
                };
                let bus = channels * each;
                if gathers && rules.nvls_gathers_without_ratio() { bus } else { bus * (5.0_f64 / 6.0) as f32 }
            }
        }
    }

    fn latency_us(&self, collective: Collective, algorithm: Algorithm, protocol: Protocol, graph: &Graph) -> f32 {
        let is_nvlink = graph.path_kind == PathKind::Nvl;
        let step = |algorithm| self.rules.step_latency_us(algorithm, protocol, is_nvlink, self.system.is_power);
        let base = self.rules.base_latency_us(algorithm, protocol);
        let ranks = self.ranks as f32;
        match (algorithm, collective) {
            (Algorithm::Nvls, _) => step(Algorithm::Nvls),
            (Algorithm::Tree, _) => base + 2.0 * ((ranks - 1.0) * step(Algorithm::Tree)),
            (Algorithm::Ring, Collective::AllReduce) => base + 2.0 * (ranks - 1.0) * step(Algorithm::Ring),
            (Algorithm::Ring, Collective::AllGather | Collective::ReduceScatter) => {
                base + (ranks - 1.0) * step(Algorithm::Ring)
            }
            (Algorithm::Ring, _) if graph.same_channels => base + step(Algorithm::Ring),
            (Algorithm::Ring, _) => {
                let slower = if protocol == Protocol::Simple { Algorithm::Tree } else { Algorithm::Ring };
                base + ranks * step(slower)
            }
        }
    }

    fn disabled(
        &self,
        collective: Collective,
        algorithm: Algorithm,
        protocol: Protocol,
        graph: &Graph,
    ) -> Option<Disabled> {
        if !self.has_algorithm(collective, algorithm) {
            return Some(Disabled::Algorithm);
        }
        self.protocol_disabled(collective, protocol, graph)
    }

    fn has_algorithm(&self, collective: Collective, algorithm: Algorithm) -> bool {
        let Some(words) = self.settings.selected("NCCL_ALGO", collective.log_name()) else { return true };
        if words.contains(&algorithm.nccl_name()) {
            return true;
        }
        // Before 2.24 a list that leaves nothing but CollNet where there is none counts as none.
        let is_void =
            !self.rules.fails_without_choice() && !words.iter().any(|word| ["Ring", "Tree", "NVLS"].contains(word));
        is_void && algorithm != Algorithm::Nvls
    }

    fn protocol_disabled(&self, collective: Collective, protocol: Protocol, graph: &Graph) -> Option<Disabled> {
        if let Some(words) = self.settings.selected("NCCL_PROTO", collective.log_name()) {
            return (!words.contains(&protocol.nccl_name())).then_some(Disabled::Protocol);
        }
        if protocol != Protocol::Ll128 {
            return None;
        }
        let reason = if graph.path_kind > PathKind::Nvb {
            format!("GPUs exchange data through {}, not NVLink", graph.path_kind.describe())
        } else {
            self.rules.ll128_refuses(self.system.least_sm, self.system.most_sm)?
        };
        Some(Disabled::Ll128Gate { reason })
    }

    fn threads(&self) -> [[u32; 3]; 3] {
        let plain = self.settings.threads();
        let slow = self.graphs.ring.channel_bandwidth_gbps as f32 * self.graphs.ring.channels as f32
            <= constants::SLOW_RING_GBPS;
        let ll = plain.unwrap_or(constants::PLAIN_THREADS);
        let ll128 = self.settings.ll128_threads().unwrap_or(constants::LL128_THREADS);
        let ring = plain.unwrap_or(if slow { 256 } else { constants::PLAIN_THREADS });
        let tree = plain.unwrap_or(constants::PLAIN_THREADS);
        [[ll, ll128, tree], [ll, ll128, ring], [0, 0, constants::MAX_THREADS]]
    }

    fn thresholds(&self) -> [[i64; 3]; 3] {
        let mut thresholds = [[8, 8, 64]; 3];
        thresholds[Algorithm::Ring as usize][Protocol::Ll as usize] *= i64::from(self.ranks);
        for algorithm in Algorithm::ALL {
            for protocol in Protocol::ALL {
                if let Some(threshold) = self.settings.threshold(algorithm, protocol) {
                    thresholds[algorithm as usize][protocol as usize] = threshold;
                }
            }
        }
        thresholds
    }

    /// Before 2.24 a ring takes over where nothing is left, LL128 included in the oldest.
    fn fill_backup(&self, tuning: &mut Tuning, index: usize, collective: Collective) {
        let is_left = |tuning: &Tuning| {
            let all = Algorithm::ALL.into_iter().flat_map(|a| Protocol::ALL.into_iter().map(move |p| (a, p)));
            all.into_iter().any(|(a, p)| tuning.rating(index, a, p).gbps > 0.0)
        };
        if is_left(tuning) {
            return;
        }
        for protocol in Protocol::ALL {
            let keeps = self.rules.backup_keeps_to_protocols();
            if keeps && self.protocol_disabled(collective, protocol, &self.graphs.ring).is_some() {
                continue;
            }
            let at = (index * 3 + Algorithm::Ring as usize) * 3 + protocol as usize;
            let gbps = self.gbps(collective, Algorithm::Ring, protocol, &self.graphs.ring);
            let latency_us = self.latency_us(collective, Algorithm::Ring, protocol, &self.graphs.ring);
            tuning.ratings[at] = Rating { latency_us, gbps, disabled: None };
            tuning.backups[index] = Some(protocol);
        }
    }
}

impl Tuning {
    /// Whether NCCL fell back to a ring for a collective because the variables leave nothing.
    pub(super) fn is_backup(&self, collective: usize) -> bool {
        self.backups[collective].is_some()
    }
}
