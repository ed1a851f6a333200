//! run.jsonl: the result itself. Written before anybody reads it, whole or not at all.
//!
//! One event a line, appended and flushed before the caller goes on; fsync where the caller says a
//! block ended. A line that a crash tore is cut off when the journal is opened again, and the number
//! of bytes lost is told; any other line that cannot be read is an error, because skipping it would
//! change what the run found.

use std::io::{BufRead, BufReader, Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

use crate::error_kind::{Classified, ErrorKind};
use crate::record::{Event, FORMAT, JournalLine};

/// Name of the journal in a run directory.
pub const JOURNAL_FILE: &str = "run.jsonl";
/// Name of the lock file beside it.
const LOCK_FILE: &str = "run.lock";
/// Longest line that is read.
const LINE_BYTES: usize = 16 * 1024 * 1024;

/// Why a journal could not be used.
#[derive(Debug, thiserror::Error)]
pub enum JournalError {
    /// The operating system refused.
    #[error("could not {doing} {path}")]
    Io {
        /// What was tried.
        doing: &'static str,
        /// The file.
        path: PathBuf,
        /// The system's error.
        source: std::io::Error,
    },
    /// Another process works on this run.
    #[error("another nccltune is working on {0}")]
    Locked(PathBuf),
    /// A line cannot be understood.
    #[error("{path}, line {line}: {reason}")]
    Corrupt {
        /// The file.
        path: PathBuf,
        /// Line number from 1.
        line: u64,
        /// What is wrong.
        reason: String,
    },
    /// Something that is not a number was about to be written.
    #[error("a measurement holds a value that is no finite number: {0}")]
    NotFinite(String),
}

impl Classified for JournalError {
    fn kind(&self) -> ErrorKind {
        match self {
            // The first event fails before anything was measured; later ones are the caller's to
            // report as a stop that can be resumed.
            Self::Io { .. } | Self::Locked(_) | Self::Corrupt { .. } => ErrorKind::Usage,
            Self::NotFinite(_) => ErrorKind::Unexpected,
        }
    }

    fn hint(&self) -> Option<String> {
        match self {
            Self::Locked(_) => Some("wait for it, or choose another --out".to_owned()),
            Self::Io { source, .. } if source.kind() == std::io::ErrorKind::StorageFull => {
                Some("free some space; what is on disk so far is complete, and --resume goes on from there".to_owned())
            }
            _ => None,
        }
    }
}

/// An open journal: locked, at its end.
#[derive(Debug)]
pub struct Journal {
    file: fs_err::File,
    path: PathBuf,
    next_sequence: u64,
    // Held for the life of the journal; the lock goes with the descriptor.
    _lock: fs_err::File,
}

/// A journal as it was found.
#[derive(Debug)]
pub struct Reopened {
    /// The journal, ready to append.
    pub journal: Journal,
    /// Everything in it.
    pub lines: Vec<JournalLine>,
    /// Bytes of a torn last line that were cut off.
    pub dropped_bytes: u64,
}

impl Journal {
    /// Starts a journal in an empty run directory.
    pub fn create(directory: &Path) -> Result<Self, JournalError> {
        let lock = lock(directory)?;
        let path = directory.join(JOURNAL_FILE);
        let file = fs_err::OpenOptions::new()
            .append(true)
            .create_new(true)
            .open(&path)
            .map_err(|source| JournalError::Io { doing: "create", path: path.clone(), source })?;
        Ok(Self { file, path, next_sequence: 0, _lock: lock })
    }

    /// Opens a journal that exists, under the lock, cuts off a torn tail, and reads it.
    pub fn reopen(directory: &Path) -> Result<Reopened, JournalError> {
        let lock = lock(directory)?;
        let path = directory.join(JOURNAL_FILE);
        let io = |doing: &'static str| {
            let path = path.clone();
            move |source| JournalError::Io { doing, path, source }
        };
        let mut file = fs_err::OpenOptions::new().read(true).append(true).open(&path).map_err(io("open"))?;
        let length = file.metadata().map_err(io("read"))?.len();
        let whole = length_of_whole_lines(&mut file).map_err(io("read"))?;
        if whole < length {
            file.set_len(whole).map_err(io("cut the torn last line of"))?;
            file.sync_all().map_err(io("write"))?;
        }
        let lines = read_lines(&path)?;
        let next_sequence = lines.len() as u64;
        let journal = Self { file, path, next_sequence, _lock: lock };
        Ok(Reopened { journal, lines, dropped_bytes: length - whole })
    }

    /// Appends one event and hands it to the operating system before returning.
    pub fn append(&mut self, at_s: f64, event: Event) -> Result<JournalLine, JournalError> {
        let line = JournalLine { sequence: self.next_sequence, at_s, event };
        require_finite(&line)?;
        let mut text = serde_json::to_string(&line).map_err(|error| JournalError::NotFinite(error.to_string()))?;
        text.push('\n');
        // One write call per line: a line is torn only by a crash or a full disk, never by two
        // buffers.
        self.file.write_all(text.as_bytes()).and_then(|()| self.file.flush()).map_err(|source| JournalError::Io {
            doing: "write",
            path: self.path.clone(),
            source,
        })?;
        self.next_sequence += 1;
        Ok(line)
    }

    /// Takes back a journal whose run never began, so that nothing stands in the way of the next try.
    pub fn abandon(self) {
        // The directory stays as it is where even this fails; the error that led here is told.
        let _ = fs_err::remove_file(&self.path);
        let _ = fs_err::remove_file(self.path.with_file_name(LOCK_FILE));
    }

    /// Forces everything to disk.
    pub fn sync(&mut self) -> Result<(), JournalError> {
        self.file.sync_data().map_err(|source| JournalError::Io { doing: "sync", path: self.path.clone(), source })
    }
}

