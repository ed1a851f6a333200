//! Does a whole run find what was planted in the simulated machine?
//!
//! Goal: an adopted answer's interval should hold the true effect about as often as it says, and the
//! arm should be one that is really faster. Method: `nccltune tune` over many seeds; the truth comes
//! from the machine's file, read here by other code than the program's.

use std::path::Path;
use std::process::Command;

use fs_err as fs;
use nccltune::record::Event;
use serde_json::Value;

use crate::command::Scene;

const MACHINE: &str = "search-spaces/machines/rtx-pro-6000-x8.toml";
/// Seeds 1 to this; a run takes a thirtieth of a second.
const RUNS: u32 = 200;

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

fn number(value: &Value) -> f64 {
    value.as_f64().expect("a number")
}

/// The machine's table.
struct Planted(toml::Table);

impl Planted {
    fn read() -> Self {
        let text = fs::read_to_string(root().join(MACHINE)).expect("the machine");
        Self(text.parse().expect("TOML"))
    }

    /// The log of the factor that these settings put on a message of this size: factors of matching
    /// effects multiply, and logs are interpolated over the log of the size.
    fn log_factor(&self, env: &Value, bytes: f64) -> f64 {
        let numbers = |value: &toml::Value| -> Vec<f64> {
            let number = |value: &toml::Value| value.as_float().or(value.as_integer().map(|number| number as f64));
            value.as_array().expect("a list").iter().filter_map(number).collect()
        };
        let sizes = numbers(&self.0["sizes_bytes"]);
        let mut logs = vec![0.0; sizes.len()];
        for effect in self.0["effect"].as_array().expect("effects") {
            let when = effect["when"].as_table().expect("a table");
            if when.iter().all(|(variable, value)| env[variable].as_str() == value.as_str()) {
                for (log, factor) in logs.iter_mut().zip(numbers(&effect["factor"])) {
                    *log += factor.ln();
                }
            }
        }
        let above = sizes.iter().position(|size| *size > bytes).expect("a size inside the table");
        let share = (bytes / sizes[above - 1]).ln() / (sizes[above] / sizes[above - 1]).ln();
        logs[above - 1] + share * (logs[above] - logs[above - 1])
    }
}

/// What came of runs with the seeds 1 to `runs`.
#[derive(Default)]
struct Outcome {
    adopted: u32,
    /// Adopted, and the interval holds the truth.
    held: u32,
    /// Adopted, and the whole interval promises more than the truth.
    too_good: u32,
}

fn over_seeds(runs: u32) -> Outcome {
    let planted = Planted::read();
    let folder = tempfile::tempdir().expect("a folder");
    let mut outcome = Outcome::default();
    for seed in 1..=runs {
        let out = folder.path().join(seed.to_string());
        let output = Command::new(env!("CARGO_BIN_EXE_nccltune"))
            .args(["tune", "--backend", "simulated", "--quiet", "--format", "json", "--seed", &seed.to_string()])
            .arg("--out")
            .arg(&out)
            .output()
            .expect("the program runs");
        assert!(output.status.success(), "seed {seed}: {}", String::from_utf8_lossy(&output.stderr));
        let choice: Value = serde_json::from_slice(&output.stdout).expect("JSON");
        fs::remove_dir_all(&out).expect("the run can go");
        if choice["verdict"] != "adopt" {
            continue;
        }
        let deciding = choice["points"].as_array().expect("points").iter().filter(|point| point["measured"] == true);
        let truth: f64 = deciding
            .map(|point| number(&point["weight"]) * planted.log_factor(&choice["env"], number(&point["bytes"])))
            .sum();
        assert!(truth < 0.98_f64.ln(), "seed {seed} adopted an arm that gains less than 2 %");
        let end = |index: usize| number(&choice["objective"]["ratio_ci95"][index]).ln();
        outcome.adopted += 1;
        outcome.held += u32::from((end(0)..=end(1)).contains(&truth));
        outcome.too_good += u32::from(end(1) < truth);
    }
    outcome
}

#[test]
fn what_was_planted_is_found() {
    let Outcome { adopted, held, too_good } = over_seeds(RUNS);
    assert!(adopted * 100 >= RUNS * 95, "{adopted} of {RUNS} runs adopted an arm");
    assert!(held * 100 >= adopted * 93, "{held} of {adopted} intervals hold the truth");
    // A gain promised falsely is worse than one missed; this is where it would show.
    assert!(too_good * 100 <= adopted * 5, "{too_good} of {adopted} intervals promise too much");
    let readme = fs::read_to_string(root().join("README.md")).expect("the page");
    let readme = readme.split_whitespace().collect::<Vec<_>>().join(" ");
    for claim in [format!("1 to {RUNS}, {adopted} adopt"), format!("in {held} of these; the other {too_good} ")] {
        assert!(readme.contains(&claim), "README.md does not say {claim:?}");
    }
}

/// A single arm repeated three times says little of the noise, and too few launches would let a
/// regression pass on a noisy machine.
#[test]
fn where_the_noise_is_unknown_the_most_launches_are_planned() {
    let scene = Scene::new();
    scene.write(
        "one.toml",
        "format = 1\nname = \"one\"\ndescription = \"one arm\"\n\
         [[axis]]\nvariable = \"NCCL_MIN_NCHANNELS\"\nvalues = [\"unset\", \"16\"]\n",
    );
    scene.run("tune --backend simulated --space one.toml --no-trial --out run").ok();
    let lines = scene.journal("run");
    let planned = lines.iter().find_map(|line| match &line.event {
        Event::FinalistsChosen { launches, .. } => Some(*launches),
        _ => None,
    });
    assert_eq!(planned, Some(24));
}
