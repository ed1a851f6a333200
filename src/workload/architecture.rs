//! Which architectures issue how many all-reduces, and how well that is known.

/// How well the count of an architecture is known.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Standing {
    /// Model code of at least one engine was read.
    Read,
    /// Built like one that was read; its own code was not.
    Analogy,
    /// Made up for measuring: what it issues is so by definition.
    MadeUp,
    /// A speculative draft: never the target of a pass.
    Draft(DraftKind),
    /// Not known, for this reason.
    Unknown(&'static str),
}

/// What kind of draft proposes tokens.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DraftKind {
    /// EAGLE-3: a model of its own with an embedding, a few layers and a head over a cut vocabulary.
    /// Its code was read: sgl-project/sglang, python/sglang/srt/models/llama_eagle3.py, and the file of
    /// the same name in vllm-project/vllm; in snapshots, not run.
    Eagle3,
    /// Earlier EAGLE: built like EAGLE-3, with the target's vocabulary; its own code was not read.
    Eagle,
    /// The layers that a model brings for predicting the token after next (MTP, NextN); their code
    /// was not read.
    NextToken,
    /// Heads on the target's last hidden state, with no embedding of their own; how they are split
    /// was not read.
    Medusa,
}

/// What a layer is made of, as far as all-reduces go.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Shape {
    /// Attention (of any kind) and feed-forward (dense or experts), one all-reduce each.
    Decoder,
    /// One mixer a layer, one all-reduce.
    OneMixer,
    /// Attention and feed-forward, each of which a layer may lack.
    Blocks,
}

/// What is known about one architecture.
#[derive(Debug, Clone, Copy)]
pub(super) struct Family {
    pub(super) shape: Shape,
    pub(super) standing: Standing,
    /// What a user should know about this one in particular.
    pub(super) note: Option<&'static str>,
}

const fn read(name: &'static str) -> (&'static str, Family) {
    (name, Family { shape: Shape::Decoder, standing: Standing::Read, note: None })
}

const fn alike(name: &'static str) -> (&'static str, Family) {
    (name, Family { shape: Shape::Decoder, standing: Standing::Analogy, note: None })
}

const fn special(name: &'static str, shape: Shape, standing: Standing, note: &'static str) -> (&'static str, Family) {
    (name, Family { shape, standing, note: Some(note) })
}

/// Every architecture with an opinion. Sources of the ones marked as read: sgl-project/sglang,
/// python/sglang/srt/models/ (llama.py, deepseek_v2.py, qwen3_moe.py), vllm-project/vllm,
/// vllm/model_executor/models/ (deepseek_v2.py, nemotron_h.py), and for the counts of
/// nemotron-nas the operator lists of ai-dynamo/aiconfigurator; read in snapshots, not run.
const FAMILIES: &[(&str, Family)] = &[
    read("LlamaForCausalLM"),
    read("DeepseekV2ForCausalLM"),
    read("DeepseekV3ForCausalLM"),
    read("Qwen3MoeForCausalLM"),
    special(
        "KimiK25ForConditionalGeneration",
        Shape::Decoder,
        Standing::Read,
        "Kimi-K2.5 is counted as the DeepSeek-V3 language model that its text_config names; its vision part adds \
         nothing to a text pass",
    ),
    special(
        "NemotronHForCausalLM",
        Shape::OneMixer,
        Standing::Read,
        "Nemotron-H has one mixer per layer, so one all-reduce per layer and one for the embedding",
    ),
    special(
        "DeciLMForCausalLM",
        Shape::Blocks,
        Standing::Analogy,
        "all-reduces are counted from block_configs: parts marked no_op issue none; the engines' own code for this \
         architecture was not read",
    ),
    alike("DeepseekV32ForCausalLM"),
    alike("Gemma2ForCausalLM"),
    alike("Gemma3ForCausalLM"),
    alike("Gemma3ForConditionalGeneration"),
    alike("Gemma4ForCausalLM"),
    alike("Gemma4ForConditionalGeneration"),
    alike("Glm4MoeForCausalLM"),
    alike("GlmMoeDsaForCausalLM"),
    special(
        "GptOssForCausalLM",
        Shape::Decoder,
        Standing::Analogy,
        "some MXFP4 kernels pad gpt-oss's hidden size; if the padded width reaches the all-reduce, real messages are \
         larger than listed",
    ),
    alike("Llama4ForCausalLM"),
    alike("Llama4ForConditionalGeneration"),
    alike("MiMoForCausalLM"),
    alike("MiMoV2FlashForCausalLM"),
    alike("MiniMaxM2ForCausalLM"),
    alike("Ministral3ForCausalLM"),
    alike("Mistral3ForConditionalGeneration"),
    alike("MistralForCausalLM"),
    alike("MixtralForCausalLM"),
    alike("Phi3ForCausalLM"),
    alike("Qwen2ForCausalLM"),
    alike("Qwen2MoeForCausalLM"),
    alike("Qwen3ForCausalLM"),
    alike("Qwen3NextForCausalLM"),
    alike("Qwen3VLForConditionalGeneration"),
    alike("Qwen3VLMoeForConditionalGeneration"),
    alike("Qwen3_5ForCausalLM"),
    alike("Qwen3_5ForConditionalGeneration"),
    alike("Qwen3_5MoeForCausalLM"),
    alike("Qwen3_5MoeForConditionalGeneration"),
    (
        "DeepseekV4ForCausalLM",
        Family {
            shape: Shape::Decoder,
            standing: Standing::Unknown("it carries several residual streams, which no rule here covers"),
            note: None,
        },
    ),
];

