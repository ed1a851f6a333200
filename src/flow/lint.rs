//! `nccltune lint`: what is wrong with settings that somebody wrote by hand.

use std::io::Read;
use std::path::{Path, PathBuf};

use crate::engine::Engine;
use crate::env_syntax::MAX_BYTES;
use crate::env_syntax::source::Consumer;
use crate::error_kind::{ErrorKind, Failure};
use crate::lint::{Circumstances, lint as look, lint_table, unreadable};
use crate::machine::NcclVersion;
use crate::record::{FORMAT, LintReport};

/// The NCCL whose rules apply where none is named: the one this tool was checked on.
const ASSUMED_VERSION: NcclVersion = crate::doctor::VERIFIED;
/// Most files of one call.
const MOST_FILES: usize = 10_000;

/// What lint looks at.
#[derive(Debug, Clone, Default)]
pub struct LintRequest {
    /// Files; "-" is standard input.
    pub files: Vec<PathBuf>,
    /// Who reads them; guessed from name and text without.
    pub consumer: Option<String>,
    /// Release of NCCL that reads the variables.
    pub nccl: Option<NcclVersion>,
    /// The engine that is started with them.
    pub engine: Option<Engine>,
}

/// Looks at every file. One that cannot be read is a finding, and the rest is looked at all the same.
pub fn lint(request: &LintRequest) -> Result<LintReport, Failure> {
    if request.files.len() > MOST_FILES {
        return Err(Failure::new(ErrorKind::Usage, format!("at most {MOST_FILES} files at once")));
    }
    let consumer = match &request.consumer {
        Some(text) => Some(Consumer::parse(text).map_err(|reason| Failure::new(ErrorKind::Usage, reason))?),
        None => None,
    };
    let circumstances = Circumstances { version: request.nccl.unwrap_or(ASSUMED_VERSION), engine: request.engine };
    let mut findings = Vec::new();
    for path in &request.files {
        let name = path.display().to_string();
        match contents(path) {
            // Who names no consumer means what the name says: no reader of variables takes such files.
            Ok(text) if consumer.is_none() && path.extension().is_some_and(|extension| extension == "csv") => {
                findings.extend(lint_table(&name, &text));
            }
            Ok(text) => {
                let consumer = consumer.unwrap_or_else(|| Consumer::guess(&name, &text));
                findings.extend(look(&name, &text, consumer, circumstances));
            }
            Err(reason) => findings.push(unreadable(&name, &reason)),
        }
    }
    Ok(LintReport { format: FORMAT, findings })
}

pub(super) fn contents(path: &Path) -> Result<String, String> {
    let mut bytes = Vec::new();
    let limit = MAX_BYTES as u64 + 1;
    let read = if path.as_os_str() == "-" {
        std::io::stdin().lock().take(limit).read_to_end(&mut bytes)
    } else {
        // A pipe would be waited for, and a device never ends.
        match fs_err::metadata(path) {
            Ok(metadata) if metadata.is_file() => {}
            Ok(_) => return Err("is no regular file".to_owned()),
            Err(error) => return Err(format!("cannot be read: {}", error.kind())),
        }
        fs_err::File::open(path).and_then(|file| file.take(limit).read_to_end(&mut bytes))
    };
    read.map_err(|error| format!("cannot be read: {}", error.kind()))?;
    if bytes.len() > MAX_BYTES {
        return Err(format!("has more than {MAX_BYTES} bytes, which no file of settings has"));
    }
    if bytes.contains(&0) {
        return Err("is no text".to_owned());
    }
    String::from_utf8(bytes).map_err(|_| "is no text".to_owned())
}
