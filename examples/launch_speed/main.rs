//! How many times as fast one launch of nccltune measures a grid of settings as a shell loop over NVIDIA's nccl-tests,
//! and whether the two measure the same.
//!
//! The grid: {ring, tree} x {LL, Simple} x {channels unset, 1, 2, 4, 8, 16, 32} at 11 sizes from 4 KiB to 4 MiB. Ours is
//! one launch at call level, from the start of its processes to their end; theirs is one run of `all_reduce_perf` for
//! each arm, under its variables. Start, read-back of what ran and data checks are part of both. nccl-tests is not part
//! of this project: build it, and name the binary.
//!
//!     cargo run --release --example launch_speed -- \
//!         --perf PATH/all_reduce_perf --nccl-lib PATH --pin NCCL_P2P_DISABLE=1
//!
//! The exit status is 1 where the speed is below 20 times, the bias over what ran beyond 2 %, the median absolute
//! difference beyond 3 %, or the deviation over launches more than 1.25 times theirs.
#![expect(
    clippy::print_stdout,
    clippy::disallowed_methods,
    reason = "a stand-alone program that starts two others and prints a table"
)]

mod figures;
#[path = "../nccl_tests/perf.rs"]
mod perf;

use std::error::Error;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};
use std::time::Instant;

use clap::Parser;
use figures::{Figures, Run, logged, ours_command, ours_in, settings, space, theirs_of};
use nccltune::collective::{DataType, Placement};
use perf::Perf;

/// Fewest times as fast; largest bias, median absolute difference, and ratio of deviations.
const SPEED: f64 = 20.0;
const BIAS: f64 = 0.02;
const MEDIAN_DIFFERENCE: f64 = 0.03;
const DEVIATION_RATIO: f64 = 1.25;

#[derive(Parser)]
struct Arguments {
    /// all_reduce_perf of nccl-tests, built with MPI=1 unless --single-process.
    #[arg(long)]
    perf: PathBuf,
    /// One process of nccl-tests with a thread for each GPU, without mpirun.
    #[arg(long)]
    single_process: bool,
    /// The libnccl that both sides load.
    #[arg(long)]
    nccl_lib: PathBuf,
    /// The nccltune binary.
    #[arg(long, default_value = "target/release/nccltune")]
    nccltune: PathBuf,
    /// Ranks.
    #[arg(long, default_value_t = 2)]
    ranks: u32,
    /// Launches of ours, and loops of theirs.
    #[arg(long, default_value_t = 5)]
    runs: u32,
    /// Variables for both sides.
    #[arg(long = "pin")]
    pins: Vec<String>,
    /// Operations in nccl-tests' graph.
    #[arg(long, default_value_t = 64)]
    operations: u32,
    /// Replays of it.
    #[arg(long, default_value_t = 20)]
    replays: u32,
    /// Have nccl-tests tell the slowest rank, as nccltune does, instead of the mean over ranks.
    #[arg(long)]
    slowest: bool,
    /// Where nccltune's runs and nccl-tests' output are kept.
    #[arg(long)]
    keep: Option<PathBuf>,
}

fn main() -> Result<ExitCode, Box<dyn Error>> {
    let arguments = Arguments::parse();
    let scratch = tempfile::tempdir()?;
    let folder = arguments.keep.clone().unwrap_or_else(|| scratch.path().to_owned());
    fs_err::create_dir_all(&folder)?;
    let links = perf::links(scratch.path(), &arguments.nccl_lib)?;
    let (mut ours, mut theirs) = (Vec::new(), Vec::new());
    for run in 0..arguments.runs {
        // In turn, and the other way round every second time, so that drift favours nobody.
        for is_ours in if run % 2 == 0 { [true, false] } else { [false, true] } {
            let folder = folder.join(format!("{}-{run}", if is_ours { "nccltune" } else { "nccl-tests" }));
            if is_ours {
                ours.push(run_ours(&arguments, &folder)?);
            } else {
                theirs.push(run_theirs(&arguments, &links, &folder)?);
            }
        }
    }
    Ok(report(&ours, &theirs))
}

