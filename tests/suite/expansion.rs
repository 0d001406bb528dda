//! Expansion of file, device and filesystem, online and offline, and what it must not change.

use std::os::unix::fs::FileExt;

use deltapath::sys::{self, blockdev};
use proto::{CapacityRange, GetCapacityRequest, GetCapacityResponse};

use testkit::orders::{Cut, Orders, Point};
use testkit::prelude::*;

fn node_expand(rig: &Rig, volume: &str, bytes: i64) -> proto::NodeExpandVolumeRequest {
    let mut request = requests::node_expand(volume, rig.kubelet().join(volume).join("target"));
    request.capacity_range = Some(CapacityRange { required_bytes: bytes, limit_bytes: 0 });
    request
}

/// Seen in other drivers: expansion changes only a record, and file, device and filesystem keep their size.
#[apply(every_pool)]
async fn file_device_and_filesystem_grow_while_in_use(
    rig: Rig<pool>,
    #[values("ext4", "xfs", "btrfs")] fs_type: &str,
) {
    let capability = mount_capability(fs_type);
    let (volume, target) = rig.published(fs_type, 400 * MIB, capability.clone()).await;
    std::fs::write(target.join("file"), "kept").expect("write");
    let image = rig.volume_dir(&volume).data();
    for (bytes, is_more) in [(800 * MIB, true), (800 * MIB, false), (1300 * MIB, true)] {
        let expanded = rig.client.expand_volume(&volume, bytes).await.expect("expand");
        assert_eq!(expanded.capacity_bytes, bytes);
        assert!(expanded.node_expansion_required, "a filesystem grows on the node");
        assert_eq!(std::fs::metadata(&image).expect("stat").len(), bytes as u64);
        let answer = rig.client.node.node_expand_volume(node_expand(&rig, &volume, bytes)).await;
        let may_grow_ext4 = sys::has_capability(sys::CAP_SYS_RESOURCE).expect("capabilities");
        if fs_type == "ext4" && is_more && !may_grow_ext4 {
            // Without the capability the kernel does not grow a mounted ext4, so it grows at the next stage.
            assert_eq!(code(answer), Code::FailedPrecondition);
            rig.detach(&volume).await;
            rig.publish(&volume, capability.clone()).await;
        } else {
            assert_eq!(answer.expect("node expand").into_inner().capacity_bytes, bytes);
        }
        let space = sys::space(&target).expect("statvfs");
        let least = bytes as u64 / 10 * 8;
        assert!(space.total > least, "{fs_type}: {} bytes on a volume of {bytes}", space.total);
        assert_eq!(std::fs::read(target.join("file")).expect("read"), b"kept");
    }
    rig.detach(&volume).await;
}

#[apply(device_test)]
async fn an_expansion_that_can_not_be_is_refused_and_changes_nothing() {
    let mut rig = Rig::start_with(PoolKind::Dir, &["--max-volume-size", "1Gi"], "info").await;
    let volume = rig.volume("raw", 8 * MIB, block_capability()).await;
    let range = |required_bytes, limit_bytes| Some(CapacityRange { required_bytes, limit_bytes });
    let request = |volume: &str, capacity_range, volume_capability| proto::ControllerExpandVolumeRequest {
        volume_id: volume.to_owned(),
        capacity_range,
        volume_capability,
        ..Default::default()
    };
    for (request, expected) in [
        (request("", range(MIB, 0), None), Code::InvalidArgument),
        (request("unknown", range(MIB, 0), None), Code::NotFound),
        (request(&volume, None, None), Code::InvalidArgument),
        (request(&volume, range(-1, 0), None), Code::InvalidArgument),
        (request(&volume, range(16 * MIB, 9 * MIB), None), Code::InvalidArgument),
        (request(&volume, range(1 << 40, 0), None), Code::OutOfRange),
        (request(&volume, range(i64::MAX, 0), None), Code::OutOfRange),
        (request(&volume, range(0, MIB), None), Code::OutOfRange),
        (request(&volume, range(8 * MIB + 1, 8 * MIB + 2), None), Code::OutOfRange),
        (request(&volume, range(16 * MIB, 0), Some(mount_capability("zfs"))), Code::InvalidArgument),
    ] {
        let shown = format!("{request:?}");
        let refused = code(rig.client.controller.controller_expand_volume(request).await);
        assert_eq!(refused, expected, "{shown}");
    }
    for bytes in [0, 1, 8 * MIB] {
        let same = rig.client.expand_volume(&volume, bytes).await.expect("large enough already");
        assert_eq!(same.capacity_bytes, 8 * MIB);
    }
    let image = rig.volume_dir(&volume).data();
    assert_eq!(std::fs::metadata(&image).expect("stat").len(), 8 << 20);

    rig.attach(&volume).await;
    let ahead = node_expand(&rig, &volume, 16 * MIB);
    assert_eq!(code(rig.client.node.node_expand_volume(ahead).await), Code::OutOfRange);
    let mut elsewhere = node_expand(&rig, &volume, 8 * MIB);
    elsewhere.volume_path = rig.dir.path().display().to_string();
    assert_eq!(code(rig.client.node.node_expand_volume(elsewhere).await), Code::NotFound);
    let nowhere =
        proto::NodeExpandVolumeRequest { volume_path: String::new(), ..node_expand(&rig, &volume, 0) };
    assert_eq!(code(rig.client.node.node_expand_volume(nowhere).await), Code::InvalidArgument);
    rig.detach_and_finish(&volume).await;
}

