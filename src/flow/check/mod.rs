//! `nccltune check`: after an update, is this env file still right here?
//!
//! First what changed, part by part. Then the default and the file's variables side by side, in fresh processes, at the
//! points of the run that the file came from, for less than two minutes.

mod again;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::time::Duration;

use super::deployed::Deployed;
use super::directory::{self, CHOICE_FILE, LOGS_FOLDER};
use super::environment::{Held, as_map, worker_environment};
use super::facts::BackendChoice;
use super::live::gpus_of;
use super::tables::whole;
use super::tune::{Measured, TuneRequest, choose_backend, devices_for, measured_machine, pins, simulated_machine};
use super::workload::WorkloadWish;
use super::{Listener, Update};
use crate::backend::Backend;
use crate::backend::nccl::{NcclBackend, NcclSetup};
use crate::backend::simulated::SimulatedBackend;
use crate::campaign::{Campaign, Ending, Stop};
use crate::choice::{judge_update, ratio_at};
use crate::clock::Clock;
use crate::discovery::GpuLocks;
use crate::engine::{Engine, EngineVersion};
use crate::error_kind::{ErrorKind, Failure};
use crate::evidence::{Evidence, Objective, default_arm, measured_points};
use crate::file_kind::FileKind;
use crate::fingerprint::{Compared, Standing, Weight, compare, told};
use crate::journal::Journal;
use crate::process::Supervisor;
use crate::record::{
    Arm, BackendKind, CheckedPoint, Choice, Event, FORMAT, Manifest, PartChange, Phase, Pin, Point, PointKey,
    PointVerdict, UpdateCheck, UpdateVerdict, VerdictKind,
};
use crate::search::{CONFIDENCE, Confirm, PAIRS, SearchContext};
use crate::seed::Seed;

use self::again::tune_again;

/// Seconds of launches where nothing else is asked for: with everything before them, less than two minutes.
const TIME_BUDGET_S: f64 = 100.0;
/// The longest any phase of a step may take: what hangs must not use the time up, and a cold start of eight GPUs takes
/// half of it.
const PHASE_LIMIT: Duration = Duration::from_secs(60);

/// What the user asked for.
#[derive(Debug, Clone, Default)]
pub struct CheckRequest {
    /// The file.
    pub env_file: PathBuf,
    /// The run it came from, where nothing beside it says so.
    pub run: Option<PathBuf>,
    /// What should measure.
    pub backend: BackendChoice,
    /// Simulated machine, by name or file.
    pub machine: Option<String>,
    /// The NCCL library.
    pub nccl_lib: Option<PathBuf>,
    /// GPUs, by position or identity; those of the run without.
    pub devices: Vec<String>,
    /// Measure although doctor refuses.
    pub force: bool,
    /// Seconds that launches may take.
    pub time_budget_s: Option<f64>,
    /// Seed of orders and data.
    pub seed: Option<u64>,
    /// Where earlier runs left what they remember.
    pub state_folder: Option<PathBuf>,
    /// The environment the tool was started in.
    pub environment: BTreeMap<String, String>,
}

/// Everything that is known before the first launch.
struct Situation<'a> {
    request: &'a CheckRequest,
    file: Deployed,
    run: PathBuf,
    manifest: Manifest,
    choice: Choice,
}

/// Checks a file.
pub fn check(request: &CheckRequest, listener: Listener<'_>) -> Result<UpdateCheck, Failure> {
    if request.backend == BackendChoice::Replay {
        return Err(Failure::new(
            ErrorKind::Usage,
            "a replay cannot tell whether a file still holds: it measures nothing now",
        )
        .with_hint("leave --backend out: the GPUs are asked, or the simulated machine of a simulated run"));
    }
    let file = Deployed::read(&request.env_file)?;
    if file.header.tool_version.is_none() {
        return Err(Failure::new(
            ErrorKind::Usage,
            format!(
                "{} was not written by nccltune: nothing in it tells what it was measured with",
                file.path.display()
            ),
        )
        .with_hint("`nccltune lint` looks at files written by hand; `nccltune tune` measures"));
    }
    file.require_files()?;
    let found = file.run(request.run.as_deref())?;
    let Some((run, manifest)) = found else { return by_header_alone(request, &file, listener) };
    if !run.join(CHOICE_FILE).exists() {
        return Err(Failure::new(ErrorKind::Usage, format!("{} holds no verdict", run.display()))
            .with_hint(format!("go on with it: nccltune tune --resume --out {}", run.display())));
    }
    let choice: Choice = directory::read(&run, CHOICE_FILE)?;
    let manifest = whole(manifest);
    require_unedited(&file, &choice)?;
    Situation { request, file, run, manifest, choice }.check(listener)
}

