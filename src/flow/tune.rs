//! `nccltune tune`: from a model and a machine to a verdict, phase by phase.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::time::Duration;

use tempfile::TempDir;

use super::dead_axes::{Field, findings, leave_out, notice, prune, wiring};
use super::directory::{self, CHOICE_FILE, LOGS_FOLDER, MACHINE_FILE, MANIFEST_FILE, REPORT_FILE, SUMMARY_FILE};
use super::emit::effect_of;
use super::environment::{Held, as_map, inherited, merge, parse_pins, worker_environment};
use super::facts::{
    BackendChoice, MachineFacts, MachineWish, ask_driver, gather, outside_parts, probe_environment, real_fingerprint,
};
use super::files::{RunFiles, from_anywhere};
use super::levels::call_plugin;
use super::live::{Early, LiveChecks, gpus_of};
use super::misjudged::{Case, RepairGraph, Repaired, Sight};
use super::overlap::{OVERLAP_S, check_overlaps};
use super::peer::PeerAccess;
use super::plugin::Plugin;
use super::quarantine::{Failed, Memory, left_out_before};
use super::report::page;
use super::summary::summary;
use super::tables::{self, TableWish, Tables, whole};
use super::warm::{earlier_at, warm_start};
use super::workload::{WorkloadWish, read_bounded, trial_shape, workload};
use super::{Listener, Update};
use crate::backend::nccl::{NcclBackend, NcclSetup};
use crate::backend::replay::ReplayBackend;
use crate::backend::simulated::{MACHINES, SimulatedBackend, SimulatedMachine, SimulatedPeers};
use crate::backend::{Backend, LaunchPlan, expected_on_gpus_s};
use crate::campaign::{Campaign, CampaignError, Ending, News, Stop};
use crate::canonical::Fingerprint;
use crate::choice::{CampaignFacts, judge};
use crate::clock::{Clock, wall_time};
use crate::discovery::{DiscoveryError, GpuLocks, select_devices};
use crate::doctor::refuses;
use crate::emit::{EmitAs, render};
use crate::engine::{CollectiveStream, Engine, EngineVersion};
use crate::error_kind::{Classified as _, ErrorKind, Failure};
use crate::evidence::{Evidence, Objective, default_arm, measured_points};
use crate::fingerprint::{self, Described, known_to};
use crate::journal::{self, Journal, JournalError};
use crate::knob::{self, Risk};
use crate::machine::{Gpu, Machine, NcclLibrary, NcclVersion, Topology};
use crate::process::Supervisor;
use crate::quarantine::{Store, place};
use crate::record::{
    Arm, ArmId, BackendKind, BufferKind, CheapestLevel, CheckReport, Choice, DeadAxis, Event, FORMAT, FingerprintParts,
    JournalLine, Labels, Manifest, MisjudgedBox, Origin, PassStream, PeerOutcome, PeerReport, Phase, Pin, Point,
    PointKey, Profile, QuarantinedArm, Settings, Space, TrialPlan, VerdictKind, WarmStart, Workload,
};
use crate::report::summary_csv;
use crate::search::tables::WithTables;
use crate::search::{CUT_SHORT, RACING, SearchContext, Want, racing_launches, strategy};
use crate::seed::Seed;
use crate::space::{self, Enumeration};
use crate::units::nearest_name;
use crate::wording::plural;
use crate::workload::{gate_plan, measured_by};

/// The seed of a run that names none. Any number would do; a fixed one makes a first run repeatable.
const DEFAULT_SEED: u64 = 1;
/// The simulated machine that is used where there is no GPU.
const DEFAULT_MACHINE: &str = "rtx-pro-6000-x8";
/// The NCCL whose rules apply where none is loaded: the one this tool was checked on.
const ASSUMED_VERSION: NcclVersion = crate::doctor::VERIFIED;

/// What the user asked for; what is `None` or empty has a default.
#[derive(Debug, Clone, Default)]
pub struct TuneRequest {
    /// What should measure.
    pub backend: BackendChoice,
    /// Simulated machine, by name or file.
    pub machine: Option<String>,
    /// Recorded run to replay.
    pub recorded: Option<PathBuf>,
    /// The workload.
    pub workload: WorkloadWish,
    /// Search space, by name or file.
    pub space: Option<String>,
    /// How it is searched, by name; nothing for what the earlier run said, or the reference.
    pub strategy: Option<&'static str>,
    /// An earlier run that tells a race where to look first.
    pub warm_start: Option<PathBuf>,
    /// Seconds the run may take.
    pub time_budget_s: Option<f64>,
    /// Smallest gain worth shipping.
    pub min_gain: Option<f64>,
    /// Largest regression of any point.
    pub max_regression: Option<f64>,
    /// Every point must be shown safe.
    pub strict: bool,
    /// Most MiB of memory that an answer may take beside the default.
    pub max_extra_memory_mib: Option<f64>,
    /// The longest any phase of a worker's step may take.
    pub phase_limit: Option<Duration>,
    /// The cheapest level at which arms of the search may differ within one launch; nothing for what the earlier run
    /// said, or a communicator.
    pub cheapest_level: Option<CheapestLevel>,
    /// Milliseconds of timed replays per cell.
    pub cell_time_ms: Option<f64>,
    /// Whose memory messages lie in; nothing for what the earlier run said, or plain memory.
    pub buffers: Option<BufferKind>,
    /// Which answer the files hold; nothing for what the earlier run said, or the balanced one.
    pub profile: Option<Profile>,
    /// NAME=VALUE that holds in every arm.
    pub pins: Vec<String>,
    /// Variables that reach the workers beside the usual ones.
    pub keep_environment: Vec<String>,
    /// Risks that are taken, by name.
    pub allow_risk: Vec<String>,
    /// Whether a graph file is made for a box that NCCL misjudges.
    pub repair_graph: RepairGraph,
    /// Whether axes are measured that do nothing here by NCCL's rules.
    pub keep_dead_axes: bool,
    /// Whether tuner tables are made.
    pub tables: TableWish,
    /// The tuner plugin; the one that came with this program where none is named.
    pub plugin: Option<PathBuf>,
    /// The NCCL library.
    pub nccl_lib: Option<PathBuf>,
    /// GPUs, by position or identity.
    pub devices: Vec<String>,
    /// Seed.
    pub seed: Option<u64>,
    /// Run directory.
    pub out: Option<PathBuf>,
    /// Go on with a run.
    pub resume: bool,
    /// Spread for launches that a recorded run does not hold.
    pub assume_noise: Option<f64>,
    /// Blocks of the search.
    pub search_blocks: Option<u32>,
    /// Paired launches of each finalist.
    pub final_launches: Option<u32>,
    /// Leave the trial in a forward pass out.
    pub no_trial: bool,
    /// Without a forward pass there is nothing to do: an error, not a notice.
    pub require_trial: bool,
    /// Tokens of context whose cache each sequence reads in a forward pass.
    pub context: Option<u64>,
    /// Paired launches of the trial.
    pub trial_launches: Option<u32>,
    /// libcublasLt for forward passes.
    pub cublaslt_lib: Option<PathBuf>,
    /// Say what would be done and stop.
    pub dry_run: bool,
    /// Whether peer access across the host bridge is tested, where a space asks for it.
    pub peer_access: PeerAccess,
    /// Seconds for which captured and uncaptured collectives are made to overlap, where a finalist needs it.
    pub overlap_s: Option<f64>,
    /// Measure although doctor refuses.
    pub force: bool,
    /// Try arms again that hung, crashed or corrupted in earlier runs.
    pub retry_quarantined: bool,
    /// Where such arms are remembered, if anything names a place.
    pub state_folder: Option<PathBuf>,
    /// What was typed.
    pub arguments: Vec<String>,
    /// The environment the tool was started in.
    pub environment: BTreeMap<String, String>,
}

/// How `tune` ended.
#[derive(Debug)]
pub enum TuneEnd {
    /// With an answer in the run directory.
    Answered {
        /// The answer.
        choice: Box<Choice>,
        /// The run.
        manifest: Box<Manifest>,
        /// Where it is.
        directory: PathBuf,
    },
    /// With a plan only.
    Planned(Box<Plan>),
}

