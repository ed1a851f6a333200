//! The real binary on the stand-in for driver and NCCL (`tests/fake-gpu`): whole runs with several
//! ranks, single workers order by order, and every fault that a scenario can ask for.
//!
//! What the tool makes of a fault is tested where that is decided; here, the fault must happen.

use std::collections::{BTreeMap, BTreeSet};
use std::io::{BufRead as _, BufReader, ErrorKind, Read as _, Write as _};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::os::unix::process::ExitStatusExt as _;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use fake_gpu::choice::{ALGORITHMS, PROTOCOLS, Tuning};
use fs_err as fs;
use nccltune::collective::{Collective, DataType, Form, Issue, Placement};
use nccltune::nccl_log::{self, NcclLog, Symptom};
use nccltune::probe::{PROBE_ARGUMENT, ProbeReport};
use nccltune::record::{BufferKind, Event, Flag, PassVariant, PointKey, VerdictKind};
use nccltune::worker::protocol::{
    Answer, CallChoice, ChoiceFate, FailureKind, Order, PROTOCOL, RankGroup, WORKER_ARGUMENT,
};

use crate::command::{Running, Scene, cells, journal_in, manifest_in, recorded, wait_at_most};

/// How long an answer may take that comes. A loaded machine is slow; nothing here waits for a device.
const PATIENCE: Duration = Duration::from_secs(30);
/// How long nothing must happen for a thing to hang.
const A_WHILE: Duration = Duration::from_millis(700);
/// A launch of eight ranks with nine points takes half a second on two idle cores.
const LAUNCH_LIMIT: Duration = Duration::from_secs(10);

/// A folder with the stand-in and its scenario. Tests that take the tool's locks name their machine, so
/// that they do not wait for each other and leave the same few lock files whenever they run.
pub(crate) struct Machine {
    pub(crate) scene: Scene,
}

impl Machine {
    pub(crate) fn new(scenario: &str) -> Self {
        let scene = Scene::new();
        fake_gpu::install(&scene.path("fake"), scenario).expect("a folder with links to the stand-in");
        Self { scene }
    }

    pub(crate) fn library(&self, name: &str) -> String {
        self.scene.path("fake").join(name).display().to_string()
    }

    /// The program, with the stand-in before it.
    pub(crate) fn command(&self, words: &[&str]) -> Command {
        let mut command = self.scene.command(words);
        command.env("LD_LIBRARY_PATH", self.scene.path("fake")).env("NCCLTUNE_ALLOW_FAKE", "1");
        command.env("NCCLTUNE_STATE_DIR", self.scene.path("remembered"));
        command
    }

    /// `nccltune doctor` to its end, as JSON; and what it said.
    pub(crate) fn doctor(&self, more: &str) -> (serde_json::Value, String) {
        let line = format!("doctor --nccl-lib {} --format json {more}", self.library("libnccl.so.2"));
        let output = self.command(&line.split_whitespace().collect::<Vec<_>>()).output().expect("the program starts");
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        (serde_json::from_slice(&output.stdout).unwrap_or_else(|error| panic!("{error}: {said}")), said)
    }

    /// `nccltune tune` to its end; returns its status and what it said.
    pub(crate) fn tune(&self, more: &str) -> (Option<i32>, String) {
        let output = self.tune_command(more).output().expect("the program starts");
        let said = [output.stdout, output.stderr].concat();
        (output.status.code(), String::from_utf8_lossy(&said).into_owned())
    }

    /// The same, left running, with nobody who reads what it says.
    pub(crate) fn start(&self, more: &str) -> Running {
        let mut command = self.tune_command(more);
        command.stdout(Stdio::null()).stderr(Stdio::null());
        command.spawn().expect("the program starts").into()
    }

    /// `nccltune tune`, not started yet.
    pub(crate) fn tune_command(&self, more: &str) -> Command {
        let (nccl, cublaslt) = (self.library("libnccl.so.2"), self.library("libcublasLt.so.13"));
        let line = format!("tune --backend nccl --nccl-lib {nccl} --cublaslt-lib {cublaslt} --out X {more}");
        self.command(&line.split_whitespace().collect::<Vec<_>>())
    }

    fn probe(&self, question: &[&str]) -> ProbeReport {
        let words: Vec<&str> = std::iter::once(PROBE_ARGUMENT).chain(question.iter().copied()).collect();
        let (mut child, mut socket) = start(self.command(&words));
        let mut text = String::new();
        socket.read_to_string(&mut text).expect("the probe ends its side");
        assert_eq!(child.wait().code(), Some(0));
        serde_json::from_str(&text).unwrap_or_else(|error| panic!("{error}: {text}"))
    }

    /// Ranks of a launch, each greeted, with these variables in the environment.
    fn ranks(&self, count: u32, variables: &[(&str, &str)]) -> Ranks<'_> {
        let mut ranks = self.strangers(count, |_| variables.to_vec());
        ranks.hello();
        ranks
    }

    /// What two ranks with these variables log as their communicator is made, and run at 64 KiB, 256 KiB and 1 MiB.
    pub(crate) fn ran_with(&self, variables: &[(&str, &str)]) -> (NcclLog, String, String, String) {
        let mut ranks = self.ranks(2, variables);
        let log = nccl_log::parse(ranks.open(&[]));
        let [small, large, beyond] = [65_536, 262_144, 1 << 20].map(|bytes| ran(&ranks.prepare(bytes, 2), bytes));
        ranks.close();
        ranks.finish();
        (log, small, large, beyond)
    }

    /// What the first of two ranks with these variables logs where no communicator is made.
    pub(crate) fn refused_with(&self, variables: &[(&str, &str)]) -> NcclLog {
        let mut ranks = self.ranks(2, variables);
        let answers = ranks.until_failure();
        failure(answers[0].as_ref()).2
    }

    /// Where a rank's control file lies.
    fn control(&self, rank: u32) -> String {
        self.scene.path(&format!("control-{rank}")).display().to_string()
    }

    /// Processes that nobody has said anything to.
    fn strangers<'a>(&self, count: u32, variables: impl Fn(u32) -> Vec<(&'a str, &'a str)>) -> Ranks<'_> {
        let workers = (0..count)
            .map(|rank| {
                let mut command = self.command(&[WORKER_ARGUMENT]);
                command.env("NCCL_DEBUG", "INFO").env("NCCL_DEBUG_SUBSYS", "INIT,ENV,TUNING");
                command.env("NCCL_DEBUG_FILE", self.scene.path(&format!("rank-{rank}.log")));
                command.envs(variables(rank));
                let (child, socket) = start(command);
                Worker { child, answers: BufReader::new(socket.try_clone().expect("a second handle")), socket }
            })
            .collect();
        Ranks { machine: self, workers, count, devices: |rank| rank, buffers: BufferKind::Plain }
    }
}

fn start(mut command: Command) -> (Running, UnixStream) {
    let (ours, theirs) = UnixStream::pair().expect("a pair of sockets");
    ours.set_read_timeout(Some(PATIENCE)).expect("a socket with a limit");
    command.stdin(Stdio::from(OwnedFd::from(theirs))).stdout(Stdio::null()).stderr(Stdio::null());
    (command.spawn().expect("the program starts").into(), ours)
}

struct Worker {
    child: Running,
    socket: UnixStream,
    answers: BufReader<UnixStream>,
}

impl Worker {
    fn send(&mut self, order: &Order) {
        let line = serde_json::to_string(order).expect("an order is JSON") + "\n";
        // One that has died is found out by its answer.
        let _ = self.socket.write_all(line.as_bytes());
    }

    /// The next answer; `None` if the worker ended without one.
    fn answer(&mut self) -> Option<Answer> {
        loop {
            let mut line = String::new();
            self.answers.read_line(&mut line).expect("an answer in time");
            let answer = (!line.is_empty())
                .then(|| serde_json::from_str(&line).unwrap_or_else(|error| panic!("{error}: {line}")));
            if !matches!(answer, Some(Answer::Progress { .. })) {
                return answer;
            }
        }
    }

