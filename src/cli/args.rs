//! The commands and their flags.

use std::path::PathBuf;

use clap::builder::{PossibleValuesParser, TypedValueParser as _};
use clap::{Args, Parser, Subcommand, ValueEnum, ValueHint};

use crate::collective::{Collective, DataType, Placement};
use crate::emit::EmitAs;
use crate::engine::{Engine, EngineVersion};
use crate::flow::{PeerAccess, RepairGraph, TableWish};
use crate::machine::NcclVersion;
use crate::nccl_model;
use crate::record::{BufferKind, CheapestLevel, Profile};
use crate::report::{Format, ReportFormat};
use crate::search::{EXHAUSTIVE, RACING};
use crate::units::{format_size, nearest_name, parse_fraction, parse_size};

/// From a model's config and this machine to the NCCL settings its inference server should start
/// with, proven by measurement.
#[derive(Debug, Parser)]
#[command(name = "nccltune", version, about, propagate_version = true, max_term_width = 100)]
pub(super) struct Cli {
    #[command(subcommand)]
    pub(super) command: Command,

    #[command(flatten)]
    pub(super) output: OutputArgs,
}

/// How much is said, and how.
#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Output")]
pub(super) struct OutputArgs {
    /// Say nothing on standard error but errors.
    #[arg(long, short, global = true, conflicts_with = "verbose")]
    pub(super) quiet: bool,

    /// Print every event of the run on standard error.
    #[arg(long, short, global = true)]
    pub(super) verbose: bool,

    /// When to use colour.
    #[arg(long, global = true, value_enum, default_value_t = ColorChoice::Auto, value_name = "WHEN")]
    pub(super) color: ColorChoice,

