//! `nccltune report`: a run told anew, from what its directory holds.

use std::path::Path;

use super::directory::{self, CHOICE_FILE, MANIFEST_FILE};
use super::tables::whole;
use crate::error_kind::Failure;
use crate::evidence::Evidence;
use crate::journal;
use crate::record::{Choice, JournalLine, Manifest};
use crate::report::{ReportError, ReportFormat, Run, run_report};

/// Tells a run directory in a format. Nothing in it is changed.
pub fn report(run: &Path, format: ReportFormat, width: Option<u16>) -> Result<String, Failure> {
    let manifest: Manifest = whole(directory::read(run, MANIFEST_FILE)?);
    let choice: Option<Choice> =
        run.join(CHOICE_FILE).exists().then(|| directory::read(run, CHOICE_FILE)).transpose()?;
    let lines = journal::read(run)?;
    let evidence = Evidence::of(&lines);
    let run = Run { manifest: &manifest, choice: choice.as_ref(), evidence: &evidence, lines: &lines };
    Ok(run_report(&run, format, width)?)
}

/// The page of a run that was just judged.
pub(super) fn page(
    manifest: &Manifest,
    choice: Option<&Choice>,
    evidence: &Evidence,
    lines: &[JournalLine],
) -> Result<String, ReportError> {
    run_report(&Run { manifest, choice, evidence, lines }, ReportFormat::Html, None)
}
