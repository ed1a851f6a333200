//! The table, with whatever stands around and inside it.

use std::collections::{BTreeMap, BTreeSet};

use super::header::{Cells, Fit, Header, fit, header, words};
use super::prefix::{log_start, untagged, without_escapes};
use super::{
    Device, MAX_RANKS, MAX_ROWS, MAX_TABLES, Output, ReadError, Row, Table, Timing, clipped, collective_of, ranks_of,
};
use crate::wording::plural;

/// Bytes of a line that are looked at: no line of a table is longer.
const LINE_BYTES: usize = 64 * 1024;
/// Streams that are told apart by their tags.
const MAX_STREAMS: usize = 4096;

/// What one process prints.
#[derive(Default)]
struct Stream {
    /// The table that is being read, once its header was.
    header: Option<Header>,
    table: Option<usize>,
    /// What was printed of a row so far, and where it began.
    pending: String,
    pending_line: u64,
    /// The comment before, which may say which placement is shown.
    comment: String,
    context: Context,
}

/// What the comments above a table say.
#[derive(Default)]
struct Context {
    program: Option<String>,
    threads_gpus: Option<(u32, u32)>,
    iterations: Option<u32>,
    nccl_version: Option<i32>,
    devices: Vec<Device>,
    /// The list of devices does not name all.
    cut_devices: bool,
    /// A table came since: the next list of devices is another test's.
    used: bool,
}

pub(super) fn read(text: &str) -> Result<Output, ReadError> {
    let mut reader = Reader::default();
    // What does not end with a line feed may have been cut, in the middle of a number too.
    let (whole, tail) = text.rsplit_once('\n').unwrap_or(("", text));
    for (index, line) in (1_u64..).zip(whole.split('\n')) {
        reader.line(index, line)?;
    }
    reader.tail(whole.split('\n').count() as u64 + 1, tail);
    reader.finish()
}

#[derive(Default)]
struct Reader {
    output: Output,
    streams: BTreeMap<String, Stream>,
    rows: usize,
    torn: u32,
    /// A row without a header, and a header without a time.
    headless: Option<u64>,
    timeless: Option<u64>,
    /// A program that was named outside of any comment, such as in an echoed command line.
    program: Option<String>,
    /// Hosts that printed something: their names tell where a row ends and NCCL's log begins.
    hosts: BTreeSet<String>,
}

impl Reader {
    fn line(&mut self, number: u64, line: &str) -> Result<(), ReadError> {
        let line = line.trim_end_matches('\r');
        if line.len() > LINE_BYTES {
            return Ok(());
        }
        let clean;
        let line = if line.contains('\u{1b}') {
            clean = without_escapes(line);
            &clean
        } else {
            line
        };
        let (tag, content) = untagged(line);
        if !self.streams.contains_key(&tag) && self.streams.len() >= MAX_STREAMS {
            return Ok(());
        }
        let mut stream = self.streams.remove(&tag).unwrap_or_default();
        let result = self.content(&mut stream, number, content);
        self.streams.insert(tag, stream);
        result
    }

    fn content(&mut self, stream: &mut Stream, number: u64, content: &str) -> Result<(), ReadError> {
        if let Some(start) = log_start(content) {
            let host = &content[start.at..start.host_end];
            if start.at == 0 && !host.is_empty() && self.hosts.len() < MAX_STREAMS {
                self.hosts.insert(host.to_owned());
            }
            let head = before_log(stream, &self.hosts, content, start.at, start.host_end);
            if !head.trim().is_empty() && !head.trim_start().starts_with('#') {
                self.piece(stream, number, head)?;
            }
            return Ok(());
        }
        if content.trim_start().starts_with('#') {
            self.tear(stream);
            return self.comment(stream, number, content.trim_start());
        }
        if content.trim().is_empty() {
            return Ok(());
        }
        if self.piece(stream, number, content)? {
            return Ok(());
        }
        self.elsewhere(stream, number, content);
        Ok(())
    }

