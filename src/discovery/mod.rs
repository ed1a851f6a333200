//! What is this machine? Asked through a probe process with a deadline, and read from what the kernel
//! shows of its wiring.

mod host;
mod topology;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::Duration;

use crate::canonical::Fingerprint;
use crate::clock::Deadline;
use crate::error_kind::{Classified, ErrorKind};
use crate::file_lock;
use crate::machine::{Gpu, LibrarySource, Machine, NcclLibrary};
use crate::probe::{PROBE_ARGUMENT, ProbeReport, Question};
use crate::process::{ChildEvent, ChildSpec, Group, Supervisor, SupervisorError};

pub use host::{cpu_model, host_parts, quick_parts};
pub use topology::{Wiring, wiring_of};

/// How long the driver may take to say what is there. A cold driver without persistence needs
/// several seconds per GPU.
const MACHINE_WAIT: Duration = Duration::from_secs(60);
/// How long loading libnccl may take from a cold disk.
const NCCL_WAIT: Duration = Duration::from_secs(60);
/// How long a GPU may take to copy a page.
const ANSWER_WAIT: Duration = Duration::from_secs(30);
/// How long all copies between all pairs of GPUs may take; on eight slow ones it is seconds.
const COPY_WAIT: Duration = Duration::from_secs(60);
/// How long a Ctrl-C may go unnoticed meanwhile.
const SLICE: Duration = Duration::from_millis(200);

/// Why the machine could not be described.
#[derive(Debug, thiserror::Error)]
pub enum DiscoveryError {
    /// The probe could not be started.
    #[error(transparent)]
    Supervisor(#[from] SupervisorError),
    /// Driver or library did not answer in time.
    #[error("no answer within {seconds} s while {doing}")]
    NoAnswer {
        /// How long it was waited for.
        seconds: u64,
        /// What was asked.
        doing: &'static str,
    },
    /// The probe ended without an answer.
    #[error("{doing} failed: {detail}")]
    ProbeFailed {
        /// What was asked.
        doing: &'static str,
        /// How it ended and its last words.
        detail: String,
    },
    /// The user did not want to wait for the answer.
    #[error("stopped while {doing}")]
    Interrupted {
        /// What was asked.
        doing: &'static str,
    },
    /// The driver is there but cannot be used.
    #[error("an NVIDIA driver is installed but cannot be used: {0}")]
    DriverUnusable(String),
    /// There is no driver at all.
    #[error("no NVIDIA driver is installed here")]
    NoDriver,
    /// There is no GPU.
    #[error("the NVIDIA driver shows no GPU to this process")]
    NoGpu,
    /// A device that was asked for does not exist.
    #[error("there is no GPU {wanted:?}; there are: {known}")]
    UnknownDevice {
        /// What was asked for.
        wanted: String,
        /// What there is.
        known: String,
    },
    /// Another run of this tool uses the GPU.
    #[error("another nccltune is measuring on {uuid}")]
    GpuTaken {
        /// The GPU.
        uuid: String,
    },
    /// A lock file cannot be used.
    #[error("could not lock a GPU: {error}")]
    GpuLock {
        /// The lock file.
        path: PathBuf,
        /// The system's error.
        error: std::io::Error,
    },
    /// No libnccl was found.
    #[error("no NCCL library found: {0}")]
    NcclNotFound(String),
    /// The chosen libnccl cannot be used.
    #[error("the NCCL library {path} cannot be used: {reason}")]
    NcclUnusable {
        /// The library.
        path: PathBuf,
        /// Why.
        reason: String,
    },
}

impl Classified for DiscoveryError {
    fn kind(&self) -> ErrorKind {
        match self {
            Self::Supervisor(error) => error.kind(),
            Self::UnknownDevice { .. } => ErrorKind::Usage,
            Self::Interrupted { .. } => ErrorKind::Stopped,
            _ => ErrorKind::MachineUnfit,
        }
    }

