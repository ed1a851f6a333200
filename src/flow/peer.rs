//! The gate in front of `NCCL_P2P_LEVEL`: is peer access granted, do bytes arrive, do collectives add up?
//!
//! Since 2.23 NCCL leaves GPUs that only the host bridge or the link between processors connects to host
//! memory, for good reason: on some machines access is granted and the first collective hangs, or
//! corrupts data, or takes the GPU with it. So nothing is taken on trust: three tiers, the cheapest
//! first, at the server's rank count, in fresh processes with deadlines, twice. What speaks against it
//! beforehand keeps it from being tried at all, unless the user asks.

use std::collections::BTreeMap;
use std::ops::ControlFlow;
use std::path::PathBuf;
use std::rc::Rc;
use std::time::Duration;

use itertools::Itertools;
use rand::RngExt;

use crate::backend::nccl::{NcclBackend, NcclSetup};
use crate::backend::simulated::SimulatedPeers;
use crate::backend::{Backend as _, BackendError, LaunchPlan};
use crate::clock::{Clock, wall_time};
use crate::collective::{Collective, DataType};
use crate::discovery::{DiscoveryError, ask_within, gpus_answer};
use crate::doctor::{SAMPLE_BYTES, Sampled, speaks_against_peer_access};
use crate::error_kind::{ErrorKind, Failure};
use crate::knob;
use crate::machine::{Gpu, NcclLibrary, NcclVersion};
use crate::probe::Question;
use crate::process::Supervisor;
use crate::quarantine::{Store, failure_words};
use crate::record::{
    BufferKind, CheckReport, CheckVerdict, ColdAndWarm, Event, FingerprintParts, Outcome, OutcomeKind, PeerOutcome,
    PeerReport, PeerStep, PeerTier, PointKey, QuarantineEntry,
};
use crate::seed::Seed;
use crate::stats::median;
use crate::wording::plural;

/// Rounds of all tiers, each in fresh processes.
const ROUNDS: u32 = 2;
/// What NCCL is told to use between GPUs: any path.
const LEVEL: (&str, &str) = ("NCCL_P2P_LEVEL", "SYS");
/// Sizes of the all-reduces: each protocol's own range, and what a prompt's pass sends.
const SIZES_BYTES: [u64; 5] = [1024, 65_536, 1 << 20, 8 << 20, 32 << 20];
/// Milliseconds of replays at each size: what hangs or corrupts, does so at once or under load.
const CELL_TIME_MS: f64 = 50.0;
/// Milliseconds of replays at each size of the sample that is compared with the machine's class.
const SAMPLE_TIME_MS: f64 = 200.0;
/// The first release that reads the current speed of a PCIe link, where earlier ones read what it is
/// built for. Source: NVIDIA/nccl, src/graph/xml.cc of 2.30.7, read; 2.30.4 still does the other.
const READS_CURRENT_SPEED: NcclVersion = NcclVersion::v2(30, 5);

/// Whether peer access across the host bridge is to be tested.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum PeerAccess {
    /// Where a space asks for it and nothing speaks against it.
    #[default]
    Auto,
    /// Where a space asks for it, whatever speaks against it.
    Test,
    /// Not at all.
    Never,
}

/// What speaks against peer access before anything is tried: doctor's checks, and what is remembered.
pub(super) fn suspicions(
    checks: &CheckReport,
    store: Option<&Store>,
    place: Option<&FingerprintParts>,
    retry: bool,
) -> Vec<String> {
    let mut found: Vec<String> = checks
        .checks
        .iter()
        .filter(|check| speaks_against_peer_access(&check.name))
        .filter(|check| matches!(check.verdict, CheckVerdict::Warn | CheckVerdict::Fail))
        .map(|check| format!("{}: {}", check.name, check.evidence))
        .collect();
    if let (Some(store), Some(place), false) = (store, place, retry) {
        // A file that cannot be read is told of elsewhere.
        let entries = store.remembered().entries.unwrap_or_default();
        let failed = entries.iter().find(|entry| {
            entry.machine.combined == place.combined
                && entry.env.iter().any(|(name, value)| knob::needs_peer_access(name, value))
        });
        found.extend(failed.map(|entry| {
            format!("it {} here on {}: {}", failure_words(entry.outcome.kind), entry.since, entry.outcome.detail)
        }));
    }
    found
}

