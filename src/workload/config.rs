//! Reading a model's `config.json`, which anybody may have written.

use std::borrow::Cow;

use serde_json::{Map, Value};

use super::architecture::{DraftKind, Shape, Standing, recognise};
use super::draft::last_layers;
use super::shape::{ModelShape, read_shape};
use super::{WorkloadError, shown};
use crate::collective::DataType;

/// The largest config text that is read, in bytes. Real ones have a few kilobytes, with long lists
/// of unquantised layers a few hundred.
pub const MAX_CONFIG_BYTES: usize = 16 << 20;

/// Bounds far above any model, so that later products cannot overflow.
const MAX_HIDDEN_SIZE: u64 = 1 << 20;
const MAX_LAYERS: u64 = 1 << 16;
const MAX_VOCABULARY: u64 = 1 << 28;
const MAX_HEADS: u64 = 1 << 20;

/// Where multimodal models keep the config of their language model. `text_config` is what every
/// nested config seen so far uses; the other two are older spellings of the same thing.
const TEXT_SECTIONS: [&str; 3] = ["text_config", "llm_config", "language_config"];

/// One field by its name today and those it had before: GPT-2's, Falcon's, MPT's, ChatGLM's.
pub(super) type Names = [&'static str];
const HIDDEN_SIZE: &Names = &["hidden_size", "n_embd", "d_model", "n_embed"];
const LAYERS: &Names = &["num_hidden_layers", "n_layer", "n_layers", "num_layers"];
const VOCABULARY: &Names = &["vocab_size", "padded_vocab_size", "n_vocab"];
pub(super) const HEADS: &Names = &["num_attention_heads", "n_head", "n_heads", "num_heads"];
pub(super) const KEY_VALUE_HEADS: &Names =
    &["num_key_value_heads", "n_head_kv", "num_kv_heads", "n_kv_heads", "multi_query_group_num"];
pub(super) const EXPERTS: &Names = &["n_routed_experts", "num_experts", "num_local_experts"];
/// Layers for predicting the token after next: DeepSeek and GLM, then Qwen, MiMo, MiniMax.
const NEXT_TOKEN_LAYERS: &Names =
    &["num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_layers", "num_mtp_modules"];

/// How many all-reduces one pass issues, and from what.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AllReduceRule {
    /// The embedding, and the attention and feed-forward output of every layer: 1 + 2 x layers.
    Decoder {
        /// Layers of the language model.
        layers: u32,
    },
    /// The embedding, and the one mixer of every layer: 1 + layers.
    OneMixer {
        /// Layers of the language model.
        layers: u32,
    },
    /// The embedding, and the parts that layers kept.
    Blocks {
        /// Layers with attention.
        attention: u32,
        /// Layers with a feed-forward part.
        feed_forward: u32,
    },
    /// The two blocks of every layer, with no embedding before them: 2 x layers.
    LayersAlone {
        /// Layers.
        layers: u32,
    },
}

impl AllReduceRule {
    /// All-reduces per pass.
    pub const fn calls(self) -> u32 {
        match self {
            Self::Decoder { layers } => 1 + 2 * layers,
            Self::OneMixer { layers } => 1 + layers,
            Self::Blocks { attention, feed_forward } => 1 + attention + feed_forward,
            Self::LayersAlone { layers } => 2 * layers,
        }
    }

    /// Where in the model they are issued, in words.
    pub fn origin(self) -> String {
        match self {
            Self::Decoder { layers: 1 } => "embedding, attention and feed-forward of 1 layer".to_owned(),
            Self::Decoder { layers } => format!("embedding, attention and feed-forward of {layers} layers"),
            Self::OneMixer { layers } => format!("embedding, mixer of {layers} layers"),
            Self::Blocks { attention, feed_forward } => {
                format!("embedding, {attention} attention and {feed_forward} feed-forward blocks")
            }
            Self::LayersAlone { layers } => format!("attention and feed-forward of {layers} layers"),
        }
    }
}

/// What the collectives of a model depend on, and its matrices as far as they can be told.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ModelConfig {
    /// What the caller called it.
    pub name: String,
    /// The architecture that decided, if the config names one.
    pub architecture: Option<String>,
    /// How well that architecture is known.
    pub standing: Standing,
    /// Width of the residual stream, in elements.
    pub hidden_size: u64,
    /// Tokens the model can name; none where it ends before its head.
    pub vocab_size: Option<u64>,
    /// Tokens a draft's head can name, where that is cut down from the target's.
    pub draft_vocab_size: Option<u64>,
    /// Query heads.
    pub attention_heads: Option<u64>,
    /// Key-value heads.
    pub key_value_heads: Option<u64>,
    /// Groups of the state-space mixers, where the model has such.
    pub mamba_groups: Option<u64>,
    /// Routed experts of a layer that has them.
    pub experts: Option<u64>,
    /// Layers it brings for predicting the token after next, which may serve as its own draft.
    pub next_token_layers: Option<u32>,
    /// The element type of activations, and so of messages.
    pub dtype: DataType,
    /// How many all-reduces a pass issues.
    pub all_reduces: AllReduceRule,
    /// What was assumed while reading.
    pub notes: Vec<String>,
    /// The weight matrices, or why they cannot be told. Only the trial in a forward pass needs them;
    /// see [`pass_shape`](super::pass_shape).
    pub shape: Result<ModelShape, Vec<String>>,
}