    fn hint(&self) -> Option<String> {
        match self {
            Self::DriverUnusable(_) | Self::NoAnswer { .. } | Self::ProbeFailed { .. } => Some(
                "run `nvidia-smi`; if it fails or hangs too, the driver needs attention first. \
                 To see the tool work without GPUs: `nccltune tune --backend simulated`"
                    .to_owned(),
            ),
            Self::NoGpu => {
                Some("CUDA_VISIBLE_DEVICES may hide them, or the container was started without them".to_owned())
            }
            Self::NoDriver => Some(
                "only simulation and replay work here: `nccltune tune --backend simulated`, \
                 or --backend replay --recorded DIR"
                    .to_owned(),
            ),
            Self::GpuTaken { .. } => Some("wait for it, or choose other GPUs with --devices".to_owned()),
            Self::NcclNotFound(_) => Some(
                "name it with --nccl-lib PATH, best the one your server loads \
                 (in a Python environment: site-packages/nvidia/nccl/lib/libnccl.so.2)"
                    .to_owned(),
            ),
            _ => None,
        }
    }
}

/// Whether an NVIDIA driver is installed here, told by what a driver leaves in the system and by
/// whether its library can be loaded. Anything of it counts: a driver that is half there must be
/// reported as broken, never be mistaken for a machine without GPUs.
pub fn driver_is_installed(report: &ProbeReport) -> bool {
    report.cuda_library
        || report.driver.is_some()
        || ["/proc/driver/nvidia/version", "/dev/nvidiactl", "/sys/module/nvidia"]
            .iter()
            .any(|path| Path::new(path).exists())
}

/// Asks one question in a child.
pub fn ask(
    supervisor: &Supervisor,
    question: &Question,
    environment: &BTreeMap<String, String>,
) -> Result<ProbeReport, DiscoveryError> {
    ask_within(supervisor, question, environment, None)
}

/// The same; the answer may take this long at most, where that is less than its own limit.
pub fn ask_within(
    supervisor: &Supervisor,
    question: &Question,
    environment: &BTreeMap<String, String>,
    limit: Option<Duration>,
) -> Result<ProbeReport, DiscoveryError> {
    let (wait, doing) = match question {
        Question::Machine => (MACHINE_WAIT, "listing the GPUs"),
        Question::Wiring => (MACHINE_WAIT, "asking how the GPUs are connected"),
        Question::Nccl(_) => (NCCL_WAIT, "loading NCCL"),
        Question::PeerCopies { .. } => (COPY_WAIT, "copying between GPUs"),
        Question::Answers(_) => (ANSWER_WAIT, "copying a page on every GPU"),
        // It answers when it is told to end.
        Question::Keep(_) => (ANSWER_WAIT, "keeping the driver loaded"),
    };
    let wait = limit.map_or(wait, |limit| limit.min(wait));
    let arguments = std::iter::once(PROBE_ARGUMENT.to_owned()).chain(question.arguments()).collect();
    let mut group = supervisor.start_group(vec![ChildSpec { arguments, environment: environment.clone() }])?;
    let deadline = Deadline::after(wait);
    let mut answer = None;
    let mut ended = None;
    // The health check is part of an orderly stop, which it must survive.
    let may_stop = !matches!(question, Question::Answers(_));
    while ended.is_none() && answer.is_none() {
        if may_stop && supervisor.interrupted() {
            return Err(DiscoveryError::Interrupted { doing });
        }
        match group.receive(Deadline::after(SLICE.min(deadline.remaining()))) {
            Some(ChildEvent::Frame { line, .. }) => answer = Some(line),
            Some(ChildEvent::BadFrame { reason, .. }) => {
                return Err(DiscoveryError::ProbeFailed { doing, detail: reason });
            }
            Some(ChildEvent::Exited { exit, .. }) => ended = Some(exit),
            None if !deadline.is_over() => {}
            None => {
                // A copy that hangs may hold its process in the driver for ever.
                let copies = matches!(question, Question::PeerCopies { .. });
                if copies && group.stop(Duration::from_millis(100)).iter().any(Option::is_none) {
                    let stuck = "a probe that copied between GPUs could not be ended even by SIGKILL";
                    return Err(DiscoveryError::DriverUnusable(stuck.to_owned()));
                }
                return Err(DiscoveryError::NoAnswer { seconds: wait.as_secs(), doing });
            }
        }
    }
    let failed = |what: String, words: String| DiscoveryError::ProbeFailed {
        doing,
        detail: if words.is_empty() { what } else { format!("{what}; last words: {words}") },
    };
    let words = group.last_log_lines(0, 3);
    group.stop(Duration::from_millis(500));
    match (answer, ended) {
        (Some(line), _) => serde_json::from_str(&line).map_err(|error| failed(error.to_string(), words)),
        (None, Some(exit)) => Err(failed(exit.to_string(), words)),
        (None, None) => Err(failed("no answer".to_owned(), words)),
    }
}

/// The machine behind a report: the GPUs that CUDA shows to this process, in PCI order.
pub fn machine_of(report: &ProbeReport) -> Result<Machine, DiscoveryError> {
    if let Some(error) = &report.cuda_error {
        return Err(DiscoveryError::DriverUnusable(error.clone()));
    }
    if report.gpus.is_empty()
        && let Some(error) = &report.nvml_error
    {
        return Err(DiscoveryError::DriverUnusable(error.clone()));
    }
    let mut gpus = Vec::new();
    for (ordinal, address) in report.cuda_devices.iter().enumerate() {
        match report.gpus.iter().find(|gpu| gpu.pci_bus_id == *address) {
            Some(gpu) => gpus.push(Gpu { index: ordinal as u32, ..gpu.clone() }),
            None => {
                return Err(DiscoveryError::DriverUnusable(format!(
                    "CUDA shows a GPU at {address} that NVML does not know"
                )));
            }
        }
    }
    if gpus.is_empty() {
        return Err(DiscoveryError::NoGpu);
    }
    Ok(Machine {
        name: Machine::describe_gpus(&gpus),
        driver: report.driver.clone(),
        cuda_driver_version: report.cuda_driver_version,
        cpu: cpu_model(Path::new("/")),
        gpus,
    })
}

/// The GPUs that `--devices` names (positions in PCI order, or UUIDs), as indices; all without it.
pub fn select_devices(machine: &Machine, wanted: &[String]) -> Result<Vec<u32>, DiscoveryError> {
    if wanted.is_empty() {
        return Ok(machine.gpus.iter().map(|gpu| gpu.index).collect());
    }
    let known =
        || machine.gpus.iter().map(|gpu| format!("{} ({})", gpu.index, gpu.uuid)).collect::<Vec<_>>().join(", ");
    let mut devices = Vec::new();
    for name in wanted {
        let found = machine
            .gpus
            .iter()
            .find(|gpu| gpu.uuid.eq_ignore_ascii_case(name) || name.parse() == Ok(gpu.index))
            .ok_or_else(|| DiscoveryError::UnknownDevice { wanted: name.clone(), known: known() })?;
        if !devices.contains(&found.index) {
            devices.push(found.index);
        }
    }
    devices.sort_unstable();
    Ok(devices)
}

/// Candidate libraries, without loading any.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct NcclCandidates {
    /// Named by the user.
    pub user: Option<PathBuf>,
    /// In the nvidia-nccl package of the Python environment on PATH.
    pub python: Vec<PathBuf>,
}

