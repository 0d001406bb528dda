//! `cbt-lab conformance`. Our driver passes (here), every case fails on a driver that is broken on purpose (`faults.rs`), the
//! suite ends whatever the driver or the user does (`ends.rs`), cases that run at once find the same (`jobs.rs`), its flags work
//! (`usage.rs`), and the driver of docs/tutorial-driver.md passes (`minimal.rs`).

mod ci;
mod ends;
mod faults;
mod jobs;
mod minimal;
mod usage;

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use serde_json::Value;
use tokio::process::Command;

use testkit::lab::{self, Lab};
use testkit::{PoolKind, Rig, said};

/// Cases that may be "allowed" instead of "pass" for our driver.
const OURS_MAY: [&str; 2] = ["base-deleted", "base-deleted-again"];

/// The suite on small volumes, with a full report in JSON.
fn conformance(socket: &Path, arguments: &[&str]) -> Command {
    let mut command = bare(socket, arguments);
    command.args(["--volume-size", "64Mi", "--modify-parameter", "readAheadKiB=512", "--output", "json"]);
    command
}

fn bare(socket: &Path, arguments: &[&str]) -> Command {
    let mut command = lab::command("conformance", socket);
    command.args(arguments);
    command
}

/// What ends without a verdict: the driver could not be tested, and part of the message says why.
async fn ends_untested(mut command: Command, part: &str) {
    let output = command.output().await.expect("run");
    assert_eq!(output.status.code(), Some(2), "{}", said(&output));
    assert!(String::from_utf8_lossy(&output.stderr).contains(part), "{}", said(&output));
}

/// Verdict and detail by case.
type Verdicts = BTreeMap<String, (String, String)>;

fn verdicts(report: &Value) -> Verdicts {
    let cases = report["cases"].as_array().expect("cases");
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    cases.iter().map(|case| (text(&case["name"]), (text(&case["verdict"]), text(&case["detail"])))).collect()
}

async fn run(socket: &Path, arguments: &[&str]) -> (Option<i32>, Verdicts, Value) {
    let output = conformance(socket, arguments).output().await.expect("run");
    let report: Value =
        serde_json::from_slice(&output.stdout).unwrap_or_else(|_| panic!("{}", said(&output)));
    (output.status.code(), verdicts(&report), report)
}

async fn all_cases() -> BTreeSet<String> {
    cases(&[]).await
}

/// The names of the cases that these flags choose.
async fn cases(flags: &[&str]) -> BTreeSet<String> {
    let output = conformance(Path::new("/none"), &[&["--list"], flags].concat()).output().await.expect("run");
    let list: Vec<Value> = serde_json::from_slice(&output.stdout).expect("a list");
    list.iter().map(|case| case["name"].as_str().expect("a name").to_owned()).collect()
}

pub async fn assert_empty(rig: &mut Rig) {
    assert_eq!(rig.client.volumes().await.expect("ListVolumes"), [], "volumes are left");
    assert_eq!(rig.client.snapshots().await.expect("ListSnapshots"), [], "snapshots are left");
}

/// Runs the named cases on the driver behind these faults.
async fn run_broken(
    rig: &Rig,
    faults: &str,
    cases: &[impl std::borrow::Borrow<str>],
    timeout: &str,
) -> (Option<i32>, Verdicts, Value) {
    let (_serving, socket) = Lab::faulty(rig, faults).await;
    let focus = format!("^({})$", cases.join("|"));
    run(&socket, &["--focus", &focus, "--timeout", timeout]).await
}

/// All cases pass, and only those are skipped that do not apply to the style of tuples.
async fn conforms(pool: PoolKind, driver: &[&str], suite: &[&str]) {
    let mut rig = Rig::start_with(pool, driver, "info").await;
    let (code, verdicts, report) = run(&rig.socket(), suite).await;
    assert_eq!(code, Some(0), "{pool:?} {driver:?}: {report:#}");
    assert_eq!(verdicts.keys().cloned().collect::<BTreeSet<_>>(), all_cases().await);
    let (fixed, coarse) = (driver.contains(&"fixed"), suite.contains(&"blockSize=4Mi"));
    let large_blocks = suite.iter().any(|flag| flag.starts_with("blockSize="));
    for (case, (verdict, detail)) in &verdicts {
        let may = match verdict.as_str() {
            "pass" => true,
            // 64 MiB cannot hold a million ranges, and only a few large blocks.
            "not-shown" => case.ends_with("-many") || large_blocks,
            "skip" if detail.contains("larger --volume-size") => coarse,
            "skip" => !fixed && case.ends_with("-fixed-size"),
            "allowed" if detail.starts_with("also lists") => coarse,
            "allowed" => OURS_MAY.contains(&case.as_str()),
            _ => false,
        };
        assert!(may, "{pool:?} {driver:?} {suite:?}: {case}: {verdict}: {detail}");
    }
    jobs::excluding_cases_never_overlap(&report);
    assert_empty(&mut rig).await;
    rig.finish();
}