/// Engines round the vocabulary up to a multiple of this before they split it over the GPUs.
/// Source: sgl-project/sglang, python/sglang/srt/layers/vocab_parallel_embedding.py, and the file
/// of the same name in vllm-project/vllm; read in a snapshot, not run.
const VOCABULARY_PADDING: u64 = 64;

impl ModelConfig {
    /// The vocabulary as the engines split it, a draft's own where it has one; none where the model
    /// has no head.
    pub fn padded_vocabulary(&self) -> Option<u64> {
        self.draft_vocab_size.or(self.vocab_size).map(|size| size.next_multiple_of(VOCABULARY_PADDING))
    }

    /// Bytes that every rank ends with after gathering this many rows of logits: the engines gather in
    /// the activation type, before anything is widened, with the vocabulary still padded.
    pub fn logits_bytes(&self, rows: u64) -> Option<u64> {
        Some(rows * self.padded_vocabulary()? * self.dtype.size_bytes())
    }
}

/// Reads the text of a `config.json`; `name` is what messages call it (a path or a preset).
///
/// Fields of a nested language model go before those around it. `Infinity` and `NaN`, which
/// Python's writer emits and JSON does not know, are read as null.
///
/// Numbers may be written as `4096.0`, and fields go by the names of older families too (`n_layer`,
/// `n_embd`, `n_head`); such a name is noted.
pub fn parse_config(text: &str, name: &str) -> Result<ModelConfig, WorkloadError> {
    parse_config_beside(text, name, None)
}

/// The same, with the text of the `hf_quant_config.json` that lies beside it, if one does: some tools
/// keep there how weights are stored. It counts where the config itself says nothing of it; it decides
/// no collective, so one that cannot be read is a note.
pub fn parse_config_beside(text: &str, name: &str, quantisation: Option<&str>) -> Result<ModelConfig, WorkloadError> {
    if text.len() > MAX_CONFIG_BYTES {
        return Err(WorkloadError::TooLarge { name: name.to_owned(), bytes: text.len() });
    }
    let root = match parse_json(text, name)? {
        Value::Object(root) => root,
        other => return Err(WorkloadError::NotAnObject { name: name.to_owned(), found: kind_of(&other) }),
    };
    let inner = TEXT_SECTIONS.iter().find_map(|section| root.get(*section)?.as_object());
    let fields = Fields { name, outer: &root, inner };

    let recognised = recognise(&architectures(&root), &inner.map(architectures).unwrap_or_default());
    let mut notes = Vec::new();
    if let Some(architecture) = &recognised.architecture {
        if recognised.by_inner_name {
            notes.push(format!("counted as {architecture}, the language model inside; what is around it was not read"));
        }
        if let (Standing::Analogy, Shape::Decoder) = (recognised.family.standing, recognised.family.shape) {
            notes.push(format!(
                "{architecture} is counted like the decoders whose code was read, one all-reduce for the embedding \
                 and two per layer; its own code was not read"
            ));
        }
    }
    notes.extend(recognised.family.note.map(str::to_owned));

    let mut missing = Vec::new();
    let hidden_size = fields.required(HIDDEN_SIZE, MAX_HIDDEN_SIZE, &mut missing)?;
    // Strange values where only a draft would look are no reason to refuse a target.
    let next_token_layers = fields.first(NEXT_TOKEN_LAYERS, MAX_LAYERS).ok().flatten().map(|layers| layers as u32);
    let all_reduces = match (recognised.family.standing, recognised.family.shape) {
        // The config of such a draft is its target's: the layers it counts are not the draft's.
        (Standing::Draft(DraftKind::NextToken), _) => {
            Some(AllReduceRule::Decoder { layers: next_token_layers.unwrap_or(1) })
        }
        (_, Shape::Decoder) => fields
            .required(LAYERS, MAX_LAYERS, &mut missing)?
            .map(|layers| AllReduceRule::Decoder { layers: layers as u32 }),
        (_, Shape::OneMixer) => fields.one_mixer(&mut missing)?,
        (_, Shape::Blocks) => fields.blocks(&mut missing)?,
    };
    let vocab_size = fields.required(VOCABULARY, MAX_VOCABULARY, &mut missing)?;
    let (Some(hidden_size), Some(all_reduces), Some(vocab_size)) = (hidden_size, all_reduces, vocab_size) else {
        return Err(WorkloadError::MissingFields {
            name: name.to_owned(),
            architecture: unknown_architecture(recognised.architecture.as_deref(), recognised.family.standing),
            fields: missing,
        });
    };
    for (names, largest) in [(HIDDEN_SIZE, MAX_HIDDEN_SIZE), (LAYERS, MAX_LAYERS), (VOCABULARY, MAX_VOCABULARY)] {
        notes.extend(fields.older_name(names, largest));
    }

    let (dtype, dtype_note) = fields.dtype();
    notes.extend(dtype_note);
    if fields.positive("hidden_size_per_layer_input", MAX_HIDDEN_SIZE).is_ok_and(|width| width.is_some()) {
        notes.push("the model has embeddings per layer; the collectives they add are not counted".to_owned());
    }
    let (beside, beside_note) = quantisation_beside(quantisation);
    notes.extend(beside_note);
    let shape = match (recognised.family.standing, all_reduces) {
        // Such a layer is like the target's last ones, and the config counts those.
        (Standing::Draft(DraftKind::NextToken), AllReduceRule::Decoder { layers }) => {
            let all = fields.first(LAYERS, MAX_LAYERS).ok().flatten().unwrap_or(1) as u32;
            read_shape(&fields, hidden_size, AllReduceRule::Decoder { layers: all }, beside.as_ref())
                .map(|shape| last_layers(&shape, layers))
        }
        _ => read_shape(&fields, hidden_size, all_reduces, beside.as_ref()),
    };
    Ok(ModelConfig {
        name: name.to_owned(),
        architecture: recognised.architecture,
        standing: fields.standing(recognised.family.standing),
        hidden_size,
        vocab_size: Some(vocab_size),
        draft_vocab_size: match recognised.family.standing {
            Standing::Draft(_) => fields.positive("draft_vocab_size", MAX_VOCABULARY)?,
            _ => None,
        },
        attention_heads: fields.first(HEADS, MAX_HEADS)?,
        key_value_heads: fields.first(KEY_VALUE_HEADS, MAX_HEADS)?,
        experts: fields.first(EXPERTS, MAX_HEADS).ok().flatten(),
        next_token_layers,
        // Only a caveat hangs on it, so a strange value is no reason to refuse the model.
        mamba_groups: match recognised.family.shape {
            Shape::OneMixer => fields.positive("n_groups", MAX_HEADS).ok().flatten(),
            Shape::Decoder | Shape::Blocks => None,
        },
        dtype,
        all_reduces,
        notes,
        shape,
    })
}

