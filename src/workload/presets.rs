//! Models that are compiled in by name, so that the tool does something useful without a file.

use super::architecture::Standing;
use super::config::{AllReduceRule, ModelConfig, parse_config};
use super::shape::{FeedForwardShape, LayerShape, Matrix, ModelShape};
use super::{Stored, WorkloadError};
use crate::collective::DataType;

/// Name and config text. The texts hold only the fields that decide the collectives and the weights
/// a pass reads; `_source` inside names the public model card they were taken from.
const PRESETS: [(&str, &str); 22] = [
    ("deepseek-r1", include_str!("../../search-spaces/models/deepseek-r1.json")),
    ("deepseek-v3", include_str!("../../search-spaces/models/deepseek-v3.json")),
    ("deepseek-v3.2", include_str!("../../search-spaces/models/deepseek-v3.2.json")),
    ("gemma-4-31b", include_str!("../../search-spaces/models/gemma-4-31b.json")),
    ("glm-4.7", include_str!("../../search-spaces/models/glm-4.7.json")),
    ("glm-5.2", include_str!("../../search-spaces/models/glm-5.2.json")),
    ("gpt-oss-120b", include_str!("../../search-spaces/models/gpt-oss-120b.json")),
    ("gpt-oss-20b", include_str!("../../search-spaces/models/gpt-oss-20b.json")),
    ("kimi-k2.5", include_str!("../../search-spaces/models/kimi-k2.5.json")),
    ("llama-3.1-405b", include_str!("../../search-spaces/models/llama-3.1-405b.json")),
    ("llama-3.1-70b", include_str!("../../search-spaces/models/llama-3.1-70b.json")),
    ("llama-3.1-8b", include_str!("../../search-spaces/models/llama-3.1-8b.json")),
    ("minimax-m2.5", include_str!("../../search-spaces/models/minimax-m2.5.json")),
    ("minimax-m2.7", include_str!("../../search-spaces/models/minimax-m2.7.json")),
    ("mixtral-8x7b", include_str!("../../search-spaces/models/mixtral-8x7b.json")),
    ("nemotron-3-nano-30b-a3b", include_str!("../../search-spaces/models/nemotron-3-nano-30b-a3b.json")),
    ("nemotron-3-super-120b-a12b", include_str!("../../search-spaces/models/nemotron-3-super-120b-a12b.json")),
    ("qwen3-235b-a22b", include_str!("../../search-spaces/models/qwen3-235b-a22b.json")),
    ("qwen3-32b", include_str!("../../search-spaces/models/qwen3-32b.json")),
    ("qwen3-8b", include_str!("../../search-spaces/models/qwen3-8b.json")),
    ("qwen3-coder-480b-a35b", include_str!("../../search-spaces/models/qwen3-coder-480b-a35b.json")),
    ("qwen3.5-397b-a17b", include_str!("../../search-spaces/models/qwen3.5-397b-a17b.json")),
];

/// The one model that is no model.
const BENCH: &str = "bench";

/// A compiled-in model, in any case. An error would be a mistake in this program's own files.
pub fn preset(name: &str) -> Option<Result<ModelConfig, WorkloadError>> {
    if name.eq_ignore_ascii_case(BENCH) {
        return Some(Ok(bench()));
    }
    let (name, text) = PRESETS.iter().find(|(known, _)| known.eq_ignore_ascii_case(name))?;
    Some(parse_config(text, name))
}

/// The names of all compiled-in models, sorted.
pub fn preset_names() -> impl Iterator<Item = &'static str> {
    [BENCH].into_iter().chain(PRESETS.iter().map(|(name, _)| *name))
}

/// A fixed amount of work for each rank, whatever the width: 61 layers of a hidden state of 7,168
/// elements, each with two bf16 products by 1,024 columns for attention and two by 4,096 for the
/// feed-forward block, and an all-reduce after either: 122 in a pass. Nothing else, so that passes
/// of different machines and widths compare.
fn bench() -> ModelConfig {
    const LAYERS: u32 = 61;
    const HIDDEN: u64 = 7168;
    const ATTENTION_COLUMNS: u64 = 1024;
    const FEED_FORWARD_COLUMNS: u64 = 4096;
    // One unit: every rank holds it whole.
    let down_and_up =
        |columns: u64| vec![Matrix { units: 1, unit_elements: HIDDEN * columns, stored: Stored::HALF }; 2];
    let layer = LayerShape {
        mixer: down_and_up(ATTENTION_COLUMNS),
        feed_forward: Some(FeedForwardShape {
            always: down_and_up(FEED_FORWARD_COLUMNS),
            ..FeedForwardShape::default()
        }),
        ..LayerShape::default()
    };
    ModelConfig {
        name: BENCH.to_owned(),
        architecture: None,
        standing: Standing::MadeUp,
        hidden_size: HIDDEN,
        vocab_size: None,
        draft_vocab_size: None,
        attention_heads: None,
        key_value_heads: None,
        mamba_groups: None,
        experts: None,
        next_token_layers: None,
        dtype: DataType::Bf16,
        all_reduces: AllReduceRule::LayersAlone { layers: LAYERS },
        notes: vec![
            "bench is no model: each rank does the same work whatever the width, with no embedding, head, experts or \
             cache"
                .to_owned(),
        ],
        shape: Ok(ModelShape { layers: vec![(LAYERS, layer)], ..ModelShape::default() }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_sorted_and_each_stands_once() {
        assert!(preset_names().is_sorted_by(|earlier, later| earlier < later));
    }

    #[test]
    fn every_preset_is_counted_and_shaped_for_some_width() {
        for name in preset_names() {
            let config = preset(name).expect("listed").expect("valid");
            assert!(!matches!(config.standing, Standing::Unknown(_) | Standing::Draft(_)), "{name}");
            let request = crate::workload::WorkloadRequest { tensor_parallel: 8, ..Default::default() };
            let shape = crate::workload::pass_shape(&config, &request).unwrap_or_else(|error| panic!("{error}"));
            let parts: u32 = shape
                .layers
                .iter()
                .map(|run| run.count * (u32::from(run.attention_reduces) + u32::from(run.feed_forward.is_some())))
                .sum();
            assert_eq!(u32::from(shape.embedding_reduces) + parts, config.all_reduces.calls(), "{name}");
        }
    }

    #[test]
    fn every_preset_parses_and_its_text_names_its_source() {
        for name in preset_names() {
            let config = preset(name).expect("listed").expect("a preset is a valid config");
            assert_eq!(config.name, name);
            assert!(config.shape.is_ok(), "{name}: {:?}", config.shape);
        }
        for (name, text) in PRESETS {
            assert!(text.contains("on Hugging Face"), "{name} does not say where it comes from");
        }
        assert_eq!(preset("Kimi-K2.5").expect("listed").expect("valid").name, "kimi-k2.5");
        assert_eq!(preset("gpt-2"), None);
    }
}
