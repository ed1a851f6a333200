//! The catalogue of NCCL variables, and the single place that knows what NCCL makes of a text.
//!
//! NCCL hardly ever complains about its environment: "4M" is 4, "sys" is ignored, a misspelt name is
//! never read. Everything that looks at a value asks [`read_as_nccl`]; everything that writes one
//! asks [`canonical_value`].

mod call;
mod canonical_value;
mod catalogue;
mod lists;
mod numbers;
mod others;
mod reading;

use crate::machine::NcclVersion;

pub use call::{CALL_RIVALS, CALL_VARIABLES, CallCell, CallForm};
pub use canonical_value::{ValueError, canonical_value};
pub use lists::Lists;
pub use reading::{Problem, ReadValue, Reading, Severity, harm_to_others, read_as_nccl};

/// One NCCL variable.
#[derive(Debug)]
pub struct Knob {
    /// Its name, `NCCL_` included.
    pub name: &'static str,
    /// The values worth writing; NCCL accepts more than makes sense.
    pub values: Values,
    /// What NCCL does where the variable is not set, in words.
    pub default: &'static str,
    /// The first release that reads it; 2.0.0 stands for "older than anything this tool runs on".
    pub since: NcclVersion,
    /// The last release that reads it, where it was removed.
    pub until: Option<NcclVersion>,
    /// Ways to set it; several may be open in one release. [`Knob::routes`] picks those of a release.
    all_routes: &'static [Route],
    /// What it does: one sentence, fit for a comment above the variable in an env file.
    pub effect: &'static str,
}

/// The values that make sense for a variable.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Values {
    /// 0 or 1.
    Switch,
    /// One of a few integers.
    OneOf(&'static [i64]),
    /// An integer in a range, both ends included.
    Integer {
        /// Smallest.
        min: i64,
        /// Largest.
        max: i64,
    },
    /// An integer in a range that is a multiple of a step, such as threads in whole warps.
    Multiple {
        /// The step.
        of: i64,
        /// Smallest.
        min: i64,
        /// Largest.
        max: i64,
    },
    /// A number of bytes.
    Bytes {
        /// Smallest.
        min: u64,
        /// Largest.
        max: u64,
        /// What it must be a multiple of; none: a power of two.
        multiple_of: Option<u64>,
    },
    /// One of a few words.
    Words(&'static [&'static str]),
    /// Algorithms, for all collectives or for each.
    Algorithms,
    /// Protocols, for all collectives or for each.
    Protocols,
    /// Six thread thresholds: tree LL, LL128, Simple, then ring LL, LL128, Simple.
    Thresholds,
    /// How far apart two GPUs may be and still use peer access.
    PathLevel,
    /// The path of a file.
    File,
    /// Free text, such as a plugin's name.
    Text,
}

impl Values {
    /// What may be written, in words.
    pub fn describe(self) -> String {
        match self {
            Self::Switch => "0 or 1".to_owned(),
            Self::OneOf(choices) => {
                format!("one of {}", choices.iter().map(i64::to_string).collect::<Vec<_>>().join(", "))
            }
            Self::Integer { min, max } => format!("an integer from {min} to {max}"),
            Self::Multiple { of, min, max } => format!("a multiple of {of} from {min} to {max}"),
            Self::Bytes { min, max, multiple_of: None } => {
                format!("a power of two from {min} to {max} bytes")
            }
            Self::Bytes { min, max, multiple_of: Some(step) } => {
                format!("a multiple of {step} from {min} to {max} bytes")
            }
            Self::Words(words) => format!("one of {}", words.join(", ")),
            Self::Algorithms => "algorithms such as Ring,Tree or allreduce:Ring".to_owned(),
            Self::Protocols => "protocols such as LL,Simple or allreduce:LL".to_owned(),
            Self::Thresholds => "up to six integers such as 8+8+64+2+8+64, where -1 keeps the default".to_owned(),
            Self::PathLevel => format!("one of {}", reading::LEVELS.join(", ")),
            Self::File => "the path of a file, without blanks".to_owned(),
            Self::Text => "a word without blanks".to_owned(),
        }
    }

