//! What is compared, and the figures that come of it.

use std::collections::BTreeMap;
use std::error::Error;
use std::path::Path;
use std::process::Command;

use nccltune::collective::Collective;
use nccltune::journal;
use nccltune::nccl_log;
use nccltune::record::{Event, Manifest, Phase};
use nccltune::stats::{RatioEstimate, mean, median, paired_ratio, standard_deviation};

/// Algorithms and protocols, as both sides are told them.
const ALGORITHMS: [&str; 2] = ["Ring", "Tree"];
const PROTOCOLS: [&str; 2] = ["LL", "Simple"];
/// Channels of a communicator; none for as many as NCCL finds.
const CHANNELS: [Option<u32>; 7] = [None, Some(1), Some(2), Some(4), Some(8), Some(16), Some(32)];
/// Powers of two from 4 KiB to 4 MiB.
const SIZES: std::ops::RangeInclusive<u32> = 12..=22;
/// Confidence of the interval of the speed.
const CONFIDENCE: f64 = 0.95;

/// One arm: its name, and what it sets.
#[derive(Debug, Clone)]
pub(crate) struct Setting {
    pub(crate) name: String,
    pub(crate) variables: Vec<(String, String)>,
}

/// The 28 arms.
pub(crate) fn settings() -> Vec<Setting> {
    let mut settings = Vec::new();
    for algo in ALGORITHMS {
        for proto in PROTOCOLS {
            for channels in CHANNELS {
                let mut variables =
                    vec![("NCCL_ALGO".to_owned(), algo.to_owned()), ("NCCL_PROTO".to_owned(), proto.to_owned())];
                let mut name = format!("{algo} {proto}");
                if let Some(channels) = channels {
                    name.push_str(&format!(" {channels}"));
                    let both = ["NCCL_MIN_NCHANNELS", "NCCL_MAX_NCHANNELS"];
                    variables.extend(both.map(|variable| (variable.to_owned(), channels.to_string())));
                }
                settings.push(Setting { name, variables });
            }
        }
    }
    settings
}

/// The arms as a search space.
pub(crate) fn space() -> String {
    let mut text =
        "format = 1\nname = \"launch-speed\"\ndescription = \"what one launch is compared over\"\n".to_owned();
    for setting in settings() {
        let variables: Vec<String> =
            setting.variables.iter().map(|(name, value)| format!("{name} = \"{value}\"")).collect();
        text.push_str(&format!("[[arm]]\nname = \"{}\"\nenv = {{ {} }}\n", setting.name, variables.join(", ")));
    }
    text
}

/// Has nccltune run one block of the search, which is one launch, and stop.
pub(crate) fn ours_command(command: &mut Command, ranks: u32, space: &Path, out: &Path) {
    let sizes: Vec<String> = SIZES.map(|power| (1_u64 << power).to_string()).collect();
    command
        .args(["tune", "--backend", "nccl", "--engine", "none", "--quiet"])
        .args(["--cheapest-level", "call", "--cell-time", "3ms", "--search-blocks", "1", "--time-budget", "1s"])
        .args(["--tables", "never", "--no-trial", "--repair-graph", "never", "--peer-access", "never"])
        .args(["--tp", &ranks.to_string(), "--sizes", &sizes.join(",")])
        .arg("--space")
        .arg(space)
        .arg("--out")
        .arg(out);
}

/// What carried a message.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Ran {
    pub(crate) algo: String,
    pub(crate) proto: String,
    pub(crate) channels: u32,
}

/// One arm at one size in one run.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Cell {
    pub(crate) arm: String,
    pub(crate) bytes: u64,
    /// None where no log told.
    pub(crate) ran: Option<Ran>,
    /// Mean over replays, per all-reduce.
    pub(crate) us: f64,
}

/// All arms once: a launch of ours, or a shell loop over nccl-tests.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Run {
    pub(crate) seconds: f64,
    pub(crate) cells: Vec<Cell>,
}

/// The first block in a run directory, from the start of its processes to their end, all cells of all arms in it.
pub(crate) fn ours_in(run: &Path) -> Result<Run, Box<dyn Error>> {
    let manifest: Manifest = serde_json::from_slice(&fs_err::read(run.join("manifest.json"))?)?;
    let name = |id| manifest.arms.iter().find(|arm| arm.id == id).map_or_else(String::new, |arm| arm.name.clone());
    let (mut ours, mut launches) = (Run { seconds: 0.0, cells: Vec::new() }, Vec::new());
    for line in journal::read(run)? {
        match line.event {
            Event::BlockPlanned { block: 0, phase: Phase::Search, launches: planned } => {
                launches = planned.into_iter().map(|launch| launch.launch).collect();
            }
            Event::CellFailed { arm, outcome, .. } => {
                return Err(format!("{} failed: {}", name(arm), outcome.detail).into());
            }
            Event::CellMeasured(cell) if cell.block == 0 && cell.call.is_some() => ours.cells.push(Cell {
                bytes: cell.point.bytes,
                ran: cell
                    .effective
                    .algo
                    .zip(cell.effective.proto)
                    .zip(cell.effective.channels)
                    .map(|((algo, proto), channels)| Ran { algo, proto, channels }),
                us: mean(&cell.replays_us).ok_or("an empty cell")?,
                arm: name(cell.arm),
            }),
            Event::LaunchEnded { launch, duration_s, .. } if launches.contains(&launch) => ours.seconds += duration_s,
            _ => {}
        }
    }
    let expected = settings().len() * SIZES.count();
    if launches.len() == 1 && ours.cells.len() == expected {
        return Ok(ours);
    }
    Err(format!(
        "{} launches with {} cells at call level, expected one with {expected}",
        launches.len(),
        ours.cells.len()
    )
    .into())
}

