//! What is known of the machine before anything is measured.

use std::collections::BTreeMap;
use std::path::Path;

use super::environment::worker_environment;
use crate::discovery::{self, DiscoveryError, host_parts};
use crate::doctor;
use crate::error_kind::Failure;
use crate::fingerprint::{Described, HostParts, parts};
use crate::machine::{Machine, NcclLibrary, NcclVersion};
use crate::probe::{ProbeReport, Question};
use crate::process::Supervisor;
use crate::quarantine::Store;
use crate::record::{CheckReport, FingerprintParts, Origin, Pin};

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
        files_only: false,
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

/// The fingerprint of everything that can change the answer, in named parts. `outside` is what no machine tells: the
/// engine, and NCCL's variables that were there before this program.
pub(super) fn real_fingerprint(
    machine: &Machine,
    devices: &[u32],
    nccl: Option<&NcclLibrary>,
    outside: HostParts,
) -> FingerprintParts {
    let used = machine.gpus.iter().filter(|gpu| devices.contains(&gpu.index));
    let addresses: Vec<String> = used.map(|gpu| gpu.pci_bus_id.clone()).collect();
    let mut host = host_parts(Path::new("/"), &addresses);
    host.extend(outside);
    parts(&Described { machine, devices, nccl, simulation: None, host: Some(&host) })
}

/// What no machine tells of itself: NCCL's variables that were set outside of this program, and the engine.
pub(super) fn outside_parts(pins: &[Pin], engine: &str, engine_version: Option<&str>) -> HostParts {
    let is_outside = |pin: &&Pin| matches!(pin.origin, Origin::Inherited | Origin::UserConf | Origin::SystemConf);
    let set: Vec<String> =
        pins.iter().filter(is_outside).map(|pin| format!("{}={}", pin.variable, pin.value)).collect();
    let version = engine_version.map(|version| format!(" {version}")).unwrap_or_default();
    HostParts::from([
        ("inherited-variables".to_owned(), if set.is_empty() { "none".to_owned() } else { set.join(" ") }),
        ("engine".to_owned(), format!("{engine}{version}")),
    ])
}
