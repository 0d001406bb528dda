//! Volumes in use on the node: devices, targets and modes. Filesystems are tested in `node_filesystem.rs`, and paths and
//! devices of other programs in `not_ours.rs`.

use std::os::unix::fs::{FileExt, FileTypeExt};
use std::path::Path;

use deltapath::sys::blockdev;
use deltapath::sys::sweep::devices_below;
use proto::VolumeCapability;
use proto::volume_capability::access_mode::Mode;

use testkit::prelude::*;
use testkit::{leftovers, set_state};

pub fn with_mode(mut capability: VolumeCapability, mode: Mode) -> VolumeCapability {
    capability.access_mode = Some(proto::volume_capability::AccessMode { mode: mode.into() });
    capability
}

/// Writes to a device; an error where it is read-only.
pub fn try_write(device: &Path) -> std::io::Result<()> {
    std::fs::File::options().write(true).open(device)?.write_all_at(&[1; 4096], 0)
}

/// The incident: a backup program closed a device and unpublished it, while another of its threads started a program. The
/// child had a copy of the descriptor for a moment longer, so the target was busy.
#[apply(device_test)]
async fn a_target_that_is_busy_is_waited_for_a_moment_and_then_reported(rig: Rig<Dir>) {
    let (volume, device) = rig.block_volume("raw", MIB).await;
    let held = std::fs::File::open(&device).expect("open");
    let request = requests::unpublish(&volume, &device);
    is_refused(rig.client.node.node_unpublish_volume(request.clone()).await, Code::Internal, &["busy"]);
    let closer = std::thread::spawn(move || {
        std::thread::sleep(std::time::Duration::from_millis(100));
        drop(held);
    });
    rig.client.node.node_unpublish_volume(request).await.expect("it is closed in a moment");
    closer.join().expect("join");
    rig.detach(&volume).await;
}

#[apply(every_pool)]
async fn a_block_volume_is_a_device_at_its_target_and_keeps_its_bytes(rig: Rig<pool>) {
    let (volume, device) = rig.block_volume("raw", 8 * MIB).await;
    let meta = std::fs::symlink_metadata(&device).expect("stat");
    assert!(meta.file_type().is_block_device(), "{} is not a block device", device.display());
    let mut content = Content::default();
    content.write(&device, 7, 3, 9);
    assert_eq!(rig.attach(&volume).await, device, "publishing twice is publishing once");
    assert_eq!(devices_below(&rig.pool_dir()).expect("devices").len(), 1);
    for _ in 0..2 {
        rig.detach(&volume).await;
        assert!(!device.exists(), "the target stays after unpublish");
        testkit::no_device_left(&rig.pool_dir());
    }
    let device = rig.attach(&volume).await;
    content.assert_equals(&device, 0, 2048);
    rig.detach(&volume).await;
}

/// Seen in other drivers: `readonly` is ignored for Block volumes.
#[apply(device_test)]
async fn read_only_is_kept_in_both_modes_and_never_mixed_on_a_device(rig: Rig<Xfs>) {
    let kubelet = rig.kubelet();
    let shared = with_mode(block_capability(), Mode::SingleNodeMultiWriter);
    let volume = rig.volume("raw", 8 * MIB, shared.clone()).await;
    let device = rig.client.publish(&volume, shared.clone(), true, &kubelet).await.expect("publish");
    assert!(try_write(&device).is_err(), "a read-only device took a write");
    let (second, third) = (rig.dir.path().join("second"), rig.dir.path().join("third"));
    rig.publish_at(&volume, &second, shared.clone(), true).await.expect("a second reader");
    let writable = rig.publish_at(&volume, &third, shared.clone(), false).await;
    assert_eq!(code(writable), Code::FailedPrecondition);
    assert!(!third.exists(), "a refused publish left its target");
    let other = rig.publish_at(&volume, &second, shared.clone(), false).await;
    assert_eq!(code(other), Code::AlreadyExists);
    rig.unpublish_at(&volume, &second).await;
    rig.detach(&volume).await;
    let device = rig.publish(&volume, shared).await;
    Content::default().write(&device, 0, 1, 1);
    rig.detach(&volume).await;

    let files = rig.volume("files", 16 * MIB, mount_capability("ext4")).await;
    let target = rig.client.publish(&files, mount_capability("ext4"), true, &kubelet).await.expect("publish");
    let error = std::fs::write(target.join("file"), "x").expect_err("a read-only filesystem took a write");
    assert_eq!(error.raw_os_error(), Some(nix::libc::EROFS));
    rig.detach(&files).await;
}

