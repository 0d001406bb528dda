//! Promise: a node that is away fails calls about its own objects and no others.

use csi_client::{block_capability, new_volume};
use proto::{GetCapacityRequest, ListSnapshotsRequest};
use testkit::PoolKind;
use tonic::Code;

use testkit::cluster::{Cluster, Router, eventually, patiently};

#[apply(device_test)]
async fn a_node_that_is_killed_fails_its_own_objects_alone() {
    let mut cluster = Cluster::start(PoolKind::Dir, 2, &[]).await;
    let (here, there) = (cluster.volume_on(0, "here").await, cluster.volume_on(1, "there").await);
    let mut client = cluster.client();
    let snapshot = client.create_snapshot("there", &there).await.expect("CreateSnapshot").snapshot_id;
    let capacity = |node: usize| GetCapacityRequest {
        accessible_topology: Some(cluster.nodes[node].topology()),
        ..Default::default()
    };
    let (of_here, of_there) = (capacity(0), capacity(1));
    cluster.nodes[1].rig.kill();
    cluster.router().sees(1).await;

    for answer in [
        client.delete_volume(&there).await,
        client.create_snapshot("more", &there).await.map(drop),
        client.delete_snapshot(&snapshot).await,
        client.expand_volume(&there, 32 << 20).await.map(drop),
        client.allocated(&snapshot, 0, 0).await.map(drop),
    ] {
        let error = answer.expect_err("its node is away");
        assert_eq!(error.code(), Code::Unavailable, "{error}");
    }
    client.create_snapshot("of-here", &here).await.expect("CreateSnapshot");
    client.expand_volume(&here, 32 << 20).await.expect("expand");
    let new =
        client.create_volume(new_volume("new", 16 << 20, block_capability())).await.expect("CreateVolume");
    assert_eq!(cluster.node_of(&new.volume_id), 0);
    // What is listed is there; that something is missing is reported. A list of snapshots that lacks some is none.
    let listed = client.volumes().await.expect("ListVolumes").into_iter();
    let listed: Vec<String> = listed.map(|volume| volume.volume_id).collect();
    assert!(listed.contains(&here) && listed.contains(&new.volume_id) && !listed.contains(&there));
    let name = cluster.nodes[1].name();
    let missing =
        format!("deltapath_router_lists_incomplete_total{{method=\"ListVolumes\",node=\"{name}\"}} 1");
    let metrics = cluster.router().get("/metrics").await;
    assert!(metrics.contains(&missing), "{metrics}");
    let log = cluster.router().running.log();
    let said = |line: &&str| line.contains("nodes are missing from a list") && line.contains(&name);
    assert!(log.lines().any(|line| said(&line) && line.contains("ListVolumes")), "{log}");
    let status = client.snapshots().await.expect_err("not all of them").status;
    assert!(status.code() == Code::Unavailable && status.message().contains(&name), "{status}");
    let one = ListSnapshotsRequest { source_volume_id: here.clone(), ..Default::default() };
    let one = client.controller.list_snapshots(one).await.expect("those of a healthy node").into_inner();
    assert_eq!(one.entries.len(), 1);
    let capacity = client.controller.get_capacity(of_there).await.expect("GetCapacity").into_inner();
    assert_eq!((capacity.available_capacity, capacity.maximum_volume_size), (0, Some(0)));
    let capacity = client.controller.get_capacity(of_here).await.expect("GetCapacity").into_inner();
    assert!(capacity.available_capacity > 0);

    cluster.nodes[1].rig.start_again().await;
    patiently!(client.delete_snapshot(&snapshot)).expect("it is back");
    cluster.finish();
}

