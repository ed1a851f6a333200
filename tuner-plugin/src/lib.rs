//! A tuner plugin for NCCL: algorithm, protocol and channels by the size of a message.
//!
//! NCCL loads it into the user's server (`NCCL_TUNER_PLUGIN`), so it is small, allocates and locks only while a
//! communicator is made, and never lets a panic into NCCL. It chooses from the table that `NCCL_TUNER_CONFIG_FILE`
//! names. Inside nccltune's own workers it reads its choice from a mapped file instead.
//!
//! - Where no row matches, or NCCL cannot run what the row says, NCCL's own choice stands: a cost below zero is never
//!   overwritten.
//! - A choice depends on collective, size, ranks and nodes and on nothing else, since ranks that choose differently
//!   hang.
//! - A table that cannot be read ends the making of the communicator, with file, line and reason in NCCL's log: a
//!   server must not start half tuned. NCCL itself ignores a plugin that is missing.

mod control;
mod log;
pub mod table;

use std::ffi::{c_int, c_void};
use std::fs::File;
use std::io::Read as _;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};

use nccl_abi::table::{BYTES_MAX, FILE_VARIABLE};
use nccl_abi::{
    INTERNAL_ERROR, INVALID_ARGUMENT, INVALID_USAGE, Logger, NvlDomainInfo, PROTOCOLS, SUCCESS, Status, TunerConstants,
    TunerV2, TunerV3, TunerV4, TunerV5, TunerV6,
};

use control::Control;
use log::Log;
use table::{Decision, Lookup, Table};

/// The plugin's name in NCCL's log.
const NAME: &std::ffi::CStr = c"nccltune";
/// By this text a file is known for a plugin of this project, and of which version, without loading it.
const MARK: &str = concat!("nccltune tuner plugin ", env!("CARGO_PKG_VERSION"), "\0");
/// See `MARK`; the symbol keeps it in the library.
// SAFETY: the name is this project's.
#[unsafe(no_mangle)]
#[allow(non_upper_case_globals, reason = "a symbol is looked for by this name")]
pub static nccltune_tuner_plugin: [u8; MARK.len()] = *MARK.as_bytes().first_chunk().unwrap();
/// Algorithms that every communicator without a network has: v2 of the interface does not say what NCCL can run.
const ALWAYS_THERE: [usize; 2] = [0, 1];
/// Protocols likewise: LL and Simple.
const PROTOCOLS_ALWAYS_THERE: [usize; 2] = [0, 2];

/// What a communicator's choices come from.
enum Context {
    Table(Lookup),
    Control(Control),
    /// Panics when asked, to show that NCCL does not see it.
    #[cfg(test)]
    Panic,
}

impl Context {
    fn decide(&self, collective: usize, bytes: u64) -> Option<Decision> {
        match self {
            Self::Table(lookup) => lookup.decide(collective, bytes),
            Self::Control(control) => control.decide(collective),
            #[cfg(test)]
            Self::Panic => panic!("asked to"),
        }
    }

    fn answer(&self, bytes: u64, asked: Option<bool>, table: &[f32], algorithms: usize) {
        if let Self::Control(control) = self {
            control.answer(bytes, asked, table, algorithms);
        }
    }
}

/// Where the plugin looks, read once per communicator.
struct Sources {
    table: Option<PathBuf>,
    control: Option<PathBuf>,
}

impl Sources {
    #[expect(clippy::disallowed_methods, reason = "this is where the server's environment is read")]
    fn of_environment() -> Self {
        let path = |name| std::env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
        Self { table: path(FILE_VARIABLE), control: path(nccl_abi::control::FILE_VARIABLE) }
    }
}

fn open_file(path: &Path, is_written: bool) -> Result<File, String> {
    // A pipe or a terminal in the place of a file must not keep a server waiting: to open one is to wait.
    if path.metadata().is_ok_and(|metadata| !metadata.is_file()) {
        return Err("not a file".to_owned());
    }
    let file = File::options().read(true).write(is_written).open(path).map_err(|error| error.to_string())?;
    match file.metadata() {
        Ok(metadata) if metadata.is_file() => Ok(file),
        Ok(_) => Err("not a file".to_owned()),
        Err(error) => Err(error.to_string()),
    }
}

