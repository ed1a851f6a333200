//! Repairs that the field knows for what NCCL says when it fails.
//!
//! A repair is no tuning: it is tried where an arm fails that sets nothing of its own there, it then
//! holds in every arm, and the answer carries it with its reason.

use crate::knob;
use crate::machine::NcclVersion;
use crate::nccl_log::Symptom;
use crate::record::{Arm, Outcome, OutcomeKind};

/// A variable that may help.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Repair {
    /// Its name.
    pub variable: &'static str,
    /// The value to set.
    pub value: &'static str,
    /// The line that told, as NCCL wrote it.
    pub evidence: String,
}

/// What each symptom is repaired with. Sources: NVIDIA/nccl issues about `Cuda failure 217` in the
/// shared-memory transport since 2.27, where buffers come from the driver's host allocator although two
/// GPUs cannot reach each other, and about containers whose /dev/shm is too small for the files of the
/// older way, which the host allocator (2.24 and newer, driver 12.6 and newer) does not need.
const REPAIRS: [(Symptom, NcclVersion, &str, &str); 2] = [
    (Symptom::PeerAccessUnsupported, NcclVersion::v2(23, 0), "NCCL_CUMEM_HOST_ENABLE", "0"),
    (Symptom::SharedMemoryFailed, NcclVersion::v2(24, 0), "NCCL_CUMEM_HOST_ENABLE", "1"),
];

/// The repair for an outcome of an arm, if the field knows one, the release has the variable, and
/// neither the arm nor what is `fixed` already says something about it.
pub fn propose(arm: &Arm, outcome: &Outcome, version: NcclVersion, fixed: impl Fn(&str) -> bool) -> Option<Repair> {
    if !matches!(outcome.kind, OutcomeKind::Refused | OutcomeKind::OutOfMemory | OutcomeKind::Crashed) {
        return None;
    }
    // An arm that changes how GPUs reach each other may have asked for its trouble.
    if arm.env.keys().any(|name| knob::changes_transport(name)) {
        return None;
    }
    REPAIRS
        .iter()
        .find(|(symptom, since, variable, _)| {
            symptom.shows_in(&outcome.detail)
                && version >= *since
                && !fixed(variable)
                && !arm.env.contains_key(*variable)
        })
        .map(|(_, _, variable, value)| Repair { variable, value, evidence: outcome.detail.chars().take(400).collect() })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wording::fixtures;

    const REFUSED: &str = "rank 1 while initialising the communicator: ncclCommInitRank returned 1 (unhandled cuda \
                           error); NCCL says: Cuda failure 217 'peer access is not \
                           supported between these two devices'";

    fn arm(env: &[(&str, &str)]) -> Arm {
        fixtures::arm("x", env)
    }

    fn refused(detail: &str) -> Outcome {
        Outcome { kind: OutcomeKind::Refused, detail: detail.to_owned() }
    }

    #[test]
    fn what_the_field_knows_is_proposed_with_its_line() {
        let version = NcclVersion::v2(28, 9);
        let repair = propose(&arm(&[]), &refused(REFUSED), version, |_| false).unwrap();
        assert_eq!((repair.variable, repair.value), ("NCCL_CUMEM_HOST_ENABLE", "0"));
        assert!(repair.evidence.contains("Cuda failure 217"));
        assert_eq!(propose(&arm(&[]), &refused("something else"), version, |_| false), None);
    }

    #[test]
    fn nothing_is_repaired_twice_or_against_what_was_asked_for() {
        let version = NcclVersion::v2(28, 9);
        assert_eq!(propose(&arm(&[]), &refused(REFUSED), version, |name| name == "NCCL_CUMEM_HOST_ENABLE"), None);
        assert_eq!(propose(&arm(&[("NCCL_P2P_LEVEL", "SYS")]), &refused(REFUSED), version, |_| false), None);
        assert_eq!(propose(&arm(&[]), &refused(REFUSED), NcclVersion::v2(22, 3), |_| false), None);
        let hung = Outcome { kind: OutcomeKind::TimedOut, detail: REFUSED.to_owned() };
        assert_eq!(propose(&arm(&[]), &hung, version, |_| false), None);
    }
}
