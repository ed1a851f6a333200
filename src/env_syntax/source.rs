//! What other people's files set: every consumer reads its own dialect, and none complains.
//!
//! A [`Source`] says which variables a file sets, at which line, with which value the started process will see, and
//! what its consumer makes of it that its author cannot have meant. Values that are only known at run time
//! (`$VAR`, `$(...)`, `valueFrom`) are nothing here. Rules are those of docker's env-file reader, systemd.exec(5) and
//! systemd.syntax(7), POSIX's shell command language, compose-spec, the Kubernetes API and NCCL's own configuration
//! file (src/misc/param.cc).

use crate::units::nearest_name;

use super::{Dialect, EnvProblem, MAX_BYTES, MAX_LINES, is_name, read_env_lines, unsayable};

mod shell;
mod systemd;
mod yaml;

/// Who reads a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Consumer {
    /// `docker run --env-file`, compose's `env_file`, systemd's `EnvironmentFile`.
    EnvFile,
    /// `docker run --env-file` alone, which takes everything behind the first `=` as it stands.
    DockerEnvFile,
    /// A shell; `mpirun -x`, `docker run -e` and `srun --export` in its commands too.
    Shell,
    /// A systemd unit or drop-in.
    SystemdUnit,
    /// A compose file.
    Compose,
    /// Kubernetes manifests.
    Kubernetes,
    /// NCCL itself: `/etc/nccl.conf` and `~/.nccl.conf`.
    NcclConf,
}

impl Consumer {
    /// All of them.
    pub const ALL: [Self; 7] = [
        Self::EnvFile,
        Self::DockerEnvFile,
        Self::Shell,
        Self::SystemdUnit,
        Self::Compose,
        Self::Kubernetes,
        Self::NcclConf,
    ];

    /// The name on the command line.
    pub const fn name(self) -> &'static str {
        match self {
            Self::EnvFile => "env-file",
            Self::DockerEnvFile => "docker-env-file",
            Self::Shell => "shell",
            Self::SystemdUnit => "systemd-unit",
            Self::Compose => "compose",
            Self::Kubernetes => "kubernetes",
            Self::NcclConf => "nccl-conf",
        }
    }

    /// By its name.
    pub fn parse(text: &str) -> Result<Self, String> {
        Self::ALL.into_iter().find(|consumer| consumer.name() == text).ok_or_else(|| {
            let nearest = nearest_name(text, Self::ALL.map(Self::name));
            let names = Self::ALL.map(Self::name).join(", ");
            match nearest {
                Some(name) => format!("unknown kind of file {text:?}; did you mean {name}? Known are {names}"),
                None => format!("unknown kind of file {text:?}; known are {names}"),
            }
        })
    }

    /// Who probably reads a file of this name with this text.
    pub fn guess(file_name: &str, text: &str) -> Self {
        let name = file_name.rsplit('/').next().unwrap_or(file_name).to_ascii_lowercase();
        let extension = name.rsplit_once('.').map_or("", |(_, extension)| extension);
        let begins = |prefix: &str| text.lines().take(MAX_LINES).any(|line| line.trim_start().starts_with(prefix));
        if name.ends_with("nccl.conf") || begins("# For NCCL itself: save as") {
            Self::NcclConf
        } else if name.ends_with("docker.env") || begins("# For docker run --env-file alone") {
            Self::DockerEnvFile
        } else if extension == "env" || name.starts_with(".env") {
            // Whatever stands in it: `export` in such a file is a slip.
            Self::EnvFile
        } else if extension == "json" {
            if text.contains("\"apiVersion\"") { Self::Kubernetes } else { Self::Compose }
        } else if matches!(extension, "yml" | "yaml") {
            if begins("apiVersion:") { Self::Kubernetes } else { Self::Compose }
        } else if matches!(extension, "service" | "socket" | "slice") || begins("[Service]") {
            Self::SystemdUnit
        } else if matches!(extension, "sh" | "bash" | "sbatch" | "slurm" | "profile")
            || text.starts_with("#!")
            || begins("export ")
            || begins("unset ")
            || begins("set -- ")
            || begins("mpirun ")
            || begins("setenv ")
        {
            Self::Shell
        } else if begins("apiVersion:") {
            Self::Kubernetes
        } else if begins("services:") {
            Self::Compose
        } else {
            Self::EnvFile
        }
    }
}

