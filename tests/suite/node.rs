//! A volume's place on the node: devices, filesystems, targets.

use std::os::unix::fs::{FileExt, FileTypeExt};
use std::path::Path;

use csi_client::{block_capability, from_snapshot, mount_capability, new_volume};
use deltapath::sys::blockdev;
use deltapath::sys::sweep::devices_below;
use proto::VolumeCapability;
use proto::volume_capability::access_mode::Mode;
use tonic::Code;

use crate::reboot::SweptOnDrop;
use testkit::content::Content;
use testkit::{MIB, PoolKind, Rig, code, leftovers, set_state, state_path, status_code};

fn with_mode(mut capability: VolumeCapability, mode: Mode) -> VolumeCapability {
    capability.access_mode = Some(proto::volume_capability::AccessMode { mode: mode.into() });
    capability
}

fn publish_at(
    rig: &Rig,
    volume: &str,
    target: &Path,
    capability: VolumeCapability,
    readonly: bool,
) -> proto::NodePublishVolumeRequest {
    proto::NodePublishVolumeRequest {
        volume_id: volume.to_owned(),
        staging_target_path: rig.kubelet().join(volume).join("staging").display().to_string(),
        target_path: target.display().to_string(),
        volume_capability: Some(capability),
        readonly,
        ..Default::default()
    }
}

async fn unpublish_at(rig: &mut Rig, volume: &str, target: &Path) {
    let request = proto::NodeUnpublishVolumeRequest {
        volume_id: volume.to_owned(),
        target_path: target.display().to_string(),
    };
    rig.client.node.node_unpublish_volume(request).await.expect("unpublish");
}

/// The incident: a backup program closed a device and unpublished it, while another thread of it started a program; the
/// child had a copy of the descriptor for a moment more, and the target was busy.
#[test_with::root]
#[tokio::test(flavor = "multi_thread")]
async fn a_target_that_is_busy_is_waited_for_a_moment_and_then_reported() {
    let mut rig = Rig::start(PoolKind::Dir).await;
    let (volume, device) = rig.block_volume("raw", MIB).await;
    let held = std::fs::File::open(&device).expect("open");
    let request = proto::NodeUnpublishVolumeRequest {
        volume_id: volume.clone(),
        target_path: device.display().to_string(),
    };
    let reported = rig.client.node.node_unpublish_volume(request.clone()).await.expect_err("it is open");
    assert_eq!(reported.code(), Code::Internal, "{reported}");
    assert!(reported.message().contains("busy"), "{reported}");
    let closer = std::thread::spawn(move || {
        std::thread::sleep(std::time::Duration::from_millis(100));
        drop(held);
    });
    rig.client.node.node_unpublish_volume(request).await.expect("it is closed in a moment");
    closer.join().expect("join");
    rig.detach(&volume).await;
    rig.finish();
}

#[rstest::rstest]
#[test_with::root]
#[tokio::test(flavor = "multi_thread")]
async fn a_block_volume_is_a_device_at_its_target_and_keeps_its_bytes(
    #[values(PoolKind::Btrfs, PoolKind::Xfs, PoolKind::Dir)] pool: PoolKind,
) {
    let mut rig = Rig::start(pool).await;
    let (volume, device) = rig.block_volume("raw", 8 * MIB).await;
    let meta = std::fs::symlink_metadata(&device).expect("stat");
    assert!(meta.file_type().is_block_device(), "{} is no block device", device.display());
    let mut content = Content::default();
    content.write(&device, 7, 3, 9);
    assert_eq!(rig.attach(&volume).await, device, "publishing twice is publishing once");
    assert_eq!(devices_below(&rig.pool_dir()).expect("devices").len(), 1);
    for _ in 0..2 {
        rig.detach(&volume).await;
        assert!(!device.exists(), "the target stays after unpublish");
        assert_eq!(devices_below(&rig.pool_dir()).expect("devices").len(), 0);
    }
    let device = rig.attach(&volume).await;
    content.assert_equals(&device, 0, 2048);
    rig.detach(&volume).await;
    rig.finish();
}

