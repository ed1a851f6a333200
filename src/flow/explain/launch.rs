//! One launch of NCCL on the GPUs that are here, for its log: what it found, read and chose.

use std::collections::BTreeMap;
use std::ops::ControlFlow;
use std::rc::Rc;

use super::ExplainRequest;
use super::machine::RealMachine;
use super::variables::Variable;
use crate::backend::nccl::{NcclBackend, NcclSetup};
use crate::backend::{Backend, LaunchPlan};
use crate::collective::{Collective, DataType, Form};
use crate::discovery::GpuLocks;
use crate::error_kind::{ErrorKind, Failure};
use crate::flow::environment::worker_environment;
use crate::knob::{self, Proof, ReadValue, Way};
use crate::machine::{Gpu, NcclVersion};
use crate::nccl_log::NcclLog;
use crate::process::Supervisor;
use crate::record::{
    BufferKind, Effective, Event, ExplainedGraph, ExplainedLog, Explanation, LoggedSize, Outcome, Point, PointKey,
    PointPhase, SetLine, VariableOrigin,
};
use crate::workload::measurable;

/// Largest message that is sent for its line in the log alone.
const MOST_BYTES: u64 = 1 << 30;
/// Elements of the messages.
const DTYPE: DataType = DataType::Bf16;
/// How far two bandwidths may be apart that are one: the log has six digits.
const BANDWIDTH_SLACK: f64 = 0.01;

/// What a launch left.
pub(super) struct Launched {
    version: NcclVersion,
    cells: BTreeMap<u64, Effective>,
    /// Sizes that were not sent.
    left_out: Vec<u64>,
    log: NcclLog,
    set_lines: Vec<SetLine>,
    unread: Vec<String>,
    failure: Option<Outcome>,
}

impl Launched {
    /// Starts NCCL once with these variables, and has it take each size once into a graph.
    pub(super) fn run(
        request: &ExplainRequest,
        supervisor: &Rc<Supervisor>,
        real: &RealMachine,
        variables: &[Variable],
        collective: Collective,
        sizes: &[u64],
    ) -> Result<Self, Failure> {
        let Some(nccl) = real.nccl.clone() else {
            return Err(Failure::new(ErrorKind::MachineUnfit, "there is no NCCL library to start"));
        };
        let version = NcclVersion::from_code(nccl.version);
        let gpus: Vec<Gpu> =
            real.machine.gpus.iter().filter(|gpu| real.devices.contains(&gpu.index)).cloned().collect();
        let ranks = gpus.len() as u32;
        let (points, left_out) = points(collective, ranks, sizes);
        let mut launched = Self {
            version,
            cells: BTreeMap::new(),
            left_out,
            log: NcclLog::default(),
            set_lines: Vec::new(),
            unread: Vec::new(),
            failure: None,
        };
        if points.is_empty() {
            return Ok(launched);
        }
        let _locks = GpuLocks::take(&gpus)?;
        let logs = tempfile::tempdir()
            .map_err(|error| Failure::new(ErrorKind::Unexpected, format!("no folder for logs: {error}")))?;
        // NCCL reads its configuration files itself.
        let is_set =
            |variable: &&Variable| !matches!(variable.origin, VariableOrigin::UserConf | VariableOrigin::SystemConf);
        let environment: BTreeMap<String, String> =
            variables.iter().filter(is_set).map(|variable| (variable.name.clone(), variable.value.clone())).collect();
        let mut backend = NcclBackend::new(NcclSetup {
            supervisor: Rc::clone(supervisor),
            environment: worker_environment(&request.environment, &[], &[]),
            gpus,
            nccl,
            cublaslt: String::new(),
            logs: logs.path().to_owned(),
            // Files are named by the user, with whole paths.
            files: logs.path().to_owned(),
            buffers: BufferKind::Plain,
            phase_limit: None,
        })
        .with_searches_logged();
        // What it takes is for `tune` to say.
        let plan = LaunchPlan::alone("explained", environment, points);
        backend.run(&plan, &mut |event| {
            match event {
                Event::CellMeasured(cell) => {
                    launched.cells.insert(cell.point.bytes, cell.effective);
                }
                Event::CellFailed { outcome, .. } => launched.failure = Some(outcome),
                Event::LaunchEnded { set_by_environment, outcome, .. } => {
                    launched.set_lines = set_by_environment;
                    launched.failure = launched.failure.take().or(outcome);
                }
                _ => {}
            }
            ControlFlow::Continue(())
        })?;
        launched.log = backend.last_log().clone();
        if supervisor.interrupted() {
            return Err(Failure::new(ErrorKind::Stopped, "stopped while NCCL ran"));
        }
        launched.unread = variables.iter().filter(is_set).filter_map(|variable| launched.unread(variable)).collect();
        Ok(launched)
    }

    /// The name of a variable whose line the log lacks, although it was due.
    fn unread(&self, variable: &Variable) -> Option<String> {
        let reading = knob::read_as_nccl(&variable.name, &variable.value, self.version);
        let mut routes = knob::find(&variable.name)?.routes(self.version);
        let proof = routes.find(|route| route.way == Way::LaunchEnvironment).map_or(Proof::None, |route| route.proof);
        let is_due = !matches!(reading.value, ReadValue::NotRead { .. } | ReadValue::Unset);
        let proven = self.log.proves(&variable.name, proof, &reading);
        (is_due && proven == Some(false) && self.failure.is_none()).then(|| variable.name.clone())
    }

