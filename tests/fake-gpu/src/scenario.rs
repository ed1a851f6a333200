//! What the machine of a test is, and what goes wrong on it: `scenario.toml`.
//!
//! README.md beside this crate documents the grammar. Every key that is not known, or that does not
//! belong to the kind of fault it stands in, is an error: a test must never believe in a fault that
//! nobody reads.

use std::collections::BTreeMap;

use serde::Deserialize;

use crate::function::Function;

/// How the GPUs of a machine reach each other.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Transport {
    /// Through host memory.
    Shm,
    /// Directly.
    P2p,
    /// Directly, across the host bridge: where NCCL_P2P_LEVEL allows that, and through host memory otherwise.
    Bridge,
}

/// A machine and its faults.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Scenario {
    /// The release of NCCL that is played, as its version code.
    pub nccl_version: i32,
    /// GPUs.
    pub devices: u32,
    /// Seed of all chance.
    pub seed: u64,
    /// Memory of a GPU.
    pub memory_mib: u64,
    /// Deviation of a communicator's times from one to the next, as a share.
    pub noise: f64,
    /// How GPUs reach each other where NCCL's variables allow it.
    pub transport: Transport,
    /// NCCL finds no ring here unless a graph file names one, and takes Simple from small messages on. The
    /// GPUs are then of a kind that NCCL demands much of.
    pub misjudged: bool,
    /// The share of its bandwidth that NCCL sees of a link that was idle, in releases that ask how fast it is
    /// just now.
    pub idle_links: f64,
    /// What the GPUs' UUIDs derive from; without it the scenario's folder. Two scenarios with one
    /// name share GPUs, as far as the tool's locks are concerned.
    pub machine: Option<String>,
    /// What goes wrong.
    pub fault: Vec<Fault>,
}

impl Default for Scenario {
    fn default() -> Self {
        Self {
            nccl_version: 22_809,
            devices: 2,
            seed: 1,
            memory_mib: 16 * 1024,
            noise: 0.01,
            transport: Transport::Shm,
            misjudged: false,
            idle_links: 1.0,
            machine: None,
            fault: Vec::new(),
        }
    }
}

/// Kinds of faults.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Kind {
    /// A call returns a status.
    Error,
    /// Something never comes back.
    Hang,
    /// The process ends by a signal.
    Die,
    /// A sum is wrong in one bit.
    WrongSum,
    /// A copy between GPUs is lost.
    LostCopy,
    /// Captured and uncaptured collectives of a communicator that overlap go wrong.
    Overlap,
    /// After a process was killed its GPU keeps memory, or does not answer.
    BusyAfterKill,
    /// Questions to NVML or to the driver never come back.
    ProbeHang,
    /// Questions to NVML are not supported.
    ProbeNotSupported,
    /// Memory runs out.
    OutOfMemory,
    /// /dev/shm is too small.
    ShmFull,
    /// A variable is not read.
    IgnoredVariable,
    /// Another algorithm or protocol runs than was asked for.
    Substituted,
    /// This rank chooses otherwise than the others.
    Disagree,
    /// This rank takes longer.
    SlowRank,
    /// Times grow from launch to launch.
    Drift,
    /// Some launches are slower.
    Bimodal,
    /// NCCL logs without end.
    LogFlood,
    /// Bytes that are no text on standard output and error.
    Garbage,
    /// A worker's parent hears what is no answer.
    Frames,
}

/// When a fault strikes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Phase {
    /// A GPU is opened.
    Context,
    /// A communicator is joined.
    Init,
    /// Ranks connect, between creating shared memory and attaching to it.
    Connect,
    /// A collective is captured.
    Capture,
    /// A collective runs.
    Collective,
    /// A communicator is left.
    Destroy,
}

