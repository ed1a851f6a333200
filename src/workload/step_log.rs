//! Reads which collectives a program asked NCCL for, from its log with `NCCL_DEBUG_SUBSYS=COLL`.
//!
//! Each call is one line on each rank:
//!
//! ```text
//! host:pid:tid [device] NCCL INFO AllReduce: opCount 3 sendbuff 0x.. recvbuff 0x.. count 32768
//!     datatype 9 op 0 root 0 comm 0x.. [nranks=8] stream 0x..
//! ```
//!
//! Such a log may be as long as the server's life, holds other lines in between, and ranks that share
//! a pipe write into each other's lines. This reader takes any bytes, keeps a bounded amount of them,
//! and says what it left out. The wording is that of NCCL 2.10 to 2.30; releases differ in what they
//! put between the fields that are read here.

use std::collections::HashMap;

use crate::collective::{Collective, DataType};

/// Bytes of a log that are read; more calls than are kept do not fit into them where lines are of usual length.
pub const MAX_LOG_BYTES: u64 = 1 << 30;
/// Bytes of a line that are looked at; a whole one has about 250.
const LINE_LIMIT: usize = 4096;
/// Calls that are kept, over all ranks.
const MAX_CALLS: usize = 4 << 20;
/// Ranks that are told apart.
const MAX_RANKS: usize = 1024;
/// Communicators of a rank that are told apart.
const MAX_COMMUNICATORS: usize = 256;
/// Different calls that are told apart.
const MAX_KINDS: usize = 1 << 16;
/// The most elements of one call that are believed.
const MAX_ELEMENTS: u64 = 1 << 48;

/// What one call asks for.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(super) struct Kind {
    pub(super) operation: Operation,
    /// NCCL's number of the element type.
    pub(super) element: u8,
    /// Elements, as NCCL is told: of each rank for gathers and scatters.
    pub(super) elements: u64,
    /// Ranks of the communicator, where the line says so.
    pub(super) ranks: Option<u32>,
    /// Which of its process's communicators, in order of appearance.
    pub(super) communicator: u16,
}

/// What is asked for.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(super) enum Operation {
    Collective(Collective),
    Send,
    Receive,
    /// One that this tool does not know, by NCCL's name.
    Other(String),
}

/// NCCL's numbers of element types (`ncclDataType_t`), with their names and sizes in bytes.
const ELEMENTS: [(&str, u64); 12] = [
    ("int8", 1),
    ("uint8", 1),
    ("int32", 4),
    ("uint32", 4),
    ("int64", 8),
    ("uint64", 8),
    ("fp16", 2),
    ("fp32", 4),
    ("fp64", 8),
    ("bf16", 2),
    ("fp8-e4m3", 1),
    ("fp8-e5m2", 1),
];

impl Kind {
    /// The element type in words.
    pub(super) fn element_name(&self) -> String {
        let known = ELEMENTS.get(usize::from(self.element)).map(|(name, _)| (*name).to_owned());
        known.unwrap_or_else(|| format!("type {}", self.element))
    }

    /// Whether elements are single bytes of no type, as some releases count what is only moved.
    pub(super) fn is_bytes(&self) -> bool {
        self.element <= 1
    }

    /// The element type, where this tool knows it.
    pub(super) fn dtype(&self) -> Option<DataType> {
        match self.element {
            6 => Some(DataType::Fp16),
            7 => Some(DataType::Fp32),
            9 => Some(DataType::Bf16),
            _ => None,
        }
    }

    /// The larger of send and receive buffer of a rank. Saturates.
    pub(super) fn bytes(&self, ranks: u32) -> u64 {
        let element = ELEMENTS.get(usize::from(self.element)).map_or(1, |(_, bytes)| *bytes);
        let parts = match self.operation {
            Operation::Collective(Collective::AllGather | Collective::ReduceScatter) => u64::from(ranks),
            _ => 1,
        };
        self.elements.saturating_mul(element).saturating_mul(parts)
    }

    /// What is asked for, in words.
    pub(super) fn name(&self) -> String {
        match &self.operation {
            Operation::Collective(collective) => collective.name().to_owned(),
            Operation::Send => "send".to_owned(),
            Operation::Receive => "receive".to_owned(),
            Operation::Other(name) => name.clone(),
        }
    }
}

