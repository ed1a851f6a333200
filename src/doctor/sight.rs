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
            shared_memory: SharedMemory::look(&under(facts.root, Path::new("/dev/shm"))),
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
        let path = under(self.facts.root, Path::new(path));
        // Opening what is no file may wait forever.
        fs_err::metadata(&path).ok().filter(Metadata::is_file)?;
        let mut bytes = Vec::new();
        fs_err::File::open(&path).ok()?.take(TEXT_BYTES).read_to_end(&mut bytes).ok()?;
        Some(String::from_utf8_lossy(&bytes).into_owned())
    }

    /// The first bytes of a system file, where there is such a file.
    pub(super) fn bytes(&self, path: &str, most: u64) -> Option<Vec<u8>> {
        let path = under(self.facts.root, Path::new(path));
        fs_err::metadata(&path).ok().filter(Metadata::is_file)?;
        let mut bytes = Vec::new();
        fs_err::File::open(&path).ok()?.take(most).read_to_end(&mut bytes).ok()?;
        Some(bytes)
    }

    /// Whether a system folder has anything in it; none where there is no such folder.
    pub(super) fn has_entries(&self, folder: &str) -> Option<bool> {
        let entries = fs_err::read_dir(under(self.facts.root, Path::new(folder))).ok()?;
        Some(entries.flatten().next().is_some())
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
