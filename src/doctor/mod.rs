//! Is this machine fit to be measured on, and will the answer mean anything to the server?
//!
//! A check is a name, a question, a verdict, what was seen and what to do. Nothing here starts a
//! process or touches a GPU: the checks judge facts that are handed in, and a few files. So they are
//! quick, they cannot hang, and every verdict of every one can be planted in a test.

mod conf_files;
mod driver;
mod environment;
#[cfg(test)]
mod fixtures;
mod gpu;
mod nccl;
mod peer;
mod quarantine;
mod sight;
mod system;

use std::collections::BTreeMap;
use std::path::Path;

use crate::discovery::NcclCandidates;
use crate::machine::{Machine, NcclLibrary};
use crate::probe::ProbeReport;
use crate::quarantine::Remembered;
use crate::record::{Check, CheckReport, CheckVerdict, FORMAT};
use crate::wording;

pub use conf_files::conf_variables;
pub use nccl::VERIFIED;
pub use peer::speaks_against_peer_access;

use sight::Sight;

/// What is known before the checks begin.
#[derive(Debug, Clone, Copy)]
pub struct Facts<'a> {
    /// The folder that files are read under: "/", or in a test a folder that stands for it.
    pub root: &'a Path,
    /// The environment the tool was started with.
    pub environment: &'a BTreeMap<String, String>,
    /// This user's home as the user database has it: NCCL looks for `.nccl.conf` there and does not
    /// ask `$HOME`.
    pub home: Option<&'a Path>,
    /// Whether anything of an NVIDIA driver is here ([`crate::discovery::driver_is_installed`]).
    pub driver_installed: bool,
    /// What the probe found; none where it failed.
    pub report: Option<&'a ProbeReport>,
    /// Why the probe failed.
    pub probe_error: Option<&'a str>,
    /// The machine behind the report; none where the report describes none.
    pub machine: Option<&'a Machine>,
    /// The chosen GPUs, by index in `machine`.
    pub devices: &'a [u32],
    /// The NCCL libraries that the user or the Python environment names.
    pub candidates: &'a NcclCandidates,
    /// The library that the dynamic loader finds: path and version code.
    pub loader_nccl: Option<(&'a str, i32)>,
    /// The library that will be measured with.
    pub nccl: Option<&'a NcclLibrary>,
    /// Why there is none.
    pub nccl_error: Option<&'a str>,
    /// Ranks of a launch.
    pub ranks: u32,
    /// Processes on the GPUs that are the tool's own.
    pub own_process_ids: &'a [u32],
    /// What earlier runs left for later ones; none where nothing names a place for it.
    pub remembered: Option<&'a Remembered>,
}

