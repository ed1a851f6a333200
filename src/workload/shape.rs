//! The weight matrices of a model, layer by layer, as its config describes them.
//!
//! Only what a pass reads in bulk is here: projections, experts, routers. Norms, biases, rotary
//! tables and convolutions are a thousandth of that. Nothing depends on how many GPUs there are;
//! [`pass_shape`](super::pass_shape) divides.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::Value;

use super::config::{AllReduceRule, EXPERTS, Fields, HEADS, KEY_VALUE_HEADS, Names, describe, whole_number};
use super::storage::{Part, Quantisation, Stored};

/// Bounds far above any model, so that products of a few of them fit 64 bits.
const MAX_WIDTH: u64 = 1 << 20;
const MAX_HEAD_WIDTH: u64 = 1 << 14;
const MAX_HEADS: u64 = 1 << 14;
const MAX_EXPERTS: u64 = 1 << 14;

/// Bytes of one element in the key-value cache. Servers may be told to keep it in 8 bits.
const CACHE_ELEMENT_BYTES: u64 = 2;

/// Bytes that the indexer of sparse attention caches per token beside its FP8 key: one 32-bit scale.
/// From memory of DeepSeek-V3.2's published code; it was not read again.
const INDEXER_SCALE_BYTES: u64 = 4;

/// The vocabulary of the assumed draft, to which those of Kimi-K2.5 and Qwen3-235B are cut. Source:
/// sgl-project/SpecForge, configs/ (kimi-k25-eagle3.json, qwen3-235B-A22B-eagle3.json), read in a
/// snapshot.
pub(super) const DRAFT_VOCABULARY: u64 = 32_000;

/// A matrix that ranks share by units (heads, columns, vocabulary rows), or all hold whole.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Matrix {
    /// Pieces that stay together. A rank holds its share of them, rounded up, so that with more
    /// ranks than units each rank holds one: engines copy key-value heads in just this way. 1 is a
    /// matrix that every rank holds whole.
    pub units: u64,
    /// Elements of one unit.
    pub unit_elements: u64,
    /// How they are stored.
    pub stored: Stored,
}

impl Matrix {
    /// Bytes that one of `ranks` ranks holds and reads.
    pub const fn bytes(&self, ranks: u32) -> u64 {
        self.stored
            .bytes(self.units.div_ceil(if ranks == 0 { 1 } else { ranks as u64 }).saturating_mul(self.unit_elements))
    }
}

/// What a token of context leaves in one layer's cache.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Cache {
    /// Key-value heads; 1 where every rank holds the same latent state.
    pub units: u64,
    /// Bytes of one.
    pub unit_bytes: u64,
}

/// One layer.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct LayerShape {
    /// Attention, or what stands in its place; none where the layer has neither, and then it does
    /// not reduce either.
    pub mixer: Vec<Matrix>,
    /// The cache a pass reads per token of context, as far as it grows with the context.
    pub cache: Cache,
    /// The feed-forward block.
    pub feed_forward: Option<FeedForwardShape>,
}

/// A feed-forward block.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct FeedForwardShape {
    /// What every token needs.
    pub always: Vec<Matrix>,
    /// One routed expert; empty in a dense block.
    pub expert: Vec<Matrix>,
    /// Routed experts.
    pub experts: u32,
    /// How many of them a token is routed to.
    pub experts_per_token: u32,
}

/// A model's matrices.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct ModelShape {
    /// Runs of equal layers, first to last.
    pub layers: Vec<(u32, LayerShape)>,
    /// An assumed draft layer with its head; empty where none can be assumed.
    pub draft: Vec<Matrix>,
    /// What was assumed.
    pub notes: Vec<String>,
}

impl ModelShape {
    fn push(&mut self, layer: LayerShape) {
        match self.layers.last_mut() {
            Some((count, last)) if *last == layer => *count += 1,
            _ => self.layers.push((1, layer)),
        }
    }
}

/// Reads the matrices, or says why not: which fields are missing or cannot be what they say. That
/// is no reason to refuse the config: the collectives do not depend on them.
///
/// `beside` is what another file than the config says of how weights are stored.
pub(super) fn read_shape(
    fields: &Fields<'_>,
    hidden: u64,
    rule: AllReduceRule,
    beside: Option<&Value>,
) -> Result<ModelShape, Vec<String>> {
    let inside = fields.get("quantization_config").or(fields.get("compression_config"));
    let quantisation = Quantisation::read(inside.or(beside));
    let mut reader = Reader { fields, hidden, quantisation, problems: Vec::new(), formats: BTreeMap::new() };
    let mut shape = ModelShape::default();
    match rule {
        AllReduceRule::Decoder { layers } | AllReduceRule::LayersAlone { layers } => reader.decoder(layers, &mut shape),
        AllReduceRule::OneMixer { .. } => reader.one_mixer(&mut shape),
        AllReduceRule::Blocks { .. } => reader.blocks(&mut shape),
    }
    if !reader.problems.is_empty() {
        reader.problems.sort();
        reader.problems.dedup();
        return Err(reader.problems);
    }
    if shape.layers.iter().any(|(_, layer)| layer.feed_forward.as_ref().is_some_and(|block| block.experts > 0)) {
        shape.notes.push(
            "routed experts are counted as the expected number of distinct ones when every token chooses evenly and \
             on its own; real traffic favours some, and then fewer are read"
                .to_owned(),
        );
    }
    shape.draft = reader.draft();
    shape.notes.insert(0, reader.format_note());
    Ok(shape)
}

/// Heads of a layer's attention.
#[derive(Debug, Clone, Copy)]
struct Heads {
    query: u64,
    key_value: u64,
    /// Width of a query or key.
    width: u64,
    /// Width of a value.
    value_width: u64,
    /// Whether the query projection carries a gate of the output's width.
    gated: bool,
    /// Whether values are the keys, with no projection of their own.
    shared_value: bool,
    /// Whether the layer sees no further than a window.
    windowed: bool,
}

