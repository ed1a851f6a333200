//! Tuner tables: made of what the search saw, measured as they are deployed, and deployed so that nothing starts half
//! tuned. On a machine whose truth was planted, and with the real workers and the real plugin on the stand-in.

use std::path::PathBuf;

use fs_err as fs;
use nccltune::file_kind::PLUGIN_FILE;
use nccltune::record::{AnswerKind, Event, Manifest, VerdictKind};
use nccltune::tuner_table::{BYTES_MAX, Table};

use crate::command::{Scene, cells, journal_text, manifest_in};
use crate::fakes::Machine;

/// The plugin as cargo built it with this test.
fn plugin() -> PathBuf {
    let program = std::env::current_exe().expect("this program");
    let path = program.parent().expect("a folder").join(PLUGIN_FILE);
    assert!(path.is_file(), "{} is built with the package", path.display());
    path
}

/// A machine on which LL carries small messages best and many channels carry large ones best, each at the other's
/// cost, so that only a table has both.
fn planted() -> Scene {
    let scene = Scene::new();
    scene.write(
        "machine.toml",
        "format = 1\nname = \"both\"\ndescription = \"what only a table has\"\ngpu = \"Test GPU\"\ngpus = 4\n\
         memory_mib = 98304\ncompute_capability = [12, 0]\nsizes_bytes = [4096, 65536, 1048576]\n\
         default_latency_us = [20.0, 30.0, 120.0]\nruns = { algorithm = \"ring\", protocol = \"simple\", channels = 4 }\n\
         [noise]\nlaunch_log_sd = 0.006\nslow_launch_probability = 0.0\nslow_launch_factor = 1.0\ncell_log_sd = 0.002\n\
         replay_log_sd = 0.01\n[cost]\nlaunch_s = 2.0\ncommunicator_s = 0.5\ncell_s = 0.05\n\
         [[effect]]\nwhen = { NCCL_PROTO = \"allreduce:LL\" }\nfactor = [0.8, 0.8, 1.3]\n\
         runs = { algorithm = \"ring\", protocol = \"ll\", channels = 4 }\n\
         [[effect]]\nwhen = { NCCL_MIN_NCHANNELS = \"16\" }\nfactor = [1.1, 1.1, 0.8]\n\
         runs = { algorithm = \"ring\", protocol = \"simple\", channels = 16 }\n\
         [[effect]]\nwhen = { NCCL_NTHREADS = \"256\" }\nfactor = [0.96, 0.96, 0.96]\n",
    );
    scene.write(
        "space.toml",
        "format = 1\nname = \"both\"\ndescription = \"arms of a test\"\n\
         [[arm]]\nname = \"default\"\nenv = {}\n\
         [[arm]]\nname = \"ll\"\nenv = { NCCL_PROTO = \"allreduce:LL\" }\n\
         [[arm]]\nname = \"channels\"\nenv = { NCCL_MIN_NCHANNELS = \"16\" }\n\
         [[arm]]\nname = \"threads\"\nenv = { NCCL_NTHREADS = \"256\" }\n",
    );
    scene
}

const TUNE: &str = "tune --backend simulated --machine machine.toml --space space.toml --sizes 4K,64K,1M --no-trial --final-launches 8";

fn table_name(manifest: &Manifest) -> String {
    let tables = manifest.tables.as_ref().expect("tables in the manifest");
    let (kind, sha256) = tables.arms[0].files.iter().next().expect("a file");
    kind.file_name(sha256)
}

/// Lines of an env file that set something.
fn set_lines(text: &str) -> Vec<String> {
    text.lines().filter(|line| !line.starts_with('#') && !line.is_empty()).map(str::to_owned).collect()
}

