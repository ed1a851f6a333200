//! One rank's forward pass, as matrix products and collectives.

use serde::{Deserialize, Serialize};

use super::{ArmId, PointPhase};

/// What one rank reads and reduces in a pass of its model. Weight matrices appear by the bytes they
/// are stored in: a pass at few tokens is bound by reading them, whatever their format.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct PassShape {
    /// Format of this record.
    pub format: u32,
    /// Model name, for people.
    pub model: String,
    /// Width of the hidden state: elements per token of every all-reduce.
    pub hidden: u64,
    /// Runs of equal layers, first to last.
    pub layers: Vec<LayerRun>,
    /// Bytes of this rank's part of the output head.
    pub head_bytes: u64,
    /// Whether the token embedding ends in an all-reduce, as it does when it is split over ranks.
    pub embedding_reduces: bool,
    /// The draft model, where speculation is on.
    pub draft: Option<DraftShape>,
    /// What was assumed or simplified, in words.
    pub notes: Vec<String>,
}

/// Several equal layers.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct LayerRun {
    /// How many.
    pub count: u32,
    /// Bytes of this rank's attention weights (or of what stands in attention's place).
    pub attention_bytes: u64,
    /// Bytes of this rank's key-value cache read per token of context and sequence.
    pub cache_bytes_per_token: u64,
    /// Whether attention ends in an all-reduce.
    pub attention_reduces: bool,
    /// The feed-forward block; none in layers that have only a mixer.
    pub feed_forward: Option<FeedForward>,
}

/// A feed-forward block. It always ends in one all-reduce.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct FeedForward {
    /// Bytes that every token needs: a dense block, or router and shared experts.
    pub always_bytes: u64,
    /// Bytes of this rank's part of one routed expert; 0 in a dense block.
    pub expert_bytes: u64,
    /// Routed experts.
    pub experts: u32,
    /// Experts a token is routed to.
    pub experts_per_token: u32,
}

impl FeedForward {
    /// Bytes read for this many tokens: routed experts as the expected number of distinct ones,
    /// E (1 - (1 - k/E)^T) for T tokens that each choose k of E independently and evenly.
    pub fn bytes(&self, tokens: u64) -> u64 {
        if self.experts == 0 {
            return self.always_bytes;
        }
        let experts = f64::from(self.experts);
        let missed = (1.0 - f64::from(self.experts_per_token.min(self.experts)) / experts).powf(tokens as f64);
        self.always_bytes + (experts * (1.0 - missed) * self.expert_bytes as f64).round() as u64
    }
}

/// Draft passes before each verify pass.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct DraftShape {
    /// Draft passes of one token per sequence before each verify pass.
    pub passes: u32,
    /// Bytes of this rank's draft weights, head included.
    pub bytes: u64,
    /// All-reduces of one draft pass.
    pub reduces: u32,
    /// Width of the draft's hidden state; none where it is the target's.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub hidden: Option<u64>,
    /// Tokens that each of these passes holds for each sequence; none for one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tokens_per_sequence: Option<u32>,
    /// Tokens for each sequence of the one pass in which the draft reads what the target last
    /// accepted; none where that pass is left out.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub long_tokens_per_sequence: Option<u32>,
}

/// One pass to be timed.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct PassCase {
    /// Tokens of the pass, padded to the engine's buckets.
    pub tokens: u64,
    /// Concurrent sequences.
    pub batch: u32,
    /// The batch's weight; 0 for guard cases.
    pub weight: f64,
    /// Decode, verify or prefill.
    pub phase: PointPhase,
    /// Captured in a graph, or issued call by call.
    pub captured: bool,
    /// Tokens of context whose cache each sequence reads.
    pub context: u64,
}

/// Where collectives are issued.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum PassStream {
    /// On the compute stream.
    Compute,
    /// On a stream of their own, with a fork before and a join after, as torch.distributed does.
    Side,
}

/// What identifies a timed pass.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct PassKey {
    /// Tokens.
    pub tokens: u64,
    /// In a graph, or call by call.
    pub captured: bool,
}

impl PassCase {
    /// What identifies its measurement.
    pub const fn key(&self) -> PassKey {
        PassKey { tokens: self.tokens, captured: self.captured }
    }
}

/// What a trial runs.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct TrialPlan {
    /// The pass of one rank.
    pub shape: PassShape,
    /// The passes that are timed: those that decide, then the guard.
    pub cases: Vec<PassCase>,
    /// Where collectives of captured passes are issued.
    pub stream: PassStream,
    /// Where collectives of passes that are issued call by call are.
    pub eager_stream: PassStream,
    /// Paired launches of each finalist at least.
    pub launches: u32,
    /// And at most; how many follows from the spread of the first ones.
    pub most_launches: u32,
    /// Finalists at most.
    pub finalists: u32,
}

/// One arm's pass in one launch.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct PassMeasurement {
    /// Which arm.
    pub arm: ArmId,
    /// Which pass.
    pub pass: PassKey,
    /// Its block.
    pub block: u32,
    /// Its launch.
    pub launch: u32,
    /// Per run: slowest rank, milliseconds.
    pub runs_ms: Vec<f64>,
    /// The same without collectives.
    pub without_collectives_ms: Vec<f64>,
    /// The same with products beside each collective; empty where the pass is not captured.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub crowded_ms: Vec<f64>,
    /// Bytes of weights the products walked through, smallest over ranks.
    pub arena_bytes: u64,
    /// What each GPU did meanwhile, by rank.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub states: Vec<GpuState>,
    /// Seconds it cost.
    pub duration_s: f64,
}

/// One step of a pass, as a worker carries it out.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "step", rename_all = "kebab-case", deny_unknown_fields)]
pub enum PassStep {
    /// y (rows x columns) = x (rows x inputs) times weights (columns x inputs), in bf16.
    Product {
        /// Rows: tokens, or tokens per distinct expert.
        rows: u64,
        /// Width of the inputs.
        inputs: u64,
        /// Width of the outputs: the block's weight bytes over two bytes and the inputs' width.
        columns: u64,
    },
    /// An in-place all-reduce.
    Reduce {
        /// Elements.
        elements: u64,
    },
}

/// What a pass is timed as.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum PassVariant {
    /// As the engine issues it.
    Full,
    /// Without its collectives: what no setting can change.
    WithoutCollectives,
    /// With products on another stream during each collective: what stolen multiprocessors cost.
    Crowded,
}

/// What a GPU did while it was measured.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct GpuState {
    /// Clock of the multiprocessors.
    pub sm_clock_mhz: Option<u32>,
    /// Power draw.
    pub power_w: Option<f64>,
    /// Temperature.
    pub temperature_c: Option<u32>,
    /// Why the clock was held down, sorted; idling and user settings are no such reasons.
    pub throttle: Vec<String>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn distinct_experts_grow_from_k_to_all() {
        let block = FeedForward { always_bytes: 10, expert_bytes: 100, experts: 384, experts_per_token: 8 };
        assert_eq!(block.bytes(1), 10 + 800);
        assert!(block.bytes(4) > 10 + 3100 && block.bytes(4) < 10 + 3200);
        assert_eq!(block.bytes(100_000), 10 + 38_400);
        let dense = FeedForward { always_bytes: 10, expert_bytes: 0, experts: 0, experts_per_token: 0 };
        assert_eq!(dense.bytes(64), 10);
    }
}
