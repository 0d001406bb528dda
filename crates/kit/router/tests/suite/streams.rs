//! Promise: a stream through the router is the node's own, to the byte and to the end.

use std::os::unix::fs::FileExt;
use std::time::Duration;

use csi_client::{Client, delta_of};
use testkit::PoolKind;
use tonic::{Code, Request};

use testkit::cluster::{Cluster, eventually};

/// MiB of a snapshot whose tuples are more than all buffers on the way take. A tuple has some 13 bytes, and the buffers of node and
/// router with their windows take 1.5 MiB.
pub const LONG: i64 = 768;

/// A snapshot with this many MiB of blocks that hold data, each a tuple.
pub async fn snapshot(cluster: &mut Cluster, node: usize, mib: i64) -> String {
    let rig = &mut cluster.nodes[node].rig;
    let (volume, device) = rig.block_volume("data", mib << 20).await;
    let device = std::fs::File::options().write(true).open(device).expect("open");
    for at in 0..mib as u64 {
        device.write_all_at(&vec![at as u8 | 1; 1 << 20], at << 20).expect("write");
    }
    device.sync_all().expect("sync");
    drop(device);
    cluster.client().create_snapshot("data", &volume).await.expect("CreateSnapshot").snapshot_id
}

async fn tidy(mut cluster: Cluster) {
    for node in &mut cluster.nodes {
        for volume in node.rig.client.volumes().await.expect("ListVolumes") {
            node.rig.detach(&volume.volume_id).await;
        }
    }
    cluster.finish();
}

pub fn question(snapshot_id: &str) -> proto::GetMetadataAllocatedRequest {
    proto::GetMetadataAllocatedRequest {
        snapshot_id: snapshot_id.to_owned(),
        max_results: 256,
        ..Default::default()
    }
}

#[apply(device_test)]
async fn messages_pass_as_the_node_sends_them() {
    let mut cluster = Cluster::start(PoolKind::Xfs, 2, &["--block-metadata-type", "fixed"]).await;
    // Not on the node that is asked where an id says nothing: the first by key.
    let far = usize::from(cluster.nodes[1].key > cluster.nodes[0].key);
    let base = snapshot(&mut cluster, far, 32).await;
    let mut client = cluster.client();
    let unknown = format!("snap-{}{}", cluster.nodes[far].key, "0".repeat(24));
    let own = &mut cluster.nodes[far].rig.client;
    let volume = own.volumes().await.expect("list").remove(0).volume_id;
    let target = client.create_snapshot("next", &volume).await.expect("CreateSnapshot").snapshot_id;
    for (offset, most) in [(0, 0), (0, 7), (4096 * 11, 256), (16 << 20, 0)] {
        let direct = own.allocated(&base, offset, most).await.expect("direct");
        assert!(direct.tuples().count() > 1000, "{}", direct.tuples().count());
        let routed = client.allocated(&base, offset, most).await.expect("through the router");
        assert_eq!(format!("{direct:?}"), format!("{routed:?}"));
        let direct = own.delta(&base, &target, offset, most).await.expect("direct");
        let routed = client.delta(&base, &target, offset, most).await.expect("through the router");
        assert_eq!(format!("{direct:?}"), format!("{routed:?}"));
    }
    // The node's own words: of offsets, of orders, of what is not there.
    for (question, code) in [
        (delta_of(&target, &base), Code::InvalidArgument),
        (delta_of(&base, &unknown), Code::NotFound),
        (delta_of(&base, ""), Code::InvalidArgument),
        (
            proto::GetMetadataDeltaRequest { starting_offset: -1, ..delta_of(&base, &target) },
            Code::OutOfRange,
        ),
    ] {
        let mut ends = Vec::new();
        for client in [&mut *own, &mut client] {
            let status = match client.metadata.get_metadata_delta(question.clone()).await {
                Err(status) => status,
                Ok(stream) => stream.into_inner().message().await.expect_err("no such delta"),
            };
            ends.push((status.code(), status.message().to_owned()));
        }
        assert_eq!(ends[0], ends[1]);
        assert_eq!(ends[0].0, code, "{question:?}");
    }
    let metrics = cluster.router().get("/metrics").await;
    let line = metrics.lines().find_map(|line| {
        line.strip_prefix("deltapath_router_stream_tuples_total{method=\"GetMetadataAllocated\"} ")
    });
    assert!(line.is_some_and(|count| count.parse::<u64>().is_ok_and(|count| count > 4000)), "{metrics}");
    tidy(cluster).await;
}

