//! The goals of the first draft, each a test, with the real driver where the goal is about drivers: changes between any pair
//! of snapshots, also from deleted ones, at the granularity of a device block, with several block sizes, optional for drivers.

use testkit::content::Content;
use testkit::{BLOCK, MIB, PoolKind, Rig};
use tonic::Code;

use crate::driver::Driver;
use crate::world::{Program, World};

/// A program in front of a real driver.
async fn before(world: &mut World, rig: &Rig) -> Program {
    world.csi = rig.socket();
    world.start(&[]).await
}

/// All pages of three blocks.
async fn walk(
    program: &Program,
    base: &str,
    target: &str,
    parameters: &[(&str, &str)],
) -> Result<(Vec<(u64, u64, bool)>, u64), tonic::Status> {
    crate::walk::walk(program, (base, target), ("", 3), parameters).await
}

fn places(blocks: &[(u64, u64, bool)]) -> Vec<(u64, u64)> {
    blocks.iter().map(|(offset, size, _)| (*offset, *size)).collect()
}

pub async fn changes_between_any_pair_of_snapshots(mut world: World) {
    let mut rig = Rig::start(PoolKind::Btrfs).await;
    let (volume, device) = rig.block_volume("data", 64 * MIB).await;
    let mut content = Content::default();
    let mut snapshots = Vec::new();
    for round in 0..4u64 {
        for at in 0..8 {
            content.write(&device, (at * 1531 + round * 97) % 16_000, 1 + (at + round) % 5, 1 + round as u8);
        }
        content.discard(&device, round * 1531, 3);
        snapshots.push(rig.snapshot(&format!("s{round}"), &volume).await);
    }
    let program = before(&mut world, &rig).await;
    let mut changed = 0;
    for target in &snapshots {
        for base in &snapshots {
            let stream = rig.client.delta(base, target, 0, 0).await;
            let pages = walk(&program, base, target, &[]).await;
            match (stream, pages) {
                (Ok(stream), Ok((blocks, size))) => {
                    let expected: Vec<_> = stream.tuples().map(|tuple| (tuple.offset, tuple.size)).collect();
                    assert_eq!((places(&blocks), size), (expected, stream.capacity), "{base} to {target}");
                    changed += blocks.len();
                }
                // The driver may refuse a base that is newer: it has the last word.
                (Err(stream), Err(pages)) => assert_eq!(stream.code(), pages.code(), "{base} to {target}"),
                (stream, pages) => panic!("{base} to {target}: {stream:?} {pages:?}"),
            }
        }
        let stream = rig.client.allocated(target, 0, 0).await.expect("GetMetadataAllocated");
        let expected: Vec<_> = stream.tuples().map(|tuple| (tuple.offset, tuple.size)).collect();
        assert_eq!(places(&walk(&program, "", target, &[]).await.expect("pages").0), expected, "{target}");
    }
    assert!(changed > 60, "only {changed} blocks");
}

pub async fn changes_from_a_deleted_snapshot_or_all(mut world: World) {
    let mut rig = Rig::start_with(PoolKind::Btrfs, &["--retain-deleted", "4"], "info").await;
    let (volume, device, mut content) = rig.written_volume("data", 16 * MIB, (100, 8, 1)).await;
    let base = rig.snapshot("base", &volume).await;
    content.write(&device, 200, 2, 2);
    content.discard(&device, 102, 2);
    let target = rig.snapshot("target", &volume).await;
    let program = before(&mut world, &rig).await;
    let block = |at: u64, count: u64, is_zero: bool| (at * BLOCK, count * BLOCK, is_zero);
    let delta = vec![block(102, 2, true), block(200, 2, false)];
    assert_eq!(walk(&program, &base, &target, &[]).await.expect("pages").0, delta);
    rig.client.delete_snapshot(&base).await.expect("DeleteSnapshot");
    assert_eq!(rig.retained(), std::slice::from_ref(&base));
    assert_eq!(walk(&program, &base, &target, &[]).await.expect("pages of a deleted base").0, delta);
    // Where the driver keeps nothing of it, that is said, or all data has changed, as the user wants it.
    rig.terminate();
    rig.start_again_with(&["--retain-deleted", "0"]).await;
    testkit::eventually("nothing is retained", async || rig.retained().is_empty()).await;
    program.ready().await;
    let refused = walk(&program, &base, &target, &[]).await.expect_err("a base that is gone");
    assert_eq!(refused.code(), Code::NotFound);
    let (all, size) = walk(&program, &base, &target, &[("deletedBase", "all-changed")]).await.expect("pages");
    let blocks = 16 * MIB as u64 / BLOCK;
    assert_eq!(size, blocks * BLOCK);
    // The whole volume, in order and without a gap; what the target does not hold is zero.
    assert_eq!(
        all,
        [
            block(0, 100, true),
            block(100, 2, false),
            block(102, 2, true),
            block(104, 4, false),
            block(108, 92, true),
            block(200, 2, false),
            block(202, blocks - 202, true),
        ]
    );
    // A target that is gone is not made up for.
    let refused = walk(&program, &base, &base, &[("deletedBase", "all-changed")]).await;
    assert_eq!(refused.expect_err("no target").code(), Code::NotFound);
}

pub async fn the_smallest_change_is_a_device_block_and_block_sizes_vary(mut world: World) {
    let mut rig = Rig::start(PoolKind::Btrfs).await;
    let program = before(&mut world, &rig).await;
    for (block_size, bytes) in [("4Ki", 4 << 10), ("64Ki", 64 << 10), ("1Mi", 1 << 20)] {
        let (volume, device) = rig.block_volume_of(&format!("of-{block_size}"), 16 * MIB, block_size).await;
        let mut content = Content::default();
        content.write(&device, 0, 2048, 1);
        let base = rig.snapshot(&format!("base-{block_size}"), &volume).await;
        // One block of the device, the smallest thing that can be written.
        content.write(&device, 1029, 1, 2);
        let target = rig.snapshot(&format!("target-{block_size}"), &volume).await;
        let (blocks, _) = walk(&program, &base, &target, &[]).await.expect("pages");
        assert_eq!(blocks, [(1029 * BLOCK / bytes * bytes, bytes, false)], "{block_size}");
    }
}

pub async fn drivers_need_not_serve_it(world: World) {
    let _driver = Driver::start_with(&world.driver, &world.csi, None);
    world.ask_of_one("walk", "s0").await;
    let (program, token, url) = world.serves("walk", &[]).await;
    let (code, _, body) = program.get(&url, Some(&token)).await;
    assert_eq!((code, &body["reason"]), (501, &serde_json::Value::from("NotImplemented")));
}
