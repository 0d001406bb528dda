//! `deltapath conformance`: green on our driver, and every case of it red on a driver that is broken on
//! purpose.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::process::{Output, Stdio};
use std::time::{Duration, Instant};

use deltapath::csi::proto::{ListSnapshotsRequest, ListVolumesRequest};
use futures_util::StreamExt;
use serde_json::Value;
use tokio::process::Command;

use crate::support::broken::serve;
use crate::support::faults::Fault;
use crate::support::{POOLS, PoolKind, Rig, have_root, leftovers};

/// A fault, and the cases that must see it.
const FAULTS: &[(Fault, &[&str])] = &[
    // First, for they are waited for.
    (Fault::StreamsHang, &["allocated-served", "delta-served"]),
    (Fault::NegativeBoundSpins, &["allocated-max-results-negative", "delta-max-results-negative"]),
    (Fault::ServiceNotClaimed, &["service-claimed"]),
    (Fault::Unimplemented, &["allocated-served", "delta-served"]),
    (Fault::ProbeFails, &["alive"]),
    (Fault::SwapsTuples, &["allocated-order", "delta-order"]),
    (Fault::SwapsMessages, &["allocated-order", "delta-order"]),
    (Fault::Overlaps, &["allocated-overlap", "delta-overlap"]),
    (Fault::EmptyTuple, &["allocated-positive-size", "delta-positive-size"]),
    (Fault::NegativeTuple, &["allocated-positive-size", "delta-positive-size"]),
    (Fault::PassesCapacity, &["allocated-inside", "delta-inside"]),
    (Fault::TypeUnknown, &["allocated-type-known", "delta-type-known"]),
    (Fault::TypeChanges, &["allocated-type-constant", "delta-type-constant"]),
    (Fault::FixedIsUneven, &["allocated-fixed-size", "delta-fixed-size"]),
    (Fault::CapacityChanges, &["allocated-capacity-constant", "delta-capacity-constant"]),
    (
        Fault::CapacityIsWrong,
        &["allocated-capacity", "delta-capacity", "allocated-never-written", "delta-unchanged"],
    ),
    (Fault::IgnoresMaxResults, &["allocated-max-results", "delta-max-results"]),
    (Fault::HugeMessages, &["allocated-max-results", "delta-max-results"]),
    (
        Fault::IgnoresOffset,
        &[
            "allocated-first-tuple",
            "delta-first-tuple",
            "allocated-resume",
            "delta-resume",
            "allocated-offset-at-capacity",
            "delta-offset-at-capacity",
        ],
    ),
    (Fault::RoundsOffsetUp, &["allocated-offset-complete", "delta-offset-complete"]),
    (
        Fault::LosesFirstWhenResumed,
        &["allocated-offset-complete", "delta-offset-complete", "allocated-resume", "delta-resume"],
    ),
    (Fault::EndRepeatsLast, &["allocated-offset-at-capacity", "delta-offset-at-capacity"]),
    (
        Fault::OutOfRangeIsOk,
        &[
            "allocated-offset-beyond",
            "delta-offset-beyond",
            "allocated-offset-negative",
            "delta-offset-negative",
        ],
    ),
    (
        Fault::OutOfRangeIsInvalid,
        &[
            "allocated-offset-beyond",
            "delta-offset-beyond",
            "allocated-offset-negative",
            "delta-offset-negative",
        ],
    ),
    (
        Fault::InvalidIsInternal,
        &[
            "allocated-id-missing",
            "delta-id-missing",
            "allocated-max-results-negative",
            "delta-max-results-negative",
            "delta-reversed",
            "delta-other-volume",
        ],
    ),
    (
        Fault::InvalidIsOk,
        &["allocated-id-missing", "delta-id-missing", "delta-reversed", "delta-other-volume"],
    ),
    (
        Fault::NotFoundIsInternal,
        &["allocated-id-unknown", "delta-id-unknown", "allocated-id-deleted", "delta-id-deleted"],
    ),
    (
        Fault::NotFoundIsOk,
        &["allocated-id-unknown", "delta-id-unknown", "allocated-id-deleted", "delta-id-deleted"],
    ),
    (Fault::NegativeBoundCuts, &["allocated-max-results-negative", "delta-max-results-negative"]),
    (Fault::EmptyIsAnError, &["allocated-never-written", "delta-unchanged", "delta-same-snapshot"]),
    (
        Fault::LosesLast,
        &["allocated-complete", "delta-complete", "allocated-full-backup", "delta-incremental-backup"],
    ),
    (
        Fault::LosesHalf,
        &["allocated-complete", "delta-complete", "delta-zeroed", "delta-new-data", "delta-across"],
    ),
    (Fault::LosesDiscarded, &["delta-discarded", "delta-complete", "delta-incremental-backup"]),
    (Fault::LosesWhenAskedAgain, &["written-on"]),
    (Fault::OldSnapshotsGrow, &["expanded-old-snapshot"]),
    (Fault::GrownStaysSmall, &["expanded-capacity"]),
    (Fault::LosesGrown, &["expanded-delta"]),
    (Fault::LosesAfterRestore, &["restored-between"]),
    (Fault::LosesRestored, &["restored-snapshot"]),
    (Fault::SourceGoneIsNotFound, &["source-deleted"]),
    (Fault::LosesAfterDelete, &["middle-deleted"]),
    (Fault::BaseGoneIsEmpty, &["base-deleted"]),
    (Fault::FilesystemIsInternal, &["filesystem-volume"]),
    (Fault::FilesystemIsEmpty, &["filesystem-volume"]),
    (Fault::DeadlineIsOk, &["allocated-deadline", "delta-deadline"]),
    (Fault::CancelBreaksLater, &["allocated-cancel", "delta-cancel"]),
    (Fault::DeleteEndsStreams, &["allocated-deleted-meanwhile", "delta-deleted-meanwhile"]),
    (Fault::TwoAtOnceLose, &["allocated-concurrent", "delta-concurrent"]),
    (Fault::RestoredInUse, &["restored-volume-read"]),
];

