//! From what a person writes in a search space to what is emitted.

use super::lists::{self, ListError};
use super::numbers::{human_size, scan_six};
use super::reading::{LEVELS, join_thresholds, read_as_nccl};
use super::{Knob, ReadValue, Values, find};
use crate::machine::NcclVersion;

/// Why a value was not accepted.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ValueError {
    /// The catalogue has no such variable.
    #[error("{name} is not in the catalogue of NCCL variables")]
    UnknownVariable {
        /// What was asked for.
        name: String,
    },
    /// Nothing was written.
    #[error("{name} has no value; leave the variable out instead")]
    Empty {
        /// The variable.
        name: &'static str,
    },
    /// Not a number where one is needed.
    #[error("{name}={text:?} is not {expected}")]
    Malformed {
        /// The variable.
        name: &'static str,
        /// What was written.
        text: String,
        /// What would have been accepted.
        expected: String,
    },
    /// A size suffix on something that is no size.
    #[error("{name}={text:?} has a size suffix, but {name} is not a number of bytes")]
    SuffixWithoutBytes {
        /// The variable.
        name: &'static str,
        /// What was written.
        text: String,
    },
    /// A number that NCCL would change, refuse or stumble over.
    #[error("{name}={text:?} is out of range: {expected}")]
    OutOfRange {
        /// The variable.
        name: &'static str,
        /// What was written.
        text: String,
        /// What would have been accepted.
        expected: String,
    },
    /// A list that NCCL would refuse or read otherwise.
    #[error("{name}={text:?}: {reason}")]
    List {
        /// The variable.
        name: &'static str,
        /// What was written.
        text: String,
        /// What is wrong with it.
        reason: String,
    },
    /// A character that would not survive env files and shells unchanged.
    #[error("{name}={text:?} contains {character:?}, which does not survive every env file and shell")]
    UnsafeCharacter {
        /// The variable.
        name: &'static str,
        /// What was written.
        text: String,
        /// The character.
        character: char,
    },
}

/// The one text this tool emits for what a person wrote: plain decimals, no blanks, no quotes.
///
/// Sizes may carry a suffix where the variable counts bytes ("16MiB"), thresholds may be parted by
/// blanks, levels and words may be in any case. A semicolon stays where a list names several
/// collectives: NCCL has no other form for that.
pub fn canonical_value(name: &str, text: &str) -> Result<String, ValueError> {
    let knob = find(name).ok_or_else(|| ValueError::UnknownVariable { name: name.chars().take(80).collect() })?;
    let trimmed = text.trim();
    if trimmed.is_empty() {
        return Err(ValueError::Empty { name: knob.name });
    }
    match knob.values {
        Values::Algorithms | Values::Protocols => list(knob, trimmed),
        Values::Thresholds => thresholds(knob, trimmed),
        Values::PathLevel => level(knob, trimmed),
        Values::Words(words) => words
            .iter()
            .find(|word| word.eq_ignore_ascii_case(trimmed))
            .map(|word| (*word).to_owned())
            .ok_or_else(|| malformed(knob, trimmed)),
        Values::File | Values::Text => word(knob, trimmed),
        Values::Bytes { min, max, multiple_of } => {
            let bytes = human_size(trimmed).ok_or_else(|| malformed(knob, trimmed))?;
            let fits = (min..=max).contains(&bytes)
                && multiple_of.map_or(bytes.is_power_of_two(), |step| bytes.is_multiple_of(step));
            if fits { Ok(bytes.to_string()) } else { Err(out_of_range(knob, trimmed)) }
        }
        Values::Switch | Values::OneOf(_) | Values::Integer { .. } | Values::Multiple { .. } => integer(knob, trimmed),
    }
}

fn malformed(knob: &Knob, text: &str) -> ValueError {
    ValueError::Malformed { name: knob.name, text: text.to_owned(), expected: knob.values.describe() }
}

fn out_of_range(knob: &Knob, text: &str) -> ValueError {
    ValueError::OutOfRange { name: knob.name, text: text.to_owned(), expected: knob.values.describe() }
}

