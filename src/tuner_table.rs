//! Tuner tables: what runs for which message, as the plugin reads it.
//!
//! Reading is the plugin's own code, so that what this tool takes for a table is what a server takes for one.

use std::collections::BTreeSet;

use nccl_abi::table::{COLUMNS, COLUMNS_NEEDED};
use nccl_abi::{ALGORITHMS, COLLECTIVES, PROTOCOLS};

pub use nccl_abi::table::Row;
pub use nccltune_tuner::table::{Decision, Lookup, Table, TableError};

use crate::collective::Collective;
use crate::machine::NcclVersion;
use crate::record::Effective;
use crate::units::group_thousands;

/// The largest message that a table can speak of, in bytes.
pub const BYTES_MAX: u64 = i64::MAX as u64;
/// Characters of a comment; the plugin reads no line of more than 1,024 bytes.
const LINE_CHARACTERS: usize = 250;
/// The first release whose log says how many channels a message ran with, without which no table can be made.
pub const LOGGED_SINCE: NcclVersion = NcclVersion::v2(24, 0);
/// The first release that loads a plugin of a version that this project's has (`ncclTunerPlugin_v2`).
pub const SINCE: NcclVersion = NcclVersion::v2(21, 0);

/// The number that tuners know a collective by; send and receive are never asked about.
pub fn collective_index(collective: Collective) -> Option<usize> {
    let name = collective.log_name().to_ascii_lowercase();
    COLLECTIVES.iter().position(|known| *known == name)
}

/// What ran, in a table's terms; none where the log did not tell all of it.
pub fn decision_of(effective: &Effective) -> Option<Decision> {
    let index = |names: &[&str], name: &Option<String>| {
        let name = name.as_deref()?;
        names.iter().position(|known| known.eq_ignore_ascii_case(name))
    };
    Some(Decision {
        algorithm: index(&ALGORITHMS, &effective.algo)?,
        protocol: index(&PROTOCOLS, &effective.proto)?,
        channels: effective.channels.filter(|channels| *channels > 0)?,
    })
}

/// Whether a decision runs LL128, which only links that keep 128 bytes together carry safely.
pub fn is_ll128(decision: Decision) -> bool {
    PROTOCOLS.get(decision.protocol) == Some(&"ll128")
}

/// The text of a table: comments, then rows by collective, ranks and size. Every sort of message that it speaks of is
/// covered from 0 to 2^63 - 1: what has no row stands as a comment that says so.
pub fn write(header: &[String], rows: &[Row]) -> String {
    let clean = |line: &String| -> String {
        line.chars().take(LINE_CHARACTERS).map(|sign| if sign.is_control() { ' ' } else { sign }).collect()
    };
    let mut text = String::new();
    for line in header {
        text.push_str(&format!("# {}\n", clean(line).trim_end()));
    }
    text.push_str(&format!("# {}\n", COLUMNS[..COLUMNS_NEEDED].join(",")));
    let mut rows = rows.to_vec();
    rows.sort_by_key(|row| (row.collective, row.ranks, row.nodes, row.min_bytes));
    let sort = |row: &Row| (row.collective, row.ranks, row.nodes);
    for rows in rows.chunk_by(|left, right| sort(left) == sort(right)) {
        let name = COLLECTIVES.get(rows[0].collective).copied().unwrap_or("?");
        let mut next = Some(0);
        for row in rows {
            if let Some(first) = next.filter(|first| *first < row.min_bytes) {
                text.push_str(&left_to_nccl(name, first, row.min_bytes - 1));
            }
            let condition = |number: Option<u64>| number.map_or_else(|| "-1".to_owned(), |number| number.to_string());
            text.push_str(&format!(
                "{name},{},{},{},{},{},{},{}\n",
                row.min_bytes,
                row.max_bytes,
                ALGORITHMS.get(row.algorithm).copied().unwrap_or("?"),
                PROTOCOLS.get(row.protocol).copied().unwrap_or("?"),
                row.channels,
                condition(row.nodes),
                condition(row.ranks),
            ));
            next = row.max_bytes.checked_add(1).filter(|next| *next <= BYTES_MAX);
        }
        if let Some(first) = next {
            text.push_str(&left_to_nccl(name, first, BYTES_MAX));
        }
    }
    text
}

