//! How the ranks of a communicator meet: files in the scenario's folder that all of them map.
//!
//! Ranks go forward in rounds. In a round every rank writes what it has to say into a file of its own
//! and rings; once all have, everybody reads all of it. Two files a rank are enough: nobody begins the
//! round after next before all have read the last one.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

/// Most ranks of a communicator.
pub(crate) const MOST_RANKS: usize = 16;

/// What all ranks map.
#[repr(C)]
pub(crate) struct Board {
    /// Changes whenever somebody has done something; waited for by futex.
    bell: AtomicU32,
    /// Ranks that opened everybody's files.
    opened: AtomicU32,
    /// The process of each rank; 0 while it has not come.
    members: [AtomicU32; MOST_RANKS],
    /// The GPU of each rank.
    devices: [AtomicU32; MOST_RANKS],
    /// Rounds that each rank has written.
    written: [AtomicU64; MOST_RANKS],
    /// Bytes it wrote, by parity of the round.
    lengths: [[AtomicU64; 2]; MOST_RANKS],
}

impl Board {
    fn ring(&self) {
        self.bell.fetch_add(1, Ordering::SeqCst);
        // SAFETY: the address is that of a living 32-bit number; waking nobody is fine.
        unsafe { libc::syscall(libc::SYS_futex, self.bell.as_ptr(), libc::FUTEX_WAKE, i32::MAX) };
    }

    /// The state of the bell, to be handed to `listen`.
    pub(crate) fn rung(&self) -> u32 {
        self.bell.load(Ordering::SeqCst)
    }

    /// Waits until the bell rings again, or a moment.
    pub(crate) fn listen(&self, rung: u32) {
        let moment = libc::timespec { tv_sec: 0, tv_nsec: 100_000_000 };
        // SAFETY: the address is that of a living 32-bit number, and the time is read before it returns.
        unsafe { libc::syscall(libc::SYS_futex, self.bell.as_ptr(), libc::FUTEX_WAIT, rung, &raw const moment) };
    }

    fn wait(&self, until: impl Fn(&Self) -> bool) {
        loop {
            let rung = self.rung();
            if until(self) {
                return;
            }
            self.listen(rung);
        }
    }
}

/// A rank's place among the others.
pub(crate) struct Group {
    pub(crate) board: &'static Board,
    files: Vec<[File; 2]>,
    rank: usize,
    round: u64,
}

impl Group {
    /// Joins, and waits until all have come. Names are gone afterwards, so that nothing is left behind.
    pub(crate) fn join(folder: &Path, name: &str, ranks: usize, rank: usize, device: u32) -> io::Result<Self> {
        let path = |what: String| -> PathBuf { folder.join(format!("{name}-{what}")) };
        let open = |path: PathBuf| OpenOptions::new().create(true).truncate(false).read(true).write(true).open(path);
        let file = open(path("board".to_owned()))?;
        file.set_len(size_of::<Board>() as u64)?;
        let board = map(&file)?;
        let own = || (0..2).map(|slot| path(format!("{rank}-{slot}")));
        for path in own() {
            open(path)?;
        }
        board.devices[rank].store(device, Ordering::SeqCst);
        board.members[rank].store(std::process::id(), Ordering::SeqCst);
        board.ring();
        board.wait(|board| board.members[..ranks].iter().all(|member| member.load(Ordering::SeqCst) != 0));
        let files = (0..ranks)
            .map(|rank| Ok([open(path(format!("{rank}-0")))?, open(path(format!("{rank}-1")))?]))
            .collect::<io::Result<Vec<_>>>()?;
        board.opened.fetch_add(1, Ordering::SeqCst);
        board.ring();
        board.wait(|board| board.opened.load(Ordering::SeqCst) as usize >= ranks);
        for path in own() {
            std::fs::remove_file(path)?;
        }
        if rank == 0 {
            std::fs::remove_file(path("board".to_owned()))?;
        }
        Ok(Self { board, files, rank, round: 0 })
    }

