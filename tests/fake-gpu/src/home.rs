//! Where the library was loaded from, and what is kept there: the scenario, and the state that must
//! outlive processes.

use std::ffi::CStr;
use std::fs::{self, File, OpenOptions};
use std::io::{Read, Seek, SeekFrom, Write};
use std::os::fd::AsRawFd;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use crate::scenario::Scenario;

/// The name of the scenario's file, beside the library.
pub(crate) const SCENARIO: &str = "scenario.toml";

/// A folder with a scenario and its state.
pub(crate) struct Home {
    /// The scenario; where it cannot be read, why. Every call then fails, and says so once.
    pub(crate) scenario: Result<Scenario, String>,
    /// Where state is kept.
    pub(crate) state: PathBuf,
    /// What the GPUs' identities derive from.
    pub(crate) machine: String,
}

/// The home of this process.
pub(crate) fn home() -> &'static Home {
    static HOME: OnceLock<Home> = OnceLock::new();
    HOME.get_or_init(Home::find)
}

impl Home {
    fn find() -> Self {
        let folder = loaded_from().filter(|folder| folder.join(SCENARIO).is_file()).or_else(beside_a_link);
        let (scenario, place, state) = if let Some(folder) = folder {
            let text = fs::read_to_string(folder.join(SCENARIO)).map_err(|error| error.to_string());
            let state = folder.join("state");
            (text.and_then(|text| Scenario::parse(&text)), folder.display().to_string(), state)
        } else {
            // SAFETY: it takes nothing and returns a number.
            let user = unsafe { libc::getuid() };
            let state = std::env::temp_dir().join(format!("nccltune-fake-gpu-{user}"));
            (Ok(Scenario::default()), "no scenario".to_owned(), state)
        };
        let machine = scenario.as_ref().ok().and_then(|scenario| scenario.machine.clone()).unwrap_or(place);
        // Where this fails, so does the first file that is written there, and says it.
        let _ = fs::create_dir_all(&state);
        Self { scenario, state, machine }
    }

    /// A file of the state.
    pub(crate) fn file(&self, name: &str) -> PathBuf {
        self.state.join(name)
    }

    /// Launches so far: sets of processes that made a communicator.
    pub(crate) fn launches(&self) -> u64 {
        fs::read_to_string(self.file("launches")).ok().and_then(|text| text.trim().parse().ok()).unwrap_or(0)
    }

    /// Counts one more launch, and returns its number.
    pub(crate) fn next_launch(&self) -> std::io::Result<u64> {
        let mut file =
            OpenOptions::new().create(true).truncate(false).read(true).write(true).open(self.file("launches"))?;
        lock(&file)?;
        let mut text = String::new();
        file.read_to_string(&mut text)?;
        let next = text.trim().parse::<u64>().unwrap_or(0) + 1;
        file.seek(SeekFrom::Start(0))?;
        file.write_all(next.to_string().as_bytes())?;
        Ok(next)
    }
}

/// Locks a file until it is closed.
fn lock(file: &File) -> std::io::Result<()> {
    // SAFETY: the descriptor is open as long as the file lives.
    if unsafe { libc::flock(file.as_raw_fd(), libc::LOCK_EX) } == 0 {
        Ok(())
    } else {
        Err(std::io::Error::last_os_error())
    }
}

/// The path under which the loader knows this library: the name it was asked for, links not followed.
fn loaded_as() -> Option<PathBuf> {
    // SAFETY: all zeros is a value of this struct.
    let mut information: libc::Dl_info = unsafe { std::mem::zeroed() };
    let address = std::ptr::from_ref(&MARKER).cast();
    // SAFETY: the address lies in this library, and the struct is alive.
    let found = unsafe { libc::dladdr(address, &raw mut information) };
    if found == 0 || information.dli_fname.is_null() {
        return None;
    }
    // SAFETY: the loader keeps this string as long as the library is loaded.
    let name = unsafe { CStr::from_ptr(information.dli_fname) };
    Some(PathBuf::from(name.to_string_lossy().into_owned()))
}

static MARKER: u8 = 0;

fn loaded_from() -> Option<PathBuf> {
    loaded_as()?.parent().map(Path::to_owned)
}

/// A folder of the loader's search path in which libcuda.so.1 is this very file. A program that resolves links
/// before it loads a library loads it from elsewhere.
fn beside_a_link() -> Option<PathBuf> {
    let own = fs::metadata(loaded_as()?).ok()?;
    let path = std::env::var("LD_LIBRARY_PATH").ok()?;
    path.split(':').filter(|folder| !folder.is_empty()).map(PathBuf::from).find(|folder| {
        let same = |other: fs::Metadata| (other.dev(), other.ino()) == (own.dev(), own.ino());
        folder.join(SCENARIO).is_file() && fs::metadata(folder.join("libcuda.so.1")).is_ok_and(same)
    })
}
