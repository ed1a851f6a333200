//! Which concurrencies matter, and how much: `1,8,32` or `1:0.7,8:0.3`.

/// The largest batch accepted, in sequences.
pub const MAX_BATCH: u32 = 65_536;

/// The most batches one workload may hold; each costs measuring time.
pub const MAX_BATCHES: usize = 64;

/// Weights beyond these say nothing that nearer ones could not, and would strain the arithmetic.
const WEIGHTS: std::ops::RangeInclusive<f64> = 1e-9..=1e9;

/// Why a list of batches was refused.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum BatchError {
    /// Nothing was listed.
    #[error("no batch is given; write for example 1,8,32 or 1:0.7,8:0.3")]
    Empty,
    /// More than [`MAX_BATCHES`].
    #[error("{count} batches are given and at most {MAX_BATCHES} are allowed; keep those your server really sees")]
    TooMany {
        /// How many were listed.
        count: usize,
    },
    /// An entry that is neither N nor N:WEIGHT.
    #[error("batch entry {entry} is not a whole number, or one with a weight as in 8:0.3")]
    Malformed {
        /// The entry, quoted and shortened.
        entry: String,
    },
    /// Zero, or more than [`MAX_BATCH`].
    #[error("batch {batch} is out of range; it counts concurrent sequences, from 1 to {MAX_BATCH}")]
    OutOfRange {
        /// The batch as given.
        batch: u64,
    },
    /// The same batch twice.
    #[error("batch {batch} is given twice; name it once, with a weight if it counts more")]
    Duplicate {
        /// The batch.
        batch: u32,
    },
    /// Some entries with a weight, some without.
    #[error("some batches carry a weight and some do not; give all of them one or none, for example 1:0.7,8:0.3")]
    MixedWeights,
    /// Zero, negative, vanishing, huge or not a number.
    #[error("the weight {weight} of batch {batch} is not usable; weights go from 1e-9 to 1e9")]
    Weight {
        /// The batch.
        batch: u32,
        /// The weight as given.
        weight: f64,
    },
}

/// Reads `1,8,32` (each counts the same: weight 1) or `1:0.7,8:0.3`. The order is kept, and so are
/// the weights as written; [`derive`](super::derive()) scales them to a sum of 1.
pub fn parse_batches(text: &str) -> Result<Vec<(u32, f64)>, BatchError> {
    if text.trim().is_empty() {
        return Err(BatchError::Empty);
    }
    let count = text.split(',').count();
    if count > MAX_BATCHES {
        return Err(BatchError::TooMany { count });
    }
    let mut batches = Vec::with_capacity(count);
    let mut weighted = 0;
    for entry in text.split(',') {
        let malformed = || BatchError::Malformed { entry: super::shown(entry.trim()) };
        let (number, weight) = match entry.split_once(':') {
            Some((number, weight)) => {
                weighted += 1;
                (number, weight.trim().parse::<f64>().map_err(|_| malformed())?)
            }
            None => (entry, 1.0),
        };
        let number = number.trim();
        // `parse` alone would take "+8".
        if !number.bytes().all(|byte| byte.is_ascii_digit()) {
            return Err(malformed());
        }
        let number: u64 = number.parse().map_err(|_| malformed())?;
        let batch = u32::try_from(number).map_err(|_| BatchError::OutOfRange { batch: number })?;
        batches.push((batch, weight));
    }
    if weighted != 0 && weighted != count {
        return Err(BatchError::MixedWeights);
    }
    check_batches(&batches)?;
    Ok(batches)
}

/// What every list of batches must keep, whoever made it.
pub(super) fn check_batches(batches: &[(u32, f64)]) -> Result<(), BatchError> {
    if batches.is_empty() {
        return Err(BatchError::Empty);
    }
    if batches.len() > MAX_BATCHES {
        return Err(BatchError::TooMany { count: batches.len() });
    }
    for (index, &(batch, weight)) in batches.iter().enumerate() {
        if batch == 0 || batch > MAX_BATCH {
            return Err(BatchError::OutOfRange { batch: u64::from(batch) });
        }
        if batches[..index].iter().any(|(earlier, _)| *earlier == batch) {
            return Err(BatchError::Duplicate { batch });
        }
        if !WEIGHTS.contains(&weight) {
            return Err(BatchError::Weight { batch, weight });
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn both_forms_read() {
        assert_eq!(parse_batches("1,8,32"), Ok(vec![(1, 1.0), (8, 1.0), (32, 1.0)]));
        assert_eq!(parse_batches(" 8 : 0.3 , 1:0.7"), Ok(vec![(8, 0.3), (1, 0.7)]));
        assert_eq!(parse_batches("65536"), Ok(vec![(65_536, 1.0)]));
    }

    #[test]
    fn each_mistake_has_its_own_error() {
        use BatchError as E;
        assert_eq!(parse_batches(" "), Err(E::Empty));
        assert_eq!(parse_batches("0,1"), Err(E::OutOfRange { batch: 0 }));
        assert_eq!(parse_batches("65537"), Err(E::OutOfRange { batch: 65_537 }));
        assert_eq!(parse_batches("99999999999"), Err(E::OutOfRange { batch: 99_999_999_999 }));
        assert_eq!(parse_batches("1,8,1"), Err(E::Duplicate { batch: 1 }));
        assert_eq!(parse_batches("1:1,8"), Err(E::MixedWeights));
        assert_eq!(parse_batches("1:-1"), Err(E::Weight { batch: 1, weight: -1.0 }));
        assert_eq!(parse_batches("1:0"), Err(E::Weight { batch: 1, weight: 0.0 }));
        assert_eq!(parse_batches("1:inf"), Err(E::Weight { batch: 1, weight: f64::INFINITY }));
        assert!(matches!(parse_batches("1:NaN"), Err(E::Weight { batch: 1, .. })));
        for malformed in ["1,,8", "1,", "a", "1.5", "-1", "+8", "1:", ":1", "1:2:3", "99999999999999999999999"] {
            assert!(matches!(parse_batches(malformed), Err(E::Malformed { .. })), "{malformed:?}");
        }
        let many: Vec<String> = (1..=65).map(|batch| batch.to_string()).collect();
        assert_eq!(parse_batches(&many.join(",")), Err(E::TooMany { count: 65 }));
        assert!(parse_batches(&many[..64].join(",")).is_ok());
    }

    proptest! {
        #[test]
        fn what_is_accepted_is_valid(text in "[0-9:,. eE+naif-]{0,24}") {
            if let Ok(batches) = parse_batches(&text) {
                prop_assert_eq!(check_batches(&batches), Ok(()));
            }
        }
    }
}
