//! Arms that carry files, and boxes that NCCL misjudges.
//!
//! A file must stay what was measured: it is known by what it holds, lies in the run directory, is checked
//! whenever it is read again, and every way out of the run leads to it. Here a simulated machine is given
//! an effect that belongs to one file, so that the arm with it wins.

use fs_err as fs;
use nccltune::canonical::Fingerprint;
use nccltune::collective::Collective;
use nccltune::record::{AnswerKind, Event, PointVerdict, VerdictKind};
use nccltune::units::group_thousands;

use crate::command::{Ended, Scene, journal_text, manifest_in};
use crate::fakes::Machine;
use crate::resume::clear_machine;

const GRAPH: &str = "<graphs version=\"1\">\n  <graph id=\"0\"/>\n</graphs>\n";
const TUNE: &str = "tune --backend simulated --machine machine.toml --space spaces/space.toml --sizes 64K --no-trial \
                    --final-launches 6";

fn sha256() -> String {
    Fingerprint::of_bytes(GRAPH.as_bytes()).as_str().to_owned()
}

fn name() -> String {
    format!("graph-{}.xml", sha256())
}

/// A machine on which this one file takes three tenths of the time away, and a space that names it.
fn scene() -> Scene {
    let scene = Scene::new();
    let effect = format!("[[effect]]\nwhen = {{ NCCL_GRAPH_FILE = \"{}\" }}\nfactor = [0.7, 0.7, 0.7]\n", name());
    scene.write("machine.toml", clear_machine("launch_log_sd = 0.004\ncell_log_sd = 0.002\n", &effect));
    scene.write(
        "spaces/space.toml",
        "format = 1\nname = \"files\"\ndescription = \"a graph file\"\n\
         [[axis]]\nvariable = \"NCCL_MIN_NCHANNELS\"\nvalues = [\"unset\", \"16\"]\n\
         [[arm]]\nname = \"ring\"\nfiles = { graph = \"ring.xml\" }\n",
    );
    scene.write("spaces/ring.xml", GRAPH);
    scene
}

fn tune(scene: &Scene, more: &str) -> Ended {
    scene.run(&format!("{TUNE} {more}"))
}

/// The lines of an env file that set something.
fn set_lines(text: &str) -> Vec<&str> {
    text.lines().filter(|line| !line.starts_with('#')).collect()
}

#[test]
fn a_file_that_wins_is_part_of_the_answer() {
    let scene = scene();
    let ended = tune(&scene, "--out run").ok();
    let shown = ended.stdout.split_whitespace().collect::<Vec<_>>().join(" ");
    assert!(shown.contains(&format!("NCCL_GRAPH_FILE=[this run's directory]/{}", name())), "{}", ended.stdout);
    assert!(shown.contains("Only together with the graph file") && shown.contains("the graph file of the answer"));
    // Where it was read from is of no matter any more.
    fs::remove_dir_all(scene.path("spaces")).expect("the space can go");
    let choice = scene.choice("run");
    assert_eq!((choice.verdict, choice.winner.as_deref()), (VerdictKind::Adopt, Some("ring")), "{}", choice.reason);
    assert!(choice.env.is_empty(), "a path is no part of what is known of an arm: {:?}", choice.env);
    assert_eq!(choice.files.values().collect::<Vec<_>>(), [&name()]);
    let [answer] = choice.answers.as_slice() else { panic!("{:?}", choice.answers) };
    assert_eq!((answer.kind, &answer.files), (AnswerKind::EnvFile, &choice.files));
    assert_eq!(scene.read(&format!("run/{}", name())), GRAPH);
    let manifest = manifest_in(&scene.path("run"));
    let ring = manifest.arms.iter().find(|arm| arm.name == "ring").expect("the arm");
    assert_eq!(ring.files.values().collect::<Vec<_>>(), [&sha256()]);
    // Deployed form, in the gate once and in the final six times: the variable is there at process start, by the
    // file's name.
    let is_deployed = |event: &Event| matches!(event, Event::LaunchStarted { env, .. } if env.get("NCCL_GRAPH_FILE") == Some(&name()));
    assert_eq!(scene.journal("run").iter().filter(|line| is_deployed(&line.event)).count(), 7);
    let path = scene.path("run").join(name()).display().to_string();
    assert_eq!(set_lines(&scene.read("run/tuned.env")), [format!("NCCL_GRAPH_FILE={path}")]);
    assert!(scene.read("run/tuned.sh").contains(&format!("export NCCL_GRAPH_FILE='{path}'\n")));
    let folder = scene.path("run").display().to_string();
    assert!(scene.read("run/tuned.env").contains(&format!("docker run -v {folder}:{folder}:ro")));
    // A run that was moved leads to where the file is now.
    fs::rename(scene.path("run"), scene.path("moved")).expect("a run can be moved");
    let path = scene.path("moved").join(name()).display().to_string();
    let emitted = scene.run("emit --run moved").ok().stdout;
    assert_eq!(set_lines(&emitted), [format!("NCCL_GRAPH_FILE={path}")]);
}