fn read_table(path: &Path) -> Result<Table, String> {
    let mut bytes = Vec::new();
    open_file(path, false)?.take(BYTES_MAX + 1).read_to_end(&mut bytes).map_err(|error| error.to_string())?;
    let table = Table::parse(&bytes).map_err(|error| error.to_string())?;
    if !table.is_named_so(path) {
        return Err(format!(
            "was changed after it was named: its SHA-256 is {}. Tables are never edited; make a new one",
            table.sha256
        ));
    }
    Ok(table)
}

fn make(sources: &Sources, ranks: usize, nodes: usize, log: &Log) -> Result<Context, String> {
    if let Some(path) = &sources.control {
        let control = open_file(path, true).and_then(|file| Control::open(&file));
        return control.map(Context::Control).map_err(|reason| format!("{}: {reason}", path.display()));
    }
    let Some(path) = &sources.table else {
        return Err(format!(
            "{FILE_VARIABLE} names no table: set it, or take NCCL_TUNER_PLUGIN out of the environment"
        ));
    };
    let table = read_table(path).map_err(|reason| format!("{}: {reason}", path.display()))?;
    let lookup = table.of_communicator(ranks as u64, nodes as u64);
    let rows = lookup.rows();
    let said = format!(
        "table {} from {}: {rows} of {} rows are for {ranks} ranks on {nodes} nodes",
        table.sha256,
        path.display(),
        table.rows.len()
    );
    if rows == 0 && !table.rows.is_empty() {
        log.warn(&format!("{said}; this communicator keeps NCCL's own choices"));
    } else {
        log.info(&said);
    }
    Ok(Context::Table(lookup))
}

fn begin(ranks: usize, nodes: usize, logger: Option<Logger>, context: *mut *mut c_void) -> Status {
    let log = Log::new(logger);
    let made = catch_unwind(AssertUnwindSafe(|| make(&Sources::of_environment(), ranks, nodes, &log)));
    match made {
        _ if context.is_null() => INVALID_ARGUMENT,
        Ok(Ok(made)) => {
            // SAFETY: NCCL hands the place for the context, checked above.
            unsafe { context.write(Box::into_raw(Box::new(made)).cast()) };
            SUCCESS
        }
        Ok(Err(reason)) => {
            log.warn(&reason);
            INVALID_USAGE
        }
        Err(_) => INTERNAL_ERROR,
    }
}

// SAFETY: NCCL calls it with the arguments of the interface; what it points to is looked at only where that is said.
unsafe extern "C" fn init_v2(ranks: usize, nodes: usize, logger: Option<Logger>, context: *mut *mut c_void) -> Status {
    begin(ranks, nodes, logger, context)
}

// SAFETY: NCCL calls it with the arguments of the interface; what it points to is looked at only where that is said.
unsafe extern "C" fn init_v5(
    context: *mut *mut c_void,
    _communicator: u64,
    ranks: usize,
    nodes: usize,
    logger: Option<Logger>,
    _domains: *mut NvlDomainInfo,
    _constants: *mut TunerConstants,
) -> Status {
    begin(ranks, nodes, logger, context)
}

// SAFETY: NCCL calls it with the arguments of the interface; what it points to is looked at only where that is said.
unsafe extern "C" fn finish(context: *mut c_void) -> Status {
    if !context.is_null() {
        // SAFETY: `begin` made it, and NCCL gives it back once.
        let context = unsafe { Box::from_raw(context.cast::<Context>()) };
        if catch_unwind(AssertUnwindSafe(|| drop(context))).is_err() {
            return INTERNAL_ERROR;
        }
    }
    SUCCESS
}

/// The decision, without allocation or lock. What goes wrong here leaves NCCL's choice: an error would fail the
/// collective.
fn choose(
    context: *mut c_void,
    collective: c_int,
    bytes: usize,
    table: *mut f32,
    (algorithms, protocols): (c_int, c_int),
    channels: *mut c_int,
) -> Status {
    let (Ok(collective), Ok(algorithms), Ok(protocols)) =
        (usize::try_from(collective), usize::try_from(algorithms), usize::try_from(protocols))
    else {
        return SUCCESS;
    };
    if context.is_null() || table.is_null() || channels.is_null() || protocols != PROTOCOLS.len() || algorithms > 64 {
        return SUCCESS;
    }
    // SAFETY: `begin` made the context, and NCCL gives it back to `finish` only after the last call.
    let context = unsafe { &*context.cast::<Context>() };
    // SAFETY: NCCL's table is contiguous, in spite of its type, and holds algorithms times protocols numbers.
    let table = unsafe { std::slice::from_raw_parts_mut(table, algorithms * protocols) };
    let decided = catch_unwind(AssertUnwindSafe(|| {
        let decision = context.decide(collective, bytes as u64);
        let cell = decision
            .filter(|decision| decision.protocol < protocols && decision.algorithm < algorithms)
            .map(|decision| decision.algorithm * protocols + decision.protocol);
        // Below zero NCCL cannot run it; a number that is none compares as false.
        let usable = cell.filter(|cell| table[*cell] >= 0.0);
        context.answer(bytes as u64, decision.map(|_| usable.is_some()), table, algorithms);
        decision.zip(usable)
    }));
    if let Ok(Some((decision, cell))) = decided {
        table[cell] = 0.0;
        if let Ok(wanted @ 1..) = c_int::try_from(decision.channels) {
            // SAFETY: NCCL hands the place for the channels, checked above.
            unsafe { channels.write(wanted) };
        }
    }
    SUCCESS
}

