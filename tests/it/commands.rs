//! Whole commands: what comes back on both streams, with which status, and what lies in the files.
//!
//! Text is part of the interface, so it is compared with snapshots. Figures in JSON have more digits
//! than a snapshot should hold; of JSON its shape is compared, and its content by what it must say.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use fs_err as fs;
use nccltune::record::{Trial, VerdictKind};
use serde_json::Value;

use crate::command::{Scene, assert_shown, recorded, shape, skipped_beside_a_driver};

const TUNE: &str = "tune --backend simulated --seed 1 --out X";

fn tuned() -> Scene {
    let scene = Scene::new();
    scene.run(TUNE).ok();
    scene
}

#[test]
fn help_says_what_there_is() {
    let scene = Scene::new();
    for command in [
        "",
        "tune",
        "trial",
        "doctor",
        "workload",
        "explain",
        "emit",
        "report",
        "import",
        "lint",
        "check",
        "exec",
        "completions",
        "man",
    ] {
        let ended = scene.run(&format!("{command} --help")).ok();
        assert_shown(&format!("help-{}", if command.is_empty() { "all" } else { command }), &ended.shown());
    }
    assert_eq!(scene.run("--version").ok().stdout, format!("nccltune {}\n", env!("CARGO_PKG_VERSION")));
    let nothing = scene.run("");
    assert_eq!((nothing.status, nothing.stdout.as_str()), (Some(2), ""), "no command is wrong usage");
    assert!(nothing.stderr.contains("Usage:"), "{}", nothing.stderr);
}

#[test]
fn tune_answers_in_every_format() {
    for format in ["text", "csv", "markdown"] {
        let scene = Scene::new();
        let ended = scene.run(&format!("{TUNE} --format {format}")).ok();
        assert_shown(&format!("tune-{format}"), &ended.shown());
    }
}

#[test]
fn tune_is_quiet_or_talkative_as_asked() {
    let scene = Scene::new();
    let quiet = scene.run("tune --backend simulated --seed 1 --out quiet --quiet").ok();
    assert_eq!(quiet.stderr, "");
    let talkative = scene.run("tune --backend simulated --seed 1 --out talkative -v").ok();
    let journal = scene.read("talkative/run.jsonl");
    let told: Vec<&str> = talkative.stderr.lines().filter(|line| line.starts_with('{')).collect();
    // What was journalled before the campaign began was told to nobody.
    assert_eq!(told, journal.lines().skip(1).collect::<Vec<_>>(), "-v prints the event stream");
    // The same command gives the same bytes, dates and places aside.
    assert_eq!(journal, scene.read("quiet/run.jsonl"));
}

/// The fields that choice.json promises, level by level.
const PROMISED: [(&str, &[&str]); 12] = [
    (
        "",
        &[
            "format",
            "verdict",
            "reason",
            "simulated",
            "replayed",
            "labels",
            "env",
            "required_environment",
            "answers",
            "objective",
            "points",
            "guard",
            "vetoed",
            "noise_floor",
            "thresholds",
            "statistics",
            "memory",
            "fingerprint",
            "search",
            "trials",
        ],
    ),
    ("/answers/0", &["profile", "kind", "env", "table", "server_args"]),
    ("/objective", &["unit", "weights", "baseline", "winner", "ratio", "ratio_ci95", "batches"]),
    ("/objective/batches/0", &["batch", "weight", "baseline_us", "winner_us"]),
    ("/points/0", POINT),
    ("/guard/0", POINT),
    ("/vetoed/0", &["arm", "reason"]),
    ("/thresholds", &["min_gain", "max_regression"]),
    ("/statistics", &["method", "launches", "confidence"]),
    ("/memory", &["device_mib_per_rank", "host_mib"]),
    ("/search", &["arms", "measured_cells", "full_grid_cells", "wall_s", "launches", "stopped_by"]),
    ("/objective/weights", &["1", "4", "16"]),
];
const POINT: &[&str] = &[
    "collective",
    "dtype",
    "bytes",
    "batch",
    "calls_per_pass",
    "weight",
    "baseline_us",
    "winner_us",
    "ratio",
    "ratio_ci95",
    "margin",
    "safe",
    "effective",
];

