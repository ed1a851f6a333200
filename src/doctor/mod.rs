//! Is this machine fit to be measured on, and will the answer mean anything to the server?
//!
//! A check is a name, a question, a verdict, what was seen and what to do. Nothing here starts a
//! process or touches a GPU: the checks judge facts that are handed in, and a few files. So they are
//! quick, they cannot hang, and every verdict of every one can be planted in a test.

mod bundle;
mod class;
mod conf_files;
mod driver;
mod environment;
mod files;
#[cfg(test)]
mod fixtures;
mod gpu;
mod holders;
mod host;
mod nccl;
mod peer;
mod quarantine;
mod sight;
mod slot;
mod system;

use std::collections::BTreeMap;
use std::path::Path;

use crate::discovery::NcclCandidates;
use crate::machine::{Machine, NcclLibrary};
use crate::probe::ProbeReport;
use crate::quarantine::Remembered;
use crate::record::{Check, CheckReport, CheckVerdict, FORMAT};
use crate::wording;

pub use bundle::bundle;
pub use class::{SAMPLE_BYTES, Sampled, class_check};
pub use conf_files::conf_variables;
pub use files::machine_in_files;
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
    /// Whether `root` is a copy of another machine's files: nothing else was asked, and what only a driver,
    /// a library or this process could answer stays open.
    pub files_only: bool,
}

/// A check before it is made.
struct Question {
    name: &'static str,
    group: &'static str,
    words: &'static str,
    /// Who can answer it.
    asks: Asks,
    judge: fn(&Sight<'_>) -> Finding,
}

/// Who can answer a check.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Asks {
    /// The machine itself, through a driver, a library or this process.
    Machine,
    /// Its files, wherever they lie.
    Files,
}

/// What is said where only files are read.
const NOT_ASKED: &str = "not asked: --root reads files only";

/// The checks in the order they are made and told: what the rest stands on comes first.
const QUESTIONS: &[Question] = &[
    Question {
        name: "driver-usable",
        group: "driver",
        words: "Is there an NVIDIA driver that answers?",
        asks: Asks::Machine,
        judge: driver::usable,
    },
    Question {
        name: "driver-parameters",
        group: "driver",
        words: "Was the driver loaded with its usual parameters?",
        asks: Asks::Files,
        judge: driver::parameters,
    },
    Question {
        name: "gpu-count",
        group: "gpu",
        words: "Are there GPUs to communicate?",
        asks: Asks::Machine,
        judge: gpu::count,
    },
    Question {
        name: "gpu-alike",
        group: "gpu",
        words: "Are the GPUs of one kind?",
        asks: Asks::Machine,
        judge: gpu::alike,
    },
    Question {
        name: "gpu-idle",
        group: "gpu",
        words: "Are the GPUs free of other work?",
        asks: Asks::Machine,
        judge: gpu::idle,
    },
    Question {
        name: "gpu-memory",
        group: "gpu",
        words: "Do the GPUs have memory to spare?",
        asks: Asks::Machine,
        judge: gpu::memory,
    },
    Question {
        name: "pcie-link",
        group: "gpu",
        words: "Do the PCIe links run as built?",
        asks: Asks::Machine,
        judge: gpu::pcie_link,
    },
    Question {
        name: "pcie-slot",
        group: "gpu",
        words: "Do slots and bridges give the GPUs all their lanes and speed?",
        asks: Asks::Files,
        judge: slot::pcie_slot,
    },
    Question {
        name: "gpu-numa",
        group: "gpu",
        words: "Does the kernel know which node each GPU is attached to?",
        asks: Asks::Files,
        judge: slot::gpu_numa,
    },
    Question {
        name: "gpu-holders",
        group: "gpu",
        words: "Does no other process hold the GPUs' device files?",
        asks: Asks::Files,
        judge: holders::check,
    },
    Question {
        name: "peer-known-bad",
        group: "gpu",
        words: "Is nothing known against peer access with this driver on these GPUs?",
        asks: Asks::Files,
        judge: peer::known_bad,
    },
    Question {
        name: "nccl-found",
        group: "nccl",
        words: "Is there an NCCL library?",
        asks: Asks::Machine,
        judge: nccl::found,
    },
    Question {
        name: "nccl-unambiguous",
        group: "nccl",
        words: "Will the server load the library that is measured?",
        asks: Asks::Machine,
        judge: nccl::unambiguous,
    },
    Question {
        name: "nccl-verified-version",
        group: "nccl",
        words: "Was this tool checked with this release of NCCL?",
        asks: Asks::Machine,
        judge: nccl::verified_version,
    },
    Question {
        name: "nccl-old",
        group: "nccl",
        words: "Is this release of NCCL new enough?",
        asks: Asks::Machine,
        judge: nccl::old,
    },
    Question {
        name: "inherited-environment",
        group: "nccl",
        words: "Is the environment free of NCCL variables?",
        asks: Asks::Machine,
        judge: environment::inherited,
    },
    Question {
        name: "conf-files",
        group: "nccl",
        words: "Do NCCL's configuration files leave its defaults alone?",
        asks: Asks::Files,
        judge: conf_files::check,
    },
    Question {
        name: "contradictory-environment",
        group: "nccl",
        words: "Do the variables in force agree with each other?",
        asks: Asks::Files,
        judge: environment::contradictory,
    },
    Question {
        name: "quarantine",
        group: "nccl",
        words: "Were earlier runs here free of hangs, crashes and wrong results?",
        asks: Asks::Machine,
        judge: quarantine::check,
    },
    Question {
        name: "shared-memory",
        group: "system",
        words: "Is there shared memory for NCCL's buffers?",
        asks: Asks::Files,
        judge: system::shared_memory,
    },
    Question {
        name: "virtualisation",
        group: "system",
        words: "Is this the real machine?",
        asks: Asks::Files,
        judge: system::virtualisation,
    },
    Question {
        name: "iommu",
        group: "system",
        words: "Is the IOMMU out of the way of peer access?",
        asks: Asks::Files,
        judge: system::iommu,
    },
    Question {
        name: "acs-redirect",
        group: "system",
        words: "Do PCIe bridges let peer traffic pass?",
        asks: Asks::Files,
        judge: peer::acs,
    },
    Question {
        name: "numa-nodes",
        group: "system",
        words: "Has every NUMA node processors and memory?",
        asks: Asks::Files,
        judge: host::numa_nodes,
    },
    Question {
        name: "cpu-affinity",
        group: "system",
        words: "May the ranks run on enough processors, and on those near the GPUs?",
        asks: Asks::Files,
        judge: host::cpu_affinity,
    },
    Question {
        name: "locked-memory",
        group: "system",
        words: "May a process lock the memory that network adapters need?",
        asks: Asks::Files,
        judge: host::locked_memory,
    },
    Question {
        name: "control-group",
        group: "system",
        words: "Does the control group leave room for the ranks?",
        asks: Asks::Files,
        judge: host::control_group,
    },
    Question {
        name: "cpu-frequency",
        group: "system",
        words: "Do the processors run at full speed when they are needed?",
        asks: Asks::Files,
        judge: host::cpu_frequency,
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
            let finding = if sight.facts.files_only && question.asks == Asks::Machine {
                Finding::unknown(NOT_ASKED)
            } else {
                (question.judge)(sight)
            };
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