/// The two levels at which a field may stand.
pub(super) struct Fields<'a> {
    name: &'a str,
    outer: &'a Map<String, Value>,
    inner: Option<&'a Map<String, Value>>,
}

impl<'a> Fields<'a> {
    /// The field's value; null counts as absent, because configs write it for "not applicable".
    pub(super) fn get(&self, field: &str) -> Option<&'a Value> {
        let present = |level: &'a Map<String, Value>| level.get(field).filter(|value| !value.is_null());
        self.inner.and_then(present).or_else(|| present(self.outer))
    }

    fn invalid(&self, field: &'static str, expected: impl Into<String>, found: &Value) -> WorkloadError {
        WorkloadError::InvalidField {
            name: self.name.to_owned(),
            field,
            expected: expected.into(),
            found: describe(found),
        }
    }

    fn positive(&self, field: &'static str, largest: u64) -> Result<Option<u64>, WorkloadError> {
        let Some(value) = self.get(field) else { return Ok(None) };
        match whole_number(value) {
            Some(number) if (1..=largest).contains(&number) => Ok(Some(number)),
            _ => Err(self.invalid(field, format!("a whole number from 1 to {largest}"), value)),
        }
    }

    /// The name under which a field stands, those of the text model's own section first.
    pub(super) fn name_of(&self, names: &Names) -> Option<&'static str> {
        let in_level = |level: &Map<String, Value>| {
            names.iter().copied().find(|name| level.get(*name).is_some_and(|value| !value.is_null()))
        };
        self.inner.and_then(in_level).or_else(|| in_level(self.outer))
    }

    /// As [`Fields::positive`], under whichever of its names the field stands.
    fn first(&self, names: &Names, largest: u64) -> Result<Option<u64>, WorkloadError> {
        match self.name_of(names) {
            Some(name) => self.positive(name, largest),
            None => Ok(None),
        }
    }

    /// What to say where a field goes by a name that is no longer usual.
    fn older_name(&self, names: &Names, largest: u64) -> Option<String> {
        let name = self.name_of(names).filter(|name| *name != names[0])?;
        let number = self.positive(name, largest).ok().flatten()?;
        Some(format!("{name} is read as {}, {number}", names[0]))
    }

    /// As [`Fields::positive`]; what is absent is added to `missing`, so that one message can name
    /// everything.
    fn required(
        &self,
        names: &Names,
        largest: u64,
        missing: &mut Vec<&'static str>,
    ) -> Result<Option<u64>, WorkloadError> {
        let number = self.first(names, largest)?;
        if number.is_none() {
            missing.push(names[0]);
        }
        Ok(number)
    }

    /// Nemotron-H's layers, as a string of letters or a list of words.
    fn one_mixer(&self, missing: &mut Vec<&'static str>) -> Result<Option<AllReduceRule>, WorkloadError> {
        let field;
        let layers = if let Some(value) = self.get("hybrid_override_pattern") {
            field = "hybrid_override_pattern";
            // M: state space, *: attention, E: experts, -: dense feed-forward.
            let expected = "a string of M, *, E and -, one per layer";
            let pattern = value.as_str().ok_or_else(|| self.invalid(field, expected, value))?;
            if !pattern.bytes().all(|letter| b"M*E-".contains(&letter)) {
                return Err(self.invalid(field, expected, value));
            }
            pattern.len()
        } else if let Some(value) = self.get("layers_block_type") {
            field = "layers_block_type";
            let expected = "a list of mamba, attention, moe and mlp, one per layer";
            let list = value.as_array().ok_or_else(|| self.invalid(field, expected, value))?;
            let known =
                |entry: &Value| entry.as_str().is_some_and(|kind| ["mamba", "attention", "moe", "mlp"].contains(&kind));
            if let Some(stranger) = list.iter().find(|entry| !known(entry)) {
                return Err(self.invalid(field, expected, stranger));
            }
            list.len()
        } else {
            missing.push("hybrid_override_pattern or layers_block_type");
            return Ok(None);
        };
        let layers = self.agreed_layers(field, layers)?;
        Ok(Some(AllReduceRule::OneMixer { layers }))
    }

    /// DeciLM's layers, each of which may lack a part.
    fn blocks(&self, missing: &mut Vec<&'static str>) -> Result<Option<AllReduceRule>, WorkloadError> {
        const FIELD: &str = "block_configs";
        let Some(value) = self.get(FIELD) else {
            missing.push(FIELD);
            return Ok(None);
        };
        let expected = "a list of blocks, each with attention.no_op and ffn.no_op";
        let list = value.as_array().ok_or_else(|| self.invalid(FIELD, expected, value))?;
        let mut kept = [0_u32; 2];
        for block in list {
            for (count, part) in kept.iter_mut().zip(["attention", "ffn"]) {
                let part =
                    block.get(part).and_then(Value::as_object).ok_or_else(|| self.invalid(FIELD, expected, block))?;
                let flag = |name: &str| part.get(name).and_then(Value::as_bool).unwrap_or(false);
                if flag("replace_with_linear") {
                    let expected = "blocks without replace_with_linear, whose collectives are not known";
                    return Err(self.invalid(FIELD, expected, block));
                }
                if !flag("no_op") {
                    *count += 1;
                }
            }
        }
        self.agreed_layers(FIELD, list.len())?;
        let [attention, feed_forward] = kept;
        Ok(Some(AllReduceRule::Blocks { attention, feed_forward }))
    }

    /// The number of layers a list holds, which must be `num_hidden_layers` where that is given.
    fn agreed_layers(&self, field: &'static str, listed: usize) -> Result<u32, WorkloadError> {
        let invalid = |expected: String| WorkloadError::InvalidField {
            name: self.name.to_owned(),
            field,
            expected,
            found: format!("{listed} entries"),
        };
        let listed_layers = listed as u64;
        if !(1..=MAX_LAYERS).contains(&listed_layers) {
            return Err(invalid(format!("1 to {MAX_LAYERS} layers long")));
        }
        match self.first(LAYERS, MAX_LAYERS)? {
            Some(layers) if layers != listed_layers => Err(invalid(format!("as long as num_hidden_layers, {layers}"))),
            _ => Ok(listed as u32),
        }
    }

    /// The activation type, and what had to be assumed for it.
    fn dtype(&self) -> (DataType, Option<String>) {
        let Some(value) = self.get("dtype").or_else(|| self.get("torch_dtype")) else {
            return (DataType::Bf16, Some("the config names no dtype; bf16 messages are assumed".to_owned()));
        };
        let text = value.as_str().unwrap_or_default();
        match text.strip_prefix("torch.").unwrap_or(text) {
            "bfloat16" => (DataType::Bf16, None),
            "float16" | "half" => (DataType::Fp16, None),
            "float32" | "float" => (
                DataType::Fp32,
                Some(
                    "the config says float32, so messages are counted with 4 bytes per element; a server started \
                     with a 16-bit --dtype, or left to choose one, sends half of that"
                        .to_owned(),
                ),
            ),
            _ => (
                DataType::Bf16,
                Some(format!("dtype {} is no activation type known here; bf16 messages are assumed", describe(value))),
            ),
        }
    }

    /// An architecture nobody knows that also lists its layers one by one is no ordinary decoder.
    fn standing(&self, standing: Standing) -> Standing {
        let listed = ["hybrid_override_pattern", "layers_block_type", "block_configs"];
        match standing {
            Standing::Unknown(_) if listed.iter().any(|field| self.get(field).is_some()) => {
                Standing::Unknown("it lists its layers one by one, so they are not all ordinary decoder layers")
            }
            known => known,
        }
    }
}

