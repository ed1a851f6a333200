//! What is true of every tracked file.
//!
//! Each rule is a function over files in memory, so that planted violations can show that it works.
//! A rule that needs exceptions has a list at the top of this file, one line each with its reason;
//! extending a list is a decision that a reader of the change can see.

use proc_macro2::{Delimiter, TokenTree};

use crate::source::{
    self, Files, Violation, assert_none, assert_only, attribute_at, each_run, group_at, inside, is_sign, is_word,
    line_of, word_at,
};

/// Where something stands that is banned elsewhere: a file, or a folder with `/` at its end.
type Room = (&'static str, &'static str);

/// Files that may hold `unsafe`.
const UNSAFE_ROOMS: &[Room] = &[
    ("src/bindings/", "calls into CUDA and NCCL"),
    ("src/dynlib.rs", "loads a library and looks up its symbols"),
    ("src/dynlib/", "loads a library and looks up its symbols"),
    ("src/worker/set_environment.rs", "changes the environment while the worker has one thread"),
    ("src/worker/control_file.rs", "maps the control file that a worker shares with the plugin"),
    ("nccl-abi/", "names the types of C functions, and calls none"),
    ("tuner-plugin/", "NCCL calls it through C function tables"),
    ("tests/fake-gpu/", "answers C calls in the place of the driver and NCCL"),
    ("tests/it/flip_bits.rs", "is preloaded in the place of the C library's memcpy"),
];

/// Files that may use what clippy.toml bans elsewhere.
const OUTSIDE_WORLD_ROOMS: &[Room] = &[
    ("src/clock.rs", "reads clocks"),
    ("src/cli/environment.rs", "reads the environment"),
    ("src/worker/set_environment.rs", "changes a worker's environment"),
    ("src/process/", "starts children"),
    ("src/process.rs", "starts children"),
    ("tuner-plugin/", "lives in somebody else's process: it reads that environment and its own files"),
    ("examples/", "stand-alone programs that start others and compare them"),
    ("tests/it/main.rs", "tests ask git, and start the program as a user would"),
    ("tests/fake-gpu/", "is told by the environment how to behave"),
];

/// Crates nobody asks about. Every other dependency says above its line why it is there.
const ORDINARY_CRATES: &[&str] = &[
    "anyhow",
    "clap",
    "csv",
    "insta",
    "itertools",
    "proptest",
    "rand",
    "serde",
    "serde_json",
    "sha2",
    "tempfile",
    "thiserror",
    "tokio",
    "toml",
];

/// The registry every locked crate comes from; a mirror of one network would break all others.
const REGISTRY: &str = "registry+https://github.com/rust-lang/crates.io-index";

const LINE_COLUMNS_MAX: usize = 140;

/// Text that no tracked file contains. The entries are put together from parts so that this file
/// does not contain them either.
const BANNED: &[Banned] = &[
    // Paths of the machine somebody happened to build or record on. Examples use /srv, /opt or ~.
    Banned { text: concat!("/wo", "rk/"), is_path: true, rule: "machine-path" },
    Banned { text: concat!("/ro", "ot/"), is_path: true, rule: "machine-path" },
    Banned { text: concat!("/ho", "me/"), is_path: true, rule: "machine-path" },
    Banned { text: concat!("../sh", "ared"), is_path: false, rule: "machine-path" },
    // Hosts that package managers download from.
    Banned { text: concat!("index.crates", ".io"), is_path: false, rule: "registry-host" },
    Banned { text: concat!("static.crates", ".io"), is_path: false, rule: "registry-host" },
    Banned { text: concat!("pypi", ".org"), is_path: false, rule: "registry-host" },
    Banned { text: concat!("files.python", "hosted.org"), is_path: false, rule: "registry-host" },
    Banned { text: concat!("registry.", "npmjs.org"), is_path: false, rule: "registry-host" },
    Banned { text: concat!("proxy.", "golang.org"), is_path: false, rule: "registry-host" },
    // How the work is organised; a reader of the code has no use for it.
    Banned { text: concat!("helper ", "agent"), is_path: false, rule: "organisation" },
    Banned { text: concat!("sub-", "agent"), is_path: false, rule: "organisation" },
    Banned { text: concat!("sub", "agent"), is_path: false, rule: "organisation" },
    Banned { text: concat!("issue ", "tracker"), is_path: false, rule: "organisation" },
    Banned { text: concat!("session ", "budget"), is_path: false, rule: "organisation" },
];

