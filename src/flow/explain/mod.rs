//! `nccltune explain`: what NCCL would choose for a message on a machine, and why.
//!
//! Everything is told by the model of NCCL; where GPUs are there, NCCL is also started once, and its log
//! shows whether the model has it right.

mod effects;
mod launch;
mod machine;
mod variables;

pub(super) use effects::{moved, outside, same};

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::rc::Rc;

use effects::{Effects, Model, summary};
use launch::Launched;
use machine::{ExplainedMachine, find_machine};
use variables::{Variable, VariableWish, variables_in_force};

use super::workload::{DEFAULT_BATCHES, DEFAULT_MODEL, WorkloadWish, read_bounded, workload};
use crate::collective::Collective;
use crate::error_kind::{ErrorKind, Failure};
use crate::knob::ReadValue;
use crate::machine::{NcclVersion, PathKind};
use crate::nccl_model::{
    Choice, Communicator, Finding, Graph, GraphFile, MAX_BYTES, Pattern, Protocol, Release, graph_file,
};
use crate::process::Supervisor;
use crate::record::{
    EffectKind, ExplainedChoice, ExplainedGraph, ExplainedRelease, ExplainedRunnerUp, ExplainedSize, ExplainedVariable,
    Explanation, FORMAT,
};
use crate::units::{format_size, nearest_name};
use crate::wording::plural;

/// Sizes where neither the user nor a model names any: powers of two over the range that decides a
/// forward pass.
const PLAIN_SIZES: std::ops::RangeInclusive<u32> = 10..=24;
/// Most sizes that are told at once.
pub const MOST_SIZES: usize = 128;

/// What is asked.
#[derive(Debug, Clone, Default)]
pub struct ExplainRequest {
    /// A simulated machine by name or file, "auto" for this one, or nothing for whichever there is.
    pub machine: Option<String>,
    /// NAME=VALUE, as typed.
    pub variables: Vec<String>,
    /// A file with more of them.
    pub env_file: Option<PathBuf>,
    /// Message sizes in bytes; a model's without.
    pub sizes: Vec<u64>,
    /// All-reduce without.
    pub collective: Option<Collective>,
    /// Whose choices are predicted; without, the library's that is here, or the machine's own.
    pub nccl: Option<NcclVersion>,
    /// The library a server would load.
    pub nccl_lib: Option<PathBuf>,
    /// GPUs, by position or identity; all without.
    pub devices: Vec<String>,
    /// Where /sys and /proc are read.
    pub root: Option<PathBuf>,
    /// Start nothing on the GPUs.
    pub no_launch: bool,
    /// The environment the tool was started in.
    pub environment: BTreeMap<String, String>,
}

/// Explains.
pub fn explain(request: &ExplainRequest) -> Result<Explanation, Failure> {
    let supervisor = Rc::new(Supervisor::start()?);
    let machine = find_machine(request, &supervisor)?;
    let collective = request.collective.unwrap_or(Collective::AllReduce);
    let release = Release::of(machine.version)?;
    let wish = VariableWish {
        named: &request.variables,
        file: request.env_file.as_deref(),
        environment: &request.environment,
        real: machine.real.as_ref(),
    };
    let (variables, mut notes) = variables_in_force(&wish)?;
    notes.splice(0..0, machine.notes.iter().cloned());
    let (sizes, sizes_origin) = sizes(request, collective, machine.ranks)?;
    let graph_file = graph_file_of(&variables, machine.version)?;

    let mut explanation = Explanation {
        format: FORMAT,
        labels: machine.labels.clone(),
        machine: machine.name.clone(),
        ranks: machine.ranks,
        nccl: ExplainedRelease { version: release.version().to_string(), rules: release.rules().to_string() },
        collective,
        sizes_origin,
        graphs: Vec::new(),
        communicator_channels: None,
        transports: Vec::new(),
        findings: Vec::new(),
        notes,
        sizes: sizes.iter().map(|bytes| unanswered(*bytes)).collect(),
        variables: Vec::new(),
        log: None,
    };
    match &machine.topology {
        Ok(topology) => {
            let model = Model { topology, release, graph_file: graph_file.as_ref(), collective };
            predict(&model, &variables, &mut explanation)?;
        }
        Err(unknown) => {
            explanation.findings.push(format!("no prediction: {}", unknown.join("; ")));
            explanation.variables = variables.iter().map(untold).collect();
        }
    }
    compare_with_log(request, &supervisor, &machine, &variables, &mut explanation)?;
    Ok(explanation)
}

