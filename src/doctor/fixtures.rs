//! Machines for the tests of checks: a healthy one, a sick one, and whatever a test makes of them.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use tempfile::TempDir;

use super::sight::{Sight, under};
use super::system::{Leftovers, SharedMemory};
use super::{Facts, judge};
use crate::discovery::NcclCandidates;
use crate::machine::{Gpu, LibrarySource, Machine, NcclLibrary};
use crate::probe::ProbeReport;
use crate::quarantine::Remembered;
use crate::record::{Check, CheckReport};

const PYTHON_NCCL: &str = "/opt/venv/lib/python3.12/site-packages/nvidia/nccl/lib/libnccl.so.2";

/// What the bridge above both GPUs shows of itself.
pub(super) const BRIDGE_CONFIG: &str = "/sys/bus/pci/devices/0000:00:01.0/config";

/// Facts that own what they are made of.
pub(super) struct Planted {
    root: TempDir,
    pub(super) environment: BTreeMap<String, String>,
    pub(super) home: Option<PathBuf>,
    pub(super) driver_installed: bool,
    pub(super) report: Option<ProbeReport>,
    pub(super) probe_error: Option<String>,
    pub(super) machine: Option<Machine>,
    pub(super) devices: Vec<u32>,
    pub(super) candidates: NcclCandidates,
    pub(super) loader_nccl: Option<(String, i32)>,
    pub(super) nccl: Option<NcclLibrary>,
    pub(super) nccl_error: Option<String>,
    pub(super) ranks: u32,
    pub(super) own_process_ids: Vec<u32>,
    pub(super) remembered: Option<Remembered>,
    /// In place of what the disk below the root happens to have.
    pub(super) shared_memory: SharedMemory,
}

pub(super) fn gpu(index: u32) -> Gpu {
    Gpu {
        uuid: format!("GPU-{index}"),
        name: "NVIDIA Test".to_owned(),
        pci_bus_id: format!("0000:{index}b:00.0"),
        memory_free_mib: Some(97_000),
        nvlinks: None,
        ..crate::wording::fixtures::gpu(index)
    }
}

impl Planted {
    /// Two idle GPUs, the verified NCCL in a Python environment, nothing set anywhere.
    pub(super) fn healthy() -> Self {
        let gpus = vec![gpu(0), gpu(1)];
        let planted = Self {
            root: tempfile::tempdir().unwrap(),
            environment: BTreeMap::from([("PATH".to_owned(), "/opt/venv/bin".to_owned())]),
            home: Some("/srv/alice".into()),
            driver_installed: true,
            report: Some(ProbeReport {
                cuda_library: true,
                cuda_driver_version: Some(13_000),
                cuda_devices: gpus.iter().map(|gpu| gpu.pci_bus_id.clone()).collect(),
                driver: Some("580.95.05".to_owned()),
                gpus: gpus.clone(),
                ..ProbeReport::default()
            }),
            probe_error: None,
            machine: Some(Machine {
                name: Machine::describe_gpus(&gpus),
                driver: Some("580.95.05".to_owned()),
                cuda_driver_version: Some(13_000),
                cpu: None,
                gpus,
            }),
            devices: vec![0, 1],
            candidates: NcclCandidates { user: None, python: vec![PYTHON_NCCL.into()] },
            loader_nccl: None,
            nccl: Some(NcclLibrary {
                path: PYTHON_NCCL.to_owned(),
                version: 22_809,
                sha256: "9c1d5e3f7a20".repeat(5),
                source: LibrarySource::PythonEnvironment,
            }),
            nccl_error: None,
            ranks: 2,
            own_process_ids: Vec::new(),
            remembered: Some(Remembered {
                path: "/srv/alice/.local/state/nccltune/quarantine.json".into(),
                entries: Ok(Vec::new()),
            }),
            shared_memory: SharedMemory::Space { free: 24 << 30, total: 24 << 30, leftovers: Leftovers::default() },
        };
        planted.write(PYTHON_NCCL, "a library");
        planted.write("/proc/cpuinfo", "processor\t: 0\nflags\t\t: fpu sse2 avx512f\n");
        planted.write("/proc/cmdline", "root=UUID=private quiet\n");
        planted.write("/sys/class/dmi/id/product_name", "Server 9000\n");
        planted.folder("/sys/class/iommu");
        for gpu in ["0000:0b:00.0", "0000:1b:00.0"] {
            let place = format!("devices/pci0000:00/0000:00:01.0/{gpu}");
            planted.folder(&format!("/sys/{place}"));
            planted.link(&format!("/sys/bus/pci/devices/{gpu}"), &format!("../../../{place}"));
        }
        planted.write(BRIDGE_CONFIG, [0; 4096]);
        planted.quiet_host();
        planted
    }

