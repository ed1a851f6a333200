//! What the kernel tells of a machine that can change an answer: a few small files below /proc and /sys, read under any
//! root, without a driver call and without a GPU.

use std::collections::BTreeMap;
use std::path::Path;

use super::topology::Files;
use crate::canonical::Fingerprint;
use crate::fingerprint::{HostParts, UNKNOWN};
use crate::shared_memory::room;

/// Most of a file that is read: /proc/cpuinfo repeats itself for each core.
const FILE_BYTES: u64 = 64 << 10;
/// Most of a value that is kept.
const VALUE_CHARACTERS: usize = 120;
/// Most NUMA nodes that are listed.
const NODES_MAX: usize = 64;
/// Digits of a SHA-256 that stand for a text.
const SHORT_DIGITS: usize = 16;

/// Options of the kernel that decide how GPUs reach each other, by how they begin.
const OPTIONS: [&str; 14] = [
    "amd_iommu",
    "intel_iommu",
    "iommu",
    "kvm_amd",
    "mem_encrypt",
    "modprobe.blacklist",
    "numa",
    "nvidia",
    "pci=",
    "pcie",
    "swiotlb",
    "transparent_hugepage",
    "uvm_disable_hmm",
    "vfio",
];

fn files(root: &Path) -> Files {
    Files { root: fs_err::canonicalize(root).unwrap_or_else(|_| root.to_owned()) }
}

fn text(files: &Files, path: &str) -> Option<String> {
    files.text(Path::new(path), FILE_BYTES)
}

fn short(text: &str) -> String {
    text.chars().filter(|character| !character.is_control()).take(VALUE_CHARACTERS).collect()
}

/// The CPU's model.
pub fn cpu_model(root: &Path) -> Option<String> {
    let text = text(&files(root), "proc/cpuinfo")?;
    line_of(&text, "model name").map(|name| short(&name))
}

/// What stands behind a name and a colon.
fn line_of(text: &str, name: &str) -> Option<String> {
    text.lines().find_map(|line| {
        let (known, value) = line.split_once(':')?;
        (known.trim() == name).then(|| value.trim().to_owned())
    })
}

/// What the kernel tells of the system and of where these GPUs are, in named parts. What it does not tell is left out.
pub fn host_parts(root: &Path, addresses: &[String]) -> HostParts {
    let files = files(root);
    let told = [
        ("cpu-family", cpu_family(&files)),
        ("numa", numa(&files)),
        ("iommu", iommu(&files)),
        ("kernel-options", kernel_options(&files)),
        ("kernel", text(&files, "proc/sys/kernel/osrelease").map(|release| short(&release))),
        ("driver-parameters", driver_parameters(&files)),
        ("pci-tree", pci_tree(&files, addresses)),
        ("shared-memory-mib", room(&files.root.join("dev/shm")).ok().map(|room| (room.total >> 20).to_string())),
    ];
    told.into_iter().filter_map(|(name, value)| Some((name.to_owned(), value?))).collect()
}

/// The parts that can be read without asking a GPU anything, of GPUs at these addresses.
pub fn quick_parts(root: &Path, addresses: &[String]) -> BTreeMap<String, String> {
    let mut parts = host_parts(root, addresses);
    let files = files(root);
    let mut add = |name: &str, value: Option<String>| parts.extend(value.map(|value| (name.to_owned(), value)));
    add("cpu", cpu_model(root));
    add("driver", driver(&files));
    // A container may see no folder of the driver at all; then nothing can be said of its GPUs.
    if !addresses.is_empty() && files.root.join("proc/driver/nvidia/gpus").is_dir() {
        let informations: Vec<Option<String>> = addresses
            .iter()
            .map(|address| text(&files, &format!("proc/driver/nvidia/gpus/{}/information", plain(address)?)))
            .collect();
        let each = |of: &dyn Fn(usize) -> String| (0..addresses.len()).map(of).collect::<Vec<_>>().join(", ");
        let line = |at: usize, name: &str| informations[at].as_deref().and_then(|text| line_of(text, name));
        add("gpu-addresses", Some(each(&|at| informations[at].as_ref().map_or("none", |_| &addresses[at]).to_owned())));
        add("gpus", Some(each(&|at| line(at, "Model").map_or(UNKNOWN.to_owned(), |model| short(&model)))));
        // The driver writes question marks until somebody uses the GPU.
        let identity = |at: usize| line(at, "GPU UUID").filter(|identity| !identity.contains('?'));
        add("gpu-identities", Some(each(&|at| identity(at).map_or(UNKNOWN.to_owned(), |identity| short(&identity)))));
    }
    let lanes = |address: &String| {
        let steps = files.steps_to(address)?;
        files.word(&steps, "current_link_width").filter(|lanes| lanes.parse::<u32>().is_ok_and(|lanes| lanes > 0))
    };
    let all: Option<Vec<String>> = addresses.iter().map(|address| Some(format!("x{}", lanes(address)?))).collect();
    add("pcie-width", all.filter(|all| !all.is_empty()).map(|all| all.join(", ")));
    parts
}

