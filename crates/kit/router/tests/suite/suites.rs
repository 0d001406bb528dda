//! Promise: what csi-sanity and `cbt-lab conformance` find right in a driver they find right in a cluster.

use serde_json::Value;
use testkit::PoolKind;
use testkit::sanity::assert_finds_nothing;

use testkit::cluster::Cluster;
use testkit::subject::front;

async fn sanity(drivers: &[&[&str]], attach: bool) {
    testkit::needs("csi-sanity");
    let cluster = Cluster::start_each(PoolKind::Xfs, drivers, &[]).await;
    let socket = cluster.dir.path().join("front.sock");
    let serving = front(&cluster, &socket).await;
    let what = format!("{} nodes behind the router", drivers.len());
    let dir = cluster.dir.path().to_owned();
    let ran = tokio::task::spawn_blocking(move || {
        assert_finds_nothing(&what, &socket, &dir, "\"node-", attach);
    });
    ran.await.expect("csi-sanity finds nothing");
    serving.abort();
    cluster.finish();
}

#[apply(device_test)]
async fn csi_sanity_finds_nothing_in_a_cluster_of_two() {
    sanity(&[&[], &[]], false).await;
}

#[apply(device_cases)]
async fn csi_sanity_finds_nothing_in_a_cluster_with_attachments(#[values(2, 3)] nodes: usize) {
    // csi-sanity attaches volumes to one node for which it has asked no topology. So the others have no room: each volume is
    // refused there, or not tried.
    let mut drivers: Vec<&[&str]> = vec![&["--enable-attach", "--overcommit", "0.000001"]; nodes];
    drivers[0] = &["--enable-attach", "--max-volumes-per-node", "4"];
    sanity(&drivers, true).await;
}

fn text(value: &Value) -> &str {
    value.as_str().unwrap_or_default()
}

/// In the style that all cases apply to. For the other one tests/suite/property.rs compares deltas through a router.
#[apply(device_test)]
async fn a_cluster_conforms() {
    let cluster = Cluster::start(PoolKind::Xfs, 3, &["--block-metadata-type", "fixed"]).await;
    let socket = cluster.dir.path().join("front.sock");
    let serving = front(&cluster, &socket).await;
    let mut command = tokio::process::Command::new(testkit::program("cbt-lab"));
    let output = command
        .args(["conformance", "--volume-size", "64Mi", "--modify-parameter", "readAheadKiB=512"])
        // One case after another: three drivers and a router have two cores here, and deadlines must fall inside streams.
        .args(["--jobs", "1", "--output", "json", "--endpoint"])
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
    eprintln!("cbt-lab conformance through the router to three nodes: {} cases", cases.len());
    assert!(cases.len() > 50, "only {} cases", cases.len());
    // A base that was deleted may be refused, and ours answers: allowed, and noted. 64 MiB hold no million ranges.
    let may = [
        ("base-deleted", "allowed"),
        ("base-deleted-again", "allowed"),
        ("allocated-many", "not-shown"),
        ("delta-many", "not-shown"),
        // The connection between router and node holds all ranges of 64 MiB. Without a router these are shown.
        ("allocated-deleted-meanwhile", "not-shown"),
        ("delta-deleted-meanwhile", "not-shown"),
        ("expanded-meanwhile", "not-shown"),
        ("cloned-meanwhile", "not-shown"),
        ("modified-between", "not-shown"),
    ];
    let is_one = |case: &&Value| may.contains(&(text(&case["name"]), text(&case["verdict"])));
    assert!(other.iter().all(is_one), "{other:#?}");
    let mut client = cluster.client();
    assert_eq!(client.volumes().await.expect("ListVolumes"), [], "volumes are left");
    assert_eq!(client.snapshots().await.expect("ListSnapshots"), [], "snapshots are left");
    serving.abort();
    cluster.finish();
}
