//! What `lint` found, in the form that editors and compilers share: file, line, severity, what is wrong.

use super::comma_separated::comma_separated;
use super::document::{Document, Table};
use super::{Format, ReportError, to_json};
use crate::record::{LintFinding, LintReport, LintSeverity};
use crate::wording::{plural, printable};

/// Characters of a file's name that are shown.
const NAME_CHARACTERS: usize = 300;
/// Characters of a message.
const MESSAGE_CHARACTERS: usize = 600;

/// Findings in a format.
pub fn findings_table(report: &LintReport, format: Format) -> Result<String, ReportError> {
    match format {
        Format::Text => Ok(text(report)),
        Format::Markdown => Ok(markdown(report)),
        Format::Csv => Ok(csv(report)),
        Format::Json => to_json(report),
    }
}

fn counted(report: &LintReport) -> String {
    let count = |severity| report.findings.iter().filter(|finding| finding.severity == severity).count() as u32;
    let (errors, warnings) = (count(LintSeverity::Error), count(LintSeverity::Warning));
    if errors + warnings == 0 {
        return "Nothing to find fault with".to_owned();
    }
    format!("{errors} {}, {warnings} {}", plural(errors, "error", "errors"), plural(warnings, "warning", "warnings"))
}

fn place(finding: &LintFinding) -> String {
    let file = printable(&finding.file, NAME_CHARACTERS);
    if finding.line == 0 { file } else { format!("{file}:{}", finding.line) }
}

fn message(finding: &LintFinding) -> String {
    let message = printable(&finding.message, MESSAGE_CHARACTERS);
    match &finding.variable {
        // Many messages begin with a verb whose subject is the variable.
        Some(variable) => format!("{}: {message}", printable(variable, NAME_CHARACTERS)),
        None => message,
    }
}

fn text(report: &LintReport) -> String {
    let mut text = String::new();
    for finding in &report.findings {
        text.push_str(&format!("{}: {}: {}\n", place(finding), finding.severity.name(), message(finding)));
        if let Some(suggestion) = &finding.suggestion {
            text.push_str(&format!("    write: {}\n", printable(suggestion, MESSAGE_CHARACTERS)));
        }
    }
    text.push_str(&counted(report));
    text.push('\n');
    text
}

fn markdown(report: &LintReport) -> String {
    let mut document = Document::default();
    document.heading(counted(report));
    if !report.findings.is_empty() {
        let mut table = Table::new(&["place", "severity", "variable", "message", "write"]);
        for finding in &report.findings {
            table.row(vec![
                place(finding),
                finding.severity.name().to_owned(),
                finding.variable.clone().unwrap_or_default(),
                printable(&finding.message, MESSAGE_CHARACTERS),
                finding.suggestion.clone().unwrap_or_default(),
            ]);
        }
        document.table(table);
    }
    document.markdown()
}

fn csv(report: &LintReport) -> String {
    let row = |finding: &LintFinding| {
        [
            finding.file.clone(),
            finding.line.to_string(),
            finding.variable.clone().unwrap_or_default(),
            finding.severity.name().to_owned(),
            finding.message.clone(),
            finding.suggestion.clone().unwrap_or_default(),
        ]
    };
    let header = ["file", "line", "variable", "severity", "message", "suggestion"];
    comma_separated(header, report.findings.iter().map(row))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::record::FORMAT;

    #[test]
    fn findings_in_every_format() {
        let finding = |line, severity, variable: Option<&str>, suggestion: Option<&str>| LintFinding {
            file: "tuned.env".to_owned(),
            line,
            variable: variable.map(str::to_owned),
            severity,
            message: "is, \u{1b}[1mbold".to_owned(),
            suggestion: suggestion.map(str::to_owned),
        };
        let report = LintReport {
            format: FORMAT,
            findings: vec![
                finding(0, LintSeverity::Error, None, None),
                finding(2, LintSeverity::Warning, Some("NCCL_ALGO"), Some("allreduce:Ring")),
            ],
        };
        for format in [Format::Text, Format::Markdown, Format::Csv] {
            insta::assert_snapshot!(format!("findings-{format}"), findings_table(&report, format).unwrap());
        }
        let json = findings_table(&report, Format::Json).unwrap();
        assert_eq!(serde_json::from_str::<LintReport>(&json).unwrap(), report);
        let clean = LintReport { format: FORMAT, findings: Vec::new() };
        assert_eq!(findings_table(&clean, Format::Text).unwrap(), "Nothing to find fault with\n");
    }
}