/// The report of a gate that stays shut without a test.
pub(super) fn skipped(reason: impl Into<String>, ranks: u32, suspicions: Vec<String>) -> PeerReport {
    PeerReport { outcome: PeerOutcome::Skipped, reason: reason.into(), ranks, suspicions, steps: Vec::new() }
}

/// Why the gate stays shut although nobody has tried, where it does.
pub(super) fn shut(wish: PeerAccess, suspicions: &[String], ranks: u32) -> Option<PeerReport> {
    match wish {
        PeerAccess::Never => Some(skipped("--peer-access never", ranks, Vec::new())),
        PeerAccess::Auto if !suspicions.is_empty() => Some(skipped(
            format!("not tested, since {}; --peer-access test tests it all the same", suspicions.join("; ")),
            ranks,
            suspicions.to_vec(),
        )),
        PeerAccess::Auto | PeerAccess::Test => None,
    }
}

/// What a simulated machine's file says of it.
pub(super) fn simulated(peers: Option<SimulatedPeers>, ranks: u32) -> PeerReport {
    let Some(peers) = peers else {
        return skipped("the simulated machine's file does not say whether it works", ranks, Vec::new());
    };
    let step = |round, tier, passed, detail: &str| PeerStep {
        round,
        tier,
        passed,
        detail: detail.to_owned(),
        duration_s: 0.0,
    };
    let broken = |tier: PeerTier, detail: &str| {
        let tiers = [PeerTier::Granted, PeerTier::Copied, PeerTier::Reduced];
        let before = tiers.into_iter().filter(|other| *other < tier).map(|other| step(1, other, true, "simulated"));
        let steps = before.chain([step(1, tier, false, detail)]).collect();
        (PeerOutcome::Failed, format!("not {}: {detail}", tier.words()), steps)
    };
    let (outcome, reason, steps) = match peers {
        SimulatedPeers::Works => {
            (PeerOutcome::Passed, "simulated: the machine's file says that it works".to_owned(), Vec::new())
        }
        SimulatedPeers::InUse => {
            (PeerOutcome::InUse, "simulated: NCCL uses it by itself, so there is nothing to try".to_owned(), Vec::new())
        }
        SimulatedPeers::Denied => broken(PeerTier::Granted, "simulated: the driver denies it"),
        SimulatedPeers::WrongBytes => broken(PeerTier::Copied, "simulated: bytes arrive wrong"),
        SimulatedPeers::Hangs => broken(PeerTier::Reduced, "simulated: the first collective hangs"),
    };
    PeerReport { outcome, reason, ranks, suspicions: Vec::new(), steps }
}

/// Everything that live checks before a run need.
pub(super) struct Live<'a> {
    pub(super) supervisor: &'a Rc<Supervisor>,
    /// The environment of every worker.
    pub(super) environment: BTreeMap<String, String>,
    /// The GPUs of the ranks, in order.
    pub(super) gpus: Vec<Gpu>,
    pub(super) nccl: NcclLibrary,
    /// Where what broken launches printed is kept.
    pub(super) logs: PathBuf,
    pub(super) phase_limit: Option<Duration>,
    pub(super) seed: u64,
}

/// How a tier ended, where it did not hold.
struct Shut {
    detail: String,
    /// What is worth remembering of it.
    outcome: Option<OutcomeKind>,
}

impl Shut {
    fn plainly(detail: impl Into<String>) -> Self {
        Self { detail: detail.into(), outcome: None }
    }
}

type Tier = Result<Result<String, Shut>, Failure>;

