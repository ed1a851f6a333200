//! The integration tests: one binary, one module per subject, so that they link once.
#![expect(clippy::disallowed_methods, reason = "tests ask git, and start the program as a user would")]

/// What is refused, with which words and status, and that nothing is written or lost over it.
mod bad_input;
/// After an update: what changed, and whether a file's gain is still there.
mod check;
/// How tests start the program and look at what it left. No test lives here.
mod command;
/// Whole commands as a user types them: both streams, the status, and the files.
mod commands;
/// Configs of published models against what their engines issue, and any folder of configs.
mod configs;
/// A run that is cut off at any event and at any byte, killed, stopped by signals or by a full disk:
/// whatever it held is kept, and it goes on to the same answer.
mod crash;
mod doctor;
/// A command starts with an env file's variables where the file belongs, and nowhere else.
mod exec;
/// What NCCL would choose and why: whole commands, refusals, and the log of the stand-in beside the model.
mod explain;
/// The real binary on the stand-in for driver and NCCL: whole runs, and every fault that can be asked for.
mod fakes;
/// Whole runs in which something goes wrong, against what must come out.
mod faults;
/// Which module of `src/` may know which: the floors, and planted trees that must be caught.
mod floors;
/// The smoke gate: what breaks a collective that nobody tunes for is never adopted.
mod gate;
/// What nccl-tests printed becomes a run: reported, replayed, or refused with nothing written.
mod import;
/// The parts of the comparison of a launch with a shell loop over nccl-tests.
mod launch_speed;
/// Levels of a search: the same cells whatever arms share, and what goes wrong where they share a communicator.
mod levels;
/// Settings written by hand: what is wrong with them, and that nothing is wrong with what the program writes.
mod lint;
/// Arms that carry files, and boxes that NCCL misjudges: the repaired file is found, judged and kept.
mod misjudged;
/// What the model says NCCL would choose, against what NCCL chose.
mod nccl_model;
/// Peer access behind its gate, collectives that overlap, and links that were asleep.
mod peer;
/// Machines with planted effects: what is there is found, what is not there is never adopted.
mod planted;
/// The real binary as a worker and as a probe: it ends with its parent and never talks nonsense.
mod process;
/// What earlier runs remember of arms that failed, and that no content of that file harms anybody.
mod quarantine;
/// Racing: what it finds, what it measures for that, and how often a verdict of it is wrong.
mod racing;
/// What README.md and docs/ say is what the program does, and generated pages are up to date.
mod readme;
/// Recorded runs replayed: the same verdict again, and another one from other numbers.
mod replay;
/// Reports of runs in every state, and that nothing from outside becomes markup.
mod report;
/// A run that was cut off anywhere goes on, and measures nothing twice.
mod resume;
/// Whole runs on the simulated machine, against what was planted in it.
mod simulated;
/// How the rules read the tree: its files, and Rust files as tokens. No rule lives here.
mod source;
/// Tuner tables: made, measured as deployed, delivered, refused; with the real plugin on the stand-in.
mod tables;
/// Everything else that is true of every tracked file: rooms for `unsafe` and for the outside
/// world, banned text, files that must parse, dependencies that must say why.
mod tidy;
/// Simulated times, held to what other people measured.
mod timing;
/// What processes of a server were started with, on planted trees of /proc and on real processes.
mod verify;
