//! What README.md and docs/ say is what the program does.
//!
//! A page is read as text, the program is run as a user would, and the two are compared:
//!
//! - `<!-- prints: nccltune ... -->` above a fenced block: the command's standard output holds the
//!   block, line by line. A line `[...]` stands for any number of lines that were left out; lines
//!   between two such gaps must be consecutive. `<!-- says: ... -->` is the same for standard error,
//!   `<!-- file: PATH -->` for a tracked file.
//! - Commands in blocks marked `sh` are given to the program; its parser must take them.
//! - Figures of the recorded run, links, flags, fields and generated pages are checked one by one.
//!
//! Nothing is measured: `tune` is simulated, replayed, or only planned (`--dry-run`).

use std::collections::BTreeSet;
use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use fs_err as fs;
use nccltune::knob::{self, Knob, Proof, Risk, Values, Way};
use nccltune::machine::NcclVersion;
use serde_json::Value;

use crate::source::{self, Files};

const RECORDED: &str = "results/recorded/h200x2-host-memory";
/// A line that stands for lines left out.
const GAP: &str = "[...]";
/// Set it to have generated pages written instead of compared.
const UPDATE: &str = "NCCLTUNE_UPDATE_DOCS";

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

/// Every page that people read, by its path.
fn pages() -> Files {
    let is_page = |path: &str| Path::new(path).extension().is_some_and(|extension| extension == "md");
    source::repository().into_iter().filter(|(path, _)| is_page(path)).collect()
}

fn page(path: &str) -> String {
    fs::read_to_string(root().join(path)).expect("the page is there")
}

/// A fenced block: where its first line stands, its info string, and the comment right above it.
struct Block {
    line: usize,
    info: String,
    directive: Option<String>,
    lines: Vec<String>,
}

fn blocks(text: &str) -> Vec<Block> {
    let mut blocks = Vec::new();
    let mut open: Option<Block> = None;
    let mut directive = None;
    for (number, line) in (1..).zip(text.lines()) {
        let fence = line.trim_start().strip_prefix("```");
        match (&mut open, fence) {
            (None, Some(info)) => {
                let info = info.trim().to_owned();
                open = Some(Block { line: number + 1, info, directive: directive.take(), lines: Vec::new() });
            }
            (Some(_), Some(_)) => blocks.extend(open.take()),
            (Some(block), None) => block.lines.push(line.to_owned()),
            (None, None) => {
                let comment = line.trim().strip_prefix("<!-- ").and_then(|line| line.strip_suffix(" -->"));
                if comment.is_some() || !line.trim().is_empty() {
                    directive = comment.map(str::to_owned);
                }
            }
        }
    }
    assert!(open.is_none(), "a fenced block is never closed");
    blocks
}

/// A folder that looks like the root of a clone to relative paths, and takes what a command writes.
fn clone_of_the_tree() -> tempfile::TempDir {
    let folder = tempfile::tempdir().expect("a folder");
    fs::create_dir(folder.path().join("results")).expect("a folder in it");
    for name in ["results/recorded", "search-spaces"] {
        std::os::unix::fs::symlink(root().join(name), folder.path().join(name)).expect("a link");
    }
    folder
}

/// Runs the program without what the caller's environment could change.
fn run(folder: &Path, words: &[String]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_nccltune"));
    command.args(words).current_dir(folder);
    for (name, _) in std::env::vars_os() {
        let name = name.to_string_lossy().into_owned();
        if name.starts_with("NCCL") {
            command.env_remove(name);
        }
    }
    command.output().expect("the program runs")
}

/// The words of a command line as a shell would split it, up to a pipe or a redirection.
fn words(line: &str) -> Vec<String> {
    let mut words: Vec<String> = Vec::new();
    let (mut word, mut quote) = (None::<String>, None);
    for character in line.chars() {
        match (quote, character) {
            (Some(mark), _) if character == mark => quote = None,
            (None, '\'' | '"') => {
                quote = Some(character);
                word.get_or_insert_default();
            }
            (None, '|' | '>' | '&' | '#') if word.is_none() => return words,
            (None, ' ') => words.extend(word.take()),
            (Some(_) | None, _) => word.get_or_insert_default().push(character),
        }
    }
    words.extend(word);
    words
}

