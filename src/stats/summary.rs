//! Summaries of one sample: mean, quantiles, standard deviation.

/// The arithmetic mean.
///
/// None for an empty sample, for values that are not finite, and where the sum overflows.
pub fn mean(values: &[f64]) -> Option<f64> {
    let ordered = sorted(values)?;
    mean_of_sorted(&ordered)
}

/// The median: the middle value, or the mean of the middle two.
///
/// None for an empty sample and for values that are not finite.
pub fn median(values: &[f64]) -> Option<f64> {
    quantile(values, 0.5)
}

/// The quantile at `share` (0 to 1), by linear interpolation between order statistics: type 7 of
/// Hyndman & Fan (Sample Quantiles in Statistical Packages, 1996), the default of R and NumPy.
///
/// ```text
/// h = (n - 1) share        Q = x[floor h] + (h - floor h) (x[floor h + 1] - x[floor h])
/// ```
///
/// with x sorted and counted from 0. None for an empty sample, for values that are not finite, and
/// for a share outside 0 to 1.
pub fn quantile(values: &[f64], share: f64) -> Option<f64> {
    let ordered = sorted(values)?;
    quantile_of_sorted(&ordered, share)
}

/// The sample standard deviation (divisor n - 1), in the unit of the values.
///
/// None below two values, for values that are not finite, and where a square overflows.
pub fn standard_deviation(values: &[f64]) -> Option<f64> {
    let ordered = sorted(values)?;
    standard_deviation_of_sorted(&ordered)
}

/// The values in ascending order; none if there are none or one is not finite.
pub(crate) fn sorted(values: &[f64]) -> Option<Vec<f64>> {
    if values.is_empty() || values.iter().any(|value| !value.is_finite()) {
        return None;
    }
    let mut ordered = values.to_vec();
    ordered.sort_unstable_by(f64::total_cmp);
    Some(ordered)
}

/// The mean of ascending finite values.
///
/// Summing in order makes the result independent of the order in which values arrived, bit for bit.
/// The clamp undoes rounding: the mean of three times 0.1 is 0.1, and so its deviation is 0.
pub(crate) fn mean_of_sorted(ordered: &[f64]) -> Option<f64> {
    let (first, last) = (ordered.first()?, ordered.last()?);
    let mean = ordered.iter().sum::<f64>() / ordered.len() as f64;
    mean.is_finite().then(|| mean.clamp(*first, *last))
}

/// [`quantile`] of ascending finite values.
pub(crate) fn quantile_of_sorted(ordered: &[f64], share: f64) -> Option<f64> {
    if !(0.0..=1.0).contains(&share) {
        return None;
    }
    let position = ordered.len().checked_sub(1)? as f64 * share;
    let below = *ordered.get(position.floor() as usize)?;
    let above = *ordered.get(position.ceil() as usize)?;
    let part = position.fract();
    // A weighted sum rather than below + part * (above - below), whose difference could overflow; the
    // clamp undoes the rounding that this costs.
    Some((below * (1.0 - part) + above * part).clamp(below, above))
}

/// [`standard_deviation`] of ascending finite values.
pub(crate) fn standard_deviation_of_sorted(ordered: &[f64]) -> Option<f64> {
    if ordered.len() < 2 {
        return None;
    }
    // Two passes: the textbook one-pass form loses every digit where the mean is large.
    let mean = mean_of_sorted(ordered)?;
    let squares: f64 = ordered.iter().map(|value| (value - mean).powi(2)).sum();
    let deviation = (squares / (ordered.len() - 1) as f64).sqrt();
    deviation.is_finite().then_some(deviation)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::stats::assert_close;

    #[test]
    fn hand_computed_summaries() {
        let values = [4.0, 1.0, 3.0, 2.0];
        assert_eq!(mean(&values), Some(2.5));
        assert_eq!(median(&values), Some(2.5));
        assert_eq!(median(&[3.0, 1.0, 2.0]), Some(2.0));
        assert_eq!(median(&[7.0]), Some(7.0));
        // Deviations -1.5, -0.5, 0.5, 1.5: squares sum to 5, over 3.
        assert_close(standard_deviation(&values).unwrap(), (5.0_f64 / 3.0).sqrt(), 1e-15);
    }

    #[test]
    fn quantiles_are_those_of_r_type_7() {
        // R: quantile(c(1, 2, 4, 8, 16), c(.1, .25, .5, .9)) is 1.4 2.0 4.0 12.8.
        let values = [16.0, 1.0, 8.0, 2.0, 4.0];
        for (share, expected) in [(0.0, 1.0), (0.1, 1.4), (0.25, 2.0), (0.5, 4.0), (0.9, 12.8), (1.0, 16.0)] {
            assert_close(quantile(&values, share).unwrap(), expected, 1e-12);
        }
        for share in [-0.1, 1.1, f64::NAN, f64::INFINITY] {
            assert_eq!(quantile(&values, share), None);
        }
    }

    #[test]
    fn equal_values_have_no_deviation() {
        assert_eq!(mean(&[0.1; 3]), Some(0.1));
        assert_eq!(standard_deviation(&[0.1; 3]), Some(0.0));
    }

    #[test]
    fn a_large_mean_keeps_its_deviation() {
        assert_close(standard_deviation(&[1e9 + 1.0, 1e9 + 2.0, 1e9 + 3.0]).unwrap(), 1.0, 1e-12);
    }

    #[test]
    fn no_answer_is_none() {
        for values in [&[][..], &[f64::NAN], &[1.0, f64::INFINITY], &[f64::NEG_INFINITY, 2.0, 3.0]] {
            assert_eq!(mean(values), None);
            assert_eq!(median(values), None);
            assert_eq!(quantile(values, 0.9), None);
            assert_eq!(standard_deviation(values), None);
        }
        assert_eq!(standard_deviation(&[1.0]), None);
        // Too large to sum or square, but not to find the middle of.
        assert_eq!(mean(&[f64::MAX, f64::MAX]), None);
        assert_eq!(standard_deviation(&[f64::MAX, -f64::MAX]), None);
        assert_eq!(median(&[f64::MAX, f64::MAX]), Some(f64::MAX));
    }

    proptest! {
        #[test]
        fn summaries_lie_within_the_sample(
            values in prop::collection::vec(-1e6_f64..1e6, 1..40), share in 0.0_f64..=1.0
        ) {
            let ordered = sorted(&values).unwrap();
            for summary in [mean(&values), median(&values), quantile(&values, share)] {
                let summary = summary.unwrap();
                prop_assert!(ordered[0] <= summary && summary <= ordered[ordered.len() - 1]);
            }
        }

        #[test]
        fn whatever_comes_in_no_nan_comes_out(
            values in prop::collection::vec(any::<f64>(), 0..10), share in any::<f64>()
        ) {
            for answer in [mean(&values), median(&values), quantile(&values, share), standard_deviation(&values)] {
                prop_assert!(answer.is_none_or(f64::is_finite));
            }
        }

        #[test]
        fn quantiles_rise(
            values in prop::collection::vec(-1e6_f64..1e6, 1..40), a in 0.0_f64..=1.0, b in 0.0_f64..=1.0
        ) {
            prop_assert!(quantile(&values, a.min(b)).unwrap() <= quantile(&values, a.max(b)).unwrap());
        }
    }
}
