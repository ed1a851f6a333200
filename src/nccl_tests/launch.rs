//! From rows to what one launch of one arm measured.

use std::collections::BTreeMap;

use super::{Device, Output, ReadError, Row, Table, Timing, collective_of, data_type};
use crate::collective::{Collective, DataType, Form, Placement};
use crate::record::PointKey;
use crate::wording::plural;

/// Times beyond this are no measurement; the journal draws the same line.
const MOST_TIME_US: f64 = 1e12;

/// The one of the two times of a row.
const fn time_of(placement: Placement, row: &Row) -> Option<Timing> {
    match placement {
        Placement::InPlace => row.in_place,
        Placement::OutOfPlace => row.out_of_place,
    }
}

/// The other of the two.
const fn other(placement: Placement) -> Placement {
    match placement {
        Placement::InPlace => Placement::OutOfPlace,
        Placement::OutOfPlace => Placement::InPlace,
    }
}

/// What the user says of a file.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Wish {
    /// Ranks of an operation.
    pub ranks: Option<u32>,
    /// The collective.
    pub collective: Option<Collective>,
    /// Which of the two times counts; in place without, where every row has it.
    pub placement: Option<Placement>,
}

/// What was measured at one point.
#[derive(Debug, Clone, PartialEq)]
pub struct Cell {
    /// The point.
    pub point: PointKey,
    /// Microseconds per operation, once for each time the row was printed.
    pub times_us: Vec<f64>,
    /// What was wrong with the data.
    pub wrong: Option<String>,
    /// Operations per timing, where known.
    pub iterations: Option<u32>,
}

/// One launch.
#[derive(Debug, Clone, PartialEq)]
pub struct Launch {
    /// By point.
    pub cells: Vec<Cell>,
    /// Which times these are.
    pub placement: Placement,
    /// Ranks; none where nothing was measured.
    pub ranks: Option<u32>,
    /// GPUs, as far as they are listed.
    pub devices: Vec<Device>,
    /// Version of NCCL as a code, where the output tells.
    pub nccl_version: Option<i32>,
    /// What the test said when it gave up.
    pub failure: Option<String>,
    /// What was left out and why.
    pub remarks: Vec<String>,
}

/// Why rows were left out, with how many.
#[derive(Default)]
struct LeftOut(BTreeMap<String, u32>);

impl LeftOut {
    fn add(&mut self, reason: impl Into<String>) {
        *self.0.entry(reason.into()).or_default() += 1;
    }

    fn words(&self) -> impl Iterator<Item = String> {
        self.0.iter().map(|(reason, count)| format!("left out: {count} {}, {reason}", plural(*count, "row", "rows")))
    }
}

impl Output {
    /// What this file measured, read as one launch.
    pub fn launch(&self, wish: &Wish) -> Result<Launch, ReadError> {
        let mut launch = Launch {
            cells: Vec::new(),
            placement: wish.placement.unwrap_or(Placement::InPlace),
            ranks: None,
            devices: Vec::new(),
            nccl_version: None,
            failure: self.failure.clone(),
            remarks: self.remarks.clone(),
        };
        let mut tables: Vec<(&Table, Collective)> = Vec::new();
        let mut refusal = None;
        for table in self.tables.iter().filter(|table| !table.rows.is_empty()) {
            if table.cpu_time {
                return Err(ReadError::CpuTime);
            }
            match collective(table, wish) {
                Ok(collective) => tables.push((table, collective)),
                Err(error) => {
                    launch.remarks.push(format!("the table in line {} was left out: {error}", table.line));
                    refusal.get_or_insert(error);
                }
            }
        }
        if let (Some(refusal), []) = (refusal, tables.as_slice()) {
            return Err(refusal);
        }
        if tables.is_empty() {
            return match &self.failure {
                Some(_) => Ok(launch),
                None => Err(ReadError::NoRows(self.remarks.join("; "))),
            };
        }
        for (table, _) in &tables {
            let ranks = ranks(table, wish)?;
            if let Some(other) = launch.ranks.filter(|other| *other != ranks) {
                return Err(ReadError::OtherRanks { found: ranks, wanted: other });
            }
            launch.ranks = Some(ranks);
            if launch.devices.is_empty() {
                launch.devices.clone_from(&table.devices);
            }
            launch.nccl_version = launch.nccl_version.or(table.nccl_version);
        }
        launch.placement = placement(&tables, wish);
        let mut left_out = LeftOut::default();
        let mut cells: BTreeMap<PointKey, (usize, Cell)> = BTreeMap::new();
        let mut repeated = false;
        for (number, (table, collective)) in tables.iter().enumerate() {
            let mut root = None;
            for row in &table.rows {
                let (dtype, timing) = match usable(row, *collective, launch.placement, &mut root) {
                    Ok(usable) => usable,
                    Err(reason) => {
                        left_out.add(reason);
                        continue;
                    }
                };
                let point = PointKey {
                    form: Form { placement: launch.placement, ..Form::usual(*collective) },
                    ..PointKey::usual(*collective, dtype, row.bytes, launch.ranks.unwrap_or(0))
                };
                let (first, cell) = cells.entry(point).or_insert_with(|| {
                    (number, Cell { point, times_us: Vec::new(), wrong: None, iterations: table.iterations })
                });
                repeated |= *first != number;
                cell.times_us.push(timing.time_us);
                cell.wrong = cell.wrong.take().or_else(|| wrong(table, row));
            }
        }
        if repeated {
            launch.remarks.push(
                "the file holds several starts of one test, which count as one launch; give each a file of its own"
                    .to_owned(),
            );
        }
        launch.cells = cells.into_values().map(|(_, cell)| cell).collect();
        if launch.cells.is_empty() && self.failure.is_none() {
            return Err(ReadError::NothingUsable(left_out.words().collect::<Vec<_>>().join("; ")));
        }
        launch.remarks.extend(left_out.words());
        Ok(launch)
    }
}

