//! Are the results right? Fresh random values per launch, checked exactly, on every rank.
//!
//! Values are small whole numbers times a power of two, so that every partial sum is exact in every type
//! whatever the order of summation: with at most 16 ranks a sum stays within ±128; bfloat16 holds whole
//! numbers to 256, fp16 to 2048, and int8 counts around its end, in any order alike. A wrong element is
//! therefore wrong in some bit, never within a tolerance.
//!
//! A timed graph chains its collectives. Where each writes the same again (results that go into a buffer
//! of their own, and whatever is only moved), the end of the chain is that of one. All-reduces in place
//! multiply by the rank count at every step; for a power of two that only moves the exponent of a
//! floating-point number, so the end of the whole chain is checked as long as it stays inside the type's
//! normal range. Everywhere else (other rank counts, whole numbers, other sums in place) one collective is
//! issued beside the timed chain and checked instead.

use rand::RngExt;

use crate::bindings::nccl::{ROOT, neighbours};
use crate::collective::{Collective, DataType, Placement};
use crate::record::PointKey;
use crate::seed::Seed;

/// Elements after which the values repeat. A prime, so that no chunk or slice boundary of NCCL's
/// lines up with it and a chunk that lands in the wrong place shows.
const PERIOD: usize = 65_521;

/// Most ranks whose sums are exact.
pub(super) const MOST_RANKS: u32 = 16;

/// Exponent of two of the values at the start of a chain, and by how much a chain may grow: bfloat16 and
/// fp32 are normal from 2^-126 to 2^127, fp16 from 2^-14 to 2^15, and a sum adds seven to its largest.
const fn range(dtype: DataType) -> (i32, u32) {
    match dtype {
        DataType::Bf16 | DataType::Fp32 => (-96, 192),
        DataType::Fp16 => (-14, 22),
        DataType::Int8 => (0, 0),
    }
}

/// What buffers are filled with before a collective writes to them, byte by byte: not a number in
/// floating point, and in int8 a number that nobody sends.
pub(super) const fn poison(dtype: DataType) -> u8 {
    if matches!(dtype, DataType::Int8) { 0x7f } else { 0xff }
}

/// Whether the end of a chain of so many collectives can be checked.
pub(super) fn chain_is_checkable(point: PointKey, collectives: u32) -> bool {
    if collectives <= 1 || point.form.placement == Placement::OutOfPlace {
        return true;
    }
    match point.collective {
        Collective::AllGather | Collective::Broadcast | Collective::SendRecv => true,
        Collective::Reduce | Collective::ReduceScatter => false,
        Collective::AllReduce => {
            point.dtype != DataType::Int8
                && point.ranks.is_power_of_two()
                && collectives * point.ranks.trailing_zeros() <= range(point.dtype).1
        }
    }
}

/// A piece of a buffer and what must stand in it: a period of values, from a place in it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Piece {
    /// Elements from the buffer's start, and how many.
    pub(super) start: usize,
    pub(super) length: usize,
    /// Whose values.
    pub(super) values: Values,
    /// The place in the period of the first of them.
    pub(super) phase: usize,
}

/// Whose values stand somewhere.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Values {
    /// What this rank sends.
    Of(u32),
    /// The sum over all ranks, after so many all-reduces in place.
    Sum {
        /// How many.
        chained: u32,
    },
}

/// One launch's values: what each rank contributes.
pub(super) struct Pattern {
    seed: u64,
    rank: u32,
    contributions: Vec<Vec<i8>>,
}

impl Pattern {
    /// The values of `rank` among `ranks`, from a seed that all ranks share.
    pub(super) fn new(data_seed: u64, rank: u32, ranks: u32) -> Self {
        let contributions = (0..ranks)
            .map(|contributor| {
                let mut random = Seed(data_seed).derive("data-check", &format!("rank-{contributor}"));
                (0..PERIOD)
                    .map(|_| {
                        // Eight magnitudes and two signs, zero left out: a rank that contributes nothing
                        // always shows.
                        let magnitude: i8 = random.random_range(1..=8);
                        if random.random::<bool>() { magnitude } else { -magnitude }
                    })
                    .collect()
            })
            .collect();
        Self { seed: data_seed, rank, contributions }
    }

    /// Other values for the same ranks: those of the n-th repeat.
    pub(super) fn repeated(&self, repeat: u32) -> Self {
        Self::new(self.seed.wrapping_add(u64::from(repeat)), self.rank, self.ranks())
    }

    /// The rank whose pattern it is.
    pub(super) const fn rank(&self) -> u32 {
        self.rank
    }