struct Banned {
    /// In lower case; any case matches.
    text: &'static str,
    /// Only where an absolute path starts: `a/b/` may be part of any relative path.
    is_path: bool,
    rule: &'static str,
}

fn is_in(rooms: &[Room], file: &str) -> bool {
    rooms.iter().any(|(room, _)| file == *room || (room.ends_with('/') && file.starts_with(room)))
}

fn extension(file: &str) -> &str {
    file.rsplit_once('.').map_or("", |(_, extension)| extension)
}

fn check(files: &Files) -> Vec<Violation> {
    let mut found = Vec::new();
    for (file, text) in files {
        let mut report = |line: usize, rule: &'static str, message: String| {
            found.push(Violation { file: file.clone(), line, rule, message });
        };
        banned_text(text, &mut report);
        if extension(file) == "rs" {
            shape_of_rust(text, &mut report);
            match source::tokens(file, text) {
                Ok(trees) => {
                    unsafe_code(file, text, &trees, &mut report);
                    outside_world(file, &source::without_tests(&trees), &mut report);
                    unfinished(&trees, &mut report);
                }
                Err(violation) => found.push(violation),
            }
        } else if file == "Cargo.lock" || file.ends_with("/Cargo.lock") {
            locked_sources(text, &mut report);
        } else if file == "Cargo.toml" || file.ends_with("/Cargo.toml") {
            dependencies(text, &mut report);
        } else if file.starts_with("search-spaces/") {
            parses(file, text, &mut report);
        }
    }
    found.sort();
    found
}

/// Where a rule says what it found: line, rule, message.
type Report<'a> = dyn FnMut(usize, &'static str, String) + 'a;

fn banned_text(text: &str, report: &mut Report) {
    for (number, line) in (1..).zip(text.lines()) {
        let line = line.to_ascii_lowercase();
        for banned in BANNED {
            let continues_a_path = |at: usize| {
                line[..at]
                    .chars()
                    .next_back()
                    .is_some_and(|before| before.is_alphanumeric() || "._-~}/".contains(before))
            };
            if line.match_indices(banned.text).any(|(at, _)| !banned.is_path || !continues_a_path(at)) {
                report(number, banned.rule, format!("{:?} has no place in a tracked file", banned.text));
            }
        }
    }
}

fn shape_of_rust(text: &str, report: &mut Report) {
    if !text.starts_with("//!") {
        report(1, "module-doc", "a Rust file begins by saying what it is (`//!`)".to_owned());
    }
    for (number, line) in (1..).zip(text.lines()) {
        let columns = line.chars().count();
        if columns > LINE_COLUMNS_MAX {
            report(number, "long-line", format!("{columns} columns, at most {LINE_COLUMNS_MAX}"));
        }
    }
}

/// `unsafe` has its rooms, and says why it is sound where it stands.
fn unsafe_code(file: &str, text: &str, trees: &[TokenTree], report: &mut Report) {
    let lines: Vec<&str> = text.lines().collect();
    each_run(trees, &mut |trees| {
        for at in 0..trees.len() {
            let line = line_of(&trees[at]);
            let allows = attribute_at(trees, at).is_some_and(|group| allows(&inside(group), "unsafe_code"));
            if !is_word(trees, at, "unsafe") && !allows {
                continue;
            }
            if !is_in(UNSAFE_ROOMS, file) {
                report(line, "unsafe-room", "`unsafe` lives in the files that tests/it/tidy.rs lists".to_owned());
            } else if !allows && needs_a_comment(trees, at) && !is_explained(&lines, line) {
                report(line, "safety-comment", "say above, in a `// SAFETY:` comment, why this is sound".to_owned());
            }
        }
    });
}

