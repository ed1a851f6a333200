//! Which variables hold in every arm, and what a worker's environment is made of.

use std::collections::BTreeMap;

use crate::engine::Engine;
use crate::error_kind::{Classified, ErrorKind};
use crate::knob::{self, Severity};
use crate::machine::NcclVersion;
use crate::record::{Origin, Pin};
use crate::units::nearest_name;

/// Variables a worker inherits by name.
const ALLOWED: [&str; 13] = [
    "HOME",
    "LANG",
    "LANGUAGE",
    "LD_LIBRARY_PATH",
    "LOGNAME",
    // Lets workers and probes run on a stand-in for driver and NCCL.
    "NCCLTUNE_ALLOW_FAKE",
    "PATH",
    "SHELL",
    "TERM",
    "TMPDIR",
    "TZ",
    "USER",
    "XDG_RUNTIME_DIR",
];
/// Variables a worker inherits by the beginning of their name.
const ALLOWED_PREFIXES: [&str; 5] = ["LC_", "CUDA_", "NVIDIA_", "NVSHMEM_", "TORCH_"];

/// What is wrong with a pin.
#[derive(Debug, thiserror::Error)]
pub enum PinError {
    /// Not KEY=VALUE.
    #[error("--pin {0:?} is not NAME=VALUE")]
    Malformed(String),
    /// A name NCCL does not know.
    #[error("--pin {name}: NCCL knows no such variable{}", did_you_mean(nearest.as_deref()))]
    Unknown {
        /// What was written.
        name: String,
        /// What may have been meant.
        nearest: Option<String>,
    },
    /// A value NCCL would read otherwise than it is written.
    #[error("--pin {name}={value}: {message}{}", after_semicolon(suggestion.as_deref()))]
    Misread {
        /// The variable.
        name: String,
        /// Its value.
        value: String,
        /// What NCCL makes of it.
        message: String,
        /// What to write instead.
        suggestion: Option<String>,
    },
    /// One variable, two values.
    #[error("--pin {name} is given as {first:?} and as {second:?}")]
    Twice {
        /// The variable.
        name: String,
        /// One value.
        first: String,
        /// The other.
        second: String,
    },
}

fn did_you_mean(name: Option<&str>) -> String {
    name.map(|name| format!("; did you mean {name}?")).unwrap_or_default()
}

fn after_semicolon(text: Option<&str>) -> String {
    text.map(|text| format!("; write {text}")).unwrap_or_default()
}

impl Classified for PinError {
    fn kind(&self) -> ErrorKind {
        ErrorKind::Usage
    }
}

/// Reads `--pin NAME=VALUE`.
pub(super) fn parse_pins(texts: &[String], version: NcclVersion) -> Result<Vec<Pin>, PinError> {
    let mut pins: Vec<Pin> = Vec::new();
    for text in texts {
        let (name, value) = text.split_once('=').ok_or_else(|| PinError::Malformed(text.clone()))?;
        if name.is_empty() || value.is_empty() || value.contains(char::is_control) {
            return Err(PinError::Malformed(text.clone()));
        }
        if !name.starts_with("NCCL_") && !name.starts_with("CUDA_")
            || name.starts_with("NCCL_") && !knob::names().any(|known| known == name)
        {
            return Err(PinError::Unknown {
                name: name.to_owned(),
                nearest: nearest_name(name, knob::names()).map(str::to_owned),
            });
        }
        let reading = knob::read_as_nccl(name, value, version);
        if let Some(problem) = reading.problem()
            && problem.severity == Severity::Error
        {
            return Err(PinError::Misread {
                name: name.to_owned(),
                value: value.to_owned(),
                message: problem.message,
                suggestion: problem.suggestion,
            });
        }
        match pins.iter().find(|pin| pin.variable == name) {
            Some(known) if known.value != value => {
                return Err(PinError::Twice {
                    name: name.to_owned(),
                    first: known.value.clone(),
                    second: value.to_owned(),
                });
            }
            Some(_) => {}
            None => pins.push(Pin { variable: name.to_owned(), value: value.to_owned(), origin: Origin::Pin }),
        }
    }
    Ok(pins)
}

/// Begins the names that are never pinned although they look like NCCL's: logging is the tool's own
/// business and must never travel into a server's file, and NCCL_VERSION is a label of container
/// images that NCCL does not read.
const NOT_INHERITED: [&str; 2] = ["NCCL_DEBUG", "NCCL_VERSION"];

/// NCCL variables that were set where the tool was started.
pub(super) fn inherited(environment: &BTreeMap<String, String>) -> Vec<Pin> {
    environment
        .iter()
        .filter(|(name, _)| name.starts_with("NCCL_") && !NOT_INHERITED.iter().any(|never| name.starts_with(never)))
        .map(|(name, value)| Pin { variable: name.clone(), value: value.clone(), origin: Origin::Inherited })
        .collect()
}

