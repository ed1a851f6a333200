//! What the inference engines do on their own, as far as it decides what NCCL is asked and how.
//!
//! Every fact here was read in a stored snapshot of the named project's source, between mid-2025
//! and mid-2026, and was not observed in a running server. Engines change these defaults between
//! releases, so whoever uses a fact says so in the assumptions of the answer.

mod mixing;

use serde::{Deserialize, Serialize};

pub use mixing::{MixingEvidence, mixing_evidence};

/// The program that will serve the model.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Engine {
    /// SGLang.
    Sglang,
    /// vLLM.
    Vllm,
    /// A PyTorch program of the user's own: `torch.distributed`, no engine around it.
    Torch,
    /// No engine: the collectives as they are named.
    None,
}

/// A release of an engine, as far as its habits differ by it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct EngineVersion {
    /// Major, minor and patch number.
    pub numbers: [u32; 3],
    /// Whether something follows them (`.post1`, `rc2`): for what a release does by default that makes no
    /// difference, and where one release was read it is another.
    pub has_suffix: bool,
}

impl EngineVersion {
    /// Reads `0.10.1`, `v0.10`, `0.5.3.post1`.
    pub fn parse(text: &str) -> Option<Self> {
        let text = text.trim();
        let text = text.strip_prefix('v').unwrap_or(text);
        if text.len() > 40 || !text.contains('.') {
            return None;
        }
        let mut numbers = [0; 3];
        for (index, (number, part)) in numbers.iter_mut().zip(text.split('.')).enumerate() {
            let digits = part.len() - part.trim_start_matches(|letter: char| letter.is_ascii_digit()).len();
            // The third part may end in letters (0.10.2rc1); the first two may not.
            if digits == 0 || digits > 6 || (index < 2 && digits != part.len()) {
                return None;
            }
            *number = part[..digits].parse().ok()?;
        }
        let plain = numbers.map(|number| number.to_string()).join(".");
        let short = plain.strip_suffix(".0").unwrap_or(&plain);
        Some(Self { numbers, has_suffix: text != plain && text != short })
    }
}

impl std::fmt::Display for EngineVersion {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let [major, minor, patch] = self.numbers;
        write!(formatter, "{major}.{minor}.{patch}{}", if self.has_suffix { ".x" } else { "" })
    }
}

/// A variable that an engine sets in the processes that call NCCL.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct EngineVariable {
    /// Its name.
    pub name: &'static str,
    /// The value the engine gives it.
    pub value: &'static str,
    /// Whether a value that the user has already set survives. Where it does not, the variable
    /// cannot be tuned.
    pub overridable: bool,
}

/// The size one pass really runs at.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Padded {
    /// Tokens in the pass, padding included.
    pub tokens: u64,
    /// Whether the engine replays a CUDA graph it captured for this size. Otherwise the pass runs
    /// eagerly, at its exact size.
    pub captured: bool,
}

/// What an engine counts when it rounds a pass up to a captured size.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PaddingUnit {
    /// Sequences; every padding sequence carries its full number of tokens.
    Sequences,
    /// Tokens, whichever sequence they belong to.
    Tokens,
}

/// The CUDA stream on which an engine issues its collectives.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CollectiveStream {
    /// The stream that computes: a collective starts when the kernel before it is done.
    Compute,
    /// A stream of its own, tied to the compute stream by events before and after.
    Side,
}

/// Sizes from `first` to `last` in equal steps, both ends included.
#[derive(Debug, Clone, Copy)]
struct Steps {
    first: u32,
    last: u32,
    step: u32,
}

const fn steps(first: u32, last: u32, step: u32) -> Steps {
    Steps { first, last, step }
}

/// Numbers of sequences SGLang captures without speculative decoding, before the cut at its
/// maximum. Source: sgl-project/sglang, python/sglang/srt/server_args.py
/// (`_generate_cuda_graph_batch_sizes`), read in a snapshot, not run.
const SGLANG_BUCKETS: &[Steps] =
    &[steps(1, 2, 1), steps(4, 12, 4), steps(16, 256, 8), steps(272, 496, 16), steps(512, 512, 32)];

