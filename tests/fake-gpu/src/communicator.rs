//! A rank's membership of a communicator, and NCCL's state in a process.

use std::collections::BTreeSet;
use std::ffi::CString;

use crate::chance;
use crate::choice::{Path, Tuning};
use crate::exchange::Group;
use crate::faults::scenario;
use crate::log::{Log, Subject};
use crate::plugin::{Plugin, Plugins};
use crate::variables::Variables;

/// One rank's membership.
pub(crate) struct Communicator {
    pub(crate) group: Group,
    pub(crate) rank: usize,
    pub(crate) launch: u64,
    /// The position of this communicator among those of its launch.
    pub(crate) position: u64,
    pub(crate) tuning: Tuning,
    pub(crate) path: Path,
    pub(crate) plugin: Option<Plugin>,
    /// Graphs that hold operations of this communicator; it cannot be destroyed before they are.
    pub(crate) graphs: usize,
    /// An event follows each captured collective.
    pub(crate) has_event_nodes: bool,
    /// Ranks are connected.
    pub(crate) is_connected: bool,
    /// Algorithms whose connections were told.
    pub(crate) told: BTreeSet<usize>,
    /// Buffers go through files in /dev/shm.
    pub(crate) uses_files: bool,
    /// Device memory of its buffers.
    pub(crate) memory: u64,
    pub(crate) device: u32,
}

impl Communicator {
    /// The share by which times of this communicator lie off the rest.
    pub(crate) fn factor(&self) -> f64 {
        let scenario = scenario();
        (scenario.noise * chance::normal(&[scenario.seed, 1, self.launch, self.position])).exp()
    }

    /// The share by which one replay lies off the others: a third of the deviation between communicators.
    pub(crate) fn scatter(&self, serial: u64) -> f64 {
        let scenario = scenario();
        1.0 + scenario.noise / 3.0 * chance::normal(&[scenario.seed, 2, self.launch, self.position, serial])
    }
}

/// One half of an exchange between two ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Transfer {
    pub(crate) is_send: bool,
    pub(crate) buffer: u64,
    pub(crate) bytes: usize,
    pub(crate) kind: i32,
    pub(crate) peer: usize,
    pub(crate) communicator: usize,
    pub(crate) stream: usize,
}

/// What NCCL keeps in a process.
#[derive(Default)]
pub(crate) struct Nccl {
    log: Option<Log>,
    pub(crate) variables: Variables,
    pub(crate) plugins: Plugins,
    last_error: Option<CString>,
    /// Sends and receives of a group that was begun and not ended.
    pub(crate) group: Option<Vec<Transfer>>,
    /// The launch that this process began, and communicators it has named.
    pub(crate) begun: Option<(u64, u64)>,
    /// The GPU that log lines name.
    pub(crate) device: u32,
    pub(crate) has_told_version: bool,
}

impl Nccl {
    pub(crate) fn log(&mut self) -> &mut Log {
        self.log.get_or_insert_with(Log::open)
    }

    /// Writes a line.
    pub(crate) fn note(&mut self, subject: Subject, text: &str) {
        let device = self.device;
        self.log().info(subject, device, text);
    }

    /// Writes a warning, which is the last error from now on.
    pub(crate) fn fail(&mut self, text: &str) {
        let device = self.device;
        self.log().warn(device, "init.cc:1", text);
        self.last_error = CString::new(text.replace('\0', " ")).ok();
    }

    /// The last error, or nothing.
    pub(crate) fn last_error(&self) -> CString {
        self.last_error.clone().unwrap_or_default()
    }
}
