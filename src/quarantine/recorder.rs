//! Watches a run and remembers what hung, crashed or corrupted, as soon as it happens.

use std::collections::{BTreeMap, BTreeSet};

use super::store::{Change, Store, StoreError};
use super::{is_remembered, variables};
use crate::clock::wall_time;
use crate::record::{Arm, ArmId, Event, FingerprintParts, Outcome, OutcomeKind, QuarantineEntry};

/// A listener to the events of one run.
#[derive(Debug)]
pub struct Recorder {
    store: Store,
    machine: FingerprintParts,
    run: String,
    /// Name and every variable in force of each arm of the run.
    arms: BTreeMap<ArmId, (String, BTreeMap<String, String>)>,
    /// Arms that are remembered for bad luck, and so may be forgotten.
    forgivable: BTreeSet<ArmId>,
    /// Of the block under way.
    measured: BTreeSet<ArmId>,
    failed: BTreeSet<ArmId>,
    /// What could not be written yet.
    pending: Vec<Change>,
}

impl Recorder {
    /// A recorder for the arms of a run at a place ([`super::place`]) with these pins. `run` names its
    /// directory.
    pub fn new(
        store: Store,
        machine: FingerprintParts,
        pins: &BTreeMap<String, String>,
        arms: &[Arm],
        run: String,
    ) -> Self {
        let arms: BTreeMap<ArmId, (String, BTreeMap<String, String>)> =
            arms.iter().map(|arm| (arm.id.clone(), (arm.name.clone(), variables(pins, arm)))).collect();
        // A file that cannot be read was told when arms were left out for it, and is told again when
        // something is to be written.
        let known = store.remembered().entries.unwrap_or_default();
        let is_forgivable = |all: &BTreeMap<String, String>| {
            known.iter().any(|entry| {
                entry.machine.combined == machine.combined
                    && entry.env == *all
                    && entry.outcome.kind != OutcomeKind::WrongResult
            })
        };
        let forgivable = arms.iter().filter(|(_, (_, all))| is_forgivable(all)).map(|(arm, _)| arm.clone()).collect();
        Self {
            store,
            machine,
            run,
            arms,
            forgivable,
            measured: BTreeSet::new(),
            failed: BTreeSet::new(),
            pending: Vec::new(),
        }
    }

    /// Hears an event that is in the journal already. What cannot be written now is tried again at the
    /// next event that matters.
    pub fn hear(&mut self, event: &Event) -> Result<(), StoreError> {
        match event {
            Event::BlockPlanned { .. } => {
                self.measured.clear();
                self.failed.clear();
            }
            Event::CellMeasured(cell) => {
                self.measured.insert(cell.arm.clone());
            }
            Event::PassMeasured(pass) => {
                self.measured.insert(pass.arm.clone());
            }
            Event::CellFailed { arm, outcome, .. } => {
                self.failed.insert(arm.clone());
                self.remember(arm, outcome);
            }
            Event::BlockEnded { .. } => self.forgive(),
            _ => return Ok(()),
        }
        if self.pending.is_empty() {
            return Ok(());
        }
        self.store.change(&self.pending)?;
        self.pending.clear();
        Ok(())
    }

    fn remember(&mut self, arm: &ArmId, outcome: &Outcome) {
        if !is_remembered(outcome.kind) {
            return;
        }
        let Some((name, env)) = self.arms.get(arm) else { return };
        if outcome.kind == OutcomeKind::WrongResult {
            self.forgivable.remove(arm);
        } else {
            self.forgivable.insert(arm.clone());
        }
        self.pending.push(Change::Remember(Box::new(QuarantineEntry {
            machine: self.machine.clone(),
            arm: name.clone(),
            env: env.clone(),
            outcome: outcome.clone(),
            since: humantime::format_rfc3339_seconds(wall_time()).to_string(),
            run: self.run.clone(),
        })));
    }

