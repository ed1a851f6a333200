//! The GPUs that were chosen.

use super::sight::Sight;
use super::{Finding, listed, shown};
use crate::machine::Gpu;
use crate::units::group_thousands;
use crate::wording::{enumerated, plural};

/// Free memory without which a GPU cannot hold a context, NCCL's buffers and the largest messages.
const LEAST_FREE_MIB: u64 = 2048;
/// How far free memory may differ between GPUs that nobody else uses.
const FREE_SPREAD_MAX: f64 = 0.1;
/// Utilization above which somebody is at work.
const BUSY_PERCENT: u32 = 10;
/// Share of its memory that an unused GPU may show as taken; the driver keeps some for itself.
const TAKEN_SHARE_MAX: f64 = 0.1;
/// Most process ids named for one GPU.
const PROCESSES_SHOWN: usize = 8;

const NOT_ASKED: &str = "the GPUs could not be asked";

fn plain(gpu: &Gpu) -> String {
    format!("GPU {}", gpu.index)
}

fn named(gpus: &[&Gpu]) -> String {
    enumerated(&gpus.iter().map(|gpu| plain(gpu)).collect::<Vec<_>>())
}

fn mib(amount: u64) -> String {
    format!("{} MiB", group_thousands(amount))
}

pub(super) fn count(sight: &Sight<'_>) -> Finding {
    let Some(machine) = sight.facts.machine else { return Finding::unknown(NOT_ASKED) };
    let (chosen, visible) = (sight.gpus.len(), machine.gpus.len());
    let evidence = format!("{chosen} of {visible} visible {} chosen", plural(visible as u32, "GPU", "GPUs"));
    if chosen >= 2 {
        Finding::pass(evidence)
    } else {
        Finding::fail(
            evidence,
            "collectives need two GPUs: choose more with --devices, or show more with CUDA_VISIBLE_DEVICES",
        )
    }
}

/// What makes two GPUs of one kind.
type Kind<'a> = (&'a str, Option<[i32; 2]>, Option<u64>);

fn kind(gpu: &Gpu) -> Kind<'_> {
    (&gpu.name, gpu.compute_capability, gpu.memory_total_mib)
}

fn kind_words((name, capability, memory): Kind<'_>) -> String {
    let capability = capability.map(|[major, minor]| format!("compute capability {major}.{minor}"));
    let details: Vec<String> = capability.into_iter().chain(memory.map(mib)).collect();
    let name = shown(name);
    if details.is_empty() { name } else { format!("{name} ({})", details.join(", ")) }
}

/// Whether two kinds differ in something that was read of both.
fn differ(one: Kind<'_>, other: Kind<'_>) -> bool {
    let unequal = |left, right| matches!((left, right), (Some(left), Some(right)) if left != right);
    let memory = |kind: Kind<'_>| kind.2.map(|mib| [mib, 0]);
    let capability = |kind: Kind<'_>| kind.1.map(|[major, minor]| [major as u64, minor as u64]);
    one.0 != other.0 || unequal(capability(one), capability(other)) || unequal(memory(one), memory(other))
}

pub(super) fn alike(sight: &Sight<'_>) -> Finding {
    let kinds: Vec<Kind<'_>> = sight.gpus.iter().map(|gpu| kind(gpu)).collect();
    // The kind most of them are of, the first of equals: the others are the odd ones.
    let alike_count = |kind: &Kind<'_>| kinds.iter().filter(|other| !differ(*kind, **other)).count();
    let Some(usual) = kinds.iter().rev().max_by_key(|kind| alike_count(kind)).copied() else {
        return Finding::unknown(NOT_ASKED);
    };
    let odd: Vec<String> = sight
        .gpus
        .iter()
        .filter(|gpu| differ(kind(gpu), usual))
        .map(|gpu| format!("{}: {}", plain(gpu), kind_words(kind(gpu))))
        .collect();
    let rest = kinds.len() - odd.len();
    if !odd.is_empty() {
        return Finding::warn(
            format!("{}; the {}: {}", odd.join("; "), plural(rest as u32, "other", "others"), kind_words(usual)),
            "the slowest GPU sets the pace, and settings that suit one kind may not suit the other: \
             leave the odd one out with --devices if the server does not use it",
        );
    }
    let unread: Vec<&Gpu> = sight
        .gpus
        .iter()
        .filter(|gpu| gpu.compute_capability.is_none() || gpu.memory_total_mib.is_none())
        .copied()
        .collect();
    if unread.is_empty() {
        Finding::pass(format!("{rest}x {}", kind_words(usual)))
    } else {
        Finding::unknown(format!("compute capability or memory of {} could not be read", named(&unread)))
    }
}

