//! `nccltune import`: what nccl-tests printed becomes a run that can be reported and replayed.
//!
//! Each file is a launch of one arm. The k-th launches of all arms form block k, so that a replay
//! pairs them; the first blocks stand for the search, the rest for the final, since what chose the
//! finalists must not judge them too. Whatever is imported later joins the run: its journal is then
//! written anew, as a function of the files alone.

use std::collections::{BTreeMap, BTreeSet};
use std::io::Read;
use std::path::{Path, PathBuf};

use super::directory::{self, MANIFEST_FILE, SUMMARY_FILE};
use super::environment::parse_pins;
use super::summary::summary;
use crate::canonical::Fingerprint;
use crate::clock::wall_time;
use crate::collective::{Collective, Placement};
use crate::error_kind::{Classified, ErrorKind, Failure};
use crate::evidence::{Evidence, measured_points};
use crate::fingerprint::{self, Described};
use crate::journal::{JOURNAL_FILE, Journal, LOCK_FILE};
use crate::knob;
use crate::machine::{Gpu, Machine, NcclVersion};
use crate::nccl_log::{self, NcclLog};
use crate::nccl_tests::{self, Launch, Wish};
use crate::record::{
    Arm, ArmId, BackendKind, BlockLaunch, CellMeasurement, CheckReport, Effective, Event, FORMAT, FingerprintParts,
    ImportedFile, JournalLine, Labels, Manifest, NamedArm, Outcome, OutcomeKind, Phase, Pin, Point, PointKey,
    PointPhase, Settings, Space, Workload,
};
use crate::report::{SummaryRow, summary_csv};
use crate::space::arm_of;
use crate::wording::{IMPORTED_ORIGIN, plural, printable};

/// Name of the space, and of the workload, of an imported run.
const IMPORTED: &str = "imported";
/// Most files of a run.
const MAX_FILES: usize = 10_000;
/// The NCCL whose rules apply to `--env`: what is imported may be of any.
const RULES_OF: NcclVersion = crate::doctor::VERIFIED;
/// Blocks of the search by launches of the arm that has fewest; the rest is the final, which decides
/// nothing with fewer than four.
const SEARCH_BLOCKS: [(u32, u32); 3] = [(12, 3), (8, 2), (0, 1)];
/// Launches of every arm with which a verdict can be reached.
pub const FEWEST_LAUNCHES: u32 = 5;

/// What the user asked for.
#[derive(Debug, Clone, Default)]
pub struct ImportRequest {
    /// Run directory: new, or an imported run.
    pub out: PathBuf,
    /// Outputs of nccl-tests, each a launch.
    pub files: Vec<PathBuf>,
    /// NAME=VALUE of the arm; none for the default.
    pub env: Vec<String>,
    /// NAME=VALUE that held in every launch, the default's too.
    pub pins: Vec<String>,
    /// Ranks of an operation, where the output does not say.
    pub ranks: Option<u32>,
    /// The collective, likewise.
    pub collective: Option<Collective>,
    /// Which of the two times counts.
    pub placement: Option<Placement>,
    /// What the machine is called.
    pub machine_name: Option<String>,
    /// What was typed.
    pub arguments: Vec<String>,
}

/// What became of it.
#[derive(Debug)]
pub struct Imported {
    /// The run as it is now.
    pub manifest: Manifest,
    /// What it holds.
    pub evidence: Evidence,
    /// The arm that was imported.
    pub arm: Arm,
    /// What was left out, file by file.
    pub remarks: Vec<String>,
}

/// One launch, whichever block it will be in.
struct Recorded {
    arm: ArmId,
    cells: Vec<CellMeasurement>,
    failures: Vec<(Option<PointKey>, Outcome)>,
}

/// A file that was read.
struct ReadFile {
    name: String,
    sha256: String,
    launch: Launch,
    log: NcclLog,
}

