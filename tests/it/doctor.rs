//! `nccltune doctor --root`: faults planted in copies of another machine's files, each found by the check
//! whose business it is, and hostile trees that must neither hang nor crash it.

use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use fs_err as fs;
use serde_json::Value;

use crate::command::Scene;
use crate::fakes::Machine;

const GPUS: [&str; 2] = ["0000:3b:00.0", "0000:af:00.0"];
const BRIDGES: [&str; 2] = ["0000:3a:00.0", "0000:ae:00.0"];
/// What reading a few small files may take on a loaded machine.
const SOON: Duration = Duration::from_secs(20);

/// A copy of a machine's files: two GPUs on two nodes, nothing wrong with any of it.
struct Copy {
    scene: Scene,
}

impl Copy {
    fn healthy() -> Self {
        let copy = Self { scene: Scene::new() };
        for (path, text) in [
            ("proc/cpuinfo", "processor\t: 0\nmodel name\t: CPU\nflags\t\t: fpu sse2\n"),
            ("proc/cmdline", "root=UUID=private quiet\n"),
            ("proc/mounts", "proc /proc proc rw 0 0\ntmpfs /dev/shm tmpfs rw,nosuid,nodev,size=67108864k 0 0\n"),
            ("proc/driver/nvidia/version", "NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.95.05  Tue\n"),
            ("proc/driver/nvidia/params", "EnableMSI: 1\nEnableStreamMemOPs: 0\nRegistryDwords: \"\"\n"),
            ("proc/self/status", "Name:\tserver\nCpus_allowed_list:\t0-63\n"),
            ("proc/self/limits", "Max locked memory         8388608              8388608              bytes     \n"),
            ("proc/self/cgroup", "0::/machine/server\n"),
            ("proc/41/status", "Name:\tnvidia-persiste\nPPid:\t1\n"),
            ("sys/fs/cgroup/machine/server/memory.max", "max\n"),
            ("sys/fs/cgroup/machine/server/pids.max", "max\n"),
            ("sys/fs/cgroup/machine/server/cpu.max", "max 100000\n"),
            ("sys/class/dmi/id/product_name", "Server 9000\n"),
            ("sys/devices/system/node/node0/cpulist", "0-31\n"),
            ("sys/devices/system/node/node1/cpulist", "32-63\n"),
            ("sys/devices/system/node/node0/meminfo", "Node 0 MemTotal:       131928394 kB\n"),
            ("sys/devices/system/node/node1/meminfo", "Node 1 MemTotal:       132118140 kB\n"),
            ("sys/devices/system/cpu/cpu0/cpufreq/scaling_governor", "performance\n"),
            ("sys/devices/system/cpu/cpu0/cpufreq/scaling_driver", "acpi-cpufreq\n"),
            ("dev/nvidia0", ""),
            ("dev/nvidia1", ""),
        ] {
            copy.write(path, text);
        }
        fs::create_dir_all(copy.path("sys/class/iommu")).expect("the copy can be written");
        copy.link("proc/41/fd/3", "/dev/nvidia0");
        for (node, (gpu, bridge)) in GPUS.into_iter().zip(BRIDGES).enumerate() {
            let place = format!("devices/pci{node}/{bridge}");
            for device in [place.clone(), format!("{place}/{gpu}")] {
                for (file, text) in [
                    ("current_link_width", "16\n"),
                    ("max_link_width", "16\n"),
                    ("current_link_speed", "32.0 GT/s PCIe\n"),
                    ("max_link_speed", "32.0 GT/s PCIe\n"),
                ] {
                    copy.write(&format!("sys/{device}/{file}"), text);
                }
            }
            for (file, text) in [
                ("vendor", "0x10de\n".to_owned()),
                ("class", "0x030200\n".to_owned()),
                ("numa_node", format!("{node}\n")),
                ("local_cpulist", format!("{}-{}\n", node * 32, node * 32 + 31)),
            ] {
                copy.write(&format!("sys/{place}/{gpu}/{file}"), text);
            }
            copy.write(&format!("sys/{place}/config"), [0; 4096]);
            copy.link(&format!("sys/bus/pci/devices/{bridge}"), &format!("../../../{place}"));
            copy.link(&format!("sys/bus/pci/devices/{gpu}"), &format!("../../../{place}/{gpu}"));
            copy.write(&format!("proc/driver/nvidia/gpus/{gpu}/information"), "Model: \t\t NVIDIA GeForce RTX 5090\n");
        }
        copy
    }

