//! A simulated machine that a person wrote: it is refused with words, or measures what a journal takes.
#![no_main]

use std::collections::BTreeMap;
use std::ops::ControlFlow;

use libfuzzer_sys::fuzz_target;
use nccltune::backend::simulated::{SimulatedBackend, SimulatedMachine};
use nccltune::backend::{Backend as _, CommunicatorPlan, LaunchPlan};
use nccltune::collective::{Collective, DataType};
use nccltune::record::{Arm, ArmId, Event, Phase, PointKey};
use nccltune::seed::Seed;

fn plan() -> LaunchPlan {
    let point = |bytes| PointKey::usual(Collective::AllReduce, DataType::Bf16, bytes, 2);
    let env = BTreeMap::from([("NCCL_MIN_NCHANNELS".to_owned(), "16".to_owned())]);
    let arm = Arm {
        id: ArmId("arm".to_owned()),
        name: "arm".to_owned(),
        env: env.clone(),
        files: BTreeMap::new(),
        server_args: Vec::new(),
    };
    LaunchPlan {
        launch: 0,
        block: 0,
        phase: Phase::Search,
        environment: env,
        communicators: vec![CommunicatorPlan {
            call: None,
            arm,
            variables: BTreeMap::new(),
            points: vec![point(1), point(4096), point(4 << 30)],
            checks: Vec::new(),
            passes: Vec::new(),
        }],
        cell_time_ms: 0.1,
        data_seed: 0,
    }
}

fuzz_target!(|text: &str| {
    let Ok(machine) = SimulatedMachine::parse(text) else { return };
    let _ = (machine.machine(), machine.fingerprint());
    SimulatedBackend::new(machine, Seed(1), BTreeMap::new())
        .run(&plan(), &mut |event| {
            if let Event::CellMeasured(cell) = &event {
                assert!(cell.replays_us.iter().all(|us| us.is_finite() && *us > 0.0), "{:?}", cell.replays_us);
                assert!(cell.duration_s.is_finite() && cell.duration_s >= 0.0, "{}", cell.duration_s);
            }
            ControlFlow::Continue(())
        })
        .expect("a simulated launch cannot fail");
});
