//! Snapshots: their content, their cost, and what a failure leaves.

use std::fs::File;
use std::io::Write;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};

use deltapath::sys::program::run;

use testkit::prelude::*;
use testkit::{Beside, set_frozen};

/// Seen in other drivers: a buffered write to the open device is missing in the snapshot, because nothing was flushed.
#[apply(every_pool)]
async fn a_snapshot_holds_writes_that_nobody_synced(rig: Rig<pool>) {
    let (volume, device) = rig.block_volume("open", 16 * MIB).await;
    // The writer keeps the device open, since the last close would flush it.
    let writer = open_device(&device);
    for round in 0..5 {
        let mut content = Content::default();
        let fill = 1 + round as u8;
        let bytes: Vec<u8> = (7..1000).flat_map(|block| testkit::content::block_bytes(block, fill)).collect();
        writer.write_all_at(&bytes, 7 * BLOCK).expect("write");
        content.blocks.extend((7..1000).map(|block| (block, fill)));
        let snapshot = rig.snapshot(&format!("round {round}"), &volume).await;
        let (restored, device) =
            rig.volume_from(&format!("restored {round}"), 16 * MIB, from_snapshot(&snapshot)).await;
        content.assert_equals(&device, 0, 4096);
        rig.detach(&restored).await;
    }
    drop(writer);
    rig.detach(&volume).await;
}

/// The bytes that a directory takes on disk.
fn disk_usage(dir: &Path) -> u64 {
    let blocks = |path: &PathBuf| std::fs::symlink_metadata(path).expect("stat").blocks();
    testkit::paths_below(dir).iter().filter(|path| path.is_file()).map(blocks).sum::<u64>() * 512
}

/// Seen in other drivers: a snapshot of a volume that was never written takes its full capacity.
#[apply(every_pool)]
async fn a_snapshot_takes_what_was_written_not_the_capacity(rig: Rig<pool>) {
    let (volume, device) = rig.block_volume("sparse", 100 * GIB).await;
    let empty = rig.snapshot("empty", &volume).await;
    let usage = |rig: &Rig, id: &str| disk_usage(&rig.pool_dir().join("snapshots").join(id));
    assert!(usage(&rig, &empty) < 256 << 10, "an empty snapshot takes {}", usage(&rig, &empty));
    let mut content = Content::default();
    content.write(&device, 20 << 18, 256, 1);
    let written = rig.snapshot("written", &volume).await;
    assert!(usage(&rig, &written) < 4 << 20, "1 MiB of data takes {}", usage(&rig, &written));
    assert_eq!(rig.allocated(&written).await, content.allocated(BLOCK));
    rig.detach(&volume).await;
}

/// Seen in other drivers: a Block volume made from a Filesystem snapshot holds an archive's bytes.
/// Here both are images of the same device.
#[apply(device_cases)]
#[case::ext4_on_dir(PoolKind::Dir, "ext4")]
#[case::ext4_on_xfs(PoolKind::Xfs, "ext4")]
#[case::xfs_on_xfs(PoolKind::Xfs, "xfs")]
async fn a_filesystem_snapshot_restores_as_a_block_volume(#[case] pool: PoolKind, #[case] fs_type: &str) {
    let mut rig = Rig::start(pool).await;
    let (volume, target) = rig.published("files", 300 * MIB, mount_capability(fs_type)).await;
    // A buffered write to the mounted filesystem.
    File::create(target.join("hello")).and_then(|mut file| file.write_all(b"world")).expect("write");
    let snapshot = rig.snapshot("live", &volume).await;
    std::fs::write(target.join("hello"), b"overwritten").expect("write");

    // Restored as a device, as a backup tool reads it.
    let (block, device) = rig.volume_from("as block", 300 * MIB, from_snapshot(&snapshot)).await;
    let found = run("blkid", &["-p", "-o", "value", "-s", "TYPE"], &device, |code| code == 0);
    assert_eq!(String::from_utf8_lossy(&found.expect("blkid").stdout).trim(), fs_type);
    if fs_type == "ext4" {
        testkit::fsck("ext4", &device);
    }
    let allocated = rig.client.allocated(&snapshot, 0, 0).await.expect("metadata of a Filesystem snapshot");
    assert!(allocated.bytes() > 0 && allocated.bytes() < 150 << 20);
    rig.detach(&block).await;

    // Restored as a filesystem, mounted beside its source.
    let capability = mount_capability(fs_type);
    let restored = rig.made_from("as files", 300 * MIB, capability.clone(), from_snapshot(&snapshot)).await;
    let beside = rig.publish(&restored, capability).await;
    assert_eq!(std::fs::read(beside.join("hello")).expect("read"), b"world");
    for id in [&restored, &volume] {
        rig.detach(id).await;
    }
    if fs_type == "xfs" {
        // Unpublished only now: a frozen xfs keeps its log dirty, so that a mount removes files that were unlinked while open.
        let image = rig.volume_dir(&restored).data();
        run("xfs_repair", &["-n", "-P", "-f"], &image, |code| code == 0).expect("a clean filesystem");
    }
    rig.finish();
}

