//! In how many bits a model's matrices are stored, as its config tells it.
//!
//! A pass of few tokens is bound by reading weights, so their stored size is what counts: packed
//! values and the scales beside them. Each quantisation tool names the matrices it left alone in a
//! dialect of its own (exact names, globs, regular expressions, prefixes). Here such a pattern is
//! read by the words in it, which all dialects share: a layer, a block, a projection.

use std::collections::BTreeMap;

use serde_json::{Map, Value};

/// How one weight matrix is stored: values of so many bits, and for each group of values so many
/// bits of scales (and zero points).
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Stored {
    /// Bits per value.
    pub bits: u8,
    /// Bits beside each group.
    pub scale_bits: u8,
    /// Values per group; 0 where groups are so large that their scales do not count.
    pub group: u32,
}

impl Stored {
    /// Plain 16-bit values. Weights that a config gives in 32 bits are halved by the engines too.
    pub const HALF: Self = Self { bits: 16, scale_bits: 0, group: 0 };
    /// NVFP4: an FP8 scale for 16 values.
    const NVFP4: Self = Self { bits: 4, scale_bits: 8, group: 16 };
    /// MXFP4: an 8-bit exponent for 32 values.
    const MXFP4: Self = Self { bits: 4, scale_bits: 8, group: 32 };
    /// FP8 with scales per tensor or channel.
    const FP8: Self = Self { bits: 8, scale_bits: 0, group: 0 };

    /// Bytes of this many values, scales included; saturates.
    pub const fn bytes(self, values: u64) -> u64 {
        let scales = match self.group {
            0 => 0,
            group => values.div_ceil(group as u64).saturating_mul(self.scale_bits as u64),
        };
        values.saturating_mul(self.bits as u64).saturating_add(scales).div_ceil(8)
    }

    /// Bits per value, scales included.
    pub fn bits_per_value(self) -> f64 {
        let scales = if self.group == 0 { 0.0 } else { f64::from(self.scale_bits) / f64::from(self.group) };
        f64::from(self.bits) + scales
    }
}

/// The block a matrix belongs to.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Part {
    /// Attention, or the mixer in its place.
    Attention,
    /// A dense feed-forward block.
    Dense,
    /// Experts that every token passes.
    Shared,
    /// Experts that tokens are routed to.
    Experts,
}

impl Part {
    /// For notes.
    pub(super) const fn name(self) -> &'static str {
        match self {
            Self::Attention => "attention",
            Self::Dense => "dense blocks",
            Self::Shared => "shared experts",
            Self::Experts => "routed experts",
        }
    }
}

/// Every matrix that may be stored in its own format. Its place in the list is its bit in a [`Set`].
/// Router and output head are missing: no format seen so far touches them.
const MATRICES: [(Part, &str); 19] = [
    (Part::Attention, "q_proj"),
    (Part::Attention, "k_proj"),
    (Part::Attention, "v_proj"),
    (Part::Attention, "o_proj"),
    (Part::Attention, "q_a_proj"),
    (Part::Attention, "q_b_proj"),
    (Part::Attention, "kv_a_proj_with_mqa"),
    (Part::Attention, "kv_b_proj"),
    (Part::Attention, "in_proj"),
    (Part::Attention, "out_proj"),
    (Part::Dense, "gate_proj"),
    (Part::Dense, "up_proj"),
    (Part::Dense, "down_proj"),
    (Part::Shared, "gate_proj"),
    (Part::Shared, "up_proj"),
    (Part::Shared, "down_proj"),
    (Part::Experts, "gate_proj"),
    (Part::Experts, "up_proj"),
    (Part::Experts, "down_proj"),
];

/// Other names of the same matrices: fused ones, and those of families that count instead.
const ALIASES: [(&str, &[&str]); 9] = [
    ("qkv_proj", &["q_proj", "k_proj", "v_proj"]),
    ("kv_a_proj", &["kv_a_proj_with_mqa"]),
    ("fused_qkv_a_proj_with_mqa", &["q_a_proj", "kv_a_proj_with_mqa"]),
    ("in_proj_qkvz", &["in_proj"]),
    ("in_proj_qkv", &["in_proj"]),
    ("gate_up_proj", &["gate_proj", "up_proj"]),
    ("w1", &["gate_proj"]),
    ("w3", &["up_proj"]),
    ("w2", &["down_proj"]),
];

