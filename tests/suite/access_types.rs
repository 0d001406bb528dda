//! One volume as a device and as a filesystem in turn. Velero restores the bytes of a Filesystem claim onto a Block claim and then
//! binds the same volume as Filesystem; for a restore in place it goes the other way round.

use std::os::unix::fs::FileTypeExt;
use std::path::Path;

use proto::VolumeCapability;

use crate::volume_health::node_health;
use testkit::leftovers;
use testkit::prelude::*;

/// Copies a device as a backup tool restores it.
fn copy(from: &Path, to: &Path) {
    let mut source = std::fs::File::open(from).expect("open the source");
    let mut target = std::fs::File::options().write(true).open(to).expect("open the target");
    std::io::copy(&mut source, &mut target).expect("copy");
    target.sync_all().expect("sync");
}

async fn confirmed(rig: &mut Rig, volume: &str, capability: VolumeCapability) -> bool {
    let request = requests::validate(volume, vec![capability]);
    let answer = rig.client.controller.validate_volume_capabilities(request).await.expect("validate");
    answer.into_inner().confirmed.is_some()
}

async fn stage(rig: &Rig, volume: &str, path: &Path, capability: VolumeCapability) -> Result<(), Code> {
    std::fs::create_dir_all(path).expect("mkdir");
    let request = stage_of(volume, path, capability);
    rig.client.node.clone().node_stage_volume(request).await.map(drop).map_err(|status| status.code())
}

async fn unstage(rig: &Rig, volume: &str, path: &Path) {
    rig.client.node.clone().node_unstage_volume(requests::unstage(volume, path)).await.expect("unstage");
}

#[apply(every_pool)]
async fn what_was_restored_onto_a_device_is_used_as_a_filesystem_and_back(
    rig: Rig<pool>,
    #[values("ext4", "xfs", "btrfs")] fs_type: &str,
) {
    let files = mount_capability(fs_type);
    let (source, target) = rig.published("source", 300 * MIB, files.clone()).await;
    std::fs::write(target.join("file"), "kept").expect("write");
    let snapshot = rig.snapshot("taken", &source).await;
    rig.detach(&source).await;
    let (backup, from) = rig.volume_from("backup", 0, from_snapshot(&snapshot)).await;

    let (restored, device) = rig.block_volume("restored", 300 * MIB).await;
    copy(&from, &device);
    rig.detach(&restored).await;
    rig.detach(&backup).await;
    let target = rig.publish(&restored, files.clone()).await;
    assert_eq!(std::fs::read(target.join("file")).expect("read"), b"kept");
    assert_eq!(node_health(&rig, &restored).await, []);
    let bytes = &rig.stats(&restored, &target).await.expect("stats")[0];
    assert!(bytes.total <= 300 * MIB && bytes.total > 100 * MIB, "of the filesystem: {bytes:?}");
    std::fs::write(target.join("file"), "changed").expect("write");
    let before = rig.snapshot("mounted", &restored).await;
    let expanded = rig.client.expand_volume(&restored, 400 * MIB).await.expect("expand");
    assert!(expanded.node_expansion_required, "it is staged as a filesystem");
    rig.detach(&restored).await;

    let device = rig.attach(&restored).await;
    assert!(std::fs::metadata(&device).expect("stat").file_type().is_block_device());
    assert_eq!(rig.stats(&restored, &device).await.expect("stats")[0].total, 400 * MIB);
    let expanded = rig.client.expand_volume(&restored, 420 * MIB).await.expect("expand");
    assert!(!expanded.node_expansion_required, "it is staged as a device");
    let mut content = Content::default();
    content.write(&device, 420 * 256 - 1, 1, 7);
    let after = rig.snapshot("as a device", &restored).await;
    assert!(rig.changed(&before, &after).await.contains(&(420 * 256 - 1)));
    rig.detach(&restored).await;

    // A volume that was made for a filesystem, restored in place.
    let device = rig.attach(&source).await;
    let (other, from) = rig.volume_from("changed", 0, from_snapshot(&before)).await;
    copy(&from, &device);
    rig.detach(&source).await;
    rig.detach(&other).await;
    let target = rig.publish(&source, mount_capability("")).await;
    assert_eq!(std::fs::read(target.join("file")).expect("read"), b"changed");
    rig.detach(&source).await;
}