/// What a run would do.
#[derive(Debug)]
pub struct Plan {
    /// The run.
    pub manifest: Manifest,
    /// Launches of one block of the search.
    pub launches_per_block: usize,
    /// Blocks of the search, in blocks like the first; of one that races, at most.
    pub search_blocks: f64,
    /// Cells of the search; of one that races, the most.
    pub search_cells: usize,
    /// Cells of a final with the usual number of launches.
    pub final_cells: usize,
    /// The trial, where one is wanted.
    pub trial: Option<TrialPlan>,
    /// Seconds of the first block of the search on GPUs like those this was seen on.
    pub block_s: f64,
    /// Likewise of a launch of the final.
    pub final_launch_s: f64,
}

/// Everything decided before the first launch.
struct Prepared {
    manifest: Manifest,
    context: SearchContext,
    version: NcclVersion,
    cublaslt: String,
    recorded: Option<Vec<JournalLine>>,
    /// What stands beside arms.
    files: RunFiles,
    /// What reads tuner tables.
    tables: Tables,
    /// What is told, call by call, what to run.
    call_plugin: Option<Plugin>,
    /// The GPUs are this process's from before the first check on them.
    locks: Option<GpuLocks>,
    /// What broken launches printed before there was a run directory.
    early_logs: Option<TempDir>,
}

/// Runs the whole story.
pub fn tune(request: &TuneRequest, listener: Listener<'_>) -> Result<TuneEnd, Failure> {
    let supervisor = Rc::new(Supervisor::start()?);
    let previous = previous_manifest(request)?;
    let mut prepared = prepare(request, &supervisor, previous.as_ref(), listener)?;
    for notice in &prepared.manifest.notices {
        listener(Update::Notice(notice.clone()));
    }
    if request.dry_run {
        return Ok(TuneEnd::Planned(Box::new(plan(prepared, request)?)));
    }
    let identity = identity(&prepared.manifest);
    let directory = match &request.out {
        Some(path) => path.clone(),
        None => directory::default_path(&prepared.manifest.created, &identity.combined()),
    };
    // Whatever may still be refused is refused before anything is written.
    let _locks = prepared.locks.take();
    let place = from_anywhere(&directory, &prepared.files)?;
    let mut backend = backend(request, &prepared, &supervisor, &directory, place)?;
    let opened = open(request, &prepared, &identity, &directory)?;
    listener(Update::Directory(&directory));
    if let Some(early) = prepared.early_logs.take() {
        directory::keep_logs(early.path(), &directory.join(LOGS_FOLDER));
    }
    prepared.context.most_launches = backend.most_final_launches();
    prepared.context.most_trial_launches = backend.most_trial_launches();
    run(request, &prepared, &directory, opened, backend.as_mut(), &supervisor, listener)
}

/// The run to go on with, or to replay.
fn previous_manifest(request: &TuneRequest) -> Result<Option<Manifest>, Failure> {
    if request.resume {
        let Some(out) = &request.out else {
            return Err(Failure::new(ErrorKind::Usage, "--resume needs --out DIR: the run to go on with"));
        };
        return directory::read(out, MANIFEST_FILE).map(Some);
    }
    match (&request.recorded, request.backend) {
        (Some(recorded), BackendChoice::Auto | BackendChoice::Replay) => {
            directory::read(recorded, MANIFEST_FILE).map(Some)
        }
        (Some(_), _) => {
            Err(Failure::new(ErrorKind::Usage, "a recorded run is replayed: another backend cannot use --recorded"))
        }
        (None, BackendChoice::Replay) => {
            Err(Failure::new(ErrorKind::Usage, "--backend replay needs --recorded DIR: the run to replay"))
        }
        (None, _) => Ok(None),
    }
}

/// What holds in every arm: pins, variables that were inherited, the engine's and those of NCCL's files.
pub(super) fn pins(
    request: &TuneRequest,
    kind: BackendKind,
    (resumed, recorded): (Option<&Manifest>, Option<&Manifest>),
    conf: Vec<Pin>,
    version: NcclVersion,
) -> Result<Held, Failure> {
    let mut explicit = parse_pins(&request.pins, version)?;
    if let Some(manifest) = recorded {
        // The recorded numbers hold under the recorded variables and no others.
        if !explicit.is_empty() {
            return Err(Failure::new(
                ErrorKind::Usage,
                "a replay cannot be pinned: its numbers were measured under the recorded variables",
            ));
        }
        return Ok(Held { pins: manifest.pins.clone(), notices: Vec::new() });
    }
    let mut engine = (request.workload.engine(), request.workload.engine_version);
    if let Some(manifest) = resumed {
        if explicit.is_empty() {
            explicit = manifest.pins.iter().filter(|pin| pin.origin == Origin::Pin).cloned().collect();
        }
        if request.workload.engine.is_none() {
            let version = manifest.workload.engine_version.as_deref().and_then(EngineVersion::parse);
            engine = (Engine::parse(&manifest.workload.engine).unwrap_or(engine.0), engine.1.or(version));
        }
    }
    let inherited = if kind == BackendKind::Nccl { inherited(&request.environment) } else { Vec::new() };
    // A simulation inherits nothing, and no machine of its own had anything to say.
    let nothing = BTreeMap::new();
    let outside = if kind == BackendKind::Nccl { &request.environment } else { &nothing };
    Ok(merge(explicit, inherited, engine, conf, outside)?)
}

/// What is asked of the collectives, of which GPUs, and what of it decides.
fn asked(
    request: &TuneRequest,
    previous: Option<&Manifest>,
    measured: &Measured,
    recorded: Option<&[JournalLine]>,
) -> Result<(Workload, Vec<u32>, Objective), Failure> {
    let (mut workload, devices) = match previous {
        Some(manifest) if request.workload.is_empty() => (manifest.workload.clone(), manifest.devices.clone()),
        _ => {
            let memory = measured.machine.gpus.first().and_then(|gpu| gpu.memory_total_mib);
            let mut workload = workload(&request.workload, measured.devices.len() as u32, memory)?;
            let devices = devices_for(&workload, &measured.devices)?;
            measured_by(&mut workload, devices.len() as u32);
            (workload, devices)
        }
    };
    if let Some(lines) = recorded.filter(|_| !request.workload.is_empty()) {
        as_recorded(&mut workload, lines);
    }
    let objective = Objective::of(&workload).ok_or_else(|| {
        Failure::new(ErrorKind::Usage, "none of the workload's collectives can be measured by this version")
            .with_hint("`nccltune workload` lists them with what is measured")
    })?;
    Ok((workload, devices, objective))
}

