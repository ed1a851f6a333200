//! Tables for spreadsheets and scripts. Units stand in the column names; what is not known is empty.

use serde::Serialize;

use crate::collective::{Collective, DataType, Form};
use crate::record::{
    CheckReport, Choice, EffectKind, Effective, ExplainedSize, Explanation, Manifest, OutcomeKind, Point, PointVerdict,
    Workload,
};
use crate::wording;

/// One arm at one point, over all its launches: a line of summary.csv.
#[derive(Debug, Clone, PartialEq)]
pub struct SummaryRow {
    /// Name of the arm.
    pub arm: String,
    /// The operation.
    pub collective: Collective,
    /// The element type.
    pub dtype: DataType,
    /// Message size.
    pub bytes: u64,
    /// Launches behind the figures.
    pub launches: u32,
    /// Median over launches of the launch median of the slowest rank per replay, per collective.
    pub median_us: Option<f64>,
    /// Its interval.
    pub ci95_us: Option<[f64; 2]>,
    /// 99th percentile.
    pub p99_us: Option<f64>,
    /// What ran.
    pub effective: Option<Effective>,
    /// How it ended.
    pub outcome: OutcomeKind,
    /// Ranks taking part.
    pub ranks: u32,
    /// Captured or eager, in place or not.
    pub form: Form,
}

/// summary.csv.
pub fn summary_csv(rows: &[SummaryRow]) -> String {
    let header = [
        "arm",
        "collective",
        "dtype",
        "bytes",
        "launches",
        "median_us",
        "ci95_low_us",
        "ci95_high_us",
        "p99_us",
        "algo",
        "proto",
        "channels",
        "threads",
        "transport",
        "outcome",
        "ranks",
        "issue",
        "placement",
    ];
    let record = |row: &SummaryRow| {
        let ran = row.effective.clone().unwrap_or_default();
        [
            row.arm.clone(),
            row.collective.to_string(),
            row.dtype.to_string(),
            row.bytes.to_string(),
            row.launches.to_string(),
            microseconds(row.median_us),
            microseconds(row.ci95_us.map(|[low, _]| low)),
            microseconds(row.ci95_us.map(|[_, high]| high)),
            microseconds(row.p99_us),
            ran.algo.unwrap_or_default(),
            ran.proto.unwrap_or_default(),
            plain(ran.channels),
            plain(ran.threads),
            ran.transport.unwrap_or_default(),
            row.outcome.name().to_owned(),
            row.ranks.to_string(),
            row.form.issue.name().to_owned(),
            row.form.placement.name().to_owned(),
        ]
    };
    comma_separated(header, rows.iter().map(record))
}

/// One arm at one point of a report: a row may be copied without its table, so it says its labels.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub(super) struct RunRow {
    pub(super) labels: String,
    pub(super) arm: String,
    pub(super) role: String,
    pub(super) collective: Collective,
    pub(super) dtype: DataType,
    pub(super) bytes: u64,
    pub(super) ranks: u32,
    pub(super) form: Form,
    pub(super) launches: u32,
    pub(super) median_us: Option<f64>,
    pub(super) ci95_us: Option<[f64; 2]>,
    pub(super) effective: Option<Effective>,
    pub(super) outcome: OutcomeKind,
}

/// Every arm at every point of a run.
pub(super) fn run_csv(rows: &[RunRow]) -> String {
    let header = [
        "labels",
        "arm",
        "role",
        "collective",
        "dtype",
        "bytes",
        "ranks",
        "launches",
        "median_us",
        "ci95_low_us",
        "ci95_high_us",
        "algo",
        "proto",
        "channels",
        "transport",
        "outcome",
        "issue",
        "placement",
    ];
    let record = |row: &RunRow| {
        let ran = row.effective.clone().unwrap_or_default();
        [
            row.labels.clone(),
            row.arm.clone(),
            row.role.clone(),
            row.collective.to_string(),
            row.dtype.to_string(),
            row.bytes.to_string(),
            row.ranks.to_string(),
            row.launches.to_string(),
            microseconds(row.median_us),
            microseconds(row.ci95_us.map(|[low, _]| low)),
            microseconds(row.ci95_us.map(|[_, high]| high)),
            ran.algo.unwrap_or_default(),
            ran.proto.unwrap_or_default(),
            plain(ran.channels),
            ran.transport.unwrap_or_default(),
            row.outcome.name().to_owned(),
            row.form.issue.name().to_owned(),
            row.form.placement.name().to_owned(),
        ]
    };
    comma_separated(header, rows.iter().map(record))
}

