//! Promise: while a volume is copied, or only begun, its name is that volume's: a call for it that allows other nodes ends neither
//! the copy nor the volume, and makes no second one.

use csi_client::from_snapshot;
use proto::node::AbandonRequest;
use proto::node::node_client::NodeClient;
use serve::identity::Role;
use testkit::PoolKind::Dir;
use testkit::cluster::{Cluster, PATIENCE, patiently};
use testkit::played::tls;
use tonic::Code;

use crate::transfers::{begun, nothing_is_left, on, patiently_begun, staging, written};

#[apply(device_test)]
async fn a_copy_that_somebody_asks_for_is_ended_by_no_call_that_allows_another_node() {
    let mut cluster = Cluster::start(Dir, 3, &["--transfer-rate", "512Ki"]).await;
    let (origin, ..) = written(&mut cluster, 12).await;
    let mut client = cluster.client();
    let snapshot = client.create_snapshot("first", &origin).await.expect("CreateSnapshot").snapshot_id;
    cluster.nodes[0].rig.detach(&origin).await;
    let [first, second] = [1, 2].map(|node| on(&cluster, node, "one", from_snapshot(&snapshot)));
    let id = begun(&cluster, &first).await;
    for _ in 0..2 {
        let error = client.create_volume(second.clone()).await.expect_err("it is copied to another node");
        assert_eq!(error.code(), Code::Aborted, "{error}");
        assert!(error.status.message().contains(&cluster.nodes[1].name()), "{error}");
        assert_eq!(begun(&cluster, &first).await, id);
        assert!(staging(&cluster, 2).is_empty(), "{:?}", staging(&cluster, 2));
    }
    // Nobody asks for it any more: it gives way.
    let other = patiently_begun(&cluster, &second).await;
    assert_eq!(cluster.node_of(&other), 2);
    assert!(staging(&cluster, 1).is_empty(), "{:?}", staging(&cluster, 1));
    client.delete_volume(&other).await.expect("DeleteVolume");
    nothing_is_left(&cluster).await;
    cluster.finish();
}

/// A claim waited for an hour, until the driver removed the older copy: that one's node had been away, and nobody alive knew of it
/// when the other was begun. If the other has become the volume meanwhile, no call comes any more.
#[apply(device_cases)]
async fn of_two_copies_of_a_name_one_ends_and_the_other_becomes_the_volume(
    #[values(false, true)] is_made: bool,
) {
    let mut cluster = Cluster::start(Dir, 3, &["--transfer-rate", "1Mi"]).await;
    let (origin, ..) = written(&mut cluster, 12).await;
    let snapshot =
        cluster.client().create_snapshot("first", &origin).await.expect("CreateSnapshot").snapshot_id;
    cluster.nodes[0].rig.detach(&origin).await;
    let [first, second] = [1, 2].map(|node| on(&cluster, node, "one", from_snapshot(&snapshot)));
    begun(&cluster, &first).await;
    cluster.nodes[1].rig.kill();
    // The choice of the node for the name is in their memory.
    for node in [0, 2] {
        cluster.nodes[node].rig.kill();
        cluster.nodes[node].rig.start_again().await;
    }
    let fresh = cluster.another("fresh", &cluster.endpoints(), &[], 2).await;
    let mut client = fresh.client.clone();
    let error = client.create_volume(second.clone()).await.expect_err("it is copied");
    assert_eq!(error.code(), Code::Aborted, "{error}");
    if is_made {
        patiently!(client.create_volume(second.clone())).expect("CreateVolume");
    }
    assert!(!staging(&cluster, 1).is_empty(), "a copy");
    cluster.nodes[1].rig.start_again().await;
    fresh.sees(3).await;
    if !is_made {
        assert!(!staging(&cluster, 2).is_empty(), "another copy");
        let made = patiently!(client.create_volume(second.clone())).expect("CreateVolume").volume_id;
        assert_eq!(cluster.node_of(&made), 2);
    }
    nothing_is_left(&cluster).await;
    assert!(!fresh.get("/metrics").await.contains("volumes_made_twice"), "there was one volume at any time");
    fresh.finish();
    cluster.finish();
}

/// The volume may be whole by the time that its copy is ended.
#[apply(device_test)]
async fn what_ends_a_copy_ends_no_volume() {
    let mut cluster = Cluster::start(Dir, 1, &[]).await;
    let volume = cluster.volume_on(0, "whole").await;
    let router = tls(cluster.dir.path(), "router", Role::Router);
    let channel = router.channel(&cluster.nodes[0].address, &cluster.nodes[0].key, PATIENCE, 1 << 20);
    let mut node = NodeClient::new(channel);
    let request = |volume_id: &str| AbandonRequest { volume_id: volume_id.to_owned(), ..Default::default() };
    let answer = node.abandon(request(&volume)).await.expect("Abandon").into_inner();
    assert!(answer.is_volume);
    let unknown = format!("vol-{}{}", cluster.nodes[0].key, "0".repeat(24));
    let answer = node.abandon(request(&unknown)).await.expect("Abandon").into_inner();
    assert!(!answer.is_volume);
    assert_eq!(cluster.nodes[0].rig.client.volumes().await.expect("ListVolumes").len(), 1);
    cluster.finish();
}

/// What is begun is held up before its first step on the source's node: there it is no volume yet, and on another node no copy.
#[apply(device_cases)]
async fn a_volume_that_is_begun_is_not_begun_on_another_node(#[values(0, 1)] at: usize) {
    const HELD: u32 = 8000;
    let mut cluster = Cluster::start(Dir, 3, &[]).await;
    let (origin, ..) = written(&mut cluster, 1).await;
    let source = csi_client::from_volume(&origin);
    let [first, second] = [at, 2].map(|node| on(&cluster, node, "one", source.clone()));
    let mut orders = testkit::orders::Orders::new(cluster.nodes[0].rig.dir.path());
    orders.hold(1, "calls", HELD);
    let mut controller = cluster.client().controller;
    let mut request = tonic::Request::new(first.clone());
    request.set_timeout(std::time::Duration::from_secs(1));
    let status = controller.create_volume(request).await.expect_err("it takes longer than that");
    assert!(matches!(status.code(), Code::DeadlineExceeded | Code::Cancelled), "{status}");
    let mut client = cluster.client();
    let error = loop {
        let error = client.create_volume(second.clone()).await.expect_err("it is begun on another node");
        assert_eq!(error.code(), Code::Aborted, "{error}");
        // The router may still be about to give the first call up.
        if !error.status.message().contains("another call is in progress") {
            break error;
        }
        tokio::time::sleep(std::time::Duration::from_millis(20)).await;
    };
    let said = format!("may still make \"one\" on node {}", cluster.nodes[at].name());
    assert!(error.status.message().contains(&said), "{error}");
    let made = patiently!(client.create_volume(first.clone())).expect("CreateVolume").volume_id;
    assert_eq!(cluster.node_of(&made), at);
    orders.withdraw();
    let error = client.create_volume(second).await.expect_err("it is on another node");
    assert_eq!(error.code(), Code::AlreadyExists, "{error}");
    cluster.nodes[0].rig.detach(&origin).await;
    nothing_is_left(&cluster).await;
    cluster.finish();
}
