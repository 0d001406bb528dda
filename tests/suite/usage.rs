//! Statistics of volumes, attributes that can be set while they are in use, inline volumes and attachments.

use std::path::Path;

use deltapath::sys::{self, sweep::devices_below};
use proto::volume_usage::Unit;

use crate::volume_health::node_health;
use testkit::prelude::*;
use testkit::{mount_with, set_state};

/// Seen in other drivers: the statistics of a Block volume are those of `/dev`'s filesystem, and those of a Filesystem volume
/// are the host disk's.
#[apply(every_pool)]
async fn stats_of_a_block_volume_are_its_own(rig: Rig<pool>) {
    let (raw, device, _) = rig.written_volume("raw", 64 * MIB, (0, 256, 1)).await;
    std::fs::File::open(&device).and_then(|file| file.sync_all()).expect("sync");
    let usage = rig.stats(&raw, &device).await.expect("stats");
    let [bytes] = usage.as_slice() else { panic!("a Block volume has bytes alone: {usage:?}") };
    assert_eq!((bytes.unit, bytes.total), (i32::from(Unit::Bytes), 64 * MIB));
    assert_eq!((bytes.used, bytes.available), (MIB, 63 * MIB));
    for (volume, path, expected) in [
        ("", "/x", Code::InvalidArgument),
        (raw.as_str(), "", Code::InvalidArgument),
        ("unknown", "/x", Code::NotFound),
        (&raw, "/dev", Code::NotFound),
        (&raw, "relative/../path", Code::NotFound),
    ] {
        assert_eq!(code(rig.stats(volume, Path::new(path)).await), expected, "{path}");
    }
    rig.detach(&raw).await;
}

/// The same for filesystems, which report inodes too.
#[apply(every_pool)]
async fn stats_of_a_mounted_volume_are_its_own(
    rig: Rig<pool>,
    #[values("ext4", "xfs", "btrfs")] fs_type: &str,
) {
    let kubelet = rig.kubelet();
    let capability = mount_capability(fs_type);
    let (volume, target) = rig.published(fs_type, 320 * MIB, capability).await;
    std::fs::write(target.join("file"), vec![7; 20 << 20]).expect("write");
    std::fs::File::open(target.join("file")).and_then(|file| file.sync_all()).expect("sync");
    for path in [target.clone(), kubelet.join(&volume).join("staging")] {
        let usage = rig.stats(&volume, &path).await.expect("stats");
        let of = |unit: Unit| usage.iter().find(|usage| usage.unit == i32::from(unit));
        let bytes = of(Unit::Bytes).expect("bytes");
        assert!((200 * MIB..=320 * MIB).contains(&bytes.total), "{fs_type}: {bytes:?}");
        assert!((20 * MIB..100 * MIB).contains(&bytes.used), "{fs_type}: {bytes:?}");
        assert!(bytes.used + bytes.available <= bytes.total, "{fs_type}: {bytes:?}");
        match of(Unit::Inodes) {
            Some(inodes) => {
                assert!(inodes.used > 0 && inodes.used + inodes.available == inodes.total, "{inodes:?}");
            }
            None => assert_eq!(fs_type, "btrfs", "only btrfs has no limit of inodes"),
        }
    }
    rig.detach(&volume).await;
    assert_eq!(code(rig.stats(&volume, &target).await), Code::NotFound, "it is unpublished");
}

/// The mount flag `ro` is a request of the user, so it is not reported as an error. A btrfs that is mounted read-only is not
/// grown.
#[apply(device_cases)]
async fn a_volume_mounted_with_ro_is_well(rig: Rig<Xfs>, #[values("ext4", "xfs", "btrfs")] fs_type: &str) {
    let (volume, _) = rig.published(fs_type, 320 * MIB, mount_capability(fs_type)).await;
    rig.detach(&volume).await;
    rig.client.expand_volume(&volume, 640 * MIB).await.expect("expand");
    let target = rig.publish(&volume, mount_with(fs_type, &["noatime,ro"])).await;
    assert!(std::fs::write(target.join("file"), "x").is_err(), "{fs_type} took a write");
    assert_eq!(node_health(&rig, &volume).await, []);
    rig.detach(&volume).await;
}