/// The arguments that a command line of a page gives to the program; none if it starts another.
fn arguments(line: &str) -> Option<Vec<String>> {
    let words = words(line.trim());
    if words.first()?.rsplit('/').next() == Some("nccltune") {
        return Some(words[1..].to_vec());
    }
    if words.len() > 1 && words[0] == "cargo" && words[1] == "run" && !words.iter().any(|word| word == "--example") {
        let separator = words.iter().position(|word| word == "--")?;
        return Some(words[separator + 1..].to_vec());
    }
    None
}

/// Dates differ from run to run; nothing else does.
fn without_dates(line: &str) -> String {
    let shape = |text: &str| -> String { text.chars().map(|c| if c.is_ascii_digit() { '0' } else { c }).collect() };
    let mut result = String::new();
    let mut rest = line.trim_end();
    while let Some(character) = rest.chars().next() {
        let date = ["0000-00-00T00:00:00Z", "00000000T000000"]
            .into_iter()
            .find(|date| rest.get(..date.len()).is_some_and(|start| shape(start) == **date));
        let taken = date.map_or(character.len_utf8(), str::len);
        result.push_str(date.unwrap_or(&rest[..taken]));
        rest = &rest[taken..];
    }
    result
}

/// Where a block departs from what it claims to show, in words.
fn departure(shown: &[String], actual: &str) -> Option<String> {
    let actual: Vec<String> = actual.lines().map(without_dates).collect();
    let shown: Vec<String> = shown.iter().map(|line| without_dates(line)).collect();
    let mut from = 0;
    let parts: Vec<&[String]> = shown.split(|line| line.trim() == GAP).collect();
    for (index, part) in parts.iter().enumerate() {
        let is_last = index + 1 == parts.len();
        let starts = if index == 0 { 0..=0 } else { from..=actual.len() };
        let fits = |start: &usize| {
            let end = start + part.len();
            actual.get(*start..end).is_some_and(|lines| lines == *part)
                && (!is_last || part.is_empty() || end == actual.len())
        };
        let Some(start) = starts.into_iter().find(fits) else {
            let unknown = |line: &&String| !actual[from.min(actual.len())..].contains(line);
            let first = part.iter().find(unknown).or(part.first()).cloned().unwrap_or_default();
            return Some(format!("no such lines, or not in this order: {first:?}\nactual:\n{}", actual.join("\n")));
        };
        from = start + part.len();
    }
    None
}

#[test]
fn shown_output_is_what_is_printed() {
    let folder = clone_of_the_tree();
    let mut shown = 0;
    for (path, text) in pages() {
        for block in blocks(&text) {
            let Some((kind, subject)) = block.directive.as_deref().and_then(|line| line.split_once(": ")) else {
                continue;
            };
            let actual = match kind {
                "file" => page(subject),
                "prints" | "says" => {
                    let arguments = arguments(subject).expect("a command of this program");
                    let output = run(folder.path(), &arguments);
                    let stream = if kind == "prints" { output.stdout } else { output.stderr };
                    String::from_utf8(stream).expect("text")
                }
                _ => continue,
            };
            shown += 1;
            if let Some(departure) = departure(&block.lines, &actual) {
                panic!("{path}:{}: {subject}: {departure}", block.line);
            }
        }
    }
    assert!(shown >= 8, "only {shown} blocks were compared");
}

#[test]
fn what_differs_is_noticed() {
    let block = |text: &str| -> Vec<String> { text.lines().map(str::to_owned).collect() };
    let actual = "a\nb\nc\nd 2026-01-02T03:04:05Z\n";
    for good in ["a\nb\nc\nd 2025-12-31T00:00:00Z", "a\n[...]\nc\n[...]", "[...]\nb\n[...]", "a\nb\n[...]"] {
        assert_eq!(departure(&block(good), actual), None, "{good}");
    }
    for bad in ["a\nc", "[...]\nc\n[...]\nb\n[...]", "a\nb", "b\n[...]", "[...]\nb\nd 2026-01-02T03:04:05Z", "x\n[...]"]
    {
        assert!(departure(&block(bad), actual).is_some(), "{bad}");
    }
    assert_eq!(words("nccltune tune --pin 'A=b c' | head"), ["nccltune", "tune", "--pin", "A=b c"]);
    assert_eq!(arguments("cargo run --release -- tune").unwrap(), ["tune"]);
    assert_eq!(arguments("cargo run --example x -- tune"), None);
}

