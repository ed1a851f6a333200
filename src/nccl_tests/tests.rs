//! Every shape in `tests/it/nccl-tests/`, written by hand after the printf formats, and what comes of it.

use crate::collective::Placement;
use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::path::Path;

use proptest::prelude::*;

use super::*;
use crate::record::PointKey;

fn files() -> BTreeMap<String, Vec<u8>> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/it/nccl-tests");
    let entries = fs_err::read_dir(folder).unwrap().map(|entry| entry.unwrap());
    entries.map(|entry| (entry.file_name().into_string().unwrap(), fs_err::read(entry.path()).unwrap())).collect()
}

fn file(name: &str) -> Vec<u8> {
    files().remove(name).unwrap_or_else(|| panic!("there is no {name}"))
}

fn told(launch: &Launch) -> String {
    let mut text = String::new();
    if let Some(first) = launch.cells.first() {
        let PointKey { collective, dtype, ranks, .. } = first.point;
        let sizes: Vec<String> = launch
            .cells
            .iter()
            .map(|cell| {
                let times: Vec<String> = cell.times_us.iter().map(|us| format!("{us:.2}")).collect();
                let wrong = if cell.wrong.is_some() { "!" } else { "" };
                let other = if cell.point.collective == collective { "" } else { cell.point.collective.name() };
                format!("{other}{}={}{wrong}", cell.point.bytes, times.join("/"))
            })
            .collect();
        let _ = write!(text, "{collective} {dtype} x{ranks} {}: {}", launch.placement.name(), sizes.join(" "));
        let _ = write!(
            text,
            "; iterations {:?}, NCCL {:?}, {} devices",
            first.iterations,
            launch.nccl_version,
            launch.devices.len()
        );
        for wrong in launch.cells.iter().filter_map(|cell| cell.wrong.as_ref()).take(1) {
            let _ = write!(text, "\n    wrong: {wrong}");
        }
    } else {
        text.push_str("nothing measured");
    }
    if let Some(failure) = &launch.failure {
        let _ = write!(text, "\n    failure: {failure}");
    }
    for remark in &launch.remarks {
        let _ = write!(text, "\n    {remark}");
    }
    text
}

fn outcome(bytes: &[u8], wish: &Wish) -> String {
    match read(bytes).and_then(|output| output.launch(wish)) {
        Ok(launch) => told(&launch),
        Err(error) => {
            format!("REFUSED: {error}{}", error.hint().map(|hint| format!("\n    hint: {hint}")).unwrap_or_default())
        }
    }
}

#[test]
fn every_shape_is_read_or_refused_by_name() {
    let files = files();
    assert!(files.len() >= 30, "{} shapes", files.len());
    let mut text = String::new();
    for (name, bytes) in &files {
        let _ = writeln!(text, "{name}\n  {}", outcome(bytes, &Wish::default()));
    }
    insta::assert_snapshot!(text);
}

#[test]
fn whatever_stands_around_the_table_leaves_its_figures_alone() {
    let plain = read(&file("current.txt")).unwrap().launch(&Wish::default()).unwrap();
    assert_eq!(plain.cells.len(), 5);
    for name in [
        "open-mpi-tags.txt",
        "open-mpi-5-tags.txt",
        "srun-labels.txt",
        "kubectl-times.txt",
        "compose-names.txt",
        "pdsh-names.txt",
        "log-inside-rows.txt",
        "log-of-a-host-that-begins-with-digits.txt",
        "log-with-times.txt",
        "library-version-inside-a-row.txt",
        "carriage-returns.txt",
        "colours.txt",
        "timestamps.txt",
    ] {
        let launch = read(&file(name)).unwrap().launch(&Wish::default()).unwrap();
        assert_eq!(launch.cells, plain.cells, "{name}");
        assert_eq!(launch.remarks, plain.remarks, "{name}");
    }
}

