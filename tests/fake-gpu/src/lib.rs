//! A stand-in for NVIDIA's driver, NVML, NCCL and cuBLASLt.
//!
//! One shared library answers to all four names, so that nccltune's own workers and probes run on it as
//! they are: ranks are processes that really add up each other's numbers, graphs are captured and
//! replayed, and a log is written as NCCL writes it. Times are of a virtual clock and invented. What is
//! not modelled is an error, never a pretence. README.md says more, and documents the scenarios.
//!
//! Tests link this crate for [`install`], which sets up a folder that workers load the library from.
#![expect(
    clippy::disallowed_methods,
    reason = "it lives in a worker's process, and keeps its state in files: clocks, environment and files are its business"
)]

mod chance;
pub mod choice;
mod communicator;
mod cost;
mod cublaslt;
mod cuda;
mod engine;
mod exchange;
mod exports;
mod faults;
pub mod function;
mod gpu;
mod graph;
mod home;
mod log;
mod memory;
mod nccl;
mod numbers;
mod nvml;
mod plugin;
pub mod scenario;
mod status;
mod timeline;
mod variables;

use std::io::Write;
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};

/// The names that the library answers to.
pub const NAMES: [&str; 4] = ["libcuda.so.1", "libnccl.so.2", "libnvidia-ml.so.1", "libcublasLt.so.13"];

/// By this symbol a program knows that it has no GPU before it. The value means nothing.
// SAFETY: the name is this project's.
#[unsafe(no_mangle)]
#[allow(non_upper_case_globals, reason = "a symbol is looked up by this name")]
pub static nccltune_fake_gpu: u8 = 1;

/// Says on standard error why a call fails that would not fail on a GPU.
fn complain(what: &str) {
    // Nobody is left to tell if this fails.
    let _ = writeln!(std::io::stderr(), "fake-gpu: {what}");
}

/// Bytes that are no text, on both streams.
fn write_garbage() {
    let bytes: Vec<u8> = (0..2000_u64).map(|at| chance::mix(&[at]) as u8).collect();
    let _ = std::io::stdout().write_all(&bytes);
    let _ = std::io::stdout().flush();
    let _ = std::io::stderr().write_all(&bytes);
}

/// Says something on the channel of a worker, its standard input, that no worker says. Probes are let be.
fn speak(what: &str) {
    if !std::env::args().any(|argument| argument == "__worker") {
        return;
    }
    let Ok(channel) = std::io::stdin().as_fd().try_clone_to_owned() else { return };
    let mut channel = UnixStream::from(channel);
    // A parent that no longer listens is what some of these are about.
    let _ = match what {
        "no-text" => channel.write_all(b"\xff\xfe\x00\n"),
        "other-version" => channel.write_all(
            b"{\"answer\":\"ready\",\"protocol\":999,\"nccl_version\":22809,\"device_name\":\"?\",\"pci_bus_id\":\"?\"}\n",
        ),
        "endless" => {
            let piece = vec![b'x'; 1 << 20];
            (0..1024).try_for_each(|_| channel.write_all(&piece))
        }
        _ => channel.write_all(b"{\"answer\":\"sing\"}\n"),
    };
}

/// The shared library as cargo built it with the test that asks.
///
/// It lies beside the test's executable, or in the folder above.
pub fn library() -> std::io::Result<PathBuf> {
    let executable = std::env::current_exe()?;
    let folders = executable.ancestors().skip(1).take(2);
    let mut found = folders.map(|folder| folder.join("libfake_gpu.so")).filter(|path| path.is_file());
    found.next().ok_or_else(|| {
        let message =
            format!("libfake_gpu.so is not beside {}: it is built with the package fake-gpu", executable.display());
        std::io::Error::new(std::io::ErrorKind::NotFound, message)
    })
}

/// Makes a folder that holds the library under all its names, and a scenario.
///
/// A program finds the library when LD_LIBRARY_PATH names the folder. Its state is kept there.
pub fn install(folder: &Path, scenario: &str) -> std::io::Result<()> {
    let library = library()?;
    std::fs::create_dir_all(folder)?;
    for name in NAMES {
        std::os::unix::fs::symlink(&library, folder.join(name))?;
    }
    std::fs::write(folder.join(home::SCENARIO), scenario)
}
