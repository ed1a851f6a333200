//! The child side of `nccltune __probe`: questions to the driver that may hang or crash.
//!
//! The parent never loads the driver's libraries itself: a wedged driver blocks whoever asks it, so
//! a child asks, and the parent waits only as long as it wants to.

mod peer;

use std::collections::BTreeMap;
use std::io::{Read, Write};
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::path::Path;

use nvml_wrapper::enum_wrappers::device::{P2pCapabilitiesIndex, P2pStatus};
use nvml_wrapper::enum_wrappers::nv_link::Capability;
use nvml_wrapper::error::NvmlError;
use serde::{Deserialize, Serialize};

use crate::bindings::cuda::{
    DRIVER_LIBRARY, Device, can_access_peer, driver_is_present, driver_version_and_device_count, has_multicast,
    pci_bus_id,
};
use crate::bindings::nccl::Nccl;
use crate::dynlib::is_stand_in;
use crate::machine::Gpu;

/// The hidden argument that makes the executable a probe.
pub const PROBE_ARGUMENT: &str = "__probe";

/// Libraries by the names the loader knows.
const NVML_LIBRARY: &str = "libnvidia-ml.so.1";
const NCCL_LIBRARY: &str = "libnccl.so.2";

/// Most NVLink links of one GPU that are asked for.
const MOST_NVLINKS: u32 = 18;

/// What can be asked.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Question {
    /// Which driver and GPUs are there?
    Machine,
    /// Does this libnccl load, and which version is it? Without a path: the loader's libnccl.so.2.
    Nccl(Option<String>),
    /// The same, and how the GPUs are connected: NVLink, and which may write into which.
    Wiring,
    /// Do bytes that these GPUs (CUDA ordinals) write into each other's memory arrive? Random ones, from
    /// this seed.
    PeerCopies {
        /// Seed of the bytes.
        seed: u64,
        /// Which GPUs.
        devices: Vec<u32>,
    },
    /// Do these GPUs (CUDA ordinals) answer, and what memory is free on all of them?
    Answers(Vec<u32>),
    /// Keep a context on these GPUs open until the asker closes its end.
    Keep(Vec<u32>),
}

impl Question {
    /// As arguments after [`PROBE_ARGUMENT`].
    pub fn arguments(&self) -> Vec<String> {
        match self {
            Self::Machine => vec!["machine".to_owned()],
            Self::Wiring => vec!["wiring".to_owned()],
            Self::Nccl(path) => std::iter::once("nccl".to_owned()).chain(path.clone()).collect(),
            Self::PeerCopies { seed, devices } => ["peer-copies".to_owned(), seed.to_string()]
                .into_iter()
                .chain(devices.iter().map(u32::to_string))
                .collect(),
            Self::Answers(devices) => {
                std::iter::once("answers".to_owned()).chain(devices.iter().map(u32::to_string)).collect()
            }
            Self::Keep(devices) => {
                std::iter::once("keep".to_owned()).chain(devices.iter().map(u32::to_string)).collect()
            }
        }
    }

    /// From arguments after [`PROBE_ARGUMENT`].
    pub fn parse(arguments: &[String]) -> Option<Self> {
        match arguments.split_first()? {
            (word, []) if word == "machine" => Some(Self::Machine),
            (word, []) if word == "wiring" => Some(Self::Wiring),
            (word, []) if word == "nccl" => Some(Self::Nccl(None)),
            (word, [path]) if word == "nccl" => Some(Self::Nccl(Some(path.clone()))),
            (word, [seed, devices @ ..]) if word == "peer-copies" => Some(Self::PeerCopies {
                seed: seed.parse().ok()?,
                devices: devices.iter().map(|text| text.parse().ok()).collect::<Option<_>>()?,
            }),
            (word, devices) if word == "answers" || word == "keep" => {
                let devices = devices.iter().map(|text| text.parse().ok()).collect::<Option<_>>()?;
                Some(if word == "keep" { Self::Keep(devices) } else { Self::Answers(devices) })
            }
            _ => None,
        }
    }
}

