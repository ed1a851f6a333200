//! How much could be seen: noise floor, launches needed, repeated looks.
//!
//! All of it applies one formula to launches that have not happened yet:
//!
//! ```text
//! half width = t(df_n, (1 + confidence) / 2) spread / sqrt(n)          df_n = n - 2 floor(n / 5) - 1
//! ```
//!
//! where the spread is what [`Trimmed::spread`](super::Trimmed::spread) found for one value in an
//! earlier sample, so that for that sample's own n this is exactly its half-width.

use super::ratio::positive_log;
use super::student::two_sided_quantile;
use super::trimmed::{degrees_of_freedom, trimmed};

/// Half the width that the interval of a trimmed mean is expected to have after `launches` launches,
/// in the unit of the spread.
///
/// None below two launches, for a spread that is negative or not finite, and where the confidence is
/// not strictly between 0 and 1.
pub fn planned_half_width(spread: f64, launches: usize, confidence: f64) -> Option<f64> {
    let quantile = two_sided_quantile(confidence, degrees_of_freedom(launches) as f64);
    let half_width = quantile * spread / (launches as f64).sqrt();
    (spread >= 0.0 && quantile.is_finite() && half_width.is_finite()).then_some(half_width)
}

/// The noise floor: half the width of an interval of default against default after `launches` paired
/// launches, as a share (0.012 is 1.2 %). A difference below it is not worth looking at.
///
/// ```text
/// exp(t(df_n, (1 + confidence) / 2) sqrt(2) spread / sqrt(n)) - 1
/// ```
///
/// with the spread (Yuen) of the logs of the default's medians, one per launch. The root of 2 is for a
/// difference of two independent launches. Pairs cancel slow drift and this does not know pairs, so
/// on a machine that drifts the floor is higher than what the paired intervals achieve.
///
/// None below two launches on either side, where a median is not positive and finite, and where the
/// confidence is not strictly between 0 and 1.
pub fn noise_floor(default_launches: &[f64], launches: usize, confidence: f64) -> Option<f64> {
    let logs: Vec<f64> = default_launches.iter().map(|&median| positive_log(median)).collect::<Option<_>>()?;
    let spread = std::f64::consts::SQRT_2 * trimmed(&logs)?.spread();
    let floor = planned_half_width(spread, launches, confidence)?.exp_m1();
    floor.is_finite().then_some(floor)
}

/// The fewest paired launches, `fewest` to `most`, whose interval is expected to have at most the
/// target half-width; `most` where none does.
///
/// `paired_log_spread` is the [`Trimmed::spread`](super::Trimmed::spread) of paired log ratios seen so
/// far, or the root of 2 times that of one arm's log medians. The target is on the log scale too:
/// for the few per cent in question, a share. Half-widths scatter around their expectation, so about
/// every second run of exactly this many launches misses the target by a little.
///
/// A spread or target that makes no sense asks for `most`, the answer that risks time and no verdict.
pub fn launches_needed(paired_log_spread: f64, target_half_width: f64, confidence: f64, fewest: u32, most: u32) -> u32 {
    (fewest..most)
        .find(|&launches| {
            planned_half_width(paired_log_spread, launches as usize, confidence)
                .is_some_and(|half_width| half_width <= target_half_width)
        })
        .unwrap_or(most)
}

