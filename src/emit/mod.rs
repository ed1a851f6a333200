//! Writes the answer of a run in the forms it can be deployed in.
//!
//! A file that sets variables travels further than the run it came from, so each says on its own
//! lines what it was measured on, under what, with what gain, and whom it is for.

mod header;

use std::path::Path;

use crate::env_syntax::{self, Dialect, EnvLine, EnvWriteError};
use crate::error_kind::{Classified, ErrorKind};
use crate::file_kind::{FileKind, PLUGIN_FILE};
use crate::knob;
use crate::machine::NcclVersion;
use crate::record::{Answer, Choice, Manifest, Origin, VerdictKind};
use crate::units::format_change;
use crate::wording;

pub use header::{Header, read_header};

/// In which form the answer is written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum EmitAs {
    /// tuned.env.
    Env,
    /// tuned.sh.
    Shell,
    /// For docker alone, which can say what other readers cannot.
    Docker,
    /// A drop-in of a systemd unit.
    Systemd,
    /// A shell snippet that takes the variables back.
    Revert,
    /// The tuner table itself.
    TunerTable,
    /// Lines of a batch script of Slurm.
    Slurm,
    /// Arguments of Open MPI's mpirun.
    Mpi,
    /// NCCL's own file.
    NcclConf,
    /// A fragment for compose.
    Compose,
    /// A `ConfigMap` of Kubernetes.
    Kubernetes,
    /// Lines of a batch script whose srun starts a container.
    Pyxis,
}

impl EmitAs {
    /// All forms.
    pub const ALL: [Self; 12] = [
        Self::Env,
        Self::Shell,
        Self::Docker,
        Self::Systemd,
        Self::Slurm,
        Self::Mpi,
        Self::NcclConf,
        Self::Compose,
        Self::Kubernetes,
        Self::Pyxis,
        Self::Revert,
        Self::TunerTable,
    ];
    /// Those that a run directory holds.
    pub const KEPT: [Self; 2] = [Self::Env, Self::Shell];

    /// The name on the command line.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Env => "env",
            Self::Shell => "shell",
            Self::Docker => "docker",
            Self::Systemd => "systemd",
            Self::Revert => "revert",
            Self::TunerTable => "tuner-table",
            Self::Slurm => "slurm",
            Self::Mpi => "mpi",
            Self::NcclConf => "nccl-conf",
            Self::Compose => "compose",
            Self::Kubernetes => "k8s",
            Self::Pyxis => "pyxis",
        }
    }

    /// The name of the file in a run directory.
    pub const fn file_name(self) -> &'static str {
        match self {
            Self::Env => "tuned.env",
            Self::Shell => "tuned.sh",
            Self::Docker => "tuned.docker.env",
            Self::Systemd => "nccltune.conf",
            Self::Revert => "revert.sh",
            Self::TunerTable => "tuner-table.csv",
            Self::Slurm => "tuned.slurm",
            Self::Mpi => "tuned.mpi.sh",
            Self::NcclConf => "nccl.conf",
            Self::Compose => "tuned.compose.yaml",
            Self::Kubernetes => "tuned.k8s.yaml",
            Self::Pyxis => "tuned.pyxis.sh",
        }
    }

    const fn dialect(self) -> Dialect {
        match self {
            // A table sets no variables: it is told as it stands in the run directory, and not by `render`.
            Self::Env | Self::TunerTable => Dialect::EnvFile,
            Self::Shell | Self::Slurm => Dialect::Shell,
            Self::Docker => Dialect::Docker,
            Self::Systemd => Dialect::SystemdUnit,
            Self::Revert => Dialect::Unset,
            Self::Mpi => Dialect::Mpirun,
            Self::NcclConf => Dialect::NcclConf,
            Self::Compose => Dialect::Compose,
            Self::Kubernetes => Dialect::Kubernetes,
            Self::Pyxis => Dialect::Pyxis,
        }
    }

    const fn consumers(self) -> &'static str {
        match self {
            Self::Env => {
                "For docker --env-file, systemd EnvironmentFile= and compose env_file; a shell reads tuned.sh instead."
            }
            Self::Shell => {
                "For `. ./tuned.sh` in a POSIX shell before the server starts; docker, systemd and compose read \
                 tuned.env instead."
            }
            Self::Docker => {
                "For docker run --env-file alone: values stand as they are, without quotes, and other readers of env \
                 files take some of them otherwise."
            }
            Self::Systemd => {
                "For systemd: save as /etc/systemd/system/NAME.service.d/nccltune.conf, then systemctl daemon-reload \
                 and restart NAME."
            }
            Self::Revert => {
                "For `. ./revert.sh` in a POSIX shell: unsets what tuned.sh sets beside your own pins. With docker, compose \
                 and systemd, leave the file out."
            }
            Self::TunerTable => "For the tuner plugin of nccltune.",
            Self::Slurm => {
                "For a batch script of Slurm, ahead of srun: put the lines there or `. ./tuned.slurm`. srun hands them \
                 on to every rank with --export=ALL, its default; --export=NONE or a list of names loses them."
            }
            Self::Mpi => {
                "For mpirun of Open MPI, in a POSIX shell: set -- -np 8; . ./tuned.mpi.sh; mpirun \"$@\" PROGRAM. It \
                 adds -x NAME=VALUE for each variable, which reaches the ranks on every node."
            }
            Self::NcclConf => {
                "For NCCL itself: save as /etc/nccl.conf, ~/.nccl.conf of the server's user, or name it in \
                 NCCL_CONF_FILE (NCCL 2.23 and later). Whatever the environment of the process sets beats it."
            }
            Self::Compose => {
                "For docker compose: call `server` what your service is called, then docker compose -f compose.yaml -f \
                 tuned.compose.yaml up. Under `environment` of your own file, a variable of the same name loses."
            }
            Self::Kubernetes => {
                "For Kubernetes: kubectl apply -f tuned.k8s.yaml, and in the container envFrom: [{configMapRef: {name: \
                 nccltune}}]. What its own env: sets beats it; pods see a change when they are started again."
            }
            Self::Pyxis => {
                "For srun with pyxis, in a batch script: set -- --container-image=IMAGE; . ./tuned.pyxis.sh; srun \"$@\" \
                 PROGRAM. --container-env lets the values win over those of the image; srun needs --export=ALL, its default."
            }
        }
    }

    /// How a container of this form gets to see a directory at its own path.
    fn mount(self, folder: &str) -> String {
        match self {
            Self::Compose => format!("volumes: [\"{folder}:{folder}:ro\"] in the service"),
            Self::Kubernetes => {
                format!(
                    "a hostPath volume {folder} with mountPath {folder}, readOnly: true, on each node the pod may run on"
                )
            }
            Self::Pyxis => format!("srun --container-mounts={folder}:{folder}:ro"),
            _ => format!("docker run -v {folder}:{folder}:ro"),
        }
    }
}