/// The read-ahead of the one device, and whether it does direct I/O.
fn tuned(rig: &Rig) -> [String; 2] {
    ["queue/read_ahead_kb", "loop/dio"].map(|attribute| queue(rig, attribute))
}

fn queue(rig: &Rig, attribute: &str) -> String {
    let device = devices_below(&rig.pool_dir()).expect("devices").pop().expect("one device");
    std::fs::read_to_string(device.sysfs().join(attribute)).expect(attribute).trim().to_owned()
}

/// VolumeAttributesClass parameters change the attached device, survive a restart, and apply from the start if the volume is
/// made with them. Writes that are still in the page cache are in a snapshot too.
#[apply(every_pool)]
async fn attributes_change_the_live_device(rig: Rig<pool>) {
    let (volume, device) = rig.block_volume("tuned", 8 * MIB).await;
    let direct = queue(&rig, "loop/dio");
    for (pairs, kib, dio) in [
        (vec![("readAheadKiB", "64"), ("directIO", "false")], "64", "0"),
        (vec![("readAheadKiB", "2048")], "2048", "0"),
        (vec![], "2048", "0"),
    ] {
        for _ in 0..2 {
            rig.modify(&volume, &pairs).await.expect("modify");
        }
        assert_eq!(tuned(&rig), [kib, dio]);
    }
    for (volume, pairs, expected) in [
        ("", vec![("readAheadKiB", "4")], Code::InvalidArgument),
        ("unknown", vec![("readAheadKiB", "4")], Code::NotFound),
        (&volume, vec![("readAheadKiB", "4"), ("iops", "1")], Code::InvalidArgument),
        (&volume, vec![("readAheadKiB", "5")], Code::InvalidArgument),
    ] {
        assert_eq!(code(rig.modify(volume, &pairs).await), expected, "{pairs:?}");
    }
    assert_eq!(queue(&rig, "queue/read_ahead_kb"), "2048", "a refused call changed the device");

    let mut content = Content::default();
    content.write(&device, 0, 100, 1);
    let first = rig.snapshot("first", &volume).await;
    let before = content.clone();
    content.write(&device, 50, 20, 2);
    content.discard(&device, 5, 5);
    let second = rig.snapshot("second", &volume).await;
    assert_eq!(rig.changed(&first, &second).await, content.changed_since(&before, BLOCK));
    rig.detach(&volume).await;

    rig.crash().await;
    rig.attach(&volume).await;
    assert_eq!(tuned(&rig), ["2048", "0"]);
    match rig.modify(&volume, &[("directIO", "true")]).await {
        Ok(()) => assert_eq!(queue(&rig, "loop/dio"), "1"),
        // The filesystem below has no direct I/O, and had none at the start either.
        Err(status) => assert_eq!((status.code(), direct.as_str()), (Code::InvalidArgument, "0")),
    }
    rig.detach(&volume).await;

    let mut request = new_volume("tuned from the start", MIB, block_capability());
    request.mutable_parameters.insert("readAheadKiB".into(), "256".into());
    let volume = rig.client.create_volume(request.clone()).await.expect("create").volume_id;
    rig.attach(&volume).await;
    assert_eq!(queue(&rig, "queue/read_ahead_kb"), "256");
    rig.detach(&volume).await;
    request.name = "untuned".into();
    request.mutable_parameters.insert("iops".into(), "1".into());
    assert_eq!(code(rig.client.controller.create_volume(request).await), Code::InvalidArgument);
}

pub fn ephemeral(rig: &Rig, handle: &str, size: &str) -> proto::NodePublishVolumeRequest {
    let mut request = proto::NodePublishVolumeRequest {
        volume_id: handle.to_owned(),
        target_path: rig.dir.path().join(format!("target-{}", handle.len())).display().to_string(),
        volume_capability: Some(mount_capability("ext4")),
        ..Default::default()
    };
    for (name, value) in
        [("csi.storage.k8s.io/ephemeral", "true"), ("csi.storage.k8s.io/pod.name", "pod"), ("size", size)]
    {
        request.volume_context.insert(name.into(), value.into());
    }
    request
}