    /// A piece of a row; whether it is one.
    fn piece(&mut self, stream: &mut Stream, number: u64, piece: &str) -> Result<bool, ReadError> {
        let Some(header) = &stream.header else { return Ok(false) };
        if !stream.pending.is_empty() && stream.pending.len() < LINE_BYTES {
            let joined = format!("{}{piece}", stream.pending);
            match fit(header, &joined) {
                Fit::Whole(cells) => {
                    stream.pending.clear();
                    return self.row(stream, stream.pending_line, &cells).map(|()| true);
                }
                Fit::Beginning => {
                    stream.pending = joined;
                    return Ok(true);
                }
                Fit::No => {}
            }
        }
        match fit(header, piece) {
            Fit::Whole(cells) => {
                self.tear(stream);
                self.row(stream, number, &cells).map(|()| true)
            }
            Fit::Beginning => {
                self.tear(stream);
                piece.clone_into(&mut stream.pending);
                stream.pending_line = number;
                Ok(true)
            }
            Fit::No => Ok(false),
        }
    }

    fn row(&mut self, stream: &Stream, line: u64, cells: &Cells) -> Result<(), ReadError> {
        let (Some(table), Some(header)) = (stream.table, &stream.header) else { return Ok(()) };
        if self.rows >= MAX_ROWS {
            return Err(ReadError::TooMuch);
        }
        self.rows += 1;
        let timing = |place: usize| {
            let time_us = cells.times[place]? * f64::from(header.unit_us);
            Some(Timing { time_us, wrong: cells.wrong[place] })
        };
        let mut row = Row {
            line,
            bytes: cells.bytes,
            dtype: cells.dtype.clone(),
            redop: cells.redop.clone(),
            root: cells.root,
            out_of_place: None,
            in_place: None,
        };
        for place in 0..2 {
            if header.in_place[place] {
                row.in_place = row.in_place.or(timing(place));
            } else {
                row.out_of_place = timing(place);
            }
        }
        self.output.tables[table].rows.push(row);
        Ok(())
    }

    /// A row that was begun will not be finished.
    fn tear(&mut self, stream: &mut Stream) {
        if !stream.pending.is_empty() {
            stream.pending.clear();
            self.torn += 1;
        }
    }

    fn comment(&mut self, stream: &mut Stream, number: u64, line: &str) -> Result<(), ReadError> {
        let above = std::mem::replace(&mut stream.comment, line.chars().take(400).collect());
        if let Some(header) = header(line, &above) {
            if self.output.tables.len() >= MAX_TABLES {
                return Err(ReadError::TooMuch);
            }
            if header.has_time() {
                stream.table = Some(self.output.tables.len());
                self.output.tables.push(stream.context.table(number, header.cpu_time));
                stream.context.used = true;
                stream.header = Some(header);
            } else {
                self.timeless.get_or_insert(number);
                stream.header = None;
                stream.table = None;
            }
            return Ok(());
        }
        if let Some(header) = &mut stream.header
            && above.contains("time")
            && line.contains("(B)")
        {
            header.take_units(line);
        }
        let text = line.trim_start_matches('#').trim();
        let host = text.starts_with("Rank ").then(|| text.split_once(" on ")).flatten();
        if let Some(host) = host.and_then(|(_, rest)| rest.split_whitespace().next())
            && self.hosts.len() < MAX_STREAMS
        {
            self.hosts.insert(host.to_owned());
        }
        if let Some(found) = text.strip_prefix("Out of bounds values : ")
            && let Some(table) = stream.table
        {
            let wrong = found.split_whitespace().next().and_then(|count| count.parse::<u64>().ok()).unwrap_or(0);
            let table = &mut self.output.tables[table];
            let counted = table.rows.iter().any(|row| {
                [row.out_of_place, row.in_place]
                    .into_iter()
                    .flatten()
                    .any(|timing| timing.wrong.is_some_and(|wrong| wrong > 0.0))
            });
            table.wrong_somewhere = wrong > 0 && !counted;
        }
        stream.context.comment(text);
        Ok(())
    }

