//! C's number readers, as far as NCCL's reading of its environment depends on them.

/// What `strtoll(text, NULL, 0)` makes of a text.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct LongLong<'a> {
    /// The number; nothing where it does not fit 64 bits. A text without digits is 0.
    pub(super) value: Option<i64>,
    /// What stands behind the number and is silently dropped.
    pub(super) rest: &'a str,
    /// 8, 10 or 16.
    pub(super) radix: u32,
}

/// C's `isspace` in the "C" locale.
const fn is_c_space(byte: u8) -> bool {
    matches!(byte, b' ' | b'\t' | b'\n' | 0x0b | 0x0c | b'\r')
}

/// Skips white space, then reads a sign.
fn sign(text: &str) -> (bool, &str) {
    let trimmed = text.trim_start_matches(|c: char| u8::try_from(c).is_ok_and(is_c_space));
    match trimmed.as_bytes().first() {
        Some(b'-') => (true, &trimmed[1..]),
        Some(b'+') => (false, &trimmed[1..]),
        _ => (false, trimmed),
    }
}

/// Reads digits; the number is `None` where it overflows, and the count of digits is always right.
fn digits(text: &str, radix: u32, negative: bool) -> (Option<i64>, usize) {
    let mut value = Some(0_i64);
    let mut count = 0;
    for digit in text.chars().map_while(|c| c.to_digit(radix)) {
        let digit = i64::from(digit);
        value = value
            .and_then(|sum| sum.checked_mul(i64::from(radix)))
            .and_then(|sum| if negative { sum.checked_sub(digit) } else { sum.checked_add(digit) });
        count += 1;
    }
    (value, count)
}

/// `strtoll(text, NULL, 0)`: leading blanks and a sign, then hexadecimal behind "0x", octal behind
/// "0", decimal otherwise, for as far as it goes.
pub(super) fn strtoll(text: &str) -> LongLong<'_> {
    let (negative, body) = sign(text);
    let bytes = body.as_bytes();
    let hexadecimal = bytes.first() == Some(&b'0')
        && matches!(bytes.get(1), Some(b'x' | b'X'))
        && bytes.get(2).is_some_and(u8::is_ascii_hexdigit);
    let (radix, start) = match bytes.first() {
        Some(b'0') if hexadecimal => (16, 2),
        Some(b'0') => (8, 0),
        _ => (10, 0),
    };
    let (value, count) = digits(&body[start..], radix, negative);
    if count == 0 {
        return LongLong { value: Some(0), rest: text, radix: 10 };
    }
    LongLong { value, rest: &body[start + count..], radix }
}

/// What `sscanf(text, "%ld %ld %ld %ld %ld %ld")` makes of a text: the numbers up to the first that
/// cannot be read, and whether the whole text was used up. Signs part numbers as well as blanks do.
pub(super) fn scan_six(text: &str) -> (Vec<i64>, bool) {
    let mut numbers = Vec::with_capacity(6);
    let mut rest = text;
    while numbers.len() < 6 {
        let (negative, body) = sign(rest);
        let (value, count) = digits(body, 10, negative);
        if count == 0 {
            break;
        }
        // Out of range, scanf stores the nearest number there is.
        numbers.push(value.unwrap_or(if negative { i64::MIN } else { i64::MAX }));
        rest = &body[count..];
    }
    (numbers, rest.bytes().all(is_c_space))
}

/// A size as people write it: decimal digits, then nothing or K, M, G (also with B or iB; powers of
/// 1024 in any case). NCCL does not read this form.
pub(super) fn human_size(text: &str) -> Option<u64> {
    let text = text.trim();
    let split = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
    let (digits, suffix) = text.split_at(split);
    let shift = match suffix.trim_start().to_ascii_lowercase().as_str() {
        "" | "b" => 0,
        "k" | "kb" | "kib" => 10,
        "m" | "mb" | "mib" => 20,
        "g" | "gb" | "gib" => 30,
        _ => return None,
    };
    digits.parse::<u64>().ok()?.checked_mul(1 << shift)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn strtoll_reads_as_c_does() {
        let cases = [
            ("4", Some(4), "", 10),
            (" \t-4", Some(-4), "", 10),
            ("+4 ", Some(4), " ", 10),
            ("4M", Some(4), "M", 10),
            ("true", Some(0), "true", 10),
            ("", Some(0), "", 10),
            ("-", Some(0), "-", 10),
            ("0", Some(0), "", 8),
            ("0100", Some(64), "", 8),
            ("08", Some(0), "8", 8),
            ("1e6", Some(1), "e6", 10),
            ("0x10", Some(16), "", 16),
            ("-0X1f", Some(-31), "", 16),
            ("0x", Some(0), "x", 8),
            ("0xg", Some(0), "xg", 8),
            ("9223372036854775807", Some(i64::MAX), "", 10),
            ("9223372036854775808", None, "", 10),
            ("-9223372036854775808", Some(i64::MIN), "", 10),
            ("4\u{e9}", Some(4), "\u{e9}", 10),
        ];
        for (text, value, rest, radix) in cases {
            assert_eq!(strtoll(text), LongLong { value, rest, radix }, "{text:?}");
        }
    }

    #[test]
    fn sscanf_parts_numbers_at_signs_and_stops_at_anything_else() {
        assert_eq!(scan_six("8 8 64 2 8 64"), (vec![8, 8, 64, 2, 8, 64], true));
        assert_eq!(scan_six("8+8+64+2+8+64"), (vec![8, 8, 64, 2, 8, 64], true));
        assert_eq!(scan_six("-1-1-1+2"), (vec![-1, -1, -1, 2], true));
        assert_eq!(scan_six("8,8,64"), (vec![8], false));
        assert_eq!(scan_six(""), (vec![], true));
        assert_eq!(scan_six("1 2 3 4 5 6 7"), (vec![1, 2, 3, 4, 5, 6], false));
        assert_eq!(scan_six("99999999999999999999"), (vec![i64::MAX], true));
        // Base 10: no octal, no hexadecimal.
        assert_eq!(scan_six("010"), (vec![10], true));
        assert_eq!(scan_six("0x10"), (vec![0], false));
    }

    #[test]
    fn sizes_of_people() {
        assert_eq!(human_size("16MiB"), Some(16 << 20));
        assert_eq!(human_size("64 K"), Some(64 << 10));
        assert_eq!(human_size("12"), Some(12));
        for wrong in ["", "M", "1.5M", "-4", "4T", "99999999999999999999"] {
            assert_eq!(human_size(wrong), None, "{wrong:?}");
        }
    }
}