    /// Whether nothing is said for a while.
    fn hangs(&mut self) -> bool {
        self.socket.set_read_timeout(Some(A_WHILE)).expect("a socket with a limit");
        let error = loop {
            let mut line = String::new();
            let read = self.answers.read_line(&mut line);
            if !line.contains("\"progress\"") {
                break read.err();
            }
        };
        self.socket.set_read_timeout(Some(PATIENCE)).expect("a socket with a limit");
        error.is_some_and(|error| error.kind() == ErrorKind::WouldBlock)
    }

    /// The signal that ended it.
    fn signal(&mut self) -> Option<i32> {
        self.child.wait().signal()
    }
}

struct Ranks<'a> {
    machine: &'a Machine,
    workers: Vec<Worker>,
    count: u32,
    /// The GPU of each rank.
    devices: fn(u32) -> u32,
    /// Whose memory messages lie in.
    buffers: BufferKind,
}

impl Ranks<'_> {
    fn send(&mut self, order: impl Fn(u32) -> Order) {
        for (rank, worker) in (0..).zip(&mut self.workers) {
            worker.send(&order(rank));
        }
    }

    /// One order to all, and what each answers; a rank that ended answers nothing.
    fn all(&mut self, order: &Order) -> Vec<Option<Answer>> {
        self.send(|_| order.clone());
        self.workers.iter_mut().map(Worker::answer).collect()
    }

    fn greet(&mut self) {
        let (count, devices, nccl) = (self.count, self.devices, self.machine.library("libnccl.so.2"));
        let buffers = self.buffers;
        let log = |rank: u32| self.machine.scene.path(&format!("rank-{rank}.log")).display().to_string();
        let logs: Vec<String> = (0..count).map(log).collect();
        let controls: Vec<String> = (0..count).map(|rank| self.machine.control(rank)).collect();
        self.send(|rank| Order::Hello {
            protocol: PROTOCOL,
            rank,
            ranks: count,
            device: devices(rank),
            nccl_path: nccl.clone(),
            log_path: logs[rank as usize].clone(),
            data_seed: 7,
            largest_bytes: 4 << 20,
            buffers,
            control_path: Some(controls[rank as usize].clone()),
        });
    }

    #[track_caller]
    fn hello(&mut self) {
        self.greet();
        for worker in &mut self.workers {
            let answer = worker.answer();
            assert!(matches!(answer, Some(Answer::Ready { .. })), "{answer:?}");
        }
    }

    /// Sends everybody to a communicator with these variables, and returns without waiting for them.
    #[track_caller]
    fn send_to_communicator(&mut self, variables: &[(&str, Option<&str>)]) {
        let variables: BTreeMap<String, Option<String>> =
            variables.iter().map(|(name, value)| ((*name).to_owned(), value.map(str::to_owned))).collect();
        for answer in self.all(&Order::SetVariables { variables }) {
            assert_eq!(answer, Some(Answer::VariablesSet));
        }
        self.workers[0].send(&Order::UniqueId);
        let Some(Answer::UniqueId { unique_id }) = self.workers[0].answer() else { panic!("no id") };
        self.send(|_| Order::OpenCommunicator { unique_id: unique_id.clone(), group: None, channels_min: None });
    }

    /// Joins a communicator; returns the first rank's log.
    #[track_caller]
    fn open(&mut self, variables: &[(&str, Option<&str>)]) -> String {
        self.send_to_communicator(variables);
        let logs: Vec<String> = self
            .workers
            .iter_mut()
            .map(|worker| match worker.answer() {
                Some(Answer::Opened { log }) => log,
                other => panic!("not open: {other:?}"),
            })
            .collect();
        logs[0].clone()
    }

    fn prepare_order(&self, bytes: u64, collectives: u32) -> Order {
        let point = PointKey::usual(Collective::AllReduce, DataType::Bf16, bytes, self.count);
        Order::Prepare { point, collectives }
    }

    /// Prepares a cell, whose data are checked; returns the first rank's log.
    #[track_caller]
    fn prepare(&mut self, bytes: u64, collectives: u32) -> String {
        let order = self.prepare_order(bytes, collectives);
        let answers = self.all(&order);
        let logs: Vec<String> = answers
            .into_iter()
            .map(|answer| match answer {
                Some(Answer::Prepared { log, .. }) => log,
                other => panic!("not prepared: {other:?}"),
            })
            .collect();
        logs[0].clone()
    }

    /// Times of a few replays, slowest rank each.
    #[track_caller]
    fn replay(&mut self, replays: u32) -> Vec<f64> {
        let mut slowest = vec![0.0_f64; replays as usize];
        for answer in self.all(&Order::Replay { replays }) {
            let Some(Answer::Replayed { replays_us }) = answer else { panic!("not replayed: {answer:?}") };
            for (slowest, time) in slowest.iter_mut().zip(replays_us) {
                *slowest = slowest.max(time);
            }
        }
        slowest
    }

    #[track_caller]
    fn close(&mut self) {
        for answer in self.all(&Order::CloseCommunicator) {
            assert!(matches!(answer, Some(Answer::Closed { .. })), "{answer:?}");
        }
    }

    #[track_caller]
    fn finish(mut self) {
        for answer in self.all(&Order::Finish) {
            assert_eq!(answer, Some(Answer::Finished));
        }
        for worker in &mut self.workers {
            assert_eq!(worker.child.wait().code(), Some(0));
        }
    }

    /// Opens a communicator and prepares a small cell in it, where either may fail; all answers to the
    /// order that did.
    fn until_failure(&mut self) -> Vec<Option<Answer>> {
        self.send_to_communicator(&[]);
        let answers: Vec<Option<Answer>> = self.workers.iter_mut().map(Worker::answer).collect();
        if answers.iter().any(|answer| !matches!(answer, Some(Answer::Opened { .. }))) {
            return answers;
        }
        let order = self.prepare_order(8192, 8);
        self.all(&order)
    }
}

#[track_caller]
fn failure(answer: Option<&Answer>) -> (FailureKind, &str, NcclLog) {
    match answer {
        Some(Answer::Failed { failure, detail, log, .. }) => (*failure, detail, nccl_log::parse(log)),
        other => panic!("{other:?} is no failure"),
    }
}

/// Algorithm, protocol and channels of the last operation of so many bytes.
#[track_caller]
fn ran(log: &str, bytes: u64) -> String {
    let log = nccl_log::parse(log);
    let operation = log.operation(Collective::AllReduce, bytes).expect("an operation in the log");
    let proto = operation.proto.as_deref().unwrap_or("-");
    format!("{}/{proto}/{}", operation.algo, operation.channels.map_or("-".to_owned(), |channels| channels.to_string()))
}

const SPACE: &str = "format = 1\nname = \"tiny\"\ndescription = \"a gain and a loss\"\n\
                     [[arm]]\nname = \"default\"\nenv = {}\n\
                     [[arm]]\nname = \"channels\"\nenv = { NCCL_MIN_NCHANNELS = \"16\" }\n\
                     [[arm]]\nname = \"simple\"\nenv = { NCCL_PROTO = \"Simple\" }\n";

// --- Whole runs.

#[test]
fn tune_finds_what_two_ranks_gain() {
    let machine = Machine::new("devices = 2\nmachine = \"tune-2\"\n");
    machine.scene.write("space.toml", SPACE);
    let (status, said) = machine.tune("--sizes 4K,64K --engine none --space space.toml --no-trial --final-launches 6");
    assert_eq!(status, Some(0), "{said}");
    let choice = machine.scene.choice("X");
    assert_eq!(choice.verdict, VerdictKind::Adopt, "{said}");
    assert_eq!(choice.env, BTreeMap::from([("NCCL_MIN_NCHANNELS".to_owned(), "16".to_owned())]));
    let lines = machine.scene.journal("X");
    let transports: BTreeSet<_> = cells(&lines).filter_map(|cell| cell.effective.transport.clone()).collect();
    assert_eq!(transports, BTreeSet::from(["SHM/direct/direct".to_owned()]));
    assert!(cells(&lines).all(|cell| cell.flags.is_empty()), "nothing is ignored, nothing substituted");
}