    fn path(&self, path: &str) -> PathBuf {
        self.scene.path("copy").join(path)
    }

    fn write(&self, path: &str, text: impl AsRef<[u8]>) {
        let path = self.path(path);
        fs::create_dir_all(path.parent().expect("a folder")).expect("the copy can be written");
        fs::write(path, text).expect("the copy can be written");
    }

    fn remove(&self, path: &str) {
        fs::remove_file(self.path(path)).expect("the copy can be written");
    }

    fn link(&self, path: &str, target: &str) {
        let path = self.path(path);
        fs::create_dir_all(path.parent().expect("a folder")).expect("the copy can be written");
        symlink(target, path).expect("the copy can be written");
    }

    /// The exit status, and every check with its verdict and evidence.
    fn checks(&self) -> (Option<i32>, Vec<(String, String, String)>) {
        let started = Instant::now();
        let ended = self.scene.run("doctor --root copy --format json");
        assert!(started.elapsed() < SOON, "{:?}", started.elapsed());
        let text = |check: &Value, field: &str| check[field].as_str().expect("text").to_owned();
        let report: Value =
            serde_json::from_str(&ended.stdout).unwrap_or_else(|error| panic!("{error}: {}", ended.stderr));
        let checks = report["checks"].as_array().expect("a list");
        for check in checks {
            let needs_advice = check["verdict"] == "fail" || check["verdict"] == "warn";
            assert_eq!(needs_advice, check["advice"] != "", "{check}");
        }
        let told = checks.iter().map(|check| (text(check, "name"), text(check, "verdict"), text(check, "evidence")));
        (ended.status, told.collect())
    }

    /// What is not in order.
    fn complaints(&self) -> Vec<String> {
        let (_, checks) = self.checks();
        let bad = checks.into_iter().filter(|(_, verdict, _)| verdict == "warn" || verdict == "fail");
        bad.map(|(name, verdict, _)| format!("{name} {verdict}")).collect()
    }
}