/// One launch, and what the program needs around it.
fn run_ours(arguments: &Arguments, out: &Path) -> Result<Run, Box<dyn Error>> {
    let space_file = out.with_extension("toml");
    fs_err::write(&space_file, space())?;
    let mut command = Command::new(&arguments.nccltune);
    ours_command(&mut command, arguments.ranks, &space_file, out);
    command.arg("--nccl-lib").arg(&arguments.nccl_lib);
    for pin in &arguments.pins {
        command.args(["--pin", pin]);
    }
    let begun = Instant::now();
    // It ends behind its first block without a verdict, which is no success of `tune`.
    let output = command.output()?;
    let whole_s = begun.elapsed().as_secs_f64();
    let run = ours_in(out).map_err(|error| format!("{error}: {}", String::from_utf8_lossy(&output.stderr)))?;
    println!("nccltune: {:.2} s a launch ({whole_s:.2} s with the program around it)", run.seconds);
    Ok(run)
}

/// The loop: a fresh run of nccl-tests for each arm.
fn run_theirs(arguments: &Arguments, links: &Path, folder: &Path) -> Result<Run, Box<dyn Error>> {
    fs_err::create_dir_all(folder)?;
    let perf = Perf {
        program: &arguments.perf,
        ranks: arguments.ranks,
        single_process: arguments.single_process,
        links,
        dtype: DataType::Bf16,
        slowest: arguments.slowest,
        operations: arguments.operations,
        replays: arguments.replays,
    };
    let mut run = Run { seconds: 0.0, cells: Vec::new() };
    for (number, setting) in settings().iter().enumerate() {
        let file = |ending: &str| folder.join(format!("{number:02}.{ending}"));
        let mut variables = setting.variables.clone();
        for pin in &arguments.pins {
            let (name, value) = pin.split_once('=').ok_or("--pin NAME=VALUE")?;
            variables.push((name.to_owned(), value.to_owned()));
        }
        // Each process writes a file of its own; one of them is of the first rank, which tells what ran.
        variables.extend(logged(&file("%p.log")));
        let begun = Instant::now();
        let text = perf.run(&variables, &file("txt"))?;
        let times = perf.times(&text, Placement::InPlace)?;
        let mut log = String::new();
        for entry in fs_err::read_dir(folder)? {
            let path = entry?.path();
            let is_log = path.file_name().is_some_and(|name| {
                let name = name.to_string_lossy();
                name.starts_with(&format!("{number:02}.")) && name.ends_with(".log")
            });
            if is_log {
                log.push_str(&fs_err::read_to_string(&path)?);
            }
        }
        run.cells.extend(theirs_of(setting, &times, &log));
        run.seconds += begun.elapsed().as_secs_f64();
    }
    println!("nccl-tests: {:.2} s a loop of {} runs", run.seconds, settings().len());
    Ok(run)
}

fn report(ours: &[Run], theirs: &[Run]) -> ExitCode {
    let Some(figures) = Figures::of(ours, theirs) else {
        println!("nothing to compare: two runs of each side are the least");
        return ExitCode::FAILURE;
    };
    println!("{:>10} {:<16} {:>10} {:>10} {:>8}", "bytes", "what ran", "nccltune", "nccl-tests", "ratio");
    for (bytes, ran, mine, other) in &figures.tuples {
        let what = format!("{}/{}/{}", ran.algo, ran.proto, ran.channels);
        println!("{bytes:>10} {what:<16} {mine:>10.2} {other:>10.2} {:>8.4}", mine / other);
    }
    let percent = |share: f64| share * 100.0;
    println!(
        "{:.1} times as fast per launch ({:.1} to {:.1}, 95 %, {} runs of each)",
        figures.speed.ratio,
        figures.speed.low,
        figures.speed.high,
        ours.len()
    );
    println!(
        "bias over {} pairs of size and what ran {:+.2} %, median absolute difference {:.2} % ({} ran on one side only)",
        figures.tuples.len(),
        percent(figures.bias),
        percent(figures.median_difference),
        figures.unmatched
    );
    println!(
        "standard deviation over launches, pooled over cells: {:.2} % and {:.2} %, ratio {:.2}",
        percent(figures.deviations[0]),
        percent(figures.deviations[1]),
        figures.deviation_ratio()
    );
    let holds = figures.speed.ratio >= SPEED
        && figures.bias.abs() <= BIAS
        && figures.median_difference <= MEDIAN_DIFFERENCE
        && figures.deviation_ratio() <= DEVIATION_RATIO;
    if holds { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}
