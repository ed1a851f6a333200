//! Whether a quantity moved while the run went on.
//!
//! ```text
//! launches in order   | first third | ............ | last third |        thirds of floor(n / 3)
//!                        m1, se1                       m2, se2            trimmed means of the logs
//!
//! t  = (m2 - m1) / sqrt(se1^2 + se2^2)
//! df = (se1^2 + se2^2)^2 / (se1^4 / df1 + se2^4 / df2)
//! ```
//!
//! Yuen's two-sample test (Biometrika 61, 1974): Welch's test on trimmed means. The middle third is
//! left out on purpose: a slow drift shows most between the ends.

use super::ratio::positive_log;
use super::student::two_sided_quantile;
use super::trimmed::trimmed;

/// The confidence at which a drift counts as beyond noise: one false alarm in a hundred steady series.
///
/// High, because it is asked of several quantities in every run.
pub const DRIFT_CONFIDENCE: f64 = 0.99;

/// The fewest launches whose thirds have an interval.
const FEWEST: usize = 6;

/// What changed between the first and the last third of a series.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Drift {
    /// Last third over first third; 1.03 is 3 % more at the end.
    pub ratio: f64,
    /// Half the width of its interval on the log scale, at [`DRIFT_CONFIDENCE`].
    pub half_width_log: f64,
    /// Whether that interval excludes no change.
    pub beyond_noise: bool,
}

/// Compares the last third of a series with the first. Values in the order in which they were measured,
/// for instance the default's median of each launch.
///
/// A finding of "not beyond noise" is weak where launches are few: with 12 launches and 1.8 % of noise
/// a drift of 5 % is seen every second time. The half-width says how weak.
///
/// None below six values, where one is not positive and finite, and where the ratio is too large for a
/// finite number.
pub fn drift(values: &[f64]) -> Option<Drift> {
    if values.len() < FEWEST {
        return None;
    }
    let logs: Vec<f64> = values.iter().map(|&value| positive_log(value)).collect::<Option<_>>()?;
    let third = logs.len() / 3;
    let first = trimmed(logs.get(..third)?)?;
    let last = trimmed(logs.get(logs.len() - third..)?)?;

    let change = last.mean - first.mean;
    let half_width_log = welch_half_width(
        [first.standard_error, last.standard_error],
        [first.degrees_of_freedom as f64, last.degrees_of_freedom as f64],
    );
    let ratio = change.exp();
    (ratio.is_finite() && half_width_log.is_finite()).then_some(Drift {
        ratio,
        half_width_log,
        beyond_noise: change.abs() > half_width_log,
    })
}

fn welch_half_width(standard_errors: [f64; 2], degrees_of_freedom: [f64; 2]) -> f64 {
    let largest = standard_errors[0].max(standard_errors[1]);
    if largest <= 0.0 {
        // Two constant thirds: any change at all is a change.
        return 0.0;
    }
    // Relative to the larger one, so that fourth powers neither vanish nor overflow.
    let [first, last] = standard_errors.map(|error| (error / largest).powi(2));
    let degrees =
        (first + last).powi(2) / (first.powi(2) / degrees_of_freedom[0] + last.powi(2) / degrees_of_freedom[1]);
    two_sided_quantile(DRIFT_CONFIDENCE, degrees) * largest * (first + last).sqrt()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::stats::assert_close;

    #[test]
    fn a_hand_computed_example() {
        // Thirds of two logs: (0, 0.02) and (0.1, 0.12). Each: mean, sd 0.02 / sqrt 2, se 0.01, df 1.
        // Equal errors: df = 4 / (1 + 1) = 2; t(2, 0.995) = 9.9248; half width 9.9248 x 0.01 sqrt 2.
        let logs: [f64; 6] = [0.0, 0.02, 5.0, -5.0, 0.1, 0.12];
        let found = drift(&logs.map(f64::exp)).unwrap();
        assert_close(found.ratio, 0.1_f64.exp(), 1e-14);
        assert_close(found.half_width_log, 9.9248 * 0.01 * 2.0_f64.sqrt(), 1e-5);
        assert!(!found.beyond_noise);
    }

    #[test]
    fn a_clear_drift_is_seen_and_a_steady_series_is_not() {
        let wobble = [0.2, -0.1, 0.0, 0.15, -0.2, 0.05, -0.05, 0.1, -0.15, 0.0, 0.1, -0.1];
        let steady = wobble.map(|step| 100.0 + step);
        assert!(!drift(&steady).unwrap().beyond_noise);
        let mut drifting = steady;
        for (position, value) in drifting.iter_mut().enumerate() {
            *value += position as f64 / 2.0;
        }
        let found = drift(&drifting).unwrap();
        assert!(found.beyond_noise);
        assert_close(found.ratio, 1.04, 0.005);
    }

    #[test]
    fn constant_thirds() {
        assert!(!drift(&[0.1; 9]).unwrap().beyond_noise);
        let step = drift(&[2.0, 2.0, 2.0, 9.0, 9.0, 9.0, 3.0, 3.0, 3.0]).unwrap();
        assert!(step.beyond_noise);
        assert_close(step.ratio, 1.5, 1e-14);
        // One constant third leaves the degrees of freedom of the other.
        let half = drift(&[2.0, 2.0, 2.0, 2.9, 3.0, 3.1]).unwrap();
        assert!(half.half_width_log > 0.0);
    }

    #[test]
    fn no_answer_is_none() {
        assert_eq!(drift(&[]), None);
        assert_eq!(drift(&[1.0; 5]), None);
        for wrong in [0.0, -1.0, f64::NAN, f64::INFINITY] {
            assert_eq!(drift(&[1.0, 1.0, wrong, 1.0, 1.0, 1.0]), None);
        }
    }

    proptest! {
        #[test]
        fn reversing_the_series_inverts_the_ratio(values in prop::collection::vec(1.0_f64..100.0, 6..40)) {
            let mut reversed = values.clone();
            reversed.reverse();
            let (forward, backward) = (drift(&values).unwrap(), drift(&reversed).unwrap());
            prop_assert!((forward.ratio * backward.ratio - 1.0).abs() < 1e-9);
            prop_assert!((forward.half_width_log - backward.half_width_log).abs() < 1e-9);
        }

        #[test]
        fn no_nan_comes_out(values in prop::collection::vec(0.0_f64..f64::MAX, 0..12)) {
            if let Some(found) = drift(&values) {
                prop_assert!(found.ratio.is_finite() && found.half_width_log.is_finite());
            }
        }
    }
}
