//! No call on a volume removes paths, mounts or devices of other volumes or other programs.

use std::path::Path;
use std::process::Command;

use deltapath::sys::sweep::devices_below;

use testkit::prelude::*;
use testkit::{leftovers, state_path, swept_dir};

/// The kubelet directory is a symbolic link, so the kernel shows mounts at the path that it leads to.
#[apply(device_test)]
async fn a_path_through_a_symlink_is_the_path_it_leads_to(rig: Rig<Xfs>) {
    let link = rig.dir.path().join("linked");
    std::fs::create_dir(rig.kubelet()).expect("mkdir");
    std::os::unix::fs::symlink(rig.kubelet(), &link).expect("symlink");
    let files = rig.volume("files", 16 * MIB, mount_capability("ext4")).await;
    let raw = rig.volume("raw", MIB, block_capability()).await;
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
}

/// The incident: staging a volume failed after the path was recorded, and another volume was staged there. The unstage of
/// the first volume unmounted the second.
#[apply(device_test)]
async fn an_unstage_leaves_what_another_volume_has_at_its_path(rig: Rig<Dir>) {
    let raw = rig.volume_of_both("raw", 16 * MIB).await;
    let device = rig.attach(&raw).await;
    Content::default().write(&device, 0, 5, 1);
    rig.detach(&raw).await;
    let files = rig.volume("files", 16 * MIB, mount_capability("ext4")).await;
    let path = rig.dir.path().join("staging");
    std::fs::create_dir(&path).expect("mkdir");
    let mut node = rig.client.node.clone();
    let stage = |volume: &str| stage_of(volume, &path, mount_capability("ext4"));
    let unstage = |volume: &str| requests::unstage(volume, &path);
    let refused = node.node_stage_volume(stage(&raw)).await;
    assert_eq!(code(refused), Code::FailedPrecondition, "it holds data and no filesystem");
    node.node_stage_volume(stage(&files)).await.expect("stage");
    node.node_unstage_volume(unstage(&raw)).await.expect("unstage the one that never was there");
    let mounted = deltapath::sys::mount::mounted_at(&path).expect("mounts");
    assert!(mounted.is_some(), "another volume was unmounted");
    rig.client.delete_volume(&raw).await.expect("delete");
    node.node_unstage_volume(unstage(&files)).await.expect("unstage");
    assert!(leftovers(rig.dir.path()).is_empty());
}

/// A path where something else is mounted is refused before it is recorded. So undoing the refused call does not unmount
/// it.
#[apply(device_test)]
async fn what_is_not_ours_is_never_undone(rig: Rig<Xfs>) {
    let kubelet = rig.kubelet();
    let mut volumes = Vec::new();
    for name in ["one", "two"] {
        volumes.push(rig.volume(name, 16 * MIB, mount_capability("ext4")).await);
    }
    let target = rig.publish(&volumes[0], mount_capability("ext4")).await;
    std::fs::write(target.join("file"), "kept").expect("write");
    let staging = kubelet.join(&volumes[0]).join("staging");

    let stage = stage_of(&volumes[1], &staging, mount_capability("ext4"));
    assert_eq!(code(rig.client.node.node_stage_volume(stage.clone()).await), Code::FailedPrecondition);
    let unstage = requests::unstage(&volumes[1], stage.staging_target_path);
    rig.client.node.node_unstage_volume(unstage).await.expect("nothing to undo");
    assert_eq!(std::fs::read(staging.join("file")).expect("still mounted"), b"kept");

    let second = rig.publish(&volumes[1], mount_capability("ext4")).await;
    rig.unpublish_at(&volumes[1], &second).await;
    let taken = rig.publish_at(&volumes[1], &target, mount_capability("ext4"), false).await;
    assert_eq!(code(taken), Code::FailedPrecondition);
    rig.unpublish_at(&volumes[1], &target).await;
    assert_eq!(std::fs::read(target.join("file")).expect("still mounted"), b"kept");

    let file = rig.dir.path().join("a stranger's");
    std::fs::write(&file, "kept").expect("write");
    let over = rig.publish_at(&volumes[1], &file, mount_capability("ext4"), false).await;
    assert_eq!(code(over), Code::InvalidArgument);
    rig.unpublish_at(&volumes[1], &file).await;
    assert_eq!(std::fs::read(&file).expect("read"), b"kept");

    let raw = rig.volume("raw", MIB, block_capability()).await;
    rig.attach(&raw).await;
    rig.detach(&raw).await;
    let staging = kubelet.join(&raw).join("staging");
    std::fs::create_dir_all(&staging).expect("mkdir");
    rig.client.node.node_stage_volume(stage_of(&raw, &staging, block_capability())).await.expect("stage");
    let over = rig.publish_at(&raw, &file, block_capability(), false).await;
    assert_eq!(code(over), Code::InvalidArgument);
    rig.unpublish_at(&raw, &file).await;
    assert_eq!(std::fs::read(&file).expect("read"), b"kept");
    for volume in volumes.iter().chain([&raw]) {
        rig.delete(volume).await;
    }
}

