//! The one place that changes this process's environment.

use std::collections::BTreeMap;

/// Sets (`Some`) or removes (`None`) variables that NCCL reads again at every communicator.
///
/// It must run while no communicator is alive or coming up: NCCL's own threads call getenv, and
/// changing the environment under a reader is undefined behaviour in the C library. The worker's
/// order of steps guarantees that (close, set, open), and its reader thread never reads variables.
#[expect(unsafe_code, reason = "changing the environment is process-wide")]
#[expect(clippy::disallowed_methods, reason = "this is the room for changing the environment")]
pub(super) fn apply(variables: &BTreeMap<String, Option<String>>) {
    for (name, value) in variables {
        // SAFETY: no other thread reads the environment at this point (see above).
        unsafe {
            match value {
                Some(value) => std::env::set_var(name, value),
                None => std::env::remove_var(name),
            }
        }
    }
}
