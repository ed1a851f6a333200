//! The JSON that `-J` writes. Truth values are texts in it, a root is a padded text, and a time that is
//! no number is the text "nan".

use serde::Deserialize;

use super::{Device, MAX_RANKS, MAX_ROWS, Output, ReadError, Row, Table, Timing, clipped, ranks_of};
use crate::env_syntax::is_name;

#[derive(Deserialize)]
struct File {
    #[serde(default)]
    args: Vec<String>,
    #[serde(default)]
    env: Option<Vec<String>>,
    #[serde(default)]
    nccl_version: Option<i32>,
    #[serde(default)]
    config: Config,
    /// Beside the configuration, should a version put it there.
    #[serde(default)]
    devices: Vec<Listed>,
    results: Option<Vec<Entry>>,
    #[serde(default)]
    error: Option<serde_json::Value>,
    #[serde(default)]
    errors: Option<serde_json::Value>,
}

#[derive(Default, Deserialize)]
struct Config {
    #[serde(default)]
    nthreads: Option<u32>,
    #[serde(default)]
    ngpus: Option<u32>,
    #[serde(default)]
    iterations: Option<u32>,
    #[serde(default)]
    aggregated_iterations: Option<u32>,
    #[serde(default)]
    devices: Vec<Listed>,
}

/// The first rank of a process: nccl-tests reads only the first line of each process's list back.
#[derive(Deserialize)]
struct Listed {
    #[serde(default)]
    rank: u32,
    #[serde(default)]
    group: u32,
    #[serde(default)]
    device_hex: String,
    #[serde(default)]
    device_info: String,
}

#[derive(Deserialize)]
struct Entry {
    #[serde(default)]
    size: Option<u64>,
    #[serde(rename = "type", default)]
    dtype: Option<String>,
    #[serde(default)]
    redop: Option<String>,
    #[serde(default)]
    root: Option<Figure>,
    #[serde(default)]
    out_of_place: Option<Side>,
    #[serde(default)]
    in_place: Option<Side>,
}

#[derive(Deserialize)]
struct Side {
    #[serde(default)]
    time: Option<Figure>,
    #[serde(default)]
    cpu_time: Option<Figure>,
    #[serde(default)]
    nwrong: Option<Figure>,
}

#[derive(Deserialize)]
#[serde(untagged)]
enum Figure {
    Number(f64),
    Text(String),
}

impl Figure {
    fn value(&self) -> Option<f64> {
        match self {
            Self::Number(value) => Some(*value),
            Self::Text(text) => text.trim().parse().ok(),
        }
    }
}

/// How the refusal of JSON without an end begins.
pub(super) const CUT: &str = "it ends early";

