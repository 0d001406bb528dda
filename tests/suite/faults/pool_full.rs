//! The pool becomes full. Calls that need space report that, leave nothing half-made, and work again when there is space.
//! Calls that need no space work, and so do those that free it.

use std::os::unix::fs::FileExt;
use std::path::Path;

use super::{
    Ballast, Disk, StorageTrouble, Trouble, assert_nothing_half_made, hashed, health, is_hashed, is_reported,
    listed, probe, storage, storage_tells, until, unwell, verify,
};
use deltapath::sys::{freeze, mount};
use testkit::content::block_bytes;
use testkit::prelude::*;

/// A driver on a pool of some hundred megabytes, and its disk if the pool is not an image. The fields have this order because
/// the disk must be freed after the driver.
async fn small_pool(pool: PoolKind) -> (Option<Disk>, Rig) {
    small_pool_with(pool, &[]).await
}

/// The same with further flags.
pub async fn small_pool_with(pool: PoolKind, flags: &[&str]) -> (Option<Disk>, Rig) {
    pool_with(pool, if pool == PoolKind::Dir { 320 } else { 400 }, flags).await
}

/// The same of another size.
pub async fn small_pool_of(pool: PoolKind, mib: i64) -> (Option<Disk>, Rig) {
    pool_with(pool, mib, &[]).await
}

async fn pool_with(pool: PoolKind, mib: i64, flags: &[&str]) -> (Option<Disk>, Rig) {
    match pool {
        PoolKind::Dir => {
            let disk = Disk::ext4((mib as u64) << 20);
            let rig = disk.rig(pool, flags).await;
            (Some(disk), rig)
        }
        PoolKind::Xfs | PoolKind::Btrfs => {
            let size = format!("{mib}Mi");
            (None, Rig::start_with(pool, &[flags, &["--pool-size", &size]].concat(), "info").await)
        }
    }
}

pub fn finish(rig: Rig, disk: Option<Disk>) {
    let log = rig.log();
    assert!(!log.contains("panicked"), "{log}");
    rig.finish();
    if let Some(disk) = disk {
        disk.finish();
    }
}

/// Checks that the call failed for lack of space, and that the message says what to do.
#[track_caller]
fn exhausted<T>(answer: Result<T, impl testkit::Refusal>) {
    let said = ["No space left on device", "delete volumes or snapshots"];
    is_refused(answer, Code::ResourceExhausted, &said);
}

fn write_and_sync(device: &Path, block: u64, count: u64) -> std::io::Result<()> {
    let file = open_device(device);
    for block in block..block + count {
        file.write_all_at(&block_bytes(block, 9), block * BLOCK)?;
    }
    file.sync_all()
}

