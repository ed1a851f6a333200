//! NCCL's log: any bytes at all, since other programs write into it.
#![no_main]

use libfuzzer_sys::fuzz_target;
use nccltune::collective::Collective;
use nccltune::knob::{self, read_as_nccl};
use nccltune::machine::NcclVersion;
use nccltune::nccl_log::{self, NcclLog};

fuzz_target!(|bytes: &[u8]| {
    let log = nccl_log::parse(bytes);
    let _ = log.communicator_channels();
    let _ = log.transport();
    for operation in &log.operations {
        assert!(
            log.operation(Collective::AllReduce, operation.bytes).is_none_or(|found| found.bytes == operation.bytes)
        );
    }
    let version = NcclVersion::v2(28, 9);
    for knob in knob::all() {
        // What the log says a variable was set to is as foreign as the rest.
        for set in log.set_by_environment.iter().filter(|set| set.variable == knob.name).take(4) {
            let reading = read_as_nccl(knob.name, &set.value, version);
            for route in knob.routes(version) {
                let _ = log.proves(knob.name, route.proof, &reading);
            }
        }
    }
    // A worker sends the log piece by piece, line by line: that makes no difference.
    let mut by_line = NcclLog::default();
    for line in bytes.split(|byte| *byte == b'\n') {
        by_line.add_line(line);
    }
    assert_eq!(by_line, log);
});
