//! Reads NCCL's log: what was set, which channels were found, what ran, over which transport, and what
//! went wrong.
//!
//! The log of a server is as long as its life and may hold anything, so this reader accepts any bytes,
//! never fails, and keeps a bounded amount of what it sees. The wording of the lines is that of NCCL
//! 2.16 to 2.30.

mod lines;
mod symptom;

use std::collections::BTreeSet;

use crate::collective::Collective;
use crate::knob::{Proof, Reading};
use crate::machine::NcclVersion;
use crate::record::{PointKey, SetLine};

use lines::{Kind, MARK_LENGTH, is_internal_tuner, is_proof, leading_number, marks};
pub use symptom::Symptom;

/// Bytes of a line that are looked at.
const LINE_LIMIT: usize = 4096;
/// Operations that are kept.
const OPERATION_LIMIT: usize = 4096;
/// "set by environment" lines that are kept.
const SET_LINE_LIMIT: usize = 512;
/// Warnings that are kept, and characters of each.
const WARNING_LIMIT: usize = 50;
const WARNING_LENGTH: usize = 512;
/// Entries of every other collection.
const NOTE_LIMIT: usize = 256;

/// An operation that NCCL logged when it was enqueued or captured.
#[derive(Debug, Clone, PartialEq)]
pub struct Operation {
    /// The collective, where the line names one that this tool knows (lines before 2.23 name none).
    pub collective: Option<Collective>,
    /// The name as NCCL wrote it; empty before 2.23.
    pub name: String,
    /// Bytes of the message, as NCCL counts them.
    pub bytes: u64,
    /// Algorithm in lower case ("ring"); "symmetric" and "copy-engine" for kernels and copies beside
    /// the usual algorithms.
    pub algo: String,
    /// Protocol in lower case ("ll"), where there is one.
    pub proto: Option<String>,
    /// Name of the symmetric kernel, where one ran.
    pub kernel: Option<String>,
    /// Channels it used, where the line says so (since 2.24).
    pub channels: Option<u32>,
    /// Threads per channel, which only lines of symmetric kernels tell.
    pub threads: Option<u32>,
    /// Whether a symmetric kernel ran.
    pub symmetric: bool,
    /// What NCCL's cost model expected, in microseconds (2.20 to 2.23).
    pub predicted_us: Option<f64>,
    /// How often the same line came in a row.
    pub times: u32,
}

/// Channels of a communicator.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct CommunicatorChannels {
    /// For collectives.
    pub collective: u32,
    /// For algorithms that add up in NVLink switches.
    pub nvls: Option<u32>,
    /// For send and receive.
    pub p2p: Option<u32>,
    /// For send and receive, per peer.
    pub p2p_per_peer: Option<u32>,
}

/// What the search for channels came to for one pattern: how many, how fast, over which kind of path.
#[derive(Debug, Clone, PartialEq)]
pub struct GraphLine {
    /// NCCL's number of the pattern: 4 is a ring, 1 a balanced tree, 2 a split tree, 3 a tree, 5 a star
    /// through NVLink switches.
    pub pattern: u32,
    /// Channels that were found; a communicator has up to twice as many.
    pub channels: u32,
    /// Gigabytes per second of each channel inside the machine.
    pub bandwidth_gb_per_s: f64,
    /// The longest kind of path between two GPUs that it uses ("PIX", "SYS").
    pub path: String,
}

impl GraphLine {
    /// The pattern in words.
    pub fn name(&self) -> String {
        match self.pattern {
            1 => "balanced tree".to_owned(),
            2 => "split tree".to_owned(),
            3 => "tree".to_owned(),
            4 => "ring".to_owned(),
            5 => "NVLink switch".to_owned(),
            other => format!("pattern {other}"),
        }
    }
}

/// The library's own line.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LibraryVersion {
    /// Version of NCCL.
    pub version: NcclVersion,
    /// The CUDA version it was built with ("13.0").
    pub cuda: Option<String>,
}