    pub(crate) fn ranks(&self) -> usize {
        self.files.len()
    }

    /// Two ranks on one GPU, and the GPU, if there are any.
    pub(crate) fn duplicate(&self) -> Option<(usize, usize, u32)> {
        let devices: Vec<u32> =
            self.board.devices[..self.ranks()].iter().map(|device| device.load(Ordering::SeqCst)).collect();
        (0..devices.len()).find_map(|other| {
            let one = devices[..other].iter().position(|device| *device == devices[other])?;
            Some((one, other, devices[other]))
        })
    }

    /// Says something, and begins a round with it.
    pub(crate) fn say(&mut self, bytes: &[u8]) -> io::Result<()> {
        let slot = (self.round % 2) as usize;
        self.files[self.rank][slot].write_all_at(bytes, 0)?;
        self.round += 1;
        self.board.lengths[self.rank][slot].store(bytes.len() as u64, Ordering::SeqCst);
        self.board.written[self.rank].store(self.round, Ordering::SeqCst);
        self.board.ring();
        Ok(())
    }

    /// What all said in the round that was begun last; `None` while somebody has not.
    pub(crate) fn heard(&self) -> io::Result<Option<Vec<Vec<u8>>>> {
        let ready =
            self.board.written[..self.ranks()].iter().all(|written| written.load(Ordering::SeqCst) >= self.round);
        if !ready {
            return Ok(None);
        }
        let slot = ((self.round + 1) % 2) as usize;
        let read = |rank: usize| {
            let mut bytes = vec![0; self.board.lengths[rank][slot].load(Ordering::SeqCst) as usize];
            self.files[rank][slot].read_exact_at(&mut bytes, 0)?;
            Ok(bytes)
        };
        (0..self.ranks()).map(read).collect::<io::Result<Vec<_>>>().map(Some)
    }

    /// Waits until all have come here.
    pub(crate) fn meet(&mut self) -> io::Result<()> {
        self.say(&[])?;
        while self.heard()?.is_none() {
            self.board.listen(self.board.rung());
        }
        Ok(())
    }
}

fn map(file: &File) -> io::Result<&'static Board> {
    let protection = libc::PROT_READ | libc::PROT_WRITE;
    // SAFETY: a fresh mapping of a file that is long enough.
    let address = unsafe {
        libc::mmap(std::ptr::null_mut(), size_of::<Board>(), protection, libc::MAP_SHARED, file.as_raw_fd(), 0)
    };
    if address == libc::MAP_FAILED {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the mapping is never taken away, holds nothing but atomic numbers, and every bit pattern is
    // one of them.
    Ok(unsafe { &*address.cast::<Board>() })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn everybody_hears_everybody_round_after_round() {
        let folder = std::env::temp_dir().join(format!("fake-gpu-exchange-{}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        let ranks = 4;
        let rank = |rank: usize| {
            let folder = folder.clone();
            move || {
                let mut group = Group::join(&folder, "test", ranks, rank, rank as u32 % 3).unwrap();
                assert_eq!(group.duplicate(), Some((0, 3, 0)));
                for round in 0..50_usize {
                    group.say(&vec![rank as u8; round * (rank + 1)]).unwrap();
                    let heard = loop {
                        if let Some(heard) = group.heard().unwrap() {
                            break heard;
                        }
                        group.board.listen(group.board.rung());
                    };
                    for (other, bytes) in heard.iter().enumerate() {
                        assert_eq!(bytes, &vec![other as u8; round * (other + 1)], "round {round}");
                    }
                }
                group.meet().unwrap();
            }
        };
        let threads: Vec<_> = (0..ranks).map(|number| std::thread::spawn(rank(number))).collect();
        for thread in threads {
            thread.join().unwrap();
        }
        assert_eq!(std::fs::read_dir(&folder).unwrap().count(), 0, "nothing is left behind");
        std::fs::remove_dir(&folder).unwrap();
    }
}
