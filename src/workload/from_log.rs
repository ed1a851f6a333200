//! The points of one step of a running server, as its log shows it.
//!
//! A step is what repeats. Ranks do the same in the same order, so one of them is read and the others
//! are compared with it. Where several steps are in the log, the longest stretch that repeats itself is
//! found and one period of it is the step; otherwise the whole file is. With a config at hand, the step
//! is held against what the model should issue: a log shows what the rule cannot know (fused kernels,
//! kernels of the engine's own), and the rule shows what a log lost.

use std::collections::{BTreeMap, HashMap};

use super::config::ModelConfig;
use super::derive::{WorkloadRequest, check_architecture, check_width, guard_points};
use super::step_log::{Kind, Operation, StepLog};
use super::{MAX_MESSAGE_BYTES, WorkloadError, marked};
use crate::collective::{Collective, DataType, Form};
use crate::record::{FORMAT, Point, PointPhase, Workload};
use crate::units::{format_size, group_thousands};

/// The most points that a log may give; each costs measuring time.
const MAX_POINTS: usize = 64;

/// The fewest calls of a repetition that is taken for a step. What layers repeat is shorter (two to
/// four calls each), and the smallest models have more layers than that.
const SHORTEST_STEP: usize = 9;

/// Distances between like calls that are tried as the length of a step.
const MAX_CANDIDATES: usize = 64;

/// What is asked of a log.
#[derive(Debug, Clone)]
pub struct LogRequest<'a> {
    /// What messages call the file.
    pub name: &'a str,
    /// Ranks of the communicator that matters, where the user says so.
    pub tensor_parallel: Option<u32>,
    /// The model to compare with, and to take prefill's guards from.
    pub config: Option<&'a ModelConfig>,
    /// Engine, chunk and memory behind these guards; the rest of it is not looked at.
    pub request: WorkloadRequest,
}

/// A stretch of calls that repeats itself.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Repetition {
    start: usize,
    period: usize,
    /// Calls it covers, a part of a period at the end included.
    covered: usize,
}

/// The points of one step. Nothing in a log says how many sequences it held, so the step is a single
/// batch of weight 1.
pub fn from_log(log: &StepLog, request: &LogRequest<'_>) -> Result<Workload, WorkloadError> {
    let name = request.name.to_owned();
    let Some(leader) = log.ranks.iter().max_by_key(|rank| rank.calls.len()).filter(|rank| !rank.calls.is_empty())
    else {
        return Err(WorkloadError::NoCalls { name, other_lines: log.other_lines });
    };
    let mut assumptions = Vec::new();
    let calls: Vec<u32> = among_several(log, &leader.calls);
    if calls.is_empty() {
        return Err(WorkloadError::LoneRanks { name });
    }
    let (step, steps) = one_step(log, request, &calls, &mut assumptions);
    let tensor_parallel = width(log, request, step)?;
    let main = main_type(log, step, request.config);
    let mut points = points(log, step, steps, tensor_parallel, main, &mut assumptions);
    if points.is_empty() {
        return Err(WorkloadError::NoPoints { name, calls: step.len() });
    }
    if points.len() > MAX_POINTS {
        // What a step spends its time in is what matters; sizes that hardly occur are not worth a cell.
        points.sort_by_key(|point| std::cmp::Reverse(u64::from(point.calls_per_pass).saturating_mul(point.bytes)));
        let left = points.split_off(MAX_POINTS);
        assumptions.push(format!(
            "{} more sizes are left out: the {MAX_POINTS} with the most bytes in all are kept; this looks like more than \
             one step",
            left.len()
        ));
    }
    points.sort_by_key(|point| (std::cmp::Reverse(point.calls_per_pass), point.key()));
    assumptions.extend(notes_on_the_rest(log, leader.calls.len()));
    let mut disagreements = Vec::new();
    if let Some(given) = request.tensor_parallel
        && !points.iter().any(|point| point.ranks == given)
    {
        disagreements.push(format!("--tp says {given} ranks, and no communicator in the log has that many"));
    }
    let mut guard = Vec::new();
    if let Some(config) = request.config {
        disagreements.extend(compared(config, &points, tensor_parallel));
        let asked = WorkloadRequest { tensor_parallel, ..request.request.clone() };
        check_architecture(config, &asked)?;
        match check_width(config, tensor_parallel) {
            Ok(()) => guard = guard_points(config, &asked, &mut assumptions)?,
            Err(error) => disagreements.push(format!("{error}; prefill is not guarded")),
        }
    } else {
        assumptions.push("nothing is guarded: with --model, prefill's messages would be".to_owned());
    }
    if points.iter().any(|point| !point.measured) {
        assumptions.push("what this version does not measure is listed and decides nothing".to_owned());
    }
    Ok(Workload {
        format: FORMAT,
        model: request.config.map_or_else(|| name.clone(), |config| config.name.clone()),
        engine: request.request.engine.name().to_owned(),
        tensor_parallel,
        verify_tokens: 1,
        points,
        guard,
        assumptions,
        disagreements,
        ..Workload::default()
    })
}

