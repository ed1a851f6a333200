//! Device memory: pages of this process, filled with 0xFF before anybody writes to them, so that what
//! was never written reads as NaN.

use std::collections::BTreeMap;
use std::os::fd::RawFd;

/// Memory that is filled by copying; what is larger maps pages that are filled already.
const POISON_BYTES: usize = 2 << 20;

/// Everything that is allocated.
#[derive(Default)]
pub(crate) struct Memory {
    blocks: BTreeMap<u64, usize>,
    poison: Option<RawFd>,
    /// Bytes in use.
    pub(crate) used: u64,
}

impl Memory {
    /// Pages for so many bytes; `None` if the machine has none left.
    pub(crate) fn allocate(&mut self, bytes: usize) -> Option<u64> {
        let length = bytes.next_multiple_of(4096);
        let poison = self.poison()?;
        let (protection, private) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_NORESERVE);
        // SAFETY: a fresh mapping at an address of the system's choice.
        let base =
            unsafe { libc::mmap(std::ptr::null_mut(), length, protection, private | libc::MAP_ANONYMOUS, -1, 0) };
        if base == libc::MAP_FAILED {
            return None;
        }
        let mut offset = 0;
        while offset < length {
            let piece = POISON_BYTES.min(length - offset);
            // SAFETY: the piece lies inside the mapping that was just made and nobody else knows.
            let mapped =
                unsafe { libc::mmap(base.byte_add(offset), piece, protection, private | libc::MAP_FIXED, poison, 0) };
            if mapped == libc::MAP_FAILED {
                return None;
            }
            offset += piece;
        }
        self.blocks.insert(base as u64, bytes);
        self.used += length as u64;
        Some(base as u64)
    }

    /// Gives memory back. `false` if none begins there.
    pub(crate) fn free(&mut self, base: u64) -> bool {
        let Some(bytes) = self.blocks.remove(&base) else { return false };
        let length = bytes.next_multiple_of(4096);
        self.used -= length as u64;
        // SAFETY: the range was mapped by `allocate` and is forgotten here.
        unsafe { libc::munmap(base as *mut libc::c_void, length) };
        true
    }

    /// Whether a range lies inside one allocation.
    pub(crate) fn holds(&self, address: u64, bytes: usize) -> bool {
        self.blocks.range(..=address).next_back().is_some_and(|(base, length)| {
            address - base <= *length as u64 && bytes <= length - (address - base) as usize
        })
    }

    /// A range as bytes.
    pub(crate) fn bytes(&self, address: u64, bytes: usize) -> Option<&[u8]> {
        // SAFETY: the range is mapped as long as its block is known, which borrowing this keeps so.
        self.holds(address, bytes).then(|| unsafe { std::slice::from_raw_parts(address as *const u8, bytes) })
    }

    /// A range as bytes to be changed.
    pub(crate) fn bytes_mut(&mut self, address: u64, bytes: usize) -> Option<&mut [u8]> {
        // SAFETY: as above, and nobody else holds a slice while this is borrowed for change.
        self.holds(address, bytes).then(|| unsafe { std::slice::from_raw_parts_mut(address as *mut u8, bytes) })
    }

    /// Copies between ranges, which may overlap.
    pub(crate) fn copy(&mut self, to: u64, from: u64, bytes: usize) -> bool {
        let inside = self.holds(to, bytes) && self.holds(from, bytes);
        if inside {
            // SAFETY: both ranges are mapped, and `copy` allows them to overlap.
            unsafe { std::ptr::copy(from as *const u8, to as *mut u8, bytes) };
        }
        inside
    }

    /// A file in memory that holds nothing but 0xFF.
    fn poison(&mut self) -> Option<RawFd> {
        if self.poison.is_none() {
            // SAFETY: the name is a terminated string.
            let file = unsafe { libc::memfd_create(c"fake-gpu-poison".as_ptr(), libc::MFD_CLOEXEC) };
            let bytes = vec![0xff_u8; POISON_BYTES];
            // SAFETY: the buffer is as long as is said; a file that is not open makes it fail.
            let written = unsafe { libc::write(file, bytes.as_ptr().cast(), bytes.len()) };
            self.poison = (written == POISON_BYTES as isize).then_some(file);
        }
        self.poison
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_is_poisoned_bounded_and_its_own() {
        let mut memory = Memory::default();
        let one = memory.allocate(5 << 20).unwrap();
        let two = memory.allocate(5000).unwrap();
        assert!(memory.bytes(one, 5 << 20).unwrap().iter().all(|byte| *byte == 0xff));
        memory.bytes_mut(one, 10).unwrap().fill(1);
        assert!(memory.copy(two, one, 20));
        assert_eq!(&memory.bytes(two, 11).unwrap()[9..], [1, 0xff]);
        assert!(memory.bytes(one + (4 << 20), 4).unwrap().iter().all(|byte| *byte == 0xff), "pages are private");
        assert!(!memory.holds(two, 5001) && !memory.holds(two + 4999, 2) && memory.holds(two + 4999, 1));
        assert!(!memory.copy(two, one, 5001));
        assert_eq!(memory.used, (5 << 20) + 8192);
        assert!(memory.free(one) && !memory.free(one) && !memory.holds(one, 1));
        assert_eq!(memory.used, 8192);
    }
}
