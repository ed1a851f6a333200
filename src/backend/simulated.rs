//! A machine that does not exist: latencies from a committed table, noise from a seed, time from a
//! virtual clock. Every number it yields is labelled SIMULATED wherever it appears.
//!
//! It knows nothing of NCCL: a table says what the default takes at which size and by which factor a
//! setting changes that. It is the seam where a model of NCCL may stand later.

use std::collections::BTreeMap;
use std::ops::RangeInclusive;

use rand::RngExt;
use serde::{Deserialize, Serialize};

use super::{Backend, BackendError, LaunchPlan, Sink, collectives_per_graph};
use crate::canonical::Fingerprint;
use crate::collective::{Collective, DataType};
use crate::machine::{Gpu, Machine};
use crate::record::{CellMeasurement, Effective, Event, PassMeasurement, PassStep, PointKey};
use crate::seed::Seed;

/// Names of the machines that are compiled in.
pub const MACHINES: [(&str, &str); 1] =
    [("rtx-pro-6000-x8", include_str!("../../search-spaces/machines/rtx-pro-6000-x8.toml"))];

/// Latencies that a table may hold: from what a timing is rounded to, to a quarter of an hour.
const LATENCIES_US: RangeInclusive<f64> = 0.001..=1e9;
/// Factors on them.
const FACTORS: RangeInclusive<f64> = 0.001..=1000.0;
/// Seconds that anything may cost.
const COSTS_S: RangeInclusive<f64> = 0.0..=1e6;

/// Rates of a pass, each in its own unit.
const RATES: RangeInclusive<f64> = 0.001..=1e6;

/// A simulated machine as its file describes it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SimulatedMachine {
    format: u32,
    name: String,
    /// What it stands for and what it does not claim.
    description: String,
    gpu: String,
    gpus: u32,
    memory_mib: u64,
    compute_capability: [i32; 2],
    noise: Noise,
    cost: Cost,
    /// Without it the machine cannot be tried in a forward pass.
    #[serde(default)]
    pass: Option<PassRates>,
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
struct Noise {
    /// Standard deviation of the log of a launch's factor.
    launch_log_sd: f64,
    /// How often a launch is slow as a whole.
    slow_launch_probability: f64,
    /// And by which factor.
    slow_launch_factor: f64,
    /// Standard deviation of the log of a cell's factor within a launch.
    cell_log_sd: f64,
    /// Standard deviation of the log of a replay's factor within a cell.
    replay_log_sd: f64,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
#[expect(clippy::struct_field_names, reason = "units stand in field names")]
struct Cost {
    /// Seconds to start processes, contexts and the first communicator.
    launch_s: f64,
    /// Seconds for each communicator, connections included.
    communicator_s: f64,
    /// Seconds for each cell beside its timed replays.
    cell_s: f64,
}

/// How fast forward passes go beside their collectives.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct PassRates {
    /// Gigabytes per second that products read weights with.
    weights_gb_per_s: f64,
    /// Arithmetic of products, in teraflops.
    arithmetic_tflop_per_s: f64,
    /// Microseconds that each product costs beside that.
    product_us: f64,
    /// Factor on collectives while products run beside them.
    crowding: f64,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Effect {
    /// Every variable must have this value for the effect to act.
    when: BTreeMap<String, String>,
    /// Factor on the latency per size.
    factor: Vec<f64>,
}

impl SimulatedMachine {
    /// Reads a machine file.
    pub fn parse(text: &str) -> Result<Self, BackendError> {
        let machine: Self =
            toml::from_str(text).map_err(|error| BackendError::Unusable(format!("simulated machine: {error}")))?;
        machine.validated()
    }

    /// A machine that is compiled in.
    pub fn named(name: &str) -> Option<Result<Self, BackendError>> {
        MACHINES.iter().find(|(known, _)| *known == name).map(|(_, text)| Self::parse(text))
    }