/// Calls without those of a rank alone, which travel nowhere.
fn among_several(log: &StepLog, calls: &[u32]) -> Vec<u32> {
    calls.iter().copied().filter(|call| log.kinds[*call as usize].ranks != Some(1)).collect()
}

/// The calls of one step, and how many such steps there are.
fn one_step<'a>(
    log: &StepLog,
    request: &LogRequest<'_>,
    calls: &'a [u32],
    assumptions: &mut Vec<String>,
) -> (&'a [u32], usize) {
    let all = group_thousands(calls.len() as u64);
    let captured = "a collective inside a CUDA graph is logged when it is captured and not when it is replayed, so a log \
                    of a server that replays graphs holds what it captured";
    if let Some(Repetition { start, period, covered }) = repetition(calls) {
        let steps = covered / period;
        let rest = match calls.len() - covered {
            0 => String::new(),
            rest => format!("; {} calls before or after it are left out", group_thousands(rest as u64)),
        };
        assumptions.push(format!(
            "a step is the {} calls that repeat {steps} times in a row among the {all} of one process{rest}; {captured}",
            group_thousands(period as u64)
        ));
        return (&calls[start..start + period], steps);
    }
    // One kind of call alone shows no bounds; the model knows how many make a step.
    if let Some(config) = request.config
        && calls.iter().all(|call| *call == calls[0])
        && matches!(log.kinds[calls[0] as usize].operation, Operation::Collective(Collective::AllReduce))
    {
        let wanted = config.all_reduces.calls() as usize;
        if calls.len() > wanted && calls.len().is_multiple_of(wanted) {
            assumptions.push(format!(
                "all {all} calls are alike, so the log itself shows no steps; the config counts {wanted} of them in one, \
                 which makes {} steps; {captured}",
                calls.len() / wanted
            ));
            return (&calls[..wanted], calls.len() / wanted);
        }
    }
    assumptions.push(format!(
        "the whole file is taken as one step of {all} calls: nothing in it of {SHORTEST_STEP} calls or more repeats itself \
         over half of it; {captured}"
    ));
    (calls, 1)
}

/// The longest stretch of at least half of the calls in which some number of them repeats itself, at
/// least [`SHORTEST_STEP`] and more than what layers repeat.
fn repetition(calls: &[u32]) -> Option<Repetition> {
    let mut best: Option<Repetition> = None;
    for period in candidates(calls) {
        let Some(found) = longest_run(calls, period) else { continue };
        let window = &calls[found.start..found.start + period];
        if is_of_layers(window) {
            continue;
        }
        // Twice a step covers no more than a step does; the shorter one came first.
        if best.is_none_or(|best| found.covered > best.covered) {
            best = Some(found);
        }
    }
    best.filter(|best| best.covered * 2 >= calls.len())
}

/// Whether so many calls are only what layers repeat: all alike, or a pattern shorter than any step.
fn is_of_layers(window: &[u32]) -> bool {
    (1..SHORTEST_STEP).any(|pattern| window.windows(pattern + 1).all(|calls| calls[0] == calls[pattern]))
}

/// Lengths that a step may have: distances between like stretches of equal calls, those that would
/// explain the most calls, shortest first.
fn candidates(calls: &[u32]) -> Vec<usize> {
    // How far apart like stretches are may alternate within a step; the sum of a few in a row does not.
    const MOST_IN_A_STEP: usize = 6;
    let mut places: HashMap<(u32, usize), Vec<usize>> = HashMap::new();
    let mut start = 0;
    for at in 1..=calls.len() {
        if at == calls.len() || calls[at] != calls[start] {
            // The last stretch may be a whole one cut short, and the first may lack its beginning.
            places.entry((calls[start], at - start)).or_default().push(start);
            start = at;
        }
    }
    let mut explained: HashMap<usize, usize> = HashMap::new();
    for places in places.values() {
        for stride in 1..=MOST_IN_A_STEP {
            for pair in places.windows(stride + 1) {
                let distance = pair[stride] - pair[0];
                if distance >= SHORTEST_STEP && distance * 2 <= calls.len() {
                    *explained.entry(distance).or_default() += distance;
                }
            }
        }
    }
    let mut ranked: Vec<(usize, usize)> = explained.into_iter().collect();
    ranked.sort_by_key(|(distance, explained)| (std::cmp::Reverse(*explained), *distance));
    ranked.truncate(MAX_CANDIDATES);
    let mut candidates: Vec<usize> = ranked.into_iter().map(|(distance, _)| distance).collect();
    candidates.sort_unstable();
    candidates
}

