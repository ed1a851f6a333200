//! Which machine is explained: this one, or one that a file describes.

use std::path::Path;

use super::{ExplainRequest, did_you_mean};
use crate::backend::simulated::{MACHINES, SimulatedMachine};
use crate::discovery::{DiscoveryError, wiring_of};
use crate::doctor::{VERIFIED, refuses};
use crate::error_kind::{ErrorKind, Failure};
use crate::flow::facts::{MachineWish, ask_wiring, gather};
use crate::flow::workload::read_bounded;
use crate::machine::{Machine, NcclLibrary, NcclVersion, Topology};
use crate::process::Supervisor;
use crate::record::Pin;

/// The word for this machine.
const HERE: &str = "auto";
/// Largest machine file.
const FILE_BYTES: u64 = 1 << 20;

/// What is known of a machine.
pub(super) struct ExplainedMachine {
    pub(super) name: String,
    pub(super) labels: Vec<String>,
    pub(super) ranks: u32,
    /// Whose choices are predicted.
    pub(super) version: NcclVersion,
    /// The wiring, or what of it could not be read.
    pub(super) topology: Result<Topology, Vec<String>>,
    pub(super) notes: Vec<String>,
    /// Where it is this one.
    pub(super) real: Option<RealMachine>,
}

/// This machine.
pub(super) struct RealMachine {
    pub(super) machine: Machine,
    pub(super) devices: Vec<u32>,
    pub(super) nccl: Option<NcclLibrary>,
    /// What NCCL's configuration files set.
    pub(super) conf: Vec<Pin>,
    /// Why NCCL is not started.
    pub(super) no_launch: Option<String>,
}

/// Finds the machine that is meant.
pub(super) fn find_machine(request: &ExplainRequest, supervisor: &Supervisor) -> Result<ExplainedMachine, Failure> {
    let only_here = request.nccl_lib.is_some() || request.root.is_some() || !request.devices.is_empty();
    match request.machine.as_deref() {
        Some(name) if name != HERE => {
            if only_here {
                return Err(Failure::new(
                    ErrorKind::Usage,
                    "--nccl-lib, --devices and --root are about this machine, and --machine names another",
                ));
            }
            described(name, request.nccl)
        }
        named => {
            let (installed, report) = ask_wiring(supervisor, &request.environment);
            if installed {
                return this_machine(request, supervisor, report);
            }
            // A container that was started without its GPUs looks just like this.
            if named.is_some() || only_here {
                return Err(Failure::from(DiscoveryError::NoDriver)
                    .with_hint(format!("name a machine that is described: --machine {}", known().join(", "))));
            }
            let (name, _) = MACHINES[0];
            let mut machine = described(name, request.nccl)?;
            let note = format!(
                "no NVIDIA driver is installed here: this is the simulated machine {name}, others with --machine"
            );
            machine.notes.insert(0, note);
            Ok(machine)
        }
    }
}

fn known() -> Vec<&'static str> {
    MACHINES.iter().map(|(name, _)| *name).collect()
}

/// A machine that a file describes.
fn described(name: &str, version: Option<NcclVersion>) -> Result<ExplainedMachine, Failure> {
    let simulated = match SimulatedMachine::named(name) {
        Some(machine) => machine?,
        None => from_file(name)?,
    };
    let machine = simulated.machine();
    let Some(topology) = simulated.topology() else {
        return Err(Failure::new(
            ErrorKind::Usage,
            format!("{name} is a table of times without a topology: nothing of NCCL's choices follows from it"),
        )
        .with_hint("name a machine file of format 2, or one of those compiled in"));
    };
    Ok(ExplainedMachine {
        name: machine.name.clone(),
        labels: vec!["SIMULATED".to_owned()],
        ranks: topology.gpus.len() as u32,
        version: version.or_else(|| simulated.nccl_version()).unwrap_or(VERIFIED),
        topology: Ok(topology),
        notes: vec![simulated.description()],
        real: None,
    })
}

fn from_file(name: &str) -> Result<SimulatedMachine, Failure> {
    let text = read_bounded(Path::new(name), FILE_BYTES).map_err(|error| {
        let known = known();
        let near = did_you_mean(name, known.iter().copied().chain([HERE]));
        Failure::new(ErrorKind::Usage, format!("no machine {name:?}: {error}")).with_hint(format!(
            "{near}there are {HERE} (this one), {}, and files of the simulated-machine format",
            known.join(", ")
        ))
    })?;
    if text.trim_start().starts_with('<') {
        return Err(Failure::new(
            ErrorKind::Usage,
            format!("{name} looks like XML, and this version reads no topology dumps of NCCL"),
        )
        .with_hint(
            "describe the machine in a file of the simulated-machine format, or run this on the machine itself",
        ));
    }
    Ok(SimulatedMachine::parse(&text)?)
}

/// The machine this runs on.
fn this_machine(
    request: &ExplainRequest,
    supervisor: &Supervisor,
    report: Result<crate::probe::ProbeReport, DiscoveryError>,
) -> Result<ExplainedMachine, Failure> {
    let seen = report.as_ref().ok().cloned().unwrap_or_default();
    let wish = MachineWish {
        devices: &request.devices,
        ranks: None,
        nccl_lib: request.nccl_lib.as_deref(),
        state_folder: None,
    };
    let facts = gather(supervisor, &request.environment, (true, report), &wish)?;
    let machine = facts.machine?;
    let nccl = match (facts.nccl, request.nccl) {
        (Ok(nccl), _) => Some(nccl),
        (Err(_), Some(_)) => None,
        (Err(error), None) => return Err(error.into()),
    };
    let gpus: Vec<_> = machine.gpus.iter().filter(|gpu| facts.devices.contains(&gpu.index)).cloned().collect();
    if gpus.len() < 2 {
        return Err(Failure::new(ErrorKind::Usage, "a collective needs two GPUs, and there is one to explain it for")
            .with_hint("choose more with --devices, or name a machine that is described with --machine"));
    }
    let wiring = wiring_of(request.root.as_deref().unwrap_or(Path::new("/")), &gpus, &seen);
    let loaded = nccl.as_ref().map(|nccl| NcclVersion::from_code(nccl.version));
    let no_launch = match (loaded, request.nccl) {
        _ if request.no_launch => Some("--no-launch asks for predictions only".to_owned()),
        (None, _) => Some("there is no NCCL library".to_owned()),
        (Some(loaded), Some(wanted)) if loaded != wanted => {
            Some(format!("the library here is NCCL {loaded}, and --nccl asks about {wanted}"))
        }
        _ => refuses(&facts.checks).map(|refusal| format!("{refusal} (`nccltune doctor` shows more)")),
    };
    Ok(ExplainedMachine {
        name: crate::wording::machine(&machine, &facts.devices),
        labels: if facts.fake { vec!["SIMULATED".to_owned()] } else { Vec::new() },
        ranks: gpus.len() as u32,
        version: request.nccl.or(loaded).unwrap_or(VERIFIED),
        topology: wiring.topology,
        notes: wiring.assumptions,
        real: Some(RealMachine { machine, devices: facts.devices, nccl, conf: facts.conf, no_launch }),
    })
}
