//! One rank's forward pass: what it reads, what it reduces, and at which sizes it is timed.
//!
//! The micro-benchmark times collectives alone, one after the other. In a server matrix products lie
//! between them, and settings that take streaming multiprocessors or memory bandwidth away from
//! those cost more than the collectives show. At the few tokens of decoding a product takes as long
//! as reading its weights does, so bytes are the measure here.

use super::architecture::{DraftKind, Standing};
use super::derive::{Pass, check, message_bytes, phase, prefill_sizes};
use super::draft::{Rounds, steps};
use super::shape::{DRAFT_VOCABULARY, FeedForwardShape, LayerShape, Matrix, ModelShape};
use super::{ModelConfig, Stored, WorkloadError, WorkloadRequest, shown};
use crate::collective::DataType;
use crate::engine::Engine;
use crate::record::{DraftShape, FORMAT, FeedForward, LayerRun, PassCase, PassShape, PointPhase};
use crate::units::{format_size, group_thousands};

/// The most bytes one rank may be asked to hold: far above any GPU, and far below what would
/// overflow whoever adds them up.
const MAX_RANK_BYTES: u64 = 1 << 50;

/// All-reduces of one pass of the assumed draft: embedding, attention, feed-forward. Source:
/// sgl-project/sglang, python/sglang/srt/models/llama_eagle3.py, read in a snapshot, not run.
const DRAFT_REDUCES: u32 = 3;

/// The pass of one rank, with its weights by the bytes they are stored in.
///
/// Fails where [`derive()`](super::derive()) fails, and where the config does not tell the weights:
/// [`WorkloadError::NoPassShape`].
pub fn pass_shape(config: &ModelConfig, request: &WorkloadRequest) -> Result<PassShape, WorkloadError> {
    check(config, request)?;
    let no_shape = |reasons: Vec<String>| WorkloadError::NoPassShape { name: config.name.clone(), reasons };
    let model = config.shape.as_ref().map_err(|reasons| no_shape(reasons.clone()))?;
    if request.layout.attention_data_parallel {
        return Err(no_shape(vec![
            "under attention data parallelism a pass gathers and scatters, which the passes of this version do not"
                .to_owned(),
        ]));
    }
    let ranks = request.tensor_parallel;
    // A head that shares its matrix with the embedding is read all the same.
    let head = config.padded_vocabulary().map(|rows| Matrix {
        units: rows,
        unit_elements: config.hidden_size,
        stored: Stored::HALF,
    });
    let mut notes = general_notes(config);
    notes.extend(model.notes.iter().cloned());
    if config.dtype != DataType::Bf16 {
        notes.push(format!("the model computes in {}; the trial computes and reduces in bf16", config.dtype));
    }
    let stages = request.layout.pipeline_stages;
    let layers = first_stage(model, stages);
    if stages > 1 {
        let count: u32 = layers.iter().map(|(count, _)| count).sum();
        notes.push(format!(
            "the pass is that of the first of {stages} pipeline stages: embedding and {count} layers, with no head and \
             nothing sent on"
        ));
    }
    let shape = PassShape {
        format: FORMAT,
        model: config.name.clone(),
        hidden: config.hidden_size,
        layers: layers.iter().map(|(count, layer)| run(*count, layer, ranks)).collect(),
        head_bytes: head.filter(|_| stages == 1).map_or(0, |head| head.bytes(ranks)),
        embedding_reduces: config.vocab_size.is_some(),
        // The draft runs where the head is.
        draft: if stages == 1 { draft(config, &model.draft, request, &mut notes) } else { None },
        notes,
    };
    let held = held_bytes(&shape);
    if held > MAX_RANK_BYTES {
        return Err(no_shape(vec![format!(
            "a GPU would hold {} of weights, and no more than {} are believed",
            format_size(held),
            format_size(MAX_RANK_BYTES)
        )]));
    }
    Ok(shape)
}

