//! `nccltune emit`: a run's answer in a deployable form.

use std::path::Path;

use super::directory::{self, CHOICE_FILE, MANIFEST_FILE};
use super::files::genuine;
use crate::emit::{EmitAs, render};
use crate::error_kind::{ErrorKind, Failure};
use crate::knob;
use crate::record::{Choice, Manifest};

/// Renders the answer of a run directory.
pub fn emit(run: &Path, emit_as: EmitAs) -> Result<String, Failure> {
    let manifest: Manifest = directory::read(run, MANIFEST_FILE)?;
    if !run.join(CHOICE_FILE).exists() {
        return Err(Failure::new(ErrorKind::Usage, format!("{} holds no verdict yet", run.display()))
            .with_hint(format!("go on with it: nccltune tune --resume --out {}", run.display())));
    }
    let choice: Choice = directory::read(run, CHOICE_FILE)?;
    // An answer that leads to a file that is not there, or no longer what was measured, is none.
    for (kind, name) in choice.files.iter().filter(|(kind, name)| kind.sha256_of(name).is_some()) {
        genuine(run, *kind, name)?;
    }
    let here = std::path::absolute(run).map_err(|error| Failure::new(ErrorKind::Usage, error))?;
    Ok(render(&choice, &manifest, &here, emit_as, &effect_of)?)
}

/// What a variable does, for the comment above it.
pub(super) fn effect_of(variable: &str) -> Option<String> {
    knob::find(variable).map(|knob| knob.effect.to_owned())
}