/// What the spec allows and a user should know, and the cases that must tell it.
const ALLOWED: &[(Fault, &[&str])] = &[
    (Fault::ReportsMore, &["allocated-complete", "delta-complete", "delta-unchanged", "delta-same-snapshot"]),
    (
        Fault::EmptyWithoutMessage,
        &[
            "allocated-never-written",
            "delta-unchanged",
            "delta-same-snapshot",
            "allocated-offset-at-capacity",
            "delta-offset-at-capacity",
        ],
    ),
    (Fault::CapacityIsOutOfRange, &["allocated-offset-at-capacity", "delta-offset-at-capacity"]),
    (Fault::NegativeBoundIsNone, &["allocated-max-results-negative", "delta-max-results-negative"]),
    (Fault::SameIsRefused, &["delta-same-snapshot"]),
    (Fault::InvalidIsPrecondition, &["delta-reversed", "delta-other-volume"]),
    (Fault::NotFoundIsInvalid, &["allocated-id-unknown", "delta-id-unknown"]),
    (Fault::FilesystemIsRefused, &["filesystem-volume"]),
    (Fault::LastFixedPasses, &["allocated-inside", "delta-inside"]),
];

/// Cases that ours may answer with "allowed, but".
const OURS_MAY: [&str; 1] = ["base-deleted"];

/// The suite on small volumes, telling all in JSON.
fn conformance(socket: &Path, arguments: &[&str]) -> Command {
    let mut command = bare(socket, arguments);
    command.args(["--volume-size", "64Mi", "--output", "json"]);
    command
}

fn bare(socket: &Path, arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_deltapath"));
    command
        .arg("conformance")
        .arg("--endpoint")
        .arg(format!("unix://{}", socket.display()))
        .args(arguments)
        .env_remove("CSI_ENDPOINT")
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    command
}

