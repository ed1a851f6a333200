//! NCCL's variables: which are read, when, and how often.
//!
//! Most are numbers that are read once a process, whatever is set afterwards; a few texts are read again
//! by every communicator. From 2.29.7 on NCCL_NO_CACHE makes numbers be read again, too. Lists and
//! releases are those of NCCL's source.

use std::collections::BTreeMap;

use crate::choice::number;
use crate::faults::Faults;
use crate::log::Subject;
use crate::scenario::Kind;

/// How a variable is read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Reading {
    /// A number, once a process.
    Number,
    /// A text, by every communicator.
    Text,
    /// A text, once a process.
    TextOnce,
    /// NCCL_P2P_LEVEL and NCCL_P2P_DISABLE: once a process, whatever NCCL_NO_CACHE says, and said only
    /// where it has an effect.
    Level,
}

use Reading::{Level, Number, Text, TextOnce};

/// Name, reading, and the first and last release that reads it.
const VARIABLES: &[(&str, Reading, i32, i32)] = &[
    ("NCCL_COMM_BLOCKING", Number, 0, i32::MAX),
    ("NCCL_CUMEM_ENABLE", Number, 21_800, i32::MAX),
    ("NCCL_CUMEM_HOST_ENABLE", Number, 22_304, i32::MAX),
    ("NCCL_SET_STACK_SIZE", Number, 0, i32::MAX),
    ("NCCL_CHECK_POINTERS", Number, 0, i32::MAX),
    ("NCCL_CGA_CLUSTER_SIZE", Number, 0, i32::MAX),
    ("NCCL_MAX_CTAS", Number, 21_700, i32::MAX),
    ("NCCL_MIN_CTAS", Number, 21_700, i32::MAX),
    ("NCCL_CTA_POLICY", TextOnce, 22_703, i32::MAX),
    ("NCCL_RAS_ENABLE", Number, 22_403, i32::MAX),
    ("NCCL_MULTI_RANK_GPU_ENABLE", Number, 23_003, i32::MAX),
    ("NCCL_GRAPH_MIXING_SUPPORT", Number, 0, i32::MAX),
    ("NCCL_GRAPH_STREAM_ORDERING", Number, 23_007, i32::MAX),
    ("NCCL_GRAPH_REGISTER", Number, 0, i32::MAX),
    ("NCCL_LOCAL_REGISTER", Number, 21_900, i32::MAX),
    ("NCCL_WIN_ENABLE", Number, 22_703, i32::MAX),
    ("NCCL_SYM_CTAS", Number, 22_703, i32::MAX),
    ("NCCL_SYM_KERNEL", TextOnce, 22_703, i32::MAX),
    ("NCCL_MEM_SYNC_DOMAIN", Number, 0, i32::MAX),
    ("NCCL_LAUNCH_ORDER_IMPLICIT", Number, 22_602, i32::MAX),
    ("NCCL_LAUNCH_MODE", Text, 0, i32::MAX),
    ("NCCL_L1_SHARED_MEMORY_CARVEOUT", Number, 0, i32::MAX),
    ("NCCL_IGNORE_CPU_AFFINITY", Number, 0, i32::MAX),
    ("NCCL_IGNORE_DISABLED_P2P", Number, 0, i32::MAX),
    ("NCCL_NVB_DISABLE", Number, 0, i32::MAX),
    ("NCCL_NVLS_ENABLE", Number, 21_700, i32::MAX),
    ("NCCL_NVLS_NCHANNELS", Number, 21_700, i32::MAX),
    ("NCCL_NVLS_CHUNKSIZE", TextOnce, 22_105, i32::MAX),
    ("NCCL_PAT_ENABLE", Number, 22_304, i32::MAX),
    ("NCCL_P2P_LEVEL", Level, 0, i32::MAX),
    ("NCCL_P2P_DISABLE", Level, 0, i32::MAX),
    ("NCCL_P2P_DIRECT_DISABLE", Number, 0, i32::MAX),
    ("NCCL_P2P_READ_ENABLE", Number, 0, i32::MAX),
    ("NCCL_P2P_USE_CUDA_MEMCPY", Number, 0, i32::MAX),
    ("NCCL_P2P_LL_THRESHOLD", Number, 0, i32::MAX),
    ("NCCL_P2P_NVL_CHUNKSIZE", Number, 0, i32::MAX),
    ("NCCL_P2P_PCI_CHUNKSIZE", Number, 0, i32::MAX),
    ("NCCL_MAX_P2P_NCHANNELS", Number, 0, i32::MAX),
    ("NCCL_MIN_P2P_NCHANNELS", Number, 0, i32::MAX),
    ("NCCL_SHM_DISABLE", Number, 0, i32::MAX),
    ("NCCL_SHM_LOCALITY", Number, 0, i32::MAX),
    ("NCCL_SHM_USE_CUDA_MEMCPY", Number, 0, 23_004),
    ("NCCL_RUNTIME_CONNECT", Number, 22_203, i32::MAX),
    ("NCCL_TOPO_FILE", Text, 0, i32::MAX),
    ("NCCL_GRAPH_FILE", Text, 0, i32::MAX),
    ("NCCL_MIN_NCHANNELS", Number, 0, i32::MAX),
    ("NCCL_MAX_NCHANNELS", Number, 0, i32::MAX),
    ("NCCL_MIN_NRINGS", Number, 0, i32::MAX),
    ("NCCL_MAX_NRINGS", Number, 0, i32::MAX),
    ("NCCL_BUFFSIZE", Number, 0, i32::MAX),
    ("NCCL_LL_BUFFSIZE", Number, 0, i32::MAX),
    ("NCCL_LL128_BUFFSIZE", Number, 0, i32::MAX),
    ("NCCL_WORK_ARGS_BYTES", Number, 22_203, i32::MAX),
    ("NCCL_WORK_FIFO_BYTES", Number, 22_203, i32::MAX),
    ("NCCL_TUNER_PLUGIN", Text, 21_901, i32::MAX),
    ("NCCL_NTHREADS", Number, 0, i32::MAX),
    ("NCCL_LL128_NTHREADS", Number, 0, i32::MAX),
    ("NCCL_ALGO", Text, 0, i32::MAX),
    ("NCCL_PROTO", Text, 0, i32::MAX),
    ("NCCL_THREAD_THRESHOLDS", Text, 0, i32::MAX),
];

