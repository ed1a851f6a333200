//! The answer of a run, told to a person.

use std::collections::BTreeSet;

use super::comma_separated::verdict_csv;
use super::document::{Document, Table};
use super::tables::message;
use super::{Format, ReportError, ran, to_json};
use crate::record::{Answer, BackendKind, Choice, Effective, Manifest, Origin, PointVerdict, VerdictKind};
use crate::units::{format_change, format_seconds, format_us, group_thousands};
use crate::wording::{self, percent};

/// Vetoed arms that are listed one by one; the rest are counted.
const VETOES_SHOWN: usize = 8;

/// The verdict in any format.
pub fn verdict(
    choice: &Choice,
    manifest: &Manifest,
    format: Format,
    width: Option<u16>,
) -> Result<String, ReportError> {
    match format {
        Format::Text => Ok(verdict_text(choice, manifest, width)),
        Format::Markdown => Ok(verdict_markdown(choice, manifest)),
        Format::Csv => Ok(verdict_csv(choice, manifest)),
        Format::Json => to_json(choice),
    }
}

/// What `tune` prints: labels, verdict, settings, figures, and how they came about.
pub fn verdict_text(choice: &Choice, manifest: &Manifest, width: Option<u16>) -> String {
    document(choice, manifest).text(width)
}

/// The same for a page.
pub fn verdict_markdown(choice: &Choice, manifest: &Manifest) -> String {
    document(choice, manifest).markdown()
}

/// Where the files of a run are and what each is for; follows the verdict on a terminal.
pub fn files_text(choice: &Choice, directory: &str, width: Option<u16>) -> String {
    let adopted = choice.verdict == VerdictKind::Adopt;
    let answer = if adopted { "the answer" } else { "comments only: there is nothing to set" };
    let files = [
        ("tuned.env", format!("{answer}, for docker, systemd and compose")),
        ("tuned.sh", format!("{answer}, for a shell")),
        ("choice.json", "the verdict with every figure".to_owned()),
        ("report.html", "the run as a page with pictures".to_owned()),
        ("summary.csv", "every arm at every point".to_owned()),
        ("run.jsonl", "every measurement in the order it was made".to_owned()),
        ("manifest.json", "what the run was: machine, workload, space, settings".to_owned()),
    ];
    let beside = choice.files.iter().map(|(kind, name)| (name.clone(), format!("the {} of the answer", kind.words())));
    let files: Vec<(String, String)> =
        files.map(|(name, purpose)| (name.to_owned(), purpose)).into_iter().chain(beside).collect();
    let mut document = Document::default();
    document.heading(format!("Files in {directory}"));
    document.facts(files);
    format!("\n{}", document.text(width))
}

fn document(choice: &Choice, manifest: &Manifest) -> Document {
    let mut document = Document::default();
    add_verdict(&mut document, choice, manifest, |_| {});
    document
}

/// The verdict, with room for pictures behind the settings.
pub(super) fn add_verdict(
    document: &mut Document,
    choice: &Choice,
    manifest: &Manifest,
    pictures: impl FnOnce(&mut Document),
) {
    for label in wording::labels(choice, manifest) {
        document.loud(label.to_string());
    }
    headline(document, choice);
    settings(document, choice, manifest);
    pictures(document);
    points(document, choice, manifest.backend);
    batches(document, choice);
    listed(document, "Not measured, so not part of this verdict", choice.unmeasured.clone());
    vetoes(document, choice);
    listed(document, "Not tried, since it failed in an earlier run", quarantined(choice));
    trials(document, choice);
    listed(document, "Warnings", warnings(choice));
    listed(document, "Notes", choice.notes.clone());
    document.heading(match manifest.backend {
        BackendKind::Nccl => "How it was measured",
        BackendKind::Simulated => "How it was simulated",
        BackendKind::Replay => "How it was replayed",
    });
    document.facts(facts(choice, manifest));
}

/// What whoever deploys the answer must know, and what may make a server's NCCL another than this one.
fn warnings(choice: &Choice) -> Vec<String> {
    choice.warnings.iter().cloned().chain(choice.cold_and_warm.as_ref().and_then(wording::colder)).collect()
}

