//! The small file through which this worker tells the tuner plugin of its own process what to choose next.
//!
//! It is written only while nothing is being enqueued, so that a captured graph holds one choice. The plugin maps the
//! same file when a communicator is made.

use std::num::NonZeroUsize;
use std::path::Path;
use std::ptr::NonNull;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};

use nccl_abi::control::{
    ANSWER_HONOURED, ANSWER_LEFT, ANSWER_UNAVAILABLE, ControlBlock, MAGIC, REQUEST_CHOOSE, REQUEST_NONE, TABLE_LENGTH,
    VERSION,
};
use nix::sys::mman::{MapFlags, ProtFlags, mmap};

use super::protocol::{Answer, CallChoice, ChoiceFate};

/// A control file in memory, for as long as the process lives.
pub(super) struct ControlFile(NonNull<ControlBlock>);

impl ControlFile {
    /// Makes the file anew and maps it.
    pub(super) fn create(path: &Path) -> std::io::Result<Self> {
        let length = NonZeroUsize::new(size_of::<ControlBlock>()).unwrap_or(NonZeroUsize::MIN);
        let file = fs_err::OpenOptions::new().read(true).write(true).create(true).truncate(true).open(path)?;
        file.set_len(length.get() as u64)?;
        let control = Self(map(length, file.file())?.cast());
        let block = control.block();
        block.version.store(VERSION, Relaxed);
        block.request.store(REQUEST_NONE, Relaxed);
        block.magic.store(MAGIC, Release);
        Ok(control)
    }

    #[expect(unsafe_code, reason = "the plugin maps the same memory")]
    fn block(&self) -> &ControlBlock {
        // SAFETY: it is mapped, page-aligned and never unmapped; every bit pattern is a valid atomic number.
        unsafe { self.0.as_ref() }
    }

    /// What the plugin is to choose from here on.
    pub(super) fn choose(&self, choice: Option<CallChoice>) {
        let block = self.block();
        // Nothing is enqueued meanwhile; the request is given last for whoever asks next.
        block.request.store(REQUEST_NONE, Release);
        let Some(choice) = choice else { return };
        block.collective.store(-1, Relaxed);
        block.algorithm.store(i32::try_from(choice.algorithm).unwrap_or(-1), Relaxed);
        block.protocol.store(i32::try_from(choice.protocol).unwrap_or(-1), Relaxed);
        block.channels.store(choice.channels, Relaxed);
        block.request.store(REQUEST_CHOOSE, Release);
    }

    /// What the plugin did.
    pub(super) fn told(&self) -> Answer {
        let block = self.block();
        let decisions = block.decisions.load(Acquire);
        let fate = match block.answer.load(Relaxed) {
            ANSWER_LEFT => ChoiceFate::Left,
            ANSWER_HONOURED => ChoiceFate::Honoured,
            ANSWER_UNAVAILABLE => ChoiceFate::Unavailable,
            _ => ChoiceFate::Unasked,
        };
        let finite = |cost: f32| if cost.is_finite() { cost } else { nccl_abi::UNAVAILABLE };
        let rows = (block.table_algorithms.load(Relaxed) as usize).min(nccl_abi::ALGORITHMS.len());
        let kept = (rows * nccl_abi::PROTOCOLS.len()).min(TABLE_LENGTH);
        Answer::Control {
            fate,
            decisions,
            last_bytes: block.last_bytes.load(Relaxed),
            table_us: block.table[..kept].iter().map(|cost| finite(f32::from_bits(cost.load(Relaxed)))).collect(),
        }
    }
}

/// Maps so many bytes of a file that has them.
#[expect(unsafe_code, reason = "the system maps files by address")]
fn map(length: NonZeroUsize, file: &std::fs::File) -> std::io::Result<NonNull<std::ffi::c_void>> {
    let access = ProtFlags::PROT_READ | ProtFlags::PROT_WRITE;
    // SAFETY: a new mapping of a file that this process made with this length, at an address of the system's choice.
    let address = unsafe { mmap(None, length, access, MapFlags::MAP_SHARED, file, 0) };
    address.map_err(std::io::Error::from)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_choice_stands_until_it_is_taken_back() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("control");
        let control = ControlFile::create(&path).unwrap();
        assert_eq!(fs_err::metadata(&path).unwrap().len(), size_of::<ControlBlock>() as u64);
        control.choose(Some(CallChoice { algorithm: 1, protocol: 2, channels: 8 }));
        let again = fs_err::read(&path).unwrap();
        assert_eq!(again[..8], MAGIC.to_le_bytes());
        let read = |block: &ControlBlock| {
            (block.request.load(Relaxed), block.algorithm.load(Relaxed), block.channels.load(Relaxed))
        };
        assert_eq!(read(control.block()), (REQUEST_CHOOSE, 1, 8));
        control.choose(None);
        assert_eq!(control.block().request.load(Relaxed), REQUEST_NONE);
        let untold = Answer::Control { fate: ChoiceFate::Unasked, decisions: 0, last_bytes: 0, table_us: Vec::new() };
        assert_eq!(control.told(), untold);
        assert!(ControlFile::create(folder.path()).is_err());
    }
}
