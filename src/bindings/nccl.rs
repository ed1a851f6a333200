//! NCCL, as far as a worker needs it.

use std::ffi::{CStr, c_char, c_int, c_void};
use std::path::Path;

use crate::bindings::cuda::{DevicePointer, StreamHandle};
use crate::collective::DataType;
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
        fn ncclGetErrorString(status: c_int) -> *const c_char;
        fn ncclGetLastError(communicator: *mut c_void) -> *const c_char;
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
}

impl Nccl {
    /// Loads the library at this path.
    #[expect(unsafe_code, reason = "foreign library")]
    pub fn load(path: &Path) -> Result<Self, DynamicLibraryError> {
        // SAFETY: the signatures above are those of nccl.h, stable since 2.4; the path is the
        // library that the user or the Python environment chose.
        let functions = unsafe { NcclFunctions::load(path) }?;
        Ok(Self { functions })
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
        Ok(Communicator { nccl: self, handle })
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

/// `ncclDataType_t`, from nccl.h: float16 6, float32 7, bfloat16 9.
const fn nccl_data_type(dtype: DataType) -> c_int {
    match dtype {
        DataType::Fp16 => 6,
        DataType::Fp32 => 7,
        DataType::Bf16 => 9,
    }
}
