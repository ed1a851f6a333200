//! The dialects in which environment variables are written down, and what each cannot say.
//!
//! An env file has many readers and no standard: docker keeps quotes and takes everything after
//! `=`, systemd strips quotes and joins lines at a backslash, compose expands `$` and cuts comments,
//! and a shell does more still. So the writer says only what all of them read alike, and what cannot
//! be said that way is an error, never an approximation: NCCL reads a quoted "1" as 0 without a word.

use std::collections::{BTreeMap, BTreeSet};

use crate::error_kind::{Classified, ErrorKind};

pub mod source;

/// How variables are written down.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Dialect {
    /// Unquoted `KEY=VALUE`, comments from column 0: docker `--env-file`, compose `env_file`,
    /// systemd `EnvironmentFile`.
    EnvFile,
    /// `export KEY='VALUE'`, for `.` in a POSIX shell.
    Shell,
    /// `KEY=VALUE` for docker alone, which takes everything behind the first `=` as it stands.
    Docker,
    /// `Environment="KEY=VALUE"` below `[Service]`, for a drop-in of a systemd unit.
    SystemdUnit,
    /// `unset -v KEY`, for `.` in a POSIX shell: takes variables back.
    Unset,
    /// `-x KEY='VALUE'` behind `set -- "$@"`, for `.` in a POSIX shell ahead of `mpirun "$@"`.
    Mpirun,
    /// [`Dialect::Shell`], and `--container-env` with the names for `srun "$@"`.
    Pyxis,
    /// `KEY=VALUE` as NCCL reads it in its own file.
    NcclConf,
    /// `environment:` of a service of compose.
    Compose,
    /// A `ConfigMap` of Kubernetes.
    Kubernetes,
}

impl Dialect {
    /// What the dialect is called in messages.
    pub const fn name(self) -> &'static str {
        match self {
            Self::EnvFile => "an env file",
            Self::Shell | Self::Unset => "a shell file",
            Self::Docker => "docker's env file",
            Self::SystemdUnit => "a systemd unit",
            Self::Mpirun => "an option -x of mpirun",
            Self::Pyxis => "a shell file for srun",
            Self::NcclConf => "nccl.conf",
            Self::Compose => "a compose file",
            Self::Kubernetes => "a manifest of Kubernetes",
        }
    }
}

/// One line to write.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum EnvLine {
    /// Text behind "# "; empty for a bare "#".
    Comment(String),
    /// A variable.
    Variable {
        /// Its name.
        name: String,
        /// Its value, as the consumer must see it.
        value: String,
    },
}

/// Largest text that is read.
pub const MAX_BYTES: usize = 1 << 20;
/// Most lines that are read.
pub const MAX_LINES: usize = 10_000;
/// Longest line: docker reads with a scanner that gives up at 64 KiB.
const MAX_LINE_BYTES: usize = 65_535;
/// Bytes that NCCL keeps of a value in its own file (src/misc/param.cc).
const NCCL_CONF_VALUE_BYTES: usize = 1023;

/// Why something cannot be written in a dialect.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum EnvWriteError {
    /// Not a name that every consumer accepts.
    #[error("{name:?} is no variable name: letters, digits and underscores, not beginning with a digit")]
    Name {
        /// What was given, clipped.
        name: String,
    },
    /// The value holds a character that the dialect cannot carry to every consumer.
    #[error("the value of {name} holds {character:?}, which {} cannot say", dialect.name())]
    Value {
        /// Whose value.
        name: String,
        /// The character.
        character: char,
        /// The dialect.
        dialect: Dialect,
    },
    /// The comment would not end where its line ends.
    #[error("a comment holds {character:?}, which would not stay a comment in {}", dialect.name())]
    Comment {
        /// The character.
        character: char,
        /// The dialect.
        dialect: Dialect,
    },
    /// Consumers disagree on which of two counts.
    #[error("{name} would be set twice")]
    Duplicate {
        /// The variable.
        name: String,
    },
    /// NCCL puts its file into the environment when it starts, which is too late for others.
    #[error("{name} does not begin with NCCL_, or names nccl.conf itself: nothing reads it there")]
    NotReadThere {
        /// The variable, clipped.
        name: String,
    },
    /// NCCL would keep the beginning alone.
    #[error("the value of {name} has {bytes} bytes; NCCL keeps {NCCL_CONF_VALUE_BYTES} of a value in nccl.conf")]
    ValueTooLong {
        /// The variable, clipped.
        name: String,
        /// Its length.
        bytes: usize,
    },
    /// Longer than some consumer reads.
    #[error("a line of {bytes} bytes is too long for {}: at most {MAX_LINE_BYTES}", dialect.name())]
    LineTooLong {
        /// Its length.
        bytes: usize,
        /// The dialect.
        dialect: Dialect,
    },
}

impl Classified for EnvWriteError {
    fn kind(&self) -> ErrorKind {
        ErrorKind::Usage
    }

