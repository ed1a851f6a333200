//! NCCL variables that are already set where the tool starts.

use std::collections::BTreeMap;

use super::sight::Sight;
use super::{Finding, listed, listed_as};
use crate::knob::{self, ReadValue, Reading, read_as_nccl};
use crate::machine::NcclVersion;
use crate::units::nearest_name;
use crate::wording::printable;

/// What every variable of NCCL begins with.
const PREFIX: &str = "NCCL_";
/// Variables whose values may name a host or an address.
const PRIVATE: &[&str] = &["NCCL_COMM_ID", "NCCL_HOSTID"];
/// The label that CUDA's container images carry. NCCL does not read it.
const IMAGE_LABEL: &str = "NCCL_VERSION";
const MOST_SHOWN: usize = 20;
const VALUE_SHOWN: usize = 80;

/// Whether NCCL might look for a variable of this name.
pub(super) fn is_nccl(name: &str) -> bool {
    name.starts_with(PREFIX)
}

/// Whether a variable only says how much NCCL logs. The tool needs the log itself and sets these its
/// own way in every launch, so they neither travel nor count.
pub(super) fn is_logging(name: &str) -> bool {
    name.starts_with("NCCL_DEBUG")
}

/// A variable as it stands, with what NCCL makes of it where that is not what it says.
pub(super) fn described(name: &str, value: &str, version: NcclVersion) -> String {
    let text = as_set(name, value);
    match remark(name, value, version) {
        Some(remark) => format!("{text} ({remark})"),
        None => text,
    }
}

/// A variable as it stands.
pub(super) fn as_set(name: &str, value: &str) -> String {
    if PRIVATE.contains(&name) {
        format!("{name} (value not shown)")
    } else {
        format!("{}={}", printable(name, VALUE_SHOWN), printable(value, VALUE_SHOWN))
    }
}

fn remark(name: &str, value: &str, version: NcclVersion) -> Option<String> {
    let problem = read_as_nccl(name, value, version).problem()?;
    let meant = problem.suggestion.map(|suggestion| format!("write {name}={}", printable(&suggestion, VALUE_SHOWN)));
    let meant = meant.or_else(|| similar_name(name).map(|other| format!("did you mean {other}?")));
    Some(std::iter::once(problem.message).chain(meant).collect::<Vec<_>>().join("; "))
}

/// The known name that an unknown one is probably a typo of. The common prefix does not count as
/// likeness: with it, short names would resemble each other by nothing else.
fn similar_name(name: &str) -> Option<String> {
    if knob::names().any(|known| known == name) {
        return None;
    }
    let known = knob::names().filter_map(|known| known.strip_prefix(PREFIX));
    nearest_name(name.strip_prefix(PREFIX)?, known).map(|rest| format!("{PREFIX}{rest}"))
}

pub(super) fn inherited(sight: &Sight<'_>) -> Finding {
    let mut variables = Vec::new();
    let mut passed_over = Vec::new();
    for (name, value) in sight.facts.environment.iter().filter(|(name, _)| is_nccl(name)) {
        if is_logging(name) || name == IMAGE_LABEL {
            passed_over.push(printable(name, VALUE_SHOWN));
        } else {
            variables.push((name, value));
        }
    }
    if variables.is_empty() {
        let but = if passed_over.is_empty() {
            String::new()
        } else {
            format!(" but {}, which does not count", listed(&passed_over, MOST_SHOWN, ", "))
        };
        return Finding::pass(format!("none is set{but}"));
    }
    Finding::warn(
        listed_as(&variables, MOST_SHOWN, "; ", |(name, value)| described(name, value, sight.version())),
        "these are pinned in every arm, the default included: unset them unless the server starts with them too",
    )
}

pub(super) fn contradictory(sight: &Sight<'_>) -> Finding {
    let conf = sight.conf.in_force();
    let mut in_force: BTreeMap<&str, &str> =
        conf.iter().map(|pin| (pin.variable.as_str(), pin.value.as_str())).collect();
    in_force.extend(sight.facts.environment.iter().map(|(name, value)| (name.as_str(), value.as_str())));
    let read = |name: &'static str| -> Option<(&str, Reading)> {
        in_force.get(name).map(|value| (*value, read_as_nccl(name, value, sight.version())))
    };
    if let Some((disable, Reading { value: ReadValue::Integer(1), .. })) = read("NCCL_P2P_DISABLE")
        && let Some((level, reading)) = read("NCCL_P2P_LEVEL")
        && !reading.is_without_effect()
    {
        return Finding::warn(
            format!(
                "NCCL_P2P_DISABLE={} and NCCL_P2P_LEVEL={}: NCCL never reads the level where peer access is disabled",
                printable(disable, VALUE_SHOWN),
                printable(level, VALUE_SHOWN)
            ),
            "keep the one that is meant",
        );
    }
    Finding::pass("no variable in force cancels another")
}

#[cfg(test)]
mod tests {
    use super::super::fixtures::Planted;
    use crate::record::CheckVerdict::{Pass, Warn};

    fn inherited_after(variables: &[(&str, &str)]) -> crate::record::Check {
        let mut planted = Planted::healthy();
        for (name, value) in variables {
            planted.set(name, value);
        }
        planted.check("inherited-environment")
    }