/// Points and guard points of a verdict, labels included: a row may be copied without its table.
pub(super) fn verdict_csv(choice: &Choice, manifest: &Manifest) -> String {
    let header = [
        "verdict",
        "labels",
        "set",
        "phase",
        "batch",
        "collective",
        "dtype",
        "bytes",
        "calls_per_pass",
        "weight",
        "measured",
        "default_us",
        "winner_us",
        "ratio",
        "ratio_ci95_low",
        "ratio_ci95_high",
        "margin",
        "safe",
        "default_ran",
        "winner_ran",
        "issue",
        "placement",
    ];
    let labels: Vec<String> = wording::labels(choice, manifest).into_iter().map(|label| label.word).collect();
    let labels = labels.join(" ");
    let record = |(set, point): (&str, &PointVerdict)| {
        [
            choice.verdict.name().to_owned(),
            labels.clone(),
            set.to_owned(),
            point.phase.name().to_owned(),
            point.batch.to_string(),
            point.collective.to_string(),
            point.dtype.to_string(),
            point.bytes.to_string(),
            point.calls_per_pass.to_string(),
            point.weight.to_string(),
            point.measured.to_string(),
            microseconds(point.baseline_us),
            microseconds(point.winner_us),
            share(point.ratio),
            share(point.ratio_ci95.map(|[low, _]| low)),
            share(point.ratio_ci95.map(|[_, high]| high)),
            share(point.margin),
            plain(point.safe),
            point.effective_default.as_ref().map(super::ran).unwrap_or_default(),
            point.effective.as_ref().map(super::ran).unwrap_or_default(),
            point.form.issue.name().to_owned(),
            point.form.placement.name().to_owned(),
        ]
    };
    let points = choice.points.iter().map(|point| ("point", point));
    comma_separated(header, points.chain(choice.guard.iter().map(|point| ("guard", point))).map(record))
}

/// The points of a workload.
pub(super) fn points_csv(workload: &Workload) -> String {
    let header = [
        "set",
        "phase",
        "batch",
        "collective",
        "dtype",
        "bytes",
        "ranks",
        "calls_per_pass",
        "weight",
        "measured",
        "origin",
        "issue",
        "placement",
    ];
    let record = |(set, point): (&str, &Point)| {
        [
            set.to_owned(),
            point.phase.name().to_owned(),
            point.batch.to_string(),
            point.collective.to_string(),
            point.dtype.to_string(),
            point.bytes.to_string(),
            point.ranks.to_string(),
            point.calls_per_pass.to_string(),
            point.weight.to_string(),
            point.measured.to_string(),
            point.origin.clone(),
            point.form.issue.name().to_owned(),
            point.form.placement.name().to_owned(),
        ]
    };
    let points = workload.points.iter().map(|point| ("point", point));
    comma_separated(header, points.chain(workload.guard.iter().map(|point| ("guard", point))).map(record))
}

/// The checks of a visit.
pub(super) fn checks_csv(report: &CheckReport) -> String {
    let record = |check: &crate::record::Check| {
        [
            check.name.clone(),
            check.group.clone(),
            check.verdict.name().to_owned(),
            check.question.clone(),
            check.evidence.clone(),
            check.advice.clone(),
        ]
    };
    comma_separated(["name", "group", "verdict", "question", "evidence", "advice"], report.checks.iter().map(record))
}

