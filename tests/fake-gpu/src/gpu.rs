//! Which GPUs there are, who uses them, and what a killed process leaves behind.
//!
//! A process that opens a GPU leaves a locked file in the scenario's folder. The system takes the lock
//! away when the process ends; a file that is there without its lock is that of a process that was
//! killed, since an orderly end removes it.

use std::collections::BTreeMap;
use std::fs::{self, File, OpenOptions};
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, SystemTime};

use crate::chance;
use crate::faults::scenario;
use crate::home::home;
use crate::scenario::{Fault, Kind};

/// What kind of GPU is played.
pub(crate) const NAME: &str = "Fake GPU";
/// Its driver, and the CUDA version that it offers.
pub(crate) const DRIVER: &str = "580.00.00";
pub(crate) const CUDA_VERSION: i32 = 13_000;
/// Its compute capability.
pub(crate) fn capability() -> (i32, i32) {
    if scenario().misjudged { (12, 0) } else { (9, 0) }
}

/// The identity of a GPU, by its position in PCI order.
pub(crate) fn uuid(gpu: u32) -> String {
    let parts: Vec<u64> = home().machine.bytes().map(u64::from).chain([u64::from(gpu)]).collect();
    let (high, low) = (chance::mix(&parts), chance::mix(&[chance::mix(&parts), 1]));
    format!(
        "GPU-{:08x}-{:04x}-{:04x}-{:04x}-{:012x}",
        high >> 32,
        high >> 16 & 0xffff,
        high & 0xffff,
        low >> 48,
        low & 0xffff_ffff_ffff
    )
}

/// The bus a GPU sits on.
pub(crate) fn bus(gpu: u32) -> u32 {
    0x1a + gpu
}

/// The GPUs that CUDA shows to this process, in order.
pub(crate) fn visible() -> Vec<u32> {
    let all = 0..scenario().devices;
    match std::env::var("CUDA_VISIBLE_DEVICES") {
        Err(_) => all.collect(),
        // What follows the first name that is not known is not shown.
        Ok(names) => names
            .split(',')
            .map_while(|name| {
                let name = name.trim();
                all.clone().find(|gpu| name.parse() == Ok(*gpu) || uuid(*gpu).eq_ignore_ascii_case(name))
            })
            .collect(),
    }
}

/// A GPU that this process has open.
struct Held {
    path: PathBuf,
    file: File,
    times: u32,
}

static HELD: Mutex<BTreeMap<u32, Held>> = Mutex::new(BTreeMap::new());

/// Opens a GPU.
pub(crate) fn hold(gpu: u32) -> std::io::Result<()> {
    let mut all = HELD.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(held) = all.get_mut(&gpu) {
        held.times += 1;
        return Ok(());
    }
    if all.is_empty() {
        // SAFETY: the function is one of this library, which is never unloaded while a GPU is open.
        unsafe { libc::atexit(release_all) };
    }
    let process = std::process::id();
    // Locked before it has its name, so that nobody takes it for a dead process's.
    let (path, unnamed) =
        (home().file(&format!("gpu-{gpu}-of-{process}")), home().file(&format!("opening-{gpu}-{process}")));
    let file = OpenOptions::new().create(true).truncate(true).write(true).read(true).open(&unnamed)?;
    if !try_lock(&file) {
        return Err(std::io::Error::last_os_error());
    }
    file.write_all_at(&0_u64.to_le_bytes(), 0)?;
    fs::rename(&unnamed, &path)?;
    all.insert(gpu, Held { path, file, times: 1 });
    Ok(())
}

/// Closes a GPU once for each time it was opened.
pub(crate) fn release(gpu: u32) {
    let mut all = HELD.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(held) = all.get_mut(&gpu) {
        held.times -= 1;
        if held.times == 0 {
            let _ = fs::remove_file(&held.path);
            all.remove(&gpu);
        }
    }
}

extern "C" fn release_all() {
    for held in HELD.lock().unwrap_or_else(PoisonError::into_inner).values() {
        let _ = fs::remove_file(&held.path);
    }
}

