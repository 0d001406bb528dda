//! The disk under a sparse pool image is full, although the image reports free space.
//!
//! The filesystems in the image behave differently. xfs fails the writes and continues, since its log is allocated by mkfs.
//! btrfs cannot commit and turns read-only until it is mounted again.

use std::os::unix::fs::FileExt;
use std::time::Duration;

use super::{
    Ballast, Disk, StorageTrouble, Trouble, assert_nothing_half_made, exact_or_error, hashed, health, listed,
    probe, storage, storage_tells, tells, verify,
};
use testkit::prelude::*;

/// How the driver recovers from a full disk.
#[derive(Clone, Copy, PartialEq)]
enum End {
    /// Without any action.
    ByItself,
    /// Its volumes are unpublished, and it is stopped and started.
    InOrder,
    /// It is killed while a volume is in use.
    Killed,
}

#[apply(device_cases)]
#[case::below_xfs_fails_writes_and_no_more(PoolKind::Xfs, End::ByItself)]
#[case::below_btrfs_costs_a_restart_and_no_snapshot(PoolKind::Btrfs, End::InOrder)]
#[case::of_a_killed_driver_is_mounted_anew(PoolKind::Btrfs, End::Killed)]
async fn a_full_disk_below_an_image(#[case] pool: PoolKind, #[case] end: End) {
    let disk = Disk::ext4(600 << 20);
    let mut rig = disk.rig(pool, &["--pool-size", "2Gi"]).await;
    let (volume, device, before) = rig.written_volume("volume", 256 * MIB, (100, 1000, 1)).await;
    let base = rig.snapshot("base", &volume).await;
    let mut after = before.clone();
    after.write(&device, 300, 50, 2);
    let target = rig.snapshot("target", &volume).await;
    hashed(&rig, &[&base, &target]).await;
    let before_it = listed(&rig).await;

    let ballast = Ballast::fill(&disk.mount_point);
    let said = tells(&health(&rig, &volume).await, "PoolShortOfSpace", Trouble::Degraded);
    assert!(said.contains("the disk under the pool's image has "), "{said}");
    // Nothing new is begun, so no call can damage what exists.
    for _ in 0..3 {
        let create = rig.client.create_volume(new_volume("fresh", MIB, block_capability())).await;
        let restore = new_volume_from("restored", 256 * MIB, block_capability(), from_snapshot(&base));
        let restore = rig.client.create_volume(restore).await;
        let snapshot = rig.client.create_snapshot("third", &volume).await;
        let group = rig.client.create_group("group", std::slice::from_ref(&volume)).await;
        let expand = rig.client.expand_volume(&volume, 512 * MIB).await;
        for refused in
            [create.map(drop), restore.map(drop), snapshot.map(drop), group.map(drop), expand.map(drop)]
        {
            is_refused(refused, Code::ResourceExhausted, &["free space on it"]);
        }
        assert_eq!(listed(&rig).await, before_it);
        assert_nothing_half_made(&rig).await;
    }
    probe(&rig).await.expect("nothing is broken yet");

    // The volume's user continues to write. The writes fail on both filesystems.
    let written = tokio::task::spawn_blocking(move || {
        let file = open_device(&device);
        file.write_all_at(&vec![5; 64 << 20], 100 << 20)?;
        file.sync_all()
    });
    written.await.expect("join").expect_err("there is no room");
    super::sync_fs_may_fail(&rig.pool_dir());
    assert_eq!(code(rig.client.create_snapshot("third", &volume).await), Code::ResourceExhausted);
    exact_or_error(rig.client.delta(&base, &target, 0, 0).await, &after.changed_since(&before, BLOCK));
    let seen = health(&rig, &volume).await;
    let said = tells(&seen, "PoolShortOfSpace", Trouble::Degraded);
    assert!(said.contains("the disk under the pool's image has "), "{said}");
    match (pool, probe(&rig).await) {
        (PoolKind::Btrfs, failed @ Err(_)) => {
            let reported = ["Read-only file system", "the disk under the pool's image has "];
            is_refused(failed, Code::FailedPrecondition, &reported);
            tells(&health(&rig, &volume).await, "PoolReadOnly", Trouble::Degraded);
            storage_tells(&storage(&rig).await, "PoolReadOnly", StorageTrouble::StorageDegraded);
        }
        (PoolKind::Xfs, Ok(())) => assert_eq!(seen.len(), 1, "{seen:?}"),
        (_, probed) => panic!("not the documented behaviour: {probed:?}"),
    }

    // What an operator does: free space and, if the pool is read-only, unpublish and restart.
    ballast.remove();
    match end {
        End::ByItself => {}
        End::InOrder => {
            probe(&rig).await.expect_err("a restart is needed");
            rig.detach(&volume).await;
            rig.restart().await;
            rig.attach(&volume).await;
        }
        End::Killed => {
            rig.kill();
            // It knows no objects as long as the pool is in use, and lets the pods end.
            rig.start_again().await;
            let log = rig.log();
            assert!(log.contains("cannot be remounted while volumes are in use: unpublish"), "{log}");
            assert_eq!(code(rig.client.delete_volume(&volume).await), Code::Unavailable);
            rig.detach(&volume).await;
            // A container that starts has copies of all mounts for a while: the dead filesystem lives until they go, which may
            // be after the driver gave up waiting for its device.
            let pool_dir = rig.pool_dir().canonicalize().expect("resolve");
            let copy = deltapath::sys::mount::clone_of(&pool_dir).expect("clone");
            let copies = std::thread::spawn(move || {
                std::thread::sleep(Duration::from_secs(7));
                drop(copy);
            });
            rig.restart().await;
            copies.join().expect("no panic");
            rig.attach(&volume).await;
        }
    }
    probe(&rig).await.expect("well again");
    assert_eq!(health(&rig, &volume).await, []);
    assert_eq!(listed(&rig).await, before_it, "what was acknowledged is there");
    assert_eq!(rig.changed(&base, &target).await, after.changed_since(&before, BLOCK));
    for (name, snapshot, content) in [("old", &base, &before), ("new", &target, &after)] {
        let (id, path) = rig.volume_from(name, 256 * MIB, from_snapshot(snapshot)).await;
        content.assert_equals(&path, 0, 4096);
        rig.detach(&id).await;
    }
    rig.snapshot("third", &volume).await;
    rig.client.expand_volume(&volume, 512 * MIB).await.expect("expand");
    verify(&rig);
    rig.detach(&volume).await;
    let log = rig.log();
    assert!(!log.contains("panicked"), "{log}");
    rig.finish();
    disk.finish();
}
