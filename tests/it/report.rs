//! Reports: of recorded, simulated, stopped and imported runs, in every format. What a page looks like
//! is for eyes; here it is what it says, that it needs nothing from outside, and that it takes nothing
//! for markup.

use std::process::Command;

use fs_err as fs;

use crate::command::{Scene, recorded};

const RUNS: [&str; 4] =
    ["h200x2-host-memory", "h200x2-host-memory-bench", "h200x2-host-memory-bench-sglang", "h200x2-host-memory-kimi"];

/// What must be shown and never done.
const EVIL: &str = "</title><script>alert(1)</script><img src=x onerror=alert(2)>";

#[test]
fn recorded_runs_are_told_in_every_format() {
    let scene = Scene::new();
    for name in RUNS {
        let run = recorded(name);
        let run = run.display();
        let text = scene.run(&format!("report {run}")).ok().stdout;
        assert_eq!(text, scene.run(&format!("report --run {run} --format text")).ok().stdout);
        let page = scene.run(&format!("report {run} --format html")).ok().stdout;
        let markdown = scene.run(&format!("report {run} --format markdown")).ok().stdout;
        for words in ["HOST-MEMORY", "Verdict: ", "Noise: launches of the default", "The campaign", "What is verified"]
        {
            for told in [&text, &page, &markdown] {
                assert!(told.contains(words), "{name}: no {words:?} in\n{told}");
            }
        }
        let csv = scene.run(&format!("report {run} --format csv")).ok().stdout;
        assert!(csv.starts_with("labels,arm,role,") && csv.contains("HOST-MEMORY,default,default,all-reduce,bf16,"));
        let json = scene.run(&format!("report {run} --format json")).ok().json();
        assert_eq!(json["labels"][0], "HOST-MEMORY");
        assert!(json["standing"].as_str().is_some_and(|text| text.contains("unverified")));
        assert!(json["arms"].as_array().is_some_and(|arms| !arms.is_empty()), "{name}");
    }
}

#[test]
fn the_figures_of_a_page_are_those_of_the_verdict() {
    let scene = Scene::new();
    let run = recorded(RUNS[0]);
    let page = scene.run(&format!("report {} --format html", run.display())).ok().stdout;
    let choice = crate::command::choice_in(&run);
    for point in choice.points.iter().chain(&choice.guard).filter(|point| point.measured) {
        let (baseline, winner) = (point.baseline_us.expect("a time"), point.winner_us.expect("a time"));
        for us in [baseline, winner] {
            // In the table and in the words of the picture.
            let told = nccltune::units::format_us(us);
            assert!(page.matches(&told).count() >= 2, "{told} stands in the page once at most");
        }
        let change = nccltune::units::format_change(point.ratio.expect("a ratio"));
        assert!(page.matches(&change).count() >= 2, "{change}");
    }
    let bill = format!("{:.0} MiB more host memory", choice.memory.host_mib.expect("a bill"));
    assert!(page.contains(&bill), "{bill}");
}

#[test]
fn a_page_needs_nothing_from_outside() {
    let scene = Scene::new();
    scene.run("tune --backend simulated --seed 1 --out X").ok();
    let page = scene.read("X/report.html");
    assert_eq!(page, scene.run("report X --format html").ok().stdout, "tune leaves the same page");
    assert!(page.contains("SIMULATED: no GPU was measured"));
    assert!(page.contains("default-src 'none'"));
    for outside in ["<script", "src=", "href=", "@import", "url(", "http://", "https://", "onload", "<link", "<iframe"]
    {
        let found = page.find(outside).map(|at| page[at..].chars().take(80).collect::<String>());
        assert_eq!(found, None);
    }
    // Every picture says in words what it shows, and ids are there once.
    let pictures = page.matches("<svg ").count();
    assert!(pictures >= 4, "{pictures} pictures");
    for tag in ["<title id=\"figure-", "<desc id=\"figure-", "role=\"img\""] {
        assert_eq!(page.matches(tag).count(), pictures, "{tag}");
    }
    for number in 1..=pictures {
        assert_eq!(page.matches(&format!("id=\"figure-{number}-title\"")).count(), 1);
    }
    for tag in ["table", "thead", "tbody", "figure", "ul", "li", "dl", "svg", "p", "h2", "pre", "div", "main"] {
        let opened = page.matches(&format!("<{tag}>")).count() + page.matches(&format!("<{tag} ")).count();
        assert_eq!(opened, page.matches(&format!("</{tag}>")).count(), "<{tag}>");
    }
}

