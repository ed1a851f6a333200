//! What each variable does to NCCL's choice: the choice with all variables beside the choice without
//! this one, and why nothing changes where nothing does.

use std::collections::BTreeMap;

use super::explained;
use super::variables::{Variable, environment_of};
use crate::collective::Collective;
use crate::error_kind::{ErrorKind, Failure};
use crate::knob::{self, ReadValue, Reading};
use crate::machine::{PeerAccess, Topology};
use crate::nccl_model::{Choice, Communicator, GraphFile, ModelError, Protocol, Release, Settings};
use crate::record::{EffectKind, ExplainedEffect, ExplainedSize};
use crate::units::{format_size, format_us, group_thousands, nearest_name};
use crate::wording::plural;

/// Most variables that are told apart; each pair of them is tried.
const MOST_VARIABLES: usize = 64;
/// Powers of two among which the size is looked for at which a variable begins to act.
const SEARCHED_SIZES: std::ops::RangeInclusive<u32> = 6..=34;

/// Variables that the model leaves out although they decide what is chosen.
const LEFT_OUT: [(&str, &str); 5] = [
    ("NCCL_TOPO_FILE", "NCCL takes the machine for what the file says, and the model reads the machine itself"),
    ("NCCL_TUNER_PLUGIN", "a tuner plugin may choose otherwise, and the model does not ask it"),
    ("NCCL_NET_PLUGIN", "a network plugin may bring a tuner, and the model does not ask it"),
    ("NCCL_MULTI_RANK_GPU_ENABLE", "several ranks on a GPU are not modelled"),
    ("NCCL_HOSTID", "processes with different host ids do not take each other for neighbours, which is not modelled"),
];
/// Buffers, and the protocol that uses each.
const BUFFERS: [(&str, Protocol); 3] =
    [("NCCL_BUFFSIZE", Protocol::Simple), ("NCCL_LL_BUFFSIZE", Protocol::Ll), ("NCCL_LL128_BUFFSIZE", Protocol::Ll128)];
/// Beginnings of names that are about what is logged and watched.
const WATCHING: [&str; 8] = [
    "NCCL_DEBUG",
    "NCCL_RAS_",
    "NCCL_NVTX_",
    "NCCL_PROFILER_",
    "NCCL_INSPECTOR_",
    "NCCL_SET_THREAD_NAME",
    "NCCL_PARAM_DUMP",
    "NCCL_WARN_",
];
/// Beginnings of names that are about the network.
const NETWORK: [&str; 12] = [
    "NCCL_IB_",
    "NCCL_SOCKET_",
    "NCCL_NET",
    "NCCL_NSOCKS_",
    "NCCL_CROSS_NIC",
    "NCCL_PXN_",
    "NCCL_P2P_PXN_",
    "NCCL_COLLNET_",
    "NCCL_GDRCOPY_",
    "NCCL_OOB_",
    "NCCL_UID_",
    "NCCL_NCHANNELS_PER_NET_PEER",
];
/// Beginnings of names that are about send and receive.
const POINT_TO_POINT: [&str; 6] = [
    "NCCL_MAX_P2P_NCHANNELS",
    "NCCL_MIN_P2P_NCHANNELS",
    "NCCL_P2P_LL_THRESHOLD",
    "NCCL_P2P_NET_CHUNKSIZE",
    "NCCL_P2P_PCI_CHUNKSIZE",
    "NCCL_P2P_NVL_CHUNKSIZE",
];

/// What the model needs beside variables.
pub(super) struct Model<'a> {
    pub(super) topology: &'a Topology,
    pub(super) release: Release,
    /// What NCCL_GRAPH_FILE names.
    pub(super) graph_file: Option<&'a GraphFile>,
    pub(super) collective: Collective,
}

impl Model<'_> {
    fn communicator(&self, environment: &BTreeMap<String, String>) -> Result<Communicator, ModelError> {
        let settings = Settings::read(environment, self.release.version());
        let file = self.graph_file.filter(|_| environment.contains_key("NCCL_GRAPH_FILE"));
        Communicator::new(self.topology, &settings, self.release, file)
    }
}

