//! The header of a table: which columns there are, where each ends, and in which unit the time is.

/// What a column holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    Size,
    Count,
    Type,
    Redop,
    Root,
    /// Time of the first or second placement.
    Time(usize),
    /// Wrong elements of a placement.
    Wrong(usize),
    /// A figure that is not needed.
    Figure,
    /// Two words: a date and a time.
    Timestamp,
}

/// A column.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Column {
    pub(super) kind: Kind,
    /// Byte of the line behind its title: titles and cells stand to the right.
    pub(super) end: usize,
}

/// A header.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Header {
    pub(super) columns: Vec<Column>,
    /// Microseconds of one unit of the time column.
    pub(super) unit_us: u32,
    /// The last title is cut, and so may its cells be.
    pub(super) is_cut: bool,
    /// The title is "cputime".
    pub(super) cpu_time: bool,
    /// Placement of the first and the second set of figures: whether it is in place.
    pub(super) in_place: [bool; 2],
}

/// Titles of columns that are known and not needed.
const FIGURES: [&str; 8] = ["algbw", "busbw", "error", "res", "i_min", "i_max", "i_p99", "i_cv%"];

/// Reads a header, if the line is one: it names a size and a time, or at least a size and a type.
pub(super) fn header(line: &str, line_above: &str) -> Option<Header> {
    let line = line.strip_prefix('#').map_or_else(|| line.to_owned(), |rest| format!(" {rest}"));
    let titles = words(&line);
    let is_size = |title: &str| title == "size" || title == "bytes";
    if !titles.first().is_some_and(|(title, _)| is_size(title)) || titles.len() < 2 || titles.len() > 40 {
        return None;
    }
    // "size" begins sentences too; the second title never does.
    if !["count", "N", "type", "time", "cputime"].contains(&titles[1].0) {
        return None;
    }
    let (mut times, mut columns, mut cpu_time) = (0_usize, Vec::new(), false);
    for (title, end) in &titles {
        let kind = match *title {
            "size" | "bytes" => Kind::Size,
            "count" | "N" => Kind::Count,
            "type" => Kind::Type,
            "redop" | "op" => Kind::Redop,
            "root" => Kind::Root,
            "time" | "cputime" => {
                cpu_time |= *title == "cputime";
                times += 1;
                Kind::Time(times - 1)
            }
            "#wrong" | "wrong" => Kind::Wrong(times.saturating_sub(1)),
            "timestamp" => Kind::Timestamp,
            // algbw, busbw, i_min and its relatives; "error" and "res", the largest delta, which is no
            // count: sums in another order differ a little.
            _ => Kind::Figure,
        };
        columns.push(Column { kind, end: *end });
    }
    let is_cut = columns.last().is_some_and(|last| last.kind == Kind::Figure)
        && titles.last().is_some_and(|(title, _)| !FIGURES.contains(title));
    let only_in_place = line_above.contains("in-place") && !line_above.contains("out-of-place");
    Some(Header {
        columns,
        // Until 2018 the first title was "bytes", and times were milliseconds.
        unit_us: if titles[0].0 == "bytes" { 1000 } else { 1 },
        is_cut,
        cpu_time,
        in_place: [only_in_place, true],
    })
}

impl Header {
    /// Whether any column holds a time.
    pub(super) fn has_time(&self) -> bool {
        self.columns.iter().any(|column| matches!(column.kind, Kind::Time(_)))
    }

    /// The line of units below the titles, if this is it.
    pub(super) fn take_units(&mut self, line: &str) {
        let unit = words(line).into_iter().find_map(|(word, _)| match word {
            "(us)" => Some(1),
            "(ms)" => Some(1000),
            _ => None,
        });
        if let Some(unit) = unit {
            self.unit_us = unit;
        }
    }

    /// Words of a whole row.
    fn words(&self) -> usize {
        self.columns.iter().map(|column| if column.kind == Kind::Timestamp { 2 } else { 1 }).sum()
    }
}

/// What the words of a row fill.
#[derive(Debug, Clone, Default, PartialEq)]
pub(super) struct Cells {
    pub(super) bytes: u64,
    pub(super) dtype: Option<String>,
    pub(super) redop: Option<String>,
    pub(super) root: Option<i64>,
    /// Times in the column's unit, by placement.
    pub(super) times: [Option<f64>; 2],
    pub(super) wrong: [Option<f64>; 2],
}

/// How a text fits a header.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum Fit {
    /// A whole row.
    Whole(Cells),
    /// The beginning of one.
    Beginning,
    /// No row.
    No,
}

