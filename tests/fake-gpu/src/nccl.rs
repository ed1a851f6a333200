//! libnccl.so.2, as far as nccltune's workers call it.
//!
//! Lines of the log are those of 2.28.9 as seen on real GPUs; what other releases write otherwise is
//! taken from their source.

use std::ffi::{CString, c_char, c_int, c_void};
use std::fs::OpenOptions;
use std::path::PathBuf;
use std::sync::{Mutex, PoisonError};

use crate::chance;
use crate::choice::{ALGORITHMS, Choice, PROTOCOLS, Path, Tuning};
use crate::communicator::{Communicator, Transfer};
use crate::cost;
use crate::engine::{Reduction, Work, engine, finish};
use crate::exchange::{Group, MOST_RANKS};
use crate::exports::{exports, put};
use crate::faults::{self, Faults, Hold, Moment, scenario};
use crate::function::{Function, Number};
use crate::gpu;
use crate::graph;
use crate::home::home;
use crate::log::Subject;
use crate::numbers::Shape;
use crate::plugin;
use crate::scenario::{Fault, Kind, Phase};
use crate::status::nccl;
use crate::variables::{Read, read_configuration};

/// ncclUniqueId: who meets where.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct UniqueId([u8; 128]);

const MARK: u64 = 0x6e63_636c_7475_6e65;
/// Bytes that a channel's buffers take, towards one peer.
const CHANNEL_BYTES: u64 = 10 << 20;
/// What wakes a link.
const AWAKE_BYTES: u64 = 8 << 20;
/// ncclSum.
const SUM: c_int = 0;
/// Where connections of send and receive are noted, beside those of the algorithms.
const NEIGHBOURS: usize = 100;

impl UniqueId {
    fn new(words: [u64; 4]) -> Self {
        let mut bytes = [0; 128];
        for (place, word) in bytes.chunks_exact_mut(8).zip(words) {
            place.copy_from_slice(&word.to_le_bytes());
        }
        Self(bytes)
    }

    fn word(&self, at: usize) -> u64 {
        self.0.as_chunks::<8>().0.get(at).map_or(0, |word| u64::from_le_bytes(*word))
    }
}

/// A failure with a text for the log and for ncclGetLastError.
fn fail(status: i32, text: &str) -> i32 {
    engine().nccl.fail(text);
    status
}

fn moment(phase: Phase) -> Moment<'static> {
    Moment { phase: Some(phase), ..Moment::default() }
}

/// Faults that end a process or hold it up.
fn stumble(phase: Phase) {
    let (die, hang) = {
        let mut engine = engine();
        (engine.faults.strikes(Kind::Die, moment(phase)), engine.faults.strikes(Kind::Hang, moment(phase)))
    };
    if let Some(fault) = die {
        faults::die(fault);
    }
    if let Some(fault) = hang {
        Hold::of(fault).wait();
    }
}

/// The head of ncclConfig_t, as every release since 2.17 has it.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct Configuration {
    size: usize,
    magic: u32,
    version: u32,
    blocking: c_int,
    cluster_size: c_int,
    channels_min: c_int,
    channels_max: c_int,
}

impl Configuration {
    /// NCCL_API_MAGIC.
    const MAGIC: u32 = 0xcafe_beef;
    /// NCCL_CONFIG_UNDEF_INT.
    const UNSET: c_int = c_int::MIN;

    /// What a caller hands over: the least number of channels, where it asks for one.
    fn channels_min(place: *const Self) -> Result<Option<c_int>, i32> {
        if place.is_null() {
            return Ok(None);
        }
        // SAFETY: by NCCL's header the pointer is to a configuration that says itself how long it is; no release of
        // it is shorter than the size and the magic number.
        let (size, magic) = unsafe { ((*place).size, (*place).magic) };
        if magic != Self::MAGIC {
            return Err(fail(
                nccl::INVALID_ARGUMENT,
                "ncclConfig_t argument not initialized via NCCL_CONFIG_INITIALIZER",
            ));
        }
        if size < size_of::<Self>() {
            return Ok(None);
        }
        // SAFETY: it is as long as what is read.
        let configuration = unsafe { *place };
        let others = [configuration.blocking, configuration.cluster_size];
        if configuration.version < 21_700 || others.iter().any(|value| *value != Self::UNSET) {
            return Err(fail(
                nccl::INTERNAL,
                "the stand-in models no other fields of a configuration than minCTAs and maxCTAs",
            ));
        }
        let (least, most) = (configuration.channels_min, configuration.channels_max);
        match least {
            Self::UNSET if most == Self::UNSET => Ok(None),
            // As 2.28.9 was seen to: it holds one that is set against one that is not.
            1.. if most >= least => Ok(Some(least)),
            _ => Err(fail(
                nccl::INVALID_ARGUMENT,
                &format!("Invalid config min/max channels attribute value {least}/{most}"),
            )),
        }
    }
}