/// Commands in blocks marked `sh`, continued lines joined: path, line, text.
fn commands() -> Vec<(String, usize, String)> {
    let mut commands = Vec::new();
    for (path, text) in pages() {
        for block in blocks(&text).into_iter().filter(|block| block.info == "sh") {
            let mut joined = String::new();
            for (offset, line) in block.lines.iter().enumerate() {
                joined.push_str(line.trim_end().trim_end_matches('\\'));
                if !line.trim_end().ends_with('\\') {
                    commands.push((path.clone(), block.line + offset, std::mem::take(&mut joined)));
                }
            }
        }
    }
    commands
}

#[test]
fn shown_commands_are_understood() {
    let folder = clone_of_the_tree();
    let mut seen = 0;
    for (path, line, text) in commands() {
        let Some(mut arguments) = arguments(&text) else { continue };
        let has = |flag: &str| arguments.iter().any(|argument| argument == flag);
        // Plans instead of measuring; what is resumed is not there, which ends it as soon.
        if has("tune") && !has("--resume") && !has("--dry-run") && !has("--help") {
            arguments.push("--dry-run".to_owned());
        }
        let output = run(folder.path(), &arguments);
        let errors = String::from_utf8_lossy(&output.stderr);
        // The last line of everything that the parser of the command line refuses.
        assert!(!errors.contains("For more information, try '--help'"), "{path}:{line}: {text}\n{errors}");
        assert!(!errors.contains("panicked"), "{path}:{line}: {text}\n{errors}");
        seen += 1;
    }
    assert!(seen >= 20, "only {seen} commands were tried");
}

#[test]
fn the_flags_of_the_comparisons_exist() {
    for (name, file) in [
        ("compare_with_nccl_tests", "examples/compare_with_nccl_tests.rs"),
        ("launch_speed", "examples/launch_speed/main.rs"),
    ] {
        let program = page(file);
        let mut seen = 0;
        for (path, line, text) in commands() {
            if !text.contains(&format!("--example {name} ")) {
                continue;
            }
            let words = words(&text);
            let separator = words.iter().position(|word| word == "--").expect("a separator");
            for flag in words[separator + 1..].iter().filter_map(|word| word.strip_prefix("--")) {
                let is_field = program.contains(&format!("    {}: ", flag.replace('-', "_")));
                assert!(is_field || program.contains(&format!("long = \"{flag}\"")), "{path}:{line}: --{flag}");
                seen += 1;
            }
        }
        assert!(seen > 0, "{name}");
    }
}

#[test]
fn the_two_commands_of_a_fresh_clone_stand_on_lines_of_their_own() {
    let readme = page("README.md");
    let lines: Vec<String> = blocks(&readme).into_iter().flat_map(|block| block.lines).collect();
    for command in ["cargo run --release -- tune", "cargo test --workspace"] {
        assert!(lines.iter().any(|line| line == command), "{command}");
    }
    let verified = "verified on 2 GPUs (H200) through host memory with NCCL 2.28.9; PCIe P2P, 8 ranks and every other \
                    NCCL version are unverified until a recorded run exists";
    assert!(readme.contains(verified));
}

fn json(path: &str) -> Value {
    serde_json::from_str(&page(path)).expect("JSON")
}

/// A change in per cent with its sign, as tables show it.
fn change(ratio: &Value) -> String {
    format!("{:+.1} %", (ratio.as_f64().expect("a ratio") - 1.0) * 100.0)
}

