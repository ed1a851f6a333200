//! Sizes, times and percentages: how they are read and how they are shown.
//!
//! NCCL reads plain decimal integers and silently drops a suffix ("4M" is 4 to it), so suffixes are
//! understood in files that people write and never leave the tool again.

/// Why a quantity could not be read.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum QuantityError {
    /// Not a number at all.
    #[error("{text:?} is not {expected}")]
    Malformed {
        /// What the user wrote.
        text: String,
        /// What would have been understood.
        expected: &'static str,
    },
    /// A number outside the range that makes sense.
    #[error("{text:?} is out of range: {expected}")]
    OutOfRange {
        /// What the user wrote.
        text: String,
        /// The range.
        expected: &'static str,
    },
}

const SIZE_HELP: &str = "a size such as 43008, 64KiB, 4MiB or 1GiB";

/// Reads a size in bytes: plain decimal digits, or with `K`, `M`, `G` (each also with `iB` or `B`,
/// always meaning powers of 1024, as NCCL's tools do).
pub fn parse_size(text: &str) -> Result<u64, QuantityError> {
    let malformed = || QuantityError::Malformed { text: text.to_owned(), expected: SIZE_HELP };
    let trimmed = text.trim();
    let split = trimmed.find(|c: char| !c.is_ascii_digit()).unwrap_or(trimmed.len());
    let (digits, suffix) = trimmed.split_at(split);
    let number: u64 = digits.parse().map_err(|_| malformed())?;
    let factor: u64 = match suffix.trim_start().to_ascii_lowercase().as_str() {
        "" | "b" => 1,
        "k" | "kb" | "kib" => 1 << 10,
        "m" | "mb" | "mib" => 1 << 20,
        "g" | "gb" | "gib" => 1 << 30,
        _ => return Err(malformed()),
    };
    number.checked_mul(factor).ok_or(QuantityError::OutOfRange { text: text.to_owned(), expected: "at most 16 EiB" })
}

/// Shows a size: exact where it is a whole number of KiB, MiB or GiB, plain bytes with thousands
/// separated otherwise, because 43,008 rounded to "42 KiB" would name a different message.
pub fn format_size(bytes: u64) -> String {
    for (shift, suffix) in [(30, "GiB"), (20, "MiB"), (10, "KiB")] {
        let unit = 1_u64 << shift;
        if bytes >= unit && bytes.is_multiple_of(unit) {
            return format!("{} {suffix}", bytes >> shift);
        }
    }
    format!("{} B", group_thousands(bytes))
}

/// 1234567 as "1,234,567".
pub fn group_thousands(number: u64) -> String {
    let digits = number.to_string();
    let mut grouped = String::with_capacity(digits.len() + digits.len() / 3);
    for (position, digit) in digits.chars().enumerate() {
        if position > 0 && (digits.len() - position).is_multiple_of(3) {
            grouped.push(',');
        }
        grouped.push(digit);
    }
    grouped
}

/// Reads a share: `2%` or `0.02` (both 0.02). At least 0 and below 100 %.
pub fn parse_fraction(text: &str) -> Result<f64, QuantityError> {
    let expected = "a share such as 2% or 0.02";
    let malformed = || QuantityError::Malformed { text: text.to_owned(), expected };
    let trimmed = text.trim();
    let value = match trimmed.strip_suffix('%') {
        Some(number) => number.trim().parse::<f64>().map_err(|_| malformed())? / 100.0,
        None => trimmed.parse::<f64>().map_err(|_| malformed())?,
    };
    if value.is_finite() && (0.0..1.0).contains(&value) {
        Ok(value)
    } else {
        Err(QuantityError::OutOfRange { text: text.to_owned(), expected: "between 0 % and 100 %; write 2% or 0.02" })
    }
}

/// Shows a ratio to the default as a change in per cent: 0.88 is "-12.0 %".
pub fn format_change(ratio: f64) -> String {
    if ratio.is_finite() { format!("{:+.1} %", (ratio - 1.0) * 100.0) } else { "-".to_owned() }
}