/// A client that takes little: the stream stands while it does not read.
async fn stalled(cluster: &Cluster, id: &str) -> tonic::Streaming<proto::GetMetadataAllocatedResponse> {
    let mut client = Client::connect_narrow(&cluster.router().socket, 65535).await.expect("connect");
    let mut stream =
        client.metadata.get_metadata_allocated(question(id)).await.expect("a stream").into_inner();
    stream.message().await.expect("a message").expect("a message");
    stream
}

#[apply(device_test)]
async fn a_stream_that_is_cut_says_so_and_goes_on_behind_its_last_tuple() {
    let mut cluster = Cluster::start(PoolKind::Xfs, 2, &["--block-metadata-type", "fixed"]).await;
    let id = snapshot(&mut cluster, 0, LONG).await;
    let whole = cluster.client().allocated(&id, 0, 0).await.expect("whole");
    let mut stream = stalled(&cluster, &id).await;
    // Stalled with it, and of the other node: nobody is held up.
    let other = cluster.volume_on(1, "other").await;
    let other = cluster.client().create_snapshot("other", &other).await.expect("CreateSnapshot").snapshot_id;
    cluster.nodes[0].rig.kill();
    cluster.client().allocated(&other, 0, 0).await.expect("of the other node");
    let mut last = 0;
    let status = loop {
        match stream.message().await {
            Ok(Some(message)) => {
                last =
                    message.block_metadata.last().map_or(last, |tuple| tuple.byte_offset + tuple.size_bytes);
            }
            Ok(None) => panic!("a stream that was cut ends with OK"),
            Err(status) => break status,
        }
    };
    assert_eq!(status.code(), Code::Unavailable, "{status}");
    assert!(last > 0, "nothing had come");
    cluster.nodes[0].rig.start_again().await;
    cluster.router().sees(2).await;
    let rest = cluster.client().allocated(&id, last, 0).await.expect("the rest");
    let behind: Vec<_> = whole.tuples().filter(|tuple| tuple.offset >= last as u64).collect();
    assert!(!behind.is_empty() && behind.len() < whole.tuples().count(), "it was cut in the middle");
    assert_eq!(behind, rest.tuples().collect::<Vec<_>>());
    tidy(cluster).await;
}

#[apply(device_test)]
async fn cancel_and_deadline_reach_the_node() {
    let mut cluster = Cluster::start(PoolKind::Xfs, 1, &["--block-metadata-type", "fixed"]).await;
    let id = snapshot(&mut cluster, 0, LONG).await;
    let log = || cluster.nodes[0].rig.log();
    let open = "deltapath_router_open_streams 1\n";
    let stream = stalled(&cluster, &id).await;
    assert!(cluster.router().get("/metrics").await.contains(open));
    drop(stream);
    eventually("the node knows that the client is gone", async || log().contains("the client is gone")).await;
    let none = "deltapath_router_open_streams 0\n";
    eventually("nothing is held", async || cluster.router().get("/metrics").await.contains(none)).await;

    let mut client = Client::connect_narrow(&cluster.router().socket, 65535).await.expect("connect");
    let mut request = Request::new(question(&id));
    request.set_timeout(Duration::from_secs(2));
    let mut stream = client.metadata.get_metadata_allocated(request).await.expect("a stream").into_inner();
    stream.message().await.expect("a message").expect("a message");
    eventually("the node's time is over too", async || {
        let log = log();
        log.contains("DeadlineExceeded") || log.matches("the client is gone").count() > 1
    })
    .await;
    let status = loop {
        match stream.message().await {
            Ok(Some(_)) => {}
            Ok(None) => panic!("a stream whose time is over ends with OK"),
            Err(status) => break status,
        }
    };
    assert!(matches!(status.code(), Code::DeadlineExceeded | Code::Cancelled), "{status}");
    tidy(cluster).await;
}
