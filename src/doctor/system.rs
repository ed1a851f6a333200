//! The system around the GPUs.

use std::path::Path;

use nix::errno::Errno;

use super::peer::{translated, translated_words};
use super::sight::Sight;
use super::{Finding, shown};
use crate::shared_memory::{Room, nccl_files, room};
use crate::units::group_thousands;
use crate::wording::{enumerated, plural};

/// What a rank needs for each channel where buffers lie in shared memory: 4 MiB for Simple, 4.7 MiB
/// for LL128, half a MiB for LL, rounded up to pages.
const CHANNEL_BYTES: u64 = 10 << 20;
/// Channels that NCCL uses at least where it is left alone.
const FEW_CHANNELS: u64 = 4;
/// Channels that the largest settings use.
const MANY_CHANNELS: u64 = 32;
/// docker's default for the whole of it.
const LEAST_FREE: u64 = 64 << 20;

/// The room for shared memory.
#[derive(Debug, Clone)]
pub(super) enum SharedMemory {
    /// There is no such folder.
    Missing,
    /// It could not be asked.
    Unread(Errno),
    /// Files of another machine tell what it was mounted with, if at all.
    Mounted {
        /// Bytes it may hold, where the mount says so.
        total: Option<u64>,
    },
    /// It was asked.
    Space {
        /// Bytes that this user may still take.
        free: u64,
        /// Bytes it has.
        total: u64,
        /// What earlier runs left in it.
        leftovers: Leftovers,
    },
}

/// Files of this user that NCCL made and did not take away. It takes them away once both ends have
/// opened them, so what stays is of a process that was killed, or is being opened just now.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Leftovers {
    pub(super) files: u32,
    pub(super) bytes: u64,
}

impl SharedMemory {
    pub(super) fn look(folder: &Path) -> Self {
        match room(folder) {
            Ok(Room { free, total }) => {
                Self::Space { free, total, leftovers: Leftovers::look(folder, nix::unistd::getuid().as_raw()) }
            }
            Err(Errno::ENOENT) => Self::Missing,
            Err(error) => Self::Unread(error),
        }
    }

    /// What /proc/mounts says of it.
    pub(super) fn as_mounted(mounts: Option<&str>) -> Self {
        let options = mounts.unwrap_or_default().lines().rev().find_map(|line| {
            let mut words = line.split_whitespace().skip(1);
            (words.next()? == "/dev/shm").then(|| words.nth(1)).flatten()
        });
        let size =
            options.into_iter().flat_map(|options| options.split(',')).find_map(|word| word.strip_prefix("size="));
        Self::Mounted { total: size.and_then(mounted_bytes) }
    }
}

/// A size as the kernel writes it in the options of a mount: "65536k".
fn mounted_bytes(text: &str) -> Option<u64> {
    let digits = text.trim_end_matches(|character: char| character.is_ascii_alphabetic());
    let scale = match text.get(digits.len()..)? {
        "" => 1,
        "k" | "K" => 1 << 10,
        "m" | "M" => 1 << 20,
        "g" | "G" => 1 << 30,
        _ => return None,
    };
    digits.parse::<u64>().ok()?.checked_mul(scale)
}

impl Leftovers {
    fn look(folder: &Path, user: u32) -> Self {
        let files = nccl_files(folder).unwrap_or_default().files;
        let mine = files.iter().filter(|file| file.user == user);
        mine.fold(Self::default(), |found, file| Self {
            files: found.files + 1,
            bytes: found.bytes.saturating_add(file.bytes),
        })
    }
}

fn mib(bytes: u64) -> String {
    format!("{} MiB", group_thousands(bytes >> 20))
}