#[test]
fn figures_of_the_recorded_run_are_those_of_its_files() {
    let choice = json(&format!("{RECORDED}/choice.json"));
    let number = |pointer: &str| choice.pointer(pointer).and_then(Value::as_f64).expect("a number");
    let gain = |ratio: f64| format!("{:.1} %", (1.0 - ratio) * 100.0);
    let seconds = number("/search/wall_s").round() as u64;
    let mut claims = vec![
        format!("{} less time", gain(number("/objective/ratio"))),
        format!("{} to {}", gain(number("/objective/ratio_ci95/1")), gain(number("/objective/ratio_ci95/0"))),
        format!("{} paired launches", number("/statistics/launches")),
        format!("{} arms", number("/search/arms")),
        format!("{} launches", number("/search/launches")),
        format!("{} cells", number("/search/measured_cells")),
        format!("{} min {:02} s", seconds / 60, seconds % 60),
        format!("{:.1} %", number("/noise_floor") * 100.0),
        format!("{:.0} MiB", number("/memory/host_mib")),
    ];
    for set in ["points", "guard"] {
        for point in choice[set].as_array().expect("a list").iter().filter(|point| point["measured"] == true) {
            claims.push(format!(
                "| {:.2} | {:.2} |",
                point["baseline_us"].as_f64().unwrap(),
                point["winner_us"].as_f64().unwrap()
            ));
            claims.push(change(&point["ratio"]));
        }
    }
    let recipe = choice["vetoed"].as_array().expect("a list").iter().find(|veto| veto["name"] == "copied-recipe");
    let reason = recipe.expect("the recipe was vetoed")["reason"].as_str().expect("a reason");
    for figure in ["3.34 times", "+21.6 %"] {
        assert!(reason.contains(figure), "{reason}");
        claims.push(figure.to_owned());
    }
    let readme = page("README.md").split_whitespace().collect::<Vec<_>>().join(" ");
    let missing: Vec<&String> = claims.iter().filter(|claim| !readme.contains(*claim)).collect();
    assert!(missing.is_empty(), "README.md does not say {missing:?}");
}

/// Targets of links in a page, code left out.
fn links(text: &str) -> Vec<String> {
    let mut in_block = false;
    let mut targets = Vec::new();
    for line in text.lines() {
        if line.trim_start().starts_with("```") {
            in_block = !in_block;
        }
        if !in_block {
            let ends = line.match_indices("](").map(|(at, mark)| &line[at + mark.len()..]);
            targets.extend(ends.filter_map(|rest| rest.split_once(')')).map(|(target, _)| target.to_owned()));
        }
    }
    targets
}

#[test]
fn links_lead_somewhere() {
    let pages = pages();
    let mut reachable = BTreeSet::new();
    for (path, text) in &pages {
        for target in links(text) {
            if target.contains("://") {
                continue;
            }
            let (file, anchor) = target.split_once('#').unwrap_or((&target, ""));
            let folder = Path::new(path).parent().expect("a file has a folder");
            let wanted = if file.is_empty() { PathBuf::from(path) } else { folder.join(file) };
            let real = fs::canonicalize(root().join(&wanted));
            let real = real.unwrap_or_else(|error| panic!("{path}: {target}: {error}"));
            let inside = real.strip_prefix(fs::canonicalize(root()).expect("the root")).expect("a link stays inside");
            let name = inside.to_string_lossy().into_owned();
            if !anchor.is_empty() {
                let anchors: Vec<String> = pages[&name].lines().filter_map(anchor_of).collect();
                assert!(anchors.iter().any(|known| known == anchor), "{path}: {target}: there are {anchors:?}");
            }
            reachable.insert(name);
        }
    }
    let lost: Vec<&String> = pages.keys().filter(|path| *path != "README.md" && !reachable.contains(*path)).collect();
    assert!(lost.is_empty(), "no page leads to {lost:?}");
}

/// The anchor of a heading, as the usual renderers make it.
fn anchor_of(line: &str) -> Option<String> {
    let title = line.strip_prefix('#')?.trim_start_matches('#').trim().to_lowercase();
    let kept = title.chars().filter(|c| c.is_alphanumeric() || " -_".contains(*c));
    Some(kept.map(|c| if c == ' ' { '-' } else { c }).collect())
}

/// Words of a text that begin so and go on with capital letters, small letters, digits, `-` or `_`.
fn words_beginning_with(text: &str, start: &str) -> BTreeSet<String> {
    text.match_indices(start)
        .filter(|(at, _)| !text[..*at].ends_with(|c: char| c.is_alphanumeric() || "-_".contains(c)))
        .map(|(at, _)| text[at..].chars().take_while(|c| c.is_ascii_alphanumeric() || "-_".contains(*c)).collect())
        .filter(|word: &String| word[start.len()..].starts_with(|c: char| c.is_ascii_alphanumeric()))
        .collect()
}

fn help(command: &str) -> String {
    let output = run(root(), &[command.to_owned(), "--help".to_owned()]);
    String::from_utf8(output.stdout).expect("text")
}

