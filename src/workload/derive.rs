//! The points of a model under an engine, a width and a set of batches.

use super::architecture::Standing;
use super::batches::check_batches;
use super::config::ModelConfig;
use super::draft::{check_draft, draft_notes, draft_points};
use super::layout::{Layout, check_layout, layout_notes, target_points};
use super::{MAX_MESSAGE_BYTES, WorkloadError, marked, shown};
use crate::collective::{Collective, Form};
use crate::engine::{Engine, PaddingUnit};
use crate::record::{FORMAT, Point, PointPhase, Workload};
use crate::units::group_thousands;

/// The most tokens per sequence and pass, the root included.
pub const MAX_VERIFY_TOKENS: u32 = 1024;

/// The longest prefill chunk, in tokens.
pub const MAX_CHUNK: u32 = 1 << 20;

/// A second guarded prefill size, in tokens: short prompts and the rests of long ones.
pub const SHORT_PREFILL_TOKENS: u32 = 2048;

/// How far [`WorkloadError::TensorParallel`] looks for sizes that work.
const LARGEST_SUGGESTED_WIDTH: u32 = 128;

/// What the user asks for.
#[derive(Debug, Clone, PartialEq)]
pub struct WorkloadRequest {
    /// Whose padding, chunk and habits apply.
    pub engine: Engine,
    /// GPUs that share every layer.
    pub tensor_parallel: u32,
    /// Concurrent sequences, and how much each count matters; see
    /// [`parse_batches`](super::parse_batches).
    pub batches: Vec<(u32, f64)>,
    /// Tokens the target checks per sequence and pass, the root included; 1 without speculation.
    pub verify_tokens: u32,
    /// Tokens of one prefill chunk; none for the engine's default.
    pub chunk: Option<u32>,
    /// Memory of one GPU in MiB, which some of the engine's defaults depend on.
    pub gpu_memory_mib: Option<u64>,
    /// Counts an architecture that is not known as an ordinary decoder.
    pub assume_decoder: bool,
    /// How the model is spread beside tensor parallelism.
    pub layout: Layout,
    /// The model that proposes tokens, where its passes count too.
    pub draft: Option<ModelConfig>,
    /// Tokens it proposes one after the other; none for one less than the target checks.
    pub draft_steps: Option<u32>,
    /// Branches it follows in each step.
    pub draft_top: u32,
}

impl Default for WorkloadRequest {
    /// Two GPUs, one sequence, no engine, no speculation.
    fn default() -> Self {
        Self {
            engine: Engine::None,
            tensor_parallel: 2,
            batches: vec![(1, 1.0)],
            verify_tokens: 1,
            chunk: None,
            gpu_memory_mib: None,
            assume_decoder: false,
            layout: Layout::default(),
            draft: None,
            draft_steps: None,
            draft_top: 1,
        }
    }
}

/// The collectives of one pass for every batch of the request, and those of prefill as guards.
///
/// Each batch gives two points with its weight: the all-reduces of the padded pass and the
/// all-gather of its logits; layouts and a draft model add theirs, with the same weight. Weights sum
/// to 1 over batches. Guard points carry batch 1 and weight 0: they decide nothing and must not
/// regress.
pub fn derive(config: &ModelConfig, request: &WorkloadRequest) -> Result<Workload, WorkloadError> {
    check(config, request)?;
    let mut assumptions = general_assumptions(config, request);
    let total: f64 = request.batches.iter().map(|(_, weight)| weight).sum();
    let mut points = Vec::with_capacity(2 * request.batches.len());
    for &(batch, weight) in &request.batches {
        let pass = Pass::of(batch, request);
        assumptions.extend(pass.note(request));
        points.extend(pass.points(config, request, weight / total)?);
    }
    let guard = guard_points(config, request, &mut assumptions)?;
    Ok(Workload {
        format: FORMAT,
        model: config.name.clone(),
        engine: request.engine.name().to_owned(),
        tensor_parallel: request.tensor_parallel,
        verify_tokens: request.verify_tokens,
        draft: request.draft.as_ref().map(|draft| draft.name.clone()),
        layout: request.layout.words(),
        points,
        guard,
        assumptions,
        ..Workload::default()
    })
}

