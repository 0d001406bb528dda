//! Group snapshots: all members or none, as of one moment.

use std::collections::BTreeSet;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use crate::faults::until;
use testkit::order::group_image;
use testkit::prelude::*;
use testkit::{Beside, members};

fn get(group: &str, members: &[String]) -> proto::GetVolumeGroupSnapshotRequest {
    proto::GetVolumeGroupSnapshotRequest {
        group_snapshot_id: group.to_owned(),
        snapshot_ids: members.to_vec(),
        ..Default::default()
    }
}

/// The bytes of a member of a group.
fn image(rig: &Rig, group: &proto::VolumeGroupSnapshot, member: usize) -> PathBuf {
    group_image(&rig.pool_dir(), &group.group_snapshot_id, &group.snapshots[member].snapshot_id)
}

#[apply(every_pool)]
async fn a_group_is_made_once_and_goes_with_all_its_members(rig: Rig<pool>) {
    let mut content = [Content::default(), Content::default()];
    let mut volumes = Vec::new();
    for (number, content) in content.iter_mut().enumerate() {
        let (volume, device) = rig.block_volume(&format!("volume {number}"), 4 * MIB).await;
        content.write(&device, 10 * number as u64, 5, 1 + number as u8);
        volumes.push(volume);
    }
    let group = rig.client.create_group("group", &volumes).await.expect("create");
    assert!(group.ready_to_use && group.creation_time.is_some());
    for (number, member) in group.snapshots.iter().enumerate() {
        assert_eq!(member.source_volume_id, volumes[number]);
        assert_eq!(member.group_snapshot_id, group.group_snapshot_id);
        assert!(member.ready_to_use);
        content[number].assert_equals(&image(&rig, &group, number), 0, 1024);
    }
    let swapped: Vec<String> = volumes.iter().rev().cloned().collect();
    let again = rig.client.create_group("group", &swapped).await.expect("the same volumes");
    assert_eq!(again, group);
    rig.crash().await;
    let again = rig.client.create_group("group", &volumes).await.expect("the same after a restart");
    assert_eq!(again, group);
    assert_eq!(code(rig.client.create_group("group", &volumes[..1]).await), Code::AlreadyExists);
    let mut styled = proto::CreateVolumeGroupSnapshotRequest {
        name: "group".into(),
        source_volume_ids: volumes.clone(),
        ..Default::default()
    };
    styled.parameters.insert("blockMetadataType".into(), "fixed".into());
    let styled = rig.client.groups.create_volume_group_snapshot(styled).await;
    assert_eq!(code(styled), Code::AlreadyExists);

    let ids = members(&group);
    for member in &ids {
        assert_eq!(code(rig.client.delete_snapshot(member).await), Code::InvalidArgument, "part of a group");
    }
    let listed = rig.client.snapshots().await.expect("list");
    assert!(
        listed.iter().all(|snapshot| snapshot.group_snapshot_id == group.group_snapshot_id),
        "{listed:?}"
    );
    let listed: BTreeSet<&String> = listed.iter().map(|snapshot| &snapshot.snapshot_id).collect();
    assert_eq!(listed, ids.iter().collect());
    let found = rig.client.groups.get_volume_group_snapshot(get(&group.group_snapshot_id, &ids)).await;
    assert_eq!(found.expect("get").into_inner().group_snapshot, Some(group.clone()));

    let (restored, device) = rig.volume_from("restored", 0, from_snapshot(&ids[1])).await;
    content[1].assert_equals(&device, 0, 1024);
    rig.detach(&restored).await;
    let wrong = rig.client.delete_group(&group.group_snapshot_id, &ids[..1]).await;
    assert_eq!(code(wrong), Code::InvalidArgument, "a list that is not the group's");
    for _ in 0..2 {
        rig.client.delete_group(&group.group_snapshot_id, &ids).await.expect("delete");
    }
    let gone = rig.client.groups.get_volume_group_snapshot(get(&group.group_snapshot_id, &ids)).await;
    assert_eq!(code(gone), Code::NotFound);
    for member in &ids {
        assert_eq!(code(rig.client.allocated(member, 0, 0).await), Code::NotFound);
    }
    assert_eq!(rig.client.snapshots().await.expect("list"), []);
    for volume in &volumes {
        rig.detach(volume).await;
    }
}