/// The calls of one rank.
#[derive(Debug, Clone, Default)]
pub(super) struct Rank {
    communicators: Vec<String>,
    /// By place in [`StepLog::kinds`], in order.
    pub(super) calls: Vec<u32>,
}

/// Everything a log told about calls.
#[derive(Debug, Clone, Default)]
pub struct StepLog {
    pub(super) kinds: Vec<Kind>,
    known: HashMap<Kind, u32>,
    pub(super) ranks: Vec<Rank>,
    /// Ranks by host, process and device, as their lines begin.
    places: HashMap<String, usize>,
    kept: usize,
    /// Calls that were read and not kept, because too much was.
    pub(super) dropped: u64,
    /// Lines that begin like a call and do not say what is asked for.
    pub(super) torn: u64,
    /// Whether the file went on after [`MAX_LOG_BYTES`].
    pub(super) cut: bool,
    /// Lines of NCCL's that are no calls.
    pub(super) other_lines: u64,
}

impl StepLog {
    /// Reads to the end, or to [`MAX_LOG_BYTES`].
    pub fn read(mut reader: impl std::io::Read) -> std::io::Result<Self> {
        let mut log = Self::default();
        let mut piece = vec![0_u8; 1 << 16];
        let mut line: Vec<u8> = Vec::with_capacity(LINE_LIMIT);
        let mut left = MAX_LOG_BYTES;
        loop {
            let wanted = piece.len().min(usize::try_from(left).unwrap_or(usize::MAX));
            if wanted == 0 {
                log.cut = true;
                break;
            }
            let length = match reader.read(&mut piece[..wanted]) {
                Ok(0) => break,
                Ok(length) => length,
                Err(error) if error.kind() == std::io::ErrorKind::Interrupted => continue,
                Err(error) => return Err(error),
            };
            left -= length as u64;
            for part in piece[..length].split_inclusive(|byte| *byte == b'\n') {
                let room = LINE_LIMIT - line.len();
                line.extend_from_slice(&part[..part.len().min(room)]);
                if part.ends_with(b"\n") {
                    log.add_line(&line);
                    line.clear();
                }
            }
        }
        log.add_line(&line);
        Ok(log)
    }

    /// A whole text.
    pub fn parse(text: impl AsRef<[u8]>) -> Self {
        // Reading from memory does not fail.
        Self::read(text.as_ref()).unwrap_or_default()
    }

    /// Calls that were kept.
    pub fn calls(&self) -> usize {
        self.kept
    }

    fn add_line(&mut self, line: &[u8]) {
        const MARK: &str = "NCCL INFO ";
        // Most lines of a server's log are not NCCL's, and need no decoding.
        let begins = |at: usize| line[at..].starts_with(MARK.as_bytes());
        if !line.iter().enumerate().any(|(at, byte)| *byte == b'N' && begins(at)) {
            return;
        }
        let line = String::from_utf8_lossy(line);
        // Ranks that share a pipe may write into each other's lines: every mark begins a message.
        let starts: Vec<usize> = line.match_indices(MARK).map(|(at, _)| at).take(64).collect();
        for (index, &at) in starts.iter().enumerate() {
            let end = starts.get(index + 1).copied().unwrap_or(line.len());
            let from = index.checked_sub(1).map_or(0, |before| starts[before] + MARK.len());
            self.add_message(&origin(&line[from..at]), &line[at + MARK.len()..end]);
        }
    }

    fn add_message(&mut self, origin: &str, message: &str) {
        let Some((name, fields)) = message.split_once(": opCount ") else {
            self.other_lines += 1;
            return;
        };
        let Some(call) = Call::read(name, fields) else {
            self.torn += 1;
            return;
        };
        let Some(place) = self.place(origin) else {
            self.dropped += 1;
            return;
        };
        let communicators = &mut self.ranks[place].communicators;
        let communicator = match communicators.iter().position(|known| known == call.communicator) {
            Some(position) => position,
            None if communicators.len() < MAX_COMMUNICATORS => {
                communicators.push(call.communicator.to_owned());
                communicators.len() - 1
            }
            None => MAX_COMMUNICATORS - 1,
        };
        let kind = Kind {
            operation: call.operation,
            element: call.element,
            elements: call.elements,
            ranks: call.ranks,
            communicator: communicator as u16,
        };
        let kind = match self.known.get(&kind) {
            Some(place) => *place,
            None if self.kinds.len() < MAX_KINDS => {
                let place = self.kinds.len() as u32;
                self.kinds.push(kind.clone());
                self.known.insert(kind, place);
                place
            }
            None => {
                self.dropped += 1;
                return;
            }
        };
        if self.kept >= MAX_CALLS {
            self.dropped += 1;
            return;
        }
        self.kept += 1;
        self.ranks[place].calls.push(kind);
    }

