//! A filesystem on a disk that can lose power.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use deltapath::sys::loopdev::{Access, LoopDevice};
use deltapath::sys::mount::{self, Flags};
use deltapath::sys::program;

use super::Rack;

/// A disk that is mounted, until it is dropped.
pub struct Mounted {
    device: LoopDevice,
    at: PathBuf,
}

impl Mounted {
    /// Makes a filesystem on a disk, and mounts it.
    pub fn format(rack: &Rack, disk: usize, filesystem: &str, at: &Path) -> Self {
        let mounted = Self::attach(rack, disk, at);
        format(&mounted.device.path(), filesystem);
        mounted.mount(filesystem)
    }

    /// Mounts a disk as a boot does it.
    pub fn boot(rack: &Rack, disk: usize, filesystem: &str, at: &Path) -> Self {
        Self::attach(rack, disk, at).mount(filesystem)
    }

    fn attach(rack: &Rack, disk: usize, at: &Path) -> Self {
        let device = LoopDevice::attach(&rack.path(disk), Access::ReadWrite).expect("attach");
        Mounted { device, at: at.to_owned() }
    }

    fn mount(self, filesystem: &str) -> Self {
        let mounted = mount_disk(&self.device.path(), filesystem, &self.at);
        mounted.unwrap_or_else(|error| panic!("{error}"));
        self
    }
}

/// Makes a filesystem that mounts soon.
pub fn format(device: &Path, filesystem: &str) {
    let (mkfs, arguments): (_, &[&str]) = match filesystem {
        "ext4" => ("mkfs.ext4", &["-q", "-E", "lazy_itable_init=1,lazy_journal_init=1"]),
        "xfs" => ("mkfs.xfs", &["-q"]),
        _ => ("mkfs.btrfs", &["-q"]),
    };
    program::run(mkfs, arguments, device, |code| code == 0).expect("mkfs");
}

/// Mounts a disk, or one that another is a copy of.
pub fn mount_disk(device: &Path, filesystem: &str, at: &Path) -> Result<(), String> {
    let options = if filesystem == "xfs" { "nouuid" } else { "" };
    let mounted = mount::mount(device, at, filesystem, Flags::MS_NOATIME, options);
    mounted.map_err(|error| base::report(&error))
}

impl Drop for Mounted {
    fn drop(&mut self) {
        let unmounted = mount::unmount(&self.at);
        let deadline = Instant::now() + Duration::from_secs(20);
        while !self.device.clone().detach().unwrap_or(true) && Instant::now() < deadline {
            std::thread::sleep(Duration::from_millis(10));
        }
        if !std::thread::panicking() {
            unmounted.expect("unmount");
        }
    }
}
