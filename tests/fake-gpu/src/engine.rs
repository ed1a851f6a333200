//! The GPU of this process: streams, events, captures, graphs, and the work they hold.
//!
//! Nothing runs while it is enqueued. Whoever waits makes everything run that was enqueued by then,
//! in three steps: the ranks tell each other their steps and work out all clocks (`timeline`);
//! data that are overwritten before anybody could read them are left alone; what is left is copied and
//! added up for real. A chain of sums over one buffer is one exchange, since only the first of them
//! adds up different numbers.

use std::collections::{BTreeMap, HashMap, HashSet, VecDeque};
use std::sync::{Arc, LazyLock, Mutex, MutexGuard, PoisonError};

use crate::chance;
use crate::choice::Choice;
use crate::communicator::{Communicator, Nccl};
use crate::cost;
use crate::faults::{self, Faults, Hold, Moment, scenario};
use crate::function::Function;
use crate::memory::Memory;
use crate::numbers::{self, Shape};
use crate::scenario::{Kind, Phase};
use crate::status::cuda;
use crate::timeline::{Discord, Outcome, Packet, Step, play};

/// What can be enqueued.
#[derive(Debug, Clone)]
pub(crate) enum Work {
    Busy(f64),
    Copy {
        to: u64,
        from: u64,
        bytes: usize,
    },
    Fill {
        to: u64,
        value: u8,
        bytes: usize,
    },
    /// What the host held when it was enqueued.
    Write {
        to: u64,
        bytes: Arc<[u8]>,
    },
    Record(u64),
    Wait(u64),
    Reduce(Reduction),
}

/// A collective.
#[derive(Debug, Clone)]
pub(crate) struct Reduction {
    pub(crate) communicator: usize,
    pub(crate) shape: Shape,
    pub(crate) send: u64,
    pub(crate) send_bytes: usize,
    pub(crate) receive: u64,
    pub(crate) receive_bytes: usize,
    /// The larger of both.
    pub(crate) bytes: usize,
    pub(crate) ns: f64,
    pub(crate) choice: Choice,
    /// Where ranks chose differently, data go wrong instead of everything hanging.
    pub(crate) lenient: bool,
    pub(crate) is_captured: bool,
}

impl Reduction {
    fn moment(&self, phase: Phase) -> Moment<'static> {
        Moment {
            phase: Some(phase),
            bytes: Some(self.bytes as u64),
            protocol: Some(self.choice.protocol),
            function: Some(self.shape.function),
            ..Moment::default()
        }
    }

    /// What must be the same on all ranks.
    fn what(&self) -> u32 {
        let choice = self.choice;
        chance::mix(&[
            choice.algorithm as u64,
            choice.protocol as u64,
            u64::from(choice.channels),
            u64::from(choice.threads),
            self.bytes as u64,
            self.shape.function as u64,
            self.shape.number as u64,
            self.shape.root as u64,
            self.shape.shift as u64,
        ]) as u32
    }

    /// Whether the same again, right after it, is one more link of a chain: it sums a buffer over itself, or
    /// writes what stands there already.
    fn chains_with(&self, next: &Self) -> bool {
        let is_in_place = match self.shape.function {
            Function::AllReduce | Function::Broadcast => self.send == self.receive,
            Function::AllGather => (self.receive..self.receive + self.receive_bytes as u64).contains(&self.send),
            Function::Reduce | Function::ReduceScatter | Function::SendRecv => false,
        };
        is_in_place
            && self.shape == next.shape
            && (self.send, self.receive, self.bytes) == (next.send, next.receive, next.bytes)
    }
}

#[derive(Debug, Clone)]
struct Op {
    stream: usize,
    /// Graph launches and eager operations are numbered, and times scatter from one to the next.
    serial: u64,
    work: Work,
}

#[derive(Default)]
struct Stream {
    clock: f64,
    capture: Option<usize>,
}

#[derive(Default)]
struct Event {
    has_timing: bool,
    mark: Option<u64>,
    captured: Option<Captured>,
}

/// An event that was recorded inside a capture.
#[derive(Clone)]
struct Captured {
    capture: usize,
    mark: u64,
    /// How far each stream of the capture had come, as far as this event knows.
    seen: BTreeMap<usize, u64>,
}

struct Capture {
    origin: usize,
    /// What each stream of the capture has seen of the others.
    seen: BTreeMap<usize, BTreeMap<usize, u64>>,
    ops: Vec<Op>,
    marks: u64,
    is_broken: bool,
}

/// A captured graph, or an executable one.
#[derive(Clone)]
pub(crate) struct Graph {
    origin: usize,
    ops: Arc<Vec<Op>>,
    marks: u64,
    communicators: Vec<usize>,
}

