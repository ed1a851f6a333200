//! What cannot be done is refused: with the documented status, with words that name what is wrong,
//! with nothing on standard output, and with every byte on disk as it was.

use std::collections::BTreeMap;
use std::process::Stdio;

use fs_err as fs;
use nccltune::journal::{JOURNAL_FILE, Journal};
use nccltune::record::VerdictKind;

use crate::command::{Running, Scene, recorded};

/// A refusal: words after `nccltune`, and what standard error must contain.
type Case<'a> = (&'a str, &'a [&'a str]);

/// Runs each case and collects what is wrong with any of them, so that one change of wording shows
/// all it touches. Status 2 in every case: wrong usage or unreadable input.
#[track_caller]
fn assert_refused(scene: &Scene, cases: &[Case<'_>]) {
    let mut wrong = Vec::new();
    let mut before = scene.contents();
    for (line, says) in cases {
        let ended = scene.run(line);
        let said: Vec<&str> = ended.stderr.lines().filter(|line| !line.starts_with("note:")).collect();
        let mut complain = |what: &str| wrong.push(format!("{line}: {what}\n    {}", said.join("\n    ")));
        if ended.status != Some(2) {
            complain(&format!("status {:?}", ended.status));
        }
        if !ended.stdout.is_empty() {
            complain("something on standard output");
        }
        for text in *says {
            if !ended.stderr.contains(text) {
                complain(&format!("does not say {text:?}"));
            }
        }
        if ended.stderr.contains("panicked") || ended.stderr.matches("error:").count() != 1 {
            complain("not one plain error");
        }
        let after = scene.contents();
        let changed = difference(&before, &after);
        if !changed.is_empty() {
            complain(&format!("changed {changed:?}"));
        }
        before = after;
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

fn difference(before: &BTreeMap<String, Vec<u8>>, after: &BTreeMap<String, Vec<u8>>) -> Vec<String> {
    before.keys().chain(after.keys()).filter(|name| before.get(*name) != after.get(*name)).cloned().collect()
}

const DECODER: &str = r#"{"architectures": ["BrandNewForCausalLM"], "hidden_size": 4096, "num_hidden_layers": 32,
 "num_attention_heads": 32, "num_key_value_heads": 8, "intermediate_size": 14336, "vocab_size": 128256}"#;

#[test]
fn models_that_cannot_be_read_or_split() {
    let scene = Scene::new();
    scene.write("new.json", DECODER);
    scene.write("bare.json", r#"{"architectures": ["BrandNewForCausalLM"], "hidden_size": 4096}"#);
    scene.write("broken.json", "{\"hidden_size\": 4096,\n  \"vocab_size\": }\n");
    scene.write("list.json", "[1, 2]");
    scene.write("text.json", r#"{"architectures": ["LlamaForCausalLM"], "hidden_size": "wide", "vocab_size": 1}"#);
    scene.write("folder/config.json", "{");
    scene.write("empty/notes.txt", "no config here");
    assert_refused(
        &scene,
        &[
            (
                "tune --backend simulated --out X --model new.json",
                &["BrandNewForCausalLM", "--assume-decoder", "new.json"],
            ),
            (
                "tune --backend simulated --out X --model bare.json",
                &["bare.json", "num_hidden_layers", "vocab_size", "missing"],
            ),
            ("tune --backend simulated --out X --model broken.json", &["broken.json:2:", "JSON"]),
            ("workload --model broken.json", &["broken.json:2:", "JSON"]),
            ("workload --model list.json", &["list.json", "an object", "a list"]),
            ("workload --model text.json", &["text.json", "hidden_size", "wide"]),
            ("workload --model folder", &["folder/config.json:1:", "JSON"]),
            ("workload --model empty", &["empty/config.json"]),
            ("workload --model nowhere.json", &["nowhere.json", "kimi-k2.5", "llama-3.1-70b"]),
            ("tune --backend simulated --out X --model kimi-k2.6", &["kimi-k2.6", "did you mean", "kimi-k2.5"]),
            (
                "tune --backend simulated --out X --model llama-3.1-70b --tp 3",
                &["over 3 GPUs", "attention heads", "2, 4, 8"],
            ),
            ("tune --backend simulated --out X --tp 1", &["nothing to tune", "--tp 2"]),
            ("tune --backend simulated --out X --tp 16", &["16 GPUs", "there are 8"]),
            ("tune --backend simulated --out X --tp 0", &["--tp", "1..=64"]),
            ("tune --backend simulated --out X --batch 0", &["batch 0", "1 to 65536"]),
            ("tune --backend simulated --out X --batch 4,4", &["4"]),
            ("tune --backend simulated --out X --batch 1:0.7,eight", &["eight"]),
            ("tune --backend simulated --out X --verify-tokens 0", &["--verify-tokens", "1..=1024"]),
            ("tune --backend simulated --out X --engine trtllm", &["trtllm", "sglang, vllm, torch, none"]),
            ("tune --backend simulated --out X --sizes 4K,3", &["3 B", "2 bytes"]),
            ("tune --backend simulated --out X --sizes 0", &["0 B is no possible size"]),
            ("tune --backend simulated --out X --sizes 4K,4096", &["4 KiB", "twice"]),
            ("tune --backend simulated --out X --sizes 4Q", &["4Q", "64KiB"]),
            ("tune --backend simulated --out X --sizes 8G", &["8 GiB", "4 GiB"]),
            ("tune --backend simulated --out X --sizes 4K --model kimi-k2.5", &["--sizes", "--model"]),
        ],
    );
    // What the first refusal offers does work, and says what was assumed.
    let assumed = scene.run("workload --model new.json --assume-decoder").ok();
    assert!(
        assumed.stdout.contains("ordinary decoder") || assumed.stdout.contains("plain decoder"),
        "{}",
        assumed.stdout
    );
}

#[test]
fn drafts_layouts_and_logs_that_cannot_be() {
    let scene = Scene::new();
    scene.write("eagle.json", DECODER.replace("BrandNewForCausalLM", "LlamaForCausalLMEagle3"));
    scene.write("empty.log", "");
    scene.write(
        "tuning.log",
        "n:1:1 [0] NCCL INFO AllReduce: 4096 Bytes -> Algo RING proto LL channel{Lo..Hi}={0..1}\n",
    );
    scene.write("folder/notes.txt", "no log here");
    assert_refused(
        &scene,
        &[
            ("workload --model eagle.json", &["eagle.json", "speculative draft", "--draft-model"]),
            ("workload --draft-model eagle.json", &["--verify-tokens"]),
            ("workload --draft-model nowhere.json --verify-tokens 2", &["nowhere.json"]),
            ("workload --draft-model mtp --verify-tokens 2", &["kimi-k2.5", "num_nextn_predict_layers"]),
            ("workload --verify-tokens 8 --draft-steps 3", &["a chain of 3 steps", "--draft-topk"]),
            ("workload --engine vllm --verify-tokens 8 --draft-topk 4", &["vLLM drafts chains"]),
            ("workload --draft-steps 0", &["--draft-steps"]),
            ("workload --model llama-3.1-70b --ep", &["--ep", "no routed experts"]),
            ("workload --engine vllm --dp-attention", &["--dp-attention", "known for SGLang alone"]),
            ("workload --tp 2 --pp 62", &["--pp", "fewer layers"]),
            ("workload --pp 65", &["--pp", "1..=64"]),
            ("tune --backend simulated --out X --pp 8", &["1 GPU issues no collectives"]),
            ("workload --engine-version latest", &["--engine-version", "0.10.1"]),
            ("workload --from-log empty.log", &["empty.log", "NCCL_DEBUG_SUBSYS=COLL"]),
            (
                "tune --backend simulated --out X --from-log tuning.log",
                &["tuning.log", "1 other lines", "AllReduce: opCount"],
            ),
            ("workload --from-log nowhere.log", &["nowhere.log"]),
            ("workload --from-log folder", &["folder"]),
            ("workload --from-log empty.log --batch 4", &["--from-log", "--batch"]),
            ("workload --from-log empty.log --model kimi-k2.6", &["did you mean", "kimi-k2.5"]),
            (
                "tune --backend simulated --out X --pin CUDA_DEVICE_MAX_CONNECTIONS=4",
                &["SGLang sets CUDA_DEVICE_MAX_CONNECTIONS to 8 whatever was set", "--engine none"],
            ),
            (
                "tune --backend simulated --out X --engine vllm --engine-version 0.9.0 --pin NCCL_CUMEM_ENABLE=1",
                &["vLLM sets NCCL_CUMEM_ENABLE to 0"],
            ),
        ],
    );
}

#[test]
fn a_config_larger_than_any_is_not_read() {
    let scene = Scene::new();
    let file = fs::File::create(scene.path("huge.json")).unwrap();
    file.set_len(16 * 1024 * 1024 + 1).unwrap();
    for line in ["tune --backend simulated --out X --model huge.json", "workload --model huge.json"] {
        let ended = scene.run(line);
        assert_eq!((ended.status, ended.stdout.as_str()), (Some(2), ""));
        assert!(ended.stderr.contains("huge.json is larger than 16777216 bytes"), "{}", ended.stderr);
    }
    assert!(!scene.path("X").exists());
}

#[test]
fn spaces_that_cannot_be_meant() {
    let scene = Scene::new();
    let head = "format = 1\nname = \"t\"\ndescription = \"d\"\n";
    let files = [
        ("empty.toml", String::new()),
        ("nothing.toml", head.to_owned()),
        ("future.toml", head.replace("format = 1", "format = 2")),
        ("syntax.toml", format!("{head}[[axis]\n")),
        ("key.toml", format!("{head}[[axis]]\nvariabel = \"NCCL_PROTO\"\nvalues = [\"unset\"]\n")),
        ("name.toml", format!("{head}[[axis]]\nvariable = \"NCCL_MIN_NCHANELS\"\nvalues = [\"unset\", \"8\"]\n")),
        (
            "value.toml",
            format!("{head}[[axis]]\nvariable = \"NCCL_MIN_NCHANNELS\"\nvalues = [\"unset\", \"8 channels\"]\n"),
        ),
        ("size.toml", format!("{head}[[axis]]\nvariable = \"NCCL_BUFFSIZE\"\nvalues = [\"unset\", \"3MiB\"]\n")),
        (
            "list.toml",
            format!("{head}[[axis]]\nvariable = \"NCCL_PROTO\"\nvalues = [\"unset\", \"allreduce:LL256\"]\n"),
        ),
        ("same.toml", format!("{head}[[axis]]\nvariable = \"NCCL_PROTO\"\nvalues = [\"LL\", \"LL\"]\n")),
        (
            "contradiction.toml",
            format!(
                "{head}[[arm]]\nname = \"a\"\nenv = {{ NCCL_MIN_NCHANNELS = \"16\", NCCL_MAX_NCHANNELS = \"8\" }}\n"
            ),
        ),
        (
            "ruled-out.toml",
            format!(
                "{head}[[axis]]\nvariable = \"NCCL_PROTO\"\nvalues = [\"unset\", \"LL\"]\n\
                 [[rule]]\nreason = \"never\"\nwhen = {{ NCCL_PROTO = \"set\" }}\n"
            ),
        ),
        (
            "rule.toml",
            format!(
                "{head}[[axis]]\nvariable = \"NCCL_PROTO\"\nvalues = [\"unset\", \"LL\"]\n\
                 [[rule]]\nreason = \"?\"\nwhen = {{ NCCL_ALGO = \"set\" }}\n"
            ),
        ),
        (
            "endless.toml",
            ["NCCL_MIN_NCHANNELS", "NCCL_MAX_NCHANNELS", "NCCL_MIN_CTAS", "NCCL_MAX_CTAS"].iter().fold(
                head.to_owned(),
                |text, name| {
                    let values: Vec<String> = (1..=64).map(|value| format!("\"{value}\"")).collect();
                    format!("{text}[[axis]]\nvariable = \"{name}\"\nvalues = [{}]\n", values.join(", "))
                },
            ),
        ),
    ];
    for (name, text) in &files {
        scene.write(name, text);
    }
    let tune = |file: &str| format!("tune --backend simulated --out X --space {file}");
    let cases: [(String, &[&str]); 18] = [
        (tune("empty.toml"), &["empty.toml", "format"]),
        (tune("nothing.toml"), &["nothing.toml", "empty space"]),
        (tune("future.toml"), &["future.toml", "format 2", "reads format 1"]),
        (tune("syntax.toml"), &["syntax.toml", "line 4, column"]),
        (tune("key.toml"), &["key.toml", "line 5, column 1", "variabel", "variable"]),
        (tune("name.toml"), &["name.toml, line 5", "did you mean NCCL_MIN_NCHANNELS?"]),
        (tune("value.toml"), &["value.toml, line 6", "8 channels", "1 to 64"]),
        (tune("size.toml"), &["size.toml, line 6", "3MiB", "power of two"]),
        (tune("list.toml"), &["list.toml, line 6", "LL256"]),
        (tune("same.toml"), &["same.toml", "NCCL_PROTO", "differ"]),
        (tune("contradiction.toml"), &["contradiction.toml", "NCCL_MIN_NCHANNELS=16 is above NCCL_MAX_NCHANNELS=8"]),
        (tune("ruled-out.toml"), &["nothing is left to measure", "never"]),
        (tune("rule.toml"), &["rule.toml", "NCCL_ALGO", "no axis"]),
        (tune("endless.toml"), &["4000000 combinations"]),
        (tune("pcie-decod"), &["pcie-decod", "did you mean pcie-decode?", "host-memory"]),
        (tune("nowhere/space.toml"), &["nowhere/space.toml"]),
        (tune("host-memory --pin NCCL_MIN_NCHANNELS=32 --pin NCCL_MAX_NCHANNELS=16"), &["contradict", "32", "16"]),
        ("tune --backend simulated --out X --allow-risk everything".to_owned(), &["everything", "hang-prone"]),
    ];
    let cases: Vec<Case<'_>> = cases.iter().map(|(line, says)| (line.as_str(), *says)).collect();
    assert_refused(&scene, &cases);
}

#[test]
fn pins_that_nccl_would_read_otherwise() {
    let scene = Scene::new();
    assert_refused(
        &scene,
        &[
            (
                "tune --backend simulated --out X --pin NCCL_BUFFSIZE=4M",
                &["NCCL_BUFFSIZE=4M", "reads 4", "write 4194304"],
            ),
            ("tune --backend simulated --out X --pin NCCL_PROTO=LL,Simpel", &["NCCL_PROTO", "Simpel"]),
            ("tune --backend simulated --out X --pin NCCL_BUFSIZE=4194304", &["did you mean NCCL_BUFFSIZE?"]),
            ("tune --backend simulated --out X --pin NCCL_PROTO", &["NCCL_PROTO", "NAME=VALUE"]),
            ("tune --backend simulated --out X --pin NCCL_PROTO=", &["NAME=VALUE"]),
            ("tune --backend simulated --out X --pin LD_PRELOAD=x.so", &["LD_PRELOAD"]),
            (
                "tune --backend simulated --out X --pin NCCL_P2P_DISABLE=1 --pin NCCL_P2P_DISABLE=0",
                &["NCCL_P2P_DISABLE", "\"1\"", "\"0\""],
            ),
        ],
    );
}

#[test]
fn flags_and_machines_that_do_not_exist() {
    let scene = Scene::new();
    scene.write("machine.toml", "format = 1\nname = \"x\"\n");
    assert_refused(
        &scene,
        &[
            ("--frobnicate", &["--frobnicate", "Usage:"]),
            ("tune --bakend simulated", &["--bakend", "'--backend'"]),
            ("tun", &["tun", "'tune'"]),
            ("tune --backend cuda", &["cuda", "simulated", "replay"]),
            ("tune --backend simulated --strategy guess", &["guess", "exhaustive"]),
            ("tune --backend simulated --min-gain 200% --out X", &["200%", "100 %"]),
            ("tune --backend simulated --max-regression=-1% --out X", &["-1%"]),
            ("tune --backend simulated --time-budget 0s --out X", &["0s", "at least a second"]),
            ("tune --backend simulated --time-budget soon --out X", &["soon"]),
            ("tune --backend simulated --final-launches 2 --out X", &["2", "4..=200"]),
            ("tune --backend simulated --seed one --out X", &["one"]),
            ("tune --backend simulated --out X --format xml", &["xml", "markdown"]),
            ("tune --backend simulated --out X --quiet -v", &["--quiet", "--verbose"]),
            (
                "tune --backend simulated --out X --machine rtx-pro-6000-x9",
                &["rtx-pro-6000-x9", "did you mean rtx-pro-6000-x8?"],
            ),
            ("tune --backend simulated --out X --machine machine.toml", &["simulated machine", "description"]),
            ("tune --backend simulated --out X --devices 0,99", &["99", "7 ("]),
            ("emit --run X --as docker-swarm", &["docker-swarm", "env, shell"]),
            ("emit", &["--run"]),
        ],
    );
}

#[test]
fn places_that_cannot_be_written_or_belong_to_somebody() {
    let scene = Scene::new();
    scene.write("thesis/chapter-1.txt", "mine");
    scene.write("a-file", "mine too");
    scene.run("tune --backend simulated --space baseline --out run").ok();
    let tune = "tune --backend simulated --space baseline --out";
    let cases: Vec<(String, &[&str])> = vec![
        (format!("{tune} thesis"), &["thesis is not empty", "nothing in it was touched"]),
        (format!("{tune} a-file"), &["a-file"]),
        (format!("{tune} a-file/below"), &["a-file/below"]),
        // Not even root can write there.
        (format!("{tune} /proc/nccltune"), &["/proc/nccltune", "--out DIR"]),
        (format!("{tune} /dev/null/run"), &["/dev/null/run", "--out DIR"]),
        (format!("{tune} run"), &["run already holds a run", "--resume"]),
        (format!("{tune} nowhere --resume"), &["nowhere/manifest.json"]),
        (format!("{tune} thesis --resume"), &["thesis/manifest.json"]),
        ("tune --backend simulated --resume".to_owned(), &["--resume needs --out DIR"]),
        ("emit --run thesis".to_owned(), &["thesis/manifest.json"]),
        ("emit --run nowhere".to_owned(), &["nowhere/manifest.json"]),
    ];
    let cases: Vec<Case<'_>> = cases.iter().map(|(line, says)| (line.as_str(), *says)).collect();
    assert_refused(&scene, &cases);
}

#[test]
fn a_resume_that_would_be_another_run() {
    let scene = Scene::new();
    scene.write("config.json", DECODER.replace("BrandNew", "Llama"));
    scene.run("tune --backend simulated --space host-memory --out run --batch 1,4").ok();
    // A torn tail is the next right resume's to account for: a refused one leaves it.
    let mut journal = scene.read("run/run.jsonl");
    journal.push_str("{\"sequence\":");
    scene.write("run/run.jsonl", journal);
    let resume = "tune --backend simulated --resume --out run";
    let cases: Vec<(String, &[&str])> = vec![
        (format!("{resume} --seed 2"), &["another run", "the seed"]),
        (format!("{resume} --model llama-3.1-70b"), &["another run", "the workload"]),
        (format!("{resume} --model config.json"), &["another run", "the workload"]),
        (format!("{resume} --batch 1,8"), &["another run", "the workload"]),
        (format!("{resume} --tp 4"), &["another run", "the GPUs used", "the workload"]),
        (format!("{resume} --space baseline"), &["another run", "the arms"]),
        (format!("{resume} --min-gain 3%"), &["another run", "the thresholds"]),
        (format!("{resume} --max-regression 3%"), &["another run", "the thresholds"]),
        (format!("{resume} --strict"), &["another run", "the thresholds"]),
        (format!("{resume} --search-blocks 5"), &["another run", "the thresholds and sizes"]),
        (format!("{resume} --pin NCCL_SHM_DISABLE=0"), &["another run", "the variables that hold in every arm"]),
        (format!("{resume} --engine vllm"), &["another run", "the variables that hold in every arm"]),
        ("tune --backend replay --resume --out run".to_owned(), &["another run", "the backend"]),
        (format!("{resume} --context 8192"), &["--context 4096, not 8192"]),
        ("trial --run run --context 8192".to_owned(), &["--context 4096, not 8192"]),
        ("trial --backend simulated --sizes 64K --out X".to_owned(), &["no forward pass can be timed"]),
    ];
    let cases: Vec<Case<'_>> = cases.iter().map(|(line, says)| (line.as_str(), *says)).collect();
    assert_refused(&scene, &cases);
    // The same with the same words is no other run.
    scene.run(&format!("{resume} --seed 1 --space host-memory --batch 1,4 --min-gain 2%")).ok();
}

#[test]
fn a_run_that_somebody_works_on() {
    let scene = Scene::new();
    scene.run("tune --backend simulated --space baseline --out run").ok();
    let held = Journal::reopen(&scene.path("run")).unwrap();
    assert_refused(
        &scene,
        &[("tune --backend simulated --resume --out run", &["another nccltune is working on run", "--out"])],
    );
    drop(held);
    scene.run("tune --backend simulated --resume --out run").ok();
}

#[test]
fn of_two_at_once_in_one_place_one_wins() {
    let scene = Scene::new();
    for round in 0..4 {
        let line = format!("tune --backend simulated --out run-{round}");
        let mut both = [scene.start(&line), scene.start(&line)];
        let mut statuses = both.each_mut().map(|running| running.wait().code());
        statuses.sort_unstable();
        assert_eq!(statuses, [Some(0), Some(2)], "round {round}");
        assert_eq!(scene.choice(&format!("run-{round}")).verdict, VerdictKind::Adopt);
    }
}

#[test]
fn recordings_that_cannot_be_replayed() {
    let scene = Scene::new();
    scene.run("tune --backend simulated --space baseline --out run").ok();
    let files = ["manifest.json", "choice.json", JOURNAL_FILE];
    let copies =
        ["no-journal", "no-manifest", "corrupt", "gap", "future", "future-manifest", "headless", "empty", "foreign"];
    for name in copies {
        scene.copy_run(&scene.path("run"), name, &files);
    }
    scene.write("foreign/run.jsonl", scene.read("run/run.jsonl").replacen("\"seed\":1", "\"seed\":2", 1));
    fs::remove_file(scene.path("no-journal/run.jsonl")).unwrap();
    fs::remove_file(scene.path("no-manifest/manifest.json")).unwrap();
    let journal = scene.read("run/run.jsonl");
    let lines: Vec<&str> = journal.lines().collect();
    let with_line = |number: usize, text: &str| {
        let mut lines = lines.clone();
        lines[number - 1] = text;
        lines.join("\n") + "\n"
    };
    scene.write("corrupt/run.jsonl", with_line(3, "{\"sequence\":2,\"at_s\":zero}"));
    scene.write("gap/run.jsonl", with_line(4, lines[4]));
    scene.write("future/run.jsonl", with_line(1, &lines[0].replace("\"format\":1", "\"format\":2")));
    scene.write("headless/run.jsonl", lines[1..].join("\n") + "\n");
    scene.write("empty/run.jsonl", "");
    let manifest = scene.read("run/manifest.json").replacen("\"format\": 1", "\"format\": 2", 1);
    scene.write("future-manifest/manifest.json", manifest);
    let replay = |name: &str| format!("tune --backend replay --out X --recorded {name}");
    let simulated = recorded("h200x2-host-memory").display().to_string();
    let cases: Vec<(String, &[&str])> = vec![
        (replay("no-journal"), &["no-journal/run.jsonl"]),
        (replay("no-manifest"), &["no-manifest/manifest.json"]),
        (replay("nowhere"), &["nowhere/manifest.json"]),
        (replay("corrupt"), &["corrupt/run.jsonl, line 3"]),
        (replay("gap"), &["gap/run.jsonl, line 4", "sequence 4 where 3 belongs"]),
        (replay("future"), &["future/run.jsonl, line 1", "format 2", "reads up to 1"]),
        (replay("future-manifest"), &["future-manifest/manifest.json", "format 2"]),
        ("emit --run future-manifest".to_owned(), &["future-manifest/manifest.json", "format 2"]),
        (replay("headless"), &["headless/run.jsonl, line 1"]),
        (replay("empty"), &["no measurement"]),
        (replay("foreign"), &["foreign", "of different runs"]),
        (replay("run --pin NCCL_SHM_DISABLE=0"), &["a replay cannot be pinned"]),
        (replay("run --machine rtx-pro-6000-x8"), &["--machine", "--recorded"]),
        (replay("run --resume"), &["--resume", "--recorded"]),
        (
            format!("tune --backend simulated --out X --recorded {simulated}"),
            &["a recorded run is replayed: another backend cannot use --recorded"],
        ),
        ("tune --backend replay --out X".to_owned(), &["needs --recorded DIR"]),
        ("tune --backend simulated --assume-noise 2% --out X".to_owned(), &["--recorded"]),
        ("tune --resume --out corrupt".to_owned(), &["corrupt/run.jsonl, line 3"]),
        ("tune --resume --out future".to_owned(), &["future/run.jsonl, line 1", "format 2"]),
        ("tune --resume --out no-journal".to_owned(), &["no-journal/run.jsonl"]),
    ];
    let cases: Vec<Case<'_>> = cases.iter().map(|(line, says)| (line.as_str(), *says)).collect();
    assert_refused(&scene, &cases);
}

#[test]
fn an_error_names_its_cause_once() {
    let scene = Scene::new();
    scene.run("tune --backend simulated --space baseline --out run").ok();
    fs::remove_file(scene.path("run/run.jsonl")).unwrap();
    let ended = scene.run("tune --backend replay --recorded run --out X");
    assert_eq!(ended.stderr.matches("No such file").count(), 1, "{}", ended.stderr);
}

#[test]
fn a_journal_line_without_end_is_not_read_into_memory() {
    let scene = Scene::new();
    scene.run("tune --backend simulated --space baseline --out run").ok();
    let mut journal = scene.read("run/run.jsonl").lines().next().unwrap().to_owned() + "\n";
    journal.push_str(&" ".repeat(17 * 1024 * 1024));
    journal.push('\n');
    scene.write("run/run.jsonl", journal);
    for line in ["tune --resume --out run", "tune --backend replay --recorded run --out X"] {
        let ended = scene.run(line);
        assert_eq!((ended.status, ended.stdout.as_str()), (Some(2), ""));
        assert!(ended.stderr.contains("run.jsonl, line 2: longer than 16777216 bytes"), "{}", ended.stderr);
    }
}

#[test]
fn a_reader_that_goes_away_has_what_it_wanted() {
    let scene = Scene::new();
    for (line, status) in [
        ("tune --backend simulated --out X", 0),
        ("tune --backend simulated --out Y --format json", 0),
        ("workload --format json", 0),
        ("tune --help", 0),
        ("emit --run X", 0),
    ] {
        let mut command = scene.command(&line.split_whitespace().collect::<Vec<_>>());
        let mut child = command.stdout(Stdio::piped()).stderr(Stdio::null()).spawn().unwrap();
        drop(child.stdout.take());
        assert_eq!(Running::from(child).wait().code(), Some(status), "{line}");
    }
    assert_eq!(scene.choice("X").verdict, VerdictKind::Adopt, "the answer is on disk all the same");
    let head = scene.shell("\"$0\" tune --backend simulated --out Z --quiet | head -c 10").ok();
    assert_eq!(head.stdout, "*** SIMULA");
    assert_eq!(head.stderr, "");
}

#[test]
fn an_answer_that_cannot_be_written_is_no_success() {
    let scene = Scene::new();
    let ended = scene.shell("\"$0\" tune --backend simulated --out X --quiet >/dev/full");
    assert_eq!(ended.status, Some(1), "{}", ended.stderr);
    assert!(ended.stderr.contains("could not write the answer"), "{}", ended.stderr);
    assert_eq!(scene.choice("X").verdict, VerdictKind::Adopt, "the answer is on disk all the same");
}

#[test]
fn a_disk_that_fills_up_stops_the_run_and_it_goes_on_later() {
    let scene = Scene::new();
    // The manifest has about 28 KiB, the journal 1,200. A resumed run draws other noise after the seam, and
    // this seed leaves the verdict out of its reach.
    for blocks in [80, 150, 222] {
        let run = format!("run-{blocks}");
        let stopped = scene.run_on_full_disk(blocks, &format!("tune --backend simulated --seed 2 --out {run}"));
        assert_eq!((stopped.status, stopped.stdout.as_str()), (Some(6), ""), "{}", stopped.stderr);
        let hint = format!("nccltune tune --resume --out {run}");
        assert!(stopped.stderr.contains("run.jsonl") && stopped.stderr.contains(&hint), "{}", stopped.stderr);
        assert!(!scene.path(&format!("{run}/choice.json")).exists());
        let before = scene.read(&format!("{run}/run.jsonl"));
        let whole = before.rfind('\n').unwrap() + 1;
        assert!(whole < before.len(), "the limit tore a line");
        // Without further words: everything else stands in the manifest.
        scene.run(&format!("tune --resume --out {run}")).ok();
        assert_eq!(scene.choice(&run).verdict, VerdictKind::Adopt);
        let after = scene.read(&format!("{run}/run.jsonl"));
        assert_eq!(after[..whole], before[..whole], "nothing that was measured is lost");
        assert!(after[whole..].contains(&format!("\"dropped_bytes\":{}", before.len() - whole)));
    }
}

#[test]
fn a_disk_that_is_full_before_the_first_event_leaves_nothing_in_the_way() {
    let scene = Scene::new();
    for line in ["tune --backend simulated --out run", "tune --backend simulated --out deep/er/run"] {
        let refused = scene.run_on_full_disk(8, line);
        assert_eq!((refused.status, refused.stdout.as_str()), (Some(2), ""), "{}", refused.stderr);
        assert!(refused.stderr.contains("run/manifest.json"), "{}", refused.stderr);
        let files: Vec<String> = scene.contents().into_keys().filter(|name| !name.ends_with('/')).collect();
        assert!(files.is_empty(), "{files:?}");
        scene.run(&format!("{line} --quiet")).ok();
        fs::remove_dir_all(scene.path(line.rsplit(' ').next().unwrap())).unwrap();
    }
}

#[test]
fn a_disk_that_is_full_at_the_end_keeps_the_measurements() {
    let scene = Scene::new();
    // The summary of this run is larger than its journal's share of the limit: 24 arms, one block.
    let line =
        "tune --backend simulated --out run --space host-memory --sizes 64K --search-blocks 1 --final-launches 4";
    scene.run(&line.replace("--out run", "--out whole")).ok();
    let largest = |name: &str| fs::metadata(scene.path(&format!("whole/{name}"))).unwrap().len();
    let journal = largest("run.jsonl");
    assert!(journal > largest("manifest.json"), "the journal is the largest file");
    // As if the disk were full when the answer is to be written.
    scene.copy_run(&scene.path("whole"), "run", &["manifest.json", "run.jsonl"]);
    fs::create_dir(scene.path("run/choice.json")).unwrap();
    let stopped = scene.run("tune --resume --out run");
    assert_eq!((stopped.status, stopped.stdout.as_str()), (Some(6), ""), "{}", stopped.stderr);
    assert!(stopped.stderr.contains("run/choice.json") && stopped.stderr.contains("--resume"), "{}", stopped.stderr);
    fs::remove_dir(scene.path("run/choice.json")).unwrap();
    scene.run("tune --resume --out run").ok();
    assert_eq!(scene.choice("run").env, scene.choice("whole").env);
}

#[test]
fn a_device_without_end_is_not_read_into_memory() {
    let scene = Scene::new();
    assert_refused(
        &scene,
        &[
            ("workload --model /dev/zero", &["/dev/zero is larger than 16777216 bytes"]),
            ("tune --backend simulated --dry-run --space /dev/zero", &["/dev/zero is larger than 1048576 bytes"]),
            ("tune --machine /dev/zero --dry-run", &["/dev/zero is larger than 1048576 bytes"]),
        ],
    );
}

#[test]
fn a_simulated_machine_that_could_be_none_is_refused_before_anything_is_written() {
    let scene = Scene::new();
    let whole = include_str!("machines/planted.toml");
    for (from, to, says) in [
        ("launch_s = 2.6", "launch_s = -5.0", "costs"),
        ("launch_s = 2.6", "launch_s = nan", "costs"),
        ("cell_s = 0.03", "cell_s = 1e308", "costs"),
        ("[24.2,", "[1e308,", "latencies"),
        ("[24.2,", "[1e-300,", "latencies"),
        ("slow_launch_factor = 1.08", "slow_launch_factor = 1e308", "slow_launch_factor"),
    ] {
        let text = whole.replace(from, to);
        assert_ne!(text, whole, "{from}");
        scene.write("machine.toml", text);
        assert_refused(&scene, &[("tune --machine machine.toml --out run", &[says])]);
    }
    // And one whose choices follow from NCCL's rules.
    let modelled = include_str!("../../search-spaces/machines/rtx-pro-6000-x8.toml");
    for (from, to, says) in [
        ("format = 2", "format = 7", "formats 1 and 2"),
        ("nccl = \"2.29.2\"\n", "", "nccl"),
        ("nccl = \"2.29.2\"", "nccl = \"1.3.5\"", "2.19"),
        ("timing = \"rtx-pro-6000\"", "timing = \"rtx-pro-600\"", "did you mean"),
        ("gpus = 8", "gpus = 9", "9 GPUs"),
        ("width = 16", "width = 17", "lanes"),
        ("kind = \"pix2\"", "kind = \"pix9\"", "pix9"),
    ] {
        let text = modelled.replace(from, to);
        assert_ne!(text, modelled, "{from}");
        scene.write("machine.toml", text);
        assert_refused(&scene, &[("tune --machine machine.toml --out run", &[says])]);
    }
    // Far outside its table a machine still takes some time.
    let steep = whole.replace("24.2, 25.6,", "0.001, 1e9,");
    assert_ne!(steep, whole);
    scene.write("machine.toml", steep);
    scene.run("tune --machine machine.toml --sizes 2,1G --out steep").ok();
}

#[test]
fn a_machine_that_no_longer_fits_on_the_disk_is_no_run_to_go_on_with() {
    let scene = Scene::new();
    let whole = include_str!("machines/planted.toml");
    scene.write("machine.toml", format!("{whole}\n#{}\n", "-".repeat(200_000)));
    // 64 KiB: enough for the manifest.
    let line = "tune --machine machine.toml --space baseline --sizes 64K --out run";
    let refused = scene.run_on_full_disk(128, line);
    assert_eq!((refused.status, refused.stdout.as_str()), (Some(2), ""), "{}", refused.stderr);
    assert!(refused.stderr.contains("run/machine.toml"), "{}", refused.stderr);
    assert!(!refused.stderr.contains("--resume"), "{}", refused.stderr);
    assert!(!scene.path("run").exists());
}

#[test]
fn a_report_takes_the_place_of_nothing_but_files() {
    let scene = Scene::new();
    scene.run("tune --backend simulated --sizes 64K --space baseline --no-trial --out R").ok();
    let pipe = scene.path("pipe");
    nix::unistd::mkfifo(&pipe, nix::sys::stat::Mode::S_IRWXU).expect("a pipe");
    scene.write("mine", "kept\n");
    std::os::unix::fs::symlink("mine", scene.path("link")).expect("a link");
    for place in ["pipe", "link", "/dev/null"] {
        let ended = scene.run(&format!("report R --out {place}"));
        assert_eq!(ended.status, Some(2), "{place}: {}", ended.stderr);
        assert!(ended.stderr.contains("is no regular file"), "{place}: {}", ended.stderr);
    }
    assert_eq!(scene.read("mine"), "kept\n");
    let before = scene.read("R/run.jsonl");
    for part in ["run.jsonl", "manifest.json", "choice.json", "tuned.env"] {
        let ended = scene.run(&format!("report R --format csv --out R/{part}"));
        assert_eq!(ended.status, Some(2), "{part}: {}", ended.stderr);
        assert!(ended.stderr.contains("is a part of a run"), "{part}: {}", ended.stderr);
    }
    assert_eq!(scene.read("R/run.jsonl"), before);
    scene.run("report R --format html --out R/report.html").ok();
}

#[test]
fn a_pipe_in_a_run_directory_hangs_nobody() {
    let scene = Scene::new();
    scene.run("tune --backend simulated --sizes 64K --space baseline --no-trial --out R").ok();
    for part in ["run.jsonl", "manifest.json", "choice.json"] {
        let kept = scene.read(&format!("R/{part}"));
        fs_err::remove_file(scene.path(&format!("R/{part}"))).expect("it is there");
        nix::unistd::mkfifo(&scene.path(&format!("R/{part}")), nix::sys::stat::Mode::S_IRWXU).expect("a pipe");
        for line in ["report R", "emit --run R", "tune --resume --out R", "tune --recorded R --out other"] {
            let reads = match part {
                "run.jsonl" => !line.starts_with("emit"),
                "choice.json" => line.starts_with("emit") || line.starts_with("report"),
                _ => true,
            };
            if reads {
                let ended = scene.run(line);
                assert_ne!(ended.status, Some(0), "{line} with a pipe for {part}");
                assert!(ended.stderr.contains(&format!("R/{part} is no regular file")), "{line}: {}", ended.stderr);
            }
        }
        fs_err::remove_file(scene.path(&format!("R/{part}"))).expect("it is there");
        scene.write(&format!("R/{part}"), kept);
    }
    scene.run("report R").ok();
}

#[test]
fn an_answer_that_was_edited_is_not_emitted() {
    let scene = Scene::new();
    scene.run("tune --backend simulated --sizes 64K --no-trial --out R").ok();
    let whole = scene.read("R/choice.json");
    assert!(!scene.choice("R").env.is_empty(), "the simulated machine has something to find");
    for (name, value) in [("LD_PRELOAD", "/x.so"), ("NCCL_PROTO", "evil"), ("NCCL_MIN_NCHANNELS", "63")] {
        let mut choice: serde_json::Value = serde_json::from_str(&whole).expect("JSON");
        choice["env"][name] = value.into();
        scene.write("R/choice.json", choice.to_string());
        for form in
            ["env", "shell", "docker", "systemd", "slurm", "mpi", "nccl-conf", "compose", "k8s", "pyxis", "revert"]
        {
            let ended = scene.run(&format!("emit --run R --as {form}"));
            assert_eq!((ended.status, ended.stdout.as_str()), (Some(2), ""), "{name} as {form}: {}", ended.stderr);
            assert!(ended.stderr.contains("is in no arm of the run"), "{}", ended.stderr);
        }
    }
}

#[test]
fn what_files_say_steers_no_terminal() {
    let scene = Scene::new();
    scene.write(
        "space.toml",
        "format = 1\nname = \"s\"\ndescription = \"d\"\n[[arm]]\nname = \"EVIL\\nX=1\\u009b31m\"\nenv = { NCCL_PROTO = \"LL\" }\n",
    );
    let ended = scene.run("tune --backend simulated --sizes 64K --space space.toml --dry-run");
    assert_eq!((ended.status, ended.stdout.as_str()), (Some(2), ""), "{}", ended.stderr);
    assert!(ended.stderr.contains("cannot be shown in a line"), "{}", ended.stderr);
    scene.write("space.toml", "format = 1\n\"\\u001b[31mE\u{9b}\u{202e}\" = 1\r\n");
    let ended = scene.run("tune --backend simulated --sizes 64K --space space.toml --dry-run");
    assert_eq!(ended.status, Some(2), "{}", ended.stderr);
    assert!(!ended.stderr.contains(['\u{1b}', '\u{9b}', '\u{202e}', '\r']), "{:?}", ended.stderr);
}

#[test]
fn an_element_with_very_many_attributes_costs_no_time() {
    let scene = Scene::new();
    let attributes = (0..60_000).map(|number| format!("a{number:x}=\"\"")).collect::<Vec<_>>().join(" ");
    scene.write("a.xml", format!("<graphs version=\"1\" {attributes}/>"));
    let path = scene.path("a.xml");
    let started = std::time::Instant::now();
    let ended =
        scene.run(&format!("explain --machine rtx-pro-6000-x8 --size 64K --env NCCL_GRAPH_FILE={}", path.display()));
    assert!(started.elapsed() < std::time::Duration::from_secs(5), "{}", ended.stderr);
    let said = [ended.stdout, ended.stderr].concat();
    assert!(said.contains("more than 64 attributes"), "{said}");
}