impl Live<'_> {
    fn backend(&self) -> NcclBackend {
        NcclBackend::new(NcclSetup {
            supervisor: Rc::clone(self.supervisor),
            environment: self.environment.clone(),
            gpus: self.gpus.clone(),
            nccl: self.nccl.clone(),
            cublaslt: String::new(),
            logs: self.logs.clone(),
            // It sets no files.
            files: PathBuf::new(),
            buffers: BufferKind::Plain,
            phase_limit: self.phase_limit,
        })
    }

    /// Probes number the GPUs as workers do.
    fn probe_environment(&self) -> BTreeMap<String, String> {
        let mut environment = self.environment.clone();
        environment.insert("CUDA_DEVICE_ORDER".to_owned(), "PCI_BUS_ID".to_owned());
        environment
    }

    /// A probe does by itself what each rank does in a phase of its own, and then something.
    fn probe_limit(&self) -> Option<Duration> {
        self.phase_limit.map(|limit| limit.saturating_mul(self.ranks() + 1))
    }

    fn ranks(&self) -> u32 {
        self.gpus.len() as u32
    }

    /// Tests all tiers, twice. What hung, crashed or corrupted is remembered for later runs, and so is a
    /// test that never came to its end: a machine that stopped must not be stopped again.
    pub(super) fn test_peers(
        &self,
        suspicions: &[String],
        memory: Option<&PeerMemory<'_>>,
        tell: &mut dyn FnMut(String),
    ) -> Result<PeerReport, Failure> {
        let mut backend = self.backend();
        let report = |outcome, reason: String, steps| PeerReport {
            outcome,
            reason,
            ranks: self.ranks(),
            suspicions: suspicions.to_vec(),
            steps,
        };
        match self.reduce(&mut backend, 0, BTreeMap::new())? {
            Err(shut) => {
                let reason = format!("not tested, since the default itself failed: {}", shut.detail);
                return Ok(report(PeerOutcome::Skipped, reason, Vec::new()));
            }
            Ok(ways) if is_direct(&ways) => {
                let reason = "NCCL uses peer access between all GPUs by itself: there is nothing to try".to_owned();
                return Ok(report(PeerOutcome::InUse, reason, Vec::new()));
            }
            Ok(_) => {}
        }
        let before = memory.and_then(PeerMemory::known);
        if let Some(memory) = memory {
            memory.remember(OutcomeKind::TimedOut, "a test of peer access began here and never ended", tell);
        }
        let mut steps = Vec::new();
        for round in 1..=ROUNDS {
            for tier in [PeerTier::Granted, PeerTier::Copied, PeerTier::Reduced] {
                let clock = Clock::real();
                tell(format!("peer access: testing whether {} (round {round} of {ROUNDS})", question(tier)));
                let held = match self.tier(tier, round, &mut backend) {
                    Ok(held) => held,
                    Err(failure) => {
                        // Whoever stops a test has not seen it fail, nor seen it pass.
                        if let Some(memory) = memory.filter(|_| failure.kind() == ErrorKind::Stopped) {
                            memory.restore(before, tell);
                        }
                        return Err(failure);
                    }
                };
                let (passed, detail) = match &held {
                    Ok(detail) => (true, detail.clone()),
                    Err(shut) => (false, shut.detail.clone()),
                };
                steps.push(PeerStep { round, tier, passed, detail, duration_s: rounded(clock.elapsed_s()) });
                if let Err(shut) = held {
                    match (memory, shut.outcome) {
                        (Some(memory), Some(kind)) => memory.remember(kind, &shut.detail, tell),
                        (Some(memory), None) => memory.forget(tell),
                        (None, _) => {}
                    }
                    let reason = format!("not {}: {}", tier.words(), shut.detail);
                    return Ok(report(PeerOutcome::Failed, reason, steps));
                }
            }
        }
        if let Some(memory) = memory {
            memory.forget(tell);
        }
        let tiers = [PeerTier::Granted, PeerTier::Copied, PeerTier::Reduced].map(PeerTier::words);
        let ranks = self.ranks();
        let reason = format!("{} with {ranks} {}, twice", tiers.join(", "), plural(ranks, "rank", "ranks"));
        Ok(report(PeerOutcome::Passed, reason, steps))
    }

    fn tier(&self, tier: PeerTier, round: u32, backend: &mut NcclBackend) -> Tier {
        match tier {
            PeerTier::Granted => self.granted(),
            PeerTier::Copied => self.copied(round),
            PeerTier::Reduced => {
                let level = BTreeMap::from([(LEVEL.0.to_owned(), LEVEL.1.to_owned())]);
                Ok(match self.reduce(backend, round, level)? {
                    Ok(ways) if is_direct(&ways) => {
                        Ok(format!("sums of {} sizes right on every rank, via {}", SIZES_BYTES.len(), told(&ways)))
                    }
                    Ok(ways) => Err(Shut::plainly(format!(
                        "NCCL did not use it although {}={} allows it: via {}",
                        LEVEL.0,
                        LEVEL.1,
                        told(&ways)
                    ))),
                    Err(shut) => Err(shut),
                })
            }
        }
    }

    /// Driver and NVML, both ways, every pair.
    fn granted(&self) -> Tier {
        let report = match ask_within(self.supervisor, &Question::Wiring, &self.probe_environment(), self.probe_limit())
        {
            Ok(report) => report,
            Err(error) => return self.after_a_probe(error),
        };
        let mut denied = Vec::new();
        let mut pairs = 0;
        for (from, to) in self.gpus.iter().cartesian_product(&self.gpus).filter(|(from, to)| from.index != to.index) {
            let known = report.peers.iter().find(|pair| pair.from == from.pci_bus_id && pair.to == to.pci_bus_id);
            let says = [("the driver", known.and_then(|pair| pair.cuda)), ("NVML", known.and_then(|pair| pair.nvml))];
            pairs += 1;
            for (who, says) in says.iter().filter(|(_, says)| *says != Some(true)) {
                let verb = if says.is_some() { "denies it" } else { "does not say" };
                denied.push(format!("{who} {verb} from GPU {} to GPU {}", from.index, to.index));
            }
        }
        let more = denied.len().saturating_sub(3);
        denied.truncate(3);
        if more > 0 {
            denied.push(format!("and {more} more"));
        }
        Ok(if denied.is_empty() {
            Ok(format!("by driver and NVML for {pairs} ordered pairs"))
        } else {
            Err(Shut::plainly(denied.join(", ")))
        })
    }

    /// Random bytes, both ways, every pair.
    fn copied(&self, round: u32) -> Tier {
        let seed = Seed(self.seed).derive("peer-copies", &format!("round-{round}")).random();
        let devices = self.gpus.iter().map(|gpu| gpu.index).collect();
        let question = Question::PeerCopies { seed, devices };
        let report = match ask_within(self.supervisor, &question, &self.probe_environment(), self.probe_limit()) {
            Ok(report) => report,
            Err(error) => return self.after_a_probe(error),
        };
        match (report.cuda_error, report.copy_errors.as_slice(), report.copied_bytes) {
            (None, [], Some(bytes)) => Ok(Ok(format!("{} MiB, all as sent", bytes >> 20))),
            (error, wrong, _) => {
                self.prove_that_gpus_answer()?;
                let outcome =
                    wrong.iter().any(|what| what.contains("arrived wrong")).then_some(OutcomeKind::WrongResult);
                let said: Vec<String> = error.into_iter().chain(wrong.iter().cloned()).collect();
                let detail = if said.is_empty() { "the copies did not end".to_owned() } else { said.join("; ") };
                Ok(Err(Shut { detail, outcome }))
            }
        }
    }

    /// A probe that did not answer: the GPUs must, or nothing goes on.
    fn after_a_probe(&self, error: DiscoveryError) -> Tier {
        let outcome = match error {
            DiscoveryError::NoAnswer { .. } => OutcomeKind::TimedOut,
            DiscoveryError::ProbeFailed { .. } => OutcomeKind::Crashed,
            error => return Err(error.into()),
        };
        self.prove_that_gpus_answer()?;
        Ok(Err(Shut { detail: error.to_string(), outcome: Some(outcome) }))
    }

    fn prove_that_gpus_answer(&self) -> Result<(), Failure> {
        let devices: Vec<u32> = self.gpus.iter().map(|gpu| gpu.index).collect();
        match gpus_answer(self.supervisor, &devices, &self.probe_environment()) {
            Ok(_) => Ok(()),
            Err(error) => Err(wedged(TESTED, &error.to_string())),
        }
    }

    /// All-reduces in a launch of their own, checked on every rank; each rank's ways to the others.
    fn reduce(
        &self,
        backend: &mut NcclBackend,
        launch: u32,
        environment: BTreeMap<String, String>,
    ) -> Result<Result<Vec<Vec<String>>, Shut>, Failure> {
        let point = |bytes| PointKey::usual(Collective::AllReduce, DataType::Bf16, bytes, self.ranks());
        // The default is only to show its transport, and takes little time for it.
        let after = if environment.is_empty() { "the default was run" } else { TESTED };
        let sizes = if environment.is_empty() { &SIZES_BYTES[..2] } else { &SIZES_BYTES[..] };
        let plan = LaunchPlan {
            launch,
            cell_time_ms: CELL_TIME_MS,
            data_seed: Seed(self.seed).derive("peer-reductions", &format!("launch-{launch}")).random(),
            ..LaunchPlan::alone("peer access", environment, sizes.iter().copied().map(point).collect())
        };
        let mut failed: Option<Outcome> = None;
        let ran = backend.run(&plan, &mut |event| {
            if let Event::CellFailed { outcome, .. } | Event::LaunchEnded { outcome: Some(outcome), .. } = event {
                failed.get_or_insert(outcome);
            }
            ControlFlow::Continue(())
        });
        match ran {
            Ok(()) => {}
            Err(BackendError::GpuUnusable(detail)) => return Err(wedged(after, &detail)),
            Err(error) => return Err(error.into()),
        }
        if self.supervisor.interrupted()
            || failed.as_ref().is_some_and(|outcome| outcome.kind == OutcomeKind::Interrupted)
        {
            return Err(Failure::new(ErrorKind::Stopped, "stopped while peer access was tested; nothing was written"));
        }
        Ok(match failed {
            None => Ok(backend.last_transports()),
            Some(outcome) => {
                let remembered =
                    matches!(outcome.kind, OutcomeKind::TimedOut | OutcomeKind::Crashed | OutcomeKind::WrongResult);
                Err(Shut {
                    detail: format!("{}: {}", outcome.kind.name(), outcome.detail),
                    outcome: remembered.then_some(outcome.kind),
                })
            }
        })
    }

    /// A short sample of all-reduces as NCCL does them by itself; why there is none, where it failed.
    pub(super) fn sample(&self) -> Result<Result<Vec<Sampled>, String>, Failure> {
        let point = |bytes| PointKey::usual(Collective::AllReduce, DataType::Bf16, bytes, self.ranks());
        let plan = LaunchPlan {
            cell_time_ms: SAMPLE_TIME_MS,
            data_seed: Seed(self.seed).derive("class-sample", "launch").random(),
            ..LaunchPlan::alone("sample", BTreeMap::new(), SAMPLE_BYTES.map(point).to_vec())
        };
        let mut failed: Option<Outcome> = None;
        let mut sample = Vec::new();
        let ran = self.backend().run(&plan, &mut |event| {
            match event {
                Event::CellMeasured(cell) => {
                    let bytes = cell.point.bytes;
                    sample.extend(median(&cell.replays_us).map(|latency_us| Sampled { bytes, latency_us }));
                }
                Event::CellFailed { outcome, .. } | Event::LaunchEnded { outcome: Some(outcome), .. } => {
                    failed.get_or_insert(outcome);
                }
                _ => {}
            }
            ControlFlow::Continue(())
        });
        match ran {
            Ok(()) => {}
            Err(BackendError::GpuUnusable(detail)) => return Err(wedged("a sample was taken", &detail)),
            Err(error) => return Err(error.into()),
        }
        if self.supervisor.interrupted() {
            return Err(Failure::new(ErrorKind::Stopped, "stopped while a sample was taken; nothing was written"));
        }
        Ok(match failed {
            None => Ok(sample),
            Some(outcome) => Err(format!("the sample failed: {}: {}", outcome.kind.name(), outcome.detail)),
        })
    }

    /// What NCCL finds before and after the links were kept busy, where its release asks how fast they are
    /// just now. Nothing where that could not be found out: it is a warning's worth, and stops no run.
    pub(super) fn cold_and_warm(&self) -> Result<Option<ColdAndWarm>, Failure> {
        if NcclVersion::from_code(self.nccl.version) < READS_CURRENT_SPEED {
            return Ok(None);
        }
        let mut backend = self.backend();
        let mut search = |warm: bool| match backend.channel_searches(&BTreeMap::new(), warm) {
            Ok(found) => Ok(found.ok()),
            Err(BackendError::GpuUnusable(detail)) => Err(wedged("NCCL's search for channels was looked at", &detail)),
            Err(error) => Err(error.into()),
        };
        let (cold, warm) = (search(false)?, search(true)?);
        if self.supervisor.interrupted() {
            return Err(Failure::new(ErrorKind::Stopped, "stopped before the run began; nothing was written"));
        }
        Ok(cold.zip(warm).map(|(cold, warm)| ColdAndWarm { cold, warm }))
    }
}