/// What must hold before anything is derived.
pub(super) fn check(config: &ModelConfig, request: &WorkloadRequest) -> Result<(), WorkloadError> {
    check_request(request)?;
    check_architecture(config, request)?;
    check_layout(config, request)?;
    if request.layout.attention_data_parallel {
        // Every GPU holds all heads; what all share is the vocabulary.
        let headless = ModelConfig { attention_heads: None, key_value_heads: None, ..config.clone() };
        check_width(&headless, request.tensor_parallel)?;
    } else {
        check_width(config, request.tensor_parallel)?;
    }
    check_draft(request)
}

fn check_request(request: &WorkloadRequest) -> Result<(), WorkloadError> {
    if request.tensor_parallel < 2 {
        return Err(WorkloadError::TooFewRanks { ranks: request.tensor_parallel });
    }
    if !(1..=MAX_VERIFY_TOKENS).contains(&request.verify_tokens) {
        return Err(WorkloadError::VerifyTokens { given: request.verify_tokens });
    }
    if let Some(given) = request.chunk
        && !(1..=MAX_CHUNK).contains(&given)
    {
        return Err(WorkloadError::Chunk { given });
    }
    Ok(check_batches(&request.batches)?)
}

pub(super) fn check_architecture(config: &ModelConfig, request: &WorkloadRequest) -> Result<(), WorkloadError> {
    let name = config.name.clone();
    let architecture = config.architecture.as_deref().map_or_else(|| "this model".to_owned(), shown);
    match config.standing {
        Standing::Draft(_) => Err(WorkloadError::Draft { name, architecture }),
        Standing::Unknown(reason) if !request.assume_decoder => {
            Err(WorkloadError::UnknownArchitecture { name, architecture, reason })
        }
        Standing::Unknown(_) | Standing::Read | Standing::Analogy | Standing::MadeUp => Ok(()),
    }
}

pub(super) fn check_width(config: &ModelConfig, tensor_parallel: u32) -> Result<(), WorkloadError> {
    let Err(reason) = splits(config, tensor_parallel) else { return Ok(()) };
    let fits = (2..=LARGEST_SUGGESTED_WIDTH).filter(|width| splits(config, *width).is_ok()).collect();
    Err(WorkloadError::TensorParallel { name: config.name.clone(), tensor_parallel, reason, fits })
}

/// Whether the engines can split the model over this many GPUs; otherwise the rule it breaks.
///
/// Source: the assertions of sgl-project/sglang, python/sglang/srt/models/llama.py and
/// python/sglang/srt/layers/vocab_parallel_embedding.py; read in a snapshot, not run.
fn splits(config: &ModelConfig, tensor_parallel: u32) -> Result<(), String> {
    let width = u64::from(tensor_parallel);
    if let Some(heads) = config.attention_heads
        && !heads.is_multiple_of(width)
    {
        return Err(format!("{heads} attention heads do not divide evenly"));
    }
    if let Some(heads) = config.key_value_heads
        && !heads.is_multiple_of(width)
        && !width.is_multiple_of(heads)
    {
        return Err(format!("{heads} key-value heads neither divide evenly nor copy evenly"));
    }
    if let Some(vocabulary) = config.padded_vocabulary()
        && !vocabulary.is_multiple_of(width)
    {
        return Err(format!("a vocabulary of {} does not divide evenly", group_thousands(vocabulary)));
    }
    Ok(())
}

/// One pass of the target model over the sequences of a batch.
pub(super) struct Pass {
    /// Sequences before padding.
    pub(super) batch: u32,
    /// Tokens before padding.
    exact: u64,
    /// Tokens after it.
    pub(super) tokens: u64,
    /// Whether the engine captures a graph of this size.
    pub(super) captured: bool,
}

impl Pass {
    pub(super) fn of(batch: u32, request: &WorkloadRequest) -> Self {
        // Under attention data parallelism GPUs share sequences, and all pad to the same number.
        let groups = if request.layout.attention_data_parallel { request.tensor_parallel } else { 1 };
        let padded = request.engine.padded_tokens(
            batch.div_ceil(groups),
            request.verify_tokens,
            request.gpu_memory_mib,
            request.tensor_parallel,
        );
        let exact = u64::from(batch) * u64::from(request.verify_tokens);
        Self { batch, exact, tokens: padded.tokens * u64::from(groups), captured: padded.captured }
    }

    /// Sequences after padding, where the engine pads those.
    pub(super) fn padded_sequences(&self, request: &WorkloadRequest) -> u64 {
        match request.engine.padding_unit() {
            Some(PaddingUnit::Sequences) => self.tokens / u64::from(request.verify_tokens),
            Some(PaddingUnit::Tokens) | None => u64::from(self.batch),
        }
    }