#[test]
fn a_table_has_what_no_environment_can_say() {
    let scene = planted();
    let ended = scene.run(&format!("{TUNE} --out run")).ok();
    let choice = scene.choice("run");
    assert_eq!(
        (choice.verdict, choice.winner.as_deref()),
        (VerdictKind::Adopt, Some("tuner table")),
        "{}\n{}",
        choice.reason,
        ended.stdout
    );
    // Nothing stands beside it: a server that does not find the plugin runs as the default.
    assert!(choice.env.is_empty() && choice.simulated);
    assert!(ended.stdout.contains("SIMULATED"));
    let manifest = manifest_in(&scene.path("run"));
    let name = table_name(&manifest);
    let text = scene.read(&format!("run/{name}"));
    let sha256 = &choice.files.values().next().expect("a file")["tuner-table-".len()..][..64];
    assert!(name.contains(sha256));
    let table = Table::parse(text.as_bytes()).expect("a table");
    let lookup = table.of_communicator(4, 1);
    let at = |bytes| lookup.decide(4, bytes).map(|decided| (decided.protocol, decided.channels));
    assert_eq!([at(4096), at(65_536), at(1 << 20)], [Some((0, 4)), Some((0, 4)), Some((2, 16))]);
    // Far from what was measured NCCL chooses, and the file says so.
    assert_eq!([at(0), at(8 << 20), at(BYTES_MAX)], [None; 3]);
    assert!(text.contains("bytes: NCCL's own choice") && text.contains("# SIMULATED"), "{text}");
    assert!(table.rows.iter().all(|row| row.channels > 0 && row.ranks == Some(4) && row.nodes == Some(1)));

    // Both answers: the table, and the best that needs no plugin.
    let kinds: Vec<AnswerKind> = choice.answers.iter().map(|answer| answer.kind).collect();
    assert_eq!(kinds, [AnswerKind::EnvTable, AnswerKind::Env]);
    assert_eq!(choice.answers[0].table.as_deref(), Some(name.as_str()));
    assert_eq!(choice.answers[1].env.get("NCCL_NTHREADS").map(String::as_str), Some("256"));

    // As it is deployed: from process start, one arm a launch.
    let is_deployed = |event: &Event| {
        matches!(event, Event::LaunchStarted { env, .. }
            if env.get("NCCL_TUNER_CONFIG_FILE") == Some(&name) && env.get("NCCL_TUNER_PLUGIN").is_some_and(|file| file == PLUGIN_FILE))
    };
    // Three blocks of the search, the gate, eight of the final.
    assert_eq!(scene.journal("run").iter().filter(|line| is_deployed(&line.event)).count(), 12);

    let here = scene.path("run").display().to_string();
    let expected = [format!("NCCL_TUNER_CONFIG_FILE={here}/{name}"), format!("NCCL_TUNER_PLUGIN={here}/{PLUGIN_FILE}")];
    assert_eq!(set_lines(&scene.read("run/tuned.env")), expected);
    assert_eq!(scene.run("emit --run run --as tuner-table").ok().stdout, text);
    assert!(scene.run("emit --run run --as systemd").ok().stdout.contains(&format!("{here}/{name}")));
    scene.run(&format!("lint run/{name}")).ok();
    // The report knows the table as the arm that it is.
    assert!(scene.run("report --run run").ok().stdout.contains("tuner table"));
}

#[test]
fn a_run_with_a_table_goes_on_is_replayed_and_repeats_itself() {
    let scene = planted();
    scene.run(&format!("{TUNE} --out run")).ok();
    let whole = scene.choice("run");
    assert_eq!(whole.winner.as_deref(), Some("tuner table"));
    scene.run(&format!("{TUNE} --out same")).ok();
    assert_eq!(scene.read("run/run.jsonl"), scene.read("same/run.jsonl"));
    let lines = scene.journal("run");
    let name = table_name(&manifest_in(&scene.path("run")));
    // Before the table was made, while it was measured in the search, and in the final.
    let first = |is: &dyn Fn(&Event) -> bool| lines.iter().position(|line| is(&line.event)).expect("in the journal");
    let chosen = first(&|event| matches!(event, Event::FinalistsChosen { .. }));
    let table =
        first(&|event| matches!(event, Event::LaunchStarted { env, .. } if env.contains_key("NCCL_TUNER_PLUGIN")));
    for (place, until) in [("before", table - 3), ("within", table + 2), ("after", chosen + 6)] {
        scene.copy_run(&scene.path("run"), place, &["manifest.json", "machine.toml", &name, PLUGIN_FILE]);
        scene.write(&format!("{place}/run.jsonl"), journal_text(&lines[..until]));
        scene.run(&format!("tune --backend simulated --resume --out {place} --no-trial")).ok();
        let resumed = scene.choice(place);
        assert_eq!((&resumed.winner, &resumed.files), (&whole.winner, &whole.files), "{place}");
    }
    // Where it was stopped before there was a table, its manifest knows of none, and one is made all the same.
    let mut manifest: serde_json::Value = serde_json::from_str(&scene.read("run/manifest.json")).expect("JSON");
    manifest.as_object_mut().expect("an object").remove("tables");
    scene.copy_run(&scene.path("run"), "early", &["machine.toml"]);
    scene.write("early/manifest.json", manifest.to_string());
    scene.write("early/run.jsonl", journal_text(&lines[..table - 3]));
    scene.run("tune --backend simulated --resume --out early --no-trial").ok();
    assert_eq!(scene.choice("early").files, whole.files);
    scene.run("tune --recorded run --no-trial --out again").ok();
    let replayed = scene.choice("again");
    assert_eq!((replayed.replayed, &replayed.winner, &replayed.files), (true, &whole.winner, &whole.files));
    // Who wants none is given none.
    scene.run(&format!("{TUNE} --tables never --out without")).ok();
    assert!(manifest_in(&scene.path("without")).tables.is_none());
    assert_eq!(scene.choice("without").winner.as_deref(), Some("threads"));
}

