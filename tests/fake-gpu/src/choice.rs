//! What NCCL would run for a message: algorithm, protocol, channels, threads.
//!
//! The rules are the few that matter for small all-reduces on one machine, written down here once
//! more on purpose: a stand-in that shared the tool's model of NCCL could only agree with it. What two
//! real GPUs chose is recorded, and a test holds these rules to it.

use crate::function::Function;
use crate::scenario::Transport;

/// Algorithms in NCCL's numbering, as its log writes them.
pub const ALGORITHMS: [&str; 7] = ["TREE", "RING", "COLLNET_DIRECT", "COLLNET_CHAIN", "NVLS", "NVLS_TREE", "PAT"];
/// Protocols in NCCL's numbering, as its log writes them.
pub const PROTOCOLS: [&str; 3] = ["LL", "LL128", "SIMPLE"];
/// Words that NCCL_ALGO takes, in the same order.
const ALGORITHM_WORDS: [&str; 7] = ["tree", "ring", "collnetdirect", "collnetchain", "nvls", "nvlstree", "pat"];
const PROTOCOL_WORDS: [&str; 3] = ["ll", "ll128", "simple"];
const FUNCTION_WORDS: [&str; 5] = ["broadcast", "reduce", "allgather", "reducescatter", "allreduce"];

pub(crate) const TREE: usize = 0;
pub(crate) const RING: usize = 1;
const LL128: usize = 1;
const SIMPLE: usize = 2;

/// What runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Choice {
    /// Index into [`ALGORITHMS`].
    pub algorithm: usize,
    /// Index into [`PROTOCOLS`].
    pub protocol: usize,
    /// Channels.
    pub channels: u32,
    /// Threads of each.
    pub threads: u32,
}

/// A communicator's tuning: what its variables and its machine leave to choose from.
#[derive(Debug, Clone, PartialEq)]
pub struct Tuning {
    version: i32,
    ranks: u32,
    direct: bool,
    /// Channels of the communicator.
    pub channels: u32,
    /// Thread thresholds: tree, then ring, each LL, LL128, Simple.
    pub thresholds: [i64; 6],
    threads: [u32; 3],
    /// By function, in NCCL's numbering.
    algorithms: [[bool; 7]; 5],
    protocols: [[bool; 3]; 5],
    asked_for: Option<String>,
    /// NCCL takes the links for next to nothing.
    takes_links_for_nothing: bool,
    /// What NCCL objects to.
    pub objections: Vec<String>,
}

/// A list of algorithms or protocols that NCCL does not understand.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Unreadable(pub String);

