//! examples/minimal.rs, the driver that docs/tutorial-driver.md begins with.

use testkit::pages;
use tokio::process::Command;

use super::{said, verdicts};

/// What a driver skips that makes no groups, clones and expansions.
const SKIPS: [&str; 4] =
    ["CREATE_DELETE_GET_VOLUME_GROUP_SNAPSHOT", "CLONE_VOLUME", "EXPAND_VOLUME", "MODIFY_VOLUME"];

/// The commands of the page, but for what builds the programs, with a report that a program reads.
#[apply(device_test)]
async fn the_minimal_driver_conforms_as_its_page_says() {
    let dir = testkit::temp_dir();
    let page = pages::read("docs/tutorial-driver.md");
    let mut script = pages::blocks(&page, "sh").join("\n");
    for (of_page, instead) in [
        ("cargo build", ": built already:".to_owned()),
        ("target/release/examples/minimal", testkit::example("minimal").display().to_string()),
        (
            "target/release/cbt-lab conformance",
            format!("{} conformance --output json", testkit::program("cbt-lab").display()),
        ),
    ] {
        assert!(script.contains(of_page), "the page does not say {of_page}:\n{script}");
        script = script.replace(of_page, &instead);
    }
    // Also where a command fails, the driver ends.
    let script = format!("trap 'kill $(jobs -p) 2>/dev/null || true' EXIT\n{script}");
    let mut bash = Command::new("bash");
    bash.args(["-euc", &script]).env("TMPDIR", dir.path()).env_remove("CSI_ENDPOINT").kill_on_drop(true);
    let output = tokio::time::timeout(std::time::Duration::from_secs(600), bash.output()).await;
    let output = output.expect("it ends").expect("bash");
    assert!(output.status.success(), "{}", said(&output));
    let report = serde_json::from_slice(&output.stdout).unwrap_or_else(|_| panic!("{}", said(&output)));
    let verdicts = verdicts(&report);
    let mut passed = 0;
    for (case, (verdict, detail)) in &verdicts {
        match verdict.as_str() {
            "pass" => passed += 1,
            // Answers about 64 MiB are handed over before a deadline or a deletion, and hold no million ranges.
            "not-shown" => {
                let is_known = ["-many", "-deadline", "-meanwhile", "filesystem-volume"]
                    .iter()
                    .any(|end| case.ends_with(end));
                assert!(is_known, "{case}: {detail}");
            }
            "skip" => {
                let is_known =
                    SKIPS.iter().any(|claim| detail.contains(claim)) || case.ends_with("-fixed-size");
                assert!(is_known, "{case}: {detail}");
            }
            _ => panic!("{case}: {verdict}: {detail}"),
        }
    }
    assert!(passed > 60, "{passed} passed");
    let works = testkit::names(dir.path());
    let [work] = &works[..] else { panic!("not one directory: {works:?}") };
    assert_eq!(testkit::names(&dir.path().join(work).join("data")), [""; 0], "files are left");
}

/// The page shows the example as it is.
#[test]
fn the_page_shows_the_example() {
    let page = pages::read("docs/tutorial-driver.md");
    let sources = ["examples/minimal.rs", "examples/minimal/driver.rs"].map(pages::read);
    let shown = pages::blocks(&page, "rust");
    assert!(shown.len() >= 4, "{} excerpts", shown.len());
    let flat = |text: &str| text.split_whitespace().collect::<Vec<_>>().join(" ");
    for excerpt in shown {
        let is_there = sources.iter().any(|source| flat(source).contains(&flat(excerpt)));
        assert!(is_there, "not in the example: {excerpt}");
    }
}
