//! The parts of `examples/launch_speed`: its grid on the stand-in for NCCL, nccl-tests played by a script, and its figures
//! on numbers that are known. What it prints on GPUs is no test's business.

use std::collections::BTreeMap;
use std::os::unix::fs::PermissionsExt as _;

use fs_err as fs;
use nccltune::collective::{DataType, Placement};

use crate::fakes::Machine;

#[path = "../../examples/launch_speed/figures.rs"]
mod figures;
#[path = "../../examples/nccl_tests/perf.rs"]
mod perf;

use figures::{Cell, Figures, Ran, Run, logged, ours_command, ours_in, settings, space, theirs_of};
use perf::{Perf, links, type_name};

fn ran(channels: u32) -> Ran {
    Ran { algo: "ring".to_owned(), proto: "ll".to_owned(), channels }
}

#[test]
fn one_launch_holds_the_whole_grid() {
    let machine = Machine::new("devices = 2\nmachine = \"speed\"\nnoise = 0.004\n");
    machine.scene.write("space.toml", space());
    let out = machine.scene.path("run");
    let mut command = machine.command(&[]);
    ours_command(&mut command, 2, &machine.scene.path("space.toml"), &out);
    command.arg("--nccl-lib").arg(machine.library("libnccl.so.2"));
    let output = command.output().expect("the program starts");
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    let run = ours_in(&out).unwrap_or_else(|error| panic!("{error}: {said}"));
    assert_eq!((settings().len(), run.cells.len()), (28, 28 * 11));
    assert!(run.seconds > 0.0 && run.cells.iter().all(|cell| cell.us > 0.0 && cell.ran.is_some()));
    let of = |arm: &str, bytes: u64| {
        let cell = run.cells.iter().find(|cell| cell.arm == arm && cell.bytes == bytes).expect(arm);
        cell.ran.clone().expect("what ran").channels
    };
    // As the variables would have it: four by itself, and no more than are of use.
    assert_eq!([of("Ring LL", 1 << 20), of("Ring LL 2", 1 << 20), of("Ring LL 32", 1 << 20)], [4, 2, 32]);
    assert_eq!(of("Ring LL 32", 4096), 1);
    // It is an error to take what is not that for a launch.
    assert!(ours_in(&machine.scene.path("nothing")).is_err());
}

#[test]
fn a_run_of_nccl_tests_is_read_with_what_ran() {
    let machine = Machine::new("");
    let program = machine.scene.path("all_reduce_perf");
    machine.scene.write(
        "all_reduce_perf",
        "#!/bin/sh\n[ \"$NCCL_PROTO\" = LL ] && [ \"$1$2\" = -g2 ] || exit 3\n\
         echo 'x:1:1 [0] NCCL INFO AllReduce: 4096 Bytes -> Algo RING proto LL channel{Lo..Hi}={0..1}' > \"$NCCL_DEBUG_FILE\"\n\
         cat <<'END'\n\
         #       size         count      type   redop    root     time   algbw   busbw #wrong     time   algbw   busbw #wrong\n\
         4096          2048  bfloat16     sum      -1     9.21    0.44    0.44      0     9.50    0.43    0.43      0\n\
         8192          4096  bfloat16     sum      -1     9.31    0.88    0.88      0     9.60    0.85    0.85      0\n\
         END\n",
    );
    fs::set_permissions(&program, std::fs::Permissions::from_mode(0o755)).unwrap();
    fs::create_dir(machine.scene.path("scratch")).unwrap();
    let library = std::path::PathBuf::from(machine.library("libnccl.so.2"));
    let links = links(&machine.scene.path("scratch"), &library).unwrap();
    let perf = Perf {
        program: &program,
        ranks: 2,
        single_process: true,
        links: &links,
        dtype: DataType::Bf16,
        slowest: true,
        operations: 64,
        replays: 20,
    };
    let setting = settings().into_iter().find(|setting| setting.name == "Ring LL 2").expect("an arm");
    let log = machine.scene.path("0.log");
    let mut variables = setting.variables.clone();
    variables.extend(logged(&log));
    let text = perf.run(&variables, &machine.scene.path("kept.txt")).unwrap();
    assert_eq!(fs::read_to_string(machine.scene.path("kept.txt")).unwrap(), text);
    let times = perf.times(&text, Placement::InPlace).unwrap();
    assert_eq!(times, BTreeMap::from([(4096, 9.5), (8192, 9.6)]));
    let cells = theirs_of(&setting, &times, &fs::read_to_string(&log).unwrap());
    let cell = |bytes, us, ran| Cell { arm: "Ring LL 2".to_owned(), bytes, ran, us };
    assert_eq!(cells, [cell(4096, 9.5, Some(ran(2))), cell(8192, 9.6, None)]);
    // Wrong data, and a program that gives up, are no times.
    let wrong = text.replace("0.43      0", "0.43      7");
    assert!(perf.times(&wrong, Placement::InPlace).is_err() && perf.times(&wrong, Placement::OutOfPlace).is_ok());
    assert!(perf.run(&[], &machine.scene.path("kept.txt")).is_err());
    assert_eq!(type_name(DataType::Fp16), "half");
}

#[test]
fn the_figures_are_those_of_the_numbers() {
    let cell = |arm: &str, channels, us| Cell { arm: arm.to_owned(), bytes: 4096, ran: Some(ran(channels)), us };
    // Two arms ran the same; the other side ran one tuple that ours did not.
    let ours = |seconds, factor: f64| Run {
        seconds,
        cells: vec![cell("a", 1, 10.0 * factor), cell("b", 1, 12.0 * factor), cell("c", 2, 20.0 * factor)],
    };
    let theirs = |seconds, factor: f64| Run {
        seconds,
        cells: vec![cell("a", 1, 10.0 * factor), cell("b", 4, 30.0 * factor), cell("c", 2, 20.0 * factor)],
    };
    let spread = |factor: f64| [1.0, factor, 1.0, factor];
    let mine: Vec<Run> = [4.0, 4.0, 4.0, 4.0].into_iter().zip(spread(1.02)).map(|(s, f)| ours(s, f)).collect();
    let others: Vec<Run> = [80.0, 81.0, 80.0, 79.0].into_iter().zip(spread(1.01)).map(|(s, f)| theirs(s, f)).collect();
    // An arm that was measured once in a while weighs no more for that.
    let mut once = mine.clone();
    once[0].cells.remove(1);
    let ours_us = |figures: Figures| figures.tuples[0].2;
    assert!((ours_us(Figures::of(&once, &others).expect("figures")) - (10.0 + 11.0 * 3.04) / 4.0).abs() < 1e-9);
    let figures = Figures::of(&mine, &others).expect("figures");
    assert!((figures.speed.ratio - 20.0).abs() < 0.2 && figures.speed.low < 20.0 && figures.speed.high > 20.0);
    assert_eq!((figures.tuples.len(), figures.unmatched), (2, 1));
    // 11 against 10, and 20 against 20, each by the means of 1.01 and 1.005.
    let each = [1.1 * 1.01 / 1.005 - 1.0, 1.01 / 1.005 - 1.0];
    assert!((figures.bias - f64::midpoint(each[0], each[1])).abs() < 1e-9, "{}", figures.bias);
    assert!((figures.median_difference - f64::midpoint(each[0], each[1])).abs() < 1e-9);
    assert!((figures.deviation_ratio() - 1.02_f64.ln() / 1.01_f64.ln()).abs() < 1e-6, "{}", figures.deviation_ratio());
    assert!(Figures::of(&mine[..1], &others[..1]).is_none(), "one run tells no deviation");
}
