//! A whole run: the verdict where there is one, and what lies behind it.

use std::collections::BTreeMap;

use itertools::Itertools as _;
use serde::Serialize;

use super::comma_separated::{RunRow, run_csv};
use super::document::{Document, Table};
use super::figures::{Departure, Gain, PHASES, Series, Span, gains, latency, scatter, timeline};
use super::page::page;
use super::tables::message;
use super::verdict::add_verdict;
use super::{ReportError, ran, to_json};
use crate::collective::{Collective, DataType, Form};
use crate::error_kind::{Classified, ErrorKind};
use crate::evidence::{Evidence, LaunchValue, Objective, default_arm, measured_points};
use crate::record::{
    Arm, ArmId, Choice, Effective, Event, JournalLine, Labels, Manifest, OutcomeKind, Phase, PointKey, PointVerdict,
    VerdictKind,
};
use crate::stats;
use crate::units::{format_change, format_seconds, format_size, format_us, group_thousands, nearest_name};
use crate::wording::{self, operation, percent, plural};

/// Arms shown one by one; the rest stands in summary.csv.
const ARMS_SHOWN: usize = 12;
/// Arms drawn in one picture.
const ARMS_DRAWN: usize = 4;
/// Pictures of latency, one for each collective and type.
const LATENCIES_DRAWN: usize = 8;
/// How they look, in the order in which they are drawn.
const LOOKS: [&str; ARMS_DRAWN] =
    ["Solid line, dots", "Dashed, squares", "Dotted, triangles", "Dashes and dots, diamonds"];
/// Points in the picture of gains.
const GAINS_DRAWN: usize = 60;
/// Failures listed.
const FAILURES_SHOWN: usize = 12;

/// What of this tool has been verified, and what has not: every report says it.
pub const STANDING: &str = "Recorded runs of this tool exist for two GPUs (H200) that exchange through host memory, with \
     NCCL 2.28.9. For GPU peer access over PCIe, for eight ranks and for every other release of NCCL there is none yet: \
     what it says there is unverified.";

/// What `report` can print.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum ReportFormat {
    /// For a person at a terminal.
    #[default]
    Text,
    /// For a pull request or a wiki.
    Markdown,
    /// For a spreadsheet: every arm at every point.
    Csv,
    /// For a script.
    Json,
    /// One page with pictures.
    Html,
}

impl ReportFormat {
    /// All formats.
    pub const ALL: [Self; 5] = [Self::Text, Self::Markdown, Self::Csv, Self::Json, Self::Html];

    /// The name on the command line.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Text => "text",
            Self::Markdown => "markdown",
            Self::Csv => "csv",
            Self::Json => "json",
            Self::Html => "html",
        }
    }
}

/// A format nobody writes.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{text:?} is no format; there are text, markdown, csv, json and html")]
pub struct ReportFormatError {
    /// What was given.
    text: String,
}

impl Classified for ReportFormatError {
    fn kind(&self) -> ErrorKind {
        ErrorKind::Usage
    }

    fn hint(&self) -> Option<String> {
        let names = ReportFormat::ALL.map(ReportFormat::name);
        nearest_name(&self.text, names).map(|name| format!("did you mean {name}?"))
    }
}

impl std::str::FromStr for ReportFormat {
    type Err = ReportFormatError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        Self::ALL
            .into_iter()
            .find(|format| format.name() == text)
            .ok_or_else(|| ReportFormatError { text: text.chars().take(60).collect() })
    }
}

/// Everything a run directory holds.
#[derive(Debug, Clone, Copy)]
pub struct Run<'a> {
    /// What the run is.
    pub manifest: &'a Manifest,
    /// Its answer, once there is one.
    pub choice: Option<&'a Choice>,
    /// What was measured.
    pub evidence: &'a Evidence,
    /// The journal, for when things happened.
    pub lines: &'a [JournalLine],
}