/// The type of the filesystem that is there must be the one asked for; only an empty volume is formatted, and if it is large
/// enough for that.
#[apply(device_test)]
async fn an_empty_device_is_formatted_and_what_it_holds_must_be_what_is_asked_for(rig: Rig<Xfs>) {
    let volume = rig.volume("empty", 16 * MIB, block_capability()).await;
    for capability in [block_capability(), mount_capability("ext4"), mount_capability("")] {
        assert!(confirmed(&mut rig, &volume, capability.clone()).await, "{capability:?}");
    }
    assert!(!confirmed(&mut rig, &volume, mount_capability("zfs")).await);
    let again = rig.client.create_volume(new_volume("empty", 16 * MIB, mount_capability("ext4"))).await;
    assert_eq!(code(again), Code::AlreadyExists, "the record says what was asked for");
    let small = rig.try_publish(&volume, mount_capability("xfs")).await;
    is_refused(small, Code::FailedPrecondition, &["300Mi"]);
    let target = rig.publish(&volume, mount_capability("")).await;
    let mounted = deltapath::sys::mount::mounted_at(&target).expect("mounts").expect("mounted");
    assert_eq!(mounted.fs_type, "ext4");
    rig.detach(&volume).await;
    assert!(confirmed(&mut rig, &volume, mount_capability("ext4")).await);
    assert!(!confirmed(&mut rig, &volume, mount_capability("btrfs")).await);
    let other = rig.try_publish(&volume, mount_capability("btrfs")).await;
    is_refused(other, Code::FailedPrecondition, &["holds ext4"]);
    rig.detach(&volume).await;

    // A Block volume with a filesystem of its user's choice, mounted by a claim that names none.
    let (raw, device) = rig.block_volume("of its user", 300 * MIB).await;
    testkit::ok(std::process::Command::new("mkfs.xfs").arg("-q").arg(&device));
    rig.detach(&raw).await;
    let target = rig.publish(&raw, mount_capability("")).await;
    let mounted = deltapath::sys::mount::mounted_at(&target).expect("mounts").expect("mounted");
    assert_eq!(mounted.fs_type, "xfs");
    rig.detach(&raw).await;

    // Older relatives of ext4 are not mounted as one, nor confirmed.
    for fs_type in ["ext2", "ext3"] {
        let (older, device) = rig.block_volume(fs_type, 16 * MIB).await;
        testkit::ok(std::process::Command::new("mke2fs").args(["-q", "-t", fs_type]).arg(&device));
        rig.detach(&older).await;
        for asked in ["ext4", ""] {
            assert!(!confirmed(&mut rig, &older, mount_capability(asked)).await, "{fs_type} as {asked:?}");
            let refused = rig.try_publish(&older, mount_capability(asked)).await;
            is_refused(refused, Code::FailedPrecondition, &[fs_type, "Block volume"]);
            rig.detach(&older).await;
        }
        assert!(confirmed(&mut rig, &older, block_capability()).await, "{fs_type}");
    }
}

#[apply(device_test)]
async fn a_volume_is_not_staged_both_ways_at_once(rig: Rig<Xfs>) {
    let volume = rig.volume("one", 16 * MIB, block_capability()).await;
    let (one, two) = (rig.dir.path().join("one"), rig.dir.path().join("two"));
    for (first, second) in
        [(block_capability(), mount_capability("ext4")), (mount_capability("ext4"), block_capability())]
    {
        stage(&rig, &volume, &one, first.clone()).await.expect("stage");
        for path in [&one, &two] {
            let refused = stage(&rig, &volume, path, second.clone()).await;
            assert_eq!(refused, Err(Code::AlreadyExists), "{first:?} and {second:?}");
        }
        stage(&rig, &volume, &one, first).await.expect("stage again");
        unstage(&rig, &volume, &one).await;
    }
    assert!(leftovers(rig.dir.path()).iter().all(|left| !left.contains("/one") && !left.contains("/two")));
}

/// From a random life: staging fails as a filesystem and works as a device elsewhere. The device of the first stayed until the
/// volume was unstaged there.
#[apply(device_test)]
async fn a_volume_that_cannot_be_mounted_keeps_no_device_when_it_is_staged_as_one(rig: Rig<Dir>) {
    let (volume, ..) = rig.written_volume("raw", 16 * MIB, (0, 1, 7)).await;
    rig.detach(&volume).await;
    let (one, two) = (rig.dir.path().join("one"), rig.dir.path().join("two"));
    let refused = stage(&rig, &volume, &one, mount_capability("ext4")).await;
    assert_eq!(refused, Err(Code::FailedPrecondition), "it holds data and no filesystem");
    stage(&rig, &volume, &two, block_capability()).await.expect("stage");
    unstage(&rig, &volume, &one).await;
    testkit::no_device_left(rig.dir.path());
    unstage(&rig, &volume, &two).await;
}
