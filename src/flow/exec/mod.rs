//! `nccltune exec`: starts a command with the variables of an env file, if the file belongs here.
//!
//! The question is answered from /proc and /sys within milliseconds. No GPU is asked anything: what only a driver can
//! tell is `nccltune check`'s business, and a server must not wait for it at every start.

mod verify;

pub use verify::{VerifyRequest, verify};

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use super::deployed::{Deployed, SHOWN_CHARACTERS};
use crate::canonical::Fingerprint;
use crate::discovery::quick_parts;
use crate::env_syntax::source::Consumer;
use crate::error_kind::{ErrorKind, Failure};
use crate::fingerprint::{Compared, Standing, Weight, compare, kind_of, told};
use crate::lint::{Circumstances, lint};
use crate::machine::NcclVersion;
use crate::record::LintFinding;
use crate::wording::{enumerated, printable};

/// Largest libnccl that is hashed: the largest so far has half a gigabyte.
const LIBRARY_BYTES: u64 = 4 << 30;
/// NCCL's variables that change nothing of what was measured.
const HARMLESS: [&str; 2] = ["NCCL_DEBUG", "NCCL_VERSION"];

/// What the user asked for.
#[derive(Debug, Clone, Default)]
pub struct ExecRequest {
    /// The file.
    pub env_file: PathBuf,
    /// The run it came from, where nothing beside it says so.
    pub run: Option<PathBuf>,
    /// The libnccl that the command will load, where it is not the one that was measured.
    pub nccl_lib: Option<PathBuf>,
    /// Start the command although the file is stale, foreign or simulated.
    pub force: bool,
    /// Where /proc and /sys are read.
    pub root: PathBuf,
    /// The environment the command inherits.
    pub environment: BTreeMap<String, String>,
}

/// How the command is started.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Start {
    /// What is set, whatever was inherited.
    pub set: BTreeMap<String, String>,
    /// What is taken out.
    pub removed: Vec<String>,
    /// That the file was refused and is used all the same.
    pub overridden: Option<String>,
    /// What should be known.
    pub notices: Vec<String>,
}

/// Looks at the file and at the machine, and says how the command is started.
pub fn exec(request: &ExecRequest) -> Result<Start, Failure> {
    let file = Deployed::read(&request.env_file)?;
    let run = file.run(request.run.as_deref())?;
    let before = file.parts(run.as_ref().map(|(_, manifest)| manifest));
    let now = parts_now(request, &file, &before);
    let compared = compare(&before, &now);
    let mut notices = unread(&compared);
    let mut overridden = None;
    if let Some((why, advice)) = refusal(&file, &compared) {
        let refused = format!("{} {why}", file.path.display());
        if !request.force {
            return Err(Failure::new(ErrorKind::MachineUnfit, refused)
                .with_hint(format!("{advice}; --force starts the command all the same, and says so")));
        }
        overridden = Some(format!("started with --force although {refused}"));
    }
    // No flag helps here: without these files the command would run with something nobody measured.
    file.require_files()?;
    notices.extend(informing(&compared));
    let (removed, told) = contradictions(&file, &before, &request.environment);
    notices.extend(told);
    if file.variables.is_empty() {
        notices.push(format!("{} sets no variables: the command runs with NCCL's defaults", file.path.display()));
    }
    Ok(Start { set: file.variables.into_iter().collect(), removed, overridden, notices })
}

/// The parts of this machine that can be had without a GPU, in the words of a header.
fn parts_now(request: &ExecRequest, file: &Deployed, before: &BTreeMap<String, String>) -> BTreeMap<String, String> {
    let addresses: Vec<String> =
        before.get("gpu-addresses").iter().flat_map(|all| all.split(", ")).map(str::to_owned).collect();
    let mut now: BTreeMap<String, String> = quick_parts(&request.root, &addresses)
        .into_iter()
        .map(|(name, value)| (name, told(&value)))
        .filter(|(name, _)| kind_of(name).is_some_and(|kind| kind.is_quick))
        .collect();
    // The library is known by what it holds. Where it is not where it was, nothing is said of it: the command may bring
    // its own.
    let library = request.nccl_lib.as_deref().or(file.header.nccl_path.as_deref().map(Path::new));
    if let Some(measured) = before.get("nccl")
        && let Some((version, sha256)) = measured.split_once(' ')
        && let Some(found) = library.and_then(library_hash)
    {
        let is_same = found == sha256;
        now.insert("nccl".to_owned(), if is_same { measured.clone() } else { format!("not {version} {found}") });
    }
    now
}

