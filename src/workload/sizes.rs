//! A workload of bare message sizes, for people who know their sizes and not their model.

use super::{MAX_MESSAGE_BYTES, WorkloadError, marked};
use crate::collective::{Collective, DataType, Form, Placement};
use crate::engine::Engine;
use crate::record::{FORMAT, Point, PointPhase, Workload};

/// The most sizes one workload may hold; each costs measuring time.
pub const MAX_SIZES: usize = 64;

/// What is wanted of each size.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SizesRequest {
    /// GPUs.
    pub ranks: u32,
    /// The operation.
    pub collective: Collective,
    /// The element type.
    pub dtype: DataType,
    /// Captured or eager, in place or not.
    pub form: Form,
}

/// One collective of each size, equal weights, no guard. Sizes are the larger of send and receive buffer
/// per rank, from one element for every rank to [`MAX_MESSAGE_BYTES`], whole elements.
///
/// A point's `batch` is its position in the list, from 1: the objective is a mean over batches, and
/// sizes that shared one would be summed, which lets the largest decide alone.
pub fn from_sizes(sizes: &[u64], wanted: SizesRequest) -> Result<Workload, WorkloadError> {
    let SizesRequest { ranks, collective, dtype, form } = wanted;
    if ranks < 2 {
        return Err(WorkloadError::TooFewRanks { ranks });
    }
    if sizes.is_empty() || sizes.len() > MAX_SIZES {
        return Err(WorkloadError::SizeCount { count: sizes.len() });
    }
    if form.placement == Placement::InPlace && !collective.works_in_place() {
        return Err(WorkloadError::NotInPlace { collective });
    }
    for (index, &bytes) in sizes.iter().enumerate() {
        let whole_bytes = collective.granularity_bytes(dtype, ranks);
        if bytes > MAX_MESSAGE_BYTES || collective.count(bytes, dtype, ranks).is_none() {
            return Err(WorkloadError::Size { bytes, collective, dtype, whole_bytes });
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
                collective,
                dtype,
                bytes,
                ranks,
                calls_per_pass: 1,
                batch: position,
                weight,
                phase: PointPhase::Size,
                measured: false,
                origin: "named by the user".to_owned(),
                form,
            })
        })
        .collect();
    Ok(Workload {
        format: FORMAT,
        model: "sizes".to_owned(),
        engine: Engine::None.name().to_owned(),
        tensor_parallel: ranks,
        verify_tokens: 1,
        points,
        guard: Vec::new(),
        assumptions: vec![format!(
            "sizes were named directly: one {collective} each, all counting the same, nothing guarded"
        )],
        ..Workload::default()
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const WANTED: SizesRequest = SizesRequest {
        ranks: 8,
        collective: Collective::AllReduce,
        dtype: DataType::Bf16,
        form: Form::usual(Collective::AllReduce),
    };

    #[test]
    fn each_size_is_a_term_of_its_own() {
        let workload = from_sizes(&[57_344, 1 << 20], WANTED).expect("valid");
        let seen: Vec<_> = workload.points.iter().map(|point| (point.batch, point.bytes, point.weight)).collect();
        assert_eq!(seen, [(1, 57_344, 0.5), (2, 1 << 20, 0.5)]);
        assert!(workload.points.iter().all(|point| point.measured && point.phase == PointPhase::Size));
        assert!(workload.guard.is_empty());
    }

    #[test]
    fn every_collective_and_type_is_measured_in_every_form_it_has() {
        for collective in Collective::ALL {
            for dtype in DataType::ALL {
                for placement in [Placement::InPlace, Placement::OutOfPlace] {
                    let form = Form::usual(collective).eager().placed(placement);
                    let wanted = SizesRequest { collective, dtype, form, ..WANTED };
                    match from_sizes(&[4096], wanted) {
                        Ok(workload) => assert!(workload.points[0].measured && workload.points[0].form == form),
                        Err(error) => {
                            assert_eq!(error, WorkloadError::NotInPlace { collective: Collective::SendRecv });
                        }
                    }
                }
            }
        }
    }

    #[test]
    fn impossible_sizes_are_refused() {
        let refused = |sizes: &[u64], wanted| from_sizes(sizes, wanted).expect_err("must be refused");
        assert_eq!(refused(&[2], SizesRequest { ranks: 1, ..WANTED }), WorkloadError::TooFewRanks { ranks: 1 });
        assert_eq!(refused(&[], WANTED), WorkloadError::SizeCount { count: 0 });
        assert_eq!(refused(&[2; 65], WANTED), WorkloadError::SizeCount { count: 65 });
        assert_eq!(refused(&[8, 8], WANTED), WorkloadError::DuplicateSize { bytes: 8 });
        let single = SizesRequest { dtype: DataType::Fp32, ..WANTED };
        let gathered = SizesRequest { collective: Collective::AllGather, form: Form::default(), ..WANTED };
        for (bytes, wanted, whole_bytes) in [
            (0, WANTED, 2),
            (3, WANTED, 2),
            (6, single, 4),
            ((4 << 30) + 4, single, 4),
            (4096 + 2, gathered, 16),
            (8, gathered, 16),
        ] {
            let SizesRequest { collective, dtype, .. } = wanted;
            assert_eq!(refused(&[bytes], wanted), WorkloadError::Size { bytes, collective, dtype, whole_bytes });
        }
        assert!(from_sizes(&[4 << 30], single).is_ok());
        assert!(from_sizes(&[16], gathered).is_ok());
    }
}