/// Message sizes, and where they come from in words.
fn sizes(request: &ExplainRequest, collective: Collective, ranks: u32) -> Result<(Vec<u64>, String), Failure> {
    if !request.sizes.is_empty() {
        let mut sizes = request.sizes.clone();
        sizes.sort_unstable();
        sizes.dedup();
        if sizes.len() > MOST_SIZES {
            let told = format!("{} sizes: at most {MOST_SIZES} are explained at once", sizes.len());
            return Err(Failure::new(ErrorKind::Usage, told));
        }
        if let Some(bytes) = sizes.iter().find(|bytes| !(1..=MAX_BYTES).contains(*bytes)) {
            return Err(crate::nccl_model::ModelError::Size { bytes: *bytes }.into());
        }
        return Ok((sizes, "named by the user".to_owned()));
    }
    if let Ok(workload) = workload(&WorkloadWish::default(), ranks, None) {
        let points = workload.points.iter().chain(&workload.guard);
        let mut sizes: Vec<u64> =
            points.filter(|point| point.collective == collective).map(|point| point.bytes).collect();
        sizes.sort_unstable();
        sizes.dedup();
        if !sizes.is_empty() {
            let told = format!(
                "those of {DEFAULT_MODEL} at TP {ranks}, batches {DEFAULT_BATCHES}, and of its prefill; others with --size"
            );
            return Ok((sizes, told));
        }
    }
    let sizes = PLAIN_SIZES.map(|shift| 1 << shift).collect();
    Ok((sizes, "powers of two from 1 KiB to 16 MiB; others with --size".to_owned()))
}

/// The file that NCCL_GRAPH_FILE names, where NCCL would read one.
fn graph_file_of(variables: &[Variable], version: NcclVersion) -> Result<Option<GraphFile>, Failure> {
    let Some(variable) = variables.iter().find(|variable| variable.name == "NCCL_GRAPH_FILE") else { return Ok(None) };
    let reading = crate::knob::read_as_nccl(&variable.name, &variable.value, version);
    let ReadValue::Text(path) = reading.value else { return Ok(None) };
    let unusable = |error: &dyn std::fmt::Display| {
        Failure::new(ErrorKind::Usage, format!("NCCL_GRAPH_FILE={}: {error}", variable.value))
            .with_hint("NCCL fails at the start of a communicator if it cannot use the file")
    };
    let text =
        read_bounded(PathBuf::from(path).as_path(), graph_file::MAX_BYTES as u64).map_err(|error| unusable(&error))?;
    GraphFile::read(&text).map(Some).map_err(|error| unusable(&error))
}

fn unanswered(bytes: u64) -> ExplainedSize {
    ExplainedSize {
        bytes,
        algo: None,
        proto: None,
        channels: None,
        threads: None,
        predicted_us: None,
        runner_up: None,
        problem: None,
        effects: Vec::new(),
        logged: None,
    }
}

/// A variable of which only the text is known.
fn untold(variable: &Variable) -> ExplainedVariable {
    ExplainedVariable {
        variable: variable.name.clone(),
        value: variable.value.clone(),
        origin: variable.origin,
        changed_sizes: 0,
        summary: "without a prediction there is nothing to compare".to_owned(),
    }
}

pub(super) fn explained(choice: &Choice) -> ExplainedChoice {
    ExplainedChoice {
        algo: choice.algorithm.name().to_owned(),
        proto: choice.protocol.name().to_owned(),
        channels: choice.channels,
        threads: choice.threads,
        predicted_us: rounded(choice.predicted_us),
    }
}

/// Three digits: what lies behind is noise of single precision.
fn rounded(value: f64) -> f64 {
    (value * 1000.0).round() / 1000.0
}