/// Seen elsewhere: `readonly` is ignored for Block volumes.
#[test_with::root]
#[tokio::test(flavor = "multi_thread")]
async fn read_only_is_kept_in_both_modes_and_never_mixed_on_a_device() {
    let mut rig = Rig::start(PoolKind::Xfs).await;
    let kubelet = rig.kubelet();
    let shared = with_mode(block_capability(), Mode::SingleNodeMultiWriter);
    let volume = rig.client.create_volume(new_volume("raw", 8 * MIB, shared.clone())).await.expect("create");
    let device =
        rig.client.publish(&volume.volume_id, shared.clone(), true, &kubelet).await.expect("publish");
    let refused =
        std::fs::File::options().write(true).open(&device).and_then(|file| file.write_all_at(&[1; 4096], 0));
    assert!(refused.is_err(), "a read-only device took a write");
    let (second, third) = (rig.dir.path().join("second"), rig.dir.path().join("third"));
    let beside = publish_at(&rig, &volume.volume_id, &second, shared.clone(), true);
    rig.client.node.node_publish_volume(beside).await.expect("a second reader");
    let writable = publish_at(&rig, &volume.volume_id, &third, shared.clone(), false);
    assert_eq!(status_code(rig.client.node.node_publish_volume(writable).await), Code::FailedPrecondition);
    assert!(!third.exists(), "a refused publish left its target");
    let other = publish_at(&rig, &volume.volume_id, &second, shared.clone(), false);
    assert_eq!(status_code(rig.client.node.node_publish_volume(other).await), Code::AlreadyExists);
    unpublish_at(&mut rig, &volume.volume_id, &second).await;
    rig.client.unpublish(&volume.volume_id, &kubelet).await.expect("unpublish");
    let device = rig.client.publish(&volume.volume_id, shared, false, &kubelet).await.expect("publish");
    Content::default().write(&device, 0, 1, 1);
    rig.client.unpublish(&volume.volume_id, &kubelet).await.expect("unpublish");

    let request = new_volume("files", 16 * MIB, mount_capability("ext4"));
    let files = rig.client.create_volume(request).await.expect("create").volume_id;
    let target = rig.client.publish(&files, mount_capability("ext4"), true, &kubelet).await.expect("publish");
    let error = std::fs::write(target.join("file"), "x").expect_err("a read-only filesystem took a write");
    assert_eq!(error.raw_os_error(), Some(nix::libc::EROFS));
    rig.client.unpublish(&files, &kubelet).await.expect("unpublish");
    rig.finish();
}

#[rstest::rstest]
#[test_with::root]
#[tokio::test(flavor = "multi_thread")]
async fn a_filesystem_keeps_its_files_and_an_access_mode_its_word(
    #[values(PoolKind::Btrfs, PoolKind::Xfs, PoolKind::Dir)] pool: PoolKind,
    #[values("ext4", "xfs", "btrfs")] fs_type: &str,
) {
    let mut rig = Rig::start(pool).await;
    let kubelet = rig.kubelet();
    let one = with_mode(mount_capability(fs_type), Mode::SingleNodeSingleWriter);
    let request = new_volume("files", 300 * MIB, one.clone());
    let volume = rig.client.create_volume(request).await.expect("create").volume_id;
    for round in 0..3 {
        let target = rig.client.publish(&volume, one.clone(), false, &kubelet).await.expect("publish");
        let mount = deltapath::sys::mount::mounted_at(&target).expect("mountinfo").expect("mounted");
        assert_eq!(mount.fs_type, fs_type);
        for earlier in 0..round {
            assert_eq!(std::fs::read(target.join(earlier.to_string())).expect("read"), b"kept");
        }
        std::fs::write(target.join(round.to_string()), "kept").expect("write");
        let second = rig.dir.path().join("second");
        let another = publish_at(&rig, &volume, &second, one.clone(), false);
        let refused = rig.client.node.node_publish_volume(another).await;
        assert_eq!(status_code(refused), Code::FailedPrecondition, "one writer has one target");
        rig.client.unpublish(&volume, &kubelet).await.expect("unpublish");
        rig.client.unpublish(&volume, &kubelet).await.expect("unpublish again");
        assert!(!target.exists());
    }
    rig.finish();
}

/// A volume that holds a block, or came from something, is never formatted, whatever `blkid` says.
#[test_with::root]
#[tokio::test(flavor = "multi_thread")]
async fn data_is_never_formatted_over() {
    let mut rig = Rig::start(PoolKind::Xfs).await;
    let kubelet = rig.kubelet();
    let mut request = new_volume("both", 16 * MIB, block_capability());
    request.volume_capabilities.push(mount_capability("ext4"));
    let volume = rig.client.create_volume(request).await.expect("create").volume_id;
    let device = rig.attach(&volume).await;
    let mut content = Content::default();
    content.write(&device, 3000, 1, 9);
    let snapshot = rig.snapshot("raw bytes", &volume).await;
    rig.detach(&volume).await;
    let blank =
        rig.client.create_volume(new_volume("blank", 16 * MIB, block_capability())).await.expect("create");
    let blank = rig.snapshot("nothing", &blank.volume_id).await;
    let mut sources = vec![volume];
    for source in [snapshot, blank] {
        let mut request = new_volume(&format!("from {source}"), 16 * MIB, mount_capability("ext4"));
        request.volume_content_source = Some(from_snapshot(&source));
        sources.push(rig.client.create_volume(request).await.expect("create").volume_id);
    }
    for (volume, why) in sources.iter().zip(["holds data", "holds data", "never written"]) {
        let refused = rig.client.publish(volume, mount_capability("ext4"), false, &kubelet).await;
        let refused = refused.expect_err("it is not to be formatted");
        assert_eq!(refused.code(), Code::FailedPrecondition);
        assert!(refused.to_string().contains(why), "{refused}");
        rig.client.unpublish(volume, &kubelet).await.expect("unstage");
    }
    let device = rig.attach(&sources[0]).await;
    content.assert_equals(&device, 0, 4096);
    rig.detach(&sources[0]).await;
    rig.finish();
}

