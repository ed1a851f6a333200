//! The command that tunes anew, as it can be pasted into a shell.

use std::path::Path;

use super::CheckRequest;
use crate::env_syntax::shell_quoted;
use crate::flow::BackendChoice;
use crate::record::{BackendKind, Manifest};
use crate::workload::preset_names;

/// Flags of a run that its successor does not take over, with whether a value follows. Where a run was written, how it was
/// begun and how it was shown is its own business; a race that begins with an earlier run has its strategy.
const DROPPED: [(&str, bool); 17] = [
    ("--out", true),
    ("--resume", false),
    ("--warm-start", true),
    ("--strategy", true),
    ("--recorded", true),
    ("--assume-noise", true),
    ("--backend", true),
    ("--machine", true),
    ("--devices", true),
    ("--nccl-lib", true),
    ("--dry-run", false),
    ("--require-decision", false),
    ("--format", true),
    ("--quiet", false),
    ("--verbose", false),
    ("--no-progress", false),
    ("--color", true),
];

/// Flags of one letter, likewise.
const DROPPED_LETTERS: [&str; 2] = ["-q", "-v"];

/// `nccltune tune` with the run's own flags, begun with what the run saw, on what was checked.
pub(super) fn tune_again(request: &CheckRequest, manifest: &Manifest, run: &Path) -> String {
    let mut words = vec!["nccltune".to_owned(), "tune".to_owned()];
    words.extend(own_flags(&manifest.arguments));
    // A preset that an environment variable named is said aloud.
    let has =
        |words: &[String], flag: &str| words.iter().any(|word| word == flag || word.starts_with(&format!("{flag}=")));
    let model = &manifest.workload.model;
    if !has(&words, "--model")
        && !has(&words, "--sizes")
        && !has(&words, "--from-log")
        && preset_names().any(|name| name == model.as_str())
    {
        words.extend(["--model".to_owned(), model.clone()]);
    }
    let kept = |flag: &str| value_of(&manifest.arguments, flag);
    let mut add =
        |flag: &str, value: Option<String>| words.extend(value.into_iter().flat_map(|value| [flag.to_owned(), value]));
    let is_simulated = request.machine.is_some()
        || request.backend == BackendChoice::Simulated
        || request.backend == BackendChoice::Auto && manifest.backend == BackendKind::Simulated;
    if is_simulated {
        add("--backend", Some("simulated".to_owned()));
        add("--machine", request.machine.clone().or_else(|| kept("--machine")));
    } else if manifest.backend == BackendKind::Nccl {
        add("--backend", kept("--backend"));
    }
    let shown = |path: &Path| path.display().to_string();
    add("--nccl-lib", request.nccl_lib.as_deref().map(shown).or_else(|| kept("--nccl-lib")));
    let named = (!request.devices.is_empty()).then(|| request.devices.join(","));
    add("--devices", named.or_else(|| kept("--devices")));
    add("--warm-start", Some(shown(run)));
    words.iter().map(|word| quoted(word)).collect::<Vec<_>>().join(" ")
}

/// A word as a shell takes it: bare where that is safe, so that a person can read it.
fn quoted(word: &str) -> String {
    let is_safe = |character: char| character.is_ascii_alphanumeric() || "_-./:=,%+@".contains(character);
    if !word.is_empty() && word.chars().all(is_safe) { word.to_owned() } else { shell_quoted(word) }
}

/// The flags of a run of `tune` that its successor takes over; none of another command's.
fn own_flags(arguments: &[String]) -> Vec<String> {
    let Some(at) = arguments.iter().position(|word| word == "tune") else { return Vec::new() };
    // Flags that every command takes may stand before it; all of them are dropped.
    let mut words = arguments[at + 1..].iter();
    let mut kept = Vec::new();
    while let Some(word) = words.next() {
        let (flag, has_value) = match word.split_once('=') {
            Some((flag, _)) if flag.starts_with("--") => (flag, true),
            _ => (word.as_str(), false),
        };
        match DROPPED.iter().find(|(dropped, _)| *dropped == flag) {
            Some((_, true)) if !has_value => {
                words.next();
            }
            Some(_) => {}
            None if DROPPED_LETTERS.contains(&flag) => {}
            None => kept.push(word.clone()),
        }
    }
    kept
}

fn value_of(arguments: &[String], flag: &str) -> Option<String> {
    let with_sign = format!("{flag}=");
    let at = arguments.iter().position(|word| word == flag || word.starts_with(&with_sign))?;
    match arguments[at].strip_prefix(&with_sign) {
        Some(value) => Some(value.to_owned()),
        None => arguments.get(at + 1).cloned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wording::fixtures;

    fn again(arguments: &[&str], request: &CheckRequest) -> String {
        let mut manifest = fixtures::manifest();
        manifest.arguments = arguments.iter().map(|word| (*word).to_owned()).collect();
        tune_again(request, &manifest, Path::new("/srv/runs/a b"))
    }

    #[test]
    fn a_run_is_repeated_with_its_own_flags_and_a_warm_start() {
        let arguments = [
            "nccltune",
            "-q",
            "tune",
            "--model",
            "/srv/my models/config.json",
            "--out",
            "X",
            "--strategy=exhaustive",
            "--resume",
            "--pin",
            "NCCL_P2P_DISABLE=1",
            "--nccl-lib",
            "/opt/libnccl.so.2",
            "-v",
            "--no-trial",
        ];
        let expected = "nccltune tune --model '/srv/my models/config.json' --pin NCCL_P2P_DISABLE=1 --no-trial --nccl-lib \
                        /opt/libnccl.so.2 --warm-start '/srv/runs/a b'";
        assert_eq!(again(&arguments, &CheckRequest::default()), expected);
        let request = CheckRequest { nccl_lib: Some("/new/lib.so".into()), ..CheckRequest::default() };
        assert_eq!(again(&arguments, &request), expected.replace("/opt/libnccl.so.2", "/new/lib.so"));
        // A run of another command left no flags of `tune`.
        assert_eq!(
            again(&["nccltune", "trial", "--out", "X"], &CheckRequest::default()),
            "nccltune tune --warm-start '/srv/runs/a b'"
        );
    }

    #[test]
    fn what_is_printed_reads_back_as_the_same_words() {
        for word in ["plain", "with blank", "it's", "$HOME", "a;b", ""] {
            let told = quoted(word);
            assert_eq!(told == word, word == "plain", "{told}");
        }
    }
}