/// Why an answer could not be written.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum EmitError {
    /// The form cannot say one of the values.
    #[error(transparent)]
    Write(#[from] EnvWriteError),
    /// The two records do not belong together.
    #[error("choice.json and manifest.json are not of one run: machine fingerprints {choice} and {manifest}")]
    DifferentRuns {
        /// The choice's fingerprint, clipped.
        choice: String,
        /// The manifest's fingerprint, clipped.
        manifest: String,
    },
    /// The answer sets what the run never measured.
    #[error("the answer sets {variable}={value}, which is in no arm of the run: choice.json was changed")]
    Foreign {
        /// The variable, clipped.
        variable: String,
        /// Its value, clipped.
        value: String,
    },
    /// The answer would undo a pin that every measurement held under.
    #[error(
        "the answer sets {variable}={chosen}, but every measurement ran with {variable}={pinned}, pinned by the user"
    )]
    PinContradicted {
        /// The variable.
        variable: String,
        /// Its pinned value.
        pinned: String,
        /// Its value in the answer.
        chosen: String,
    },
    /// A file of the answer lies where the form cannot point.
    #[error(
        "the {} of the answer is {path}, and {} cannot say {character:?}",
        kind.words(),
        dialect.name()
    )]
    Path {
        /// What kind of file.
        kind: FileKind,
        /// Where it lies, clipped.
        path: String,
        /// The first character that is in the way.
        character: char,
        /// The dialect.
        dialect: Dialect,
    },
    /// A name that leads who knows where.
    #[error("choice.json names a {} {name:?}; one of a run directory is called {}", kind.words(), kind.file_name("SHA256"))]
    FileName {
        /// What kind of file.
        kind: FileKind,
        /// The name, clipped.
        name: String,
    },
    /// NCCL would read another number than a person does.
    #[error("{variable}={value} is not a plain decimal: NCCL reads a suffix as nothing and a leading 0 as octal")]
    NotPlainDecimal {
        /// The variable.
        variable: String,
        /// Its value.
        value: String,
    },
    /// The release that was measured would take something from other collectives.
    #[error("{variable}={value} cannot be emitted: {reason}")]
    HarmsOthers {
        /// The variable.
        variable: String,
        /// Its value.
        value: String,
        /// What it does, in words.
        reason: String,
    },
}

