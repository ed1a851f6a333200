//! Search spaces: files that people write, and the arms they yield.
//!
//! A file names axes (a variable and its values, "unset" among them), named arms, and rules that
//! leave combinations out. Values are written for people and come out as NCCL must read them; what
//! this NCCL cannot read, what a pin already decides and what is risky is left out with a notice.

use std::collections::{BTreeMap, BTreeSet, BinaryHeap};
use std::path::{Path, PathBuf};

use itertools::Itertools;

use crate::canonical::Fingerprint;
use crate::error_kind::{Classified, ErrorKind};
use crate::file_kind::FileKind;
use crate::knob::{self, Risk, Severity};
use crate::machine::NcclVersion;
use crate::record::{Arm, ArmId, FORMAT, RuleCondition, Space};
use crate::units::nearest_name;

/// Spaces that are compiled in, by name.
const SPACES: [(&str, &str); 5] = [
    ("pcie-decode", include_str!("../search-spaces/pcie-decode.toml")),
    ("pcie-throughput", include_str!("../search-spaces/pcie-throughput.toml")),
    ("nvlink", include_str!("../search-spaces/nvlink.toml")),
    ("host-memory", include_str!("../search-spaces/host-memory.toml")),
    ("baseline", include_str!("../search-spaces/baseline.toml")),
];

/// The value that leaves a variable alone.
pub const UNSET: &str = "unset";
/// The condition that any value but [`UNSET`] meets.
const SET: &str = "set";
/// Beside the names of risks that are taken: peer access across the host bridge was shown to work here, or
/// is to be tried as if it were.
pub const PEER_ACCESS: &str = "peer-access";
/// What [`enumerate`] says of settings that wait for that. Whoever knows why says it in its place.
pub const NO_PEER_ACCESS: &str = "NCCL_P2P_LEVEL is left out: peer access was not shown to work here";
/// Largest file that is read.
const MAX_BYTES: usize = 1 << 20;
/// Longest name of an arm.
const NAME_CHARACTERS: usize = 200;
/// Most combinations that are enumerated, rules or not: they are looked at one by one and never held at once.
const MAX_COMBINATIONS: usize = 4_000_000;
/// Most arms that a run holds. Of a larger space those with the fewest settings: every setting alone, then
/// pairs, as far as they go.
pub const MOST_ARMS: usize = 4096;

/// Variables that have no effect while another has this value: (variable, shadowed by, value).
const SHADOWED: [(&str, &str, &str); 1] = [("NCCL_P2P_LEVEL", "NCCL_P2P_DISABLE", "1")];

/// What is wrong with a space.
#[derive(Debug, thiserror::Error)]
pub enum SpaceError {
    /// Not TOML, or not this form; the text names line and column.
    #[error("{file}: {reason}")]
    Syntax {
        /// The file.
        file: String,
        /// The parser's words.
        reason: String,
    },
    /// A variable nobody knows.
    #[error("{file}, line {line}: unknown variable {variable}{}", did_you_mean(nearest.as_deref()))]
    UnknownVariable {
        /// The file.
        file: String,
        /// Line number.
        line: usize,
        /// What was written.
        variable: String,
        /// What may have been meant.
        nearest: Option<String>,
    },
    /// A value that cannot be meant.
    #[error("{file}, line {line}: {variable}: {reason}")]
    Value {
        /// The file.
        file: String,
        /// Line number.
        line: usize,
        /// The variable.
        variable: String,
        /// What is wrong with the value.
        reason: String,
    },
    /// The space contradicts itself or yields nothing.
    #[error("{file}: {reason}")]
    Contradiction {
        /// The file.
        file: String,
        /// In words.
        reason: String,
    },
    /// No such file or name.
    #[error("there is no search space {name:?}, neither compiled in ({known}) nor as a file")]
    Unknown {
        /// What was asked for.
        name: String,
        /// What there is.
        known: String,
    },
    /// Two pins that exclude each other.
    #[error("{0}")]
    Pins(String),
}

fn did_you_mean(name: Option<&str>) -> String {
    name.map(|name| format!("; did you mean {name}?")).unwrap_or_default()
}

impl Classified for SpaceError {
    fn kind(&self) -> ErrorKind {
        ErrorKind::Usage
    }
}

/// The text of a compiled-in space.
pub fn named(name: &str) -> Option<&'static str> {
    SPACES.iter().find(|(known, _)| *known == name).map(|(_, text)| *text)
}

/// Names of the compiled-in spaces.
pub fn names() -> impl Iterator<Item = &'static str> {
    SPACES.iter().map(|(name, _)| *name)
}

