//! Tables: read once per communicator, looked up without allocation or lock.

use std::fmt::Write as _;
use std::path::Path;

use nccl_abi::table::{ANY, BYTES_MAX, CHANNELS_MAX, COLUMNS, COLUMNS_NEEDED, FILE_PREFIX, FILE_SUFFIX, ROWS_MAX, Row};
use nccl_abi::{ALGORITHMS, COLLECTIVES, PROTOCOLS};
use sha2::{Digest, Sha256};

/// Longest line.
const LINE_BYTES_MAX: usize = 1024;
/// Most characters of a text that an error repeats.
const SHOWN_CHARACTERS: usize = 40;
/// Fewest digits of a hash in a file's name for it to count as one.
const HASH_DIGITS_MIN: usize = 8;

/// Why a table cannot be used.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TableError {
    /// The line, counted from 1; nothing where the file as a whole is at fault.
    pub line: Option<usize>,
    /// What is wrong and what was expected.
    pub reason: String,
}

impl std::fmt::Display for TableError {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self.line {
            Some(line) => write!(formatter, "line {line}: {}", self.reason),
            None => formatter.write_str(&self.reason),
        }
    }
}

impl std::error::Error for TableError {}

fn whole(reason: impl Into<String>) -> TableError {
    TableError { line: None, reason: reason.into() }
}

/// A table as its file holds it, checked.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Table {
    /// Rows in the order of the file.
    pub rows: Vec<Row>,
    /// SHA-256 of the file, in hexadecimal digits.
    pub sha256: String,
}

/// What a table says for messages of some sizes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Decision {
    /// Index in [`ALGORITHMS`].
    pub algorithm: usize,
    /// Index in [`PROTOCOLS`].
    pub protocol: usize,
    /// Channels; 0 leaves them to NCCL.
    pub channels: u32,
}

impl Table {
    /// Reads the text of a table.
    ///
    /// Nothing is guessed: an unknown name, a range that is reversed or overlaps another, a size beyond 2^63 - 1, a
    /// condition on anything but collective, size, ranks and nodes is an error with its line.
    pub fn parse(bytes: &[u8]) -> Result<Self, TableError> {
        if bytes.len() as u64 > BYTES_MAX {
            return Err(whole(format!("larger than {BYTES_MAX} bytes, which no table is")));
        }
        let text = std::str::from_utf8(bytes).map_err(|error| {
            let line = bytes[..error.valid_up_to()].split(|byte| *byte == b'\n').count();
            TableError { line: Some(line), reason: "not a text".to_owned() }
        })?;
        let mut rows: Vec<Row> = Vec::new();
        let mut lines: Vec<usize> = Vec::new();
        for (index, line) in text.lines().enumerate() {
            let line_number = index + 1;
            let at = |reason: String| TableError { line: Some(line_number), reason };
            let line = line.trim();
            if line.is_empty() || line.starts_with('#') {
                continue;
            }
            if line.len() > LINE_BYTES_MAX {
                return Err(at(format!("longer than {LINE_BYTES_MAX} bytes")));
            }
            if rows.len() == ROWS_MAX {
                return Err(at(format!("more than {ROWS_MAX} rows")));
            }
            let row = parse_row(line).map_err(at)?;
            if let Some(other) = rows.iter().position(|other| overlap(other, &row)) {
                return Err(at(format!(
                    "its sizes overlap those of line {}, so that it is not certain which of them is meant",
                    lines[other]
                )));
            }
            rows.push(row);
            lines.push(line_number);
        }
        Ok(Self { rows, sha256: hexadecimal(&Sha256::digest(bytes)) })
    }

    /// Whether the name of a file agrees with what is in it. Names that hold no hash agree with everything.
    pub fn is_named_so(&self, path: &Path) -> bool {
        let hash = path
            .file_name()
            .and_then(|name| name.to_str())
            .and_then(|name| name.strip_prefix(FILE_PREFIX)?.strip_suffix(FILE_SUFFIX));
        match hash {
            Some(hash) if hash.len() >= HASH_DIGITS_MIN && hash.bytes().all(|byte| byte.is_ascii_hexdigit()) => {
                self.sha256.starts_with(&hash.to_ascii_lowercase())
            }
            _ => true,
        }
    }