/// The same with speculative decoding: finer at small batches, because each sequence brings
/// several tokens. Source: sgl-project/sglang, python/sglang/srt/server_args.py
/// (`_generate_cuda_graph_batch_sizes`), read in a snapshot, not run.
const SGLANG_SPECULATIVE_BUCKETS: &[Steps] =
    &[steps(1, 8, 1), steps(10, 32, 2), steps(40, 64, 4), steps(72, 256, 8), steps(272, 512, 16)];

/// Numbers of tokens vLLM captures. The end at 512 is the default for every maximum number of
/// sequences from 256 up, which all its defaults are. Source: vllm-project/vllm,
/// vllm/config/vllm.py (`_set_cudagraph_sizes`), read in a snapshot, not run; later versions may go
/// further on data-centre Blackwell.
const VLLM_BUCKETS: &[Steps] = &[steps(1, 2, 1), steps(4, 4, 4), steps(8, 248, 8), steps(256, 512, 16)];

/// What SGLang chooses for a class of GPU memory.
#[derive(Debug, Clone, Copy)]
struct SglangDefaults {
    /// Largest captured number of sequences below [`SGLANG_WIDE_TENSOR_PARALLEL`].
    largest_narrow: u32,
    /// The same from there up.
    largest_wide: u32,
    /// Tokens in one prefill chunk.
    chunk: u32,
}

/// From this tensor-parallel size up SGLang captures larger batches. Source: sgl-project/sglang,
/// python/sglang/srt/server_args.py, read in a snapshot, not run.
const SGLANG_WIDE_TENSOR_PARALLEL: u32 = 4;

/// Upper end of each memory class in MiB (exclusive) and what SGLang chooses inside. Source:
/// sgl-project/sglang, python/sglang/srt/server_args.py, read in a snapshot, not run. Releases
/// that split the lowest class further were not read.
const SGLANG_MEMORY_CLASSES: &[(u64, SglangDefaults)] = &[
    (35 * 1024, SglangDefaults { largest_narrow: 24, largest_wide: 80, chunk: 2048 }),
    (60 * 1024, SglangDefaults { largest_narrow: 32, largest_wide: 160, chunk: 4096 }),
    (160 * 1024, SglangDefaults { largest_narrow: 256, largest_wide: 512, chunk: 8192 }),
];

/// What SGLang chooses above the last class. Source: sgl-project/sglang,
/// python/sglang/srt/server_args.py, read in a snapshot, not run.
const SGLANG_LARGEST_CLASS: SglangDefaults = SglangDefaults { largest_narrow: 512, largest_wide: 512, chunk: 16_384 };

/// What SGLang chooses when it cannot read the GPU's memory. Source: sgl-project/sglang,
/// python/sglang/srt/server_args.py, read in a snapshot, not run.
const SGLANG_UNKNOWN_CLASS: SglangDefaults = SglangDefaults { largest_narrow: 160, largest_wide: 160, chunk: 4096 };

/// From this much GPU memory up vLLM's API server takes the larger chunk. Source:
/// vllm-project/vllm, vllm/engine/arg_utils.py, read in a snapshot, not run. vLLM excepts the A100
/// by name, which memory alone cannot tell.
const VLLM_LARGE_GPU_MIB: u64 = 70 * 1024;

/// `max_num_batched_tokens` of vLLM's API server on a large GPU. Source: vllm-project/vllm,
/// vllm/engine/arg_utils.py, read in a snapshot, not run.
const VLLM_LARGE_GPU_CHUNK: u32 = 8192;

/// The same on every other GPU. Source: vllm-project/vllm, vllm/engine/arg_utils.py, read in a
/// snapshot, not run.
const VLLM_CHUNK: u32 = 2048;

