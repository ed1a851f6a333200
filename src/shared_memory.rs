//! /dev/shm as far as NCCL's ranks meet there: what it needs, what is free, what was left behind.
//!
//! Where ranks exchange data through host memory the legacy way, each receiving rank makes a file
//! per channel, named `nccl-` and six random characters, and takes its name away once its peer has opened it. A rank that is killed
//! in between leaves the file, and with it the memory. Where CUDA's virtual memory calls provide the
//! memory there are no files, and nothing here applies.
//!
//! Everything is read below a root, "/" or a folder that stands for it.

use std::collections::{BTreeMap, BTreeSet};
use std::io::{BufRead, BufReader, ErrorKind, Read};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use nix::errno::Errno;
use nix::fcntl::OFlag;
use nix::sys::stat::{Mode, major, minor};

use crate::knob::{ReadValue, read_as_nccl};
use crate::machine::NcclVersion;

/// Bytes of one channel's buffers on a receiving rank with NCCL 2.28's defaults (init.cc, device.h):
/// Simple 4 MiB, LL 0.5 MiB, LL128 120 x 16 x 640 x 4 = 4,915,200.
pub const SIMPLE_BYTES: u64 = 4 << 20;
/// The same of LL.
pub const LL_BYTES: u64 = 512 << 10;
/// The same of LL128.
pub const LL128_BYTES: u64 = 4_915_200;
/// Their sum with its control words is rounded up to this, which is what allocations come in.
const GRANULE_BYTES: u64 = 2 << 20;
/// Channels that NCCL makes at least where it is left alone.
pub const FEWEST_CHANNELS: u64 = 4;
/// Channels that NCCL makes at most (MAXCHANNELS); also a bound on what a variable may claim.
const MOST_CHANNELS: u64 = 64;
/// First release that takes shared host memory from CUDA without being told to.
const WITHOUT_FILES: NcclVersion = NcclVersion::v2(24, 0);

/// Most entries of a folder that are looked at.
const MOST_ENTRIES: usize = 65_536;
/// Most of a process's list of mappings that is read. A process on many GPUs has some megabytes.
const MOST_MAPS_BYTES: u64 = 256 << 20;

/// A file that NCCL made and did not take away.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NcclFile {
    /// Its name, `nccl-` and six characters.
    pub name: String,
    /// Its owner.
    pub user: u32,
    /// Its length in bytes.
    pub bytes: u64,
    /// When it was written last; none where the file system does not say.
    pub modified: Option<SystemTime>,
    /// Device it is on.
    pub device: u64,
    /// Its number there: a name may come again, with another number.
    pub inode: u64,
}

/// NCCL's files in a folder.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Listing {
    /// The files, by name.
    pub files: Vec<NcclFile>,
    /// Whether there may be more: the folder has more entries than anybody looks at.
    pub is_cut: bool,
}

/// Lists NCCL's files in a folder: regular ones with a name that NCCL gives, links not followed.
pub fn nccl_files(folder: &Path) -> std::io::Result<Listing> {
    let mut listing = Listing::default();
    for (position, entry) in fs_err::read_dir(folder)?.enumerate() {
        if position >= MOST_ENTRIES {
            listing.is_cut = true;
            break;
        }
        let entry = entry?;
        let Some(name) = entry.file_name().to_str().filter(|name| is_nccl_name(name)).map(str::to_owned) else {
            continue;
        };
        // Of the entry itself: a link is nothing that NCCL made. It may be gone by now.
        if let Ok(metadata) = entry.metadata()
            && metadata.is_file()
        {
            listing.files.push(NcclFile {
                name,
                user: metadata.uid(),
                bytes: metadata.len(),
                modified: metadata.modified().ok(),
                device: metadata.dev(),
                inode: metadata.ino(),
            });
        }
    }
    listing.files.sort_by(|left, right| left.name.cmp(&right.name));
    Ok(listing)
}

/// `nccl-` and six characters that mkstemp fills in.
fn is_nccl_name(name: &str) -> bool {
    name.strip_prefix("nccl-")
        .is_some_and(|rest| rest.len() == 6 && rest.bytes().all(|byte| byte.is_ascii_alphanumeric()))
}

