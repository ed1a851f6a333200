//! A file of variables as somebody deployed it: read strictly, with what its header says of where it was measured, the
//! run it came from, and the files that it points at.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use super::directory::{self, MANIFEST_FILE};
use super::lint::contents;
use crate::canonical::Fingerprint;
use crate::emit::{Header, read_header};
use crate::env_syntax::read_env_file;
use crate::error_kind::{Classified as _, ErrorKind, Failure};
use crate::file_kind::{FileKind, PLUGIN_VARIABLE, is_sha256};
use crate::fingerprint::told;
use crate::record::Manifest;
use crate::wording::printable;

/// Largest file that a variable points at.
const FILE_BYTES: u64 = 64 << 20;
/// Characters of a text from outside in a message.
pub(super) const SHOWN_CHARACTERS: usize = 200;

/// An env file that was read.
#[derive(Debug)]
pub(super) struct Deployed {
    /// Where it lies.
    pub(super) path: PathBuf,
    /// What it says of itself.
    pub(super) header: Header,
    /// Its variables, in its order.
    pub(super) variables: Vec<(String, String)>,
}

impl Deployed {
    /// Reads a file without a shell: nothing is expanded, and what readers of env files take differently is an error.
    pub(super) fn read(path: &Path) -> Result<Self, Failure> {
        let unreadable = |why: String| Failure::new(ErrorKind::Usage, format!("{}: {why}", path.display()));
        if path.as_os_str() == "-" {
            return Err(unreadable("standard input is the command's own".to_owned()).with_hint("name a file"));
        }
        let text = contents(path).map_err(unreadable)?;
        let variables = read_env_file(&text).map_err(|error| {
            let failure = unreadable(error.to_string());
            match error.hint() {
                Some(hint) => failure.with_hint(hint),
                None => failure,
            }
        })?;
        Ok(Self {
            path: path.to_owned(),
            header: read_header(&text),
            variables: variables.into_iter().map(|(_, name, value)| (name, value)).collect(),
        })
    }

    /// The value of a variable.
    pub(super) fn value(&self, name: &str) -> Option<&str> {
        self.variables.iter().find(|(known, _)| known == name).map(|(_, value)| value.as_str())
    }

    /// The files it points at, with the SHA-256 that each must have where that is known.
    fn files(&self) -> Vec<(&str, &Path, Option<String>)> {
        let pointing = self.variables.iter().filter_map(|(name, value)| {
            let path = Path::new(value.as_str());
            let file_name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
            match FileKind::of_variable(name) {
                Some(kind) => Some((name.as_str(), path, kind.sha256_of(file_name).map(str::to_owned))),
                // A plugin may also be named as the loader finds it, which is no path.
                None if name == PLUGIN_VARIABLE && value.contains('/') => {
                    let known = self.header.plugin_sha256.clone().filter(|sha256| is_sha256(sha256));
                    Some((name.as_str(), path, known))
                }
                None => None,
            }
        });
        pointing.collect()
    }

    /// Refuses a file that points at what is not there, or no longer what was measured: NCCL goes on in silence.
    pub(super) fn require_files(&self) -> Result<(), Failure> {
        for (variable, path, sha256) in self.files() {
            let refused = |why: String| {
                Failure::new(ErrorKind::MachineUnfit, format!("{}: {variable}: {why}", self.path.display())).with_hint(
                    "NCCL goes on in silence without it, so nothing was started; put the file back, or let `nccltune emit` \
                     write the answer anew from its run directory (in a container: mount that directory at the same path)",
                )
            };
            if !path.is_absolute() {
                let shown = printable(&path.to_string_lossy(), SHOWN_CHARACTERS);
                return Err(refused(format!("{shown} is no absolute path, and the server may start anywhere")));
            }
            let found = hash_of(path).map_err(&refused)?;
            if let Some(sha256) = sha256.filter(|sha256| *sha256 != found) {
                let shown = printable(&path.to_string_lossy(), SHOWN_CHARACTERS);
                let (was, is) = (&sha256[..12], &found[..12]);
                return Err(refused(format!("{shown} is not what was measured (SHA-256 {is}..., was {was}...)")));
            }
        }
        Ok(())
    }

    /// The run it came from, where that is beside the file or where its files lie, or is named.
    pub(super) fn run(&self, named: Option<&Path>) -> Result<Option<(PathBuf, Manifest)>, Failure> {
        if let Some(named) = named {
            let manifest: Manifest = directory::read(named, MANIFEST_FILE)?;
            if !self.is_of(&manifest) {
                return Err(Failure::new(
                    ErrorKind::Usage,
                    format!("{} is not of the run in {}", self.path.display(), named.display()),
                )
                .with_hint("name the run that the file was emitted from, or leave --run out"));
            }
            return Ok(Some((named.to_owned(), manifest)));
        }
        let beside = self
            .path
            .parent()
            .map(|folder| if folder.as_os_str().is_empty() { PathBuf::from(".") } else { folder.to_owned() });
        let of_files = self.files().into_iter().filter_map(|(_, path, _)| Some(path.parent()?.to_owned()));
        for folder in beside.into_iter().chain(of_files) {
            // A folder that holds something else is no reason to stop.
            if let Ok(manifest) = directory::read::<Manifest>(&folder, MANIFEST_FILE)
                && self.is_of(&manifest)
            {
                return Ok(Some((folder, manifest)));
            }
        }
        Ok(None)
    }

    /// Whether the file was emitted from this run.
    fn is_of(&self, manifest: &Manifest) -> bool {
        self.header.fingerprint.as_deref() == Some(manifest.fingerprint.combined.as_str())
            && self.header.date.as_deref() == Some(manifest.created.as_str())
    }

    /// What it was measured with, as its header says, else as its run does.
    pub(super) fn parts(&self, run: Option<&Manifest>) -> BTreeMap<String, String> {
        match run {
            Some(manifest) if self.header.parts.is_empty() => {
                manifest.fingerprint.parts.iter().map(|(name, value)| (name.clone(), told(value))).collect()
            }
            _ => self.header.parts.clone(),
        }
    }
}

/// The SHA-256 of a file of reasonable size. What is no file is not opened: that may wait for ever.
fn hash_of(path: &Path) -> Result<String, String> {
    let metadata = fs_err::metadata(path).map_err(|error| error.to_string())?;
    let shown = || printable(&path.to_string_lossy(), SHOWN_CHARACTERS);
    if !metadata.is_file() || metadata.len() > FILE_BYTES {
        return Err(format!("{} is no file, or larger than any such file is", shown()));
    }
    let file = fs_err::File::open(path).map_err(|error| error.to_string())?;
    let hash = Fingerprint::of_reader(std::io::Read::take(file, FILE_BYTES)).map_err(|error| error.to_string())?;
    Ok(hash.as_str().to_owned())
}
