//! The machine around the GPUs, as the kernel tells it: nodes, processors, limits.

use std::collections::BTreeSet;

use super::sight::Sight;
use super::{Finding, listed, shown};
use crate::units::group_thousands;
use crate::wording::plural;

const NODES: &str = "/sys/devices/system/node";
const PROCESSORS: &str = "/sys/devices/system/cpu";
/// Most nodes, and most processors, that are looked at.
const MOST_NODES: usize = 1024;
const MOST_PROCESSORS: usize = 8192;
const MOST_SHOWN: usize = 8;
/// Processors that a rank keeps busy: the thread that launches, and NCCL's proxy.
const PROCESSORS_PER_RANK: u64 = 2;
/// Memory that a rank takes beside its model: a CUDA context, libraries and pinned buffers.
const BYTES_PER_RANK: u64 = 2 << 30;
/// Threads of a rank: CUDA's, NCCL's and Python's.
const THREADS_PER_RANK: u64 = 64;
/// What adapters register for one rank's buffers, with room to spare.
const LOCKED_LEAST_BYTES: u64 = 1 << 30;

/// A list of processors as the kernel writes it ("0-3,8"), in ranges that include their ends.
#[derive(Debug, Clone, PartialEq, Eq)]
struct CpuList(Vec<(u32, u32)>);

impl CpuList {
    fn parse(text: &str) -> Option<Self> {
        let range = |part: &str| {
            let (first, last) = part.split_once('-').unwrap_or((part, part));
            let (first, last) = (first.trim().parse().ok()?, last.trim().parse().ok()?);
            (first <= last).then_some((first, last))
        };
        let text = text.trim();
        if text.is_empty() {
            return Some(Self(Vec::new()));
        }
        text.split(',').take(MOST_PROCESSORS).map(range).collect::<Option<_>>().map(Self)
    }

    fn count(&self) -> u64 {
        self.0.iter().map(|(first, last)| u64::from(last - first) + 1).sum()
    }

    fn meets(&self, other: &Self) -> bool {
        self.0.iter().any(|one| other.0.iter().any(|two| one.0 <= two.1 && two.0 <= one.1))
    }
}

/// The numbers of the machine's NUMA nodes; none where the kernel does not show any.
pub(super) fn nodes(sight: &Sight<'_>) -> Option<Vec<u32>> {
    let names = sight.names(NODES, MOST_NODES)?;
    let mut nodes: Vec<u32> = names.iter().filter_map(|name| name.strip_prefix("node")?.parse().ok()).collect();
    nodes.sort_unstable();
    Some(nodes).filter(|nodes| !nodes.is_empty())
}

pub(super) fn numa_nodes(sight: &Sight<'_>) -> Finding {
    let Some(nodes) = nodes(sight) else { return Finding::unknown("the kernel shows no NUMA nodes here") };
    let (mut lacking, mut hidden) = (Vec::new(), 0);
    for node in &nodes {
        let processors = sight.text(&format!("{NODES}/node{node}/cpulist")).and_then(|text| CpuList::parse(&text));
        let memory = sight.text(&format!("{NODES}/node{node}/meminfo")).and_then(|text| {
            let line = text.lines().find(|line| line.contains("MemTotal:"))?;
            line.split_whitespace().rev().nth(1)?.parse::<u64>().ok()
        });
        match (processors.map(|list| list.count()), memory) {
            (Some(0), Some(0)) => lacking.push(format!("node {node} has neither processors nor memory")),
            (Some(0), _) => lacking.push(format!("node {node} has no processors")),
            (_, Some(0)) => lacking.push(format!("node {node} has no memory")),
            (Some(_), Some(_)) => {}
            _ => hidden += 1,
        }
    }
    if !lacking.is_empty() {
        return Finding::warn(
            listed(&lacking, MOST_SHOWN, "; "),
            "NCCL places threads and host buffers by nodes, and one without memory may make it fail: fill all memory \
             channels, or look at the firmware's settings for nodes; where GPU memory is a node of its own (Grace), or \
             memory is attached by CXL, this is as it should be",
        );
    }
    if hidden > 0 {
        return Finding::unknown("the kernel does not show what each node has");
    }
    Finding::pass(format!("{} {}", nodes.len(), plural(nodes.len() as u32, "node", "nodes")))
}

