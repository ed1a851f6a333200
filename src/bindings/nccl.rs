//! NCCL, as far as a worker needs it.

use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::path::{Path, PathBuf};

use crate::bindings::cuda::{Device, DeviceBuffer, DevicePointer, StreamHandle};
use crate::collective::{Collective, DataType};
use crate::dynlib::{DynamicLibraryError, dynamic_library};

/// Bytes in NCCL's rendezvous id (`NCCL_UNIQUE_ID_BYTES`).
pub const UNIQUE_ID_BYTES: usize = 128;

/// `ncclSum`.
const SUM: c_int = 0;

#[repr(C)]
#[derive(Clone, Copy)]
struct RawUniqueId([c_char; UNIQUE_ID_BYTES]);

dynamic_library! {
    /// The functions of libnccl that are used.
    struct NcclFunctions {
        fn ncclGetVersion(version: *mut c_int) -> c_int;
        fn ncclGetUniqueId(id: *mut RawUniqueId) -> c_int;
        fn ncclCommInitRank(communicator: *mut *mut c_void, ranks: c_int, id: RawUniqueId, rank: c_int) -> c_int;
        fn ncclCommDestroy(communicator: *mut c_void) -> c_int;
        fn ncclCommGetAsyncError(communicator: *mut c_void, status: *mut c_int) -> c_int;
        fn ncclAllReduce(
            send: *const c_void, receive: *mut c_void, count: usize, dtype: c_int, operation: c_int,
            communicator: *mut c_void, stream: *mut c_void,
        ) -> c_int;
        fn ncclAllGather(
            send: *const c_void, receive: *mut c_void, send_count: usize, dtype: c_int,
            communicator: *mut c_void, stream: *mut c_void,
        ) -> c_int;
        fn ncclReduceScatter(
            send: *const c_void, receive: *mut c_void, receive_count: usize, dtype: c_int, operation: c_int,
            communicator: *mut c_void, stream: *mut c_void,
        ) -> c_int;
        fn ncclBroadcast(
            send: *const c_void, receive: *mut c_void, count: usize, dtype: c_int, root: c_int,
            communicator: *mut c_void, stream: *mut c_void,
        ) -> c_int;
        fn ncclReduce(
            send: *const c_void, receive: *mut c_void, count: usize, dtype: c_int, operation: c_int, root: c_int,
            communicator: *mut c_void, stream: *mut c_void,
        ) -> c_int;
        fn ncclSend(
            send: *const c_void, count: usize, dtype: c_int, peer: c_int,
            communicator: *mut c_void, stream: *mut c_void,
        ) -> c_int;
        fn ncclRecv(
            receive: *mut c_void, count: usize, dtype: c_int, peer: c_int,
            communicator: *mut c_void, stream: *mut c_void,
        ) -> c_int;
        fn ncclGroupStart() -> c_int;
        fn ncclGroupEnd() -> c_int;
        fn ncclGetErrorString(status: c_int) -> *const c_char;
        fn ncclGetLastError(communicator: *mut c_void) -> *const c_char;
    }
}

dynamic_library! {
    /// NCCL's own allocator, which came with 2.19: looked for only where it is wanted.
    struct MemoryFunctions {
        fn ncclMemAlloc(pointer: *mut *mut c_void, bytes: usize) -> c_int;
        fn ncclMemFree(pointer: *mut c_void) -> c_int;
    }
}

dynamic_library! {
    /// What makes a communicator with a configuration: looked for only where one is wanted.
    struct ConfigurationFunctions {
        fn ncclCommInitRankConfig(
            communicator: *mut *mut c_void, ranks: c_int, id: RawUniqueId, rank: c_int,
            configuration: *mut Configuration,
        ) -> c_int;
    }
}

/// `ncclConfig_t` as far as 2.17 knew it: NCCL reads as many bytes as `size` says, and takes its own values for what
/// came later than `version`.
#[repr(C)]
struct Configuration {
    size: usize,
    magic: c_uint,
    version: c_uint,
    blocking: c_int,
    cluster_size: c_int,
    channels_min: c_int,
    channels_max: c_int,
    network: *const c_char,
}