fn undo(publish: &proto::NodePublishVolumeRequest) -> proto::NodeUnpublishVolumeRequest {
    requests::unpublish(&publish.volume_id, &publish.target_path)
}

fn nothing_is_left(rig: &Rig, publish: &proto::NodePublishVolumeRequest) {
    assert!(!Path::new(&publish.target_path).exists(), "the target stays");
    testkit::no_device_left(&rig.pool_dir());
    for dir in ["volumes", "staging"] {
        assert!(testkit::names(&rig.pool_dir().join(dir)).is_empty(), "{dir} is not empty");
    }
}

#[apply(every_pool)]
async fn an_ephemeral_volume_lives_from_publish_to_unpublish(rig: Rig<pool>) {
    let publish = ephemeral(&rig, "csi-1234", "64Mi");
    let target = Path::new(&publish.target_path).to_owned();
    for _ in 0..2 {
        rig.client.node.node_publish_volume(publish.clone()).await.expect("publish");
    }
    std::fs::write(target.join("file"), "kept").expect("write");
    let usage = rig.stats("csi-1234", &target).await.expect("stats");
    assert!(usage[0].total < 64 * MIB && usage[0].total > 32 * MIB, "{usage:?}");
    assert_eq!(node_health(&rig, "csi-1234").await, []);
    assert_eq!(rig.client.volumes().await.expect("list"), [], "an ephemeral volume is listed");
    rig.crash().await;
    rig.client.node.node_publish_volume(publish.clone()).await.expect("publish");
    assert_eq!(std::fs::read(target.join("file")).expect("read"), b"kept");
    let mut clash = publish.clone();
    clash.readonly = true;
    assert_eq!(code(rig.client.node.node_publish_volume(clash).await), Code::AlreadyExists);
    for _ in 0..2 {
        rig.client.node.node_unpublish_volume(undo(&publish)).await.expect("unpublish");
        nothing_is_left(&rig, &publish);
    }

    // A crash between making and publishing the volume, or during the publish.
    rig.client.node.node_publish_volume(publish.clone()).await.expect("publish");
    sys::mount::unmount(&target).expect("unmount");
    rig.crash().await;
    rig.client.node.node_publish_volume(publish.clone()).await.expect("repaired");
    rig.client.node.node_unpublish_volume(undo(&publish)).await.expect("unpublish");
    nothing_is_left(&rig, &publish);
    rig.client.node.node_publish_volume(publish.clone()).await.expect("publish");
    rig.kill();
    sys::sweep::sweep(rig.dir.path()).expect("a reboot");
    let volumes = rig.pool_dir();
    rig.start_again().await;
    let volume = testkit::names(&volumes.join("volumes")).pop().expect("still there");
    rig.kill();
    set_state(&volumes, &volume, serde_json::json!({}));
    let _ = std::fs::remove_dir(&target);
    rig.start_again().await;
    nothing_is_left(&rig, &publish);

    for (context, value, expected) in [
        ("size", "much", Code::InvalidArgument),
        ("colour", "red", Code::InvalidArgument),
        ("size", "100Ti", Code::OutOfRange),
    ] {
        let mut wrong = ephemeral(&rig, "csi-wrong", "1Mi");
        wrong.volume_context.insert(context.into(), value.into());
        assert_eq!(code(rig.client.node.node_publish_volume(wrong.clone()).await), expected);
        nothing_is_left(&rig, &wrong);
    }
    let mut flags = ephemeral(&rig, "csi-flags", "8Mi");
    flags.volume_capability = Some(mount_with("ext4", &["nonsense"]));
    let refused = code(rig.client.node.node_publish_volume(flags.clone()).await);
    assert_eq!(refused, Code::FailedPrecondition);
    nothing_is_left(&rig, &flags);
    let real = rig.volume("real", MIB, block_capability()).await;
    let posing = ephemeral(&rig, &real, "8Mi");
    assert_eq!(code(rig.client.node.node_publish_volume(posing).await), Code::InvalidArgument);
    rig.client.delete_volume(&real).await.expect("delete");
    let mut raw = ephemeral(&rig, "csi-raw", "8Mi");
    raw.volume_capability = Some(block_capability());
    assert_eq!(code(rig.client.node.node_publish_volume(raw.clone()).await), Code::InvalidArgument);
    nothing_is_left(&rig, &raw);
}

