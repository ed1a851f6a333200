//! The variables themselves.

use crate::machine::NcclVersion;

use super::Values::{
    Algorithms, Bytes, File, Integer, Multiple, OneOf, PathLevel, Protocols, Switch, Text, Thresholds, Words,
};
use super::{Knob, Proof, Route, Values, Way};

const ALWAYS: NcclVersion = NcclVersion::v2(0, 0);

const fn v(minor: u32, patch: u32) -> NcclVersion {
    NcclVersion::v2(minor, patch)
}

const fn route(since: NcclVersion, way: Way, proof: Proof) -> Route {
    Route { since, until: None, way, proof }
}

const AT_LAUNCH: Route = route(ALWAYS, Way::LaunchEnvironment, Proof::SetByEnvironment);
const AT_COMMUNICATOR: Route = route(ALWAYS, Way::CommunicatorEnvironment, Proof::SetByEnvironment);

/// Read once per process.
const LAUNCH: &[Route] = &[AT_LAUNCH];
/// Read once per process, and never mentioned in the log.
const LAUNCH_SILENT: &[Route] = &[route(ALWAYS, Way::LaunchEnvironment, Proof::None)];
/// Read by every communicator.
const COMMUNICATOR: &[Route] = &[AT_LAUNCH, AT_COMMUNICATOR];
/// Read by every communicator; since 2.22 a tuner plugin chooses from a cost table as well.
const CHOICE: &[Route] =
    &[AT_LAUNCH, AT_COMMUNICATOR, route(v(22, 3), Way::TunerPlugin, Proof::Line("TUNER/Plugin: Using"))];
/// minCTAs raises the number of channels by the same arithmetic as NCCL_MIN_NCHANNELS.
const MIN_CTAS: &[Route] =
    &[AT_LAUNCH, route(v(17, 1), Way::ConfigField("minCTAs"), Proof::Line("Comm config Min CTAs set to"))];
/// maxCTAs and NCCL_MAX_NCHANNELS both cap the channels; the smaller wins.
const MAX_CTAS: &[Route] =
    &[AT_LAUNCH, route(v(17, 1), Way::ConfigField("maxCTAs"), Proof::Line("Comm config Max CTAs set to"))];
const CLUSTER: &[Route] = &[
    AT_LAUNCH,
    route(v(17, 1), Way::ConfigField("cgaClusterSize"), Proof::Line("Comm config CGA cluster size set to")),
];
const NVLS_CTAS: &[Route] =
    &[AT_LAUNCH, route(v(27, 3), Way::ConfigField("nvlsCTAs"), Proof::Line("Comm config nvlsCTAs set to"))];
/// graphUsageMode 0 is NCCL_GRAPH_MIXING_SUPPORT=0 and 2 is 1.
const GRAPH_USAGE: &[Route] =
    &[AT_LAUNCH, route(v(29, 2), Way::ConfigField("graphUsageMode"), Proof::Line("Comm config graphUsageMode set to"))];
const GRAPH_ORDERING: &[Route] = &[
    AT_LAUNCH,
    route(v(30, 7), Way::ConfigField("graphStreamOrdering"), Proof::Line("Comm config graphStreamOrdering set to")),
];
const BLOCKING: &[Route] =
    &[AT_LAUNCH, route(v(17, 1), Way::ConfigField("blocking"), Proof::Line("Comm config Blocking set to"))];
/// An integer with its usual line up to 2.28, words with a line of their own since.
const POLICY: &[Route] = &[
    Route { since: ALWAYS, until: Some(v(28, u32::MAX)), way: Way::LaunchEnvironment, proof: Proof::SetByEnvironment },
    route(v(29, 0), Way::LaunchEnvironment, Proof::Line("Parsed environment variable NCCL_CTA_POLICY=")),
    route(v(27, 3), Way::ConfigField("CTAPolicy"), Proof::Line("Comm config CTA policy flags set to")),
];
/// Read by every communicator, but mentioned only by the first.
const MODE: &[Route] = &[AT_LAUNCH, route(ALWAYS, Way::CommunicatorEnvironment, Proof::None)];
/// Loaded with the first communicator that wants it.
const PLUGIN: &[Route] = &[
    Route {
        since: ALWAYS,
        until: Some(v(20, u32::MAX)),
        way: Way::LaunchEnvironment,
        proof: Proof::Line("Using tuner plugin: "),
    },
    route(v(21, 0), Way::LaunchEnvironment, Proof::Line("TUNER/Plugin: Using")),
];