impl Configuration {
    /// `NCCL_API_MAGIC` and 2.17.1, from nccl.h.
    const MAGIC: c_uint = 0xcafe_beef;
    const VERSION: c_uint = 21_701;
    /// `NCCL_CONFIG_UNDEF_INT`: the value is NCCL's own.
    const UNSET: c_int = c_int::MIN;

    /// More channels than any release makes (64 since 2.25, 32 before): no limit.
    const NO_LIMIT: c_int = 64;

    /// One that asks for so many channels at least, as NCCL_MIN_CTAS does. The most is said as well: with the least
    /// alone 2.28.9 takes the unset one for a limit below it, and refuses.
    fn with_channels(channels_min: u32) -> Self {
        Self {
            size: size_of::<Self>(),
            magic: Self::MAGIC,
            version: Self::VERSION,
            blocking: Self::UNSET,
            cluster_size: Self::UNSET,
            channels_min: c_int::try_from(channels_min).unwrap_or(Self::UNSET),
            channels_max: Self::NO_LIMIT,
            network: std::ptr::null(),
        }
    }
}

/// A call that NCCL did not accept.
#[derive(Debug, Clone, thiserror::Error)]
#[error("{call} returned {status} ({name}){}{detail}", if detail.is_empty() { "" } else { ": " })]
pub struct NcclError {
    /// The function.
    pub call: &'static str,
    /// The status code (`ncclResult_t`), as an integer: later versions may know more of them.
    pub status: i32,
    /// NCCL's name for the code.
    pub name: String,
    /// NCCL's last error text, where it has one.
    pub detail: String,
}

/// A loaded libnccl.
pub struct Nccl {
    functions: NcclFunctions,
    path: PathBuf,
}

impl Nccl {
    /// Loads the library at this path.
    #[expect(unsafe_code, reason = "foreign library")]
    pub fn load(path: &Path) -> Result<Self, DynamicLibraryError> {
        // SAFETY: the signatures above are those of nccl.h, stable since 2.4; the path is the
        // library that the user or the Python environment chose.
        let functions = unsafe { NcclFunctions::load(path) }?;
        Ok(Self { functions, path: path.to_owned() })
    }

    /// The version code, such as 22809.
    #[expect(unsafe_code, reason = "foreign call")]
    pub fn version(&self) -> Result<i32, NcclError> {
        let mut version = 0;
        // SAFETY: the pointer is to a live integer.
        let status = unsafe { (self.functions.ncclGetVersion)(&raw mut version) };
        self.checked("ncclGetVersion", status, std::ptr::null_mut())?;
        Ok(version)
    }

    /// A fresh rendezvous id; one rank asks, all ranks use it.
    #[expect(unsafe_code, reason = "foreign call")]
    pub fn unique_id(&self) -> Result<[u8; UNIQUE_ID_BYTES], NcclError> {
        let mut id = RawUniqueId([0; UNIQUE_ID_BYTES]);
        // SAFETY: the pointer is to a live struct of the size nccl.h declares.
        let status = unsafe { (self.functions.ncclGetUniqueId)(&raw mut id) };
        self.checked("ncclGetUniqueId", status, std::ptr::null_mut())?;
        Ok(id.0.map(c_char::cast_unsigned))
    }