/// A variable that a file sets.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Assignment {
    /// Line, from 1.
    pub line: usize,
    /// The variable.
    pub name: String,
    /// What the started process sees; nothing where only run time tells.
    pub value: Option<String>,
    /// Variables of one scope reach the same process: a service, a container, a command.
    pub scope: usize,
    /// Whether the process starts from an empty environment: a container sees nothing of what a script exports.
    pub is_alone: bool,
}

/// Something a consumer makes of a line that its author cannot have meant.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Remark {
    /// Line, from 1.
    pub line: usize,
    /// The variable it is about.
    pub variable: Option<String>,
    /// Whether the process sees something else than was meant; otherwise it is something to know.
    pub is_error: bool,
    /// In words.
    pub message: String,
    /// What to write instead.
    pub suggestion: Option<String>,
}

/// What a file says to its consumer.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Source {
    /// Variables in order.
    pub assignments: Vec<Assignment>,
    /// Remarks in order of lines.
    pub remarks: Vec<Remark>,
}

impl Source {
    /// Reads a text as its consumer does. Fails only where the text is no text of this kind at all.
    pub fn read(consumer: Consumer, text: &str) -> Result<Self, String> {
        if text.len() > MAX_BYTES {
            return Err(format!("has {} bytes; at most {MAX_BYTES} are read", text.len()));
        }
        if text.lines().count() > MAX_LINES {
            return Err(format!("has more than {MAX_LINES} lines"));
        }
        let mut source = match consumer {
            Consumer::EnvFile => env_file(text),
            Consumer::DockerEnvFile => docker_env_file(text),
            Consumer::Shell => shell::read(text),
            Consumer::SystemdUnit => systemd::read(text),
            Consumer::Compose => yaml::read(text, yaml::Reader::Compose)?,
            Consumer::Kubernetes => yaml::read(text, yaml::Reader::Kubernetes)?,
            Consumer::NcclConf => nccl_conf(text),
        };
        source.remarks.sort_by_key(|remark| remark.line);
        Ok(source)
    }

    fn set(&mut self, line: usize, name: &str, value: Option<String>, scope: usize) {
        self.assignments.push(Assignment { line, name: name.to_owned(), value, scope, is_alone: false });
    }

    fn set_in_container(&mut self, line: usize, name: &str, value: Option<String>, scope: usize) {
        self.assignments.push(Assignment { line, name: name.to_owned(), value, scope, is_alone: true });
    }

    fn error(&mut self, line: usize, variable: Option<&str>, message: impl Into<String>, suggestion: Option<String>) {
        let (variable, message) = (variable.map(str::to_owned), message.into());
        self.remarks.push(Remark { line, variable, is_error: true, message, suggestion });
    }

    fn warning(&mut self, line: usize, variable: Option<&str>, message: impl Into<String>, suggestion: Option<String>) {
        let (variable, message) = (variable.map(str::to_owned), message.into());
        self.remarks.push(Remark { line, variable, is_error: false, message, suggestion });
    }
}

/// Whether a line has to do with NCCL: what else stands in a file is not this reader's business.
fn concerns_nccl(line: &str) -> bool {
    line.contains("NCCL")
}

fn env_file(text: &str) -> Source {
    use crate::error_kind::Classified as _;
    let mut source = Source::default();
    let lines: Vec<&str> = text.split('\n').collect();
    let Ok(results) = read_env_lines(text) else { return source };
    for result in results {
        match result {
            Ok((line, name, value)) => source.set(line, &name, Some(value), 0),
            Err(error) => {
                let content = lines.get(error.line - 1).copied().unwrap_or_default();
                // A line that is no assignment at all may cost the whole file, whatever it is about.
                let is_no_assignment =
                    matches!(error.problem, EnvProblem::NoEqualsSign { .. }) && !is_name(content.trim());
                if concerns_nccl(content) || is_no_assignment {
                    let name =
                        content.trim().trim_start_matches("export ").split('=').next().unwrap_or_default().trim();
                    let variable = is_name(name).then_some(name);
                    let problem = &error.problem;
                    let message = error.hint().map_or_else(|| problem.to_string(), |hint| format!("{problem}; {hint}"));
                    source.error(error.line, variable, message, plain(content));
                }
            }
        }
    }
    source
}

