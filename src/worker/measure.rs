//! One cell: connect, capture, check, warm up, replay, check again.

use std::cell::RefCell;
use std::rc::Rc;

use crate::bindings::cuda::{CudaError, Device, DeviceBuffer, Graph, Stopwatch};
use crate::bindings::nccl::{Call, Communicator, NcclError, ROOT};
use crate::collective::{Collective, DataType, Issue, Placement};
use crate::record::PointKey;

use super::data_check::{Pattern, Piece, Values, chain_is_checkable, count_wrong, poison};
use super::protocol::{FailureKind, WorkPhase};

/// Untimed replays before the timed ones; they also absorb the skew between ranks.
const WARM_UPS: u32 = 3;

/// Bytes copied to or from the host at a time.
const HOST_BYTES: usize = 8 << 20;

/// A failure with its kind.
#[derive(Debug)]
pub(super) struct StepError {
    pub(super) failure: FailureKind,
    pub(super) detail: String,
}

impl From<CudaError> for StepError {
    fn from(error: CudaError) -> Self {
        let failure = if error.out_of_memory { FailureKind::OutOfMemory } else { FailureKind::Cuda };
        Self { failure, detail: error.to_string() }
    }
}

impl From<NcclError> for StepError {
    fn from(error: NcclError) -> Self {
        Self { failure: FailureKind::Nccl, detail: error.to_string() }
    }
}

/// The buffers of a launch: what this rank sends, and the place where results go.
pub(super) struct Buffers {
    source: DeviceBuffer,
    work: DeviceBuffer,
    pattern: Pattern,
    /// The type in which the source holds the pattern's values, and in how many bytes.
    filled: Option<(DataType, usize)>,
    /// What was worked out of the pattern so far.
    periods: RefCell<Vec<Period>>,
}

/// One period of values in a type.
struct Period {
    of: (Values, DataType),
    bytes: Rc<[u8]>,
}

impl Buffers {
    /// Of two equal buffers, fills one with the values of the usual type.
    pub(super) fn new(
        device: &Device,
        source: DeviceBuffer,
        work: DeviceBuffer,
        pattern: Pattern,
    ) -> Result<Self, StepError> {
        let mut buffers = Self { source, work, pattern, filled: None, periods: RefCell::default() };
        let bytes = buffers.source.bytes();
        buffers.fill(device, DataType::Bf16, bytes)?;
        Ok(buffers)
    }

    /// From here on these values are sent.
    pub(super) fn take(&mut self, pattern: Pattern) {
        self.pattern = pattern;
        self.filled = None;
        self.periods.get_mut().clear();
    }

    /// Rank and ranks of the communicator that the values are for.
    pub(super) fn group(&self) -> (u32, u32) {
        (self.pattern.rank(), self.pattern.ranks())
    }

    /// One period of what must stand somewhere.
    fn period(&self, values: Values, dtype: DataType) -> Rc<[u8]> {
        let mut known = self.periods.borrow_mut();
        if let Some(period) = known.iter().find(|period| period.of == (values, dtype)) {
            return Rc::clone(&period.bytes);
        }
        let bytes: Rc<[u8]> = self.pattern.period(values, dtype).into();
        known.push(Period { of: (values, dtype), bytes: Rc::clone(&bytes) });
        bytes
    }

    /// Writes the values in a type into so many bytes, where they do not stand there yet.
    fn fill(&mut self, device: &Device, dtype: DataType, bytes: usize) -> Result<(), StepError> {
        if self.filled.is_some_and(|(known, filled)| known == dtype && filled >= bytes) {
            return Ok(());
        }
        self.filled = None;
        let period = self.period(Values::Of(self.pattern.rank()), dtype);
        // Whole periods per copy: a big message must not cost one driver call per period.
        let repeated = period.repeat((HOST_BYTES / period.len()).clamp(1, bytes.div_ceil(period.len()).max(1)));
        let mut offset = 0;
        while offset < bytes {
            let length = repeated.len().min(bytes - offset);
            device.write(&self.source, offset, &repeated[..length])?;
            offset += length;
        }
        self.filled = Some((dtype, bytes));
        Ok(())
    }
}

/// A cell, ready to be timed.
pub(super) struct Cell {
    point: PointKey,
    collectives: u32,
    call: Call,
    /// The timed chain, where it is captured.
    timed: Option<Graph>,
    /// One collective alone, where the end of a captured chain cannot be checked exactly.
    single: Option<Graph>,
}

