//! `cbt-lab bench` without a driver: results side by side, and what it says of wrong usage.

use std::path::Path;
use std::process::Output;

use serde_json::{Value, json};
use tempfile::TempDir;
use tokio::process::Command;

async fn bench(arguments: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_cbt-lab"));
    command.arg("bench").args(arguments).env_remove("CSI_ENDPOINT").output().await.expect("run")
}

/// A result as an earlier run wrote it.
fn result(driver: &str, median: f64) -> Value {
    let measured = json!({"median": median, "min": median / 2.0, "max": median * 2.0, "samples": [median]});
    let figure = |id: &str, measured: Value, missing: Value| {
        json!({"id": id, "what": id, "unit": "milliseconds", "size": 1_u64 << 30, "snapshots": null,
            "measured": measured, "bare": null, "missing": missing})
    };
    json!({
        "lab": "0.1.0", "driver": driver, "version": "1", "verdict": "right", "troubles": [], "left_behind": [],
        "conditions": {"when": "2026-01-01T00:00Z", "cpus": 2, "kernel": "6", "load": [0.0, 0.0], "runs": 1,
            "data": 1_048_576, "parameters": [], "seconds": 1.0},
        "figures": [
            figure("restore", measured, Value::Null),
            figure("clone", Value::Null, json!({"kind": "left-out", "why": "not claimed"})),
        ],
    })
}

fn written(dir: &TempDir, name: &str, value: &Value) -> String {
    let path = dir.path().join(name);
    std::fs::write(&path, value.to_string()).expect("write");
    path.to_str().expect("UTF-8").to_owned()
}

#[tokio::test]
async fn results_are_shown_side_by_side_without_a_driver() {
    let dir = tempfile::tempdir().expect("temp dir");
    let (one, two) = (result("one.csi", 4.0), result("two.csi", 40.0));
    let (a, b) = (written(&dir, "a.json", &one), written(&dir, "b.json", &two));
    let html = dir.path().join("both.html");
    let output = bench(&["--compare", &a, &b, "--html", html.to_str().expect("UTF-8")]).await;
    let told = String::from_utf8_lossy(&output.stdout);
    assert_eq!(output.status.code(), Some(0), "{}", String::from_utf8_lossy(&output.stderr));
    let line = told.lines().find(|line| line.contains("restore")).expect("a line");
    assert!(
        line.contains("4.0 ms (2.0 ms to 8.0 ms)") && line.contains("40.0 ms (20.0 ms to 80.0 ms)"),
        "{line}"
    );
    assert!(told.starts_with("A: a: one.csi 1, ") && told.contains("\nB: b: two.csi 1, "), "{told}");
    assert!(told.lines().any(|line| line.contains("clone") && line.contains("left out")), "{told}");
    let page = std::fs::read_to_string(&html).expect("the page");
    assert!(
        page.contains("one.csi") && page.contains("two.csi") && page.matches("<svg ").count() == 2,
        "{page}"
    );

    let output = bench(&["--compare", &a, &b, "--output", "json"]).await;
    let told: Value = serde_json::from_slice(&output.stdout).expect("JSON");
    assert_eq!(told, json!([one, two]));
    // Nothing half written stays.
    let names = std::fs::read_dir(dir.path()).expect("list").map(|entry| entry.expect("entry").file_name());
    assert_eq!(names.count(), 3);
}

#[tokio::test]
async fn wrong_usage_says_what_to_do() {
    let dir = tempfile::tempdir().expect("temp dir");
    let other = written(&dir, "other.json", &json!({"cases": []}));
    let driver = ["--endpoint", "unix:///no/such.sock"];
    for (arguments, told) in [
        (&[][..], "--endpoint"),
        (&["--compare", "/no/such.json"], "/no/such.json"),
        (&["--compare", &other], "no result of cbt-lab bench --json"),
        (&[driver[0], driver[1], "--size", "16Mi"], "--data 256Mi does not fit"),
        (&[driver[0], driver[1], "--size", "1Gi,none"], "\"none\" is not a size"),
        (&[driver[0], driver[1], "--data", "5Gi"], "up to 4Gi"),
        (&[driver[0], driver[1], "--size", "64Mi", "--data", "128Mi"], "does not fit in a volume of 64Mi"),
        (&[driver[0], driver[1], "--changed", "101"], "at most 100"),
        (&[driver[0], driver[1], "--snapshots", "20000"], "20000 is not in"),
        (
            &[driver[0], driver[1], "--html", "/no/such/dir/page.html"],
            "/no/such/dir/page.html cannot be written",
        ),
        (&[driver[0], driver[1], "--bare-dir", "/no/such/dir"], "--bare-dir /no/such/dir"),
        (&[driver[0], driver[1], "--space-dir", "/no/such/dir"], "--space-dir /no/such/dir"),
        (&[driver[0], driver[1], "--bare-dir", &other], ": it is a file, not a directory"),
    ] {
        let output = bench(arguments).await;
        let error = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(output.status.code() == Some(2) && error.contains(told), "{arguments:?}: {error}");
        assert!(output.stdout.is_empty(), "{arguments:?}");
    }
    assert!(Path::new(&other).exists());
}