#[test]
fn tune_answers_in_json_with_every_promised_field() {
    let scene = Scene::new();
    let ended = scene.run(&format!("{TUNE} --format json")).ok();
    let json = ended.json();
    assert_eq!(json, serde_json::from_str::<Value>(&scene.read("X/choice.json")).unwrap(), "stdout is choice.json");
    for (place, fields) in PROMISED {
        let object = json.pointer(place).unwrap_or_else(|| panic!("choice.json has no {place}"));
        for field in fields {
            assert!(object.get(field).is_some(), "choice.json lacks {place}/{field}");
        }
    }
    assert_eq!(json["objective"]["unit"], "us_per_pass");
    assert_eq!(json["search"]["stopped_by"], "complete");
    assert_shown("tune-json-shape", &serde_json::to_string_pretty(&shape(&json)).unwrap());
}

#[test]
fn a_kept_default_has_the_same_fields_and_files_without_variables() {
    let scene = Scene::new();
    let json = scene.run("tune --backend simulated --space baseline --out X --format json").ok().json();
    for field in PROMISED[0].1 {
        assert!(json.get(field).is_some(), "choice.json lacks {field}");
    }
    assert_eq!(json["verdict"], "keep-default");
    assert_eq!(json["objective"]["winner"], Value::Null, "nothing was adopted");
    assert_eq!((&json["env"], &json["answers"]), (&serde_json::json!({}), &serde_json::json!([])));
    for file in ["X/tuned.env", "X/tuned.sh"] {
        let text = scene.read(file);
        assert!(text.lines().all(|line| line.starts_with('#')), "{file}:\n{text}");
        assert!(text.contains("the default is the answer"), "{file}:\n{text}");
    }
}

#[test]
fn everything_a_simulated_run_says_is_labelled() {
    let scene = Scene::new();
    for format in ["text", "json", "csv", "markdown"] {
        let run = format!("run-{format}");
        let ended = scene.run(&format!("tune --backend simulated --out {run} --quiet --format {format}")).ok();
        assert!(ended.stdout.contains("SIMULATED"), "{format}:\n{}", ended.stdout);
        for file in ["tuned.env", "tuned.sh", "choice.json", "manifest.json"] {
            assert!(scene.read(&format!("{run}/{file}")).contains("SIMULATED"), "{file}");
        }
        let choice = scene.choice(&run);
        assert!(choice.simulated && !choice.replayed);
        assert_eq!(choice.labels, ["SIMULATED"]);
    }
    // In CSV every row says it: rows are what gets copied.
    let csv = scene.run("tune --backend simulated --out rows --quiet --format csv").ok().stdout;
    assert!(csv.lines().skip(1).all(|row| row.contains("SIMULATED")), "{csv}");
    for emit_as in ["env", "shell"] {
        assert!(scene.run(&format!("emit --run rows --as {emit_as}")).ok().stdout.contains("SIMULATED"));
    }
    let dry = scene.run("tune --backend simulated --dry-run").ok().stdout;
    assert!(dry.contains("SIMULATED"), "{dry}");
}

#[test]
fn the_label_of_a_simulation_survives_its_replay() {
    let scene = tuned();
    let ended = scene.run("tune --backend replay --recorded X --out Y --format json").ok();
    let choice = scene.choice("Y");
    assert!(choice.simulated && choice.replayed);
    assert_eq!(choice.labels, ["SIMULATED", "REPLAYED"]);
    assert_eq!(choice.env, scene.choice("X").env);
    assert!(ended.stdout.contains("SIMULATED"));
    assert!(scene.read("Y/tuned.env").contains("SIMULATED"));
}

#[test]
fn a_dry_run_plans_and_writes_nothing() {
    let scene = Scene::new();
    let ended = scene.run("tune --backend simulated --seed 1 --space host-memory --out X --dry-run").ok();
    assert_shown("tune-dry-run", &ended.shown());
    let json = scene.run("tune --backend simulated --space host-memory --dry-run --format json").ok().json();
    assert_shown("tune-dry-run-json-shape", &serde_json::to_string_pretty(&shape(&json)).unwrap());
    assert!(scene.contents().is_empty(), "{:?}", scene.contents().keys());
    // What is announced is what is done.
    let run = scene.run("tune --backend simulated --space host-memory --out X --format json").ok().json();
    let arms = json["arms"].as_array().unwrap().len();
    assert_eq!(run["search"]["arms"], arms);
    let search_cells = scene
        .journal("X")
        .iter()
        .take_while(|line| !matches!(line.event, nccltune::record::Event::FinalistsChosen { .. }))
        .filter(|line| matches!(line.event, nccltune::record::Event::CellMeasured(_)))
        .count();
    assert_eq!(json["search_cells"], search_cells);
}

