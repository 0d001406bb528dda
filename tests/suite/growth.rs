//! How far a filesystem can grow. Growth beyond that is refused where it is asked for, and nothing that the driver starts harms what is
//! there: `resize2fs` destroys an ext4 that it grows further than was reserved.

use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::process::Command;

use deltapath::sys::{self, loopdev::LoopDevice};
use proto::CapacityRange;

use crate::faults::pool_full::small_pool_of;
use testkit::fsck;
use testkit::order::image;
use testkit::prelude::*;

fn write_files(dir: &Path) {
    for number in 0..5u8 {
        let dir = dir.join(format!("dir-{number}"));
        std::fs::create_dir(&dir).expect("mkdir");
        std::fs::write(dir.join("file"), vec![number; 3000]).expect("write");
    }
}

fn check_files(dir: &Path) {
    for number in 0..5u8 {
        let path = dir.join(format!("dir-{number}")).join("file");
        assert_eq!(std::fs::read(&path).expect("read"), vec![number; 3000], "{}", path.display());
    }
}

fn run(program: &str, arguments: &[&str], device: &Path) {
    testkit::ok(Command::new(program).args(arguments).arg(device));
}

/// The most bytes that the error names.
fn most(error: &csi_client::Error) -> i64 {
    let text = error.to_string();
    let at =
        text.find("at most ").unwrap_or_else(|| panic!("the most is not named: {text}")) + "at most ".len();
    text[at..].split(' ').next().and_then(|word| word.parse().ok()).unwrap_or_else(|| panic!("{text}"))
}

/// Each filesystem from its least size, by restore into a larger volume and by expansion, used and not.
#[apply(device_cases)]
#[case::ext4("ext4", MIB, &[(10, true), (1000, true), (1100, true), (30_000, true)])]
#[case::xfs("xfs", 300 * MIB, &[(10, true), (1000, false), (1100, false), (30_000, false)])]
#[case::btrfs("btrfs", 256 * MIB, &[(10, true), (1000, true), (1100, true), (30_000, true)])]
async fn a_filesystem_grows_as_far_as_it_can_and_keeps_its_files(
    rig: Rig<Xfs>,
    #[case] fs_type: &str,
    #[case] least: i64,
    #[case] factors: &[(i64, bool)],
) {
    let kubelet = rig.kubelet();
    let capability = mount_capability(fs_type);
    let small = new_volume("small", MIB, capability.clone());
    let small = rig.client.create_volume(small).await.expect("create");
    assert_eq!(small.capacity_bytes, least, "a smaller request is rounded up");
    let small = small.volume_id;
    let target = rig.publish(&small, capability.clone()).await;
    write_files(&target);
    let snapshot = rig.snapshot("small", &small).await;
    let may_grow_ext4 = sys::has_capability(sys::CAP_SYS_RESOURCE).expect("capabilities");
    for (factor, fits) in factors {
        let size = least * factor;
        for is_used in [false, true] {
            for is_restore in [true, false] {
                let name = format!("{factor} {is_used} {is_restore}");
                let asked = if is_restore { size } else { least };
                let request = new_volume_from(&name, asked, capability.clone(), from_snapshot(&snapshot));
                let made = rig.client.create_volume(request).await;
                if is_restore && !fits {
                    let refused = made.expect_err("it cannot grow so far");
                    assert_eq!(refused.code(), Code::OutOfRange, "{refused}");
                    assert!((least..size).contains(&most(&refused)), "{refused}");
                    continue;
                }
                let volume = made.expect("create").volume_id;
                if is_used {
                    rig.publish(&volume, capability.clone()).await;
                }
                if !is_restore {
                    match rig.client.expand_volume(&volume, size).await {
                        Ok(_) => assert!(fits, "{fs_type} cannot grow to {size}"),
                        Err(refused) => {
                            assert_eq!((refused.code(), *fits), (Code::OutOfRange, false), "{refused}");
                            let most = most(&refused);
                            assert!((least..size).contains(&most), "{refused}");
                            rig.client
                                .expand_volume(&volume, most / 4096 * 4096)
                                .await
                                .expect("the most fits");
                        }
                    }
                    if is_used {
                        let answer = rig.node_expand(&volume, &kubelet.join(&volume).join("target")).await;
                        match fs_type == "ext4" && !may_grow_ext4 {
                            true => assert_eq!(code(answer), Code::FailedPrecondition),
                            false => drop(answer.expect("node expand")),
                        }
                        rig.detach(&volume).await;
                    }
                }
                let target = rig.publish(&volume, capability.clone()).await;
                check_files(&target);
                let total = sys::space(&target).expect("statvfs").total as i64;
                assert!(!fits || total > size / 10 * 8, "{fs_type} has {total} bytes of {size}");
                rig.detach(&volume).await;
                let device = rig.attach(&volume).await;
                fsck(fs_type, &device);
                rig.delete(&volume).await;
            }
        }
    }
    check_files(&target);
    rig.detach(&small).await;
}

