//! `nccltune doctor`: is this machine fit?

use std::collections::BTreeMap;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::time::Duration;

use super::environment::worker_environment;
use super::facts::{MachineFacts, MachineWish, ask_driver, gather};
use super::live::gpus_of;
use super::peer::{Live, PeerAccess, PeerMemory, shut, suspicions};
use super::{Listener, Update};
use crate::discovery::{GpuLocks, NcclCandidates};
use crate::doctor::{Facts, bundle, class_check, examine, machine_in_files, refuses};
use crate::error_kind::{ErrorKind, Failure};
use crate::machine::{Machine, NcclLibrary};
use crate::process::Supervisor;
use crate::quarantine::{Store, place};
use crate::record::{Check, CheckReport, CheckVerdict, ColdAndWarm, PeerOutcome, PeerReport};
use crate::wording::colder;

/// What doctor looks at.
#[derive(Debug, Clone, Default)]
pub struct DoctorRequest {
    /// GPUs, by position or identity; all without.
    pub devices: Vec<String>,
    /// The library a server would load.
    pub nccl_lib: Option<PathBuf>,
    /// A folder with another machine's /proc, /sys, /etc and /dev: only its files are read, and nothing else
    /// is asked.
    pub root: Option<PathBuf>,
    /// Workers are started on the GPUs, for what only they can find out.
    pub live: bool,
    /// A short sample of all-reduces is compared with the machine's class.
    pub sample: bool,
    /// Where a text for strangers is written, whole and with nothing private in it.
    pub bundle: Option<PathBuf>,
    /// Whether they test peer access across the host bridge.
    pub peer_access: PeerAccess,
    /// The longest any phase of a worker's step may take.
    pub phase_limit: Option<Duration>,
    /// Where earlier runs left what they remember, if anything names a place.
    pub state_folder: Option<PathBuf>,
    /// The environment the tool was started in.
    pub environment: BTreeMap<String, String>,
}

/// The checks, and the sentence that says why tuning would refuse, where it would.
pub fn doctor(request: &DoctorRequest, listener: Listener<'_>) -> Result<(CheckReport, Option<String>), Failure> {
    // What is there already is told before a minute is spent, not after it.
    if let Some(path) = request.bundle.as_deref().filter(|path| fs_err::symlink_metadata(path).is_ok()) {
        return Err(is_there(path));
    }
    if let Some(root) = &request.root {
        let (machine, checks) = in_files(root)?;
        write_bundle(request, root, machine.as_ref(), None, &checks)?;
        let refusal = refuses(&checks);
        return Ok((checks, refusal));
    }
    let supervisor = Rc::new(Supervisor::start()?);
    let asked = ask_driver(&supervisor, &request.environment);
    let wish = MachineWish {
        devices: &request.devices,
        ranks: None,
        nccl_lib: request.nccl_lib.as_deref(),
        state_folder: request.state_folder.as_deref(),
    };
    let mut facts = gather(&supervisor, &request.environment, asked, &wish)?;
    let refusal = refuses(&facts.checks);
    if (request.live || request.sample) && refusal.is_none() {
        let found = live(request, &supervisor, &facts, listener)?;
        facts.checks.checks.extend(found);
    } else if request.sample {
        facts.checks.checks.push(class_check(&[], Err("not sampled: a check failed, so nothing is started here")));
    }
    write_bundle(request, Path::new("/"), facts.machine.as_ref().ok(), facts.nccl.as_ref().ok(), &facts.checks)?;
    Ok((facts.checks, refusal))
}

/// What the files of another machine tell. No driver is asked, no child started, and this machine's
/// environment and users are not that one's.
fn in_files(root: &Path) -> Result<(Option<Machine>, CheckReport), Failure> {
    fs_err::read_dir(root).map_err(|error| {
        Failure::new(ErrorKind::Usage, error)
            .with_hint("--root names a folder with copies of another machine's proc, sys, etc and dev")
    })?;
    let (environment, candidates) = (BTreeMap::new(), NcclCandidates::default());
    let machine = machine_in_files(root);
    let devices: Vec<u32> = machine.iter().flat_map(|machine| &machine.gpus).map(|gpu| gpu.index).collect();
    let checks = examine(&Facts {
        machine: machine.as_ref(),
        devices: &devices,
        ranks: devices.len() as u32,
        files_only: true,
        ..nothing_asked(root, &environment, &candidates)
    });
    Ok((machine, checks))
}

/// Facts of a machine of which nothing was asked yet.
fn nothing_asked<'a>(
    root: &'a Path,
    environment: &'a BTreeMap<String, String>,
    candidates: &'a NcclCandidates,
) -> Facts<'a> {
    Facts {
        root,
        environment,
        home: None,
        driver_installed: false,
        report: None,
        probe_error: None,
        machine: None,
        devices: &[],
        candidates,
        loader_nccl: None,
        nccl: None,
        nccl_error: None,
        ranks: 0,
        own_process_ids: &[],
        remembered: None,
        files_only: false,
    }
}

fn is_there(path: &Path) -> Failure {
    Failure::new(ErrorKind::Usage, format!("{} is there already, and --bundle overwrites nothing", path.display()))
        .with_hint("name a new file")
}

