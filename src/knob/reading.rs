//! What NCCL makes of the text of a variable.
//!
//! The rules are those of NCCL's source from 2.16 to 2.30; newer releases are taken to follow the
//! newest rules known.

use crate::machine::NcclVersion;

use super::lists::{self, Lists};
use super::numbers::{self, LongLong};
use super::{Knob, Values, find, others};

/// Path types in NCCL's order, nearest first.
pub(super) const LEVELS: [&str; 10] = ["LOC", "NVL", "NVB", "C2C", "PIX", "PXB", "P2C", "PXN", "PHB", "SYS"];
/// Where the old numbers 0 to 5 point to.
const OLD_LEVELS: [&str; 6] = ["LOC", "PIX", "PXB", "PHB", "SYS", "SYS"];

/// What NCCL holds after reading a variable.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ReadValue {
    /// As if the variable were not there.
    Unset,
    /// This number, after NCCL's own clamping.
    Integer(i64),
    /// This path type.
    Level(&'static str),
    /// These algorithms or protocols.
    Lists(Lists),
    /// These thread thresholds; `None` keeps NCCL's own.
    Thresholds([Option<i64>; 6]),
    /// The text as it stands.
    Text(String),
    /// NCCL looks at the text and goes on as if the variable were not set.
    Ignored {
        /// Why.
        reason: String,
    },
    /// NCCL never looks for the variable.
    NotRead {
        /// Why.
        reason: String,
    },
}

/// What NCCL makes of a variable, and what is wrong with that.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Reading {
    /// What NCCL goes by.
    pub value: ReadValue,
    /// The value in the line "NAME set by environment to VALUE"; nothing where no such line appears.
    pub logged: Option<String>,
    /// How what NCCL reads differs from what the text says.
    pub misread: Option<String>,
    /// Why NCCL fails with this value, or may hang or corrupt data.
    pub error: Option<String>,
    /// What to know about a value that is read as written.
    pub caution: Option<String>,
    /// The text that says what was probably meant.
    pub suggestion: Option<String>,
}

/// How bad a problem is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Severity {
    /// NCCL does what the text says, or nothing at all; there is something to know.
    Warning,
    /// NCCL fails, or does something else than the text says.
    Error,
}

/// What is wrong with a value.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Problem {
    /// How bad it is.
    pub severity: Severity,
    /// What is wrong, in words.
    pub message: String,
    /// The text that says what was probably meant.
    pub suggestion: Option<String>,
}

impl Reading {
    fn of(value: ReadValue) -> Self {
        Self { value, logged: None, misread: None, error: None, caution: None, suggestion: None }
    }

    fn ignored(reason: impl Into<String>) -> Self {
        Self::of(ReadValue::Ignored { reason: reason.into() })
    }

    fn not_read(reason: impl Into<String>) -> Self {
        Self::of(ReadValue::NotRead { reason: reason.into() })
    }

    /// Whether NCCL's behaviour is the same as without the variable, as far as the text can tell.
    pub const fn is_without_effect(&self) -> bool {
        matches!(self.value, ReadValue::Unset | ReadValue::Ignored { .. } | ReadValue::NotRead { .. })
    }

    /// The worst that is wrong; nothing where the value does what it says.
    pub fn problem(&self) -> Option<Problem> {
        let ignored = match &self.value {
            ReadValue::Ignored { reason } => Some(reason.clone()),
            _ => None,
        };
        let wrong: Vec<String> = [self.misread.clone(), ignored, self.error.clone()].into_iter().flatten().collect();
        let (severity, message) = if wrong.is_empty() {
            let not_read = match &self.value {
                ReadValue::NotRead { reason } => Some(reason),
                _ => None,
            };
            (Severity::Warning, not_read.or(self.caution.as_ref())?.clone())
        } else {
            (Severity::Error, wrong.join("; "))
        };
        Some(Problem { severity, message, suggestion: self.suggestion.clone() })
    }
}

/// What this release of NCCL makes of `name=text` in its environment.
///
/// Only this one variable is looked at: what one variable does to another (`NCCL_P2P_DISABLE=1` means
/// that `NCCL_P2P_LEVEL` is never read) is for the caller to know.
pub fn read_as_nccl(name: &str, text: &str, version: NcclVersion) -> Reading {
    let knob = find(name);
    let (since, until) = match (knob, others::find(name)) {
        (Some(knob), _) => (knob.since, knob.until),
        (None, Some(other)) => (other.since, other.until),
        (None, None) => return not_an_nccl_variable(name),
    };
    if version < since {
        return Reading::not_read(format!("NCCL {version} does not read {name}, which came with {since}"));
    }
    if let Some(last) = until.filter(|last| version > *last) {
        return Reading::not_read(format!("NCCL {version} does not read {name} any more; {last} was the last to"));
    }
    if text.is_empty() {
        return Reading::of(ReadValue::Unset);
    }
    let Some(knob) = knob else {
        return match others::find(name) {
            Some(other) if other.kind == others::Kind::Integer => read_integer(name, None, text, version),
            // Not every one of them has a line in the log.
            _ => Reading { logged: None, ..read_text(text) },
        };
    };
    match (name, knob.values) {
        ("NCCL_P2P_DISABLE", _) => read_p2p_disable(text),
        ("NCCL_P2P_LEVEL", _) => read_level(text, version),
        ("NCCL_THREAD_THRESHOLDS", _) => read_thresholds(text),
        ("NCCL_LAUNCH_MODE", _) => read_launch_mode(text),
        ("NCCL_CTA_POLICY", _) if version >= NcclVersion::v2(29, 0) => read_policy(text),
        (_, Values::Algorithms | Values::Protocols) => read_lists(knob, text, version),
        (_, values) if values.is_integer() => read_integer(name, Some(knob), text, version),
        (_, Values::File) => read_file(text),
        ("NCCL_TUNER_PLUGIN", _) if version >= NcclVersion::v2(28, 0) => read_text(text),
        ("NCCL_TUNER_PLUGIN" | "NCCL_SYM_KERNEL", _) => Reading { logged: None, ..read_text(text) },
        _ => read_text(text),
    }
}

