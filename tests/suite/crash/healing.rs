//! A damaged block map is made again while steps fail.

use std::time::Duration;

use base::{Block, BlockRange};
use cbt::{MapFile, MapWriter};
use csi_client::Error;
use proto::GetMetadataAllocatedRequest;
use tonic::Request;

use crate::faults::{is_hashed, until};
use testkit::orders::{Cut, Orders, Point};
use testkit::prelude::*;

/// The incident: the new map was renamed over the damaged one, the sync of the directory failed, and the rename was undone.
/// Neither map existed any more.
#[apply(device_test)]
async fn a_map_that_is_made_again_is_there_whichever_step_fails(rig: Rig<Dir>) {
    let (volume, _, content) = rig.written_volume("volume", 8 * MIB, (10, 100, 1)).await;
    let snapshot = rig.snapshot("snapshot", &volume).await;
    let map = rig.pool_dir().join("snapshots").join(&snapshot).join("allocated.map");
    let mut orders = Orders::new(rig.dir.path());
    let mut failed = 0;
    for at in 1.. {
        // Too short for a trailer, so the whole map counts as damaged.
        std::fs::write(&map, "damaged").expect("damage the map");
        orders.give(Cut::Error(nix::libc::EIO), at, "calls");
        let answer: Result<_, Error> = rig.client.allocated(&snapshot, 0, 0).await;
        let hit = orders.withdraw().iter().any(|point| point.hit);
        assert!(map.exists(), "point {at}: the map is gone");
        let left = map.with_extension("map.new").exists();
        assert!(!left, "point {at}: a draft is left");
        let list = match answer {
            Ok(list) => list,
            Err(error) => {
                failed += 1;
                assert!(hit, "point {at}: {error}");
                rig.client.allocated(&snapshot, 0, 0).await.expect("the next call makes it")
            }
        };
        assert_eq!(blocks_of(&list, BLOCK), content.allocated(BLOCK), "point {at}");
        if !hit {
            break;
        }
    }
    assert!(failed > 3, "only {failed} steps failed");
    rig.detach(&volume).await;
}

/// The incident: a map was made again while the volume's history was locked, and continued even if the client was gone. On a
/// large volume every snapshot and deletion waited for it.
#[apply(device_test)]
async fn a_map_that_is_made_again_holds_up_no_other_call_and_ends_with_its_own(rig: Rig<Xfs>) {
    let (volume, _, content) = rig.written_volume("volume", 8 * MIB, (10, 100, 1)).await;
    let snapshot = rig.snapshot("snapshot", &volume).await;
    let dir = rig.snapshot_dir(&snapshot);
    until("hashed", || is_hashed(&dir)).await;
    std::fs::write(dir.allocated(), "damaged").expect("damage the map");
    let mut orders = Orders::new(rig.dir.path());
    orders.hold(1, "calls", 6000);
    let asking = tokio::spawn({
        let (mut client, snapshot_id) = (rig.client.metadata.clone(), snapshot.clone());
        async move {
            let mut request = Request::new(GetMetadataAllocatedRequest { snapshot_id, ..Default::default() });
            request.set_timeout(Duration::from_secs(4));
            client.get_metadata_allocated(request).await.expect_err("too late");
        }
    });
    orders.reached(&asking).await;
    rig.snapshot("another", &volume).await;
    assert!(!asking.is_finished(), "the other call waited");
    asking.await.expect("asking");
    let draft = dir.allocated().with_extension("map.new");
    until("the map's end", || rig.log().contains("gone") && !draft.exists()).await;
    assert!(MapFile::open(&dir.allocated()).is_err(), "the map was completed although the client was gone");
    orders.withdraw();
    assert_eq!(rig.allocated(&snapshot).await, content.allocated(BLOCK));
    rig.detach(&volume).await;
}

/// A map that is wrong is replaced by the hashing thread, one that is damaged by the call that needs it: one after the other.
#[apply(device_test)]
async fn a_wrong_map_is_replaced_under_the_lock_of_those_who_heal_it(rig: Rig<Btrfs>) {
    let (volume, _, content) = rig.written_volume("volume", 8 * MIB, (10, 100, 1)).await;
    let snapshot = rig.snapshot("snapshot", &volume).await;
    let dir = rig.snapshot_dir(&snapshot);
    until("hashed", || is_hashed(&dir)).await;
    // A map without the last block, and one block to hash, after which the map is checked.
    let make_wrong = || {
        for (path, blocks) in [(dir.allocated(), 10..109), (dir.pending(), 10..11)] {
            let header = MapFile::open(&path).expect("open").header().clone();
            std::fs::remove_file(&path).expect("remove");
            let mut writer = MapWriter::create(&path, header).expect("create");
            writer.insert(BlockRange { start: Block(blocks.start), end: Block(blocks.end) }).expect("insert");
            writer.finish().expect("finish");
        }
    };
    let is_wrong =
        || MapFile::open(&dir.allocated()).and_then(|map| map.count()).is_ok_and(|count| count == 99);
    let mut orders = Orders::new(rig.dir.path());
    assert!(rig.terminate().success());
    make_wrong();
    orders.give(Cut::Kill, 1 << 20, "hashing");
    rig.start_again().await;
    until("the map is right", || !is_wrong() && is_hashed(&dir)).await;
    let replaced = |point: &&Point| point.step == "replace" && point.path.ends_with("allocated.map");
    let replaced = orders.withdraw().iter().find(replaced).expect("it is replaced").number;

    assert!(rig.terminate().success());
    make_wrong();
    orders.hold(replaced, "hashing", 4000);
    rig.start_again().await;
    until("the step is held", || orders.passed().iter().any(|point| point.hit)).await;
    std::fs::write(dir.allocated(), "damaged").expect("damage the map");
    let asking = tokio::spawn({
        let (mut client, snapshot) = (rig.client.clone(), snapshot.clone());
        async move { client.allocated(&snapshot, 0, 0).await }
    });
    tokio::time::sleep(Duration::from_secs(1)).await;
    assert!(!asking.is_finished(), "it was made again while it was being replaced");
    let list = asking.await.expect("join").expect("allocated");
    assert_eq!(blocks_of(&list, BLOCK), content.allocated(BLOCK));
    orders.withdraw();
    rig.detach(&volume).await;
}