/// The whole of it.
#[derive(Default)]
pub(crate) struct Engine {
    pub(crate) memory: Memory,
    pub(crate) faults: Faults,
    pub(crate) nccl: Nccl,
    pub(crate) communicators: BTreeMap<usize, Communicator>,
    streams: BTreeMap<usize, Stream>,
    events: BTreeMap<usize, Event>,
    captures: BTreeMap<usize, Capture>,
    graphs: BTreeMap<usize, Graph>,
    /// Times of marks, as far as they are known and an event may still ask for them.
    times: HashMap<u64, f64>,
    pending: Vec<Op>,
    batch: Option<Batch>,
    handles: usize,
    marks: u64,
    serials: u64,
    /// Bytes that came from the host: what wakes a link.
    pub(crate) host_bytes: u64,
}

/// What the engine says to a caller who waits.
pub(crate) enum Progress {
    /// Everything that was enqueued is done.
    Done,
    /// Other ranks must do something; listen to this board, whose bell stood so.
    Peers(&'static crate::exchange::Board, u32),
    /// Nothing will happen before this, or ever.
    Held(Hold),
}

/// A batch under way.
struct Batch {
    held: Option<Hold>,
    communicator: Option<usize>,
    packet: Packet,
    /// Marks of the batch, in the order of their numbers in it.
    marks: Vec<u64>,
    /// Streams, likewise.
    streams: Vec<usize>,
    data: VecDeque<Data>,
    is_timed: bool,
    spoils: bool,
    is_asking: bool,
}

/// Something that must really be done to data.
#[derive(Debug, Clone)]
enum Data {
    Copy { to: u64, from: u64, bytes: usize },
    Fill { to: u64, value: u8, bytes: usize },
    Write { to: u64, bytes: Arc<[u8]> },
    Reduce { reduction: Reduction, position: usize, chained: usize },
}

static ENGINE: LazyLock<Mutex<Engine>> = LazyLock::new(Mutex::default);

/// The engine, for one call.
pub(crate) fn engine() -> MutexGuard<'static, Engine> {
    // A panic ends the process at the border to C, so nothing is ever seen half done.
    ENGINE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The engine, unless a call is inside it.
pub(crate) fn try_engine() -> Option<MutexGuard<'static, Engine>> {
    ENGINE.try_lock().ok()
}

/// Waits until everything is done that was enqueued.
pub(crate) fn finish() -> Result<(), i32> {
    loop {
        // The lock must not be held while waiting: another thread may want to abort.
        let progress = engine().advance()?;
        match progress {
            Progress::Done => return Ok(()),
            Progress::Peers(board, rung) => board.listen(rung),
            Progress::Held(hold) => hold.wait(),
        }
    }
}

impl Engine {
    /// A number that was never a handle before. Null and the special streams are below.
    pub(crate) fn handle(&mut self) -> usize {
        self.handles += 1;
        0x1000 + self.handles * 0x10
    }

    /// Tells other processes how much of the GPU's memory this one uses.
    pub(crate) fn note_used(&self, gpu: u32) {
        let buffers: u64 = self.communicators.values().map(|communicator| communicator.memory).sum();
        crate::gpu::note_used(gpu, self.memory.used + buffers);
    }

    // --- Streams and events.

    pub(crate) fn create_stream(&mut self) -> usize {
        let handle = self.handle();
        self.streams.insert(handle, Stream::default());
        handle
    }

    pub(crate) fn destroy_stream(&mut self, stream: usize) -> Result<(), i32> {
        if self.stream(stream)?.capture.is_some() {
            return Err(cuda::STREAM_CAPTURE_UNSUPPORTED);
        }
        // Its work goes on; the clock is forgotten with the last of it.
        Ok(())
    }

    /// A stream; the default streams exist without being made.
    fn stream(&mut self, stream: usize) -> Result<&mut Stream, i32> {
        if stream <= 2 {
            return Ok(self.streams.entry(0).or_default());
        }
        self.streams.get_mut(&stream).ok_or(cuda::INVALID_HANDLE)
    }

    pub(crate) fn capture_of(&mut self, stream: usize) -> Result<Option<usize>, i32> {
        Ok(self.stream(stream)?.capture)
    }

    pub(crate) fn create_event(&mut self, has_timing: bool) -> usize {
        let handle = self.handle();
        self.events.insert(handle, Event { has_timing, ..Event::default() });
        handle
    }

    pub(crate) fn destroy_event(&mut self, event: usize) -> Result<(), i32> {
        self.events.remove(&event).map(|_| ()).ok_or(cuda::INVALID_HANDLE)
    }