#[apply(every_pool)]
async fn snapshots_are_idempotent_by_name_and_outlive_their_volume(rig: Rig<pool>) {
    let (one, device) = rig.block_volume("one", 8 * MIB).await;
    let (two, _) = rig.block_volume("two", 8 * MIB).await;
    let mut content = Content::default();
    content.write(&device, 3, 5, 1);
    let taken = rig.client.create_snapshot("taken", &one).await.expect("create");
    assert!(taken.ready_to_use);
    assert_eq!((taken.size_bytes, taken.source_volume_id.as_str()), (8 * MIB, one.as_str()));
    content.write(&device, 100, 5, 2);
    assert_eq!(rig.client.create_snapshot("taken", &one).await.expect("a retry"), taken);
    assert_eq!(code(rig.client.create_snapshot("taken", &two).await), Code::AlreadyExists);
    assert_eq!(code(rig.client.create_snapshot("", &two).await), Code::InvalidArgument);
    assert_eq!(code(rig.client.create_snapshot("new", "").await), Code::InvalidArgument);
    assert_eq!(code(rig.client.create_snapshot("new", "unknown").await), Code::NotFound);

    for id in [&one, &two] {
        rig.delete(id).await;
    }
    assert_eq!(rig.client.create_snapshot("taken", &one).await.expect("a retry"), taken);
    let get = requests::snapshot(&taken.snapshot_id);
    let got = rig.client.controller.get_snapshot(get).await.expect("get").into_inner().snapshot;
    assert_eq!(got, Some(taken.clone()));
    let (restored, device) = rig.volume_from("restored", 8 * MIB, from_snapshot(&taken.snapshot_id)).await;
    let mut at_snapshot = Content::default();
    at_snapshot.blocks.extend((3..8).map(|block| (block, 1)));
    at_snapshot.assert_equals(&device, 0, 2048);
    rig.detach(&restored).await;

    rig.client.delete_snapshot(&taken.snapshot_id).await.expect("delete");
    rig.client.delete_snapshot(&taken.snapshot_id).await.expect("delete again");
    rig.client.delete_snapshot("../unknown").await.expect("an unknown id");
    let get = requests::snapshot(taken.snapshot_id);
    assert_eq!(code(rig.client.controller.get_snapshot(get).await), Code::NotFound);
}

