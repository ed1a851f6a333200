//! The one loader for shared libraries that are opened by path.
//!
//! A library is loaded by absolute path, so that what was measured can be named: its path, version
//! and SHA-256 go into the manifest. Status codes cross the boundary as plain integers, because a
//! code this version does not know must never become an invalid Rust enum.

use std::path::{Path, PathBuf};

/// Why a library could not be used.
#[derive(Debug, thiserror::Error)]
pub enum DynamicLibraryError {
    /// The dynamic loader refused it.
    #[error("could not load {path}: {reason}")]
    Load {
        /// The library.
        path: PathBuf,
        /// The loader's words.
        reason: String,
    },
    /// It lacks a function this tool needs.
    #[error("{path} has no function {symbol}; it is not the library it should be, or far too old")]
    Symbol {
        /// The library.
        path: PathBuf,
        /// The missing function.
        symbol: &'static str,
    },
}

/// Opens a library.
///
/// # Safety
///
/// Loading runs the library's initialisers with this process's rights. The caller vouches that the
/// user chose this library.
#[expect(unsafe_code, reason = "loading a library runs its initialisers")]
pub unsafe fn open(path: &Path) -> Result<libloading::Library, DynamicLibraryError> {
    // SAFETY: passed on to the caller, who vouches for the library.
    unsafe { libloading::Library::new(path) }.map_err(|error| {
        // The error itself says only that dlopen failed; its source holds the loader's words.
        let reason = std::error::Error::source(&error).map_or_else(|| error.to_string(), ToString::to_string);
        DynamicLibraryError::Load { path: path.to_owned(), reason }
    })
}

/// The symbol by which a stand-in for the driver and NCCL shows, such as the one of this project's tests.
const STAND_IN_MARK: &[u8] = b"nccltune_fake_gpu\0";

/// Whether a library, if it can be loaded at all, is a stand-in. What is measured on one says nothing
/// about any GPU, so nobody may take one for a driver by accident.
#[expect(unsafe_code, reason = "loading a library runs its initialisers")]
pub fn is_stand_in(path: &Path) -> bool {
    // SAFETY: callers ask about libraries that they are about to use, or have in use already.
    let Ok(library) = (unsafe { open(path) }) else { return false };
    // SAFETY: the symbol is only looked for.
    unsafe { library.get::<*const u8>(STAND_IN_MARK) }.is_ok()
}

/// Declares a struct of function pointers that is filled from a shared library.
///
/// The library is never closed, which is what makes calling the pointers
/// sound; each call's own contract is the caller's.
macro_rules! dynamic_library {
    (
        $(#[$meta:meta])*
        $visibility:vis struct $name:ident {
            $( fn $symbol:ident ( $( $argument:ident : $type:ty ),* $(,)? ) -> $result:ty; )+
        }
    ) => {
        $(#[$meta])*
        #[allow(non_snake_case, reason = "functions keep the names the library exports")]
        $visibility struct $name {
            $( pub(crate) $symbol: unsafe extern "C" fn( $( $type ),* ) -> $result, )+
            // Never closed: libraries of the driver's family keep threads and exit handlers, and the
            // processes that load them are short-lived.
            _library: std::mem::ManuallyDrop<libloading::Library>,
        }

        impl $name {
            /// Loads the library and looks up every function.
            ///
            /// # Safety
            ///
            /// The library must be what the signatures above describe.
            #[expect(unsafe_code, reason = "symbols of a foreign library")]
            #[allow(non_snake_case, reason = "functions keep the names the library exports")]
            pub(crate) unsafe fn load(path: &std::path::Path) -> Result<Self, crate::dynlib::DynamicLibraryError> {
                // SAFETY: passed on to the caller.
                let library = unsafe { crate::dynlib::open(path) }?;
                $(
                    // SAFETY: the caller vouches that the symbol has this signature; the pointer is
                    // copied out and stays valid because the library is never closed.
                    let $symbol = unsafe {
                        *library
                            .get::<unsafe extern "C" fn( $( $type ),* ) -> $result>(
                                concat!(stringify!($symbol), "\0").as_bytes(),
                            )
                            .map_err(|_| crate::dynlib::DynamicLibraryError::Symbol {
                                path: path.to_owned(),
                                symbol: stringify!($symbol),
                            })?
                    };
                )+
                Ok(Self { $( $symbol, )+ _library: std::mem::ManuallyDrop::new(library) })
            }
        }
    };
}

pub(crate) use dynamic_library;

#[cfg(test)]
mod tests {
    use super::*;

    dynamic_library! {
        /// A library every Linux machine has.
        struct Mathematics {
            fn cos(angle: f64) -> f64;
        }
    }

    dynamic_library! {
        /// A function nobody exports.
        #[expect(dead_code, reason = "it is only looked for")]
        struct Nonsense {
            fn surely_not_exported_anywhere() -> i32;
        }
    }

    #[test]
    #[expect(unsafe_code, reason = "calls into the C mathematics library")]
    fn functions_are_found_and_called() {
        // SAFETY: libm.so.6 exports cos with this signature.
        let mathematics = unsafe { Mathematics::load(Path::new("libm.so.6")) }.unwrap();
        // SAFETY: cos takes any double.
        let one = unsafe { (mathematics.cos)(0.0) };
        assert!((one - 1.0).abs() < f64::EPSILON);
    }

    #[test]
    fn an_ordinary_library_is_no_stand_in() {
        assert!(!is_stand_in(Path::new("libm.so.6")));
        assert!(!is_stand_in(Path::new("/nonexistent/libnccl.so.2")));
    }

    #[test]
    #[expect(unsafe_code, reason = "loads libraries")]
    fn a_missing_library_and_a_missing_function_are_named() {
        // SAFETY: nothing is called.
        let error = unsafe { Nonsense::load(Path::new("/nonexistent/libnccl.so.2")) }.err().unwrap();
        assert!(error.to_string().contains("/nonexistent/libnccl.so.2"), "{error}");
        assert!(error.to_string().contains("No such file"), "{error}");
        // SAFETY: nothing is called.
        let error = unsafe { Nonsense::load(Path::new("libm.so.6")) }.err().unwrap();
        assert!(error.to_string().contains("surely_not_exported_anywhere"), "{error}");
    }
}