/// Blocks, functions, impls, traits and foreign blocks do; the type of a function pointer and an
/// `unsafe(..)` attribute promise nothing themselves.
fn needs_a_comment(trees: &[TokenTree], at: usize) -> bool {
    let mut next = at + 1;
    if is_word(trees, next, "extern") {
        next += 1;
        next += usize::from(matches!(trees.get(next), Some(TokenTree::Literal(_))));
    }
    let is_function = is_word(trees, next, "fn") && word_at(trees, next + 1).is_some();
    let is_block = group_at(trees, next, Delimiter::Brace).is_some();
    is_function || is_block || is_word(trees, next, "impl") || is_word(trees, next, "trait")
}

/// Whether the comment above the statement that holds this line has a `SAFETY:`. A function may
/// say it to its callers instead, in its `# Safety` section.
fn is_explained(lines: &[&str], line: usize) -> bool {
    let mut above = lines[..line - 1].iter().rev().map(|line| line.trim()).peekable();
    // The statement may have begun on an earlier line, and attributes come after comments.
    let belongs = |line: &str| line.starts_with("#[") || [" =", "(", "=>", "|"].iter().any(|end| line.ends_with(end));
    while above.next_if(|line| !line.starts_with("//") && belongs(line)).is_some() {}
    above
        .take_while(|line| line.starts_with("//") || line.starts_with("#["))
        .any(|line| line.starts_with("// SAFETY:") || line.starts_with("/// # Safety"))
}

/// Whether an attribute, possibly inside `cfg_attr`, lets a lint pass.
fn allows(attribute: &[TokenTree], lint: &str) -> bool {
    let (mut is_level, mut is_named) = (false, false);
    each_run(attribute, &mut |trees| {
        for at in 0..trees.len() {
            is_level |= ["allow", "expect", "warn"].iter().any(|level| is_word(trees, at, level));
            is_named |= is_word(trees, at, lint);
        }
    });
    is_level && is_named
}

/// Clocks, environment, children and files without a name in their errors: clippy.toml bans them,
/// and only their rooms may lift the ban. The unit tests of a module may too: they ask a shell how it
/// reads a file, and nothing that ships depends on it.
fn outside_world(file: &str, trees: &[TokenTree], report: &mut Report) {
    each_run(trees, &mut |trees| {
        for at in 0..trees.len() {
            let lifts =
                attribute_at(trees, at).is_some_and(|attribute| allows(&inside(attribute), "disallowed_methods"));
            if lifts && !is_in(OUTSIDE_WORLD_ROOMS, file) {
                let message = "use the room that clippy.toml names; rooms are listed in tests/it/tidy.rs";
                report(line_of(&trees[at]), "outside-world-room", message.to_owned());
            }
        }
    });
}

/// Nothing is left for later in silence.
fn unfinished(trees: &[TokenTree], report: &mut Report) {
    each_run(trees, &mut |trees| {
        for at in 0..trees.len() {
            let line = line_of(&trees[at]);
            for name in ["todo", "unimplemented"] {
                if is_word(trees, at, name) && is_sign(trees, at + 1, '!') {
                    report(line, "unfinished", format!("`{name}!` is a panic that waits for a user"));
                }
            }
            if let Some(attribute) = attribute_at(trees, at)
                && ignores_without_reason(&inside(attribute))
            {
                // The text of a finding, no attribute of this file's own tests.
                let message = "a test that is left out says when it is run: `#[ignore = \"...\"]`";
                report(line, "ignored-test", message.to_owned());
            }
        }
    });
}

