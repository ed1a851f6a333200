//! Fits the constants of `search-spaces/timings.toml`, and says how far they are off at what was left out.
//!
//!     cargo run --example fit_timing -- DATA_DIR [--write search-spaces/timings.toml]
//!
//! `DATA_DIR` holds three tables that are no part of this project: `allreduce-default-latency.csv`
//! (the nccl-tests rows of AIConfigurator's performance database), `h200x2-nvlink-sweep.csv` (one sweep
//! with nccl-tests over two H200) and `field-latency-tables.csv` (tables that people published). The
//! recorded runs of this repository are used as well.
//!
//! Everything is fitted three times for the figures: once with all sizes, and twice with every other
//! power of two left out, so that each size is predicted once by constants that never saw it.
#![expect(
    clippy::print_stdout,
    clippy::disallowed_methods,
    reason = "a stand-alone program that prints a table and times itself"
)]

use std::collections::{BTreeMap, BTreeSet};
use std::error::Error;
use std::path::{Path, PathBuf};
use std::time::Instant;

use clap::Parser;
use fs_err as fs;
use nccltune::backend::simulated::SimulatedMachine;
use nccltune::collective::Collective;
use nccltune::nccl_model::timing::{Law, Link, LinkTiming, Operation, ProtocolLaw, Rates, Timings};
use nccltune::nccl_model::{Algorithm, Protocol};
use serde::Deserialize;

#[derive(Parser)]
struct Arguments {
    /// The folder with the tables.
    data: PathBuf,
    /// Where the constants go.
    #[arg(long)]
    write: Option<PathBuf>,
}

type Failure = Box<dyn Error>;
type Environment = BTreeMap<String, String>;

/// What a row is used for beside the fit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    /// A default of nccl-tests: the bound on errors is about these.
    Default,
    /// The sweep: the rank correlation is about these.
    Sweep,
    /// A recorded run of this repository.
    Recorded,
    /// A published table.
    Field,
}