/// Everything a probe found out; what it could not is an error text, never a guess.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct ProbeReport {
    /// Whether libcuda.so.1 can be loaded.
    pub cuda_library: bool,
    /// The CUDA version the driver offers.
    pub cuda_driver_version: Option<i32>,
    /// Why CUDA could not be used.
    pub cuda_error: Option<String>,
    /// PCI addresses by CUDA ordinal.
    pub cuda_devices: Vec<String>,
    /// Driver version.
    pub driver: Option<String>,
    /// Why NVML could not be used.
    pub nvml_error: Option<String>,
    /// GPUs as NVML sees them.
    pub gpus: Vec<Gpu>,
    /// NVLink connections of all GPUs; nothing where the question was another, or a GPU could not be asked.
    pub nvlinks: Option<Vec<NvLinks>>,
    /// Whether all GPUs have NVLink-switch multicast, where that could be asked.
    pub multicast: Option<bool>,
    /// Which GPU may reach which, for each ordered pair that could be asked.
    pub peers: Vec<PeerAccess>,
    /// Bytes that were copied between GPUs, where that came to its end.
    pub copied_bytes: Option<u64>,
    /// Copies between GPUs that failed or arrived wrong, in words.
    pub copy_errors: Vec<String>,
    /// Path of the library that was loaded.
    pub nccl_path: Option<String>,
    /// NCCL's version code.
    pub nccl_version: Option<i32>,
    /// Why NCCL could not be loaded.
    pub nccl_error: Option<String>,
    /// Whether what was asked is a stand-in for tests.
    pub fake: bool,
}

/// Active NVLink links of a GPU that lead to one place.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct NvLinks {
    /// PCI address of the GPU.
    pub gpu: String,
    /// PCI address at the other end; one of ones ("ffff:ff:ff.0") where that is a switch which a virtual
    /// machine does not show.
    pub remote: String,
    /// How many.
    pub links: u32,
}

/// Whether one GPU may reach another's memory, as CUDA and NVML say; what could not be asked is `None`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PeerAccess {
    /// PCI address of the GPU that reads and writes.
    pub from: String,
    /// PCI address of the GPU whose memory it is.
    pub to: String,
    /// Whether CUDA can enable it.
    pub cuda: Option<bool>,
    /// Whether NVML calls reading and writing supported, which is what NCCL goes by.
    pub nvml: Option<bool>,
}

/// Answers one question over file descriptor 0, about a stand-in for tests only if it may. Returns the
/// exit status.
pub fn run(question: &Question, allows_fakes: bool) -> u8 {
    let _ = nix::sys::prctl::set_pdeathsig(nix::sys::signal::Signal::SIGKILL);
    let mut report = ProbeReport { fake: asks_a_stand_in(question), ..ProbeReport::default() };
    let mut kept = Vec::new();
    match question {
        _ if report.fake && !allows_fakes => refuse_fakes(question, &mut report),
        Question::Machine => {
            ask_cuda(&mut report);
            ask_nvml(&mut report);
        }
        Question::Wiring => {
            ask_cuda(&mut report);
            ask_nvml(&mut report);
            ask_wiring(&mut report);
        }
        Question::Nccl(path) => ask_nccl(path.as_deref(), &mut report),
        Question::Answers(devices) => {
            // Before this process takes memory of its own.
            ask_nvml(&mut report);
            report.cuda_library = driver_is_present();
            report.cuda_error = if report.cuda_library {
                devices.iter().find_map(|device| does_it_answer(*device).err())
            } else {
                Some("libcuda.so.1 cannot be loaded".to_owned())
            };
        }
        Question::PeerCopies { seed, devices } => {
            report.cuda_library = driver_is_present();
            if report.cuda_library {
                peer::copy_between(devices, *seed, &mut report);
            } else {
                report.cuda_error = Some("libcuda.so.1 cannot be loaded".to_owned());
            }
        }
        Question::Keep(devices) => {
            report.cuda_library = driver_is_present();
            if report.cuda_library {
                for device in devices {
                    match Device::open(*device) {
                        Ok(device) => kept.push(device),
                        Err(error) => report.cuda_error = Some(error.to_string()),
                    }
                }
            }
            ask_nvml(&mut report);
        }
    }
    let Ok(mut line) = serde_json::to_string(&report) else { return 1 };
    line.push('\n');
    let Ok(descriptor) = std::io::stdin().as_fd().try_clone_to_owned() else { return 1 };
    let mut stream = UnixStream::from(descriptor);
    if stream.write_all(line.as_bytes()).is_err() {
        return 1;
    }
    if !kept.is_empty() {
        // Until the asker closes its end; it never says anything.
        let _ = stream.read(&mut [0]);
    }
    0
}