    fn validated(self) -> Result<Self, BackendError> {
        let bad = |what: String| Err(BackendError::Unusable(format!("simulated machine {}: {what}", self.name)));
        let sizes = self.sizes_bytes.len();
        if self.format != 1 {
            return bad(format!("format {}; this version reads format 1", self.format));
        }
        if sizes < 2 || !self.sizes_bytes.is_sorted_by(|a, b| a < b) || self.sizes_bytes[0] == 0 {
            return bad("sizes_bytes must hold two or more ascending sizes".to_owned());
        }
        if self.default_latency_us.len() != sizes || self.effect.iter().any(|effect| effect.factor.len() != sizes) {
            return bad(format!("every list must hold {sizes} values, one per size"));
        }
        if !self.default_latency_us.iter().all(|us| LATENCIES_US.contains(us)) {
            return bad("latencies must lie between 0.001 and 1e9 microseconds".to_owned());
        }
        if !self.effect.iter().flat_map(|effect| &effect.factor).all(|factor| FACTORS.contains(factor)) {
            return bad("factors must lie between 0.001 and 1000".to_owned());
        }
        if ![self.cost.launch_s, self.cost.communicator_s, self.cost.cell_s].iter().all(|s| COSTS_S.contains(s)) {
            return bad("costs must lie between 0 and 1e6 seconds".to_owned());
        }
        let noise = [
            self.noise.launch_log_sd,
            self.noise.cell_log_sd,
            self.noise.replay_log_sd,
            self.noise.slow_launch_probability,
        ];
        if !noise.iter().all(|value| (0.0..1.0).contains(value)) || !FACTORS.contains(&self.noise.slow_launch_factor) {
            return bad("noise must lie between 0 and 1, and slow_launch_factor between 0.001 and 1000".to_owned());
        }
        let rates = self
            .pass
            .iter()
            .flat_map(|pass| [pass.weights_gb_per_s, pass.arithmetic_tflop_per_s, pass.product_us, pass.crowding]);
        if !rates.into_iter().all(|rate| RATES.contains(&rate)) {
            return bad("the rates of passes must lie between 0.001 and 1e6".to_owned());
        }
        if self.gpus == 0 || self.gpus > 16 {
            return bad("1 to 16 GPUs".to_owned());
        }
        Ok(self)
    }

    /// The machine as a run records it.
    pub fn machine(&self) -> Machine {
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

    /// Noiseless milliseconds of a pass: (whole, without collectives, crowded).
    fn pass_ms(
        &self,
        rates: &PassRates,
        environment: &BTreeMap<String, String>,
        steps: &[PassStep],
    ) -> (f64, f64, f64) {
        let (mut products_us, mut collectives_us) = (0.0, 0.0);
        for step in steps {
            match *step {
                PassStep::Product { rows, inputs, columns } => {
                    let read_us = (inputs * columns * 2) as f64 / (rates.weights_gb_per_s * 1e3);
                    let flop = 2.0 * rows as f64 * inputs as f64 * columns as f64;
                    let arithmetic_us = flop / (rates.arithmetic_tflop_per_s * 1e6);
                    products_us += read_us.max(arithmetic_us) + rates.product_us;
                }
                PassStep::Reduce { elements } => {
                    let point = PointKey {
                        collective: Collective::AllReduce,
                        dtype: DataType::Bf16,
                        bytes: elements * 2,
                        ranks: self.gpus,
                    };
                    collectives_us += self.latency_us(environment, point);
                }
            }
        }
        let whole = products_us + collectives_us;
        (whole / 1e3, products_us / 1e3, (products_us + collectives_us * rates.crowding) / 1e3)
    }

    /// The fingerprint of everything its numbers follow from.
    pub fn fingerprint(&self) -> Fingerprint {
        Fingerprint::of(self)
    }

    /// Whether it can be tried in a forward pass.
    pub const fn has_passes(&self) -> bool {
        self.pass.is_some()
    }

    /// What it stands for.
    pub fn description(&self) -> &str {
        &self.description
    }

    /// The noiseless latency of an environment at a message size. Between the sizes of the table the
    /// logarithm of the latency is interpolated over the logarithm of the size; outside, the nearest
    /// two sizes are extended.
    fn latency_us(&self, environment: &BTreeMap<String, String>, point: PointKey) -> f64 {
        let mut log_us: Vec<f64> = self.default_latency_us.iter().map(|us| us.ln()).collect();
        for effect in &self.effect {
            if effect.when.iter().all(|(variable, value)| environment.get(variable) == Some(value)) {
                for (log, factor) in log_us.iter_mut().zip(&effect.factor) {
                    *log += factor.ln();
                }
            }
        }
        let above = self.sizes_bytes.partition_point(|size| *size < point.bytes).clamp(1, self.sizes_bytes.len() - 1);
        let x = |size: u64| (size as f64).ln();
        let (x0, x1) = (x(self.sizes_bytes[above - 1]), x(self.sizes_bytes[above]));
        let share = (x(point.bytes.max(1)) - x0) / (x1 - x0);
        // Far outside the table a line through two points leads anywhere.
        let us = (log_us[above - 1] + share * (log_us[above] - log_us[above - 1])).exp();
        us.clamp(*LATENCIES_US.start(), *LATENCIES_US.end())
    }
}

/// The simulated backend.
pub struct SimulatedBackend {
    machine: SimulatedMachine,
    seed: Seed,
    /// Variables that hold in every arm; pins act in the table like any setting.
    pins: BTreeMap<String, String>,
}

impl SimulatedBackend {
    /// A backend whose noise follows from the run's seed.
    pub const fn new(machine: SimulatedMachine, seed: Seed, pins: BTreeMap<String, String>) -> Self {
        Self { machine, seed, pins }
    }

