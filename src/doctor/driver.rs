//! The driver.

use super::sight::Sight;
use super::{Finding, shown};
use crate::discovery::machine_of;
use crate::error_kind::Classified;
use crate::machine::Machine;

const NO_DRIVER: &str = "no NVIDIA driver: only simulation and replay work here";
const DRIVER_FIRST: &str = "run `nvidia-smi`; if it fails or hangs too, the driver needs attention first";

pub(super) fn usable(sight: &Sight<'_>) -> Finding {
    let facts = sight.facts;
    if !facts.driver_installed {
        return Finding::fail(
            NO_DRIVER,
            "run this where the GPUs are, in a container with `--gpus all`; or `nccltune tune --backend simulated`",
        );
    }
    let Some(report) = facts.report else {
        let words = facts.probe_error.unwrap_or("the probe gave no answer");
        return Finding::fail(shown(words), DRIVER_FIRST);
    };
    let Some(machine) = facts.machine else {
        // Which of the two libraries is to blame is told in the words that tuning would stop with.
        let error = machine_of(report).err();
        let words = error.as_ref().map_or_else(|| "the probe describes no machine".to_owned(), ToString::to_string);
        let advice = error.and_then(|error| error.hint()).unwrap_or_else(|| DRIVER_FIRST.to_owned());
        return Finding::fail(shown(&words), advice);
    };
    match &report.nvml_error {
        None => Finding::pass(versions(machine)),
        // CUDA leaves a GPU out that has fallen off the bus; only NVML still knows of it.
        Some(words) => Finding::warn(format!("{}; NVML reports: {}", versions(machine), shown(words)), DRIVER_FIRST),
    }
}

fn versions(machine: &Machine) -> String {
    let driver = machine
        .driver
        .as_deref()
        .map_or("driver of unknown version".to_owned(), |version| format!("driver {}", shown(version)));
    let cuda = machine.cuda_driver_version.map(|code| format!(", CUDA {}.{}", code / 1000, code % 1000 / 10));
    format!("{driver}{}, {}", cuda.unwrap_or_default(), shown(&machine.name))
}

/// Words in the driver's registry settings that force peer access, or what it stands on.
/// Source: noonghunna/club-3090, docs/PCIE_P2P.md and issue 873.
const FORCES_PEERS: [&str; 4] = ["ForceP2P", "PeerMappingOverride", "RMForceStaticBar1", "RMPcieP2PType"];

/// What the driver was loaded with. Its sysfs parameters read empty even where one is set, this file does not.
pub(super) fn parameters(sight: &Sight<'_>) -> Finding {
    let Some(text) = sight.text("/proc/driver/nvidia/params") else {
        return Finding::unknown("/proc/driver/nvidia/params is not readable here");
    };
    let (mut unusual, mut advice) = (Vec::new(), Vec::new());
    for (name, value) in text.lines().take(1000).filter_map(|line| line.split_once(':')) {
        let (name, value) = (name.trim(), value.trim().trim_matches('"'));
        match (name, value) {
            ("RegistryDwords" | "RegistryDwordsPerDevice", value) if !value.is_empty() => {
                unusual.push(format!("{name} is {:?}", shown(value)));
                advice.push(if FORCES_PEERS.iter().any(|word| value.contains(word)) {
                    "peer access is forced by the driver's registry settings: that it is granted then does not say \
                     that bytes arrive, so let `nccltune doctor --live --peer-access test` test it"
                } else {
                    "these registry settings are nobody's default: find out who set them, or take them out of the \
                     options of the module nvidia"
                });
            }
            ("EnableMSI", "0") => {
                unusual.push("EnableMSI is 0".to_owned());
                advice.push(
                    "without message-signalled interrupts each wait for a GPU is slow: load it with \
                             NVreg_EnableMSI=1",
                );
            }
            _ => {}
        }
    }
    advice.dedup();
    if unusual.is_empty() {
        Finding::pass("no registry settings, interrupts as usual")
    } else {
        Finding::warn(unusual.join("; "), advice.join("; "))
    }
}

#[cfg(test)]
mod tests {
    use super::super::fixtures::Planted;
    use crate::discovery::machine_of;
    use crate::record::CheckVerdict;

    #[test]
    fn a_driver_that_answers_passes() {
        let check = Planted::healthy().check("driver-usable");
        assert_eq!(check.verdict, CheckVerdict::Pass);
        assert_eq!(check.evidence, "driver 580.95.05, CUDA 13.0, 2x NVIDIA Test");
    }

    #[test]
    fn no_driver_at_all_fails() {
        let check = Planted::without_driver().check("driver-usable");
        assert_eq!(check.verdict, CheckVerdict::Fail);
        assert_eq!(check.evidence, super::NO_DRIVER);
    }

    #[test]
    fn a_probe_that_failed_is_quoted() {
        let mut planted = Planted::healthy();
        (planted.report, planted.machine) = (None, None);
        planted.probe_error = Some("the NVIDIA driver did not answer within 60 s\u{1b}[31m".to_owned());
        let check = planted.check("driver-usable");
        assert_eq!(check.verdict, CheckVerdict::Fail);
        assert_eq!(check.evidence, "the NVIDIA driver did not answer within 60 s?[31m");
        planted.probe_error = None;
        assert_eq!(planted.check("driver-usable").evidence, "the probe gave no answer");
    }

    #[test]
    fn a_driver_that_is_there_but_broken_fails_in_its_own_words() {
        let mut planted = Planted::healthy();
        planted.machine = None;
        let report = planted.report.as_mut().unwrap();
        report.cuda_error = Some("CUDA_ERROR_SYSTEM_DRIVER_MISMATCH".to_owned());
        let check = planted.check("driver-usable");
        assert_eq!(check.verdict, CheckVerdict::Fail);
        assert!(check.evidence.contains("cannot be used: CUDA_ERROR_SYSTEM_DRIVER_MISMATCH"), "{}", check.evidence);
        assert!(check.advice.contains("nvidia-smi"));
    }

    #[test]
    fn a_driver_that_shows_no_gpu_fails() {
        let mut planted = Planted::healthy();
        planted.machine = None;
        planted.report.as_mut().unwrap().cuda_devices.clear();
        let check = planted.check("driver-usable");
        assert_eq!(check.verdict, CheckVerdict::Fail);
        assert!(check.advice.contains("CUDA_VISIBLE_DEVICES"), "{}", check.advice);
    }

    #[test]
    fn a_gpu_that_only_nvml_misses_warns() {
        let mut planted = Planted::healthy();
        let report = planted.report.as_mut().unwrap();
        report.nvml_error = Some("GPU 2: the device has fallen off the bus".to_owned());
        planted.machine = machine_of(report).ok();
        let check = planted.check("driver-usable");
        assert_eq!(check.verdict, CheckVerdict::Warn);
        assert!(check.evidence.ends_with("NVML reports: GPU 2: the device has fallen off the bus"));
    }
}
