//! A reboot, and a restart in a new mount namespace, where earlier mounts are not visible.

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use csi_client::{Client, block_capability, mount_capability, new_volume};
use deltapath::sys::sweep::sweep;

use testkit::content::Content;
use testkit::{MIB, PoolKind, driver_command, leftovers, swept_dir, wait};

/// Seen in other drivers: after a reboot the loop devices are gone and publish fails. The test removes all devices and
/// mounts, including the pool's, and keeps the records.
#[apply(every_pool)]
async fn every_volume_comes_back_after_a_reboot(rig: Rig<pool>) {
    let (raw, _, mut content) = rig.written_volume("raw", 8 * MIB, (3, 40, 1)).await;
    let mut files = Vec::new();
    for fs_type in ["ext4", "xfs", "btrfs"] {
        let capability = mount_capability(fs_type);
        let (volume, target) = rig.published(fs_type, 320 * MIB, capability.clone()).await;
        std::fs::write(target.join("file"), fs_type).expect("write");
        files.push((volume, capability, fs_type));
    }
    let first = rig.snapshot("before", &raw).await;
    rig.kill();
    assert_eq!(sweep(rig.dir.path()).expect("sweep"), Vec::<String>::new());
    assert!(leftovers(rig.dir.path()).is_empty(), "mounts or devices are left, unlike after a reboot");
    rig.start_again().await;
    // Kubelet stages and publishes again, at the same paths.
    let device = rig.attach(&raw).await;
    content.assert_equals(&device, 0, 2048);
    let before = content.clone();
    content.write(&device, 1000, 1, 2);
    let second = rig.snapshot("after", &raw).await;
    let delta = rig.client.delta(&first, &second, 0, 0).await.expect("delta");
    let changed = testkit::content::blocks_of(&delta, 4096);
    assert_eq!(changed, content.changed_since(&before, 4096));
    rig.detach(&raw).await;
    for (volume, capability, fs_type) in &files {
        let target = rig.publish(volume, capability.clone()).await;
        assert_eq!(std::fs::read(target.join("file")).expect("read"), fs_type.as_bytes());
        rig.delete(volume).await;
    }

    // Or it undoes mounts that no longer exist, and deletes.
    rig.attach(&raw).await;
    rig.kill();
    sweep(rig.dir.path()).expect("sweep");
    rig.start_again().await;
    rig.delete(&raw).await;
}

/// The command of a driver in its own mount namespace, after a shell has run `prepare` there. The mounts of other tests are
/// unmounted in the namespace, since a filesystem stays as long as any namespace has it mounted.
pub fn driver_in_namespace(dir: &Path, pool: PoolKind, prepare: &str) -> Command {
    let driver = driver_command(dir, pool);
    let own = dir.display();
    let script = format!(
        "grep -oE '/[^ ]*/deltapath-(run|test|demo)-[^ ]*/[^ ]*' /proc/self/mounts | grep -v '^{own}/' | xargs -r umount -l 2>/dev/null || true
        {prepare}
        exec \"$@\""
    );
    let mut command = Command::new("unshare");
    command.args(["--mount", "--propagation", "private", "--", "sh", "-e", "-c", &script, "sh"]);
    command.arg(driver.get_program()).args(driver.get_args()).env_remove("CSI_ENDPOINT").stdin(Stdio::null());
    command
}

/// A driver in its own mount namespace, as in a container. When it is killed its mounts are gone, but its devices stay.
pub struct Secluded {
    dir: PathBuf,
    pub child: Child,
}

impl Secluded {
    async fn start(dir: &Path, pool: PoolKind) -> (Self, Client) {
        Self::start_after(dir, pool, "").await
    }

    /// The same after a shell has run `prepare` in its namespace.
    pub async fn start_after(dir: &Path, pool: PoolKind, prepare: &str) -> (Self, Client) {
        let log =
            std::fs::File::options().create(true).append(true).open(dir.join("driver.log")).expect("log");
        let child = driver_in_namespace(dir, pool, prepare)
            .stdout(Stdio::null())
            .stderr(log)
            .spawn()
            .expect("unshare");
        let secluded = Secluded { dir: dir.to_owned(), child };
        let client = Client::connect(&dir.join("csi.sock"), Duration::from_secs(30)).await.expect("connect");
        (secluded, client)
    }