/// A check before it is made.
struct Question {
    name: &'static str,
    group: &'static str,
    words: &'static str,
    judge: fn(&Sight<'_>) -> Finding,
}

/// The checks in the order they are made and told: what the rest stands on comes first.
const QUESTIONS: &[Question] = &[
    Question {
        name: "driver-usable",
        group: "driver",
        words: "Is there an NVIDIA driver that answers?",
        judge: driver::usable,
    },
    Question { name: "gpu-count", group: "gpu", words: "Are there GPUs to communicate?", judge: gpu::count },
    Question { name: "gpu-alike", group: "gpu", words: "Are the GPUs of one kind?", judge: gpu::alike },
    Question { name: "gpu-idle", group: "gpu", words: "Are the GPUs free of other work?", judge: gpu::idle },
    Question { name: "gpu-memory", group: "gpu", words: "Do the GPUs have memory to spare?", judge: gpu::memory },
    Question { name: "pcie-link", group: "gpu", words: "Do the PCIe links run as built?", judge: gpu::pcie_link },
    Question {
        name: "peer-known-bad",
        group: "gpu",
        words: "Is nothing known against peer access with this driver on these GPUs?",
        judge: peer::known_bad,
    },
    Question { name: "nccl-found", group: "nccl", words: "Is there an NCCL library?", judge: nccl::found },
    Question {
        name: "nccl-unambiguous",
        group: "nccl",
        words: "Will the server load the library that is measured?",
        judge: nccl::unambiguous,
    },
    Question {
        name: "nccl-verified-version",
        group: "nccl",
        words: "Was this tool checked with this release of NCCL?",
        judge: nccl::verified_version,
    },
    Question { name: "nccl-old", group: "nccl", words: "Is this release of NCCL new enough?", judge: nccl::old },
    Question {
        name: "inherited-environment",
        group: "nccl",
        words: "Is the environment free of NCCL variables?",
        judge: environment::inherited,
    },
    Question {
        name: "conf-files",
        group: "nccl",
        words: "Do NCCL's configuration files leave its defaults alone?",
        judge: conf_files::check,
    },
    Question {
        name: "contradictory-environment",
        group: "nccl",
        words: "Do the variables in force agree with each other?",
        judge: environment::contradictory,
    },
    Question {
        name: "quarantine",
        group: "nccl",
        words: "Were earlier runs here free of hangs, crashes and wrong results?",
        judge: quarantine::check,
    },
    Question {
        name: "shared-memory",
        group: "system",
        words: "Is there shared memory for NCCL's buffers?",
        judge: system::shared_memory,
    },
    Question {
        name: "virtualisation",
        group: "system",
        words: "Is this the real machine?",
        judge: system::virtualisation,
    },
    Question {
        name: "iommu",
        group: "system",
        words: "Is the IOMMU out of the way of peer access?",
        judge: system::iommu,
    },
    Question {
        name: "acs-redirect",
        group: "system",
        words: "Do PCIe bridges let peer traffic pass?",
        judge: peer::acs,
    },
];

/// How a check ended.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Finding {
    verdict: CheckVerdict,
    evidence: String,
    advice: String,
}

impl Finding {
    fn of(verdict: CheckVerdict, evidence: impl Into<String>, advice: impl Into<String>) -> Self {
        Self { verdict, evidence: evidence.into(), advice: advice.into() }
    }

    fn pass(evidence: impl Into<String>) -> Self {
        Self::of(CheckVerdict::Pass, evidence, "")
    }

    fn warn(evidence: impl Into<String>, advice: impl Into<String>) -> Self {
        Self::of(CheckVerdict::Warn, evidence, advice)
    }

    fn fail(evidence: impl Into<String>, advice: impl Into<String>) -> Self {
        Self::of(CheckVerdict::Fail, evidence, advice)
    }

    fn unknown(evidence: impl Into<String>) -> Self {
        Self::of(CheckVerdict::Unknown, evidence, "")
    }
}

/// Makes every check, in an order that does not change.
pub fn examine(facts: &Facts<'_>) -> CheckReport {
    judge(&Sight::look(facts))
}

fn judge(sight: &Sight<'_>) -> CheckReport {
    let checks = QUESTIONS
        .iter()
        .map(|question| {
            let finding = (question.judge)(sight);
            Check {
                name: question.name.to_owned(),
                group: question.group.to_owned(),
                verdict: finding.verdict,
                question: question.words.to_owned(),
                evidence: finding.evidence,
                advice: finding.advice,
            }
        })
        .collect();
    CheckReport { format: FORMAT, checks }
}

/// Why nothing may be measured here before something is mended: a sentence that names the checks
/// that failed. None where none did; warnings and open questions refuse nothing.
pub fn refuses(report: &CheckReport) -> Option<String> {
    let failed: Vec<String> = report
        .checks
        .iter()
        .filter(|check| check.verdict == CheckVerdict::Fail)
        .map(|check| format!("{} ({})", check.name, check.evidence))
        .collect();
    let checks = wording::plural(failed.len() as u32, "a check failed", "checks failed");
    (!failed.is_empty()).then(|| format!("this machine is not fit to measure on: {checks}: {}", failed.join(", ")))
}

/// Text from outside, short and harmless enough for a table.
fn shown(text: &str) -> String {
    wording::printable(text, 300)
}

/// The first of many, and how many more there are. Only what is shown is put into words: a hostile
/// file has ten thousand of them.
fn listed_as<T>(items: &[T], most: usize, separator: &str, words: impl Fn(&T) -> String) -> String {
    let left_out = items.len().saturating_sub(most);
    let more = (left_out > 0).then(|| format!("and {left_out} more"));
    items.iter().take(most).map(words).chain(more).collect::<Vec<_>>().join(separator)
}