pub(super) fn shared_memory(sight: &Sight<'_>) -> Finding {
    const MORE: &str = "give the container more with --shm-size or --ipc=host, a pod an emptyDir of medium Memory at \
                        /dev/shm; on the host remount /dev/shm with a larger size";
    let (free, total, leftovers) = match &sight.shared_memory {
        SharedMemory::Missing => return Finding::fail("there is no /dev/shm", MORE),
        SharedMemory::Unread(error) => {
            return Finding::unknown(format!("the room in /dev/shm could not be asked for: {}", error.desc()));
        }
        SharedMemory::Mounted { total: None } => {
            return Finding::unknown("the files do not say how large /dev/shm is, nor what is free in it");
        }
        // What was free in it is not in the files; an empty one has all.
        SharedMemory::Mounted { total: Some(total) } => (*total, *total, &Leftovers::default()),
        SharedMemory::Space { free, total, leftovers } => (*free, *total, leftovers),
    };
    let ranks = u64::from(sight.facts.ranks);
    let need = |channels: u64| ranks.saturating_mul(channels).saturating_mul(CHANNEL_BYTES);
    let (least, ample) = (need(FEW_CHANNELS).max(LEAST_FREE), need(MANY_CHANNELS));
    let mut evidence = vec![match sight.shared_memory {
        SharedMemory::Mounted { .. } => format!("/dev/shm is mounted with {}", mib(total)),
        _ => format!("{} of {} free in /dev/shm", mib(free), mib(total)),
    }];
    let mut advice = Vec::new();
    if free < ample {
        let (wanted, channels) = if free < least { (least, FEW_CHANNELS) } else { (ample, MANY_CHANNELS) };
        let ranks = format!("{} {}", sight.facts.ranks, plural(sight.facts.ranks, "rank", "ranks"));
        evidence.push(format!("{ranks} may need {} at {channels} channels", mib(wanted)));
        advice.push(MORE);
    }
    if leftovers.files > 0 {
        let files = plural(leftovers.files, "file", "files");
        evidence.push(format!("{} {files} named nccl-* of this user, {}", leftovers.files, mib(leftovers.bytes)));
        advice.push(
            "if no process of yours uses NCCL now, remove the nccl-* files in /dev/shm: a run that was killed left \
             them (nccltune removes only what its own broken launches leave)",
        );
    }
    let evidence = evidence.join("; ");
    let advice = advice.join("; ");
    if free < least {
        Finding::fail(evidence, advice)
    } else if advice.is_empty() {
        Finding::pass(evidence)
    } else {
        Finding::warn(evidence, advice)
    }
}

/// What hypervisors call the machines they make up.
const VIRTUAL_PRODUCTS: &[&str] = &[
    "virtual",
    "kvm",
    "qemu",
    "standard pc",
    "vmware",
    "hvm domu",
    "google compute engine",
    "openstack",
    "bochs",
    "bhyve",
    "alibaba cloud ecs",
    "droplet",
    "cvm",
    "parallels",
    "xen",
];

pub(super) fn virtualisation(sight: &Sight<'_>) -> Finding {
    let product = sight.text("/sys/class/dmi/id/product_name").map(|name| name.trim().to_owned());
    let processor = sight.text("/proc/cpuinfo");
    let lower = product.as_deref().unwrap_or_default().to_ascii_lowercase();
    let mut signs = Vec::new();
    // Only what gives a guest away is quoted: the rest of such names is nobody's business.
    if VIRTUAL_PRODUCTS.iter().any(|name| lower.contains(name)) {
        signs.push(format!("the firmware calls this machine {:?}", shown(&product.clone().unwrap_or_default())));
    }
    let is_flagged = |line: &str| line.starts_with("flags") && line.split_whitespace().any(|flag| flag == "hypervisor");
    if processor.as_deref().is_some_and(|text| text.lines().any(is_flagged)) {
        signs.push("the processor says that a hypervisor runs it".to_owned());
    }
    if !signs.is_empty() {
        return Finding::warn(
            enumerated(&signs),
            "PCIe and IOMMU readings of a guest say little: the host decides what peer access costs and whether it \
             works; tune again when the guest moves",
        );
    }
    Finding::pass(match (product, processor) {
        (None, None) => "no sign of a hypervisor, though neither firmware nor processor could be asked",
        _ => "no sign of a hypervisor",
    })
}

const TRANSLATES: &str = "peer access over PCIe may hang or corrupt data behind a translating IOMMU: start the kernel \
                          with iommu=pt, or leave NCCL_P2P_LEVEL alone";