    /// Joins a communicator. Blocks until every rank has joined; the calling thread's current CUDA
    /// context decides the GPU. There is no way to end a join that hangs but to end the process,
    /// which the parent's deadline does.
    #[expect(unsafe_code, reason = "foreign call")]
    pub fn join(&self, ranks: u32, id: &[u8; UNIQUE_ID_BYTES], rank: u32) -> Result<Communicator<'_>, NcclError> {
        let id = RawUniqueId(id.map(u8::cast_signed));
        let mut handle: *mut c_void = std::ptr::null_mut();
        // SAFETY: the pointer is to a live handle; the id is passed by value as nccl.h declares.
        let status = unsafe { (self.functions.ncclCommInitRank)(&raw mut handle, ranks as c_int, id, rank as c_int) };
        self.checked("ncclCommInitRank", status, std::ptr::null_mut())?;
        Ok(Communicator { nccl: self, handle, rank, ranks: ranks.max(1) })
    }

    /// Joins a communicator that has so many channels at least (ncclCommInitRankConfig, whose field for it came with
    /// 2.17). NCCL keeps the variable of that purpose for the life of a process; a configuration holds for one
    /// communicator.
    #[expect(unsafe_code, reason = "foreign calls")]
    pub fn join_with_channels(
        &self,
        ranks: u32,
        id: &[u8; UNIQUE_ID_BYTES],
        rank: u32,
        channels_min: u32,
    ) -> Result<Communicator<'_>, NcclError> {
        const CALL: &str = "ncclCommInitRankConfig";
        let missing = |reason: String| NcclError {
            call: CALL,
            status: nccl_abi::INVALID_USAGE,
            name: "not there".to_owned(),
            detail: format!("{reason}; it came with NCCL 2.14"),
        };
        // SAFETY: the signature is that of nccl.h; the library is loaded already.
        let functions =
            unsafe { ConfigurationFunctions::load(&self.path) }.map_err(|error| missing(error.to_string()))?;
        let mut configuration = Configuration::with_channels(channels_min);
        let id = RawUniqueId(id.map(u8::cast_signed));
        let mut handle: *mut c_void = std::ptr::null_mut();
        // SAFETY: the pointers are to a live handle and a live configuration, which NCCL copies; the id is passed by
        // value as nccl.h declares.
        let status = unsafe {
            (functions.ncclCommInitRankConfig)(
                &raw mut handle,
                ranks as c_int,
                id,
                rank as c_int,
                &raw mut configuration,
            )
        };
        self.checked(CALL, status, std::ptr::null_mut())?;
        Ok(Communicator { nccl: self, handle, rank, ranks: ranks.max(1) })
    }

    /// Device memory from NCCL's own allocator (ncclMemAlloc, since 2.19), as frameworks' memory pools for
    /// NCCL take it.
    #[expect(unsafe_code, reason = "foreign calls")]
    pub fn allocate(&self, device: &Device, bytes: usize) -> Result<DeviceBuffer, NcclError> {
        let no_allocator = |reason: String| NcclError {
            call: "ncclMemAlloc",
            status: nccl_abi::INVALID_USAGE,
            name: "not there".to_owned(),
            detail: format!("{reason}; it came with NCCL 2.19"),
        };
        // SAFETY: the signatures are those of nccl.h; the library is loaded already.
        let memory = unsafe { MemoryFunctions::load(&self.path) }.map_err(|error| no_allocator(error.to_string()))?;
        let mut pointer = std::ptr::null_mut();
        // SAFETY: the pointer is to a living address; the device's context is current on this thread.
        let status = unsafe { (memory.ncclMemAlloc)(&raw mut pointer, bytes) };
        self.checked("ncclMemAlloc", status, std::ptr::null_mut())?;
        let free = move |pointer: *mut c_void| {
            // SAFETY: it is what ncclMemAlloc returned, and is given back once. There is nobody to tell of
            // a failure.
            let _ = unsafe { (memory.ncclMemFree)(pointer) };
        };
        Ok(device.adopt(pointer, bytes, Box::new(free)))
    }

    fn checked(&self, call: &'static str, status: c_int, communicator: *mut c_void) -> Result<(), NcclError> {
        if status == 0 {
            return Ok(());
        }
        Err(NcclError {
            call,
            status,
            name: self.text(Text::ErrorString(status)),
            detail: self.text(Text::LastError(communicator)),
        })
    }

    #[expect(unsafe_code, reason = "foreign call")]
    fn text(&self, which: Text) -> String {
        // SAFETY: both functions return null or a NUL-terminated string that NCCL owns and keeps;
        // a null communicator is allowed for the last error (it is a per-process buffer).
        unsafe {
            let pointer = match which {
                Text::ErrorString(status) => (self.functions.ncclGetErrorString)(status),
                Text::LastError(communicator) => (self.functions.ncclGetLastError)(communicator),
            };
            if pointer.is_null() {
                String::new()
            } else {
                CStr::from_ptr(pointer).to_string_lossy().trim().chars().take(1000).collect()
            }
        }
    }
}