/// Seen in other drivers: a crash between the mount and the record leaks the mount; unpublish answers `OK`
/// and unmounts nothing. Here the record comes first and the kernel is asked.
#[apply(every_pool)]
async fn what_was_published_before_a_crash_is_found_and_undone(rig: Rig<pool>) {
    let (raw, device) = rig.block_volume("raw", 8 * MIB).await;
    let (files, target) = rig.published("files", 16 * MIB, mount_capability("ext4")).await;
    std::fs::write(target.join("file"), "written before").expect("write");
    rig.kill();
    let mut content = Content::default();
    content.write(&device, 1, 1, 1);
    rig.start_again().await;
    assert_eq!(rig.attach(&raw).await, device);
    content.assert_equals(&device, 0, 16);
    assert_eq!(code(rig.client.delete_volume(&raw).await), Code::FailedPrecondition);
    rig.kill();
    // As after a crash before the record: a mount without a record.
    for volume in [&raw, &files] {
        set_state(&rig.pool_dir(), volume, serde_json::json!({}));
    }
    rig.start_again().await;
    rig.detach(&raw).await;
    rig.detach(&files).await;
    let left: Vec<String> =
        leftovers(rig.dir.path()).into_iter().filter(|left| left.contains("kubelet")).collect();
    assert!(left.is_empty(), "unpublish left {left:?}");
    testkit::no_device_left(&rig.pool_dir());
    let target = rig.publish(&files, mount_capability("ext4")).await;
    assert_eq!(std::fs::read(target.join("file")).expect("read"), b"written before");
    rig.detach(&files).await;
}

#[apply(device_test)]
async fn node_calls_refuse_what_is_wrong(rig: Rig<Dir>) {
    let volume = rig.volume("raw", MIB, block_capability()).await;
    let staging = rig.dir.path().join("staging");
    std::fs::create_dir(&staging).expect("mkdir");
    let stage =
        |volume: &str, path: &str, capability: Option<VolumeCapability>| proto::NodeStageVolumeRequest {
            volume_id: volume.to_owned(),
            staging_target_path: path.to_owned(),
            volume_capability: capability,
            ..Default::default()
        };
    let path = staging.display().to_string();
    let block = Some(block_capability());
    for (request, expected) in [
        (stage("", &path, block.clone()), Code::InvalidArgument),
        (stage("unknown", &path, block.clone()), Code::NotFound),
        (stage(&volume, "", block.clone()), Code::InvalidArgument),
        (stage(&volume, "relative", block.clone()), Code::InvalidArgument),
        (stage(&volume, &format!("{path}/../x"), block.clone()), Code::InvalidArgument),
        (stage(&volume, &format!("{path}/{}", "x".repeat(256)), block.clone()), Code::InvalidArgument),
        (stage(&volume, &format!("{path}{}", "/x".repeat(2100)), block.clone()), Code::InvalidArgument),
        (stage(&volume, &path, None), Code::InvalidArgument),
        (stage(&volume, &path, Some(mount_capability("zfs"))), Code::InvalidArgument),
    ] {
        let shown = format!("{request:?}");
        assert_eq!(code(rig.client.node.node_stage_volume(request).await), expected, "{shown}");
    }
    let target = rig.dir.path().join("target");
    let unstaged = rig.publish_request(&volume, &target, block_capability(), false);
    let refused = code(rig.client.node.node_publish_volume(unstaged.clone()).await);
    assert_eq!(refused, Code::FailedPrecondition);
    let nowhere = proto::NodePublishVolumeRequest { staging_target_path: String::new(), ..unstaged };
    assert_eq!(code(rig.client.node.node_publish_volume(nowhere).await), Code::FailedPrecondition);
    for (volume, target, expected) in
        [("", "/x", Code::InvalidArgument), (volume.as_str(), "", Code::InvalidArgument)]
    {
        let request = requests::unpublish(volume, target);
        assert_eq!(code(rig.client.node.node_unpublish_volume(request).await), expected);
        let request = requests::unstage(volume, target);
        assert_eq!(code(rig.client.node.node_unstage_volume(request).await), expected);
    }
    // Published over its staging path, it would be unstaged by the unpublish.
    rig.client.node.node_stage_volume(stage(&volume, &path, block)).await.expect("stage");
    let over = proto::NodePublishVolumeRequest {
        staging_target_path: path.clone(),
        ..rig.publish_request(&volume, &staging, block_capability(), false)
    };
    assert_eq!(code(rig.client.node.node_publish_volume(over).await), Code::InvalidArgument);
    rig.client.node.node_unstage_volume(requests::unstage(&volume, &path)).await.expect("unstage");
    // Nothing of ours is there, so nothing is undone, and the file of another program stays.
    std::fs::write(&target, "a stranger's").expect("write");
    rig.unpublish_at(&volume, &target).await;
    assert_eq!(std::fs::read(&target).expect("read"), b"a stranger's");
    testkit::no_device_left(&rig.pool_dir());
}