/// The passes to be timed: one for each batch of the request, with its share of the objective, and
/// as guards, with weight 0, prefill of a chunk and of a short one, issued call by call.
///
/// A batch counts as captured unless its engine captures other sizes and not this one; programs
/// without an engine around them are taken to capture what they decode. `context` is the tokens of
/// context whose cache each sequence of a batch reads.
pub fn pass_cases(
    config: &ModelConfig,
    request: &WorkloadRequest,
    context: u64,
) -> Result<Vec<PassCase>, WorkloadError> {
    check(config, request)?;
    let total: f64 = request.batches.iter().map(|(_, weight)| weight).sum();
    let mut cases = Vec::with_capacity(request.batches.len() + 2);
    for &(batch, weight) in &request.batches {
        let pass = Pass::of(batch, request);
        message_bytes(config, pass.tokens, || pass.in_words(request))?;
        cases.push(PassCase {
            tokens: pass.tokens,
            batch,
            weight: weight / total,
            phase: phase(request),
            captured: pass.captured || request.engine.padding_unit().is_none(),
            context,
        });
    }
    for tokens in prefill_sizes(request).map(u64::from) {
        message_bytes(config, tokens, || format!("a prefill chunk of {tokens} tokens"))?;
        cases.push(PassCase { tokens, batch: 1, weight: 0.0, phase: PointPhase::Prefill, captured: false, context: 0 });
    }
    Ok(cases)
}

/// What holds for every pass of this model.
fn general_notes(config: &ModelConfig) -> Vec<String> {
    if config.standing == Standing::MadeUp {
        // Nothing was read, so nothing was assumed.
        return config.notes.clone();
    }
    let mut notes = vec![
        "weights follow from the config's numbers alone; norms, biases and convolutions are left out, and embeddings, \
         of which a pass reads a few rows"
            .to_owned(),
    ];
    if let Standing::Unknown(_) = config.standing {
        let architecture = config.architecture.as_deref().map_or_else(|| "the model".to_owned(), shown);
        notes.push(format!("{architecture} is shaped as an ordinary decoder, because --assume-decoder was given"));
    }
    notes
}

/// The layers of the first of so many stages, which share them as evenly as they can.
fn first_stage(model: &ModelShape, stages: u32) -> Vec<(u32, LayerShape)> {
    let all: u32 = model.layers.iter().map(|(count, _)| count).sum();
    let mut left = all.div_ceil(stages);
    let mut layers = Vec::new();
    for (count, layer) in &model.layers {
        let taken = left.min(*count);
        if taken > 0 {
            layers.push((taken, layer.clone()));
        }
        left -= taken;
    }
    layers
}

fn total(matrices: &[Matrix], ranks: u32) -> u64 {
    matrices.iter().fold(0, |sum, matrix| sum.saturating_add(matrix.bytes(ranks)))
}

fn run(count: u32, layer: &LayerShape, ranks: u32) -> LayerRun {
    LayerRun {
        count,
        attention_bytes: total(&layer.mixer, ranks),
        cache_bytes_per_token: layer.cache.units.div_ceil(u64::from(ranks)) * layer.cache.unit_bytes,
        attention_reduces: !layer.mixer.is_empty(),
        feed_forward: layer.feed_forward.as_ref().map(|block| feed_forward(block, ranks)),
    }
}

fn feed_forward(block: &FeedForwardShape, ranks: u32) -> FeedForward {
    FeedForward {
        always_bytes: total(&block.always, ranks),
        expert_bytes: total(&block.expert, ranks),
        experts: block.experts,
        experts_per_token: block.experts_per_token,
    }
}