    pub(crate) fn record(&mut self, event: usize, stream: usize) -> Result<(), i32> {
        if !self.events.contains_key(&event) {
            return Err(cuda::INVALID_HANDLE);
        }
        if let Some(number) = self.capture_of(stream)? {
            let mark = self.capture(number)?.next_mark();
            self.enqueue(stream, Work::Record(mark))?;
            let seen = self.capture(number)?.seen.get(&stream).cloned().unwrap_or_default();
            if let Some(event) = self.events.get_mut(&event) {
                event.mark = None;
                event.captured = Some(Captured { capture: number, mark, seen });
            }
        } else {
            self.marks += 1;
            let mark = self.marks;
            self.enqueue(stream, Work::Record(mark))?;
            if let Some(event) = self.events.get_mut(&event) {
                event.mark = Some(mark);
                event.captured = None;
            }
        }
        Ok(())
    }

    pub(crate) fn wait(&mut self, stream: usize, event: usize) -> Result<(), i32> {
        let event = self.events.get(&event).ok_or(cuda::INVALID_HANDLE)?;
        let (mark, captured) = (event.mark, event.captured.clone());
        let capture = self.capture_of(stream)?;
        match (captured, capture) {
            (Some(captured), None) => {
                // The stream joins the capture that the event belongs to.
                self.capture(captured.capture)?;
                self.stream(stream)?.capture = Some(captured.capture);
                self.wait_inside(stream, &captured)
            }
            (Some(captured), Some(capture)) if captured.capture == capture => self.wait_inside(stream, &captured),
            (Some(_), Some(capture)) => {
                self.capture(capture)?.is_broken = true;
                Err(cuda::STREAM_CAPTURE_MERGE)
            }
            (None, Some(capture)) if mark.is_some() => {
                self.capture(capture)?.is_broken = true;
                Err(cuda::STREAM_CAPTURE_ISOLATION)
            }
            (None, _) => match mark {
                Some(mark) => self.enqueue(stream, Work::Wait(mark)),
                // An event that was never recorded holds nothing up.
                None => Ok(()),
            },
        }
    }

    fn wait_inside(&mut self, stream: usize, captured: &Captured) -> Result<(), i32> {
        let seen = self.capture(captured.capture)?.seen.entry(stream).or_default();
        for (other, position) in &captured.seen {
            let known = seen.entry(*other).or_default();
            *known = (*known).max(*position);
        }
        self.enqueue(stream, Work::Wait(captured.mark))
    }

    /// Whether an event is there that can be waited for.
    pub(crate) fn event_is_captured(&self, event: usize) -> Result<bool, i32> {
        self.events.get(&event).map(|event| event.captured.is_some()).ok_or(cuda::INVALID_HANDLE)
    }

    /// Milliseconds between two events that have happened.
    pub(crate) fn elapsed_ms(&self, start: usize, end: usize) -> Result<f32, i32> {
        let time = |event: usize| -> Result<f64, i32> {
            let event = self.events.get(&event).ok_or(cuda::INVALID_HANDLE)?;
            let mark = event.mark.filter(|_| event.has_timing).ok_or(cuda::INVALID_HANDLE)?;
            self.times.get(&mark).copied().ok_or(cuda::NOT_READY)
        };
        Ok(((time(end)? - time(start)?) / 1e6) as f32)
    }

    // --- Captures and graphs.

    fn capture(&mut self, number: usize) -> Result<&mut Capture, i32> {
        self.captures.get_mut(&number).ok_or(cuda::STREAM_CAPTURE_INVALIDATED)
    }

    pub(crate) fn begin_capture(&mut self, stream: usize) -> Result<(), i32> {
        if stream <= 2 || self.stream(stream)?.capture.is_some() {
            return Err(cuda::STREAM_CAPTURE_UNSUPPORTED);
        }
        let number = self.handle();
        let seen = BTreeMap::from([(stream, BTreeMap::new())]);
        let capture = Capture { origin: stream, seen, ops: Vec::new(), marks: 0, is_broken: false };
        self.captures.insert(number, capture);
        self.stream(stream)?.capture = Some(number);
        Ok(())
    }

    pub(crate) fn end_capture(&mut self, stream: usize) -> Result<usize, i32> {
        let number = self.capture_of(stream)?.ok_or(cuda::ILLEGAL_STATE)?;
        if self.capture(number)?.origin != stream {
            return Err(cuda::STREAM_CAPTURE_UNMATCHED);
        }
        let capture = self.captures.remove(&number).ok_or(cuda::ILLEGAL_STATE)?;
        for stream in self.streams.values_mut().filter(|stream| stream.capture == Some(number)) {
            stream.capture = None;
        }
        if capture.is_broken {
            return Err(cuda::STREAM_CAPTURE_INVALIDATED);
        }
        let known = &capture.seen[&stream];
        let is_joined =
            |(other, seen): (&usize, &BTreeMap<usize, u64>)| known.get(other) >= seen.get(other) || *other == stream;
        if !capture.seen.iter().all(is_joined) {
            return Err(cuda::STREAM_CAPTURE_UNJOINED);
        }
        let mut communicators: Vec<usize> = capture
            .ops
            .iter()
            .filter_map(|op| match &op.work {
                Work::Reduce(reduction) => Some(reduction.communicator),
                _ => None,
            })
            .collect();
        communicators.sort_unstable();
        communicators.dedup();
        let graph = Graph { origin: stream, ops: Arc::new(capture.ops), marks: capture.marks, communicators };
        Ok(self.keep_graph(graph))
    }