/// An address that may become part of a path.
fn plain(address: &str) -> Option<&str> {
    let is_plain = |character: char| character.is_ascii_hexdigit() || character == ':' || character == '.';
    (!address.is_empty() && !address.starts_with('.') && address.chars().all(is_plain)).then_some(address)
}

/// "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  595.58.03  Release Build": its release.
fn driver(files: &Files) -> Option<String> {
    let text = text(files, "proc/driver/nvidia/version")?;
    let is_release = |word: &&str| {
        let numbers: Vec<&str> = word.split('.').collect();
        numbers.len() >= 2 && numbers.iter().all(|number| number.parse::<u32>().is_ok())
    };
    text.lines().next()?.split_whitespace().find(is_release).map(short)
}

/// The driver's parameters, by a hash that their order does not change, and those given as text.
fn driver_parameters(files: &Files) -> Option<String> {
    let text = text(files, "proc/driver/nvidia/params")?;
    let mut lines: Vec<&str> = text.lines().map(str::trim).filter(|line| !line.is_empty()).collect();
    lines.sort_unstable();
    let hash = Fingerprint::of_bytes(lines.join("\n").as_bytes());
    let words = line_of(&text, "RegistryDwords").filter(|words| words.len() > 2).map(|words| short(&words));
    let hash = &hash.as_str()[..SHORT_DIGITS];
    Some(words.map_or_else(|| format!("SHA-256 {hash}"), |words| format!("SHA-256 {hash} RegistryDwords {words}")))
}

fn cpu_family(files: &Files) -> Option<String> {
    let text = text(files, "proc/cpuinfo")?;
    let number = |name: &str| line_of(&text, name);
    let (vendor, family) = (number("vendor_id")?, number("cpu family")?);
    Some(short(&format!("{vendor} family {family} model {}", number("model").unwrap_or_else(|| UNKNOWN.to_owned()))))
}

/// CPUs of each node.
fn numa(files: &Files) -> Option<String> {
    let nodes: Vec<String> = (0..NODES_MAX)
        .filter_map(|node| {
            let cpus = text(files, &format!("sys/devices/system/node/node{node}/cpulist"))?;
            Some(format!("node {node} CPUs {}", short(&cpus)))
        })
        .collect();
    (!nodes.is_empty()).then(|| nodes.join("; "))
}

fn iommu(files: &Files) -> Option<String> {
    let units = fs_err::read_dir(files.root.join("sys/class/iommu")).ok()?.count();
    Some(if units == 0 { "off".to_owned() } else { format!("{units} active") })
}

fn kernel_options(files: &Files) -> Option<String> {
    let line = text(files, "proc/cmdline")?;
    let matters = |word: &&str| OPTIONS.iter().any(|begin| word.starts_with(begin));
    let words: Vec<String> = line.split_whitespace().filter(matters).take(NODES_MAX).map(short).collect();
    Some(if words.is_empty() { "none".to_owned() } else { words.join(" ") })
}

