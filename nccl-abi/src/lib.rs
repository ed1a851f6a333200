//! What NCCL, the tuner plugin and nccltune must lay out alike, and nothing that acts.
//!
//! NCCL finds a tuner plugin by the name of a data symbol, `ncclTunerPlugin_v2` to `_v6`, each a structure of
//! pointers. Their layouts are facts of NCCL's public headers (`plugin/tuner/tuner_v2.h` to `tuner_v6.h` of NCCL
//! 2.30.7, where v6 is the newest); a C program that the tests compile checks that the two languages agree.

pub mod control;
pub mod table;

use std::ffi::{c_char, c_int, c_ulong, c_void};

/// `ncclResult_t`: a plain number, since a release may answer with a code this crate has never heard of.
pub type Status = c_int;

/// `ncclSuccess`.
pub const SUCCESS: Status = 0;
/// `ncclSystemError`: a file or call of the system failed.
pub const SYSTEM_ERROR: Status = 2;
/// `ncclInternalError`.
pub const INTERNAL_ERROR: Status = 3;
/// `ncclInvalidArgument`.
pub const INVALID_ARGUMENT: Status = 4;
/// `ncclInvalidUsage`: what the user asked for cannot be done.
pub const INVALID_USAGE: Status = 5;

/// `ncclDebugLogger_t`: level, subsystems, file, line, and a format with its arguments.
pub type Logger = unsafe extern "C" fn(c_int, c_ulong, *const c_char, c_int, *const c_char, ...);

/// Levels of NCCL's log, from `ncclDebugLogLevel`.
pub mod log_level {
    use std::ffi::c_int;
    /// Shown with `NCCL_DEBUG=WARN` and above.
    pub const WARN: c_int = 2;
    /// Shown with `NCCL_DEBUG=INFO` and above.
    pub const INFO: c_int = 3;
}

/// Subsystems of NCCL's log, from `ncclDebugLogSubSys`.
pub mod subsystem {
    use std::ffi::c_ulong;
    /// Making of communicators.
    pub const INIT: c_ulong = 0x1;
    /// Choice of algorithm and protocol.
    pub const TUNING: c_ulong = 0x40;
}

/// Algorithms by their number in NCCL: rows of the cost table.
pub const ALGORITHMS: [&str; 7] = ["tree", "ring", "collnet_direct", "collnet_chain", "nvls", "nvls_tree", "pat"];
/// Protocols by their number in NCCL: columns of the cost table.
pub const PROTOCOLS: [&str; 3] = ["ll", "ll128", "simple"];
/// Collectives by their number in `ncclFunc_t`.
pub const COLLECTIVES: [&str; 5] = ["broadcast", "reduce", "allgather", "reducescatter", "allreduce"];

/// The cost of what NCCL cannot run: `NCCL_ALGO_PROTO_IGNORE`. Any number below zero means it.
pub const UNAVAILABLE: f32 = -1.0;

/// `ncclNvlDomainInfo_v5_t`, the same in v6.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct NvlDomainInfo {
    /// NVLink domains.
    pub domains: c_int,
    /// Fewest ranks in one of them.
    pub ranks_min: c_int,
    /// Most ranks in one of them.
    pub ranks_max: c_int,
}

/// `ncclTunerConstants_v5_t`, the same in v6: the constants of NCCL's own cost model, which a plugin may change
/// before the model is built. Latencies in microseconds, bandwidths in GB/s.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct TunerConstants {
    /// By algorithm and protocol.
    pub base_latencies: [[f64; 3]; 7],
    /// By link (NVLink, PCI, network), algorithm and protocol.
    pub hardware_latencies: [[[f64; 3]; 7]; 3],
    /// By generation (Volta, Ampere, Hopper, Blackwell) and scale (one, two, four nodes), like all that follow.
    pub ll_max_bandwidths: [[f64; 3]; 4],
    /// Ring with LL128, a channel.
    pub ring_ll128_bandwidths: [[f64; 3]; 4],
    /// Tree with LL128, a channel.
    pub tree_ll128_bandwidths: [[f64; 3]; 4],
    /// Tree with Simple, a channel.
    pub tree_bandwidths: [[f64; 3]; 4],
    /// NVLS tree, a channel.
    pub nvls_tree_bandwidths: [[f64; 3]; 4],
}

