//! Tuner plugins, as NCCL loads and asks them: versions 2 to 6 of the interface, and failing open.

use std::ffi::{CStr, CString, c_char, c_int, c_ulong, c_void};

use crate::engine::engine;
use crate::function::Function;
use crate::log::Subject;

type Logger = extern "C" fn(c_int, c_ulong, *const c_char, c_int, *const c_char);
type InitV2 = unsafe extern "C" fn(usize, usize, Logger, *mut *mut c_void) -> c_int;
type End = unsafe extern "C" fn(*mut c_void) -> c_int;
type GetCollInfoV2 =
    unsafe extern "C" fn(*mut c_void, c_int, usize, c_int, c_int, c_int, *mut c_int, *mut c_int, *mut c_int) -> c_int;
type GetCollInfoV3 =
    unsafe extern "C" fn(*mut c_void, c_int, usize, c_int, *mut *mut f32, c_int, c_int, *mut c_int) -> c_int;
type GetCollInfo =
    unsafe extern "C" fn(*mut c_void, c_int, usize, c_int, *mut *mut f32, c_int, c_int, c_int, *mut c_int) -> c_int;

/// ncclTuner_v2_t.
#[repr(C)]
struct TunerV2 {
    name: *const c_char,
    init: InitV2,
    get_coll_info: GetCollInfoV2,
    destroy: End,
}

/// ncclTuner_v3_t.
#[repr(C)]
struct TunerV3 {
    name: *const c_char,
    init: InitV2,
    get_coll_info: GetCollInfoV3,
    destroy: End,
}

/// How a plugin is asked, by version of the interface.
#[derive(Clone, Copy)]
enum Ask {
    V2(GetCollInfoV2),
    V3(GetCollInfoV3),
    V4(GetCollInfo),
}

/// ncclTuner_v4_t.
#[repr(C)]
struct TunerV4 {
    name: *const c_char,
    init: unsafe extern "C" fn(usize, usize, Logger, *mut *mut c_void) -> c_int,
    get_coll_info: GetCollInfo,
    destroy: unsafe extern "C" fn(*mut c_void) -> c_int,
}

/// ncclTuner_v5_t.
#[repr(C)]
struct TunerV5 {
    name: *const c_char,
    init: unsafe extern "C" fn(*mut *mut c_void, u64, usize, usize, Logger, *mut c_void, *mut c_void) -> c_int,
    get_coll_info: GetCollInfo,
    finalize: unsafe extern "C" fn(*mut c_void) -> c_int,
}

/// A communicator's use of a plugin.
pub(crate) struct Plugin {
    context: *mut c_void,
    ask: Ask,
    destroy: unsafe extern "C" fn(*mut c_void) -> c_int,
}

// SAFETY: NCCL calls a communicator's plugin from one thread at a time, as does the engine's lock.
unsafe impl Send for Plugin {}

/// What a process knows about plugins.
#[derive(Default)]
pub(crate) struct Plugins {
    /// A load that failed is not tried again.
    has_failed: bool,
    library: Option<usize>,
    /// Communicators that use it.
    users: usize,
}

impl Plugins {
    /// One communicator fewer: the library goes with the last of them, and the next names one anew.
    pub(crate) fn leave(&mut self) {
        self.users -= 1;
        if let Some(library) = self.library.take_if(|_| self.users == 0) {
            // SAFETY: nobody holds anything of the library any more; it was opened once.
            unsafe { libc::dlclose(library as *mut c_void) };
        }
    }
}

extern "C" fn log(_level: c_int, _flags: c_ulong, _file: *const c_char, _line: c_int, format: *const c_char) {
    // A format with arguments cannot be put together here; it is written as it stands. The engine may be
    // locked by the call that leads here, and a line is not worth a standstill.
    if let (Some(text), Some(mut engine)) = (crate::exports::text_of(format), crate::engine::try_engine()) {
        engine.nccl.note(Subject::TUNING, &text);
    }
}

