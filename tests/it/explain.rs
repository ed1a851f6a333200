//! `nccltune explain` as a user runs it: on machines that are described, and on the stand-in for driver
//! and NCCL, where the log is read back beside the model.

use std::os::unix::fs::symlink;

use fs_err as fs;
use serde_json::Value;

use crate::command::{Scene, assert_shown, shape, skipped_beside_a_driver};
use crate::fakes::Machine;

/// Two sockets of slots, and variables of every kind.
const FALLBACK: &str = "explain --machine rtx-pro-6000-x8-turin --size 4K,32K,256K,16M --env NCCL_P2P_LEVEL=SYS";
const VARIABLES: &str = "--env NCCL_PROTO=LL --env NCCL_MIN_NCHANEL=8 --env NCCL_BUFFSIZE=4M";

#[test]
fn a_described_machine_is_explained_in_every_format() {
    let scene = Scene::new();
    for format in ["text", "csv", "markdown"] {
        let ended = scene.run(&format!("{FALLBACK} {VARIABLES} --format {format}")).ok();
        assert!(ended.stdout.contains("SIMULATED"), "{}", ended.stdout);
        assert_shown(&format!("explain-{format}"), &ended.shown());
    }
    let json = scene.run(&format!("{FALLBACK} {VARIABLES} --format json")).ok().json();
    assert_shown("explain-json-shape", &serde_json::to_string_pretty(&shape(&json)).unwrap());
    for field in ["machine", "nccl", "graphs", "labels", "sizes"] {
        assert!(json.get(field).is_some(), "{field}");
    }
    for field in ["bytes", "algo", "proto", "channels", "threads", "predicted_us", "runner_up", "effects"] {
        assert!(json["sizes"][0].get(field).is_some(), "{field}");
    }
    assert!(scene.contents().is_empty(), "nothing is written");
}

#[test]
fn a_fallback_is_told_in_plain_words_and_what_mends_it_is_an_effect() {
    let scene = Scene::new();
    let json = scene.run(&format!("{FALLBACK} --format json")).ok().json();
    assert_eq!(json["graphs"][0]["fallback"], true);
    assert_eq!((&json["sizes"][1]["algo"], &json["sizes"][1]["proto"]), (&"ring".into(), &"simple".into()));
    let findings = json["findings"].to_string();
    for part in ["No ring fits", "NCCL takes Simple from 4 KiB up", "compare none of them with a clock"] {
        assert!(findings.contains(part), "{findings}");
    }
    let json = scene.run(&format!("{FALLBACK} {VARIABLES} --format json")).ok().json();
    let size = &json["sizes"][1];
    assert_eq!(size["proto"], "ll");
    let effect = |name: &str| {
        let mut effects = size["effects"].as_array().unwrap().iter();
        effects.find(|effect| effect["variable"] == name).unwrap().clone()
    };
    assert_eq!(
        (&effect("NCCL_PROTO")["effect"], &effect("NCCL_PROTO")["without"]["proto"]),
        (&"changes".into(), &"simple".into())
    );
    let misspelt = effect("NCCL_MIN_NCHANEL");
    assert_eq!(misspelt["effect"], "none");
    assert!(misspelt["reason"].as_str().unwrap().contains("did you mean NCCL_MIN_NCHANNELS?"), "{misspelt}");
}

#[test]
fn what_is_not_named_has_a_default_that_is_said() {
    if skipped_beside_a_driver("what_is_not_named_has_a_default_that_is_said") {
        return;
    }
    let scene = Scene::new();
    let json = scene.run("explain --format json").ok().json();
    assert_eq!(json["labels"], serde_json::json!(["SIMULATED"]));
    assert!(json["sizes_origin"].as_str().unwrap().contains("kimi-k2.5"), "{}", json["sizes_origin"]);
    assert!(json["notes"].to_string().contains("no NVIDIA driver is installed here"), "{}", json["notes"]);
    let named = scene.run("explain --machine auto");
    assert_eq!((named.status, named.stdout.as_str()), (Some(3), ""));
    assert!(named.stderr.contains("rtx-pro-6000-x8-turin"), "{}", named.stderr);
}