fn prepare(
    request: &TuneRequest,
    supervisor: &Rc<Supervisor>,
    previous: Option<&Manifest>,
    listener: Listener<'_>,
) -> Result<Prepared, Failure> {
    let resumed = previous.filter(|_| request.resume);
    let recorded = previous.filter(|_| !request.resume);
    let (kind, facts) = choose_backend(request, supervisor, resumed, recorded)?;
    let measured = measured_machine(request, kind, facts, previous, listener)?;
    let version = measured.version();

    // What holds in every arm.
    let Held { pins, notices: settled } = pins(request, kind, (resumed, recorded), measured.conf.clone(), version)?;
    let pin_map = as_map(&pins);

    let lines = recorded.map(|manifest| recorded_lines(request, manifest)).transpose()?;
    let (workload, devices, objective) = asked(request, previous, &measured, lines.as_deref())?;
    let seed = request.seed.or(previous.map(|manifest| manifest.seed)).unwrap_or(DEFAULT_SEED);

    // Which arms.
    let setting = Setting { kind, measured: &measured, pins: &pins, devices: &devices, workload: &workload, version };
    let (early, searched) = looked_at(request, supervisor, previous, &setting, seed, listener)?;
    let Searched { space, mut arms, mut notices, files, misjudged, peer_access, space_arms, dead_axes } = searched;
    for notice in measured.notices.iter().cloned().chain(settled).rev() {
        if !notices.contains(&notice) {
            notices.insert(0, notice);
        }
    }
    let Some(default) = default_arm(&arms).cloned() else {
        return Err(Failure::new(ErrorKind::Unexpected, "the space lost its default arm"));
    };
    let quarantined = left_alone(request, previous, &setting, (&pin_map, &default.id), (&mut arms, &mut notices));
    // A run that goes on, or is replayed, has the gate it began with, or none.
    let gate = match previous {
        Some(manifest) => manifest.gate.clone(),
        None => Some(gate_plan(&workload, devices.len() as u32)),
    };
    let wish = tables::Setting {
        kind,
        previous,
        version,
        pins: &pins,
        arms: &arms,
        files: &files,
        ranks: devices.len() as u32,
    };
    let (tables, table_record) = Tables::with_record(request, &wish, &mut notices)?;
    let settings = settings(request, previous)?;
    let (call_plugin, call_record) = call_plugin(request, &wish, &settings)?;
    require_same_context(request, previous)?;
    let trial = trial_here(request, previous, devices.len() as u32, &measured, &workload, &mut notices);
    let is_tried = !request.no_trial && lines.as_deref().is_none_or(holds_passes);
    if request.require_trial && trial.is_none() {
        return Err(no_trial(&notices));
    }
    let is_simulated = kind == BackendKind::Simulated || measured.fake || lines.as_deref().is_some_and(says_simulated);
    let fingerprint = match (recorded, resumed) {
        (Some(manifest), _) => manifest.fingerprint.clone(),
        // What an older version did not record is no part of what may not change.
        (None, Some(manifest)) => known_to(&manifest.fingerprint, &measured.fingerprint(&devices, &pins, &workload)),
        (None, None) => measured.fingerprint(&devices, &pins, &workload),
    };
    let points = measured_points(&workload);
    let warm_start = match &request.warm_start {
        Some(run) => Some(warm_start(run, (&objective, &points), is_simulated, &fingerprint, &mut notices)?),
        None => carried(request, previous),
    };
    let context = SearchContext {
        default: default.id.clone(),
        objective,
        most_launches: None,
        earlier: earlier_at(warm_start.as_ref(), points.len()),
        points,
        settings: settings.clone(),
        most_trial_launches: None,
        trial: trial.clone().filter(|_| is_tried),
        gate: gate.clone(),
        budget_s: request.time_budget_s,
        arms: arms.clone(),
    };
    let labels = labels(kind, (is_simulated, request.assume_noise.is_some()), (previous, recorded), &pin_map);
    let manifest = Manifest {
        format: FORMAT,
        tool_version: env!("CARGO_PKG_VERSION").to_owned(),
        commit: option_env!("NCCLTUNE_COMMIT").map(str::to_owned),
        created: humantime::format_rfc3339_seconds(wall_time()).to_string(),
        arguments: request.arguments.clone(),
        seed,
        backend: kind,
        labels,
        fingerprint,
        machine: measured.machine,
        nccl: measured.nccl,
        pins,
        kept_environment: kept_environment(request, resumed),
        devices,
        workload,
        space,
        arms,
        space_arms,
        dead_axes,
        quarantined,
        misjudged,
        warm_start,
        makes_tables: tables.are_made,
        tables: table_record,
        call_plugin: call_record,
        notices,
        settings,
        trial,
        gate,
        checks: measured.checks,
        peer_access,
        cold_and_warm: early.cold_and_warm,
        recorded: recorded.and_then(|_| Some(request.recorded.as_ref()?.file_name()?.to_string_lossy().into_owned())),
        imported_files: recorded.map(|manifest| manifest.imported_files.clone()).unwrap_or_default(),
    };
    let cublaslt = request.cublaslt_lib.as_ref().map(|path| path.to_string_lossy().into_owned());
    Ok(Prepared {
        manifest,
        context,
        version,
        cublaslt: cublaslt.or(measured.cublaslt).unwrap_or_default(),
        recorded: lines,
        files,
        tables,
        call_plugin,
        locks: early.locks,
        early_logs: early.logs,
    })
}

/// Names of variables that reach the workers: a run that goes on keeps those it began with, unless others are named.
fn kept_environment(request: &TuneRequest, resumed: Option<&Manifest>) -> Vec<String> {
    match resumed {
        Some(manifest) if request.keep_environment.is_empty() => manifest.kept_environment.clone(),
        _ => request.keep_environment.clone(),
    }
}

/// What the run that goes on, or is replayed, began with. Its figures at other points than those that are asked for now
/// would be taken for theirs.
fn carried(request: &TuneRequest, previous: Option<&Manifest>) -> Option<WarmStart> {
    let same_points = previous.filter(|_| request.resume || request.workload.is_empty());
    same_points.and_then(|manifest| manifest.warm_start.clone())
}

/// Takes out the arms that are left alone because of what they did before, and says which.
fn left_alone(
    request: &TuneRequest,
    previous: Option<&Manifest>,
    setting: &Setting<'_>,
    (pins, default): (&BTreeMap<String, String>, &ArmId),
    (arms, notices): (&mut Vec<Arm>, &mut Vec<String>),
) -> Vec<QuarantinedArm> {
    match (previous, &setting.measured.nccl) {
        (None, Some(nccl)) if setting.kind == BackendKind::Nccl => {
            let place = place(&setting.measured.machine, setting.devices, nccl);
            let memory = request.state_folder.as_deref().map(|folder| Store::new(folder).remembered());
            let failed = Failed { place: &place, pins, retry: request.retry_quarantined };
            failed.leave_out(memory, arms, default, notices)
        }
        // A run that goes on keeps the arms it began with, whatever was remembered since: what fails in
        // it again is left alone by its own evidence.
        _ => left_out_before(previous, request.resume, arms),
    }
}

/// What every output must say about where its numbers come from.
fn labels(
    kind: BackendKind,
    (is_simulated, is_redrawn): (bool, bool),
    (previous, recorded): (Option<&Manifest>, Option<&Manifest>),
    pins: &BTreeMap<String, String>,
) -> Labels {
    Labels {
        simulated: is_simulated || recorded.is_some_and(|manifest| manifest.labels.simulated),
        replayed: kind == BackendKind::Replay,
        imported: previous.is_some_and(|manifest| manifest.labels.imported),
        redrawn: is_redrawn || previous.is_some_and(|manifest| manifest.labels.redrawn),
        host_memory: pins.get("NCCL_P2P_DISABLE").is_some_and(|value| value == "1"),
    }
}

/// Where a search takes setting.
struct Setting<'a> {
    kind: BackendKind,
    measured: &'a Measured,
    pins: &'a [Pin],
    devices: &'a [u32],
    workload: &'a Workload,
    version: NcclVersion,
}

/// Takes the GPUs, looks at them while they are idle, and settles what is searched on them.
fn looked_at(
    request: &TuneRequest,
    supervisor: &Rc<Supervisor>,
    previous: Option<&Manifest>,
    setting: &Setting<'_>,
    seed: u64,
    listener: Listener<'_>,
) -> Result<(Early, Searched), Failure> {
    let live = LiveChecks {
        request,
        supervisor,
        kind: setting.kind,
        previous,
        machine: &setting.measured.machine,
        nccl: setting.measured.nccl.as_ref(),
        checks: &setting.measured.checks,
        simulated: setting.measured.peers,
        devices: setting.devices,
        pins: setting.pins,
        seed,
    };
    let early = live.begin(listener)?;
    let mut gate = || live.peers(early.logs.as_ref(), listener);
    let searched = searched_here(request, supervisor, previous, setting, &mut gate)?;
    Ok((early, searched))
}

/// What is searched, with what is made for a box that NCCL misjudges.
fn searched_here(
    request: &TuneRequest,
    supervisor: &Rc<Supervisor>,
    previous: Option<&Manifest>,
    setting: &Setting<'_>,
    gate: &mut dyn FnMut() -> Result<PeerReport, Failure>,
) -> Result<Searched, Failure> {
    let pins = as_map(setting.pins);
    let mut searched = searched(request, previous, &pins, setting.version, gate)?;
    match previous {
        Some(manifest) if request.resume || request.space.is_none() => {
            searched.dead_axes.clone_from(&manifest.dead_axes);
            leave_out(&searched.dead_axes, &mut searched.arms);
        }
        Some(_) => {}
        None if request.keep_dead_axes => {}
        None => leave_out_dead(request, supervisor, setting, &pins, &mut searched),
    }
    searched.misjudged = match previous {
        Some(manifest) => carried_on(request, manifest, &mut searched)?,
        // Where only the default is asked about, nothing stands beside it.
        None if searched.arms.len() == 1 => None,
        None => {
            let case = Case {
                wish: request.repair_graph,
                gpus: &gpus_of(&setting.measured.machine, setting.devices),
                gpus_in_box: setting.measured.machine.gpus.len(),
                workload: setting.workload,
                pins: &pins,
                version: setting.version,
                risks: &request.allow_risk.iter().cloned().collect(),
            };
            repaired(request, supervisor, setting, &case, &mut searched)?
        }
    };
    Ok(searched)
}

