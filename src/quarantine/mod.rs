//! Arms that are not tried again: in a run, and in later runs.
//!
//! In a run it is a pure fold over failures. One failure may be bad luck and is tried again in a later
//! block; a wrong result is never luck.
//!
//! Across runs it is a memory ([`Store`]) of what hung, crashed or corrupted: such arms cost the most,
//! a GPU that needs a reset included, so later runs leave them out until the user asks for them. An arm
//! that afterwards was measured without a failure is forgotten again, unless its result was wrong.

mod recorder;
mod store;

use std::collections::{BTreeMap, BTreeSet};

use crate::evidence::Evidence;
use crate::record::{Arm, ArmId, OutcomeKind, QuarantineEntry, QuarantinedArm};
use crate::space;

pub use recorder::Recorder;
pub use store::{FILE_NAME, Remembered, Store, StoreError, covers, place};

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

/// Whether a failure is worth remembering beyond its run. What NCCL refuses, or what finds no memory,
/// fails fast and harms nobody; it is found out anew.
const fn is_remembered(kind: OutcomeKind) -> bool {
    matches!(kind, OutcomeKind::TimedOut | OutcomeKind::Crashed | OutcomeKind::WrongResult)
}

/// What happened, as a person would say it.
pub fn failure_words(kind: OutcomeKind) -> &'static str {
    match kind {
        OutcomeKind::TimedOut => "hung",
        OutcomeKind::Crashed => "crashed",
        OutcomeKind::WrongResult => "gave a wrong result",
        other => other.name(),
    }
}

/// Every variable in force while an arm runs: what holds in every arm, and its own. One that points at a
/// file of the arm names it by its SHA-256, so another file in its place is another arm.
fn variables(pins: &BTreeMap<String, String>, arm: &Arm) -> BTreeMap<String, String> {
    let mut all = pins.clone();
    all.extend(space::variables(arm));
    all
}

/// Parts a space's arms into those to be measured and those that failed before with the same variables
/// on the same machine (`machine` is the combined fingerprint of [`place`]). The default is never left
/// out: without it nothing can be judged.
pub fn leave_out(
    arms: Vec<Arm>,
    default: &ArmId,
    pins: &BTreeMap<String, String>,
    machine: &str,
    entries: &[QuarantineEntry],
) -> (Vec<Arm>, Vec<QuarantinedArm>) {
    let mut left_out = Vec::new();
    let kept = arms
        .into_iter()
        .filter(|arm| {
            if arm.id == *default {
                return true;
            }
            let all = variables(pins, arm);
            let Some(entry) = entries.iter().find(|entry| entry.machine.combined == machine && entry.env == all) else {
                return true;
            };
            left_out.push(QuarantinedArm {
                arm: arm.id.clone(),
                name: arm.name.clone(),
                env: space::variables(arm),
                reason: reason(entry),
                since: entry.since.clone(),
            });
            false
        })
        .collect();
    (kept, left_out)
}

/// "hung in /srv/results/box: no answer from rank 1 within 60 s".
fn reason(entry: &QuarantineEntry) -> String {
    let what = failure_words(entry.outcome.kind);
    match entry.outcome.detail.as_str() {
        "" => format!("{what} in {}", entry.run),
        detail => format!("{what} in {}: {detail}", entry.run),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::file_kind::FileKind;
    use crate::record::{Event, FingerprintParts, Outcome};
    use crate::wording::fixtures::{arm, map};

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

    fn entry(machine: &str, env: &[(&str, &str)]) -> QuarantineEntry {
        QuarantineEntry {
            machine: FingerprintParts { combined: machine.to_owned(), parts: BTreeMap::new() },
            arm: "as it was called then".to_owned(),
            env: map(env),
            outcome: Outcome { kind: OutcomeKind::TimedOut, detail: "no answer from rank 1".to_owned() },
            since: "2026-11-30T09:14:07Z".to_owned(),
            run: "/srv/results/box".to_owned(),
        }
    }

    #[test]
    fn an_arm_is_left_out_for_the_same_variables_on_the_same_machine_only() {
        let default = ArmId("default".to_owned());
        let arms = || {
            let channels = |count: &'static str| [("NCCL_MIN_NCHANNELS", count)];
            vec![arm("default", &[]), arm("few", &channels("4")), arm("many", &channels("32"))]
        };
        let pins = map(&[("NCCL_P2P_DISABLE", "1")]);
        let hung = entry("here", &[("NCCL_P2P_DISABLE", "1"), ("NCCL_MIN_NCHANNELS", "32")]);
        let (kept, left_out) = leave_out(arms(), &default, &pins, "here", std::slice::from_ref(&hung));
        assert_eq!(kept.iter().map(|arm| arm.name.as_str()).collect::<Vec<_>>(), ["default", "few"]);
        let [many] = left_out.as_slice() else { panic!("one arm") };
        assert_eq!((many.name.as_str(), &many.env), ("many", &map(&[("NCCL_MIN_NCHANNELS", "32")])));
        assert_eq!(many.reason, "hung in /srv/results/box: no answer from rank 1");
        assert_eq!(many.since, "2026-11-30T09:14:07Z");
        // Another driver or NCCL is another machine, other pins are other variables.
        let everything = |pins: &BTreeMap<String, String>, machine: &str| {
            leave_out(arms(), &default, pins, machine, std::slice::from_ref(&hung)).0.len() == 3
        };
        assert!(everything(&pins, "elsewhere"));
        assert!(everything(&map(&[]), "here"));
        assert!(everything(&map(&[("NCCL_P2P_DISABLE", "1"), ("NCCL_NVLS_ENABLE", "0")]), "here"));
    }

    #[test]
    fn an_arm_with_a_file_is_known_by_what_the_file_holds() {
        let default = ArmId("default".to_owned());
        let with = |digit: &str| {
            let mut arm = arm("ring", &[]);
            arm.files.insert(FileKind::Graph, digit.repeat(64));
            arm
        };
        let name = FileKind::Graph.file_name(&"1".repeat(64));
        let hung = entry("here", &[("NCCL_GRAPH_FILE", &name)]);
        let left_out = |digit| leave_out(vec![with(digit)], &default, &map(&[]), "here", std::slice::from_ref(&hung)).1;
        let [ring] = left_out("1").try_into().unwrap();
        assert_eq!(ring.env["NCCL_GRAPH_FILE"], name);
        assert!(left_out("2").is_empty(), "another file is another arm");
    }

    #[test]
    fn the_default_is_never_left_out() {
        let default = ArmId("default".to_owned());
        let pins = map(&[("NCCL_P2P_DISABLE", "1")]);
        let hung = entry("here", &[("NCCL_P2P_DISABLE", "1")]);
        let (kept, left_out) = leave_out(vec![arm("default", &[])], &default, &pins, "here", &[hung]);
        assert_eq!((kept.len(), left_out.len()), (1, 0));
    }

    #[test]
    fn only_what_hangs_crashes_or_corrupts_is_remembered() {
        let remembered = [OutcomeKind::TimedOut, OutcomeKind::Crashed, OutcomeKind::WrongResult];
        for kind in [
            OutcomeKind::Measured,
            OutcomeKind::Rejected,
            OutcomeKind::Refused,
            OutcomeKind::WrongResult,
            OutcomeKind::Crashed,
            OutcomeKind::TimedOut,
            OutcomeKind::OutOfMemory,
            OutcomeKind::Unsupported,
            OutcomeKind::Interrupted,
            OutcomeKind::NotRecorded,
        ] {
            assert_eq!(is_remembered(kind), remembered.contains(&kind), "{}", kind.name());
        }
    }
}
