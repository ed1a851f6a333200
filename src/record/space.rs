//! A search space as it stands in a file.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::file_kind::FileKind;

/// Axes, named arms and rules. "unset" is a value like any other.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Space {
    /// Format of this record.
    pub format: u32,
    /// Short name.
    pub name: String,
    /// One sentence: for which machines and for what.
    pub description: String,
    /// The grid: one axis per variable.
    #[serde(default)]
    pub axis: Vec<Axis>,
    /// Arms outside the grid, measured as they stand.
    #[serde(default)]
    pub arm: Vec<NamedArm>,
    /// Which grid combinations are left out.
    #[serde(default)]
    pub rule: Vec<Rule>,
}

/// One variable and the values to try.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Axis {
    /// The NCCL variable.
    pub variable: String,
    /// Values as written; sizes may carry a suffix, "unset" leaves the variable alone.
    pub values: Vec<String>,
}

/// A fixed set of variables, such as a recipe that people copy.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct NamedArm {
    /// Its name in tables.
    pub name: String,
    /// Where it comes from, in a sentence.
    #[serde(default)]
    pub note: String,
    /// The variables.
    #[serde(default)]
    pub env: BTreeMap<String, String>,
    /// Files beside them, by path; one that is not absolute lies beside the space's own file.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub files: BTreeMap<FileKind, String>,
}

/// A constraint on grid combinations.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Rule {
    /// Why, in a sentence; shown when the rule leaves something out.
    pub reason: String,
    /// The combination the rule speaks of: every condition must hold.
    pub when: BTreeMap<String, RuleCondition>,
    /// What must then hold as well; a rule without it forbids the combination.
    #[serde(default)]
    pub require: BTreeMap<String, RuleCondition>,
}

/// What a rule asks of one variable.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum RuleCondition {
    /// One value; "set" and "unset" are understood.
    One(String),
    /// Any of several.
    AnyOf(Vec<String>),
}