fn ignores_without_reason(attribute: &[TokenTree]) -> bool {
    let mut without = false;
    let mut look = |trees: &[TokenTree]| {
        for at in 0..trees.len() {
            let has_reason = is_sign(trees, at + 1, '=')
                && matches!(trees.get(at + 2), Some(TokenTree::Literal(reason)) if reason.to_string().len() > 2);
            without |= is_word(trees, at, "ignore") && !has_reason;
        }
    };
    if is_word(attribute, 0, "ignore") {
        look(attribute);
    } else if is_word(attribute, 0, "cfg_attr") {
        each_run(attribute, &mut look);
    }
    without
}

fn locked_sources(text: &str, report: &mut Report) {
    for (number, line) in (1..).zip(text.lines()) {
        if let Some(source) = line.strip_prefix("source = ")
            && source.trim_matches('"') != REGISTRY
        {
            report(number, "registry-host", format!("{source} is not the registry that everybody can reach"));
        }
    }
}

/// Every dependency that is not ordinary has a comment above it. Crates of this workspace need none.
fn dependencies(text: &str, report: &mut Report) {
    let mut is_dependencies = false;
    let mut above = "";
    for (number, line) in (1..).zip(text.lines()) {
        let mut name = None;
        if let Some(table) = line.strip_prefix('[') {
            let table = table.trim_end().trim_matches(['[', ']']);
            is_dependencies = table.ends_with("dependencies");
            // `[dependencies.name]` is one dependency with a table of its own.
            name = table.rsplit_once("dependencies.").map(|(_, name)| name);
        } else if is_dependencies && line.starts_with(|start: char| start.is_ascii_alphanumeric()) {
            let end = line.find(['.', '=', ' ']).unwrap_or(line.len());
            name = (!line.contains("path =")).then_some(&line[..end]);
        }
        if let Some(name) = name
            && !ORDINARY_CRATES.contains(&name)
            && !above.starts_with('#')
        {
            report(number, "dependency-reason", format!("say in a comment above why {name} is needed"));
        }
        above = line;
    }
}

fn parses(file: &str, text: &str, report: &mut Report) {
    let line_at = |offset: usize| text[..offset].matches('\n').count() + 1;
    if extension(file) == "toml"
        && let Err(error) = toml::from_str::<toml::Table>(text)
    {
        let line = error.span().map_or(1, |span| line_at(span.start));
        report(line, "does-not-parse", error.message().to_owned());
    } else if extension(file) == "json"
        && let Err(error) = serde_json::from_str::<serde_json::Value>(text)
    {
        report(error.line(), "does-not-parse", error.to_string());
    }
}

#[test]
fn every_tracked_file_is_tidy() {
    assert_none(&check(&source::repository()));
}

#[test]
fn every_room_has_a_reason() {
    for (room, reason) in UNSAFE_ROOMS.iter().chain(OUTSIDE_WORLD_ROOMS) {
        assert!(!reason.is_empty(), "{room}");
    }
    assert!(BANNED.iter().all(|banned| banned.text == banned.text.to_ascii_lowercase()));
}

/// What is wrong, a file, its text, and where and as what it must be reported.
type Planted<'a> = (&'a str, &'a str, &'a str, usize, &'a str);

#[track_caller]
fn assert_caught(planted: &[Planted]) {
    for (name, file, text, line, rule) in planted {
        let files = Files::from([((*file).to_owned(), (*text).to_owned())]);
        assert_only(&check(&files), name, file, *line, rule);
    }
}

#[track_caller]
fn assert_tidy(tidy: &[(&str, &str)]) {
    for (file, text) in tidy {
        assert_none(&check(&Files::from([((*file).to_owned(), (*text).to_owned())])));
    }
}