/// Room for shared memory, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Room {
    /// What this user may still take.
    pub free: u64,
    /// What there is; 0 where nothing limits it but memory itself.
    pub total: u64,
}

/// The room in a folder's file system.
pub fn room(folder: &Path) -> Result<Room, Errno> {
    let space = nix::sys::statvfs::statvfs(folder)?;
    Ok(Room {
        free: space.fragment_size().saturating_mul(space.blocks_available()),
        total: space.fragment_size().saturating_mul(space.blocks()),
    })
}

/// Bytes that the ranks of one launch need in /dev/shm where their data goes through it; none where no
/// files are used for it. `environment` is everything NCCL reads, `channels_seen` the most channels that
/// it made when it was left alone.
///
/// One receiving connection per rank and channel: what a ring needs. Trees need more, so this errs
/// towards letting a launch try.
pub fn need_bytes(
    environment: &BTreeMap<String, String>,
    version: NcclVersion,
    ranks: u32,
    channels_seen: Option<u32>,
) -> Option<u64> {
    let integer = |name: &str| match read_as_nccl(name, environment.get(name)?, version).value {
        ReadValue::Integer(value) => Some(value),
        _ => None,
    };
    let positive = |name: &str| integer(name).and_then(|value| u64::try_from(value).ok()).filter(|value| *value > 0);
    let is_old = version < WITHOUT_FILES && integer("NCCL_CUMEM_HOST_ENABLE") != Some(1);
    let is_told = integer("NCCL_CUMEM_HOST_ENABLE") == Some(0) || integer("NCCL_CUMEM_ENABLE") == Some(0);
    if !(is_old || is_told) || integer("NCCL_SHM_DISABLE") == Some(1) {
        return None;
    }
    let buffer = |name: &str, default: u64| positive(name).unwrap_or(default);
    let channel = buffer("NCCL_BUFFSIZE", SIMPLE_BYTES)
        .saturating_add(buffer("NCCL_LL_BUFFSIZE", LL_BYTES))
        .saturating_add(buffer("NCCL_LL128_BUFFSIZE", LL128_BYTES))
        .checked_next_multiple_of(GRANULE_BYTES)
        .unwrap_or(u64::MAX);
    // The old names win where both are set.
    let least = positive("NCCL_MIN_NRINGS").or_else(|| positive("NCCL_MIN_NCHANNELS"));
    let most = positive("NCCL_MAX_NRINGS").or_else(|| positive("NCCL_MAX_NCHANNELS")).unwrap_or(MOST_CHANNELS);
    let channels = least.unwrap_or_else(|| u64::from(channels_seen.unwrap_or(0))).max(FEWEST_CHANNELS);
    Some(channel.saturating_mul(channels.min(most).min(MOST_CHANNELS)).saturating_mul(u64::from(ranks)))
}

/// Whether the environment keeps GPUs from reading each other's memory, so that data of one machine goes
/// through the host's.
pub fn is_peer_access_off(environment: &BTreeMap<String, String>, version: NcclVersion) -> bool {
    let read = |name: &str| environment.get(name).map(|text| read_as_nccl(name, text, version).value);
    read("NCCL_P2P_DISABLE") == Some(ReadValue::Integer(1))
        || matches!(read("NCCL_P2P_LEVEL"), Some(ReadValue::Level("LOC")))
}

/// What stood in /dev/shm before a launch.
#[derive(Debug, Clone)]
pub struct Before {
    names: BTreeSet<String>,
    inodes: BTreeSet<(u64, u64)>,
}

/// What became of the files that a launch left.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Cleared {
    /// Files that were removed.
    pub removed: Vec<NcclFile>,
    /// Files that are new and were left, each with the reason.
    pub kept: Vec<(NcclFile, String)>,
}

/// /dev/shm and /proc of this machine.
#[derive(Debug, Clone)]
pub struct SharedMemory {
    root: PathBuf,
    user: u32,
}

impl SharedMemory {
    /// That of the machine, for the user this process runs as.
    pub fn of_this_machine() -> Self {
        Self::under(Path::new("/"), nix::unistd::getuid().as_raw())
    }

    /// That below a root, for a user.
    pub fn under(root: &Path, user: u32) -> Self {
        Self { root: root.to_owned(), user }
    }