#[test]
fn tune_tries_a_forward_pass() {
    let machine = Machine::new("devices = 2\nmachine = \"tune-pass\"\nmemory_mib = 8192\n");
    machine.scene.write("space.toml", SPACE);
    machine.scene.write("config.json", TINY_MODEL);
    let (status, said) = machine.tune(
        "--model config.json --batch 2,64 --chunk 64 --context 128 --engine none --space space.toml \
         --final-launches 6 --trial-launches 4",
    );
    assert_eq!(status, Some(0), "{said}");
    let lines = machine.scene.journal("X");
    let passes: Vec<_> = lines
        .iter()
        .filter_map(|line| match &line.event {
            Event::PassMeasured(pass) => Some(pass),
            _ => None,
        })
        .collect();
    assert!(!passes.is_empty(), "{said}");
    for pass in &passes {
        let mean = |runs: &[f64]| runs.iter().sum::<f64>() / runs.len() as f64;
        assert!(mean(&pass.runs_ms) > mean(&pass.without_collectives_ms), "collectives take time");
    }
    assert!(passes.iter().any(|pass| !pass.crowded_ms.is_empty()), "a pass with products beside its collectives");
}

/// A decoder that is a model in nothing but its shape.
const TINY_MODEL: &str = r#"{
  "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 1024, "intermediate_size": 2048,
  "num_hidden_layers": 2, "num_attention_heads": 8, "num_key_value_heads": 8, "vocab_size": 4096,
  "torch_dtype": "bfloat16", "max_position_embeddings": 4096
}"#;

#[test]
fn eight_ranks_are_launched_in_seconds() {
    let machine = Machine::new("devices = 8\nmachine = \"tune-8\"\n");
    let sizes = "4K,8K,16K,32K,64K,128K,256K,512K,1M";
    let started = Instant::now();
    let (status, said) = machine.tune(&format!("--sizes {sizes} --engine none --space baseline --no-trial"));
    let took = started.elapsed();
    assert_eq!(status, Some(0), "{said}");
    let lines = machine.scene.journal("X");
    let launches: BTreeSet<u32> = cells(&lines).map(|cell| cell.launch).collect();
    assert_eq!(cells(&lines).count(), launches.len() * 9);
    let each = took / launches.len() as u32;
    println!("a launch of 8 ranks with 9 points took {each:?}");
    assert!(each < LAUNCH_LIMIT, "{each:?} a launch");
}

#[test]
fn one_seed_gives_the_same_times_twice_and_another_gives_others() {
    let times = |seed: u32| -> Vec<Vec<f64>> {
        let machine = Machine::new(&format!("devices = 3\nseed = {seed}\nnoise = 0.02\n"));
        let mut ranks = machine.ranks(3, &[]);
        let mut times = Vec::new();
        for _ in 0..2 {
            ranks.open(&[]);
            for bytes in [4096, 100_000] {
                ranks.prepare(bytes, 16);
                times.push(ranks.replay(6));
            }
            ranks.close();
        }
        ranks.finish();
        times
    };
    let first = times(5);
    assert_eq!(first, times(5));
    let differ = |one: &[f64], other: &[f64]| one.iter().zip(other).all(|(one, other)| (one - other).abs() > 1e-9);
    assert!(differ(&first[0], &times(6)[0]), "another seed is another noise");
    assert!(differ(&first[0], &first[2]), "two communicators differ");
    assert!(first[0].windows(2).all(|pair| (pair[0] - pair[1]).abs() > 1e-9), "replays differ: {first:?}");
}

#[test]
fn without_permission_nobody_uses_a_stand_in() {
    let machine = Machine::new("devices = 2\n");
    let refused = |words: &[&str]| {
        let mut command = machine.command(words);
        command.env_remove("NCCLTUNE_ALLOW_FAKE");
        start(command)
    };
    for question in [&["machine"][..], &["nccl"], &["answers", "0"]] {
        let words: Vec<&str> = std::iter::once(PROBE_ARGUMENT).chain(question.iter().copied()).collect();
        let (_child, mut socket) = refused(&words);
        let mut text = String::new();
        socket.read_to_string(&mut text).unwrap();
        let report: ProbeReport = serde_json::from_str(&text).unwrap();
        let error = report.cuda_error.or(report.nccl_error).expect("a refusal");
        assert!(report.fake && error.contains("NCCLTUNE_ALLOW_FAKE"), "{error}");
        assert!(report.gpus.is_empty() && report.nccl_version.is_none());
    }
    let (child, socket) = refused(&[WORKER_ARGUMENT]);
    let worker = Worker { child, answers: BufReader::new(socket.try_clone().unwrap()), socket };
    let mut alone =
        Ranks { machine: &machine, workers: vec![worker], count: 1, devices: |rank| rank, buffers: BufferKind::Plain };
    alone.greet();
    let answer = alone.workers[0].answer();
    let (kind, detail, _) = failure(answer.as_ref());
    assert_eq!(kind, FailureKind::Unsupported);
    assert!(detail.contains("NCCLTUNE_ALLOW_FAKE"), "{detail}");
}

#[test]
fn a_probe_sees_the_machine_of_the_scenario() {
    let machine = Machine::new("devices = 8\nmemory_mib = 2048\nnccl_version = 23003\n");
    let report = machine.probe(&["machine"]);
    assert!(report.fake);
    assert_eq!((report.gpus.len(), report.cuda_devices.len()), (8, 8));
    assert_eq!(report.gpus[0].memory_total_mib, Some(2048));
    let addresses: Vec<&str> = report.gpus.iter().map(|gpu| gpu.pci_bus_id.as_str()).collect();
    assert_eq!(addresses, report.cuda_devices);
    assert_eq!(report.gpus.iter().map(|gpu| &gpu.uuid).collect::<BTreeSet<_>>().len(), 8);
    assert_eq!((report.cuda_error, report.nvml_error), (None, None));
    assert_eq!(machine.probe(&["nccl"]).nccl_version, Some(23_003));
    // The tool resolves links before it loads a library; the scenario is found all the same.
    let real = fs::canonicalize(machine.library("libnccl.so.2")).unwrap();
    assert_eq!(machine.probe(&["nccl", &real.display().to_string()]).nccl_version, Some(23_003));
    assert_eq!(machine.probe(&["answers", "0", "7"]).cuda_error, None);
    // Who uses a GPU shows while it does.
    let used = Machine::new("devices = 2\n");
    let ranks = used.ranks(2, &[]);
    let report = used.probe(&["machine"]);
    assert_eq!(report.gpus[0].process_ids.len(), 1);
    assert!(report.gpus[0].memory_free_mib < report.gpus[0].memory_total_mib);
    ranks.finish();
    assert!(used.probe(&["machine"]).gpus[0].process_ids.is_empty());
}

// --- What NCCL would do.

/// What two real GPUs chose, cell by cell, against the stand-in's rules.
#[test]
fn choices_are_those_that_real_gpus_made() {
    let mut compared = BTreeSet::new();
    for entry in fs::read_dir(recorded("")).unwrap() {
        let run = entry.unwrap().path();
        if !run.is_dir() {
            continue;
        }
        let manifest = manifest_in(&run);
        // Which channels NVLink would get is not among the rules that were written down.
        if !manifest.pins.iter().any(|pin| pin.variable == "NCCL_P2P_DISABLE" && pin.value == "1") {
            continue;
        }
        let arms: BTreeMap<_, _> = manifest.arms.iter().map(|arm| (arm.id.clone(), arm)).collect();
        let lines = journal_in(&run);
        for cell in cells(&lines) {
            let env = &arms[&cell.arm].env;
            let pin = |name: &str| manifest.pins.iter().find(|pin| pin.variable == name).map(|pin| pin.value.clone());
            let tuning = Tuning::new(manifest.nccl.as_ref().unwrap().version, cell.point.ranks, false, |name| {
                env.get(name).cloned().or_else(|| pin(name))
            })
            .unwrap();
            let choice = tuning.own_choice(cell.point.bytes).unwrap();
            let ours = (
                ALGORITHMS[choice.algorithm].to_ascii_lowercase(),
                PROTOCOLS[choice.protocol].to_ascii_lowercase(),
                choice.channels,
                tuning.channels,
            );
            let real = &cell.effective;
            let theirs = (
                real.algo.clone().unwrap(),
                real.proto.clone().unwrap(),
                real.channels.unwrap(),
                real.communicator_channels.unwrap(),
            );
            assert_eq!(ours, theirs, "{}: {env:?} at {} bytes", run.display(), cell.point.bytes);
            compared.insert((env.clone(), cell.point.bytes));
        }
    }
    assert!(compared.len() > 100, "only {} cells were compared", compared.len());
}

