//! Promise: a copy on another node takes about as much space as one on the same node, whatever the block size is.

use std::os::unix::fs::MetadataExt;

use csi_client::from_snapshot;
use testkit::PoolKind::{self, Btrfs, Dir, Xfs};
use testkit::content::Content;
use testkit::{BLOCK, MIB};

use crate::transfers::{COPIED, assert_same, data, logged, nothing_is_left, on};
use testkit::cluster::{Cluster, patiently};

const LARGE: u64 = 4 * MIB as u64;
const BLOCKS: u64 = 100;

#[apply(device_cases)]
async fn holes_inside_blocks_stay_holes(
    #[values([Dir, Dir], [Xfs, Dir], [Dir, Xfs], [Btrfs, Btrfs])] pools: [PoolKind; 2],
) {
    let mut cluster = Cluster::start_mixed(&pools.map(|pool| (pool, &[][..])), &[]).await;
    let mut client = cluster.client();
    let size = ((BLOCKS + 3) * LARGE) as i64;
    let (origin, device) = cluster.nodes[0].rig.block_volume_of("origin", size, "4Mi").await;
    let mut content = Content::default();
    for block in 0..BLOCKS {
        // Also at both ends of a block, and zeros that were written.
        let within = [0, LARGE / BLOCK - 1, block * 37 % (LARGE / BLOCK)][block as usize % 3];
        content.write(&device, block * LARGE / BLOCK + within, 1, (block % 200) as u8);
    }
    let first = client.create_snapshot("first", &origin).await.expect("CreateSnapshot").snapshot_id;
    // A part of a block that held data holds none in the second snapshot, and others hold more.
    let last = LARGE / BLOCK * (BLOCKS - 1);
    content.write(&device, 1, 1, 201);
    content.write(&device, last + 7, 3, 202);
    let second = client.create_snapshot("second", &origin).await.expect("CreateSnapshot").snapshot_id;
    content.discard(&device, last + 7, 2);
    let third = client.create_snapshot("third", &origin).await.expect("CreateSnapshot").snapshot_id;
    for (number, snapshot) in [first, second, third].into_iter().enumerate() {
        let mut copy = [String::new(), String::new()];
        for (node, id) in copy.iter_mut().enumerate() {
            let mut request = on(&cluster, node, &format!("copy-{number}-{node}"), from_snapshot(&snapshot));
            request.capacity_range = Some(proto::CapacityRange { required_bytes: size, limit_bytes: 0 });
            *id = patiently!(client.create_volume(request.clone())).expect("CreateVolume").volume_id;
        }
        let [here, there] = [0, 1].map(|node: usize| data(&cluster, node, "volumes", &copy[node]));
        assert_same(&here, &there);
        let taken = [&here, &there].map(|file| std::fs::metadata(file).expect("stat").blocks() * 512);
        assert!(taken[1] <= taken[0] + BLOCKS * BLOCK, "{taken:?} bytes, of snapshot {number}");
        let received = logged(&cluster.nodes[1].rig.log(), COPIED, "received");
        assert!(received <= 2 * BLOCKS * BLOCK, "{received} bytes were received for snapshot {number}");
        let mut maps = Vec::new();
        for id in &copy {
            let held = client.create_snapshot(&format!("of-{id}"), id).await.expect("CreateSnapshot");
            maps.push(client.allocated(&held.snapshot_id, 0, 0).await.expect("allocated"));
        }
        assert_eq!(maps[0], maps[1], "what snapshot {number} and its copy list");
    }
    nothing_is_left(&cluster).await;
    cluster.nodes[0].rig.detach(&origin).await;
    cluster.finish();
}