/// Without a run only what changed can be told: points, gain and arms are in no header.
fn by_header_alone(request: &CheckRequest, file: &Deployed, listener: Listener<'_>) -> Result<UpdateCheck, Failure> {
    let supervisor = Rc::new(Supervisor::start()?);
    let tune = TuneRequest {
        backend: request.backend,
        machine: request.machine.clone(),
        nccl_lib: request.nccl_lib.clone(),
        devices: request.devices.clone(),
        // Nothing is measured, so doctor need not agree; and a machine without a driver is never simulated in its place.
        force: true,
        environment: request.environment.clone(),
        state_folder: request.state_folder.clone(),
        ..TuneRequest::default()
    };
    let (kind, facts) = choose_backend(&tune, &supervisor, None, None)?;
    let measured = measured_machine(&tune, kind, facts, None, listener)?;
    let Held { pins, .. } = pins(&tune, kind, (None, None), measured.conf.clone(), measured.version())?;
    let now = now_of(&measured, &measured.devices, &pins, None);
    let compared = compare(&file.header.parts, &now);
    let (changed, not_compared) = changes(&compared);
    Ok(UpdateCheck {
        format: FORMAT,
        verdict: UpdateVerdict::Undecided,
        reason: format!(
            "nothing was measured: the run that the file came from is neither beside it nor named, and only that knows \
             its points and the gain it recorded; {}",
            if decides(&compared) {
                "what changed since is listed"
            } else {
                "nothing that its header tells has changed"
            }
        ),
        simulated: file.header.simulated() || kind == BackendKind::Simulated,
        labels: labels(file, &measured, kind),
        changed,
        not_compared,
        objective: None,
        points: Vec::new(),
        wall_s: 0.0,
        command: None,
    })
}

fn labels(file: &Deployed, measured: &Measured, kind: BackendKind) -> Vec<String> {
    let mut labels = file.header.labels.clone();
    let is_simulated = kind == BackendKind::Simulated || measured.fake;
    if is_simulated && !labels.iter().any(|label| label == "SIMULATED") {
        labels.insert(0, "SIMULATED".to_owned());
    }
    labels
}

/// The file must set what the run found: otherwise the run's figures are those of something else.
fn require_unedited(file: &Deployed, choice: &Choice) -> Result<(), Failure> {
    let is_companion =
        |name: &str| FileKind::ALL.iter().any(|kind| kind.companion().is_some_and(|(own, _)| own == name));
    let plain: BTreeMap<&str, &str> = file
        .variables
        .iter()
        .filter(|(name, _)| FileKind::of_variable(name).is_none() && !is_companion(name))
        .map(|(name, value)| (name.as_str(), value.as_str()))
        .collect();
    let expected: BTreeMap<&str, &str> = match choice.verdict {
        VerdictKind::Adopt => choice.env.iter().map(|(name, value)| (name.as_str(), value.as_str())).collect(),
        VerdictKind::KeepDefault | VerdictKind::Undecided => BTreeMap::new(),
    };
    let names = plain.keys().chain(expected.keys());
    let differs = names.into_iter().find(|name| plain.get(*name) != expected.get(*name));
    match differs {
        None => Ok(()),
        Some(name) => Err(Failure::new(
            ErrorKind::Usage,
            format!("{} was edited: {name} is not as its run found it", file.path.display()),
        )
        .with_hint(
            "write it anew with `nccltune emit --run DIR --as env`, or measure the other values with `nccltune tune`",
        )),
    }
}