impl Tuning {
    /// Reads the variables that count; `read` hands out a variable's text.
    ///
    /// `direct` says whether GPUs reach each other without host memory.
    pub fn new(
        version: i32,
        ranks: u32,
        direct: bool,
        mut read: impl FnMut(&str) -> Option<String>,
    ) -> Result<Self, Unreadable> {
        let mut objections = Vec::new();
        let mut number = |name: &str| read(name).and_then(|text| number(&text));
        let most_channels = if version >= 22_500 { 64 } else { 32 };
        let least = [number("NCCL_MIN_NCHANNELS").or_else(|| number("NCCL_MIN_NRINGS")), number("NCCL_MIN_CTAS")];
        let most = [number("NCCL_MAX_NCHANNELS").or_else(|| number("NCCL_MAX_NRINGS")), number("NCCL_MAX_CTAS")];
        let mut channels: i64 = if direct { 16 } else { 4 };
        for most in most.into_iter().flatten() {
            channels = channels.min(most.max(1));
        }
        for least in least.into_iter().flatten() {
            if least > most_channels {
                objections.push(format!("User asked for a minimum of {least} channels, limiting to {most_channels}"));
            }
            channels = channels.max(least.min(most_channels));
        }
        let mut threads = |name: &str, most: i64, fallback: i64| -> u32 {
            match number(name) {
                None => fallback as u32,
                Some(wanted) if wanted % 32 != 0 => {
                    objections.push(format!("Invalid {name} {wanted} (must be a multiple of 32)"));
                    most as u32
                }
                Some(wanted) => {
                    if !(64..=most).contains(&wanted) {
                        objections.push(format!("Invalid {name} {wanted} (must be between 64 and {most})"));
                    }
                    wanted.clamp(64, most) as u32
                }
            }
        };
        let plain = threads("NCCL_NTHREADS", 512, 512);
        let ll128 = threads("NCCL_LL128_NTHREADS", 640, 640);
        let mut thresholds = [8, 8, 64, 8 * i64::from(ranks), 8, 64];
        if let Some(text) = read("NCCL_THREAD_THRESHOLDS") {
            for (threshold, value) in thresholds.iter_mut().zip(leading_numbers(&text)) {
                if value >= 0 {
                    *threshold = value;
                }
            }
        }
        // On one machine trees add up, and rings do everything.
        let mut algorithms = FUNCTION_WORDS.map(|word| [word == "allreduce", true, false, false, false, false, false]);
        // Nothing on PCIe guarantees the order of stores that LL128 needs.
        let mut protocols = [[true, direct, true]; 5];
        let mut asked_for = None;
        if let Some(text) = read("NCCL_ALGO") {
            let asked = list(version, &text, &ALGORITHM_WORDS)?;
            for (algorithms, asked) in algorithms.iter_mut().zip(asked) {
                for (algorithm, asked) in algorithms.iter_mut().zip(asked.unwrap_or([true; 7])) {
                    *algorithm &= asked;
                }
            }
            asked_for = Some(format!("NCCL_ALGO was set to {text}."));
        }
        if let Some(text) = read("NCCL_PROTO") {
            let asked = list(version, &text, &PROTOCOL_WORDS)?;
            for (protocols, asked) in protocols.iter_mut().zip(asked) {
                if let Some(asked) = asked {
                    protocols.copy_from_slice(&asked[..3]);
                }
            }
            asked_for.get_or_insert(format!("NCCL_PROTO was set to {text}."));
        }
        Ok(Self {
            version,
            ranks,
            direct,
            channels: channels as u32,
            thresholds,
            threads: [plain, ll128, plain],
            algorithms,
            protocols,
            asked_for,
            takes_links_for_nothing: false,
            objections,
        })
    }

    /// Goes by what the search for rings came to: twice its channels unless variables ask for more, and
    /// where it found nothing, a table in which the links are next to nothing.
    pub(crate) fn go_by(&mut self, channels: Option<u32>, is_fallback: bool, has_least: bool) {
        self.takes_links_for_nothing = is_fallback;
        if let Some(channels) = channels
            && !has_least
        {
            self.channels = 2 * channels;
        }
    }

    /// Microseconds that NCCL's own model expects of each algorithm and protocol; -1 where it is off.
    /// They decide which runs, and nothing else: what it takes is decided in `cost.rs`.
    pub fn table(&self, bytes: u64) -> [[f32; 3]; 7] {
        self.table_of(Function::AllReduce, bytes)
    }

    /// The same for any collective that is chosen for; `bytes` are those of the larger buffer.
    pub fn table_of(&self, function: Function, bytes: u64) -> [[f32; 3]; 7] {
        let (algorithms, protocols_on) = match self.algorithms.get(function as usize) {
            Some(algorithms) => (algorithms, &self.protocols[function as usize]),
            None => return [[-1.0; 3]; 7],
        };
        let mut table = [[-1.0; 3]; 7];
        let hops = f64::from(self.ranks.saturating_sub(1).max(1));
        let (latency_scale, mut bandwidth_scale) = if self.direct { (0.6, 8.0) } else { (1.0, 1.0) };
        if self.takes_links_for_nothing {
            bandwidth_scale /= 200.0;
        }
        // Base and latency per hop in microseconds, gigabytes a second.
        let lines = [
            (TREE, [(6.8, 2.2, 8.0), (9.0, 3.0, 15.0), (8.0, 8.0, 20.0)]),
            (RING, [(6.0, 2.0, 18.0), (9.0, 3.2, 30.0), (8.0, 12.0, 40.0)]),
        ];
        for (algorithm, protocols) in lines {
            for (protocol, (base, hop, bandwidth)) in protocols.into_iter().enumerate() {
                if algorithms[algorithm] && protocols_on[protocol] {
                    let share = f64::from(self.ranks.max(2)) / (2.0 * hops);
                    let microseconds = (base + hop * hops) * latency_scale
                        + bytes as f64 / (bandwidth * 1000.0 * share * bandwidth_scale);
                    table[algorithm][protocol] = microseconds as f32;
                }
            }
        }
        table
    }

