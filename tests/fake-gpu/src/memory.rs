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
    /// Ranges of addresses that were reserved, and what is mapped into them: segment by segment, by place.
    reserved: BTreeMap<u64, usize>,
    mapped: BTreeMap<u64, usize>,
    /// Segments that were made.
    segments: BTreeMap<u64, usize>,
    made: u64,
    /// Bytes in use.
    pub(crate) used: u64,
}

impl Memory {
    /// Pages for so many bytes; `None` if the machine has none left.
    pub(crate) fn allocate(&mut self, bytes: usize) -> Option<u64> {
        let base = self.pages(bytes)?;
        self.blocks.insert(base, bytes);
        self.used += bytes.next_multiple_of(4096) as u64;
        Some(base)
    }

    /// Reserves a range of addresses, of which nothing can be used yet.
    pub(crate) fn reserve(&mut self, bytes: usize) -> Option<u64> {
        let base = self.pages(bytes)?;
        self.reserved.insert(base, bytes);
        Some(base)
    }

    /// Makes a segment of memory that is nowhere to be seen yet.
    pub(crate) fn make_segment(&mut self, bytes: usize) -> u64 {
        self.made += 1;
        self.segments.insert(self.made, bytes);
        self.used += bytes as u64;
        self.made
    }

    /// Maps a whole segment into a reserved range, beside what is mapped there.
    pub(crate) fn map(&mut self, address: u64, bytes: usize, segment: u64) -> bool {
        let end = address + bytes as u64;
        let is_inside =
            self.reserved.range(..=address).next_back().is_some_and(|(base, length)| end <= base + *length as u64);
        let is_free =
            self.mapped.range(..end).next_back().is_none_or(|(base, length)| base + *length as u64 <= address);
        let fits = self.segments.get(&segment) == Some(&bytes);
        if is_inside && is_free && fits {
            self.mapped.insert(address, bytes);
        }
        is_inside && is_free && fits
    }

    /// Opens a range whose segments are all mapped.
    pub(crate) fn open(&mut self, address: u64, bytes: usize) -> bool {
        let end = address + bytes as u64;
        let mut at = address;
        while at < end {
            let Some(length) = self.mapped.get(&at) else { return false };
            at += *length as u64;
        }
        let is_whole = at == end;
        if is_whole {
            self.blocks.insert(address, bytes);
        }
        is_whole
    }

    /// Takes a mapping away, and with it the use of the whole range it is in.
    pub(crate) fn unmap(&mut self, address: u64, bytes: usize) -> bool {
        if self.mapped.get(&address) != Some(&bytes) {
            return false;
        }
        self.mapped.remove(&address);
        self.blocks.retain(|base, length| !(*base..*base + *length as u64).contains(&address));
        true
    }

    /// Gives a segment back.
    pub(crate) fn release_segment(&mut self, segment: u64) -> bool {
        let Some(bytes) = self.segments.remove(&segment) else { return false };
        self.used -= bytes as u64;
        true
    }

    /// Gives a range of addresses back, in which nothing is mapped any more.
    pub(crate) fn unreserve(&mut self, base: u64, bytes: usize) -> bool {
        let is_empty = self.mapped.range(base..base + bytes as u64).next().is_none();
        if !is_empty || self.reserved.get(&base) != Some(&bytes) {
            return false;
        }
        self.reserved.remove(&base);
        // SAFETY: the range was mapped by `pages` and is forgotten here.
        unsafe { libc::munmap(base as *mut libc::c_void, bytes.next_multiple_of(4096)) };
        true
    }

    /// Pages filled with 0xFF.
    fn pages(&mut self, bytes: usize) -> Option<u64> {
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

    #[test]
    fn segments_are_memory_once_all_of_a_range_is_mapped_and_opened() {
        let mut memory = Memory::default();
        let base = memory.reserve(8 << 20).unwrap();
        let (one, two) = (memory.make_segment(4 << 20), memory.make_segment(4 << 20));
        let second = base + (4 << 20);
        assert_eq!(memory.used, 8 << 20);
        assert!(memory.map(base, 4 << 20, one) && !memory.map(base, 4 << 20, two), "the place is taken");
        assert!(!memory.open(base, 8 << 20) && !memory.holds(base, 1), "half of it is not there");
        assert!(!memory.map(second, 2 << 20, two), "a segment is mapped whole");
        assert!(memory.map(second, 4 << 20, two) && memory.open(base, 8 << 20));
        assert!(memory.holds(base, 8 << 20) && memory.bytes(second, 1) == Some(&[0xff]));
        assert!(!memory.unreserve(base, 8 << 20), "something is mapped in it");
        assert!(memory.unmap(base, 4 << 20) && !memory.holds(second, 1));
        assert!(memory.unmap(second, 4 << 20) && memory.unreserve(base, 8 << 20));
        assert!(memory.release_segment(one) && memory.release_segment(two) && !memory.release_segment(two));
        assert_eq!(memory.used, 0);
    }
}