/// The line as every reader of env files takes it, where it can be said that way.
fn plain(content: &str) -> Option<String> {
    let content = content.trim();
    let (name, value) = content.strip_prefix("export ").unwrap_or(content).split_once('=')?;
    let (name, value) = (name.trim(), value.trim());
    let quoted = ['"', '\''].into_iter().find_map(|quote| value.strip_prefix(quote)?.strip_suffix(quote));
    let value = quoted.or_else(|| value.split(" #").next()).unwrap_or(value).trim();
    (is_name(name) && unsayable(Dialect::EnvFile, value).is_none()).then(|| clip(&format!("{name}={value}")))
}

/// docker skips blanks before a line and drops a carriage return behind it; the rest of a line is a name up to the
/// first `=`, and the value. A name with a blank in it makes it refuse the whole file.
fn docker_env_file(text: &str) -> Source {
    let mut source = Source::default();
    for (index, content) in text.strip_prefix('\u{feff}').unwrap_or(text).split('\n').enumerate() {
        let line = index + 1;
        let content = content.strip_suffix('\r').unwrap_or(content).trim_start_matches([' ', '\t']);
        if content.is_empty() || content.starts_with('#') {
            continue;
        }
        let (name, value) = content.split_once('=').map_or((content, None), |(name, value)| (name, Some(value)));
        if is_name(name) {
            source.set(line, name, value.map(str::to_owned), 0);
        } else if name.is_empty() || name.contains([' ', '\t']) {
            let bare = name.trim().trim_start_matches("export ").trim();
            source.error(
                line,
                is_name(bare).then_some(bare),
                format!("{:?} is no name to docker, which refuses the whole file", clip(name)),
                is_name(bare).then(|| format!("{bare}={}", clip(value.unwrap_or_default().trim()))),
            );
        }
    }
    source
}

fn nccl_conf(text: &str) -> Source {
    let mut source = Source::default();
    for (index, content) in text.split('\n').enumerate() {
        let line = index + 1;
        if content.starts_with('#') || content.trim().is_empty() {
            continue;
        }
        let Some((name, value)) = content.split_once('=') else {
            source.error(line, None, "there is no \"=\", so NCCL passes over the line", None);
            continue;
        };
        if !is_name(name) {
            let bare = name.trim().trim_start_matches("export ").trim();
            let suggestion = is_name(bare).then(|| format!("{bare}={}", value.trim()));
            source.error(
                line,
                is_name(bare).then_some(bare),
                format!("NCCL trims nothing: this sets a variable named {:?}, which nothing reads", clip(name)),
                suggestion,
            );
            continue;
        }
        if value != value.trim() {
            source.error(
                line,
                Some(name),
                "NCCL trims nothing: the blanks become part of the value",
                Some(format!("{name}={}", value.trim())),
            );
            continue;
        }
        if value.len() > 1023 {
            source.error(line, Some(name), "NCCL keeps the first 1023 bytes of a value", None);
            continue;
        }
        if let Some(first) = source.assignments.iter().find(|assignment| assignment.name == name) {
            let message = format!("line {} sets it already, and in this file the first line wins", first.line);
            source.error(line, Some(name), message, None);
            continue;
        }
        source.set(line, name, Some(value.to_owned()), 0);
    }
    source
}

/// A short form of a foreign text for a message.
fn clip(text: &str) -> String {
    const CHARACTERS: usize = 60;
    let mut short: String = text.chars().take(CHARACTERS).collect();
    if text.chars().nth(CHARACTERS).is_some() {
        short.push_str("...");
    }
    short
}

#[cfg(test)]
mod tests {
    use super::*;

    fn set(consumer: Consumer, text: &str) -> Vec<(usize, String, Option<String>)> {
        let source = Source::read(consumer, text).unwrap();
        source.assignments.into_iter().map(|one| (one.line, one.name, one.value)).collect()
    }

