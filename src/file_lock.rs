//! Exclusive use of a file among processes, for as long as the file is open.

use std::fs::{File, TryLockError};
use std::time::Duration;

/// A wait for locks that are held for a whole run.
///
/// A process that is being started shares its parent's descriptors until it becomes another program, so a
/// lock that was just given up can be seen held for some milliseconds more.
pub const A_MOMENT: Duration = Duration::from_millis(200);

/// How long apart a lock is tried.
const PAUSE: Duration = Duration::from_millis(20);

/// Takes the lock of a file; false where somebody else holds it all the time that is waited.
pub fn take(file: &File, wait: Duration) -> std::io::Result<bool> {
    let mut left = wait;
    loop {
        match file.try_lock() {
            Ok(()) => return Ok(true),
            Err(TryLockError::Error(error)) => return Err(error),
            Err(TryLockError::WouldBlock) if left.is_zero() => return Ok(false),
            Err(TryLockError::WouldBlock) => {
                let pause = PAUSE.min(left);
                std::thread::sleep(pause);
                left -= pause;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lock_that_is_given_up_meanwhile_is_taken_and_one_that_is_not_is_told() {
        let folder = tempfile::tempdir().unwrap();
        let open = || fs_err::File::create(folder.path().join("lock")).unwrap();
        let (first, second) = (open(), open());
        assert!(take(first.file(), Duration::ZERO).unwrap());
        assert!(!take(second.file(), Duration::from_millis(30)).unwrap());
        std::thread::scope(|scope| {
            scope.spawn(move || {
                std::thread::sleep(Duration::from_millis(50));
                drop(first);
            });
            assert!(take(second.file(), Duration::from_secs(20)).unwrap());
        });
    }
}