/// Chunk for programs that have no such default: large enough that the bandwidth-bound end of
/// NCCL's choices is guarded. The number is this tool's own.
const OWN_CHUNK: u32 = 2048;

/// What SGLang sets before it starts its workers. Source: sgl-project/sglang,
/// python/sglang/srt/entrypoints/engine.py (`_set_envs_and_config`), read in a snapshot, not run.
///
/// The two NCCL variables are left alone where the user has set them, unless the server is started
/// with `--enable-symm-mem` or `--enable-nccl-nvls`; the CUDA one is overwritten in every case.
const SGLANG_VARIABLES: &[EngineVariable] = &[
    EngineVariable { name: "NCCL_CUMEM_ENABLE", value: "0", overridable: true },
    EngineVariable { name: "NCCL_NVLS_ENABLE", value: "0", overridable: true },
    EngineVariable { name: "CUDA_DEVICE_MAX_CONNECTIONS", value: "8", overridable: false },
];

/// What vLLM set up to 0.9.0, whatever was there; from a start on, unless the machine has IMEX
/// channels (multi-node NVLink), which is not modelled. Source: vllm-project/vllm, pull requests 5091
/// and 19105, and a start of 0.9.1 that is quoted in issue 20862.
const VLLM_FIRM_VARIABLES: &[EngineVariable] =
    &[EngineVariable { name: "NCCL_CUMEM_ENABLE", value: "0", overridable: false }];

/// The same from 0.9.1 to 0.10.1: a value that is set stays. Removed by vllm-project/vllm, pull request
/// 24141, in September 2025, after 0.10.1.
const VLLM_SOFT_VARIABLES: &[EngineVariable] =
    &[EngineVariable { name: "NCCL_CUMEM_ENABLE", value: "0", overridable: true }];

/// The first release of vLLM that keeps what the user set, and the first that sets nothing.
const VLLM_KEEPS: EngineVersion = EngineVersion { numbers: [0, 9, 1], has_suffix: false };
const VLLM_SETS_NOTHING: EngineVersion = EngineVersion { numbers: [0, 10, 2], has_suffix: false };

impl Engine {
    /// NCCL communicators over all ranks of a tensor-parallel group that a server has open while it
    /// serves. SGLang's captured graphs use one (pynccl), its eager passes another (torch.distributed);
    /// vLLM uses pynccl for both. Source: sgl-project/sglang, python/sglang/srt/distributed/
    /// parallel_state.py and vllm-project/vllm, vllm/distributed/device_communicators/, read in
    /// snapshots, not run.
    pub const fn communicators(self) -> u32 {
        match self {
            Self::Sglang => 2,
            Self::Vllm | Self::Torch | Self::None => 1,
        }
    }

    /// All engines, in the order in which help texts name them.
    pub const ALL: [Self; 4] = [Self::Sglang, Self::Vllm, Self::Torch, Self::None];