    fn owned(expected: &[(usize, &str, &str)]) -> Vec<(usize, String, Option<String>)> {
        expected.iter().map(|(line, name, value)| (*line, (*name).to_owned(), Some((*value).to_owned()))).collect()
    }

    fn remarks(consumer: Consumer, text: &str) -> Vec<(usize, bool, String)> {
        let source = Source::read(consumer, text).unwrap();
        source.remarks.into_iter().map(|one| (one.line, one.is_error, one.message)).collect()
    }

    #[test]
    fn consumers_are_guessed_by_name_and_text() {
        for (name, text, consumer) in [
            ("tuned.env", "A=1\n", Consumer::EnvFile),
            ("tuned.env", "export A=1\n", Consumer::EnvFile),
            ("-", "# back\nunset -v NCCL_ALGO\n", Consumer::Shell),
            (".env.production", "export A=1\n", Consumer::EnvFile),
            ("tuned.docker.env", "A=1\n", Consumer::DockerEnvFile),
            ("pod.json", "{\"apiVersion\": \"v1\"}\n", Consumer::Kubernetes),
            ("tuned.sh", "A=1\n", Consumer::Shell),
            ("start", "#!/bin/sh\n", Consumer::Shell),
            ("notes.txt", "export NCCL_ALGO=Ring\n", Consumer::Shell),
            ("job.sbatch", "", Consumer::Shell),
            ("/etc/nccl.conf", "", Consumer::NcclConf),
            ("/srv/.nccl.conf", "", Consumer::NcclConf),
            ("compose.yml", "services:\n", Consumer::Compose),
            ("pod.yaml", "apiVersion: v1\nkind: Pod\n", Consumer::Kubernetes),
            ("vllm.service", "", Consumer::SystemdUnit),
            ("-", "# c\nservices:\n  a:\n", Consumer::Compose),
            ("-", "# c\napiVersion: v1\n", Consumer::Kubernetes),
            ("-", "# c\nset -- \"$@\" \\\n  -x NCCL_ALGO=Ring\n", Consumer::Shell),
            ("override.conf", "[Service]\nEnvironment=A=1\n", Consumer::SystemdUnit),
        ] {
            assert_eq!(Consumer::guess(name, text), consumer, "{name}");
        }
        assert!(Consumer::parse("compos").unwrap_err().contains("did you mean compose"));
    }

    #[test]
    fn an_env_file_is_read_as_docker_reads_it_and_its_traps_are_told() {
        let text =
            "# NCCL\nNCCL_ALGO=Ring\nexport NCCL_PROTO=LL\nNCCL_NTHREADS=\"256\"\nPS1=\"$ \"\nNCCL_DEBUG=WARN # x\n";
        assert_eq!(set(Consumer::EnvFile, text), owned(&[(2, "NCCL_ALGO", "Ring")]));
        let lines: Vec<usize> = remarks(Consumer::EnvFile, text).iter().map(|(line, _, _)| *line).collect();
        assert_eq!(lines, [3, 4, 6]);
        let told = Source::read(Consumer::EnvFile, text).unwrap().remarks;
        let write: Vec<Option<&str>> = told.iter().map(|remark| remark.suggestion.as_deref()).collect();
        assert_eq!(write, [Some("NCCL_PROTO=LL"), Some("NCCL_NTHREADS=256"), Some("NCCL_DEBUG=WARN")]);
        assert_eq!(plain("NCCL_THREAD_THRESHOLDS=\"8 8 64\""), None, "no env file says a blank to every reader");
    }

    #[test]
    fn docker_takes_values_as_they_stand() {
        let text = "\u{feff}# NCCL\n  NCCL_ALGO=Ring\r\nNCCL_THREAD_THRESHOLDS=8 8 64 # x\nNCCL_PROTO\nexport NCCL_DEBUG=INFO\n";
        let mut expected =
            owned(&[(2, "NCCL_ALGO", "Ring"), (3, "NCCL_THREAD_THRESHOLDS", "8 8 64 # x"), (4, "NCCL_PROTO", "")]);
        expected[2].2 = None;
        assert_eq!(set(Consumer::DockerEnvFile, text), expected);
        let told = remarks(Consumer::DockerEnvFile, text);
        assert!(matches!(&told[..], [(5, true, message)] if message.contains("refuses the whole file")), "{told:?}");
    }

