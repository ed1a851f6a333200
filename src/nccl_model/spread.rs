//! Channels and threads of one message, after `enqueue.cc`.

use crate::collective::Collective;

use super::constants::{MAX_THREADS, Rules, Spreading, WARP};
use super::{Algorithm, Protocol};

/// What is known about a message and its kernel.
#[derive(Debug, Clone, Copy)]
pub(super) struct Message {
    pub collective: Collective,
    /// The larger of send and receive buffer.
    pub bytes: u64,
    pub ranks: u64,
    pub algorithm: Algorithm,
    pub protocol: Protocol,
    /// The most threads of the kernel, and the bytes a thread must have.
    pub most_threads: u32,
    pub threshold: i64,
    /// Channels that kernels of this kind have.
    pub channels: u32,
    /// A tuner plugin's number.
    pub plugin_channels: Option<u32>,
}

impl Message {
    /// Bytes as NCCL counts them in its plan: those of one rank's part where every rank has its own.
    fn planned_bytes(&self) -> u64 {
        match self.collective {
            Collective::AllGather | Collective::ReduceScatter => self.bytes.div_ceil(self.ranks),
            _ => self.bytes,
        }
    }

    fn traffic_per_byte(&self) -> u64 {
        match self.collective {
            Collective::AllReduce => 2,
            Collective::AllGather | Collective::ReduceScatter => self.ranks,
            _ => 1,
        }
    }

    fn is_short_of(&self, channels: u32, threads: u32) -> bool {
        let wanted = i128::from(channels) * i128::from(threads) * i128::from(self.threshold);
        i128::from(self.bytes) < wanted
    }
}

/// Channels that carry a message, and threads of each.
pub(super) fn spread(message: &Message, rules: Rules) -> (u32, u32) {
    let mut channels = message.channels;
    let mut threads = message.most_threads;
    let is_nvls = message.algorithm == Algorithm::Nvls;
    if !is_nvls {
        while channels >= 2 && message.is_short_of(channels, threads) {
            channels -= 1;
        }
        // 2.20 and 2.21 let a plugin's channels decide about threads too.
        let for_threads = match message.plugin_channels {
            Some(channels) if rules.spreading() == Spreading::Evenly => channels,
            _ => channels,
        };
        while threads.is_multiple_of(128) && message.is_short_of(for_threads, threads) {
            threads /= 2;
        }
    }
    if message.protocol == Protocol::Simple {
        threads += match message.algorithm {
            Algorithm::Ring => WARP,
            Algorithm::Tree => 4 * WARP,
            Algorithm::Nvls => 0,
        };
    }
    threads = threads.max(3 * WARP);
    if message.algorithm == Algorithm::Tree && rules.trees_take_all_threads() {
        threads = MAX_THREADS;
    }
    let wanted = message.plugin_channels.unwrap_or(channels);
    let carrying = match rules.spreading() {
        Spreading::AsChosen => wanted,
        Spreading::Evenly => evenly(message, wanted, threads),
        Spreading::SmallCells { least_traffic_bytes } => cells(
            message,
            wanted,
            &Cells {
                bytes: 16,
                traffic_per_byte: message.traffic_per_byte(),
                least: least_traffic_bytes,
                keeps_least: true,
                rounds_up: false,
            },
        ),
        Spreading::Cells { least_traffic_bytes, counts_ll_fourfold, keeps_least_in_sum } => {
            let is_fourfold = counts_ll_fourfold && message.protocol == Protocol::Ll;
            let traffic_per_byte = message.traffic_per_byte() * if is_fourfold { 4 } else { 1 };
            cells(
                message,
                wanted,
                &Cells {
                    bytes: least_traffic_bytes.div_ceil(traffic_per_byte).div_ceil(16) * 16,
                    traffic_per_byte,
                    least: least_traffic_bytes,
                    keeps_least: !keeps_least_in_sum,
                    rounds_up: true,
                },
            )
        }
    };
    (carrying.clamp(1, message.channels.max(1)), threads)
}

/// Equal shares in whole units of the kernel.
fn evenly(message: &Message, channels: u32, threads: u32) -> u32 {
    let unit = match message.protocol {
        Protocol::Simple => 4096,
        Protocol::Ll128 => 480 * u64::from(threads / WARP),
        Protocol::Ll => 8 * u64::from(threads),
    };
    let bytes = message.planned_bytes();
    let share = bytes.div_ceil(u64::from(channels.max(1))).div_ceil(16) * 16;
    let share = share.div_ceil(unit) * unit;
    bytes.div_ceil(share.max(1)).clamp(1, u64::from(channels.max(1))) as u32
}

/// How a message is cut.
struct Cells {
    bytes: u64,
    traffic_per_byte: u64,
    least: u64,
    /// Whether a channel's share may not be less than the least traffic.
    keeps_least: bool,
    /// Whether the first channel's share is rounded up to whole cells.
    rounds_up: bool,
}

/// Cuts a message into cells and gives channels their shares: a first, equal ones, and a rest.
fn cells(message: &Message, channels: u32, cut: &Cells) -> u32 {
    let all_channels = u64::from(message.channels.max(1));
    let wanted = u64::from(channels.max(1)).min(all_channels);
    let bytes = message.planned_bytes();
    let traffic = bytes * cut.traffic_per_byte;
    let traffic = if cut.rounds_up { traffic.max(cut.least) } else { traffic };
    let share = if cut.keeps_least { (traffic / wanted).max(cut.least) } else { (traffic / wanted).div_ceil(16) * 16 };
    let cell_traffic = cut.bytes * cut.traffic_per_byte;
    let cells = bytes.div_ceil(cut.bytes);
    let mut each = share.div_ceil(cell_traffic).clamp(1, cells);
    let first = if all_channels == 1 {
        cells
    } else if cut.rounds_up {
        share.div_ceil(cell_traffic).min(cells)
    } else {
        (share / cell_traffic).min(cells)
    };
    let rest = cells - first;
    let mut middle = rest / each;
    let mut last = rest % each;
    let count = u64::from(first != 0) + middle + u64::from(last != 0);
    if count > all_channels {
        middle = all_channels.saturating_sub(2);
        each = rest / (middle + 1);
        last = each + rest % (middle + 1);
    }
    if last == 0 && middle != 0 {
        last = each;
        middle -= 1;
    }
    if first != 0 {
        return (1 + middle + u64::from(last != 0)) as u32;
    }
    // The first channel was passed over, and the numbers begin with the next; the highest counts.
    let (first, middle, last) = if middle == 0 { (last, 0, 0) } else { (each, middle - 1, last) };
    (1 + u64::from(first != 0) + middle + u64::from(last != 0)) as u32
}
