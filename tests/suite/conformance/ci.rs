//! The files of deploy/ci, for other drivers' CI: their script, on a driver that is a program and its flags. And our own workflows.

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

/// Runs commands with the programs under test and these variables.
fn run(commands: &str, dir: &Path, variables: &[(&str, &str)]) -> Output {
    let programs = testkit::program("cbt-lab").parent().expect("a directory").display().to_string();
    let path = format!("{programs}:{}", std::env::var("PATH").expect("PATH"));
    let mut bash = Command::new("bash");
    bash.args(["-euc", commands]).current_dir(dir).env("PATH", path).envs(variables.iter().copied());
    bash.output().expect("bash")
}

/// GitHub says what is wrong with a workflow only when it runs it.
#[test]
fn actionlint_finds_nothing_in_a_workflow() {
    testkit::needs("actionlint");
    let check = |files: &[&str]| {
        let mut actionlint = Command::new(".deps/actionlint-v1.7.12/actionlint");
        let output = actionlint.args(files).current_dir(env!("CARGO_MANIFEST_DIR")).output();
        let output = output.expect("run actionlint, which `make test-deps` builds");
        (output.status.code(), said(&output) + &String::from_utf8_lossy(&output.stdout))
    };
    let ours = [".github/workflows/ci.yml", ".github/workflows/release.yml", "deploy/ci/github.yaml"];
    let (code, told) = check(&ours);
    assert_eq!(code, Some(0), "{told}");
    let dir = testkit::temp_dir();
    let wrong = dir.path().join("wrong.yml");
    let text = std::fs::read_to_string(ours[2]).expect("read").replace("timeout-minutes", "timeout-hours");
    std::fs::write(&wrong, text).expect("write");
    let (code, told) = check(&[wrong.to_str().expect("UTF-8")]);
    assert!(code == Some(1) && told.contains("timeout-hours"), "{told}");
}

/// The commands of docs/ci-for-drivers.md as they stand, but for the driver, the directory and the number of cases.
#[apply(device_test)]
async fn the_files_for_other_drivers_ci_run_the_cases() {
    let dir = testkit::temp_dir();
    let dir = dir.path();
    std::os::unix::fs::symlink(Path::new(env!("CARGO_MANIFEST_DIR")).join("deploy"), dir.join("deploy"))
        .expect("a link");
    let place = dir.display().to_string();
    let driver = format!(
        "deltapath driver --node-id ci --pool dir --data-dir {place}/data --endpoint=unix://{place}/csi.sock"
    );
    let flags = "--volume-size=64Mi --focus ^delta-(served|order|complete)$";
    let page = testkit::pages::read("docs/ci-for-drivers.md");
    let mut commands =
        "sudo() { shift; \"$@\"; }\n".to_owned() + &testkit::pages::blocks(&page, "sh").concat();
    for (of_page, instead) in [
        ("bin/your-csi-driver --endpoint=unix:///tmp/conformance/csi.sock", &driver),
        ("--volume-size=256Mi", &format!("'{flags}'")),
        ("/tmp/conformance", &place),
    ] {
        assert!(commands.contains(of_page), "the page does not say {of_page}: {commands}");
        commands = commands.replace(of_page, instead);
    }
    let output = run(&commands, dir, &[]);
    assert_eq!(output.status.code(), Some(0), "{}", said(&output));
    let junit = std::fs::read_to_string(dir.join("artifacts/junit_conformance.xml")).expect("JUnit");
    let told = said(&output);
    assert!(told.contains("PASS: 3 passed") && junit.contains("name=\"delta-complete\""), "{told}");
    assert!(std::fs::read_to_string(dir.join("artifacts/driver.log")).expect("a log").contains("listening"));
    // What the page took out of the file is the script of both.
    let taken = std::fs::read_to_string(dir.join("conformance.sh")).expect("a script");
    let words = |text: &str| text.split_whitespace().map(str::to_owned).collect::<Vec<_>>();
    assert_eq!(words(&taken), words(&script()));
    let (socket, artifacts) = (format!("{place}/csi.sock"), format!("{place}/artifacts"));
    let again = |driver: &str, flags: &str| {
        let variables =
            [("DRIVER", driver), ("FLAGS", flags), ("SOCKET", &*socket), ("ARTIFACTS", &*artifacts)];
        run("unshare --net bash -eu conformance.sh", dir, &variables)
    };
    // A case that fails fails the job.
    let output = again(&driver, "--volume-size 64Mi --focus ^delta-complete$ --staging-dir /proc/none");
    assert_ne!(output.status.code(), Some(0), "{}", said(&output));
    // So does a driver that does not start, which says why.
    let output = again("deltapath driver --pool none", flags);
    assert_eq!(output.status.code(), Some(1), "{}", said(&output));
    assert!(said(&output).contains("--pool"), "{}", said(&output));
    testkit::nothing_left(dir);
}
