//! The real binary as a child of its own: workers and probes as the supervisor starts them, over a
//! socket pair on file descriptor 0.

use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::process::Stdio;
use std::time::Duration;

use nccltune::probe::{PROBE_ARGUMENT, ProbeReport};
use nccltune::worker::protocol::{Answer, FailureKind, Order, PROTOCOL, WORKER_ARGUMENT, WorkPhase};

use crate::command::{Running, Scene, wait_at_most};

/// How long a child may take to notice that nobody is left.
const SOON: Duration = Duration::from_secs(2);

/// A child with this end of its socket.
fn start(scene: &Scene, words: &[&str]) -> (Running, UnixStream) {
    let (ours, theirs) = UnixStream::pair().expect("a pair of sockets");
    ours.set_read_timeout(Some(Duration::from_secs(20))).expect("a socket with a limit");
    let mut command = scene.command(words);
    command.stdin(Stdio::from(OwnedFd::from(theirs))).stdout(Stdio::null()).stderr(Stdio::null());
    (command.spawn().expect("the program starts").into(), ours)
}

fn status_soon(child: &mut Running, what: &str) -> Option<i32> {
    wait_at_most(SOON, what, || child.ended()).code()
}

/// Everything a child still says.
fn rest(socket: &UnixStream) -> Vec<Answer> {
    BufReader::new(socket)
        .lines()
        .map(|line| line.expect("the child ends its side"))
        .map(|line| serde_json::from_str(&line).unwrap_or_else(|error| panic!("{error}: {line}")))
        .collect()
}

fn hello() -> Order {
    hello_in(PROTOCOL)
}

/// In a version of the protocol.
fn hello_in(protocol: u32) -> Order {
    Order::Hello {
        protocol,
        rank: 0,
        ranks: 2,
        device: 0,
        nccl_path: "/nowhere/libnccl.so.2".to_owned(),
        log_path: "/nowhere/nccl.log".to_owned(),
        data_seed: 1,
        largest_bytes: 4096,
        buffers: nccltune::record::BufferKind::Plain,
        control_path: None,
    }
}

fn frame(order: &Order) -> String {
    serde_json::to_string(order).expect("an order is JSON") + "\n"
}

fn failure(answer: &Answer) -> (FailureKind, &str) {
    match answer {
        Answer::Failed { failure, detail, .. } => (*failure, detail),
        other => panic!("{other:?} is no failure"),
    }
}

#[test]
fn a_worker_ends_when_its_parent_closes_the_socket() {
    let scene = Scene::new();
    let (mut worker, socket) = start(&scene, &[WORKER_ARGUMENT]);
    assert!(worker.ended().is_none());
    drop(socket);
    let status = status_soon(&mut worker, "the worker notices that its parent is gone");
    assert_eq!(status, Some(86), "the status that says so");
}

#[test]
fn a_worker_whose_parent_goes_in_the_middle_of_an_order_ends_too() {
    let scene = Scene::new();
    let (mut worker, mut socket) = start(&scene, &[WORKER_ARGUMENT]);
    socket.write_all(b"{\"order\":\"hel").unwrap();
    drop(socket);
    let status = status_soon(&mut worker, "the worker notices that its parent is gone");
    assert!(matches!(status, Some(1 | 86)), "{status:?}");
}

#[test]
fn a_worker_does_not_wait_without_a_socket() {
    let scene = Scene::new();
    let mut worker: Running =
        scene.command(&[WORKER_ARGUMENT]).stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap().into();
    let status = status_soon(&mut worker, "a worker that somebody typed ends");
    assert_ne!(status, Some(0));
}

#[test]
fn a_worker_answers_nonsense_with_a_protocol_failure_and_ends() {
    let wrong_protocol = hello_in(PROTOCOL + 1);
    let frames: Vec<(String, &str)> = vec![
        ("\n".to_owned(), "unreadable order"),
        ("sing\n".to_owned(), "unreadable order"),
        ("{\"order\":\"sing\"}\n".to_owned(), "unknown variant"),
        ("{\"order\":\"hello\",\"protocol\":1}\n".to_owned(), "missing field"),
        ("{\"order\":\"finish\"} {}\n".to_owned(), "unreadable order"),
        (frame(&Order::Finish), "expected hello"),
        (frame(&Order::UniqueId), "expected hello"),
        (frame(&wrong_protocol), "this worker speaks"),
        // Longer than an order may be: cut, and then no JSON.
        (format!("\"{}\"\n", "x".repeat(2 << 20)), "unreadable order"),
        (format!("{}\n", "[".repeat(100_000)), "unreadable order"),
    ];
    let scene = Scene::new();
    for (frame, says) in frames {
        let (mut worker, mut socket) = start(&scene, &[WORKER_ARGUMENT]);
        // A worker may end before it has read all of a long frame.
        let _ = socket.write_all(frame.as_bytes());
        let mut answers = BufReader::new(socket.try_clone().unwrap());
        let mut line = String::new();
        answers.read_line(&mut line).unwrap();
        let shown: String = frame.chars().take(40).collect();
        let answer: Answer = serde_json::from_str(&line).unwrap_or_else(|error| panic!("{shown}: {error}: {line:?}"));
        let (kind, detail) = failure(&answer);
        assert_eq!(kind, FailureKind::Protocol, "{shown}");
        assert!(detail.contains(says), "{shown}: {detail}");
        assert_eq!(status_soon(&mut worker, "the worker ends after a failure"), Some(1), "{shown}");
    }
}

