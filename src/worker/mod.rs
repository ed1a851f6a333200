//! The child side of a launch: one process per GPU, started as `nccltune __worker`.
//!
//! It carries out the parent's orders and ends when told to, when the parent's end of the socket
//! closes, or when the parent process dies, whichever comes first.

mod connection;
mod control_file;
mod data_check;
mod gpu_state;
mod measure;
mod overlap;
mod pass;
pub mod protocol;
mod set_environment;
mod warm_up;

use std::cell::RefCell;
use std::io::{Read, Seek, SeekFrom};
use std::mem::ManuallyDrop;
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::time::Duration;

use connection::Connection;
use control_file::ControlFile;
use data_check::{MOST_RANKS, Pattern};
use gpu_state::GpuWatch;
use measure::{Buffers, Cell, StepError};
use overlap::Overlap;
use pass::{Pass, Stage};
use protocol::{Answer, FailureKind, Order, PROTOCOL, RankGroup, WorkPhase, from_hex, to_hex};

use crate::bindings::cublaslt::CublasLt;
use crate::bindings::cuda::{DRIVER_LIBRARY, Device, DeviceBuffer, driver_is_present, pci_bus_id};
use crate::bindings::nccl::{Communicator, Nccl};
use crate::clock::wall_time_us;
use crate::dynlib::is_stand_in;
use crate::record::{BufferKind, PassStep, PassStream};

/// Bytes of NCCL's log sent with one answer; of a longer delta, the middle is skipped.
const LOG_BYTES: u64 = 512 * 1024;

/// Runs a worker until it is told to finish, on a stand-in for driver and NCCL only if it may. Returns
/// the exit status.
pub fn run(allows_fakes: bool) -> u8 {
    // The parent is a thread of a process that may be killed at any moment; a worker that outlives
    // it would hold a GPU. The kernel sends SIGKILL, and a parent that died before this call is
    // noticed by the closed socket.
    let _ = nix::sys::prctl::set_pdeathsig(nix::sys::signal::Signal::SIGKILL);
    let Ok(mut connection) = Connection::open() else { return 2 };
    match serve(&mut connection, allows_fakes) {
        Ok(()) => 0,
        Err(answer) => {
            let _ = connection.answer(&answer);
            1
        }
    }
}

/// The answer to a failure, with the time at which it was noticed and what NCCL logged about it.
fn failed(log: &mut LogReader, error: StepError) -> Answer {
    let at_us = wall_time_us();
    Answer::Failed { at_us, failure: error.failure, detail: error.detail, log: log.delta() }
}

fn failure(failure: FailureKind, detail: impl Into<String>) -> Answer {
    Answer::Failed { at_us: wall_time_us(), failure, detail: detail.into(), log: String::new() }
}

fn protocol_error(detail: impl Into<String>) -> Answer {
    failure(FailureKind::Protocol, detail)
}

/// Tells the parent what begins. A parent that is gone ends this process by itself.
fn tell(connection: &mut Connection, phase: WorkPhase) {
    let _ = connection.answer(&Answer::Progress { phase });
}

fn next(connection: &Connection) -> Result<Order, Answer> {
    connection.next().map_err(|error| protocol_error(format!("unreadable order: {error}")))
}

fn send(connection: &mut Connection, answer: &Answer) -> Result<(), Answer> {
    connection.answer(answer).map_err(|error| protocol_error(format!("could not answer: {error}")))
}

/// Kept in [`ManuallyDrop`]: giving memory and contexts back can block behind a GPU that hangs, and
/// the cause of a failure must leave this process before that. The end of the process frees them.
struct Setup {
    rank: u32,
    ranks: u32,
    device: Device,
    nccl: Nccl,
    buffers: RefCell<Buffers>,
    data_seed: u64,
    watch: GpuWatch,
    control: Option<ControlFile>,
}