/// Words that NCCL_P2P_LEVEL takes, in capitals only, or a digit.
const LEVELS: [&str; 10] = ["LOC", "NVL", "NVB", "C2C", "PIX", "PXB", "P2C", "PXN", "PHB", "SYS"];

/// What this process has read so far.
#[derive(Default)]
pub(crate) struct Variables {
    /// Variables that are read no more, with what they were.
    kept: BTreeMap<&'static str, Option<String>>,
    never_kept: Option<String>,
}

/// What a communicator reads, and what is logged about it.
#[derive(Default)]
pub(crate) struct Read {
    values: BTreeMap<&'static str, String>,
    pub(crate) lines: Vec<(Subject, String)>,
}

impl Read {
    /// A variable that is set and was read.
    pub(crate) fn text(&self, name: &str) -> Option<String> {
        self.values.get(name).cloned()
    }

    pub(crate) fn number(&self, name: &str) -> Option<i64> {
        self.values.get(name).and_then(|text| number(text))
    }
}

impl Variables {
    /// Reads what a communicator of this release reads.
    pub(crate) fn read(&mut self, version: i32, faults: &mut Faults, get: impl Fn(&str) -> Option<String>) -> Read {
        let mut read = Read::default();
        if version >= 22_907 {
            let is_first = self.never_kept.is_none();
            let names = self.never_kept.get_or_insert_with(|| get("NCCL_NO_CACHE").unwrap_or_default());
            if is_first && !names.is_empty() {
                read.lines.push((Subject::ENV, format!("NCCL_NO_CACHE set by environment to {names}")));
            }
        }
        let never_kept = self.never_kept.clone().unwrap_or_default();
        let is_never_kept = |name: &str| never_kept.split(',').any(|known| known == "ALL" || known == name);
        for (name, reading, first, last) in VARIABLES {
            if !(*first..=*last).contains(&version) {
                continue;
            }
            let keeps = match reading {
                Number => !is_never_kept(name),
                Text => false,
                TextOnce | Level => true,
            };
            let known = self.kept.get(name).filter(|_| keeps).cloned();
            let value = known.unwrap_or_else(|| {
                let value = get(name).filter(|_| !is_ignored(faults, name));
                let value = value.filter(|text| *reading != Number || !text.is_empty());
                if let Some(line) = value.as_deref().and_then(|text| line(name, *reading, text)) {
                    // A number that is read again is told again only when it is another.
                    if self.kept.get(name) != Some(&value) || *reading == Text {
                        read.lines.push((Subject::ENV, line));
                    }
                }
                self.kept.insert(name, value.clone());
                value
            });
            if let Some(value) = value {
                read.values.insert(name, value);
            }
        }
        read
    }
}

fn is_ignored(faults: &mut Faults, name: &str) -> bool {
    let scenario = crate::faults::scenario();
    let is_named = |fault: &crate::scenario::Fault| fault.variable.as_deref() == Some(name);
    scenario.fault.iter().any(|fault| fault.kind == Kind::IgnoredVariable && is_named(fault))
        && faults.holds(Kind::IgnoredVariable, crate::faults::Moment::default(), is_named)
}

