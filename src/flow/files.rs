//! Files that stand beside arms: read once, when a run begins; written into its directory under the name
//! that their content gives them; and from then on read there and nowhere else, never without a check.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use super::directory;
use super::workload::read_bounded;
use crate::canonical::Fingerprint;
use crate::error_kind::{ErrorKind, Failure};
use crate::file_kind::FileKind;
use crate::record::{Arm, Space};
use crate::tuner_table::Table;

/// Largest file of an arm: the topology of a machine with sixteen GPUs takes some tens of kilobytes.
const MAX_BYTES: u64 = 1 << 20;
/// Longest path that NCCL's log tells whole, by which it is proven that a file was read.
const MAX_PATH_BYTES: usize = 500;

/// What the files of a run's arms hold, by their names in its directory.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct RunFiles(BTreeMap<String, String>);

impl RunFiles {
    /// Takes a file up, and says by which SHA-256 it is known.
    pub(super) fn add(&mut self, kind: FileKind, text: String) -> String {
        let sha256 = Fingerprint::of_bytes(text.as_bytes()).as_str().to_owned();
        self.0.insert(kind.file_name(&sha256), text);
        sha256
    }

    /// Takes up another's files.
    pub(super) fn extend(&mut self, other: Self) {
        self.0.extend(other.0);
    }

    /// The names.
    pub(super) fn names(&self) -> impl Iterator<Item = &str> {
        self.0.keys().map(String::as_str)
    }

    /// The tuner table of an arm, where it has one.
    pub(super) fn table_of(&self, arm: &Arm) -> Option<Table> {
        let name = FileKind::TunerTable.file_name(arm.files.get(&FileKind::TunerTable)?);
        Table::parse(self.0.get(&name)?.as_bytes()).ok()
    }

    /// Reads the files of a space's named arms. Returns the space with each file's SHA-256 in the place of
    /// its path; `space_file` is where the space itself was read.
    pub(super) fn of_space(space: &Space, space_file: &Path) -> Result<(Space, Self), Failure> {
        let (mut by_hash, mut files) = (space.clone(), Self::default());
        for arm in &mut by_hash.arm {
            for (kind, path) in &mut arm.files {
                // Joining an absolute path gives that path.
                let full = space_file.parent().unwrap_or(Path::new("")).join(&*path);
                let text = readable(&full).and_then(|text| plausible(*kind, text)).map_err(|why| {
                    Failure::new(ErrorKind::Usage, format!("{} of arm {:?}: {why}", kind.words(), arm.name))
                        .with_hint(format!("{}: a path in `files` begins at this file's folder", space_file.display()))
                })?;
                *path = files.add(*kind, text);
            }
        }
        Ok((by_hash, files))
    }

    /// Reads the files of these arms in a run directory, each of which must hold what it held when the run
    /// began.
    pub(super) fn of_run<'a>(run: &Path, arms: impl IntoIterator<Item = &'a Arm>) -> Result<Self, Failure> {
        let mut files = Self::default();
        for arm in arms {
            for (kind, sha256) in &arm.files {
                let name = kind.file_name(sha256);
                if kind.sha256_of(&name).is_none() {
                    let error = format!("{}: arm {:?} names no SHA-256", run.display(), arm.name);
                    return Err(Failure::new(ErrorKind::Usage, error).with_hint("copy run directories whole"));
                }
                if !files.0.contains_key(&name) {
                    files.0.insert(name.clone(), genuine(run, *kind, &name)?);
                }
            }
        }
        Ok(files)
    }

    /// Writes them into a run directory.
    pub(super) fn write(&self, run: &Path) -> Result<(), Failure> {
        self.0.iter().try_for_each(|(name, text)| directory::write_for_good(run, name, text))
    }
}

/// The text of a file of a run, if it is what its name says.
pub(super) fn genuine(run: &Path, kind: FileKind, name: &str) -> Result<String, Failure> {
    let path = run.join(name);
    let text = readable(&path).map_err(|why| {
        Failure::new(ErrorKind::Usage, format!("a {} of the run cannot be had: {why}", kind.words()))
            .with_hint("the run's figures were measured with it; copy run directories whole")
    })?;
    if kind.sha256_of(name) != Some(Fingerprint::of_bytes(text.as_bytes()).as_str()) {
        let error = format!("{} does not hold what it is named for: somebody changed it", path.display());
        return Err(Failure::new(ErrorKind::Usage, error).with_hint(
            "the run's figures were measured with another file; put it back from a copy, or start a new run",
        ));
    }
    Ok(text)
}