#[apply(every_pool)]
async fn a_full_pool_says_so_and_works_again(pool: PoolKind) {
    let (disk, mut rig) = small_pool(pool).await;
    let (volume, device, before) = rig.written_volume("written", 64 * MIB, (100, 1000, 1)).await;
    let base = rig.snapshot("base", &volume).await;
    let mut after = before.clone();
    after.write(&device, 300, 50, 2);
    after.discard(&device, 1000, 10);
    let target = rig.snapshot("target", &volume).await;
    let idle = rig.client.create_volume(new_volume("idle", MIB, block_capability())).await.expect("create");
    let (files, root) = rig.published("files", 16 * MIB, mount_capability("ext4")).await;
    std::fs::write(root.join("file"), "here").expect("write");
    rig.detach(&files).await;
    hashed(&rig, &[&base, &target]).await;
    let before_it = listed(&rig).await;
    assert_eq!(health(&rig, &volume).await, []);

    let ballast = Ballast::fill(&rig.pool_dir()).with_metadata();
    // Only the writer gets the error. The write needs new blocks, since the old ones are shared with the snapshot or
    // were holes.
    write_and_sync(&device, 8000, 2000).expect_err("no room for a write");
    probe(&rig).await.expect("a full pool is well: deletions still work");
    let short = ["the pool has ", "writes will fail"];
    is_reported(&rig, &volume, "PoolShortOfSpace", Trouble::Degraded, &short).await;
    assert_eq!(unwell(&rig, 2).await.len(), 3, "all volumes share the pool");
    storage_tells(&storage(&rig).await, "PoolShortOfSpace", StorageTrouble::StorageDegraded);
    // Existing volumes can be used as before.
    for _ in 0..3 {
        rig.attach(&idle.volume_id).await;
        rig.detach(&idle.volume_id).await;
        let root = rig.publish(&files, mount_capability("ext4")).await;
        assert_eq!(std::fs::read_to_string(root.join("file")).expect("read"), "here");
        rig.detach(&files).await;
    }
    let failing = async |rig: &mut Rig| {
        exhausted(rig.client.create_volume(new_volume("fresh", 8 * MIB, block_capability())).await);
        exhausted(rig.client.create_snapshot("third", &volume).await);
        exhausted(rig.client.create_group("group", &[volume.clone(), idle.volume_id.clone()]).await);
        for (name, source) in [("restored", from_snapshot(&base)), ("cloned", from_volume(&volume))] {
            let request = new_volume_from(name, 64 * MIB, block_capability(), source);
            exhausted(rig.client.create_volume(request).await);
        }
        exhausted(rig.client.expand_volume(&volume, 96 * MIB).await);
        exhausted(rig.modify(&volume, &[("readAheadKiB", "512")]).await);
        // The blocks are written but not synced, so the snapshot's flush finds that there is no space for them.
        let dirty = open_device(&device);
        for block in 10_000..10_064 {
            dirty.write_all_at(&block_bytes(block, 5), block * BLOCK).expect("into the page cache");
        }
        exhausted(rig.client.create_snapshot("dirty", &volume).await);
    };
    for _ in 0..3 {
        failing(&mut rig).await;
        assert_nothing_half_made(&rig).await;
        assert_eq!(listed(&rig).await, before_it);
    }
    assert_eq!(rig.changed(&base, &target).await, after.changed_since(&before, BLOCK));
    assert_eq!(rig.allocated(&target).await, after.allocated(BLOCK));

    // There is space again. Nothing must be restarted, and every call works with the same name.
    ballast.remove();
    // btrfs frees space with its next commit, xfs in the background.
    testkit::eventually("the pool has space", async || health(&rig, &volume).await.is_empty()).await;
    // The writes without space are lost, and one more sync reports it.
    let _ = open_device(&device).sync_all();
    after.write(&device, 8000, 2000, 3);
    rig.client.create_volume(new_volume("fresh", 8 * MIB, block_capability())).await.expect("create");
    let third = rig.snapshot("third", &volume).await;
    let group = rig.client.create_group("group", &[volume.clone(), idle.volume_id.clone()]).await;
    group.expect("group");
    for (name, source, content) in
        [("restored", from_snapshot(&base), &before), ("cloned", from_volume(&volume), &after)]
    {
        let (id, path) = rig.volume_from(name, 64 * MIB, source).await;
        content.assert_equals(&path, 0, 16384);
        rig.detach(&id).await;
    }
    rig.client.expand_volume(&volume, 96 * MIB).await.expect("expand");
    rig.modify(&volume, &[("readAheadKiB", "512")]).await.expect("modify");
    rig.attach(&idle.volume_id).await;
    rig.detach(&idle.volume_id).await;
    assert_eq!(rig.changed(&base, &third).await, after.changed_since(&before, BLOCK));
    hashed(&rig, &[&third]).await;
    verify(&rig);
    rig.detach(&volume).await;
    finish(rig, disk);
}

/// How a full pool is freed: volumes are unpublished, and objects that are not needed are deleted.
#[apply(every_pool)]
async fn deletion_is_the_way_out_of_a_full_pool(pool: PoolKind) {
    let (disk, mut rig) = small_pool(pool).await;
    let mut volumes = Vec::new();
    for number in 0..3u8 {
        let (volume, device, content) =
            rig.written_volume(&format!("volume {number}"), 64 * MIB, (0, 1000, number + 1)).await;
        let base = rig.snapshot(&format!("base {number}"), &volume).await;
        let mut after = content.clone();
        after.write(&device, 500, 100, 7);
        let middle = rig.snapshot(&format!("middle {number}"), &volume).await;
        after.write(&device, 900, 100, 8);
        let target = rig.snapshot(&format!("target {number}"), &volume).await;
        hashed(&rig, &[&target]).await;
        volumes.push((volume, [base, middle, target], after.changed_since(&content, BLOCK)));
    }
    let ballast = Ballast::fill(&rig.pool_dir()).with_metadata();
    // All three are unpublished first. After each deletion the freed space is filled again.
    for (volume, ..) in &volumes {
        rig.detach(volume).await;
    }
    for (volume, [base, middle, target], changed) in &volumes {
        rig.client.delete_snapshot(middle).await.expect("DeleteSnapshot on a full pool");
        assert_eq!(rig.changed(base, target).await, *changed);
        ballast.refill();
        rig.client.delete_volume(volume).await.expect("DeleteVolume on a full pool");
        ballast.refill();
        for snapshot in [base, target] {
            rig.client.delete_snapshot(snapshot).await.expect("DeleteSnapshot on a full pool");
            ballast.refill();
        }
    }
    assert_eq!(listed(&rig).await, (vec![], vec![]));
    assert_nothing_half_made(&rig).await;
    ballast.remove();
    for dir in ["volumes", "snapshots"] {
        assert!(names(&rig.pool_dir().join(dir)).is_empty(), "{dir} is not empty");
    }
    let (volume, _) = rig.block_volume("after", 64 * MIB).await;
    rig.detach(&volume).await;
    finish(rig, disk);
}