/// The incident: an ext4 of 64 MiB, made with mkfs' own reserve, was grown to 100 GiB. resize2fs left a filesystem that did not mount,
/// and e2fsck moved the names of its root directory to lost+found.
#[apply(device_test)]
async fn an_ext4_in_a_volume_that_is_too_large_for_it_is_mounted(rig: Rig<Xfs>) {
    let capability = mount_capability("ext4");
    for (number, (from, to)) in
        [(64 * MIB, 100 * GIB), (8 * MIB, 10 * GIB), (32 * MIB, 40 * GIB)].into_iter().enumerate()
    {
        let (volume, device) = rig.block_volume(&format!("raw {number}"), from).await;
        run("mkfs.ext4", &["-q", "-F"], &device);
        rig.detach(&volume).await;
        let target = rig.publish(&volume, capability.clone()).await;
        write_files(&target);
        rig.detach(&volume).await;

        let request = proto::ControllerExpandVolumeRequest {
            volume_id: volume.clone(),
            capacity_range: Some(CapacityRange { required_bytes: to, limit_bytes: 0 }),
            volume_capability: Some(capability.clone()),
            ..Default::default()
        };
        let refused = rig.client.controller.controller_expand_volume(request).await;
        assert_eq!(code(refused), Code::OutOfRange);
        let snapshot = rig.snapshot(&format!("taken {number}"), &volume).await;
        let restore =
            new_volume_from(&format!("restored {number}"), to, capability.clone(), from_snapshot(&snapshot));
        assert_eq!(code(rig.client.create_volume(restore).await), Code::OutOfRange);

        // As a device it may be of any size, for its user decides what is on it.
        let (large, _) = rig.volume_from(&format!("large {number}"), to, from_snapshot(&snapshot)).await;
        rig.detach(&large).await;
        for _ in 0..2 {
            let target = rig.publish(&large, capability.clone()).await;
            check_files(&target);
            let refused = rig.node_expand(&large, &target).await;
            is_refused(refused, Code::OutOfRange, &["ext4", "copy the files"]);
            rig.detach(&large).await;
        }
        let device = rig.attach(&large).await;
        fsck("ext4", &device);
        rig.detach(&large).await;
    }
}

/// The incident: an ext4 with errors, restored into a larger volume, was never mounted, and the answer was the exit status of
/// e2fsck. At its old size it was mounted.
#[apply(device_test)]
async fn an_ext4_with_errors_is_mounted_at_its_old_size(rig: Rig<Xfs>) {
    let capability = mount_capability("ext4");
    let (source, target) = rig.published("source", 64 * MIB, capability.clone()).await;
    write_files(&target);
    // A file in it loses its way, and that e2fsck -p does not repair.
    std::fs::create_dir(target.join("lost")).expect("mkdir");
    std::fs::write(target.join("lost/file"), "data").expect("write");
    rig.detach(&source).await;
    let device = rig.attach(&source).await;
    run("debugfs", &["-w", "-R", "clri /lost"], &device);
    run("debugfs", &["-w", "-R", "ssv state 2"], &device);
    let snapshot = rig.snapshot("with errors", &source).await;
    rig.detach(&source).await;
    let larger = rig.made_from("larger", 128 * MIB, capability.clone(), from_snapshot(&snapshot)).await;
    let target = rig.publish(&larger, capability).await;
    check_files(&target);
    let total = sys::space(&target).expect("statvfs").total as i64;
    assert!(total < 64 * MIB, "it grew to {total}");
    assert!(rig.log().contains("the ext4 has errors"), "{}", rig.log());
    is_refused(rig.node_expand(&larger, &target).await, Code::FailedPrecondition, &["run e2fsck"]);
    rig.detach(&larger).await;

    let device = rig.attach(&larger).await;
    let repaired = Command::new("e2fsck").args(["-f", "-y"]).arg(&device).output().expect("e2fsck");
    assert_eq!(repaired.status.code(), Some(1), "{repaired:?}");
    rig.detach(&larger).await;
    let target = rig.publish(&larger, mount_capability("ext4")).await;
    let total = sys::space(&target).expect("statvfs").total as i64;
    assert!(total > 100 * MIB, "it is not grown once it is well");
    rig.detach(&larger).await;
}