/// One fault: a kind, the selectors that must all hold, and what the kind takes.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Fault {
    /// What goes wrong.
    pub kind: Kind,
    /// On which rank (before there is a communicator: on which GPU); all without it.
    #[serde(default)]
    pub rank: Option<u32>,
    /// Variables that must have these values in the environment; "" is an unset one.
    #[serde(default)]
    pub when: BTreeMap<String, String>,
    /// First and last launch, counted from 1.
    #[serde(default)]
    pub launches: Option<[u64; 2]>,
    /// Messages of more bytes.
    #[serde(default)]
    pub above_bytes: Option<u64>,
    /// Collectives that run this protocol: "LL", "LL128" or "Simple".
    #[serde(default)]
    pub protocol: Option<String>,
    /// Collectives of this name, as NCCL logs it ("AllGather").
    #[serde(default)]
    pub collective: Option<String>,
    /// Only the n-th time in a process that everything else holds, counted from 1.
    #[serde(default)]
    pub at: Option<u64>,
    /// Chance that it strikes when everything else holds.
    #[serde(default)]
    pub probability: Option<f64>,
    /// When.
    #[serde(default)]
    pub phase: Option<Phase>,
    /// In which function, by its exported name.
    #[serde(default)]
    pub call: Option<String>,
    /// The status that is returned.
    #[serde(default)]
    pub code: Option<i32>,
    /// What NCCL's last error says, and its log.
    #[serde(default)]
    pub text: Option<String>,
    /// How long; for ever without it.
    #[serde(default)]
    pub seconds: Option<f64>,
    /// By how much times grow.
    #[serde(default)]
    pub factor: Option<f64>,
    /// The variable that is not read.
    #[serde(default)]
    pub variable: Option<String>,
    /// How much memory stays taken, or how much is logged.
    #[serde(default)]
    pub mebibytes: Option<u64>,
    /// The algorithm that runs: "Ring" or "Tree".
    #[serde(default)]
    pub run_algorithm: Option<String>,
    /// The protocol that runs.
    #[serde(default)]
    pub run_protocol: Option<String>,
    /// The channels that are used.
    #[serde(default)]
    pub run_channels: Option<u32>,
    /// What comes of ranks that disagree: "hang" or "wrong-data". What a worker's parent hears:
    /// "nonsense", "no-text", "other-version", or "endless", a line of a gigabyte.
    #[serde(default)]
    pub effect: Option<String>,
    /// The signal that ends the process: "KILL" (the default), "ABRT" or "SEGV".
    #[serde(default)]
    pub signal: Option<String>,
}

