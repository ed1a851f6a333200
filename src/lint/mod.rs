//! What is wrong with settings that somebody wrote by hand.
//!
//! Three questions, each to whoever knows: what the file's consumer makes of the text (`env_syntax::source`), what
//! NCCL makes of each value (`knob::read_as_nccl`), and what the variables make of each other (`together`). An error
//! means that the process sees, or NCCL does, something else than the text says; a warning is something to know.

mod together;

use std::collections::{BTreeMap, BTreeSet};
use std::ops::ControlFlow;

use crate::engine::Engine;
use crate::env_syntax::source::{Assignment, Consumer, Source};
use crate::knob::{self, Risk, Severity};
use crate::machine::NcclVersion;
use crate::record::{LintFinding, LintSeverity};
use crate::tuner_table::Table;
use crate::wording::printable;

/// Most findings of one file: after these its author knows, and a hostile file costs no more.
const MOST_FINDINGS: usize = 1000;
/// Characters that are kept of what a file says.
const TEXT_CHARACTERS: usize = 600;

/// What the files are looked at for.
#[derive(Debug, Clone, Copy)]
pub struct Circumstances {
    /// The release of NCCL that will read them.
    pub version: NcclVersion,
    /// The engine that will be started with them, where that was said.
    pub engine: Option<Engine>,
}

/// A variable as one process will see it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Setting<'a> {
    line: usize,
    value: Option<&'a str>,
}

/// Everything wrong with a file, in order of lines.
pub fn lint(file: &str, text: &str, consumer: Consumer, circumstances: Circumstances) -> Vec<LintFinding> {
    let source = match Source::read(consumer, text) {
        Ok(source) => source,
        Err(reason) => return vec![unreadable(file, &format!("is no {}: {reason}", consumer.name()))],
    };
    let mut found = Found::default();
    for remark in &source.remarks {
        let severity = if remark.is_error { LintSeverity::Error } else { LintSeverity::Warning };
        let (variable, suggestion) = (remark.variable.as_deref(), remark.suggestion.as_deref());
        if found.add(remark.line, variable, severity, &remark.message, suggestion).is_break() {
            return found.of(file);
        }
    }
    let mut add = |line: usize, variable: &str, severity, message: String, suggestion: Option<String>| {
        found.add(line, Some(variable), severity, &message, suggestion.as_deref())
    };
    // What one variable says wrong comes first: it is what the others are to be read with.
    let mut each = source.assignments.iter();
    if each.try_for_each(|assignment| one(assignment, circumstances, &mut add)).is_continue() {
        let _ = scopes(&source.assignments, circumstances, &mut add);
    }
    found.of(file)
}

/// What was found in a file, each once.
#[derive(Default)]
struct Found {
    findings: Vec<LintFinding>,
}

impl Found {
    /// Takes in a finding. Breaks where there are enough.
    fn add(
        &mut self,
        line: usize,
        variable: Option<&str>,
        severity: LintSeverity,
        message: &str,
        suggestion: Option<&str>,
    ) -> ControlFlow<()> {
        let shown = |text: &str| printable(text, TEXT_CHARACTERS);
        let finding = LintFinding {
            file: String::new(),
            line,
            variable: variable.map(shown),
            severity,
            message: shown(message),
            suggestion: suggestion.map(shown),
        };
        if !self.findings.contains(&finding) {
            self.findings.push(finding);
        }
        if self.findings.len() < MOST_FINDINGS { ControlFlow::Continue(()) } else { ControlFlow::Break(()) }
    }

    /// All of them, in order of lines.
    fn of(mut self, file: &str) -> Vec<LintFinding> {
        if self.findings.len() >= MOST_FINDINGS {
            self.findings.push(unreadable(file, "has more findings than are looked for in one file"));
        }
        self.findings.sort_by_key(|finding| (finding.line, finding.severity));
        for finding in &mut self.findings {
            file.clone_into(&mut finding.file);
        }
        self.findings
    }
}