/// The error for a name that is neither compiled in nor a file.
pub fn unknown(name: &str) -> SpaceError {
    SpaceError::Unknown { name: name.to_owned(), known: names().join(", ") }
}

/// Reads a space. Values come out as they will be emitted.
pub fn parse(text: &str, file: &str) -> Result<Space, SpaceError> {
    let syntax = |reason: String| SpaceError::Syntax { file: file.to_owned(), reason };
    if text.len() > MAX_BYTES {
        return Err(syntax(format!("larger than {MAX_BYTES} bytes")));
    }
    let mut space: Space = toml::from_str(text).map_err(|error| syntax(error.to_string().trim_end().to_owned()))?;
    if space.format != FORMAT {
        return Err(syntax(format!("format {}; this version reads format {FORMAT}", space.format)));
    }
    let reader = Reader { text, file };
    let contradiction = |reason: String| SpaceError::Contradiction { file: file.to_owned(), reason };
    let mut seen = BTreeSet::new();
    for axis in &mut space.axis {
        reader.require_known(&axis.variable)?;
        if !seen.insert(axis.variable.clone()) {
            return Err(contradiction(format!("{} has two axes", axis.variable)));
        }
        for value in &mut axis.values {
            *value = reader.value(&axis.variable, value)?;
        }
        if axis.values.is_empty() || !axis.values.iter().all_unique() {
            return Err(contradiction(format!("the values of {} must be there and differ", axis.variable)));
        }
    }
    for arm in &mut space.arm {
        let mut env = BTreeMap::new();
        for (variable, value) in &arm.env {
            reader.require_known(variable)?;
            let value = reader.value(variable, value)?;
            if value != UNSET {
                env.insert(variable.clone(), value);
            }
        }
        if let Some(reason) = conflict(&env) {
            return Err(contradiction(format!("arm {:?}: {reason}", arm.name)));
        }
        let set_too = |kind: &FileKind| set_by(*kind).find(|variable| env.contains_key(*variable));
        if let Some((kind, variable)) = arm.files.keys().find_map(|kind| Some((kind, set_too(kind)?))) {
            let name = &arm.name;
            return Err(contradiction(format!("arm {name:?} has a {} and sets {variable} too", kind.words())));
        }
        arm.env = env;
    }
    if let Some(arm) = space.arm.iter().find(|arm| !is_showable(&arm.name)) {
        let start: String = arm.name.chars().take(40).collect();
        return Err(contradiction(format!(
            "the name of arm {start:?} holds what cannot be shown in a line, or more than {NAME_CHARACTERS} characters"
        )));
    }
    if let Some(arm) = space.arm.iter().duplicates_by(|arm| &arm.name).next() {
        return Err(contradiction(format!("two arms are named {:?}", arm.name)));
    }
    let axes: BTreeSet<String> = space.axis.iter().map(|axis| axis.variable.clone()).collect();
    for rule in &mut space.rule {
        for (variable, condition) in rule.when.iter_mut().chain(rule.require.iter_mut()) {
            reader.require_known(variable)?;
            if !axes.contains(variable) {
                return Err(contradiction(format!("a rule speaks of {variable}, which is no axis")));
            }
            let values = match condition {
                RuleCondition::One(value) => std::slice::from_mut(value),
                RuleCondition::AnyOf(values) => values.as_mut_slice(),
            };
            for value in values.iter_mut().filter(|value| *value != SET) {
                *value = reader.value(variable, value)?;
            }
        }
        if rule.when.is_empty() {
            return Err(contradiction(format!("the rule {:?} has no condition", rule.reason)));
        }
    }
    if space.axis.is_empty() && space.arm.is_empty() {
        return Err(contradiction("an empty space: neither an axis nor an arm".to_owned()));
    }
    Ok(space)
}

struct Reader<'a> {
    text: &'a str,
    file: &'a str,
}

impl Reader<'_> {
    /// The first line that holds this text. The TOML parser gives positions for syntax only.
    fn line_of(&self, needle: &str) -> usize {
        self.text
            .lines()
            .position(|line| !line.trim_start().starts_with('#') && line.contains(needle))
            .map_or(0, |index| index + 1)
    }

    fn require_known(&self, variable: &str) -> Result<(), SpaceError> {
        if knob::find(variable).is_some() {
            return Ok(());
        }
        Err(SpaceError::UnknownVariable {
            file: self.file.to_owned(),
            line: self.line_of(variable),
            variable: variable.to_owned(),
            nearest: nearest_name(variable, knob::all().iter().map(|knob| knob.name)).map(str::to_owned),
        })
    }

    fn value(&self, variable: &str, value: &str) -> Result<String, SpaceError> {
        if value == UNSET {
            return Ok(UNSET.to_owned());
        }
        knob::canonical_value(variable, value).map_err(|error| SpaceError::Value {
            file: self.file.to_owned(),
            line: self.line_of(value).max(self.line_of(variable)),
            variable: variable.to_owned(),
            reason: error.to_string(),
        })
    }
}