    /// Show no progress bar.
    #[arg(long, global = true)]
    pub(super) no_progress: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(super) enum ColorChoice {
    Auto,
    Always,
    Never,
}

#[derive(Debug, Subcommand)]
pub(super) enum Command {
    /// Find, by measurement, the NCCL settings a server should start with.
    Tune(Box<TuneArgs>),
    /// Try a run's finalists, or the default alone, in a forward pass shaped like the model.
    Trial(Box<TrialArgs>),
    /// Check whether this machine is fit for measuring and serving.
    Doctor(DoctorArgs),
    /// Show which collectives a model's pass issues.
    Workload(WorkloadCommandArgs),
    /// Show what NCCL would choose for a message on a machine, why, and what each variable changes.
    Explain(ExplainArgs),
    /// Print a run's answer in a deployable form.
    Emit(EmitArgs),
    /// Tell a run: as text, Markdown, CSV, JSON, or one page with pictures.
    Report(ReportArgs),
    /// Make a run of what nccl-tests printed.
    Import(ImportArgs),
    /// Print what a shell needs to complete commands and flags.
    Completions(CompletionsArgs),
    /// Print a manual page.
    Man(ManArgs),
    /// Look through settings written by hand: env files, scripts, units, compose files, manifests.
    Lint(LintArgs),
    /// After an update: is this env file still right here?
    Check(CheckArgs),
    /// Start a command with an env file's variables, if the file belongs on this machine.
    Exec(ExecArgs),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(super) enum BackendArg {
    /// NCCL where an NVIDIA driver is installed, the simulation where none is.
    Auto,
    /// NCCL on this machine's GPUs.
    Nccl,
    /// A simulated machine; every number is labelled SIMULATED.
    Simulated,
    /// A recorded run; every number is labelled REPLAYED.
    Replay,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(super) enum ProfileArg {
    /// The best on the weighted mix of all batches.
    Balanced,
    /// The best at the smallest batch, where another is shown to be faster there.
    Latency,
    /// The best at the largest batch, where another is shown to be faster there.
    Throughput,
}

impl ProfileArg {
    pub(super) const fn profile(self) -> Profile {
        match self {
            Self::Balanced => Profile::Balanced,
            Self::Latency => Profile::Latency,
            Self::Throughput => Profile::Throughput,
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(super) enum RepairGraphArg {
    /// Where NCCL misjudges the box, and no other group of GPUs could meet the file.
    Auto,
    /// Nowhere.
    Never,
    /// Wherever the links are known, other groups of GPUs or not.
    Always,
}

impl RepairGraphArg {
    pub(super) const fn wish(self) -> RepairGraph {
        match self {
            Self::Auto => RepairGraph::Auto,
            Self::Never => RepairGraph::Never,
            Self::Always => RepairGraph::Always,
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(super) enum TablesArg {
    /// Where the tuner plugin is there, NCCL loads it, and a table is expected to do better than variables alone.
    Auto,
    /// Not at all.
    Never,
}

impl TablesArg {
    pub(super) const fn wish(self) -> TableWish {
        match self {
            Self::Auto => TableWish::Auto,
            Self::Never => TableWish::Never,
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(super) enum PeerAccessArg {
    /// Where the space asks for it and nothing speaks against it (`nccltune doctor` tells what would).
    Auto,
    /// Where the space asks for it, whatever speaks against it. It may hang a GPU until a reset.
    Test,
    /// Not at all: NCCL_P2P_LEVEL is left out.
    Never,
}

impl PeerAccessArg {
    pub(super) const fn wish(self) -> PeerAccess {
        match self {
            Self::Auto => PeerAccess::Auto,
            Self::Test => PeerAccess::Test,
            Self::Never => PeerAccess::Never,
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(super) enum StrategyArg {
    /// Few launches for arms that are lost, more for those that may win.
    Racing,
    /// Every arm in every block.
    Exhaustive,
}

impl StrategyArg {
    pub(super) const fn name(self) -> &'static str {
        match self {
            Self::Racing => RACING,
            Self::Exhaustive => EXHAUSTIVE,
        }
    }
}

#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Workload")]
pub(super) struct WorkloadArgs {
    /// A config.json, its folder, or a preset.
    #[arg(long, value_name = "FILE|PRESET", env = "NCCLTUNE_MODEL", help = model_help())]
    pub(super) model: Option<String>,

    /// Engine whose padding, prefill chunk and own variables apply [default: sglang].
    #[arg(long, value_name = "sglang|vllm|torch|none", env = "NCCLTUNE_ENGINE", value_parser = parse_engine)]
    pub(super) engine: Option<Engine>,

    /// Tensor-parallel size [default: the number of GPUs].
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=64))]
    pub(super) tp: Option<u32>,

    /// Concurrent sequences, with weights if they differ: 1,8,32 or 1:0.7,8:0.3 [default: 1,4,16].
    #[arg(long, value_name = "LIST", env = "NCCLTUNE_BATCH")]
    pub(super) batch: Option<String>,

    /// Tokens the target checks per sequence and pass, the root included: SGLang's
    /// speculative_num_draft_tokens, vLLM's num_speculative_tokens + 1 [default: 1, no speculation].
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1024))]
    pub(super) verify_tokens: Option<u32>,

    /// Prefill chunk in tokens [default: the engine's].
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    pub(super) chunk: Option<u32>,

    /// Take an unknown architecture for a plain decoder: 1 + 2 x layers all-reduces per pass.
    #[arg(long)]
    pub(super) assume_decoder: bool,

    /// Release of the engine, where what it sets itself differs: 0.10.1 [default: a recent one].
    #[arg(long, value_name = "VERSION", value_parser = parse_engine_version)]
    pub(super) engine_version: Option<EngineVersion>,

    /// Config of the draft model, whose passes then count too; mtp for the target's own next-token layers.
    #[arg(long, value_name = "FILE|mtp")]
    pub(super) draft_model: Option<String>,

    /// Tokens the draft proposes one after the other: SGLang's speculative_num_steps, vLLM's
    /// num_speculative_tokens [default: one less than --verify-tokens].
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..1024))]
    pub(super) draft_steps: Option<u32>,

    /// Branches the draft follows in each step: SGLang's speculative_eagle_topk [default: 1, a chain].
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1024))]
    pub(super) draft_topk: Option<u32>,

    /// Each GPU attends to sequences of its own: SGLang's enable_dp_attention with dp_size = tp_size.
    #[arg(long)]
    pub(super) dp_attention: bool,

    /// Each GPU holds whole experts, without an all-to-all backend.
    #[arg(long)]
    pub(super) ep: bool,

    /// Pipeline stages, each of --tp GPUs [default: 1].
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=64))]
    pub(super) pp: Option<u32>,

    /// Points from one step of a running server: its log with NCCL_DEBUG=INFO and NCCL_DEBUG_SUBSYS=COLL.
    /// With --model, what disagrees is said and prefill is guarded.
    #[arg(
        long,
        value_name = "FILE",
        conflicts_with_all = [
            "sizes", "batch", "verify_tokens", "draft_model", "draft_steps", "draft_topk", "dp_attention", "ep", "pp"
        ]
    )]
    pub(super) from_log: Option<PathBuf>,

    /// Measure these message sizes instead of a model's: 4K,64K,1M.
    #[arg(
        long,
        value_name = "LIST",
        value_delimiter = ',',
        value_parser = parse_size_argument,
        conflicts_with_all = [
            "model", "batch", "verify_tokens", "chunk", "draft_model", "draft_steps", "draft_topk", "dp_attention", "ep", "pp"
        ]
    )]
    pub(super) sizes: Vec<u64>,

    /// The operation at these sizes [default: all-reduce].
    #[arg(
        long,
        value_name = "all-reduce|all-gather|reduce-scatter|broadcast|reduce|send-recv",
        value_parser = parse_any_collective,
        requires = "sizes"
    )]
    pub(super) collective: Option<Collective>,

    /// The element type at these sizes [default: bf16].
    #[arg(long, value_name = "bf16|fp16|fp32|int8", value_parser = parse_dtype, requires = "sizes")]
    pub(super) dtype: Option<DataType>,

    /// Where results go at these sizes [default: in-place for sums of whole messages, else out-of-place].
    #[arg(long, value_enum, requires = "sizes")]
    pub(super) placement: Option<PlacementArg>,

    /// Issue these sizes call by call instead of from a CUDA graph.
    #[arg(long, requires = "sizes")]
    pub(super) eager: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(super) enum PlacementArg {
    /// Over what was sent.
    InPlace,
    /// Into a buffer of its own.
    OutOfPlace,
}