/// A crash between the steps for the file and the record leaves a file that is longer than the volume. A crash between the
/// record and the device leaves a device that is shorter. The next use corrects both.
#[apply(device_test)]
async fn an_expansion_cut_short_is_put_right(rig: Rig<Xfs>) {
    let (volume, device, mut content) = rig.written_volume("cut", 8 * MIB, (0, 2048, 3)).await;
    let dir = rig.pool_dir().join("volumes").join(&volume);
    rig.kill();
    let extend = || {
        let image = std::fs::File::options().write(true).open(dir.join("bytes/data.img")).expect("open");
        image.set_len(16 << 20).expect("set_len");
    };
    extend();
    rig.start_again().await;
    let snapshot = rig.snapshot("after the crash", &volume).await;
    let copy = rig.snapshot_dir(&snapshot).data();
    assert_eq!(std::fs::metadata(&copy).expect("stat").len(), 8 << 20);
    assert_eq!(blockdev::size(&device).expect("size"), 8 << 20);
    content.assert_equals(&device, 0, 2048);

    rig.kill();
    // Record and file have 16 MiB, the device has 8 MiB.
    extend();
    let record = std::fs::read_to_string(dir.join("record.json")).expect("read");
    let larger =
        record.replace(&format!("\"capacity\": {}", 8 << 20), &format!("\"capacity\": {}", 16 << 20));
    assert_ne!(record, larger);
    std::fs::write(dir.join("record.json"), larger).expect("write");
    rig.start_again().await;
    assert_eq!(rig.attach(&volume).await, device);
    assert_eq!(blockdev::size(&device).expect("size"), 16 << 20);
    content.write(&device, 4000, 96, 4);
    content.assert_equals(&device, 0, 4096);
    rig.detach(&volume).await;
}

async fn capacity(rig: &Rig, asked: GetCapacityRequest) -> Result<GetCapacityResponse, tonic::Status> {
    Ok(rig.client.controller.clone().get_capacity(asked).await?.into_inner())
}