/// Reads a journal without locking or changing it; a torn last line is left out.
pub fn read(directory: &Path) -> Result<Vec<JournalLine>, JournalError> {
    read_lines(&directory.join(JOURNAL_FILE))
}

fn lock(directory: &Path) -> Result<fs_err::File, JournalError> {
    let path = directory.join(LOCK_FILE);
    let io = |source| JournalError::Io { doing: "lock", path: path.clone(), source };
    let file = fs_err::OpenOptions::new().create(true).truncate(false).write(true).open(&path).map_err(io)?;
    match file.file().try_lock() {
        Ok(()) => Ok(file),
        Err(std::fs::TryLockError::WouldBlock) => Err(JournalError::Locked(directory.to_owned())),
        Err(std::fs::TryLockError::Error(source)) => Err(io(source)),
    }
}

/// Bytes up to and including the last newline.
fn length_of_whole_lines(file: &mut fs_err::File) -> std::io::Result<u64> {
    file.seek(SeekFrom::Start(0))?;
    let mut reader = BufReader::new(file);
    let (mut seen, mut whole) = (0, 0);
    loop {
        let piece = reader.fill_buf()?;
        let length = piece.len();
        if length == 0 {
            return Ok(whole);
        }
        if let Some(last) = piece.iter().rposition(|byte| *byte == b'\n') {
            whole = seen + last as u64 + 1;
        }
        seen += length as u64;
        reader.consume(length);
    }
}

fn read_lines(path: &Path) -> Result<Vec<JournalLine>, JournalError> {
    let io = |source| JournalError::Io { doing: "read", path: path.to_owned(), source };
    let mut reader = BufReader::new(fs_err::File::open(path).map_err(io)?);
    let mut lines: Vec<JournalLine> = Vec::new();
    let mut text = Vec::new();
    loop {
        text.clear();
        (&mut reader).take(LINE_BYTES as u64 + 1).read_until(b'\n', &mut text).map_err(io)?;
        let number = lines.len() as u64 + 1;
        let corrupt = |reason: String| JournalError::Corrupt { path: path.to_owned(), line: number, reason };
        if text.len() > LINE_BYTES {
            return Err(corrupt(format!("longer than {LINE_BYTES} bytes")));
        }
        if text.last() != Some(&b'\n') {
            // The end, or a torn tail.
            return Ok(lines);
        }
        let line: JournalLine = serde_json::from_slice(&text).map_err(|error| corrupt(error.to_string()))?;
        if line.sequence != number - 1 {
            return Err(corrupt(format!("sequence {} where {} belongs", line.sequence, number - 1)));
        }
        match (&line.event, number) {
            (Event::RunOpened { format, .. }, 1) if *format > FORMAT => {
                return Err(corrupt(format!("format {format}; this version reads up to {FORMAT}")));
            }
            (Event::RunOpened { .. }, 1) => {}
            (_, 1) => return Err(corrupt("a journal begins with run-opened".to_owned())),
            _ => {}
        }
        lines.push(line);
    }
}