#[test]
fn workload_shows_each_preset_under_each_engine() {
    let scene = Scene::new();
    for (preset, tp) in [("kimi-k2.5", 8), ("llama-3.1-70b", 4)] {
        for engine in ["sglang", "vllm", "torch", "none"] {
            let line = format!("workload --model {preset} --tp {tp} --engine {engine} --gpu-memory 96GiB");
            assert_shown(&format!("workload-{preset}-{engine}"), &scene.run(&line).ok().shown());
            // The three machine-readable forms say the same.
            let json = scene.run(&format!("{line} --format json")).ok().json();
            let csv = scene.run(&format!("{line} --format csv")).ok().stdout;
            let markdown = scene.run(&format!("{line} --format markdown")).ok().stdout;
            let points: Vec<&Value> =
                ["points", "guard"].iter().flat_map(|set| json[set].as_array().unwrap()).collect();
            let mut rows = csv::Reader::from_reader(csv.as_bytes());
            let rows: Vec<BTreeMap<String, String>> = rows.deserialize().map(Result::unwrap).collect();
            assert_eq!(rows.len(), points.len(), "{line}");
            assert_eq!(markdown.lines().filter(|row| row.contains(" bf16")).count(), points.len(), "{markdown}");
            for (row, point) in rows.iter().zip(points) {
                for field in ["collective", "dtype", "phase", "origin"] {
                    assert_eq!(row[field], point[field].as_str().unwrap(), "{line}");
                }
                for field in ["bytes", "ranks", "calls_per_pass", "batch"] {
                    assert_eq!(row[field], point[field].to_string(), "{line}");
                }
            }
        }
    }
    assert!(scene.contents().is_empty());
}

#[test]
fn workload_of_a_speculating_server_in_every_format() {
    let scene = Scene::new();
    for format in ["json", "csv", "markdown"] {
        let line = format!("workload --tp 2 --batch 1:0.7,8:0.3 --verify-tokens 4 --chunk 2048 --format {format}");
        assert_shown(&format!("workload-speculating-{format}"), &scene.run(&line).ok().shown());
    }
}

#[test]
fn workload_of_drafts_and_layouts() {
    let scene = Scene::new();
    scene.write(
        "eagle.json",
        r#"{"architectures": ["LlamaForCausalLMEagle3"], "torch_dtype": "bfloat16", "hidden_size": 7168,
            "num_hidden_layers": 1, "num_attention_heads": 64, "num_key_value_heads": 64, "head_dim": 128,
            "intermediate_size": 18432, "vocab_size": 163840, "draft_vocab_size": 32000}"#,
    );
    for (name, flags) in [
        ("draft", "--model kimi-k2.5 --tp 8 --batch 1 --verify-tokens 4 --draft-model eagle.json"),
        ("dp-attention", "--model deepseek-v3 --tp 8 --batch 1,16 --dp-attention --ep"),
        ("stages", "--model llama-3.1-70b --tp 4 --pp 2 --batch 4 --engine vllm --engine-version 0.10.1"),
    ] {
        let line = format!("workload {flags} --gpu-memory 96GiB");
        assert_shown(&format!("workload-{name}"), &scene.run(&line).ok().shown());
    }
    // A chain of steps says how many tokens are checked.
    let by = |flags: &str| scene.run(&format!("workload --batch 1 {flags} --format json")).ok().json();
    assert_eq!(by("--draft-model eagle.json --draft-steps 3"), by("--draft-model eagle.json --verify-tokens 4"));
    assert_eq!(by("--pp 2 --tp 4")["layout"][0], "2 pipeline stages");
    // Without --tp the stages share the eight GPUs that are taken to be there.
    let stages = scene.run("workload --pp 2 --format json").ok().json();
    assert_eq!(stages["tensor_parallel"], 4);
}