/// What is wrong with a tuner table, as the plugin would say it.
pub fn lint_table(file: &str, text: &str) -> Vec<LintFinding> {
    let finding = |line: usize, severity, message: String| LintFinding {
        file: file.to_owned(),
        line,
        variable: None,
        severity,
        message,
        suggestion: None,
    };
    match Table::parse(text.as_bytes()) {
        Err(error) => vec![finding(error.line.unwrap_or(0), LintSeverity::Error, error.reason)],
        Ok(table) if !table.is_named_so(std::path::Path::new(file)) => {
            let message = format!(
                "was changed after it was named: its SHA-256 is {}. Tables are never edited; make a new one",
                table.sha256
            );
            vec![finding(0, LintSeverity::Error, message)]
        }
        Ok(table) if table.rows.is_empty() => {
            vec![finding(0, LintSeverity::Warning, "has no rows: NCCL keeps all its own choices".to_owned())]
        }
        Ok(table) => {
            let ll128 = table.rows.iter().any(|row| nccl_abi::PROTOCOLS.get(row.protocol) == Some(&"ll128"));
            let message = "names LL128, which runs only where NCCL has it open already; NCCL_PROTO must not open it off \
                           NVLink, where data may be corrupted silently";
            ll128.then(|| finding(0, LintSeverity::Warning, message.to_owned())).into_iter().collect()
        }
    }
}

/// The finding about a file that cannot be looked at.
pub fn unreadable(file: &str, reason: &str) -> LintFinding {
    LintFinding {
        file: file.to_owned(),
        line: 0,
        variable: None,
        severity: LintSeverity::Error,
        message: reason.to_owned(),
        suggestion: None,
    }
}

/// Told of every finding: line, variable, severity, message, suggestion. Breaks where there are enough.
type Add<'a> = dyn FnMut(usize, &str, LintSeverity, String, Option<String>) -> ControlFlow<()> + 'a;

/// What is wrong with one variable by itself.
fn one(assignment: &Assignment, circumstances: Circumstances, add: &mut Add<'_>) -> ControlFlow<()> {
    let Assignment { line, name, value, .. } = assignment;
    // An engine may set what is not NCCL's, too.
    if let (Some(engine), Some(value)) = (circumstances.engine, value) {
        overridden(*line, name, value, engine, add)?;
    }
    if !is_known(name) {
        return unknown(*line, name, circumstances, add);
    }
    let Some(value) = value else { return ControlFlow::Continue(()) };
    let reading = knob::read_as_nccl(name, value, circumstances.version);
    let problem = reading.problem();
    if let Some(problem) = &problem {
        let severity = match problem.severity {
            Severity::Error => LintSeverity::Error,
            Severity::Warning => LintSeverity::Warning,
        };
        add(*line, name, severity, problem.message.clone(), problem.suggestion.clone())?;
    }
    if value.is_empty() {
        add(*line, name, LintSeverity::Warning, "is empty, and NCCL takes that for not set".to_owned(), None)?;
    }
    if problem.is_none_or(|problem| problem.severity == Severity::Warning)
        && let Some(knob) = knob::find(name)
        && knob.is_read_by(circumstances.version)
    {
        dangerous(*line, name, knob.risk_of(value), add)?;
    }
    ControlFlow::Continue(())
}

fn is_known(name: &str) -> bool {
    knob::names().any(|known| known == name)
}

/// What this tool and NCCL's plugins for other people's networks read begins so. Sources: Google's guide to GPUDirect
/// on A3 machines, AWS's aws-ofi-nccl, NVIDIA's nccl-rdma-sharp-plugins.
const OF_OTHERS: [&str; 9] = [
    "NCCLTUNE_",
    "NCCL_FASTRAK_",
    "NCCL_GPUDIRECTTCPX_",
    "NCCL_GPUDIRECTTCPXO_",
    "NCCL_SHIMNET_",
    "NCCL_OFI_",
    "NCCL_SHARP_",
    "NCCL_UCX_",
    "NCCL_IBEXT_",
];
/// What builds read, and what NVIDIA's images say of what they hold: nobody expects NCCL to look at it.
const OF_BUILDS: [&str; 10] = [
    "NCCL_VERSION",
    "NCCL_HOME",
    "NCCL_PATH",
    "NCCL_DIR",
    "NCCL_ROOT",
    "NCCL_ROOT_DIR",
    "NCCL_INCLUDE_DIR",
    "NCCL_LIB_DIR",
    "NCCL_LIBRARY",
    "NCCL_INSTALL_PATH",
];
/// Slips of the keyboard; RCCL, HCCL and others are libraries of their own.
const MISTYPED: [&str; 7] = ["NCL_", "NCC_", "NCLL_", "NNCL_", "NCCCL_", "NCCLL_", "NNCCL_"];

