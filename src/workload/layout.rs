//! How a model is spread over GPUs beside tensor parallelism, and what that does to a pass.
//!
//! - **Attention data parallelism** (SGLang): each GPU attends to sequences of its own, and all GPUs
//!   together compute the feed-forward blocks. Captured passes gather the hidden states of all
//!   sequences before each block and scatter the sums after it; prefill does both by all-reduce,
//!   because its sequences differ in length.
//! - **Expert parallelism** without an all-to-all backend: GPUs hold whole experts, and the sum over
//!   them is the all-reduce that was there before.
//! - **Pipeline stages**: each boundary sends hidden state and residual on, each GPU its slice of
//!   them, and the receiving stage gathers the slices.
//!
//! Sources: sgl-project/sglang, python/sglang/srt/layers/dp_attention.py, layers/communicator.py,
//! models/qwen3_moe.py, models/deepseek_v2.py, managers/scheduler_pp_mixin.py; vllm-project/vllm,
//! vllm/v1/worker/gpu_model_runner.py and model_executor/layers/fused_moe; read in snapshots, not run.

use super::config::{AllReduceRule, ModelConfig};
use super::derive::{WorkloadRequest, all_reduce, logits, message_bytes};
use super::{WorkloadError, marked};
use crate::collective::Collective;
use crate::engine::Engine;
use crate::record::{Point, PointPhase};

/// The most pipeline stages.
pub const MAX_STAGES: u32 = 64;

/// Tensors that travel from one stage to the next: hidden state and residual.
const STAGE_TENSORS: u32 = 2;

/// How a model is spread beside tensor parallelism.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Layout {
    /// Each GPU attends to sequences of its own.
    pub attention_data_parallel: bool,
    /// Each GPU holds whole experts, over all GPUs of the tensor-parallel group.
    pub expert_parallel: bool,
    /// Groups of GPUs that hold consecutive layers; 1 where one group holds all.
    pub pipeline_stages: u32,
}

impl Default for Layout {
    fn default() -> Self {
        Self { attention_data_parallel: false, expert_parallel: false, pipeline_stages: 1 }
    }
}

impl Layout {
    /// In words, for records and headings.
    pub(super) fn words(self) -> Vec<String> {
        let mut words = Vec::new();
        if self.attention_data_parallel {
            words.push("attention data parallelism".to_owned());
        }
        if self.expert_parallel {
            words.push("expert parallelism".to_owned());
        }
        if self.pipeline_stages > 1 {
            words.push(format!("{} pipeline stages", self.pipeline_stages));
        }
        words
    }
}

/// Whether this model can be spread this way, as far as that is known.
pub(super) fn check_layout(config: &ModelConfig, request: &WorkloadRequest) -> Result<(), WorkloadError> {
    let layout = request.layout;
    let refused = |flag: &'static str, reason: String| Err(WorkloadError::Layout { flag, reason });
    if !(1..=MAX_STAGES).contains(&layout.pipeline_stages) {
        return refused("--pp", format!("{} stages are out of range, from 1 to {MAX_STAGES}", layout.pipeline_stages));
    }
    let layers = match config.all_reduces {
        AllReduceRule::Decoder { layers } | AllReduceRule::OneMixer { layers } => Some(layers),
        AllReduceRule::Blocks { .. } | AllReduceRule::LayersAlone { .. } => None,
    };
    if layers.is_some_and(|layers| layers < layout.pipeline_stages) {
        return refused("--pp", format!("{} has fewer layers than that", config.name));
    }
    if layout.attention_data_parallel {
        if request.engine != Engine::Sglang {
            return refused(
                "--dp-attention",
                "what it issues is known for SGLang alone; vLLM's data parallelism runs engines side by side, each with \
                 collectives of its own"
                    .to_owned(),
            );
        }
        if !matches!(config.all_reduces, AllReduceRule::Decoder { .. }) {
            return refused(
                "--dp-attention",
                format!(
                    "where {} gathers and scatters is not known: its layers are no pairs of two blocks",
                    config.name
                ),
            );
        }
        if request.draft.is_some() {
            return refused("--dp-attention", "how a draft model's passes gather under it is not known".to_owned());
        }
    }
    if layout.expert_parallel {
        let Some(experts) = config.experts else {
            return refused("--ep", format!("{} has no routed experts to spread", config.name));
        };
        if !experts.is_multiple_of(u64::from(request.tensor_parallel)) {
            return refused("--ep", format!("{experts} experts do not divide over {} GPUs", request.tensor_parallel));
        }
    }
    Ok(())
}