pub(super) fn iommu(sight: &Sight<'_>) -> Finding {
    if super::peer::joined_by_nvlink(sight) {
        return Finding::pass("the GPUs are joined by NVLink, which passes no IOMMU");
    }
    match sight.has_entries("/sys/class/iommu") {
        Some(true) => {}
        Some(false) => return Finding::pass("no IOMMU is active"),
        None => return Finding::unknown("/sys/class/iommu is not readable here"),
    }
    // What was decided for these very devices, whatever the kernel was started with.
    match translated(sight) {
        Some(gpus) if !gpus.is_empty() => return Finding::warn(translated_words(&gpus), TRANSLATES),
        Some(_) => return Finding::pass("an IOMMU is active and passes the GPUs' addresses through"),
        None => {}
    }
    let Some(line) = sight.text("/proc/cmdline") else {
        return Finding::unknown("an IOMMU is active, and /proc/cmdline is not readable here");
    };
    // The rest of the line names disks and hosts.
    let words: Vec<String> = line.split_whitespace().filter(|word| word.contains("iommu")).map(shown).collect();
    let said = if words.is_empty() { "nothing about it".to_owned() } else { enumerated(&words) };
    let passes_through = words.iter().any(|word| matches!(word.as_str(), "iommu=pt" | "iommu.passthrough=1"));
    if passes_through {
        return Finding::pass(format!("an IOMMU is active and passes through: the kernel was started with {said}"));
    }
    Finding::warn(
        format!("an IOMMU is active and may translate between GPUs: the kernel was started with {said}"),
        TRANSLATES,
    )
}

#[cfg(test)]
mod tests {
    use super::super::fixtures::Planted;
    use super::*;
    use crate::record::Check;
    use crate::record::CheckVerdict::{Fail, Pass, Unknown, Warn};

    fn with_room(ranks: u32, free_mib: u64, leftovers: Leftovers) -> Check {
        let mut planted = Planted::healthy();
        planted.ranks = ranks;
        planted.shared_memory = SharedMemory::Space { free: free_mib << 20, total: 64 << 30, leftovers };
        planted.check("shared-memory")
    }

    #[test]
    fn shared_memory_must_hold_the_buffers_of_all_ranks() {
        for (ranks, free_mib, verdict) in [
            (2, 640, Pass),
            (2, 639, Warn),
            (2, 80, Warn),
            (2, 79, Fail),
            // docker's default, which is too small for two ranks already.
            (2, 64, Fail),
            (1, 64, Warn),
            (1, 63, Fail),
            (8, 2560, Pass),
            (8, 2559, Warn),
            (8, 319, Fail),
            (u32::MAX, 1 << 20, Fail),
        ] {
            let check = with_room(ranks, free_mib, Leftovers::default());
            assert_eq!(check.verdict, verdict, "{ranks} ranks, {free_mib} MiB: {}", check.evidence);
            assert_eq!(check.advice.contains("--shm-size"), verdict != Pass);
        }
    }

    #[test]
    fn leftovers_warn_and_do_not_soften_a_failure() {
        let leftovers = Leftovers { files: 3, bytes: 28 << 20 };
        let check = with_room(2, 30_000, leftovers);
        assert_eq!(check.verdict, Warn);
        assert!(check.evidence.ends_with("3 files named nccl-* of this user, 28 MiB"), "{}", check.evidence);
        assert!(!check.advice.contains("--shm-size"));
        let check = with_room(2, 30, leftovers);
        assert_eq!(check.verdict, Fail);
        assert!(check.advice.contains("--shm-size") && check.advice.contains("nccl-*"));
    }

    #[test]
    fn shared_memory_that_is_not_there_fails_and_one_that_is_silent_is_unknown() {
        let mut planted = Planted::healthy();
        planted.shared_memory = SharedMemory::look(&planted.path("/dev/shm"));
        assert_eq!(planted.check("shared-memory").verdict, Fail);
        planted.shared_memory = SharedMemory::Unread(Errno::EACCES);
        assert_eq!(planted.check("shared-memory").verdict, Unknown);
        planted.folder("/dev/shm");
        let SharedMemory::Space { free, total, .. } = SharedMemory::look(&planted.path("/dev/shm")) else {
            panic!("a folder has room");
        };
        assert!(free <= total && total > 0);
    }

    #[test]
    fn only_files_that_nccl_made_for_this_user_count() {
        let planted = Planted::healthy();
        for name in
            ["nccl-WU88OE", "nccl-a1B2c3", "nccl-toolong7", "nccl-12345", "nccl-12345.", "other", "xnccl-123456"]
        {
            planted.write(&format!("/dev/shm/{name}"), "12345");
        }
        planted.folder("/dev/shm/nccl-folder");
        planted.link("/dev/shm/nccl-linked", "nccl-WU88OE");
        let user = nix::unistd::getuid().as_raw();
        let folder = planted.path("/dev/shm");
        assert_eq!(Leftovers::look(&folder, user), Leftovers { files: 2, bytes: 10 });
        assert_eq!(Leftovers::look(&folder, user + 1), Leftovers::default());
        assert!(folder.join("nccl-WU88OE").exists(), "nothing is removed");
    }