/// The incident: `NodeExpandVolume` of a filesystem that its user had frozen never returned, nor did a repeated stage of a frozen
/// btrfs, and then the pod could not end.
#[apply(device_cases)]
async fn a_frozen_filesystem_does_not_grow_and_holds_no_call_up(
    rig: Rig<Xfs>,
    #[values("xfs", "btrfs")] fs_type: &str,
) {
    let kubelet = rig.kubelet();
    let capability = mount_capability(fs_type);
    let (volume, target) = rig.published("files", 320 * MIB, capability.clone()).await;
    run("fsfreeze", &["--freeze"], &target);
    let patience = std::time::Duration::from_secs(30);
    let stage = || stage_of(&volume, &kubelet.join(&volume).join("staging"), capability.clone());
    let staged = tokio::time::timeout(patience, rig.client.node.node_stage_volume(stage())).await;
    staged.expect("a repeated stage hangs").expect("it is staged");
    rig.client.expand_volume(&volume, 640 * MIB).await.expect("expand");
    let refused = tokio::time::timeout(patience, rig.node_expand(&volume, &target)).await.expect("it hangs");
    is_refused(refused, Code::FailedPrecondition, &["fsfreeze --unfreeze"]);
    let staged = tokio::time::timeout(patience, rig.client.node.node_stage_volume(stage())).await;
    staged.expect("a repeated stage hangs").expect("it is staged at its old size");
    run("fsfreeze", &["--unfreeze"], &target);
    rig.node_expand(&volume, &target).await.expect("it grows");
    assert!(sys::space(&target).expect("statvfs").total > 500 << 20);
    rig.detach(&volume).await;
}

/// What a user makes on a device is mounted, whether it can grow or not: a btrfs whose only device is not its first, and one with
/// `bigalloc`, which resize2fs does not grow.
#[apply(device_test)]
async fn a_filesystem_that_cannot_grow_is_mounted_at_its_old_size(rig: Rig<Xfs>) {
    let (first, _) = rig.block_volume("first", 320 * MIB).await;
    let (second, _) = rig.block_volume("second", 320 * MIB).await;
    let device_of = |id: &str| {
        let data = rig.volume_dir(id).data();
        LoopDevice::find(&data).expect("find").expect("a device").path()
    };
    let (first_device, second_device) = (device_of(&first), device_of(&second));
    run("mkfs.btrfs", &["-q", "-f"], &first_device);
    let place = rig.dir.path().join("by hand");
    std::fs::create_dir(&place).expect("mkdir");
    let text = |path: &Path| path.display().to_string();
    run("mount", &[&text(&first_device)], &place);
    write_files(&place);
    run("btrfs", &["-q", "device", "add", "-f", &text(&second_device)], &place);
    run("btrfs", &["-q", "device", "remove", &text(&first_device)], &place);
    run("umount", &[], &place);
    rig.detach(&first).await;
    rig.detach(&second).await;
    rig.client.expand_volume(&second, 640 * MIB).await.expect("expand");
    let capability = mount_capability("btrfs");
    let target = rig.publish(&second, capability).await;
    check_files(&target);
    assert!(sys::space(&target).expect("statvfs").total > 500 << 20, "device 2 of a btrfs grows");
    rig.detach(&second).await;

    let (volume, device) = rig.block_volume("bigalloc", 64 * MIB).await;
    run("mkfs.ext4", &["-q", "-F", "-O", "bigalloc"], &device);
    rig.detach(&volume).await;
    let snapshot = rig.snapshot("small", &volume).await;
    let refused = rig.client.expand_volume(&volume, 128 * MIB).await.expect("as a device it may be larger");
    assert_eq!(refused.capacity_bytes, 128 * MIB);
    let capability = mount_capability("ext4");
    let request = new_volume_from("larger", 128 * MIB, capability.clone(), from_snapshot(&snapshot));
    assert_eq!(code(rig.client.create_volume(request).await), Code::OutOfRange);
    let target = rig.publish(&volume, capability).await;
    write_files(&target);
    assert_eq!(code(rig.node_expand(&volume, &target).await), Code::OutOfRange, "it does not grow");
    rig.detach(&volume).await;
}