pub(super) fn read(text: &str) -> Result<Output, ReadError> {
    let mut stream = serde_json::Deserializer::from_str(text).into_iter::<File>();
    let file = match stream.next() {
        Some(Ok(file)) => file,
        Some(Err(error)) if error.is_eof() => {
            return Err(ReadError::Json(format!("{CUT}: the test was stopped")));
        }
        Some(Err(error)) => return Err(ReadError::Json(clipped(&error.to_string()))),
        None => return Err(ReadError::Empty),
    };
    if !text[stream.byte_offset()..].trim().is_empty() {
        return Err(ReadError::Json("something follows its end: one file holds one test".to_owned()));
    }
    let Some(results) = file.results else { return Err(ReadError::ForeignJson) };
    if results.len() > MAX_ROWS {
        return Err(ReadError::TooMuch);
    }
    let mut output = Output::default();
    let (ranks, ranks_unknown, devices) = ranks(&file.config, &file.devices);
    let mut table = Table {
        line: 1,
        program: file.args.first().map(|program| clipped(program)),
        ranks,
        ranks_unknown,
        devices,
        nccl_version: file.nccl_version,
        iterations: file
            .config
            .iterations
            .and_then(|iterations| iterations.checked_mul(file.config.aggregated_iterations.unwrap_or(1).max(1))),
        ..Table::default()
    };
    let mut unsized_rows = 0_u32;
    for (index, entry) in (1_u64..).zip(results) {
        let Some(bytes) = entry.size else {
            unsized_rows += 1;
            continue;
        };
        let side = |side: &Option<Side>| {
            let side = side.as_ref()?;
            let time_us = side.time.as_ref()?.value()?;
            Some(Timing { time_us, wrong: side.nwrong.as_ref().and_then(Figure::value) })
        };
        table.cpu_time |=
            [&entry.out_of_place, &entry.in_place].into_iter().flatten().any(|side| side.cpu_time.is_some());
        table.rows.push(Row {
            line: index,
            bytes,
            dtype: entry.dtype.as_deref().map(clipped),
            redop: entry.redop.as_deref().map(clipped).filter(|redop| !redop.is_empty() && redop != "none"),
            root: entry.root.as_ref().and_then(Figure::value).map(|root| root as i64),
            out_of_place: side(&entry.out_of_place),
            in_place: side(&entry.in_place),
        });
    }
    if unsized_rows > 0 {
        output.remark(format!("left out: {unsized_rows} results without a size"));
    }
    output.environment = file.env.map(|env| nccl_variables(&env));
    output.failure = file.error.or(file.errors).and_then(|error| match error {
        serde_json::Value::String(text) if !text.is_empty() => Some(clipped(&text)),
        serde_json::Value::Array(list) if !list.is_empty() => Some(clipped(&list[0].to_string())),
        _ => None,
    });
    if table.rows.is_empty() && output.failure.is_none() {
        return Err(ReadError::NoRows("its list of results is empty".to_owned()));
    }
    output.tables.push(table);
    Ok(output)
}

/// Ranks from the list, which names the first of each process, and the GPUs each process has.
fn ranks(config: &Config, beside: &[Listed]) -> (Option<u32>, String, Vec<Device>) {
    let listed = if config.devices.is_empty() { beside } else { config.devices.as_slice() };
    let devices: Vec<Device> = listed
        .iter()
        .take(4096)
        .map(|device| Device {
            rank: device.rank,
            group: device.group,
            address: clipped(&device.device_hex),
            name: clipped(&device.device_info),
        })
        .collect();
    let each = config.nthreads.zip(config.ngpus).and_then(|(threads, gpus)| threads.checked_mul(gpus));
    let Some(each) = each.filter(|each| (1..=MAX_RANKS).contains(each)) else {
        return (None, "its configuration does not say how many GPUs each process has".to_owned(), devices);
    };
    if devices.is_empty() {
        return (None, "it lists no devices, so the number of processes is not known".to_owned(), devices);
    }
    let in_order = devices.iter().enumerate().all(|(process, device)| device.rank as usize == process * each as usize);
    let count = devices.len() as u32 * each;
    if listed.len() > devices.len() || count > MAX_RANKS {
        return (None, "its list of devices is longer than is read".to_owned(), devices);
    }
    if !in_order {
        return (None, "its list of devices is not whole".to_owned(), devices);
    }
    if each > 1 && devices.iter().any(|device| device.group != devices[0].group) {
        return (None, "its ranks were split into groups, and the list names one of each process".to_owned(), devices);
    }
    match ranks_of(&devices, count) {
        Ok(ranks) => (Some(ranks), String::new(), devices),
        Err(reason) => (None, reason, devices),
    }
}

/// NCCL's variables of an environment, sorted.
fn nccl_variables(env: &[String]) -> Vec<(String, String)> {
    let mut variables: Vec<(String, String)> = env
        .iter()
        .filter_map(|entry| entry.split_once('='))
        .filter(|(name, _)| name.starts_with("NCCL_") && !name.starts_with("NCCL_TESTS_") && is_name(name))
        .map(|(name, value)| (clipped(name), value.trim().to_owned()))
        .take(512)
        .collect();
    variables.sort();
    variables.dedup_by(|left, right| left.0 == right.0);
    variables
}