/// Runs the whole story. Everything is read before anything is written.
pub fn import(request: &ImportRequest) -> Result<Imported, Failure> {
    let usage = |text: String| Failure::new(ErrorKind::Usage, text);
    if request.files.is_empty() {
        return Err(usage("there is no file to import".to_owned()));
    }
    let variables = |texts: &[String]| -> Result<BTreeMap<String, String>, Failure> {
        let pins = parse_pins(texts, RULES_OF)?;
        let canonical =
            |pin: Pin| (knob::canonical_value(&pin.variable, &pin.value).unwrap_or(pin.value), pin.variable);
        Ok(pins.into_iter().map(canonical).map(|(value, variable)| (variable, value)).collect())
    };
    let env = variables(&request.env).map_err(|failure| usage(failure.to_string().replace("--pin ", "--env ")))?;
    let pins = parse_pins(&request.pins, RULES_OF)?;
    if let Some(pin) = pins.iter().find(|pin| env.contains_key(&pin.variable)) {
        return Err(usage(format!("{} is given both as --env and as --pin", pin.variable)));
    }
    let arm = arm_of(env);
    let mut files = Vec::new();
    for path in &request.files {
        files.push(read_file(path, request, &arm, &pins)?);
    }

    let existing = request.out.join(MANIFEST_FILE).exists();
    // The lock is held until everything is written.
    let (previous, lines, _lock) = if existing {
        let manifest: Manifest = directory::read(&request.out, MANIFEST_FILE)?;
        if !manifest.labels.imported || manifest.recorded.is_some() {
            return Err(usage(format!("{} holds a run that was not imported", request.out.display()))
                .with_hint("measured and imported figures are not mixed; name another --out"));
        }
        let reopened = Journal::reopen(&request.out)?;
        (Some(manifest), reopened.lines, Some(reopened.journal))
    } else {
        (None, Vec::new(), None)
    };
    let mut run = Run::of(previous.as_ref(), &lines);
    run.add(&files, &arm)?;
    let manifest = run.manifest(request, previous.as_ref(), &files, &pins, &arm)?;
    let events = run.events(&manifest);
    let mut evidence = Evidence::default();
    for event in &events {
        evidence.tell(event);
    }
    let made = if existing { false } else { directory::create(&request.out)? };
    if let Err(failure) = write(&request.out, &manifest, events, &evidence) {
        if !existing {
            directory::clear(&request.out, made, [JOURNAL_FILE, LOCK_FILE].into_iter());
        }
        return Err(failure);
    }
    let remarks = files
        .iter()
        .flat_map(|file| {
            let failure = file.launch.failure.iter().map(|failure| format!("the launch failed: {failure}"));
            file.launch.remarks.iter().cloned().chain(failure).map(|remark| format!("{}: {remark}", file.name))
        })
        .collect();
    Ok(Imported { manifest, evidence, arm, remarks })
}

fn read_file(path: &Path, request: &ImportRequest, arm: &Arm, pins: &[Pin]) -> Result<ReadFile, Failure> {
    let named = |kind: ErrorKind, text: &dyn std::fmt::Display| {
        Failure::new(kind, format!("{}: {text}", printable(&path.display().to_string(), 400)))
    };
    let mut bytes = Vec::new();
    let file = fs_err::File::open(path).map_err(|error| Failure::new(ErrorKind::Usage, error))?;
    file.take(nccl_tests::MAX_BYTES + 1)
        .read_to_end(&mut bytes)
        .map_err(|error| Failure::new(ErrorKind::Usage, error))?;
    let wish = Wish { ranks: request.ranks, collective: request.collective, placement: request.placement };
    let refused = |error: nccl_tests::ReadError| match error.hint() {
        Some(hint) => named(error.kind(), &error).with_hint(hint),
        None => named(error.kind(), &error),
    };
    let output = nccl_tests::read(&bytes).map_err(refused)?;
    let launch = output.launch(&wish).map_err(refused)?;
    let log = nccl_log::parse(&bytes);
    let told: BTreeMap<&str, &str> = arm
        .env
        .iter()
        .map(|(name, value)| (name.as_str(), value.as_str()))
        .chain(pins.iter().map(|pin| (pin.variable.as_str(), pin.value.as_str())))
        .collect();
    if let Some(problem) = contradiction(&told, output.environment.as_deref(), &log) {
        return Err(named(ErrorKind::Usage, &problem)
            .with_hint("--env says what an arm set beside the default, --pin what held in every launch"));
    }
    let name = path.file_name().map_or_else(String::new, |name| printable(&name.to_string_lossy(), 200));
    let digest =
        Fingerprint::of_reader(bytes.as_slice()).map_err(|error| Failure::new(ErrorKind::Unexpected, error))?;
    Ok(ReadFile { name, sha256: digest.as_str().to_owned(), launch, log })
}