/// Seen elsewhere: a crash between the mount and the record leaks the mount; unpublish answers `OK`
/// and unmounts nothing. Here the record comes first and the kernel is asked.
#[rstest::rstest]
#[test_with::root]
#[tokio::test(flavor = "multi_thread")]
async fn what_was_published_before_a_crash_is_found_and_undone(
    #[values(PoolKind::Btrfs, PoolKind::Xfs, PoolKind::Dir)] pool: PoolKind,
) {
    let mut rig = Rig::start(pool).await;
    let kubelet = rig.kubelet();
    let (raw, device) = rig.block_volume("raw", 8 * MIB).await;
    let request = new_volume("files", 16 * MIB, mount_capability("ext4"));
    let files = rig.client.create_volume(request).await.expect("create").volume_id;
    let target =
        rig.client.publish(&files, mount_capability("ext4"), false, &kubelet).await.expect("publish");
    std::fs::write(target.join("file"), "written before").expect("write");
    rig.kill();
    let mut content = Content::default();
    content.write(&device, 1, 1, 1);
    rig.start_again().await;
    assert_eq!(rig.attach(&raw).await, device);
    content.assert_equals(&device, 0, 16);
    assert_eq!(code(rig.client.delete_volume(&raw).await), Code::FailedPrecondition);
    rig.kill();
    // As a crash before the record would leave it: mounted, and no record of it.
    for volume in [&raw, &files] {
        set_state(&rig.pool_dir(), volume, serde_json::json!({}));
    }
    rig.start_again().await;
    rig.client.unpublish(&raw, &kubelet).await.expect("unpublish");
    rig.client.unpublish(&files, &kubelet).await.expect("unpublish");
    let left: Vec<String> =
        leftovers(rig.dir.path()).into_iter().filter(|left| left.contains("kubelet")).collect();
    assert!(left.is_empty(), "unpublish left {left:?}");
    assert_eq!(devices_below(&rig.pool_dir()).expect("devices").len(), 0);
    let target =
        rig.client.publish(&files, mount_capability("ext4"), false, &kubelet).await.expect("publish");
    assert_eq!(std::fs::read(target.join("file")).expect("read"), b"written before");
    rig.client.unpublish(&files, &kubelet).await.expect("unpublish");
    rig.finish();
}

/// A restored volume larger than its snapshot has a filesystem as large as itself.
#[rstest::rstest]
#[test_with::root]
#[tokio::test(flavor = "multi_thread")]
async fn stage_grows_a_restored_filesystem_to_its_volume(#[values("ext4", "xfs", "btrfs")] fs_type: &str) {
    let mut rig = Rig::start(PoolKind::Xfs).await;
    let kubelet = rig.kubelet();
    let request = new_volume("small", 300 * MIB, mount_capability(fs_type));
    let small = rig.client.create_volume(request).await.expect("create").volume_id;
    let target =
        rig.client.publish(&small, mount_capability(fs_type), false, &kubelet).await.expect("publish");
    std::fs::write(target.join("file"), "kept").expect("write");
    let snapshot = rig.snapshot("small", &small).await;
    let mut request = new_volume("large", 900 * MIB, mount_capability(fs_type));
    request.volume_content_source = Some(from_snapshot(&snapshot));
    let large = rig.client.create_volume(request).await.expect("create").volume_id;
    let target =
        rig.client.publish(&large, mount_capability(fs_type), false, &kubelet).await.expect("publish");
    let space = deltapath::sys::space(&target).expect("statvfs");
    assert!(space.total > 700 << 20, "{fs_type} has {} bytes on a volume of 900 MiB", space.total);
    assert_eq!(std::fs::read(target.join("file")).expect("read"), b"kept");
    for volume in [&small, &large] {
        rig.client.unpublish(volume, &kubelet).await.expect("unpublish");
    }
    rig.finish();
}

