//! How tests start the program, and how they look at what it left. No test lives here.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use fs_err as fs;
use nccltune::record::{CellMeasurement, Choice, Event, JournalLine, Manifest};

/// Longest wait for something that should happen at once.
const PATIENCE: Duration = Duration::from_secs(30);
/// Between two looks at something that is waited for.
const LOOK_AGAIN: Duration = Duration::from_millis(2);

/// A working directory of its own, in which commands run.
pub(crate) struct Scene {
    folder: tempfile::TempDir,
}

/// A file system in memory, if there is one with room and nobody wants another place. Hundreds of runs
/// force their journals to disk block by block, which takes a busy disk a minute and shows nothing.
fn memory() -> Option<&'static Path> {
    const ROOM: u64 = 512 * 1024 * 1024;
    let place = Path::new("/dev/shm");
    if std::env::var_os("TMPDIR").is_some() {
        return None;
    }
    let room = nix::sys::statvfs::statvfs(place).ok()?;
    let free = room.blocks_available() * room.fragment_size();
    (free > ROOM && tempfile::tempfile_in(place).is_ok()).then_some(place)
}

/// How a command ended.
#[derive(Debug)]
pub(crate) struct Ended {
    pub(crate) words: String,
    /// None where a signal ended it.
    pub(crate) status: Option<i32>,
    pub(crate) stdout: String,
    pub(crate) stderr: String,
}

impl Ended {
    /// This, if it ended well.
    #[track_caller]
    pub(crate) fn ok(self) -> Self {
        assert_eq!(self.status, Some(0), "{}\n{}", self.words, self.stderr);
        self
    }

    /// Everything a user sees, for a snapshot.
    pub(crate) fn shown(&self) -> String {
        let status = self.status.map_or_else(|| "none".to_owned(), |status| status.to_string());
        let mut text = format!("$ nccltune {}\n--- exit status {status}\n", self.words);
        for (name, stream) in [("stdout", &self.stdout), ("stderr", &self.stderr)] {
            if !stream.is_empty() {
                text.push_str(&format!("--- {name}\n{stream}"));
            }
        }
        text
    }

    /// Standard output as JSON.
    #[track_caller]
    pub(crate) fn json(&self) -> serde_json::Value {
        serde_json::from_str(&self.stdout).unwrap_or_else(|error| panic!("{}: {error}\n{}", self.words, self.stdout))
    }
}

