//! One cell: connect, capture, check, warm up, replay, check again.

use crate::bindings::cuda::{CudaError, Device, DeviceBuffer, Graph};
use crate::bindings::nccl::{Communicator, NcclError};
use crate::collective::{Collective, DataType};
use crate::record::PointKey;

use super::data_check::{Pattern, chain_is_checkable};
use super::protocol::{FailureKind, WorkPhase};

/// Untimed replays before the timed ones; they also absorb the skew between ranks.
const WARM_UPS: u32 = 3;

/// Elements copied to the host at a time by the data check.
const CHECK_ELEMENTS: usize = 1 << 22;

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

/// The buffers of a launch: the values as they start, and the place where they are reduced.
pub(super) struct Buffers {
    source: DeviceBuffer,
    work: DeviceBuffer,
    pattern: Pattern,
}

impl Buffers {
    /// Allocates for the largest message of the launch and fills the source.
    pub(super) fn new(device: &Device, largest_bytes: usize, pattern: Pattern) -> Result<Self, StepError> {
        // A launch that times only forward passes has no message; the driver refuses empty memory.
        let source = device.allocate(largest_bytes.max(2))?;
        let work = device.allocate(largest_bytes.max(2))?;
        let elements = largest_bytes / 2;
        // Whole periods per copy: a big message must not cost one driver call per period.
        let period = pattern.own().len();
        let repeated = pattern.own().repeat((CHECK_ELEMENTS / period).clamp(1, elements.div_ceil(period).max(1)));
        let mut offset = 0;
        while offset < elements {
            let length = repeated.len().min(elements - offset);
            device.write(&source, offset * 2, &repeated[..length])?;
            offset += length;
        }
        Ok(Self { source, work, pattern })
    }
}

/// A captured cell, ready to be timed.
pub(super) struct Cell {
    point: PointKey,
    collectives: u32,
    timed: Graph,
    /// One all-reduce alone, where the timed chain's end cannot be checked exactly.
    single: Option<Graph>,
}

impl Cell {
    /// Connects (first use of an algorithm builds its connections, which takes a third of a second),
    /// captures the chain, checks its result and warms up. Returns the cell and the microseconds of
    /// one replay.
    pub(super) fn prepare(
        device: &Device,
        communicator: &Communicator<'_>,
        buffers: &Buffers,
        point: PointKey,
        collectives: u32,
        tell: &mut dyn FnMut(WorkPhase),
    ) -> Result<(Self, f64), StepError> {
        if point.collective != Collective::AllReduce || point.dtype != DataType::Bf16 {
            return Err(StepError {
                failure: FailureKind::Unsupported,
                detail: format!("workers of this version measure all-reduce in bf16, not {point}"),
            });
        }
        let bytes = point.bytes as usize;
        if collectives == 0 || bytes == 0 || !bytes.is_multiple_of(2) || bytes > buffers.work.bytes() {
            return Err(StepError { failure: FailureKind::Protocol, detail: format!("impossible cell {point}") });
        }
        let enqueue = || -> Result<(), StepError> {
            communicator.all_reduce_in_place(buffers.work.pointer(), bytes / 2, point.dtype, device.stream())?;
            Ok(())
        };
        tell(WorkPhase::Connect);
        device.copy(&buffers.source, &buffers.work, bytes)?;
        enqueue()?;
        device.synchronize()?;
        communicator.asynchronous_error()?;

        tell(WorkPhase::Capture);
        let timed = device.capture(|| (0..collectives).try_for_each(|_| enqueue()))?;
        let single = if chain_is_checkable(point.ranks, collectives) { None } else { Some(device.capture(enqueue)?) };
        let cell = Self { point, collectives, timed, single };
        tell(WorkPhase::Check);
        if cell.single.is_none() {
            cell.replay(device, buffers, &cell.timed)?;
            device.synchronize()?;
        }
        cell.check(device, buffers, "before timing")?;

        tell(WorkPhase::Replay);
        let mut stopwatches = Vec::new();
        for _ in 0..WARM_UPS {
            stopwatches.push(cell.timed_replay(device, buffers)?);
        }
        device.synchronize()?;
        communicator.asynchronous_error()?;
        let last = stopwatches.last().map_or(Ok(0.0), crate::bindings::cuda::Stopwatch::elapsed_us)?;
        Ok((cell, last))
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
            stopwatches.push(self.timed_replay(device, buffers)?);
        }
        device.synchronize()?;
        communicator.asynchronous_error()?;
        tell(WorkPhase::Check);
        self.check(device, buffers, "after timing")?;
        stopwatches.iter().map(|stopwatch| stopwatch.elapsed_us().map_err(StepError::from)).collect()
    }

    fn replay(&self, device: &Device, buffers: &Buffers, graph: &Graph) -> Result<(), StepError> {
        device.copy(&buffers.source, &buffers.work, self.point.bytes as usize)?;
        graph.launch()?;
        Ok(())
    }

    /// The reset of the values stays outside the two events: it is ours, not the collective's.
    fn timed_replay(&self, device: &Device, buffers: &Buffers) -> Result<crate::bindings::cuda::Stopwatch, StepError> {
        let stopwatch = device.stopwatch()?;
        device.copy(&buffers.source, &buffers.work, self.point.bytes as usize)?;
        device.record_start(&stopwatch)?;
        self.timed.launch()?;
        device.record_end(&stopwatch)?;
        Ok(stopwatch)
    }

    /// Checks every element of the last replay of the timed chain, or of a single all-reduce where
    /// the chain cannot be checked.
    fn check(&self, device: &Device, buffers: &Buffers, when: &str) -> Result<(), StepError> {
        let chained = match &self.single {
            None => self.collectives,
            Some(single) => {
                self.replay(device, buffers, single)?;
                1
            }
        };
        device.synchronize()?;
        let elements = self.point.bytes as usize / 2;
        let mut host = vec![0_u16; elements.min(CHECK_ELEMENTS)];
        let (mut wrong, mut first) = (0, None);
        let mut offset = 0;
        while offset < elements {
            let length = host.len().min(elements - offset);
            buffers.work.read(offset * 2, &mut host[..length])?;
            let (count, position) = buffers.pattern.count_wrong(&host[..length], offset, chained);
            wrong += count;
            first = first.or(position);
            offset += length;
        }
        if wrong == 0 {
            return Ok(());
        }
        Err(StepError {
            failure: FailureKind::WrongResult,
            detail: format!(
                "{wrong} of {elements} elements are wrong {when} ({}), the first at element {}",
                self.point,
                first.unwrap_or(0)
            ),
        })
    }
}