    /// A factor with this spread of its logarithm, from the sum of twelve uniform draws: close to
    /// normal within three standard deviations and never beyond six.
    fn factor(random: &mut impl rand::Rng, log_sd: f64) -> f64 {
        let sum: f64 = (0..12).map(|_| random.random::<f64>()).sum();
        ((sum - 6.0) * log_sd).exp()
    }
}

impl Backend for SimulatedBackend {
    fn run(&mut self, plan: &LaunchPlan, sink: Sink<'_>) -> Result<(), BackendError> {
        let started = Event::LaunchStarted { launch: plan.launch, block: plan.block, env: plan.environment.clone() };
        if sink(started).is_break() {
            return Ok(());
        }
        let noise = &self.machine.noise;
        let id = format!("block-{}-launch-{}", plan.block, plan.launch);
        let mut random = self.seed.derive("simulated-launch", &id);
        let mut launch_factor = Self::factor(&mut random, noise.launch_log_sd);
        if random.random::<f64>() < noise.slow_launch_probability {
            launch_factor *= noise.slow_launch_factor;
        }
        let mut duration_s = self.machine.cost.launch_s;
        let mut position = 0;
        for (index, communicator) in plan.communicators.iter().enumerate() {
            duration_s += self.machine.cost.communicator_s;
            let mut environment = self.pins.clone();
            environment.extend(communicator.arm.env.clone());
            for point in &communicator.points {
                let mut random = self.seed.derive("simulated-cell", &format!("{id}-{}-{point}", communicator.arm.id));
                let center_us = self.machine.latency_us(&environment, *point)
                    * launch_factor
                    * Self::factor(&mut random, noise.cell_log_sd);
                let collectives = collectives_per_graph(*point);
                let replay_s = center_us * f64::from(collectives) / 1e6;
                let replays = (plan.cell_time_ms / 1000.0 / replay_s).clamp(8.0, 200.0) as usize;
                let replays_us = (0..replays)
                    .map(|_| {
                        round_us(center_us * Self::factor(&mut random, noise.replay_log_sd)).max(*LATENCIES_US.start())
                    })
                    .collect();
                let cell_s = self.machine.cost.cell_s + replay_s * replays as f64;
                duration_s += cell_s;
                let measured = Event::CellMeasured(CellMeasurement {
                    arm: communicator.arm.id.clone(),
                    point: *point,
                    block: plan.block,
                    launch: plan.launch,
                    communicator: index as u32,
                    position,
                    collectives_per_replay: collectives,
                    replays_us,
                    effective: Effective::default(),
                    flags: Vec::new(),
                    duration_s: cell_s,
                });
                position += 1;
                if sink(measured).is_break() {
                    return Ok(());
                }
            }
        }
        for communicator in &plan.communicators {
            let mut environment = self.pins.clone();
            environment.extend(communicator.arm.env.clone());
            for pass in &communicator.passes {
                let key = pass.case.key();
                let cell = format!("{id}-{}-pass-{}-{}", communicator.arm.id, key.tokens, key.captured);
                let mut random = self.seed.derive("simulated-pass", &cell);
                let Some(rates) = &self.machine.pass else { continue };
                let (whole, without, crowded) = self.machine.pass_ms(rates, &environment, &pass.steps);
                let mut runs = |center_ms: f64, spread: f64| -> Vec<f64> {
                    (0..9)
                        .map(|_| round_us(center_ms * spread * Self::factor(&mut random, noise.replay_log_sd)))
                        .collect()
                };
                // A slow launch slows the collectives; products do not know of it.
                let launch = (without + (whole - without) * launch_factor) / whole;
                let (runs_ms, without_collectives_ms) = (runs(whole, launch), runs(without, 1.0));
                let crowded_ms = if pass.case.captured { runs(crowded, launch) } else { Vec::new() };
                let pass_s = runs_ms.iter().chain(&without_collectives_ms).chain(&crowded_ms).sum::<f64>() / 1e3;
                duration_s += pass_s;
                let measured = Event::PassMeasured(PassMeasurement {
                    arm: communicator.arm.id.clone(),
                    pass: key,
                    block: plan.block,
                    launch: plan.launch,
                    runs_ms,
                    without_collectives_ms,
                    crowded_ms,
                    arena_bytes: 0,
                    states: Vec::new(),
                    duration_s: pass_s,
                });
                if sink(measured).is_break() {
                    return Ok(());
                }
            }
        }
        // The launch is over either way; a break here changes nothing.
        let _ =
            sink(Event::LaunchEnded { launch: plan.launch, duration_s, set_by_environment: Vec::new(), outcome: None });
        Ok(())
    }