/// Looks for libnccl where servers get it from: the Python environment that `python3` on PATH
/// belongs to (its virtual environment, else its installation). Nothing is executed.
pub fn nccl_candidates(user: Option<&Path>, environment: &BTreeMap<String, String>) -> NcclCandidates {
    let mut prefixes: Vec<PathBuf> = Vec::new();
    for name in ["VIRTUAL_ENV", "CONDA_PREFIX"] {
        prefixes.extend(environment.get(name).map(PathBuf::from));
    }
    let path = environment.get("PATH").map_or("", String::as_str);
    for folder in path.split(':').filter(|folder| !folder.is_empty()) {
        let python = Path::new(folder).join("python3");
        if python.exists() {
            // A virtual environment's python3 is a link to the real one; its packages are beside
            // the link, a plain installation's beside the target.
            prefixes.extend(Path::new(folder).parent().map(Path::to_owned));
            if let Ok(real) = fs_err::canonicalize(&python) {
                prefixes.extend(real.parent().and_then(Path::parent).map(Path::to_owned));
            }
            break;
        }
    }
    let mut python = Vec::new();
    for prefix in prefixes {
        for library in ["lib", "lib64"] {
            let Ok(entries) = fs_err::read_dir(prefix.join(library)) else { continue };
            for entry in entries.flatten().take(1000) {
                if !entry.file_name().to_string_lossy().starts_with("python3") {
                    continue;
                }
                for packages in ["site-packages", "dist-packages"] {
                    let candidate = entry.path().join(packages).join("nvidia/nccl/lib/libnccl.so.2");
                    if let Ok(real) = fs_err::canonicalize(&candidate)
                        && !python.contains(&real)
                    {
                        python.push(real);
                    }
                }
            }
        }
    }
    NcclCandidates { user: user.map(Path::to_owned), python }
}