/// Joins the others and works out what this communicator will run.
fn join(ranks: usize, id: UniqueId, rank: usize, channels_min: Option<c_int>) -> Result<usize, i32> {
    let version = scenario().nccl_version;
    let gpu =
        crate::cuda::current().map_err(|_| fail(nccl::UNHANDLED_CUDA, "Cuda failure 201 'invalid device context'"))?;
    if ranks == 0 || ranks > MOST_RANKS || rank >= ranks || id.word(0) != MARK {
        return Err(fail(nccl::INVALID_ARGUMENT, "Invalid rank requested or unique id of another library"));
    }
    read_configuration(version);
    let (launch, position, nonce) = (id.word(1), id.word(2), id.word(3));
    {
        let mut engine = engine();
        engine.nccl.device = gpu;
        if rank == 0 && !std::mem::replace(&mut engine.nccl.has_told_version, true) {
            engine.nccl.log().version(version);
        }
        let flood = engine.faults.strikes(Kind::LogFlood, moment(Phase::Init));
        if let Some(fault) = flood {
            let line = "x".repeat(1000);
            for _ in 0..fault.mebibytes.unwrap_or(100) * 1049 {
                engine.nccl.log().info_always(gpu, &line);
            }
        }
    }
    stumble(Phase::Init);
    let read = {
        let mut engine = engine();
        let engine = &mut *engine;
        let read = engine.nccl.variables.read(version, &mut engine.faults, |name| std::env::var(name).ok());
        for (subject, line) in &read.lines {
            engine.nccl.note(*subject, line);
        }
        read
    };
    refuse_what_is_not_modelled(&read)?;
    let path = Path::between(scenario().transport, |name| read.text(name));
    let graph = {
        let mut engine = engine();
        let file = read.text("NCCL_GRAPH_FILE");
        // Newer releases take the speed of an idle link for its own.
        let is_asleep = version >= 23_005 && engine.host_bytes < AWAKE_BYTES;
        let share = if is_asleep { scenario().idle_links } else { 1.0 };
        let links = if path == Path::Direct { ("NVL", 20.0 * share) } else { ("SYS", 12.0 * share) };
        graph::find(scenario(), file.as_deref(), (ranks, gpu), links, &mut engine.nccl)
    };
    let graph = graph.map_err(|unusable| fail(nccl::SYSTEM, &unusable.0))?;
    let mut tuning = Tuning::new(version, ranks as u32, path == Path::Direct, |name| read.text(name))
        .map_err(|unreadable| fail(nccl::INVALID_USAGE, &unreadable.0))?;
    tuning.go_by(graph.channels, graph.is_fallback, read.number("NCCL_MIN_NCHANNELS").is_some());
    // A variable wins over the configuration.
    if let Some(least) = channels_min.filter(|_| read.number("NCCL_MIN_CTAS").is_none()) {
        engine().nccl.note(Subject::INIT, &format!("Comm config Min CTAs set to {least}"));
        tuning.channels = tuning.channels.max(least.min(if version >= 22_500 { 64 } else { 32 }) as u32);
    }
    for objection in &tuning.objections {
        engine().nccl.note(Subject::ENV, objection);
    }
    let comm = format!("{:#x}", 0x5500_0000_0000_u64 + chance::mix(&[nonce, rank as u64]) % 0x1_0000_0000);
    let about = format!(
        "ncclCommInitRank comm {comm} rank {rank} nranks {ranks} cudaDev {gpu} nvmlDev {gpu} busId {:x}000 commId {nonce:#x}",
        gpu::bus(gpu)
    );
    engine().nccl.note(Subject::INIT, &format!("{about} - Init START"));
    let group = Group::join(&home().state, &format!("comm-{launch}-{position}-{nonce:x}"), ranks, rank, gpu)
        .map_err(|error| fail(nccl::SYSTEM, &format!("ranks cannot meet: {error}")))?;
    if let Some((one, other, device)) = group.duplicate() {
        let address = gpu::bus(device);
        return Err(fail(
            nccl::INVALID_USAGE,
            &format!("Duplicate GPU detected : rank {one} and rank {other} both on CUDA device {address:x}000"),
        ));
    }
    if path == Path::Host && engine().faults.strikes(Kind::ShmFull, Moment::default()).is_some() {
        return Err(fail(
            nccl::SYSTEM,
            "Error: failed to extend /dev/shm/nccl-AbCdEf to 33030532 bytes, error: No space left on device (28)",
        ));
    }
    let plugin = plugin::load(version, read.text("NCCL_TUNER_PLUGIN").as_deref(), nonce, ranks)?;
    tell_shape(version, &tuning);
    let memory = u64::from(tuning.channels) * CHANNEL_BYTES;
    let is_out_of_memory = engine().faults.strikes(Kind::OutOfMemory, moment(Phase::Init)).is_some();
    if is_out_of_memory || memory > gpu::memory(gpu).1 {
        return Err(fail(nccl::UNHANDLED_CUDA, &format!("Failed to CUDA calloc {CHANNEL_BYTES} bytes")));
    }
    let is_on = |name: &str| read.number(name) != Some(0);
    // Connections come with the first use, since 2.22 and where virtual memory can be shared.
    let connects_late = version >= 22_203 && is_on("NCCL_RUNTIME_CONNECT") && is_on("NCCL_CUMEM_ENABLE");
    let uses_files = path == Path::Host && (version < 22_400 || !is_on("NCCL_CUMEM_HOST_ENABLE"));
    let communicator = Communicator {
        group,
        rank,
        launch,
        position,
        tuning,
        path,
        plugin,
        graphs: 0,
        has_event_nodes: is_on("NCCL_GRAPH_MIXING_SUPPORT"),
        is_connected: false,
        told: std::collections::BTreeSet::new(),
        uses_files,
        memory,
        device: gpu,
    };
    let handle = {
        let mut engine = engine();
        let handle = engine.handle();
        engine.communicators.insert(handle, communicator);
        engine.note_used(gpu);
        handle
    };
    if !connects_late {
        connect(handle, crate::choice::RING)?;
        connect(handle, crate::choice::TREE)?;
    }
    engine().nccl.note(Subject::INIT, &format!("{about} - Init COMPLETE"));
    Ok(handle)
}