/// Whether two answers are the same choice at the same price.
pub(in crate::flow) fn same(one: &Choice, other: &Choice) -> bool {
    (one.algorithm, one.protocol, one.channels, one.threads)
        == (other.algorithm, other.protocol, other.channels, other.threads)
        && (one.predicted_us - other.predicted_us).abs() <= 1e-6 * one.predicted_us.abs()
}

/// A choice in words.
fn words(choice: &Choice) -> String {
    format!(
        "{}/{} on {} {} of {} threads, {} us predicted",
        choice.algorithm,
        choice.protocol,
        choice.channels,
        plural(choice.channels, "channel", "channels"),
        choice.threads,
        format_us(choice.predicted_us)
    )
}

/// With all variables, without each, and without each two.
pub(super) struct Effects<'a> {
    model: &'a Model<'a>,
    variables: &'a [Variable],
    readings: Vec<Reading>,
    all: Communicator,
    without: Vec<Result<Communicator, ModelError>>,
    /// Of those that the model knows and NCCL reads, the lower place first.
    without_two: BTreeMap<(usize, usize), Communicator>,
}

impl<'a> Effects<'a> {
    /// Asks the model for everything that is compared.
    pub(super) fn of(model: &'a Model<'a>, variables: &'a [Variable]) -> Result<Self, Failure> {
        if variables.len() > MOST_VARIABLES {
            let told = format!("{} variables: at most {MOST_VARIABLES} are told apart", variables.len());
            return Err(Failure::new(ErrorKind::Usage, told));
        }
        let version = model.release.version();
        let readings: Vec<Reading> =
            variables.iter().map(|variable| knob::read_as_nccl(&variable.name, &variable.value, version)).collect();
        let environment = environment_of(variables);
        let all = model.communicator(&environment)?;
        let left = |out: &[usize]| {
            let mut environment = environment.clone();
            for index in out {
                environment.remove(&variables[*index].name);
            }
            model.communicator(&environment)
        };
        let without = (0..variables.len()).map(|index| left(&[index])).collect();
        let acts =
            |index: &usize| Settings::is_modelled(&variables[*index].name) && !readings[*index].is_without_effect();
        let acting: Vec<usize> = (0..variables.len()).filter(acts).collect();
        let mut without_two = BTreeMap::new();
        for (at, one) in acting.iter().enumerate() {
            for other in &acting[at + 1..] {
                if let Ok(communicator) = left(&[*one, *other]) {
                    without_two.insert((*one, *other), communicator);
                }
            }
        }
        Ok(Self { model, variables, readings, all, without, without_two })
    }

    /// The communicator with all variables.
    pub(super) const fn communicator(&self) -> &Communicator {
        &self.all
    }

    /// What each variable does to the choice for a message.
    pub(super) fn at(&self, bytes: u64) -> Vec<ExplainedEffect> {
        (0..self.variables.len())
            .map(|index| {
                let (effect, reason, without) = self.effect(index, bytes);
                let variable = self.variables[index].name.clone();
                ExplainedEffect { variable, effect, reason, without: without.as_ref().map(explained) }
            })
            .collect()
    }

    fn choose(&self, communicator: &Communicator, bytes: u64) -> Result<Choice, ModelError> {
        communicator.choose(self.model.collective, bytes)
    }

