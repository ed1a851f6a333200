//! How the rules read the tree: its files, and Rust files as tokens.
//!
//! Rules look at tokens, not at syntax trees. `crate`, `super`, `mod` and `unsafe` are reserved
//! words, so a token is never mistaken for something else, and the body of a macro, which a parser
//! keeps as an unread lump, is read like any other code.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::Command;

use fs_err as fs;
use proc_macro2::{Delimiter, Group, TokenStream, TokenTree};

/// Text files by their path from the root of the repository.
pub(crate) type Files = BTreeMap<String, String>;

/// A rule that a file breaks.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Violation {
    pub(crate) file: String,
    pub(crate) line: usize,
    /// The short name that planted violations are checked against.
    pub(crate) rule: &'static str,
    pub(crate) message: String,
}

impl std::fmt::Display for Violation {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(formatter, "{}:{}: {}: {}", self.file, self.line, self.rule, self.message)
    }
}

/// Fails the test with one line per violation, in the form that editors can jump to.
#[track_caller]
pub(crate) fn assert_none(violations: &[Violation]) {
    let lines: Vec<String> = violations.iter().map(ToString::to_string).collect();
    assert!(lines.is_empty(), "{} violation(s):\n{}", lines.len(), lines.join("\n"));
}

/// Fails the test unless `violations` are exactly one, at this place and of this rule.
#[track_caller]
pub(crate) fn assert_only(violations: &[Violation], name: &str, file: &str, line: usize, rule: &str) {
    let seen: Vec<(&str, usize, &str)> =
        violations.iter().map(|violation| (violation.file.as_str(), violation.line, violation.rule)).collect();
    assert_eq!(seen, [(file, line, rule)], "planted: {name}");
}

/// Every text file of this repository that is tracked, or would be by `git add --all`: a file that
/// breaks a rule shall fail before it is committed, not after.
pub(crate) fn repository() -> Files {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut files = Files::new();
    for path in listed_by_git(root).unwrap_or_else(|| found_by_walking(root)) {
        // A tracked file may have been deleted, and a link may lead to a folder.
        if !root.join(&path).is_file() {
            continue;
        }
        let bytes = fs::read(root.join(&path)).expect("a listed file can be read");
        if let Ok(text) = String::from_utf8(bytes)
            && !text.contains('\0')
        {
            files.insert(path, text);
        }
    }
    assert!(files.contains_key("src/lib.rs"), "the files of the repository were not found");
    files
}

/// What git knows, or `None` where there is no git or this is no checkout (a source archive,
/// possibly unpacked inside another checkout, or one that belongs to another user).
fn listed_by_git(root: &Path) -> Option<Vec<String>> {
    let output = Command::new("git")
        .args(["ls-files", "-z", "--cached", "--others", "--exclude-standard"])
        .current_dir(root)
        .output()
        .ok()?;
    if !output.status.success() {
        return None;
    }
    let names = String::from_utf8(output.stdout).ok()?;
    let names: Vec<String> = names.split_terminator('\0').map(str::to_owned).collect();
    names.iter().any(|name| name == "src/lib.rs").then_some(names)
}

fn found_by_walking(root: &Path) -> Vec<String> {
    let mut names = Vec::new();
    let mut folders = vec![PathBuf::new()];
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(root.join(&folder)).expect("a folder of the repository can be listed") {
            let entry = entry.expect("a folder of the repository can be listed");
            let path = folder.join(entry.file_name());
            let kind = entry.file_type().expect("the kind of a file is known");
            if kind.is_file() {
                names.extend(path.to_str().map(str::to_owned));
            } else if kind.is_dir() && !is_ignored(&path) {
                folders.push(path);
            }
        }
    }
    names
}

/// The folders that .gitignore keeps out, for trees without git.
fn is_ignored(folder: &Path) -> bool {
    let is_found_by_fuzzing = ["corpus", "artifacts", "coverage"].iter().any(|name| folder.ends_with(name));
    folder.ends_with("target")
        || folder.ends_with(".git")
        || (folder.starts_with("fuzz") && is_found_by_fuzzing)
        || (folder.starts_with("results") && folder.components().count() == 2 && !folder.ends_with("recorded"))
}

/// The tokens of a Rust file; one that is no Rust is a violation by itself.
pub(crate) fn tokens(file: &str, text: &str) -> Result<Vec<TokenTree>, Violation> {
    match text.parse::<TokenStream>() {
        Ok(stream) => Ok(stream.into_iter().collect()),
        Err(error) => Err(Violation {
            file: file.to_owned(),
            line: error.span().start().line,
            rule: "not-rust",
            message: error.to_string(),
        }),
    }
}

