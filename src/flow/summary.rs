//! Every arm at every point, for summary.csv and reports.

use crate::evidence::Evidence;
use crate::record::{Arm, OutcomeKind, PointKey};
use crate::report::SummaryRow;
use crate::stats;

/// One row per arm and point, default first.
pub(super) fn summary(arms: &[Arm], points: &[PointKey], evidence: &Evidence) -> Vec<SummaryRow> {
    let mut rows = Vec::new();
    for arm in arms {
        for point in points {
            let values = evidence.all_values(&arm.id, *point);
            let medians: Vec<f64> = values.iter().map(|value| value.median_us).collect();
            let logs: Vec<f64> = medians.iter().map(|us| us.ln()).collect();
            let interval = stats::trimmed(&logs).map(|trimmed| trimmed.interval(0.95));
            let tails: Vec<f64> = values.iter().map(|value| value.p99_us).collect();
            let failure = evidence.failures_of(&arm.id).last().map(|failure| failure.kind);
            let outcome =
                if values.is_empty() { failure.unwrap_or(OutcomeKind::NotRecorded) } else { OutcomeKind::Measured };
            rows.push(SummaryRow {
                arm: arm.name.clone(),
                collective: point.collective,
                dtype: point.dtype,
                bytes: point.bytes,
                launches: values.len() as u32,
                median_us: stats::median(&medians),
                ci95_us: interval.map(|interval| [interval.low.exp(), interval.high.exp()]),
                p99_us: stats::median(&tails),
                effective: values.last().map(|value| value.effective.clone()),
                outcome,
                ranks: point.ranks,
                form: point.form,
            });
        }
    }
    rows
}