/// What processes log of `steps` decode steps of Kimi-K2.5 over 8 GPUs, and a line of something else.
fn kimi_log(steps: usize, all_reduces: usize) -> String {
    let mut text = String::from("INFO: Started server process\n");
    let mut call = |number: usize, name: &str, count: u64| {
        for pid in 41..49 {
            text.push_str(&format!(
                "node:{pid}:{pid} [0] NCCL INFO {name}: opCount {number:x} sendbuff 0x1 recvbuff 0x2 count {count} datatype \
                 9 op 0 root 0 comm 0x{pid} [nranks=8] stream 0x3\n"
            ));
        }
    };
    for step in 0..steps {
        (0..all_reduces).for_each(|number| call(step + number, "AllReduce", 7168));
        call(step, "AllGather", 163_840 / 8);
    }
    text
}

#[test]
fn a_servers_log_is_a_workload() {
    let scene = Scene::new();
    scene.write("step.log", kimi_log(3, 123));
    scene.write("fused.log", kimi_log(3, 2));
    scene.write("fused-more.log", kimi_log(3, 62));
    let ended = scene.run("workload --from-log step.log --model kimi-k2.5 --gpu-memory 96GiB").ok();
    assert_shown("workload-from-log", &ended.shown());
    let fused = scene.run("workload --from-log fused-more.log --model kimi-k2.5 --engine sglang").ok().stdout;
    assert!(fused.contains("Where log and config disagree"), "{fused}");
    assert!(fused.contains("the config makes 123 all-reduces a pass"), "{fused}");
    let json = |line: &str| scene.run(&format!("workload {line} --format json")).ok().json();
    let agreed = json("--from-log step.log --model kimi-k2.5");
    assert_eq!(agreed.get("disagreements"), None);
    assert_eq!((&agreed["points"][0]["calls_per_pass"], &agreed["points"][0]["phase"]), (&123.into(), &"step".into()));
    assert!(json("--from-log fused.log --model kimi-k2.5")["disagreements"].as_array().unwrap().len() == 1);

    // Tuned for as any workload, guarded and tried where the model is known.
    let tune = "tune --backend simulated --seed 1 --from-log step.log --quiet";
    let known = scene.run(&format!("{tune} --model kimi-k2.5 --out known --format json")).ok().json();
    assert_eq!(known["points"][0]["bytes"], 14_336);
    assert_eq!(known["guard"].as_array().unwrap().len(), 3);
    assert!(known["trials"].as_array().unwrap().iter().any(|trial| trial["tokens"] == 1), "{}", known["trials"]);
    let alone = scene.run(&format!("{tune} --out alone --format json")).ok().json();
    assert_eq!(alone["guard"], serde_json::json!([]));
    assert_eq!(alone["trials"], serde_json::json!([]));
    let header = scene.read("alone/tuned.env");
    assert!(header.contains("one step of a server's log"), "{header}");
    // The log is needed once: a run goes on without it.
    fs::remove_file(scene.path("step.log")).unwrap();
    scene.run("tune --resume --out known --quiet").ok();
}