#[test]
fn an_arm_with_a_file_is_the_same_wherever_it_lies() {
    let scene = scene();
    tune(&scene, "--out run").ok();
    scene.write("elsewhere/other.xml", GRAPH);
    let space =
        scene.read("spaces/space.toml").replace("ring.xml", &scene.path("elsewhere/other.xml").display().to_string());
    scene.write("spaces/space.toml", space);
    tune(&scene, "--out other").ok();
    assert_eq!(scene.read("run/run.jsonl"), scene.read("other/run.jsonl"));
    // Another content is another arm, on which this machine shows no effect.
    scene.write("elsewhere/other.xml", GRAPH.replace("id=\"0\"", "id=\"1\""));
    tune(&scene, "--out third").ok();
    let ids = |run: &str| manifest_in(&scene.path(run)).arms.into_iter().map(|arm| arm.id).collect::<Vec<_>>();
    assert_eq!(ids("run"), ids("other"));
    assert_ne!(ids("run"), ids("third"));
    assert_ne!(scene.choice("third").verdict, VerdictKind::Adopt);
}

#[test]
fn a_run_goes_on_and_is_replayed_without_the_place_its_file_came_from() {
    let scene = scene();
    tune(&scene, "--out run").ok();
    let whole = scene.choice("run");
    let lines = scene.journal("run");
    scene.copy_run(&scene.path("run"), "cut", &["manifest.json", "machine.toml", &name()]);
    scene.write("cut/run.jsonl", journal_text(&lines[..lines.len() / 2]));
    fs::remove_dir_all(scene.path("spaces")).expect("the space can go");
    scene.run("tune --backend simulated --resume --out cut").ok();
    assert_eq!((scene.choice("cut").winner, scene.choice("cut").files), (whole.winner.clone(), whole.files.clone()));
    scene.run("tune --recorded run --no-trial --out again").ok();
    let replayed = scene.choice("again");
    assert!(replayed.replayed);
    assert_eq!((replayed.winner, replayed.files), (whole.winner, whole.files));
    let path = scene.path("again").join(name()).display().to_string();
    assert_eq!(set_lines(&scene.read("again/tuned.env")), [format!("NCCL_GRAPH_FILE={path}")]);
    assert_eq!(scene.read(&format!("again/{}", name())), GRAPH);
}

#[test]
fn a_file_that_was_changed_or_lost_is_told_and_nothing_goes_on_with_it() {
    let scene = scene();
    tune(&scene, "--out run").ok();
    let copy =
        || scene.copy_run(&scene.path("run"), "run2", &["manifest.json", "machine.toml", "run.jsonl", "choice.json"]);
    let commands =
        ["tune --backend simulated --resume --out run2", "tune --recorded run2 --out again", "emit --run run2"];
    for (content, words) in [(None, "cannot be had"), (Some(format!("{GRAPH} ")), "somebody changed it")] {
        copy();
        if let Some(content) = content {
            scene.write(&format!("run2/{}", name()), content);
        }
        for command in commands {
            let before = scene.contents();
            let ended = scene.run(command);
            assert_eq!(ended.status, Some(2), "{command}: {}", ended.stderr);
            assert!(ended.stderr.contains(words) && ended.stderr.contains("hint"), "{command}: {}", ended.stderr);
            assert!(ended.stderr.contains(&name()) && ended.stdout.is_empty(), "{}", ended.shown());
            assert_eq!(scene.contents(), before, "{command}");
        }
    }
}