/// The collectives of one pass of the target over `tokens` tokens with `rows` rows of logits (none to
/// leave those out). Under attention data parallelism both count those of all GPUs together.
pub(super) fn target_points(
    config: &ModelConfig,
    request: &WorkloadRequest,
    tokens: u64,
    rows: Option<u64>,
    phase: PointPhase,
    what: impl Fn() -> String,
) -> Result<Vec<Point>, WorkloadError> {
    let mut points = match config.all_reduces {
        AllReduceRule::Decoder { layers } if request.layout.attention_data_parallel => {
            let point = |collective, calls, origin: String| -> Result<Point, WorkloadError> {
                let bytes = message_bytes(config, tokens, &what)?;
                let point = turned(all_reduce(config, request, tokens, phase, &what)?, collective);
                Ok(marked(Point { bytes, calls_per_pass: calls, origin, ..point }))
            };
            if phase == PointPhase::Prefill {
                let origin = format!("all sequences brought together before {layers} feed-forward blocks, sums after");
                vec![point(Collective::AllReduce, 2 * layers, origin)?]
            } else {
                vec![
                    point(
                        Collective::AllGather,
                        layers + 1,
                        format!("hidden states of all sequences before {layers} feed-forward blocks and the head"),
                    )?,
                    point(Collective::ReduceScatter, layers, format!("sums of {layers} feed-forward blocks"))?,
                ]
            }
        }
        _ => vec![all_reduce(config, request, tokens, phase, &what)?],
    };
    points.extend(rows.and_then(|rows| logits(config, request, rows, phase)));
    points.extend(stage_points(config, request, tokens, phase, &what)?);
    Ok(points)
}

/// What the boundaries between pipeline stages add.
pub(super) fn stage_points(
    config: &ModelConfig,
    request: &WorkloadRequest,
    tokens: u64,
    phase: PointPhase,
    what: impl Fn() -> String,
) -> Result<Vec<Point>, WorkloadError> {
    let boundaries = request.layout.pipeline_stages - 1;
    if boundaries == 0 {
        return Ok(Vec::new());
    }
    // Under attention data parallelism each GPU has tokens of its own, and sends them whole.
    let ranks = u64::from(request.tensor_parallel);
    let own = if request.layout.attention_data_parallel { tokens.div_ceil(ranks) } else { tokens };
    let whole = message_bytes(config, own, what)?;
    let sliced = !request.layout.attention_data_parallel && (own * config.hidden_size).is_multiple_of(ranks);
    let calls = STAGE_TENSORS * boundaries;
    let base = all_reduce(config, request, own, phase, String::new)?;
    let plural = if boundaries == 1 { "boundary" } else { "boundaries" };
    let send = marked(Point {
        bytes: if sliced { whole / ranks } else { whole },
        ranks: 2,
        calls_per_pass: calls,
        origin: format!("hidden state and residual over {boundaries} stage {plural}"),
        ..turned(base.clone(), Collective::SendRecv)
    });
    // Workers open one communicator over the tensor-parallel group; a pair of ranks is none.
    let mut points = vec![Point { measured: false, ..send }];
    if sliced {
        points.push(marked(Point {
            calls_per_pass: calls,
            origin: format!("slices of hidden state and residual after {boundaries} stage {plural}"),
            ..turned(base, Collective::AllGather)
        }));
    }
    Ok(points)
}

/// The same message, as another collective.
fn turned(point: Point, collective: Collective) -> Point {
    Point { collective, ..point }
}

