//! quarantine.json: read without trust, changed under a lock, whole or not at all.

use std::collections::{BTreeMap, BTreeSet};
use std::io::{Read, Write};
use std::path::{Path, PathBuf};
use std::time::Duration;

use crate::canonical::Fingerprint;
use crate::file_lock;
use crate::machine::{Gpu, Machine, NcclLibrary, NcclVersion};
use crate::record::{FORMAT, FingerprintParts, OutcomeKind, QuarantineEntry, QuarantineFile};
use crate::wording::printable;

/// Name of the file in the folder for state.
pub const FILE_NAME: &str = "quarantine.json";
/// Name of the lock file beside it.
const LOCK_NAME: &str = "quarantine.lock";
/// Largest file that is read, and that is written: thousands of entries.
const MOST_BYTES: usize = 1 << 20;
/// How long the lock is waited for: changes take milliseconds.
const LOCK_WAIT: Duration = Duration::from_secs(1);
/// Characters kept of a detail, a name or a path.
const DETAIL_CHARACTERS: usize = 500;
const NAME_CHARACTERS: usize = 200;
const PATH_CHARACTERS: usize = 1000;

/// Names of the parts of a place.
const GPU_NAMES: &str = "gpus";
const GPU_IDENTITIES: &str = "gpu-identities";
const GPU_ADDRESSES: &str = "gpu-addresses";
const DRIVER: &str = "driver";
const CUDA_DRIVER: &str = "cuda-driver";
const NCCL: &str = "nccl";

/// Why the memory could not be read or changed. It never costs a run: the arms are then measured as if
/// nothing were remembered, and the user is told.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum StoreError {
    /// The operating system refused.
    #[error("could not {doing} {path}: {reason}", path = .path.display())]
    Io {
        /// What was tried.
        doing: &'static str,
        /// The file.
        path: PathBuf,
        /// The system's words.
        reason: String,
    },
    /// Another process held the lock for too long.
    #[error("another process holds {}", .0.display())]
    Locked(PathBuf),
    /// Something that this tool did not write.
    #[error("{path} is not as this tool writes it: {reason}", path = .path.display())]
    NotOurs {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        reason: String,
    },
    /// A newer version wrote it.
    #[error("{path}: format {format}; this version reads up to {FORMAT}", path = .path.display())]
    Newer {
        /// The file.
        path: PathBuf,
        /// Its format.
        format: u32,
    },
}

/// What is remembered, and where.
#[derive(Debug, Clone)]
pub struct Remembered {
    /// The file.
    pub path: PathBuf,
    /// Its entries, or why they cannot be had.
    pub entries: Result<Vec<QuarantineEntry>, StoreError>,
}

/// A change of the memory.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Change {
    /// Something failed.
    Remember(Box<QuarantineEntry>),
    /// What failed here with these variables was measured since.
    Forget {
        /// Combined fingerprint of the place.
        machine: String,
        /// Every variable in force.
        env: BTreeMap<String, String>,
    },
}

/// What an arm's failure depends on beside its variables, in named parts: the GPUs and their slots, the
/// driver in the kernel and in user space, the release of NCCL. An update of driver or NCCL may mend a
/// hang, so it makes another place, where nothing is remembered. The library's checksum is no part: the
/// packages of one release for several CUDA versions share their faults.
pub fn place(machine: &Machine, devices: &[u32], nccl: &NcclLibrary) -> FingerprintParts {
    let gpus: Vec<&Gpu> = machine.gpus.iter().filter(|gpu| devices.contains(&gpu.index)).collect();
    let each = |of: &dyn Fn(&Gpu) -> String| gpus.iter().map(|gpu| of(gpu)).collect::<Vec<_>>().join(", ");
    let or_unknown = |text: Option<String>| text.unwrap_or_else(|| "unknown".to_owned());
    let parts = BTreeMap::from([
        (GPU_NAMES.to_owned(), each(&|gpu| gpu.name.clone())),
        (GPU_IDENTITIES.to_owned(), each(&|gpu| gpu.uuid.clone())),
        (GPU_ADDRESSES.to_owned(), each(&|gpu| gpu.pci_bus_id.clone())),
        (DRIVER.to_owned(), or_unknown(machine.driver.clone())),
        (CUDA_DRIVER.to_owned(), or_unknown(machine.cuda_driver_version.map(|version| version.to_string()))),
        (NCCL.to_owned(), NcclVersion::from_code(nccl.version).to_string()),
    ]);
    FingerprintParts { combined: Fingerprint::of(&parts).as_str().to_owned(), parts }
}