/// The longest stretch in which every call equals the one `period` before it, two periods or more.
fn longest_run(calls: &[u32], period: usize) -> Option<Repetition> {
    let mut best: Option<Repetition> = None;
    let mut start = 0;
    for at in 0..calls.len() {
        let alike = calls.get(at + period).is_some_and(|later| *later == calls[at]);
        if !alike {
            let covered = at - start + period;
            if at > start && covered >= 2 * period && best.is_none_or(|best| covered > best.covered) {
                best = Some(Repetition { start, period, covered });
            }
            start = at + 1;
        }
    }
    best
}

/// The ranks of the communicator that the step is mostly about.
fn width(log: &StepLog, request: &LogRequest<'_>, step: &[u32]) -> Result<u32, WorkloadError> {
    let mut calls: BTreeMap<u32, usize> = BTreeMap::new();
    for kind in step.iter().map(|call| &log.kinds[*call as usize]) {
        if let (Some(ranks), Operation::Collective(_)) = (kind.ranks, &kind.operation) {
            *calls.entry(ranks).or_default() += 1;
        }
    }
    let most = calls.iter().max_by_key(|(_, calls)| **calls).map(|(ranks, _)| *ranks);
    match (request.tensor_parallel, most) {
        (Some(given), most) if most.is_none() || calls.contains_key(&given) => Ok(given),
        (_, Some(most)) => Ok(most),
        (_, None) => Err(WorkloadError::NoRanks { name: request.name.to_owned() }),
    }
}

/// The element type of most all-reduces: what the model computes in. Releases that count gathers in
/// bytes leave their type open, and it is taken from here.
fn main_type(log: &StepLog, step: &[u32], config: Option<&ModelConfig>) -> DataType {
    let mut calls: BTreeMap<DataType, usize> = BTreeMap::new();
    for kind in step.iter().map(|call| &log.kinds[*call as usize]) {
        if let (Operation::Collective(Collective::AllReduce), Some(dtype)) = (&kind.operation, kind.dtype()) {
            *calls.entry(dtype).or_default() += 1;
        }
    }
    let most = calls.into_iter().max_by_key(|(_, calls)| *calls).map(|(dtype, _)| dtype);
    most.or(config.map(|config| config.dtype)).unwrap_or(DataType::Bf16)
}