/// Some of [`MATRICES`], one bit each.
type Set = u32;

const ALL: Set = (1 << MATRICES.len()) - 1;

fn set_of(holds: impl Fn(Part, &str) -> bool) -> Set {
    let bit = |index: usize, (part, name): &(Part, &str)| Set::from(holds(*part, name)) << index;
    MATRICES.iter().enumerate().fold(0, |set, (index, matrix)| set | bit(index, matrix))
}

/// The matrices a word names, in whichever block.
fn named(word: &str) -> Set {
    let fused = ALIASES.iter().find(|(alias, _)| *alias == word).map_or(&[][..], |(_, names)| names);
    set_of(|_, name| name == word || fused.contains(&name))
}

/// Which matrices of which layers a list of patterns covers.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
struct Cover {
    everywhere: Set,
    layers: BTreeMap<u32, Set>,
    /// By the leading digits of a layer's number, as a glob such as `layers.6*` gives them.
    leading: BTreeMap<String, Set>,
}

impl Cover {
    fn everything() -> Self {
        Self { everywhere: ALL, ..Self::default() }
    }

    fn add(&mut self, pattern: &str) {
        let read = Pattern::read(pattern);
        if read.set == 0 {
            return;
        }
        if read.layers.is_empty() {
            self.everywhere |= read.set;
        }
        for layer in read.layers {
            if read.leading {
                *self.leading.entry(layer.to_string()).or_default() |= read.set;
            } else {
                *self.layers.entry(layer).or_default() |= read.set;
            }
        }
    }

    fn at(&self, layer: u32) -> Set {
        let digits = layer.to_string();
        let leading = (1..=digits.len()).filter_map(|length| self.leading.get(&digits[..length]));
        leading.fold(self.everywhere | self.layers.get(&layer).copied().unwrap_or(0), |set, more| set | more)
    }
}

/// One entry of a list, read.
#[derive(Debug, Default)]
struct Pattern {
    set: Set,
    /// The layers it names; none for all of them.
    layers: Vec<u32>,
    /// Whether the numbers are only leading digits.
    leading: bool,
}

impl Pattern {
    fn read(pattern: &str) -> Self {
        const FOREIGN: [&str; 8] = ["vision", "visual", "projector", "audio", "image", "mtp", "eagle", "draft"];
        let text = pattern.to_ascii_lowercase();
        let text = text.strip_prefix("re:").unwrap_or(&text);
        if FOREIGN.iter().any(|word| text.contains(word)) {
            return Self::default();
        }
        let text = &without_classes(text);
        let mut words: Vec<&str> = text
            .split(|letter: char| !letter.is_ascii_alphanumeric() && letter != '_')
            .filter(|word| !word.is_empty())
            .collect();
        let mut read = Self::default();
        if let Some(place) = words.iter().position(|word| *word == "layers" || *word == "blocks") {
            let numbers: Vec<u32> = words[place + 1..].iter().map_while(|word| word.parse().ok()).collect();
            let rest = words.split_off(place + 1 + numbers.len());
            read.leading = rest.is_empty() && !numbers.is_empty() && text.ends_with('*');
            // `.*` after a number ends it, in a regular expression.
            read.leading &= !text.ends_with(".*");
            read.layers = numbers;
            words = rest;
            if words.is_empty() && !read.layers.is_empty() {
                read.set = ALL;
                return read;
            }
        }
        read.set = matrices_in(&words);
        read
    }
}