    /// The name on the command line, in files and in tables.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Sglang => "sglang",
            Self::Vllm => "vllm",
            Self::Torch => "torch",
            Self::None => "none",
        }
    }

    /// The name as its own project writes it, for sentences.
    pub const fn title(self) -> &'static str {
        match self {
            Self::Sglang => "SGLang",
            Self::Vllm => "vLLM",
            Self::Torch => "PyTorch",
            Self::None => "no engine",
        }
    }

    /// The engine with this name, in any case. Names: [`Engine::ALL`].
    pub fn parse(text: &str) -> Option<Self> {
        let wanted = text.trim();
        Self::ALL.into_iter().find(|engine| engine.name().eq_ignore_ascii_case(wanted))
    }

    /// The NCCL and CUDA variables it sets itself in its workers. A measurement without them would
    /// be of a different NCCL than the server runs. `version` is its release, where that is known; a
    /// recent one is taken otherwise.
    ///
    /// vLLM sets none in the version read (vllm-project/vllm, vllm/env_override.py, read in a
    /// snapshot, not run), and older releases did. PyTorch sets none of NCCL's; SGLang's were read in
    /// one version only.
    pub fn variables(self, version: Option<EngineVersion>) -> &'static [EngineVariable] {
        match (self, version) {
            (Self::Sglang, _) => SGLANG_VARIABLES,
            (Self::Vllm, Some(version)) if version < VLLM_KEEPS => VLLM_FIRM_VARIABLES,
            (Self::Vllm, Some(version)) if version < VLLM_SETS_NOTHING => VLLM_SOFT_VARIABLES,
            (Self::Vllm | Self::Torch | Self::None, _) => &[],
        }
    }

    /// What could make its variables differ from [`Engine::variables`], in a sentence; none where
    /// nothing is known to.
    pub fn variables_caveat(self, version: Option<EngineVersion>) -> Option<String> {
        match (self, version) {
            (Self::Sglang, version) => Some(format!(
                "SGLang's own variables are those of {}: started with --enable-symm-mem or --enable-nccl-nvls it sets \
                 NCCL_CUMEM_ENABLE or NCCL_NVLS_ENABLE to 1 itself, whatever was set",
                match version {
                    Some(version) => format!("the one version that was read, taken to hold for {version}"),
                    None => "the one version that was read".to_owned(),
                }
            )),
            (Self::Vllm, None) => Some(
                "vLLM is taken to set no NCCL variable, as recent releases do; up to 0.10.1 it set NCCL_CUMEM_ENABLE=0 \
                 (--engine-version says which release yours is)"
                    .to_owned(),
            ),
            (Self::Vllm | Self::Torch | Self::None, _) => None,
        }
    }

    /// What it rounds up to reach a captured size; none if it pads nothing.
    pub const fn padding_unit(self) -> Option<PaddingUnit> {
        match self {
            Self::Sglang => Some(PaddingUnit::Sequences),
            Self::Vllm => Some(PaddingUnit::Tokens),
            Self::Torch | Self::None => None,
        }
    }

    /// The largest size it captures by default, in its [`PaddingUnit`]. `gpu_memory_mib` is one
    /// GPU's memory, `tensor_parallel` the number of GPUs that share a layer.
    pub fn capture_limit(self, gpu_memory_mib: Option<u64>, tensor_parallel: u32) -> Option<u32> {
        match self {
            Self::Sglang => {
                let defaults = sglang_defaults(gpu_memory_mib);
                let wide = tensor_parallel >= SGLANG_WIDE_TENSOR_PARALLEL;
                Some(if wide { defaults.largest_wide } else { defaults.largest_narrow })
            }
            Self::Vllm => VLLM_BUCKETS.last().map(|steps| steps.last),
            Self::Torch | Self::None => None,
        }
    }

    /// The size at which a pass of `batch` sequences with `tokens_per_sequence` tokens each runs
    /// under the engine's default capture list. `gpu_memory_mib` is one GPU's memory.
    ///
    /// Not modelled: a request pool smaller than the capture list, and sizes given to the server by
    /// hand. How SGLang turns sequences into tokens: sgl-project/sglang,
    /// python/sglang/srt/model_executor/cuda_graph_runner.py, read in a snapshot, not run.
    pub fn padded_tokens(
        self,
        batch: u32,
        tokens_per_sequence: u32,
        gpu_memory_mib: Option<u64>,
        tensor_parallel: u32,
    ) -> Padded {
        let per_sequence = u64::from(tokens_per_sequence.max(1));
        let sequences = u64::from(batch.max(1));
        let exact = sequences * per_sequence;
        let (list, wanted, tokens_per_unit) = match self {
            Self::Sglang if per_sequence > 1 => (SGLANG_SPECULATIVE_BUCKETS, sequences, per_sequence),
            Self::Sglang => (SGLANG_BUCKETS, sequences, per_sequence),
            Self::Vllm => (VLLM_BUCKETS, exact, 1),
            Self::Torch | Self::None => return Padded { tokens: exact, captured: false },
        };
        let limit = self.capture_limit(gpu_memory_mib, tensor_parallel).unwrap_or(0);
        match next_captured(list, limit, wanted) {
            Some(units) => Padded { tokens: u64::from(units) * tokens_per_unit, captured: true },
            None => Padded { tokens: exact, captured: false },
        }
    }

    /// Tokens in one chunk of a long prompt, unless the user tells the server otherwise.
    /// `gpu_memory_mib` is one GPU's memory. For vLLM this is the API server's value: it mixes
    /// decode tokens into the same pass, so a pass may hold any number of tokens up to it.
    pub fn prefill_chunk(self, gpu_memory_mib: Option<u64>) -> u32 {
        match self {
            Self::Sglang => sglang_defaults(gpu_memory_mib).chunk,
            Self::Vllm if gpu_memory_mib.is_some_and(|mib| mib >= VLLM_LARGE_GPU_MIB) => VLLM_LARGE_GPU_CHUNK,
            Self::Vllm => VLLM_CHUNK,
            Self::Torch | Self::None => OWN_CHUNK,
        }
    }

    /// On which stream its collectives run, inside a captured graph or outside of one.
    ///
    /// Both engines hand NCCL the current stream through their own binding; SGLang does so only
    /// inside graphs and otherwise calls `torch.distributed`. Sources: sgl-project/sglang,
    /// python/sglang/srt/distributed/parallel_state.py; vllm-project/vllm,
    /// vllm/distributed/device_communicators/cuda_communicator.py; pytorch/pytorch,
    /// torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp; all read in a snapshot, not run. Recent
    /// PyTorch issues blocking collectives on the current stream too; `Side` is what its older
    /// releases, and asynchronous collectives in all of them, do.
    pub const fn collective_stream(self, captured: bool) -> CollectiveStream {
        match self {
            Self::Vllm | Self::None => CollectiveStream::Compute,
            Self::Sglang if captured => CollectiveStream::Compute,
            Self::Sglang | Self::Torch => CollectiveStream::Side,
        }
    }
}

