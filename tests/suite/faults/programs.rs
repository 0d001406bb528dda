//! The programs that own an on-disk format are missing, or fail.

use std::ffi::OsString;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use super::until;
use crate::startup::refused;
use deltapath::sys;
use testkit::prelude::*;
use testkit::{driver_command, swept_dir, temp_dir};

/// The programs that the driver calls.
const PROGRAMS: [&str; 10] = [
    "mkfs.ext4",
    "mkfs.xfs",
    "mkfs.btrfs",
    "e2fsck",
    "resize2fs",
    "e2undo",
    "xfs_growfs",
    "btrfs",
    "blkid",
    "sh",
];

fn find(program: &str) -> PathBuf {
    let path = std::env::var_os("PATH").expect("PATH");
    let mut places = std::env::split_paths(&path).map(|dir| dir.join(program));
    places.find(|place| place.is_file()).unwrap_or_else(|| panic!("{program} is not installed"))
}

/// A directory for PATH that has all these programs, except those whose names begin with `missing`.
fn path_without(dir: &Path, missing: &str) -> PathBuf {
    let bin = dir.join(format!("without-{missing}"));
    std::fs::create_dir(&bin).expect("mkdir");
    for program in PROGRAMS.iter().filter(|program| !program.starts_with(missing)) {
        std::os::unix::fs::symlink(find(program), bin.join(program)).expect("symlink");
    }
    bin
}

/// Replaces a program by a script.
fn script(bin: &Path, program: &str, text: &str) {
    let path = bin.join(program);
    let _ = std::fs::remove_file(&path);
    std::fs::write(&path, format!("#!/bin/sh\n{text}\n")).expect("write");
    std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o755)).expect("chmod");
}

/// If the mkfs for a pool image is missing or fails, the start fails with the reason, and leaves nothing that the next start
/// would take for a pool.
#[apply(device_cases)]
#[case::xfs(PoolKind::Xfs, "mkfs.xfs", "xfsprogs")]
#[case::btrfs(PoolKind::Btrfs, "mkfs.btrfs", "btrfs-progs")]
async fn a_pool_without_its_mkfs_is_refused(
    #[case] pool: PoolKind,
    #[case] mkfs: &str,
    #[case] package: &str,
) {
    let (dir, _swept) = swept_dir();
    let bin = path_without(dir.path(), mkfs);
    let said = refused(driver_command(dir.path(), pool).env("PATH", &bin));
    assert!(said.contains(mkfs) && said.contains(&format!("install {package}")), "{said}");
    assert!(said.contains("--pool dir"), "{said}");
    script(&bin, mkfs, "echo 'out of luck' >&2; exit 3");
    let said = refused(driver_command(dir.path(), pool).env("PATH", &bin));
    assert!(said.contains(mkfs) && said.contains("out of luck"), "{said}");
    let data = names(&dir.path().join("data"));
    assert!(!data.iter().any(|name| name == "pool.img" || name == "deltapath.json"), "{data:?}");
    let mut rig = Rig::start_in(dir, pool, &[], "info").await;
    rig.client.create_volume(new_volume("volume", MIB, block_capability())).await.expect("create");
    assert!(!rig.data_dir().join("pool.img.new").exists(), "the failed image stays");
    rig.finish();
}

/// `auto` falls back to an xfs image, then to plain files, and logs the reason.
#[apply(device_cases)]
#[case::xfs("mkfs.btrfs", PoolKind::Xfs)]
#[case::dir("mkfs.", PoolKind::Dir)]
async fn auto_makes_do_with_the_programs_there_are(#[case] missing: &str, #[case] pool: PoolKind) {
    let dir = temp_dir();
    let path = path_without(dir.path(), missing);
    let environment = vec![("PATH", OsString::from(path))];
    let rig = Rig::start_as(dir, pool, &["--pool", "auto"], environment, "info").await;
    let log = rig.log();
    assert!(log.contains("mkfs.btrfs is missing: install btrfs-progs"), "{log}");
    assert_eq!(log.contains("snapshots will be full copies"), pool == PoolKind::Dir, "{log}");
    rig.finish();
}