    /// The folder.
    pub fn folder(&self) -> PathBuf {
        self.root.join("dev/shm")
    }

    /// Bytes that may still be taken; none where that cannot be told or nothing limits it.
    pub fn free_bytes(&self) -> Option<u64> {
        room(&self.folder()).ok().filter(|room| room.total > 0).map(|room| room.free)
    }

    /// Notes what is there before a launch. None where not everything can be seen: nothing is removed
    /// then, since nothing is known to be new.
    pub fn before_launch(&self) -> Option<Before> {
        let listing = nccl_files(&self.folder()).ok().filter(|listing| !listing.is_cut)?;
        Some(Before {
            names: listing.files.iter().map(|file| file.name.clone()).collect(),
            inodes: listing.files.iter().map(|file| (file.device, file.inode)).collect(),
        })
    }

    /// Removes what a launch left that was killed or crashed, after its processes have ended: files that
    /// are new since `before`, this user's, and that no living process has mapped or open. Whatever is in
    /// doubt stays.
    pub fn remove_leftovers(&self, before: &Before) -> Cleared {
        let mut cleared = Cleared::default();
        let Ok(listing) = nccl_files(&self.folder()) else { return cleared };
        // A file of before that was renamed or replaced is somebody's, too.
        let is_new =
            |file: &NcclFile| !before.names.contains(&file.name) && !before.inodes.contains(&(file.device, file.inode));
        let candidates: Vec<NcclFile> =
            listing.files.into_iter().filter(|file| file.user == self.user && is_new(file)).collect();
        if candidates.is_empty() {
            return cleared;
        }
        let in_use = match self.in_use(&candidates) {
            Ok(in_use) => in_use,
            Err(doubt) => {
                cleared.kept = candidates.into_iter().map(|file| (file, doubt.clone())).collect();
                return cleared;
            }
        };
        for file in candidates {
            if let Some(process) = in_use.get(&file.name) {
                cleared.kept.push((file, format!("process {process} uses it")));
                continue;
            }
            match self.remove(&file) {
                Ok(true) => cleared.removed.push(file),
                Ok(false) => {}
                Err(error) => cleared.kept.push((file, error.to_string())),
            }
        }
        cleared
    }

    /// Removes a file if it is still the one that was looked at; false where it is gone or another.
    fn remove(&self, file: &NcclFile) -> std::io::Result<bool> {
        let path = self.folder().join(&file.name);
        let now = match fs_err::symlink_metadata(&path) {
            Ok(now) => now,
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(false),
            Err(error) => return Err(error),
        };
        if !now.is_file() || (now.dev(), now.ino(), now.uid()) != (file.device, file.inode, self.user) {
            return Ok(false);
        }
        fs_err::remove_file(&path).map(|()| true)
    }

    /// Which of these files a living process has mapped or open: name and process id. An error says why
    /// nobody can tell. Processes of other users that may not be looked at do not count: the files are
    /// this user's alone.
    fn in_use(&self, files: &[NcclFile]) -> Result<BTreeMap<String, u32>, String> {
        let folder = self.root.join("proc");
        let entries = fs_err::read_dir(&folder).map_err(|error| error.to_string())?;
        let mut in_use = BTreeMap::new();
        let mut processes = 0_usize;
        for entry in entries {
            let entry = entry.map_err(|error| error.to_string())?;
            let Some(process) = entry.file_name().to_str().and_then(|name| name.parse::<u32>().ok()) else { continue };
            processes += 1;
            let looked = mapped(&entry.path(), files).and_then(|mut names| {
                names.extend(open(&entry.path(), files)?);
                Ok(names)
            });
            match looked {
                Ok(names) => in_use.extend(names.into_iter().map(|name| (name, process))),
                Err(error) if has_ended(&error) => {}
                Err(error) if error.kind() == ErrorKind::PermissionDenied && !self.owns(&entry.path()) => {}
                Err(error) => return Err(format!("process {process} cannot be looked at: {error}")),
            }
        }
        // This process at least must be there, or it is no list of processes.
        if processes == 0 { Err(format!("{} lists no process", folder.display())) } else { Ok(in_use) }
    }