/// A pattern with each class of digits in it spelled out, as far as it names layers: `[3-5]` and
/// `6[01]` become the numbers they match, with blanks between; one with a quantifier behind it
/// (`[0-9]+`) matches any number, which is the same as naming none.
fn without_classes(pattern: &str) -> String {
    let mut plain = String::with_capacity(pattern.len());
    let mut rest = pattern;
    while let Some((before, opened)) = rest.split_once('[') {
        let Some((class, behind)) = opened.split_once(']') else { break };
        let digits = class_digits(class);
        let leading = before.trim_end_matches(|letter: char| letter.is_ascii_digit());
        let tens = &before[leading.len()..];
        plain.push_str(leading);
        // The blanks keep a number that stands right behind the class from growing together with it.
        rest = if let Some(quantified) = behind.strip_prefix(['+', '*', '{', '?']) {
            plain.push(' ');
            quantified
        } else {
            for digit in digits {
                plain.push_str(&format!(" {tens}{digit} "));
            }
            behind
        };
    }
    plain.push_str(rest);
    plain
}

/// The digits of a character class, in order: `0-2` and `012` are the same.
fn class_digits(class: &str) -> Vec<char> {
    let letters: Vec<char> = class.chars().take(32).collect();
    let mut digits: Vec<char> = letters
        .windows(3)
        .filter(|window| window[1] == '-' && window[0].is_ascii_digit() && window[2].is_ascii_digit())
        .flat_map(|window| window[0]..=window[2])
        .chain(letters.iter().copied())
        .filter(char::is_ascii_digit)
        .collect();
    digits.sort_unstable();
    digits.dedup();
    digits
}

/// The matrices that these words of a module path point at.
fn matrices_in(words: &[&str]) -> Set {
    let of = |wanted: &[Part]| set_of(|part, _| wanted.contains(&part));
    // (gate|up)_proj falls into gate, up and _proj.
    let torn = words.contains(&"_proj");
    let mut block = None;
    let mut names = None;
    for &word in words {
        match word {
            "self_attn" | "attn" | "attention" | "self_attention" | "linear_attn" | "mixer" => {
                block = Some(of(&[Part::Attention]));
            }
            "mlp" | "feed_forward" | "ffn" | "block_sparse_moe" | "moe" => {
                block = Some(of(&[Part::Dense, Part::Shared, Part::Experts]));
            }
            "experts" => block = Some(of(&[Part::Experts])),
            "shared_expert" | "shared_experts" => block = Some(of(&[Part::Shared])),
            "_proj" => {}
            // Numbers of experts, and letters left of \d and \w.
            _ if !torn && (word.len() == 1 || word.bytes().all(|letter| letter.is_ascii_digit())) => {}
            _ => {
                let matrices = if torn { named(&format!("{word}_proj")) } else { named(word) };
                // What a block holds beside its matrices (a router, a norm) is named and no matrix;
                // before the block stand the names of what is around it.
                if matrices != 0 || block.is_some() {
                    names = Some(names.unwrap_or(0) | matrices);
                }
            }
        }
    }
    let block_set = match (block, names) {
        (None, None) => 0,
        (None, Some(_)) => ALL,
        // A projection right below the block is the dense one; experts have names of their own.
        (Some(set), Some(_)) if set == of(&[Part::Dense, Part::Shared, Part::Experts]) => of(&[Part::Dense]),
        (Some(set), _) => set,
    };
    block_set & names.unwrap_or(ALL)
}

/// What a config says about quantised weights.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Quantisation {
    /// Formats and what they apply to, the first that covers a matrix wins.
    formats: Vec<(Cover, Stored)>,
    /// What was left in 16 bits.
    kept: Cover,
    /// What could not be read.
    pub(super) note: Option<String>,
}

impl Quantisation {
    /// How a matrix of this layer is stored.
    pub(super) fn stored(&self, layer: u32, part: Part, name: &str) -> Stored {
        let matrix = set_of(|other, known| other == part && known == name);
        if self.kept.at(layer) & matrix != 0 {
            return Stored::HALF;
        }
        let found = self.formats.iter().find(|(cover, _)| cover.at(layer) & matrix != 0);
        found.map_or(Stored::HALF, |(_, stored)| *stored)
    }