/// Whether what was seen at one place may be seen at another that has more GPUs: a run may use some of
/// those that doctor looks at.
pub fn covers(wide: &FingerprintParts, narrow: &FingerprintParts) -> bool {
    let same = |part: &str| wide.parts.get(part) == narrow.parts.get(part);
    let gpus = |place: &FingerprintParts| -> Option<BTreeSet<String>> {
        let identities = place.parts.get(GPU_IDENTITIES)?.split(", ").map(str::to_owned);
        let addresses = place.parts.get(GPU_ADDRESSES)?.split(", ");
        Some(identities.zip(addresses).map(|(identity, address)| format!("{identity} {address}")).collect())
    };
    same(DRIVER)
        && same(CUDA_DRIVER)
        && same(NCCL)
        && gpus(wide).zip(gpus(narrow)).is_some_and(|(wide, narrow)| narrow.is_subset(&wide))
}

/// The memory on disk.
#[derive(Debug, Clone)]
pub struct Store {
    folder: PathBuf,
}

impl Store {
    /// The memory in this folder, which is made once there is something to remember.
    pub fn new(folder: &Path) -> Self {
        Self { folder: folder.to_owned() }
    }

    /// The file.
    pub fn path(&self) -> PathBuf {
        self.folder.join(FILE_NAME)
    }

    /// What is remembered; nothing where there is no file yet.
    pub fn remembered(&self) -> Remembered {
        Remembered { path: self.path(), entries: self.read() }
    }

    fn read(&self) -> Result<Vec<QuarantineEntry>, StoreError> {
        let path = self.path();
        let io = |error: std::io::Error| StoreError::Io { doing: "read", path: path.clone(), reason: cause(&error) };
        let not_ours = |reason: String| StoreError::NotOurs { path: path.clone(), reason };
        // Opening what is no file may wait for ever.
        match fs_err::metadata(&path) {
            Ok(metadata) if metadata.is_file() => {}
            Ok(_) => return Err(not_ours("it is no file".to_owned())),
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(Vec::new()),
            Err(error) => return Err(io(error)),
        }
        let mut bytes = Vec::new();
        fs_err::File::open(&path).map_err(io)?.take(MOST_BYTES as u64 + 1).read_to_end(&mut bytes).map_err(io)?;
        if bytes.len() > MOST_BYTES {
            return Err(not_ours(format!("it has more than {MOST_BYTES} bytes")));
        }
        // The format first, so that a newer file is named as such and not as damaged.
        let value: serde_json::Value =
            serde_json::from_slice(&bytes).map_err(|error| not_ours(printable(&error.to_string(), NAME_CHARACTERS)))?;
        let format = value.get("format").and_then(serde_json::Value::as_u64);
        match format.map(|format| u32::try_from(format).unwrap_or(u32::MAX)) {
            Some(format) if format > FORMAT => return Err(StoreError::Newer { path, format }),
            Some(_) => {}
            None => return Err(not_ours("it names no format".to_owned())),
        }
        let file: QuarantineFile =
            serde_json::from_value(value).map_err(|error| not_ours(printable(&error.to_string(), NAME_CHARACTERS)))?;
        Ok(file.entries.into_iter().map(bounded).collect())
    }

    /// Remembers a failure that no run's journal tells of.
    pub fn remember(&self, entry: QuarantineEntry) -> Result<(), StoreError> {
        self.change(&[Change::Remember(Box::new(entry))])
    }