#[apply(device_test)]
async fn attachments_bind_volumes_to_their_node() {
    let flags = ["--enable-attach", "--max-volumes-per-node", "2"];
    let mut rig = Rig::start_with(PoolKind::Dir, &flags, "info").await;
    let info = rig.client.node.node_get_info(proto::NodeGetInfoRequest {}).await.expect("info").into_inner();
    assert_eq!(info.max_volumes_per_node, 2);
    let mut ids = Vec::new();
    for name in ["one", "two", "three"] {
        ids.push(rig.volume(name, MIB, block_capability()).await);
    }
    let attach = |volume: &str, node: &str, readonly| proto::ControllerPublishVolumeRequest {
        readonly,
        ..requests::attach(volume, node)
    };
    let mut controller = rig.client.controller.clone();
    for _ in 0..2 {
        controller.controller_publish_volume(attach(&ids[0], "node-1", true)).await.expect("attach");
    }
    for (request, expected) in [
        (attach(&ids[0], "node-1", false), Code::AlreadyExists),
        (attach(&ids[0], "node-2", true), Code::NotFound),
        (attach("unknown", "node-1", true), Code::NotFound),
        (attach("", "node-1", true), Code::InvalidArgument),
        (attach(&ids[0], "", true), Code::InvalidArgument),
    ] {
        assert_eq!(code(controller.controller_publish_volume(request).await), expected);
    }
    controller.controller_publish_volume(attach(&ids[1], "node-1", false)).await.expect("attach");
    let third = controller.controller_publish_volume(attach(&ids[2], "node-1", false)).await;
    assert_eq!(code(third), Code::ResourceExhausted);
    rig.crash().await;
    let mut controller = rig.client.controller.clone();
    let list =
        controller.list_volumes(proto::ListVolumesRequest::default()).await.expect("list").into_inner();
    for entry in list.entries {
        let id = entry.volume.expect("volume").volume_id;
        let nodes = entry.status.expect("status").published_node_ids;
        assert_eq!(nodes.len(), usize::from(id != ids[2]), "{nodes:?}");
    }
    // Attached read-only, so published read-only.
    let device = rig.attach(&ids[0]).await;
    assert!(crate::node::try_write(&device).is_err(), "a device attached for reading took a write");
    rig.detach(&ids[0]).await;
    assert_eq!(code(rig.client.delete_volume(&ids[0]).await), Code::FailedPrecondition, "it is attached");
    // The node's name changes at a restart. The attachment has the old name, and can still be undone.
    rig.terminate();
    rig.start_again_with(&["--enable-attach", "--node-id", "renamed"]).await;
    let mut controller = rig.client.controller.clone();
    let elsewhere = controller.controller_publish_volume(attach(&ids[0], "renamed", true)).await;
    assert_eq!(code(elsewhere), Code::FailedPrecondition, "published to another node");
    for node in ["node-2", "node-1", ""] {
        controller.controller_unpublish_volume(requests::detach(&ids[0], node)).await.expect("detach");
    }
    let unknown = requests::detach("unknown", "node-1");
    controller.controller_unpublish_volume(unknown).await.expect("nothing to undo");
    let refused = controller.controller_unpublish_volume(requests::detach("", "x")).await;
    assert_eq!(code(refused), Code::InvalidArgument);
    rig.client.delete_volume(&ids[0]).await.expect("delete");
    rig.finish();
}
