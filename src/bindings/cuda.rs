//! The CUDA driver through cudarc, reduced to what a worker and a probe need.
//!
//! cudarc panics when the driver library or a symbol of it is missing; [`driver_is_present`] is asked
//! first, and a worker's panic is a crash with its message in the captured log.

mod peer;

use std::ffi::c_void;
use std::sync::Arc;

use cudarc::driver::{CudaContext, CudaEvent, CudaGraph, CudaStream, DriverError, result, sys};

/// The driver's library, by the name the loader knows.
pub const DRIVER_LIBRARY: &str = "libcuda.so.1";

/// A CUDA call that failed.
#[derive(Debug, Clone, thiserror::Error)]
#[error("{call}: {reason}")]
pub struct CudaError {
    /// What was tried, in words.
    pub call: &'static str,
    /// The driver's name for the error.
    pub reason: String,
    /// Whether memory ran out.
    pub out_of_memory: bool,
}

fn cuda_error(call: &'static str) -> impl Fn(DriverError) -> CudaError {
    move |error| CudaError {
        call,
        // Both texts come from the driver; the name alone is terse, the sentence alone unsearchable.
        reason: match (error.error_name(), error.error_string()) {
            (Ok(name), Ok(text)) => format!("{} ({})", name.to_string_lossy(), text.to_string_lossy()),
            _ => format!("CUDA error {:?}", error.0),
        },
        out_of_memory: error.0 == sys::CUresult::CUDA_ERROR_OUT_OF_MEMORY,
    }
}

/// Whether a CUDA driver library can be loaded at all.
#[expect(unsafe_code, reason = "foreign library")]
pub fn driver_is_present() -> bool {
    // SAFETY: it only tries to load the driver library.
    unsafe { sys::is_culib_present() }
}

/// The CUDA version the driver offers, such as 13000, and the number of devices.
#[expect(unsafe_code, reason = "foreign call")]
pub fn driver_version_and_device_count() -> Result<(i32, i32), CudaError> {
    result::init().map_err(cuda_error("could not initialise the CUDA driver"))?;
    let mut version = 0;
    // SAFETY: the pointer is to a live integer.
    unsafe { sys::cuDriverGetVersion(&raw mut version) }
        .result()
        .map_err(cuda_error("could not ask the CUDA driver for its version"))?;
    let count = result::device::get_count().map_err(cuda_error("could not count the GPUs"))?;
    Ok((version, count))
}

/// The PCI address of a device in CUDA's numbering, lower case.
#[expect(unsafe_code, reason = "foreign call")]
pub fn pci_bus_id(ordinal: u32) -> Result<String, CudaError> {
    result::init().map_err(cuda_error("could not initialise the CUDA driver"))?;
    let device = result::device::get(ordinal as i32).map_err(cuda_error("no such GPU"))?;
    let mut text = [0_i8; 32];
    // SAFETY: the buffer is as long as it is said to be; the driver terminates the string.
    unsafe { sys::cuDeviceGetPCIBusId(text.as_mut_ptr().cast(), text.len() as i32, device) }
        .result()
        .map_err(cuda_error("could not read a PCI address"))?;
    let bytes: Vec<u8> = text.iter().take_while(|byte| **byte != 0).map(|byte| byte.cast_unsigned()).collect();
    Ok(String::from_utf8_lossy(&bytes).to_ascii_lowercase())
}

/// Whether a device can take part in multicast through NVLink switches.
#[expect(unsafe_code, reason = "foreign call")]
pub fn has_multicast(ordinal: u32) -> Result<bool, CudaError> {
    result::init().map_err(cuda_error("could not initialise the CUDA driver"))?;
    let device = result::device::get(ordinal as i32).map_err(cuda_error("no such GPU"))?;
    let attribute = sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MULTICAST_SUPPORTED;
    // SAFETY: the device comes from the driver itself.
    unsafe { result::device::get_attribute(device, attribute) }
        .map(|has| has != 0)
        .map_err(cuda_error("could not ask for multicast"))
}

/// Whether the driver can give one device access to the memory of another, both in CUDA's numbering.
#[expect(unsafe_code, reason = "foreign call")]
pub fn can_access_peer(from: u32, to: u32) -> Result<bool, CudaError> {
    result::init().map_err(cuda_error("could not initialise the CUDA driver"))?;
    let device = |ordinal: u32| result::device::get(ordinal as i32).map_err(cuda_error("no such GPU"));
    let mut can = 0;
    // SAFETY: the pointer is to a live integer.
    unsafe { sys::cuDeviceCanAccessPeer(&raw mut can, device(from)?, device(to)?) }
        .result()
        .map_err(cuda_error("could not ask for peer access"))?;
    Ok(can != 0)
}