    /// Reads `quantization_config`. What is not known is 16 bits, with a note: nobody's config is
    /// refused for it.
    pub(super) fn read(config: Option<&Value>) -> Self {
        let Some(config) = config else { return Self::default() };
        let unknown = |what: String| Self {
            note: Some(format!("{what} is not known here; weights are counted in 16 bits")),
            ..Self::default()
        };
        let Some(config) = config.as_object() else {
            return unknown("a quantization_config that is no object".to_owned());
        };
        let word = |field: &str| config.get(field).and_then(Value::as_str).unwrap_or_default().to_ascii_lowercase();
        let (method, algorithm) = (word("quant_method"), word("quant_algo"));
        let formats = match method.as_str() {
            "fp8" | "fbgemm_fp8" => Some(everywhere(blocked_fp8(config.get("weight_block_size")))),
            "mxfp4" => {
                let experts = set_of(|part, _| part == Part::Experts);
                Some(vec![(Cover { everywhere: experts, ..Cover::default() }, Stored::MXFP4)])
            }
            "awq" | "awq_marlin" | "gptq" | "gptq_marlin" | "auto-round" => packed_integers(config).map(everywhere),
            "modelopt" | "modelopt_fp4" | "" if algorithm.contains("fp4") => Some(everywhere(Stored::NVFP4)),
            "modelopt" | "" if algorithm.contains("fp8") => Some(everywhere(Stored::FP8)),
            "modelopt" | "compressed-tensors" => groups(config),
            _ => None,
        };
        let Some(formats) = formats else {
            let named = if method.is_empty() { algorithm } else { method };
            return unknown(format!("the quantisation {}", super::shown(&named)));
        };
        let mut kept = Cover::default();
        for list in ["ignore", "modules_to_not_convert", "exclude_modules", "ignored_layers"] {
            let patterns = config.get(list).and_then(Value::as_array).map_or(&[][..], Vec::as_slice);
            patterns.iter().filter_map(Value::as_str).for_each(|pattern| kept.add(pattern));
        }
        Self { formats, kept, note: None }
    }

    /// Whether anything is stored in fewer than 16 bits.
    pub(super) fn is_none(&self) -> bool {
        self.formats.is_empty()
    }
}

fn everywhere(stored: Stored) -> Vec<(Cover, Stored)> {
    vec![(Cover::everything(), stored)]
}

/// FP8 with a 32-bit scale for each block of `[rows, columns]`.
fn blocked_fp8(block: Option<&Value>) -> Stored {
    let sides = block.and_then(Value::as_array).map_or(&[][..], Vec::as_slice);
    let area = sides.iter().map(Value::as_u64).try_fold(1_u64, |area, side| area.checked_mul(side?));
    match area.and_then(|area| u32::try_from(area).ok()) {
        Some(group) if group > 1 => Stored { scale_bits: 32, group, ..Stored::FP8 },
        _ => Stored::FP8,
    }
}

/// AWQ and GPTQ: a 16-bit scale and a zero point of the value's width for each group.
fn packed_integers(config: &Map<String, Value>) -> Option<Stored> {
    let bits = bits_in(config.get("bits").or_else(|| config.get("w_bit")))?;
    let group = group_in(config.get("group_size").or_else(|| config.get("q_group_size")));
    Some(Stored { bits, scale_bits: 16 + bits, group })
}

/// The `config_groups` of compressed-tensors and ModelOpt.
fn groups(config: &Map<String, Value>) -> Option<Vec<(Cover, Stored)>> {
    const MOST: usize = 64;
    let groups = config.get("config_groups")?.as_object().filter(|groups| (1..=MOST).contains(&groups.len()))?;
    groups
        .values()
        .map(|group| {
            let weights = group.get("weights")?;
            let bits = bits_in(weights.get("num_bits"))?;
            let scale_bits = match weights.get("type").and_then(Value::as_str) {
                // The 4-bit float formats have 8-bit scales.
                Some("float") if bits <= 4 => 8,
                _ => 16,
            };
            let size = group_in(weights.get("group_size"));
            let mut cover = Cover::default();
            for target in group.get("targets").and_then(Value::as_array).map_or(&[][..], Vec::as_slice) {
                match target.as_str()? {
                    "Linear" | "FusedMoE" => cover = Cover::everything(),
                    pattern => cover.add(pattern),
                }
            }
            Some((cover, Stored { bits, scale_bits, group: size }))
        })
        .collect()
}