impl std::fmt::Display for Engine {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.pad(self.name())
    }
}

fn sglang_defaults(gpu_memory_mib: Option<u64>) -> SglangDefaults {
    let Some(mib) = gpu_memory_mib else { return SGLANG_UNKNOWN_CLASS };
    SGLANG_MEMORY_CLASSES.iter().find(|(below, _)| mib < *below).map_or(SGLANG_LARGEST_CLASS, |(_, defaults)| *defaults)
}

/// The smallest captured size that holds `wanted`, if one up to `limit` does.
fn next_captured(list: &[Steps], limit: u32, wanted: u64) -> Option<u32> {
    let wanted = u32::try_from(wanted).ok()?;
    let run = list.iter().find(|steps| wanted <= steps.last)?;
    let size = run.first + wanted.saturating_sub(run.first).div_ceil(run.step) * run.step;
    (size <= limit).then_some(size)
}

#[cfg(test)]
mod tests {
    use super::*;

    const H200_MIB: Option<u64> = Some(143_771);

    fn listed(list: &[Steps]) -> Vec<u32> {
        list.iter().flat_map(|run| (run.first..=run.last).step_by(run.step as usize)).collect()
    }

    #[test]
    fn names_read_back() {
        for engine in Engine::ALL {
            assert_eq!(Engine::parse(engine.name()), Some(engine));
        }
        assert_eq!(Engine::parse(" SGLang "), Some(Engine::Sglang));
        assert_eq!(Engine::parse("triton"), None);
    }

