//! Files that NCCL is pointed at: which variable does it, and what such a file is called in a run.
//!
//! This is the only place that knows either. A file is named by what it holds, so that it never changes
//! under a name that somebody deployed, and so that an arm is the same wherever its run directory lies.

use serde::{Deserialize, Serialize};

/// Digits of a SHA-256.
const DIGITS: usize = 64;

/// A kind of file that a variable points at.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum FileKind {
    /// What NCCL is to believe of the machine: links, speeds, places.
    Topology,
    /// Rings and trees that NCCL takes instead of those it would search for.
    Graph,
    /// What runs for which message: read by this project's tuner plugin, which NCCL must be pointed at, too.
    TunerTable,
}

/// The variable by which NCCL finds a tuner plugin.
pub const PLUGIN_VARIABLE: &str = "NCCL_TUNER_PLUGIN";
/// The plugin's file, wherever it lies: in a run directory it stands beside the tables.
pub const PLUGIN_FILE: &str = "libnccltune_tuner.so";

impl FileKind {
    /// All kinds.
    pub const ALL: [Self; 3] = [Self::Topology, Self::Graph, Self::TunerTable];

    /// The name in records, spaces and at the beginning of a file's name.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Topology => "topology",
            Self::Graph => "graph",
            Self::TunerTable => "tuner-table",
        }
    }

    /// What it is called in a sentence.
    pub const fn words(self) -> &'static str {
        match self {
            Self::Topology => "topology file",
            Self::Graph => "graph file",
            Self::TunerTable => "tuner table",
        }
    }

    /// The variable that points at it.
    pub const fn variable(self) -> &'static str {
        match self {
            Self::Topology => "NCCL_TOPO_FILE",
            Self::Graph => "NCCL_GRAPH_FILE",
            Self::TunerTable => nccl_abi::table::FILE_VARIABLE,
        }
    }

    /// The kind of file that a variable points at.
    pub fn of_variable(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|kind| kind.variable() == name)
    }

    const fn extension(self) -> &'static str {
        match self {
            Self::Topology | Self::Graph => "xml",
            Self::TunerTable => "csv",
        }
    }

    /// The variable that must be set beside it, and the file of a run directory that it points at.
    pub const fn companion(self) -> Option<(&'static str, &'static str)> {
        match self {
            Self::Topology | Self::Graph => None,
            Self::TunerTable => Some((PLUGIN_VARIABLE, PLUGIN_FILE)),
        }
    }

    /// The name in a run directory of the file with this SHA-256.
    pub fn file_name(self, sha256: &str) -> String {
        format!("{}-{sha256}.{}", self.name(), self.extension())
    }

    /// Reads a name back: the SHA-256 of a file of this kind in a run directory.
    pub fn sha256_of(self, file_name: &str) -> Option<&str> {
        let sha256 = file_name
            .strip_prefix(self.name())?
            .strip_prefix('-')?
            .strip_suffix(self.extension())?
            .strip_suffix('.')?;
        is_sha256(sha256).then_some(sha256)
    }
}

impl std::fmt::Display for FileKind {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.pad(self.name())
    }
}

/// Whether a text is a SHA-256 as this tool writes it: nothing else ever becomes part of a path.
pub fn is_sha256(text: &str) -> bool {
    text.len() == DIGITS && text.bytes().all(|byte| byte.is_ascii_digit() || (b'a'..=b'f').contains(&byte))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::canonical::Fingerprint;
    use crate::knob;

    #[test]
    fn names_lead_to_the_hash_and_back_and_nothing_else_does() {
        let sha256 = Fingerprint::of_bytes(b"<graphs/>");
        let sha256 = sha256.as_str();
        for kind in FileKind::ALL {
            let name = kind.file_name(sha256);
            assert_eq!(kind.sha256_of(&name), Some(sha256));
            assert_eq!(FileKind::of_variable(kind.variable()), Some(kind));
            for other in [format!("x{name}"), format!("{name}x"), name.to_uppercase(), name.replace('-', "/")] {
                assert_eq!(kind.sha256_of(&other), None, "{other}");
            }
            assert!(serde_json::to_string(&kind).unwrap().contains(kind.name()));
        }
        assert_eq!(FileKind::Graph.sha256_of(&FileKind::Topology.file_name(sha256)), None);
        assert_eq!(FileKind::Graph.sha256_of("graph-..xml"), None);
    }

    #[test]
    fn every_variable_is_one_that_nccl_or_the_plugin_knows_as_a_file() {
        let table = FileKind::TunerTable;
        assert_eq!(table.file_name("0"), format!("{}0{}", nccl_abi::table::FILE_PREFIX, nccl_abi::table::FILE_SUFFIX));
        assert!(knob::find(PLUGIN_VARIABLE).is_some());
        for kind in FileKind::ALL.into_iter().filter(|kind| *kind != table) {
            let known = knob::find(kind.variable()).unwrap();
            assert!(matches!(known.values, knob::Values::File), "{}", known.name);
        }
    }
}