/// One point for each collective, type, size and number of ranks.
fn points(
    log: &StepLog,
    step: &[u32],
    steps: usize,
    tensor_parallel: u32,
    main: DataType,
    assumptions: &mut Vec<String>,
) -> Vec<Point> {
    // Calls of each point: those of every communicator, and of sends and receives the more frequent.
    let mut found: BTreeMap<(Collective, DataType, u64, u32), [u32; 2]> = BTreeMap::new();
    let mut left_out: BTreeMap<String, u32> = BTreeMap::new();
    let mut in_bytes = 0_u32;
    for kind in step.iter().map(|call| &log.kinds[*call as usize]) {
        let ranks = kind.ranks.unwrap_or(tensor_parallel);
        let (collective, direction) = match &kind.operation {
            Operation::Collective(collective) => (Some(*collective), 0),
            Operation::Send => (Some(Collective::SendRecv), 0),
            Operation::Receive => (Some(Collective::SendRecv), 1),
            Operation::Other(_) => (None, 0),
        };
        let moved_only =
            matches!(collective, Some(Collective::AllGather | Collective::Broadcast | Collective::SendRecv));
        let bytes = kind.bytes(ranks);
        let dtype = kind.dtype().or_else(|| {
            let whole =
                main.size_bytes() * if collective == Some(Collective::AllGather) { u64::from(ranks) } else { 1 };
            (moved_only && kind.is_bytes() && bytes.is_multiple_of(whole)).then_some(main)
        });
        if let (None, Some(_)) = (kind.dtype(), dtype) {
            in_bytes += 1;
        }
        let (Some(collective), Some(dtype)) = (collective, dtype) else {
            *left_out.entry(left_out_words(kind, ranks)).or_default() += 1;
            continue;
        };
        if bytes == 0 || bytes > MAX_MESSAGE_BYTES {
            *left_out.entry(left_out_words(kind, ranks)).or_default() += 1;
            continue;
        }
        // A pair of ranks, whatever group they belong to.
        let ranks = if collective == Collective::SendRecv { 2 } else { ranks };
        let calls = &mut found.entry((collective, dtype, bytes, ranks)).or_default()[direction];
        *calls = calls.saturating_add(1);
    }
    if in_bytes > 0 {
        assumptions.push(format!(
            "{in_bytes} calls that only move data are logged in bytes, as some releases of NCCL do; they are taken to be \
             {main}"
        ));
    }
    if !left_out.is_empty() {
        const MOST: usize = 8;
        let more = left_out.len().saturating_sub(MOST);
        let mut words: Vec<String> =
            left_out.iter().take(MOST).map(|(what, calls)| format!("{calls} x {what}")).collect();
        if more > 0 {
            words.push(format!("{more} kinds more"));
        }
        assumptions.push(format!("left out, as nothing that could be measured: {}", words.join(", ")));
    }
    found
        .into_iter()
        .map(|((collective, dtype, bytes, ranks), calls)| {
            let calls_per_pass = calls[0].max(calls[1]);
            let seen = if steps > 1 { format!(", in each of {steps} steps") } else { String::new() };
            let point = marked(Point {
                collective,
                dtype,
                bytes,
                ranks,
                calls_per_pass,
                batch: 1,
                weight: 1.0,
                phase: PointPhase::Step,
                measured: false,
                form: Form::usual(collective),
                origin: format!("logged by the server{seen}"),
            });
            // Workers open one communicator, over the ranks of the tensor-parallel group.
            Point { measured: point.measured && ranks == tensor_parallel, ..point }
        })
        .collect()
}

fn left_out_words(kind: &Kind, ranks: u32) -> String {
    format!("{} of {}, {}", kind.name(), kind.element_name(), format_size(kind.bytes(ranks)))
}

/// What the file held beside the step.
fn notes_on_the_rest(log: &StepLog, leader: usize) -> Vec<String> {
    let mut notes = Vec::new();
    let with_calls = log.ranks.iter().filter(|rank| !rank.calls.is_empty()).count();
    let others = log.ranks.iter().filter(|rank| !rank.calls.is_empty() && rank.calls.len() != leader).count();
    if others > 0 {
        notes.push(format!(
            "{others} of {with_calls} processes logged another number of calls than the one with the most, which was read: \
             pipeline stages, or lines that are missing"
        ));
    }
    let mut lost = Vec::new();
    if log.torn > 0 {
        lost.push(format!("{} lines that say no whole call", group_thousands(log.torn)));
    }
    if log.dropped > 0 {
        lost.push(format!("{} calls beyond what is kept", group_thousands(log.dropped)));
    }
    if log.cut {
        lost.push(format!("everything behind the first {}", format_size(super::step_log::MAX_LOG_BYTES)));
    }
    if !lost.is_empty() {
        notes.push(format!("not read: {}", lost.join(", ")));
    }
    notes
}