pub(super) fn cpu_affinity(sight: &Sight<'_>) -> Finding {
    let allowed = sight
        .text("/proc/self/status")
        .and_then(|status| CpuList::parse(status.lines().find_map(|line| line.strip_prefix("Cpus_allowed_list:"))?));
    let Some(allowed) = allowed else { return Finding::unknown("/proc/self/status does not tell it here") };
    let count = allowed.count();
    let ranks = sight.facts.ranks;
    let mut trouble = Vec::new();
    if count < u64::from(ranks).saturating_mul(PROCESSORS_PER_RANK) {
        let few = plural(ranks, "rank", "ranks");
        trouble.push(format!("{} for {ranks} {few}, each of which keeps two busy", processors(count)));
    }
    for gpu in &sight.gpus {
        let near = sight.text(&format!("/sys/bus/pci/devices/{}/local_cpulist", gpu.pci_bus_id));
        if let Some(near) = near.as_deref().and_then(CpuList::parse)
            && !near.0.is_empty()
            && !near.meets(&allowed)
        {
            trouble.push(format!("none of those near GPU {} is allowed", gpu.index));
        }
    }
    if trouble.is_empty() {
        return Finding::pass(format!("this process may run on {}", processors(count)));
    }
    Finding::warn(
        listed(&trouble, MOST_SHOWN, "; "),
        "widen what the shell, the container (--cpuset-cpus) or the batch system allows (--cpus-per-task, --cpu-bind), \
         and start the server with the same",
    )
}

fn processors(count: u64) -> String {
    format!("{count} {}", plural(u32::try_from(count).unwrap_or(u32::MAX), "processor", "processors"))
}

fn mib(bytes: u64) -> String {
    format!("{} MiB", group_thousands(bytes >> 20))
}

pub(super) fn locked_memory(sight: &Sight<'_>) -> Finding {
    let soft = sight.text("/proc/self/limits").and_then(|text| {
        let line = text.lines().find_map(|line| line.strip_prefix("Max locked memory"))?.to_owned();
        line.split_whitespace().next().map(str::to_owned)
    });
    let Some(soft) = soft else { return Finding::unknown("/proc/self/limits does not tell it here") };
    if soft == "unlimited" {
        return Finding::pass("unlimited");
    }
    let Ok(bytes) = soft.parse::<u64>() else {
        return Finding::unknown(format!("/proc/self/limits says {:?}", shown(&soft)));
    };
    let said = if bytes < 1 << 20 { format!("{} KiB", bytes >> 10) } else { mib(bytes) };
    if sight.has_entries("/sys/class/infiniband") != Some(true) {
        return Finding::pass(format!("{said}; there is no RDMA adapter that needs it, and CUDA's own does not count"));
    }
    if bytes >= LOCKED_LEAST_BYTES {
        return Finding::pass(said);
    }
    Finding::warn(
        format!("{said}, and there are RDMA adapters, with which NCCL registers its buffers"),
        "raise it: `ulimit -l unlimited`, LimitMEMLOCK=infinity for systemd, --ulimit memlock=-1 for docker",
    )
}

/// What a control group allows and how much is taken, by one of its files.
struct Allowance {
    left: u64,
    limit: u64,
}

/// The narrowest of a group and those above it.
fn narrowest(
    sight: &Sight<'_>,
    limit: &str,
    taken: &str,
    version_1: &str,
    limit_1: &str,
    taken_1: &str,
) -> Option<Allowance> {
    let own = sight.text("/proc/self/cgroup").unwrap_or_default();
    let unified = own.lines().take(64).find_map(|line| line.strip_prefix("0::")).unwrap_or("/").trim().to_owned();
    let mut places = vec![(format!("/sys/fs/cgroup/{version_1}"), limit_1, taken_1)];
    let mut folder = String::from("/sys/fs/cgroup");
    places.push((folder.clone(), limit, taken));
    // What leads up and out is no group of this process.
    for part in unified.split('/').filter(|part| !part.is_empty()).take(32).take_while(|part| *part != "..") {
        folder.push('/');
        folder.push_str(part);
        places.push((folder.clone(), limit, taken));
    }
    let read = |folder: &str, file: &str| sight.text(&format!("{folder}/{file}"))?.trim().parse::<u64>().ok();
    let allowances = places.iter().filter_map(|(folder, limit, taken)| {
        let limit = read(folder, limit)?;
        Some(Allowance { limit, left: limit.saturating_sub(read(folder, taken).unwrap_or(0)) })
    });
    allowances.min_by_key(|allowance| allowance.left)
}