    fn effect(&self, index: usize, bytes: u64) -> (EffectKind, String, Option<Choice>) {
        let (variable, reading) = (&self.variables[index], &self.readings[index]);
        let nothing = |reason: String| (EffectKind::None, reason, None);
        match &reading.value {
            ReadValue::Unset => return nothing("an empty text is to NCCL as if it were not set".to_owned()),
            ReadValue::Ignored { reason } => return nothing(reason.clone()),
            ReadValue::NotRead { reason } => {
                let known = knob::names().any(|name| name == variable.name);
                let near = nearest_name(&variable.name, knob::names()).filter(|_| !known);
                let question = near.map(|near| format!("; did you mean {near}?"));
                return nothing(format!("{reason}{}", question.unwrap_or_default()));
            }
            _ => {}
        }
        let misread = reading.misread.as_ref().map(|misread| format!("{misread}; ")).unwrap_or_default();
        let now = self.choose(&self.all, bytes);
        if !Settings::is_modelled(&variable.name) {
            let (effect, reason) = outside(self.model.collective, &variable.name, now.as_ref().ok(), bytes);
            return (effect, format!("{misread}{reason}"), None);
        }
        let before = match &self.without[index] {
            Ok(communicator) => self.choose(communicator, bytes),
            Err(error) => {
                return (EffectKind::Changes, format!("{misread}without it NCCL does not start: {error}"), None);
            }
        };
        match (now, before) {
            (Ok(now), Ok(before)) if same(&now, &before) => {
                if let Some(moved) = self.moved(index) {
                    let reason = format!(
                        "{misread}it moves data between GPUs from {moved}; the choice and its prediction are the same, \
                         how long it takes is not"
                    );
                    return (EffectKind::TimeOnly, reason, None);
                }
                nothing(format!("{misread}{}", self.why_nothing(index, bytes, &now)))
            }
            (Ok(_), Ok(before)) => {
                (EffectKind::Changes, format!("{misread}without it {}", words(&before)), Some(before))
            }
            (Err(error), Ok(before)) => {
                let reason = format!("{misread}with it {error}; without it {}", words(&before));
                (EffectKind::Changes, reason, Some(before))
            }
            (Ok(_), Err(error)) => (EffectKind::Changes, format!("{misread}without it {error}"), None),
            (Err(error), Err(_)) => nothing(format!("{misread}with or without it {error}")),
        }
    }

    /// "SHM to P2P", where a variable changes over what some pair exchanges data.
    fn moved(&self, index: usize) -> Option<String> {
        moved(self.without[index].as_ref().ok()?, &self.all)
    }

    /// Another variable beside which this one does nothing, though it would without that one.
    fn overriding(&self, index: usize, bytes: u64) -> Option<&Variable> {
        (0..self.variables.len()).filter(|other| *other != index).find_map(|other| {
            let both = self.without_two.get(&(index.min(other), index.max(other)))?;
            let without_other = self.without[other].as_ref().ok()?;
            let acts = !same(&self.choose(without_other, bytes).ok()?, &self.choose(both, bytes).ok()?);
            (acts || moved(both, without_other).is_some()).then(|| &self.variables[other])
        })
    }

    /// The smallest power of two at which a variable changes the choice.
    fn first_change(&self, index: usize) -> Option<u64> {
        let before = self.without[index].as_ref().ok()?;
        SEARCHED_SIZES.map(|shift| 1_u64 << shift).find(|bytes| {
            match (self.choose(&self.all, *bytes), self.choose(before, *bytes)) {
                (Ok(now), Ok(before)) => !same(&now, &before),
                (now, before) => now.is_ok() != before.is_ok(),
            }
        })
    }

    /// Why a variable that NCCL reads, and that the model knows, changes nothing.
    fn why_nothing(&self, index: usize, bytes: u64, now: &Choice) -> String {
        if let Some(other) = self.overriding(index, bytes) {
            return format!("beside {}={} it changes nothing more; without that one it would", other.name, other.value);
        }
        let (all, before) = (&self.all, self.without[index].as_ref().ok());
        let before_channels = before.map_or(0, Communicator::channels);
        let size = format_size(bytes);
        let (algorithm, protocol) = (now.algorithm, now.protocol);
        let channels = |count: u32| format!("{count} {}", plural(count, "channel", "channels"));
        let name = self.variables[index].name.as_str();
        let reason = match name {
            "NCCL_ALGO" => format!("NCCL takes {algorithm} at {size} anyway"),
            "NCCL_PROTO" => format!("NCCL takes {protocol} at {size} anyway"),
            _ if is_about_channels(name) && all.channels() != before_channels => {
                let threads = u64::from(all.max_threads(algorithm, protocol));
                let each = all.threshold(algorithm, protocol).unsigned_abs() * threads;
                format!(
                    "the communicator has {} instead of {before_channels}, but the thread thresholds keep {size} on {}: \
                     NCCL takes another channel of {algorithm}/{protocol} for each {} bytes only",
                    channels(all.channels()),
                    channels(now.channels),
                    group_thousands(each)
                )
            }
            _ if is_about_channels(name) => format!("the communicator has {} anyway", channels(all.channels())),
            "NCCL_NTHREADS" if protocol == Protocol::Ll128 => {
                format!("it acts on LL and Simple, and NCCL takes LL128 at {size}")
            }
            "NCCL_NTHREADS" | "NCCL_THREAD_THRESHOLDS" => {
                format!("{size} go over {} of {} threads anyway", channels(now.channels), now.threads)
            }
            "NCCL_LL128_NTHREADS" => format!("it acts on LL128, and NCCL takes {protocol} at {size}"),
            "NCCL_NVB_DISABLE" => "no path leads over NVLink through another GPU".to_owned(),
            "NCCL_NVLS_ENABLE" | "NCCL_NVLS_NCHANNELS" if all.graphs().nvls.is_none() => {
                "nothing here adds up in NVLink switches anyway".to_owned()
            }
            "NCCL_NVLS_ENABLE" | "NCCL_NVLS_NCHANNELS" => format!("NCCL takes {algorithm} at {size} anyway"),
            "NCCL_GRAPH_FILE" => "the file says what NCCL finds anyway".to_owned(),
            _ if knob::changes_transport(name) => match self.model.topology.peer_access {
                PeerAccess::None => {
                    "the driver grants no peer access, so data goes through host memory anyway".to_owned()
                }
                _ => format!("data goes over {} anyway", super::transports(all).join(" and ")),
            },
            _ => "NCCL comes to the same choice without it".to_owned(),
        };
        match self.first_change(index) {
            Some(first) if first > bytes => format!("{reason}; it acts from {} up", format_size(first)),
            Some(_) => reason,
            None => format!("{reason}; there is no size at which it acts"),
        }
    }
}

