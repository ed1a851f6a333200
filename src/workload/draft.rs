//! The passes of a draft model around each verify pass.
//!
//! SGLang: one pass a step but the last, each of as many tokens a sequence as branches are followed,
//! then the verify pass, then one pass in which the draft reads what was accepted and proposes the
//! first token of the next round. vLLM: a first pass over all tokens of the verify pass, then one a
//! step of one token a sequence. Sources: sgl-project/sglang,
//! python/sglang/srt/speculative/eagle_worker.py (`draft_forward`) and eagle_draft_extend_cuda_graph_runner.py;
//! vllm-project/vllm, vllm/v1/spec_decode/eagle.py (`propose`); read in snapshots, not run.

use super::architecture::{DraftKind, Standing};
use super::config::{AllReduceRule, ModelConfig};
use super::derive::{MAX_VERIFY_TOKENS, Pass, WorkloadRequest, all_reduce, check_architecture, check_width, logits};
use super::shape::ModelShape;
use super::{WorkloadError, shown};
use crate::engine::Engine;
use crate::record::{Point, PointPhase};

/// The draft passes of one round, by tokens a sequence.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Rounds {
    /// Short passes.
    pub(super) passes: u32,
    /// Tokens each of them holds for a sequence.
    pub(super) tokens: u32,
    /// Tokens of the pass that reads what was accepted; none where that is a short one.
    pub(super) long: Option<u32>,
}

impl Rounds {
    /// The rounds of this request, whichever model drafts.
    pub(super) fn of(request: &WorkloadRequest) -> Self {
        let steps = steps(request);
        let (passes, long) = match request.engine {
            Engine::Sglang => (steps.saturating_sub(1), Some(steps + 1)),
            Engine::Vllm => (steps.saturating_sub(1), Some(request.verify_tokens)),
            Engine::Torch | Engine::None => (steps, None),
        };
        Self { passes, tokens: request.draft_top, long }
    }
}

/// Tokens the draft proposes one after the other.
pub(super) fn steps(request: &WorkloadRequest) -> u32 {
    request.draft_steps.unwrap_or(request.verify_tokens.saturating_sub(1))
}

/// The layers that a model brings for predicting the token after next, as a draft of its own.
pub fn next_token_draft(target: &ModelConfig) -> Result<ModelConfig, WorkloadError> {
    let Some(layers) = target.next_token_layers else {
        return Err(WorkloadError::NoNextTokenLayers { name: target.name.clone() });
    };
    Ok(ModelConfig {
        name: format!("the {layers} next-token layers of {}", target.name),
        standing: Standing::Draft(DraftKind::NextToken),
        all_reduces: AllReduceRule::Decoder { layers },
        shape: target.shape.clone().map(|shape| last_layers(&shape, layers)),
        notes: Vec::new(),
        ..target.clone()
    })
}

/// A model of this many layers, each like the last one of `shape`.
pub(super) fn last_layers(shape: &ModelShape, layers: u32) -> ModelShape {
    let last = shape.layers.last().map(|(_, layer)| (layers, layer.clone()));
    ModelShape { layers: last.into_iter().collect(), ..shape.clone() }
}

/// What must hold of the draft and of how it is used.
pub(super) fn check_draft(request: &WorkloadRequest) -> Result<(), WorkloadError> {
    let refused = |reason: String| Err(WorkloadError::DraftUse { reason });
    let steps = steps(request);
    if request.draft_steps.is_some() || request.draft.is_some() || request.draft_top != 1 {
        if request.verify_tokens < 2 {
            return refused(
                "the target has to check more than one token: give --verify-tokens, the root included".to_owned(),
            );
        }
        if !(1..MAX_VERIFY_TOKENS).contains(&steps) {
            return refused(format!("{steps} draft steps are out of range, from 1 to {}", MAX_VERIFY_TOKENS - 1));
        }
        if !(1..=MAX_VERIFY_TOKENS).contains(&request.draft_top) {
            return refused(format!("{} branches are out of range, from 1 to {MAX_VERIFY_TOKENS}", request.draft_top));
        }
        if request.draft_top == 1 && request.verify_tokens != steps + 1 {
            return refused(format!(
                "a chain of {steps} steps gives the target {} tokens to check, root included, and --verify-tokens says {}; \
                 for a tree say how many branches a step follows with --draft-topk",
                steps + 1,
                request.verify_tokens
            ));
        }
        if request.draft_top > 1 && request.engine == Engine::Vllm {
            return refused("vLLM drafts chains: leave --draft-topk out".to_owned());
        }
    }
    let Some(draft) = &request.draft else { return Ok(()) };
    match draft.standing {
        Standing::Draft(DraftKind::Medusa) => {
            return refused(format!(
                "{}: {} proposes with heads on the target's last state, and how engines split those is not known",
                draft.name,
                draft.architecture.as_deref().map_or_else(|| "it".to_owned(), shown)
            ));
        }
        Standing::Draft(_) => {}
        // Any model may draft for a larger one.
        _ => check_architecture(draft, request)?,
    }
    check_width(draft, request.tensor_parallel)
}