fn left_to_nccl(collective: &str, first: u64, last: u64) -> String {
    let last = if last == BYTES_MAX { "2^63 - 1".to_owned() } else { group_thousands(last) };
    format!("# {collective} of {} to {last} bytes: NCCL's own choice\n", group_thousands(first))
}

/// The ranks that a table has rows for; none stands for any.
pub fn ranks_of(table: &Table) -> BTreeSet<Option<u64>> {
    table.rows.iter().map(|row| row.ranks).collect()
}

/// Why a table is of no use to a communicator of so many ranks on one machine, where that is so.
pub fn foreign_to(table: &Table, ranks: u32) -> Option<String> {
    if table.of_communicator(u64::from(ranks), 1).rows() > 0 {
        return None;
    }
    if table.rows.is_empty() {
        return Some("it has no rows".to_owned());
    }
    let nodes: BTreeSet<Option<u64>> = table.rows.iter().map(|row| row.nodes).collect();
    if !nodes.contains(&None) && !nodes.contains(&Some(1)) {
        return Some("all its rows are for communicators on several machines".to_owned());
    }
    let known: Vec<String> = ranks_of(table).into_iter().flatten().map(|ranks| ranks.to_string()).collect();
    Some(format!("it is for communicators of {} ranks, and this one has {ranks}", known.join(" or ")))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(min_bytes: u64, max_bytes: u64, protocol: usize, channels: u32) -> Row {
        Row { collective: 4, min_bytes, max_bytes, algorithm: 1, protocol, channels, nodes: Some(1), ranks: Some(8) }
    }

    #[test]
    fn what_is_written_is_what_the_plugin_reads_and_says_what_it_leaves_alone() {
        let rows = [row(4096, BYTES_MAX, 2, 32), row(0, 1023, 0, 4)];
        let text = write(&["a header\nof one line".to_owned()], &rows);
        insta::assert_snapshot!(text);
        let read = Table::parse(text.as_bytes()).unwrap();
        assert_eq!(read.rows, [rows[1], rows[0]]);
        let gap = write(&[], &[row(10, 20, 0, 1)]);
        assert!(gap.contains("of 0 to 9 bytes: NCCL's own") && gap.contains("of 21 to 2^63 - 1 bytes: NCCL's own"));
    }

    #[test]
    fn every_collective_but_send_and_receive_has_a_number() {
        for collective in Collective::ALL {
            let index = collective_index(collective);
            assert_eq!(index.is_none(), collective == Collective::SendRecv, "{collective}");
        }
        assert_eq!(collective_index(Collective::AllReduce), Some(4));
    }

    #[test]
    fn what_ran_becomes_a_decision_only_where_all_of_it_is_known() {
        let ran = |algo: &str, proto: &str, channels| Effective {
            algo: Some(algo.to_owned()),
            proto: Some(proto.to_owned()),
            channels,
            ..Effective::default()
        };
        let ll = Decision { algorithm: 1, protocol: 0, channels: 16 };
        assert_eq!(decision_of(&ran("ring", "ll", Some(16))), Some(ll));
        assert_eq!(decision_of(&ran("ring", "ll", None)), None);
        assert_eq!(decision_of(&ran("rings", "ll", Some(1))), None);
        assert_eq!(decision_of(&Effective::default()), None);
        assert!(is_ll128(decision_of(&ran("tree", "ll128", Some(1))).unwrap()) && !is_ll128(ll));
    }

    #[test]
    fn a_table_for_others_says_for_whom_it_is() {
        let foreign = |text: &str, ranks| foreign_to(&Table::parse(text.as_bytes()).unwrap(), ranks);
        assert_eq!(foreign("allreduce,0,9,ring,ll,1,1,8\n", 8), None);
        assert_eq!(foreign("allreduce,0,9,ring,ll,1,-1,-1\n", 3), None);
        assert!(foreign("allreduce,0,9,ring,ll,1,1,8\n", 2).unwrap().contains("of 8 ranks, and this one has 2"));
        assert!(foreign("allreduce,0,9,ring,ll,1,2,-1\n", 2).unwrap().contains("several machines"));
        assert!(foreign("# nothing\n", 2).unwrap().contains("no rows"));
    }
}