#[test]
fn names_from_outside_are_never_markup() {
    let scene = Scene::new();
    let run = recorded(RUNS[1]);
    scene.copy_run(&run, "evil", &["manifest.json", "run.jsonl", "choice.json", "summary.csv"]);
    for file in ["manifest.json", "choice.json", "run.jsonl"] {
        let text = scene.read(&format!("evil/{file}"));
        let text = text.replace("2x NVIDIA H200", EVIL).replace("Xeon", EVIL).replace("best of 32 arms", EVIL);
        // Names of arms, in all three alike.
        scene
            .write(&format!("evil/{file}"), text.replace("\"name\":\"MIN_NCHANNELS=32", &format!("\"name\":\"{EVIL}")));
    }
    let mut manifest: serde_json::Value = serde_json::from_str(&scene.read("evil/manifest.json")).expect("JSON");
    manifest["workload"]["model"] = EVIL.into();
    manifest["notices"][0] = EVIL.into();
    scene.write("evil/manifest.json", manifest.to_string());
    let page = scene.run("report evil --format html").ok().stdout;
    assert!(page.matches("&lt;script&gt;").count() >= 4, "the name is shown as it is");
    assert!(!page.contains("<script") && !page.contains("<img"), "{page}");
}

#[test]
fn a_run_without_a_verdict_is_told_as_far_as_it_came() {
    let scene = Scene::new();
    let run = recorded(RUNS[0]);
    scene.copy_run(&run, "stopped", &["manifest.json"]);
    let journal = fs::read_to_string(run.join("run.jsonl")).expect("a journal");
    for lines in [1, 2, 40, 400] {
        let kept: Vec<&str> = journal.lines().take(lines).collect();
        scene.write("stopped/run.jsonl", kept.join("\n") + "\n");
        for format in ["text", "html", "markdown", "csv", "json"] {
            let told = scene.run(&format!("report stopped --format {format}")).ok().stdout;
            assert!(told.contains("HOST-MEMORY"), "{lines} {format}:\n{told}");
        }
    }
    let told = scene.run("report stopped").ok().stdout;
    assert!(told.contains("Verdict: none yet") && told.contains("--resume"), "{told}");
}

#[test]
fn a_report_goes_where_it_is_sent_and_changes_nothing() {
    let scene = Scene::new();
    let run = recorded(RUNS[0]);
    scene.copy_run(&run, "run", &["manifest.json", "run.jsonl", "choice.json"]);
    let before = scene.contents();
    let ended = scene.run("report run --format html --out page.html").ok();
    assert_eq!((ended.stdout.as_str(), ended.stderr.contains("page.html")), ("", true));
    let mut after = scene.contents();
    assert!(after.remove("page.html").is_some_and(|page| page.starts_with(b"<!doctype html>")));
    assert!(after == before, "the run was changed");
    for (line, words) in [
        ("report", "<DIR>"),
        ("report nowhere", "nowhere"),
        ("report run --format pdf", "html"),
        ("report run --out no/such/folder/page.html", "no/such/folder"),
        ("report run --run run", "cannot be used with"),
    ] {
        let ended = scene.run(line);
        assert_eq!((ended.status, ended.stdout.as_str()), (Some(2), ""), "{line}");
        assert!(ended.stderr.contains(words), "{line}: {}", ended.stderr);
    }
}

/// What bash offers for a command line, asked of bash itself.
fn offered(scene: &Scene, words: &[&str]) -> Vec<String> {
    let line = words.join(" ");
    let quoted: Vec<String> = words.iter().map(|word| format!("'{word}'")).collect();
    let script = format!(
        "source ./completion.bash; COMP_WORDS=({}); COMP_CWORD={}; COMP_LINE='{line}'; COMP_POINT=${{#COMP_LINE}}; \
         _nccltune nccltune '{}' '{}'; printf '%s\\n' \"${{COMPREPLY[@]}}\"",
        quoted.join(" "),
        words.len() - 1,
        words[words.len() - 1],
        words[words.len() - 2]
    );
    let output =
        Command::new("bash").args(["--norc", "-c", &script]).current_dir(scene.path(".")).output().expect("bash");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8_lossy(&output.stdout).lines().map(str::to_owned).collect()
}

