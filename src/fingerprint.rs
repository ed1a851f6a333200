//! What can change an answer, in named parts: which there are, which of them can be read without a GPU, and what it
//! means where one differs.
//!
//! A run keeps its parts as plain text, in the manifest and in the header of its files. A part that one side does not
//! have was not recorded, or could not be read: that is never a change.

use std::collections::BTreeMap;

use crate::canonical::Fingerprint;
use crate::machine::{Gpu, Machine, NcclLibrary, NcclVersion};
use crate::record::FingerprintParts;

/// What stands where a part could not be read.
pub const UNKNOWN: &str = "unknown";

/// What a difference in a part means.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Weight {
    /// This is another machine.
    Machine,
    /// It is this machine, and what was measured on it may no longer hold.
    Deciding,
    /// It may explain something; alone it makes no file stale, and it is no part of a run's identity.
    Informing,
}

/// A part.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PartKind {
    /// Its name in records and files.
    pub name: &'static str,
    /// What it is, in words, for the beginning of a sentence.
    pub words: &'static str,
    /// What a difference means.
    pub weight: Weight,
    /// Whether it is read from /proc and /sys alone, within milliseconds and without touching a GPU.
    pub is_quick: bool,
}

const fn part(name: &'static str, words: &'static str, weight: Weight, is_quick: bool) -> PartKind {
    PartKind { name, words, weight, is_quick }
}

/// Every part, those that tell one machine from another first.
pub const PARTS: [PartKind; 23] = [
    part("gpus", "the GPUs", Weight::Machine, true),
    part("gpu-identities", "the identities of the GPUs", Weight::Machine, true),
    part("gpu-addresses", "the PCI addresses of the GPUs", Weight::Machine, true),
    part("cpu", "the CPU", Weight::Machine, true),
    part("simulation", "the simulated machine", Weight::Machine, false),
    part("measured-by", "what measured", Weight::Machine, false),
    part("gpu-memory-mib", "the memory of the GPUs", Weight::Deciding, false),
    part("pcie-maximum", "the best PCIe link of each GPU", Weight::Deciding, false),
    part("pcie-width", "the PCIe lanes of each GPU", Weight::Deciding, true),
    part("pci-tree", "the bridges and switches above the GPUs", Weight::Deciding, true),
    part("nvlinks", "the active NVLinks of each GPU", Weight::Deciding, false),
    part("driver", "the driver", Weight::Deciding, true),
    part("driver-parameters", "the driver's parameters", Weight::Deciding, true),
    part("cuda-driver", "the CUDA version of the driver", Weight::Deciding, false),
    part("nccl", "the NCCL library", Weight::Deciding, true),
    part("cpu-family", "the CPU's vendor, family and model", Weight::Deciding, true),
    part("numa", "the NUMA nodes", Weight::Deciding, true),
    part("iommu", "the IOMMU", Weight::Deciding, true),
    part("kernel-options", "the kernel's options about IOMMU and PCI", Weight::Deciding, true),
    part("kernel", "the kernel", Weight::Informing, true),
    part("shared-memory-mib", "the size of /dev/shm", Weight::Informing, true),
    part("inherited-variables", "NCCL's variables from outside", Weight::Informing, false),
    part("engine", "the engine", Weight::Informing, false),
];

/// The part of this name; a name of another version is a part that only informs.
pub fn kind_of(name: &str) -> Option<&'static PartKind> {
    PARTS.iter().find(|part| part.name == name)
}

/// What the kernel tells of a machine, as parts; nothing that needs a GPU to answer.
pub type HostParts = BTreeMap<String, String>;

/// What is known of a machine that is measured.
#[derive(Debug, Clone, Copy)]
pub struct Described<'a> {
    /// The machine.
    pub machine: &'a Machine,
    /// GPUs used, by position.
    pub devices: &'a [u32],
    /// The library, where one was loaded.
    pub nccl: Option<&'a NcclLibrary>,
    /// What a simulated machine's figures follow from.
    pub simulation: Option<&'a Fingerprint>,
    /// What the kernel tells of a real one.
    pub host: Option<&'a HostParts>,
}