#[test]
fn planted_unsafe_code_is_caught() {
    let bindings = "src/bindings/cuda.rs";
    assert_caught(&[
        ("no room", "src/units.rs", "//! U.\nfn f() {\n  // SAFETY: no.\n  unsafe { g() }\n}\n", 4, "unsafe-room"),
        ("no room in a macro", "src/units.rs", "//! U.\nm! { x => { unsafe { g() } } }\n", 2, "unsafe-room"),
        ("a lint lifted", "src/units.rs", "//! U.\n#![allow(unsafe_code, reason = \"x\")]\n", 2, "unsafe-room"),
        (
            "a name that begins like a room",
            "src/dynlib.rs.rs",
            "//! D.\n// SAFETY: x\nunsafe fn f() {}\n",
            3,
            "unsafe-room",
        ),
        ("a bare block", bindings, "//! C.\nfn f() {\n  unsafe { g() }\n}\n", 3, "safety-comment"),
        ("a bare impl", bindings, "//! C.\nunsafe impl Send for A {}\n", 2, "safety-comment"),
        ("a bare function", bindings, "//! C.\npub unsafe extern \"C\" fn f() {}\n", 2, "safety-comment"),
        ("a bare foreign block", bindings, "//! C.\nunsafe extern \"C\" {}\n", 2, "safety-comment"),
        (
            "a comment for one of two",
            bindings,
            "//! C.\n// SAFETY: x\nunsafe impl A for B {}\nunsafe impl C for B {}\n",
            4,
            "safety-comment",
        ),
        (
            "a comment that is too far",
            bindings,
            "//! C.\nfn f() {\n  // SAFETY: x\n  h();\n  unsafe { g() }\n}\n",
            5,
            "safety-comment",
        ),
    ]);
    assert_tidy(&[
        (bindings, "//! C.\n// SAFETY: the table outlives us,\n// as its owner says.\n#[inline]\nunsafe fn f() {}\n"),
        (bindings, "//! C.\n/// Calls.\n///\n/// # Safety\n///\n/// `p` is valid.\npub unsafe fn f(p: *const u8) {}\n"),
        (bindings, "//! C.\nfn f() {\n  // SAFETY: x\n  let a =\n    unsafe { g() };\n}\n"),
        (bindings, "//! C.\ntype F = unsafe extern \"C\" fn(u8) -> u8;\nstruct S { f: unsafe fn() }\n"),
        ("tuner-plugin/src/lib.rs", "//! P.\n#[unsafe(no_mangle)]\nstatic A: u8 = 0;\n"),
        ("src/units.rs", "//! About unsafe code.\nconst A: &str = \"unsafe { }\"; // unsafe\n"),
    ]);
}

#[test]
fn planted_outside_world_is_caught() {
    let lifted = "//! U.\n#[expect(clippy::disallowed_methods, reason = \"x\")]\nfn f() {}\n";
    let hidden = "//! U.\nfn f() {\n#![cfg_attr(unix, allow(clippy::disallowed_methods))]\n}\n";
    assert_caught(&[
        ("expected", "src/campaign.rs", lifted, 2, "outside-world-room"),
        ("under a condition", "src/cli/mod.rs", hidden, 3, "outside-world-room"),
        ("in another test", "tests/it/replay.rs", lifted, 2, "outside-world-room"),
    ]);
    let test = "//! U.\n#[cfg(test)]\n#[allow(dead_code)]\nmod tests {\n#[expect(clippy::disallowed_methods)]\n#[test]\nfn f() {}\n}\n";
    assert_tidy(&[("src/clock.rs", lifted), ("src/process/supervisor.rs", hidden), ("src/units.rs", test)]);
    let other = test.replace("mod tests", "mod support");
    let not_test = test.replace("cfg(test)", "cfg(unix)");
    let beside = format!("{test}#[allow(clippy::disallowed_methods)]\nfn f() {{}}\n");
    assert_caught(&[
        ("a test module by another name", "src/units.rs", &other, 5, "outside-world-room"),
        ("tests that are always built", "src/units.rs", &not_test, 5, "outside-world-room"),
        ("beside the tests", "src/units.rs", &beside, 9, "outside-world-room"),
    ]);
}