/// Where the file itself says that it ran under other variables than the user says.
fn contradiction(
    told: &BTreeMap<&str, &str>,
    environment: Option<&[(String, String)]>,
    log: &NcclLog,
) -> Option<String> {
    // What NCCL prints or dumps is no setting, and images set variables that NCCL never reads.
    let counts = |name: &str| {
        knob::names().any(|known| known == name) && !name.starts_with("NCCL_DEBUG") && !name.contains("DUMP_FILE")
    };
    let canonical = |name: &str, value: &str| knob::canonical_value(name, value).unwrap_or_else(|_| value.to_owned());
    if let Some(environment) = environment {
        for (name, value) in environment.iter().filter(|(name, _)| counts(name)) {
            match told.get(name.as_str()) {
                None => return Some(format!("it ran with {name}={value}, which neither --env nor --pin says")),
                Some(said) if canonical(name, value) != canonical(name, said) => {
                    return Some(format!("it ran with {name}={value}, not with {name}={said}"));
                }
                Some(_) => {}
            }
        }
        let missing = told.keys().find(|name| counts(name) && !environment.iter().any(|(known, _)| known == *name));
        return missing.map(|name| format!("it ran without {name}, which was said to be set"));
    }
    log.set_by_environment
        .iter()
        .find(|line| counts(&line.variable) && !told.contains_key(line.variable.as_str()))
        .map(|line| format!("NCCL read {}={} in it, which neither --env nor --pin says", line.variable, line.value))
}

/// The launches of a run by arm, the default first.
#[derive(Default)]
struct Run {
    arms: Vec<Arm>,
    launches: BTreeMap<ArmId, Vec<Recorded>>,
    files: Vec<ImportedFile>,
}

impl Run {
    /// What an imported run holds: its journal says, the manifest names it.
    fn of(previous: Option<&Manifest>, lines: &[JournalLine]) -> Self {
        let mut run = Self::default();
        let Some(manifest) = previous else { return run };
        run.arms.clone_from(&manifest.arms);
        let mut launches: BTreeMap<u32, Recorded> = BTreeMap::new();
        let mut order = Vec::new();
        for line in lines {
            match &line.event {
                Event::BlockPlanned { launches: planned, .. } => {
                    for launch in planned {
                        let Some(arm) = launch.arms.first().cloned() else { continue };
                        order.push(launch.launch);
                        launches.insert(launch.launch, Recorded { arm, cells: Vec::new(), failures: Vec::new() });
                    }
                }
                Event::CellMeasured(cell) => {
                    if let Some(launch) = launches.get_mut(&cell.launch) {
                        launch.cells.push(cell.clone());
                    }
                }
                Event::CellFailed { launch, point, outcome, .. } => {
                    if let Some(launch) = launches.get_mut(launch) {
                        launch.failures.push((*point, outcome.clone()));
                    }
                }
                _ => {}
            }
        }
        for number in order {
            if let Some(launch) = launches.remove(&number) {
                run.launches.entry(launch.arm.clone()).or_default().push(launch);
            }
        }
        let count = |arm: &ArmId| run.launches.get(arm).map_or(0, Vec::len);
        // A manifest that was written before a crash may name a file whose launch never came.
        run.files = manifest
            .imported_files
            .iter()
            .filter(|file| (file.position as usize) < count(&file.arm))
            .cloned()
            .collect();
        run
    }