    #[test]
    fn an_environment_without_nccl_passes() {
        let check = inherited_after(&[("NCCLTUNE_PLUGIN", "/opt/x"), ("PYNCCL_ALGO", "Ring")]);
        assert_eq!((check.verdict, check.evidence.as_str()), (Pass, "none is set"));
    }

    #[test]
    fn logging_and_the_label_of_an_image_do_not_count() {
        let check =
            inherited_after(&[("NCCL_DEBUG", "INFO"), ("NCCL_DEBUG_FILE", "/opt/x"), ("NCCL_VERSION", "2.27.3-1")]);
        assert_eq!(check.verdict, Pass);
        assert!(check.evidence.contains("NCCL_DEBUG, NCCL_DEBUG_FILE, NCCL_VERSION"), "{}", check.evidence);
    }

    #[test]
    fn what_is_set_is_shown_with_what_nccl_makes_of_it() {
        let check = inherited_after(&[("NCCL_ALGO", "Ring"), ("NCCL_BUFFSIZE", "4M"), ("NCCL_DEBUG", "INFO")]);
        assert_eq!(check.verdict, Warn);
        assert!(check.evidence.starts_with("NCCL_ALGO=Ring; NCCL_BUFFSIZE=4M (NCCL reads 4 and drops \"M\""));
        assert!(check.evidence.contains("write NCCL_BUFFSIZE=4194304"), "{}", check.evidence);
        assert!(!check.evidence.contains("DEBUG"));
        assert!(check.advice.contains("pinned in every arm"));
    }

    #[test]
    fn a_misspelt_name_gets_the_nearest_one() {
        let check = inherited_after(&[("NCCL_ALGOS", "Ring")]);
        assert!(check.evidence.ends_with("; did you mean NCCL_ALGO?)"), "{}", check.evidence);
        let check = inherited_after(&[("NCCL_ASYNC_ERROR_HANDLING", "1"), ("NCCL_BLOCKING_WAIT", "1")]);
        assert!(!check.evidence.contains("did you mean"), "{}", check.evidence);
    }

    #[test]
    fn the_release_in_use_decides_what_is_read() {
        let mut planted = Planted::healthy();
        planted.set("NCCL_RUNTIME_CONNECT", "0");
        assert!(!planted.check("inherited-environment").evidence.contains("does not read"));
        planted.set_version(21_903);
        assert!(planted.check("inherited-environment").evidence.contains("2.19.3 does not read NCCL_RUNTIME_CONNECT"));
    }

    #[test]
    fn hosts_and_escape_sequences_stay_out_of_the_evidence() {
        let long = "x".repeat(100_000);
        let check = inherited_after(&[
            ("NCCL_COMM_ID", "build-box-7:9999"),
            ("NCCL_HOSTID", "build-box-7"),
            ("NCCL_NET", "\u{1b}[2J"),
            ("NCCL_TOPO_FILE", &long),
        ]);
        assert!(!check.evidence.contains("build-box-7"), "{}", check.evidence);
        assert!(!check.evidence.contains('\u{1b}'));
        assert!(check.evidence.len() < 1000);
    }

    #[test]
    fn a_thousand_variables_are_counted() {
        let variables: Vec<(String, String)> =
            (0..1000).map(|number| (format!("NCCL_X{number:04}"), "1".to_owned())).collect();
        let borrowed: Vec<(&str, &str)> =
            variables.iter().map(|(name, value)| (name.as_str(), value.as_str())).collect();
        let check = inherited_after(&borrowed);
        assert!(check.evidence.ends_with("and 980 more"), "{}", check.evidence);
    }

    #[test]
    fn a_level_that_is_never_read_warns() {
        let cases = [
            (Some("1"), Some("SYS"), Warn),
            (Some("0x1"), Some("SYS"), Warn),
            // Only 1 disables.
            (Some("2"), Some("SYS"), Pass),
            (Some("0"), Some("SYS"), Pass),
            (None, Some("SYS"), Pass),
            (Some("1"), None, Pass),
            // NCCL would not have read these either.
            (Some("1"), Some("sys"), Pass),
            (Some("1"), Some(""), Pass),
        ];
        for (disable, level, verdict) in cases {
            let mut planted = Planted::healthy();
            for (name, value) in [("NCCL_P2P_DISABLE", disable), ("NCCL_P2P_LEVEL", level)] {
                if let Some(value) = value {
                    planted.set(name, value);
                }
            }
            assert_eq!(planted.check("contradictory-environment").verdict, verdict, "{disable:?} {level:?}");
        }
    }

    #[test]
    fn files_and_environment_are_judged_together() {
        let mut planted = Planted::healthy();
        planted.write("/etc/nccl.conf", "NCCL_P2P_DISABLE=1\n");
        assert_eq!(planted.check("contradictory-environment").verdict, Pass);
        planted.set("NCCL_P2P_LEVEL", "SYS");
        assert_eq!(planted.check("contradictory-environment").verdict, Warn);
        planted.set("NCCL_P2P_DISABLE", "0");
        assert_eq!(planted.check("contradictory-environment").verdict, Pass, "the environment wins over the file");
    }
}