/// Leaves out the arms of axes that do nothing here by NCCL's rules, as far as this machine's wiring is known.
fn leave_out_dead(
    request: &TuneRequest,
    supervisor: &Supervisor,
    setting: &Setting<'_>,
    pins: &BTreeMap<String, String>,
    searched: &mut Searched,
) {
    let gpus = gpus_of(&setting.measured.machine, setting.devices);
    let topology = match (setting.kind, &setting.measured.topology) {
        (BackendKind::Simulated, Some(topology)) => Some(first_gpus(topology, gpus.len())),
        (BackendKind::Nccl, _) => wiring(supervisor, &probe_environment(&request.environment), &gpus),
        _ => None,
    };
    let Some(topology) = topology else { return };
    let points = measured_points(setting.workload);
    let field = Field { topology: &topology, version: setting.version, pins, points: &points };
    let all = searched.arms.len();
    searched.dead_axes = prune(&field, &mut searched.arms);
    searched.notices.extend(searched.dead_axes.iter().map(|axis| notice(axis, &searched.arms)));
    if searched.arms.len() < all {
        searched.space_arms.get_or_insert(all as u32);
    }
}

/// A run that goes on keeps the arms that were made for its box, also where its space is read anew.
fn carried_on(
    request: &TuneRequest,
    manifest: &Manifest,
    searched: &mut Searched,
) -> Result<Option<MisjudgedBox>, Failure> {
    let Some(misjudged) = manifest.misjudged.clone() else { return Ok(None) };
    let (true, Some(run)) = (request.resume, &request.out) else {
        // A replay of the recorded arms tells of the box, one over another space does not.
        return Ok(request.space.is_none().then_some(misjudged));
    };
    let is_missing = |arm: &&Arm| !searched.arms.iter().any(|known| known.id == arm.id);
    let made = manifest.arms.iter().filter(|arm| misjudged.arms.contains(&arm.id)).filter(is_missing);
    let made: Vec<Arm> = made.cloned().collect();
    searched.files.extend(RunFiles::of_run(run, &made)?);
    searched.arms.extend(made);
    Ok(Some(misjudged))
}

/// Looks whether NCCL misjudges the box, and makes the file that sets it right.
fn repaired(
    request: &TuneRequest,
    supervisor: &Rc<Supervisor>,
    setting: &Setting<'_>,
    case: &Case<'_>,
    searched: &mut Searched,
) -> Result<Option<MisjudgedBox>, Failure> {
    let sight = match (setting.kind, &setting.measured.nccl, &setting.measured.topology) {
        _ if !case.is_open() => return Ok(None),
        (BackendKind::Nccl, Some(nccl), _) => {
            // Nothing is started where only a plan is asked for.
            let start = (!request.dry_run).then_some(|| {
                // It keeps no logs and sets no files.
                let nowhere = PathBuf::new();
                NcclBackend::new(NcclSetup {
                    supervisor: Rc::clone(supervisor),
                    environment: worker_environment(&request.environment, &request.keep_environment, setting.pins),
                    gpus: case.gpus.to_vec(),
                    nccl: nccl.clone(),
                    cublaslt: String::new(),
                    logs: nowhere.clone(),
                    files: nowhere,
                    buffers: BufferKind::Plain,
                    phase_limit: request.phase_limit,
                })
            });
            case.look(supervisor, &probe_environment(&request.environment), start)?
        }
        (BackendKind::Simulated, _, Some(topology)) => {
            Sight { topology: Ok(first_gpus(topology, case.gpus.len())), logs: Vec::new() }
        }
        _ => return Ok(None),
    };
    let Repaired { misjudged, arms, notices } = case.repaired(&sight, &mut searched.files)?;
    searched.arms.extend(arms);
    searched.notices.extend(notices);
    Ok(misjudged)
}

/// The first GPUs of a simulated machine: it gives them to a group whatever their numbers.
fn first_gpus(topology: &Topology, count: usize) -> Topology {
    let mut first = topology.clone();
    first.gpus.truncate(count);
    first
}

/// Fewest and most launches, and finalists, of a trial that says nothing else.
const TRIAL_LAUNCHES: (u32, u32) = (4, 12);
const TRIAL_FINALISTS: u32 = 2;
/// Tokens of context, likewise: a conversation of a few pages.
const TRIAL_CONTEXT: u64 = 4096;

/// The journal of a recorded run, if it is that of its manifest. The identity in its first line is of
/// no use here: a later version may count more things into it.
fn recorded_lines(request: &TuneRequest, manifest: &Manifest) -> Result<Vec<JournalLine>, Failure> {
    let directory = request.recorded.as_deref().unwrap_or(Path::new("."));
    let lines = journal::read(directory)?;
    let arms = whole(manifest.clone()).arms;
    let is_foreign = |event: &Event| match event {
        Event::RunOpened { seed, .. } => *seed != manifest.seed,
        Event::CellMeasured(cell) => !arms.iter().any(|arm| arm.id == cell.arm),
        Event::PassMeasured(pass) => !arms.iter().any(|arm| arm.id == pass.arm),
        _ => false,
    };
    if lines.iter().any(|line| is_foreign(&line.event)) {
        return Err(Failure::new(
            ErrorKind::Usage,
            format!("journal and manifest in {} are of different runs", directory.display()),
        )
        .with_hint("copy run directories whole"));
    }
    Ok(lines)
}

/// Fits a workload that was derived anew to what a recording holds. A collective that it never measured in
/// any form is not measured now either; one that it measured in another form (earlier versions captured
/// everything) is looked for in that form. Sizes are left alone: what is missing of those is said.
fn as_recorded(workload: &mut Workload, lines: &[JournalLine]) {
    let mut known: BTreeSet<PointKey> = BTreeSet::new();
    for line in lines {
        if let Event::CellMeasured(cell) = &line.event {
            known.insert(cell.point);
        }
    }
    let forms = |point: &Point| {
        let alike = |key: &&PointKey| (key.collective, key.dtype) == (point.collective, point.dtype);
        known.iter().filter(alike).copied().collect::<Vec<PointKey>>()
    };
    let mut changed = 0;
    for point in workload.points.iter_mut().chain(&mut workload.guard).filter(|point| point.measured) {
        let alike = forms(point);
        if known.contains(&point.key()) {
            continue;
        }
        let same = |key: &&PointKey| (key.bytes, key.ranks) == (point.bytes, point.ranks);
        if let Some(key) = alike.iter().find(same) {
            point.form = key.form;
            changed += 1;
        } else if alike.is_empty() {
            point.measured = false;
            changed += 1;
        }
    }
    if changed > 0 {
        workload.assumptions.push(format!(
            "{changed} {} not measured in the recorded run, or not in this form, and {} taken as recorded",
            plural(changed, "point was", "points were"),
            plural(changed, "is", "are")
        ));
    }
}

fn says_simulated(lines: &[JournalLine]) -> bool {
    lines.iter().any(|line| matches!(line.event, Event::RunOpened { simulated: true, .. }))
}

fn holds_passes(lines: &[JournalLine]) -> bool {
    lines.iter().any(|line| matches!(line.event, Event::PassMeasured(_)))
}

/// Why there is nothing to try.
fn no_trial(notices: &[String]) -> Failure {
    match notices.iter().rev().find_map(|notice| notice.strip_prefix("no trial in a forward pass: ")) {
        Some(why) => Failure::new(ErrorKind::Usage, format!("no forward pass can be timed: {why}")),
        None => {
            Failure::new(ErrorKind::Usage, "no forward pass can be timed: the run's workload does not tell its shape")
                .with_hint("run `nccltune tune` with the model anew; --sizes alone shape no pass")
        }
    }
}

/// Passes that were timed with one context say nothing about another.
fn require_same_context(request: &TuneRequest, previous: Option<&Manifest>) -> Result<(), Failure> {
    let plan = previous.and_then(|manifest| manifest.trial.as_ref());
    let known = plan.and_then(|plan| plan.cases.iter().find(|case| case.weight > 0.0)).map(|case| case.context);
    match (request.context, known) {
        (Some(wanted), Some(known)) if wanted != known && request.workload.is_empty() => Err(Failure::new(
            ErrorKind::Usage,
            format!("the trial of this run was planned with --context {known}, not {wanted}"),
        )
        .with_hint("leave --context out, or start a new run in another directory")),
        _ => Ok(()),
    }
}