/// Everything a log told. Read the fields; only [`NcclLog::add_line`] fills them.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct NcclLog {
    /// The library, from its first line.
    pub library: Option<LibraryVersion>,
    /// Variables that NCCL read, each pair of variable and value once, in order of appearance.
    pub set_by_environment: Vec<SetLine>,
    /// Operations in the order in which they were enqueued or captured; repeats in a row are counted.
    pub operations: Vec<Operation>,
    /// Transports between ranks: "SHM/direct/direct", "P2P/CUMEM", "P2P/IPC/read", "NET/Socket".
    pub transports: BTreeSet<String>,
    /// Channels of the communicator that came up last.
    pub channels: Option<CommunicatorChannels>,
    /// Thread thresholds of the communicator that came up last: tree, then ring, each LL, LL128, Simple.
    pub thresholds: Option<[i64; 6]>,
    /// The number of this rank's GPU by NVML, which NCCL's topology and graph files name it by.
    pub nvml_device: Option<u32>,
    /// What the search for channels came to, each line once.
    pub graphs: Vec<GraphLine>,
    /// The topology search found no way for some pattern and took the ranks as they come.
    pub fell_back_to_simple_order: bool,
    /// A pattern was given 0.1 GB/s, which makes NCCL choose as if the machine had no usable links.
    pub nominal_bandwidth: bool,
    /// Pairs of GPUs between which the driver denies peer access, lower number first.
    pub p2p_denied: BTreeSet<(u32, u32)>,
    /// Whether every pair of ranks may write into each other's memory, where the log says so.
    pub all_direct_p2p: Option<bool>,
    /// Warnings, each once.
    pub warnings: Vec<String>,
    /// Recognised trouble.
    pub symptoms: BTreeSet<Symptom>,
    /// What NCCL said about tuner plugins.
    pub tuner: Vec<String>,
    /// Lines in which NCCL objects to the value of a variable and takes another.
    pub objections: Vec<String>,
    /// Lines that prove a setting that has no "set by environment" line.
    pub proofs: Vec<String>,
    /// Communicators that came up; every rank in the log counts for itself.
    pub inits_complete: u64,
    /// Collections that were full when more came.
    pub capped: BTreeSet<&'static str>,
    /// Lines that were longer than what is looked at.
    pub cut_lines: u64,
}

/// Reads a whole log. Any bytes will do.
pub fn parse(text: impl AsRef<[u8]>) -> NcclLog {
    let mut log = NcclLog::default();
    for line in text.as_ref().split(|byte| *byte == b'\n') {
        log.add_line(line);
    }
    log
}

impl NcclLog {
    /// Adds one line, with or without its end.
    pub fn add_line(&mut self, line: impl AsRef<[u8]>) {
        let mut bytes = line.as_ref();
        if bytes.len() > LINE_LIMIT {
            self.cut_lines = self.cut_lines.saturating_add(1);
            bytes = &bytes[..LINE_LIMIT];
        }
        let line = String::from_utf8_lossy(bytes);
        let line = line.trim_end();
        // Ranks that share a pipe may write into each other's lines: every mark begins a message.
        let mut marks = marks(line).peekable();
        if marks.peek().is_none() {
            // The one line that NCCL writes without a mark.
            if let Some((_, version)) = line.split_once("NCCL version ") {
                self.add_version(version);
            }
        }
        while let Some((kind, start)) = marks.next() {
            let end = marks.peek().map_or(line.len(), |(_, next)| next - MARK_LENGTH);
            let message = line[start..end].trim_end();
            match kind {
                Kind::Info => self.add_info(message),
                Kind::Warn => self.add_warning(message),
            }
        }
    }

    /// Channels for collectives of the communicator that came up last.
    pub fn communicator_channels(&self) -> Option<u32> {
        self.channels.map(|channels| channels.collective)
    }

    /// The last operation of this collective with so many bytes as the log counts them. Lines before 2.23
    /// do not name the collective and count for any.
    pub fn operation(&self, collective: Collective, bytes: u64) -> Option<&Operation> {
        self.operations.iter().rev().find(|operation| {
            operation.bytes == bytes && (operation.collective == Some(collective) || operation.name.is_empty())
        })
    }

    /// The last operation of a point. Up to 2.23 lines tell the larger of send and receive buffer, as points do; since 2.24 what
    /// one rank hands over or receives, which of a gather or a scatter is a part of that.
    pub fn operation_of(&self, point: PointKey) -> Option<&Operation> {
        let per_rank = point.collective.logged_bytes(point.bytes, point.ranks);
        self.operations.iter().rev().find(|operation| {
            let bytes = if operation.predicted_us.is_some() { point.bytes } else { per_rank };
            operation.bytes == bytes && (operation.collective == Some(point.collective) || operation.name.is_empty())
        })
    }

    /// All transports in one text, where any was logged: the form that records keep.
    pub fn transport(&self) -> Option<String> {
        let all: Vec<&str> = self.transports.iter().map(String::as_str).collect();
        (!all.is_empty()).then(|| all.join("+"))
    }

