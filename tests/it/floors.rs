//! The floors of `src/`: a module may use lower floors only, and modules on one floor do not know
//! each other.
//!
//! A new top-level module gets a line in [`FLOORS`] first; that line is a decision about the design
//! and belongs in ARCHITECTURE.md too. Every path that starts at the root of the crate counts,
//! wherever it stands: in `use`, in an expression, in a macro, in an attribute's string.
//! What could smuggle a name past the reading is banned, so that the table means what it says.
//! A private `#[cfg(test)] mod tests` is exempt: tests may build what they need from any floor.

use proc_macro2::{Delimiter, TokenStream, TokenTree};

use crate::source::{
    self, Files, Violation, assert_none, assert_only, attribute_at, each_run, group_at, inside, is_cfg_test,
    is_separator, is_sign, is_word, line_of, word_at,
};

/// The floors from the ground up, with the top-level modules of `src/` that live there. Modules of
/// the design have their place here before they are written.
const FLOORS: &[(&str, &[&str])] = &[
    (
        "words",
        &["canonical", "clock", "collective", "engine", "error_kind", "file_kind", "knob", "machine", "seed", "units"],
    ),
    ("records", &["record", "stats"]),
    (
        "descriptions",
        &[
            "bindings",
            "dynlib",
            "env_syntax",
            "wording",
            "evidence",
            "file_lock",
            "fingerprint",
            "nccl_log",
            "nccl_model",
            "space",
            "tuner_table",
            "workload",
        ],
    ),
    (
        "tools",
        &[
            "journal",
            "misjudged",
            "nccl_tests",
            "probe",
            "process",
            "process_tree",
            "quarantine",
            "repair",
            "shared_memory",
            "worker",
        ],
    ),
    // Asks the probe what the machine is, so that work need not.
    ("discovery", &["discovery"]),
    ("work", &["backend", "search", "server"]),
    ("judgement", &["choice", "lint"]),
    ("campaign", &["campaign"]),
    ("telling", &["doctor", "emit", "report"]),
    // One folder: each command that does more than print has its story there.
    ("flow", &["flow"]),
    ("door", &["cli"]),
];

/// Where a module may know a neighbour on its own floor, and why.
const NEIGHBOURS: &[Neighbour] = &[
    Neighbour {
        from: "knob",
        to: "machine",
        names: Some(&["NcclVersion"]),
        reason: "machine is types only, and what a knob does depends on the version of NCCL",
    },
    Neighbour { from: "bindings", to: "dynlib", names: None, reason: "bindings are tables that the one loader fills" },
];

struct Neighbour {
    from: &'static str,
    to: &'static str,
    /// The items that may be named, where not all may.
    names: Option<&'static [&'static str]>,
    reason: &'static str,
}

/// What `main.rs` may start a path with: the standard library, and the door of this crate.
const MAIN_MAY_USE: &[&str] = &["std", "core", "alloc", "nccltune"];

fn floor_of(module: &str) -> Option<usize> {
    FLOORS.iter().position(|(_, modules)| modules.contains(&module))
}

/// Reads every Rust file under `src/` and reports what breaks the rules, file by file, in order.
fn check(files: &Files) -> Vec<Violation> {
    let mut found = Vec::new();
    let mut test_modules = Vec::new();
    let mut readings = Vec::new();
    for (file, text) in files {
        let Some(name) = file.strip_prefix("src/").and_then(|name| name.strip_suffix(".rs")) else { continue };
        let trees = match source::tokens(file, text) {
            Ok(trees) => trees,
            Err(violation) => {
                found.push(violation);
                continue;
            }
        };
        let module = module_of(name);
        let mut reading =
            Reading { file, module: module.clone(), literal_line: None, found: Vec::new(), test_modules: Vec::new() };
        match module.first().map(String::as_str) {
            None if name == "main" => reading.main(&trees),
            None => reading.library_root(&trees),
            Some(top) => {
                if floor_of(top).is_none() {
                    reading.report(1, "no-floor", format!("{top} has no floor: give it one in tests/it/floors.rs"));
                }
                reading.code(&trees);
            }
        }
        test_modules.append(&mut reading.test_modules);
        readings.push((module, holds_a_test(&trees), reading.found));
    }
    // A `mod tests;` in a file of its own is known only once its parent has been read.
    for (module, holds_a_test, violations) in readings {
        match test_modules.iter().find(|(tests, _)| module.starts_with(tests)) {
            None => found.extend(violations),
            Some((tests, declaration)) if module == *tests && !holds_a_test => found.push(declaration.clone()),
            Some(_) => {}
        }
    }
    found.sort();
    found
}