/// Seen in other drivers: a snapshot that fails leaves its file behind, and each retry leaves another.
#[apply(every_pool)]
async fn a_snapshot_that_fails_leaves_nothing(rig: Rig<pool>) {
    let (volume, ..) = rig.written_volume("doomed", 8 * MIB, (0, 64, 1)).await;
    rig.detach(&volume).await;
    let image = rig.volume_dir(&volume).data();
    let aside = image.with_extension("aside");
    std::fs::rename(&image, &aside).expect("take the image away");
    for _ in 0..3 {
        assert_eq!(code(rig.client.create_snapshot("doomed", &volume).await), Code::Internal);
    }
    assert!(names(&rig.pool_dir().join("staging")).is_empty(), "a failed snapshot left something");
    assert!(names(&rig.pool_dir().join("snapshots")).is_empty());
    std::fs::rename(&aside, &image).expect("bring it back");
    rig.snapshot("doomed", &volume).await;
}

/// A raw device that is being written. Either the copy shows the device at one moment, or the call fails. The writer writes a
/// number to the first block and then to the last. In a torn copy the last is ahead of the first.
#[apply(every_pool)]
async fn a_snapshot_of_a_device_under_write_is_never_torn(rig: Rig<pool>) {
    let (volume, device, _) = rig.written_volume("busy", 32 * MIB, (0, 8192, 1)).await;
    for block in [0, 8191] {
        open_device(&device).write_all_at(&0u64.to_le_bytes(), block * BLOCK).expect("write");
    }
    let (file, mut number) = (open_device(&device), 1u64);
    let writer = Beside::start(move || {
        let mut block = vec![0; BLOCK as usize];
        block[..8].copy_from_slice(&number.to_le_bytes());
        for offset in [0, 8191 * BLOCK] {
            file.write_all_at(&block, offset).expect("write");
            file.sync_data().expect("sync");
        }
        number += 1;
        // Sometimes a pause, in which a copy can succeed.
        if number.is_multiple_of(200) {
            std::thread::sleep(std::time::Duration::from_millis(300));
        }
    });
    let mut taken = 0;
    for round in 0..8 {
        match rig.client.create_snapshot(&format!("round {round}"), &volume).await {
            Ok(snapshot) => {
                taken += 1;
                let source = from_snapshot(&snapshot.snapshot_id);
                let (restored, device) =
                    rig.volume_from(&format!("restored {round}"), 32 * MIB, source).await;
                let number = |offset| {
                    let mut bytes = [0; 8];
                    open_device(&device).read_exact_at(&mut bytes, offset).expect("read");
                    u64::from_le_bytes(bytes)
                };
                let (first, last) = (number(0), number(8191 * BLOCK));
                assert!(first == last || first == last + 1, "torn: {first} then {last}");
                rig.detach(&restored).await;
            }
            refused => {
                assert_eq!(pool, PoolKind::Dir, "a clone is one step: {refused:?}");
                is_refused(refused, Code::FailedPrecondition, &["written during"]);
            }
        }
    }
    writer.stop();
    assert!(pool == PoolKind::Dir || taken == 8);
    assert!(names(&rig.pool_dir().join("staging")).is_empty());
    rig.detach(&volume).await;
}

/// Preallocated extents read as zeros and are holes; writing into one is a change.
#[apply(every_pool)]
async fn preallocated_space_is_a_hole(rig: Rig<pool>) {
    let (volume, _) = rig.block_volume("preallocated", 8 * MIB).await;
    rig.detach(&volume).await;
    let image = rig.volume_dir(&volume).data();
    let file = open_device(&image);
    nix::fcntl::fallocate(&file, nix::fcntl::FallocateFlags::empty(), 0, 4 * MIB).expect("fallocate");
    file.sync_all().expect("sync");
    drop(file);
    let first = rig.snapshot("first", &volume).await;
    assert_eq!(rig.client.allocated(&first, 0, 0).await.expect("allocated").tuples().count(), 0);
    let device = rig.attach(&volume).await;
    let mut content = Content::default();
    content.write(&device, 10, 2, 1);
    let second = rig.snapshot("second", &volume).await;
    assert_eq!(rig.changed(&first, &second).await, [10, 11]);
    rig.detach(&volume).await;
}