    #[test]
    fn lists_rise_and_end_where_their_runs_say() {
        for list in [SGLANG_BUCKETS, SGLANG_SPECULATIVE_BUCKETS, VLLM_BUCKETS] {
            let sizes = listed(list);
            assert!(sizes.windows(2).all(|pair| pair[0] < pair[1]), "{sizes:?}");
            assert_eq!(sizes.first(), Some(&1));
            assert_eq!(sizes.last(), Some(&512));
            for run in list {
                assert!((run.last - run.first).is_multiple_of(run.step), "{run:?} does not end on a step");
            }
        }
        assert_eq!(listed(SGLANG_BUCKETS)[..8], [1, 2, 4, 8, 12, 16, 24, 32]);
        assert_eq!(listed(SGLANG_SPECULATIVE_BUCKETS)[6..14], [7, 8, 10, 12, 14, 16, 18, 20]);
        assert_eq!(listed(VLLM_BUCKETS)[..6], [1, 2, 4, 8, 16, 24]);
    }

    #[test]
    fn every_size_pads_to_the_next_listed_one() {
        for list in [SGLANG_BUCKETS, SGLANG_SPECULATIVE_BUCKETS, VLLM_BUCKETS] {
            let sizes = listed(list);
            for wanted in 1..=600_u32 {
                let expected = sizes.iter().copied().find(|size| *size >= wanted);
                assert_eq!(next_captured(list, 512, u64::from(wanted)), expected, "{wanted}");
            }
        }
    }

    #[test]
    fn sglang_pads_sequences() {
        let tokens = |batch, per| Engine::Sglang.padded_tokens(batch, per, H200_MIB, 8);
        assert_eq!(tokens(1, 4), Padded { tokens: 4, captured: true });
        assert_eq!(tokens(9, 4), Padded { tokens: 40, captured: true });
        assert_eq!(tokens(33, 4), Padded { tokens: 160, captured: true });
        assert_eq!(tokens(9, 1), Padded { tokens: 12, captured: true });
        assert_eq!(tokens(3, 1), Padded { tokens: 4, captured: true });
        assert_eq!(tokens(512, 1), Padded { tokens: 512, captured: true });
        assert_eq!(tokens(513, 1), Padded { tokens: 513, captured: false });
    }

    #[test]
    fn sglang_cuts_its_list_by_memory_and_width() {
        let limit = |mib, tp| Engine::Sglang.capture_limit(mib, tp);
        assert_eq!(limit(Some(24 * 1024), 2), Some(24));
        assert_eq!(limit(Some(35 * 1024 - 1), 4), Some(80));
        assert_eq!(limit(Some(35 * 1024), 3), Some(32));
        assert_eq!(limit(Some(60 * 1024), 3), Some(256));
        assert_eq!(limit(Some(97_887), 8), Some(512));
        assert_eq!(limit(Some(160 * 1024), 1), Some(512));
        assert_eq!(limit(None, 8), Some(160));
        let small = Some(24 * 1024);
        assert_eq!(Engine::Sglang.padded_tokens(24, 1, small, 2), Padded { tokens: 24, captured: true });
        assert_eq!(Engine::Sglang.padded_tokens(25, 1, small, 2), Padded { tokens: 25, captured: false });
    }

    #[test]
    fn vllm_pads_tokens() {
        let tokens = |batch, per| Engine::Vllm.padded_tokens(batch, per, None, 8);
        assert_eq!(tokens(1, 4), Padded { tokens: 4, captured: true });
        assert_eq!(tokens(1, 5), Padded { tokens: 8, captured: true });
        assert_eq!(tokens(62, 4), Padded { tokens: 248, captured: true });
        assert_eq!(tokens(63, 4), Padded { tokens: 256, captured: true });
        assert_eq!(tokens(128, 4), Padded { tokens: 512, captured: true });
        assert_eq!(tokens(129, 4), Padded { tokens: 516, captured: false });
    }

    #[test]
    fn others_pad_nothing_and_nothing_overflows() {
        for engine in [Engine::Torch, Engine::None] {
            assert_eq!(engine.padded_tokens(9, 4, None, 8), Padded { tokens: 36, captured: false });
            assert_eq!(engine.capture_limit(None, 8), None);
        }
        for engine in Engine::ALL {
            let padded = engine.padded_tokens(u32::MAX, u32::MAX, Some(u64::MAX), u32::MAX);
            assert!(!padded.captured);
            assert_eq!(engine.padded_tokens(0, 0, None, 0).tokens, 1);
        }
    }