/// `--overcommit` limits the provisioned size. Without the flag volumes are thin and never refused for lack of space.
#[apply(device_test)]
async fn overcommit_bounds_what_is_promised() {
    // The pool image of a rig is 8 GiB, minus what xfs itself uses.
    let mut rig = Rig::start_with(PoolKind::Xfs, &["--overcommit", "2"], "info").await;
    let room = capacity(&rig, Default::default()).await.expect("capacity");
    assert!((14 * 1024 * MIB..=16 * 1024 * MIB).contains(&room.available_capacity), "{room:?}");
    assert_eq!(room.maximum_volume_size, Some(room.available_capacity / BLOCK as i64 * BLOCK as i64));
    let request = |name: &str, bytes| new_volume(name, bytes, block_capability());
    let first = rig.client.create_volume(request("first", 10 * 1024 * MIB)).await.expect("fits").volume_id;
    let refused = code(rig.client.create_volume(request("second", 10 * 1024 * MIB)).await);
    assert_eq!(refused, Code::ResourceExhausted);
    assert_eq!(code(rig.client.expand_volume(&first, 20 * 1024 * MIB).await), Code::ResourceExhausted);
    rig.client.expand_volume(&first, 12 * 1024 * MIB).await.expect("fits");
    let left = capacity(&rig, Default::default()).await.expect("capacity");
    assert_eq!(left.available_capacity, room.available_capacity - 12 * 1024 * MIB);
    rig.client.delete_volume(&first).await.expect("delete");
    rig.client.create_volume(request("second", 10 * 1024 * MIB)).await.expect("fits now");
    rig.finish();

    let mut rig = Rig::start(PoolKind::Xfs).await;
    rig.client.create_volume(request("thin", 32 << 40)).await.expect("volumes are thin");
    let volume_capabilities = vec![mount_capability("xfs")];
    let mut ask = GetCapacityRequest { volume_capabilities, ..Default::default() };
    ask.parameters.insert("csi.storage.k8s.io/fstype".into(), "xfs".into());
    ask.parameters.insert("blockSize".into(), "1Mi".into());
    // The pool's image is sparse, so the free space is that of the disk below it if that is less than the pool's.
    let free = || {
        let available = |path: std::path::PathBuf| sys::space(&path).expect("statvfs").available as i64;
        available(rig.pool_dir()).min(available(rig.data_dir()))
    };
    let before = free();
    let room = capacity(&rig, ask).await.expect("capacity");
    let after = free();
    let near = before.min(after) - 64 * MIB..=before.max(after) + 64 * MIB;
    assert!(near.contains(&room.available_capacity), "{room:?}, {before} and {after} free");
    assert_eq!(room.minimum_volume_size, Some(300 * MIB));
    assert_eq!(room.maximum_volume_size, Some(64 << 40));
    let node = ("topology.deltapath.csi.dev/node".to_owned(), "node-2".to_owned());
    let elsewhere = GetCapacityRequest {
        accessible_topology: Some(proto::Topology { segments: [node].into() }),
        ..Default::default()
    };
    let room = capacity(&rig, elsewhere).await.expect("capacity");
    assert_eq!((room.available_capacity, room.maximum_volume_size), (0, Some(0)), "no room on another node");
    // The provisioner sends the class's parameters unchanged, so the filesystem may be named only there.
    let mut bare = GetCapacityRequest::default();
    bare.parameters.insert("csi.storage.k8s.io/fstype".into(), "btrfs".into());
    let room = capacity(&rig, bare.clone()).await.expect("capacity");
    assert_eq!(room.minimum_volume_size, Some(256 * MIB));
    bare.parameters.insert("csi.storage.k8s.io/fstype".into(), "zfs".into());
    assert_eq!(code(capacity(&rig, bare).await), Code::InvalidArgument);
    rig.finish();
}

/// The part of the file past the end of the device cannot be written, so the new part of an expanded volume reads as zeros.
#[apply(device_test)]
async fn what_an_expansion_adds_reads_as_zeros(rig: Rig<Dir>) {
    let (volume, device) = rig.block_volume("zeros", 4 * MIB).await;
    rig.client.expand_volume(&volume, 8 * MIB).await.expect("expand");
    let mut bytes = vec![1; 4 << 20];
    let file = std::fs::File::open(&device).expect("open");
    file.read_exact_at(&mut bytes, 4 << 20).expect("read");
    assert!(bytes.iter().all(|byte| *byte == 0));
    drop(file);
    rig.detach(&volume).await;
}

/// The incident: the last sync of an expansion failed. The retry found the record large enough and answered OK, and a power
/// cut brought back the old record.
#[apply(device_test)]
async fn a_retry_syncs_what_the_call_before_could_not(rig: Rig<Dir>) {
    let volume = rig.volume("volume", 8 * MIB, block_capability()).await;
    let dir = rig.pool_dir().join("volumes").join(&volume);
    let mut orders = Orders::new(rig.dir.path());
    let is_last = |point: &&Point| point.step == "sync" && point.path == dir;
    orders.count();
    rig.client.expand_volume(&volume, 16 * MIB).await.expect("expand");
    let at = orders.withdraw().iter().find(is_last).expect("it is synced").number;
    orders.give(Cut::Error(nix::libc::EIO), at, "calls");
    rig.client.expand_volume(&volume, 24 * MIB).await.expect_err("the sync fails");
    assert!(orders.withdraw().iter().any(|point| point.hit && point.path == dir));
    orders.count();
    let expanded = rig.client.expand_volume(&volume, 24 * MIB).await.expect("the retry");
    assert_eq!(expanded.capacity_bytes, 24 * MIB);
    assert!(orders.withdraw().iter().any(|point| is_last(&point)), "it is not synced");
}