/// Variables whose effect a test would wait for in vain.
fn refuse_what_is_not_modelled(read: &Read) -> Result<(), i32> {
    let file = Some("NCCL_TOPO_FILE").filter(|name| read.text(name).is_some());
    let named = file.or((read.number("NCCL_COMM_BLOCKING") == Some(0)).then_some("NCCL_COMM_BLOCKING"));
    match named {
        Some(name) => Err(fail(nccl::INTERNAL, &format!("the stand-in does not model {name}"))),
        None => Ok(()),
    }
}

/// Lines about channels and thresholds.
fn tell_shape(version: i32, tuning: &Tuning) {
    let [tree_ll, tree_ll128, tree_simple, ring_ll, ring_ll128, ring_simple] = tuning.thresholds;
    let channels = tuning.channels;
    let shape = if version < 22_000 {
        format!("{channels} coll channels, 0 nvls channels, {channels} p2p channels, 2 p2p channels per peer")
    } else {
        format!(
            "{channels} coll channels, {channels} collnet channels, 0 nvls channels, {channels} p2p channels, \
             2 p2p channels per peer"
        )
    };
    let mut engine = engine();
    let direct = u8::from(tuning.is_direct());
    engine.nccl.note(Subject::INIT, &format!("Check P2P Type isAllDirectP2p {direct} directMode 0 isAllCudaP2p 1"));
    engine.nccl.note(
        Subject::INIT,
        &format!(
            "threadThresholds {tree_ll}/{tree_ll128}/{tree_simple} | {ring_ll}/{ring_ll128}/{ring_simple} | 512 | 512"
        ),
    );
    engine.nccl.note(Subject::INIT, &shape);
}

/// Connects ranks the first time, and tells which way the channels of an algorithm go.
fn connect(handle: usize, algorithm: usize) -> Result<(), i32> {
    let (is_first, uses_files, rank) = {
        let mut engine = engine();
        let communicator = engine.communicators.get_mut(&handle).ok_or(nccl::INVALID_ARGUMENT)?;
        let is_first = !std::mem::replace(&mut communicator.is_connected, true);
        (is_first, communicator.uses_files, communicator.rank)
    };
    if is_first {
        let file = if uses_files { Some(shared_file(handle, rank)?) } else { None };
        stumble(Phase::Connect);
        // Work that is under way would be mistaken for this meeting.
        finish().map_err(|_| nccl::UNHANDLED_CUDA)?;
        let mut engine = engine();
        let communicator = engine.communicators.get_mut(&handle).ok_or(nccl::INVALID_ARGUMENT)?;
        communicator.group.meet().map_err(|_| nccl::SYSTEM)?;
        if let Some(file) = file {
            // The peer has it mapped by now, and needs the name no more.
            let _ = std::fs::remove_file(file);
        }
    }
    let mut engine = engine();
    let engine = &mut *engine;
    let communicator = engine.communicators.get_mut(&handle).ok_or(nccl::INVALID_ARGUMENT)?;
    if communicator.told.insert(algorithm) {
        let version = scenario().nccl_version;
        let ranks = communicator.group.ranks();
        let (rank, next) = (communicator.rank, (communicator.rank + 1) % ranks);
        for channel in 0..communicator.tuning.channels {
            let place = format!("{rank}[{rank}] -> {next}[{next}]");
            let (subject, line) = match communicator.path {
                Path::Direct => (Subject::P2P, format!("Channel {channel:02}/0 : {place} via P2P/CUMEM")),
                Path::Host => {
                    let way = if version >= 23_007 { "SHM/direct" } else { "SHM/direct/direct" };
                    (Subject::SHM, format!("Channel {channel:02} : {place} via {way}"))
                }
                Path::Network => (Subject::NET, format!("Channel {channel:02}/0 : {place} [send] via NET/Socket/0")),
            };
            engine.nccl.note(Subject::INIT.and(subject), &line);
        }
        if algorithm != NEIGHBOURS {
            let which = if algorithm == crate::choice::TREE { "trees" } else { "rings" };
            engine.nccl.note(Subject::INIT, &format!("Connected all {which}"));
        }
    }
    Ok(())
}