/// The arms of a space on a machine, and what was left out.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Enumeration {
    /// The default first, then named arms, then the grid.
    pub arms: Vec<Arm>,
    /// Arms of the whole space; more than `arms` where it is too large for one run.
    pub total: usize,
    /// What was left out and why, in words.
    pub notices: Vec<String>,
}

/// Which arms to measure: the grid without what rules, pins, this NCCL and untaken risks exclude,
/// the named arms, and always the default. Files of named arms must stand by SHA-256 here, not by path:
/// what an arm is depends on what a file holds, and on nothing else of it.
pub fn enumerate(
    space: &Space,
    pins: &BTreeMap<String, String>,
    version: NcclVersion,
    allowed_risks: &BTreeSet<String>,
) -> Result<Enumeration, SpaceError> {
    if let Some(reason) = conflict(pins) {
        return Err(SpaceError::Pins(format!("the fixed settings contradict each other: {reason}")));
    }
    let contradiction = |reason: String| SpaceError::Contradiction { file: space.name.clone(), reason };
    let mut notices = Vec::new();
    let mut axes: Vec<(&str, Vec<&str>)> = Vec::new();
    for axis in &space.axis {
        let variable = axis.variable.as_str();
        if let Some(value) = pins.get(variable) {
            notices.push(format!("{variable} is fixed at {value}: its axis is left out"));
            continue;
        }
        if let Some((_, by, value)) = SHADOWED
            .iter()
            .find(|(shadowed, by, value)| *shadowed == variable && pins.get(*by).is_some_and(|pin| pin == value))
        {
            notices.push(format!("{variable} has no effect while {by}={value}: its axis is left out"));
            continue;
        }
        let values: Vec<&str> = axis
            .values
            .iter()
            .map(String::as_str)
            .filter(|value| *value == UNSET || is_usable(variable, value, version, allowed_risks, &mut notices))
            .collect();
        if values.is_empty() {
            return Err(contradiction(format!("no value of {variable} is left; add \"unset\"")));
        }
        axes.push((variable, values));
    }
    let combinations = axes.iter().try_fold(1_usize, |product, (_, values)| {
        product.checked_mul(values.len()).filter(|product| *product <= MAX_COMBINATIONS)
    });
    if combinations.is_none() {
        return Err(contradiction(format!("the grid has more than {MAX_COMBINATIONS} combinations")));
    }
    let none = BTreeMap::new;
    let mut arms = vec![arm("default", BTreeMap::new(), none())];
    for named in &space.arm {
        let mut env = named.env.clone();
        let fixed = env.iter().find(|(variable, value)| pins.get(*variable).is_some_and(|pin| pin != *value));
        let pointed = named.files.keys().flat_map(|kind| set_by(*kind)).find(|variable| pins.contains_key(*variable));
        if let Some(variable) = fixed.map(|(variable, _)| variable.as_str()).or(pointed) {
            notices.push(format!("{variable} is fixed: arm {:?} is left out", named.name));
            continue;
        }
        env.retain(|variable, _| !pins.contains_key(variable));
        if let Some(reason) = shadowed(&env, pins) {
            notices.push(format!("arm {:?} is left out: {reason}", named.name));
            continue;
        }
        if !env.iter().all(|(variable, value)| is_usable(variable, value, version, allowed_risks, &mut notices)) {
            notices.push(format!("arm {:?} is left out", named.name));
            continue;
        }
        arms.push(arm(&named.name, env, named.files.clone()));
    }
    let mut left_out: BTreeMap<&str, usize> = BTreeMap::new();
    let mut beside_pins: BTreeMap<String, usize> = BTreeMap::new();
    // Few settings first, then the order of the file; the last of them goes where there are too many. What is
    // held is bounded: an arm is named and fingerprinted only once it is known to stay.
    let room = MOST_ARMS.saturating_sub(arms.len());
    let mut kept: BinaryHeap<(usize, usize, BTreeMap<String, String>)> = BinaryHeap::new();
    let mut of_grid = 0_usize;
    let values = axes.iter().map(|(variable, values)| values.iter().map(move |value| (*variable, *value)));
    let grid = values.multi_cartesian_product().take(if axes.is_empty() { 0 } else { MAX_COMBINATIONS });
    for combination in grid {
        let broken = space.rule.iter().find(|rule| {
            let holds = |conditions: &BTreeMap<String, RuleCondition>| {
                conditions.iter().all(|(variable, condition)| meets(&combination, variable, condition))
            };
            holds(&rule.when) && (rule.require.is_empty() || !holds(&rule.require))
        });
        if let Some(rule) = broken {
            *left_out.entry(&rule.reason).or_default() += 1;
            continue;
        }
        let env: BTreeMap<String, String> = combination
            .into_iter()
            .filter(|(_, value)| *value != UNSET)
            .map(|(variable, value)| (variable.to_owned(), value.to_owned()))
            .collect();
        if let Some(reason) = shadowed(&env, pins) {
            *beside_pins.entry(reason).or_default() += 1;
            continue;
        }
        if env.is_empty() || conflict(&env).is_some() {
            continue;
        }
        of_grid += 1;
        kept.push((env.len(), of_grid, env));
        if kept.len() > room {
            kept.pop();
        }
    }
    let is_bounded = of_grid > kept.len();
    let in_order = kept.into_vec().into_iter().sorted_by_key(|(_, position, _)| *position);
    arms.extend(in_order.map(|(_, _, env)| arm(&grid_name(&env), env, none())));
    for (reason, count) in beside_pins {
        notices.push(format!("{count} combinations left out: {reason}"));
    }
    for (reason, count) in left_out {
        notices.push(format!("{count} combinations left out: {reason}"));
    }
    // The first of equals stays: the default, then the name people know.
    let arms: Vec<Arm> = arms.into_iter().unique_by(|arm| arm.id.clone()).collect();
    let wants_default_only =
        space.axis.is_empty() && space.arm.iter().all(|arm| arm.env.is_empty() && arm.files.is_empty());
    if arms.len() < 2 && !wants_default_only {
        return Err(contradiction(format!("nothing is left to measure beside the default ({})", notices.join("; "))));
    }
    if arms.len() > MOST_ARMS {
        return Err(contradiction(format!("{} named arms; at most {MOST_ARMS} with the default", arms.len() - 1)));
    }
    let total = 1 + space.arm.len() + of_grid;
    if is_bounded {
        notices.push(format!(
            "the space has {total} arms: the {} with the fewest settings are in this run, the others are not tried",
            arms.len()
        ));
    }
    let total = if is_bounded { total } else { arms.len() };
    Ok(Enumeration { arms, total, notices: notices.into_iter().unique().collect() })
}