impl PlacementArg {
    pub(super) const fn placement(self) -> Placement {
        match self {
            Self::InPlace => Placement::InPlace,
            Self::OutOfPlace => Placement::OutOfPlace,
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(super) enum BuffersArg {
    /// The driver's plain memory, PyTorch's usual.
    Plain,
    /// Segments of virtual memory, PyTorch's with expandable_segments:True.
    Vmm,
    /// NCCL's own allocator.
    Nccl,
}

impl BuffersArg {
    pub(super) const fn kind(self) -> BufferKind {
        match self {
            Self::Plain => BufferKind::Plain,
            Self::Vmm => BufferKind::Vmm,
            Self::Nccl => BufferKind::Nccl,
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(super) enum CheapestLevelArg {
    /// One communicator for all arms that the tuner plugin can stand for: NCCL 2.24 or newer, ring and tree with LL and
    /// Simple over so many channels. It was never tried on GPUs as a whole.
    Call,
    /// A communicator for each arm, in the same processes where these can change what the arm sets.
    Communicator,
    /// Fresh processes for each arm.
    Launch,
}

impl CheapestLevelArg {
    pub(super) const fn level(self) -> CheapestLevel {
        match self {
            Self::Call => CheapestLevel::Call,
            Self::Communicator => CheapestLevel::Communicator,
            Self::Launch => CheapestLevel::Launch,
        }
    }
}

#[derive(Debug, Clone, Args)]
pub(super) struct TuneArgs {
    #[command(flatten)]
    pub(super) workload: WorkloadArgs,

    /// What measures.
    #[arg(long, value_enum, default_value_t = BackendArg::Auto, env = "NCCLTUNE_BACKEND", help_heading = "Machine")]
    pub(super) backend: BackendArg,

    /// Simulated machine [default: rtx-pro-6000-x8].
    #[arg(long, value_name = "NAME|FILE", help_heading = "Machine", conflicts_with = "recorded")]
    pub(super) machine: Option<String>,

    /// Recorded run to replay.
    #[arg(long, value_name = "DIR", help_heading = "Machine")]
    pub(super) recorded: Option<PathBuf>,

    /// GPUs to use: positions in PCI order, or UUIDs [default: all visible].
    #[arg(long, value_name = "LIST", value_delimiter = ',', env = "NCCLTUNE_DEVICES", help_heading = "Machine")]
    pub(super) devices: Vec<String>,

    /// The libnccl that the server loads [default: the Python environment's, else the loader's].
    #[arg(long, value_name = "PATH", env = "NCCLTUNE_NCCL_LIB", help_heading = "Machine")]
    pub(super) nccl_lib: Option<PathBuf>,

    /// The tuner plugin that reads tables [default: the one beside this program, in deps/ or ../lib/nccltune].
    #[arg(long, value_name = "PATH", env = "NCCLTUNE_PLUGIN", help_heading = "Machine")]
    pub(super) plugin: Option<PathBuf>,

    /// Fix a variable in every arm, the default included; repeatable.
    #[arg(long = "pin", value_name = "NAME=VALUE", help_heading = "Machine")]
    pub(super) pins: Vec<String>,

    /// Let a variable of the environment through to the workers; repeatable.
    #[arg(long = "keep-env", value_name = "NAME", help_heading = "Machine")]
    pub(super) keep_env: Vec<String>,

    /// Whose memory messages lie in; what the engine's framework allocates from [default: plain].
    #[arg(long, value_enum, env = "NCCLTUNE_BUFFERS", help_heading = "Machine")]
    pub(super) buffers: Option<BuffersArg>,

    /// Measure although doctor refuses; the run says so.
    #[arg(long, help_heading = "Machine")]
    pub(super) force: bool,

    /// Search space [default: host-memory where peer access is pinned off, else pcie-decode].
    #[arg(long, value_name = "NAME|FILE", env = "NCCLTUNE_SPACE", help_heading = "Search")]
    pub(super) space: Option<String>,

    /// How the space is searched [default: exhaustive].
    #[arg(long, value_enum, help_heading = "Search")]
    pub(super) strategy: Option<StrategyArg>,

    /// The cheapest level at which arms of the search may differ within one launch; the final never shares anything
    /// [default: communicator].
    #[arg(long, value_enum, value_name = "LEVEL", help_heading = "Search")]
    pub(super) cheapest_level: Option<CheapestLevelArg>,

    /// Time box of a cell's timed replays, of which there are 8 at least [default: 40ms].
    #[arg(long, value_name = "TIME", value_parser = parse_cell_time, help_heading = "Search")]
    pub(super) cell_time: Option<f64>,

    /// Race, and look first where an earlier run of the same workload saw most (before a driver or NCCL update, say).
    #[arg(long, value_name = "DIR", help_heading = "Search", value_hint = ValueHint::DirPath)]
    pub(super) warm_start: Option<PathBuf>,

    /// Take a risk by name: unverified-platform, unsafe-mixing, hang-prone; repeatable.
    #[arg(
        long = "allow-risk",
        value_name = "NAME",
        value_parser = ["unverified-platform", "unsafe-mixing", "hang-prone"],
        help_heading = "Search"
    )]
    pub(super) allow_risk: Vec<String>,

    /// Try a graph file that sets NCCL right where it misjudges the links (NCCL_GRAPH_FILE).
    #[arg(long, value_enum, default_value_t = RepairGraphArg::Auto, help_heading = "Search")]
    pub(super) repair_graph: RepairGraphArg,

    /// Measure axes of the space, too, that do nothing here by NCCL's rules; without, one arm of each checks that.
    #[arg(long, help_heading = "Search")]
    pub(super) keep_dead_axes: bool,

    /// Whether tuner tables are made, which say by size what NCCL runs.
    #[arg(long, value_enum, default_value_t = TablesArg::Auto, help_heading = "Search")]
    pub(super) tables: TablesArg,

    /// Whether peer access across the host bridge is tested, before NCCL_P2P_LEVEL is tried.
    #[arg(long, value_enum, default_value_t = PeerAccessArg::Auto, value_name = "WHEN", help_heading = "Search")]
    pub(super) peer_access: PeerAccessArg,

    /// For how long captured and uncaptured collectives are made to overlap, for each finalist that no
    /// longer keeps them apart (--allow-risk unsafe-mixing) [default: 1m].
    #[arg(long, value_name = "TIME", value_parser = parse_time, help_heading = "Search")]
    pub(super) overlap_time: Option<f64>,

    /// Try arms again that hung, crashed or corrupted data here in earlier runs, which
    /// $NCCLTUNE_STATE_DIR/quarantine.json remembers.
    #[arg(long, help_heading = "Search")]
    pub(super) retry_quarantined: bool,

    /// Time the run may take: 15m, 1h.
    #[arg(long, value_name = "TIME", value_parser = parse_time, help_heading = "Search")]
    pub(super) time_budget: Option<f64>,

    /// Longest any phase of a step may take (init, connect, replay, ...) before its launch is given up
    /// [default: learned from the launches before, within limits].
    #[arg(long, value_name = "TIME", value_parser = parse_time, help_heading = "Search")]
    pub(super) phase_limit: Option<f64>,

    /// Blocks of the search: how often every arm is measured before finalists are chosen [default: 3].
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=100), help_heading = "Search")]
    pub(super) search_blocks: Option<u32>,

    /// Paired launches of each finalist [default: 6 to 24, from the noise seen in the search].
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(4..=200), help_heading = "Search")]
    pub(super) final_launches: Option<u32>,

    /// Smallest gain worth shipping [default: 2%].
    #[arg(long, value_name = "SHARE", value_parser = parse_share, help_heading = "Verdict")]
    pub(super) min_gain: Option<f64>,

    /// Largest regression allowed at any point [default: 2%].
    #[arg(long, value_name = "SHARE", value_parser = parse_share, help_heading = "Verdict")]
    pub(super) max_regression: Option<f64>,

    /// Adopt only if every point is shown safe.
    #[arg(long, help_heading = "Verdict")]
    pub(super) strict: bool,

    /// Most memory an answer may take beside the default, on a GPU or of the host: 512MiB.
    #[arg(long, value_name = "SIZE", value_parser = parse_size, help_heading = "Verdict")]
    pub(super) max_extra_memory: Option<u64>,

    /// Which answer the files hold, where the forward pass has several [default: balanced].
    #[arg(long, value_enum, help_heading = "Verdict")]
    pub(super) profile: Option<ProfileArg>,

    /// Exit with status 5 when the run ends undecided.
    #[arg(long, help_heading = "Verdict")]
    pub(super) require_decision: bool,

    /// Judge by the micro-benchmark alone, without a trial in a forward pass.
    #[arg(long, help_heading = "Trial")]
    pub(super) no_trial: bool,

    #[command(flatten)]
    pub(super) trial: TrialFlags,

    /// Spread of launches that are redrawn around recorded ones (replay only): 1.8%.
    #[arg(long, value_name = "SHARE", value_parser = parse_share, requires = "recorded", help_heading = "Verdict")]
    pub(super) assume_noise: Option<f64>,

    /// Seed of orders, data and simulated noise [default: 1].
    #[arg(long, value_name = "N", env = "NCCLTUNE_SEED", help_heading = "Run")]
    pub(super) seed: Option<u64>,

    /// Run directory [default: results/<time>-<id>].
    #[arg(long, value_name = "DIR", env = "NCCLTUNE_OUT", help_heading = "Run")]
    pub(super) out: Option<PathBuf>,

    /// Go on with the run in --out.
    #[arg(long, help_heading = "Run", conflicts_with_all = ["recorded", "dry_run"])]
    pub(super) resume: bool,

    /// Say what would be measured, and stop.
    #[arg(long, help_heading = "Run")]
    pub(super) dry_run: bool,

    #[command(flatten)]
    pub(super) format: FormatArg,
}

