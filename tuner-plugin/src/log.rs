//! Lines in NCCL's own log.

use std::ffi::{CString, c_int};

use nccl_abi::{Logger, log_level, subsystem};

/// Where lines go; nowhere, if NCCL hands no logger.
pub(crate) struct Log(Option<Logger>);

impl Log {
    pub(crate) const fn new(logger: Option<Logger>) -> Self {
        Self(logger)
    }

    /// A line that is shown with `NCCL_DEBUG=INFO`.
    pub(crate) fn info(&self, line: &str) {
        self.write(log_level::INFO, line);
    }

    /// A line that is shown with `NCCL_DEBUG=WARN`.
    pub(crate) fn warn(&self, line: &str) {
        self.write(log_level::WARN, line);
    }

    fn write(&self, level: c_int, line: &str) {
        let Some(logger) = self.0 else { return };
        // The line itself is the format, so that no argument has to be passed on; signs of formats are doubled, and
        // a path may hold anything.
        let clean: String = line.chars().map(|sign| if sign.is_control() { ' ' } else { sign }).collect();
        let Ok(format) = CString::new(format!("TUNER/nccltune: {}", clean.replace('%', "%%"))) else { return };
        // SAFETY: NCCL's logger takes a format and, since that holds no conversion, no further argument; both texts
        // are terminated and outlive the call.
        unsafe { logger(level, subsystem::INIT | subsystem::TUNING, c"nccltune".as_ptr(), 0, format.as_ptr()) };
    }
}
