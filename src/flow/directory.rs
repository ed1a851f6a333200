//! The run directory: made, found again, and filled without ever leaving half a file.

use std::io::Write;
use std::path::{Path, PathBuf};

use serde::Deserialize;
use serde::de::DeserializeOwned;

use crate::error_kind::{ErrorKind, Failure};
use crate::journal::{self, JOURNAL_FILE};
use crate::record::FORMAT;
use crate::wording::printable;

/// File names in a run directory.
pub(super) const MANIFEST_FILE: &str = "manifest.json";
pub(super) const CHOICE_FILE: &str = "choice.json";
pub(super) const SUMMARY_FILE: &str = "summary.csv";
pub(super) const REPORT_FILE: &str = "report.html";
pub(super) const LOGS_FOLDER: &str = "logs";
/// The simulated machine of a run that was made on one from a file.
pub(super) const MACHINE_FILE: &str = "machine.toml";
/// Largest manifest or choice that is read.
const MAX_BYTES: u64 = 64 * 1024 * 1024;
/// Of what a reader says of a record: it quotes the record.
const ERROR_CHARACTERS: usize = 500;
/// What a run is read from, and its answer.
const OF_A_RUN: [&str; 6] = [MANIFEST_FILE, JOURNAL_FILE, CHOICE_FILE, MACHINE_FILE, "tuned.env", "tuned.sh"];

/// Makes a directory for a new run, or refuses one that holds something. Tells whether it had to be
/// made.
pub(super) fn create(path: &Path) -> Result<bool, Failure> {
    let mut made = false;
    let unusable =
        |error: std::io::Error| Failure::new(ErrorKind::Usage, error).with_hint("name another place with --out DIR");
    if path.join(JOURNAL_FILE).exists() || path.join(MANIFEST_FILE).exists() {
        return Err(Failure::new(ErrorKind::Usage, format!("{} already holds a run", path.display()))
            .with_hint("go on with it (--resume), or name another place with --out DIR"));
    }
    match fs_err::read_dir(path) {
        Ok(mut entries) => {
            if entries.next().is_some() {
                return Err(Failure::new(
                    ErrorKind::Usage,
                    format!("{} is not empty and holds no run of this tool", path.display()),
                )
                .with_hint("nothing in it was touched; name another place with --out DIR"));
            }
        }
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
            fs_err::create_dir_all(path).map_err(unusable)?;
            made = true;
        }
        Err(error) => return Err(unusable(error)),
    }
    // Found out now, not after an hour of measuring.
    tempfile::NamedTempFile::new_in(path).map_err(|error| {
        unusable(std::io::Error::new(error.kind(), format!("cannot write in {}: {error}", path.display())))
    })?;
    Ok(made)
}

/// Clears away what a run left that ended before its first event, its arms' `files` among it; the
/// directory too, if it was made for it.
pub(super) fn clear<'a>(path: &Path, made: bool, files: impl Iterator<Item = &'a str>) {
    // The directory stays as it is where even this fails; the error that led here is told.
    for file in files.chain([MANIFEST_FILE, MACHINE_FILE, crate::file_kind::PLUGIN_FILE]) {
        let _ = fs_err::remove_file(path.join(file));
    }
    if made {
        let _ = fs_err::remove_dir(path);
    }
}

/// A name for a run that nobody named: when, and what.
pub(super) fn default_path(created: &str, identity: &str) -> PathBuf {
    let stamp: String = created.chars().filter(char::is_ascii_alphanumeric).take(15).collect();
    Path::new("results").join(format!("{stamp}-{}", identity.get(..6).unwrap_or(identity)))
}

/// Writes a whole file or none.
pub(super) fn write(directory: &Path, name: &str, text: &str) -> Result<(), Failure> {
    write_for(directory, name, text.as_bytes(), 0o644)
}

/// The same for a file that nobody is to change any more.
pub(super) fn write_for_good(directory: &Path, name: &str, text: &str) -> Result<(), Failure> {
    write_for(directory, name, text.as_bytes(), 0o444)
}

/// The same for what is no text.
pub(super) fn write_bytes_for_good(directory: &Path, name: &str, bytes: &[u8]) -> Result<(), Failure> {
    write_for(directory, name, bytes, 0o444)
}

