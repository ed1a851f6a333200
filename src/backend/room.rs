//! Room in /dev/shm for the launches of a run, and what broken ones left in it.

use std::collections::BTreeMap;
use std::path::Path;

use super::{LaunchPlan, Sink};
use crate::machine::NcclVersion;
use crate::record::{ArmId, Event, Outcome, OutcomeKind};
use crate::shared_memory::{Before, Cleared, SharedMemory, is_peer_access_off, need_bytes};
use crate::units::group_thousands;
use crate::wording::plural;

/// Most files that are named one by one.
const MOST_NAMED: usize = 20;

/// What a run knows of shared memory.
pub(super) struct Room {
    memory: SharedMemory,
    version: NcclVersion,
    ranks: u32,
    /// The most channels that NCCL made where no variable asked for a number.
    channels_seen: Option<u32>,
    /// Whether data went through shared memory in a launch so far; none before the first answer.
    shared_memory_seen: Option<bool>,
    /// What stood there before the launch under way.
    before: Option<Before>,
    removed: (u32, u64),
    kept: u32,
}

impl Room {
    /// Of a run with this NCCL and so many ranks.
    pub(super) const fn new(memory: SharedMemory, version: NcclVersion, ranks: u32) -> Self {
        Self {
            memory,
            version,
            ranks,
            channels_seen: None,
            shared_memory_seen: None,
            before: None,
            removed: (0, 0),
            kept: 0,
        }
    }

    /// Looks before a launch and, where arms of it cannot find room, tells their end and that of the
    /// launch, which must then not be started. Arms that need less get another one. `environment` is that
    /// of every worker.
    pub(super) fn refuse(&mut self, plan: &LaunchPlan, environment: &BTreeMap<String, String>, sink: Sink<'_>) -> bool {
        let short = self.short_of(plan, environment);
        let Some((_, outcome)) = short.first().cloned() else { return false };
        for (arm, outcome) in short {
            let failed = Event::CellFailed {
                arm,
                point: None,
                block: plan.block,
                launch: plan.launch,
                outcome,
                duration_s: 0.0,
            };
            if sink(failed).is_break() {
                return true;
            }
        }
        let _ = sink(Event::LaunchEnded {
            launch: plan.launch,
            duration_s: 0.0,
            set_by_environment: Vec::new(),
            outcome: Some(outcome),
        });
        true
    }

    /// The arms that cannot find room, each with its outcome.
    ///
    /// Whether NCCL will use shared memory at all is its own choice. It is known where peer access is
    /// switched off, and once a launch has shown it; before that a launch may try, since refusing one
    /// that needs nothing would cost the run, and NCCL says itself what it lacks.
    fn short_of(&mut self, plan: &LaunchPlan, environment: &BTreeMap<String, String>) -> Vec<(ArmId, Outcome)> {
        self.before = self.memory.before_launch();
        let Some(free) = self.memory.free_bytes() else { return Vec::new() };
        let short = plan.communicators.iter().filter_map(|communicator| {
            let arm = &communicator.arm;
            let mut all = environment.clone();
            all.extend(plan.environment.clone());
            all.extend(arm.env.clone());
            if !(is_peer_access_off(&all, self.version) || self.shared_memory_seen == Some(true)) {
                return None;
            }
            let need = need_bytes(&all, self.version, self.ranks, self.channels_seen).filter(|need| *need > free)?;
            Some((arm.id.clone(), Outcome { kind: OutcomeKind::OutOfMemory, detail: shortage(free, need, self.ranks) }))
        });
        short.collect()
    }

    /// Learns from what a launch measured.
    pub(super) fn hear(&mut self, plan: &LaunchPlan, event: &Event) {
        let Event::CellMeasured(cell) = event else { return };
        if let Some(transport) = &cell.effective.transport {
            // A rank that meets one of its peers there needs the room for it.
            let is_shared = transport.contains("SHM");
            self.shared_memory_seen = Some(is_shared || self.shared_memory_seen.unwrap_or(false));
        }
        let arm = plan.communicators.iter().find(|communicator| communicator.arm.id == cell.arm);
        let sets_channels = arm.is_some_and(|communicator| {
            communicator.arm.env.keys().any(|name| name.contains("NCHANNELS") || name.contains("NRINGS"))
        });
        if !sets_channels {
            self.channels_seen = self.channels_seen.max(cell.effective.communicator_channels);
        }
    }