/// `record/mod` and `record` are [record], `record/space` is [record, space]; the roots are [].
fn module_of(name: &str) -> Vec<String> {
    let mut module: Vec<String> = name.split('/').map(str::to_owned).collect();
    if module.len() > 1 && module.last().is_some_and(|last| last == "mod") {
        module.pop();
    }
    if module.len() == 1 && (module[0] == "lib" || module[0] == "main") {
        module.clear();
    }
    module
}

/// A path as written, after its root: `use crate::{a, b::c as d}` gives [a] and [b, c] as d.
struct Named {
    line: usize,
    /// Words; `*` for a glob, `?` for what only a macro would know.
    segments: Vec<String>,
    alias: Option<String>,
}

impl Named {
    /// The name that a `use` of this path brings into scope; importing a crate by itself brings none
    /// that was not there before.
    fn bound(&self) -> Option<String> {
        let words: Vec<&String> = self.segments.iter().filter(|word| *word != "self").collect();
        let leaf = words.last().filter(|_| self.segments.len() > 1);
        self.alias.clone().or_else(|| leaf.map(ToString::to_string))
    }
}

/// Reads the paths that start at the first token: one, or those of a group in braces.
fn read_paths(trees: &[TokenTree], before: &[String], line: usize, paths: &mut Vec<Named>) {
    let mut named = |segment: Option<String>, alias: Option<String>, line: usize| {
        let segments = before.iter().cloned().chain(segment).collect();
        paths.push(Named { line, segments, alias });
    };
    match trees.first() {
        Some(TokenTree::Ident(word)) => {
            let line = word.span().start().line;
            let word = word.to_string();
            let word = word.strip_prefix("r#").unwrap_or(&word).to_owned();
            if is_separator(trees, 1) {
                let before: Vec<String> = before.iter().cloned().chain([word]).collect();
                read_paths(&trees[3..], &before, line, paths);
            } else {
                let alias = if is_word(trees, 1, "as") { word_at(trees, 2) } else { None };
                named(Some(word), alias, line);
            }
        }
        Some(TokenTree::Group(group)) if group.delimiter() == Delimiter::Brace => {
            for entry in inside(group).split(|tree| matches!(tree, TokenTree::Punct(sign) if sign.as_char() == ',')) {
                if !entry.is_empty() {
                    read_paths(entry, before, line, paths);
                }
            }
        }
        Some(TokenTree::Punct(sign)) if sign.as_char() == '*' => named(Some("*".to_owned()), None, line),
        // `Type::<f64>`: the path ended before its arguments.
        Some(TokenTree::Punct(sign)) if sign.as_char() == '<' => named(None, None, line),
        _ => named(Some("?".to_owned()), None, line),
    }
}

/// One file on its way through the rules.
struct Reading<'a> {
    file: &'a str,
    /// Where the tokens being read stand, inline modules included.
    module: Vec<String>,
    /// The line of the string literal being read as code, whose tokens would all claim line 1.
    literal_line: Option<usize>,
    found: Vec<Violation>,
    /// The `#[cfg(test)] mod tests;` of this file, each with what to report if it holds no test.
    test_modules: Vec<(Vec<String>, Violation)>,
}