#[derive(Debug, Clone)]
struct Row {
    kind: Kind,
    curve: String,
    class: (&'static str, Link),
    operation: Operation,
    us: f64,
    weight: f64,
}

impl Row {
    /// Which of the two halves leaves this row's size out: powers of two in turn.
    fn half(&self) -> u32 {
        self.operation.bytes.ilog2() % 2
    }
}

/// What a machine makes of a message under an environment; the machine's own when `gpus` is all of them.
struct Chooser {
    machines: BTreeMap<String, SimulatedMachine>,
}

impl Chooser {
    fn row(
        &mut self,
        (kind, curve, weight): (Kind, &str, f64),
        (machine, gpus): (&str, u32),
        environment: &Environment,
        (bytes, us): (u64, f64),
    ) -> Result<Option<Row>, Failure> {
        if !self.machines.contains_key(machine) {
            let known = SimulatedMachine::named(machine).ok_or(format!("no machine {machine}"))??;
            self.machines.insert(machine.to_owned(), known);
        }
        let machine = &self.machines[machine];
        let Ok((device, link, operation)) = machine.operation(environment, Collective::AllReduce, bytes, gpus) else {
            return Ok(None);
        };
        let device = DEVICES.iter().find(|known| **known == device).ok_or(format!("no prior for {device}"))?;
        let class = (*device, link);
        Ok(Some(Row { kind, curve: curve.to_owned(), class, operation, us, weight }))
    }
}

const DEVICES: [&str; 5] = ["h200", "rtx-pro-6000", "l40s", "rtx-4090", "a100-pcie"];

fn environment(pairs: &[(&str, &str)]) -> Environment {
    pairs.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect()
}

fn read<T: for<'de> Deserialize<'de>>(path: &Path) -> Result<Vec<T>, Failure> {
    Ok(csv::Reader::from_reader(fs::File::open(path)?).deserialize().collect::<Result<_, _>>()?)
}

#[derive(Deserialize)]
struct DefaultLine {
    device: String,
    backend: String,
    op: String,
    n_gpus: u32,
    bytes: u64,
    latency_us: f64,
}

fn defaults(data: &Path, chooser: &mut Chooser, rows: &mut Vec<Row>) -> Result<(), Failure> {
    for line in read::<DefaultLine>(&data.join("allreduce-default-latency.csv"))? {
        let sizes = 1 << 10..=16 << 20;
        if line.backend != "nccl-tests" || line.op != "all_reduce" || !sizes.contains(&line.bytes) {
            continue;
        }
        let machine = match line.device.as_str() {
            device if device.contains("H200") => "h200-x8-nvlink",
            device if device.contains("RTX PRO 6000") => "rtx-pro-6000-x8",
            device if device.contains("L40S") => "l40s-x8",
            _ => continue,
        };
        let curve =
            format!("default {} x{}", machine.rsplit_once("-x8").map_or(machine, |(name, _)| name), line.n_gpus);
        let what = (Kind::Default, curve.as_str(), 3.0);
        let place = (machine, line.n_gpus);
        rows.extend(chooser.row(what, place, &Environment::new(), (line.bytes, line.latency_us))?);
    }
    Ok(())
}

#[derive(Deserialize)]
struct SweepLine {
    config: String,
    bytes: u64,
    in_place_us: f64,
}

/// "p2p-Ring-LL-ch4" as variables.
fn sweep_environment(config: &str) -> Environment {
    let mut set = Environment::new();
    for part in config.split('-') {
        let (variable, value) = match part {
            "Ring" | "Tree" => ("NCCL_ALGO", part),
            "LL" | "LL128" | "Simple" => ("NCCL_PROTO", part),
            _ => match (part.get(..2), part.get(2..)) {
                (Some("ch"), Some(channels)) => {
                    set.insert("NCCL_MAX_NCHANNELS".to_owned(), channels.to_owned());
                    ("NCCL_MIN_NCHANNELS", channels)
                }
                (Some("nt"), Some(threads)) => ("NCCL_NTHREADS", threads),
                (Some("bs"), Some(bytes)) if bytes.parse::<u64>().is_ok() => ("NCCL_BUFFSIZE", bytes),
                _ => continue,
            },
        };
        set.insert(variable.to_owned(), value.to_owned());
    }
    if config.starts_with("seed") {
        set.extend(environment(&[
            ("NCCL_ALGO", "Ring"),
            ("NCCL_PROTO", "LL"),
            ("NCCL_MIN_NCHANNELS", "16"),
            ("NCCL_MAX_NCHANNELS", "16"),
        ]));
    }
    set
}

fn sweep(data: &Path, chooser: &mut Chooser, rows: &mut Vec<Row>) -> Result<(), Failure> {
    for line in read::<SweepLine>(&data.join("h200x2-nvlink-sweep.csv"))? {
        let machine = if line.config.starts_with("shm") { "h200-x2-host-memory" } else { "h200-x8-nvlink" };
        let set = sweep_environment(&line.config);
        let what = (Kind::Sweep, line.config.as_str(), 0.5);
        rows.extend(chooser.row(what, (machine, 2), &set, (line.bytes, line.in_place_us))?);
    }
    Ok(())
}

#[derive(Deserialize)]
struct RecordedLine {
    arm: String,
    bytes: u64,
    median_us: f64,
    algo: String,
    proto: String,
    channels: u32,
}

fn recorded(chooser: &mut Chooser, rows: &mut Vec<Row>) -> Result<(), Failure> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("results/recorded");
    let mut differing = BTreeSet::new();
    for run in ["h200x2-host-memory", "h200x2-host-memory-bench", "h200x2-host-memory-kimi-space"] {
        for line in read::<RecordedLine>(&folder.join(run).join("summary.csv"))? {
            let mut set = match line.arm.as_str() {
                "copied-recipe" => environment(&[
                    ("NCCL_PROTO", "LL"),
                    ("NCCL_ALGO", "Ring"),
                    ("NCCL_MAX_NCHANNELS", "16"),
                    ("NCCL_BUFFSIZE", "16777216"),
                    ("NCCL_NTHREADS", "512"),
                ]),
                "default" => Environment::new(),
                grid => grid
                    .split(' ')
                    .filter_map(|part| part.split_once('='))
                    .map(|(name, value)| (format!("NCCL_{name}"), value.to_owned()))
                    .collect(),
            };
            set.insert("NCCL_P2P_DISABLE".to_owned(), "1".to_owned());
            let what = (Kind::Recorded, line.arm.as_str(), 0.5);
            let Some(mut row) = chooser.row(what, ("h200-x2-host-memory", 2), &set, (line.bytes, line.median_us))?
            else {
                continue;
            };
            let operation = &mut row.operation;
            let said = (operation.algorithm.name(), operation.protocol.name(), operation.channels);
            if said != (&line.algo, &line.proto, line.channels) {
                differing.insert(format!(
                    "{} {} {said:?} {} {} {}",
                    line.arm, line.bytes, line.algo, line.proto, line.channels
                ));
            }
            // What ran is known here; the model is asked for the threads alone.
            operation.channels = line.channels;
            operation.algorithm = Algorithm::ALL.into_iter().find(|a| a.name() == line.algo).ok_or("an algorithm")?;
            operation.protocol = Protocol::ALL.into_iter().find(|p| p.name() == line.proto).ok_or("a protocol")?;
            rows.push(row);
        }
    }
    for line in &differing {
        println!("the model and a recorded run disagree: {line}");
    }
    Ok(())
}