    #[test]
    fn guests_are_recognised_by_firmware_or_processor() {
        let planted = Planted::healthy();
        let check = planted.check("virtualisation");
        assert_eq!((check.verdict, check.evidence.as_str()), (Pass, "no sign of a hypervisor"));
        planted.write("/proc/cpuinfo", "processor : 0\nflags\t\t: fpu hypervisor lahf_lm\n");
        let check = planted.check("virtualisation");
        assert_eq!(check.verdict, Warn);
        assert!(!check.evidence.contains("Server 9000"));
        planted.write("/proc/cpuinfo", "model name : hypervisor\n");
        assert_eq!(planted.check("virtualisation").verdict, Pass);
        for product in
            ["KVM", "VMware Virtual Platform", "Standard PC (Q35 + ICH9, 2009)", "Virtual Machine", "HVM domU"]
        {
            planted.write("/sys/class/dmi/id/product_name", format!("{product}\n"));
            let check = planted.check("virtualisation");
            assert_eq!(check.verdict, Warn, "{product}");
            assert!(check.evidence.contains(product), "{}", check.evidence);
        }
    }

    #[test]
    fn without_firmware_and_processor_there_is_no_sign() {
        let planted = Planted::healthy();
        fs_err::remove_file(planted.path("/proc/cpuinfo")).unwrap();
        fs_err::remove_file(planted.path("/sys/class/dmi/id/product_name")).unwrap();
        assert_eq!(planted.check("virtualisation").verdict, Pass);
    }

    #[test]
    fn a_translating_iommu_warns_where_there_is_no_nvlink() {
        let mut planted = Planted::healthy();
        assert_eq!(planted.check("iommu").verdict, Pass, "an empty folder is no IOMMU");
        planted.folder("/sys/class/iommu/ivhd0");
        let check = planted.check("iommu");
        assert_eq!(check.verdict, Warn);
        assert!(check.evidence.ends_with("started with nothing about it"), "{}", check.evidence);
        planted.write("/proc/cmdline", "root=UUID=private amd_iommu=on\n");
        let check = planted.check("iommu");
        assert_eq!(check.verdict, Warn);
        assert!(check.evidence.ends_with("started with amd_iommu=on") && !check.evidence.contains("private"));
        planted.write("/proc/cmdline", "quiet amd_iommu=on iommu=pt");
        assert_eq!(planted.check("iommu").verdict, Pass);
        planted.write("/proc/cmdline", "iommu=ptx");
        assert_eq!(planted.check("iommu").verdict, Warn);
        fs_err::remove_file(planted.path("/proc/cmdline")).unwrap();
        assert_eq!(planted.check("iommu").verdict, Unknown);
        planted.gpus()[0].nvlinks = Some(18);
        assert_eq!(planted.check("iommu").verdict, Unknown, "one of two is not joined");
        planted.gpus()[1].nvlinks = Some(18);
        assert_eq!(planted.check("iommu").verdict, Pass);
    }

    #[test]
    fn what_the_kernel_decided_for_a_device_counts_more_than_what_it_was_started_with() {
        let planted = Planted::healthy();
        planted.folder("/sys/class/iommu/ivhd0");
        planted.write("/proc/cmdline", "quiet iommu=pt");
        let group = |gpu: &str| format!("/sys/bus/pci/devices/{gpu}/iommu_group/type");
        planted.write(&group("0000:0b:00.0"), "identity\n");
        assert_eq!(planted.check("iommu").verdict, Pass, "one that is hidden leaves it to the command line");
        planted.write(&group("0000:1b:00.0"), "DMA-FQ\n");
        let check = planted.check("iommu");
        assert_eq!(check.verdict, Warn);
        assert!(check.evidence.contains("GPU 1 (DMA-FQ)") && !check.evidence.contains("GPU 0"), "{}", check.evidence);
        planted.write("/proc/cmdline", "quiet intel_iommu=on");
        planted.write(&group("0000:1b:00.0"), "identity\n");
        assert_eq!(planted.check("iommu").verdict, Pass);
    }

    #[test]
    fn a_system_that_hides_its_iommu_is_unknown() {
        let planted = Planted::healthy();
        fs_err::remove_dir_all(planted.path("/sys")).unwrap();
        assert_eq!(planted.check("iommu").verdict, Unknown);
    }
}
