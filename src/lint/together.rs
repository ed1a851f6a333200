//! What variables do to each other.
//!
//! Each rule names the two sides, so that a reader can look up either; where a rule holds in some releases only it
//! asks for the release. Sources: NCCL 2.19 to 2.30, src/graph/tuning.cc, connect.cc, paths.cc, init.cc, enqueue.cc.

use std::collections::BTreeMap;
use std::ops::ControlFlow;

use super::{Add, Circumstances, Setting};
use crate::knob::{ReadValue, read_as_nccl};
use crate::machine::NcclVersion;
use crate::record::LintSeverity::{self, Error, Warning};

/// Variables that act on buffers or threads of one protocol only.
const OF_A_PROTOCOL: [(&str, &str); 5] = [
    ("NCCL_BUFFSIZE", "Simple"),
    ("NCCL_LL_BUFFSIZE", "LL"),
    ("NCCL_LL128_BUFFSIZE", "LL128"),
    ("NCCL_LL128_NTHREADS", "LL128"),
    ("NCCL_P2P_NET_CHUNKSIZE", "Simple"),
];

/// Variables that mean nothing without NVLS.
const OF_NVLS: [&str; 2] = ["NCCL_NVLS_NCHANNELS", "NCCL_NVLS_CHUNKSIZE"];

/// The settings of one process, as NCCL reads them.
struct Settings<'a> {
    settings: &'a BTreeMap<&'a str, Setting<'a>>,
    version: NcclVersion,
}

impl Settings<'_> {
    fn line(&self, name: &str) -> Option<usize> {
        self.settings.get(name).map(|setting| setting.line)
    }

    fn text(&self, name: &str) -> Option<&str> {
        self.settings.get(name)?.value.filter(|value| !value.is_empty())
    }

    fn read(&self, name: &str) -> Option<ReadValue> {
        Some(read_as_nccl(name, self.text(name)?, self.version).value)
    }

    fn integer(&self, name: &str) -> Option<i64> {
        match self.read(name)? {
            ReadValue::Integer(value) => Some(value),
            _ => None,
        }
    }

    /// What a list leaves for all-reduce; nothing where it says nothing of it.
    fn for_all_reduce(&self, name: &str) -> Option<Vec<&'static str>> {
        match self.read(name)? {
            ReadValue::Lists(lists) => lists.selected_for("allreduce").map(<[&str]>::to_vec),
            _ => None,
        }
    }
}

/// Looks at the variables that reach one process.
pub(super) fn look(
    settings: &BTreeMap<&str, Setting<'_>>,
    circumstances: Circumstances,
    add: &mut Add<'_>,
) -> ControlFlow<()> {
    let settings = Settings { settings, version: circumstances.version };
    peer_access(&settings, add)?;
    channels(&settings, add)?;
    algorithms_and_protocols(&settings, add)?;
    without_effect(&settings, add)
}

fn say(
    settings: &Settings<'_>,
    name: &str,
    severity: LintSeverity,
    message: impl Into<String>,
    add: &mut Add<'_>,
) -> ControlFlow<()> {
    match settings.line(name) {
        Some(line) => add(line, name, severity, message.into(), None),
        None => ControlFlow::Continue(()),
    }
}

fn peer_access(settings: &Settings<'_>, add: &mut Add<'_>) -> ControlFlow<()> {
    let is_disabled = settings.integer("NCCL_P2P_DISABLE") == Some(1);
    if is_disabled && settings.text("NCCL_P2P_LEVEL").is_some() {
        let message = "NCCL_P2P_DISABLE=1 wins, and NCCL never reads this; say one of the two";
        say(settings, "NCCL_P2P_LEVEL", Error, message, add)?;
    }
    let no_memory = settings.integer("NCCL_SHM_DISABLE") == Some(1);
    if is_disabled && no_memory {
        let message =
            "with NCCL_P2P_DISABLE=1 as well, GPUs of one machine exchange through the network, which is very slow";
        say(settings, "NCCL_SHM_DISABLE", Error, message, add)?;
    }
    if is_disabled && settings.integer("NCCL_IGNORE_DISABLED_P2P").is_some_and(|value| value != 0) {
        say(settings, "NCCL_IGNORE_DISABLED_P2P", Warning, "means nothing beside NCCL_P2P_DISABLE=1", add)?;
    }
    if is_disabled {
        for name in ["NCCL_P2P_READ_ENABLE", "NCCL_P2P_DIRECT_DISABLE", "NCCL_P2P_USE_CUDA_MEMCPY"] {
            say(settings, name, Warning, "means nothing beside NCCL_P2P_DISABLE=1", add)?;
        }
    }
    ControlFlow::Continue(())
}

fn channels(settings: &Settings<'_>, add: &mut Add<'_>) -> ControlFlow<()> {
    for (least, most) in [
        ("NCCL_MIN_NCHANNELS", "NCCL_MAX_NCHANNELS"),
        ("NCCL_MIN_CTAS", "NCCL_MAX_CTAS"),
        ("NCCL_MIN_NRINGS", "NCCL_MAX_NRINGS"),
    ] {
        if let (Some(low), Some(high)) = (settings.integer(least), settings.integer(most))
            && low > high
        {
            let message = format!("{low} is more than {most}={high}, and NCCL goes by the minimum");
            say(settings, least, Error, message, add)?;
        }
    }
    for (old, new) in [("NCCL_MIN_NRINGS", "NCCL_MIN_NCHANNELS"), ("NCCL_MAX_NRINGS", "NCCL_MAX_NCHANNELS")] {
        if settings.text(new).is_some() {
            let message = format!("is the old name of {new}, which is set too and wins");
            say(settings, old, Warning, message, add)?;
        }
    }
    if let (Some(channels), Some(blocks)) = (settings.integer("NCCL_MIN_NCHANNELS"), settings.integer("NCCL_MAX_CTAS"))
        && channels > blocks
    {
        let message = format!("{channels} is more than NCCL_MAX_CTAS={blocks}, and NCCL goes by the minimum");
        say(settings, "NCCL_MIN_NCHANNELS", Warning, message, add)?;
    }
    ControlFlow::Continue(())
}