    /// The rank with this name; none when there are too many already.
    fn place(&mut self, name: &str) -> Option<usize> {
        if let Some(place) = self.places.get(name) {
            return Some(*place);
        }
        if self.ranks.len() >= MAX_RANKS {
            return None;
        }
        let place = self.ranks.len();
        self.ranks.push(Rank::default());
        self.places.insert(name.to_owned(), place);
        Some(place)
    }
}

/// What tells ranks apart in what a line begins with: host, process and device. Threads of one
/// process count as one; whatever a launcher or a clock put before is left out. A line that begins
/// otherwise belongs to a rank of that beginning.
fn origin(prefix: &str) -> String {
    const LONGEST: usize = 200;
    let mut words = prefix.split_whitespace().rev();
    if let (Some(device), Some(host)) = (words.next(), words.next())
        && device.starts_with('[')
        && device.ends_with(']')
        && let Some((process, thread)) = host.rsplit_once(':')
        && process.contains(':')
        && thread.bytes().all(|letter| letter.is_ascii_digit())
    {
        return format!("{process} {device}").chars().take(LONGEST).collect();
    }
    prefix.trim().chars().take(LONGEST).collect()
}

/// The fields of one line.
struct Call<'a> {
    operation: Operation,
    element: u8,
    elements: u64,
    ranks: Option<u32>,
    communicator: &'a str,
}

