//! What earlier runs remember decides which arms are tried; what fails now is remembered for later ones.

use std::collections::BTreeMap;
use std::path::Path;

use super::environment::as_map;
use super::{Listener, Update};
use crate::quarantine::{Recorder, Remembered, Store, StoreError, leave_out, place};
use crate::record::{Arm, ArmId, BackendKind, Event, FingerprintParts, Manifest, QuarantinedArm};
use crate::wording;

/// What decides whether an earlier failure counts here.
pub(super) struct Failed<'a> {
    /// Of the GPUs that will be used, the driver and NCCL.
    pub(super) place: &'a FingerprintParts,
    /// Variables that hold in every arm.
    pub(super) pins: &'a BTreeMap<String, String>,
    /// The user wants such arms tried again.
    pub(super) retry: bool,
}

impl Failed<'_> {
    /// Takes out the arms that failed in earlier runs, unless the user wants them tried again, and says
    /// so. `memory` is none where nothing names a place for it.
    pub(super) fn leave_out(
        &self,
        memory: Option<Remembered>,
        arms: &mut Vec<Arm>,
        default: &ArmId,
        notices: &mut Vec<String>,
    ) -> Vec<QuarantinedArm> {
        let entries = match memory.map(|memory| memory.entries) {
            None => return Vec::new(),
            Some(Ok(entries)) => entries,
            Some(Err(error)) => {
                notices.push(format!("arms that failed in earlier runs are tried as if they were new: {error}"));
                return Vec::new();
            }
        };
        let (kept, left_out) = leave_out(arms.clone(), default, self.pins, &self.place.combined, &entries);
        if self.retry {
            let told = |arm: &QuarantinedArm| format!("tried again: {}", wording::quarantined(arm));
            notices.extend(left_out.iter().map(told));
            return Vec::new();
        }
        let told = |arm: &QuarantinedArm| {
            format!("left out: {}; --retry-quarantined tries it again", wording::quarantined(arm))
        };
        notices.extend(left_out.iter().map(told));
        *arms = kept;
        left_out
    }
}

/// What the earlier run left out. Where its space is enumerated anew, a run that goes on leaves the same
/// arms out again.
pub(super) fn left_out_before(
    previous: Option<&Manifest>,
    is_resumed: bool,
    arms: &mut Vec<Arm>,
) -> Vec<QuarantinedArm> {
    let mut quarantined = previous.map(|manifest| manifest.quarantined.clone()).unwrap_or_default();
    if is_resumed {
        arms.retain(|arm| !quarantined.iter().any(|known| known.arm == arm.id));
    }
    quarantined.retain(|known| !arms.iter().any(|arm| arm.id == known.arm));
    quarantined
}

/// What is remembered for later runs while this one measures.
pub(super) struct Memory {
    recorder: Recorder,
    /// What kept it from being written, told once.
    told: Option<StoreError>,
}

impl Memory {
    /// The memory of a run; none where nothing real is measured, or nothing names a place for it.
    pub(super) fn of(state_folder: Option<&Path>, manifest: &Manifest, directory: &Path) -> Option<Self> {
        let (BackendKind::Nccl, Some(nccl), Some(folder)) = (manifest.backend, &manifest.nccl, state_folder) else {
            return None;
        };
        let place = place(&manifest.machine, &manifest.devices, nccl);
        let pins = as_map(&manifest.pins);
        // A reader may stand elsewhere than this process does.
        let run = std::path::absolute(directory).unwrap_or_else(|_| directory.to_owned());
        let run = run.to_string_lossy().into_owned();
        Some(Self { recorder: Recorder::new(Store::new(folder), place, &pins, &manifest.arms, run), told: None })
    }