impl Cell {
    /// What is enqueued for a point, if it can be.
    fn call(buffers: &Buffers, point: PointKey, collectives: u32) -> Result<Call, StepError> {
        let impossible =
            |why: &str| StepError { failure: FailureKind::Protocol, detail: format!("impossible cell {point}: {why}") };
        if point.ranks != buffers.pattern.ranks() {
            return Err(impossible("the communicator has another number of ranks"));
        }
        let count = point
            .collective
            .count(point.bytes, point.dtype, point.ranks)
            .ok_or_else(|| impossible("its bytes are no whole number of elements for every rank"))?;
        if collectives == 0 || point.bytes as usize > buffers.work.bytes() {
            return Err(impossible("there is nothing to issue, or no room for it"));
        }
        let in_place = point.form.placement == Placement::InPlace;
        if in_place && !point.collective.works_in_place() {
            return Err(impossible("a rank cannot send from where it receives"));
        }
        let part = buffers.pattern.rank() as usize * count as usize * point.dtype.size_bytes() as usize;
        let (source, work) = (buffers.source.pointer(), buffers.work.pointer());
        let (send, receive) = match (in_place, point.collective) {
            (false, _) => (source, work),
            // A rank's part stands in its place among all parts.
            (true, Collective::AllGather) => (work.plus(part), work),
            (true, Collective::ReduceScatter) => (work, work.plus(part)),
            (true, _) => (work, work),
        };
        Ok(Call { collective: point.collective, send, receive, count: count as usize, dtype: point.dtype })
    }

    /// Connects (first use of an algorithm builds its connections, which takes a third of a second),
    /// captures the chain where it is to be captured, checks its result and warms up. Returns the cell and
    /// the microseconds of one replay.
    pub(super) fn prepare(
        device: &Device,
        communicator: &Communicator<'_>,
        buffers: &mut Buffers,
        point: PointKey,
        collectives: u32,
        tell: &mut dyn FnMut(WorkPhase),
    ) -> Result<(Self, f64), StepError> {
        let cell = Self::connect(device, communicator, buffers, point, collectives, tell)?;
        tell(WorkPhase::Check);
        cell.run_and_check(device, communicator, buffers, "before timing")?;

        tell(WorkPhase::Replay);
        let mut stopwatches = Vec::new();
        for _ in 0..WARM_UPS {
            stopwatches.push(cell.timed_replay(device, communicator, buffers)?);
        }
        device.synchronize()?;
        communicator.asynchronous_error()?;
        let last = stopwatches.last().map_or(Ok(0.0), Stopwatch::elapsed_us)?;
        Ok((cell, last))
    }

    /// Runs a chain so many times, each with fresh values, and checks every element after each.
    pub(super) fn check(
        device: &Device,
        communicator: &Communicator<'_>,
        buffers: &mut Buffers,
        point: PointKey,
        (collectives, repeats): (u32, u32),
        tell: &mut dyn FnMut(WorkPhase),
    ) -> Result<(), StepError> {
        let cell = Self::connect(device, communicator, buffers, point, collectives, tell)?;
        for repeat in 0..repeats {
            tell(WorkPhase::Check);
            if repeat > 0 {
                // On top of the last one's, so that no two repeats are alike.
                buffers.take(buffers.pattern.repeated(repeat));
                buffers.fill(device, point.dtype, point.bytes as usize)?;
            }
            let when = format!("in repeat {} of {repeats}", repeat + 1);
            cell.run_and_check(device, communicator, buffers, &when)?;
        }
        communicator.asynchronous_error()?;
        Ok(())
    }

    fn connect(
        device: &Device,
        communicator: &Communicator<'_>,
        buffers: &mut Buffers,
        point: PointKey,
        collectives: u32,
        tell: &mut dyn FnMut(WorkPhase),
    ) -> Result<Self, StepError> {
        let call = Self::call(buffers, point, collectives)?;
        tell(WorkPhase::Connect);
        buffers.fill(device, point.dtype, point.bytes as usize)?;
        let mut cell = Self { point, collectives, call, timed: None, single: None };
        cell.reset(device, buffers)?;
        communicator.enqueue(&call, device.stream())?;
        device.synchronize()?;
        communicator.asynchronous_error()?;
        if point.form.issue == Issue::Captured {
            tell(WorkPhase::Capture);
            let enqueue = || communicator.enqueue(&call, device.stream()).map_err(StepError::from);
            cell.timed = Some(device.capture(|| (0..collectives).try_for_each(|_| enqueue()))?);
            if !chain_is_checkable(point, collectives) {
                cell.single = Some(device.capture(enqueue)?);
            }
        }
        Ok(cell)
    }

    /// Timed replays: everything is queued before anything is waited for, so that no gap of the host
    /// lies between two timings. Microseconds per replay on this rank.
    pub(super) fn replays(
        &self,
        device: &Device,
        communicator: &Communicator<'_>,
        buffers: &Buffers,
        replays: u32,
        tell: &mut dyn FnMut(WorkPhase),
    ) -> Result<Vec<f64>, StepError> {
        tell(WorkPhase::Replay);
        let mut stopwatches = Vec::with_capacity(replays as usize);
        for _ in 0..replays {
            stopwatches.push(self.timed_replay(device, communicator, buffers)?);
        }
        device.synchronize()?;
        communicator.asynchronous_error()?;
        tell(WorkPhase::Check);
        if !chain_is_checkable(self.point, self.collectives) {
            self.single(device, communicator, buffers)?;
        }
        self.compare(device, buffers, "after timing")?;
        stopwatches.iter().map(|stopwatch| stopwatch.elapsed_us().map_err(StepError::from)).collect()
    }