/// The draft's collectives in a round for the sequences of `pass`, weights still to be set.
pub(super) fn draft_points(request: &WorkloadRequest, pass: &Pass) -> Result<Vec<Point>, WorkloadError> {
    let Some(draft) = &request.draft else { return Ok(Vec::new()) };
    let rounds = Rounds::of(request);
    let mut points = Vec::with_capacity(4);
    let mut add = |passes: u32, tokens: u64, rows: u64, what: &str| -> Result<(), WorkloadError> {
        let plural = if passes == 1 { "pass" } else { "passes" };
        let name = || format!("a draft pass of {tokens} tokens");
        let point = all_reduce(draft, request, tokens, PointPhase::Draft, name)?;
        let calls = passes * point.calls_per_pass;
        let origin = format!("{passes} draft {plural} {what}: {}", point.origin);
        points.push(Point { calls_per_pass: calls, origin, ..point });
        if let Some(point) = logits(draft, request, rows, PointPhase::Draft) {
            let origin = format!("{passes} draft {plural} {what}: {}", point.origin);
            points.push(Point { calls_per_pass: passes, origin, ..point });
        }
        Ok(())
    };
    let sequences = pass.padded_sequences(request);
    if rounds.passes > 0 {
        let tokens = match request.engine {
            Engine::Vllm => {
                let engine = request.engine;
                engine.padded_tokens(pass.batch, 1, request.gpu_memory_mib, request.tensor_parallel).tokens
            }
            _ => sequences * u64::from(rounds.tokens),
        };
        let rows = if request.engine == Engine::Vllm { u64::from(pass.batch) } else { tokens };
        add(rounds.passes, tokens, rows, "of one step")?;
    }
    if let Some(long) = rounds.long {
        let (tokens, rows) = match request.engine {
            Engine::Vllm => (pass.tokens, u64::from(pass.batch)),
            _ => (sequences * u64::from(long), sequences),
        };
        add(1, tokens, rows, "over what the target checked")?;
    }
    Ok(points)
}

