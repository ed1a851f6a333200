//! What others put before a line of nccl-tests: a launcher's tag, a time, colours; and NCCL's log,
//! which begins wherever the line happens to be.

/// Longest tag.
const TAG_BYTES: usize = 200;

/// A line without the colours of a terminal, where it has any.
pub(super) fn without_escapes(line: &str) -> String {
    let mut clean = String::with_capacity(line.len());
    let mut characters = line.chars();
    while let Some(character) = characters.next() {
        if character != '\u{1b}' {
            clean.push(character);
            continue;
        }
        // CSI: parameters up to a letter. Anything else is one character long.
        if characters.next() == Some('[') {
            for parameter in characters.by_ref() {
                if parameter.is_ascii_alphabetic() {
                    break;
                }
            }
        }
    }
    clean
}

/// The tag of a line, empty without one, and the rest. Whoever prefixes twice is undone twice.
pub(super) fn untagged(line: &str) -> (String, &str) {
    let (mut tag, mut rest) = (String::new(), line);
    for _ in 0..3 {
        let Some((found, after)) = one_tag(rest) else { break };
        tag.push_str(found);
        rest = after;
    }
    (tag, rest)
}

fn one_tag(line: &str) -> Option<(&str, &str)> {
    open_mpi(line).or_else(|| kubernetes(line)).or_else(|| time(line)).or_else(|| srun(line)).or_else(|| named(line))
}

/// "[1,0]<stdout>:", and since Open MPI 5 "[prterun-host-1@1,0]<stdout>: ".
fn open_mpi(line: &str) -> Option<(&str, &str)> {
    if !line.starts_with('[') {
        return None;
    }
    let close = line.find(']').filter(|at| *at < TAG_BYTES)?;
    let rest = &line[close + 1..];
    let rest = ["<stdout>", "<stderr>", "<stddiag>"].into_iter().find_map(|stream| rest.strip_prefix(stream))?;
    Some((&line[..=close], rest.strip_prefix(':').unwrap_or(rest)))
}

/// kubectl logs --prefix: "[pod/name/container] ".
fn kubernetes(line: &str) -> Option<(&str, &str)> {
    if !line.starts_with("[pod/") {
        return None;
    }
    let close = line.find("] ").filter(|at| *at < TAG_BYTES)?;
    Some((&line[..=close], &line[close + 2..]))
}

/// "2026-05-01T12:00:00.123Z ", as container runtimes write it. No tag: it differs from line to line.
fn time(line: &str) -> Option<(&str, &str)> {
    let (word, rest) = line.split_once(' ')?;
    let bytes = word.as_bytes();
    let is_time = bytes.len() >= 19
        && bytes.len() < 48
        && bytes[4] == b'-'
        && bytes[7] == b'-'
        && bytes[10] == b'T'
        && bytes[13] == b':'
        && bytes[..4].iter().all(u8::is_ascii_digit);
    is_time.then_some(("", rest))
}

/// srun --label: "0: " and " 3: ".
fn srun(line: &str) -> Option<(&str, &str)> {
    let (label, rest) = line.split_once(':')?;
    let digits = label.trim_start();
    let is_label = !digits.is_empty() && digits.len() <= 7 && digits.bytes().all(|byte| byte.is_ascii_digit());
    is_label.then(|| (digits, rest.strip_prefix(' ').unwrap_or(rest)))
}

/// "worker-0 | " of docker compose and "node01: " of pdsh, before what looks like a line of the table.
fn named(line: &str) -> Option<(&str, &str)> {
    let is_name = |name: &str| {
        name.starts_with(|first: char| first.is_ascii_alphabetic())
            && name.len() < TAG_BYTES
            && name.chars().all(|character| character.is_ascii_alphanumeric() || "._-".contains(character))
    };
    if let Some((name, rest)) = line.split_once('|')
        && is_name(name.trim_end())
    {
        return Some((name.trim_end(), rest.strip_prefix(' ').unwrap_or(rest)));
    }
    let (name, rest) = line.split_once(": ")?;
    let looks_like_a_table =
        rest.starts_with('#') || rest.trim_start().starts_with(|first: char| first.is_ascii_digit());
    (is_name(name) && looks_like_a_table).then_some((name, rest))
}

/// Where NCCL's log begins in a line: the byte, and the name of the host that stands there glued to
/// what was printed before.
pub(super) struct LogStart {
    /// Byte at which the host's name begins, as far as blanks tell.
    pub(super) at: usize,
    /// Byte behind the host's name; the same where the log begins with something else.
    pub(super) host_end: usize,
}