/// Whether a question would be answered by a stand-in.
fn asks_a_stand_in(question: &Question) -> bool {
    let libraries: &[&str] = match question {
        Question::Machine | Question::Wiring => &[DRIVER_LIBRARY, NVML_LIBRARY],
        Question::Nccl(path) => &[path.as_deref().unwrap_or(NCCL_LIBRARY)],
        Question::Answers(_) | Question::Keep(_) | Question::PeerCopies { .. } => &[DRIVER_LIBRARY],
    };
    libraries.iter().any(|library| is_stand_in(Path::new(library)))
}

fn refuse_fakes(question: &Question, report: &mut ProbeReport) {
    let refusal = "it is a stand-in for tests; only NCCLTUNE_ALLOW_FAKE=1 lets probes ask it".to_owned();
    match question {
        Question::Machine
        | Question::Wiring
        | Question::Answers(_)
        | Question::Keep(_)
        | Question::PeerCopies { .. } => {
            report.cuda_library = true;
            report.cuda_error = Some(refusal);
        }
        Question::Nccl(_) => report.nccl_error = Some(refusal),
    }
}

fn ask_cuda(report: &mut ProbeReport) {
    report.cuda_library = driver_is_present();
    if !report.cuda_library {
        report.cuda_error = Some("libcuda.so.1 cannot be loaded".to_owned());
        return;
    }
    match driver_version_and_device_count() {
        Ok((version, count)) => {
            report.cuda_driver_version = Some(version);
            for ordinal in 0..count.clamp(0, 64) {
                match pci_bus_id(ordinal as u32) {
                    Ok(address) => report.cuda_devices.push(normal_address(&address)),
                    Err(error) => report.cuda_error = Some(error.to_string()),
                }
            }
        }
        Err(error) => report.cuda_error = Some(error.to_string()),
    }
}

fn ask_nvml(report: &mut ProbeReport) {
    // The soname: the plain name exists only where development files are installed.
    let nvml = match nvml_wrapper::Nvml::builder().lib_path(NVML_LIBRARY.as_ref()).init() {
        Ok(nvml) => nvml,
        Err(error) => {
            report.nvml_error = Some(error.to_string());
            return;
        }
    };
    report.driver = nvml.sys_driver_version().ok();
    let count = match nvml.device_count() {
        Ok(count) => count.min(64),
        Err(error) => {
            report.nvml_error = Some(error.to_string());
            return;
        }
    };
    for index in 0..count {
        match nvml.device_by_index(index).and_then(|device| read_gpu(&device, index)) {
            Ok(gpu) => report.gpus.push(gpu),
            Err(error) => report.nvml_error = Some(format!("GPU {index}: {error}")),
        }
    }
}

