//! Outliers, labelled and never dropped.
//!
//! ```text
//!   severe    |    mild     |         inside         |    mild     |   severe
//! ------------o-------------o--------|======|--------o-------------o------------>
//!        Q1 - 3 IQR   Q1 - 1.5 IQR   Q1     Q3   Q3 + 1.5 IQR   Q3 + 3 IQR
//! ```
//!
//! Tukey's fences (Exploratory Data Analysis, 1977), with quartiles of type 7. A value on a fence is
//! inside it. The labels are for the reader of a report: many severe ones say that the machine was
//! not quiet. What a slow launch may do to an estimate is bounded by trimming, openly, and not by
//! removing what does not please.

use super::summary::{quantile_of_sorted, sorted};

/// Where one value lies.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum OutlierLabel {
    /// Below Q1 - 3 IQR.
    SeverelyLow,
    /// Below Q1 - 1.5 IQR.
    MildlyLow,
    /// Between the inner fences.
    Inside,
    /// Above Q3 + 1.5 IQR.
    MildlyHigh,
    /// Above Q3 + 3 IQR.
    SeverelyHigh,
}

impl OutlierLabel {
    /// Beyond an inner fence, but not beyond an outer one.
    pub const fn is_mild(self) -> bool {
        matches!(self, Self::MildlyLow | Self::MildlyHigh)
    }

    /// Beyond an outer fence.
    pub const fn is_severe(self) -> bool {
        matches!(self, Self::SeverelyLow | Self::SeverelyHigh)
    }
}

/// The four fences, in the unit of the values.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Fences {
    /// Q1 - 3 IQR.
    pub low_outer: f64,
    /// Q1 - 1.5 IQR.
    pub low_inner: f64,
    /// Q3 + 1.5 IQR.
    pub high_inner: f64,
    /// Q3 + 3 IQR.
    pub high_outer: f64,
}

impl Fences {
    /// Where a value lies among the fences.
    pub fn label(&self, value: f64) -> OutlierLabel {
        if value < self.low_outer {
            OutlierLabel::SeverelyLow
        } else if value < self.low_inner {
            OutlierLabel::MildlyLow
        } else if value > self.high_outer {
            OutlierLabel::SeverelyHigh
        } else if value > self.high_inner {
            OutlierLabel::MildlyHigh
        } else {
            OutlierLabel::Inside
        }
    }
}

/// A sample's fences and the label of each of its values.
#[derive(Debug, Clone, PartialEq)]
pub struct Outliers {
    /// The fences.
    pub fences: Fences,
    /// One label per value, in the order of the values.
    pub labels: Vec<OutlierLabel>,
}

impl Outliers {
    /// How many values are mild outliers.
    pub fn mild(&self) -> usize {
        self.labels.iter().filter(|label| label.is_mild()).count()
    }

    /// How many values are severe outliers.
    pub fn severe(&self) -> usize {
        self.labels.iter().filter(|label| label.is_severe()).count()
    }
}

/// Labels every value by Tukey's fences.
///
/// Of up to three values none can lie outside: the fences move with it. Where more than three quarters
/// of the values are equal, every other one is severe. None for an empty sample, for values that are
/// not finite, and where a fence overflows.
pub fn outliers(values: &[f64]) -> Option<Outliers> {
    let ordered = sorted(values)?;
    let (first, third) = (quantile_of_sorted(&ordered, 0.25)?, quantile_of_sorted(&ordered, 0.75)?);
    let range = third - first;
    let fences = Fences {
        low_outer: first - 3.0 * range,
        low_inner: first - 1.5 * range,
        high_inner: third + 1.5 * range,
        high_outer: third + 3.0 * range,
    };
    let finite = fences.low_outer.is_finite() && fences.high_outer.is_finite();
    finite.then(|| Outliers { fences, labels: values.iter().map(|&value| fences.label(value)).collect() })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn a_hand_computed_example() {
        // Sorted -2.5 1 2 3 4 5 6 7 40: Q1 2, Q3 6, IQR 4: fences -10, -4, 12, 18.
        let found = outliers(&[40.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, -2.5]).unwrap();
        assert_eq!(found.fences, Fences { low_outer: -10.0, low_inner: -4.0, high_inner: 12.0, high_outer: 18.0 });
        assert_eq!(found.labels[0], OutlierLabel::SeverelyHigh);
        assert!(found.labels[1..].iter().all(|label| *label == OutlierLabel::Inside));
        assert_eq!((found.mild(), found.severe()), (0, 1));
    }

    #[test]
    fn a_value_on_a_fence_is_inside_it() {
        let fences = Fences { low_outer: -10.0, low_inner: -4.0, high_inner: 12.0, high_outer: 18.0 };
        for (value, label) in [
            (-10.1, OutlierLabel::SeverelyLow),
            (-10.0, OutlierLabel::MildlyLow),
            (-4.1, OutlierLabel::MildlyLow),
            (-4.0, OutlierLabel::Inside),
            (12.0, OutlierLabel::Inside),
            (12.1, OutlierLabel::MildlyHigh),
            (18.0, OutlierLabel::MildlyHigh),
            (18.1, OutlierLabel::SeverelyHigh),
        ] {
            assert_eq!(fences.label(value), label, "{value}");
        }
    }

    #[test]
    fn equal_values_make_every_other_severe() {
        let found = outliers(&[5.0, 5.0, 5.0, 5.0, 5.0, 5.1]).unwrap();
        assert_eq!((found.mild(), found.severe()), (0, 1));
        assert_eq!(outliers(&[5.0]).unwrap().labels, [OutlierLabel::Inside]);
    }

    #[test]
    fn no_answer_is_none() {
        assert_eq!(outliers(&[]), None);
        assert_eq!(outliers(&[1.0, f64::NAN]), None);
        assert_eq!(outliers(&[f64::MAX, -f64::MAX, f64::MAX, -f64::MAX]), None);
    }

    proptest! {
        #[test]
        fn every_value_has_a_label_and_the_middle_half_is_inside(
            values in prop::collection::vec(-1e6_f64..1e6, 1..40)
        ) {
            let found = outliers(&values).unwrap();
            prop_assert_eq!(found.labels.len(), values.len());
            prop_assert!(2 * (found.mild() + found.severe()) <= values.len());
            if values.len() <= 3 {
                prop_assert_eq!(found.mild() + found.severe(), 0);
            }
        }
    }
}
