//! Small disks of a test's own that it may fill, cut or damage, what fills them, and dead devices.

use std::fs::File;
use std::io::Write;
use std::path::{Path, PathBuf};

use deltapath::sys::loopdev::{Access, LoopDevice};
use deltapath::sys::{attributes, btrfs, program, sweep};
use nix::fcntl::FallocateFlags;
use tempfile::TempDir;

use super::{PoolKind, Rig, names, temp_dir};

/// More room than this is taken by one file, in no time.
const LARGE: u64 = 1 << 30;

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
        crate::no_device_left(&self.mount_point);
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

/// Files that take all the space of a filesystem, down to the last block and the last inode that
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
        let free = deltapath::sys::space(&self.dir).expect("statvfs").available;
        if free > LARGE {
            let file = File::create(self.dir.join("bulk")).expect("create");
            let bytes = (free - LARGE / 2) as libc::off_t;
            nix::fcntl::fallocate(&file, FallocateFlags::empty(), 0, bytes).expect("fallocate");
        }
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

    /// Takes also what data leaves of a btrfs' metadata, by extended attributes. In small transactions: one that is too large
    /// for what is left makes the filesystem read-only.
    pub fn with_metadata(self) -> Self {
        if !btrfs::is_btrfs(&self.dir).expect("statfs") {
            return self;
        }
        let path = self.dir.join("attributes");
        let taken = File::create(&path).and_then(|file| {
            (0..1 << 16).try_for_each(|number| {
                if number % 64 == 0 {
                    nix::unistd::syncfs(&file)?;
                }
                attributes::set_extended(&file, &format!("user.{number}"), &[1; 3800])
            })
        });
        assert_eq!(
            taken.map_err(|error| error.raw_os_error()),
            Err(Some(libc::ENOSPC)),
            "{}",
            path.display()
        );
        self
    }

    /// Gives a part back: this number of the files, the smallest first.
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

/// Loop devices of another program whose filesystem is shut down.
pub struct DeadDevices {
    devices: Vec<LoopDevice>,
    /// Dropped after them.
    disk: Disk,
}

impl DeadDevices {
    /// Attaches files of these names.
    pub fn attach(names: &[&str]) -> Self {
        let disk = Disk::new("xfs", &["-q"], 320 << 20);
        let attach = |name: &&str| {
            let path = disk.mount_point.join(name);
            std::fs::create_dir_all(path.parent().expect("a parent")).expect("mkdir");
            File::create(&path).and_then(|file| file.set_len(1 << 20)).expect("an image");
            LoopDevice::attach(&path, Access::ReadWrite).expect("attach")
        };
        let devices = names.iter().map(attach).collect();
        let dead = DeadDevices { devices, disk };
        program::run("xfs_io", &["-x", "-c", "shutdown"], &dead.disk.mount_point, |code| code == 0)
            .expect("shutdown");
        assert!(std::fs::metadata(dead.disk.mount_point.join(names[0])).is_err(), "it still answers");
        dead
    }

    /// Detaches them, which works though nothing answers.
    pub fn detach(mut self) {
        for device in self.devices.drain(..) {
            let path = device.path();
            assert!(device.detach().expect("detach"), "{} stays attached", path.display());
        }
    }
}