fn integer(knob: &Knob, text: &str) -> Result<String, ValueError> {
    let digits = text.strip_prefix('-').unwrap_or(text);
    let plain = digits.bytes().all(|byte| byte.is_ascii_digit()) && (digits == "0" || !digits.starts_with('0'));
    let value = match text.parse::<i64>() {
        Ok(value) if plain => value,
        _ if !plain && text.parse::<i64>().is_err() && human_size(text).is_some() => {
            return Err(ValueError::SuffixWithoutBytes { name: knob.name, text: text.to_owned() });
        }
        _ => return Err(malformed(knob, text)),
    };
    let fits = match knob.values {
        Values::Switch => matches!(value, 0 | 1),
        Values::OneOf(choices) => choices.contains(&value),
        Values::Integer { min, max } => (min..=max).contains(&value),
        Values::Multiple { of, min, max } => (min..=max).contains(&value) && value % of == 0,
        _ => false,
    };
    if fits { Ok(value.to_string()) } else { Err(out_of_range(knob, text)) }
}

fn list(knob: &Knob, text: &str) -> Result<String, ValueError> {
    let refuse = |reason: String| ValueError::List { name: knob.name, text: text.to_owned(), reason };
    let written = lists::canonical(knob.values, text).map_err(|reason: ListError| refuse(reason.to_string()))?;
    let reading = read_as_nccl(knob.name, &written, NcclVersion::v2(u32::MAX, 0));
    match (reading.error.or(reading.misread), reading.value) {
        (Some(reason), _) => Err(refuse(reason)),
        (None, ReadValue::Lists(_)) => Ok(written),
        (None, _) => Err(malformed(knob, text)),
    }
}

fn thresholds(knob: &Knob, text: &str) -> Result<String, ValueError> {
    let (numbers, complete) = scan_six(text);
    if !complete || numbers.is_empty() {
        return Err(malformed(knob, text));
    }
    // More than the largest message there is would be a slip of the pen.
    if numbers.iter().any(|number| *number > i64::from(i32::MAX)) {
        return Err(out_of_range(knob, text));
    }
    Ok(join_thresholds(&numbers))
}

fn level(knob: &Knob, text: &str) -> Result<String, ValueError> {
    let upper = text.to_ascii_uppercase();
    let known = LEVELS.into_iter().find(|level| *level == upper);
    // Old numbers are understood one digit long; longer ones are more likely a mistake.
    let reading = || match read_as_nccl(knob.name, text, NcclVersion::v2(u32::MAX, 0)).value {
        ReadValue::Level(level) if text.len() == 1 && text <= "5" => Some(level),
        _ => None,
    };
    known.or_else(reading).map(str::to_owned).ok_or_else(|| malformed(knob, text))
}

