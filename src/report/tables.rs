//! The points of a workload, and the checks of a machine.

use super::comma_separated::{checks_csv, points_csv};
use super::document::{Document, Table};
use super::{Format, ReportError, to_json};
use crate::record::{CheckReport, CheckVerdict, Point, Workload};
use crate::units::{format_size, group_thousands};
use crate::wording;

/// The points of a workload, its guard set and what was assumed.
pub fn points_table(workload: &Workload, format: Format, width: Option<u16>) -> Result<String, ReportError> {
    match format {
        Format::Text => Ok(points_document(workload).text(width)),
        Format::Markdown => Ok(points_document(workload).markdown()),
        Format::Csv => Ok(points_csv(workload)),
        Format::Json => to_json(workload),
    }
}

/// The checks of a visit, and what to do about those that did not pass.
pub fn checks_table(report: &CheckReport, format: Format, width: Option<u16>) -> Result<String, ReportError> {
    match format {
        Format::Text => Ok(checks_document(report).text(width)),
        Format::Markdown => Ok(checks_document(report).markdown()),
        Format::Csv => Ok(checks_csv(report)),
        Format::Json => to_json(report),
    }
}

/// A message as two cells: exact bytes, and the size people call it by where that is as exact.
pub(super) fn message(bytes: u64) -> [String; 2] {
    let exact = group_thousands(bytes);
    let size = format_size(bytes);
    if size.strip_suffix(" B") == Some(exact.as_str()) { [exact, "-".to_owned()] } else { [exact, size] }
}

fn points_document(workload: &Workload) -> Document {
    let mut document = Document::default();
    document.heading(wording::workload(workload));
    document.paragraph(
        "Each line is one collective of one pass: what every rank takes part in, how large it is, and how often. \
         Message sizes are the larger of send and receive buffer per rank.",
    );
    document.heading("Points: what is tuned for");
    document.table(points(&workload.points));
    if !workload.guard.is_empty() {
        document.heading("Guard set: what must not get slower");
        document.table(points(&workload.guard));
    }
    if !workload.disagreements.is_empty() {
        document.heading("Where log and config disagree");
        document.list(workload.disagreements.clone());
    }
    if !workload.assumptions.is_empty() {
        document.heading("Assumed, not read");
        document.list(workload.assumptions.clone());
    }
    document
}

fn points(points: &[Point]) -> Table {
    let mut table = Table::new(&[
        "phase",
        ">batch",
        "operation",
        ">bytes",
        ">size",
        ">ranks",
        ">calls",
        ">weight",
        "measured",
        "where",
    ]);
    for point in points {
        let [bytes, size] = message(point.bytes);
        table.row(vec![
            point.phase.name().to_owned(),
            point.batch.to_string(),
            wording::operation(point.collective, point.dtype, point.form),
            bytes,
            size,
            point.ranks.to_string(),
            point.calls_per_pass.to_string(),
            format!("{:.3}", point.weight),
            if point.measured { "yes" } else { "no" }.to_owned(),
            point.origin.clone(),
        ]);
    }
    table
}

fn checks_document(report: &CheckReport) -> Document {
    let mut document = Document::default();
    let verdicts = [CheckVerdict::Fail, CheckVerdict::Warn, CheckVerdict::Unknown, CheckVerdict::Pass];
    let counts: Vec<String> = verdicts
        .into_iter()
        .map(|verdict| (verdict, report.checks.iter().filter(|check| check.verdict == verdict).count()))
        .filter(|(_, count)| *count > 0)
        .map(|(verdict, count)| format!("{count} {}", verdict.name()))
        .collect();
    let total = report.checks.len() as u32;
    let checks = wording::plural(total, "check", "checks");
    document.heading(match counts.as_slice() {
        [] => "No checks ran".to_owned(),
        counts => format!("{total} {checks}: {}", counts.join(", ")),
    });
    if report.checks.is_empty() {
        return document;
    }
    let mut table = Table::new(&["verdict", "group", "check", "question", "found"]);
    for check in &report.checks {
        table.row(vec![
            check.verdict.name().to_owned(),
            check.group.clone(),
            check.name.clone(),
            check.question.clone(),
            check.evidence.clone(),
        ]);
    }
    document.table(table);
    // The gravest first: that is the order in which to mend them.
    let advice: Vec<String> = verdicts
        .into_iter()
        .flat_map(|verdict| report.checks.iter().filter(move |check| check.verdict == verdict))
        .filter(|check| !check.advice.is_empty())
        .map(|check| format!("{} ({}): {}", check.name, check.verdict.name(), check.advice))
        .collect();
    if !advice.is_empty() {
        document.heading("What to do");
        document.list(advice);
    }
    document
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::record::FORMAT;
    use crate::wording::fixtures;

    #[test]
    fn points_in_every_format() {
        let workload = fixtures::workload();
        for format in [Format::Text, Format::Markdown, Format::Csv] {
            insta::assert_snapshot!(format!("points-{format}"), points_table(&workload, format, Some(110)).unwrap());
        }
        let json = points_table(&workload, Format::Json, None).unwrap();
        assert_eq!(serde_json::from_str::<Workload>(&json).unwrap(), workload);
    }

    #[test]
    fn checks_in_every_format() {
        let report = fixtures::checks();
        for format in [Format::Text, Format::Markdown, Format::Csv] {
            insta::assert_snapshot!(format!("checks-{format}"), checks_table(&report, format, Some(100)).unwrap());
        }
        let json = checks_table(&report, Format::Json, None).unwrap();
        assert_eq!(serde_json::from_str::<CheckReport>(&json).unwrap(), report);
    }

    #[test]
    fn no_checks_and_no_guard_set_are_said_plainly() {
        let report = CheckReport { format: FORMAT, checks: Vec::new() };
        assert_eq!(checks_table(&report, Format::Text, None).unwrap(), "No checks ran\n");
        let mut workload = fixtures::workload();
        workload.guard.clear();
        assert!(!points_table(&workload, Format::Text, None).unwrap().contains("Guard"));
    }

    #[test]
    fn messages_always_say_their_exact_bytes() {
        assert_eq!(message(57_344), ["57,344", "56 KiB"]);
        assert_eq!(message(43_009), ["43,009", "-"]);
        assert_eq!(message(512), ["512", "-"]);
    }
}