    /// After the processes of a launch have ended: removes what they left, if they did not end as
    /// planned, and writes down which files these were, beside what the workers printed.
    pub(super) fn clear(&mut self, launch: u32, broken: bool, logs: &Path) {
        let Some(before) = self.before.take().filter(|_| broken) else { return };
        let cleared = self.memory.remove_leftovers(&before);
        if cleared == Cleared::default() {
            return;
        }
        self.removed.0 += cleared.removed.len() as u32;
        self.removed.1 += cleared.removed.iter().map(|file| file.bytes).sum::<u64>();
        self.kept += cleared.kept.len() as u32;
        // Logs help a person; a run does not fail for want of them.
        let _ = fs_err::create_dir_all(logs);
        let _ = fs_err::write(logs.join(format!("launch-{launch:04}-shared-memory.log")), log(&cleared));
    }

    /// What the verdict should say of it.
    pub(super) fn notes(&self) -> Vec<String> {
        let (files, bytes) = self.removed;
        let removed = (files > 0).then(|| {
            format!(
                "{files} {} that broken launches left in /dev/shm, {} MiB, {} removed",
                plural(files, "file", "files"),
                group_thousands(bytes >> 20),
                plural(files, "was", "were")
            )
        });
        let kept = (self.kept > 0).then(|| {
            format!(
                "{} {} in /dev/shm that may be of broken launches {} left alone; logs/ says why",
                self.kept,
                plural(self.kept, "file", "files"),
                plural(self.kept, "was", "were")
            )
        });
        removed.into_iter().chain(kept).collect()
    }
}

fn shortage(free: u64, need: u64, ranks: u32) -> String {
    let mib = |bytes: u64| format!("{} MiB", group_thousands(bytes >> 20));
    format!(
        "/dev/shm has {} free, and the buffers of {ranks} ranks need about {}, so the launch was not started; give a \
         container more with --shm-size or --ipc=host, or the host a larger /dev/shm",
        mib(free),
        mib(need.next_multiple_of(1 << 20))
    )
}

fn log(cleared: &Cleared) -> String {
    let removed = cleared.removed.iter().map(|file| format!("removed {} ({} bytes)", file.name, file.bytes));
    let kept = cleared.kept.iter().map(|(file, why)| format!("kept {} ({} bytes): {why}", file.name, file.bytes));
    let lines: Vec<String> = removed.chain(kept).collect();
    let more = lines.len().saturating_sub(MOST_NAMED);
    let mut text: String = lines.into_iter().take(MOST_NAMED).map(|line| line + "\n").collect();
    if more > 0 {
        text.push_str(&format!("and {more} more\n"));
    }
    text
}

#[cfg(test)]
mod tests {
    use std::ops::ControlFlow;
    use std::path::PathBuf;

    use super::*;
    use crate::backend::CommunicatorPlan;
    use crate::record::{CellMeasurement, Effective, Phase};
    use crate::wording::fixtures::{self, map};

    /// A launch of these arms.
    fn plan(arms: &[(&str, &[(&str, &str)])]) -> LaunchPlan {
        let communicator = |(name, env): &(&str, &[(&str, &str)])| CommunicatorPlan {
            arm: fixtures::arm(name, env),
            call: None,
            variables: BTreeMap::new(),
            points: Vec::new(),
            checks: Vec::new(),
            passes: Vec::new(),
        };
        LaunchPlan {
            launch: 7,
            block: 0,
            phase: Phase::Search,
            environment: BTreeMap::new(),
            communicators: arms.iter().map(communicator).collect(),
            cell_time_ms: 1.0,
            data_seed: 0,
        }
    }

    fn measured(arm: &str, transport: &str, channels: u32) -> Event {
        let effective = Effective {
            transport: Some(transport.to_owned()),
            communicator_channels: Some(channels),
            ..Effective::default()
        };
        Event::CellMeasured(CellMeasurement { effective, ..fixtures::cell(arm) })
    }

    struct Planted {
        root: tempfile::TempDir,
        room: Room,
    }

    /// A room on whatever file system temporary folders are on, for so many ranks.
    fn planted(ranks: u32) -> Planted {
        let root = tempfile::tempdir().unwrap();
        fs_err::create_dir_all(root.path().join("dev/shm")).unwrap();
        fs_err::create_dir_all(root.path().join("proc/1/fd")).unwrap();
        fs_err::write(root.path().join("proc/1/maps"), "").unwrap();
        let memory = SharedMemory::under(root.path(), nix::unistd::getuid().as_raw());
        let room = Room::new(memory, NcclVersion::v2(28, 9), ranks);
        Planted { root, room }
    }

    /// More ranks than any disk has room for.
    const MANY: u32 = u32::MAX;

