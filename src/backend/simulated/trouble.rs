//! What can go wrong on a simulated machine, each kind switched by its file and drawn from the seed.

use std::collections::BTreeMap;

use rand::RngExt;
use serde::{Deserialize, Serialize};

use crate::nccl_model::MAX_BYTES;
use crate::record::{Outcome, OutcomeKind, PointKey};
use crate::seed::Seed;

/// One trouble. `when` names variables with values as emitted; all must match, and none means every arm,
/// the default included.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "kebab-case", deny_unknown_fields)]
pub(super) enum Trouble {
    /// Messages of one size take so many times as long, in every launch.
    Cliff {
        bytes: u64,
        factor: f64,
        #[serde(default)]
        when: BTreeMap<String, String>,
    },
    /// NCCL runs another algorithm or protocol than it would choose.
    Substitution {
        probability: f64,
        #[serde(default)]
        when: BTreeMap<String, String>,
    },
    /// The launch hangs, which costs the seconds that a deadline takes.
    Hang {
        probability: f64,
        seconds: f64,
        #[serde(default)]
        when: BTreeMap<String, String>,
    },
    /// The data check fails.
    Corruption {
        probability: f64,
        #[serde(default)]
        when: BTreeMap<String, String>,
    },
}

/// What becomes of one cell.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Fate {
    /// Factor on its latency.
    pub(super) factor: f64,
    /// Whether something else runs than NCCL would choose.
    pub(super) substituted: bool,
    /// How it fails, and what that costs in seconds.
    pub(super) failure: Option<(Outcome, f64)>,
}

impl Trouble {
    pub(super) fn check(&self) -> Result<(), String> {
        match self {
            Self::Cliff { bytes, factor, .. } => {
                if *bytes == 0 || *bytes > MAX_BYTES {
                    return Err(format!("a cliff at {bytes} bytes: there must be 1 to {MAX_BYTES}"));
                }
                if !(0.001..=1000.0).contains(factor) {
                    return Err("the factor of a cliff must lie between 0.001 and 1000".to_owned());
                }
            }
            Self::Substitution { probability, .. }
            | Self::Hang { probability, .. }
            | Self::Corruption { probability, .. } => {
                if !(0.0..=1.0).contains(probability) {
                    return Err("the probability of a trouble must lie between 0 and 1".to_owned());
                }
            }
        }
        if let Self::Hang { seconds, .. } = self
            && !(0.0..=1e6).contains(seconds)
        {
            return Err("a hang must cost between 0 and 1e6 seconds".to_owned());
        }
        Ok(())
    }

    const fn when(&self) -> &BTreeMap<String, String> {
        match self {
            Self::Cliff { when, .. }
            | Self::Substitution { when, .. }
            | Self::Hang { when, .. }
            | Self::Corruption { when, .. } => when,
        }
    }
}

/// What becomes of one cell, by the seed and the cell's own name.
pub(super) fn fate(
    troubles: &[Trouble],
    seed: Seed,
    cell: &str,
    point: PointKey,
    environment: &BTreeMap<String, String>,
) -> Fate {
    let mut fate = Fate { factor: 1.0, substituted: false, failure: None };
    for (index, trouble) in troubles.iter().enumerate() {
        if !trouble.when().iter().all(|(variable, value)| environment.get(variable) == Some(value)) {
            continue;
        }
        let draw = || seed.derive("simulated-trouble", &format!("{index}-{cell}")).random::<f64>();
        match trouble {
            Trouble::Cliff { bytes, factor, .. } if *bytes == point.bytes => fate.factor *= factor,
            Trouble::Substitution { probability, .. } => fate.substituted |= draw() < *probability,
            Trouble::Hang { probability, seconds, .. } if draw() < *probability && fate.failure.is_none() => {
                let detail = "SIMULATED: no rank answered in time while replaying".to_owned();
                fate.failure = Some((Outcome { kind: OutcomeKind::TimedOut, detail }, *seconds));
            }
            Trouble::Corruption { probability, .. } if draw() < *probability && fate.failure.is_none() => {
                let detail = "SIMULATED: the data check found a wrong element".to_owned();
                fate.failure = Some((Outcome { kind: OutcomeKind::WrongResult, detail }, 0.0));
            }
            _ => {}
        }
    }
    fate
}