fn headline(document: &mut Document, choice: &Choice) {
    document.heading(format!("Verdict: {}", choice.verdict.name()));
    if choice.verdict == VerdictKind::Adopt
        && let Some(gain) = wording::gain(choice)
    {
        document.paragraph(format!("{gain}."));
        if let Some(pass) = wording::forward_pass(choice) {
            document.paragraph(format!("{}.", capitalized(&pass)));
        }
        let open = wording::not_shown_safe(choice);
        if !open.is_empty() {
            let allowed = percent(choice.thresholds.max_regression);
            document.paragraph(format!(
                "A regression of more than {allowed} is not ruled out at {}; --strict asks for that.",
                wording::enumerated(&open)
            ));
        }
    }
    if let Some(misjudged) = &choice.misjudged {
        document.paragraph(format!("{}.", capitalized(misjudged)));
    }
    // The gain above is the reason of an adoption.
    if choice.verdict != VerdictKind::Adopt {
        document.paragraph(&choice.reason);
    }
    if let Some(best) = wording::best_finalist(choice) {
        document.paragraph(format!("{}.", capitalized(&best)));
    }
}

fn settings(document: &mut Document, choice: &Choice, manifest: &Manifest) {
    let conditions = wording::conditions(choice, manifest);
    let pinned = |name: &str| conditions.iter().any(|item| item.variable == name && item.origin == Some(Origin::Pin));
    let adopted = choice.verdict == VerdictKind::Adopt;
    if adopted {
        document.heading(match &choice.winner {
            Some(winner) => format!("Settings ({winner})"),
            None => "Settings".to_owned(),
        });
        let mut lines: Vec<String> = choice
            .env
            .iter()
            .filter(|(name, _)| !pinned(name))
            .map(|(name, value)| format!("{name}={value}"))
            .collect();
        lines.extend(choice.files.iter().flat_map(|(kind, name)| {
            let file = (kind.variable(), name.as_str());
            let both = std::iter::once(file).chain(kind.companion());
            both.map(|(variable, name)| format!("{variable}=[this run's directory]/{name}")).collect::<Vec<_>>()
        }));
        if lines.is_empty() {
            lines.push("(no variables)".to_owned());
        }
        document.code(lines);
        for (kind, name) in &choice.files {
            document.paragraph(format!(
                "Only together with the {} {name}, which lies in the run's directory; tuned.env and tuned.sh lead to it \
                 by its whole path, and a container must see it there.",
                kind.words()
            ));
        }
        let held = |answer: &&Answer| answer.env == choice.env && answer.files == choice.files;
        for answer in choice.answers.iter().filter(held) {
            if let Some(table) = answer.table.as_ref().filter(|table| !choice.files.values().any(|file| file == *table))
            {
                document.paragraph(format!("Only together with the tuner table {table}."));
            }
            if !answer.server_args.is_empty() {
                document.paragraph(format!("Only with the server arguments {}.", answer.server_args.join(" ")));
            }
        }
    }
    let held = conditions
        .iter()
        .map(|item| {
            let who = item.origin_words(&wording::engine(&manifest.workload));
            let too = if adopted && item.origin == Some(Origin::Pin) { ", and in the files too" } else { "" };
            format!("{}={} ({who}{too})", item.variable, item.value)
        })
        .collect();
    listed(document, "Holds only while", held);
}

fn points(document: &mut Document, choice: &Choice, backend: BackendKind) {
    if choice.points.is_empty() && choice.guard.is_empty() {
        return;
    }
    let other = if choice.verdict == VerdictKind::Adopt { "tuned" } else { "best finalist" };
    document.heading("Points: microseconds per call, median over launches");
    document.table(point_table(&choice.points, other));
    if !choice.guard.is_empty() {
        document.heading("Guard set: what must not get slower");
        document.table(point_table(&choice.guard, other));
    }
    let allowed = percent(choice.thresholds.max_regression);
    document.paragraph(format!(
        "Safe: yes where a regression of more than {allowed} is ruled out; open where it is not, with the end that \
         the interval reaches; NO where the arm is shown to be slower, by however little.",
    ));
    let ran = ran_table(choice, other);
    if !ran.is_empty() {
        document.heading(match backend {
            BackendKind::Nccl => "What ran: algorithm/protocol/channels, as NCCL logged them",
            BackendKind::Simulated => "What ran: algorithm/protocol/channels, as the simulated machine has them",
            BackendKind::Replay => "What ran: algorithm/protocol/channels, as the recorded run has them",
        });
        document.table(ran);
    }
}