/// The report in any format.
pub fn run_report(run: &Run<'_>, format: ReportFormat, width: Option<u16>) -> Result<String, ReportError> {
    match format {
        ReportFormat::Text => Ok(document(run).text(width)),
        ReportFormat::Markdown => Ok(document(run).markdown()),
        ReportFormat::Html => Ok(html(run)),
        ReportFormat::Csv => Ok(run_csv(&rows(run))),
        ReportFormat::Json => to_json(&Json {
            labels: labels(run).into_iter().map(|label| label.word).collect(),
            standing: STANDING,
            choice: run.choice,
            arms: rows(run),
            default_spread: spreads(run),
            blocks: blocks(run),
        }),
    }
}

#[derive(Serialize)]
struct Json<'a> {
    labels: Vec<String>,
    standing: &'a str,
    choice: Option<&'a Choice>,
    arms: Vec<RunRow>,
    default_spread: Vec<Spread>,
    blocks: Vec<BlockTime>,
}

fn html(run: &Run<'_>) -> String {
    let workload = &run.manifest.workload;
    let title = match run.choice {
        Some(choice) => format!("{}: {} on {}", choice.verdict.name(), workload.model, run.manifest.machine.name),
        None => format!("no verdict yet: {} on {}", workload.model, run.manifest.machine.name),
    };
    let labels = run.manifest.labels;
    let done = match (labels.simulated, labels.replayed, labels.imported) {
        (true, ..) => "Simulated",
        (_, true, _) => "Replayed",
        (.., true) => "Imported",
        _ => "Measured",
    };
    let lead = format!(
        "NCCL settings for {}. {done} {} by nccltune {}.",
        wording::workload(workload),
        run.manifest.created.split('T').next().unwrap_or_default(),
        run.manifest.tool_version
    );
    page(&title, &lead, &document(run))
}

fn labels(run: &Run<'_>) -> Vec<wording::Label> {
    match run.choice {
        Some(choice) => wording::labels(choice, run.manifest),
        None => wording::labels_of(run.manifest, Labels::default(), &[]),
    }
}

fn document(run: &Run<'_>) -> Document {
    let mut document = Document::default();
    if let Some(choice) = run.choice {
        add_verdict(&mut document, choice, run.manifest, |document| pictures(document, run));
    } else {
        for label in labels(run) {
            document.loud(label.to_string());
        }
        document.heading("Verdict: none yet");
        document.paragraph(if run.manifest.labels.imported {
            "An imported run is judged by replaying it: nccltune tune --backend replay --recorded with this directory."
        } else {
            "The run has not come to its end: nccltune tune --resume with this directory goes on."
        });
        pictures(&mut document, run);
        document.heading("What it is");
        document.facts(facts(run));
    }
    arms(&mut document, run);
    ran_by_arm(&mut document, run);
    noise(&mut document, run);
    campaign(&mut document, run);
    memory(&mut document, run);
    failures(&mut document, run);
    if !run.manifest.notices.is_empty() {
        document.heading("Said while it was planned");
        document.list(run.manifest.notices.iter().take(40).cloned().collect());
    }
    document.heading("What is verified");
    document.paragraph(STANDING);
    document
}

fn default(run: &Run<'_>) -> Option<ArmId> {
    default_arm(&run.manifest.arms).map(|arm| arm.id.clone())
}

