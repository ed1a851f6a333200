//! What speaks against peer access over PCIe before anybody tries it: who redirects its writes, and which
//! drivers are known to lose them.

use std::path::Path;

use super::sight::Sight;
use super::{Finding, listed, shown};
use crate::machine::Gpu;
use crate::wording::enumerated;

/// Checks whose warnings speak against trying peer access across the host bridge.
const SUSPECTS: [&str; 5] = ["iommu", "acs-redirect", "peer-known-bad", "gpu-idle", "virtualisation"];

/// Whether a check's warning speaks against trying peer access.
pub fn speaks_against_peer_access(check: &str) -> bool {
    SUSPECTS.contains(&check)
}

/// Bytes of a PCI device's configuration space; only root is shown more than the first 64.
const CONFIG_BYTES: u64 = 4096;
/// Where extended capabilities begin, and the number of the one that is looked for. Source: PCI Express
/// Base Specification, 7.6.3 (extended capability header) and 7.7.11 (Access Control Services).
const EXTENDED: usize = 0x100;
const ACCESS_CONTROL: u32 = 0x000d;
/// Its control register, and the bits that send what goes from peer to peer up to the root instead:
/// requests and completions.
const CONTROL: usize = 6;
const REDIRECTS: u16 = 1 << 2 | 1 << 3;

/// Whether a device sends peer traffic up; `None` where its configuration space is not shown.
fn redirects(config: &[u8]) -> Option<bool> {
    if config.len() < EXTENDED + 4 {
        return None;
    }
    let word = |at: usize| Some(u32::from_le_bytes(*config.get(at..at + 4)?.first_chunk()?));
    let mut at = EXTENDED;
    // A chain that runs in a circle is cut; there is room for no more than this.
    for _ in 0..CONFIG_BYTES as usize / 8 {
        let header = word(at)?;
        if header == 0 || header == u32::MAX {
            return Some(false);
        }
        if header & 0xffff == ACCESS_CONTROL {
            let control = u16::from_le_bytes(*config.get(at + CONTROL..at + CONTROL + 2)?.first_chunk()?);
            return Some(control & REDIRECTS != 0);
        }
        at = (header >> 20) as usize & !3;
        if at < EXTENDED {
            return Some(false);
        }
    }
    Some(false)
}

/// Whether a folder's name is a PCI address ("0000:3b:00.0").
pub(super) fn is_address(name: &str) -> bool {
    let digits = |text: &str, count: usize| text.len() == count && text.bytes().all(|byte| byte.is_ascii_hexdigit());
    let mut parts = name.split([':', '.']);
    let lengths = [4, 2, 2, 1];
    lengths.iter().all(|length| parts.next().is_some_and(|part| digits(part, *length))) && parts.next().is_none()
}

/// The bridges above a GPU, from the root down; `None` where the system does not show them.
pub(super) fn bridges(sight: &Sight<'_>, gpu: &Gpu) -> Option<Vec<String>> {
    let device = Path::new("/sys/bus/pci/devices").join(&gpu.pci_bus_id);
    let real = sight.real_path(&device);
    if real == device {
        return None;
    }
    let above = real.parent()?.iter().map(|part| part.to_string_lossy().into_owned());
    Some(above.filter(|part| is_address(part)).collect())
}

pub(super) fn joined_by_nvlink(sight: &Sight<'_>) -> bool {
    !sight.gpus.is_empty() && sight.gpus.iter().all(|gpu| gpu.nvlinks.is_some_and(|links| links > 0))
}

pub(super) fn acs(sight: &Sight<'_>) -> Finding {
    if sight.gpus.is_empty() {
        return Finding::unknown("the GPUs could not be asked");
    }
    if joined_by_nvlink(sight) {
        return Finding::pass("the GPUs are joined by NVLink, which passes no PCIe bridge");
    }
    let (mut redirecting, mut hidden, mut seen) = (Vec::new(), 0, 0);
    for gpu in &sight.gpus {
        let Some(above) = bridges(sight, gpu) else {
            hidden += 1;
            continue;
        };
        for bridge in above {
            let config = sight.bytes(&format!("/sys/bus/pci/devices/{bridge}/config"), CONFIG_BYTES);
            match config.as_deref().and_then(redirects) {
                Some(true) if !redirecting.contains(&bridge) => redirecting.push(bridge),
                Some(_) => seen += 1,
                None => hidden += 1,
            }
        }
    }
    redirecting.sort();
    if !redirecting.is_empty() {
        return Finding::warn(
            format!("peer traffic is sent up to the root by {}", listed(&redirecting, 8, ", ")),
            "what one GPU writes to another takes the way through the root, where an IOMMU may lose it: switch Access \
             Control Services off in the firmware, or on those bridges with setpci",
        );
    }
    if hidden > 0 || seen == 0 {
        return Finding::unknown("the bridges above the GPUs show their settings to root alone, or not at all");
    }
    Finding::pass("no bridge above the GPUs redirects peer traffic")
}