/// The parts as they are now, in the words of a header; those that are known once a machine was looked at.
fn now_of(measured: &Measured, devices: &[u32], pins: &[Pin], manifest: Option<&Manifest>) -> BTreeMap<String, String> {
    let workload = manifest.map(|manifest| manifest.workload.clone()).unwrap_or_default();
    let mut parts = measured.fingerprint(devices, pins, &workload).parts;
    // The engine is not here to be asked: it is taken to be the one that was tuned for.
    parts.remove("engine");
    parts.into_iter().map(|(name, value)| (name, told(&value))).collect()
}

/// What is not as it was, and what could not be compared.
fn changes(compared: &[Compared]) -> (Vec<PartChange>, Vec<PartChange>) {
    let of = |part: &Compared| PartChange {
        part: part.name.clone(),
        words: part.words.clone(),
        weight: match part.weight {
            Weight::Machine => "machine",
            Weight::Deciding => "deciding",
            Weight::Informing => "informing",
        }
        .to_owned(),
        before: part.before.clone(),
        now: part.now.clone(),
    };
    let pick = |standings: &[Standing]| -> Vec<PartChange> {
        let picked = compared.iter().filter(|part| standings.contains(&part.standing));
        picked.filter(|part| part.before.is_some() || part.now.is_some()).map(of).collect()
    };
    let mut not_compared = pick(&[Standing::NotRecorded, Standing::Unread]);
    not_compared.retain(|part| part.part != "engine");
    (pick(&[Standing::Changed]), not_compared)
}

fn decides(compared: &[Compared]) -> bool {
    compared.iter().any(|part| part.standing == Standing::Changed && part.weight != Weight::Informing)
}