    /// Communicators wait for the graphs that hold their operations.
    fn keep_graph(&mut self, graph: Graph) -> usize {
        for number in &graph.communicators {
            if let Some(communicator) = self.communicators.get_mut(number) {
                communicator.graphs += 1;
            }
        }
        let handle = self.handle();
        self.graphs.insert(handle, graph);
        handle
    }

    pub(crate) fn instantiate(&mut self, graph: usize) -> Result<usize, i32> {
        let graph = self.graphs.get(&graph).cloned().ok_or(cuda::INVALID_HANDLE)?;
        Ok(self.keep_graph(graph))
    }

    pub(crate) fn destroy_graph(&mut self, graph: usize) -> Result<(), i32> {
        let graph = self.graphs.remove(&graph).ok_or(cuda::INVALID_HANDLE)?;
        for number in graph.communicators {
            if let Some(communicator) = self.communicators.get_mut(&number) {
                communicator.graphs -= 1;
            }
        }
        Ok(())
    }

    pub(crate) fn graph_nodes(&self, graph: usize) -> Result<usize, i32> {
        self.graphs.get(&graph).map(|graph| graph.ops.len()).ok_or(cuda::INVALID_HANDLE)
    }

    pub(crate) fn launch(&mut self, executable: usize, stream: usize) -> Result<(), i32> {
        let graph = self.graphs.get(&executable).cloned().ok_or(cuda::INVALID_HANDLE)?;
        if self.capture_of(stream)?.is_some() {
            // A graph inside a graph is not modelled.
            return Err(cuda::NOT_SUPPORTED);
        }
        let first_mark = self.marks + 1;
        self.marks += graph.marks;
        self.serials += 1;
        let serial = self.serials;
        // Streams that were forked inside the graph are its own.
        let place = |of: usize| if of == graph.origin { stream } else { executable + (of << 32) };
        self.pending.push(Op { stream, serial, work: Work::Busy(cost::GRAPH_NS) });
        for op in graph.ops.iter() {
            let work = match &op.work {
                Work::Record(mark) => Work::Record(first_mark + mark),
                Work::Wait(mark) => Work::Wait(first_mark + mark),
                work => work.clone(),
            };
            self.pending.push(Op { stream: place(op.stream), serial, work });
        }
        Ok(())
    }

    /// A call that no thread may make while it captures: it ends the capture.
    pub(crate) fn forbid_in_capture(&mut self) -> Result<(), i32> {
        for capture in self.captures.values_mut() {
            capture.is_broken = true;
        }
        if self.captures.is_empty() { Ok(()) } else { Err(cuda::STREAM_CAPTURE_UNSUPPORTED) }
    }

    // --- Work.

    pub(crate) fn enqueue(&mut self, stream: usize, work: Work) -> Result<(), i32> {
        if let Some(number) = self.capture_of(stream)? {
            let capture = self.capture(number)?;
            let position = capture.ops.len() as u64 + 1;
            capture.seen.entry(stream).or_default().insert(stream, position);
            capture.ops.push(Op { stream, serial: 0, work });
        } else {
            self.serials += 1;
            let stream = if stream <= 2 { 0 } else { stream };
            self.pending.push(Op { stream, serial: self.serials, work });
        }
        Ok(())
    }

    /// Forgets everything that was enqueued, as when a communicator is aborted.
    pub(crate) fn abandon(&mut self) {
        self.pending.clear();
        self.batch = None;
    }

    /// Does what can be done without waiting.
    pub(crate) fn advance(&mut self) -> Result<Progress, i32> {
        if self.batch.is_none() {
            if self.pending.is_empty() {
                return Ok(Progress::Done);
            }
            self.batch = Some(self.begin()?);
        }
        let Some(mut batch) = self.batch.take() else { return Ok(Progress::Done) };
        // An error ends the batch; what it held is not done.
        let progress = self.drive(&mut batch)?;
        if !matches!(progress, Progress::Done) {
            self.batch = Some(batch);
        }
        Ok(progress)
    }

