//! Which variables hold in every arm, and what a worker's environment is made of.

use std::collections::BTreeMap;

use crate::engine::{Engine, EngineVersion};
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
    /// A pin that could not hold in the server.
    #[error(
        "--pin {name}={value}: {} sets {name} to {theirs} whatever was set, so no server would run as measured; leave the \
         pin out, or measure for no engine with --engine none",
        engine.title()
    )]
    Overruled {
        /// The variable.
        name: String,
        /// The pinned value.
        value: String,
        /// Who overrules it.
        engine: Engine,
        /// With what.
        theirs: &'static str,
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

/// What holds in every arm, and what was settled on the way.
#[derive(Debug, Default)]
pub(super) struct Held {
    pub(super) pins: Vec<Pin>,
    /// Which of two values holds where several places set one, in words.
    pub(super) notices: Vec<String>,
}

/// Variables that hold in every arm, by precedence: pins, then what was inherited, then what the
/// engine sets itself (an engine's unconditional variable wins over all, and a pin against it is an
/// error), then configuration files, which NCCL reads for variables that are not set. `environment` is
/// where the tool was started: there may be CUDA variables in it that an engine overrules.
pub(super) fn merge(
    explicit: Vec<Pin>,
    inherited: Vec<Pin>,
    (engine, version): (Engine, Option<EngineVersion>),
    conf: Vec<Pin>,
    environment: &BTreeMap<String, String>,
) -> Result<Held, PinError> {
    let mut held = Held { pins: explicit, notices: Vec::new() };
    for pin in inherited {
        match held.pins.iter().find(|known| known.variable == pin.variable) {
            Some(known) if known.value != pin.value => held.notices.push(format!(
                "{}={} was set where nccltune was started, and --pin {}={} holds in its place",
                pin.variable, pin.value, known.variable, known.value
            )),
            Some(_) => {}
            None => held.pins.push(pin),
        }
    }
    let title = engine.title();
    for variable in engine.variables(version) {
        let (name, value) = (variable.name, variable.value);
        let pin = Pin { variable: name.to_owned(), value: value.to_owned(), origin: Origin::Engine };
        let position = held.pins.iter().position(|known| known.variable == name);
        let known = position.map(|position| held.pins[position].clone());
        let differs = known.as_ref().filter(|known| known.value != value);
        match (differs, variable.overridable) {
            (Some(known), false) if known.origin == Origin::Pin => {
                let (name, value) = (name.to_owned(), known.value.clone());
                return Err(PinError::Overruled { name, value, engine, theirs: variable.value });
            }
            (Some(known), false) => held.notices.push(format!(
                "{name}={} was set where nccltune was started; {title} sets {value} in its workers whatever was set, and \
                 that is measured",
                known.value
            )),
            (Some(known), true) => held.notices.push(format!(
                "{title} would set {name}={value} itself and leaves {} alone, which is {}: start the server with it, too",
                known.value,
                if known.origin == Origin::Pin { "pinned" } else { "set where nccltune was started" }
            )),
            (None, _) => {
                let outside = environment.get(name).filter(|outside| *outside != value && position.is_none());
                if let Some(outside) = outside {
                    held.notices.push(format!(
                        "{name}={outside} was set where nccltune was started; {title} sets {value} in its workers, and that \
                         is measured"
                    ));
                }
            }
        }
        match position {
            Some(position) if !variable.overridable => held.pins[position] = pin,
            Some(_) => {}
            None => held.pins.push(pin),
        }
    }
    for pin in conf {
        match held.pins.iter().find(|known| known.variable == pin.variable) {
            Some(known) if known.value != pin.value && known.origin == Origin::Engine => held.notices.push(format!(
                "{}={} in a configuration file of NCCL has no effect: {title} sets {} in the environment, which goes first",
                pin.variable, pin.value, known.value
            )),
            Some(_) => {}
            None => held.pins.push(pin),
        }
    }
    held.pins.sort_by(|left, right| left.variable.cmp(&right.variable));
    Ok(held)
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
        let held = merge(explicit, inherited(&environment), SGLANG, Vec::new(), &environment).unwrap();
        let all = as_map(&held.pins);
        assert_eq!(all["NCCL_NVLS_ENABLE"], "0");
        assert_eq!(all["NCCL_CUMEM_ENABLE"], "1", "SGLang leaves a variable alone that is set");
        assert_eq!(all["CUDA_DEVICE_MAX_CONNECTIONS"], "8", "but this one it sets whatever was there");
        assert!(!all.contains_key("NCCL_DEBUG"));
        let told = held.notices.join("\n");
        for words in [
            "NCCL_NVLS_ENABLE=1 was set where nccltune was started, and --pin NCCL_NVLS_ENABLE=0 holds",
            "SGLang would set NCCL_CUMEM_ENABLE=0 itself and leaves 1 alone, which is set where",
            "CUDA_DEVICE_MAX_CONNECTIONS=32 was set where nccltune was started; SGLang sets 8",
        ] {
            assert!(told.contains(words), "{words}: {told}");
        }
        assert_eq!(held.notices.len(), 3);
    }

    const SGLANG: (Engine, Option<EngineVersion>) = (Engine::Sglang, None);

    #[test]
    fn a_pin_that_no_server_would_keep_is_an_error() {
        let explicit = |text: &str| parse_pins(&[text.to_owned()], NEW).unwrap();
        let of = |text: &str, engine, version: Option<&str>| {
            let version = version.map(|version| EngineVersion::parse(version).unwrap());
            merge(explicit(text), Vec::new(), (engine, version), Vec::new(), &BTreeMap::new())
        };
        let error = of("CUDA_DEVICE_MAX_CONNECTIONS=4", Engine::Sglang, None).unwrap_err().to_string();
        assert!(
            error.contains("SGLang sets CUDA_DEVICE_MAX_CONNECTIONS to 8") && error.contains("--engine none"),
            "{error}"
        );
        assert!(of("CUDA_DEVICE_MAX_CONNECTIONS=8", Engine::Sglang, None).unwrap().notices.is_empty());
        let free = of("CUDA_DEVICE_MAX_CONNECTIONS=4", Engine::None, None).unwrap();
        assert_eq!((free.pins.len(), free.notices.len()), (1, 0));
        // vLLM by release: it overrules, then it asks, then it leaves all alone.
        assert!(of("NCCL_CUMEM_ENABLE=1", Engine::Vllm, Some("0.9.0")).is_err());
        let soft = of("NCCL_CUMEM_ENABLE=1", Engine::Vllm, Some("0.9.1")).unwrap();
        assert!(soft.notices[0].contains("leaves 1 alone, which is pinned"), "{:?}", soft.notices);
        assert!(of("NCCL_CUMEM_ENABLE=1", Engine::Vllm, Some("0.11.0")).unwrap().notices.is_empty());
        let bare = |version| {
            let version = EngineVersion::parse(version);
            merge(Vec::new(), Vec::new(), (Engine::Vllm, version), Vec::new(), &BTreeMap::new()).unwrap().pins.len()
        };
        assert_eq!((bare("0.8.5"), bare("0.10.1.1"), bare("0.10.2")), (1, 1, 0));
    }

    #[test]
    fn what_an_engine_puts_into_the_environment_goes_before_files() {
        let conf = |value: &str| Pin {
            variable: "NCCL_CUMEM_ENABLE".to_owned(),
            value: value.to_owned(),
            origin: Origin::UserConf,
        };
        let of = |value: &str| merge(Vec::new(), Vec::new(), SGLANG, vec![conf(value)], &BTreeMap::new()).unwrap();
        let held = of("1");
        assert_eq!(as_map(&held.pins)["NCCL_CUMEM_ENABLE"], "0");
        assert!(held.notices[0].contains("has no effect: SGLang sets 0"), "{:?}", held.notices);
        assert!(of("0").notices.is_empty());
        let none = merge(Vec::new(), Vec::new(), (Engine::None, None), vec![conf("1")], &BTreeMap::new()).unwrap();
        assert_eq!((none.pins[0].origin, none.pins.len()), (Origin::UserConf, 1));
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