/// The parts of a machine.
pub fn parts(of: &Described<'_>) -> FingerprintParts {
    let Described { machine, devices, nccl, simulation, host } = *of;
    let gpus: Vec<&Gpu> = machine.gpus.iter().filter(|gpu| devices.contains(&gpu.index)).collect();
    let each = |of: &dyn Fn(&Gpu) -> String| gpus.iter().map(|gpu| of(gpu)).collect::<Vec<_>>().join(", ");
    let or_unknown = |text: Option<String>| text.unwrap_or_else(|| UNKNOWN.to_owned());
    let mut parts = BTreeMap::from([
        ("gpus".to_owned(), each(&|gpu| gpu.name.clone())),
        ("gpu-identities".to_owned(), each(&|gpu| gpu.uuid.clone())),
        ("gpu-addresses".to_owned(), each(&|gpu| gpu.pci_bus_id.clone())),
        (
            "pcie-maximum".to_owned(),
            each(&|gpu| match (gpu.pcie_generation, gpu.pcie_width) {
                (Some([_, generation]), Some([_, width])) => format!("gen {generation} x{width}"),
                _ => UNKNOWN.to_owned(),
            }),
        ),
        ("driver".to_owned(), or_unknown(machine.driver.clone())),
        ("cuda-driver".to_owned(), or_unknown(machine.cuda_driver_version.map(|version| version.to_string()))),
        ("cpu".to_owned(), or_unknown(machine.cpu.clone())),
        ("nccl".to_owned(), or_unknown(nccl.map(nccl_part))),
    ]);
    parts.extend(simulation.map(|table| ("simulation".to_owned(), table.to_string())));
    if let Some(host) = host {
        // What only a real machine has: a simulated one is known by its file alone.
        let mib = |gpu: &Gpu| or_unknown(gpu.memory_total_mib.map(|mib| mib.to_string()));
        let lanes = |gpu: &Gpu| or_unknown(gpu.pcie_width.map(|[now, _]| format!("x{now}")));
        let links = |gpu: &Gpu| or_unknown(gpu.nvlinks.map(|links| links.to_string()));
        parts.insert("gpu-memory-mib".to_owned(), each(&mib));
        parts.insert("pcie-width".to_owned(), each(&lanes));
        parts.insert("nvlinks".to_owned(), each(&links));
        parts.extend(host.iter().filter(|(name, _)| kind_of(name).is_some()).map(|(n, v)| (n.clone(), v.clone())));
    }
    combined(parts)
}

/// A library as a part: version and SHA-256, so that a build under the same version shows. Not its path, which may
/// differ where nothing else does.
fn nccl_part(nccl: &NcclLibrary) -> String {
    format!("{} {}", NcclVersion::from_code(nccl.version), nccl.sha256)
}

/// Parts with the fingerprint over those that decide.
pub fn combined(parts: BTreeMap<String, String>) -> FingerprintParts {
    let deciding: BTreeMap<&String, &String> =
        parts.iter().filter(|(name, _)| kind_of(name).is_none_or(|kind| kind.weight != Weight::Informing)).collect();
    FingerprintParts { combined: Fingerprint::of(&deciding).as_str().to_owned(), parts }
}

/// The parts that an earlier record knows, and no others: with what it did not know nothing can be compared.
pub fn known_to(earlier: &FingerprintParts, now: &FingerprintParts) -> FingerprintParts {
    let known = now.parts.iter().filter(|(name, _)| earlier.parts.contains_key(*name));
    combined(known.map(|(name, value)| (name.clone(), value.clone())).collect())
}

/// How a part stands now.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Standing {
    /// As it was.
    Same,
    /// Otherwise than it was.
    Changed,
    /// It was not recorded then, by an older version or because it could not be read.
    NotRecorded,
    /// It was recorded, and cannot be read now.
    Unread,
}

/// One part then and now.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Compared {
    /// Its name.
    pub name: String,
    /// What it is, in words.
    pub words: String,
    /// What a difference means.
    pub weight: Weight,
    /// How it stands.
    pub standing: Standing,
    /// What it was.
    pub before: Option<String>,
    /// What it is.
    pub now: Option<String>,
}

