//! A small file through which a worker tells the plugin of its own process what to choose next.
//!
//! Worker and plugin map the same file. The worker writes a request while no collective is being enqueued, captures,
//! and reads the answer; nothing else touches the file, so atomics without locks are enough. All ranks of a
//! communicator must be given the same request: NCCL does not check that they chose alike.

use std::sync::atomic::{AtomicI32, AtomicU32, AtomicU64};

/// The variable that names the file, for the plugin.
pub const FILE_VARIABLE: &str = "NCCLTUNE_TUNER_CONTROL_FILE";
/// First number of the file: "nccltune" in its bytes, little end first.
pub const MAGIC: u64 = u64::from_le_bytes(*b"nccltune");
/// Layout of the block.
pub const VERSION: u32 = 1;
/// Algorithms and protocols that a cost table is kept for.
pub const TABLE_LENGTH: usize = 7 * 3;

/// The request leaves NCCL's choice.
pub const REQUEST_NONE: u32 = 0;
/// The request names algorithm, protocol and channels.
pub const REQUEST_CHOOSE: u32 = 1;

/// The last decision left NCCL's choice, as asked.
pub const ANSWER_LEFT: u32 = 1;
/// The last decision was the requested one.
pub const ANSWER_HONOURED: u32 = 2;
/// The requested cell is one that NCCL cannot run; its own choice stood.
pub const ANSWER_UNAVAILABLE: u32 = 3;

/// The mapped block.
#[repr(C)]
#[derive(Debug, Default)]
pub struct ControlBlock {
    /// [`MAGIC`].
    pub magic: AtomicU64,
    /// [`VERSION`].
    pub version: AtomicU32,
    /// [`REQUEST_NONE`] or [`REQUEST_CHOOSE`]; written last.
    pub request: AtomicU32,
    /// The collective the request is for, by number; below zero for any.
    pub collective: AtomicI32,
    /// Algorithm by number.
    pub algorithm: AtomicI32,
    /// Protocol by number.
    pub protocol: AtomicI32,
    /// Channels; 0 leaves them to NCCL.
    pub channels: AtomicU32,
    /// Decisions since the file was made; written last.
    pub decisions: AtomicU64,
    /// Bytes of the last message that was decided about.
    pub last_bytes: AtomicU64,
    /// What became of the last request.
    pub answer: AtomicU32,
    /// Algorithms in NCCL's table.
    pub table_algorithms: AtomicU32,
    /// NCCL's own table at the last decision, row by row: bits of `f32`, microseconds, below zero for unavailable.
    pub table: [AtomicU32; TABLE_LENGTH],
}