/// The state of a volume cannot be read. An unpublish removes only the named mount; the other mounts and the record stay.
#[apply(device_test)]
async fn an_unpublish_without_its_record_takes_nothing_else_away(rig: Rig<Dir>) {
    let (volume, device) = rig.block_volume("volume", 8 * MIB).await;
    let node = state_path(&rig.pool_dir(), &volume);
    let aside = node.with_extension("aside");
    std::fs::rename(&node, &aside).expect("rename");
    // A directory cannot be read as a file.
    std::fs::create_dir(&node).expect("mkdir");
    let stranger = rig.dir.path().join("second-target");
    std::fs::write(&stranger, "").expect("make a target");
    deltapath::sys::mount::bind(&device, &stranger, false).expect("bind");
    rig.unpublish_at(&volume, &stranger).await;
    assert!(!stranger.exists());
    let data = rig.volume_dir(&volume).data();
    assert!(
        deltapath::sys::loopdev::LoopDevice::find(&data).expect("find").is_some(),
        "the device was freed while in use"
    );
    assert!(node.is_dir(), "the record was written over");
    std::fs::remove_dir(&node).expect("rmdir");
    std::fs::rename(&aside, &node).expect("rename");
    std::fs::write(&device, [7; 4096]).expect("the device serves on");
    rig.detach(&volume).await;
}

/// The incident: while one volume was being formatted, another was mounted at its path, and the first was mounted over it.
/// Neither could be staged elsewhere, frozen for a snapshot, or unstaged without the other.
#[apply(device_test)]
async fn two_volumes_never_share_a_place(rig: Rig<Xfs>) {
    let place = rig.kubelet().join("place");
    std::fs::create_dir_all(&place).expect("mkdir");
    let mut stages = Vec::new();
    for name in ["one", "two"] {
        let volume = rig.volume(name, 64 * MIB, mount_capability("ext4")).await;
        stages.push(stage_of(&volume, &place, mount_capability("ext4")));
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
        let request = requests::unstage(&stage.volume_id, stage.staging_target_path);
        rig.client.node.node_unstage_volume(request).await.expect("unstage");
        rig.client.delete_volume(&stage.volume_id).await.expect("delete");
    }
}

