//! Machines of format 1: what the default takes is a table, what settings change are factors. They know
//! nothing of NCCL; tests use them, because what was planted is known exactly.

use std::collections::BTreeMap;
use std::ops::RangeInclusive;

use serde::{Deserialize, Serialize};

use super::{Cost, LATENCIES_US, Noise, PassRates};
use crate::machine::{Gpu, Machine};

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
    pub(super) fn latency_us(&self, environment: &BTreeMap<String, String>, bytes: u64) -> f64 {
        let mut log_us: Vec<f64> = self.default_latency_us.iter().map(|us| us.ln()).collect();
        for effect in &self.effect {
            if effect.when.iter().all(|(variable, value)| environment.get(variable) == Some(value)) {
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
        us.clamp(*LATENCIES_US.start(), *LATENCIES_US.end())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn latency_follows_the_table_and_is_interpolated_between_sizes() {
        let machine: PlantedMachine = toml::from_str(include_str!("../../../tests/it/machines/planted.toml")).unwrap();
        let none = BTreeMap::new();
        for (size, us) in machine.sizes_bytes.iter().zip(&machine.default_latency_us) {
            assert!((machine.latency_us(&none, *size) / us - 1.0).abs() < 1e-9);
        }
        let between = machine.latency_us(&none, 57_344);
        assert!(between > machine.latency_us(&none, 32_768) && between < machine.latency_us(&none, 65_536));
    }
}