#[test_with::root]
#[tokio::test(flavor = "multi_thread")]
async fn node_calls_refuse_what_is_wrong() {
    let mut rig = Rig::start(PoolKind::Dir).await;
    let volume =
        rig.client.create_volume(new_volume("raw", MIB, block_capability())).await.expect("create").volume_id;
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
        (stage(&volume, &path, None), Code::InvalidArgument),
        (stage(&volume, &path, Some(mount_capability("ext4"))), Code::FailedPrecondition),
    ] {
        let shown = format!("{request:?}");
        assert_eq!(status_code(rig.client.node.node_stage_volume(request).await), expected, "{shown}");
    }
    let target = rig.dir.path().join("target");
    let unstaged = publish_at(&rig, &volume, &target, block_capability(), false);
    assert_eq!(
        status_code(rig.client.node.node_publish_volume(unstaged.clone()).await),
        Code::FailedPrecondition
    );
    let nowhere = proto::NodePublishVolumeRequest { staging_target_path: String::new(), ..unstaged };
    assert_eq!(status_code(rig.client.node.node_publish_volume(nowhere).await), Code::FailedPrecondition);
    for (volume, target, expected) in
        [("", "/x", Code::InvalidArgument), (volume.as_str(), "", Code::InvalidArgument)]
    {
        let request =
            proto::NodeUnpublishVolumeRequest { volume_id: volume.into(), target_path: target.into() };
        assert_eq!(status_code(rig.client.node.node_unpublish_volume(request).await), expected);
        let request =
            proto::NodeUnstageVolumeRequest { volume_id: volume.into(), staging_target_path: target.into() };
        assert_eq!(status_code(rig.client.node.node_unstage_volume(request).await), expected);
    }
    // Nothing of ours is there, so nothing is undone, and a stranger's file stays.
    std::fs::write(&target, "a stranger's").expect("write");
    unpublish_at(&mut rig, &volume, &target).await;
    assert_eq!(std::fs::read(&target).expect("read"), b"a stranger's");
    assert_eq!(devices_below(&rig.pool_dir()).expect("devices").len(), 0);
    rig.finish();
}

#[test_with::root]
#[tokio::test(flavor = "multi_thread")]
async fn a_device_has_the_size_of_its_volume_to_the_byte() {
    let mut rig = Rig::start(PoolKind::Xfs).await;
    for (number, bytes) in [4096, 3 << 19, (1 << 40) + 4096].into_iter().enumerate() {
        let (volume, device) = rig.block_volume(&format!("volume {number}"), bytes).await;
        assert_eq!(blockdev::size(&device).expect("size"), bytes as u64);
        rig.detach(&volume).await;
    }
    rig.finish();
}

/// A kubelet directory that is a symbolic link: the kernel shows mounts at the path it leads to.
#[test_with::root]
#[tokio::test(flavor = "multi_thread")]
async fn a_path_through_a_symlink_is_the_path_it_leads_to() {
    let mut rig = Rig::start(PoolKind::Xfs).await;
    let link = rig.dir.path().join("linked");
    std::fs::create_dir(rig.kubelet()).expect("mkdir");
    std::os::unix::fs::symlink(rig.kubelet(), &link).expect("symlink");
    let request = new_volume("files", 16 * MIB, mount_capability("ext4"));
    let files = rig.client.create_volume(request).await.expect("create").volume_id;
    let request = new_volume("raw", MIB, block_capability());
    let raw = rig.client.create_volume(request).await.expect("create").volume_id;
    for (volume, capability) in [(&files, mount_capability("ext4")), (&raw, block_capability())] {
        for _ in 0..2 {
            rig.client.publish(volume, capability.clone(), false, &link).await.expect("publish");
        }
        assert_eq!(code(rig.client.delete_volume(volume).await), Code::FailedPrecondition);
        rig.client.unpublish(volume, &link).await.expect("unpublish");
        let left: Vec<String> =
            leftovers(rig.dir.path()).into_iter().filter(|left| left.contains("kubelet")).collect();
        assert!(left.is_empty(), "left mounted: {left:?}");
        rig.client.delete_volume(volume).await.expect("delete");
    }
    rig.finish();
}