    /// The rows that can match in a communicator.
    pub fn of_communicator(&self, ranks: u64, nodes: u64) -> Lookup {
        let mut by_collective: [Vec<Range>; COLLECTIVES.len()] = Default::default();
        for row in &self.rows {
            if row.ranks.is_none_or(|wanted| wanted == ranks) && row.nodes.is_none_or(|wanted| wanted == nodes) {
                by_collective[row.collective].push(Range {
                    min_bytes: row.min_bytes,
                    max_bytes: row.max_bytes,
                    decision: Decision { algorithm: row.algorithm, protocol: row.protocol, channels: row.channels },
                });
            }
        }
        for ranges in &mut by_collective {
            ranges.sort_by_key(|range| range.min_bytes);
        }
        Lookup { by_collective }
    }
}

fn hexadecimal(bytes: &[u8]) -> String {
    bytes.iter().fold(String::new(), |mut text, byte| {
        // Writing to a string cannot fail.
        let _ = write!(text, "{byte:02x}");
        text
    })
}

/// Whether two rows could both match one call.
fn overlap(first: &Row, second: &Row) -> bool {
    let both = |first: Option<u64>, second: Option<u64>| match (first, second) {
        (Some(first), Some(second)) => first == second,
        _ => true,
    };
    first.collective == second.collective
        && both(first.ranks, second.ranks)
        && both(first.nodes, second.nodes)
        && first.min_bytes <= second.max_bytes
        && second.min_bytes <= first.max_bytes
}

fn shown(text: &str) -> String {
    let short: String = text.chars().take(SHOWN_CHARACTERS).collect();
    format!("{short:?}")
}

fn parse_row(line: &str) -> Result<Row, String> {
    let fields: Vec<&str> = line.split(',').map(str::trim).collect();
    if fields.len() < COLUMNS_NEEDED || fields.len() > COLUMNS.len() {
        return Err(format!(
            "{} columns, expected {COLUMNS_NEEDED} to {}: {}",
            fields.len(),
            COLUMNS.len(),
            COLUMNS.join(",")
        ));
    }
    let collective = index_of(fields[0], COLUMNS[0], &COLLECTIVES)?;
    let min_bytes = size(fields[1], COLUMNS[1])?;
    let max_bytes = size(fields[2], COLUMNS[2])?;
    if max_bytes < min_bytes {
        return Err(format!("the range of sizes is reversed: {min_bytes} to {max_bytes}"));
    }
    let algorithm = index_of(fields[3], COLUMNS[3], &ALGORITHMS)?;
    let protocol = index_of(fields[4], COLUMNS[4], &PROTOCOLS)?;
    if !implements(algorithm, collective) {
        return Err(format!("NCCL has no {} for {}", ALGORITHMS[algorithm], COLLECTIVES[collective]));
    }
    let channels = match number(fields[5], COLUMNS[5])? {
        ANY => 0,
        channels @ 1..=CHANNELS_MAX => u32::try_from(channels).unwrap_or(0),
        other => return Err(format!("channels must be 1 to {CHANNELS_MAX}, or {ANY} for NCCL's own, not {other}")),
    };
    let nodes = condition(fields[6], COLUMNS[6])?;
    let ranks = condition(fields[7], COLUMNS[7])?;
    for (field, column) in fields.iter().zip(COLUMNS).skip(COLUMNS_NEEDED) {
        if number(field, column)? != ANY {
            return Err(format!(
                "{column} must be {ANY}: ranks may differ in it, and would then choose differently and hang"
            ));
        }
    }
    Ok(Row { collective, min_bytes, max_bytes, algorithm, protocol, channels, nodes, ranks })
}