impl Reading<'_> {
    fn violation(&self, line: usize, rule: &'static str, message: impl Into<String>) -> Violation {
        let line = self.literal_line.unwrap_or(line);
        Violation { file: self.file.to_owned(), line, rule, message: message.into() }
    }

    fn report(&mut self, line: usize, rule: &'static str, message: impl Into<String>) {
        let violation = self.violation(line, rule, message);
        // A banned word may be met twice, once in a group and once inside it.
        if !self.found.contains(&violation) {
            self.found.push(violation);
        }
    }

    /// lib.rs holds the list of modules and nothing else: code there would live on no floor, and a
    /// re-export would give a name to everyone.
    fn library_root(&mut self, trees: &[TokenTree]) {
        let mut at = 0;
        while at < trees.len() {
            if let Some(attribute) = attribute_at(trees, at) {
                self.attribute(line_of(&trees[at]), &inside(attribute));
                at += if is_sign(trees, at + 1, '!') { 3 } else { 2 };
                continue;
            }
            let start = at;
            at += usize::from(is_word(trees, at, "pub"));
            at += usize::from(group_at(trees, at, Delimiter::Parenthesis).is_some());
            let line = line_of(&trees[start]);
            if is_word(trees, at, "mod") && is_sign(trees, at + 2, ';') {
                let name = word_at(trees, at + 1).unwrap_or_default();
                if floor_of(&name).is_none() {
                    self.report(line, "no-floor", format!("{name} has no floor: give it one in tests/it/floors.rs"));
                }
                at += 3;
            } else {
                if is_word(trees, at, "use") {
                    self.report(line, "re-export", "lib.rs re-exports nothing: a name has one home and one path");
                } else {
                    self.report(line, "lib-holds-modules", "lib.rs declares modules and holds nothing else");
                }
                // On to the end of the item.
                let ends = |tree: &TokenTree| match tree {
                    TokenTree::Punct(sign) => sign.as_char() == ';',
                    TokenTree::Group(group) => group.delimiter() == Delimiter::Brace,
                    _ => false,
                };
                at += trees[at..].iter().position(ends).unwrap_or(trees.len()) + 1;
                at += usize::from(is_sign(trees, at, ';'));
            }
        }
    }

    /// main.rs parses, calls one function and maps its result: the door and std are all it needs.
    fn main(&mut self, trees: &[TokenTree]) {
        let mut bound = Vec::new();
        each_run(trees, &mut |trees| {
            for at in 0..trees.len() {
                if is_word(trees, at, "use") {
                    let at = if is_separator(trees, at + 1) { at + 3 } else { at + 1 };
                    read_paths(&trees[at..], &[], line_of(&trees[at - 1]), &mut bound);
                }
            }
        });
        let mut heads: Vec<Named> = Vec::new();
        let mut modules = Vec::new();
        each_run(trees, &mut |trees| {
            for at in 0..trees.len() {
                let line = line_of(&trees[at]);
                if is_word(trees, at, "mod") || is_word(trees, at, "extern") || is_word(trees, at, "include") {
                    modules.push(line);
                }
                let continues = at >= 3 && is_separator(trees, at - 2) && matches!(trees[at - 3], TokenTree::Ident(_));
                if matches!(trees[at], TokenTree::Ident(_)) && is_separator(trees, at + 1) && !continues {
                    read_paths(&trees[at..], &[], line, &mut heads);
                }
            }
        });
        for line in modules {
            self.report(line, "main-uses-the-door", "main.rs is one file: what it calls lives behind cli");
        }
        let locals: Vec<String> = bound.iter().filter_map(Named::bound).collect();
        for named in bound.iter().chain(&heads) {
            let first = named.segments.first().map_or("", String::as_str);
            let second = named.segments.get(1).map(String::as_str);
            // A type's own function, as in `ExitCode::from`: the type came by a path that is read too.
            let is_type = first.starts_with(char::is_uppercase);
            let is_local = is_type || first == "self" || locals.iter().any(|local| local == first);
            let may_be_used = MAIN_MAY_USE.contains(&first) || (is_local && named.segments.len() > 1);
            if !may_be_used || (first == "nccltune" && second != Some("cli")) {
                let path = named.segments.join("::");
                self.report(
                    named.line,
                    "main-uses-the-door",
                    format!("main.rs may use nccltune::cli and std, not {path}"),
                );
            }
        }
    }

    /// Reads code of a module: every path from the root, and every way around reading one.
    fn code(&mut self, trees: &[TokenTree]) {
        let mut attributes: Vec<Vec<TokenTree>> = Vec::new();
        let mut is_public = false;
        let mut at = 0;
        while at < trees.len() {
            if let Some(attribute) = attribute_at(trees, at) {
                let attribute = inside(attribute);
                self.attribute(line_of(&trees[at]), &attribute);
                attributes.push(attribute);
                at += if is_sign(trees, at + 1, '!') { 3 } else { 2 };
                continue;
            }
            if is_word(trees, at, "pub") {
                is_public = true;
                at += 1;
                // `pub(crate)` and `pub(in path)` name an ancestor, never a neighbour.
                if let Some(group) = group_at(trees, at, Delimiter::Parenthesis) {
                    let inner = inside(group);
                    let is_visibility = is_word(&inner, 0, "in")
                        || (inner.len() == 1 && ["crate", "super", "self"].iter().any(|word| is_word(&inner, 0, word)));
                    at += usize::from(is_visibility);
                }
                continue;
            }
            let line = line_of(&trees[at]);
            if is_word(trees, at, "mod") {
                at += self.module(&trees[at..], line, &attributes, is_public);
            } else {
                self.word(trees, at, line);
                if let TokenTree::Group(group) = &trees[at] {
                    self.code(&inside(group));
                }
                at += 1;
            }
            attributes.clear();
            is_public = false;
        }
    }

    /// Reads a module declared inside a file; returns how many tokens that took.
    fn module(&mut self, trees: &[TokenTree], line: usize, attributes: &[Vec<TokenTree>], is_public: bool) -> usize {
        let Some(name) = word_at(trees, 1) else { return 1 };
        let is_test = name == "tests" && attributes.iter().any(|attribute| is_cfg_test(attribute));
        self.module.push(name);
        if is_test && is_public {
            self.report(line, "hidden-by-tests", "the tests of a module are private: others could use a public module");
        }
        let without_test =
            self.violation(line, "hidden-by-tests", "a tests module without a test is no reason to know other floors");
        let length = if let Some(group) = group_at(trees, 2, Delimiter::Brace) {
            let inner = inside(group);
            if !is_test {
                self.code(&inner);
            } else if !holds_a_test(&inner) {
                self.found.push(without_test);
            }
            3
        } else {
            if is_test {
                self.test_modules.push((self.module.clone(), without_test));
            }
            2
        };
        self.module.pop();
        length
    }

    /// Judges a word that starts a path from the root, or a way around one.
    fn word(&mut self, trees: &[TokenTree], at: usize, line: usize) {
        if is_word(trees, at, "extern") && is_word(trees, at + 1, "crate") {
            self.report(line, "root-alias", "`extern crate` could give this crate another name");
        } else if is_word(trees, at, "nccltune") && is_separator(trees, at + 1) {
            self.report(line, "root-alias", "inside the crate its root is called `crate`");
        } else if is_word(trees, at, "include") && is_sign(trees, at + 1, '!') {
            self.report(line, "include", "included code lives on no floor: declare a module");
        } else if is_word(trees, at, "crate") {
            let is_extern = at > 0 && is_word(trees, at - 1, "extern");
            if is_separator(trees, at + 1) {
                self.paths_from_root(&trees[at + 3..], line);
            } else if !is_extern {
                self.report(line, "root-alias", "another name for the root of the crate hides what is used");
            }
        } else if is_word(trees, at, "super") {
            self.parent(trees, at, line);
        }
    }

    /// `super`: at depth one it is the root of the crate, deeper it stays inside the top-level module.
    fn parent(&mut self, trees: &[TokenTree], at: usize, line: usize) {
        let is_root = self.module.len() == 1;
        if at >= 3 && is_separator(trees, at - 2) && is_word(trees, at - 3, "super") {
            // Reported where the run of `super` began.
        } else if is_separator(trees, at + 1) {
            let mut paths = Vec::new();
            read_paths(&trees[at + 3..], &[], line, &mut paths);
            if paths.iter().any(|named| named.segments.first().is_some_and(|first| first == "super")) {
                self.report(line, "super-super", "`super::super` hides where a path leads: start it with `crate::`");
            } else if is_root {
                self.paths_from_root(&trees[at + 3..], line);
            }
        } else if is_root {
            self.report(line, "root-alias", "another name for the root of the crate hides what is used");
        }
    }

    fn paths_from_root(&mut self, trees: &[TokenTree], line: usize) {
        let mut paths = Vec::new();
        read_paths(trees, &[], line, &mut paths);
        for named in paths {
            self.judge(&named);
        }
    }

    /// The rule itself: where does a path from the root lead, and may this module go there?
    fn judge(&mut self, named: &Named) {
        let Named { line, segments, .. } = named;
        let from = self.module.first().cloned().unwrap_or_default();
        let to = segments.first().map_or("?", String::as_str);
        match (floor_of(&from), floor_of(to)) {
            _ if to == "*" => self.report(*line, "root-glob", "a glob of the crate's root hides what is used"),
            _ if to == "self" => {
                self.report(*line, "root-alias", "another name for the root of the crate hides what is used");
            }
            _ if to == "?" => self.report(*line, "root-alias", "a path that only a macro knows cannot be judged"),
            _ if from == to => {}
            (_, None) => self.report(*line, "no-floor", format!("crate::{to} is no module with a floor")),
            // Reported once, for the file.
            (None, _) => {}
            (Some(own), Some(other)) if other < own => {}
            (Some(own), Some(other)) if other > own => {
                let (own, other) = (FLOORS[own].0, FLOORS[other].0);
                self.report(*line, "upward", format!("{from} ({own}) may not use {to} ({other}): lower floors only"));
            }
            (Some(own), Some(_)) => {
                if !is_known_neighbour(&from, segments) {
                    let own = FLOORS[own].0;
                    self.report(
                        *line,
                        "sideways",
                        format!("{from} and {to} share a floor ({own}): neither knows the other"),
                    );
                }
            }
        }
    }

    /// An attribute may name code in a string, as serde's `with` does, and may move a module.
    fn attribute(&mut self, line: usize, trees: &[TokenTree]) {
        if is_word(trees, 0, "doc") {
            return;
        }
        if is_word(trees, 0, "path") {
            self.report(line, "path-attribute", "a module lies where its name says");
        }
        // Inside one top-level module a macro may be shared by order; from lib.rs it would reach all.
        let is_for_all = is_word(trees, 0, "macro_use") && self.module.is_empty();
        if is_for_all || is_word(trees, 0, "macro_export") {
            self.report(
                line,
                "macro-scope",
                "a macro is shared by path (`pub(crate) use name;`), where it can be seen",
            );
        }
        self.code(trees);
        each_run(trees, &mut |trees| {
            for tree in trees {
                let TokenTree::Literal(literal) = tree else { continue };
                let text = literal.to_string();
                let text = text.trim_start_matches(['r', '#']).trim_matches(['"', '#']);
                if ["crate", "super", "self", "nccltune"].iter().any(|word| text.trim_start().starts_with(word))
                    && let Ok(stream) = text.parse::<TokenStream>()
                {
                    let trees: Vec<TokenTree> = stream.into_iter().collect();
                    if is_separator(&trees, 1) {
                        self.literal_line = Some(line_of(tree));
                        self.code(&trees);
                        self.literal_line = None;
                    }
                }
            }
        });
    }
}