    /// Whether a size suffix makes sense in a file that people write.
    pub const fn is_bytes(self) -> bool {
        matches!(self, Self::Bytes { .. })
    }

    const fn is_integer(self) -> bool {
        matches!(
            self,
            Self::Switch | Self::OneOf(_) | Self::Integer { .. } | Self::Multiple { .. } | Self::Bytes { .. }
        )
    }
}

/// What may go wrong with a value although NCCL reads it as meant.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Risk {
    /// Nothing known.
    None,
    /// LL128 needs 128-byte stores that arrive whole: NCCL itself enables it only where it knows the
    /// link, and naming it switches that check off. Elsewhere data may be corrupted silently.
    UnverifiedPlatform,
    /// Right only where captured and uncaptured collectives of a communicator never overlap.
    UnsafeMixing,
    /// May hang, or deliver wrong data, where the hardware does not keep the promise it relies on.
    HangProne,
}

impl Risk {
    /// The name in files and tables.
    pub const fn name(self) -> &'static str {
        match self {
            Self::None => "none",
            Self::UnverifiedPlatform => "unverified-platform",
            Self::UnsafeMixing => "unsafe-mixing",
            Self::HangProne => "hang-prone",
        }
    }
}

/// What a change of a variable costs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Level {
    /// Nothing but a new decision at the next call.
    Call,
    /// A new communicator in the same processes.
    Communicator,
    /// Fresh processes.
    Launch,
}

/// How a variable, or its equal, can be set.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Way {
    /// In the environment the process starts with. NCCL reads most variables once per process.
    LaunchEnvironment,
    /// In the environment while no communicator is alive: the next one reads it anew.
    CommunicatorEnvironment,
    /// As this field of `ncclConfig_t`. A variable in the environment wins over it.
    ConfigField(&'static str),
    /// By a tuner plugin, at every call.
    TunerPlugin,
}

/// How one can tell from NCCL's log that a setting was read.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Proof {
    /// "NAME set by environment to VALUE", with the value of [`Reading::logged`].
    SetByEnvironment,
    /// A line that contains this text.
    Line(&'static str),
    /// NCCL logs nothing: only the effect shows it.
    None,
}

/// A way to set a variable, with the releases in which it is open.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Route {
    /// First release.
    pub since: NcclVersion,
    /// Last release, where it was closed again.
    pub until: Option<NcclVersion>,
    /// How.
    pub way: Way,
    /// How its reading is proven.
    pub proof: Proof,
}

impl Route {
    /// What a change by this route costs.
    pub const fn level(&self) -> Level {
        match self.way {
            Way::LaunchEnvironment => Level::Launch,
            Way::CommunicatorEnvironment | Way::ConfigField(_) => Level::Communicator,
            Way::TunerPlugin => Level::Call,
        }
    }
}

impl Knob {
    /// Whether this release reads the variable.
    pub fn is_read_by(&self, version: NcclVersion) -> bool {
        version >= self.since && self.until.is_none_or(|last| version <= last)
    }

    /// The routes open in this release; none where it does not read the variable.
    pub fn routes(&self, version: NcclVersion) -> impl Iterator<Item = &'static Route> {
        let read = self.is_read_by(version);
        self.all_routes
            .iter()
            .filter(move |route| read && version >= route.since && route.until.is_none_or(|last| version <= last))
    }

    /// What a change costs by the cheapest route of this release. A tuner plugin does not count: its
    /// table is a file of the arm, not a value of the variable. Where the release does not read the
    /// variable at all, the answer is the dearest.
    pub fn level(&self, version: NcclVersion) -> Level {
        self.routes(version).map(Route::level).filter(|level| *level != Level::Call).min().unwrap_or(Level::Launch)
    }

    /// The risk that comes with a value, in whichever release reads it.
    pub fn risk_of(&self, value: &str) -> Risk {
        let integer = numbers::strtoll(value).value;
        match self.name {
            "NCCL_PROTO" if lists::enables(self.values, value, "LL128") => Risk::UnverifiedPlatform,
            "NCCL_GRAPH_MIXING_SUPPORT" | "NCCL_GRAPH_STREAM_ORDERING" if !value.is_empty() && integer == Some(0) => {
                Risk::UnsafeMixing
            }
            "NCCL_P2P_LEVEL" if reading::level_reaches_over_host_bridge(value) => Risk::HangProne,
            "NCCL_IGNORE_DISABLED_P2P" if integer == Some(2) => Risk::HangProne,
            // Kernels of all ranks on a GPU must be resident at once.
            "NCCL_MULTI_RANK_GPU_ENABLE" if !matches!(integer, None | Some(0)) => Risk::HangProne,
            _ => match (self.values, integer) {
                (Values::Bytes { .. }, Some(bytes))
                    if !value.is_empty() && reading::buffer_size_danger(self, bytes).is_some() =>
                {
                    Risk::HangProne
                }
                _ => Risk::None,
            },
        }
    }
}