/// A second stream of a device.
pub struct SideStream(Arc<CudaStream>);

impl SideStream {
    /// The stream as NCCL takes it.
    pub fn handle(&self) -> StreamHandle {
        StreamHandle(self.0.cu_stream())
    }
}

/// Device memory, as an address that NCCL takes.
#[derive(Debug, Clone, Copy)]
pub struct DevicePointer(sys::CUdeviceptr);

impl DevicePointer {
    /// The address as a C pointer.
    pub const fn as_raw(self) -> *mut c_void {
        self.0 as *mut c_void
    }

    /// The address so many bytes on; the caller stays inside its buffer.
    #[must_use]
    pub const fn plus(self, bytes: usize) -> Self {
        Self(self.0 + bytes as u64)
    }
}

/// A stream, as a handle that NCCL takes.
#[derive(Debug, Clone, Copy)]
pub struct StreamHandle(sys::CUstream);

impl StreamHandle {
    /// The handle as a C pointer.
    pub const fn as_raw(self) -> *mut c_void {
        self.0.cast()
    }
}

/// One GPU with one stream, owned by one thread.
pub struct Device {
    context: Arc<CudaContext>,
    stream: Arc<CudaStream>,
}

impl Device {
    /// Takes the device's primary context, makes it current, and opens a stream.
    #[expect(unsafe_code, reason = "switches off cudarc's own event bookkeeping")]
    pub fn open(ordinal: u32) -> Result<Self, CudaError> {
        let context = CudaContext::new(ordinal as usize).map_err(cuda_error("could not open the GPU"))?;
        // SAFETY: there is one stream, so nothing needs the ordering these events would give; left
        // on, they are recorded outside a capture and waited for inside one, which CUDA forbids.
        unsafe { context.disable_event_tracking() };
        let stream = context.new_stream().map_err(cuda_error("could not open a stream"))?;
        context.bind_to_thread().map_err(cuda_error("could not make the context current"))?;
        Ok(Self { context, stream })
    }

    /// Product name.
    pub fn name(&self) -> Result<String, CudaError> {
        self.context.name().map_err(cuda_error("could not read the GPU's name"))
    }

    /// The stream as NCCL takes it.
    pub fn stream(&self) -> StreamHandle {
        StreamHandle(self.stream.cu_stream())
    }

    /// Opens a second stream.
    pub fn side_stream(&self) -> Result<SideStream, CudaError> {
        self.context.new_stream().map(SideStream).map_err(cuda_error("could not open a stream"))
    }

    /// What follows on the side stream waits for what is on the main one by now.
    pub fn fork(&self, side: &SideStream) -> Result<(), CudaError> {
        side.0.join(&self.stream).map_err(cuda_error("could not fork a stream"))
    }

    /// What follows on the main stream waits for what is on the side stream by now.
    pub fn join(&self, side: &SideStream) -> Result<(), CudaError> {
        self.stream.join(&side.0).map_err(cuda_error("could not join a stream"))
    }

    /// Bytes of device memory that are free.
    pub fn free_bytes(&self) -> Result<usize, CudaError> {
        self.context.mem_get_info().map(|(free, _)| free).map_err(cuda_error("could not ask for free memory"))
    }

    /// Waits until everything on the stream is done.
    pub fn synchronize(&self) -> Result<(), CudaError> {
        self.stream.synchronize().map_err(cuda_error("waiting for the GPU"))?;
        self.context.check_err().map_err(cuda_error("an earlier CUDA call"))
    }

    /// Plain device memory (cuMemAlloc), as PyTorch's allocator takes it from the driver. It is not
    /// initialised; callers fill it before they read it.
    #[expect(unsafe_code, reason = "foreign call")]
    pub fn allocate(&self, bytes: usize) -> Result<DeviceBuffer, CudaError> {
        self.context.bind_to_thread().map_err(cuda_error("could not make the context current"))?;
        // SAFETY: the context is current; the memory is freed once, by the buffer's destructor.
        let pointer = unsafe { result::malloc_sync(bytes) }.map_err(cuda_error("could not allocate GPU memory"))?;
        Ok(DeviceBuffer { context: self.context.clone(), pointer, bytes, owner: Owner::Plain })
    }

