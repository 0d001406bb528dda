//! examples/minimal.rs, the driver that docs/tutorial-driver.md begins with.

use std::time::Duration;

use csi_client::Client;
use testkit::pages;
use tokio::process::Command;

use super::run;

/// What a driver skips that makes no groups, clones and expansions.
const SKIPS: [&str; 4] =
    ["CREATE_DELETE_GET_VOLUME_GROUP_SNAPSHOT", "CLONE_VOLUME", "EXPAND_VOLUME", "MODIFY_VOLUME"];

#[apply(device_test)]
async fn the_minimal_driver_conforms() {
    let dir = testkit::temp_dir();
    let (socket, data) = (dir.path().join("csi.sock"), dir.path().join("data"));
    std::fs::create_dir(&data).expect("mkdir");
    let mut driver = Command::new(testkit::example("minimal"));
    let mut driver = driver.args([&socket, &data]).kill_on_drop(true).spawn().expect("spawn");
    Client::connect(&socket, Duration::from_secs(10)).await.expect("connect");
    let (code, verdicts, report) = run(&socket, &[]).await;
    assert_eq!(code, Some(0), "{report:#}");
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
    assert!(std::fs::read_dir(&data).expect("read").next().is_none(), "files are left");
    driver.kill().await.expect("kill");
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
