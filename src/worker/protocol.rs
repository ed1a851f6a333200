//! What parent and worker say to each other: one JSON text a line, both ways, over one socket.
//!
//! The parent leads: every order has exactly one answer, so that a deadline always belongs to a step
//! with a name. All ranks get the same orders in the same sequence, which is what keeps collectives
//! from waiting for a rank that does something else.

use std::collections::BTreeMap;
use std::io::{BufRead, Read};

use serde::{Deserialize, Serialize};

use crate::record::{BufferKind, GpuState, PassStep, PassStream, PassVariant, PointKey};

/// Version of the protocol; it stands in the first frame and must match exactly, because parent and
/// worker are the same executable.
pub const PROTOCOL: u32 = 7;

/// The hidden argument that makes the executable a worker.
pub const WORKER_ARGUMENT: &str = "__worker";

/// An order.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "order", rename_all = "kebab-case", deny_unknown_fields)]
pub enum Order {
    /// Who you are. Opens the GPU and loads NCCL.
    Hello {
        /// [`PROTOCOL`].
        protocol: u32,
        /// Rank of this worker.
        rank: u32,
        /// Ranks of the launch.
        ranks: u32,
        /// CUDA ordinal of its GPU, in PCI order.
        device: u32,
        /// Absolute path of libnccl.
        nccl_path: String,
        /// File that NCCL writes its log to (NCCL_DEBUG_FILE of this process).
        log_path: String,
        /// Seed of the data of this launch; equal on all ranks.
        data_seed: u64,
        /// Largest message of the launch in bytes.
        largest_bytes: u64,
        /// Whose memory the messages lie in.
        buffers: BufferKind,
        /// The control file of the tuner plugin, which this process's environment names: made by the worker.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        control_path: Option<String>,
    },
    /// Make a rendezvous id (first rank only).
    UniqueId,
    /// Set the variables of the next communicator. A step of its own, before the rendezvous id is
    /// made: from then on NCCL has a thread that may read the environment.
    SetVariables {
        /// Communicator-level variables; `None` takes the variable out of the environment.
        variables: BTreeMap<String, Option<String>>,
    },
    /// Keep the GPU's links busy for a while, before there is a communicator.
    WarmUp {
        /// How long.
        milliseconds: u32,
    },
    /// Join a communicator.
    OpenCommunicator {
        /// Rendezvous id in hexadecimal.
        unique_id: String,
        /// Where only a part of the ranks meets: this rank's place in it. All ranks without it.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        group: Option<RankGroup>,
        /// Channels that it is to have at least, by its configuration; NCCL's own number without it.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        channels_min: Option<u32>,
    },
    /// From here on the tuner plugin chooses this for what is enqueued; without a choice, NCCL's own stands. Equal on
    /// all ranks: NCCL does not check that they chose alike.
    Choose {
        /// What to choose.
        choice: Option<CallChoice>,
    },
    /// Tell what the plugin did with the last choice.
    ReadControl,
    /// Connect, capture (unless the point is eager), check the data, warm up.
    Prepare {
        /// What to measure.
        point: PointKey,
        /// Collectives in the graph, or issued one after another.
        collectives: u32,
    },
    /// Runs without timing, each with fresh values, every element checked after each.
    Check {
        /// What to run.
        point: PointKey,
        /// Collectives in the graph, or issued one after another.
        collectives: u32,
        /// How often.
        repeats: u32,
    },
    /// Timed replays of what was prepared, all queued before waiting, then a check of the data.
    Replay {
        /// How many.
        replays: u32,
    },
    /// Plan, run once, and capture a pass in its variants; nothing is captured where `captured` is
    /// false.
    PreparePass {
        /// Its steps in order.
        steps: Vec<PassStep>,
        /// Where collectives are issued.
        stream: PassStream,
        /// In graphs, or call by call.
        captured: bool,
        /// libcublasLt, by path or by the loader's name.
        cublaslt_path: String,
    },
    /// Timed runs of the prepared pass.
    ReplayPass {
        /// In which variant.
        variant: PassVariant,
        /// How many.
        replays: u32,
    },
    /// Capture a chain of all-reduces that another, uncaptured one will overlap with.
    PrepareOverlap {
        /// Size of each all-reduce.
        bytes: u64,
        /// All-reduces in each chain.
        collectives: u32,
        /// Seed of the data and of how late ranks come.
        seed: u64,
    },
    /// Run both chains at once, round by round, and check every sum.
    Overlap {
        /// Number of the first round: even ones begin with the captured chain.
        first_round: u32,
        /// How many.
        rounds: u32,
    },
    /// Drop the graph and leave the communicator.
    CloseCommunicator,
    /// End with status 0.
    Finish,
}