/// The run directory as a path that leads there from anywhere, which is what a worker and a server need.
pub(super) fn from_anywhere(run: &Path, files: &RunFiles) -> Result<PathBuf, Failure> {
    let full = std::path::absolute(run).map_err(|error| Failure::new(ErrorKind::Usage, error))?;
    if files.0.is_empty() {
        return Ok(full);
    }
    let longest = files.names().map(str::len).max().unwrap_or(0) + 1;
    let usable = full.to_str().is_some_and(|text| text.len() + longest <= MAX_PATH_BYTES && !text.contains('\n'));
    if !usable {
        let error = format!("{} is no place for files that NCCL is pointed at", full.display());
        return Err(Failure::new(ErrorKind::Usage, error).with_hint(format!(
            "name another --out DIR: UTF-8 text of one line, {} bytes at most",
            MAX_PATH_BYTES - longest
        )));
    }
    Ok(full)
}

/// A text file of reasonable size. What is no file is not opened: that may wait for ever.
fn readable(path: &Path) -> Result<String, String> {
    let metadata = fs_err::metadata(path).map_err(|error| error.to_string())?;
    if !metadata.is_file() {
        return Err(format!("{} is no file", path.display()));
    }
    read_bounded(path, MAX_BYTES).map_err(|error| error.to_string())
}

/// NCCL takes what it cannot read for nothing, or stops; an empty or foreign file is found out here.
fn plausible(kind: FileKind, text: String) -> Result<String, String> {
    match kind {
        FileKind::Topology | FileKind::Graph if !text.trim_start().starts_with('<') => {
            Err("it does not begin like XML".to_owned())
        }
        FileKind::Topology | FileKind::Graph => Ok(text),
        FileKind::TunerTable => match Table::parse(text.as_bytes()) {
            Ok(_) => Ok(text),
            Err(error) => Err(error.to_string()),
        },
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wording::fixtures;

    const GRAPH: &str = "<graphs version=\"1\"/>\n";

    fn run() -> (tempfile::TempDir, Arm, String) {
        let folder = tempfile::tempdir().unwrap();
        let mut files = RunFiles::default();
        let sha256 = files.add(FileKind::Graph, GRAPH.to_owned());
        let mut arm = fixtures::arm("ring", &[]);
        arm.files.insert(FileKind::Graph, sha256.clone());
        files.write(folder.path()).unwrap();
        (folder, arm, FileKind::Graph.file_name(&sha256))
    }

    #[test]
    fn what_was_written_is_read_back_and_nobody_may_change_it() {
        let (folder, arm, name) = run();
        let files = RunFiles::of_run(folder.path(), [&arm, &arm]).unwrap();
        assert_eq!(files.0, BTreeMap::from([(name.clone(), GRAPH.to_owned())]));
        let mode = std::os::unix::fs::PermissionsExt::mode(
            &fs_err::metadata(folder.path().join(&name)).unwrap().permissions(),
        );
        assert_eq!(mode & 0o777, 0o444);
        // The same again is no error: a run that goes on finds what it wrote.
        files.write(folder.path()).unwrap();
    }

    #[test]
    fn a_changed_a_missing_and_a_strange_file_are_each_told() {
        let (folder, arm, name) = run();
        let path = folder.path().join(&name);
        let told = || RunFiles::of_run(folder.path(), [&arm]).unwrap_err().to_string();
        fs_err::remove_file(&path).unwrap();
        assert!(told().contains("cannot be had"), "{}", told());
        fs_err::write(&path, format!("{GRAPH} ")).unwrap();
        assert!(told().contains("somebody changed it"), "{}", told());
        fs_err::write(&path, [0xff]).unwrap();
        assert!(told().contains("UTF-8"), "{}", told());
        fs_err::write(&path, "x".repeat(MAX_BYTES as usize + 1)).unwrap();
        assert!(told().contains("larger than"), "{}", told());
        fs_err::remove_file(&path).unwrap();
        fs_err::create_dir(&path).unwrap();
        assert!(told().contains("is no file"), "{}", told());
        let mut hostile = arm.clone();
        hostile.files.insert(FileKind::Graph, "../x".to_owned());
        assert!(RunFiles::of_run(folder.path(), [&hostile]).unwrap_err().to_string().contains("names no SHA-256"));
    }

    #[test]
    fn a_place_that_cannot_be_pointed_at_is_refused_only_where_there_are_files() {
        let long = PathBuf::from(format!("/srv/{}", "x".repeat(600)));
        let mut files = RunFiles::default();
        assert_eq!(from_anywhere(&long, &files).unwrap(), long);
        files.add(FileKind::Graph, GRAPH.to_owned());
        let failure = from_anywhere(&long, &files).unwrap_err();
        assert!(failure.hint().unwrap().contains("bytes at most"), "{failure}");
        assert!(from_anywhere(Path::new("a\nb"), &files).is_err());
        assert!(from_anywhere(Path::new("run"), &files).unwrap().is_absolute());
    }
}