/// Loads the library that will be used in a probe, and names it: the user's, else the Python
/// environment's, else the loader's.
pub fn choose_nccl(
    supervisor: &Supervisor,
    candidates: &NcclCandidates,
    environment: &BTreeMap<String, String>,
) -> Result<NcclLibrary, DiscoveryError> {
    let (path, source) = match (&candidates.user, candidates.python.first()) {
        (Some(path), _) => {
            let real = fs_err::canonicalize(path)
                .map_err(|error| DiscoveryError::NcclUnusable { path: path.clone(), reason: error.to_string() })?;
            (Some(real), LibrarySource::User)
        }
        (None, Some(path)) => (Some(path.clone()), LibrarySource::PythonEnvironment),
        (None, None) => (None, LibrarySource::Loader),
    };
    let question = Question::Nccl(path.as_ref().map(|path| path.to_string_lossy().into_owned()));
    let report = ask(supervisor, &question, environment)?;
    let (Some(version), Some(path)) = (report.nccl_version, report.nccl_path) else {
        let reason = report.nccl_error.unwrap_or_else(|| "no version".to_owned());
        return Err(match path {
            Some(path) => DiscoveryError::NcclUnusable { path, reason },
            None => DiscoveryError::NcclNotFound(format!(
                "no nvidia-nccl package in the Python environment on PATH, and the loader says: {reason}"
            )),
        });
    };
    let unreadable =
        |error: std::io::Error| DiscoveryError::NcclUnusable { path: PathBuf::from(&path), reason: error.to_string() };
    let file = fs_err::File::open(&path).map_err(unreadable)?;
    let sha256 = Fingerprint::of_reader(file).map_err(unreadable)?.as_str().to_owned();
    Ok(NcclLibrary { path, version, sha256, source })
}

/// libcublasLt for forward passes: beside the chosen NCCL in its Python environment, else in the
/// Python environment on PATH, else by the name the loader knows. Nothing is loaded here.
pub fn cublaslt_path(nccl: &NcclLibrary, candidates: &NcclCandidates, cuda_driver_version: Option<i32>) -> String {
    let major = if cuda_driver_version.is_some_and(|version| version < 13_000) { 12 } else { 13 };
    let from_nccl = Path::new(&nccl.path).parent().and_then(Path::parent).and_then(Path::parent).map(Path::to_owned);
    let from_python = candidates
        .python
        .iter()
        .filter_map(|path| path.parent().and_then(Path::parent).and_then(Path::parent).map(Path::to_owned));
    for folder in from_nccl.into_iter().chain(from_python) {
        for package in ["cu13", "cublas"] {
            for major in [13, 12] {
                let path = folder.join(package).join("lib").join(format!("libcublasLt.so.{major}"));
                if path.is_file() {
                    return path.to_string_lossy().into_owned();
                }
            }
        }
    }
    format!("libcublasLt.so.{major}")
}

/// Whether these GPUs still answer, asked after something went wrong on them. Returns all GPUs as NVML
/// saw them just before, for the memory that is free.
pub fn gpus_answer(
    supervisor: &Supervisor,
    devices: &[u32],
    environment: &BTreeMap<String, String>,
) -> Result<Vec<Gpu>, DiscoveryError> {
    let report = ask(supervisor, &Question::Answers(devices.to_vec()), environment)?;
    match report.cuda_error {
        None => Ok(report.gpus),
        Some(error) => Err(DiscoveryError::DriverUnusable(error)),
    }
}

/// A child with an idle context on each of these GPUs, and the GPUs as NVML sees them with these
/// contexts open. The child ends when the group is dropped, or with this process.
pub fn keep_contexts(
    supervisor: &Supervisor,
    devices: &[u32],
    environment: &BTreeMap<String, String>,
) -> Option<(Group, Vec<Gpu>)> {
    let arguments =
        std::iter::once(PROBE_ARGUMENT.to_owned()).chain(Question::Keep(devices.to_vec()).arguments()).collect();
    let mut group = supervisor.start_group(vec![ChildSpec { arguments, environment: environment.clone() }]).ok()?;
    match group.receive(Deadline::after(ANSWER_WAIT))? {
        ChildEvent::Frame { line, .. } => {
            let report: ProbeReport = serde_json::from_str(&line).ok()?;
            Some((group, report.gpus))
        }
        _ => None,
    }
}

/// Exclusive use of GPUs among runs of this tool, for as long as the value lives.
#[derive(Debug)]
pub struct GpuLocks {
    _files: Vec<fs_err::File>,
}

impl GpuLocks {
    /// Locks every GPU by its identity. Two runs that share a GPU would measure each other.
    pub fn take(gpus: &[Gpu]) -> Result<Self, DiscoveryError> {
        Self::take_in(gpus, Path::new("/tmp"))
    }