/// The incident: ext4 grown by less than a new block group needs stayed as it was, and each call answered OK with the new size.
#[apply(device_test)]
async fn an_ext4_grows_by_a_little(rig: Rig<Xfs>) {
    let capability = mount_capability("ext4");
    for (from, to) in [(64 * MIB, 68 * MIB), (200 * MIB, 201 * MIB)] {
        let (volume, target) = rig.published(&format!("from {from}"), from, capability.clone()).await;
        write_files(&target);
        let before = sys::space(&target).expect("statvfs").total;
        rig.detach(&volume).await;
        rig.client.expand_volume(&volume, to).await.expect("expand");
        let target = rig.publish(&volume, capability.clone()).await;
        check_files(&target);
        let after = sys::space(&target).expect("statvfs").total;
        assert_eq!(after - before, (to - from) as u64, "from {from} to {to}");
        rig.detach(&volume).await;
        let device = rig.attach(&volume).await;
        fsck("ext4", &device);
        rig.detach(&volume).await;
    }
}

/// The incident: on a full pool resize2fs stopped in the middle, and left an ext4 that only a person may repair. Nothing grows there; with
/// room it does.
#[apply(device_cases)]
async fn a_full_pool_grows_nothing(#[values("ext4", "xfs")] fs_type: &str) {
    let (_, mut rig) = small_pool_of(PoolKind::Xfs, 1024).await;
    let capability = mount_capability(fs_type);
    let (volume, target) = rig.published("files", 300 * MIB, capability.clone()).await;
    write_files(&target);
    let before = sys::space(&target).expect("statvfs").total;
    rig.detach(&volume).await;
    rig.client.expand_volume(&volume, 8 * GIB).await.expect("expand");
    let (other, device) = rig.block_volume("other", 4 * GIB).await;
    let held = image(&rig.pool_dir(), "volumes", &other);
    for size in [MIB as u64, BLOCK] {
        // What is left is filled in blocks.
        let from = std::fs::metadata(&held).expect("stat").blocks() * 512 / size;
        let of = [format!("bs={size}"), format!("seek={from}"), format!("of={}", device.display())];
        let mut dd = Command::new("dd");
        dd.args(["if=/dev/zero", "oflag=direct", "conv=notrunc", "status=none"]).args(of);
        assert!(!dd.output().expect("run dd").status.success(), "the pool is not full");
    }
    for _ in 0..2 {
        let target = rig.publish(&volume, capability.clone()).await;
        check_files(&target);
        assert_eq!(sys::space(&target).expect("statvfs").total, before);
        let refused = rig.node_expand(&volume, &target).await;
        is_refused(refused, Code::ResourceExhausted, &["to grow: make room"]);
        rig.detach(&volume).await;
        let device = rig.attach(&volume).await;
        fsck(fs_type, &device);
        rig.detach(&volume).await;
    }
    rig.delete(&other).await;
    // A pool of xfs frees what was deleted in the background.
    testkit::eventually("there is room", async || {
        sys::space(&rig.pool_dir()).expect("statvfs").available > 64 << 20
    })
    .await;
    let target = rig.publish(&volume, capability).await;
    check_files(&target);
    assert!(sys::space(&target).expect("statvfs").total > 7 << 30, "it did not grow");
    rig.detach(&volume).await;
    rig.finish();
}