const CHANNELS: Values = Values::Integer { min: 1, max: 64 };

const fn knob(
    name: &'static str,
    values: Values,
    default: &'static str,
    since: NcclVersion,
    all_routes: &'static [Route],
    effect: &'static str,
) -> Knob {
    Knob { name, values, default, since, until: None, all_routes, effect }
}

const fn until(mut knob: Knob, last: NcclVersion) -> Knob {
    knob.until = Some(last);
    knob
}

pub(super) static KNOBS: &[Knob] = &[
    // Choice of algorithm, protocol, channels, threads and buffers.
    knob(
        "NCCL_ALGO",
        Algorithms,
        "chosen per call by NCCL's cost model",
        ALWAYS,
        CHOICE,
        "Limits which algorithms NCCL may choose from, such as ring or tree.",
    ),
    knob(
        "NCCL_PROTO",
        Protocols,
        "LL and Simple, and LL128 where NCCL trusts the link",
        ALWAYS,
        CHOICE,
        "Limits which protocols NCCL may choose from: LL is quickest for small messages, Simple for large ones.",
    ),
    knob(
        "NCCL_THREAD_THRESHOLDS",
        Thresholds,
        "8 8 64 for tree, 8 times the ranks, 8 and 64 for ring",
        ALWAYS,
        COMMUNICATOR,
        "Sets how many bytes a thread must have before NCCL uses another channel: lower numbers spread small \
         messages over more channels.",
    ),
    knob(
        "NCCL_NTHREADS",
        Multiple { of: 32, min: 64, max: 512 },
        "512, or 256 for ring with Simple on slow links",
        ALWAYS,
        LAUNCH,
        "Sets the largest number of threads per channel for the LL and Simple protocols.",
    ),
    knob(
        "NCCL_LL128_NTHREADS",
        Multiple { of: 32, min: 160, max: 640 },
        "640",
        ALWAYS,
        LAUNCH,
        "Sets the largest number of threads per channel for the LL128 protocol.",
    ),
    knob(
        "NCCL_MIN_NCHANNELS",
        CHANNELS,
        "as many as the topology search finds",
        ALWAYS,
        MIN_CTAS,
        "Makes NCCL set up at least this many channels, which only messages large enough to fill them will use.",
    ),
    knob(
        "NCCL_MAX_NCHANNELS",
        CHANNELS,
        "no limit of its own",
        ALWAYS,
        MAX_CTAS,
        "Limits how many channels NCCL sets up, which saves memory and compute units at the price of bandwidth.",
    ),
    knob(
        "NCCL_MIN_NRINGS",
        CHANNELS,
        "as NCCL_MIN_NCHANNELS",
        ALWAYS,
        LAUNCH,
        "Is the old name of NCCL_MIN_NCHANNELS, which wins where both are set.",
    ),
    knob(
        "NCCL_MAX_NRINGS",
        CHANNELS,
        "as NCCL_MAX_NCHANNELS",
        ALWAYS,
        LAUNCH,
        "Is the old name of NCCL_MAX_NCHANNELS, which wins where both are set.",
    ),
    knob(
        "NCCL_MIN_CTAS",
        CHANNELS,
        "1",
        v(17, 1),
        MIN_CTAS,
        "Makes NCCL use at least this many thread blocks, and with them channels, where messages fill them.",
    ),
    knob(
        "NCCL_MAX_CTAS",
        CHANNELS,
        "64 (32 up to 2.24)",
        v(17, 1),
        MAX_CTAS,
        "Limits how many thread blocks, and with them channels, NCCL may occupy.",
    ),
    knob(
        "NCCL_BUFFSIZE",
        Bytes { min: 1 << 16, max: 1 << 30, multiple_of: None },
        "4194304",
        ALWAYS,
        LAUNCH,
        "Sets the size of the buffer between two ranks for the Simple protocol, per channel.",
    ),
    knob(
        "NCCL_LL_BUFFSIZE",
        Bytes { min: 1 << 16, max: 1 << 28, multiple_of: Some(4096) },
        "524288",
        ALWAYS,
        LAUNCH,
        "Sets the size of the buffer between two ranks for the LL protocol, per channel.",
    ),
    knob(
        "NCCL_LL128_BUFFSIZE",
        Bytes { min: 1 << 16, max: 1 << 28, multiple_of: Some(1024) },
        "4915200",
        ALWAYS,
        LAUNCH,
        "Sets the size of the buffer between two ranks for the LL128 protocol, per channel.",
    ),
    knob(
        "NCCL_GRAPH_FILE",
        File,
        "none: NCCL searches rings and trees itself",
        ALWAYS,
        COMMUNICATOR,
        "Replaces the rings and trees that NCCL would search for by those of a file.",
    ),
    knob(
        "NCCL_TOPO_FILE",
        File,
        "a virtual topology of the machine's maker where there is one",
        ALWAYS,
        COMMUNICATOR,
        "Replaces what NCCL detects about links and speeds by what a file says.",
    ),
    knob(
        "NCCL_TUNER_PLUGIN",
        Text,
        "libnccl-tuner.so where the loader finds one",
        v(19, 1),
        PLUGIN,
        "Loads a library that chooses algorithm, protocol and channels for every call.",
    ),
    knob(
        "NCCL_PAT_ENABLE",
        OneOf(&[0, 1, 2]),
        "2: where NCCL expects it to help",
        v(23, 4),
        LAUNCH,
        "Allows an algorithm for gathers and scatters with one GPU per node.",
    ),
    knob(
        "NCCL_WORK_ARGS_BYTES",
        Integer { min: 512, max: 32_768 },
        "as much as the GPU takes",
        v(22, 3),
        LAUNCH,
        "Limits how much work is described in a kernel's arguments, which can lower the number of channels.",
    ),
    knob(
        "NCCL_WORK_FIFO_BYTES",
        Bytes { min: 1 << 12, max: 1 << 30, multiple_of: None },
        "1048576",
        v(22, 3),
        LAUNCH,
        "Sets the size of the queue that describes work to kernels.",
    ),
    // How data gets from GPU to GPU.
    knob(
        "NCCL_P2P_LEVEL",
        PathLevel,
        "PXB: through PCIe switches, not through the CPU (AMD with two GPUs: SYS)",
        ALWAYS,
        LAUNCH,
        "Sets how far apart two GPUs may be and still write into each other's memory directly.",
    ),
    knob(
        "NCCL_P2P_DISABLE",
        Switch,
        "0",
        ALWAYS,
        LAUNCH,
        "Stops GPUs from writing into each other's memory, so that data goes through host memory.",
    ),
    knob(
        "NCCL_IGNORE_DISABLED_P2P",
        OneOf(&[0, 1, 2]),
        "0",
        ALWAYS,
        LAUNCH,
        "Mutes NCCL's notice that the driver denies peer access (1), or uses peer access all the same (2).",
    ),
    knob(
        "NCCL_SHM_DISABLE",
        Switch,
        "0",
        ALWAYS,
        LAUNCH,
        "Stops ranks from exchanging data through shared host memory, so that the network carries what peer access does not.",
    ),
    knob(
        "NCCL_SHM_LOCALITY",
        OneOf(&[1, 2]),
        "2",
        ALWAYS,
        LAUNCH,
        "Places shared host buffers near the sending GPU (1) or near the receiving one (2).",
    ),
    until(
        knob(
            "NCCL_SHM_USE_CUDA_MEMCPY",
            Switch,
            "0",
            ALWAYS,
            LAUNCH,
            "Moves data through shared host memory with copy engines instead of kernels.",
        ),
        v(30, 4),
    ),
    knob(
        "NCCL_P2P_USE_CUDA_MEMCPY",
        Switch,
        "0",
        ALWAYS,
        LAUNCH,
        "Moves data between peers with copy engines instead of kernels.",
    ),
    knob(
        "NCCL_P2P_READ_ENABLE",
        Switch,
        "only over NVLink on Ampere",
        ALWAYS,
        LAUNCH,
        "Lets the receiver read from its peer instead of the sender writing, for the Simple protocol.",
    ),
    knob(
        "NCCL_P2P_DIRECT_DISABLE",
        Switch,
        "0",
        ALWAYS,
        LAUNCH,
        "Stops GPUs of one process from using each other's pointers directly.",
    ),
    knob(
        "NCCL_CUMEM_ENABLE",
        Switch,
        "on where the driver supports it (2.18: off)",
        v(18, 1),
        LAUNCH,
        "Chooses whether NCCL allocates device memory with CUDA's virtual memory calls.",
    ),
    knob(
        "NCCL_CUMEM_HOST_ENABLE",
        Switch,
        "on where the driver supports it (2.23: off)",
        v(23, 4),
        LAUNCH,
        "Chooses whether shared host memory comes from CUDA's virtual memory calls instead of files in /dev/shm.",
    ),
    knob(
        "NCCL_RUNTIME_CONNECT",
        Switch,
        "1",
        v(22, 3),
        LAUNCH,
        "Chooses whether ranks connect at an algorithm's first use (1) or all at once at start (0).",
    ),
    knob(
        "NCCL_NVLS_ENABLE",
        OneOf(&[0, 1, 2]),
        "2: where the hardware supports it",
        v(17, 1),
        LAUNCH,
        "Lets NVLink switches add up the data of several GPUs.",
    ),
    knob(
        "NCCL_NVLS_NCHANNELS",
        CHANNELS,
        "16 on Hopper, 24 or more on Blackwell",
        v(17, 1),
        NVLS_CTAS,
        "Sets how many channels the algorithms that add up in NVLink switches use.",
    ),
    knob(
        "NCCL_NVLS_CHUNKSIZE",
        Bytes { min: 1 << 12, max: 1 << 22, multiple_of: None },
        "131072",
        v(21, 5),
        LAUNCH,
        "Sets how much data at a time the algorithms that add up in NVLink switches handle.",
    ),
    knob(
        "NCCL_NVB_DISABLE",
        Switch,
        "0",
        ALWAYS,
        LAUNCH,
        "Stops NCCL from going through a third GPU where two have no NVLink of their own.",
    ),
    knob(
        "NCCL_MAX_P2P_NCHANNELS",
        CHANNELS,
        "64 (32 up to 2.24)",
        ALWAYS,
        LAUNCH,
        "Limits the channels of send and receive, without effect on collectives.",
    ),
    knob(
        "NCCL_MIN_P2P_NCHANNELS",
        CHANNELS,
        "1",
        ALWAYS,
        LAUNCH,
        "Makes NCCL use at least this many channels for send and receive, without effect on collectives.",
    ),
    knob(
        "NCCL_P2P_LL_THRESHOLD",
        Integer { min: 0, max: 1 << 30 },
        "16384",
        ALWAYS,
        LAUNCH,
        "Sets up to which size per channel send and receive use the LL protocol.",
    ),
    knob(
        "NCCL_P2P_NVL_CHUNKSIZE",
        Bytes { min: 1 << 12, max: 1 << 26, multiple_of: None },
        "524288",
        ALWAYS,
        LAUNCH,
        "Sets how much data at a time send and receive move over NVLink.",
    ),
    knob(
        "NCCL_P2P_PCI_CHUNKSIZE",
        Bytes { min: 1 << 12, max: 1 << 26, multiple_of: None },
        "131072",
        ALWAYS,
        LAUNCH,
        "Sets how much data at a time send and receive move over PCIe.",
    ),
    // How collectives are launched, captured and checked.
    knob(
        "NCCL_GRAPH_MIXING_SUPPORT",
        Switch,
        "1",
        ALWAYS,
        GRAPH_USAGE,
        "With 0, leaves out of captured graphs the events that keep captured and uncaptured collectives of a communicator apart.",
    ),
    knob(
        "NCCL_GRAPH_STREAM_ORDERING",
        Switch,
        "1",
        v(30, 7),
        GRAPH_ORDERING,
        "With 0, leaves the order of captured collectives to the application.",
    ),
    knob(
        "NCCL_GRAPH_REGISTER",
        Switch,
        "1",
        ALWAYS,
        LAUNCH,
        "Chooses whether NCCL registers the application's buffers when a graph is captured, to save copies.",
    ),
    knob(
        "NCCL_LOCAL_REGISTER",
        Switch,
        "1",
        v(19, 1),
        LAUNCH,
        "Chooses whether NCCL makes use of buffers that the application registers.",
    ),
    knob(
        "NCCL_LAUNCH_MODE",
        Words(&["PARALLEL", "GROUP"]),
        "PARALLEL",
        ALWAYS,
        MODE,
        "Chooses whether a process with several GPUs launches their kernels one by one or together.",
    ),
    knob(
        "NCCL_LAUNCH_ORDER_IMPLICIT",
        Switch,
        "0",
        v(26, 2),
        LAUNCH,
        "Makes collectives of several communicators on a GPU run in the order in which they were called.",
    ),
    knob(
        "NCCL_CGA_CLUSTER_SIZE",
        Integer { min: 0, max: 8 },
        "4 from Hopper on, 0 before",
        ALWAYS,
        CLUSTER,
        "Sets how many thread blocks of a collective are scheduled together as a cluster.",
    ),
    knob(
        "NCCL_MEM_SYNC_DOMAIN",
        OneOf(&[0, 1]),
        "1",
        ALWAYS,
        LAUNCH,
        "Chooses the memory domain of NCCL's kernels, which keeps their fences apart from those of other kernels.",
    ),
    knob(
        "NCCL_SET_STACK_SIZE",
        Switch,
        "0",
        ALWAYS,
        LAUNCH,
        "Sets the stack of kernels at start, so that CUDA need not reallocate it at the first collective.",
    ),
    knob(
        "NCCL_L1_SHARED_MEMORY_CARVEOUT",
        Integer { min: 0, max: 100 },
        "0",
        ALWAYS,
        LAUNCH,
        "Sets which share of the first-level cache NCCL's kernels ask for as shared memory, in per cent.",
    ),
    knob(
        "NCCL_WIN_ENABLE",
        Switch,
        "1",
        v(27, 3),
        LAUNCH,
        "Allows applications to register buffers as symmetric windows, which open quicker kernels.",
    ),
    knob(
        "NCCL_SYM_KERNEL",
        Text,
        "chosen per call",
        v(27, 3),
        LAUNCH_SILENT,
        "Names the one kernel that may be used on symmetric buffers.",
    ),
    knob(
        "NCCL_SYM_CTAS",
        Integer { min: 0, max: 64 },
        "0: chosen per call",
        v(27, 3),
        LAUNCH,
        "Sets how many thread blocks kernels on symmetric buffers use.",
    ),
    knob(
        "NCCL_CTA_POLICY",
        OneOf(&[0, 1, 2]),
        "0",
        v(27, 3),
        POLICY,
        "Chooses between speed (0), fewer thread blocks (1) and none where copy engines can do the work (2).",
    ),
    knob(
        "NCCL_IGNORE_CPU_AFFINITY",
        Switch,
        "0",
        ALWAYS,
        LAUNCH,
        "Lets NCCL place its threads near the GPU even where the process was bound to other cores.",
    ),
    knob("NCCL_CHECK_POINTERS", Switch, "0", ALWAYS, LAUNCH, "Checks the pointers of every call, which costs time."),
    knob(
        "NCCL_RAS_ENABLE",
        Switch,
        "1",
        v(24, 3),
        LAUNCH,
        "Starts a thread through which the state of communicators can be inspected from outside.",
    ),
    knob(
        "NCCL_COMM_BLOCKING",
        Switch,
        "1",
        ALWAYS,
        BLOCKING,
        "Chooses whether setting up a communicator waits until it is complete.",
    ),
    knob(
        "NCCL_MULTI_RANK_GPU_ENABLE",
        Switch,
        "0",
        v(30, 3),
        LAUNCH,
        "Allows several ranks on one GPU, which is meant for tests.",
    ),
];
