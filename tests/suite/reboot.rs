//! A reboot, and a restart in a new mount namespace, where earlier mounts are not visible.

use std::path::{Path, PathBuf};
use std::time::Duration;

use deltapath::sys::sweep::sweep;
use tempfile::TempDir;

use testkit::prelude::*;
use testkit::{STARTED_BY, leftovers, temp_dir};

/// Seen in other drivers: after a reboot the loop devices are gone and publish fails. The test removes all devices and
/// mounts, including the pool's, and keeps the records.
#[apply(every_pool)]
async fn every_volume_comes_back_after_a_reboot(rig: Rig<pool>) {
    let (raw, _, mut content) = rig.written_volume("raw", 8 * MIB, (3, 40, 1)).await;
    let mut files = Vec::new();
    for fs_type in ["ext4", "xfs", "btrfs"] {
        let capability = mount_capability(fs_type);
        let (volume, target) = rig.published(fs_type, 320 * MIB, capability.clone()).await;
        std::fs::write(target.join("file"), fs_type).expect("write");
        files.push((volume, capability, fs_type));
    }
    let first = rig.snapshot("before", &raw).await;
    rig.kill();
    assert_eq!(sweep(rig.dir.path()).expect("sweep"), Vec::<String>::new());
    assert!(leftovers(rig.dir.path()).is_empty(), "mounts or devices are left, unlike after a reboot");
    rig.start_again().await;
    // Kubelet stages and publishes again, at the same paths.
    let device = rig.attach(&raw).await;
    content.assert_equals(&device, 0, 2048);
    let before = content.clone();
    content.write(&device, 1000, 1, 2);
    let second = rig.snapshot("after", &raw).await;
    assert_eq!(rig.changed(&first, &second).await, content.changed_since(&before, BLOCK));
    rig.detach(&raw).await;
    for (volume, capability, fs_type) in &files {
        let target = rig.publish(volume, capability.clone()).await;
        assert_eq!(std::fs::read(target.join("file")).expect("read"), fs_type.as_bytes());
        rig.delete(volume).await;
    }

    // Or it undoes mounts that no longer exist, and deletes.
    rig.attach(&raw).await;
    rig.kill();
    sweep(rig.dir.path()).expect("sweep");
    rig.start_again().await;
    rig.delete(&raw).await;
}

/// What starts a driver in its own mount namespace, as in a container, after a shell has run `prepare` there: see [`STARTED_BY`]. When it
/// is killed its mounts are gone, but its devices stay. The mounts of other tests are unmounted in the namespace, since a
/// filesystem stays as long as any namespace has it mounted.
pub fn in_namespace(dir: &Path, prepare: &str) -> String {
    let (own, script) = (dir.display(), dir.join("prepare.sh"));
    let text = format!(
        "grep -oE '/[^ ]*/deltapath-(run|test|demo)-[^ ]*/[^ ]*' /proc/self/mounts | grep -v '^{own}/' | xargs -r umount -l 2>/dev/null || true
        {prepare}
        exec \"$@\"
        "
    );
    std::fs::write(&script, text).expect("write");
    format!("unshare --mount --propagation private -- sh -e {}", script.display())
}

/// A driver there.
pub async fn secluded(dir: TempDir, pool: PoolKind, prepare: &str) -> Rig {
    let environment = vec![(STARTED_BY, in_namespace(dir.path(), prepare).into())];
    Rig::start_as(dir, pool, &[], environment, "info").await
}

/// A path as a secluded driver sees it.
pub fn inside(rig: &Rig, path: &Path) -> PathBuf {
    let root = PathBuf::from(format!("/proc/{}/root", rig.pid()));
    root.join(path.strip_prefix("/").expect("absolute"))
}

/// A container restarts. The next driver sees none of the mounts of the driver before, and finds the devices by the inodes
/// of their files.
#[apply(every_pool)]
async fn every_volume_comes_back_in_another_mount_namespace(pool: PoolKind) {
    let mut rig = secluded(temp_dir(), pool, "").await;
    let (raw, device) = rig.block_volume("raw", 8 * MIB).await;
    let mut content = Content::default();
    content.write(&inside(&rig, &device), 7, 30, 1);
    let mut files = Vec::new();
    for fs_type in ["ext4", "xfs", "btrfs"] {
        let capability = mount_capability(fs_type);
        let (volume, target) = rig.published(fs_type, 320 * MIB, capability.clone()).await;
        std::fs::write(inside(&rig, &target).join("file"), fs_type).expect("write");
        files.push((volume, capability, fs_type));
    }
    let first = rig.snapshot("before", &raw).await;
    let left = leftovers(rig.dir.path());
    assert!(left.iter().all(|left| left.starts_with("/dev/")), "its mounts are seen outside: {left:?}");
    rig.crash().await;
    let device = rig.attach(&raw).await;
    content.assert_equals(&inside(&rig, &device), 0, 2048);
    let before = content.clone();
    content.write(&inside(&rig, &device), 500, 2, 3);
    let second = rig.snapshot("after", &raw).await;
    assert_eq!(rig.changed(&first, &second).await, content.changed_since(&before, BLOCK));
    rig.detach(&raw).await;
    for (volume, capability, fs_type) in &files {
        let target = rig.publish(volume, capability.clone()).await;
        assert_eq!(std::fs::read(inside(&rig, &target).join("file")).expect("read"), fs_type.as_bytes());
        rig.detach(volume).await;
    }
    testkit::no_device_left(&rig.pool_dir());
    rig.finish();
}

/// A process that is being started has a copy of all that is open, and a new mount namespace one of all that is mounted. What they hold
/// for a moment is swept all the same.
#[apply(device_test)]
async fn what_is_held_for_a_moment_is_swept(rig: Rig<Dir>) {
    let (volume, target) = rig.published("files", 16 * MIB, mount_capability("ext4")).await;
    let copy = deltapath::sys::mount::clone_of(&target).expect("a copy of the mount");
    rig.kill();
    let holder = std::thread::spawn(move || {
        std::thread::sleep(Duration::from_millis(300));
        drop(copy);
    });
    assert_eq!(sweep(rig.dir.path()).expect("sweep"), Vec::<String>::new());
    holder.join().expect("no panic");
    rig.start_again().await;
    rig.detach(&volume).await;
}