    /// What a kernel shows of a machine with room for everybody.
    fn quiet_host(&self) {
        for (path, contents) in [
            ("/proc/driver/nvidia/params", "ResmanDebugLevel: 4294967295\nEnableMSI: 1\nRegistryDwords: \"\"\n"),
            ("/proc/self/status", "Name:\tserver\nCpus_allowed_list:\t0-63\n"),
            ("/proc/self/limits", "Max locked memory         8388608              8388608              bytes\n"),
            ("/proc/self/cgroup", "0::/\n"),
            ("/proc/7/status", "Name:\tbash\nPPid:\t1\n"),
            ("/sys/devices/system/node/node0/cpulist", "0-63\n"),
            ("/sys/devices/system/node/node0/meminfo", "Node 0 MemTotal:       263856788 kB\n"),
            ("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor", "performance\n"),
            ("/dev/nvidia0", ""),
        ] {
            self.write(path, contents);
        }
        self.link("/proc/7/fd/0", "/dev/null");
        for device in ["0000:00:01.0", "0000:0b:00.0", "0000:1b:00.0"] {
            for (file, contents) in [
                ("current_link_width", "16\n"),
                ("max_link_width", "16\n"),
                ("current_link_speed", "32.0 GT/s PCIe\n"),
                ("max_link_speed", "32.0 GT/s PCIe\n"),
                ("numa_node", "0\n"),
                ("local_cpulist", "0-63\n"),
            ] {
                self.write(&format!("/sys/bus/pci/devices/{device}/{file}"), contents);
            }
        }
    }

    /// Everything at once, in every grade.
    pub(super) fn sick() -> Self {
        let mut planted = Self::healthy();
        let gpus = &mut planted.machine.as_mut().unwrap().gpus;
        gpus[0].process_ids = vec![41_207];
        gpus[0].pcie_width = Some([4, 16]);
        gpus[1].name = "NVIDIA Other".to_owned();
        gpus[1].memory_free_mib = Some(900);
        planted.loader_nccl = Some(("/usr/lib/libnccl.so.2".to_owned(), 22_304));
        planted.nccl.as_mut().unwrap().version = 22_105;
        planted.set("NCCL_P2P_DISABLE", "1");
        planted.set("NCCL_ALGOS", "Ring");
        planted.write("/etc/nccl.conf", "NCCL_P2P_LEVEL=SYS\nNCCL_BUFFSIZE=4M\n");
        planted.shared_memory =
            SharedMemory::Space { free: 30 << 20, total: 64 << 20, leftovers: Leftovers { files: 3, bytes: 28 << 20 } };
        planted.write("/proc/cpuinfo", "flags : fpu hypervisor\n");
        planted.write("/proc/cmdline", "root=UUID=private intel_iommu=on\n");
        planted.folder("/sys/class/iommu/dmar0");
        let mut bridge = [0; 4096];
        bridge[0x100..0x108].copy_from_slice(&[0x0d, 0, 1, 0, 0, 0, 0x1d, 0]);
        planted.write(BRIDGE_CONFIG, bridge);
        planted
    }

    /// A laptop.
    pub(super) fn without_driver() -> Self {
        let mut planted = Self::healthy();
        planted.driver_installed = false;
        (planted.report, planted.machine, planted.nccl) = (None, None, None);
        planted.probe_error = Some("libcuda.so.1 cannot be loaded".to_owned());
        planted.devices.clear();
        planted.candidates = NcclCandidates::default();
        planted.nccl_error = Some("no NCCL library found: the loader finds none".to_owned());
        planted
    }

    pub(super) fn set(&mut self, variable: &str, value: &str) {
        self.environment.insert(variable.to_owned(), value.to_owned());
    }

    pub(super) fn set_version(&mut self, code: i32) {
        self.nccl.as_mut().unwrap().version = code;
    }

    /// The GPUs, to be changed.
    pub(super) fn gpus(&mut self) -> &mut Vec<Gpu> {
        &mut self.machine.as_mut().unwrap().gpus
    }

    /// Where a path of the planted machine lies on this one.
    pub(super) fn path(&self, path: &str) -> PathBuf {
        under(self.root.path(), Path::new(path))
    }

    pub(super) fn folder(&self, path: &str) {
        fs_err::create_dir_all(self.path(path)).unwrap();
    }

    pub(super) fn write(&self, path: &str, contents: impl AsRef<[u8]>) {
        let path = self.path(path);
        fs_err::create_dir_all(path.parent().unwrap()).unwrap();
        fs_err::write(path, contents).unwrap();
    }

    pub(super) fn link(&self, path: &str, target: &str) {
        let path = self.path(path);
        fs_err::create_dir_all(path.parent().unwrap()).unwrap();
        fs_err::os::unix::fs::symlink(target, path).unwrap();
    }

    pub(super) fn facts(&self) -> Facts<'_> {
        Facts {
            root: self.root.path(),
            environment: &self.environment,
            home: self.home.as_deref(),
            driver_installed: self.driver_installed,
            report: self.report.as_ref(),
            probe_error: self.probe_error.as_deref(),
            machine: self.machine.as_ref(),
            devices: &self.devices,
            candidates: &self.candidates,
            loader_nccl: self.loader_nccl.as_ref().map(|(path, version)| (path.as_str(), *version)),
            nccl: self.nccl.as_ref(),
            nccl_error: self.nccl_error.as_deref(),
            ranks: self.ranks,
            own_process_ids: &self.own_process_ids,
            remembered: self.remembered.as_ref(),
            files_only: false,
        }
    }

    pub(super) fn report(&self) -> CheckReport {
        let facts = self.facts();
        let mut sight = Sight::look(&facts);
        sight.shared_memory = self.shared_memory.clone();
        judge(&sight)
    }

    pub(super) fn check(&self, name: &str) -> Check {
        self.report().checks.into_iter().find(|check| check.name == name).unwrap()
    }
}
