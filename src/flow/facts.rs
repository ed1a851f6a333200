//! What is known of the machine before anything is measured.

use std::collections::BTreeMap;
use std::path::Path;

use super::environment::worker_environment;
use crate::canonical::Fingerprint;
use crate::discovery::{self, DiscoveryError};
use crate::doctor;
use crate::error_kind::Failure;
use crate::machine::{Machine, NcclLibrary, NcclVersion};
use crate::probe::{ProbeReport, Question};
use crate::process::Supervisor;
use crate::quarantine::Store;
use crate::record::{CheckReport, FingerprintParts, Pin};

/// What should measure.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum BackendChoice {
    /// NCCL where an NVIDIA driver is installed, the simulation where none is.
    #[default]
    Auto,
    /// NCCL.
    Nccl,
    /// A simulated machine.
    Simulated,
    /// A recorded run.
    Replay,
}

/// The machine, its NCCL, and what doctor says of both.
#[derive(Debug)]
pub struct MachineFacts {
    /// Whether a driver is installed at all.
    pub driver_installed: bool,
    /// The machine; an error where its driver cannot be used.
    pub machine: Result<Machine, DiscoveryError>,
    /// GPUs chosen, by position.
    pub devices: Vec<u32>,
    /// The library; an error where none can be used.
    pub nccl: Result<NcclLibrary, DiscoveryError>,
    /// libcublasLt for forward passes, by path or by the loader's name.
    pub cublaslt: Option<String>,
    /// Whether driver or NCCL is a stand-in for tests: nothing measured on it says anything of a GPU.
    pub fake: bool,
    /// Doctor's checks.
    pub checks: CheckReport,
    /// Variables in force from configuration files.
    pub conf: Vec<Pin>,
}

/// Whether an NVIDIA driver is installed, and what it says. A probe that fails while a driver left
/// its marks counts as installed.
pub(super) fn ask_driver(
    supervisor: &Supervisor,
    environment: &BTreeMap<String, String>,
) -> (bool, Result<ProbeReport, DiscoveryError>) {
    ask_about(supervisor, &Question::Machine, environment)
}

/// The same, and how the GPUs are connected.
pub(super) fn ask_wiring(
    supervisor: &Supervisor,
    environment: &BTreeMap<String, String>,
) -> (bool, Result<ProbeReport, DiscoveryError>) {
    ask_about(supervisor, &Question::Wiring, environment)
}

fn ask_about(
    supervisor: &Supervisor,
    question: &Question,
    environment: &BTreeMap<String, String>,
) -> (bool, Result<ProbeReport, DiscoveryError>) {
    let report = discovery::ask(supervisor, question, &probe_environment(environment));
    let installed = match &report {
        Ok(report) => discovery::driver_is_installed(report),
        Err(_) => discovery::driver_is_installed(&ProbeReport::default()),
    };
    (installed, report)
}

/// Probes see what workers will see.
pub(super) fn probe_environment(environment: &BTreeMap<String, String>) -> BTreeMap<String, String> {
    let mut probe = worker_environment(environment, &[], &[]);
    probe.insert("CUDA_DEVICE_ORDER".to_owned(), "PCI_BUS_ID".to_owned());
    probe
}

/// What the user said about the machine.
pub(super) struct MachineWish<'a> {
    /// GPUs, by position or identity; all without.
    pub(super) devices: &'a [String],
    /// Ranks of a launch; one for each GPU without.
    pub(super) ranks: Option<u32>,
    /// The library a server would load.
    pub(super) nccl_lib: Option<&'a Path>,
    /// Where earlier runs left what they remember, if anything names a place.
    pub(super) state_folder: Option<&'a Path>,
}