    /// Whether the log proves that a variable was read as `reading` says; `None` where NCCL logs
    /// nothing by which one could tell.
    pub fn proves(&self, variable: &str, proof: Proof, reading: &Reading) -> Option<bool> {
        match (proof, &reading.logged) {
            (Proof::SetByEnvironment, Some(value)) => {
                Some(self.set_by_environment.iter().any(|set| set.variable == variable && set.value == *value))
            }
            (Proof::Line(text), _) => {
                let mut lines = self.proofs.iter().chain(&self.tuner);
                Some(lines.any(|line| line.contains(text) && !is_internal_tuner(line)))
            }
            (Proof::SetByEnvironment, None) | (Proof::None, _) => None,
        }
    }

    /// Whether this project's plugin said that it reads the table with this SHA-256: NCCL itself logs nothing of it.
    pub fn read_table(&self, sha256: &str) -> bool {
        let said = format!("TUNER/nccltune: table {sha256} from ");
        self.tuner.iter().any(|line| line.contains(&said))
    }

    fn add_version(&mut self, text: &str) {
        let text = text.split_whitespace().next().unwrap_or_default();
        let (version, cuda) = match text.split_once('+') {
            Some((version, build)) => (version, build.strip_prefix("cuda")),
            None => (text, None),
        };
        let mut parts = version.splitn(3, '.').map(leading_number);
        if let (Some(Some(major)), Some(Some(minor)), Some(Some(patch))) = (parts.next(), parts.next(), parts.next()) {
            let version = NcclVersion { major, minor, patch };
            let cuda = cuda.map(|build| build.chars().take(16).collect());
            self.library.get_or_insert(LibraryVersion { version, cuda });
        }
    }

    fn add_info(&mut self, message: &str) {
        self.note_symptoms(message);
        if let Some(line) = lines::set_line(message) {
            if !self.set_by_environment.contains(&line) {
                let room = keep(&mut self.set_by_environment, line, SET_LINE_LIMIT);
                self.note_room("set-by-environment", room);
            }
            return;
        }
        if let Some(operation) = lines::operation(message) {
            self.add_operation(operation);
            return;
        }
        if let Some(transport) = lines::transport(message) {
            if self.transports.len() < NOTE_LIMIT || self.transports.contains(&transport) {
                self.transports.insert(transport);
            } else {
                self.note_room("transports", false);
            }
            return;
        }
        if let Some(channels) = lines::communicator_channels(message) {
            self.channels = Some(channels);
        } else if let Some(numbers) = message.strip_prefix("threadThresholds ").and_then(lines::thresholds) {
            self.thresholds = Some(numbers);
        } else if let Some(rest) = message.strip_prefix("NCCL version ") {
            self.add_version(rest);
        } else if message.starts_with("Pattern ") {
            self.nominal_bandwidth |=
                lines::pattern_bandwidth(message).is_some_and(|bandwidth| (bandwidth - 0.1).abs() < 1e-6);
            if let Some(graph) = lines::graph(message)
                && !self.graphs.contains(&graph)
            {
                let room = keep(&mut self.graphs, graph, NOTE_LIMIT);
                self.note_room("graphs", room);
            }
        } else if let Some(rest) = message.strip_prefix("Check P2P Type isAllDirectP2p ") {
            self.all_direct_p2p = leading_number::<u32>(rest).map(|flag| flag != 0);
        } else if message.ends_with("Init COMPLETE") {
            self.inits_complete = self.inits_complete.saturating_add(1);
            self.nvml_device = lines::nvml_device(message).or(self.nvml_device);
        }
        self.note_shared(message);
        if message.contains("TUNER/Plugin") || message.contains("TUNER/nccltune") || message.contains("tuner plugin") {
            let room = keep_once(&mut self.tuner, message, NOTE_LIMIT);
            self.note_room("tuner", room);
        } else if is_proof(message) {
            let room = keep_once(&mut self.proofs, message, NOTE_LIMIT);
            self.note_room("proofs", room);
        }
    }

    fn add_warning(&mut self, message: &str) {
        self.note_symptoms(message);
        // Warnings up to some release, notices since.
        self.note_shared(message);
        let room = keep_once(&mut self.warnings, message, WARNING_LIMIT);
        self.note_room("warnings", room);
    }