    fn owns(&self, process: &Path) -> bool {
        fs_err::metadata(process).is_ok_and(|metadata| metadata.uid() == self.user)
    }
}

/// Whether an error says that the process is no more, or has no memory of its own, as a thread of the
/// kernel.
fn has_ended(error: &std::io::Error) -> bool {
    error.kind() == ErrorKind::NotFound || error.raw_os_error() == Some(Errno::ESRCH as i32)
}

/// The files among these that a process has mapped. A line of its list:
/// `7f2c50000000-7f2c50a00000 rw-s 00000000 00:1a 4242   /dev/shm/nccl-AbCdEf`.
fn mapped(process: &Path, files: &[NcclFile]) -> std::io::Result<BTreeSet<String>> {
    // fs_err would hide the number of the error, which alone says that a process has ended meanwhile; the
    // name is in the caller's words.
    let file = nix::fcntl::open(&process.join("maps"), OFlag::O_RDONLY | OFlag::O_CLOEXEC, Mode::empty())?;
    let mut reader = BufReader::new(std::fs::File::from(file).take(MOST_MAPS_BYTES));
    let mut names = BTreeSet::new();
    let (mut line, mut read) = (Vec::new(), 0_u64);
    loop {
        line.clear();
        let length = reader.read_until(b'\n', &mut line)? as u64;
        if length == 0 {
            break;
        }
        read += length;
        let text = String::from_utf8_lossy(&line);
        let mut words = text.split_whitespace().skip(3);
        let (device, inode) = (words.next().unwrap_or_default(), words.next().unwrap_or_default());
        // The path may be seen through another mount, so its last part is enough; the number alone would
        // do for a file that was renamed.
        let path = words.next().unwrap_or_default();
        let is_it = |file: &&NcclFile| {
            let same_name = path.rsplit('/').next() == Some(&file.name);
            let same_number = inode.parse() == Ok(file.inode)
                && device == format!("{:02x}:{:02x}", major(file.device), minor(file.device));
            same_name || same_number
        };
        names.extend(files.iter().filter(is_it).map(|file| file.name.clone()));
    }
    if read >= MOST_MAPS_BYTES {
        return Err(std::io::Error::other("its list of mappings is too long"));
    }
    Ok(names)
}

/// The files among these that a process has open.
fn open(process: &Path, files: &[NcclFile]) -> std::io::Result<BTreeSet<String>> {
    let mut names = BTreeSet::new();
    for entry in fs_err::read_dir(process.join("fd"))? {
        let path = entry?.path();
        // A descriptor may be closed while it is looked at.
        let Ok(target) = fs_err::read_link(&path) else { continue };
        let name = target.file_name().and_then(|name| name.to_str()).unwrap_or_default();
        let number = fs_err::metadata(&path).ok().map(|metadata| (metadata.dev(), metadata.ino()));
        let is_it = |file: &&NcclFile| name == file.name || number == Some((file.device, file.inode));
        names.extend(files.iter().filter(is_it).map(|file| file.name.clone()));
    }
    Ok(names)
}

#[cfg(test)]
mod tests {
    use super::*;

    const OLD: NcclVersion = NcclVersion::v2(21, 5);
    const NEW: NcclVersion = NcclVersion::v2(28, 9);
    const MIB: u64 = 1 << 20;

    fn map(entries: &[(&str, &str)]) -> BTreeMap<String, String> {
        entries.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect()
    }

    fn need_mib(version: NcclVersion, ranks: u32, seen: Option<u32>, entries: &[(&str, &str)]) -> Option<u64> {
        let bytes = need_bytes(&map(entries), version, ranks, seen)?;
        assert_eq!(bytes % MIB, 0);
        Some(bytes / MIB)
    }

