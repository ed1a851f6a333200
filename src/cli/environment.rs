//! The only place that reads the process's environment and arguments.

use std::collections::BTreeMap;

/// Arguments, the program's name first. What is no UTF-8 is shown with replacement characters and
/// will then not be found, which the error names.
pub(super) fn arguments() -> Vec<String> {
    std::env::args_os().map(|argument| argument.to_string_lossy().into_owned()).collect()
}

/// Whether a worker or a probe may run on a stand-in for driver and NCCL.
#[expect(clippy::disallowed_methods, reason = "this is the room for reading the environment")]
pub(super) fn allows_fakes() -> bool {
    std::env::var_os("NCCLTUNE_ALLOW_FAKE").is_some_and(|value| value == "1")
}

/// The environment, read once. Variables that are no UTF-8 are left out: nothing this tool passes on
/// may be unprintable.
#[expect(clippy::disallowed_methods, reason = "this is the room for reading the environment")]
pub(super) fn snapshot() -> BTreeMap<String, String> {
    std::env::vars_os()
        .filter_map(|(name, value)| Some((name.into_string().ok()?, value.into_string().ok()?)))
        .collect()
}
