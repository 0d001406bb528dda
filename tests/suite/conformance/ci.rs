//! The files of deploy/ci, for other drivers' CI: their script, on a driver that is a program and its flags.

use std::path::Path;
use std::process::{Command, Output};

use serde_json::Value;
use testkit::said;

/// The script of both files.
fn script() -> String {
    let of = |file: &str, at: &str| -> String {
        let text = std::fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join(file)).expect(file);
        let file: Value = serde_saphyr::from_str(&text).expect(file);
        file.pointer(at).and_then(Value::as_str).expect(at).to_owned()
    };
    let github = of("deploy/ci/github.yaml", "/jobs/conformance/steps/2/env/SCRIPT");
    let container = "/presubmits/ORGANISATION~1REPOSITORY/0/spec/containers/0";
    assert_eq!(of("deploy/ci/prow.yaml", &format!("{container}/env/4/value")), github);
    github
}

/// Runs the script as docs/ci-for-drivers.md does, in a network of its own.
fn run(script: &str, dir: &Path, driver: &str, flags: &str) -> Output {
    let programs = testkit::program("cbt-lab").parent().expect("a directory").display().to_string();
    let mut bash = Command::new("unshare");
    bash.args(["--net", "bash", "-euc", script])
        .env("PATH", format!("{programs}:{}", std::env::var("PATH").expect("PATH")));
    bash.env("DRIVER", driver).env("FLAGS", flags).env("ARTIFACTS", dir.join("artifacts"));
    bash.env("SOCKET", dir.join("socket/csi.sock")).output().expect("unshare")
}

#[apply(device_test)]
async fn the_files_for_other_drivers_ci_run_the_cases() {
    let dir = testkit::temp_dir();
    let dir = dir.path();
    let script = script();
    let driver = format!(
        "deltapath driver --node-id ci --pool dir --data-dir {0}/data --endpoint unix://{0}/socket/csi.sock",
        dir.display()
    );
    let junit = || std::fs::read_to_string(dir.join("artifacts/junit_conformance.xml")).expect("JUnit");
    let flags = "--volume-size 64Mi --focus ^delta-(served|order|complete)$";
    let output = run(&script, dir, &driver, flags);
    assert_eq!(output.status.code(), Some(0), "{}", said(&output));
    let told = said(&output);
    assert!(told.contains("PASS: 3 passed") && junit().contains("name=\"delta-complete\""), "{told}");
    assert!(std::fs::read_to_string(dir.join("artifacts/driver.log")).expect("a log").contains("listening"));
    // A case that fails fails the job.
    let broken = "64Mi --focus ^delta-complete$ --staging-dir /proc/none";
    let output = run(&script, dir, &driver, &format!("--volume-size {broken}"));
    assert_ne!(output.status.code(), Some(0), "{}", said(&output));
    // So does a driver that does not start, which says why.
    let output = run(&script, dir, "deltapath driver --pool none", flags);
    assert_eq!(output.status.code(), Some(1), "{}", said(&output));
    assert!(said(&output).contains("--pool"), "{}", said(&output));
    testkit::nothing_left(dir);
    // The page takes the same script out of the file.
    let page = include_str!("../../../docs/ci-for-drivers.md");
    let take = page.lines().find(|line| line.starts_with("sed ")).expect("a command");
    let mut bash = Command::new("bash");
    bash.arg("-euc").arg(take.replace("conformance.sh", &dir.join("conformance.sh").display().to_string()));
    assert!(bash.current_dir(env!("CARGO_MANIFEST_DIR")).status().expect("bash").success());
    let taken = std::fs::read_to_string(dir.join("conformance.sh")).expect("a script");
    let words = |text: &str| text.split_whitespace().map(str::to_owned).collect::<Vec<_>>();
    assert_eq!(words(&taken), words(&script));
}
