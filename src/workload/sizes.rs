//! A workload of bare message sizes, for people who know their sizes and not their model.

use super::{MAX_MESSAGE_BYTES, WorkloadError, marked};
use crate::collective::{Collective, DataType};
use crate::engine::Engine;
use crate::record::{FORMAT, Point, PointPhase, Workload};

/// The most sizes one workload may hold; each costs measuring time.
pub const MAX_SIZES: usize = 64;

/// One all-reduce of each size over `ranks` GPUs, equal weights, no guard. Sizes are bytes per
/// rank, from one element of `dtype` to [`MAX_MESSAGE_BYTES`], whole elements.
///
/// A point's `batch` is its position in the list, from 1: the objective is a mean over batches, and
/// sizes that shared one would be summed, which lets the largest decide alone.
pub fn from_sizes(sizes: &[u64], ranks: u32, dtype: DataType) -> Result<Workload, WorkloadError> {
    if ranks < 2 {
        return Err(WorkloadError::TooFewRanks { ranks });
    }
    if sizes.is_empty() || sizes.len() > MAX_SIZES {
        return Err(WorkloadError::SizeCount { count: sizes.len() });
    }
    for (index, &bytes) in sizes.iter().enumerate() {
        let element = dtype.size_bytes();
        if bytes == 0 || bytes > MAX_MESSAGE_BYTES || !bytes.is_multiple_of(element) {
            return Err(WorkloadError::Size { bytes, dtype });
        }
        if sizes[..index].contains(&bytes) {
            return Err(WorkloadError::DuplicateSize { bytes });
        }
    }
    let weight = 1.0 / sizes.len() as f64;
    let points: Vec<Point> = (1..)
        .zip(sizes)
        .map(|(position, &bytes)| {
            marked(Point {
                collective: Collective::AllReduce,
                dtype,
                bytes,
                ranks,
                calls_per_pass: 1,
                batch: position,
                weight,
                phase: PointPhase::Size,
                measured: false,
                origin: "named by the user".to_owned(),
            })
        })
        .collect();
    let mut assumptions =
        vec!["sizes were named directly: one all-reduce each, all counting the same, nothing guarded".to_owned()];
    if let Some(note) = super::derive::unmeasured_dtype_note(dtype) {
        assumptions.push(note);
    }
    Ok(Workload {
        format: FORMAT,
        model: "sizes".to_owned(),
        engine: Engine::None.name().to_owned(),
        tensor_parallel: ranks,
        verify_tokens: 1,
        points,
        guard: Vec::new(),
        assumptions,
        ..Workload::default()
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_size_is_a_term_of_its_own() {
        let workload = from_sizes(&[57_344, 1 << 20], 8, DataType::Bf16).expect("valid");
        let seen: Vec<_> = workload.points.iter().map(|point| (point.batch, point.bytes, point.weight)).collect();
        assert_eq!(seen, [(1, 57_344, 0.5), (2, 1 << 20, 0.5)]);
        assert!(workload.points.iter().all(|point| point.measured && point.phase == PointPhase::Size));
        assert!(workload.guard.is_empty());
    }

    #[test]
    fn other_types_are_listed_and_not_measured() {
        let workload = from_sizes(&[4096], 2, DataType::Fp16).expect("valid");
        assert!(!workload.points[0].measured);
        assert_eq!(workload.assumptions.len(), 2);
    }

    #[test]
    fn impossible_sizes_are_refused() {
        let refused = |sizes: &[u64], ranks, dtype| from_sizes(sizes, ranks, dtype).expect_err("must be refused");
        assert_eq!(refused(&[2], 1, DataType::Bf16), WorkloadError::TooFewRanks { ranks: 1 });
        assert_eq!(refused(&[], 8, DataType::Bf16), WorkloadError::SizeCount { count: 0 });
        assert_eq!(refused(&[2; 65], 8, DataType::Bf16), WorkloadError::SizeCount { count: 65 });
        assert_eq!(refused(&[8, 8], 8, DataType::Bf16), WorkloadError::DuplicateSize { bytes: 8 });
        for (bytes, dtype) in
            [(0, DataType::Bf16), (3, DataType::Bf16), (6, DataType::Fp32), ((4 << 30) + 4, DataType::Fp32)]
        {
            assert_eq!(refused(&[bytes], 8, dtype), WorkloadError::Size { bytes, dtype });
        }
        assert!(from_sizes(&[4 << 30], 8, DataType::Fp32).is_ok());
    }
}
