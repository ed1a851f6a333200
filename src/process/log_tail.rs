//! What a child printed: the beginning and the end, bounded.

use std::collections::VecDeque;

/// Keeps the first and the last lines of a stream that may be endless.
///
/// The beginning holds versions and the first error, the end holds the last words; what is dropped
/// in between is counted.
#[derive(Debug, Default)]
pub struct LogTail {
    head: Vec<String>,
    head_bytes: usize,
    tail: VecDeque<String>,
    tail_bytes: usize,
    dropped_lines: u64,
}

/// Bytes kept of each end.
const KEPT_BYTES: usize = 32 * 1024;
/// Bytes kept of one line.
const LINE_BYTES: usize = 2048;

impl LogTail {
    /// Adds a line, cut to a sane length.
    pub fn push(&mut self, line: &str) {
        let line: String = line.chars().take(LINE_BYTES).collect();
        // A line end counts too, or blank lines would cost nothing and never stop coming.
        let bytes = line.len() + 1;
        // Once a line went to the tail, what follows is the end.
        if self.tail.is_empty() && self.dropped_lines == 0 && self.head_bytes + bytes <= KEPT_BYTES {
            self.head_bytes += bytes;
            self.head.push(line);
            return;
        }
        self.tail_bytes += bytes;
        self.tail.push_back(line);
        while self.tail_bytes > KEPT_BYTES {
            let Some(oldest) = self.tail.pop_front() else { break };
            self.tail_bytes -= oldest.len() + 1;
            self.dropped_lines += 1;
        }
    }

    /// Everything kept, with a line that says how much is missing.
    pub fn text(&self) -> String {
        let mut lines: Vec<&str> = self.head.iter().map(String::as_str).collect();
        let gap = format!("[{} lines left out]", self.dropped_lines);
        if self.dropped_lines > 0 {
            lines.push(&gap);
        }
        lines.extend(self.tail.iter().map(String::as_str));
        lines.join("\n")
    }

    /// The last few lines, for an error message.
    pub fn last_lines(&self, count: usize) -> String {
        let all: Vec<&str> = self.head.iter().chain(&self.tail).map(String::as_str).collect();
        all[all.len().saturating_sub(count)..].join("\n")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blank_lines_are_bounded_and_short_last_words_stand_last() {
        let mut log = LogTail::default();
        for _ in 0..200_000 {
            log.push("");
        }
        assert!(log.text().len() < 3 * KEPT_BYTES);
        let mut log = LogTail::default();
        for _ in 0..40 {
            log.push(&"x".repeat(1000));
        }
        log.push("Aborted");
        assert_eq!(log.last_lines(1), "Aborted");
        assert!(log.text().ends_with("Aborted"));
    }

    #[test]
    fn an_endless_log_keeps_both_ends_and_counts_the_rest() {
        let mut log = LogTail::default();
        for number in 0..200_000 {
            log.push(&format!("line {number}"));
        }
        let text = log.text();
        assert!(text.starts_with("line 0\n"));
        assert!(text.ends_with("line 199999"));
        assert!(text.contains("lines left out]"));
        assert!(text.len() < 3 * KEPT_BYTES);
        assert_eq!(log.last_lines(2), "line 199998\nline 199999");
    }

    #[test]
    fn a_monstrous_line_is_cut() {
        let mut log = LogTail::default();
        log.push(&"x".repeat(10_000_000));
        assert_eq!(log.text().len(), LINE_BYTES);
    }
}
