//! What NCCL would choose, and why, told to a person.

use super::comma_separated::explanation_csv;
use super::document::{Document, Table};
use super::tables::message;
use super::{Format, ReportError, to_json};
use crate::record::{EffectKind, ExplainedGraph, ExplainedLog, ExplainedSize, Explanation};
use crate::units::{format_us, group_thousands};
use crate::wording::plural;

/// The explanation in any format.
pub fn explanation(explanation: &Explanation, format: Format, width: Option<u16>) -> Result<String, ReportError> {
    match format {
        Format::Text => Ok(document(explanation).text(width)),
        Format::Markdown => Ok(document(explanation).markdown()),
        Format::Csv => Ok(explanation_csv(explanation)),
        Format::Json => to_json(explanation),
    }
}

fn document(explanation: &Explanation) -> Document {
    let mut document = Document::default();
    for label in &explanation.labels {
        document.loud(if label == "SIMULATED" {
            "SIMULATED: a machine that is described, or a stand-in; no GPU was asked".to_owned()
        } else {
            label.clone()
        });
    }
    let release = &explanation.nccl;
    let rules =
        if release.rules == release.version { String::new() } else { format!(", by the rules of {}", release.rules) };
    document.heading(format!(
        "What NCCL {}{rules} would choose for {} over {} GPUs",
        release.version, explanation.collective, explanation.ranks
    ));
    document.facts(facts(explanation));
    document.table(choices(explanation));
    document.paragraph(
        "Times are NCCL's own predictions, by which it chooses. They are no measurements: those are made by \
         `nccltune tune`.",
    );
    let problems: Vec<String> = explanation
        .sizes
        .iter()
        .filter_map(|size| Some(format!("{} bytes: {}", group_thousands(size.bytes), size.problem.as_ref()?)))
        .collect();
    if !problems.is_empty() {
        document.heading("No choice");
        document.list(problems);
    }
    let why: Vec<String> = explanation.findings.iter().chain(&explanation.notes).cloned().collect();
    if !why.is_empty() {
        document.heading("What to know of this machine");
        document.list(why);
    }
    if !explanation.variables.is_empty() {
        variables(explanation, &mut document);
    }
    if let Some(log) = &explanation.log {
        logged(explanation, log, &mut document);
    }
    document
}

fn graph(graph: &ExplainedGraph) -> String {
    let found = format!("{} x {} GB/s over {}", graph.channels, graph.channel_gb_per_s, graph.path);
    if graph.fallback { format!("{found} (nothing fitted)") } else { found }
}

fn facts(explanation: &Explanation) -> Vec<(String, String)> {
    let mut facts = vec![("machine".to_owned(), explanation.machine.clone())];
    let mut tell = |name: &str, value: String| facts.push((name.to_owned(), value));
    tell("sizes", explanation.sizes_origin.clone());
    for found in &explanation.graphs {
        tell(&found.pattern, graph(found));
    }
    if let Some(channels) = explanation.communicator_channels {
        let over = explanation.transports.join(" and ");
        tell("communicator", format!("{channels} {}, data over {over}", plural(channels, "channel", "channels")));
    }
    facts
}

/// What is not known is a dash.
fn or_dash<T: ToString>(value: Option<T>) -> String {
    value.map_or_else(|| "-".to_owned(), |value| value.to_string())
}

fn us(value: Option<f64>) -> String {
    value.map_or_else(|| "-".to_owned(), format_us)
}

/// "ring/ll"; a dash where nothing is known.
fn pair(algo: Option<&str>, proto: Option<&str>) -> String {
    match (algo, proto) {
        (Some(algo), Some(proto)) => format!("{algo}/{proto}"),
        (Some(algo), None) => algo.to_owned(),
        _ => "-".to_owned(),
    }
}

fn choice(size: &ExplainedSize) -> String {
    pair(size.algo.as_deref(), size.proto.as_deref())
}

/// "2 x 288": channels and the threads of each.
fn blocks(channels: Option<u32>, threads: Option<u32>) -> String {
    match (channels, threads) {
        (Some(channels), Some(threads)) => format!("{channels} x {threads}"),
        _ => "-".to_owned(),
    }
}

