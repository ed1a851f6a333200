//! What the files of a machine tell of its GPUs where no driver is asked.

use std::path::Path;

use super::peer::is_address;
use super::shown;
use super::sight::{names, text};
use crate::machine::{Gpu, MAX_GPUS, Machine};

/// Most PCI devices that are looked at.
const MOST_DEVICES: usize = 4096;
/// NVIDIA's number among makers of PCI devices, and the beginning of the classes that GPUs have: VGA
/// controllers and 3D controllers. Source: the PCI ID repository, classes 0300 and 0302.
const NVIDIA: &str = "0x10de";
const GPU_CLASSES: [&str; 2] = ["0x0300", "0x0302"];

/// The NVIDIA GPUs that /sys and /proc below `root` show, in PCI order; none where they show none.
pub fn machine_in_files(root: &Path) -> Option<Machine> {
    const DEVICES: &str = "/sys/bus/pci/devices";
    let is_gpu = |address: &String| {
        let file = |name: &str| text(root, &format!("{DEVICES}/{address}/{name}")).unwrap_or_default();
        let class = file("class");
        is_address(address)
            && file("vendor").trim() == NVIDIA
            && GPU_CLASSES.iter().any(|beginning| class.starts_with(beginning))
    };
    let devices = names(root, DEVICES, MOST_DEVICES)?;
    let addresses = devices.into_iter().filter(is_gpu).take(MAX_GPUS);
    let gpus: Vec<Gpu> = (0..).zip(addresses).map(|(index, address)| gpu(root, index, address)).collect();
    let machine = Machine {
        name: Machine::describe_gpus(&gpus),
        driver: text(root, "/proc/driver/nvidia/version").as_deref().and_then(driver_version),
        cuda_driver_version: None,
        cpu: None,
        gpus,
    };
    (!machine.gpus.is_empty()).then_some(machine)
}

fn gpu(root: &Path, index: u32, address: String) -> Gpu {
    let information = text(root, &format!("/proc/driver/nvidia/gpus/{address}/information")).unwrap_or_default();
    let entry = |name: &str| {
        let value = information.lines().take(100).find_map(|line| line.strip_prefix(name)?.strip_prefix(':'))?;
        Some(shown(value.trim())).filter(|value| !value.is_empty())
    };
    Gpu {
        index,
        uuid: entry("GPU UUID").unwrap_or_else(|| address.clone()),
        name: entry("Model").unwrap_or_else(|| "NVIDIA GPU of unknown name".to_owned()),
        pci_bus_id: address,
        memory_total_mib: None,
        memory_free_mib: None,
        compute_capability: None,
        pcie_generation: None,
        pcie_width: None,
        nvlinks: None,
        persistence: None,
        utilization_percent: None,
        process_ids: Vec::new(),
    }
}

/// The first word of the module's first line that is a version: "580.95.05".
fn driver_version(text: &str) -> Option<String> {
    let is_version = |word: &&str| {
        word.contains('.')
            && word.split('.').all(|part| !part.is_empty() && part.bytes().all(|byte| byte.is_ascii_digit()))
    };
    text.lines().next()?.split_whitespace().find(is_version).map(shown)
}

#[cfg(test)]
mod tests {
    use super::super::fixtures::Planted;
    use super::*;

    #[test]
    fn gpus_are_found_by_maker_and_class_and_nothing_else_is() {
        let planted = Planted::healthy();
        assert_eq!(machine_in_files(&planted.path("/")), None, "devices that do not say what they are");
        for (address, vendor, class) in [
            ("0000:0b:00.0", "0x10de", "0x030200"),
            ("0000:0b:00.1", "0x10de", "0x040300"),
            ("0000:1b:00.0", "0x10de", "0x030000"),
            ("0000:2b:00.0", "0x1a03", "0x030000"),
        ] {
            planted.write(&format!("/sys/bus/pci/devices/{address}/vendor"), format!("{vendor}\n"));
            planted.write(&format!("/sys/bus/pci/devices/{address}/class"), format!("{class}\n"));
        }
        planted.write(
            "/proc/driver/nvidia/gpus/0000:1b:00.0/information",
            "Model: \t\t NVIDIA L40S\nIRQ:   \t\t 205\nGPU UUID: \t GPU-1234\n",
        );
        planted
            .write("/proc/driver/nvidia/version", "NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.95.05  Tue\n");
        let machine = machine_in_files(&planted.path("/")).unwrap();
        let told: Vec<(&str, &str)> = machine.gpus.iter().map(|gpu| (&*gpu.pci_bus_id, &*gpu.name)).collect();
        assert_eq!(told, [("0000:0b:00.0", "NVIDIA GPU of unknown name"), ("0000:1b:00.0", "NVIDIA L40S")]);
        assert_eq!(machine.gpus[1].uuid, "GPU-1234");
        assert_eq!(machine.driver.as_deref(), Some("580.95.05"));
    }

    #[test]
    fn the_open_module_tells_its_version_elsewhere_in_the_line() {
        let line = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  610.43.03  Release Build";
        assert_eq!(driver_version(line).as_deref(), Some("610.43.03"));
        assert_eq!(driver_version("NVRM version: none\n1.2"), None);
    }
}
