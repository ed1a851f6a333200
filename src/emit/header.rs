//! The comment lines at the top of every file: written for people, and read back by those who must
//! know whether a file belongs on this machine.

use std::collections::BTreeMap;
use std::path::Path;

use super::{EmitAs, comment, companions};
use crate::env_syntax::EnvLine;
use crate::fingerprint::told;
use crate::record::{Choice, Manifest, Origin, VerdictKind};
use crate::wording::{self, Condition};

const FINGERPRINT: &str = "machine fingerprint: ";
const VERDICT: &str = "verdict: ";
const HOLDS: &str = "holds only while: ";
const TOOL: &str = "nccltune ";
const PART: &str = "measured with: ";
const LIBRARY: &str = "NCCL library: ";
const PLUGIN: &str = "tuner plugin: SHA-256 ";
const DATE: &str = "date: ";

/// The header of an answer without its leading "# ".
pub(super) fn lines(choice: &Choice, manifest: &Manifest, directory: &Path, form: EmitAs, empty: bool) -> Vec<EnvLine> {
    let workload = &manifest.workload;
    let mut lines = vec![
        format!(
            "{TOOL}{}: NCCL settings for {}, TP {}, on {}",
            manifest.tool_version, workload.model, workload.tensor_parallel, manifest.machine.name
        ),
        form.consumers().to_owned(),
    ];
    lines.extend(wording::labels(choice, manifest).iter().map(ToString::to_string));
    lines.push(format!("machine: {}", wording::machine(&manifest.machine, &manifest.devices)));
    lines.push(format!("NCCL: {}", wording::nccl(manifest.nccl.as_ref())));
    lines.push(format!("{FINGERPRINT}{}", manifest.fingerprint.combined));
    // What tells a stale or foreign file long after its run directory is gone.
    lines.extend(manifest.fingerprint.parts.iter().map(|(name, value)| format!("{PART}{name} = {}", told(value))));
    lines.extend(
        manifest.nccl.iter().filter(|nccl| told(&nccl.path) == nccl.path).map(|nccl| format!("{LIBRARY}{}", nccl.path)),
    );
    if choice.verdict == VerdictKind::Adopt && choice.files.keys().any(|kind| kind.companion().is_some()) {
        lines.extend(manifest.tables.iter().map(|tables| format!("{PLUGIN}{}", tables.plugin.sha256)));
    }
    lines.push(format!("workload: {}", wording::workload(workload)));
    lines.push(format!("{VERDICT}{}", wording::verdict(choice)));
    lines.extend(wording::forward_pass(choice).map(|pass| format!("forward pass: {pass}")));
    lines.extend(choice.misjudged.iter().map(|why| format!("the default: {why}")));
    lines.extend(wording::best_finalist(choice));
    if choice.verdict == VerdictKind::Adopt {
        let unsafe_points = wording::not_shown_safe(choice);
        if !unsafe_points.is_empty() {
            let allowed = wording::percent(choice.thresholds.max_regression);
            lines.push(format!("not ruled out: a regression of more than {allowed} at {}", unsafe_points.join("; ")));
        }
        lines.extend(wording::gate(choice));
        lines.extend(wording::memory(choice).map(|memory| format!("memory: {memory}")));
    }
    for repair in &choice.repairs {
        let where_set = if empty { "needed here" } else { "set below" };
        lines.push(format!(
            "repair: {}={}, {where_set}, because without it NCCL does not run on this machine: {}",
            repair.variable, repair.value, repair.evidence
        ));
    }
    lines.extend(choice.warnings.iter().map(|warning| format!("WARNING: {warning}")));
    if !choice.unmeasured.is_empty() {
        lines.push(format!("not measured, so not covered: {}", choice.unmeasured.join("; ")));
    }
    lines.push(format!("{DATE}{}", manifest.created));
    lines.push(format!("seed: {}", manifest.seed));
    for condition in wording::conditions(choice, manifest) {
        let Condition { variable, value, origin } = &condition;
        let below = if *origin == Some(Origin::Pin) && !empty { ", set below" } else { "" };
        let who = condition.origin_words(&wording::engine(workload));
        lines.push(format!("{HOLDS}{variable}={value} ({who}{below})"));
    }
    if choice.verdict == VerdictKind::Adopt {
        lines.extend(
            companions(choice, directory, form).into_iter().map(|companion| format!("needs beside it: {companion}")),
        );
    }
    if empty {
        lines.push(
            match choice.verdict {
                VerdictKind::Adopt => "This file sets no variables: the answer needs none.",
                VerdictKind::KeepDefault => "This file sets no variables: the default is the answer.",
                VerdictKind::Undecided => {
                    "This file sets no variables: nothing was shown to be better than the default."
                }
            }
            .to_owned(),
        );
    }
    lines.iter().map(|line| comment(line)).collect()
}