/// The file in /dev/shm through which a rank's buffers are shared.
fn shared_file(handle: usize, rank: usize) -> Result<PathBuf, i32> {
    const LETTERS: &[u8] = b"abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789";
    let mut number = chance::mix(&[u64::from(std::process::id()), handle as u64, rank as u64, home().launches()]);
    let name: String = (0..6)
        .map(|_| {
            let letter = LETTERS[(number % LETTERS.len() as u64) as usize];
            number /= LETTERS.len() as u64;
            char::from(letter)
        })
        .collect();
    let path = PathBuf::from(format!("/dev/shm/nccl-{name}"));
    let make = || -> std::io::Result<()> {
        let file = OpenOptions::new().create_new(true).write(true).open(&path)?;
        file.set_len(9_637_888)
    };
    make().map_err(|error| {
        fail(nccl::SYSTEM, &format!("Error while creating shared memory segment {}: {error}", path.display()))
    })?;
    let line = format!("MMAP allocated shareable host buffer {} size 9637888", path.display());
    engine().nccl.note(Subject::SHM, &line);
    Ok(path)
}

/// What runs for a message, after plugin and faults.
fn choose(handle: usize, shape: Shape, bytes: u64, is_captured: bool) -> Result<(Choice, bool), i32> {
    let function = shape.function;
    let mut engine = engine();
    let engine = &mut *engine;
    let communicator = engine.communicators.get(&handle).ok_or(nccl::INVALID_ARGUMENT)?;
    let tuning = &communicator.tuning;
    let mut table = tuning.table_of(function, bytes);
    let channels = match &communicator.plugin {
        Some(plugin) if function != Function::SendRecv => plugin.ask(function, bytes, is_captured, &mut table)?,
        _ => None,
    };
    let Some(mut choice) = tuning.choose_for(function, bytes, &table, channels) else {
        let asked = tuning.asked_for().map(str::to_owned);
        let status = if asked.is_some() { nccl::INVALID_USAGE } else { nccl::INTERNAL };
        engine.nccl.fail(&format!(
            "No algorithm/protocol available for function {} with datatype {}. {}",
            function.name(),
            shape.number.name(),
            asked.unwrap_or_default()
        ));
        return Err(status);
    };
    let about = |choice: Choice| Moment {
        bytes: Some(bytes),
        protocol: Some(choice.protocol),
        function: Some(function),
        ..Moment::default()
    };
    let mut lenient = false;
    for kind in [Kind::Substituted, Kind::Disagree] {
        if let Some(fault) = engine.faults.strikes(kind, about(choice)) {
            choice = replaced(tuning, function, bytes, choice, fault);
            lenient |= fault.effect.as_deref() == Some("wrong-data");
        }
    }
    Ok((choice, lenient))
}

fn replaced(tuning: &Tuning, function: Function, bytes: u64, choice: Choice, fault: &Fault) -> Choice {
    let at = |names: &[&str], wanted: &Option<String>, otherwise: usize| {
        let wanted = wanted.as_deref();
        wanted.and_then(|wanted| names.iter().position(|name| name.eq_ignore_ascii_case(wanted))).unwrap_or(otherwise)
    };
    let algorithm = at(&ALGORITHMS, &fault.run_algorithm, choice.algorithm);
    let protocol = at(&PROTOCOLS, &fault.run_protocol, choice.protocol);
    let other = tuning.with_channels(function, bytes, algorithm, protocol, None);
    Choice { channels: fault.run_channels.unwrap_or(other.channels), ..other }
}