/// The arms that are told one by one, with what each is to the verdict: the default, the winner or the
/// best finalist, the other finalists; without finalists the first few.
fn shown_arms<'a>(run: &Run<'a>) -> Vec<(&'a Arm, &'static str)> {
    let arms = &run.manifest.arms;
    let mut shown: Vec<(&Arm, &'static str)> = default_arm(arms).map(|arm| (arm, "default")).into_iter().collect();
    let mut add = |arm: Option<&'a Arm>, role: &'static str| {
        if let Some(arm) = arm
            && !shown.iter().any(|(known, _)| known.id == arm.id)
        {
            shown.push((arm, role));
        }
    };
    let named = |name: &Option<String>| name.as_ref().and_then(|name| arms.iter().find(|arm| arm.name == *name));
    if let Some(choice) = run.choice {
        add(named(&choice.winner), "tuned");
        add(named(&choice.best_finalist), "best finalist");
    }
    let finalists = run.evidence.finalists().map(|(arms, _, _)| arms.to_vec()).unwrap_or_default();
    for id in &finalists {
        add(arms.iter().find(|arm| arm.id == *id), "finalist");
    }
    if finalists.is_empty() {
        for arm in arms.iter().take(ARMS_DRAWN) {
            add(Some(arm), "arm");
        }
    }
    shown
}

/// The values a table shows of an arm: those of the final, and where it never got there the search's.
fn values<'a>(run: &Run<'a>, arm: &ArmId, point: PointKey) -> Vec<&'a LaunchValue> {
    // What was imported was divided for replays only.
    if run.manifest.labels.imported && run.choice.is_none() {
        return run.evidence.all_values(arm, point);
    }
    match run.evidence.values(Phase::Final, arm, point) {
        [] => run.evidence.values(Phase::Search, arm, point).iter().collect(),
        finals => finals.iter().collect(),
    }
}

/// Median over launches, and the interval of the trimmed mean on the log scale around it.
fn median_and_interval(values: &[&LaunchValue]) -> Option<(f64, Option<[f64; 2]>)> {
    let medians: Vec<f64> = values.iter().map(|value| value.median_us).collect();
    let logs: Vec<f64> = medians.iter().map(|us| us.ln()).collect();
    let interval = stats::trimmed(&logs).map(|trimmed| trimmed.interval(0.95));
    let interval = interval.map(|interval| [interval.low.exp(), interval.high.exp()]);
    Some((stats::median(&medians)?, interval.filter(|ends| ends.iter().all(|end| end.is_finite() && *end > 0.0))))
}

fn pictures(document: &mut Document, run: &Run<'_>) {
    let points = measured_points(&run.manifest.workload);
    let kind = |point: &PointKey| (point.collective, point.dtype, point.ranks, point.form);
    let kinds: Vec<_> = points.iter().map(kind).unique().collect();
    let shown = shown_arms(run);
    for drawn @ (collective, dtype, _, form) in kinds.into_iter().take(LATENCIES_DRAWN) {
        let series: Vec<Series> = shown
            .iter()
            .filter(|(_, role)| run.choice.is_none() || *role != "finalist")
            .take(ARMS_DRAWN)
            .map(|(arm, role)| Series {
                label: if *role == "arm" { arm.name.clone() } else { (*role).to_owned() },
                points: points
                    .iter()
                    .filter(|point| kind(point) == drawn)
                    .filter_map(|point| {
                        let (median, interval) = median_and_interval(&values(run, &arm.id, *point))?;
                        Some((point.bytes, median, interval))
                    })
                    .collect(),
            })
            .filter(|series| !series.points.is_empty())
            .collect();
        // The picture may be wider than a phone, and its labels out of sight.
        let names: Vec<String> = series
            .iter()
            .zip(LOOKS)
            .map(|(series, look)| {
                let arm = shown.iter().find(|(_, role)| *role == series.label && *role != "default");
                let arm = arm.map_or_else(String::new, |(arm, _)| format!(" ({})", arm.name));
                format!("{look}: {}{arm}. ", series.label)
            })
            .collect();
        let what = operation(collective, dtype, form);
        if let Some(svg) = latency(&format!("Latency of {what} by message size"), &series) {
            document.heading(format!("Latency by size: {what}"));
            document.figure(
                svg,
                format!(
                    "{}Medians over launches with 95 % intervals; those smaller than their marks do not show. Both scales are \
                     logarithmic.",
                    names.concat()
                ),
            );
        }
    }
    let Some(choice) = run.choice else { return };
    let label = |point: &PointVerdict| {
        let batch = if point.weight > 0.0 { format!(", batch {}", point.batch) } else { String::new() };
        format!("{} {}, {}{batch}", point.collective, format_size(point.bytes), point.phase.name())
    };
    let drawn: Vec<Gain> = choice
        .points
        .iter()
        .chain(&choice.guard)
        .filter_map(|point| {
            let ratio = point.ratio.filter(|ratio| ratio.is_finite())?;
            let safe = point.safe.unwrap_or(false);
            Some(Gain { label: label(point), ratio, interval: point.ratio_ci95, safe })
        })
        .take(GAINS_DRAWN)
        .collect();
    let thresholds = choice.thresholds;
    if let Some(svg) = gains("Change in time at each point", &drawn, thresholds.min_gain, thresholds.max_regression) {
        document.heading("Gain per point");
        let of = if choice.verdict == VerdictKind::Adopt { "the tuned settings" } else { "the best finalist" };
        document.figure(
            svg,
            format!(
                "Time of {of} against the default, launch by launch; whiskers are 95 % intervals. A hollow square: a \
                 regression of more than {} is not ruled out there.",
                percent(thresholds.max_regression)
            ),
        );
    }
}

