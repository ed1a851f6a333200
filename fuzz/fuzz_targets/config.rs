//! A model's config.json: it is refused with words, or yields a workload and a forward pass.
#![no_main]

use libfuzzer_sys::fuzz_target;
use nccltune::engine::Engine;
use nccltune::workload::{WorkloadRequest, derive, parse_config, pass_cases, pass_shape, pass_steps};

fuzz_target!(|text: &str| {
    let Ok(config) = parse_config(text, "config.json") else { return };
    for (engine, tensor_parallel) in [(Engine::Sglang, 8), (Engine::Vllm, 3), (Engine::None, 1)] {
        let request = WorkloadRequest {
            engine,
            tensor_parallel,
            batches: vec![(1, 1.0), (16, 2.0)],
            verify_tokens: 4,
            chunk: Some(8192),
            gpu_memory_mib: Some(98_304),
            assume_decoder: true,
        };
        if let Ok(workload) = derive(&config, &request) {
            let total: f64 = workload.points.iter().filter(|point| point.measured).map(|point| point.weight).sum();
            assert!(total.is_finite());
        }
        if let (Ok(shape), Ok(cases)) = (pass_shape(&config, &request), pass_cases(&config, &request, 4096)) {
            for case in &cases {
                let _ = pass_steps(&shape, case);
            }
        }
    }
});