/// Where a run of nccl-tests under an arm leaves NCCL's log, and the variables that make it do so.
pub(crate) fn logged(log: &Path) -> Vec<(String, String)> {
    [("NCCL_DEBUG", "INFO"), ("NCCL_DEBUG_SUBSYS", "INIT,ENV,TUNING"), ("NCCL_DEBUG_FILE", &log.display().to_string())]
        .map(|(name, value)| (name.to_owned(), value.to_owned()))
        .into()
}

/// The cells of an arm from what nccl-tests took per size, and from NCCL's log beside it.
pub(crate) fn theirs_of(setting: &Setting, times: &BTreeMap<u64, f64>, log: &str) -> Vec<Cell> {
    let log = nccl_log::parse(log);
    let ran = |bytes| {
        let operation = log.operation(Collective::AllReduce, bytes)?;
        Some(Ran { algo: operation.algo.clone(), proto: operation.proto.clone()?, channels: operation.channels? })
    };
    times
        .iter()
        .map(|(bytes, us)| Cell { arm: setting.name.clone(), bytes: *bytes, ran: ran(*bytes), us: *us })
        .collect()
}

/// What the comparison comes to.
#[derive(Debug, Clone)]
pub(crate) struct Figures {
    /// How many times as fast a launch is as a loop.
    pub(crate) speed: RatioEstimate,
    /// By size and what ran: mean over runs of either side.
    pub(crate) tuples: Vec<(u64, Ran, f64, f64)>,
    /// What only one side ran.
    pub(crate) unmatched: usize,
    /// Mean of ratio minus one over tuples, and median of its absolute values.
    pub(crate) bias: f64,
    pub(crate) median_difference: f64,
    /// Standard deviations over runs, pooled over cells, as shares: ours, theirs.
    pub(crate) deviations: [f64; 2],
}

impl Figures {
    /// Compares run with run; none where there is too little to compare.
    pub(crate) fn of(ours: &[Run], theirs: &[Run]) -> Option<Self> {
        let seconds: Vec<(f64, f64)> =
            theirs.iter().zip(ours).map(|(theirs, ours)| (theirs.seconds, ours.seconds)).collect();
        let (mine, others) = (by_tuple(ours), by_tuple(theirs));
        let tuples: Vec<(u64, Ran, f64, f64)> =
            mine.iter().filter_map(|(tuple, us)| Some((tuple.0, tuple.1.clone(), *us, *others.get(tuple)?))).collect();
        let differences: Vec<f64> = tuples.iter().map(|(_, _, ours, theirs)| ours / theirs - 1.0).collect();
        let absolute: Vec<f64> = differences.iter().map(|difference| difference.abs()).collect();
        Some(Self {
            speed: paired_ratio(&seconds, CONFIDENCE)?,
            unmatched: mine.len() + others.len() - 2 * tuples.len(),
            bias: mean(&differences)?,
            median_difference: median(&absolute)?,
            deviations: [pooled_deviation(ours)?, pooled_deviation(theirs)?],
            tuples,
        })
    }

    /// Pooled deviation of ours over theirs.
    pub(crate) fn deviation_ratio(&self) -> f64 {
        self.deviations[0] / self.deviations[1]
    }
}

/// By size and what ran: the mean over runs of what all arms took that ran it.
fn by_tuple(runs: &[Run]) -> BTreeMap<(u64, Ran), f64> {
    let mut all: BTreeMap<(u64, Ran), Vec<f64>> = BTreeMap::new();
    for run in runs {
        let mut one: BTreeMap<(u64, Ran), Vec<f64>> = BTreeMap::new();
        for cell in &run.cells {
            if let Some(ran) = &cell.ran {
                one.entry((cell.bytes, ran.clone())).or_default().push(cell.us);
            }
        }
        for (tuple, us) in one {
            all.entry(tuple).or_default().extend(mean(&us));
        }
    }
    all.into_iter().filter_map(|(tuple, us)| Some((tuple, mean(&us)?))).collect()
}

/// Standard deviation of the logarithm over runs, pooled over cells.
fn pooled_deviation(runs: &[Run]) -> Option<f64> {
    let mut cells: BTreeMap<(&str, u64), Vec<f64>> = BTreeMap::new();
    for cell in runs.iter().flat_map(|run| &run.cells) {
        cells.entry((&cell.arm, cell.bytes)).or_default().push(cell.us.ln());
    }
    let variances: Vec<f64> =
        cells.values().filter_map(|logs| standard_deviation(logs)).map(|deviation| deviation.powi(2)).collect();
    mean(&variances).map(f64::sqrt)
}