fn is_known_neighbour(from: &str, segments: &[String]) -> bool {
    NEIGHBOURS.iter().any(|neighbour| {
        neighbour.from == from
            && segments.first().is_some_and(|to| to == neighbour.to)
            && neighbour.names.is_none_or(|names| segments.get(1).is_some_and(|name| names.contains(&name.as_str())))
    })
}

/// `#[test]`, `#[tokio::test]` or `proptest!`, at any depth.
fn holds_a_test(trees: &[TokenTree]) -> bool {
    let mut holds = false;
    each_run(trees, &mut |trees| {
        for at in 0..trees.len() {
            let is_attribute = attribute_at(trees, at).is_some_and(|attribute| {
                let attribute = inside(attribute);
                let is_argument = |tree: &TokenTree| matches!(tree, TokenTree::Group(_));
                let path: Vec<TokenTree> = attribute.into_iter().take_while(|tree| !is_argument(tree)).collect();
                path.len().checked_sub(1).is_some_and(|last| is_word(&path, last, "test"))
            });
            holds |= is_attribute || (is_word(trees, at, "proptest") && is_sign(trees, at + 1, '!'));
        }
    });
    holds
}

#[test]
fn every_module_stays_on_its_floor() {
    assert_none(&check(&source::repository()));
}

#[test]
fn every_module_has_one_floor_and_every_exception_a_reason() {
    let mut modules: Vec<&str> = FLOORS.iter().flat_map(|(_, modules)| modules.iter().copied()).collect();
    let count = modules.len();
    modules.sort_unstable();
    modules.dedup();
    assert_eq!(modules.len(), count, "a module stands on two floors");
    for Neighbour { from, to, reason, .. } in NEIGHBOURS {
        assert!(floor_of(from).is_some() && floor_of(from) == floor_of(to), "{from} and {to} share no floor");
        assert!(!reason.is_empty(), "{from} may know {to} without a reason");
    }
}