fn library_hash(path: &Path) -> Option<String> {
    let metadata = fs_err::metadata(path).ok()?;
    if !metadata.is_file() || metadata.len() > LIBRARY_BYTES {
        return None;
    }
    Some(Fingerprint::of_reader(fs_err::File::open(path).ok()?).ok()?.as_str().to_owned())
}

/// Why the file does not belong here, and what to do about it.
fn refusal(file: &Deployed, compared: &[Compared]) -> Option<(String, &'static str)> {
    const TUNE: &str = "run `nccltune tune` on this machine";
    let header = &file.header;
    if header.tool_version.is_none() {
        return Some((
            "is foreign: its first line is not nccltune's, so nothing tells where it was measured".to_owned(),
            "use a file that `nccltune tune` or `nccltune emit --as env` wrote",
        ));
    }
    if header.simulated() {
        return Some(("is simulated: no GPU was measured for it".to_owned(), TUNE));
    }
    let changed = |weight: Weight| -> Vec<String> {
        compared
            .iter()
            .filter(|part| part.weight == weight && part.standing == Standing::Changed)
            .map(change_in_words)
            .collect()
    };
    let foreign = changed(Weight::Machine);
    if !foreign.is_empty() {
        return Some((format!("is foreign: it was measured on another machine: {}", foreign.join("; ")), TUNE));
    }
    let is_known = |name: &str| compared.iter().any(|part| part.name == name && part.standing == Standing::Same);
    if !is_known("gpu-addresses") {
        let why = if compared.iter().any(|part| part.name == "gpu-addresses" && part.before.is_some()) {
            "is foreign: no NVIDIA driver shows its GPUs here (/proc/driver/nvidia/gpus), so nothing tells that it was \
             measured on this machine"
        } else {
            "is foreign: it does not say on which GPUs it was measured (an older version wrote it, or none were)"
        };
        return Some((
            why.to_owned(),
            "write it anew with `nccltune emit --run DIR --as env`, on the machine it was measured on",
        ));
    }
    let stale = changed(Weight::Deciding);
    (!stale.is_empty()).then(|| {
        (
            format!("is stale: {}", stale.join("; ")),
            "`nccltune check --env-file FILE` measures in two minutes whether it still holds",
        )
    })
}

/// "the driver was 580.95.05 and is 595.58.03".
pub(super) fn change_in_words(part: &Compared) -> String {
    let shown = |value: &Option<String>| match (value, part.name.as_str()) {
        // A version says more than a checksum does.
        (Some(value), "nccl") => match value.strip_prefix("not ").and_then(|rest| rest.split_once(' ')) {
            Some((version, sha256)) => {
                format!("another build or release than {version} (SHA-256 {}...)", sha256.get(..12).unwrap_or(sha256))
            }
            None => match value.split_once(' ') {
                Some((version, sha256)) => format!("{version} (SHA-256 {}...)", sha256.get(..12).unwrap_or(sha256)),
                None => value.clone(),
            },
        },
        (Some(value), _) => printable(value, SHOWN_CHARACTERS),
        (None, _) => "not known".to_owned(),
    };
    let verb = if part.words.ends_with('s') { ("were", "are") } else { ("was", "is") };
    format!("{} {} {} and {} {}", part.words, verb.0, shown(&part.before), verb.1, shown(&part.now))
}

/// What was recorded and cannot be read here without a GPU.
fn unread(compared: &[Compared]) -> Vec<String> {
    let missing: Vec<String> = compared
        .iter()
        .filter(|part| part.standing == Standing::Unread && part.weight != Weight::Informing)
        .map(|part| part.words.clone())
        .collect();
    if missing.is_empty() {
        return Vec::new();
    }
    vec![format!("not compared, because no GPU is asked here: {}; `nccltune check` compares all", enumerated(&missing))]
}

