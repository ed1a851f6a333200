//! libcuda.so.1, as far as nccltune's workers and probes call it.

use std::cell::Cell;
use std::ffi::{CStr, c_char, c_int, c_uint, c_void};

use crate::engine::{Progress, Work, engine, finish};
use crate::exports::{exports, put, put_text};
use crate::faults::{self, Hold, Moment, scenario};
use crate::gpu;
use crate::scenario::{Kind, Phase, Transport};
use crate::status::cuda;

/// Contexts are numbers that stand for GPUs; a primary context of a device is always the same.
const FIRST_CONTEXT: usize = 0xc000;

thread_local! {
    /// The GPU whose context is current on this thread.
    static CURRENT: Cell<Option<u32>> = const { Cell::new(None) };
    /// The GPU that is being opened.
    static OPENING: Cell<Option<u32>> = const { Cell::new(None) };
}

/// The GPU that a call is about, where one is.
pub(crate) fn gpu_in_question() -> Option<u32> {
    CURRENT.get().or(OPENING.get())
}

/// The GPU of the current context.
pub(crate) fn current() -> Result<u32, i32> {
    CURRENT.get().ok_or(cuda::INVALID_CONTEXT)
}

fn handle<T>(place: *mut *mut T, number: usize) -> Result<(), i32> {
    put(place, number as *mut T, cuda::INVALID_VALUE)
}

fn device_exists(device: c_int) -> Result<u32, i32> {
    u32::try_from(device)
        .ok()
        .and_then(|ordinal| gpu::visible().get(ordinal as usize).copied())
        .ok_or(cuda::INVALID_DEVICE)
}

fn context(gpu: u32) -> *mut c_void {
    (FIRST_CONTEXT + gpu as usize) as *mut c_void
}

/// Bytes of which segments of memory are multiples.
const GRANULARITY: usize = 2 << 20;

/// The GPU that a CUmemAllocationProp names: pinned memory of a device, whatever way of sharing it.
fn device_of(wanted: *const c_void) -> Result<u32, i32> {
    if wanted.is_null() {
        return Err(cuda::INVALID_VALUE);
    }
    // SAFETY: by its header, the struct begins with its kind, ways of sharing, and kind and number of a place.
    match unsafe { wanted.cast::<[c_int; 4]>().read() } {
        // CU_MEM_ALLOCATION_TYPE_PINNED, none or a file descriptor, CU_MEM_LOCATION_TYPE_DEVICE
        [1, 0 | 1, 1, device] => device_exists(device),
        _ => Err(cuda::NOT_SUPPORTED),
    }
}

/// Copies between host and device, once nothing captures.
fn host_copy(device: u64, bytes: usize, copy: impl FnOnce(&mut [u8])) -> Result<(), i32> {
    current()?;
    engine().forbid_in_capture()?;
    let mut engine = engine();
    copy(engine.memory.bytes_mut(device, bytes).ok_or(cuda::INVALID_VALUE)?);
    Ok(())
}