    /// What runs for a message, from a table of expected times and, if a plugin says so, from so many
    /// channels. `None` where the variables left nothing.
    pub fn choose(&self, bytes: u64, table: &[[f32; 3]; 7], channels: Option<u32>) -> Option<Choice> {
        self.choose_for(Function::AllReduce, bytes, table, channels)
    }

    /// The same for any collective.
    pub fn choose_for(
        &self,
        function: Function,
        bytes: u64,
        table: &[[f32; 3]; 7],
        channels: Option<u32>,
    ) -> Option<Choice> {
        if function == Function::SendRecv {
            // No list and no table has a say in it.
            let choice = self.with_channels(function, bytes, RING, SIMPLE, None);
            return Some(Choice { channels: choice.channels.min(2), ..choice });
        }
        let mut best: Option<(usize, usize, f32)> = None;
        for (algorithm, times) in table.iter().enumerate() {
            for (protocol, time) in times.iter().enumerate() {
                if *time >= 0.0 && best.is_none_or(|(_, _, least)| *time < least) {
                    best = Some((algorithm, protocol, *time));
                }
            }
        }
        let (algorithm, protocol) = match best {
            Some((algorithm, protocol, _)) => (algorithm, protocol),
            // Up to 2.23 NCCL takes this where nothing else is left.
            None if self.version < 22_400 => (RING, SIMPLE),
            None => return None,
        };
        Some(self.with_channels(function, bytes, algorithm, protocol, channels))
    }

    /// Channels and threads for a message that this algorithm and protocol carry.
    pub(crate) fn with_channels(
        &self,
        function: Function,
        bytes: u64,
        algorithm: usize,
        protocol: usize,
        asked: Option<u32>,
    ) -> Choice {
        let threshold = self.thresholds[if algorithm == TREE { protocol } else { 3 + protocol }].max(0) as u64;
        let (mut channels, mut threads) = (u64::from(self.channels), u64::from(self.threads[protocol]));
        while channels > 1 && bytes < channels * threads * threshold {
            channels -= 1;
        }
        while threads.is_multiple_of(128) && bytes < channels * threads * threshold {
            threads /= 2;
        }
        if let Some(asked) = asked {
            channels = u64::from(asked.clamp(1, self.channels));
        }
        if let Some(cell) = self.cell_bytes(function, protocol) {
            // A channel takes whole cells, so fewer may do for the last of them.
            let cells = bytes.div_ceil(cell).max(1);
            channels = channels.min(cells.div_ceil(cells.div_ceil(channels)));
        }
        Choice { algorithm, protocol, channels: channels as u32, threads: threads.max(96) as u32 }
    }

    /// The least that a channel is given: 16 KiB of traffic, twice that since 2.29.2. An all-reduce moves
    /// every byte twice, all others once, and LL's flags count four times.
    fn cell_bytes(&self, function: Function, protocol: usize) -> Option<u64> {
        let traffic = match self.version {
            22_902.. => 32 * 1024,
            22_300.. => 16 * 1024,
            22_200.. => 512,
            _ => return None,
        };
        let message = if function == Function::AllReduce { traffic / 2 } else { traffic };
        Some(if protocol == 0 { message / 4 } else { message })
    }

    /// Whether ranks exchange directly.
    pub fn is_direct(&self) -> bool {
        self.direct
    }

    /// The variable that left nothing over, in NCCL's words.
    pub fn asked_for(&self) -> Option<&str> {
        self.asked_for.as_deref()
    }

    /// What NCCL would run without a plugin.
    pub fn own_choice(&self, bytes: u64) -> Option<Choice> {
        self.choose(bytes, &self.table(bytes), None)
    }

