//! How many choices a second the model of NCCL makes on one core, and how long a communicator takes.
//!
//!     cargo run --release --example model_speed
//!
//! Sizes and collectives vary, so that no choice is the one before.
#![expect(clippy::print_stdout, clippy::disallowed_methods, reason = "a stand-alone program that times and prints")]

use std::collections::BTreeMap;
use std::error::Error;
use std::hint::black_box;
use std::time::{Duration, Instant};

use nccltune::collective::Collective;
use nccltune::machine::{CpuNode, Layout, NcclVersion, PcieLink, Topology};
use nccltune::nccl_model::{Communicator, Release, Settings};

const LONG_ENOUGH: Duration = Duration::from_secs(1);
const COLLECTIVES: [Collective; 5] = [
    Collective::AllReduce,
    Collective::AllGather,
    Collective::ReduceScatter,
    Collective::Broadcast,
    Collective::Reduce,
];

fn main() -> Result<(), Box<dyn Error>> {
    let version = NcclVersion::v2(28, 9);
    let release = Release::of(version)?;
    let settings = Settings::read(&BTreeMap::new(), version);
    for (name, layout, capability) in [
        ("8 GPUs on two sockets, PCIe 5", Layout::Sys2, [12, 0]),
        ("8 GPUs on one switch, PCIe 5", Layout::Pix1, [12, 0]),
        ("8 GPUs on NVSwitch", Layout::NvSwitch, [9, 0]),
    ] {
        let topology = Topology::of_layout(layout, 8, capability, PcieLink::x16(5), &CpuNode::amd(0))?;
        let began = Instant::now();
        let communicator = Communicator::new(&topology, &settings, release, None)?;
        let communicator_ms = began.elapsed().as_secs_f64() * 1000.0;
        let began = Instant::now();
        let mut evaluations = 0_u64;
        while began.elapsed() < LONG_ENOUGH {
            for collective in COLLECTIVES {
                for _ in 0..200 {
                    evaluations += 1;
                    let bytes = 1 + evaluations.wrapping_mul(2_654_435_761) % (1 << 26);
                    black_box(communicator.choose(collective, bytes)?);
                }
            }
        }
        let rate = evaluations as f64 / began.elapsed().as_secs_f64();
        println!("{name}: {rate:.0} evaluations/s, a communicator in {communicator_ms:.1} ms");
    }
    Ok(())
}
