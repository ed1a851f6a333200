//! Whole runs on the stand-in for driver and NCCL, with something going wrong in them: every outcome is
//! the one that faults.toml expects, nobody else is blamed, nothing finished is lost or measured twice,
//! and no process is left.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::process::Command;
use std::sync::Mutex;
use std::time::{Duration, Instant};

use fs_err as fs;
use nccltune::record::{ArmId, Choice, Event, Flag, JournalLine, OutcomeKind, VerdictKind};
use nccltune::seed::Seed;
use nix::sys::signal::Signal;
use rand::RngExt;
use serde::Deserialize;

use crate::command::{Running, cells, journal_in, manifest_in, wait_at_most};
use crate::fakes::Machine;

/// The longest a phase may take where something hangs, and where nothing is meant to: a busy machine
/// must not look like a hang.
const PHASE_LIMIT: Duration = Duration::from_secs(2);
const PATIENT_LIMIT: Duration = Duration::from_secs(30);
/// What a hang may cost beside its phase's limit.
const HANG_EXTRA: Duration = Duration::from_secs(3);
/// Faults of the long campaign, and its seed.
const CAMPAIGN_FAULTS: u64 = 200;
const CAMPAIGN_SEED: u64 = 20_260_101;
/// On two cores, four keep both busy: a case spends half its time on limits and graces.
const CASES_AT_ONCE: u32 = 4;

const SPACE: &str = "format = 1\nname = \"faulty\"\ndescription = \"a gain, and an arm like the default\"\n\
                     [[arm]]\nname = \"winner\"\nenv = { NCCL_MIN_NCHANNELS = \"16\" }\n\
                     [[arm]]\nname = \"arm\"\nenv = { NCCL_PROTO = \"LL\" }\n";

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Expectations {
    fault: Vec<Expectation>,
}

#[derive(Clone, Deserialize)]
#[serde(deny_unknown_fields)]
struct Expectation {
    name: String,
    scenario: toml::Table,
    beside: Option<toml::Table>,
    #[serde(default)]
    targets: Vec<String>,
    expect: OutcomeKind,
    #[serde(default)]
    says: String,
    also: Option<String>,
}

impl Expectation {
    fn targets(&self) -> Vec<&str> {
        if self.targets.is_empty() {
            vec!["arm", "winner", "default"]
        } else {
            self.targets.iter().map(String::as_str).collect()
        }
    }
}

fn expectations() -> Vec<Expectation> {
    let text = fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/it/faults.toml"))
        .expect("the file of expectations");
    toml::from_str::<Expectations>(&text).expect("expectations that can be read").fault
}

/// Which launches a fault hits, as the scenario says it.
fn selector(target: &str) -> Option<toml::Table> {
    let text = match target {
        "arm" => "NCCL_PROTO = \"LL\"",
        "winner" => "NCCL_MIN_NCHANNELS = \"16\"",
        "default" => "NCCL_PROTO = \"\"\nNCCL_MIN_NCHANNELS = \"\"",
        _ => return None,
    };
    Some(toml::from_str(text).expect("a selector"))
}

/// One injected fault.
struct Case {
    expectation: Expectation,
    target: String,
    ranks: u32,
    seed: u64,
}

impl Case {
    fn scenario(&self, machine: &str) -> String {
        let mut fault = self.expectation.scenario.clone();
        if let Some(when) = selector(&self.target) {
            fault.insert("when".to_owned(), when.into());
        }
        let mut faults = vec![toml::Value::Table(fault)];
        faults.extend(self.expectation.beside.clone().map(toml::Value::Table));
        let mut scenario = toml::Table::new();
        scenario.insert("devices".to_owned(), i64::from(self.ranks).into());
        scenario.insert("seed".to_owned(), (self.seed as i64 & i64::from(i32::MAX)).into());
        scenario.insert("machine".to_owned(), machine.into());
        scenario.insert("fault".to_owned(), toml::Value::Array(faults));
        toml::to_string(&scenario).expect("a scenario is TOML")
    }

    fn describe(&self) -> String {
        format!("{} ({} of {} ranks, seed {})", self.expectation.name, self.target, self.ranks, self.seed)
    }