    /// Ranks that contribute.
    pub(super) fn ranks(&self) -> u32 {
        self.contributions.len() as u32
    }

    /// One period of values as they stand in memory.
    pub(super) fn period(&self, values: Values, dtype: DataType) -> Vec<u8> {
        let (start, _) = range(dtype);
        match values {
            Values::Of(rank) => {
                let own = self.contributions.get(rank as usize).map_or(&[][..], Vec::as_slice);
                own.iter().flat_map(|value| element(i32::from(*value), start, dtype).bytes()).collect()
            }
            Values::Sum { chained } => {
                let growth = chained.saturating_sub(1) * self.ranks().trailing_zeros();
                let exponent = start + growth as i32;
                let sum = |at: usize| {
                    self.contributions.iter().map(|of| of.get(at).map_or(0, |value| i32::from(*value))).sum()
                };
                (0..PERIOD).flat_map(|at| element(sum(at), exponent, dtype).bytes()).collect()
            }
        }
    }

    /// Where this rank's result stands in its receive buffer, and what it is, after a chain of `chained`
    /// all-reduces in place (1 for everything else). Nothing where the rank receives nothing.
    pub(super) fn result(&self, point: PointKey, count: usize, chained: u32) -> Vec<Piece> {
        let whole = |values| vec![Piece { start: 0, length: count, values, phase: 0 }];
        match point.collective {
            Collective::AllReduce => whole(Values::Sum { chained }),
            Collective::Reduce if self.rank == ROOT => whole(Values::Sum { chained: 1 }),
            // What is reduced elsewhere stays as it was.
            Collective::Reduce if point.form.placement == Placement::InPlace => whole(Values::Of(self.rank)),
            Collective::Reduce => Vec::new(),
            Collective::Broadcast => whole(Values::Of(ROOT)),
            Collective::SendRecv => whole(Values::Of(neighbours(self.rank, self.ranks()).1)),
            Collective::AllGather => (0..self.ranks())
                .map(|rank| Piece { start: rank as usize * count, length: count, values: Values::Of(rank), phase: 0 })
                .collect(),
            Collective::ReduceScatter => {
                let first = self.rank as usize * count;
                let start = if point.form.placement == Placement::InPlace { first } else { 0 };
                vec![Piece { start, length: count, values: Values::Sum { chained: 1 }, phase: first % PERIOD }]
            }
        }
    }
}

/// Counts wrong elements among `received`, which stand `offset` elements into a piece, against one
/// `period` of what they must be. Also returns the first wrong position in the piece.
pub(super) fn count_wrong(
    period: &[u8],
    phase: usize,
    dtype: DataType,
    received: &[u8],
    offset: usize,
) -> (u64, Option<usize>) {
    let size = dtype.size_bytes() as usize;
    let elements = received.len() / size;
    let (mut wrong, mut first) = (0, None);
    let mut position = 0;
    while position < elements {
        // Up to the end of the period at a time: equal slices compare as fast as memory reads.
        let start = (phase + offset + position) % PERIOD;
        let length = (PERIOD - start).min(elements - position);
        let got = &received[position * size..(position + length) * size];
        let wanted = &period[start * size..(start + length) * size];
        if got != wanted {
            for (index, (got, wanted)) in got.chunks_exact(size).zip(wanted.chunks_exact(size)).enumerate() {
                if got != wanted && !(is_zero(got, dtype) && is_zero(wanted, dtype)) {
                    wrong += 1;
                    first.get_or_insert(offset + position + index);
                }
            }
        }
        position += length;
    }
    (wrong, first)
}

/// +0 and -0 are the same sum: all bits but the sign are zero.
fn is_zero(element: &[u8], dtype: DataType) -> bool {
    let Some((last, others)) = element.split_last() else { return true };
    let sign = if dtype == DataType::Int8 { 0 } else { 0x80 };
    others.iter().all(|byte| *byte == 0) && last & !sign == 0
}

/// An element as it stands in memory.
#[derive(Clone, Copy)]
struct Element {
    bytes: [u8; 4],
    length: usize,
}

impl Element {
    fn bytes(self) -> impl Iterator<Item = u8> {
        self.bytes.into_iter().take(self.length)
    }
}

/// A small whole number times 2^exponent.
///
/// Exact for |value| < 256 as long as the result is a normal number; int8 counts around its end.
fn element(value: i32, exponent: i32, dtype: DataType) -> Element {
    let scaled = (f64::from(value) * 2_f64.powi(exponent)) as f32;
    let mut bytes = [0; 4];
    let length = dtype.size_bytes() as usize;
    match dtype {
        DataType::Fp32 => bytes = scaled.to_le_bytes(),
        // Whole numbers below 256 have at most eight significant bits, so nothing is cut off.
        DataType::Bf16 => bytes[..2].copy_from_slice(&((scaled.to_bits() >> 16) as u16).to_le_bytes()),
        DataType::Fp16 => bytes[..2].copy_from_slice(&half(scaled).to_le_bytes()),
        DataType::Int8 => bytes[0] = value as u8,
    }
    Element { bytes, length }
}