/// Chooses by answering with numbers: context, collective, bytes, support of CollNet and of NVLS, operations in the
/// group; then algorithm, protocol and channels to be written, the first two together or not at all.
pub type ChooseV2 =
    unsafe extern "C" fn(*mut c_void, c_int, usize, c_int, c_int, c_int, *mut c_int, *mut c_int, *mut c_int) -> Status;
/// Chooses by changing the cost table: context, collective, bytes, operations in the group, table (which is
/// contiguous, `float[algorithms][protocols]`, in spite of its type), algorithms, protocols; channels to be written.
pub type ChooseV3 =
    unsafe extern "C" fn(*mut c_void, c_int, usize, c_int, *mut *mut f32, c_int, c_int, *mut c_int) -> Status;
/// As [`ChooseV3`], with whether buffers are registered before the channels.
pub type ChooseV4 =
    unsafe extern "C" fn(*mut c_void, c_int, usize, c_int, *mut *mut f32, c_int, c_int, c_int, *mut c_int) -> Status;
/// Begins until v4: ranks, nodes, logger; context to be written.
pub type InitV2 = unsafe extern "C" fn(usize, usize, Option<Logger>, *mut *mut c_void) -> Status;
/// Begins from v5 on: context to be written, communicator, ranks, nodes, logger, domains, constants.
pub type InitV5 = unsafe extern "C" fn(
    *mut *mut c_void,
    u64,
    usize,
    usize,
    Option<Logger>,
    *mut NvlDomainInfo,
    *mut TunerConstants,
) -> Status;
/// Ends: context.
pub type Finish = unsafe extern "C" fn(*mut c_void) -> Status;
/// Changes a chunk size: context, collective, bytes, algorithm, protocol, channels; chunk size to be changed.
pub type ChunkSize = unsafe extern "C" fn(*mut c_void, c_int, usize, c_int, c_int, c_int, *mut usize) -> Status;

/// `ncclTuner_v2_t`: NCCL 2.21 to 2.30.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct TunerV2 {
    /// Its name in NCCL's log.
    pub name: *const c_char,
    /// Once per communicator.
    pub init: InitV2,
    /// Once per collective that is enqueued.
    pub choose: ChooseV2,
    /// Once per communicator.
    pub destroy: Finish,
}

/// `ncclTuner_v3_t`: NCCL 2.22 and newer.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct TunerV3 {
    /// Its name in NCCL's log.
    pub name: *const c_char,
    /// Once per communicator.
    pub init: InitV2,
    /// Once per collective that is enqueued.
    pub choose: ChooseV3,
    /// Once per communicator.
    pub destroy: Finish,
}

/// `ncclTuner_v4_t`: NCCL 2.24 and newer.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct TunerV4 {
    /// Its name in NCCL's log.
    pub name: *const c_char,
    /// Once per communicator.
    pub init: InitV2,
    /// Once per collective that is enqueued.
    pub choose: ChooseV4,
    /// Once per communicator.
    pub destroy: Finish,
}

/// `ncclTuner_v5_t`: NCCL 2.28 and newer.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct TunerV5 {
    /// Its name in NCCL's log.
    pub name: *const c_char,
    /// Once per communicator.
    pub init: InitV5,
    /// Once per collective that is enqueued.
    pub choose: ChooseV4,
    /// Once per communicator.
    pub finalize: Finish,
}

/// `ncclTuner_v6_t`: NCCL 2.30 and newer.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct TunerV6 {
    /// Its name in NCCL's log.
    pub name: *const c_char,
    /// Once per communicator.
    pub init: InitV5,
    /// Once per collective that is enqueued.
    pub choose: ChooseV4,
    /// Once per communicator.
    pub finalize: Finish,
    /// Where it is absent NCCL keeps its own chunk sizes.
    pub chunk_size: Option<ChunkSize>,
}