/// The line in which NCCL tells what runs, on rank 0: since 2.24 with the bytes of the count, before with
/// those of the larger buffer.
fn tell_choice(
    version: i32,
    function: Function,
    (count_bytes, bytes): (u64, u64),
    choice: Choice,
    expected_us: f32,
) -> Option<String> {
    let (algorithm, protocol, name) = (choice.algorithm, choice.protocol, function.name());
    match version {
        _ if function == Function::SendRecv => None,
        22_400.. => Some(format!(
            "{name}: {count_bytes} Bytes -> Algo {} proto {} channel{{Lo..Hi}}={{0..{}}}",
            ALGORITHMS[algorithm],
            PROTOCOLS[protocol],
            choice.channels - 1
        )),
        22_300.. => Some(format!("{name}: {bytes} Bytes -> Algo {algorithm} proto {protocol} time {expected_us:.6}")),
        22_000.. => Some(format!("{bytes} Bytes -> Algo {algorithm} proto {protocol} time {expected_us:.6}")),
        _ => None,
    }
}

/// Nanoseconds of a collective on this rank, with everything that makes them longer.
fn nanoseconds(
    faults: &mut Faults,
    communicator: &Communicator,
    function: Function,
    choice: Choice,
    bytes: u64,
    is_captured: bool,
) -> f64 {
    let ranks = communicator.group.ranks() as u32;
    let mut ns = cost::collective_ns(function, choice, bytes, ranks, communicator.tuning.is_direct());
    if communicator.path == Path::Network {
        ns *= 5.0;
    }
    let moment =
        Moment { bytes: Some(bytes), protocol: Some(choice.protocol), function: Some(function), ..Moment::default() };
    for kind in [Kind::SlowRank, Kind::Bimodal, Kind::Drift] {
        for fault in faults.all_that_hold(kind, moment) {
            let factor = fault.factor.unwrap_or(1.0);
            let times = if kind == Kind::Drift { communicator.launch.saturating_sub(1) as i32 } else { 1 };
            ns *= factor.powi(times);
        }
    }
    ns *= communicator.factor();
    match (is_captured, communicator.has_event_nodes) {
        (true, true) => ns + cost::EVENT_NODE_NS,
        (true, false) => ns,
        (false, _) => ns + cost::EAGER_NS,
    }
}

/// Leaves a communicator, at once or when its work is done.
fn leave(communicator: *mut c_void, waits: bool) -> Result<(), i32> {
    let handle = communicator as usize;
    if !engine().communicators.contains_key(&handle) {
        return Err(fail(nccl::INVALID_ARGUMENT, "Attempt to use communicator that does not exist"));
    }
    if waits {
        stumble(Phase::Destroy);
        // A communicator waits for the graphs that hold its operations, without end if need be.
        while engine().communicators.get(&handle).is_some_and(|communicator| communicator.graphs > 0) {
            std::thread::sleep(std::time::Duration::from_millis(5));
        }
        finish().map_err(|_| nccl::UNHANDLED_CUDA)?;
    } else {
        engine().abandon();
    }
    let mut engine = engine();
    if let Some(communicator) = engine.communicators.remove(&handle) {
        engine.note_used(communicator.device);
        if let Some(plugin) = communicator.plugin {
            plugin.end();
            engine.nccl.plugins.leave();
        }
    }
    Ok(())
}