#[derive(Deserialize)]
struct FieldLine {
    source: String,
    hw: String,
    ngpus: String,
    env: String,
    size_bytes: u64,
    time_us: Option<f64>,
}

fn field(data: &Path, chooser: &mut Chooser, rows: &mut Vec<Row>) -> Result<(), Failure> {
    for line in read::<FieldLine>(&data.join("field-latency-tables.csv"))? {
        let sys = line.env.contains("NCCL_P2P_LEVEL=SYS");
        let machine = if line.hw.contains("Turin direct attach") {
            if line.env.contains("GRAPH_FILE") { "turin-repaired" } else { "turin" }
        } else if line.hw.starts_with("4x RTX 4090 PCIe, docker") || line.source.ends_with("nccl/issues/1530") {
            "rtx-4090-x8"
        } else if line.hw.starts_with("4x RTX 4090 PCIe Gen4, P2P-patched") {
            "rtx-4090-x8-p2p"
        } else if line.hw.starts_with("4x A100-PCIE") {
            "a100-pcie-x8"
        } else {
            continue;
        };
        let (Some(us), Ok(gpus)) = (line.time_us, line.ngpus.parse::<u32>()) else { continue };
        if line.size_bytes < 1024 && line.size_bytes != 8 || line.env.contains("BUFFSIZE=1048576") {
            continue;
        }
        let mut set = Environment::new();
        if sys {
            set.insert("NCCL_P2P_LEVEL".to_owned(), "SYS".to_owned());
        }
        let what = (Kind::Field, line.hw.as_str(), if machine.starts_with("turin") { 3.0 } else { 1.0 });
        rows.extend(match machine {
            // NCCL_GRAPH_FILE is not needed to know what it brings: two rings of 24 GB/s make four
            // channels, and LL up to 512 KiB.
            "turin-repaired" => {
                set.extend(environment(&[("NCCL_ALGO", "Ring"), ("NCCL_PROTO", "LL"), ("NCCL_MIN_NCHANNELS", "4")]));
                chooser.row(what, ("rtx-pro-6000-x8-turin", gpus), &set, (line.size_bytes, us))?
            }
            "turin" => chooser.row(what, ("rtx-pro-6000-x8-turin", gpus), &set, (line.size_bytes, us))?,
            "rtx-4090-x8-p2p" => {
                let row = chooser.row(what, ("rtx-4090-x8", gpus), &Environment::new(), (line.size_bytes, us))?;
                row.map(|row| Row { class: (row.class.0, Link::PcieSockets), ..row })
            }
            machine => chooser.row(what, (machine, gpus), &set, (line.size_bytes, us))?,
        });
    }
    // rtx6kpro, optimization/nccl-tuning.md: bus bandwidth at 32 MB on the same Turin box, without and
    // with NCCL_MIN_NCHANNELS=8.
    for (channels, bus_gb_per_s) in [("2", 22.2), ("8", 37.6)] {
        let bytes = 32 << 20;
        let us = Collective::AllReduce.bus_factor(8) * bytes as f64 / (bus_gb_per_s * 1e3);
        let set = environment(&[("NCCL_P2P_LEVEL", "SYS"), ("NCCL_MIN_NCHANNELS", channels)]);
        rows.extend(chooser.row(
            (Kind::Field, "turin 32 MiB", 3.0),
            ("rtx-pro-6000-x8-turin", 8),
            &set,
            (bytes, us),
        )?);
    }
    Ok(())
}