/// Whether all of a part could be read.
fn is_read(value: &str) -> bool {
    !value.is_empty() && value.split(", ").all(|each| each != UNKNOWN)
}

/// Longest part that is told whole.
const TOLD_CHARACTERS: usize = 600;

/// A part as it stands in the header of a file: whole, or by its SHA-256 where it is long or no plain text.
pub fn told(value: &str) -> String {
    let is_plain = value.len() <= TOLD_CHARACTERS && value.chars().all(|c| c.is_ascii_graphic() || c == ' ');
    if is_plain && value.trim() == value && !value.ends_with('\\') {
        value.to_owned()
    } else {
        format!("SHA-256 {}", Fingerprint::of_bytes(value.as_bytes()).as_str())
    }
}

/// Every part that either side has, those first that weigh most.
pub fn compare(before: &BTreeMap<String, String>, now: &BTreeMap<String, String>) -> Vec<Compared> {
    let read = |parts: &BTreeMap<String, String>, name: &str| parts.get(name).filter(|value| is_read(value)).cloned();
    let order = |name: &str| PARTS.iter().position(|part| part.name == name).unwrap_or(PARTS.len());
    let mut names: Vec<&String> = before.keys().chain(now.keys().filter(|name| !before.contains_key(*name))).collect();
    names.sort_by_key(|name| (order(name), (*name).clone()));
    let compared = names.into_iter().map(|name| {
        let (before, now) = (read(before, name), read(now, name));
        let standing = match (&before, &now) {
            (Some(before), Some(now)) if before == now => Standing::Same,
            (Some(_), Some(_)) => Standing::Changed,
            (None, _) => Standing::NotRecorded,
            (Some(_), None) => Standing::Unread,
        };
        let kind = kind_of(name);
        Compared {
            words: kind.map_or_else(|| format!("{name} (known to another version)"), |kind| kind.words.to_owned()),
            // Whoever does not know a part cannot say that it decides nothing.
            weight: kind.map_or(Weight::Deciding, |kind| kind.weight),
            name: name.clone(),
            standing,
            before,
            now,
        }
    });
    compared.collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn map(entries: &[(&str, &str)]) -> BTreeMap<String, String> {
        entries.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect()
    }

    #[test]
    fn each_part_has_one_name_and_the_machine_comes_first() {
        let names: std::collections::BTreeSet<&str> = PARTS.iter().map(|part| part.name).collect();
        assert_eq!(names.len(), PARTS.len());
        assert!(PARTS.is_sorted_by_key(|part| part.weight), "those that weigh most first");
    }

    #[test]
    fn what_was_not_recorded_or_cannot_be_read_is_no_change() {
        let before = map(&[("driver", "580.1"), ("gpus", "A"), ("cpu", "unknown"), ("iommu", "off"), ("later", "1")]);
        let now = map(&[("driver", "595.2"), ("gpus", "A"), ("cpu", "Z"), ("numa", "0-7"), ("later", "2")]);
        let told: Vec<(String, Standing)> =
            compare(&before, &now).into_iter().map(|part| (part.name, part.standing)).collect();
        let expected = [
            ("gpus", Standing::Same),
            ("cpu", Standing::NotRecorded),
            ("driver", Standing::Changed),
            ("numa", Standing::NotRecorded),
            ("iommu", Standing::Unread),
            ("later", Standing::Changed),
        ];
        assert_eq!(told, expected.map(|(name, standing)| (name.to_owned(), standing)));
    }

    #[test]
    fn what_only_informs_is_no_part_of_the_whole_and_older_records_keep_theirs() {
        let old = combined(map(&[("driver", "580.1"), ("gpus", "A")]));
        assert_eq!(old.combined, Fingerprint::of(&old.parts).as_str(), "as versions wrote it that knew no others");
        let more = combined(map(&[("driver", "580.1"), ("gpus", "A"), ("kernel", "6.8"), ("shared-memory-mib", "64")]));
        assert_eq!(more.combined, old.combined);
        let new = combined(map(&[("driver", "580.1"), ("gpus", "A"), ("numa", "0-7")]));
        assert_ne!(new.combined, old.combined);
        assert_eq!(known_to(&old, &new), old);
    }
}