/// What the tuner plugin is to choose for each collective that is enqueued.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CallChoice {
    /// Algorithm by NCCL's number.
    pub algorithm: u32,
    /// Protocol by NCCL's number.
    pub protocol: u32,
    /// Most channels; 0 leaves them to NCCL.
    pub channels: u32,
}

/// What became of the last choice.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum ChoiceFate {
    /// Nothing was enqueued yet.
    Unasked,
    /// NCCL chose, as asked.
    Left,
    /// It was chosen.
    Honoured,
    /// NCCL cannot run it here, and chose itself.
    Unavailable,
}

/// A rank's place among a part of the ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RankGroup {
    /// Which part; each has data of its own.
    pub number: u32,
    /// Rank inside it.
    pub rank: u32,
    /// Its size.
    pub ranks: u32,
}

impl Order {
    /// The step's name in outcomes ("timed out while opening the communicator").
    pub const fn step(&self) -> &'static str {
        match self {
            Self::Hello { .. } => "opening the GPU and NCCL",
            Self::SetVariables { .. } => "setting variables",
            Self::UniqueId => "making a rendezvous id",
            Self::OpenCommunicator { .. } => "initialising the communicator",
            Self::Choose { .. } => "choosing for the plugin",
            Self::ReadControl => "reading what the plugin did",
            Self::Prepare { .. } => "running the first collective and capturing the graph",
            Self::Check { .. } => "checking a collective",
            Self::Replay { .. } => "replaying the graph",
            Self::PreparePass { .. } => "preparing a forward pass",
            Self::ReplayPass { .. } => "timing a forward pass",
            Self::WarmUp { .. } => "keeping the links busy",
            Self::PrepareOverlap { .. } => "preparing collectives that overlap",
            Self::Overlap { .. } => "letting captured and uncaptured collectives overlap",
            Self::CloseCommunicator => "leaving the communicator",
            Self::Finish => "ending",
        }
    }
}

/// What a worker is at within a step. It tells each before it begins, so that a deadline belongs to a
/// piece of work whose length is known, and a hang to a place.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum WorkPhase {
    /// Opening the GPU and filling buffers.
    Context,
    /// Joining the communicator.
    Init,
    /// The first use of an algorithm, which connects its channels.
    Connect,
    /// Capturing graphs.
    Capture,
    /// Comparing data with what they must be.
    Check,
    /// Replaying graphs, or running a pass.
    Replay,
    /// Allocating weights and planning products.
    Plan,
    /// Leaving the communicator.
    Destroy,
}

impl WorkPhase {
    /// Every phase.
    pub const ALL: [Self; 8] =
        [Self::Context, Self::Init, Self::Connect, Self::Capture, Self::Check, Self::Replay, Self::Plan, Self::Destroy];

    /// The name in outcomes.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Context => "context",
            Self::Init => "init",
            Self::Connect => "connect",
            Self::Capture => "capture",
            Self::Check => "check",
            Self::Replay => "replay",
            Self::Plan => "plan",
            Self::Destroy => "destroy",
        }
    }
}

/// The answer to an order.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "answer", rename_all = "kebab-case", deny_unknown_fields)]
pub enum Answer {
    /// No answer yet: what the worker is at. Any number of these may come before the answer.
    Progress {
        /// What begins now.
        phase: WorkPhase,
    },
    /// To `Hello`.
    Ready {
        /// [`PROTOCOL`].
        protocol: u32,
        /// NCCL's version code.
        nccl_version: i32,
        /// GPU name, as CUDA says.
        device_name: String,
        /// GPU address, as CUDA says; the parent compares it with the one it meant.
        pci_bus_id: String,
    },
    /// To `SetVariables`.
    VariablesSet,
    /// To `WarmUp`.
    WarmedUp,
    /// To `UniqueId`.
    UniqueId {
        /// In hexadecimal.
        unique_id: String,
    },
    /// To `OpenCommunicator`.
    Opened {
        /// NCCL's log since the last answer, bounded.
        log: String,
    },
    /// To `Choose`.
    Chosen,
    /// To `ReadControl`.
    Control {
        /// What became of the last choice.
        fate: ChoiceFate,
        /// Decisions of the plugin since the process began.
        decisions: u64,
        /// Bytes of the message that was decided about last.
        last_bytes: u64,
        /// What NCCL expected there, microseconds, by algorithm and protocol; below zero for what it cannot run.
        table_us: Vec<f32>,
    },
    /// To `Prepare`.
    Prepared {
        /// Microseconds of one replay, from the warm-up.
        replay_us: f64,
        /// NCCL's log since the last answer, bounded.
        log: String,
    },
    /// To `Check`: every element was right every time.
    Checked {
        /// NCCL's log since the last answer, bounded.
        log: String,
    },
    /// To `Replay`.
    Replayed {
        /// Microseconds of each replay on this rank.
        replays_us: Vec<f64>,
    },
    /// To `PreparePass`.
    PassPrepared {
        /// Microseconds of one run, from the warm-up.
        replay_us: f64,
        /// Bytes of weights that the products walk through; smaller than the model's where it does
        /// not fit.
        arena_bytes: u64,
        /// cuBLASLt's version number.
        cublaslt_version: u64,
        /// NCCL's log since the last answer, bounded.
        log: String,
    },
    /// To `ReplayPass`.
    PassReplayed {
        /// Microseconds of each run on this rank.
        replays_us: Vec<f64>,
        /// What the GPU did meanwhile.
        state: Option<GpuState>,
    },
    /// To `PrepareOverlap`.
    OverlapPrepared {
        /// NCCL's log since the last answer, bounded.
        log: String,
    },
    /// To `Overlap`: every sum was right.
    Overlapped,
    /// To `CloseCommunicator`.
    Closed {
        /// Bytes of device memory that the communicator took on this rank, connections included: what
        /// was free before it was joined, less what was free when all else had been given back.
        device_bytes: Option<u64>,
        /// Bytes of shared memory that this process had mapped and touched more than before
        /// (RssShmem); memory that the driver allocates on the host does not show there.
        shared_bytes: Option<u64>,
    },
    /// To `Finish`.
    Finished,
    /// To any order: it could not be carried out. The worker ends after it, since the other ranks
    /// may be somewhere else; what the launch had left is measured in a fresh one.
    Failed {
        /// When it was noticed: microseconds on the machine's wall clock, which all ranks share. The
        /// earliest failure is the cause, the others are its echoes.
        at_us: u64,
        /// What kind of failure.
        failure: FailureKind,
        /// What was said.
        detail: String,
        /// NCCL's log since the last answer, bounded.
        log: String,
    },
}