fn explained_graph(graph: &Graph) -> ExplainedGraph {
    let pattern = match graph.pattern {
        Pattern::Ring => "ring",
        Pattern::BalancedTree => "balanced tree",
        Pattern::SplitTree => "split tree",
        Pattern::Tree => "tree",
        Pattern::Nvls => "NVLink switch",
    };
    ExplainedGraph {
        pattern: pattern.to_owned(),
        channels: graph.channels,
        channel_gb_per_s: rounded(graph.channel_bandwidth_gbps),
        path: graph.path_kind.name().to_owned(),
        fallback: graph.is_fallback,
    }
}

/// Fills in what the model says.
fn predict(model: &Model<'_>, variables: &[Variable], explanation: &mut Explanation) -> Result<(), Failure> {
    let effects = Effects::of(model, variables)?;
    let communicator = effects.communicator();
    let graphs = communicator.graphs();
    explanation.graphs = [Some(&graphs.ring), Some(&graphs.tree), graphs.nvls.as_ref()]
        .into_iter()
        .flatten()
        .map(explained_graph)
        .collect();
    explanation.communicator_channels = Some(communicator.channels());
    explanation.transports = transports(communicator);
    explanation.findings.extend(communicator.findings().iter().map(in_words));
    explanation.findings.extend(what_a_fallback_does(model, communicator));
    for size in &mut explanation.sizes {
        match communicator.choose(model.collective, size.bytes) {
            Ok(choice) => {
                let told = explained(&choice);
                (size.algo, size.proto) = (Some(told.algo), Some(told.proto));
                (size.channels, size.threads) = (Some(told.channels), Some(told.threads));
                size.predicted_us = Some(told.predicted_us);
                size.runner_up = choice.runner_up.map(|second| ExplainedRunnerUp {
                    algo: second.algorithm.name().to_owned(),
                    proto: second.protocol.name().to_owned(),
                    predicted_us: rounded(second.predicted_us),
                });
            }
            Err(error) => size.problem = Some(error.to_string()),
        }
        size.effects = effects.at(size.bytes);
    }
    explanation.variables = variables
        .iter()
        .map(|variable| {
            let changed: Vec<u64> = explanation
                .sizes
                .iter()
                .filter(|size| {
                    let mine = size.effects.iter().find(|effect| effect.variable == variable.name);
                    mine.is_some_and(|effect| effect.effect == EffectKind::Changes)
                })
                .map(|size| size.bytes)
                .collect();
            ExplainedVariable {
                variable: variable.name.clone(),
                value: variable.value.clone(),
                origin: variable.origin,
                changed_sizes: changed.len() as u32,
                summary: summary(&variable.name, &changed, &explanation.sizes),
            }
        })
        .collect();
    Ok(())
}

/// The ways in which pairs of GPUs exchange data.
fn transports(communicator: &Communicator) -> Vec<String> {
    let ranks = communicator.ranks();
    let pairs = (0..ranks).flat_map(|from| (0..ranks).map(move |to| (from, to)));
    let mut found: Vec<String> = pairs
        .filter_map(|(from, to)| communicator.transport(from, to))
        .map(|transport| transport.name().to_owned())
        .collect();
    found.sort();
    found.dedup();
    found
}

/// A finding as a sentence.
fn in_words(finding: &Finding) -> String {
    match finding {
        // Switched off, a level changes nothing.
        Finding::PeerAccessUnused { pairs, level: PathKind::Loc, .. } => {
            format!("Peer access is switched off, which {pairs} pairs of GPUs could use; they use host memory.")
        }
        // NCCL reckons in single precision, and digits behind the third are noise.
        Finding::Fallback { pattern, least_tried_gbps, slowest_gbps, slowest, assumed_gbps } => {
            let told = Finding::Fallback {
                pattern: *pattern,
                least_tried_gbps: rounded(*least_tried_gbps),
                slowest_gbps: rounded(*slowest_gbps),
                slowest: *slowest,
                assumed_gbps: rounded(*assumed_gbps),
            };
            sentence(&told.to_string())
        }
        _ => sentence(&finding.to_string()),
    }
}