impl Classified for EmitError {
    fn kind(&self) -> ErrorKind {
        match self {
            Self::Write(error) => error.kind(),
            Self::DifferentRuns { .. }
            | Self::Foreign { .. }
            | Self::PinContradicted { .. }
            | Self::Path { .. }
            | Self::FileName { .. }
            | Self::NotPlainDecimal { .. }
            | Self::HarmsOthers { .. } => ErrorKind::Usage,
        }
    }

    fn hint(&self) -> Option<String> {
        match self {
            Self::Write(error) => error.hint(),
            Self::Foreign { .. } => Some("run `nccltune tune` again, or take back what was edited".to_owned()),
            Self::DifferentRuns { .. } => Some("name one run directory, and leave the files in it together".to_owned()),
            Self::HarmsOthers { .. } => {
                Some("run `nccltune tune` again: this version leaves such arms out on that release".to_owned())
            }
            Self::Path { dialect, .. } => {
                let other = match dialect {
                    Dialect::EnvFile | Dialect::Mpirun | Dialect::NcclConf | Dialect::Compose | Dialect::Kubernetes => {
                        ", or take the shell form, which quotes it"
                    }
                    Dialect::Docker | Dialect::Shell | Dialect::Pyxis | Dialect::SystemdUnit | Dialect::Unset => "",
                };
                Some(format!("move the run directory to a path without it and run `nccltune emit` there{other}"))
            }
            Self::PinContradicted { .. } | Self::FileName { .. } | Self::NotPlainDecimal { .. } => None,
        }
    }
}

/// What a variable does, in a sentence, for those who know it.
pub type EffectOf<'a> = &'a dyn Fn(&str) -> Option<String>;

/// The answer in any form. Without a winner, a header that says so and no variables. `directory` is the
/// run's, as a path that leads there from anywhere: files of the answer lie in it.
pub fn render(
    choice: &Choice,
    manifest: &Manifest,
    directory: &Path,
    form: EmitAs,
    effect_of: EffectOf<'_>,
) -> Result<String, EmitError> {
    let parts = [&choice.fingerprint, &manifest.fingerprint.combined];
    if parts[0] != parts[1] {
        let [choice, manifest] = parts.map(|fingerprint| wording::printable(fingerprint, 12));
        return Err(EmitError::DifferentRuns { choice, manifest });
    }
    let variables = variables(choice, manifest, directory, form.dialect())?;
    let mut lines = header::lines(choice, manifest, directory, form, variables.is_empty());
    // What stands beside the environment has its share in the gain; a file has a variable of its own.
    let lonely = |answer: &Answer| answer.table.is_none() && answer.server_args.is_empty();
    let alone = variables.iter().filter(|variable| !variable.pinned).count() == 1 && held(choice).all(lonely);
    let reads_tables =
        |name: &str| FileKind::ALL.iter().any(|kind| kind.companion().is_some_and(|(own, _)| own == name));
    for variable in variables {
        if form == EmitAs::Revert && variable.pinned {
            // It was the user's before there was a run.
            lines.push(comment(&format!("{} was pinned, and stays.", variable.name)));
            continue;
        }
        if form != EmitAs::Revert {
            lines.push(comment(""));
            let told = if reads_tables(&variable.name) && !variable.pinned {
                "NCCL_TUNER_PLUGIN: what reads the table; where NCCL does not find it, it says nothing and chooses itself"
                    .to_owned()
            } else {
                explanation(choice, &variable, alone, effect_of)
            };
            lines.push(comment(&told));
        }
        lines.push(EnvLine::Variable { name: variable.name, value: variable.value });
    }
    Ok(env_syntax::write(form.dialect(), &lines)?)
}

struct Variable {
    name: String,
    value: String,
    pinned: bool,
}

