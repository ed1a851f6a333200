//! The mapped file through which a worker of nccltune tells what to choose next.

use std::fs::File;
use std::os::fd::AsRawFd as _;
use std::ptr::NonNull;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};

use nccl_abi::control::{
    ANSWER_HONOURED, ANSWER_LEFT, ANSWER_UNAVAILABLE, ControlBlock, MAGIC, REQUEST_CHOOSE, TABLE_LENGTH, VERSION,
};

use crate::table::Decision;

/// A control file in memory.
#[derive(Debug)]
pub(crate) struct Control {
    block: NonNull<ControlBlock>,
}

// SAFETY: the block consists of atomics, and stays mapped for as long as this value lives.
unsafe impl Send for Control {}
// SAFETY: as above.
unsafe impl Sync for Control {}

impl Control {
    /// Maps a file that a worker has made.
    pub(crate) fn open(file: &File) -> Result<Self, String> {
        let length = size_of::<ControlBlock>();
        let size = file.metadata().map_err(|error| error.to_string())?.len();
        // A file that is shorter would end the process at the first touch beyond its end.
        if size < length as u64 {
            return Err(format!("{size} bytes, expected {length}"));
        }
        // SAFETY: a new mapping of an open file, at an address of the system's choice; its result is checked.
        let address = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                length,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_SHARED,
                file.as_raw_fd(),
                0,
            )
        };
        if address == libc::MAP_FAILED {
            return Err(std::io::Error::last_os_error().to_string());
        }
        let block = NonNull::new(address.cast()).ok_or("mapped at address zero")?;
        let control = Self { block };
        let (magic, version) = (control.block().magic.load(Acquire), control.block().version.load(Acquire));
        if magic != MAGIC || version != VERSION {
            return Err(format!("not a control file of version {VERSION}"));
        }
        Ok(control)
    }

    fn block(&self) -> &ControlBlock {
        // SAFETY: mapped when this value was made and until it is dropped; pages are aligned; every bit pattern is a
        // valid atomic number.
        unsafe { self.block.as_ref() }
    }

    /// What the worker asks for.
    pub(crate) fn decide(&self, collective: usize) -> Option<Decision> {
        let block = self.block();
        if block.request.load(Acquire) != REQUEST_CHOOSE {
            return None;
        }
        let wanted = block.collective.load(Relaxed);
        if wanted >= 0 && usize::try_from(wanted) != Ok(collective) {
            return None;
        }
        Some(Decision {
            algorithm: usize::try_from(block.algorithm.load(Relaxed)).ok()?,
            protocol: usize::try_from(block.protocol.load(Relaxed)).ok()?,
            channels: block.channels.load(Relaxed),
        })
    }

    /// Tells the worker what became of its request, with NCCL's own table.
    pub(crate) fn answer(&self, bytes: u64, asked: Option<bool>, table: &[f32], algorithms: usize) {
        let block = self.block();
        for (place, cost) in block.table.iter().zip(table.iter().take(TABLE_LENGTH)) {
            place.store(cost.to_bits(), Relaxed);
        }
        block.table_algorithms.store(u32::try_from(algorithms).unwrap_or(u32::MAX), Relaxed);
        block.last_bytes.store(bytes, Relaxed);
        let answer = match asked {
            None => ANSWER_LEFT,
            Some(true) => ANSWER_HONOURED,
            Some(false) => ANSWER_UNAVAILABLE,
        };
        block.answer.store(answer, Relaxed);
        block.decisions.fetch_add(1, Release);
    }
}

impl Drop for Control {
    fn drop(&mut self) {
        // SAFETY: the mapping was made with this length and nothing refers to it any more.
        unsafe { libc::munmap(self.block.as_ptr().cast(), size_of::<ControlBlock>()) };
    }
}