impl Fault {
    /// The keys that are there, but for `kind` and the selectors that every kind takes.
    fn particular_keys(&self) -> Vec<&'static str> {
        [
            ("above_bytes", self.above_bytes.is_some()),
            ("protocol", self.protocol.is_some()),
            ("collective", self.collective.is_some()),
            ("phase", self.phase.is_some()),
            ("call", self.call.is_some()),
            ("code", self.code.is_some()),
            ("text", self.text.is_some()),
            ("seconds", self.seconds.is_some()),
            ("factor", self.factor.is_some()),
            ("variable", self.variable.is_some()),
            ("mebibytes", self.mebibytes.is_some()),
            ("run_algorithm", self.run_algorithm.is_some()),
            ("run_protocol", self.run_protocol.is_some()),
            ("run_channels", self.run_channels.is_some()),
            ("effect", self.effect.is_some()),
            ("signal", self.signal.is_some()),
        ]
        .into_iter()
        .filter_map(|(name, there)| there.then_some(name))
        .collect()
    }

    /// What is wrong with it, if something is.
    fn complaint(&self) -> Option<String> {
        // Keys a kind must have, and keys it may have.
        let (must, may): (&[&str], &[&str]) = match self.kind {
            Kind::Error => (&["call", "code"], &["text"]),
            Kind::Hang => (&[], &["phase", "call", "seconds", "above_bytes", "protocol", "collective"]),
            Kind::Die => (&["phase"], &["signal", "above_bytes", "protocol", "collective"]),
            Kind::WrongSum => (&[], &["above_bytes", "protocol", "collective"]),
            Kind::BusyAfterKill => (&[], &["seconds", "mebibytes", "call"]),
            Kind::ProbeHang => (&[], &["call", "seconds"]),
            Kind::ProbeNotSupported => (&[], &["call"]),
            Kind::OutOfMemory => (&["phase"], &["above_bytes"]),
            Kind::ShmFull | Kind::Garbage | Kind::LostCopy => (&[], &[]),
            Kind::Overlap | Kind::Frames => (&["effect"], &[]),
            Kind::IgnoredVariable => (&["variable"], &[]),
            Kind::Substituted | Kind::Disagree => (
                &[],
                &["run_algorithm", "run_protocol", "run_channels", "above_bytes", "protocol", "collective", "effect"],
            ),
            Kind::SlowRank | Kind::Drift | Kind::Bimodal => (&["factor"], &["above_bytes", "protocol", "collective"]),
            Kind::LogFlood => (&[], &["mebibytes"]),
        };
        let keys = self.particular_keys();
        if let Some(key) = must.iter().find(|key| !keys.contains(key)) {
            return Some(format!("needs `{key}`"));
        }
        if let Some(key) = keys.iter().find(|key| !must.contains(key) && !may.contains(key)) {
            return Some(format!("takes no `{key}`"));
        }
        // Keys that would never be looked at, however well they are spelt.
        let is_about_a_message = self.above_bytes.is_some() || self.protocol.is_some() || self.collective.is_some();
        let selectors = [
            ("rank", self.rank.is_some()),
            ("when", !self.when.is_empty()),
            ("launches", self.launches.is_some()),
            ("at", self.at.is_some()),
            ("probability", self.probability.is_some()),
        ];
        let unread: &[&str] = match self.kind {
            Kind::BusyAfterKill => &["when", "launches", "at", "probability"],
            Kind::IgnoredVariable | Kind::SlowRank | Kind::Drift | Kind::Bimodal => &["at"],
            Kind::ProbeHang | Kind::ProbeNotSupported | Kind::Substituted => &["rank"],
            _ => &[],
        };
        if let Some((name, _)) = selectors.iter().find(|(name, there)| *there && unread.contains(name)) {
            return Some(format!("takes no `{name}`"));
        }
        match self.kind {
            Kind::Hang | Kind::Die if is_about_a_message && self.phase != Some(Phase::Collective) => {
                return Some("knows its message only in the phase collective".to_owned());
            }
            Kind::OutOfMemory if is_about_a_message && self.phase != Some(Phase::Context) => {
                return Some("knows how much is asked for only in the phase context".to_owned());
            }
            _ => {}
        }
        let known = |value: &Option<String>, words: &[&str]| {
            value.as_deref().filter(|value| !words.contains(value)).map(|value| format!("does not know {value:?}"))
        };
        let where_it_strikes = usize::from(self.phase.is_some()) + usize::from(self.call.is_some());
        match self.kind {
            Kind::Hang if where_it_strikes != 1 => return Some("needs either `phase` or `call`".to_owned()),
            Kind::BusyAfterKill if self.mebibytes.is_none() && self.call.is_none() => {
                return Some("needs `mebibytes` that stay taken, or a `call` that hangs".to_owned());
            }
            Kind::OutOfMemory if !matches!(self.phase, Some(Phase::Context | Phase::Init)) => {
                return Some("takes the phases context (cuMemAlloc) and init (NCCL)".to_owned());
            }
            Kind::Substituted | Kind::Disagree
                if self.run_algorithm.is_none() && self.run_protocol.is_none() && self.run_channels.is_none() =>
            {
                return Some("needs `run_algorithm`, `run_protocol` or `run_channels`".to_owned());
            }
            Kind::Substituted if self.effect.is_some() => return Some("takes no `effect`".to_owned()),
            Kind::Disagree | Kind::SlowRank if self.rank.is_none() => return Some("needs `rank`".to_owned()),
            _ => {}
        }
        known(&self.run_algorithm, &["Ring", "Tree"])
            .or_else(|| known(&self.run_protocol, &["LL", "LL128", "Simple"]))
            .or_else(|| known(&self.protocol, &["LL", "LL128", "Simple"]))
            .or_else(|| known(&self.collective, &Function::ALL.map(Function::name)))
            .or_else(|| match self.kind {
                Kind::Frames => known(&self.effect, &["nonsense", "no-text", "other-version", "endless"]),
                _ => known(&self.effect, &["hang", "wrong-data"]),
            })
            .or_else(|| known(&self.signal, &["KILL", "ABRT", "SEGV"]))
            .or_else(|| {
                let call = self.call.as_deref().filter(|call| !crate::exports::is_known(call));
                call.map(|call| format!("does not know {call:?}"))
            })
    }
}