fn point_table(points: &[PointVerdict], other: &str) -> Table {
    let other = format!(">{other}");
    let mut table = Table::new(&[
        "phase",
        ">batch",
        "operation",
        ">bytes",
        ">size",
        ">calls",
        ">default",
        &other,
        ">change",
        ">95 % interval",
        "safe",
    ]);
    for point in points {
        let us = |value: Option<f64>| value.map_or_else(dash, format_us);
        let [bytes, size] = message(point.bytes);
        table.row(vec![
            point.phase.name().to_owned(),
            point.batch.to_string(),
            operation(point),
            bytes,
            size,
            point.calls_per_pass.to_string(),
            us(point.baseline_us),
            us(point.winner_us),
            change(point.ratio, None),
            interval(point.ratio_ci95).unwrap_or_else(dash),
            safe(point),
        ]);
    }
    table
}

/// What ran at each message, once: batches that pad to the same message share it.
fn ran_table(choice: &Choice, other: &str) -> Table {
    let mut table = Table::new(&["operation", ">bytes", ">size", "default", other, "transport"]);
    let mut told = BTreeSet::new();
    for point in choice.points.iter().chain(&choice.guard) {
        let sides = [&point.effective_default, &point.effective].map(Option::as_ref);
        if sides.iter().flatten().all(|side| **side == Effective::default())
            || !told.insert((point.collective, point.dtype, point.bytes, point.form))
        {
            continue;
        }
        let [default, tuned] = sides.map(|side| side.map_or_else(dash, ran));
        let transports = sides.map(|side| side.and_then(|effective| effective.transport.clone()));
        let transport = match transports {
            [None, None] => dash(),
            [default, tuned] if default == tuned => default.unwrap_or_default(),
            sides => {
                let [default, tuned] = sides.map(|side| side.unwrap_or_else(dash));
                format!("{default} (default), {tuned} ({other})")
            }
        };
        let [bytes, size] = message(point.bytes);
        table.row(vec![operation(point), bytes, size, default, tuned, transport]);
    }
    table
}

fn operation(point: &PointVerdict) -> String {
    wording::operation(point.collective, point.dtype, point.form)
}

fn dash() -> String {
    "-".to_owned()
}

fn change(ratio: Option<f64>, ends: Option<[f64; 2]>) -> String {
    let change = ratio.filter(|ratio| ratio.is_finite()).map_or_else(dash, format_change);
    match interval(ends) {
        Some(interval) => format!("{change} ({interval})"),
        None => change,
    }
}

fn interval(ends: Option<[f64; 2]>) -> Option<String> {
    let ends = ends.filter(|ends| ends.iter().all(|end| end.is_finite()))?;
    let [low, high] = ends.map(|end| format!("{:+.1}", (end - 1.0) * 100.0));
    Some(format!("{low} to {high}"))
}

fn safe(point: &PointVerdict) -> String {
    let ends = point.ratio_ci95.filter(|ends| ends.iter().all(|end| end.is_finite()));
    match (point.measured, point.safe, ends) {
        (false, ..) => "not measured".to_owned(),
        (true, Some(true), _) => "yes".to_owned(),
        (true, Some(false), Some([low, _])) if low > 1.0 => "NO, slower".to_owned(),
        (true, Some(false), Some([_, high])) => format!("open, to {}", format_change(high)),
        (true, Some(false), None) => "open".to_owned(),
        (true, None, _) => dash(),
    }
}