/// What both `tune` and `trial` know of a forward pass.
#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Trial")]
pub(super) struct TrialFlags {
    /// Tokens of context whose cache each sequence reads in a forward pass [default: 4096].
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(0..=10_000_000))]
    pub(super) context: Option<u64>,

    /// Paired launches of the trial [default: 4 to 12, from the noise].
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(4..=100))]
    pub(super) trial_launches: Option<u32>,

    /// libcublasLt for the products of a forward pass [default: the Python environment's, else the loader's].
    #[arg(long, value_name = "PATH", env = "NCCLTUNE_CUBLASLT_LIB")]
    pub(super) cublaslt_lib: Option<PathBuf>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(super) enum TrialKind {
    /// A captured forward pass shaped like the model.
    Verify,
}

#[derive(Debug, Clone, Args)]
pub(super) struct TrialArgs {
    /// Run whose finalists are tried; without it the default alone is.
    #[arg(
        long,
        value_name = "DIR",
        conflicts_with_all = [
            "model", "engine", "engine_version", "tp", "batch", "verify_tokens", "chunk", "draft_model", "draft_steps",
            "draft_topk", "dp_attention", "ep", "pp", "from_log", "out"
        ]
    )]
    pub(super) run: Option<PathBuf>,

    /// What kind of trial.
    #[arg(long, value_enum, default_value_t = TrialKind::Verify)]
    pub(super) kind: TrialKind,

    #[command(flatten)]
    pub(super) workload: WorkloadArgs,

    #[command(flatten)]
    pub(super) trial: TrialFlags,

    /// What measures.
    #[arg(long, value_enum, default_value_t = BackendArg::Auto, env = "NCCLTUNE_BACKEND", help_heading = "Machine")]
    pub(super) backend: BackendArg,

    /// GPUs to use: positions in PCI order, or UUIDs [default: all visible].
    #[arg(long, value_name = "LIST", value_delimiter = ',', env = "NCCLTUNE_DEVICES", help_heading = "Machine")]
    pub(super) devices: Vec<String>,

    /// The libnccl that the server loads.
    #[arg(long, value_name = "PATH", env = "NCCLTUNE_NCCL_LIB", help_heading = "Machine")]
    pub(super) nccl_lib: Option<PathBuf>,

    /// Fix a variable; repeatable.
    #[arg(long = "pin", value_name = "NAME=VALUE", help_heading = "Machine")]
    pub(super) pins: Vec<String>,

    /// Run directory [default: results/<time>-<id>].
    #[arg(long, value_name = "DIR", env = "NCCLTUNE_OUT", help_heading = "Run")]
    pub(super) out: Option<PathBuf>,

    #[command(flatten)]
    pub(super) format: FormatArg,
}

