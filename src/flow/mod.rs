//! The stories: what happens when a command runs, phase by phase. Nothing here prints.

pub mod check;
mod dead_axes;
mod deployed;
mod directory;
pub mod doctor;
pub mod emit;
mod environment;
pub mod exec;
pub mod explain;
mod facts;
mod files;
pub mod import;
mod levels;
pub mod lint;
mod live;
mod misjudged;
mod overlap;
mod peer;
mod plugin;
mod quarantine;
pub mod report;
mod summary;
mod tables;
pub mod tune;
mod warm;
pub mod workload;

pub use directory::write_file;
pub use environment::PinError;
pub use facts::{BackendChoice, MachineFacts};
pub use misjudged::RepairGraph;
pub use peer::PeerAccess;
pub use tables::TableWish;

use crate::campaign::News;

/// What a story tells while it runs.
#[derive(Debug)]
pub enum Update<'a> {
    /// Something the user should know, once.
    Notice(String),
    /// Where the run is written.
    Directory(&'a std::path::Path),
    /// News of the campaign.
    Campaign(News<'a>),
}

/// Who listens to a story.
pub type Listener<'a> = &'a mut dyn FnMut(Update<'_>);