/// The trial, where the machine can be tried.
fn trial_here(
    request: &TuneRequest,
    previous: Option<&Manifest>,
    ranks: u32,
    measured: &Measured,
    workload: &Workload,
    notices: &mut Vec<String>,
) -> Option<TrialPlan> {
    if measured.has_passes {
        return trial_plan(request, previous, ranks, &measured.machine, workload, notices);
    }
    let notice = "no trial in a forward pass: the simulated machine's file has no [pass] section".to_owned();
    if !request.no_trial && !notices.contains(&notice) {
        notices.push(notice);
    }
    None
}

/// The trial in a forward pass, as far as one can be shaped. It is planned and recorded even where it
/// is left out for now, so that `trial --run` can make it later without the model's config. A model
/// whose pass cannot be shaped is still measured; the answer then says that it is untried.
fn trial_plan(
    request: &TuneRequest,
    previous: Option<&Manifest>,
    ranks: u32,
    machine: &Machine,
    workload: &Workload,
    notices: &mut Vec<String>,
) -> Option<TrialPlan> {
    if let Some(manifest) = previous
        && request.workload.is_empty()
    {
        let changed = |plan: TrialPlan| TrialPlan {
            launches: request.trial_launches.unwrap_or(plan.launches),
            most_launches: request.trial_launches.unwrap_or(plan.most_launches),
            ..plan
        };
        return manifest.trial.clone().map(changed);
    }
    let wish = &request.workload;
    let memory = machine.gpus.first().and_then(|gpu| gpu.memory_total_mib);
    let shaped = match trial_shape(wish, ranks, memory, request.context.unwrap_or(TRIAL_CONTEXT), workload) {
        Ok(shaped) => shaped,
        Err(failure) => {
            let notice = format!("no trial in a forward pass: {failure}");
            if !request.no_trial && !notices.contains(&notice) {
                notices.push(notice);
            }
            return None;
        }
    };
    let stream = |captured: bool| match wish.engine().collective_stream(captured) {
        CollectiveStream::Compute => PassStream::Compute,
        CollectiveStream::Side => PassStream::Side,
    };
    shaped.map(|(shape, cases)| TrialPlan {
        shape,
        cases,
        stream: stream(true),
        eager_stream: stream(false),
        launches: request.trial_launches.unwrap_or(TRIAL_LAUNCHES.0),
        most_launches: request.trial_launches.unwrap_or(TRIAL_LAUNCHES.1),
        finalists: TRIAL_FINALISTS,
    })
}

/// Which backend measures, with the facts that were gathered on the way.
pub(super) fn choose_backend(
    request: &TuneRequest,
    supervisor: &Supervisor,
    resumed: Option<&Manifest>,
    recorded: Option<&Manifest>,
) -> Result<(BackendKind, Option<MachineFacts>), Failure> {
    let wanted = match (request.backend, resumed) {
        (BackendChoice::Auto, Some(manifest)) => match manifest.backend {
            BackendKind::Nccl => BackendChoice::Nccl,
            BackendKind::Simulated => BackendChoice::Simulated,
            BackendKind::Replay => {
                return Err(Failure::new(ErrorKind::Usage, "a replay needs no resume: run it again"));
            }
        },
        (wanted, _) => wanted,
    };
    if recorded.is_some() {
        return Ok((BackendKind::Replay, None));
    }
    match wanted {
        BackendChoice::Replay => Ok((BackendKind::Replay, None)),
        BackendChoice::Simulated => Ok((BackendKind::Simulated, None)),
        BackendChoice::Auto if request.machine.is_some() => Ok((BackendKind::Simulated, None)),
        BackendChoice::Auto | BackendChoice::Nccl => {
            let asked = ask_driver(supervisor, &request.environment);
            if wanted == BackendChoice::Auto && !asked.0 {
                // Flags that speak of real GPUs must not end in planted numbers: a container that was
                // started without its GPUs looks just like this.
                if request.nccl_lib.is_some() || request.force || !request.keep_environment.is_empty() {
                    return Err(DiscoveryError::NoDriver.into());
                }
                return Ok((BackendKind::Simulated, None));
            }
            let facts = gather(
                supervisor,
                &request.environment,
                asked,
                &MachineWish {
                    devices: &request.devices,
                    ranks: request.workload.tensor_parallel,
                    nccl_lib: request.nccl_lib.as_deref(),
                    state_folder: request.state_folder.as_deref(),
                },
            )?;
            Ok((BackendKind::Nccl, Some(facts)))
        }
    }
}

/// The machine that is measured, real or not.
pub(super) struct Measured {
    pub(super) machine: Machine,
    pub(super) devices: Vec<u32>,
    pub(super) nccl: Option<NcclLibrary>,
    pub(super) cublaslt: Option<String>,
    /// Whether it can be tried in a forward pass.
    pub(super) has_passes: bool,
    /// Of everything the numbers of a simulated machine follow from.
    pub(super) simulation: Option<Fingerprint>,
    /// The release that a simulated machine runs.
    pub(super) simulated_version: Option<NcclVersion>,
    /// How a simulated machine's GPUs hang together, where it says so.
    pub(super) topology: Option<Topology>,
    /// What a simulated machine's file says of peer access.
    pub(super) peers: Option<SimulatedPeers>,
    /// Whether the driver is a stand-in for tests.
    pub(super) fake: bool,
    pub(super) checks: CheckReport,
    pub(super) conf: Vec<Pin>,
    pub(super) notices: Vec<String>,
}

impl Measured {
    /// The fingerprint of everything that can change the answer.
    pub(super) fn fingerprint(&self, devices: &[u32], pins: &[Pin], workload: &Workload) -> FingerprintParts {
        match &self.simulation {
            None => {
                let outside = outside_parts(pins, &workload.engine, workload.engine_version.as_deref());
                real_fingerprint(&self.machine, devices, self.nccl.as_ref(), outside)
            }
            simulation => fingerprint::parts(&Described {
                machine: &self.machine,
                devices,
                nccl: self.nccl.as_ref(),
                simulation: simulation.as_ref(),
                host: None,
            }),
        }
    }

    /// The release whose rules apply.
    pub(super) fn version(&self) -> NcclVersion {
        match &self.nccl {
            Some(nccl) => NcclVersion::from_code(nccl.version),
            None => self.simulated_version.unwrap_or(ASSUMED_VERSION),
        }
    }
}

pub(super) fn measured_machine(
    request: &TuneRequest,
    kind: BackendKind,
    facts: Option<MachineFacts>,
    previous: Option<&Manifest>,
    listener: Listener<'_>,
) -> Result<Measured, Failure> {
    let none = || CheckReport { format: FORMAT, checks: Vec::new() };
    match (kind, facts, previous) {
        (BackendKind::Nccl, Some(facts), _) => {
            let machine = facts.machine?;
            let nccl = facts.nccl?;
            let mut notices = Vec::new();
            if let Some(refusal) = refuses(&facts.checks) {
                if !request.force {
                    return Err(Failure::new(ErrorKind::MachineUnfit, refusal)
                        .with_hint("`nccltune doctor` shows every check; --force measures all the same, and says so"));
                }
                notices.push(format!("measured with --force although doctor refused: {refusal}"));
            }
            for check in &facts.checks.checks {
                // What is remembered is told arm by arm, where it touches this run.
                if check.verdict == crate::record::CheckVerdict::Warn && check.name != "quarantine" {
                    listener(Update::Notice(format!("{}: {}", check.name, check.evidence)));
                }
            }
            Ok(Measured {
                machine,
                devices: facts.devices,
                nccl: Some(nccl),
                cublaslt: facts.cublaslt,
                has_passes: true,
                simulation: None,
                simulated_version: None,
                topology: None,
                peers: None,
                fake: facts.fake,
                checks: facts.checks,
                conf: facts.conf,
                notices,
            })
        }
        (BackendKind::Replay, _, Some(manifest)) => Ok(Measured {
            machine: manifest.machine.clone(),
            devices: manifest.devices.clone(),
            nccl: manifest.nccl.clone(),
            cublaslt: None,
            has_passes: true,
            simulation: None,
            simulated_version: None,
            topology: None,
            peers: None,
            fake: false,
            checks: manifest.checks.clone(),
            conf: Vec::new(),
            notices: Vec::new(),
        }),
        _ => {
            let simulated = simulated_machine(request, previous)?;
            let machine = simulated.machine();
            let devices = select_devices(&machine, &request.devices)?;
            let simulation = Some(simulated.fingerprint());
            let notices = vec![format!("SIMULATED: {}", simulated.description())];
            Ok(Measured {
                machine,
                devices,
                nccl: None,
                cublaslt: None,
                has_passes: simulated.has_passes(),
                simulation,
                simulated_version: simulated.nccl_version(),
                topology: simulated.topology(),
                peers: simulated.peer_access(),
                fake: false,
                checks: none(),
                conf: Vec::new(),
                notices,
            })
        }
    }
}

