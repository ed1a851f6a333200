//! Busy links: an idle GPU lets its PCIe link down to the slowest speed, and a library that asks how
//! fast the link is would hear that.

use std::time::Duration;

use super::measure::StepError;
use crate::bindings::cuda::Device;
use crate::clock::Deadline;

/// Bytes of each copy.
const COPY_BYTES: usize = 16 << 20;

/// Copies to the GPU and back for so long.
pub(super) fn warm_up(device: &Device, time: Duration) -> Result<(), StepError> {
    let buffer = device.allocate(COPY_BYTES)?;
    let mut numbers = vec![0x3c80_u16; COPY_BYTES / 2];
    let deadline = Deadline::after(time);
    loop {
        device.write(&buffer, 0, &numbers)?;
        buffer.read(0, &mut numbers)?;
        if deadline.is_over() {
            return Ok(());
        }
    }
}
