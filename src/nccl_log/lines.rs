//! What single lines of NCCL's log say.

use super::{CommunicatorChannels, GraphLine, Operation, WARNING_LENGTH};
use crate::collective::Collective;
use crate::knob;
use crate::record::SetLine;

/// The kinds of line that are read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    Info,
    Warn,
}

pub(super) const MARK_LENGTH: usize = "NCCL INFO ".len();

/// Where messages begin: behind each "NCCL INFO " and "NCCL WARN ".
pub(super) fn marks(line: &str) -> impl Iterator<Item = (Kind, usize)> {
    line.match_indices("NCCL ").filter_map(|(at, _)| {
        let rest = &line[at..];
        let kind = if rest.starts_with("NCCL INFO ") {
            Kind::Info
        } else if rest.starts_with("NCCL WARN ") {
            Kind::Warn
        } else {
            return None;
        };
        Some((kind, at + MARK_LENGTH))
    })
}

/// The digits at the start of a text as a number.
pub(super) fn leading_number<N: std::str::FromStr>(text: &str) -> Option<N> {
    let end = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
    text[..end].parse().ok()
}

/// "NCCL_X set by environment to 4." and "NCCL_Y set by environment to Ring".
pub(super) fn set_line(message: &str) -> Option<SetLine> {
    let (before, value) = message.split_once(" set by environment to ")?;
    let variable = before.split_whitespace().next_back().filter(|name| name.starts_with("NCCL_"))?;
    let value = value.trim();
    // Only numbers are followed by a full stop that is not theirs.
    let value = value.strip_suffix('.').filter(|number| number.parse::<i64>().is_ok()).unwrap_or(value);
    Some(SetLine {
        variable: variable.chars().take(WARNING_LENGTH).collect(),
        value: value.chars().take(WARNING_LENGTH).collect(),
    })
}

const ALGORITHMS: [&str; 7] = ["tree", "ring", "collnet_direct", "collnet_chain", "nvls", "nvls_tree", "pat"];
const PROTOCOLS: [&str; 3] = ["ll", "ll128", "simple"];

/// An algorithm or protocol by number (up to 2.23) or name, in lower case.
fn choice(text: &str, numbered: &[&str]) -> String {
    match text.parse::<usize>().ok().and_then(|number| numbered.get(number)) {
        Some(name) => (*name).to_owned(),
        None => text.chars().take(32).collect::<String>().to_ascii_lowercase(),
    }
}

/// Any of the lines in which NCCL tells what it runs.
pub(super) fn operation(message: &str) -> Option<Operation> {
    let (head, tail) = message.split_once(" Bytes -> ")?;
    let (name, bytes) = head.rsplit_once(": ").unwrap_or(("", head));
    let (name, variant) = match name.split_once(" [") {
        Some((name, variant)) => (name, variant.strip_suffix(']')?),
        None => (name, ""),
    };
    let mut operation = Operation {
        collective: COLLECTIVES.into_iter().find(|collective| collective.log_name() == name),
        name: name.chars().take(64).collect(),
        bytes: bytes.trim().parse().ok()?,
        algo: String::new(),
        proto: None,
        kernel: None,
        channels: None,
        threads: None,
        symmetric: false,
        predicted_us: None,
        times: 1,
    };
    let words: Vec<&str> = tail.split_whitespace().take(16).collect();
    let after = |word: &str| words.iter().position(|other| *other == word).and_then(|at| words.get(at + 1)).copied();
    if let Some(kernel) = after("Kernel") {
        operation.symmetric = true;
        "symmetric".clone_into(&mut operation.algo);
        operation.kernel = Some(kernel.chars().take(64).collect());
        operation.channels = after("nchannels").and_then(leading_number);
        operation.threads = after("nthreads").and_then(leading_number);
    } else if let (Some(algo), Some(proto)) = (after("Algo"), after("proto")) {
        operation.algo = choice(algo, &ALGORITHMS);
        operation.proto = Some(choice(proto, &PROTOCOLS));
        operation.channels = channel_range(tail);
        operation.predicted_us = after("time").and_then(|time| time.parse().ok()).filter(|time: &f64| time.is_finite());
    } else if variant.ends_with("Engine") || variant.ends_with("CE") {
        "copy-engine".clone_into(&mut operation.algo);
    } else {
        return None;
    }
    Some(operation)
}

const COLLECTIVES: [Collective; 6] = [
    Collective::AllReduce,
    Collective::AllGather,
    Collective::ReduceScatter,
    Collective::Broadcast,
    Collective::Reduce,
    Collective::SendRecv,
];

/// "channel{Lo..Hi}={0..3}" is four channels.
fn channel_range(text: &str) -> Option<u32> {
    let (_, range) = text.split_once("channel{Lo..Hi}={")?;
    let (low, high) = range.split_once("..")?;
    let low: u32 = low.parse().ok()?;
    let high: u32 = leading_number(high)?;
    high.checked_sub(low)?.checked_add(1)
}