    /// Whether LL128 may run without being asked for.
    pub fn has_ll128(&self) -> bool {
        self.protocols[Function::AllReduce as usize][LL128]
    }
}

/// How ranks reach each other, from the machine and the variables about it, as they were when they
/// were first read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Path {
    /// Into each other's memory.
    Direct,
    /// Through host memory.
    Host,
    /// Through a network, even on one machine.
    Network,
}

impl Path {
    /// The way between two GPUs of a machine; `read` hands out a variable's text.
    pub fn between(transport: Transport, mut read: impl FnMut(&str) -> Option<String>) -> Self {
        let is_one = |text: Option<String>| text.as_deref().and_then(number) == Some(1);
        let level = read("NCCL_P2P_LEVEL");
        let off = is_one(read("NCCL_P2P_DISABLE")) || level.as_deref().is_some_and(is_local);
        let reaches = match transport {
            Transport::Shm => false,
            Transport::P2p => true,
            Transport::Bridge => level.as_deref().is_some_and(is_far),
        };
        if reaches && !off {
            Self::Direct
        } else if is_one(read("NCCL_SHM_DISABLE")) {
            Self::Network
        } else {
            Self::Host
        }
    }
}

/// Across the host bridge.
fn is_far(level: &str) -> bool {
    ["P2C", "PXN", "PHB", "SYS"].contains(&level) || level.parse::<u32>().is_ok_and(|level| level >= 3)
}

fn is_local(level: &str) -> bool {
    level == "LOC" || level == "0"
}

/// A number as C's strtoll reads it, base 0: what follows the digits is not looked at, and a text
/// without digits is 0. An empty text is no number.
pub(crate) fn number(text: &str) -> Option<i64> {
    let trimmed = text.trim_start();
    if text.is_empty() {
        return None;
    }
    let (negative, digits) = match trimmed.strip_prefix('-') {
        Some(rest) => (true, rest),
        None => (false, trimmed.strip_prefix('+').unwrap_or(trimmed)),
    };
    let lower = digits.to_ascii_lowercase();
    let (radix, digits) = if let Some(hexadecimal) = lower.strip_prefix("0x") {
        (16, hexadecimal.to_owned())
    } else if lower.starts_with('0') {
        (8, lower)
    } else {
        (10, lower)
    };
    let end = digits.find(|c: char| !c.is_digit(radix)).unwrap_or(digits.len());
    let value = if end == 0 { 0 } else { i64::from_str_radix(&digits[..end], radix).ok()? };
    Some(if negative { -value } else { value })
}

/// Decimal numbers at the start of a text, as C's scanf reads them: blanks may lie between, and a sign
/// may begin the next without one.
fn leading_numbers(text: &str) -> Vec<i64> {
    let mut numbers = Vec::new();
    let mut rest = text.trim_start();
    while !rest.is_empty() {
        let sign = usize::from(rest.starts_with(['-', '+']));
        let end = rest[sign..].find(|c: char| !c.is_ascii_digit()).map_or(rest.len(), |at| at + sign);
        let Ok(number) = rest[..end].parse() else { break };
        numbers.push(number);
        rest = rest[end..].trim_start();
    }
    numbers
}

