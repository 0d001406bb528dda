//! No loop device is available. /dev/loop-control is hidden from the driver in its own mount namespace, so that the
//! machine's devices are not touched.

use std::path::Path;
use std::process::{Command, Stdio};

use crate::reboot::{in_namespace, inside, secluded};
use testkit::prelude::*;
use testkit::{driver_command, swept_dir, temp_dir};

fn within(rig: &Rig, command: &[&str]) {
    let pid = rig.pid().to_string();
    testkit::ok(Command::new("nsenter").args(["--target", &pid, "--mount", "--"]).args(command));
}

/// Without a device volumes can be made and snapshots taken. Calls that need a device fail with a clear message, leave
/// nothing, and work as soon as there is one.
#[apply(device_test)]
async fn without_a_loop_device_only_its_user_fails() {
    let mut rig = secluded(temp_dir(), PoolKind::Dir, "mount --bind /dev/null /dev/loop-control").await;
    let raw = rig.volume("raw", 8 * MIB, block_capability()).await;
    let files = rig.volume("files", 64 * MIB, mount_capability("ext4")).await;
    for _ in 0..2 {
        for (volume, capability) in [(&raw, block_capability()), (&files, mount_capability("ext4"))] {
            let refused = rig.try_publish(volume, capability).await;
            is_refused(refused, Code::Internal, &["/dev/loop-control", "loop module"]);
        }
    }
    rig.snapshot("empty, which needs no device", &raw).await;
    // A failed publish can be undone too.
    rig.detach(&raw).await;
    testkit::no_device_left(rig.dir.path());

    within(&rig, &["umount", "/dev/loop-control"]);
    let device = rig.attach(&raw).await;
    let mut content = Content::default();
    content.write(&inside(&rig, &device), 7, 30, 1);
    let snapshot = rig.snapshot("written", &raw).await;
    assert_eq!(rig.allocated(&snapshot).await, content.allocated(BLOCK));
    let target = rig.publish(&files, mount_capability("ext4")).await;
    std::fs::write(inside(&rig, &target).join("file"), "there").expect("write");
    for volume in [&raw, &files] {
        rig.delete(volume).await;
    }
    testkit::no_device_left(rig.dir.path());
}

/// Makes a `/dev` without loop devices.
const BARE: &str = "mount -t tmpfs bare /dev
    mknod /dev/null c 1 3; mknod /dev/random c 1 8; mknod /dev/urandom c 1 9";

/// Runs a driver in a namespace with another `/dev`. It must refuse to start. Returns its messages.
fn refused(dir: &Path, pool: PoolKind, prepare: &str) -> String {
    let (driver, words) = (driver_command(dir, pool), in_namespace(dir, prepare));
    let mut words = words.split(' ');
    let mut command = Command::new(words.next().expect("a program"));
    command.args(words).arg(driver.get_program()).args(driver.get_args()).stdin(Stdio::null());
    crate::startup::refused(&mut command)
}

/// A machine or container without loop devices cannot have a pool in an image. The start fails with this reason and leaves
/// nothing half-made, and a start with loop devices works.
#[apply(device_cases)]
async fn a_pool_image_without_loop_devices_is_refused(
    #[values(PoolKind::Xfs, PoolKind::Btrfs)] pool: PoolKind,
) {
    let (dir, _swept) = swept_dir();
    let said = refused(dir.path(), pool, BARE);
    assert!(said.contains("load the loop module") && said.contains("--pool dir"), "{said}");
    assert!(!dir.path().join("data/pool.img").exists(), "an image was made without loop devices");
    // The control file exists but gives no device, which shows only when the image is made.
    let said = refused(dir.path(), pool, "mount --bind /dev/null /dev/loop-control");
    assert!(said.contains("/dev/loop-control") && said.contains("loop module"), "{said}");
    let mut rig = secluded(dir, pool, "").await;
    rig.volume("volume", MIB, block_capability()).await;
}

/// The static `/dev` of a container has no node for a new device, and none can be made there.
#[apply(device_test)]
async fn a_dev_without_nodes_is_reported() {
    let no_nodes = format!("{BARE}\nmknod /dev/loop-control c 10 237; mount -o remount,ro /dev");
    let mut rig = secluded(temp_dir(), PoolKind::Dir, &no_nodes).await;
    let raw = rig.volume("raw", 8 * MIB, block_capability()).await;
    let text = rig.try_publish(&raw, block_capability()).await.expect_err("there is no node").to_string();
    assert!(text.contains("make the device node /dev/loop"), "{text}");
    within(&rig, &["mount", "-o", "remount,rw", "/dev"]);
    rig.attach(&raw).await;
    rig.detach(&raw).await;
    testkit::no_device_left(rig.dir.path());
}