/// Variables with NCCL's prefix that other software reads.
const READ_BY_OTHERS: &[(&str, &str)] = &[
    ("NCCL_TUNER_CONFIG_FILE", "the example tuner plugin"),
    ("NCCL_PROFILE_DUMP_FILE", "the example profiler plugin"),
    ("NCCL_INSPECTOR_ENABLE", "the inspector plugin"),
    ("NCCL_INSPECTOR_DUMP_DIR", "the inspector plugin"),
    ("NCCL_ASYNC_ERROR_HANDLING", "older releases of PyTorch"),
    ("NCCL_BLOCKING_WAIT", "older releases of PyTorch"),
    ("NCCL_DESYNC_DEBUG", "older releases of PyTorch"),
];

fn not_an_nccl_variable(name: &str) -> Reading {
    if let Some((_, reader)) = READ_BY_OTHERS.iter().find(|(other, _)| *other == name) {
        return Reading::not_read(format!("NCCL does not read {name}; {reader} may"));
    }
    // Bounded: a name from a file may be of any length, and its message should not be.
    let shown: String = name.chars().take(80).collect();
    let upper = shown.trim().to_ascii_uppercase();
    if upper != name && (find(&upper).is_some() || others::find(&upper).is_some()) {
        return Reading::not_read(format!("NCCL reads {upper}, exactly so, and not {shown:?}"));
    }
    Reading::not_read(format!("NCCL does not read a variable named {shown:?}"))
}

fn read_text(text: &str) -> Reading {
    let mut reading = Reading::of(ReadValue::Text(text.to_owned()));
    reading.logged = Some(text.to_owned());
    if let Some(inner) = unquoted(text) {
        reading.misread = Some(format!("the quotes become part of the value: NCCL reads {text}"));
        reading.suggestion = Some(inner.to_owned());
    }
    reading
}

fn read_file(text: &str) -> Reading {
    let mut reading = read_text(text);
    if !text.starts_with('/') && reading.misread.is_none() {
        reading.caution = Some("NCCL looks for the file from whichever directory the server starts in".to_owned());
    }
    reading
}

/// The text inside quotes, where there are quotes around it.
fn unquoted(text: &str) -> Option<&str> {
    let trimmed = text.trim();
    ['"', '\''].into_iter().find_map(|quote| trimmed.strip_prefix(quote)?.strip_suffix(quote))
}

// Integers.

fn read_integer(name: &str, knob: Option<&Knob>, text: &str, version: NcclVersion) -> Reading {
    let number = numbers::strtoll(text);
    let Some(raw) = number.value else {
        return Reading::ignored(format!("{text:?} does not fit 64 bits, so NCCL keeps its default"));
    };
    let mut reading = Reading::of(ReadValue::Integer(raw));
    reading.logged = Some(raw.to_string());
    if let Some((misread, suggestion)) = integer_misread(knob, text, number, raw) {
        reading.misread = Some(misread);
        reading.suggestion = suggestion;
    }
    if let Some(knob) = knob {
        let used = use_integer(knob, raw, version);
        if reading.misread.is_none() {
            reading.misread = used.misread;
            reading.suggestion = used.suggestion;
        }
        reading.error = used.error;
        reading.caution = used.caution;
        if let Some(value) = used.value {
            reading.value = value;
        }
        if let (true, ReadValue::Integer(value)) = (reading.misread.is_none(), &reading.value) {
            let falls_back = knob.values == Values::Switch && !matches!(value, 0 | 1);
            if falls_back && reading.caution.is_none() {
                reading.caution = Some(format!("{name} is a switch, and what {value} means is not laid down"));
            }
        }
    }
    reading
}

/// How the number that NCCL reads differs from what the text says, and what was probably meant.
fn integer_misread(
    knob: Option<&Knob>,
    text: &str,
    number: LongLong<'_>,
    raw: i64,
) -> Option<(String, Option<String>)> {
    let trimmed = text.trim();
    let takes_bytes = knob.is_some_and(|knob| knob.values.is_bytes());
    if number.rest.trim().is_empty() {
        let decimal = trimmed.parse::<i64>().ok()?;
        return (number.radix == 8 && decimal != raw).then(|| {
            (format!("{trimmed} starts with 0, so NCCL reads it as octal: {raw}"), Some(decimal.to_string()))
        });
    }
    if let Some(inner) = unquoted(text) {
        let suggestion = inner.trim().parse::<i64>().ok().map(|value| value.to_string());
        return Some((format!("the quotes become part of the value, and NCCL reads {raw}"), suggestion));
    }
    let suggestion = match trimmed.to_ascii_lowercase().as_str() {
        "true" | "yes" | "on" | "enable" | "enabled" => Some("1".to_owned()),
        "false" | "no" | "off" | "disable" | "disabled" => Some("0".to_owned()),
        _ if takes_bytes => numbers::human_size(trimmed).map(|bytes| bytes.to_string()),
        _ => None,
    };
    let suggestion = suggestion.or_else(|| octal_with_nines(trimmed)).or_else(|| whole_float(trimmed));
    if raw == 0 && number.rest == text {
        return Some((format!("{trimmed:?} is no number, and NCCL reads 0"), suggestion));
    }
    let rest: String = number.rest.trim_end().chars().take(40).collect();
    Some((format!("NCCL reads {raw} and drops {rest:?} without a word"), suggestion))
}

/// "08" ends NCCL's octal reading at the 8, yet is a plain number to a person.
fn octal_with_nines(text: &str) -> Option<String> {
    text.parse::<i64>().ok().map(|value| value.to_string())
}

/// "1e6" and "64.0" are whole numbers to a person.
fn whole_float(text: &str) -> Option<String> {
    let value = text.parse::<f64>().ok()?;
    (value.fract() == 0.0 && value.abs() < 9e15).then(|| format!("{value:.0}"))
}

/// What NCCL does with a number once it has read it; empty where it takes it as it is.
#[derive(Debug, Default)]
struct Used {
    value: Option<ReadValue>,
    misread: Option<String>,
    error: Option<String>,
    caution: Option<String>,
    suggestion: Option<String>,
}