/// Bridges and switches on the way to each GPU, which change with its slot.
fn pci_tree(files: &Files, addresses: &[String]) -> Option<String> {
    let paths: Option<Vec<String>> =
        addresses.iter().map(|address| files.steps_to(address).map(|steps| steps.join("/"))).collect();
    paths.filter(|paths| !paths.is_empty()).map(|paths| paths.join(", "))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn planted() -> tempfile::TempDir {
        let folder = tempfile::tempdir().unwrap();
        let write = |path: &str, text: &str| {
            let path = folder.path().join(path);
            fs_err::create_dir_all(path.parent().unwrap()).unwrap();
            fs_err::write(path, text).unwrap();
        };
        write("proc/cpuinfo", "vendor_id\t: AuthenticAMD\ncpu family\t: 25\nmodel\t\t: 17\nmodel name\t: EPYC 9374F\n");
        write("proc/cmdline", "BOOT_IMAGE=/vmlinuz root=UUID=private amd_iommu=off iommu=pt quiet pci=noacs\n");
        write("proc/sys/kernel/osrelease", "6.8.0-79-generic\n");
        write(
            "proc/driver/nvidia/version",
            "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  595.58.03  Release Build  (x@y)\nGCC version: 13\n",
        );
        write("proc/driver/nvidia/params", "EnableMSI: 1\nRegistryDwords: \"RMForceStaticBar1=1\"\n");
        write("sys/devices/system/node/node0/cpulist", "0-31\n");
        write("sys/devices/system/node/node1/cpulist", "32-63\n");
        fs_err::create_dir_all(folder.path().join("sys/class/iommu")).unwrap();
        for (address, identity) in [("0000:01:00.0", "GPU-aa"), ("0000:41:00.0", "GPU-????")] {
            write(
                &format!("proc/driver/nvidia/gpus/{address}/information"),
                &format!("Model: \t\t NVIDIA Test\nIRQ: 1\nGPU UUID: \t {identity}\n"),
            );
            let device = format!("sys/devices/pci0000:00/0000:00:01.1/{address}");
            write(&format!("{device}/current_link_width"), "16\n");
            fs_err::create_dir_all(folder.path().join("sys/bus/pci/devices")).unwrap();
            let link = folder.path().join("sys/bus/pci/devices").join(address);
            fs_err::os::unix::fs::symlink(folder.path().join(&device), link).unwrap();
        }
        folder
    }

    #[test]
    fn a_machine_is_told_in_parts_without_its_gpus() {
        let folder = planted();
        let addresses = ["0000:01:00.0", "0000:41:00.0"].map(str::to_owned);
        let parts = quick_parts(folder.path(), &addresses);
        for (name, value) in [
            ("cpu", "EPYC 9374F"),
            ("cpu-family", "AuthenticAMD family 25 model 17"),
            ("driver", "595.58.03"),
            ("gpus", "NVIDIA Test, NVIDIA Test"),
            ("gpu-identities", "GPU-aa, unknown"),
            ("gpu-addresses", "0000:01:00.0, 0000:41:00.0"),
            ("pcie-width", "x16, x16"),
            ("iommu", "off"),
            ("kernel", "6.8.0-79-generic"),
            ("kernel-options", "amd_iommu=off iommu=pt pci=noacs"),
            ("numa", "node 0 CPUs 0-31; node 1 CPUs 32-63"),
            ("pci-tree", "pci0000:00/0000:00:01.1/0000:01:00.0, pci0000:00/0000:00:01.1/0000:41:00.0"),
        ] {
            assert_eq!(parts.get(name).map(String::as_str), Some(value), "{name}");
        }
        assert!(parts["driver-parameters"].ends_with("RegistryDwords \"RMForceStaticBar1=1\""));
        // Their order says nothing.
        let params = folder.path().join("proc/driver/nvidia/params");
        fs_err::write(&params, "RegistryDwords: \"RMForceStaticBar1=1\"\n\nEnableMSI: 1\n").unwrap();
        assert_eq!(quick_parts(folder.path(), &addresses)["driver-parameters"], parts["driver-parameters"]);
    }

    #[test]
    fn a_gpu_that_is_gone_and_a_machine_that_tells_nothing() {
        let folder = planted();
        let addresses = ["0000:01:00.0", "0000:c1:00.0", "../../etc"].map(str::to_owned);
        let parts = quick_parts(folder.path(), &addresses);
        assert_eq!(parts["gpu-addresses"], "0000:01:00.0, none, none");
        assert!(!parts.contains_key("pci-tree") && !parts.contains_key("pcie-width"));
        let empty = tempfile::tempdir().unwrap();
        assert_eq!(quick_parts(empty.path(), &addresses), BTreeMap::new());
    }
}