    #[test]
    fn only_the_legacy_path_needs_files() {
        assert_eq!(need_mib(OLD, 2, None, &[]), Some(80));
        assert_eq!(need_mib(NEW, 2, None, &[]), None);
        assert_eq!(need_mib(NEW, 2, None, &[("NCCL_CUMEM_ENABLE", "0")]), Some(80));
        assert_eq!(need_mib(NEW, 2, None, &[("NCCL_CUMEM_HOST_ENABLE", "0")]), Some(80));
        assert_eq!(need_mib(NEW, 2, None, &[("NCCL_CUMEM_ENABLE", "1"), ("NCCL_CUMEM_HOST_ENABLE", "1")]), None);
        assert_eq!(need_mib(NcclVersion::v2(23, 4), 2, None, &[]), Some(80));
        assert_eq!(need_mib(NcclVersion::v2(23, 4), 2, None, &[("NCCL_CUMEM_HOST_ENABLE", "1")]), None);
        assert_eq!(need_mib(OLD, 2, None, &[("NCCL_SHM_DISABLE", "1")]), None);
    }

    #[test]
    fn the_need_is_channels_times_buffers_times_ranks() {
        let channels = |count: &'static str| ("NCCL_MIN_NCHANNELS", count);
        for (ranks, seen, entries, mib) in [
            (8, None, vec![], 320),
            (8, Some(2), vec![], 320),
            (8, Some(24), vec![], 1920),
            (8, Some(24), vec![channels("16")], 1280),
            (2, None, vec![channels("2")], 80),
            (2, None, vec![channels("32"), ("NCCL_MAX_NCHANNELS", "8")], 160),
            (2, Some(24), vec![("NCCL_MAX_NCHANNELS", "2")], 40),
            (2, None, vec![channels("8"), ("NCCL_MIN_NRINGS", "16")], 320),
            // 1 + 0.5 + 4.69 MiB are 8 in steps of 2; 16 + 0.5 + 4.69 are 22.
            (2, None, vec![("NCCL_BUFFSIZE", "1048576")], 64),
            (2, None, vec![("NCCL_BUFFSIZE", "16777216")], 176),
            // What NCCL does not understand is as if it were not there.
            (2, None, vec![channels("many"), ("NCCL_BUFFSIZE", "-1")], 80),
        ] {
            assert_eq!(need_mib(OLD, ranks, seen, &entries), Some(mib), "{ranks} ranks, {seen:?}, {entries:?}");
        }
        let absurd = map(&[("NCCL_BUFFSIZE", "9223372036854775807"), channels("9223372036854775807")]);
        assert!(need_bytes(&absurd, OLD, u32::MAX, None).is_some_and(|bytes| bytes > 1 << 40));
    }

    #[test]
    fn peer_access_is_off_where_nccl_reads_it_so() {
        assert!(is_peer_access_off(&map(&[("NCCL_P2P_DISABLE", "1")]), NEW));
        assert!(is_peer_access_off(&map(&[("NCCL_P2P_LEVEL", "LOC")]), NEW));
        for entries in [vec![], vec![("NCCL_P2P_DISABLE", "0")], vec![("NCCL_P2P_LEVEL", "SYS")]] {
            assert!(!is_peer_access_off(&map(&entries), NEW), "{entries:?}");
        }
    }

    /// A root with /dev/shm and one process of this user that uses nothing.
    struct Planted {
        root: tempfile::TempDir,
        memory: SharedMemory,
    }

    fn this_user() -> u32 {
        nix::unistd::getuid().as_raw()
    }

    impl Planted {
        fn new() -> Self {
            let root = tempfile::tempdir().unwrap();
            let memory = SharedMemory::under(root.path(), this_user());
            let planted = Self { root, memory };
            fs_err::create_dir_all(planted.memory.folder()).unwrap();
            planted.process(1);
            planted
        }

        fn file(&self, name: &str) -> PathBuf {
            let path = self.memory.folder().join(name);
            fs_err::write(&path, "12345").unwrap();
            path
        }

        fn process(&self, id: u32) -> PathBuf {
            let folder = self.root.path().join("proc").join(id.to_string());
            fs_err::create_dir_all(folder.join("fd")).unwrap();
            fs_err::write(
                folder.join("maps"),
                "7f00-7f01 r-xp 00000000 08:01 77 /usr/bin/true\n7f02-7f03 rw-p 0 00:00 0\n",
            )
            .unwrap();
            folder
        }

        fn names(&self) -> Vec<String> {
            nccl_files(&self.memory.folder()).unwrap().files.into_iter().map(|file| file.name).collect()
        }
    }

