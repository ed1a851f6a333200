//! Sentences that more than one output must say alike: what a label means, what was gained, what the
//! answer holds under. An env file, a table on a terminal and a report may never disagree on them.

use crate::collective::{Collective, DataType, Form, Issue};
use crate::machine::{Machine, NcclLibrary, NcclVersion};
use crate::record::{
    ChannelSearch, Choice, ColdAndWarm, Labels, Manifest, Origin, PeerOutcome, PeerReport, PointPhase, QuarantinedArm,
    VerdictKind, Workload,
};
use crate::units;

#[cfg(test)]
pub(crate) mod fixtures;

/// How the origin of a point begins that came with an output of nccl-tests.
pub const IMPORTED_ORIGIN: &str = "nccl-tests";

/// A label and what it means for the reader.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Label {
    /// The loud word ("SIMULATED").
    pub word: String,
    /// What it means, without a full stop.
    pub meaning: String,
}

impl std::fmt::Display for Label {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        if self.meaning.is_empty() {
            formatter.write_str(&self.word)
        } else {
            write!(formatter, "{}: {}", self.word, self.meaning)
        }
    }
}

/// The labels of a run with their meanings. A label that either record carries counts: saying too
/// much is a nuisance, passing off a simulation as a measurement is not forgivable.
pub fn labels(choice: &Choice, manifest: &Manifest) -> Vec<Label> {
    let said = Labels { simulated: choice.simulated, replayed: choice.replayed, ..Labels::default() };
    labels_of(manifest, said, &choice.labels)
}

/// The labels of a manifest, of what else was said, and of words.
pub fn labels_of(manifest: &Manifest, said: Labels, others: &[String]) -> Vec<Label> {
    let mut merged = manifest.labels;
    merged.simulated |= said.simulated;
    merged.replayed |= said.replayed;
    let mut words: Vec<String> = merged.words().into_iter().map(str::to_owned).collect();
    for word in others {
        let word = word.to_uppercase();
        if !words.contains(&word) {
            words.push(word);
        }
    }
    words.into_iter().map(|word| Label { meaning: label_meaning(&word, manifest), word }).collect()
}

fn label_meaning(word: &str, manifest: &Manifest) -> String {
    match word {
        "SIMULATED" => "no GPU was measured; do not deploy".to_owned(),
        "REPLAYED" => match &manifest.recorded {
            Some(recorded) => format!("the numbers come from the recorded run {recorded}, nothing was measured now"),
            None => "the numbers come from a recorded run, nothing was measured now".to_owned(),
        },
        "REDRAWN" => {
            "launches were drawn around the recorded ones with an assumed noise: it shows what so many launches \
             would decide, and answers nothing; do not deploy"
                .to_owned()
        }
        "IMPORTED" => {
            "measured by nccl-tests; what ran, on which machine and with which variables was not checked".to_owned()
        }
        "HOST-MEMORY" => "measured with GPU peer access switched off, so every message went through host memory; \
             it says nothing about a server that uses peer access"
            .to_owned(),
        _ => String::new(),
    }
}

/// A share as a percentage: 0.142 is "14.2 %".
pub fn percent(share: f64) -> String {
    format!("{:.1} %", share * 100.0)
}

/// What the objective says of the winner or, without one, of the best finalist: "14.2 % less time in
/// collectives per pass (95 % interval 13.1 % to 15.2 %), 12 paired launches against the default".
/// None where no finalist was judged.
pub fn gain(choice: &Choice) -> Option<String> {
    let ratio = choice.objective.ratio.filter(|ratio| ratio.is_finite())?;
    let less = ratio <= 1.0;
    let direction = if less { "less" } else { "more" };
    let what = if choice.unmeasured.is_empty() { "collectives" } else { "the measured collectives" };
    let interval = choice.objective.ratio_ci95.filter(|ends| ends.iter().all(|end| end.is_finite()));
    let interval = interval.map_or_else(String::new, |[low, high]| {
        let [from, to] = if less { [high, low] } else { [low, high] };
        // Where an end lies on the other side of "no change", both ends say their side.
        let straddles = (low < 1.0) != (high <= 1.0);
        let end = |bound: f64| match (straddles, bound <= 1.0) {
            (false, _) => percent((1.0 - bound).abs()),
            (true, true) => format!("{} less", percent(1.0 - bound)),
            (true, false) => format!("{} more", percent(bound - 1.0)),
        };
        format!(" (95 % interval {} to {})", end(from), end(to))
    });
    let launches = choice.statistics.launches;
    Some(format!(
        "{} {direction} time in {what} per pass{interval}, {launches} paired {} against the default",
        percent((1.0 - ratio).abs()),
        plural(launches, "launch", "launches")
    ))
}

