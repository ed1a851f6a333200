//! `nccltune exec --verify`: have the processes that run what the file sets?
//!
//! What a process set for itself after it began is in no file of the kernel; what it was started with is.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use super::library_hash;
use crate::error_kind::{ErrorKind, Failure};
use crate::file_kind::PLUGIN_VARIABLE;
use crate::flow::deployed::Deployed;
use crate::process_tree::{DELETED, Environment, Process, tree_of, with_nccl};
use crate::record::{DeployedProcess, DeploymentCheck, DeploymentVerdict, FORMAT, LackingVariable};
use crate::wording::{plural, printable};

/// Characters of a process's name that are kept.
const NAME_CHARACTERS: usize = 120;

/// What the user asked for.
#[derive(Debug, Clone, Default)]
pub struct VerifyRequest {
    /// The file.
    pub env_file: PathBuf,
    /// The first process of the server; every process with an NCCL without.
    pub process_id: Option<u32>,
    /// Where /proc is read.
    pub root: PathBuf,
}

/// Looks at the processes.
pub fn verify(request: &VerifyRequest) -> Result<DeploymentCheck, Failure> {
    let file = Deployed::read(&request.env_file)?;
    let processes = match request.process_id {
        Some(id) => tree_of(&request.root, id)
            .ok_or_else(|| Failure::new(ErrorKind::Usage, format!("there is no process {id}")))?,
        None => with_nccl(&request.root),
    };
    let mut hashes = BTreeMap::new();
    let seen: Vec<(DeployedProcess, DeploymentVerdict)> =
        processes.iter().map(|process| look(&file, process, &request.root, &mut hashes)).collect();
    let with_nccl =
        seen.iter().filter(|(process, _)| process.nccl.as_ref().is_some_and(|nccl| !nccl.is_empty())).count();
    let count = |verdict: DeploymentVerdict| seen.iter().filter(|(_, known)| *known == verdict).count() as u32;
    let (lacking, unknown) = (count(DeploymentVerdict::Lacking), count(DeploymentVerdict::Unknown));
    let (verdict, reason) = if lacking > 0 {
        let who = plural(lacking, "process lacks", "processes lack");
        (DeploymentVerdict::Lacking, format!("{lacking} {who} what the file sets, or the library it was measured with"))
    } else if unknown > 0 {
        let who = plural(unknown, "process does", "processes do");
        (DeploymentVerdict::Unknown, format!("{unknown} {who} not show what they were started with"))
    } else if with_nccl == 0 {
        let why = "no process that can be seen has a libnccl mapped: the server has not made a communicator yet, runs \
                   elsewhere, or has NCCL built in";
        (DeploymentVerdict::Unknown, why.to_owned())
    } else {
        let who = plural(with_nccl as u32, "process", "processes");
        (DeploymentVerdict::Shown, format!("{with_nccl} {who} with NCCL: each has what the file sets"))
    };
    let processes = seen.into_iter().map(|(process, _)| process).collect();
    Ok(DeploymentCheck { format: FORMAT, verdict, reason, processes })
}

