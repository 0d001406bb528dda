//! The examples in other languages: they start the mock and list a delta.

use std::path::{Path, PathBuf};
use std::process::Command;

fn example(name: &str) -> PathBuf {
    [env!("CARGO_MANIFEST_DIR"), "examples", name].iter().collect()
}

fn passes(mut command: Command) {
    let output = command.env("CBT_LAB", env!("CARGO_BIN_EXE_cbt-lab")).output().expect("run");
    let told =
        format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{told}");
}

#[test]
fn the_example_in_go_lists_a_delta() {
    crate::needs("Go");
    let mut test = Command::new("go");
    test.args(["test", "-count=1", "./..."]).current_dir(example("go"));
    passes(test);
}

#[test]
fn the_example_in_python_lists_a_delta() {
    crate::needs("Python with gRPC");
    let python = concat!(env!("CARGO_MANIFEST_DIR"), "/../../.deps/python/bin/python3");
    assert!(Path::new(python).exists(), "needs Python with gRPC: run `make test-deps`");
    let mut test = Command::new(python);
    test.arg("test_delta.py").current_dir(example("python")).env("PYTHONDONTWRITEBYTECODE", "1");
    test.env("CSI_PROTO_DIR", concat!(env!("CARGO_MANIFEST_DIR"), "/../../proto"));
    passes(test);
}