/// A small tree that keeps every rule, in the shapes that come closest to breaking one.
fn clean_tree() -> Files {
    let files = [
        ("src/main.rs", MAIN),
        ("src/lib.rs", LIB),
        (
            "src/units.rs",
            "//! Units.\npub(crate) fn f() {}\n#[cfg(test)]\nmod tests { use crate::cli::*; #[test] fn t() {} }\n",
        ),
        (
            "src/machine.rs",
            "//! See [`crate::cli`].\n/// As [`crate::campaign::run`] knows.\npub struct NcclVersion;\n",
        ),
        ("src/knob.rs", "//! Knobs.\nuse crate::machine::{NcclVersion, NcclVersion as Version};\n"),
        (
            "src/record/mod.rs",
            "//! Records.\nmod space;\npub use space::S;\nuse super::units;\nuse self::space as s;\n",
        ),
        (
            "src/record/space.rs",
            "//! Spaces.\nuse super::Arm;\nuse crate::{machine::*, record, units::{self, f}};\nmod inner { use super::S; }\n",
        ),
        ("src/dynlib.rs", "//! The loader.\npub(in crate::dynlib) struct L(pub (u8, u8));\n"),
        ("src/bindings/mod.rs", "//! Tables.\nuse crate::dynlib;\nmod cuda;\n#[cfg(test)]\nmod tests;\n"),
        ("src/bindings/cuda.rs", "//! CUDA.\nfn f() { super::g(format!(\"{}\", crate::units::f::<u8>())); }\n"),
        ("src/bindings/tests.rs", "//! Tests.\nuse crate::campaign;\n#[test]\nfn t() {}\n"),
        (
            "src/cli/mod.rs",
            "//! The door.\nuse crate::{campaign, units};\nfn f() -> bool { units::A == crate::campaign::B { 0 } }\n",
        ),
        ("tests/it/main.rs", "use nccltune::units;\n"),
    ];
    files.into_iter().map(|(file, text)| (file.to_owned(), text.to_owned())).collect()
}

