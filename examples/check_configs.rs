//! What every config in a folder comes to: all-reduces per pass, bytes of one for each token, bytes of
//! the logits' all-gather for each token; or why it is refused.
//!
//!     cargo run --release --example check_configs -- FOLDER
//!
//! The folder holds `NAME.json` files, or folders with a `config.json` in each, as they are downloaded.
//! `NAME.hf_quant_config.json` (or `hf_quant_config.json`) beside one is read with it. Columns are
//! separated by tabs. The exit status is 1 where there is nothing to read.
#![expect(clippy::print_stdout, clippy::print_stderr, reason = "a stand-alone program that prints a table")]

use std::error::Error;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::Parser;
use nccltune::workload::{ModelConfig, Standing, parse_config_beside};

#[derive(Parser)]
struct Arguments {
    /// Where the configs are.
    folder: PathBuf,
}

fn main() -> Result<ExitCode, Box<dyn Error>> {
    let folder = Arguments::parse().folder;
    let mut configs: Vec<(String, PathBuf, PathBuf)> = Vec::new();
    for entry in fs_err::read_dir(&folder)? {
        let path = entry?.path();
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        if path.is_dir() {
            if path.join("config.json").is_file() {
                configs.push((name, path.join("config.json"), path.join("hf_quant_config.json")));
            }
        } else if let Some(name) = name.strip_suffix(".json") {
            configs.push((name.to_owned(), path.clone(), folder.join(format!("{name}.hf_quant_config.json"))));
        }
    }
    if configs.is_empty() {
        eprintln!("{}: no config.json in it", folder.display());
        return Ok(ExitCode::FAILURE);
    }
    configs.sort();
    println!("name\tarchitecture\tall_reduces\tbytes_per_token\tlogits_bytes_per_token\tstanding");
    for (name, path, beside) in configs {
        println!("{name}\t{}", row(&path, &beside));
    }
    Ok(ExitCode::SUCCESS)
}

fn row(path: &Path, beside: &Path) -> String {
    let read = || -> Result<String, Box<dyn Error>> {
        let beside = if beside.is_file() { Some(fs_err::read_to_string(beside)?) } else { None };
        let config = parse_config_beside(&fs_err::read_to_string(path)?, "config", beside.as_deref())?;
        let logits = config.logits_bytes(1).map_or_else(|| "-".to_owned(), |bytes| bytes.to_string());
        Ok(format!(
            "{}\t{}\t{}\t{logits}\t{}",
            config.architecture.as_deref().unwrap_or("-"),
            config.all_reduces.calls(),
            config.hidden_size * config.dtype.size_bytes(),
            standing(&config)
        ))
    };
    read().unwrap_or_else(|error| format!("-\t-\t-\t-\trefused: {error}"))
}

fn standing(config: &ModelConfig) -> String {
    match config.standing {
        Standing::Read => "read".to_owned(),
        Standing::Analogy => "by analogy".to_owned(),
        Standing::MadeUp => "made up".to_owned(),
        Standing::Draft(kind) => format!("draft: {kind:?}"),
        Standing::Unknown(reason) => format!("refused without --assume-decoder: {reason}"),
    }
}
