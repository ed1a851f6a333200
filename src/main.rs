//! The `nccltune` binary: parses, calls one function, maps the result to an exit status.

use std::process::ExitCode;

fn main() -> ExitCode {
    nccltune::cli::main()
}
