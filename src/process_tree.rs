//! What the kernel shows of processes that run: who started whom, with which environment, with which libraries mapped.
//!
//! Read below any root, bounded, and never trusted: a process may end between two files, be somebody else's, or have
//! overwritten its own environment.

use std::collections::{BTreeMap, BTreeSet};
use std::io::Read;
use std::path::{Path, PathBuf};

/// Most processes that are looked at.
const PROCESSES_MAX: usize = 100_000;
/// Most of a process's environment, mappings and names that is read.
const ENVIRONMENT_BYTES: u64 = 4 << 20;
const MAPS_BYTES: u64 = 32 << 20;
const NAME_BYTES: u64 = 4096;

/// A process's environment as it was when the process began.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Environment {
    /// It can be read. What the process set later is not in it.
    Read(BTreeMap<String, String>),
    /// The process overwrote it with its title, as setproctitle does: it has variables that nobody can see.
    Overwritten(BTreeMap<String, String>),
    /// The process is somebody else's.
    Denied,
    /// It ended meanwhile, or shows nothing.
    Gone,
}

/// A process.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Process {
    /// Its id.
    pub id: u32,
    /// Its parent's.
    pub parent: u32,
    /// Its title, or its command.
    pub name: String,
    /// Its environment.
    pub environment: Environment,
    /// Files that it has mapped as code, each once; none where they cannot be read.
    pub libraries: Option<BTreeSet<String>>,
}

impl Process {
    /// The libnccls it has mapped.
    pub fn nccl(&self) -> Vec<&str> {
        self.libraries.iter().flatten().map(String::as_str).filter(|path| is_nccl(path)).collect()
    }
}

/// Whether a file is a libnccl, under whatever release it was renamed for; not one of its plugins.
pub fn is_nccl(path: &str) -> bool {
    let path = path.strip_suffix(DELETED).unwrap_or(path);
    let name = path.rsplit('/').next().unwrap_or(path);
    let Some(rest) = name.strip_prefix("libnccl") else { return false };
    rest.starts_with(".so")
        || rest.starts_with('-') && rest[1..].starts_with(|c: char| c.is_ascii_digit()) && rest.contains(".so")
}

/// What the kernel puts behind the path of a file that is no longer there.
pub const DELETED: &str = " (deleted)";

/// A process and all that it started, in order of their ids; none where there is no such process.
pub fn tree_of(root: &Path, id: u32) -> Option<Vec<Process>> {
    let parents = parents(root);
    if !parents.contains_key(&id) {
        return None;
    }
    let mut members = BTreeSet::from([id]);
    // A child may have a smaller id than its parent, where ids have come round.
    loop {
        let more: Vec<u32> = parents
            .iter()
            .filter(|(child, parent)| members.contains(parent) && !members.contains(child))
            .map(|(child, _)| *child)
            .collect();
        if more.is_empty() {
            break;
        }
        members.extend(more);
    }
    Some(members.into_iter().map(|id| process(root, id, parents[&id])).collect())
}

/// Every process that has a libnccl mapped, as far as this user may see.
pub fn with_nccl(root: &Path) -> Vec<Process> {
    let parents = parents(root);
    let all = parents.iter().filter(|(id, _)| {
        let maps = bytes(&folder(root, **id).join("maps"), MAPS_BYTES).unwrap_or_default();
        libraries(&maps).iter().any(|path| is_nccl(path))
    });
    all.map(|(id, parent)| process(root, *id, *parent)).collect()
}

fn folder(root: &Path, id: u32) -> PathBuf {
    root.join("proc").join(id.to_string())
}

/// Each process with its parent.
fn parents(root: &Path) -> BTreeMap<u32, u32> {
    let Ok(entries) = fs_err::read_dir(root.join("proc")) else { return BTreeMap::new() };
    let ids = entries.flatten().filter_map(|entry| entry.file_name().to_str()?.parse::<u32>().ok());
    ids.take(PROCESSES_MAX)
        .filter_map(|id| {
            let stat = bytes(&folder(root, id).join("stat"), NAME_BYTES).ok()?;
            // "4711 (a name (with anything)) S 1 ...": the name ends at the last parenthesis.
            let text = String::from_utf8_lossy(&stat).into_owned();
            let parent = text.rsplit_once(')')?.1.split_whitespace().nth(1)?.parse().ok()?;
            Some((id, parent))
        })
        .collect()
}

fn process(root: &Path, id: u32, parent: u32) -> Process {
    let folder = folder(root, id);
    let maps = bytes(&folder.join("maps"), MAPS_BYTES);
    Process {
        id,
        parent,
        name: name(&folder),
        environment: environment(&folder),
        libraries: maps.ok().map(|maps| libraries(&maps)),
    }
}

/// The beginning of a file. What is no file is not opened: that may wait for ever.
fn bytes(path: &Path, most: u64) -> Result<Vec<u8>, std::io::Error> {
    if !fs_err::metadata(path)?.is_file() {
        return Err(std::io::Error::other("no regular file"));
    }
    let mut bytes = Vec::new();
    fs_err::File::open(path)?.take(most).read_to_end(&mut bytes)?;
    Ok(bytes)
}

