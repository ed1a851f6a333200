//! From a model's `config.json` to the collectives one pass of it issues.
//!
//! Three steps, each usable alone: [`parse_config`] reads what the collectives depend on,
//! [`parse_batches`] reads which concurrencies matter and how much, and [`derive()`] turns both
//! into a [`Workload`](crate::record::Workload). [`from_sizes`] makes one from bare message sizes,
//! [`from_log()`] from what a running server logged.
//! From the same two, [`pass_shape`] and [`pass_cases`] describe a forward pass with the model's own
//! matrices, in which settings can compete as they will be used.
//!
//! The rule is that of plain tensor parallelism, where every layer is split over all GPUs (what other
//! layouts and a draft model add stands in the modules of these names). A pass
//! of T tokens issues one all-reduce of T x hidden size for the embedding, one for each attention
//! block and one for each feed-forward block, strictly one after the other, and ends in one
//! all-gather of the logits. Weights may be stored in 4 or 8 bits; the messages are activations
//! and stay 16 bits wide. Everything that was assumed along the way is listed in the result.
//!
//! Nothing here touches files: callers read the text and name it.

mod architecture;
mod batches;
mod config;
mod derive;
mod draft;
mod error;
mod from_log;
mod gate;
mod layout;
mod pass;
mod presets;
mod shape;
mod sizes;
mod step_log;
mod steps;
mod storage;

pub use architecture::{DraftKind, Standing};
pub use batches::{BatchError, MAX_BATCH, MAX_BATCHES, parse_batches};
pub use config::{AllReduceRule, MAX_CONFIG_BYTES, ModelConfig, parse_config, parse_config_beside};
pub use derive::{MAX_CHUNK, MAX_VERIFY_TOKENS, SHORT_PREFILL_TOKENS, WorkloadRequest, derive};
pub use draft::next_token_draft;
pub use error::WorkloadError;
pub use from_log::{LogRequest, from_log, step_tokens};
pub use gate::{GatePoints, gate_plan, gate_points, measured_by};
pub use layout::{Layout, MAX_STAGES};
pub use pass::{pass_cases, pass_shape};
pub use presets::{preset, preset_names};
pub use shape::{Cache, FeedForwardShape, LayerShape, Matrix, ModelShape};
pub use sizes::{MAX_SIZES, SizesRequest, from_sizes};
pub use step_log::{MAX_LOG_BYTES, StepLog};
pub use steps::pass_steps;
pub use storage::Stored;

use crate::collective::Placement;
use crate::record::Point;

/// The largest message a point may ask for, in bytes. No serving pass comes near it, and a pair of
/// buffers of this size is already more than a GPU that holds a model can spare.
pub const MAX_MESSAGE_BYTES: u64 = 4 << 30;

/// Whether this version's workers can measure the point: its bytes must be whole elements for every rank,
/// and where a part of the ranks forms a group, the caller sees to it that they divide evenly. What cannot
/// be measured is listed as such and decides nothing.
pub fn measurable(point: &Point) -> bool {
    let room = point.form.placement == Placement::OutOfPlace || point.collective.works_in_place();
    room && point.ranks >= 2 && point.collective.count(point.bytes, point.dtype, point.ranks).is_some()
}

/// Marks the point by [`measurable`]; every point of this module passes here.
fn marked(mut point: Point) -> Point {
    point.measured = measurable(&point);
    point
}

/// Text from a file somebody else wrote, made fit for one line of a message: quoted, escaped and
/// short.
fn shown(text: &str) -> String {
    const LONGEST: usize = 60;
    let mut start: String = text.chars().take(LONGEST).collect();
    if start.len() < text.len() {
        start.push('…');
    }
    format!("{start:?}")
}