#[apply(device_test)]
async fn a_device_has_the_size_of_its_volume_to_the_byte(rig: Rig<Xfs>) {
    for (number, bytes) in [4096, 3 << 19, (1 << 40) + 4096].into_iter().enumerate() {
        let (volume, device) = rig.block_volume(&format!("volume {number}"), bytes).await;
        assert_eq!(blockdev::size(&device).expect("size"), bytes as u64);
        rig.detach(&volume).await;
    }
}

/// A restored volume is published read-only at many targets, as backup tools do it.
#[apply(every_pool)]
async fn a_restored_volume_is_read_at_many_places(
    rig: Rig<pool>,
    #[values("", "ext4", "xfs", "btrfs")] fs_type: &str,
) {
    let kubelet = rig.kubelet();
    let capability = if fs_type.is_empty() { block_capability() } else { mount_capability(fs_type) };
    let (source, target) = rig.published(&format!("source {fs_type}"), 300 * MIB, capability.clone()).await;
    let mut content = Content::default();
    match fs_type {
        "" => content.write(&target, 5, 5, 5),
        _ => std::fs::write(target.join("file"), fs_type).expect("write"),
    }
    let snapshot = rig.snapshot(&format!("snapshot {fs_type}"), &source).await;
    for mode in [Mode::MultiNodeReaderOnly, Mode::SingleNodeReaderOnly] {
        let readers = with_mode(capability.clone(), mode);
        let (name, source) = (format!("restored {fs_type} {mode:?}"), from_snapshot(&snapshot));
        let restored = rig.made_from(&name, 0, readers.clone(), source).await;
        // Its source stays mounted for writing.
        let first = rig.client.publish(&restored, readers.clone(), true, &kubelet).await.expect("publish");
        let second = rig.dir.path().join("second");
        let beside = rig.publish_at(&restored, &second, readers.clone(), true).await;
        let places = match mode {
            Mode::MultiNodeReaderOnly => {
                beside.expect("many readers");
                vec![&first, &second]
            }
            _ => {
                assert_eq!(code(beside), Code::FailedPrecondition, "one reader has one place");
                vec![&first]
            }
        };
        for place in places {
            if fs_type.is_empty() {
                content.assert_equals(place, 0, 64);
                assert!(try_write(place).is_err(), "it took a write");
            } else {
                assert_eq!(std::fs::read(place.join("file")).expect("read"), fs_type.as_bytes());
                assert!(std::fs::write(place.join("new"), "x").is_err(), "{fs_type} took a write");
            }
        }
        rig.unpublish_at(&restored, &second).await;
        rig.detach(&restored).await;
    }
    rig.detach(&source).await;
}