/// Where a step and the model's rule contradict each other.
fn compared(config: &ModelConfig, points: &[Point], tensor_parallel: u32) -> Vec<String> {
    let mut said = Vec::new();
    let width = config.hidden_size * config.dtype.size_bytes();
    let (wanted, origin) = (config.all_reduces.calls(), config.all_reduces.origin());
    let reduces: Vec<&Point> = points
        .iter()
        .filter(|point| point.collective == Collective::AllReduce && point.ranks == tensor_parallel)
        .collect();
    let main = reduces.iter().max_by_key(|point| (point.calls_per_pass, point.bytes));
    let mut tokens = None;
    match main {
        None => said.push(format!(
            "the config makes {wanted} all-reduces a pass ({origin}) and the log holds none among {tensor_parallel} ranks: \
             the engine uses kernels of its own, or scatters and gathers"
        )),
        Some(main) => {
            if main.dtype != config.dtype {
                said.push(format!("the config computes in {}, the log's all-reduces are {}", config.dtype, main.dtype));
            }
            let width = config.hidden_size * main.dtype.size_bytes();
            if main.bytes.is_multiple_of(width) {
                tokens = Some(main.bytes / width);
            } else {
                said.push(format!(
                    "all-reduces of {} bytes are no whole tokens of the config's hidden size, {} bytes each: another model, \
                     or a padded width",
                    group_thousands(main.bytes),
                    group_thousands(width)
                ));
            }
            let logged = main.calls_per_pass;
            if logged != wanted {
                let likely = match logged {
                    fewer if fewer < wanted / 2 => {
                        "most are fused with normalisation or go through a kernel of the engine's own"
                    }
                    fewer if fewer < wanted => "some are fused, or the log lacks lines",
                    _ => "the step holds several passes, or other parts of the server reduce at the same size",
                };
                said.push(format!(
                    "the config makes {wanted} all-reduces a pass ({origin}), the log holds {logged} of {} bytes; likely \
                     {likely}",
                    group_thousands(main.bytes)
                ));
            }
        }
    }
    for other in reduces.iter().filter(|point| main.is_none_or(|main| point.key() != main.key())) {
        said.push(format!(
            "{} all-reduces of {} bytes are in the log and not in the config's pass",
            other.calls_per_pass,
            group_thousands(other.bytes)
        ));
    }
    // Rows may be fewer than tokens, but they are whole.
    let row = config.logits_bytes(1);
    let gathers: Vec<&Point> = points.iter().filter(|point| point.collective == Collective::AllGather).collect();
    let logits = row.and_then(|row| gathers.iter().find(|point| point.bytes.is_multiple_of(row)));
    match (row, logits) {
        (Some(row), None) => {
            let expected = row.saturating_mul(tokens.unwrap_or(1));
            said.push(format!(
                "the config ends a pass in an all-gather of logits, {} bytes, and the log holds none of whole rows",
                group_thousands(expected)
            ));
        }
        (Some(row), Some(point)) if tokens.is_some_and(|tokens| point.bytes > row.saturating_mul(tokens)) => {
            said.push(format!(
                "{} rows of logits are gathered for passes of {} tokens",
                point.bytes / row,
                tokens.unwrap_or(0)
            ));
        }
        _ => {}
    }
    for point in points {
        let is_known = point.collective == Collective::AllReduce && point.ranks == tensor_parallel
            || logits.is_some_and(|logits| logits.key() == point.key());
        if !is_known {
            let whole = point.bytes.is_multiple_of(width);
            let what = if whole { ", whole tokens wide" } else { "" };
            said.push(format!(
                "{} {} of {} bytes among {} ranks{what} are in the log and not in the config's pass",
                point.calls_per_pass,
                point.collective,
                group_thousands(point.bytes),
                point.ranks
            ));
        }
    }
    said
}

/// Tokens of the passes in a step, where its all-reduces are whole tokens of this model.
pub fn step_tokens(workload: &Workload, config: &ModelConfig) -> Option<u64> {
    let main = workload
        .points
        .iter()
        .filter(|point| point.collective == Collective::AllReduce && point.ranks == workload.tensor_parallel)
        .max_by_key(|point| (point.calls_per_pass, point.bytes))?;
    let width = config.hidden_size * main.dtype.size_bytes();
    main.bytes.is_multiple_of(width).then(|| main.bytes / width)
}

#[cfg(test)]
mod tests {
    use std::fmt::Write as _;

    use proptest::prelude::*;

    use super::*;
    use crate::engine::Engine;
    use crate::workload::preset;

    /// Calls of a step as (name, datatype, count, ranks, communicator).
    type Calls = Vec<(&'static str, u8, u64, u32, u32)>;

    /// What `ranks` processes log of these calls, their lines mixed.
    fn log(calls: &Calls, ranks: u32) -> String {
        let mut text = String::new();
        for (number, (name, datatype, count, members, communicator)) in calls.iter().enumerate() {
            for rank in 0..ranks {
                let pid = 100 + (rank + number as u32) % ranks;
                writeln!(
                    text,
                    "node:{pid}:{pid} [0] NCCL INFO {name}: opCount {number:x} sendbuff 0x1 recvbuff 0x2 count {count} \
                     datatype {datatype} op 0 root 0 comm 0x{pid}{communicator} [nranks={members}] stream 0x3"
                )
                .unwrap();
            }
        }
        text
    }

    fn repeated(step: &Calls, times: usize) -> Calls {
        std::iter::repeat_n(step.clone(), times).flatten().collect()
    }

    /// One token of Kimi-K2.5 over 8 GPUs: 123 all-reduces and the logits.
    fn kimi_step() -> Calls {
        let mut calls = vec![("AllReduce", 9, 7168, 8, 0); 123];
        calls.push(("AllGather", 9, 163_840 / 8, 8, 0));
        calls
    }

    fn kimi() -> ModelConfig {
        preset("kimi-k2.5").expect("a preset").expect("valid")
    }

    fn asked(config: Option<&ModelConfig>) -> LogRequest<'_> {
        let request = WorkloadRequest { engine: Engine::Sglang, chunk: Some(2048), ..WorkloadRequest::default() };
        LogRequest { name: "step.log", tensor_parallel: None, config, request }
    }

