//! What a model's pass asks of the collectives.

use serde::{Deserialize, Serialize};

use crate::collective::{Collective, DataType, Form, Issue, Placement};

/// What identifies a measurement, whoever asks for it: two batches that pad to the same message
/// share it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct PointKey {
    /// The operation.
    pub collective: Collective,
    /// The element type.
    pub dtype: DataType,
    /// The larger of send and receive buffer per rank, as nccl-tests and the tuner interface count.
    pub bytes: u64,
    /// Ranks taking part; fewer than the launch has where a part of them forms a group.
    pub ranks: u32,
    /// Captured or eager, in place or not.
    #[serde(default, skip_serializing_if = "Form::is_plain")]
    pub form: Form,
}

impl PointKey {
    /// A captured operation, in place or not as engines issue it.
    pub const fn usual(collective: Collective, dtype: DataType, bytes: u64, ranks: u32) -> Self {
        Self { collective, dtype, bytes, ranks, form: Form::usual(collective) }
    }
}

impl std::fmt::Display for PointKey {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(formatter, "{} {} {} B x{}", self.collective, self.dtype, self.bytes, self.ranks)?;
        if self.form.issue == Issue::Eager {
            formatter.write_str(" eager")?;
        }
        if self.form.placement == Placement::OutOfPlace {
            formatter.write_str(" out of place")?;
        }
        Ok(())
    }
}

/// Which part of serving a point belongs to.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum PointPhase {
    /// One token per sequence.
    Decode,
    /// The target checks several tokens per sequence.
    Verify,
    /// A chunk of a prompt.
    Prefill,
    /// A draft model proposes tokens, before the target checks them or after.
    Draft,
    /// One step of a running server, as its log shows it: whatever passes that held.
    Step,
    /// A size the user named, part of no model.
    Size,
}

impl PointPhase {
    /// The name in files and tables.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Decode => "decode",
            Self::Verify => "verify",
            Self::Prefill => "prefill",
            Self::Draft => "draft",
            Self::Step => "step",
            Self::Size => "size",
        }
    }
}

/// One collective of one pass.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Point {
    /// The operation.
    pub collective: Collective,
    /// The element type.
    pub dtype: DataType,
    /// The larger of send and receive buffer per rank.
    pub bytes: u64,
    /// Ranks taking part.
    pub ranks: u32,
    /// How often one pass issues it.
    pub calls_per_pass: u32,
    /// Concurrent sequences before padding: the term of the objective to which the point belongs.
    /// For sizes that the user named it is the position in the list, so that each is a term of its
    /// own; for guard points it is 1 and means nothing.
    pub batch: u32,
    /// The batch's share of the objective; the points of one batch carry the same weight, and
    /// weights sum to 1 over batches. Guard points carry 0.
    pub weight: f64,
    /// Which part of serving it belongs to.
    pub phase: PointPhase,
    /// Whether this version's workers can measure it. An unmeasured point decides nothing and is
    /// listed as unmeasured in every answer.
    pub measured: bool,
    /// Where in the model it is issued, in words.
    pub origin: String,
    /// Captured or eager, in place or not.
    #[serde(default, skip_serializing_if = "Form::is_plain")]
    pub form: Form,
}

impl Point {
    /// What identifies its measurement.
    pub const fn key(&self) -> PointKey {
        PointKey {
            collective: self.collective,
            dtype: self.dtype,
            bytes: self.bytes,
            ranks: self.ranks,
            form: self.form,
        }
    }
}

/// Points that decide, and a guard set that must not regress.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Workload {
    /// Format of this record.
    pub format: u32,
    /// Model name or file name, for people.
    pub model: String,
    /// Engine whose rules were applied.
    pub engine: String,
    /// Its release, where the user named one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub engine_version: Option<String>,
    /// Tensor-parallel size.
    pub tensor_parallel: u32,
    /// Tokens the target checks per sequence and pass; 1 without speculation.
    pub verify_tokens: u32,
    /// Draft model whose passes are among the points.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub draft: Option<String>,
    /// How the model is spread beside tensor parallelism, in words; empty where it is not.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub layout: Vec<String>,
    /// The points of the objective.
    pub points: Vec<Point>,
    /// Sizes that must not regress: prefill chunks and their logits.
    pub guard: Vec<Point>,
    /// Everything that was assumed rather than read.
    pub assumptions: Vec<String>,
    /// Where a server's log and the model's config contradict each other.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub disagreements: Vec<String>,
}
