//! A topology that a person wrote, with an environment: refused with words, or every message gets a choice.
#![no_main]

use std::collections::BTreeMap;

use libfuzzer_sys::fuzz_target;
use nccltune::collective::Collective;
use nccltune::machine::{NcclVersion, Topology};
use nccltune::nccl_model::{Communicator, Release, Settings};

/// Larger machines take a search longer, and show no more.
const MAX_GPUS: usize = 6;

fuzz_target!(|text: &str| {
    let (environment, text) = text.split_once("\n---\n").unwrap_or(("", text));
    let Ok(topology) = toml::from_str::<Topology>(text) else { return };
    if let Err(error) = topology.validate() {
        assert!(error.to_string().len() < 1000, "a message is bounded: {error}");
        return;
    }
    if topology.gpus.len() > MAX_GPUS {
        return;
    }
    let pairs = environment.lines().filter_map(|line| line.split_once('='));
    let environment: BTreeMap<String, String> =
        pairs.map(|(name, value)| (name.to_owned(), value.to_owned())).collect();
    for version in [NcclVersion::v2(19, 3), NcclVersion::v2(22, 3), NcclVersion::v2(28, 9), NcclVersion::v2(30, 7)] {
        let settings = Settings::read(&environment, version);
        let release = Release::of(version).expect("a release");
        let Ok(communicator) = Communicator::new(&topology, &settings, release, None) else { continue };
        for finding in communicator.findings() {
            assert!(!finding.to_string().is_empty());
        }
        for collective in [Collective::AllReduce, Collective::AllGather, Collective::Broadcast] {
            for bytes in [1, 40_000, 1 << 26, 1 << 40] {
                let Ok(choice) = communicator.choose(collective, bytes) else { continue };
                assert!((1..=64).contains(&choice.channels), "{choice:?}");
                assert!(choice.predicted_us.is_finite(), "{choice:?}");
            }
        }
    }
});
