//! Who else holds the GPUs' device files. A process needs no compute context to be in the way: one that was
//! killed and hangs, or one that keeps a GPU awake, shows here and nowhere else.

use super::sight::Sight;
use super::{Finding, listed, shown};
use crate::wording::plural;

/// Most processes that are looked at, most links of all of them, and most bytes of all their maps.
const MOST_PROCESSES: usize = 8192;
const MOST_LINKS: usize = 200_000;
const MAPS_BYTES: u64 = 256 << 10;
const MOST_MAPS_BYTES: u64 = 64 << 20;
/// The processes of the driver itself, by the fifteen letters that the kernel keeps of a name. They hold a
/// GPU so that it stays initialised, or so that its fabric works, and compute nothing.
const SERVICES: [&str; 4] = ["nvidia-persiste", "nv-fabricmanage", "nv-hostengine", "nvidia-smi"];
const MOST_SHOWN: usize = 12;

/// Whether this is a GPU's device file, or the one through which its memory is managed.
fn is_gpu_file(path: &str) -> bool {
    path.strip_prefix("/dev/nvidia")
        .is_some_and(|rest| rest == "-uvm" || !rest.is_empty() && rest.bytes().all(|byte| byte.is_ascii_digit()))
}

/// What is seen of a process.
enum Seen {
    /// Its files are not shown to this user.
    Hidden,
    /// It holds no GPU.
    Free,
    /// It holds one, in this way.
    Holds(&'static str),
}

fn look(sight: &Sight<'_>, id: u32, links: &mut usize, maps_bytes: &mut u64) -> Seen {
    let folder = format!("/proc/{id}/fd");
    let Some(names) = sight.names(&folder, *links) else { return Seen::Hidden };
    *links -= names.len().min(*links);
    if names.iter().filter_map(|name| sight.link(&folder, name)).any(|target| is_gpu_file(&target)) {
        return Seen::Holds("open");
    }
    let maps = sight.bytes(&format!("/proc/{id}/maps"), MAPS_BYTES.min(*maps_bytes)).unwrap_or_default();
    *maps_bytes -= (maps.len() as u64).min(*maps_bytes);
    let maps = String::from_utf8_lossy(&maps);
    let is_mapped = maps.lines().filter_map(|line| line.split_whitespace().nth(5)).any(is_gpu_file);
    if is_mapped { Seen::Holds("mapped") } else { Seen::Free }
}

pub(super) fn check(sight: &Sight<'_>) -> Finding {
    let devices = sight.names("/dev", 1 << 16).unwrap_or_default();
    if sight.gpus.is_empty() && !devices.iter().any(|name| is_gpu_file(&format!("/dev/{name}"))) {
        return Finding::unknown("no GPU's device file is here");
    }
    let ids: Vec<u32> =
        sight.names("/proc", 1 << 17).unwrap_or_default().iter().filter_map(|name| name.parse().ok()).collect();
    let own = sight.facts.own_process_ids;
    let (mut links, mut maps_bytes) = (MOST_LINKS, MOST_MAPS_BYTES);
    let (mut tenants, mut services, mut hidden) = (Vec::new(), Vec::new(), 0);
    for id in ids.iter().take(MOST_PROCESSES).filter(|id| !own.contains(id)) {
        if links == 0 {
            hidden += 1;
            continue;
        }
        match look(sight, *id, &mut links, &mut maps_bytes) {
            Seen::Hidden => hidden += 1,
            Seen::Free => {}
            Seen::Holds(how) => {
                let status = sight.text(&format!("/proc/{id}/status")).unwrap_or_default();
                let entry = |name: &str| status.lines().find_map(|line| line.strip_prefix(name)).map(str::trim);
                // A child of this process is this process's work.
                if entry("PPid:").and_then(|parent| parent.parse().ok()).is_some_and(|parent| own.contains(&parent)) {
                    continue;
                }
                match entry("Name:").filter(|name| SERVICES.contains(name)) {
                    Some(name) => services.push(format!("{} (process {id})", shown(name))),
                    None => tenants.push(format!("process {id} has them {how}")),
                }
            }
        }
    }
    hidden += ids.len().saturating_sub(MOST_PROCESSES);
    if !tenants.is_empty() {
        return Finding::warn(
            listed(&tenants, MOST_SHOWN, "; "),
            "look what these are with `ps -p`, and stop what is not needed: whatever runs there is measured too",
        );
    }
    let processes = |count: usize| format!("{count} {}", plural(count as u32, "process", "processes"));
    if hidden > 0 {
        return Finding::unknown(format!(
            "nobody among {}; what {} hold is shown to root alone",
            processes(ids.len() - hidden),
            processes(hidden)
        ));
    }
    let but = if services.is_empty() {
        String::new()
    } else {
        format!(" but the driver's own {}", listed(&services, MOST_SHOWN, ", "))
    };
    Finding::pass(format!("nobody among {}{but}", processes(ids.len())))
}