/// The plugin that the variable names, or NCCL's own library of that purpose, where there is one. What is
/// wrong with it is in the log, and NCCL goes on without; only what this stand-in cannot play is an error.
pub(crate) fn load(version: i32, variable: Option<&str>, id: u64, ranks: usize) -> Result<Option<Plugin>, i32> {
    if engine().nccl.plugins.has_failed || variable.is_some_and(|name| name.eq_ignore_ascii_case("none")) {
        engine().nccl.plugins.has_failed = true;
        return Ok(None);
    }
    let names = match variable {
        None | Some("") => vec!["libnccl-tuner.so".to_owned()],
        Some(name) if name.contains('/') => vec![name.to_owned()],
        Some(name) => vec![name.to_owned(), format!("libnccl-tuner-{name}.so")],
    };
    let known = engine().nccl.plugins.library;
    let library = known.or_else(|| names.iter().find_map(|name| open(name)));
    let Some(library) = library else {
        note(&format!("TUNER/Plugin: Could not find: {}", names.join(" ")));
        engine().nccl.plugins.has_failed = true;
        return Ok(None);
    };
    engine().nccl.plugins.library = Some(library);
    let mut context = std::ptr::null_mut();
    // Newest first, from the first release that looks for each.
    let versions = [
        (23_000, c"ncclTunerPlugin_v6", 6),
        (22_800, c"ncclTunerPlugin_v5", 5),
        (22_400, c"ncclTunerPlugin_v4", 4),
        (22_200, c"ncclTunerPlugin_v3", 3),
        (22_100, c"ncclTunerPlugin_v2", 2),
    ];
    let found = versions
        .into_iter()
        .filter(|(since, _, _)| version >= *since)
        .find_map(|(_, name, number)| Some((symbol(library, name)?, number)));
    let Some((table, number)) = found else {
        note("TUNER/Plugin: Failed to find ncclTunerPlugin symbol, using internal tuner instead.");
        engine().nccl.plugins.has_failed = true;
        return Ok(None);
    };
    let (name, status, plugin) = if number >= 5 {
        // Version 6 adds a field at the end that is not asked for here.
        // SAFETY: a symbol of this name is a table of this layout, and its library is loaded.
        let table = unsafe { &*table.cast::<TunerV5>() };
        let mut domains: [c_int; 3] = [1, ranks as c_int, ranks as c_int];
        let mut constants = [0.0_f64; 7 * 3 + 3 * 7 * 3 + 5 * 4 * 3];
        // SAFETY: the arguments are those of version 5, and outlive the call.
        let status = unsafe {
            (table.init)(
                &raw mut context,
                id,
                ranks,
                1,
                log,
                domains.as_mut_ptr().cast(),
                constants.as_mut_ptr().cast(),
            )
        };
        (table.name, status, Plugin { context, ask: Ask::V4(table.get_coll_info), destroy: table.finalize })
    } else if number == 4 {
        // SAFETY: as above, with the layout of version 4.
        let table = unsafe { &*table.cast::<TunerV4>() };
        // SAFETY: the arguments are those of version 4.
        let status = unsafe { (table.init)(ranks, 1, log, &raw mut context) };
        (table.name, status, Plugin { context, ask: Ask::V4(table.get_coll_info), destroy: table.destroy })
    } else if number == 3 {
        // SAFETY: as above, with the layout of version 3.
        let table = unsafe { &*table.cast::<TunerV3>() };
        // SAFETY: the arguments are those of version 3.
        let status = unsafe { (table.init)(ranks, 1, log, &raw mut context) };
        (table.name, status, Plugin { context, ask: Ask::V3(table.get_coll_info), destroy: table.destroy })
    } else {
        // SAFETY: as above, with the layout of version 2.
        let table = unsafe { &*table.cast::<TunerV2>() };
        // SAFETY: the arguments are those of version 2.
        let status = unsafe { (table.init)(ranks, 1, log, &raw mut context) };
        (table.name, status, Plugin { context, ask: Ask::V2(table.get_coll_info), destroy: table.destroy })
    };
    if status != 0 {
        return Err(status);
    }
    let name = crate::exports::text_of(name).unwrap_or_default();
    note(&format!("TUNER/Plugin: Using {name} (v{number})"));
    engine().nccl.plugins.users += 1;
    Ok(Some(plugin))
}

fn note(line: &str) {
    engine().nccl.note(Subject::INIT, line);
}

impl Plugin {
    /// Lets the plugin change a table of expected times. Returns the channels it asks for, if any.
    pub(crate) fn ask(
        &self,
        function: Function,
        bytes: u64,
        is_captured: bool,
        table: &mut [[f32; 3]; 7],
    ) -> Result<Option<u32>, i32> {
        let before = *table;
        let mut channels = 0;
        let (function, bytes) = (function as c_int, bytes as usize);
        let status = match self.ask {
            // SAFETY: the table is contiguous, as plugins take it in spite of its type; all outlive the call.
            Ask::V4(ask) => unsafe {
                let captured = c_int::from(is_captured);
                ask(self.context, function, bytes, 1, table.as_mut_ptr().cast(), 7, 3, captured, &raw mut channels)
            },
            // SAFETY: as above.
            Ask::V3(ask) => unsafe {
                ask(self.context, function, bytes, 1, table.as_mut_ptr().cast(), 7, 3, &raw mut channels)
            },
            Ask::V2(ask) => {
                let (mut algorithm, mut protocol) = (-1, -1);
                // SAFETY: all that is pointed to outlives the call.
                let status = unsafe {
                    let (algorithm, protocol) = (&raw mut algorithm, &raw mut protocol);
                    ask(self.context, function, bytes, 0, 0, 1, algorithm, protocol, &raw mut channels)
                };
                // What it names is forced, unless NCCL cannot run it.
                let chosen = usize::try_from(algorithm).ok().zip(usize::try_from(protocol).ok());
                let cell = chosen.and_then(|(row, column)| table.get_mut(row)?.get_mut(column));
                if let Some(cell) = cell.filter(|cell| **cell >= 0.0) {
                    *cell = 0.0;
                }
                status
            }
        };
        let forced = |(now, before): (&f32, &f32)| *now >= 0.0 && *before < 0.0;
        if table.as_flattened().iter().zip(before.as_flattened()).any(forced) {
            crate::complain("a plugin chose what NCCL cannot run here; what comes of that is not modelled");
            return Err(crate::status::nccl::INTERNAL);
        }
        if status == 0 { Ok(u32::try_from(channels).ok().filter(|channels| *channels > 0)) } else { Err(status) }
    }

    pub(crate) fn end(self) {
        // SAFETY: the context is the one that init made, and is not used again.
        unsafe { (self.destroy)(self.context) };
    }
}

fn open(name: &str) -> Option<usize> {
    let name = CString::new(name).ok()?;
    // SAFETY: the user names the library, and its initialisers run with the user's rights.
    let library = unsafe { libc::dlopen(name.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
    (!library.is_null()).then_some(library as usize)
}

fn symbol(library: usize, name: &CStr) -> Option<*mut c_void> {
    // SAFETY: the library is open; the name is terminated.
    let symbol = unsafe { libc::dlsym(library as *mut c_void, name.as_ptr()) };
    (!symbol.is_null()).then_some(symbol)
}