    /// Hears an event that is in the journal already. A memory that cannot be written costs no run.
    pub(super) fn hear(&mut self, event: &Event, listener: Listener<'_>) {
        if let Err(error) = self.recorder.hear(event)
            && self.told.as_ref() != Some(&error)
        {
            listener(Update::Notice(format!("later runs will not know what failed here: {error}")));
            self.told = Some(error);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::record::{Outcome, OutcomeKind};
    use crate::wording::fixtures::{self, arm};

    fn arms() -> Vec<Arm> {
        vec![arm("default", &[]), arm("many", &[("NCCL_MIN_NCHANNELS", "32")])]
    }

    fn hangs(arm: &str) -> Event {
        Event::CellFailed {
            arm: ArmId(arm.to_owned()),
            point: None,
            block: 0,
            launch: 0,
            outcome: Outcome { kind: OutcomeKind::TimedOut, detail: "no answer from rank 1".to_owned() },
            duration_s: 60.0,
        }
    }

    /// The run of the fixtures, with arms.
    fn manifest() -> Manifest {
        Manifest { arms: arms(), ..fixtures::manifest() }
    }

    /// What a later run on the same machine makes of it: its arms, what it left out, what it says.
    fn next_run(folder: &Path, retry: bool) -> (Vec<Arm>, Vec<QuarantinedArm>, Vec<String>) {
        let manifest = manifest();
        let place = place(&manifest.machine, &manifest.devices, manifest.nccl.as_ref().unwrap());
        let pins = as_map(&manifest.pins);
        let (mut arms, mut notices) = (arms(), Vec::new());
        let memory = Some(Store::new(folder).remembered());
        let failed = Failed { place: &place, pins: &pins, retry };
        let left_out = failed.leave_out(memory, &mut arms, &ArmId("default".to_owned()), &mut notices);
        (arms, left_out, notices)
    }

    #[test]
    fn what_hangs_in_one_run_is_left_out_of_the_next_until_it_is_asked_for() {
        let folder = tempfile::tempdir().unwrap();
        let mut told = Vec::new();
        let mut memory = Memory::of(Some(folder.path()), &manifest(), Path::new("results/box")).unwrap();
        for failed in ["many", "default"] {
            memory.hear(&hangs(failed), &mut |update| told.push(format!("{update:?}")));
        }
        assert!(told.is_empty(), "{told:?}");
        let (arms, left_out, notices) = next_run(folder.path(), false);
        assert_eq!(arms.iter().map(|arm| arm.name.as_str()).collect::<Vec<_>>(), ["default"]);
        assert_eq!(left_out.len(), 1);
        let [notice] = notices.as_slice() else { panic!("{notices:?}") };
        assert!(notice.starts_with("left out: many: hung in /"), "{notice}");
        assert!(notice.contains("/results/box: no answer from rank 1 ("), "{notice}");
        assert!(notice.ends_with("--retry-quarantined tries it again"), "{notice}");
        let (arms, left_out, notices) = next_run(folder.path(), true);
        assert_eq!((arms.len(), left_out.len()), (2, 0));
        assert!(notices.len() == 1 && notices[0].starts_with("tried again: many: hung in /"), "{notices:?}");
    }

    #[test]
    fn a_memory_that_cannot_be_used_is_told_once_and_changes_nothing() {
        let folder = tempfile::tempdir().unwrap();
        fs_err::write(folder.path().join(crate::quarantine::FILE_NAME), "garbage").unwrap();
        let (arms, left_out, notices) = next_run(folder.path(), false);
        assert_eq!((arms.len(), left_out.len(), notices.len()), (2, 0, 1));
        assert!(notices[0].contains("tried as if they were new"), "{notices:?}");
        let mut told = Vec::new();
        let mut memory = Memory::of(Some(folder.path()), &manifest(), Path::new("results/box")).unwrap();
        for _ in 0..3 {
            memory.hear(&hangs("many"), &mut |update| told.push(format!("{update:?}")));
        }
        assert!(told.len() == 1 && told[0].contains("later runs will not know"), "{told:?}");
    }

    #[test]
    fn only_runs_on_gpus_remember() {
        let folder = tempfile::tempdir().unwrap();
        let memory = |backend: BackendKind, state: Option<&Path>| {
            Memory::of(state, &Manifest { backend, ..manifest() }, Path::new("results/box")).is_some()
        };
        assert!(memory(BackendKind::Nccl, Some(folder.path())));
        assert!(!memory(BackendKind::Nccl, None));
        for backend in [BackendKind::Simulated, BackendKind::Replay] {
            assert!(!memory(backend, Some(folder.path())));
        }
    }

    #[test]
    fn a_run_that_goes_on_keeps_the_arms_it_began_with() {
        let many = QuarantinedArm {
            arm: ArmId("many".to_owned()),
            name: "many".to_owned(),
            env: BTreeMap::new(),
            reason: "hung".to_owned(),
            since: String::new(),
        };
        let before = Manifest { quarantined: vec![many.clone()], ..fixtures::manifest() };
        // From its manifest, and from its space once more.
        for arms in [vec![arm("default", &[])], arms()] {
            let mut arms = arms;
            assert_eq!(left_out_before(Some(&before), true, &mut arms), std::slice::from_ref(&many));
            assert_eq!(arms.len(), 1);
        }
        // A replay over another space may hold the arm after all.
        let mut all = arms();
        assert!(left_out_before(Some(&before), false, &mut all).is_empty());
        assert_eq!(all.len(), 2);
        assert!(left_out_before(None, false, &mut all).is_empty());
    }
}