    fn hint(&self) -> Option<String> {
        match self {
            Self::Value { dialect: Dialect::EnvFile, character, .. } if !matches!(character, '\n' | '\r' | '\0') => {
                Some("the shell form can say it, because it is quoted".to_owned())
            }
            Self::Value { dialect: Dialect::Mpirun, name, character: ';' } => Some(format!(
                "Open MPI may take ; for the end of a variable: take the shell form, and name it with `mpirun -x {name}`"
            )),
            Self::Value { dialect: Dialect::NcclConf | Dialect::Compose | Dialect::Kubernetes, character, .. }
                if !matches!(character, '\n' | '\r' | '\0') =>
            {
                Some("the shell form can say it, because it is quoted".to_owned())
            }
            Self::NotReadThere { .. } | Self::ValueTooLong { .. } => {
                Some("set it in the environment instead: `--as env` or `--as shell`".to_owned())
            }
            _ => None,
        }
    }
}

/// Writes lines in a dialect. Every line ends with a line feed, the last one too.
pub fn write(dialect: Dialect, lines: &[EnvLine]) -> Result<String, EnvWriteError> {
    let mut text = String::new();
    let mut names = BTreeSet::new();
    // Arguments of one command, which no comment may interrupt.
    let mut arguments: Vec<String> = Vec::new();
    for line in lines {
        let content = match line {
            EnvLine::Comment(comment) => {
                check_comment(dialect, comment)?;
                if comment.is_empty() { "#".to_owned() } else { format!("# {comment}") }
            }
            EnvLine::Variable { name, value } => {
                check_variable(dialect, name, value)?;
                if names.is_empty() {
                    text.push_str(opening(dialect));
                }
                if !names.insert(name.as_str()) {
                    return Err(EnvWriteError::Duplicate { name: name.clone() });
                }
                match dialect {
                    Dialect::EnvFile | Dialect::Docker | Dialect::NcclConf => format!("{name}={value}"),
                    Dialect::Shell => format!("export {name}={}", shell_quoted(value)),
                    Dialect::SystemdUnit => format!("Environment=\"{name}={}\"", systemd_escaped(value)),
                    Dialect::Unset => format!("unset -v {name}"),
                    Dialect::Mpirun => {
                        let argument = format!("-x {name}={}", shell_quoted(value));
                        if argument.len() > MAX_LINE_BYTES {
                            return Err(EnvWriteError::LineTooLong { bytes: argument.len(), dialect });
                        }
                        arguments.push(argument);
                        continue;
                    }
                    Dialect::Pyxis => {
                        arguments.push(name.clone());
                        format!("export {name}={}", shell_quoted(value))
                    }
                    Dialect::Compose => {
                        format!("      {}: \"{}\"", yaml_key(name), yaml_escaped(&value.replace('$', "$$")))
                    }
                    Dialect::Kubernetes => format!("  {}: \"{}\"", yaml_key(name), yaml_escaped(value)),
                }
            }
        };
        if content.len() > MAX_LINE_BYTES {
            return Err(EnvWriteError::LineTooLong { bytes: content.len(), dialect });
        }
        text.push_str(&content);
        text.push('\n');
    }
    match dialect {
        _ if arguments.is_empty() => {}
        Dialect::Mpirun => text.push_str(&format!("set -- \"$@\" \\\n  {}\n", arguments.join(" \\\n  "))),
        Dialect::Pyxis => text.push_str(&format!("set -- \"$@\" --container-env={}\n", arguments.join(","))),
        _ => {}
    }
    Ok(text)
}

/// What stands before the first variable.
const fn opening(dialect: Dialect) -> &'static str {
    match dialect {
        Dialect::SystemdUnit => "[Service]\n",
        Dialect::Compose => "services:\n  server:\n    environment:\n",
        Dialect::Kubernetes => "apiVersion: v1\nkind: ConfigMap\nmetadata:\n  name: nccltune\ndata:\n",
        _ => "",
    }
}

/// A key of YAML. Short words such as `ON` and `NULL` are none without quotes; all of these lack an underscore.
fn yaml_key(name: &str) -> String {
    if name.contains('_') { name.to_owned() } else { format!("\"{name}\"") }
}