/// Where a fit begins, and what it stays near where the rows say little.
fn priors() -> Timings {
    let law = |start_us: f64, thread_exponent: f64| ProtocolLaw {
        start_us,
        thread_exponent,
        tree_rate: 0.8,
        tree_step: 1.0,
        tree_chunk_kib: 256.0,
        tree_fill: 0.8,
    };
    let rates = |step_us, channel_gb_per_s, link_gb_per_s| Rates { step_us, channel_gb_per_s, link_gb_per_s };
    let class = |device: &str, link: Link| {
        // By kind of link: latency of a step with LL, GB/s of a channel and of the link.
        let generation: f64 = if matches!(device, "rtx-pro-6000" | "h200") { 1.0 } else { 0.5 };
        let narrow = generation.max(0.7);
        let (step, channels, links) = match link {
            Link::Nvlink => (0.8, [13.0, 17.0, 20.0], [450.0, 350.0, 370.0]),
            Link::Pcie => (0.9, [12.0, 12.0, 14.0], [45.0; 3]),
            Link::PcieSockets => (1.4, [12.0, 12.0, 18.0], [42.0; 3]),
            // As two H200 have it.
            Link::HostMemory => (2.0, [5.5, 8.0, 15.0], [38.0, 34.0, 34.0]),
        };
        LinkTiming {
            device: device.to_owned(),
            link,
            source: String::new(),
            extrapolated: None,
            overlap: 1.4,
            channels_us: 0.2,
            nvls_gb_per_s: (link == Link::Nvlink).then_some(170.0),
            ll: rates(step, channels[0] * narrow, links[0] * generation),
            ll128: rates(step * 2.5, channels[1] * narrow, links[1] * generation),
            simple: rates(step * 3.0, channels[2] * narrow, links[2] * generation),
        }
    };
    let classes = [
        ("h200", Link::Nvlink),
        ("h200", Link::HostMemory),
        ("rtx-pro-6000", Link::Pcie),
        ("rtx-pro-6000", Link::PcieSockets),
        ("rtx-pro-6000", Link::HostMemory),
        ("l40s", Link::Pcie),
        ("l40s", Link::PcieSockets),
        ("l40s", Link::HostMemory),
        ("rtx-4090", Link::PcieSockets),
        ("rtx-4090", Link::HostMemory),
        ("a100-pcie", Link::Pcie),
        ("a100-pcie", Link::PcieSockets),
        ("a100-pcie", Link::HostMemory),
    ];
    Timings {
        law: Law {
            sharing: 1.8,
            simple_step_base: 0.6,
            footprint_exponent: 0.06,
            footprint_free_mib: 16.0,
            nvls_start_us: 24.0,
            event_us: 1.1,
            ll: law(4.3, 0.8),
            ll128: law(7.4, 0.6),
            simple: law(12.0, 0.5),
        },
        classes: classes.into_iter().map(|(device, link)| class(device, link)).collect(),
    }
}

/// Squared up to a tenth, straight beyond: a row that is an accident does not bend the rest.
fn penalty(row: &Row, timing: &LinkTiming, law: &Law) -> f64 {
    let error = (timing.time_us(law, &row.operation) / row.us).ln().abs();
    row.weight * if error < 0.1 { error * error / 0.02 } else { (error - 0.05) * 10.0 }
}

/// What a constant at e times its prior costs. Enough to decide between constants that the rows cannot
/// tell apart: with two channels, how much of a rate is the channels' and how much the link's.
const PRIOR_WEIGHT: f64 = 0.5;

