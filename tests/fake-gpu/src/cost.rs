//! How long things take, in nanoseconds of a clock that exists nowhere.
//!
//! The figures are invented. They have the shape of real ones (more channels help larger messages, LL
//! starts earlier and carries less), so that a search has something to find, and say nothing about
//! NCCL's speed.

use crate::choice::Choice;
use crate::function::Function;

/// Bytes a nanosecond that a GPU's memory moves.
const MEMORY_BANDWIDTH: f64 = 3000.0;
/// Bytes a nanosecond between host and GPU.
const HOST_BANDWIDTH: f64 = 25.0;
/// What a kernel takes that does nothing.
const KERNEL_NS: f64 = 1500.0;
/// What issuing an operation costs where no graph replays it.
pub(crate) const EAGER_NS: f64 = 2000.0;
/// What starting a graph costs.
pub(crate) const GRAPH_NS: f64 = 2500.0;
/// What the event costs that graph mixing adds behind every captured collective.
pub(crate) const EVENT_NODE_NS: f64 = 1000.0;

/// An all-reduce.
pub(crate) fn all_reduce_ns(choice: Choice, bytes: u64, ranks: u32, direct: bool) -> f64 {
    // First latency and latency per hop in nanoseconds; bytes a nanosecond per channel, and all in all.
    let (first, hop, per_channel, at_most) =
        [(4000.0, 1200.0, 1.6, 9.0), (6000.0, 1600.0, 3.0, 15.0), (9000.0, 2500.0, 5.0, 25.0)][choice.protocol.min(2)];
    let hops = f64::from(ranks.max(2) - 1);
    // A tree climbs fewer steps and moves less at a time.
    let (steps, share) =
        if choice.algorithm == crate::choice::TREE { (2.0 * hops.log2().max(1.0), 0.7) } else { (hops, 1.0) };
    let (latency_scale, bandwidth_scale) = if direct { (0.6, 8.0) } else { (1.0, 1.0) };
    let channels = f64::from(choice.channels.max(1));
    let bandwidth = (channels * per_channel).min(at_most) * share * bandwidth_scale * (hops + 1.0) / (2.0 * hops);
    (first + hop * steps) * latency_scale + 30.0 * channels + bytes as f64 / bandwidth
}

/// Any collective whose larger buffer has so many bytes, by its traffic beside that of an all-reduce.
pub(crate) fn collective_ns(function: Function, choice: Choice, bytes: u64, ranks: u32, direct: bool) -> f64 {
    let share = match function {
        Function::AllReduce => 1.0,
        Function::AllGather | Function::ReduceScatter => 0.5,
        Function::Broadcast | Function::Reduce => 0.6,
        // One hop, whatever the number of ranks.
        Function::SendRecv => return all_reduce_ns(choice, bytes, 2, direct) * 0.6,
    };
    all_reduce_ns(choice, bytes, ranks, direct) * share
}

/// A copy inside a GPU's memory.
pub(crate) fn copy_ns(bytes: usize) -> f64 {
    KERNEL_NS + 2.0 * bytes as f64 / MEMORY_BANDWIDTH
}

/// A copy between host and GPU.
pub(crate) fn host_copy_ns(bytes: usize) -> f64 {
    KERNEL_NS + bytes as f64 / HOST_BANDWIDTH
}

/// A product of matrices that is limited by memory.
pub(crate) fn product_ns(bytes: u64) -> f64 {
    KERNEL_NS + bytes as f64 / MEMORY_BANDWIDTH
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::choice::RING;

    fn ring(protocol: usize, channels: u32) -> Choice {
        Choice { algorithm: RING, protocol, channels, threads: 512 }
    }

    #[test]
    fn there_is_something_to_find() {
        let time = |choice, bytes| all_reduce_ns(choice, bytes, 2, false);
        assert!(time(ring(0, 4), 43_008) > 1.1 * time(ring(0, 8), 43_008), "channels help");
        assert!(time(ring(0, 1), 4096) < time(ring(2, 1), 4096), "LL starts earlier");
        assert!(time(ring(0, 32), 1 << 24) > time(ring(2, 32), 1 << 24), "Simple carries more");
        assert!(all_reduce_ns(ring(0, 4), 43_008, 8, false) > time(ring(0, 4), 43_008), "more ranks take longer");
        assert!(all_reduce_ns(ring(0, 4), 43_008, 2, true) < time(ring(0, 4), 43_008), "direct links are faster");
    }
}
