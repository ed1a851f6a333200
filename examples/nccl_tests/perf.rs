//! Running a program of NVIDIA's nccl-tests, for the examples that compare with it.

use std::collections::BTreeMap;
use std::error::Error;
use std::path::{Path, PathBuf};
use std::process::Command;

use nccltune::collective::{DataType, Placement};

/// A folder of links that makes a library the loader's first choice.
pub(crate) fn links(scratch: &Path, library: &Path) -> Result<PathBuf, Box<dyn Error>> {
    let links = scratch.join("lib");
    fs_err::create_dir(&links)?;
    for name in ["libnccl.so", "libnccl.so.2"] {
        std::os::unix::fs::symlink(fs_err::canonicalize(library)?, links.join(name))?;
    }
    Ok(links)
}

/// A type as nccl-tests names it.
pub(crate) const fn type_name(dtype: DataType) -> &'static str {
    match dtype {
        DataType::Bf16 => "bfloat16",
        DataType::Fp16 => "half",
        DataType::Fp32 => "float",
        DataType::Int8 => "int8",
    }
}

/// How the program is started.
pub(crate) struct Perf<'a> {
    pub(crate) program: &'a Path,
    pub(crate) ranks: u32,
    /// One process with a thread for each GPU (`-g`), instead of a process each under mpirun.
    pub(crate) single_process: bool,
    pub(crate) links: &'a Path,
    pub(crate) dtype: DataType,
    /// Tells the slowest rank, instead of the mean over ranks.
    pub(crate) slowest: bool,
    /// Operations in its graph, and replays of it.
    pub(crate) operations: u32,
    pub(crate) replays: u32,
}

impl Perf<'_> {
    /// Powers of two from 4 KiB to 4 MiB under these variables; what it printed, which is kept in a file.
    pub(crate) fn run(&self, variables: &[(String, String)], keep: &Path) -> Result<String, Box<dyn Error>> {
        let library_path = match std::env::var("LD_LIBRARY_PATH") {
            Ok(path) => format!("{}:{path}", self.links.display()),
            Err(_) => self.links.display().to_string(),
        };
        let ranks = self.ranks.to_string();
        let mut command = if self.single_process {
            let mut command = Command::new(self.program);
            command.args(["-g", &ranks]);
            command
        } else {
            let mut command = Command::new("mpirun");
            command.args(["--allow-run-as-root", "--bind-to", "none", "-np", &ranks]).arg(self.program);
            command
        };
        command
            .args(["-b", "4096", "-e", "4194304", "-f", "2", "-d", type_name(self.dtype), "-w", "20"])
            .args(["-a", if self.slowest { "3" } else { "1" }])
            .args(["-n", &self.operations.to_string(), "-G", &self.replays.to_string()])
            .env("LD_LIBRARY_PATH", library_path)
            .envs(variables.iter().map(|(name, value)| (name, value)));
        let output = command.output()?;
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        fs_err::write(keep, &text)?;
        if !output.status.success() {
            return Err(format!("nccl-tests failed: {text}{}", String::from_utf8_lossy(&output.stderr)).into());
        }
        Ok(text)
    }

    /// Microseconds per size, of one of its two columns. nccl-tests names the larger of send and receive buffer, as
    /// nccltune does.
    pub(crate) fn times(&self, text: &str, placement: Placement) -> Result<BTreeMap<u64, f64>, Box<dyn Error>> {
        let mut times = BTreeMap::new();
        for line in text.lines() {
            // size count type redop root | time algbw busbw #wrong | time algbw busbw #wrong
            let columns: Vec<&str> = line.split_whitespace().collect();
            let [size, _, dtype, _, _, out_of_place, _, _, wrong_out, in_place, _, _, wrong_in] = columns[..] else {
                continue;
            };
            if dtype != type_name(self.dtype) {
                continue;
            }
            let (time, wrong) = match placement {
                Placement::InPlace => (in_place, wrong_in),
                Placement::OutOfPlace => (out_of_place, wrong_out),
            };
            if !["0", "N/A"].contains(&wrong) {
                return Err(format!("nccl-tests found wrong results: {line}").into());
            }
            times.insert(size.parse()?, time.parse()?);
        }
        Ok(times)
    }
}