/// What NCCL 2.28.9 logged on two H200 with peer access switched off, and what the stand-in logs under the
/// same variables: the same way, channels, choices, and variables with the values as they were read.
#[test]
fn the_log_says_what_real_gpus_logged() {
    const RECORDED: [(&str, &[(&str, &str)]); 7] = [
        ("host-default", &[]),
        ("host-min16", &[("NCCL_MIN_NCHANNELS", "16")]),
        ("host-min32-thr", &[("NCCL_MIN_NCHANNELS", "32"), ("NCCL_THREAD_THRESHOLDS", "-1-1-1+2")]),
        ("host-max2-ll", &[("NCCL_MAX_NCHANNELS", "2"), ("NCCL_PROTO", "LL")]),
        ("host-simple", &[("NCCL_PROTO", "Simple"), ("NCCL_ALGO", "Ring"), ("NCCL_BUFFSIZE", "1048576")]),
        ("host-tree", &[("NCCL_ALGO", "Tree"), ("NCCL_NTHREADS", "256")]),
        ("host-shmfile", &[("NCCL_CUMEM_HOST_ENABLE", "0"), ("NCCL_CUMEM_ENABLE", "0")]),
    ];
    for (name, variables) in RECORDED {
        let file = format!("tests/fake-gpu/recordings/nccl-2.28.9-{name}.log");
        let real = nccl_log::parse(fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join(file)).unwrap());
        assert!(real.operations.len() > 20, "{name}");
        let environment: Vec<(&str, &str)> = [("NCCL_P2P_DISABLE", "1"), ("NCCL_NVLS_ENABLE", "0")]
            .into_iter()
            .chain(variables.iter().copied())
            .collect();
        let machine = Machine::new("nccl_version = 22809\n");
        let mut ranks = machine.ranks(2, &environment);
        let mut text = ranks.open(&[]);
        for bytes in [2048, 43_008, 262_144, 1_048_576, 4_194_304] {
            text.push_str(&ranks.prepare(bytes, 1));
            let ours = nccl_log::parse(&text);
            let of = |log: &NcclLog| {
                let operation = log.operation(Collective::AllReduce, bytes).expect("the operation was logged");
                (operation.algo.clone(), operation.proto.clone(), operation.channels)
            };
            assert_eq!(of(&ours), of(&real), "{name} at {bytes} bytes");
        }
        let ours = nccl_log::parse(&text);
        assert_eq!(ours.transport(), real.transport(), "{name}");
        assert_eq!(ours.communicator_channels(), real.communicator_channels(), "{name}");
        let set = |log: &NcclLog| -> BTreeSet<(String, String)> {
            let lines = log.set_by_environment.iter().filter(|line| !line.variable.starts_with("NCCL_DEBUG"));
            lines.map(|line| (line.variable.clone(), line.value.clone())).collect()
        };
        assert_eq!(set(&ours), set(&real), "{name}");
    }
}

#[test]
fn variables_are_kept_and_read_again_as_each_release_does() {
    for (version, line) in
        [(21_903, None), (22_304, Some("tree/ll/-")), (22_809, Some("tree/ll/4")), (23_003, Some("tree/ll/4"))]
    {
        let machine = Machine::new(&format!("nccl_version = {version}\n"));
        let mut ranks = machine.ranks(2, &[("NCCL_MAX_NCHANNELS", "2")]);
        let first = nccl_log::parse(ranks.open(&[("NCCL_ALGO", Some("Ring"))]));
        assert_eq!(first.communicator_channels(), Some(2), "{version}");
        ranks.close();
        // A number stays what it was in this process; the algorithm is read again.
        let second = nccl_log::parse(ranks.open(&[
            ("NCCL_MAX_NCHANNELS", Some("1")),
            ("NCCL_ALGO", Some("Tree")),
            ("NCCL_PROTO", Some("LL")),
        ]));
        assert_eq!(second.communicator_channels(), Some(2), "{version}");
        let set: Vec<_> = second.set_by_environment.iter().map(|line| line.variable.as_str()).collect();
        assert_eq!(set, ["NCCL_ALGO", "NCCL_PROTO"], "{version}");
        let log = ranks.prepare(65_536, 8);
        match line {
            None => assert!(nccl_log::parse(&log).operations.is_empty(), "2.19 says nothing about what runs"),
            Some(line) => assert_eq!(ran(&log, 65_536).replace("/2", "/4"), line, "{version}"),
        }
        ranks.close();
        ranks.finish();
    }
}

#[test]
fn the_log_names_library_way_and_rank_as_nccl_does() {
    for (version, transport, way) in [
        (22_809, "shm", "SHM/direct/direct"),
        (23_007, "shm", "SHM/direct/direct"),
        (22_809, "p2p", "P2P/CUMEM"),
        (21_903, "p2p", "P2P/CUMEM"),
    ] {
        let machine = Machine::new(&format!("nccl_version = {version}\ntransport = \"{transport}\"\n"));
        let mut ranks = machine.ranks(2, &[]);
        let opened = ranks.open(&[]);
        let log = nccl_log::parse(opened.clone() + &ranks.prepare(4096, 4));
        assert_eq!(log.transport().as_deref(), Some(way), "{version}");
        let library = log.library.as_ref().expect("NCCL's version").version;
        assert_eq!(library, nccltune::machine::NcclVersion::from_code(version));
        assert_eq!((log.inits_complete, log.thresholds), (1, Some([8, 8, 64, 16, 8, 64])));
        // Connections come with the first use since 2.22.
        let at_once = nccl_log::parse(opened).transport().is_some();
        assert_eq!(at_once, version < 22_203);
        ranks.close();
        ranks.finish();
    }
}

#[test]
fn what_nccl_refuses_is_refused() {
    let machine = Machine::new("");
    let mut ranks = machine.ranks(2, &[]);
    ranks.send_to_communicator(&[("NCCL_ALGO", Some("lll"))]);
    let answer = ranks.workers[1].answer();
    let (kind, detail, log) = failure(answer.as_ref());
    assert_eq!(kind, FailureKind::Nccl);
    assert!(detail.contains("ncclCommInitRank returned 5"), "{detail}");
    assert!(log.symptoms.contains(&Symptom::UnknownListWord));
    // Nothing left to run with is found out at the call.
    let mut ranks = machine.ranks(2, &[("NCCL_ALGO", "NVLS")]);
    let answers = ranks.until_failure();
    let (_, detail, log) = failure(answers[0].as_ref());
    assert!(detail.contains("ncclAllReduce returned 5"), "{detail}");
    assert!(log.symptoms.contains(&Symptom::NoAlgorithm));
    // One GPU for two ranks.
    let mut ranks = machine.strangers(2, |_| vec![("CUDA_VISIBLE_DEVICES", "1,0")]);
    ranks.devices = |_| 1;
    ranks.hello();
    let answers = ranks.until_failure();
    let (_, detail, log) = failure(answers[0].as_ref());
    assert!(detail.contains("ncclCommInitRank returned 5"), "{detail}");
    assert!(log.symptoms.contains(&Symptom::DuplicateGpu));
    // What is not modelled.
    let answers = machine.ranks(2, &[("NCCL_TOPO_FILE", "/nowhere.xml")]).until_failure();
    assert!(failure(answers[0].as_ref()).1.contains("does not model NCCL_TOPO_FILE"));
    // More channels than there is memory for.
    let small = Machine::new("memory_mib = 128\n");
    let mut ranks = small.ranks(2, &[("NCCL_MIN_NCHANNELS", "32")]);
    let answers = ranks.until_failure();
    let (_, detail, log) = failure(answers[0].as_ref());
    assert!(detail.contains("ncclCommInitRank returned 1"), "{detail}");
    assert!(log.symptoms.contains(&Symptom::OutOfMemory));
}