/// How what is remembered of peer access is kept.
pub(super) struct PeerMemory<'a> {
    pub(super) store: Store,
    pub(super) place: &'a FingerprintParts,
    pub(super) pins: &'a BTreeMap<String, String>,
    /// Names the run.
    pub(super) run: String,
}

impl PeerMemory<'_> {
    fn env(&self) -> BTreeMap<String, String> {
        let mut env = self.pins.clone();
        env.insert(LEVEL.0.to_owned(), LEVEL.1.to_owned());
        env
    }

    fn remember(&self, kind: OutcomeKind, detail: &str, tell: &mut dyn FnMut(String)) {
        self.keep(
            QuarantineEntry {
                machine: self.place.clone(),
                arm: format!("{}={}", LEVEL.0, LEVEL.1),
                env: self.env(),
                outcome: Outcome { kind, detail: detail.to_owned() },
                since: humantime::format_rfc3339_seconds(wall_time()).to_string(),
                run: self.run.clone(),
            },
            tell,
        );
    }

    fn keep(&self, entry: QuarantineEntry, tell: &mut dyn FnMut(String)) {
        if let Err(error) = self.store.remember(entry) {
            tell(format!("later runs will not know what peer access did here: {error}"));
        }
    }

    /// What is remembered of it by now.
    fn known(&self) -> Option<QuarantineEntry> {
        let entries = self.store.remembered().entries.unwrap_or_default();
        let env = self.env();
        entries.into_iter().find(|entry| entry.machine.combined == self.place.combined && entry.env == env)
    }

    /// As if nothing had been tested.
    fn restore(&self, before: Option<QuarantineEntry>, tell: &mut dyn FnMut(String)) {
        match before {
            Some(before) => self.keep(before, tell),
            None => self.forget(tell),
        }
    }

    fn forget(&self, tell: &mut dyn FnMut(String)) {
        if let Err(error) = self.store.forget(&self.place.combined, &self.env()) {
            tell(format!("what is remembered of peer access here could not be changed: {error}"));
        }
    }
}