fn facts(run: &Run<'_>) -> Vec<(String, String)> {
    let manifest = run.manifest;
    [
        ("workload", wording::workload(&manifest.workload)),
        ("machine", wording::machine(&manifest.machine, &manifest.devices)),
        ("NCCL", wording::nccl(manifest.nccl.as_ref())),
        ("space", manifest.space.name.clone()),
        ("files", manifest.imported_files.len().to_string()),
        ("date", manifest.created.clone()),
        ("tool", format!("nccltune {}", manifest.tool_version)),
    ]
    .into_iter()
    .filter(|(name, _)| *name != "files" || manifest.labels.imported)
    .map(|(name, value)| (name.to_owned(), value))
    .collect()
}

/// Mean objective of an arm against the default, and the blocks it rests on.
type Mean = Option<(f64, u32)>;

/// Arms by how they stand against the default, best first.
fn arms(document: &mut Document, run: &Run<'_>) {
    let (Some(default), Some(objective)) = (default(run), Objective::of(&run.manifest.workload)) else { return };
    let finalists = run.evidence.finalists().map(|(arms, _, _)| arms.to_vec()).unwrap_or_default();
    let mean = |phase: Phase, arm: &ArmId| {
        let logs = run.evidence.objective_log_ratios(phase, arm, &default, &objective);
        Some((stats::mean(&logs)?.exp(), logs.len() as u32))
    };
    let mut standing: Vec<(&Arm, Mean, Mean)> = run
        .manifest
        .arms
        .iter()
        .filter(|arm| arm.id != default)
        .map(|arm| (arm, mean(Phase::Search, &arm.id), mean(Phase::Final, &arm.id)))
        .collect();
    if standing.is_empty() {
        return;
    }
    let key = |row: &(&Arm, Mean, Mean)| (row.2.or(row.1)).map_or(f64::INFINITY, |(ratio, _)| ratio);
    standing.sort_by(|left, right| {
        (left.2.is_none(), key(left)).partial_cmp(&(right.2.is_none(), key(right))).unwrap_or(std::cmp::Ordering::Equal)
    });
    let mut table = Table::new(&["arm", ">search", ">blocks", ">final", ">launches", "standing"]);
    for (arm, search, last) in standing.iter().take(ARMS_SHOWN) {
        let failed = run.evidence.failures_of(&arm.id).last().map(|failure| failure.kind.name());
        let role = match run.choice {
            Some(choice) if choice.winner.as_ref() == Some(&arm.name) => "adopted",
            Some(choice) if choice.vetoed.iter().any(|veto| veto.arm == arm.id) => "may not ship",
            _ if finalists.contains(&arm.id) => "finalist",
            _ => failed.unwrap_or("measured"),
        };
        let change = |mean: &Mean| mean.map_or_else(dash, |(ratio, _)| format_change(ratio));
        let count = |mean: &Mean| mean.map_or_else(dash, |(_, count)| count.to_string());
        table.row(vec![arm.name.clone(), change(search), count(search), change(last), count(last), role.to_owned()]);
    }
    let total = standing.len();
    document.heading(if total > ARMS_SHOWN {
        format!("Arms: the best {ARMS_SHOWN} of {total}, objective against the default")
    } else {
        "Arms: objective against the default".to_owned()
    });
    document.table(table);
    if run.manifest.labels.imported && run.choice.is_none() {
        document
            .paragraph("Search and final are how a replay will use the launches: the first choose, the others judge.");
    }
}