/// The variable of this name. Names are case-sensitive, as they are to NCCL.
pub fn find(name: &str) -> Option<&'static Knob> {
    all().iter().find(|knob| knob.name == name)
}

/// Whether a variable decides over which path two GPUs exchange messages. Where one value hangs, others
/// that need the same path will.
pub fn changes_transport(name: &str) -> bool {
    const NAMES: [&str; 12] = [
        "NCCL_P2P_LEVEL",
        "NCCL_P2P_DISABLE",
        "NCCL_P2P_DIRECT_DISABLE",
        "NCCL_P2P_USE_CUDA_MEMCPY",
        "NCCL_P2P_READ_ENABLE",
        "NCCL_IGNORE_DISABLED_P2P",
        "NCCL_SHM_DISABLE",
        "NCCL_SHM_LOCALITY",
        "NCCL_SHM_USE_CUDA_MEMCPY",
        "NCCL_CUMEM_ENABLE",
        "NCCL_CUMEM_HOST_ENABLE",
        "NCCL_NET",
    ];
    NAMES.contains(&name)
}

/// Whether a setting makes NCCL use peer access across the host bridge, where it would not by itself.
pub fn needs_peer_access(name: &str, value: &str) -> bool {
    name == "NCCL_P2P_LEVEL" && reading::level_reaches_over_host_bridge(value)
}

/// The whole catalogue.
pub fn all() -> &'static [Knob] {
    catalogue::KNOBS
}

/// Every name NCCL is known to read, described here or not: the candidates when a name looks misspelt.
pub fn names() -> impl Iterator<Item = &'static str> {
    all().iter().map(|knob| knob.name).chain(others::names())
}

/// The texts of every [`Proof::Line`]: what a reader of NCCL's log has to keep.
pub fn proof_lines() -> impl Iterator<Item = &'static str> {
    all().iter().flat_map(|knob| knob.all_routes).filter_map(|route| match route.proof {
        Proof::Line(text) => Some(text),
        Proof::SetByEnvironment | Proof::None => None,
    })
}