#[derive(Debug, Clone, Args)]
pub(super) struct FormatArg {
    /// Form of the data on standard output.
    #[arg(
        long = "format",
        value_name = "text|json|csv|markdown",
        default_value = "text",
        value_parser = PossibleValuesParser::new(Format::ALL.map(Format::name)).try_map(|text| text.parse::<Format>()),
        hide_possible_values = true,
        help_heading = "Output"
    )]
    pub(super) format: Format,
}

#[derive(Debug, Clone, Args)]
pub(super) struct DoctorArgs {
    /// GPUs to look at: positions in PCI order, or UUIDs [default: all visible].
    #[arg(long, value_name = "LIST", value_delimiter = ',', env = "NCCLTUNE_DEVICES")]
    pub(super) devices: Vec<String>,

    /// The libnccl that the server loads.
    #[arg(long, value_name = "PATH", env = "NCCLTUNE_NCCL_LIB")]
    pub(super) nccl_lib: Option<PathBuf>,

    /// A folder with copies of another machine's /proc, /sys, /etc and /dev: only these files are read, no
    /// driver is asked and no child started.
    #[arg(long, value_name = "DIR", conflicts_with_all = ["live", "sample", "devices", "nccl_lib"])]
    pub(super) root: Option<PathBuf>,

    /// Start workers on the GPUs, too: does peer access work, and does NCCL find the same on idle GPUs as on
    /// busy ones? Takes a minute.
    #[arg(long)]
    pub(super) live: bool,

    /// Run all-reduces of four decode sizes, and compare them with what the same GPUs reach elsewhere. Takes
    /// seconds.
    #[arg(long)]
    pub(super) sample: bool,

    /// Whether peer access across the host bridge is tested.
    #[arg(long, value_enum, default_value_t = PeerAccessArg::Auto, value_name = "WHEN", requires = "live")]
    pub(super) peer_access: PeerAccessArg,

    /// Longest any phase of a step may take [default: within limits].
    #[arg(long, value_name = "TIME", value_parser = parse_time, requires = "live")]
    pub(super) phase_limit: Option<f64>,

    /// Write checks, versions, GPUs and NCCL's variables into a new file that may be posted: names of hosts and
    /// people, addresses and paths under a home are left out.
    #[arg(long, value_name = "FILE")]
    pub(super) bundle: Option<PathBuf>,

    #[command(flatten)]
    pub(super) format: FormatArg,
}

#[derive(Debug, Clone, Args)]
pub(super) struct WorkloadCommandArgs {
    #[command(flatten)]
    pub(super) workload: WorkloadArgs,

    /// GPU memory, where it decides the engine's buckets and chunk: 96GiB.
    #[arg(long, value_name = "SIZE", value_parser = parse_memory)]
    pub(super) gpu_memory: Option<u64>,

    #[command(flatten)]
    pub(super) format: FormatArg,
}

#[derive(Debug, Clone, Args)]
pub(super) struct LintArgs {
    /// Files; - is standard input.
    #[arg(required = true, value_name = "FILE")]
    pub(super) files: Vec<PathBuf>,

    /// Who reads them: env-file, docker-env-file, shell, systemd-unit, compose, kubernetes, nccl-conf [default: guessed].
    #[arg(long = "as", value_name = "KIND")]
    pub(super) kind: Option<String>,

    /// Release of NCCL that reads the variables [default: 2.28.9].
    #[arg(long, value_name = "VERSION", value_parser = parse_release)]
    pub(super) nccl: Option<NcclVersion>,

    /// Engine that is started with them: what it sets itself is told.
    #[arg(long, value_name = "sglang|vllm|torch|none", env = "NCCLTUNE_ENGINE", value_parser = parse_engine)]
    pub(super) engine: Option<Engine>,

    /// Warnings count as errors.
    #[arg(long)]
    pub(super) strict: bool,

    #[command(flatten)]
    pub(super) format: FormatArg,
}

#[derive(Debug, Clone, Args)]
pub(super) struct CheckArgs {
    /// The file: tuned.env of a run, or what `emit` printed.
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    pub(super) env_file: PathBuf,

    /// The run it came from, which knows its points and its gain [default: where the file lies, if that is it].
    #[arg(long, value_name = "DIR", value_hint = ValueHint::DirPath)]
    pub(super) run: Option<PathBuf>,