    /// Device memory as segments that are mapped one after another into one range of addresses
    /// (cuMemCreate, cuMemMap), as PyTorch's allocator takes it with `expandable_segments:True`. Each may
    /// be shared with other processes, which NCCL needs where it registers buffers of graphs.
    #[expect(unsafe_code, reason = "foreign calls")]
    pub fn allocate_segments(&self, bytes: usize) -> Result<DeviceBuffer, CudaError> {
        let failed = cuda_error("could not allocate GPU memory in segments");
        self.context.bind_to_thread().map_err(cuda_error("could not make the context current"))?;
        let location = sys::CUmemLocation {
            type_: sys::CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE,
            id: self.context.ordinal() as i32,
        };
        let wanted = sys::CUmemAllocationProp {
            type_: sys::CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED,
            requestedHandleTypes: sys::CUmemAllocationHandleType::CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR,
            location,
            win32HandleMetaData: std::ptr::null_mut(),
            allocFlags: sys::CUmemAllocationProp_st__bindgen_ty_1 {
                compressionType: 0,
                gpuDirectRDMACapable: 0,
                usage: 0,
                reserved: [0; 4],
            },
        };
        let mut granularity = 0;
        let least = sys::CUmemAllocationGranularity_flags::CU_MEM_ALLOC_GRANULARITY_MINIMUM;
        // SAFETY: both pointers are to living values.
        unsafe { sys::cuMemGetAllocationGranularity(&raw mut granularity, &raw const wanted, least) }
            .result()
            .map_err(&failed)?;
        let size = if bytes > SMALL_SEGMENT { LARGE_SEGMENT } else { SMALL_SEGMENT };
        let segment = size.next_multiple_of(granularity.max(1));
        let length = bytes.max(1).next_multiple_of(segment);
        let mut base = 0;
        // SAFETY: the pointer is to a living address.
        unsafe { sys::cuMemAddressReserve(&raw mut base, length, 0, 0, 0) }.result().map_err(&failed)?;
        // From here on the destructor gives back what there is.
        let mut buffer = DeviceBuffer {
            context: self.context.clone(),
            pointer: base,
            bytes,
            owner: Owner::Segments { segment, reserved: length, handles: Vec::new() },
        };
        for place in (0..length).step_by(segment) {
            let mut handle = 0;
            // SAFETY: both pointers are to living values.
            unsafe { sys::cuMemCreate(&raw mut handle, segment, &raw const wanted, 0) }.result().map_err(&failed)?;
            // SAFETY: the place lies inside the range that was reserved, and nothing is mapped there yet.
            let mapped = unsafe { sys::cuMemMap(base + place as u64, segment, 0, handle, 0) }.result();
            if let Err(error) = mapped {
                // SAFETY: it was just made and is mapped nowhere.
                let _ = unsafe { sys::cuMemRelease(handle) };
                return Err(failed(error));
            }
            if let Owner::Segments { handles, .. } = &mut buffer.owner {
                handles.push(handle);
            }
        }
        let access =
            sys::CUmemAccessDesc { location, flags: sys::CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READWRITE };
        // SAFETY: the whole range is mapped by now.
        unsafe { sys::cuMemSetAccess(base, length, &raw const access, 1) }.result().map_err(&failed)?;
        Ok(buffer)
    }

    /// Takes over memory that somebody else's allocator made on this device; `free` gives it back.
    pub(super) fn adopt(&self, pointer: *mut c_void, bytes: usize, free: Box<dyn FnOnce(*mut c_void)>) -> DeviceBuffer {
        let owner = Owner::Other(Some(free));
        DeviceBuffer { context: self.context.clone(), pointer: pointer as sys::CUdeviceptr, bytes, owner }
    }

    /// Captures what `body` enqueues on the stream into a graph.
    ///
    /// The capture is always ended, also when `body` fails, because a stream left capturing refuses
    /// every later call.
    pub fn capture<E: From<CudaError>>(&self, body: impl FnOnce() -> Result<(), E>) -> Result<Graph, E> {
        self.stream
            .begin_capture(sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL)
            .map_err(cuda_error("could not begin a graph capture"))?;
        let enqueued = body();
        let ended = self.stream.end_capture(sys::CUgraphInstantiate_flags(0));
        enqueued?;
        let graph = ended.map_err(cuda_error("could not end a graph capture"))?.ok_or(CudaError {
            call: "graph capture",
            reason: "nothing was captured".to_owned(),
            out_of_memory: false,
        })?;
        graph.upload().map_err(cuda_error("could not upload a graph"))?;
        Ok(Graph(graph))
    }