/// What to say of a variable that takes no part in the model.
pub(in crate::flow) fn outside(
    collective: Collective,
    name: &str,
    now: Option<&Choice>,
    bytes: u64,
) -> (EffectKind, String) {
    let begins = |names: &[&str]| names.iter().any(|begin| name.starts_with(begin));
    if let Some((_, why)) = LEFT_OUT.iter().find(|(known, _)| *known == name) {
        return (EffectKind::Unknown, (*why).to_owned());
    }
    if begins(&WATCHING) {
        return (EffectKind::None, "it is about what is logged and watched, not about what runs".to_owned());
    }
    if begins(&NETWORK) {
        return (EffectKind::None, "it is about the network, and all GPUs are in one machine".to_owned());
    }
    if begins(&POINT_TO_POINT) {
        return (EffectKind::None, format!("it is about send and receive, not about {collective}"));
    }
    let buffer = BUFFERS.iter().find(|(known, _)| *known == name).map(|(_, protocol)| *protocol);
    if let (Some(protocol), Some(now)) = (buffer, now)
        && now.protocol != protocol
    {
        let (wanted, taken) = (protocol.nccl_name(), now.protocol.nccl_name());
        return (EffectKind::None, format!("it acts on {wanted}, and NCCL takes {taken} at {}", format_size(bytes)));
    }
    match knob::find(name) {
        Some(knob) => {
            let effect = knob.effect.trim_end_matches('.');
            let reason = format!("NCCL does not choose by it, but it may change how long a message takes: {effect}");
            (EffectKind::TimeOnly, reason)
        }
        None => (EffectKind::Unknown, "what it does is not known here; NCCL's choice does not go by it".to_owned()),
    }
}