impl Situation<'_> {
    fn check(&self, listener: Listener<'_>) -> Result<UpdateCheck, Failure> {
        let supervisor = Rc::new(Supervisor::start()?);
        let tune = self.tune_request();
        let (kind, facts) = choose_backend(&tune, &supervisor, Some(&self.manifest), None)?;
        let measured = measured_machine(&tune, kind, facts, Some(&self.manifest), listener)?;
        for notice in &measured.notices {
            listener(Update::Notice(notice.clone()));
        }
        let version = measured.version();
        let Held { pins, notices } = pins(&tune, kind, (Some(&self.manifest), None), measured.conf.clone(), version)?;
        for notice in notices {
            listener(Update::Notice(notice));
        }
        let devices = devices_for(&self.manifest.workload, &measured.devices)?;
        let before = self.file.parts(Some(&self.manifest));
        let compared = compare(&before, &now_of(&measured, &devices, &pins, Some(&self.manifest)));
        let (changed, not_compared) = changes(&compared);
        let mut found = UpdateCheck {
            format: FORMAT,
            verdict: UpdateVerdict::Valid,
            reason: String::new(),
            simulated: kind == BackendKind::Simulated || measured.fake,
            labels: labels(&self.file, &measured, kind),
            changed,
            not_compared,
            objective: None,
            points: Vec::new(),
            wall_s: 0.0,
            command: None,
        };
        let again = || Some(tune_again(self.request, &self.manifest, &self.run));
        let (Some(arm), Some(recorded)) = (self.winner(), self.choice.objective.ratio) else {
            // The default needs no proof against itself; whether anything beats it now is a question for `tune`.
            (found.verdict, found.reason) = if decides(&compared) {
                let why = "the file keeps the default, and something changed since: another setting may pay now";
                (UpdateVerdict::Undecided, why.to_owned())
            } else {
                (UpdateVerdict::Valid, "the file keeps the default, and nothing that decides has changed".to_owned())
            };
            found.command = again().filter(|_| found.verdict == UpdateVerdict::Undecided);
            return Ok(found);
        };
        let measured = Launches { situation: self, supervisor: &supervisor, measured: &measured, pins, devices, kind };
        let (context, evidence, wall_s) = measured.run(&tune, arm, recorded, listener)?;
        found.wall_s = wall_s;
        let judged = judge_update(&context, &evidence, arm, recorded, decides(&compared)).map_err(|failure| {
            let why = format!("the default itself does not run here, so nothing can be compared with it: it {failure}");
            Failure::new(ErrorKind::NothingMeasured, why).with_hint("`nccltune doctor` may know why")
        })?;
        (found.verdict, found.reason) = (judged.verdict, judged.reason);
        found.objective = Some(judged.objective);
        found.points = self.points(&context, &evidence, arm);
        found.command = again().filter(|_| found.verdict.is_stale() || found.verdict == UpdateVerdict::Undecided);
        Ok(found)
    }

    /// The arm that the file holds.
    fn winner(&self) -> Option<&Arm> {
        let name = self.choice.winner.as_ref().filter(|_| self.choice.verdict == VerdictKind::Adopt)?;
        self.manifest.arms.iter().find(|arm| arm.name == *name)
    }

    /// What `tune` would be asked, so that machine, pins and library are found as it finds them.
    fn tune_request(&self) -> TuneRequest {
        let (request, manifest) = (self.request, &self.manifest);
        let backend = match (request.backend, &request.machine, manifest.backend) {
            (BackendChoice::Auto, Some(_), _) => BackendChoice::Simulated,
            // What was replayed was measured somewhere: there, or nowhere, it can be checked.
            (BackendChoice::Auto, None, BackendKind::Replay) => BackendChoice::Nccl,
            (wanted, ..) => wanted,
        };
        let devices = if request.devices.is_empty() && manifest.backend == BackendKind::Nccl {
            manifest.devices.iter().map(ToString::to_string).collect()
        } else {
            request.devices.clone()
        };
        TuneRequest {
            backend,
            machine: request.machine.clone(),
            nccl_lib: request.nccl_lib.clone(),
            devices,
            force: request.force,
            workload: WorkloadWish {
                tensor_parallel: Some(manifest.workload.tensor_parallel),
                engine: Engine::parse(&manifest.workload.engine),
                engine_version: manifest.workload.engine_version.as_deref().and_then(EngineVersion::parse),
                ..WorkloadWish::default()
            },
            out: Some(self.run.clone()),
            resume: true,
            environment: request.environment.clone(),
            state_folder: request.state_folder.clone(),
            ..TuneRequest::default()
        }
    }

    /// Each measured point, then and now.
    fn points(&self, context: &SearchContext, evidence: &Evidence, arm: &Arm) -> Vec<CheckedPoint> {
        let workload = &self.manifest.workload;
        let recorded = |point: &Point, of: &[PointVerdict]| {
            let same = |known: &&PointVerdict| {
                (known.collective, known.dtype, known.bytes, known.batch, known.form)
                    == (point.collective, point.dtype, point.bytes, point.batch, point.form)
            };
            of.iter().find(same).and_then(|known| known.ratio)
        };
        let of = |points: &[Point], guard: bool| -> Vec<(PointKey, bool, Option<f64>)> {
            let known = if guard { &self.choice.guard } else { &self.choice.points };
            points
                .iter()
                .filter(|point| point.measured)
                .map(|point| (point.key(), guard, recorded(point, known)))
                .collect()
        };
        let mut seen: Vec<PointKey> = Vec::new();
        let mut checked = Vec::new();
        for (key, guard, recorded_ratio) in [of(&workload.points, false), of(&workload.guard, true)].concat() {
            if seen.contains(&key) {
                continue;
            }
            seen.push(key);
            let ratio = ratio_at(context, evidence, arm, key, CONFIDENCE);
            checked.push(CheckedPoint {
                collective: key.collective,
                dtype: key.dtype,
                bytes: key.bytes,
                guard,
                baseline_us: evidence.median_us(Phase::Final, &context.default, key),
                winner_us: evidence.median_us(Phase::Final, &arm.id, key),
                ratio: ratio.map(|ratio| ratio.ratio),
                ratio_ci95: ratio.map(|ratio| [ratio.low, ratio.high]),
                recorded_ratio,
            });
        }
        checked
    }
}

/// The launches of a check.
struct Launches<'a> {
    situation: &'a Situation<'a>,
    supervisor: &'a Rc<Supervisor>,
    measured: &'a Measured,
    pins: Vec<Pin>,
    devices: Vec<u32>,
    kind: BackendKind,
}