/// Fits every constant in turn, a step up or down at a time, the steps adapting to what helps.
fn fit(rows: &[&Row], rounds: u32) -> Timings {
    let prior = priors();
    let mut timings = prior.clone();
    let by_class: Vec<Vec<&Row>> = timings
        .classes
        .iter()
        .map(|class| rows.iter().copied().filter(|row| row.class == (class.device.as_str(), class.link)).collect())
        .collect();
    let pull = |value: f64, prior: f64| PRIOR_WEIGHT * (value / prior).ln().powi(2);
    let law_count = timings.law.constants_mut().len();
    let mut law_steps = vec![0.3; law_count];
    let mut class_steps: Vec<Vec<f64>> =
        timings.classes.iter_mut().map(|class| vec![0.3; class.constants_mut().len()]).collect();
    for round in 0..rounds {
        for (index, members) in by_class.iter().enumerate().filter(|(_, members)| !members.is_empty()) {
            let mut before = prior.classes[index].clone();
            let priors: Vec<f64> = before.constants_mut().into_iter().map(|(_, value)| *value).collect();
            for constant in 0..class_steps[index].len() {
                let (law, class) = (timings.law, &mut timings.classes[index]);
                let cost = |class: &mut LinkTiming| {
                    let value = *class.constants_mut()[constant].1;
                    members.iter().map(|row| penalty(row, class, &law)).sum::<f64>() + pull(value, priors[constant])
                };
                improve(
                    class,
                    cost,
                    |class, factor| *class.constants_mut()[constant].1 *= factor,
                    &mut class_steps[index][constant],
                );
            }
        }
        // What holds everywhere moves more slowly: it costs all rows.
        if round % 3 != 0 {
            continue;
        }
        let mut before = prior.law;
        let priors: Vec<f64> = before.constants_mut().into_iter().map(|(_, value)| *value).collect();
        for constant in 0..law_count {
            let classes = &timings.classes;
            let cost = |law: &mut Law| {
                let value = *law.constants_mut()[constant].1;
                if law.simple_step_base > 1.0 {
                    return f64::INFINITY;
                }
                let rows = by_class
                    .iter()
                    .zip(classes)
                    .flat_map(|(members, class)| members.iter().map(move |row| (row, class)));
                rows.map(|(row, class)| penalty(row, class, law)).sum::<f64>() + pull(value, priors[constant])
            };
            improve(
                &mut timings.law,
                cost,
                |law, factor| *law.constants_mut()[constant].1 *= factor,
                &mut law_steps[constant],
            );
        }
    }
    // No row tells of LL128 but those of two H200: NCCL's own table has two and a half times LL's latency
    // per hop over PCI Express, and its bandwidth is Simple's, less the flags.
    for (class, members) in timings.classes.iter_mut().zip(&by_class) {
        if !members.iter().any(|row| row.operation.protocol == Protocol::Ll128) {
            let (step_us, channel_gb_per_s) = (class.ll.step_us * 2.5, class.simple.channel_gb_per_s * 0.8);
            class.ll128 = Rates { step_us, channel_gb_per_s, link_gb_per_s: class.simple.link_gb_per_s };
        }
    }
    timings
}

/// One step of one constant: up, or down, or shorter next time.
fn improve<T: Clone>(of: &mut T, cost: impl Fn(&mut T) -> f64, scale: impl Fn(&mut T, f64), step: &mut f64) {
    let now = cost(of);
    for direction in [*step, -*step] {
        let mut other = of.clone();
        scale(&mut other, direction.exp());
        if cost(&mut other) < now {
            *of = other;
            *step *= 1.3;
            return;
        }
    }
    *step = (*step * 0.5).max(0.002);
}

fn predicted_us(timings: &Timings, row: &Row) -> f64 {
    let class = timings.find(row.class.0, row.class.1).expect("every row's class has a prior");
    class.time_us(&timings.law, &row.operation)
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or(f64::NAN)
}

/// Ranks of values, equal ones sharing the mean of theirs.
fn ranks(values: &[f64]) -> Vec<f64> {
    let below = |value: f64| values.iter().filter(|other| **other < value).count() as f64;
    let equal = |value: f64| values.iter().filter(|other| other.total_cmp(&value).is_eq()).count() as f64;
    values.iter().map(|value| below(*value) + (equal(*value) - 1.0) / 2.0).collect()
}

fn spearman(pairs: &[(f64, f64)]) -> f64 {
    let (left, right): (Vec<f64>, Vec<f64>) = pairs.iter().copied().unzip();
    let (left, right) = (ranks(&left), ranks(&right));
    let mean = (pairs.len() as f64 - 1.0) / 2.0;
    let product = |a: &[f64], b: &[f64]| a.iter().zip(b).map(|(a, b)| (a - mean) * (b - mean)).sum::<f64>();
    product(&left, &right) / (product(&left, &left) * product(&right, &right)).sqrt()
}