/// In control mode algorithm, protocol and channels change from graph to graph inside one communicator; the log says
/// what ran, and the plugin hands back what NCCL expected.
#[test]
fn one_communicator_runs_what_each_graph_is_told() {
    let plugin = std::env::current_exe().unwrap().with_file_name("libnccltune_tuner.so").display().to_string();
    let machine = Machine::new("");
    let controls = [machine.control(0), machine.control(1)];
    let mut ranks = machine.strangers(2, |rank| {
        vec![
            ("NCCL_TUNER_PLUGIN", plugin.as_str()),
            (nccl_abi::control::FILE_VARIABLE, controls[rank as usize].as_str()),
            ("NCCL_MIN_NCHANNELS", "16"),
        ]
    });
    ranks.hello();
    let log = nccl_log::parse(ranks.open(&[]));
    assert!(log.tuner.iter().any(|line| line.contains("Using nccltune")), "{:?}", log.tuner);
    let (ring, tree, ll, ll128, simple) = (1, 0, 0, 1, 2);
    let choice = |algorithm, protocol, channels| Some(CallChoice { algorithm, protocol, channels });
    for (choice, expected, fate) in [
        (None, "ring/ll/8", ChoiceFate::Left),
        (choice(ring, simple, 2), "ring/simple/2", ChoiceFate::Honoured),
        (choice(tree, ll, 8), "tree/ll/8", ChoiceFate::Honoured),
        // What NCCL cannot run here is left alone, and told.
        (choice(ring, ll128, 4), "ring/ll/8", ChoiceFate::Unavailable),
        (choice(ring, ll, 16), "ring/ll/16", ChoiceFate::Honoured),
        (None, "ring/ll/8", ChoiceFate::Left),
    ] {
        for answer in ranks.all(&Order::Choose { choice }) {
            assert_eq!(answer, Some(Answer::Chosen));
        }
        // Data are checked as for any other cell.
        assert_eq!(ran(&ranks.prepare(65_536, 8), 65_536), expected);
        ranks.replay(2);
        for answer in ranks.all(&Order::ReadControl) {
            let Some(Answer::Control { fate: told, decisions, last_bytes, table_us }) = answer else {
                panic!("{answer:?}")
            };
            assert_eq!((told, last_bytes, table_us.len()), (fate, 65_536, 21));
            assert!(table_us[3] > 0.0 && table_us[4] < 0.0, "ring has LL and no LL128 here: {table_us:?}");
            assert!(decisions > 0);
        }
    }
    ranks.close();
    ranks.finish();
    // Without the plugin's control file in its environment a worker's choice leads nowhere, and the plugin says so.
    let mut ranks = machine.ranks(2, &[("NCCL_TUNER_PLUGIN", &plugin)]);
    let answers = ranks.until_failure();
    assert!(failure(answers[0].as_ref()).2.tuner.iter().any(|line| line.contains("names no table")));
}

/// That one is loaded and asked is shown in `tables`, with the project's own.
#[test]
fn a_tuner_plugin_that_is_not_there_changes_nothing_but_the_log() {
    for version in [22_403, 22_809, 23_003] {
        let machine = Machine::new(&format!("nccl_version = {version}\n"));
        let mut ranks = machine.ranks(2, &[("NCCL_TUNER_PLUGIN", "/nowhere/libplugin.so")]);
        let log = nccl_log::parse(ranks.open(&[]));
        assert!(log.tuner.iter().any(|line| line.contains("Could not find")), "{:?}", log.tuner);
        assert_eq!(ran(&ranks.prepare(65_536, 8), 65_536), "ring/ll/4", "{version}");
        ranks.close();
        ranks.finish();
    }
}

#[test]
fn sums_are_exact_for_every_number_of_ranks_and_shape_of_message() {
    let machine = Machine::new("devices = 8\n");
    for count in [1, 2, 3, 5, 8] {
        let mut ranks = machine.ranks(count, &[]);
        ranks.open(&[]);
        // The worker checks every element: below, at and above its period, and after chains.
        for (bytes, collectives) in [(2, 1), (4096, 64), (131_042, 20), (131_044, 64), (400_000, 3), (4 << 20, 16)] {
            ranks.prepare(bytes, collectives);
            ranks.replay(3);
        }
        ranks.close();
        ranks.finish();
    }
}

/// Prepares a cell on all ranks; returns the first rank's log.
#[track_caller]
fn prepared(ranks: &mut Ranks<'_>, point: PointKey, collectives: u32) -> String {
    let answers = ranks.all(&Order::Prepare { point, collectives });
    let logs: Vec<String> = answers
        .into_iter()
        .map(|answer| match answer {
            Some(Answer::Prepared { log, .. }) => log,
            other => panic!("{point} is not prepared: {other:?}"),
        })
        .collect();
    logs[0].clone()
}

/// The worker checks every element of every collective, type and form: below, at and above its period.
#[test]
fn every_collective_is_exact_in_every_type_and_form() {
    let machine = Machine::new("devices = 8\n");
    for count in [2, 3, 8] {
        let mut ranks = machine.ranks(count, &[]);
        ranks.open(&[]);
        for collective in Collective::ALL {
            for dtype in DataType::ALL {
                for placement in [Placement::InPlace, Placement::OutOfPlace] {
                    if placement == Placement::InPlace && !collective.works_in_place() {
                        continue;
                    }
                    for issue in [Issue::Captured, Issue::Eager] {
                        let whole = collective.granularity_bytes(dtype, count);
                        // Eight ranks share two cores at times; what is special about them is their number.
                        let sizes = [(1, 1), (10_000, 64), (600_000, 3)];
                        for (bytes, collectives) in if count == 8 { &sizes[1..2] } else { &sizes[..] } {
                            let (bytes, collectives) = (*bytes, *collectives);
                            let bytes = u64::next_multiple_of(bytes, whole);
                            let form = Form { issue, placement };
                            let point = PointKey { collective, dtype, bytes, ranks: count, form };
                            let log = nccl_log::parse(prepared(&mut ranks, point, collectives));
                            let ran = log.operation_of(point);
                            assert_eq!(ran.is_some(), collective != Collective::SendRecv, "{point}");
                            assert!(ranks.replay(3).iter().all(|us| *us > 0.0), "{point}");
                        }
                    }
                }
            }
        }
        ranks.close();
        ranks.finish();
    }
}

#[test]
fn eager_calls_take_longer_than_captured_ones() {
    let machine = Machine::new("noise = 0.0\n");
    let mut ranks = machine.ranks(2, &[]);
    ranks.open(&[]);
    for collective in Collective::ALL {
        let captured = PointKey::usual(collective, DataType::Bf16, 8192, 2);
        let mut us = |point| {
            prepared(&mut ranks, point, 64);
            ranks.replay(3)[0]
        };
        let eager = PointKey { form: captured.form.eager(), ..captured };
        assert!(us(eager) > 1.02 * us(captured), "{collective}");
    }
    ranks.close();
    ranks.finish();
}