/// What ran at each message, arm by arm.
fn ran_by_arm(document: &mut Document, run: &Run<'_>) {
    let shown: Vec<(&Arm, &str)> = shown_arms(run).into_iter().take(ARMS_DRAWN).collect();
    let effective = |arm: &ArmId, point: PointKey| -> Option<Effective> {
        values(run, arm, point).last().map(|value| value.effective.clone())
    };
    let points = measured_points(&run.manifest.workload);
    let known = points.iter().any(|point| {
        shown
            .iter()
            .any(|(arm, _)| effective(&arm.id, *point).is_some_and(|effective| effective != Effective::default()))
    });
    if !known || shown.len() < 2 {
        return;
    }
    let titles: Vec<String> = shown
        .iter()
        .map(|(arm, role)| if *role == "default" { "default".to_owned() } else { arm.name.clone() })
        .collect();
    let mut columns = vec!["operation", ">size"];
    columns.extend(titles.iter().map(String::as_str));
    let mut table = Table::new(&columns);
    for point in &points {
        let mut row = vec![operation(point.collective, point.dtype, point.form), format_size(point.bytes)];
        row.extend(
            shown.iter().map(|(arm, _)| effective(&arm.id, *point).map_or_else(dash, |effective| ran(&effective))),
        );
        table.row(row);
    }
    document.heading("What ran where: algorithm/protocol/channels by size and arm");
    document.table(table);
}

/// How the default's launches scatter at a point.
#[derive(Debug, Clone, Serialize)]
struct Spread {
    collective: Collective,
    dtype: DataType,
    bytes: u64,
    #[serde(flatten)]
    form: Form,
    launches: u32,
    median_us: f64,
    /// Standard deviation over launches, as a share of the median.
    standard_deviation: Option<f64>,
    /// Last third of the launches over the first.
    drift: Option<f64>,
    /// Whether the drift is more than the scatter explains.
    drift_beyond_noise: bool,
}

fn spreads(run: &Run<'_>) -> Vec<Spread> {
    let Some(default) = default(run) else { return Vec::new() };
    measured_points(&run.manifest.workload)
        .into_iter()
        .filter_map(|point| {
            let mut values = run.evidence.all_values(&default, point);
            values.sort_by_key(|value| value.launch);
            let medians: Vec<f64> = values.iter().map(|value| value.median_us).collect();
            let median_us = stats::median(&medians)?;
            let drift = stats::drift(&medians);
            Some(Spread {
                collective: point.collective,
                dtype: point.dtype,
                bytes: point.bytes,
                form: point.form,
                launches: medians.len() as u32,
                median_us,
                standard_deviation: stats::standard_deviation(&medians).map(|deviation| deviation / median_us),
                drift: drift.as_ref().map(|drift| drift.ratio),
                drift_beyond_noise: drift.is_some_and(|drift| drift.beyond_noise),
            })
        })
        .collect()
}

