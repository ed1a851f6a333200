//! A machine that does not exist: times from a file, noise from a seed, the clock virtual. Every number it
//! yields is labelled SIMULATED wherever it appears.
//!
//! A file of format 2 describes a topology: what NCCL chooses follows from `nccl_model`, what that takes
//! from calibrated constants. A file of format 1 is a table that knows nothing of NCCL.

mod modelled;
mod planted;
mod table;
mod trouble;

use std::collections::BTreeMap;
use std::ops::RangeInclusive;
use std::path::PathBuf;

use rand::RngExt;
use serde::{Deserialize, Serialize};

use self::modelled::{Cache, ModelledMachine, Seen};
use self::planted::PlantedMachine;
use self::table::TableCache;
use self::trouble::Fate;
use super::{Backend, BackendError, CommunicatorPlan, LaunchPlan, PassPlan, Sink, collectives_per_graph, told};
use crate::canonical::Fingerprint;
use crate::collective::{Collective, DataType};
use crate::machine::{Machine, NcclVersion};
use crate::nccl_model::timing::{Link, Operation};
use crate::record::{
    Arm, ArmId, CellMeasurement, Effective, Event, Flag, GatePass, Outcome, OutcomeKind, PassMeasurement, PassStep,
    PointKey, SetLine,
};
use crate::seed::Seed;
use crate::tuner_table::SINCE;

/// Names of the machines that are compiled in, the default first.
pub const MACHINES: [(&str, &str); 7] = [
    ("rtx-pro-6000-x8", include_str!("../../../search-spaces/machines/rtx-pro-6000-x8.toml")),
    ("rtx-pro-6000-x8-turin", include_str!("../../../search-spaces/machines/rtx-pro-6000-x8-turin.toml")),
    ("rtx-4090-x8", include_str!("../../../search-spaces/machines/rtx-4090-x8.toml")),
    ("l40s-x8", include_str!("../../../search-spaces/machines/l40s-x8.toml")),
    ("a100-pcie-x8", include_str!("../../../search-spaces/machines/a100-pcie-x8.toml")),
    ("h200-x2-host-memory", include_str!("../../../search-spaces/machines/h200-x2-host-memory.toml")),
    ("h200-x8-nvlink", include_str!("../../../search-spaces/machines/h200-x8-nvlink.toml")),
];

/// Latencies that there may be: from what a timing is rounded to, to a quarter of an hour.
const LATENCIES_US: RangeInclusive<f64> = 0.001..=1e9;
/// Factors of noise.
const FACTORS: RangeInclusive<f64> = 0.001..=1000.0;
/// Seconds that anything may cost.
const COSTS_S: RangeInclusive<f64> = 0.0..=1e6;

/// Rates of a pass, each in its own unit.
const RATES: RangeInclusive<f64> = 0.001..=1e6;

/// A simulated machine as its file describes it.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct SimulatedMachine(Kind);

#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(untagged)]
enum Kind {
    /// Format 1.
    Planted(Box<PlantedMachine>),
    /// Format 2.
    Modelled(Box<ModelledMachine>),
}