    #[test]
    fn files_are_listed_with_what_tells_them_apart() {
        let planted = Planted::new();
        let path = planted.file("nccl-AbCd12");
        for other in ["nccl-toolong7", "nccl-12345", "nccl-12345.", "xnccl-123456", "nccl-"] {
            planted.file(other);
        }
        fs_err::create_dir(planted.memory.folder().join("nccl-folder")).unwrap();
        fs_err::os::unix::fs::symlink(&path, planted.memory.folder().join("nccl-linked")).unwrap();
        let listing = nccl_files(&planted.memory.folder()).unwrap();
        let [file] = listing.files.as_slice() else { panic!("{listing:?}") };
        let metadata = fs_err::metadata(&path).unwrap();
        assert_eq!((file.name.as_str(), file.user, file.bytes), ("nccl-AbCd12", this_user(), 5));
        assert_eq!((file.device, file.inode), (metadata.dev(), metadata.ino()));
        assert_eq!(file.modified, metadata.modified().ok());
        assert!(!listing.is_cut);
        assert!(nccl_files(&planted.root.path().join("none")).is_err());
    }

    #[test]
    fn only_what_a_launch_left_and_nobody_uses_is_removed() {
        let planted = Planted::new();
        planted.file("nccl-before");
        let before = planted.memory.before_launch().unwrap();
        // Left by the launch: one that nobody uses, and three that living processes hold.
        for name in ["nccl-left00", "nccl-mapped", "nccl-opened", "nccl-number"] {
            planted.file(name);
        }
        planted.file("other");
        fs_err::create_dir(planted.memory.folder().join("nccl-folder")).unwrap();
        fs_err::os::unix::fs::symlink("other", planted.memory.folder().join("nccl-linked")).unwrap();
        let user = planted.process(41);
        fs_err::write(user.join("maps"), "7f00-7f01 rw-s 00000000 00:1a 4 /run/elsewhere/nccl-mapped\n").unwrap();
        let opener = planted.process(42);
        fs_err::os::unix::fs::symlink(planted.memory.folder().join("nccl-opened"), opener.join("fd/7")).unwrap();
        let numbered = fs_err::metadata(planted.memory.folder().join("nccl-number")).unwrap();
        let (major, minor) = (major(numbered.dev()), minor(numbered.dev()));
        let renamed = planted.process(43);
        let maps = format!("7f00-7f01 rw-s 00000000 {major:02x}:{minor:02x} {} /renamed\n", numbered.ino());
        fs_err::write(renamed.join("maps"), maps).unwrap();
        let cleared = planted.memory.remove_leftovers(&before);
        assert_eq!(cleared.removed.iter().map(|file| file.name.as_str()).collect::<Vec<_>>(), ["nccl-left00"]);
        let kept: Vec<(&str, &str)> =
            cleared.kept.iter().map(|(file, reason)| (file.name.as_str(), reason.as_str())).collect();
        assert_eq!(
            kept,
            [
                ("nccl-mapped", "process 41 uses it"),
                ("nccl-number", "process 43 uses it"),
                ("nccl-opened", "process 42 uses it")
            ]
        );
        assert_eq!(planted.names(), ["nccl-before", "nccl-mapped", "nccl-number", "nccl-opened"]);
        assert!(planted.memory.folder().join("other").exists() && planted.memory.folder().join("nccl-linked").exists());
    }

    #[test]
    fn a_file_of_before_stays_whatever_it_is_called_now() {
        let planted = Planted::new();
        let folder = planted.memory.folder();
        planted.file("nccl-rename");
        planted.file("nccl-again0");
        let before = planted.memory.before_launch().unwrap();
        fs_err::rename(folder.join("nccl-rename"), folder.join("nccl-newnam")).unwrap();
        // The same name again may be the same owner's next file. The old one lives on until then, so that
        // its number is not given out again.
        fs_err::rename(folder.join("nccl-again0"), folder.join("away")).unwrap();
        planted.file("nccl-again0");
        assert_eq!(planted.memory.remove_leftovers(&before), Cleared::default());
        assert_eq!(planted.names(), ["nccl-again0", "nccl-newnam"]);
    }