/// Passes of the draft before each verify pass, and what the draft is taken to be.
fn draft(
    target: &ModelConfig,
    matrices: &[Matrix],
    request: &WorkloadRequest,
    notes: &mut Vec<String>,
) -> Option<DraftShape> {
    let drafted = steps(request);
    if drafted == 0 {
        return None;
    }
    if let Some(draft) = &request.draft {
        match known_draft(target, draft, request) {
            Ok(shape) => {
                notes.push(draft_note(draft, &shape));
                return Some(shape);
            }
            Err(reasons) => notes.push(format!(
                "the weights of the draft {} cannot be told, because {}; one is assumed in its place",
                draft.name,
                reasons.join(" and ")
            )),
        }
    }
    if matrices.is_empty() {
        notes.push("no draft model can be assumed; the passes before each verify pass are left out".to_owned());
        return None;
    }
    // SGLang's first token comes from extending the draft over the accepted ones, after the verify
    // pass; vLLM's first pass does both. Sources: sgl-project/sglang,
    // python/sglang/srt/speculative/eagle_worker.py (`draft_forward`); vllm-project/vllm,
    // vllm/v1/spec_decode/eagle.py (`propose`); read in a snapshot, not run.
    let passes = match request.engine {
        Engine::Sglang => drafted - 1,
        Engine::Vllm | Engine::Torch | Engine::None => drafted,
    };
    if passes == 0 {
        notes.push(format!(
            "{} drafts a single token after the verify pass, so no draft pass comes before it",
            request.engine.title()
        ));
        return None;
    }
    let plural = if passes == 1 { "pass" } else { "passes" };
    notes.push(format!(
        "the draft is assumed to be an EAGLE-3 one: one dense bf16 layer as wide as the target with a head over {} \
         tokens, {passes} {plural} of one token per sequence before each verify pass, a chain and no tree; extending it \
         over accepted tokens is left out",
        group_thousands(DRAFT_VOCABULARY)
    ));
    let bytes = total(matrices, request.tensor_parallel);
    Some(DraftShape { passes, bytes, reduces: DRAFT_REDUCES, ..DraftShape::default() })
}

/// The passes of a draft whose config is known.
fn known_draft(
    target: &ModelConfig,
    draft: &ModelConfig,
    request: &WorkloadRequest,
) -> Result<DraftShape, Vec<String>> {
    let model = draft.shape.as_ref().map_err(Clone::clone)?;
    let ranks = request.tensor_parallel;
    let mut bytes = 0_u64;
    for (count, layer) in &model.layers {
        let mut layer_bytes = total(&layer.mixer, ranks);
        if draft.standing == Standing::Draft(DraftKind::Eagle3) {
            // Queries, keys and values read embedding and hidden state side by side; only the output
            // projection, which comes last, is as wide as it says.
            let inputs = layer.mixer.split_last().map_or(0, |(_, inputs)| total(inputs, ranks));
            layer_bytes = layer_bytes.saturating_add(inputs);
        }
        let block = layer.feed_forward.as_ref().map_or(0, |block| feed_forward(block, ranks).bytes(1));
        bytes = bytes.saturating_add(layer_bytes.saturating_add(block).saturating_mul(u64::from(*count)));
    }
    let head = draft.padded_vocabulary().map(|rows| Matrix {
        units: rows,
        unit_elements: draft.hidden_size,
        stored: Stored::HALF,
    });
    let rounds = Rounds::of(request);
    Ok(DraftShape {
        passes: rounds.passes,
        bytes: bytes.saturating_add(head.map_or(0, |head| head.bytes(ranks))),
        reduces: draft.all_reduces.calls(),
        hidden: (draft.hidden_size != target.hidden_size).then_some(draft.hidden_size),
        tokens_per_sequence: (rounds.tokens != 1).then_some(rounds.tokens),
        long_tokens_per_sequence: rounds.long,
    })
}

fn draft_note(draft: &ModelConfig, shape: &DraftShape) -> String {
    let long =
        shape.long_tokens_per_sequence.map_or_else(String::new, |tokens| format!("one pass of {tokens} tokens, "));
    format!(
        "the draft {} reads {} of weights a pass: {long}{} of {} per sequence; routed experts as for one token",
        draft.name,
        format_size(shape.bytes),
        shape.passes,
        shape.tokens_per_sequence.unwrap_or(1)
    )
}