impl Used {
    fn changed(value: i64, misread: String) -> Self {
        Self {
            value: Some(ReadValue::Integer(value)),
            misread: Some(misread),
            suggestion: Some(value.to_string()),
            ..Self::default()
        }
    }

    fn ignored(reason: String) -> Self {
        Self { value: Some(ReadValue::Ignored { reason }), ..Self::default() }
    }

    fn unset() -> Self {
        Self { value: Some(ReadValue::Unset), ..Self::default() }
    }

    fn failing(error: String) -> Self {
        Self { error: Some(error), ..Self::default() }
    }

    fn noted(caution: String) -> Self {
        Self { caution: Some(caution), ..Self::default() }
    }
}

/// The largest number of channels a release can have.
fn channel_limit(version: NcclVersion) -> i64 {
    if version >= NcclVersion::v2(25, 0) { 64 } else { 32 }
}

fn use_integer(knob: &Knob, raw: i64, version: NcclVersion) -> Used {
    let limit = channel_limit(version);
    let held_in_32_bits = !matches!(knob.name, "NCCL_WORK_ARGS_BYTES" | "NCCL_P2P_LL_THRESHOLD");
    if held_in_32_bits && i32::try_from(raw).is_err() {
        let kept = i64::from(raw as i32);
        return Used {
            suggestion: None,
            ..Used::changed(kept, format!("NCCL keeps only the low 32 bits of {raw}: {kept}"))
        };
    }
    match knob.name {
        "NCCL_NTHREADS" | "NCCL_LL128_NTHREADS" => match knob.values {
            Values::Multiple { of, min, max } => use_threads(raw, of, min, max),
            _ => Used::default(),
        },
        // -2 is NCCL's own mark for "not set" in these.
        "NCCL_MIN_NCHANNELS"
        | "NCCL_MAX_NCHANNELS"
        | "NCCL_MIN_NRINGS"
        | "NCCL_MAX_NRINGS"
        | "NCCL_BUFFSIZE"
        | "NCCL_LL_BUFFSIZE"
        | "NCCL_LL128_BUFFSIZE"
            if raw == -2 =>
        {
            Used::unset()
        }
        "NCCL_MIN_NCHANNELS" | "NCCL_MIN_NRINGS" => match raw {
            _ if raw > limit => Used::changed(limit, format!("NCCL {version} has at most {limit} channels, not {raw}")),
            ..0 => Used::changed(0, format!("{raw} counts as 0: no minimum")),
            _ => Used::default(),
        },
        "NCCL_MAX_NCHANNELS" | "NCCL_MAX_NRINGS" => match raw {
            _ if raw > limit => Used::changed(limit, format!("NCCL {version} has at most {limit} channels, not {raw}")),
            ..1 => Used::changed(1, format!("{raw} counts as 1: NCCL needs a channel")),
            _ => Used::default(),
        },
        "NCCL_MIN_CTAS" | "NCCL_MAX_CTAS" | "NCCL_NVLS_NCHANNELS" => match raw {
            ..1 => Used::ignored(format!("{raw} is too low, so NCCL keeps its own number")),
            _ if raw > limit && knob.name != "NCCL_NVLS_NCHANNELS" => {
                Used::changed(limit, format!("NCCL {version} has at most {limit} channels, not {raw}"))
            }
            _ => Used::default(),
        },
        "NCCL_CGA_CLUSTER_SIZE" => match raw {
            ..0 => Used::ignored(format!("{raw} is not a cluster size, so NCCL keeps its own")),
            0..=8 => Used::default(),
            _ => Used::changed(8, format!("NCCL takes 8 at most, not {raw}")),
        },
        "NCCL_GRAPH_MIXING_SUPPORT" if version < NcclVersion::v2(29, 2) => Used::default(),
        "NCCL_GRAPH_MIXING_SUPPORT" | "NCCL_GRAPH_STREAM_ORDERING" | "NCCL_COMM_BLOCKING" if !matches!(raw, 0 | 1) => {
            Used::ignored(format!("{raw} is neither 0 nor 1, so NCCL keeps its own setting"))
        }
        // These compare with 1 and nothing else.
        "NCCL_SHM_DISABLE" | "NCCL_RAS_ENABLE" | "NCCL_SET_STACK_SIZE" | "NCCL_CHECK_POINTERS"
            if !matches!(raw, 0 | 1) =>
        {
            Used::changed(0, format!("only 1 counts, so {raw} means 0"))
        }
        "NCCL_SHM_LOCALITY" if !matches!(raw, 1 | 2) => {
            Used::changed(2, format!("NCCL warns that {raw} is neither 1 nor 2 and takes 2"))
        }
        "NCCL_CTA_POLICY" if !(0..=2).contains(&raw) || (raw == 2 && version < NcclVersion::v2(28, 0)) => {
            Used::changed(0, format!("{raw} is no policy NCCL {version} knows, so it takes 0"))
        }
        "NCCL_WORK_FIFO_BYTES" if raw < 0 || raw & (raw - 1) != 0 => {
            Used::ignored(format!("{raw} is no power of two, so NCCL keeps its default"))
        }
        "NCCL_NVLS_ENABLE" if !matches!(raw, 0 | 2) => {
            Used::noted("any value but 0 and 2 makes NCCL fail where the hardware has no multicast".to_owned())
        }
        "NCCL_CUMEM_ENABLE" | "NCCL_P2P_READ_ENABLE" if raw == -2 => Used::unset(),
        "NCCL_CUMEM_HOST_ENABLE" if raw == -1 => Used::unset(),
        "NCCL_CUMEM_ENABLE" if raw < 0 => Used::changed(0, format!("{raw} counts as 0")),
        _ => buffer_size_danger(knob, raw).map_or_else(Used::default, Used::failing),
    }
}

