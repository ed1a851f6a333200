//! From paired launches to the ratio of arm to default.
//!
//! ```text
//! d_i   = ln(arm_i) - ln(default_i)                   one per paired launch
//! ratio = exp(m)     low, high = exp(m -+ half width) m and half width of the trimmed mean of d
//! ```
//!
//! A ratio below 1 is a gain where the quantity is a time.

use super::trimmed::{Interval, trimmed};

/// The ratio of arm to default with its interval.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct RatioEstimate {
    /// The 20 % trimmed geometric mean of the paired ratios; 0.94 is 6 % less than the default.
    pub ratio: f64,
    /// Lower end of the interval.
    pub low: f64,
    /// Upper end of the interval.
    pub high: f64,
    /// Paired launches behind it, trimmed ones included.
    pub count: usize,
    /// Half the width of the interval on the log scale, where it is symmetric.
    pub half_width_log: f64,
}

impl RatioEstimate {
    /// The smallest regression that this run could have seen, as a share (0.02 is 2 %).
    ///
    /// ```text
    /// exp(half width of the log interval) - 1
    /// ```
    ///
    /// By definition the half-width: an arm truly slower by this much has even odds of an interval that
    /// lies wholly above 1. A regression smaller than this may well hide in a result that looks clean.
    pub fn smallest_visible_regression(&self) -> f64 {
        self.half_width_log.exp_m1()
    }

    /// The interval of the ratio.
    pub fn interval(&self) -> Interval {
        Interval { low: self.low, high: self.high }
    }
}

/// The log ratio of each (arm, default) pair, in the order given.
///
/// None for no pairs, and where any value is not positive and finite: a pair silently dropped would
/// change what is estimated, and whoever measured it must say what it was instead.
pub fn paired_log_ratios(pairs: &[(f64, f64)]) -> Option<Vec<f64>> {
    if pairs.is_empty() {
        return None;
    }
    // The difference of logs, because the quotient of two finite numbers may be infinite.
    pairs.iter().map(|&(arm, default)| Some(positive_log(arm)? - positive_log(default)?)).collect()
}

/// The ratio of arm to default from one (arm, default) pair per launch.
///
/// None below two pairs, where any value is not positive and finite, where the confidence is not
/// strictly between 0 and 1, and where an end of the interval is too large for a finite number.
pub fn paired_ratio(pairs: &[(f64, f64)], confidence: f64) -> Option<RatioEstimate> {
    log_ratio_estimate(&paired_log_ratios(pairs)?, confidence)
}

/// The same from log ratios, one per launch: what [`paired_log_ratios`] or
/// [`objective_log_ratios`](super::objective_log_ratios) returned.
pub fn log_ratio_estimate(log_ratios: &[f64], confidence: f64) -> Option<RatioEstimate> {
    let trimmed = trimmed(log_ratios)?;
    let half_width_log = trimmed.half_width(confidence);
    let interval = trimmed.interval(confidence);
    let estimate = RatioEstimate {
        ratio: trimmed.mean.exp(),
        low: interval.low.exp(),
        high: interval.high.exp(),
        count: trimmed.count,
        half_width_log,
    };
    let representable = estimate.high.is_finite() && estimate.smallest_visible_regression().is_finite();
    representable.then_some(estimate)
}