pub(super) fn simulated_machine(
    request: &TuneRequest,
    previous: Option<&Manifest>,
) -> Result<SimulatedMachine, Failure> {
    if let (true, None, Some(out)) = (request.resume, &request.machine, &request.out)
        && let Ok(text) = read_small(&out.join(MACHINE_FILE))
    {
        return Ok(SimulatedMachine::parse(&text)?);
    }
    let name = match (&request.machine, previous) {
        (Some(name), _) => name.clone(),
        // The recorded name of a simulated machine ends with its own name in parentheses.
        (None, Some(manifest)) if manifest.backend == BackendKind::Simulated => manifest
            .machine
            .name
            .rsplit_once('(')
            .map_or_else(|| DEFAULT_MACHINE.to_owned(), |(_, name)| name.trim_end_matches(')').to_owned()),
        _ => DEFAULT_MACHINE.to_owned(),
    };
    if let Some(machine) = SimulatedMachine::named(&name) {
        return Ok(machine?);
    }
    let text = read_small(Path::new(&name)).map_err(|error| {
        let known: Vec<&str> = MACHINES.iter().map(|(name, _)| *name).collect();
        let near = nearest_name(&name, known.iter().copied()).map(|near| format!("did you mean {near}? "));
        Failure::new(ErrorKind::Usage, format!("no simulated machine {name:?}: {error}")).with_hint(format!(
            "{}compiled in: {}; or name a file",
            near.unwrap_or_default(),
            known.join(", ")
        ))
    })?;
    Ok(SimulatedMachine::parse(&text)?)
}

/// A small text file; anything larger than a megabyte is no file of ours.
fn read_small(path: &Path) -> Result<String, std::io::Error> {
    read_bounded(path, 1 << 20)
}

/// The GPUs of a tensor-parallel group: the first ones of those chosen, as engines take them.
pub(super) fn devices_for(workload: &Workload, devices: &[u32]) -> Result<Vec<u32>, Failure> {
    let wanted = workload.tensor_parallel as usize;
    if wanted > devices.len() {
        return Err(Failure::new(
            ErrorKind::Usage,
            format!("--tp {wanted} needs {wanted} GPUs; there are {} to choose from", devices.len()),
        ));
    }
    Ok(devices[..wanted].to_vec())
}

/// What is searched, and what stands beside it.
struct Searched {
    space: Space,
    arms: Vec<Arm>,
    notices: Vec<String>,
    files: RunFiles,
    misjudged: Option<MisjudgedBox>,
    /// Whether peer access may be tried, where the space asks for that.
    peer_access: Option<PeerReport>,
    /// Arms of the whole space, where that is more.
    space_arms: Option<u32>,
    /// Axes that do nothing here, whose arms are left out.
    dead_axes: Vec<DeadAxis>,
}

fn searched(
    request: &TuneRequest,
    previous: Option<&Manifest>,
    pins: &BTreeMap<String, String>,
    version: NcclVersion,
    gate: &mut dyn FnMut() -> Result<PeerReport, Failure>,
) -> Result<Searched, Failure> {
    let before = if request.resume { request.out.as_deref() } else { request.recorded.as_deref() };
    if let (None, Some(manifest)) = (&request.space, previous) {
        // The place they were first read from may be gone, or hold something else by now.
        let files = before
            .map_or_else(|| Ok(RunFiles::default()), |run| RunFiles::of_run(run, &whole(manifest.clone()).arms))?;
        let peer_access = manifest.peer_access.clone();
        let (space, arms) = (manifest.space.clone(), manifest.arms.clone());
        let (notices, space_arms) = (manifest.notices.clone(), manifest.space_arms);
        return Ok(Searched {
            space,
            arms,
            notices,
            files,
            misjudged: None,
            peer_access,
            space_arms,
            dead_axes: Vec::new(),
        });
    }
    let host_memory = pins.get("NCCL_P2P_DISABLE").is_some_and(|value| value == "1");
    let name = request.space.as_deref().unwrap_or(if host_memory { "host-memory" } else { "pcie-decode" });
    let (text, file) = match space::named(name) {
        Some(text) => (text.to_owned(), name.to_owned()),
        None => match read_small(Path::new(name)) {
            Ok(text) => (text, name.to_owned()),
            Err(error) if error.kind() == std::io::ErrorKind::NotFound && !name.contains('/') => {
                let failure = Failure::from(space::unknown(name));
                let begins = space::names().find(|known| known.starts_with(name));
                return Err(match begins.or_else(|| nearest_name(name, space::names())) {
                    Some(near) => failure.with_hint(format!("did you mean {near}?")),
                    None => failure,
                });
            }
            Err(error) => return Err(Failure::new(ErrorKind::Usage, error)),
        },
    };
    let space = space::parse(&text, &file)?;
    let (by_hash, files) = RunFiles::of_space(&space, Path::new(&file))?;
    let mut risks: BTreeSet<String> = request.allow_risk.iter().cloned().collect();
    let bold: BTreeSet<String> = risks.iter().cloned().chain([space::PEER_ACCESS.to_owned()]).collect();
    let most = space::enumerate(&by_hash, pins, version, &bold)?;
    let waits = |arm: &&Arm| arm.env.iter().any(|(name, value)| knob::needs_peer_access(name, value));
    let waiting = most.arms.iter().filter(waits).count();
    let searched = |found: Enumeration, notices: Vec<String>, peer_access: Option<PeerReport>| Searched {
        space,
        space_arms: (found.total > found.arms.len()).then_some(u32::try_from(found.total).unwrap_or(u32::MAX)),
        arms: found.arms,
        notices,
        files,
        misjudged: None,
        peer_access,
        dead_axes: Vec::new(),
    };
    // A risk that is taken by name needs no proof, unless that is asked for, too.
    let is_taken = risks.contains(Risk::HangProne.name()) && request.peer_access == PeerAccess::Auto;
    if waiting == 0 || is_taken {
        let enumeration = space::enumerate(&by_hash, pins, version, &risks)?;
        let notices = enumeration.notices.clone();
        return Ok(searched(enumeration, notices, None));
    }
    let report = gate()?;
    let is_open = report.outcome == PeerOutcome::Passed;
    let is_planned = request.dry_run && report.outcome == PeerOutcome::Skipped && report.reason.is_empty();
    if is_open || is_planned {
        let mut notices = most.notices.clone();
        if is_planned {
            let arms = plural(waiting as u32, "arm waits", "arms wait");
            notices
                .push(format!("{waiting} {arms} for a test of peer access, which a run makes before its first block"));
        }
        return Ok(searched(most, notices, is_open.then_some(report)));
    }
    // What was tried and did not hold is no risk to be taken.
    risks.remove(Risk::HangProne.name());
    let told = |notice: String| {
        if notice == space::NO_PEER_ACCESS {
            format!("NCCL_P2P_LEVEL is left out: peer access: {}", report.reason)
        } else {
            notice
        }
    };
    let enumeration = space::enumerate(&by_hash, pins, version, &risks)?;
    let notices = enumeration.notices.iter().cloned().map(told).collect();
    Ok(searched(enumeration, notices, Some(report)))
}

fn settings(request: &TuneRequest, previous: Option<&Manifest>) -> Result<Settings, Failure> {
    let base = previous.map(|manifest| manifest.settings.clone()).unwrap_or_default();
    let is_warmed = request.warm_start.is_some();
    if is_warmed && request.resume {
        return Err(Failure::new(ErrorKind::Usage, "a run that goes on keeps the beginning it had")
            .with_hint("leave --warm-start out, or start a new run in another directory"));
    }
    if is_warmed && request.strategy.is_some_and(|strategy| strategy != RACING) {
        return Err(Failure::new(
            ErrorKind::Usage,
            "an exhaustive search measures everything, whatever an earlier run saw",
        )
        .with_hint("--warm-start goes with --strategy racing, which it implies"));
    }
    let strategy = if is_warmed { Some(RACING) } else { request.strategy };
    Ok(Settings {
        min_gain: request.min_gain.unwrap_or(base.min_gain),
        max_regression: request.max_regression.unwrap_or(base.max_regression),
        strict: request.strict || base.strict,
        strategy: strategy.map_or(base.strategy, str::to_owned),
        profile: request.profile.unwrap_or(base.profile),
        max_extra_memory_mib: request.max_extra_memory_mib.or(base.max_extra_memory_mib),
        buffers: request.buffers.unwrap_or(base.buffers),
        cheapest_level: request.cheapest_level.unwrap_or(base.cheapest_level),
        cell_time_ms: request.cell_time_ms.unwrap_or(base.cell_time_ms),
        search_blocks: request.search_blocks.unwrap_or(base.search_blocks),
        final_launches: request.final_launches.or(base.final_launches),
        ..base
    })
}