/// The winner's variables, then the explicit pins: pins hold in every measurement, so an answer
/// without them would be another one than was measured.
fn variables(
    choice: &Choice,
    manifest: &Manifest,
    directory: &Path,
    dialect: Dialect,
) -> Result<Vec<Variable>, EmitError> {
    if choice.verdict != VerdictKind::Adopt {
        return Ok(Vec::new());
    }
    let pins = || manifest.pins.iter().filter(|pin| pin.origin == Origin::Pin);
    let version = manifest.nccl.as_ref().map(|nccl| NcclVersion::from_code(nccl.version));
    let harm = |name: &str, value: &str| knob::harm_to_others(name, value, version?);
    let mut variables = Vec::new();
    for (name, value) in &choice.env {
        let is_pinned = pins().any(|pin| pin.variable == *name);
        if let Some(reason) = harm(name, value).filter(|_| !is_pinned) {
            return Err(EmitError::HarmsOthers { variable: name.clone(), value: value.clone(), reason });
        }
        match pins().find(|pin| pin.variable == *name) {
            None if misread_as_number(value) => {
                return Err(EmitError::NotPlainDecimal { variable: name.clone(), value: value.clone() });
            }
            None if !is_of_run(manifest, name, value) => {
                return Err(EmitError::Foreign {
                    variable: wording::printable(name, 80),
                    value: wording::printable(value, 80),
                });
            }
            None => variables.push(Variable { name: name.clone(), value: value.clone(), pinned: false }),
            Some(pin) if pin.value != *value => {
                return Err(EmitError::PinContradicted {
                    variable: name.clone(),
                    pinned: pin.value.clone(),
                    chosen: value.clone(),
                });
            }
            Some(_) => {}
        }
    }
    for (kind, name) in &choice.files {
        let (name, value) = (kind.variable().to_owned(), path_of(*kind, name, directory, dialect)?);
        if let Some(pin) = pins().find(|pin| pin.variable == name) {
            return Err(EmitError::PinContradicted { variable: name, pinned: pin.value.clone(), chosen: value });
        }
        variables.push(Variable { name, value, pinned: false });
        if let Some((name, file)) = kind.companion() {
            let value = sayable(*kind, &directory.join(file), dialect)?;
            if let Some(pin) = pins().find(|pin| pin.variable == name) {
                return Err(EmitError::PinContradicted {
                    variable: name.to_owned(),
                    pinned: pin.value.clone(),
                    chosen: value,
                });
            }
            variables.push(Variable { name: name.to_owned(), value, pinned: false });
        }
    }
    variables.extend(pins().map(|pin| Variable { name: pin.variable.clone(), value: pin.value.clone(), pinned: true }));
    Ok(variables)
}

/// Whether the run knew a variable with this value: from an arm or a pin, or as a repair that came later.
fn is_of_run(manifest: &Manifest, name: &str, value: &str) -> bool {
    let made = manifest.tables.iter().flat_map(|tables| &tables.arms);
    let of_arms = manifest.arms.iter().chain(made).filter_map(|arm| arm.env.get(name));
    let of_pins = manifest.pins.iter().filter(|pin| pin.variable == name).map(|pin| &pin.value);
    let mut known = of_arms.chain(of_pins).peekable();
    if known.peek().is_none() { knob::find(name).is_some() } else { known.any(|one| one == value) }
}

/// Where a file of the answer lies. NCCL looks from wherever the server starts, so the path is whole.
fn path_of(kind: FileKind, name: &str, directory: &Path, dialect: Dialect) -> Result<String, EmitError> {
    if kind.sha256_of(name).is_none() {
        return Err(EmitError::FileName { kind, name: wording::printable(name, 80) });
    }
    sayable(kind, &directory.join(name), dialect)
}

/// A path as a dialect can say it.
fn sayable(kind: FileKind, path: &Path, dialect: Dialect) -> Result<String, EmitError> {
    let text = path.to_string_lossy();
    let bad = if path.to_str().is_none() { Some('\u{fffd}') } else { env_syntax::unsayable(dialect, &text) };
    match bad {
        Some(character) => {
            Err(EmitError::Path { kind, path: wording::printable(&text, PATH_CHARACTERS), character, dialect })
        }
        None => Ok(text.into_owned()),
    }
}

/// Whether NCCL, which reads integers with strtoll in base 0, would take the text for another number
/// than it looks like: "4M" is 4 to it, "0100" is 64, "1e6" is 1.
fn misread_as_number(value: &str) -> bool {
    let unsigned = value.strip_prefix('-').unwrap_or(value);
    let digits = unsigned.bytes().take_while(u8::is_ascii_digit).count();
    let (number, rest) = unsigned.split_at(digits);
    if number.is_empty() {
        return false;
    }
    let octal = number.len() > 1 && number.starts_with('0');
    let suffix = ["k", "m", "g", "kb", "mb", "gb", "kib", "mib", "gib"].contains(&rest.to_ascii_lowercase().as_str());
    let hexadecimal = number == "0" && rest.starts_with(['x', 'X']);
    let exponent = rest
        .strip_prefix(['e', 'E'])
        .is_some_and(|exponent| !exponent.is_empty() && exponent.bytes().all(|byte| byte.is_ascii_digit()));
    rest.is_empty() && octal || suffix || hexadecimal || exponent
}