/// The architecture in words where nobody knows it, for a message that says what could be done.
fn unknown_architecture(architecture: Option<&str>, standing: Standing) -> Option<String> {
    match standing {
        Standing::Unknown(_) => Some(architecture.map_or_else(|| "the architecture".to_owned(), shown)),
        _ => None,
    }
}

/// A whole number, also where a writer made a float of it.
pub(super) fn whole_number(value: &Value) -> Option<u64> {
    /// Beyond this a float no longer tells neighbours apart.
    const LARGEST_EXACT: f64 = 9_007_199_254_740_992.0;
    value.as_u64().or_else(|| {
        let number = value.as_f64().filter(|number| number.fract() == 0.0 && (0.0..=LARGEST_EXACT).contains(number))?;
        Some(number as u64)
    })
}

/// The section of an `hf_quant_config.json` that says how weights are stored, in the words of a
/// `quantization_config`.
fn quantisation_beside(text: Option<&str>) -> (Option<Value>, Option<String>) {
    let Some(text) = text else { return (None, None) };
    let section = (text.len() <= MAX_CONFIG_BYTES)
        .then(|| parse_json(text, "hf_quant_config.json").ok())
        .flatten()
        .and_then(|mut value| value.get_mut("quantization").map(Value::take))
        .filter(Value::is_object);
    let unread = section.is_none().then(|| {
        "hf_quant_config.json beside the config has no section \"quantization\" that could be read; it is left out"
            .to_owned()
    });
    (section, unread)
}