/// Notes how much of a GPU's memory this process uses.
pub(crate) fn note_used(gpu: u32, bytes: u64) {
    if let Some(held) = HELD.lock().unwrap_or_else(PoisonError::into_inner).get(&gpu) {
        // Others then see less memory in use than there is.
        let _ = held.file.write_all_at(&bytes.to_le_bytes(), 0);
    }
}

fn try_lock(file: &File) -> bool {
    // SAFETY: the descriptor is open as long as the file lives.
    unsafe { libc::flock(file.as_raw_fd(), libc::LOCK_EX | libc::LOCK_NB) == 0 }
}

/// Processes that use a GPU, with the bytes that each uses. Files of killed ones become traces.
pub(crate) fn users(gpu: u32) -> Vec<(u32, u64)> {
    let prefix = format!("gpu-{gpu}-of-");
    let own = std::process::id();
    let mut users = Vec::new();
    for (path, name) in files() {
        let Some(process) = name.strip_prefix(&prefix).and_then(|process| process.parse().ok()) else { continue };
        let Ok(file) = File::open(&path) else { continue };
        let mut bytes = [0; 8];
        let used = file.read_exact_at(&mut bytes, 0).map_or(0, |()| u64::from_le_bytes(bytes));
        // The lock of this process is another open file's, and would be refused as well.
        if process == own || !try_lock(&file) {
            users.push((process, used));
        } else {
            leave_trace(gpu, &path);
        }
    }
    users
}

fn leave_trace(gpu: u32, path: &Path) {
    if busy_fault(gpu).is_some() {
        let _ = fs::rename(path, home().file(&format!("killed-{gpu}")));
    } else {
        let _ = fs::remove_file(path);
    }
}

fn files() -> Vec<(PathBuf, String)> {
    let Ok(entries) = fs::read_dir(&home().state) else { return Vec::new() };
    entries.flatten().map(|entry| (entry.path(), entry.file_name().to_string_lossy().into_owned())).collect()
}

fn busy_fault(gpu: u32) -> Option<&'static Fault> {
    let mut faults = scenario().fault.iter();
    faults.find(|fault| fault.kind == Kind::BusyAfterKill && fault.rank.is_none_or(|rank| rank == gpu))
}

/// The fault that a killed process left a GPU with, and how long it still lasts: `None` is for ever.
fn wedged(gpu: u32) -> Option<(&'static Fault, Option<Duration>)> {
    let fault = busy_fault(gpu)?;
    users(gpu);
    let since = fs::metadata(home().file(&format!("killed-{gpu}"))).and_then(|data| data.modified()).ok()?;
    let Some(seconds) = fault.seconds else { return Some((fault, None)) };
    let age = SystemTime::now().duration_since(since).unwrap_or_default();
    let rest = Duration::from_secs_f64(seconds.max(0.0)).checked_sub(age)?;
    Some((fault, Some(rest)))
}

/// Waits where a killed process left a GPU in a state in which this call hangs.
pub(crate) fn hold_if_wedged(call: &str) {
    if !crate::faults::Faults::any(Kind::BusyAfterKill) {
        return;
    }
    let Some(gpu) = crate::cuda::gpu_in_question() else { return };
    while let Some((fault, rest)) = wedged(gpu) {
        if fault.call.as_deref() != Some(call) {
            return;
        }
        std::thread::sleep(rest.unwrap_or(Duration::from_secs(3600)).min(Duration::from_millis(50)));
    }
}

/// Bytes that a killed process left taken.
fn taken(gpu: u32) -> u64 {
    wedged(gpu).and_then(|(fault, _)| fault.mebibytes).unwrap_or(0) << 20
}

/// All bytes of a GPU's memory, and those that are free.
pub(crate) fn memory(gpu: u32) -> (u64, u64) {
    let total = scenario().memory_mib << 20;
    let used: u64 = users(gpu).into_iter().map(|(_, bytes)| bytes).sum();
    (total, total.saturating_sub(used).saturating_sub(taken(gpu)))
}