impl Setup {
    /// This process's place in a communicator, whose data the buffers hold from here on.
    fn join(&self, group: Option<RankGroup>) -> Result<(u32, u32), Answer> {
        let group = group.unwrap_or(RankGroup { number: 0, rank: self.rank, ranks: self.ranks });
        if group.rank >= group.ranks || group.ranks > self.ranks {
            return Err(protocol_error(format!("no place for this rank in {group:?}")));
        }
        let mut buffers = self.buffers.borrow_mut();
        if buffers.group() != (group.rank, group.ranks) {
            let seed = self.data_seed.wrapping_add(u64::from(group.number) << 32);
            buffers.take(Pattern::new(seed, group.rank, group.ranks));
        }
        Ok((group.rank, group.ranks))
    }
}

fn serve(connection: &mut Connection, allows_fakes: bool) -> Result<(), Answer> {
    let (setup, mut log) = match next(connection)? {
        hello @ Order::Hello { .. } => open(connection, hello, allows_fakes)?,
        other => return Err(protocol_error(format!("expected hello, got {other:?}"))),
    };
    let setup = ManuallyDrop::new(setup);
    loop {
        match next(connection)? {
            Order::UniqueId => {
                // NCCL looks at every network first.
                tell(connection, WorkPhase::Init);
                let id = setup.nccl.unique_id().map_err(|error| failed(&mut log, error.into()))?;
                send(connection, &Answer::UniqueId { unique_id: to_hex(&id) })?;
            }
            Order::SetVariables { variables } => {
                set_environment::apply(&variables);
                send(connection, &Answer::VariablesSet)?;
            }
            Order::WarmUp { milliseconds } => {
                tell(connection, WorkPhase::Replay);
                let time = Duration::from_millis(u64::from(milliseconds.min(10_000)));
                warm_up::warm_up(&setup.device, time).map_err(|error| failed(&mut log, error))?;
                send(connection, &Answer::WarmedUp)?;
            }
            Order::OpenCommunicator { unique_id, group, channels_min } => {
                let id = from_hex(&unique_id).ok_or_else(|| protocol_error("malformed rendezvous id"))?;
                let (rank, ranks) = setup.join(group)?;
                let before = MemoryNow::of(&setup.device);
                tell(connection, WorkPhase::Init);
                let joined = match channels_min {
                    Some(channels) => setup.nccl.join_with_channels(ranks, &id, rank, channels),
                    None => setup.nccl.join(ranks, &id, rank),
                };
                let communicator = joined.map_err(|error| failed(&mut log, error.into()))?;
                send(connection, &Answer::Opened { log: log.delta() })?;
                serve_communicator(connection, &setup, &communicator, &mut log)?;
                let now = MemoryNow::of(&setup.device);
                communicator.destroy().map_err(|error| failed(&mut log, error.into()))?;
                let taken = |before: Option<u64>, now: Option<u64>| Some(now?.saturating_sub(before?));
                send(
                    connection,
                    &Answer::Closed {
                        device_bytes: taken(now.device_free, before.device_free),
                        shared_bytes: taken(before.shared, now.shared),
                    },
                )?;
            }
            Order::Finish => {
                send(connection, &Answer::Finished)?;
                return Ok(());
            }
            other => return Err(protocol_error(format!("no communicator is open for {other:?}"))),
        }
    }
}