fn use_threads(raw: i64, of: i64, min: i64, max: i64) -> Used {
    match raw {
        -2 => Used::unset(),
        ..1 => Used::ignored(format!("{raw} is too low, so NCCL keeps its own number")),
        _ if raw % of != 0 => {
            Used::changed(max, format!("{raw} is not a multiple of {of}, so NCCL takes the largest number, {max}"))
        }
        _ if raw > max => Used::changed(max, format!("NCCL takes {max} at most, not {raw}")),
        _ if raw < min => Used::changed(min, format!("NCCL takes {min} at least, not {raw}")),
        _ => Used::default(),
    }
}

/// Why a size in bytes is dangerous. NCCL takes any number, and its kernels then work with it.
pub(super) fn buffer_size_danger(knob: &Knob, bytes: i64) -> Option<String> {
    let Values::Bytes { min, max, multiple_of } = knob.values else { return None };
    if knob.name == "NCCL_WORK_FIFO_BYTES" {
        // The one size that NCCL checks.
        return None;
    }
    let why = match u64::try_from(bytes) {
        Err(_) => "is negative".to_owned(),
        Ok(size) if size < min => format!("is less than {min}"),
        Ok(size) if size > max => format!("is more than {max}"),
        Ok(size) => match multiple_of {
            None if !size.is_power_of_two() => "is not a power of two".to_owned(),
            Some(step) if !size.is_multiple_of(step) => format!("is not a multiple of {step}"),
            _ => return None,
        },
    };
    Some(format!("{bytes} {why}: NCCL does not check this size, and may hang or corrupt data with it"))
}

// Texts with rules of their own.

fn read_p2p_disable(text: &str) -> Reading {
    let number = numbers::strtoll(text);
    let raw = number.value.unwrap_or(i64::MAX);
    let mut reading = if raw as i32 == 1 {
        // NCCL writes the line only where the variable acts.
        Reading { logged: Some("1".to_owned()), ..Reading::of(ReadValue::Integer(1)) }
    } else {
        Reading::of(ReadValue::Integer(0))
    };
    if let Some((misread, suggestion)) = integer_misread(find("NCCL_P2P_DISABLE"), text, number, raw) {
        reading.misread = Some(misread);
        reading.suggestion = suggestion;
    } else if !matches!(raw, 0 | 1) {
        reading.misread = Some(format!("only 1 disables peer access, so {raw} means 0"));
    }
    reading
}

/// The path types a release knows by name.
fn levels(version: NcclVersion) -> impl Iterator<Item = &'static str> {
    LEVELS.into_iter().filter(move |level| match *level {
        "C2C" => version >= NcclVersion::v2(26, 0),
        "P2C" => version >= NcclVersion::v2(27, 0),
        _ => true,
    })
}

fn level_of(text: &str, version: NcclVersion) -> Option<&'static str> {
    levels(version).find(|level| *level == text).or_else(|| {
        text.starts_with(|c: char| c.is_ascii_digit()).then(|| {
            let number = numbers::strtoll(text).value.unwrap_or(i64::MAX);
            OLD_LEVELS[usize::try_from(number).unwrap_or(usize::MAX).min(OLD_LEVELS.len() - 1)]
        })
    })
}

/// Whether a level asks for peer access through the CPU, where an IOMMU or a bridge may break it.
pub(super) fn level_reaches_over_host_bridge(text: &str) -> bool {
    level_of(text, NcclVersion::v2(u32::MAX, 0)).is_some_and(|level| matches!(level, "P2C" | "PXN" | "PHB" | "SYS"))
}

fn read_level(text: &str, version: NcclVersion) -> Reading {
    let Some(level) = level_of(text, version) else {
        let upper = unquoted(text).unwrap_or(text).trim().to_ascii_uppercase();
        let known = levels(version).find(|level| *level == upper);
        let reason = match known {
            Some(level) => format!("{text:?} is ignored without a word: NCCL knows {level} in capitals and bare"),
            None => format!("{text:?} is ignored without a word: NCCL {version} knows no such level"),
        };
        return Reading { suggestion: known.map(str::to_owned), ..Reading::ignored(reason) };
    };
    let mut reading = Reading { logged: Some(level.to_owned()), ..Reading::of(ReadValue::Level(level)) };
    if level != text {
        let number = numbers::strtoll(text);
        if number.rest.is_empty() && number.radix != 16 && text.len() == 1 && text <= "5" {
            reading.caution = Some(format!("{text} is an old number for {level}"));
        } else {
            reading.misread = Some(format!("NCCL reads {text:?} as an old number for {level}"));
        }
        reading.suggestion = Some(level.to_owned());
    }
    reading
}

fn read_thresholds(text: &str) -> Reading {
    let (numbers, complete) = numbers::scan_six(text);
    let mut thresholds = [None; 6];
    for (threshold, number) in thresholds.iter_mut().zip(&numbers) {
        *threshold = (*number >= 0).then_some(*number);
    }
    let mut reading = Reading {
        logged: Some(text.to_owned()),
        ..Reading::of(if thresholds == [None; 6] { ReadValue::Unset } else { ReadValue::Thresholds(thresholds) })
    };
    if !complete {
        reading.misread = Some(match numbers.len() {
            0 => "NCCL reads no number here and keeps its thresholds".to_owned(),
            6 => "NCCL reads six numbers and drops what follows".to_owned(),
            count => {
                format!("NCCL stops reading after {count} of the numbers: blanks or signs part them, nothing else")
            }
        });
        let tight: Option<Vec<i64>> = text
            .split([',', '/', ';', ' '])
            .filter(|part| !part.trim().is_empty())
            .map(|part| part.trim().parse().ok())
            .collect();
        reading.suggestion = tight.filter(|all| (1..=6).contains(&all.len())).map(|all| join_thresholds(&all));
    }
    reading
}

/// Thresholds in the form without blanks, parted by their signs.
pub(super) fn join_thresholds(numbers: &[i64]) -> String {
    let mut text = String::new();
    for (index, number) in numbers.iter().enumerate() {
        if *number < 0 {
            text.push_str("-1");
        } else {
            if index > 0 {
                text.push('+');
            }
            text.push_str(&number.to_string());
        }
    }
    text
}