    /// What it is, in an error.
    pub(super) fn in_words(&self, request: &WorkloadRequest) -> String {
        format!("batch {} with {} tokens per sequence", self.batch, request.verify_tokens)
    }

    /// Rows of logits. SGLang computes them inside the captured graph, padding included; vLLM
    /// after it, for the real tokens alone (inferred from how it treats its draft model).
    const fn logit_rows(&self, engine: Engine) -> u64 {
        match engine.padding_unit() {
            Some(PaddingUnit::Sequences) => self.tokens,
            Some(PaddingUnit::Tokens) | None => self.exact,
        }
    }

    /// What padding did to this batch, where it did anything.
    fn note(&self, request: &WorkloadRequest) -> Option<String> {
        let (batch, engine) = (self.batch, request.engine.title());
        let unit = request.engine.padding_unit()?;
        if !self.captured {
            let limit = request.engine.capture_limit(request.gpu_memory_mib, request.tensor_parallel)?;
            let counted = match unit {
                PaddingUnit::Sequences => "sequences",
                PaddingUnit::Tokens => "tokens",
            };
            return Some(format!(
                "batch {batch} is above the {limit} {counted} that {engine} captures by default: it runs eagerly, at \
                 its exact size of {} tokens",
                self.tokens
            ));
        }
        if request.layout.attention_data_parallel {
            let sequences = self.padded_sequences(request);
            let (each, ranks) = (sequences / u64::from(request.tensor_parallel), request.tensor_parallel);
            let plural = if each == 1 { "sequence" } else { "sequences" };
            return Some(format!(
                "batch {batch} is {each} {plural} on each of {ranks} GPUs, padding included: {} rows in all",
                self.tokens
            ));
        }
        if self.tokens == self.exact {
            return None;
        }
        Some(match unit {
            PaddingUnit::Sequences => {
                let sequences = self.tokens / u64::from(request.verify_tokens);
                format!("batch {batch} pads to {sequences}, the next size that {engine} captures")
            }
            PaddingUnit::Tokens => {
                let (exact, tokens) = (self.exact, self.tokens);
                format!("batch {batch}: {exact} tokens pad to {tokens}, the next size that {engine} captures")
            }
        })
    }

    fn points(
        &self,
        config: &ModelConfig,
        request: &WorkloadRequest,
        weight: f64,
    ) -> Result<Vec<Point>, WorkloadError> {
        let phase = phase(request);
        let rows = self.logit_rows(request.engine);
        let mut points = target_points(config, request, self.tokens, Some(rows), phase, || self.in_words(request))?;
        points.extend(draft_points(request, self)?);
        let has_graphs = request.engine.padding_unit().is_some();
        for point in &mut points {
            point.batch = self.batch;
            point.weight = weight;
            // vLLM computes logits after the captured pass (inferred from how it treats its draft model).
            let follows_the_graph =
                point.collective == Collective::AllGather && request.engine.padding_unit() == Some(PaddingUnit::Tokens);
            if has_graphs && (!self.captured || follows_the_graph) {
                point.form = point.form.eager();
            }
        }
        Ok(points)
    }
}

/// The phase of the passes that decide.
pub(super) const fn phase(request: &WorkloadRequest) -> PointPhase {
    if request.verify_tokens > 1 { PointPhase::Verify } else { PointPhase::Decode }
}

/// Bytes of one all-reduce of a pass of `tokens` tokens; `what` names the pass in an error.
pub(super) fn message_bytes(
    config: &ModelConfig,
    tokens: u64,
    what: impl FnOnce() -> String,
) -> Result<u64, WorkloadError> {
    let bytes = tokens * config.hidden_size * config.dtype.size_bytes();
    if bytes > MAX_MESSAGE_BYTES {
        return Err(WorkloadError::MessageTooLarge { what: what(), bytes });
    }
    Ok(bytes)
}

/// The all-reduces of a pass of `tokens` tokens, as a guard; `what` names the pass in an error.
pub(super) fn all_reduce(
    config: &ModelConfig,
    request: &WorkloadRequest,
    tokens: u64,
    phase: PointPhase,
    what: impl FnOnce() -> String,
) -> Result<Point, WorkloadError> {
    let bytes = message_bytes(config, tokens, what)?;
    Ok(marked(Point {
        collective: Collective::AllReduce,
        dtype: config.dtype,
        bytes,
        ranks: request.tensor_parallel,
        calls_per_pass: config.all_reduces.calls(),
        batch: 1,
        weight: 0.0,
        phase,
        measured: false,
        origin: config.all_reduces.origin(),
        form: Form::usual(Collective::AllReduce),
    }))
}