fn open(connection: &mut Connection, hello: Order, allows_fakes: bool) -> Result<(Setup, LogReader), Answer> {
    let Order::Hello {
        protocol,
        rank,
        ranks,
        device,
        nccl_path,
        log_path,
        data_seed,
        largest_bytes,
        buffers: kind,
        control_path,
    } = hello
    else {
        return Err(protocol_error("expected hello"));
    };
    if protocol != PROTOCOL {
        return Err(protocol_error(format!("protocol {protocol}, this worker speaks {PROTOCOL}")));
    }
    if ranks > MOST_RANKS || rank >= ranks {
        return Err(failure(
            FailureKind::Unsupported,
            format!("rank {rank} of {ranks}: the data check is exact for at most {MOST_RANKS} ranks"),
        ));
    }
    let mut log = LogReader::new(PathBuf::from(log_path));
    // Before there is a communicator whose plugin would look for it.
    let control = control_path
        .map(|path| ControlFile::create(Path::new(&path)))
        .transpose()
        .map_err(|error| failure(FailureKind::Unsupported, format!("no control file for the plugin: {error}")))?;
    // Before the first library is opened: from a cold disk that alone takes seconds.
    tell(connection, WorkPhase::Context);
    if !driver_is_present() {
        return Err(failure(FailureKind::Cuda, "no CUDA driver library (libcuda.so.1) can be loaded"));
    }
    if !allows_fakes && [DRIVER_LIBRARY, &nccl_path].iter().any(|path| is_stand_in(Path::new(path))) {
        return Err(failure(
            FailureKind::Unsupported,
            "the driver or NCCL is a stand-in for tests; only NCCLTUNE_ALLOW_FAKE=1 lets workers use it",
        ));
    }
    let nccl = Nccl::load(Path::new(&nccl_path)).map_err(|error| failure(FailureKind::Nccl, error.to_string()))?;
    let nccl_version = nccl.version().map_err(|error| failed(&mut log, error.into()))?;
    let open_device = || -> Result<(Device, Buffers, String), StepError> {
        let opened = Device::open(device)?;
        let pattern = Pattern::new(data_seed, rank, ranks);
        // A launch that times only forward passes has no message; the driver refuses empty memory.
        let bytes = (largest_bytes as usize).max(4);
        let allocate = || -> Result<DeviceBuffer, StepError> {
            Ok(match kind {
                BufferKind::Plain => opened.allocate(bytes)?,
                BufferKind::Vmm => opened.allocate_segments(bytes)?,
                BufferKind::Nccl => nccl.allocate(&opened, bytes)?,
            })
        };
        let buffers = Buffers::new(&opened, allocate()?, allocate()?, pattern)?;
        Ok((opened, buffers, pci_bus_id(device)?))
    };
    let (device, buffers, address) = open_device().map_err(|error| failed(&mut log, error))?;
    let watch = GpuWatch::new(&address);
    let device_name = device.name().map_err(|error| failed(&mut log, error.into()))?;
    send(connection, &Answer::Ready { protocol: PROTOCOL, nccl_version, device_name, pci_bus_id: address })?;
    Ok((Setup { rank, ranks, device, nccl, buffers: RefCell::new(buffers), data_seed, watch, control }, log))
}

/// What a communicator's orders leave behind: graphs, plans, buffers.
#[derive(Default)]
struct Prepared {
    cell: Option<Cell>,
    pass: Option<Pass>,
    stage: Option<Stage>,
    overlap: Option<Overlap>,
    cublaslt: Option<Rc<CublasLt>>,
}

impl Prepared {
    /// Drops a pass with its graphs and plans.
    fn forget_pass(&mut self) {
        if let (Some(pass), Some(stage)) = (self.pass.take(), &self.stage) {
            pass.forget(stage);
        }
    }

    /// Makes a pass ready; returns the microseconds of one run.
    #[expect(clippy::too_many_arguments, reason = "an order's fields, passed on as they are")]
    fn prepare_pass(
        &mut self,
        setup: &Setup,
        communicator: &Communicator<'_>,
        steps: Vec<PassStep>,
        stream: PassStream,
        captured: bool,
        cublaslt_path: &str,
        tell: &mut dyn FnMut(WorkPhase),
    ) -> Result<f64, StepError> {
        self.forget_pass();
        tell(WorkPhase::Plan);
        let cublaslt = match &self.cublaslt {
            Some(cublaslt) => Rc::clone(cublaslt),
            None => Rc::clone(self.cublaslt.insert(Rc::new(load_cublaslt(cublaslt_path)?))),
        };
        if self.stage.as_ref().is_some_and(|stage| !stage.fits(&steps)) {
            // Give the old buffers back before asking for larger ones.
            self.stage = None;
        }
        let stage = match &mut self.stage {
            Some(stage) => stage,
            none => none.insert(Stage::new(&setup.device, cublaslt, &steps)?),
        };
        let (pass, replay_us) = Pass::prepare(&setup.device, communicator, stage, steps, stream, captured, tell)?;
        self.pass = Some(pass);
        Ok(replay_us)
    }
}