/// A driver that was reported to hang or corrupt peer access on some GPU.
struct KnownBad {
    /// Beginning of the driver's version.
    driver: &'static str,
    /// Part of the GPU's name; every GPU where empty.
    gpu: &'static str,
    /// What was reported.
    report: &'static str,
    /// Where.
    source: &'static str,
}

/// Public reports, none of them repeated here.
const KNOWN_BAD: &[KnownBad] = &[
    KnownBad {
        driver: "560.",
        gpu: "",
        report: "collectives may hang with peer access, and no more with driver 570",
        source: "dmlc/xgboost issue 11242",
    },
    KnownBad {
        driver: "570.148.08",
        gpu: "RTX 4090",
        report: "all-reduces hang with peer access forced",
        source: "tinygrad/open-gpu-kernel-modules issue 45",
    },
    KnownBad {
        driver: "595.71.05",
        gpu: "RTX PRO 6000",
        report: "the first all-reduce across the host bridge hangs and leaves the GPUs busy until a reset",
        source: "local-inference-lab/rtx6kpro issue 15",
    },
    KnownBad {
        driver: "610.43.03",
        gpu: "RTX 5090",
        report: "the first collective hangs although access is granted, unless the driver maps all memory statically",
        source: "noonghunna/club-3090 issue 873",
    },
];

pub(super) fn known_bad(sight: &Sight<'_>) -> Finding {
    let Some(driver) = sight.facts.machine.and_then(|machine| machine.driver.as_deref()) else {
        return Finding::unknown("the driver's version is not known");
    };
    let has = |known: &&KnownBad| {
        driver.starts_with(known.driver) && sight.gpus.iter().any(|gpu| gpu.name.contains(known.gpu))
    };
    match KNOWN_BAD.iter().find(has) {
        Some(known) if !joined_by_nvlink(sight) => Finding::warn(
            format!("driver {}: {} ({})", shown(driver), known.report, known.source),
            "take another driver, or leave peer access alone",
        ),
        _ => Finding::pass(format!("nothing is known against driver {} on these GPUs", shown(driver))),
    }
}

/// What the kernel's groups say of the GPUs: whether addresses are translated on the way between them.
/// `None` where a group is not shown.
pub(super) fn translated(sight: &Sight<'_>) -> Option<Vec<String>> {
    let mut translated = Vec::new();
    for gpu in &sight.gpus {
        let kind = sight.text(&format!("/sys/bus/pci/devices/{}/iommu_group/type", gpu.pci_bus_id))?;
        // "identity" passes addresses through; "DMA" and "DMA-FQ" translate them.
        if kind.trim() != "identity" {
            translated.push(format!("GPU {} ({})", gpu.index, shown(kind.trim())));
        }
    }
    (!sight.gpus.is_empty()).then_some(translated)
}

/// The same in a sentence.
pub(super) fn translated_words(gpus: &[String]) -> String {
    format!("the IOMMU translates the addresses of {}", enumerated(gpus))
}

#[cfg(test)]
mod tests {
    use super::super::fixtures::{BRIDGE_CONFIG, Planted};
    use super::*;
    use crate::record::CheckVerdict::{Pass, Unknown, Warn};

    /// A configuration space with these extended capabilities, each a number and a control word.
    fn config(capabilities: &[(u32, u16)]) -> Vec<u8> {
        let mut bytes = vec![0; CONFIG_BYTES as usize];
        for (position, (number, control)) in capabilities.iter().enumerate() {
            let at = EXTENDED + position * 0x40;
            let next = if position + 1 < capabilities.len() { at + 0x40 } else { 0 };
            let header = number | 1 << 16 | (next as u32) << 20;
            bytes[at..at + 4].copy_from_slice(&header.to_le_bytes());
            bytes[at + CONTROL..at + CONTROL + 2].copy_from_slice(&control.to_le_bytes());
        }
        bytes
    }

