//! NCCL's log: which lines are written, where to, and how they begin.

use std::fs::File;
use std::io::Write;
use std::time::{SystemTime, UNIX_EPOCH};

/// What a line is about (NCCL_DEBUG_SUBSYS). A line can be about several things.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Subject(u32);

impl Subject {
    pub(crate) const INIT: Self = Self(0x1);
    pub(crate) const P2P: Self = Self(0x4);
    pub(crate) const SHM: Self = Self(0x8);
    pub(crate) const NET: Self = Self(0x10);
    pub(crate) const GRAPH: Self = Self(0x20);
    pub(crate) const TUNING: Self = Self(0x40);
    pub(crate) const ENV: Self = Self(0x80);

    /// About this as well.
    pub(crate) const fn and(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }
}

const NAMES: [(&str, u32); 14] = [
    ("INIT", 0x1),
    ("COLL", 0x2),
    ("P2P", 0x4),
    ("SHM", 0x8),
    ("NET", 0x10),
    ("GRAPH", 0x20),
    ("TUNING", 0x40),
    ("ENV", 0x80),
    ("ALLOC", 0x100),
    ("CALL", 0x200),
    ("PROXY", 0x400),
    ("NVLS", 0x800),
    ("BOOTSTRAP", 0x1000),
    ("REG", 0x2000),
];
/// INIT, ENV and BOOTSTRAP.
const DEFAULT_SUBJECTS: u32 = 0x1 | 0x80 | 0x1000;

const VERSION: u32 = 1;
const WARN: u32 = 2;
const INFO: u32 = 3;

/// The log of this process. The variables about it are read once.
pub(crate) struct Log {
    level: u32,
    subjects: u32,
    out: Option<Box<dyn Write + Send>>,
    host: String,
}

impl Log {
    pub(crate) fn open() -> Self {
        let variable = |name: &str| std::env::var(name).unwrap_or_default();
        let level = match variable("NCCL_DEBUG").to_ascii_uppercase().as_str() {
            "VERSION" => VERSION,
            "WARN" => WARN,
            "INFO" => INFO,
            "ABORT" => 4,
            "TRACE" => 5,
            _ => 0,
        };
        let host = host();
        let path = variable("NCCL_DEBUG_FILE");
        let out: Option<Box<dyn Write + Send>> = match level {
            0 => None,
            // Without a file, or with one that cannot be made, NCCL writes to standard output.
            level if level > VERSION && !path.is_empty() => match File::create(expand(&path, &host)) {
                Ok(file) => Some(Box::new(file)),
                Err(_) => Some(Box::new(std::io::stdout())),
            },
            _ => Some(Box::new(std::io::stdout())),
        };
        Self { level, subjects: subjects(&variable("NCCL_DEBUG_SUBSYS")), out, host }
    }

    fn write(&mut self, text: &str) {
        if let Some(out) = &mut self.out {
            // A log that cannot be written is lost, as NCCL's is.
            let _ = out.write_all(text.as_bytes());
            let _ = out.flush();
        }
    }

    fn begin(&self, device: u32) -> String {
        // SAFETY: it takes nothing and returns a number.
        let thread = unsafe { libc::gettid() };
        format!("{}:{}:{thread} [{device}]", self.host, std::process::id())
    }

    pub(crate) fn version(&mut self, version: i32) {
        if self.level >= VERSION {
            let (major, minor, patch) = (version / 10_000, version / 100 % 100, version % 100);
            self.write(&format!("NCCL version {major}.{minor}.{patch}+cuda13.0\n"));
        }
    }

    pub(crate) fn info(&mut self, subject: Subject, device: u32, text: &str) {
        if self.level >= INFO && self.subjects & subject.0 != 0 {
            let line = format!("{} NCCL INFO {text}\n", self.begin(device));
            self.write(&line);
        }
    }

    /// A line that no choice of subjects leaves out.
    pub(crate) fn info_always(&mut self, device: u32, text: &str) {
        if self.level >= INFO {
            let line = format!("{} NCCL INFO {text}\n", self.begin(device));
            self.write(&line);
        }
    }

    /// A warning; `place` is the line of NCCL's source that gives it.
    pub(crate) fn warn(&mut self, device: u32, place: &str, text: &str) {
        if self.level >= WARN {
            let line = format!("\n[{}] {} {place} NCCL WARN {text}\n", now(), self.begin(device));
            self.write(&line);
        }
    }
}

fn host() -> String {
    let mut name = [0_u8; 256];
    // SAFETY: the buffer is as long as is said, and its last byte stays 0.
    unsafe { libc::gethostname(name.as_mut_ptr().cast(), name.len() - 1) };
    let end = name.iter().position(|byte| matches!(byte, 0 | b'.')).unwrap_or(0);
    String::from_utf8_lossy(&name[..end]).into_owned()
}

/// %h is the host, %p the process, %% a per cent sign.
fn expand(path: &str, host: &str) -> String {
    let mut result = String::new();
    let mut rest = path.chars();
    while let Some(character) = rest.next() {
        match character {
            '%' => match rest.next() {
                Some('h') => result.push_str(host),
                Some('p') => result.push_str(&std::process::id().to_string()),
                Some('%') | None => result.push('%'),
                Some(other) => result.extend(['%', other]),
            },
            other => result.push(other),
        }
    }
    result
}

fn subjects(text: &str) -> u32 {
    if text.is_empty() {
        return DEFAULT_SUBJECTS;
    }
    let (inverted, names) = match text.strip_prefix('^') {
        Some(rest) => (true, rest),
        None => (false, text),
    };
    let mask = names.split(',').fold(0, |mask, name| {
        let known = NAMES.iter().find(|(known, _)| name.eq_ignore_ascii_case(known));
        mask | if name.eq_ignore_ascii_case("ALL") { u32::MAX } else { known.map_or(0, |(_, bit)| *bit) }
    });
    if inverted { !mask } else { mask }
}

/// The time in UTC, as "2026-01-31 23:59:58".
fn now() -> String {
    let seconds = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs()) as libc::time_t;
    // SAFETY: all zeros is a value of this struct, and the function fills it.
    let time = unsafe {
        let mut time: libc::tm = std::mem::zeroed();
        libc::gmtime_r(&raw const seconds, &raw mut time);
        time
    };
    format!(
        "{:04}-{:02}-{:02} {:02}:{:02}:{:02}",
        time.tm_year + 1900,
        time.tm_mon + 1,
        time.tm_mday,
        time.tm_hour,
        time.tm_min,
        time.tm_sec
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_files_and_subjects_are_read_as_nccl_reads_them() {
        let process = std::process::id();
        assert_eq!(expand("/x/%h-%p%%.log%", "box"), format!("/x/box-{process}%.log%"));
        assert_eq!(subjects(""), DEFAULT_SUBJECTS);
        assert_eq!(subjects("INIT,tuning"), 0x41);
        assert_eq!(subjects("^INIT"), !1);
        assert_eq!(subjects("ALL"), u32::MAX);
        assert_eq!(now().len(), "2026-01-31 23:59:58".len());
    }
}