fn noise(document: &mut Document, run: &Run<'_>) {
    let spreads = spreads(run);
    if spreads.iter().all(|spread| spread.launches < 2) {
        return;
    }
    document.heading("Noise: launches of the default");
    if let Some(svg) = scatter("Launches of the default around their medians", &departures(run)) {
        let imported = run.manifest.labels.imported;
        document.figure(
            svg,
            format!(
                "A dot is one launch: its mean deviation from the median of each point; the line reaches from the \
                 smallest to the largest.{}",
                if imported { " The order is that of the files." } else { "" }
            ),
        );
    }
    let mut table =
        Table::new(&["operation", ">bytes", ">size", ">launches", ">median", ">spread", ">drift", "beyond noise"]);
    for spread in &spreads {
        let [bytes, size] = message(spread.bytes);
        table.row(vec![
            operation(spread.collective, spread.dtype, spread.form),
            bytes,
            size,
            spread.launches.to_string(),
            format_us(spread.median_us),
            spread.standard_deviation.map_or_else(dash, percent),
            spread.drift.map_or_else(dash, format_change),
            if spread.drift.is_none() {
                dash()
            } else if spread.drift_beyond_noise {
                "YES".to_owned()
            } else {
                "no".to_owned()
            },
        ]);
    }
    document.table(table);
    document.paragraph(
        "Spread: standard deviation over launches. Drift: the last third of the launches against the first; arms are \
         compared within blocks, so that drift touches both sides of a pair alike.",
    );
}

/// Launches of the default with how far each was from the medians.
fn departures(run: &Run<'_>) -> Vec<Departure> {
    let Some(default) = default(run) else { return Vec::new() };
    let mut launches: BTreeMap<u32, (Phase, Vec<f64>)> = BTreeMap::new();
    for point in measured_points(&run.manifest.workload) {
        let values: Vec<(Phase, &LaunchValue)> = [Phase::Search, Phase::Final]
            .into_iter()
            .flat_map(|phase| run.evidence.values(phase, &default, point).iter().map(move |value| (phase, value)))
            .collect();
        let medians: Vec<f64> = values.iter().map(|(_, value)| value.median_us).collect();
        let Some(median) = stats::median(&medians) else { continue };
        for (phase, value) in values {
            launches.entry(value.launch).or_insert((phase, Vec::new())).1.push(value.median_us / median - 1.0);
        }
    }
    launches
        .into_values()
        .filter_map(|(phase, shares)| {
            let mean = stats::mean(&shares)?;
            let low = shares.iter().copied().fold(f64::INFINITY, f64::min);
            let high = shares.iter().copied().fold(f64::NEG_INFINITY, f64::max);
            Some(Departure { phase, mean, range: [low, high] })
        })
        .collect()
}

/// A block on the run's clock.
#[derive(Debug, Clone, Serialize)]
struct BlockTime {
    block: u32,
    phase: Phase,
    launches: u32,
    start_s: f64,
    end_s: f64,
    failed_at_s: Vec<f64>,
    voided: bool,
}

fn blocks(run: &Run<'_>) -> Vec<BlockTime> {
    let mut blocks: BTreeMap<u32, BlockTime> = BTreeMap::new();
    for line in run.lines {
        match &line.event {
            Event::BlockPlanned { block, phase, launches } => {
                blocks.insert(
                    *block,
                    BlockTime {
                        block: *block,
                        phase: *phase,
                        launches: launches.len() as u32,
                        start_s: line.at_s,
                        end_s: line.at_s,
                        failed_at_s: Vec::new(),
                        voided: run.evidence.voided().contains_key(block),
                    },
                );
            }
            Event::CellMeasured(cell) => {
                if let Some(known) = blocks.get_mut(&cell.block) {
                    known.end_s = known.end_s.max(line.at_s);
                }
            }
            Event::CellFailed { block, .. } => {
                if let Some(known) = blocks.get_mut(block) {
                    known.end_s = known.end_s.max(line.at_s);
                    if known.failed_at_s.len() < 1000 {
                        known.failed_at_s.push(line.at_s);
                    }
                }
            }
            Event::BlockEnded { block } => {
                if let Some(known) = blocks.get_mut(block) {
                    known.end_s = known.end_s.max(line.at_s);
                }
            }
            _ => {}
        }
    }
    blocks.into_values().collect()
}