const fn question(tier: PeerTier) -> &'static str {
    match tier {
        PeerTier::Granted => "it is granted",
        PeerTier::Copied => "bytes arrive",
        PeerTier::Reduced => "collectives add up",
    }
}

/// After what a GPU stopped to answer, where that is remembered.
const TESTED: &str = "peer access was tested";

fn wedged(after: &str, detail: &str) -> Failure {
    let failure = Failure::new(ErrorKind::MachineUnfit, format!("a GPU no longer answers after {after}: {detail}"));
    let reset = "it needs a reset or a reboot, which this tool never does";
    if after == TESTED {
        failure
            .with_hint(format!("{reset}; later runs leave peer access alone here (--retry-quarantined tests it again)"))
    } else {
        failure.with_hint(reset)
    }
}

/// Whether every rank reaches others by peer access and by nothing else.
fn is_direct(ways: &[Vec<String>]) -> bool {
    !ways.is_empty() && ways.iter().all(|ways| !ways.is_empty() && ways.iter().all(|way| way.starts_with("P2P/")))
}

fn told(ways: &[Vec<String>]) -> String {
    let all: Vec<&String> = ways.iter().flatten().unique().sorted().collect();
    if all.is_empty() { "what it does not say".to_owned() } else { all.into_iter().join(" and ") }
}