/// A number of at most eleven significant bits, in fp16's normal range or 0, as fp16.
fn half(value: f32) -> u16 {
    let bits = value.to_bits();
    let sign = (bits >> 16) as u16 & 0x8000;
    if bits << 1 == 0 {
        return sign;
    }
    // The exponent's bias is 15 where that of single precision is 127.
    let exponent = (bits >> 23 & 0xff) as i32 - 127 + 15;
    sign | (exponent.clamp(0, 31) as u16) << 10 | (bits >> 13 & 0x3ff) as u16
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::collective::{Form, Issue};

    fn point(collective: Collective, dtype: DataType, ranks: u32, placement: Placement) -> PointKey {
        PointKey { collective, dtype, bytes: 0, ranks, form: Form { issue: Issue::Captured, placement } }
    }

    fn value_of(element: &[u8], dtype: DataType) -> f64 {
        match (dtype, element) {
            (DataType::Fp32, [a, b, c, d]) => f64::from(f32::from_le_bytes([*a, *b, *c, *d])),
            (DataType::Bf16, [a, b]) => f64::from(f32::from_le_bytes([0, 0, *a, *b])),
            (DataType::Fp16, [a, b]) => {
                let bits = u16::from_le_bytes([*a, *b]);
                let (exponent, fraction) = (i32::from(bits >> 10 & 0x1f), f64::from(bits & 0x3ff));
                let magnitude = if exponent == 0 {
                    fraction * 2_f64.powi(-24)
                } else {
                    (1.0 + fraction / 1024.0) * 2_f64.powi(exponent - 15)
                };
                if bits >> 15 == 1 { -magnitude } else { magnitude }
            }
            (DataType::Int8, [a]) => f64::from(a.cast_signed()),
            other => panic!("{other:?}"),
        }
    }

    fn values(bytes: &[u8], dtype: DataType) -> Vec<f64> {
        bytes.chunks_exact(dtype.size_bytes() as usize).map(|element| value_of(element, dtype)).collect()
    }

    /// What a correct all-reduce leaves after a chain in place, computed in f64.
    fn reduce(patterns: &[Pattern], dtype: DataType, collectives: u32) -> Vec<f64> {
        let own: Vec<Vec<f64>> =
            patterns.iter().map(|pattern| values(&pattern.period(Values::Of(pattern.rank()), dtype), dtype)).collect();
        (0..PERIOD)
            .map(|index| {
                let sum: f64 = own.iter().map(|own| own[index]).sum();
                sum * f64::from(patterns.len() as u32).powi(collectives as i32 - 1)
            })
            .collect()
    }

    #[test]
    fn sums_of_every_type_are_exact_to_the_end_of_every_chain_that_is_checked() {
        for dtype in DataType::ALL {
            for (ranks, collectives) in [(2, 64), (2, 22), (4, 64), (4, 11), (8, 64), (16, 48), (2, 1), (3, 1), (15, 1)]
            {
                if !chain_is_checkable(point(Collective::AllReduce, dtype, ranks, Placement::InPlace), collectives) {
                    continue;
                }
                let patterns: Vec<Pattern> = (0..ranks).map(|rank| Pattern::new(7, rank, ranks)).collect();
                let expected = patterns[0].period(Values::Sum { chained: collectives }, dtype);
                assert_eq!(values(&expected, dtype), reduce(&patterns, dtype, collectives), "{dtype} over {ranks}");
                let (wrong, _) = count_wrong(&expected, 0, dtype, &expected, 0);
                assert_eq!(wrong, 0);
            }
        }
    }

    #[test]
    fn the_end_of_a_chain_is_checked_where_it_is_exact() {
        use Collective::{AllGather, AllReduce, Broadcast, Reduce, ReduceScatter, SendRecv};
        use DataType::{Bf16, Fp16, Fp32, Int8};
        use Placement::{InPlace, OutOfPlace};
        let check = |collective, dtype, ranks, placement, collectives| {
            chain_is_checkable(point(collective, dtype, ranks, placement), collectives)
        };
        assert!(check(AllReduce, Bf16, 8, InPlace, 64) && check(AllReduce, Fp32, 8, InPlace, 64));
        assert!(!check(AllReduce, Bf16, 16, InPlace, 64) && !check(AllReduce, Bf16, 6, InPlace, 2));
        assert!(check(AllReduce, Fp16, 2, InPlace, 22) && !check(AllReduce, Fp16, 2, InPlace, 23));
        assert!(!check(AllReduce, Int8, 2, InPlace, 2) && check(AllReduce, Int8, 2, InPlace, 1));
        assert!(check(AllReduce, Int8, 3, OutOfPlace, 64), "each writes the same again");
        assert!(check(AllGather, Int8, 3, InPlace, 64) && check(Broadcast, Bf16, 5, InPlace, 64));
        assert!(!check(Reduce, Bf16, 2, InPlace, 2) && !check(ReduceScatter, Bf16, 2, InPlace, 2));
        assert!(check(Reduce, Bf16, 2, OutOfPlace, 64) && check(ReduceScatter, Fp16, 7, OutOfPlace, 64));
        assert!(check(SendRecv, Fp16, 7, OutOfPlace, 64));
    }

    #[test]
    fn one_flipped_bit_a_missing_rank_and_a_shift_all_show() {
        for dtype in DataType::ALL {
            let size = dtype.size_bytes() as usize;
            let pattern = Pattern::new(7, 0, 4);
            let period = pattern.period(Values::Sum { chained: 1 }, dtype);
            let wrong = |received: &[u8]| count_wrong(&period, 0, dtype, received, 0);
            let mut flipped = period.clone();
            flipped[1234 * size] ^= 1;
            assert_eq!(wrong(&flipped), (1, Some(1234)), "{dtype}");
            // Three ranks of the same seed are the first three of four.
            let partial = Pattern::new(7, 0, 3).period(Values::Sum { chained: 1 }, dtype);
            assert_eq!(wrong(&partial).0, PERIOD as u64, "every element misses a contribution that is never zero");
            let mut shifted = period.clone();
            shifted.rotate_left(4096 * size);
            assert!(wrong(&shifted).0 > PERIOD as u64 / 2);
            // What nobody wrote to.
            assert_eq!(wrong(&vec![poison(dtype); period.len()]).0, PERIOD as u64);
        }
    }

    #[test]
    fn both_zeros_are_one_sum_and_no_other_number_is() {
        for dtype in [DataType::Bf16, DataType::Fp16, DataType::Fp32] {
            let mut negative = vec![0; dtype.size_bytes() as usize];
            assert!(is_zero(&negative, dtype));
            *negative.last_mut().unwrap() = 0x80;
            assert!(is_zero(&negative, dtype));
            negative[0] |= 1;
            assert!(!is_zero(&negative, dtype));
        }
        assert!(is_zero(&[0], DataType::Int8) && !is_zero(&[0x80], DataType::Int8));
    }

    #[test]
    fn each_rank_knows_what_it_must_receive() {
        use Collective::{AllGather, Broadcast, Reduce, ReduceScatter, SendRecv};
        use Placement::{InPlace, OutOfPlace};
        let result = |collective, placement, rank: u32| {
            Pattern::new(1, rank, 4).result(point(collective, DataType::Bf16, 4, placement), 70_000, 1)
        };
        let piece = |start, values, phase| Piece { start, length: 70_000, values, phase };
        let sum = Values::Sum { chained: 1 };
        let gathered: Vec<Piece> = (0..4).map(|rank| piece(rank * 70_000, Values::Of(rank as u32), 0)).collect();
        assert_eq!(result(AllGather, OutOfPlace, 2), gathered);
        assert_eq!(result(ReduceScatter, OutOfPlace, 2), [piece(0, sum, 140_000 % PERIOD)]);
        assert_eq!(result(ReduceScatter, InPlace, 2), [piece(140_000, sum, 140_000 % PERIOD)]);
        assert_eq!(result(Broadcast, InPlace, 3), [piece(0, Values::Of(0), 0)]);
        assert_eq!(result(SendRecv, OutOfPlace, 0), [piece(0, Values::Of(3), 0)]);
        assert_eq!(result(Reduce, OutOfPlace, 0), [piece(0, sum, 0)]);
        assert_eq!(result(Reduce, OutOfPlace, 1), []);
        assert_eq!(result(Reduce, InPlace, 1), [piece(0, Values::Of(1), 0)]);
    }

    #[test]
    fn seeds_and_ranks_differ() {
        let own = |seed, rank| Pattern::new(seed, rank, 2).period(Values::Of(rank), DataType::Int8);
        assert_ne!(own(1, 0), own(2, 0));
        assert_ne!(own(1, 0), own(1, 1));
    }
}
