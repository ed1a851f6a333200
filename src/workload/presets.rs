//! Models that are compiled in by name, so that the tool does something useful without a file.

use super::architecture::Standing;
use super::config::{AllReduceRule, ModelConfig, parse_config};
use super::shape::{FeedForwardShape, LayerShape, Matrix, ModelShape};
use super::{Stored, WorkloadError};
use crate::collective::DataType;

/// Name and config text. The texts hold only the fields that decide the collectives and the weights
/// a pass reads; `_source` inside names the public model card they were taken from.
const PRESETS: [(&str, &str); 2] = [
    ("kimi-k2.5", include_str!("../../search-spaces/models/kimi-k2.5.json")),
    ("llama-3.1-70b", include_str!("../../search-spaces/models/llama-3.1-70b.json")),
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

/// The names of all compiled-in models.
pub fn preset_names() -> impl Iterator<Item = &'static str> {
    PRESETS.iter().map(|(name, _)| *name).chain([BENCH])
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
        attention_heads: None,
        key_value_heads: None,
        mamba_groups: None,
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