    /// Runs it; what is wrong with what came out.
    fn run(&self, machine: &str) -> Result<(), String> {
        let machine = Machine::new(&self.scenario(machine));
        machine.scene.write("space.toml", SPACE);
        let hangs = self.expectation.expect == OutcomeKind::TimedOut;
        let limit = if hangs { PHASE_LIMIT } else { PATIENT_LIMIT }.as_secs();
        let (status, said) = machine.tune(&format!(
            "--sizes 4K,64K --engine none --space space.toml --no-trial --search-blocks 1 --final-launches 4 \
             --phase-limit {limit}s"
        ));
        let failed = |what: String| format!("{}: {what}\nstatus {status:?}\n{said}", self.describe());
        if let Some(left) = processes_in(&machine.scene.path("")) {
            return Err(failed(format!("processes are left: {left}")));
        }
        if !machine.scene.path("X/run.jsonl").exists() {
            return Err(failed("there is no journal".to_owned()));
        }
        let lines = machine.scene.journal("X");
        let names: BTreeMap<ArmId, String> =
            manifest_in(&machine.scene.path("X")).arms.into_iter().map(|arm| (arm.id, arm.name)).collect();
        self.judge(&lines, &names, status).map_err(failed)
    }

    fn judge(&self, lines: &[JournalLine], names: &BTreeMap<ArmId, String>, status: Option<i32>) -> Result<(), String> {
        nothing_twice(lines)?;
        let name = |arm: &ArmId| names.get(arm).map_or("nobody", String::as_str);
        let mut hit = 0;
        for line in lines {
            let Event::CellFailed { arm, outcome, .. } = &line.event else { continue };
            let meant = self.target == "all" || name(arm) == self.target;
            if self.expectation.expect == OutcomeKind::Measured || !meant {
                return Err(format!("{} is blamed: {:?}", name(arm), outcome));
            }
            if outcome.kind != self.expectation.expect || !outcome.detail.contains(&self.expectation.says) {
                return Err(format!("another outcome: {outcome:?}"));
            }
            hit += 1;
        }
        let measured: BTreeSet<&str> = cells(lines).map(|cell| name(&cell.arm)).collect();
        let expected: i32 = if self.expectation.expect == OutcomeKind::Measured {
            if measured.len() != 3 {
                return Err(format!("only {measured:?} were measured"));
            }
            self.flags(lines, names)?;
            0
        } else if hit == 0 {
            return Err("nothing failed".to_owned());
        } else if self.target == "default" {
            // Without a default nothing can be compared: undecided, or status 4 where nothing was measured.
            if measured.is_empty() { 4 } else { 0 }
        } else {
            for other in ["default", "winner", "arm"] {
                if other != self.target && !measured.contains(other) {
                    return Err(format!("{other} was not measured"));
                }
            }
            0
        };
        for line in lines {
            if let Event::LaunchEnded { duration_s, outcome: Some(outcome), .. } = &line.event
                && outcome.kind == OutcomeKind::TimedOut
            {
                // A launch holds up to two arms, and the work before the hang.
                let most = PHASE_LIMIT + HANG_EXTRA;
                if *duration_s > most.as_secs_f64() + 1.5 {
                    return Err(format!("a hang cost {duration_s} s"));
                }
            }
        }
        if status == Some(expected) { Ok(()) } else { Err(format!("status {status:?}, expected {expected}")) }
    }

    fn flags(&self, lines: &[JournalLine], names: &BTreeMap<ArmId, String>) -> Result<(), String> {
        let wanted = match self.expectation.also.as_deref() {
            Some("flag:ignored") => Flag::Ignored,
            Some("flag:substituted") => Flag::Substituted,
            _ => return Ok(()),
        };
        for cell in cells(lines) {
            let hit = names.get(&cell.arm).is_some_and(|name| *name == self.target);
            if cell.flags.contains(&wanted) != hit {
                return Err(format!("{:?} at {} has {:?}", names.get(&cell.arm), cell.point, cell.flags));
            }
        }
        Ok(())
    }
}

/// A cell is measured once in a block.
fn nothing_twice(lines: &[JournalLine]) -> Result<(), String> {
    let mut seen = BTreeSet::new();
    for cell in cells(lines) {
        if !seen.insert((cell.arm.clone(), cell.point, cell.block)) {
            return Err(format!("{} at {} twice in block {}", cell.arm, cell.point, cell.block));
        }
    }
    Ok(())
}