#[test]
fn an_answer_whose_plugin_or_table_is_gone_or_foreign_is_refused() {
    let scene = planted();
    scene.run(&format!("{TUNE} --out run")).ok();
    let name = table_name(&manifest_in(&scene.path("run")));
    let refused = |scene: &Scene, says: &str| {
        let ended = scene.run("emit --run run");
        assert!(ended.status == Some(2) && ended.stdout.is_empty() && ended.stderr.contains(says), "{}", ended.stderr);
        // A run whose table cannot be trusted is not taken up again either.
        let ended = scene.run("tune --backend simulated --resume --out run --no-trial");
        assert!(ended.status == Some(2) && ended.stderr.contains(says), "{}", ended.stderr);
    };
    let kept = fs::read(scene.path("run").join(PLUGIN_FILE)).unwrap();
    fs::remove_file(scene.path("run").join(PLUGIN_FILE)).unwrap();
    refused(&scene, "the tuner plugin of the run cannot be had");
    fs::write(scene.path("run").join(PLUGIN_FILE), b"\x7fELF ncclTunerPlugin_v5").unwrap();
    refused(&scene, "is another library");
    fs::write(scene.path("run").join(PLUGIN_FILE), [kept.as_slice(), b" "].concat()).unwrap();
    refused(&scene, "is not the tuner plugin that the run was measured with");
    fs::write(scene.path("run").join(PLUGIN_FILE), &kept).unwrap();
    let table = scene.path("run").join(&name);
    let text = scene.read(&format!("run/{name}"));
    fs::remove_file(&table).unwrap();
    fs::write(&table, text.replace(",ll,", ",ll128,")).unwrap();
    refused(&scene, "somebody changed it");
    assert!(scene.run(&format!("lint run/{name}")).stdout.contains("was changed after it was named"));
    // A plugin that is named must be one of this tool's, and a run without any table has none to tell.
    scene.write("other.so", b"\x7fELF");
    let ended = scene.run(&format!("{TUNE} --plugin other.so --out none"));
    assert!(ended.status == Some(2) && ended.stderr.contains("other.so is another library"), "{}", ended.stderr);
    assert!(!scene.path("none").exists());
    scene.run(&format!("{TUNE} --tables never --out never")).ok();
    let ended = scene.run("emit --run never --as tuner-table");
    assert!(ended.status == Some(2) && ended.stderr.contains("has no tuner table"), "{}", ended.stderr);
}

