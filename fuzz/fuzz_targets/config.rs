//! A model's config.json: it is refused with words, or yields a workload and a forward pass.
#![no_main]

use libfuzzer_sys::fuzz_target;
use nccltune::engine::Engine;
use nccltune::workload::{
    Layout, WorkloadRequest, derive, next_token_draft, parse_config_beside, pass_cases, pass_shape, pass_steps,
};

fuzz_target!(|text: &str| {
    // The same text beside itself, as the file that says how weights are stored.
    let Ok(config) = parse_config_beside(text, "config.json", Some(text)) else { return };
    let layout = |dp, ep, stages| Layout { attention_data_parallel: dp, expert_parallel: ep, pipeline_stages: stages };
    for (engine, tensor_parallel, layout) in [
        (Engine::Sglang, 8, layout(false, false, 1)),
        (Engine::Vllm, 3, layout(false, true, 3)),
        (Engine::Sglang, 4, layout(true, false, 2)),
        (Engine::None, 1, layout(false, false, 1)),
    ] {
        for draft in [None, Some(config.clone()), next_token_draft(&config).ok()] {
            let request = WorkloadRequest {
                engine,
                tensor_parallel,
                batches: vec![(1, 1.0), (16, 2.0)],
                verify_tokens: 4,
                chunk: Some(8192),
                gpu_memory_mib: Some(98_304),
                assume_decoder: true,
                layout,
                draft,
                ..WorkloadRequest::default()
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
    }
});
