//! From a model's config to points.

use std::io::Read;
use std::path::{Path, PathBuf};

use crate::collective::{Collective, DataType, Form, Issue, Placement};
use crate::engine::{Engine, EngineVersion};
use crate::error_kind::{ErrorKind, Failure};
use crate::record::{PassCase, PassShape, Workload};
use crate::units::nearest_name;
use crate::workload::{
    Layout, LogRequest, MAX_CONFIG_BYTES, ModelConfig, SizesRequest, StepLog, WorkloadRequest, derive, from_log,
    next_token_draft, parse_batches, parse_config_beside, pass_cases, pass_shape, preset, preset_names, step_tokens,
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
    /// Release of the engine.
    pub engine_version: Option<EngineVersion>,
    /// Config of the draft model, or `mtp` for the target's own next-token layers.
    pub draft_model: Option<String>,
    /// Tokens the draft proposes one after the other.
    pub draft_steps: Option<u32>,
    /// Branches it follows in each step.
    pub draft_topk: Option<u32>,
    /// How the model is spread beside tensor parallelism.
    pub layout: Layout,
    /// Log of one step of a running server, instead of the rule.
    pub from_log: Option<PathBuf>,
    /// Message sizes instead of a model.
    pub sizes: Option<Vec<u64>>,
    /// The operation at these sizes.
    pub collective: Option<Collective>,
    /// Its element type.
    pub dtype: Option<DataType>,
    /// Where its result goes.
    pub placement: Option<Placement>,
    /// Call by call instead of from a graph.
    pub eager: bool,
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

/// What `--draft-model` says for the target's own layers.
const OWN_LAYERS: &str = "mtp";

/// Derives the workload for this many ranks on GPUs of this much memory.
pub fn workload(wish: &WorkloadWish, ranks: u32, gpu_memory_mib: Option<u64>) -> Result<Workload, Failure> {
    let engine = wish.engine();
    let engine_version = wish.engine_version.map(|version| version.to_string());
    if let Some(sizes) = &wish.sizes {
        let tensor_parallel = wish.tensor_parallel.unwrap_or(ranks);
        let (collective, dtype) = (wish.collective.unwrap_or_default(), wish.dtype.unwrap_or_default());
        let mut form = Form::usual(collective);
        form.placement = wish.placement.unwrap_or(form.placement);
        form.issue = if wish.eager { Issue::Eager } else { Issue::Captured };
        let wanted = SizesRequest { ranks: tensor_parallel, collective, dtype, form };
        let workload = crate::workload::from_sizes(sizes, wanted)?;
        // Sizes belong to no model, but the engine's own variables hold while they are measured.
        return Ok(Workload { engine: engine.name().to_owned(), engine_version, ..workload });
    }
    let mut workload = if let Some(path) = &wish.from_log {
        logged(wish, path, gpu_memory_mib)?
    } else {
        let (config, name, request) = model_and_request(wish, ranks, gpu_memory_mib)?;
        // Complaints are about the file; the workload goes by the model's name.
        Workload { model: name, ..derive(&config, &request)? }
    };
    workload.assumptions.extend(engine.variables_caveat(wish.engine_version));
    Ok(Workload { engine_version, ..workload })
}

/// The workload of a server's log.
fn logged(wish: &WorkloadWish, path: &Path, gpu_memory_mib: Option<u64>) -> Result<Workload, Failure> {
    let unreadable = |error: std::io::Error| Failure::new(ErrorKind::Usage, error);
    let file = fs_err::File::open(path).map_err(unreadable)?;
    let log = StepLog::read(file).map_err(unreadable)?;
    let config = wish.model.as_deref().map(read_model).transpose()?;
    let name = path.display().to_string();
    let request = LogRequest {
        name: &name,
        tensor_parallel: wish.tensor_parallel,
        config: config.as_ref().map(|(config, _)| config),
        request: WorkloadRequest {
            engine: wish.engine(),
            chunk: wish.chunk,
            gpu_memory_mib,
            assume_decoder: wish.assume_decoder,
            ..WorkloadRequest::default()
        },
    };
    let mut workload = from_log(&log, &request)?;
    if wish.engine.is_none() {
        let title = wish.engine().title();
        workload.assumptions.push(format!(
            "the log does not say which engine wrote it: {title} is assumed, with the variables it sets itself (--engine \
             says otherwise)"
        ));
    }
    let model = match &config {
        Some((_, name)) => name.clone(),
        None => path.file_name().map_or(name.clone(), |file| file.to_string_lossy().into_owned()),
    };
    Ok(Workload { model, ..workload })
}

/// The model, what people call it, and what is asked of it; sizes that were named directly play no
/// part in it.
fn model_and_request(
    wish: &WorkloadWish,
    ranks: u32,
    gpu_memory_mib: Option<u64>,
) -> Result<(ModelConfig, String, WorkloadRequest), Failure> {
    let (config, name) = read_model(wish.model.as_deref().unwrap_or(DEFAULT_MODEL))?;
    let draft = match wish.draft_model.as_deref() {
        Some(OWN_LAYERS) => Some(next_token_draft(&ModelConfig { name: name.clone(), ..config.clone() })?),
        Some(file) => {
            let (draft, name) = read_model(file)?;
            Some(ModelConfig { name, ..draft })
        }
        None => None,
    };
    // A chain of steps says what the target checks.
    let chain = wish.draft_steps.filter(|_| wish.draft_topk.unwrap_or(1) == 1).map(|steps| steps + 1);
    let request = WorkloadRequest {
        engine: wish.engine(),
        // Stages share the GPUs.
        tensor_parallel: wish.tensor_parallel.unwrap_or(ranks / wish.layout.pipeline_stages.max(1)),
        batches: parse_batches(wish.batches.as_deref().unwrap_or(DEFAULT_BATCHES))?,
        verify_tokens: wish.verify_tokens.or(chain).unwrap_or(1),
        chunk: wish.chunk,
        gpu_memory_mib,
        assume_decoder: wish.assume_decoder,
        layout: wish.layout,
        draft,
        draft_steps: wish.draft_steps,
        draft_top: wish.draft_topk.unwrap_or(1),
    };
    Ok((config, name, request))
}

/// The forward pass that finalists are tried in: one rank's shape and the passes that are timed. For a
/// log these follow from its workload: a log may be a pipe, which is read once.
/// `None` where no model was named but sizes, or a log alone.
pub fn trial_shape(
    wish: &WorkloadWish,
    ranks: u32,
    gpu_memory_mib: Option<u64>,
    context: u64,
    workload: &Workload,
) -> Result<Option<(PassShape, Vec<PassCase>)>, Failure> {
    if wish.sizes.is_some() {
        return Ok(None);
    }
    if wish.from_log.is_some() {
        return logged_pass(wish, gpu_memory_mib, context, workload);
    }
    let (config, name, request) = model_and_request(wish, ranks, gpu_memory_mib)?;
    let shape = PassShape { model: name, ..pass_shape(&config, &request)? };
    Ok(Some((shape, pass_cases(&config, &request, context)?)))
}

/// The pass of a logged step: the model's own shape at the tokens that the log's messages hold.
fn logged_pass(
    wish: &WorkloadWish,
    gpu_memory_mib: Option<u64>,
    context: u64,
    workload: &Workload,
) -> Result<Option<(PassShape, Vec<PassCase>)>, Failure> {
    let Some(model) = &wish.model else { return Ok(None) };
    let config = read_model(model)?.0;
    let Some(tokens) = step_tokens(workload, &config) else { return Ok(None) };
    let request = WorkloadRequest {
        engine: wish.engine(),
        tensor_parallel: workload.tensor_parallel,
        chunk: wish.chunk,
        gpu_memory_mib,
        assume_decoder: wish.assume_decoder,
        ..WorkloadRequest::default()
    };
    let shape = PassShape { model: workload.model.clone(), ..pass_shape(&config, &request)? };
    let mut cases = pass_cases(&config, &request, context)?;
    if let Some(first) = cases.first_mut() {
        // Whether the server replays a graph of this size does not stand in a log.
        *first = PassCase { tokens, captured: true, ..first.clone() };
    }
    Ok(Some((shape, cases)))
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

/// Where some tools keep how weights are stored, beside the config.
const QUANTISATION_FILE: &str = "hf_quant_config.json";

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
    let beside = read_bounded(&file.with_file_name(QUANTISATION_FILE), MAX_CONFIG_BYTES as u64).ok();
    Ok((parse_config_beside(&text, &file.display().to_string(), beside.as_deref())?, name))
}