#[test]
fn a_path_with_a_blank_is_said_where_it_can_be_and_refused_where_it_cannot() {
    let scene = scene();
    let words: Vec<&str> = TUNE.split_whitespace().chain(["--out", "my run"]).collect();
    let ended = scene.run_words(&words).ok();
    assert!(ended.stderr.contains("tuned.env is not written: the graph file"), "{}", ended.stderr);
    assert!(ended.stderr.contains("move the run directory"), "{}", ended.stderr);
    assert!(!scene.path("my run/tuned.env").exists());
    assert!(scene.read("my run/tuned.sh").contains(&format!("/my run/{}'\n", name())));
    let refused = scene.run_words(&["emit", "--run", "my run"]);
    assert_eq!(refused.status, Some(2));
    assert!(refused.stderr.contains("an env file cannot say ' '"), "{}", refused.stderr);
    assert_eq!(refused.stdout, "");
    // A shell reads back what was meant.
    let read = scene.shell(". './my run/tuned.sh' && cat \"$NCCL_GRAPH_FILE\"").ok();
    assert_eq!(read.stdout, GRAPH);
}

#[test]
fn where_a_file_cannot_be_written_or_read_no_run_begins() {
    let scene = scene();
    let full = scene.run_on_full_disk(0, &format!("{TUNE} --out run"));
    assert_eq!(full.status, Some(2), "{}", full.stderr);
    assert!(full.stderr.contains(&name()) && !scene.path("run").exists(), "{}", full.stderr);
    let long = format!("{TUNE} --out {}", vec!["x".repeat(200); 3].join("/"));
    let refused = scene.run(&long);
    assert_eq!(refused.status, Some(2), "{}", refused.stderr);
    assert!(refused.stderr.contains("no place for files"), "{}", refused.stderr);
    for (content, words) in [("", "does not begin like XML"), ("[[arm]]", "does not begin like XML"), ("\0", "XML")] {
        scene.write("spaces/ring.xml", content);
        let refused = tune(&scene, "--out run");
        assert_eq!(refused.status, Some(2));
        assert!(refused.stderr.contains(words) && refused.stderr.contains("\"ring\""), "{}", refused.stderr);
    }
    fs::remove_file(scene.path("spaces/ring.xml")).expect("it can go");
    let refused = tune(&scene, "--out run");
    assert_eq!(refused.status, Some(2));
    assert!(
        refused.stderr.contains("ring.xml") && refused.stderr.contains("begins at this file's folder"),
        "{}",
        refused.stderr
    );
    assert!(!scene.path("run").exists());
}

/// Eight cards in the slots of two EPYC Turin, which NCCL takes for next to unconnected.
const TURIN: &str = "tune --backend simulated --machine rtx-pro-6000-x8-turin --pin NCCL_P2P_LEVEL=SYS";

#[test]
fn the_misjudged_box_is_set_right_through_a_file_and_says_why_it_was_wrong() {
    let scene = Scene::new();
    for seed in 1..=6 {
        let run = format!("run-{seed}");
        scene.run(&format!("{TURIN} --no-trial --seed {seed} --out {run}")).ok();
        let choice = scene.choice(&run);
        assert_eq!(choice.verdict, VerdictKind::Adopt, "{}", choice.reason);
        let winner = choice.winner.as_deref().expect("a winner");
        assert!(winner.starts_with("repaired-graph"), "{winner}");
        assert_eq!(choice.answers[0].kind, AnswerKind::EnvFile);
        let is_sum = |point: &&PointVerdict| point.measured && point.collective == Collective::AllReduce;
        let measured = |points: &[PointVerdict]| points.iter().filter(is_sum).cloned().collect::<Vec<_>>();
        let decode = measured(&choice.points);
        assert_eq!(decode.len(), 3);
        for point in decode {
            let ratio = point.ratio.expect("a ratio");
            assert!(ratio <= 1.0 / 1.4, "{} bytes at {ratio} of the default", point.bytes);
        }
        let prefill = measured(&choice.guard);
        assert!(!prefill.is_empty() && prefill.iter().all(|point| point.ratio.is_some_and(|ratio| ratio < 1.0)));
        // The protocol alone gains as much on decode, and pays in prefill.
        let plain = choice.vetoed.iter().find(|veto| veto.name == "PROTO=allreduce:LL").expect("it may not ship");
        let sizes: Vec<String> =
            prefill.iter().map(|point| format!("{} bytes", group_thousands(point.bytes))).collect();
        assert!(sizes.iter().any(|size| plain.reason.contains(size)), "{}", plain.reason);
        let why = choice.misjudged.expect("a sentence");
        assert!(why.contains("0.1 GB/s") && why.contains("it costs prefill nothing (0."), "{why}");
        assert!(!why.contains(". ") && !why.ends_with('.'), "one sentence: {why}");
        let told = scene.read(&format!("{run}/tuned.env"));
        assert!(told.contains(&format!("# the default: {why}\n")), "{told}");
    }
}