impl Launches<'_> {
    /// Runs the default and the arm side by side. The journal goes into a folder that is gone afterwards: a check is no
    /// run, and nothing resumes it.
    fn run(
        &self,
        tune: &TuneRequest,
        arm: &Arm,
        recorded: f64,
        listener: Listener<'_>,
    ) -> Result<(SearchContext, Evidence, f64), Failure> {
        let Situation { request, manifest, run, .. } = self.situation;
        let usage = |text: String| Failure::new(ErrorKind::Usage, text);
        let default =
            default_arm(&manifest.arms).ok_or_else(|| usage(format!("{}: no arm is the default", run.display())))?;
        let objective = Objective::of(&manifest.workload)
            .ok_or_else(|| usage(format!("{}: none of its points can be measured", run.display())))?;
        let folder = tempfile::Builder::new()
            .prefix("nccltune-")
            .tempdir()
            .map_err(|error| Failure::new(ErrorKind::Unexpected, error))?;
        let _locks = (self.kind == BackendKind::Nccl)
            .then(|| GpuLocks::take(&gpus_of(&self.measured.machine, &self.devices)))
            .transpose()?;
        // Another seed than the run's: the same noise twice would prove nothing.
        let seed = Seed(request.seed.unwrap_or(manifest.seed.wrapping_add(1)));
        let mut backend = self.backend(tune, seed, folder.path())?;
        let context = SearchContext {
            arms: vec![default.clone(), arm.clone()],
            default: default.id.clone(),
            objective,
            points: measured_points(&manifest.workload),
            settings: manifest.settings.clone(),
            most_trial_launches: None,
            trial: None,
            gate: None,
            most_launches: None,
            budget_s: Some(request.time_budget_s.unwrap_or(TIME_BUDGET_S)),
            earlier: Vec::new(),
        };
        let strategy = Confirm { arm: arm.id.clone(), recorded_log: Some(recorded.ln()), most_pairs: PAIRS.1 };
        let mut journal = Journal::create(folder.path())?;
        let opened = Event::RunOpened {
            format: FORMAT,
            tool_version: env!("CARGO_PKG_VERSION").to_owned(),
            seed: seed.0,
            identity: String::new(),
            simulated: self.kind == BackendKind::Simulated,
        };
        journal.append(0.0, opened)?;
        let mut clock = if self.kind == BackendKind::Nccl { Clock::real() } else { Clock::virtual_time() };
        let mut evidence = Evidence::default();
        let ending = Campaign {
            context: &context,
            seed,
            nccl_version: self.measured.version(),
            pinned: &as_map(&self.pins),
            stop: &|| if self.supervisor.interrupted() { Stop::Now } else { Stop::No },
            listener: &mut |news| listener(Update::Campaign(news)),
        }
        .run(&strategy, backend.as_mut(), &mut journal, &mut clock, &mut evidence)?;
        if ending == Ending::Interrupt {
            return Err(Failure::new(ErrorKind::Stopped, "stopped before a verdict; a check leaves nothing behind"));
        }
        let wall_s = evidence.duration_s();
        Ok((context, evidence, wall_s))
    }

    fn backend(&self, tune: &TuneRequest, seed: Seed, folder: &Path) -> Result<Box<dyn Backend>, Failure> {
        let Situation { request, manifest, run, .. } = self.situation;
        if let (BackendKind::Nccl, Some(nccl)) = (self.kind, &self.measured.nccl) {
            return Ok(Box::new(NcclBackend::new(NcclSetup {
                supervisor: Rc::clone(self.supervisor),
                environment: worker_environment(&request.environment, &manifest.kept_environment, &self.pins),
                gpus: gpus_of(&self.measured.machine, &self.devices),
                nccl: nccl.clone(),
                cublaslt: String::new(),
                logs: folder.join(LOGS_FOLDER),
                files: std::path::absolute(run).map_err(|error| Failure::new(ErrorKind::Usage, error))?,
                phase_limit: Some(PHASE_LIMIT),
                buffers: manifest.settings.buffers,
            })));
        }
        let machine = simulated_machine(tune, Some(manifest))?;
        let backend = SimulatedBackend::new(machine, seed, as_map(&self.pins));
        Ok(Box::new(backend.with_folder(run.clone())))
    }
}