/// A filesystem that the kernel has shut down answers every look with EIO; it is unmounted all the
/// same, and its volume can be deleted.
#[test_with::root]
#[tokio::test(flavor = "multi_thread")]
async fn a_filesystem_that_is_shut_down_is_unpublished() {
    let mut rig = Rig::start(PoolKind::Dir).await;
    let kubelet = rig.kubelet();
    let request = new_volume("files", 300 * MIB, mount_capability("xfs"));
    let volume = rig.client.create_volume(request).await.expect("create").volume_id;
    let target = rig.client.publish(&volume, mount_capability("xfs"), false, &kubelet).await;
    let target = target.expect("publish");
    let shutdown =
        deltapath::sys::program::run("xfs_io", &["-x", "-c", "shutdown"], &target, |code| code == 0);
    shutdown.expect("shutdown");
    assert!(std::fs::metadata(&target).is_err(), "the filesystem still answers");
    rig.client.unpublish(&volume, &kubelet).await.expect("unpublish");
    assert!(leftovers(rig.dir.path()).is_empty(), "left: {:?}", leftovers(rig.dir.path()));
    rig.client.delete_volume(&volume).await.expect("delete");
    rig.finish();
}

/// What our own mkfs wrote before it was cut short is ours to overwrite; what the user wrote after it
/// is not.
#[test_with::root]
#[tokio::test(flavor = "multi_thread")]
async fn a_cut_mkfs_is_repeated_and_never_over_a_users_bytes() {
    let mut rig = Rig::start(PoolKind::Xfs).await;
    let kubelet = rig.kubelet();
    let mut request = new_volume("both", 16 * MIB, block_capability());
    request.volume_capabilities.push(mount_capability("ext4"));
    let volume = rig.client.create_volume(request).await.expect("create").volume_id;
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
    let target = rig.client.publish(&volume, mount_capability("ext4"), false, &kubelet).await;
    assert!(target.expect("formatted again").join("lost+found").is_dir());
    rig.client.unpublish(&volume, &kubelet).await.expect("unpublish");

    cut_short();
    let device = rig.attach(&volume).await;
    let mut content = Content::default();
    content.write(&device, 100, 1, 1);
    content.assert_equals(&device, 0, 4096);
    rig.detach(&volume).await;
    let refused = rig.client.publish(&volume, mount_capability("ext4"), false, &kubelet).await;
    assert_eq!(code(refused), Code::FailedPrecondition, "a user's bytes were formatted over");
    rig.client.unpublish(&volume, &kubelet).await.expect("unstage");
    let device = rig.attach(&volume).await;
    content.assert_equals(&device, 0, 4096);
    rig.detach(&volume).await;
    rig.finish();
}

fn fsfreeze(target: &Path) {
    let status = std::process::Command::new("fsfreeze").arg("--freeze").arg(target).status();
    assert!(status.expect("fsfreeze").success());
}

/// The incident: a user froze a filesystem and forgot it. Unpublish and unstage answered OK, the frozen filesystem
/// outlived its last mount, its volume could never be deleted, and staged again each write hung.
#[rstest::rstest]
#[test_with::root]
#[tokio::test(flavor = "multi_thread")]
async fn a_filesystem_that_its_user_left_frozen_is_thawed(#[values("ext4", "xfs", "btrfs")] fs_type: &str) {
    let mut rig = Rig::start(PoolKind::Dir).await;
    let kubelet = rig.kubelet();
    let capability = mount_capability(fs_type);
    let request = new_volume("files", 320 * MIB, capability.clone());
    let volume = rig.client.create_volume(request).await.expect("create").volume_id;
    let publish = async |rig: &mut Rig| {
        rig.client.publish(&volume, capability.clone(), false, &kubelet).await.expect("publish")
    };
    let target = publish(&mut rig).await;
    fsfreeze(&target);
    rig.client.unpublish(&volume, &kubelet).await.expect("unpublish");
    assert!(leftovers(rig.dir.path()).is_empty(), "{fs_type}: left {:?}", leftovers(rig.dir.path()));
    // As an older driver left it, or somebody who unmounts by hand.
    for repair in ["stage", "delete"] {
        let target = publish(&mut rig).await;
        fsfreeze(&target);
        for place in ["target", "staging"] {
            deltapath::sys::mount::unmount(&kubelet.join(&volume).join(place)).expect("unmount by hand");
        }
        if repair == "delete" {
            rig.client.unpublish(&volume, &kubelet).await.expect("nothing is mounted");
            rig.client.delete_volume(&volume).await.expect("a frozen filesystem without a mount");
            break;
        }
        let target = publish(&mut rig).await;
        let write = tokio::task::spawn_blocking(move || std::fs::write(target.join("file"), "written"));
        let written = tokio::time::timeout(std::time::Duration::from_secs(20), write).await;
        written.expect("a write hangs").expect("join").expect("write");
        rig.client.unpublish(&volume, &kubelet).await.expect("unpublish");
    }
    rig.finish();
}

