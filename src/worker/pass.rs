//! A forward pass: matrix products that read weights, and collectives where the engine puts them.
//!
//! Products do not feed each other: their numbers mean nothing, their order and their memory traffic
//! do. Weights lie in one arena that the products walk through, larger than any cache, so that a pass
//! reads from memory what a model's pass would.

use std::collections::BTreeMap;
use std::rc::Rc;

use rand::RngExt;

use super::measure::StepError;
use super::protocol::{FailureKind, WorkPhase};
use crate::bindings::cublaslt::{CublasLt, CublasLtError, Product, WORKSPACE_BYTES};
use crate::bindings::cuda::{Device, DeviceBuffer, Graph, SideStream, Stopwatch};
use crate::bindings::nccl::Communicator;
use crate::collective::DataType;
use crate::record::{PassStep, PassStream, PassVariant};
use crate::seed::Seed;

/// Untimed runs before the timed ones.
const WARM_UPS: u32 = 2;
/// Device memory that is left to NCCL, graphs and everybody else.
const RESERVE_BYTES: usize = 3 << 30;
/// Bytes of random numbers that are repeated over the arena. Zeros would be read faster than weights.
const RANDOM_BYTES: usize = 64 << 20;
/// Products start at multiples of this in the arena, as allocations of weights do.
const ALIGNMENT: usize = 512;
/// The product that crowds the multiprocessors during a collective: rows and columns.
const CROWD: (u64, u64) = (64, 4096);

impl From<CublasLtError> for StepError {
    fn from(error: CublasLtError) -> Self {
        let failure = if error.is_out_of_memory() { FailureKind::OutOfMemory } else { FailureKind::CublasLt };
        Self { failure, detail: error.to_string() }
    }
}

/// What passes of a launch share.
pub(super) struct Stage {
    cublaslt: Rc<CublasLt>,
    side: SideStream,
    workspace: DeviceBuffer,
    side_workspace: DeviceBuffer,
    arena: DeviceBuffer,
    inputs: DeviceBuffer,
    outputs: DeviceBuffer,
    side_outputs: DeviceBuffer,
    source: DeviceBuffer,
    reduced: DeviceBuffer,
    /// The arena is all there was: a larger one is not to be had.
    limited: bool,
}

/// Bytes a list of steps needs.
struct Needs {
    weights: usize,
    largest_weights: usize,
    inputs: usize,
    outputs: usize,
    reduced: usize,
    widest: u64,
}

fn needs(steps: &[PassStep]) -> Needs {
    let mut needs = Needs { weights: 0, largest_weights: 0, inputs: 0, outputs: 0, reduced: 0, widest: 64 };
    for step in steps {
        match *step {
            PassStep::Product { rows, inputs, columns } => {
                let bytes = (inputs * columns * 2) as usize;
                needs.weights += bytes.next_multiple_of(ALIGNMENT);
                needs.largest_weights = needs.largest_weights.max(bytes);
                needs.inputs = needs.inputs.max((rows.max(CROWD.0) * inputs * 2) as usize);
                needs.outputs = needs.outputs.max((rows * columns * 2) as usize);
                needs.widest = needs.widest.max(inputs);
            }
            PassStep::Reduce { elements } => needs.reduced = needs.reduced.max((elements * 2) as usize),
        }
    }
    needs
}

impl Stage {
    /// Allocates for these steps: everything that is free but a reserve, at most what the weights
    /// need. The random numbers are the same on every rank and in every launch.
    pub(super) fn new(device: &Device, cublaslt: Rc<CublasLt>, steps: &[PassStep]) -> Result<Self, StepError> {
        let needs = needs(steps);
        let allocate = |bytes: usize| device.allocate(bytes.max(ALIGNMENT)).map_err(StepError::from);
        let workspace = allocate(WORKSPACE_BYTES)?;
        let side_workspace = allocate(WORKSPACE_BYTES)?;
        let inputs = allocate(needs.inputs)?;
        let outputs = allocate(needs.outputs)?;
        let side_outputs = allocate((CROWD.0 * CROWD.1 * 2) as usize)?;
        let source = allocate(needs.reduced)?;
        let reduced = allocate(needs.reduced)?;
        let free = device.free_bytes()?.saturating_sub(RESERVE_BYTES);
        let crowd_bytes = (needs.widest * CROWD.1 * 2) as usize;
        let least = needs.largest_weights.max(crowd_bytes).next_multiple_of(ALIGNMENT);
        if free < least {
            return Err(StepError {
                failure: FailureKind::OutOfMemory,
                detail: format!(
                    "one block of this rank's shard needs {} MiB of weights and {} MiB are free",
                    least >> 20,
                    free >> 20
                ),
            });
        }
        let wanted = needs.weights.max(least);
        let arena = allocate(wanted.min(free))?;
        let mut random = Seed(0).derive("pass-weights", "arena");
        // bfloat16 numbers between 1/64 and 1/32 in magnitude, with both signs.
        let numbers: Vec<u16> = (0..RANDOM_BYTES / 2)
            .map(|_| {
                let bits: u16 = random.random();
                (bits & 0x8000) | 0x3c80 | (bits & 0x7f)
            })
            .collect();
        for buffer in [&arena, &inputs, &source] {
            let length = (buffer.bytes() / 2).min(numbers.len());
            device.write(buffer, 0, &numbers[..length])?;
            device.repeat(buffer, length * 2)?;
        }
        device.synchronize()?;
        let side = device.side_stream()?;
        Ok(Self {
            cublaslt,
            side,
            workspace,
            side_workspace,
            arena,
            inputs,
            outputs,
            side_outputs,
            source,
            reduced,
            limited: wanted > free,
        })
    }