/// If the mkfs of a volume is missing or dies midway, staging fails, and the error says what to do. When the program works
/// the volume is formatted, and what the dead mkfs wrote is not taken for data of the user.
#[apply(device_cases)]
async fn a_volume_without_its_mkfs_is_staged_later(#[values("ext4", "xfs", "btrfs")] fs_type: &str) {
    let dir = temp_dir();
    let bin = path_without(dir.path(), "mkfs.");
    let whole = path_without(dir.path(), "none-is-missing");
    let environment = vec![("PATH", OsString::from(&bin))];
    let mut rig = Rig::start_as(dir, PoolKind::Dir, &[], environment, "info").await;
    let mkfs = format!("mkfs.{fs_type}");
    let capability = mount_capability(fs_type);
    let volume = rig.volume(fs_type, 320 * MIB, capability.clone()).await;
    let refused = rig.try_publish(&volume, capability.clone()).await;
    is_refused(refused, Code::Internal, &[&mkfs, "install the program"]);
    script(&bin, &mkfs, "for device; do :; done; echo junk >\"$device\"; echo 'half-way' >&2; exit 1");
    let error = rig.try_publish(&volume, capability.clone()).await.expect_err("mkfs");
    assert!(error.to_string().contains("half-way"), "{error}");
    rig.detach(&volume).await;
    rig.kill();
    rig.environment = vec![("PATH", OsString::from(whole))];
    rig.start_again().await;
    let target = rig.publish(&volume, capability).await;
    std::fs::write(target.join("file"), "there").expect("write");
    rig.detach(&volume).await;
    rig.finish();
}

/// The incident: resize2fs was killed with its driver, and 45 of 300 filesystems were such that `e2fsck -p` refuses them.
#[apply(device_cases)]
async fn a_growth_that_is_cut_short_leaves_the_filesystem_as_it_was(
    #[values(PoolKind::Btrfs, PoolKind::Xfs)] pool: PoolKind,
    #[values("exit 1", "kill -9 $PPID; exec /bin/sleep 600")] end: &str,
) {
    let dir = temp_dir();
    let bin = path_without(dir.path(), "none-is-missing");
    let environment = vec![("PATH", OsString::from(&bin))];
    let mut rig = Rig::start_as(dir, pool, &[], environment, "info").await;
    let capability = mount_capability("ext4");
    let (volume, target) = rig.published("volume", 64 * MIB, capability.clone()).await;
    std::fs::write(target.join("file"), "there").expect("write");
    rig.detach(&volume).await;
    rig.client.expand_volume(&volume, 256 * MIB).await.expect("expand");

    let half = "/bin/dd if=/dev/urandom of=\"$1\" bs=4096 count=64 conv=notrunc 2>/dev/null";
    script(&bin, "resize2fs", &format!("{half}; {end}"));
    let published = rig.try_publish(&volume, capability.clone()).await;
    let is_old = |target: &Path| {
        assert_eq!(std::fs::read(target.join("file")).expect("read"), b"there");
        assert!(sys::space(target).expect("statvfs").total < 64 << 20, "it has grown");
    };
    if end == "exit 1" {
        is_old(&published.expect("a volume whose filesystem does not grow"));
        assert!(rig.log().contains("does not grow"), "{}", rig.log());
        rig.detach(&volume).await;
    } else {
        published.expect_err("the driver is gone");
        rig.kill();
        rig.start_again().await;
        // Also where the volume is not used, but copied.
        let snapshot = rig.snapshot("after the kill", &volume).await;
        let restored =
            rig.made_from("restored", 256 * MIB, capability.clone(), from_snapshot(&snapshot)).await;
        script(&bin, "resize2fs", "exit 1");
        is_old(&rig.publish(&restored, capability.clone()).await);
        rig.detach(&restored).await;
    }
    script(&bin, "resize2fs", &format!("exec {} \"$@\"", find("resize2fs").display()));
    let target = rig.publish(&volume, capability).await;
    assert_eq!(std::fs::read(target.join("file")).expect("read"), b"there");
    assert!(sys::space(&target).expect("statvfs").total > 200 << 20, "it does not grow");
    rig.detach(&volume).await;
    rig.finish();
}