/// What is assumed of the draft.
pub(super) fn draft_notes(request: &WorkloadRequest) -> Vec<String> {
    let Some(draft) = &request.draft else {
        return if request.verify_tokens > 1 {
            vec![
                "the draft model's own passes are not included: these points are the target's verify pass (--draft-model \
                 adds them)"
                    .to_owned(),
            ]
        } else {
            Vec::new()
        };
    };
    let (rounds, name) = (Rounds::of(request), &draft.name);
    let mut notes =
        vec![format!("the draft {name} is split over the same {} GPUs as its target", request.tensor_parallel)];
    match draft.standing {
        Standing::Draft(DraftKind::Eagle3) => notes.push(
            "the matrix that joins three hidden states of the target is held whole by every GPU, as read: it adds no \
             collective"
                .to_owned(),
        ),
        Standing::Draft(DraftKind::Eagle) => {
            notes.push(format!("{name} is counted like an EAGLE-3 draft; its own code was not read"));
        }
        Standing::Draft(DraftKind::NextToken) => notes.push(format!(
            "{name}: taken to be an embedding, a decoder layer for each and a head over the whole vocabulary; their code \
             was not read"
        )),
        _ => notes.push(format!("{name} is a model of its own, counted as it would be as a target")),
    }
    notes.push(match (request.engine, rounds.long) {
        (Engine::Sglang, Some(long)) => format!(
            "SGLang drafts {} short {} before each verify pass and extends the draft after it; extending is counted at \
             {long} tokens a sequence, as if all were accepted",
            rounds.passes,
            if rounds.passes == 1 { "pass" } else { "passes" }
        ),
        (_, Some(_)) => format!(
            "vLLM's first draft pass runs over all tokens of the verify pass, {} more over one token a sequence",
            rounds.passes
        ),
        (_, None) => format!("{} draft passes of one token a sequence before each verify pass", rounds.passes),
    });
    notes.extend(draft.notes.iter().map(|note| format!("draft: {note}")));
    notes
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::collective::Collective;
    use crate::record::Workload;
    use crate::workload::{derive, parse_batches, parse_config, pass_shape, preset};

    fn kimi() -> ModelConfig {
        preset("kimi-k2.5").expect("a preset").expect("valid")
    }

    /// The EAGLE-3 draft of Kimi-K2.5, as sgl-project/SpecForge has it in configs/kimi-k25-eagle3.json.
    fn eagle() -> ModelConfig {
        let text = r#"{"architectures": ["LlamaForCausalLMEagle3"], "torch_dtype": "bfloat16", "hidden_size": 7168,
            "num_hidden_layers": 1, "num_attention_heads": 64, "num_key_value_heads": 64, "head_dim": 128,
            "intermediate_size": 18432, "vocab_size": 163840, "draft_vocab_size": 32000}"#;
        parse_config(text, "eagle").expect("valid")
    }

    fn request(engine: Engine, batches: &str, verify_tokens: u32) -> WorkloadRequest {
        WorkloadRequest {
            engine,
            tensor_parallel: 8,
            batches: parse_batches(batches).expect("batches"),
            verify_tokens,
            gpu_memory_mib: Some(97_887),
            draft: Some(eagle()),
            ..WorkloadRequest::default()
        }
    }

    fn derived(request: &WorkloadRequest) -> Workload {
        derive(&kimi(), request).unwrap_or_else(|error| panic!("{error}"))
    }

    fn refused(request: &WorkloadRequest) -> String {
        derive(&kimi(), request).expect_err("must be refused").to_string()
    }

    /// (collective, calls, bytes) of the draft alone.
    fn drafted(workload: &Workload) -> Vec<(Collective, u32, u64)> {
        let points = workload.points.iter().filter(|point| point.phase == PointPhase::Draft);
        points.map(|point| (point.collective, point.calls_per_pass, point.bytes)).collect()
    }

    #[test]
    fn kimi_with_four_tokens_makes_the_round_that_was_counted_by_hand() {
        use Collective::{AllGather, AllReduce};
        let workload = derived(&request(Engine::Sglang, "1", 4));
        assert_eq!(
            drafted(&workload),
            [(AllReduce, 6, 14_336), (AllGather, 2, 64_000), (AllReduce, 3, 57_344), (AllGather, 1, 64_000)]
        );
        let calls = |collective| -> u32 {
            let points = workload.points.iter().filter(|point| point.collective == collective);
            points.map(|point| point.calls_per_pass).sum()
        };
        assert_eq!((calls(AllReduce), calls(AllGather)), (132, 4));
        let bytes: u64 = workload
            .points
            .iter()
            .filter(|point| point.collective == AllReduce)
            .map(|point| u64::from(point.calls_per_pass) * point.bytes)
            .sum();
        assert_eq!(bytes, 7_311_360);
        assert!(workload.points.iter().all(|point| point.batch == 1 && (point.weight - 1.0).abs() < 1e-12));
        assert_eq!(workload.draft.as_deref(), Some("eagle"));

        // vLLM: the first pass over all 4 tokens, two more over one.
        let vllm = derived(&request(Engine::Vllm, "1", 4));
        assert_eq!(
            drafted(&vllm),
            [(AllReduce, 6, 14_336), (AllGather, 2, 64_000), (AllReduce, 3, 57_344), (AllGather, 1, 64_000)]
        );
        // Padding: 5 tokens run as 8, and the draft with them; its logits are one row a sequence.
        let padded = drafted(&derived(&request(Engine::Vllm, "1", 5)));
        assert_eq!(padded[2..], [(AllReduce, 3, 8 * 14_336), (AllGather, 1, 64_000)]);
        // SGLang pads sequences: 9 run as 10.
        let padded = drafted(&derived(&request(Engine::Sglang, "9", 4)));
        assert_eq!(padded[..2], [(AllReduce, 6, 10 * 14_336), (AllGather, 2, 640_000)]);
        let torch = drafted(&derived(&request(Engine::Torch, "1", 4)));
        assert_eq!(torch, [(AllReduce, 9, 14_336), (AllGather, 3, 64_000)]);
    }

    #[test]
    fn trees_follow_branches_and_chains_must_fit() {
        use Collective::{AllGather, AllReduce};
        let tree = WorkloadRequest { draft_steps: Some(5), draft_top: 4, ..request(Engine::Sglang, "1", 8) };
        assert_eq!(
            drafted(&derived(&tree)),
            [
                (AllReduce, 12, 4 * 14_336),
                (AllGather, 4, 4 * 64_000),
                (AllReduce, 3, 6 * 14_336),
                (AllGather, 1, 64_000)
            ]
        );
        let chain = WorkloadRequest { draft_steps: Some(5), ..request(Engine::Sglang, "1", 8) };
        assert!(
            refused(&chain).contains("a chain of 5 steps gives the target 6 tokens to check"),
            "{}",
            refused(&chain)
        );
        let error = refused(&WorkloadRequest { draft_top: 2, ..request(Engine::Vllm, "1", 4) });
        assert!(error.contains("vLLM drafts chains"), "{error}");
        assert!(refused(&request(Engine::Sglang, "1", 1)).contains("give --verify-tokens"));
        // One step: SGLang has no pass before the verify pass.
        let single = drafted(&derived(&request(Engine::Sglang, "1", 2)));
        assert_eq!(single, [(AllReduce, 3, 2 * 14_336), (AllGather, 1, 64_000)]);
        for steps in [0, 1024] {
            let odd = WorkloadRequest { draft_steps: Some(steps), draft_top: 2, ..request(Engine::Sglang, "1", 4) };
            assert!(refused(&odd).contains("out of range"), "{steps}");
        }
    }

    #[test]
    fn drafts_of_other_kinds() {
        let with = |draft: ModelConfig| WorkloadRequest { draft: Some(draft), ..request(Engine::Sglang, "1", 2) };
        let medusa = ModelConfig { standing: Standing::Draft(DraftKind::Medusa), ..eagle() };
        assert!(refused(&with(medusa)).contains("heads on the target's last state"));
        // A small model may draft for a large one; a stranger needs the same word as a target.
        let small = preset("llama-3.1-8b").expect("a preset").expect("valid");
        let points = drafted(&derived(&with(small.clone())));
        assert_eq!(points, [(Collective::AllReduce, 65, 2 * 8192), (Collective::AllGather, 1, 256_512)]);
        let stranger = ModelConfig { standing: Standing::Unknown("for a reason"), ..small };
        assert!(refused(&with(stranger.clone())).contains("--assume-decoder"));
        assert!(derive(&kimi(), &WorkloadRequest { assume_decoder: true, ..with(stranger) }).is_ok());
        let odd = ModelConfig { attention_heads: Some(3), ..eagle() };
        assert!(refused(&with(odd)).contains("attention heads do not divide"));
    }

    #[test]
    fn a_model_may_draft_for_itself() {
        let deepseek = preset("deepseek-v3").expect("a preset").expect("valid");
        let own = next_token_draft(&deepseek).expect("it has a layer for that");
        let asked = WorkloadRequest { draft: Some(own), ..request(Engine::Sglang, "1", 2) };
        let workload = derive(&deepseek, &asked).expect("valid");
        assert_eq!(drafted(&workload), [(Collective::AllReduce, 3, 28_672), (Collective::AllGather, 1, 258_560)]);
        assert!(workload.assumptions.iter().any(|note| note.contains("their code was not read")));
        let shape = pass_shape(&deepseek, &asked).expect("shaped").draft.expect("a draft");
        // One layer of experts, as wide as the target: 8 of 256 experts, the shared one, attention, the head.
        assert!(shape.bytes > 50 << 20 && shape.bytes < 500 << 20, "{}", shape.bytes);
        assert_eq!((shape.passes, shape.reduces, shape.long_tokens_per_sequence), (0, 3, Some(2)));
        let error = next_token_draft(&kimi()).expect_err("the preset names none").to_string();
        assert!(error.contains("num_nextn_predict_layers"), "{error}");
    }

    #[test]
    fn the_trial_reads_the_drafts_own_weights() {
        let asked = request(Engine::Vllm, "1", 4);
        let shape = pass_shape(&kimi(), &asked).expect("shaped");
        let draft = shape.draft.expect("a draft");
        // Queries, keys and values read 2 x 7168; 8 of 64 heads each; an eighth of the rest.
        let expected = 2 * (3 * 8 * 128 * 2 * 7168 + 8 * 128 * 7168 + 3 * 18_432 / 8 * 7168 + 32_000 / 8 * 7168);
        assert_eq!(draft.bytes, expected);
        assert_eq!((draft.passes, draft.reduces, draft.long_tokens_per_sequence), (2, 3, Some(4)));
        assert_eq!((draft.hidden, draft.tokens_per_sequence), (None, None));
        let narrow = ModelConfig { hidden_size: 4096, ..eagle() };
        let shape = pass_shape(&kimi(), &WorkloadRequest { draft: Some(narrow), ..asked.clone() }).expect("shaped");
        assert_eq!(shape.draft.expect("a draft").hidden, Some(4096));
        // Without weights to read, one is assumed, and that is said.
        let blank = ModelConfig { shape: Err(vec!["for a reason".to_owned()]), ..eagle() };
        let shape = pass_shape(&kimi(), &WorkloadRequest { draft: Some(blank), ..asked }).expect("shaped");
        assert_eq!(shape.draft.expect("assumed").long_tokens_per_sequence, None);
        assert!(shape.notes.iter().any(|note| note.contains("for a reason; one is assumed in its place")));
    }
}
