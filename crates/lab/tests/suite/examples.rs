//! The examples in other languages: they start the mock and list a delta.

use std::path::PathBuf;
use std::process::Command;

fn example(name: &str) -> PathBuf {
    [env!("CARGO_MANIFEST_DIR"), "examples", name].iter().collect()
}

/// Runs a program of another language; what is missing is said, and under `CI=true` it is an error.
fn there(mut probe: Command, what: &str) -> bool {
    let there = probe.output().is_ok_and(|output| output.status.success());
    if !there {
        eprintln!("not run: {what} is not here");
        assert_ne!(std::env::var("CI").as_deref(), Ok("true"), "{what} is not here");
    }
    there
}

fn passes(mut command: Command) {
    let output = command.env("CBT_LAB", env!("CARGO_BIN_EXE_cbt-lab")).output().expect("run");
    let told =
        format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{told}");
}

#[test]
fn the_example_in_go_lists_a_delta() {
    let mut probe = Command::new("go");
    probe.args(["list", "-test", "./..."]).current_dir(example("go"));
    if there(probe, "Go with the modules of crates/lab/examples/go (`go mod download`)") {
        let mut test = Command::new("go");
        test.args(["test", "-count=1", "./..."]).current_dir(example("go"));
        passes(test);
    }
}

#[test]
fn the_example_in_python_lists_a_delta() {
    let python = concat!(env!("CARGO_MANIFEST_DIR"), "/../../.deps/python/bin/python3");
    let mut probe = Command::new(python);
    probe.args(["-c", "import grpc, grpc_tools"]);
    if there(probe, "Python with gRPC, which `make test-deps` installs in .deps/python,") {
        let mut test = Command::new(python);
        test.arg("test_delta.py").current_dir(example("python")).env("PYTHONDONTWRITEBYTECODE", "1");
        test.env("CSI_PROTO_DIR", concat!(env!("CARGO_MANIFEST_DIR"), "/../proto/proto"));
        passes(test);
    }
}