pub(super) fn idle(sight: &Sight<'_>) -> Finding {
    if sight.gpus.is_empty() {
        return Finding::unknown(NOT_ASKED);
    }
    let own = sight.facts.own_process_ids;
    let mut taken = Vec::new();
    let mut suspicious = Vec::new();
    let mut unread = Vec::new();
    for gpu in &sight.gpus {
        let others: Vec<String> = gpu.process_ids.iter().filter(|id| !own.contains(id)).map(u32::to_string).collect();
        if !others.is_empty() {
            let processes = plural(others.len() as u32, "process", "processes");
            taken.push(format!("{} is used by {processes} {}", plain(gpu), listed(&others, PROCESSES_SHOWN, ", ")));
        } else if gpu.process_ids.is_empty() {
            // Nobody to be seen; what the GPU itself says may tell otherwise.
            match gpu.utilization_percent {
                None => unread.push(*gpu),
                Some(busy) if busy > BUSY_PERCENT => suspicious.push(format!("{} is {busy} % busy", plain(gpu))),
                Some(_) => {}
            }
            if let (Some(total), Some(free)) = (gpu.memory_total_mib, gpu.memory_free_mib)
                && total.saturating_sub(free) as f64 > total as f64 * TAKEN_SHARE_MAX
            {
                suspicious.push(format!("{} has {} in use", plain(gpu), mib(total - free)));
            }
        }
    }
    if !taken.is_empty() {
        Finding::fail(
            listed(&taken, 16, "; "),
            "stop that work, or leave the GPU out with --devices; whatever else runs there is measured too",
        )
    } else if !suspicious.is_empty() {
        Finding::warn(
            format!("{}, and no process is visible", listed(&suspicious, 16, "; ")),
            "look from the host with `nvidia-smi`: in a container other tenants' processes are invisible",
        )
    } else if unread.is_empty() {
        Finding::pass("no other compute process, and no load")
    } else {
        Finding::unknown(format!("no process is visible; the load of {} could not be read", named(&unread)))
    }
}

pub(super) fn memory(sight: &Sight<'_>) -> Finding {
    let free: Vec<(&Gpu, u64)> =
        sight.gpus.iter().filter_map(|gpu| gpu.memory_free_mib.map(|free| (*gpu, free))).collect();
    let short: Vec<String> = free
        .iter()
        .filter(|(_, free)| *free < LEAST_FREE_MIB)
        .map(|(gpu, free)| format!("{} has {} free", plain(gpu), mib(*free)))
        .collect();
    if !short.is_empty() {
        return Finding::fail(
            short.join("; "),
            format!("free at least {} on each GPU; a server that was killed may still hold it", mib(LEAST_FREE_MIB)),
        );
    }
    let least = free.iter().min_by_key(|(_, free)| *free);
    let most = free.iter().max_by_key(|(_, free)| *free);
    if let (Some((poorest, least)), Some((richest, most))) = (least, most)
        && (most - least) as f64 > *most as f64 * FREE_SPREAD_MAX
    {
        let [poorest, richest] = [plain(poorest), plain(richest)];
        return Finding::warn(
            format!("{poorest} has {} free, {richest} has {}", mib(*least), mib(*most)),
            "something may already live on the GPU with less: look with `nvidia-smi`",
        );
    }
    let unread: Vec<&Gpu> = sight.gpus.iter().filter(|gpu| gpu.memory_free_mib.is_none()).copied().collect();
    match least {
        Some((_, least)) if unread.is_empty() => Finding::pass(format!("at least {} free on each", mib(*least))),
        None if unread.is_empty() => Finding::unknown(NOT_ASKED),
        _ => Finding::unknown(format!("the free memory of {} could not be read", named(&unread))),
    }
}

