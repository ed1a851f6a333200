//! How long a decision takes: nanoseconds per call through the interface that NCCL 2.28 uses, with a table of as many
//! rows as a tuned machine has.
//!
//!     cargo run --release -p nccltune-tuner --example decision_time
#![expect(clippy::print_stdout, clippy::disallowed_methods, reason = "a stand-alone program that prints a table")]

use std::error::Error;
use std::hint::black_box;
use std::io::Write as _;
use std::time::Instant;

use nccltune_tuner::ncclTunerPlugin_v5;

const ROWS: [usize; 3] = [1, 24, 240];
const CALLS: usize = 2_000_000;

fn main() -> Result<(), Box<dyn Error>> {
    println!("rows  nanoseconds per decision");
    for rows in ROWS {
        let mut file = tempfile::NamedTempFile::new()?;
        for row in 0..rows {
            writeln!(file, "allreduce,{},{},ring,ll,16,1,8", row * 1024, row * 1024 + 1023)?;
        }
        file.flush()?;
        // SAFETY: no other thread exists yet.
        unsafe { std::env::set_var("NCCL_TUNER_CONFIG_FILE", file.path()) };
        let tuner = &ncclTunerPlugin_v5.0;
        let mut context = std::ptr::null_mut();
        // SAFETY: the places outlive the call; the plugin reads neither domains nor constants.
        let status =
            unsafe { (tuner.init)(&raw mut context, 1, 8, 1, None, std::ptr::null_mut(), std::ptr::null_mut()) };
        if status != 0 {
            return Err(format!("init returned {status}").into());
        }
        let started = Instant::now();
        for call in 0..CALLS {
            let mut table = [5.0_f32; 21];
            let mut channels = 0;
            let bytes = black_box(call % (rows * 1024));
            // SAFETY: the table has 7 times 3 cells, and everything outlives the call.
            unsafe {
                (tuner.choose)(context, 4, bytes, 1, table.as_mut_ptr().cast(), 7, 3, 1, &raw mut channels);
            }
            black_box((table, channels));
        }
        let nanoseconds = started.elapsed().as_secs_f64() * 1e9 / CALLS as f64;
        // SAFETY: made by init, and given back once.
        unsafe { (tuner.finalize)(context) };
        println!("{rows:4}  {nanoseconds:.1}");
    }
    Ok(())
}