/// The incident: a volume could not be staged at a path, which was on record by then; another was staged there; the
/// unstage of the first unmounted the second.
#[test_with::root]
#[tokio::test(flavor = "multi_thread")]
async fn an_unstage_leaves_what_another_volume_has_at_its_path() {
    let mut rig = Rig::start(PoolKind::Dir).await;
    let mut request = new_volume("raw", 16 * MIB, block_capability());
    request.volume_capabilities.push(mount_capability("ext4"));
    let raw = rig.client.create_volume(request).await.expect("create").volume_id;
    let device = rig.attach(&raw).await;
    Content::default().write(&device, 0, 5, 1);
    rig.detach(&raw).await;
    let request = new_volume("files", 16 * MIB, mount_capability("ext4"));
    let files = rig.client.create_volume(request).await.expect("create").volume_id;
    let path = rig.dir.path().join("staging");
    std::fs::create_dir(&path).expect("mkdir");
    let mut node = rig.client.node.clone();
    let stage = |volume: &str| proto::NodeStageVolumeRequest {
        volume_id: volume.to_owned(),
        staging_target_path: path.display().to_string(),
        volume_capability: Some(mount_capability("ext4")),
        ..Default::default()
    };
    let unstage = |volume: &str| proto::NodeUnstageVolumeRequest {
        volume_id: volume.to_owned(),
        staging_target_path: path.display().to_string(),
    };
    let refused = node.node_stage_volume(stage(&raw)).await;
    assert_eq!(status_code(refused), Code::FailedPrecondition, "it holds data and no filesystem");
    node.node_stage_volume(stage(&files)).await.expect("stage");
    node.node_unstage_volume(unstage(&raw)).await.expect("unstage the one that never was there");
    let mounted = deltapath::sys::mount::mounted_at(&path).expect("mounts");
    assert!(mounted.is_some(), "another volume was unmounted");
    rig.client.delete_volume(&raw).await.expect("delete");
    node.node_unstage_volume(unstage(&files)).await.expect("unstage");
    assert!(leftovers(rig.dir.path()).is_empty());
    rig.finish();
}

/// A place that is taken is refused before it is recorded, so that undoing the refused call does not undo
/// what is there.
#[test_with::root]
#[tokio::test(flavor = "multi_thread")]
async fn what_is_not_ours_is_never_undone() {
    let mut rig = Rig::start(PoolKind::Xfs).await;
    let kubelet = rig.kubelet();
    let mut volumes = Vec::new();
    for name in ["one", "two"] {
        let request = new_volume(name, 16 * MIB, mount_capability("ext4"));
        volumes.push(rig.client.create_volume(request).await.expect("create").volume_id);
    }
    let target = rig.client.publish(&volumes[0], mount_capability("ext4"), false, &kubelet).await;
    let target = target.expect("publish");
    std::fs::write(target.join("file"), "kept").expect("write");
    let staging = kubelet.join(&volumes[0]).join("staging");

    let stage = proto::NodeStageVolumeRequest {
        volume_id: volumes[1].clone(),
        staging_target_path: staging.display().to_string(),
        volume_capability: Some(mount_capability("ext4")),
        ..Default::default()
    };
    assert_eq!(status_code(rig.client.node.node_stage_volume(stage.clone()).await), Code::FailedPrecondition);
    let unstage = proto::NodeUnstageVolumeRequest {
        volume_id: volumes[1].clone(),
        staging_target_path: stage.staging_target_path,
    };
    rig.client.node.node_unstage_volume(unstage).await.expect("nothing to undo");
    assert_eq!(std::fs::read(staging.join("file")).expect("still mounted"), b"kept");

    let second = rig.client.publish(&volumes[1], mount_capability("ext4"), false, &kubelet).await;
    let second = second.expect("publish at its own place");
    unpublish_at(&mut rig, &volumes[1], &second).await;
    let taken = publish_at(&rig, &volumes[1], &target, mount_capability("ext4"), false);
    assert_eq!(status_code(rig.client.node.node_publish_volume(taken).await), Code::FailedPrecondition);
    unpublish_at(&mut rig, &volumes[1], &target).await;
    assert_eq!(std::fs::read(target.join("file")).expect("still mounted"), b"kept");

    let file = rig.dir.path().join("a stranger's");
    std::fs::write(&file, "kept").expect("write");
    let over = publish_at(&rig, &volumes[1], &file, mount_capability("ext4"), false);
    assert_eq!(status_code(rig.client.node.node_publish_volume(over).await), Code::InvalidArgument);
    unpublish_at(&mut rig, &volumes[1], &file).await;
    assert_eq!(std::fs::read(&file).expect("read"), b"kept");

    let request = new_volume("raw", MIB, block_capability());
    let raw = rig.client.create_volume(request).await.expect("create").volume_id;
    rig.attach(&raw).await;
    rig.client.unpublish(&raw, &kubelet).await.expect("unpublish");
    let staging = kubelet.join(&raw).join("staging");
    std::fs::create_dir_all(&staging).expect("mkdir");
    let stage = proto::NodeStageVolumeRequest {
        volume_id: raw.clone(),
        staging_target_path: staging.display().to_string(),
        volume_capability: Some(block_capability()),
        ..Default::default()
    };
    rig.client.node.node_stage_volume(stage).await.expect("stage");
    let over = publish_at(&rig, &raw, &file, block_capability(), false);
    assert_eq!(status_code(rig.client.node.node_publish_volume(over).await), Code::InvalidArgument);
    unpublish_at(&mut rig, &raw, &file).await;
    assert_eq!(std::fs::read(&file).expect("read"), b"kept");
    for volume in volumes.iter().chain([&raw]) {
        rig.client.unpublish(volume, &kubelet).await.expect("unpublish");
        rig.client.delete_volume(volume).await.expect("delete");
    }
    rig.finish();
}