#[apply(device_test)]
async fn a_forgotten_node_is_an_operators_word_and_nothing_else() {
    let dir = tempfile::tempdir().expect("temp dir");
    let file = dir.path().join("forgotten");
    let flag = format!("--forgotten={}", file.display());
    let mut cluster = Cluster::start_with(PoolKind::Dir, 2, &[], &[&flag]).await;
    let lost = cluster.volume_on(1, "lost").await;
    let kept = cluster.volume_on(0, "kept").await;
    let mut client = cluster.client();
    let snapshot = client.create_snapshot("lost", &lost).await.expect("CreateSnapshot").snapshot_id;
    cluster.nodes[1].rig.kill();
    cluster.router().sees(1).await;
    // A router that has never seen the node knows no better, and says what to do.
    let fresh = cluster.another("fresh", &cluster.endpoints(), &[&flag], 1).await;
    for mut client in [client.clone(), fresh.client.clone()] {
        let error = client.delete_volume(&lost).await.expect_err("nobody said that it is gone");
        assert_eq!(error.code(), Code::Unavailable, "{error}");
    }
    let key = cluster.nodes[1].key.clone();
    let error = fresh.client.clone().delete_volume(&lost).await.expect_err("the same");
    assert!(error.status.message().contains(&format!("deltapath-router forget {key}")), "{error}");

    let forget = |key: &str| {
        let program = testkit::program("deltapath-router");
        let done = std::process::Command::new(program).args(["forget", key, &flag]).output().expect("run");
        (done.status.code(), String::from_utf8_lossy(&done.stderr).into_owned())
    };
    assert_eq!(forget("node-1").0, Some(2), "no key");
    assert_eq!(forget(&key), (Some(0), String::new()));
    for (mut client, has_seen_it) in [(client.clone(), true), (fresh.client.clone(), false)] {
        eventually("it is forgotten", async || client.delete_snapshot(&snapshot).await.is_ok()).await;
        client.delete_volume(&lost).await.expect("gone with its node");
        let error = client.create_snapshot("more", &lost).await.expect_err("it is gone");
        assert_eq!(error.code(), Code::NotFound, "{error}");
        let error = client.allocated(&snapshot, 0, 0).await.expect_err("it is gone");
        assert_eq!(error.code(), Code::NotFound, "{error}");
        // An address that has never answered may be any node's, until it is taken out of --node-endpoints.
        let all = client.snapshots().await.map(|all| all.len());
        assert_eq!(all.ok(), has_seen_it.then_some(0));
        client.create_snapshot("kept", &kept).await.map(drop).expect("the other node");
        let found = client.create_snapshot("kept", &kept).await.expect("found").snapshot_id;
        client.delete_snapshot(&found).await.expect("the other node");
    }
    // It comes back: nothing of it is used until somebody takes the word back.
    cluster.nodes[1].rig.start_again().await;
    let state = "deltapath_router_nodes{state=\"forgotten\"} 1";
    eventually("it is seen", async || cluster.router().get("/metrics").await.contains(state)).await;
    let error = client.create_snapshot("more", &lost).await.expect_err("still forgotten");
    assert_eq!(error.code(), Code::NotFound, "{error}");
    let error = client.delete_volume(&lost).await.expect_err("it lives");
    assert_eq!(error.code(), Code::FailedPrecondition, "{error}");
    assert!(error.status.message().contains(&cluster.nodes[1].name()), "{error}");
    std::fs::write(&file, "").expect("write");
    cluster.router().sees(2).await;
    client.create_snapshot("more", &lost).await.expect("it was there all the time");
    fresh.finish();
    cluster.finish();
}

/// Its certificate has ended, or another of its kind: somebody is there, and the router cannot say who.
#[apply(device_test)]
async fn nobody_is_told_to_forget_a_node_while_an_address_answers_otherwise() {
    let mut cluster = Cluster::start(PoolKind::Dir, 2, &[]).await;
    let there = cluster.volume_on(1, "there").await;
    cluster.nodes[1].rig.kill();
    let address = cluster.nodes[1].address.clone();
    let listener = tokio::net::TcpListener::bind(&address).await.expect("listen");
    let accepting = tokio::spawn(async move { while listener.accept().await.is_ok() {} });
    let fresh = cluster.another("fresh", &cluster.endpoints(), &[], 1).await;
    let error = fresh.client.clone().delete_volume(&there).await.expect_err("it is not known");
    let message = error.status.message();
    assert_eq!(error.code(), Code::Unavailable, "{error}");
    assert!(message.contains(&address) && message.contains("TLS") && !message.contains("forget"), "{error}");
    accepting.abort();
    cluster.nodes[1].rig.start_again().await;
    fresh.sees(2).await;
    fresh.client.clone().delete_volume(&there).await.expect("it lives");
    fresh.finish();
    cluster.finish();
}

/// It asks for the addresses of nodes in vain, or has no certificate to ask nodes with.
#[apply(device_cases)]
async fn a_router_that_can_ask_no_node_tells_nobody_to_forget_one(
    #[values(false, true)] has_certificate: bool,
) {
    let cluster = Cluster::empty();
    let other = tempfile::tempdir().expect("temp dir");
    let kubeconfig = cluster.dir.path().join("kubeconfig");
    let server = format!("https://127.0.0.1:{}", testkit::free_port());
    let config = serde_json::json!({
        "apiVersion": "v1", "kind": "Config", "current-context": "a",
        "clusters": [{"name": "a", "cluster": {"server": server}}],
        "contexts": [{"name": "a", "context": {"cluster": "a", "user": "a"}}],
        "users": [{"name": "a", "user": {"token": "a"}}],
    });
    std::fs::write(&kubeconfig, config.to_string()).expect("write");
    let kubeconfig = format!("--kubeconfig={}", kubeconfig.display());
    let flags = ["--node-service=deltapath/deltapath-nodes", &kubeconfig, "--node-timeout=1s"];
    let dir = if has_certificate { cluster.dir.path() } else { other.path() };
    let router = Router::start(dir, "router", &[], &flags).await;
    let id = format!("vol-0badcafe{}", "0".repeat(24));
    let error = router.client.clone().delete_volume(&id).await.expect_err("no node is known");
    assert_eq!(error.code(), Code::Unavailable, "{error}");
    let why = if has_certificate { "no address of a node is known" } else { "no certificate" };
    let message = error.status.message();
    assert!(message.contains(why) && !message.contains("forget"), "{error}");
    router.finish();
}