#[test]
fn a_release_that_is_not_known_has_a_stand_in_or_is_refused() {
    let scene = Scene::new();
    let json = scene.run("explain --machine l40s-x8 --size 64K --nccl 2.31.0 --format json").ok().json();
    assert_eq!((&json["nccl"]["version"], &json["nccl"]["rules"]), (&"2.31.0".into(), &"2.30.7".into()));
    let old = scene.run("explain --machine l40s-x8 --nccl 2.4.8");
    assert_eq!((old.status, old.stdout.as_str()), (Some(2), ""));
    assert!(old.stderr.contains("2.19"), "{}", old.stderr);
}

#[test]
fn what_cannot_be_explained_is_refused() {
    let scene = Scene::new();
    scene.write("dump.xml", "<system version=\"1\"/>");
    scene.write("bad.env", "NCCL_ALGO=Ring\nexport NCCL_PROTO=LL\n");
    scene.write("good.env", "NCCL_ALGO=Ring\n");
    let cases: [(&str, &[&str]); 12] = [
        ("explain --machine rtx-pro-600-x8", &["no machine", "did you mean rtx-pro-6000-x8?"]),
        ("explain --machine dump.xml", &["looks like XML"]),
        ("explain --machine l40s-x8 --size 0", &["there must be 1 byte to"]),
        ("explain --machine l40s-x8 --size 1025G", &["there must be 1 byte to"]),
        ("explain --machine l40s-x8 --size 12X", &["--size"]),
        ("explain --machine l40s-x8 --nccl 2.28", &["such as 2.28.9"]),
        ("explain --machine l40s-x8 --collective all-redcue", &["did you mean all-reduce?"]),
        ("explain --machine l40s-x8 --env NCCL_ALGO", &["--env \"NCCL_ALGO\": it is not NAME=VALUE"]),
        ("explain --machine l40s-x8 --env NCCL_ALGO=Rin --size 64K", &["NCCL does not start with NCCL_ALGO=Rin"]),
        ("explain --machine l40s-x8 --env-file bad.env", &["bad.env: line 2", "write KEY=VALUE"]),
        ("explain --machine l40s-x8 --env-file none.env", &["none.env"]),
        ("explain --machine l40s-x8 --env-file good.env --root .", &["--root are about this machine"]),
    ];
    for (line, says) in cases {
        let ended = scene.run(line);
        assert_eq!((ended.status, ended.stdout.as_str()), (Some(2), ""), "{line}\n{}", ended.stderr);
        for text in says {
            assert!(ended.stderr.contains(text), "{line}: no {text:?} in\n{}", ended.stderr);
        }
        assert!(!ended.stderr.contains("panicked"), "{}", ended.stderr);
    }
}

/// A /sys and /proc in which the stand-in's GPUs have slots of one CPU.
fn plant_tree(machine: &Machine, gpus: u32) {
    let scene = &machine.scene;
    scene.write("tree/proc/cpuinfo", "vendor_id : GenuineIntel\ncpu family : 6\nmodel : 143\n");
    let devices = scene.path("tree/sys/bus/pci/devices");
    fs::create_dir_all(&devices).expect("a folder in a temporary directory");
    for gpu in 0..gpus {
        let address = format!("0000:{:02x}:00.0", 0x1a + gpu);
        let port = format!("pci0000:10/0000:10:{gpu:02x}.0");
        for folder in [port.clone(), format!("{port}/{address}")] {
            for (name, word) in [("max_link_speed", "32.0 GT/s PCIe"), ("max_link_width", "16"), ("numa_node", "0")] {
                scene.write(&format!("tree/sys/devices/{folder}/{name}"), format!("{word}\n"));
            }
        }
        symlink(format!("../../../devices/{port}/{address}"), devices.join(&address))
            .expect("a link in a temporary directory");
    }
}