/// A text between double quotes in YAML, which stays a text whatever it looks like.
fn yaml_escaped(value: &str) -> String {
    value.replace('\\', r"\\").replace('"', r#"\""#)
}

/// Writes an env file: [`write()`] in [`Dialect::EnvFile`].
pub fn write_env_file(lines: &[EnvLine]) -> Result<String, EnvWriteError> {
    write(Dialect::EnvFile, lines)
}

/// Writes a file for `.` in a POSIX shell: [`write()`] in [`Dialect::Shell`].
pub fn write_shell_file(lines: &[EnvLine]) -> Result<String, EnvWriteError> {
    write(Dialect::Shell, lines)
}

/// A word quoted for a POSIX shell: within single quotes everything is itself but the single quote,
/// which is written outside of them.
pub fn shell_quoted(word: &str) -> String {
    format!("'{}'", word.replace('\'', r"'\''"))
}

/// A value between double quotes in a unit: backslashes and quotes are escaped, and `%`, which begins a
/// specifier, is doubled. `$` stands for itself in `Environment=`.
fn systemd_escaped(value: &str) -> String {
    value.replace('\\', r"\\").replace('"', r#"\""#).replace('%', "%%")
}

/// Whether the text is a variable name that every consumer accepts.
pub fn is_name(text: &str) -> bool {
    let mut bytes = text.bytes();
    bytes.next().is_some_and(|first| first == b'_' || first.is_ascii_alphabetic())
        && bytes.all(|byte| byte == b'_' || byte.is_ascii_alphanumeric())
}

/// Env files say only what means itself to docker, systemd, compose and an unquoting shell alike:
/// somebody will source the file whatever line 2 says.
fn can_say(dialect: Dialect, character: char) -> bool {
    match dialect {
        Dialect::EnvFile => character.is_alphanumeric() || "_-.,:=/^+@%".contains(character),
        Dialect::Shell | Dialect::Docker | Dialect::Pyxis | Dialect::NcclConf => {
            !matches!(character, '\n' | '\r' | '\0')
        }
        Dialect::SystemdUnit => !character.is_control(),
        Dialect::Mpirun => !character.is_control() && character != ';',
        // What YAML 1.1 takes for the end of a line, and what YAML calls no character.
        Dialect::Compose | Dialect::Kubernetes => {
            !character.is_control()
                && !matches!(character, '\u{2028}' | '\u{2029}' | '\u{feff}' | '\u{fffe}' | '\u{ffff}')
        }
        // The value is not written.
        Dialect::Unset => true,
    }
}

/// The first character of a value that the dialect cannot carry to every consumer.
pub fn unsayable(dialect: Dialect, value: &str) -> Option<char> {
    // NCCL keeps blanks around a value, and somebody's editor does not.
    let edge = |character: &char| dialect == Dialect::NcclConf && character.is_whitespace();
    let edges = || value.chars().next().filter(edge).or_else(|| value.chars().next_back().filter(edge));
    value.chars().find(|character| !can_say(dialect, *character)).or_else(edges)
}

fn check_variable(dialect: Dialect, name: &str, value: &str) -> Result<(), EnvWriteError> {
    if !is_name(name) {
        return Err(EnvWriteError::Name { name: clipped(name) });
    }
    if dialect == Dialect::NcclConf {
        if !name.starts_with("NCCL_") || name == "NCCL_CONF_FILE" {
            return Err(EnvWriteError::NotReadThere { name: clipped(name) });
        }
        if value.len() > NCCL_CONF_VALUE_BYTES {
            return Err(EnvWriteError::ValueTooLong { name: clipped(name), bytes: value.len() });
        }
    }
    match unsayable(dialect, value) {
        Some(character) => Err(EnvWriteError::Value { name: clipped(name), character, dialect }),
        None => Ok(()),
    }
}

fn check_comment(dialect: Dialect, comment: &str) -> Result<(), EnvWriteError> {
    let control = comment.chars().find(|character| character.is_control());
    // systemd before 254 takes the line after a comment that ends with a backslash for comment too.
    let joining = comment.ends_with('\\').then_some('\\');
    match control.or(joining) {
        Some(character) => Err(EnvWriteError::Comment { character, dialect }),
        None => Ok(()),
    }
}

/// What is wrong with a line that was read.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum EnvProblem {
    /// Larger than any env file has reason to be.
    #[error("the file has {bytes} bytes; at most {MAX_BYTES} are read")]
    TooLarge {
        /// Its size.
        bytes: usize,
    },
    /// More lines than any env file has reason to have.
    #[error("the file has more than {MAX_LINES} lines")]
    TooManyLines,
    /// docker gives up on such a line.
    #[error("the line has {bytes} bytes; docker reads at most {MAX_LINE_BYTES}")]
    LineTooLong {
        /// Its length.
        bytes: usize,
    },
    /// The byte order mark would become part of the first name.
    #[error("the file begins with a byte order mark, which becomes part of the first line")]
    ByteOrderMark,
    /// The carriage return would become part of the value.
    #[error("the line ends with a carriage return, which becomes part of the value; line ends must be LF")]
    CarriageReturn,
    /// A blank in front of a name or of "#".
    #[error("the line begins with a blank; names and # stand in column 0")]
    LeadingBlank,
    /// `export` belongs to shells.
    #[error("`export` is shell syntax: docker and systemd do not know it")]
    Export,
    /// Not KEY=VALUE.
    #[error("expected KEY=VALUE, found {found:?}")]
    NoEqualsSign {
        /// The line, clipped.
        found: String,
    },
    /// Not a variable name.
    #[error("{name:?} is no variable name: letters, digits and underscores, not beginning with a digit")]
    Name {
        /// What stands before "=", clipped.
        name: String,
    },
    /// docker, systemd and compose read this value differently.
    #[error("the value of {name} holds {character:?}, which docker, systemd and compose do not read alike")]
    Value {
        /// Whose value.
        name: String,
        /// The first such character.
        character: char,
    },
    /// A comment that does not end where its line ends.
    #[error("the comment holds {character:?}, with which systemd ends or continues it elsewhere")]
    Comment {
        /// The character.
        character: char,
    },
    /// Consumers disagree on which of two counts.
    #[error("{name} is already set on line {first_line}")]
    Duplicate {
        /// The variable, clipped.
        name: String,
        /// Where it was set first.
        first_line: usize,
    },
}

/// A problem and where it is.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("line {line}: {problem}")]
pub struct EnvSyntaxError {
    /// Line number, from 1.
    pub line: usize,
    /// What is wrong.
    pub problem: EnvProblem,
}

impl Classified for EnvSyntaxError {
    fn kind(&self) -> ErrorKind {
        ErrorKind::Usage
    }

    fn hint(&self) -> Option<String> {
        match self.problem {
            EnvProblem::Export => Some("write KEY=VALUE, without `export`".to_owned()),
            EnvProblem::Value { character: '"' | '\'', .. } => {
                Some("write the value without quotes: docker passes quotes on, and NCCL reads \"1\" as 0".to_owned())
            }
            EnvProblem::Value { character: '#', .. } => {
                Some("comments stand on lines of their own, with # in column 0".to_owned())
            }
            EnvProblem::NoEqualsSign { .. } => Some(
                "docker takes a bare name's value from its own environment and refuses a file with any other such line; \
                 systemd drops it"
                    .to_owned(),
            ),
            _ => None,
        }
    }
}

/// A variable as read: line number from 1, name, value.
pub type ReadVariable = (usize, String, String);

/// Reads an env file strictly: the first line that docker, systemd and compose would not read alike
/// is an error.
pub fn read_env_file(text: &str) -> Result<Vec<ReadVariable>, EnvSyntaxError> {
    read_env_lines(text)?.into_iter().collect()
}

/// Reads an env file line by line, so that a reader can tell all problems at once. Comments and empty
/// lines yield nothing. Fails as a whole only where the text is too large to be looked at.
pub fn read_env_lines(text: &str) -> Result<Vec<Result<ReadVariable, EnvSyntaxError>>, EnvSyntaxError> {
    let fatal = |problem| EnvSyntaxError { line: 1, problem };
    if text.len() > MAX_BYTES {
        return Err(fatal(EnvProblem::TooLarge { bytes: text.len() }));
    }
    if text.lines().count() > MAX_LINES {
        return Err(fatal(EnvProblem::TooManyLines));
    }
    let mut first_lines: BTreeMap<&str, usize> = BTreeMap::new();
    let mut results = Vec::new();
    for (index, content) in text.split('\n').enumerate() {
        let line = index + 1;
        let result = match read_line(line, content) {
            Ok(None) => continue,
            Ok(Some((name, value))) => {
                if let Some(&first_line) = first_lines.get(name) {
                    Err(EnvProblem::Duplicate { name: clipped(name), first_line })
                } else {
                    first_lines.insert(name, line);
                    Ok((line, name.to_owned(), value.to_owned()))
                }
            }
            Err(problem) => Err(problem),
        };
        results.push(result.map_err(|problem| EnvSyntaxError { line, problem }));
    }
    Ok(results)
}

fn read_line(line: usize, content: &str) -> Result<Option<(&str, &str)>, EnvProblem> {
    if content.len() > MAX_LINE_BYTES {
        return Err(EnvProblem::LineTooLong { bytes: content.len() });
    }
    if line == 1 && content.starts_with('\u{feff}') {
        return Err(EnvProblem::ByteOrderMark);
    }
    if content.ends_with('\r') {
        return Err(EnvProblem::CarriageReturn);
    }
    if content.chars().all(|character| matches!(character, ' ' | '\t')) {
        return Ok(None);
    }
    if content.starts_with(char::is_whitespace) {
        return Err(EnvProblem::LeadingBlank);
    }
    if let Some(comment) = content.strip_prefix('#') {
        let control = comment.chars().find(|character| character.is_control() && *character != '\t');
        let joining = comment.ends_with('\\').then_some('\\');
        return match control.or(joining) {
            Some(character) => Err(EnvProblem::Comment { character }),
            None => Ok(None),
        };
    }
    if content.strip_prefix("export").is_some_and(|rest| rest.starts_with([' ', '\t'])) {
        return Err(EnvProblem::Export);
    }
    let Some((name, value)) = content.split_once('=') else {
        return Err(EnvProblem::NoEqualsSign { found: clipped(content) });
    };
    if !is_name(name) {
        return Err(EnvProblem::Name { name: clipped(name) });
    }
    // `#`: some versions of compose cut the value there even without a blank before it.
    let ambiguous =
        |character: &char| character.is_whitespace() || character.is_control() || "\"'$\\#".contains(*character);
    match value.chars().find(ambiguous) {
        Some(character) => Err(EnvProblem::Value { name: clipped(name), character }),
        None => Ok(Some((name, value))),
    }
}

/// Text from outside may be a megabyte of anything; messages quote its beginning.
fn clipped(text: &str) -> String {
    const LIMIT: usize = 60;
    match text.char_indices().nth(LIMIT) {
        Some((end, _)) => format!("{}...", &text[..end]),
        None => text.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn comment(text: &str) -> EnvLine {
        EnvLine::Comment(text.to_owned())
    }

    fn variable(name: &str, value: &str) -> EnvLine {
        EnvLine::Variable { name: name.to_owned(), value: value.to_owned() }
    }

    fn problem(text: &str) -> EnvProblem {
        read_env_file(text).unwrap_err().problem
    }

    /// Sources `text` in /bin/sh, with `prelude` before it, and returns the environment afterwards.
    #[expect(clippy::disallowed_methods, reason = "the test asks a real shell; process/ is floors above")]
    fn sourced(prelude: &str, text: &str) -> Option<BTreeMap<String, String>> {
        if !std::path::Path::new("/bin/sh").exists() {
            return None;
        }
        let directory = tempfile::tempdir().unwrap();
        fs_err::write(directory.path().join("file"), text).unwrap();
        let output = std::process::Command::new("/bin/sh")
            .args(["-c", &format!("{prelude} . ./file; env")])
            .current_dir(directory.path())
            .output()
            .unwrap();
        assert!(output.status.success() && output.stderr.is_empty(), "{output:?}");
        let environment = String::from_utf8(output.stdout).unwrap();
        Some(
            environment
                .lines()
                .filter_map(|line| line.split_once('='))
                .map(|(name, value)| (name.to_owned(), value.to_owned()))
                .collect(),
        )
    }

    #[test]
    fn an_env_file_is_bare_lines() {
        let lines = [comment("what it is"), comment(""), variable("NCCL_PROTO", "^LL128"), variable("EMPTY", "")];
        assert_eq!(write_env_file(&lines).unwrap(), "# what it is\n#\nNCCL_PROTO=^LL128\nEMPTY=\n");
    }

    #[test]
    fn a_shell_file_is_quoted() {
        let lines =
            [comment("what it is"), variable("NCCL_ALGO", "allreduce:tree;broadcast:ring"), variable("Q", "it's")];
        assert_eq!(
            write_shell_file(&lines).unwrap(),
            "# what it is\nexport NCCL_ALGO='allreduce:tree;broadcast:ring'\nexport Q='it'\\''s'\n"
        );
    }

    #[test]
    fn what_an_env_file_cannot_say_is_refused() {
        for value in
            ["a b", "a\tb", "a\nb", "a\rb", "a\0b", "a;b", "'a'", "\"1\"", "$HOME", "a\\", "#a", "~/x", "a&b", "`a`"]
        {
            let error = write_env_file(&[variable("NAME", value)]).unwrap_err();
            assert!(matches!(error, EnvWriteError::Value { .. }), "{value:?}: {error:?}");
        }
        let error = write_env_file(&[variable("NCCL_ALGO", "allreduce:tree;broadcast:ring")]).unwrap_err();
        assert_eq!(error.to_string(), "the value of NCCL_ALGO holds ';', which an env file cannot say");
        assert_eq!(error.hint().as_deref(), Some("the shell form can say it, because it is quoted"));
    }

    #[test]
    fn what_a_shell_file_cannot_say_is_refused() {
        for value in ["a\nb", "a\0b"] {
            let error = write_shell_file(&[variable("NAME", value)]).unwrap_err();
            assert!(matches!(error, EnvWriteError::Value { .. }), "{value:?}: {error:?}");
        }
    }

    #[test]
    fn names_comments_and_duplicates_are_checked_in_both_dialects() {
        for dialect in [Dialect::EnvFile, Dialect::Shell] {
            for name in ["", "1A", "A B", "A=B", "export A", "Ä", "A\n"] {
                let error = write(dialect, &[variable(name, "1")]).unwrap_err();
                assert!(matches!(error, EnvWriteError::Name { .. }), "{name:?}: {error:?}");
            }
            for text in ["a\nNCCL_P2P_DISABLE=1", "a\rb", "ends with a backslash \\"] {
                let error = write(dialect, &[comment(text)]).unwrap_err();
                assert!(matches!(error, EnvWriteError::Comment { .. }), "{text:?}: {error:?}");
            }
            let error = write(dialect, &[variable("A", "1"), variable("A", "1")]).unwrap_err();
            assert_eq!(error, EnvWriteError::Duplicate { name: "A".to_owned() });
            let error = write(dialect, &[variable("A", &"x".repeat(70_000))]).unwrap_err();
            assert!(matches!(error, EnvWriteError::LineTooLong { .. }));
        }
    }

    #[test]
    fn a_plain_file_reads_with_line_numbers() {
        let text = "# a comment\n\nNCCL_PROTO=LL\n   \nNCCL_ALGO=allreduce:tree;broadcast:ring\nLAST=a=b";
        let expected = [(3, "NCCL_PROTO", "LL"), (5, "NCCL_ALGO", "allreduce:tree;broadcast:ring"), (6, "LAST", "a=b")];
        let expected: Vec<ReadVariable> =
            expected.map(|(line, name, value)| (line, name.to_owned(), value.to_owned())).to_vec();
        assert_eq!(read_env_file(text).unwrap(), expected);
        assert_eq!(read_env_file("").unwrap(), []);
    }

    #[test]
    fn what_consumers_read_differently_is_refused_with_its_line() {
        let error = read_env_file("A=1\nNCCL_BUFFSIZE=\"1048576\"\n").unwrap_err();
        assert_eq!(error.line, 2);
        assert_eq!(
            error.to_string(),
            "line 2: the value of NCCL_BUFFSIZE holds '\"', which docker, systemd and compose do not read alike"
        );
        for value in ["1 # why", "1 ", "$HOME", "a\\", "1#", "a\tb", "'1'", "a\0"] {
            assert!(matches!(problem(&format!("A={value}\n")), EnvProblem::Value { .. }), "{value:?}");
        }
        assert_eq!(problem("export A=1"), EnvProblem::Export);
        assert_eq!(problem("A=1\r\nB=2\r\n"), EnvProblem::CarriageReturn);
        assert_eq!(problem("\u{feff}A=1"), EnvProblem::ByteOrderMark);
        assert_eq!(problem(" A=1"), EnvProblem::LeadingBlank);
        assert_eq!(problem("  # indented"), EnvProblem::LeadingBlank);
        assert_eq!(problem("A=1\nB=2\nA=1"), EnvProblem::Duplicate { name: "A".to_owned(), first_line: 1 });
        assert_eq!(problem("# joined \\\nA=1"), EnvProblem::Comment { character: '\\' });
        assert!(matches!(problem("NCCL_ALGO"), EnvProblem::NoEqualsSign { .. }));
        assert!(matches!(problem("NCCL_ALGO = ring"), EnvProblem::Name { .. }));
        assert!(matches!(problem("=1"), EnvProblem::Name { .. }));
        assert!(matches!(problem("; a systemd comment=1"), EnvProblem::Name { .. }));
    }

    #[test]
    fn all_problems_can_be_had_at_once() {
        let lines = read_env_lines("export A=1\nB=2\nC='3'\n").unwrap();
        let good: Vec<bool> = lines.iter().map(Result::is_ok).collect();
        assert_eq!(good, [false, true, false]);
    }

    #[test]
    fn hostile_sizes_are_bounded_and_messages_stay_short() {
        assert!(matches!(problem(&"A".repeat(MAX_BYTES + 1)), EnvProblem::TooLarge { .. }));
        assert_eq!(problem(&"\n".repeat(MAX_LINES + 1)), EnvProblem::TooManyLines);
        assert!(read_env_file(&"\n".repeat(MAX_LINES)).is_ok());
        assert!(matches!(problem(&"A".repeat(MAX_LINE_BYTES + 1)), EnvProblem::LineTooLong { .. }));
        assert!(read_env_file(&"é".repeat(20_000)).unwrap_err().to_string().len() < 300);
    }

    /// What docker makes of a file: blanks before a line and lines that begin with `#` go, and whatever
    /// stands behind the first `=` is the value.
    fn read_as_docker(text: &str) -> Vec<(String, String)> {
        text.lines()
            .map(str::trim_start)
            .filter(|line| !line.is_empty() && !line.starts_with('#'))
            .filter_map(|line| line.split_once('='))
            .map(|(name, value)| (name.to_owned(), value.to_owned()))
            .collect()
    }

    /// What systemd makes of a unit's `Environment=` lines, after systemd.exec(5) and systemd.syntax(7):
    /// words in double quotes with C escapes, then specifiers, of which only `%%` may occur here.
    fn read_as_systemd_unit(text: &str) -> Vec<(String, String)> {
        let mut variables = Vec::new();
        let mut section = "";
        for line in text.lines() {
            assert!(!line.ends_with('\\'), "would join the next line: {line}");
            if line.starts_with(['#', ';']) || line.is_empty() {
                continue;
            }
            if line.starts_with('[') {
                section = line;
                continue;
            }
            assert_eq!(section, "[Service]");
            let word = line.strip_prefix("Environment=\"").and_then(|rest| rest.strip_suffix('"')).unwrap();
            let (mut value, mut characters) = (String::new(), word.chars());
            while let Some(character) = characters.next() {
                match character {
                    '\\' => match characters.next() {
                        Some(escaped @ ('\\' | '"')) => value.push(escaped),
                        other => panic!("an escape {other:?} in {line}"),
                    },
                    '"' => panic!("the quotes end early in {line}"),
                    '%' => {
                        assert_eq!(characters.next(), Some('%'), "a specifier in {line}");
                        value.push('%');
                    }
                    _ => value.push(character),
                }
            }
            let (name, value) = value.split_once('=').unwrap();
            variables.push((name.to_owned(), value.to_owned()));
        }
        variables
    }

    /// What systemd makes of an EnvironmentFile=, for values that an env file may say: no quotes, no
    /// escapes, blanks around the value dropped.
    fn read_as_environment_file(text: &str) -> Vec<(String, String)> {
        text.lines()
            .filter(|line| !line.starts_with(['#', ';']) && !line.trim().is_empty())
            .filter_map(|line| line.split_once('='))
            .map(|(name, value)| {
                assert!(!value.contains(['"', '\'', '\\']), "systemd would unquote {value}");
                (name.trim().to_owned(), value.trim().to_owned())
            })
            .collect()
    }

    proptest! {
        #[test]
        fn each_reader_sees_what_was_written_for_it(raw in proptest::collection::vec("\\PC{0,24}", 1..12)) {
            for (dialect, read) in [
                (Dialect::Docker, read_as_docker as fn(&str) -> Vec<(String, String)>),
                (Dialect::SystemdUnit, read_as_systemd_unit),
                (Dialect::EnvFile, read_as_environment_file),
                (Dialect::EnvFile, read_as_docker),
            ] {
                let values: Vec<(String, String)> = (0..)
                    .zip(&raw)
                    .map(|(index, value): (usize, &String)| {
                        let kept = value.chars().filter(|character| can_say(dialect, *character)).collect();
                        (format!("NCCLTUNE_T{index}"), kept)
                    })
                    .collect();
                let lines: Vec<EnvLine> = std::iter::once(comment("# $(exit 1) %n"))
                    .chain(values.iter().map(|(name, value)| variable(name, value)))
                    .collect();
                prop_assert_eq!(read(&write(dialect, &lines).unwrap()), values);
            }
        }
    }

    #[test]
    fn what_is_unset_is_what_was_set_and_nothing_else() {
        let lines = [comment("what it is"), variable("NCCLTUNE_T1", "a 'b'"), variable("NCCLTUNE_T2", "2")];
        let revert = write(Dialect::Unset, &lines).unwrap();
        assert_eq!(revert, "# what it is\nunset -v NCCLTUNE_T1\nunset -v NCCLTUNE_T2\n");
        let prelude = "export NCCLTUNE_T1=1 NCCLTUNE_T2=2 NCCLTUNE_T3=3;";
        if let Some(environment) = sourced(prelude, &revert) {
            let left: Vec<&String> = environment.keys().filter(|name| name.starts_with("NCCLTUNE_T")).collect();
            assert_eq!(left, ["NCCLTUNE_T3"]);
        }
    }

    #[test]
    fn each_form_for_one_launcher_is_read_back_as_written() {
        use super::source::{Consumer, Source};
        let value = r#"a 'b' "c" $HOME ${X} \ %n # é: - yes"#;
        let lines = [
            comment("$(exit 1): {"),
            variable("NCCL_T1", value),
            comment("more"),
            variable("NCCL_T2", "1"),
            variable("NCCL_T3", "yes"),
        ];
        for (dialect, consumer) in [
            (Dialect::Mpirun, Consumer::Shell),
            (Dialect::Pyxis, Consumer::Shell),
            (Dialect::NcclConf, Consumer::NcclConf),
            (Dialect::Compose, Consumer::Compose),
            (Dialect::Kubernetes, Consumer::Kubernetes),
        ] {
            let text = write(dialect, &lines).unwrap();
            let source = Source::read(consumer, &text).unwrap();
            assert_eq!(source.remarks, [], "{text}");
            let read: Vec<(&str, Option<&str>)> =
                source.assignments.iter().map(|one| (one.name.as_str(), one.value.as_deref())).collect();
            assert_eq!(read, [("NCCL_T1", Some(value)), ("NCCL_T2", Some("1")), ("NCCL_T3", Some("yes"))], "{text}");
            assert!(write(dialect, &[variable("NCCL_T", "a\nb")]).is_err(), "{dialect:?}");
            assert_eq!(write(dialect, &[comment("alone")]).unwrap(), "# alone\n");
        }
        assert_eq!(
            write(Dialect::Compose, &[variable("ON", "$")]).unwrap().lines().last(),
            Some("      \"ON\": \"$$\"")
        );
    }

    #[test]
    fn what_a_launcher_or_nccl_would_lose_is_refused_with_advice() {
        for (dialect, name, value) in [
            (Dialect::Mpirun, "NCCL_ALGO", "allreduce:tree;broadcast:ring"),
            (Dialect::NcclConf, "CUDA_VISIBLE_DEVICES", "0"),
            (Dialect::NcclConf, "NCCL_CONF_FILE", "/x"),
            (Dialect::NcclConf, "NCCL_T", " 1"),
            (Dialect::NcclConf, "NCCL_T", &"x".repeat(1024)),
            (Dialect::Compose, "NCCL_T", "a\u{2028}b"),
            (Dialect::Kubernetes, "NCCL_T", "a\tb"),
        ] {
            let error = write(dialect, &[variable(name, value)]).unwrap_err();
            assert!(error.hint().is_some(), "{dialect:?}: {error}");
        }
        assert!(write(Dialect::NcclConf, &[variable("NCCL_T", &"x".repeat(1023))]).is_ok());
    }

    /// bash and dash hand a program exactly the arguments that were meant, behind those that were there.
    #[test]
    #[expect(clippy::disallowed_methods, reason = "the test asks real shells; process/ is floors above")]
    fn shells_hand_mpirun_and_srun_what_is_written() {
        let value = r#"a 'b' "c" $HOME `id` \ & | * ~ # é"#;
        let lines = [comment("$(exit 1)"), variable("NCCL_T1", value), comment("more"), variable("NCCL_T2", "2")];
        let directory = tempfile::tempdir().unwrap();
        for shell in ["bash", "dash"] {
            for (dialect, expected) in [
                (Dialect::Mpirun, format!("-np\n8\n-x\nNCCL_T1={value}\n-x\nNCCL_T2=2\n|\n")),
                (Dialect::Pyxis, format!("-np\n8\n--container-env=NCCL_T1,NCCL_T2\n{value}|2\n")),
            ] {
                fs_err::write(directory.path().join("file"), write(dialect, &lines).unwrap()).unwrap();
                let script = r#"set -eu; set -- -np 8; . ./file; printf '%s\n' "$@"; printf '%s|%s\n' "${NCCL_T1-}" "${NCCL_T2-}""#;
                let Ok(output) = std::process::Command::new(shell)
                    .args(["-c", script])
                    .env_remove("NCCL_T1")
                    .env_remove("NCCL_T2")
                    .current_dir(directory.path())
                    .output()
                else {
                    continue;
                };
                assert!(output.status.success() && output.stderr.is_empty(), "{shell}: {output:?}");
                assert_eq!(String::from_utf8(output.stdout).unwrap(), expected, "{shell}");
            }
        }
    }

    #[test]
    fn a_shell_sees_what_the_shell_file_says() {
        let value = r#"a 'b' "c" $HOME `id` \ ; & | * ~ # é"#;
        let text = write_shell_file(&[comment("$(exit 1)"), variable("NCCLTUNE_T", value)]).unwrap();
        if let Some(environment) = sourced("", &text) {
            assert_eq!(environment.get("NCCLTUNE_T").map(String::as_str), Some(value));
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 24, ..ProptestConfig::default() })]

        #[test]
        fn a_shell_sees_what_was_written(shell in any::<bool>(), raw in proptest::collection::vec("\\PC{0,24}", 1..24)) {
            // In the env dialect, only what it can say; such a file survives sourcing as well.
            let dialect = if shell { Dialect::Shell } else { Dialect::EnvFile };
            let values: Vec<String> = raw
                .iter()
                .map(|value| value.chars().filter(|character| can_say(dialect, *character)).collect())
                .collect();
            let lines: Vec<EnvLine> =
                values.iter().enumerate().map(|(index, value)| variable(&format!("NCCLTUNE_T{index}"), value)).collect();
            let prelude = if shell { "" } else { "set -a;" };
            if let Some(environment) = sourced(prelude, &write(dialect, &lines).unwrap()) {
                for (index, value) in values.iter().enumerate() {
                    prop_assert_eq!(environment.get(&format!("NCCLTUNE_T{index}")), Some(value));
                }
            }
        }
    }

    proptest! {
        #[test]
        fn what_is_written_reads_back(
            entries in proptest::collection::btree_map("[A-Z_][A-Z0-9_]{0,12}", "[a-zA-Z0-9_.,:=/^+@%é-]{0,20}", 0..12),
            remark in "[^\\p{Cc}]{0,40}",
        ) {
            prop_assume!(!remark.ends_with('\\'));
            let mut lines = vec![comment(&remark)];
            lines.extend(entries.iter().map(|(name, value)| variable(name, value)));
            let text = write_env_file(&lines).unwrap();
            let read = read_env_file(&text).unwrap();
            let expected: Vec<ReadVariable> = entries
                .into_iter()
                .enumerate()
                .map(|(index, (name, value))| (index + 2, name, value))
                .collect();
            prop_assert_eq!(read, expected);
        }

        #[test]
        fn whatever_is_written_was_sayable(name in "\\PC{0,8}", value in any::<String>()) {
            // Either an error, or exactly that variable comes back: never something else.
            if let Ok(text) = write_env_file(&[variable(&name, &value)]) {
                prop_assert_eq!(read_env_file(&text).unwrap(), [(1, name, value)]);
            }
        }

        #[test]
        fn no_text_makes_the_reader_panic(text in any::<String>()) {
            let _ = read_env_lines(&text);
        }
    }
}