#[apply(device_cases)]
#[case::btrfs_variable(PoolKind::Btrfs, "variable")]
#[case::btrfs_fixed(PoolKind::Btrfs, "fixed")]
#[case::xfs_fixed(PoolKind::Xfs, "fixed")]
#[case::dir_variable(PoolKind::Dir, "variable")]
async fn ours_conforms_on_every_pool(#[case] pool: PoolKind, #[case] style: &str) {
    conforms(pool, &["--block-metadata-type", style], &[]).await;
}

/// Two snapshots with a million changes between them, which needs a large volume: `make conformance-many`.
#[apply(every_pool)]
#[ignore = "it takes 12 GB of disk and minutes"]
async fn ours_conforms_with_a_million_ranges(pool: PoolKind, #[values("variable", "fixed")] style: &str) {
    let mut rig =
        Rig::start_with(pool, &["--block-metadata-type", style, "--max-volume-size", "16Gi"], "info").await;
    let mut command = bare(&rig.socket(), &["--focus", "^(allocated|delta)-many$", "--volume-size", "8Gi"]);
    command.args(["--timeout", "3600", "--output", "json"]);
    let output = command.output().await.expect("run");
    let report: Value =
        serde_json::from_slice(&output.stdout).unwrap_or_else(|_| panic!("{}", said(&output)));
    let verdicts = verdicts(&report);
    assert_eq!(verdicts.keys().collect::<Vec<_>>(), ["allocated-many", "delta-many"], "{report:#}");
    for (case, (verdict, detail)) in &verdicts {
        assert_eq!(verdict, "pass", "{pool:?} {style}: {case}: {detail}");
    }
    let seconds = report["cases"].as_array().expect("cases").iter().map(|case| case["ms"].to_string());
    println!("{} pool, {style}: {} ms", pool.name(), seconds.collect::<Vec<_>>().join(" and "));
    assert_empty(&mut rig).await;
    // After the deletions the filesystem frees a million extents, which takes longer than `finish` waits. Dropping the rig
    // removes the rest, and fails if it cannot.
    drop(rig);
}

/// The blocks are larger than the suite's writes, and the controller attaches volumes.
#[apply(device_test)]
async fn ours_conforms_with_large_blocks_and_attachments() {
    let parameters = ["--parameter", "blockSize=64Ki", "--snapshot-parameter", "blockMetadataType=fixed"];
    conforms(PoolKind::Xfs, &["--enable-attach", "--block-metadata-type", "fixed"], &parameters).await;
}

/// The blocks are so large that all writes are in one extent. There is little to compare, and no fault.
#[apply(device_test)]
async fn ours_conforms_with_blocks_larger_than_the_writes_are_apart() {
    conforms(PoolKind::Xfs, &[], &["--parameter", "blockSize=4Mi"]).await;
}

/// The page lists the same cases as the table.
#[tokio::test]
async fn the_page_lists_every_case() {
    let page = testkit::pages::read("docs/conformance.md");
    // The gateway's tests check the cases for a service in a cluster.
    let page = page.split("\n## Test a service in a cluster\n").next().unwrap_or_default();
    let rows = page.lines().filter(|line| line.starts_with("| MUST |") || line.starts_with("| SHOULD |"));
    let mut listed: BTreeMap<String, (String, String, String)> = BTreeMap::new();
    for row in rows {
        let cells: Vec<&str> = row.trim_matches('|').split('|').map(str::trim).collect();
        let [level, section, requirement, cases] = cells[..] else { panic!("{row}") };
        for case in cases.split('`').skip(1).step_by(2) {
            let reported = (level.to_owned(), section.to_owned(), requirement.to_owned());
            assert!(listed.insert(case.to_owned(), reported).is_none(), "{case} is listed twice");
        }
    }
    let output = conformance(Path::new("/none"), &["--list"]).output().await.expect("run");
    let list: Vec<Value> = serde_json::from_slice(&output.stdout).expect("a list");
    for case in &list {
        let text = |key: &str| case[key].as_str().expect(key).to_owned();
        let reported =
            listed.remove(&text("name")).unwrap_or_else(|| panic!("{} is not in the page", case["name"]));
        assert_eq!(reported.0, text("level"), "{case}");
        let section = text("section");
        let short =
            if section.starts_with("Special considerations") { "Special considerations" } else { &section };
        assert!(reported.1.split(", ").any(|listed| listed == short), "{case}: {}", reported.1);
        assert_eq!(reported.2, text("requirement"), "{case}");
    }
    assert!(listed.is_empty(), "listed only in the page: {listed:?}");
}
