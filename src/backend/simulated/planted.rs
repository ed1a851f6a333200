//! Machines of format 1: what the default takes is a table, what settings change are factors. They know
//! nothing of NCCL; tests use them, because what was planted is known exactly.

use std::collections::BTreeMap;
use std::ops::RangeInclusive;

use serde::{Deserialize, Serialize};

use super::{Cost, LATENCIES_US, Noise, PassRates, SimulatedPeers};
use crate::collective::Collective;
use crate::machine::{Gpu, Machine};
use crate::record::{Effective, PointKey};
use crate::tuner_table::{Decision, decision_of};

/// Factors on latencies.
const FACTORS: RangeInclusive<f64> = 0.001..=1000.0;
/// Channels of every communicator, where it is told what runs.
const CHANNELS: u32 = 64;

/// A machine as its file describes it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct PlantedMachine {
    format: u32,
    pub(super) name: String,
    /// What it stands for and what it does not claim.
    pub(super) description: String,
    gpu: String,
    pub(super) gpus: u32,
    memory_mib: u64,
    compute_capability: [i32; 2],
    pub(super) noise: Noise,
    pub(super) cost: Cost,
    /// Without it the machine cannot be tried in a forward pass.
    #[serde(default)]
    pub(super) pass: Option<PassRates>,
    /// What a test of peer access across the host bridge would come to; not told without it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) peer_access: Option<SimulatedPeers>,
    /// Message sizes of every list below, ascending.
    sizes_bytes: Vec<u64>,
    /// What the default takes, microseconds.
    default_latency_us: Vec<f64>,
    /// What NCCL runs where no setting says otherwise; nothing is told of what ran without it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    runs: Option<Runs>,
    /// What settings change.
    #[serde(default)]
    effect: Vec<Effect>,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Effect {
    /// Every variable must have this value for the effect to act.
    when: BTreeMap<String, String>,
    /// What NCCL runs under it; a tuner table that says so for a message has the same effect on it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    runs: Option<Runs>,
    /// Factor on the latency per size.
    factor: Vec<f64>,
}

/// What carries a message.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Runs {
    algorithm: String,
    protocol: String,
    channels: u32,
}

impl Runs {
    fn effective(&self) -> Effective {
        Effective {
            algo: Some(self.algorithm.clone()),
            proto: Some(self.protocol.clone()),
            channels: Some(self.channels),
            communicator_channels: Some(CHANNELS),
            ..Effective::default()
        }
    }
}

impl PlantedMachine {
    /// What is wrong with it, beside what every machine must keep to.
    pub(super) fn check(&self) -> Result<(), String> {
        let sizes = self.sizes_bytes.len();
        if sizes < 2 || !self.sizes_bytes.is_sorted_by(|a, b| a < b) || self.sizes_bytes[0] == 0 {
            return Err("sizes_bytes must hold two or more ascending sizes".to_owned());
        }
        if self.default_latency_us.len() != sizes || self.effect.iter().any(|effect| effect.factor.len() != sizes) {
            return Err(format!("every list must hold {sizes} values, one per size"));
        }
        if !self.default_latency_us.iter().all(|us| LATENCIES_US.contains(us)) {
            return Err("latencies must lie between 0.001 and 1e9 microseconds".to_owned());
        }
        if !self.effect.iter().flat_map(|effect| &effect.factor).all(|factor| FACTORS.contains(factor)) {
            return Err("factors must lie between 0.001 and 1000".to_owned());
        }
        if self.gpus == 0 || self.gpus > 16 {
            return Err("1 to 16 GPUs".to_owned());
        }
        Ok(())
    }

    /// The machine as a run records it.
    pub(super) fn machine(&self) -> Machine {
        let gpus = (0..self.gpus)
            .map(|index| Gpu {
                index,
                uuid: format!("SIMULATED-{}-{index}", self.name),
                name: self.gpu.clone(),
                pci_bus_id: format!("0000:{index:02x}:00.0"),
                memory_total_mib: Some(self.memory_mib),
                memory_free_mib: Some(self.memory_mib),
                compute_capability: Some(self.compute_capability),
                pcie_generation: None,
                pcie_width: None,
                nvlinks: None,
                persistence: None,
                utilization_percent: None,
                process_ids: Vec::new(),
            })
            .collect();
        Machine {
            name: format!("SIMULATED {}x {} ({})", self.gpus, self.gpu, self.name),
            driver: None,
            cuda_driver_version: None,
            cpu: None,
            gpus,
        }
    }