/// Serves one communicator until it is to be closed. The captured graph is dropped before this
/// returns, because NCCL waits without end for graphs when a communicator is destroyed.
fn serve_communicator(
    connection: &mut Connection,
    setup: &Setup,
    communicator: &Communicator<'_>,
    log: &mut LogReader,
) -> Result<(), Answer> {
    // Given back on the good path only; see `Setup`.
    let mut prepared = ManuallyDrop::new(Prepared::default());
    loop {
        match next(connection)? {
            Order::PreparePass { steps, stream, captured, cublaslt_path } => {
                let replay_us = prepared
                    .prepare_pass(setup, communicator, steps, stream, captured, &cublaslt_path, &mut |phase| {
                        tell(connection, phase);
                    })
                    .map_err(|error| failed(log, error))?;
                let (arena_bytes, cublaslt_version) =
                    prepared.stage.as_ref().map_or((0, 0), |stage| (stage.arena_bytes(), stage.cublaslt_version()));
                let log = log.delta();
                send(connection, &Answer::PassPrepared { replay_us, arena_bytes, cublaslt_version, log })?;
            }
            Order::ReplayPass { variant, replays } => {
                let (Some(pass), Some(stage)) = (&prepared.pass, &prepared.stage) else {
                    return Err(protocol_error("no pass is prepared"));
                };
                let mut state = None;
                tell(connection, WorkPhase::Replay);
                let replays_us = pass
                    .replays(&setup.device, communicator, stage, variant, replays.clamp(1, 10_000), || {
                        state = setup.watch.sample();
                    })
                    .map_err(|error| failed(log, error))?;
                send(connection, &Answer::PassReplayed { replays_us, state })?;
            }
            Order::Choose { choice } => {
                let control = setup.control.as_ref().ok_or_else(|| protocol_error("there is no control file"))?;
                // A graph that was captured before keeps its choice; nothing may be enqueued by halves.
                prepared.cell = None;
                control.choose(choice);
                send(connection, &Answer::Chosen)?;
            }
            Order::ReadControl => {
                let control = setup.control.as_ref().ok_or_else(|| protocol_error("there is no control file"))?;
                send(connection, &control.told())?;
            }
            Order::Prepare { point, collectives } => {
                prepared.cell = None;
                let mut telling = |phase| tell(connection, phase);
                let buffers = &mut setup.buffers.borrow_mut();
                let (cell, replay_us) =
                    Cell::prepare(&setup.device, communicator, buffers, point, collectives, &mut telling)
                        .map_err(|error| failed(log, error))?;
                prepared.cell = Some(cell);
                send(connection, &Answer::Prepared { replay_us, log: log.delta() })?;
            }
            Order::Check { point, collectives, repeats } => {
                prepared.cell = None;
                let mut telling = |phase| tell(connection, phase);
                let (buffers, often) = (&mut setup.buffers.borrow_mut(), (collectives, repeats.clamp(1, 10_000)));
                Cell::check(&setup.device, communicator, buffers, point, often, &mut telling)
                    .map_err(|error| failed(log, error))?;
                send(connection, &Answer::Checked { log: log.delta() })?;
            }
            Order::Replay { replays } => {
                let cell = prepared.cell.as_ref().ok_or_else(|| protocol_error("nothing is prepared"))?;
                let replays_us = cell
                    .replays(
                        &setup.device,
                        communicator,
                        &setup.buffers.borrow(),
                        replays.clamp(1, 10_000),
                        &mut |phase| {
                            tell(connection, phase);
                        },
                    )
                    .map_err(|error| failed(log, error))?;
                send(connection, &Answer::Replayed { replays_us })?;
            }
            Order::PrepareOverlap { bytes, collectives, seed } => {
                let who = (setup.rank, setup.ranks);
                let mut telling = |phase| tell(connection, phase);
                let overlap =
                    Overlap::prepare(&setup.device, communicator, who, (bytes, collectives), seed, &mut telling)
                        .map_err(|error| failed(log, error))?;
                prepared.overlap = Some(overlap);
                send(connection, &Answer::OverlapPrepared { log: log.delta() })?;
            }
            Order::Overlap { first_round, rounds } => {
                let overlap = prepared.overlap.as_ref().ok_or_else(|| protocol_error("no overlap is prepared"))?;
                let mut telling = |phase| tell(connection, phase);
                overlap
                    .rounds(&setup.device, communicator, first_round, rounds.clamp(1, 10_000), &mut telling)
                    .map_err(|error| failed(log, error))?;
                send(connection, &Answer::Overlapped)?;
            }
            Order::CloseCommunicator => {
                tell(connection, WorkPhase::Destroy);
                prepared.forget_pass();
                drop(ManuallyDrop::into_inner(prepared));
                return Ok(());
            }
            other => return Err(protocol_error(format!("a communicator is open: {other:?}"))),
        }
    }
}

