//! How functions are handed to C: what every one of them does first, and how pointers are written to.

use std::ffi::{CStr, c_char, c_int};

use crate::engine::engine;
use crate::faults::{Hold, Moment};
use crate::home::home;
use crate::scenario::Kind;
use crate::status::{cublas, cuda, nccl, nvml};

/// Declares functions that C calls. Each asks the scenario first whether it may answer; what the scenario
/// must know for that is said in a block behind `knowing`.
macro_rules! exports {
    ($(
        $(#[$meta:meta])*
        fn $name:ident ( $( $argument:ident : $type:ty ),* $(,)? ) $( knowing $knowing:block )? $body:block
    )+) => {
        $(
            $(#[$meta])*
            // SAFETY: the name is that of the library which is played, and no other library of a process
            // that loads this one has it.
            #[unsafe(no_mangle)]
            #[allow(non_snake_case, reason = "functions keep the names of the library they stand in for")]
            pub(crate) extern "C" fn $name( $( $argument: $type ),* ) -> std::ffi::c_int {
                let answer = || -> Result<(), i32> {
                    $( $knowing )?
                    crate::exports::enter(stringify!($name))?;
                    $body
                };
                answer().err().unwrap_or(0)
            }
        )+
        /// The functions above.
        pub(crate) const NAMES: &[&str] = &[ $( stringify!($name) ),+ ];
    };
}

pub(crate) use exports;

/// Whether a function of this name can be told to fail.
pub(crate) fn is_known(name: &str) -> bool {
    [crate::cuda::NAMES, crate::nccl::NAMES, crate::nvml::NAMES, crate::cublaslt::NAMES]
        .iter()
        .any(|names| names.contains(&name))
}

/// What every function does first: it fails where the scenario cannot be read, and where a fault wants.
pub(crate) fn enter(name: &'static str) -> Result<(), c_int> {
    let broken = match name {
        _ if name.starts_with("nccl") => nccl::INTERNAL,
        _ if name.starts_with("nvml") => nvml::UNKNOWN,
        _ if name.starts_with("cublas") => cublas::INTERNAL_ERROR,
        _ => cuda::UNKNOWN,
    };
    let scenario = home().scenario.as_ref().map_err(|error| {
        crate::complain(&format!("the scenario cannot be read: {error}"));
        broken
    })?;
    if scenario.fault.is_empty() {
        return Ok(());
    }
    let moment = Moment { call: Some(name), ..Moment::default() };
    let strikes = |kind| engine().faults.strikes(kind, moment);
    let is_question = name.starts_with("nvml") || ["cuInit", "cuDeviceGetCount", "cuDriverGetVersion"].contains(&name);
    if is_question {
        if let Some(fault) = strikes(Kind::ProbeHang) {
            Hold::of(fault).wait();
        }
        if name.starts_with("nvml") && strikes(Kind::ProbeNotSupported).is_some() {
            return Err(nvml::NOT_SUPPORTED);
        }
    }
    if let Some(fault) = strikes(Kind::Hang) {
        Hold::of(fault).wait();
    }
    crate::gpu::hold_if_wedged(name);
    if let Some(fault) = strikes(Kind::Error) {
        let text = fault.text.clone().unwrap_or_default();
        if name.starts_with("nccl") && !text.is_empty() {
            engine().nccl.fail(&text);
        }
        return Err(fault.code.unwrap_or(broken));
    }
    Ok(())
}

/// Writes an answer where C wants it; null is a mistake of the caller, with the status given.
pub(crate) fn put<T>(place: *mut T, value: T, null: c_int) -> Result<(), c_int> {
    if place.is_null() {
        return Err(null);
    }
    // SAFETY: by the headers these functions play, the pointer is to storage for one such value.
    unsafe { place.write(value) };
    Ok(())
}

/// Writes a text with its end into a buffer of so many bytes.
pub(crate) fn put_text(place: *mut c_char, length: usize, text: &str, null: c_int, short: c_int) -> Result<(), c_int> {
    if place.is_null() {
        return Err(null);
    }
    if text.len() >= length {
        return Err(short);
    }
    // SAFETY: the buffer holds `length` bytes, as the caller says, and the text with its end is shorter.
    unsafe {
        std::ptr::copy_nonoverlapping(text.as_ptr(), place.cast(), text.len());
        place.add(text.len()).write(0);
    }
    Ok(())
}

/// A text that C hands over.
pub(crate) fn text_of(pointer: *const c_char) -> Option<String> {
    if pointer.is_null() {
        return None;
    }
    // SAFETY: by the headers, the pointer is to a terminated string that lives as long as the call.
    Some(unsafe { CStr::from_ptr(pointer) }.to_string_lossy().into_owned())
}