/// Parts of architecture names that only drafts carry; the first that fits decides.
const DRAFT_MARKS: [(&str, DraftKind); 5] = [
    ("Eagle3", DraftKind::Eagle3),
    ("NextN", DraftKind::NextToken),
    ("MTP", DraftKind::NextToken),
    ("Eagle", DraftKind::Eagle),
    ("Medusa", DraftKind::Medusa),
];

/// What the names in a config come to.
#[derive(Debug, Clone)]
pub(super) struct Recognised {
    /// The name that decided, if the config names any.
    pub(super) architecture: Option<String>,
    pub(super) family: Family,
    /// Whether the name stands in the text model's own section because the outer one is not known.
    pub(super) by_inner_name: bool,
}

/// Looks the names up, those of the whole model before those of its text part.
pub(super) fn recognise(outer: &[String], inner: &[String]) -> Recognised {
    let find = |names: &[String]| {
        names.iter().find_map(|name| {
            let family = FAMILIES.iter().find(|(known, _)| known == name)?.1;
            Some((name.clone(), family))
        })
    };
    if let Some((name, family)) = find(outer) {
        return Recognised { architecture: Some(name), family, by_inner_name: false };
    }
    let named = outer.first().or(inner.first());
    let marked = |(mark, _): &&(&str, DraftKind)| outer.iter().chain(inner).any(|name| name.contains(mark));
    let draft = DRAFT_MARKS.iter().find(marked).map(|(_, kind)| *kind);
    if draft.is_none()
        && let Some((name, family)) = find(inner)
    {
        return Recognised { architecture: Some(name), family, by_inner_name: !outer.is_empty() };
    }
    let standing = match (draft, named) {
        (Some(kind), _) => Standing::Draft(kind),
        (None, Some(_)) => {
            Standing::Unknown("its model code was not read, nor is it known to be built like one that was")
        }
        (None, None) => Standing::Unknown("the config names no architecture"),
    };
    Recognised {
        architecture: named.cloned(),
        family: Family { shape: Shape::Decoder, standing, note: None },
        by_inner_name: false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(list: &[&str]) -> Vec<String> {
        list.iter().map(|name| (*name).to_owned()).collect()
    }

    #[test]
    fn no_architecture_is_listed_twice() {
        for (index, (name, _)) in FAMILIES.iter().enumerate() {
            assert!(FAMILIES[..index].iter().all(|(earlier, _)| earlier != name), "{name}");
        }
    }

    #[test]
    fn the_outer_name_goes_first_and_the_inner_one_helps_out() {
        let outer = recognise(&names(&["KimiK25ForConditionalGeneration"]), &names(&["DeepseekV3ForCausalLM"]));
        assert_eq!(outer.architecture.as_deref(), Some("KimiK25ForConditionalGeneration"));
        assert!(!outer.by_inner_name);

        let inner = recognise(&names(&["SomeVisionWrapper"]), &names(&["DeepseekV3ForCausalLM"]));
        assert_eq!(inner.family.standing, Standing::Read);
        assert!(inner.by_inner_name);

        let known_to_differ = recognise(&names(&["DeepseekV4ForCausalLM"]), &names(&["LlamaForCausalLM"]));
        assert!(matches!(known_to_differ.family.standing, Standing::Unknown(_)));
    }

    #[test]
    fn drafts_and_strangers_are_told_apart() {
        for (name, kind) in [
            ("LlamaForCausalLMEagle3", DraftKind::Eagle3),
            ("Eagle3LlamaForCausalLM", DraftKind::Eagle3),
            ("EagleLlamaForCausalLM", DraftKind::Eagle),
            ("DeepseekV3ForCausalLMNextN", DraftKind::NextToken),
            ("EagleDeepSeekMTPModel", DraftKind::NextToken),
            ("MedusaModel", DraftKind::Medusa),
        ] {
            assert_eq!(recognise(&names(&[name]), &[]).family.standing, Standing::Draft(kind), "{name}");
        }
        assert!(matches!(recognise(&names(&["NewForCausalLM"]), &[]).family.standing, Standing::Unknown(_)));
        assert_eq!(recognise(&[], &[]).architecture, None);
    }
}
