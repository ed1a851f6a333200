//! libnvidia-ml.so.1, as far as nccltune's probes and workers call it.

use std::ffi::{c_char, c_int, c_uint, c_void};

use crate::exports::{exports, put, put_text, text_of};
use crate::faults::scenario;
use crate::gpu;
use crate::scenario::Transport;
use crate::status::nvml;

const FIRST_DEVICE: usize = 0xd000;

#[repr(C)]
pub(crate) struct PciInfo {
    bus_id_legacy: [c_char; 16],
    domain: c_uint,
    bus: c_uint,
    device: c_uint,
    pci_device_id: c_uint,
    pci_subsystem_id: c_uint,
    bus_id: [c_char; 32],
}

#[repr(C)]
pub(crate) struct MemoryV2 {
    version: c_uint,
    total: u64,
    reserved: u64,
    free: u64,
    used: u64,
}

#[repr(C)]
pub(crate) struct Memory {
    total: u64,
    free: u64,
    used: u64,
}

#[repr(C)]
pub(crate) struct Utilization {
    gpu: c_uint,
    memory: c_uint,
}

#[repr(C)]
pub(crate) struct ProcessInfo {
    pid: c_uint,
    used_memory: u64,
    gpu_instance: c_uint,
    compute_instance: c_uint,
}

fn gpu_of(device: *mut c_void) -> Result<u32, i32> {
    (device as usize)
        .checked_sub(FIRST_DEVICE)
        .map(|gpu| gpu as u32)
        .filter(|gpu| *gpu < scenario().devices)
        .ok_or(nvml::INVALID_ARGUMENT)
}

fn put_device(place: *mut *mut c_void, gpu: Option<u32>) -> Result<(), i32> {
    let gpu = gpu.ok_or(nvml::NOT_FOUND)?;
    put(place, (FIRST_DEVICE + gpu as usize) as *mut c_void, nvml::INVALID_ARGUMENT)
}

fn put_words(place: *mut c_char, length: c_uint, text: &str) -> Result<(), i32> {
    put_text(place, length as usize, text, nvml::INVALID_ARGUMENT, nvml::INSUFFICIENT_SIZE)
}

fn characters<const N: usize>(text: &str) -> [c_char; N] {
    let mut characters = [0; N];
    for (character, byte) in characters.iter_mut().zip(text.bytes()) {
        *character = byte.cast_signed();
    }
    characters
}

fn put_number(place: *mut c_uint, device: *mut c_void, value: c_uint) -> Result<(), i32> {
    gpu_of(device)?;
    put(place, value, nvml::INVALID_ARGUMENT)
}

