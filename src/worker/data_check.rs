//! Is the sum right? Fresh random values per launch, checked exactly, on every rank.
//!
//! Values are small whole numbers times a power of two, so that every partial sum is exact in
//! bfloat16 whatever the order of summation: with at most 16 ranks a sum stays within ±128, and
//! bfloat16 holds whole numbers to 256. A wrong element is therefore wrong in some bit, never within
//! a tolerance.
//!
//! The timed graph chains its all-reduces in place. Each further one multiplies by the rank count;
//! for a power of two that only moves the exponent, so the end of the whole timed chain is checked.
//! The values start at 2^-96 and a chain may grow by at most 2^192, which keeps every element inside
//! bfloat16's normal range (2^-126 to 2^127). For other rank counts a chain rounds, so one all-reduce
//! is captured beside the timed graph and checked instead.

use rand::RngExt;

use crate::seed::Seed;

/// Elements after which the values repeat. A prime, so that no chunk or slice boundary of NCCL's
/// lines up with it and a chunk that lands in the wrong place shows.
const PERIOD: usize = 65_521;

/// Exponent of two of the values at the start of a chain.
const START_EXPONENT: i32 = -96;

/// Largest growth of a chain, as an exponent of two.
const LARGEST_GROWTH: u32 = 192;

/// Most ranks whose sums are exact.
pub(super) const MOST_RANKS: u32 = 16;

/// Whether a chain of this many all-reduces over this many ranks can be checked at its end.
pub(super) fn chain_is_checkable(ranks: u32, collectives: u32) -> bool {
    ranks.is_power_of_two() && collectives * ranks.trailing_zeros() <= LARGEST_GROWTH
}

/// One launch's values: what each rank contributes, and what the sum must be.
pub(super) struct Pattern {
    own: Vec<u16>,
    sums: Vec<i32>,
    ranks: u32,
}

impl Pattern {
    /// The values of `rank` among `ranks`, from a seed that all ranks share.
    pub(super) fn new(data_seed: u64, rank: u32, ranks: u32) -> Self {
        let mut own = Vec::with_capacity(PERIOD);
        let mut sums = vec![0; PERIOD];
        for contributor in 0..ranks {
            let mut random = Seed(data_seed).derive("data-check", &format!("rank-{contributor}"));
            for sum in &mut sums {
                // Eight magnitudes and two signs, zero left out: a rank that contributes nothing
                // always shows.
                let magnitude = random.random_range(1..=8);
                let value = if random.random::<bool>() { magnitude } else { -magnitude };
                *sum += value;
                if contributor == rank {
                    own.push(bf16(value, START_EXPONENT));
                }
            }
        }
        Self { own, sums, ranks }
    }

    /// This rank's values as they go to the GPU, one period.
    pub(super) fn own(&self) -> &[u16] {
        &self.own
    }

    /// Counts wrong elements among `received`, which starts `offset` elements into the buffer, after
    /// a chain of `collectives` all-reduces. Also returns the first wrong position.
    pub(super) fn count_wrong(&self, received: &[u16], offset: usize, collectives: u32) -> (u64, Option<usize>) {
        let growth = (collectives - 1) * self.ranks.trailing_zeros();
        let exponent = START_EXPONENT + growth as i32;
        let expected: Vec<u16> = self.sums.iter().map(|sum| bf16(*sum, exponent)).collect();
        let mut wrong = 0;
        let mut first = None;
        let mut position = 0;
        while position < received.len() {
            // Up to the end of the period at a time: equal slices compare as fast as memory reads.
            let start = (offset + position) % PERIOD;
            let length = (PERIOD - start).min(received.len() - position);
            let (got, wanted) = (&received[position..position + length], &expected[start..start + length]);
            if got != wanted {
                for (index, (element, wanted)) in got.iter().zip(wanted).enumerate() {
                    // +0 and -0 are the same sum: all bits but the sign are zero.
                    let both_zero = wanted << 1 == 0 && element << 1 == 0;
                    if element != wanted && !both_zero {
                        wrong += 1;
                        first.get_or_insert(offset + position + index);
                    }
                }
            }
            position += length;
        }
        (wrong, first)
    }
}

/// A small whole number times 2^exponent as bfloat16 (the upper half of an IEEE single).
///
/// Exact for |value| < 256 as long as the result is a normal number.
fn bf16(value: i32, exponent: i32) -> u16 {
    let scaled = f64::from(value) * 2_f64.powi(exponent);
    // Whole numbers below 256 have at most eight significant bits, so neither step rounds.
    ((scaled as f32).to_bits() >> 16) as u16
}

#[cfg(test)]
mod tests {
    use super::*;

    fn value_of(bits: u16) -> f64 {
        f64::from(f32::from_bits(u32::from(bits) << 16))
    }

    /// What a correct all-reduce leaves after a chain, computed in f64 and rounded to bfloat16.
    fn reduce(patterns: &[Pattern], collectives: u32) -> Vec<u16> {
        (0..PERIOD)
            .map(|index| {
                let sum: f64 = patterns.iter().map(|pattern| value_of(pattern.own()[index])).sum();
                let grown = sum * f64::from(patterns.len() as u32).powi(collectives as i32 - 1);
                ((grown as f32).to_bits() >> 16) as u16
            })
            .collect()
    }

    #[test]
    fn a_right_sum_passes_on_every_rank_count_that_chains() {
        for (ranks, collectives) in [(2, 64), (4, 64), (8, 64), (16, 48), (2, 1), (3, 1), (6, 1)] {
            assert!(collectives == 1 || chain_is_checkable(ranks, collectives));
            let patterns: Vec<Pattern> = (0..ranks).map(|rank| Pattern::new(7, rank, ranks)).collect();
            let result = reduce(&patterns, collectives);
            for pattern in &patterns {
                assert_eq!(pattern.count_wrong(&result, 0, collectives), (0, None), "{ranks} ranks");
            }
        }
    }

    #[test]
    fn one_flipped_bit_a_missing_rank_and_a_shift_all_show() {
        let patterns: Vec<Pattern> = (0..4).map(|rank| Pattern::new(7, rank, 4)).collect();
        let mut result = reduce(&patterns, 64);
        result[1234] ^= 1;
        assert_eq!(patterns[0].count_wrong(&result, 0, 64), (1, Some(1234)));

        let partial = reduce(&patterns[..3], 1);
        let (wrong, _) = patterns[0].count_wrong(&partial, 0, 1);
        assert_eq!(wrong, PERIOD as u64, "every element misses a contribution that is never zero");

        let mut shifted = reduce(&patterns, 64);
        shifted.rotate_left(4096);
        assert!(patterns[0].count_wrong(&shifted, 0, 64).0 > PERIOD as u64 / 2);
    }

    #[test]
    fn seeds_differ_and_chains_that_would_leave_the_range_are_known() {
        assert_ne!(Pattern::new(1, 0, 2).own(), Pattern::new(2, 0, 2).own());
        assert!(!chain_is_checkable(16, 64));
        assert!(!chain_is_checkable(6, 2));
    }
}