fn main() -> Result<(), Failure> {
    let arguments = Arguments::parse();
    let mut chooser = Chooser { machines: BTreeMap::new() };
    let mut rows = Vec::new();
    defaults(&arguments.data, &mut chooser, &mut rows)?;
    sweep(&arguments.data, &mut chooser, &mut rows)?;
    recorded(&mut chooser, &mut rows)?;
    field(&arguments.data, &mut chooser, &mut rows)?;
    println!("{} rows", rows.len());

    let mut timings = fit(&rows.iter().collect::<Vec<_>>(), 90);
    name_sources(&mut timings, &rows);
    if let Some(path) = &arguments.write {
        fs::write(path, format!("{HEADER}\n{}", rounded(&timings)?))?;
    }
    print_curves(&timings, &rows);

    println!("\nevery other size left out of the fit:");
    let halves: Vec<Timings> =
        (0..2).map(|half| fit(&rows.iter().filter(|row| row.half() != half).collect::<Vec<_>>(), 90)).collect();
    let left_out = |row: &Row| predicted_us(&halves[row.half() as usize], row);
    let mut errors: BTreeMap<&str, Vec<f64>> = BTreeMap::new();
    for row in rows.iter().filter(|row| row.kind == Kind::Default) {
        errors.entry(&row.curve).or_default().push((left_out(row) / row.us - 1.0).abs());
    }
    for (curve, errors) in &errors {
        let largest = errors.iter().copied().fold(0.0, f64::max);
        println!(
            "  {curve:28} median absolute error {:5.1} %, largest {:5.1} %",
            median(errors.clone()) * 100.0,
            largest * 100.0
        );
    }
    let overall = median(errors.values().flatten().copied().collect());
    println!(
        "  default all-reduce, all {} rows: median absolute error {:.1} % (bound 15 %)",
        errors.values().flatten().count(),
        overall * 100.0
    );

    let mut correlations = Vec::new();
    let sizes: BTreeSet<u64> =
        rows.iter().filter(|row| row.kind == Kind::Sweep).map(|row| row.operation.bytes).collect();
    for size in sizes {
        let pairs: Vec<(f64, f64)> = rows
            .iter()
            .filter(|row| row.kind == Kind::Sweep && row.operation.bytes == size)
            .map(|row| (row.us, left_out(row)))
            .collect();
        correlations.push(spearman(&pairs));
        println!(
            "  {size:8} bytes: rank correlation {:.3} over {} configurations",
            correlations.last().unwrap_or(&0.0),
            pairs.len()
        );
    }
    let least = correlations.iter().copied().fold(1.0, f64::min);
    println!("  rank correlation of configurations: median {:.3}, least {least:.3} (bound 0.9)", median(correlations));

    println!("\na number of GPUs left out of the fit (no bound):");
    for gpus in [2, 8] {
        let kept: Vec<&Row> =
            rows.iter().filter(|row| row.kind != Kind::Default || row.operation.ranks != gpus).collect();
        let without = fit(&kept, 90);
        for curve in errors.keys() {
            let missed: Vec<f64> = rows
                .iter()
                .filter(|row| row.kind == Kind::Default && row.operation.ranks == gpus && row.curve == **curve)
                .map(|row| (predicted_us(&without, row) / row.us - 1.0).abs())
                .collect();
            if !missed.is_empty() {
                println!("  {curve:28} median absolute error {:5.1} %", median(missed) * 100.0);
            }
        }
    }

    // A choice by NCCL's rules and its time, the communicator being there.
    let machine = &chooser.machines["rtx-pro-6000-x8"];
    let evaluator = machine.evaluator(&Environment::new(), 8)?;
    let begun = Instant::now();
    let (mut count, mut sum) = (0_u64, 0.0);
    while begun.elapsed().as_secs_f64() < 1.0 {
        for bytes in (1..=1000).map(|step| step * 4096) {
            sum += evaluator.time_us(Collective::AllReduce, bytes)?;
            count += 1;
        }
    }
    println!(
        "\n{:.0} evaluations (choice and time) a second on one core (checksum {sum:.3e})",
        count as f64 / begun.elapsed().as_secs_f64()
    );
    Ok(())
}

