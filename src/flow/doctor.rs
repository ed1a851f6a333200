//! `nccltune doctor`: is this machine fit?

use std::collections::BTreeMap;
use std::path::PathBuf;

use super::facts::{MachineWish, ask_driver, gather};
use crate::doctor::refuses;
use crate::error_kind::Failure;
use crate::process::Supervisor;
use crate::record::CheckReport;

/// What doctor looks at.
#[derive(Debug, Clone, Default)]
pub struct DoctorRequest {
    /// GPUs, by position or identity; all without.
    pub devices: Vec<String>,
    /// The library a server would load.
    pub nccl_lib: Option<PathBuf>,
    /// Where earlier runs left what they remember, if anything names a place.
    pub state_folder: Option<PathBuf>,
    /// The environment the tool was started in.
    pub environment: BTreeMap<String, String>,
}

/// The checks, and the sentence that says why tuning would refuse, where it would.
pub fn doctor(request: &DoctorRequest) -> Result<(CheckReport, Option<String>), Failure> {
    let supervisor = Supervisor::start()?;
    let asked = ask_driver(&supervisor, &request.environment);
    let wish = MachineWish {
        devices: &request.devices,
        ranks: None,
        nccl_lib: request.nccl_lib.as_deref(),
        state_folder: request.state_folder.as_deref(),
    };
    let facts = gather(&supervisor, &request.environment, asked, &wish)?;
    let refusal = refuses(&facts.checks);
    Ok((facts.checks, refusal))
}