#[test]
fn bash_is_offered_commands_flags_and_values() {
    let scene = Scene::new();
    let script = scene.run("completions bash").ok().stdout;
    scene.write("completion.bash", script);
    assert_eq!(offered(&scene, &["nccltune", "rep"]), ["report"]);
    assert_eq!(offered(&scene, &["nccltune", "tune", "--max-r"]), ["--max-regression"]);
    let forms = offered(&scene, &["nccltune", "emit", "--as", ""]);
    let expected = "env shell docker systemd slurm mpi nccl-conf compose k8s pyxis revert tuner-table";
    assert_eq!(forms, expected.split(' ').collect::<Vec<_>>());
    assert!(offered(&scene, &["nccltune", "report", "--format", "h"]).contains(&"html".to_owned()));
    for shell in ["zsh", "fish", "elvish", "powershell"] {
        let script = scene.run(&format!("completions {shell}")).ok().stdout;
        assert!(script.contains("max-regression"), "{shell}");
    }
    assert_eq!(scene.run("completions tcsh").status, Some(2));
}

#[test]
fn manual_pages_are_made_for_every_command() {
    let scene = Scene::new();
    assert!(scene.run("man").ok().stdout.contains(".TH nccltune 1"));
    let page = scene.run("man tune").ok().stdout;
    assert!(page.contains(".TH nccltune-tune 1") && page.contains("max\\-regression"), "{page}");
    let unknown = scene.run("man tuen");
    assert!(unknown.status == Some(2) && unknown.stderr.contains("tune, trial, doctor"), "{}", unknown.stderr);
    scene.run("man --out pages").ok();
    let pages = scene.contents().keys().filter(|name| name.starts_with("pages/nccltune")).count();
    assert_eq!(pages, 14, "{:?}", scene.contents().keys());
    for page in ["pages/nccltune.1", "pages/nccltune-import.1"] {
        assert!(scene.read(page).lines().any(|line| line.starts_with(".SH")), "{page}");
    }
}

#[test]
fn what_is_emitted_for_a_shell_can_be_taken_back() {
    let scene = Scene::new();
    scene.run("tune --backend simulated --seed 1 --out X").ok();
    scene.write("revert.sh", scene.run("emit --run X --as revert").ok().stdout);
    for shell in ["sh", "bash"] {
        let script = "export NCCL_DEBUG=WARN; env | sort > before; . ./X/tuned.sh; env | sort > between; \
                      . ./revert.sh; env | sort > after; cmp before after; ! cmp -s before between";
        let status = Command::new(shell).args(["-ec", script]).current_dir(scene.path(".")).status().expect("a shell");
        assert!(status.success(), "{shell}");
    }
    let docker = scene.run("emit --run X --as docker").ok().stdout;
    let systemd = scene.run("emit --run X --as systemd").ok().stdout;
    for (name, value) in &scene.choice("X").env {
        assert!(docker.lines().any(|line| line == format!("{name}={value}")), "{docker}");
        assert!(systemd.lines().any(|line| line == format!("Environment=\"{name}={value}\"")), "{systemd}");
    }
    for text in [&docker, &systemd, &scene.read("revert.sh")] {
        assert_eq!(text.lines().nth(2), Some("# SIMULATED: no GPU was measured; do not deploy"));
    }
}

/// Whether a program is here to be asked; a test says which were not.
#[expect(clippy::print_stdout, reason = "what was not tried is said")]
fn has(program: &str, version: &[&str]) -> bool {
    let is_here = Command::new(program).args(version).output().is_ok_and(|output| output.status.success());
    if !is_here {
        println!("skipped: {program} is not installed, so nobody asked it what it makes of its form");
    }
    is_here
}

