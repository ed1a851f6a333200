//! A server's log of its calls: any bytes at all, since everything a server prints is in it.
#![no_main]

use std::io::Read;

use libfuzzer_sys::fuzz_target;
use nccltune::workload::{LogRequest, MAX_MESSAGE_BYTES, StepLog, WorkloadRequest, from_log, parse_config, step_tokens};

const CONFIG: &str = r#"{"architectures": ["LlamaForCausalLM"], "torch_dtype": "bfloat16", "hidden_size": 64,
    "num_hidden_layers": 4, "vocab_size": 128, "num_attention_heads": 8}"#;

/// Hands out a few bytes at a time, as a pipe may.
struct Drops<'a>(&'a [u8]);

impl Read for Drops<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> std::io::Result<usize> {
        let length = buffer.len().min(self.0.len()).min(7);
        let (now, later) = self.0.split_at(length);
        buffer[..length].copy_from_slice(now);
        self.0 = later;
        Ok(length)
    }
}

fuzz_target!(|bytes: &[u8]| {
    let log = StepLog::parse(bytes);
    let config = parse_config(CONFIG, "config.json").expect("a config");
    for (config, tensor_parallel) in [(None, None), (Some(&config), None), (Some(&config), Some(8))] {
        let request =
            LogRequest { name: "step.log", tensor_parallel, config, request: WorkloadRequest::default() };
        let read = from_log(&log, &request);
        let in_drops = from_log(&StepLog::read(Drops(bytes)).expect("memory"), &request);
        assert_eq!(read, in_drops);
        let Ok(workload) = read else { continue };
        for point in &workload.points {
            assert!(point.bytes > 0 && point.bytes <= MAX_MESSAGE_BYTES && point.calls_per_pass > 0);
        }
        if let Some(config) = config {
            let _ = step_tokens(&workload, config);
        }
    }
});