/// Whether this NCCL reads the value as it is meant, and its risk is taken.
fn is_usable(
    variable: &str,
    value: &str,
    version: NcclVersion,
    allowed_risks: &BTreeSet<String>,
    notices: &mut Vec<String>,
) -> bool {
    let Some(knob) = knob::find(variable) else { return false };
    if !knob.is_read_by(version) {
        notices.push(format!("{variable} is not read by NCCL {version}: left out"));
        return false;
    }
    if let Some(problem) = knob::read_as_nccl(variable, value, version).problem()
        && problem.severity == Severity::Error
    {
        notices.push(format!("{variable}={value} is left out on NCCL {version}: {}", problem.message));
        return false;
    }
    if let Some(harm) = knob::harm_to_others(variable, value, version) {
        notices.push(format!("{variable}={value} is left out: {harm}"));
        return false;
    }
    let risk = knob.risk_of(value);
    if knob::needs_peer_access(variable, value) {
        let may = [PEER_ACCESS, Risk::HangProne.name()].iter().any(|name| allowed_risks.contains(*name));
        if !may {
            notices.push(NO_PEER_ACCESS.to_owned());
        }
        return may;
    }
    if risk != Risk::None && !allowed_risks.contains(risk.name()) {
        notices.push(format!("{variable}={value} is left out: risk {} (take it with --allow-risk {0})", risk.name()));
        return false;
    }
    true
}

fn meets(combination: &[(&str, &str)], variable: &str, condition: &RuleCondition) -> bool {
    // An axis that was pruned is decided elsewhere; the rule sees it as unset.
    let value = combination.iter().find(|(known, _)| *known == variable).map_or(UNSET, |(_, value)| *value);
    let one = |wanted: &String| if wanted == SET { value != UNSET } else { wanted == value };
    match condition {
        RuleCondition::One(wanted) => one(wanted),
        RuleCondition::AnyOf(wanted) => wanted.iter().any(one),
    }
}

