//! What is looked at once and judged by several checks: the facts, and the files beneath the root.

use std::fs::Metadata;
use std::io::Read;
use std::path::{Path, PathBuf};

use super::conf_files::ConfFiles;
use super::system::SharedMemory;
use super::{Facts, VERIFIED};
use crate::machine::{Gpu, NcclVersion};

/// Most of a system file that is read: what matters in /proc/cpuinfo stands at its beginning.
const TEXT_BYTES: u64 = 1 << 16;

/// Everything the checks see.
pub(super) struct Sight<'a> {
    pub(super) facts: &'a Facts<'a>,
    /// The chosen GPUs, in their order.
    pub(super) gpus: Vec<&'a Gpu>,
    pub(super) conf: ConfFiles,
    pub(super) shared_memory: SharedMemory,
}

impl<'a> Sight<'a> {
    pub(super) fn look(facts: &'a Facts<'a>) -> Self {
        let gpus = facts.machine.map_or_else(Vec::new, |machine| {
            machine.gpus.iter().filter(|gpu| facts.devices.contains(&gpu.index)).collect()
        });
        let version = facts.nccl.map(|library| NcclVersion::from_code(library.version));
        Self {
            facts,
            gpus,
            conf: ConfFiles::look(facts.root, facts.environment, facts.home, version),
            // A copy lies on a disk that says nothing of the machine it was taken from.
            shared_memory: if facts.files_only {
                SharedMemory::as_mounted(text(facts.root, "/proc/mounts").as_deref())
            } else {
                SharedMemory::look(&under(facts.root, Path::new("/dev/shm")))
            },
        }
    }

    /// The release that texts are read as: where it is not known, the one the tool was checked with.
    pub(super) fn version(&self) -> NcclVersion {
        self.known_version().unwrap_or(VERIFIED)
    }

    pub(super) fn known_version(&self) -> Option<NcclVersion> {
        self.facts.nccl.map(|library| NcclVersion::from_code(library.version))
    }

    /// The beginning of a system file, where there is such a file.
    pub(super) fn text(&self, path: &str) -> Option<String> {
        text(self.facts.root, path)
    }

    /// The first bytes of a system file, where there is such a file.
    pub(super) fn bytes(&self, path: &str, most: u64) -> Option<Vec<u8>> {
        bytes(self.facts.root, path, most)
    }

    /// The names in a system folder, sorted, at most so many; none where there is no such folder.
    pub(super) fn names(&self, folder: &str, most: usize) -> Option<Vec<String>> {
        names(self.facts.root, folder, most)
    }

    /// Where a link of the system points, as it is written.
    pub(super) fn link(&self, folder: &str, name: &str) -> Option<String> {
        let folder = inside(self.facts.root, Path::new(folder))?;
        Some(fs_err::read_link(folder.join(name)).ok()?.to_string_lossy().into_owned())
    }

    /// Whether a system folder has anything in it; none where there is no such folder.
    pub(super) fn has_entries(&self, folder: &str) -> Option<bool> {
        Some(!self.names(folder, 1)?.is_empty())
    }

    /// A path as it is after all links, seen from the root; as written where that cannot be told.
    pub(super) fn real_path(&self, path: &Path) -> PathBuf {
        let real = || {
            let root = fs_err::canonicalize(self.facts.root).ok()?;
            let real = fs_err::canonicalize(under(self.facts.root, path)).ok()?;
            Some(Path::new("/").join(real.strip_prefix(root).ok()?))
        };
        real().unwrap_or_else(|| path.to_owned())
    }
}

/// The beginning of a file beneath the root, where there is such a file.
pub(super) fn text(root: &Path, path: &str) -> Option<String> {
    Some(String::from_utf8_lossy(&bytes(root, path, TEXT_BYTES)?).into_owned())
}

/// The first bytes of a file beneath the root, where there is such a file.
pub(super) fn bytes(root: &Path, path: &str, most: u64) -> Option<Vec<u8>> {
    let path = inside(root, Path::new(path))?;
    // Opening what is no file may wait forever.
    fs_err::metadata(&path).ok().filter(Metadata::is_file)?;
    let mut bytes = Vec::new();
    fs_err::File::open(&path).ok()?.take(most).read_to_end(&mut bytes).ok()?;
    Some(bytes)
}

/// The names in a folder beneath the root, sorted, at most so many.
pub(super) fn names(root: &Path, folder: &str, most: usize) -> Option<Vec<String>> {
    let entries = fs_err::read_dir(inside(root, Path::new(folder))?).ok()?;
    let mut names: Vec<String> =
        entries.flatten().take(most).map(|entry| entry.file_name().to_string_lossy().into_owned()).collect();
    names.sort();
    Some(names)
}

/// Where a path beneath the root lies; none where it, or a link on the way, leads out of it: a copy of
/// another machine's files must not be answered with this one's.
pub(super) fn inside(root: &Path, path: &Path) -> Option<PathBuf> {
    let path = under(root, path);
    (!leads_out(root, &path)).then_some(path)
}

/// Whether something is there and lies outside of the root.
pub(super) fn leads_out(root: &Path, path: &Path) -> bool {
    let is_outside = || {
        let real = fs_err::canonicalize(path).ok()?;
        Some(!real.starts_with(fs_err::canonicalize(root).ok()?))
    };
    root != Path::new("/") && is_outside().unwrap_or(false)
}

/// An absolute path beneath the root.
pub(super) fn under(root: &Path, path: &Path) -> PathBuf {
    root.join(path.strip_prefix("/").unwrap_or(path))
}

#[cfg(test)]
mod tests {
    use super::super::fixtures::Planted;
    use super::*;

    #[test]
    fn the_root_of_life_changes_no_path() {
        assert_eq!(under(Path::new("/"), Path::new("/dev/shm")), Path::new("/dev/shm"));
        assert_eq!(under(Path::new("/srv/image"), Path::new("/dev/shm")), Path::new("/srv/image/dev/shm"));
    }

    #[test]
    fn system_files_are_read_by_their_beginning_and_nothing_else_is() {
        let planted = Planted::healthy();
        planted.write("/proc/long", "x".repeat(1 << 20));
        planted.write("/proc/bytes", "flags");
        let facts = planted.facts();
        let sight = Sight::look(&facts);
        assert_eq!(sight.text("/proc/long").unwrap().len() as u64, TEXT_BYTES);
        assert_eq!(sight.text("/proc/none"), None);
        assert_eq!(sight.text("/proc"), None, "a folder is no text");
        assert_eq!(sight.has_entries("/proc"), Some(true));
        assert_eq!(sight.has_entries("/proc/none"), None);
    }

    #[test]
    fn links_are_followed_and_the_root_is_left_out() {
        let planted = Planted::healthy();
        planted.write("/opt/real/libnccl.so.2.28.9", "library");
        planted.link("/opt/libnccl.so.2", "real/libnccl.so.2.28.9");
        let facts = planted.facts();
        let sight = Sight::look(&facts);
        let real = Path::new("/opt/real/libnccl.so.2.28.9");
        assert_eq!(sight.real_path(Path::new("/opt/libnccl.so.2")), real);
        assert_eq!(sight.real_path(real), real);
        assert_eq!(sight.real_path(Path::new("/opt/none")), Path::new("/opt/none"));
    }
}