/// The explanation of the stand-in.
fn explained(machine: &Machine, more: &str) -> Value {
    let nccl = machine.library("libnccl.so.2");
    let line = format!("explain --machine auto --root tree --nccl-lib {nccl} --format json {more}");
    let output = machine.command(&line.split_whitespace().collect::<Vec<_>>()).output().expect("the program starts");
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{errors}");
    serde_json::from_slice(&output.stdout).unwrap_or_else(|error| panic!("{error}\n{errors}"))
}

#[test]
fn on_gpus_the_log_stands_beside_the_model() {
    let machine = Machine::new("devices = 2\nmachine = \"explain-log\"\n");
    plant_tree(&machine, 2);
    let json = explained(&machine, "--size 1023,4K,64K,1M --env NCCL_MIN_NCHANNELS=8");
    assert_eq!(json["labels"], serde_json::json!(["SIMULATED"]), "a stand-in is no GPU");
    assert_eq!(json["transports"], serde_json::json!(["SHM"]));
    let log = &json["log"];
    assert_eq!(log["failure"], Value::Null, "{log}");
    assert_eq!(log["compared_sizes"], 3);
    assert_eq!(log["communicator_channels"], 8);
    assert_eq!(log["unread"], serde_json::json!([]));
    assert_eq!(log["transport"], "SHM/direct/direct");
    assert!(log["set_by_environment"].to_string().contains("NCCL_MIN_NCHANNELS"), "{log}");
    assert_eq!((&log["graphs"][0]["pattern"], &log["graphs"][0]["path"]), (&"ring".into(), &"SYS".into()));
    let small = &json["sizes"][1];
    assert_eq!((&small["logged"]["algo"], &small["logged"]["proto"]), (&"ring".into(), &"ll".into()));
    assert_eq!(small["logged"]["agrees"], true, "{small}");
    assert_eq!(json["sizes"][0]["logged"], Value::Null);
    assert!(json["notes"].to_string().contains("1,023 B"), "an odd size is no row of bf16: {}", json["notes"]);
}

#[test]
fn where_the_log_says_otherwise_it_is_told() {
    let scenario = "devices = 2\nmachine = \"explain-odd\"\n\
        [[fault]]\nkind = \"substituted\"\nrun_protocol = \"Simple\"\nabove_bytes = 8192\n\
        [[fault]]\nkind = \"ignored-variable\"\nvariable = \"NCCL_NTHREADS\"\n";
    let machine = Machine::new(scenario);
    plant_tree(&machine, 2);
    let json = explained(&machine, "--size 4K,64K --env NCCL_NTHREADS=256");
    let log = &json["log"];
    assert_eq!((&log["agreeing_sizes"], &log["compared_sizes"]), (&1.into(), &2.into()), "{json}");
    assert_eq!(json["sizes"][1]["logged"]["agrees"], false);
    assert_eq!(log["unread"], serde_json::json!(["NCCL_NTHREADS"]));
    let quiet = explained(&machine, "--size 4K --no-launch");
    assert_eq!(quiet["log"], Value::Null);
    assert!(quiet["notes"].to_string().contains("NCCL was not started"), "{}", quiet["notes"]);
}

#[test]
fn a_launch_that_fails_is_an_answer_too() {
    let scenario = "devices = 2\nmachine = \"explain-fails\"\n\
        [[fault]]\nkind = \"error\"\ncall = \"ncclCommInitRank\"\ncode = 2\ntext = \"no such luck\"\n";
    let machine = Machine::new(scenario);
    plant_tree(&machine, 2);
    let json = explained(&machine, "--size 4K");
    assert!(json["log"]["failure"].as_str().unwrap().contains("refused"), "{}", json["log"]);
    assert_eq!(json["sizes"][0]["proto"], "ll", "the prediction stands");
}