    /// Makes a batch of everything that is pending.
    fn begin(&mut self) -> Result<Batch, i32> {
        let ops = std::mem::take(&mut self.pending);
        let (held, spoils) = self.strike(&ops);
        let mut streams: Vec<usize> = Vec::new();
        let mut marks: Vec<u64> = Vec::new();
        let mut mark_numbers: HashMap<u64, u32> = HashMap::new();
        let mut communicator = None;
        let mut packet = Packet::default();
        for op in &ops {
            let known = streams.iter().position(|known| *known == op.stream);
            let stream = known.unwrap_or_else(|| {
                streams.push(op.stream);
                packet.clocks.push(self.streams.get(&op.stream).map_or(0.0, |stream| stream.clock));
                streams.len() - 1
            }) as u32;
            packet.steps.push(match &op.work {
                Work::Busy(ns) => Step::Busy { stream, ns: *ns },
                Work::Copy { bytes, .. } => Step::Busy { stream, ns: cost::copy_ns(*bytes) },
                Work::Fill { bytes, .. } => Step::Busy { stream, ns: cost::copy_ns(*bytes / 2) },
                Work::Write { bytes, .. } => Step::Busy { stream, ns: cost::host_copy_ns(bytes.len()) },
                Work::Record(mark) => {
                    let number = marks.len() as u32;
                    marks.push(*mark);
                    mark_numbers.insert(*mark, number);
                    Step::Record { stream, mark: number }
                }
                Work::Wait(mark) => match mark_numbers.get(mark) {
                    Some(number) => Step::Wait { stream, mark: *number },
                    None => Step::AtLeast { stream, ns: self.times.get(mark).copied().unwrap_or(0.0) },
                },
                Work::Reduce(reduction) => {
                    if *communicator.get_or_insert(reduction.communicator) != reduction.communicator {
                        crate::complain("work of two communicators between two waits is not modelled");
                        return Err(cuda::NOT_SUPPORTED);
                    }
                    let scatter =
                        self.communicators.get(&reduction.communicator).map_or(1.0, |of| of.scatter(op.serial));
                    Step::Collective {
                        stream,
                        ns: reduction.ns * scatter,
                        what: reduction.what(),
                        lenient: reduction.lenient,
                    }
                }
            });
        }
        let data = live_data(&ops);
        packet.live = data
            .iter()
            .filter_map(|data| match data {
                Data::Reduce { position, chained, .. } => Some([*position as u64, *chained as u64]),
                Data::Copy { .. } | Data::Fill { .. } | Data::Write { .. } => None,
            })
            .flatten()
            .collect();
        Ok(Batch { held, communicator, packet, marks, streams, data, is_timed: false, spoils, is_asking: false })
    }

    /// Faults of collectives that are about to run: a rank may die here, or be held up.
    /// The second is whether sums go wrong.
    fn strike(&mut self, ops: &[Op]) -> (Option<Hold>, bool) {
        let mut spoils = false;
        if Faults::any(Kind::Overlap)
            && let Some(moment) = overlapping(ops)
            && let Some(fault) = self.faults.strikes(Kind::Overlap, moment)
        {
            if fault.effect.as_deref() == Some("hang") {
                return (Some(Hold::of(fault)), false);
            }
            spoils = true;
        }
        if !Faults::any(Kind::Die) && !Faults::any(Kind::Hang) {
            return (None, spoils);
        }
        for op in ops {
            let Work::Reduce(reduction) = &op.work else { continue };
            let moment = reduction.moment(Phase::Collective);
            if let Some(fault) = self.faults.strikes(Kind::Die, moment) {
                faults::die(fault);
            }
            if let Some(fault) = self.faults.strikes(Kind::Hang, moment) {
                return (Some(Hold::of(fault)), spoils);
            }
        }
        (None, spoils)
    }

    fn drive(&mut self, batch: &mut Batch) -> Result<Progress, i32> {
        if let Some(hold) = batch.held.filter(|hold| hold.lasts()) {
            return Ok(Progress::Held(hold));
        }
        loop {
            self.copy_up_to_a_sum(batch)?;
            let Some(number) = batch.communicator else {
                let (outcomes, _) = play(std::slice::from_ref(&batch.packet)).map_err(|_| cuda::UNKNOWN)?;
                self.note_times(batch, &outcomes[0]);
                return Ok(Progress::Done);
            };
            if batch.is_timed && batch.data.is_empty() {
                return Ok(Progress::Done);
            }
            if !batch.is_asking {
                batch.packet.values = self.values_of_the_first_sum(batch)?;
                let bytes = batch.packet.to_bytes();
                self.group(number)?.say(&bytes).map_err(|error| file_trouble(&error))?;
                batch.is_asking = true;
            }
            let board = self.group(number)?.board;
            let rung = board.rung();
            let Some(heard) = self.group(number)?.heard().map_err(|error| file_trouble(&error))? else {
                return Ok(Progress::Peers(board, rung));
            };
            batch.is_asking = false;
            let packets: Vec<Packet> =
                heard.iter().map(|bytes| Packet::from_bytes(bytes)).collect::<Option<_>>().ok_or(cuda::UNKNOWN)?;
            if !batch.is_timed {
                match play(&packets) {
                    Ok((outcomes, spoils)) => {
                        let rank = self.communicators.get(&number).map_or(0, |communicator| communicator.rank);
                        self.note_times(batch, &outcomes[rank]);
                        batch.spoils |= spoils;
                    }
                    Err(Discord::Choices) => {
                        batch.held = Some(Hold::FOR_EVER);
                        return Ok(Progress::Held(Hold::FOR_EVER));
                    }
                    Err(Discord::Batches) => {
                        crate::complain("ranks that wait for different numbers of collectives are not modelled");
                        return Err(cuda::NOT_SUPPORTED);
                    }
                }
                batch.is_timed = true;
                batch.packet.clocks.clear();
                batch.packet.steps.clear();
            }
            if packets.iter().any(|packet| packet.live != batch.packet.live) {
                crate::complain("ranks that read sums at different places are not modelled");
                return Err(cuda::NOT_SUPPORTED);
            }
            self.add_up(batch, &packets)?;
        }
    }