/// A restored volume is read at many places, as backup tools ask for it, and never written.
#[rstest::rstest]
#[test_with::root]
#[tokio::test(flavor = "multi_thread")]
async fn a_restored_volume_is_read_at_many_places(
    #[values(PoolKind::Btrfs, PoolKind::Xfs, PoolKind::Dir)] pool: PoolKind,
    #[values("", "ext4", "xfs", "btrfs")] fs_type: &str,
) {
    let mut rig = Rig::start(pool).await;
    let kubelet = rig.kubelet();
    let capability = if fs_type.is_empty() { block_capability() } else { mount_capability(fs_type) };
    let request = new_volume(&format!("source {fs_type}"), 300 * MIB, capability.clone());
    let source = rig.client.create_volume(request).await.expect("create").volume_id;
    let target = rig.client.publish(&source, capability.clone(), false, &kubelet).await.expect("publish");
    let mut content = Content::default();
    match fs_type {
        "" => content.write(&target, 5, 5, 5),
        _ => std::fs::write(target.join("file"), fs_type).expect("write"),
    }
    let snapshot = rig.snapshot(&format!("snapshot {fs_type}"), &source).await;
    for mode in [Mode::MultiNodeReaderOnly, Mode::SingleNodeReaderOnly] {
        let readers = with_mode(capability.clone(), mode);
        let mut request = new_volume(&format!("restored {fs_type} {mode:?}"), 0, readers.clone());
        request.volume_content_source = Some(from_snapshot(&snapshot));
        let restored = rig.client.create_volume(request).await.expect("restore").volume_id;
        // Beside its source, which stays mounted for writing.
        let first = rig.client.publish(&restored, readers.clone(), true, &kubelet).await.expect("publish");
        let second = rig.dir.path().join("second");
        let beside = publish_at(&rig, &restored, &second, readers.clone(), true);
        let beside = rig.client.node.node_publish_volume(beside).await;
        let places = match mode {
            Mode::MultiNodeReaderOnly => {
                beside.expect("many readers");
                vec![&first, &second]
            }
            _ => {
                assert_eq!(status_code(beside), Code::FailedPrecondition, "one reader has one place");
                vec![&first]
            }
        };
        for place in places {
            if fs_type.is_empty() {
                content.assert_equals(place, 0, 64);
                let file = std::fs::File::options().write(true).open(place);
                assert!(file.and_then(|file| file.write_all_at(&[1; 4096], 0)).is_err(), "it took a write");
            } else {
                assert_eq!(std::fs::read(place.join("file")).expect("read"), fs_type.as_bytes());
                assert!(std::fs::write(place.join("new"), "x").is_err(), "{fs_type} took a write");
            }
        }
        unpublish_at(&mut rig, &restored, &second).await;
        rig.client.unpublish(&restored, &kubelet).await.expect("unpublish");
    }
    rig.client.unpublish(&source, &kubelet).await.expect("unpublish");
    rig.finish();
}