exports! {
    fn cuInit(_flags: c_uint) {
        if gpu::visible().is_empty() { Err(cuda::NO_DEVICE) } else { Ok(()) }
    }

    fn cuDriverGetVersion(version: *mut c_int) {
        put(version, gpu::CUDA_VERSION, cuda::INVALID_VALUE)
    }

    fn cuDeviceGetCount(count: *mut c_int) {
        put(count, gpu::visible().len() as c_int, cuda::INVALID_VALUE)
    }

    fn cuDeviceGet(device: *mut c_int, ordinal: c_int) {
        device_exists(ordinal)?;
        put(device, ordinal, cuda::INVALID_VALUE)
    }

    fn cuDeviceGetName(name: *mut c_char, length: c_int, device: c_int) {
        device_exists(device)?;
        put_text(name, length.max(0) as usize, gpu::NAME, cuda::INVALID_VALUE, cuda::INVALID_VALUE)
    }

    fn cuDeviceTotalMem_v2(bytes: *mut usize, device: c_int) {
        put(bytes, gpu::memory(device_exists(device)?).0 as usize, cuda::INVALID_VALUE)
    }

    fn cuDeviceGetPCIBusId(text: *mut c_char, length: c_int, device: c_int) {
        let address = format!("0000:{:02X}:00.0", gpu::bus(device_exists(device)?));
        put_text(text, length.max(0) as usize, &address, cuda::INVALID_VALUE, cuda::INVALID_VALUE)
    }

    fn cuDeviceCanAccessPeer(can: *mut c_int, device: c_int, peer: c_int) {
        device_exists(device)?;
        device_exists(peer)?;
        let direct = scenario().transport != Transport::Shm;
        put(can, c_int::from(direct && device != peer), cuda::INVALID_VALUE)
    }

    /// Compute capability (75, 76), multiprocessors (16), and memory pools (115) and multicast (132), which
    /// are not there.
    fn cuDeviceGetAttribute(value: *mut c_int, attribute: c_int, device: c_int) {
        device_exists(device)?;
        let known = match attribute {
            16 => 132,
            75 => gpu::capability().0,
            76 => gpu::capability().1,
            115 | 132 => 0,
            _ => return Err(cuda::NOT_SUPPORTED),
        };
        put(value, known, cuda::INVALID_VALUE)
    }

    fn cuDevicePrimaryCtxRetain(place: *mut *mut c_void, device: c_int) knowing {
        let gpu = device_exists(device)?;
        OPENING.set(Some(gpu));
        engine().faults.stand_on(gpu);
    } {
        let gpu = device_exists(device)?;
        let moment = Moment { phase: Some(Phase::Context), ..Moment::default() };
        let mut engine = engine();
        if let Some(fault) = engine.faults.strikes(Kind::Die, moment) {
            faults::die(fault);
        }
        let hang = engine.faults.strikes(Kind::Hang, moment);
        if engine.faults.strikes(Kind::Garbage, Moment::default()).is_some() {
            crate::write_garbage();
        }
        if let Some(fault) = engine.faults.strikes(Kind::Frames, Moment::default()) {
            crate::speak(fault.effect.as_deref().unwrap_or_default());
        }
        drop(engine);
        if let Some(fault) = hang {
            Hold::of(fault).wait();
        }
        gpu::hold(gpu).map_err(|error| {
            crate::complain(&format!("state cannot be kept: {error}"));
            cuda::UNKNOWN
        })?;
        put(place, context(gpu), cuda::INVALID_VALUE)
    }

    fn cuDevicePrimaryCtxRelease_v2(device: c_int) {
        gpu::release(device_exists(device)?);
        Ok(())
    }

    fn cuCtxGetCurrent(place: *mut *mut c_void) {
        put(place, CURRENT.get().map_or(std::ptr::null_mut(), context), cuda::INVALID_VALUE)
    }

    fn cuCtxSetCurrent(handle: *mut c_void) {
        if handle.is_null() {
            CURRENT.set(None);
            return Ok(());
        }
        let gpu = (handle as usize).checked_sub(FIRST_CONTEXT).ok_or(cuda::INVALID_CONTEXT)? as u32;
        if !gpu::visible().contains(&gpu) {
            return Err(cuda::INVALID_CONTEXT);
        }
        CURRENT.set(Some(gpu));
        Ok(())
    }

    fn cuCtxGetDevice(device: *mut c_int) {
        let gpu = current()?;
        let ordinal = gpu::visible().iter().position(|visible| *visible == gpu).ok_or(cuda::INVALID_CONTEXT)?;
        put(device, ordinal as c_int, cuda::INVALID_VALUE)
    }

    fn cuCtxSynchronize() {
        current()?;
        engine().forbid_in_capture()?;
        finish()
    }

    fn cuMemGetInfo_v2(free: *mut usize, total: *mut usize) {
        let (all, rest) = gpu::memory(current()?);
        put(free, rest as usize, cuda::INVALID_VALUE)?;
        put(total, all as usize, cuda::INVALID_VALUE)
    }

    fn cuMemAlloc_v2(place: *mut u64, bytes: usize) {
        let gpu = current()?;
        if bytes == 0 {
            return Err(cuda::INVALID_VALUE);
        }
        let (_, free) = gpu::memory(gpu);
        let mut engine = engine();
        engine.forbid_in_capture()?;
        let moment = Moment { phase: Some(Phase::Context), bytes: Some(bytes as u64), ..Moment::default() };
        if bytes as u64 > free || engine.faults.strikes(Kind::OutOfMemory, moment).is_some() {
            return Err(cuda::OUT_OF_MEMORY);
        }
        let address = engine.memory.allocate(bytes).ok_or(cuda::OUT_OF_MEMORY)?;
        engine.note_used(gpu);
        put(place, address, cuda::INVALID_VALUE)
    }

    fn cuMemFree_v2(address: u64) {
        engine().forbid_in_capture()?;
        finish()?;
        let mut engine = engine();
        if !engine.memory.free(address) {
            return Err(cuda::INVALID_VALUE);
        }
        engine.note_used(current()?);
        Ok(())
    }

    fn cuMemAddressReserve(place: *mut u64, bytes: usize, _alignment: usize, at: u64, flags: u64) {
        current()?;
        if bytes == 0 || !bytes.is_multiple_of(GRANULARITY) || at != 0 || flags != 0 {
            return Err(cuda::INVALID_VALUE);
        }
        let address = engine().memory.reserve(bytes).ok_or(cuda::OUT_OF_MEMORY)?;
        put(place, address, cuda::INVALID_VALUE)
    }

    fn cuMemAddressFree(address: u64, bytes: usize) {
        if engine().memory.unreserve(address, bytes) { Ok(()) } else { Err(cuda::INVALID_VALUE) }
    }

    fn cuMemGetAllocationGranularity(place: *mut usize, wanted: *const c_void, _option: c_int) {
        device_of(wanted)?;
        put(place, GRANULARITY, cuda::INVALID_VALUE)
    }

    fn cuMemCreate(segment: *mut u64, bytes: usize, wanted: *const c_void, flags: u64) {
        let gpu = device_of(wanted)?;
        if bytes == 0 || !bytes.is_multiple_of(GRANULARITY) || flags != 0 {
            return Err(cuda::INVALID_VALUE);
        }
        let (_, free) = gpu::memory(gpu);
        let mut engine = engine();
        engine.forbid_in_capture()?;
        let moment = Moment { phase: Some(Phase::Context), bytes: Some(bytes as u64), ..Moment::default() };
        if bytes as u64 > free || engine.faults.strikes(Kind::OutOfMemory, moment).is_some() {
            return Err(cuda::OUT_OF_MEMORY);
        }
        let made = engine.memory.make_segment(bytes);
        engine.note_used(gpu);
        put(segment, made, cuda::INVALID_VALUE)
    }

    fn cuMemRelease(segment: u64) {
        let mut engine = engine();
        if !engine.memory.release_segment(segment) {
            return Err(cuda::INVALID_VALUE);
        }
        engine.note_used(current()?);
        Ok(())
    }

    fn cuMemMap(address: u64, bytes: usize, offset: usize, segment: u64, flags: u64) {
        if offset != 0 || flags != 0 || !engine().memory.map(address, bytes, segment) {
            return Err(cuda::INVALID_VALUE);
        }
        Ok(())
    }

    fn cuMemUnmap(address: u64, bytes: usize) {
        finish()?;
        if engine().memory.unmap(address, bytes) { Ok(()) } else { Err(cuda::INVALID_VALUE) }
    }

    /// For reading and writing from one device.
    fn cuMemSetAccess(address: u64, bytes: usize, access: *const c_void, count: usize) {
        // SAFETY: by its header, the pointer is to so many structs of a kind and number of a place, and flags.
        let of = (!access.is_null() && count == 1).then(|| unsafe { access.cast::<[c_int; 3]>().read() });
        // CU_MEM_LOCATION_TYPE_DEVICE and CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        let Some([1, device, 3]) = of else { return Err(cuda::INVALID_VALUE) };
        device_exists(device)?;
        if engine().memory.open(address, bytes) { Ok(()) } else { Err(cuda::INVALID_VALUE) }
    }

    fn cuMemsetD8Async(to: u64, value: u8, bytes: usize, stream: *mut c_void) {
        let mut engine = engine();
        if !engine.memory.holds(to, bytes) {
            return Err(cuda::INVALID_VALUE);
        }
        engine.enqueue(stream as usize, Work::Fill { to, value, bytes })
    }

    fn cuMemcpyHtoD_v2(to: u64, from: *const c_void, bytes: usize) {
        if from.is_null() {
            return Err(cuda::INVALID_VALUE);
        }
        host_copy(to, bytes, |device| {
            // SAFETY: the caller hands over so many bytes of its own memory, and waits.
            device.copy_from_slice(unsafe { std::slice::from_raw_parts(from.cast(), bytes) });
        })
    }

    fn cuMemcpyDtoH_v2(to: *mut c_void, from: u64, bytes: usize) {
        if to.is_null() {
            return Err(cuda::INVALID_VALUE);
        }
        host_copy(from, bytes, |device| {
            // SAFETY: the caller hands over room for so many bytes, and waits.
            unsafe { std::ptr::copy_nonoverlapping(device.as_ptr(), to.cast(), bytes) };
        })
    }

    /// From ordinary memory: what the host holds is taken at once, and arrives in the stream's order.
    fn cuMemcpyHtoDAsync_v2(to: u64, from: *const c_void, bytes: usize, stream: *mut c_void) {
        let mut engine = engine();
        if from.is_null() || !engine.memory.holds(to, bytes) {
            return Err(cuda::INVALID_VALUE);
        }
        if engine.capture_of(stream as usize)?.is_some() {
            // A graph would read the host's memory again at every launch.
            return Err(cuda::NOT_SUPPORTED);
        }
        // SAFETY: the caller hands over so many bytes of its own memory.
        let bytes = unsafe { std::slice::from_raw_parts(from.cast::<u8>(), bytes) };
        engine.host_bytes += bytes.len() as u64;
        engine.enqueue(stream as usize, Work::Write { to, bytes: bytes.into() })
    }

    fn cuMemcpyDtoDAsync_v2(to: u64, from: u64, bytes: usize, stream: *mut c_void) {
        let mut engine = engine();
        if !engine.memory.holds(to, bytes) || !engine.memory.holds(from, bytes) {
            return Err(cuda::INVALID_VALUE);
        }
        engine.enqueue(stream as usize, Work::Copy { to, from, bytes })
    }

    /// The other context is only looked at: copies between GPUs need no leave here.
    fn cuCtxEnablePeerAccess(peer: *mut c_void, flags: c_uint) {
        let gpu = current()?;
        let peer = (peer as usize).checked_sub(FIRST_CONTEXT).ok_or(cuda::INVALID_CONTEXT)? as u32;
        if flags != 0 || peer == gpu || !gpu::visible().contains(&peer) {
            return Err(cuda::INVALID_VALUE);
        }
        if scenario().transport == Transport::Shm { Err(cuda::PEER_ACCESS_UNSUPPORTED) } else { Ok(()) }
    }

    fn cuMemcpyPeerAsync(
        to: u64, _receiver: *mut c_void, from: u64, _owner: *mut c_void, bytes: usize, stream: *mut c_void,
    ) {
        let mut engine = engine();
        if !engine.memory.holds(to, bytes) || !engine.memory.holds(from, bytes) {
            return Err(cuda::INVALID_VALUE);
        }
        if engine.faults.strikes(Kind::LostCopy, Moment::default()).is_some() {
            return Ok(());
        }
        engine.enqueue(stream as usize, Work::Copy { to, from, bytes })
    }

    fn cuStreamCreate(place: *mut *mut c_void, _flags: c_uint) {
        current()?;
        handle(place, engine().create_stream())
    }

    fn cuStreamDestroy_v2(stream: *mut c_void) {
        engine().destroy_stream(stream as usize)
    }

    fn cuStreamSynchronize(stream: *mut c_void) {
        if engine().capture_of(stream as usize)?.is_some() {
            engine().forbid_in_capture()?;
        }
        finish()
    }

    fn cuStreamQuery(stream: *mut c_void) {
        let mut engine = engine();
        if engine.capture_of(stream as usize)?.is_some() {
            engine.forbid_in_capture()?;
        }
        match engine.advance()? {
            Progress::Done => Ok(()),
            Progress::Peers(..) | Progress::Held(_) => Err(cuda::NOT_READY),
        }
    }

    fn cuStreamWaitEvent(stream: *mut c_void, event: *mut c_void, _flags: c_uint) {
        engine().wait(stream as usize, event as usize)
    }

    fn cuStreamBeginCapture_v2(stream: *mut c_void, _mode: c_int) {
        engine().begin_capture(stream as usize)
    }

    fn cuStreamEndCapture(stream: *mut c_void, graph: *mut *mut c_void) {
        let ended = engine().end_capture(stream as usize);
        handle(graph, *ended.as_ref().unwrap_or(&0))?;
        ended.map(|_| ())
    }

    /// 0 for a stream that captures nothing, 1 for one that does.
    fn cuStreamIsCapturing(stream: *mut c_void, status: *mut c_int) {
        let is_capturing = engine().capture_of(stream as usize)?.is_some();
        put(status, c_int::from(is_capturing), cuda::INVALID_VALUE)
    }

    fn cuGraphInstantiateWithFlags(executable: *mut *mut c_void, graph: *mut c_void, flags: u64) {
        if flags != 0 {
            return Err(cuda::NOT_SUPPORTED);
        }
        let made = engine().instantiate(graph as usize)?;
        handle(executable, made)
    }

    /// The number of nodes alone.
    fn cuGraphGetNodes(graph: *mut c_void, nodes: *mut *mut c_void, count: *mut usize) {
        if !nodes.is_null() {
            return Err(cuda::NOT_SUPPORTED);
        }
        put(count, engine().graph_nodes(graph as usize)?, cuda::INVALID_VALUE)
    }

    fn cuGraphUpload(executable: *mut c_void, _stream: *mut c_void) {
        engine().graph_nodes(executable as usize).map(|_| ())
    }

    fn cuGraphLaunch(executable: *mut c_void, stream: *mut c_void) {
        engine().launch(executable as usize, stream as usize)
    }

    fn cuGraphExecDestroy(executable: *mut c_void) {
        engine().destroy_graph(executable as usize)
    }

    fn cuGraphDestroy(graph: *mut c_void) {
        engine().destroy_graph(graph as usize)
    }

    fn cuEventCreate(place: *mut *mut c_void, flags: c_uint) {
        current()?;
        // CU_EVENT_DISABLE_TIMING
        handle(place, engine().create_event(flags & 2 == 0))
    }

    fn cuEventDestroy_v2(event: *mut c_void) {
        engine().destroy_event(event as usize)
    }

    fn cuEventRecord(event: *mut c_void, stream: *mut c_void) {
        engine().record(event as usize, stream as usize)
    }

    fn cuEventQuery(event: *mut c_void) {
        let mut engine = engine();
        if engine.event_is_captured(event as usize)? {
            return Err(cuda::CAPTURED_EVENT);
        }
        match engine.advance()? {
            Progress::Done => Ok(()),
            Progress::Peers(..) | Progress::Held(_) => Err(cuda::NOT_READY),
        }
    }

    fn cuEventSynchronize(event: *mut c_void) {
        if engine().event_is_captured(event as usize)? {
            return Err(cuda::CAPTURED_EVENT);
        }
        finish()
    }

    fn cuEventElapsedTime(milliseconds: *mut f32, start: *mut c_void, end: *mut c_void) {
        put(milliseconds, engine().elapsed_ms(start as usize, end as usize)?, cuda::INVALID_VALUE)
    }

    fn cuGetErrorName(code: c_int, name: *mut *const c_char) {
        put(name, cuda::words(code).ok_or(cuda::INVALID_VALUE)?.0.as_ptr(), cuda::INVALID_VALUE)
    }

    fn cuGetErrorString(code: c_int, text: *mut *const c_char) {
        let words: &CStr = cuda::words(code).ok_or(cuda::INVALID_VALUE)?.1;
        put(text, words.as_ptr(), cuda::INVALID_VALUE)
    }
}