/// What stands for attention in one layer.
#[derive(Debug, Clone, Copy)]
enum Mixer {
    Grouped(Heads),
    Latent(Latent),
    Linear(LinearHeads),
}

/// What a layer of a mixed model does with the context.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    Full,
    Windowed,
    Linear,
}

/// Multi-head latent attention, as DeepSeek-V2 introduced it.
#[derive(Debug, Clone, Copy)]
struct Latent {
    heads: u64,
    /// Rank of the query projection; none where it is one matrix.
    query_rank: Option<u64>,
    key_value_rank: u64,
    plain_width: u64,
    rotary_width: u64,
    value_width: u64,
    /// Heads and width of the indexer of sparse attention.
    indexer: Option<(u64, u64)>,
}

/// Gated delta-net attention, as in Qwen3-Next.
#[derive(Debug, Clone, Copy)]
struct LinearHeads {
    key: u64,
    key_width: u64,
    value: u64,
    value_width: u64,
}

/// Experts of the layers that have them.
#[derive(Debug, Clone, Copy)]
struct Experts {
    count: u64,
    per_token: u64,
    intermediate: u64,
    /// Width of the shared experts together.
    shared: Option<u64>,
    /// Width of what experts read and write, where it is not the hidden state's.
    latent: Option<u64>,
    /// 3 matrices with a gate, 2 without.
    gated: bool,
}

struct Reader<'a> {
    fields: &'a Fields<'a>,
    hidden: u64,
    quantisation: Quantisation,
    problems: Vec<String>,
    /// The formats met, for the note.
    formats: BTreeMap<Part, Vec<Stored>>,
}