exports! {
    fn ncclGetVersion(version: *mut c_int) {
        put(version, scenario().nccl_version, nccl::INVALID_ARGUMENT)
    }

    fn ncclGetUniqueId(id: *mut UniqueId) {
        let begun = engine().nccl.begun;
        let first = || home().next_launch().map(|launch| (launch, 0));
        let (launch, position) =
            begun.map_or_else(first, Ok).map_err(|error| fail(nccl::SYSTEM, &error.to_string()))?;
        engine().nccl.begun = Some((launch, position + 1));
        let nonce = chance::mix(&[u64::from(std::process::id()), launch, position]);
        put(id, UniqueId::new([MARK, launch, position, nonce]), nccl::INVALID_ARGUMENT)
    }

    fn ncclCommInitRank(communicator: *mut *mut c_void, ranks: c_int, id: UniqueId, rank: c_int) knowing {
        let mut engine = engine();
        engine.faults.rank = Some(rank.max(0) as u32);
        engine.faults.launch = Some(id.word(1));
    } {
        let handle = join(ranks.max(0) as usize, id, rank.max(0) as usize, None)?;
        put(communicator, handle as *mut c_void, nccl::INVALID_ARGUMENT)
    }

    fn ncclCommInitRankConfig(
        communicator: *mut *mut c_void, ranks: c_int, id: UniqueId, rank: c_int, configuration: *mut Configuration,
    ) knowing {
        let mut engine = engine();
        engine.faults.rank = Some(rank.max(0) as u32);
        engine.faults.launch = Some(id.word(1));
    } {
        let channels_min = Configuration::channels_min(configuration)?;
        let handle = join(ranks.max(0) as usize, id, rank.max(0) as usize, channels_min)?;
        put(communicator, handle as *mut c_void, nccl::INVALID_ARGUMENT)
    }

    fn ncclCommDestroy(communicator: *mut c_void) {
        leave(communicator, true)
    }

    fn ncclCommAbort(communicator: *mut c_void) {
        leave(communicator, false)
    }

    fn ncclCommGetAsyncError(communicator: *mut c_void, status: *mut c_int) {
        if !engine().communicators.contains_key(&(communicator as usize)) {
            return Err(nccl::INVALID_ARGUMENT);
        }
        put(status, 0, nccl::INVALID_ARGUMENT)
    }

    fn ncclAllReduce(
        send: *const c_void, receive: *mut c_void, count: usize, kind: c_int, operation: c_int,
        communicator: *mut c_void, stream: *mut c_void,
    ) {
        let shape = shape(Function::AllReduce, kind, operation, 0)?;
        issue(shape, (send as u64, receive as u64), count, communicator as usize, stream as usize)
    }

    fn ncclAllGather(
        send: *const c_void, receive: *mut c_void, count: usize, kind: c_int,
        communicator: *mut c_void, stream: *mut c_void,
    ) {
        let shape = shape(Function::AllGather, kind, SUM, 0)?;
        issue(shape, (send as u64, receive as u64), count, communicator as usize, stream as usize)
    }

    fn ncclReduceScatter(
        send: *const c_void, receive: *mut c_void, count: usize, kind: c_int, operation: c_int,
        communicator: *mut c_void, stream: *mut c_void,
    ) {
        let shape = shape(Function::ReduceScatter, kind, operation, 0)?;
        issue(shape, (send as u64, receive as u64), count, communicator as usize, stream as usize)
    }

    fn ncclBroadcast(
        send: *const c_void, receive: *mut c_void, count: usize, kind: c_int, root: c_int,
        communicator: *mut c_void, stream: *mut c_void,
    ) {
        let shape = shape(Function::Broadcast, kind, SUM, root)?;
        issue(shape, (send as u64, receive as u64), count, communicator as usize, stream as usize)
    }

    fn ncclReduce(
        send: *const c_void, receive: *mut c_void, count: usize, kind: c_int, operation: c_int, root: c_int,
        communicator: *mut c_void, stream: *mut c_void,
    ) {
        let shape = shape(Function::Reduce, kind, operation, root)?;
        issue(shape, (send as u64, receive as u64), count, communicator as usize, stream as usize)
    }

    fn ncclSend(
        send: *const c_void, count: usize, kind: c_int, peer: c_int, communicator: *mut c_void, stream: *mut c_void,
    ) {
        transfer(true, send as u64, (count, kind, peer), communicator as usize, stream as usize)
    }

    fn ncclRecv(
        receive: *mut c_void, count: usize, kind: c_int, peer: c_int, communicator: *mut c_void, stream: *mut c_void,
    ) {
        transfer(false, receive as u64, (count, kind, peer), communicator as usize, stream as usize)
    }

    fn ncclGroupStart() {
        engine().nccl.group.get_or_insert_default();
        Ok(())
    }

    fn ncclGroupEnd() {
        let Some(transfers) = engine().nccl.group.take() else {
            return Err(fail(nccl::INVALID_USAGE, "ncclGroupEnd: not in a group call."));
        };
        end_group(&transfers)
    }

    fn ncclMemAlloc(place: *mut *mut c_void, bytes: usize) {
        let gpu = crate::cuda::current().map_err(|_| nccl::UNHANDLED_CUDA)?;
        // As NCCL does, in whole granules.
        let bytes = bytes.max(1).next_multiple_of(2 << 20);
        if bytes as u64 > gpu::memory(gpu).1 {
            return Err(fail(nccl::UNHANDLED_CUDA, &format!("Failed to CUDA calloc {bytes} bytes")));
        }
        let mut engine = engine();
        let address = engine.memory.allocate(bytes).ok_or(nccl::UNHANDLED_CUDA)?;
        engine.note_used(gpu);
        put(place, address as *mut c_void, nccl::INVALID_ARGUMENT)
    }

    fn ncclMemFree(address: *mut c_void) {
        finish().map_err(|_| nccl::UNHANDLED_CUDA)?;
        let gpu = crate::cuda::current().map_err(|_| nccl::UNHANDLED_CUDA)?;
        let mut engine = engine();
        if !engine.memory.free(address as u64) {
            return Err(nccl::INVALID_ARGUMENT);
        }
        engine.note_used(gpu);
        Ok(())
    }
}

