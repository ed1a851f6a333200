//! What a set of variables comes to in the model.

use std::collections::BTreeMap;

use crate::knob::{ReadValue, Reading, read_as_nccl};
use crate::machine::{NcclVersion, PathKind};

use super::{Algorithm, ModelError, PeerRules, Protocol};

/// The variables of an environment, as NCCL reads them.
#[derive(Debug, Clone, Default)]
pub struct Settings {
    readings: BTreeMap<String, (String, Reading)>,
}

impl Settings {
    /// Reads an environment as this release does. Nothing is refused here: what keeps NCCL from
    /// starting is an error of [`super::Communicator::new`].
    pub fn read(environment: &BTreeMap<String, String>, version: NcclVersion) -> Self {
        let readings = environment
            .iter()
            .map(|(name, text)| (name.clone(), (text.clone(), read_as_nccl(name, text, version))))
            .collect();
        Self { readings }
    }

    /// What NCCL makes of each variable, by name, with the text it was read from.
    pub fn readings(&self) -> impl Iterator<Item = (&str, &str, &Reading)> {
        self.readings.iter().map(|(name, (text, reading))| (name.as_str(), text.as_str(), reading))
    }

    /// Whether a variable takes part in the model's choices at all. NCCL may read others, and they may
    /// change how long a message takes; they do not change what is chosen for it.
    pub fn is_modelled(name: &str) -> bool {
        MODELLED.contains(&name)
    }

    /// Whether a variable takes part in finding rings and trees; the others only in what is chosen for a
    /// message, or in neither.
    pub fn decides_graphs(name: &str) -> bool {
        ["NCCL_P2P_", "NCCL_IGNORE_DISABLED_P2P", "NCCL_SHM_", "NCCL_NVB_", "NCCL_NVLS_", "NCCL_GRAPH_FILE"]
            .iter()
            .any(|start| name.starts_with(start))
    }

    fn value(&self, name: &str) -> Option<&ReadValue> {
        self.readings.get(name).map(|(_, reading)| &reading.value)
    }

    fn integer(&self, name: &str) -> Option<i64> {
        match self.value(name)? {
            ReadValue::Integer(value) => Some(*value),
            _ => None,
        }
    }

    /// The first variable that keeps a communicator from starting.
    pub(super) fn refused(&self) -> Result<(), ModelError> {
        for name in ["NCCL_ALGO", "NCCL_PROTO"] {
            let Some((text, reading)) = self.readings.get(name) else { continue };
            // A list that could not be read; one that leaves nothing fails at the call.
            if let (ReadValue::Text(_), Some(reason)) = (&reading.value, &reading.error) {
                return Err(ModelError::Refused {
                    variable: name.to_owned(),
                    text: text.chars().take(200).collect(),
                    reason: reason.clone(),
                });
            }
        }
        Ok(())
    }

    /// How far peer access may reach.
    pub(super) fn peer_rules(&self) -> PeerRules {
        let level = if self.integer("NCCL_P2P_DISABLE") == Some(1) {
            Some(PathKind::Loc)
        } else {
            match self.value("NCCL_P2P_LEVEL") {
                Some(ReadValue::Level(name)) => PathKind::of(name),
                _ => None,
            }
        };
        let ignores = self.integer("NCCL_IGNORE_DISABLED_P2P").unwrap_or(0);
        PeerRules {
            level,
            skips_driver: ignores == 2,
            mutes_driver: ignores != 0,
            has_nvb: self.integer("NCCL_NVB_DISABLE").unwrap_or(0) == 0,
        }
    }

    /// Whether host memory may carry data between GPUs.
    pub(super) fn may_use_host_memory(&self) -> bool {
        self.integer("NCCL_SHM_DISABLE") != Some(1)
    }