    /// What measures [default: what measured the run].
    #[arg(long, value_enum, default_value_t = BackendArg::Auto, env = "NCCLTUNE_BACKEND", help_heading = "Machine")]
    pub(super) backend: BackendArg,

    /// Simulated machine [default: the run's].
    #[arg(long, value_name = "NAME|FILE", help_heading = "Machine")]
    pub(super) machine: Option<String>,

    /// The libnccl that the server loads [default: the Python environment's, else the loader's].
    #[arg(long, value_name = "PATH", env = "NCCLTUNE_NCCL_LIB", help_heading = "Machine")]
    pub(super) nccl_lib: Option<PathBuf>,

    /// GPUs to use: positions in PCI order, or UUIDs [default: the run's positions].
    #[arg(long, value_name = "LIST", value_delimiter = ',', env = "NCCLTUNE_DEVICES", help_heading = "Machine")]
    pub(super) devices: Vec<String>,

    /// Measure although doctor refuses.
    #[arg(long, help_heading = "Machine")]
    pub(super) force: bool,

    /// Time for launches [default: 100s].
    #[arg(long, value_name = "TIME", value_parser = parse_time, help_heading = "Check")]
    pub(super) time_budget: Option<f64>,

    /// Seed of orders and data [default: the run's, plus one].
    #[arg(long, value_name = "N", help_heading = "Check")]
    pub(super) seed: Option<u64>,

    /// End with status 5 where noise hides the answer.
    #[arg(long, help_heading = "Check")]
    pub(super) require_decision: bool,

    #[command(flatten)]
    pub(super) format: FormatArg,
}

#[derive(Debug, Clone, Args)]
pub(super) struct ExecArgs {
    /// The file: tuned.env of a run, or what `emit` printed.
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    pub(super) env_file: PathBuf,

    /// The run it came from [default: where the file lies, if that is it].
    #[arg(long, value_name = "DIR", value_hint = ValueHint::DirPath)]
    pub(super) run: Option<PathBuf>,

    /// The libnccl that the command loads, which must be the one that was measured [default: where that lay].
    #[arg(long, value_name = "PATH", env = "NCCLTUNE_NCCL_LIB")]
    pub(super) nccl_lib: Option<PathBuf>,

    /// Start the command although the file is stale, foreign or simulated; standard error says so.
    #[arg(long)]
    pub(super) force: bool,

    /// Start nothing; look whether the processes that run have what the file sets.
    #[arg(long, conflicts_with_all = ["command", "force", "run", "nccl_lib"])]
    pub(super) verify: bool,

    /// The server's first process: it and all that it started are looked at [default: whatever has a libnccl].
    #[arg(long, value_name = "N", requires = "verify")]
    pub(super) pid: Option<u32>,

    /// Read /proc and /sys below this folder [default: /].
    #[arg(long, value_name = "DIR")]
    pub(super) root: Option<PathBuf>,

    /// The command and its arguments, which take this process's place.
    #[arg(last = true, value_name = "CMD", required_unless_present = "verify", value_hint = ValueHint::CommandWithArguments)]
    pub(super) command: Vec<String>,

    #[command(flatten)]
    pub(super) format: FormatArg,
}

#[derive(Debug, Clone, Args)]
pub(super) struct ExplainArgs {
    /// Machine that is asked about: "auto" is this one, else a simulated machine by name or file
    /// [default: this one where an NVIDIA driver is installed, else rtx-pro-6000-x8].
    #[arg(long, value_name = "NAME|FILE|auto")]
    pub(super) machine: Option<String>,

    /// A variable as the server would have it; repeatable.
    #[arg(long = "env", value_name = "NAME=VALUE")]
    pub(super) variables: Vec<String>,

    /// A file of such variables, as docker takes it; --env wins over it.
    #[arg(long, value_name = "FILE")]
    pub(super) env_file: Option<PathBuf>,

    /// Message sizes: 43008,64KiB,1M [default: those of the kimi-k2.5 preset].
    #[arg(long = "size", alias = "sizes", value_name = "LIST", value_delimiter = ',', value_parser = parse_message_size)]
    pub(super) sizes: Vec<u64>,

    /// What is sent: all-reduce, all-gather, reduce-scatter, broadcast or reduce [default: all-reduce].
    #[arg(long, value_name = "NAME", value_parser = parse_collective)]
    pub(super) collective: Option<Collective>,

    /// Release of NCCL whose choices are predicted: 2.28.9 [default: the library's that is here, else the
    /// simulated machine's].
    #[arg(long, value_name = "VERSION", value_parser = parse_release)]
    pub(super) nccl: Option<NcclVersion>,

    /// The libnccl that the server loads.
    #[arg(long, value_name = "PATH", env = "NCCLTUNE_NCCL_LIB")]
    pub(super) nccl_lib: Option<PathBuf>,

    /// GPUs that take part: positions in PCI order, or UUIDs [default: all visible].
    #[arg(long, value_name = "LIST", value_delimiter = ',', env = "NCCLTUNE_DEVICES")]
    pub(super) devices: Vec<String>,

    /// Predict only: start nothing on the GPUs.
    #[arg(long)]
    pub(super) no_launch: bool,

    /// Read /sys and /proc below this folder [default: /].
    #[arg(long, value_name = "DIR")]
    pub(super) root: Option<PathBuf>,

    #[command(flatten)]
    pub(super) format: FormatArg,
}

#[derive(Debug, Clone, Args)]
pub(super) struct EmitArgs {
    /// Run directory.
    #[arg(long, value_name = "DIR")]
    pub(super) run: PathBuf,