#[test]
fn what_an_engine_sets_itself_holds_in_every_arm_and_is_named() {
    let scene = Scene::new();
    let run = |name: &str, flags: &str| {
        scene.run(&format!("tune --backend simulated --seed 1 --no-trial --quiet --out {name} {flags}")).ok();
        (scene.choice(name).required_environment, scene.read(&format!("{name}/tuned.env")))
    };
    let (held, file) = run("sglang", "--engine sglang");
    assert_eq!(held.len(), 3, "{held:?}");
    for line in [
        "holds only while: CUDA_DEVICE_MAX_CONNECTIONS=8 (sglang sets it itself)",
        "holds only while: NCCL_CUMEM_ENABLE=0 (sglang sets it itself)",
        "holds only while: NCCL_NVLS_ENABLE=0 (sglang sets it itself)",
    ] {
        assert!(file.contains(line), "{line}\n{file}");
    }
    let (held, file) = run("old", "--engine vllm --engine-version v0.10.1.1");
    assert_eq!(held.len(), 1);
    assert!(file.contains("holds only while: NCCL_CUMEM_ENABLE=0 (vllm 0.10.1.x sets it itself)"), "{file}");
    assert!(file.contains("engine vllm 0.10.1.x"), "{file}");
    for (name, flags) in [
        ("vllm", "--engine vllm"),
        ("new", "--engine vllm --engine-version 0.11.0"),
        ("torch", "--engine torch"),
        ("none", "--engine none"),
    ] {
        let (held, file) = run(name, flags);
        assert!(held.is_empty() && !file.contains("sets it itself"), "{flags}: {held:?}");
    }
    // What the user pins goes before what the engine would set, and says so.
    let ended = scene.run("tune --backend simulated --no-trial --dry-run --pin NCCL_CUMEM_ENABLE=1 --format json").ok();
    let notices = ended.json()["notices"].to_string();
    assert!(notices.contains("SGLang would set NCCL_CUMEM_ENABLE=0 itself and leaves 1 alone"), "{notices}");
}

#[test]
fn emit_prints_the_files_of_the_run() {
    let scene = tuned();
    for (emit_as, file) in [("env", "tuned.env"), ("shell", "tuned.sh")] {
        let ended = scene.run(&format!("emit --run X --as {emit_as}")).ok();
        assert_eq!(ended.stdout, scene.read(&format!("X/{file}")));
        assert_eq!(ended.stderr, "");
        assert_shown(&format!("emit-{emit_as}"), &ended.shown());
    }
    assert_eq!(scene.run("emit --run X").ok().stdout, scene.read("X/tuned.env"), "env is the default");
}

/// Variables as a fresh shell has them after sourcing a file, without its own.
fn sourced(scene: &Scene, file: &str) -> BTreeMap<String, String> {
    let ended = scene.shell(&format!(". ./{file} && env")).ok();
    ended
        .stdout
        .lines()
        .filter_map(|line| line.split_once('='))
        .filter(|(name, _)| name.starts_with("NCCL_") || name.starts_with("CUDA_"))
        .map(|(name, value)| (name.to_owned(), value.to_owned()))
        .collect()
}

/// The file as docker, systemd and compose read it: everything after the first `=`, taken literally.
fn variables(text: &str) -> BTreeMap<String, String> {
    text.lines()
        .filter(|line| !line.starts_with('#') && !line.is_empty())
        .map(|line| line.split_once('=').unwrap_or_else(|| panic!("{line:?} is no NAME=VALUE")))
        .map(|(name, value)| (name.to_owned(), value.to_owned()))
        .collect()
}

#[test]
fn a_shell_and_a_container_get_the_variables_of_the_choice() {
    let scene = tuned();
    let replay = format!("tune --backend replay --recorded {} --out R", recorded("h200x2-host-memory").display());
    scene.run(&replay).ok();
    scene.run("tune --backend simulated --seed 1 --out P --pin NCCL_SHM_DISABLE=0").ok();
    for run in ["X", "R", "P"] {
        let choice = scene.choice(run);
        assert_eq!(choice.verdict, VerdictKind::Adopt, "{run}: {}", choice.reason);
        assert!(!choice.env.is_empty());
        let shell = scene.run(&format!("emit --run {run} --as shell")).ok().stdout;
        scene.write("emitted.sh", shell);
        assert_eq!(sourced(&scene, "emitted.sh"), choice.env, "{run}");
        assert_eq!(sourced(&scene, &format!("{run}/tuned.sh")), choice.env, "{run}");
        assert_eq!(variables(&scene.read(&format!("{run}/tuned.env"))), choice.env, "{run}");
    }
    assert_eq!(scene.choice("P").env["NCCL_SHM_DISABLE"], "0", "a pin travels with the answer");
    assert_eq!(scene.choice("R").env["NCCL_P2P_DISABLE"], "1", "a pin travels with the answer");
}

