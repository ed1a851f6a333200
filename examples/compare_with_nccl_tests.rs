//! Times the same collectives with nccltune and with NVIDIA's nccl-tests, run after run in turn, and
//! compares the means.
//!
//! nccl-tests is not part of this project: build its MPI variant and name the binary of the collective.
//!
//!     cargo run --release --example compare_with_nccl_tests -- \
//!         --collective all_gather --perf PATH/all_gather_perf --nccl-lib PATH --pin NCCL_P2P_DISABLE=1
//!
//! Every run of either side is a fresh launch with one process per GPU. The exit status is 1 when the
//! bias over sizes exceeds 2 % or the median absolute difference 3 %.
#![expect(
    clippy::print_stdout,
    clippy::disallowed_methods,
    reason = "a stand-alone program that starts two others and prints a table"
)]

#[path = "nccl_tests/perf.rs"]
mod perf;

use std::collections::BTreeMap;
use std::error::Error;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};

use clap::Parser;
use nccltune::collective::{Collective, DataType, Form, Placement};
use nccltune::journal;
use nccltune::record::Event;
use nccltune::stats;
use perf::Perf;

/// Largest bias over sizes, and largest median of absolute differences.
const BOUNDS: (f64, f64) = (0.02, 0.03);
/// The sizes: powers of two from 4 KiB to 4 MiB.
const SIZES: std::ops::RangeInclusive<u32> = 12..=22;

#[derive(Parser)]
struct Arguments {
    /// The collective: all_reduce, all_gather, reduce_scatter, broadcast, reduce or send_recv.
    #[arg(long, default_value = "all_reduce", value_parser = parse_collective)]
    collective: Collective,
    /// Its binary of nccl-tests, built with MPI=1: all_reduce_perf, all_gather_perf, reduce_scatter_perf,
    /// broadcast_perf, reduce_perf or sendrecv_perf.
    #[arg(long, alias = "all-reduce-perf")]
    perf: PathBuf,
    /// The element type: bf16, fp16, fp32 or int8.
    #[arg(long, default_value = "bf16", value_parser = parse_dtype)]
    dtype: DataType,
    /// Compare the out-of-place column; without it that of the form in which engines issue the collective.
    #[arg(long)]
    out_of_place: bool,
    /// Have nccl-tests tell the slowest rank, as nccltune does, instead of the mean over ranks.
    #[arg(long)]
    slowest: bool,
    /// The libnccl that both sides load; a folder of links makes it the loader's first choice.
    #[arg(long)]
    nccl_lib: PathBuf,
    /// The nccltune binary.
    #[arg(long, default_value = "target/release/nccltune")]
    nccltune: PathBuf,
    /// Ranks.
    #[arg(long, default_value_t = 2)]
    ranks: u32,
    /// Runs of each side.
    #[arg(long, default_value_t = 5)]
    runs: u32,
    /// Variables for both sides.
    #[arg(long = "pin")]
    pins: Vec<String>,
    /// Operations in nccl-tests' graph, and replays of it.
    #[arg(long, default_value_t = 64)]
    operations: u32,
    /// Replays of nccl-tests' graph.
    #[arg(long, default_value_t = 20)]
    replays: u32,
    /// Where nccltune's runs and nccl-tests' output are kept.
    #[arg(long)]
    keep: Option<PathBuf>,
}

fn parse_collective(text: &str) -> Result<Collective, String> {
    Collective::parse(text).ok_or_else(|| format!("one of {}", Collective::ALL.map(Collective::name).join(", ")))
}

fn parse_dtype(text: &str) -> Result<DataType, String> {
    DataType::parse(text).ok_or_else(|| format!("one of {}", DataType::ALL.map(DataType::name).join(", ")))
}

impl Arguments {
    /// Which of nccl-tests' two columns is compared, and how nccltune is told so.
    fn placement(&self) -> Placement {
        if self.out_of_place { Placement::OutOfPlace } else { Form::usual(self.collective).placement }
    }
}

fn main() -> Result<ExitCode, Box<dyn Error>> {
    let arguments = Arguments::parse();
    let scratch = tempfile::tempdir()?;
    let folder = arguments.keep.clone().unwrap_or_else(|| scratch.path().to_owned());
    fs_err::create_dir_all(&folder)?;
    let links = perf::links(scratch.path(), &arguments.nccl_lib)?;
    let mut ours: BTreeMap<u64, Vec<f64>> = BTreeMap::new();
    let mut theirs: BTreeMap<u64, Vec<f64>> = BTreeMap::new();
    for run in 0..arguments.runs {
        // In turn, and the other way round every second time, so that drift favours nobody.
        for side in if run % 2 == 0 { [true, false] } else { [false, true] } {
            if side {
                merge(&mut ours, run_nccltune(&arguments, &folder.join(format!("nccltune-{run}")))?);
            } else {
                merge(&mut theirs, run_nccl_tests(&arguments, &links, &folder.join(format!("nccl-tests-{run}.txt")))?);
            }
        }
    }
    Ok(report(&ours, &theirs, &arguments))
}