#[test]
fn no_file_is_made_where_it_is_not_wanted_not_needed_or_would_harm() {
    let scene = Scene::new();
    let plan = |more: &str| -> (Vec<String>, String) {
        let ended = scene.run(&format!("{TURIN} --sizes 64K --dry-run --format json {more}")).ok();
        let arms = ended.json()["arms"].as_array().expect("arms").iter().map(|arm| arm["name"].to_string()).collect();
        (arms, ended.stderr)
    };
    let repaired = |arms: &[String]| arms.iter().filter(|name| name.contains("repaired-graph")).count();
    let (arms, said) = plan("");
    assert_eq!(repaired(&arms), 6, "{said}");
    assert!(said.contains("as if the links carried 0.1 GB/s"), "{said}");
    let (arms, said) = plan("--repair-graph never");
    assert!(repaired(&arms) == 0 && !said.contains("graph file"), "{said}");
    // Six of eight: another group of the same server would meet the file and stop.
    let (arms, said) = plan("--tp 6");
    assert_eq!(repaired(&arms), 0);
    assert!(said.contains("no graph file is tried: the box has 8 GPUs and a group has 6"), "{said}");
    assert_eq!(repaired(&plan("--tp 6 --repair-graph always").0), 6);
    // Four are below one socket, where NCCL sees what there is.
    let (arms, said) = plan("--tp 4");
    assert!(repaired(&arms) == 0 && !said.contains("graph file"), "{said}");
    let (arms, said) = plan("--pin NCCL_GRAPH_FILE=/etc/ring.xml");
    assert!(repaired(&arms) == 0 && !said.contains("as if the links"), "{said}");
    assert_eq!(repaired(&plan("--space baseline").0), 0);
    let sound = scene.run("tune --backend simulated --machine rtx-pro-6000-x8 --dry-run").ok();
    assert!(!sound.stdout.contains("repaired-graph") && !sound.stderr.contains("graph file"), "{}", sound.shown());
}

/// On workers: the stand-in for NCCL finds no ring, says so, and reads the file that is made of it.
#[test]
fn a_worker_is_led_to_the_file_and_nccl_says_that_it_read_it() {
    const LIST: &str = "--sizes 16K --engine none --no-trial --search-blocks 2 --final-launches 4";
    let machine = Machine::new("devices = 4\nmisjudged = true\nmachine = \"misjudged-box\"\n");
    let scene = &machine.scene;
    let axis = "[[axis]]\nvariable = \"NCCL_NTHREADS\"\nvalues = [\"unset\", \"256\"]\n";
    scene.write("few.toml", format!("format = 1\nname = \"few\"\ndescription = \"d\"\n{axis}"));
    let (status, said) = machine.tune(&format!("{LIST} --space few.toml"));
    assert_eq!(status, Some(0), "{said}");
    let (manifest, choice) = (manifest_in(&scene.path("X")), scene.choice("X"));
    let misjudged = manifest.misjudged.expect("NCCL said so");
    assert_eq!(misjudged.source, "log", "{}", misjudged.reason);
    let winner = choice.winner.as_deref().expect("a winner");
    assert!(winner.starts_with("repaired-graph"), "{winner}: {}", choice.reason);
    let name = choice.files.values().next().expect("a file").clone();
    let path = scene.path("X").join(&name).display().to_string();
    let read = |event: &Event| match event {
        Event::LaunchEnded { set_by_environment, .. } => {
            set_by_environment.iter().any(|line| line.variable == "NCCL_GRAPH_FILE" && line.value == path)
        }
        _ => false,
    };
    assert!(
        scene.journal("X").iter().filter(|line| read(&line.event)).count() >= 4,
        "every rank of every final said so"
    );
    assert!(scene.read("X/tuned.env").contains(&format!("NCCL_GRAPH_FILE={path}\n")));
}

