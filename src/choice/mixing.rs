//! May an arm ship that no longer keeps captured and uncaptured collectives apart? Only with a check that
//! saw no failure, and with an engine whose source shows that it never lets them meet.

use crate::engine::{Engine, MixingEvidence, mixing_evidence};
use crate::evidence::Evidence;
use crate::knob::{self, Risk};
use crate::record::{Arm, Manifest, OverlapCheck};
use crate::units::group_thousands;

/// Whether an arm takes away what keeps captured and uncaptured collectives of a communicator apart.
pub fn mixes_unsafely(arm: &Arm) -> bool {
    arm.env.iter().any(|(name, value)| knob::find(name).is_some_and(|knob| knob.risk_of(value) == Risk::UnsafeMixing))
}

/// Why such an arm may not ship; none where it may, or is no such arm.
pub(super) fn veto(manifest: &Manifest, evidence: &Evidence, arm: &Arm) -> Option<String> {
    if !mixes_unsafely(arm) {
        return None;
    }
    let Some(check) = evidence.overlap(&arm.id) else {
        return Some(
            "captured and uncaptured collectives of one communicator were never made to overlap with it".to_owned(),
        );
    };
    if let Some(failure) = &check.failure {
        return Some(format!(
            "captured and uncaptured collectives that overlap failed after {} rounds: {}: {}",
            group_thousands(u64::from(check.rounds)),
            failure.kind.name(),
            failure.detail
        ));
    }
    let why = engine_evidence(manifest).err()?;
    Some(format!("{}, and {why}", seen(check)))
}

/// What whoever deploys such an arm must know.
pub(super) fn warning(manifest: &Manifest, evidence: &Evidence, arm: &Arm) -> Option<String> {
    if !mixes_unsafely(arm) {
        return None;
    }
    let known = engine_evidence(manifest).ok()?;
    let check = evidence.overlap(&arm.id)?;
    Some(format!(
        "right only for {} {} without {}, where graphs use {} and everything else {} ({}); elsewhere sums may be wrong \
         without a word. {}",
        known.engine.title(),
        known.version,
        known.only_without,
        known.captured,
        known.eager,
        known.source,
        seen(check)
    ))
}

fn engine_evidence(manifest: &Manifest) -> Result<&'static MixingEvidence, String> {
    let engine = Engine::parse(&manifest.workload.engine).unwrap_or(Engine::None);
    mixing_evidence(engine, manifest.workload.engine_version.as_deref())
}

fn seen(check: &OverlapCheck) -> String {
    format!(
        "no failure seen in {} rounds of overlap ({:.0} s), which is no proof",
        group_thousands(u64::from(check.rounds)),
        check.duration_s
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::record::{Event, Outcome, OutcomeKind};
    use crate::wording::fixtures;

    fn risky() -> Arm {
        fixtures::arm("mixing-off", &[("NCCL_GRAPH_MIXING_SUPPORT", "0")])
    }

    fn manifest(engine: &str, version: Option<&str>) -> Manifest {
        let mut manifest = fixtures::manifest();
        manifest.workload.engine = engine.to_owned();
        manifest.workload.engine_version = version.map(str::to_owned);
        manifest
    }

    fn checked(failure: Option<Outcome>) -> Evidence {
        let mut evidence = Evidence::default();
        let check = OverlapCheck { rounds: 5000, duration_s: 60.2, failure };
        evidence.tell(&Event::OverlapChecked { arm: risky().id, check });
        evidence
    }

    #[test]
    fn it_ships_only_with_a_check_that_saw_nothing_and_a_release_that_was_read() {
        let arm = risky();
        let (clean, known) = (checked(None), manifest("sglang", Some("0.5.3")));
        assert_eq!(veto(&known, &clean, &arm), None);
        let warning = warning(&known, &clean, &arm).unwrap();
        for part in ["SGLang 0.5.3", "--enable-symm-mem", "no failure seen in 5,000 rounds", "no proof"] {
            assert!(warning.contains(part), "{warning}");
        }
        assert!(!warning.contains("safe"), "{warning}");
        assert!(veto(&known, &Evidence::default(), &arm).unwrap().contains("never made to overlap"));
        let wrong = Outcome { kind: OutcomeKind::WrongResult, detail: "3 elements".to_owned() };
        assert!(veto(&known, &checked(Some(wrong)), &arm).unwrap().contains("wrong-result: 3 elements"));
        for (engine, version, says) in [
            ("vllm", Some("0.11.0"), "one communicator"),
            ("sglang", None, "--engine-version"),
            ("sglang", Some("0.6.0"), "known: 0.4.9, 0.5.3"),
            ("none", None, "nothing is known"),
        ] {
            let why = veto(&manifest(engine, version), &clean, &arm).unwrap();
            assert!(why.contains(says) && why.contains("no failure seen"), "{why}");
        }
    }

    #[test]
    fn other_arms_are_not_asked() {
        let arm = fixtures::arm("channels", &[("NCCL_MIN_NCHANNELS", "16"), ("NCCL_GRAPH_MIXING_SUPPORT", "1")]);
        assert_eq!(veto(&manifest("none", None), &Evidence::default(), &arm), None);
        assert_eq!(warning(&manifest("none", None), &Evidence::default(), &arm), None);
    }
}
