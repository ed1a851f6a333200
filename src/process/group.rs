//! A group of children that live and die together.

use std::collections::BTreeMap;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream as StdUnixStream;
use std::os::unix::process::ExitStatusExt;
use std::process::{ExitStatus, Stdio};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use nix::sys::signal::{Signal, killpg};
use nix::unistd::Pid;
use tokio::io::{AsyncBufRead, AsyncBufReadExt, AsyncRead, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::net::UnixStream;
use tokio::sync::mpsc;
use tokio::task::JoinSet;

use super::LogTail;
use crate::clock::Deadline;

/// Longest frame a child may send, in bytes. A longer one is not waited for.
const FRAME_BYTES: u64 = 8 * 1024 * 1024;
/// How long killed children may take to disappear before they are given up. A process in
/// uninterruptible sleep inside a driver call cannot be killed by anybody.
const KILL_WAIT: Duration = Duration::from_secs(10);

/// How long the frames of an ended child may take to be read.
const READ_OUT: Duration = Duration::from_millis(20);

/// A child to start: this very executable with other arguments.
#[derive(Debug, Clone)]
pub struct ChildSpec {
    /// Arguments after the program name.
    pub arguments: Vec<String>,
    /// Its whole environment; nothing is inherited.
    pub environment: BTreeMap<String, String>,
}

/// How a child ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Exit {
    /// With a status.
    Status(i32),
    /// By a signal.
    Signal(i32),
}

impl Exit {
    fn from_status(status: ExitStatus) -> Self {
        match (status.code(), status.signal()) {
            (Some(code), _) => Self::Status(code),
            (None, signal) => Self::Signal(signal.unwrap_or(0)),
        }
    }
}

impl std::fmt::Display for Exit {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Status(status) => write!(formatter, "exit status {status}"),
            Self::Signal(number) => match Signal::try_from(*number) {
                Ok(signal) => write!(formatter, "signal {number} ({signal})"),
                Err(_) => write!(formatter, "signal {number}"),
            },
        }
    }
}

/// Something a child did.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ChildEvent {
    /// It sent a frame.
    Frame {
        /// Index of the child.
        child: usize,
        /// The line without its end.
        line: String,
    },
    /// It sent something that is no frame, and is not listened to any more.
    BadFrame {
        /// Index of the child.
        child: usize,
        /// What was wrong.
        reason: String,
    },
    /// It ended.
    Exited {
        /// Index of the child.
        child: usize,
        /// How.
        exit: Exit,
    },
}

pub(super) enum Order {
    Send { child: usize, line: String },
    CloseAll,
    Terminate,
    Kill,
}

/// Running children, as a blocking object. Dropping it ends them.
#[derive(Debug)]
pub struct Group {
    orders: mpsc::UnboundedSender<Order>,
    events: std::sync::mpsc::Receiver<ChildEvent>,
    logs: Vec<Arc<Mutex<LogTail>>>,
    process_ids: Vec<u32>,
    exits: Vec<Option<Exit>>,
}

impl Group {
    /// Sends one frame to one child. A child that is gone shows as [`ChildEvent::Exited`].
    pub fn send(&self, child: usize, line: String) {
        // The supervisor outlives its groups; if it is gone the process is ending.
        let _ = self.orders.send(Order::Send { child, line });
    }

    /// The next event, or `None` when the deadline passes first.
    pub fn receive(&mut self, deadline: Deadline) -> Option<ChildEvent> {
        let event = self.events.recv_timeout(deadline.remaining()).ok()?;
        if let ChildEvent::Exited { child, exit } = &event {
            self.exits[*child] = Some(*exit);
        }
        Some(event)
    }

    /// How a child ended, as far as its end was received.
    pub fn exit_of(&self, child: usize) -> Option<Exit> {
        self.exits.get(child).copied().flatten()
    }

    /// Process ids, in order of the specs.
    pub fn process_ids(&self) -> &[u32] {
        &self.process_ids
    }

    /// What a child printed so far.
    pub fn log(&self, child: usize) -> String {
        self.logs.get(child).map(|log| lock(log).text()).unwrap_or_default()
    }