fn write_for(directory: &Path, name: &str, bytes: &[u8], mode: u32) -> Result<(), Failure> {
    let target = directory.join(name);
    let failed = |error: std::io::Error| {
        Failure::new(ErrorKind::Stopped, format!("could not write {}: {error}", target.display()))
            .with_hint("free some space, then go on with --resume: the journal is complete")
    };
    let mut file = tempfile::NamedTempFile::new_in(directory).map_err(failed)?;
    file.write_all(bytes).map_err(failed)?;
    file.as_file().sync_all().map_err(failed)?;
    // Temporary files are private; results are for everybody who may read the folder.
    let readable = std::os::unix::fs::PermissionsExt::from_mode(mode);
    file.as_file().set_permissions(readable).map_err(failed)?;
    file.persist(&target).map_err(|error| failed(error.error))?;
    Ok(())
}

/// Writes a file anywhere, whole or not at all.
pub fn write_file(path: &Path, text: &str) -> Result<(), Failure> {
    let usage = |text: String| Failure::new(ErrorKind::Usage, text);
    let Some(name) = path.file_name().and_then(|name| name.to_str()) else {
        return Err(usage(format!("{} names no file", path.display())));
    };
    let folder = match path.parent() {
        Some(folder) if !folder.as_os_str().is_empty() => folder,
        _ => Path::new("."),
    };
    // A file takes the place of what stood there: of a device, or of a link, that would be a surprise.
    if fs_err::symlink_metadata(path).is_ok_and(|there| !there.is_file()) {
        return Err(usage(format!("{} is there already, and is no regular file", path.display()))
            .with_hint("name another place, or leave it away and let the shell redirect"));
    }
    if OF_A_RUN.contains(&name) && folder.join(MANIFEST_FILE).exists() {
        return Err(usage(format!("{} is a part of a run, which nothing overwrites", path.display())));
    }
    // Nothing of a run is at stake here: a place that cannot be written is the user's to change.
    write(folder, name, text).map_err(|failure| usage(failure.to_string()))
}

/// Reads a JSON record of a run directory.
pub(super) fn read<T: DeserializeOwned>(directory: &Path, name: &str) -> Result<T, Failure> {
    let path = directory.join(name);
    let unreadable = |text: String| Failure::new(ErrorKind::Usage, text);
    let text = journal::require_regular(&path).and_then(|()| super::workload::read_bounded(&path, MAX_BYTES));
    let text = text.map_err(|error| {
        unreadable(error.to_string()).with_hint("a run directory holds manifest.json and run.jsonl")
    })?;
    let parse_error = |error: serde_json::Error| {
        unreadable(format!("{}: {}", path.display(), printable(&error.to_string(), ERROR_CHARACTERS)))
    };
    let Head { format } = serde_json::from_str(&text).map_err(parse_error)?;
    if format > FORMAT {
        // Told before fields are missed that only the newer version knows.
        return Err(unreadable(format!("{}: format {format}; this version reads up to {FORMAT}", path.display())));
    }
    serde_json::from_str(&text).map_err(parse_error)
}

/// What every record says first.
#[derive(Deserialize)]
struct Head {
    #[serde(default)]
    format: u32,
}

/// Keeps what broken launches printed before there was a run. Logs help a person; a run does not fail for
/// want of them.
pub(super) fn keep_logs(from: &Path, to: &Path) {
    for entry in fs_err::read_dir(from).into_iter().flatten().flatten() {
        let name = entry.file_name();
        let _ = fs_err::create_dir_all(to);
        let _ = fs_err::copy(entry.path(), to.join(format!("before-{}", name.to_string_lossy())));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_foreign_folder_is_left_alone() {
        let folder = tempfile::tempdir().unwrap();
        fs_err::write(folder.path().join("thesis.txt"), "mine").unwrap();
        let error = create(folder.path()).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Usage);
        assert_eq!(fs_err::read_dir(folder.path()).unwrap().count(), 1);
        create(&folder.path().join("new/run")).unwrap();
        fs_err::write(folder.path().join("new/run/run.jsonl"), "").unwrap();
        assert!(create(&folder.path().join("new/run")).unwrap_err().to_string().contains("already holds a run"));
    }

    #[test]
    fn a_file_is_whole_and_readable() {
        let folder = tempfile::tempdir().unwrap();
        write(folder.path(), "a.json", "{\"x\": 1}").unwrap();
        let value: serde_json::Value = read(folder.path(), "a.json").unwrap();
        assert_eq!(value["x"], 1);
        assert!(read::<serde_json::Value>(folder.path(), "b.json").is_err());
    }
}