const MAIN: &str = "//! The binary.
use std::process::{self, ExitCode};
use nccltune::cli;
fn main() -> ExitCode {
    if let Some(status) = cli::run(std::env::args_os()) { return ExitCode::from(status); }
    process::abort()
}
";

const LIB: &str = "//! The library.
#![warn(missing_docs)]
// 0 words
pub mod units;
#[cfg(unix)]
pub(crate) mod machine;
mod knob;
pub mod record;
pub mod dynlib;
pub mod bindings;
pub mod cli;
";

#[test]
fn a_clean_tree_passes() {
    assert_none(&check(&clean_tree()));
}

/// What is wrong, the file that takes the place of the clean one, its text, and where and as what
/// it must be reported.
type Planted = (&'static str, &'static str, &'static str, usize, &'static str);

#[track_caller]
fn assert_caught(planted: &[Planted]) {
    for (name, file, text, line, rule) in planted {
        let mut files = clean_tree();
        files.insert((*file).to_owned(), (*text).to_owned());
        assert_only(&check(&files), name, file, *line, rule);
    }
}

#[test]
fn planted_uses_are_caught() {
    assert_caught(&[
        ("upward", "src/units.rs", "//! U.\nuse crate::record::Space;\n", 2, "upward"),
        ("upward by one floor", "src/process/mod.rs", "//! P.\n\nuse crate::discovery;\n", 3, "upward"),
        ("the door is above all", "src/flow/tune.rs", "//! T.\nuse crate::cli::Args;\n", 2, "upward"),
        ("sideways", "src/search/mod.rs", "//! S.\nuse crate::backend::Nccl;\n", 2, "sideways"),
        ("an exception names its items", "src/knob.rs", "//! K.\nuse crate::machine::Machine;\n", 2, "sideways"),
        ("an exception is no licence for the module", "src/knob.rs", "//! K.\nuse crate::machine;\n", 2, "sideways"),
        ("an exception goes one way", "src/dynlib.rs", "//! D.\nuse crate::bindings::Cuda;\n", 2, "sideways"),
        ("in a group", "src/stats/mod.rs", "//! S.\nuse crate::{\n    units,\n    record,\n};\n", 4, "sideways"),
        ("in a nested group", "src/units.rs", "//! U.\nuse crate::{{units::{self, f}, {cli::{a, b}}}};\n", 2, "upward"),
        ("in an expression", "src/units.rs", "//! U.\nconst A: u8 =\n    crate::stats::MEAN;\n", 3, "upward"),
        ("in a type", "src/units.rs", "//! U.\nfn f(x: Vec<<crate::cli::A as Into<u8>>::B>) {}\n", 2, "upward"),
        ("in a function body", "src/units.rs", "//! U.\nfn f() {\n    use crate::campaign as c;\n}\n", 3, "upward"),
        ("in a macro", "src/units.rs", "//! U.\nfn f() {\n    format!(\"{}\", crate::emit::text());\n}\n", 3, "upward"),
        ("used in a macro", "src/units.rs", "//! U.\nselect! { x = y => { use crate::{emit}; } }\n", 2, "upward"),
        (
            "in a macro's definition",
            "src/units.rs",
            "//! U.\nmacro_rules! m { () => { $crate::emit::f() } }\n",
            2,
            "upward",
        ),
        ("in a tuple field", "src/units.rs", "//! U.\nstruct S(pub (crate::cli::A));\n", 2, "upward"),
        (
            "in an attribute",
            "src/units.rs",
            "//! U.\n#[arg(value_parser = crate::cli::parse)]\nstruct S;\n",
            2,
            "upward",
        ),
        (
            "in serde's string",
            "src/units.rs",
            "//! U.\n#[serde(\n  with = \"crate::cli::hex\")]\nstruct S;\n",
            3,
            "upward",
        ),
        ("as a raw word", "src/units.rs", "//! U.\nuse crate::r#cli;\n", 2, "upward"),
        ("by super at depth one", "src/units.rs", "//! U.\nuse super::cli;\n", 2, "upward"),
        ("by super in mod.rs", "src/record/mod.rs", "//! R.\nfn f() { super::emit::f() }\n", 2, "upward"),
        ("by self::super", "src/units.rs", "//! U.\nuse self::super::{record as r};\n", 2, "upward"),
        ("by super in a string", "src/units.rs", "//! U.\n#[serde(with = \"super::cli\")]\nstruct S;\n", 2, "upward"),
        ("test code outside tests", "src/units.rs", "//! U.\n#[cfg(test)]\nuse crate::cli;\n", 3, "upward"),
        (
            "not quite cfg(test)",
            "src/units.rs",
            "//! U.\n#[cfg(not(test))]\nmod tests { use crate::cli; #[test] fn t() {} }\n",
            3,
            "upward",
        ),
        (
            "a module beside tests",
            "src/units.rs",
            "//! U.\n#[cfg(test)]\nmod tests {\n#[test] fn t() {} }\nmod x { use crate::cli; }\n",
            5,
            "upward",
        ),
    ]);
}