/// What of a run was measured in communicators that arms shared.
fn at_call_level(run: &Run<'_>) -> Option<String> {
    let cells = || {
        run.lines.iter().filter_map(|line| match &line.event {
            Event::CellMeasured(cell) => Some(cell),
            _ => None,
        })
    };
    let called = || cells().filter(|cell| cell.call.is_some());
    let count = called().count();
    let arms = called().map(|cell| &cell.arm).unique().count() as u32;
    let communicators = called().map(|cell| (cell.launch, cell.communicator)).unique().count() as u32;
    (count > 0).then(|| {
        format!(
            "{} of {} cells were measured at call level: {arms} {} shared {communicators} {}, in which the tuner plugin \
             chose what ran. The final was not: its arms ran as they are deployed.",
            group_thousands(count as u64),
            group_thousands(cells().count() as u64),
            plural(arms, "arm", "arms"),
            plural(communicators, "communicator", "communicators"),
        )
    })
}

fn campaign(document: &mut Document, run: &Run<'_>) {
    let blocks = blocks(run);
    if blocks.is_empty() {
        return;
    }
    document.heading("The campaign");
    let resumes: Vec<f64> =
        run.lines.iter().filter(|line| matches!(line.event, Event::RunResumed { .. })).map(|line| line.at_s).collect();
    let spans: Vec<Span> = blocks
        .iter()
        .map(|block| Span {
            phase: block.phase,
            seconds: [block.start_s, block.end_s],
            failures: block.failed_at_s.clone(),
        })
        .collect();
    if let Some(svg) = timeline("Blocks of the campaign over time", &spans, &resumes) {
        document.figure(
            svg,
            "A bar is one block, in which every arm of the phase runs beside the default; a cross is a failure.",
        );
    }
    let mut table = Table::new(&["phase", ">blocks", ">launches", ">failures", ">begins", ">ends"]);
    for (phase, name) in PHASES {
        let of: Vec<&BlockTime> = blocks.iter().filter(|block| block.phase == phase).collect();
        let (Some(first), Some(last)) = (of.first(), of.last()) else { continue };
        let timed = last.end_s > 0.0;
        let clock = |seconds: f64| if timed { format_seconds(seconds) } else { dash() };
        table.row(vec![
            name.to_owned(),
            of.len().to_string(),
            group_thousands(of.iter().map(|block| u64::from(block.launches)).sum()),
            of.iter().map(|block| block.failed_at_s.len()).sum::<usize>().to_string(),
            clock(first.start_s),
            clock(last.end_s),
        ]);
    }
    document.table(table);
    if let Some(told) = at_call_level(run) {
        document.paragraph(told);
    }
    if let Some((_, _, reason)) = run.evidence.finalists() {
        document.paragraph(format!("Finalists: {reason}."));
    }
    let dropped: Vec<String> = run
        .evidence
        .dropped()
        .iter()
        .map(|(arm, detail)| format!("{} left early: {detail}", name_of(run, arm)))
        .collect();
    if !dropped.is_empty() {
        document.list(dropped);
    }
}

fn memory(document: &mut Document, run: &Run<'_>) {
    let Some(default) = default(run) else { return };
    let Some((device, host)) = run.evidence.memory(&default) else { return };
    let mib = |bytes: f64| format!("{:.0}", bytes / f64::from(1 << 20));
    let difference = |bytes: f64| format!("{:+.0}", bytes / f64::from(1 << 20));
    let mut table =
        Table::new(&["arm", ">device MiB per rank", ">against default", ">shared host MiB", ">against default "]);
    for (arm, role) in shown_arms(run) {
        let Some((own_device, own_host)) = run.evidence.memory(&arm.id) else { continue };
        table.row(vec![
            if role == "default" { "default".to_owned() } else { arm.name.clone() },
            mib(own_device),
            difference(own_device - device),
            mib(own_host),
            difference(own_host - host),
        ]);
    }
    document.heading("Memory: what one communicator takes");
    document.table(table);
    if let Some(bill) = run.choice.and_then(wording::memory) {
        document.paragraph(format!("The answer in all: {bill}."));
    }
}