/// Living processes whose environment names a folder.
pub(crate) fn processes_in(folder: &Path) -> Option<String> {
    let needle = folder.to_string_lossy().trim_end_matches('/').as_bytes().to_vec();
    let mut found = Vec::new();
    for entry in fs::read_dir("/proc").expect("/proc").flatten() {
        let path = entry.path();
        let Ok(environment) = fs::read(path.join("environ")) else { continue };
        if environment.windows(needle.len()).any(|window| window == needle) {
            found.push(path.display().to_string());
        }
    }
    (!found.is_empty()).then(|| found.join(", "))
}

/// Runs several cases at a time, since most of what hangs waits and takes no processor; fails with
/// everything that is wrong.
fn run_all(cases: Vec<Case>, prefix: &str) {
    let queue = Mutex::new(cases.into_iter().enumerate().rev().collect::<Vec<_>>());
    let wrong = Mutex::new(Vec::new());
    std::thread::scope(|scope| {
        for worker in 0..CASES_AT_ONCE {
            let (queue, wrong) = (&queue, &wrong);
            scope.spawn(move || {
                let machine = format!("{prefix}-{worker}");
                loop {
                    let Some((_, case)) = queue.lock().expect("no worker panics").pop() else { return };
                    if let Err(problem) = case.run(&machine) {
                        wrong.lock().expect("no worker panics").push(problem);
                    }
                }
            });
        }
    });
    let wrong = wrong.into_inner().expect("no worker panics");
    assert!(wrong.is_empty(), "{} cases went wrong\n\n{}", wrong.len(), wrong.join("\n\n"));
}

#[test]
fn every_kind_of_fault_has_the_outcome_that_is_expected() {
    let cases: Vec<Case> = expectations()
        .into_iter()
        .enumerate()
        .map(|(index, expectation)| {
            let target = expectation.targets()[0].to_owned();
            Case { expectation, target, ranks: 2, seed: index as u64 }
        })
        .collect();
    assert!(cases.len() >= 20);
    run_all(cases, "faults");
}

/// Two hundred faults, drawn from a seed: every kind, arms that win and arms that lose, the default,
/// and 2 to 8 ranks.
#[test]
#[ignore = "takes four minutes of two cores; .ci/run runs it as a step of its own, after the tests"]
fn two_hundred_faults() {
    let started = Instant::now();
    let expectations = expectations();
    let mut random = Seed(CAMPAIGN_SEED).derive("fault-campaign", "cases");
    let cases: Vec<Case> = (0..CAMPAIGN_FAULTS)
        .map(|index| {
            let expectation = expectations[index as usize % expectations.len()].clone();
            let targets = expectation.targets();
            let target = targets[random.random_range(0..targets.len())].to_owned();
            // Many ranks cost time on few cores: most cases have few.
            let ranks = [2, 2, 2, 2, 3, 4, 8][random.random_range(0..7)];
            Case { expectation, target, ranks, seed: index }
        })
        .collect();
    let hit = |target: &str| cases.iter().filter(|case| case.target == target).count();
    println!(
        "{} faults from seed {CAMPAIGN_SEED}: {} on the winner, {} on another arm, {} on the default, {} on all",
        cases.len(),
        hit("winner"),
        hit("arm"),
        hit("default"),
        hit("all")
    );
    assert!(hit("winner") > 20 && hit("arm") > 20 && hit("default") > 20);
    run_all(cases, "campaign");
    let took = started.elapsed();
    println!("all as expected after {:.0} s", took.as_secs_f64());
}

/// A run that goes on until somebody ends it: every launch of the arm hangs for long.
fn hanging() -> (Machine, Running) {
    let machine = Machine::new(
        "devices = 2\nmachine = \"faults-hanging\"\n[[fault]]\nkind = \"hang\"\nphase = \"collective\"\nat = 1\n",
    );
    machine.scene.write("space.toml", SPACE);
    let running = machine.start("--sizes 4K --engine none --space space.toml --no-trial --phase-limit 60s");
    wait_at_most(Duration::from_secs(30), "a worker hangs", || {
        (workers_of(&machine).len() == 2 && machine.scene.path("fake/state").exists()).then_some(())
    });
    (machine, running)
}

/// Process ids of workers whose environment names the scene.
fn workers_of(machine: &Machine) -> Vec<i32> {
    let folder = machine.scene.path("fake");
    let needle = folder.to_string_lossy().as_bytes().to_vec();
    let mut found = Vec::new();
    for entry in fs::read_dir("/proc").expect("/proc").flatten() {
        let path = entry.path();
        let (Ok(line), Ok(environment)) = (fs::read(path.join("cmdline")), fs::read(path.join("environ"))) else {
            continue;
        };
        let is_worker = line.split(|byte| *byte == 0).any(|word| word == b"__worker");
        if is_worker && environment.windows(needle.len()).any(|window| window == needle) {
            found.extend(path.file_name().and_then(|name| name.to_string_lossy().parse::<i32>().ok()));
        }
    }
    found
}

