//! Weighted combination over batches: the objective.
//!
//! ```text
//! G = exp( sum of w_b ln(v_b)  /  sum of w_b )
//! ```
//!
//! A geometric mean, so that a gain of 10 % counts the same at every batch, however long its passes are,
//! and the mean of ratios is the ratio of means.

use super::ratio::positive_log;

/// The weighted geometric mean of (value, weight) pairs, in the unit of the values.
///
/// None where nothing has weight, where a value is not positive and finite, and where a weight is
/// negative or not finite. A value of weight 0 must be sound too: it is a mistake, not a way to hide one.
pub fn weighted_geometric_mean(weighted: &[(f64, f64)]) -> Option<f64> {
    let logs: Vec<(f64, f64)> =
        weighted.iter().map(|&(value, weight)| Some((positive_log(value)?, weight))).collect::<Option<_>>()?;
    let mean = weighted_mean(logs.iter().copied())?.exp();
    mean.is_finite().then_some(mean)
}

/// The objective's log ratio for each paired launch, from that launch's log ratio for each batch.
///
/// ```text
/// d_i = sum of w_b d_ib / sum of w_b
/// ```
///
/// `launches` holds one list per launch with one log ratio per batch, in the order of `weights`. The
/// batches are combined inside a launch, before anything is trimmed or averaged: what made a launch slow
/// made it slow for every batch, and batches of one launch are no independent repetitions. The
/// result goes to [`log_ratio_estimate`](super::log_ratio_estimate).
///
/// None for no launches, for a launch with more or fewer batches than weights, for log ratios that are
/// not finite, where nothing has weight, and where a weight is negative or not finite.
pub fn objective_log_ratios<Launch: AsRef<[f64]>>(launches: &[Launch], weights: &[f64]) -> Option<Vec<f64>> {
    if launches.is_empty() {
        return None;
    }
    launches
        .iter()
        .map(|launch| {
            let batches = launch.as_ref();
            let complete = batches.len() == weights.len();
            if complete { weighted_mean(batches.iter().copied().zip(weights.iter().copied())) } else { None }
        })
        .collect()
}

/// The weighted arithmetic mean of finite values with weights of at least 0, not all of them 0.
fn weighted_mean(weighted: impl Iterator<Item = (f64, f64)>) -> Option<f64> {
    let (mut sum, mut total) = (0.0, 0.0);
    for (value, weight) in weighted {
        if !value.is_finite() || !weight.is_finite() || weight < 0.0 {
            return None;
        }
        sum += value * weight;
        total += weight;
    }
    let mean = sum / total;
    (total > 0.0 && total.is_finite() && mean.is_finite()).then_some(mean)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::stats::{assert_close, log_ratio_estimate};

    #[test]
    fn hand_computed_means() {
        assert_close(weighted_geometric_mean(&[(2.0, 1.0), (8.0, 1.0)]).unwrap(), 4.0, 1e-14);
        // (2^3 x 32)^(1/4) = 4.
        assert_close(weighted_geometric_mean(&[(2.0, 0.75), (32.0, 0.25)]).unwrap(), 4.0, 1e-14);
        assert_close(weighted_geometric_mean(&[(5.0, 0.1), (7.0, 0.0)]).unwrap(), 5.0, 1e-14);
    }

    #[test]
    fn batches_combine_inside_a_launch() {
        let launches = [[0.9_f64.ln(), 0.8_f64.ln()], [1.0_f64.ln(), 0.81_f64.ln()]];
        let combined = objective_log_ratios(&launches, &[1.0, 1.0]).unwrap();
        assert_close(combined[0].exp(), 0.72_f64.sqrt(), 1e-14);
        assert_close(combined[1].exp(), 0.9, 1e-14);
        let estimate = log_ratio_estimate(&combined, 0.95).unwrap();
        assert_close(estimate.ratio, (0.72_f64.sqrt() * 0.9).sqrt(), 1e-14);
        assert_eq!(estimate.count, 2);
    }

    #[test]
    fn no_answer_is_none() {
        assert_eq!(weighted_geometric_mean(&[]), None);
        assert_eq!(weighted_geometric_mean(&[(1.0, 0.0)]), None);
        for wrong in [0.0, -1.0, f64::NAN, f64::INFINITY] {
            assert_eq!(weighted_geometric_mean(&[(1.0, 1.0), (wrong, 0.0)]), None);
        }
        for wrong in [-1.0, f64::NAN, f64::INFINITY] {
            assert_eq!(weighted_geometric_mean(&[(1.0, 2.0), (1.0, wrong)]), None);
        }
        assert_eq!(objective_log_ratios::<[f64; 1]>(&[], &[1.0]), None);
        assert_eq!(objective_log_ratios(&[vec![0.1], vec![0.1, 0.2]], &[1.0]), None);
        assert_eq!(objective_log_ratios(&[[f64::NAN]], &[1.0]), None);
        assert_eq!(objective_log_ratios(&[[0.1]], &[0.0]), None);
    }

    fn weighted() -> impl Strategy<Value = Vec<(f64, f64)>> {
        prop::collection::vec((0.01_f64..1000.0, 0.01_f64..10.0), 1..10)
    }

    proptest! {
        #[test]
        fn the_mean_lies_among_the_values(weighted in weighted()) {
            let mean = weighted_geometric_mean(&weighted).unwrap();
            let low = weighted.iter().map(|pair| pair.0).fold(f64::INFINITY, f64::min);
            let high = weighted.iter().map(|pair| pair.0).fold(0.0, f64::max);
            prop_assert!(low * (1.0 - 1e-12) <= mean && mean <= high * (1.0 + 1e-12));
        }

        #[test]
        fn only_the_proportions_of_weights_matter(weighted in weighted(), factor in 0.01_f64..100.0) {
            let other: Vec<(f64, f64)> = weighted.iter().map(|&(value, weight)| (value, weight * factor)).collect();
            let (here, there) = (weighted_geometric_mean(&weighted).unwrap(), weighted_geometric_mean(&other).unwrap());
            prop_assert!((here / there - 1.0).abs() < 1e-10);
        }

        #[test]
        fn the_mean_of_ratios_is_the_ratio_of_means(
            batches in prop::collection::vec((1.0_f64..100.0, 1.0_f64..100.0, 0.1_f64..5.0), 1..8)
        ) {
            let of = |pick: fn(&(f64, f64, f64)) -> f64| {
                let values: Vec<(f64, f64)> = batches.iter().map(|batch| (pick(batch), batch.2)).collect();
                weighted_geometric_mean(&values).unwrap()
            };
            let ratio = of(|batch| batch.0 / batch.1);
            prop_assert!((ratio / (of(|batch| batch.0) / of(|batch| batch.1)) - 1.0).abs() < 1e-10);
        }

        #[test]
        fn no_nan_comes_out(weighted in prop::collection::vec((any::<f64>(), any::<f64>()), 0..6)) {
            prop_assert!(weighted_geometric_mean(&weighted).is_none_or(f64::is_finite));
        }
    }
}