#[derive(Clone, Copy)]
enum Text {
    ErrorString(c_int),
    LastError(*mut c_void),
}

/// One rank's membership of a communicator.
///
/// It has no destructor on purpose: destroying can hang (a living graph, a dead peer), so it is a
/// step with a name and a deadline, and a process that fails simply ends.
pub struct Communicator<'nccl> {
    nccl: &'nccl Nccl,
    handle: *mut c_void,
    rank: u32,
    ranks: u32,
}

/// The rank that broadcasts start from and reductions end at.
pub const ROOT: u32 = 0;

/// One collective of one rank, as it is enqueued.
#[derive(Debug, Clone, Copy)]
pub struct Call {
    /// Which.
    pub collective: Collective,
    /// What this rank hands over.
    pub send: DevicePointer,
    /// Where its result goes.
    pub receive: DevicePointer,
    /// Elements as NCCL counts them for this collective ([`Collective::count`]).
    pub count: usize,
    /// Their type.
    pub dtype: DataType,
}

/// The rank that this one sends to and the one it receives from, in the ring that a shift between
/// neighbours makes: stages of a pipeline, in which the last hands back to the first.
pub const fn neighbours(rank: u32, ranks: u32) -> (u32, u32) {
    ((rank + 1) % ranks, (rank + ranks - 1) % ranks)
}

