//! `nccltune doctor`: is this machine fit?

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::rc::Rc;
use std::time::Duration;

use super::environment::worker_environment;
use super::facts::{MachineFacts, MachineWish, ask_driver, gather};
use super::live::gpus_of;
use super::peer::{Live, PeerAccess, PeerMemory, shut, suspicions};
use super::{Listener, Update};
use crate::discovery::GpuLocks;
use crate::doctor::refuses;
use crate::error_kind::{ErrorKind, Failure};
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
    /// Workers are started on the GPUs, for what only they can find out.
    pub live: bool,
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
    if request.live && refusal.is_none() {
        let found = live(request, &supervisor, &facts, listener)?;
        facts.checks.checks.extend(found);
    }
    Ok((facts.checks, refusal))
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
    Ok(vec![links, peer_check(&report)])
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
