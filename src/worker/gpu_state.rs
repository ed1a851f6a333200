//! What the GPU does while it is measured, asked of NVML.

use nvml_wrapper::Nvml;
use nvml_wrapper::bitmasks::device::ThrottleReasons;
use nvml_wrapper::enum_wrappers::device::{Clock, TemperatureSensor};

use crate::record::GpuState;

/// Reasons that hold a clock down against the user's wish, with their names in records.
const REASONS: [(ThrottleReasons, &str); 5] = [
    (ThrottleReasons::SW_POWER_CAP, "sw-power-cap"),
    (ThrottleReasons::HW_SLOWDOWN, "hw-slowdown"),
    (ThrottleReasons::SW_THERMAL_SLOWDOWN, "sw-thermal"),
    (ThrottleReasons::HW_THERMAL_SLOWDOWN, "hw-thermal"),
    (ThrottleReasons::HW_POWER_BRAKE_SLOWDOWN, "hw-power-brake"),
];

/// NVML for one GPU. It only reads; without NVML there is nothing to say, which is no failure.
pub(super) struct GpuWatch {
    nvml: Option<Nvml>,
    address: String,
}

impl GpuWatch {
    pub(super) fn new(address: &str) -> Self {
        let nvml = Nvml::builder().lib_path("libnvidia-ml.so.1".as_ref()).init().ok();
        Self { nvml, address: address.to_owned() }
    }

    pub(super) fn sample(&self) -> Option<GpuState> {
        let device = self.nvml.as_ref()?.device_by_pci_bus_id(self.address.as_str()).ok()?;
        let reasons = device.current_throttle_reasons().unwrap_or(ThrottleReasons::empty());
        let throttle = REASONS
            .iter()
            .filter(|(reason, _)| reasons.contains(*reason))
            .map(|(_, name)| (*name).to_owned())
            .collect();
        Some(GpuState {
            sm_clock_mhz: device.clock_info(Clock::SM).ok(),
            power_w: device.power_usage().ok().map(|milliwatts| f64::from(milliwatts) / 1000.0),
            temperature_c: device.temperature(TemperatureSensor::Gpu).ok(),
            throttle,
        })
    }
}
