//! How near simulated times come to what other people measured.
//!
//! The table of figures is a selection by hand with public sources; `examples/fit_timing.rs` judges the
//! constants at every size, with sizes left out. This holds the constants in the tree to the selection:
//! landmarks one by one, the rest in the median.

use std::collections::BTreeMap;
use std::time::Instant;

use fs_err as fs;
use nccltune::backend::simulated::{MACHINES, SimulatedMachine};
use nccltune::collective::Collective;
use nccltune::nccl_model::timing::{Operation, Timings};
use serde::Deserialize;

/// Largest error of a landmark, and of the median.
const BOUND: f64 = 0.15;

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Figures {
    table: Vec<Table>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Table {
    machine: String,
    gpus: u32,
    source: String,
    #[serde(default)]
    env: BTreeMap<String, String>,
    graph: Option<String>,
    figures: Vec<Figure>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Figure {
    bytes: u64,
    us: f64,
    #[serde(default)]
    landmark: bool,
}

fn figures() -> Vec<Table> {
    toml::from_str::<Figures>(include_str!("timing_figures.toml")).expect("the table").table
}

fn machine(name: &str) -> SimulatedMachine {
    SimulatedMachine::named(name).expect("compiled in").expect("valid")
}

fn time_us(machine: &SimulatedMachine, env: &BTreeMap<String, String>, bytes: u64, gpus: u32) -> (f64, Operation) {
    let (device, link, operation) =
        machine.operation(env, Collective::AllReduce, bytes, gpus).unwrap_or_else(|error| panic!("{bytes}: {error}"));
    let timings = Timings::compiled_in();
    let timing = timings.find(&device, link).unwrap_or_else(|| panic!("{device} over {}", link.name()));
    (timing.time_us(&timings.law, &operation), operation)
}

/// Two rings over all eight GPUs at 24 GB/s each, as the source of the repaired figures describes, and the
/// chains that go with them: NCCL goes on with as many channels as both have.
fn two_rings() -> String {
    let gpus = ["0", "1", "2", "3", "4", "5", "6", "7"].map(|gpu| format!("<gpu dev=\"{gpu}\"/>")).concat();
    let graph = |id: u32, pattern: u32| {
        format!(
            "<graph id=\"{id}\" pattern=\"{pattern}\" crossnic=\"0\" nchannels=\"2\" speedintra=\"24\" \
             speedinter=\"24\" latencyinter=\"0\" typeintra=\"SYS\" typeinter=\"PIX\" samechannels=\"1\">\
             <channel>{gpus}</channel><channel>{gpus}</channel></graph>"
        )
    };
    format!("<graphs version=\"1\">{}{}</graphs>", graph(0, 4), graph(1, 1))
}

#[test]
fn constants_meet_the_figures_that_they_are_judged_by() {
    let folder = tempfile::tempdir().expect("a folder");
    let graph = folder.path().join("two-rings.xml");
    fs::write(&graph, two_rings()).expect("a file");
    let (mut errors, mut landmarks) = (Vec::new(), 0);
    for table in figures() {
        let machine = machine(&table.machine);
        let mut env = table.env.clone();
        if table.graph.is_some() {
            env.insert("NCCL_GRAPH_FILE".to_owned(), graph.to_str().expect("a path").to_owned());
        }
        for Figure { bytes, us, landmark } in &table.figures {
            let (predicted, operation) = time_us(&machine, &env, *bytes, table.gpus);
            let error = predicted / us - 1.0;
            errors.push(error.abs());
            landmarks += usize::from(*landmark);
            assert!(
                !landmark || error.abs() <= BOUND,
                "{} x{}, {bytes} bytes: {predicted:.1} us by {operation:?}, measured {us} us ({})",
                table.machine,
                table.gpus,
                table.source
            );
        }
    }
    errors.sort_by(f64::total_cmp);
    let median = errors[errors.len() / 2];
    assert!(median <= BOUND / 2.0, "median error {median:.3}");
    assert_eq!((errors.len(), landmarks), (60, 12), "the table lost rows");
}

/// Each is something that a curve through the points of one protocol would not show.
#[test]
fn curves_bend_where_real_ones_do() {
    let none = BTreeMap::new();
    let default = |name: &str, bytes: u64| time_us(&machine(name), &none, bytes, 8).0;
    // The default keeps LL past its crossover.
    assert!(default("rtx-pro-6000-x8", 512 << 10) > default("rtx-pro-6000-x8", 1 << 20));
    // The path between the sockets is full at once.
    assert!(default("l40s-x8", 32 << 10) / default("l40s-x8", 16 << 10) > 1.6);
}

fn set(pairs: &[(&str, &str)]) -> BTreeMap<String, String> {
    pairs.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect()
}

#[test]
fn channels_alone_change_nothing_below_64_kib_on_eight_ranks_and_thresholds_do() {
    let machine = machine("rtx-pro-6000-x8");
    let channels = set(&[("NCCL_MIN_NCHANNELS", "16")]);
    let both = set(&[("NCCL_MIN_NCHANNELS", "16"), ("NCCL_THREAD_THRESHOLDS", "-1-1-1+2")]);
    for bytes in [16 << 10, 32 << 10, 48 << 10, (64 << 10) - 256] {
        let (default, alone) = (time_us(&machine, &set(&[]), bytes, 8), time_us(&machine, &channels, bytes, 8));
        assert_eq!(default.1.channels, 1);
        assert_eq!(default, alone, "{bytes} bytes");
        let joint = time_us(&machine, &both, bytes, 8);
        assert!(joint.1.channels >= 4 && joint.0 < default.0, "{bytes} bytes: {joint:?} beside {default:?}");
    }
    let large = 256 << 10;
    assert!(time_us(&machine, &channels, large, 8).0 < time_us(&machine, &set(&[]), large, 8).0);
}

#[test]
fn ll_moves_half_as_much_and_one_channel_does_not_fill_a_link() {
    let machine = machine("h200-x2-host-memory");
    let large = 64 << 20;
    let of = |pairs: &[(&str, &str)]| time_us(&machine, &set(pairs), large, 2).0;
    let ll = ("NCCL_PROTO", "LL");
    let simple = ("NCCL_PROTO", "Simple");
    let (one, many) = (("NCCL_MAX_NCHANNELS", "1"), ("NCCL_MIN_NCHANNELS", "16"));
    let ring = ("NCCL_ALGO", "Ring");
    assert!(of(&[ring, ll, many]) > 1.5 * of(&[ring, simple, many]));
    assert!(of(&[ring, simple, one]) > 1.5 * of(&[ring, simple, many]));
    // More channels cost something where there is nothing to carry.
    let timings = Timings::compiled_in();
    let (_, one) = time_us(&machine, &set(&[ring, ll]), 1024, 2);
    for class in &timings.classes {
        let of = |channels: u32| class.time_us(&timings.law, &Operation { channels, ..one });
        assert!(of(32) > of(1), "{} over {}", class.device, class.link.name());
    }
}

/// Every class answers for every algorithm and protocol at any size a message may have.
#[test]
fn times_are_finite_wherever_a_message_may_go() {
    use nccltune::nccl_model::{Algorithm, Protocol};
    let timings = Timings::compiled_in();
    for class in &timings.classes {
        let name = format!("{} over {}", class.device, class.link.name());
        assert!(!class.source.is_empty(), "{name}: no source");
        assert!(class.source != "none" || class.extrapolated.is_some(), "{name}: neither a source nor a reason");
        for algorithm in Algorithm::ALL {
            for protocol in Protocol::ALL {
                for bytes in [1, 57_344, 1 << 40] {
                    for (ranks, channels) in [(1, 1), (2, 64), (32, 1)] {
                        for collective in [Collective::AllReduce, Collective::AllGather, Collective::Broadcast] {
                            let operation = Operation {
                                collective,
                                bytes,
                                ranks,
                                algorithm,
                                protocol,
                                channels,
                                threads: 96,
                                buffer_bytes: 1 << 20,
                            };
                            let us = class.time_us(&timings.law, &operation);
                            assert!(us.is_finite() && us > 0.0, "{operation:?}: {us}");
                        }
                    }
                }
            }
        }
    }
}

/// The figure is a hundred thousand a second; a test build on a busy machine must reach a tenth of it.
#[test]
fn evaluations_are_cheap() {
    let timings = Timings::compiled_in();
    let operations: Vec<Operation> = MACHINES
        .iter()
        .flat_map(|(name, _)| {
            let machine = machine(name);
            let gpus = machine.machine().gpus.len() as u32;
            [4096_u64, 57_344, 1 << 20].map(|bytes| time_us(&machine, &BTreeMap::new(), bytes, gpus).1)
        })
        .collect();
    let begun = Instant::now();
    let mut count = 0_u32;
    while count < 100_000 {
        for (operation, class) in operations.iter().zip(timings.classes.iter().cycle()) {
            std::hint::black_box(class.time_us(&timings.law, operation));
            count += 1;
        }
    }
    assert!(begun.elapsed().as_secs_f64() < 10.0, "{:?} for {count}", begun.elapsed());
}