/// The all-gather of `rows` rows of logits, as a guard. None without a head.
pub(super) fn logits(config: &ModelConfig, request: &WorkloadRequest, rows: u64, phase: PointPhase) -> Option<Point> {
    let plural = if rows == 1 { "row" } else { "rows" };
    Some(marked(Point {
        collective: Collective::AllGather,
        dtype: config.dtype,
        bytes: config.logits_bytes(rows)?,
        ranks: request.tensor_parallel,
        calls_per_pass: 1,
        batch: 1,
        weight: 0.0,
        phase,
        measured: false,
        origin: format!("logits, {rows} {plural}"),
        form: Form::usual(Collective::AllGather),
    }))
}

/// Tokens of the prefill passes that are guarded: a full chunk and a short one. No pass of prefill is
/// longer than a chunk, so a short chunk leaves only itself.
pub(super) fn prefill_sizes(request: &WorkloadRequest) -> impl Iterator<Item = u32> {
    let chunk = request.chunk.unwrap_or_else(|| request.engine.prefill_chunk(request.gpu_memory_mib));
    [Some(chunk), (chunk > SHORT_PREFILL_TOKENS).then_some(SHORT_PREFILL_TOKENS)].into_iter().flatten()
}

/// Prefill: the all-reduces of both sizes, and the logits of one sequence.
pub(super) fn guard_points(
    config: &ModelConfig,
    request: &WorkloadRequest,
    assumptions: &mut Vec<String>,
) -> Result<Vec<Point>, WorkloadError> {
    if request.chunk.is_none() {
        let chunk = request.engine.prefill_chunk(request.gpu_memory_mib);
        let source = match request.engine {
            Engine::Sglang | Engine::Vllm => format!("{}'s default", request.engine.title()),
            Engine::Torch | Engine::None => "this tool's choice".to_owned(),
        };
        let memory = match request.gpu_memory_mib {
            _ if request.engine.padding_unit().is_none() => String::new(),
            Some(mib) => format!(" for a GPU of {} MiB", group_thousands(mib)),
            None => " where the GPU's memory is not known".to_owned(),
        };
        assumptions.push(format!("prefill runs in chunks of {chunk} tokens, {source}{memory}; --chunk says otherwise"));
    }
    let mut guard = Vec::with_capacity(3);
    for tokens in prefill_sizes(request) {
        let what = || format!("a prefill chunk of {tokens} tokens");
        // The logits are those of one sequence's last token, whatever came before: they stand once, below.
        for point in target_points(config, request, u64::from(tokens), None, PointPhase::Prefill, what)? {
            guard.push(Point { origin: format!("prefill of {tokens} tokens: {}", point.origin), ..point });
        }
    }
    if let Some(point) = logits(config, request, 1, PointPhase::Prefill) {
        guard.push(Point { origin: "prefill: logits of a sequence's last token".to_owned(), ..point });
    }
    for point in &mut guard {
        // No engine captures its prefill passes unless told to.
        point.form = point.form.eager();
    }
    Ok(guard)
}

/// Everything that does not depend on one batch.
fn general_assumptions(config: &ModelConfig, request: &WorkloadRequest) -> Vec<String> {
    let engine = request.engine;
    let mut notes = layout_notes(config, request);
    if let Standing::Unknown(reason) = config.standing {
        let architecture = config.architecture.as_deref().map_or_else(|| "the model".to_owned(), shown);
        notes.push(format!(
            "{architecture} is counted as an ordinary decoder, one all-reduce for the embedding and two per layer, \
             because --assume-decoder was given ({reason})"
        ));
    }
    notes.extend(config.notes.iter().cloned());
    if let Some(unit) = engine.padding_unit() {
        notes.push("no fusion of all-reduce and normalisation: fused kernels bypass NCCL".to_owned());
        notes.push(custom_all_reduce_note(engine, request.tensor_parallel));
        let list = match unit {
            PaddingUnit::Sequences if request.verify_tokens > 1 => "its list for speculative decoding",
            PaddingUnit::Sequences => "its list without speculative decoding",
            PaddingUnit::Tokens => "a list of token counts",
        };
        let memory = match (engine, request.gpu_memory_mib) {
            (Engine::Sglang, None) => ", cut where it cuts for a GPU of unknown memory",
            _ => "",
        };
        notes.push(format!(
            "passes are padded to the sizes that {} captures by default ({list}{memory}), as read in its \
             source and not observed; sizes or limits given to the server change this",
            engine.title()
        ));
    }
    if config.key_value_heads.is_none() && config.standing != Standing::MadeUp {
        notes.push("the config gives no number of key-value heads, so the width was not checked against it".to_owned());
    }
    if let Some(groups) = config.mamba_groups
        && !groups.is_multiple_of(u64::from(request.tensor_parallel))
    {
        notes.push(format!(
            "{groups} state-space groups do not divide over {} GPUs; collectives this may add are not counted",
            request.tensor_parallel
        ));
    }
    notes.extend(draft_notes(request));
    notes
}

