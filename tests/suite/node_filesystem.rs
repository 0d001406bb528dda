//! Filesystems of volumes: made only on blank volumes, grown, half-made, frozen and shut down.

use std::io::Write;
use std::os::unix::fs::FileExt;
use std::path::Path;

use deltapath::sys::sweep::devices_below;
use proto::volume_capability::access_mode::Mode;

use crate::node::with_mode;
use crate::volume_health::{VolumeHealthErrorType, give_up, node_health};
use testkit::prelude::*;
use testkit::{mount_with, nothing_left, set_frozen, set_state};

#[apply(every_pool)]
async fn a_filesystem_keeps_its_files_and_an_access_mode_its_word(
    rig: Rig<pool>,
    #[values("ext4", "xfs", "btrfs")] fs_type: &str,
) {
    let one = with_mode(mount_capability(fs_type), Mode::SingleNodeSingleWriter);
    let volume = rig.volume("files", 300 * MIB, one.clone()).await;
    for round in 0..3 {
        let target = rig.publish(&volume, one.clone()).await;
        let mount = deltapath::sys::mount::mounted_at(&target).expect("mountinfo").expect("mounted");
        assert_eq!(mount.fs_type, fs_type);
        for earlier in 0..round {
            assert_eq!(std::fs::read(target.join(earlier.to_string())).expect("read"), b"kept");
        }
        std::fs::write(target.join(round.to_string()), "kept").expect("write");
        let second = rig.dir.path().join("second");
        let refused = rig.publish_at(&volume, &second, one.clone(), false).await;
        assert_eq!(code(refused), Code::FailedPrecondition, "one writer has one target");
        rig.detach(&volume).await;
        rig.detach(&volume).await;
        assert!(!target.exists());
    }
}

/// A volume that holds data, or was made from a source, is never formatted, whatever `blkid` prints.
#[apply(device_test)]
async fn data_is_never_formatted_over(rig: Rig<Xfs>) {
    let volume = rig.volume_of_both("both", 16 * MIB).await;
    let device = rig.attach(&volume).await;
    let mut content = Content::default();
    content.write(&device, 3000, 1, 9);
    let snapshot = rig.snapshot("raw bytes", &volume).await;
    rig.detach(&volume).await;
    let blank = rig.volume("blank", 16 * MIB, block_capability()).await;
    let blank = rig.snapshot("nothing", &blank).await;
    let mut sources = vec![volume];
    for source in [snapshot, blank] {
        let name = format!("from {source}");
        let made = rig.made_from(&name, 16 * MIB, mount_capability("ext4"), from_snapshot(&source));
        sources.push(made.await);
    }
    for (volume, why) in sources.iter().zip(["holds data", "holds data", "an empty source"]) {
        let refused = rig.try_publish(volume, mount_capability("ext4")).await;
        is_refused(refused, Code::FailedPrecondition, &[why]);
        rig.detach(volume).await;
    }
    let device = rig.attach(&sources[0]).await;
    content.assert_equals(&device, 0, 4096);
    rig.detach(&sources[0]).await;
}

/// What our own mkfs wrote before it was interrupted may be overwritten, but not what the user wrote later.
#[apply(device_test)]
async fn a_cut_mkfs_is_repeated_and_never_over_a_users_bytes(rig: Rig<Xfs>) {
    let volume = rig.volume_of_both("both", 16 * MIB).await;
    let pool_dir = rig.pool_dir();
    let dir = pool_dir.join("volumes").join(&volume);
    let image = || std::fs::File::options().write(true).open(dir.join("bytes/data.img")).expect("open");
    let cut_short = || {
        image().set_len(0).expect("clear");
        image().set_len(16 << 20).expect("set the length");
        image().write_all_at(&[7; 8192], 4096).expect("write");
        set_state(&pool_dir, &volume, serde_json::json!({ "formatting": true }));
    };
    cut_short();
    let target = rig.publish(&volume, mount_capability("ext4")).await;
    assert!(target.join("lost+found").is_dir());
    rig.detach(&volume).await;

    cut_short();
    let device = rig.attach(&volume).await;
    let mut content = Content::default();
    content.write(&device, 100, 1, 1);
    content.assert_equals(&device, 0, 4096);
    rig.detach(&volume).await;
    let refused = rig.try_publish(&volume, mount_capability("ext4")).await;
    assert_eq!(code(refused), Code::FailedPrecondition, "a user's bytes were formatted over");
    rig.detach(&volume).await;
    let device = rig.attach(&volume).await;
    content.assert_equals(&device, 0, 4096);
    rig.detach(&volume).await;
}