#[apply(device_test)]
async fn a_group_that_can_not_be_is_refused_and_leaves_nothing(rig: Rig<Xfs>) {
    let (volume, _) = rig.block_volume("volume", MIB).await;
    let both = [volume.clone(), volume.clone()];
    let half = [volume.clone(), "vol-00000000000000000000000000000000".to_owned()];
    for (name, ids, expected) in [
        ("", &both[..1], Code::InvalidArgument),
        ("group", &[], Code::InvalidArgument),
        ("group", &both, Code::InvalidArgument),
        ("group", &half, Code::NotFound),
        (&"x".repeat(10_000), &both[..1], Code::InvalidArgument),
    ] {
        assert_eq!(code(rig.client.create_group(name, ids).await), expected, "{name} of {ids:?}");
    }
    for (id, expected) in [("", Code::InvalidArgument), ("../x", Code::NotFound)] {
        let found = rig.client.groups.get_volume_group_snapshot(get(id, &[])).await;
        assert_eq!(code(found), expected);
    }
    rig.client.delete_group("../x", &[]).await.expect("an unknown id is no error");
    assert_eq!(code(rig.client.delete_group("", &[]).await), Code::InvalidArgument);
    for dir in ["groups", "snapshots", "staging"] {
        assert!(names(&rig.pool_dir().join(dir)).is_empty(), "{dir} is not empty");
    }
    rig.detach(&volume).await;
}

/// Writes n = 1, 2, 3, ... to one file, flushes, then writes n to the other and flushes. Between the numbers are pauses
/// without writes.
struct Writer {
    written: Arc<AtomicU64>,
    beside: Beside,
}

impl Writer {
    /// Returns once both files have a number of this writer. A number of an earlier writer would look like a B(n) without
    /// its A(n).
    fn start(first: File, second: File, pause: fn(u64) -> Duration) -> Self {
        let written = Arc::new(AtomicU64::new(0));
        let (counted, mut number) = (written.clone(), 0u64);
        let beside = Beside::start(move || {
            number += 1;
            for file in [&first, &second] {
                file.write_all_at(&number.to_le_bytes().repeat(512), 0).expect("write");
                file.sync_all().expect("flush");
            }
            counted.store(number, Ordering::Relaxed);
            std::thread::sleep(pause(number));
        });
        testkit::until("the writer writes", || written.load(Ordering::Relaxed) > 0);
        Writer { written, beside }
    }

    fn end(self) -> u64 {
        self.beside.stop();
        self.written.load(Ordering::Relaxed)
    }
}

/// A group never holds B(n) without A(n).
#[track_caller]
fn is_in_order(a: u64, b: u64) {
    assert!(b <= a && a <= b + 1, "a group holds A({a}) and B({b})");
}

fn number_at(path: &Path) -> u64 {
    let mut bytes = vec![0; BLOCK as usize];
    File::open(path).expect("open").read_exact_at(&mut bytes, 0).expect("read");
    let first = u64::from_le_bytes(bytes[..8].try_into().expect("8 bytes"));
    assert!(bytes.chunks(8).all(|word| word == first.to_le_bytes()), "a torn block in {}", path.display());
    first
}