/// What a variable does over all sizes, in a sentence without its end.
pub(super) fn summary(name: &str, changed: &[u64], sizes: &[ExplainedSize]) -> String {
    let effect_at = |size: &ExplainedSize| size.effects.iter().find(|effect| effect.variable == name).cloned();
    let gain = |size: &&ExplainedSize| {
        let (now, before) = (size.predicted_us?, effect_at(size)?.without?.predicted_us);
        Some((before / now).max(now / before))
    };
    if changed.is_empty() {
        // The largest size is the nearest to acting, so its reason says most.
        let told = sizes.iter().filter_map(effect_at).max_by_key(|effect| effect.effect != EffectKind::None);
        let last = sizes.last().and_then(effect_at);
        return match (told, last) {
            (Some(told), _) if told.effect != EffectKind::None => told.reason,
            (_, Some(last)) => format!("changes nothing: {}", last.reason),
            _ => "changes nothing".to_owned(),
        };
    }
    let count = super::of_sizes(changed.len(), sizes.len());
    let most = sizes
        .iter()
        .filter(|size| changed.contains(&size.bytes))
        .filter_map(|size| Some((gain(&size)?, size)))
        .max_by(|(one, _), (other, _)| one.total_cmp(other));
    let example = most.and_then(|(_, size)| {
        let before = effect_at(size)?.without?;
        let brief = |algo: &str, proto: &str, channels: u32, predicted_us: f64| {
            let channels = format!("{channels} {}", plural(channels, "channel", "channels"));
            format!("{algo}/{proto}, {channels}, {} us", format_us(predicted_us))
        };
        let without = brief(&before.algo, &before.proto, before.channels, before.predicted_us);
        let with = brief(size.algo.as_deref()?, size.proto.as_deref()?, size.channels?, size.predicted_us?);
        Some(format!(", most at {}: {without} without it; {with} with it", format_size(size.bytes)))
    });
    format!("changes {count}{}", example.unwrap_or_default())
}

/// "SHM to P2P", where some pair of ranks exchanges data otherwise in the second communicator.
pub(in crate::flow) fn moved(before: &Communicator, now: &Communicator) -> Option<String> {
    let ranks = now.ranks();
    let mut pairs = (0..ranks).flat_map(|from| (0..ranks).map(move |to| (from, to)));
    pairs.find_map(|(from, to)| {
        let (before, now) = (before.transport(from, to)?, now.transport(from, to)?);
        (before != now).then(|| format!("{before} to {now}"))
    })
}