/// A planted fault.
struct Fault {
    what: &'static str,
    plant: fn(&Copy),
    /// The check that finds it, its verdict, and words of its evidence.
    found: (&'static str, &'static str, &'static str),
}

fn gpu_file(index: usize, file: &str) -> String {
    format!("sys/bus/pci/devices/{}/{file}", GPUS[index])
}

const FAULTS: &[Fault] = &[
    Fault {
        what: "docker's default for shared memory",
        plant: |copy| copy.write("proc/mounts", "shm /dev/shm tmpfs rw,nosuid,size=65536k 0 0\n"),
        found: ("shared-memory", "fail", "mounted with 64 MiB"),
    },
    Fault {
        what: "a guest, by its processor",
        plant: |copy| copy.write("proc/cpuinfo", "flags : fpu hypervisor\n"),
        found: ("virtualisation", "warn", "a hypervisor runs it"),
    },
    Fault {
        what: "a guest, by its firmware",
        plant: |copy| copy.write("sys/class/dmi/id/product_name", "Standard PC (Q35 + ICH9, 2009)\n"),
        found: ("virtualisation", "warn", "Q35"),
    },
    Fault {
        what: "an IOMMU that may translate",
        plant: |copy| {
            copy.write("sys/class/iommu/ivhd0/x", "");
            copy.write("proc/cmdline", "amd_iommu=on\n");
        },
        found: ("iommu", "warn", "amd_iommu=on"),
    },
    Fault {
        what: "a bridge that redirects peer traffic",
        plant: |copy| {
            let mut config = [0; 4096];
            config[0x100..0x108].copy_from_slice(&[0x0d, 0, 1, 0, 0, 0, 0x1d, 0]);
            copy.write(&format!("sys/bus/pci/devices/{}/config", BRIDGES[1]), config);
        },
        found: ("acs-redirect", "warn", BRIDGES[1]),
    },
    Fault {
        what: "a driver that is known to lose peer writes",
        plant: |copy| {
            copy.write("proc/driver/nvidia/version", "NVRM version: NVIDIA UNIX Open Kernel Module  610.43.03  Tue\n");
        },
        found: ("peer-known-bad", "warn", "issue 873"),
    },
    Fault {
        what: "peer access forced",
        plant: |copy| {
            copy.write("proc/driver/nvidia/params", "RegistryDwords: \"RMForceStaticBar1=1;PeerMappingOverride=1\"\n");
        },
        found: ("driver-parameters", "warn", "PeerMappingOverride=1"),
    },
    Fault {
        what: "interrupts of old",
        plant: |copy| copy.write("proc/driver/nvidia/params", "EnableMSI: 0\n"),
        found: ("driver-parameters", "warn", "EnableMSI is 0"),
    },
    Fault {
        what: "four lanes of sixteen",
        plant: |copy| copy.write(&gpu_file(1, "current_link_width"), "4\n"),
        found: ("pcie-slot", "warn", "GPU 1 has 4 of its 16 lanes"),
    },
    Fault {
        what: "a slot of the generation before",
        plant: |copy| copy.write(&format!("sys/bus/pci/devices/{}/max_link_speed", BRIDGES[0]), "16.0 GT/s PCIe\n"),
        found: ("pcie-slot", "warn", "GPU 0 is built for 32 GT/s, its slot 0000:3a:00.0 for 16 GT/s"),
    },
    Fault {
        what: "a GPU that belongs nowhere",
        plant: |copy| copy.write(&gpu_file(0, "numa_node"), "-1\n"),
        found: ("gpu-numa", "warn", "near GPU 0"),
    },
    Fault {
        what: "another tenant, by an open file",
        plant: |copy| copy.link("proc/4242/fd/9", "/dev/nvidia1"),
        found: ("gpu-holders", "warn", "process 4242 has them open"),
    },
    Fault {
        what: "another tenant, by a mapping",
        plant: |copy| {
            copy.link("proc/4243/fd/0", "/dev/null");
            copy.write("proc/4243/maps", "7f00-7f01 rw-s 00000000 00:06 468    /dev/nvidia-uvm\n");
        },
        found: ("gpu-holders", "warn", "process 4243 has them mapped"),
    },
    Fault {
        what: "a node without memory",
        plant: |copy| copy.write("sys/devices/system/node/node1/meminfo", "Node 1 MemTotal:       0 kB\n"),
        found: ("numa-nodes", "warn", "node 1 has no memory"),
    },
    Fault {
        what: "a node without processors",
        plant: |copy| copy.write("sys/devices/system/node/node1/cpulist", "\n"),
        found: ("numa-nodes", "warn", "node 1 has no processors"),
    },
    Fault {
        what: "one processor for everything",
        plant: |copy| copy.write("proc/self/status", "Cpus_allowed_list:\t40\n"),
        found: ("cpu-affinity", "warn", "1 processor for 2 ranks"),
    },
    Fault {
        what: "processors of the wrong socket alone",
        plant: |copy| copy.write("proc/self/status", "Cpus_allowed_list:\t0-15\n"),
        found: ("cpu-affinity", "warn", "none of those near GPU 1"),
    },
    Fault {
        what: "RDMA adapters and no memory for them",
        plant: |copy| {
            copy.write("sys/class/infiniband/mlx5_0/x", "");
            copy.write(
                "proc/self/limits",
                "Max locked memory         65536                65536                bytes\n",
            );
        },
        found: ("locked-memory", "warn", "64 KiB"),
    },
    Fault {
        what: "a container without memory",
        plant: |copy| {
            copy.write("sys/fs/cgroup/machine/server/memory.max", "4294967296\n");
            copy.write("sys/fs/cgroup/machine/server/memory.current", "2147483648\n");
        },
        found: ("control-group", "warn", "2,048 MiB of 4,096 MiB of memory are left"),
    },
    Fault {
        what: "a limit on threads further up",
        plant: |copy| copy.write("sys/fs/cgroup/machine/pids.max", "100\n"),
        found: ("control-group", "warn", "100 of 100 threads"),
    },
    Fault {
        what: "a quota of time",
        plant: |copy| copy.write("sys/fs/cgroup/machine/server/cpu.max", "150000 100000\n"),
        found: ("control-group", "warn", "1.5 processors' worth"),
    },
    Fault {
        what: "processors that save power",
        plant: |copy| copy.write("sys/devices/system/cpu/cpu0/cpufreq/scaling_governor", "powersave\n"),
        found: ("cpu-frequency", "warn", "powersave"),
    },
    Fault {
        what: "variables behind everybody's back",
        plant: |copy| copy.write("etc/nccl.conf", "NCCL_BUFFSIZE=1048576\n"),
        found: ("conf-files", "warn", "NCCL_BUFFSIZE"),
    },
    Fault {
        what: "variables that contradict each other",
        plant: |copy| copy.write("etc/nccl.conf", "NCCL_P2P_DISABLE=1\nNCCL_P2P_LEVEL=SYS\n"),
        found: ("contradictory-environment", "warn", "NCCL_P2P_LEVEL"),
    },
];

#[test]
fn nothing_is_said_against_a_copy_of_a_healthy_machine() {
    let copy = Copy::healthy();
    let (status, checks) = copy.checks();
    assert_eq!(copy.complaints(), Vec::<String>::new(), "{checks:#?}");
    assert_eq!(status, Some(0));
    let open: Vec<&str> = checks.iter().filter(|(_, verdict, _)| verdict == "unknown").map(|check| &*check.0).collect();
    assert!(open.contains(&"driver-usable") && open.contains(&"nccl-found"), "{open:?}");
    for (name, verdict, evidence) in &checks {
        assert_eq!(verdict == "unknown", evidence == "not asked: --root reads files only", "{name}: {evidence}");
    }
}

#[test]
fn each_planted_fault_is_found_by_its_check() {
    assert!(FAULTS.len() >= 15);
    let mut wrong = Vec::new();
    for fault in FAULTS {
        let copy = Copy::healthy();
        (fault.plant)(&copy);
        let (status, checks) = copy.checks();
        let (name, verdict, words) = fault.found;
        let found = checks.iter().find(|check| check.0 == name).unwrap_or_else(|| panic!("{name}"));
        // Nor does it make another check cry, but for what the variables' own checks say of the same file.
        let others: Vec<String> =
            copy.complaints().into_iter().filter(|said| !said.starts_with(&format!("{name} "))).collect();
        let is_found = found.1 == verdict && found.2.contains(words);
        let is_told = status == Some(if verdict == "fail" { 3 } else { 0 });
        if !is_found || !is_told || !(others.is_empty() || name == "contradictory-environment") {
            wrong.push(format!("{}: {found:?}, {others:?}, status {status:?}", fault.what));
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn files_of_this_machine_do_not_answer_for_another() {
    let copy = Copy::healthy();
    for path in ["proc/self/status", "proc/mounts", "proc/cpuinfo"] {
        copy.remove(path);
        copy.link(path, &format!("/{path}"));
    }
    copy.link("etc/nccl.conf", "/proc/self/environ");
    let (_, checks) = copy.checks();
    let of = |name: &str| checks.iter().find(|check| check.0 == name).unwrap();
    assert_eq!(of("cpu-affinity").1, "unknown");
    assert_eq!(of("shared-memory").1, "unknown");
    assert!(of("conf-files").2.contains("leads out"), "{:?}", of("conf-files"));
}

#[test]
fn hostile_trees_neither_hang_nor_crash_it() {
    let copy = Copy::healthy();
    // Links in circles, for a file and for a folder.
    copy.remove("proc/cmdline");
    copy.link("proc/cmdline", "cmdline");
    copy.link("proc/99/fd", "../99/fd");
    copy.link("sys/devices/system/node/node2", ".");
    // What waits for a writer that never comes.
    for path in ["proc/mounts", "proc/self/limits"] {
        copy.remove(path);
        nix::unistd::mkfifo(&copy.path(path), nix::sys::stat::Mode::S_IRWXU).unwrap();
    }
    // A hundred megabytes, most of them a hole, and none of them text.
    for path in ["proc/cpuinfo", "proc/driver/nvidia/params", "etc/nccl.conf", "proc/self/status", "proc/41/maps"] {
        copy.write(path, b"\xff\xfe: \xff\n");
        fs::OpenOptions::new().write(true).open(copy.path(path)).unwrap().set_len(100 << 20).unwrap();
    }
    copy.write("sys/devices/system/node/node0/cpulist", "0-4294967295,".repeat(100_000));
    copy.write("sys/devices/system/cpu/cpu0/cpufreq/scaling_governor", [0x1b; 5000]);
    copy.write(&gpu_file(0, "max_link_speed"), "NaN GT/s\n");
    copy.write(&gpu_file(1, "current_link_width"), "99999999999999999999\n");
    copy.write("sys/fs/cgroup/cpu.max", "1e999 0\n");
    for process in 0..300 {
        copy.write(&format!("proc/{}/fd/0", 5000 + process), "a file where a link should be");
    }
    let (_, checks) = copy.checks();
    assert!(checks.len() >= 20, "{checks:?}");
    assert!(checks.iter().all(|(_, _, evidence)| evidence.len() < 4000 && !evidence.contains('\u{1b}')), "{checks:?}");
}

#[test]
fn a_folder_that_is_none_is_wrong_usage() {
    let scene = Scene::new();
    let ended = scene.run("doctor --root missing");
    assert_eq!(ended.status, Some(2));
    assert!(ended.stderr.contains("missing") && ended.stderr.contains("--root"), "{}", ended.stderr);
    assert_eq!(scene.run("doctor --root . --live").status, Some(2));
}

/// More than it takes: two seconds, on a machine that does other things as well.
const WITHOUT_DRIVER: Duration = Duration::from_secs(2);

#[test]
fn a_machine_without_a_driver_is_told_so_at_once() {
    if Path::new("/dev/nvidiactl").exists() {
        return;
    }
    let scene = Scene::new();
    let mut durations = Vec::new();
    // The first start reads the program from disk; of three, one has the machine for itself.
    for _ in 0..3 {
        let started = Instant::now();
        let ended = scene.run("doctor --format json");
        durations.push(started.elapsed());
        assert_eq!(ended.status, Some(3), "{}", ended.stderr);
        assert!(ended.json()["checks"].as_array().unwrap().len() >= 12);
    }
    assert!(durations.iter().min().unwrap() < &WITHOUT_DRIVER, "{durations:?}");
}

#[test]
fn a_sample_is_taken_where_gpus_answer_and_warns_at_most() {
    let machine = Machine::new("devices = 2\nmachine = \"class-sample\"\n");
    let (report, said) = machine.doctor("--sample");
    let checks = report["checks"].as_array().unwrap();
    let of = |name: &str| checks.iter().find(|check| check["name"] == name);
    let check = of("against-class").unwrap_or_else(|| panic!("{report}\n{said}"));
    // Nobody has published anything of the stand-in; what it took is told all the same.
    assert_eq!(check["verdict"], "unknown");
    let evidence = check["evidence"].as_str().unwrap();
    for size in ["8 KiB takes", "16 KiB takes", "64 KiB takes", "256 KiB takes", "are in the table"] {
        assert!(evidence.contains(size), "{evidence}");
    }
    assert!(of("idle-links").is_none() && of("peer-access").is_none(), "--sample alone starts no other live check");
    let (report, _) = machine.doctor("");
    assert!(report["checks"].as_array().unwrap().iter().all(|check| check["name"] != "against-class"));
}

#[test]
fn the_bundle_has_every_check_nothing_private_and_overwrites_nothing() {
    let copy = Copy::healthy();
    copy.write("etc/hostname", "inference-17.corp.example\n");
    copy.write("etc/passwd", "mallory:x:1000:1000::/data/mallory:/bin/sh\n");
    copy.write("etc/nccl.conf", "NCCL_SOCKET_IFNAME=inference-17\nNCCL_OOB_NET_IFNAME=10.1.2.3\nHF_TOKEN=hunter2\n");
    copy.write("etc/os-release", "PRETTY_NAME=\"mallory's Linux\"\n");
    let run = || copy.scene.run("doctor --root copy --format json --bundle bundle.md");
    let ended = run();
    assert_eq!(ended.status, Some(0), "{}", ended.stderr);
    let text = fs::read_to_string(copy.scene.path("bundle.md")).unwrap();
    for private in ["inference-17", "corp.example", "mallory", "10.1.2.3", "hunter2", "UUID=private"] {
        assert!(!text.contains(private), "{private} in\n{text}");
    }
    for check in ended.json()["checks"].as_array().unwrap() {
        assert!(text.contains(&format!("`{}`", check["name"].as_str().unwrap())), "{check}");
    }
    for kept in ["driver: 580.95.05", "RTX 5090", "0000:3b:00.0", "[user]'s Linux", "NCCL_SOCKET_IFNAME"] {
        assert!(text.contains(kept), "{kept} not in\n{text}");
    }
    let again = run();
    assert!(again.status == Some(2) && again.stderr.contains("overwrites nothing"), "{}", again.stderr);
    assert_eq!(fs::read_to_string(copy.scene.path("bundle.md")).unwrap(), text);
    copy.remove("../bundle.md");
    symlink(copy.path("etc/hostname"), copy.scene.path("bundle.md")).unwrap();
    assert_eq!(run().status, Some(2), "a link is not followed");
    assert_eq!(fs::read_to_string(copy.path("etc/hostname")).unwrap(), "inference-17.corp.example\n");
}