    /// Puts what the log says beside what the model says.
    pub(super) fn compare(self, explanation: &mut Explanation) {
        let (mut agreeing, mut compared) = (0, 0);
        for size in &mut explanation.sizes {
            let Some(ran) = self.cells.get(&size.bytes) else { continue };
            let agrees = size.algo.is_some().then_some(()).and(ran.algo.as_ref()).map(|algo| {
                let is_other = |log: Option<u32>, model: Option<u32>| log.is_some() && log != model;
                size.algo.as_ref() == Some(algo)
                    && (ran.proto.is_none() || ran.proto == size.proto)
                    && !is_other(ran.channels, size.channels)
            });
            compared += u32::from(agrees.is_some());
            agreeing += u32::from(agrees == Some(true));
            size.logged =
                Some(LoggedSize { algo: ran.algo.clone(), proto: ran.proto.clone(), channels: ran.channels, agrees });
        }
        let graphs: Vec<ExplainedGraph> = self
            .log
            .graphs
            .iter()
            .map(|graph| ExplainedGraph {
                pattern: graph.name(),
                channels: graph.channels,
                channel_gb_per_s: graph.bandwidth_gb_per_s,
                path: graph.path.clone(),
                fallback: (graph.bandwidth_gb_per_s - 0.1).abs() < 1e-6,
            })
            .collect();
        if !self.left_out.is_empty() {
            let told: Vec<String> = self.left_out.iter().map(|bytes| crate::units::format_size(*bytes)).collect();
            explanation.notes.push(format!(
                "not run for their lines in the log: {} (workers take whole elements of {DTYPE}, up to {})",
                crate::wording::enumerated(&told),
                crate::units::format_size(MOST_BYTES)
            ));
        }
        explanation.log = Some(ExplainedLog {
            version: self.version.to_string(),
            agreeing_sizes: agreeing,
            compared_sizes: compared,
            communicator_channels: self.log.communicator_channels(),
            transport: self.log.transport(),
            differences: differences(explanation, &graphs, &self.log),
            graphs,
            fell_back_to_simple_order: self.log.fell_back_to_simple_order,
            set_by_environment: self.set_lines,
            unread: self.unread,
            failure: self.failure.map(|outcome| format!("{}: {}", outcome.kind.name(), outcome.detail)),
        });
    }
}

/// Points that workers can run, and sizes that they cannot.
fn points(collective: Collective, ranks: u32, sizes: &[u64]) -> (Vec<PointKey>, Vec<u64>) {
    let can_run = |bytes: &u64| {
        let point = Point {
            collective,
            dtype: DTYPE,
            bytes: *bytes,
            ranks,
            calls_per_pass: 1,
            batch: 1,
            weight: 0.0,
            phase: PointPhase::Size,
            form: Form::usual(collective),
            measured: true,
            origin: String::new(),
        };
        *bytes <= MOST_BYTES && bytes.is_multiple_of(DTYPE.size_bytes()) && measurable(&point)
    };
    let (run, left): (Vec<u64>, Vec<u64>) = sizes.iter().copied().partition(can_run);
    (run.into_iter().map(|bytes| PointKey::usual(collective, DTYPE, bytes, ranks)).collect(), left)
}

/// What model and log say differently of the whole communicator.
fn differences(explanation: &Explanation, logged: &[ExplainedGraph], log: &NcclLog) -> Vec<String> {
    let mut found = Vec::new();
    let Some(channels) = explanation.communicator_channels else { return found };
    if let Some(logged) = log.communicator_channels().filter(|logged| *logged != channels) {
        found.push(format!("the communicator has {logged} channels, not {channels}"));
    }
    // The log tells each search; what NCCL goes on with is the fewest channels that ring and tree have.
    let fewest = logged.iter().filter(|graph| graph.pattern != "NVLink switch").map(|graph| graph.channels).min();
    for model in &explanation.graphs {
        let Some(logged) = logged.iter().find(|graph| graph.pattern == model.pattern) else { continue };
        let channels = if model.pattern == "NVLink switch" { Some(logged.channels) } else { fewest };
        let differs = channels != Some(model.channels)
            || (logged.channel_gb_per_s - model.channel_gb_per_s).abs() > BANDWIDTH_SLACK
            || logged.path != model.path;
        if differs {
            let words = |graph: &ExplainedGraph| {
                format!("{} x {} GB/s over {}", graph.channels, graph.channel_gb_per_s, graph.path)
            };
            found.push(format!("NCCL found {}: {}, not {}", model.pattern, words(logged), words(model)));
        }
    }
    let unexpected: Vec<&String> = log
        .transports
        .iter()
        .filter(|transport| !explanation.transports.iter().any(|known| transport.starts_with(known.as_str())))
        .collect();
    if let Some(transport) = unexpected.first() {
        let expected = explanation.transports.join(" and ");
        found.push(format!("data goes over {transport}, where {expected} was expected"));
    }
    found
}
