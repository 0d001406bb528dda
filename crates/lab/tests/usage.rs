//! What the program says when it cannot run: on standard error, with exit code 2. What it finds in drivers is tested
//! beside the driver.
#![allow(clippy::disallowed_methods)]

use std::process::Command;

#[test]
fn what_cannot_run_says_so_and_exits_with_2() {
    let dir = tempfile::tempdir().expect("temp dir");
    let nobody = format!("unix://{}", dir.path().join("none.sock").display());
    let secrets = dir.path().join("secrets.yaml");
    std::fs::write(&secrets, "hunter2").expect("write");
    for (arguments, part) in [
        (&["--focus", "no-such-case"][..], "--list"),
        (&["--focus", "("], "regex"),
        (&["--volume-size", "1Mi"], "64Mi"),
        (&["--parameter", "lonely"], "key=value"),
        (&["--timeout", "0"], "--timeout"),
        (&["--secrets", "/no/such/file"], "/no/such/file"),
        (&["--secrets", secrets.to_str().expect("UTF-8")], "no secrets file"),
        (&[], "nobody answers"),
    ] {
        // The rest is looked at after the check for root.
        if !nix::unistd::geteuid().is_root() && !part.starts_with("--") {
            continue;
        }
        let mut command = Command::new(env!("CARGO_BIN_EXE_cbt-lab"));
        command.args(["conformance", "--endpoint", &nobody]).args(arguments).env_remove("CSI_ENDPOINT");
        let output = command.output().expect("run");
        let told = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{arguments:?}: {told}");
        assert!(output.stdout.is_empty(), "{arguments:?}");
        assert!(told.contains(part) && !told.contains("hunter2"), "{arguments:?}: {told}");
    }
}
