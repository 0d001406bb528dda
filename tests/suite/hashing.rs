//! Hashing in the background: its order, and the damage that it finds and repairs.

use std::os::unix::fs::FileExt;
use std::path::Path;
use std::time::{Duration, Instant};

use base::BlockRange;
use cbt::{MapFile, MapWriter, SegmentIndex};

use crate::faults::{hashed, is_hashed, until, verify};
use testkit::prelude::*;

/// Whether a snapshot is compared with the one before, hashed to its end or not.
fn is_compared(rig: &Rig, snapshot: &str) -> bool {
    MapFile::open(&rig.snapshot_dir(snapshot).changed()).is_ok_and(|map| map.is_exact())
}

fn fill(device: &Path, size: u64) {
    let (device, bytes) = (open_device(device), vec![7; 4 << 20]);
    for at in (0..size).step_by(bytes.len()) {
        device.write_all_at(&bytes, at).expect("write");
    }
}

/// The incident: a first snapshot of gigabytes was hashed completely before any other snapshot had its turn.
#[apply(device_test)]
async fn a_large_first_snapshot_holds_up_no_comparison() {
    let mut rig = Rig::start_with(PoolKind::Xfs, &[], "warn").await;
    let (large, large_device) = rig.block_volume("large", 3 << 30).await;
    let (small, small_device) = rig.block_volume("small", 64 * MIB).await;
    fill(&large_device, 3 << 30);
    let mut content = Content::default();
    content.write(&large_device, 0, 1, 1);
    let first = rig.snapshot("the first of the large one", &large).await;
    content.write(&large_device, 100, 50, 2);
    content.write(&small_device, 0, 100, 1);
    let second = rig.snapshot("the second of the large one", &large).await;
    rig.snapshot("the first of the small one", &small).await;
    content.write(&small_device, 10, 50, 3);
    let other = rig.snapshot("the second of the small one", &small).await;
    until("compared", || is_compared(&rig, &other) && is_compared(&rig, &second)).await;
    assert!(!is_hashed(&rig.snapshot_dir(&first)), "the large one came first");
    rig.detach(&large).await;
    rig.detach_and_finish(&small).await;
}

/// The incident: while a first snapshot was hashed, another volume's writes fell to a sixteenth of their rate. Now hashing
/// falls to a sixteenth of its rate instead.
#[apply(device_test)]
async fn hashing_gives_way_to_writes_and_goes_on_behind_them() {
    let mut rig = Rig::start_with(PoolKind::Xfs, &[], "warn").await;
    let (written, device) = rig.block_volume("written", 64 * MIB).await;
    let device = open_device(&device);
    let (volume, data) = rig.block_volume("read", 512 * MIB).await;
    fill(&data, 512 * MIB as u64);
    open_device(&data).sync_all().expect("sync");
    let snapshot = rig.snapshot("snapshot", &volume).await;
    let snapshot = rig.snapshot_dir(&snapshot);
    let pending = || MapFile::open(&snapshot.pending()).and_then(|map| map.count()).expect("pending");
    let (all, began) = (512 * MIB as u64 / BLOCK, Instant::now());
    while began.elapsed() < Duration::from_secs(3) {
        device.write_all_at(&[1; 4096], 0).and_then(|()| device.sync_data()).expect("write");
    }
    let (left, beside) = (pending(), began.elapsed());
    let began = Instant::now();
    until("hashed", || pending() == 0).await;
    // The machine may be busy, but it is so in both.
    let (rate, alone) =
        ((all - left) as f64 / beside.as_secs_f64(), left as f64 / began.elapsed().as_secs_f64());
    assert!(
        left > 0 && rate * 3.0 < alone,
        "{left} of {all} blocks are left: {rate} and then {alone} a second"
    );
    rig.detach(&volume).await;
    drop(device);
    rig.detach_and_finish(&written).await;
}

/// On btrfs each `allocated` map is made from the one before, so all later maps inherited an error.
#[apply(device_cases)]
async fn an_allocated_map_that_is_wrong_is_found_and_mended_with_those_before_it(
    #[values("4Ki", "64Ki")] block_size: &str,
) {
    let mut rig = Rig::start_with(PoolKind::Btrfs, &[], "warn").await;
    let (volume, device) = rig.block_volume_of("volume", 64 * MIB, block_size).await;
    let block = if block_size == "4Ki" { BLOCK } else { 16 * BLOCK };
    let mut content = Content::default();
    content.write(&device, 0, 1600, 1);
    let mut taken = Vec::new();
    for name in ["first", "second"] {
        let id = rig.snapshot(name, &volume).await;
        hashed(&rig, &[&id]).await;
        taken.push((id, content.clone()));
        content.write(&device, 1500, 1, 2);
    }
    for (id, _) in &taken {
        let path = rig.snapshot_dir(id).allocated();
        let sound = MapFile::open(&path).expect("open");
        let wrong = path.with_extension("wrong");
        let mut writer = MapWriter::create(&wrong, sound.header().clone()).expect("create");
        let blocks = 1600 * BLOCK / block;
        writer.insert(BlockRange::new(0, 5)).expect("insert");
        writer.insert(BlockRange::new(6, blocks + 2)).expect("insert");
        writer.finish().expect("finish");
        std::fs::rename(&wrong, &path).expect("replace");
    }
    content.write(&device, 1000, 10, 3);
    let last = rig.snapshot("last", &volume).await;
    taken.push((last, content.clone()));
    for (id, content) in &taken {
        let expected = content.allocated(block);
        let mended = || {
            let map = MapFile::open(&rig.snapshot_dir(id).allocated())
                .expect("open")
                .segment(SegmentIndex(0))
                .expect("segment");
            map.iter().map(u64::from).eq(expected.iter().copied())
        };
        until("mended", mended).await;
        let list = rig.client.allocated(id, 0, 0).await.expect("allocated");
        assert_eq!(blocks_of(&list, block), expected, "{block_size}");
    }
    for pair in taken.windows(2) {
        let list = rig.client.delta(&pair[0].0, &pair[1].0, 0, 0).await.expect("delta");
        assert_eq!(blocks_of(&list, block), pair[1].1.changed_since(&pair[0].1, block), "{block_size}");
    }
    verify(&rig);
    rig.detach_and_finish(&volume).await;
}

/// Once the bytes of a deleted snapshot are freed, only its hashes are left, so damaged pages of hashes must be made again
/// before. They were not, and deltas across the snapshot failed from then on.
#[apply(device_test)]
async fn damaged_hashes_are_made_again_before_the_bytes_go() {
    let mut rig = Rig::start_with(PoolKind::Btrfs, &[], "warn").await;
    let (volume, device, before) = rig.written_volume("volume", 64 * MIB, (0, 1000, 1)).await;
    let base = rig.snapshot("base", &volume).await;
    let dir = rig.snapshot_dir(&base);
    hashed(&rig, &[&base]).await;
    let hashes = std::fs::File::options().write(true).open(dir.hashes()).expect("open");
    hashes.write_all_at(b"damage", 3 * 4096 + 100).expect("damage a page");
    drop(hashes);
    rig.client.delete_snapshot(&base).await.expect("delete");
    until("freed", || !dir.bytes().exists()).await;
    assert_eq!(rig.retained(), std::slice::from_ref(&base));
    let mut after = before.clone();
    after.write(&device, 400, 50, 2);
    after.write(&device, 450, 50, 1);
    let target = rig.snapshot("target", &volume).await;
    assert_eq!(rig.changed(&base, &target).await, after.changed_since(&before, BLOCK));
    rig.detach_and_finish(&volume).await;
}
