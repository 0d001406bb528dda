//! The pool becomes read-only under a running driver, or refuses writes for another reason. Calls that change something fail
//! with the reason, calls that read work, and everything works without a restart once the pool is writable again.

use std::path::{Path, PathBuf};

use deltapath::sys::mount;

use super::{
    Disk, StorageTrouble, Trouble, assert_nothing_half_made, hashed, health, is_unwell, listed, probe,
    storage, storage_tells, unwell, verify,
};
use testkit::prelude::*;
use testkit::temp_dir;

fn remount(mount_point: &Path, option: &str) {
    // A background thread may still have a file open for a moment.
    for _ in 0..500 {
        let mut command = std::process::Command::new("mount");
        let done =
            command.args(["-o", &format!("remount,{option}")]).arg(mount_point).output().expect("mount");
        if done.status.success() {
            return;
        }
        std::thread::sleep(std::time::Duration::from_millis(20));
    }
    panic!("{} cannot be remounted {option}", mount_point.display());
}

#[track_caller]
fn read_only<T>(answer: Result<T, impl testkit::Refusal>) {
    is_refused(answer, Code::Internal, &["Read-only file system", "remount it"]);
}

#[apply(every_pool)]
async fn a_read_only_pool_is_read_and_nothing_else(pool: PoolKind) {
    // The pool is on its own disk, since the lock file in the data directory is open for writing and would prevent the
    // remount.
    let disk = (pool == PoolKind::Dir).then(|| Disk::ext4(320 << 20));
    let dir = temp_dir();
    let mut place: PathBuf = dir.path().join("data/pool");
    if let Some(disk) = &disk {
        place = disk.mount_point.clone();
        std::fs::create_dir(dir.path().join("data")).expect("mkdir");
        std::fs::create_dir(place.join("pool")).expect("mkdir");
        std::os::unix::fs::symlink(place.join("pool"), dir.path().join("data/pool")).expect("symlink");
    }
    let mut rig = Rig::start_in(dir, pool, &[], "info").await;
    let (volume, device, before) = rig.written_volume("volume", 64 * MIB, (100, 1000, 1)).await;
    let base = rig.snapshot("base", &volume).await;
    let mut after = before.clone();
    after.write(&device, 300, 50, 2);
    let target = rig.snapshot("target", &volume).await;
    rig.detach(&volume).await;
    hashed(&rig, &[&base, &target]).await;
    let before_it = listed(&rig).await;
    assert!(mount::mounted_at(&place).expect("mounts").is_some());

    remount(&place, "ro");
    let said = ["Read-only file system", "remount it"];
    is_unwell(&rig, &volume, "PoolReadOnly", Trouble::Degraded, &said).await;
    assert_eq!(unwell(&rig, 0).await.len(), 1);
    storage_tells(&storage(&rig).await, "PoolReadOnly", StorageTrouble::StorageDegraded);
    is_refused(probe(&rig).await, Code::FailedPrecondition, &["Read-only file system"]);
    for _ in 0..2 {
        read_only(rig.client.create_volume(new_volume("fresh", MIB, block_capability())).await);
        let restore = new_volume_from("restored", 64 * MIB, block_capability(), from_snapshot(&base));
        read_only(rig.client.create_volume(restore).await);
        read_only(rig.client.create_snapshot("third", &volume).await);
        read_only(rig.client.create_group("group", std::slice::from_ref(&volume)).await);
        read_only(rig.client.expand_volume(&volume, 96 * MIB).await);
        read_only(rig.modify(&volume, &[("readAheadKiB", "512")]).await);
        read_only(rig.try_publish(&volume, block_capability()).await);
        read_only(rig.client.delete_snapshot(&base).await);
        read_only(rig.client.delete_volume(&volume).await);
        assert_eq!(listed(&rig).await, before_it, "what could not be deleted is there");
    }
    assert_eq!(rig.changed(&base, &target).await, after.changed_since(&before, BLOCK));
    assert_eq!(rig.allocated(&base).await, before.allocated(BLOCK));

    remount(&place, "rw");
    probe(&rig).await.expect("writable again");
    assert_eq!(health(&rig, &volume).await, []);
    assert_eq!(unwell(&rig, 0).await, []);
    assert!(!storage(&rig).await.iter().any(|reported| reported.reason == "PoolReadOnly"));
    assert_nothing_half_made(&rig).await;
    rig.client.create_volume(new_volume("fresh", MIB, block_capability())).await.expect("create");
    let third = rig.snapshot("third", &volume).await;
    rig.client.expand_volume(&volume, 96 * MIB).await.expect("expand");
    let (restored, path) = rig.volume_from("restored", 64 * MIB, from_snapshot(&base)).await;
    before.assert_equals(&path, 0, 16384);
    rig.detach(&restored).await;
    rig.client.delete_snapshot(&target).await.expect("delete");
    assert_eq!(rig.changed(&base, &third).await, after.changed_since(&before, BLOCK));
    verify(&rig);
    rig.finish();
    if let Some(disk) = disk {
        disk.finish();
    }
}

fn chattr(change: &str, path: &Path) {
    testkit::ok(std::process::Command::new("chattr").arg(change).arg(path));
}

/// All health calls for a volume and for the storage report that the pool refuses writes, and why.
async fn takes_no_write(rig: &Rig, volume: &str, why: &str) {
    is_unwell(rig, volume, "PoolWriteError", Trouble::Degraded, &[why]).await;
    assert_eq!(unwell(rig, 0).await.len(), 1);
    let said = storage_tells(&storage(rig).await, "PoolWriteError", StorageTrouble::StorageDegraded);
    assert!(said.contains(why), "{said}");
}

/// The pool's directory was made immutable, on a healthy filesystem.
#[apply(device_test)]
async fn a_pool_that_refuses_writes_is_reported() {
    let disk = Disk::ext4(320 << 20);
    let mut rig = disk.rig(PoolKind::Dir, &[]).await;
    let volume = rig.volume("volume", 4 * MIB, block_capability()).await;
    assert_eq!(health(&rig, &volume).await, []);
    chattr("+i", &rig.pool_dir());
    takes_no_write(&rig, &volume, "Operation not permitted").await;
    assert_eq!(code(probe(&rig).await), Code::FailedPrecondition, "nothing can be made");
    chattr("-i", &rig.pool_dir());
    assert_eq!(health(&rig, &volume).await, []);
    probe(&rig).await.expect("writable again");
    rig.client.delete_volume(&volume).await.expect("delete");
    rig.finish();
    disk.finish();
}

/// The pool is mounted and healthy, but the file of its image cannot be checked.
#[apply(device_test)]
async fn a_pool_whose_image_does_not_answer_is_reported(rig: Rig<Xfs>) {
    let volume = rig.volume("volume", 4 * MIB, block_capability()).await;
    assert_eq!(health(&rig, &volume).await, []);
    let image = rig.data_dir().join("pool.img");
    std::fs::rename(&image, image.with_extension("moved")).expect("move away");
    takes_no_write(&rig, &volume, "No such file or directory").await;
    std::fs::rename(image.with_extension("moved"), &image).expect("move back");
    assert_eq!(health(&rig, &volume).await, []);
    rig.client.delete_volume(&volume).await.expect("delete");
}