#[test]
fn an_env_file_is_plain_and_explains_each_variable() {
    let scene = tuned();
    let text = scene.read("X/tuned.env");
    let lines: Vec<&str> = text.lines().collect();
    assert!(lines[1].contains("docker"), "line 2 says whom the file is for: {}", lines[1]);
    let mut seen = 0;
    for pair in lines.windows(2) {
        let [above, line] = pair else { continue };
        if line.starts_with('#') {
            continue;
        }
        seen += 1;
        assert!(above.starts_with("# ") && above.len() > 20, "no explanation above {line:?}: {above:?}");
        let (name, value) = line.split_once('=').unwrap();
        assert!(name.bytes().all(|byte| byte.is_ascii_uppercase() || byte.is_ascii_digit() || byte == b'_'), "{line}");
        let forbidden = |character: char| character.is_whitespace() || ";'\"#$\\".contains(character);
        assert!(!value.is_empty() && !value.contains(forbidden), "{line:?} reads differently in some consumer");
    }
    assert_eq!(seen, scene.choice("X").env.len());
    assert!(text.ends_with('\n') && !text.contains('\r'));
}

#[test]
fn every_file_of_a_run_is_there_and_nothing_else() {
    let scene = tuned();
    let names: BTreeSet<String> = scene.contents().into_keys().collect();
    let expected = [
        "X/",
        "X/choice.json",
        "X/manifest.json",
        "X/report.html",
        "X/run.jsonl",
        "X/run.lock",
        "X/summary.csv",
        "X/tuned.env",
        "X/tuned.sh",
    ];
    assert_eq!(names, expected.map(str::to_owned).into());
    let summary = scene.read("X/summary.csv");
    assert_eq!(
        summary.lines().next(),
        Some(
            "arm,collective,dtype,bytes,launches,median_us,ci95_low_us,ci95_high_us,p99_us,algo,proto,channels,\
             threads,transport,outcome,ranks,issue,placement"
        )
    );
    let choice = scene.choice("X");
    // One row per arm and measured point.
    assert_eq!(summary.lines().count() - 1, choice.search.arms as usize * 9);
    for name in expected.iter().filter(|name| !name.ends_with('/')) {
        let mode = std::os::unix::fs::PermissionsExt::mode(&fs::metadata(scene.path(name)).unwrap().permissions());
        assert_eq!(mode & 0o400, 0o400, "{name} can be read");
    }
    let open = std::os::unix::fs::PermissionsExt::mode(&fs::metadata(scene.path("X/tuned.env")).unwrap().permissions());
    assert_eq!(open & 0o777, 0o644, "whoever may read the folder may read the answer");
}

#[test]
fn a_flag_goes_before_the_environment_and_that_before_the_default() {
    let scene = Scene::new();
    let batch = |variable: Option<&str>, flag: &str| {
        let line = format!("tune --backend simulated --space baseline {flag} --dry-run --format json");
        let mut command = scene.command(&line.split_whitespace().collect::<Vec<_>>());
        if let Some(value) = variable {
            command.env("NCCLTUNE_BATCH", value);
        }
        let output = command.output().unwrap();
        let json: Value = serde_json::from_slice(&output.stdout).unwrap();
        json["workload"]["points"].as_array().unwrap().iter().map(|point| point["batch"].to_string()).next().unwrap()
    };
    assert_eq!(batch(None, ""), "1");
    assert_eq!(batch(Some("4"), ""), "4");
    assert_eq!(batch(Some("4"), "--batch 8"), "8");
}