    /// Form: env (docker, systemd, compose), shell, docker alone, a systemd drop-in, lines for Slurm or
    /// pyxis, arguments of mpirun, nccl.conf, compose, a Kubernetes ConfigMap, or what takes the variables
    /// back.
    #[arg(
        long = "as",
        value_name = "FORM",
        default_value = "env",
        value_parser = PossibleValuesParser::new(EmitAs::ALL.map(EmitAs::name)).try_map(|text| parse_emit_as(&text))
    )]
    pub(super) emit_as: EmitAs,
}

#[derive(Debug, Clone, Args)]
pub(super) struct ReportArgs {
    /// Run directory.
    #[arg(value_name = "DIR", required_unless_present = "run", value_hint = ValueHint::DirPath)]
    pub(super) directory: Option<PathBuf>,

    /// Run directory, as other commands name it.
    #[arg(long, value_name = "DIR", conflicts_with = "directory", value_hint = ValueHint::DirPath)]
    pub(super) run: Option<PathBuf>,

    /// Form of the report; html is one page that needs no network.
    #[arg(
        long = "format",
        value_name = "FORMAT",
        default_value = "text",
        value_parser = PossibleValuesParser::new(ReportFormat::ALL.map(ReportFormat::name))
            .try_map(|text| text.parse::<ReportFormat>()),
        help_heading = "Output"
    )]
    pub(super) format: ReportFormat,

    /// Write it into this file instead of standard output.
    #[arg(long, value_name = "FILE", help_heading = "Output", value_hint = ValueHint::FilePath)]
    pub(super) out: Option<PathBuf>,
}

#[derive(Debug, Clone, Args)]
pub(super) struct ImportArgs {
    /// Outputs of nccl-tests, as text or JSON (-J): each is one launch of one arm.
    #[arg(value_name = "FILE", required = true, value_hint = ValueHint::FilePath)]
    pub(super) files: Vec<PathBuf>,

    /// Run directory: a new one, or an imported run that these launches join.
    #[arg(long, value_name = "DIR", value_hint = ValueHint::DirPath)]
    pub(super) out: PathBuf,

    /// A variable that the arm set beside the default; repeatable. Without any it is the default.
    #[arg(long = "env", value_name = "NAME=VALUE")]
    pub(super) env: Vec<String>,

    /// A variable that was set in every launch of the run, the default's too; repeatable.
    #[arg(long = "pin", value_name = "NAME=VALUE")]
    pub(super) pins: Vec<String>,

    /// Ranks of an operation, where the output does not say.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(2..=100_000))]
    pub(super) ranks: Option<u32>,

    /// The collective, where the output does not say.
    #[arg(
        long,
        value_name = "all-reduce|all-gather|reduce-scatter|broadcast|reduce|send-recv",
        value_parser = parse_any_collective
    )]
    pub(super) collective: Option<Collective>,

    /// Which of the two times counts [default: in-place, where every row has it].
    #[arg(long, value_enum)]
    pub(super) placement: Option<PlacementArg>,

    /// What the machine is called in the run [default: what the list of devices says].
    #[arg(long, value_name = "TEXT")]
    pub(super) machine_name: Option<String>,

    #[command(flatten)]
    pub(super) format: FormatArg,
}

#[derive(Debug, Clone, Args)]
pub(super) struct CompletionsArgs {
    /// The shell.
    #[arg(value_enum)]
    pub(super) shell: clap_complete::Shell,
}

#[derive(Debug, Clone, Args)]
pub(super) struct ManArgs {
    /// Command whose page is printed [default: that of nccltune itself].
    pub(super) command: Option<String>,

    /// Write every page into this folder instead: nccltune.1, nccltune-tune.1 and so on.
    #[arg(long, value_name = "DIR", conflicts_with = "command", value_hint = ValueHint::DirPath)]
    pub(super) out: Option<PathBuf>,
}

fn parse_engine(text: &str) -> Result<Engine, String> {
    Engine::parse(text).ok_or_else(|| "one of sglang, vllm, torch, none".to_owned())
}

fn parse_engine_version(text: &str) -> Result<EngineVersion, String> {
    EngineVersion::parse(text).ok_or_else(|| "a release such as 0.10.1".to_owned())
}

fn model_help() -> String {
    let presets: Vec<&str> = crate::workload::preset_names().collect();
    format!("A config.json, its folder, or a preset [default: kimi-k2.5]; presets: {}", presets.join(", "))
}

fn parse_dtype(text: &str) -> Result<DataType, String> {
    DataType::parse(text).ok_or_else(|| format!("one of {}", DataType::ALL.map(DataType::name).join(", ")))
}

fn parse_size_argument(text: &str) -> Result<u64, String> {
    parse_size(text).map_err(|error| error.to_string())
}

fn parse_message_size(text: &str) -> Result<u64, String> {
    match parse_size(text) {
        Ok(bytes) if (1..=nccl_model::MAX_BYTES).contains(&bytes) => Ok(bytes),
        Ok(_) => Err(format!("there must be 1 byte to {}", format_size(nccl_model::MAX_BYTES))),
        Err(error) => Err(error.to_string()),
    }
}

/// Operations of a server, as anybody writes them.
fn parse_any_collective(text: &str) -> Result<Collective, String> {
    parse_one_of(text, &Collective::ALL)
}

/// Those that NCCL makes a choice for.
fn parse_collective(text: &str) -> Result<Collective, String> {
    parse_one_of(text, &Collective::ALL.into_iter().filter(|known| *known != Collective::SendRecv).collect::<Vec<_>>())
}