/// Finds "host:pid:tid [device] NCCL INFO ..." and its relatives.
pub(super) fn log_start(line: &str) -> Option<LogStart> {
    let mark = ["NCCL INFO ", "NCCL WARN ", "NCCL TRACE ", "NCCL CALL ", "NCCL ABORT "]
        .into_iter()
        .filter_map(|mark| line.find(mark))
        .min();
    let Some(mark) = mark else {
        // The library's own line, printed with NCCL_DEBUG=VERSION.
        let at = line.find("NCCL version ").filter(|at| !line[..*at].contains('#'))?;
        return Some(LogStart { at, host_end: at });
    };
    let before = &line[..mark];
    for (colon, _) in before.match_indices(':') {
        let after = &before[colon + 1..];
        let Some((pid, rest)) = after.split_once(':') else { break };
        let is_number = |text: &str| !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
        let thread = rest.split(' ').next().unwrap_or("");
        if !is_number(pid) || !is_number(thread) {
            continue;
        }
        let start = before[..colon].trim_end_matches(|sign: char| !sign.is_whitespace()).len();
        // A time in brackets stands before the host where NCCL_DEBUG_TIMESTAMP_FORMAT asks for one.
        if let Some(open) = before[..start].rfind('[')
            && before[..start].trim_end().ends_with(']')
        {
            return Some(LogStart { at: open, host_end: open });
        }
        return Some(LogStart { at: start, host_end: colon });
    }
    // A form that is not known: everything up to the mark is the log's.
    Some(LogStart { at: 0, host_end: 0 })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tags_of_launchers_are_taken_off() {
        let cases = [
            ("[1,0]<stdout>:#  size", "[1,0]", "#  size"),
            ("[prterun-gpu01-77@1,3]<stdout>: 1024", "[prterun-gpu01-77@1,3]", " 1024"),
            ("[1,2]<stderr>:x", "[1,2]", "x"),
            ("0: # nThread", "0", "# nThread"),
            ("12:        1024", "12", "       1024"),
            ("[pod/test-0/main] # nThread", "[pod/test-0/main]", "# nThread"),
            ("2026-05-01T12:00:00.5Z # nThread", "", "# nThread"),
            ("2026-05-01T12:00:00Z [1,0]<stdout>:# x", "[1,0]", "# x"),
            ("launcher-1  | # nThread", "launcher-1", "# nThread"),
            ("node01: #  size", "node01", "#  size"),
            ("node01: Test NCCL failure a.cu:1 'x'", "", "node01: Test NCCL failure a.cu:1 'x'"),
            ("   1024   256", "", "   1024   256"),
            ("", "", ""),
        ];
        for (line, tag, rest) in cases {
            assert_eq!(untagged(line), (tag.to_owned(), rest), "{line}");
        }
        assert_eq!(without_escapes("\u{1b}[1;32m# size\u{1b}[0m\u{1b}"), "# size");
    }

    #[test]
    fn a_log_is_found_wherever_it_begins() {
        let cut = |line: &str| {
            log_start(line).map(|start| (line[..start.at].to_owned(), line[start.at..start.host_end].to_owned()))
        };
        // Blanks of more than one byte.
        for blank in ["\u{a0}", "\u{2003}"] {
            let found = cut(&format!("{blank}host:12:34 [0] NCCL INFO x"));
            assert_eq!(found, Some((blank.to_owned(), "host".to_owned())), "{blank:?}");
        }
        let pair = |head: &str, host: &str| Some((head.to_owned(), host.to_owned()));
        assert_eq!(cut("gpu01:12:34 [0] NCCL INFO x"), pair("", "gpu01"));
        assert_eq!(cut("  1024  256 gpu01:12:34 [0] NCCL INFO x"), pair("  1024  256 ", "gpu01"));
        assert_eq!(cut("  1024   -1gpu01:12:34 [0] NCCL INFO x"), pair("  1024   ", "-1gpu01"));
        assert_eq!(cut("  -1[2026-01-01 10:00:00] gpu01:12:34 [0] NCCL INFO x"), pair("  -1", ""));
        assert_eq!(cut("[2026-01-01 10:00:00] gpu01:12:34 [0] misc.cc:1 NCCL WARN x"), pair("", ""));
        assert_eq!(cut("  -1NCCL version 2.18.3+cuda12.2"), pair("  -1", ""));
        assert_eq!(cut("NCCL INFO x"), pair("", ""));
        assert_eq!(cut("  1024  256  float"), None);
        assert_eq!(cut("# NCCL version x"), None);
    }
}