fn word(knob: &Knob, text: &str) -> Result<String, ValueError> {
    let safe = |c: char| c.is_ascii_alphanumeric() || "/._-+:,@=".contains(c);
    match text.chars().find(|c| !safe(*c)) {
        Some(character) => Err(ValueError::UnsafeCharacter { name: knob.name, text: text.to_owned(), character }),
        None => Ok(text.to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::knob::all;

    #[test]
    fn values_are_written_one_way() {
        let cases = [
            ("NCCL_BUFFSIZE", "16MiB", "16777216"),
            ("NCCL_BUFFSIZE", " 8m ", "8388608"),
            ("NCCL_BUFFSIZE", "1048576", "1048576"),
            ("NCCL_LL128_BUFFSIZE", "4800K", "4915200"),
            ("NCCL_THREAD_THRESHOLDS", "8 8 64 2 8 64", "8+8+64+2+8+64"),
            ("NCCL_THREAD_THRESHOLDS", "8+8+64+2+8+64", "8+8+64+2+8+64"),
            ("NCCL_THREAD_THRESHOLDS", "-1 -1 -1 2", "-1-1-1+2"),
            ("NCCL_THREAD_THRESHOLDS", "-5", "-1"),
            ("NCCL_PROTO", "LL", "LL"),
            ("NCCL_PROTO", "ll, Simple", "LL,Simple"),
            ("NCCL_PROTO", "^ll128", "^LL128"),
            ("NCCL_ALGO", "AllReduce:ring", "allreduce:Ring"),
            ("NCCL_ALGO", "ring ; allreduce : tree , ring", "Ring;allreduce:Tree,Ring"),
            ("NCCL_P2P_LEVEL", "sys", "SYS"),
            ("NCCL_P2P_LEVEL", "3", "PHB"),
            ("NCCL_P2P_DISABLE", "1", "1"),
            ("NCCL_NTHREADS", "256", "256"),
            ("NCCL_MIN_NCHANNELS", "32", "32"),
            ("NCCL_LAUNCH_MODE", "group", "GROUP"),
            ("NCCL_GRAPH_FILE", "/etc/nccl/ring.xml", "/etc/nccl/ring.xml"),
        ];
        for (name, text, written) in cases {
            assert_eq!(canonical_value(name, text).as_deref(), Ok(written), "{name}={text:?}");
        }
    }

    #[test]
    fn what_nccl_would_read_otherwise_is_refused() {
        let cases = [
            ("NCCL_ALGOS", "Ring"),
            ("NCCL_ALGO", ""),
            ("NCCL_ALGO", "rings"),
            ("NCCL_ALGO", "r ing"),
            ("NCCL_ALGO", "allreduce:PAT"),
            ("NCCL_ALGO", "allreduce:Ring:Tree"),
            ("NCCL_ALGO", "allreduce:Ring;Tree"),
            ("NCCL_PROTO", ":"),
            ("NCCL_PROTO", "\"LL\""),
            ("NCCL_BUFFSIZE", "1000"),
            ("NCCL_BUFFSIZE", "3MiB"),
            ("NCCL_BUFFSIZE", "1KiB"),
            ("NCCL_BUFFSIZE", "-2"),
            ("NCCL_BUFFSIZE", "0x100000"),
            ("NCCL_NTHREADS", "100"),
            ("NCCL_NTHREADS", "1024"),
            ("NCCL_NTHREADS", "0256"),
            ("NCCL_MIN_NCHANNELS", "0"),
            ("NCCL_MIN_NCHANNELS", "65"),
            ("NCCL_MIN_NCHANNELS", "1e1"),
            ("NCCL_P2P_DISABLE", "true"),
            ("NCCL_P2P_DISABLE", "+1"),
            ("NCCL_P2P_LEVEL", "NEAR"),
            ("NCCL_P2P_LEVEL", "33"),
            ("NCCL_THREAD_THRESHOLDS", "8,8,64"),
            ("NCCL_THREAD_THRESHOLDS", "auto"),
            ("NCCL_THREAD_THRESHOLDS", "1 2 3 4 5 6 7"),
            ("NCCL_GRAPH_FILE", "/tmp/a file.xml"),
            ("NCCL_TUNER_PLUGIN", "x;rm"),
        ];
        for (name, text) in cases {
            assert!(canonical_value(name, text).is_err(), "{name}={text:?} was accepted");
        }
        assert!(matches!(canonical_value("NCCL_NTHREADS", "1K"), Err(ValueError::SuffixWithoutBytes { .. })));
    }

    proptest! {
        #[test]
        fn what_is_written_is_stable_and_read_as_meant(
            index in 0..all().len(),
            text in prop_oneof![
                ".{0,24}",
                "-?[0-9]{1,9} ?[kKmMgG]?(i?B)?",
                "[0-9 +-]{1,20}",
                "(\\^)?(ring|Tree|LL|ll128|simple|nvls)(, ?(Ring|Tree|Simple|LL)){0,3}(;allreduce: ?(ring|LL))?",
                "(sys|PHB|pix|[0-9])",
            ],
        ) {
            let name = all()[index].name;
            if let Ok(written) = canonical_value(name, &text) {
                prop_assert_eq!(canonical_value(name, &written), Ok(written.clone()));
                prop_assert!(!written.contains(|c: char| c.is_whitespace() || "\"'$\\`".contains(c)));
                let newest = NcclVersion::v2(32, 0);
                if all()[index].is_read_by(newest) {
                    let reading = read_as_nccl(name, &written, newest);
                    prop_assert!(reading.misread.is_none() && reading.error.is_none(), "{}={} {:?}", name, written, reading);
                }
            }
        }
    }
}
