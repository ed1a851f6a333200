//! Settings written by hand, looked at by the program: statuses, files that cannot be read, and files that the
//! program itself wrote, which are never found fault with.

use std::os::unix::fs::symlink;

use fs_err as fs;
use nccltune::emit::EmitAs;
use nccltune::record::{LintReport, LintSeverity};

use crate::command::{Ended, Scene};

fn report(ended: &Ended) -> LintReport {
    serde_json::from_str(&ended.stdout).unwrap_or_else(|error| panic!("{error}: {}\n{}", ended.stdout, ended.stderr))
}

#[test]
fn the_status_says_whether_anything_is_wrong() {
    let scene = Scene::new();
    scene.write("clean.env", "NCCL_MIN_NCHANNELS=16\n");
    scene.write("warned.env", "NCCL_P2P_LEVEL=SYS\n");
    scene.write("wrong.env", "NCCL_NTHREADS=\"256\"\n");
    for (words, status) in [
        ("clean.env", 0),
        ("--strict clean.env", 0),
        ("warned.env", 0),
        ("--strict warned.env", 2),
        ("wrong.env", 2),
        ("clean.env wrong.env", 2),
        ("wrong.env clean.env", 2),
        // A kind that is not known, and no file at all, are wrong usage.
        ("--as dockerfile clean.env", 2),
        ("", 2),
    ] {
        let ended = scene.run(&format!("lint {words}"));
        assert_eq!(ended.status, Some(status), "{words}: {}{}", ended.stdout, ended.stderr);
    }
    let clean = scene.run("lint clean.env").ok();
    assert_eq!(clean.stdout, "Nothing to find fault with\n");
    let wrong = scene.run("lint wrong.env");
    assert!(wrong.stdout.starts_with("wrong.env:1: error: NCCL_NTHREADS: "), "{}", wrong.stdout);
    assert_eq!(wrong.stderr, "");
    // Standard input is a file like any other.
    let piped = scene.shell("printf 'export NCCL_ALGO=rings\\n' | \"$0\" lint -");
    assert_eq!(piped.status, Some(2));
    assert!(piped.stdout.starts_with("-:1: error: NCCL_ALGO: "), "{}", piped.stdout);
}

#[test]
fn a_file_that_cannot_be_read_is_an_error_and_the_rest_is_looked_at() {
    let scene = Scene::new();
    scene.write("first.env", "NCCL_NTHREADS=100\n");
    scene.write("binary.env", b"NCCL_ALGO=Ring\n\0\x01\x02");
    scene.write("latin.env", b"NCCL_ALGO=Ring\n# gr\xfc\xdfe\n");
    scene.write("folder/inside.env", "NCCL_ALGO=Ring\n");
    // 100 MB that take no room on the disk.
    fs::File::create(scene.path("huge.env")).and_then(|file| file.file().set_len(100_000_000)).unwrap();
    scene.write("text.env", "# a comment\n".repeat(200_000));
    symlink("loop.env", scene.path("loop.env")).unwrap();
    symlink("gone.env", scene.path("vanished.env")).unwrap();
    nix::unistd::mkfifo(&scene.path("pipe.env"), nix::sys::stat::Mode::S_IRWXU).unwrap();
    scene.write("last.env", "NCCL_NTHREADS=100\n");
    let ended = scene.run(
        "lint --format json first.env binary.env latin.env huge.env text.env loop.env vanished.env folder pipe.env \
         none.env last.env",
    );
    assert_eq!(ended.status, Some(2), "{}", ended.stderr);
    let report = report(&ended);
    let told: Vec<(&str, usize)> = report.findings.iter().map(|one| (one.file.as_str(), one.line)).collect();
    let expected = [
        ("first.env", 1),
        ("binary.env", 0),
        ("latin.env", 0),
        ("huge.env", 0),
        ("text.env", 0),
        ("loop.env", 0),
        ("vanished.env", 0),
        ("folder", 0),
        ("pipe.env", 0),
        ("none.env", 0),
        ("last.env", 1),
    ];
    assert_eq!(told, expected, "{report:#?}");
    assert!(report.findings.iter().all(|finding| finding.severity == LintSeverity::Error));
    for (file, says) in [
        ("binary.env", "is no text"),
        ("latin.env", "is no text"),
        ("huge.env", "has more than"),
        ("text.env", "has more than"),
        ("loop.env", "cannot be read"),
        ("vanished.env", "cannot be read"),
        ("folder", "is no regular file"),
        ("pipe.env", "is no regular file"),
    ] {
        let finding = report.findings.iter().find(|finding| finding.file == file).unwrap();
        assert!(finding.message.contains(says), "{finding:?}");
    }
}

#[test]
fn nothing_of_a_file_steers_a_terminal() {
    let scene = Scene::new();
    scene.write("a\u{1b}[2J.env", "NCCL_ALGO=\u{1b}]0;x\u{7}Ring\nNCCL_\u{202e}X=1\n");
    for format in ["text", "markdown"] {
        let ended = scene.run_words(&["lint", "--format", format, "a\u{1b}[2J.env"]);
        assert_eq!(ended.status, Some(2), "{}", ended.stderr);
        let steers = |character: char| character.is_control() && character != '\n' || character == '\u{202e}';
        assert!(!ended.stdout.contains(steers), "{:?}", ended.stdout);
    }
}

/// Every form of every recorded answer, saved under the name it is meant for, and read from a pipe.
#[test]
fn what_emit_writes_is_never_found_fault_with() {
    let scene = Scene::new();
    let mut looked_at = 0;
    for entry in fs::read_dir(concat!(env!("CARGO_MANIFEST_DIR"), "/results/recorded")).unwrap() {
        let run = entry.unwrap().path();
        if !run.is_dir() {
            continue;
        }
        // None of these runs has a table.
        for form in EmitAs::ALL.into_iter().filter(|form| *form != EmitAs::TunerTable) {
            let run = run.display().to_string();
            let emitted = scene.run_words(&["emit", "--run", &run, "--as", form.name()]).ok();
            scene.write(form.file_name(), &emitted.stdout);
            scene.write("piped", &emitted.stdout);
            for way in
                [format!("\"$0\" lint --strict {}", form.file_name()), "\"$0\" lint --strict - < piped".to_owned()]
            {
                let ended = scene.shell(&way);
                assert_eq!(ended.status, Some(0), "{run}, {way}:\n{}{}", ended.stdout, emitted.stdout);
                assert_eq!(ended.stdout, "Nothing to find fault with\n");
            }
            looked_at += 1;
        }
    }
    assert!(looked_at >= 25, "{looked_at}");
}