fn read_gpu(device: &nvml_wrapper::Device<'_>, index: u32) -> Result<Gpu, NvmlError> {
    let both = |current: Result<u32, _>, maximum: Result<u32, NvmlError>| Some([current.ok()?, maximum.ok()?]);
    let memory = device.memory_info().ok();
    let active = |link: &u32| device.link_wrapper_for(*link).is_active().unwrap_or(false);
    Ok(Gpu {
        index,
        uuid: device.uuid()?,
        name: device.name()?,
        pci_bus_id: normal_address(&device.pci_info()?.bus_id),
        memory_total_mib: memory.as_ref().map(|memory| memory.total >> 20),
        memory_free_mib: memory.as_ref().map(|memory| memory.free >> 20),
        compute_capability: device
            .cuda_compute_capability()
            .ok()
            .map(|capability| [capability.major, capability.minor]),
        pcie_generation: both(device.current_pcie_link_gen(), device.max_pcie_link_gen()),
        pcie_width: both(device.current_pcie_link_width(), device.max_pcie_link_width()),
        nvlinks: device.link_wrapper_for(0).is_active().ok().map(|_| (0..MOST_NVLINKS).filter(active).count() as u32),
        persistence: device.is_in_persistent_mode().ok(),
        utilization_percent: device.utilization_rates().ok().map(|rates| rates.gpu),
        process_ids: device
            .running_compute_processes()
            .map(|processes| processes.iter().map(|process| process.pid).collect())
            .unwrap_or_default(),
    })
}

/// How the GPUs that CUDA shows are connected. Each answer stands for itself: an old driver that does
/// not know one question still answers the others.
fn ask_wiring(report: &mut ProbeReport) {
    let nvml = nvml_wrapper::Nvml::builder().lib_path(NVML_LIBRARY.as_ref()).init().ok();
    let addresses = report.cuda_devices.clone();
    let devices: Vec<Option<nvml_wrapper::Device<'_>>> =
        addresses.iter().map(|address| nvml.as_ref()?.device_by_pci_bus_id(address.as_str()).ok()).collect();
    report.nvlinks = addresses
        .iter()
        .zip(&devices)
        .map(|(address, device)| device.as_ref().and_then(|device| nvlinks_of(address, device)))
        .collect::<Option<Vec<_>>>()
        .map(|links| links.concat());
    let ordinals = 0..addresses.len() as u32;
    report.multicast = ordinals.map(|ordinal| has_multicast(ordinal).ok()).try_fold(true, |all, has| Some(all && has?));
    for (from, one) in addresses.iter().enumerate() {
        for (to, other) in addresses.iter().enumerate().filter(|(to, _)| *to != from) {
            let nvml = devices[from].as_ref().zip(devices[to].as_ref()).and_then(|(from, to)| peers_by_nvml(from, to));
            let cuda = can_access_peer(from as u32, to as u32).ok();
            report.peers.push(PeerAccess { from: one.clone(), to: other.clone(), cuda, nvml });
        }
    }
}

/// Whether NVML calls both reading and writing supported.
fn peers_by_nvml(from: &nvml_wrapper::Device<'_>, to: &nvml_wrapper::Device<'_>) -> Option<bool> {
    let supports = |what| from.p2p_status(to, what).ok().map(|status| status == P2pStatus::Ok);
    Some(supports(P2pCapabilitiesIndex::Read)? && supports(P2pCapabilitiesIndex::Write)?)
}

/// Active links by where they lead, as NCCL counts them. A GPU without NVLink has none; `None` if it
/// could not be asked.
fn nvlinks_of(address: &str, device: &nvml_wrapper::Device<'_>) -> Option<Vec<NvLinks>> {
    let mut remotes: BTreeMap<String, u32> = BTreeMap::new();
    for link in (0..MOST_NVLINKS).map(|link| device.link_wrapper_for(link)) {
        match link.is_active() {
            Ok(true) => {
                // NCCL passes over links that carry no peer access, and those whose end it is not told.
                let carries = link.has_capability(Capability::P2p).unwrap_or(true);
                if let (true, Ok(remote)) = (carries, link.remote_pci_info()) {
                    *remotes.entry(normal_address(&remote.bus_id)).or_default() += 1;
                }
            }
            // Asking beyond the last link is an invalid argument.
            Ok(false) | Err(NvmlError::NotSupported | NvmlError::InvalidArg) => {}
            Err(_) => return None,
        }
    }
    let links = remotes.into_iter();
    Some(links.map(|(remote, links)| NvLinks { gpu: address.to_owned(), remote, links }).collect())
}