    /// A path as the driver sees it.
    pub fn inside(&self, path: &Path) -> PathBuf {
        let root = PathBuf::from(format!("/proc/{}/root", self.child.id()));
        root.join(path.strip_prefix("/").expect("absolute"))
    }
}

impl Drop for Secluded {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
        if std::thread::panicking() {
            eprintln!("{}", std::fs::read_to_string(self.dir.join("driver.log")).unwrap_or_default());
        }
    }
}

/// A container restarts. The next driver sees none of the mounts of the driver before, and finds the devices by the inodes
/// of their files.
#[apply(every_pool)]
async fn every_volume_comes_back_in_another_mount_namespace(pool: PoolKind) {
    let (dir, _swept) = swept_dir();
    let kubelet = dir.path().join("kubelet");
    let (secluded, mut client) = Secluded::start(dir.path(), pool).await;
    let request = new_volume("raw", 8 * MIB, block_capability());
    let raw = client.create_volume(request).await.expect("create").volume_id;
    let device = client.publish(&raw, block_capability(), false, &kubelet).await.expect("publish");
    let mut content = Content::default();
    content.write(&secluded.inside(&device), 7, 30, 1);
    let mut files = Vec::new();
    for fs_type in ["ext4", "xfs", "btrfs"] {
        let capability = mount_capability(fs_type);
        let request = new_volume(fs_type, 320 * MIB, capability.clone());
        let volume = client.create_volume(request).await.expect("create").volume_id;
        let target = client.publish(&volume, capability.clone(), false, &kubelet).await.expect("publish");
        std::fs::write(secluded.inside(&target).join("file"), fs_type).expect("write");
        files.push((volume, capability, fs_type));
    }
    let first = client.create_snapshot("before", &raw).await.expect("snapshot").snapshot_id;
    assert!(
        leftovers(dir.path()).iter().all(|left| left.starts_with("/dev/")),
        "its mounts are seen outside"
    );
    drop(secluded);

    let (mut secluded, mut client) = Secluded::start(dir.path(), pool).await;
    let device = client.publish(&raw, block_capability(), false, &kubelet).await.expect("publish");
    content.assert_equals(&secluded.inside(&device), 0, 2048);
    let before = content.clone();
    content.write(&secluded.inside(&device), 500, 2, 3);
    let second = client.create_snapshot("after", &raw).await.expect("snapshot").snapshot_id;
    let delta = client.delta(&first, &second, 0, 0).await.expect("delta");
    let changed = testkit::content::blocks_of(&delta, 4096);
    assert_eq!(changed, content.changed_since(&before, 4096));
    client.unpublish(&raw, &kubelet).await.expect("unpublish");
    for (volume, capability, fs_type) in &files {
        let target = client.publish(volume, capability.clone(), false, &kubelet).await.expect("publish");
        let seen = std::fs::read(secluded.inside(&target).join("file")).expect("read");
        assert_eq!(seen, fs_type.as_bytes());
        client.unpublish(volume, &kubelet).await.expect("unpublish");
    }
    testkit::no_device_left(&dir.path().join("data/pool"));
    testkit::signal(secluded.child.id(), nix::sys::signal::Signal::SIGTERM);
    assert!(wait(&mut secluded.child, Duration::from_secs(30)).success());
    testkit::nothing_left(dir.path());
}

/// A process that is being started has a copy of all that is open, and a new mount namespace one of all that is mounted. What they hold
/// for a moment is swept all the same.
#[apply(device_test)]
async fn what_is_held_for_a_moment_is_swept(rig: Rig<Dir>) {
    let (volume, target) = rig.published("files", 16 * MIB, mount_capability("ext4")).await;
    let copy = deltapath::sys::mount::clone_of(&target).expect("a copy of the mount");
    rig.kill();
    let holder = std::thread::spawn(move || {
        std::thread::sleep(Duration::from_millis(300));
        drop(copy);
    });
    assert_eq!(sweep(rig.dir.path()).expect("sweep"), Vec::<String>::new());
    holder.join().expect("no panic");
    rig.start_again().await;
    rig.detach(&volume).await;
}