/// Which algorithms exist for which collective (NCCL's cost model gives all others no bandwidth).
fn implements(algorithm: usize, collective: usize) -> bool {
    match ALGORITHMS[algorithm] {
        "ring" => true,
        "tree" | "collnet_chain" | "nvls_tree" => COLLECTIVES[collective] == "allreduce",
        "pat" => matches!(COLLECTIVES[collective], "allgather" | "reducescatter"),
        _ => matches!(COLLECTIVES[collective], "allreduce" | "allgather" | "reducescatter"),
    }
}

fn index_of(text: &str, column: &str, names: &[&str]) -> Result<usize, String> {
    names
        .iter()
        .position(|name| *name == text)
        .ok_or_else(|| format!("{column} {} is none of {}", shown(text), names.join(", ")))
}

fn number(text: &str, column: &str) -> Result<i64, String> {
    text.parse().map_err(|_| format!("{column} {} is not a whole number below 2^63", shown(text)))
}

fn size(text: &str, column: &str) -> Result<u64, String> {
    u64::try_from(number(text, column)?).map_err(|_| format!("{column} {} is below zero", shown(text)))
}

fn condition(text: &str, column: &str) -> Result<Option<u64>, String> {
    match number(text, column)? {
        ANY => Ok(None),
        number if number > 0 => Ok(Some(number.unsigned_abs())),
        number => Err(format!("{column} must be above zero, or {ANY} for any, not {number}")),
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Range {
    min_bytes: u64,
    max_bytes: u64,
    decision: Decision,
}

/// The rows of one communicator, sorted by size.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Lookup {
    by_collective: [Vec<Range>; COLLECTIVES.len()],
}

impl Lookup {
    /// Rows that can match.
    pub fn rows(&self) -> usize {
        self.by_collective.iter().map(Vec::len).sum()
    }

    /// What the table says for a message; nothing where no row matches.
    pub fn decide(&self, collective: usize, bytes: u64) -> Option<Decision> {
        let ranges = self.by_collective.get(collective)?;
        let above = ranges.partition_point(|range| range.min_bytes <= bytes);
        let range = ranges.get(above.checked_sub(1)?)?;
        (bytes <= range.max_bytes).then_some(range.decision)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TABLE: &str = "# small messages\n\
        allreduce,0,262143,ring,ll,16,1,8\n\
        allreduce,262144,9223372036854775807,ring,simple,32,1,8,-1,-1\r\n\
        \n\
        allreduce,0,9223372036854775807,tree,ll,4,1,2\n\
        allgather,1,1024,ring,ll,-1,-1,-1\n";

    fn reason(text: &str) -> String {
        Table::parse(text.as_bytes()).unwrap_err().to_string()
    }

    #[test]
    fn a_row_decides_for_its_sizes_and_its_communicator_alone() {
        let table = Table::parse(TABLE.as_bytes()).unwrap();
        let eight = table.of_communicator(8, 1);
        assert_eq!(eight.rows(), 3);
        let ring = |protocol, channels| Some(Decision { algorithm: 1, protocol, channels });
        for (bytes, decision) in [
            (0, ring(0, 16)),
            (262_143, ring(0, 16)),
            (262_144, ring(2, 32)),
            (u64::MAX >> 1, ring(2, 32)),
            (u64::MAX, None),
        ] {
            assert_eq!(eight.decide(4, bytes), decision, "{bytes}");
        }
        assert_eq!(eight.decide(2, 0), None);
        assert_eq!(eight.decide(2, 1024), ring(0, 0));
        assert_eq!(eight.decide(2, 1025), None);
        assert_eq!(eight.decide(99, 1), None);
        let two = table.of_communicator(2, 1);
        assert_eq!(two.decide(4, 5), Some(Decision { algorithm: 0, protocol: 0, channels: 4 }));
        assert_eq!(table.of_communicator(4, 1).rows(), 1);
        assert_eq!(table.of_communicator(8, 2).decide(4, 5), None);
    }

    #[test]
    fn what_is_wrong_is_said_with_its_line() {
        for (row, expected) in [
            ("allreduce,0,1,ring,ll,1,1", "line 2: 7 columns"),
            ("allreduce,0,1,ring,ll,1,1,8,-1,-1,-1", "11 columns"),
            ("AllReduce,0,1,ring,ll,1,1,8", "collective \"AllReduce\" is none of broadcast"),
            ("allreduce,0,1,rng,ll,1,1,8", "algorithm \"rng\" is none of tree, ring"),
            ("allreduce,0,1,ring,l,1,1,8", "protocol \"l\" is none of ll, ll128, simple"),
            ("allgather,0,1,tree,ll,1,1,8", "NCCL has no tree for allgather"),
            ("allreduce,2,1,ring,ll,1,1,8", "reversed: 2 to 1"),
            ("allreduce,0,9223372036854775808,ring,ll,1,1,8", "not a whole number below 2^63"),
            ("allreduce,-1,1,ring,ll,1,1,8", "min_bytes \"-1\" is below zero"),
            ("allreduce,0,4K,ring,ll,1,1,8", "max_bytes \"4K\" is not"),
            ("allreduce,0,1,ring,ll,0,1,8", "channels must be 1 to 64"),
            ("allreduce,0,1,ring,ll,65,1,8", "channels must be 1 to 64"),
            ("allreduce,0,1,ring,ll,1,0,8", "nodes must be above zero"),
            ("allreduce,0,1,ring,ll,1,1,-2", "ranks must be above zero"),
            ("allreduce,0,1,ring,ll,1,1,8,2", "operations must be -1"),
            ("allreduce,0,1,ring,ll,1,1,8,-1,1", "registered must be -1"),
        ] {
            assert!(reason(&format!("# x\n{row}\n")).contains(expected), "{row}: {}", reason(&format!("# x\n{row}\n")));
        }
        let overlapping = "allreduce,0,10,ring,ll,1,1,8\nallreduce,10,20,ring,ll,1,-1,-1\n";
        assert!(reason(overlapping).contains("line 2: its sizes overlap those of line 1"));
        assert_eq!(Table::parse(b"allreduce,0\n\xff").unwrap_err().line, Some(2));
        assert!(Table::parse(&vec![b' '; 1 << 21]).unwrap_err().line.is_none());
        let rows: Vec<String> = (0..=ROWS_MAX).map(|row| format!("allreduce,{row},{row},ring,ll,1,1,8")).collect();
        assert!(reason(&rows.join("\n")).contains("more than 4096 rows"));
        assert!(reason(&"x".repeat(2000)).contains("longer than"));
    }

    #[test]
    fn rows_for_other_communicators_do_not_overlap() {
        let text = "allreduce,0,10,ring,ll,1,1,8\nallreduce,0,10,ring,ll,1,1,4\nallgather,0,10,ring,ll,1,1,8\n";
        assert_eq!(Table::parse(text.as_bytes()).unwrap().rows.len(), 3);
    }

    #[test]
    fn a_file_that_is_named_by_a_hash_must_have_it() {
        let table = Table::parse(TABLE.as_bytes()).unwrap();
        let named = |name: String| table.is_named_so(Path::new(&name));
        assert_eq!(table.sha256.len(), 64);
        assert!(named(format!("/srv/tuner-table-{}.csv", table.sha256)));
        assert!(named(format!("tuner-table-{}.csv", &table.sha256[..16])));
        assert!(!named(format!("tuner-table-{}.csv", "0".repeat(16))));
        assert!(named("mine.csv".to_owned()));
        // Known answer of SHA-256, from FIPS 180-4's examples.
        let known = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad";
        assert_eq!(hexadecimal(&Sha256::digest(b"abc")), known);
    }

    #[test]
    fn cut_anywhere_it_is_read_or_refused() {
        for end in 0..TABLE.len() {
            let _ = Table::parse(&TABLE.as_bytes()[..end]);
        }
    }
}