/// "Channel 00/0 : 0[0] -> 1[1] [send] via NET/Socket/0": the transport without the parts that name
/// a device, a rank or an interface.
pub(super) fn transport(message: &str) -> Option<String> {
    let (channel, via) = message.split_once(" via ")?;
    if !(channel.starts_with("Channel ") && channel.contains("->") || channel.starts_with("CollNet ")) {
        return None;
    }
    let parts: Vec<&str> = via.trim().split('/').take(8).collect();
    let (kind, first) = (*parts.first()?, parts.get(1).copied().unwrap_or_default());
    let has = |part: &str| parts.contains(&part);
    let name = match kind {
        // "SHM/direct" since 2.30.5 is what "SHM/direct/direct" was; copy engines show as CE.
        "SHM" => format!("SHM/{first}/{}", parts.get(2).copied().unwrap_or(first)),
        "P2P" => {
            let read = if has("read") { "/read" } else { "" };
            let copy_engine = if has("CE") { "/CE" } else { "" };
            format!("P2P/{first}{read}{copy_engine}")
        }
        "NET" | "COLLNET" => format!("{kind}/{first}{}", if has("GDRDMA") { "/GDRDMA" } else { "" }),
        _ => return None,
    };
    Some(name.chars().filter(|c| !c.is_control()).take(64).collect())
}

/// "4 coll channels, 4 collnet channels, 0 nvls channels, 4 p2p channels, 2 p2p channels per peer".
pub(super) fn communicator_channels(message: &str) -> Option<CommunicatorChannels> {
    if !message.contains(" coll channels, ") {
        return None;
    }
    let mut channels = CommunicatorChannels::default();
    let mut seen = false;
    for part in message.split(", ").take(16) {
        let Some((number, what)) = part.trim().split_once(' ') else { continue };
        let Ok(number) = number.parse::<u32>() else { continue };
        match what {
            "coll channels" => {
                channels.collective = number;
                seen = true;
            }
            "nvls channels" => channels.nvls = Some(number),
            "p2p channels" => channels.p2p = Some(number),
            "p2p channels per peer" => channels.p2p_per_peer = Some(number),
            _ => {}
        }
    }
    seen.then_some(channels)
}

/// "8/8/64 | 64/8/64 | 512 | 512".
pub(super) fn thresholds(text: &str) -> Option<[i64; 6]> {
    let mut numbers = [0; 6];
    let mut parts = text.split(['/', '|']).map(str::trim);
    for number in &mut numbers {
        *number = parts.next()?.parse().ok()?;
    }
    Some(numbers)
}

/// "Pattern 4, crossNic 0, nChannels 1, bw 0.100000/0.100000, type SYS/SYS": the bandwidth inside.
pub(super) fn pattern_bandwidth(message: &str) -> Option<f64> {
    let (_, bandwidth) = message.split_once(" bw ")?;
    bandwidth.split('/').next()?.trim().parse().ok()
}

/// The same line as a whole.
pub(super) fn graph(message: &str) -> Option<GraphLine> {
    let after = |word: &str| message.split_once(word).map(|(_, rest)| rest);
    let path = after(" type ")?.split(['/', ',']).next()?.trim();
    let is_path = !path.is_empty() && path.len() <= 8 && path.chars().all(|c| c.is_ascii_alphanumeric());
    Some(GraphLine {
        pattern: leading_number(message.strip_prefix("Pattern ")?)?,
        channels: leading_number(after(" nChannels ")?)?,
        bandwidth_gb_per_s: pattern_bandwidth(message).filter(|bandwidth| bandwidth.is_finite())?,
        path: is_path.then(|| path.to_owned())?,
    })
}

/// "ncclCommInitRank comm 0x55 rank 0 nranks 2 cudaDev 0 nvmlDev 0 busId 1a000": NVML's number.
pub(super) fn nvml_device(message: &str) -> Option<u32> {
    leading_number(message.split_once(" nvmlDev ")?.1)
}

/// "P2P is disabled between connected GPUs 1 and 0." and the sharper form for NVLink.
pub(super) fn denied_pair(message: &str) -> Option<(u32, u32)> {
    let (_, pair) = message.split_once("GPUs ")?;
    let (one, other) = pair.split_once(" and ")?;
    let (one, other) = (one.trim().parse().ok()?, leading_number(other)?);
    Some(if one <= other { (one, other) } else { (other, one) })
}

/// Whether a line says that NCCL found no tuner plugin and chooses by itself.
pub(super) fn is_internal_tuner(line: &str) -> bool {
    line.contains("internal tuner")
}

/// Whether the catalogue counts a line as proof of some setting.
pub(super) fn is_proof(message: &str) -> bool {
    message.starts_with("Comm config ")
        || message.starts_with("Parsed environment variable ")
        || knob::proof_lines().any(|text| message.contains(text))
}