/// What changed without making the file stale.
fn informing(compared: &[Compared]) -> Vec<String> {
    let changed = compared.iter().filter(|part| part.weight == Weight::Informing);
    changed.filter(|part| part.standing == Standing::Changed).map(change_in_words).collect()
}

/// What was inherited against the file: replaced where the file sets it, taken out where it and the file exclude each
/// other, and told in any case.
fn contradictions(
    file: &Deployed,
    before: &BTreeMap<String, String>,
    environment: &BTreeMap<String, String>,
) -> (Vec<String>, Vec<String>) {
    let (mut removed, mut notices) = (Vec::new(), Vec::new());
    let shown = |text: &str| printable(text, SHOWN_CHARACTERS);
    for (name, value) in &file.variables {
        if let Some(inherited) = environment.get(name).filter(|inherited| *inherited != value) {
            notices
                .push(format!("{name}={} is inherited; the file's {name}={value} takes its place", shown(inherited)));
        }
    }
    let conditions: BTreeMap<&str, &str> =
        file.header.conditions.iter().filter_map(|condition| condition.split_once('=')).collect();
    let version = before.get("nccl").and_then(|nccl| release(nccl));
    let is_nccl = |name: &str| name.starts_with("NCCL_") && !HARMLESS.iter().any(|begin| name.starts_with(begin));
    for (name, value) in environment.iter().filter(|(name, _)| file.value(name).is_none()) {
        match conditions.get(name.as_str()) {
            Some(measured) if measured == value => {}
            Some(measured) => notices.push(format!(
                "{name}={} is inherited, and the file was measured with {name}={measured}; it stays as it is",
                shown(value)
            )),
            None if !is_nccl(name) => {}
            None => match against(file, name, value, version) {
                Some(why) => {
                    notices.push(format!("{name}={} is inherited and taken out: {why}", shown(value)));
                    removed.push(name.clone());
                }
                None => notices.push(format!(
                    "{name}={} is inherited, and was not set when the file was measured; it stays",
                    shown(value)
                )),
            },
        }
    }
    for condition in before.get("inherited-variables").iter().flat_map(|all| all.split(' ')) {
        if let Some((name, value)) = condition.split_once('=')
            && !environment.contains_key(name)
            && file.value(name).is_none()
        {
            notices.push(format!(
                "{name}={} was set outside of the file when it was measured (there or in nccl.conf), and is not inherited \
                 here",
                shown(value)
            ));
        }
    }
    (removed, notices)
}

fn release(nccl: &str) -> Option<NcclVersion> {
    let mut numbers = nccl.split(' ').next()?.split('.').map(|number| number.parse::<u32>().ok());
    match (numbers.next(), numbers.next(), numbers.next(), numbers.next()) {
        (Some(Some(major)), Some(Some(minor)), Some(Some(patch)), None) => Some(NcclVersion { major, minor, patch }),
        _ => None,
    }
}

/// What the file's variables and an inherited one do to each other, that neither does alone.
fn against(file: &Deployed, name: &str, value: &str, version: Option<NcclVersion>) -> Option<String> {
    if value.contains(['\n', '\r', '\0']) {
        return Some("its value has several lines".to_owned());
    }
    let own: Vec<String> = file.variables.iter().map(|(name, value)| format!("{name}={value}\n")).collect();
    let (own, other) = (own.concat(), format!("{name}={value}\n"));
    let circumstances = Circumstances { version: version.unwrap_or(crate::doctor::VERIFIED), engine: None };
    let findings = |text: &str| lint("", text, Consumer::DockerEnvFile, circumstances);
    let alone: Vec<LintFinding> = [findings(&own), findings(&other)].concat();
    let is_new = |finding: &LintFinding| !alone.iter().any(|known| known.message == finding.message);
    findings(&(own + &other)).into_iter().find(is_new).map(|finding| finding.message)
}