fn load_cublaslt(path: &str) -> Result<CublasLt, StepError> {
    let failed = |detail: String| StepError { failure: FailureKind::CublasLt, detail };
    CublasLt::load(Path::new(path)).map_err(|error| failed(error.to_string()))?.map_err(StepError::from)
}

/// What memory this process sees.
struct MemoryNow {
    device_free: Option<u64>,
    shared: Option<u64>,
}

impl MemoryNow {
    fn of(device: &Device) -> Self {
        let status = fs_err::read_to_string("/proc/self/status").unwrap_or_default();
        let shared = status.lines().find_map(|line| {
            let kib: u64 = line.strip_prefix("RssShmem:")?.trim().strip_suffix("kB")?.trim().parse().ok()?;
            Some(kib << 10)
        });
        Self { device_free: device.free_bytes().ok().map(|bytes| bytes as u64), shared }
    }
}

/// Reads what NCCL appended to its log file since the last time.
struct LogReader {
    path: PathBuf,
    position: u64,
}

impl LogReader {
    const fn new(path: PathBuf) -> Self {
        Self { path, position: 0 }
    }

    /// What is new, bounded; an unreadable log reads as empty, and the parent then finds no line
    /// that proves a setting, which it reports as such.
    fn delta(&mut self) -> String {
        let read = |from: u64, bytes: u64| -> std::io::Result<Vec<u8>> {
            let mut file = fs_err::File::open(&self.path)?;
            file.seek(SeekFrom::Start(from))?;
            let mut read = Vec::new();
            file.take(bytes).read_to_end(&mut read)?;
            Ok(read)
        };
        let Ok(end) = fs_err::metadata(&self.path).map(|metadata| metadata.len()) else { return String::new() };
        let start = self.position.min(end);
        let bytes = if end - start <= LOG_BYTES {
            read(start, end - start)
        } else {
            // A flood: what was set stands at its beginning, what ran at its end.
            read(start, LOG_BYTES / 2).and_then(|mut head| {
                head.extend(b"\n");
                head.extend(read(end - LOG_BYTES / 2, LOG_BYTES / 2)?);
                Ok(head)
            })
        };
        self.position = end;
        String::from_utf8_lossy(&bytes.unwrap_or_default()).into_owned()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_log_is_read_piece_by_piece_and_a_missing_one_is_empty() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("nccl.log");
        let mut log = LogReader::new(path.clone());
        assert_eq!(log.delta(), "");
        fs_err::write(&path, "one\n").unwrap();
        assert_eq!(log.delta(), "one\n");
        fs_err::write(&path, "one\ntwo\n").unwrap();
        assert_eq!(log.delta(), "two\n");
        assert_eq!(log.delta(), "");
        fs_err::write(&path, format!("one\ntwo\nfirst\n{}last\n", "flood\n".repeat(200_000))).unwrap();
        let flood = log.delta();
        assert!(flood.starts_with("first\n") && flood.ends_with("flood\nlast\n"));
        assert!(flood.len() as u64 <= LOG_BYTES + 1);
        assert_eq!(log.delta(), "");
    }
}