/// Plain files cannot be copied at once: what resize2fs has changed is put back.
#[apply(device_test)]
async fn a_growth_that_is_killed_on_plain_files_leaves_a_sound_filesystem() {
    let dir = temp_dir();
    let bin = path_without(dir.path(), "none-is-missing");
    let note = dir.path().join("note");
    let real = find("resize2fs");
    script(&bin, "resize2fs", &format!("echo >{}; exec {} \"$@\"", note.display(), real.display()));
    let environment = vec![("PATH", OsString::from(&bin))];
    let mut rig = Rig::start_as(dir, PoolKind::Dir, &[], environment, "info").await;
    let capability = mount_capability("ext4");
    // It takes some 100 ms, and writes in the last of them.
    for round in 0..40 {
        let (volume, target) = rig.published(&format!("volume {round}"), 64 * MIB, capability.clone()).await;
        std::fs::write(target.join("file"), "there").expect("write");
        rig.detach(&volume).await;
        rig.client.expand_volume(&volume, 200 * GIB).await.expect("expand");
        let _ = std::fs::remove_file(&note);
        let staging = tokio::spawn({
            let (mut client, kubelet, volume) = (rig.client.clone(), rig.kubelet(), volume.clone());
            async move { client.publish(&volume, mount_capability("ext4"), false, &kubelet).await }
        });
        until("resize2fs", || note.exists()).await;
        tokio::time::sleep(std::time::Duration::from_millis(4 * round)).await;
        rig.kill();
        // The call may have been done already.
        let _ = staging.await.expect("staging");
        rig.start_again().await;
        rig.detach(&volume).await;
        let device = rig.attach(&volume).await;
        testkit::fsck("ext4", &device);
        rig.detach(&volume).await;
        let target = rig.publish(&volume, capability.clone()).await;
        assert_eq!(std::fs::read(target.join("file")).expect("read"), b"there");
        assert!(sys::space(&target).expect("statvfs").total > 180 << 30, "it does not grow");
        rig.detach(&volume).await;
        rig.delete(&volume).await;
    }
    assert!(rig.log().contains("was cut short, and is undone"), "no kill met it at work");

    // Blocks that cannot be put back: the filesystem is not used, and nothing is lost.
    let (volume, target) = rig.published("cannot be undone", 64 * MIB, capability.clone()).await;
    std::fs::write(target.join("file"), "there").expect("write");
    rig.detach(&volume).await;
    rig.client.expand_volume(&volume, 256 * MIB).await.expect("expand");
    script(&bin, "resize2fs", &format!("{} \"$@\"; exit 1", real.display()));
    script(&bin, "e2undo", "exit 1");
    let refused = rig.try_publish(&volume, capability.clone()).await;
    is_refused(refused, Code::FailedPrecondition, &["is not undone", "e2undo"]);
    script(&bin, "e2undo", &format!("exec {} \"$@\"", find("e2undo").display()));
    let target = rig.publish(&volume, capability.clone()).await;
    assert_eq!(std::fs::read(target.join("file")).expect("read"), b"there");
    assert!(sys::space(&target).expect("statvfs").total < 64 << 20, "it has grown");
    rig.detach(&volume).await;

    // Blocks of a growth before the last mount, by a driver that did not know them: put back, they would take what was written since.
    script(&bin, "e2undo", "exit 1");
    let refused = rig.try_publish(&volume, capability.clone()).await;
    is_refused(refused, Code::FailedPrecondition, &["is not undone"]);
    script(&bin, "e2undo", &format!("exec {} \"$@\"", find("e2undo").display()));
    script(&bin, "resize2fs", &format!("exec {} \"$@\"", real.display()));
    rig.detach(&volume).await;
    rig.kill();
    let by_hand = rig.dir.path().join("by-hand");
    std::fs::create_dir(&by_hand).expect("create");
    // The superblock counts seconds.
    tokio::time::sleep(std::time::Duration::from_secs(1)).await;
    let data = rig.volume_dir(&volume).data();
    testkit::ok(Command::new("mount").args(["-o", "loop"]).args([&data, &by_hand]));
    std::fs::write(by_hand.join("file"), "later").expect("write");
    testkit::ok(Command::new("umount").arg(&by_hand));
    rig.start_again().await;
    let target = rig.publish(&volume, capability.clone()).await;
    assert_eq!(std::fs::read(target.join("file")).expect("read"), b"later");
    rig.detach(&volume).await;
    rig.finish();
}

/// A program that the driver started ends with the driver, since the next start formats the same device.
#[apply(device_test)]
async fn no_mkfs_outlives_the_driver() {
    let dir = temp_dir();
    let bin = path_without(dir.path(), "mkfs.ext4");
    let note = dir.path().join("pid");
    script(
        &bin,
        "mkfs.ext4",
        &format!("echo $$ >{0}.new; /bin/mv {0}.new {0}; exec /bin/sleep 600", note.display()),
    );
    let environment = vec![("PATH", OsString::from(&bin))];
    let mut rig = Rig::start_as(dir, PoolKind::Dir, &[], environment, "info").await;
    let volume = rig.volume("volume", 64 * MIB, mount_capability("ext4")).await;
    let staging = tokio::spawn({
        let (mut client, kubelet, volume) = (rig.client.clone(), rig.kubelet(), volume.clone());
        async move { client.publish(&volume, mount_capability("ext4"), false, &kubelet).await }
    });
    until("mkfs", || note.exists()).await;
    let pid = std::fs::read_to_string(&note).expect("read");
    let process = Path::new("/proc").join(pid.trim());
    assert!(process.exists());
    rig.kill();
    staging.await.expect("staging").expect_err("the driver is gone");
    until("its end", || !process.exists()).await;
    rig.start_again().await;
    rig.detach(&volume).await;
    rig.finish();
}