    fn group(&mut self, communicator: usize) -> Result<&mut crate::exchange::Group, i32> {
        self.communicators.get_mut(&communicator).map(|of| &mut of.group).ok_or(cuda::INVALID_HANDLE)
    }

    /// Copies what comes before the next sum.
    fn copy_up_to_a_sum(&mut self, batch: &mut Batch) -> Result<(), i32> {
        while let Some(data) = batch.data.pop_front_if(|data| !matches!(data, Data::Reduce { .. })) {
            match data {
                Data::Copy { to, from, bytes } if self.memory.copy(to, from, bytes) => {}
                Data::Fill { to, value, bytes } if self.memory.holds(to, bytes) => {
                    if let Some(target) = self.memory.bytes_mut(to, bytes) {
                        target.fill(value);
                    }
                }
                Data::Write { to, bytes } if self.memory.holds(to, bytes.len()) => {
                    if let Some(target) = self.memory.bytes_mut(to, bytes.len()) {
                        target.copy_from_slice(&bytes);
                    }
                }
                _ => return Err(cuda::ILLEGAL_ADDRESS),
            }
        }
        Ok(())
    }

    fn values_of_the_first_sum(&self, batch: &Batch) -> Result<Vec<u8>, i32> {
        let Some(Data::Reduce { reduction, .. }) = batch.data.front() else { return Ok(Vec::new()) };
        let rank = self.communicators.get(&reduction.communicator).map_or(0, |communicator| communicator.rank);
        if !reduction.shape.sends(rank) {
            return Ok(Vec::new());
        }
        let bytes = self.memory.bytes(reduction.send, reduction.send_bytes).ok_or(cuda::ILLEGAL_ADDRESS)?;
        Ok(numbers::essence(bytes, reduction.shape.number).to_vec())
    }

    fn add_up(&mut self, batch: &mut Batch, packets: &[Packet]) -> Result<(), i32> {
        let Some(Data::Reduce { reduction, chained, .. }) = batch.data.pop_front() else { return Ok(()) };
        let sent: Vec<&[u8]> = packets.iter().map(|packet| packet.values.as_slice()).collect();
        let rank = self.communicators.get(&reduction.communicator).map_or(0, |communicator| communicator.rank);
        let is_wrong = self.faults.strikes(Kind::WrongSum, reduction.moment(Phase::Collective)).is_some();
        let target = self.memory.bytes_mut(reduction.receive, reduction.receive_bytes).ok_or(cuda::ILLEGAL_ADDRESS)?;
        reduction.shape.receive(&sent, rank, chained, target);
        let size = reduction.shape.number.size();
        if (is_wrong || batch.spoils) && target.len() >= size {
            // The last bit of one element, and never the same one for every size.
            let element = chance::mix(&[scenario().seed, reduction.bytes as u64]) as usize % (target.len() / size);
            target[element * size] ^= 1;
        }
        Ok(())
    }

    fn note_times(&mut self, batch: &Batch, outcome: &Outcome) {
        for (stream, clock) in batch.streams.iter().zip(&outcome.clocks) {
            self.streams.entry(*stream).or_default().clock = *clock;
        }
        let asked_for: HashSet<u64> = self
            .events
            .values()
            .filter_map(|event| event.mark)
            .chain(self.pending.iter().filter_map(|op| if let Work::Wait(mark) = op.work { Some(mark) } else { None }))
            .collect();
        self.times.retain(|mark, _| asked_for.contains(mark));
        let times = batch.marks.iter().copied().zip(outcome.marks.iter().copied());
        self.times.extend(times.filter(|(mark, _)| asked_for.contains(mark)));
    }
}

/// Captured and uncaptured sums that nobody waits between, on streams of their own.
fn overlapping(ops: &[Op]) -> Option<Moment<'static>> {
    let sums =
        || ops.iter().filter_map(|op| if let Work::Reduce(sum) = &op.work { Some((op.stream, sum)) } else { None });
    let eager: HashSet<usize> = sums().filter(|(_, sum)| !sum.is_captured).map(|(stream, _)| stream).collect();
    let (_, captured) = sums().find(|(stream, sum)| sum.is_captured && eager.iter().any(|other| other != stream))?;
    Some(captured.moment(Phase::Collective))
}

