//! A memcpy that flips a bit in large copies: what bad memory, a bad bus or a driver's bug does to data
//! without a word. A test compiles it to a shared library of its own and preloads it; it acts in workers
//! alone, so that whoever judges them keeps a memory that works.

use std::sync::atomic::{AtomicU8, Ordering};

/// Copies of at least so many bytes are hit: messages, and nothing that a program needs to live.
const LARGE_BYTES: usize = 96 * 1024;

// SAFETY: the C library's own functions, as its headers have them.
unsafe extern "C" {
    fn memmove(to: *mut u8, from: *const u8, bytes: usize) -> *mut u8;
    fn open(path: *const u8, flags: i32) -> i32;
    fn read(file: i32, bytes: *mut u8, length: usize) -> isize;
    fn close(file: i32) -> i32;
}

/// Whether this process is a worker, asked once: 0 unknown, 1 no, 2 yes. The standard library would copy
/// to find out.
fn is_worker() -> bool {
    static KNOWN: AtomicU8 = AtomicU8::new(0);
    if KNOWN.load(Ordering::Relaxed) == 0 {
        let mut line = [0_u8; 256];
        // SAFETY: a path that ends with NUL, and a buffer as long as it is said to be.
        let length = unsafe {
            let file = open(c"/proc/self/cmdline".as_ptr().cast(), 0);
            let length = read(file, line.as_mut_ptr(), line.len());
            close(file);
            length.max(0) as usize
        };
        let found = line[..length].windows(8).any(|word| word == b"__worker");
        KNOWN.store(1 + u8::from(found), Ordering::Relaxed);
    }
    KNOWN.load(Ordering::Relaxed) == 2
}

/// As the C library's, but for one bit in the middle of what is large.
///
/// # Safety
///
/// As memcpy.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn memcpy(to: *mut u8, from: *const u8, bytes: usize) -> *mut u8 {
    // SAFETY: the caller vouches for both ranges, and the byte lies within.
    unsafe {
        memmove(to, from, bytes);
        if bytes >= LARGE_BYTES && is_worker() {
            *to.add(bytes / 2) ^= 1;
        }
    }
    to
}