#[test]
fn planted_ways_around_are_caught() {
    assert_caught(&[
        ("super::super", "src/record/space.rs", "//! S.\nuse super::super::units;\n", 2, "super-super"),
        (
            "super::super in code",
            "src/record/space.rs",
            "//! S.\nfn f() { super::super::emit::f() }\n",
            2,
            "super-super",
        ),
        ("super::super by a group", "src/record/space.rs", "//! S.\nuse super::{A, super::units};\n", 2, "super-super"),
        (
            "super::super in a module",
            "src/units.rs",
            "//! U.\nmod x {\n    use super::super::cli;\n}\n",
            3,
            "super-super",
        ),
        ("an alias of the root", "src/units.rs", "//! U.\nuse crate as c;\n", 2, "root-alias"),
        ("an alias in a group", "src/units.rs", "//! U.\nuse crate::{self as c};\n", 2, "root-alias"),
        ("an alias by super", "src/units.rs", "//! U.\nuse super as c;\n", 2, "root-alias"),
        ("an alias by extern crate", "src/units.rs", "//! U.\nextern crate self as c;\n", 2, "root-alias"),
        ("the crate by its own name", "src/units.rs", "//! U.\nuse nccltune::cli;\n", 2, "root-alias"),
        (
            "a module only a macro knows",
            "src/units.rs",
            "//! U.\nmacro_rules! m { ($x:ident) => { crate::$x::f() } }\n",
            2,
            "root-alias",
        ),
        ("a glob of the root", "src/units.rs", "//! U.\nuse crate::*;\n", 2, "root-glob"),
        ("a glob of the root by super", "src/units.rs", "//! U.\nuse super::*;\n", 2, "root-glob"),
        ("a glob in a group", "src/units.rs", "//! U.\nuse crate::{units, *};\n", 2, "root-glob"),
        ("included code", "src/units.rs", "//! U.\ninclude!(\"cli/mod.rs\");\n", 2, "include"),
        ("a module elsewhere", "src/units.rs", "//! U.\n#[path = \"cli/mod.rs\"]\nmod door;\n", 2, "path-attribute"),
        (
            "a macro for everyone",
            "src/units.rs",
            "//! U.\n#[macro_export]\nmacro_rules! m { () => {} }\n",
            2,
            "macro-scope",
        ),
        (
            "tests without a test",
            "src/units.rs",
            "//! U.\n#[cfg(test)]\nmod tests { use crate::cli; }\n",
            3,
            "hidden-by-tests",
        ),
        (
            "tests for others",
            "src/units.rs",
            "//! U.\n#[cfg(test)]\npub mod tests { #[test] fn t() {} }\n",
            3,
            "hidden-by-tests",
        ),
        ("a file without a floor", "src/leftovers/text.rs", "//! H.\n", 1, "no-floor"),
        ("a path without a floor", "src/cli/mod.rs", "//! C.\nuse crate::leftovers;\n", 2, "no-floor"),
        ("no Rust at all", "src/units.rs", "//! U.\nfn f( {\n", 2, "not-rust"),
    ]);
}

