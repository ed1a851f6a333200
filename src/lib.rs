//! nccltune: from a model's config and this machine to the NCCL settings its inference server
//! should start with, proven by measurement.
//!
//! The floors of this crate are described in ARCHITECTURE.md and enforced by `tests/it/floors.rs`:
//! a module may use lower floors only.

// 0 words
pub mod canonical;
pub mod clock;
pub mod collective;
pub mod error_kind;
pub mod machine;
pub mod seed;
pub mod units;
// 1 records
pub mod record;
// 2 descriptions
pub mod env_syntax;
pub mod wording;
// 7 telling
pub mod emit;
pub mod report;