    /// Puts the buffers back to what a collective starts from. What it writes to and does not read is
    /// spoiled first: a collective that does nothing must not find the last one's result.
    fn reset(&self, device: &Device, buffers: &Buffers) -> Result<(), StepError> {
        let (bytes, spoil) = (self.point.bytes as usize, poison(self.point.dtype));
        let part = self.call.count * self.point.dtype.size_bytes() as usize;
        let rank = buffers.pattern.rank();
        match (self.point.form.placement, self.point.collective) {
            (Placement::InPlace, Collective::AllGather) => {
                device.fill(&buffers.work, spoil, bytes)?;
                device.copy_to(&buffers.source, &buffers.work, rank as usize * part, part)?;
            }
            (Placement::InPlace, Collective::Broadcast) if rank != ROOT => {
                device.fill(&buffers.work, spoil, bytes)?;
            }
            (Placement::InPlace, _) => device.copy(&buffers.source, &buffers.work, bytes)?,
            (Placement::OutOfPlace, Collective::ReduceScatter) => device.fill(&buffers.work, spoil, part)?,
            (Placement::OutOfPlace, _) => device.fill(&buffers.work, spoil, bytes)?,
        }
        Ok(())
    }

    /// Issues the whole chain.
    fn issue(&self, device: &Device, communicator: &Communicator<'_>) -> Result<(), StepError> {
        if let Some(graph) = &self.timed {
            graph.launch()?;
            return Ok(());
        }
        for _ in 0..self.collectives {
            communicator.enqueue(&self.call, device.stream())?;
        }
        Ok(())
    }

    /// Issues one collective, from the start.
    fn single(&self, device: &Device, communicator: &Communicator<'_>, buffers: &Buffers) -> Result<(), StepError> {
        self.reset(device, buffers)?;
        match &self.single {
            Some(graph) => graph.launch()?,
            None => communicator.enqueue(&self.call, device.stream())?,
        }
        Ok(())
    }

    /// The reset of the values stays outside the two events: it is ours, not the collective's.
    fn timed_replay(
        &self,
        device: &Device,
        communicator: &Communicator<'_>,
        buffers: &Buffers,
    ) -> Result<Stopwatch, StepError> {
        let stopwatch = device.stopwatch()?;
        self.reset(device, buffers)?;
        device.record_start(&stopwatch)?;
        self.issue(device, communicator)?;
        device.record_end(&stopwatch)?;
        Ok(stopwatch)
    }

    /// Runs the chain, or one collective where a chain's end cannot be checked, and checks it.
    fn run_and_check(
        &self,
        device: &Device,
        communicator: &Communicator<'_>,
        buffers: &Buffers,
        when: &str,
    ) -> Result<(), StepError> {
        if chain_is_checkable(self.point, self.collectives) {
            self.reset(device, buffers)?;
            self.issue(device, communicator)?;
        } else {
            self.single(device, communicator, buffers)?;
        }
        self.compare(device, buffers, when)
    }

    /// Checks every element of what was run last: this rank's result, and that what it sent is as it was.
    fn compare(&self, device: &Device, buffers: &Buffers, when: &str) -> Result<(), StepError> {
        let (point, dtype) = (self.point, self.point.dtype);
        let size = dtype.size_bytes() as usize;
        device.synchronize()?;
        let chained = if chain_is_checkable(point, self.collectives) { self.collectives } else { 1 };
        let chained = if point.form.placement == Placement::InPlace { chained } else { 1 };
        let mut places: Vec<(&DeviceBuffer, Piece)> = buffers
            .pattern
            .result(point, self.call.count, chained)
            .into_iter()
            .map(|piece| (&buffers.work, piece))
            .collect();
        if point.form.placement == Placement::OutOfPlace {
            let whole = point.bytes as usize / size;
            let length = if point.collective == Collective::AllGather { self.call.count } else { whole };
            let values = Values::Of(buffers.pattern.rank());
            places.push((&buffers.source, Piece { start: 0, length, values, phase: 0 }));
        }
        let mut host = vec![0_u8; (point.bytes as usize).min(HOST_BYTES)];
        let (mut wrong, mut elements, mut first) = (0, 0, None);
        for (buffer, piece) in places {
            let period = buffers.period(piece.values, dtype);
            let mut offset = 0;
            while offset < piece.length {
                let length = (host.len() / size).min(piece.length - offset);
                buffer.read((piece.start + offset) * size, &mut host[..length * size])?;
                let (count, position) = count_wrong(&period, piece.phase, dtype, &host[..length * size], offset);
                wrong += count;
                first = first.or(position.map(|position| piece.start + position));
                offset += length;
            }
            elements += piece.length;
        }
        if wrong == 0 {
            return Ok(());
        }
        Err(StepError {
            failure: FailureKind::WrongResult,
            detail: format!(
                "{wrong} of {elements} elements are wrong {when} ({point}), the first at element {}",
                first.unwrap_or(0)
            ),
        })
    }
}