/// [`listed_as`] of what is in words already.
fn listed(items: &[String], most: usize, separator: &str) -> String {
    listed_as(items, most, separator, String::clone)
}

#[cfg(test)]
mod tests {
    use super::fixtures::Planted;
    use super::*;

    /// A report as a person would read it, check by check.
    fn told(report: &CheckReport) -> String {
        let mut lines = Vec::new();
        for check in &report.checks {
            lines.push(format!("{} [{}] {}: {}", check.verdict.name(), check.group, check.name, check.question));
            lines.push(format!("    {}", check.evidence));
            if !check.advice.is_empty() {
                lines.push(format!("    -> {}", check.advice));
            }
        }
        lines.join("\n")
    }

    #[test]
    fn a_healthy_machine_passes_everything() {
        let report = Planted::healthy().report();
        insta::assert_snapshot!(told(&report));
        assert!(report.checks.iter().all(|check| check.verdict == CheckVerdict::Pass));
        assert_eq!(refuses(&report), None);
    }

    #[test]
    fn a_sick_machine_is_told_what_ails_it() {
        let report = Planted::sick().report();
        insta::assert_snapshot!(told(&report));
        insta::assert_snapshot!(refuses(&report).unwrap());
    }

    #[test]
    fn a_machine_without_a_driver_still_gets_every_answer() {
        let report = Planted::without_driver().report();
        insta::assert_snapshot!(told(&report));
    }

    #[test]
    fn every_check_is_made_on_the_machine_that_runs_this_test() {
        // What it finds differs; that it looks at the real files without trouble must not.
        let planted = Planted::healthy();
        let report = examine(&Facts { root: Path::new("/"), ..planted.facts() });
        let names: Vec<&str> = report.checks.iter().map(|check| check.name.as_str()).collect();
        assert_eq!(names, QUESTIONS.iter().map(|question| question.name).collect::<Vec<_>>());
        assert_eq!(report.format, FORMAT);
    }

    #[test]
    fn whatever_does_not_pass_and_can_be_mended_comes_with_advice() {
        for planted in [Planted::healthy(), Planted::sick(), Planted::without_driver()] {
            for check in planted.report().checks {
                let mendable = matches!(check.verdict, CheckVerdict::Warn | CheckVerdict::Fail);
                assert_eq!(mendable, !check.advice.is_empty(), "{}", check.name);
                assert!(!check.evidence.is_empty(), "{}", check.name);
            }
        }
    }

    #[test]
    fn names_are_stable_words_and_questions_are_questions() {
        let mut seen = std::collections::BTreeSet::new();
        for question in QUESTIONS {
            assert!(seen.insert(question.name));
            assert!(question.name.chars().all(|character| character.is_ascii_lowercase() || character == '-'));
            assert!(["driver", "gpu", "nccl", "system"].contains(&question.group));
            assert!(question.words.ends_with('?'));
        }
    }

    #[test]
    fn only_failures_refuse() {
        let check = |name: &str, verdict| Check {
            name: name.to_owned(),
            group: "gpu".to_owned(),
            verdict,
            question: "?".to_owned(),
            evidence: "this".to_owned(),
            advice: String::new(),
        };
        let mut report = CheckReport {
            format: FORMAT,
            checks: vec![check("a", CheckVerdict::Warn), check("b", CheckVerdict::Unknown)],
        };
        assert_eq!(refuses(&report), None);
        report.checks.push(check("c", CheckVerdict::Fail));
        assert_eq!(refuses(&report).unwrap(), "this machine is not fit to measure on: a check failed: c (this)");
    }

    #[test]
    fn long_lists_say_how_much_they_leave_out() {
        let items: Vec<String> = (0..5).map(|number| number.to_string()).collect();
        assert_eq!(listed(&items, 5, ", "), "0, 1, 2, 3, 4");
        assert_eq!(listed(&items, 2, ", "), "0, 1, and 3 more");
    }
}