/// Reads NCCL_ALGO or NCCL_PROTO: which of `words` are allowed, for each function that the list names.
fn list(version: i32, text: &str, words: &[&str]) -> Result<[Option<[bool; 7]>; 5], Unreadable> {
    let is_strict = version >= 22_400;
    let mut all = [None; 5];
    for (position, entry) in text.split(';').filter(|entry| !entry.is_empty()).enumerate() {
        let (function, elements) = match entry.split_once(':') {
            Some((function, elements)) if is_strict => (Some(function), elements),
            _ => (None, entry),
        };
        let concerned = match function {
            Some(function) => {
                let at = FUNCTION_WORDS.iter().position(|word| function.eq_ignore_ascii_case(word));
                Some(at.ok_or_else(|| {
                    Unreadable(format!("Unrecognized prefix token \"{function}\" when parsing \"{text}\""))
                })?)
            }
            None if position > 0 && is_strict => {
                return Err(Unreadable(format!(
                    "All entries except the first must have a prefix: \"{entry}\" when parsing \"{text}\""
                )));
            }
            None => None,
        };
        let (inverted, elements) = match elements.strip_prefix('^') {
            Some(rest) => (true, rest),
            None => (false, elements),
        };
        let mut allowed = [inverted; 7];
        for element in elements.split(',').filter(|element| !element.is_empty()) {
            match words.iter().position(|word| element.eq_ignore_ascii_case(word)) {
                Some(at) => allowed[at] = !inverted,
                None if is_strict => {
                    return Err(Unreadable(format!(
                        "Unrecognized element token \"{element}\" when parsing \"{text}\""
                    )));
                }
                None => {}
            }
        }
        match concerned {
            Some(at) => all[at] = Some(allowed),
            None => all = [Some(allowed); 5],
        }
    }
    Ok(all)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tuning(version: i32, ranks: u32, variables: &[(&str, &str)]) -> Result<Tuning, Unreadable> {
        Tuning::new(version, ranks, false, |name| {
            variables.iter().find(|(known, _)| *known == name).map(|(_, value)| (*value).to_owned())
        })
    }

    fn shown(version: i32, variables: &[(&str, &str)], bytes: u64) -> String {
        let choice = tuning(version, 2, variables).unwrap().own_choice(bytes).unwrap();
        format!("{}/{}/{}", ALGORITHMS[choice.algorithm], PROTOCOLS[choice.protocol], choice.channels)
    }

    #[test]
    fn numbers_are_read_as_c_reads_them() {
        for (text, value) in
            [("4", Some(4)), ("4M", Some(4)), ("abc", Some(0)), ("0x10", Some(16)), ("010", Some(8)), ("-2", Some(-2))]
        {
            assert_eq!(number(text), value, "{text}");
        }
        assert_eq!(number(""), None);
        assert_eq!(leading_numbers("-1-1-1+2"), [-1, -1, -1, 2]);
        assert_eq!(leading_numbers("8 8 64 2 x 5"), [8, 8, 64, 2]);
    }

    #[test]
    fn channels_follow_thresholds_and_cells() {
        assert_eq!(shown(22_809, &[], 14_336), "RING/LL/1");
        assert_eq!(shown(22_809, &[("NCCL_MIN_NCHANNELS", "32")], 43_008), "RING/LL/5");
        let fine = [("NCCL_MIN_NCHANNELS", "32"), ("NCCL_THREAD_THRESHOLDS", "-1-1-1+2")];
        assert_eq!(shown(22_809, &fine, 43_008), "RING/LL/21");
        // Cells are twice as large since 2.29.2, and there are none before 2.22.
        assert_eq!(shown(23_003, &fine, 43_008), "RING/LL/11");
        assert_eq!(shown(21_903, &fine, 43_008), "RING/LL/32");
        assert_eq!(shown(22_809, &[("NCCL_MAX_NCHANNELS", "2")], 1 << 20), "RING/SIMPLE/2");
        let eight = tuning(22_809, 8, &[("NCCL_MIN_NCHANNELS", "32")]).unwrap();
        assert_eq!(eight.own_choice(65_536).unwrap().channels, 2, "a ring of eight asks for 32 KiB a channel");
    }

    #[test]
    fn lists_are_read_by_release() {
        let algo = |version, text| tuning(version, 2, &[("NCCL_ALGO", text)]);
        assert_eq!(shown(22_809, &[("NCCL_ALGO", "allreduce:tree")], 4096), "TREE/LL/1");
        assert_eq!(shown(22_809, &[("NCCL_ALGO", "tree;allgather:ring")], 4096), "TREE/LL/1");
        assert_eq!(shown(22_809, &[("NCCL_ALGO", "^ring")], 4096), "TREE/LL/1");
        assert!(algo(22_809, "lll").unwrap_err().0.contains("Unrecognized element token \"lll\""));
        assert!(algo(22_809, "allreduced:ring").unwrap_err().0.contains("Unrecognized prefix"));
        assert!(algo(22_809, "ring;tree").unwrap_err().0.contains("must have a prefix"));
        assert_eq!(algo(22_809, "NVLS").unwrap().own_choice(4096), None);
        // Up to 2.23 a typing error leaves nothing, and nothing means Ring and Simple.
        assert_eq!(shown(22_304, &[("NCCL_ALGO", "lll")], 4096), "RING/SIMPLE/1");
    }

    #[test]
    fn each_collective_has_a_list_of_its_own() {
        let own = |version, variables: &[(&str, &str)], function| {
            let tuning = tuning(version, 2, variables).unwrap();
            let table = tuning.table_of(function, 65_536);
            let choice = tuning.choose_for(function, 65_536, &table, None)?;
            Some(format!("{}/{}", ALGORITHMS[choice.algorithm], PROTOCOLS[choice.protocol]))
        };
        for function in [Function::Broadcast, Function::Reduce, Function::AllGather, Function::ReduceScatter] {
            let shown = |variables: &[(&str, &str)]| own(22_809, variables, function);
            assert_eq!(shown(&[]).as_deref(), Some("RING/LL"), "{}", function.name());
            assert_eq!(shown(&[("NCCL_ALGO", "allreduce:tree")]).as_deref(), Some("RING/LL"));
            assert_eq!(shown(&[("NCCL_ALGO", "tree")]), None, "trees add up and do nothing else");
            assert_eq!(shown(&[("NCCL_PROTO", "Simple;allreduce:LL")]).as_deref(), Some("RING/SIMPLE"));
            assert_eq!(shown(&[("NCCL_PROTO", "allreduce:LL128")]).as_deref(), Some("RING/LL"));
            // Up to 2.23 nothing left means Ring and Simple, without a word.
            assert_eq!(own(22_304, &[("NCCL_ALGO", "tree")], function).as_deref(), Some("RING/SIMPLE"));
        }
        let shift = own(22_809, &[("NCCL_ALGO", "tree"), ("NCCL_PROTO", "LL")], Function::SendRecv);
        assert_eq!(shift.as_deref(), Some("RING/SIMPLE"), "no list concerns send and receive");
    }

    #[test]
    fn ll128_must_be_asked_for_without_direct_links() {
        assert!(!tuning(22_809, 2, &[]).unwrap().has_ll128());
        assert!(tuning(22_809, 2, &[("NCCL_PROTO", "LL128")]).unwrap().has_ll128());
    }

    #[test]
    fn odd_thread_counts_are_objected_to() {
        let tuning = tuning(22_809, 2, &[("NCCL_NTHREADS", "100")]).unwrap();
        assert_eq!(tuning.objections, ["Invalid NCCL_NTHREADS 100 (must be a multiple of 32)"]);
    }

    #[test]
    fn the_way_between_gpus_follows_machine_and_variables() {
        let path = |transport, variables: &[(&str, &str)]| {
            Path::between(transport, |name| {
                variables.iter().find(|(known, _)| *known == name).map(|(_, value)| (*value).to_owned())
            })
        };
        assert_eq!(path(Transport::P2p, &[]), Path::Direct);
        assert_eq!(path(Transport::P2p, &[("NCCL_P2P_DISABLE", "1")]), Path::Host);
        assert_eq!(path(Transport::P2p, &[("NCCL_P2P_LEVEL", "LOC")]), Path::Host);
        assert_eq!(path(Transport::Shm, &[("NCCL_P2P_LEVEL", "SYS")]), Path::Host);
        assert_eq!(path(Transport::Bridge, &[]), Path::Host);
        assert_eq!(path(Transport::Bridge, &[("NCCL_P2P_LEVEL", "PXB")]), Path::Host);
        assert_eq!(path(Transport::Bridge, &[("NCCL_P2P_LEVEL", "PHB")]), Path::Direct);
        let both = [("NCCL_P2P_LEVEL", "SYS"), ("NCCL_P2P_DISABLE", "1")];
        assert_eq!(path(Transport::Bridge, &both), Path::Host);
        assert_eq!(path(Transport::Shm, &[("NCCL_SHM_DISABLE", "1")]), Path::Network);
    }
}