    fn expected_s(&self, plan: &LaunchPlan) -> f64 {
        let cost = &self.machine.cost;
        let cells = plan.cell_count() as f64;
        cost.launch_s
            + cost.communicator_s * plan.communicators.len() as f64
            + cells * (cost.cell_s + plan.cell_time_ms / 1000.0)
    }
}

/// Timings are kept to a nanosecond: CUDA's own events resolve half a microsecond per replay of many
/// collectives, and shorter lines keep recorded runs small.
pub(super) fn round_us(us: f64) -> f64 {
    (us * 1000.0).round() / 1000.0
}

#[cfg(test)]
mod tests {
    use std::ops::ControlFlow;

    use super::*;
    use crate::backend::CommunicatorPlan;
    use crate::record::{Arm, ArmId, Phase};

    fn point(bytes: u64) -> PointKey {
        PointKey { collective: Collective::AllReduce, dtype: DataType::Bf16, bytes, ranks: 8 }
    }

    fn plan(launch: u32) -> LaunchPlan {
        let arm = Arm {
            id: ArmId("x".to_owned()),
            name: "x".to_owned(),
            env: BTreeMap::new(),
            files: BTreeMap::new(),
            server_args: Vec::new(),
        };
        LaunchPlan {
            launch,
            block: 0,
            phase: Phase::Search,
            environment: BTreeMap::new(),
            communicators: vec![CommunicatorPlan {
                arm,
                variables: BTreeMap::new(),
                points: vec![point(57_344)],
                passes: Vec::new(),
            }],
            cell_time_ms: 20.0,
            data_seed: 0,
        }
    }

    fn run(seed: u64, launch: u32) -> Vec<Event> {
        let machine = SimulatedMachine::named("rtx-pro-6000-x8").unwrap().unwrap();
        let mut events = Vec::new();
        SimulatedBackend::new(machine, Seed(seed), BTreeMap::new())
            .run(&plan(launch), &mut |event| {
                events.push(event);
                ControlFlow::Continue(())
            })
            .unwrap();
        events
    }

    #[test]
    fn the_compiled_in_machines_are_valid() {
        for (name, _) in MACHINES {
            let machine = SimulatedMachine::named(name).unwrap().unwrap();
            assert_eq!(machine.name, name);
            assert!(machine.machine().name.contains("SIMULATED"));
        }
    }

    #[test]
    fn the_same_seed_gives_the_same_events_and_launches_differ() {
        assert_eq!(run(7, 0), run(7, 0));
        assert_ne!(run(7, 0), run(8, 0));
        assert_ne!(run(7, 0), run(7, 1));
    }

    #[test]
    fn latency_follows_the_table_and_is_interpolated_between_sizes() {
        let machine = SimulatedMachine::named("rtx-pro-6000-x8").unwrap().unwrap();
        let none = BTreeMap::new();
        for (size, us) in machine.sizes_bytes.iter().zip(&machine.default_latency_us) {
            assert!((machine.latency_us(&none, point(*size)) / us - 1.0).abs() < 1e-9);
        }
        let between = machine.latency_us(&none, point(57_344));
        assert!(
            between > machine.latency_us(&none, point(32_768)) && between < machine.latency_us(&none, point(65_536))
        );
    }

    #[test]
    fn a_table_with_a_missing_value_is_refused() {
        let text = MACHINES[0].1.replace("default_latency_us = [", "default_latency_us = [1.0, ");
        assert!(SimulatedMachine::parse(&text).is_err());
        assert!(SimulatedMachine::parse("format = 1").is_err());
    }
}