fn batches(document: &mut Document, choice: &Choice) {
    let objective = &choice.objective;
    if objective.batches.is_empty() {
        return;
    }
    document.heading("Objective: microseconds in measured collectives per pass");
    let adopted = choice.verdict == VerdictKind::Adopt;
    let us = |value: Option<f64>| value.map_or_else(dash, format_us);
    let titles = [">batch", ">weight", ">default", ">tuned", "change"];
    let shown = if adopted { titles.len() } else { 3 };
    let mut table = Table::new(&titles[..shown]);
    let mut row = |batch: String, weight: String, figures: [Option<f64>; 2], change: String| {
        let [baseline, winner] = figures.map(us);
        let mut cells = vec![batch, weight, baseline, winner, change];
        cells.truncate(shown);
        table.row(cells);
    };
    for batch in &objective.batches {
        let ratio = batch.winner_us.zip(batch.baseline_us).map(|(winner, baseline)| winner / baseline);
        let figures = [batch.baseline_us, batch.winner_us];
        row(batch.batch.to_string(), format!("{:.3}", batch.weight), figures, change(ratio, None));
    }
    if objective.batches.len() > 1 {
        let figures = [objective.baseline, objective.winner];
        row("all".to_owned(), dash(), figures, change(objective.ratio, objective.ratio_ci95));
    }
    document.table(table);
    if objective.batches.len() > 1 {
        let mean = "All: weighted geometric mean over batches, so that no batch decides by its size.";
        document.paragraph(if adopted {
            format!("{mean} Its change is the paired estimate that decides; a batch's compares medians.")
        } else {
            mean.to_owned()
        });
    }
}

fn vetoes(document: &mut Document, choice: &Choice) {
    let mut items: Vec<String> = choice
        .vetoed
        .iter()
        .take(VETOES_SHOWN)
        .map(|veto| format!("{}: {}", if veto.name.is_empty() { &veto.arm.0 } else { &veto.name }, veto.reason))
        .collect();
    let hidden = choice.vetoed.len().saturating_sub(VETOES_SHOWN);
    if hidden > 0 {
        items.push(format!("and {hidden} more, in choice.json"));
    }
    listed(document, "Arms that may not ship", items);
}

/// Arms that earlier failures kept out; the rest of a long list is counted.
fn quarantined(choice: &Choice) -> Vec<String> {
    let mut items: Vec<String> = choice.quarantined.iter().take(VETOES_SHOWN).map(wording::quarantined).collect();
    let hidden = choice.quarantined.len().saturating_sub(VETOES_SHOWN);
    if hidden > 0 {
        items.push(format!("and {hidden} more, in choice.json"));
    }
    if !items.is_empty() {
        items.push("--retry-quarantined tries them again".to_owned());
    }
    items
}

/// Forward passes: the default's own first, then each arm.
fn trials(document: &mut Document, choice: &Choice) {
    if choice.trials.is_empty() {
        return;
    }
    document.heading("Forward pass: milliseconds per pass, median over launches");
    let mut table = Table::new(&[
        "phase",
        ">tokens",
        ">default",
        ">floor",
        ">collectives",
        "arm",
        ">tuned",
        ">change",
        ">95 % interval",
        ">predicted",
    ]);
    let ms = |value: Option<f64>| value.map_or_else(dash, |ms| format!("{ms:.3}"));
    let arms = choice.trials.iter().any(|trial| trial.ratio.is_some());
    for trial in choice.trials.iter().filter(|trial| trial.ratio.is_some() || !arms) {
        let gain = |gain: Option<f64>| gain.map_or_else(dash, |gain| change(Some(1.0 - gain), None));
        table.row(vec![
            trial.phase.map_or_else(|| "mix".to_owned(), |phase| phase.name().to_owned()),
            trial.tokens.map_or_else(dash, group_thousands),
            ms(trial.baseline_ms),
            ms(trial.floor_ms),
            trial.communication_share.map_or_else(dash, percent),
            trial.arm.clone(),
            ms(trial.winner_ms),
            change(trial.ratio, None),
            interval(trial.ratio_ci95).unwrap_or_else(dash),
            gain(trial.predicted_gain),
        ]);
    }
    document.table(table);
    document.paragraph(
        "Floor: the pass without collectives, which no NCCL setting can go below. Predicted: from the micro-benchmark. \
         Mix: the weighted mean that decides.",
    );
}