fn read_launch_mode(text: &str) -> Reading {
    let mode = if text.eq_ignore_ascii_case("GROUP") { "GROUP" } else { "PARALLEL" };
    let mut reading = Reading { logged: Some(mode.to_owned()), ..Reading::of(ReadValue::Text(mode.to_owned())) };
    if !text.eq_ignore_ascii_case(mode) {
        reading.misread = Some(format!("NCCL takes anything but GROUP as PARALLEL, {text:?} too"));
    }
    reading
}

fn read_policy(text: &str) -> Reading {
    const POLICIES: [&str; 3] = ["DEFAULT", "EFFICIENCY", "ZERO"];
    if let Some(first) = text.chars().next().filter(char::is_ascii_digit) {
        let Some(policy) = first.to_digit(10).filter(|digit| *digit <= 2) else {
            return Reading::ignored(format!("{text:?} is no policy NCCL knows"));
        };
        let mut reading = Reading::of(ReadValue::Integer(i64::from(policy)));
        if text.len() > 1 {
            reading.misread = Some(format!("NCCL looks at the first digit only: {policy}"));
            reading.suggestion = Some(policy.to_string());
        }
        return reading;
    }
    let (known, unknown): (Vec<&str>, Vec<&str>) = text
        .split('|')
        .filter(|word| !word.is_empty())
        .partition(|word| POLICIES.iter().any(|policy| policy.eq_ignore_ascii_case(word)));
    if known.is_empty() {
        return Reading::ignored(format!("{text:?} is no policy NCCL knows"));
    }
    let mut reading = Reading::of(ReadValue::Text(known.join("|").to_ascii_uppercase()));
    if !unknown.is_empty() {
        reading.misread = Some(format!("NCCL ignores {:?}", unknown.join("|")));
    }
    reading
}

fn read_lists(knob: &Knob, text: &str, version: NcclVersion) -> Reading {
    let (what, is_algorithms) = match knob.values {
        Values::Algorithms => ("algorithm", true),
        _ => ("protocol", false),
    };
    let suggestion = || {
        let written = lists::canonical(knob.values, unquoted(text).unwrap_or(text)).ok()?;
        (version >= lists::PER_FUNCTION || !written.contains([':', ';'])).then_some(written)
    };
    let lists = match lists::parse(knob.values, text, version) {
        Ok(lists) => lists,
        Err(reason) => {
            return Reading {
                logged: Some(text.to_owned()),
                error: Some(format!("communicators fail to start: {reason}")),
                suggestion: suggestion().filter(|written| written != text),
                ..Reading::of(ReadValue::Text(text.to_owned()))
            };
        }
    };
    let mut reading = Reading { logged: Some(text.to_owned()), ..Reading::of(ReadValue::Unset) };
    if !lists.dropped.is_empty() {
        reading.misread = Some(format!("NCCL {version} passes over {:?} without a word", lists.dropped.join(",")));
        reading.suggestion = suggestion().filter(|written| written != text);
    }
    if text.contains(':') && version < lists::PER_FUNCTION {
        reading.misread = Some(format!(
            "NCCL {version} has no lists for single collectives (they came with 2.24), so this enables no {what} it knows"
        ));
    }
    let empty = lists.left_empty();
    let starved = if is_algorithms { lists.left_without_algorithm() } else { Vec::new() };
    if !empty.is_empty() {
        reading.error =
            Some(format!("no {what} is left for {}: {}", empty.join(", "), without_choice(is_algorithms, version)));
    } else if starved.contains(&"AllReduce") {
        reading.error =
            Some(format!("no algorithm named here implements AllReduce: {}", without_choice(is_algorithms, version)));
    } else if !starved.is_empty() {
        reading.caution =
            Some(format!("no algorithm is left for {}: {}", starved.join(", "), without_choice(false, version)));
        reading.suggestion = (version >= lists::PER_FUNCTION && !text.contains([':', ';']))
            .then(|| format!("allreduce:{}", suggestion().unwrap_or_else(|| text.to_owned())));
    }
    if !lists.is_untouched() {
        reading.value = ReadValue::Lists(lists);
    }
    reading
}

/// Why a list of algorithms or protocols cannot be said of one collective without harm to others, on a
/// release that knows no lists for single collectives: it leaves some without an algorithm, or takes the
/// protocol away that large messages need.
///
/// Newer releases can be told `allreduce:LL`; what a list does to others there is for a run to find out.
pub fn harm_to_others(name: &str, text: &str, version: NcclVersion) -> Option<String> {
    let knob = find(name)?;
    let is_algorithms = match knob.values {
        Values::Algorithms => true,
        Values::Protocols => false,
        _ => return None,
    };
    if version >= lists::PER_FUNCTION || text.is_empty() {
        return None;
    }
    let lists = lists::parse(knob.values, text, version).ok()?;
    let cannot = format!("NCCL {version} has no lists for single collectives (they came with 2.24)");
    if is_algorithms {
        let starved = lists.left_without_algorithm();
        let others: Vec<&str> = starved.into_iter().filter(|function| *function != "AllReduce").collect();
        return (!others.is_empty()).then(|| {
            let then = without_choice(false, version);
            format!("{cannot}, and {text} leaves no algorithm for {}: {then}", others.join(", "))
        });
    }
    let others = lists.selections().filter(|(function, _)| *function != "AllReduce");
    let bound = others.filter(|(_, words)| words.is_some_and(|words| !words.contains(&"Simple")));
    (bound.count() > 0).then(|| {
        format!(
            "{cannot}, and {text} would take Simple, which large messages need, from every collective of the server"
        )
    })
}