/// The confidence that each single look needs, so that all looks together keep the base confidence.
///
/// ```text
/// 1 - (1 - base) / looks        (Bonferroni; Dunn, JASA 56, 1961)
/// ```
///
/// Right for any dependence between looks, which successive looks at one growing sample have plenty
/// of. No look counts as one. A base that is not strictly between 0 and 1 gives 1, at which every
/// interval of this module is infinite or none: nonsense must not show anything.
pub fn sequential_confidence(base: f64, looks: u32) -> f64 {
    if base > 0.0 && base < 1.0 { 1.0 - (1.0 - base) / f64::from(looks.max(1)) } else { 1.0 }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::stats::assert_close;

    #[test]
    fn a_plan_for_the_launches_at_hand_is_their_interval() {
        let values = [0.01, -0.02, 0.03, 0.0, 0.015, -0.01, 0.2, 0.005, -0.015, 0.02, 0.01, -0.03];
        let found = trimmed(&values).unwrap();
        assert_close(planned_half_width(found.spread(), 12, 0.95).unwrap(), found.half_width(0.95), 1e-15);
        // t(7, 0.975) = 2.3646.
        assert_close(planned_half_width(0.03, 12, 0.95).unwrap(), 2.3646 * 0.03 / 12.0_f64.sqrt(), 1e-6);
    }

    #[test]
    fn the_noise_floor_by_hand() {
        // Logs -0.02, 0, 0.02: spread 0.02; for pairs 0.02 sqrt 2; at 12 launches t(7, 0.975) = 2.3646.
        let medians = [(-0.02_f64).exp() * 50.0, 50.0, 0.02_f64.exp() * 50.0];
        let expected = (2.3646 * 0.02 * (2.0_f64 / 12.0).sqrt()).exp() - 1.0;
        assert_close(noise_floor(&medians, 12, 0.95).unwrap(), expected, 1e-6);
        assert_close(noise_floor(&[50.0; 4], 12, 0.95).unwrap(), 0.0, 1e-15);
    }

    #[test]
    fn more_noise_needs_more_launches() {
        // sqrt(2) x 1.8 %: 12 launches give t 2.3646 x 0.02546 / sqrt 12 = 0.01738.
        let spread = 0.018 * std::f64::consts::SQRT_2;
        assert_eq!(launches_needed(spread, 0.0174, 0.95, 6, 24), 12);
        assert_eq!(launches_needed(0.001, 0.01, 0.95, 6, 24), 6);
        assert_eq!(launches_needed(0.0, 0.01, 0.95, 6, 24), 6);
        assert_eq!(launches_needed(0.2, 0.01, 0.95, 6, 24), 24);
    }

    #[test]
    fn a_plan_for_nonsense_is_the_longest() {
        for spread in [f64::NAN, -1.0, f64::INFINITY] {
            assert_eq!(launches_needed(spread, 0.01, 0.95, 6, 24), 24);
            assert_eq!(planned_half_width(spread, 12, 0.95), None);
        }
        for target in [f64::NAN, -1.0] {
            assert_eq!(launches_needed(0.02, target, 0.95, 6, 24), 24);
        }
        assert_eq!(launches_needed(0.02, 1.0, f64::NAN, 6, 24), 24);
        assert_eq!(launches_needed(0.02, 1.0, 0.95, 9, 6), 6);
        // One launch has no interval, however wide the target.
        assert_eq!(launches_needed(0.02, f64::INFINITY, 0.95, 0, 24), 2);
        assert_eq!(noise_floor(&[], 12, 0.95), None);
        assert_eq!(noise_floor(&[50.0], 12, 0.95), None);
        assert_eq!(noise_floor(&[50.0, 51.0], 1, 0.95), None);
        assert_eq!(noise_floor(&[50.0, -51.0], 12, 0.95), None);
        assert_eq!(noise_floor(&[50.0, f64::NAN], 12, 0.95), None);
        assert_eq!(noise_floor(&[50.0, 51.0], 12, 1.0), None);
    }

    #[test]
    fn looks_share_the_error() {
        assert_close(sequential_confidence(0.95, 1), 0.95, 1e-15);
        assert_close(sequential_confidence(0.95, 0), 0.95, 1e-15);
        assert_close(sequential_confidence(0.95, 5), 0.99, 1e-15);
        for nonsense in [0.0, 1.0, -1.0, 7.0, f64::NAN] {
            assert_close(sequential_confidence(nonsense, 3), 1.0, 0.0);
        }
        assert!(sequential_confidence(0.95, u32::MAX) < 1.0);
    }

    proptest! {
        #[test]
        fn the_answer_is_in_range_and_enough(
            spread in 0.0_f64..0.2, target in 0.001_f64..0.1, fewest in 2_u32..10, more in 0_u32..20
        ) {
            let most = fewest + more;
            let launches = launches_needed(spread, target, 0.95, fewest, most);
            prop_assert!((fewest..=most).contains(&launches));
            let enough = planned_half_width(spread, launches as usize, 0.95).unwrap() <= target;
            prop_assert!(enough || launches == most);
        }

        #[test]
        fn no_nan_comes_out(
            values in prop::collection::vec(any::<f64>(), 0..8), launches in 0_usize..30, share in any::<f64>()
        ) {
            prop_assert!(noise_floor(&values, launches, share).is_none_or(f64::is_finite));
            prop_assert!((0.0..=1.0).contains(&sequential_confidence(share, 3)));
        }
    }
}