/// Why these settings cannot stand together.
fn conflict(env: &BTreeMap<String, String>) -> Option<String> {
    let number = |variable: &str| env.get(variable).and_then(|text| text.parse::<i64>().ok());
    for (low, high) in [("NCCL_MIN_NCHANNELS", "NCCL_MAX_NCHANNELS"), ("NCCL_MIN_CTAS", "NCCL_MAX_CTAS")] {
        if let (Some(low_value), Some(high_value)) = (number(low), number(high))
            && low_value > high_value
        {
            return Some(format!("{low}={low_value} is above {high}={high_value}"));
        }
    }
    SHADOWED.iter().find_map(|(variable, by, value)| {
        (env.contains_key(*variable) && env.get(*by).is_some_and(|set| set == value))
            .then(|| format!("{variable} has no effect beside {by}={value}"))
    })
}

/// Why an arm cannot stand beside what holds in every arm: one of the two would never be read.
fn shadowed(env: &BTreeMap<String, String>, pins: &BTreeMap<String, String>) -> Option<String> {
    SHADOWED.iter().find_map(|(variable, by, value)| {
        let sets = |map: &BTreeMap<String, String>| map.get(*by).is_some_and(|set| set == value);
        let meet = env.contains_key(*variable) && sets(pins) || pins.contains_key(*variable) && sets(env);
        meet.then(|| format!("{variable} has no effect beside {by}={value}"))
    })
}

/// The arm of a set of variables, named by what it sets; without variables the default.
pub fn arm_of(env: BTreeMap<String, String>) -> Arm {
    let name = if env.is_empty() { "default".to_owned() } else { grid_name(&env) };
    arm(&name, env, BTreeMap::new())
}

/// Whether a name stands in a line of a table as it is: nothing that steers a terminal or turns the direction.
fn is_showable(name: &str) -> bool {
    let steers = |character: char| {
        character.is_control() || matches!(character, '\u{2028}'..='\u{202e}' | '\u{2066}'..='\u{2069}')
    };
    name.chars().count() <= NAME_CHARACTERS && !name.chars().any(steers)
}

/// An arm, named by what it sets and by what its files hold: their SHA-256 stands here, never a path, so
/// that an arm is the same in a run directory that was moved.
pub fn arm(name: &str, env: BTreeMap<String, String>, files: BTreeMap<FileKind, String>) -> Arm {
    let server_args: Vec<String> = Vec::new();
    let identity = serde_json::json!({ "env": &env, "files": &files, "server_args": &server_args });
    let id = ArmId(Fingerprint::of(&identity).short().to_owned());
    Arm { id, name: name.to_owned(), env, files, server_args }
}

/// Everything an arm sets. A variable that points at one of its files names the file as it is called in a
/// run directory: whoever starts a process puts the directory before it ([`file_in`]).
pub fn variables(arm: &Arm) -> BTreeMap<String, String> {
    let mut variables = arm.env.clone();
    for (kind, sha256) in &arm.files {
        variables.insert(kind.variable().to_owned(), kind.file_name(sha256));
        variables.extend(kind.companion().map(|(variable, file)| (variable.to_owned(), file.to_owned())));
    }
    variables
}

/// The variables that a file of this kind sets.
fn set_by(kind: FileKind) -> impl Iterator<Item = &'static str> {
    std::iter::once(kind.variable()).chain(kind.companion().map(|(variable, _)| variable))
}

/// An arm without its tuner table: what a server runs with that does not find the plugin, which NCCL ignores
/// in silence. None where it has no table.
pub fn without_table(arm: &Arm) -> Option<Arm> {
    let mut files = arm.files.clone();
    files.remove(&FileKind::TunerTable)?;
    Some(self::arm(&arm.name, arm.env.clone(), files))
}

/// The file of a run directory that a variable of [`variables`] points at; none where the value is a value.
pub fn file_in(directory: &Path, variable: &str, value: &str) -> Option<PathBuf> {
    let is_companion = FileKind::ALL.iter().any(|kind| kind.companion() == Some((variable, value)));
    if !is_companion {
        FileKind::of_variable(variable)?.sha256_of(value)?;
    }
    Some(directory.join(value))
}