/// What the forward pass said of the adopted arm; or that it was not tried.
pub fn forward_pass(choice: &Choice) -> Option<String> {
    let winner = choice.winner.as_deref()?;
    let mix = choice.trials.iter().find(|trial| trial.arm == winner && trial.tokens.is_none());
    let Some((ratio, [low, high])) = mix.and_then(|mix| mix.ratio.zip(mix.ratio_ci95)) else {
        return Some("UNTRIED: no forward pass was timed, the gain is that of the collectives alone".to_owned());
    };
    let launches = mix.map_or(0, |mix| mix.launches);
    Some(format!(
        "in a forward pass shaped like the model {} less time (95 % interval {} to {}), {launches} paired {}",
        percent(1.0 - ratio),
        percent(1.0 - high),
        percent(1.0 - low),
        plural(launches, "launch", "launches")
    ))
}

/// The verdict as a reader is told it: name, then what it means or why.
pub fn verdict(choice: &Choice) -> String {
    let kind = choice.verdict.name();
    match (choice.verdict, gain(choice)) {
        (VerdictKind::Adopt, Some(gain)) => format!("{kind}: {gain}"),
        _ => format!("{kind}: {}", choice.reason.trim_end_matches('.')),
    }
}

/// An arm that was left out for an earlier failure: what happened to it, and when.
pub fn quarantined(arm: &QuarantinedArm) -> String {
    format!("{}: {} ({})", arm.name, arm.reason, arm.since)
}

/// What the best finalist reached where none was adopted.
pub fn best_finalist(choice: &Choice) -> Option<String> {
    if choice.verdict == VerdictKind::Adopt {
        return None;
    }
    let gain = gain(choice)?;
    let name = choice.best_finalist.as_deref().map(|name| format!(", {}", printable(name, 200))).unwrap_or_default();
    let veto = choice.vetoed.iter().find(|veto| choice.best_finalist.as_deref() == Some(veto.name.as_str()));
    let needed = percent(choice.thresholds.min_gain);
    Some(match veto {
        Some(veto) => format!("best finalist{name}: {gain}; it may not ship: {}", printable(&veto.reason, 400)),
        None => format!(
            "best finalist{name}: {gain}; to be adopted, its whole interval has to lie beyond a gain of {needed} \
             wherever it was tried"
        ),
    })
}

/// What the answer costs in memory, where that is known.
pub fn memory(choice: &Choice) -> Option<String> {
    let memory = &choice.memory;
    let amount = |mib: f64, what: &str, measured: bool| {
        let (much, which) = (mib.abs(), if mib < -0.5 { "less" } else { "more" });
        let how = if measured { "measured" } else { "estimated" };
        format!("{much:.0} MiB {which} {what} ({how})")
    };
    let mut parts: Vec<String> = [
        memory.device_mib_per_rank.map(|mib| amount(mib, "device memory per rank", memory.device_measured)),
        memory.host_mib.map(|mib| amount(mib, "host memory", memory.host_measured)),
    ]
    .into_iter()
    .flatten()
    .collect();
    if parts.is_empty() {
        return None;
    }
    if let Some(communicators) = memory.communicators.filter(|communicators| *communicators > 1) {
        parts.push(format!("for the {communicators} communicators of the engine"));
    }
    if let Some(tokens) = memory.cache_tokens_lost.filter(|tokens| *tokens > 0) {
        parts.push(format!("{} tokens of key-value cache less", units::group_thousands(tokens)));
    }
    Some(parts.join(", "))
}

/// An operation as tables name it; that it is issued call by call is said, everything else is usual.
pub fn operation(collective: Collective, dtype: DataType, form: Form) -> String {
    let eager = if form.issue == Issue::Eager { " eager" } else { "" };
    format!("{collective} {dtype}{eager}")
}