/// The line by which a variable shows.
fn line(name: &str, reading: Reading, text: &str) -> Option<String> {
    match reading {
        Number => number(text).map(|value| format!("{name} set by environment to {value}.")),
        Level if name == "NCCL_P2P_DISABLE" => {
            (number(text) == Some(1)).then(|| format!("{name} set by environment to {text}"))
        }
        Level => {
            let is_known = LEVELS.contains(&text) || text.starts_with(|first: char| first.is_ascii_digit());
            is_known.then(|| format!("{name} set by environment to {text}"))
        }
        Text | TextOnce => (!text.is_empty()).then(|| format!("{name} set by environment to {text}")),
    }
}

/// Reads NCCL's configuration files, once a process: what they hold goes into the environment, where
/// nothing is set there.
pub(crate) fn read_configuration(version: i32) {
    static ONCE: std::sync::Once = std::sync::Once::new();
    ONCE.call_once(|| {
        let named = std::env::var("NCCL_CONF_FILE").ok().filter(|path| version >= 22_300 && !path.is_empty());
        let own = std::env::var("HOME").ok().map(|home| format!("{home}/.nccl.conf"));
        for path in named.or(own).into_iter().chain(["/etc/nccl.conf".to_owned()]) {
            let Ok(text) = std::fs::read_to_string(path) else { continue };
            for (name, value) in
                text.lines().filter(|line| !line.starts_with('#')).filter_map(|line| line.split_once('='))
            {
                if !name.is_empty() && std::env::var_os(name).is_none() {
                    // SAFETY: as NCCL does it: on the thread that makes the first call, before any other
                    // thread of NCCL reads the environment.
                    unsafe { std::env::set_var(name, value) };
                }
            }
        }
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Reads twice, with other values the second time.
    fn twice(version: i32, first: &[(&str, &str)], second: &[(&str, &str)]) -> (Read, Read) {
        let mut variables = Variables::default();
        let mut faults = Faults::default();
        let mut read = |set: &[(&str, &str)]| {
            variables.read(version, &mut faults, |name| {
                set.iter().find(|(known, _)| *known == name).map(|(_, value)| (*value).to_owned())
            })
        };
        (read(first), read(second))
    }

    fn lines(read: &Read) -> Vec<&str> {
        read.lines.iter().map(|(_, line)| line.as_str()).collect()
    }

    #[test]
    fn numbers_stay_and_texts_do_not() {
        let first = [("NCCL_MIN_NCHANNELS", "0x10"), ("NCCL_PROTO", "LL"), ("NCCL_P2P_DISABLE", "1")];
        let second = [("NCCL_MIN_NCHANNELS", "8"), ("NCCL_PROTO", "Simple"), ("NCCL_P2P_DISABLE", "0")];
        for version in [21_903, 22_304, 22_809, 23_007, 23_200] {
            let (one, two) = twice(version, &first, &second);
            assert_eq!((one.number("NCCL_MIN_NCHANNELS"), two.number("NCCL_MIN_NCHANNELS")), (Some(16), Some(16)));
            assert_eq!(two.text("NCCL_PROTO").as_deref(), Some("Simple"), "{version}");
            assert_eq!(two.text("NCCL_P2P_DISABLE").as_deref(), Some("1"), "{version}");
            assert!(lines(&one).contains(&"NCCL_MIN_NCHANNELS set by environment to 16."));
            assert_eq!(lines(&two), ["NCCL_PROTO set by environment to Simple"]);
        }
    }

    #[test]
    fn since_2_29_7_numbers_can_be_read_again() {
        let first = [("NCCL_NO_CACHE", "NCCL_NTHREADS"), ("NCCL_NTHREADS", "256"), ("NCCL_BUFFSIZE", "1")];
        let second = [("NCCL_NTHREADS", "512"), ("NCCL_BUFFSIZE", "2")];
        let (_, new) = twice(23_003, &first, &second);
        assert_eq!((new.number("NCCL_NTHREADS"), new.number("NCCL_BUFFSIZE")), (Some(512), Some(1)));
        let (_, old) = twice(22_809, &first, &second);
        assert_eq!(old.number("NCCL_NTHREADS"), Some(256));
    }

    #[test]
    fn an_unset_number_stays_unset_and_later_releases_read_more() {
        let (_, later) = twice(22_809, &[], &[("NCCL_BUFFSIZE", "4096"), ("NCCL_NTHREADS", "")]);
        assert_eq!(later.number("NCCL_BUFFSIZE"), None);
        assert_eq!(twice(22_304, &[("NCCL_RAS_ENABLE", "0")], &[]).0.number("NCCL_RAS_ENABLE"), None);
        assert_eq!(twice(22_403, &[("NCCL_RAS_ENABLE", "0")], &[]).0.number("NCCL_RAS_ENABLE"), Some(0));
    }

    #[test]
    fn a_level_that_is_no_level_shows_nothing() {
        let shown = |level| lines(&twice(22_809, &[("NCCL_P2P_LEVEL", level)], &[]).0).len();
        assert_eq!((shown("SYS"), shown("5"), shown("sys"), shown("ANY")), (1, 1, 0, 0));
    }
}