    /// A pair of events around a piece of work.
    pub fn stopwatch(&self) -> Result<Stopwatch, CudaError> {
        let event = || {
            self.context
                .new_event(Some(sys::CUevent_flags::CU_EVENT_DEFAULT))
                .map_err(cuda_error("could not create an event"))
        };
        Ok(Stopwatch { start: event()?, end: event()? })
    }

    /// Enqueues a recording of the stopwatch's start.
    pub fn record_start(&self, stopwatch: &Stopwatch) -> Result<(), CudaError> {
        stopwatch.start.record(&self.stream).map_err(cuda_error("could not record an event"))
    }

    /// Enqueues a recording of the stopwatch's end.
    pub fn record_end(&self, stopwatch: &Stopwatch) -> Result<(), CudaError> {
        stopwatch.end.record(&self.stream).map_err(cuda_error("could not record an event"))
    }

    /// Fills a buffer by repeating its first `bytes`, which must have been written.
    #[expect(unsafe_code, reason = "foreign call")]
    pub fn repeat(&self, buffer: &DeviceBuffer, bytes: usize) -> Result<(), CudaError> {
        let mut filled = bytes.min(buffer.bytes);
        while filled > 0 && filled < buffer.bytes {
            let length = filled.min(buffer.bytes - filled);
            // SAFETY: both ranges are inside the living allocation and do not overlap.
            unsafe {
                result::memcpy_dtod_async(
                    buffer.pointer + filled as u64,
                    buffer.pointer,
                    length,
                    self.stream.cu_stream(),
                )
            }
            .map_err(cuda_error("could not enqueue a copy"))?;
            filled += length;
        }
        Ok(())
    }

    /// Writes from the host, starting `offset` bytes into the buffer, and waits until it is there.
    ///
    /// The copy goes through the stream: cuMemcpyHtoD may return before its last bytes have arrived,
    /// and what is enqueued on a non-blocking stream does not wait for it.
    ///
    /// # Panics
    ///
    /// If the data reaches beyond the buffer: that is a defect of the caller.
    #[expect(unsafe_code, reason = "foreign call")]
    pub fn write<T: Plain>(&self, buffer: &DeviceBuffer, offset: usize, data: &[T]) -> Result<(), CudaError> {
        assert!(offset + size_of_val(data) <= buffer.bytes, "a write stays inside the buffer");
        // SAFETY: the range is inside a living allocation (asserted above), and the data outlives the
        // copy, since the stream is synchronized before this returns.
        unsafe { result::memcpy_htod_async(buffer.pointer + offset as u64, data, self.stream.cu_stream()) }
            .map_err(cuda_error("could not copy to the GPU"))?;
        self.stream.synchronize().map_err(cuda_error("could not copy to the GPU"))
    }

    /// Enqueues a copy of the first `bytes` of one buffer over another.
    ///
    /// # Panics
    ///
    /// If either buffer is shorter: that is a defect of the caller.
    pub fn copy(&self, from: &DeviceBuffer, to: &DeviceBuffer, bytes: usize) -> Result<(), CudaError> {
        self.copy_to(from, to, 0, bytes)
    }

    /// Enqueues a copy of the first `bytes` of one buffer into another, `offset` bytes behind its start.
    ///
    /// # Panics
    ///
    /// If either buffer is shorter: that is a defect of the caller.
    #[expect(unsafe_code, reason = "foreign call")]
    pub fn copy_to(
        &self,
        from: &DeviceBuffer,
        to: &DeviceBuffer,
        offset: usize,
        bytes: usize,
    ) -> Result<(), CudaError> {
        assert!(bytes <= from.bytes && offset + bytes <= to.bytes, "a copy stays inside both buffers");
        // SAFETY: both ranges are inside living allocations (asserted above).
        unsafe { result::memcpy_dtod_async(to.pointer + offset as u64, from.pointer, bytes, self.stream.cu_stream()) }
            .map_err(cuda_error("could not enqueue a copy"))
    }

    /// Enqueues filling the first `bytes` of a buffer with one value.
    ///
    /// # Panics
    ///
    /// If the buffer is shorter: that is a defect of the caller.
    #[expect(unsafe_code, reason = "foreign call")]
    pub fn fill(&self, buffer: &DeviceBuffer, value: u8, bytes: usize) -> Result<(), CudaError> {
        assert!(bytes <= buffer.bytes, "a fill stays inside the buffer");
        // SAFETY: the range is inside a living allocation (asserted above).
        unsafe { result::memset_d8_async(buffer.pointer, value, bytes, self.stream.cu_stream()) }
            .map_err(cuda_error("could not enqueue a fill"))
    }
}

