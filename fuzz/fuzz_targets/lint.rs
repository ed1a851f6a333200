//! Settings written by hand, as each of their consumers would read them: whatever stands in a file, looking at it ends,
//! findings are bounded, and each names a line of the file.
#![no_main]

use libfuzzer_sys::fuzz_target;
use nccltune::engine::Engine;
use nccltune::env_syntax::source::Consumer;
use nccltune::lint::{Circumstances, lint};
use nccltune::machine::NcclVersion;

fuzz_target!(|text: &str| {
    let lines = text.split('\n').count();
    let circumstances = Circumstances { version: NcclVersion::v2(28, 9), engine: Some(Engine::Sglang) };
    for consumer in Consumer::ALL.into_iter().chain([Consumer::guess("settings", text)]) {
        let findings = lint("settings", text, consumer, circumstances);
        assert!(findings.len() <= 1001, "{}", findings.len());
        assert!(findings.iter().all(|finding| finding.line <= lines + 1), "{findings:?}");
    }
});
