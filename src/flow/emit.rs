//! `nccltune emit`: a run's answer in a deployable form.

use std::path::Path;

use super::directory::{self, CHOICE_FILE, MANIFEST_FILE};
use super::files::genuine;
use super::plugin::Plugin;
use crate::emit::{EmitAs, render};
use crate::error_kind::{ErrorKind, Failure};
use crate::file_kind::FileKind;
use crate::knob;
use crate::record::{Choice, Manifest, VerdictKind};

/// Renders the answer of a run directory.
pub fn emit(run: &Path, emit_as: EmitAs) -> Result<String, Failure> {
    let manifest: Manifest = directory::read(run, MANIFEST_FILE)?;
    if !run.join(CHOICE_FILE).exists() {
        return Err(Failure::new(ErrorKind::Usage, format!("{} holds no verdict yet", run.display())).with_hint(
            if manifest.labels.imported {
                format!(
                    "judge it, and emit that: nccltune tune --backend replay --recorded {} --out DIR",
                    run.display()
                )
            } else {
                format!("go on with it: nccltune tune --resume --out {}", run.display())
            },
        ));
    }
    let choice: Choice = directory::read(run, CHOICE_FILE)?;
    // An answer that leads to a file that is not there, or no longer what was measured, is none.
    for (kind, name) in choice.files.iter().filter(|(kind, name)| kind.sha256_of(name).is_some()) {
        genuine(run, *kind, name)?;
    }
    if choice.files.contains_key(&FileKind::TunerTable) {
        let tables = manifest.tables.as_ref().ok_or_else(|| {
            Failure::new(ErrorKind::Usage, format!("{}: the manifest knows no tuner plugin", run.display()))
                .with_hint("copy run directories whole")
        })?;
        Plugin::of_run(run, &tables.plugin)?;
    }
    if emit_as == EmitAs::TunerTable {
        return match choice.files.get(&FileKind::TunerTable).filter(|_| choice.verdict == VerdictKind::Adopt) {
            Some(name) => genuine(run, FileKind::TunerTable, name),
            None => Err(Failure::new(ErrorKind::Usage, format!("the answer of {} has no tuner table", run.display()))
                .with_hint("`nccltune emit --as env` tells what it has")),
        };
    }
    let here = std::path::absolute(run).map_err(|error| Failure::new(ErrorKind::Usage, error))?;
    Ok(render(&choice, &manifest, &here, emit_as, &effect_of)?)
}

/// What a variable does, for the comment above it.
pub(super) fn effect_of(variable: &str) -> Option<String> {
    knob::find(variable).map(|knob| knob.effect.to_owned())
}