impl Scene {
    pub(crate) fn new() -> Self {
        let folder = match memory() {
            Some(memory) => tempfile::tempdir_in(memory),
            None => tempfile::tempdir(),
        };
        Self { folder: folder.expect("a temporary directory") }
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    pub(crate) fn write(&self, name: &str, text: impl AsRef<[u8]>) {
        let path = self.path(name);
        if let Some(parent) = path.parent() {
            fs::create_dir_all(parent).expect("a folder in a temporary directory");
        }
        fs::write(path, text).expect("a file in a temporary directory");
    }

    #[track_caller]
    pub(crate) fn read(&self, name: &str) -> String {
        fs::read_to_string(self.path(name)).unwrap_or_else(|error| panic!("{error}"))
    }

    /// The program in this directory, with nothing in its environment but PATH, so that neither a
    /// developer's NCCL variables nor a terminal change what comes out.
    pub(crate) fn command(&self, words: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_nccltune"));
        command.args(words);
        self.bare(&mut command);
        command
    }

    /// A shell script in this directory, where the program is `$0`.
    pub(crate) fn shell(&self, script: &str) -> Ended {
        let mut command = Command::new("sh");
        command.args(["-c", script, env!("CARGO_BIN_EXE_nccltune")]);
        self.bare(&mut command);
        end_of(command, script)
    }

    /// Runs the program where no file may grow beyond so many blocks, of 512 or 1,024 bytes as the shell
    /// counts them. It stands in for a full disk: writing fails in the middle of a line.
    pub(crate) fn run_on_full_disk(&self, blocks: u32, line: &str) -> Ended {
        self.shell(&format!("ulimit -f {blocks} && trap '' XFSZ && exec \"$0\" {line}"))
    }

    fn bare(&self, command: &mut Command) {
        command.env_clear().current_dir(self.folder.path()).stdin(Stdio::null());
        command.env("PATH", std::env::var_os("PATH").unwrap_or_else(|| "/usr/bin:/bin".into()));
    }

    /// Runs the program with the words of a line.
    pub(crate) fn run(&self, line: &str) -> Ended {
        self.run_words(&line.split_whitespace().collect::<Vec<_>>())
    }

    /// Runs the program with words that may hold blanks.
    pub(crate) fn run_words(&self, words: &[&str]) -> Ended {
        end_of(self.command(words), &words.join(" "))
    }

    /// Starts the program and leaves it running, with nobody who reads what it says.
    pub(crate) fn start(&self, line: &str) -> Running {
        let mut command = self.command(&line.split_whitespace().collect::<Vec<_>>());
        command.stdout(Stdio::null()).stderr(Stdio::null());
        Running(command.spawn().expect("the program starts"))
    }

    /// Everything in the directory: files with their content, folders with a slash.
    pub(crate) fn contents(&self) -> BTreeMap<String, Vec<u8>> {
        let mut contents = BTreeMap::new();
        let mut folders = vec![self.folder.path().to_owned()];
        while let Some(folder) = folders.pop() {
            for entry in fs::read_dir(&folder).expect("a folder in a temporary directory") {
                let path = entry.expect("an entry").path();
                let name = path.strip_prefix(self.folder.path()).expect("below").display().to_string();
                if path.is_dir() {
                    contents.insert(format!("{name}/"), Vec::new());
                    folders.push(path);
                } else {
                    contents.insert(name, fs::read(&path).expect("a file in a temporary directory"));
                }
            }
        }
        contents
    }

    /// Copies the files of a run directory, those of `names` only.
    pub(crate) fn copy_run(&self, from: &Path, to: &str, names: &[&str]) {
        for name in names {
            self.write(&format!("{to}/{name}"), fs::read(from.join(name)).expect("a file of a run"));
        }
    }

    #[track_caller]
    pub(crate) fn choice(&self, run: &str) -> Choice {
        parse(&self.path(run).join("choice.json"))
    }

    #[track_caller]
    pub(crate) fn journal(&self, run: &str) -> Vec<JournalLine> {
        journal_in(&self.path(run))
    }
}

/// The journal of a run directory anywhere.
#[track_caller]
pub(crate) fn journal_in(run: &Path) -> Vec<JournalLine> {
    nccltune::journal::read(run).unwrap_or_else(|error| panic!("{error}"))
}

/// The choice of a run directory anywhere.
#[track_caller]
pub(crate) fn choice_in(run: &Path) -> Choice {
    parse(&run.join("choice.json"))
}

/// The manifest of a run directory anywhere.
#[track_caller]
pub(crate) fn manifest_in(run: &Path) -> Manifest {
    parse(&run.join("manifest.json"))
}

#[track_caller]
fn parse<T: serde::de::DeserializeOwned>(path: &Path) -> T {
    let text = fs::read_to_string(path).unwrap_or_else(|error| panic!("{error}"));
    serde_json::from_str(&text).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

/// The measurements of a journal.
pub(crate) fn cells(lines: &[JournalLine]) -> impl Iterator<Item = &CellMeasurement> {
    lines.iter().filter_map(|line| match &line.event {
        Event::CellMeasured(cell) => Some(cell),
        _ => None,
    })
}

/// A journal as it stands in a file.
pub(crate) fn journal_text(lines: &[JournalLine]) -> String {
    lines.iter().map(|line| serde_json::to_string(line).expect("an event is JSON") + "\n").collect()
}

/// A run that was recorded on real GPUs.
pub(crate) fn recorded(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("results/recorded").join(name)
}

/// A program that runs. Dropping it ends it.
pub(crate) struct Running(Child);

impl Running {
    /// Sends a signal to this process alone.
    pub(crate) fn signal(&self, signal: nix::sys::signal::Signal) {
        let process = nix::unistd::Pid::from_raw(i32::try_from(self.0.id()).expect("a process id"));
        // It may have ended by itself, and was not waited for yet, so the id is still its own.
        nix::sys::signal::kill(process, signal).expect("a child that was not waited for can be signalled");
    }

    /// Whether it ended.
    pub(crate) fn ended(&mut self) -> Option<ExitStatus> {
        self.0.try_wait().expect("a child can be waited for")
    }

    /// Waits until it ends; fails the test if it does not.
    #[track_caller]
    pub(crate) fn wait(&mut self) -> ExitStatus {
        wait_for("the program ends", || self.ended())
    }
}

impl From<Child> for Running {
    fn from(child: Child) -> Self {
        Self(child)
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        // It may have ended already, which is what tests hope for.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Looks until something is there; fails the test if that takes too long.
#[track_caller]
pub(crate) fn wait_for<T>(what: &str, look: impl FnMut() -> Option<T>) -> T {
    wait_at_most(PATIENCE, what, look)
}

/// The same with another limit.
#[track_caller]
pub(crate) fn wait_at_most<T>(limit: Duration, what: &str, mut look: impl FnMut() -> Option<T>) -> T {
    let start = Instant::now();
    loop {
        if let Some(seen) = look() {
            return seen;
        }
        assert!(start.elapsed() < limit, "waited {limit:?} until {what}");
        std::thread::sleep(LOOK_AGAIN);
    }
}

fn end_of(mut command: Command, words: &str) -> Ended {
    let output = command.output().expect("the program starts");
    let text = |bytes: Vec<u8>| String::from_utf8(bytes).expect("the program writes UTF-8");
    Ended {
        words: words.to_owned(),
        status: output.status.code(),
        stdout: text(output.stdout),
        stderr: text(output.stderr),
    }
}

/// Compares with a file of tests/it/snapshots. What differs from day to day or from release to
/// release is replaced first.
#[track_caller]
pub(crate) fn assert_shown(name: &str, text: &str) {
    let mut settings = insta::Settings::clone_current();
    settings.set_prepend_module_to_snapshot(false);
    settings.set_omit_expression(true);
    settings.add_filter(r"\d{4}-\d{2}-\d{2}T\d{2}:\d{2}:\d{2}Z", "[date]");
    settings.add_filter(r"nccltune \d+\.\d+\.\d+", "nccltune [version]");
    settings.bind(|| insta::assert_snapshot!(name, text));
}

/// JSON with its values replaced by their types, for output whose figures have more digits than a
/// snapshot should hold. Of an array, the first element stands for all.
pub(crate) fn shape(value: &serde_json::Value) -> serde_json::Value {
    use serde_json::Value;
    match value {
        Value::Null => "null".into(),
        Value::Bool(_) => "bool".into(),
        Value::Number(_) => "number".into(),
        Value::String(_) => "string".into(),
        Value::Array(values) => Value::Array(values.first().map(shape).into_iter().collect()),
        Value::Object(fields) => {
            Value::Object(fields.iter().map(|(name, value)| (name.clone(), shape(value))).collect())
        }
    }
}

/// Whether this machine has an NVIDIA driver; says so where it does, since a test is then skipped.
#[expect(clippy::print_stderr, reason = "a test that is skipped says so")]
pub(crate) fn skipped_beside_a_driver(test: &str) -> bool {
    let there = Path::new("/dev/nvidiactl").exists();
    if there {
        eprintln!("{test} is skipped: it is about machines without an NVIDIA driver, and this one has one");
    }
    there
}
