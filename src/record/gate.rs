//! What an arm must get right beside what it is tuned for, before it may be a finalist.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::{ArmId, PointKey};
use crate::collective::{Collective, DataType};

/// The collectives of the smoke gate: those a server issues, whether or not the workload names them.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct GatePlan {
    /// Format of this record.
    pub format: u32,
    /// What every arm must get right, by collective: the element types.
    pub kinds: BTreeMap<Collective, Vec<DataType>>,
    /// Over groups of so many ranks, largest first.
    pub ranks: Vec<u32>,
    /// In messages of so many bytes, rounded up to whole elements for every rank.
    pub bytes: Vec<u64>,
    /// What an arm that enables LL128 must get right beside that, in place and out of place.
    pub ll128: LongCheck,
}

/// A check of many sizes, each repeated with fresh values.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct LongCheck {
    /// The element type.
    pub dtype: DataType,
    /// Sizes.
    pub bytes: Vec<u64>,
    /// How often each, in the same order.
    pub repeats: Vec<u32>,
}

/// One collective of the gate.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct GatePoint {
    /// Which.
    pub point: PointKey,
    /// How often, each time with fresh values.
    pub repeats: u32,
}

/// An arm that got everything right in one launch.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct GatePass {
    /// Which arm.
    pub arm: ArmId,
    /// Its block.
    pub block: u32,
    /// Its launch.
    pub launch: u32,
    /// Collectives that were run and checked, repeats included.
    pub checks: u32,
    /// Those of the long check of LL128 among them.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub ll128_checks: u32,
    /// No GPU was involved, so nothing was checked.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub simulated: bool,
    /// Seconds it cost.
    pub duration_s: f64,
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde passes a reference")]
const fn is_zero(count: &u32) -> bool {
    *count == 0
}

/// What the gate said of the arm an answer rests on.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct GateRecord {
    /// Name of the arm.
    pub arm: String,
    /// Collectives that were run and found right on every rank, repeats included.
    pub checks: u32,
    /// Those of the long check of LL128 among them.
    pub ll128_checks: u32,
    /// Nothing was checked: the run is simulated.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub simulated: bool,
}