/// Two pairs of four ranks, each with a communicator of its own and data of its own.
#[test]
fn a_part_of_the_ranks_forms_a_communicator_of_its_own() {
    let machine = Machine::new("devices = 4\n");
    let mut ranks = machine.ranks(4, &[]);
    let mut ids = Vec::new();
    for _ in 0..2 {
        ranks.workers[0].send(&Order::UniqueId);
        let Some(Answer::UniqueId { unique_id }) = ranks.workers[0].answer() else { panic!("no id") };
        ids.push(unique_id);
    }
    let group = |rank: u32| RankGroup { number: rank / 2, rank: rank % 2, ranks: 2 };
    ranks.send(|rank| Order::OpenCommunicator {
        unique_id: ids[rank as usize / 2].clone(),
        group: Some(group(rank)),
        channels_min: None,
    });
    for worker in &mut ranks.workers {
        let answer = worker.answer();
        assert!(matches!(answer, Some(Answer::Opened { .. })), "{answer:?}");
    }
    for collective in Collective::ALL {
        prepared(&mut ranks, PointKey::usual(collective, DataType::Fp16, 64_000, 2), 8);
        ranks.replay(2);
    }
    // Of all four ranks there is no communicator.
    let point = PointKey::usual(Collective::AllGather, DataType::Bf16, 4096, 4);
    for answer in ranks.all(&Order::Prepare { point, collectives: 1 }) {
        assert!(failure(answer.as_ref()).1.contains("another number of ranks"), "{answer:?}");
    }
}

#[test]
fn a_check_repeats_with_fresh_values_and_finds_the_one_that_goes_wrong() {
    let point = PointKey::usual(Collective::AllGather, DataType::Int8, 300_000, 2);
    let check = |machine: &Machine, point, repeats| {
        let mut ranks = machine.ranks(2, &[]);
        ranks.open(&[]);
        ranks.all(&Order::Check { point, collectives: 4, repeats })
    };
    let machine = Machine::new("");
    for answer in check(&machine, point, 5) {
        assert!(matches!(answer, Some(Answer::Checked { .. })), "{answer:?}");
    }
    let third = "kind = \"wrong-sum\"\ncollective = \"AllGather\"\nat = 4";
    // The first strikes while connecting, and is overwritten.
    for answer in check(&faulty(third), point, 5) {
        let (kind, detail, _) = failure(answer.as_ref());
        assert_eq!(kind, FailureKind::WrongResult);
        assert!(detail.contains("1 of ") && detail.contains("in repeat 3 of 5"), "{detail}");
    }
    let others = PointKey::usual(Collective::AllReduce, DataType::Int8, 300_000, 2);
    for answer in check(&faulty(third), others, 5) {
        assert!(matches!(answer, Some(Answer::Checked { .. })), "another collective is not concerned: {answer:?}");
    }
}

#[test]
fn wrong_data_show_in_every_collective_and_place() {
    for collective in Collective::ALL {
        let machine = faulty(&format!("kind = \"wrong-sum\"\ncollective = \"{}\"\nrank = 0", collective.log_name()));
        for form in [Form::usual(collective), Form::usual(collective).placed(Placement::OutOfPlace).eager()] {
            let mut ranks = machine.ranks(2, &[]);
            ranks.open(&[]);
            let bytes = 16 * 1024;
            let point = PointKey { form, ..PointKey::usual(collective, DataType::Fp32, bytes, 2) };
            let order = Order::Prepare { point, collectives: 4 };
            ranks.send(|_| order.clone());
            let answer = ranks.workers[0].answer();
            assert_eq!(failure(answer.as_ref()).0, FailureKind::WrongResult, "{point}");
        }
    }
}

#[test]
fn messages_lie_in_whatever_memory_the_framework_uses() {
    for buffers in BufferKind::ALL {
        let machine = Machine::new("memory_mib = 1024\n");
        let mut ranks = machine.strangers(2, |_| Vec::new());
        ranks.buffers = buffers;
        ranks.hello();
        ranks.open(&[]);
        for collective in Collective::ALL {
            prepared(&mut ranks, PointKey::usual(collective, DataType::Bf16, 4 << 20, 2), 4);
            ranks.replay(2);
        }
        ranks.close();
        ranks.finish();
        // Each asks in its own way.
        let call = match buffers {
            BufferKind::Plain => "cuMemAlloc_v2",
            BufferKind::Vmm => "cuMemMap",
            BufferKind::Nccl => "ncclMemAlloc",
        };
        let machine = faulty(&format!("kind = \"error\"\ncall = \"{call}\"\ncode = 2\nrank = 1"));
        let mut ranks = machine.strangers(2, |_| Vec::new());
        ranks.buffers = buffers;
        ranks.greet();
        let answers: Vec<_> = ranks.workers.iter_mut().map(Worker::answer).collect();
        assert!(matches!(answers[0], Some(Answer::Ready { .. })));
        failure(answers[1].as_ref());
    }
    // Memory runs out in every kind.
    for buffers in BufferKind::ALL {
        let machine = Machine::new("memory_mib = 7\n");
        let mut ranks = machine.strangers(1, |_| Vec::new());
        ranks.buffers = buffers;
        ranks.greet();
        let answer = ranks.workers[0].answer();
        let (kind, ..) = failure(answer.as_ref());
        let expected = if buffers == BufferKind::Nccl { FailureKind::Nccl } else { FailureKind::OutOfMemory };
        assert_eq!(kind, expected, "{buffers:?}");
    }
}

// --- Faults.

/// A machine where this goes wrong.
fn faulty(fault: &str) -> Machine {
    Machine::new(&format!("[[fault]]\n{fault}\n"))
}

#[test]
fn a_scenario_that_nobody_understands_fails_every_call() {
    let machine = Machine::new("[[fault]]\nkind = \"sulk\"\n");
    let report = machine.probe(&["machine"]);
    assert!(report.cuda_error.is_some() && report.nvml_error.is_some(), "{report:?}");
}

#[test]
fn errors_have_the_status_and_words_of_the_scenario() {
    let machine = faulty(
        "kind = \"error\"\ncall = \"ncclCommInitRank\"\ncode = 1\nrank = 1\n\
         text = \"Cuda failure 217 'peer access is not supported between these two devices'\"",
    );
    let mut ranks = machine.ranks(2, &[]);
    ranks.send_to_communicator(&[]);
    let answer = ranks.workers[1].answer();
    let (kind, detail, log) = failure(answer.as_ref());
    assert_eq!(kind, FailureKind::Nccl);
    assert!(detail.contains("ncclCommInitRank returned 1") && detail.contains("Cuda failure 217"), "{detail}");
    assert!(log.symptoms.contains(&Symptom::PeerAccessUnsupported));
    assert!(ranks.workers[0].hangs(), "the other rank waits for it");

    let machine = faulty("kind = \"error\"\ncall = \"cuStreamSynchronize\"\ncode = 700\nat = 2");
    let mut ranks = machine.ranks(2, &[]);
    let answers = ranks.until_failure();
    let (kind, detail, _) = failure(answers[0].as_ref());
    assert_eq!(kind, FailureKind::Cuda);
    assert!(detail.contains("CUDA_ERROR_ILLEGAL_ADDRESS"), "{detail}");
}

#[test]
fn a_fault_strikes_only_where_everything_it_names_holds() {
    let machine = faulty(
        "kind = \"error\"\ncall = \"ncclCommInitRank\"\ncode = 2\nlaunches = [2, 2]\nwhen = { NCCL_PROTO = \"LL\", NCCL_ALGO = \"\" }",
    );
    let strikes = |variables: &[(&str, &str)]| {
        let answers = machine.ranks(2, variables).until_failure();
        matches!(answers[0], Some(Answer::Failed { .. }))
    };
    let launches = [1, 2, 3].map(|_| strikes(&[("NCCL_PROTO", "LL")]));
    assert_eq!(launches, [false, true, false]);
    let machine = faulty(
        "kind = \"error\"\ncall = \"ncclCommInitRank\"\ncode = 2\nwhen = { NCCL_PROTO = \"LL\", NCCL_ALGO = \"\" }",
    );
    let strikes = |variables: &[(&str, &str)]| {
        let answers = machine.ranks(2, variables).until_failure();
        matches!(answers[0], Some(Answer::Failed { .. }))
    };
    assert!(strikes(&[("NCCL_PROTO", "LL")]));
    assert!(!strikes(&[("NCCL_PROTO", "Simple")]));
    assert!(!strikes(&[("NCCL_PROTO", "LL"), ("NCCL_ALGO", "Ring")]));
}

