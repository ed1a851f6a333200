//! Models that are compiled in by name, so that the tool does something useful without a file.

/// Name and config text. The texts hold only the fields that decide the collectives; `_source`
/// inside names the public model card they were taken from.
const PRESETS: [(&str, &str); 2] = [
    ("kimi-k2.5", include_str!("../../search-spaces/models/kimi-k2.5.json")),
    ("llama-3.1-70b", include_str!("../../search-spaces/models/llama-3.1-70b.json")),
];

/// The config text of a compiled-in model, ready for [`parse_config`](super::parse_config).
pub fn preset(name: &str) -> Option<&'static str> {
    PRESETS.iter().find(|(known, _)| known.eq_ignore_ascii_case(name)).map(|(_, text)| *text)
}

/// The names of all compiled-in models.
pub fn preset_names() -> impl Iterator<Item = &'static str> {
    PRESETS.iter().map(|(name, _)| *name)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::workload::parse_config;

    #[test]
    fn every_preset_parses_and_names_its_source() {
        for name in preset_names() {
            let text = preset(name).expect("listed");
            parse_config(text, name).expect("a preset is a valid config");
            assert!(text.contains("on Hugging Face"), "{name} does not say where it comes from");
        }
        assert!(preset("Kimi-K2.5").is_some());
        assert_eq!(preset("gpt-2"), None);
    }
}