    fn read(text: &str, config: Option<&ModelConfig>) -> Workload {
        from_log(&StepLog::parse(text), &asked(config)).unwrap_or_else(|error| panic!("{error}"))
    }

    fn summary(workload: &Workload) -> Vec<(Collective, DataType, u64, u32, u32)> {
        let of = |point: &Point| (point.collective, point.dtype, point.bytes, point.ranks, point.calls_per_pass);
        workload.points.iter().map(of).collect()
    }

    const KIMI: [(Collective, DataType, u64, u32, u32); 2] = [
        (Collective::AllReduce, DataType::Bf16, 14_336, 8, 123),
        (Collective::AllGather, DataType::Bf16, 327_680, 8, 1),
    ];

    fn says(workload: &Workload, words: &str) -> bool {
        workload.assumptions.iter().any(|note| note.contains(words))
    }

    #[test]
    fn one_step_in_a_file_is_the_whole_file() {
        let workload = read(&log(&kimi_step(), 8), Some(&kimi()));
        assert_eq!(summary(&workload), KIMI);
        assert!(says(&workload, "the whole file is taken as one step of 124 calls"), "{:?}", workload.assumptions);
        assert_eq!(workload.disagreements, Vec::<String>::new());
        assert_eq!((workload.tensor_parallel, workload.guard.len()), (8, 2));
        assert_eq!(step_tokens(&workload, &kimi()), Some(1));
        assert!(workload.points.iter().all(|point| point.phase == PointPhase::Step && point.batch == 1));
    }

    #[test]
    fn several_steps_show_where_one_ends() {
        // Starting up, and the end cut off: whatever repeats over most of it is the step.
        let mut calls: Calls = vec![("AllReduce", 7, 1, 8, 0), ("Broadcast", 4, 1, 8, 1)];
        calls.extend(repeated(&kimi_step(), 5));
        calls.truncate(calls.len() - 30);
        let workload = read(&log(&calls, 2), None);
        assert_eq!(summary(&workload), KIMI);
        assert!(
            says(&workload, "the 124 calls that repeat 4 times in a row among the 592 of one process"),
            "{workload:?}"
        );
        assert!(says(&workload, "2 calls before or after"));
        assert!(says(&workload, "nothing is guarded") && workload.guard.is_empty());
    }

    #[test]
    fn a_draft_makes_a_step_of_several_sizes() {
        // Twice the draft, the target over four tokens, the draft once more: no size marks a step by itself.
        let draft = |tokens: u64| -> Calls { vec![("AllReduce", 9, tokens * 7168, 8, 0); 3] };
        let mut step: Calls = [draft(1), draft(1)].concat();
        step.extend(vec![("AllReduce", 9, 4 * 7168, 8, 0); 123]);
        step.extend(draft(4));
        let workload = read(&log(&repeated(&step, 7), 1), None);
        assert!(says(&workload, "the 132 calls that repeat 7 times"), "{:?}", workload.assumptions);
        let calls: Vec<(u64, u32)> = workload.points.iter().map(|point| (point.bytes, point.calls_per_pass)).collect();
        assert_eq!(calls, [(57_344, 126), (14_336, 6)]);
    }

    #[test]
    fn what_layers_repeat_is_no_step() {
        // Attention data parallelism: gather and scatter in turn, once through.
        let mut step: Calls = Vec::new();
        for _ in 0..61 {
            step.extend([("AllGather", 9, 7168, 8, 0), ("ReduceScatter", 9, 7168, 8, 0)]);
        }
        step.push(("AllGather", 9, 20_480, 8, 0));
        let once = read(&log(&step, 1), None);
        assert!(says(&once, "the whole file is taken as one step of 123 calls"), "{:?}", once.assumptions);
        let twice = read(&log(&repeated(&step, 2), 1), None);
        assert!(says(&twice, "the 123 calls that repeat 2 times"), "{:?}", twice.assumptions);
        assert_eq!(summary(&once), summary(&twice));
    }