#[test]
fn doctor_refuses_a_machine_without_a_driver_and_says_what_to_do() {
    if skipped_beside_a_driver("doctor_refuses_a_machine_without_a_driver_and_says_what_to_do") {
        return;
    }
    let scene = Scene::new();
    let json = scene.run("doctor --format json");
    assert_eq!(json.status, Some(3), "{}", json.stderr);
    let checks = json.json()["checks"].as_array().unwrap().clone();
    let of = |group: &str| -> Vec<(String, String)> {
        let text = |check: &Value, field: &str| check[field].as_str().unwrap().to_owned();
        checks
            .iter()
            .filter(|check| check["group"] == group)
            .map(|check| (text(check, "name"), text(check, "verdict")))
            .collect()
    };
    let told = [("driver-usable", "fail"), ("driver-parameters", "unknown")];
    assert_eq!(of("driver"), told.map(|(name, verdict)| (name.to_owned(), verdict.to_owned())));
    assert!(of("gpu").len() >= 5 && of("gpu").iter().all(|(_, verdict)| verdict == "unknown"), "{:?}", of("gpu"));
    for check in &checks {
        for field in ["name", "group", "verdict", "question", "evidence", "advice"] {
            assert!(check[field].is_string(), "{check}");
        }
        let needs_advice = check["verdict"] == "fail" || check["verdict"] == "warn";
        assert!(!needs_advice || check["advice"] != "", "{check}");
    }
    let text = scene.run("doctor");
    assert_eq!(text.status, Some(3));
    // The rest is about this very machine.
    let shown: Vec<&str> = text
        .stdout
        .lines()
        .filter(|line| line.contains("driver-usable") || line.contains("  gpu  "))
        .map(str::trim_end)
        .collect();
    assert_shown("doctor-without-driver", &shown.join("\n"));
    for format in ["csv", "markdown"] {
        let ended = scene.run(&format!("doctor --format {format}"));
        assert_eq!(ended.status, Some(3));
        assert!(ended.stdout.contains("driver-usable"), "{}", ended.stdout);
    }
    assert!(scene.contents().is_empty());
}

#[test]
fn auto_simulates_where_no_driver_is_and_only_there() {
    if skipped_beside_a_driver("auto_simulates_where_no_driver_is_and_only_there") {
        return;
    }
    let scene = Scene::new();
    let ended = scene.run("tune --out X --quiet").ok();
    assert!(ended.stdout.contains("SIMULATED"), "{}", ended.stdout);
    assert!(scene.choice("X").simulated);
    let refused = scene.run("tune --backend nccl --out Y");
    assert_eq!((refused.status, refused.stdout.as_str()), (Some(3), ""), "NCCL was asked for and cannot be had");
    assert!(!scene.path("Y").exists());
}

#[test]
fn a_run_without_a_name_gets_one_of_its_own() {
    let scene = Scene::new();
    scene.run("tune --backend simulated --space baseline").ok();
    let runs: Vec<_> = fs::read_dir(scene.path("results")).unwrap().map(|entry| entry.unwrap().path()).collect();
    assert_eq!(runs.len(), 1, "{runs:?}");
    assert!(runs[0].join("choice.json").exists());
}

#[test]
fn a_run_without_a_trial_is_tried_later_from_its_directory_alone() {
    let scene = Scene::new();
    let presets = Path::new(env!("CARGO_MANIFEST_DIR")).join("search-spaces/models");
    scene.write("config.json", fs::read(presets.join("llama-3.1-70b.json")).expect("a preset"));
    scene.run("tune --backend simulated --model config.json --chunk 1024 --no-trial --out run").ok();
    assert!(scene.choice("run").trials.is_empty());
    assert!(scene.read("run/tuned.env").contains("UNTRIED"));
    // What is tried is what was tuned for, whatever became of the model's file.
    fs::remove_file(scene.path("config.json")).expect("a file");
    scene.run("trial --run run").ok();
    let tried = scene.choice("run").trials;
    assert!(tried.iter().any(|trial| trial.tokens == Some(1024)), "{tried:?}");
    assert!(tried.iter().any(|trial| trial.tokens.is_none() && trial.ratio.is_some()), "{tried:?}");
    assert!(!scene.read("run/tuned.env").contains("UNTRIED"));
    // The directory holds all of it.
    scene.run("tune --backend replay --recorded run --out again").ok();
    let ratios = |trials: &[Trial]| trials.iter().map(|trial| trial.ratio).collect::<Vec<_>>();
    assert_eq!(ratios(&scene.choice("again").trials), ratios(&tried));
}

#[test]
fn a_trial_without_a_run_times_the_default_alone() {
    let scene = Scene::new();
    scene.run("trial --backend simulated --model bench --batch 1,16 --out run").ok();
    let choice = scene.choice("run");
    assert!(choice.winner.is_none());
    assert!(choice.trials.iter().all(|trial| trial.arm == "default" && trial.ratio.is_none()), "{:?}", choice.trials);
    let timed = |tokens| choice.trials.iter().any(|trial| trial.tokens == Some(tokens) && trial.baseline_ms.is_some());
    assert!(timed(1) && timed(16) && timed(2048), "{:?}", choice.trials);
}