/// The tokens inside a pair of brackets.
pub(crate) fn inside(group: &Group) -> Vec<TokenTree> {
    group.stream().into_iter().collect()
}

/// The line a token starts on.
pub(crate) fn line_of(tree: &TokenTree) -> usize {
    tree.span().start().line
}

/// The word at a position as it is spelled, `r#` included.
pub(crate) fn word_at(trees: &[TokenTree], at: usize) -> Option<String> {
    match trees.get(at) {
        Some(TokenTree::Ident(word)) => Some(word.to_string()),
        _ => None,
    }
}

/// Whether the word at a position is this one.
pub(crate) fn is_word(trees: &[TokenTree], at: usize, word: &str) -> bool {
    matches!(trees.get(at), Some(TokenTree::Ident(found)) if found == word)
}

/// Whether the sign at a position is this one.
pub(crate) fn is_sign(trees: &[TokenTree], at: usize, sign: char) -> bool {
    matches!(trees.get(at), Some(TokenTree::Punct(found)) if found.as_char() == sign)
}

/// Whether `::` stands at a position.
pub(crate) fn is_separator(trees: &[TokenTree], at: usize) -> bool {
    is_sign(trees, at, ':') && is_sign(trees, at + 1, ':')
}

/// The group of this kind at a position.
pub(crate) fn group_at(trees: &[TokenTree], at: usize, delimiter: Delimiter) -> Option<&Group> {
    match trees.get(at) {
        Some(TokenTree::Group(group)) if group.delimiter() == delimiter => Some(group),
        _ => None,
    }
}

/// What stands in the brackets of the attribute whose `#` is at a position.
pub(crate) fn attribute_at(trees: &[TokenTree], at: usize) -> Option<&Group> {
    if !is_sign(trees, at, '#') {
        return None;
    }
    let bracket = if is_sign(trees, at + 1, '!') { at + 2 } else { at + 1 };
    group_at(trees, bracket, Delimiter::Bracket)
}

/// `cfg(test)` to the letter: `cfg(not(test))` and `cfg(any(test, ..))` exempt nothing.
pub(crate) fn is_cfg_test(attribute: &[TokenTree]) -> bool {
    is_word(attribute, 0, "cfg")
        && group_at(attribute, 1, Delimiter::Parenthesis).is_some_and(|group| {
            let condition = inside(group);
            condition.len() == 1 && is_word(&condition, 0, "test")
        })
}

/// A file without its `#[cfg(test)] mod tests { .. }`.
pub(crate) fn without_tests(trees: &[TokenTree]) -> Vec<TokenTree> {
    let mut kept: Vec<TokenTree> = Vec::new();
    // Where the item begins whose attributes are being read, and whether one is `cfg(test)`.
    let (mut start, mut is_test) = (0, false);
    let mut at = 0;
    while at < trees.len() {
        let mut length = 1;
        if let Some(attribute) = attribute_at(trees, at) {
            is_test |= is_cfg_test(&inside(attribute));
            length = if is_sign(trees, at + 1, '!') { 3 } else { 2 };
            kept.extend_from_slice(&trees[at..at + length]);
        } else {
            let is_tests = is_word(trees, at, "mod") && is_word(trees, at + 1, "tests");
            if is_test && is_tests && group_at(trees, at + 2, Delimiter::Brace).is_some() {
                kept.truncate(start);
                length = 3;
            } else {
                kept.push(trees[at].clone());
            }
            (start, is_test) = (kept.len(), false);
        }
        at += length;
    }
    kept
}

/// Calls `look` with every run of tokens of a file: the whole, and the inside of each group.
pub(crate) fn each_run(trees: &[TokenTree], look: &mut impl FnMut(&[TokenTree])) {
    look(trees);
    for tree in trees {
        if let TokenTree::Group(group) = tree {
            each_run(&inside(group), look);
        }
    }
}

#[test]
fn walking_finds_what_git_lists() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let walked = found_by_walking(root);
    assert!(walked.iter().any(|name| name == "tests/it/source.rs"), "{walked:?}");
    assert!(!walked.iter().any(|name| name.starts_with("target/") || name.starts_with(".git/")));
    if let Some(listed) = listed_by_git(root) {
        let missed: Vec<&String> =
            listed.iter().filter(|name| root.join(name).is_file() && !walked.contains(name)).collect();
        assert!(missed.is_empty(), "{missed:?}");
    }
}