#[test]
fn no_worker_outlives_a_tool_that_is_killed() {
    let (machine, mut running) = hanging();
    running.signal(Signal::SIGKILL);
    running.wait();
    wait_at_most(Duration::from_secs(10), "the workers are gone", || {
        processes_in(&machine.scene.path("fake")).is_none().then_some(())
    });
}

#[test]
fn a_rank_that_is_stopped_from_outside_is_a_hang() {
    let machine = Machine::new("devices = 2\nmachine = \"faults-stopped\"\n");
    machine.scene.write("space.toml", SPACE);
    let mut running = machine.start("--sizes 64K --engine none --space space.toml --no-trial --phase-limit 2s");
    let worker = wait_at_most(Duration::from_secs(30), "there are workers", || workers_of(&machine).first().copied());
    nix::sys::signal::kill(nix::unistd::Pid::from_raw(worker), Signal::SIGSTOP).unwrap();
    running.wait();
    let lines = machine.scene.journal("X");
    let hung = lines
        .iter()
        .any(|line| matches!(&line.event, Event::CellFailed { outcome, .. } if outcome.kind == OutcomeKind::TimedOut));
    assert!(hung, "no hang in {lines:?}");
    assert_eq!(processes_in(&machine.scene.path("fake")), None);
    // One stopped process costs its launch, not the run.
    assert_eq!(machine.scene.choice("X").verdict, VerdictKind::Adopt);
}

/// The default measures everything and then does not come back from leaving: its failure counts, and is
/// not looked at again in the block that has its cells.
#[test]
fn a_default_that_hangs_while_leaving_keeps_its_cells() {
    let expectation = expectations().into_iter().find(|known| known.name == "leaving hangs").unwrap();
    let case = Case { expectation, target: "default".to_owned(), ranks: 2, seed: 1 };
    if let Err(problem) = case.run("faults-leaving") {
        panic!("{problem}");
    }
}

/// Bits that flip in memory where no scenario put a fault: data checks find them on every arm, and nothing
/// is adopted.
#[test]
fn flipped_bits_are_wrong_results_and_no_answer() {
    let machine = Machine::new("devices = 2\nmachine = \"faults-bits\"\n");
    machine.scene.write("space.toml", SPACE);
    let library = machine.scene.path("flip_bits.so");
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/it/flip_bits.rs");
    let compiler = std::env::var_os("RUSTC").unwrap_or_else(|| "rustc".into());
    let built = Command::new(compiler)
        .args(["--edition", "2024", "--crate-type", "cdylib", "-O", "-o"])
        .args([&library, &source])
        .status()
        .unwrap();
    assert!(built.success());
    let line = "--sizes 256K --engine none --space space.toml --no-trial --search-blocks 1 --keep-env LD_PRELOAD";
    let run = |preloaded: bool| {
        let mut command = machine.tune_command(line);
        if preloaded {
            command.env("LD_PRELOAD", &library);
        }
        command.output().unwrap()
    };
    let ended = run(true);
    let said = String::from_utf8_lossy(&ended.stderr).into_owned();
    assert_eq!(ended.status.code(), Some(4), "{said}");
    let lines = machine.scene.journal("X");
    assert_eq!(cells(&lines).count(), 0, "{said}");
    let outcomes: Vec<OutcomeKind> = lines
        .iter()
        .filter_map(|line| match &line.event {
            Event::CellFailed { outcome, .. } => Some(outcome.kind),
            _ => None,
        })
        .collect();
    assert!(!outcomes.is_empty() && outcomes.iter().all(|kind| *kind == OutcomeKind::WrongResult), "{outcomes:?}");
    // The same without it is measured: nothing else is wrong.
    fs::remove_dir_all(machine.scene.path("X")).unwrap();
    let ended = run(false);
    assert_eq!(ended.status.code(), Some(0), "{}", String::from_utf8_lossy(&ended.stderr));
}

/// A short run with a scenario and a space: its status and what it said.
fn ended(scenario: &str, space: &str, more: &str) -> (Machine, Option<i32>, String) {
    let machine = Machine::new(scenario);
    machine.scene.write("space.toml", space);
    let (status, said) = short_run(&machine, more);
    (machine, status, said)
}