#[test]
fn a_worker_refuses_a_rank_that_cannot_be() {
    let scene = Scene::new();
    for (rank, ranks) in [(2, 2), (0, 10_000)] {
        let (mut worker, mut socket) = start(&scene, &[WORKER_ARGUMENT]);
        let order = frame(&hello())
            .replace("\"rank\":0", &format!("\"rank\":{rank}"))
            .replace("\"ranks\":2", &format!("\"ranks\":{ranks}"));
        socket.write_all(order.as_bytes()).unwrap();
        let answers = rest(&socket);
        assert_eq!(answers.len(), 1);
        assert_eq!(failure(&answers[0]).0, FailureKind::Unsupported, "{answers:?}");
        assert_eq!(status_soon(&mut worker, "the worker ends after a failure"), Some(1));
    }
}

#[test]
fn a_worker_without_cuda_says_so_and_ends() {
    let scene = Scene::new();
    if probe(&scene, &["machine"]).cuda_library {
        eprintln!("skipped: libcuda.so.1 can be loaded here, and this test is about machines without it");
        return;
    }
    let (mut worker, mut socket) = start(&scene, &[WORKER_ARGUMENT]);
    socket.write_all(frame(&hello()).as_bytes()).unwrap();
    let answers = rest(&socket);
    // It says what it begins before it touches the first library, which may take long or never come back.
    let [Answer::Progress { phase: WorkPhase::Context }, failed] = answers.as_slice() else { panic!("{answers:?}") };
    let (kind, detail) = failure(failed);
    assert_eq!(kind, FailureKind::Cuda);
    assert!(detail.contains("libcuda.so.1"), "{detail}");
    assert_eq!(status_soon(&mut worker, "the worker ends after a failure"), Some(1));
}

/// What a probe answers: one line, whatever the machine.
fn probe(scene: &Scene, question: &[&str]) -> ProbeReport {
    let words: Vec<&str> = std::iter::once(PROBE_ARGUMENT).chain(question.iter().copied()).collect();
    let (mut child, mut socket) = start(scene, &words);
    let mut text = String::new();
    socket.read_to_string(&mut text).expect("the probe ends its side");
    assert_eq!(child.wait().code(), Some(0), "{question:?}");
    assert_eq!(text.matches('\n').count(), 1, "{text}");
    assert!(text.ends_with('\n'), "{text}");
    serde_json::from_str(&text).unwrap_or_else(|error| panic!("{error}: {text}"))
}

#[test]
fn a_probe_answers_with_one_line_of_json() {
    let scene = Scene::new();
    let machine = probe(&scene, &["machine"]);
    // What cannot be found out is an error text, never a guess.
    assert!(machine.cuda_library || machine.cuda_error.is_some(), "{machine:?}");
    assert!(!machine.gpus.is_empty() || machine.nvml_error.is_some() || machine.driver.is_some(), "{machine:?}");
    let missing = probe(&scene, &["nccl", "/nowhere/libnccl.so.2"]);
    assert!(missing.nccl_version.is_none());
    assert!(missing.nccl_error.unwrap().contains("/nowhere/libnccl.so.2"));
    scene.write("libnccl.so.2", "no library");
    let fake = scene.path("libnccl.so.2").display().to_string();
    assert!(probe(&scene, &["nccl", &fake]).nccl_error.is_some());
}

#[test]
fn a_probe_that_is_asked_nothing_sensible_says_nothing() {
    let scene = Scene::new();
    for question in [&[][..], &["weather"], &["machine", "twice"], &["answers", "first"], &["nccl", "a", "b"]] {
        let words: Vec<&str> = std::iter::once(PROBE_ARGUMENT).chain(question.iter().copied()).collect();
        let (mut child, mut socket) = start(&scene, &words);
        let mut text = String::new();
        socket.read_to_string(&mut text).unwrap();
        assert_eq!((child.wait().code(), text.as_str()), (Some(2), ""), "{question:?}");
    }
}