/// One process, and what it means for the whole.
fn look(
    file: &Deployed,
    process: &Process,
    root: &Path,
    hashes: &mut BTreeMap<String, Option<String>>,
) -> (DeployedProcess, DeploymentVerdict) {
    let mut remarks = Vec::new();
    let lacking_in = |known: &BTreeMap<String, String>| -> Vec<LackingVariable> {
        let differs = file.variables.iter().filter(|(name, value)| known.get(name) != Some(value));
        differs
            .map(|(name, value)| LackingVariable {
                variable: name.clone(),
                expected: value.clone(),
                found: known.get(name).map(|found| printable(found, NAME_CHARACTERS)),
            })
            .collect()
    };
    let nccl: Vec<&str> = process.nccl();
    let needs = !nccl.is_empty();
    let mut verdict = DeploymentVerdict::Shown;
    let (environment, lacking) = match &process.environment {
        Environment::Read(known) => ("read", lacking_in(known)),
        Environment::Overwritten(known) => {
            // What is still there and differs is certain; what is not there may have been written over.
            let lacking: Vec<LackingVariable> =
                lacking_in(known).into_iter().filter(|lacking| lacking.found.is_some()).collect();
            if lacking_in(known).len() > lacking.len() {
                remarks.push(
                    "its environment was overwritten by its title (setproctitle, as vLLM's workers do): start the server with \
                     SPT_NOENV=1 to see it"
                        .to_owned(),
                );
                verdict = DeploymentVerdict::Unknown;
            }
            ("overwritten", lacking)
        }
        Environment::Denied => {
            remarks.push("its environment may not be read: ask as its user, or as root".to_owned());
            verdict = DeploymentVerdict::Unknown;
            ("denied", Vec::new())
        }
        Environment::Gone => {
            remarks.push("it ended meanwhile, or shows no environment".to_owned());
            verdict = DeploymentVerdict::Unknown;
            ("gone", Vec::new())
        }
    };
    if needs {
        if nccl.len() > 1 {
            remarks.push(format!("{} libnccls are mapped at once, and which one is used nobody can say", nccl.len()));
        }
        if lacking.is_empty() && nccl.len() == 1 {
            remarks.extend(wrong_library(file, process.id, nccl[0], root, hashes));
        }
        if remarks.iter().any(|remark| remark == UNREADABLE) {
            verdict = DeploymentVerdict::Unknown;
        }
        let is_wrong = !lacking.is_empty() || nccl.len() > 1 || remarks.iter().any(|remark| remark.starts_with(WRONG));
        let plugin = file.value(PLUGIN_VARIABLE).filter(|plugin| plugin.contains('/'));
        let lacks_plugin = plugin.is_some_and(|plugin| {
            process.libraries.as_ref().is_some_and(|mapped| !mapped.iter().any(|path| path == plugin))
        });
        if lacks_plugin {
            remarks.push("the tuner plugin is not mapped: NCCL did not load it, and goes on in silence".to_owned());
        }
        if is_wrong || lacks_plugin {
            verdict = DeploymentVerdict::Lacking;
        }
    } else if process.libraries.is_some() || process.environment == Environment::Gone {
        // It has no NCCL, or is no more: it needs nothing, whatever it shows.
        verdict = DeploymentVerdict::Shown;
    } else {
        remarks.push("its mappings may not be read: whether it has NCCL cannot be told".to_owned());
        verdict = DeploymentVerdict::Unknown;
    }
    let seen = DeployedProcess {
        process_id: process.id,
        parent_process_id: process.parent,
        name: printable(&process.name, NAME_CHARACTERS),
        environment: environment.to_owned(),
        lacking,
        nccl: process.libraries.as_ref().map(|_| nccl.iter().map(|path| printable(path, 500)).collect()),
        remarks,
    };
    (seen, verdict)
}

/// How a remark about another library begins.
const WRONG: &str = "another libnccl";
/// What is said of one that cannot be looked into.
const UNREADABLE: &str = "the libnccl that is mapped cannot be read, so whether it was measured cannot be told";

/// Whether the library that is mapped is the one that was measured, where that can be told.
fn wrong_library(
    file: &Deployed,
    id: u32,
    path: &str,
    root: &Path,
    hashes: &mut BTreeMap<String, Option<String>>,
) -> Option<String> {
    let measured = file.header.parts.get("nccl").and_then(|nccl| nccl.split_once(' ')).map(|(_, sha256)| sha256)?;
    if path.ends_with(DELETED) {
        return Some(format!("{WRONG}: its file was replaced while the process runs; start the server anew"));
    }
    let hash = hashes.entry(path.to_owned()).or_insert_with(|| {
        // A container's paths lead somewhere else from outside.
        let own = root.join("proc").join(id.to_string()).join("root").join(path.trim_start_matches('/'));
        library_hash(&own).or_else(|| library_hash(&root.join(path.trim_start_matches('/'))))
    });
    match hash {
        Some(hash) if hash != measured => Some(format!("{WRONG} than the one that was measured is mapped")),
        Some(_) => None,
        None => Some(UNREADABLE.to_owned()),
    }
}