fn choices(explanation: &Explanation) -> Table {
    let mut table = Table::new(&[">bytes", ">size", "choice", ">ch x threads", ">us", "runner-up", ">its us"]);
    for size in &explanation.sizes {
        let [bytes, name] = message(size.bytes);
        let second = size.runner_up.as_ref();
        table.row(vec![
            bytes,
            name,
            choice(size),
            blocks(size.channels, size.threads),
            us(size.predicted_us),
            pair(second.map(|second| second.algo.as_str()), second.map(|second| second.proto.as_str())),
            us(second.map(|second| second.predicted_us)),
        ]);
    }
    table
}

fn variables(explanation: &Explanation, document: &mut Document) {
    document.heading("What each variable does: with all of them, and with all but this one");
    let summaries = explanation.variables.iter().map(|variable| {
        format!("{}={} ({}): {}", variable.variable, variable.value, variable.origin.words(), variable.summary)
    });
    document.list(summaries.collect());
    for variable in &explanation.variables {
        let mut table =
            Table::new(&[">bytes", "without it", ">ch x threads", ">us", "with it", ">ch x threads", ">us"]);
        for size in &explanation.sizes {
            let effect = size.effects.iter().find(|effect| effect.variable == variable.variable);
            let before = effect.filter(|effect| effect.effect == EffectKind::Changes);
            let Some(before) = before.and_then(|effect| effect.without.as_ref()) else { continue };
            table.row(vec![
                group_thousands(size.bytes),
                pair(Some(&before.algo), Some(&before.proto)),
                blocks(Some(before.channels), Some(before.threads)),
                format_us(before.predicted_us),
                choice(size),
                blocks(size.channels, size.threads),
                us(size.predicted_us),
            ]);
        }
        if !table.is_empty() {
            document.heading(format!("{}={}", variable.variable, variable.value));
            document.table(table);
        }
    }
}