/// A volume can be detached on a full pool. Only then can it be deleted.
#[apply(device_test)]
async fn a_volume_is_detached_and_deleted_on_a_full_pool() {
    let disk = Disk::ext4(320 << 20);
    let rig = &mut disk.rig(PoolKind::Dir, &["--enable-attach"]).await;
    let volume = rig.volume("attached", MIB, block_capability()).await;
    let mut controller = rig.client.controller.clone();
    controller.controller_publish_volume(requests::attach(&volume, "node-1")).await.expect("attach");
    let ballast = Ballast::fill(&rig.pool_dir());
    let detach = requests::detach(&volume, "");
    controller.controller_unpublish_volume(detach).await.expect("detach on a full pool");
    rig.client.delete_volume(&volume).await.expect("delete");
    assert_nothing_half_made(rig).await;
    ballast.remove();
}

/// Thaws a filesystem that nothing shows. A sync of the whole machine would wait for it.
struct Thawing<'a>(&'a Path);

impl Drop for Thawing<'_> {
    fn drop(&mut self) {
        let _ = freeze::Root::unseen(self.0, "ext4").map(|root| freeze::thaw(&root));
    }
}

/// The incident: a user froze a filesystem and unmounted it by hand. To thaw it the driver made a mount point in the pool, for
/// which a full pool of plain files had no room: the volume could not be deleted.
#[apply(every_pool)]
async fn a_volume_that_was_left_frozen_is_deleted_from_a_full_pool(pool: PoolKind) {
    let (disk, mut rig) = small_pool(pool).await;
    let (files, root) = rig.published("files", 16 * MIB, mount_capability("ext4")).await;
    let staging = rig.kubelet().join(&files).join("staging");
    let device = mount::mounted_at(&root).expect("mounts").expect("it is mounted").source;
    let ballast = Ballast::fill(&rig.pool_dir()).with_metadata();
    let thawing = Thawing(&device);
    testkit::ok(std::process::Command::new("fsfreeze").arg("--freeze").arg(&root));
    for place in [&root, &staging] {
        mount::unmount(place).expect("unmount by hand");
    }
    rig.delete(&files).await;
    drop(thawing);
    ballast.remove();
    finish(rig, disk);
}

/// A snapshot takes the last of the space, and there is none for its hashes. Its deltas are still exact. Hashing neither
/// retries without pause nor gives up, and continues when there is space.
#[apply(device_cases)]
async fn hashing_waits_for_room(#[values(PoolKind::Xfs, PoolKind::Btrfs)] pool: PoolKind) {
    let (disk, mut rig) = small_pool(pool).await;
    let (volume, device) = rig.block_volume("volume", 256 * MIB).await;
    let mut before = Content::default();
    // 15,000 blocks in separate pieces need at least 470 KiB of hashes.
    for piece in 0..150 {
        before.write(&device, piece * 400, 100, 1);
    }
    let ballast = Ballast::fill(&rig.pool_dir());
    let base = loop {
        match rig.client.create_snapshot("base", &volume).await {
            Ok(snapshot) => break snapshot.snapshot_id,
            Err(error) => assert_eq!(error.code(), Code::ResourceExhausted, "{error}"),
        }
        ballast.give_back(4);
    };
    ballast.refill();
    let dir = rig.snapshot_dir(&base);
    let failures = |rig: &Rig| rig.log().matches("could not be hashed").count();
    until("a failure is counted", || failures(&rig) > 0).await;
    assert!(!is_hashed(&dir), "there was room: this proves nothing");
    tokio::time::sleep(std::time::Duration::from_secs(3)).await;
    assert!(failures(&rig) <= 2, "it spins: {} failures in seconds", failures(&rig));
    assert_eq!(rig.allocated(&base).await, before.allocated(BLOCK));
    ballast.remove();
    let mut after = before.clone();
    after.write(&device, 5000, 20, 2);
    let target = rig.snapshot("target", &volume).await;
    assert_eq!(rig.changed(&base, &target).await, after.changed_since(&before, BLOCK));
    hashed(&rig, &[&base, &target]).await;
    assert_eq!(rig.changed(&base, &target).await, after.changed_since(&before, BLOCK));
    verify(&rig);
    rig.detach(&volume).await;
    finish(rig, disk);
}