/// What would be chosen for each size. Labels stand in every row, since rows are what gets copied.
pub(super) fn explanation_csv(explanation: &Explanation) -> String {
    let header = [
        "machine",
        "nccl",
        "labels",
        "collective",
        "ranks",
        "bytes",
        "algo",
        "proto",
        "channels",
        "threads",
        "predicted_us",
        "runner_up",
        "runner_up_us",
        "changed_by",
        "logged_algo",
        "logged_proto",
        "logged_channels",
        "agrees",
    ];
    let record = |size: &ExplainedSize| {
        let second = size.runner_up.as_ref();
        let changes = size.effects.iter().filter(|effect| effect.effect == EffectKind::Changes);
        let changed_by: Vec<&str> = changes.map(|effect| effect.variable.as_str()).collect();
        let logged = size.logged.as_ref();
        [
            explanation.machine.clone(),
            explanation.nccl.version.clone(),
            explanation.labels.join("+"),
            explanation.collective.to_string(),
            explanation.ranks.to_string(),
            size.bytes.to_string(),
            size.algo.clone().unwrap_or_default(),
            size.proto.clone().unwrap_or_default(),
            plain(size.channels),
            plain(size.threads),
            microseconds(size.predicted_us),
            second.map(|second| format!("{}/{}", second.algo, second.proto)).unwrap_or_default(),
            microseconds(second.map(|second| second.predicted_us)),
            changed_by.join("+"),
            logged.and_then(|logged| logged.algo.clone()).unwrap_or_default(),
            logged.and_then(|logged| logged.proto.clone()).unwrap_or_default(),
            plain(logged.and_then(|logged| logged.channels)),
            plain(logged.and_then(|logged| logged.agrees)),
        ]
    };
    comma_separated(header, explanation.sizes.iter().map(record))
}

pub(super) fn comma_separated<const N: usize>(header: [&str; N], rows: impl Iterator<Item = [String; N]>) -> String {
    let mut writer = csv::Writer::from_writer(Vec::new());
    // Memory never refuses a write, and N columns everywhere leave no row of the wrong length.
    let _ = writer.write_record(header);
    for row in rows {
        let _ = writer.write_record(row);
    }
    writer.into_inner().map_or_else(|_| String::new(), |bytes| String::from_utf8_lossy(&bytes).into_owned())
}

fn microseconds(value: Option<f64>) -> String {
    value.filter(|us| us.is_finite()).map_or_else(String::new, |us| format!("{us:.3}"))
}

fn share(value: Option<f64>) -> String {
    value.filter(|share| share.is_finite()).map_or_else(String::new, |share| format!("{share:.5}"))
}

fn plain<T: ToString>(value: Option<T>) -> String {
    value.map_or_else(String::new, |value| value.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_summary_has_the_documented_columns_and_empty_cells_for_the_unknown() {
        let measured = SummaryRow {
            arm: "ring, ll".to_owned(),
            collective: Collective::AllReduce,
            dtype: DataType::Bf16,
            bytes: 57_344,
            launches: 12,
            median_us: Some(18.881_23),
            ci95_us: Some([18.71, 19.05]),
            p99_us: Some(24.4),
            effective: Some(Effective {
                transport: Some("SHM/direct/direct".to_owned()),
                communicator_channels: Some(16),
                algo: Some("ring".to_owned()),
                proto: Some("ll".to_owned()),
                channels: Some(8),
                threads: None,
            }),
            outcome: OutcomeKind::Measured,
            ranks: 2,
            form: Form::default().eager(),
        };
        let failed = SummaryRow {
            arm: "tree".to_owned(),
            launches: 0,
            median_us: None,
            ci95_us: None,
            p99_us: Some(f64::NAN),
            effective: None,
            outcome: OutcomeKind::TimedOut,
            ..measured.clone()
        };
        insta::assert_snapshot!(summary_csv(&[measured, failed]));
    }

    #[test]
    fn a_summary_of_nothing_still_has_its_header() {
        assert_eq!(summary_csv(&[]).lines().count(), 1);
    }
}