impl Scenario {
    /// Reads a scenario.
    pub fn parse(text: &str) -> Result<Self, String> {
        let scenario: Self = toml::from_str(text).map_err(|error| error.to_string())?;
        if !(1..=8).contains(&scenario.devices) {
            return Err(format!("{} devices; there may be 1 to 8", scenario.devices));
        }
        if !(21_900..30_000).contains(&scenario.nccl_version) {
            return Err(format!("NCCL {}; releases from 2.19 (21900) on are played", scenario.nccl_version));
        }
        if !(scenario.idle_links > 0.0 && scenario.idle_links <= 1.0) {
            return Err(format!("idle links of {}; a share from 0 to 1", scenario.idle_links));
        }
        if !(0.0..0.5).contains(&scenario.noise) {
            return Err(format!("noise of {}; there may be 0 to 0.5", scenario.noise));
        }
        for (number, fault) in (1..).zip(&scenario.fault) {
            if let Some(complaint) = fault.complaint() {
                return Err(format!("fault {number} ({:?}) {complaint}", fault.kind));
            }
        }
        Ok(scenario)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_is_a_scenario_and_everything_can_be_said() {
        assert_eq!(Scenario::parse("").unwrap(), Scenario::default());
        let text = "nccl_version = 22304\ndevices = 8\nseed = 3\nmemory_mib = 1024\nnoise = 0.02\ntransport = \"p2p\"\n\
                    [[fault]]\nkind = \"error\"\ncall = \"ncclCommInitRank\"\ncode = 2\ntext = \"x\"\nrank = 1\n\
                    when = { NCCL_PROTO = \"LL\", NCCL_ALGO = \"\" }\nlaunches = [2, 3]\nat = 1\nprobability = 0.5\n";
        let scenario = Scenario::parse(text).unwrap();
        assert_eq!((scenario.devices, scenario.transport), (8, Transport::P2p));
        assert_eq!(scenario.fault[0].kind, Kind::Error);
        assert_eq!(scenario.fault[0].when.len(), 2);
    }

    #[test]
    fn what_nobody_would_read_is_an_error() {
        for (text, says) in [
            ("device = 2", "unknown field `device`"),
            ("devices = 9", "1 to 8"),
            ("nccl_version = 21801", "from 2.19"),
            ("noise = 0.7", "0 to 0.5"),
            ("[[fault]]\nkind = \"sulk\"", "unknown variant `sulk`"),
            ("[[fault]]\nkind = \"hang\"\nwhere = \"init\"", "unknown field `where`"),
            ("[[fault]]\nkind = \"hang\"", "either `phase` or `call`"),
            ("[[fault]]\nkind = \"hang\"\nphase = \"init\"\ncall = \"cuInit\"", "either `phase` or `call`"),
            ("[[fault]]\nkind = \"error\"\ncode = 1", "needs `call`"),
            ("[[fault]]\nkind = \"error\"\ncode = 1\ncall = \"cuSing\"", "does not know \"cuSing\""),
            ("[[fault]]\nkind = \"garbage\"\nfactor = 2.0", "takes no `factor`"),
            ("[[fault]]\nkind = \"slow-rank\"\nfactor = 2.0", "needs `rank`"),
            ("[[fault]]\nkind = \"disagree\"\nrank = 0", "needs `run_algorithm`"),
            ("[[fault]]\nkind = \"out-of-memory\"\nphase = \"destroy\"", "phases context"),
            ("[[fault]]\nkind = \"die\"\nphase = \"init\"\nprotocol = \"LL\"", "only in the phase collective"),
            ("[[fault]]\nkind = \"bimodal\"\nfactor = 2.0\nat = 3", "takes no `at`"),
            ("[[fault]]\nkind = \"busy-after-kill\"\nmebibytes = 1\nprobability = 0.5", "takes no `probability`"),
            ("[[fault]]\nkind = \"busy-after-kill\"", "needs `mebibytes`"),
            ("[[fault]]\nkind = \"wrong-sum\"\nprotocol = \"ll\"", "does not know \"ll\""),
        ] {
            let error = Scenario::parse(text).unwrap_err();
            assert!(error.contains(says), "{text}: {error}");
        }
    }
}