    #[test]
    fn redirection_is_read_from_the_capability_and_nothing_else() {
        assert_eq!(redirects(&config(&[(0x0001, 0xffff), (ACCESS_CONTROL, 0x1d)])), Some(true));
        // Source validation and upstream forwarding alone redirect nothing.
        assert_eq!(redirects(&config(&[(0x0001, 0), (ACCESS_CONTROL, 0x11)])), Some(false));
        assert_eq!(redirects(&config(&[(0x0001, 0xffff)])), Some(false));
        assert_eq!(redirects(&config(&[])), Some(false));
        assert_eq!(redirects(&[0; 64]), None, "what root alone may read");
        assert_eq!(redirects(&[0xff; 4096]), Some(false), "a device that is gone");
        let mut circle = config(&[(0x0001, 0)]);
        circle[EXTENDED..EXTENDED + 4].copy_from_slice(&(1_u32 | (EXTENDED as u32) << 20).to_le_bytes());
        assert_eq!(redirects(&circle), Some(false));
        let mut beyond = config(&[(0x0001, 0)]);
        beyond[EXTENDED..EXTENDED + 4].copy_from_slice(&(1_u32 | 0xffc << 20).to_le_bytes());
        assert_eq!(redirects(&beyond), Some(false));
        beyond.truncate(0x200);
        assert_eq!(redirects(&beyond), None);
    }

    #[test]
    fn addresses_are_told_from_other_folders() {
        assert!(is_address("0000:3b:00.0") && is_address("0001:af:1f.7"));
        for other in ["pci0000:3a", "devices", "", "0000:3b:00", "0000:3b:00.0.1", "0000:3b:00.00", "zzzz:3b:00.0"] {
            assert!(!is_address(other), "{other}");
        }
    }

    /// Both GPUs below a bridge with this control word.
    fn below_a_bridge(control: u16) -> Planted {
        let planted = Planted::healthy();
        planted.write(BRIDGE_CONFIG, config(&[(ACCESS_CONTROL, control)]));
        planted
    }

    #[test]
    fn a_bridge_that_redirects_warns_and_one_that_hides_is_unknown() {
        let mut planted = below_a_bridge(0x1d);
        let check = planted.check("acs-redirect");
        assert_eq!(check.verdict, Warn);
        assert!(check.evidence.contains("0000:00:01.0"), "{}", check.evidence);
        planted.write(BRIDGE_CONFIG, [0; 64]);
        assert_eq!(planted.check("acs-redirect").verdict, Unknown);
        for gpu in planted.gpus() {
            gpu.nvlinks = Some(18);
        }
        assert_eq!(planted.check("acs-redirect").verdict, Pass);
        assert_eq!(below_a_bridge(0x11).check("acs-redirect").verdict, Pass);
        assert_eq!(Planted::without_driver().check("acs-redirect").verdict, Unknown);
    }

    #[test]
    fn reported_pairs_of_driver_and_gpu_warn_with_their_source() {
        let with = |driver: &str, name: &str| {
            let mut planted = Planted::healthy();
            planted.machine.as_mut().unwrap().driver = Some(driver.to_owned());
            planted.gpus()[1].name = name.to_owned();
            planted.check("peer-known-bad")
        };
        let check = with("570.148.08", "NVIDIA GeForce RTX 4090");
        assert_eq!(check.verdict, Warn);
        assert!(check.evidence.contains("issue 45"), "{}", check.evidence);
        assert_eq!(with("560.35.03", "NVIDIA L4").verdict, Warn);
        assert_eq!(with("570.148.08", "NVIDIA L4").verdict, Pass);
        assert_eq!(with("580.95.05", "NVIDIA GeForce RTX 4090").verdict, Pass);
    }

    #[test]
    fn every_suspect_is_a_check() {
        let report = Planted::healthy().report();
        for suspect in SUSPECTS {
            assert!(report.checks.iter().any(|check| check.name == suspect), "{suspect}");
        }
    }
}