/// Gathers everything, and has doctor judge it.
pub(super) fn gather(
    supervisor: &Supervisor,
    environment: &BTreeMap<String, String>,
    (driver_installed, report): (bool, Result<ProbeReport, DiscoveryError>),
    wish: &MachineWish<'_>,
) -> Result<MachineFacts, Failure> {
    let (report, mut machine) = match report {
        Ok(report) => {
            let machine = discovery::machine_of(&report);
            (Some(report), machine)
        }
        Err(error) => (None, Err(error)),
    };
    let devices = match &machine {
        Ok(machine) => discovery::select_devices(machine, wish.devices)?,
        Err(_) => Vec::new(),
    };
    let candidates = discovery::nccl_candidates(wish.nccl_lib, environment);
    let probe_environment = probe_environment(environment);
    let nccl = discovery::choose_nccl(supervisor, &candidates, &probe_environment);
    let loader = discovery::ask(supervisor, &Question::Nccl(None), &probe_environment).ok();
    if supervisor.interrupted() {
        return Err(DiscoveryError::Interrupted { doing: "looking at the machine" }.into());
    }
    let loader_nccl = loader.as_ref().and_then(|loader| Some((loader.nccl_path.as_deref()?, loader.nccl_version?)));
    // NCCL asks the user database, not $HOME.
    let home = nix::unistd::User::from_uid(nix::unistd::getuid()).ok().flatten().map(|user| user.dir);
    let probe_error = machine.as_ref().err().map(ToString::to_string);
    let nccl_error = nccl.as_ref().err().map(ToString::to_string);
    let own = [std::process::id()];
    let remembered = wish.state_folder.map(|folder| Store::new(folder).remembered());
    let facts = doctor::Facts {
        root: Path::new("/"),
        environment,
        home: home.as_deref(),
        driver_installed,
        report: report.as_ref(),
        probe_error: probe_error.as_deref(),
        machine: machine.as_ref().ok(),
        devices: &devices,
        candidates: &candidates,
        loader_nccl,
        nccl: nccl.as_ref().ok(),
        nccl_error: nccl_error.as_deref(),
        ranks: wish.ranks.unwrap_or(devices.len() as u32),
        own_process_ids: &own,
        remembered: remembered.as_ref(),
    };
    let checks = doctor::examine(&facts);
    let version = nccl.as_ref().ok().map(|nccl| NcclVersion::from_code(nccl.version));
    let conf = doctor::conf_variables(Path::new("/"), environment, home.as_deref(), version);
    if !driver_installed {
        machine = Err(DiscoveryError::NoDriver);
    }
    let cublaslt = nccl.as_ref().ok().map(|nccl| {
        let driver = machine.as_ref().ok().and_then(|machine| machine.cuda_driver_version);
        discovery::cublaslt_path(nccl, &candidates, driver)
    });
    let fake = report.as_ref().is_some_and(|report| report.fake);
    if fake && let Ok(machine) = &mut machine {
        machine.name = format!("STAND-IN {}", machine.name);
    }
    Ok(MachineFacts { driver_installed, machine, devices, nccl, cublaslt, fake, checks, conf })
}

/// The fingerprint of everything that can change the answer, in named parts.
pub(super) fn fingerprint(
    machine: &Machine,
    devices: &[u32],
    nccl: Option<&NcclLibrary>,
    simulation: Option<&Fingerprint>,
) -> FingerprintParts {
    let gpus: Vec<_> = machine.gpus.iter().filter(|gpu| devices.contains(&gpu.index)).collect();
    let each =
        |of: &dyn Fn(&crate::machine::Gpu) -> String| gpus.iter().map(|gpu| of(gpu)).collect::<Vec<_>>().join(", ");
    let or_unknown = |text: Option<String>| text.unwrap_or_else(|| "unknown".to_owned());
    let mut parts = BTreeMap::from([
        ("gpus".to_owned(), each(&|gpu| gpu.name.clone())),
        ("gpu-identities".to_owned(), each(&|gpu| gpu.uuid.clone())),
        ("gpu-addresses".to_owned(), each(&|gpu| gpu.pci_bus_id.clone())),
        (
            "pcie-maximum".to_owned(),
            each(&|gpu| match (gpu.pcie_generation, gpu.pcie_width) {
                (Some([_, generation]), Some([_, width])) => format!("gen {generation} x{width}"),
                _ => "unknown".to_owned(),
            }),
        ),
        ("driver".to_owned(), or_unknown(machine.driver.clone())),
        ("cuda-driver".to_owned(), or_unknown(machine.cuda_driver_version.map(|version| version.to_string()))),
        ("cpu".to_owned(), or_unknown(machine.cpu.clone())),
        (
            "nccl".to_owned(),
            or_unknown(nccl.map(|nccl| format!("{} {}", NcclVersion::from_code(nccl.version), nccl.sha256))),
        ),
    ]);
    parts.extend(simulation.map(|table| ("simulation".to_owned(), table.to_string())));
    FingerprintParts { combined: Fingerprint::of(&parts).as_str().to_owned(), parts }
}
