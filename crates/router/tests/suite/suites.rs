//! Promise: what csi-sanity and `cbt-lab conformance` find right in a driver they find right in a cluster.

use std::path::{Path, PathBuf};
use std::process::Command;

use proto::{ListSnapshotsRequest, ListVolumesRequest};
use serde_json::Value;
use testkit::sanity::assert_only_memory_differs;
use testkit::{HOME, PoolKind, leftovers, names};

use crate::world::{Cluster, front};

/// Whichever version `make deps` has installed.
fn csi_sanity() -> Option<PathBuf> {
    let deps = Path::new(HOME).join(".deps");
    let programs = if deps.is_dir() { names(&deps) } else { Vec::new() };
    let dir = programs.into_iter().find(|name| name.starts_with("csi-sanity-"));
    if let Some(path) = dir.map(|dir| deps.join(dir).join("csi-sanity")).filter(|path| path.exists()) {
        return Some(path);
    }
    eprintln!("skipped: needs csi-sanity, which `make deps` builds where go is installed");
    assert_ne!(std::env::var("CI").as_deref(), Ok("true"), "skipped under CI: needs csi-sanity");
    None
}

async fn sanity(drivers: &[&[&str]], attach: bool) {
    let Some(program) = csi_sanity() else { return };
    let nodes = drivers.len();
    let cluster = Cluster::start_each(PoolKind::Xfs, drivers, &[]).await;
    let dir = cluster.dir.path();
    let socket = dir.join("front.sock");
    let serving = front(&cluster, &socket).await;
    let mutable = dir.join("mutable.yaml");
    std::fs::write(&mutable, "readAheadKiB: \"1024\"\ndirectIO: \"false\"\n").expect("write");
    for access in ["mount", "block"] {
        let mut command = Command::new(&program);
        command
            .arg("-csi.endpoint")
            .arg(format!("unix://{}", socket.display()))
            .arg("-csi.stagingdir")
            .arg(dir.join("sanity-staging"))
            .arg("-csi.mountdir")
            .arg(dir.join("sanity-mount"))
            .arg("-csi.testvolumemutableparameters")
            .arg(&mutable)
            .args(["-csi.testvolumeaccesstype", access, "-csi.testvolumesize", "67108864"])
            .args(["-csi.testvolumeexpandsize", "134217728", "-ginkgo.no-color", "-ginkgo.v"]);
        if attach {
            command.arg("-csi.testnodevolumeattachlimit");
        }
        let output = tokio::task::spawn_blocking(move || command.output().expect("run csi-sanity"));
        let output = output.await.expect("a thread");
        let said = String::from_utf8_lossy(&output.stdout);
        let count = said.lines().find(|line| line.contains(" Passed | ")).unwrap_or("no count");
        eprintln!("csi-sanity through the router, {nodes} nodes, {access}, attach {attach}: {count}");
        assert_only_memory_differs(&said, "\"node-");
        assert!(count.contains(" 1 Failed "), "{count}");
        let skipped = said.lines().filter_map(|line| line.trim_start().strip_prefix("[SKIPPED] "));
        // What the driver does not claim alone; tests/suite/sanity.rs names it.
        let wrong: Vec<&str> = skipped
            .filter(|why| !why.starts_with("in [") && !why.contains("not supported"))
            .filter(|why| attach || !why.contains("testnodevolumeattachlimit not enabled"))
            .collect();
        assert!(wrong.is_empty(), "skipped: {wrong:#?}");
        let left: Vec<String> = leftovers(dir).into_iter().filter(|left| left.contains("sanity")).collect();
        assert!(left.is_empty(), "left mounted: {left:?}");
    }
    serving.abort();
    cluster.finish();
}

#[test_with::root]
#[tokio::test(flavor = "multi_thread")]
async fn csi_sanity_finds_nothing_in_a_cluster_of_two() {
    sanity(&[&[], &[]], false).await;
}

#[test_with::root]
#[tokio::test(flavor = "multi_thread")]
async fn csi_sanity_finds_nothing_in_a_cluster_of_three_with_attachments() {
    // csi-sanity attaches volumes to one node for which it has asked no topology. So the others have no room: each volume is
    // refused there, or not tried.
    let full = ["--enable-attach", "--overcommit", "0.000001"];
    sanity(&[&["--enable-attach", "--max-volumes-per-node", "4"], &full, &full], true).await;
}

fn text(value: &Value) -> &str {
    value.as_str().unwrap_or_default()
}

#[test_with::root]
#[tokio::test(flavor = "multi_thread")]
async fn a_cluster_of_three_conforms() {
    let cluster = Cluster::start(PoolKind::Xfs, 3, &["--block-metadata-type", "fixed"]).await;
    let socket = cluster.dir.path().join("front.sock");
    let serving = front(&cluster, &socket).await;
    let mut command = tokio::process::Command::new(testkit::program("cbt-lab"));
    let output = command
        .args(["conformance", "--volume-size", "64Mi", "--output", "json", "--endpoint"])
        .arg(format!("unix://{}", socket.display()))
        .env_remove("CSI_ENDPOINT")
        .output()
        .await
        .expect("run");
    let said = String::from_utf8_lossy(&output.stderr);
    let report: Value = serde_json::from_slice(&output.stdout).unwrap_or_else(|_| panic!("{said}"));
    assert_eq!(output.status.code(), Some(0), "{report:#}");
    let cases = report["cases"].as_array().expect("cases");
    let other: Vec<&Value> = cases.iter().filter(|case| case["verdict"] != "pass").collect();
    eprintln!("cbt-lab conformance through the router: {} cases", cases.len());
    assert!(cases.len() > 50, "only {} cases", cases.len());
    // A base that was deleted may be refused, and ours answers: allowed, and told. 64 MiB hold no million ranges.
    let may = [
        ("base-deleted", "allowed"),
        ("base-deleted-again", "allowed"),
        ("allocated-many", "not-shown"),
        ("delta-many", "not-shown"),
    ];
    let is_one = |case: &&Value| may.contains(&(text(&case["name"]), text(&case["verdict"])));
    assert!(other.iter().all(is_one), "{other:#?}");
    let mut client = cluster.client();
    let volumes = client.controller.list_volumes(ListVolumesRequest::default()).await.expect("ListVolumes");
    assert!(volumes.into_inner().entries.is_empty(), "volumes are left");
    let left =
        client.controller.list_snapshots(ListSnapshotsRequest::default()).await.expect("ListSnapshots");
    assert!(left.into_inner().entries.is_empty(), "snapshots are left");
    serving.abort();
    cluster.finish();
}