/// The natural logarithm of a positive finite value.
pub(crate) fn positive_log(value: f64) -> Option<f64> {
    (value > 0.0 && value.is_finite()).then(|| value.ln())
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::stats::assert_close;

    #[test]
    fn a_hand_computed_example() {
        // Log ratios ln(0.8), ln(0.9), ln(1.0): n = 3, nothing trimmed, t(2, 0.975) = 4.3027.
        let pairs = [(80.0, 100.0), (45.0, 50.0), (7.0, 7.0)];
        let found = paired_ratio(&pairs, 0.95).unwrap();
        let logs = [0.8_f64.ln(), 0.9_f64.ln(), 0.0];
        let mean = 0.72_f64.ln() / 3.0;
        let variance = logs.iter().map(|log| (log - mean).powi(2)).sum::<f64>() / 2.0;
        let half_width = 4.3027 * (variance / 3.0).sqrt();
        assert_close(found.ratio, 0.72_f64.cbrt(), 1e-14);
        assert_close(found.half_width_log, half_width, 1e-5);
        assert_close(found.low, (mean - half_width).exp(), 1e-5);
        assert_close(found.high, (mean + half_width).exp(), 1e-5);
        assert_close(found.smallest_visible_regression(), half_width.exp() - 1.0, 1e-5);
        assert_eq!(found.count, 3);
        assert!(found.interval().contains(0.9));
    }

    #[test]
    fn equal_ratios_are_certain() {
        let found = paired_ratio(&[(94.0, 100.0), (47.0, 50.0), (188.0, 200.0)], 0.95).unwrap();
        assert_close(found.ratio, 0.94, 1e-14);
        assert_close(found.smallest_visible_regression(), 0.0, 1e-13);
    }

    #[test]
    fn two_slow_launches_of_twelve_move_nothing() {
        let mut pairs: Vec<(f64, f64)> = (0..12).map(|i| (100.0 + f64::from(i), 100.0)).collect();
        let before = paired_ratio(&pairs, 0.95).unwrap();
        pairs[10].0 *= 3.0;
        pairs[11].0 *= 50.0;
        assert_eq!(paired_ratio(&pairs, 0.95), Some(before));
    }

    #[test]
    fn no_answer_is_none() {
        assert_eq!(paired_log_ratios(&[]), None);
        for wrong in [0.0, -1.0, f64::NAN, f64::INFINITY] {
            assert_eq!(paired_log_ratios(&[(1.0, 1.0), (wrong, 1.0)]), None);
            assert_eq!(paired_log_ratios(&[(1.0, wrong), (1.0, 1.0)]), None);
        }
        assert_eq!(paired_ratio(&[(1.0, 2.0)], 0.95), None);
        for confidence in [0.0, 1.0, -0.5, 2.0, f64::NAN] {
            assert_eq!(paired_ratio(&[(1.0, 2.0), (1.0, 2.0)], confidence), None);
        }
        // Each finite, but the interval is not.
        assert_eq!(paired_ratio(&[(1e300, 1e-300), (1e-300, 1e300)], 0.95), None);
    }

    fn pairs() -> impl Strategy<Value = Vec<(f64, f64)>> {
        prop::collection::vec((1.0_f64..1000.0, 1.0_f64..1000.0), 5..30)
    }

    proptest! {
        #[test]
        fn the_interval_holds_the_ratio_and_widens(pairs in pairs(), a in 0.01_f64..0.99, b in 0.01_f64..0.99) {
            let (narrow, wide) = (paired_ratio(&pairs, a.min(b)).unwrap(), paired_ratio(&pairs, a.max(b)).unwrap());
            prop_assert!(wide.low <= narrow.low && narrow.low <= narrow.ratio);
            prop_assert!(narrow.ratio <= narrow.high && narrow.high <= wide.high);
            prop_assert!(narrow.smallest_visible_regression() <= wide.smallest_visible_regression());
        }

        #[test]
        fn exchanging_the_sides_inverts_the_ratio(pairs in pairs()) {
            let exchanged: Vec<(f64, f64)> = pairs.iter().map(|&(arm, default)| (default, arm)).collect();
            let (forward, backward) = (paired_ratio(&pairs, 0.9).unwrap(), paired_ratio(&exchanged, 0.9).unwrap());
            prop_assert!((forward.ratio * backward.ratio - 1.0).abs() < 1e-9);
            prop_assert!((forward.low * backward.high - 1.0).abs() < 1e-9);
        }

        #[test]
        fn the_unit_does_not_matter(pairs in pairs(), unit in 0.001_f64..1000.0) {
            let other: Vec<(f64, f64)> = pairs.iter().map(|&(arm, default)| (arm * unit, default * unit)).collect();
            let (here, there) = (paired_ratio(&pairs, 0.9).unwrap(), paired_ratio(&other, 0.9).unwrap());
            prop_assert!((here.ratio / there.ratio - 1.0).abs() < 1e-9);
        }

        #[test]
        fn whatever_comes_in_no_nan_comes_out(
            pairs in prop::collection::vec((any::<f64>(), any::<f64>()), 0..12), confidence in any::<f64>()
        ) {
            if let Some(found) = paired_ratio(&pairs, confidence) {
                prop_assert!(found.ratio.is_finite() && found.low.is_finite() && found.high.is_finite());
            }
        }

        #[test]
        fn positive_pairs_of_any_size_never_panic(
            logs in prop::collection::vec((-700.0_f64..700.0, -700.0_f64..700.0), 2..12)
        ) {
            let pairs: Vec<(f64, f64)> = logs.iter().map(|&(arm, default)| (arm.exp(), default.exp())).collect();
            if let Some(found) = paired_ratio(&pairs, 0.95) {
                prop_assert!(found.low <= found.ratio && found.ratio <= found.high && found.high.is_finite());
            }
        }
    }
}
