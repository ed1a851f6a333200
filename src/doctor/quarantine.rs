//! What earlier runs remember of settings that failed.

use super::sight::Sight;
use super::{Finding, listed_as, shown};
use crate::quarantine::{covers, failure_words, place};
use crate::record::QuarantineEntry;
use crate::units::group_thousands;
use crate::wording::plural;

/// Most entries that are named.
const MOST_NAMED: usize = 5;

pub(super) fn check(sight: &Sight<'_>) -> Finding {
    let Some(remembered) = sight.facts.remembered else {
        return Finding::unknown("nothing names a folder to remember in: neither NCCLTUNE_STATE_DIR nor HOME is set");
    };
    let path = shown(&remembered.path.to_string_lossy());
    let entries = match &remembered.entries {
        Ok(entries) => entries,
        Err(error) => {
            return Finding::warn(
                shown(&error.to_string()),
                format!("until {path} is mended or moved away, tune leaves nothing out and remembers nothing"),
            );
        }
    };
    if entries.is_empty() {
        return Finding::pass("nothing is remembered that hung, crashed or corrupted");
    }
    let facts = sight.facts;
    let here = facts.machine.zip(facts.nccl).map(|(machine, nccl)| place(machine, facts.devices, nccl));
    let Some(here) = here else {
        return Finding::warn(
            format!("{}; whether it was here cannot be told", told(&entries.iter().collect::<Vec<_>>())),
            advice(&path),
        );
    };
    let ours: Vec<&QuarantineEntry> = entries.iter().filter(|entry| covers(&here, &entry.machine)).collect();
    if ours.is_empty() {
        let count = group_thousands(entries.len() as u64);
        return Finding::pass(format!(
            "nothing is remembered of these GPUs with this driver and NCCL; {count} {} of others",
            plural(entries.len() as u32, "entry is", "entries are")
        ));
    }
    Finding::warn(told(&ours), advice(&path))
}

/// "2 settings failed: MIN_NCHANNELS=32 hung (2026-11-30T09:14:07Z), ...".
fn told(entries: &[&QuarantineEntry]) -> String {
    let count = group_thousands(entries.len() as u64);
    let settings = plural(entries.len() as u32, "setting", "settings");
    // The newest first: it is what somebody is about to ask about.
    let newest: Vec<&QuarantineEntry> = entries.iter().rev().copied().collect();
    let words = |entry: &&QuarantineEntry| {
        format!("{} {} ({})", shown(&entry.arm), failure_words(entry.outcome.kind), shown(&entry.since))
    };
    format!("{count} {settings} failed in earlier runs: {}", listed_as(&newest, MOST_NAMED, ", ", words))
}

fn advice(path: &str) -> String {
    format!(
        "tune leaves them out; tune --retry-quarantined tries them again, an update of driver or NCCL lifts them, and \
         so does removing {path}"
    )
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;
    use std::path::PathBuf;

    use super::super::fixtures::Planted;
    use crate::quarantine::{Remembered, StoreError, place};
    use crate::record::CheckVerdict::{Pass, Unknown, Warn};
    use crate::record::{Outcome, OutcomeKind, QuarantineEntry};

    const FILE: &str = "/srv/alice/.local/state/nccltune/quarantine.json";

    fn entry(planted: &Planted, devices: &[u32], name: &str, kind: OutcomeKind) -> QuarantineEntry {
        QuarantineEntry {
            machine: place(planted.machine.as_ref().unwrap(), devices, planted.nccl.as_ref().unwrap()),
            arm: name.to_owned(),
            env: BTreeMap::new(),
            outcome: Outcome { kind, detail: "no answer from rank 1".to_owned() },
            since: "2026-11-30T09:14:07Z".to_owned(),
            run: "/srv/results/box".to_owned(),
        }
    }

    fn remember(planted: &mut Planted, entries: Result<Vec<QuarantineEntry>, StoreError>) {
        planted.remembered = Some(Remembered { path: FILE.into(), entries });
    }

    #[test]
    fn what_failed_here_is_named_with_the_ways_to_lift_it() {
        let mut planted = Planted::healthy();
        assert_eq!(planted.check("quarantine").verdict, Pass);
        let hung = entry(&planted, &[0, 1], "MIN_NCHANNELS=32", OutcomeKind::TimedOut);
        let wrong = entry(&planted, &[1], "PROTO=LL128", OutcomeKind::WrongResult);
        remember(&mut planted, Ok(vec![hung, wrong]));
        let check = planted.check("quarantine");
        assert_eq!((check.verdict, check.group.as_str()), (Warn, "nccl"));
        assert_eq!(
            check.evidence,
            "2 settings failed in earlier runs: PROTO=LL128 gave a wrong result (2026-11-30T09:14:07Z), \
             MIN_NCHANNELS=32 hung (2026-11-30T09:14:07Z)"
        );
        for way in ["--retry-quarantined", "an update of driver or NCCL", FILE] {
            assert!(check.advice.contains(way), "{}", check.advice);
        }
    }

    #[test]
    fn what_failed_elsewhere_or_before_an_update_is_no_warning() {
        let mut planted = Planted::healthy();
        let hung = entry(&planted, &[0, 1], "MIN_NCHANNELS=32", OutcomeKind::TimedOut);
        remember(&mut planted, Ok(vec![hung]));
        assert_eq!(planted.check("quarantine").verdict, Warn);
        planted.set_version(22_903);
        let check = planted.check("quarantine");
        assert_eq!(check.verdict, Pass);
        assert!(check.evidence.ends_with("1 entry is of others"), "{}", check.evidence);
        planted.set_version(22_809);
        planted.devices = vec![0];
        assert_eq!(planted.check("quarantine").verdict, Pass, "it needed both GPUs");
    }

    #[test]
    fn without_gpus_it_is_not_known_whose_they_are() {
        let mut planted = Planted::healthy();
        let entries: Vec<QuarantineEntry> = (0..8)
            .map(|number| entry(&planted, &[0, 1], &format!("MIN_NCHANNELS={number}"), OutcomeKind::Crashed))
            .collect();
        planted.machine = None;
        remember(&mut planted, Ok(entries));
        let check = planted.check("quarantine");
        assert_eq!(check.verdict, Warn);
        assert!(check.evidence.contains("MIN_NCHANNELS=7 crashed"), "{}", check.evidence);
        assert!(check.evidence.ends_with("and 3 more; whether it was here cannot be told"), "{}", check.evidence);
    }

    #[test]
    fn a_file_that_cannot_be_used_warns_and_no_folder_is_unknown() {
        let mut planted = Planted::healthy();
        let error = StoreError::NotOurs { path: PathBuf::from(FILE), reason: "it names no format".to_owned() };
        remember(&mut planted, Err(error));
        let check = planted.check("quarantine");
        assert_eq!(check.verdict, Warn);
        assert!(check.evidence.contains("it names no format") && check.advice.contains(FILE), "{check:?}");
        planted.remembered = None;
        assert_eq!(planted.check("quarantine").verdict, Unknown);
    }
}