/// Variables that hold in every arm, by precedence: pins, then what was inherited, then what the
/// engine sets itself (an engine's unconditional variable wins over all), then configuration files,
/// which NCCL reads for variables that are not set.
pub(super) fn merge(explicit: Vec<Pin>, inherited: Vec<Pin>, engine: Engine, conf: Vec<Pin>) -> Vec<Pin> {
    let mut pins = explicit;
    for pin in inherited {
        if !pins.iter().any(|known| known.variable == pin.variable) {
            pins.push(pin);
        }
    }
    for variable in engine.variables() {
        let known = pins.iter().position(|known| known.variable == variable.name);
        let pin = Pin { variable: variable.name.to_owned(), value: variable.value.to_owned(), origin: Origin::Engine };
        match known {
            Some(position) if !variable.overridable => pins[position] = pin,
            Some(_) => {}
            None => pins.push(pin),
        }
    }
    for pin in conf {
        if !pins.iter().any(|known| known.variable == pin.variable) {
            pins.push(pin);
        }
    }
    pins.sort_by(|left, right| left.variable.cmp(&right.variable));
    pins
}

/// The pins as a map.
pub(super) fn as_map(pins: &[Pin]) -> BTreeMap<String, String> {
    pins.iter().map(|pin| (pin.variable.clone(), pin.value.clone())).collect()
}

/// A worker's environment before its arm: what is allowed through, then the pins. Variables from
/// configuration files are not set: NCCL reads them there itself, as it will in the server.
pub(super) fn worker_environment(
    environment: &BTreeMap<String, String>,
    keep: &[String],
    pins: &[Pin],
) -> BTreeMap<String, String> {
    let allowed = |name: &str| {
        ALLOWED.contains(&name)
            || ALLOWED_PREFIXES.iter().any(|prefix| name.starts_with(prefix))
            || keep.iter().any(|kept| kept == name)
    };
    let mut result: BTreeMap<String, String> = environment
        .iter()
        .filter(|(name, _)| allowed(name))
        .map(|(name, value)| (name.clone(), value.clone()))
        .collect();
    for pin in pins.iter().filter(|pin| !matches!(pin.origin, Origin::UserConf | Origin::SystemConf)) {
        result.insert(pin.variable.clone(), pin.value.clone());
    }
    result
}

#[cfg(test)]
mod tests {
    use super::*;

    const NEW: NcclVersion = NcclVersion::v2(28, 9);

    fn map(entries: &[(&str, &str)]) -> BTreeMap<String, String> {
        entries.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect()
    }

    #[test]
    fn pins_are_read_strictly() {
        let read = |text: &str| parse_pins(&[text.to_owned()], NEW).map_err(|error| error.to_string());
        assert_eq!(read("NCCL_P2P_DISABLE=1").unwrap().len(), 1);
        assert!(read("NCCL_P2P_DISABEL=1").unwrap_err().contains("did you mean NCCL_P2P_DISABLE?"));
        assert!(read("NCCL_BUFFSIZE=4M").unwrap_err().contains("NCCL_BUFFSIZE=4M"));
        assert!(read("NCCL_P2P_DISABLE").is_err());
        assert!(read("PATH=/x").is_err());
        let twice = parse_pins(&["NCCL_P2P_DISABLE=1".to_owned(), "NCCL_P2P_DISABLE=0".to_owned()], NEW);
        assert!(matches!(twice, Err(PinError::Twice { .. })));
    }

    #[test]
    fn a_pin_beats_what_was_inherited_and_an_engine_sets_only_what_nobody_set() {
        let explicit = parse_pins(&["NCCL_NVLS_ENABLE=0".to_owned()], NEW).unwrap();
        let environment = map(&[
            ("NCCL_NVLS_ENABLE", "1"),
            ("NCCL_CUMEM_ENABLE", "1"),
            ("NCCL_DEBUG", "INFO"),
            ("CUDA_DEVICE_MAX_CONNECTIONS", "32"),
        ]);
        let pins = merge(explicit, inherited(&environment), Engine::Sglang, Vec::new());
        let all = as_map(&pins);
        assert_eq!(all["NCCL_NVLS_ENABLE"], "0");
        assert_eq!(all["NCCL_CUMEM_ENABLE"], "1", "SGLang leaves a variable alone that is set");
        assert_eq!(all["CUDA_DEVICE_MAX_CONNECTIONS"], "8", "but this one it sets whatever was there");
        assert!(!all.contains_key("NCCL_DEBUG"));
    }

    #[test]
    fn a_worker_gets_what_is_allowed_and_nothing_else() {
        let environment = map(&[
            ("PATH", "/bin"),
            ("SECRET_TOKEN", "x"),
            ("CUDA_VISIBLE_DEVICES", "0,1"),
            ("NVSHMEM_DISABLE_NVLS", "1"),
            ("LD_PRELOAD", "/x.so"),
            ("MINE", "1"),
        ]);
        let conf = Pin { variable: "NCCL_X".to_owned(), value: "1".to_owned(), origin: Origin::SystemConf };
        let result = worker_environment(&environment, &["MINE".to_owned()], &[conf]);
        let names: Vec<&str> = result.keys().map(String::as_str).collect();
        assert_eq!(names, ["CUDA_VISIBLE_DEVICES", "MINE", "NVSHMEM_DISABLE_NVLS", "PATH"]);
    }
}