/// What may not change when a run is resumed, part by part.
struct Identity(BTreeMap<&'static str, String>);

impl Identity {
    fn combined(&self) -> String {
        Fingerprint::of(&self.0).as_str().to_owned()
    }
}

fn identity(manifest: &Manifest) -> Identity {
    let mut parts = BTreeMap::from([
        ("the machine", manifest.fingerprint.combined.clone()),
        ("the NCCL library", fingerprint_of(&manifest.nccl.as_ref().map(|nccl| nccl.sha256.clone()))),
        ("the variables that hold in every arm", fingerprint_of(&manifest.pins)),
        ("the variables let through", fingerprint_of(&manifest.kept_environment)),
        ("the GPUs used", fingerprint_of(&manifest.devices)),
        ("the workload", fingerprint_of(&manifest.workload)),
        ("the arms", fingerprint_of(&manifest.arms.iter().map(|arm| arm.id.clone()).collect::<Vec<_>>())),
        ("the thresholds and sizes", fingerprint_of(&manifest.settings)),
        ("the seed", manifest.seed.to_string()),
        ("the backend", fingerprint_of(&manifest.backend)),
    ]);
    if let Some(warm_start) = &manifest.warm_start {
        parts.insert("the earlier run it began with", fingerprint_of(warm_start));
    }
    Identity(parts)
}

fn fingerprint_of(value: &impl serde::Serialize) -> String {
    Fingerprint::of(value).as_str().to_owned()
}

/// An opened journal with what it holds.
struct Opened {
    journal: Journal,
    evidence: Evidence,
    clock: Clock,
}

fn open(request: &TuneRequest, prepared: &Prepared, identity: &Identity, directory: &Path) -> Result<Opened, Failure> {
    let clock = match prepared.manifest.backend {
        BackendKind::Nccl => Clock::real(),
        BackendKind::Simulated | BackendKind::Replay => Clock::virtual_time(),
    };
    if !request.resume {
        let made = directory::create(directory)?;
        let mut journal = Journal::create(directory)?;
        if let Err(failure) = begin(request, &mut journal, prepared, identity, directory) {
            journal.abandon();
            directory::clear(directory, made, prepared.files.names());
            // Nothing is left to go on with, whatever the file at fault says of itself.
            return Err(match failure.kind() {
                ErrorKind::Stopped | ErrorKind::Usage => Failure::new(ErrorKind::Usage, failure.to_string())
                    .with_hint("the run did not begin and left nothing behind; free some space or name another --out"),
                _ => failure,
            });
        }
        return Ok(Opened { journal, evidence: Evidence::default(), clock });
    }
    // Looked at before it is opened for writing: a refused resume leaves everything as it was, a torn
    // tail included.
    require_same_run(&journal::read(directory)?, identity, directory)?;
    let reopened = Journal::reopen(directory)?;
    let mut evidence = Evidence::of(&reopened.lines);
    let elapsed_s = reopened.lines.last().map_or(0.0, |line| line.at_s);
    let mut journal = reopened.journal;
    let resumed = Event::RunResumed { segment: evidence.segments() + 1, dropped_bytes: reopened.dropped_bytes };
    // What the run holds is kept whatever happens here, so that this is no worse than any later stop.
    let line = journal.append(elapsed_s, resumed).map_err(|error| stopped(error.into(), directory))?;
    evidence.tell(&line.event);
    Ok(Opened { journal, evidence, clock: clock.continued_from(elapsed_s) })
}

/// The first lines of a new run.
fn begin(
    request: &TuneRequest,
    journal: &mut Journal,
    prepared: &Prepared,
    identity: &Identity,
    directory: &Path,
) -> Result<(), Failure> {
    // Before the manifest that names them.
    prepared.files.write(directory)?;
    prepared.tables.write_plugin(&prepared.manifest, directory)?;
    if let Some(plugin) = &prepared.call_plugin {
        plugin.write(directory)?;
    }
    write_manifest(directory, &prepared.manifest)?;
    if let Some(machine) = request.machine.as_deref().filter(|name| SimulatedMachine::named(name).is_none()) {
        // The run must not change when somebody edits that file.
        let text = read_small(Path::new(machine)).map_err(|error| Failure::new(ErrorKind::Usage, error))?;
        directory::write(directory, MACHINE_FILE, &text)?;
    }
    journal.append(
        0.0,
        Event::RunOpened {
            format: FORMAT,
            tool_version: prepared.manifest.tool_version.clone(),
            seed: prepared.manifest.seed,
            identity: identity.combined(),
            simulated: prepared.manifest.labels.simulated,
        },
    )?;
    journal.sync()?;
    Ok(())
}

/// Refuses to mix numbers of two runs, and names what differs.
fn require_same_run(lines: &[JournalLine], identity: &Identity, directory: &Path) -> Result<(), Failure> {
    let Some(Event::RunOpened { identity: known, .. }) = lines.first().map(|line| &line.event) else {
        return Err(Failure::new(ErrorKind::Usage, format!("{} holds an empty journal", directory.display()))
            .with_hint("start afresh in another directory"));
    };
    if *known == identity.combined() {
        return Ok(());
    }
    let before = self::identity(&directory::read::<Manifest>(directory, MANIFEST_FILE)?);
    let changed: Vec<&str> =
        identity.0.iter().filter(|(part, value)| before.0.get(*part) != Some(value)).map(|(part, _)| *part).collect();
    let changed = if changed.is_empty() { "the manifest".to_owned() } else { changed.join(", ") };
    Err(Failure::new(
        ErrorKind::Usage,
        format!("this is another run than the one in {}; what differs: {changed}", directory.display()),
    )
    .with_hint("old and new numbers cannot be compared; start a new run in another directory"))
}

fn write_manifest(directory: &Path, manifest: &Manifest) -> Result<(), Failure> {
    let text = serde_json::to_string_pretty(manifest).map_err(|error| Failure::new(ErrorKind::Unexpected, error))?;
    directory::write(directory, MANIFEST_FILE, &(text + "\n")).map_err(|failure| {
        // Before the first event nothing is lost: this is wrong usage (a full disk), not a stop.
        Failure::new(ErrorKind::Usage, failure.to_string())
    })
}

fn chosen_gpus(manifest: &Manifest) -> Vec<Gpu> {
    gpus_of(&manifest.machine, &manifest.devices)
}

fn backend(
    request: &TuneRequest,
    prepared: &Prepared,
    supervisor: &Rc<Supervisor>,
    directory: &Path,
    files: PathBuf,
) -> Result<Box<dyn Backend>, Failure> {
    let manifest = &prepared.manifest;
    let seed = Seed(manifest.seed);
    match (manifest.backend, &manifest.nccl, &prepared.recorded) {
        (BackendKind::Nccl, Some(nccl), _) => Ok(Box::new(NcclBackend::new(NcclSetup {
            supervisor: Rc::clone(supervisor),
            environment: worker_environment(&request.environment, &manifest.kept_environment, &manifest.pins),
            gpus: chosen_gpus(manifest),
            nccl: nccl.clone(),
            cublaslt: prepared.cublaslt.clone(),
            logs: directory.join(LOGS_FOLDER),
            files,
            phase_limit: request.phase_limit,
            buffers: manifest.settings.buffers,
        }))),
        (BackendKind::Replay, _, Some(lines)) => Ok(Box::new(ReplayBackend::new(lines, seed, request.assume_noise)?)),
        _ => {
            let machine = simulated_machine(request, Some(manifest))?;
            let backend = SimulatedBackend::new(machine, seed, as_map(&manifest.pins));
            Ok(Box::new(backend.with_folder(directory.to_owned())))
        }
    }
}

fn run(
    request: &TuneRequest,
    prepared: &Prepared,
    directory: &Path,
    opened: Opened,
    backend: &mut dyn Backend,
    supervisor: &Supervisor,
    listener: Listener<'_>,
) -> Result<TuneEnd, Failure> {
    let Opened { mut journal, mut evidence, mut clock } = opened;
    let pinned = as_map(&prepared.manifest.pins);
    let mut memory = Memory::of(request.state_folder.as_deref(), &whole(prepared.manifest.clone()), directory);
    let (mut manifest, mut context) = (prepared.manifest.clone(), prepared.context.clone());
    // Tables that a run taken up again has made already are searched among from the start, as they were when it was
    // stopped; otherwise they join where the search ends.
    let has_tables = manifest.tables.as_ref().is_some_and(|tables| !tables.arms.is_empty());
    let mut made = evidence.finalists().is_some() || request.resume && has_tables;
    if made {
        join(&mut context, &manifest);
    }
    let ending = loop {
        let ending = Campaign {
            context: &context,
            seed: Seed(manifest.seed),
            nccl_version: prepared.version,
            pinned: &pinned,
            stop: &|| match (supervisor.interrupted(), supervisor.killed()) {
                (_, true) => Stop::Now,
                (true, false) => Stop::AfterBlock,
                (false, false) => Stop::No,
            },
            listener: &mut |news| {
                if let (Some(memory), News::Line(line)) = (&mut memory, &news) {
                    memory.hear(&line.event, listener);
                }
                listener(Update::Campaign(news));
            },
        }
        .run(&WithTables { inner: strategy(&context.settings), made }, backend, &mut journal, &mut clock, &mut evidence)
        .map_err(|error| stopped(error, directory))?;
        if ending != Ending::Paused {
            break ending;
        }
        made = true;
        if manifest.tables.as_ref().is_none_or(|tables| tables.arms.is_empty()) {
            for notice in prepared.tables.make(&context, &evidence, &mut manifest, directory)? {
                listener(Update::Notice(notice));
            }
        }
        join(&mut context, &manifest);
        // What a table does is remembered like anything else.
        memory = Memory::of(request.state_folder.as_deref(), &whole(manifest.clone()), directory);
    };
    let manifest = whole(manifest);
    let is_cut_off = ending == Ending::Complete
        && !check_overlaps(
            &context,
            (request.overlap_s.unwrap_or(OVERLAP_S), Seed(prepared.manifest.seed)),
            backend,
            (&mut journal, &mut clock, &mut evidence),
            listener,
        )
        .map_err(|error| stopped(error, directory))?;
    if ending == Ending::Interrupt || is_cut_off {
        return Err(Failure::new(ErrorKind::Stopped, "stopped before a verdict; everything measured is kept")
            .with_hint(resume_hint(directory)));
    }
    if evidence.measured_cells() == 0 {
        return Err(nothing_measured(&manifest, &evidence, directory));
    }
    // A search that the budget cut short may still have had a whole final.
    let cut_short = evidence.finalists().is_some_and(|(_, _, reason)| reason.starts_with(CUT_SHORT));
    let stopped_by = if cut_short { Ending::Budget } else { ending };
    let mut notes = backend.notes();
    notes.extend(findings(&manifest.dead_axes, &context, &evidence));
    let facts = CampaignFacts { stopped_by: stopped_by.name().to_owned(), wall_s: clock.elapsed_s(), notes };
    let choice = judge(&manifest, &context, &evidence, &facts);
    if ending == Ending::Budget && choice.verdict == VerdictKind::Undecided {
        return Err(Failure::new(
            ErrorKind::Stopped,
            format!("the time budget ended before a verdict: {}", choice.reason),
        )
        .with_hint(resume_hint(directory)));
    }
    write_answer(directory, &manifest, &context.points, &evidence, &choice, listener)?;
    Ok(TuneEnd::Answered { choice: Box::new(choice), manifest: Box::new(manifest), directory: directory.to_owned() })
}

/// Adds the tables of a run to what is measured.
fn join(context: &mut SearchContext, manifest: &Manifest) {
    for arm in manifest.tables.iter().flat_map(|tables| &tables.arms) {
        if !context.arms.iter().any(|known| known.id == arm.id) {
            context.arms.push(arm.clone());
        }
    }
}

fn resume_hint(directory: &Path) -> String {
    format!("go on with: nccltune tune --resume --out {}", directory.display())
}

fn stopped(error: CampaignError, directory: &Path) -> Failure {
    let resumable = matches!(error, CampaignError::Journal(JournalError::Io { .. }));
    let failure = Failure::from(error);
    if resumable {
        let hint = failure.hint().map(|hint| format!("{hint}; ")).unwrap_or_default();
        return failure.with_hint(format!("{hint}{}", resume_hint(directory)));
    }
    failure
}

fn nothing_measured(manifest: &Manifest, evidence: &Evidence, directory: &Path) -> Failure {
    let mut kinds: Vec<String> = evidence
        .failures()
        .iter()
        .rev()
        .take(3)
        .map(|failure| format!("{}: {}", failure.kind.name(), failure.detail))
        .collect();
    kinds.dedup();
    let failure = Failure::new(ErrorKind::NothingMeasured, format!("nothing could be measured; {}", kinds.join("; ")));
    if manifest.backend == BackendKind::Replay {
        return failure.with_hint("a replay knows the points and arms that were recorded, and no others");
    }
    failure.with_hint(format!(
        "`nccltune doctor` may know why; what the workers printed is in {}",
        directory.join(LOGS_FOLDER).display()
    ))
}

fn write_answer(
    directory: &Path,
    manifest: &Manifest,
    points: &[PointKey],
    evidence: &Evidence,
    choice: &Choice,
    listener: Listener<'_>,
) -> Result<(), Failure> {
    let json = serde_json::to_string_pretty(choice).map_err(|error| Failure::new(ErrorKind::Unexpected, error))?;
    let here = std::path::absolute(directory).map_err(|error| Failure::new(ErrorKind::Unexpected, error))?;
    directory::write(directory, SUMMARY_FILE, &summary_csv(&summary(&manifest.arms, points, evidence)))?;
    for emit_as in EmitAs::KEPT {
        match render(choice, manifest, &here, emit_as, &effect_of) {
            Ok(text) => directory::write(directory, emit_as.file_name(), &text)?,
            // A value that one dialect cannot say is still right in the others.
            Err(error) => {
                let hint = error.hint().map(|hint| format!("; {hint}")).unwrap_or_default();
                listener(Update::Notice(format!("{} is not written: {error}{hint}", emit_as.file_name())));
            }
        }
    }
    // A page that cannot be drawn is no reason to withhold the answer.
    match page(manifest, Some(choice), evidence, &journal::read(directory)?) {
        Ok(text) => directory::write(directory, REPORT_FILE, &text)?,
        Err(error) => listener(Update::Notice(format!("{REPORT_FILE} is not written: {error}"))),
    }
    // Last: a directory with a choice is complete.
    directory::write(directory, CHOICE_FILE, &(json + "\n"))
}

/// What would be done, without doing it.
fn plan(prepared: Prepared, request: &TuneRequest) -> Result<Plan, Failure> {
    let context = &prepared.context;
    let points = context.points.len();
    let Want::Block { phase: Phase::Search, arms } = strategy(&context.settings).next(context, &Evidence::default())
    else {
        return Err(Failure::new(ErrorKind::Unexpected, "the search begins with no block"));
    };
    let (block, last) = {
        let mut listener = |_: crate::campaign::News<'_>| {};
        let campaign = Campaign {
            context,
            seed: Seed(prepared.manifest.seed),
            nccl_version: prepared.version,
            pinned: &as_map(&prepared.manifest.pins),
            stop: &|| Stop::No,
            listener: &mut listener,
        };
        let plan = |phase, arms: &[ArmId]| -> Vec<LaunchPlan> { campaign.plan_block(0, phase, arms, &mut 0) };
        (plan(Phase::Search, &arms), plan(Phase::Final, std::slice::from_ref(&context.default)))
    };
    let seconds = |plans: &[LaunchPlan]| plans.iter().map(expected_on_gpus_s).sum();
    let finalists = prepared.manifest.settings.finalists as usize + 1;
    let launches = request.final_launches.unwrap_or(12) as usize;
    let search_arm_launches =
        racing_launches(context).unwrap_or(arms.len() * prepared.manifest.settings.search_blocks as usize);
    Ok(Plan {
        launches_per_block: block.len(),
        search_cells: search_arm_launches * points,
        search_blocks: search_arm_launches as f64 / arms.len().max(1) as f64,
        final_cells: finalists * launches * points,
        block_s: seconds(&block),
        final_launch_s: seconds(&last),
        trial: context.trial.clone(),
        manifest: prepared.manifest,
    })
}