fn algorithms_and_protocols(settings: &Settings<'_>, add: &mut Add<'_>) -> ControlFlow<()> {
    let (algorithms, protocols) = (settings.for_all_reduce("NCCL_ALGO"), settings.for_all_reduce("NCCL_PROTO"));
    if let (Some(algorithms), Some(protocols)) = (&algorithms, &protocols) {
        let only_simple = ["NVLS", "NVLSTree", "CollNetDirect", "CollNetChain"];
        let needs_simple = !algorithms.is_empty() && algorithms.iter().all(|one| only_simple.contains(one));
        if needs_simple && !protocols.contains(&"Simple") {
            let message = format!(
                "{} run with Simple only, which NCCL_PROTO leaves out: no algorithm is left for all-reduce",
                algorithms.join(", ")
            );
            say(settings, "NCCL_ALGO", Error, message, add)?;
        }
    }
    let uses_nvls =
        algorithms.as_ref().is_some_and(|all| !all.is_empty() && all.iter().all(|one| one.starts_with("NVLS")));
    if uses_nvls && settings.integer("NCCL_NVLS_ENABLE") == Some(0) {
        say(settings, "NCCL_ALGO", Error, "NCCL_NVLS_ENABLE=0 takes away what this asks for", add)?;
    }
    // A list without a collective's name speaks for all of them.
    if let Some(text) = settings.text("NCCL_PROTO")
        && !text.contains(':')
        && protocols.as_deref() == Some(&["LL"])
    {
        let message = "LL alone carries half the bandwidth: prefill's large messages become up to three times slower";
        let line = settings.line("NCCL_PROTO").unwrap_or_default();
        add(line, "NCCL_PROTO", Warning, message.to_owned(), None)?;
    }
    if let Some(text) = settings.text("NCCL_ALGO")
        && !text.contains(':')
        && settings.version >= NcclVersion::v2(24, 0)
        && algorithms.as_ref().is_some_and(|all| !all.is_empty() && !all.contains(&"Ring"))
    {
        let line = settings.line("NCCL_ALGO").unwrap_or_default();
        let message = "speaks for every collective, and all-gather, reduce-scatter, broadcast and reduce have no such \
                       algorithm: calls of them fail";
        add(line, "NCCL_ALGO", Error, message.to_owned(), Some(format!("allreduce:{text}")))?;
    }
    ControlFlow::Continue(())
}

fn without_effect(settings: &Settings<'_>, add: &mut Add<'_>) -> ControlFlow<()> {
    if let Some(protocols) = settings.for_all_reduce("NCCL_PROTO") {
        for (name, protocol) in OF_A_PROTOCOL {
            if settings.text(name).is_some() && !protocols.is_empty() && !protocols.contains(&protocol) {
                let message = format!("acts with {protocol} only, which NCCL_PROTO leaves out for all-reduce");
                say(settings, name, Warning, message, add)?;
            }
        }
        let left_out = |protocol: &str| !protocols.is_empty() && !protocols.contains(&protocol);
        if let Some(ReadValue::Thresholds(thresholds)) = settings.read("NCCL_THREAD_THRESHOLDS") {
            let of = ["LL", "LL128", "Simple", "LL", "LL128", "Simple"];
            let set: Vec<&str> =
                thresholds.iter().zip(of).filter(|(one, _)| one.is_some()).map(|(_, protocol)| protocol).collect();
            if !set.is_empty() && set.iter().all(|protocol| left_out(protocol)) {
                let message = "every threshold it sets is of a protocol that NCCL_PROTO leaves out for all-reduce";
                say(settings, "NCCL_THREAD_THRESHOLDS", Warning, message, add)?;
            }
        }
    }
    if settings.integer("NCCL_NVLS_ENABLE") == Some(0) {
        for name in OF_NVLS {
            say(settings, name, Warning, "means nothing beside NCCL_NVLS_ENABLE=0", add)?;
        }
    }
    let plugin = settings.text("NCCL_TUNER_PLUGIN");
    if settings.text("NCCL_TUNER_CONFIG_FILE").is_some() && plugin.is_none_or(|name| name.eq_ignore_ascii_case("none"))
    {
        say(settings, "NCCL_TUNER_CONFIG_FILE", Error, "no NCCL_TUNER_PLUGIN is named that would read it", add)?;
    }
    if settings.integer("NCCL_CUMEM_ENABLE") == Some(0) {
        for name in ["NCCL_CUMEM_HOST_ENABLE", "NCCL_RUNTIME_CONNECT"] {
            if settings.integer(name) == Some(1) {
                say(
                    settings,
                    name,
                    Warning,
                    "needs CUDA's virtual memory calls, which NCCL_CUMEM_ENABLE=0 takes away",
                    add,
                )?;
            }
        }
    }
    if settings.text("NCCL_DEBUG_SUBSYS").is_some() {
        let level = settings.text("NCCL_DEBUG").unwrap_or("").to_ascii_uppercase();
        if !matches!(level.as_str(), "INFO" | "TRACE" | "ABORT")
            && settings.settings.get("NCCL_DEBUG").is_none_or(|one| one.value.is_some())
        {
            say(
                settings,
                "NCCL_DEBUG_SUBSYS",
                Warning,
                "chooses among lines that NCCL_DEBUG=INFO shows, which is not set",
                add,
            )?;
        }
    }
    ControlFlow::Continue(())
}