/// Both engines have an all-reduce kernel of their own that may stand in front of NCCL.
///
/// Source: vllm-project/vllm, vllm/distributed/device_communicators/custom_all_reduce.py (2, 4, 6
/// or 8 GPUs, up to 8 MiB, not for more than two GPUs that only PCIe connects), which SGLang
/// follows; read in a snapshot, not run.
fn custom_all_reduce_note(engine: Engine, tensor_parallel: u32) -> String {
    let engine = engine.title();
    match tensor_parallel {
        2 => format!(
            "no custom all-reduce in front of NCCL: with 2 GPUs and working P2P, {engine} by default sends messages \
             below 8 MiB through a kernel of its own, where NCCL settings change nothing; start it with \
             --disable-custom-all-reduce for these results to apply to decoding"
        ),
        4 | 6 | 8 => format!(
            "no custom all-reduce in front of NCCL: {engine} turns its own off where only PCIe connects more than two \
             GPUs; with NVLink between all of them it takes messages below 8 MiB unless started with \
             --disable-custom-all-reduce"
        ),
        _ => format!("no custom all-reduce in front of NCCL: {engine} has none for {tensor_parallel} GPUs"),
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::collective::{DataType, Issue, Placement};
    use crate::workload::{AllReduceRule, parse_batches, preset};

    const RTX_PRO_6000_MIB: Option<u64> = Some(97_887);

    fn model(name: &str) -> ModelConfig {
        preset(name).expect("a preset").expect("a valid preset")
    }

    fn request(engine: Engine, batches: &str, verify_tokens: u32) -> WorkloadRequest {
        WorkloadRequest {
            engine,
            tensor_parallel: 8,
            batches: parse_batches(batches).expect("valid"),
            verify_tokens,
            chunk: None,
            gpu_memory_mib: RTX_PRO_6000_MIB,
            ..WorkloadRequest::default()
        }
    }

    fn summary(points: &[Point]) -> Vec<(Collective, u32, u64)> {
        points.iter().map(|point| (point.collective, point.calls_per_pass, point.bytes)).collect()
    }

    fn messages(engine: Engine, batches: &str, verify_tokens: u32, collective: Collective) -> Vec<u64> {
        let workload = derive(&model("kimi-k2.5"), &request(engine, batches, verify_tokens)).expect("valid");
        workload.points.iter().filter(|point| point.collective == collective).map(|point| point.bytes).collect()
    }

    fn refused(config: &ModelConfig, request: &WorkloadRequest) -> String {
        derive(config, request).expect_err("must be refused").to_string()
    }

    fn says(workload: &Workload, words: &str) -> bool {
        workload.assumptions.iter().any(|assumption| assumption.contains(words))
    }

    #[test]
    fn kimi_verifying_four_tokens_under_sglang() {
        use Collective::{AllGather, AllReduce};
        let workload = derive(&model("kimi-k2.5"), &request(Engine::Sglang, "1", 4)).expect("valid");
        assert_eq!(summary(&workload.points), [(AllReduce, 123, 57_344), (AllGather, 1, 1_310_720)]);
        assert!(workload.points.iter().all(|point| point.phase == PointPhase::Verify && point.batch == 1));
        assert!(workload.points.iter().chain(&workload.guard).all(|point| point.measured));
        assert_eq!(
            summary(&workload.guard),
            [(AllReduce, 123, 117_440_512), (AllReduce, 123, 29_360_128), (AllGather, 1, 327_680)]
        );
        assert!(workload.guard.iter().all(|point| point.phase == PointPhase::Prefill && point.weight == 0.0));
        assert!(says(&workload, "draft model's own passes"));
        assert!(says(&workload, "list for speculative decoding"));
    }

    #[test]
    fn kimi_decoding_one_token() {
        use Collective::{AllGather, AllReduce};
        let workload = derive(&model("kimi-k2.5"), &request(Engine::Sglang, "1", 1)).expect("valid");
        assert_eq!(summary(&workload.points), [(AllReduce, 123, 14_336), (AllGather, 1, 327_680)]);
        assert!(workload.points.iter().all(|point| point.phase == PointPhase::Decode));
        assert!(!says(&workload, "draft"));
    }

    #[test]
    fn kimi_over_a_sweep_of_batches() {
        let sweep = "1,2,4,8,16,32,64,128";
        assert_eq!(
            messages(Engine::Sglang, sweep, 4, Collective::AllReduce),
            [57_344, 114_688, 229_376, 458_752, 917_504, 1_835_008, 3_670_016, 7_340_032]
        );
        assert_eq!(
            messages(Engine::Sglang, sweep, 4, Collective::AllGather),
            [1, 2, 4, 8, 16, 32, 64, 128].map(|batch| batch * 1_310_720)
        );
        assert_eq!(messages(Engine::Sglang, "9,33", 4, Collective::AllReduce), [573_440, 2_293_760]);
    }

    #[test]
    fn vllm_pads_tokens_and_gathers_real_rows() {
        assert_eq!(messages(Engine::Vllm, "1", 4, Collective::AllReduce), [57_344]);
        assert_eq!(messages(Engine::Vllm, "1", 5, Collective::AllReduce), [114_688]);
        assert_eq!(messages(Engine::Vllm, "1", 5, Collective::AllGather), [1_638_400]);
    }

    #[test]
    fn llama_counts_and_sizes() {
        let workload = derive(&model("llama-3.1-70b"), &request(Engine::Sglang, "1", 1)).expect("valid");
        assert_eq!(
            summary(&workload.points),
            [(Collective::AllReduce, 161, 16_384), (Collective::AllGather, 1, 256_512)]
        );
    }

    #[test]
    fn padding_and_eager_batches_are_told() {
        let workload = derive(&model("kimi-k2.5"), &request(Engine::Sglang, "9,10,600", 4)).expect("valid");
        assert!(says(&workload, "batch 9 pads to 10,"));
        assert!(!says(&workload, "batch 10 "));
        assert!(says(&workload, "batch 600 is above the 512 sequences that SGLang captures by default"));
        assert_eq!(workload.points[4].bytes, 600 * 4 * 7168 * 2);
        assert_eq!(workload.points[5].bytes, 600 * 4 * 163_840 * 2);

        let workload = derive(&model("kimi-k2.5"), &request(Engine::Vllm, "1,200", 5)).expect("valid");
        assert!(says(&workload, "batch 1: 5 tokens pad to 8,"));
        assert!(says(&workload, "batch 200 is above the 512 tokens that vLLM captures by default"));

        let workload = derive(&model("kimi-k2.5"), &request(Engine::Torch, "9", 4)).expect("valid");
        assert!(!says(&workload, "batch 9") && !says(&workload, "custom all-reduce"));
        assert_eq!(workload.points[0].bytes, 9 * 57_344);
    }

    #[test]
    fn guards_follow_the_chunk() {
        let guard = |engine, chunk, gpu_memory_mib| {
            let request = WorkloadRequest { chunk, gpu_memory_mib, ..request(engine, "1", 1) };
            let workload = derive(&model("kimi-k2.5"), &request).expect("valid");
            assert_eq!(says(&workload, "--chunk"), chunk.is_none());
            workload
                .guard
                .iter()
                .map(|point| point.bytes / (7168 * 2))
                .take(workload.guard.len() - 1)
                .collect::<Vec<_>>()
        };
        assert_eq!(guard(Engine::Sglang, None, RTX_PRO_6000_MIB), [8192, 2048]);
        assert_eq!(guard(Engine::Sglang, None, None), [4096, 2048]);
        assert_eq!(guard(Engine::Vllm, None, None), [2048]);
        assert_eq!(guard(Engine::Sglang, Some(2048), None), [2048]);
        assert_eq!(guard(Engine::Sglang, Some(512), None), [512]);
        assert_eq!(guard(Engine::None, None, None), [2048]);
    }

    #[test]
    fn weights_are_shares_of_batches() {
        let workload = derive(&model("kimi-k2.5"), &request(Engine::Sglang, "1:7,8:3", 1)).expect("valid");
        let weights: Vec<(u32, f64)> = workload.points.iter().map(|point| (point.batch, point.weight)).collect();
        assert_eq!(weights, [(1, 0.7), (1, 0.7), (8, 0.3), (8, 0.3)]);
    }

    #[test]
    fn widths_that_do_not_split_name_those_that_do() {
        let kimi = model("kimi-k2.5");
        let at = |config: &ModelConfig, tensor_parallel| {
            refused(config, &WorkloadRequest { tensor_parallel, ..request(Engine::Sglang, "1", 1) })
        };
        assert_eq!(
            at(&kimi, 3),
            "kimi-k2.5: tensor parallelism over 3 GPUs does not work: 64 attention heads do not divide evenly; sizes \
             that work: 2, 4, 8, 16, 32, 64"
        );
        let phi = ModelConfig { attention_heads: Some(40), key_value_heads: Some(10), ..model("llama-3.1-70b") };
        assert!(at(&phi, 4).contains("10 key-value heads"), "{}", at(&phi, 4));
        // 20 copies each key-value head twice, but 128,256 is no multiple of 5.
        assert!(at(&phi, 20).contains("a vocabulary of 128,256"));
        assert!(at(&phi, 20).ends_with("only 2 works"), "{}", at(&phi, 20));
        let copied = ModelConfig { key_value_heads: Some(2), ..model("llama-3.1-70b") };
        assert!(derive(&copied, &request(Engine::Sglang, "1", 1)).is_ok());
        let odd = ModelConfig { attention_heads: Some(1), ..model("llama-3.1-70b") };
        assert!(at(&odd, 2).ends_with("no number of GPUs above 1 works for this model"));
        assert!(at(&kimi, 1).starts_with("1 GPU issues no collectives"));
        assert!(at(&kimi, 0).starts_with("0 GPU issues no collectives"));
    }

    #[test]
    fn numbers_out_of_range_are_refused() {
        let kimi = model("kimi-k2.5");
        let base = request(Engine::Sglang, "1", 1);
        let refused = |change: fn(&mut WorkloadRequest)| {
            let mut request = base.clone();
            change(&mut request);
            refused(&kimi, &request)
        };
        assert!(refused(|request| request.verify_tokens = 0).starts_with("0 tokens to verify"));
        assert!(refused(|request| request.verify_tokens = 1025).starts_with("1025 tokens to verify"));
        assert!(refused(|request| request.chunk = Some(0)).starts_with("a prefill chunk of 0 tokens"));
        assert!(refused(|request| request.chunk = Some(u32::MAX)).contains("from 1 to 1,048,576"));
        assert!(refused(|request| request.chunk = Some(1 << 20)).contains("would reduce 14 GiB"));
        assert!(refused(|request| request.batches.clear()).starts_with("no batch is given"));
        assert!(refused(|request| request.batches = vec![(1, f64::NAN)]).starts_with("the weight NaN"));
        assert!(refused(|request| request.batches = vec![(1, 1.0), (1, 1.0)]).contains("twice"));
        assert_eq!(
            refused(|request| {
                request.batches = vec![(65_536, 1.0)];
                request.verify_tokens = 8;
            }),
            "batch 65536 with 8 tokens per sequence would reduce 7 GiB, and messages above 4 GiB are not measured; use \
             a smaller one"
        );
    }

    #[test]
    fn strangers_need_the_flag_and_drafts_stay_out() {
        let stranger = ModelConfig {
            architecture: Some("NewForCausalLM".to_owned()),
            standing: Standing::Unknown("for a reason"),
            ..model("llama-3.1-70b")
        };
        let base = request(Engine::Sglang, "1", 1);
        let message = refused(&stranger, &base);
        assert!(message.contains("\"NewForCausalLM\"") && message.contains("--assume-decoder"), "{message}");
        let workload = derive(&stranger, &WorkloadRequest { assume_decoder: true, ..base.clone() }).expect("allowed");
        assert_eq!(workload.points[0].calls_per_pass, 161);
        assert!(says(&workload, "because --assume-decoder was given (for a reason)"));

        let draft = ModelConfig { standing: Standing::Draft(crate::workload::DraftKind::Eagle3), ..stranger };
        let message = refused(&draft, &WorkloadRequest { assume_decoder: true, ..base });
        assert!(message.contains("target model"), "{message}");
    }

    #[test]
    fn caveats_that_depend_on_the_model() {
        let note = |config: ModelConfig, words: &str| {
            says(&derive(&config, &request(Engine::Sglang, "1", 1)).expect("valid"), words)
        };
        let llama = model("llama-3.1-70b");
        assert!(note(ModelConfig { key_value_heads: None, ..llama.clone() }, "no number of key-value heads"));
        assert!(note(ModelConfig { mamba_groups: Some(4), ..llama.clone() }, "4 state-space groups"));
        assert!(!note(ModelConfig { mamba_groups: Some(8), ..llama.clone() }, "state-space"));
        assert!(note(ModelConfig { notes: vec!["as read".to_owned()], ..llama.clone() }, "as read"));
        let half = ModelConfig { dtype: DataType::Fp16, ..llama };
        let workload = derive(&half, &request(Engine::Sglang, "1", 1)).expect("valid");
        let points = || workload.points.iter().chain(&workload.guard);
        assert!(points().all(|point| point.measured && point.dtype == DataType::Fp16));
    }

    #[test]
    fn what_no_graph_holds_is_issued_call_by_call() {
        let eager = |engine, batches: &str| -> Vec<bool> {
            let workload = derive(&model("llama-3.1-70b"), &request(engine, batches, 1)).expect("valid");
            assert!(workload.guard.iter().all(|point| point.form.issue == Issue::Eager), "prefill is never captured");
            assert!(workload.points.iter().all(|point| {
                (point.form.placement == Placement::OutOfPlace) == (point.collective == Collective::AllGather)
            }));
            workload.points.iter().map(|point| point.form.issue == Issue::Eager).collect()
        };
        assert_eq!(eager(Engine::Sglang, "1,600"), [false, false, true, true]);
        assert_eq!(eager(Engine::Vllm, "1,600"), [false, true, true, true], "logits come after the graph");
        assert_eq!(eager(Engine::None, "1,600"), [false; 4], "who names no engine has no list of graphs");
    }

    #[test]
    fn two_gpus_are_warned_of_the_kernel_in_front() {
        let at = |tensor_parallel| {
            let request = WorkloadRequest { tensor_parallel, ..request(Engine::Vllm, "1", 1) };
            derive(&model("llama-3.1-70b"), &request).expect("valid")
        };
        assert!(says(&at(2), "with 2 GPUs and working P2P, vLLM by default"));
        assert!(says(&at(8), "only PCIe connects more than two GPUs"));
        assert!(says(&at(16), "has none for 16 GPUs"));
    }

    proptest! {
        #[test]
        fn sizes_are_tokens_times_width_and_weights_sum_to_one(
            engine in prop::sample::select(&Engine::ALL[..]),
            batches in prop::collection::btree_map(1..=4096_u32, 1e-6..1e6_f64, 1..=64),
            verify_tokens in 1..=16_u32,
            tensor_parallel in prop::sample::select(vec![2_u32, 4, 8, 16]),
            gpu_memory_mib in prop::option::of(8_000..300_000_u64),
            hidden_size in 1..=8192_u64,
            vocab_size in 1..=300_000_u64,
            layers in 1..=200_u32,
            dtype in prop::sample::select(vec![DataType::Bf16, DataType::Fp16, DataType::Fp32]),
        ) {
            let config = ModelConfig {
                hidden_size,
                vocab_size: Some(vocab_size),
                dtype,
                all_reduces: AllReduceRule::Decoder { layers },
                ..model("kimi-k2.5")
            };
            let batches: Vec<(u32, f64)> = batches.into_iter().collect();
            let request = WorkloadRequest {
                engine, tensor_parallel, batches, verify_tokens, gpu_memory_mib, ..WorkloadRequest::default()
            };
            let workload = derive(&config, &request).expect("within every bound");
            prop_assert_eq!(workload.points.len(), 2 * request.batches.len());
            let width = hidden_size * dtype.size_bytes();
            let mut sum = 0.0;
            for pair in workload.points.chunks(2) {
                let (all_reduce, logits) = (&pair[0], &pair[1]);
                prop_assert!(all_reduce.bytes.is_multiple_of(width));
                let tokens = all_reduce.bytes / width;
                let exact = u64::from(all_reduce.batch) * u64::from(verify_tokens);
                // The capture lists are never so coarse that padding more than doubles a pass.
                prop_assert!((exact..=2 * exact).contains(&tokens));
                prop_assert_eq!(all_reduce.calls_per_pass, 1 + 2 * layers);
                prop_assert_eq!(all_reduce.weight.to_bits(), logits.weight.to_bits());
                prop_assert!(logits.bytes >= exact * vocab_size * dtype.size_bytes());
                prop_assert!(all_reduce.measured && logits.measured);
                sum += all_reduce.weight;
            }
            prop_assert!((sum - 1.0).abs() < 1e-9);
        }
    }
}