fn said(output: &Output) -> String {
    format!("{}\n{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr))
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
    let output = conformance(Path::new("/none"), &["--list"]).output().await.expect("run");
    let list: Vec<Value> = serde_json::from_slice(&output.stdout).expect("a list");
    list.iter().map(|case| case["name"].as_str().expect("a name").to_owned()).collect()
}

/// Nothing that the suite made is left in the driver.
async fn assert_empty(rig: &mut Rig) {
    let volumes = rig.client.controller.list_volumes(ListVolumesRequest::default()).await;
    let left = volumes.expect("ListVolumes").into_inner().entries;
    assert!(left.is_empty(), "volumes are left: {left:?}");
    let snapshots = rig.client.controller.list_snapshots(ListSnapshotsRequest::default()).await;
    let left = snapshots.expect("ListSnapshots").into_inner().entries;
    assert!(left.is_empty(), "snapshots are left: {left:?}");
}

/// All cases green, none skipped but what the tuples' style leaves out.
async fn conforms(pool: PoolKind, driver: &[&str], suite: &[&str]) {
    let mut rig = Rig::start_with(pool, driver, "info").await;
    let (code, verdicts, report) = run(&rig.socket(), suite).await;
    assert_eq!(code, Some(0), "{pool:?} {driver:?}: {report:#}");
    assert_eq!(verdicts.keys().cloned().collect::<BTreeSet<_>>(), all_cases().await);
    let (fixed, coarse) = (driver.contains(&"fixed"), suite.contains(&"blockSize=4Mi"));
    for (case, (verdict, detail)) in &verdicts {
        let may = match verdict.as_str() {
            "pass" => true,
            "skip" if detail.contains("larger --volume-size") => coarse,
            "skip" => !fixed && case.ends_with("-fixed-size"),
            "allowed" if detail.starts_with("also lists") => coarse,
            "allowed" => OURS_MAY.contains(&case.as_str()),
            _ => false,
        };
        assert!(may, "{pool:?} {driver:?} {suite:?}: {case}: {verdict}: {detail}");
    }
    assert_empty(&mut rig).await;
    rig.finish();
}

#[tokio::test(flavor = "multi_thread")]
async fn ours_conforms_on_every_pool_with_extents() {
    if have_root() {
        for pool in POOLS {
            conforms(pool, &["--block-metadata-type", "variable"], &[]).await;
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn ours_conforms_on_every_pool_with_fixed_blocks() {
    if have_root() {
        for pool in POOLS {
            conforms(pool, &["--block-metadata-type", "fixed"], &[]).await;
        }
    }
}

/// Larger blocks than the suite writes, and a controller that attaches.
#[tokio::test(flavor = "multi_thread")]
async fn ours_conforms_with_large_blocks_and_attachments() {
    if have_root() {
        let parameters = ["--parameter", "blockSize=64Ki", "--snapshot-parameter", "blockMetadataType=fixed"];
        conforms(PoolKind::Xfs, &["--enable-attach", "--block-metadata-type", "fixed"], &parameters).await;
    }
}

/// Units so large that all writes fall into one extent: there is little to compare, and nothing wrong.
#[tokio::test(flavor = "multi_thread")]
async fn ours_conforms_with_blocks_larger_than_the_writes_are_apart() {
    if have_root() {
        conforms(PoolKind::Xfs, &[], &["--parameter", "blockSize=4Mi"]).await;
    }
}

/// Serves a fault, and runs the cases that are named.
async fn run_broken(
    rig: &Rig,
    fault: Fault,
    cases: &[&str],
    timeout: &str,
) -> (Option<i32>, Verdicts, Value) {
    let socket = rig.dir.path().join(format!("{fault:?}.sock"));
    let _serving = serve(&rig.socket(), fault, &socket).await;
    let focus = format!("^({})$", cases.join("|"));
    run(&socket, &["--focus", &focus, "--timeout", timeout]).await
}

/// A few faults at a time; what went otherwise than the table says.
async fn each_is_seen(table: &[(Fault, &[&str])], verdict: &str, code: i32) {
    let rig = Rig::start_with(PoolKind::Xfs, &["--max-volume-size", "1Gi"], "warn").await;
    let runs = table.iter().map(|(fault, cases)| {
        let rig = &rig;
        async move {
            let hangs = matches!(fault, Fault::StreamsHang | Fault::NegativeBoundSpins);
            let timeout = if hangs { "6" } else { "60" };
            (fault, *cases, run_broken(rig, *fault, cases, timeout).await)
        }
    });
    let mut runs = futures_util::stream::iter(runs).buffer_unordered(6);
    let mut wrong = Vec::new();
    while let Some((fault, cases, (ended, verdicts, report))) = runs.next().await {
        if ended != Some(code) {
            wrong.push(format!("{fault:?}: exit status {ended:?}: {report:#}"));
        }
        for case in cases {
            match verdicts.get(*case) {
                // What could not even be prepared was not tested.
                Some((found, detail)) if found == verdict && !detail.starts_with("preparing") => {}
                found => wrong.push(format!("{fault:?}: {case}: {found:?}")),
            }
        }
        if report["left_behind"].as_array().is_none_or(|left| !left.is_empty()) {
            wrong.push(format!("{fault:?}: left behind: {}", report["left_behind"]));
        }
    }
    drop(runs);
    assert!(wrong.is_empty(), "must be {verdict}:\n{}", wrong.join("\n"));
    let mut rig = rig;
    assert_empty(&mut rig).await;
    rig.finish();
}

#[tokio::test(flavor = "multi_thread")]
async fn every_fault_is_seen_by_its_cases() {
    if have_root() {
        each_is_seen(FAULTS, "fail", 1).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_allowed_is_told_and_does_not_fail() {
    if have_root() {
        each_is_seen(ALLOWED, "allowed", 0).await;
    }
}

/// No case is a check that can not fail.
#[tokio::test]
async fn every_case_is_named_by_a_fault() {
    let cases = all_cases().await;
    let named: BTreeSet<String> =
        FAULTS.iter().flat_map(|(_, cases)| cases.iter().map(|case| (*case).to_owned())).collect();
    assert!(cases.len() > 70, "{} cases", cases.len());
    let unseen: Vec<&String> = cases.difference(&named).collect();
    assert!(unseen.is_empty(), "no fault is there for {unseen:?}");
    let unknown: Vec<&String> = named.difference(&cases).collect();
    assert!(unknown.is_empty(), "no such cases: {unknown:?}");
}

/// The go-between adds no fault of its own, and secrets go where they belong.
#[tokio::test(flavor = "multi_thread")]
async fn a_driver_that_wants_secrets_conforms_with_them_alone() {
    if !have_root() {
        return;
    }
    let rig = Rig::start(PoolKind::Xfs).await;
    let socket = rig.dir.path().join("secrets.sock");
    let _serving = serve(&rig.socket(), Fault::WantsSecrets, &socket).await;
    let (code, verdicts, _) = run(&socket, &["--focus", "^delta-complete$"]).await;
    assert_eq!(code, Some(1));
    assert!(verdicts["delta-complete"].1.contains("UNAUTHENTICATED"), "{verdicts:?}");

    let file = rig.dir.path().join("secrets.yaml");
    let calls = [
        "CreateVolume",
        "DeleteVolume",
        "ControllerExpandVolume",
        "NodeStageVolume",
        "NodePublishVolume",
        "CreateSnapshot",
        "DeleteSnapshot",
    ];
    let yaml: String = calls.iter().map(|call| format!("{call}Secret:\n  key: sesame\n")).collect();
    std::fs::write(&file, yaml).expect("write");
    let (code, verdicts, report) = run(&socket, &["--secrets", &file.display().to_string()]).await;
    assert_eq!(code, Some(0), "{report:#}");
    assert_eq!(verdicts.len(), all_cases().await.len());
    assert!(!report.to_string().contains("sesame"));
    rig.finish();
}

#[tokio::test(flavor = "multi_thread")]
async fn what_a_driver_does_not_claim_is_skipped_with_a_reason() {
    if !have_root() {
        return;
    }
    let rig = Rig::start(PoolKind::Xfs).await;
    let (code, verdicts, _) = run_broken(&rig, Fault::ExpandsNothing, &["expanded-.*"], "60").await;
    assert_eq!(code, Some(0));
    assert_eq!(verdicts.len(), 3);
    for (case, (verdict, detail)) in verdicts {
        assert_eq!(verdict, "skip", "{case}");
        assert!(detail.contains("EXPAND_VOLUME"), "{detail}");
    }
    rig.finish();
}

/// Killed midway: a verdict on every case, soon, and nothing of the suite's own left.
#[tokio::test(flavor = "multi_thread")]
async fn a_driver_that_dies_is_a_verdict_and_not_a_hang() {
    if !have_root() {
        return;
    }
    let mut rig = Rig::start(PoolKind::Xfs).await;
    let work = rig.dir.path().join("work");
    let (staging, target) = (work.join("staging"), work.join("target"));
    let arguments = [
        "--staging-dir",
        staging.to_str().expect("UTF-8"),
        "--target-dir",
        target.to_str().expect("UTF-8"),
        "--timeout",
        "5",
    ];
    let suite = conformance(&rig.socket(), &arguments).spawn().expect("spawn");
    let deadline = Instant::now() + Duration::from_secs(30);
    while leftovers(&work).is_empty() {
        assert!(Instant::now() < deadline, "nothing is ever published");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    rig.kill();
    let output = suite.wait_with_output().await.expect("wait");
    assert_eq!(output.status.code(), Some(1), "{}", said(&output));
    let report: Value = serde_json::from_slice(&output.stdout).expect("a report");
    let verdicts = verdicts(&report);
    assert_eq!(verdicts.len(), all_cases().await.len());
    let gone =
        verdicts.values().filter(|(_, detail)| detail.starts_with("not run: the driver does not answer"));
    assert!(gone.count() > 50, "{report:#}");
    // The driver's objects can not be deleted, and are named; mounts and directories are ours.
    assert!(report["left_behind"].as_array().is_some_and(|left| !left.is_empty()), "{report:#}");
    assert!(leftovers(&work).is_empty(), "{:?}", leftovers(&work));
    assert!(!staging.exists() && !target.exists(), "directories are left");
}

/// Killed and started again, as a kubelet does it: what comes after is judged by itself.
#[tokio::test(flavor = "multi_thread")]
async fn a_driver_that_comes_back_is_tested_on() {
    if !have_root() {
        return;
    }
    let mut rig = Rig::start(PoolKind::Xfs).await;
    let suite = conformance(&rig.socket(), &[]).spawn().expect("spawn");
    tokio::time::sleep(Duration::from_millis(700)).await;
    rig.kill();
    rig.start_again().await;
    let output = suite.wait_with_output().await.expect("wait");
    let report: Value = serde_json::from_slice(&output.stdout).expect("a report");
    let verdicts = verdicts(&report);
    assert_eq!(verdicts.len(), all_cases().await.len());
    assert_eq!(verdicts["alive"].0, "pass", "{report:#}");
    let failed = verdicts.values().filter(|(verdict, _)| verdict == "fail").count();
    assert!(failed <= 3, "one case is cut, and what it prepares: {report:#}");
    assert_eq!(report["left_behind"], Value::Array(Vec::new()), "{report:#}");
    assert_empty(&mut rig).await;
    rig.finish();
}

/// A call that hangs while a case is prepared: told as that, and what it may have made is named.
#[tokio::test(flavor = "multi_thread")]
async fn a_call_that_hangs_ends_with_its_time() {
    if !have_root() {
        return;
    }
    let rig = Rig::start(PoolKind::Xfs).await;
    let (code, verdicts, report) = run_broken(&rig, Fault::SnapshotHangs, &["delta-served"], "2").await;
    assert_eq!(code, Some(1));
    assert_eq!(verdicts["delta-served"].1, "preparing: no end within 2 s");
    let left = report["left_behind"].as_array().expect("a list");
    assert!(
        left.len() == 1 && left[0].as_str().is_some_and(|left| left.starts_with("snapshot ")),
        "{left:?}"
    );
    rig.finish();
}

/// A reader that goes away, as `head` does, is no reason to leave anything behind.
#[tokio::test(flavor = "multi_thread")]
async fn nobody_who_reads_leaves_nothing() {
    if !have_root() {
        return;
    }
    let mut rig = Rig::start(PoolKind::Xfs).await;
    let mut suite =
        bare(&rig.socket(), &["--volume-size", "64Mi", "--focus", "delta-[co]"]).spawn().expect("spawn");
    drop(suite.stdout.take());
    drop(suite.stderr.take());
    assert_eq!(suite.wait().await.expect("wait").code(), Some(2));
    assert_empty(&mut rig).await;
    rig.finish();
}

/// Ctrl-C at any time, and SIGTERM: nothing is left.
#[tokio::test(flavor = "multi_thread")]
async fn a_signal_at_any_time_leaves_nothing() {
    use nix::sys::signal::{Signal, kill};
    if !have_root() {
        return;
    }
    let mut rig = Rig::start(PoolKind::Xfs).await;
    for (signal, millis) in
        [(Signal::SIGINT, 60), (Signal::SIGTERM, 150), (Signal::SIGINT, 500), (Signal::SIGTERM, 1200)]
    {
        let suite = conformance(&rig.socket(), &[]).spawn().expect("spawn");
        tokio::time::sleep(Duration::from_millis(millis)).await;
        let pid = suite.id().expect("it runs");
        kill(nix::unistd::Pid::from_raw(pid as i32), signal).expect("signal");
        let output = suite.wait_with_output().await.expect("wait");
        // Before the handler is set the signal ends it at once; nothing is made by then.
        assert!(
            matches!(output.status.code(), Some(130) | None),
            "{signal} after {millis} ms: {}",
            said(&output)
        );
        if output.status.code().is_some() {
            let report: Value = serde_json::from_slice(&output.stdout).expect("a report");
            assert_eq!(report["verdict"], "interrupted");
        }
        assert_empty(&mut rig).await;
    }
    rig.finish();
}

#[tokio::test(flavor = "multi_thread")]
async fn focus_skip_junit_and_text() {
    if !have_root() {
        return;
    }
    let rig = Rig::start(PoolKind::Xfs).await;
    let junit = rig.dir.path().join("junit.xml");
    let focus =
        ["--focus", "^delta-(id|type)", "--skip", "deleted", "--junit", junit.to_str().expect("UTF-8")];
    let (code, verdicts, _) = run(&rig.socket(), &focus).await;
    assert_eq!(code, Some(0));
    let ran: Vec<&str> = verdicts.keys().map(String::as_str).collect();
    assert_eq!(ran, ["delta-id-missing", "delta-id-unknown", "delta-type-constant", "delta-type-known"]);
    let xml = std::fs::read_to_string(&junit).expect("JUnit");
    assert!(xml.contains("tests=\"4\"") && xml.contains("failures=\"0\""), "{xml}");
    for case in ran {
        assert!(xml.contains(&format!("<testcase name=\"{case}\"")), "{xml}");
    }

    let socket = rig.dir.path().join("text.sock");
    let _serving = serve(&rig.socket(), Fault::SwapsTuples, &socket).await;
    let mut text = bare(&socket, &["--focus", "^delta-(order|capacity)$", "--volume-size", "64Mi"]);
    text.arg("--junit").arg(&junit);
    let output = text.output().await.expect("run");
    assert_eq!(output.status.code(), Some(1));
    let told = String::from_utf8_lossy(&output.stdout);
    for part in ["pass          MUST   delta-capacity", "fail          MUST   delta-order", "FAIL: 1 passed"]
    {
        assert!(told.contains(part), "{told}");
    }
    let order = told.lines().skip_while(|line| !line.contains("delta-order")).collect::<Vec<_>>();
    assert!(order[1].contains("GetMetadataDelta: byte_offset strictly increases"), "{told}");
    assert!(order[2].contains("does not start after its predecessor"), "{told}");
    let xml = std::fs::read_to_string(&junit).expect("JUnit");
    assert!(xml.contains("failures=\"1\"") && xml.contains("does not start after"), "{xml}");
    rig.finish();
}

#[tokio::test]
async fn what_can_not_run_says_so_and_exits_with_2() {
    let dir = tempfile::tempdir().expect("temp dir");
    let nobody = dir.path().join("none.sock");
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
        if !have_root() && !part.starts_with("--") {
            continue;
        }
        let output = bare(&nobody, arguments).output().await.expect("run");
        assert_eq!(output.status.code(), Some(2), "{arguments:?}: {}", said(&output));
        assert!(output.stdout.is_empty(), "{arguments:?}: {}", said(&output));
        let told = String::from_utf8_lossy(&output.stderr);
        assert!(told.contains(part) && !told.contains("hunter2"), "{arguments:?}: {told}");
    }
}

/// In a cluster the node's plugin is another process than the controller's.
#[tokio::test(flavor = "multi_thread")]
async fn controller_and_node_may_have_sockets_of_their_own() {
    if !have_root() {
        return;
    }
    let rig = Rig::start(PoolKind::Xfs).await;
    let controller = rig.dir.path().join("controller.sock");
    let _serving = serve(&rig.socket(), Fault::NodeElsewhere, &controller).await;
    let output = conformance(&controller, &["--focus", "complete"]).output().await.expect("run");
    assert_eq!(output.status.code(), Some(2), "{}", said(&output));
    assert!(String::from_utf8_lossy(&output.stderr).contains("NodeGetCapabilities"), "{}", said(&output));
    let endpoint = format!("unix://{}", controller.display());
    let split = ["--controller-endpoint", &endpoint, "--focus", "complete"];
    let (code, verdicts, report) = run(&rig.socket(), &split).await;
    assert_eq!(code, Some(0), "{report:#}");
    assert!(verdicts.contains_key("delta-complete") && verdicts.len() == 4, "{verdicts:?}");
    rig.finish();
}

/// A driver without the service is nothing to test.
#[tokio::test(flavor = "multi_thread")]
async fn a_driver_without_the_service_is_not_run() {
    if !have_root() {
        return;
    }
    let rig = Rig::start(PoolKind::Xfs).await;
    let socket = rig.dir.path().join("without.sock");
    let _serving = serve(&rig.socket(), Fault::NoService, &socket).await;
    let output = conformance(&socket, &[]).output().await.expect("run");
    assert_eq!(output.status.code(), Some(2), "{}", said(&output));
    assert!(
        String::from_utf8_lossy(&output.stderr).contains("neither claims nor serves"),
        "{}",
        said(&output)
    );
    rig.finish();
}

/// The README's list is the table.
#[tokio::test]
async fn the_readme_lists_every_case() {
    let readme =
        std::fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("README.md")).expect("README");
    let rows = readme.lines().filter(|line| line.starts_with("| MUST |") || line.starts_with("| SHOULD |"));
    let mut listed: BTreeMap<String, (String, String, String)> = BTreeMap::new();
    for row in rows {
        let cells: Vec<&str> = row.trim_matches('|').split('|').map(str::trim).collect();
        let [level, section, requirement, cases] = cells[..] else { panic!("{row}") };
        for case in cases.split('`').skip(1).step_by(2) {
            let told = (level.to_owned(), section.to_owned(), requirement.to_owned());
            assert!(listed.insert(case.to_owned(), told).is_none(), "{case} is listed twice");
        }
    }
    let output = conformance(Path::new("/none"), &["--list"]).output().await.expect("run");
    let list: Vec<Value> = serde_json::from_slice(&output.stdout).expect("a list");
    for case in &list {
        let text = |key: &str| case[key].as_str().expect(key).to_owned();
        let told =
            listed.remove(&text("name")).unwrap_or_else(|| panic!("{} is not in the README", case["name"]));
        assert_eq!(told.0, text("level"), "{case}");
        let section = text("section");
        let short =
            if section.starts_with("Special considerations") { "Special considerations" } else { &section };
        assert!(told.1.split(", ").any(|listed| listed == short), "{case}: {}", told.1);
        assert_eq!(told.2, text("requirement"), "{case}");
    }
    assert!(listed.is_empty(), "in the README alone: {listed:?}");
}