    fn add(&mut self, files: &[ReadFile], arm: &Arm) -> Result<(), Failure> {
        if self.arms.is_empty() {
            self.arms.push(arm_of(BTreeMap::new()));
        }
        if !self.arms.iter().any(|known| known.id == arm.id) {
            self.arms.push(arm.clone());
        }
        for file in files {
            if let Some(known) = self.files.iter().find(|known| known.sha256 == file.sha256) {
                return Err(Failure::new(
                    ErrorKind::Usage,
                    format!("{} was imported before, as {}: a launch counts once", file.name, known.file),
                ));
            }
            if self.files.len() >= MAX_FILES {
                return Err(Failure::new(ErrorKind::Usage, format!("more than {MAX_FILES} files in one run")));
            }
            let position = self.launches.get(&arm.id).map_or(0, Vec::len) as u32;
            self.files.push(ImportedFile {
                file: file.name.clone(),
                sha256: file.sha256.clone(),
                arm: arm.id.clone(),
                position,
            });
            self.launches.entry(arm.id.clone()).or_default().push(recorded(file, arm));
        }
        Ok(())
    }

    /// Points that every arm was tried at.
    fn points(&self) -> Vec<PointKey> {
        let mut common: Option<BTreeSet<PointKey>> = None;
        for launches in self.launches.values() {
            let tried: BTreeSet<PointKey> = launches
                .iter()
                .flat_map(|launch| {
                    let failed = launch.failures.iter().filter_map(|(point, _)| *point);
                    launch.cells.iter().map(|cell| cell.point).chain(failed)
                })
                .collect();
            // An arm that never got as far says nothing about points.
            if tried.is_empty() {
                continue;
            }
            common = Some(match common {
                Some(common) => common.intersection(&tried).copied().collect(),
                None => tried,
            });
        }
        common.unwrap_or_default().into_iter().collect()
    }

    fn fewest_launches(&self) -> u32 {
        self.arms.iter().map(|arm| self.launches.get(&arm.id).map_or(0, Vec::len)).min().unwrap_or(0) as u32
    }

    fn manifest(
        &self,
        request: &ImportRequest,
        previous: Option<&Manifest>,
        files: &[ReadFile],
        pins: &[Pin],
        arm: &Arm,
    ) -> Result<Manifest, Failure> {
        let usage = |text: String| Failure::new(ErrorKind::Usage, text);
        let known = previous.map(|manifest| (manifest.workload.tensor_parallel, manifest.workload.points.first()));
        let mut ranks = known.and_then(|(ranks, point)| point.map(|_| ranks));
        let mut placement = known.and_then(|(_, point)| point).map(|point| point.origin.clone());
        for file in files.iter().filter(|file| !file.launch.cells.is_empty()) {
            let here = file.launch.ranks.unwrap_or(0);
            if *ranks.get_or_insert(here) != here {
                let ranks = ranks.unwrap_or(0);
                return Err(usage(format!("{} is of {here} ranks, the others are of {ranks}", file.name))
                    .with_hint("a run is of one number of ranks; import the others into another --out"));
            }
            let here = origin(file.launch.placement);
            if *placement.get_or_insert_with(|| here.clone()) != here {
                let others = placement.unwrap_or_default();
                return Err(usage(format!("{} is {here}, the others are {others}", file.name))
                    .with_hint("say which time counts for all of them: --placement in-place or out-of-place"));
            }
        }
        if let Some(manifest) = previous
            && manifest.pins != pins
        {
            return Err(usage("the files of a run were all measured under the same --pin".to_owned()).with_hint(
                match manifest.pins.as_slice() {
                    [] => "the earlier files were imported without any".to_owned(),
                    pins => {
                        let words: Vec<String> =
                            pins.iter().map(|pin| format!("--pin {}={}", pin.variable, pin.value)).collect();
                        format!("the earlier files were imported with {}", words.join(" "))
                    }
                },
            ));
        }
        let points = self.points();
        if points.is_empty() && self.launches.values().flatten().any(|launch| !launch.cells.is_empty()) {
            return Err(usage(format!("no size of {} was measured with every other arm of the run too", arm.name))
                .with_hint("arms are compared size by size; import files with the same sizes, type and collective"));
        }
        let ranks = ranks.unwrap_or(request.ranks.unwrap_or(0));
        let (machine, devices) = machine(request, previous, files, ranks);
        let nccl_version = files.iter().find_map(|file| file.launch.nccl_version);
        let workload = workload(&points, ranks, &placement.unwrap_or_default());
        let named = self.arms.iter().filter(|arm| !arm.env.is_empty());
        let space = Space {
            format: FORMAT,
            name: IMPORTED.to_owned(),
            description: "The arms that nccl-tests was run with.".to_owned(),
            axis: Vec::new(),
            arm: named
                .map(|arm| NamedArm {
                    name: arm.name.clone(),
                    note: String::new(),
                    env: arm.env.clone(),
                    files: BTreeMap::new(),
                })
                .collect(),
            rule: Vec::new(),
        };
        let fewest = self.fewest_launches();
        let search_blocks =
            SEARCH_BLOCKS.iter().find(|(launches, _)| fewest >= *launches).map_or(1, |(_, blocks)| *blocks);
        let mut parts = match (previous, nccl_version) {
            (Some(manifest), _) => manifest.fingerprint.clone(),
            (None, version) => {
                let mut parts = fingerprint::parts(&Described {
                    machine: &machine,
                    devices: &devices,
                    nccl: None,
                    simulation: None,
                    host: None,
                });
                if let Some(version) = version {
                    parts.parts.insert("nccl".to_owned(), NcclVersion::from_code(version).to_string());
                }
                parts.parts.insert("measured-by".to_owned(), "nccl-tests".to_owned());
                parts
            }
        };
        parts = FingerprintParts { combined: Fingerprint::of(&parts.parts).as_str().to_owned(), ..parts };
        Ok(Manifest {
            warm_start: None,
            format: FORMAT,
            tool_version: env!("CARGO_PKG_VERSION").to_owned(),
            commit: option_env!("NCCLTUNE_COMMIT").map(str::to_owned),
            created: humantime::format_rfc3339_seconds(wall_time()).to_string(),
            arguments: request.arguments.clone(),
            seed: 1,
            backend: BackendKind::Replay,
            labels: Labels {
                imported: true,
                host_memory: pins.iter().any(|pin| pin.variable == "NCCL_P2P_DISABLE" && pin.value == "1"),
                ..Labels::default()
            },
            machine,
            fingerprint: parts,
            nccl: None,
            pins: pins.to_vec(),
            kept_environment: Vec::new(),
            devices,
            workload,
            space,
            arms: self.arms.clone(),
            quarantined: Vec::new(),
            notices: notices(files, nccl_version, previous),
            settings: Settings { search_blocks, ..Settings::default() },
            trial: None,
            checks: CheckReport { format: FORMAT, checks: Vec::new() },
            recorded: None,
            imported_files: self.files.clone(),
            misjudged: None,
            tables: None,
            makes_tables: false,
            call_plugin: None,
            peer_access: None,
            space_arms: None,
            dead_axes: Vec::new(),
            cold_and_warm: None,
            gate: None,
        })
    }

