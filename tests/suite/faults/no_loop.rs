//! No loop device is available. /dev/loop-control is hidden from the driver in its own mount namespace, so that the
//! machine's devices are not touched.

use std::path::Path;
use std::process::{Command, Stdio};

use csi_client::{block_capability, mount_capability, new_volume};
use tonic::Code;

use crate::reboot::{Secluded, driver_in_namespace};
use testkit::content::{Content, blocks_of};
use testkit::{BLOCK, MIB, PoolKind, swept_dir};

/// Runs a command in the driver's namespace.
fn within(secluded: &Secluded, command: &[&str]) {
    let pid = secluded.child.id().to_string();
    let done = Command::new("nsenter").args(["--target", &pid, "--mount", "--"]).args(command).status();
    assert!(done.expect("nsenter").success(), "{command:?}");
}

/// Without a device volumes can be made and snapshots taken. Calls that need a device fail with a clear message, leave
/// nothing, and work as soon as there is one.
#[apply(device_test)]
async fn without_a_loop_device_only_its_user_fails() {
    let (dir, _swept) = swept_dir();
    let kubelet = dir.path().join("kubelet");
    let (secluded, mut client) =
        Secluded::start_after(dir.path(), PoolKind::Dir, "mount --bind /dev/null /dev/loop-control").await;
    let raw = client.create_volume(new_volume("raw", 8 * MIB, block_capability())).await.expect("create");
    let files = client.create_volume(new_volume("files", 64 * MIB, mount_capability("ext4"))).await;
    let (raw, files) = (raw.volume_id, files.expect("create").volume_id);
    let volumes = [(&raw, block_capability()), (&files, mount_capability("ext4"))];
    for _ in 0..2 {
        for (volume, capability) in &volumes {
            let refused = client.publish(volume, capability.clone(), false, &kubelet).await;
            let error = refused.expect_err("there is no device");
            assert_eq!(error.code(), Code::Internal, "{error}");
            let text = error.to_string();
            assert!(text.contains("/dev/loop-control") && text.contains("loop module"), "{text}");
        }
    }
    client.create_snapshot("empty", &raw).await.expect("a snapshot needs no device");
    // A failed publish can be undone too.
    client.unpublish(&raw, &kubelet).await.expect("unpublish");
    testkit::no_device_left(dir.path());

    within(&secluded, &["umount", "/dev/loop-control"]);
    let device = client.publish(&raw, block_capability(), false, &kubelet).await.expect("publish");
    let mut content = Content::default();
    content.write(&secluded.inside(&device), 7, 30, 1);
    let snapshot = client.create_snapshot("written", &raw).await.expect("snapshot").snapshot_id;
    let list = client.allocated(&snapshot, 0, 0).await.expect("allocated");
    assert_eq!(blocks_of(&list, BLOCK), content.allocated(BLOCK));
    let target = client.publish(&files, mount_capability("ext4"), false, &kubelet).await.expect("publish");
    std::fs::write(secluded.inside(&target).join("file"), "there").expect("write");
    for (volume, _) in &volumes {
        client.unpublish(volume, &kubelet).await.expect("unpublish");
        client.delete_volume(volume).await.expect("delete");
    }
    testkit::no_device_left(dir.path());
}

/// Runs a driver in a namespace with another `/dev`. It must refuse to start. Returns its messages.
fn refused(dir: &Path, pool: PoolKind, prepare: &str) -> String {
    let driver = driver_in_namespace(dir, pool, prepare);
    let mut limited = Command::new("timeout");
    limited.arg("30").arg(driver.get_program()).args(driver.get_args()).stdin(Stdio::null());
    let output = limited.output().expect("unshare");
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(1), "{said}");
    said
}

/// A machine or container without loop devices cannot have a pool in an image. The start fails with this reason and leaves
/// nothing half-made, and a start with loop devices works.
#[apply(device_cases)]
async fn a_pool_image_without_loop_devices_is_refused(
    #[values(PoolKind::Xfs, PoolKind::Btrfs)] pool: PoolKind,
) {
    const BARE: &str = "mount -t tmpfs bare /dev
        mknod /dev/null c 1 3; mknod /dev/random c 1 8; mknod /dev/urandom c 1 9";
    let (dir, _swept) = swept_dir();
    let said = refused(dir.path(), pool, BARE);
    assert!(said.contains("load the loop module") && said.contains("--pool dir"), "{said}");
    assert!(!dir.path().join("data/pool.img").exists(), "an image was made without loop devices");
    // The control file exists but gives no device, which shows only when the image is made.
    let said = refused(dir.path(), pool, "mount --bind /dev/null /dev/loop-control");
    assert!(said.contains("/dev/loop-control") && said.contains("loop module"), "{said}");
    let (secluded, mut client) = Secluded::start_after(dir.path(), pool, "").await;
    client.create_volume(new_volume("volume", MIB, block_capability())).await.expect("create");
    drop(secluded);
}

/// The static `/dev` of a container has no node for a new device, and none can be made there.
#[apply(device_test)]
async fn a_dev_without_nodes_is_reported() {
    const NO_NODES: &str = "mount -t tmpfs bare /dev
        mknod /dev/null c 1 3; mknod /dev/random c 1 8; mknod /dev/urandom c 1 9
        mknod /dev/loop-control c 10 237; mount -o remount,ro /dev";
    let (dir, _swept) = swept_dir();
    let kubelet = dir.path().join("kubelet");
    let (secluded, mut client) = Secluded::start_after(dir.path(), PoolKind::Dir, NO_NODES).await;
    let raw = client.create_volume(new_volume("raw", 8 * MIB, block_capability())).await.expect("create");
    let refused = client.publish(&raw.volume_id, block_capability(), false, &kubelet).await;
    let text = refused.expect_err("there is no node").to_string();
    assert!(text.contains("make the device node /dev/loop"), "{text}");
    within(&secluded, &["mount", "-o", "remount,rw", "/dev"]);
    client.publish(&raw.volume_id, block_capability(), false, &kubelet).await.expect("publish");
    client.unpublish(&raw.volume_id, &kubelet).await.expect("unpublish");
    testkit::no_device_left(dir.path());
}