/// The names under `architectures`, at most a handful: more is noise.
fn architectures(level: &Map<String, Value>) -> Vec<String> {
    match level.get("architectures") {
        Some(Value::String(name)) => vec![name.clone()],
        Some(Value::Array(names)) => names.iter().filter_map(Value::as_str).take(8).map(str::to_owned).collect(),
        _ => Vec::new(),
    }
}

fn parse_json(text: &str, name: &str) -> Result<Value, WorkloadError> {
    let text = text.strip_prefix('\u{feff}').unwrap_or(text);
    serde_json::from_str(text)
        .or_else(|error| match without_python_literals(text) {
            Cow::Borrowed(_) => Err(error),
            Cow::Owned(replaced) => serde_json::from_str(&replaced),
        })
        .map_err(|error| {
            let place = format!(" at line {} column {}", error.line(), error.column());
            let message = error.to_string();
            WorkloadError::Json {
                name: name.to_owned(),
                line: error.line(),
                column: error.column(),
                message: message.strip_suffix(&place).unwrap_or(&message).to_owned(),
            }
        })
}

/// Writes `null` where Python wrote `Infinity`, `-Infinity` or `NaN` outside a string. Blanks keep
/// the columns of later errors right, but for one column per `NaN` on the same line, which is
/// shorter than `null`.
fn without_python_literals(text: &str) -> Cow<'_, str> {
    const LITERALS: [(&str, &str); 3] = [("-Infinity", "null     "), ("Infinity", "null    "), ("NaN", "null")];
    let mut replaced = String::new();
    let mut copied = 0;
    let mut position = 0;
    let mut in_string = false;
    let bytes = text.as_bytes();
    while position < bytes.len() {
        match bytes[position] {
            b'\\' if in_string => position += 2,
            b'"' => {
                in_string = !in_string;
                position += 1;
            }
            b'-' | b'I' | b'N' if !in_string => {
                // The byte is ASCII, so the position is a character boundary.
                let rest = &text[position..];
                let found = LITERALS.iter().find(|(literal, _)| rest.starts_with(literal));
                let Some((literal, null)) = found else {
                    position += 1;
                    continue;
                };
                let joined = |byte: Option<&u8>| byte.is_some_and(|byte| byte.is_ascii_alphanumeric() || *byte == b'_');
                let before = position.checked_sub(1).and_then(|index| bytes.get(index));
                if !joined(before) && !joined(bytes.get(position + literal.len())) {
                    replaced.push_str(&text[copied..position]);
                    replaced.push_str(null);
                    copied = position + literal.len();
                }
                position += literal.len();
            }
            _ => position += 1,
        }
    }
    if copied == 0 {
        return Cow::Borrowed(text);
    }
    replaced.push_str(&text[copied..]);
    Cow::Owned(replaced)
}

fn kind_of(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "a truth value",
        Value::Number(_) => "a number",
        Value::String(_) => "a string",
        Value::Array(_) => "a list",
        Value::Object(_) => "an object",
    }
}