fn unknown(line: usize, name: &str, circumstances: Circumstances, add: &mut Add<'_>) -> ControlFlow<()> {
    let is_slip = MISTYPED
        .iter()
        .any(|slip| name.strip_prefix(slip).is_some_and(|rest| rest.len() < 100 && is_known(&format!("NCCL_{rest}"))));
    let begins = |prefix: &str| name.get(..prefix.len()).is_some_and(|begin| begin.eq_ignore_ascii_case(prefix));
    if !is_slip && !begins("NCCL")
        || OF_OTHERS.iter().any(|prefix| begins(prefix))
        || OF_BUILDS.iter().any(|other| name.eq_ignore_ascii_case(other))
    {
        return ControlFlow::Continue(());
    }
    let reading = knob::read_as_nccl(name, "1", circumstances.version);
    let message = match reading.value {
        knob::ReadValue::NotRead { reason } => reason,
        _ => format!("NCCL does not read a variable named {name}"),
    };
    // What another program reads is no slip.
    let severity = if message.ends_with(" may") { LintSeverity::Warning } else { LintSeverity::Error };
    if message.contains("plugin may") {
        return ControlFlow::Continue(());
    }
    let nearest = crate::units::nearest_name(name.trim(), knob::names()).map(str::to_owned);
    add(line, name, severity, message, nearest)
}

/// What an engine sets itself, whatever the environment says.
fn overridden(line: usize, name: &str, value: &str, engine: Engine, add: &mut Add<'_>) -> ControlFlow<()> {
    let own = engine.variables(None).iter().find(|variable| variable.name == name && variable.value != value);
    let Some(own) = own else { return ControlFlow::Continue(()) };
    if own.overridable {
        let message =
            format!("{} sets {name}={} where nothing else is set; this value replaces it", engine.title(), own.value);
        add(line, name, LintSeverity::Warning, message, None)
    } else {
        let message = format!("{} sets {name}={} itself, so this value never counts", engine.title(), own.value);
        add(line, name, LintSeverity::Error, message, None)
    }
}

fn dangerous(line: usize, name: &str, risk: Risk, add: &mut Add<'_>) -> ControlFlow<()> {
    let message = match risk {
        Risk::None => return ControlFlow::Continue(()),
        Risk::UnverifiedPlatform => {
            "names LL128, which switches off NCCL's check that the link keeps its promise: off NVLink data may be \
             corrupted silently"
        }
        Risk::UnsafeMixing => {
            "is safe only where captured and uncaptured collectives of a communicator never overlap, which depends on \
             the engine"
        }
        Risk::HangProne => {
            "may hang or deliver wrong data where an IOMMU, ACS or the driver stands in the way of peer access, or the \
             value does not suit NCCL's buffers"
        }
    };
    add(line, name, LintSeverity::Warning, message.to_owned(), None)
}

/// The variables of each process, looked at together; what is set twice with different values is told.
fn scopes(assignments: &[Assignment], circumstances: Circumstances, add: &mut Add<'_>) -> ControlFlow<()> {
    // No others mean anything to each other, and a hostile file's may be without number.
    let known: BTreeSet<&str> = knob::names().chain(["NCCL_TUNER_CONFIG_FILE"]).collect();
    let mut scopes: BTreeMap<usize, BTreeMap<&str, Setting<'_>>> = BTreeMap::new();
    let mut alone: BTreeSet<usize> = BTreeSet::new();
    for assignment in assignments.iter().filter(|assignment| known.contains(assignment.name.as_str())) {
        let settings = scopes.entry(assignment.scope).or_default();
        if assignment.is_alone {
            alone.insert(assignment.scope);
        }
        let setting = Setting { line: assignment.line, value: assignment.value.as_deref() };
        if let Some(earlier) = settings.insert(&assignment.name, setting)
            && earlier.value != setting.value
        {
            let message = format!("line {} sets it to another value; the last one counts", earlier.line);
            add(assignment.line, &assignment.name, LintSeverity::Warning, message, None)?;
        }
    }
    // What a script exports reaches its commands too, and no container.
    let common = scopes.get(&0).cloned().unwrap_or_default();
    for (scope, settings) in scopes {
        let mut all = if alone.contains(&scope) { BTreeMap::new() } else { common.clone() };
        all.extend(settings);
        together::look(&all, circumstances, add)?;
    }
    ControlFlow::Continue(())
}

#[cfg(test)]
mod tests;
