//! Configs of published models give the counts that their engines' code has, or a refusal by name.
//!
//! `model_configs.toml` holds what is expected, written down from the rule and the models' own
//! numbers, not computed by this program. A folder of whole configs is counted a second time by a few
//! lines here that share nothing with the program, and the two are compared:
//!
//!     NCCLTUNE_TEST_CONFIGS=FOLDER cargo test --test it every_config_of_a_folder

use std::path::Path;

use fs_err as fs;
use nccltune::engine::Engine;
use nccltune::workload::{
    ModelConfig, Standing, WorkloadRequest, derive, parse_batches, parse_config, preset, preset_names,
};
use serde_json::{Value, json};

const FIXTURES: &str = include_str!("model_configs.toml");

#[derive(serde::Deserialize)]
#[serde(deny_unknown_fields)]
struct Fixtures {
    model: Vec<Fixture>,
}

#[derive(serde::Deserialize)]
#[serde(deny_unknown_fields)]
struct Fixture {
    name: String,
    source: String,
    refusal: Option<String>,
    all_reduces: Option<u32>,
    bytes_per_token: Option<u64>,
    logits_bytes_per_token: Option<u64>,
    /// The layers of a model whose blocks lack parts: b both, f feed-forward alone, a attention alone.
    blocks: Option<String>,
    config: String,
}

impl Fixture {
    fn text(&self) -> String {
        let Some(blocks) = &self.blocks else { return self.config.clone() };
        let blocks: Vec<Value> = blocks
            .chars()
            .map(|part| json!({"attention": {"no_op": part == 'f'}, "ffn": {"no_op": part == 'a'}}))
            .collect();
        let mut config: Value = serde_json::from_str(&self.config).expect("JSON");
        config["block_configs"] = json!(blocks);
        config.to_string()
    }
}

fn request(batch: &str, verify_tokens: u32) -> WorkloadRequest {
    WorkloadRequest {
        engine: Engine::None,
        tensor_parallel: 2,
        batches: parse_batches(batch).expect("batches"),
        verify_tokens,
        ..WorkloadRequest::default()
    }
}

/// All-reduces of a pass, bytes of each for a token, bytes of the gathered logits for a token; each
/// as the points of one token and of four say it.
fn counts(config: &ModelConfig) -> Result<(u32, u64, u64), String> {
    let of = |verify: u32| derive(config, &request("1", verify)).map_err(|error| error.to_string());
    let (one, four) = (of(1)?, of(4)?);
    let [reduce, gather] = one.points.as_slice() else { return Err(format!("{} points", one.points.len())) };
    assert_eq!((four.points[0].bytes, four.points[1].bytes), (4 * reduce.bytes, 4 * gather.bytes), "{}", config.name);
    assert_eq!(four.points[0].calls_per_pass, reduce.calls_per_pass);
    Ok((reduce.calls_per_pass, reduce.bytes, gather.bytes))
}

#[test]
fn published_models_issue_what_their_engines_code_says() {
    let fixtures: Fixtures = toml::from_str(FIXTURES).expect("the fixtures are in order");
    let mut counted = 0;
    for fixture in &fixtures.model {
        let name = &fixture.name;
        assert!(fixture.source.contains(" on Hugging Face, ") || fixture.source.contains(" on GitHub, "), "{name}");
        let config = parse_config(&fixture.text(), name).unwrap_or_else(|error| panic!("{error}"));
        let found = match config.standing {
            // A draft is no target; its own pass is counted all the same.
            Standing::Draft(_) => {
                let error = counts(&config).expect_err("a draft is refused as a target");
                assert!(error.contains("speculative draft") && error.contains("--draft-model"), "{error}");
                let bytes = config.hidden_size * config.dtype.size_bytes();
                Ok((config.all_reduces.calls(), bytes, config.logits_bytes(1).expect("a head")))
            }
            _ => counts(&config),
        };
        match (&fixture.refusal, found) {
            (Some(words), Err(error)) => {
                assert!(error.contains(words.as_str()) && error.contains("--assume-decoder"), "{name}: {error}");
            }
            (Some(_), Ok(found)) => panic!("{name}: counted as {found:?}"),
            (None, Err(error)) => panic!("{error}"),
            (None, Ok(found)) => {
                let wanted = (fixture.all_reduces, fixture.bytes_per_token, fixture.logits_bytes_per_token);
                assert_eq!((Some(found.0), Some(found.1), Some(found.2)), wanted, "{name}");
                counted += 1;
            }
        }
    }
    assert_eq!(counted, 30, "models that were counted");
}

