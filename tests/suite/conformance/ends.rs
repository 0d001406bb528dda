//! The driver dies, restarts or hangs, or the user interrupts: the suite still ends with a verdict and leaves nothing.

use std::collections::BTreeSet;
use std::time::Duration;

use serde_json::Value;

use super::{all_cases, assert_empty, bare, cases, conformance, run_broken, said, verdicts};
use testkit::{PoolKind, Rig, eventually, leftovers};

/// The driver is killed midway. Every case soon has a verdict, and the suite leaves nothing of its own.
#[apply(device_test)]
async fn a_driver_that_dies_is_a_verdict_and_not_a_hang() {
    let mut rig = Rig::start(PoolKind::Xfs).await;
    let work = rig.dir.path().join("work");
    std::fs::create_dir(&work).expect("mkdir");
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
    eventually("something is published", async || !leftovers(&work).is_empty()).await;
    rig.kill();
    let output = suite.wait_with_output().await.expect("wait");
    assert_eq!(output.status.code(), Some(1), "{}", said(&output));
    let report: Value = serde_json::from_slice(&output.stdout).expect("a report");
    let verdicts = verdicts(&report);
    assert_eq!(verdicts.len(), all_cases().await.len());
    let gone = verdicts.values().filter(|(_, detail)| detail.starts_with("not run: no answer since"));
    assert!(gone.count() > 50, "{report:#}");
    // The driver's objects cannot be deleted, so they are named. The suite removes its own mounts and directories.
    assert!(report["left_behind"].as_array().is_some_and(|left| !left.is_empty()), "{report:#}");
    testkit::nothing_left(&work);
    assert!(!staging.exists() && !target.exists(), "directories are left");
}

/// The driver is killed and restarted, as kubelet does it. Later cases are not affected. Once while volumes are made, and
/// once while they are streamed, with cases one after another and at once. Cases that mostly wait are left out.
#[apply(device_test)]
async fn a_driver_that_comes_back_is_tested_on(rig: Rig<Xfs>) {
    for (sign, jobs) in [("CreateSnapshot", "1"), ("GetMetadataDelta", "1"), ("GetMetadataDelta", "4")] {
        let flags = ["--skip", "deadline|meanwhile|modified", "--jobs", jobs];
        let before = rig.log().len();
        let suite = conformance(&rig.socket(), &flags).spawn().expect("spawn");
        eventually(sign, async || rig.log()[before..].contains(sign)).await;
        rig.crash().await;
        let output = suite.wait_with_output().await.expect("wait");
        let report: Value = serde_json::from_slice(&output.stdout).expect("a report");
        let verdicts = verdicts(&report);
        assert_eq!(verdicts.keys().cloned().collect::<BTreeSet<_>>(), cases(&flags).await);
        assert_eq!(verdicts["alive"].0, "pass", "{report:#}");
        let failed = verdicts.values().filter(|(verdict, _)| verdict == "fail").count();
        let at_once: usize = jobs.parse().expect("a number");
        assert!(failed <= at_once, "more than the interrupted cases failed: {report:#}");
        assert_eq!(report["left_behind"], Value::Array(Vec::new()), "{report:#}");
        assert_empty(&mut rig).await;
    }
}

/// A call hangs while a case is prepared. The report says so, and names what the call may have made.
#[apply(device_test)]
async fn a_call_that_hangs_ends_with_its_time(rig: Rig<Xfs>) {
    let (code, verdicts, report) =
        run_broken(&rig, "stall:call=CreateSnapshot", &["delta-served"], "5").await;
    assert_eq!(code, Some(1));
    assert_eq!(verdicts["delta-served"].1, "preparing: no end within 5 s; the last call was CreateSnapshot");
    let left = report["left_behind"].as_array().expect("a list");
    assert!(
        left.len() == 1 && left[0].as_str().is_some_and(|left| left.starts_with("snapshot ")),
        "{left:?}"
    );
}

/// Nothing is left either if the reader of the output goes away, as `head` does.
#[apply(device_test)]
async fn nobody_who_reads_leaves_nothing(rig: Rig<Xfs>) {
    let mut suite =
        bare(&rig.socket(), &["--volume-size", "64Mi", "--focus", "delta-[co]"]).spawn().expect("spawn");
    drop(suite.stdout.take());
    drop(suite.stderr.take());
    assert_eq!(suite.wait().await.expect("wait").code(), Some(0));
    assert_empty(&mut rig).await;
}

/// SIGINT and SIGTERM at any time leave nothing.
#[apply(device_test)]
async fn a_signal_at_any_time_leaves_nothing() {
    use nix::sys::signal::Signal;
    let mut rig = Rig::start(PoolKind::Xfs).await;
    // Soon after its start, or some time after it made its first volume.
    for (signal, made, millis) in [
        (Signal::SIGINT, false, 60),
        (Signal::SIGTERM, true, 0),
        (Signal::SIGINT, true, 300),
        (Signal::SIGTERM, true, 1000),
    ] {
        let before = rig.log().len();
        let suite = conformance(&rig.socket(), &[]).spawn().expect("spawn");
        eventually("a volume is made", async || !made || rig.log()[before..].contains("CreateVolume")).await;
        tokio::time::sleep(Duration::from_millis(millis)).await;
        testkit::signal(suite.id().expect("it runs"), signal);
        let output = suite.wait_with_output().await.expect("wait");
        if made {
            assert_eq!(output.status.code(), Some(130), "{signal} after {millis} ms: {}", said(&output));
            let report: Value = serde_json::from_slice(&output.stdout).expect("a report");
            assert_eq!(report["verdict"], "interrupted");
        } else {
            // Before its handler is set, the signal ends it at once. Before its first case it has nothing to report.
            assert!(matches!(output.status.code(), Some(130) | None), "{signal}: {}", said(&output));
        }
        assert_empty(&mut rig).await;
    }
    rig.finish();
}