fn rounded(seconds: f64) -> f64 {
    (seconds * 1000.0).round() / 1000.0
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::record::{Check, FORMAT};

    fn check(name: &str, verdict: CheckVerdict) -> Check {
        Check {
            name: name.to_owned(),
            group: "system".to_owned(),
            verdict,
            question: "?".to_owned(),
            evidence: format!("seen of {name}"),
            advice: String::new(),
        }
    }

    #[test]
    fn what_doctor_warns_of_speaks_against_it_and_only_what_concerns_it() {
        let checks = CheckReport {
            format: FORMAT,
            checks: vec![
                check("iommu", CheckVerdict::Warn),
                check("acs-redirect", CheckVerdict::Unknown),
                check("virtualisation", CheckVerdict::Pass),
                check("gpu-idle", CheckVerdict::Fail),
                check("pcie-link", CheckVerdict::Warn),
            ],
        };
        let found = suspicions(&checks, None, None, false);
        assert_eq!(found, ["iommu: seen of iommu", "gpu-idle: seen of gpu-idle"]);
        let shut = |wish, found: &[String]| super::shut(wish, found, 8).map(|report| report.reason);
        assert_eq!(shut(PeerAccess::Auto, &[]), None);
        assert!(shut(PeerAccess::Auto, &found).unwrap().contains("since iommu: seen of iommu; gpu-idle"));
        assert_eq!(shut(PeerAccess::Test, &found), None);
        assert!(shut(PeerAccess::Never, &[]).unwrap().contains("never"));
    }

    #[test]
    fn what_failed_here_before_speaks_against_it_until_it_is_asked_for_again() {
        let folder = tempfile::tempdir().unwrap();
        let place = |name: &str| FingerprintParts { combined: name.to_owned(), parts: BTreeMap::new() };
        let (here, elsewhere) = (place("here"), place("elsewhere"));
        let pins = BTreeMap::new();
        let memory = PeerMemory { store: Store::new(folder.path()), place: &here, pins: &pins, run: "run".to_owned() };
        let none = CheckReport { format: FORMAT, checks: Vec::new() };
        let mut told = Vec::new();
        memory.remember(OutcomeKind::TimedOut, "no answer", &mut |said| told.push(said));
        let found = suspicions(&none, Some(&memory.store), Some(&here), false);
        assert!(found[0].starts_with("it hung here on ") && found[0].ends_with("no answer"), "{found:?}");
        assert!(suspicions(&none, Some(&memory.store), Some(&elsewhere), false).is_empty());
        assert!(suspicions(&none, Some(&memory.store), Some(&here), true).is_empty());
        // A test that somebody stops leaves what was known before it.
        let mut tell = |said| told.push(said);
        let before = memory.known();
        memory.remember(OutcomeKind::TimedOut, "began and never ended", &mut tell);
        memory.restore(before, &mut tell);
        assert_eq!(suspicions(&none, Some(&memory.store), Some(&here), false), found);
        memory.restore(None, &mut tell);
        assert!(suspicions(&none, Some(&memory.store), Some(&here), false).is_empty());
        memory.remember(OutcomeKind::TimedOut, "no answer", &mut tell);
        memory.forget(&mut tell);
        assert!(suspicions(&none, Some(&memory.store), Some(&here), false).is_empty());
        assert!(told.is_empty(), "{told:?}");
    }

    #[test]
    fn one_rank_that_goes_another_way_is_no_peer_access() {
        let ways = |all: &[&[&str]]| -> Vec<Vec<String>> {
            all.iter().map(|ways| ways.iter().map(|way| (*way).to_owned()).collect()).collect()
        };
        assert!(is_direct(&ways(&[&["P2P/CUMEM"], &["P2P/IPC", "P2P/CUMEM"]])));
        assert!(!is_direct(&ways(&[&["P2P/CUMEM"], &["P2P/CUMEM", "SHM/direct/direct"]])));
        assert!(!is_direct(&ways(&[&["P2P/CUMEM"], &[]])), "what a rank does not say is not known");
        assert!(!is_direct(&[]));
    }
}
