//! A graph file of NCCL's: refused with words, or the same after it was written; and the model takes it, or
//! says why not.
#![no_main]

use std::collections::BTreeMap;

use libfuzzer_sys::fuzz_target;
use nccltune::collective::Collective;
use nccltune::machine::{CpuNode, Layout, NcclVersion, PcieLink, Topology};
use nccltune::nccl_model::{Communicator, GraphFile, Release, Settings};

fuzz_target!(|text: &str| {
    let file = match GraphFile::read(text) {
        Ok(file) => file,
        Err(error) => {
            assert!(error.to_string().len() < 1000, "a message is bounded: {error}");
            return;
        }
    };
    assert_eq!(GraphFile::read(&file.write()), Ok(file.clone()), "what is written reads back");
    let topology = Topology::of_layout(Layout::Pix1, 4, [8, 9], PcieLink::x16(4), &CpuNode::amd(0)).expect("a machine");
    for version in [NcclVersion::v2(19, 3), NcclVersion::v2(28, 9)] {
        let settings = Settings::read(&BTreeMap::new(), version);
        let release = Release::of(version).expect("a release");
        let Ok(communicator) = Communicator::new(&topology, &settings, release, Some(&file)) else { continue };
        for bytes in [1, 40_000, 1 << 40] {
            let _ = communicator.choose(Collective::AllReduce, bytes);
        }
        assert!(!communicator.ring_transports().is_empty(), "neighbours exchange data somehow");
    }
});