/// What a call is about, if it is modelled.
fn shape(function: Function, kind: c_int, operation: c_int, root: c_int) -> Result<Shape, i32> {
    let number = Number::of(kind).filter(|_| operation == SUM).ok_or_else(|| {
        fail(nccl::INVALID_ARGUMENT, "the stand-in adds up int8, float16, float32 and bfloat16, and nothing else")
    })?;
    Ok(Shape { function, number, root: root.max(0) as usize, shift: 0 })
}

/// Enqueues a collective of so many elements.
fn issue(shape: Shape, (send, receive): (u64, u64), count: usize, handle: usize, stream: usize) -> Result<(), i32> {
    let cuda_trouble = |_| nccl::UNHANDLED_CUDA;
    let is_captured = engine().capture_of(stream).map_err(cuda_trouble)?.is_some();
    if is_captured {
        stumble(Phase::Capture);
    }
    let (rank, ranks) = {
        let engine = engine();
        let communicator = engine.communicators.get(&handle).ok_or(nccl::INVALID_ARGUMENT)?;
        (communicator.rank, communicator.group.ranks())
    };
    if shape.root >= ranks {
        return Err(fail(nccl::INVALID_ARGUMENT, &format!("{} : invalid root {}", shape.function.name(), shape.root)));
    }
    let count_bytes = count * shape.number.size();
    let (send_bytes, receive_bytes) = shape.function.buffers(count_bytes, ranks);
    let bytes = send_bytes.max(receive_bytes);
    let (choice, lenient) = choose(handle, shape, bytes as u64, is_captured)?;
    connect(handle, if shape.function == Function::SendRecv { NEIGHBOURS } else { choice.algorithm })?;
    let mut engine = engine();
    let engine = &mut *engine;
    if !engine.memory.holds(send, send_bytes) || !engine.memory.holds(receive, receive_bytes) {
        engine.nccl.fail(&format!("{} : a buffer is not device memory", shape.function.name()));
        return Err(nccl::INVALID_ARGUMENT);
    }
    let communicator = engine.communicators.get(&handle).ok_or(nccl::INVALID_ARGUMENT)?;
    let ns = nanoseconds(&mut engine.faults, communicator, shape.function, choice, bytes as u64, is_captured);
    if rank == 0 {
        let expected = communicator.tuning.table_of(shape.function, bytes as u64)[choice.algorithm][choice.protocol];
        let counted = (count_bytes as u64, bytes as u64);
        if let Some(line) = tell_choice(scenario().nccl_version, shape.function, counted, choice, expected) {
            engine.nccl.note(Subject::TUNING, &line);
        }
    }
    let reduction = Reduction {
        communicator: handle,
        shape,
        send,
        send_bytes,
        receive,
        receive_bytes,
        bytes,
        ns,
        choice,
        lenient,
        is_captured,
    };
    engine.enqueue(stream, Work::Reduce(reduction)).map_err(cuda_trouble)
}

/// Adds one half of an exchange to the group that was begun.
fn transfer(
    is_send: bool,
    buffer: u64,
    (count, kind, peer): (usize, c_int, c_int),
    communicator: usize,
    stream: usize,
) -> Result<(), i32> {
    let number = shape(Function::SendRecv, kind, SUM, 0)?.number;
    let ranks = engine().communicators.get(&communicator).map(|of| of.group.ranks()).ok_or(nccl::INVALID_ARGUMENT)?;
    let Some(peer) = usize::try_from(peer).ok().filter(|peer| *peer < ranks) else {
        return Err(fail(nccl::INVALID_ARGUMENT, &format!("SendRecv : invalid peer {peer}")));
    };
    let half = Transfer { is_send, buffer, bytes: count * number.size(), kind, peer, communicator, stream };
    if let Some(group) = &mut engine().nccl.group {
        group.push(half);
        return Ok(());
    }
    crate::complain("send and receive outside of a group are not modelled");
    Err(nccl::INTERNAL)
}

/// What a group comes to: every rank sends to one and receives from one, equally far around the ring.
fn end_group(transfers: &[Transfer]) -> Result<(), i32> {
    let (send, receive) = match transfers {
        [] => return Ok(()),
        [send, receive] | [receive, send] if send.is_send && !receive.is_send => (send, receive),
        _ => {
            crate::complain("groups other than one send and one receive are not modelled");
            return Err(nccl::INTERNAL);
        }
    };
    let same = |of: &Transfer| (of.bytes, of.kind, of.communicator, of.stream);
    let (rank, ranks) = engine()
        .communicators
        .get(&send.communicator)
        .map(|of| (of.rank, of.group.ranks()))
        .ok_or(nccl::INVALID_ARGUMENT)?;
    let shift = (send.peer + ranks - rank) % ranks;
    if same(send) != same(receive) || (receive.peer + shift) % ranks != rank {
        crate::complain("an exchange that is no shift around the ring is not modelled");
        return Err(nccl::INTERNAL);
    }
    let shape = Shape { shift, ..shape(Function::SendRecv, send.kind, SUM, 0)? };
    let count = send.bytes / shape.number.size();
    issue(shape, (send.buffer, receive.buffer), count, send.communicator, send.stream)
}