fn listed(document: &mut Document, heading: &str, items: Vec<String>) {
    if !items.is_empty() {
        document.heading(heading);
        document.list(items);
    }
}

fn facts(choice: &Choice, manifest: &Manifest) -> Vec<(String, String)> {
    let search = &choice.search;
    let statistics = &choice.statistics;
    let launches = format!(
        "{} paired {} behind the verdict, {} in all",
        statistics.launches,
        wording::plural(statistics.launches, "launch", "launches"),
        search.launches
    );
    let clock = match manifest.backend {
        BackendKind::Nccl => "",
        BackendKind::Simulated | BackendKind::Replay => " on a virtual clock",
    };
    let ended = match search.stopped_by.as_str() {
        "complete" => "ran to its end".to_owned(),
        "budget" => "ended by the time budget".to_owned(),
        "interrupt" => "interrupted".to_owned(),
        other => format!("stopped by {other}"),
    };
    let grid = group_thousands(u64::from(search.full_grid_cells));
    let cost = format!(
        "{} arms, {} cells measured (12 launches of every arm would be {grid}), {}{clock}, {ended}",
        search.arms,
        group_thousands(u64::from(search.measured_cells)),
        format_seconds(search.wall_s)
    );
    let noise = choice
        .noise_floor
        .filter(|noise| noise.is_finite())
        .map(|noise| format!("{} (half-width of default against default at this number of launches)", percent(noise)));
    let thresholds = format!(
        "adopt beyond a gain of {}, veto beyond a regression of {} at any point{}",
        percent(choice.thresholds.min_gain),
        percent(choice.thresholds.max_regression),
        if manifest.settings.strict { ", every point shown safe" } else { "" }
    );
    let fingerprint = choice.fingerprint.get(..12).unwrap_or(&choice.fingerprint);
    [
        ("workload", Some(wording::workload(&manifest.workload))),
        ("machine", Some(wording::machine(&manifest.machine, &manifest.devices))),
        ("fingerprint", Some(format!("{fingerprint}..."))),
        ("NCCL", Some(wording::nccl(manifest.nccl.as_ref()))),
        ("space", Some(manifest.space.name.clone())),
        ("search", Some(cost)),
        ("launches", Some(launches)),
        ("method", Some(statistics.method.clone())),
        ("noise floor", noise),
        ("thresholds", Some(thresholds)),
        ("peer access", choice.peer_access.as_ref().and_then(wording::peer_access)),
        ("memory", wording::memory(choice)),
        ("seed", Some(statistics.seed.to_string())),
        ("date", Some(manifest.created.clone())),
        ("tool", Some(format!("nccltune {}", manifest.tool_version))),
    ]
    .into_iter()
    .filter_map(|(name, value)| Some((name.to_owned(), value?)))
    .collect()
}

