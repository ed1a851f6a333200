//! What `exec --verify` saw, process by process.

use super::comma_separated::comma_separated;
use super::document::{Document, Table};
use super::{Format, ReportError, to_json};
use crate::record::{DeployedProcess, DeploymentCheck};
use crate::wording::printable;

/// Characters of a cell.
const CELL_CHARACTERS: usize = 200;

/// What was seen, in a format.
pub fn deployment_table(check: &DeploymentCheck, format: Format, width: Option<u16>) -> Result<String, ReportError> {
    match format {
        Format::Text => Ok(document(check).text(width)),
        Format::Markdown => Ok(document(check).markdown()),
        Format::Csv => Ok(csv(check)),
        Format::Json => to_json(check),
    }
}

fn lacking(process: &DeployedProcess) -> String {
    let words = process.lacking.iter().map(|lacking| match &lacking.found {
        None => format!("{}={}", lacking.variable, lacking.expected),
        Some(found) => format!("{}={} (has {found})", lacking.variable, lacking.expected),
    });
    printable(&words.collect::<Vec<_>>().join(", "), CELL_CHARACTERS)
}

fn document(check: &DeploymentCheck) -> Document {
    let mut document = Document::default();
    document.heading(format!("Verdict: {}", check.verdict.name()));
    document.paragraph(format!("{}.", check.reason));
    if check.processes.is_empty() {
        return document;
    }
    let mut table = Table::new(&["process", "name", "environment", "lacks", "libnccl"]);
    for process in &check.processes {
        let dash = |text: String| if text.is_empty() { "-".to_owned() } else { text };
        table.row(vec![
            process.process_id.to_string(),
            printable(&process.name, 40),
            process.environment.clone(),
            dash(lacking(process)),
            process.nccl.as_ref().map_or_else(|| "?".to_owned(), |nccl| dash(nccl.join(", "))),
        ]);
    }
    document.table(table);
    let remarks = |process: &DeployedProcess| -> Vec<String> {
        process.remarks.iter().map(|remark| format!("process {}: {remark}", process.process_id)).collect()
    };
    let remarks: Vec<String> = check.processes.iter().flat_map(remarks).collect();
    if !remarks.is_empty() {
        document.list(remarks);
    }
    document
}

fn csv(check: &DeploymentCheck) -> String {
    let row = |process: &DeployedProcess| {
        [
            check.verdict.name().to_owned(),
            process.process_id.to_string(),
            process.parent_process_id.to_string(),
            process.name.clone(),
            process.environment.clone(),
            lacking(process),
            process.nccl.as_ref().map(|nccl| nccl.join(" ")).unwrap_or_default(),
            process.remarks.join("; "),
        ]
    };
    let header = ["verdict", "process_id", "parent_process_id", "name", "environment", "lacking", "nccl", "remarks"];
    comma_separated(header, check.processes.iter().map(row))
}