fn collective(table: &Table, wish: &Wish) -> Result<Collective, ReadError> {
    let named = match &table.program {
        Some(program) => match collective_of(program) {
            Some(collective) => Some(collective),
            None if program.contains("_perf") => return Err(ReadError::UnknownCollective(program.clone())),
            None => None,
        },
        None => None,
    };
    match (named, wish.collective) {
        (Some(found), Some(wanted)) if found != wanted => Err(ReadError::OtherCollective { found, wanted }),
        (Some(collective), _) | (None, Some(collective)) => Ok(collective),
        (None, None) => Err(ReadError::NoCollective),
    }
}

fn ranks(table: &Table, wish: &Wish) -> Result<u32, ReadError> {
    let ranks = match (table.ranks, wish.ranks) {
        (Some(found), Some(wanted)) if found != wanted => return Err(ReadError::OtherRanks { found, wanted }),
        (Some(ranks), _) | (None, Some(ranks)) => ranks,
        (None, None) => return Err(ReadError::NoRanks(table.ranks_unknown.clone())),
    };
    if ranks < 2 { Err(ReadError::OneRank) } else { Ok(ranks) }
}

/// In place where every row has it; else the other, where every row has that. Launches of a run must
/// all be of one kind.
fn placement(tables: &[(&Table, Collective)], wish: &Wish) -> Placement {
    let every = |placement: Placement| {
        tables.iter().flat_map(|(table, _)| &table.rows).all(|row| time_of(placement, row).is_some())
    };
    match wish.placement {
        Some(placement) => placement,
        None if every(Placement::InPlace) || !every(Placement::OutOfPlace) => Placement::InPlace,
        None => other(Placement::InPlace),
    }
}

fn usable(
    row: &Row,
    collective: Collective,
    placement: Placement,
    root: &mut Option<i64>,
) -> Result<(DataType, Timing), String> {
    if row.bytes == 0 {
        return Err("zero bytes, an empty call".to_owned());
    }
    let Some(name) = &row.dtype else { return Err("no column says the type of the elements".to_owned()) };
    let Some(dtype) = data_type(name) else {
        return Err(format!("type {name}, which this version does not measure"));
    };
    let reduces = matches!(collective, Collective::AllReduce | Collective::ReduceScatter | Collective::Reduce);
    if reduces && let Some(redop) = row.redop.as_deref().filter(|redop| *redop != "sum") {
        return Err(format!("reduction {redop}; servers issue sums"));
    }
    if let Some(this) = row.root.filter(|this| *this >= 0)
        && *root.get_or_insert(this) != this
    {
        return Err("another root than that of the first row".to_owned());
    }
    let Some(timing) = time_of(placement, row) else { return Err(format!("no time {}", placement.name())) };
    if !(timing.time_us > 0.0 && timing.time_us <= MOST_TIME_US) {
        return Err("a time that is no time".to_owned());
    }
    Ok((dtype, timing))
}

fn wrong(table: &Table, row: &Row) -> Option<String> {
    let counts = [(Placement::OutOfPlace, row.out_of_place), (Placement::InPlace, row.in_place)];
    for (placement, timing) in counts {
        if let Some(wrong) = timing.and_then(|timing| timing.wrong).filter(|wrong| *wrong > 0.0 || wrong.is_nan()) {
            return Some(format!("nccl-tests counted {wrong} wrong elements {}", placement.name()));
        }
    }
    table.wrong_somewhere.then(|| "nccl-tests found values out of bounds and does not say at which size".to_owned())
}
