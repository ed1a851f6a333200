//! From a model's config to points.

use std::io::Read;
use std::path::Path;

use crate::engine::Engine;
use crate::error_kind::{ErrorKind, Failure};
use crate::record::{PassCase, PassShape, Workload};
use crate::units::nearest_name;
use crate::workload::{
    MAX_CONFIG_BYTES, ModelConfig, WorkloadRequest, derive, parse_batches, parse_config, pass_cases, pass_shape,
    preset, preset_names,
};

/// The model that is tuned for when none is named.
pub const DEFAULT_MODEL: &str = "kimi-k2.5";
/// The batches, likewise.
pub const DEFAULT_BATCHES: &str = "1,4,16";

/// What the user said about the workload; what is not said has a default.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct WorkloadWish {
    /// Preset name or path of a config.json.
    pub model: Option<String>,
    /// Engine.
    pub engine: Option<Engine>,
    /// Tensor-parallel size.
    pub tensor_parallel: Option<u32>,
    /// "1,8,32" or "1:0.7,8:0.3".
    pub batches: Option<String>,
    /// Tokens the target checks per sequence and pass.
    pub verify_tokens: Option<u32>,
    /// Prefill chunk in tokens.
    pub chunk: Option<u32>,
    /// Take an unknown architecture for a plain decoder.
    pub assume_decoder: bool,
    /// Message sizes instead of a model.
    pub sizes: Option<Vec<u64>>,
}

impl WorkloadWish {
    /// Whether anything was said that makes another workload.
    pub fn is_empty(&self) -> bool {
        *self == Self::default()
    }

    /// The engine, or its default; sizes that belong to no model belong to no engine either.
    pub fn engine(&self) -> Engine {
        self.engine.unwrap_or(if self.sizes.is_some() { Engine::None } else { Engine::Sglang })
    }
}

/// Derives the workload for this many ranks on GPUs of this much memory.
pub fn workload(wish: &WorkloadWish, ranks: u32, gpu_memory_mib: Option<u64>) -> Result<Workload, Failure> {
    if let Some(sizes) = &wish.sizes {
        let tensor_parallel = wish.tensor_parallel.unwrap_or(ranks);
        let workload = crate::workload::from_sizes(sizes, tensor_parallel, crate::collective::DataType::Bf16)?;
        // Sizes belong to no model, but the engine's own variables hold while they are measured.
        return Ok(Workload { engine: wish.engine().name().to_owned(), ..workload });
    }
    let (config, name, request) = model_and_request(wish, ranks, gpu_memory_mib)?;
    // Complaints are about the file; the workload goes by the model's name.
    Ok(Workload { model: name, ..derive(&config, &request)? })
}

/// The model, what people call it, and what is asked of it; sizes that were named directly play no
/// part in it.
fn model_and_request(
    wish: &WorkloadWish,
    ranks: u32,
    gpu_memory_mib: Option<u64>,
) -> Result<(ModelConfig, String, WorkloadRequest), Failure> {
    let (config, name) = read_model(wish.model.as_deref().unwrap_or(DEFAULT_MODEL))?;
    let request = WorkloadRequest {
        engine: wish.engine(),
        tensor_parallel: wish.tensor_parallel.unwrap_or(ranks),
        batches: parse_batches(wish.batches.as_deref().unwrap_or(DEFAULT_BATCHES))?,
        verify_tokens: wish.verify_tokens.unwrap_or(1),
        chunk: wish.chunk,
        gpu_memory_mib,
        assume_decoder: wish.assume_decoder,
    };
    Ok((config, name, request))
}

/// The forward pass that finalists are tried in: one rank's shape and the passes that are timed.
/// `None` where no model was named but sizes.
pub fn trial_shape(
    wish: &WorkloadWish,
    ranks: u32,
    gpu_memory_mib: Option<u64>,
    context: u64,
) -> Result<Option<(PassShape, Vec<PassCase>)>, Failure> {
    if wish.sizes.is_some() {
        return Ok(None);
    }
    let (config, name, request) = model_and_request(wish, ranks, gpu_memory_mib)?;
    let shape = PassShape { model: name, ..pass_shape(&config, &request)? };
    Ok(Some((shape, pass_cases(&config, &request, context)?)))
}

/// A text file of at most so many bytes. What the system says of its length counts for nothing: a
/// device has none and never ends.
pub(super) fn read_bounded(path: &Path, most: u64) -> Result<String, std::io::Error> {
    let mut bytes = Vec::new();
    fs_err::File::open(path)?.take(most + 1).read_to_end(&mut bytes)?;
    if bytes.len() as u64 > most {
        return Err(std::io::Error::other(format!("{} is larger than {most} bytes", path.display())));
    }
    String::from_utf8(bytes).map_err(|_| std::io::Error::other(format!("{} is not UTF-8 text", path.display())))
}

/// A preset by name, else a file. A name with a slash or an extension is always a file.
fn read_model(model: &str) -> Result<(ModelConfig, String), Failure> {
    if let Some(config) = preset(model) {
        return Ok((config?, model.to_owned()));
    }
    let path = Path::new(model);
    let file = if path.is_dir() { path.join("config.json") } else { path.to_owned() };
    let unreadable = |error: String| {
        let failure = Failure::new(ErrorKind::Usage, error);
        let known = preset_names().collect::<Vec<_>>().join(", ");
        match nearest_name(model, preset_names()) {
            Some(near) => failure.with_hint(format!("did you mean the preset {near}? Presets: {known}")),
            None => failure.with_hint(format!("name a config.json or one of the presets: {known}")),
        }
    };
    let text = read_bounded(&file, MAX_CONFIG_BYTES as u64).map_err(|error| unreadable(error.to_string()))?;
    // The folder says more than "config.json" does.
    let name = match file.file_name().and_then(|name| name.to_str()) {
        Some("config.json") | None => file
            .parent()
            .and_then(Path::file_name)
            .map_or_else(|| "config.json".to_owned(), |name| name.to_string_lossy().into_owned()),
        Some(name) => name.trim_end_matches(".json").to_owned(),
    };
    Ok((parse_config(&text, &file.display().to_string())?, name))
}