impl Reader<'_> {
    /// The first of these fields that holds a number above 0. Configs write null or 0 for what does
    /// not apply.
    fn number(&mut self, names: &Names, largest: u64) -> Option<u64> {
        for name in names {
            let Some(value) = self.fields.get(name) else { continue };
            match whole_number(value) {
                Some(0) => {}
                Some(number) if number <= largest => return Some(number),
                _ => self
                    .problems
                    .push(format!("{name} should be a whole number from 0 to {largest}, found {}", describe(value))),
            }
        }
        None
    }

    /// The same, where the shape hangs on it; the first name is the one that is missed.
    fn needed(&mut self, names: &Names, largest: u64) -> u64 {
        let before = self.problems.len();
        let number = self.number(names, largest);
        if number.is_none() && self.problems.len() == before {
            self.problems.push(format!("{} is missing", names[0]));
        }
        number.unwrap_or(1)
    }

    fn flag(&self, name: &str) -> Option<bool> {
        self.fields.get(name).and_then(Value::as_bool)
    }

    fn list(&self, name: &str) -> Option<&[Value]> {
        self.fields.get(name).and_then(Value::as_array).map(Vec::as_slice)
    }

    fn matrix(&mut self, layer: u32, part: Part, name: &str, units: u64, unit_elements: u64) -> Matrix {
        let stored = self.quantisation.stored(layer, part, name);
        let seen = self.formats.entry(part).or_default();
        if !seen.contains(&stored) {
            seen.push(stored);
        }
        Matrix { units, unit_elements, stored }
    }

    /// Layers with attention of any kind and a feed-forward block, dense or of experts.
    fn decoder(&mut self, layers: u32, shape: &mut ModelShape) {
        let mixers = self.mixers(layers, shape);
        let experts = self.experts(true);
        let sparse = self.sparse_layers(layers, experts.is_some());
        // Gemma 4 keeps a dense block beside the experts of each layer.
        let beside = self.flag("enable_moe_block") == Some(true);
        let needs_dense = beside || sparse.iter().any(|sparse| !sparse);
        // The first name is Llama 4's, where the second is that of its experts.
        let dense = if needs_dense { self.number(&["intermediate_size_mlp"], MAX_WIDTH) } else { None };
        let dense = dense.or_else(|| needs_dense.then(|| self.needed(&["intermediate_size"], MAX_WIDTH)));
        if !self.problems.is_empty() {
            return;
        }
        for (layer, (mixer, sparse)) in (0_u32..).zip(mixers.into_iter().zip(sparse)) {
            let mut feed_forward = FeedForwardShape::default();
            if let (Some(dense), true) = (dense, beside || !sparse) {
                feed_forward.always.extend(self.block(layer, Part::Dense, self.hidden, dense, true));
            }
            if let (Some(experts), true) = (experts, sparse) {
                self.add_experts(layer, experts, &mut feed_forward);
            }
            let (mixer, cache) = self.mixer(layer, mixer);
            shape.push(LayerShape { mixer, cache, feed_forward: Some(feed_forward) });
        }
    }

    /// What every layer mixes tokens with.
    fn mixers(&mut self, layers: u32, shape: &mut ModelShape) -> Vec<Mixer> {
        let count = layers as usize;
        if self.fields.get("kv_lora_rank").is_some() {
            let latent = self.latent();
            if latent.indexer.is_some() {
                shape.notes.push(
                    "sparse attention: only the indexer's keys grow with the context; the few tokens it chooses are \
                     not counted, and every layer is taken to have an indexer of its own"
                        .to_owned(),
                );
            }
            return vec![Mixer::Latent(latent); count];
        }
        let linear = self.fields.get("linear_num_value_heads").is_some();
        let full = self.grouped(linear);
        let kinds = self.kinds(layers);
        if kinds.is_empty() {
            if linear {
                self.problems.push("layer_types is missing".to_owned());
            }
            return vec![Mixer::Grouped(full); count];
        }
        if !linear && kinds.contains(&Kind::Linear) {
            self.problems.push("linear_num_value_heads is missing".to_owned());
        }
        let linear = if linear { Mixer::Linear(self.linear()) } else { Mixer::Grouped(full) };
        let (windowed, global) = (Mixer::Grouped(self.windowed(full)), Mixer::Grouped(self.global(full)));
        let mixers = kinds
            .iter()
            .map(|kind| match kind {
                Kind::Full => global,
                Kind::Windowed => windowed,
                Kind::Linear => linear,
            })
            .collect();
        for (kind, what) in [
            (Kind::Windowed, "look back over a window only, which does not grow with the context"),
            (Kind::Linear, "keep a state of fixed size"),
        ] {
            let count = kinds.iter().filter(|other| **other == kind).count();
            if count > 0 {
                shape.notes.push(format!("{count} layers {what}: their cache is not counted"));
            }
        }
        mixers
    }

    /// The kind of each layer where the config lists them; empty where all are alike.
    fn kinds(&mut self, layers: u32) -> Vec<Kind> {
        let kinds: Vec<Kind> = if let Some(list) = self.list("layer_types") {
            list.iter()
                .map(|kind| match kind.as_str() {
                    Some("sliding_attention" | "chunked_attention") => Kind::Windowed,
                    Some("linear_attention") => Kind::Linear,
                    _ => Kind::Full,
                })
                .collect()
        } else if let Some(list) = self.list("hybrid_layer_pattern") {
            // MiMo: 1 looks over a window.
            list.iter().map(|kind| if kind.as_u64() == Some(1) { Kind::Windowed } else { Kind::Full }).collect()
        } else if let Some(interval) = self.number(&["full_attention_interval"], MAX_WIDTH) {
            // Qwen3-Next: every so many layers one with full attention.
            let kind =
                |layer: u32| if u64::from(layer + 1).is_multiple_of(interval) { Kind::Full } else { Kind::Linear };
            (0..layers).map(kind).collect()
        } else {
            return Vec::new();
        };
        if kinds.len() != layers as usize {
            self.problems.push(format!("the list of layer types has {} entries for {layers} layers", kinds.len()));
            return Vec::new();
        }
        kinds
    }

    fn grouped(&mut self, gated_by_default: bool) -> Heads {
        let query = self.needed(HEADS, MAX_HEADS);
        let key_value = self.number(KEY_VALUE_HEADS, MAX_HEADS).unwrap_or(query);
        let width = match self.number(&["head_dim"], MAX_HEAD_WIDTH) {
            Some(width) => width,
            None if self.hidden.is_multiple_of(query) => self.hidden / query,
            None => {
                self.problems.push("head_dim is missing".to_owned());
                1
            }
        };
        Heads {
            query,
            key_value,
            width,
            value_width: self.number(&["v_head_dim"], MAX_HEAD_WIDTH).unwrap_or(width),
            gated: self.flag("attn_output_gate").unwrap_or(gated_by_default),
            shared_value: false,
            windowed: false,
        }
    }

    /// Layers with a window, where their heads differ (MiMo-V2).
    fn windowed(&mut self, full: Heads) -> Heads {
        let width = self.number(&["swa_head_dim"], MAX_HEAD_WIDTH);
        Heads {
            query: self.number(&["swa_num_attention_heads"], MAX_HEADS).unwrap_or(full.query),
            key_value: self.number(&["swa_num_key_value_heads"], MAX_HEADS).unwrap_or(full.key_value),
            width: width.unwrap_or(full.width),
            value_width: self.number(&["swa_v_head_dim"], MAX_HEAD_WIDTH).or(width).unwrap_or(full.value_width),
            windowed: true,
            ..full
        }
    }

    /// Layers without one, where theirs differ (Gemma 4).
    fn global(&mut self, full: Heads) -> Heads {
        let width = self.number(&["global_head_dim"], MAX_HEAD_WIDTH);
        Heads {
            key_value: self.number(&["num_global_key_value_heads"], MAX_HEADS).unwrap_or(full.key_value),
            width: width.unwrap_or(full.width),
            value_width: width.unwrap_or(full.value_width),
            shared_value: self.flag("attention_k_eq_v") == Some(true),
            ..full
        }
    }

    fn latent(&mut self) -> Latent {
        let indexer = self.number(&["index_n_heads"], MAX_HEADS);
        Latent {
            heads: self.needed(HEADS, MAX_HEADS),
            query_rank: self.number(&["q_lora_rank"], MAX_WIDTH),
            key_value_rank: self.needed(&["kv_lora_rank"], MAX_WIDTH),
            plain_width: self.needed(&["qk_nope_head_dim"], MAX_HEAD_WIDTH),
            rotary_width: self.needed(&["qk_rope_head_dim"], MAX_HEAD_WIDTH),
            value_width: self.needed(&["v_head_dim"], MAX_HEAD_WIDTH),
            indexer: indexer.map(|heads| (heads, self.needed(&["index_head_dim"], MAX_HEAD_WIDTH))),
        }
    }

    fn linear(&mut self) -> LinearHeads {
        LinearHeads {
            key: self.needed(&["linear_num_key_heads"], MAX_HEADS),
            key_width: self.needed(&["linear_key_head_dim"], MAX_HEAD_WIDTH),
            value: self.needed(&["linear_num_value_heads"], MAX_HEADS),
            value_width: self.needed(&["linear_value_head_dim"], MAX_HEAD_WIDTH),
        }
    }

    fn mixer(&mut self, layer: u32, mixer: Mixer) -> (Vec<Matrix>, Cache) {
        match mixer {
            Mixer::Grouped(heads) => self.grouped_matrices(layer, heads),
            Mixer::Latent(latent) => self.latent_matrices(layer, latent),
            Mixer::Linear(heads) => (self.linear_matrices(layer, heads), Cache::default()),
        }
    }

    fn grouped_matrices(&mut self, layer: u32, heads: Heads) -> (Vec<Matrix>, Cache) {
        let Heads { query, key_value, width, value_width, gated, shared_value, windowed } = heads;
        let mut add =
            |name, units, unit_width| self.matrix(layer, Part::Attention, name, units, unit_width * self.hidden);
        let mut matrices = vec![
            add("q_proj", query, if gated { width + value_width } else { width }),
            add("k_proj", key_value, width),
        ];
        if !shared_value {
            matrices.push(add("v_proj", key_value, value_width));
        }
        matrices.push(add("o_proj", query, value_width));
        let unit_bytes = if windowed { 0 } else { (width + value_width) * CACHE_ELEMENT_BYTES };
        (matrices, Cache { units: key_value, unit_bytes })
    }

    /// The projections into the latent spaces are held whole by every rank. Sources:
    /// sgl-project/sglang, python/sglang/srt/models/deepseek_v2.py; vllm-project/vllm,
    /// vllm/model_executor/models/deepseek_v2.py (`ReplicatedLinear`); read in a snapshot, not run.
    fn latent_matrices(&mut self, layer: u32, latent: Latent) -> (Vec<Matrix>, Cache) {
        let Latent { heads, query_rank, key_value_rank, plain_width, rotary_width, value_width, indexer } = latent;
        let hidden = self.hidden;
        let mut add = |name, units, elements| self.matrix(layer, Part::Attention, name, units, elements);
        let query_width = plain_width + rotary_width;
        let mut matrices = match query_rank {
            Some(rank) => vec![add("q_a_proj", 1, hidden * rank), add("q_b_proj", heads, rank * query_width)],
            None => vec![add("q_proj", heads, hidden * query_width)],
        };
        matrices.push(add("kv_a_proj_with_mqa", 1, hidden * (key_value_rank + rotary_width)));
        matrices.push(add("kv_b_proj", heads, key_value_rank * (plain_width + value_width)));
        matrices.push(add("o_proj", heads, value_width * hidden));
        let Some((index_heads, index_width)) = indexer else {
            return (matrices, Cache { units: 1, unit_bytes: (key_value_rank + rotary_width) * CACHE_ELEMENT_BYTES });
        };
        // The indexer's queries come from the latent query where there is one, its keys and the
        // weights of its heads from the hidden state; it is held whole, too.
        matrices.push(add("q_b_proj", 1, query_rank.unwrap_or(hidden) * index_heads * index_width));
        matrices.push(Matrix { units: 1, unit_elements: hidden * (index_width + index_heads), stored: Stored::HALF });
        (matrices, Cache { units: 1, unit_bytes: index_width + INDEXER_SCALE_BYTES })
    }

    fn linear_matrices(&mut self, layer: u32, heads: LinearHeads) -> Vec<Matrix> {
        let hidden = self.hidden;
        let mut add = |name, units, width| self.matrix(layer, Part::Attention, name, units, width * hidden);
        vec![
            // Query and key; value and its gate; output. Two small ones per value head stay 16 bits.
            add("in_proj", heads.key, 2 * heads.key_width),
            add("in_proj", heads.value, 2 * heads.value_width),
            add("out_proj", heads.value, heads.value_width),
            Matrix { units: heads.value, unit_elements: 2 * hidden, stored: Stored::HALF },
        ]
    }

    /// A feed-forward block of this width: up and down, and a gate where activations are gated.
    fn block(&mut self, layer: u32, part: Part, outer: u64, width: u64, gated: bool) -> Vec<Matrix> {
        let names: &[&str] = if gated { &["gate_proj", "up_proj", "down_proj"] } else { &["up_proj", "down_proj"] };
        names.iter().map(|name| self.matrix(layer, part, name, width, outer)).collect()
    }

    fn experts(&mut self, gated: bool) -> Option<Experts> {
        let count = self.number(EXPERTS, MAX_EXPERTS)?;
        let per_token = self.needed(
            &["num_experts_per_tok", "experts_per_token", "num_experts_per_token", "top_k_experts", "moe_topk"],
            MAX_EXPERTS,
        );
        let intermediate = self.needed(&["moe_intermediate_size", "intermediate_size"], MAX_WIDTH);
        let named =
            &["shared_expert_intermediate_size", "moe_shared_expert_intermediate_size", "shared_intermediate_size"];
        let shared = self.number(named, MAX_WIDTH);
        let shared = shared.or_else(|| Some(self.number(&["n_shared_experts"], MAX_EXPERTS)? * intermediate));
        // Llama 4 has one shared expert of the routed ones' width and says so nowhere.
        let shared = shared.or_else(|| self.fields.get("intermediate_size_mlp").map(|_| intermediate));
        Some(Experts {
            count,
            per_token: per_token.min(count),
            intermediate,
            shared,
            latent: self.number(&["moe_latent_size"], MAX_WIDTH),
            gated,
        })
    }

    fn add_experts(&mut self, layer: u32, experts: Experts, block: &mut FeedForwardShape) {
        let Experts { count, per_token, intermediate, shared, latent, gated } = experts;
        let hidden = self.hidden;
        let whole = |unit_elements| Matrix { units: 1, unit_elements, stored: Stored::HALF };
        block.always.push(whole(count * hidden));
        if let Some(width) = shared {
            block.always.extend(self.block(layer, Part::Shared, hidden, width, gated));
        }
        if let Some(latent) = latent {
            block.always.push(whole(2 * latent * hidden));
        }
        block.expert = self.block(layer, Part::Experts, latent.unwrap_or(hidden), intermediate, gated);
        block.experts = count as u32;
        block.experts_per_token = per_token as u32;
    }

    /// Which layers have routed experts.
    fn sparse_layers(&mut self, layers: u32, any: bool) -> Vec<bool> {
        let first = self.number(&["first_k_dense_replace"], u64::from(u32::MAX)).unwrap_or(0);
        let listed: Option<Vec<bool>> =
            self.list("moe_layer_freq").map(|list| list.iter().map(|entry| entry.as_u64() != Some(0)).collect());
        let listed = listed.or_else(|| {
            let list = self.list("mlp_layer_types")?;
            Some(list.iter().map(|entry| entry.as_str() != Some("dense")).collect())
        });
        // DeepSeek counts from layer 0, the others from 1.
        let from_zero = if listed.is_some() { None } else { self.number(&["moe_layer_freq"], MAX_WIDTH) };
        let from_one = self.number(&["decoder_sparse_step", "interleave_moe_layer_step"], MAX_WIDTH);
        let dense: BTreeSet<u64> =
            self.list("mlp_only_layers").unwrap_or_default().iter().filter_map(Value::as_u64).collect();
        if let Some(listed) = &listed
            && listed.len() != layers as usize
        {
            self.problems.push(format!("the list of sparse layers has {} entries for {layers} layers", listed.len()));
        }
        (0..u64::from(layers))
            .map(|layer| {
                any && layer >= first
                    && listed.as_ref().is_none_or(|listed| listed.get(layer as usize).is_none_or(|sparse| *sparse))
                    && from_zero.is_none_or(|step| layer.is_multiple_of(step))
                    && from_one.is_none_or(|step| (layer + 1).is_multiple_of(step))
                    && !dense.contains(&layer)
            })
            .collect()
    }

    /// Nemotron-H: one block a layer. Its activations are squared, not gated. Source:
    /// vllm-project/vllm, vllm/model_executor/models/nemotron_h.py, read in excerpts, not run.
    fn one_mixer(&mut self, shape: &mut ModelShape) {
        let kinds: Vec<char> = match self.fields.get("hybrid_override_pattern").and_then(Value::as_str) {
            Some(pattern) => pattern.chars().collect(),
            None => self
                .list("layers_block_type")
                .unwrap_or_default()
                .iter()
                .map(|kind| match kind.as_str() {
                    Some("mamba") => 'M',
                    Some("moe") => 'E',
                    Some("mlp") => '-',
                    _ => '*',
                })
                .collect(),
        };
        let has = |kind: char| kinds.contains(&kind);
        let heads = has('*').then(|| self.grouped(false));
        let state_space = has('M').then(|| {
            (
                self.needed(&["mamba_num_heads"], MAX_HEADS),
                self.needed(&["mamba_head_dim"], MAX_HEAD_WIDTH),
                self.needed(&["n_groups"], MAX_HEADS),
                self.needed(&["ssm_state_size"], MAX_HEAD_WIDTH),
            )
        });
        let experts = if has('E') { self.experts(false) } else { None };
        if has('E') && experts.is_none() {
            self.problems.push("n_routed_experts is missing".to_owned());
        }
        let dense = has('-').then(|| self.needed(&["intermediate_size"], MAX_WIDTH));
        if !self.problems.is_empty() {
            return;
        }
        let hidden = self.hidden;
        for (layer, kind) in (0_u32..).zip(kinds) {
            let mut this = LayerShape::default();
            match kind {
                'M' => {
                    let (heads, width, groups, state) = state_space.unwrap_or((1, 1, 1, 1));
                    let mut add =
                        |name, units, columns| self.matrix(layer, Part::Attention, name, units, columns * hidden);
                    // Gate, input and time step of each head; input and output maps of each group.
                    this.mixer = vec![
                        add("in_proj", heads, 2 * width + 1),
                        add("in_proj", groups, 2 * state),
                        add("out_proj", heads, width),
                    ];
                }
                'E' => {
                    if let Some(experts) = experts {
                        self.add_experts(layer, experts, this.feed_forward.insert(FeedForwardShape::default()));
                    }
                }
                '-' => {
                    let always = self.block(layer, Part::Dense, hidden, dense.unwrap_or(1), false);
                    this.feed_forward = Some(FeedForwardShape { always, ..FeedForwardShape::default() });
                }
                _ => {
                    if let Some(heads) = heads {
                        (this.mixer, this.cache) = self.grouped_matrices(layer, heads);
                    }
                }
            }
            shape.push(this);
        }
        if state_space.is_some() {
            shape.notes.push("state-space layers keep a state of fixed size: it is not counted".to_owned());
        }
    }

    /// DeciLM: each block names its own heads and width. Source: vllm-project/vllm,
    /// vllm/model_executor/models/nemotron_nas.py (`_ffn_mult_to_intermediate_size`), from memory,
    /// not run.
    fn blocks(&mut self, shape: &mut ModelShape) {
        const ROUND_TO: u64 = 256;
        let query = self.needed(HEADS, MAX_HEADS);
        let hidden = self.hidden;
        let blocks = self.list("block_configs").unwrap_or_default().to_vec();
        let off = |part: Option<&Value>| part.and_then(|part| part.get("no_op")).and_then(Value::as_bool) == Some(true);
        for (layer, block) in (0_u32..).zip(blocks) {
            let (attention, ffn) = (block.get("attention"), block.get("ffn"));
            let mut this = LayerShape::default();
            if !off(attention) {
                let group = attention.and_then(|part| part.get("n_heads_in_group")).and_then(Value::as_u64);
                match group.filter(|group| *group > 0 && query.is_multiple_of(*group)) {
                    Some(group) => {
                        let heads = Heads { key_value: query / group, ..self.grouped(false) };
                        (this.mixer, this.cache) = self.grouped_matrices(layer, heads);
                    }
                    None => self.problems.push("block_configs.attention.n_heads_in_group is missing".to_owned()),
                }
            }
            if !off(ffn) {
                let multiple = ffn.and_then(|part| part.get("ffn_mult")).and_then(Value::as_f64);
                match multiple.filter(|multiple| (1e-3..=1e3).contains(multiple)) {
                    Some(multiple) => {
                        let width = ((2.0 * multiple * hidden as f64 / 3.0) as u64).next_multiple_of(ROUND_TO);
                        let always = self.block(layer, Part::Dense, hidden, width, true);
                        this.feed_forward = Some(FeedForwardShape { always, ..FeedForwardShape::default() });
                    }
                    None => self.problems.push("block_configs.ffn.ffn_mult is missing".to_owned()),
                }
            }
            shape.push(this);
        }
    }

    /// An EAGLE-3 draft of one dense layer in the target's width, with a head of its own: its
    /// attention reads hidden state and embedding side by side. The matrix that joins three hidden
    /// states of the target runs once a step, not once a pass, and is left out. Source:
    /// sgl-project/sglang, python/sglang/srt/models/llama_eagle3.py, read in a snapshot, not run.
    fn draft(&mut self) -> Vec<Matrix> {
        // Drafts of models with small heads or experts are not built after those.
        const WIDTH_PER_HIDDEN: (u64, u64) = (7, 2);
        let hidden = self.hidden;
        let Some(query) = self.number(HEADS, MAX_HEADS) else { return Vec::new() };
        let key_value = self.number(KEY_VALUE_HEADS, MAX_HEADS).unwrap_or(query);
        let latent = self.fields.get("kv_lora_rank").is_some();
        let width = self.number(if latent { &["v_head_dim"] } else { &["head_dim"] }, MAX_HEAD_WIDTH);
        let width = width.unwrap_or_else(|| hidden.div_ceil(query));
        let mixture = self.experts(true).is_some();
        let dense_named = !mixture || self.fields.get("moe_intermediate_size").is_some();
        let named = if dense_named { self.number(&["intermediate_size"], MAX_WIDTH) } else { None };
        let intermediate = named.unwrap_or(hidden * WIDTH_PER_HIDDEN.0 / WIDTH_PER_HIDDEN.1);
        let half = |units, unit_elements| Matrix { units, unit_elements, stored: Stored::HALF };
        // Strange values of fields that only matter here are no reason to refuse the target.
        self.problems.clear();
        vec![
            half(query, 2 * width * hidden),
            half(key_value, 2 * 2 * width * hidden),
            half(query, width * hidden),
            half(intermediate, 3 * hidden),
            half(DRAFT_VOCABULARY, hidden),
        ]
    }

    fn format_note(&self) -> String {
        if let Some(note) = &self.quantisation.note {
            return note.clone();
        }
        if self.quantisation.is_none() {
            return "the config names no quantisation, so all weights are counted in 16 bits (some tools keep it in a \
                    file of its own, hf_quant_config.json)"
                .to_owned();
        }
        let parts: Vec<String> = self
            .formats
            .iter()
            .map(|(part, formats)| {
                let mut bits: Vec<f64> = formats.iter().map(|stored| stored.bits_per_value()).collect();
                bits.sort_by(f64::total_cmp);
                // Thousandths of a bit, without zeros at the end.
                let bits: Vec<String> = bits.iter().map(|bits| format!("{}", (bits * 1e3).round() / 1e3)).collect();
                format!("{} {}", part.name(), bits.join(" and "))
            })
            .collect();
        format!("bits per weight as stored, scales included: {}; router and head 16", parts.join(", "))
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::super::parse_config;
    use super::*;

    const HIDDEN: u64 = 64;

    fn config(changes: &Value) -> Value {
        let mut config = json!({
            "architectures": ["LlamaForCausalLM"], "dtype": "bfloat16", "hidden_size": HIDDEN, "num_hidden_layers": 4,
            "vocab_size": 100, "num_attention_heads": 8, "num_key_value_heads": 2, "intermediate_size": 160,
        });
        for (name, value) in changes.as_object().expect("an object") {
            config[name] = value.clone();
        }
        config
    }

    fn read(changes: &Value) -> Result<ModelShape, Vec<String>> {
        parse_config(&config(changes).to_string(), "test").expect("the collectives are clear").shape
    }

    fn shaped(changes: &Value) -> ModelShape {
        read(changes).expect("a shape")
    }

    /// Elements of these matrices, all units together, per hidden element.
    fn columns(matrices: &[Matrix]) -> u64 {
        matrices.iter().map(|matrix| matrix.units * matrix.unit_elements).sum::<u64>() / HIDDEN
    }

    /// Runs, as how many and whether they have experts.
    fn runs(shape: &ModelShape) -> Vec<(u32, bool)> {
        let sparse = |layer: &LayerShape| layer.feed_forward.as_ref().is_some_and(|block| block.experts > 0);
        shape.layers.iter().map(|(count, layer)| (*count, sparse(layer))).collect()
    }

    #[expect(clippy::needless_pass_by_value, reason = "calls read better with json!(..)")]
    fn experts(changes: Value) -> Value {
        let mut all = json!({"num_experts": 16, "num_experts_per_tok": 2, "moe_intermediate_size": 32});
        for (name, value) in changes.as_object().expect("an object") {
            all[name] = value.clone();
        }
        all
    }

    #[test]
    fn dense_layers_are_one_run() {
        let shape = shaped(&json!({}));
        let [(4, layer)] = shape.layers.as_slice() else { panic!("{:?}", shape.layers) };
        assert_eq!(columns(&layer.mixer), 8 * (8 + 2 + 2 + 8));
        assert_eq!(layer.cache, Cache { units: 2, unit_bytes: 2 * 8 * 2 });
        assert_eq!(columns(&layer.feed_forward.as_ref().expect("dense").always), 3 * 160);
        assert!(shape.notes[0].contains("names no quantisation"), "{:?}", shape.notes);
    }

    #[test]
    fn heads_have_the_width_they_say() {
        let mixer = |changes: &Value| columns(&shaped(changes).layers[0].1.mixer);
        assert_eq!(mixer(&json!({"head_dim": 16})), 16 * (8 + 2 + 2 + 8));
        assert_eq!(mixer(&json!({"head_dim": 16, "v_head_dim": 4})), 16 * (8 + 2) + 4 * (2 + 8));
        assert_eq!(mixer(&json!({"attn_output_gate": true})), 8 * (16 + 2 + 2 + 8));
        assert_eq!(mixer(&json!({"num_key_value_heads": null})), 8 * (8 + 8 + 8 + 8));
    }

    #[test]
    fn which_layers_are_sparse() {
        let of = |changes| runs(&shaped(&experts(changes)));
        assert_eq!(of(json!({})), [(4, true)]);
        assert_eq!(of(json!({"first_k_dense_replace": 1})), [(1, false), (3, true)]);
        assert_eq!(of(json!({"moe_layer_freq": 2})), [(1, true), (1, false), (1, true), (1, false)]);
        assert_eq!(of(json!({"moe_layer_freq": [0, 1, 1, 1]})), [(1, false), (3, true)]);
        assert_eq!(of(json!({"mlp_layer_types": ["dense", "dense", "sparse", "sparse"]})), [(2, false), (2, true)]);
        assert_eq!(of(json!({"decoder_sparse_step": 2, "mlp_only_layers": [3]})), [(1, false), (1, true), (2, false)]);
        assert_eq!(of(json!({"num_experts": 0})), [(4, false)]);
        let refused = read(&experts(json!({"moe_layer_freq": [1]})));
        assert_eq!(refused, Err(vec!["the list of sparse layers has 1 entries for 4 layers".to_owned()]));
    }

    #[test]
    fn experts_and_what_stands_beside_them() {
        let block = |changes| {
            let shape = shaped(&experts(changes));
            let block = shape.layers[0].1.feed_forward.clone().expect("experts");
            assert_eq!((block.experts, block.experts_per_token), (16, 2));
            (columns(&block.always), columns(&block.expert))
        };
        assert_eq!(block(json!({})), (16, 3 * 32));
        assert_eq!(block(json!({"n_shared_experts": 2})), (16 + 3 * 64, 3 * 32));
        assert_eq!(block(json!({"shared_expert_intermediate_size": 48})), (16 + 3 * 48, 3 * 32));
        assert_eq!(block(json!({"shared_expert_intermediate_size": 0})), (16, 3 * 32));
        assert_eq!(block(json!({"moe_intermediate_size": null})), (16, 3 * 160));
        // Gemma 4: a dense block in the same layer. Llama 4: a shared expert nobody names.
        assert_eq!(block(json!({"enable_moe_block": true})), (16 + 3 * 160, 3 * 32));
        assert_eq!(block(json!({"intermediate_size_mlp": 320})), (16 + 3 * 32, 3 * 32));
    }

    #[test]
    fn latent_attention_with_and_without_a_latent_query() {
        let mla = json!({"kv_lora_rank": 32, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8});
        let mixer = |name: &str, value: Value| {
            let mut mla = mla.clone();
            mla[name] = value;
            let layer = shaped(&mla).layers[0].1.clone();
            (layer.mixer.iter().map(|matrix| (matrix.units, matrix.unit_elements)).collect::<Vec<_>>(), layer.cache)
        };
        let rest = [(1, HIDDEN * 36), (8, 32 * 16), (8, 8 * HIDDEN)];
        let cache = Cache { units: 1, unit_bytes: 72 };
        assert_eq!(mixer("q_lora_rank", json!(null)), ([&[(8, HIDDEN * 12)], &rest[..]].concat(), cache));
        assert_eq!(mixer("q_lora_rank", json!(16)), ([&[(1, HIDDEN * 16), (8, 16 * 12)], &rest[..]].concat(), cache));
        let missing = read(&json!({"kv_lora_rank": 32, "qk_rope_head_dim": 4})).expect_err("incomplete");
        assert_eq!(missing, ["qk_nope_head_dim is missing", "v_head_dim is missing"]);

        let mut sparse = mla;
        sparse["index_n_heads"] = json!(4);
        sparse["index_head_dim"] = json!(16);
        let shape = shaped(&sparse);
        assert_eq!(shape.layers[0].1.cache.unit_bytes, 16 + 4);
        assert!(shape.notes.iter().any(|note| note.starts_with("sparse attention")), "{:?}", shape.notes);
    }

    #[test]
    fn windows_and_linear_layers_have_no_growing_cache() {
        let windowed = shaped(&json!({
            "layer_types": ["sliding_attention", "sliding_attention", "sliding_attention", "full_attention"],
        }));
        let caches: Vec<(u32, u64)> = windowed.layers.iter().map(|(n, layer)| (*n, layer.cache.unit_bytes)).collect();
        assert_eq!(caches, [(3, 0), (1, 32)]);
        assert!(windowed.notes[1].starts_with("3 layers look back over a window only"), "{:?}", windowed.notes);

        let linear = json!({
            "full_attention_interval": 2, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
            "linear_key_head_dim": 8, "linear_value_head_dim": 8,
        });
        let shape = shaped(&linear);
        assert_eq!(shape.layers.len(), 4);
        assert_eq!(columns(&shape.layers[0].1.mixer), 2 * 16 + 4 * 16 + 4 * 8 + 4 * 2);
        assert_eq!(shape.layers[0].1.cache, Cache::default());
        assert_eq!(columns(&shape.layers[1].1.mixer), 8 * (16 + 2 + 2 + 8));

        let short = read(&json!({"layer_types": ["full_attention"]})).expect_err("too short");
        assert_eq!(short, ["the list of layer types has 1 entries for 4 layers"]);
        let unnamed = read(&json!({"layer_types": vec!["linear_attention"; 4]})).expect_err("no heads");
        assert_eq!(unnamed, ["linear_num_value_heads is missing"]);
    }

    #[test]
    fn layers_of_two_kinds_may_differ_in_their_heads() {
        // Gemma 4: fewer, wider heads and no values of their own where attention is full.
        let gemma = shaped(&json!({
            "layer_types": ["sliding_attention", "sliding_attention", "sliding_attention", "full_attention"],
            "global_head_dim": 16, "num_global_key_value_heads": 1, "attention_k_eq_v": true,
        }));
        assert_eq!(columns(&gemma.layers[0].1.mixer), 8 * (8 + 2 + 2 + 8));
        assert_eq!(columns(&gemma.layers[1].1.mixer), 16 * (8 + 1 + 8));
        let mimo = shaped(&json!({"hybrid_layer_pattern": [0, 1, 1, 1], "swa_num_key_value_heads": 4}));
        assert_eq!(columns(&mimo.layers[0].1.mixer), 8 * (8 + 2 + 2 + 8));
        assert_eq!(columns(&mimo.layers[1].1.mixer), 8 * (8 + 4 + 4 + 8));
    }

    #[test]
    fn one_mixer_a_layer() {
        let nemotron = shaped(&experts(json!({
            "architectures": ["NemotronHForCausalLM"], "hybrid_override_pattern": "ME*-", "mamba_num_heads": 4,
            "mamba_head_dim": 8, "n_groups": 2, "ssm_state_size": 16, "moe_latent_size": 32,
            "moe_shared_expert_intermediate_size": 48,
        })));
        let layer = |index: usize| &nemotron.layers[index].1;
        assert_eq!(columns(&layer(0).mixer), 4 * (2 * 8 + 1) + 2 * 2 * 16 + 4 * 8);
        assert_eq!(layer(0).feed_forward, None);
        let block = layer(1).feed_forward.as_ref().expect("experts");
        assert_eq!(columns(&block.always), 16 + 2 * 48 + 2 * 32);
        assert_eq!(columns(&block.expert) * HIDDEN, 2 * 32 * 32);
        assert!(layer(1).mixer.is_empty());
        assert_eq!(columns(&layer(2).mixer), 8 * (8 + 2 + 2 + 8));
        assert_eq!(columns(&layer(3).feed_forward.as_ref().expect("dense").always), 2 * 160);
        let listed = json!({"architectures": ["NemotronHForCausalLM"], "layers_block_type": ["mamba", "moe", "mlp", "attention"]});
        let missing = read(&listed).expect_err("incomplete");
        assert_eq!(missing.len(), 5, "{missing:?}");
    }

    #[test]
    fn blocks_name_their_own_heads_and_widths() {
        let block = |group: u64, multiple: f64, gone: bool| {
            json!({
                "attention": {"n_heads_in_group": group, "no_op": gone}, "ffn": {"ffn_mult": multiple},
            })
        };
        let changes = |last: Value| {
            json!({
                "architectures": ["DeciLMForCausalLM"], "intermediate_size": null, "num_key_value_heads": null,
                "block_configs": [block(4, 6.0, false), block(4, 6.0, false), block(8, 12.1, true), last],
            })
        };
        let shape = shaped(&changes(block(8, 6.0, false)));
        assert_eq!(shape.layers.iter().map(|(count, _)| *count).collect::<Vec<_>>(), [2, 1, 1]);
        assert_eq!(columns(&shape.layers[0].1.mixer), 8 * (8 + 2 + 2 + 8));
        assert_eq!(columns(&shape.layers[0].1.feed_forward.as_ref().expect("dense").always), 3 * 256);
        assert!(shape.layers[1].1.mixer.is_empty());
        // 2 x 12.1 x 64 / 3 is 516.
        assert_eq!(columns(&shape.layers[1].1.feed_forward.as_ref().expect("dense").always), 3 * 768);
        assert_eq!(columns(&shape.layers[2].1.mixer), 8 * (8 + 1 + 1 + 8));
        let refused = read(&changes(block(3, f64::MAX, false))).expect_err("no such heads");
        assert_eq!(
            refused,
            ["block_configs.attention.n_heads_in_group is missing", "block_configs.ffn.ffn_mult is missing"]
        );
    }

    #[test]
    fn formats_differ_by_layer_and_are_told() {
        let shape = shaped(&json!({"quantization_config": {
            "quant_method": "fp8", "modules_to_not_convert": ["model.layers.0.self_attn*", "model.layers.3.mlp.down_proj"],
        }}));
        assert_eq!(shape.layers.iter().map(|(count, _)| *count).collect::<Vec<_>>(), [1, 2, 1]);
        assert!(shape.layers[0].1.mixer.iter().all(|matrix| matrix.stored == Stored::HALF));
        assert_eq!(
            shape.notes[0],
            "bits per weight as stored, scales included: attention 8 and 16, dense blocks 8 and 16; router and head 16"
        );
        let unknown = shaped(&json!({"quantization_config": {"quant_method": "hqq"}}));
        assert!(unknown.notes[0].starts_with("the quantisation \"hqq\" is not known"), "{:?}", unknown.notes);
    }

    #[test]
    fn drafts_of_models_with_narrow_blocks_are_built_after_the_hidden_state() {
        let intermediate = |changes: &Value| shaped(changes).draft[3].units;
        assert_eq!(intermediate(&json!({})), 160);
        assert_eq!(intermediate(&experts(json!({}))), 160);
        assert_eq!(intermediate(&experts(json!({"moe_intermediate_size": null}))), HIDDEN * 7 / 2);
        let headless = json!({"num_attention_heads": null, "head_dim": 8});
        assert_eq!(read(&headless), Err(vec!["num_attention_heads is missing".to_owned()]));
    }
}