#[test]
fn the_reference_names_every_flag_and_no_other() {
    let page = page("docs/reference/commands.md");
    let mut flags = BTreeSet::from(["--help".to_owned(), "--version".to_owned()]);
    let mut variables = BTreeSet::new();
    for command in [
        "tune",
        "trial",
        "doctor",
        "workload",
        "explain",
        "emit",
        "report",
        "import",
        "lint",
        "check",
        "exec",
        "completions",
        "man",
    ] {
        let section = page.split("\n## ").find(|section| section.starts_with(&format!("`nccltune {command}`")));
        let section = section.unwrap_or_else(|| panic!("a section on {command}"));
        let every = words_beginning_with(
            page.split("\n## ").find(|section| section.starts_with("Everywhere")).unwrap_or(""),
            "--",
        );
        let help = help(command);
        for flag in words_beginning_with(&help, "--") {
            let is_told = section.contains(&format!("`{flag}")) || every.contains(&flag);
            assert!(is_told || ["--help", "--version"].contains(&flag.as_str()), "{command} {flag} is not described");
            flags.insert(flag);
        }
        variables.extend(words_beginning_with(&help, "NCCLTUNE_"));
    }
    for flag in words_beginning_with(&page, "--") {
        assert!(flags.contains(&flag), "there is no {flag}");
    }
    // It is no flag's: what it allows must not be typed by accident.
    variables.insert("NCCLTUNE_ALLOW_FAKE".to_owned());
    let environment = self::page("docs/reference/environment.md");
    for variable in &variables {
        assert!(environment.contains(&format!("`{variable}`")), "{variable} is not described");
    }
    for variable in words_beginning_with(&environment, "NCCLTUNE_") {
        assert!(variables.contains(&variable), "there is no {variable}");
    }
}

#[test]
fn the_reference_names_every_check_and_every_exit_status() {
    let output = run(root(), &["doctor", "--format", "json"].map(str::to_owned));
    let report: Value = serde_json::from_slice(&output.stdout).expect("JSON");
    let commands = page("docs/reference/commands.md");
    for check in report["checks"].as_array().expect("a list") {
        let name = check["name"].as_str().expect("a name");
        assert!(commands.contains(&format!("`{name}`")), "{name} is not described");
    }
    let statuses = page("docs/reference/exit-statuses.md");
    for status in 0..=7 {
        assert!(statuses.contains(&format!("\n| {status} |")), "{status} is not described");
    }
}

/// The names in a record that are its own: keys of maps whose keys are data are left out.
fn fields(value: &Value, found: &mut BTreeSet<String>) {
    const MAPS: [&str; 5] = ["env", "required_environment", "weights", "parts", "variables"];
    match value {
        Value::Object(entries) => {
            for (name, value) in entries {
                found.insert(name.clone());
                if !MAPS.contains(&name.as_str()) && name != "when" && name != "require" {
                    fields(value, found);
                }
            }
        }
        Value::Array(values) => values.iter().for_each(|value| fields(value, found)),
        _ => {}
    }
}

#[test]
fn the_reference_names_every_field_of_a_run() {
    let folder = clone_of_the_tree();
    let out = folder.path().join("run");
    let words = format!("tune --backend replay --recorded {RECORDED} --quiet --out run");
    let output = run(folder.path(), &self::words(&words));
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let page = page("docs/reference/run-directory.md");
    let mut names = BTreeSet::new();
    for entry in fs::read_dir(&out).expect("the run directory").flatten() {
        names.insert(entry.file_name().to_string_lossy().into_owned());
    }
    for file in ["choice.json", "manifest.json"] {
        let text = fs::read_to_string(out.join(file)).expect("the file");
        fields(&serde_json::from_str(&text).expect("JSON"), &mut names);
    }
    for line in fs::read_to_string(root().join(RECORDED).join("run.jsonl")).expect("the journal").lines() {
        let line: Value = serde_json::from_str(line).expect("JSON");
        names.insert(line["event"].as_str().expect("an event").to_owned());
        fields(&line, &mut names);
    }
    let summary = fs::read_to_string(out.join("summary.csv")).expect("the table");
    names.extend(summary.lines().next().expect("a header").split(',').map(str::to_owned));
    let missing: Vec<&String> = names.iter().filter(|name| !page.contains(&format!("`{name}`"))).collect();
    assert!(missing.is_empty(), "docs/reference/run-directory.md does not describe {missing:?}");
}

#[test]
fn the_architecture_names_every_module() {
    let page = page("ARCHITECTURE.md");
    let library = self::page("src/lib.rs");
    for line in library.lines() {
        if let Some(module) = line.strip_prefix("pub mod ").and_then(|rest| rest.strip_suffix(';')) {
            assert!(page.contains(&format!("`{module}`")), "{module} is not named");
        }
    }
}