#[test]
fn ranks_hang_where_they_are_told_to() {
    // In the communicator: nobody gets in.
    let machine = faulty("kind = \"hang\"\nphase = \"init\"\nrank = 1");
    let mut ranks = machine.ranks(2, &[]);
    ranks.send_to_communicator(&[]);
    assert!(ranks.workers.iter_mut().all(Worker::hangs));
    // In the third collective: the first one alone and the graph of eight after it.
    let machine = faulty("kind = \"hang\"\nphase = \"collective\"\nrank = 0\nat = 3");
    let mut ranks = machine.ranks(2, &[]);
    ranks.open(&[]);
    let order = ranks.prepare_order(8192, 8);
    ranks.send(|_| order.clone());
    assert!(ranks.workers.iter_mut().all(Worker::hangs));
    // On the way out.
    let machine = faulty("kind = \"hang\"\nphase = \"destroy\"\nrank = 0");
    let mut ranks = machine.ranks(2, &[]);
    ranks.open(&[]);
    ranks.prepare(8192, 8);
    ranks.send(|_| Order::CloseCommunicator);
    assert!(ranks.workers[0].hangs());
    assert!(matches!(ranks.workers[1].answer(), Some(Answer::Closed { .. })));
    // For a time only.
    let machine = faulty("kind = \"hang\"\nphase = \"context\"\nseconds = 0.2");
    machine.ranks(2, &[]).finish();
}

#[test]
fn ranks_die_where_they_are_told_to() {
    for (phase, signal, number) in [
        ("context", "SEGV", 11),
        ("init", "KILL", 9),
        ("capture", "ABRT", 6),
        ("collective", "KILL", 9),
        ("destroy", "SEGV", 11),
    ] {
        let machine = faulty(&format!("kind = \"die\"\nphase = \"{phase}\"\nsignal = \"{signal}\"\nrank = 1"));
        let mut ranks = machine.strangers(2, |_| Vec::new());
        ranks.greet();
        if phase != "context" {
            for worker in &mut ranks.workers {
                worker.answer();
            }
            ranks.send_to_communicator(&[]);
            if phase != "init" {
                for worker in &mut ranks.workers {
                    worker.answer();
                }
                let order = ranks.prepare_order(8192, 8);
                ranks.send(|_| order.clone());
                ranks.send(|_| Order::CloseCommunicator);
            }
        }
        assert_eq!(ranks.workers[1].signal(), Some(number), "{phase}");
    }
}

#[test]
fn a_rank_that_dies_while_connecting_leaves_its_file_in_shared_memory() {
    let ours = |log: &str| -> Vec<String> {
        let mark = "/dev/shm/nccl-";
        log.match_indices(mark).map(|(at, _)| log[at..at + mark.len() + 6].to_owned()).collect()
    };
    let files = |fault: &str| -> Vec<String> {
        let machine = Machine::new(fault);
        // The name shows under SHM, which workers do not ask for.
        let variables = vec![("NCCL_CUMEM_HOST_ENABLE", "0"), ("NCCL_DEBUG_SUBSYS", "INIT,SHM")];
        let mut ranks = machine.strangers(2, |_| variables.clone());
        ranks.hello();
        ranks.open(&[]);
        let order = ranks.prepare_order(8192, 8);
        ranks.send(|_| order.clone());
        if fault.is_empty() {
            assert!(ranks.workers.iter_mut().all(|worker| worker.answer().is_some()));
        } else {
            assert_eq!(ranks.workers[1].signal(), Some(9));
        }
        (0..2).flat_map(|rank| ours(&machine.scene.read(&format!("rank-{rank}.log")))).collect()
    };
    let whole = files("");
    assert_eq!(whole.len(), 2);
    assert!(whole.iter().all(|file| !Path::new(file).exists()), "{whole:?}");
    let killed = files("[[fault]]\nkind = \"die\"\nphase = \"connect\"\nrank = 1\n");
    let left: Vec<_> = killed.iter().filter(|file| Path::new(file).exists()).collect();
    assert!(!left.is_empty(), "{killed:?}");
    for file in left {
        fs::remove_file(file).unwrap();
    }
}

#[test]
fn wrong_sums_show_on_the_ranks_and_messages_that_are_named() {
    /// Which ranks are wrong; a right one then waits for those that ended over it.
    #[track_caller]
    fn check(fault: &str, bytes: u64, variables: &[(&str, &str)], wrong: [bool; 2]) {
        let machine = faulty(fault);
        let mut ranks = machine.ranks(2, variables);
        ranks.open(&[]);
        let order = ranks.prepare_order(bytes, 8);
        ranks.send(|_| order.clone());
        for (worker, is_wrong) in ranks.workers.iter_mut().zip(wrong) {
            if is_wrong {
                assert_eq!(failure(worker.answer().as_ref()).0, FailureKind::WrongResult, "{fault}");
            } else if wrong.contains(&true) {
                assert!(worker.hangs(), "{fault}");
            } else {
                assert!(matches!(worker.answer(), Some(Answer::Prepared { .. })), "{fault}");
            }
        }
    }
    check("kind = \"wrong-sum\"", 8192, &[], [true, true]);
    check("kind = \"wrong-sum\"\nrank = 1", 8192, &[], [false, true]);
    // Also where a message repeats and only one period is added up.
    check("kind = \"wrong-sum\"\nrank = 0", 4 << 20, &[], [true, false]);
    check("kind = \"wrong-sum\"\nabove_bytes = 8192", 8192, &[], [false, false]);
    check("kind = \"wrong-sum\"\nabove_bytes = 8191", 8192, &[], [true, true]);
    check("kind = \"wrong-sum\"\nprotocol = \"Simple\"", 8192, &[], [false, false]);
    check("kind = \"wrong-sum\"\nprotocol = \"Simple\"", 8192, &[("NCCL_PROTO", "Simple")], [true, true]);
    check("kind = \"wrong-sum\"\nprobability = 0.0", 8192, &[], [false, false]);
}

#[test]
fn a_killed_rank_leaves_its_gpu_busy() {
    let killed = |fault: &str| -> Machine {
        let machine = faulty(&format!("{fault}\nkind = \"busy-after-kill\"\nrank = 1"));
        let mut ranks = machine.ranks(2, &[]);
        for worker in &mut ranks.workers {
            worker.child.signal(nix::sys::signal::Signal::SIGKILL);
            worker.child.wait();
        }
        machine
    };
    let machine = killed("mebibytes = 9000");
    let free: Vec<_> = machine.probe(&["machine"]).gpus.iter().map(|gpu| gpu.memory_free_mib).collect();
    assert_eq!(free, [Some(16_384), Some(7384)]);
    let hanging = |machine: &Machine| {
        let (child, socket) = start(machine.command(&[PROBE_ARGUMENT, "answers", "1"]));
        Worker { child, answers: BufReader::new(socket.try_clone().unwrap()), socket }.hangs()
    };
    let machine = killed("call = \"cuMemcpyHtoDAsync_v2\"");
    assert!(hanging(&machine));
    assert_eq!(machine.probe(&["answers", "0"]).cuda_error, None);
    let machine = killed("call = \"cuDevicePrimaryCtxRetain\"\nseconds = 2.0");
    assert!(hanging(&machine));
    wait_at_most(PATIENCE, "the GPU answers again", || (!hanging(&machine)).then_some(()));
}

#[test]
fn questions_hang_or_are_not_supported() {
    let machine = faulty("kind = \"probe-hang\"\ncall = \"nvmlDeviceGetCount_v2\"");
    let (child, socket) = start(machine.command(&[PROBE_ARGUMENT, "machine"]));
    assert!(Worker { child, answers: BufReader::new(socket.try_clone().unwrap()), socket }.hangs());
    let machine = faulty("kind = \"probe-not-supported\"\ncall = \"nvmlDeviceGetUtilizationRates\"");
    let report = machine.probe(&["machine"]);
    assert_eq!(report.gpus[0].utilization_percent, None);
    assert!(report.gpus[0].memory_total_mib.is_some());
}