    /// The last lines a child printed.
    pub fn last_log_lines(&self, child: usize, count: usize) -> String {
        self.logs.get(child).map(|log| lock(log).last_lines(count)).unwrap_or_default()
    }

    /// Ends the group: closes the channels (a worker ends on that), then SIGTERM, then SIGKILL, each
    /// after `grace`. Returns how each child ended; `None` for one that not even SIGKILL could end.
    pub fn stop(mut self, grace: Duration) -> Vec<Option<Exit>> {
        for (order, wait) in [(Order::CloseAll, grace), (Order::Terminate, grace), (Order::Kill, KILL_WAIT)] {
            let deadline = Deadline::after(wait);
            let _ = self.orders.send(order);
            while self.exits.iter().any(Option::is_none) {
                if self.receive(deadline).is_none() {
                    break;
                }
            }
        }
        std::mem::take(&mut self.exits)
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        if self.exits.iter().any(Option::is_none) {
            let _ = self.orders.send(Order::Kill);
        }
    }
}

fn lock(log: &Mutex<LogTail>) -> std::sync::MutexGuard<'_, LogTail> {
    // A panic while appending a line leaves a log that is still worth reading.
    log.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Starts the children and the task that looks after them.
pub(super) fn run_group(
    specs: Vec<ChildSpec>,
    tasks: &mut JoinSet<()>,
) -> std::io::Result<(Group, mpsc::UnboundedSender<Order>)> {
    let (orders, inbox) = mpsc::unbounded_channel();
    let (outbox, events) = std::sync::mpsc::channel();
    let mut children = Vec::with_capacity(specs.len());
    let mut logs = Vec::with_capacity(specs.len());
    let mut process_ids: Vec<u32> = Vec::with_capacity(specs.len());
    let mut writers = Vec::with_capacity(specs.len());
    let mut readers = JoinSet::new();
    for (index, spec) in specs.into_iter().enumerate() {
        let (ours, theirs) = StdUnixStream::pair()?;
        ours.set_nonblocking(true)?;
        let leader = process_ids.first().map_or(0, |id| *id as i32);
        // Children started so far end with their `Child` values (kill_on_drop) if this one fails.
        let mut child = start_child(&spec, theirs, leader)?;
        let log = Arc::new(Mutex::new(LogTail::default()));
        if let Some(stdout) = child.stdout.take() {
            readers.spawn_local(read_log(stdout, Arc::clone(&log)));
        }
        if let Some(stderr) = child.stderr.take() {
            readers.spawn_local(read_log(stderr, Arc::clone(&log)));
        }
        let (frames_in, frames_out) = UnixStream::from_std(ours)?.into_split();
        readers.spawn_local(read_frames(index, frames_in, outbox.clone()));
        let (frames, frames_inbox) = mpsc::unbounded_channel::<String>();
        readers.spawn_local(write_frames(frames_out, frames_inbox));
        writers.push(Some(frames));
        process_ids.push(child.id().unwrap_or(0));
        children.push(child);
        logs.push(log);
    }
    let exits = vec![None; children.len()];
    let leader = process_ids.first().copied();
    tasks.spawn_local(look_after(children, leader, inbox, writers, outbox, readers));
    Ok((Group { orders: orders.clone(), events, logs, process_ids, exits }, orders))
}

#[expect(clippy::disallowed_methods, reason = "this is the room for starting children")]
fn start_child(spec: &ChildSpec, channel: StdUnixStream, leader: i32) -> std::io::Result<tokio::process::Child> {
    tokio::process::Command::new("/proc/self/exe")
        .args(&spec.arguments)
        .env_clear()
        .envs(&spec.environment)
        .process_group(leader)
        .stdin(Stdio::from(OwnedFd::from(channel)))
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .kill_on_drop(true)
        .spawn()
}

/// Reads a log stream to its end. Bytes that are no UTF-8 are replaced, lines are cut, so that a
/// child can neither fill memory nor break a terminal.
async fn read_log(stream: impl AsyncRead + Unpin, log: Arc<Mutex<LogTail>>) {
    let mut reader = BufReader::new(stream);
    let mut line = Vec::new();
    loop {
        line.clear();
        match (&mut reader).take(4096).read_until(b'\n', &mut line).await {
            Ok(0) | Err(_) => return,
            Ok(_) => {
                let text = String::from_utf8_lossy(&line);
                let clean: String = text.trim_end().chars().filter(|c| !c.is_control() || *c == '\t').collect();
                lock(&log).push(&clean);
            }
        }
    }
}

