//! This process becomes another program.

use std::collections::BTreeMap;
use std::os::unix::process::CommandExt as _;
use std::process::Command;

/// Replaces this process with a program, which the shell's search path finds, and comes back only where that fails.
/// `set` and `removed` are what the program's environment has beside, or lacks of, this one's; everything else is
/// handed on as it is, byte for byte. The signal mask and SIGPIPE are as a shell would give them.
#[expect(clippy::disallowed_methods, reason = "this is the room for starting processes")]
pub fn replace(
    program: &str,
    arguments: &[String],
    set: &BTreeMap<String, String>,
    removed: &[String],
) -> std::io::Error {
    let mut command = Command::new(program);
    command.args(arguments).envs(set);
    for name in removed {
        command.env_remove(name);
    }
    command.exec()
}
