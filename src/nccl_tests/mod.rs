//! Reads what nccl-tests printed: its table in every form since 2017, and the JSON of `-J`.
//!
//! Such output is passed around as text: with a launcher's tags, NCCL's log between and inside the
//! rows, several tables in one file, columns cut off. Whatever cannot be read with certainty is
//! refused or left out by name; nothing is guessed. The printf formats are facts of
//! github.com/NVIDIA/nccl-tests (src/common.cu and src/util.cu, 2017 to 2.19.6); the reader is not.

mod header;
mod json;
mod launch;
mod prefix;
mod text;

use itertools::Itertools as _;

use crate::collective::{Collective, DataType};
use crate::error_kind::{Classified, ErrorKind};
use crate::wording::printable;

pub use launch::{Cell, Launch, Wish};

/// Largest file that is read.
pub const MAX_BYTES: u64 = 64 * 1024 * 1024;
/// Most rows of a file.
const MAX_ROWS: usize = 100_000;
/// Most tables of a file.
const MAX_TABLES: usize = 1000;
/// Most ranks that a device list may name.
const MAX_RANKS: u32 = 100_000;
/// Characters that are kept of a name or a line.
const CLIP: usize = 200;
/// Remarks that are kept of a file.
const MAX_REMARKS: usize = 20;

/// Why an output cannot be used.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ReadError {
    /// Larger than anything that nccl-tests prints.
    #[error("{bytes} bytes are too many for an output of nccl-tests: at most {MAX_BYTES}")]
    TooLarge {
        /// Its size.
        bytes: u64,
    },
    /// Nothing in it.
    #[error("the file is empty")]
    Empty,
    /// Not text, or not in an encoding that is read.
    #[error("this is {what}, not text in UTF-8")]
    NotText {
        /// What it looks like.
        what: &'static str,
    },
    /// Neither table nor JSON of nccl-tests.
    #[error("this is no output of nccl-tests: it holds neither its table nor its JSON")]
    NoTable,
    /// Rows, but not the header that says what the columns are.
    #[error("line {line}: rows of a table without its header, so their columns and unit are not known")]
    NoHeader {
        /// Line of the first row.
        line: u64,
    },
    /// A header that lacks what cannot be done without.
    #[error("line {line}: the table has no column {column:?}")]
    NoColumn {
        /// Line of the header.
        line: u64,
        /// What is missing.
        column: &'static str,
    },
    /// `-C 1`: the time is that of the CPU.
    #[error("the times are of the CPU that issues the calls (-C 1), not of the collectives")]
    CpuTime,
    /// A table and no whole row in it.
    #[error("the table holds no whole row{}", because(.0))]
    NoRows(String),
    /// JSON that ends early or is none.
    #[error("the JSON cannot be read: {0}")]
    Json(String),
    /// JSON of something else.
    #[error("this JSON is not of nccl-tests: it has no list \"results\"")]
    ForeignJson,
    /// More rows or tables than any test prints.
    #[error("more than {MAX_ROWS} rows or {MAX_TABLES} tables in one file")]
    TooMuch,
    /// Nothing says how many ranks took part.
    #[error("the output does not say how many ranks took part{}", because(.0))]
    NoRanks(String),
    /// The file says another number of ranks than the user.
    #[error("the output is of {found} ranks, not of {wanted}")]
    OtherRanks {
        /// What the file says.
        found: u32,
        /// What was asked for.
        wanted: u32,
    },
    /// Nothing was communicated.
    #[error("the output is of one rank: nothing was communicated")]
    OneRank,
    /// Nothing says which collective it is.
    #[error("the output does not say which collective it is of")]
    NoCollective,
    /// The file says another collective than the user.
    #[error("the output is of {found}, not of {wanted}")]
    OtherCollective {
        /// What the file says.
        found: Collective,
        /// What was asked for.
        wanted: Collective,
    },
    /// A test of something that this version does not know.
    #[error("{0} is no collective that this version knows")]
    UnknownCollective(String),
    /// Rows, but none that can be used.
    #[error("no row can be used: {0}")]
    NothingUsable(String),
}

fn because(reason: &str) -> String {
    if reason.is_empty() { String::new() } else { format!(": {reason}") }
}

impl Classified for ReadError {
    fn kind(&self) -> ErrorKind {
        ErrorKind::Usage
    }

    fn hint(&self) -> Option<String> {
        let hint = match self {
            Self::NoTable | Self::NoHeader { .. } => {
                "keep the whole output, the lines that begin with # included: nccl-tests prints them to standard output"
            }
            Self::NoRanks(_) => "say it with --ranks N: GPUs that took part in one operation",
            Self::NoCollective => "say it with --collective, such as --collective all-reduce",
            Self::OneRank => {
                "started by mpirun or srun, nccl-tests must be built with MPI=1; else every process tests one GPU alone"
            }
            Self::CpuTime => "run nccl-tests without -C",
            Self::Json(reason) if reason.starts_with(json::CUT) => {
                "a test that was stopped leaves JSON without an end; its text output may be whole"
            }
            Self::NotText { what: "text in UTF-16" } => "convert it: iconv -f UTF-16 -t UTF-8",
            _ => return None,
        };
        Some(hint.to_owned())
    }
}