    #[test]
    fn chunks_follow_memory() {
        assert_eq!(Engine::Sglang.prefill_chunk(Some(32_607)), 2048);
        assert_eq!(Engine::Sglang.prefill_chunk(Some(46_068)), 4096);
        assert_eq!(Engine::Sglang.prefill_chunk(Some(97_887)), 8192);
        assert_eq!(Engine::Sglang.prefill_chunk(Some(183_359)), 16_384);
        assert_eq!(Engine::Sglang.prefill_chunk(None), 4096);
        assert_eq!(Engine::Vllm.prefill_chunk(Some(97_887)), 8192);
        assert_eq!(Engine::Vllm.prefill_chunk(Some(46_068)), 2048);
        assert_eq!(Engine::Vllm.prefill_chunk(None), 2048);
    }

    #[test]
    fn sglang_leaves_nccl_variables_to_the_user_and_takes_the_cuda_one() {
        let fixed = |engine: Engine, version: Option<&str>| -> Vec<(&str, bool)> {
            let version = version.map(|version| EngineVersion::parse(version).expect("a version"));
            engine.variables(version).iter().map(|variable| (variable.name, variable.overridable)).collect()
        };
        assert_eq!(
            fixed(Engine::Sglang, None),
            [("NCCL_CUMEM_ENABLE", true), ("NCCL_NVLS_ENABLE", true), ("CUDA_DEVICE_MAX_CONNECTIONS", false)]
        );
        for silent in [Engine::Vllm, Engine::Torch, Engine::None] {
            assert!(fixed(silent, None).is_empty());
        }
        // vLLM by release.
        assert_eq!(fixed(Engine::Vllm, Some("0.8.5.post1")), [("NCCL_CUMEM_ENABLE", false)]);
        assert_eq!(fixed(Engine::Vllm, Some("0.10.1")), [("NCCL_CUMEM_ENABLE", true)]);
        assert!(fixed(Engine::Vllm, Some("0.11")).is_empty());
        assert!(fixed(Engine::Torch, Some("0.1.0")).is_empty());
    }

    #[test]
    fn releases_are_read_as_people_write_them() {
        let of = |text: &str| EngineVersion::parse(text).map(|version| version.numbers);
        assert_eq!(of("0.10.1"), Some([0, 10, 1]));
        assert_eq!(of(" v0.5.3.post1 "), Some([0, 5, 3]));
        assert_eq!(of("0.11.0rc2"), Some([0, 11, 0]));
        assert_eq!(of("0.9"), Some([0, 9, 0]));
        // Where a release was read, one with something behind its numbers is another; a record keeps that.
        let read_again = |text: &str| EngineVersion::parse(&EngineVersion::parse(text).unwrap().to_string()).unwrap();
        for (text, has_suffix) in [("0.5.3", false), ("v0.10", false), ("0.5.3.post1", true), ("0.11.0rc2", true)] {
            assert_eq!(EngineVersion::parse(text).unwrap().has_suffix, has_suffix, "{text}");
            assert_eq!(read_again(text), EngineVersion::parse(text).unwrap(), "{text}");
        }
        assert!(EngineVersion::parse("0.9.2") < EngineVersion::parse("0.10.0"));
        for wrong in ["", "latest", "1", "0..1", "0.9x.1", "1234567.0.0", "-1.0"] {
            assert_eq!(of(wrong), None, "{wrong}");
        }
    }

    #[test]
    fn streams_depend_on_capture_for_sglang_alone() {
        assert_eq!(Engine::Sglang.collective_stream(true), CollectiveStream::Compute);
        assert_eq!(Engine::Sglang.collective_stream(false), CollectiveStream::Side);
        assert_eq!(Engine::Vllm.collective_stream(false), CollectiveStream::Compute);
        assert_eq!(Engine::Torch.collective_stream(true), CollectiveStream::Side);
    }
}
