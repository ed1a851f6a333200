//! Machines of format 1: what the default takes is a table, what settings change are factors. They know
//! nothing of NCCL; tests use them, because what was planted is known exactly.

use std::collections::BTreeMap;
use std::ops::RangeInclusive;

use serde::{Deserialize, Serialize};

use super::{Cost, LATENCIES_US, Noise, PassRates, SimulatedPeers};
use crate::collective::Collective;
use crate::machine::{Gpu, Machine};
use crate::record::PointKey;

/// Factors on latencies.
const FACTORS: RangeInclusive<f64> = 0.001..=1000.0;

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
    /// What settings change.
    #[serde(default)]
    effect: Vec<Effect>,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Effect {
    /// Every variable must have this value for the effect to act.
    when: BTreeMap<String, String>,
    /// Factor on the latency per size.
    factor: Vec<f64>,
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
    pub(super) fn latency_us(&self, environment: &BTreeMap<String, String>, point: PointKey) -> f64 {
        let bytes = point.bytes;
        let mut log_us: Vec<f64> = self.default_latency_us.iter().map(|us| us.ln()).collect();
        let concerns = |value: &str| {
            point.collective == Collective::AllReduce || !value.to_ascii_lowercase().starts_with("allreduce:")
        };
        for effect in &self.effect {
            if effect.when.iter().all(|(variable, value)| environment.get(variable) == Some(value) && concerns(value)) {
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
        (us * share).clamp(*LATENCIES_US.start(), *LATENCIES_US.end())
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