/// Everything a rank holds of it, the embedding excepted; saturates.
fn held_bytes(shape: &PassShape) -> u64 {
    let layers = shape.layers.iter().fold(0_u64, |sum, run| {
        let block = run.feed_forward.as_ref().map_or(0, |block| {
            block.expert_bytes.saturating_mul(u64::from(block.experts)).saturating_add(block.always_bytes)
        });
        sum.saturating_add(run.attention_bytes.saturating_add(block).saturating_mul(u64::from(run.count)))
    });
    let draft = shape.draft.as_ref().map_or(0, |draft| draft.bytes);
    layers.saturating_add(shape.head_bytes).saturating_add(draft)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use serde_json::{Value, json};

    use super::*;
    use crate::collective::Collective;
    use crate::workload::{derive, parse_batches, parse_config, preset, preset_names};

    fn model(name: &str) -> ModelConfig {
        preset(name).expect("a preset").expect("a valid preset")
    }

    fn parsed(config: &Value) -> ModelConfig {
        parse_config(&config.to_string(), "test").expect("a valid config")
    }

    fn request(engine: Engine, tensor_parallel: u32, verify_tokens: u32) -> WorkloadRequest {
        WorkloadRequest {
            engine,
            tensor_parallel,
            batches: parse_batches("1:3,4:1").expect("valid"),
            verify_tokens,
            gpu_memory_mib: Some(97_887),
            ..WorkloadRequest::default()
        }
    }

    fn shaped(config: &ModelConfig, tensor_parallel: u32) -> PassShape {
        pass_shape(config, &request(Engine::Sglang, tensor_parallel, 1)).expect("valid")
    }

    /// Bytes of weights that one rank reads in a pass.
    fn read_bytes(shape: &PassShape, tokens: u64) -> u64 {
        let layer = |run: &LayerRun| run.attention_bytes + run.feed_forward.as_ref().map_or(0, |ff| ff.bytes(tokens));
        shape.layers.iter().map(|run| u64::from(run.count) * layer(run)).sum::<u64>() + shape.head_bytes
    }

    fn reduces(shape: &PassShape) -> u32 {
        let layer = |run: &LayerRun| u32::from(run.attention_reduces) + u32::from(run.feed_forward.is_some());
        u32::from(shape.embedding_reduces) + shape.layers.iter().map(|run| run.count * layer(run)).sum::<u32>()
    }

    fn small() -> Value {
        json!({
            "architectures": ["LlamaForCausalLM"], "dtype": "bfloat16", "hidden_size": 64, "num_hidden_layers": 2,
            "vocab_size": 100, "num_attention_heads": 8, "num_key_value_heads": 2, "intermediate_size": 160,
        })
    }

    #[test]
    fn presets_add_up_to_their_checkpoints() {
        // The sizes of the published safetensors files, which hold the embedding too.
        for (name, gigabytes) in [("kimi-k2.5", 595.0), ("llama-3.1-70b", 141.0)] {
            let config = model(name);
            let embedding = 2 * config.vocab_size.expect("it has a head") * config.hidden_size;
            let all = 2 * read_bytes(&shaped(&config, 2), 1_000_000) + embedding;
            let ratio = all as f64 / 1e9 / gigabytes;
            assert!((0.97..1.03).contains(&ratio), "{name}: {all} bytes, {ratio}");
        }
    }

    #[test]
    fn kimi_on_eight_ranks_by_hand() {
        let shape = shaped(&model("kimi-k2.5"), 8);
        let (dense, sparse) = (&shape.layers[0], &shape.layers[1]);
        assert_eq!((dense.count, sparse.count, shape.layers.len()), (1, 60, 2));
        // Down-projections whole, of the rest 8 of 64 heads.
        let attention = 7168 * 1536 + 8 * 1536 * 192 + 7168 * 576 + 8 * 512 * 256 + 8 * 128 * 7168;
        assert_eq!(dense.attention_bytes, 2 * attention);
        assert_eq!(sparse.attention_bytes, 2 * attention);
        assert_eq!(sparse.cache_bytes_per_token, (512 + 64) * 2);
        assert_eq!(dense.feed_forward.as_ref().map(|ff| ff.bytes(1)), Some(2 * 3 * 18_432 / 8 * 7168));
        let block = sparse.feed_forward.as_ref().expect("experts");
        assert_eq!((block.experts, block.experts_per_token), (384, 8));
        assert_eq!(block.always_bytes, 2 * (384 * 7168 + 3 * 2048 / 8 * 7168));
        assert_eq!(block.expert_bytes, 3 * 2048 / 8 * 7168 * 9 / 16);
        assert_eq!(shape.head_bytes, 163_840 / 8 * 7168 * 2);
        assert_eq!(shape.draft, None);
    }

    #[test]
    fn key_value_heads_are_copied_where_there_are_too_few() {
        let llama = model("llama-3.1-70b");
        let at = |ranks: u32| {
            let shape = shaped(&llama, ranks);
            (shape.layers[0].attention_bytes, shape.layers[0].cache_bytes_per_token)
        };
        assert_eq!(at(8), (2 * 8192 * 128 * (2 * 8 + 2), 512));
        assert_eq!(at(16), (2 * 8192 * 128 * (2 * 4 + 2), 512));
        assert_eq!(at(4).1, 2 * 512);
    }

    #[test]
    fn reductions_agree_with_the_collectives() {
        for name in preset_names() {
            let config = model(name);
            assert_eq!(reduces(&shaped(&config, 8)), config.all_reduces.calls(), "{name}");
        }
    }

    #[test]
    fn bench_is_the_same_work_at_every_width() {
        let bench = model("bench");
        let shape = shaped(&bench, 8);
        for ranks in [2, 3, 64] {
            assert_eq!(shaped(&bench, ranks), shape);
        }
        assert_eq!(reduces(&shape), 122);
        assert_eq!(shape.layers[0].attention_bytes, 2 * 2 * 7168 * 1024);
        assert_eq!(read_bytes(&shape, 1), 61 * 2 * 2 * 7168 * (1024 + 4096));
        assert_eq!(read_bytes(&shape, 1), read_bytes(&shape, 64));
        assert_eq!((shape.head_bytes, shape.layers[0].cache_bytes_per_token), (0, 0));
        let drafted = pass_shape(&bench, &request(Engine::Vllm, 8, 4)).expect("valid");
        assert_eq!(drafted.draft, None);
        assert!(drafted.notes[0].starts_with("bench is no model"), "{:?}", drafted.notes);
    }

    #[test]
    fn bench_is_tuned_for_like_any_model() {
        let workload = derive(&model("bench"), &request(Engine::Sglang, 3, 1)).expect("valid");
        let seen = |points: &[crate::record::Point]| -> Vec<(Collective, u32, u64)> {
            points.iter().map(|point| (point.collective, point.calls_per_pass, point.bytes / (7168 * 2))).collect()
        };
        let reduce = |tokens| (Collective::AllReduce, 122, tokens);
        assert_eq!(seen(&workload.points), [reduce(1), reduce(4)]);
        assert_eq!(seen(&workload.guard), [reduce(8192), reduce(2048)]);
        let told = workload.assumptions.join("\n");
        assert!(
            told.contains("bench is no model") && !told.contains("logits") && !told.contains("key-value"),
            "{told}"
        );
    }

    #[test]
    fn drafts_run_as_often_as_the_engine_runs_them() {
        let passes = |engine, verify_tokens| {
            let shape = pass_shape(&model("kimi-k2.5"), &request(engine, 8, verify_tokens)).expect("valid");
            shape.draft.map(|draft| (draft.passes, draft.reduces))
        };
        assert_eq!(passes(Engine::Sglang, 4), Some((2, 3)));
        assert_eq!(passes(Engine::Sglang, 2), None);
        assert_eq!(passes(Engine::Vllm, 4), Some((3, 3)));
        assert_eq!(passes(Engine::Vllm, 2), Some((1, 3)));
        assert_eq!(passes(Engine::Vllm, 1), None);
        let shape = pass_shape(&model("kimi-k2.5"), &request(Engine::Sglang, 8, 4)).expect("valid");
        // 64 query and 64 key-value heads of 128 over a doubled input, 18,432 columns, a head of 32,000.
        let columns = 8 * 128 * (2 + 4 + 1) + 3 * 18_432 / 8 + 32_000 / 8;
        assert_eq!(shape.draft.map(|draft| draft.bytes), Some(2 * 7168 * columns));
        assert!(shape.notes.iter().any(|note| note.contains("assumed to be an EAGLE-3 one")), "{:?}", shape.notes);
    }

    #[test]
    fn cases_are_batches_and_then_prefill() {
        use PointPhase::{Decode, Prefill, Verify};
        let cases = |engine, verify_tokens, batches: &str, chunk| {
            let request = WorkloadRequest {
                batches: parse_batches(batches).expect("valid"),
                chunk,
                ..request(engine, 8, verify_tokens)
            };
            pass_cases(&model("kimi-k2.5"), &request, 4096).expect("valid")
        };
        let seen = cases(Engine::Sglang, 4, "1:3,9:1", None);
        let tokens: Vec<(u64, u32, bool, u64)> =
            seen.iter().map(|case| (case.tokens, case.batch, case.captured, case.context)).collect();
        assert_eq!(tokens, [(4, 1, true, 4096), (40, 9, true, 4096), (8192, 1, false, 0), (2048, 1, false, 0)]);
        let weights: Vec<f64> = seen.iter().map(|case| case.weight).collect();
        assert_eq!(weights, [0.75, 0.25, 0.0, 0.0]);
        assert_eq!(seen.iter().map(|case| case.phase).collect::<Vec<_>>(), [Verify, Verify, Prefill, Prefill]);

        let captured: Vec<bool> =
            cases(Engine::Sglang, 1, "1,600", Some(2048)).iter().map(|case| case.captured).collect();
        assert_eq!(captured, [true, false, false]);
        assert_eq!(cases(Engine::Torch, 1, "9", None)[0].phase, Decode);
        assert!(cases(Engine::Torch, 1, "9", None)[0].captured);
    }

    #[test]
    fn a_config_without_widths_can_be_tuned_for_and_not_shaped() {
        let mut config = small();
        config["intermediate_size"] = json!(null);
        config["head_dim"] = json!("wide");
        let config = parsed(&config);
        let request = request(Engine::Sglang, 2, 1);
        assert!(derive(&config, &request).is_ok() && pass_cases(&config, &request, 0).is_ok());
        assert_eq!(
            pass_shape(&config, &request).expect_err("cannot be shaped").to_string(),
            "test: its forward pass cannot be shaped, because head_dim should be a whole number from 0 to 16384, found \
             \"wide\" and intermediate_size is missing; the micro-benchmark does not need this and works without, the \
             trial inside a forward pass does not"
        );
    }

    #[test]
    fn what_derive_refuses_is_refused_here() {
        let kimi = model("kimi-k2.5");
        for request in [request(Engine::Sglang, 3, 1), request(Engine::Sglang, 8, 0), request(Engine::Sglang, 1, 1)] {
            let error = derive(&kimi, &request).expect_err("refused");
            assert_eq!(pass_shape(&kimi, &request).expect_err("refused"), error);
            assert_eq!(pass_cases(&kimi, &request, 0).expect_err("refused"), error);
        }
        let long = WorkloadRequest { chunk: Some(1 << 20), ..request(Engine::Sglang, 8, 1) };
        assert_eq!(pass_cases(&kimi, &long, 0).expect_err("refused"), derive(&kimi, &long).expect_err("refused"));
    }

    #[test]
    fn strangers_and_other_types_say_so() {
        let mut config = small();
        config["architectures"] = json!(["NewForCausalLM"]);
        config["dtype"] = json!("float16");
        let config = parsed(&config);
        let asked = request(Engine::Sglang, 2, 1);
        assert!(matches!(pass_shape(&config, &asked), Err(WorkloadError::UnknownArchitecture { .. })));
        let shape = pass_shape(&config, &WorkloadRequest { assume_decoder: true, ..asked }).expect("allowed");
        let told = shape.notes.join("\n");
        assert!(told.contains("\"NewForCausalLM\" is shaped as an ordinary decoder"), "{told}");
        assert!(told.contains("computes in fp16"), "{told}");
    }

    #[test]
    fn no_gpu_holds_everything() {
        let mut config = small();
        for (field, value) in [("hidden_size", 1 << 20), ("intermediate_size", 1 << 20), ("num_hidden_layers", 1 << 16)]
        {
            config[field] = json!(value);
        }
        let error = pass_shape(&parsed(&config), &request(Engine::Sglang, 2, 1)).expect_err("refused").to_string();
        assert!(error.contains("a GPU would hold") && error.contains("are believed"), "{error}");
    }

    /// A config whose numbers mostly fit each other, some of them absent or absurd.
    fn any_config() -> impl Strategy<Value = Value> {
        let number = prop_oneof![
            6 => (0..6_u32).prop_map(|power| json!(1_u64 << power)),
            2 => (0..1_u64 << 21).prop_map(Value::from),
            1 => Just(json!(null)),
            1 => any::<i64>().prop_map(Value::from),
            1 => Just(json!([0, 1, "sliding_attention", "linear_attention"])),
        ];
        let names = vec![
            "intermediate_size",
            "moe_intermediate_size",
            "head_dim",
            "num_experts",
            "n_routed_experts",
            "n_shared_experts",
            "shared_expert_intermediate_size",
            "num_experts_per_tok",
            "first_k_dense_replace",
            "moe_layer_freq",
            "decoder_sparse_step",
            "mlp_only_layers",
            "q_lora_rank",
            "kv_lora_rank",
            "qk_nope_head_dim",
            "qk_rope_head_dim",
            "v_head_dim",
            "index_n_heads",
            "index_head_dim",
            "layer_types",
            "hybrid_layer_pattern",
            "full_attention_interval",
            "linear_num_key_heads",
            "linear_num_value_heads",
            "linear_key_head_dim",
            "linear_value_head_dim",
            "num_key_value_heads",
            "mamba_num_heads",
            "mamba_head_dim",
            "ssm_state_size",
            "n_groups",
            "moe_latent_size",
        ];
        let kind = prop::sample::select(vec!["LlamaForCausalLM", "NemotronHForCausalLM", "DeciLMForCausalLM"]);
        (kind, prop::collection::vec((prop::sample::select(names), number), 0..24)).prop_map(|(kind, pairs)| {
            let mut config = small();
            config["architectures"] = json!([kind]);
            config["num_hidden_layers"] = json!(4);
            config["hybrid_override_pattern"] = json!("ME*-");
            let block =
                |group, multiple| json!({"attention": {"n_heads_in_group": group}, "ffn": {"ffn_mult": multiple}});
            config["block_configs"] = json!([block(8, 1.5), block(4, 1e300), block(4, 2.0), block(1, 0.5)]);
            if pairs.len() % 2 == 0 {
                config["block_configs"][1] = block(2, 1.0);
            }
            for (name, value) in pairs {
                config[name] = value;
            }
            config
        })
    }

    proptest! {
        #[test]
        fn shapes_never_panic_and_grow_with_tokens(config in any_config(), ranks in 2..=8_u32, verify in 1..=8_u32) {
            let Ok(config) = parse_config(&config.to_string(), "fuzz") else { return Ok(()) };
            if let Ok(shape) = pass_shape(&config, &request(Engine::Vllm, ranks, verify)) {
                prop_assert_eq!(reduces(&shape), config.all_reduces.calls());
                let sizes = [0, 1, 2, 16, 4096, u64::MAX].map(|tokens| read_bytes(&shape, tokens));
                prop_assert!(sizes.is_sorted(), "{sizes:?}");
                prop_assert!(sizes[5] <= MAX_RANK_BYTES);
                prop_assert_eq!(shape.draft.is_some(), verify > 1);
            }
        }

        #[test]
        fn ranks_share_what_divides(heads in 1..=4_u64, columns in 1..=64_u64, power in 1..=3_u32) {
            let ranks = 1_u32 << power;
            let mut config = small();
            config["head_dim"] = json!(16);
            config["num_attention_heads"] = json!(heads * 8);
            config["num_key_value_heads"] = json!(heads * 8);
            config["intermediate_size"] = json!(columns * 8);
            let at = |ranks: u32| read_bytes(&shaped(&parsed(&config), ranks), 1);
            let whole = 2 * 64 * (2 * (4 * heads * 8 * 16 + 3 * columns * 8) + 128);
            prop_assert_eq!(at(ranks) * u64::from(ranks), whole);
        }
    }
}