    #[test]
    fn files_of_other_users_are_nobody_elses_business() {
        let planted = Planted::new();
        let other = SharedMemory::under(planted.root.path(), this_user() + 1);
        let before = other.before_launch().unwrap();
        planted.file("nccl-their1");
        assert_eq!(other.remove_leftovers(&before), Cleared::default());
        assert_eq!(planted.names(), ["nccl-their1"]);
    }

    #[test]
    fn where_processes_cannot_be_looked_at_everything_stays() {
        let planted = Planted::new();
        let before = planted.memory.before_launch().unwrap();
        planted.file("nccl-left00");
        // A process of this user whose list of mappings is no file.
        let odd = planted.process(44);
        fs_err::remove_file(odd.join("maps")).unwrap();
        fs_err::create_dir(odd.join("maps")).unwrap();
        let cleared = planted.memory.remove_leftovers(&before);
        assert!(cleared.removed.is_empty(), "{cleared:?}");
        assert!(cleared.kept[0].1.starts_with("process 44 cannot be looked at"), "{cleared:?}");
        // One that ended meanwhile is no obstacle.
        fs_err::remove_dir(odd.join("maps")).unwrap();
        assert_eq!(planted.memory.remove_leftovers(&before).removed.len(), 1);
        // Without any process there is no list of processes.
        planted.file("nccl-left01");
        fs_err::rename(planted.root.path().join("proc"), planted.root.path().join("away")).unwrap();
        assert_eq!(planted.memory.remove_leftovers(&before).kept.len(), 1);
        fs_err::create_dir(planted.root.path().join("proc")).unwrap();
        let cleared = planted.memory.remove_leftovers(&before);
        assert!(cleared.kept[0].1.ends_with("lists no process"), "{cleared:?}");
        assert_eq!(planted.names(), ["nccl-left01"]);
    }

    #[test]
    fn a_file_that_this_very_process_holds_is_in_use() {
        // Against the real /proc: the planted one could be wrong about its form.
        let planted = Planted::new();
        let path = planted.file("nccl-held00");
        let held = fs_err::File::open(&path).unwrap();
        let files = nccl_files(&planted.memory.folder()).unwrap().files;
        let process = PathBuf::from("/proc").join(std::process::id().to_string());
        let names = BTreeSet::from(["nccl-held00".to_owned()]);
        assert_eq!(open(&process, &files).unwrap(), names);
        drop(held);
        assert_eq!(open(&process, &files).unwrap(), BTreeSet::new());
        assert_eq!(mapped(&process, &files).unwrap(), BTreeSet::new());
        // What is mapped for sure is this program.
        let program = fs_err::metadata("/proc/self/exe").unwrap();
        let own = NcclFile { name: String::new(), device: program.dev(), inode: program.ino(), ..files[0].clone() };
        let name = fs_err::read_link("/proc/self/exe").unwrap().file_name().unwrap().to_string_lossy().into_owned();
        let named = NcclFile { name: name.clone(), inode: u64::MAX, ..own };
        assert_eq!(mapped(&process, &[named]).unwrap(), BTreeSet::from([name]));
    }

    #[test]
    fn the_real_list_of_processes_can_be_read_to_its_end() {
        let planted = Planted::new();
        let held = fs_err::File::open(planted.file("nccl-held00")).unwrap();
        let files = nccl_files(&planted.memory.folder()).unwrap().files;
        match SharedMemory::under(Path::new("/"), this_user()).in_use(&files) {
            Ok(in_use) => assert_eq!(in_use, BTreeMap::from([("nccl-held00".to_owned(), std::process::id())])),
            // A process of this user that may not be looked at, which a machine may well have.
            Err(doubt) => assert!(doubt.starts_with("process "), "{doubt}"),
        }
        drop(held);
    }

    #[test]
    fn room_is_told_where_there_is_a_folder() {
        let planted = Planted::new();
        let here = room(&planted.memory.folder()).unwrap();
        assert!(here.free <= here.total && here.total > 0);
        assert!(planted.memory.free_bytes().is_some());
        assert_eq!(room(&planted.root.path().join("none")), Err(Errno::ENOENT));
        assert_eq!(SharedMemory::under(&planted.root.path().join("none"), 0).free_bytes(), None);
        assert!(SharedMemory::under(&planted.root.path().join("none"), 0).before_launch().is_none());
    }
}