/// A value short enough for a message; lists and objects by kind alone.
pub(super) fn describe(value: &Value) -> String {
    match value {
        Value::Number(number) => number.to_string(),
        Value::String(text) => shown(text),
        other => kind_of(other).to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use serde_json::json;

    use super::*;

    fn parsed(value: &Value) -> ModelConfig {
        parse_config(&value.to_string(), "test").expect("valid")
    }

    fn refused(value: &Value) -> String {
        parse_config(&value.to_string(), "test").expect_err("must be refused").to_string()
    }

    fn llama() -> Value {
        json!({
            "architectures": ["LlamaForCausalLM"], "torch_dtype": "bfloat16", "hidden_size": 4096,
            "num_hidden_layers": 32, "vocab_size": 128_256, "num_attention_heads": 32, "num_key_value_heads": 8,
        })
    }

    fn with(field: &str, value: Value) -> Value {
        let mut config = llama();
        config[field] = value;
        config
    }

    #[test]
    fn a_plain_config_needs_no_assumption() {
        let config = parsed(&llama());
        assert_eq!(config.all_reduces, AllReduceRule::Decoder { layers: 32 });
        assert_eq!(config.all_reduces.calls(), 65);
        assert_eq!((config.hidden_size, config.vocab_size), (4096, Some(128_256)));
        assert_eq!((config.attention_heads, config.key_value_heads), (Some(32), Some(8)));
        assert_eq!(config.dtype, DataType::Bf16);
        assert_eq!(config.standing, Standing::Read);
        assert_eq!(config.notes, Vec::<String>::new());
    }

    #[test]
    fn inner_fields_win_and_outer_ones_fill_in() {
        let config = parsed(&json!({
            "architectures": ["KimiK25ForConditionalGeneration"], "dtype": "bfloat16", "vocab_size": 163_840,
            "hidden_size": 1, "vision_config": {"hidden_size": 1152, "num_hidden_layers": 27},
            "text_config": {"hidden_size": 7168, "num_hidden_layers": 61, "dtype": null, "num_attention_heads": 64},
        }));
        assert_eq!((config.hidden_size, config.vocab_size), (7168, Some(163_840)));
        assert_eq!(config.all_reduces.calls(), 123);
        assert_eq!(config.dtype, DataType::Bf16);
        assert_eq!(config.key_value_heads, None);
    }

    #[test]
    fn a_vision_config_never_stands_in_for_the_text() {
        let message = refused(&json!({"vision_config": {"hidden_size": 1152}, "text_config": "see there"}));
        assert!(message.contains("hidden_size, num_hidden_layers, vocab_size are missing"), "{message}");
    }

    #[test]
    fn python_literals_are_null_outside_strings_only() {
        let text = r#"{"a": [0.0, Infinity], "b": -Infinity,
            "c": NaN, "\"Infinity": "NaN, -Infinity",
            "architectures": ["LlamaForCausalLM"], "dtype": "bfloat16", "hidden_size": 64, "num_hidden_layers": 2,
            "vocab_size": 100, "num_key_value_heads": NaN}"#;
        let config = parse_config(text, "test").expect("valid");
        assert_eq!(config.key_value_heads, None);
        assert_eq!(without_python_literals(r#"{"x": Infinity, "NaN": NaN}"#), r#"{"x": null    , "NaN": null}"#);
        for untouched in ["Infinityx", "xNaN", "\"é NaN\"", "-1", "\"\\\" NaN", "\"\\"] {
            assert_eq!(without_python_literals(untouched), untouched);
        }
    }

    #[test]
    fn json_errors_name_the_place() {
        let error = parse_config("{\n  \"a\": Infinity,\n  \"b\": oops\n}", "x/config.json").expect_err("not JSON");
        assert_eq!(error.to_string(), "x/config.json:3:8: not readable as JSON: expected value");
        let error = parse_config("", "empty").expect_err("not JSON");
        assert!(error.to_string().starts_with("empty:1:0: not readable as JSON: EOF"), "{error}");
        let error = parse_config("[1]", "list").expect_err("no object");
        assert_eq!(error.to_string(), "list: expected an object with the model's fields, found a list");
    }

    #[test]
    fn depth_and_size_are_bounded() {
        let deep = format!("{{\"a\":{}{}}}", "[".repeat(100_000), "]".repeat(100_000));
        assert!(matches!(parse_config(&deep, "deep"), Err(WorkloadError::Json { .. })));
        let large = " ".repeat(MAX_CONFIG_BYTES + 1);
        let error = parse_config(&large, "large").expect_err("too large");
        assert!(error.to_string().contains("at most 16 MiB"), "{error}");
    }

    #[test]
    fn missing_fields_are_named_together_even_for_strangers() {
        let message = refused(&json!({"architectures": ["NewForCausalLM"], "vocab_size": 10}));
        assert_eq!(
            message,
            "test: hidden_size, num_hidden_layers are missing; give the config.json of the model itself, as its model \
             card stores it (\"NewForCausalLM\" is not known here either: with these fields, --assume-decoder would \
             count it as an ordinary decoder, 1 + 2 x layers all-reduces a pass)"
        );
    }

    #[test]
    fn impossible_values_are_refused_by_field() {
        for (field, value) in [
            ("hidden_size", json!(0)),
            ("hidden_size", json!(-1)),
            ("hidden_size", json!(4096.5)),
            ("hidden_size", json!("4096")),
            ("hidden_size", json!(1e300)),
            ("num_hidden_layers", json!(u64::MAX)),
            ("vocab_size", json!([1])),
            ("num_attention_heads", json!({})),
            ("num_key_value_heads", json!(true)),
        ] {
            let message = refused(&with(field, value));
            assert!(message.starts_with(&format!("test: {field} should be a whole number from 1 to ")), "{message}");
        }
    }

    #[test]
    fn every_dtype_spelling_and_its_note() {
        let of = |config: &Value| {
            let config = parsed(config);
            (config.dtype, config.notes.len())
        };
        assert_eq!(of(&with("torch_dtype", json!("float16"))), (DataType::Fp16, 0));
        assert_eq!(of(&with("torch_dtype", json!("torch.bfloat16"))), (DataType::Bf16, 0));
        assert_eq!(of(&with("torch_dtype", json!("float32"))), (DataType::Fp32, 1));
        assert_eq!(of(&with("torch_dtype", json!(null))), (DataType::Bf16, 1));
        assert_eq!(of(&with("torch_dtype", json!("float8_e4m3fn"))), (DataType::Bf16, 1));
        assert_eq!(of(&with("torch_dtype", json!(16))), (DataType::Bf16, 1));
        assert_eq!(of(&with("dtype", json!("float16"))), (DataType::Fp16, 0));
    }

    #[test]
    fn older_names_and_floats_are_read_and_the_names_are_noted() {
        let old = json!({
            "architectures": ["GPT2LMHeadModel"], "torch_dtype": "bfloat16", "n_embd": 1600.0, "n_layer": 48, "n_head": 25,
            "vocab_size": 50257, "n_inner": null,
        });
        let config = parsed(&old);
        assert_eq!((config.hidden_size, config.all_reduces.calls()), (1600, 97));
        assert_eq!((config.attention_heads, config.key_value_heads), (Some(25), None));
        assert_eq!(config.logits_bytes(3), Some(3 * 50_304 * 2), "rounded up to a multiple of 64");
        assert_eq!(config.notes, ["n_embd is read as hidden_size, 1600", "n_layer is read as num_hidden_layers, 48"]);
        let falcon = parsed(&with("n_head_kv", json!(4)));
        assert_eq!(falcon.key_value_heads, Some(8), "today's name goes first");
        // A section for the text model goes before what stands around it, whatever the names.
        let nested = parsed(&json!({"hidden_size": 1, "num_hidden_layers": 1, "vocab_size": 10,
            "text_config": {"d_model": 2048, "n_layers": 24, "vocab_size": 100}}));
        assert_eq!((nested.hidden_size, nested.vocab_size), (2048, Some(100)));
        assert!(refused(&with("hidden_size", json!(4096.5))).contains("found 4096.5"));
    }

    #[test]
    fn what_another_file_says_of_weights_counts_where_the_config_is_silent() {
        let mut config = llama();
        config["intermediate_size"] = json!(14_336);
        let bits = |config: &Value, beside: Option<&str>| {
            let parsed = parse_config_beside(&config.to_string(), "test", beside).expect("valid");
            let last = parsed.notes.last().cloned().unwrap_or_default();
            (parsed.shape.expect("a shape").notes[0].clone(), last)
        };
        let nvfp4 = r#"{"producer": {"name": "modelopt"},
            "quantization": {"quant_algo": "NVFP4", "group_size": 16, "exclude_modules": ["lm_head"]}}"#;
        let (told, _) = bits(&config, Some(nvfp4));
        assert!(told.contains("attention 4.5, dense blocks 4.5"), "{told}");
        for unreadable in ["", "[1]", "{\"quantization\": 4}"] {
            let (told, note) = bits(&config, Some(unreadable));
            assert!(told.contains("names no quantisation") && note.contains("is left out"), "{told} {note}");
        }
        config["quantization_config"] = json!({"quant_method": "fp8"});
        assert!(bits(&config, Some(nvfp4)).0.contains("attention 8, dense"), "the config itself goes first");
    }

    #[test]
    fn drafts_are_told_by_name_and_count_their_own_layers() {
        let mut draft = with("architectures", json!(["LlamaForCausalLMEagle3"]));
        draft["num_hidden_layers"] = json!(1);
        draft["draft_vocab_size"] = json!(32_000);
        let eagle = parsed(&draft);
        assert_eq!(eagle.standing, Standing::Draft(DraftKind::Eagle3));
        assert_eq!((eagle.all_reduces.calls(), eagle.draft_vocab_size), (3, Some(32_000)));
        // Such a file is its target's: 61 layers are not the draft's.
        let mut next = with("architectures", json!(["DeepseekV3ForCausalLMNextN"]));
        next["num_hidden_layers"] = json!(61);
        assert_eq!(parsed(&next).all_reduces.calls(), 3);
        next["num_nextn_predict_layers"] = json!(2);
        assert_eq!(parsed(&next).all_reduces.calls(), 5);
        let target = parsed(&with("num_nextn_predict_layers", json!(1)));
        assert_eq!((target.next_token_layers, target.all_reduces.calls()), (Some(1), 65));
        assert_eq!(parsed(&with("num_nextn_predict_layers", json!(0))).next_token_layers, None);
    }

    #[test]
    fn null_heads_are_absent() {
        assert_eq!(parsed(&with("num_key_value_heads", json!(null))).key_value_heads, None);
    }

    #[test]
    fn architectures_by_analogy_say_so() {
        let config = parsed(&with("architectures", json!(["MixtralForCausalLM"])));
        assert_eq!(config.standing, Standing::Analogy);
        assert!(config.notes[0].starts_with("MixtralForCausalLM is counted like"), "{:?}", config.notes);
    }

    #[test]
    fn per_layer_embeddings_are_a_caveat() {
        assert_eq!(parsed(&with("hidden_size_per_layer_input", json!(0))).notes.len(), 0);
        assert_eq!(parsed(&with("hidden_size_per_layer_input", json!(256))).notes.len(), 1);
    }

    fn nemotron() -> Value {
        let mut config = with("architectures", json!(["NemotronHForCausalLM"]));
        config["num_hidden_layers"] = json!(5);
        config["n_groups"] = json!(8);
        config["hybrid_override_pattern"] = json!("ME*M-");
        config
    }

    #[test]
    fn one_mixer_per_layer_counts_once() {
        let config = parsed(&nemotron());
        assert_eq!(config.all_reduces, AllReduceRule::OneMixer { layers: 5 });
        assert_eq!(config.all_reduces.calls(), 6);
        assert_eq!(config.mamba_groups, Some(8));

        let mut listed = nemotron();
        listed["hybrid_override_pattern"] = json!(null);
        listed["num_hidden_layers"] = json!(null);
        listed["layers_block_type"] = json!(["mamba", "moe", "attention", "mlp"]);
        assert_eq!(parsed(&listed).all_reduces.calls(), 5);

        listed["layers_block_type"] = json!(["mamba", "magic"]);
        assert!(refused(&listed).contains("found \"magic\""));
        listed["layers_block_type"] = json!([]);
        assert!(refused(&listed).contains("found 0 entries"));
        listed["layers_block_type"] = json!(null);
        assert!(refused(&listed).contains("hybrid_override_pattern or layers_block_type is missing"));
    }

    #[test]
    fn a_pattern_that_contradicts_the_layer_count_is_refused() {
        let mut config = nemotron();
        config["num_hidden_layers"] = json!(6);
        assert_eq!(
            refused(&config),
            "test: hybrid_override_pattern should be as long as num_hidden_layers, 6, found 5 entries"
        );
        config["hybrid_override_pattern"] = json!("ME?M-M");
        assert!(refused(&config).contains("a string of M, *, E and -"));
    }

    #[test]
    fn dropped_blocks_issue_nothing() {
        let part = |no_op: bool| json!({"no_op": no_op, "replace_with_linear": false});
        let block = |attention, ffn| json!({"attention": part(attention), "ffn": part(ffn)});
        let mut config = with("architectures", json!(["DeciLMForCausalLM"]));
        config["num_hidden_layers"] = json!(3);
        config["num_key_value_heads"] = json!(null);
        assert!(refused(&config).contains("block_configs is missing"));
        config["block_configs"] = json!([block(false, false), block(true, false), block(true, true)]);
        let parsed = parsed(&config);
        assert_eq!(parsed.all_reduces, AllReduceRule::Blocks { attention: 1, feed_forward: 2 });
        assert_eq!(parsed.all_reduces.calls(), 4);

        config["block_configs"][0]["attention"]["replace_with_linear"] = json!(true);
        assert!(refused(&config).contains("replace_with_linear"));
        config["block_configs"] = json!([1, 2, 3]);
        assert!(refused(&config).contains("attention.no_op and ffn.no_op"));
    }

    #[test]
    fn a_stranger_that_lists_its_layers_is_no_ordinary_decoder() {
        let mut config = nemotron();
        config["architectures"] = json!(["SomeHybridForCausalLM"]);
        assert!(matches!(parsed(&config).standing, Standing::Unknown(reason) if reason.contains("one by one")));
    }

    #[test]
    fn hostile_text_is_escaped_and_cut() {
        let message = refused(&with("hidden_size", json!(format!("\u{1b}[31m{}", "x".repeat(1000)))));
        assert!(!message.contains('\u{1b}') && message.len() < 250, "{message}");
    }

    fn any_json() -> impl Strategy<Value = Value> {
        let key = prop::sample::select(vec![
            "architectures",
            "hidden_size",
            "num_hidden_layers",
            "vocab_size",
            "num_attention_heads",
            "num_key_value_heads",
            "dtype",
            "torch_dtype",
            "text_config",
            "block_configs",
            "hybrid_override_pattern",
            "layers_block_type",
            "attention",
            "ffn",
            "no_op",
            "n_groups",
            "hidden_size_per_layer_input",
        ]);
        let word = prop::sample::select(vec![
            "LlamaForCausalLM",
            "NemotronHForCausalLM",
            "DeciLMForCausalLM",
            "Nobody",
            "bfloat16",
            "ME*-",
            "mamba",
            "",
        ]);
        let leaf = prop_oneof![
            Just(Value::Null),
            any::<bool>().prop_map(Value::from),
            any::<i64>().prop_map(Value::from),
            (0..200_u64).prop_map(Value::from),
            any::<f64>().prop_map(Value::from),
            word.prop_map(Value::from),
        ];
        leaf.prop_recursive(4, 64, 12, move |inner| {
            prop_oneof![
                prop::collection::vec(inner.clone(), 0..6).prop_map(Value::from),
                prop::collection::vec((key.clone(), inner), 0..12).prop_map(|pairs| {
                    Value::Object(pairs.into_iter().map(|(key, value)| (key.to_owned(), value)).collect())
                }),
            ]
        })
    }

    proptest! {
        #[test]
        fn bytes_never_panic(bytes in prop::collection::vec(any::<u8>(), 0..512)) {
            let _ = parse_config(&String::from_utf8_lossy(&bytes), "fuzz");
        }

        #[test]
        fn almost_json_never_panics(
            letters in r#"[{}\[\]:,"\\0-9a-z é\-IN]{0,64}"#,
            tokens in r#"(\{|\}|\[|\]|"|\\|,|:|NaN|-?Infinity|é| ){0,40}"#,
        ) {
            let _ = parse_config(&letters, "fuzz");
            let _ = parse_config(&tokens, "fuzz");
        }

        #[test]
        fn json_never_panics(value in any_json()) {
            let _ = parse_config(&value.to_string(), "fuzz");
        }
    }
}