fn merge(all: &mut BTreeMap<u64, Vec<f64>>, one: BTreeMap<u64, f64>) {
    for (bytes, us) in one {
        all.entry(bytes).or_default().push(us);
    }
}

/// Mean over replays of the slowest rank, per size.
fn run_nccltune(arguments: &Arguments, out: &Path) -> Result<BTreeMap<u64, f64>, Box<dyn Error>> {
    let sizes: Vec<String> = SIZES.map(|power| (1_u64 << power).to_string()).collect();
    let mut command = Command::new(&arguments.nccltune);
    command
        .args([
            "tune",
            "--backend",
            "nccl",
            "--space",
            "baseline",
            "--engine",
            "none",
            "--search-blocks",
            "1",
            "--quiet",
        ])
        .args(["--tp", &arguments.ranks.to_string(), "--sizes", &sizes.join(",")])
        .args(["--collective", arguments.collective.name(), "--dtype", arguments.dtype.name()])
        .args([
            "--placement",
            match arguments.placement() {
                Placement::InPlace => "in-place",
                Placement::OutOfPlace => "out-of-place",
            },
        ])
        .arg("--nccl-lib")
        .arg(&arguments.nccl_lib)
        .arg("--out")
        .arg(out);
    for pin in &arguments.pins {
        command.args(["--pin", pin]);
    }
    let output = command.output()?;
    if !output.status.success() {
        return Err(format!("nccltune failed: {}", String::from_utf8_lossy(&output.stderr)).into());
    }
    let mut means = BTreeMap::new();
    for line in journal::read(out)? {
        if let Event::CellMeasured(cell) = line.event {
            means.insert(cell.point.bytes, stats::mean(&cell.replays_us).ok_or("an empty cell")?);
        }
    }
    Ok(means)
}

/// The column that is compared, per size.
fn run_nccl_tests(arguments: &Arguments, links: &Path, keep: &Path) -> Result<BTreeMap<u64, f64>, Box<dyn Error>> {
    let perf = Perf {
        program: &arguments.perf,
        ranks: arguments.ranks,
        single_process: false,
        links,
        dtype: arguments.dtype,
        slowest: arguments.slowest,
        operations: arguments.operations,
        replays: arguments.replays,
    };
    let mut variables = Vec::new();
    for pin in &arguments.pins {
        let (name, value) = pin.split_once('=').ok_or("--pin NAME=VALUE")?;
        variables.push((name.to_owned(), value.to_owned()));
    }
    perf.times(&perf.run(&variables, keep)?, arguments.placement())
}

fn report(ours: &BTreeMap<u64, Vec<f64>>, theirs: &BTreeMap<u64, Vec<f64>>, arguments: &Arguments) -> ExitCode {
    let form = Form::usual(arguments.collective).placed(arguments.placement());
    println!(
        "means over {} interleaved runs, microseconds per {} of {} ({form})",
        arguments.runs, arguments.collective, arguments.dtype
    );
    println!("{:>10} {:>10} {:>10} {:>8}   spread over runs", "bytes", "nccltune", "nccl-tests", "ratio");
    let mut differences = Vec::new();
    for (bytes, mine) in ours {
        let Some(other) = theirs.get(bytes) else { continue };
        let (Some(mine_mean), Some(other_mean)) = (stats::mean(mine), stats::mean(other)) else { continue };
        let ratio = mine_mean / other_mean;
        let spread = |values: &[f64], mean: f64| {
            stats::standard_deviation(values).map_or(f64::NAN, |deviation| deviation / mean * 100.0)
        };
        println!(
            "{bytes:>10} {mine_mean:>10.2} {other_mean:>10.2} {ratio:>8.4}   {:.1} % and {:.1} %",
            spread(mine, mine_mean),
            spread(other, other_mean)
        );
        differences.push(ratio - 1.0);
    }
    let absolute: Vec<f64> = differences.iter().map(|difference| difference.abs()).collect();
    let (Some(bias), Some(median)) = (stats::mean(&differences), stats::median(&absolute)) else {
        println!("nothing to compare");
        return ExitCode::FAILURE;
    };
    println!(
        "bias over {} sizes {:+.2} %, median absolute difference {:.2} %",
        differences.len(),
        bias * 100.0,
        median * 100.0
    );
    if differences.len() == SIZES.count() && bias.abs() <= BOUNDS.0 && median <= BOUNDS.1 {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    }
}
