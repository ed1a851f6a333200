//! The door: what a user types, and what comes back.
//!
//! Typed arguments become a request without open questions, one story runs, its result is printed,
//! its error becomes a message and an exit status.

mod args;
mod environment;
mod exit;
mod printer;
mod progress;

use std::process::ExitCode;

use clap::Parser;

use crate::probe::{self, PROBE_ARGUMENT, Question};
use crate::worker::{self, protocol::WORKER_ARGUMENT};

/// Everything `main` does.
pub fn main() -> ExitCode {
    let arguments = environment::arguments();
    // Workers and probes are this executable too; they never reach the parser of the user's words.
    match arguments.get(1).map(String::as_str) {
        Some(WORKER_ARGUMENT) => return ExitCode::from(worker::run(environment::allows_fakes())),
        Some(PROBE_ARGUMENT) => {
            let allows_fakes = environment::allows_fakes();
            return ExitCode::from(
                Question::parse(&arguments[2..]).map_or(2, |question| probe::run(&question, allows_fakes)),
            );
        }
        _ => {}
    }
    match args::Cli::try_parse_from(&arguments) {
        Ok(cli) => exit::run(&cli, arguments),
        Err(error) => exit::usage(&error),
    }
}