    /// The journal: block by block, the default first in each.
    fn events(&self, manifest: &Manifest) -> Vec<Event> {
        let identity = Fingerprint::of(&self.files).as_str().to_owned();
        let mut events = vec![Event::RunOpened {
            format: FORMAT,
            tool_version: manifest.tool_version.clone(),
            seed: manifest.seed,
            identity,
            simulated: false,
        }];
        let blocks = self.launches.values().map(Vec::len).max().unwrap_or(0);
        let mut number = 0;
        for block in 0..blocks {
            let here: Vec<(&Arm, &Recorded)> =
                self.arms.iter().filter_map(|arm| Some((arm, self.launches.get(&arm.id)?.get(block)?))).collect();
            let block = block as u32;
            let phase = if block < manifest.settings.search_blocks { Phase::Search } else { Phase::Final };
            let first = number;
            let launches = (first..)
                .zip(&here)
                .map(|(launch, (arm, _))| BlockLaunch { launch, arms: vec![arm.id.clone()] })
                .collect();
            events.push(Event::BlockPlanned { block, phase, launches });
            for (arm, recorded) in here {
                let launch = number;
                number += 1;
                events.push(Event::LaunchStarted { launch, block, env: arm.env.clone() });
                for (position, cell) in (0..).zip(&recorded.cells) {
                    let cell = CellMeasurement { block, launch, position, ..cell.clone() };
                    events.push(Event::CellMeasured(cell));
                }
                for (point, outcome) in &recorded.failures {
                    events.push(Event::CellFailed {
                        arm: arm.id.clone(),
                        point: *point,
                        block,
                        launch,
                        outcome: outcome.clone(),
                        duration_s: 0.0,
                    });
                }
                events.push(Event::LaunchEnded {
                    launch,
                    duration_s: 0.0,
                    set_by_environment: Vec::new(),
                    outcome: None,
                });
            }
            events.push(Event::BlockEnded { block });
        }
        events
    }
}

