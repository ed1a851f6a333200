//! Why no workload could be made, and what to change.

use super::batches::BatchError;
use super::{MAX_CHUNK, MAX_CONFIG_BYTES, MAX_MESSAGE_BYTES, MAX_SIZES, MAX_VERIFY_TOKENS};
use crate::collective::{Collective, DataType};
use crate::error_kind::{Classified, ErrorKind};
use crate::units::{format_size, group_thousands};

/// Why no workload could be made. `name` is always what the caller called the config.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum WorkloadError {
    /// The text is larger than [`MAX_CONFIG_BYTES`].
    #[error(
        "{name}: {} is more than any config.json; at most {} are read",
        format_size(*bytes as u64),
        format_size(MAX_CONFIG_BYTES as u64)
    )]
    TooLarge {
        /// The config.
        name: String,
        /// Its size.
        bytes: usize,
    },
    /// Not JSON, or nested too deeply.
    #[error("{name}:{line}:{column}: not readable as JSON: {message}")]
    Json {
        /// The config.
        name: String,
        /// Line, from 1.
        line: usize,
        /// Column, from 1.
        column: usize,
        /// What the parser says.
        message: String,
    },
    /// JSON, but no object.
    #[error("{name}: expected an object with the model's fields, found {found}")]
    NotAnObject {
        /// The config.
        name: String,
        /// What stands there.
        found: &'static str,
    },
    /// Fields the rule needs are not there, neither outside nor in the text model's own section.
    #[error(
        "{name}: {} {} missing; give the config.json of the model itself, as its model card stores it{}",
        fields.join(", "),
        if fields.len() == 1 { "is" } else { "are" },
        architecture.as_deref().map_or_else(String::new, |architecture| format!(
            " ({architecture} is not known here either: with these fields, --assume-decoder would count it as an \
             ordinary decoder, 1 + 2 x layers all-reduces a pass)"
        ))
    )]
    MissingFields {
        /// The config.
        name: String,
        /// The architecture, where nobody knows it, quoted and shortened.
        architecture: Option<String>,
        /// All of them.
        fields: Vec<&'static str>,
    },
    /// A field that cannot be what it says.
    #[error("{name}: {field} should be {expected}, found {found}")]
    InvalidField {
        /// The config.
        name: String,
        /// The field.
        field: &'static str,
        /// What was expected.
        expected: String,
        /// What stands there, quoted and shortened.
        found: String,
    },
    /// Nobody read how this architecture communicates.
    #[error(
        "{name}: how many collectives {architecture} issues is not known ({reason}); \
         --assume-decoder counts it as an ordinary decoder, one all-reduce for the embedding and two per layer, \
         and says so in the result"
    )]
    UnknownArchitecture {
        /// The config.
        name: String,
        /// The architecture, quoted and shortened.
        architecture: String,
        /// Why it is not taken as one.
        reason: &'static str,
    },
    /// The collectives are known, the weights are not.
    #[error(
        "{name}: its forward pass cannot be shaped, because {}; the micro-benchmark does not need this and works \
         without, the trial inside a forward pass does not",
        reasons.join(" and ")
    )]
    NoPassShape {
        /// The config.
        name: String,
        /// What is missing or cannot be what it says, each in words.
        reasons: Vec<String>,
    },
    /// A speculative draft where the target is wanted.
    #[error(
        "{name}: {architecture} is a speculative draft; give the config.json of the target model that it drafts for, and \
         this one with --draft-model"
    )]
    Draft {
        /// The config.
        name: String,
        /// The architecture, quoted and shortened.
        architecture: String,
    },
    /// A log without a single call.
    #[error(
        "{name}: holds no line such as \"NCCL INFO AllReduce: opCount ... count ... datatype ...\"{}; start the server with \
         NCCL_DEBUG=INFO NCCL_DEBUG_SUBSYS=COLL, its CUDA graphs off so that every step is logged, and keep what one \
         step prints",
        if *other_lines > 0 { format!(", and {other_lines} other lines of NCCL's") } else { String::new() }
    )]
    NoCalls {
        /// The file.
        name: String,
        /// Lines of NCCL's that are no calls.
        other_lines: u64,
    },
    /// A log of communicators of one rank.
    #[error("{name}: every call in it is one rank's alone, which sends nothing; log a server over several GPUs")]
    LoneRanks {
        /// The file.
        name: String,
    },
    /// A log that does not say how many ranks take part.
    #[error("{name}: its lines do not say how many ranks take part; say so with --tp N")]
    NoRanks {
        /// The file.
        name: String,
    },
    /// Calls, and none that is a collective of floating-point numbers.
    #[error(
        "{name}: none of the {calls} calls of a step is a collective of bf16, fp16 or fp32; what the server logs between \
         steps is not what its passes issue"
    )]
    NoPoints {
        /// The file.
        name: String,
        /// Calls of the step.
        calls: usize,
    },
    /// A draft that cannot be used as asked.
    #[error("speculative decoding does not work this way: {reason}")]
    DraftUse {
        /// What does not fit.
        reason: String,
    },
    /// `--draft-model mtp` for a model that brings no such layers.
    #[error(
        "{name}: the config counts no layers for predicting the token after next (num_nextn_predict_layers), so the \
         model cannot draft for itself; name the draft's config.json"
    )]
    NoNextTokenLayers {
        /// The config.
        name: String,
    },
    /// A way to spread the model that cannot be, or is not known.
    #[error("{flag} does not work here: {reason}")]
    Layout {
        /// The flag that asks for it.
        flag: &'static str,
        /// Why not.
        reason: String,
    },
    /// Fewer than two ranks.
    #[error("{ranks} GPU issues no collectives, so there is nothing to tune; use at least 2, for example --tp 2")]
    TooFewRanks {
        /// As asked for.
        ranks: u32,
    },
    /// The model cannot be split this way.
    #[error("{name}: tensor parallelism over {tensor_parallel} GPUs does not work: {reason}; {}", works(fits))]
    TensorParallel {
        /// The config.
        name: String,
        /// As asked for.
        tensor_parallel: u32,
        /// The rule that it breaks, with numbers.
        reason: String,
        /// Sizes that work, smallest first.
        fits: Vec<u32>,
    },
    /// Zero, or more than [`MAX_VERIFY_TOKENS`].
    #[error(
        "{given} tokens to verify is out of range: from 1 (no speculation) to {MAX_VERIFY_TOKENS}, the root included"
    )]
    VerifyTokens {
        /// As asked for.
        given: u32,
    },
    /// Zero, or more than [`MAX_CHUNK`].
    #[error("a prefill chunk of {given} tokens is out of range: from 1 to {}", group_thousands(u64::from(MAX_CHUNK)))]
    Chunk {
        /// As asked for.
        given: u32,
    },
    /// A message beyond [`MAX_MESSAGE_BYTES`].
    #[error(
        "{what} would reduce {}, and messages above {} are not measured; use a smaller one",
        format_size(*bytes),
        format_size(MAX_MESSAGE_BYTES)
    )]
    MessageTooLarge {
        /// The batch or chunk, in words.
        what: String,
        /// Bytes per rank.
        bytes: u64,
    },
    /// The list of batches.
    #[error(transparent)]
    Batches(#[from] BatchError),
    /// No sizes, or more than [`MAX_SIZES`].
    #[error("{count} sizes are given; give 1 to {MAX_SIZES}")]
    SizeCount {
        /// How many.
        count: usize,
    },
    /// A size that no message of this type can have.
    #[error(
        "{} is no possible size: {collective} of {dtype} takes multiples of {whole_bytes} bytes, whole elements for \
         every rank, up to {}",
        format_size(*bytes),
        format_size(MAX_MESSAGE_BYTES)
    )]
    Size {
        /// As given.
        bytes: u64,
        /// The operation.
        collective: Collective,
        /// The element type.
        dtype: DataType,
        /// Bytes of one element for every rank.
        whole_bytes: u64,
    },
    /// In one buffer, what needs two.
    #[error("{collective} does not work in place: a rank cannot send from where it receives")]
    NotInPlace {
        /// The operation.
        collective: Collective,
    },
    /// The same size twice.
    #[error("size {} is given twice; name it once", format_size(*bytes))]
    DuplicateSize {
        /// The size.
        bytes: u64,
    },
}

fn works(fits: &[u32]) -> String {
    match fits {
        [] => "no number of GPUs above 1 works for this model".to_owned(),
        [only] => format!("only {only} works"),
        _ => {
            let listed: Vec<String> = fits.iter().map(u32::to_string).collect();
            format!("sizes that work: {}", listed.join(", "))
        }
    }
}

impl Classified for WorkloadError {
    fn kind(&self) -> ErrorKind {
        ErrorKind::Usage
    }
}

impl Classified for BatchError {
    fn kind(&self) -> ErrorKind {
        ErrorKind::Usage
    }
}