pub(super) fn pcie_link(sight: &Sight<'_>) -> Finding {
    let read: Vec<(&Gpu, [u32; 2], [u32; 2])> =
        sight.gpus.iter().filter_map(|gpu| Some((*gpu, gpu.pcie_generation?, gpu.pcie_width?))).collect();
    let mut slow = Vec::new();
    let mut resting = Vec::new();
    for (gpu, [generation, generation_max], [width, width_max]) in &read {
        if width < width_max {
            slow.push(format!("{} runs at x{width} of x{width_max}", plain(gpu)));
        }
        if generation < generation_max {
            if gpu.utilization_percent.is_some_and(|busy| busy > BUSY_PERCENT) {
                slow.push(format!("{} runs at generation {generation} of {generation_max} under load", plain(gpu)));
            } else {
                resting.push(*gpu);
            }
        }
    }
    // A slot with fewer lanes than its neighbours: nothing runs below its maximum, and it is slower still.
    let links: Vec<String> =
        read.iter().map(|(_, [_, generation], [_, width])| format!("generation {generation} x{width}")).collect();
    let unlike = links.iter().any(|link| *link != links[0]);
    if unlike {
        let each: Vec<String> =
            read.iter().zip(&links).map(|((gpu, ..), link)| format!("{} has {link}", plain(gpu))).collect();
        slow.push(format!("the links are not alike: {}", listed(&each, 16, ", ")));
    }
    if !slow.is_empty() {
        return Finding::warn(
            slow.join("; "),
            "look at the slot, the riser and the firmware's settings: no NCCL variable gives lanes back",
        );
    }
    let unread: Vec<&Gpu> =
        sight.gpus.iter().filter(|gpu| gpu.pcie_generation.is_none() || gpu.pcie_width.is_none()).copied().collect();
    match links.first() {
        None if unread.is_empty() => Finding::unknown(NOT_ASKED),
        Some(link) if unread.is_empty() => {
            let verb = plural(resting.len() as u32, "is", "are");
            let remark = if resting.is_empty() {
                String::new()
            } else {
                format!(
                    "; {} {verb} below that now, as idle GPUs slow their link down (NCCL 2.30.7 plans with the \
                     current speed, 2.28.9 with the highest)",
                    named(&resting)
                )
            };
            Finding::pass(format!("all at {link}{remark}"))
        }
        _ => Finding::unknown(format!("the PCIe link of {} could not be read", named(&unread))),
    }
}

#[cfg(test)]
mod tests {
    use super::super::fixtures::{Planted, gpu};
    use crate::machine::Gpu;
    use crate::record::CheckVerdict::{self, Fail, Pass, Unknown, Warn};

    /// What a check says of a healthy machine after a change to its GPUs.
    fn said(name: &str, change: impl FnOnce(&mut Vec<Gpu>)) -> (CheckVerdict, String) {
        let mut planted = Planted::healthy();
        change(planted.gpus());
        let check = planted.check(name);
        (check.verdict, check.evidence)
    }

    #[track_caller]
    fn assert_said(name: &str, verdict: CheckVerdict, words: &str, change: impl FnOnce(&mut Vec<Gpu>)) {
        let (found, evidence) = said(name, change);
        assert_eq!(found, verdict, "{evidence}");
        assert!(evidence.contains(words), "{evidence}");
    }

    #[test]
    fn without_a_machine_nothing_is_claimed_of_gpus() {
        let planted = Planted::without_driver();
        for name in ["gpu-count", "gpu-alike", "gpu-idle", "gpu-memory", "pcie-link"] {
            assert_eq!(planted.check(name).verdict, Unknown, "{name}");
        }
    }

    #[test]
    fn one_gpu_is_not_enough() {
        let mut planted = Planted::healthy();
        assert_eq!(planted.check("gpu-count").verdict, Pass);
        planted.devices = vec![1];
        let check = planted.check("gpu-count");
        assert_eq!((check.verdict, check.evidence.as_str()), (Fail, "1 of 2 visible GPUs chosen"));
        planted.devices = vec![0, 7];
        assert_eq!(planted.check("gpu-count").verdict, Fail, "an index without a GPU is no GPU");
        planted.devices = vec![];
        assert_eq!(planted.check("gpu-count").verdict, Fail);
    }

    #[test]
    fn gpus_that_were_not_chosen_are_not_judged() {
        let mut planted = Planted::healthy();
        let stranger =
            Gpu { name: "NVIDIA Other".to_owned(), process_ids: vec![9], memory_free_mib: Some(1), ..gpu(2) };
        planted.gpus().push(stranger);
        for name in ["gpu-count", "gpu-alike", "gpu-idle", "gpu-memory", "pcie-link"] {
            assert_eq!(planted.check(name).verdict, Pass, "{name}");
        }
    }

    #[test]
    fn the_odd_gpu_is_named() {
        assert_said("gpu-alike", Pass, "2x NVIDIA Test (compute capability 12.0, 97,887 MiB)", |_| {});
        let odd = "GPU 1: NVIDIA Other (compute capability 12.0, 97,887 MiB); the other: NVIDIA Test";
        assert_said("gpu-alike", Warn, odd, |gpus| gpus[1].name = "NVIDIA Other".to_owned());
        assert_said("gpu-alike", Warn, "GPU 1: NVIDIA Test (compute capability 9.0", |gpus| {
            gpus[1].compute_capability = Some([9, 0]);
        });
        assert_said("gpu-alike", Warn, "48,000 MiB", |gpus| gpus[1].memory_total_mib = Some(48_000));
        assert_said("gpu-alike", Unknown, "of GPU 0 could not be read", |gpus| gpus[0].memory_total_mib = None);
    }