fn short_run(machine: &Machine, more: &str) -> (Option<i32>, String) {
    machine.tune(&format!(
        "--sizes 64K --engine none --space space.toml --no-trial --search-blocks 1 --final-launches 4 {more}"
    ))
}

#[test]
fn a_gpu_that_stays_busy_ends_the_run_and_keeps_everything() {
    let (machine, status, said) = ended(
        "devices = 2\nmachine = \"faults-wedged\"\n\
         [[fault]]\nkind = \"die\"\nphase = \"collective\"\nrank = 1\nwhen = { NCCL_PROTO = \"LL\" }\n\
         [[fault]]\nkind = \"busy-after-kill\"\nmebibytes = 4096\n",
        SPACE,
        "",
    );
    assert_eq!(status, Some(3), "{said}");
    assert!(said.contains("still holds 4096 MiB more than before"), "{said}");
    assert!(said.contains("which this tool never does"), "{said}");
    let lines = journal_in(&machine.scene.path("X"));
    assert!(lines.iter().any(|line| {
        matches!(&line.event, Event::CellFailed { outcome, .. } if outcome.kind == OutcomeKind::Crashed)
    }));
    assert_eq!(processes_in(&machine.scene.path("fake")), None);
}

/// What the field knows to help is tried, helps, and is in the files with its reason.
#[test]
fn a_repair_from_the_field_is_tried_once_and_carried_into_the_file() {
    let (machine, status, said) = ended(
        "devices = 2\nmachine = \"faults-repair\"\n\
         [[fault]]\nkind = \"error\"\ncall = \"ncclCommInitRank\"\ncode = 1\n\
         text = \"Cuda failure 217 'peer access is not supported between these two devices'\"\n\
         when = { NCCL_CUMEM_HOST_ENABLE = \"\" }\n",
        SPACE,
        "",
    );
    assert_eq!(status, Some(0), "{said}");
    let choice: Choice = machine.scene.choice("X");
    assert_eq!(choice.repairs.len(), 1, "{said}");
    assert_eq!(choice.env.get("NCCL_CUMEM_HOST_ENABLE").map(String::as_str), Some("0"));
    assert_eq!(choice.env.get("NCCL_MIN_NCHANNELS").map(String::as_str), Some("16"));
    let file = machine.scene.read("X/tuned.env");
    assert!(file.lines().any(|line| line == "NCCL_CUMEM_HOST_ENABLE=0"), "{file}");
    assert!(file.contains("# repair: NCCL_CUMEM_HOST_ENABLE=0") && file.contains("Cuda failure 217"), "{file}");
    nothing_twice(&machine.scene.journal("X")).unwrap();
    let tried =
        machine.scene.journal("X").iter().filter(|line| matches!(line.event, Event::RepairTried { .. })).count();
    assert_eq!(tried, 1);
}

#[test]
fn a_repair_that_does_not_help_leaves_the_machine_at_fault() {
    let (machine, status, said) = ended(
        "devices = 2\nmachine = \"faults-no-repair\"\n\
         [[fault]]\nkind = \"error\"\ncall = \"ncclCommInitRank\"\ncode = 1\n\
         text = \"Cuda failure 217 'peer access is not supported between these two devices'\"\n",
        SPACE,
        "",
    );
    assert_eq!(status, Some(4), "{said}");
    assert!(said.contains("Cuda failure 217"), "{said}");
    assert_eq!(cells(&machine.scene.journal("X")).count(), 0);
}

