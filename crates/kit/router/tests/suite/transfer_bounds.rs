//! Promise: a copy is as large as its volume may be, and its reader gets no more of a node than a copy needs.

use csi_client::{from_snapshot, mount_capability, new_volume};
use proto::transfer::transfer_client::TransferClient;
use proto::transfer::{BlocksRequest, MapRequest, OpenRequest};
use serve::identity::Role;
use testkit::PoolKind::Dir;
use testkit::cluster::{Cluster, PATIENCE, within};
use testkit::played::tls;
use tonic::Code;

use crate::transfers::nothing_is_left;

#[apply(device_cases)]
async fn a_filesystem_is_restored_no_larger_than_it_can_grow(#[values(0, 1)] node: usize) {
    let mut cluster = Cluster::start(Dir, 2, &[]).await;
    let rig = &mut cluster.nodes[0].rig;
    let (origin, _) = rig.published("small", 16 << 20, mount_capability("ext4")).await;
    let mut client = cluster.client();
    let snapshot = client.create_snapshot("small", &origin).await.expect("CreateSnapshot").snapshot_id;
    let mut request = new_volume("large", 1 << 40, mount_capability("ext4"));
    request.volume_content_source = Some(from_snapshot(&snapshot));
    let request = within(&[cluster.nodes[node].topology()], request);
    let error = client.create_volume(request).await.expect_err("its ext4 does not grow to that");
    assert_eq!(error.code(), Code::OutOfRange, "{error}");
    assert!(error.status.message().contains("too small to grow"), "{error}");
    nothing_is_left(&cluster).await;
    cluster.nodes[0].rig.detach(&origin).await;
    cluster.finish();
}

/// A RoaringBitmap of the blocks 0 to 32,767: one container of one run.
const MANY: [u8; 15] = [0x3b, 0x30, 0, 0, 1, 0, 0, 0xff, 0x7f, 1, 0, 0, 0, 0xff, 0x7f];

#[apply(device_test)]
async fn a_node_opens_and_asks_for_no_more_than_it_needs() {
    let mut cluster = Cluster::start(Dir, 2, &[]).await;
    let mut client = cluster.client();
    let (origin, _) = cluster.nodes[0].rig.block_volume("origin", 128 << 20).await;
    let snapshot = client.create_snapshot("first", &origin).await.expect("CreateSnapshot").snapshot_id;
    let [source, reader] = [0, 1].map(|node| cluster.nodes[node].key.clone());
    let router = tls(cluster.dir.path(), "router", Role::Router);
    let node = tls(cluster.dir.path(), &cluster.nodes[1].name(), Role::Node(reader.clone()));
    let mut node = TransferClient::new(node.channel(&cluster.nodes[0].address, &source, PATIENCE, 1 << 20));
    let open = |key: &str, number: u32| OpenRequest {
        ticket: router.signer().expect("loaded").issue(&snapshot, &reader).expect("a ticket"),
        source_id: snapshot.clone(),
        volume_id: format!("vol-{key}{number:024x}"),
    };
    let status = node.open(open(&source, 1)).await.expect_err("for a volume of another node");
    assert_eq!(status.code(), Code::InvalidArgument, "{status}");
    let point = node.open(open(&reader, 0)).await.expect("Open").into_inner().point;
    let many = BlocksRequest { point, segment: 0, blocks: MANY.into(), without_holes: true };
    let status = node.hashes(many.clone()).await.expect_err("more than are compared at once");
    assert_eq!(status.code(), Code::OutOfRange, "{status}");
    let mut answer = node.read(many).await.expect("a stream").into_inner();
    let status = answer.message().await.expect_err("more than is fetched at once");
    assert_eq!(status.code(), Code::OutOfRange, "{status}");
    // What it has not used for longest is closed.
    let mut points = Vec::new();
    for number in 1..=32 {
        points.push(node.open(open(&reader, number)).await.expect("Open").into_inner().point);
    }
    let mut is_open = Vec::new();
    for point in points {
        match node.map(MapRequest { point, segment: 0 }).await {
            Ok(_) => is_open.push(true),
            Err(status) => {
                assert_eq!(status.code(), Code::Aborted, "{status}");
                assert!(status.message().contains("open it again"), "{status}");
                is_open.push(false);
            }
        }
    }
    assert_eq!(is_open, [[false; 16], [true; 16]].concat());
    cluster.nodes[0].rig.detach(&origin).await;
    cluster.finish();
}