#[test]
fn tables_by_hand_are_read_as_the_plugin_reads_them() {
    let scene = planted();
    let named = |name: &str, table: &str| {
        scene.write("mine.csv", table);
        scene.write(
            "space.toml",
            "format = 1\nname = \"mine\"\ndescription = \"a table by hand\"\n\
             [[arm]]\nname = \"mine\"\nfiles = { tuner-table = \"mine.csv\" }\n",
        );
        scene.run(&format!("{TUNE} --out {name}"))
    };
    for (name, table, says) in [
        ("overlap", "allreduce,0,9,ring,ll,1,1,4\nallreduce,9,20,ring,ll,1,1,4\n", "line 2: its sizes overlap"),
        ("reversed", "allreduce,9,0,ring,ll,1,1,4\n", "line 1: the range of sizes is reversed"),
        ("unknown", "allreduce,0,9,rings,ll,1,1,4\n", "algorithm \"rings\" is none of"),
        ("large", "allreduce,0,9223372036854775808,ring,ll,1,1,4\n", "not a whole number below 2^63"),
        ("foreign", "allreduce,0,9,ring,ll,1,1,8\n", "for communicators of 8 ranks, and this one has 4"),
    ] {
        let ended = named(name, table);
        assert!(ended.status == Some(2) && ended.stderr.contains(says), "{name}: {}", ended.stderr);
        assert!(ended.stdout.is_empty() && !scene.path(name).exists(), "{name}");
        if name != "foreign" {
            let shown = scene.run("lint mine.csv").stdout;
            assert!(says.split(": ").all(|part| part.starts_with("line") || shown.contains(part)), "{name}: {shown}");
        }
    }
    named("mine", "allreduce,0,131072,ring,ll,4,1,4\nallreduce,131073,9223372036854775807,ring,simple,16,1,4\n").ok();
    let choice = scene.choice("mine");
    assert_eq!((choice.verdict, choice.winner.as_deref()), (VerdictKind::Adopt, Some("mine")), "{}", choice.reason);
    assert!(scene.path("mine").join(PLUGIN_FILE).is_file());
}

/// NCCL ignores a plugin that it does not find: what stands beside a table must be an answer without it.
#[test]
fn what_stands_beside_a_table_must_pass_without_it() {
    let scene = planted();
    scene.write("mine.csv", "allreduce,0,131072,ring,ll,4,1,4\n");
    let space = |env: &str, more: &str| {
        scene.write(
            "space.toml",
            format!(
                "format = 1\nname = \"mine\"\ndescription = \"a table beside variables\"\n\
                 [[arm]]\nname = \"threads\"\nenv = {{ NCCL_NTHREADS = \"256\" }}\n\
                 [[arm]]\nname = \"mine\"\nenv = {{ {env} }}\nfiles = {{ tuner-table = \"mine.csv\" }}\n{more}"
            ),
        );
    };
    let veto = |run: &str| {
        let choice = scene.choice(run);
        assert_ne!(choice.winner.as_deref(), Some("mine"), "{}", choice.reason);
        let veto = choice.vetoed.into_iter().find(|veto| veto.name == "mine");
        veto.unwrap_or_else(|| panic!("not vetoed: {}", choice.reason)).reason
    };
    // Alone, more channels make small messages slower; the table hides that.
    let beside = "NCCL_MIN_NCHANNELS = \"16\"";
    space(beside, &format!("[[arm]]\nname = \"channels\"\nenv = {{ {beside} }}\n"));
    scene.run(&format!("{TUNE} --out regresses")).ok();
    let reason = veto("regresses");
    assert!(reason.contains("channels, which stands beside its table, does not pass without it"), "{reason}");
    assert!(reason.contains("of the default's time"), "{reason}");
    // Nobody measured them alone.
    space(beside, "");
    scene.run(&format!("{TUNE} --out unmeasured")).ok();
    assert!(veto("unmeasured").contains("were never measured without it"));
    // LL128 would run unchecked.
    let beside = "NCCL_PROTO = \"allreduce:LL,LL128\"";
    space(beside, &format!("[[arm]]\nname = \"ll128\"\nenv = {{ {beside} }}\n"));
    scene.run(&format!("{TUNE} --allow-risk unverified-platform --out ll128")).ok();
    assert!(veto("ll128").contains("opens LL128"));
}

