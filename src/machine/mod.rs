//! What a machine is, as far as a tuning run must know it. Types, and what they must keep to: `discovery` fills them.

mod topology;

pub(crate) use topology::pci_number;
pub use topology::{
    Architecture, CpuNode, CpuVendor, GpuNode, Layout, MAX_GPUS, MAX_SWITCHES, NvLink, NvLinkEnd, PathKind, PciSwitch,
    PcieLink, PeerAccess, Topology, TopologyError, Upstream,
};

use serde::{Deserialize, Serialize};

/// The machine a run was made on, or the simulated one.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Machine {
    /// A name for people: the class of a simulated machine, or "8x NVIDIA RTX PRO 6000".
    pub name: String,
    /// NVIDIA driver version, where there is a driver.
    pub driver: Option<String>,
    /// The CUDA version the driver offers, such as 13000.
    pub cuda_driver_version: Option<i32>,
    /// CPU model, from /proc/cpuinfo.
    pub cpu: Option<String>,
    /// GPUs in PCI order: the order workers use.
    pub gpus: Vec<Gpu>,
}

impl Machine {
    /// "8x NVIDIA H200", or a list where the GPUs differ.
    pub fn describe_gpus(gpus: &[Gpu]) -> String {
        let mut groups: Vec<(&str, usize)> = Vec::new();
        for gpu in gpus {
            match groups.iter_mut().find(|(name, _)| *name == gpu.name) {
                Some((_, count)) => *count += 1,
                None => groups.push((&gpu.name, 1)),
            }
        }
        groups.iter().map(|(name, count)| format!("{count}x {name}")).collect::<Vec<_>>().join(" + ")
    }
}

/// One GPU. What could not be read is `None`, never a guess.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Gpu {
    /// Position in PCI order among the GPUs the process may see.
    pub index: u32,
    /// Stable identity ("GPU-..."); locks and `--devices` use it.
    pub uuid: String,
    /// Product name.
    pub name: String,
    /// PCI address, lower case, with a four-digit domain.
    pub pci_bus_id: String,
    /// Total memory in MiB.
    pub memory_total_mib: Option<u64>,
    /// Free memory in MiB when asked.
    pub memory_free_mib: Option<u64>,
    /// Compute capability, such as [9, 0].
    pub compute_capability: Option<[i32; 2]>,
    /// PCIe generation [current, maximum]; an idle GPU shows a low current one.
    pub pcie_generation: Option<[u32; 2]>,
    /// PCIe width [current, maximum] in lanes.
    pub pcie_width: Option<[u32; 2]>,
    /// Active NVLink links.
    pub nvlinks: Option<u32>,
    /// Whether the driver keeps the GPU initialised while nobody uses it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub persistence: Option<bool>,
    /// Share of time the GPU was busy lately, in per cent.
    pub utilization_percent: Option<u32>,
    /// Other processes with a compute context, by pid.
    pub process_ids: Vec<u32>,
}

/// Where a libnccl came from.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum LibrarySource {
    /// Named with `--nccl-lib`.
    User,
    /// The nvidia-nccl package of the Python environment on PATH.
    PythonEnvironment,
    /// What the dynamic loader finds for libnccl.so.2.
    Loader,
}

/// The NCCL library every worker loads.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct NcclLibrary {
    /// Absolute path.
    pub path: String,
    /// As ncclGetVersion says, such as 22809.
    pub version: i32,
    /// SHA-256 of the file.
    pub sha256: String,
    /// How it was chosen.
    pub source: LibrarySource,
}

/// An NCCL version that can be compared.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct NcclVersion {
    /// Major number.
    pub major: u32,
    /// Minor number.
    pub minor: u32,
    /// Patch number.
    pub patch: u32,
}

impl NcclVersion {
    /// 2.`minor`.`patch`.
    pub const fn v2(minor: u32, patch: u32) -> Self {
        Self { major: 2, minor, patch }
    }

    /// From ncclGetVersion's code: 22809 is 2.28.9; before 2.9 the scale was 1000.
    pub const fn from_code(code: i32) -> Self {
        let code = if code < 0 { 0 } else { code as u32 };
        if code < 10_000 {
            Self { major: code / 1000, minor: code % 1000 / 100, patch: code % 100 }
        } else {
            Self { major: code / 10_000, minor: code % 10_000 / 100, patch: code % 100 }
        }
    }
}

impl std::fmt::Display for NcclVersion {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(formatter, "{}.{}.{}", self.major, self.minor, self.patch)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn version_codes_read_in_both_scales() {
        assert_eq!(NcclVersion::from_code(22_809), NcclVersion::v2(28, 9));
        assert_eq!(NcclVersion::from_code(2_708), NcclVersion::v2(7, 8));
        assert_eq!(NcclVersion::from_code(-1), NcclVersion { major: 0, minor: 0, patch: 0 });
        assert_eq!(NcclVersion::v2(30, 7).to_string(), "2.30.7");
    }
}