/// The incident: the kernel made a filesystem read-only after an error, or shut it down. The volume was published for a new pod with
/// OK, and the pod met EROFS. Once it is unstaged everywhere, the next stage mounts it again.
#[apply(device_cases)]
async fn a_filesystem_that_the_kernel_gave_up_is_not_published_for_a_new_pod(
    rig: Rig<Xfs>,
    #[values("ext4", "xfs")] fs_type: &str,
) {
    let flags: &[&str] = if fs_type == "ext4" { &["errors=remount-ro"] } else { &[] };
    let capability = mount_with(fs_type, flags);
    let (volume, target) = rig.published("files", 300 * MIB, capability.clone()).await;
    let mut file = std::fs::File::create(target.join("file")).expect("create");
    file.write_all(b"kept").and_then(|()| file.sync_all()).expect("write");
    drop(file);
    std::fs::File::open(&target).and_then(|dir| dir.sync_all()).expect("sync");
    give_up(&rig, fs_type, &target);
    let (reason, status) = match fs_type {
        "ext4" => ("FilesystemReadOnly", VolumeHealthErrorType::Degraded),
        _ => ("FilesystemShutDown", VolumeHealthErrorType::Inaccessible),
    };
    assert!(std::fs::write(target.join("file"), "lost").is_err(), "it still takes writes");
    let reported = node_health(&rig, &volume).await;
    assert!(reported.iter().any(|entry| entry.reason == reason && entry.status() == status), "{reported:?}");

    rig.unpublish_at(&volume, &target).await;
    // The new pod could not write.
    let refused = rig.publish_at(&volume, &target, capability.clone(), false).await;
    is_refused(refused, Code::Internal, &["the kernel has", &volume, "unstage"]);
    assert!(!target.exists(), "a refused publish left its target");
    // As a driver leaves it that died in a copy: a filesystem that was shut down cannot be opened to thaw it.
    rig.kill();
    set_frozen(&rig.pool_dir(), &volume);
    rig.start_again().await;
    rig.detach(&volume).await;
    let target = rig.publish(&volume, capability).await;
    assert_eq!(std::fs::read(target.join("file")).expect("read"), b"kept");
    std::fs::write(target.join("more"), "written").expect("write");
    rig.detach(&volume).await;
}

fn fsfreeze(target: &Path) {
    testkit::ok(std::process::Command::new("fsfreeze").arg("--freeze").arg(target));
}

/// The incident: a user froze a filesystem and did not thaw it. Unpublish and unstage answered OK, but the frozen filesystem
/// stayed after its last unmount. The volume could not be deleted, and after the next stage each write hung.
#[apply(device_cases)]
async fn a_filesystem_that_its_user_left_frozen_is_thawed(
    rig: Rig<Dir>,
    #[values("ext4", "xfs", "btrfs")] fs_type: &str,
) {
    let kubelet = rig.kubelet();
    let capability = mount_capability(fs_type);
    let volume = rig.volume("files", 320 * MIB, capability.clone()).await;
    let publish = async |rig: &mut Rig| rig.publish(&volume, capability.clone()).await;
    let target = publish(&mut rig).await;
    fsfreeze(&target);
    rig.detach(&volume).await;
    nothing_left(rig.dir.path());
    // As an older driver, or an unmount by hand, leaves it.
    for repair in ["stage", "delete"] {
        let target = publish(&mut rig).await;
        fsfreeze(&target);
        for place in ["target", "staging"] {
            deltapath::sys::mount::unmount(&kubelet.join(&volume).join(place)).expect("unmount by hand");
        }
        if repair == "delete" {
            // A pod that outlived its driver by hand may still show a device node of this number.
            let node = rig.dir.path().join("node");
            std::fs::write(&node, "").expect("write");
            let device = devices_below(&rig.pool_dir()).expect("devices").pop().expect("it is held").path();
            deltapath::sys::mount::bind(&device, &node, false).expect("bind");
            rig.delete(&volume).await;
            deltapath::sys::mount::unmount(&node).expect("unmount");
            break;
        }
        let target = publish(&mut rig).await;
        let write = tokio::task::spawn_blocking(move || std::fs::write(target.join("file"), "written"));
        let written = tokio::time::timeout(std::time::Duration::from_secs(20), write).await;
        written.expect("a write hangs").expect("join").expect("write");
        rig.detach(&volume).await;
    }
}
