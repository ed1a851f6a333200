//! How the kernel sees the GPUs' places: lanes and speed of slot and bridges, and the node they belong to.

use super::host::nodes;
use super::peer::bridges;
use super::sight::Sight;
use super::{Finding, listed};
use crate::machine::Gpu;

const NO_GPU: &str = "no GPU is known to look at";
const MOST_SHOWN: usize = 16;

fn number<T: std::str::FromStr>(sight: &Sight<'_>, device: &str, file: &str) -> Option<T> {
    sight.text(&format!("/sys/bus/pci/devices/{device}/{file}"))?.split_whitespace().next()?.parse().ok()
}

/// Lanes; a link that is down, or none at all, has none.
fn lanes(sight: &Sight<'_>, device: &str, file: &str) -> Option<u32> {
    number(sight, device, file).filter(|lanes| (1..=32).contains(lanes))
}

/// Billions of transfers a second on each lane: "32.0 GT/s PCIe".
fn speed_gt_s(sight: &Sight<'_>, device: &str, file: &str) -> Option<f64> {
    number(sight, device, file).filter(|speed: &f64| speed.is_finite() && *speed > 0.0)
}

/// What a GPU's link lacks, and what is only worth a remark; none where the kernel does not show it.
fn lacks(sight: &Sight<'_>, gpu: &Gpu) -> Option<(Vec<String>, Option<String>)> {
    let (device, name) = (&gpu.pci_bus_id, format!("GPU {}", gpu.index));
    let width = lanes(sight, device, "current_link_width")?;
    let width_max = lanes(sight, device, "max_link_width")?;
    let speed_max = speed_gt_s(sight, device, "max_link_speed")?;
    let mut lacks = Vec::new();
    if width < width_max {
        lacks.push(format!("{name} has {width} of its {width_max} lanes"));
    }
    let above = bridges(sight, gpu).unwrap_or_default();
    if let Some((slot, offered)) =
        above.last().and_then(|slot| Some((slot, speed_gt_s(sight, slot, "max_link_speed")?)))
        && offered < speed_max
    {
        lacks.push(format!("{name} is built for {speed_max} GT/s, its slot {slot} for {offered} GT/s"));
    }
    // An uplink that several GPUs may share; the slot itself has as many as the GPU.
    for bridge in above.iter().rev().skip(1).take(MOST_SHOWN) {
        if let Some(narrow) = lanes(sight, bridge, "current_link_width").filter(|narrow| *narrow < width) {
            lacks.push(format!("bridge {bridge} above {name} has {narrow} lanes, fewer than its {width}"));
        }
    }
    let rests = speed_gt_s(sight, device, "current_link_speed").filter(|speed| *speed < speed_max);
    Some((lacks, rests.map(|speed| format!("{name} runs at {speed} GT/s just now, as idle GPUs do"))))
}

pub(super) fn pcie_slot(sight: &Sight<'_>) -> Finding {
    if sight.gpus.is_empty() {
        return Finding::unknown(NO_GPU);
    }
    let found: Vec<_> = sight.gpus.iter().map(|gpu| lacks(sight, gpu)).collect();
    let mut lacking: Vec<String> = found.iter().flatten().flat_map(|(lacks, _)| lacks.clone()).collect();
    lacking.dedup();
    if !lacking.is_empty() {
        return Finding::warn(
            listed(&lacking, MOST_SHOWN, "; "),
            "look at the slot, the riser, and the firmware's settings for bifurcation and speed: no NCCL variable \
             gives lanes back",
        );
    }
    if found.iter().any(Option::is_none) {
        return Finding::unknown("the kernel does not show the link of each GPU");
    }
    let remarks: Vec<String> = found.into_iter().flatten().filter_map(|(_, remark)| remark).collect();
    let said = vec!["every GPU has all its lanes".to_owned()];
    Finding::pass(listed(&[said, remarks].concat(), MOST_SHOWN, "; "))
}

pub(super) fn gpu_numa(sight: &Sight<'_>) -> Finding {
    if sight.gpus.is_empty() {
        return Finding::unknown(NO_GPU);
    }
    let Some(nodes) = nodes(sight) else { return Finding::unknown("the kernel shows no NUMA nodes here") };
    if nodes.len() < 2 {
        return Finding::pass("the machine has one node");
    }
    let (mut lost, mut hidden, mut told) = (Vec::new(), 0, Vec::new());
    for gpu in &sight.gpus {
        match number::<i64>(sight, &gpu.pci_bus_id, "numa_node") {
            Some(node) if node >= 0 => told.push(format!("GPU {} on node {node}", gpu.index)),
            Some(_) => lost.push(format!("GPU {}", gpu.index)),
            None => hidden += 1,
        }
    }
    if !lost.is_empty() {
        return Finding::warn(
            format!("the firmware does not say which of {} nodes is near {}", nodes.len(), listed(&lost, 16, ", ")),
            "bind each rank by hand (numactl), and mend it in the firmware or the virtual machine's definition: NCCL \
             and the kernel place threads and buffers by it",
        );
    }
    if hidden > 0 {
        return Finding::unknown("the kernel does not show the node of each GPU");
    }
    Finding::pass(listed(&told, MOST_SHOWN, ", "))
}
