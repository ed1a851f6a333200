//! The integration tests: one binary, one module per subject, so that they link once.
#![expect(clippy::disallowed_methods, reason = "tests ask git, and start the program as a user would")]

/// Which module of `src/` may know which: the floors, and planted trees that must be caught.
mod floors;
/// What README.md and docs/ say is what the program does, and generated pages are up to date.
mod readme;
/// Whole runs on the simulated machine, against what was planted in it.
mod simulated;
/// How the rules read the tree: its files, and Rust files as tokens. No rule lives here.
mod source;
/// Everything else that is true of every tracked file: rooms for `unsafe` and for the outside
/// world, banned text, files that must parse, dependencies that must say why.
mod tidy;