fn freeze(mount_point: &Path, how: &str) {
    testkit::ok(std::process::Command::new("fsfreeze").arg(how).arg(mount_point));
}

/// A snapshot of a filesystem that the user has frozen succeeds, and it stays frozen. A filesystem that a dead driver left
/// frozen is thawed by the next driver.
#[apply(every_pool)]
async fn a_freeze_is_undone_by_whoever_made_it(rig: Rig<pool>) {
    let kubelet = rig.kubelet();
    let (volume, target) = rig.published("files", 64 * MIB, mount_capability("ext4")).await;
    std::fs::write(target.join("file"), "before").expect("write");
    freeze(&target, "--freeze");
    let snapshot = rig.client.create_snapshot("while frozen", &volume).await;
    // To freeze it again fails, so it is still frozen.
    let again = std::process::Command::new("fsfreeze").arg("--freeze").arg(&target).output().expect("run");
    freeze(&target, "--unfreeze");
    snapshot.expect("a snapshot of a frozen filesystem");
    assert!(!again.status.success(), "the driver thawed a freeze that was not its own");
    rig.snapshot("while thawed", &volume).await;
    std::fs::write(target.join("file"), "after").expect("the filesystem takes writes again");

    // What a driver leaves that is killed during a freeze: the record on disk, and the frozen filesystem.
    rig.kill();
    freeze(&target, "--freeze");
    set_frozen(&rig.pool_dir(), &volume);
    // Another filesystem is mounted over the first of its mounts.
    let covered = kubelet.join(&volume).join("staging");
    let none = deltapath::sys::mount::Flags::empty();
    deltapath::sys::mount::mount("none".as_ref(), &covered, "tmpfs", none, "size=1m").expect("cover it");
    rig.start_again().await;
    deltapath::sys::mount::unmount_top(&covered).expect("uncover it");
    let frozen = &state_of(&rig.pool_dir(), &volume)["frozen"];
    assert!(frozen.is_null(), "the intent is kept after the thaw");
    let thawed = std::process::Command::new("fsfreeze").arg("--unfreeze").arg(&target).output().expect("run");
    assert!(!thawed.status.success(), "the next driver left the filesystem frozen");
    rig.detach(&volume).await;
}

/// If something else is mounted over a filesystem, it is frozen through another of its mounts. If there is none, the error
/// says what to unmount.
#[apply(device_test)]
async fn a_hidden_filesystem_is_frozen_where_it_is_seen(rig: Rig<Xfs>) {
    let kubelet = rig.kubelet();
    let (volume, target) = rig.published("files", 64 * MIB, mount_capability("ext4")).await;
    let staging = kubelet.join(&volume).join("staging");
    let none = deltapath::sys::mount::Flags::empty();
    let cover = |place: &Path| {
        deltapath::sys::mount::mount("none".as_ref(), place, "tmpfs", none, "size=1m").expect("cover it");
    };
    cover(&staging);
    std::fs::write(target.join("file"), "never synced").expect("write");
    let snapshot = rig.snapshot("seen at its target", &volume).await;
    cover(&target);
    let refused = rig.client.create_snapshot("seen nowhere", &volume).await;
    is_refused(refused, Code::FailedPrecondition, &["unmount that first"]);
    for place in [&staging, &target] {
        deltapath::sys::mount::unmount_top(place).expect("uncover it");
    }
    rig.snapshot("seen again", &volume).await;
    rig.detach(&volume).await;
    let restored =
        rig.made_from("restored", 64 * MIB, mount_capability("ext4"), from_snapshot(&snapshot)).await;
    let target = rig.publish(&restored, mount_capability("ext4")).await;
    let file = target.join("file");
    assert_eq!(std::fs::read(file).expect("read"), b"never synced");
    rig.detach(&restored).await;
}

