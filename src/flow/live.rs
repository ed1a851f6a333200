//! What is looked at on the GPUs before a run: while they are idle, and whether they reach each other.

use std::rc::Rc;

use tempfile::TempDir;

use super::environment::{as_map, worker_environment};
use super::peer::{Live, PeerMemory, shut, simulated, skipped, suspicions};
use super::tune::TuneRequest;
use super::{Listener, Update};
use crate::backend::simulated::SimulatedPeers;
use crate::discovery::GpuLocks;
use crate::error_kind::{ErrorKind, Failure};
use crate::machine::{Gpu, Machine, NcclLibrary};
use crate::process::Supervisor;
use crate::quarantine::{Store, place};
use crate::record::{BackendKind, CheckReport, ColdAndWarm, Manifest, PeerOutcome, PeerReport, Pin};
use crate::wording::colder;

/// What is looked at on the GPUs before a run, and what it needs to know.
pub(super) struct LiveChecks<'a> {
    pub(super) request: &'a TuneRequest,
    pub(super) supervisor: &'a Rc<Supervisor>,
    pub(super) kind: BackendKind,
    pub(super) previous: Option<&'a Manifest>,
    pub(super) machine: &'a Machine,
    pub(super) nccl: Option<&'a NcclLibrary>,
    pub(super) checks: &'a CheckReport,
    /// What a simulated machine's file says of peer access.
    pub(super) simulated: Option<SimulatedPeers>,
    pub(super) devices: &'a [u32],
    pub(super) pins: &'a [Pin],
    pub(super) seed: u64,
}

/// What a run has before its first launch.
pub(super) struct Early {
    /// The GPUs are this process's from before the first check on them.
    pub(super) locks: Option<GpuLocks>,
    /// What broken launches printed before there was a run directory.
    pub(super) logs: Option<TempDir>,
    /// What NCCL finds on idle and on busy GPUs.
    pub(super) cold_and_warm: Option<ColdAndWarm>,
}

impl LiveChecks<'_> {
    /// Takes the GPUs, and looks at them while they are still as a server would find them.
    pub(super) fn begin(&self, listener: Listener<'_>) -> Result<Early, Failure> {
        // Two runs on one GPU would measure each other, from the first check on.
        let locks = (self.kind == BackendKind::Nccl && !self.request.dry_run)
            .then(|| GpuLocks::take(&gpus_of(self.machine, self.devices)))
            .transpose()?;
        let folder = || tempfile::Builder::new().prefix("nccltune-").tempdir();
        let is_live = self.kind == BackendKind::Nccl && self.previous.is_none() && !self.request.dry_run;
        let logs = is_live.then(folder).transpose().map_err(|error| Failure::new(ErrorKind::Unexpected, error))?;
        let cold_and_warm = self.cold_and_warm(logs.as_ref(), listener)?;
        Ok(Early { locks, logs, cold_and_warm })
    }

    fn live(&self, logs: &TempDir, nccl: &NcclLibrary) -> Live<'_> {
        Live {
            supervisor: self.supervisor,
            environment: worker_environment(&self.request.environment, &self.request.keep_environment, self.pins),
            gpus: gpus_of(self.machine, self.devices),
            nccl: nccl.clone(),
            logs: logs.path().to_owned(),
            phase_limit: self.request.phase_limit,
            seed: self.seed,
        }
    }

    fn cold_and_warm(&self, logs: Option<&TempDir>, listener: Listener<'_>) -> Result<Option<ColdAndWarm>, Failure> {
        if let Some(manifest) = self.previous {
            return Ok(manifest.cold_and_warm.clone());
        }
        let (Some(logs), Some(nccl)) = (logs, self.nccl) else { return Ok(None) };
        let found = self.live(logs, nccl).cold_and_warm()?;
        if let Some(difference) = found.as_ref().and_then(colder) {
            listener(Update::Notice(difference));
        }
        Ok(found)
    }

    /// Whether peer access across the host bridge works.
    pub(super) fn peers(&self, logs: Option<&TempDir>, listener: Listener<'_>) -> Result<PeerReport, Failure> {
        let ranks = self.devices.len() as u32;
        if let Some(report) = self.previous.and_then(|manifest| manifest.peer_access.clone()) {
            return Ok(report);
        }
        if self.previous.is_some() && self.request.resume {
            return Ok(skipped("the run began without it", ranks, Vec::new()));
        }
        let place = self.nccl.map(|nccl| place(self.machine, self.devices, nccl));
        let store = self.request.state_folder.as_deref().map(Store::new);
        let found = match self.kind {
            BackendKind::Nccl => {
                suspicions(self.checks, store.as_ref(), place.as_ref(), self.request.retry_quarantined)
            }
            BackendKind::Simulated | BackendKind::Replay => Vec::new(),
        };
        if let Some(report) = shut(self.request.peer_access, &found, ranks) {
            return Ok(report);
        }
        match (self.kind, logs, self.nccl) {
            (BackendKind::Simulated, ..) => Ok(simulated(self.simulated, ranks)),
            (BackendKind::Replay, ..) => Ok(skipped("the recorded run did not test it", ranks, Vec::new())),
            (BackendKind::Nccl, Some(logs), Some(nccl)) => {
                let pins = as_map(self.pins);
                let out = self.request.out.clone().unwrap_or_else(|| "a test of peer access".into());
                let memory = store.zip(place.as_ref()).map(|(store, place)| PeerMemory {
                    store,
                    place,
                    pins: &pins,
                    run: out.display().to_string(),
                });
                let mut tell = |said: String| listener(Update::Notice(said));
                let report = self.live(logs, nccl).test_peers(&found, memory.as_ref(), &mut tell)?;
                if report.outcome == PeerOutcome::Passed {
                    tell(format!("peer access: {}", report.reason));
                }
                Ok(report)
            }
            // A plan tries nothing; the empty reason says that nothing is known against it.
            (BackendKind::Nccl, ..) => Ok(skipped("", ranks, found)),
        }
    }
}

/// The chosen GPUs.
pub(super) fn gpus_of(machine: &Machine, devices: &[u32]) -> Vec<Gpu> {
    machine.gpus.iter().filter(|gpu| devices.contains(&gpu.index)).cloned().collect()
}