/// Fits a text into a header's columns.
pub(super) fn fit(header: &Header, text: &str) -> Fit {
    let words = words(text);
    if words.is_empty() || words.len() > header.words() {
        return Fit::No;
    }
    let mut cells = Cells::default();
    let mut rest = words.as_slice();
    for (index, column) in header.columns.iter().enumerate() {
        let Some(((word, end), after)) = rest.split_first() else {
            let lacks_the_cut_one = header.is_cut && index + 1 == header.columns.len();
            return if lacks_the_cut_one { Fit::Whole(cells) } else { Fit::Beginning };
        };
        // 2022: collectives without a reduction leave that column blank.
        let is_blank =
            column.kind == Kind::Redop && word.starts_with(|first: char| first == '-' || first.is_ascii_digit());
        if is_blank {
            continue;
        }
        // A replayed trace is timed in place only: its first figures are blanks.
        if column.kind == Kind::Time(0) && second_only(header, *end, rest.len()) {
            return fit_second(header, cells, rest);
        }
        if !take(&mut cells, column.kind, word) {
            return Fit::No;
        }
        rest = after;
        if column.kind == Kind::Timestamp {
            let Some((_, after)) = rest.split_first() else { return Fit::Beginning };
            rest = after;
        }
    }
    if rest.is_empty() { Fit::Whole(cells) } else { Fit::No }
}

/// Whether the figures that are left stand under the second set of titles, and are all of them.
fn second_only(header: &Header, end: usize, left: usize) -> bool {
    let Some(second) = header.columns.iter().position(|column| column.kind == Kind::Time(1)) else { return false };
    let wanted: usize =
        header.columns[second..].iter().map(|column| if column.kind == Kind::Timestamp { 2 } else { 1 }).sum();
    let first_ends = header.columns[second - 1].end;
    left <= wanted && end > first_ends
}

fn fit_second(header: &Header, mut cells: Cells, words: &[(&str, usize)]) -> Fit {
    let second = header.columns.iter().skip_while(|column| column.kind != Kind::Time(1));
    let mut rest = words;
    for column in second {
        let Some(((word, _), after)) = rest.split_first() else { return Fit::Beginning };
        if !take(&mut cells, column.kind, word) {
            return Fit::No;
        }
        rest = after;
        if column.kind == Kind::Timestamp {
            let Some((_, after)) = rest.split_first() else { return Fit::Beginning };
            rest = after;
        }
    }
    if rest.is_empty() { Fit::Whole(cells) } else { Fit::No }
}

/// Takes a word as a column's cell, or says that it is none.
fn take(cells: &mut Cells, kind: Kind, word: &str) -> bool {
    let is_figure = |word: &str| word == "N/A" || word == "-nan" || word.parse::<f64>().is_ok();
    match kind {
        Kind::Size => word.parse().map(|bytes| cells.bytes = bytes).is_ok(),
        Kind::Count => word.parse::<u64>().is_ok(),
        Kind::Type => {
            cells.dtype = Some(word.chars().take(32).collect());
            word.starts_with(|first: char| first.is_ascii_alphabetic())
        }
        Kind::Redop => {
            cells.redop = Some(word.chars().take(32).collect()).filter(|redop| redop != "none");
            word.starts_with(|first: char| first.is_ascii_alphabetic())
        }
        Kind::Root => word.parse().map(|root| cells.root = Some(root)).is_ok(),
        Kind::Time(place) => {
            if let Some(time) = cells.times.get_mut(place) {
                *time = word.parse().ok();
            }
            is_figure(word)
        }
        Kind::Wrong(place) => {
            if let Some(wrong) = cells.wrong.get_mut(place) {
                *wrong = word.parse().ok();
            }
            is_figure(word)
        }
        Kind::Figure => is_figure(word),
        Kind::Timestamp => word.starts_with(|first: char| first.is_ascii_digit()),
    }
}

/// Words with the byte behind each.
pub(super) fn words(line: &str) -> Vec<(&str, usize)> {
    let mut words = Vec::new();
    let mut start = None;
    for (at, character) in line.char_indices() {
        match (start, character.is_whitespace()) {
            (None, false) => start = Some(at),
            (Some(from), true) => {
                words.push((&line[from..at], at));
                start = None;
            }
            _ => {}
        }
        if words.len() > 64 {
            break;
        }
    }
    if let Some(from) = start {
        words.push((&line[from..], line.len()));
    }
    words
}