/// Open MPI hands ranks what was written for it, and kubectl makes of the env file what the `ConfigMap` says; no cluster is
/// needed.
#[test]
fn mpirun_and_kubectl_take_what_is_emitted_for_them() {
    let scene = Scene::new();
    scene.run("tune --backend simulated --seed 1 --out X").ok();
    let expected = scene.choice("X").env;
    assert!(!expected.is_empty(), "an answer that sets something");
    if has("mpirun", &["--version"]) {
        scene.write("tuned.mpi.sh", scene.run("emit --run X --as mpi").ok().stdout);
        let script = "set -- --allow-run-as-root --oversubscribe -np 2; . ./tuned.mpi.sh; exec mpirun \"$@\" env";
        let mut command = Command::new("sh");
        command.args(["-c", script]).current_dir(scene.path("."));
        let output = command.output().expect("a shell");
        let told = String::from_utf8_lossy(&output.stdout).into_owned();
        for (name, value) in &expected {
            let line = format!("{name}={value}");
            let ranks = told.lines().filter(|told| *told == line).count();
            assert_eq!(ranks, 2, "{line} in {told}{}", String::from_utf8_lossy(&output.stderr));
        }
    }
    if has("kubectl", &["version", "--client"]) {
        scene.write("tuned.env", scene.run("emit --run X --as env").ok().stdout);
        let mut command = Command::new("kubectl");
        command.args([
            "create",
            "configmap",
            "nccltune",
            "--from-env-file=tuned.env",
            "--dry-run=client",
            "-o",
            "json",
        ]);
        let output = command.current_dir(scene.path(".")).output().expect("kubectl");
        let told: serde_json::Value = serde_json::from_slice(&output.stdout).expect("JSON");
        let ours = scene.run("emit --run X --as k8s").ok().stdout;
        for (name, value) in told["data"].as_object().expect("data") {
            let line = format!("  {name}: {value}");
            assert!(ours.lines().any(|ours| ours == line), "{line} in {ours}");
            assert!(expected.contains_key(name), "{name}");
        }
        assert_eq!(told["data"].as_object().map(serde_json::Map::len), Some(expected.len()));
    }
}

/// systemd and docker read what is written for them, where they are installed; neither needs its daemon.
#[test]
fn systemd_and_docker_take_what_is_emitted_for_them() {
    let scene = Scene::new();
    scene.run("tune --backend simulated --seed 1 --out X").ok();
    if has("systemd-analyze", &["--version"]) {
        scene.write("units/x.service", "[Unit]\nDescription=x\n[Service]\nExecStart=/bin/true\n");
        let complaints = |drop_in: &str| {
            scene.write("units/x.service.d/nccltune.conf", drop_in);
            let mut command = Command::new("systemd-analyze");
            command
                .args(["verify", "x.service"])
                .env("SYSTEMD_UNIT_PATH", format!("{}:", scene.path("units").display()));
            String::from_utf8_lossy(&command.output().expect("systemd-analyze").stderr)
                .lines()
                .filter(|line| line.contains("nccltune.conf"))
                .map(str::to_owned)
                .collect::<Vec<_>>()
        };
        assert_eq!(complaints("[Service]\nEnvironment=\"A B=1\"\n").len(), 1, "it complains of what is wrong");
        assert_eq!(complaints(&scene.run("emit --run X --as systemd").ok().stdout), [] as [String; 0]);
    }
    if has("docker", &["--version"]) {
        let told = |text: &str| {
            scene.write("file.env", text);
            let mut command = Command::new("docker");
            // It reads the file before it looks for its daemon, of which there is none at that place.
            command.args(["create", "--env-file", "file.env", "x"]).env("DOCKER_HOST", "unix:///nonexistent");
            let output = command.current_dir(scene.path(".")).output().expect("docker");
            String::from_utf8_lossy(&output.stderr).into_owned()
        };
        assert!(!told("A B=1\n").contains("daemon"), "it complains of what is wrong");
        for form in ["docker", "env"] {
            let text = told(&scene.run(&format!("emit --run X --as {form}")).ok().stdout);
            assert!(text.contains("daemon") || text.contains("nonexistent"), "{form}: {text}");
        }
    }
}