/// A sentence that begins with a capital letter and ends with a full stop.
fn sentence(text: &str) -> String {
    let mut letters = text.chars();
    let first = letters.next().map(|first| first.to_uppercase().to_string()).unwrap_or_default();
    format!("{first}{}.", letters.as_str().trim_end_matches('.'))
}

/// What follows from the simple order at 0.1 GB/s, in plain words.
fn what_a_fallback_does(model: &Model<'_>, communicator: &Communicator) -> Vec<String> {
    if !communicator.graphs().ring.is_fallback {
        return Vec::new();
    }
    let mut told = vec![
        "At that speed a byte seems to cost a hundred times what it does, so NCCL's predictions here are far from what \
         messages take: compare none of them with a clock."
            .to_owned(),
    ];
    let takes_simple = |bytes: &u64| {
        let choice = communicator.choose(model.collective, *bytes);
        choice.is_ok_and(|choice| choice.protocol == Protocol::Simple)
    };
    told.extend((6..=30).map(|shift| 1_u64 << shift).find(takes_simple).map(|first| {
        format!(
            "For the same reason NCCL takes Simple from {} up, where LL would usually be faster; a topology or graph file \
             that names the real speed mends it.",
            format_size(first)
        )
    }));
    told
}

/// Starts NCCL where that is possible and wanted, and puts its log beside the predictions.
fn compare_with_log(
    request: &ExplainRequest,
    supervisor: &Rc<Supervisor>,
    machine: &ExplainedMachine,
    variables: &[Variable],
    explanation: &mut Explanation,
) -> Result<(), Failure> {
    let Some(real) = &machine.real else { return Ok(()) };
    if let Some(reason) = real.no_launch.as_ref() {
        explanation.notes.push(format!("NCCL was not started: {reason}"));
        return Ok(());
    }
    let sizes: Vec<u64> = explanation.sizes.iter().map(|size| size.bytes).collect();
    let launched = Launched::run(request, supervisor, real, variables, explanation.collective, &sizes)?;
    launched.compare(explanation);
    Ok(())
}

/// The nearest of some names, as a question that follows a message.
fn did_you_mean<'a>(wanted: &str, names: impl IntoIterator<Item = &'a str>) -> String {
    nearest_name(wanted, names).map(|near| format!("did you mean {near}? ")).unwrap_or_default()
}

/// "3 of 11 sizes".
fn of_sizes(count: usize, all: usize) -> String {
    format!("{count} of {all} {}", plural(all as u32, "size", "sizes"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_come_from_the_user_from_the_model_or_from_nowhere() {
        let request = ExplainRequest { sizes: vec![65_536, 1024, 65_536], ..ExplainRequest::default() };
        assert_eq!(sizes(&request, Collective::AllReduce, 8).unwrap().0, [1024, 65_536]);
        let plain = ExplainRequest::default();
        let (model, told) = sizes(&plain, Collective::AllReduce, 8).unwrap();
        assert!(model.contains(&14_336) && told.contains("kimi-k2.5"), "{model:?} {told}");
        let (powers, told) = sizes(&plain, Collective::Broadcast, 8).unwrap();
        assert_eq!((powers[0], powers[powers.len() - 1], powers.len()), (1024, 16 << 20, 15));
        assert!(told.contains("powers of two"), "{told}");
        for bytes in [0, MAX_BYTES + 1] {
            let request = ExplainRequest { sizes: vec![bytes], ..ExplainRequest::default() };
            assert_eq!(sizes(&request, Collective::AllReduce, 8).unwrap_err().kind(), ErrorKind::Usage);
        }
        let request = ExplainRequest { sizes: (1..200).collect(), ..ExplainRequest::default() };
        assert!(sizes(&request, Collective::AllReduce, 8).is_err());
    }

    #[test]
    fn sentences_begin_and_end() {
        assert_eq!(sentence("no ring fits"), "No ring fits.");
        assert_eq!(sentence("Done."), "Done.");
    }
}
