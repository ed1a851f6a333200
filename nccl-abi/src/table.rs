//! The columns of a tuner table: those of the CSV files that NVIDIA's example plugin reads.

/// Columns in order. The last two may be left out.
pub const COLUMNS: [&str; 10] = [
    "collective",
    "min_bytes",
    "max_bytes",
    "algorithm",
    "protocol",
    "channels",
    "nodes",
    "ranks",
    "operations",
    "registered",
];
/// Columns that must be there.
pub const COLUMNS_NEEDED: usize = 8;
/// The number that stands for "any" in the columns of nodes, ranks, operations and registered buffers.
pub const ANY: i64 = -1;
/// Largest table that is read, in bytes. A table has some dozens of rows.
pub const BYTES_MAX: u64 = 1 << 20;
/// Most rows that are read.
pub const ROWS_MAX: usize = 4096;
/// Most channels NCCL knows.
pub const CHANNELS_MAX: i64 = 64;
/// The variable that names the table.
pub const FILE_VARIABLE: &str = "NCCL_TUNER_CONFIG_FILE";
/// A table's file is called this, its hash, and [`FILE_SUFFIX`].
pub const FILE_PREFIX: &str = "tuner-table-";
/// See [`FILE_PREFIX`].
pub const FILE_SUFFIX: &str = ".csv";

/// One row: what runs for messages of these sizes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Row {
    /// Index in [`crate::COLLECTIVES`].
    pub collective: usize,
    /// Smallest message, in bytes as NCCL counts them for tuners: the larger of send and receive buffer of a rank.
    pub min_bytes: u64,
    /// Largest message, included.
    pub max_bytes: u64,
    /// Index in [`crate::ALGORITHMS`].
    pub algorithm: usize,
    /// Index in [`crate::PROTOCOLS`].
    pub protocol: usize,
    /// Channels.
    pub channels: u32,
    /// Nodes of the communicator; nothing for any.
    pub nodes: Option<u64>,
    /// Ranks of the communicator; nothing for any.
    pub ranks: Option<u64>,
}