    /// Forgets what failed at a place with exactly these variables, unless its result was wrong.
    pub fn forget(&self, machine: &str, env: &BTreeMap<String, String>) -> Result<(), StoreError> {
        self.change(&[Change::Forget { machine: machine.to_owned(), env: env.clone() }])
    }

    /// Makes changes, under the lock, to what the file holds by then.
    pub(super) fn change(&self, changes: &[Change]) -> Result<(), StoreError> {
        let io = |doing: &'static str, path: &Path| {
            let path = path.to_owned();
            move |error: std::io::Error| StoreError::Io { doing, path, reason: cause(&error) }
        };
        fs_err::create_dir_all(&self.folder).map_err(io("make", &self.folder))?;
        let _lock = self.lock()?;
        // What cannot be read is somebody's, and is left alone.
        let before = self.read()?;
        let entries = changed(before.clone(), changes);
        if entries == before {
            return Ok(());
        }
        let path = self.path();
        let text =
            rendered(entries).map_err(|error| StoreError::NotOurs { path: path.clone(), reason: error.to_string() })?;
        let mut file = tempfile::NamedTempFile::new_in(&self.folder).map_err(io("write in", &self.folder))?;
        file.write_all(text.as_bytes()).map_err(io("write", &path))?;
        file.as_file().sync_all().map_err(io("write", &path))?;
        file.persist(&path).map_err(|error| io("write", &path)(error.error))?;
        // A hang may take the whole machine with it: the new name must be on disk, too.
        fs_err::File::open(&self.folder).and_then(|folder| folder.sync_all()).map_err(io("write", &self.folder))
    }

    fn lock(&self) -> Result<fs_err::File, StoreError> {
        let path = self.folder.join(LOCK_NAME);
        let io = |error: &std::io::Error| StoreError::Io { doing: "lock", path: path.clone(), reason: cause(error) };
        let file = fs_err::OpenOptions::new()
            .create(true)
            .truncate(false)
            .write(true)
            .open(&path)
            .map_err(|error| io(&error))?;
        if !file_lock::take(file.file(), LOCK_WAIT).map_err(|error| io(&error))? {
            return Err(StoreError::Locked(path));
        }
        Ok(file)
    }
}

/// The system's words without the file, which the error that is made of them names. The words of a
/// temporary file would name another one each time.
fn cause(error: &std::io::Error) -> String {
    match error.kind() {
        std::io::ErrorKind::Other => error.to_string(),
        kind => kind.to_string(),
    }
}

/// An entry fit to be kept and shown, whoever wrote it.
fn bounded(mut entry: QuarantineEntry) -> QuarantineEntry {
    entry.arm = printable(&entry.arm, NAME_CHARACTERS);
    entry.outcome.detail = printable(&entry.outcome.detail, DETAIL_CHARACTERS);
    entry.since = printable(&entry.since, NAME_CHARACTERS);
    entry.run = printable(&entry.run, PATH_CHARACTERS);
    entry
}

/// The entries after some changes. The same variables at the same place have one entry, which keeps its
/// age; a wrong result stays what is said of it, and is not forgotten.
fn changed(mut entries: Vec<QuarantineEntry>, changes: &[Change]) -> Vec<QuarantineEntry> {
    for change in changes {
        match change {
            Change::Remember(new) => {
                let new = bounded((**new).clone());
                let same = |known: &&mut QuarantineEntry| {
                    known.machine.combined == new.machine.combined && known.env == new.env
                };
                match entries.iter_mut().find(same) {
                    Some(known) if known.outcome.kind == OutcomeKind::WrongResult => {}
                    Some(known) => *known = QuarantineEntry { since: known.since.clone(), ..new },
                    None => entries.push(new),
                }
            }
            Change::Forget { machine, env } => entries.retain(|known| {
                known.machine.combined != *machine
                    || known.env != *env
                    || known.outcome.kind == OutcomeKind::WrongResult
            }),
        }
    }
    entries
}