fn explanation(choice: &Choice, variable: &Variable, alone: bool, effect_of: EffectOf<'_>) -> String {
    let known = choice.contributions.iter().find(|contribution| contribution.variable == variable.name);
    let share = match (variable.pinned, alone, known) {
        (true, ..) => "pinned by the user".to_owned(),
        (false, true, _) => "the only variable the winner sets, so the gain above is its own".to_owned(),
        (false, false, Some(known)) => format!(
            "in the search {} against the default with it, {} with the other variables alone",
            format_change(known.ratio_with),
            format_change(known.ratio_without)
        ),
        (false, false, None) => "part of the winning combination; no arm of the search lacks it alone".to_owned(),
    };
    match effect_of(&variable.name) {
        Some(effect) => format!("{} ({share})", effect.trim_end().trim_end_matches('.')),
        None => format!("{} ({share})", variable.name),
    }
}

/// Characters of a path in a message or a comment.
const PATH_CHARACTERS: usize = 500;

/// A comment of whatever text: what could end it early or swallow the next line is taken out.
fn comment(text: &str) -> EnvLine {
    const LIMIT: usize = 1000;
    EnvLine::Comment(wording::printable(text, LIMIT).trim_end_matches(['\\', ' ']).to_owned())
}

/// The answers that the files of the run hold.
fn held(choice: &Choice) -> impl Iterator<Item = &Answer> {
    choice.answers.iter().filter(|answer| answer.env == choice.env && answer.files == choice.files)
}