/// Bytes of a segment for small memory and for all other, as PyTorch's allocator takes them (its small and
/// large buffer; c10/cuda/CUDACachingAllocator.cpp, read in a snapshot, not run).
const SMALL_SEGMENT: usize = 2 << 20;
const LARGE_SEGMENT: usize = 20 << 20;

/// Whose memory a buffer is.
enum Owner {
    /// The driver's, by cuMemAlloc.
    Plain,
    /// The driver's, mapped segment by segment.
    Segments { segment: usize, reserved: usize, handles: Vec<sys::CUmemGenericAllocationHandle> },
    /// Of an allocator that takes it back.
    Other(Option<Box<dyn FnOnce(*mut c_void)>>),
}

/// Values that are as well bytes: every pattern of bits is one, and nothing lies between them. That reading and
/// writing device memory is sound rests on it, so nobody else can implement it.
pub trait Plain: Copy + sealed::Sealed {}
impl Plain for u8 {}
impl Plain for u16 {}

mod sealed {
    pub trait Sealed {}
    impl Sealed for u8 {}
    impl Sealed for u16 {}
}

/// Device memory that is freed with its owner.
pub struct DeviceBuffer {
    context: Arc<CudaContext>,
    pointer: sys::CUdeviceptr,
    bytes: usize,
    owner: Owner,
}

impl DeviceBuffer {
    /// The address.
    pub const fn pointer(&self) -> DevicePointer {
        DevicePointer(self.pointer)
    }

    /// Size in bytes.
    pub const fn bytes(&self) -> usize {
        self.bytes
    }

    /// Reads to the host, starting `offset` bytes into the buffer, and waits.
    ///
    /// # Panics
    ///
    /// If the range reaches beyond the buffer: that is a defect of the caller.
    #[expect(unsafe_code, reason = "foreign call")]
    pub fn read<T: Plain>(&self, offset: usize, data: &mut [T]) -> Result<(), CudaError> {
        assert!(offset + size_of_val(data) <= self.bytes, "a read stays inside the buffer");
        // SAFETY: the range is inside a living allocation (asserted above).
        unsafe { result::memcpy_dtoh_sync(data, self.pointer + offset as u64) }
            .map_err(cuda_error("could not copy from the GPU"))
    }
}

impl Drop for DeviceBuffer {
    #[expect(unsafe_code, reason = "foreign call")]
    fn drop(&mut self) {
        // A failure here means the context is broken, which every later call reports; there is nobody to
        // tell from a destructor.
        if self.context.bind_to_thread().is_err() {
            return;
        }
        match &mut self.owner {
            // SAFETY: allocated by `allocate` and freed only here.
            Owner::Plain => drop(unsafe { result::free_sync(self.pointer) }),
            Owner::Segments { segment, reserved, handles } => {
                for (place, handle) in (0..).step_by(*segment).zip(handles.drain(..)) {
                    // SAFETY: mapped and made by `allocate_segments`, and given back only here.
                    unsafe {
                        let _ = sys::cuMemUnmap(self.pointer + place as u64, *segment);
                        let _ = sys::cuMemRelease(handle);
                    }
                }
                // SAFETY: reserved by `allocate_segments`; nothing is mapped in it any more.
                let _ = unsafe { sys::cuMemAddressFree(self.pointer, *reserved) };
            }
            Owner::Other(free) => {
                if let Some(free) = free.take() {
                    free(self.pointer as *mut c_void);
                }
            }
        }
    }
}

/// A captured and instantiated graph. It must be dropped before the communicator it captured is
/// destroyed.
pub struct Graph(CudaGraph);

impl Graph {
    /// Enqueues one replay.
    pub fn launch(&self) -> Result<(), CudaError> {
        self.0.launch().map_err(cuda_error("could not launch a graph"))
    }
}

/// Two events whose distance is a time.
pub struct Stopwatch {
    start: CudaEvent,
    end: CudaEvent,
}

impl Stopwatch {
    /// Microseconds between the two, once the stream is synchronized.
    pub fn elapsed_us(&self) -> Result<f64, CudaError> {
        let milliseconds = self.start.elapsed_ms(&self.end).map_err(cuda_error("could not read a timing"))?;
        Ok(f64::from(milliseconds) * 1000.0)
    }
}