/// How long an operation took, as printed.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Timing {
    /// Microseconds per operation.
    pub time_us: f64,
    /// Wrong elements where they were counted: `#wrong`, not the older column of largest deltas.
    pub wrong: Option<f64>,
}

/// A row of a table.
#[derive(Debug, Clone, PartialEq)]
pub struct Row {
    /// Line of the file from 1; position in the list for JSON.
    pub line: u64,
    /// Larger of send and receive buffer per rank.
    pub bytes: u64,
    /// Element type by nccl-tests' name ("float"), where the column is there.
    pub dtype: Option<String>,
    /// Reduction; none where the collective has none.
    pub redop: Option<String>,
    /// Root; none or -1 where the collective has none.
    pub root: Option<i64>,
    /// Out of place.
    pub out_of_place: Option<Timing>,
    /// In place.
    pub in_place: Option<Timing>,
}

/// A GPU of the device list.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Device {
    /// Rank.
    pub rank: u32,
    /// Group of ranks that work together (`NCCL_TESTS_SPLIT`); 0 before there were groups.
    pub group: u32,
    /// Its PCI address as printed ("0x1b", "0000:1b:00").
    pub address: String,
    /// Product name.
    pub name: String,
}

/// One start of a test: its header, and the rows below.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Table {
    /// Line of the header.
    pub line: u64,
    /// Name of the program or test ("`all_reduce_perf`"), where the output tells.
    pub program: Option<String>,
    /// Ranks of one operation, where the output tells.
    pub ranks: Option<u32>,
    /// Why it does not, where something is known.
    pub ranks_unknown: String,
    /// GPUs, as far as they are listed.
    pub devices: Vec<Device>,
    /// Version of NCCL as a code (22809), where the output tells.
    pub nccl_version: Option<i32>,
    /// Operations per timing (iterations), where the output tells.
    pub iterations: Option<u32>,
    /// Rows.
    pub rows: Vec<Row>,
    /// The older test counts wrong elements for the whole table only, and some were.
    pub wrong_somewhere: bool,
    /// Its times are the CPU's.
    pub cpu_time: bool,
}

/// A file.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Output {
    /// Its tables, in order.
    pub tables: Vec<Table>,
    /// What the test said when it gave up.
    pub failure: Option<String>,
    /// NCCL's variables that the test was started with, where the file lists its environment.
    pub environment: Option<Vec<(String, String)>>,
    /// What was left out and why.
    pub remarks: Vec<String>,
}

impl Output {
    fn remark(&mut self, text: String) {
        if self.remarks.len() < MAX_REMARKS && !self.remarks.contains(&text) {
            self.remarks.push(text);
        }
    }
}

/// Reads a file, whatever it is.
pub fn read(bytes: &[u8]) -> Result<Output, ReadError> {
    if bytes.len() as u64 > MAX_BYTES {
        return Err(ReadError::TooLarge { bytes: bytes.len() as u64 });
    }
    let what = match bytes {
        [0xff, 0xfe, ..] | [0xfe, 0xff, ..] => Some("text in UTF-16"),
        [0x1f, 0x8b, ..] => Some("compressed by gzip"),
        [0x28, 0xb5, 0x2f, 0xfd, ..] => Some("compressed by zstd"),
        [b'P', b'K', 3, 4, ..] => Some("a zip archive"),
        _ if bytes.iter().take(4096).any(|byte| *byte == 0) => Some("binary"),
        _ => None,
    };
    if let Some(what) = what {
        return Err(ReadError::NotText { what });
    }
    let text = String::from_utf8_lossy(bytes);
    let text = text.strip_prefix('\u{feff}').unwrap_or(&text);
    match text.trim_start().chars().next() {
        None => Err(ReadError::Empty),
        Some('{') => json::read(text),
        Some(_) => text::read(text),
    }
}

/// nccl-tests' name of a type; those of 2017 and 2018 too.
fn data_type(name: &str) -> Option<DataType> {
    match name {
        "bfloat16" => Some(DataType::Bf16),
        "half" => Some(DataType::Fp16),
        "float" => Some(DataType::Fp32),
        _ => None,
    }
}

/// The collective that a program tests, by the name of its executable.
fn collective_of(program: &str) -> Option<Collective> {
    let name = program.rsplit('/').next().unwrap_or(program);
    let (name, _) = name.split_once("_perf").unwrap_or((name, ""));
    match name.trim_end_matches(".exe") {
        "all_reduce" => Some(Collective::AllReduce),
        "all_gather" => Some(Collective::AllGather),
        "reduce_scatter" => Some(Collective::ReduceScatter),
        "broadcast" => Some(Collective::Broadcast),
        "reduce" => Some(Collective::Reduce),
        "sendrecv" => Some(Collective::SendRecv),
        _ => None,
    }
}

/// Ranks of one operation, from the list of devices: all of them, or those of a group where the ranks
/// were split and every group is as large.
fn ranks_of(devices: &[Device], count: u32) -> Result<u32, String> {
    let groups = devices.iter().counts_by(|device| device.group);
    if groups.len() <= 1 {
        return Ok(count);
    }
    match groups.values().all_equal_value() {
        Ok(size) if devices.len() == count as usize => Ok(*size as u32),
        _ => Err(format!("they were split into {} groups of different sizes", groups.len())),
    }
}

fn clipped(text: &str) -> String {
    printable(text.trim(), CLIP)
}

#[cfg(test)]
mod tests;