/// What has to stand beside the environment for the answer to be the measured one.
fn companions(choice: &Choice, directory: &Path, form: EmitAs) -> Vec<String> {
    let mut companions: Vec<String> = choice
        .files
        .iter()
        .map(|(kind, name)| {
            let folder = wording::printable(&directory.to_string_lossy(), PATH_CHARACTERS);
            format!("the {} {name}; a container must see it at the same path: {}", kind.words(), form.mount(&folder))
        })
        .collect();
    if choice.files.contains_key(&FileKind::TunerTable) {
        companions.push(format!(
            "the tuner plugin {PLUGIN_FILE}, at the same path; NCCL_DEBUG=INFO shows \"TUNER/nccltune: table\" for each \
             communicator that reads the table, and nothing where the plugin is not found"
        ));
    }
    for answer in held(choice) {
        let profile = &answer.profile;
        if let Some(table) = answer.table.as_ref().filter(|table| !answer.files.values().any(|file| file == *table)) {
            companions.push(format!("the tuner table {table} (profile {profile})"));
        }
        if !answer.server_args.is_empty() {
            companions.push(format!("the server arguments {} (profile {profile})", answer.server_args.join(" ")));
        }
    }
    companions
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::record::{AnswerKind, GateRecord};
    use crate::wording::fixtures;

    const RUN: &str = "/srv/runs/box";

    fn tuned_env(choice: &Choice, manifest: &Manifest, effect_of: EffectOf<'_>) -> Result<String, EmitError> {
        render(choice, manifest, Path::new(RUN), EmitAs::Env, effect_of)
    }

    fn tuned_sh(choice: &Choice, manifest: &Manifest, effect_of: EffectOf<'_>) -> Result<String, EmitError> {
        render(choice, manifest, Path::new(RUN), EmitAs::Shell, effect_of)
    }

    /// A catalogue that knows some variables and not others.
    fn effects(name: &str) -> Option<String> {
        let effect = match name {
            "NCCL_PROTO" => "Protocols NCCL may choose from.",
            "NCCL_MIN_NCHANNELS" => "Fewest channels of a communicator.",
            "NCCL_P2P_DISABLE" => "Switches direct GPU peer access off.",
            _ => return None,
        };
        Some(effect.to_owned())
    }

    fn values(text: &str) -> Vec<(String, String)> {
        env_syntax::read_env_file(text).unwrap().into_iter().map(|(_, name, value)| (name, value)).collect()
    }

    #[test]
    fn an_adopted_answer_as_env_file() {
        let text = tuned_env(&fixtures::adopt(), &fixtures::manifest(), &effects).unwrap();
        insta::assert_snapshot!(text);
    }

    #[test]
    fn an_adopted_answer_for_a_shell() {
        let text = tuned_sh(&fixtures::adopt(), &fixtures::manifest(), &effects).unwrap();
        insta::assert_snapshot!(text);
    }

    #[test]
    fn a_simulated_answer_says_so_on_line_three() {
        let (choice, manifest) = fixtures::simulated(fixtures::adopt());
        let text = tuned_env(&choice, &manifest, &effects).unwrap();
        assert_eq!(text.lines().nth(2), Some("# SIMULATED: no GPU was measured; do not deploy"));
        insta::assert_snapshot!(text);
    }

    #[test]
    fn a_host_memory_answer_carries_its_pin() {
        let (choice, manifest) = fixtures::host_memory(fixtures::adopt());
        let text = tuned_env(&choice, &manifest, &effects).unwrap();
        let expected = [("NCCL_PROTO", "LL"), ("NCCL_P2P_DISABLE", "1")];
        assert_eq!(values(&text), expected.map(|(name, value)| (name.to_owned(), value.to_owned())));
        insta::assert_snapshot!(text);
    }

    #[test]
    fn keeping_the_default_writes_comments_only() {
        let (choice, manifest) = fixtures::host_memory(fixtures::keep_default());
        let text = tuned_env(&choice, &manifest, &effects).unwrap();
        assert_eq!(values(&text), []);
        insta::assert_snapshot!(text);
    }

    #[test]
    fn undecided_writes_comments_only() {
        let text = tuned_sh(&fixtures::undecided(), &fixtures::manifest(), &effects).unwrap();
        assert!(text.lines().all(|line| line.starts_with('#')));
        insta::assert_snapshot!(text);
    }

    #[test]
    fn every_form_sets_or_unsets_the_same_variables() {
        let (choice, manifest) = fixtures::host_memory(fixtures::adopt());
        let names: Vec<String> =
            values(&tuned_env(&choice, &manifest, &effects).unwrap()).into_iter().map(|(name, _)| name).collect();
        for form in EmitAs::ALL {
            let text = render(&choice, &manifest, Path::new(RUN), form, &effects).unwrap();
            let sets = |line: &&str| !line.starts_with('#') && line.contains("NCCL_") && !line.starts_with("set --");
            let lines: Vec<&str> = text.lines().filter(sets).collect();
            if form == EmitAs::Revert {
                // What the user had pinned before stays.
                assert!(text.contains("# NCCL_P2P_DISABLE was pinned, and stays."), "{text}");
                assert_eq!(lines.len() + 1, names.len(), "{text}");
                continue;
            }
            assert_eq!(lines.len(), names.len(), "{form:?}:\n{text}");
            assert!(lines.iter().zip(&names).all(|(line, name)| line.contains(name)), "{form:?}:\n{text}");
        }
        for form in EmitAs::ALL.into_iter().filter(|form| !EmitAs::KEPT.contains(form)) {
            if !matches!(form, EmitAs::Docker | EmitAs::TunerTable) {
                insta::assert_snapshot!(
                    form.name(),
                    render(&choice, &manifest, Path::new(RUN), form, &effects).unwrap()
                );
            }
        }
    }

    #[test]
    fn each_form_says_how_its_container_gets_to_see_a_file() {
        let (choice, name) = with_a_file();
        for (form, words) in [
            (EmitAs::Env, "docker run -v /srv/runs/box:/srv/runs/box:ro"),
            (EmitAs::Compose, "volumes: [\"/srv/runs/box:/srv/runs/box:ro\"]"),
            (EmitAs::Kubernetes, "hostPath volume /srv/runs/box with mountPath /srv/runs/box"),
            (EmitAs::Pyxis, "srun --container-mounts=/srv/runs/box:/srv/runs/box:ro"),
        ] {
            let text = render(&choice, &fixtures::manifest(), Path::new(RUN), form, &effects).unwrap();
            let told = |line: &str| line.starts_with("# needs beside it") && line.contains(words);
            assert!(text.lines().any(told) && text.contains(&format!("/srv/runs/box/{name}")), "{text}");
        }
    }

    #[test]
    fn what_stands_beside_the_environment_is_named() {
        let mut choice = fixtures::adopt();
        choice.answers[0].kind = AnswerKind::EnvTable;
        choice.answers[0].table = Some("tuner-table-0a1b2c3d.csv".to_owned());
        choice.answers[0].server_args = vec!["--disable-custom-all-reduce".to_owned()];
        let text = tuned_env(&choice, &fixtures::manifest(), &effects).unwrap();
        let needs: Vec<&str> = text.lines().filter(|line| line.starts_with("# needs beside it")).collect();
        assert_eq!(
            needs,
            [
                "# needs beside it: the tuner table tuner-table-0a1b2c3d.csv (profile balanced)",
                "# needs beside it: the server arguments --disable-custom-all-reduce (profile balanced)",
            ]
        );
    }

    /// An answer that sets one variable and brings a graph file.
    fn with_a_file() -> (Choice, String) {
        let mut choice = fixtures::adopt();
        choice.env = fixtures::map(&[("NCCL_PROTO", "LL")]);
        let name = FileKind::Graph.file_name(&"5".repeat(64));
        choice.files.insert(FileKind::Graph, name.clone());
        let answer = &mut choice.answers[0];
        (answer.kind, answer.env, answer.files) = (AnswerKind::EnvFile, choice.env.clone(), choice.files.clone());
        (choice, name)
    }

    #[test]
    fn a_file_is_pointed_at_by_its_whole_path_wherever_the_run_lies() {
        let (choice, name) = with_a_file();
        let manifest = fixtures::manifest();
        let text = tuned_env(&choice, &manifest, &effects).unwrap();
        insta::assert_snapshot!(text);
        let moved = render(&choice, &manifest, Path::new("/opt/moved"), EmitAs::Env, &effects).unwrap();
        assert_eq!(values(&moved)[1], ("NCCL_GRAPH_FILE".to_owned(), format!("/opt/moved/{name}")));
        // Alone, the file's own variable has the whole gain.
        let mut alone = choice.clone();
        alone.env.clear();
        alone.answers[0].env.clear();
        let text = tuned_env(&alone, &manifest, &effects).unwrap();
        assert!(text.contains("NCCL_GRAPH_FILE (the only variable the winner sets"), "{text}");
    }

    #[test]
    fn a_path_that_an_env_file_cannot_say_is_an_error_that_says_what_to_do() {
        let (choice, name) = with_a_file();
        let manifest = fixtures::manifest();
        let blank = Path::new("/srv/my runs");
        let error = render(&choice, &manifest, blank, EmitAs::Env, &effects).unwrap_err();
        assert_eq!(
            error.to_string(),
            format!("the graph file of the answer is /srv/my runs/{name}, and an env file cannot say ' '")
        );
        assert!(error.hint().unwrap().contains("move the run directory"), "{error}");
        let text = render(&choice, &manifest, blank, EmitAs::Shell, &effects).unwrap();
        assert!(text.contains(&format!("export NCCL_GRAPH_FILE='/srv/my runs/{name}'\n")), "{text}");
        let line = Path::new("/srv/a\nb");
        assert!(matches!(
            render(&choice, &manifest, line, EmitAs::Shell, &effects),
            Err(EmitError::Path { character: '\n', .. })
        ));
    }

    #[test]
    fn a_file_is_neither_against_a_pin_nor_outside_the_run() {
        let (mut choice, _) = with_a_file();
        let mut manifest = fixtures::manifest();
        manifest.pins.push(fixtures::pinned("NCCL_GRAPH_FILE", "/etc/ring.xml"));
        assert!(matches!(tuned_env(&choice, &manifest, &effects), Err(EmitError::PinContradicted { .. })));
        choice.files.insert(FileKind::Graph, "../../etc/passwd".to_owned());
        let error = tuned_env(&choice, &fixtures::manifest(), &effects).unwrap_err();
        assert!(matches!(error, EmitError::FileName { .. }), "{error}");
    }

    #[test]
    fn records_of_two_runs_are_refused() {
        let mut choice = fixtures::adopt();
        choice.fingerprint = "0123456789abcdef".to_owned();
        let error = tuned_env(&choice, &fixtures::manifest(), &effects).unwrap_err();
        assert_eq!(
            error.to_string(),
            "choice.json and manifest.json are not of one run: machine fingerprints 0123456789ab... and 3f2a9c5be1d0..."
        );
    }

    #[test]
    fn a_pin_is_never_contradicted_and_never_forgotten() {
        let mut manifest = fixtures::manifest();
        manifest.pins.push(fixtures::pinned("NCCL_PROTO", "Simple"));
        let error = tuned_env(&fixtures::adopt(), &manifest, &effects).unwrap_err();
        assert!(matches!(error, EmitError::PinContradicted { .. }), "{error:?}");

        let mut manifest = fixtures::manifest();
        manifest.pins.push(fixtures::pinned("NCCL_IB_DISABLE", "1"));
        let text = tuned_env(&fixtures::adopt(), &manifest, &effects).unwrap();
        assert!(text.ends_with("# NCCL_IB_DISABLE (pinned by the user)\nNCCL_IB_DISABLE=1\n"), "{text}");
    }

    #[test]
    fn numbers_that_nccl_misreads_are_refused() {
        for value in ["4M", "0100", "1e6", "0x10", "16KiB", "-010"] {
            let mut choice = fixtures::adopt();
            choice.env.insert("NCCL_BUFFSIZE".to_owned(), value.to_owned());
            let error = tuned_env(&choice, &fixtures::manifest(), &effects).unwrap_err();
            assert!(matches!(error, EmitError::NotPlainDecimal { .. }), "{value}: {error:?}");
        }
        for value in ["4194304", "0", "-2", "LL", "^LL128", "/opt/0100/libnccl.so", "=mlx5_0:1", "2.28"] {
            assert!(!misread_as_number(value), "{value}");
        }
    }

    #[test]
    fn what_takes_something_from_other_collectives_is_refused_where_it_cannot_be_said_of_one() {
        let mut manifest = fixtures::manifest();
        assert!(tuned_env(&fixtures::adopt(), &manifest, &effects).is_ok(), "NCCL_PROTO=LL on a newer release");
        let old = manifest.nccl.as_mut().expect("a library");
        old.version = 22_304;
        let error = tuned_env(&fixtures::adopt(), &manifest, &effects).unwrap_err();
        assert!(matches!(error, EmitError::HarmsOthers { .. }), "{error:?}");
        assert!(error.to_string().starts_with("NCCL_PROTO=LL cannot be emitted: NCCL 2.23.4 has no lists"), "{error}");
        // What the user pinned held in every measurement, and is the user's own business.
        manifest.pins.push(fixtures::pinned("NCCL_PROTO", "LL"));
        assert!(tuned_env(&fixtures::adopt(), &manifest, &effects).is_ok());
    }

    #[test]
    fn a_gate_is_told_with_what_it_checked() {
        let gated = |checks, ll128_checks, simulated| {
            let mut choice = fixtures::adopt();
            choice.gate = Some(GateRecord { arm: "a".to_owned(), checks, ll128_checks, simulated });
            tuned_env(&choice, &fixtures::manifest(), &effects).unwrap()
        };
        let told = |text: &str, words: &str| text.lines().any(|line| line.starts_with('#') && line.contains(words));
        let plain = gated(92, 0, false);
        assert!(told(&plain, "smoke gate: 92 runs") && !told(&plain, "LL128 check"), "{plain}");
        let long = gated(1112, 1020, false);
        assert!(told(&long, "smoke gate: 92 runs") && told(&long, "LL128 check: 1,020 runs"), "{long}");
        assert!(told(&gated(92, 0, true), "nothing was checked"));
        assert!(told(&gated(0, 0, false), "not recorded"));
    }

    #[test]
    fn what_only_a_shell_can_say_is_an_error_in_the_env_form() {
        let mut choice = fixtures::adopt();
        choice.env.insert("NCCL_ALGO".to_owned(), "allreduce:tree;broadcast:ring".to_owned());
        let error = tuned_env(&choice, &fixtures::manifest(), &effects).unwrap_err();
        assert!(error.hint().is_some(), "{error}");
        let text = tuned_sh(&choice, &fixtures::manifest(), &effects).unwrap();
        assert!(text.contains("export NCCL_ALGO='allreduce:tree;broadcast:ring'\n"));
    }

    #[test]
    fn hostile_names_stay_in_their_comment() {
        let mut manifest = fixtures::manifest();
        manifest.workload.model = "model\nLD_PRELOAD=/tmp/evil.so\n\\".to_owned();
        manifest.machine.name = "ends in a backslash \\".to_owned();
        let hostile = |_: &str| Some("does\nLD_PRELOAD=/tmp/evil.so \\".to_owned());
        let mut choice = fixtures::adopt();
        choice.reason = "because\r\nLD_PRELOAD=/tmp/evil.so".to_owned();
        for choice in [choice, fixtures::undecided()] {
            let text = tuned_env(&choice, &manifest, &hostile).unwrap();
            let names: Vec<String> = values(&text).into_iter().map(|(name, _)| name).collect();
            assert!(names.iter().all(|name| name.starts_with("NCCL_")), "{text}");
        }
    }

    #[test]
    fn the_env_file_of_every_fixture_reads_back_with_its_header() {
        let manifest = fixtures::manifest();
        for choice in [fixtures::adopt(), fixtures::keep_default(), fixtures::undecided()] {
            for form in EmitAs::ALL {
                let text = render(&choice, &manifest, Path::new(RUN), form, &effects).unwrap();
                let header = read_header(&text);
                assert_eq!(header.tool_version.as_deref(), Some("0.1.0"));
                assert_eq!(header.fingerprint.as_deref(), Some(choice.fingerprint.as_str()));
                assert_eq!(header.verdict.as_deref(), Some(choice.verdict.name()));
                assert_eq!(header.labels, [] as [&str; 0]);
                assert_eq!(header.conditions.len(), 3);
            }
        }
        let (choice, manifest) = fixtures::simulated(fixtures::adopt());
        assert!(read_header(&tuned_env(&choice, &manifest, &effects).unwrap()).simulated());
        assert_eq!(read_header("NCCL_PROTO=LL\n"), Header::default());
    }
}
