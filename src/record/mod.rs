//! Every type that is written to disk. Plain data with `format: 1`; no logic lives here.
//!
//! The rules: additive changes only, the oldest recorded run stays readable, units stand in field
//! names, and unknown fields are errors in files that people write but not in files the tool writes
//! (an older tool may read a newer journal).

mod campaign;
mod check;
mod deployment;
mod explanation;
mod gate;
mod lint;
mod manifest;
mod pass;
mod peer;
mod quarantine;
mod space;
mod update;
mod verdict;
mod workload;

pub use campaign::{
    Arm, ArmId, BlockLaunch, CallTold, CellMeasurement, DropReason, Effective, Event, Flag, JournalLine, Outcome,
    OutcomeKind, Phase, SetLine,
};
pub use check::{Check, CheckReport, CheckVerdict};
pub use deployment::{DeployedProcess, DeploymentCheck, DeploymentVerdict, LackingVariable};
pub use explanation::{
    EffectKind, ExplainedChoice, ExplainedEffect, ExplainedGraph, ExplainedLog, ExplainedRelease, ExplainedRunnerUp,
    ExplainedSize, ExplainedVariable, Explanation, LoggedSize, VariableOrigin,
};
pub use gate::{GatePass, GatePlan, GatePoint, GateRecord, LongCheck};
pub use lint::{LintFinding, LintReport, LintSeverity};
pub use manifest::{
    BackendKind, BufferKind, CheapestLevel, DeadAxis, EarlierArm, FingerprintParts, ImportedFile, Labels, Manifest,
    MisjudgedBox, Origin, Pin, PluginRecord, Profile, Settings, TableRecord, WarmStart,
};
pub use pass::{
    DraftShape, FeedForward, GpuState, LayerRun, PassCase, PassKey, PassMeasurement, PassShape, PassStep, PassStream,
    PassVariant, TrialPlan,
};
pub use peer::{ChannelSearch, ColdAndWarm, OverlapCheck, PeerOutcome, PeerReport, PeerStep, PeerTier};
pub use quarantine::{QuarantineEntry, QuarantineFile, QuarantinedArm};
pub use space::{Axis, NamedArm, Rule, RuleCondition, Space};
pub use update::{CheckedObjective, CheckedPoint, PartChange, UpdateCheck, UpdateVerdict};
pub use verdict::{
    Answer, AnswerKind, BatchObjective, Choice, Contribution, Memory, Objective, PointVerdict, RepairRecord,
    SearchSummary, Statistics, Thresholds, Trial, VerdictKind, Veto,
};
pub use workload::{Point, PointKey, PointPhase, Workload};

/// The format number written by this version.
pub const FORMAT: u32 = 1;
