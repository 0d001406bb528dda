//! A data directory on filesystems of all kinds. Each works fully, or is refused with the reason.

use super::Disk;
use crate::startup::refused;
use testkit::driver_command;
use testkit::prelude::*;

/// A short run of everything: volumes of both modes, snapshots, an exact delta, a restore, a restart, deletion.
async fn lives(mut rig: Rig) {
    let (volume, device, before) = rig.written_volume("volume", 64 * MIB, (100, 300, 1)).await;
    let base = rig.snapshot("base", &volume).await;
    let mut after = before.clone();
    after.write(&device, 150, 20, 2);
    after.discard(&device, 380, 10);
    let target = rig.snapshot("target", &volume).await;
    assert_eq!(rig.changed(&base, &target).await, after.changed_since(&before, BLOCK));
    assert_eq!(rig.allocated(&target).await, after.allocated(BLOCK));
    let (restored, path) = rig.volume_from("restored", 64 * MIB, from_snapshot(&base)).await;
    before.assert_equals(&path, 0, 16384);
    rig.detach(&restored).await;
    let capability = mount_capability("ext4");
    let (files, directory) = rig.published("files", 64 * MIB, capability).await;
    std::fs::write(directory.join("file"), "there").expect("write");
    rig.snapshot("frozen", &files).await;
    rig.crash().await;
    after.assert_equals(&device, 0, 16384);
    rig.detach(&files).await;
    rig.detach(&volume).await;
    for id in [&volume, &restored, &files] {
        rig.client.delete_volume(id).await.expect("delete");
    }
    for id in [&base, &target] {
        rig.client.delete_snapshot(id).await.expect("delete");
    }
    rig.finish();
}

/// Plain files, or the image that `--pool auto` makes, on a filesystem in memory, and on an overlay, which the root of a
/// container usually is. A kind node has one of these below its data directory.
#[apply(device_cases)]
#[case::plain_files(PoolKind::Dir, &[])]
#[case::an_image(PoolKind::Btrfs, &["--pool", "auto", "--pool-size", "1Gi"])]
async fn a_pool_lives_on_tmpfs_and_overlay(#[case] pool: PoolKind, #[case] flags: &[&str]) {
    for disk in [Disk::in_memory("tmpfs"), Disk::overlay()] {
        lives(disk.rig(pool, flags).await).await;
        disk.finish();
    }
}

/// ramfs does not report where a file has data, so all blocks of a file would count as written. The start fails with this
/// reason.
#[apply(device_test)]
async fn a_filesystem_that_hides_its_holes_is_refused() {
    let disk = Disk::in_memory("ramfs");
    let dir = disk.dir();
    let said = refused(&mut driver_command(dir.path(), PoolKind::Dir));
    assert!(said.contains("does not report holes") && said.contains("ext4, xfs, btrfs or tmpfs"), "{said}");
    assert!(!disk.mount_point.join("data/deltapath.json").exists(), "the refused directory has a manifest");
    drop(dir);
    disk.finish();
}

#[apply(device_cases)]
async fn a_read_only_data_directory_is_refused(#[values(PoolKind::Dir, PoolKind::Xfs)] pool: PoolKind) {
    let disk = Disk::ext4(64 << 20);
    let dir = disk.dir();
    testkit::ok(std::process::Command::new("mount").args(["-o", "remount,ro"]).arg(&disk.mount_point));
    let said = refused(&mut driver_command(dir.path(), pool));
    assert!(said.contains("Read-only file system") && said.contains("data/lock"), "{said}");
    drop(dir);
    disk.finish();
}

/// A pool image is not made without space for a filesystem.
#[apply(device_test)]
async fn a_disk_too_small_for_an_image_is_refused() {
    let disk = Disk::ext4(128 << 20);
    let dir = disk.dir();
    let said = refused(driver_command(dir.path(), PoolKind::Xfs).args(["--pool-size", "100Mi"]));
    assert!(said.contains("a filesystem needs 300Mi") && said.contains("--pool-size"), "{said}");
    assert_eq!(names(&disk.mount_point.join("data")), ["lock", "pool"]);
    drop(dir);
    disk.finish();
}

/// On plain files on xfs exactly the written blocks are listed as allocated.
#[apply(device_test)]
async fn plain_files_on_xfs_list_what_was_written() {
    let disk = Disk::new("xfs", &["-q"], 600 << 20);
    let mut rig = disk.rig(PoolKind::Dir, &[]).await;
    let (volume, device) = rig.block_volume("volume", 64 * MIB).await;
    let mut content = Content::default();
    let mut random = fastrand::Rng::with_seed(1);
    for round in 0..6u8 {
        for _ in 0..200 {
            let (start, count) = (random.u64(0..16000), random.u64(1..10));
            match random.u8(0..16) {
                // Zeroed ranges are unwritten extents, which SEEK_DATA reports as holes.
                0..4 => content.zero(&device, start, count),
                4 => content.discard(&device, start, count),
                _ => content.write(&device, start, count, round + 1),
            }
        }
        let snapshot = rig.snapshot(&round.to_string(), &volume).await;
        let (reported, written) = (rig.allocated(&snapshot).await, content.allocated(BLOCK));
        let more: Vec<&u64> = reported.iter().filter(|block| !written.contains(block)).collect();
        let count = written.len();
        assert!(more.is_empty(), "round {round}: {count} blocks were written, and also listed are {more:?}");
        assert_eq!(reported, written);
    }
    rig.detach_and_finish(&volume).await;
    disk.finish();
}