/// Whether a value of NCCL_PROTO lets NCCL run a collective, by the name it has in NCCL's log, with LL128.
pub fn opens_ll128(text: &str, version: NcclVersion, collective: &str) -> bool {
    match read_as_nccl("NCCL_PROTO", text, version).value {
        ReadValue::Lists(lists) => lists.selected_for(collective).is_some_and(|words| words.contains(&"LL128")),
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn names_are_unique_and_well_formed() {
        let mut seen = BTreeSet::new();
        for name in names() {
            assert!(seen.insert(name), "{name} stands twice");
            assert!(name.starts_with("NCCL_"), "{name}");
        }
        assert!(all().len() >= 45);
        assert!(seen.len() >= 250);
    }

    #[test]
    fn every_entry_tells_its_effect_in_one_sentence() {
        for knob in all() {
            assert!(knob.effect.ends_with('.') && !knob.effect.trim_end_matches('.').contains(". "), "{}", knob.name);
            assert!(knob.effect.len() > 20 && !knob.effect.contains('\n'), "{}", knob.name);
            assert!(!knob.default.is_empty(), "{}", knob.name);
        }
    }

    #[test]
    fn every_entry_can_be_set_at_launch_in_each_release_that_reads_it() {
        for knob in all() {
            for minor in 16..=32 {
                let version = NcclVersion::v2(minor, 9);
                let at_launch = knob.routes(version).any(|route| route.way == Way::LaunchEnvironment);
                assert_eq!(at_launch, knob.is_read_by(version), "{} in {version}", knob.name);
            }
        }
    }

    #[test]
    fn levels_follow_the_routes() {
        let version = NcclVersion::v2(28, 9);
        let level = |name| find(name).map(|knob: &Knob| knob.level(version));
        for name in [
            "NCCL_ALGO",
            "NCCL_PROTO",
            "NCCL_THREAD_THRESHOLDS",
            "NCCL_GRAPH_FILE",
            "NCCL_TOPO_FILE",
            "NCCL_MIN_CTAS",
            "NCCL_MIN_NCHANNELS",
            "NCCL_CGA_CLUSTER_SIZE",
        ] {
            assert_eq!(level(name), Some(Level::Communicator), "{name}");
        }
        for name in ["NCCL_P2P_LEVEL", "NCCL_NTHREADS", "NCCL_BUFFSIZE", "NCCL_GRAPH_MIXING_SUPPORT"] {
            assert_eq!(level(name), Some(Level::Launch), "{name}");
        }
        let mixing = find("NCCL_GRAPH_MIXING_SUPPORT").unwrap();
        assert_eq!(mixing.level(NcclVersion::v2(29, 2)), Level::Communicator);
        let removed = find("NCCL_SHM_USE_CUDA_MEMCPY").unwrap();
        assert_eq!(removed.routes(NcclVersion::v2(30, 7)).count(), 0);
    }

    #[test]
    fn risks_follow_the_value() {
        let cases = [
            ("NCCL_PROTO", "LL", Risk::None),
            ("NCCL_PROTO", "LL,Simple", Risk::None),
            ("NCCL_PROTO", "ll128", Risk::UnverifiedPlatform),
            ("NCCL_PROTO", "LL,LL128,Simple", Risk::UnverifiedPlatform),
            ("NCCL_PROTO", "allreduce:LL128", Risk::UnverifiedPlatform),
            // Everything but LL includes LL128, and counts as naming it.
            ("NCCL_PROTO", "^LL", Risk::UnverifiedPlatform),
            ("NCCL_PROTO", "^LL128", Risk::None),
            ("NCCL_PROTO", "^LL128;allreduce:LL128", Risk::UnverifiedPlatform),
            ("NCCL_PROTO", "", Risk::None),
            ("NCCL_GRAPH_MIXING_SUPPORT", "0", Risk::UnsafeMixing),
            ("NCCL_GRAPH_MIXING_SUPPORT", "off", Risk::UnsafeMixing),
            ("NCCL_GRAPH_MIXING_SUPPORT", "1", Risk::None),
            ("NCCL_GRAPH_MIXING_SUPPORT", "", Risk::None),
            ("NCCL_P2P_LEVEL", "SYS", Risk::HangProne),
            ("NCCL_P2P_LEVEL", "PHB", Risk::HangProne),
            ("NCCL_P2P_LEVEL", "3", Risk::HangProne),
            ("NCCL_P2P_LEVEL", "2", Risk::None),
            ("NCCL_P2P_LEVEL", "PXB", Risk::None),
            ("NCCL_P2P_LEVEL", "NVL", Risk::None),
            ("NCCL_P2P_LEVEL", "sys", Risk::None),
            ("NCCL_IGNORE_DISABLED_P2P", "2", Risk::HangProne),
            ("NCCL_IGNORE_DISABLED_P2P", "1", Risk::None),
            ("NCCL_BUFFSIZE", "1000", Risk::HangProne),
            ("NCCL_BUFFSIZE", "4M", Risk::HangProne),
            ("NCCL_BUFFSIZE", "8388608", Risk::None),
            ("NCCL_BUFFSIZE", "", Risk::None),
            ("NCCL_ALGO", "Ring", Risk::None),
        ];
        for (name, value, risk) in cases {
            assert_eq!(find(name).unwrap().risk_of(value), risk, "{name}={value}");
        }
    }
}