    #[test]
    fn nccl_trims_nothing_in_its_own_file() {
        let text = "NCCL_ALGO=Ring\n NCCL_PROTO=LL\nNCCL_NTHREADS = 256\nNCCL_DEBUG= INFO\nnonsense\nNCCL_ALGO=Tree\n";
        assert_eq!(set(Consumer::NcclConf, text), owned(&[(1, "NCCL_ALGO", "Ring")]));
        let told = remarks(Consumer::NcclConf, text);
        assert_eq!(told.iter().map(|(line, _, _)| *line).collect::<Vec<_>>(), [2, 3, 4, 5, 6]);
        assert!(told[4].2.contains("the first line wins"));
    }

    #[test]
    fn a_shell_exports_quotes_and_continues() {
        let text = "#!/bin/bash\n\
            export NCCL_ALGO=Ring NCCL_PROTO='LL,Simple' # NCCL_DEBUG=INFO\n\
            export NCCL_THREAD_THRESHOLDS=\"8 8 64 \\\n64 8 64\"\n\
            NCCL_NTHREADS=256 NCCL_BUFFSIZE=$SIZE python3 -m sglang.launch_server\n\
            cat > file <<EOF\nNCCL_MIN_NCHANNELS=1\nEOF\n\
            mpirun -np 8 -x NCCL_MIN_NCHANNELS=32 \\\n  -x NCCL_DEBUG -x NCCL_P2P_LEVEL=SYS ./server\n\
            docker run -e NCCL_MAX_NCHANNELS=8 --env=NCCL_SHM_DISABLE=1 image\n\
            env NCCL_CUMEM_ENABLE=0 ./server\n";
        let mut expected = owned(&[
            (2, "NCCL_ALGO", "Ring"),
            (2, "NCCL_PROTO", "LL,Simple"),
            (3, "NCCL_THREAD_THRESHOLDS", "8 8 64 64 8 64"),
            (5, "NCCL_NTHREADS", "256"),
            (5, "NCCL_BUFFSIZE", ""),
            (9, "NCCL_MIN_NCHANNELS", "32"),
            (10, "NCCL_P2P_LEVEL", "SYS"),
            (11, "NCCL_MAX_NCHANNELS", "8"),
            (11, "NCCL_SHM_DISABLE", "1"),
            (12, "NCCL_CUMEM_ENABLE", "0"),
        ]);
        expected[4].2 = None;
        assert_eq!(set(Consumer::Shell, text), expected);
        assert_eq!(remarks(Consumer::Shell, text), []);
        let source = Source::read(Consumer::Shell, text).unwrap();
        let scopes: Vec<usize> = source.assignments.iter().map(|one| one.scope).collect();
        assert_eq!((scopes[0], scopes[2]), (0, 0));
        assert!(scopes[3] == scopes[4] && scopes[3] != 0 && scopes[5] == scopes[6] && scopes[5] != scopes[3]);
    }

    #[test]
    fn what_a_shell_makes_of_slips_is_told() {
        for (text, expected) in [
            ("NCCL_ALGO=Ring\n", "is set and not exported"),
            ("NCCL_ALGO = Ring\n", "blanks around"),
            ("export NCCL_ALGO = Ring\n", "blanks around"),
            ("export NCCL_THREAD_THRESHOLDS=8 8 64\n", "ends at the blank"),
            ("export NCCL_ALGO=\"Ring\n", "quote"),
            ("srun --export=ALL,NCCL_ALGO=Ring,Tree ./server\n", "comma"),
            ("export NCCL_ALGO=Ring\r\n", "carriage return"),
        ] {
            let told = remarks(Consumer::Shell, text);
            assert!(told.iter().any(|(line, _, message)| *line == 1 && message.contains(expected)), "{text}: {told:?}");
        }
        for fine in [
            "NCCL_ALGO=Ring\nexport NCCL_ALGO\n",
            "set -a\nNCCL_ALGO=Ring\n",
            "export NCCL_ALGO=Ring; ./server --x=1 & wait\n",
            "if [ \"$1\" = x ]; then\n  export NCCL_ALGO=Ring\nfi\n",
            "srun --export=ALL,NCCL_ALGO=Ring ./server\n",
            "unset NCCL_ALGO\n",
            "echo \"$NCCL_ALGO\" | grep Ring\n",
            "grep -e NCCL_ALGO=rings log.txt\n",
        ] {
            assert_eq!(remarks(Consumer::Shell, fine), [], "{fine}");
        }
    }