    #[test]
    fn calls_that_are_all_alike_are_counted_by_the_model() {
        let alike = log(&vec![("AllReduce", 9, 7168, 8, 0); 369], 1);
        assert_eq!(read(&alike, None).points[0].calls_per_pass, 369);
        let workload = read(&alike, Some(&kimi()));
        assert_eq!(workload.points[0].calls_per_pass, 123);
        assert!(says(&workload, "which makes 3 steps"), "{:?}", workload.assumptions);
        assert!(workload.disagreements[0].contains("ends a pass in an all-gather of logits, 327,680 bytes"));
    }

    #[test]
    fn every_kind_of_disagreement_is_said() {
        let told = |calls: &Calls| read(&log(calls, 1), Some(&kimi())).disagreements.join("\n");
        let with = |change: &dyn Fn(&mut Calls)| {
            let mut calls = kimi_step();
            change(&mut calls);
            told(&calls)
        };
        assert!(with(&|calls| drop(calls.drain(..62))).contains("holds 61 of 14,336 bytes; likely some are fused"));
        assert!(with(&|calls| drop(calls.drain(..122))).contains("likely most are fused"));
        let twice = |calls: &mut Calls| drop(calls.splice(0..0, kimi_step().into_iter().take(123)));
        assert!(with(&twice).contains("holds 246 of 14,336 bytes; likely the step holds several passes"));
        assert!(with(&|calls| calls.retain(|call| call.0 == "AllGather")).contains("holds none among 8 ranks"));
        assert!(
            with(&|calls| calls.iter_mut().for_each(|call| call.1 = 6))
                .contains("computes in bf16, the log's all-reduces are fp16")
        );
        assert!(
            with(&|calls| calls.iter_mut().for_each(|call| call.2 += 8))
                .contains("no whole tokens of the config's hidden size")
        );
        assert!(with(&|calls| calls.truncate(123)).contains("the log holds none of whole rows"));
        assert!(
            with(&|calls| calls.push(("Reduce", 9, 7168, 8, 0)))
                .contains("1 reduce of 14,336 bytes among 8 ranks, whole tokens wide")
        );
        assert!(
            with(&|calls| calls.push(("AllReduce", 9, 512, 8, 0)))
                .contains("1 all-reduces of 1,024 bytes are in the log")
        );
        assert!(with(&|calls| calls.push(("AllReduce", 9, 7168, 4, 1))).contains("among 4 ranks"));
        assert!(with(&|calls| calls[123].2 *= 3).contains("3 rows of logits are gathered for passes of 1 tokens"));
        // Another width: heads do not divide over it, and prefill cannot be guarded.
        let odd: Calls = vec![("AllReduce", 9, 7168, 3, 0); 123];
        let workload = read(&log(&odd, 1), Some(&kimi()));
        assert!(workload.disagreements.iter().any(|told| told.contains("prefill is not guarded")), "{workload:?}");
        let given = LogRequest { tensor_parallel: Some(4), ..asked(None) };
        let workload = from_log(&StepLog::parse(log(&kimi_step(), 1)), &given).expect("valid");
        assert!(workload.disagreements[0].contains("--tp says 4 ranks"));
        assert_eq!(workload.tensor_parallel, 8);
    }

    #[test]
    fn gathers_that_are_counted_in_bytes_take_the_type_of_the_rest() {
        let mut calls = kimi_step();
        calls[123] = ("AllGather", 0, 163_840 / 8 * 2, 8, 0);
        let workload = read(&log(&calls, 1), Some(&kimi()));
        assert_eq!(summary(&workload), KIMI);
        assert!(says(&workload, "1 calls that only move data are logged in bytes"));
        assert!(workload.disagreements.is_empty(), "{:?}", workload.disagreements);
    }

    #[test]
    fn what_cannot_be_a_point_is_named() {
        let mut calls = kimi_step();
        calls.extend([
            ("Broadcast", 4, 3, 8, 0),
            ("AllReduce", 0, 64, 8, 0),
            ("AlltoAll", 9, 64, 8, 0),
            ("AllReduce", 9, 1 << 40, 8, 0),
            ("AllReduce", 9, 0, 8, 0),
            ("AllReduce", 9, 64, 1, 2),
        ]);
        let workload = read(&log(&calls, 1), None);
        assert_eq!(summary(&workload), KIMI);
        let note = workload.assumptions.iter().find(|note| note.starts_with("left out")).expect("said");
        for words in ["1 x broadcast of int64, 24 B", "1 x all-reduce of int8", "1 x AlltoAll of bf16", "2048 GiB"] {
            assert!(note.contains(words), "{words}: {note}");
        }
        assert!(!note.contains("x all-reduce of bf16, 128 B"), "a rank alone is no message: {note}");
    }