/// What was run beside the points, and found right, before the arm could win: lines for a file's header.
pub fn gate(choice: &Choice) -> Vec<String> {
    let Some(gate) = &choice.gate else { return Vec::new() };
    if gate.simulated {
        return vec!["smoke gate: passed in simulation only; nothing was checked".to_owned()];
    }
    if gate.checks == 0 {
        return vec!["smoke gate: not recorded for this arm".to_owned()];
    }
    let runs = |count: u32| format!("{} {}", units::group_thousands(u64::from(count)), plural(count, "run", "runs"));
    let mut lines = vec![format!(
        "smoke gate: {} of the collectives a server issues, every element right on every rank",
        runs(gate.checks.saturating_sub(gate.ll128_checks))
    )];
    if gate.ll128_checks > 0 {
        lines.push(format!(
            "LL128 check: {} of many sizes, in place and out of place, every element right on every rank; no failure \
             seen is no proof: NCCL itself does not choose LL128 on every link",
            runs(gate.ll128_checks)
        ));
    }
    lines
}

/// Points and guard points where a regression beyond the threshold is not ruled out.
pub fn not_shown_safe(choice: &Choice) -> Vec<String> {
    choice
        .points
        .iter()
        .chain(&choice.guard)
        .filter(|point| point.measured && point.safe == Some(false))
        .map(|point| {
            let size = units::format_size(point.bytes);
            format!("{} {} {size} ({}, batch {})", point.collective, point.dtype, point.phase.name(), point.batch)
        })
        .collect()
}

/// What a test of peer access came to, where there was one or something spoke against it.
pub fn peer_access(report: &PeerReport) -> Option<String> {
    let is_told = report.outcome != PeerOutcome::Skipped || !report.suspicions.is_empty();
    is_told.then(|| format!("{}: {}", report.outcome.name(), printable(&report.reason, 600)))
}

/// Differences of bandwidth below this share are rounding.
const SAME_BANDWIDTH: f64 = 0.01;

/// What the links of idle GPUs cost NCCL's search for channels, in words; none where it found the same.
pub fn colder(found: &ColdAndWarm) -> Option<String> {
    let total = |all: &[ChannelSearch], pattern: &str| -> Option<f64> {
        let search = all.iter().find(|search| search.pattern == pattern)?;
        Some(f64::from(search.channels) * search.bandwidth_gb_per_s)
    };
    let differing = found.warm.iter().find_map(|warm| {
        let (cold_gb, warm_gb) = (total(&found.cold, &warm.pattern)?, total(&found.warm, &warm.pattern)?);
        ((cold_gb - warm_gb).abs() > warm_gb.abs() * SAME_BANDWIDTH).then(|| (warm.pattern.clone(), cold_gb, warm_gb))
    });
    differing.map(|(pattern, cold_gb, warm_gb)| {
        format!(
            "NCCL takes the speed of idle links for their own: its {pattern} has {cold_gb:.1} GB/s on idle GPUs and \
             {warm_gb:.1} GB/s on busy ones, so a server that starts on idle GPUs gets other settings than one that \
             does not; a repaired topology file (NCCL_TOPO_FILE) makes both alike"
        )
    })
}

/// The workload in one line: "Kimi-K2.5, TP 8, batches 1 and 8, 4 verify tokens, engine sglang".
pub fn workload(workload: &Workload) -> String {
    let mut parts = vec![workload.model.clone(), format!("TP {}", workload.tensor_parallel)];
    if workload.points.iter().all(|point| point.phase == PointPhase::Size) {
        let count = workload.points.len() as u32;
        let imported = workload.points.iter().any(|point| point.origin.starts_with(IMPORTED_ORIGIN));
        let whose = if imported { "of the imported files" } else { "named by the user" };
        parts.push(format!("{count} {} {whose}", plural(count, "size", "sizes")));
    } else if workload.points.iter().any(|point| point.phase == PointPhase::Step) {
        parts.push("one step of a server's log".to_owned());
    } else {
        parts.push(batches(workload));
        parts.push(match workload.verify_tokens {
            0 | 1 => "no speculation".to_owned(),
            tokens => format!("{tokens} verify tokens per sequence"),
        });
    }
    parts.extend(workload.draft.iter().map(|draft| format!("draft {draft}")));
    parts.extend(workload.layout.iter().cloned());
    parts.push(match workload.engine.as_str() {
        "" | "none" => "no engine".to_owned(),
        _ => format!("engine {}", engine(workload)),
    });
    parts.join(", ")
}

