//! Output of nccl-tests: any bytes at all, since people cut and paste it.
#![no_main]

use libfuzzer_sys::fuzz_target;
use nccltune::nccl_tests::{Wish, read};

fuzz_target!(|bytes: &[u8]| {
    let Ok(output) = read(bytes) else { return };
    let wish = Wish { ranks: Some(8), ..Wish::default() };
    for wish in [Wish::default(), wish] {
        let Ok(launch) = output.launch(&wish) else { continue };
        for cell in &launch.cells {
            assert!(cell.point.bytes > 0 && cell.point.ranks > 1 && !cell.times_us.is_empty());
            assert!(cell.times_us.iter().all(|us| *us > 0.0 && us.is_finite()));
        }
    }
});
