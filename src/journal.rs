//! run.jsonl: the result itself. Written before anybody reads it, whole or not at all.
//!
//! One event a line, appended and flushed before the caller goes on; fsync where the caller says a
//! block ended. A line that a crash tore is cut off when the journal is opened again, and the number
//! of bytes lost is told; any other line that cannot be read is an error, because skipping it would
//! change what the run found.

use std::io::{BufRead, BufReader, Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

use crate::error_kind::{Classified, ErrorKind};
use crate::file_lock;
use crate::knob;
use crate::record::{Event, FORMAT, JournalLine};

/// Name of the journal in a run directory.
pub const JOURNAL_FILE: &str = "run.jsonl";
/// Name of the lock file beside it.
pub const LOCK_FILE: &str = "run.lock";
/// Longest line that is read.
const LINE_BYTES: usize = 16 * 1024 * 1024;
/// Seconds and microseconds beyond this are no measurement.
const MOST_TIME: f64 = 1e12;
/// Blocks, launches and resumes are counted below this, so that counting on cannot overflow.
const MOST_COUNT: u32 = 1 << 30;
/// More paired launches than this were never planned.
const MOST_FINAL_LAUNCHES: u32 = 10_000;

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
        require_regular(&path).map_err(io("open"))?;
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
        if let Some(what) = unsound(&line) {
            return Err(JournalError::NotFinite(format!("{what} at event {}", line.sequence)));
        }
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
    if !file_lock::take(file.file(), file_lock::A_MOMENT).map_err(io)? {
        return Err(JournalError::Locked(directory.to_owned()));
    }
    Ok(file)
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
    require_regular(path).map_err(io)?;
    read_from(BufReader::new(fs_err::File::open(path).map_err(io)?), path)
}

/// Refuses what is there and is no regular file. A run directory may come from anywhere, and a pipe in it that nobody
/// writes to would hang whoever opens it.
pub fn require_regular(path: &Path) -> Result<(), std::io::Error> {
    if fs_err::metadata(path)?.is_file() {
        return Ok(());
    }
    Err(std::io::Error::other(format!("{} is no regular file", path.display())))
}

