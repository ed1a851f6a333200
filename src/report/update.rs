//! What `check` found: the verdict, what changed, and each point then and now.

use super::comma_separated::comma_separated;
use super::document::{Document, Table};
use super::tables::message;
use super::{Format, ReportError, to_json};
use crate::record::{CheckedPoint, PartChange, UpdateCheck};
use crate::units::format_change;
use crate::wording::printable;

/// Characters that are shown of a part.
const PART_CHARACTERS: usize = 100;

/// A check in a format.
pub fn update_table(check: &UpdateCheck, format: Format, width: Option<u16>) -> Result<String, ReportError> {
    match format {
        Format::Text => Ok(document(check).text(width)),
        Format::Markdown => Ok(document(check).markdown()),
        Format::Csv => Ok(csv(check)),
        Format::Json => to_json(check),
    }
}

fn document(check: &UpdateCheck) -> Document {
    let mut document = Document::default();
    for label in &check.labels {
        document.loud(label.clone());
    }
    document.heading(format!("Verdict: {}", check.verdict.name()));
    document.paragraph(format!("{}.", printable(check.reason.trim_end_matches('.'), usize::MAX)));
    if let Some(command) = &check.command {
        document.paragraph("To tune anew, beginning with what the run saw:");
        document.code(vec![command.clone()]);
    }
    document.heading("What changed");
    if check.changed.is_empty() {
        document.paragraph("Nothing that could be compared.");
    } else {
        let mut table = Table::new(&["part", "was", "is", "weight"]);
        for part in &check.changed {
            let [before, now] = [&part.before, &part.now].map(|value| shown(value.as_deref()));
            table.row(vec![printable(&part.words, PART_CHARACTERS), before, now, part.weight.clone()]);
        }
        document.table(table);
    }
    if !check.not_compared.is_empty() {
        document.list(check.not_compared.iter().map(not_compared).collect());
    }
    if !check.points.is_empty() {
        document.heading("Each point, the file beside the default");
        let mut table = Table::new(&["collective", "bytes", "size", "default us", "file us", "now", "95 %", "then"]);
        for point in &check.points {
            let [bytes, size] = message(point.bytes);
            table.row(vec![
                format!("{}{}", point.collective.name(), if point.guard { " (guard)" } else { "" }),
                bytes,
                size,
                us(point.baseline_us),
                us(point.winner_us),
                change(point.ratio),
                point.ratio_ci95.map_or_else(
                    || "-".to_owned(),
                    |[low, high]| format!("{} to {}", format_change(low), format_change(high)),
                ),
                change(point.recorded_ratio),
            ]);
        }
        document.table(table);
    }
    document
}

fn not_compared(part: &PartChange) -> String {
    match (&part.before, &part.now) {
        (None, _) => format!("not recorded then: {}", printable(&part.words, PART_CHARACTERS)),
        _ => format!("cannot be read now: {}", printable(&part.words, PART_CHARACTERS)),
    }
}

fn shown(value: Option<&str>) -> String {
    value.map_or_else(|| "-".to_owned(), |value| printable(value, PART_CHARACTERS))
}

fn us(value: Option<f64>) -> String {
    value.map_or_else(|| "-".to_owned(), |value| format!("{value:.1}"))
}

fn change(ratio: Option<f64>) -> String {
    ratio.map_or_else(|| "-".to_owned(), format_change)
}

fn csv(check: &UpdateCheck) -> String {
    let number = |value: Option<f64>| value.map(|value| value.to_string()).unwrap_or_default();
    let row = |point: &CheckedPoint| {
        let ends = point.ratio_ci95.map_or([None, None], |ends| ends.map(Some));
        [
            check.verdict.name().to_owned(),
            point.collective.name().to_owned(),
            point.dtype.name().to_owned(),
            point.bytes.to_string(),
            point.guard.to_string(),
            number(point.baseline_us),
            number(point.winner_us),
            number(point.ratio),
            number(ends[0]),
            number(ends[1]),
            number(point.recorded_ratio),
        ]
    };
    let header = [
        "verdict",
        "collective",
        "dtype",
        "bytes",
        "guard",
        "baseline_us",
        "winner_us",
        "ratio",
        "ci95_low",
        "ci95_high",
        "recorded_ratio",
    ];
    comma_separated(header, check.points.iter().map(row))
}