#[test]
fn presets_issue_what_the_published_models_do() {
    let fixtures: Fixtures = toml::from_str(FIXTURES).expect("the fixtures are in order");
    let mut compared = 0;
    for name in preset_names() {
        let preset = preset(name).expect("listed").expect("valid");
        // Weights in other formats change no message.
        let twin =
            fixtures.model.iter().find(|model| model.name == name || model.name.starts_with(&format!("{name}-")));
        let Some(twin) = twin else { continue };
        let found = counts(&preset).unwrap_or_else(|error| panic!("{error}"));
        let wanted = (twin.all_reduces, twin.bytes_per_token, twin.logits_bytes_per_token);
        assert_eq!((Some(found.0), Some(found.1), Some(found.2)), wanted, "{name} against {}", twin.name);
        compared += 1;
    }
    assert_eq!(compared, 18, "presets with a published twin");
}

/// What a pass issues, counted by a second reader that knows the rule and little else.
fn recounted(text: &str) -> Option<(u64, u64, u64)> {
    let text = text.replace("-Infinity", "null").replace("Infinity", "null").replace("NaN", "null");
    let root: Value = serde_json::from_str(&text).ok()?;
    let level = root.get("text_config").filter(|level| level.is_object()).unwrap_or(&root);
    let get = |name: &str| level.get(name).or_else(|| root.get(name)).filter(|value| !value.is_null());
    let number = |name: &str| get(name).and_then(Value::as_u64);
    let hidden = number("hidden_size")?;
    let vocabulary = number("draft_vocab_size").or_else(|| number("vocab_size"))?.div_ceil(64) * 64;
    let parts = if let Some(blocks) = get("block_configs").and_then(Value::as_array) {
        let kept = |part: &str| blocks.iter().filter(|block| block[part]["no_op"] != true).count() as u64;
        kept("attention") + kept("ffn")
    } else if let Some(pattern) = get("hybrid_override_pattern").and_then(Value::as_str) {
        pattern.len() as u64
    } else if let Some(list) = get("layers_block_type").and_then(Value::as_array) {
        list.len() as u64
    } else {
        2 * number("num_hidden_layers")?
    };
    let wide = [get("dtype"), get("torch_dtype")].into_iter().flatten().any(|dtype| dtype == "float32");
    let bytes = if wide { 4 } else { 2 };
    Some((1 + parts, hidden * bytes, vocabulary * bytes))
}

#[test]
fn every_config_of_a_folder_is_counted_or_refused_by_name() {
    // The presets, or whatever folder somebody names.
    let folder = std::env::var_os("NCCLTUNE_TEST_CONFIGS")
        .unwrap_or_else(|| concat!(env!("CARGO_MANIFEST_DIR"), "/search-spaces/models").into());
    let (mut counted, mut refused) = (0, Vec::new());
    let mut paths: Vec<_> = fs::read_dir(Path::new(&folder))
        .expect("a folder")
        .map(|entry| entry.expect("an entry").path())
        .filter(|path| path.extension().is_some_and(|extension| extension == "json"))
        .collect();
    paths.sort();
    for path in &paths {
        let text = fs::read_to_string(path).expect("text");
        let name = path.display().to_string();
        let parsed = parse_config(&text, &name);
        let found = parsed.map_err(|error| error.to_string()).and_then(|config| match config.standing {
            Standing::Draft(_) => Ok((
                config.all_reduces.calls(),
                config.hidden_size * config.dtype.size_bytes(),
                config.logits_bytes(1).expect("a head"),
            )),
            _ => counts(&config),
        });
        match found {
            Ok(found) => {
                let (calls, bytes, logits) = recounted(&text).unwrap_or_else(|| panic!("{name}: counted as {found:?}"));
                assert_eq!((u64::from(found.0), found.1, found.2), (calls, bytes, logits), "{name}");
                counted += 1;
            }
            Err(error) => {
                assert!(error.starts_with(&name), "a refusal names its file: {error}");
                refused.push(error);
            }
        }
    }
    println!("{counted} configs counted, {} refused:\n{}", refused.len(), refused.join("\n"));
    assert!(counted > 0, "nothing in {} was counted", folder.display());
}