fn name(folder: &Path) -> String {
    let words = |name: &str| {
        let bytes = bytes(&folder.join(name), NAME_BYTES).unwrap_or_default();
        let text = String::from_utf8_lossy(&bytes).replace('\0', " ");
        text.trim().to_owned()
    };
    let command = words("cmdline");
    if command.is_empty() { words("comm") } else { command }
}

fn environment(folder: &Path) -> Environment {
    match bytes(&folder.join("environ"), ENVIRONMENT_BYTES) {
        Err(error) if error.kind() == std::io::ErrorKind::PermissionDenied => Environment::Denied,
        Err(_) => Environment::Gone,
        Ok(bytes) => read_environment(&bytes),
    }
}

/// An environment is NAME=VALUE, each with one zero behind it. A title that was written over it leaves zeros, and the
/// rest of what it cut.
fn read_environment(bytes: &[u8]) -> Environment {
    let text = bytes.strip_suffix(&[0]).unwrap_or(bytes);
    let mut variables = BTreeMap::new();
    let mut is_whole = true;
    if !text.is_empty() {
        for entry in text.split(|byte| *byte == 0) {
            let entry = String::from_utf8_lossy(entry);
            match entry.split_once('=') {
                Some((name, value)) if !name.is_empty() => {
                    // The first counts, as getenv has it.
                    variables.entry(name.to_owned()).or_insert_with(|| value.to_owned());
                }
                _ => is_whole = false,
            }
        }
    }
    if is_whole { Environment::Read(variables) } else { Environment::Overwritten(variables) }
}

/// Files with code in them: "7f.. r-xp 00000000 08:01 123   /usr/lib/libc.so.6".
fn libraries(maps: &[u8]) -> BTreeSet<String> {
    String::from_utf8_lossy(maps)
        .lines()
        .filter_map(|line| {
            let mut rest = line;
            for _ in 0..5 {
                rest = rest.trim_start().split_once(' ')?.1;
            }
            let path = rest.trim_start();
            path.starts_with('/').then(|| path.to_owned())
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn planted() -> tempfile::TempDir {
        let folder = tempfile::tempdir().unwrap();
        for (id, parent, name) in [(10, 1, "server"), (11, 10, "a (b) c"), (9, 11, "worker"), (20, 1, "other")] {
            let process = folder.path().join("proc").join(id.to_string());
            fs_err::create_dir_all(&process).unwrap();
            fs_err::write(process.join("stat"), format!("{id} ({name}) S {parent} 1 1\n")).unwrap();
            fs_err::write(process.join("comm"), format!("{name}\n")).unwrap();
        }
        folder
    }

    #[test]
    fn a_tree_is_found_whatever_its_processes_are_called() {
        let folder = planted();
        let ids = |id| tree_of(folder.path(), id).map(|tree| tree.iter().map(|process| process.id).collect::<Vec<_>>());
        assert_eq!(ids(10), Some(vec![9, 10, 11]));
        assert_eq!(ids(20), Some(vec![20]));
        assert_eq!(ids(30), None);
        let worker = &tree_of(folder.path(), 9).unwrap()[0];
        assert_eq!((worker.name.as_str(), &worker.environment), ("worker", &Environment::Gone));
        assert_eq!(worker.libraries, None);
        assert_eq!(tree_of(&folder.path().join("nowhere"), 1), None);
    }

    #[test]
    fn an_environment_is_read_and_one_that_was_overwritten_is_recognised() {
        let read = |text: &str| read_environment(text.replace('|', "\0").as_bytes());
        let map = |entries: &[(&str, &str)]| {
            entries.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect()
        };
        assert_eq!(read("A=1|B=x=y|"), Environment::Read(map(&[("A", "1"), ("B", "x=y")])));
        assert_eq!(read(""), Environment::Read(map(&[])));
        // A title shorter than what it was written over, and the rest of a variable that it cut.
        assert_eq!(read("||||||OTE=2|B=1|"), Environment::Overwritten(map(&[("OTE", "2"), ("B", "1")])));
        assert_eq!(read("rker_TP0|||B=1|"), Environment::Overwritten(map(&[("B", "1")])));
    }

    #[test]
    fn a_libnccl_is_known_under_its_names_and_its_plugins_are_none() {
        for path in ["/a/libnccl.so.2", "/a/libnccl.so", "/opt/libnccl-2.30.4.so", "/a/libnccl.so.2.28.9 (deleted)"] {
            assert!(is_nccl(path), "{path}");
        }
        for path in ["/a/libnccl-net.so", "/a/libnccltune_tuner.so", "/a/libnccl", "/a/librccl.so", "/libnccl.so.d/x"] {
            assert!(!is_nccl(path), "{path}");
        }
        let maps = b"7f00-7f10 r-xp 00000000 08:01 123                        /opt/a b/libnccl.so.2\n\
                     7f10-7f20 rw-p 00000000 00:00 0 \n7f20-7f30 r-xp 0 08:01 9 [vdso]\nshort\n";
        assert_eq!(libraries(maps), BTreeSet::from(["/opt/a b/libnccl.so.2".to_owned()]));
    }
}