/// Whole runs of the real workers: the plugin is loaded by the stand-in as NCCL loads it.
#[test]
fn the_plugin_itself_runs_in_the_workers() {
    let machine = Machine::new("devices = 2\nmachine = \"tables\"\nnoise = 0.004\n");
    // Its NCCL takes LL for messages that Simple carries much better.
    machine.scene.write(
        "space.toml",
        "format = 1\nname = \"both\"\ndescription = \"arms of a test\"\n\
         [[arm]]\nname = \"default\"\nenv = {}\n\
         [[arm]]\nname = \"simple\"\nenv = { NCCL_PROTO = \"allreduce:Simple\" }\n\
         [[arm]]\nname = \"tree\"\nenv = { NCCL_ALGO = \"allreduce:Tree\" }\n",
    );
    let sizes = "--sizes 4K,256K --engine none --space space.toml --no-trial --final-launches 5";
    let (status, said) = machine.tune(sizes);
    assert_eq!(status, Some(0), "{said}");
    let choice = machine.scene.choice("X");
    assert_eq!(choice.winner.as_deref(), Some("tuner table"), "{said}");
    let lines = machine.scene.journal("X");
    let tables = manifest_in(&machine.scene.path("X")).tables.expect("a table");
    let of_table = || cells(&lines).filter(|cell| tables.arms.iter().any(|arm| arm.id == cell.arm));
    assert!(of_table().all(|cell| cell.flags.is_empty()), "the plugin said that it read the table");
    let ran = |bytes| of_table().find(|cell| cell.point.bytes == bytes).and_then(|cell| cell.effective.proto.clone());
    assert_eq!((ran(4096).as_deref(), ran(256 << 10).as_deref()), (Some("ll"), Some("simple")), "{said}");
    assert!(choice.answers.iter().any(|answer| answer.kind == AnswerKind::EnvTable));
}

/// Every version of the interface, by a release that looks for it; and none before.
#[test]
fn every_release_asks_the_plugin_in_its_own_version() {
    let plugin = plugin().display().to_string();
    for (version, says) in [
        (22_105, Some("(v2)")),
        (22_304, Some("(v3)")),
        (22_403, Some("(v4)")),
        (22_809, Some("(v5)")),
        (23_003, Some("(v6)")),
        (22_005, None),
    ] {
        let machine = Machine::new(&format!("nccl_version = {version}\n"));
        machine
            .scene
            .write("mine.csv", "allreduce,0,131072,ring,simple,4,1,2\nallreduce,131073,262144,ring,ll128,2,1,2\n");
        let table = machine.scene.path("mine.csv").display().to_string();
        let variables = [("NCCL_TUNER_PLUGIN", plugin.as_str()), ("NCCL_TUNER_CONFIG_FILE", table.as_str())];
        let (log, small, large, beyond) = machine.ran_with(&variables);
        let loaded = log.tuner.iter().any(|line| line.contains("Using nccltune"));
        assert_eq!(loaded, says.is_some(), "{version}: {:?}", log.tuner);
        if let Some(says) = says {
            assert!(log.tuner.iter().any(|line| line.contains(says)), "{version}: {:?}", log.tuner);
            // Older releases do not log channels.
            let ran = if version < 22_400 { "ring/simple/-" } else { "ring/simple/4" };
            assert_eq!(small, ran, "{version}");
        }
        let (_, own_small, own_large, own_beyond) = machine.ran_with(&[]);
        // LL128 is off on this machine, and what no row names is NCCL's own.
        assert_eq!((large, beyond), (own_large, own_beyond), "{version}");
        assert!(says.is_some() || small == own_small, "{version}");
    }
}

/// A table that cannot be used ends the communicator with its line: nothing starts half tuned. A table for others is
/// said to be one.
#[test]
fn a_server_does_not_start_half_tuned() {
    let plugin = plugin().display().to_string();
    let machine = Machine::new("");
    let path = machine.scene.path("mine.csv").display().to_string();
    let variables = [("NCCL_TUNER_PLUGIN", plugin.as_str()), ("NCCL_TUNER_CONFIG_FILE", path.as_str())];
    for (table, says) in [
        ("allreduce,0,9,ring,ll,1,1,2\nallreduce,5,9,ring,ll,1,1,2\n", "line 2: its sizes overlap"),
        ("allreduce,0,9,ring,lll,1,1,2\n", "line 1: protocol"),
        ("allreduce,9,0,ring,ll,1,1,2\n", "reversed"),
    ] {
        machine.scene.write("mine.csv", table);
        let log = machine.refused_with(&variables);
        assert!(log.tuner.iter().any(|line| line.contains(says)), "{says}: {log:?}");
    }
    machine.scene.write("mine.csv", "allreduce,0,131072,ring,simple,3,1,8\n");
    let (log, small, _, _) = machine.ran_with(&variables);
    assert!(log.tuner.iter().any(|line| line.contains("keeps NCCL's own choices")), "{:?}", log.tuner);
    assert_eq!(small, machine.ran_with(&[]).1);
}
