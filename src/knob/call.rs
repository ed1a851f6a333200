//! What of an environment a tuner plugin can say in its place, call by call.
//!
//! Only where both provably run the same: lists that leave one algorithm and one protocol, of those that every
//! communicator has, and channels as NCCL counts them. LL128 is not among them: to name it in the environment
//! switches NCCL's own check of the link off, which a plugin cannot and must not do.

use std::collections::BTreeMap;

use super::{Lists, ReadValue, Way, find, read_as_nccl};
use crate::machine::NcclVersion;

/// The variables that a plugin's choice can stand for.
pub const CALL_VARIABLES: [&str; 4] = ["NCCL_ALGO", "NCCL_PROTO", "NCCL_MIN_NCHANNELS", "NCCL_MAX_NCHANNELS"];
/// Variables beside which none of them means what it means alone: they count the same channels, or bring a plugin.
pub const CALL_RIVALS: [&str; 6] = [
    "NCCL_MIN_NRINGS",
    "NCCL_MAX_NRINGS",
    "NCCL_MIN_CTAS",
    "NCCL_MAX_CTAS",
    "NCCL_TUNER_PLUGIN",
    "NCCL_TUNER_CONFIG_FILE",
];
/// Algorithms that every communicator on one machine has, with their numbers in NCCL.
const ALGORITHMS: [(&str, u32); 2] = [("Tree", 0), ("Ring", 1)];
/// Protocols likewise.
const PROTOCOLS: [(&str, u32); 2] = [("LL", 0), ("Simple", 2)];

/// One algorithm with one protocol.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct CallCell {
    /// Algorithm by NCCL's number.
    pub algorithm: u32,
    /// Protocol by NCCL's number.
    pub protocol: u32,
}

/// What a plugin says in place of an arm's variables.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CallForm {
    algorithms: Option<Lists>,
    protocols: Option<Lists>,
    /// Channels that the arm's communicator has at least.
    pub channels_min: Option<u32>,
    /// Channels that it has at most, unless it has at least more.
    pub channels_max: Option<u32>,
}

impl CallForm {
    /// The form of what an arm sets, if this release asks a plugin and there is anything to say. Whether it holds at
    /// a collective is told by [`CallForm::cell`].
    pub fn of(variables: &BTreeMap<String, String>, version: NcclVersion) -> Option<Self> {
        let is_asked = find("NCCL_ALGO")?.routes(version).any(|route| route.way == Way::TunerPlugin);
        let has_rival = CALL_RIVALS.iter().any(|name| variables.contains_key(*name));
        if !is_asked || has_rival || !CALL_VARIABLES.iter().any(|name| variables.contains_key(*name)) {
            return None;
        }
        let read = |name: &str| {
            let reading = read_as_nccl(name, variables.get(name)?, version);
            // What NCCL reads otherwise than it is written is tried as it is.
            Some((reading.misread.is_none() && reading.error.is_none()).then_some(reading.value))
        };
        let lists = |name: &str| match read(name) {
            None => Some(None),
            Some(Some(ReadValue::Lists(lists))) => Some(Some(lists)),
            Some(_) => None,
        };
        let channels = |name: &str| match read(name) {
            None => Some(None),
            // Up to 2.24 a communicator had 32 at most.
            Some(Some(ReadValue::Integer(channels))) => {
                let most = if version < NcclVersion::v2(25, 0) { 32 } else { 64 };
                u32::try_from(channels.clamp(1, most)).ok().map(Some)
            }
            Some(_) => None,
        };
        Some(Self {
            algorithms: lists("NCCL_ALGO")?,
            protocols: lists("NCCL_PROTO")?,
            channels_min: channels("NCCL_MIN_NCHANNELS")?,
            channels_max: channels("NCCL_MAX_NCHANNELS")?,
        })
    }