async fn read_frames(
    child: usize,
    stream: tokio::net::unix::OwnedReadHalf,
    outbox: std::sync::mpsc::Sender<ChildEvent>,
) {
    let mut reader = BufReader::new(stream);
    while let Some(frame) = read_frame(&mut reader, FRAME_BYTES).await {
        let is_bad = frame.is_err();
        let event = match frame {
            Ok(line) => ChildEvent::Frame { child, line },
            Err(reason) => ChildEvent::BadFrame { child, reason: reason.to_owned() },
        };
        // Who sent something that is no frame may be anywhere inside the next one.
        if outbox.send(event).is_err() || is_bad {
            return;
        }
    }
}

/// The next frame without its line end, or what is wrong with it; `None` at the end of the stream. No
/// more than `limit` bytes are held for it.
pub async fn read_frame(reader: &mut (impl AsyncBufRead + Unpin), limit: u64) -> Option<Result<String, &'static str>> {
    let mut line = Vec::new();
    match reader.take(limit).read_until(b'\n', &mut line).await {
        Ok(0) | Err(_) => None,
        Ok(_) if line.last() != Some(&b'\n') => {
            Some(Err(if line.len() as u64 == limit { "frame too long" } else { "torn frame" }))
        }
        Ok(_) => {
            line.pop();
            Some(String::from_utf8(line).map_err(|_| "frame is not UTF-8"))
        }
    }
}

async fn write_frames(mut stream: tokio::net::unix::OwnedWriteHalf, mut inbox: mpsc::UnboundedReceiver<String>) {
    while let Some(mut line) = inbox.recv().await {
        line.push('\n');
        if stream.write_all(line.as_bytes()).await.is_err() {
            return;
        }
    }
    let _ = stream.shutdown().await;
}

async fn look_after(
    mut children: Vec<tokio::process::Child>,
    leader: Option<u32>,
    mut orders: mpsc::UnboundedReceiver<Order>,
    mut writers: Vec<Option<mpsc::UnboundedSender<String>>>,
    outbox: std::sync::mpsc::Sender<ChildEvent>,
    mut readers: JoinSet<()>,
) {
    let mut waiting: JoinSet<(usize, Option<Exit>)> = JoinSet::new();
    for (index, mut child) in children.drain(..).enumerate() {
        waiting.spawn_local(async move { (index, child.wait().await.ok().map(Exit::from_status)) });
    }
    let signal_all = |signal: Signal| {
        if let Some(leader) = leader {
            // Fails only when the group is already gone, which is what was wanted.
            let _ = killpg(Pid::from_raw(leader as i32), signal);
        }
    };
    loop {
        tokio::select! {
            ended = waiting.join_next() => match ended {
                Some(Ok((child, exit))) => {
                    // Frames that were sent before the end are in the socket buffer; give the
                    // readers a moment, so that they arrive before the news of the end.
                    tokio::time::sleep(READ_OUT).await;
                    let _ = outbox.send(ChildEvent::Exited { child, exit: exit.unwrap_or(Exit::Status(-1)) });
                }
                Some(Err(_)) => {}
                None => break,
            },
            order = orders.recv() => match order {
                Some(Order::Send { child, line }) => {
                    if let Some(Some(writer)) = writers.get(child) {
                        let _ = writer.send(line);
                    }
                }
                Some(Order::CloseAll) => writers.iter_mut().for_each(|writer| *writer = None),
                Some(Order::Terminate) => signal_all(Signal::SIGTERM),
                Some(Order::Kill) | None => signal_all(Signal::SIGKILL),
            },
        }
        if orders.is_closed() && orders.is_empty() {
            signal_all(Signal::SIGKILL);
            // Nobody listens any more; wait for the children, but not for ever.
            let _ = tokio::time::timeout(KILL_WAIT, async { while waiting.join_next().await.is_some() {} }).await;
            break;
        }
    }
    // Grandchildren may keep the pipes open; what they print is nobody's business.
    readers.abort_all();
}
