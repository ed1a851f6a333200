//! Arms that are not tried again in a run.
//!
//! A pure fold over failures. One failure may be bad luck and is tried again in a later block; a
//! wrong result is never luck.

use std::collections::{BTreeMap, BTreeSet};

use crate::evidence::Evidence;
use crate::record::{ArmId, OutcomeKind};

/// Failures after which an arm is left alone.
const FAILURES: u32 = 2;

/// Arms that must not be measured again.
pub fn quarantined(evidence: &Evidence) -> BTreeSet<ArmId> {
    let mut counts: BTreeMap<&ArmId, u32> = BTreeMap::new();
    for failure in evidence.failures_that_count() {
        *counts.entry(&failure.arm).or_default() += match failure.kind {
            OutcomeKind::WrongResult
            | OutcomeKind::Rejected
            | OutcomeKind::Unsupported
            | OutcomeKind::NotRecorded
            | OutcomeKind::Refused => FAILURES,
            OutcomeKind::Interrupted => 0,
            _ => 1,
        };
    }
    counts.into_iter().filter(|(_, count)| *count >= FAILURES).map(|(arm, _)| arm.clone()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::record::{Event, Outcome};

    fn failed(arm: &str, kind: OutcomeKind) -> Event {
        Event::CellFailed {
            arm: ArmId(arm.to_owned()),
            point: None,
            block: 0,
            launch: 0,
            outcome: Outcome { kind, detail: String::new() },
            duration_s: 1.0,
        }
    }

    #[test]
    fn bad_luck_is_forgiven_once_a_wrong_result_never() {
        let mut evidence = Evidence::default();
        evidence.tell(&failed("unlucky", OutcomeKind::TimedOut));
        evidence.tell(&failed("wrong", OutcomeKind::WrongResult));
        evidence.tell(&failed("stopped", OutcomeKind::Interrupted));
        evidence.tell(&failed("stopped", OutcomeKind::Interrupted));
        assert_eq!(quarantined(&evidence), BTreeSet::from([ArmId("wrong".to_owned())]));
        evidence.tell(&failed("unlucky", OutcomeKind::Crashed));
        assert_eq!(quarantined(&evidence).len(), 2);
    }
}