/// Shows microseconds with the digits that carry meaning at that magnitude.
pub fn format_us(us: f64) -> String {
    if !us.is_finite() {
        "-".to_owned()
    } else if us < 100.0 {
        format!("{us:.2}")
    } else if us < 10_000.0 {
        format!("{us:.1}")
    } else {
        format!("{us:.0}")
    }
}

/// Shows seconds as a person would say them: "48 s", "3 min 20 s", "1 h 04 min".
pub fn format_seconds(seconds: f64) -> String {
    let whole = seconds.max(0.0).round() as u64;
    match whole {
        0..60 => format!("{whole} s"),
        60..3600 => format!("{} min {:02} s", whole / 60, whole % 60),
        _ => format!("{} h {:02} min", whole / 3600, whole % 3600 / 60),
    }
}

/// The name in `names` closest to `wanted`, where it is close enough to be a likely typo
/// (Levenshtein distance of at most a third of the longer name).
pub fn nearest_name<'a>(wanted: &str, names: impl IntoIterator<Item = &'a str>) -> Option<&'a str> {
    let upper = wanted.to_ascii_uppercase();
    names
        .into_iter()
        .map(|name| (edit_distance(&upper, &name.to_ascii_uppercase()), name))
        .min()
        .filter(|(distance, name)| *distance <= name.len().max(wanted.len()).div_ceil(3))
        .map(|(_, name)| name)
}

fn edit_distance(left: &str, right: &str) -> usize {
    // Bounded: names from outside may be megabytes long, and a name that long is no typo.
    let left: Vec<char> = left.chars().take(128).collect();
    let right: Vec<char> = right.chars().take(128).collect();
    let mut row: Vec<usize> = (0..=right.len()).collect();
    for (i, a) in left.iter().enumerate() {
        let mut diagonal = row[0];
        row[0] = i + 1;
        for (j, b) in right.iter().enumerate() {
            let substituted = diagonal + usize::from(a != b);
            diagonal = row[j + 1];
            row[j + 1] = substituted.min(diagonal + 1).min(row[j] + 1);
        }
    }
    row[right.len()]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_read_with_and_without_suffix() {
        assert_eq!(parse_size("43008"), Ok(43_008));
        assert_eq!(parse_size("4M"), Ok(4 << 20));
        assert_eq!(parse_size("16 MiB"), Ok(16 << 20));
        assert_eq!(parse_size("1gib"), Ok(1 << 30));
        for wrong in ["", "-1", "4T", "1.5M", "M", "0x10", "99999999999999999999G"] {
            assert!(parse_size(wrong).is_err(), "{wrong:?} was accepted");
        }
    }

    #[test]
    fn sizes_show_exactly() {
        assert_eq!(format_size(57_344), "56 KiB");
        assert_eq!(format_size(43_009), "43,009 B");
        assert_eq!(format_size(0), "0 B");
        assert_eq!(format_size(4 << 20), "4 MiB");
    }

    #[test]
    fn fractions_read_both_ways() {
        assert_eq!(parse_fraction("2%"), Ok(0.02));
        assert_eq!(parse_fraction("0.02"), Ok(0.02));
        assert!(parse_fraction("200%").is_err());
        assert!(parse_fraction("NaN").is_err());
        assert!(parse_fraction("-1%").is_err());
    }

    #[test]
    fn durations_show_as_people_say_them() {
        assert_eq!(format_seconds(48.4), "48 s");
        assert_eq!(format_seconds(200.0), "3 min 20 s");
        assert_eq!(format_seconds(3840.0), "1 h 04 min");
    }

    #[test]
    fn a_typo_finds_its_name_and_nonsense_does_not() {
        let names = ["NCCL_ALGO", "NCCL_PROTO", "NCCL_MIN_NCHANNELS"];
        assert_eq!(nearest_name("NCCL_ALGOS", names), Some("NCCL_ALGO"));
        assert_eq!(nearest_name("nccl_min_nchannel", names), Some("NCCL_MIN_NCHANNELS"));
        assert_eq!(nearest_name("PATH", names), None);
    }
}
