//! Tuner plugins, as NCCL loads and asks them: versions 4 and 5 of the interface, and failing open.

use std::ffi::{CStr, CString, c_char, c_int, c_ulong, c_void};

use crate::engine::engine;
use crate::function::Function;
use crate::log::Subject;

type Logger = extern "C" fn(c_int, c_ulong, *const c_char, c_int, *const c_char);
type GetCollInfo =
    unsafe extern "C" fn(*mut c_void, c_int, usize, c_int, *mut *mut f32, c_int, c_int, c_int, *mut c_int) -> c_int;

/// ncclTuner_v4_t.
#[repr(C)]
pub(crate) struct TunerV4 {
    pub(crate) name: *const c_char,
    pub(crate) init: unsafe extern "C" fn(usize, usize, Logger, *mut *mut c_void) -> c_int,
    pub(crate) get_coll_info: GetCollInfo,
    pub(crate) destroy: unsafe extern "C" fn(*mut c_void) -> c_int,
}

/// ncclTuner_v5_t.
#[repr(C)]
pub(crate) struct TunerV5 {
    pub(crate) name: *const c_char,
    pub(crate) init:
        unsafe extern "C" fn(*mut *mut c_void, u64, usize, usize, Logger, *mut c_void, *mut c_void) -> c_int,
    pub(crate) get_coll_info: GetCollInfo,
    pub(crate) finalize: unsafe extern "C" fn(*mut c_void) -> c_int,
}

// SAFETY: the tables are constants; their names are never written to.
unsafe impl Sync for TunerV4 {}
// SAFETY: as above.
unsafe impl Sync for TunerV5 {}

/// A communicator's use of a plugin.
pub(crate) struct Plugin {
    context: *mut c_void,
    get_coll_info: GetCollInfo,
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
    let (table, number) = if version >= 22_800
        && let Some(table) = symbol(library, c"ncclTunerPlugin_v5")
    {
        (table, 5)
    } else if version >= 22_400
        && let Some(table) = symbol(library, c"ncclTunerPlugin_v4")
    {
        (table, 4)
    } else {
        if symbol(library, c"ncclTunerPlugin_v3").or_else(|| symbol(library, c"ncclTunerPlugin_v2")).is_some() {
            crate::complain("plugins of versions before 4 are not modelled");
            return Err(crate::status::nccl::INTERNAL);
        }
        note("TUNER/Plugin: Failed to find ncclTunerPlugin symbol, using internal tuner instead.");
        engine().nccl.plugins.has_failed = true;
        return Ok(None);
    };
    let (name, status, plugin) = if number == 5 {
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
        (table.name, status, Plugin { context, get_coll_info: table.get_coll_info, destroy: table.finalize })
    } else {
        // SAFETY: as above, with the layout of version 4.
        let table = unsafe { &*table.cast::<TunerV4>() };
        // SAFETY: the arguments are those of version 4.
        let status = unsafe { (table.init)(ranks, 1, log, &raw mut context) };
        (table.name, status, Plugin { context, get_coll_info: table.get_coll_info, destroy: table.destroy })
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
        // SAFETY: the table is contiguous, as plugins take it in spite of its type; all outlive the call.
        let status = unsafe {
            (self.get_coll_info)(
                self.context,
                function as c_int,
                bytes as usize,
                1,
                table.as_mut_ptr().cast(),
                7,
                3,
                c_int::from(is_captured),
                &raw mut channels,
            )
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

/// A plugin for tests, in the same library: it makes every message run as ring with Simple on two
/// channels, where NCCL could run that.
pub(crate) mod example {
    use super::{Logger, TunerV4, TunerV5};
    use std::ffi::{c_int, c_void};

    extern "C" fn init_v5(
        _context: *mut *mut c_void,
        _id: u64,
        _ranks: usize,
        _nodes: usize,
        _log: Logger,
        _domains: *mut c_void,
        _constants: *mut c_void,
    ) -> c_int {
        0
    }

    extern "C" fn init_v4(_ranks: usize, _nodes: usize, _log: Logger, _context: *mut *mut c_void) -> c_int {
        0
    }

    extern "C" fn end(_context: *mut c_void) -> c_int {
        0
    }

    extern "C" fn get_coll_info(
        _context: *mut c_void,
        _function: c_int,
        _bytes: usize,
        _operations: c_int,
        table: *mut *mut f32,
        algorithms: c_int,
        protocols: c_int,
        _registered: c_int,
        channels: *mut c_int,
    ) -> c_int {
        let table: *mut f32 = table.cast();
        let place = crate::choice::RING * protocols as usize + 2;
        if place >= (algorithms * protocols) as usize || table.is_null() || channels.is_null() {
            return 0;
        }
        // SAFETY: the table holds as many numbers as algorithms times protocols, and the place is inside.
        unsafe {
            if *table.add(place) >= 0.0 {
                *table.add(place) = 0.0;
                *channels = 2;
            }
        }
        0
    }

    /// What NCCL 2.28 and later look for.
    // SAFETY: nobody looks for this name in this library unless NCCL_TUNER_PLUGIN names it.
    #[unsafe(no_mangle)]
    #[allow(non_upper_case_globals, reason = "the symbol's name is part of the interface")]
    pub(crate) static ncclTunerPlugin_v5: TunerV5 =
        TunerV5 { name: c"fake-gpu example".as_ptr(), init: init_v5, get_coll_info, finalize: end };

    /// What NCCL 2.24 to 2.27 look for.
    // SAFETY: as above.
    #[unsafe(no_mangle)]
    #[allow(non_upper_case_globals, reason = "the symbol's name is part of the interface")]
    pub(crate) static ncclTunerPlugin_v4: TunerV4 =
        TunerV4 { name: c"fake-gpu example".as_ptr(), init: init_v4, get_coll_info, destroy: end };
}