fn failures(document: &mut Document, run: &Run<'_>) {
    let mut counted: BTreeMap<(ArmId, OutcomeKind, String), u32> = BTreeMap::new();
    for failure in run.evidence.failures() {
        *counted.entry((failure.arm.clone(), failure.kind, failure.detail.clone())).or_default() += 1;
    }
    if counted.is_empty() {
        return;
    }
    let hidden = counted.len().saturating_sub(FAILURES_SHOWN);
    let mut items: Vec<String> = counted
        .into_iter()
        .take(FAILURES_SHOWN)
        .map(|((arm, kind, detail), times)| {
            let times = if times > 1 { format!(", {times} times") } else { String::new() };
            format!("{}: {}{times}: {detail}", name_of(run, &arm), kind.name())
        })
        .collect();
    if hidden > 0 {
        items.push(format!("and {hidden} more, in run.jsonl"));
    }
    document.heading("What failed");
    document.list(items);
}

fn name_of(run: &Run<'_>, arm: &ArmId) -> String {
    run.manifest.arms.iter().find(|known| known.id == *arm).map_or_else(|| arm.0.clone(), |known| known.name.clone())
}

/// Every arm at every point.
fn rows(run: &Run<'_>) -> Vec<RunRow> {
    let labels: Vec<String> = labels(run).into_iter().map(|label| label.word).collect();
    let shown = shown_arms(run);
    let mut rows = Vec::new();
    for arm in &run.manifest.arms {
        let role = shown.iter().find(|(known, _)| known.id == arm.id).map_or("arm", |(_, role)| role);
        for point in measured_points(&run.manifest.workload) {
            let values = values(run, &arm.id, point);
            let figures = median_and_interval(&values);
            let failure = run.evidence.failures_of(&arm.id).last().map(|failure| failure.kind);
            let missing = failure.unwrap_or(OutcomeKind::NotRecorded);
            rows.push(RunRow {
                labels: labels.join(" "),
                arm: arm.name.clone(),
                role: role.to_owned(),
                collective: point.collective,
                dtype: point.dtype,
                bytes: point.bytes,
                ranks: point.ranks,
                form: point.form,
                launches: values.len() as u32,
                median_us: figures.map(|(median, _)| median),
                ci95_us: figures.and_then(|(_, interval)| interval),
                effective: values.last().map(|value| value.effective.clone()),
                outcome: if values.is_empty() { missing } else { OutcomeKind::Measured },
            });
        }
    }
    rows
}

/// What `import` prints: the run as it now stands.
pub fn import_document(
    run: &Run<'_>,
    added: &str,
    next: &str,
    remarks: &[String],
    width: Option<u16>,
    markdown: bool,
) -> String {
    let mut document = Document::default();
    for label in labels(run) {
        document.loud(label.to_string());
    }
    document.heading(added);
    let mut table = Table::new(&["arm", ">launches", ">cells", ">failures"]);
    for arm in &run.manifest.arms {
        let launches = run.manifest.imported_files.iter().filter(|file| file.arm == arm.id).count();
        let points = measured_points(&run.manifest.workload);
        let cells: usize = points.iter().map(|point| run.evidence.all_values(&arm.id, *point).len()).sum();
        let failed = run.evidence.failures_of(&arm.id).len();
        table.row(vec![arm.name.clone(), launches.to_string(), cells.to_string(), failed.to_string()]);
    }
    document.table(table);
    let points = run.manifest.workload.points.len() as u32;
    document.paragraph(format!(
        "{points} {} that every arm was tried at, {} ranks.",
        plural(points, "size", "sizes"),
        run.manifest.workload.tensor_parallel
    ));
    if !remarks.is_empty() {
        document.heading("Left out, or worth knowing");
        document.list(remarks.to_vec());
    }
    document.heading("Next");
    document.paragraph(next);
    if markdown { document.markdown() } else { document.text(width) }
}

fn dash() -> String {
    "-".to_owned()
}