/// Every answer with a snapshot has its accessible topology. The required topology is checked before anything is made.
#[apply(device_test)]
async fn snapshots_tell_where_they_can_be_used_and_are_made_nowhere_else(rig: Rig<Dir>) {
    let request = proto::GetPluginCapabilitiesRequest {};
    let claimed = rig.client.identity.get_plugin_capabilities(request).await.expect("capabilities");
    use proto::plugin_capability::{Service, Type, service};
    let kind = service::Type::SnapshotAccessibilityConstraints;
    let claim = Some(Type::Service(Service { r#type: kind.into() }));
    assert!(claimed.into_inner().capabilities.iter().any(|capability| capability.r#type == claim));
    let info = rig.client.node.node_get_info(proto::NodeGetInfoRequest {}).await.expect("info").into_inner();
    let here = info.accessible_topology.expect("a topology");
    let only_here = [here.clone()];
    let (key, value) = here.segments.iter().next().expect("one segment");
    assert_eq!(value, "node-1");
    let segment =
        |key: &str, value: &str| proto::Topology { segments: [(key.to_owned(), value.to_owned())].into() };
    let elsewhere = segment(key, "node-2");
    let zone = segment("topology.kubernetes.io/zone", "a");

    let volume = rig.volume("volume", MIB, block_capability()).await;
    let request = |name: &str, requisite: &[&proto::Topology], preferred: &[&proto::Topology]| {
        let topologies = |all: &[&proto::Topology]| all.iter().map(|one| (*one).clone()).collect();
        proto::CreateSnapshotRequest {
            name: name.to_owned(),
            source_volume_id: volume.clone(),
            accessibility_requirements: Some(proto::TopologyRequirement {
                requisite: topologies(requisite),
                preferred: topologies(preferred),
            }),
            ..Default::default()
        }
    };
    let mut controller = rig.client.controller.clone();
    for refused in [request("refused", &[&elsewhere], &[]), request("refused", &[&elsewhere], &[&elsewhere])]
    {
        is_refused(controller.create_snapshot(refused).await, Code::ResourceExhausted, &["node-1"]);
    }
    assert!(testkit::names(&rig.pool_dir().join("snapshots")).is_empty(), "a refused call made something");
    assert!(testkit::names(&rig.pool_dir().join("staging")).is_empty(), "a refused call left something");
    for (name, request) in [
        ("here", request("here", &[&here], &[&here])),
        ("here or there", request("here or there", &[&elsewhere, &here], &[&elsewhere])),
        ("preferred", request("preferred", &[], &[&elsewhere])),
        ("of another kind", request("of another kind", &[&zone], &[])),
        ("anywhere", request("anywhere", &[], &[])),
    ] {
        for _ in 0..2 {
            let made = controller.create_snapshot(request.clone()).await.expect(name).into_inner();
            assert_eq!(made.snapshot.expect(name).accessible_topology, only_here);
        }
    }
    // A snapshot that an earlier call made can only be used here too.
    let refused = controller.create_snapshot(request("here", &[&elsewhere], &[])).await;
    assert_eq!(code(refused), Code::ResourceExhausted);

    let group = rig.client.create_group("group", std::slice::from_ref(&volume)).await.expect("group");
    let get = proto::GetVolumeGroupSnapshotRequest {
        group_snapshot_id: group.group_snapshot_id.clone(),
        snapshot_ids: testkit::members(&group),
        ..Default::default()
    };
    let again = rig.client.groups.get_volume_group_snapshot(get).await.expect("get").into_inner();
    let list = rig.client.snapshots().await.expect("ListSnapshots");
    assert_eq!(list.len(), 6);
    for snapshot in
        group.snapshots.iter().chain(&again.group_snapshot.expect("a group").snapshots).chain(&list)
    {
        assert_eq!(snapshot.accessible_topology, only_here, "{snapshot:?}");
        let get = requests::snapshot(&snapshot.snapshot_id);
        let reported = controller.get_snapshot(get).await.expect("get").into_inner();
        assert_eq!(reported.snapshot.expect("a snapshot").accessible_topology, only_here);
    }
}