/// A grid arm is named by what it sets.
fn grid_name(env: &BTreeMap<String, String>) -> String {
    env.iter()
        .map(|(variable, value)| format!("{}={value}", variable.strip_prefix("NCCL_").unwrap_or(variable)))
        .join(" ")
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const NEW: NcclVersion = NcclVersion::v2(28, 9);

    fn all(text: &str) -> Enumeration {
        enumerate(&parse(text, "test.toml").unwrap(), &BTreeMap::new(), NEW, &BTreeSet::new()).unwrap()
    }

    fn head() -> String {
        "format = 1\nname = \"t\"\ndescription = \"d\"\n".to_owned()
    }

    #[test]
    fn compiled_in_spaces_are_valid_on_old_and_new_nccl() {
        for name in names() {
            let space = parse(named(name).unwrap(), name).unwrap();
            assert_eq!(space.name, name);
            for version in [NEW, NcclVersion::v2(21, 5), NcclVersion::v2(30, 7)] {
                let arms = enumerate(&space, &BTreeMap::new(), version, &BTreeSet::new()).unwrap().arms;
                assert!(arms[0].env.is_empty(), "the default comes first");
                assert!(arms.iter().map(|arm| &arm.id).all_unique());
            }
        }
    }

    #[test]
    fn no_arm_asks_for_multicast_and_spaces_stay_small() {
        for name in names() {
            let space = parse(named(name).unwrap(), name).unwrap();
            let arms = enumerate(&space, &BTreeMap::new(), NEW, &BTreeSet::new()).unwrap().arms;
            assert!(arms.len() <= 80, "{name}: {} arms", arms.len());
            for arm in &arms {
                let asks = arm.env.iter().any(|(variable, value)| variable.contains("NVLS") || value.contains("NVLS"));
                assert!(!asks, "{name}: {}", arm.name);
            }
        }
    }

    #[test]
    fn suffixes_are_understood_and_plain_decimals_come_out() {
        let text = head() + "[[axis]]\nvariable = \"NCCL_BUFFSIZE\"\nvalues = [\"unset\", \"1MiB\"]\n";
        let arms = all(&text).arms;
        assert_eq!(arms.len(), 2);
        assert_eq!(arms[1].env["NCCL_BUFFSIZE"], "1048576");
        assert_eq!(arms[1].name, "BUFFSIZE=1048576");
    }

    #[test]
    fn rules_forbid_and_require() {
        let text = head()
            + "[[axis]]\nvariable = \"NCCL_MIN_NCHANNELS\"\nvalues = [\"unset\", \"16\"]\n\
               [[axis]]\nvariable = \"NCCL_NTHREADS\"\nvalues = [\"unset\", \"128\", \"256\"]\n\
               [[rule]]\nreason = \"a\"\nwhen = { NCCL_NTHREADS = \"set\" }\nrequire = { NCCL_MIN_NCHANNELS = \"16\" }\n\
               [[rule]]\nreason = \"b\"\nwhen = { NCCL_NTHREADS = [\"128\"], NCCL_MIN_NCHANNELS = \"set\" }\n";
        let enumeration = all(&text);
        let names: Vec<&str> = enumeration.arms.iter().map(|arm| arm.name.as_str()).collect();
        assert_eq!(names, ["default", "MIN_NCHANNELS=16", "MIN_NCHANNELS=16 NTHREADS=256"]);
        assert_eq!(enumeration.notices, ["2 combinations left out: a", "1 combinations left out: b"]);
    }

    #[test]
    fn pins_prune_axes_and_only_contradictory_pins_are_errors() {
        let text = head()
            + "[[axis]]\nvariable = \"NCCL_MIN_NCHANNELS\"\nvalues = [\"unset\", \"16\"]\n\
               [[axis]]\nvariable = \"NCCL_P2P_LEVEL\"\nvalues = [\"unset\", \"PXB\"]\n";
        let space = parse(&text, "t").unwrap();
        let pin = |name: &str, value: &str| (name.to_owned(), value.to_owned());
        let none = BTreeSet::new();
        let pins = BTreeMap::from([pin("NCCL_P2P_DISABLE", "1")]);
        let pruned = enumerate(&space, &pins, NEW, &none).unwrap();
        assert_eq!(pruned.arms.len(), 2);
        assert!(pruned.notices[0].contains("NCCL_P2P_LEVEL has no effect"), "{:?}", pruned.notices);
        let both = BTreeMap::from([pin("NCCL_P2P_DISABLE", "1"), pin("NCCL_P2P_LEVEL", "PXB")]);
        assert!(matches!(enumerate(&space, &both, NEW, &none), Err(SpaceError::Pins(_))));
        let fixed = BTreeMap::from([pin("NCCL_MIN_NCHANNELS", "8"), pin("NCCL_P2P_DISABLE", "1")]);
        let error = enumerate(&space, &fixed, NEW, &none).unwrap_err();
        assert!(error.to_string().contains("nothing is left"), "{error}");
    }

    #[test]
    fn an_arm_is_named_by_what_its_file_holds() {
        let text = head() + "[[arm]]\nname = \"ring\"\nfiles = { graph = \"ring.xml\" }\n";
        let space = parse(&text, "t").unwrap();
        let with = |sha256: &str, pins: &BTreeMap<String, String>| {
            let mut space = space.clone();
            space.arm[0].files.insert(FileKind::Graph, sha256.to_owned());
            enumerate(&space, pins, NEW, &BTreeSet::new())
        };
        let (one, other) = ("1".repeat(64), "2".repeat(64));
        let none = BTreeMap::new();
        let arms = with(&one, &none).unwrap().arms;
        assert_eq!(arms[1].files, BTreeMap::from([(FileKind::Graph, one.clone())]));
        assert_ne!(arms[1].id, arms[0].id);
        assert_ne!(arms[1].id, with(&other, &none).unwrap().arms[1].id);
        let name = format!("graph-{one}.xml");
        assert_eq!(variables(&arms[1]), BTreeMap::from([("NCCL_GRAPH_FILE".to_owned(), name.clone())]));
        let folder = Path::new("/srv/run");
        assert_eq!(file_in(folder, "NCCL_GRAPH_FILE", &name), Some(folder.join(&name)));
        for (variable, value) in [("NCCL_TOPO_FILE", name.as_str()), ("NCCL_GRAPH_FILE", "/etc/ring.xml")] {
            assert_eq!(file_in(folder, variable, value), None);
        }
        let pins = BTreeMap::from([("NCCL_GRAPH_FILE".to_owned(), "/etc/ring.xml".to_owned())]);
        assert!(with(&one, &pins).unwrap_err().to_string().contains("NCCL_GRAPH_FILE is fixed"));
    }

    #[test]
    fn a_level_and_a_disable_never_stand_together_wherever_each_comes_from() {
        let pin = |name: &str, value: &str| BTreeMap::from([(name.to_owned(), value.to_owned())]);
        let bold = BTreeSet::from([PEER_ACCESS.to_owned()]);
        let both = head()
            + "[[axis]]\nvariable = \"NCCL_P2P_DISABLE\"\nvalues = [\"unset\", \"0\", \"1\"]\n\
               [[axis]]\nvariable = \"NCCL_P2P_LEVEL\"\nvalues = [\"unset\", \"PHB\", \"SYS\"]\n\
               [[arm]]\nname = \"off\"\nenv = { NCCL_P2P_DISABLE = \"1\" }\n";
        let space = parse(&both, "t").unwrap();
        let stand_together = |env: &BTreeMap<String, String>| {
            env.contains_key("NCCL_P2P_LEVEL") && env.get("NCCL_P2P_DISABLE").is_some_and(|value| value == "1")
        };
        for pins in
            [BTreeMap::new(), pin("NCCL_P2P_LEVEL", "SYS"), pin("NCCL_P2P_DISABLE", "1"), pin("NCCL_P2P_DISABLE", "0")]
        {
            let enumeration = enumerate(&space, &pins, NEW, &bold);
            let Ok(enumeration) = enumeration else {
                assert_eq!(pins.get("NCCL_P2P_DISABLE").map(String::as_str), Some("1"), "nothing is left then");
                continue;
            };
            for arm in &enumeration.arms {
                let mut all = pins.clone();
                all.extend(arm.env.clone());
                assert!(!stand_together(&all), "{pins:?}: {arm:?}");
            }
            if pins.contains_key("NCCL_P2P_LEVEL") {
                let off = |notice: &String| notice.contains("has no effect beside NCCL_P2P_DISABLE=1");
                assert_eq!(
                    enumeration.notices.iter().filter(|notice| off(notice)).count(),
                    2,
                    "{:?}",
                    enumeration.notices
                );
            }
        }
        assert_eq!(enumerate(&space, &BTreeMap::new(), NEW, &bold).unwrap().arms.len(), 7);
    }

    #[test]
    fn peer_access_waits_for_its_proof_or_for_a_risk_taken_by_name() {
        let text =
            head() + "[[axis]]\nvariable = \"NCCL_P2P_LEVEL\"\nvalues = [\"unset\", \"PXB\", \"PHB\", \"SYS\"]\n";
        let space = parse(&text, "t").unwrap();
        let with = |risks: &[&str]| {
            let risks = risks.iter().map(|risk| (*risk).to_owned()).collect();
            enumerate(&space, &BTreeMap::new(), NEW, &risks).unwrap()
        };
        let cautious = with(&[]);
        assert_eq!(cautious.arms.len(), 2, "a switch below the host bridge is no such thing");
        assert_eq!(cautious.notices, [NO_PEER_ACCESS], "once, however many values wait");
        assert_eq!((with(&[PEER_ACCESS]).arms.len(), with(&["hang-prone"]).arms.len()), (4, 4));
        assert_eq!(with(&["unsafe-mixing"]).arms.len(), 2);
    }

    #[test]
    fn a_risk_is_taken_by_name_only() {
        let text = head() + "[[axis]]\nvariable = \"NCCL_PROTO\"\nvalues = [\"unset\", \"LL\", \"allreduce:LL128\"]\n";
        let space = parse(&text, "t").unwrap();
        let cautious = enumerate(&space, &BTreeMap::new(), NEW, &BTreeSet::new()).unwrap();
        assert_eq!(cautious.arms.len(), 2);
        let bold = BTreeSet::from(["unverified-platform".to_owned()]);
        assert_eq!(enumerate(&space, &BTreeMap::new(), NEW, &bold).unwrap().arms.len(), 3);
    }

    #[test]
    fn an_old_nccl_is_not_given_what_it_would_misread() {
        let text = head()
            + "[[axis]]\nvariable = \"NCCL_PROTO\"\nvalues = [\"unset\", \"Simple\", \"LL\", \"allreduce:Simple\"]\n\
               [[axis]]\nvariable = \"NCCL_ALGO\"\nvalues = [\"unset\", \"Tree\"]\n";
        let space = parse(&text, "t").unwrap();
        let at = |version| enumerate(&space, &BTreeMap::new(), version, &BTreeSet::new()).unwrap();
        let old = at(NcclVersion::v2(21, 5));
        let names: Vec<&str> = old.arms.iter().map(|arm| arm.name.as_str()).collect();
        assert_eq!(names, ["default", "PROTO=Simple"], "{:?}", old.notices);
        let told = |words: &str| old.notices.iter().any(|notice| notice.contains(words));
        assert!(told("NCCL_PROTO=LL is left out: NCCL 2.21.5 has no lists for single collectives"));
        assert!(told("NCCL_ALGO=Tree is left out") && told("leaves no algorithm for Broadcast"));
        assert_eq!(at(NEW).arms.len(), 8, "newer ones can be told, and the smoke gate looks at the rest");
    }

    #[test]
    fn mistakes_are_named_with_their_place() {
        let axis = |variable: &str, value: &str| {
            head() + &format!("[[axis]]\nvariable = \"{variable}\"\nvalues = [\"unset\", \"{value}\"]\n")
        };
        let cases = [
            (
                axis("NCCL_MIN_NCHANNEL", "8"),
                "line 5: unknown variable NCCL_MIN_NCHANNEL; did you mean NCCL_MIN_NCHANNELS?",
            ),
            (axis("NCCL_MIN_NCHANNELS", "4M"), "line 6: NCCL_MIN_NCHANNELS"),
            (axis("NCCL_NTHREADS", "100"), "line 6: NCCL_NTHREADS"),
            (axis("NCCL_ALGO", "Rign"), "line 6: NCCL_ALGO"),
            (head(), "an empty space"),
            (head() + "[[axis]]\nvariable = \"NCCL_ALGO\"\nvalues = []\n", "must be there"),
            (head() + "colour = \"red\"\n", "colour"),
            (
                head() + "[[arm]]\nname = \"x\"\nenv = { NCCL_P2P_DISABLE = \"1\", NCCL_P2P_LEVEL = \"PXB\" }\n",
                "has no effect beside",
            ),
            (
                head()
                    + "[[arm]]\nname = \"x\"\nenv = { NCCL_GRAPH_FILE = \"/a.xml\" }\nfiles = { graph = \"b.xml\" }\n",
                "sets NCCL_GRAPH_FILE too",
            ),
            (head() + "[[arm]]\nname = \"x\"\nfiles = { grape = \"b.xml\" }\n", "grape"),
            (
                head() + "[[arm]]\nname = \"x\"\nenv = { NCCL_MIN_NCHANNELS = \"16\", NCCL_MAX_NCHANNELS = \"8\" }\n",
                "is above",
            ),
        ];
        for (text, expected) in cases {
            let error = parse(&text, "s.toml").unwrap_err().to_string();
            assert!(error.contains(expected), "{error}\nfor\n{text}");
            assert!(error.contains("s.toml"), "{error}");
        }
    }

    proptest! {
        #[test]
        fn no_text_panics(text in ".{0,300}") {
            let _ = parse(&text, "t");
        }

        #[test]
        fn ids_do_not_depend_on_order(flip in any::<bool>()) {
            let (a, b) = ("NCCL_MIN_NCHANNELS = \"8\"", "NCCL_NTHREADS = \"256\"");
            let (first, second) = if flip { (a, b) } else { (b, a) };
            let text = head() + &format!("[[arm]]\nname = \"x\"\nenv = {{ {first}, {second} }}\n");
            prop_assert_eq!(&all(&text).arms[1].id.0, &arm("y", BTreeMap::from([
                ("NCCL_MIN_NCHANNELS".to_owned(), "8".to_owned()), ("NCCL_NTHREADS".to_owned(), "256".to_owned()),
            ]), BTreeMap::new()).id.0);
        }
    }
}