/// Reads a journal from anywhere; `path` is what errors call it.
pub fn read_from(mut reader: impl BufRead, path: &Path) -> Result<Vec<JournalLine>, JournalError> {
    let io = |source| JournalError::Io { doing: "read", path: path.to_owned(), source };
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
        if let Some(what) = unsound(&line) {
            return Err(corrupt(format!("{what} that no run writes")));
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

/// What in a line no run can have measured or counted. Neither written (serde_json would turn a NaN
/// into null, which no reader could take back) nor read, since a journal may have been edited.
fn unsound(line: &JournalLine) -> Option<&'static str> {
    let no_time = |seconds: f64| !(0.0..=MOST_TIME).contains(&seconds);
    let no_timing = |us: &f64| !(*us > 0.0 && *us <= MOST_TIME);
    let no_count = |count: u32| count >= MOST_COUNT;
    if no_time(line.at_s) {
        return Some("a time");
    }
    let (counts, duration_s): (&[u32], f64) = match &line.event {
        Event::CellMeasured(cell) => {
            if cell.replays_us.is_empty() || cell.replays_us.iter().any(no_timing) {
                return Some("a timing");
            }
            (&[cell.block, cell.launch], cell.duration_s)
        }
        Event::PassMeasured(pass) => {
            let mut timings = pass.runs_ms.iter().chain(&pass.without_collectives_ms).chain(&pass.crowded_ms);
            if pass.runs_ms.is_empty() || timings.any(no_timing) {
                return Some("a pass");
            }
            (&[pass.block, pass.launch], pass.duration_s)
        }
        Event::CellFailed { block, launch, duration_s, .. } => (&[*block, *launch], *duration_s),
        Event::LaunchEnded { launch, duration_s, .. } => (&[*launch], *duration_s),
        Event::OverlapChecked { check, .. } => (&[], check.duration_s),
        Event::GatePassed(gate) => (&[gate.block, gate.launch], gate.duration_s),
        Event::MemoryMeasured { block, launch, .. } => (&[*block, *launch], 0.0),
        // What is in force from there on ends up in the answer's files.
        Event::RepairTried { variable, value, .. }
            if knob::find(variable).is_none() || !value.bytes().all(|byte| byte.is_ascii_alphanumeric()) =>
        {
            return Some("a repair");
        }
        Event::BlockPlanned { block, launches, .. } => {
            if launches.iter().any(|launch| no_count(launch.launch)) {
                return Some("a number of a launch");
            }
            (&[*block], 0.0)
        }
        Event::LaunchStarted { launch, block, .. } => (&[*launch, *block], 0.0),
        Event::BlockEnded { block } => (&[*block], 0.0),
        Event::RunResumed { segment, .. } => (&[*segment], 0.0),
        Event::FinalistsChosen { launches, .. } if *launches > MOST_FINAL_LAUNCHES => {
            return Some("a number of paired launches");
        }
        _ => (&[], 0.0),
    };
    if no_time(duration_s) {
        return Some("a duration");
    }
    counts.iter().any(|count| no_count(*count)).then_some("a number of a block, launch or resume")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::record::CellMeasurement;
    use crate::wording::fixtures;

    fn opened() -> Event {
        Event::RunOpened {
            format: 1,
            tool_version: "test".to_owned(),
            seed: 7,
            identity: "x".to_owned(),
            simulated: false,
        }
    }

    fn measured(us: f64) -> Event {
        Event::CellMeasured(CellMeasurement { replays_us: vec![9.876_543_21, us], ..fixtures::cell("a") })
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

    /// Writes a journal of two lines; where it is.
    fn begun_in(folder: &Path) -> PathBuf {
        let mut journal = Journal::create(folder).unwrap();
        journal.append(0.0, opened()).unwrap();
        journal.append(1.0, measured(10.0)).unwrap();
        folder.join(JOURNAL_FILE)
    }

    #[test]
    fn a_torn_tail_is_cut_and_counted_and_the_journal_goes_on() {
        let folder = tempfile::tempdir().unwrap();
        let path = begun_in(folder.path());
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
        let path = begun_in(folder.path());
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

    #[test]
    fn what_no_run_writes_is_not_read_either() {
        let opened = serde_json::to_string(&JournalLine { sequence: 0, at_s: 0.0, event: opened() }).unwrap();
        let cell = serde_json::to_string(&JournalLine { sequence: 1, at_s: 1.0, event: measured(10.0) }).unwrap();
        let other = |event: &str| format!(r#"{{"sequence":1,"at_s":0.0,"event":{event}}}"#);
        let cases = [
            cell.replace("10.0]", "-10.0]"),
            cell.replace("10.0]", "0.0]"),
            cell.replace("10.0]", "1e308]"),
            cell.replace("9.87654321,10.0]", "]"),
            cell.replace("\"duration_s\":0.1", "\"duration_s\":-1.0"),
            cell.replace("\"at_s\":1.0", "\"at_s\":-1.0"),
            cell.replace("\"block\":0", "\"block\":4294967295"),
            other(r#""block-planned","block":4294967295,"phase":"final","launches":[]"#),
            other(r#""block-planned","block":0,"phase":"final","launches":[{"launch":4294967295,"arms":[]}]"#),
            other(r#""launch-started","launch":4294967295,"block":0,"env":{}"#),
            other(r#""run-resumed","segment":4294967295,"dropped_bytes":0"#),
            other(
                r#""memory-measured","arm":"x","block":4294967295,"launch":0,"device_bytes_per_rank":1,"shared_bytes":1"#,
            ),
            other(r#""repair-tried","variable":"LD_PRELOAD","value":"1","evidence":"""#),
            other(r#""repair-tried","variable":"NCCL_CUMEM_HOST_ENABLE","value":"0\nA=1","evidence":"""#),
            other(r#""finalists-chosen","arms":[],"launches":4294967295,"reason":"""#),
        ];
        for case in cases {
            assert_ne!(case, cell, "nothing was changed");
            let folder = tempfile::tempdir().unwrap();
            fs_err::write(folder.path().join(JOURNAL_FILE), format!("{opened}\n{case}\n")).unwrap();
            let error = read(folder.path()).unwrap_err().to_string();
            assert!(error.contains("line 2") && error.contains("that no run writes"), "{case}: {error}");
        }
    }
}
