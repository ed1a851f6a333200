//! Captured and uncaptured collectives of one communicator, made to overlap.
//!
//! Where graph mixing is switched off, NCCL keeps them apart no more. This issues both on two streams
//! that nothing orders, in either order, with ranks that come late by chance, and compares every sum.
//! Rounds without a failure prove nothing: they only did not show one.

use std::time::Duration;

use rand::RngExt;

use super::data_check::{Pattern, Values, chain_is_checkable, count_wrong};
use super::measure::StepError;
use super::protocol::{FailureKind, WorkPhase};
use crate::bindings::cuda::{Device, DeviceBuffer, Graph, SideStream};
use crate::bindings::nccl::Communicator;
use crate::collective::{Collective, DataType};
use crate::record::PointKey;
use crate::seed::Seed;

/// The longest that a rank comes late by, before each of its two halves of a round.
const MOST_SKEW_US: u64 = 300;

/// Two chains of all-reduces, one of them captured, each over a buffer of its own.
pub(super) struct Overlap {
    graph: Graph,
    side: SideStream,
    source: DeviceBuffer,
    captured: DeviceBuffer,
    eager: DeviceBuffer,
    /// One period of the sums that each chain must end with.
    sums: Vec<u8>,
    /// Collectives in each chain.
    collectives: u32,
    bytes: usize,
    rank: u32,
    seed: u64,
}

impl Overlap {
    /// Captures one chain, with all connections made before.
    pub(super) fn prepare(
        device: &Device,
        communicator: &Communicator<'_>,
        (rank, ranks): (u32, u32),
        (bytes, collectives): (u64, u32),
        seed: u64,
        tell: &mut dyn FnMut(WorkPhase),
    ) -> Result<Self, StepError> {
        let bytes = bytes as usize;
        if collectives == 0 || bytes == 0 || !bytes.is_multiple_of(2) {
            return Err(StepError { failure: FailureKind::Protocol, detail: format!("impossible size {bytes}") });
        }
        // Where a chain would round, a single sum still is exact.
        let point = PointKey::usual(Collective::AllReduce, DataType::Bf16, bytes as u64, ranks);
        let collectives = if chain_is_checkable(point, collectives) { collectives } else { 1 };
        let pattern = Pattern::new(seed, rank, ranks);
        let [source, captured, eager] = [device.allocate(bytes)?, device.allocate(bytes)?, device.allocate(bytes)?];
        let own = pattern.period(Values::Of(rank), DataType::Bf16);
        let own: Vec<u8> = own.iter().cycle().take(bytes).copied().collect();
        let sums = pattern.period(Values::Sum { chained: collectives }, DataType::Bf16);
        device.write(&source, 0, &own)?;
        let side = device.side_stream()?;
        let reduce =
            || communicator.all_reduce_in_place(captured.pointer(), bytes / 2, DataType::Bf16, device.stream());
        tell(WorkPhase::Connect);
        device.copy(&source, &captured, bytes)?;
        reduce()?;
        device.synchronize()?;
        communicator.asynchronous_error()?;
        tell(WorkPhase::Capture);
        let graph = device.capture(|| (0..collectives).try_for_each(|_| reduce().map_err(StepError::from)))?;
        Ok(Self { graph, side, source, captured, eager, sums, collectives, bytes, rank, seed })
    }

    /// So many rounds from this one on; a failure is an error.
    pub(super) fn rounds(
        &self,
        device: &Device,
        communicator: &Communicator<'_>,
        first: u32,
        rounds: u32,
        tell: &mut dyn FnMut(WorkPhase),
    ) -> Result<(), StepError> {
        tell(WorkPhase::Replay);
        for round in first..first.saturating_add(rounds) {
            self.round(device, communicator, round)?;
        }
        Ok(())
    }

    fn round(&self, device: &Device, communicator: &Communicator<'_>, round: u32) -> Result<(), StepError> {
        let mut late = Seed(self.seed).derive("overlap-skew", &format!("rank-{}-round-{round}", self.rank));
        let mut wait = || std::thread::sleep(Duration::from_micros(late.random_range(0..=MOST_SKEW_US)));
        device.copy(&self.source, &self.captured, self.bytes)?;
        device.copy_on(&self.side, &self.source, &self.eager, self.bytes)?;
        let eager = || -> Result<(), StepError> {
            (0..self.collectives).try_for_each(|_| {
                communicator
                    .all_reduce_in_place(self.eager.pointer(), self.bytes / 2, DataType::Bf16, self.side.handle())
                    .map_err(StepError::from)
            })
        };
        wait();
        // Every rank has the same order; when each of them gets there is another matter.
        if round.is_multiple_of(2) {
            self.graph.launch()?;
            wait();
            eager()?;
        } else {
            eager()?;
            wait();
            self.graph.launch()?;
        }
        device.synchronize()?;
        device.synchronize_side(&self.side)?;
        communicator.asynchronous_error()?;
        for (buffer, which) in [(&self.captured, "captured"), (&self.eager, "uncaptured")] {
            let mut received = vec![0_u8; self.bytes];
            buffer.read(0, &mut received)?;
            let (wrong, position) = count_wrong(&self.sums, 0, DataType::Bf16, &received, 0);
            if wrong > 0 {
                return Err(StepError {
                    failure: FailureKind::WrongResult,
                    detail: format!(
                        "in round {round}, {wrong} of {} elements of the {which} chain are wrong, the first at element {}",
                        self.bytes / 2,
                        position.unwrap_or(0)
                    ),
                });
            }
        }
        Ok(())
    }
}