    /// Whether these steps fit the buffers as they are.
    pub(super) fn fits(&self, steps: &[PassStep]) -> bool {
        let needs = needs(steps);
        needs.largest_weights <= self.arena.bytes()
            && (self.limited || needs.weights <= self.arena.bytes())
            && needs.inputs <= self.inputs.bytes()
            && needs.outputs <= self.outputs.bytes()
            && needs.reduced <= self.reduced.bytes()
    }

    pub(super) const fn arena_bytes(&self) -> u64 {
        self.arena.bytes() as u64
    }

    pub(super) fn cublaslt_version(&self) -> u64 {
        self.cublaslt.version() as u64
    }
}

/// A pass, planned and where wanted captured.
pub(super) struct Pass {
    steps: Vec<PassStep>,
    stream: PassStream,
    products: BTreeMap<(u64, u64, u64), Product>,
    /// The product that crowds, by its key in `products`.
    crowd: (u64, u64, u64),
    graphs: BTreeMap<PassVariant, Graph>,
    reduced_bytes: usize,
}

impl Pass {
    /// Plans every product, runs the pass once (which connects NCCL's channels), and captures it in
    /// all variants. Returns the pass and the microseconds of one run.
    pub(super) fn prepare(
        device: &Device,
        communicator: &Communicator<'_>,
        stage: &Stage,
        steps: Vec<PassStep>,
        stream: PassStream,
        captured: bool,
        tell: &mut dyn FnMut(WorkPhase),
    ) -> Result<(Self, f64), StepError> {
        let mut products = BTreeMap::new();
        let mut widest = 64;
        for step in &steps {
            if let PassStep::Product { rows, inputs, columns } = *step {
                widest = widest.max(inputs);
                if let std::collections::btree_map::Entry::Vacant(entry) = products.entry((rows, inputs, columns)) {
                    entry.insert(stage.cublaslt.plan(rows, inputs, columns)?);
                }
            }
        }
        let crowd = (CROWD.0, widest, CROWD.1);
        if let std::collections::btree_map::Entry::Vacant(entry) = products.entry(crowd) {
            entry.insert(stage.cublaslt.plan(crowd.0, crowd.1, crowd.2)?);
        }
        let reduced_bytes = needs(&steps).reduced;
        let mut pass = Self { steps, stream, products, crowd, graphs: BTreeMap::new(), reduced_bytes };
        tell(WorkPhase::Connect);
        pass.issue(device, communicator, stage, PassVariant::Full)?;
        device.synchronize()?;
        communicator.asynchronous_error()?;
        if captured {
            tell(WorkPhase::Capture);
            for variant in [PassVariant::Full, PassVariant::WithoutCollectives, PassVariant::Crowded] {
                let graph = device.capture(|| pass.issue(device, communicator, stage, variant))?;
                pass.graphs.insert(variant, graph);
            }
        }
        tell(WorkPhase::Replay);
        let mut last = None;
        for _ in 0..WARM_UPS {
            last = Some(pass.timed(device, communicator, stage, PassVariant::Full)?);
        }
        device.synchronize()?;
        let replay_us = last.map_or(Ok(0.0), |stopwatch: Stopwatch| stopwatch.elapsed_us())?;
        Ok((pass, replay_us))
    }