/// A path on which one arm hung twice is not tried with other settings.
#[test]
fn a_path_that_hangs_condemns_every_arm_that_needs_it() {
    const PATHS: &str = "format = 1\nname = \"paths\"\ndescription = \"arms on a path that hangs\"\n\
                         [[arm]]\nname = \"path\"\nenv = { NCCL_P2P_LEVEL = \"SYS\" }\n\
                         [[arm]]\nname = \"path-and-channels\"\nenv = { NCCL_P2P_LEVEL = \"SYS\", NCCL_MIN_NCHANNELS = \"16\" }\n\
                         [[arm]]\nname = \"path-and-protocol\"\nenv = { NCCL_P2P_LEVEL = \"SYS\", NCCL_PROTO = \"LL\" }\n\
                         [[arm]]\nname = \"channels\"\nenv = { NCCL_MIN_NCHANNELS = \"16\" }\n";
    let (machine, status, said) = ended(
        "devices = 2\nmachine = \"faults-path\"\n\
         [[fault]]\nkind = \"hang\"\nphase = \"collective\"\nat = 1\nwhen = { NCCL_P2P_LEVEL = \"SYS\" }\n",
        PATHS,
        "--allow-risk hang-prone --phase-limit 2s",
    );
    assert_eq!(status, Some(0), "{said}");
    let names: BTreeMap<ArmId, String> =
        manifest_in(&machine.scene.path("X")).arms.into_iter().map(|arm| (arm.id, arm.name)).collect();
    let mut hangs = 0;
    let mut condemned = BTreeSet::new();
    let lines = machine.scene.journal("X");
    for line in &lines {
        let Event::CellFailed { arm, outcome, .. } = &line.event else { continue };
        match outcome.kind {
            OutcomeKind::TimedOut => hangs += 1,
            OutcomeKind::Rejected => {
                assert!(outcome.detail.contains("NCCL_P2P_LEVEL=SYS"), "{outcome:?}");
                condemned.insert(names[arm].as_str());
            }
            _ => panic!("{outcome:?}"),
        }
    }
    assert_eq!((hangs, condemned.len()), (2, 2), "one arm hangs and is confirmed, the other two are left alone");
    // What may hang comes last: the others were measured before.
    let first_hang = lines.iter().position(|line| matches!(line.event, Event::CellFailed { .. })).unwrap();
    let before: BTreeSet<&str> = cells(&lines[..first_hang]).map(|cell| names[&cell.arm].as_str()).collect();
    assert_eq!(before, BTreeSet::from(["default", "channels"]));
    assert_eq!(machine.scene.choice("X").winner.as_deref(), Some("channels"));
}

/// Memory is measured, multiplied, shown and limited.
#[test]
fn an_answer_that_takes_too_much_memory_is_no_answer() {
    let scenario = "devices = 2\nmachine = \"faults-memory\"\n";
    let (machine, status, said) = ended(scenario, SPACE, "");
    assert_eq!(status, Some(0), "{said}");
    let choice = machine.scene.choice("X");
    let taken = choice.memory.device_mib_per_rank.unwrap();
    assert!(choice.memory.device_measured && taken > 0.0, "{:?}", choice.memory);
    assert!(said.contains("device memory per rank (measured)"), "{said}");

    let (machine, status, said) =
        ended(scenario, SPACE, &format!("--max-extra-memory {}", (taken / 2.0) as u64 * 1_048_576));
    assert_eq!(status, Some(0), "{said}");
    let choice = machine.scene.choice("X");
    assert!(!choice.env.contains_key("NCCL_MIN_NCHANNELS"), "{said}");
    assert!(
        choice.vetoed.iter().any(|veto| veto.reason.contains("more device memory per rank")),
        "{:?}",
        choice.vetoed
    );
}

/// What hung in one run is left out of the next, is listed by whoever asks, and is tried again on demand.
#[test]
fn what_hung_is_remembered_across_runs() {
    let (machine, status, said) = ended(
        "devices = 2\nmachine = \"faults-remembered\"\n\
         [[fault]]\nkind = \"hang\"\nphase = \"collective\"\nat = 1\nwhen = { NCCL_PROTO = \"LL\" }\n",
        SPACE,
        "--phase-limit 2s",
    );
    assert_eq!(status, Some(0), "{said}");
    let again = |more: &str| -> (Choice, usize, String) {
        fs::remove_dir_all(machine.scene.path("X")).unwrap();
        let (status, said) = short_run(&machine, &format!("--phase-limit 2s {more}"));
        assert_eq!(status, Some(0), "{said}");
        let lines = machine.scene.journal("X");
        let hangs = lines.iter().filter(|line| matches!(line.event, Event::CellFailed { .. })).count();
        (machine.scene.choice("X"), hangs, said)
    };
    let (choice, hangs, said) = again("");
    assert_eq!(hangs, 0, "{said}");
    assert_eq!(choice.quarantined.len(), 1, "{said}");
    assert_eq!(choice.quarantined[0].name, "arm");
    assert!(said.contains("--retry-quarantined"), "{said}");
    let (choice, hangs, said) = again("--retry-quarantined");
    assert_eq!((choice.quarantined.len(), hangs), (0, 2), "{said}");
}