    /// Fewest and most channels, from both pairs of variables and their older names.
    pub(super) fn channel_limits(&self, most: u32) -> ChannelLimits {
        let all = i64::from(most);
        let channels = |name: &str, older: &str| self.integer(name).or_else(|| self.integer(older));
        let least = channels("NCCL_MIN_NCHANNELS", "NCCL_MIN_NRINGS").unwrap_or(0).clamp(0, all);
        let largest = channels("NCCL_MAX_NCHANNELS", "NCCL_MAX_NRINGS").unwrap_or(all).clamp(1, all);
        let most_blocks = self.integer("NCCL_MAX_CTAS").unwrap_or(all).clamp(1, all);
        let least_blocks = self.integer("NCCL_MIN_CTAS").unwrap_or(1).clamp(1, all).min(most_blocks);
        ChannelLimits {
            least: least.max(least_blocks) as u32,
            most: largest.min(most_blocks) as u32,
            least_blocks: least_blocks as u32,
            most_blocks: most_blocks as u32,
        }
    }

    /// Whether NVLS is wanted: off, where the hardware has it, or in any case.
    pub(super) fn nvls(&self) -> Nvls {
        match self.integer("NCCL_NVLS_ENABLE").unwrap_or(2) {
            0 => Nvls::Off,
            2 => Nvls::WherePresent,
            _ => Nvls::Forced,
        }
    }

    pub(super) fn nvls_channels(&self) -> Option<u32> {
        self.integer("NCCL_NVLS_NCHANNELS").and_then(|channels| u32::try_from(channels).ok())
    }

    /// Most threads of LL and Simple, where a variable says so.
    pub(super) fn threads(&self) -> Option<u32> {
        self.integer("NCCL_NTHREADS").and_then(|threads| u32::try_from(threads).ok())
    }

    /// Most threads of LL128, where a variable says so.
    pub(super) fn ll128_threads(&self) -> Option<u32> {
        self.integer("NCCL_LL128_NTHREADS").and_then(|threads| u32::try_from(threads).ok())
    }

    /// A threshold, where a variable says so.
    pub(super) fn threshold(&self, algorithm: Algorithm, protocol: Protocol) -> Option<i64> {
        let Some(ReadValue::Thresholds(six)) = self.value("NCCL_THREAD_THRESHOLDS") else { return None };
        match algorithm {
            Algorithm::Tree => six[protocol as usize],
            Algorithm::Ring => six[3 + protocol as usize],
            Algorithm::Nvls => None,
        }
        .filter(|threshold| *threshold >= 0)
    }

    /// Words of `NCCL_ALGO` or `NCCL_PROTO` that stay enabled for a collective, in NCCL's spelling;
    /// nothing where the variable leaves it alone.
    pub(super) fn selected(&self, name: &str, function: &str) -> Option<&[&'static str]> {
        match self.value(name)? {
            ReadValue::Lists(lists) => lists.selected_for(function),
            _ => None,
        }
    }
}

/// Limits of a communicator's channels.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct ChannelLimits {
    pub least: u32,
    pub most: u32,
    pub least_blocks: u32,
    pub most_blocks: u32,
}

/// What `NCCL_NVLS_ENABLE` asks for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Nvls {
    Off,
    WherePresent,
    Forced,
}

/// Variables that take part in choices.
const MODELLED: [&str; 19] = [
    "NCCL_ALGO",
    "NCCL_PROTO",
    "NCCL_MIN_NCHANNELS",
    "NCCL_MAX_NCHANNELS",
    "NCCL_MIN_NRINGS",
    "NCCL_MAX_NRINGS",
    "NCCL_MIN_CTAS",
    "NCCL_MAX_CTAS",
    "NCCL_NTHREADS",
    "NCCL_LL128_NTHREADS",
    "NCCL_THREAD_THRESHOLDS",
    "NCCL_P2P_LEVEL",
    "NCCL_P2P_DISABLE",
    "NCCL_SHM_DISABLE",
    "NCCL_IGNORE_DISABLED_P2P",
    "NCCL_NVB_DISABLE",
    "NCCL_NVLS_ENABLE",
    "NCCL_NVLS_NCHANNELS",
    "NCCL_GRAPH_FILE",
];

/// A tuner plugin's answer, as far as it gives one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Override {
    /// Algorithm and protocol; where NCCL has them disabled, its own choice stands, as with a plugin
    /// that writes only over entries that are open.
    pub kernel: Option<(Algorithm, Protocol)>,
    /// Most channels; threads follow NCCL's own number nevertheless.
    pub channels: Option<u32>,
}