    #[test]
    fn what_looks_like_a_here_document_swallows_nothing() {
        for text in [
            "grep x <<< \"$LIST\"\nexport NCCL_ALGO=Ring\n",
            "(( flags = 1 << 3 ))\nexport NCCL_ALGO=Ring\n",
            "cat <<EOF\nnever ended\nexport NCCL_ALGO=Ring\n",
        ] {
            assert_eq!(set(Consumer::Shell, text).last().map(|one| one.1.as_str()), Some("NCCL_ALGO"), "{text}");
        }
    }

    #[test]
    fn a_unit_takes_back_what_stood_before() {
        let text = "[Service]\nEnvironment=NCCL_ALGO=Ring\n[Service]\nEnvironment=\nEnvironment=NCCL_PROTO=LL\n\
                    [Socket]\nEnvironment=NCCL_ALGO=Tree\n";
        assert_eq!(set(Consumer::SystemdUnit, text), owned(&[(5, "NCCL_PROTO", "LL")]));
        assert_eq!(remarks(Consumer::SystemdUnit, text), []);
    }

    #[test]
    fn a_unit_splits_words_and_undoes_quotes() {
        let text = "# /etc/systemd/system/vllm.service\n[Unit]\nDescription=NCCL_X=1\n[Service]\n\
            Environment=NCCL_ALGO=Ring \"NCCL_THREAD_THRESHOLDS=8 8 64\" NCCL_PROTO='LL'\n\
            Environment=NCCL_NTHREADS=256 \\\n  NCCL_DEBUG=WARN\nEnvironmentFile=/etc/tuned.env\n\
            ExecStart=/usr/bin/env NCCL_BUFFSIZE=1048576 /srv/server\n";
        assert_eq!(
            set(Consumer::SystemdUnit, text),
            owned(&[
                (5, "NCCL_ALGO", "Ring"),
                (5, "NCCL_THREAD_THRESHOLDS", "8 8 64"),
                (5, "NCCL_PROTO", "LL"),
                (6, "NCCL_NTHREADS", "256"),
                (7, "NCCL_DEBUG", "WARN"),
                (9, "NCCL_BUFFSIZE", "1048576"),
            ])
        );
        assert_eq!(remarks(Consumer::SystemdUnit, text), []);
        for (line, expected) in [
            ("Environment=NCCL_THREAD_THRESHOLDS=8 8 64", "ends at the blank"),
            ("Environment=\"NCCL_ALGO=Ring", "quote"),
            ("Environment=export NCCL_ALGO=Ring", "`export`"),
            ("Environment=NCCL_ALGO=$ALGO", "not expand"),
            ("NCCL_ALGO=Ring", "is no setting"),
            ("Environment=NCCL_ALGO=Ring # fast", "comment"),
            ("Environment=NCCL_DEBUG_FILE=/tmp/%h.log", "specifier"),
        ] {
            let told = remarks(Consumer::SystemdUnit, &format!("[Service]\n{line}\n"));
            assert!(told.iter().any(|(at, _, message)| *at == 2 && message.contains(expected)), "{line}: {told:?}");
        }
    }