pub(super) fn control_group(sight: &Sight<'_>) -> Finding {
    if sight.text("/proc/self/cgroup").is_none() {
        return Finding::unknown("/proc/self/cgroup is not readable here");
    }
    let ranks = u64::from(sight.facts.ranks);
    let memory =
        narrowest(sight, "memory.max", "memory.current", "memory", "memory.limit_in_bytes", "memory.usage_in_bytes");
    let threads = narrowest(sight, "pids.max", "pids.current", "pids", "pids.max", "pids.current");
    let mut trouble = Vec::new();
    if let Some(memory) = &memory
        && memory.left < ranks.saturating_mul(BYTES_PER_RANK)
    {
        trouble.push(format!("{} of {} of memory are left for {ranks} ranks", mib(memory.left), mib(memory.limit)));
    }
    if let Some(threads) = &threads
        && threads.left < ranks.saturating_mul(THREADS_PER_RANK)
    {
        trouble.push(format!("{} of {} threads are left for {ranks} ranks", threads.left, threads.limit));
    }
    if let Some(quota) = processor_quota(sight)
        && quota < ranks as f64
    {
        trouble.push(format!("{quota:.1} processors' worth of time for {ranks} ranks, which stalls threads that spin"));
    }
    if trouble.is_empty() {
        let no_limit = memory.is_none() && threads.is_none();
        return Finding::pass(if no_limit { "it sets no limit" } else { "its limits leave room" });
    }
    Finding::warn(
        trouble.join("; "),
        "give the container more: --memory, --pids-limit and --cpus for docker, resources.limits for a pod, MemoryMax, \
         TasksMax and CPUQuota for systemd",
    )
}

/// The processors' worth of time that the group may use, where it is limited.
fn processor_quota(sight: &Sight<'_>) -> Option<f64> {
    let own = sight.text("/proc/self/cgroup")?;
    let unified = own.lines().take(64).find_map(|line| line.strip_prefix("0::"))?.trim();
    let place = if unified.split('/').any(|part| part == "..") { "/" } else { unified };
    let text = sight.text(&format!("/sys/fs/cgroup{place}/cpu.max"))?;
    let mut words = text.split_whitespace();
    let (quota, period): (f64, f64) = (words.next()?.parse().ok()?, words.next()?.parse().ok()?);
    (period > 0.0 && quota.is_finite()).then_some(quota / period)
}

pub(super) fn cpu_frequency(sight: &Sight<'_>) -> Finding {
    let cpus = sight.names(PROCESSORS, MOST_PROCESSORS).unwrap_or_default();
    let is_cpu = |name: &&String| {
        name.strip_prefix("cpu").is_some_and(|rest| !rest.is_empty() && rest.bytes().all(|byte| byte.is_ascii_digit()))
    };
    let read = |cpu: &str, file: &str| {
        sight.text(&format!("{PROCESSORS}/{cpu}/cpufreq/{file}")).map(|text| shown(text.trim()))
    };
    let (mut slow, mut seen) = (BTreeSet::new(), BTreeSet::new());
    for cpu in cpus.iter().filter(is_cpu) {
        let Some(governor) = read(cpu, "scaling_governor") else { continue };
        let driver = read(cpu, "scaling_driver").unwrap_or_default();
        let preference = read(cpu, "energy_performance_preference");
        // With these the processor chooses itself, by its preference, and "powersave" only says so.
        let chooses_itself = matches!(&*driver, "intel_pstate" | "amd-pstate-epp");
        let saves = match (&*governor, preference.as_deref()) {
            ("performance" | "schedutil", _) => false,
            ("powersave", preference) if chooses_itself => matches!(preference, Some("power" | "balance_power")),
            _ => true,
        };
        let words = match preference.filter(|_| chooses_itself) {
            Some(preference) => format!("{governor} ({preference})"),
            None => governor,
        };
        if saves {
            slow.insert(words);
        } else {
            seen.insert(words);
        }
    }
    if !slow.is_empty() {
        let slow: Vec<String> = slow.into_iter().collect();
        return Finding::warn(
            format!("processors are governed by {}", listed(&slow, MOST_SHOWN, ", ")),
            "a launch waits until the processor is awake: `cpupower frequency-set -g performance`",
        );
    }
    if seen.is_empty() {
        return Finding::unknown("the kernel does not show how frequencies are chosen, as in virtual machines");
    }
    let seen: Vec<String> = seen.into_iter().collect();
    Finding::pass(format!("governed by {}", listed(&seen, MOST_SHOWN, ", ")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_of_processors_are_read_and_nonsense_is_not() {
        let list = CpuList::parse("0-3,8\n").unwrap();
        assert_eq!(list.count(), 5);
        assert!(list.meets(&CpuList::parse("3-7").unwrap()) && !list.meets(&CpuList::parse("4-7,9").unwrap()));
        assert_eq!(CpuList::parse("\n").unwrap().count(), 0);
        assert_eq!(CpuList::parse("0-4294967295").unwrap().count(), 1 << 32);
        for nonsense in ["3-1", "x", "0-", "1,,2", "-1"] {
            assert_eq!(CpuList::parse(nonsense), None, "{nonsense}");
        }
    }
}