// SAFETY: NCCL calls it with the arguments of the interface; what it points to is looked at only where that is said.
unsafe extern "C" fn choose_v2(
    context: *mut c_void,
    collective: c_int,
    bytes: usize,
    _collnet: c_int,
    _nvls: c_int,
    _operations: c_int,
    algorithm: *mut c_int,
    protocol: *mut c_int,
    channels: *mut c_int,
) -> Status {
    if context.is_null() || algorithm.is_null() || protocol.is_null() || channels.is_null() {
        return SUCCESS;
    }
    let Ok(collective) = usize::try_from(collective) else { return SUCCESS };
    // SAFETY: as in `choose`.
    let context = unsafe { &*context.cast::<Context>() };
    let decided = catch_unwind(AssertUnwindSafe(|| {
        let decision = context.decide(collective, bytes as u64);
        // This version does not say what NCCL can run, so only what it always can is chosen.
        let usable = decision.filter(|decision| {
            ALWAYS_THERE.contains(&decision.algorithm) && PROTOCOLS_ALWAYS_THERE.contains(&decision.protocol)
        });
        context.answer(bytes as u64, decision.map(|_| usable.is_some()), &[], 0);
        usable
    }));
    if let Ok(Some(decision)) = decided
        && let (Ok(chosen), Ok(with)) = (c_int::try_from(decision.algorithm), c_int::try_from(decision.protocol))
    {
        // SAFETY: NCCL hands the places, checked above.
        unsafe {
            algorithm.write(chosen);
            protocol.write(with);
            if let Ok(wanted @ 1..) = c_int::try_from(decision.channels) {
                channels.write(wanted);
            }
        }
    }
    SUCCESS
}

// SAFETY: NCCL calls it with the arguments of the interface; what it points to is looked at only where that is said.
unsafe extern "C" fn choose_v3(
    context: *mut c_void,
    collective: c_int,
    bytes: usize,
    _operations: c_int,
    table: *mut *mut f32,
    algorithms: c_int,
    protocols: c_int,
    channels: *mut c_int,
) -> Status {
    choose(context, collective, bytes, table.cast(), (algorithms, protocols), channels)
}

// SAFETY: NCCL calls it with the arguments of the interface; what it points to is looked at only where that is said.
unsafe extern "C" fn choose_v4(
    context: *mut c_void,
    collective: c_int,
    bytes: usize,
    _operations: c_int,
    table: *mut *mut f32,
    algorithms: c_int,
    protocols: c_int,
    _registered: c_int,
    channels: *mut c_int,
) -> Status {
    choose(context, collective, bytes, table.cast(), (algorithms, protocols), channels)
}

/// A table of functions that threads may share: it is never written to.
#[repr(transparent)]
pub struct Export<T>(pub T);

// SAFETY: the tables are constants, and the name they point to is one.
unsafe impl<T> Sync for Export<T> {}

macro_rules! export {
    ($symbol:ident, $table:ty, $value:expr, $releases:literal) => {
        #[doc = $releases]
        // SAFETY: the symbol is NCCL's name for a table of this layout, and no other library of a server has it.
        #[unsafe(no_mangle)]
        #[allow(non_upper_case_globals, reason = "the symbol's name is part of the interface")]
        pub static $symbol: Export<$table> = Export($value);
    };
}