/// Where a volume is cannot be read: what is unpublished goes, and what else is there stays, in the kernel and on
/// record.
#[test_with::root]
#[tokio::test(flavor = "multi_thread")]
async fn an_unpublish_without_its_record_takes_nothing_else_away() {
    let mut rig = Rig::start(PoolKind::Dir).await;
    let (volume, device) = rig.block_volume("volume", 8 * MIB).await;
    let node = state_path(&rig.pool_dir(), &volume);
    let aside = node.with_extension("aside");
    std::fs::rename(&node, &aside).expect("rename");
    // What cannot be read as a file.
    std::fs::create_dir(&node).expect("mkdir");
    let stranger = rig.dir.path().join("second-target");
    std::fs::write(&stranger, "").expect("make a target");
    deltapath::sys::mount::bind(&device, &stranger, false).expect("bind");
    let request = proto::NodeUnpublishVolumeRequest {
        volume_id: volume.clone(),
        target_path: stranger.display().to_string(),
    };
    rig.client.node.node_unpublish_volume(request).await.expect("the pod ends");
    assert!(!stranger.exists());
    let data = rig.pool_dir().join("volumes").join(&volume).join("bytes/data.img");
    assert!(deltapath::sys::loopdev::LoopDevice::find(&data).expect("find").is_some(), "freed in use");
    assert!(node.is_dir(), "the record was written over");
    std::fs::remove_dir(&node).expect("rmdir");
    std::fs::rename(&aside, &node).expect("rename");
    std::fs::write(&device, [7; 4096]).expect("the device serves on");
    rig.detach(&volume).await;
    rig.finish();
}

/// The incident: while one volume was formatted, another was mounted where it was to go, and it was mounted over
/// that; neither could be staged elsewhere, frozen for a snapshot, or unstaged without the other.
#[test_with::root]
#[tokio::test(flavor = "multi_thread")]
async fn two_volumes_never_share_a_place() {
    let mut rig = Rig::start(PoolKind::Xfs).await;
    let place = rig.kubelet().join("place");
    std::fs::create_dir_all(&place).expect("mkdir");
    let mut stages = Vec::new();
    for name in ["one", "two"] {
        let request = new_volume(name, 64 * MIB, mount_capability("ext4"));
        stages.push(proto::NodeStageVolumeRequest {
            volume_id: rig.client.create_volume(request).await.expect("create").volume_id,
            staging_target_path: place.display().to_string(),
            volume_capability: Some(mount_capability("ext4")),
            ..Default::default()
        });
    }
    let (mut one, mut two) = (rig.client.node.clone(), rig.client.node.clone());
    let (one, two) =
        tokio::join!(one.node_stage_volume(stages[0].clone()), two.node_stage_volume(stages[1].clone()));
    let answers = [one, two].map(|answer| answer.map_or_else(|status| status.code(), |_| Code::Ok));
    let refused = |code: &Code| matches!(code, Code::Aborted | Code::FailedPrecondition);
    assert!(answers.contains(&Code::Ok) && answers.iter().any(refused), "{answers:?}");
    let mounts = deltapath::sys::mount::mounts().expect("mounts");
    assert_eq!(mounts.iter().filter(|mount| mount.mount_point == place).count(), 1, "stacked");
    for stage in stages {
        let request = proto::NodeUnstageVolumeRequest {
            volume_id: stage.volume_id.clone(),
            staging_target_path: stage.staging_target_path,
        };
        rig.client.node.node_unstage_volume(request).await.expect("unstage");
        rig.client.delete_volume(&stage.volume_id).await.expect("delete");
    }
    rig.finish();
}

/// While a directory is cleaned up, a device in it is freed by its owner and comes to serve another directory's file,
/// between the look at its path and the look at its status: it is not the clean-up's to detach.
#[test_with::root]
#[test]
fn a_device_that_changes_hands_is_not_taken_for_the_one_before() {
    use deltapath::sys::loopdev::{Access, FileId, LoopDevice};
    let dir = testkit::temp_dir();
    let _swept = SweptOnDrop(dir.path().to_owned());
    let [ours, strangers] = ["ours", "a stranger's"].map(|name| dir.path().join(name));
    for path in [&ours, &strangers] {
        std::fs::File::create(path).and_then(|file| file.set_len(MIB as u64)).expect("make");
    }
    // The kernel gives the freed number again, unless somebody else is quicker.
    for _ in 0..100 {
        let first = LoopDevice::attach(&ours, Access::ReadWrite).expect("attach");
        let second = std::cell::OnceCell::new();
        let found = LoopDevice::all_on(|path| {
            let is_ours = path == ours;
            if is_ours && second.get().is_none() {
                assert!(first.clone().detach().expect("detach"));
                let device = LoopDevice::attach(&strangers, Access::ReadWrite).expect("attach");
                second.set(device).expect("once");
            }
            is_ours
        });
        let id = FileId::of(&strangers).expect("stat");
        assert!(found.expect("look").iter().all(|device| device.backing() != Some(id)), "taken for ours");
        let second = second.into_inner().expect("ours was looked at");
        let is_same = second.path() == first.path();
        assert!(second.detach().expect("detach"));
        if is_same {
            return;
        }
    }
    panic!("the number was never given again");
}
