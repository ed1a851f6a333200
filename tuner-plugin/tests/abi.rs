//! The plugin as NCCL sees it: a C program with its own declarations loads the shared library and asks it.
#![expect(clippy::disallowed_methods, clippy::unwrap_used, reason = "tests compile and start a program")]

use std::path::{Path, PathBuf};
use std::process::{Command, Output};

const TABLE: &str = "# collective,min,max,algorithm,protocol,channels,nodes,ranks\n\
    allreduce,0,262143,ring,ll,16,1,8\n\
    allreduce,262144,9223372036854775807,tree,simple,32,1,8\n\
    allgather,0,4096,ring,simple,8,1,4\n";

fn plugin() -> PathBuf {
    let deps = std::env::current_exe().unwrap().parent().unwrap().to_owned();
    let path = deps.join("libnccltune_tuner.so");
    assert!(path.is_file(), "{} is missing: the library was not built beside its tests", path.display());
    path
}

/// Compiles and starts the C program on a table. Whoever builds Rust has a C compiler: it links.
fn run(folder: &Path, table: &Path) -> Output {
    let program = folder.join("abi");
    let compiled = Command::new("cc")
        .args(["-std=c11", "-Wall", "-Wextra", "-Werror", "-D_GNU_SOURCE", "-o"])
        .arg(&program)
        .arg(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/abi.c"))
        .arg("-ldl")
        .output()
        .unwrap();
    assert!(compiled.status.success(), "{}", String::from_utf8_lossy(&compiled.stderr));
    Command::new(program).arg(plugin()).env("NCCL_TUNER_CONFIG_FILE", table).output().unwrap()
}

fn said(output: &Output) -> String {
    String::from_utf8_lossy(&output.stdout).into_owned()
}

#[test]
fn every_version_of_the_interface_answers_a_c_program() {
    let folder = tempfile::tempdir().unwrap();
    let table = folder.path().join("table.csv");
    std::fs::write(&table, TABLE).unwrap();
    let output = run(folder.path(), &table);
    assert!(output.status.success(), "{}", said(&output));
    // doubles: 21 + 63 + 5 x 12, as in the headers of v5.
    assert!(said(&output).contains("constants 1152 bytes, all versions agree"), "{}", said(&output));
}

#[test]
fn a_bad_table_ends_init_with_file_line_and_reason() {
    let folder = tempfile::tempdir().unwrap();
    let table = folder.path().join("ta%sble.csv");
    std::fs::write(&table, "allreduce,0,1,ring,ll,1,1,8\nallreduce,5,2,ring,ll,1,1,8\n").unwrap();
    let output = run(folder.path(), &table);
    assert_eq!(output.status.code(), Some(2), "{}", said(&output));
    // The sign of a format in a path is no format.
    for part in ["log 2 0x41 TUNER/nccltune: ", "ta%sble.csv: line 2: the range of sizes is reversed: 5 to 2"] {
        assert!(said(&output).contains(part), "{}", said(&output));
    }
    let changed = folder.path().join("tuner-table-0123456789abcdef.csv");
    std::fs::write(&changed, TABLE).unwrap();
    let output = run(folder.path(), &changed);
    assert!(output.status.code() == Some(2) && said(&output).contains("was changed after it was named"));
    let output = run(folder.path(), &folder.path().join("missing.csv"));
    assert!(output.status.code() == Some(2) && said(&output).contains("missing.csv: No such file"));
}