    /// What runs of a collective: one algorithm with one protocol, or NCCL's own choice where the lists say nothing
    /// of it. None where the lists leave more than one, or what a plugin must not open.
    pub fn cell(&self, function: &str) -> Option<Option<CallCell>> {
        let selected = |lists: &Option<Lists>| -> Option<Vec<&'static str>> {
            lists.as_ref()?.selected_for(function).map(<[_]>::to_vec)
        };
        let only = |words: &[&str], known: &[(&str, u32)]| {
            let [word] = words else { return None };
            known.iter().find(|(name, _)| name == word).map(|(_, number)| *number)
        };
        match (selected(&self.algorithms), selected(&self.protocols)) {
            (None, None) => Some(None),
            (Some(algorithms), Some(protocols)) => Some(Some(CallCell {
                algorithm: only(&algorithms, &ALGORITHMS)?,
                protocol: only(&protocols, &PROTOCOLS)?,
            })),
            _ => None,
        }
    }

    /// Whether it says anything about channels.
    pub const fn sets_channels(&self) -> bool {
        self.channels_min.is_some() || self.channels_max.is_some()
    }

    /// Channels that the arm's own communicator would have, where NCCL finds so many by itself: the most caps what
    /// was found, and the least wins over the most.
    pub fn channels(&self, found: u32) -> u32 {
        let capped = self.channels_max.map_or(found, |most| found.min(most));
        self.channels_min.map_or(capped, |least| capped.max(least))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn form(variables: &[(&str, &str)]) -> Option<CallForm> {
        let variables = variables.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect();
        CallForm::of(&variables, NcclVersion::v2(28, 9))
    }

    /// Algorithm and protocol, or nothing where NCCL's own choice stands.
    fn cell(variables: &[(&str, &str)], function: &str) -> Option<Vec<u32>> {
        let cell = form(variables)?.cell(function)?;
        Some(cell.map(|cell| vec![cell.algorithm, cell.protocol]).unwrap_or_default())
    }

    #[test]
    fn one_algorithm_and_one_protocol_are_what_a_plugin_can_say() {
        let both = |algo, proto| cell(&[("NCCL_ALGO", algo), ("NCCL_PROTO", proto)], "AllReduce");
        assert_eq!(both("Ring", "LL"), Some(vec![1, 0]));
        assert_eq!(both("allreduce:Tree", "allreduce:Simple"), Some(vec![0, 2]));
        assert_eq!(both("^Ring,NVLS,NVLSTree,CollNetDirect,CollNetChain,PAT", "^LL128,Simple"), Some(vec![0, 0]));
        // More than one, what a plugin must not open, and what not every communicator has.
        for (algo, proto) in [("Ring,Tree", "LL"), ("Ring", "LL,Simple"), ("Ring", "LL128"), ("NVLS", "Simple")] {
            assert_eq!(both(algo, proto), None, "{algo} {proto}");
        }
        // One list alone leaves the other to NCCL's arithmetic.
        assert_eq!(cell(&[("NCCL_PROTO", "LL")], "AllReduce"), None);
        assert_eq!(cell(&[("NCCL_ALGO", "Ring"), ("NCCL_PROTO", "allgather:LL")], "AllReduce"), None);
    }

    #[test]
    fn other_collectives_are_nccls_own_unless_the_lists_speak_of_them() {
        let only = [("NCCL_ALGO", "allreduce:Ring"), ("NCCL_PROTO", "allreduce:LL")];
        assert_eq!(cell(&only, "AllGather"), Some(Vec::new()));
        assert_eq!(cell(&[("NCCL_ALGO", "Ring"), ("NCCL_PROTO", "LL")], "AllGather"), Some(vec![1, 0]));
        assert_eq!(cell(&[("NCCL_ALGO", "Ring"), ("NCCL_PROTO", "allreduce:LL")], "AllGather"), None);
        assert_eq!(cell(&[("NCCL_MIN_NCHANNELS", "8")], "AllReduce"), Some(Vec::new()));
    }

    #[test]
    fn what_is_not_read_as_meant_or_counts_the_same_twice_is_left_alone() {
        assert_eq!(form(&[]), None, "the default has a communicator of its own");
        assert_eq!(form(&[("NCCL_NTHREADS", "256")]), None);
        assert_eq!(form(&[("NCCL_ALGO", "Rong"), ("NCCL_PROTO", "LL")]), None);
        assert_eq!(form(&[("NCCL_MIN_NCHANNELS", "eight")]), None);
        for rival in CALL_RIVALS {
            assert_eq!(form(&[("NCCL_MIN_NCHANNELS", "8"), (rival, "4")]), None, "{rival}");
        }
        let old = BTreeMap::from([("NCCL_MIN_NCHANNELS".to_owned(), "8".to_owned())]);
        assert_eq!(CallForm::of(&old, NcclVersion::v2(20, 5)), None, "no release before asks a plugin so");
    }

    #[test]
    fn channels_are_counted_as_nccl_counts_them() {
        let channels = |variables: &[(&str, &str)], found| form(variables).unwrap().channels(found);
        let (least, most) = ("NCCL_MIN_NCHANNELS", "NCCL_MAX_NCHANNELS");
        assert_eq!(channels(&[(least, "8"), (most, "8")], 4), 8);
        assert_eq!(channels(&[(least, "8"), (most, "8")], 16), 8);
        // The least alone does not take any away, and the most alone adds none.
        assert_eq!((channels(&[(least, "8")], 16), channels(&[(least, "8")], 4)), (16, 8));
        assert_eq!((channels(&[(most, "8")], 16), channels(&[(most, "8")], 4)), (8, 4));
        assert_eq!(channels(&[(least, "16"), (most, "8")], 4), 16, "the least wins");
        assert_eq!(channels(&[("NCCL_ALGO", "Ring"), ("NCCL_PROTO", "LL")], 4), 4);
        // Up to 2.24 NCCL makes 32 of it, and what it reads otherwise than it is written is left alone.
        let many = BTreeMap::from([(least.to_owned(), "64".to_owned())]);
        let of = |minor| CallForm::of(&many, NcclVersion::v2(minor, 3)).map(|form| form.channels(4));
        assert_eq!((of(24), of(25)), (None, Some(64)));
    }
}