/// Whether a variable limits a communicator's channels.
fn is_about_channels(name: &str) -> bool {
    ["NCHANNELS", "NRINGS", "CTAS"]
        .iter()
        .any(|end| name == format!("NCCL_MIN_{end}") || name == format!("NCCL_MAX_{end}"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::machine::{CpuNode, Layout, NcclVersion, PcieLink};
    use crate::record::VariableOrigin;

    /// Eight Blackwell cards in slots of one CPU, or of two.
    fn box_of_eight(layout: Layout, peer_access: PeerAccess) -> Topology {
        let topology = Topology::of_layout(layout, 8, [12, 0], PcieLink::x16(5), &CpuNode::amd(0)).unwrap();
        Topology { peer_access, ..topology }
    }

    /// Effects of these variables, each as it is told for a message of so many bytes.
    fn told(topology: &Topology, variables: &[(&str, &str)], bytes: u64) -> Vec<(EffectKind, String)> {
        let release = Release::of(NcclVersion::v2(28, 9)).unwrap();
        let model = Model { topology, release, graph_file: None, collective: Collective::AllReduce };
        let variables: Vec<Variable> = variables
            .iter()
            .map(|(name, value)| Variable {
                name: (*name).to_owned(),
                value: (*value).to_owned(),
                origin: VariableOrigin::Named,
            })
            .collect();
        let effects = Effects::of(&model, &variables).unwrap();
        effects.at(bytes).into_iter().map(|effect| (effect.effect, effect.reason)).collect()
    }

    #[track_caller]
    fn assert_told(told: &(EffectKind, String), effect: EffectKind, parts: &[&str]) {
        assert_eq!(told.0, effect, "{}", told.1);
        for part in parts {
            assert!(told.1.contains(part), "{part:?} is not in {:?}", told.1);
        }
    }

    #[test]
    fn channels_that_thresholds_keep_down_are_told_with_the_size_at_which_they_act() {
        let slots = box_of_eight(Layout::Phb1, PeerAccess::All);
        let many = ("NCCL_MIN_NCHANNELS", "32");
        let alone = &told(&slots, &[many], 32 << 10)[0];
        assert_told(alone, EffectKind::None, &["32 channels instead of 4", "1 channel:", "32,768 bytes", "acts from"]);
        // With thresholds that no longer keep them down both act.
        let both = told(&slots, &[many, ("NCCL_THREAD_THRESHOLDS", "8+8+64+1+8+64")], 32 << 10);
        assert_told(&both[0], EffectKind::Changes, &["without it ring/ll on"]);
        assert_told(&both[1], EffectKind::Changes, &["without it ring/ll on 1 channel"]);
    }

    #[test]
    fn a_protocol_that_mends_a_fallback_changes_the_choice() {
        let sockets = box_of_eight(Layout::Sys2, PeerAccess::All);
        let level = ("NCCL_P2P_LEVEL", "SYS");
        let effects = told(&sockets, &[level, ("NCCL_PROTO", "LL")], 64 << 10);
        assert_told(&effects[1], EffectKind::Changes, &["without it ring/simple", "us predicted"]);
        let effects = told(&sockets, &[level, ("NCCL_PROTO", "Simple")], 64 << 10);
        assert_told(&effects[1], EffectKind::None, &["NCCL takes simple at 64 KiB anyway"]);
    }

    #[test]
    fn a_variable_that_another_overrides_names_it() {
        let sockets = box_of_eight(Layout::Sys2, PeerAccess::All);
        let effects = told(&sockets, &[("NCCL_P2P_DISABLE", "1"), ("NCCL_P2P_LEVEL", "SYS")], 64 << 10);
        assert_told(&effects[1], EffectKind::None, &["beside NCCL_P2P_DISABLE=1 it changes nothing more"]);
        let slots = box_of_eight(Layout::Phb1, PeerAccess::All);
        let effects = told(&slots, &[("NCCL_MAX_CTAS", "1"), ("NCCL_MAX_NCHANNELS", "2")], 1 << 20);
        assert_told(&effects[0], EffectKind::Changes, &["without it"]);
        assert_told(&effects[1], EffectKind::None, &["beside NCCL_MAX_CTAS=1"]);
    }

    #[test]
    fn what_nccl_does_not_read_or_misreads_is_said() {
        let slots = box_of_eight(Layout::Phb1, PeerAccess::All);
        let effects = told(
            &slots,
            &[
                ("NCCL_MIN_NCHANEL", "8"),
                ("NCCL_P2P_LEVEL", "sys"),
                ("NCCL_ALGO", ""),
                ("NCCL_SHM_USE_CUDA_MEMCPY", "0"),
                ("NCCL_BUFFSIZE", "4M"),
            ],
            1024,
        );
        assert_told(&effects[0], EffectKind::None, &["does not read", "did you mean NCCL_MIN_NCHANNELS?"]);
        assert_eq!(effects[1].0, EffectKind::None, "{}", effects[1].1);
        assert_told(&effects[2], EffectKind::None, &["an empty text"]);
        assert_told(&effects[4], EffectKind::None, &["NCCL reads 4", "it acts on Simple, and NCCL takes LL at 1 KiB"]);
    }

    #[test]
    fn what_is_outside_the_choice_is_told_apart() {
        let slots = box_of_eight(Layout::Phb1, PeerAccess::None);
        let effects = told(
            &slots,
            &[
                ("NCCL_BUFFSIZE", "8388608"),
                ("NCCL_DEBUG", "INFO"),
                ("NCCL_IB_HCA", "mlx5"),
                ("NCCL_MAX_P2P_NCHANNELS", "4"),
                ("NCCL_TOPO_FILE", "/srv/topology.xml"),
                ("NCCL_CGA_CLUSTER_SIZE", "0"),
                ("NCCL_P2P_LEVEL", "SYS"),
            ],
            16 << 20,
        );
        assert_told(&effects[0], EffectKind::TimeOnly, &["may change how long"]);
        assert_told(&effects[1], EffectKind::None, &["logged"]);
        assert_told(&effects[2], EffectKind::None, &["network"]);
        assert_told(&effects[3], EffectKind::None, &["send and receive"]);
        assert_told(&effects[4], EffectKind::Unknown, &["the model reads the machine itself"]);
        assert_eq!(effects[5].0, EffectKind::TimeOnly, "{}", effects[5].1);
        assert_told(&effects[6], EffectKind::None, &["grants no peer access", "no size at which it acts"]);
    }

    #[test]
    fn what_leaves_nothing_to_choose_is_an_effect() {
        let slots = box_of_eight(Layout::Phb1, PeerAccess::All);
        let effects = told(&slots, &[("NCCL_ALGO", "NVLS")], 1024);
        assert_told(&effects[0], EffectKind::Changes, &["with it NCCL fails", "without it ring/ll"]);
    }
}