export!(
    ncclTunerPlugin_v2,
    TunerV2,
    TunerV2 { name: NAME.as_ptr(), init: init_v2, choose: choose_v2, destroy: finish },
    "What NCCL 2.21 looks for."
);
export!(
    ncclTunerPlugin_v3,
    TunerV3,
    TunerV3 { name: NAME.as_ptr(), init: init_v2, choose: choose_v3, destroy: finish },
    "What NCCL 2.22 and 2.23 look for."
);
export!(
    ncclTunerPlugin_v4,
    TunerV4,
    TunerV4 { name: NAME.as_ptr(), init: init_v2, choose: choose_v4, destroy: finish },
    "What NCCL 2.24 to 2.27 look for."
);
export!(
    ncclTunerPlugin_v5,
    TunerV5,
    TunerV5 { name: NAME.as_ptr(), init: init_v5, choose: choose_v4, finalize: finish },
    "What NCCL 2.28 and 2.29 look for."
);
export!(
    ncclTunerPlugin_v6,
    TunerV6,
    TunerV6 { name: NAME.as_ptr(), init: init_v5, choose: choose_v4, finalize: finish, chunk_size: None },
    "What NCCL 2.30 looks for. Chunk sizes stay NCCL's own."
);

#[cfg(test)]
mod tests {
    use super::*;

    fn ask(context: &Context, bytes: usize, cost: f32) -> (Status, [f32; 21], c_int) {
        let mut table = [cost; 21];
        let mut channels = 0;
        let context = std::ptr::from_ref(context).cast_mut().cast();
        // SAFETY: the table has as many cells as is said, and everything outlives the call.
        let status = unsafe {
            (ncclTunerPlugin_v5.0.choose)(context, 4, bytes, 1, table.as_mut_ptr().cast(), 7, 3, 1, &raw mut channels)
        };
        (status, table, channels)
    }

    #[test]
    fn a_panic_stays_inside() {
        let (status, table, channels) = ask(&Context::Panic, 1, 5.0);
        assert_eq!((status, channels), (SUCCESS, 0));
        assert!(table.iter().all(|cost| (cost - 5.0).abs() < f32::EPSILON));
        let (mut algorithm, mut protocol, mut channels) = (-1, -1, -1);
        let context = std::ptr::from_ref(&Context::Panic).cast_mut().cast();
        // SAFETY: everything outlives the call.
        let status =
            unsafe { choose_v2(context, 4, 1, 0, 0, 1, &raw mut algorithm, &raw mut protocol, &raw mut channels) };
        assert_eq!((status, algorithm, protocol, channels), (SUCCESS, -1, -1, -1));
    }

    #[test]
    fn what_nccl_cannot_run_is_never_chosen() {
        let rows = b"allreduce,0,1000,ring,ll128,8,1,2\nallreduce,1001,2000,pat,ll,1,1,2\n";
        // There is no PAT for all-reduce, so the second row is refused as it is read.
        assert!(Table::parse(rows).is_err());
        let table = Table::parse(b"allreduce,0,1000,ring,ll128,8,1,2\n").unwrap();
        let context = Context::Table(table.of_communicator(2, 1));
        let (status, table, channels) = ask(&context, 10, -1.0);
        assert_eq!((status, channels), (SUCCESS, 0));
        assert!(table.iter().all(|cost| *cost < 0.0));
        let (_, table, channels) = ask(&context, 10, 7.0);
        assert!(table[4].abs() < f32::EPSILON && channels == 8);
        assert_eq!(table.iter().filter(|cost| **cost > 6.0).count(), 20);
        let (_, table, channels) = ask(&context, 10, f32::NAN);
        assert!(table[4].is_nan() && channels == 0);
        let (_, table, _) = ask(&context, 1001, 7.0);
        assert!(table[4] > 6.0, "no row, no change");
    }

    #[test]
    fn without_a_table_no_communicator_is_made() {
        let log = Log::new(None);
        let none = Sources { table: None, control: None };
        assert!(make(&none, 2, 1, &log).err().unwrap().contains("names no table"));
        let folder = tempfile::tempdir().unwrap();
        let missing = Sources { table: Some(folder.path().join("x.csv")), control: None };
        assert!(make(&missing, 2, 1, &log).err().unwrap().contains("x.csv"));
        let itself = Sources { table: Some(folder.path().to_owned()), control: None };
        assert!(make(&itself, 2, 1, &log).err().unwrap().contains("not a file"));
        let short = folder.path().join("control");
        tempfile::NamedTempFile::new_in(folder.path()).unwrap().persist(&short).unwrap();
        let control = Sources { table: None, control: Some(short) };
        assert!(make(&control, 2, 1, &log).err().unwrap().contains("0 bytes"));
    }
}
