//! What production does to a driver: full pools and hosts, bad disks, missing devices and programs, odd
//! filesystems, clocks and neighbours. Shared here: a disk that a test may fill, cut or spoil.

mod bad_disk;
mod cached;
mod clock;
mod dead_pool;
mod filesystems;
mod host_full;
mod no_loop;
mod pool_full;
mod programs;
mod read_only;
mod strangers;
mod two_drivers;
mod versions;

use std::fs::File;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use deltapath::base::ObjectDir;
use deltapath::cbt::MapFile;
use deltapath::client::{self, BlockList};
use deltapath::csi::proto::{self, VolumeCondition};
use deltapath::sys::{program, sweep};
use tempfile::TempDir;
use tonic::Code;

use crate::support::content::blocks_of;
use crate::support::{BLOCK, PoolKind, Rig, names, temp_dir};

/// A small disk of its own: an image behind a loop device, its filesystem mounted.
pub struct Disk {
    place: TempDir,
    pub mount_point: PathBuf,
}

impl Disk {
    pub fn new(fs_type: &str, mkfs: &[&str], bytes: u64) -> Self {
        Self::with_options(fs_type, mkfs, bytes, "loop")
    }

    /// The same with mount options.
    pub fn with_options(fs_type: &str, mkfs: &[&str], bytes: u64, options: &str) -> Self {
        let place = temp_dir();
        let mount_point = place.path().join("mnt");
        let disk = Disk { place, mount_point };
        File::create(disk.image()).and_then(|file| file.set_len(bytes)).expect("image");
        let maker: &'static str = match fs_type {
            "ext4" => "mkfs.ext4",
            "xfs" => "mkfs.xfs",
            "btrfs" => "mkfs.btrfs",
            other => panic!("no disk of {other}"),
        };
        program::run(maker, mkfs, &disk.image(), |code| code == 0).expect("mkfs");
        std::fs::create_dir(&disk.mount_point).expect("mkdir");
        let mut mount = std::process::Command::new("mount");
        let mounted = mount.args(["-o", options]).args([&disk.image(), &disk.mount_point]).status();
        assert!(mounted.expect("mount").success(), "mount");
        disk
    }

    /// An ext4 without blocks kept for root: full is full.
    pub fn ext4(bytes: u64) -> Self {
        Self::new("ext4", &["-q", "-F", "-m", "0"], bytes)
    }

    /// A filesystem without a device, such as tmpfs.
    pub fn in_memory(fs_type: &str) -> Self {
        Self::in_memory_of(fs_type, "2g")
    }

    /// The same of a size, as mount takes it.
    pub fn in_memory_of(fs_type: &str, size: &str) -> Self {
        Self::mounted(fs_type, |_| format!("size={size}"))
    }

    /// A directory laid over another one.
    pub fn overlay() -> Self {
        Self::mounted("overlay", |place| {
            let dirs = ["lower", "upper", "work"].map(|name| place.join(name));
            dirs.iter().for_each(|dir| std::fs::create_dir(dir).expect("mkdir"));
            let [lower, upper, work] = dirs.map(|dir| dir.display().to_string());
            format!("lowerdir={lower},upperdir={upper},workdir={work}")
        })
    }

    fn mounted(fs_type: &str, options: impl FnOnce(&Path) -> String) -> Self {
        let place = temp_dir();
        let mount_point = place.path().join("mnt");
        std::fs::create_dir(&mount_point).expect("mkdir");
        let options = options(place.path());
        let disk = Disk { place, mount_point };
        let mut mount = std::process::Command::new("mount");
        let mounted = mount.args(["-t", fs_type, fs_type, "-o", &options]).arg(&disk.mount_point).status();
        assert!(mounted.expect("mount").success(), "mount {fs_type}");
        disk
    }

    /// The file behind it.
    pub fn image(&self) -> PathBuf {
        self.place.path().join("disk.img")
    }

    /// Starts a driver whose data directory lies on this disk.
    pub async fn rig(&self, pool: PoolKind, arguments: &[&str]) -> Rig {
        Rig::start_in(self.dir(), pool, arguments, "info").await
    }

    /// A directory for a driver, with its data directory on this disk.
    pub fn dir(&self) -> TempDir {
        let dir = temp_dir();
        std::os::unix::fs::symlink(self.mount_point.join("data"), dir.path().join("data")).expect("symlink");
        std::fs::create_dir(self.mount_point.join("data")).expect("mkdir");
        dir
    }

    /// Fails where the driver, which has ended, left a device or a mount on this disk.
    pub fn finish(self) {
        let devices = sweep::devices_below(&self.mount_point).expect("devices");
        assert!(devices.is_empty(), "left behind: {devices:?}");
        let mounts = deltapath::sys::mount::mounts().expect("mounts");
        let below = |at: &Path| at != self.mount_point && at.starts_with(&self.mount_point);
        let mounts: Vec<_> = mounts.iter().map(|mount| &mount.mount_point).filter(|at| below(at)).collect();
        assert!(mounts.is_empty(), "left behind: {mounts:?}");
    }
}

impl Drop for Disk {
    fn drop(&mut self) {
        let left = sweep::sweep(self.place.path());
        if !std::thread::panicking() {
            let left = left.expect("sweep");
            assert!(left.is_empty(), "could not be freed: {left:?}");
        }
    }
}

/// Something else that takes all the room of a filesystem, down to the last block and the last inode that
/// a file of some bytes would need.
pub struct Ballast {
    dir: PathBuf,
}