/// Writes the text for strangers, where the user wants one.
fn write_bundle(
    request: &DoctorRequest,
    root: &Path,
    machine: Option<&Machine>,
    nccl: Option<&NcclLibrary>,
    checks: &CheckReport,
) -> Result<(), Failure> {
    let Some(path) = &request.bundle else { return Ok(()) };
    let (nothing, candidates) = (BTreeMap::new(), NcclCandidates::default());
    // Of another machine's files this one's user and variables say nothing.
    let is_here = request.root.is_none();
    let user = nix::unistd::User::from_uid(nix::unistd::getuid()).ok().flatten().filter(|_| is_here);
    let facts = Facts {
        machine,
        nccl,
        home: user.as_ref().map(|user| user.dir.as_path()),
        files_only: !is_here,
        ..nothing_asked(root, if is_here { &request.environment } else { &nothing }, &candidates)
    };
    let text = bundle(&facts, checks, user.as_ref().map(|user| user.name.as_str()));
    let unwritten = |error: std::io::Error| Failure::new(ErrorKind::Usage, error);
    let mut file = match fs_err::OpenOptions::new().write(true).create_new(true).open(path) {
        Ok(file) => file,
        Err(error) if error.kind() == std::io::ErrorKind::AlreadyExists => return Err(is_there(path)),
        Err(error) => return Err(unwritten(error)),
    };
    file.write_all(text.as_bytes()).map_err(unwritten)
}

/// What workers find out on the GPUs. Where tuning would refuse, none are started.
fn live(
    request: &DoctorRequest,
    supervisor: &Rc<Supervisor>,
    facts: &MachineFacts,
    listener: Listener<'_>,
) -> Result<Vec<Check>, Failure> {
    let (Ok(machine), Ok(nccl)) = (&facts.machine, &facts.nccl) else { return Ok(Vec::new()) };
    let gpus = gpus_of(machine, &facts.devices);
    let _locks = GpuLocks::take(&gpus)?;
    let logs = tempfile::tempdir().map_err(|error| Failure::new(ErrorKind::Unexpected, error))?;
    let live = Live {
        supervisor,
        environment: worker_environment(&request.environment, &[], &[]),
        gpus,
        nccl: nccl.clone(),
        logs: logs.path().to_owned(),
        phase_limit: request.phase_limit,
        seed: 1,
    };
    let mut found = Vec::new();
    if request.sample {
        let sample = live.sample()?;
        found.push(class_check(&live.gpus, sample.as_deref().map_err(String::as_str)));
    }
    if !request.live {
        return Ok(found);
    }
    let links = links_check(live.cold_and_warm()?.as_ref());
    let place = place(machine, &facts.devices, nccl);
    let store = request.state_folder.as_deref().map(Store::new);
    let against = suspicions(&facts.checks, store.as_ref(), Some(&place), false);
    let shut = shut(request.peer_access, &against, facts.devices.len() as u32);
    let report = if let Some(report) = shut {
        report
    } else {
        let pins = BTreeMap::new();
        let memory =
            store.map(|store| PeerMemory { store, place: &place, pins: &pins, run: "nccltune doctor".to_owned() });
        live.test_peers(&against, memory.as_ref(), &mut |said| listener(Update::Notice(said)))?
    };
    // Peer access comes last: it is what may leave a GPU wedged.
    found.extend([links, peer_check(&report)]);
    Ok(found)
}

fn check(name: &str, group: &str, question: &str, verdict: CheckVerdict, evidence: String, advice: &str) -> Check {
    Check {
        name: name.to_owned(),
        group: group.to_owned(),
        verdict,
        question: question.to_owned(),
        evidence,
        advice: advice.to_owned(),
    }
}

fn links_check(found: Option<&ColdAndWarm>) -> Check {
    let (verdict, evidence, advice) = match found {
        None => (
            CheckVerdict::Unknown,
            "not compared: this release does not ask how fast a link is just now, or its search could not be looked at"
                .to_owned(),
            "",
        ),
        Some(found) => match colder(found) {
            None => (CheckVerdict::Pass, "it finds the same after idling as after copies".to_owned(), ""),
            Some(difference) => (
                CheckVerdict::Warn,
                difference,
                "keep the GPUs busy while the server starts, or name a repaired topology file with NCCL_TOPO_FILE",
            ),
        },
    };
    check("idle-links", "nccl", "Does NCCL find the same on idle GPUs as on busy ones?", verdict, evidence, advice)
}

fn peer_check(report: &PeerReport) -> Check {
    let (verdict, advice) = match report.outcome {
        PeerOutcome::Passed | PeerOutcome::InUse => (CheckVerdict::Pass, ""),
        PeerOutcome::Skipped => (CheckVerdict::Unknown, ""),
        PeerOutcome::Failed => (
            CheckVerdict::Warn,
            "leave NCCL_P2P_LEVEL alone, and switch off what an engine does across GPUs by itself, such as its own \
             all-reduce: it would meet the same",
        ),
    };
    let question = "Does peer access between the GPUs work?";
    check("peer-access", "gpu", question, verdict, report.reason.clone(), advice)
}