    #[test]
    fn the_odd_gpu_is_the_one_in_the_minority() {
        let mut planted = Planted::healthy();
        planted.gpus()[0].name = "NVIDIA Other".to_owned();
        planted.gpus().push(gpu(2));
        planted.devices = vec![0, 1, 2];
        let evidence = planted.check("gpu-alike").evidence;
        assert!(
            evidence.starts_with("GPU 0: NVIDIA Other") && evidence.contains("; the others: NVIDIA Test"),
            "{evidence}"
        );
    }

    #[test]
    fn other_processes_fail_and_own_ones_do_not() {
        assert_said("gpu-idle", Pass, "no other compute process", |_| {});
        assert_said("gpu-idle", Fail, "GPU 1 is used by processes 7, 8", |gpus| gpus[1].process_ids = vec![7, 8]);
        let mut planted = Planted::healthy();
        planted.gpus()[0].process_ids = vec![7];
        planted.gpus()[0].utilization_percent = Some(90);
        planted.own_process_ids = vec![7];
        assert_eq!(planted.check("gpu-idle").verdict, Pass);
    }

    #[test]
    fn a_busy_gpu_without_a_process_is_suspicious() {
        assert_said("gpu-idle", Pass, "", |gpus| gpus[0].utilization_percent = Some(10));
        let words = "GPU 0 is 11 % busy, and no process is visible";
        assert_said("gpu-idle", Warn, words, |gpus| gpus[0].utilization_percent = Some(11));
        assert_said("gpu-idle", Warn, "GPU 0 has 60,887 MiB in use", |gpus| gpus[0].memory_free_mib = Some(37_000));
        let words = "the load of GPU 0 could not be read";
        assert_said("gpu-idle", Unknown, words, |gpus| gpus[0].utilization_percent = None);
    }

    #[test]
    fn hundreds_of_processes_are_counted_not_listed() {
        let (verdict, evidence) = said("gpu-idle", |gpus| gpus[0].process_ids = (1..=500).collect());
        assert_eq!(verdict, Fail);
        assert!(evidence.ends_with("7, 8, and 492 more"), "{evidence}");
    }

    #[test]
    fn memory_must_be_free_and_evenly_so() {
        assert_said("gpu-memory", Pass, "at least 97,000 MiB free on each", |_| {});
        assert_said("gpu-memory", Pass, "", |gpus| gpus[1].memory_free_mib = Some(87_300));
        let words = "GPU 1 has 87,299 MiB free, GPU 0 has 97,000 MiB";
        assert_said("gpu-memory", Warn, words, |gpus| gpus[1].memory_free_mib = Some(87_299));
        assert_said("gpu-memory", Fail, "GPU 1 has 2,047 MiB free", |gpus| gpus[1].memory_free_mib = Some(2047));
        assert_said("gpu-memory", Warn, "", |gpus| gpus[1].memory_free_mib = Some(2048));
        assert_said("gpu-memory", Unknown, "of GPU 1 could", |gpus| gpus[1].memory_free_mib = None);
        let neither = |gpus: &mut Vec<Gpu>| gpus.iter_mut().for_each(|gpu| gpu.memory_free_mib = None);
        assert_said("gpu-memory", Unknown, "of GPU 0 and GPU 1 could", neither);
    }

    #[test]
    fn lost_lanes_warn_and_a_resting_link_does_not() {
        assert_said("pcie-link", Pass, "all at generation 5 x16", |_| {});
        assert_said("pcie-link", Warn, "GPU 1 runs at x8 of x16", |gpus| gpus[1].pcie_width = Some([8, 16]));
        let words = "GPU 0 is below that now, as idle GPUs slow their link down";
        assert_said("pcie-link", Pass, words, |gpus| gpus[0].pcie_generation = Some([1, 5]));
        assert_said("pcie-link", Warn, "GPU 0 runs at generation 1 of 5 under load", |gpus| {
            gpus[0].pcie_generation = Some([1, 5]);
            gpus[0].utilization_percent = Some(80);
        });
        assert_said("pcie-link", Warn, "GPU 1 has generation 5 x8", |gpus| gpus[1].pcie_width = Some([8, 8]));
        assert_said("pcie-link", Unknown, "of GPU 1 could", |gpus| gpus[1].pcie_width = None);
    }
}