fn parse_one_of(text: &str, known: &[Collective]) -> Result<Collective, String> {
    let plain = |text: &str| text.replace(['-', '_'], "").to_ascii_lowercase();
    known.iter().copied().find(|one| plain(one.name()) == plain(text)).ok_or_else(|| {
        let names: Vec<&str> = known.iter().map(|one| one.name()).collect();
        let near = nearest_name(text, names.iter().copied()).map(|near| format!("did you mean {near}? "));
        format!("{}one of {}", near.unwrap_or_default(), names.join(", "))
    })
}

/// "2.28.9", also as packages and tags write it: "v2.28.9-1", "2.28.9+cuda13.0".
fn parse_release(text: &str) -> Result<NcclVersion, String> {
    let plain = text.trim_start_matches('v').split(['-', '+']).next().unwrap_or_default();
    let mut numbers = plain.split('.').map(str::parse::<u32>);
    match (numbers.next(), numbers.next(), numbers.next(), numbers.next()) {
        (Some(Ok(major)), Some(Ok(minor)), Some(Ok(patch)), None) => Ok(NcclVersion { major, minor, patch }),
        _ => Err("a release has three numbers, such as 2.28.9".to_owned()),
    }
}

fn parse_memory(text: &str) -> Result<u64, String> {
    match parse_size(text) {
        Ok(bytes) if bytes < 1 << 30 => Err("less than a gigabyte; write 96GiB".to_owned()),
        Ok(bytes) => Ok(bytes),
        Err(error) => Err(error.to_string()),
    }
}

fn parse_share(text: &str) -> Result<f64, String> {
    parse_fraction(text).map_err(|error| error.to_string())
}

fn parse_emit_as(text: &str) -> Result<EmitAs, String> {
    EmitAs::ALL
        .into_iter()
        .find(|known| known.name() == text)
        .ok_or_else(|| format!("one of {}", EmitAs::ALL.map(EmitAs::name).join(", ")))
}

/// Milliseconds of a cell.
fn parse_cell_time(text: &str) -> Result<f64, String> {
    let milliseconds = humantime::parse_duration(text).map_err(|error| error.to_string())?.as_secs_f64() * 1000.0;
    if (1.0..=60_000.0).contains(&milliseconds) { Ok(milliseconds) } else { Err("1ms to 1m".to_owned()) }
}

fn parse_time(text: &str) -> Result<f64, String> {
    let seconds = humantime::parse_duration(text).map_err(|error| error.to_string())?.as_secs_f64();
    if seconds < 1.0 { Err("at least a second".to_owned()) } else { Ok(seconds) }
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;

    #[test]
    fn the_parser_is_sound() {
        Cli::command().debug_assert();
    }

    #[test]
    fn values_are_read_as_people_write_them() {
        let cli = Cli::try_parse_from([
            "nccltune",
            "tune",
            "--time-budget",
            "15m",
            "--min-gain",
            "3%",
            "--sizes",
            "4K,1MiB",
            "--devices",
            "0,1",
        ])
        .unwrap();
        let Command::Tune(tune) = cli.command else { panic!("tune") };
        assert_eq!(tune.time_budget, Some(900.0));
        assert_eq!(tune.min_gain, Some(0.03));
        assert_eq!(tune.workload.sizes, [4096, 1 << 20]);
        assert_eq!(tune.devices, ["0", "1"]);
        assert!(Cli::try_parse_from(["nccltune", "tune", "--sizes", "4K", "--model", "x"]).is_err());
        assert!(Cli::try_parse_from(["nccltune", "tune", "--engine", "trt"]).is_err());
        let words = ["nccltune", "tune", "--sizes", "4K", "--collective", "all_gather", "--dtype", "fp16", "--eager"];
        let Command::Tune(tune) = Cli::try_parse_from(words).unwrap().command else { panic!("tune") };
        assert_eq!(tune.workload.collective, Some(Collective::AllGather));
        assert_eq!((tune.workload.dtype, tune.workload.eager), (Some(DataType::Fp16), true));
        for alone in [&["--collective", "reduce"][..], &["--dtype", "int8"], &["--placement", "in-place"], &["--eager"]]
        {
            let words = ["nccltune", "tune"].iter().chain(alone);
            assert!(Cli::try_parse_from(words).is_err(), "{alone:?} belongs to sizes");
        }
    }

    #[test]
    fn what_is_explained_is_read_as_people_write_it() {
        assert_eq!(parse_message_size("42KiB"), Ok(43_008));
        for wrong in ["0", "1025G", "x"] {
            assert!(parse_message_size(wrong).is_err(), "{wrong}");
        }
        for text in ["all-reduce", "AllReduce", "all_reduce"] {
            assert_eq!(parse_collective(text), Ok(Collective::AllReduce));
        }
        assert!(parse_collective("all-redcue").unwrap_err().contains("did you mean all-reduce?"));
        assert!(parse_collective("send-recv").is_err());
        assert_eq!(parse_any_collective("send_recv"), Ok(Collective::SendRecv));
        for text in ["2.28.9", "v2.28.9-1", "2.28.9+cuda13.0"] {
            assert_eq!(parse_release(text), Ok(NcclVersion::v2(28, 9)));
        }
        for wrong in ["2.28", "latest", "2.28.9.1", ""] {
            assert!(parse_release(wrong).is_err(), "{wrong}");
        }
    }
}