#[test]
fn planted_roots_are_caught() {
    assert_caught(&[
        ("a re-export", "src/lib.rs", "//! L.\npub mod units;\npub use units::f;\npub mod cli;\n", 3, "re-export"),
        ("a private import", "src/lib.rs", "//! L.\nuse units::{f, g};\n", 2, "re-export"),
        (
            "code in lib.rs",
            "src/lib.rs",
            "//! L.\npub fn f() { crate::cli::run() }\npub mod cli;\n",
            2,
            "lib-holds-modules",
        ),
        (
            "a module's body in lib.rs",
            "src/lib.rs",
            "//! L.\npub mod cli;\nmod units { fn f() {} }\n",
            3,
            "lib-holds-modules",
        ),
        ("a module without a floor", "src/lib.rs", "//! L.\npub mod leftovers;\n", 2, "no-floor"),
        ("macros for all below", "src/lib.rs", "//! L.\n#[macro_use]\nmod units;\n", 2, "macro-scope"),
        (
            "main past the door",
            "src/main.rs",
            "//! M.\nfn main() { nccltune::campaign::run() }\n",
            2,
            "main-uses-the-door",
        ),
        (
            "main past the door by use",
            "src/main.rs",
            "//! M.\nuse nccltune::{cli,\n units};\n",
            3,
            "main-uses-the-door",
        ),
        ("main with everything", "src/main.rs", "//! M.\nuse nccltune::*;\n", 2, "main-uses-the-door"),
        ("main with the crate renamed", "src/main.rs", "//! M.\nuse nccltune as n;\n", 2, "main-uses-the-door"),
        (
            "main with another crate",
            "src/main.rs",
            "//! M.\nfn main() -> anyhow::Result<()> {}\n",
            2,
            "main-uses-the-door",
        ),
        (
            "main with another crate by use",
            "src/main.rs",
            "//! M.\nuse {std::io, anyhow::Result};\n",
            2,
            "main-uses-the-door",
        ),
        ("main in a macro", "src/main.rs", "//! M.\n#[tokio::main]\nfn main() {}\n", 2, "main-uses-the-door"),
        ("main with modules", "src/main.rs", "//! M.\nmod args;\n", 2, "main-uses-the-door"),
    ]);
}

#[test]
fn planted_test_files_are_caught() {
    let mut files = clean_tree();
    files.insert("src/bindings/tests.rs".to_owned(), "//! No test.\nuse crate::campaign;\n".to_owned());
    assert_only(&check(&files), "a file of tests without one", "src/bindings/mod.rs", 5, "hidden-by-tests");

    let mut files = clean_tree();
    files.insert("src/bindings/mod.rs".to_owned(), "//! Tables.\nmod tests;\n".to_owned());
    assert_only(&check(&files), "a file called tests that is always built", "src/bindings/tests.rs", 2, "upward");
}