/// Kinds of failure a worker can tell apart.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum FailureKind {
    /// The order made no sense.
    Protocol,
    /// NCCL returned an error.
    Nccl,
    /// CUDA returned an error.
    Cuda,
    /// Memory ran out.
    OutOfMemory,
    /// The data check failed.
    WrongResult,
    /// This version cannot do it.
    Unsupported,
    /// cuBLASLt is missing or returned an error.
    CublasLt,
}

/// Longest order a parent may send, in bytes.
const ORDER_BYTES: u64 = 1024 * 1024;

/// The next order, or why it cannot be understood; `None` at the end of the stream.
pub fn read_order(reader: &mut impl BufRead) -> std::io::Result<Option<Result<Order, String>>> {
    let mut line = String::new();
    if reader.take(ORDER_BYTES).read_line(&mut line)? == 0 {
        return Ok(None);
    }
    Ok(Some(serde_json::from_str(&line).map_err(|error| error.to_string())))
}

/// Bytes as lower-case hexadecimal.
pub fn to_hex(bytes: &[u8]) -> String {
    use std::fmt::Write as _;
    bytes.iter().fold(String::new(), |mut text, byte| {
        // Writing to a String cannot fail.
        let _ = write!(text, "{byte:02x}");
        text
    })
}

/// The bytes of a hexadecimal text of the right length.
pub fn from_hex<const N: usize>(text: &str) -> Option<[u8; N]> {
    if text.len() != 2 * N {
        return None;
    }
    // Digit by digit: the standard parser of numbers takes "+f" too.
    let digit = |byte: u8| char::from(byte).to_digit(16).map(|digit| digit as u8);
    let mut bytes = [0; N];
    for (byte, digits) in bytes.iter_mut().zip(text.as_bytes().chunks_exact(2)) {
        *byte = digit(digits[0])? << 4 | digit(digits[1])?;
    }
    Some(bytes)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn hexadecimal_reads_back(bytes in any::<[u8; 32]>()) {
            prop_assert_eq!(from_hex::<32>(&to_hex(&bytes)), Some(bytes));
        }

        #[test]
        fn no_text_makes_a_worker_panic(text in ".{0,200}") {
            let _ = serde_json::from_str::<Order>(&text);
            let _ = from_hex::<16>(&text);
        }
    }

    #[test]
    fn only_digits_are_hexadecimal() {
        assert_eq!(from_hex::<2>("0aF0"), Some([0x0a, 0xf0]));
        for text in ["+a00", "0a+0", "-a00", " a00", "0a0", "0a000", "0ag0", "éa0", "0x0a"] {
            assert_eq!(from_hex::<2>(text), None, "{text}");
        }
    }

    #[test]
    fn an_order_of_another_version_is_refused() {
        assert!(serde_json::from_str::<Order>(r#"{"order":"hello","protocol":1}"#).is_err());
        assert!(serde_json::from_str::<Order>(r#"{"order":"sing"}"#).is_err());
        assert_eq!(serde_json::from_str::<Order>(r#"{"order":"finish"}"#).unwrap(), Order::Finish);
    }
}
