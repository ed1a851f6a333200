//! What NCCL would choose on a machine, and why: what `explain` tells.

use serde::{Deserialize, Serialize};

use super::SetLine;
use crate::collective::Collective;

/// The whole answer.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Explanation {
    /// [`super::FORMAT`].
    pub format: u32,
    /// SIMULATED where the machine is not this one, or not real.
    pub labels: Vec<String>,
    /// The machine, for people.
    pub machine: String,
    /// GPUs that take part, one rank on each.
    pub ranks: u32,
    /// Whose choices are predicted.
    pub nccl: ExplainedRelease,
    /// Which collective.
    pub collective: Collective,
    /// Where the sizes come from, in words.
    pub sizes_origin: String,
    /// What NCCL's search for channels comes to, by the model.
    pub graphs: Vec<ExplainedGraph>,
    /// Channels of the communicator, by the model; nothing where it has no answer.
    pub communicator_channels: Option<u32>,
    /// How data is exchanged between pairs of GPUs, by the model: "P2P", "SHM" or both.
    pub transports: Vec<String>,
    /// Why the machine is seen as it is, worst first.
    pub findings: Vec<String>,
    /// What could not be read and what is assumed in its place, and what else to know.
    pub notes: Vec<String>,
    /// One for each size.
    pub sizes: Vec<ExplainedSize>,
    /// One for each variable.
    pub variables: Vec<ExplainedVariable>,
    /// What NCCL itself logged, where it ran.
    pub log: Option<ExplainedLog>,
}

/// The release of NCCL whose choices are predicted.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ExplainedRelease {
    /// As asked for, or as found.
    pub version: String,
    /// The release whose rules were used: another only where those of the wanted one are not known.
    pub rules: String,
}

/// What a search for channels came to.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ExplainedGraph {
    /// What was searched for ("ring").
    pub pattern: String,
    /// Channels found, before NCCL doubles them.
    pub channels: u32,
    /// Gigabytes per second of each.
    pub channel_gb_per_s: f64,
    /// The longest kind of path it allows ("PHB").
    pub path: String,
    /// Whether nothing fitted, and NCCL goes on with the ranks in plain order at 0.1 GB/s.
    pub fallback: bool,
}

/// A choice.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ExplainedChoice {
    /// Algorithm, lower case.
    pub algo: String,
    /// Protocol, lower case.
    pub proto: String,
    /// Channels that carry the message.
    pub channels: u32,
    /// Threads of each.
    pub threads: u32,
    /// NCCL's own prediction, in microseconds.
    pub predicted_us: f64,
}

/// What came second.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ExplainedRunnerUp {
    /// Algorithm, lower case.
    pub algo: String,
    /// Protocol, lower case.
    pub proto: String,
    /// NCCL's own prediction, in microseconds.
    pub predicted_us: f64,
}

/// What is chosen for one size.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ExplainedSize {
    /// Bytes of the message.
    pub bytes: u64,
    /// Algorithm, lower case; nothing where there is no choice.
    pub algo: Option<String>,
    /// Protocol, lower case.
    pub proto: Option<String>,
    /// Channels that carry the message.
    pub channels: Option<u32>,
    /// Threads of each.
    pub threads: Option<u32>,
    /// NCCL's own prediction, in microseconds.
    pub predicted_us: Option<f64>,
    /// What came second, where there was a second.
    pub runner_up: Option<ExplainedRunnerUp>,
    /// Why there is no choice.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub problem: Option<String>,
    /// What each variable does here.
    pub effects: Vec<ExplainedEffect>,
    /// What NCCL logged for this size, where it ran.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub logged: Option<LoggedSize>,
}

/// What a variable does to the choice for one size.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ExplainedEffect {
    /// The variable.
    pub variable: String,
    /// What kind of effect.
    pub effect: EffectKind,
    /// Why, or what.
    pub reason: String,
    /// What is chosen without the variable, where that differs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub without: Option<ExplainedChoice>,
}

/// Kinds of effect.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum EffectKind {
    /// The choice, or NCCL's prediction for it, is another without the variable.
    Changes,
    /// The choice is the same; how long it takes may not be.
    TimeOnly,
    /// Nothing changes.
    None,
    /// The model cannot tell.
    Unknown,
}

impl EffectKind {
    /// The name in files and tables.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Changes => "changes",
            Self::TimeOnly => "time-only",
            Self::None => "none",
            Self::Unknown => "unknown",
        }
    }
}

/// A variable in force.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ExplainedVariable {
    /// Its name.
    pub variable: String,
    /// Its text.
    pub value: String,
    /// Where it comes from.
    pub origin: VariableOrigin,
    /// Sizes at which it changes something.
    pub changed_sizes: u32,
    /// What it does, in a sentence.
    pub summary: String,
}

/// Who set a variable.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum VariableOrigin {
    /// `--env`.
    Named,
    /// `--env-file`.
    EnvFile,
    /// It was set where the tool was started.
    Inherited,
    /// `~/.nccl.conf` or `$NCCL_CONF_FILE`.
    UserConf,
    /// `/etc/nccl.conf`.
    SystemConf,
}

impl VariableOrigin {
    /// Where it comes from, in words.
    pub const fn words(self) -> &'static str {
        match self {
            Self::Named => "--env",
            Self::EnvFile => "--env-file",
            Self::Inherited => "this shell",
            Self::UserConf => "your NCCL configuration file",
            Self::SystemConf => "/etc/nccl.conf",
        }
    }
}

/// What NCCL logged for one size.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct LoggedSize {
    /// Algorithm, lower case.
    pub algo: Option<String>,
    /// Protocol, lower case.
    pub proto: Option<String>,
    /// Channels that carried the message, where the release logs them.
    pub channels: Option<u32>,
    /// Whether the model says the same; nothing where one of the two has no answer.
    pub agrees: Option<bool>,
}

/// What NCCL logged of one launch.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ExplainedLog {
    /// The library that ran.
    pub version: String,
    /// Sizes at which model and log agree.
    pub agreeing_sizes: u32,
    /// Sizes at which both have an answer.
    pub compared_sizes: u32,
    /// Channels of the communicator.
    pub communicator_channels: Option<u32>,
    /// Transports between ranks.
    pub transport: Option<String>,
    /// What its search for channels came to.
    pub graphs: Vec<ExplainedGraph>,
    /// Whether the log says that some search found nothing and ranks stay in simple order.
    pub fell_back_to_simple_order: bool,
    /// What differs from the model in searches, channels and transports.
    pub differences: Vec<String>,
    /// "set by environment" lines that every rank wrote.
    pub set_by_environment: Vec<SetLine>,
    /// Variables without such a line, where one was due: NCCL did not read them.
    pub unread: Vec<String>,
    /// Why the launch did not come to its end.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub failure: Option<String>,
}