    /// A line that is neither table nor comment nor log: an echoed command, or what went wrong.
    fn elsewhere(&mut self, stream: &mut Stream, number: u64, content: &str) {
        let failure = ["Test NCCL failure", "Test CUDA failure", "Test timeout", "Test failure"]
            .into_iter()
            .any(|sign| content.contains(sign));
        // The first says what happened; those that follow say where it was passed on.
        if failure && self.output.failure.is_none() {
            self.output.failure = Some(clipped(content));
        }
        // The first forms print some of their head without a number sign.
        stream.context.comment(content.trim());
        if stream.header.is_none() && looks_like_a_row(content) {
            self.headless.get_or_insert(number);
        }
        let named = content.split(|character: char| character.is_whitespace() || "'\"`;()".contains(character));
        let program = named.take(64).find(|word| word.contains("_perf") && collective_of(word).is_some());
        if let Some(program) = program {
            self.program = Some(clipped(program));
        }
    }

    /// What follows the last line feed. A comment may be read; a row may be half a row.
    fn tail(&mut self, number: u64, tail: &str) {
        let (tag, content) = untagged(tail);
        if content.trim().is_empty() {
            return;
        }
        if content.trim_start().starts_with('#') || log_start(content).is_some() {
            return;
        }
        let mut stream = self.streams.remove(&tag).unwrap_or_default();
        match &stream.header {
            Some(header) if fit(header, content) != Fit::No => {
                self.tear(&mut stream);
                self.torn += 1;
            }
            _ => self.elsewhere(&mut stream, number, content),
        }
        self.streams.insert(tag, stream);
    }

    fn finish(mut self) -> Result<Output, ReadError> {
        for stream in self.streams.values() {
            self.torn += u32::from(!stream.pending.is_empty());
        }
        // The first forms print the device list process by process: under tags, each stream has a part.
        let listed_elsewhere =
            self.streams.values().any(|stream| stream.table.is_none() && !stream.context.devices.is_empty());
        for table in &mut self.output.tables {
            if table.program.is_none() {
                table.program.clone_from(&self.program);
            }
            if listed_elsewhere && table.ranks.is_some() {
                table.ranks = None;
                "its list of devices is spread over several tags".clone_into(&mut table.ranks_unknown);
            }
        }
        if self.torn > 0 {
            let torn = self.torn;
            self.output.remark(format!("left out: {torn} {}", plural(torn, "row that is cut", "rows that are cut")));
        }
        if self.rows > 0 || self.output.failure.is_some() {
            return Ok(self.output);
        }
        Err(match (self.output.tables.first(), self.timeless, self.headless) {
            (Some(_), _, _) => ReadError::NoRows(self.output.remarks.join("; ")),
            (None, Some(line), _) => ReadError::NoColumn { line, column: "time" },
            (None, None, Some(line)) => ReadError::NoHeader { line },
            (None, None, None) => ReadError::NoTable,
        })
    }
}

/// What a line holds of the table before NCCL's log begins. The host's name may stand right behind a
/// cell: it ends where a name begins that is known, or else where its column does.
fn before_log<'a>(stream: &Stream, hosts: &BTreeSet<String>, content: &'a str, at: usize, host_end: usize) -> &'a str {
    let glued = &content[at..host_end];
    if at == 0 || glued.is_empty() {
        return &content[..at];
    }
    if let Some(host) = hosts.iter().filter(|host| glued.ends_with(host.as_str())).max_by_key(|host| host.len()) {
        return &content[..host_end - host.len()];
    }
    if !glued.starts_with(|first: char| first == '-' || first.is_ascii_digit()) {
        return &content[..at];
    }
    let offset = stream.pending.len();
    let column_end = stream.header.iter().flat_map(|header| &header.columns).find_map(|column| {
        let end = column.end.checked_sub(offset)?;
        (at < end && end < host_end).then_some(end)
    });
    let cut = column_end.unwrap_or_else(|| {
        let sign = usize::from(glued.starts_with('-'));
        at + sign + glued[sign..].bytes().take_while(u8::is_ascii_digit).count()
    });
    content.get(..cut).unwrap_or(&content[..at])
}

