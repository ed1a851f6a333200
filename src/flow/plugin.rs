//! This project's tuner plugin: found, recognised, and copied beside what it reads.
//!
//! NCCL goes on in silence without a plugin that it cannot load, so an answer with a table names a copy in the run
//! directory, by its whole path, and that copy is checked whenever an answer is told.

use std::path::{Path, PathBuf};

use super::directory;
use crate::canonical::Fingerprint;
use crate::error_kind::{ErrorKind, Failure};
use crate::file_kind::PLUGIN_FILE;
use crate::record::PluginRecord;

/// Largest plugin that is read: one that was built for debugging takes some megabytes.
const BYTES_MAX: u64 = 64 << 20;
/// What follows in a plugin of this project is its version, and a zero.
const MARK: &[u8] = b"nccltune tuner plugin ";
/// Every tuner plugin has a symbol that begins so.
const SYMBOL: &[u8] = b"ncclTunerPlugin_v";
const ELF: &[u8] = b"\x7fELF";
/// Longest version.
const VERSION_BYTES: usize = 32;

/// A plugin that was read and recognised.
#[derive(Debug, Clone)]
pub(super) struct Plugin {
    bytes: Vec<u8>,
    /// Which it is.
    pub(super) record: PluginRecord,
}

impl Plugin {
    /// The plugin that the user named, or the one that came with this program. None where nobody named one and none
    /// came.
    pub(super) fn find(named: Option<&Path>) -> Result<Option<Self>, Failure> {
        if let Some(path) = named {
            return Self::of_this_version(path).map(Some).map_err(|why| {
                Failure::new(ErrorKind::Usage, format!("no tuner plugin of this tool: {why}"))
                    .with_hint(format!("--plugin names {PLUGIN_FILE}, which is built with nccltune"))
            });
        }
        Ok(places().into_iter().find_map(|path| Self::of_this_version(&path).ok()))
    }

    /// For a new run, which must not rest on what another version does. A run that is there has its own copy, known by
    /// its SHA-256.
    fn of_this_version(path: &Path) -> Result<Self, String> {
        let plugin = Self::read(path)?;
        let (version, own) = (&plugin.record.version, env!("CARGO_PKG_VERSION"));
        if version != own {
            return Err(format!("{} is of version {version}, and this is nccltune {own}", path.display()));
        }
        Ok(plugin)
    }

    /// The plugin of a run, which must be the one that its tables were measured with.
    pub(super) fn of_run(run: &Path, record: &PluginRecord) -> Result<Self, Failure> {
        let path = run.join(PLUGIN_FILE);
        let refused = |why: String| {
            Failure::new(ErrorKind::Usage, why).with_hint(
                "a server that does not find the plugin ignores the table in silence; copy run directories whole, or \
                 start a new run",
            )
        };
        let plugin =
            Self::read(&path).map_err(|why| refused(format!("the tuner plugin of the run cannot be had: {why}")))?;
        if plugin.record == *record {
            return Ok(plugin);
        }
        Err(refused(format!("{} is not the tuner plugin that the run was measured with", path.display())))
    }

    fn read(path: &Path) -> Result<Self, String> {
        let metadata = fs_err::metadata(path).map_err(|error| error.to_string())?;
        if !metadata.is_file() || metadata.len() > BYTES_MAX {
            return Err(format!("{} is no plugin", path.display()));
        }
        let bytes = fs_err::read(path).map_err(|error| error.to_string())?;
        let version = version(&bytes).ok_or_else(|| format!("{} is another library", path.display()))?;
        let sha256 = Fingerprint::of_bytes(&bytes).as_str().to_owned();
        Ok(Self { bytes, record: PluginRecord { version, sha256 } })
    }

    /// Puts a copy into a run directory.
    pub(super) fn write(&self, run: &Path) -> Result<(), Failure> {
        directory::write_bytes_for_good(run, PLUGIN_FILE, &self.bytes)
    }
}

/// The version that a plugin of this project says it is of.
fn version(bytes: &[u8]) -> Option<String> {
    let find = |wanted: &[u8]| bytes.windows(wanted.len()).position(|window| window == wanted);
    if !bytes.starts_with(ELF) {
        return None;
    }
    find(SYMBOL)?;
    let text = &bytes[find(MARK)? + MARK.len()..];
    let end = text.iter().take(VERSION_BYTES).position(|byte| *byte == 0)?;
    std::str::from_utf8(&text[..end]).ok().map(str::to_owned)
}

/// Where the plugin lies that came with this program: beside it, where cargo builds it, or as packages put it.
fn places() -> Vec<PathBuf> {
    let Ok(program) = std::env::current_exe() else { return Vec::new() };
    let Some(folder) = program.parent() else { return Vec::new() };
    [folder.to_owned(), folder.join("deps"), folder.join("../lib/nccltune")]
        .map(|folder| folder.join(PLUGIN_FILE))
        .into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_plugin_is_built_with_this_package_and_found_beside_it() {
        let plugin = Plugin::find(None).unwrap().expect("cargo builds the plugin with this package");
        assert_eq!(plugin.record.version, env!("CARGO_PKG_VERSION"));
        let folder = tempfile::tempdir().unwrap();
        plugin.write(folder.path()).unwrap();
        assert_eq!(Plugin::of_run(folder.path(), &plugin.record).unwrap().record, plugin.record);
        let other = PluginRecord { sha256: "0".repeat(64), ..plugin.record };
        let failure = Plugin::of_run(folder.path(), &other).unwrap_err().to_string();
        assert!(failure.contains("is not the tuner plugin that the run was measured with"), "{failure}");
    }

    #[test]
    fn a_missing_a_foreign_and_an_older_plugin_are_told_apart() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("libx.so");
        let told = || Plugin::find(Some(&path)).unwrap_err().to_string();
        assert!(told().contains("libx.so"), "{}", told());
        for (bytes, says) in [
            (b"\x7fELF ncclTunerPlugin_v5".as_slice(), "is another library"),
            (b"\x7fELF ncclTunerPlugin_v5 nccltune tuner plugin 0.0.1\0", "is of version 0.0.1"),
            (b"\x7fELF ncclTunerPlugin_v5 nccltune tuner plugin 0.0.1", "is another library"),
            (b"nccltune tuner plugin 0.1.0\0 ncclTunerPlugin_v5", "is another library"),
        ] {
            fs_err::write(&path, bytes).unwrap();
            assert!(told().contains(says), "{}", told());
        }
        fs_err::remove_file(&path).unwrap();
        fs_err::create_dir(&path).unwrap();
        assert!(told().contains("is no plugin"), "{}", told());
    }
}