impl Communicator<'_> {
    /// Enqueues an in-place sum over all ranks.
    ///
    /// The buffer must hold `count` elements of `dtype` and outlive the work on the stream; callers
    /// inside this crate keep it for the whole launch.
    #[expect(unsafe_code, reason = "foreign call")]
    pub fn all_reduce_in_place(
        &self,
        buffer: DevicePointer,
        count: usize,
        dtype: DataType,
        stream: StreamHandle,
    ) -> Result<(), NcclError> {
        let pointer = buffer.as_raw();
        // SAFETY: the pointer is to device memory of sufficient size (see above), the stream and
        // the communicator are alive.
        let status = unsafe {
            (self.nccl.functions.ncclAllReduce)(
                pointer,
                pointer,
                count,
                nccl_data_type(dtype),
                SUM,
                self.handle,
                stream.as_raw(),
            )
        };
        self.nccl.checked("ncclAllReduce", status, self.handle)
    }

    /// Enqueues a collective: a sum where numbers are added up, from or to [`ROOT`] where one rank is
    /// singled out, and between [`neighbours`], as one group, where ranks send and receive.
    ///
    /// Both buffers must hold what [`Collective::count`] says for `count` elements and outlive the work on
    /// the stream; callers inside this crate keep them for the whole launch.
    #[expect(unsafe_code, reason = "foreign calls")]
    pub fn enqueue(&self, call: &Call, stream: StreamHandle) -> Result<(), NcclError> {
        let (send, receive, count) = (call.send.as_raw(), call.receive.as_raw(), call.count);
        let (dtype, handle, stream, root) = (nccl_data_type(call.dtype), self.handle, stream.as_raw(), ROOT as c_int);
        let functions = &self.nccl.functions;
        // SAFETY: both pointers are to device memory of sufficient size (see above), the stream and the
        // communicator are alive.
        let (name, status) = unsafe {
            match call.collective {
                Collective::AllReduce => {
                    ("ncclAllReduce", (functions.ncclAllReduce)(send, receive, count, dtype, SUM, handle, stream))
                }
                Collective::AllGather => {
                    ("ncclAllGather", (functions.ncclAllGather)(send, receive, count, dtype, handle, stream))
                }
                Collective::ReduceScatter => (
                    "ncclReduceScatter",
                    (functions.ncclReduceScatter)(send, receive, count, dtype, SUM, handle, stream),
                ),
                Collective::Broadcast => {
                    ("ncclBroadcast", (functions.ncclBroadcast)(send, receive, count, dtype, root, handle, stream))
                }
                Collective::Reduce => {
                    ("ncclReduce", (functions.ncclReduce)(send, receive, count, dtype, SUM, root, handle, stream))
                }
                Collective::SendRecv => return self.shift(call, stream),
            }
        };
        self.nccl.checked(name, status, self.handle)
    }

    /// Sends to one neighbour and receives from the other. The group is always ended, also after a
    /// failure: a group left open swallows every later call.
    #[expect(unsafe_code, reason = "foreign calls")]
    fn shift(&self, call: &Call, stream: *mut c_void) -> Result<(), NcclError> {
        let (to, from) = neighbours(self.rank, self.ranks);
        let (count, dtype, functions) = (call.count, nccl_data_type(call.dtype), &self.nccl.functions);
        // SAFETY: no arguments.
        let begun = unsafe { (functions.ncclGroupStart)() };
        self.nccl.checked("ncclGroupStart", begun, self.handle)?;
        // SAFETY: as in `enqueue`; both peers are ranks of this communicator.
        let (sent, received) = unsafe {
            (
                (functions.ncclSend)(call.send.as_raw(), count, dtype, to as c_int, self.handle, stream),
                (functions.ncclRecv)(call.receive.as_raw(), count, dtype, from as c_int, self.handle, stream),
            )
        };
        // SAFETY: no arguments.
        let ended = unsafe { (functions.ncclGroupEnd)() };
        self.nccl.checked("ncclSend", sent, self.handle)?;
        self.nccl.checked("ncclRecv", received, self.handle)?;
        self.nccl.checked("ncclGroupEnd", ended, self.handle)
    }

    /// An error that arose after a call had returned.
    #[expect(unsafe_code, reason = "foreign call")]
    pub fn asynchronous_error(&self) -> Result<(), NcclError> {
        let mut state = 0;
        // SAFETY: the communicator is alive, the pointer is to a live integer.
        let status = unsafe { (self.nccl.functions.ncclCommGetAsyncError)(self.handle, &raw mut state) };
        self.nccl.checked("ncclCommGetAsyncError", status, self.handle)?;
        self.nccl.checked("asynchronous work", state, self.handle)
    }

    /// Leaves the communicator. Every graph that captured its operations must be gone before:
    /// NCCL waits for them without end.
    #[expect(unsafe_code, reason = "foreign call")]
    pub fn destroy(self) -> Result<(), NcclError> {
        // SAFETY: the handle is alive and is not used after this, since `self` is consumed.
        let status = unsafe { (self.nccl.functions.ncclCommDestroy)(self.handle) };
        self.nccl.checked("ncclCommDestroy", status, std::ptr::null_mut())
    }
}

/// `ncclDataType_t`, from nccl.h: int8 0, float16 6, float32 7, bfloat16 9.
const fn nccl_data_type(dtype: DataType) -> c_int {
    match dtype {
        DataType::Int8 => 0,
        DataType::Fp16 => 6,
        DataType::Fp32 => 7,
        DataType::Bf16 => 9,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn neighbours_form_a_ring() {
        assert_eq!(neighbours(0, 4), (1, 3));
        assert_eq!(neighbours(3, 4), (0, 2));
        assert_eq!(neighbours(1, 2), (0, 0));
        assert_eq!(neighbours(0, 1), (0, 0));
        for ranks in 1..9 {
            assert!((0..ranks).all(|rank| neighbours(neighbours(rank, ranks).0, ranks).1 == rank));
        }
    }
}