/// serde_json would write a NaN as null, which no reader could take back.
fn require_finite(line: &JournalLine) -> Result<(), JournalError> {
    let bad = |what: &str| Err(JournalError::NotFinite(format!("{what} at event {}", line.sequence)));
    if !line.at_s.is_finite() {
        return bad("the time");
    }
    match &line.event {
        Event::CellMeasured(cell) if !cell.duration_s.is_finite() => bad("a duration"),
        Event::CellMeasured(cell)
            if cell.replays_us.is_empty() || cell.replays_us.iter().any(|us| !us.is_finite() || *us <= 0.0) =>
        {
            bad("a timing")
        }
        Event::PassMeasured(pass) => {
            let timings = pass.runs_ms.iter().chain(&pass.without_collectives_ms).chain(&pass.crowded_ms);
            if pass.runs_ms.is_empty() || !timings.into_iter().all(|ms| ms.is_finite() && *ms > 0.0) {
                return bad("a pass");
            }
            if pass.duration_s.is_finite() { Ok(()) } else { bad("a duration") }
        }
        Event::CellFailed { duration_s, .. } | Event::LaunchEnded { duration_s, .. } if !duration_s.is_finite() => {
            bad("a duration")
        }
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::collective::{Collective, DataType};
    use crate::record::{ArmId, CellMeasurement, Effective, PointKey};

    fn opened() -> Event {
        Event::RunOpened { format: 1, tool_version: "test".to_owned(), seed: 7, identity: "x".to_owned() }
    }

    fn measured(us: f64) -> Event {
        Event::CellMeasured(CellMeasurement {
            arm: ArmId("a".to_owned()),
            point: PointKey { collective: Collective::AllReduce, dtype: DataType::Bf16, bytes: 4096, ranks: 2 },
            block: 0,
            launch: 0,
            communicator: 0,
            position: 0,
            collectives_per_replay: 64,
            replays_us: vec![9.876_543_21, us],
            effective: Effective::default(),
            flags: Vec::new(),
            duration_s: 0.1,
        })
    }

    #[test]
    fn what_is_written_reads_back_exactly() {
        let folder = tempfile::tempdir().unwrap();
        let mut journal = Journal::create(folder.path()).unwrap();
        let lines = vec![
            journal.append(0.0, opened()).unwrap(),
            journal.append(1.0 / 3.0, measured(0.1 + 0.2)).unwrap(),
            journal.append(2.0, Event::RunFinished).unwrap(),
        ];
        journal.sync().unwrap();
        assert_eq!(read(folder.path()).unwrap(), lines);
    }

    #[test]
    fn a_torn_tail_is_cut_and_counted_and_the_journal_goes_on() {
        let folder = tempfile::tempdir().unwrap();
        let mut journal = Journal::create(folder.path()).unwrap();
        journal.append(0.0, opened()).unwrap();
        journal.append(1.0, measured(10.0)).unwrap();
        drop(journal);
        let path = folder.path().join(JOURNAL_FILE);
        let mut text = fs_err::read_to_string(&path).unwrap();
        text.push_str("{\"sequence\":2,\"at_");
        fs_err::write(&path, &text).unwrap();

        let reopened = Journal::reopen(folder.path()).unwrap();
        assert_eq!((reopened.lines.len(), reopened.dropped_bytes), (2, 18));
        let mut journal = reopened.journal;
        journal.append(2.0, Event::RunFinished).unwrap();
        drop(journal);
        assert_eq!(read(folder.path()).unwrap().len(), 3);
    }

    #[test]
    fn a_bad_line_in_the_middle_is_an_error_that_names_it() {
        let folder = tempfile::tempdir().unwrap();
        let mut journal = Journal::create(folder.path()).unwrap();
        journal.append(0.0, opened()).unwrap();
        journal.append(1.0, measured(10.0)).unwrap();
        drop(journal);
        let path = folder.path().join(JOURNAL_FILE);
        let text = fs_err::read_to_string(&path).unwrap().replace("cell-measured", "cell-imagined");
        fs_err::write(&path, text).unwrap();
        let error = read(folder.path()).unwrap_err();
        assert!(error.to_string().contains("line 2"), "{error}");
    }

    #[test]
    fn a_second_writer_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        let journal = Journal::create(folder.path()).unwrap();
        assert!(matches!(Journal::reopen(folder.path()), Err(JournalError::Locked(_))));
        drop(journal);
    }

    #[test]
    fn what_is_no_number_never_reaches_the_disk() {
        let folder = tempfile::tempdir().unwrap();
        let mut journal = Journal::create(folder.path()).unwrap();
        journal.append(0.0, opened()).unwrap();
        for bad in [f64::NAN, f64::INFINITY, 0.0, -1.0] {
            assert!(matches!(journal.append(1.0, measured(bad)), Err(JournalError::NotFinite(_))));
        }
        assert_eq!(read(folder.path()).unwrap().len(), 1);
    }
}