/// What a simulated machine's GPUs make of peer access across the host bridge.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum SimulatedPeers {
    /// It works.
    Works,
    /// NCCL uses it by itself.
    InUse,
    /// The driver does not grant it.
    Denied,
    /// It is granted, and bytes arrive wrong.
    WrongBytes,
    /// Bytes arrive, and the first collective hangs.
    Hangs,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Noise {
    /// Standard deviation of the log of the factor that an arm draws in each launch.
    launch_log_sd: f64,
    /// How often an arm's launch is slow as a whole.
    slow_launch_probability: f64,
    /// And by which factor.
    slow_launch_factor: f64,
    /// Standard deviation of the log of a cell's factor within a launch.
    cell_log_sd: f64,
    /// Standard deviation of the log of a replay's factor within a cell.
    replay_log_sd: f64,
    /// By how much everything slows down in an hour.
    #[serde(default, skip_serializing_if = "is_zero")]
    drift_per_hour: f64,
    /// By which share the first replay of a cell is slower.
    #[serde(default, skip_serializing_if = "is_zero")]
    first_replay_extra: f64,
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde hands over references")]
fn is_zero(value: &f64) -> bool {
    *value == 0.0
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

/// How fresh a file must at least be to be read, before anything else in it is looked at.
#[derive(Deserialize)]
struct Format {
    format: Option<i64>,
}

impl SimulatedMachine {
    /// Reads a machine file.
    pub fn parse(text: &str) -> Result<Self, BackendError> {
        let unusable = |what: String| BackendError::Unusable(format!("simulated machine: {what}"));
        let not_toml = |error: toml::de::Error| unusable(error.to_string());
        let kind = match toml::from_str::<Format>(text).map_err(not_toml)?.format {
            Some(1) => Kind::Planted(Box::new(toml::from_str(text).map_err(not_toml)?)),
            Some(2) => Kind::Modelled(Box::new(toml::from_str(text).map_err(not_toml)?)),
            Some(other) => return Err(unusable(format!("format {other}; this version reads formats 1 and 2"))),
            None => return Err(unusable("it does not say its format; this version reads formats 1 and 2".to_owned())),
        };
        let machine = Self(kind);
        let bad = |what: String| BackendError::Unusable(format!("simulated machine {}: {what}", machine.name()));
        machine.check().map_err(bad)?;
        Ok(machine)
    }

    /// A machine that is compiled in.
    pub fn named(name: &str) -> Option<Result<Self, BackendError>> {
        MACHINES.iter().find(|(known, _)| *known == name).map(|(_, text)| Self::parse(text))
    }

    fn check(&self) -> Result<(), String> {
        let (noise, cost) = (self.noise(), self.cost());
        if ![cost.launch_s, cost.communicator_s, cost.cell_s].iter().all(|s| COSTS_S.contains(s)) {
            return Err("costs must lie between 0 and 1e6 seconds".to_owned());
        }
        let shares = [
            noise.launch_log_sd,
            noise.cell_log_sd,
            noise.replay_log_sd,
            noise.slow_launch_probability,
            noise.drift_per_hour,
        ];
        if !shares.iter().all(|value| (0.0..1.0).contains(value)) || !FACTORS.contains(&noise.slow_launch_factor) {
            return Err("noise must lie between 0 and 1, and slow_launch_factor between 0.001 and 1000".to_owned());
        }
        if !(0.0..=1000.0).contains(&noise.first_replay_extra) {
            return Err("first_replay_extra must lie between 0 and 1000".to_owned());
        }
        let rates = self
            .pass()
            .into_iter()
            .flat_map(|pass| [pass.weights_gb_per_s, pass.arithmetic_tflop_per_s, pass.product_us, pass.crowding]);
        if !rates.into_iter().all(|rate| RATES.contains(&rate)) {
            return Err("the rates of passes must lie between 0.001 and 1e6".to_owned());
        }
        match &self.0 {
            Kind::Planted(machine) => machine.check(),
            Kind::Modelled(machine) => machine.check(),
        }
    }

    fn name(&self) -> &str {
        match &self.0 {
            Kind::Planted(machine) => &machine.name,
            Kind::Modelled(machine) => &machine.name,
        }
    }

    fn noise(&self) -> &Noise {
        match &self.0 {
            Kind::Planted(machine) => &machine.noise,
            Kind::Modelled(machine) => &machine.noise,
        }
    }

    fn cost(&self) -> &Cost {
        match &self.0 {
            Kind::Planted(machine) => &machine.cost,
            Kind::Modelled(machine) => &machine.cost,
        }
    }

    fn pass(&self) -> Option<&PassRates> {
        match &self.0 {
            Kind::Planted(machine) => machine.pass.as_ref(),
            Kind::Modelled(machine) => machine.pass.as_ref(),
        }
    }

    /// The machine as a run records it.
    pub fn machine(&self) -> Machine {
        match &self.0 {
            Kind::Planted(machine) => machine.machine(),
            Kind::Modelled(machine) => machine.machine(),
        }
    }

    /// The release of NCCL whose choices it makes; a planted machine knows nothing of NCCL.
    pub fn nccl_version(&self) -> Option<NcclVersion> {
        match &self.0 {
            Kind::Planted(_) => None,
            Kind::Modelled(machine) => machine.nccl_version(),
        }
    }

    /// How its GPUs hang together, where it says so.
    pub fn topology(&self) -> Option<crate::machine::Topology> {
        match &self.0 {
            Kind::Planted(_) => None,
            Kind::Modelled(machine) => machine.topology().ok(),
        }
    }

    /// What carries a message on the first `ranks` GPUs, with the class of devices and the link whose
    /// constants hold for it.
    pub fn operation(
        &self,
        environment: &BTreeMap<String, String>,
        collective: Collective,
        bytes: u64,
        ranks: u32,
    ) -> Result<(String, Link, Operation), BackendError> {
        let unusable = |error: &dyn std::fmt::Display| BackendError::Unusable(error.to_string());
        let Kind::Modelled(machine) = &self.0 else {
            return Err(unusable(&"a planted machine knows nothing of NCCL"));
        };
        let seen = machine.seen(environment, ranks, None, None).map_err(|error| unusable(&error))?;
        let (device, link, operation) = seen.operation(collective, bytes).map_err(|error| unusable(&error))?;
        Ok((device.to_owned(), link, operation))
    }

    /// Noiseless times on the first `ranks` GPUs under one environment.
    pub fn evaluator(&self, environment: &BTreeMap<String, String>, ranks: u32) -> Result<Evaluator, BackendError> {
        let unusable = |error: &dyn std::fmt::Display| BackendError::Unusable(error.to_string());
        let Kind::Modelled(machine) = &self.0 else {
            return Err(unusable(&"a planted machine knows nothing of NCCL"));
        };
        machine.seen(environment, ranks, None, None).map(Evaluator).map_err(|error| unusable(&error))
    }

    /// The fingerprint of everything its numbers follow from.
    pub fn fingerprint(&self) -> Fingerprint {
        match &self.0 {
            Kind::Planted(_) => Fingerprint::of(self),
            Kind::Modelled(machine) => Fingerprint::of(&(machine, crate::nccl_model::timing::Timings::compiled_in())),
        }
    }

    /// What it makes of peer access across the host bridge, where its file says so.
    pub const fn peer_access(&self) -> Option<SimulatedPeers> {
        match &self.0 {
            Kind::Planted(machine) => machine.peer_access,
            Kind::Modelled(machine) => machine.peer_access,
        }
    }

    /// Whether it can be tried in a forward pass.
    pub fn has_passes(&self) -> bool {
        self.pass().is_some()
    }

    /// What it stands for, and what of it nobody measured.
    pub fn description(&self) -> String {
        match &self.0 {
            Kind::Planted(machine) => machine.description.clone(),
            Kind::Modelled(machine) => match &machine.extrapolated {
                Some(what) => format!("{} (extrapolated: {what})", machine.description),
                None => machine.description.clone(),
            },
        }
    }
}

/// What messages take on a simulated machine under one environment, without noise.
pub struct Evaluator(Seen);

impl Evaluator {
    /// Microseconds of a message: NCCL's choice, and the time it takes.
    pub fn time_us(&self, collective: Collective, bytes: u64) -> Result<f64, BackendError> {
        self.0.time_us(collective, bytes).map_err(|error| BackendError::Unusable(error.to_string()))
    }
}

/// The simulated backend.
pub struct SimulatedBackend {
    machine: SimulatedMachine,
    seed: Seed,
    /// Variables that hold in every arm; pins act like any setting.
    pins: BTreeMap<String, String>,
    cache: Cache,
    tables: TableCache,
}

/// What a message takes without noise, how it was carried, and what was odd.
type Taken = (f64, Effective, Vec<Flag>);

impl SimulatedBackend {
    /// A backend whose noise follows from the run's seed.
    pub fn new(machine: SimulatedMachine, seed: Seed, pins: BTreeMap<String, String>) -> Self {
        Self { machine, seed, pins, cache: Cache::new(None), tables: TableCache::default() }
    }

    /// Looks for the files that variables name in a folder, where the path is not whole.
    #[must_use]
    pub fn with_folder(self, folder: PathBuf) -> Self {
        Self { tables: TableCache::of(folder.clone()), cache: Cache::new(Some(folder)), ..self }
    }

    /// A factor with this spread of its logarithm, from the sum of twelve uniform draws: close to
    /// normal within three standard deviations and never beyond six.
    fn factor(random: &mut impl rand::Rng, log_sd: f64) -> f64 {
        let sum: f64 = (0..12).map(|_| random.random::<f64>()).sum();
        ((sum - 6.0) * log_sd).exp()
    }

    /// Everything that is set for an arm, where the launch and the communicator say more than the arm.
    fn environment(&self, plan: &LaunchPlan, communicator: &CommunicatorPlan) -> BTreeMap<String, String> {
        let mut environment = self.pins.clone();
        environment.extend(communicator.arm.env.clone());
        environment.extend(plan.environment.clone());
        for (name, value) in &communicator.variables {
            match value {
                Some(value) => environment.insert(name.clone(), value.clone()),
                // Taken out because an earlier communicator set it; a pin holds all the same.
                None => self.pins.get(name).and_then(|value| environment.insert(name.clone(), value.clone())),
            };
        }
        environment
    }

    fn take(
        &self,
        arm: &Arm,
        environment: &BTreeMap<String, String>,
        point: PointKey,
        substituted: bool,
    ) -> Result<Taken, String> {
        // What a planted machine runs it says itself, and any release of NCCL that loads the plugin will do.
        let version = self.machine.nccl_version().unwrap_or(SINCE);
        let decided = self.tables.decide(environment, point, version)?;
        match &self.machine.0 {
            Kind::Planted(machine) => {
                let (us, effective) = machine.take(environment, point, decided);
                Ok((us, effective, Vec::new()))
            }
            Kind::Modelled(machine) => {
                let seen = self.cache.seen(machine, environment, point.ranks);
                let seen: &Seen = seen.as_ref().as_ref().map_err(Clone::clone)?;
                let carried = seen
                    .carry(&arm.env, (point.collective, point.bytes), table::answer(decided), substituted)
                    .map_err(|error| error.to_string())?;
                Ok((carried.latency_us, carried.effective, carried.flags))
            }
        }
    }

    fn fate(&self, cell: &str, point: PointKey, environment: &BTreeMap<String, String>) -> Fate {
        match &self.machine.0 {
            Kind::Planted(_) => Fate { factor: 1.0, substituted: false, failure: None },
            Kind::Modelled(machine) => trouble::fate(&machine.troubles, self.seed, cell, point, environment),
        }
    }

    /// Hours since the beginning of a run, by the launches before: a run that is taken up again sees the
    /// same drift as one that was never stopped.
    fn drift(&self, plan: &LaunchPlan) -> f64 {
        let hours = f64::from(plan.launch) * self.expected_s(plan) / 3600.0;
        (hours * self.machine.noise().drift_per_hour).exp()
    }

    /// The factor of an arm in a launch. Each arm draws its own: what the two sides of a pair shared would
    /// cancel, and promise a precision that real pairs do not have.
    fn launch_factor(&self, plan: &LaunchPlan, arm: &Arm) -> f64 {
        let noise = self.machine.noise();
        let id = format!("block-{}-launch-{}-{}", plan.block, plan.launch, arm.id);
        let mut random = self.seed.derive("simulated-launch", &id);
        let factor = Self::factor(&mut random, noise.launch_log_sd);
        if random.random::<f64>() < noise.slow_launch_probability { factor * noise.slow_launch_factor } else { factor }
    }

    /// Noiseless milliseconds of a pass: (whole, without collectives, crowded).
    fn pass_ms(
        &self,
        rates: &PassRates,
        arm: &Arm,
        environment: &BTreeMap<String, String>,
        steps: &[PassStep],
    ) -> Result<(f64, f64, f64), String> {
        let (mut products_us, mut collectives_us) = (0.0, 0.0);
        let ranks = self.machine.machine().gpus.len() as u32;
        let mut known: BTreeMap<u64, f64> = BTreeMap::new();
        for step in steps {
            match *step {
                PassStep::Product { rows, inputs, columns } => {
                    let read_us = (inputs * columns * 2) as f64 / (rates.weights_gb_per_s * 1e3);
                    let flop = 2.0 * rows as f64 * inputs as f64 * columns as f64;
                    let arithmetic_us = flop / (rates.arithmetic_tflop_per_s * 1e6);
                    products_us += read_us.max(arithmetic_us) + rates.product_us;
                }
                PassStep::Reduce { elements } => {
                    let bytes = elements * 2;
                    let us = if let Some(us) = known.get(&bytes) {
                        *us
                    } else {
                        let point = PointKey::usual(Collective::AllReduce, DataType::Bf16, bytes, ranks);
                        self.take(arm, environment, point, false)?.0
                    };
                    known.insert(bytes, us);
                    collectives_us += us;
                }
            }
        }
        let whole = products_us + collectives_us;
        Ok((whole / 1e3, products_us / 1e3, (products_us + collectives_us * rates.crowding) / 1e3))
    }

    /// One arm at one point.
    fn measure_cell(
        &self,
        plan: &LaunchPlan,
        (index, communicator): (usize, &CommunicatorPlan),
        environment: &BTreeMap<String, String>,
        (position, point): (u32, PointKey),
    ) -> Result<CellMeasurement, (Outcome, f64)> {
        let noise = self.machine.noise();
        let arm = &communicator.arm;
        let cell = format!("block-{}-launch-{}-{}-{point}", plan.block, plan.launch, arm.id);
        let mut random = self.seed.derive("simulated-cell", &cell);
        let fate = self.fate(&cell, point, environment);
        let (latency_us, effective, flags) = self
            .take(arm, environment, point, fate.substituted)
            .map_err(|detail| (Outcome { kind: OutcomeKind::Refused, detail }, self.machine.cost().cell_s))?;
        if let Some(failure) = fate.failure {
            return Err(failure);
        }
        let center_us = latency_us
            * fate.factor
            * self.launch_factor(plan, arm)
            * self.drift(plan)
            * Self::factor(&mut random, noise.cell_log_sd);
        let collectives = collectives_per_graph(point);
        let replay_s = center_us * f64::from(collectives) / 1e6;
        let replays = (plan.cell_time_ms / 1000.0 / replay_s).clamp(8.0, 200.0) as usize;
        let replays_us = (0..replays)
            .map(|replay| {
                let extra = if replay == 0 { 1.0 + noise.first_replay_extra } else { 1.0 };
                let us = center_us * extra * Self::factor(&mut random, noise.replay_log_sd);
                round_us(us).clamp(*LATENCIES_US.start(), *LATENCIES_US.end())
            })
            .collect();
        Ok(CellMeasurement {
            arm: arm.id.clone(),
            point,
            block: plan.block,
            launch: plan.launch,
            communicator: index as u32,
            position,
            collectives_per_replay: collectives,
            replays_us,
            effective,
            flags,
            // The arm's own variables mean the same, and are what the times follow from.
            call: communicator.call.as_ref().map(|form| told(form.cell(point.collective.log_name()).flatten(), 0)),
            duration_s: self.machine.cost().cell_s + replay_s * replays as f64,
        })
    }

    /// One arm in one forward pass.
    fn measure_pass(
        &self,
        plan: &LaunchPlan,
        arm: &Arm,
        environment: &BTreeMap<String, String>,
        (rates, pass): (&PassRates, &PassPlan),
    ) -> Result<PassMeasurement, (Outcome, f64)> {
        let noise = self.machine.noise();
        let key = pass.case.key();
        let id = format!("block-{}-launch-{}", plan.block, plan.launch);
        let cell = format!("{id}-{}-pass-{}-{}", arm.id, key.tokens, key.captured);
        let mut random = self.seed.derive("simulated-pass", &cell);
        let (whole, without, crowded) = self
            .pass_ms(rates, arm, environment, &pass.steps)
            .map_err(|detail| (Outcome { kind: OutcomeKind::Refused, detail }, self.machine.cost().cell_s))?;
        let mut runs = |center_ms: f64, spread: f64| -> Vec<f64> {
            (0..9).map(|_| round_us(center_ms * spread * Self::factor(&mut random, noise.replay_log_sd))).collect()
        };
        // A slow launch slows the collectives; products do not know of it.
        let launch = (without + (whole - without) * self.launch_factor(plan, arm) * self.drift(plan)) / whole;
        let (runs_ms, without_collectives_ms) = (runs(whole, launch), runs(without, 1.0));
        let crowded_ms = if pass.case.captured { runs(crowded, launch) } else { Vec::new() };
        let pass_s = runs_ms.iter().chain(&without_collectives_ms).chain(&crowded_ms).sum::<f64>() / 1e3;
        Ok(PassMeasurement {
            arm: arm.id.clone(),
            pass: key,
            block: plan.block,
            launch: plan.launch,
            runs_ms,
            without_collectives_ms,
            crowded_ms,
            arena_bytes: 0,
            states: Vec::new(),
            duration_s: pass_s,
        })
    }

    /// "set by environment" lines of a launch, as the ranks would write them.
    fn set_lines(&self, plan: &LaunchPlan) -> Vec<SetLine> {
        let Kind::Modelled(machine) = &self.machine.0 else { return Vec::new() };
        let mut lines: Vec<SetLine> = Vec::new();
        for communicator in &plan.communicators {
            let Some(point) = communicator.points.first() else { continue };
            let environment = self.environment(plan, communicator);
            if let Ok(seen) = self.cache.seen(machine, &environment, point.ranks).as_ref() {
                lines.extend(seen.set_lines.iter().cloned());
            }
        }
        lines.sort();
        lines.dedup();
        lines
    }

    /// Carries out a plan; what broke it, if anything did. `None` if the sink asked for an end.
    fn measure(&self, plan: &LaunchPlan, duration_s: &mut f64, sink: Sink<'_>) -> Option<Result<(), Outcome>> {
        let mut position = 0;
        let mut gates: BTreeMap<ArmId, (u32, f64)> = BTreeMap::new();
        let failed = |arm: &Arm, point: Option<PointKey>, outcome: &Outcome, duration_s: f64| Event::CellFailed {
            arm: arm.id.clone(),
            point,
            block: plan.block,
            launch: plan.launch,
            outcome: outcome.clone(),
            duration_s,
        };
        let shared = plan.shared().enumerate().flat_map(|(index, shared)| {
            shared.iter().enumerate().map(move |(place, communicator)| (index, place == 0, communicator))
        });
        for (index, is_first, communicator) in shared {
            if is_first {
                *duration_s += self.machine.cost().communicator_s;
            }
            let environment = self.environment(plan, communicator);
            if !communicator.checks.is_empty() {
                // Times know no results: whoever reads the event is told that nothing was checked.
                let gate_s = self.machine.cost().cell_s * communicator.checks.len() as f64;
                *duration_s += gate_s;
                let passed = gates.entry(communicator.arm.id.clone()).or_insert((0, 0.0));
                passed.0 += communicator.checks.iter().map(|check| check.repeats).sum::<u32>();
                passed.1 += gate_s;
            }
            for point in &communicator.points {
                match self.measure_cell(plan, (index, communicator), &environment, (position, *point)) {
                    Ok(cell) => {
                        *duration_s += cell.duration_s;
                        position += 1;
                        if sink(Event::CellMeasured(cell)).is_break() {
                            return None;
                        }
                    }
                    Err((outcome, cost_s)) => {
                        *duration_s += cost_s;
                        let _ = sink(failed(&communicator.arm, Some(*point), &outcome, cost_s));
                        return Some(Err(outcome));
                    }
                }
            }
        }
        for (arm, (checks, gate_s)) in gates {
            let passed = Event::GatePassed(GatePass {
                arm,
                block: plan.block,
                launch: plan.launch,
                checks,
                ll128_checks: 0,
                simulated: true,
                duration_s: gate_s,
            });
            if sink(passed).is_break() {
                return None;
            }
        }
        for communicator in &plan.communicators {
            let environment = self.environment(plan, communicator);
            for pass in &communicator.passes {
                let Some(rates) = self.machine.pass() else { continue };
                match self.measure_pass(plan, &communicator.arm, &environment, (rates, pass)) {
                    Ok(measured) => {
                        *duration_s += measured.duration_s;
                        if sink(Event::PassMeasured(measured)).is_break() {
                            return None;
                        }
                    }
                    Err((outcome, cost_s)) => {
                        *duration_s += cost_s;
                        let _ = sink(failed(&communicator.arm, None, &outcome, cost_s));
                        return Some(Err(outcome));
                    }
                }
            }
        }
        Some(Ok(()))
    }
}

impl Backend for SimulatedBackend {
    fn run(&mut self, plan: &LaunchPlan, sink: Sink<'_>) -> Result<(), BackendError> {
        let started = Event::LaunchStarted { launch: plan.launch, block: plan.block, env: plan.environment.clone() };
        if sink(started).is_break() {
            return Ok(());
        }
        let mut duration_s = self.machine.cost().launch_s;
        let Some(ended) = self.measure(plan, &mut duration_s, sink) else { return Ok(()) };
        // The launch is over either way; a break here changes nothing.
        let _ = sink(Event::LaunchEnded {
            launch: plan.launch,
            duration_s,
            set_by_environment: self.set_lines(plan),
            outcome: ended.err(),
        });
        Ok(())
    }

    fn expected_s(&self, plan: &LaunchPlan) -> f64 {
        let cost = self.machine.cost();
        let cells = plan.cell_count() as f64;
        cost.launch_s
            + cost.communicator_s * plan.shared().count() as f64
            + cells * (cost.cell_s + plan.cell_time_ms / 1000.0)
    }
}

/// Timings are kept to a nanosecond: CUDA's own events resolve half a microsecond per replay of many
/// collectives, and shorter lines keep recorded runs small.
pub(super) fn round_us(us: f64) -> f64 {
    (us * 1000.0).round() / 1000.0
}

/// A file that stands where NCCL would read one: a regular one, of at most so many bytes.
fn read_file(path: &std::path::Path, most: u64) -> Result<Vec<u8>, std::io::Error> {
    use std::io::Read as _;
    crate::journal::require_regular(path)?;
    let mut bytes = Vec::new();
    fs_err::File::open(path)?.take(most + 1).read_to_end(&mut bytes)?;
    if bytes.len() as u64 > most {
        return Err(std::io::Error::other(format!("{} is larger than {most} bytes", path.display())));
    }
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use std::ops::ControlFlow;

    use super::*;
    use crate::backend::CommunicatorPlan;
    use crate::record::{Arm, ArmId, Phase};

    fn point(bytes: u64) -> PointKey {
        PointKey::usual(Collective::AllReduce, DataType::Bf16, bytes, 8)
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
                call: None,
                arm,
                variables: BTreeMap::new(),
                points: vec![point(57_344)],
                checks: Vec::new(),
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
            assert_eq!(machine.name(), name);
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
    fn a_file_of_another_format_or_none_is_refused() {
        let text = |from: &str, to: &str| SimulatedMachine::parse(&MACHINES[0].1.replace(from, to));
        assert!(text("format = 2", "format = 2").is_ok());
        for (from, to, says) in [
            ("format = 2", "format = 3", "formats 1 and 2"),
            ("format = 2", "", "formats 1 and 2"),
            ("gpu = ", "gpus = ", "gpus"),
            ("nccl = \"2.29.2\"", "nccl = \"2\"", "2.28.9"),
            ("nccl = \"2.29.2\"", "nccl = \"2.2.0\"", "2.19"),
            ("nccl = \"2.29.2\"", "nccl = \"9.9.9\"", "2.19"),
            ("timing = \"rtx", "timing = \"gtx", "did you mean \"rtx-pro-6000\"?"),
            ("gpus = 8", "gpus = 7", "7 GPUs"),
            ("gpus = 8", "gpus = 0", "0 GPUs"),
            ("generation = 5", "generation = 9", "generation 9"),
            ("compute_capability = [12, 0]", "compute_capability = [99, 0]", "compute capability"),
            ("[layout]", "[layouts]", "layouts"),
            ("drift_per_hour = 0.01", "drift_per_hour = 1.5", "noise"),
            ("first_replay_extra = 0.3", "first_replay_extra = nan", "first_replay_extra"),
            ("memory_mib = 97887", "memory_mib = 0", "memory_mib"),
        ] {
            let error = text(from, to).expect_err(to).to_string();
            assert!(error.contains(says), "{to:?}: {error}");
        }
        let planted = include_str!("../../../tests/it/machines/planted.toml");
        assert!(SimulatedMachine::parse(planted).is_ok());
        assert!(
            SimulatedMachine::parse(&planted.replace("default_latency_us = [", "default_latency_us = [1.0, ")).is_err()
        );
    }

    /// The default machine with troubles.
    fn troubled(troubles: &str, env: &[(&str, &str)], bytes: u64) -> Vec<Event> {
        let machine = SimulatedMachine::parse(&format!("{}\n{troubles}", MACHINES[0].1)).unwrap();
        let mut plan = plan(0);
        plan.communicators[0].points = vec![point(bytes)];
        plan.communicators[0].arm.env =
            env.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect();
        let mut events = Vec::new();
        SimulatedBackend::new(machine, Seed(7), BTreeMap::new())
            .run(&plan, &mut |event| {
                events.push(event);
                ControlFlow::Continue(())
            })
            .unwrap();
        events
    }

    fn cell(events: &[Event]) -> &CellMeasurement {
        events
            .iter()
            .find_map(|event| match event {
                Event::CellMeasured(cell) => Some(cell),
                _ => None,
            })
            .expect("a cell")
    }

    #[test]
    fn what_ran_is_read_back_as_from_a_log() {
        let events = run(7, 0);
        let effective = &cell(&events).effective;
        assert_eq!(effective.algo.as_deref(), Some("ring"));
        assert_eq!(effective.proto.as_deref(), Some("ll"));
        assert_eq!((effective.channels, effective.communicator_channels), (Some(1), Some(2)));
        assert!(effective.transport.as_deref().is_some_and(|transport| transport.contains("SHM")), "{effective:?}");
        let set = troubled("", &[("NCCL_PROTO", "allreduce:Simple"), ("NCCL_NO_SUCH", "1")], 57_344);
        assert_eq!(cell(&set).effective.proto.as_deref(), Some("simple"));
        assert_eq!(cell(&set).flags, [Flag::Ignored]);
        let Some(Event::LaunchEnded { set_by_environment, .. }) = set.last() else { panic!("{set:?}") };
        assert!(set_by_environment.iter().any(|line| line.variable == "NCCL_PROTO"), "{set_by_environment:?}");
    }

    #[test]
    fn a_refused_setting_is_an_outcome() {
        let events = troubled("", &[("NCCL_PROTO", "lll")], 57_344);
        let refused = |event: &Event| {
            matches!(event, Event::CellFailed { outcome: Outcome { kind: OutcomeKind::Refused, .. }, .. })
        };
        assert!(events.iter().any(refused), "{events:?}");
    }

    #[test]
    fn troubles_come_where_they_are_asked_for() {
        let plain = cell(&troubled("", &[], 65_536)).replays_us[1];
        let cliff = "[[trouble]]\nkind = \"cliff\"\nbytes = 65536\nfactor = 4.0\n";
        assert!((cell(&troubled(cliff, &[], 65_536)).replays_us[1] / plain / 4.0 - 1.0).abs() < 1e-3);
        assert_eq!(cell(&troubled(cliff, &[], 32_768)), cell(&troubled("", &[], 32_768)));

        let when = "when = { NCCL_PROTO = \"allreduce:LL\" }\n";
        let ll = [("NCCL_PROTO", "allreduce:LL")];
        let other = format!("[[trouble]]\nkind = \"substitution\"\nprobability = 1.0\n{when}");
        assert!(cell(&troubled(&other, &[], 65_536)).flags.is_empty());
        for (kind, price, outcome) in
            [("hang", "seconds = 30.0\n", OutcomeKind::TimedOut), ("corruption", "", OutcomeKind::WrongResult)]
        {
            let trouble = format!("[[trouble]]\nkind = \"{kind}\"\nprobability = 1.0\n{price}{when}");
            assert_eq!(troubled(&trouble, &[], 65_536), troubled("", &[], 65_536), "not without the setting");
            let events = troubled(&trouble, &ll, 65_536);
            let failed = events
                .iter()
                .any(|event| matches!(event, Event::CellFailed { outcome: how, .. } if how.kind == outcome));
            assert!(failed, "{kind}: {events:?}");
            let Some(Event::LaunchEnded { outcome: Some(how), duration_s, .. }) = events.last() else {
                panic!("{kind}: {events:?}")
            };
            assert_eq!(how.kind, outcome);
            assert!(price.is_empty() || *duration_s > 30.0);
            let never = trouble.replace("1.0", "0.0");
            assert_eq!(troubled(&never, &ll, 65_536), troubled("", &ll, 65_536), "{kind}");
        }
    }

    /// A pair whose sides shared their launch's factor would cancel it.
    #[test]
    fn arms_of_one_launch_draw_their_own_factors() {
        let machine = SimulatedMachine::named("rtx-pro-6000-x8").unwrap().unwrap();
        let backend = SimulatedBackend::new(machine, Seed(1), BTreeMap::new());
        let factors = |name: &str| -> Vec<f64> {
            (0..400)
                .map(|launch| {
                    let mut plan = plan(launch);
                    plan.communicators[0].arm.id = ArmId(name.to_owned());
                    backend.launch_factor(&plan, &plan.communicators[0].arm).ln()
                })
                .collect()
        };
        let (a, b) = (factors("a"), factors("b"));
        let mean = |values: &[f64]| values.iter().sum::<f64>() / values.len() as f64;
        let product = |a: &[f64], b: &[f64]| a.iter().zip(b).map(|(x, y)| (x - mean(a)) * (y - mean(b))).sum::<f64>();
        let correlation = product(&a, &b) / (product(&a, &a) * product(&b, &b)).sqrt();
        assert!(correlation.abs() < 0.15, "{correlation}");
        // 1.8 %, and a twelfth of them 8 % slower: together 2.8 %.
        let sd = (product(&a, &a) / 399.0).sqrt();
        assert!((0.024..0.032).contains(&sd), "{sd}");
    }
}