#[test]
fn planted_unfinished_code_is_caught() {
    // Planted in strings, for the check to find: nothing here is unfinished, and no test is ignored.
    assert_caught(&[
        ("todo", "src/units.rs", "//! U.\nfn f() { todo!() }\n", 2, "unfinished"),
        ("unimplemented", "src/units.rs", "//! U.\nfn f() { x(|| unimplemented!(\"later\")) }\n", 2, "unfinished"),
        ("ignored", "src/units.rs", "//! U.\n#[test]\n#[ignore]\nfn f() {}\n", 3, "ignored-test"),
        ("ignored for nothing", "src/units.rs", "//! U.\n#[test]\n#[ignore = \"\"]\nfn f() {}\n", 3, "ignored-test"),
        ("ignored at times", "src/units.rs", "//! U.\n#[cfg_attr(unix, ignore)]\nfn f() {}\n", 2, "ignored-test"),
    ]);
    assert_tidy(&[("src/units.rs", "//! todo!\n#[ignore = \"needs two GPUs\"]\nfn todo() { let ignore = 1; }\n")]);
}

#[test]
fn planted_text_is_caught() {
    for banned in BANNED {
        let text = format!("A line.\nSee {}x.\n", banned.text.to_ascii_uppercase());
        assert_caught(&[(banned.text, "docs/start.md", &text, 2, banned.rule)]);
    }
    let lines = [
        format!("target/release{}x and ~{}x", BANNED[0].text, BANNED[1].text),
        "https://github.com/rust-lang/rust, and what a server issues".to_owned(),
    ];
    assert_tidy(&[("docs/start.md", &lines.join("\n"))]);
}

#[test]
fn planted_shapes_are_caught() {
    let wide = |columns: usize| format!("//! U.\n// {}\n", "é".repeat(columns - 3));
    assert_caught(&[
        ("no module doc", "src/units.rs", "\n//! U.\n", 1, "module-doc"),
        ("a wide line", "src/units.rs", &wide(LINE_COLUMNS_MAX + 1), 2, "long-line"),
        ("broken TOML", "search-spaces/machines/a.toml", "a = 1\nb = \n", 2, "does-not-parse"),
        ("TOML that says things twice", "search-spaces/a.toml", "a = 1\nb = 2\na = 3\n", 3, "does-not-parse"),
        ("broken JSON", "search-spaces/presets/a.json", "{\n\"a\": 1,\n}\n", 3, "does-not-parse"),
    ]);
    assert_tidy(&[
        ("src/units.rs", &wide(LINE_COLUMNS_MAX)),
        ("search-spaces/a.toml", "a = 1\n"),
        ("search-spaces/a.json", "{}\n"),
        ("search-spaces/README.md", "{\n"),
    ]);
}

#[test]
fn planted_dependencies_are_caught() {
    let mirror = "[[package]]\nname = \"a\"\nsource = \"registry+https://mirror.example/index\"\n";
    assert_caught(&[
        ("unexplained", "Cargo.toml", "[dependencies]\nanyhow = \"1\"\nleftpad = \"1\"\n", 3, "dependency-reason"),
        ("explained next door", "Cargo.toml", "[dependencies]\n# Why.\na = \"1\"\nb = \"1\"\n", 4, "dependency-reason"),
        (
            "for one target",
            "a/Cargo.toml",
            "[target.'cfg(unix)'.dependencies]\na.version = \"1\"\n",
            2,
            "dependency-reason",
        ),
        ("for tests", "Cargo.toml", "[dev-dependencies]\na = { version = \"1\" }\n", 2, "dependency-reason"),
        ("in its own table", "Cargo.toml", "[dependencies.a]\nversion = \"1\"\n", 1, "dependency-reason"),
        ("for all members", "Cargo.toml", "[workspace.dependencies]\na = \"1\"\n", 2, "dependency-reason"),
        ("locked to a mirror", "Cargo.lock", mirror, 3, "registry-host"),
    ]);
    let explained = "[package]\nname = \"a\"\n\n[dependencies]\n# Why.\na = { version = \"1\", features = [\n  \"b\",\n] }\n\
                     nccl-abi = { path = \"nccl-abi\" }\nserde = \"1\"\n\n[lints.rust]\nunsafe_code = \"deny\"\n";
    assert_tidy(&[("Cargo.toml", explained)]);
}