impl<'a> Call<'a> {
    /// Reads what stands behind "opCount"; nothing where the line was cut.
    fn read(name: &str, fields: &'a str) -> Option<Self> {
        const LONGEST_NAME: usize = 32;
        const KNOWN: [Collective; 5] = [
            Collective::AllReduce,
            Collective::AllGather,
            Collective::ReduceScatter,
            Collective::Broadcast,
            Collective::Reduce,
        ];
        let mut words = fields.split_whitespace().take(64);
        let (mut elements, mut element, mut communicator, mut ranks) = (None, None, None, None);
        while let Some(word) = words.next() {
            match word {
                "count" => elements = words.next()?.parse::<u64>().ok().filter(|count| *count <= MAX_ELEMENTS),
                "datatype" => element = words.next()?.parse::<u8>().ok(),
                "comm" => communicator = words.next(),
                _ => {
                    if let Some(number) = word.strip_prefix("[nranks=") {
                        ranks = number.trim_end_matches(']').parse::<u32>().ok().filter(|ranks| *ranks > 0);
                    }
                }
            }
        }
        let name = name.rsplit(char::is_whitespace).next().unwrap_or(name);
        if name.is_empty() || name.len() > LONGEST_NAME || !name.bytes().all(|letter| letter.is_ascii_alphanumeric()) {
            return None;
        }
        let operation = match name {
            "Send" => Operation::Send,
            "Recv" => Operation::Receive,
            _ => match KNOWN.into_iter().find(|collective| collective.log_name() == name) {
                Some(collective) => Operation::Collective(collective),
                None => Operation::Other(name.to_owned()),
            },
        };
        Some(Self { operation, element: element?, elements: elements?, ranks, communicator: communicator? })
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const LINE: &str = "node:41:77 [3] NCCL INFO AllReduce: opCount 1f sendbuff 0x7f sendbuff2 recvbuff 0x7f count 32768 \
                        datatype 9 op 0 root 0 comm 0x5a [nranks=8] stream 0x9c";

    #[test]
    fn a_line_says_what_is_asked_for() {
        let log = StepLog::parse(LINE);
        assert_eq!((log.calls(), log.torn, log.places.get("node:41 [3]")), (1, 0, Some(&0)));
        let kind = &log.kinds[0];
        assert_eq!(kind.operation, Operation::Collective(Collective::AllReduce));
        assert_eq!((kind.dtype(), kind.elements, kind.ranks), (Some(DataType::Bf16), 32_768, Some(8)));
        assert_eq!(kind.bytes(8), 65_536);
        let gather = StepLog::parse(LINE.replace("AllReduce", "AllGather"));
        assert_eq!(gather.kinds[0].bytes(8), 8 * 65_536, "NCCL counts what one rank gives, the tool what all have");
    }

    #[test]
    fn releases_put_other_words_between() {
        let newer = "(Worker_TP0 pid=4) [2026-03-12 13:57:45] node:41:78 [3] NCCL INFO AllReduce: opCount 0 sendbuff 0x1 \
                     recvbuff 0x2 acc (nil) count 5 datatype 7 op 0 root 0 comm 0x5a [nranks=2] stream (nil) task 0 \
                     globalrank 0";
        let log = StepLog::parse(format!("{newer}\n{LINE}\r\n"));
        assert_eq!(log.ranks.len(), 1, "another thread of the same process on the same device");
        assert_eq!(log.kinds[0].dtype(), Some(DataType::Fp32));
        assert_eq!(log.ranks[0].calls, [0, 1]);
        assert_eq!((log.kinds[0].communicator, log.kinds[1].communicator), (0, 0), "told apart by address alone");
    }

    #[test]
    fn ranks_communicators_and_torn_lines_are_told_apart() {
        let send = LINE.replace("AllReduce", "Send").replace("0x5a", "0x5b");
        let odd = LINE.replace("AllReduce", "AlltoAllv").replace("datatype 9", "datatype 77");
        let text = format!(
            "{LINE}\n{}\n{send}\n{odd}\nNCCL INFO AllReduce: opCount 3 sendbuff 0x1 rec\nserver: 200 OK\n\
             node:41:77 [3] NCCL INFO Channel 00/0 : 0[0] -> 1[1] via SHM/direct/direct\n{LINE} {LINE}",
            LINE.replace("41:77", "42:77"),
        );
        let log = StepLog::parse(&text);
        let calls = |name: &str| log.ranks[log.places[name]].calls.len();
        assert_eq!((calls("node:41 [3]"), calls("node:42 [3]")), (5, 1), "two calls on one line are two");
        assert_eq!((log.torn, log.other_lines, log.calls()), (1, 1, 6));
        let names: Vec<(String, u16)> = log.kinds.iter().map(|kind| (kind.name(), kind.communicator)).collect();
        let wanted = [("all-reduce", 0), ("send", 1), ("AlltoAllv", 0)].map(|(name, at)| (name.to_owned(), at));
        assert_eq!(names, wanted);
        assert_eq!(log.kinds[2].element_name(), "type 77");
    }

    #[test]
    fn what_is_kept_is_bounded() {
        let mut long = "x".repeat(1 << 20);
        long.push_str(LINE);
        assert_eq!(StepLog::parse(&long).calls(), 0, "past the part of a line that is looked at");
        let many: String = (0..MAX_RANKS + 9).map(|pid| LINE.replace("41", &pid.to_string()) + "\n").collect();
        let log = StepLog::parse(&many);
        assert_eq!((log.ranks.len(), log.dropped), (MAX_RANKS, 9));
        let many: String =
            (0..MAX_COMMUNICATORS + 9).map(|at| LINE.replace("0x5a", &format!("0x{at}")) + "\n").collect();
        assert_eq!(StepLog::parse(&many).kinds.len(), MAX_COMMUNICATORS);
        let huge = LINE.replace("32768", "99999999999999999999");
        assert_eq!(StepLog::parse(&huge).torn, 1);
        let most = LINE.replace("32768", &MAX_ELEMENTS.to_string()).replace("nranks=8", "nranks=4294967295");
        let most = StepLog::parse(most.replace("AllReduce", "AllGather"));
        assert_eq!(most.kinds[0].bytes(u32::MAX), u64::MAX, "saturates");
    }

    proptest! {
        #[test]
        fn any_bytes_will_do(
            text in r"(NCCL INFO |AllReduce|Send|: opCount |[0-9a-f]{1,4} |count |datatype |comm 0x1|\[nranks=|8\]|\n|:| |é){0,60}",
            bytes in prop::collection::vec(any::<u8>(), 0..256),
        ) {
            let log = StepLog::parse(&text);
            prop_assert_eq!(log.calls(), log.ranks.iter().map(|rank| rank.calls.len()).sum::<usize>());
            let _ = StepLog::parse(&bytes);
        }
    }
}