/// The engine with its release, where that was named: "vllm 0.10.1".
pub fn engine(workload: &Workload) -> String {
    let version = workload.engine_version.as_ref().map(|version| format!(" {version}")).unwrap_or_default();
    format!("{}{version}", workload.engine)
}

fn batches(workload: &Workload) -> String {
    let mut batches: Vec<(u32, f64)> = workload.points.iter().map(|point| (point.batch, point.weight)).collect();
    batches.sort_by(|left, right| left.0.cmp(&right.0).then(left.1.total_cmp(&right.1)));
    batches.dedup_by_key(|(batch, _)| *batch);
    let equal = batches.windows(2).all(|pair| (pair[0].1 - pair[1].1).abs() < 1e-9);
    let words: Vec<String> = batches
        .iter()
        .map(|(batch, weight)| if equal { batch.to_string() } else { format!("{batch} (weight {weight})") })
        .collect();
    format!("{} {}", plural(words.len() as u32, "batch", "batches"), enumerated(&words))
}

/// The machine in one line, as far as it is known.
pub fn machine(machine: &Machine, devices: &[u32]) -> String {
    let mut parts = vec![machine.name.clone()];
    if !devices.is_empty() && devices.len() < machine.gpus.len() {
        let used: Vec<String> = devices.iter().map(u32::to_string).collect();
        parts.push(format!("GPU {} of {}", enumerated(&used), machine.gpus.len()));
    }
    parts.extend(machine.driver.as_ref().map(|driver| format!("driver {driver}")));
    parts.extend(machine.cpu.clone());
    parts.join(", ")
}

/// The NCCL library in one line: "2.28.9 (SHA-256 9c1d5e3f7a20...) at /path/libnccl.so.2".
pub fn nccl(library: Option<&NcclLibrary>) -> String {
    library.map_or_else(
        || "no library was loaded".to_owned(),
        |library| {
            let version = NcclVersion::from_code(library.version);
            let short = library.sha256.get(..12).unwrap_or(&library.sha256);
            format!("{version} (SHA-256 {short}...) at {}", library.path)
        },
    )
}

/// A variable that held in every measurement, default included.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Condition {
    /// The variable.
    pub variable: String,
    /// Its value.
    pub value: String,
    /// Who set it, where that is on record.
    pub origin: Option<Origin>,
}

impl Condition {
    /// Who set the variable, in words.
    pub fn origin_words(&self, engine: &str) -> String {
        match self.origin {
            Some(Origin::Pin) => "pinned by the user".to_owned(),
            Some(Origin::Inherited) => "was set where nccltune was started".to_owned(),
            Some(Origin::Engine) => format!("{engine} sets it itself"),
            Some(Origin::UserConf) => "from the user's NCCL configuration file".to_owned(),
            Some(Origin::SystemConf) => "from /etc/nccl.conf".to_owned(),
            None => "held while measuring".to_owned(),
        }
    }
}

/// Everything the verdict holds under: pins of every origin, and what the choice requires.
pub fn conditions(choice: &Choice, manifest: &Manifest) -> Vec<Condition> {
    let mut conditions: Vec<Condition> = manifest
        .pins
        .iter()
        .map(|pin| Condition { variable: pin.variable.clone(), value: pin.value.clone(), origin: Some(pin.origin) })
        .collect();
    for (variable, value) in &choice.required_environment {
        if !conditions.iter().any(|condition| condition.variable == *variable) {
            conditions.push(Condition { variable: variable.clone(), value: value.clone(), origin: None });
        }
    }
    conditions
}

/// "1, 8 and 32".
pub fn enumerated(words: &[String]) -> String {
    match words {
        [] => String::new(),
        [only] => only.clone(),
        [first @ .., last] => format!("{} and {last}", first.join(", ")),
    }
}

/// The word that fits the count.
pub const fn plural<'a>(count: u32, one: &'a str, many: &'a str) -> &'a str {
    if count == 1 { one } else { many }
}

/// Text from outside made fit for a line of a file or a terminal: no line breaks, no escape
/// sequences, no reversal of direction, and at most `limit` characters.
pub fn printable(text: &str, limit: usize) -> String {
    let harmless = |character: char| {
        let steering = matches!(character, '\u{200e}' | '\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2066}'..='\u{2069}');
        match character {
            '\n' | '\r' | '\t' => ' ',
            _ if steering || character.is_control() => '?',
            _ => character,
        }
    };
    let mut clean: String = text.chars().take(limit).map(harmless).collect();
    if text.chars().nth(limit).is_some() {
        clean.push_str("...");
    }
    clean
}