/// The incident: partitions that were added to a published device stayed on the loop device after the volume was deleted, and the next
/// volume on that device could be read through them. One that is still open when the next volume is attached is not
/// taken over either.
#[apply(device_test)]
async fn partitions_that_somebody_added_to_a_device_go_with_the_volume(rig: Rig<Xfs>) {
    let partitions = |device: &Path| {
        let name = device.file_name().expect("a name").to_string_lossy().into_owned();
        let below = testkit::names(&Path::new("/sys/block").join(&name));
        below.into_iter().filter(|entry| entry.starts_with(&format!("{name}p"))).count()
    };
    let add = |device: &Path| {
        testkit::ok(Command::new("addpart").arg(device).args(["1", "256", "8192"]));
        assert_eq!(partitions(device), 1);
    };
    let device_of = |pool: &Path| devices_below(pool).expect("devices").pop().expect("a device").path();
    let (volume, _) = rig.block_volume("raw", 16 * MIB).await;
    let device = device_of(&rig.pool_dir());
    add(&device);
    rig.detach(&volume).await;
    assert_eq!(partitions(&device), 0, "the partition stayed");

    // Open while the volume is unpublished, so it cannot be removed then.
    rig.attach(&volume).await;
    let device = device_of(&rig.pool_dir());
    add(&device);
    let partition = std::fs::File::open(format!("{}p1", device.display())).expect("open");
    rig.detach(&volume).await;
    drop(partition);
    let name = device.file_name().expect("a name").to_string_lossy().into_owned();
    let backing = Path::new("/sys/block").join(name).join("loop/backing_file");
    let deadline = std::time::Instant::now() + std::time::Duration::from_secs(20);
    while backing.exists() && std::time::Instant::now() < deadline {
        tokio::time::sleep(std::time::Duration::from_millis(10)).await;
    }
    rig.attach(&volume).await;
    let found = partitions(&device_of(&rig.pool_dir()));
    assert_eq!(found, 0, "the next volume can be read through an old partition");
    rig.detach(&volume).await;
}

/// The incident: a device that somebody had made read-only stayed so after its volume was deleted, and the next volume on it could be
/// neither formatted nor written. Its readahead was the former volume's too.
#[apply(device_test)]
async fn what_somebody_set_on_a_device_goes_with_the_volume() {
    let mut rig = Rig::start(PoolKind::Xfs).await;
    let (volume, _) = rig.block_volume("raw", 16 * MIB).await;
    // The number that is free next may be another test's by then: this finds out, and tries again.
    for _ in 0..20 {
        let device = devices_below(&rig.pool_dir()).expect("devices").pop().expect("a device").path();
        for flags in [&["--setra", "8192"][..], &["--setro"]] {
            testkit::ok(Command::new("blockdev").args(flags).arg(&device));
        }
        rig.detach(&volume).await;
        let published = rig.attach(&volume).await;
        let next = devices_below(&rig.pool_dir()).expect("devices").pop().expect("a device");
        let read =
            |name: &str| std::fs::read_to_string(next.sysfs().join(name)).expect("read").trim().to_owned();
        assert_eq!((read("ro").as_str(), read("queue/read_ahead_kb").as_str()), ("0", "128"));
        Content::default().write(&published, 0, 1, 1);
        if next.path() == device {
            rig.detach_and_finish(&volume).await;
            return;
        }
    }
    panic!("never the same device again");
}

/// During a clean-up of a directory, a device is freed by its owner and attached to a file of another directory, after its
/// path was read and before its status was read. The clean-up must not detach it.
#[test_with::root]
#[test]
fn a_device_that_changes_hands_is_not_taken_for_the_one_before() {
    use deltapath::sys::loopdev::{Access, FileId, LoopDevice};
    let (dir, _swept) = swept_dir();
    let [ours, strangers] = ["ours", "a stranger's"].map(|name| dir.path().join(name));
    for path in [&ours, &strangers] {
        std::fs::File::create(path).and_then(|file| file.set_len(MIB as u64)).expect("make");
    }
    // The kernel assigns the freed number again, unless another program gets it first.
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
        assert!(
            found.expect("look").iter().all(|device| device.backing() != Some(id)),
            "another program's device was taken for ours"
        );
        let second = second.into_inner().expect("ours was looked at");
        let is_same = second.path() == first.path();
        assert!(second.detach().expect("detach"));
        if is_same {
            return;
        }
    }
    panic!("the number was never given again");
}