fn bits_in(value: Option<&Value>) -> Option<u8> {
    value?.as_u64().filter(|bits| (1..=16).contains(bits)).map(|bits| bits as u8)
}

/// Values per group; per-channel formats write none, null or -1.
fn group_in(value: Option<&Value>) -> u32 {
    value.and_then(Value::as_u64).and_then(|size| u32::try_from(size).ok()).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use serde_json::json;

    use super::*;

    const INT4_BY_32: Stored = Stored { bits: 4, scale_bits: 16, group: 32 };

    fn read(config: &Value) -> Quantisation {
        Quantisation::read(Some(config))
    }

    #[test]
    fn bytes_hold_values_and_scales() {
        assert_eq!(Stored::HALF.bytes(7168), 14_336);
        assert_eq!(Stored::NVFP4.bytes(1600), 800 + 100);
        assert_eq!(Stored::MXFP4.bytes(3200), 1600 + 100);
        assert_eq!(INT4_BY_32.bytes(64), 32 + 4);
        assert_eq!(format!("{} {}", INT4_BY_32.bits_per_value(), Stored::FP8.bits_per_value()), "4.5 8");
        assert_eq!(Stored { bits: 3, scale_bits: 0, group: 0 }.bytes(3), 2);
        assert_eq!(Stored::HALF.bytes(u64::MAX), u64::MAX / 8 + 1);
    }

    #[test]
    fn integers_on_experts_alone() {
        let kimi = read(&json!({
            "config_groups": {"group_0": {"targets": ["Linear"], "weights": {
                "group_size": 32, "num_bits": 4, "strategy": "group", "type": "int"}}},
            "ignore": ["lm_head", "re:.*self_attn.*", "re:.*shared_experts.*",
                "re:.*mlp\\.(gate|up|gate_up|down)_proj.*"],
            "quant_method": "compressed-tensors",
        }));
        assert_eq!(kimi.stored(3, Part::Experts, "down_proj"), INT4_BY_32);
        for (part, name) in MATRICES.into_iter().filter(|(part, _)| *part != Part::Experts) {
            assert_eq!(kimi.stored(3, part, name), Stored::HALF, "{part:?} {name}");
        }
    }

    #[test]
    fn formats_by_method() {
        let expert = |config: Value| read(&config).stored(0, Part::Experts, "up_proj");
        let attention = |config: Value| read(&config).stored(0, Part::Attention, "q_proj");
        let blocked = json!({"quant_method": "fp8", "weight_block_size": [128, 128]});
        assert_eq!(attention(blocked), Stored { scale_bits: 32, group: 16_384, ..Stored::FP8 });
        assert_eq!(attention(json!({"quant_method": "fp8", "weight_block_size": null})), Stored::FP8);
        let mxfp4 = json!({"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]});
        assert_eq!((expert(mxfp4.clone()), attention(mxfp4)), (Stored::MXFP4, Stored::HALF));
        let awq = json!({"quant_method": "awq", "bits": 4, "group_size": 128});
        assert_eq!(attention(awq), Stored { bits: 4, scale_bits: 20, group: 128 });
        assert_eq!(
            attention(json!({"quant_method": "gptq", "bits": 8, "group_size": -1})),
            Stored { bits: 8, scale_bits: 24, group: 0 }
        );
        assert_eq!(expert(json!({"quant_method": "modelopt", "quant_algo": "NVFP4"})), Stored::NVFP4);
        assert_eq!(expert(json!({"quant_method": "modelopt", "quant_algo": "FP8"})), Stored::FP8);
        let mixed = json!({"quant_method": "compressed-tensors", "config_groups": {
            "a": {"targets": ["re:.*self_attn.*"], "weights": {"num_bits": 8, "type": "float"}},
            "b": {"targets": ["Linear"], "weights": {"num_bits": 4, "type": "float", "group_size": 16}}}});
        assert_eq!(
            (expert(mixed.clone()), attention(mixed)),
            (Stored::NVFP4, Stored { scale_bits: 16, ..Stored::FP8 })
        );
    }

    #[test]
    fn what_is_not_known_is_sixteen_bits_and_said() {
        for config in [
            json!("int8"),
            json!({"quant_method": "bitsandbytes"}),
            json!({"quant_method": "awq"}),
            json!({"quant_method": "compressed-tensors", "config_groups": {}}),
            json!({"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION"}),
        ] {
            let quantisation = read(&config);
            assert!(quantisation.is_none(), "{config}");
            assert!(quantisation.note.expect("a note").ends_with("counted in 16 bits"));
        }
        assert_eq!(Quantisation::read(None).note, None);
    }

    #[test]
    fn patterns_of_every_dialect() {
        let covered = |pattern: &str, layer: u32| {
            let mut cover = Cover::default();
            cover.add(pattern);
            cover.at(layer)
        };
        let part = |wanted: Part| set_of(|part, _| part == wanted);
        let attention = part(Part::Attention);
        assert_eq!(covered("model.layers.4.self_attn*", 4), attention);
        assert_eq!(covered("model.layers.4.self_attn*", 5), 0);
        assert_eq!(covered("language_model.model.layers.60.self_attn*", 60), attention);
        assert_eq!(covered("model.layers.*.self_attn", 9), attention);
        assert_eq!(covered("re:.*layers\\.(0|1|2)\\.mlp.*", 2), ALL & !attention);
        assert_eq!(covered("re:.*layers\\.(0|1|2)\\.mlp.*", 3), 0);
        // A class with a quantifier is any number, one without is the numbers it matches.
        for layer in [0, 7, 9, 40] {
            assert_eq!(covered("re:.*layers\\.[0-9]+\\.mlp.*", layer), ALL & !attention, "{layer}");
        }
        for (layer, inside) in [(2, false), (3, true), (5, true), (6, false), (9, false)] {
            let expected = if inside { ALL & !attention } else { 0 };
            assert_eq!(covered("re:.*layers\\.[3-5]\\.mlp.*", layer), expected, "{layer}");
        }
        for (layer, inside) in [(5, false), (6, false), (60, true), (61, true), (62, false)] {
            let expected = if inside { ALL & !attention } else { 0 };
            assert_eq!(covered("re:model\\.layers\\.6[01]\\.mlp.*", layer), expected, "{layer}");
        }
        assert_eq!(covered("re:model.layers.6.*", 61), 0);
        assert_eq!((covered("model.layers.6*", 61), covered("model.layers.6*", 16)), (ALL, 0));
        let q_a = set_of(|_, name| name == "q_a_proj");
        assert_eq!(covered("model.layers.7.self_attn.q_a_proj", 7), q_a);
        assert_eq!(covered("re:.*self_attn.(q|k)_proj", 7), set_of(|_, name| name == "q_proj" || name == "k_proj"));
        assert_eq!(covered("model.layers.0.self_attn.qkv_proj", 0).count_ones(), 3);
        assert_eq!(covered("re:.*down_proj.*", 0).count_ones(), 3);
        assert_eq!(covered("model.layers.3.mlp.experts.12.w2", 3).count_ones(), 1);
        assert_eq!(covered("model.layers.3.mlp.shared_experts*", 3), part(Part::Shared));
        assert_eq!(covered("model.layers.0.mlp.down_proj", 0), part(Part::Dense) & named("down_proj"));
        for nothing in [
            "lm_head",
            "gate",
            "re:.*",
            "model.layers.0.mlp.gate",
            "model.layers.0.block_sparse_moe.gate",
            "model.layers.*.mlp.router",
            "re:.*mlp.shared_expert_gate$",
            "model.layers.0.post_attention_layernorm",
            "model.layers.0.linear_attn.conv1d",
            "model.embed_tokens",
            "vision_tower.encoder.layers.0.self_attn*",
        ] {
            assert_eq!(covered(nothing, 0), 0, "{nothing}");
        }
    }

    proptest! {
        #[test]
        fn no_pattern_panics(
            pattern in r"(re:|model|\.|layers|blocks|[0-9]{1,12}|\*|\(|\||\)|self_attn|mlp|experts|_proj|é|gate){0,12}",
            layer: u32,
        ) {
            let mut cover = Cover::default();
            cover.add(&pattern);
            prop_assert!(cover.at(layer) & !ALL == 0);
        }
    }
}