/// The text of the file; the oldest entries make room for new ones where it would become too large to
/// be read back.
fn rendered(mut entries: Vec<QuarantineEntry>) -> Result<String, serde_json::Error> {
    loop {
        let file = QuarantineFile { format: FORMAT, entries };
        let text = serde_json::to_string_pretty(&file)? + "\n";
        entries = file.entries;
        if text.len() <= MOST_BYTES || entries.is_empty() {
            return Ok(text);
        }
        // A share at a time: each attempt costs a megabyte of text.
        entries.drain(..entries.len().div_ceil(8));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::machine::LibrarySource;
    use crate::record::Outcome;
    use crate::wording::fixtures;

    fn gpu(index: u32) -> Gpu {
        Gpu {
            uuid: format!("GPU-{index}"),
            name: "NVIDIA Test".to_owned(),
            pci_bus_id: format!("0000:{index}b:00.0"),
            ..fixtures::gpu(index)
        }
    }

    fn machine() -> Machine {
        Machine {
            name: "3x NVIDIA Test".to_owned(),
            driver: Some("580.95.05".to_owned()),
            cuda_driver_version: Some(13_000),
            cpu: None,
            gpus: (0..3).map(gpu).collect(),
        }
    }

    fn nccl(version: i32) -> NcclLibrary {
        let path = "/opt/libnccl.so.2".to_owned();
        NcclLibrary { path, version, sha256: "9c1d5e3f7a20".repeat(5), source: LibrarySource::User }
    }

    fn entry(value: &str, kind: OutcomeKind) -> QuarantineEntry {
        QuarantineEntry {
            machine: place(&machine(), &[0, 1], &nccl(22_809)),
            arm: format!("MIN_NCHANNELS={value}"),
            env: BTreeMap::from([("NCCL_MIN_NCHANNELS".to_owned(), value.to_owned())]),
            outcome: Outcome { kind, detail: "no answer".to_owned() },
            since: "2026-11-30T09:14:07Z".to_owned(),
            run: "/srv/results/box".to_owned(),
        }
    }

    fn remember(entry: QuarantineEntry) -> Change {
        Change::Remember(Box::new(entry))
    }

    fn forget(entry: &QuarantineEntry) -> Change {
        Change::Forget { machine: entry.machine.combined.clone(), env: entry.env.clone() }
    }

    #[test]
    fn a_place_changes_with_driver_release_and_gpus_and_with_nothing_else() {
        let here = place(&machine(), &[0, 1], &nccl(22_809));
        let combined = |machine: &Machine, devices: &[u32], nccl: &NcclLibrary| place(machine, devices, nccl).combined;
        let driver = Machine { driver: Some("590.10".to_owned()), ..machine() };
        let user_space = Machine { cuda_driver_version: Some(13_010), ..machine() };
        let mut moved = machine();
        moved.gpus[1].pci_bus_id = "0000:5b:00.0".to_owned();
        let mut exchanged = machine();
        exchanged.gpus[1].uuid = "GPU-9".to_owned();
        for (other, devices, release) in [
            (&driver, [0, 1], 22_809),
            (&user_space, [0, 1], 22_809),
            (&moved, [0, 1], 22_809),
            (&exchanged, [0, 1], 22_809),
            (&machine(), [0, 2], 22_809),
            (&machine(), [0, 1], 22_903),
        ] {
            assert_ne!(combined(other, &devices, &nccl(release)), here.combined);
        }
        // What is free, busy or lies elsewhere changes nothing.
        let mut busy = Machine { cpu: Some("another".to_owned()), ..machine() };
        busy.gpus[0].memory_free_mib = Some(1);
        busy.gpus[2].uuid = "GPU-9".to_owned();
        let rebuilt = NcclLibrary { path: "/srv/libnccl.so.2".to_owned(), sha256: "0".to_owned(), ..nccl(22_809) };
        assert_eq!(combined(&busy, &[0, 1], &rebuilt), here.combined);
    }

    #[test]
    fn all_gpus_cover_some_of_them_and_not_the_other_way_round() {
        let all = place(&machine(), &[0, 1, 2], &nccl(22_809));
        let some = place(&machine(), &[0, 2], &nccl(22_809));
        assert!(covers(&all, &some) && covers(&all, &all) && !covers(&some, &all));
        assert!(!covers(&all, &place(&machine(), &[0, 2], &nccl(22_903))));
        let driver = Machine { driver: None, ..machine() };
        assert!(!covers(&all, &place(&driver, &[0, 2], &nccl(22_809))));
        let nothing = FingerprintParts { combined: String::new(), parts: BTreeMap::new() };
        assert!(!covers(&all, &nothing) && !covers(&nothing, &nothing));
    }

    #[test]
    fn what_is_remembered_is_merged_with_what_others_remembered() {
        let folder = tempfile::tempdir().unwrap();
        let store = Store::new(&folder.path().join("state/nccltune"));
        assert_eq!(store.remembered().entries, Ok(Vec::new()), "no file is no entry");
        let (hung, crashed) = (entry("32", OutcomeKind::TimedOut), entry("16", OutcomeKind::Crashed));
        store.change(&[remember(hung.clone())]).unwrap();
        Store::new(&folder.path().join("state/nccltune")).change(&[remember(crashed.clone())]).unwrap();
        assert_eq!(store.remembered().entries.unwrap(), [hung.clone(), crashed.clone()]);
        // The same again keeps its age and takes the newest story.
        let again = QuarantineEntry {
            since: "2027-01-01T00:00:00Z".to_owned(),
            run: "/srv/results/again".to_owned(),
            ..entry("32", OutcomeKind::Crashed)
        };
        store.change(&[remember(again.clone())]).unwrap();
        let entries = store.remembered().entries.unwrap();
        assert_eq!(entries.len(), 2);
        assert_eq!(entries[0], QuarantineEntry { since: hung.since.clone(), ..again });
        store.change(&[forget(&hung)]).unwrap();
        assert_eq!(store.remembered().entries.unwrap(), [crashed]);
        let names: BTreeSet<_> =
            fs_err::read_dir(&store.folder).unwrap().map(|entry| entry.unwrap().file_name()).collect();
        assert_eq!(names, BTreeSet::from([FILE_NAME.into(), LOCK_NAME.into()]), "nothing half-written is left");
    }

    #[test]
    fn a_wrong_result_is_neither_forgotten_nor_softened() {
        let wrong = entry("32", OutcomeKind::WrongResult);
        let changes = [remember(entry("32", OutcomeKind::TimedOut)), forget(&wrong)];
        assert_eq!(changed(vec![wrong.clone()], &changes), std::slice::from_ref(&wrong));
        assert_eq!(
            changed(vec![entry("32", OutcomeKind::TimedOut)], &[remember(wrong)])[0].outcome.kind,
            OutcomeKind::WrongResult
        );
    }

    #[test]
    fn a_file_that_is_not_ours_is_told_and_left_alone() {
        let folder = tempfile::tempdir().unwrap();
        let store = Store::new(folder.path());
        let deep = "[".repeat(100_000);
        let large = format!("{{\"format\": 1, \"entries\": [], \"x\": \"{}\"}}", "x".repeat(MOST_BYTES));
        for (text, words) in [
            ("", "not as this tool writes it"),
            ("garbage\u{1b}[2J", "not as this tool writes it"),
            ("[]", "it names no format"),
            ("{\"format\": \"one\"}", "it names no format"),
            ("{\"format\": 1, \"entries\": [{}]}", "missing field"),
            ("{\"format\": 99, \"entries\": 7}", "format 99; this version reads up to 1"),
            (deep.as_str(), "recursion limit"),
            (large.as_str(), "more than 1048576 bytes"),
        ] {
            fs_err::write(store.path(), text).unwrap();
            let error = store.remembered().entries.unwrap_err();
            let told = error.to_string();
            assert!(told.contains(words) && told.contains(FILE_NAME), "{told}");
            assert!(!told.contains('\u{1b}'), "{told}");
            assert_eq!(store.change(&[remember(entry("32", OutcomeKind::TimedOut))]), Err(error));
            assert_eq!(fs_err::read_to_string(store.path()).unwrap(), text);
        }
        fs_err::write(store.path(), "{\"format\": 1, \"later\": true}").unwrap();
        assert_eq!(store.remembered().entries, Ok(Vec::new()), "what a later version adds is no harm");
        fs_err::remove_file(store.path()).unwrap();
        fs_err::create_dir(store.path()).unwrap();
        assert!(store.remembered().entries.unwrap_err().to_string().contains("it is no file"));
    }

    #[test]
    fn a_place_that_cannot_be_written_is_an_error_with_its_name() {
        let folder = tempfile::tempdir().unwrap();
        fs_err::write(folder.path().join("file"), "").unwrap();
        let store = Store::new(&folder.path().join("file/state"));
        let error = store.change(&[remember(entry("32", OutcomeKind::TimedOut))]).unwrap_err();
        assert!(error.to_string().starts_with("could not make "), "{error}");
        assert_eq!(error.to_string().matches("file/state").count(), 1, "{error}");
    }

    #[test]
    fn text_from_outside_is_bounded_and_harmless() {
        let mut hostile = entry("32", OutcomeKind::TimedOut);
        hostile.outcome.detail = "\u{1b}[2J".repeat(10_000);
        hostile.arm = "a\nb".to_owned();
        hostile.run = "\u{202e}/srv".to_owned();
        let folder = tempfile::tempdir().unwrap();
        let store = Store::new(folder.path());
        let file = QuarantineFile { format: FORMAT, entries: vec![hostile] };
        fs_err::write(store.path(), serde_json::to_string(&file).unwrap()).unwrap();
        let [entry] = store.remembered().entries.unwrap().try_into().unwrap();
        assert!(entry.outcome.detail.chars().count() <= DETAIL_CHARACTERS + 3);
        for text in [&entry.outcome.detail, &entry.arm, &entry.run] {
            assert!(!text.contains(['\u{1b}', '\n', '\u{202e}']), "{text:?}");
        }
    }

    #[test]
    fn the_oldest_make_room_before_the_file_becomes_unreadable() {
        let folder = tempfile::tempdir().unwrap();
        let store = Store::new(folder.path());
        let mut entries: Vec<QuarantineEntry> = (0..1500)
            .map(|number| QuarantineEntry {
                outcome: Outcome { kind: OutcomeKind::Crashed, detail: "x".repeat(DETAIL_CHARACTERS) },
                ..entry(&number.to_string(), OutcomeKind::Crashed)
            })
            .collect();
        let newest = entry("newest", OutcomeKind::TimedOut);
        entries.push(newest.clone());
        store.change(&entries.into_iter().map(remember).collect::<Vec<_>>()).unwrap();
        let kept = store.remembered().entries.unwrap();
        assert!(kept.len() > 500, "{}", kept.len());
        assert_eq!(kept.last(), Some(&newest));
        assert_ne!(kept[0].arm, "MIN_NCHANNELS=0");
    }

    #[test]
    fn many_writers_lose_nothing() {
        let folder = tempfile::tempdir().unwrap();
        std::thread::scope(|scope| {
            for writer in 0..4 {
                let store = Store::new(folder.path());
                scope.spawn(move || {
                    for number in 0..5 {
                        let failed = entry(&format!("{writer}{number}"), OutcomeKind::Crashed);
                        store.change(&[remember(failed)]).unwrap();
                    }
                });
            }
        });
        assert_eq!(Store::new(folder.path()).remembered().entries.unwrap().len(), 20);
    }
}