    #[test]
    fn sends_are_pairs_and_other_groups_are_not_measured() {
        let mut calls = kimi_step();
        calls.extend([
            ("Send", 9, 896, 2, 1),
            ("Send", 9, 896, 2, 1),
            ("Recv", 9, 896, 2, 1),
            ("AllReduce", 9, 64, 4, 2),
        ]);
        let workload = read(&log(&calls, 1), None);
        let others: Vec<_> = workload.points.iter().filter(|point| point.ranks != 8).collect();
        assert_eq!(others.len(), 2);
        assert!(others.iter().all(|point| !point.measured));
        let sends = others.iter().find(|point| point.collective == Collective::SendRecv).expect("sends");
        assert_eq!((sends.calls_per_pass, sends.bytes), (2, 1792));
    }

    #[test]
    fn logs_without_a_step_are_refused_by_name() {
        let refused = |text: &str| from_log(&StepLog::parse(text), &asked(None)).expect_err("refused").to_string();
        assert!(refused("").starts_with("step.log: holds no line such as"));
        let tuning = "node:1:1 [0] NCCL INFO AllReduce: 4096 Bytes -> Algo RING proto LL channel{Lo..Hi}={0..1}";
        assert!(refused(tuning).contains("and 1 other lines of NCCL's"));
        assert!(refused(tuning).contains("NCCL_DEBUG_SUBSYS=COLL"));
        assert!(refused(&log(&vec![("AllReduce", 9, 64, 1, 0)], 1)).contains("one rank's alone"));
        assert!(refused(&log(&vec![("AllReduce", 4, 64, 8, 0)], 1)).contains("none of the 1 calls"));
        let unsaid = log(&kimi_step(), 1).replace(" [nranks=8]", "");
        assert!(refused(&unsaid).contains("say so with --tp N"));
        let given = LogRequest { tensor_parallel: Some(8), ..asked(None) };
        assert_eq!(summary(&from_log(&StepLog::parse(&unsaid), &given).expect("told")), KIMI);
    }

    #[test]
    fn a_log_of_everything_keeps_what_weighs_most() {
        let calls: Calls = (1..=200).map(|tokens| ("AllReduce", 9, tokens * 64, 8, 0)).collect();
        let workload = read(&log(&calls, 1), None);
        assert_eq!(workload.points.len(), MAX_POINTS);
        assert!(workload.points.iter().all(|point| point.bytes > 136 * 128));
        assert!(says(&workload, "136 more sizes are left out"));
    }

    #[test]
    fn processes_that_differ_are_counted() {
        let text = log(&kimi_step(), 8) + &log(&vec![("AllReduce", 9, 7168, 8, 0)], 1);
        assert!(says(&read(&text, None), "7 of 8 processes logged another number of calls"));
    }

    proptest! {
        #[test]
        fn any_sequence_gives_points_or_a_reason(
            step in prop::collection::vec((0..4_u8, 1..4_u64), 1..40),
            times in 1..5_usize,
            noise in prop::collection::vec((0..4_u8, 1..4_u64), 0..20),
        ) {
            let call = |(name, count): &(u8, u64)| {
                (["AllReduce", "AllGather", "Send", "Foo"][usize::from(*name)], 9, count * 64, 8, 0)
            };
            let mut calls: Calls = noise.iter().map(call).collect();
            calls.extend(repeated(&step.iter().map(call).collect(), times));
            let read = from_log(&StepLog::parse(log(&calls, 1)), &asked(Some(&kimi())));
            if let Ok(workload) = read {
                prop_assert!(!workload.points.is_empty());
                let sum: u32 = workload.points.iter().map(|point| point.calls_per_pass).sum();
                prop_assert!(sum as usize <= calls.len());
            }
        }

        #[test]
        fn what_is_found_does_repeat(calls in prop::collection::vec(0..3_u32, 0..200)) {
            if let Some(Repetition { start, period, covered }) = repetition(&calls) {
                prop_assert!(!is_of_layers(&calls[start..start + period]));
                prop_assert!(period >= SHORTEST_STEP && covered >= 2 * period && start + covered <= calls.len());
                let stretch = &calls[start..start + covered];
                prop_assert!(stretch.windows(period + 1).all(|window| window[0] == window[period]));
            }
        }
    }
}