/// What is assumed of the layout.
pub(super) fn layout_notes(config: &ModelConfig, request: &WorkloadRequest) -> Vec<String> {
    let layout = request.layout;
    let mut notes = Vec::new();
    if layout == Layout::default() {
        notes.push(
            "plain tensor parallelism: one group of all GPUs, without attention data parallelism, expert parallelism, \
             sequence parallelism or pipeline stages"
                .to_owned(),
        );
        return notes;
    }
    let ranks = request.tensor_parallel;
    if layout.attention_data_parallel {
        notes.push(format!(
            "attention data parallelism over all {ranks} GPUs (dp = tp): sequences are spread evenly, no all-reduce after \
             embedding and attention, captured passes gather before and scatter after each feed-forward block and \
             gather once more before a head that all GPUs share; prefill brings one chunk over all GPUs together, \
             and sums, by all-reduce"
        ));
        notes.push(
            "models that may not scatter, --enable-dp-lm-head, --moe-dense-tp-size and all-to-all backends change this"
                .to_owned(),
        );
    }
    if layout.expert_parallel {
        notes.push(format!(
            "expert parallelism over all {ranks} GPUs without an all-to-all backend: summing over experts is the \
             all-reduce that plain tensor parallelism has; DeepEP and its like leave NCCL out and change the counts"
        ));
        notes.push(
            "experts are taken to be chosen evenly, so that every GPU reads as many bytes as before; a GPU with favoured \
             experts is slower"
                .to_owned(),
        );
    }
    if layout.pipeline_stages > 1 {
        let stages = layout.pipeline_stages;
        notes.push(format!(
            "{stages} pipeline stages of {ranks} GPUs each, {} GPUs in all: counts are of a whole pass, each stage issues \
             its layers' share, and the {ranks} GPUs of one stage are measured",
            u64::from(stages) * u64::from(ranks)
        ));
        notes.push(
            "between stages hidden state and residual travel, each GPU sends its slice and the next stage gathers; what \
             runs between two ranks is listed and not measured"
                .to_owned(),
        );
        if config.experts.is_none() && matches!(config.all_reduces, AllReduceRule::OneMixer { .. }) {
            notes.push("which layers a stage holds was not read for this architecture".to_owned());
        }
    }
    notes
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::collective::DataType;
    use crate::record::Workload;
    use crate::workload::{derive, parse_batches, pass_cases, pass_shape, preset};

    fn model(name: &str) -> ModelConfig {
        preset(name).expect("a preset").expect("a valid preset")
    }

    fn request(layout: Layout, batches: &str) -> WorkloadRequest {
        WorkloadRequest {
            engine: Engine::Sglang,
            tensor_parallel: 8,
            batches: parse_batches(batches).expect("batches"),
            chunk: Some(2048),
            gpu_memory_mib: Some(97_887),
            layout,
            ..WorkloadRequest::default()
        }
    }

    fn summary(points: &[Point]) -> Vec<(Collective, u32, u64, u32)> {
        points.iter().map(|point| (point.collective, point.calls_per_pass, point.bytes, point.ranks)).collect()
    }

    fn derived(name: &str, request: &WorkloadRequest) -> Workload {
        derive(&model(name), request).unwrap_or_else(|error| panic!("{error}"))
    }

    fn refused(name: &str, request: &WorkloadRequest) -> String {
        derive(&model(name), request).expect_err("must be refused").to_string()
    }

    const DP: Layout = Layout { attention_data_parallel: true, expert_parallel: false, pipeline_stages: 1 };
    const EP: Layout = Layout { attention_data_parallel: false, expert_parallel: true, pipeline_stages: 1 };
    const PP: Layout = Layout { attention_data_parallel: false, expert_parallel: false, pipeline_stages: 4 };

    #[test]
    fn attention_data_parallelism_gathers_before_and_scatters_after() {
        use Collective::{AllGather, AllReduce, ReduceScatter};
        // 16 sequences are 2 on each of 8 GPUs: 16 rows of 7168 elements of 2 bytes.
        let workload = derived("deepseek-v3", &request(DP, "16"));
        let rows = 16 * 7168 * 2;
        assert_eq!(
            summary(&workload.points),
            [(AllGather, 62, rows, 8), (ReduceScatter, 61, rows, 8), (AllGather, 1, 16 * 129_280 * 2, 8)]
        );
        let chunk = 2048 * 7168 * 2;
        assert_eq!(summary(&workload.guard), [(AllReduce, 122, chunk, 8), (AllGather, 1, 129_280 * 2, 8)]);
        assert_eq!(workload.layout, ["attention data parallelism"]);
        // One sequence wakes all GPUs, each with a row of its own; three are one row each, too.
        for batch in ["1", "3"] {
            assert_eq!(derived("deepseek-v3", &request(DP, batch)).points[0].bytes, 8 * 7168 * 2);
        }
        let told = derived("deepseek-v3", &request(DP, "3")).assumptions.join("\n");
        assert!(told.contains("batch 3 is 1 sequence on each of 8 GPUs, padding included: 8 rows in all"), "{told}");
        // Heads need not divide: every GPU holds all of them. The vocabulary is shared.
        let odd = ModelConfig { attention_heads: Some(6), key_value_heads: Some(3), ..model("deepseek-v3") };
        assert!(derive(&odd, &request(DP, "1")).is_ok() && derive(&odd, &request(Layout::default(), "1")).is_err());
        let odd = ModelConfig { vocab_size: Some(64), ..odd };
        assert!(derive(&odd, &WorkloadRequest { tensor_parallel: 5, ..request(DP, "1") }).is_err());
    }

    #[test]
    fn attention_data_parallelism_is_known_of_one_engine_and_of_ordinary_layers() {
        let vllm = WorkloadRequest { engine: Engine::Vllm, ..request(DP, "1") };
        assert!(
            refused("deepseek-v3", &vllm).starts_with("--dp-attention does not work here: what it issues is known")
        );
        assert!(refused("nemotron-3-nano-30b-a3b", &request(DP, "1")).contains("no pairs of two blocks"));
        let drafting = WorkloadRequest { draft: Some(model("llama-3.1-8b")), verify_tokens: 2, ..request(DP, "1") };
        assert!(refused("deepseek-v3", &drafting).contains("draft model's passes"));
        let shape = pass_shape(&model("deepseek-v3"), &request(DP, "1")).expect_err("not timed").to_string();
        assert!(shape.contains("gathers and scatters"), "{shape}");
    }

    #[test]
    fn expert_parallelism_keeps_the_messages_and_needs_experts() {
        let plain = derived("qwen3-235b-a22b", &request(Layout::default(), "1,16"));
        let spread = derived("qwen3-235b-a22b", &request(EP, "1,16"));
        assert_eq!((&plain.points, &plain.guard), (&spread.points, &spread.guard));
        assert!(spread.assumptions.iter().any(|note| note.contains("without an all-to-all backend")));
        assert_eq!(spread.layout, ["expert parallelism"]);
        let shape = |layout| pass_shape(&model("qwen3-235b-a22b"), &request(layout, "1")).expect("shaped").layers;
        assert_eq!(shape(EP), shape(Layout::default()), "as many bytes, on the average");
        assert_eq!(
            refused("llama-3.1-70b", &request(EP, "1")),
            "--ep does not work here: llama-3.1-70b has no routed experts to spread"
        );
        let odd = ModelConfig { experts: Some(60), ..model("qwen3-235b-a22b") };
        let error = derive(&odd, &request(EP, "1")).expect_err("refused").to_string();
        assert!(error.contains("60 experts do not divide over 8 GPUs"), "{error}");
    }

    #[test]
    fn stages_send_hidden_state_and_residual_on() {
        use Collective::{AllGather, AllReduce, SendRecv};
        let workload = derived("llama-3.1-70b", &request(PP, "4"));
        let whole = 4 * 8192 * 2;
        assert_eq!(
            summary(&workload.points),
            [
                (AllReduce, 161, whole, 8),
                (AllGather, 1, 4 * 128_256 * 2, 8),
                (SendRecv, 6, whole / 8, 2),
                (AllGather, 6, whole, 8)
            ]
        );
        assert!(!workload.points[2].measured);
        assert_eq!(workload.guard.len(), 4, "a chunk's all-reduces, its sends and gathers, and the logits");
        assert!(workload.points.iter().all(|point| (point.weight - 1.0).abs() < 1e-12 && point.batch == 4));
        assert!(
            workload.assumptions.iter().any(|note| note.contains("4 pipeline stages of 8 GPUs each, 32 GPUs in all"))
        );
        // What does not divide is sent whole and not gathered.
        let odd = ModelConfig { hidden_size: 4100, dtype: DataType::Bf16, ..model("llama-3.1-70b") };
        let points = derive(&odd, &request(PP, "1")).expect("valid").points;
        assert_eq!(summary(&points)[2..], [(SendRecv, 6, 8200, 2)]);
    }

    #[test]
    fn a_pass_of_stages_is_that_of_the_first() {
        let shape = |layout| pass_shape(&model("deepseek-v3"), &request(layout, "1")).expect("shaped");
        let counts = |layout| -> Vec<u32> { shape(layout).layers.iter().map(|run| run.count).collect() };
        assert_eq!(counts(Layout::default()), [3, 58]);
        assert_eq!(counts(PP), [3, 13], "61 layers over 4 stages");
        assert_eq!((shape(PP).head_bytes, shape(PP).embedding_reduces), (0, true));
        assert_eq!(counts(Layout { pipeline_stages: 30, ..PP }), [3], "a stage may end within a run of like layers");
        assert_eq!(pass_cases(&model("deepseek-v3"), &request(PP, "1,4"), 0).expect("cases").len(), 3);
        assert!(refused("llama-3.1-8b", &request(Layout { pipeline_stages: 33, ..PP }, "1")).contains("fewer layers"));
        for stages in [0, 65] {
            let layout = Layout { pipeline_stages: stages, ..PP };
            assert!(refused("llama-3.1-405b", &request(layout, "1")).contains("out of range"), "{stages}");
        }
    }
}