#[cfg(test)]
mod tests {
    use super::*;

    fn gain_of(ratio: f64, bounds: [f64; 2]) -> String {
        let mut choice = fixtures::adopt();
        choice.objective.ratio = Some(ratio);
        choice.objective.ratio_ci95 = Some(bounds);
        gain(&choice).unwrap().split(", ").next().unwrap().replace(" time in collectives per pass", "")
    }

    #[test]
    fn the_gain_reads_from_small_to_large_whatever_its_sign() {
        assert_eq!(gain_of(0.858, [0.848, 0.869]), "14.2 % less (95 % interval 13.1 % to 15.2 %)");
        assert_eq!(gain_of(1.05, [1.03, 1.07]), "5.0 % more (95 % interval 3.0 % to 7.0 %)");
        assert_eq!(gain_of(0.99, [0.97, 1.01]), "1.0 % less (95 % interval 1.0 % more to 3.0 % less)");
        assert_eq!(gain_of(1.01, [0.99, 1.03]), "1.0 % more (95 % interval 1.0 % less to 3.0 % more)");
    }

    #[test]
    fn without_a_judged_finalist_there_is_no_gain() {
        let mut choice = fixtures::adopt();
        choice.objective.ratio = None;
        assert_eq!(gain(&choice), None);
        choice.objective.ratio = Some(f64::NAN);
        assert_eq!(gain(&choice), None);
    }

    #[test]
    fn a_label_of_either_record_counts_once() {
        let mut choice = fixtures::adopt();
        let mut manifest = fixtures::manifest();
        assert_eq!(labels(&choice, &manifest), []);
        choice.simulated = true;
        choice.labels = vec!["SIMULATED".to_owned(), "redrawn".to_owned()];
        manifest.labels.host_memory = true;
        let words: Vec<String> = labels(&choice, &manifest).into_iter().map(|label| label.word).collect();
        assert_eq!(words, ["SIMULATED", "HOST-MEMORY", "REDRAWN"]);
    }

    #[test]
    fn workloads_read_as_a_person_would_say_them() {
        let mut manifest = fixtures::manifest();
        assert_eq!(
            workload(&manifest.workload),
            "Kimi-K2.5, TP 8, batches 1, 8 and 32, 4 verify tokens per sequence, engine sglang"
        );
        for point in &mut manifest.workload.points {
            point.phase = PointPhase::Size;
        }
        manifest.workload.engine = "none".to_owned();
        assert_eq!(workload(&manifest.workload), "Kimi-K2.5, TP 8, 4 sizes named by the user, no engine");
    }

    #[test]
    fn unequal_weights_are_said() {
        let mut manifest = fixtures::manifest();
        manifest.workload.points.truncate(2);
        manifest.workload.points[0].weight = 0.7;
        manifest.workload.points[1].weight = 0.3;
        assert!(workload(&manifest.workload).contains("batches 1 (weight 0.7) and 8 (weight 0.3)"));
    }

    #[test]
    fn nothing_from_outside_breaks_a_line_or_steers_a_terminal() {
        assert_eq!(printable("a\nb\u{1b}[31mc\u{202e}d", 100), "a b?[31mc?d");
        assert_eq!(printable("abcdef", 3), "abc...");
        assert_eq!(printable("abc", 3), "abc");
    }

    #[test]
    fn links_that_were_asleep_are_told() {
        let ring = |bandwidth_gb_per_s| {
            vec![ChannelSearch { pattern: "ring".to_owned(), channels: 2, bandwidth_gb_per_s, path: "PHB".to_owned() }]
        };
        let found = |cold, warm| colder(&ColdAndWarm { cold: ring(cold), warm: ring(warm) });
        assert!(found(3.0, 24.0).unwrap().contains("ring has 6.0 GB/s on idle GPUs and 48.0 GB/s on busy ones"));
        assert_eq!(found(24.0, 24.1), None);
        assert_eq!(colder(&ColdAndWarm { cold: Vec::new(), warm: ring(24.0) }), None, "nothing to compare with");
    }
}