/// One spelling for PCI addresses: lower case, four-digit domain. NVML writes eight digits, CUDA four.
pub fn normal_address(address: &str) -> String {
    let lower = address.to_ascii_lowercase();
    match lower.split_once(':') {
        Some((domain, rest)) if domain.len() > 4 && domain.is_ascii() => {
            format!("{}:{rest}", &domain[domain.len() - 4..])
        }
        _ => lower,
    }
}

fn ask_nccl(path: Option<&str>, report: &mut ProbeReport) {
    let name = path.unwrap_or(NCCL_LIBRARY);
    match Nccl::load(Path::new(name)) {
        Ok(nccl) => {
            match nccl.version() {
                Ok(version) => report.nccl_version = Some(version),
                Err(error) => report.nccl_error = Some(error.to_string()),
            }
            report.nccl_path = path.map(str::to_owned).or_else(mapped_nccl);
        }
        Err(error) => report.nccl_error = Some(error.to_string()),
    }
}

/// The path behind the libnccl that this process has mapped.
fn mapped_nccl() -> Option<String> {
    let maps = fs_err::read_to_string("/proc/self/maps").ok()?;
    maps.lines()
        .filter_map(|line| line.find('/').map(|start| &line[start..]))
        .find(|path| path.rsplit('/').next().is_some_and(|file| file.starts_with("libnccl.so")))
        .map(str::to_owned)
}

fn does_it_answer(device: u32) -> Result<(), String> {
    let ask = || -> Result<bool, crate::bindings::cuda::CudaError> {
        let opened = Device::open(device)?;
        let (one, two) = (opened.allocate(4096)?, opened.allocate(4096)?);
        let sent: Vec<u16> = (0..2048).collect();
        opened.write(&one, 0, &sent)?;
        opened.copy(&one, &two, 4096)?;
        opened.synchronize()?;
        let mut back = vec![0; 2048];
        two.read(0, &mut back)?;
        Ok(back == sent)
    };
    match ask() {
        Ok(true) => Ok(()),
        Ok(false) => Err(format!("GPU {device} returned other bytes than it was given")),
        Err(error) => Err(format!("GPU {device}: {error}")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_have_one_spelling() {
        assert_eq!(normal_address("00000000:3B:00.0"), "0000:3b:00.0");
        assert_eq!(normal_address("0000:3b:00.0"), "0000:3b:00.0");
        assert_eq!(normal_address("nonsense"), "nonsense");
    }

    #[test]
    fn questions_read_back() {
        for question in [
            Question::Machine,
            Question::Wiring,
            Question::Nccl(None),
            Question::Nccl(Some("/x".to_owned())),
            Question::Answers(vec![0, 3]),
            Question::Keep(vec![1]),
            Question::PeerCopies { seed: 7, devices: vec![0, 1] },
        ] {
            assert_eq!(Question::parse(&question.arguments()), Some(question));
        }
        assert_eq!(Question::parse(&["answers".to_owned(), "x".to_owned()]), None);
        assert_eq!(Question::parse(&[]), None);
    }

    #[test]
    fn a_machine_without_a_driver_says_so() {
        let mut report = ProbeReport::default();
        ask_nccl(Some("/nonexistent/libnccl.so.2"), &mut report);
        assert!(report.nccl_error.unwrap().contains("/nonexistent/libnccl.so.2"));
    }
}
