//! Env files: what is read strictly can be written again and means the same; values go through
//! NCCL's own reading.
#![no_main]

use libfuzzer_sys::fuzz_target;
use nccltune::emit::read_header;
use nccltune::env_syntax::{EnvLine, read_env_file, read_env_lines, write_env_file, write_shell_file};
use nccltune::knob::{canonical_value, read_as_nccl};
use nccltune::machine::NcclVersion;

fuzz_target!(|text: &str| {
    let version = NcclVersion::v2(28, 9);
    let _ = read_header(text);
    for (_, name, value) in read_env_lines(text).into_iter().flatten().flatten() {
        let reading = read_as_nccl(&name, &value, version);
        let _ = reading.problem();
        if let Ok(canonical) = canonical_value(&name, &value) {
            // What was made canonical stays as it is.
            assert_eq!(canonical_value(&name, &canonical).ok().as_ref(), Some(&canonical), "{name}={value}");
        }
    }
    let Ok(variables) = read_env_file(text) else { return };
    let lines: Vec<EnvLine> = variables
        .iter()
        .map(|(_, name, value)| EnvLine::Variable { name: name.clone(), value: value.clone() })
        .collect();
    let _ = write_shell_file(&lines);
    let Ok(written) = write_env_file(&lines) else { return };
    let again = read_env_file(&written).expect("what is written can be read");
    let plain = |variables: Vec<(usize, String, String)>| -> Vec<(String, String)> {
        variables.into_iter().map(|(_, name, value)| (name, value)).collect()
    };
    assert_eq!(plain(again), plain(variables));
});