    /// What has been a warning in some releases and a notice in others.
    fn note_shared(&mut self, message: &str) {
        self.fell_back_to_simple_order |= message.contains("falling back to simple order");
        if message.starts_with("P2P is disabled between") {
            if let Some(pair) = lines::denied_pair(message) {
                if self.p2p_denied.len() < NOTE_LIMIT || self.p2p_denied.contains(&pair) {
                    self.p2p_denied.insert(pair);
                } else {
                    self.note_room("p2p-denied", false);
                }
            }
        } else if message.starts_with("Invalid ") || message.starts_with("User asked for a m") {
            let room = keep_once(&mut self.objections, message, NOTE_LIMIT);
            self.note_room("objections", room);
        }
    }

    fn note_symptoms(&mut self, message: &str) {
        for symptom in Symptom::ALL {
            if symptom.shows_in(message) {
                self.symptoms.insert(symptom);
            }
        }
    }

    fn add_operation(&mut self, operation: Operation) {
        if let Some(last) = self.operations.last_mut() {
            let times = last.times;
            if (Operation { times: 1, ..last.clone() }) == operation {
                last.times = times.saturating_add(1);
                return;
            }
        }
        let room = keep(&mut self.operations, operation, OPERATION_LIMIT);
        self.note_room("operations", room);
    }

    fn note_room(&mut self, collection: &'static str, room: bool) {
        if !room {
            self.capped.insert(collection);
        }
    }
}

/// Keeps an entry while there is room; tells whether there was.
fn keep<T>(all: &mut Vec<T>, entry: T, limit: usize) -> bool {
    let room = all.len() < limit;
    if room {
        all.push(entry);
    }
    room
}