/// What is not read may have had no part in a gain, so an arm whose file NCCL says nothing of is no answer.
#[test]
fn a_file_that_nccl_says_nothing_of_is_no_answer() {
    let scenario = "devices = 2\nmachine = \"deaf-box\"\nnoise = 0.0\n\
                    [[fault]]\nkind = \"ignored-variable\"\nvariable = \"NCCL_GRAPH_FILE\"\n";
    let machine = Machine::new(scenario);
    let scene = &machine.scene;
    scene.write("ring.xml", GRAPH);
    // The thresholds do the work; the file rides along.
    scene.write(
        "space.toml",
        "format = 1\nname = \"s\"\ndescription = \"d\"\n[[arm]]\nname = \"ring\"\n\
         env = { NCCL_MIN_NCHANNELS = \"16\", NCCL_THREAD_THRESHOLDS = \"-1 -1 -1 2\" }\nfiles = { graph = \"ring.xml\" }\n",
    );
    let (status, said) =
        machine.tune("--sizes 64K --engine none --no-trial --search-blocks 2 --final-launches 4 --space space.toml");
    assert_eq!(status, Some(0), "{said}");
    let choice = scene.choice("X");
    assert_eq!(choice.verdict, VerdictKind::KeepDefault, "{}", choice.reason);
    let [veto] = choice.vetoed.as_slice() else { panic!("{:?}", choice.vetoed) };
    assert!(veto.reason.contains("did not say on every rank that it read the graph file"), "{}", veto.reason);
}

/// What hangs with a file is remembered with it: by what it holds, not by where it lay.
#[test]
fn an_arm_that_hung_with_its_file_is_left_out_of_the_next_run() {
    let machine = Machine::new("devices = 2\nmachine = \"hanging-ring\"\n");
    let scene = &machine.scene;
    let graph =
        "<graphs version=\"1\"><graph id=\"0\" nchannels=\"2\"><gpu dev=\"0\"/><gpu dev=\"0x1\"/></graph></graphs>";
    scene.write("ring.xml", graph);
    scene.write(
        "space.toml",
        "format = 1\nname = \"s\"\ndescription = \"d\"\n[[arm]]\nname = \"ring\"\nfiles = { graph = \"ring.xml\" }\n\
         [[arm]]\nname = \"other\"\nenv = { NCCL_NTHREADS = \"256\" }\n",
    );
    let name = format!("graph-{}.xml", Fingerprint::of_bytes(graph.as_bytes()));
    let path = scene.path("X").join(&name).display().to_string();
    let fault =
        format!("[[fault]]\nkind = \"die\"\nphase = \"collective\"\nwhen = {{ NCCL_GRAPH_FILE = \"{path}\" }}\n");
    scene.write("fake/scenario.toml", format!("devices = 2\nmachine = \"hanging-ring\"\n{fault}"));
    let tune = "--sizes 16K --engine none --no-trial --search-blocks 2 --final-launches 4 --space space.toml";
    let (status, said) = machine.tune(tune);
    assert_eq!(status, Some(0), "{said}");
    let remembered = scene.read("remembered/quarantine.json");
    assert!(remembered.contains(&name) && !remembered.contains(&path), "{remembered}");
    fs::rename(scene.path("X"), scene.path("before")).expect("a run can be moved");
    let (status, said) = machine.tune(tune);
    assert_eq!(status, Some(0), "{said}");
    assert!(said.contains("left out: ring: crashed in"), "{said}");
    let manifest = manifest_in(&scene.path("X"));
    assert_eq!(manifest.quarantined.iter().map(|arm| arm.name.as_str()).collect::<Vec<_>>(), ["ring"]);
    // Another file is another arm.
    scene.write("ring.xml", graph.replace("nchannels=\"2\"", "nchannels=\"3\""));
    fs::rename(scene.path("X"), scene.path("second")).expect("a run can be moved");
    let (status, said) = machine.tune(tune);
    assert_eq!(status, Some(0), "{said}");
    assert!(!said.contains("left out: ring"), "{said}");
}