fn file_trouble(error: &std::io::Error) -> i32 {
    crate::complain(&format!("ranks cannot exchange: {error}"));
    cuda::UNKNOWN
}

impl Capture {
    fn next_mark(&mut self) -> u64 {
        self.marks += 1;
        self.marks - 1
    }
}

/// What must really be done to data: what is overwritten before anybody reads it is left out, and sums
/// of a buffer over itself become one chain.
fn live_data(ops: &[Op]) -> VecDeque<Data> {
    let mut position = ops.iter().filter(|op| matches!(op.work, Work::Reduce(_))).count();
    // Ranges that are written before they are read, seen from the end.
    let mut doomed: Vec<(u64, u64)> = Vec::new();
    let is_doomed = |doomed: &[(u64, u64)], at: u64, bytes: usize| {
        doomed.iter().any(|(start, end)| *start <= at && at + bytes as u64 <= *end)
    };
    let read = |doomed: &mut Vec<(u64, u64)>, at: u64, bytes: usize| {
        doomed.retain(|(start, end)| at >= *end || at + bytes as u64 <= *start);
    };
    let mut data: VecDeque<Data> = VecDeque::new();
    for op in ops.iter().rev() {
        match &op.work {
            Work::Copy { to, from, bytes } if !is_doomed(&doomed, *to, *bytes) => {
                doomed.push((*to, to + *bytes as u64));
                read(&mut doomed, *from, *bytes);
                data.push_front(Data::Copy { to: *to, from: *from, bytes: *bytes });
            }
            Work::Fill { to, value, bytes } if !is_doomed(&doomed, *to, *bytes) => {
                doomed.push((*to, to + *bytes as u64));
                data.push_front(Data::Fill { to: *to, value: *value, bytes: *bytes });
            }
            Work::Write { to, bytes } if !is_doomed(&doomed, *to, bytes.len()) => {
                doomed.push((*to, to + bytes.len() as u64));
                data.push_front(Data::Write { to: *to, bytes: bytes.clone() });
            }
            Work::Reduce(reduction) => {
                position -= 1;
                if is_doomed(&doomed, reduction.receive, reduction.receive_bytes) {
                    continue;
                }
                // What is read of it is kept all the same, below.
                doomed.push((reduction.receive, reduction.receive + reduction.receive_bytes as u64));
                read(&mut doomed, reduction.send, reduction.send_bytes);
                match data.front_mut() {
                    Some(Data::Reduce { reduction: next, position: first, chained }) if reduction.chains_with(next) => {
                        *first = position;
                        *chained += 1;
                    }
                    _ => data.push_front(Data::Reduce { reduction: reduction.clone(), position, chained: 1 }),
                }
            }
            _ => {}
        }
    }
    data
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::function::Number;

    fn copy(to: u64, from: u64, bytes: usize) -> Op {
        Op { stream: 0, serial: 0, work: Work::Copy { to, from, bytes } }
    }

    fn sum(at: u64, bytes: usize) -> Op {
        let choice = Choice { algorithm: 1, protocol: 0, channels: 1, threads: 96 };
        let shape = Shape { function: Function::AllReduce, number: Number::Brain, root: 0, shift: 0 };
        let reduction = Reduction {
            communicator: 1,
            shape,
            send: at,
            send_bytes: bytes,
            receive: at,
            receive_bytes: bytes,
            bytes,
            ns: 1.0,
            choice,
            lenient: false,
            is_captured: false,
        };
        Op { stream: 0, serial: 0, work: Work::Reduce(reduction) }
    }

    /// A gather of two ranks, of which this one's part is sent from `from`.
    fn gather(to: u64, from: u64, bytes: usize) -> Op {
        let Work::Reduce(reduction) = sum(to, bytes).work else { unreachable!() };
        let shape = Shape { function: Function::AllGather, ..reduction.shape };
        let work = Work::Reduce(Reduction { shape, send: from, send_bytes: bytes / 2, ..reduction });
        Op { stream: 0, serial: 0, work }
    }

    fn shown(ops: &[Op]) -> Vec<String> {
        live_data(ops)
            .iter()
            .map(|data| match data {
                Data::Copy { to, from, bytes } => format!("copy {from}->{to} {bytes}"),
                Data::Fill { to, bytes, .. } => format!("fill {to} {bytes}"),
                Data::Write { to, bytes } => format!("write {to} {}", bytes.len()),
                Data::Reduce { reduction, position, chained } => {
                    format!("sum {} {} from {position} x{chained}", reduction.receive, reduction.bytes)
                }
            })
            .collect()
    }

    #[test]
    fn only_what_can_be_read_is_done() {
        // Two replays of a chain: the second starts from the source again.
        let replay = [copy(100, 0, 64), sum(100, 64), sum(100, 64)];
        assert_eq!(shown(&[replay.clone(), replay].concat()), ["copy 0->100 64", "sum 100 64 from 2 x2"]);
        // A shorter copy dooms nothing of the rest.
        assert_eq!(shown(&[sum(100, 64), copy(100, 0, 32)]), ["sum 100 64 from 0 x1", "copy 0->100 32"]);
        // What is copied away first is needed.
        let kept = [sum(100, 64), copy(500, 100, 64), copy(100, 0, 64)];
        assert_eq!(shown(&kept), ["sum 100 64 from 0 x1", "copy 100->500 64", "copy 0->100 64"]);
        // What comes from the host dooms what it overwrites, and is doomed likewise.
        let write =
            |to, bytes: usize| Op { stream: 0, serial: 0, work: Work::Write { to, bytes: vec![0; bytes].into() } };
        assert_eq!(
            shown(&[sum(100, 64), write(100, 64), write(500, 8), copy(500, 0, 8)]),
            ["write 100 64", "copy 0->500 8"]
        );
        // A gather into another buffer is done once, after what it is to overwrite; in place it reads a part.
        let fill = |to, bytes| Op { stream: 0, serial: 0, work: Work::Fill { to, value: 0xff, bytes } };
        assert_eq!(
            shown(&[fill(100, 64), gather(100, 0, 64), gather(100, 0, 64), copy(500, 100, 64)]),
            ["sum 100 64 from 1 x1", "copy 100->500 64"]
        );
        assert_eq!(
            shown(&[fill(100, 64), copy(132, 0, 32), gather(100, 132, 64), gather(100, 132, 64)]),
            ["fill 100 64", "copy 0->132 32", "sum 100 64 from 0 x2"]
        );
        // Other lengths are other sums.
        assert_eq!(shown(&[sum(100, 64), sum(100, 32)]), ["sum 100 64 from 0 x1", "sum 100 32 from 1 x1"]);
    }

    #[test]
    fn a_forked_capture_must_be_joined_and_its_times_are_those_of_the_longer_branch() {
        let mut engine = Engine::default();
        let (main, side) = (engine.create_stream(), engine.create_stream());
        let (fork, join) = (engine.create_event(false), engine.create_event(false));
        let branch = |engine: &mut Engine, is_joined: bool| {
            engine.begin_capture(main).unwrap();
            engine.record(fork, main).unwrap();
            engine.wait(side, fork).unwrap();
            engine.enqueue(side, Work::Busy(500.0)).unwrap();
            engine.enqueue(main, Work::Busy(200.0)).unwrap();
            if is_joined {
                engine.record(join, side).unwrap();
                engine.wait(main, join).unwrap();
            }
            engine.enqueue(main, Work::Busy(50.0)).unwrap();
            engine.end_capture(main)
        };
        assert_eq!(branch(&mut engine, false), Err(cuda::STREAM_CAPTURE_UNJOINED));
        let graph = branch(&mut engine, true).unwrap();
        let executable = engine.instantiate(graph).unwrap();
        let (start, end) = (engine.create_event(true), engine.create_event(true));
        for _ in 0..2 {
            engine.record(start, main).unwrap();
            engine.launch(executable, main).unwrap();
            engine.record(end, main).unwrap();
            assert_eq!(engine.elapsed_ms(start, end), Err(cuda::NOT_READY));
            assert!(matches!(engine.advance(), Ok(Progress::Done)));
            let expected = (cost::GRAPH_NS + 550.0) / 1e6;
            assert!((f64::from(engine.elapsed_ms(start, end).unwrap()) - expected).abs() < 1e-9);
        }
    }

    #[test]
    fn a_capture_refuses_what_cuda_refuses() {
        let mut engine = Engine::default();
        let (stream, event) = (engine.create_stream(), engine.create_event(true));
        engine.record(event, stream).unwrap();
        engine.begin_capture(stream).unwrap();
        assert_eq!(engine.begin_capture(stream), Err(cuda::STREAM_CAPTURE_UNSUPPORTED));
        assert_eq!(engine.wait(stream, event), Err(cuda::STREAM_CAPTURE_ISOLATION));
        assert_eq!(engine.end_capture(stream), Err(cuda::STREAM_CAPTURE_INVALIDATED));
        assert_eq!(engine.end_capture(stream), Err(cuda::ILLEGAL_STATE));
        engine.begin_capture(stream).unwrap();
        assert_eq!(engine.forbid_in_capture(), Err(cuda::STREAM_CAPTURE_UNSUPPORTED));
        assert_eq!(engine.end_capture(stream), Err(cuda::STREAM_CAPTURE_INVALIDATED));
        assert_eq!(engine.forbid_in_capture(), Ok(()));
    }
}