fn capitalized(text: &str) -> String {
    let mut characters = text.chars();
    characters.next().map_or_else(String::new, |first| first.to_uppercase().chain(characters).collect())
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;
    use crate::record::{ArmId, QuarantinedArm};
    use crate::wording::fixtures;

    #[test]
    fn adopt_on_a_wide_terminal() {
        let (choice, manifest) = (fixtures::adopt(), fixtures::manifest());
        insta::assert_snapshot!(verdict_text(&choice, &manifest, None));
    }

    #[test]
    fn adopt_on_a_narrow_terminal() {
        let text = verdict_text(&fixtures::adopt(), &fixtures::manifest(), Some(100));
        assert!(text.lines().all(|line| line.chars().count() <= 100), "{text}");
        insta::assert_snapshot!(text);
    }

    #[test]
    fn adopt_as_markdown() {
        insta::assert_snapshot!(verdict_markdown(&fixtures::adopt(), &fixtures::manifest()));
    }

    #[test]
    fn adopt_as_csv() {
        let (choice, manifest) = fixtures::simulated(fixtures::adopt());
        insta::assert_snapshot!(verdict(&choice, &manifest, Format::Csv, None).unwrap());
    }

    #[test]
    fn keep_default_says_what_the_best_finalist_reached() {
        let text = verdict_text(&fixtures::keep_default(), &fixtures::manifest(), Some(120));
        insta::assert_snapshot!(text);
    }

    #[test]
    fn undecided_counts_what_it_does_not_list() {
        let text = verdict_text(&fixtures::undecided(), &fixtures::manifest(), Some(120));
        assert!(text.contains("and 3 more, in choice.json"));
        insta::assert_snapshot!(text);
    }

    #[test]
    fn simulated_is_the_first_thing_said() {
        let (choice, manifest) = fixtures::simulated(fixtures::adopt());
        let text = verdict_text(&choice, &manifest, Some(120));
        assert!(text.starts_with("*** SIMULATED: no GPU was measured; do not deploy ***\n"));
        assert!(verdict_markdown(&choice, &manifest).starts_with("> **SIMULATED: no GPU was measured"));
        insta::assert_snapshot!(text);
    }

    #[test]
    fn host_memory_shows_its_pin_and_its_transport() {
        let (choice, manifest) = fixtures::host_memory(fixtures::adopt());
        let text = verdict_text(&choice, &manifest, Some(120));
        assert!(text.starts_with("*** HOST-MEMORY: "));
        insta::assert_snapshot!(text);
    }

    #[test]
    fn unmeasured_points_and_missing_figures_are_dashes() {
        let mut choice = fixtures::undecided();
        let point = &mut choice.points[0];
        point.measured = false;
        point.baseline_us = None;
        point.winner_us = Some(f64::INFINITY);
        point.ratio = None;
        point.effective = None;
        let table = {
            let mut document = Document::default();
            document.table(point_table(&choice.points[..1], "tuned"));
            document.text(None)
        };
        assert!(table.contains("not measured"), "{table}");
        assert!(!table.contains("inf"), "{table}");
    }

    #[test]
    fn trials_are_told_as_far_as_they_go() {
        let mut choice = fixtures::adopt();
        let text = verdict_text(&choice, &fixtures::manifest(), None);
        assert!(text.contains("In a forward pass shaped like the model 9.0 % less time"), "{text}");
        assert!(text.contains("Forward pass: milliseconds per pass"), "{text}");
        choice.trials.clear();
        let text = verdict_text(&choice, &fixtures::manifest(), None);
        assert!(text.contains("UNTRIED"), "{text}");
        assert!(!text.contains("Forward pass:"), "{text}");
    }

    #[test]
    fn what_was_not_tried_is_named_with_its_reason_and_the_way_back() {
        let mut choice = fixtures::keep_default();
        assert!(!verdict_text(&choice, &fixtures::manifest(), None).contains("Not tried"));
        let arm = |number: u32| QuarantinedArm {
            arm: ArmId(number.to_string()),
            name: format!("MIN_NCHANNELS={number}"),
            env: BTreeMap::new(),
            reason: "hung in /srv/results/box: no answer from rank 1 within 60 s".to_owned(),
            since: "2026-11-29T08:00:00Z".to_owned(),
        };
        choice.quarantined = (1..=10).map(arm).collect();
        let text = verdict_text(&choice, &fixtures::manifest(), None);
        for words in [
            "Not tried, since it failed in an earlier run",
            "MIN_NCHANNELS=8: hung in /srv/results/box: no answer from rank 1 within 60 s (2026-11-29T08:00:00Z)",
            "and 2 more, in choice.json",
            "--retry-quarantined",
        ] {
            assert!(text.contains(words), "{words}: {text}");
        }
        assert!(!text.contains("MIN_NCHANNELS=9"), "{text}");
    }

    #[test]
    fn files_are_named_with_their_purpose() {
        insta::assert_snapshot!(files_text(&fixtures::undecided(), "results/2026-11-30-kimi", None), @r"

        Files in results/2026-11-30-kimi
          tuned.env      comments only: there is nothing to set, for docker, systemd and compose
          tuned.sh       comments only: there is nothing to set, for a shell
          choice.json    the verdict with every figure
          report.html    the run as a page with pictures
          summary.csv    every arm at every point
          run.jsonl      every measurement in the order it was made
          manifest.json  what the run was: machine, workload, space, settings
        ");
    }
}