fn recorded(file: &ReadFile, arm: &Arm) -> Recorded {
    let mut recorded = Recorded { arm: arm.id.clone(), cells: Vec::new(), failures: Vec::new() };
    for cell in &file.launch.cells {
        if let Some(wrong) = &cell.wrong {
            let outcome = Outcome { kind: OutcomeKind::WrongResult, detail: wrong.clone() };
            recorded.failures.push((Some(cell.point), outcome));
            continue;
        }
        recorded.cells.push(CellMeasurement {
            arm: arm.id.clone(),
            point: cell.point,
            block: 0,
            launch: 0,
            communicator: 0,
            position: 0,
            collectives_per_replay: cell.iterations.unwrap_or(1).max(1),
            replays_us: cell.times_us.clone(),
            effective: effective(&file.log, cell.point),
            flags: Vec::new(),
            call: None,
            duration_s: 0.0,
        });
    }
    if let Some(failure) = &file.launch.failure {
        let timed_out = failure.contains("timeout");
        let kind = if timed_out { OutcomeKind::TimedOut } else { OutcomeKind::Crashed };
        recorded.failures.push((None, Outcome { kind, detail: failure.clone() }));
    }
    recorded
}

/// What ran, where NCCL's log stands in the file.
fn effective(log: &NcclLog, point: PointKey) -> Effective {
    let operation = log.operation(point.collective, point.bytes);
    Effective {
        transport: log.transport(),
        communicator_channels: log.communicator_channels(),
        algo: operation.map(|operation| operation.algo.clone()).filter(|algo| !algo.is_empty()),
        proto: operation.and_then(|operation| operation.proto.clone()),
        channels: operation.and_then(|operation| operation.channels),
        threads: None,
    }
}

fn origin(placement: Placement) -> String {
    format!("{IMPORTED_ORIGIN}, {}", placement.name())
}

fn workload(points: &[PointKey], ranks: u32, origin: &str) -> Workload {
    let weight = 1.0 / points.len().max(1) as f64;
    Workload {
        format: FORMAT,
        model: "nccl-tests".to_owned(),
        engine: "none".to_owned(),
        tensor_parallel: ranks,
        verify_tokens: 1,
        points: (1..)
            .zip(points)
            .map(|(batch, point)| Point {
                collective: point.collective,
                dtype: point.dtype,
                bytes: point.bytes,
                ranks: point.ranks,
                calls_per_pass: 1,
                batch,
                weight,
                phase: PointPhase::Size,
                form: point.form,
                measured: true,
                origin: origin.to_owned(),
            })
            .collect(),
        guard: Vec::new(),
        assumptions: vec!["sizes are those of the imported files: one call each, all counting the same".to_owned()],
        ..Workload::default()
    }
}

/// The machine as far as the lists of devices tell.
fn machine(
    request: &ImportRequest,
    previous: Option<&Manifest>,
    files: &[ReadFile],
    ranks: u32,
) -> (Machine, Vec<u32>) {
    if let Some(manifest) =
        previous.filter(|manifest| !manifest.machine.gpus.is_empty() || request.machine_name.is_none())
    {
        let name = request.machine_name.clone().unwrap_or_else(|| manifest.machine.name.clone());
        return (Machine { name, ..manifest.machine.clone() }, manifest.devices.clone());
    }
    let devices = files.iter().map(|file| &file.launch.devices).find(|devices| !devices.is_empty());
    let gpus: Vec<Gpu> = devices
        .filter(|devices| devices.len() >= ranks as usize)
        .into_iter()
        .flatten()
        .take(ranks as usize)
        .zip(0..)
        .map(|(device, index)| Gpu {
            index,
            uuid: "unknown".to_owned(),
            name: device.name.clone(),
            pci_bus_id: device.address.clone(),
            memory_total_mib: None,
            memory_free_mib: None,
            compute_capability: None,
            pcie_generation: None,
            pcie_width: None,
            nvlinks: None,
            persistence: None,
            utilization_percent: None,
            process_ids: Vec::new(),
        })
        .collect();
    let listed = devices.and_then(|devices| devices.first()).map(|device| format!("{ranks}x {}", device.name));
    let name = match (&request.machine_name, gpus.is_empty()) {
        (Some(name), _) => printable(name, 200),
        (None, false) => Machine::describe_gpus(&gpus),
        (None, true) => listed.unwrap_or_else(|| "a machine that is not named".to_owned()),
    };
    let positions = gpus.iter().map(|gpu| gpu.index).collect();
    (Machine { name, driver: None, cuda_driver_version: None, cpu: None, gpus }, positions)
}