/// Three words as every table has them: two counts and a type.
fn looks_like_a_row(content: &str) -> bool {
    let words = words(content);
    words.len() >= 6
        && words[..2].iter().all(|(word, _)| word.parse::<u64>().is_ok())
        && words[2].0.starts_with(|first: char| first.is_ascii_alphabetic())
        && words[words.len() - 2].0.parse::<f64>().is_ok()
}

impl Context {
    fn comment(&mut self, text: &str) {
        if let Some(program) = text.strip_prefix("Collective test starting:") {
            self.fresh();
            self.program = Some(clipped(program));
        } else if text.starts_with("nThread ") {
            self.fresh();
            let number = |name: &str| {
                let (_, rest) = text.split_once(name)?;
                rest.split_whitespace().next()?.parse::<u32>().ok()
            };
            self.threads_gpus = number("nThread ").zip(number("nGpus "));
            let aggregated = number(" agg iters: ").unwrap_or(1).max(1);
            self.iterations = plain_iterations(text).and_then(|iterations| iterations.checked_mul(aggregated));
        } else if text.starts_with("nccl-tests version") {
            self.fresh();
            self.nccl_version = text.split_once("nccl-library=").and_then(|(_, code)| code.trim().parse().ok());
        } else if text.starts_with("Using devices") {
            self.fresh();
        } else if text.starts_with("Rank ") {
            match device(text) {
                Some(device) if self.devices.len() < 4096 => self.devices.push(device),
                _ => self.cut_devices = true,
            }
        } else if text == "..." || text.ends_with("...") && !self.devices.is_empty() && !self.used {
            self.cut_devices = true;
        }
    }

    /// What was said belongs to the table above; a new test begins.
    fn fresh(&mut self) {
        if self.used {
            *self = Self::default();
        }
    }

    fn table(&self, line: u64, cpu_time: bool) -> Table {
        let highest = self.devices.iter().map(|device| device.rank).max().unwrap_or(0);
        let listed = (!self.devices.is_empty()).then(|| highest.saturating_add(1));
        // Rank 0 again and again: processes that know nothing of each other.
        let alone = highest == 0 && self.devices.len() > 1;
        let (ranks, ranks_unknown) = match listed {
            Some(_) if alone => (Some(1), String::new()),
            Some(listed) if !self.cut_devices && listed as usize == self.devices.len() && listed <= MAX_RANKS => {
                match ranks_of(&self.devices, listed) {
                    Ok(ranks) => (Some(ranks), String::new()),
                    Err(reason) => (None, reason),
                }
            }
            Some(_) => (None, "its list of devices is not whole".to_owned()),
            None => match self.threads_gpus {
                Some((threads, gpus)) => {
                    (None, format!("{threads} threads of {gpus} GPUs are in each process, but not how many processes"))
                }
                None => (None, String::new()),
            },
        };
        Table {
            line,
            program: self.program.clone(),
            ranks,
            ranks_unknown,
            devices: self.devices.clone(),
            nccl_version: self.nccl_version,
            iterations: self.iterations,
            rows: Vec::new(),
            wrong_somewhere: false,
            cpu_time,
        }
    }
}

/// "warmup iters: 5 iters: 20 agg iters: 1": the one without a word before it.
fn plain_iterations(text: &str) -> Option<u32> {
    text.match_indices("iters: ")
        .find(|(at, _)| !text[..*at].ends_with("warmup ") && !text[..*at].ends_with("agg "))
        .and_then(|(at, mark)| text[at + mark.len()..].split_whitespace().next())
        .and_then(|number| number.parse().ok())
}

/// "Rank  0 Group  0 Pid  12 on  host device  0 [0000:1b:00] NVIDIA H100".
fn device(text: &str) -> Option<Device> {
    let words: Vec<&str> = text.split_whitespace().take(16).collect();
    let after = |name: &str| {
        let at = words.iter().position(|word| *word == name)?;
        words.get(at + 1)?.parse::<u32>().ok()
    };
    let (_, bracket) = text.split_once('[')?;
    let (address, name) = bracket.split_once(']')?;
    Some(Device {
        rank: after("Rank")?,
        group: after("Group").unwrap_or(0),
        address: clipped(address),
        name: clipped(name),
    })
}