/// The release whose routes the generated page shows: the one the results were checked with.
const VERSION: NcclVersion = nccltune::doctor::VERIFIED;

fn releases(knob: &Knob) -> String {
    let oldest = NcclVersion::v2(0, 0);
    match (knob.since == oldest, knob.until) {
        (true, None) => "every release".to_owned(),
        (true, Some(last)) => format!("up to {last}"),
        (false, None) => format!("since {}", knob.since),
        (false, Some(last)) => format!("{} to {last}", knob.since),
    }
}

fn cost(knob: &Knob) -> &'static str {
    if !knob.is_read_by(VERSION) {
        return "not read";
    }
    // What the campaign makes use of: not yet the fields of ncclConfig_t, not yet a plugin.
    let living = knob.routes(VERSION).any(|route| route.way == Way::CommunicatorEnvironment);
    if living { "a new communicator" } else { "fresh processes" }
}

fn proof(knob: &Knob) -> String {
    let route = knob.routes(VERSION).find(|route| route.way == Way::LaunchEnvironment);
    match route.map(|route| route.proof) {
        Some(Proof::SetByEnvironment) => "\"set by environment\"".to_owned(),
        Some(Proof::Line(text)) => format!("\"{}\"", text.trim_end()),
        Some(Proof::None) | None => "none".to_owned(),
    }
}

/// Values to ask about: all of them where they can be counted.
fn risky_values(knob: &Knob) -> Vec<String> {
    let values: Vec<String> = match knob.values {
        Values::Switch => vec!["0".to_owned(), "1".to_owned()],
        Values::OneOf(choices) => choices.iter().map(i64::to_string).collect(),
        Values::Words(words) => words.iter().map(|word| (*word).to_owned()).collect(),
        Values::PathLevel => {
            knob.values.describe().trim_start_matches("one of ").split(", ").map(str::to_owned).collect()
        }
        Values::Protocols => ["LL", "LL128", "Simple"].map(str::to_owned).to_vec(),
        _ => Vec::new(),
    };
    values.into_iter().filter(|value| knob.risk_of(value) != Risk::None).collect()
}

fn rendered_knobs() -> String {
    let mut text = String::from(
        "# Variables this tool knows\n\n\
         <!-- Generated from src/knob/ by tests/it/readme.rs; change the catalogue, then run\n     \
         NCCLTUNE_UPDATE_DOCS=1 cargo test --test it the_page_of_variables -->\n\n",
    );
    let _ = writeln!(
        text,
        "NCCL reads some {} variables; the {} below are described, with values that make sense, and may stand in a\n\
         search space. Everything was read in NCCL's source. Columns on cost and proof are for NCCL {VERSION}.\n\n\
         - **a change costs**: what it takes to measure another value: a new communicator in living processes, or\n  \
         fresh processes.\n\
         - **proof**: the line of NCCL's log that shows that the value was read. Without one a run cannot tell.\n\
         - **risk**: values that need `--allow-risk`; see [search spaces](search-space-format.md#what-is-left-out).\n",
        knob::names().count(),
        knob::all().len(),
    );
    for knob in knob::all() {
        let _ = writeln!(text, "## {}\n\n{}\n", knob.name, knob.effect);
        let _ = writeln!(text, "- values: {}", knob.values.describe());
        let _ = writeln!(text, "- default: {}", knob.default);
        let _ = writeln!(text, "- read by: {}", releases(knob));
        let _ = writeln!(text, "- a change costs: {}; proof: {}", cost(knob), proof(knob));
        for value in risky_values(knob) {
            let _ = writeln!(text, "- risk of `{value}`: {}", knob.risk_of(&value).name());
        }
        text.push('\n');
    }
    text.trim_end().to_owned() + "\n"
}

#[test]
fn the_page_of_variables_is_that_of_the_catalogue() {
    let path = root().join("docs/reference/knobs.md");
    let rendered = rendered_knobs();
    if std::env::var_os(UPDATE).is_some() {
        fs::write(&path, &rendered).expect("the page can be written");
    }
    let written = fs::read_to_string(&path).unwrap_or_default();
    assert!(
        written == rendered,
        "docs/reference/knobs.md is not what the catalogue says; write it anew with\n\
         {UPDATE}=1 cargo test --test it the_page_of_variables"
    );
}