    /// Queues so many timed runs of a variant, lets `meanwhile` look at the busy GPU, waits, and
    /// returns the microseconds of each.
    pub(super) fn replays(
        &self,
        device: &Device,
        communicator: &Communicator<'_>,
        stage: &Stage,
        variant: PassVariant,
        replays: u32,
        meanwhile: impl FnOnce(),
    ) -> Result<Vec<f64>, StepError> {
        let mut stopwatches = Vec::with_capacity(replays as usize);
        for _ in 0..replays {
            stopwatches.push(self.timed(device, communicator, stage, variant)?);
        }
        meanwhile();
        device.synchronize()?;
        communicator.asynchronous_error()?;
        stopwatches.iter().map(|stopwatch| stopwatch.elapsed_us().map_err(StepError::from)).collect()
    }

    /// Gives the plans back; the graphs go with the value.
    pub(super) fn forget(self, stage: &Stage) {
        drop(self.graphs);
        for product in self.products.into_values() {
            stage.cublaslt.forget(product);
        }
    }

    fn timed(
        &self,
        device: &Device,
        communicator: &Communicator<'_>,
        stage: &Stage,
        variant: PassVariant,
    ) -> Result<Stopwatch, StepError> {
        let stopwatch = device.stopwatch()?;
        // Sums grow with every all-reduce of the chain; each run starts from the same numbers.
        device.copy(&stage.source, &stage.reduced, self.reduced_bytes)?;
        device.record_start(&stopwatch)?;
        match self.graphs.get(&variant) {
            Some(graph) => graph.launch()?,
            None => self.issue(device, communicator, stage, variant)?,
        }
        device.record_end(&stopwatch)?;
        Ok(stopwatch)
    }

    /// Issues every step in order.
    fn issue(
        &self,
        device: &Device,
        communicator: &Communicator<'_>,
        stage: &Stage,
        variant: PassVariant,
    ) -> Result<(), StepError> {
        let mut offset = 0;
        for step in &self.steps {
            match *step {
                PassStep::Product { rows, inputs, columns } => {
                    let bytes = ((inputs * columns * 2) as usize).next_multiple_of(ALIGNMENT);
                    if offset + bytes > stage.arena.bytes() {
                        offset = 0;
                    }
                    let weights = stage.arena.pointer().plus(offset);
                    offset += bytes;
                    let Some(product) = self.products.get(&(rows, inputs, columns)) else { continue };
                    stage.cublaslt.enqueue(
                        product,
                        weights,
                        stage.inputs.pointer(),
                        stage.outputs.pointer(),
                        stage.workspace.pointer(),
                        device.stream(),
                    )?;
                }
                PassStep::Reduce { elements } => match variant {
                    PassVariant::WithoutCollectives => {}
                    PassVariant::Full => self.reduce(device, communicator, stage, elements)?,
                    PassVariant::Crowded => {
                        device.fork(&stage.side)?;
                        if let Some(product) = self.products.get(&self.crowd) {
                            stage.cublaslt.enqueue(
                                product,
                                stage.arena.pointer(),
                                stage.inputs.pointer(),
                                stage.side_outputs.pointer(),
                                stage.side_workspace.pointer(),
                                stage.side.handle(),
                            )?;
                        }
                        communicator.all_reduce_in_place(
                            stage.reduced.pointer(),
                            elements as usize,
                            DataType::Bf16,
                            device.stream(),
                        )?;
                        device.join(&stage.side)?;
                    }
                },
            }
        }
        Ok(())
    }

    fn reduce(
        &self,
        device: &Device,
        communicator: &Communicator<'_>,
        stage: &Stage,
        elements: u64,
    ) -> Result<(), StepError> {
        let stream = match self.stream {
            PassStream::Compute => device.stream(),
            PassStream::Side => {
                device.fork(&stage.side)?;
                stage.side.handle()
            }
        };
        communicator.all_reduce_in_place(stage.reduced.pointer(), elements as usize, DataType::Bf16, stream)?;
        if self.stream == PassStream::Side {
            device.join(&stage.side)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn needs_add_up() {
        let steps = [
            PassStep::Product { rows: 4, inputs: 7168, columns: 2048 },
            PassStep::Reduce { elements: 4 * 7168 },
            PassStep::Product { rows: 4, inputs: 7168, columns: 8192 },
        ];
        let needs = needs(&steps);
        assert_eq!(needs.weights, 7168 * 10_240 * 2);
        assert_eq!(needs.largest_weights, 7168 * 8192 * 2);
        assert_eq!(needs.outputs, 4 * 8192 * 2);
        assert_eq!(needs.reduced, 4 * 7168 * 2);
    }
}