#[test]
fn what_the_output_does_not_say_can_be_said_and_never_contradicted() {
    let wish = |ranks: Option<u32>, collective: Option<Collective>| Wish { ranks, collective, placement: None };
    let bytes = file("without-devices.txt");
    assert!(outcome(&bytes, &Wish::default()).contains("--ranks"));
    assert!(outcome(&bytes, &wish(Some(8), None)).starts_with("all-reduce bf16 x8 in-place"));
    let bytes = file("without-a-name.txt");
    assert!(outcome(&bytes, &Wish::default()).contains("--collective"));
    assert!(outcome(&bytes, &wish(None, Some(Collective::AllReduce))).starts_with("all-reduce bf16 x8 in-place"));
    let bytes = file("current.txt");
    assert_eq!(outcome(&bytes, &wish(Some(4), None)), "REFUSED: the output is of 8 ranks, not of 4");
    let other = outcome(&bytes, &wish(None, Some(Collective::AllGather)));
    assert_eq!(other, "REFUSED: the output is of all-reduce, not of all-gather");
    let out = Wish { placement: Some(Placement::OutOfPlace), ..Wish::default() };
    assert!(outcome(&bytes, &out).contains("out-of-place: 4096=21.31"), "{}", outcome(&bytes, &out));
    let two = file("two-collectives.txt");
    let gather = outcome(&two, &wish(None, Some(Collective::AllGather)));
    assert!(gather.starts_with("all-gather bf16 x8") && gather.contains("was left out"), "{gather}");
}

/// Rows by value, without the lines they stand in.
fn rows(bytes: &[u8]) -> Vec<(u64, Option<Timing>, Option<Timing>)> {
    let tables = read(bytes).map(|output| output.tables).unwrap_or_default();
    tables.iter().flat_map(|table| &table.rows).map(|row| (row.bytes, row.out_of_place, row.in_place)).collect()
}

#[test]
fn a_file_cut_at_any_byte_yields_whole_rows_or_none() {
    for (name, bytes) in files() {
        // Two files in one are refused, and the first alone is not.
        if name == "json-twice.json" {
            continue;
        }
        let whole = rows(&bytes);
        // Every byte where something stands between or inside the rows, and some bytes of the others.
        let close = name.contains("log") || name.contains("2017") || name.contains("tags") || name.contains("wrong");
        for end in (0..bytes.len()).step_by(if close { 1 } else { 11 }) {
            let cut = rows(&bytes[..end]);
            assert!(whole.starts_with(&cut), "{name} cut at byte {end}: {cut:?}");
        }
    }
}

#[test]
fn hostile_sizes_are_bounded() {
    let line = "x".repeat(200_000);
    assert_eq!(read(line.as_bytes()).unwrap_err(), ReadError::NoTable);
    assert_eq!(read(&b"[".repeat(100_000)).unwrap_err(), ReadError::NoTable);
    assert!(matches!(read(&b"{".repeat(100_000)).unwrap_err(), ReadError::Json(_)));
    let deep = format!("{{\"results\":{}", "[".repeat(100_000));
    assert!(matches!(read(deep.as_bytes()).unwrap_err(), ReadError::Json(_)));
    let header = "# size count type time\n".repeat(MAX_TABLES + 1);
    assert_eq!(read(header.as_bytes()).unwrap_err(), ReadError::TooMuch);
    let many = "# size count type time\n".to_owned() + &"8 2 float 1.0\n".repeat(MAX_ROWS + 1);
    assert_eq!(read(many.as_bytes()).unwrap_err(), ReadError::TooMuch);
    let tags: Vec<String> = (0..10_000).map(|tag| format!("{tag}: # size count type time\n")).collect();
    assert_eq!(read(tags.concat().as_bytes()).unwrap_err(), ReadError::TooMuch);
    let rank = "# Using devices\n# Rank 4294967295 Group 1 [x] y\n# size count type time\n8 2 float 1.0\n";
    let launch = read(rank.as_bytes()).unwrap().launch(&Wish::default());
    assert!(matches!(launch, Err(ReadError::NoCollective | ReadError::NoRanks(_))), "{launch:?}");
}

#[test]
fn messages_hold_nothing_that_steers_a_terminal() {
    let text = "# Collective test starting: \u{1b}]0;x\u{7}evil_perf\n# size count type time\n8 2 float 1.0\n";
    let told = outcome(text.as_bytes(), &Wish::default());
    assert!(told.starts_with("REFUSED") && !told.contains(['\u{1b}', '\u{7}']), "{told:?}");
}

proptest! {
    #[test]
    fn no_text_makes_the_reader_panic(text in "([#\\[\\]0-9a-z:. \\n<>/-]|size|time|type|count|float|NCCL INFO |Rank ){0,200}") {
        let _ = outcome(text.as_bytes(), &Wish::default());
    }

    #[test]
    fn no_bytes_make_the_reader_panic(bytes in proptest::collection::vec(any::<u8>(), 0..300)) {
        let _ = outcome(&bytes, &Wish::default());
    }
}