/// Keeps a text once, shortened; tells whether there was room.
fn keep_once(all: &mut Vec<String>, text: &str, limit: usize) -> bool {
    let text: String = text.chars().take(WARNING_LENGTH).collect();
    all.contains(&text) || keep(all, text, limit)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::collective::DataType;
    use crate::knob::{self, Way, read_as_nccl};

    fn info(message: &str) -> NcclLog {
        parse(format!("box:11:12 [0] NCCL INFO {message}\n"))
    }

    fn warn(message: &str) -> NcclLog {
        parse(format!("\n[2026-01-01 12:00:00] box:11:12 [0] file.cc:34 NCCL WARN {message}\n"))
    }

    /// A two-rank start of 2.28 as rank 0 logs it, in 2.28's wording.
    const START_2_28: &str = "\
NCCL version 2.28.9+cuda13.0
box:11:11 [0] NCCL INFO NCCL_P2P_DISABLE set by environment to 1
box:11:11 [0] NCCL INFO NCCL_MIN_NCHANNELS set by environment to 32.
box:11:11 [0] NCCL INFO NCCL_PROTO set by environment to LL,Simple
box:11:11 [0] NCCL INFO TUNER/Plugin: Could not find: libnccl-tuner.so
box:11:11 [0] NCCL INFO === System : maxBw 24.0 totalBw 24.0 ===
box:11:11 [0] NCCL INFO Pattern 4, crossNic 0, nChannels 2, bw 12.000000/12.000000, type PHB/PIX, sameChannels 1
box:11:11 [0] NCCL INFO Check P2P Type isAllDirectP2p 0 directMode 0 isAllCudaP2p 1
box:11:11 [0] NCCL INFO threadThresholds 8/8/64 | 16/8/64 | 512 | 512
box:11:11 [0] NCCL INFO 32 coll channels, 32 collnet channels, 0 nvls channels, 32 p2p channels, 2 p2p channels per peer
box:11:11 [0] NCCL INFO Channel 00 : 0[0] -> 1[1] via SHM/direct/direct
box:11:11 [0] NCCL INFO Channel 01 : 0[0] -> 1[1] via SHM/direct/direct
box:11:11 [0] NCCL INFO ncclCommInitRank comm 0x55 rank 0 nranks 2 cudaDev 0 nvmlDev 3 busId 1a000 commId 0x77 - Init COMPLETE
box:11:11 [0] NCCL INFO AllReduce: 65536 Bytes -> Algo RING proto LL channel{Lo..Hi}={0..3}
box:11:11 [0] NCCL INFO AllReduce: 65536 Bytes -> Algo RING proto LL channel{Lo..Hi}={0..3}
box:11:11 [0] NCCL INFO AllGather: 1024 Bytes -> Algo RING proto LL channel{Lo..Hi}={0..0}
";

    #[test]
    fn a_whole_start_is_read() {
        let log = parse(START_2_28);
        let library = log.library.as_ref().unwrap();
        assert_eq!((library.version, library.cuda.as_deref()), (NcclVersion::v2(28, 9), Some("13.0")));
        let set: Vec<_> = log.set_by_environment.iter().map(|l| (l.variable.as_str(), l.value.as_str())).collect();
        assert_eq!(set, [("NCCL_P2P_DISABLE", "1"), ("NCCL_MIN_NCHANNELS", "32"), ("NCCL_PROTO", "LL,Simple")]);
        assert_eq!(log.communicator_channels(), Some(32));
        assert_eq!(log.channels.unwrap().p2p_per_peer, Some(2));
        assert_eq!(log.thresholds, Some([8, 8, 64, 16, 8, 64]));
        assert_eq!(log.transport().as_deref(), Some("SHM/direct/direct"));
        assert_eq!((log.all_direct_p2p, log.inits_complete), (Some(false), 1));
        assert_eq!(log.nvml_device, Some(3));
        assert!(!log.nominal_bandwidth && !log.fell_back_to_simple_order);
        let ring = GraphLine { pattern: 4, channels: 2, bandwidth_gb_per_s: 12.0, path: "PHB".to_owned() };
        assert_eq!(log.graphs, [ring]);
        assert_eq!(log.operations.len(), 2);
        let reduce = log.operation(Collective::AllReduce, 65_536).unwrap();
        assert_eq!((reduce.algo.as_str(), reduce.proto.as_deref(), reduce.channels), ("ring", Some("ll"), Some(4)));
        assert_eq!(reduce.times, 2);
        assert_eq!(log.operation(Collective::AllReduce, 1024), None);
        // Two ranks gather 2048 bytes of 1024 each, which is what this release logs.
        let gather = |bytes| log.operation_of(PointKey::usual(Collective::AllGather, DataType::Bf16, bytes, 2));
        assert_eq!(gather(2048).unwrap().collective, Some(Collective::AllGather));
        assert_eq!(gather(1024), None);
        // Up to 2.23 it is the whole.
        let older = info("AllGather: 2048 Bytes -> Algo 1 proto 0 time 8.400000");
        assert!(older.operation_of(PointKey::usual(Collective::AllGather, DataType::Bf16, 2048, 2)).is_some());
        assert_eq!(log.tuner.len(), 1);
        assert!(log.symptoms.is_empty() && log.warnings.is_empty() && log.capped.is_empty());
    }

    #[test]
    fn lines_read_the_same_one_by_one() {
        let mut log = NcclLog::default();
        for line in START_2_28.lines() {
            log.add_line(line);
        }
        assert_eq!(log, parse(START_2_28));
        assert_eq!(log, parse(START_2_28.replace('\n', "\r\n")));
    }

    #[test]
    fn operations_of_every_release() {
        // 2.20 to 2.22, 2.23, 2.24 and newer.
        let log = info("65536 Bytes -> Algo 1 proto 0 time 30.200001");
        let operation = log.operation(Collective::AllReduce, 65_536).unwrap();
        assert_eq!((operation.algo.as_str(), operation.proto.as_deref()), ("ring", Some("ll")));
        assert_eq!((operation.predicted_us, operation.channels), (Some(30.200_001), None));
        let log = info("AllReduce: 4096 Bytes -> Algo 0 proto 2 time 8.400000");
        let operation = &log.operations[0];
        assert_eq!((operation.algo.as_str(), operation.proto.as_deref()), ("tree", Some("simple")));
        assert_eq!(operation.collective, Some(Collective::AllReduce));
        let log = info("ReduceScatter: 4096 Bytes -> Algo NVLS_TREE proto SIMPLE channel{Lo..Hi}={2..15}");
        let operation = &log.operations[0];
        assert_eq!((operation.algo.as_str(), operation.channels), ("nvls_tree", Some(14)));
        // Symmetric kernels: 2.27, then with the number of works.
        for tail in ["", " nWorks 1"] {
            let kernel = "AllReduce_AGxLL_R nchannels 8 nthreads 512";
            let log = info(&format!("AllReduce [Symmetric]: 65536 Bytes -> Kernel {kernel}{tail}"));
            let operation = log.operation(Collective::AllReduce, 65_536).unwrap();
            assert!(operation.symmetric);
            assert_eq!((operation.algo.as_str(), operation.proto.as_deref()), ("symmetric", None));
            assert_eq!(operation.kernel.as_deref(), Some("AllReduce_AGxLL_R"));
            assert_eq!((operation.channels, operation.threads), (Some(8), Some(512)));
        }
        let log = info("AllGather [Copy Engine]: 1048576 Bytes -> cudaMemcpy");
        assert_eq!(log.operations[0].algo, "copy-engine");
        let log = info("AllFuture: 8 Bytes -> Algo NEW proto LL256 channel{Lo..Hi}={3..1}");
        let operation = &log.operations[0];
        assert_eq!((operation.collective, operation.name.as_str()), (None, "AllFuture"));
        assert_eq!(
            (operation.algo.as_str(), operation.proto.as_deref(), operation.channels),
            ("new", Some("ll256"), None)
        );
    }

    #[test]
    fn transports_of_every_release() {
        let cases = [
            // Up to 2.17 with bus ids, up to 2.30.4, since 2.30.7.
            ("Channel 00 : 0[1a000] -> 1[1b000] via SHM/direct/direct", "SHM/direct/direct"),
            ("Channel 00 : 0[0] -> 1[1] via SHM/CE/direct", "SHM/CE/direct"),
            ("Channel 00 : 0[0] -> 1[1] via SHM/direct", "SHM/direct/direct"),
            ("Channel 00/0 : 0[0] -> 1[1] via P2P/CUMEM", "P2P/CUMEM"),
            ("Channel 00/0 : 0[0] -> 1[1] via P2P/CUMEM/read", "P2P/CUMEM/read"),
            ("Channel 00/1 : 0[0] -> 1[1] via P2P/IPC/CE", "P2P/IPC/CE"),
            ("Channel 00/0 : 0[0] -> 1[1] via P2P/MNNVL", "P2P/MNNVL"),
            ("Channel 00/0 : 0[0] -> 1[1] via P2P/direct pointer/read", "P2P/direct pointer/read"),
            ("Channel 00/0 : 0[0] -> 1[1] via P2P/indirect/2[2]", "P2P/indirect"),
            ("Channel 00/0 : 0[0] -> 1[1] [send] via NET/Socket/0", "NET/Socket"),
            ("Channel 00/0 : 1[1] -> 0[0] [receive] via NET/IB/3(1)/GDRDMA/Shared", "NET/IB/GDRDMA"),
            ("CollNet 00/0 : 0 [send] via COLLNET/SHARP/0/GDRDMA", "COLLNET/SHARP/GDRDMA"),
        ];
        for (line, transport) in cases {
            assert_eq!(info(line).transport().as_deref(), Some(transport), "{line}");
        }
        assert_eq!(info("Bootstrap : Using eth0 via P2P/IPC").transport(), None);
        assert_eq!(info("Channel 00/08 : 0 1 2 3").transport(), None);
    }

    #[test]
    fn channel_lines_of_every_release() {
        let log = info("2 coll channels, 4 p2p channels, 2 p2p channels per peer");
        assert_eq!((log.communicator_channels(), log.channels.unwrap().nvls), (Some(2), None));
        let log = info("24 coll channels, 16 nvls channels, 32 p2p channels, 32 p2p channels per peer");
        assert_eq!((log.communicator_channels(), log.channels.unwrap().nvls), (Some(24), Some(16)));
    }

    #[test]
    fn a_topology_without_usable_links_shows() {
        let fallback = "Could not find a path for pattern 4, falling back to simple order";
        assert!(info(fallback).fell_back_to_simple_order);
        // A warning up to 2.26.
        assert!(warn(fallback).fell_back_to_simple_order);
        let log = info("Pattern 4, crossNic 0, nChannels 1, bw 0.100000/0.100000, type SYS/SYS, sameChannels 1");
        assert!(log.nominal_bandwidth);
        assert_eq!((log.graphs[0].name().as_str(), log.graphs[0].path.as_str()), ("ring", "SYS"));
    }

    #[test]
    fn denied_peer_access_shows() {
        let log = info(
            "P2P is disabled between connected GPUs 1 and 0. You can repress this message with NCCL_IGNORE_DISABLED_P2P=1.",
        );
        assert_eq!(log.p2p_denied, BTreeSet::from([(0, 1)]));
        let log = warn("P2P is disabled between NVLINK connected GPUs 2 and 3. This should not be the case");
        assert_eq!(log.p2p_denied, BTreeSet::from([(2, 3)]));
    }

    #[test]
    fn symptoms_have_names() {
        let cases = [
            (
                "Error: failed to extend /dev/shm/nccl-AbCdEf to 33030532 bytes, error: No space left on device (28)",
                Symptom::SharedMemoryFailed,
            ),
            (
                "Cuda failure 217 'peer access is not supported between these two devices'",
                Symptom::PeerAccessUnsupported,
            ),
            ("Failed to CUDA calloc 10485760 bytes", Symptom::OutOfMemory),
            ("Cuda failure 2 'out of memory'", Symptom::OutOfMemory),
            ("Duplicate GPU detected : rank 0 and rank 1 both on CUDA device 1a000", Symptom::DuplicateGpu),
            ("Mismatched NCCL version detected : rank 0 version 22809 rank 1 version 22707", Symptom::VersionMismatch),
            ("No transport found for rank 0[1a000] -> rank 1[1b000]", Symptom::NoTransport),
            ("Unrecognized element token \"lll\" when parsing \"lll\"", Symptom::UnknownListWord),
            ("Error : no algorithm/protocol available", Symptom::NoAlgorithm),
            ("No algorithm/protocol available for function AllReduce with datatype ncclFloat16.", Symptom::NoAlgorithm),
        ];
        for (text, symptom) in cases {
            let log = warn(text);
            assert_eq!(log.symptoms, BTreeSet::from([symptom]), "{text}");
            assert_eq!(log.warnings, [text]);
            assert!(log.library.is_none());
        }
        let names: BTreeSet<_> = Symptom::ALL.iter().map(|symptom| symptom.name()).collect();
        assert_eq!(names.len(), Symptom::ALL.len());
    }

    #[test]
    fn values_keep_full_stops_that_are_theirs() {
        let value = |line: &str| info(line).set_by_environment[0].value.clone();
        assert_eq!(value("NCCL_BUFFSIZE set by environment to 1048576."), "1048576");
        assert_eq!(value("NCCL_X set by environment to -2."), "-2");
        assert_eq!(value("NCCL_GRAPH_FILE set by environment to /etc/ring."), "/etc/ring.");
        assert_eq!(value("NCCL_THREAD_THRESHOLDS set by environment to -1-1-1+2"), "-1-1-1+2");
        assert!(info("LD_PRELOAD set by environment to x").set_by_environment.is_empty());
    }

    #[test]
    fn settings_are_proven_by_their_line() {
        let log = parse(START_2_28);
        let version = NcclVersion::v2(28, 9);
        let proves = |name, text| log.proves(name, Proof::SetByEnvironment, &read_as_nccl(name, text, version));
        assert_eq!(proves("NCCL_MIN_NCHANNELS", "32"), Some(true));
        assert_eq!(proves("NCCL_MIN_NCHANNELS", "0x20"), Some(true));
        assert_eq!(proves("NCCL_MIN_NCHANNELS", "16"), Some(false));
        assert_eq!(proves("NCCL_PROTO", "LL,Simple"), Some(true));
        assert_eq!(proves("NCCL_ALGO", "Ring"), Some(false));
        // Ignored by NCCL, so no line to wait for.
        assert_eq!(proves("NCCL_P2P_LEVEL", "sys"), None);
        let knob = knob::find("NCCL_MIN_CTAS").unwrap();
        let field = knob.routes(version).find(|route| matches!(route.way, Way::ConfigField(_))).unwrap();
        let reading = read_as_nccl("NCCL_MIN_CTAS", "8", version);
        assert_eq!(info("Comm config Min CTAs set to 8").proves("NCCL_MIN_CTAS", field.proof, &reading), Some(true));
        assert_eq!(log.proves("NCCL_MIN_CTAS", field.proof, &reading), Some(false));
    }

    #[test]
    fn a_tuner_plugin_is_told_from_the_internal_one() {
        let reading = read_as_nccl("NCCL_TUNER_PLUGIN", "/opt/tuner.so", NcclVersion::v2(28, 9));
        for (minor, patch, line, used) in [
            (20, 5, "Using tuner plugin: 'nccltune'", true),
            (23, 4, "TUNER/Plugin: Using tuner plugin nccltune", true),
            (28, 9, "TUNER/Plugin: Using nccltune (v5)", true),
            (23, 4, "TUNER/Plugin: Using internal tuner plugin.", false),
            (23, 4, "TUNER/Plugin: Failed to find ncclTunerPlugin_v2 symbol, using internal tuner instead.", false),
            (28, 9, "TUNER/Plugin: Could not find: libnccl-tuner.so", false),
        ] {
            let route = knob::find("NCCL_TUNER_PLUGIN").unwrap().routes(NcclVersion::v2(minor, patch)).next().unwrap();
            assert_eq!(info(line).proves("NCCL_TUNER_PLUGIN", route.proof, &reading), Some(used), "{line}");
        }
    }

    #[test]
    fn objections_are_kept() {
        let log = info("Invalid NCCL_NTHREADS 100 (must be a multiple of 32)");
        assert_eq!(log.objections.len(), 1);
        let log = info("User asked for a minimum of 100 channels, limiting to 64");
        assert_eq!(log.objections.len(), 1);
    }

    #[test]
    fn everything_is_bounded() {
        let mark = "box:1:2 [0] NCCL INFO";
        let text: Vec<String> = (0..6000_u32)
            .flat_map(|number| {
                [
                    format!("{mark} AllReduce: {number} Bytes -> Algo RING proto LL channel{{Lo..Hi}}={{0..3}}"),
                    format!("{mark} NCCL_X{number} set by environment to 1."),
                    format!("{mark} Channel 00/0 : 0[0] -> 1[1] via NET/n{number}/0"),
                    format!("box:1:2 [0] a.cc:1 NCCL WARN trouble {number}"),
                ]
            })
            .collect();
        let log = parse(text.join("\n"));
        assert_eq!(log.operations.len(), OPERATION_LIMIT);
        assert_eq!(log.set_by_environment.len(), SET_LINE_LIMIT);
        assert_eq!(log.warnings.len(), WARNING_LIMIT);
        assert_eq!(log.transports.len(), NOTE_LIMIT);
        assert_eq!(log.capped, BTreeSet::from(["operations", "set-by-environment", "transports", "warnings"]));
    }

    #[test]
    fn a_huge_line_and_odd_bytes_do_no_harm() {
        let mut text = b"box:1:2 [0] a.cc:1 NCCL WARN ".to_vec();
        text.resize(10 << 20, b'x');
        text.extend_from_slice(
            b"\nbox:1:2 [0] NCCL INFO NCCL_ALGO set by environment to Ri\xff\xfeng\n\x00\x01NCCL \n",
        );
        let log = parse(&text);
        assert_eq!(log.cut_lines, 1);
        assert_eq!(log.warnings[0].len(), WARNING_LENGTH);
        assert_eq!(log.set_by_environment[0].value, "Ri\u{fffd}\u{fffd}ng");
        assert_eq!(parse([]), NcclLog::default());
    }

    #[test]
    fn text_of_a_server_is_not_taken_for_a_log() {
        let log = parse(
            "INFO user: AllReduce: 4096 Bytes -> Algo RING proto LL\n32 coll channels, x\nNCCL version detected\n",
        );
        assert_eq!(log, NcclLog::default());
    }

    #[test]
    fn two_messages_in_a_line_are_both_read() {
        let log = parse(
            "a:1:1 [0] NCCL INFO 4 coll channels, 4 p2p channelsa:1:2 [1] NCCL INFO NCCL_NTHREADS set by environment to 64.",
        );
        assert_eq!(log.communicator_channels(), Some(4));
        assert_eq!(log.set_by_environment[0].value, "64");
    }

    proptest! {
        #[test]
        fn no_bytes_are_too_odd(bytes in prop::collection::vec(any::<u8>(), 0..2000)) {
            parse(bytes);
        }

        #[test]
        fn no_mangled_line_is_too_odd(
            pieces in prop::collection::vec(
                prop_oneof![
                    (0..START_2_28.lines().count()).prop_map(|at| START_2_28.lines().nth(at).unwrap_or("").to_owned()),
                    Just("NCCL INFO ".to_owned()),
                    Just("NCCL WARN P2P is disabled between GPUs ".to_owned()),
                    Just("Channel 00 -> via ".to_owned()),
                    Just(" Bytes -> Kernel".to_owned()),
                    Just("channel{Lo..Hi}={".to_owned()),
                    ".{0,12}",
                    "[0-9/|. ]{0,30}",
                ],
                0..12,
            ),
            cut in 0..200_usize,
        ) {
            let text = pieces.concat();
            let cut = text.char_indices().map(|(at, _)| at).nth(cut).unwrap_or(text.len());
            let log = parse(&text[..cut]);
            prop_assert!(log.operations.len() <= OPERATION_LIMIT);
        }
    }
}
