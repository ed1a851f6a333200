//! The only place that reads the process's environment and arguments.

use std::collections::BTreeMap;
use std::path::PathBuf;

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

/// The folder for what outlives a run: `$NCCLTUNE_STATE_DIR`, else that of the user's desktop or home.
/// None where nothing names one. A base folder that is no absolute path is ignored, as the XDG
/// specification asks.
pub(super) fn state_folder(environment: &BTreeMap<String, String>) -> Option<PathBuf> {
    let named = |name: &str| environment.get(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    let absolute = |name: &str| named(name).filter(|path| path.is_absolute());
    named("NCCLTUNE_STATE_DIR")
        .or_else(|| Some(absolute("XDG_STATE_HOME")?.join("nccltune")))
        .or_else(|| Some(absolute("HOME")?.join(".local/state/nccltune")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_folder_for_state_is_the_first_that_is_named() {
        let folder = |entries: &[(&str, &str)]| {
            let environment = entries.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect();
            state_folder(&environment).map(|path| path.to_string_lossy().into_owned())
        };
        let (own, desktop, home) =
            (("NCCLTUNE_STATE_DIR", "state"), ("XDG_STATE_HOME", "/srv/state"), ("HOME", "/srv/alice"));
        assert_eq!(folder(&[own, desktop, home]).unwrap(), "state");
        assert_eq!(folder(&[desktop, home]).unwrap(), "/srv/state/nccltune");
        assert_eq!(folder(&[home]).unwrap(), "/srv/alice/.local/state/nccltune");
        assert_eq!(folder(&[]), None);
        assert_eq!(folder(&[("NCCLTUNE_STATE_DIR", ""), desktop]).unwrap(), "/srv/state/nccltune");
        assert_eq!(folder(&[("XDG_STATE_HOME", "state"), home]).unwrap(), "/srv/alice/.local/state/nccltune");
        assert_eq!(folder(&[("HOME", "alice")]), None);
    }
}