fn logged(explanation: &Explanation, log: &ExplainedLog, document: &mut Document) {
    document.heading(match (log.compared_sizes, log.agreeing_sizes) {
        (0, _) => format!("What NCCL {} logged", log.version),
        (compared, agreeing) => format!(
            "What NCCL {} logged: model and log agree at {agreeing} of {compared} {}",
            log.version,
            plural(compared, "size", "sizes")
        ),
    });
    let mut facts: Vec<(String, String)> =
        log.graphs.iter().map(|found| (found.pattern.clone(), graph(found))).collect();
    if let Some(channels) = log.communicator_channels {
        facts.push(("communicator".to_owned(), format!("{channels} {}", plural(channels, "channel", "channels"))));
    }
    facts.extend(log.transport.as_ref().map(|transport| ("data over".to_owned(), transport.clone())));
    if !facts.is_empty() {
        document.facts(facts);
    }
    let mut table = Table::new(&[">bytes", "model", ">channels", "log", ">channels", "agree"]);
    for size in &explanation.sizes {
        let Some(logged) = &size.logged else { continue };
        table.row(vec![
            group_thousands(size.bytes),
            choice(size),
            or_dash(size.channels),
            pair(logged.algo.as_deref(), logged.proto.as_deref()),
            or_dash(logged.channels),
            match logged.agrees {
                Some(true) => "yes",
                Some(false) => "NO",
                None => "-",
            }
            .to_owned(),
        ]);
    }
    if !table.is_empty() {
        document.table(table);
    }
    let mut told = Vec::new();
    if log.fell_back_to_simple_order {
        told.push("NCCL's search found no way for some pattern: \"falling back to simple order\".".to_owned());
    }
    told.extend(log.differences.iter().cloned());
    if !log.unread.is_empty() {
        told.push(format!("no line shows that NCCL read {}", crate::wording::enumerated(&log.unread)));
    }
    told.extend(log.failure.as_ref().map(|failure| format!("the launch did not come to its end: {failure}")));
    if !told.is_empty() {
        document.list(told);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::collective::Collective;
    use crate::record::{
        ExplainedChoice, ExplainedEffect, ExplainedRelease, ExplainedRunnerUp, ExplainedVariable, FORMAT, LoggedSize,
        VariableOrigin,
    };

    fn size(bytes: u64, proto: &str, predicted_us: f64) -> ExplainedSize {
        ExplainedSize {
            bytes,
            algo: Some("ring".to_owned()),
            proto: Some(proto.to_owned()),
            channels: Some(1),
            threads: Some(512),
            predicted_us: Some(predicted_us),
            runner_up: Some(ExplainedRunnerUp { algo: "tree".to_owned(), proto: "ll".to_owned(), predicted_us: 21.9 }),
            problem: None,
            effects: Vec::new(),
            logged: None,
        }
    }

    fn graph(pattern: &str) -> ExplainedGraph {
        ExplainedGraph {
            pattern: pattern.to_owned(),
            channels: 1,
            channel_gb_per_s: 0.1,
            path: "SYS".to_owned(),
            fallback: true,
        }
    }

    fn everything() -> Explanation {
        let mut sizes = vec![size(14_336, "ll", 21.2), size(65_536, "ll", 25.4), size(16 << 20, "simple", 1400.0)];
        let without = ExplainedChoice {
            algo: "ring".to_owned(),
            proto: "simple".to_owned(),
            channels: 2,
            threads: 288,
            predicted_us: 231.0,
        };
        sizes[0].effects.push(ExplainedEffect {
            variable: "NCCL_PROTO".to_owned(),
            effect: EffectKind::Changes,
            reason: "without it ring/simple".to_owned(),
            without: Some(without),
        });
        for size in &mut sizes {
            size.effects.push(ExplainedEffect {
                variable: "NCCL_BUFSIZE".to_owned(),
                effect: EffectKind::None,
                reason: "NCCL does not read a variable named \"NCCL_BUFSIZE\"".to_owned(),
                without: None,
            });
        }
        let logged = |proto: &str, agrees| {
            let (algo, proto) = (Some("ring".to_owned()), Some(proto.to_owned()));
            Some(LoggedSize { algo, proto, channels: Some(1), agrees: Some(agrees) })
        };
        (sizes[0].logged, sizes[1].logged) = (logged("ll", true), logged("ll128", false));
        let variable = |name: &str, origin, changed_sizes, summary: &str| ExplainedVariable {
            variable: name.to_owned(),
            value: "LL".to_owned(),
            origin,
            changed_sizes,
            summary: summary.to_owned(),
        };
        Explanation {
            format: FORMAT,
            labels: vec!["SIMULATED".to_owned()],
            machine: "8x Test".to_owned(),
            ranks: 8,
            nccl: ExplainedRelease { version: "2.31.0".to_owned(), rules: "2.30.7".to_owned() },
            collective: Collective::AllReduce,
            sizes_origin: "named by the user".to_owned(),
            graphs: vec![graph("ring"), graph("balanced tree")],
            communicator_channels: Some(2),
            transports: vec!["P2P".to_owned()],
            findings: vec!["No ring fits.".to_owned()],
            notes: vec!["A test.".to_owned()],
            sizes,
            variables: vec![
                variable("NCCL_PROTO", VariableOrigin::Named, 1, "changes 1 of 3 sizes"),
                variable("NCCL_BUFSIZE", VariableOrigin::EnvFile, 0, "changes nothing: NCCL does not read it"),
            ],
            log: Some(ExplainedLog {
                version: "2.31.0".to_owned(),
                agreeing_sizes: 1,
                compared_sizes: 2,
                communicator_channels: Some(4),
                transport: Some("SHM/direct/direct".to_owned()),
                graphs: vec![graph("ring")],
                fell_back_to_simple_order: true,
                differences: vec!["the communicator has 4 channels, not 2".to_owned()],
                set_by_environment: Vec::new(),
                unread: vec!["NCCL_PROTO".to_owned()],
                failure: None,
            }),
        }
    }

    #[test]
    fn explanations_in_every_format() {
        let told = everything();
        for format in [Format::Text, Format::Markdown, Format::Csv] {
            let text = explanation(&told, format, Some(80)).unwrap();
            assert!(text.contains("SIMULATED"), "{text}");
            if format == Format::Text {
                assert!(text.lines().all(|line| line.chars().count() <= 80), "{text}");
            }
            insta::assert_snapshot!(format!("explanation-{format}"), text);
        }
        let json = explanation(&told, Format::Json, None).unwrap();
        assert_eq!(serde_json::from_str::<Explanation>(&json).unwrap(), told);
    }

    #[test]
    fn an_explanation_without_an_answer_says_so() {
        let mut told = everything();
        told.sizes.truncate(1);
        (told.log, told.graphs, told.communicator_channels) = (None, Vec::new(), None);
        let size = &mut told.sizes[0];
        (size.algo, size.proto, size.channels, size.threads) = (None, None, None, None);
        (size.predicted_us, size.runner_up) = (None, None);
        size.problem = Some("NCCL fails at the first all-reduce".to_owned());
        let text = explanation(&told, Format::Text, Some(80)).unwrap();
        assert!(text.contains("14,336 bytes: NCCL fails at the first all-reduce"), "{text}");
        assert!(!text.contains("logged"), "{text}");
    }
}