    #[test]
    fn an_arm_without_room_is_told_before_its_launch_with_the_figures_and_the_remedy() {
        let legacy = map(&[("NCCL_CUMEM_ENABLE", "0"), ("NCCL_P2P_DISABLE", "1")]);
        let mut short = planted(MANY).room.short_of(&plan(&[("default", &[])]), &legacy);
        let (arm, outcome) = short.pop().unwrap();
        assert_eq!((arm.0.as_str(), outcome.kind), ("default", OutcomeKind::OutOfMemory));
        for words in ["/dev/shm has ", " MiB free", "need about 171,798,691,800 MiB", "--shm-size", "--ipc=host"] {
            assert!(outcome.detail.contains(words), "{words}: {}", outcome.detail);
        }
        assert!(planted(1).room.short_of(&plan(&[("default", &[])]), &legacy).is_empty());
        let modern = map(&[("NCCL_P2P_DISABLE", "1")]);
        assert!(planted(MANY).room.short_of(&plan(&[("default", &[])]), &modern).is_empty());
    }

    #[test]
    fn only_the_arms_that_lack_room_fail_and_the_others_get_another_launch() {
        let environment = map(&[("NCCL_P2P_DISABLE", "1")]);
        let plan = plan(&[("default", &[]), ("files", &[("NCCL_CUMEM_HOST_ENABLE", "0")])]);
        let mut events = Vec::new();
        let mut sink = |event| {
            events.push(event);
            ControlFlow::Continue(())
        };
        assert!(planted(MANY).room.refuse(&plan, &environment, &mut sink));
        assert!(!planted(1).room.refuse(&plan, &environment, &mut sink), "there is room for one rank");
        let [Event::CellFailed { arm, launch: 7, point: None, .. }, Event::LaunchEnded { launch: 7, outcome, .. }] =
            events.as_slice()
        else {
            panic!("{events:?}")
        };
        assert_eq!(arm.0, "files");
        assert_eq!(outcome.as_ref().map(|outcome| outcome.kind), Some(OutcomeKind::OutOfMemory));
    }

    #[test]
    fn what_peer_access_carries_needs_no_room() {
        let legacy = map(&[("NCCL_CUMEM_ENABLE", "0")]);
        let launch = plan(&[("default", &[])]);
        let mut planted = planted(MANY);
        assert!(planted.room.short_of(&launch, &legacy).is_empty(), "not known yet");
        planted.room.hear(&launch, &measured("default", "P2P/IPC", 8));
        assert!(planted.room.short_of(&launch, &legacy).is_empty());
        planted.room.hear(&launch, &measured("default", "P2P/IPC+SHM/direct/direct", 8));
        assert_eq!(planted.room.short_of(&launch, &legacy).len(), 1);
        planted.room.hear(&launch, &measured("default", "P2P/IPC", 8));
        assert_eq!(planted.room.short_of(&launch, &legacy).len(), 1, "once is enough");
    }

    #[test]
    fn channels_that_an_arm_asked_for_say_nothing_of_others() {
        let launch = plan(&[("default", &[]), ("many", &[("NCCL_MIN_NCHANNELS", "32")])]);
        let mut room = planted(2).room;
        room.hear(&launch, &measured("many", "SHM/direct/direct", 32));
        assert_eq!(room.channels_seen, None);
        room.hear(&launch, &measured("default", "SHM/direct/direct", 12));
        room.hear(&launch, &measured("default", "SHM/direct/direct", 8));
        assert_eq!(room.channels_seen, Some(12));
    }

    #[test]
    fn what_a_broken_launch_left_is_removed_logged_and_noted() {
        let mut planted = planted(2);
        let logs = planted.root.path().join("logs");
        let left = |planted: &Planted| -> PathBuf {
            let path = planted.root.path().join("dev/shm/nccl-left00");
            fs_err::write(&path, vec![0; 3 << 20]).unwrap();
            path
        };
        planted.room.short_of(&plan(&[("default", &[])]), &BTreeMap::new());
        let path = left(&planted);
        planted.room.clear(7, false, &logs);
        assert!(path.exists() && planted.room.notes().is_empty(), "a launch that ended as planned leaves nothing");
        planted.room.short_of(&plan(&[("default", &[])]), &BTreeMap::new());
        planted.room.clear(8, true, &logs);
        assert!(path.exists() && !logs.exists(), "it was there before");
        fs_err::remove_file(&path).unwrap();
        planted.room.short_of(&plan(&[("default", &[])]), &BTreeMap::new());
        let path = left(&planted);
        planted.room.clear(9, true, &logs);
        assert!(!path.exists());
        let log = fs_err::read_to_string(logs.join("launch-0009-shared-memory.log")).unwrap();
        assert_eq!(log, "removed nccl-left00 (3145728 bytes)\n");
        assert_eq!(planted.room.notes(), ["1 file that broken launches left in /dev/shm, 3 MiB, was removed"]);
    }
}
