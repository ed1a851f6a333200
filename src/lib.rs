//! nccltune: from a model's config and this machine to the NCCL settings its inference server
//! should start with, proven by measurement.
//!
//! The floors of this crate are described in ARCHITECTURE.md and enforced by `tests/it/floors.rs`:
//! a module may use lower floors only.

// 0 words
pub mod canonical;
pub mod clock;
pub mod collective;
pub mod engine;
pub mod error_kind;
pub mod file_kind;
pub mod knob;
pub mod machine;
pub mod seed;
pub mod units;
// 1 records
pub mod record;
pub mod stats;
// 2 descriptions
pub mod bindings;
pub mod dynlib;
pub mod env_syntax;
pub mod evidence;
pub mod file_lock;
pub mod fingerprint;
pub mod nccl_log;
pub mod nccl_model;
pub mod space;
pub mod tuner_table;
pub mod wording;
pub mod workload;
// 3 tools
pub mod journal;
pub mod misjudged;
pub mod nccl_tests;
pub mod probe;
pub mod process;
pub mod process_tree;
pub mod quarantine;
pub mod repair;
pub mod shared_memory;
pub mod worker;
// between tools and work
pub mod discovery;
// 4 work
pub mod backend;
pub mod search;
// 5 judgement
pub mod choice;
pub mod lint;
// 6 campaign
pub mod campaign;
// 7 telling
pub mod doctor;
pub mod emit;
pub mod report;
// 8 flow
pub mod flow;
// 9 door
pub mod cli;
