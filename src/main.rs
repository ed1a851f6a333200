//! The `nccltune` binary.
fn main() {}