#[test]
fn memory_and_shared_memory_run_out() {
    let machine = faulty("kind = \"out-of-memory\"\nphase = \"context\"\nrank = 0");
    let mut ranks = machine.strangers(2, |_| Vec::new());
    ranks.greet();
    let answer = ranks.workers[0].answer();
    assert_eq!(failure(answer.as_ref()).0, FailureKind::OutOfMemory);
    // Without a fault, too, where a GPU is too small.
    let small = Machine::new("memory_mib = 7\n");
    let mut ranks = small.strangers(1, |_| Vec::new());
    ranks.greet();
    let answer = ranks.workers[0].answer();
    assert_eq!(failure(answer.as_ref()).0, FailureKind::OutOfMemory);
    for (fault, status, symptom) in [
        ("kind = \"out-of-memory\"\nphase = \"init\"", 1, Symptom::OutOfMemory),
        ("kind = \"shm-full\"", 2, Symptom::SharedMemoryFailed),
    ] {
        let machine = faulty(fault);
        let answers = machine.ranks(2, &[]).until_failure();
        let (_, detail, log) = failure(answers[0].as_ref());
        assert!(detail.contains(&format!("ncclCommInitRank returned {status}")), "{detail}");
        assert!(log.symptoms.contains(&symptom), "{log:?}");
    }
}

#[test]
fn variables_are_ignored_and_choices_replaced_and_the_tool_can_see_it() {
    let machine = Machine::new(
        "devices = 2\nmachine = \"tune-flags\"\n\
         [[fault]]\nkind = \"ignored-variable\"\nvariable = \"NCCL_MIN_NCHANNELS\"\n\
         [[fault]]\nkind = \"substituted\"\nrun_protocol = \"LL\"\nwhen = { NCCL_PROTO = \"Simple\" }\n",
    );
    machine.scene.write("space.toml", SPACE);
    let (status, said) = machine.tune("--sizes 64K --engine none --space space.toml --no-trial --final-launches 6");
    assert_eq!(status, Some(0), "{said}");
    let arms: BTreeMap<_, _> =
        manifest_in(&machine.scene.path("X")).arms.iter().map(|arm| (arm.id.clone(), arm.name.clone())).collect();
    let lines = machine.scene.journal("X");
    let flags: BTreeSet<(String, Vec<Flag>)> =
        cells(&lines).map(|cell| (arms[&cell.arm].clone(), cell.flags.clone())).collect();
    let expected = [("channels", vec![Flag::Ignored]), ("default", vec![]), ("simple", vec![Flag::Substituted])];
    assert_eq!(flags, expected.into_iter().map(|(name, flags)| (name.to_owned(), flags)).collect());
}

#[test]
fn ranks_that_disagree_hang_or_compute_nonsense() {
    let machine = faulty("kind = \"disagree\"\nrank = 1\nrun_protocol = \"Simple\"");
    let mut ranks = machine.ranks(2, &[]);
    ranks.open(&[]);
    let order = ranks.prepare_order(8192, 8);
    ranks.send(|_| order.clone());
    assert!(ranks.workers.iter_mut().all(Worker::hangs));
    let machine = faulty("kind = \"disagree\"\nrank = 1\nrun_channels = 3\neffect = \"wrong-data\"");
    let answers = machine.ranks(2, &[]).until_failure();
    assert!(answers.iter().all(|answer| failure(answer.as_ref()).0 == FailureKind::WrongResult));
    // Without any fault, too, where ranks were given other variables.
    let machine = Machine::new("");
    let mut ranks = machine.strangers(2, |rank| if rank == 0 { vec![] } else { vec![("NCCL_PROTO", "Simple")] });
    ranks.hello();
    ranks.open(&[]);
    let order = ranks.prepare_order(8192, 8);
    ranks.send(|_| order.clone());
    assert!(ranks.workers.iter_mut().all(Worker::hangs));
}

#[test]
fn times_are_slow_drift_and_have_two_modes() {
    /// Microseconds of a replay in each of several launches.
    fn times(scenario: &str, launches: u32) -> Vec<f64> {
        let machine = Machine::new(&format!("noise = 0.0\n{scenario}"));
        (0..launches)
            .map(|_| {
                let mut ranks = machine.ranks(2, &[]);
                ranks.open(&[]);
                ranks.prepare(8192, 32);
                let time = ranks.replay(1)[0];
                ranks.close();
                ranks.finish();
                time
            })
            .collect()
    }
    let plain = times("", 2);
    assert!((plain[0] - plain[1]).abs() < 1e-9, "no noise: {plain:?}");
    let slow = times("[[fault]]\nkind = \"slow-rank\"\nrank = 1\nfactor = 2.0\n", 1);
    assert!(slow[0] > 1.5 * plain[0], "{slow:?} and {plain:?}");
    let drifting = times("[[fault]]\nkind = \"drift\"\nfactor = 1.1\n", 4);
    assert!(
        (drifting[0] - plain[0]).abs() < 1e-9 && drifting.windows(2).all(|pair| pair[1] > 1.05 * pair[0]),
        "{drifting:?}"
    );
    let modes = times("[[fault]]\nkind = \"bimodal\"\nfactor = 1.5\nprobability = 0.5\n", 10);
    let slow = modes.iter().filter(|time| **time > 1.2 * plain[0]).count();
    assert!((1..10).contains(&slow), "{modes:?}");
}

#[test]
fn logs_and_streams_are_flooded() {
    let machine = faulty("kind = \"log-flood\"\nmebibytes = 3\nrank = 0");
    let mut ranks = machine.ranks(2, &[]);
    ranks.open(&[]);
    let length = |rank: u32| fs::metadata(machine.scene.path(&format!("rank-{rank}.log"))).unwrap().len();
    assert!(length(0) > 3 << 20 && length(1) < 1 << 16, "{} and {}", length(0), length(1));
    let machine = faulty("kind = \"garbage\"");
    let mut command = machine.command(&[PROBE_ARGUMENT, "answers", "0"]);
    let (ours, theirs) = UnixStream::pair().unwrap();
    command.stdin(Stdio::from(OwnedFd::from(theirs)));
    let output = command.output().unwrap();
    drop(ours);
    assert!(String::from_utf8(output.stdout).is_err() && String::from_utf8(output.stderr).is_err());
}

/// Passes in which a side stream is forked and joined take as long as their longer branch.
#[test]
fn a_pass_with_a_side_stream_is_captured_and_timed() {
    use nccltune::record::{PassStep, PassStream};
    let machine = Machine::new("memory_mib = 8192\n");
    let mut ranks = machine.ranks(2, &[]);
    ranks.open(&[]);
    let steps = vec![PassStep::Product { rows: 4, inputs: 512, columns: 512 }, PassStep::Reduce { elements: 4 * 512 }];
    let mut mean = |stream: PassStream, captured: bool, variant: PassVariant| {
        let cublaslt_path = machine.library("libcublasLt.so.13");
        for answer in ranks.all(&Order::PreparePass { steps: steps.clone(), stream, captured, cublaslt_path }) {
            assert!(matches!(answer, Some(Answer::PassPrepared { .. })), "{answer:?}");
        }
        let mut means = Vec::new();
        for answer in ranks.all(&Order::ReplayPass { variant, replays: 5 }) {
            let Some(Answer::PassReplayed { replays_us, .. }) = answer else { panic!("{answer:?}") };
            means.push(replays_us.iter().sum::<f64>() / 5.0);
        }
        means[0]
    };
    let on_one = mean(PassStream::Compute, true, PassVariant::Full);
    let on_two = mean(PassStream::Side, true, PassVariant::Full);
    assert!((on_one / on_two - 1.0).abs() < 0.1, "a collective waits for the product either way");
    assert!(mean(PassStream::Compute, false, PassVariant::Full) > on_one, "without a graph every call costs");
    assert!(mean(PassStream::Compute, true, PassVariant::WithoutCollectives) < on_one);
    let crowded = mean(PassStream::Side, true, PassVariant::Crowded);
    assert!(crowded > 0.5 * on_one, "{crowded} and {on_one}");
    ranks.close();
    ranks.finish();
}
