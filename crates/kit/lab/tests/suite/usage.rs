//! What the program says when it cannot run: on standard error, with exit code 2.

use std::process::Command;

/// The conformance suite with these arguments, of a driver that nobody answers for, and a part of what it says.
fn conformance_cannot_run(cases: &[(&[&str], &str)]) {
    let dir = tempfile::tempdir().expect("temp dir");
    let nobody = format!("unix://{}", dir.path().join("none.sock").display());
    for (arguments, part) in cases {
        let mut command = Command::new(env!("CARGO_BIN_EXE_cbt-lab"));
        command.args(["conformance", "--endpoint", &nobody]).args(*arguments).env_remove("CSI_ENDPOINT");
        let output = command.output().expect("run");
        let told = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{arguments:?}: {told}");
        assert!(output.stdout.is_empty(), "{arguments:?}");
        assert!(told.contains(part) && !told.contains("hunter2"), "{arguments:?}: {told}");
    }
}

#[test]
fn what_cannot_run_says_so_and_exits_with_2() {
    conformance_cannot_run(&[
        (&["--focus", "no-such-case"], "--list"),
        (&["--focus", "("], "regex"),
        (&["--volume-size", "1Mi"], "64Mi"),
        (&["--parameter", "lonely"], "key=value"),
        (&["--timeout", "0"], "--timeout"),
    ]);
}

/// These are looked at after the check for root.
#[test_with::root]
#[test]
fn what_cannot_run_as_root_says_so_and_exits_with_2() {
    let dir = tempfile::tempdir().expect("temp dir");
    let secrets = dir.path().join("secrets.yaml");
    std::fs::write(&secrets, "hunter2").expect("write");
    let deep = dir.path().join("aa/bb");
    let deep = deep.to_str().expect("UTF-8");
    conformance_cannot_run(&[
        (&["--staging-dir", deep], "--staging-dir"),
        (&["--target-dir", deep], "--target-dir"),
        (&["--secrets", "/no/such/file"], "/no/such/file"),
        (&["--secrets", secrets.to_str().expect("UTF-8")], "not a secrets file"),
        (&[], "no answer at"),
    ]);
}

/// The addresses and files that are not there are in `tests/suite/commands.rs`.
#[test]
fn what_is_wrong_in_itself_says_so_and_exits_with_2() {
    let dir = tempfile::tempdir().expect("temp dir");
    let at = |name: &str| format!("unix://{}", dir.path().join(name).display());
    let (listen, upstream) = (at("front.sock"), at("csi.sock"));
    let faults = ["faults", "--listen", &listen, "--upstream", &upstream];
    let mock = ["mock", "--listen", &listen];
    for (arguments, part) in [
        (&[&faults[..], &["--fault", "cutt"]].concat()[..], "there is cut"),
        (&[&faults[..], &["--fault", "cut:ms=1"]].concat(), "it takes after"),
        (&[&faults[..], &["--fault", "tls-expired"]].concat(), "https://"),
        (&[&faults[..], &["--fault", "cut:call=GetMetadatDelta"]].concat(), ", GetMetadataDelta, "),
        (&[&faults[..], &["--fault", ""]].concat(), "it is empty"),
        (&[&faults[..], &["--fault", "# none"]].concat(), "names no fault"),
        (&[&faults[..], &["--control", "nowhere"]].concat(), "--control"),
        (&["faults", "--listen", "csi.sock", "--upstream", &upstream], "unix:///path"),
        (&["faults", "--listen", &listen], "--upstream"),
        (&["faults", "--listen", &listen, "--upstream", &listen], "both"),
        (&["faults", "--listen", "https://127.0.0.1:0", "--upstream", &upstream], "--ca-file"),
        (&["faults", "--listen", &listen, "--upstream", "https://127.0.0.1:1"], "--upstream-ca"),
        (&[&mock[..], &["--volume", "disk"]].concat(), "NAME=SIZE"),
        (&[&mock[..], &["--block-size", "3000"]].concat(), "power of two"),
        (&[&mock[..], &["--fault", "cut:call=Getmetadatadelta"]].concat(), ", GetMetadataDelta, "),
        (&[&mock[..], &["--changes", "-1"]].concat(), "-1 is not in 0..=18446744073709551615"),
    ] {
        let mut command = Command::new(env!("CARGO_BIN_EXE_cbt-lab"));
        let output = command.args(arguments).output().expect("run");
        let told = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{arguments:?}: {told}");
        assert!(output.stdout.is_empty() && told.contains(part), "{arguments:?}: {told}");
    }
    assert!(!dir.path().join("front.sock").exists(), "a socket is left");
}