impl Ballast {
    /// Fills the filesystem of `dir`.
    pub fn fill(dir: &Path) -> Self {
        let ballast = Ballast { dir: dir.join("ballast") };
        std::fs::create_dir(&ballast.dir).expect("make the ballast");
        ballast.refill();
        ballast
    }

    /// Takes what has become free since.
    pub fn refill(&self) {
        // What was removed is given back at the next commit.
        sync_fs(&self.dir);
        for (size, most) in [(1 << 20, 1 << 16), (4096, 1 << 16), (1000, 1 << 16)] {
            let first = names(&self.dir).len();
            for number in first..first + most {
                let path = self.dir.join(format!("{number:06}"));
                let written = File::create(&path).and_then(|mut file| {
                    file.write_all(&vec![number as u8 | 1; size])?;
                    file.sync_all()
                });
                if let Err(error) = written {
                    assert_eq!(error.raw_os_error(), Some(libc::ENOSPC), "{}: {error}", path.display());
                    break;
                }
            }
        }
    }

    /// Gives a part back: so many of the files, the smallest first.
    pub fn give_back(&self, files: usize) {
        let mut all = names(&self.dir);
        all.sort_unstable();
        for name in all.into_iter().rev().take(files) {
            std::fs::remove_file(self.dir.join(name)).expect("remove");
        }
        sync_fs(&self.dir);
    }

    /// Gives all of it back.
    pub fn remove(self) {
        std::fs::remove_dir_all(&self.dir).expect("remove the ballast");
        sync_fs(self.dir.parent().expect("a parent"));
    }
}

/// Writes all that is dirty in the filesystem of `dir`.
pub fn sync_fs(dir: &Path) {
    nix::unistd::syncfs(File::open(dir).expect("open")).expect("syncfs");
}

/// The same where the disk may refuse.
pub fn sync_fs_may_fail(dir: &Path) {
    let _ = nix::unistd::syncfs(File::open(dir).expect("open"));
}

/// The files of a snapshot.
pub fn live(rig: &Rig, id: &str) -> ObjectDir {
    ObjectDir::new(rig.pool_dir().join("snapshots").join(id))
}

/// Waits for something that happens behind the calls.
pub async fn until(what: &str, holds: impl Fn() -> bool) {
    let deadline = Instant::now() + Duration::from_secs(90);
    while !holds() {
        assert!(Instant::now() < deadline, "never: {what}");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

/// Whether a snapshot is hashed to the end.
pub fn is_hashed(dir: &ObjectDir) -> bool {
    MapFile::open(&dir.pending()).and_then(|map| map.count()).is_ok_and(|count| count == 0)
}

/// How the controller sees a volume.
pub async fn condition(rig: &Rig, volume: &str) -> VolumeCondition {
    let request = proto::ControllerGetVolumeRequest { volume_id: volume.to_owned() };
    let answer = rig.client.controller.clone().controller_get_volume(request).await.expect("get");
    answer.into_inner().status.expect("a status").volume_condition.expect("VOLUME_CONDITION is claimed")
}

/// The ids of all volumes and of all snapshots, as the lists tell them.
pub async fn listed(rig: &Rig) -> (Vec<String>, Vec<String>) {
    let mut controller = rig.client.controller.clone();
    let volumes = controller.list_volumes(proto::ListVolumesRequest::default()).await.expect("list");
    let snapshots = controller.list_snapshots(proto::ListSnapshotsRequest::default()).await.expect("list");
    let volumes = volumes.into_inner().entries.into_iter();
    let snapshots = snapshots.into_inner().entries.into_iter();
    (
        volumes.map(|entry| entry.volume.expect("a volume").volume_id).collect(),
        snapshots.map(|entry| entry.snapshot.expect("a snapshot").snapshot_id).collect(),
    )
}

/// Whether the driver says that it can serve.
pub async fn probe(rig: &Rig) -> Result<(), tonic::Status> {
    rig.client.identity.clone().probe(proto::ProbeRequest {}).await.map(drop)
}

/// A stream of a snapshot on a broken disk: it told all, or it failed for the disk's sake. Whether it failed.
#[track_caller]
pub fn exact_or_error(answer: Result<BlockList, client::Error>, expected: &[u64]) -> bool {
    match answer {
        Ok(list) => assert_eq!(blocks_of(&list, BLOCK), expected, "an OK that is not the truth"),
        Err(error) => {
            assert!(matches!(error.code(), Code::Internal | Code::DataLoss), "{error}");
            return true;
        }
    }
    false
}

/// Nothing half-made is left: `staging/` is empty, and no file was left beside a record.
pub fn assert_nothing_half_made(rig: &Rig) {
    assert_eq!(names(&rig.pool_dir().join("staging")), Vec::<String>::new(), "half-made objects");
    for kind in ["volumes", "snapshots"] {
        for id in names(&rig.pool_dir().join(kind)) {
            let found = names(&rig.pool_dir().join(kind).join(&id));
            assert!(!found.iter().any(|name| name.ends_with(".new")), "{kind}/{id} holds {found:?}");
        }
    }
}

/// Compares every snapshot with its maps and hashes.
pub fn verify(rig: &Rig) {
    let mut command = std::process::Command::new(env!("CARGO_BIN_EXE_deltapath"));
    let seen = command.args(["verify", "--output", "json", "--data-dir"]).arg(rig.data_dir()).output();
    let seen = seen.expect("run deltapath verify");
    assert!(seen.status.success(), "{seen:?}");
}