    /// The noiseless latency of an environment at a message size. Between the sizes of the table the
    /// logarithm of the latency is interpolated over the logarithm of the size; outside, the nearest
    /// two sizes are extended.
    ///
    /// The table is of all-reduces. Another collective is given the share of one that its traffic is, as
    /// steps of a ring go; what a list says of all-reduce alone does nothing to it.
    #[cfg(test)]
    pub(super) fn latency_us(&self, environment: &BTreeMap<String, String>, point: PointKey) -> f64 {
        self.take(environment, point, None).0
    }

    /// The same with what ran, where a tuner table may decide for the message.
    pub(super) fn take(
        &self,
        environment: &BTreeMap<String, String>,
        point: PointKey,
        decided: Option<Decision>,
    ) -> (f64, Effective) {
        let bytes = point.bytes;
        // A table takes the place of whatever would have run; what runs under nothing planted runs as nothing planted.
        let decides = |runs: &Runs| decision_of(&runs.effective()) == decided;
        let mut ran = self.runs.as_ref();
        let mut log_us: Vec<f64> = self.default_latency_us.iter().map(|us| us.ln()).collect();
        let concerns = |value: &str| {
            point.collective == Collective::AllReduce || !value.to_ascii_lowercase().starts_with("allreduce:")
        };
        for effect in &self.effect {
            let is_set =
                effect.when.iter().all(|(variable, value)| environment.get(variable) == Some(value) && concerns(value));
            let acts = match (&effect.runs, decided) {
                (Some(runs), Some(_)) => decides(runs),
                _ => is_set,
            };
            if acts {
                ran = effect.runs.as_ref().or(ran);
                for (log, factor) in log_us.iter_mut().zip(&effect.factor) {
                    *log += factor.ln();
                }
            }
        }
        let above = self.sizes_bytes.partition_point(|size| *size < bytes).clamp(1, self.sizes_bytes.len() - 1);
        let x = |size: u64| (size as f64).ln();
        let (x0, x1) = (x(self.sizes_bytes[above - 1]), x(self.sizes_bytes[above]));
        let share = (x(bytes.max(1)) - x0) / (x1 - x0);
        // Far outside the table a line through two points leads anywhere.
        let us = (log_us[above - 1] + share * (log_us[above] - log_us[above - 1])).exp();
        let share = point.collective.bus_factor(point.ranks) / Collective::AllReduce.bus_factor(point.ranks.max(2));
        let effective = match (ran, decided) {
            (Some(_), Some(decided)) => named(decided),
            (Some(ran), None) => ran.effective(),
            (None, _) => Effective::default(),
        };
        ((us * share).clamp(*LATENCIES_US.start(), *LATENCIES_US.end()), effective)
    }
}

/// What a table decided, as a log tells it.
fn named(decided: Decision) -> Effective {
    let name = |names: &[&str], index: usize| names.get(index).map(|name| (*name).to_owned());
    Effective {
        algo: name(&nccl_abi::ALGORITHMS, decided.algorithm),
        proto: name(&nccl_abi::PROTOCOLS, decided.protocol),
        channels: Some(decided.channels),
        communicator_channels: Some(CHANNELS),
        ..Effective::default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::collective::DataType;

    #[test]
    fn latency_follows_the_table_and_is_interpolated_between_sizes() {
        let machine: PlantedMachine = toml::from_str(include_str!("../../../tests/it/machines/planted.toml")).unwrap();
        let none = BTreeMap::new();
        let us_of = |bytes| machine.latency_us(&none, PointKey::usual(Collective::AllReduce, DataType::Bf16, bytes, 8));
        for (size, us) in machine.sizes_bytes.iter().zip(&machine.default_latency_us) {
            assert!((us_of(*size) / us - 1.0).abs() < 1e-9);
        }
        let between = us_of(57_344);
        assert!(between > us_of(32_768) && between < us_of(65_536));
    }

    #[test]
    fn other_collectives_take_their_share_and_heed_what_concerns_them() {
        let machine: PlantedMachine = toml::from_str(include_str!("../../../tests/it/machines/planted.toml")).unwrap();
        let environment = |value: &str| BTreeMap::from([("NCCL_PROTO".to_owned(), value.to_owned())]);
        let us = |collective, value: &str| {
            machine.latency_us(&environment(value), PointKey::usual(collective, DataType::Bf16, 16 << 20, 8))
        };
        let none = |collective| us(collective, "");
        assert!((none(Collective::AllGather) / none(Collective::AllReduce) - 0.5).abs() < 1e-9);
        assert!((none(Collective::SendRecv) / none(Collective::AllReduce) - 1.0 / 1.75).abs() < 1e-9);
        let changes = |collective, value| (us(collective, value) / none(collective) - 1.0).abs() > 1e-9;
        assert!(changes(Collective::AllReduce, "allreduce:LL"), "planted");
        assert!(!changes(Collective::AllGather, "allreduce:LL"));
    }
}