fn notices(files: &[ReadFile], nccl_version: Option<i32>, previous: Option<&Manifest>) -> Vec<String> {
    let mut notices = previous.map(|manifest| manifest.notices.clone()).unwrap_or_default();
    let mut add = |notice: String| {
        if !notices.contains(&notice) && notices.len() < 100 {
            notices.push(notice);
        }
    };
    add("the order of the launches is not known: drift over time cannot be told from a difference of arms".to_owned());
    if let Some(version) = nccl_version {
        add(format!("nccl-tests ran with NCCL {}", NcclVersion::from_code(version)));
    }
    for file in files {
        for remark in &file.launch.remarks {
            add(format!("{}: {remark}", file.name));
        }
    }
    notices
}

/// Manifest, journal and table, in an order in which a crash between two of them loses nothing: a
/// manifest may name more than the journal holds.
fn write(directory: &Path, manifest: &Manifest, events: Vec<Event>, evidence: &Evidence) -> Result<(), Failure> {
    let unusable = |error: std::io::Error| Failure::new(ErrorKind::Usage, error);
    // Written beside, and moved into place as a whole.
    let scratch = tempfile::tempdir_in(directory).map_err(unusable)?;
    let mut journal = Journal::create(scratch.path())?;
    for event in events {
        journal.append(0.0, event)?;
    }
    journal.sync()?;
    let json = serde_json::to_string_pretty(manifest).map_err(|error| Failure::new(ErrorKind::Unexpected, error))?;
    directory::write(directory, MANIFEST_FILE, &(json + "\n"))?;
    fs_err::rename(scratch.path().join(JOURNAL_FILE), directory.join(JOURNAL_FILE)).map_err(unusable)?;
    if !directory.join(LOCK_FILE).exists() {
        // As every run directory has one.
        fs_err::rename(scratch.path().join(LOCK_FILE), directory.join(LOCK_FILE)).map_err(unusable)?;
    }
    let rows = summary(&manifest.arms, &measured_points(&manifest.workload), evidence);
    directory::write(directory, SUMMARY_FILE, &summary_csv(&rows))
}

/// Every arm at every size, as summary.csv has it.
pub fn rows(imported: &Imported) -> Vec<SummaryRow> {
    summary(&imported.manifest.arms, &measured_points(&imported.manifest.workload), &imported.evidence)
}

/// What can be done with the run as it is, in a sentence.
pub fn next_step(imported: &Imported, out: &Path) -> String {
    let launches = |arm: &Arm| imported.manifest.imported_files.iter().filter(|file| file.arm == arm.id).count() as u32;
    let default = imported.manifest.arms.first().map_or(0, launches);
    let others: Vec<u32> = imported.manifest.arms.iter().skip(1).map(launches).collect();
    let out = out.display();
    match (default, others.iter().min()) {
        (0, _) => format!("import launches of the default too, without --env, into {out}: arms are compared with it"),
        (_, None) => format!("import launches with other variables, with --env NAME=VALUE, into {out}"),
        (_, Some(fewest)) if default.min(*fewest) < FEWEST_LAUNCHES => format!(
            "a verdict needs {FEWEST_LAUNCHES} launches of the default and of each arm, taken in turn; the fewest are {} {}",
            default.min(*fewest),
            plural(default.min(*fewest), "launch", "launches")
        ),
        (_, Some(_)) => format!("judge it: nccltune tune --backend replay --recorded {out}"),
    }
}