/// What happens to a call for which nothing is left to choose from.
fn without_choice(no_algorithm_at_all: bool, version: NcclVersion) -> &'static str {
    if no_algorithm_at_all && version < lists::PER_FUNCTION {
        "NCCL falls back to Ring and Tree without a word"
    } else if version >= lists::PER_FUNCTION || version < NcclVersion::v2(19, 0) {
        "the call fails"
    } else {
        "NCCL falls back to a choice of its own without a word"
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::knob::names;

    const V: NcclVersion = NcclVersion::v2(28, 9);

    #[test]
    fn old_releases_cannot_be_told_of_all_reduce_alone() {
        let old = NcclVersion::v2(23, 4);
        let harm = |name, text| harm_to_others(name, text, old);
        let tree = harm("NCCL_ALGO", "Tree").unwrap();
        assert!(tree.contains("leaves no algorithm for Broadcast, Reduce, AllGather, ReduceScatter"), "{tree}");
        assert!(harm("NCCL_PROTO", "LL").unwrap().contains("from every collective"));
        assert!(harm("NCCL_PROTO", "^Simple").is_some());
        for (name, text) in [
            ("NCCL_ALGO", "Ring"),
            ("NCCL_ALGO", "Ring,Tree"),
            ("NCCL_ALGO", "^Tree"),
            ("NCCL_PROTO", "Simple"),
            ("NCCL_PROTO", "^LL"),
            ("NCCL_PROTO", "LL,Simple"),
            ("NCCL_PROTO", ""),
            ("NCCL_MIN_NCHANNELS", "16"),
        ] {
            assert_eq!(harm(name, text), None, "{name}={text}");
        }
        for text in ["LL", "allreduce:LL"] {
            assert_eq!(harm_to_others("NCCL_PROTO", text, V), None, "newer ones can be told");
        }
        assert_eq!(harm_to_others("NCCL_ALGO", "Tree", V), None);
    }

    fn read(name: &str, text: &str) -> Reading {
        read_as_nccl(name, text, V)
    }

    #[test]
    fn integers_and_their_silent_misreads() {
        // Name, text, what NCCL goes by, whether that is something else than the text says, suggestion.
        let cases = [
            ("NCCL_BUFFSIZE", "8388608", 8_388_608, false, None),
            ("NCCL_BUFFSIZE", "4M", 4, true, Some("4194304")),
            ("NCCL_BUFFSIZE", "16MiB", 16, true, Some("16777216")),
            ("NCCL_MIN_NCHANNELS", "32", 32, false, None),
            ("NCCL_MIN_NCHANNELS", " 32 ", 32, false, None),
            ("NCCL_MIN_NCHANNELS", "0x10", 16, false, None),
            ("NCCL_MIN_NCHANNELS", "010", 8, true, Some("10")),
            ("NCCL_MIN_NCHANNELS", "08", 0, true, Some("8")),
            ("NCCL_MIN_NCHANNELS", "4K", 4, true, None),
            ("NCCL_MIN_NCHANNELS", "100", 64, true, Some("64")),
            ("NCCL_MIN_NCHANNELS", "-5", 0, true, Some("0")),
            ("NCCL_MAX_NCHANNELS", "0", 1, true, Some("1")),
            ("NCCL_MAX_NCHANNELS", "4294967300", 4, true, None),
            ("NCCL_L1_SHARED_MEMORY_CARVEOUT", "0100", 64, true, Some("100")),
            ("NCCL_P2P_LL_THRESHOLD", "1e6", 1, true, Some("1000000")),
            ("NCCL_NVLS_ENABLE", "\"1\"", 0, true, Some("1")),
            ("NCCL_RAS_ENABLE", "true", 0, true, Some("1")),
            ("NCCL_RAS_ENABLE", "no", 0, true, Some("0")),
            ("NCCL_RAS_ENABLE", "2", 0, true, Some("0")),
            ("NCCL_SHM_DISABLE", "2", 0, true, Some("0")),
            ("NCCL_SHM_LOCALITY", "3", 2, true, Some("2")),
            ("NCCL_CGA_CLUSTER_SIZE", "16", 8, true, Some("8")),
            ("NCCL_NTHREADS", "256", 256, false, None),
            ("NCCL_NTHREADS", "100", 512, true, Some("512")),
            ("NCCL_NTHREADS", "1024", 512, true, Some("512")),
            ("NCCL_NTHREADS", "32", 64, true, Some("64")),
            ("NCCL_LL128_NTHREADS", "96", 160, true, Some("160")),
            ("NCCL_LL128_NTHREADS", "100", 640, true, Some("640")),
            ("NCCL_P2P_DISABLE", "1", 1, false, None),
            ("NCCL_P2P_DISABLE", "0", 0, false, None),
            ("NCCL_P2P_DISABLE", "2", 0, true, None),
            ("NCCL_P2P_DISABLE", "true", 0, true, Some("1")),
            ("NCCL_P2P_DISABLE", "0x1", 1, false, None),
            ("NCCL_P2P_DISABLE", "1 # on", 1, true, None),
            ("NCCL_IB_DISABLE", "true", 0, true, Some("1")),
            ("NCCL_IB_TIMEOUT", "22", 22, false, None),
        ];
        for (name, text, value, misread, suggestion) in cases {
            let reading = read(name, text);
            assert_eq!(reading.value, ReadValue::Integer(value), "{name}={text:?}");
            assert_eq!(reading.misread.is_some(), misread, "{name}={text:?}: {reading:?}");
            assert_eq!(reading.suggestion.as_deref(), suggestion, "{name}={text:?}: {reading:?}");
            assert_eq!(reading.problem().is_some_and(|p| p.severity == Severity::Error), misread, "{name}={text:?}");
        }
    }

    #[test]
    fn the_log_shows_the_number_before_it_is_clamped() {
        assert_eq!(read("NCCL_NTHREADS", "100").logged.as_deref(), Some("100"));
        assert_eq!(read("NCCL_BUFFSIZE", "4M").logged.as_deref(), Some("4"));
        assert_eq!(read("NCCL_P2P_LEVEL", "3").logged.as_deref(), Some("PHB"));
        assert_eq!(read("NCCL_P2P_LEVEL", "sys").logged, None);
        assert_eq!(read("NCCL_P2P_DISABLE", "0").logged, None);
        assert_eq!(read("NCCL_ALGO", "allreduce:ring").logged.as_deref(), Some("allreduce:ring"));
        assert_eq!(read("NCCL_MIN_NCHANNELS", "99999999999999999999").logged, None);
    }

    #[test]
    fn channel_limits_follow_the_release() {
        let old = NcclVersion::v2(24, 3);
        assert_eq!(read_as_nccl("NCCL_MIN_NCHANNELS", "64", old).value, ReadValue::Integer(32));
        assert_eq!(read_as_nccl("NCCL_MAX_NCHANNELS", "64", old).value, ReadValue::Integer(32));
        assert_eq!(read("NCCL_MAX_NCHANNELS", "64").problem(), None);
    }

    #[test]
    fn what_nccl_ignores() {
        for (name, text) in [
            ("NCCL_MIN_NCHANNELS", "99999999999999999999"),
            ("NCCL_P2P_LEVEL", "sys"),
            ("NCCL_P2P_LEVEL", " SYS"),
            ("NCCL_P2P_LEVEL", "-1"),
            ("NCCL_P2P_LEVEL", "NODE"),
            ("NCCL_MIN_CTAS", "0"),
            ("NCCL_MAX_CTAS", "-3"),
            ("NCCL_NTHREADS", "0"),
            ("NCCL_CGA_CLUSTER_SIZE", "-1"),
            ("NCCL_WORK_FIFO_BYTES", "1000"),
        ] {
            let reading = read(name, text);
            assert!(matches!(reading.value, ReadValue::Ignored { .. }), "{name}={text:?}: {reading:?}");
            assert_eq!(reading.problem().map(|p| p.severity), Some(Severity::Error), "{name}={text:?}");
        }
        assert_eq!(read("NCCL_P2P_LEVEL", "sys").suggestion.as_deref(), Some("SYS"));
        assert_eq!(read("NCCL_P2P_LEVEL", "\"phb\"").suggestion.as_deref(), Some("PHB"));
        let mixing = |minor| read_as_nccl("NCCL_GRAPH_MIXING_SUPPORT", "2", NcclVersion::v2(minor, 9));
        assert_eq!(mixing(28).value, ReadValue::Integer(2));
        assert!(matches!(mixing(29).value, ReadValue::Ignored { .. }));
    }

    #[test]
    fn empty_is_unset() {
        for name in ["NCCL_BUFFSIZE", "NCCL_ALGO", "NCCL_P2P_LEVEL", "NCCL_P2P_DISABLE", "NCCL_THREAD_THRESHOLDS"] {
            let reading = read(name, "");
            assert_eq!((reading.value.clone(), reading.problem()), (ReadValue::Unset, None), "{name}");
        }
        assert_eq!(read("NCCL_MIN_NCHANNELS", "-2").value, ReadValue::Unset);
        assert_eq!(read("NCCL_BUFFSIZE", "-2").value, ReadValue::Unset);
    }

    #[test]
    fn path_levels() {
        for (text, level) in
            [("SYS", "SYS"), ("0", "LOC"), ("1", "PIX"), ("2", "PXB"), ("3", "PHB"), ("4", "SYS"), ("5", "SYS")]
        {
            assert_eq!(read("NCCL_P2P_LEVEL", text).value, ReadValue::Level(level), "{text}");
            assert_eq!(read("NCCL_P2P_LEVEL", text).misread, None, "{text}");
        }
        for (text, level) in [("9", "SYS"), ("010", "SYS"), ("0x2", "PXB"), ("3.", "PHB")] {
            let reading = read("NCCL_P2P_LEVEL", text);
            assert_eq!(reading.value, ReadValue::Level(level), "{text}");
            assert!(reading.misread.is_some(), "{text}");
        }
        let p2c = |minor| read_as_nccl("NCCL_P2P_LEVEL", "P2C", NcclVersion::v2(minor, 6)).value;
        assert_eq!(p2c(27), ReadValue::Level("P2C"));
        assert!(matches!(p2c(26), ReadValue::Ignored { .. }));
    }

    #[test]
    fn sizes_that_nccl_should_have_refused() {
        for text in ["1000", "0", "1", "-1", "3145728", "4294967295"] {
            let reading = read("NCCL_BUFFSIZE", text);
            assert!(reading.error.is_some() || reading.misread.is_some(), "{text}: {reading:?}");
            assert_eq!(reading.problem().map(|p| p.severity), Some(Severity::Error), "{text}");
        }
        assert_eq!(read("NCCL_LL128_BUFFSIZE", "4915200").problem(), None);
        let both = read("NCCL_BUFFSIZE", "4M").problem().unwrap();
        assert!(both.message.contains("drops \"M\"") && both.message.contains("less than 65536"), "{}", both.message);
    }

    #[test]
    fn lists_in_the_new_form() {
        for (name, text) in [
            ("NCCL_PROTO", "LL, LL128"),
            ("NCCL_PROTO", "LL "),
            ("NCCL_PROTO", "lll"),
            ("NCCL_PROTO", "\"LL\""),
            ("NCCL_ALGO", "allreduce:ring;tree"),
            ("NCCL_ALGO", "all_reduce:ring"),
            ("NCCL_ALGO", ";ring"),
            ("NCCL_ALGO", ":"),
            ("NCCL_ALGO", "^Tree,Ring,CollNetDirect,CollNetChain,NVLS,NVLSTree,PAT"),
            ("NCCL_ALGO", "PAT"),
            ("NCCL_ALGO", ","),
        ] {
            let reading = read(name, text);
            assert!(reading.error.is_some(), "{name}={text:?}: {reading:?}");
        }
        assert_eq!(read("NCCL_PROTO", "LL, LL128").suggestion.as_deref(), Some("LL,LL128"));
        assert_eq!(read("NCCL_PROTO", "\"LL\"").suggestion.as_deref(), Some("LL"));
        for (name, text) in [
            ("NCCL_PROTO", "LL"),
            ("NCCL_PROTO", "^LL128;allreduce:LL128"),
            ("NCCL_ALGO", "ring"),
            ("NCCL_ALGO", "allreduce:tree"),
            ("NCCL_ALGO", "^Tree"),
            ("NCCL_ALGO", "ring;allreduce:tree,ring"),
        ] {
            assert_eq!(read(name, text).problem(), None, "{name}={text:?}");
        }
        let tree = read("NCCL_ALGO", "tree").problem().unwrap();
        assert_eq!(tree.severity, Severity::Warning);
        assert_eq!(tree.suggestion.as_deref(), Some("allreduce:Tree"));
        assert!(read("NCCL_ALGO", "allreduce:ring:tree").misread.is_some());
    }

    #[test]
    fn lists_in_the_old_form() {
        let old = |name, text| read_as_nccl(name, text, NcclVersion::v2(23, 4));
        assert_eq!(old("NCCL_PROTO", "LL").problem(), None);
        assert!(old("NCCL_PROTO", "LL, Simple").misread.is_some());
        assert_eq!(old("NCCL_PROTO", "LL, Simple").suggestion.as_deref(), Some("LL,Simple"));
        let typo = old("NCCL_ALGO", "rings").problem().unwrap();
        assert!(typo.message.contains("rings") && typo.message.contains("falls back"), "{}", typo.message);
        let per_function = old("NCCL_ALGO", "allreduce:ring").problem().unwrap();
        assert_eq!((per_function.severity, per_function.suggestion), (Severity::Error, None));
        assert!(per_function.message.contains("2.24"), "{}", per_function.message);
        assert_eq!(old("NCCL_ALGO", "Tree").problem().map(|p| p.severity), Some(Severity::Warning));
    }

    #[test]
    fn thresholds() {
        let value = |text| read("NCCL_THREAD_THRESHOLDS", text).value;
        let six = ReadValue::Thresholds([Some(8), Some(8), Some(64), Some(2), Some(8), Some(64)]);
        assert_eq!(value("8 8 64 2 8 64"), six);
        assert_eq!(value("8+8+64+2+8+64"), six);
        assert_eq!(value("-1-1-1+2"), ReadValue::Thresholds([None, None, None, Some(2), None, None]));
        assert_eq!(value("auto"), ReadValue::Unset);
        assert_eq!(read("NCCL_THREAD_THRESHOLDS", "-1-1-1+2").problem(), None);
        let commas = read("NCCL_THREAD_THRESHOLDS", "8,8,64,2,8,64");
        assert!(commas.misread.is_some());
        assert_eq!(commas.suggestion.as_deref(), Some("8+8+64+2+8+64"));
        assert!(read("NCCL_THREAD_THRESHOLDS", "1 2 3 4 5 6 7").misread.is_some());
        assert!(read("NCCL_THREAD_THRESHOLDS", "auto").misread.is_some());
    }

    #[test]
    fn what_nccl_never_reads() {
        let not_read = |name, minor| match read_as_nccl(name, "1", NcclVersion::v2(minor, 0)) {
            reading @ Reading { value: ReadValue::NotRead { .. }, .. } => reading.problem().unwrap().message,
            reading => panic!("{name} in 2.{minor} is read: {reading:?}"),
        };
        assert!(not_read("NCCL_CUMEM_HOST_ENABLE", 22).contains("came with 2.23.4"));
        assert!(not_read("NCCL_SHM_USE_CUDA_MEMCPY", 31).contains("2.30.4 was the last"));
        assert!(not_read("NCCL_MNNVL", 28).contains("2.20.5 was the last"));
        assert!(not_read("nccl_algo", 28).contains("reads NCCL_ALGO"));
        assert!(not_read("NCCL_TUNER_CONFIG_FILE", 28).contains("plugin"));
        assert!(not_read("NCCL_TREE_THRESHOLD", 28).contains("NCCL_TREE_THRESHOLD"));
        for name in ["NCCL_ALGOS", "NCCL_MIN_NCHANNEL", "", "PATH", "export NCCL_ALGO"] {
            not_read(name, 28);
        }
    }

    #[test]
    fn texts_with_rules_of_their_own() {
        assert_eq!(read("NCCL_LAUNCH_MODE", "group").value, ReadValue::Text("GROUP".into()));
        assert_eq!(read("NCCL_LAUNCH_MODE", "serial").value, ReadValue::Text("PARALLEL".into()));
        assert!(read("NCCL_LAUNCH_MODE", "serial").misread.is_some());
        assert_eq!(read("NCCL_CTA_POLICY", "2").value, ReadValue::Integer(2));
        assert_eq!(read("NCCL_CTA_POLICY", "ZERO").value, ReadValue::Integer(0));
        let new = |text| read_as_nccl("NCCL_CTA_POLICY", text, NcclVersion::v2(30, 7));
        assert_eq!(new("zero").value, ReadValue::Text("ZERO".into()));
        assert!(matches!(new("fast").value, ReadValue::Ignored { .. }));
        assert!(new("12").misread.is_some());
        assert!(new("ZERO|fast").misread.is_some());
        assert!(read("NCCL_GRAPH_FILE", "\"/a.xml\"").misread.is_some());
        assert_eq!(read("NCCL_GRAPH_FILE", "a.xml").problem().map(|p| p.severity), Some(Severity::Warning));
        assert_eq!(read("NCCL_SOCKET_IFNAME", "^lo,docker0").problem(), None);
    }

    proptest! {
        #[test]
        fn no_text_is_too_odd(
            minor in 16..33_u32,
            patch in 0..10_u32,
            text in prop_oneof![".{0,40}", "[-+0-9a-fxkKmM ,;:^]{0,30}", "[\\^:;,a-zA-Z0-9]{0,60}"],
        ) {
            let version = NcclVersion::v2(minor, patch);
            for name in names() {
                let reading = read_as_nccl(name, &text, version);
                if let Some(knob) = find(name) {
                    let _ = knob.risk_of(&text);
                }
                prop_assert!(reading.misread.is_none() || reading.problem().is_some());
                prop_assert!(reading.error.is_none() || reading.problem().is_some_and(|p| p.severity == Severity::Error));
            }
        }

        #[test]
        fn plain_numbers_are_never_misread_where_they_are_legal(channels in 1..33_i64, minor in 16..33_u32) {
            let reading = read_as_nccl("NCCL_MIN_NCHANNELS", &channels.to_string(), NcclVersion::v2(minor, 3));
            prop_assert_eq!(reading.value.clone(), ReadValue::Integer(channels));
            prop_assert_eq!(reading.problem(), None);
        }
    }
}