    fn take_in(gpus: &[Gpu], folder: &Path) -> Result<Self, DiscoveryError> {
        let mut files = Vec::new();
        for gpu in gpus {
            let name: String = gpu.uuid.chars().filter(|c| c.is_ascii_alphanumeric() || *c == '-').take(64).collect();
            let path = folder.join(format!("nccltune-{name}.lock"));
            let unusable = |error: std::io::Error| DiscoveryError::GpuLock { path: path.clone(), error };
            // The file may be another user's: reading is enough to lock it.
            let file = fs_err::OpenOptions::new()
                .create(true)
                .truncate(false)
                .write(true)
                .open(&path)
                .or_else(|error| match error.kind() {
                    std::io::ErrorKind::PermissionDenied => fs_err::OpenOptions::new().read(true).open(&path),
                    _ => Err(error),
                })
                .map_err(unusable)?;
            if !file_lock::take(file.file(), file_lock::A_MOMENT).map_err(unusable)? {
                return Err(DiscoveryError::GpuTaken { uuid: gpu.uuid.clone() });
            }
            files.push(file);
        }
        Ok(Self { _files: files })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wording::fixtures;

    fn gpu(index: u32, address: &str) -> Gpu {
        Gpu {
            uuid: format!("GPU-{index}"),
            name: "NVIDIA Test".to_owned(),
            pci_bus_id: address.to_owned(),
            ..fixtures::gpu(index)
        }
    }

    fn report() -> ProbeReport {
        ProbeReport {
            cuda_library: true,
            cuda_devices: vec!["0000:2b:00.0".to_owned(), "0000:3b:00.0".to_owned()],
            gpus: vec![gpu(0, "0000:3b:00.0"), gpu(1, "0000:2b:00.0"), gpu(2, "0000:4b:00.0")],
            ..ProbeReport::default()
        }
    }

    #[test]
    fn the_machine_holds_what_cuda_shows_in_its_order() {
        let machine = machine_of(&report()).unwrap();
        let uuids: Vec<&str> = machine.gpus.iter().map(|gpu| gpu.uuid.as_str()).collect();
        assert_eq!(uuids, ["GPU-1", "GPU-0"], "NVML's numbering is not CUDA's");
        assert_eq!(machine.gpus[0].index, 0);
        assert_eq!(machine.name, "2x NVIDIA Test");
    }

    #[test]
    fn a_driver_that_is_there_but_broken_is_not_a_machine_without_gpus() {
        let broken = ProbeReport { cuda_error: Some("CUDA_ERROR_SYSTEM_DRIVER_MISMATCH".to_owned()), ..report() };
        let error = machine_of(&broken).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::MachineUnfit);
        assert!(driver_is_installed(&broken));
    }

    #[test]
    fn devices_are_chosen_by_position_or_identity() {
        let machine = machine_of(&report()).unwrap();
        assert_eq!(select_devices(&machine, &[]).unwrap(), [0, 1]);
        assert_eq!(select_devices(&machine, &["gpu-0".to_owned(), "0".to_owned()]).unwrap(), [0, 1]);
        let error = select_devices(&machine, &["7".to_owned()]).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Usage);
    }

    #[test]
    fn a_gpu_belongs_to_one_run_at_a_time() {
        let folder = tempfile::tempdir().unwrap();
        let (one, two) = (gpu(0, "a"), gpu(1, "b"));
        let first = GpuLocks::take_in(std::slice::from_ref(&one), folder.path()).unwrap();
        assert!(GpuLocks::take_in(std::slice::from_ref(&two), folder.path()).is_ok());
        let error = GpuLocks::take_in(&[two, one.clone()], folder.path()).unwrap_err();
        assert_eq!(error.to_string(), "another nccltune is measuring on GPU-0");
        assert_eq!(error.kind(), ErrorKind::MachineUnfit);
        drop(first);
        assert!(GpuLocks::take_in(&[one], folder.path()).is_ok());
    }

    #[test]
    fn the_python_environment_on_the_path_is_searched_without_running_it() {
        let folder = tempfile::tempdir().unwrap();
        let library = folder.path().join("venv/lib/python3.12/site-packages/nvidia/nccl/lib");
        fs_err::create_dir_all(&library).unwrap();
        fs_err::write(library.join("libnccl.so.2"), "not a library").unwrap();
        fs_err::create_dir_all(folder.path().join("venv/bin")).unwrap();
        fs_err::write(folder.path().join("venv/bin/python3"), "#!/bin/false").unwrap();
        let environment =
            BTreeMap::from([("PATH".to_owned(), folder.path().join("venv/bin").to_string_lossy().into_owned())]);
        let candidates = nccl_candidates(None, &environment);
        assert_eq!(candidates.python.len(), 1);
        assert!(candidates.python[0].ends_with("nvidia/nccl/lib/libnccl.so.2"));
    }
}