exports! {
    fn nvmlInit_v2() {
        Ok(())
    }

    fn nvmlShutdown() {
        Ok(())
    }

    fn nvmlSystemGetDriverVersion(text: *mut c_char, length: c_uint) {
        put_words(text, length, gpu::DRIVER)
    }

    fn nvmlSystemGetCudaDriverVersion_v2(version: *mut c_int) {
        put(version, gpu::CUDA_VERSION, nvml::INVALID_ARGUMENT)
    }

    fn nvmlDeviceGetCount_v2(count: *mut c_uint) {
        put(count, scenario().devices, nvml::INVALID_ARGUMENT)
    }

    fn nvmlDeviceGetHandleByIndex_v2(index: c_uint, device: *mut *mut c_void) {
        put_device(device, Some(index).filter(|index| *index < scenario().devices))
    }

    fn nvmlDeviceGetHandleByPciBusId_v2(address: *const c_char, device: *mut *mut c_void) {
        let address = text_of(address).ok_or(nvml::INVALID_ARGUMENT)?.to_ascii_lowercase();
        put_device(device, (0..scenario().devices).find(|gpu| address.ends_with(&format!(":{:02x}:00.0", gpu::bus(*gpu)))))
    }

    fn nvmlDeviceGetHandleByUUID(uuid: *const c_char, device: *mut *mut c_void) {
        let uuid = text_of(uuid).ok_or(nvml::INVALID_ARGUMENT)?;
        put_device(device, (0..scenario().devices).find(|gpu| gpu::uuid(*gpu).eq_ignore_ascii_case(&uuid)))
    }

    fn nvmlDeviceGetIndex(device: *mut c_void, index: *mut c_uint) {
        put_number(index, device, gpu_of(device)?)
    }

    fn nvmlDeviceGetName(device: *mut c_void, name: *mut c_char, length: c_uint) {
        gpu_of(device)?;
        put_words(name, length, gpu::NAME)
    }

    fn nvmlDeviceGetUUID(device: *mut c_void, uuid: *mut c_char, length: c_uint) {
        put_words(uuid, length, &gpu::uuid(gpu_of(device)?))
    }

    fn nvmlDeviceGetPciInfo_v3(device: *mut c_void, pci: *mut PciInfo) {
        let bus = gpu::bus(gpu_of(device)?);
        let information = PciInfo {
            bus_id_legacy: characters(&format!("0000:{bus:02X}:00.0")),
            domain: 0,
            bus,
            device: 0,
            pci_device_id: 0,
            pci_subsystem_id: 0,
            bus_id: characters(&format!("00000000:{bus:02X}:00.0")),
        };
        put(pci, information, nvml::INVALID_ARGUMENT)
    }

    fn nvmlDeviceGetMemoryInfo(device: *mut c_void, place: *mut Memory) {
        let (total, free) = gpu::memory(gpu_of(device)?);
        put(place, Memory { total, free, used: total - free }, nvml::INVALID_ARGUMENT)
    }

    fn nvmlDeviceGetMemoryInfo_v2(device: *mut c_void, place: *mut MemoryV2) {
        let (total, free) = gpu::memory(gpu_of(device)?);
        let version = size_of::<MemoryV2>() as c_uint | 2 << 24;
        put(place, MemoryV2 { version, total, reserved: 0, free, used: total - free }, nvml::INVALID_ARGUMENT)
    }

    fn nvmlDeviceGetCudaComputeCapability(device: *mut c_void, major: *mut c_int, minor: *mut c_int) {
        gpu_of(device)?;
        put(major, gpu::capability().0, nvml::INVALID_ARGUMENT)?;
        put(minor, gpu::capability().1, nvml::INVALID_ARGUMENT)
    }

    fn nvmlDeviceGetCurrPcieLinkGeneration(device: *mut c_void, generation: *mut c_uint) {
        put_number(generation, device, 5)
    }

    fn nvmlDeviceGetMaxPcieLinkGeneration(device: *mut c_void, generation: *mut c_uint) {
        put_number(generation, device, 5)
    }

    fn nvmlDeviceGetCurrPcieLinkWidth(device: *mut c_void, width: *mut c_uint) {
        put_number(width, device, 16)
    }

    fn nvmlDeviceGetMaxPcieLinkWidth(device: *mut c_void, width: *mut c_uint) {
        put_number(width, device, 16)
    }

    /// Links exist where GPUs reach each other directly: four each.
    fn nvmlDeviceGetNvLinkState(device: *mut c_void, link: c_uint, state: *mut c_uint) {
        if scenario().transport != Transport::P2p {
            return Err(nvml::NOT_SUPPORTED);
        }
        put_number(state, device, c_uint::from(link < 4))
    }

    /// Those links lead into switches without an address, as in a virtual machine.
    fn nvmlDeviceGetNvLinkRemotePciInfo_v2(device: *mut c_void, _link: c_uint, pci: *mut PciInfo) {
        gpu_of(device)?;
        if scenario().transport != Transport::P2p {
            return Err(nvml::NOT_SUPPORTED);
        }
        let information = PciInfo {
            bus_id_legacy: characters("ffff:ff:ff.0"),
            domain: 0xffff_ffff,
            bus: 0xff,
            device: 0xff,
            pci_device_id: 0,
            pci_subsystem_id: 0,
            bus_id: characters("FFFFFFFF:FF:FF.0"),
        };
        put(pci, information, nvml::INVALID_ARGUMENT)
    }

    /// All supported, or "chipset not supported".
    fn nvmlDeviceGetP2PStatus(one: *mut c_void, other: *mut c_void, _what: c_int, status: *mut c_int) {
        gpu_of(one)?;
        gpu_of(other)?;
        put(status, c_int::from(scenario().transport == Transport::Shm), nvml::INVALID_ARGUMENT)
    }

    fn nvmlDeviceGetUtilizationRates(device: *mut c_void, rates: *mut Utilization) {
        gpu_of(device)?;
        put(rates, Utilization { gpu: 0, memory: 0 }, nvml::INVALID_ARGUMENT)
    }

    fn nvmlDeviceGetComputeRunningProcesses_v3(device: *mut c_void, count: *mut c_uint, list: *mut ProcessInfo) {
        let users = gpu::users(gpu_of(device)?);
        if count.is_null() {
            return Err(nvml::INVALID_ARGUMENT);
        }
        // SAFETY: the count is that of the list's room, and is read before it is written.
        let room = unsafe { count.read() } as usize;
        put(count, users.len() as c_uint, nvml::INVALID_ARGUMENT)?;
        if users.len() > room {
            return Err(nvml::INSUFFICIENT_SIZE);
        }
        for (position, (pid, used_memory)) in users.into_iter().enumerate() {
            let information =
                ProcessInfo { pid, used_memory, gpu_instance: c_uint::MAX, compute_instance: c_uint::MAX };
            put(list.wrapping_add(position), information, nvml::INVALID_ARGUMENT)?;
        }
        Ok(())
    }

    fn nvmlDeviceGetCurrentClocksThrottleReasons(device: *mut c_void, reasons: *mut u64) {
        gpu_of(device)?;
        put(reasons, 0, nvml::INVALID_ARGUMENT)
    }

    /// Graphics, SM, memory and video clocks.
    fn nvmlDeviceGetClockInfo(device: *mut c_void, clock: c_int, megahertz: *mut c_uint) {
        let value = match clock {
            0 | 1 => 1980,
            2 => 3201,
            3 => 1545,
            _ => return Err(nvml::INVALID_ARGUMENT),
        };
        put_number(megahertz, device, value)
    }

    fn nvmlDeviceGetPowerUsage(device: *mut c_void, milliwatts: *mut c_uint) {
        put_number(milliwatts, device, 250_000)
    }

    fn nvmlDeviceGetTemperature(device: *mut c_void, _sensor: c_int, degrees: *mut c_uint) {
        put_number(degrees, device, 40)
    }
}

/// The sentence for a status.
// SAFETY: the name is NVML's, and no other library of a process that loads this one has it.
#[unsafe(no_mangle)]
#[allow(non_snake_case, reason = "the function keeps its name")]
pub(crate) extern "C" fn nvmlErrorString(status: c_int) -> *const c_char {
    match status {
        0 => c"Success",
        nvml::INVALID_ARGUMENT => c"Invalid Argument",
        nvml::NOT_SUPPORTED => c"Not Supported",
        nvml::NOT_FOUND => c"Not Found",
        nvml::INSUFFICIENT_SIZE => c"Insufficient Size",
        _ => c"Unknown Error",
    }
    .as_ptr()
}