    #[test]
    fn compose_has_two_forms_and_yaml_its_own_mind() {
        let text = "services:\n  a:\n    environment:\n      NCCL_ALGO: Ring\n      NCCL_NTHREADS: 256\n      \
            NCCL_PROTO: \"LL\"\n      NCCL_DEBUG:\n  b:\n    environment:\n      - NCCL_ALGO=Tree\n      \
            - \"NCCL_THREAD_THRESHOLDS=8 8 64\"\n      - NCCL_BUFFSIZE=${SIZE}\n      - NCCL_NTHREADS\n";
        let source = Source::read(Consumer::Compose, text).unwrap();
        let seen: Vec<(usize, &str, Option<&str>)> =
            source.assignments.iter().map(|one| (one.line, one.name.as_str(), one.value.as_deref())).collect();
        assert_eq!(
            seen,
            [
                (4, "NCCL_ALGO", Some("Ring")),
                (5, "NCCL_NTHREADS", Some("256")),
                (6, "NCCL_PROTO", Some("LL")),
                (7, "NCCL_DEBUG", None),
                (10, "NCCL_ALGO", Some("Tree")),
                (11, "NCCL_THREAD_THRESHOLDS", Some("8 8 64")),
                (12, "NCCL_BUFFSIZE", None),
                (13, "NCCL_NTHREADS", None),
            ]
        );
        assert_ne!(source.assignments[0].scope, source.assignments[4].scope);
        assert_eq!(source.remarks, []);
        for (entry, expected) in [
            ("      NCCL_P2P_DISABLE: true\n", "boolean"),
            ("      NCCL_NTHREADS: 0400\n", "octal"),
            ("      - NCCL_NTHREADS=\"256\"\n", "quotes"),
            ("      - NCCL_NTHREADS: 256\n", "mapping"),
        ] {
            let text = format!("services:\n  a:\n    environment:\n{entry}");
            let told = remarks(Consumer::Compose, &text);
            assert!(
                told.iter().any(|(line, _, message)| *line == 4 && message.contains(expected)),
                "{entry}: {told:?}"
            );
        }
    }

    #[test]
    fn kubernetes_wants_strings() {
        let text = "apiVersion: v1\nkind: Pod\nspec:\n  containers:\n  - name: a\n    env:\n    - name: NCCL_ALGO\n      \
            value: Ring\n    - name: NCCL_NTHREADS\n      value: 256\n    - name: NCCL_PROTO\n      valueFrom:\n        \
            configMapKeyRef: {name: x, key: y}\n    - name: NCCL_P2P_DISABLE\n      value: \"1\"\n---\n\
            apiVersion: v1\nkind: ConfigMap\ndata:\n  NCCL_MIN_NCHANNELS: \"32\"\n  NCCL_MAX_NCHANNELS: 32\n";
        let source = Source::read(Consumer::Kubernetes, text).unwrap();
        let seen: Vec<(&str, Option<&str>)> =
            source.assignments.iter().map(|one| (one.name.as_str(), one.value.as_deref())).collect();
        assert_eq!(
            seen,
            [
                ("NCCL_ALGO", Some("Ring")),
                ("NCCL_PROTO", None),
                ("NCCL_P2P_DISABLE", Some("1")),
                ("NCCL_MIN_NCHANNELS", Some("32"))
            ]
        );
        let told: Vec<(usize, bool)> = source.remarks.iter().map(|one| (one.line, one.is_error)).collect();
        assert_eq!(told, [(10, true), (21, true)]);
        assert_eq!(source.remarks[0].suggestion.as_deref(), Some("value: \"256\""));
    }

    #[test]
    fn broken_and_hostile_texts_are_refused_or_read_in_bounds() {
        assert!(Source::read(Consumer::Compose, "a: [1, 2\n").unwrap_err().contains("line"));
        let deep = "[".repeat(5000);
        assert!(Source::read(Consumer::Compose, &deep).is_err());
        let bomb = "a: &a [x,x,x,x,x,x,x,x,x]\nb: &b [*a,*a,*a,*a,*a,*a,*a,*a]\nc: [*b,*b,*b,*b,*b,*b,*b]\n";
        assert!(Source::read(Consumer::Compose, bomb).is_ok());
        assert!(Source::read(Consumer::Shell, &"x".repeat(MAX_BYTES + 1)).is_err());
        for consumer in Consumer::ALL {
            for text in ["\0", "NCCL_", "=", "'", "\"\\", "$(", "<<", "[Service]\nEnvironment=\\", "- name: NCCL_X"] {
                let _ = Source::read(consumer, text);
            }
        }
    }

    proptest::proptest! {
        #[test]
        fn no_text_makes_a_reader_panic(which in 0..Consumer::ALL.len(), text in "[ A-Z_=\"'\\\\$#\\n{}\\[\\]:<-]{0,200}") {
            let _ = Source::read(Consumer::ALL[which], &text);
        }
    }
}