/// What a file says of itself. Everything is absent in a file that nccltune did not write.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Header {
    /// Version of the tool that wrote it.
    pub tool_version: Option<String>,
    /// Loud words ("SIMULATED").
    pub labels: Vec<String>,
    /// Fingerprint of the machine it was measured on, all digits.
    pub fingerprint: Option<String>,
    /// Name of the verdict ("adopt").
    pub verdict: Option<String>,
    /// Variables it holds under, as NAME=VALUE.
    pub conditions: Vec<String>,
    /// What it was measured with, in named parts, each as [`told`] gives it.
    pub parts: BTreeMap<String, String>,
    /// Where the NCCL lay that was measured.
    pub nccl_path: Option<String>,
    /// SHA-256 of the tuner plugin that reads its table.
    pub plugin_sha256: Option<String>,
    /// When its run began.
    pub date: Option<String>,
}

/// Most parts that are read of a header.
const PARTS_MAX: usize = 100;

impl Header {
    /// Whether no GPU was measured.
    pub fn simulated(&self) -> bool {
        self.labels.iter().any(|label| label == "SIMULATED")
    }
}

/// Reads the header of an emitted file in either form: the comment lines before the first other line.
pub fn read_header(text: &str) -> Header {
    let mut header = Header::default();
    for (index, line) in text.lines().map_while(|line| line.strip_prefix('#')).enumerate() {
        let line = line.trim();
        if index == 0 {
            header.tool_version =
                line.strip_prefix(TOOL).and_then(|rest| rest.split_once(": ")).map(|(version, _)| version.to_owned());
        } else if let Some(fingerprint) = line.strip_prefix(FINGERPRINT) {
            header.fingerprint.get_or_insert_with(|| fingerprint.to_owned());
        } else if let Some((name, value)) = line.strip_prefix(PART).and_then(|part| part.split_once(" = ")) {
            if header.parts.len() < PARTS_MAX {
                header.parts.entry(name.to_owned()).or_insert_with(|| value.to_owned());
            }
        } else if let Some(path) = line.strip_prefix(LIBRARY) {
            header.nccl_path.get_or_insert_with(|| path.to_owned());
        } else if let Some(sha256) = line.strip_prefix(PLUGIN) {
            header.plugin_sha256.get_or_insert_with(|| sha256.to_owned());
        } else if let Some(date) = line.strip_prefix(DATE) {
            header.date.get_or_insert_with(|| date.to_owned());
        } else if let Some(verdict) = line.strip_prefix(VERDICT) {
            let name = verdict.split(':').next().unwrap_or(verdict);
            header.verdict.get_or_insert_with(|| name.to_owned());
        } else if let Some(condition) = line.strip_prefix(HOLDS) {
            // The value may hold blanks in the shell form; the remark behind it is in parentheses.
            let assignment = condition.rsplit_once(" (").map_or(condition, |(assignment, _)| assignment);
            header.conditions.push(assignment.to_owned());
        } else if let Some(word) = ["SIMULATED", "REPLAYED", "REDRAWN", "IMPORTED", "HOST-MEMORY"]
            .into_iter()
            .find(|word| line.strip_prefix(word).is_some_and(|rest| rest.is_empty() || rest.starts_with(':')))
        {
            header.labels.push(word.to_owned());
        }
    }
    header
}