/// NCCL's sentence for a status.
// SAFETY: the name is NCCL's, and no other library of a process that loads this one has it.
#[unsafe(no_mangle)]
#[allow(non_snake_case, reason = "the function keeps its name")]
pub(crate) extern "C" fn ncclGetErrorString(status: c_int) -> *const c_char {
    nccl::words(status).as_ptr()
}

/// The last error of this process; valid until the next call.
// SAFETY: as above.
#[unsafe(no_mangle)]
#[allow(non_snake_case, reason = "the function keeps its name")]
pub(crate) extern "C" fn ncclGetLastError(_communicator: *mut c_void) -> *const c_char {
    static TEXT: Mutex<Option<CString>> = Mutex::new(None);
    let text = engine().nccl.last_error();
    TEXT.lock().unwrap_or_else(PoisonError::into_inner).insert(text).as_ptr()
}

#[cfg(test)]
mod tests {
    use std::ptr::null_mut;
    use std::sync::atomic::{AtomicBool, Ordering};
    use std::time::Duration;

    use super::*;
    use crate::cuda;

    /// Calls as a C program makes them, on a communicator of one rank: the whole life of a graph.
    #[test]
    fn a_communicator_waits_for_the_graphs_that_hold_its_operations() {
        let (mut context, mut stream, mut graph, mut executable, mut event, mut communicator) =
            (null_mut(), null_mut(), null_mut(), null_mut(), null_mut(), null_mut());
        let (mut buffer, mut id) = (0, UniqueId([0; 128]));
        assert_eq!(cuda::cuDevicePrimaryCtxRetain(&raw mut context, 0), 0);
        assert_eq!(cuda::cuCtxSetCurrent(context), 0);
        assert_eq!(cuda::cuStreamCreate(&raw mut stream, 1), 0);
        assert_eq!(cuda::cuEventCreate(&raw mut event, 0), 0);
        assert_eq!(cuda::cuMemAlloc_v2(&raw mut buffer, 4096), 0);
        let ones = [0x3f80_u16; 2048];
        assert_eq!(cuda::cuMemcpyHtoD_v2(buffer, ones.as_ptr().cast(), 4096), 0);
        assert_eq!(ncclGetUniqueId(&raw mut id), 0);
        assert_eq!(ncclCommInitRank(&raw mut communicator, 1, id, 0), 0);
        let sum = |kind| {
            let buffer = buffer as *mut c_void;
            ncclAllReduce(buffer, buffer, 2048, kind, SUM, communicator, stream)
        };
        assert_eq!(sum(8), nccl::INVALID_ARGUMENT, "other types are not modelled");
        assert_eq!(cuda::cuStreamBeginCapture_v2(stream, 1), 0);
        assert_eq!(sum(9), 0);
        assert_eq!(cuda::cuStreamEndCapture(stream, &raw mut graph), 0);
        assert_eq!(cuda::cuGraphInstantiateWithFlags(&raw mut executable, graph, 0), 0);
        assert_eq!(cuda::cuGraphLaunch(executable, stream), 0);
        assert_eq!(cuda::cuEventRecord(event, stream), 0);
        assert_eq!(cuda::cuEventQuery(event), 0, "one rank has nobody to wait for");
        let mut back = [0_u16; 2048];
        assert_eq!(cuda::cuMemcpyDtoH_v2(back.as_mut_ptr().cast(), buffer, 4096), 0);
        assert_eq!(back, ones);
        assert_eq!(cuda::cuGraphDestroy(graph), 0);

        let is_left = AtomicBool::new(false);
        let address = communicator as usize;
        std::thread::scope(|scope| {
            scope.spawn(|| {
                assert_eq!(ncclCommDestroy(address as *mut c_void), 0);
                is_left.store(true, Ordering::SeqCst);
            });
            std::thread::sleep(Duration::from_millis(100));
            assert!(!is_left.load(Ordering::SeqCst), "the executable graph still holds an operation");
            assert_eq!(cuda::cuGraphExecDestroy(executable), 0);
        });
        assert!(is_left.load(Ordering::SeqCst));
        assert_eq!(ncclCommDestroy(communicator), nccl::INVALID_ARGUMENT, "it is gone");
        assert_eq!(cuda::cuMemFree_v2(buffer), 0);
        assert_eq!(cuda::cuDevicePrimaryCtxRelease_v2(0), 0);
    }
}