fn print_curves(timings: &Timings, rows: &[Row]) {
    let mut curves: BTreeMap<&str, Vec<&Row>> = BTreeMap::new();
    for row in rows.iter().filter(|row| matches!(row.kind, Kind::Default | Kind::Field)) {
        curves.entry(&row.curve).or_default().push(row);
    }
    println!("\nbytes:measured/fitted, microseconds");
    for (curve, rows) in curves {
        println!("  {curve}");
        for row in rows {
            let operation = &row.operation;
            let us = predicted_us(timings, row);
            let far = if (us / row.us - 1.0).abs() > 0.15 { " <" } else { "" };
            println!(
                "    {:10} {:10.1} {us:10.1}{far} {} {} {} channels {} threads, {} {}",
                operation.bytes,
                row.us,
                operation.algorithm,
                operation.protocol,
                operation.channels,
                operation.threads,
                row.class.0,
                row.class.1.name()
            );
        }
    }
}

const HEADER: &str = "\
# Constants of the law in src/nccl_model/timing.rs, fitted by examples/fit_timing.rs. Times that come of
# them are simulated; `source` says what the constants of a class were fitted to, `extrapolated` what of
# them nobody measured.
";

fn name_sources(timings: &mut Timings, rows: &[Row]) {
    const DATABASE: &str = "AIConfigurator's performance database (github.com/ai-dynamo/aiconfigurator), nccl-tests";
    let ll128 = "LL128 follows from LL and Simple by the ratios of NCCL's own table";
    for class in &mut timings.classes {
        let (source, extrapolated) = match (class.device.as_str(), class.link) {
            ("h200", Link::Nvlink) => (format!("{DATABASE}, NCCL 2.29.2; a sweep over 2 H200 with NCCL 2.28.9"), None),
            ("h200", Link::HostMemory) => (
                "results/recorded/h200x2-host-memory*, NCCL 2.28.9; more than 2 ranks never measured".to_owned(),
                Some(ll128),
            ),
            ("rtx-pro-6000", Link::PcieSockets) => (
                "github.com/local-inference-lab/rtx6kpro, optimization/nccl-tuning.md: 8 GPUs, NCCL 2.28.3".to_owned(),
                Some(ll128),
            ),
            ("rtx-pro-6000", link) => (
                format!("{DATABASE}, NCCL 2.29.2, {} GPUs", if link == Link::Pcie { 2 } else { 8 }),
                Some(if link == Link::Pcie {
                    ll128
                } else {
                    "LL128; that edges go through host memory, and how much more channels bring"
                }),
            ),
            ("l40s", Link::Pcie) => (format!("{DATABASE}, NCCL 2.27.3, 2 GPUs"), Some(ll128)),
            ("l40s", Link::HostMemory) => (
                format!("{DATABASE}, NCCL 2.27.3, 8 GPUs"),
                Some("LL128; that edges go through host memory, and how much more channels bring"),
            ),
            ("rtx-4090", Link::HostMemory) => (
                "github.com/NVIDIA/nccl/issues/1530 (8 GPUs, smallest message), README of kalavai (4 GPUs, NCCL 2.19)"
                    .to_owned(),
                Some("all but the smallest messages on 8 GPUs"),
            ),
            ("rtx-4090", _) => (
                "github.com/tinygrad/open-gpu-kernel-modules/pull/22: 4 GPUs, NCCL 2.23.4, a driver with peer access"
                    .to_owned(),
                Some("8 GPUs; needs a driver that is not NVIDIA's"),
            ),
            ("a100-pcie", Link::HostMemory) => {
                ("a published nccl-tests table of 4 A100-PCIE-40GB".to_owned(), Some("8 GPUs"))
            }
            _ => ("none".to_owned(), Some("all of it: the rates of RTX PRO 6000, halved for PCIe 4")),
        };
        class.source = source;
        class.extrapolated = extrapolated.map(str::to_owned);
        if rows.iter().all(|row| row.class != (class.device.as_str(), class.link)) && class.source != "none" {
            class.extrapolated = Some("all of it: no row reached this class".to_owned());
        }
    }
}

/// The table as TOML, constants with four digits: more would claim more than the rows can tell.
fn rounded(timings: &Timings) -> Result<String, Failure> {
    let round = |value: &mut f64| *value = format!("{value:.3e}").parse().unwrap_or(*value);
    let mut timings = timings.clone();
    timings.law.constants_mut().into_iter().for_each(|(_, value)| round(value));
    for class in &mut timings.classes {
        class.constants_mut().into_iter().for_each(|(_, value)| round(value));
    }
    Ok(toml::to_string(&timings)?)
}
