//! Says what a run, a workload or a visit to a machine found: as text, Markdown, CSV or JSON.
//!
//! Everything here returns text; printing it is the door's business.

mod comma_separated;
mod deployment;
mod document;
mod explanation;
mod figures;
mod findings;
mod format;
mod page;
mod run;
mod svg;
mod tables;
mod update;
mod verdict;

use serde::Serialize;

use crate::error_kind::{Classified, ErrorKind};
use crate::record::Effective;

pub use comma_separated::{SummaryRow, summary_csv};
pub use deployment::deployment_table;
pub use explanation::explanation;
pub use findings::findings_table;
pub use format::{Format, FormatError};
pub use run::{ReportFormat, ReportFormatError, Run, STANDING, import_document, run_report};
pub use tables::{checks_table, points_table};
pub use update::update_table;
pub use verdict::{files_text, verdict, verdict_markdown, verdict_text};

/// Why something could not be told.
#[derive(Debug, thiserror::Error)]
pub enum ReportError {
    /// A record that has no JSON form, which would be a defect.
    #[error("could not write JSON: {0}")]
    Json(#[from] serde_json::Error),
}

impl Classified for ReportError {
    fn kind(&self) -> ErrorKind {
        ErrorKind::Unexpected
    }
}

/// A record as pretty JSON with a line feed at its end.
pub fn to_json(record: &impl Serialize) -> Result<String, ReportError> {
    let mut text = serde_json::to_string_pretty(record)?;
    text.push('\n');
    Ok(text)
}

/// What ran, as far as it is known: "ring/ll/8ch".
fn ran(effective: &Effective) -> String {
    let parts: Vec<String> =
        [effective.algo.clone(), effective.proto.clone(), effective.channels.map(|channels| format!("{channels}ch"))]
            .into_iter()
            .flatten()
            .collect();
    if parts.is_empty() { "-".to_owned() } else { parts.join("/") }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wording::fixtures;

    #[test]
    fn json_is_the_record_itself() {
        let choice = fixtures::adopt();
        let text = to_json(&choice).unwrap();
        assert!(text.ends_with("}\n"));
        assert_eq!(serde_json::from_str::<crate::record::Choice>(&text).unwrap(), choice);
    }

    #[test]
    fn what_ran_is_said_as_far_as_it_is_known() {
        let mut effective = Effective { algo: Some("ring".to_owned()), ..Effective::default() };
        assert_eq!(ran(&effective), "ring");
        effective.channels = Some(4);
        assert_eq!(ran(&effective), "ring/4ch");
        assert_eq!(ran(&Effective::default()), "-");
    }
}