    /// A whole block without a failure shows that an earlier one was bad luck: the rule of the run
    /// itself, which tries such an arm again and may even adopt it.
    fn forgive(&mut self) {
        for arm in self.measured.difference(&self.failed) {
            if self.forgivable.remove(arm)
                && let Some((_, env)) = self.arms.get(arm)
            {
                self.pending.push(Change::Forget { machine: self.machine.combined.clone(), env: env.clone() });
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;
    use crate::record::Phase;
    use crate::wording::fixtures;

    fn arm(name: &str, value: &str) -> Arm {
        fixtures::arm(name, &[("NCCL_MIN_NCHANNELS", value)])
    }

    fn recorder(folder: &Path) -> Recorder {
        let machine = FingerprintParts { combined: "here".to_owned(), parts: BTreeMap::new() };
        let pins = BTreeMap::from([("NCCL_P2P_DISABLE".to_owned(), "1".to_owned())]);
        let arms = [arm("few", "4"), arm("many", "32")];
        Recorder::new(Store::new(folder), machine, &pins, &arms, "/srv/results/box".to_owned())
    }

    fn planned(block: u32) -> Event {
        Event::BlockPlanned { block, phase: Phase::Search, launches: Vec::new() }
    }

    fn failed(arm: &str, kind: OutcomeKind) -> Event {
        Event::CellFailed {
            arm: ArmId(arm.to_owned()),
            point: None,
            block: 0,
            launch: 0,
            outcome: Outcome { kind, detail: "no answer from rank 1".to_owned() },
            duration_s: 1.0,
        }
    }

    fn measured(arm: &str) -> Event {
        Event::CellMeasured(fixtures::cell(arm))
    }

    fn entries(folder: &Path) -> Vec<QuarantineEntry> {
        Store::new(folder).remembered().entries.unwrap()
    }

    #[test]
    fn a_hang_is_on_disk_before_the_next_event() {
        let folder = tempfile::tempdir().unwrap();
        let mut recorder = recorder(folder.path());
        for event in [planned(0), measured("few"), failed("many", OutcomeKind::TimedOut)] {
            recorder.hear(&event).unwrap();
        }
        let [entry] = entries(folder.path()).try_into().unwrap();
        assert_eq!((entry.arm.as_str(), entry.run.as_str()), ("many", "/srv/results/box"));
        assert_eq!(entry.env.len(), 2, "the pins count, too: {:?}", entry.env);
        assert!(humantime::parse_rfc3339(&entry.since).is_ok(), "{}", entry.since);
        // What is no danger is not remembered.
        for kind in [OutcomeKind::Refused, OutcomeKind::OutOfMemory, OutcomeKind::Interrupted] {
            recorder.hear(&failed("few", kind)).unwrap();
        }
        recorder.hear(&failed("unknown", OutcomeKind::Crashed)).unwrap();
        assert_eq!(entries(folder.path()).len(), 1);
    }

    #[test]
    fn a_block_without_a_failure_lifts_bad_luck_and_one_with_a_failure_does_not() {
        let folder = tempfile::tempdir().unwrap();
        let mut recorder = recorder(folder.path());
        let hear = |recorder: &mut Recorder, events: &[Event]| {
            for event in events {
                recorder.hear(event).unwrap();
            }
            entries(folder.path()).len()
        };
        let ended = Event::BlockEnded { block: 0 };
        let hangs = failed("many", OutcomeKind::TimedOut);
        let block = [planned(0), measured("many"), hangs, ended.clone()];
        assert_eq!(hear(&mut recorder, &block), 1, "some points before the hang are no block");
        assert_eq!(hear(&mut recorder, &[planned(1), measured("few"), ended.clone()]), 1, "another arm's block");
        assert_eq!(hear(&mut recorder, &[planned(2), measured("many")]), 1, "a block that is not over");
        assert_eq!(hear(&mut recorder, &[ended]), 0);
    }

    #[test]
    fn a_later_run_that_tries_it_again_lifts_it_unless_the_result_was_wrong() {
        let folder = tempfile::tempdir().unwrap();
        let mut first = recorder(folder.path());
        first.hear(&failed("few", OutcomeKind::WrongResult)).unwrap();
        first.hear(&failed("many", OutcomeKind::Crashed)).unwrap();
        let mut second = recorder(folder.path());
        let ended = Event::BlockEnded { block: 0 };
        for event in [planned(0), measured("few"), measured("many"), ended] {
            second.hear(&event).unwrap();
        }
        let [entry] = entries(folder.path()).try_into().unwrap();
        assert_eq!((entry.arm.as_str(), entry.outcome.kind), ("few", OutcomeKind::WrongResult));
    }

    #[test]
    fn what_cannot_be_written_is_tried_again() {
        let folder = tempfile::tempdir().unwrap();
        let state = folder.path().join("state");
        fs_err::write(&state, "in the way").unwrap();
        let mut recorder = recorder(&state);
        assert!(recorder.hear(&failed("few", OutcomeKind::Crashed)).is_err());
        fs_err::remove_file(&state).unwrap();
        recorder.hear(&failed("many", OutcomeKind::TimedOut)).unwrap();
        assert_eq!(entries(&state).len(), 2);
    }
}