/// Seen in other drivers: members of a group snapshot are taken one after another. Here a writer writes A(n) to one raw
/// device, flushes, then writes B(n) to another. No group may hold B(n) without A(n). Both orders of the devices in the
/// request are tested, since a wrong order of cloning shows only with one of them.
#[apply(every_pool)]
async fn a_group_of_raw_devices_keeps_the_order_of_writes_or_fails(rig: Rig<pool>) {
    let mut volumes = Vec::new();
    let mut devices = Vec::new();
    for number in 0..2 {
        let (volume, device) = rig.block_volume(&format!("volume {number}"), 4 * MIB).await;
        volumes.push(volume);
        devices.push(device);
    }
    // Most pauses are too short for a group, some are long enough.
    let pause = |number: u64| Duration::from_micros([0, 100, 500, 50, 20_000][number as usize % 5]);
    // Without any pause the group is right or refused, and a refused one leaves nothing.
    let restless = Writer::start(open_device(&devices[0]), open_device(&devices[1]), |_| Duration::ZERO);
    for round in 0..2 {
        match rig.client.create_group(&format!("restless {round}"), &volumes).await {
            Err(error) => assert_eq!(error.code(), Code::FailedPrecondition, "{error}"),
            Ok(group) => {
                is_in_order(number_at(&image(&rig, &group, 0)), number_at(&image(&rig, &group, 1)));
                let ids = members(&group);
                rig.client.delete_group(&group.group_snapshot_id, &ids).await.expect("delete");
            }
        }
        // The files of a deleted group are removed in the background.
        for dir in ["groups", "staging"] {
            let dir = rig.pool_dir().join(dir);
            let is_deleted = |name: &String| dir.join(name).join("deleted.json").exists();
            until(&format!("{} is empty", dir.display()), || names(&dir).iter().all(is_deleted)).await;
        }
    }
    restless.end();
    let writer = Writer::start(open_device(&devices[0]), open_device(&devices[1]), pause);
    let (mut taken, mut refused) = (0, 0);
    for round in 0..60 {
        let reversed = round % 2 == 1;
        let mut ids = volumes.clone();
        if reversed {
            ids.reverse();
        }
        match rig.client.create_group(&format!("group {round}"), &ids).await {
            Err(error) => {
                assert_eq!(error.code(), Code::FailedPrecondition, "{error}");
                refused += 1;
            }
            Ok(group) => {
                taken += 1;
                let (first, second) = if reversed { (1, 0) } else { (0, 1) };
                is_in_order(number_at(&image(&rig, &group, first)), number_at(&image(&rig, &group, second)));
                let ids = members(&group);
                rig.client.delete_group(&group.group_snapshot_id, &ids).await.expect("delete");
            }
        }
    }
    let written = writer.end();
    println!("{pool:?}: {taken} groups taken, {refused} refused, {written} pairs written");
    assert!(taken > 0 && written > 60, "{taken} groups of {written} pairs prove nothing");
    for round in 0..10 {
        let name = format!("at rest {round}");
        let group = rig.client.create_group(&name, &volumes).await.expect("at rest it always succeeds");
        for member in 0..2 {
            assert_eq!(number_at(&image(&rig, &group, member)), written);
        }
        rig.client.delete_group(&group.group_snapshot_id, &members(&group)).await.expect("delete");
    }
    for volume in &volumes {
        rig.detach(volume).await;
    }
}

/// Filesystems are frozen together. So a group of filesystems, with at most one raw device, succeeds under any load.
#[apply(every_pool)]
async fn a_group_of_filesystems_keeps_the_order_of_writes_under_load(rig: Rig<pool>) {
    let mut volumes = Vec::new();
    let mut targets = Vec::new();
    for fs_type in ["ext4", "xfs", "btrfs"] {
        let capability = mount_capability(fs_type);
        let volume = rig.volume(fs_type, 320 * MIB, capability.clone()).await;
        targets.push(rig.publish(&volume, capability).await);
        volumes.push(volume);
    }
    let create = |target: &Path| {
        let path = target.join("n");
        std::fs::write(&path, vec![0; BLOCK as usize]).expect("write");
        File::options().write(true).open(path).expect("open")
    };
    // Writers in a chain: ext4 before xfs, xfs before btrfs.
    let files: Vec<File> = targets.iter().map(|target| create(target)).collect();
    let pairs = [(0, 1), (1, 2)];
    for (round, (first, second)) in pairs.into_iter().cycle().take(4).enumerate() {
        let handle = |file: usize| files[file].try_clone().expect("clone");
        let writer = Writer::start(handle(first), handle(second), |_| Duration::ZERO);
        let name = format!("group {round}");
        let group = rig.client.create_group(&name, &volumes).await.expect("filesystems are frozen");
        // The writer continues, so nothing is left frozen.
        let seen = writer.written.load(Ordering::Relaxed);
        while writer.written.load(Ordering::Relaxed) < seen + 3 {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        writer.end();
        let mut numbers = Vec::new();
        for member in [first, second] {
            let capability = mount_capability(["ext4", "xfs", "btrfs"][member]);
            let source = from_snapshot(&group.snapshots[member].snapshot_id);
            let name = format!("restored {round} {member}");
            let restored = rig.made_from(&name, 0, capability.clone(), source).await;
            let target = rig.publish(&restored, capability).await;
            numbers.push(number_at(&target.join("n")));
            rig.delete(&restored).await;
        }
        is_in_order(numbers[0], numbers[1]);
        rig.client.delete_group(&group.group_snapshot_id, &members(&group)).await.expect("delete");
        // The next pair starts again from 0.
        for file in &files {
            file.write_all_at(&[0; BLOCK as usize], 0).expect("write");
            file.sync_all().expect("flush");
        }
    }
    drop(files);
    for volume in &volumes {
        rig.detach(volume).await;
    }
}
