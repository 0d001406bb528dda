//! Loop devices (loop(4)).
//!
//! A device is known by the file it serves, by device and inode number: a path means another file in another mount
//! namespace, and the nodes of a kind cluster share all loop devices of one kernel. But to ask a device for these numbers
//! is to ask the filesystem of its file, which may be dead or silent. So devices are chosen by the path that sysfs shows,
//! which asks no filesystem, and only those that may be meant are opened.

mod node;
mod queue;

use std::collections::BTreeMap;
use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Component, Path, PathBuf};
use std::time::{Duration, Instant};

use nix::sys::statfs::{self, fstatfs};
use parking_lot::Mutex;

use self::node::{Node, Status};
use super::attributes::Flag;
use files::{Context, Error, Result};

pub use self::node::{CONTROL, require};

/// How long a device that others hold open (udev, a scan) is waited for.
const SETTLE: Duration = Duration::from_secs(5);
/// Sector size of every device, in bytes.
///
/// Left to the kernel it is what direct I/O on the backing file needs, which changes when xfs shares
/// the file's blocks with a clone: a filesystem of 1 KiB blocks made before the first snapshot could
/// not be mounted after it (seen on Linux 6.18). With 4096 it never changes, and direct I/O always
/// works.
pub const SECTOR: u32 = 4096;
/// How far a device reads ahead unless its volume says otherwise, in KiB: the kernel's default.
const READ_AHEAD: u32 = 128;
/// Tries to win the race for a free device before giving up.
const ATTACH_TRIES: usize = 64;

/// Whether a device may be written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// Reads and writes.
    ReadWrite,
    /// Reads only: the kernel refuses every write.
    ReadOnly,
}

/// The device and inode number of a backing file: its identity, since a container sees other paths.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct FileId {
    device: u64,
    inode: u64,
}

impl FileId {
    /// The file at `path`.
    pub fn of(path: &Path) -> Result<Self> {
        let meta = std::fs::metadata(path).context("stat", path)?;
        Ok(FileId { device: meta.dev(), inode: meta.ino() })
    }
}

/// A loop device attached to one backing file.
///
/// It is a handle, not an owner: the device outlives this value and the process, as a volume in
/// use must outlive a driver that restarts. [`LoopDevice::detach`] ends it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LoopDevice {
    number: u32,
    /// `None` if the filesystem of the file did not answer when the device was found.
    backing: Option<FileId>,
    /// The path of the file that sysfs gave then: the only name of it once its filesystem no longer answers.
    path: PathBuf,
    access: Access,
}

impl LoopDevice {
    /// Attaches a free device to `backing`, with direct I/O where the file's filesystem allows it.
    ///
    /// The caller makes sure that no device serves the file already: two devices on one file do
    /// not see each other's writes.
    pub fn attach(backing: &Path, access: Access) -> Result<Self> {
        let file = OpenOptions::new()
            .read(true)
            .write(access == Access::ReadWrite)
            .open(backing)
            .context("open", backing)?;
        let id = FileId::of(backing)?;
        let mut is_new = false;
        for _ in 0..ATTACH_TRIES {
            let number = node::free_number(is_new)?;
            let node = Node::open(number, access)?;
            // A partition of a former user that is still open cannot be removed: such a number is left alone.
            if let Err(error) = node.remove_partitions(&sysfs(number)) {
                tracing::warn!(%error, "a free loop device has partitions that are in use: another device is made");
                is_new = true;
                continue;
            }
            match node.configure(&file, backing, access) {
                Ok(()) => {
                    let path = queue::backing_path(number).unwrap_or_default();
                    let device = LoopDevice { number, backing: Some(id), path, access };
                    if let Err(error) = device.make_safe(&node, &file, backing) {
                        device.detach()?;
                        return Err(error);
                    }
                    return Ok(device);
                }
                // Another process took the number between the two calls.
                Err(error) if error.errno() == Some(libc::EBUSY) => continue,
                Err(error) => return Err(error),
            }
        }
        Err(io::Error::from_raw_os_error(libc::EBUSY)).context("get a free loop device for", backing)
    }

    /// A number keeps what its former users set, and the file decides what direct I/O comes to.
    fn make_safe(&self, node: &Node, file: &File, backing: &Path) -> Result<()> {
        queue::count_requests(&self.sysfs());
        node.set_read_ahead(READ_AHEAD)?;
        if self.access == Access::ReadOnly {
            return Ok(());
        }
        node.allow_writes()?;
        queue::pass_flushes_on(&self.sysfs())?;
        let direct = queue::is_direct_io(&self.sysfs())? && has_direct_io(file, backing)?;
        if queue::is_cut_into_pages(&self.sysfs())? == direct {
            queue::cut_into_pages(&self.sysfs(), !direct)?;
        }
        Ok(())
    }

    /// The device that serves `backing` now, if there is one. A device is looked at where the last parts of its path are
    /// those of `backing`, which must be enough to distinguish it from all others of its kind.
    pub fn find(backing: &Path) -> Result<Option<Self>> {
        let id = match FileId::of(backing) {
            Err(error) if error.is_dead() => None,
            id => Some(id?),
        };
        for (number, path) in queue::in_use()? {
            if !may_be(&path, backing) {
                continue;
            }
            let Some(node) = Node::open_used(number)? else { continue };
            match (node.status(), id) {
                (Ok(Some(status)), Some(id)) if status.backing() == id => {
                    return Ok(Some(LoopDevice::of(number, path, &status)));
                }
                (Ok(_), _) => {}
                // Both are of one filesystem, which no longer answers.
                (Err(error), None) if error.is_dead() => return LoopDevice::of_dead(number, path).map(Some),
                (Err(error), _) if error.is_dead() => warn_once(number, &path, &error),
                (Err(error), _) => return Err(error),
            }
        }
        Ok(None)
    }

    /// The devices that serve a file now, no matter who attached them, by [`LoopDevice::backing_path`]. Others are
    /// not opened.
    pub fn all_on(wanted: impl Fn(&Path) -> bool) -> Result<Vec<Self>> {
        let mut devices = Vec::new();
        for (number, path) in queue::in_use()?.into_iter().filter(|(_, path)| wanted(path)) {
            let Some(node) = Node::open_used(number)? else { continue };
            // Looked at again now that it is open: only now it keeps its file, and until then the number may have
            // come to serve another one.
            if !queue::backing_path(number).is_some_and(|path| wanted(&path)) {
                continue;
            }
            match node.status() {
                Ok(status) => devices.extend(status.map(|status| LoopDevice::of(number, path, &status))),
                Err(error) if error.is_dead() => devices.push(LoopDevice::of_dead(number, path)?),
                Err(error) => return Err(error),
            }
        }
        Ok(devices)
    }

    /// The files with the kernel's counters (its Documentation/block/stat.rst) of the devices that serve a file now, by
    /// [`LoopDevice::backing_path`]. None is opened.
    pub fn counters_on(wanted: impl Fn(&Path) -> bool) -> Result<Vec<PathBuf>> {
        let used = queue::in_use()?.into_iter().filter(|(_, path)| wanted(path));
        Ok(used.map(|(number, _)| sysfs(number).join("stat")).collect())
    }

    fn of(number: u32, path: PathBuf, status: &Status) -> Self {
        LoopDevice { number, backing: Some(status.backing()), path, access: status.access() }
    }

    fn of_dead(number: u32, path: PathBuf) -> Result<Self> {
        Ok(LoopDevice { number, backing: None, path, access: queue::access(&sysfs(number))? })
    }

    /// The file it serves; `None` where the file's filesystem no longer answers.
    pub fn backing(&self) -> Option<FileId> {
        self.backing
    }

    /// The path of its file as the kernel reports it: that of the namespace in which it was attached, with
    /// ` (deleted)` behind it once the name is gone. `None` when it was detached meanwhile.
    pub fn backing_path(&self) -> Option<PathBuf> {
        queue::backing_path(self.number)
    }

    /// Undoes a pending lazy detach (the device was detached while it was open), so that
    /// the device does not disappear under its next user. `None` when it is already detached.
    pub fn keep(self) -> Result<Option<Self>> {
        let Some(node) = Node::open_used(self.number)? else { return Ok(None) };
        match node.status()? {
            Some(status) if Some(status.backing()) != self.backing => Ok(None),
            Some(status) => {
                if status.goes_at_last_close() {
                    node.keep(status)?;
                    if !self.is_direct_io()? {
                        queue::cut_into_pages(&self.sysfs(), true)?;
                    }
                }
                Ok(Some(self))
            }
            None => Ok(None),
        }
    }

    /// Detaches the device and waits until it is free. `Ok(false)` when a program still holds it
    /// open: the kernel then frees it at their last close.
    pub fn detach(self) -> Result<bool> {
        if let Some(node) = Node::open_used(self.number)? {
            // Checked on the very descriptor that is cleared: the number may serve another program's file by now.
            if !self.is_served_by(&node)? {
                return Ok(true);
            }
            // While one is open the device is, too. The next attach of this number finds it.
            if let Err(error) = node.remove_partitions(&self.sysfs()) {
                tracing::warn!(%error, "partitions of a loop device are in use and stay");
            }
            // The next user of the number need not have it so.
            if queue::is_cut_into_pages(&self.sysfs())? {
                queue::cut_into_pages(&self.sysfs(), false)?;
            }
            node.clear()?;
        }
        let deadline = Instant::now() + SETTLE;
        while queue::backing_path(self.number).is_some() {
            if !Node::open_used(self.number)?.map_or(Ok(false), |node| self.is_served_by(&node))? {
                break;
            }
            if Instant::now() > deadline {
                return Ok(false);
            }
            std::thread::sleep(Duration::from_millis(2));
        }
        Ok(true)
    }

    /// Whether an open device, which keeps its file while it is open, is this one.
    fn is_served_by(&self, node: &Node) -> Result<bool> {
        match (self.backing, node.status()) {
            (Some(id), Ok(status)) => Ok(status.is_some_and(|status| status.backing() == id)),
            (Some(_), Err(error)) if !error.is_dead() => Err(error),
            _ => Ok(self.backing_path().as_ref() == Some(&self.path)),
        }
    }

    /// Makes the device as large as its backing file is now.
    pub fn grow_to_file(&self) -> Result<()> {
        Node::open(self.number, Access::ReadOnly)?.grow_to_file()
    }

    /// Whether it passes requests to `backing`, its file, past the page cache, from now on. What the cache holds is
    /// written first. Through the cache, requests are cut into pages: see `queue::cut_into_pages`.
    pub fn set_direct_io(&self, direct: bool, backing: &File) -> Result<()> {
        let node = Node::open(self.number, Access::ReadOnly)?;
        if direct == self.is_direct_io()? {
            return Ok(());
        }
        if !direct {
            queue::cut_into_pages(&self.sysfs(), true)?;
        }
        node.set_direct_io(direct)?;
        if direct && has_direct_io(backing, &self.path())? {
            queue::cut_into_pages(&self.sysfs(), false)?;
        }
        Ok(())
    }

    /// Whether it does.
    pub fn is_direct_io(&self) -> Result<bool> {
        queue::is_direct_io(&self.sysfs())
    }

    /// How far the kernel reads ahead, in KiB.
    pub fn set_read_ahead(&self, kib: u32) -> Result<()> {
        Node::open(self.number, Access::ReadOnly)?.set_read_ahead(kib)
    }

    /// `/dev/loopN`.
    pub fn path(&self) -> PathBuf {
        node::path_of(self.number)
    }

    /// The device's directory in sysfs, where its counters are.
    pub fn sysfs(&self) -> PathBuf {
        sysfs(self.number)
    }

    /// Whether it may be written.
    pub fn access(&self) -> Access {
        self.access
    }

    /// The device number as mountinfo writes it, `major:minor`.
    pub fn dev(&self) -> Result<String> {
        queue::dev(&self.sysfs())
    }
}

fn sysfs(number: u32) -> PathBuf {
    PathBuf::from(format!("/sys/block/loop{number}"))
}

/// The path of the file that the loop device numbered `dev` (`major:minor`) serves; `None` where it is not a loop device, or serves
/// nothing.
pub fn backing_path_of(dev: &str) -> Option<PathBuf> {
    let name = Path::new("/sys/dev/block").join(dev).canonicalize().ok()?;
    queue::backing_path(name.file_name()?.to_str()?.strip_prefix("loop")?.parse().ok()?)
}

/// The last names of a path, last first: enough of them to distinguish a file of ours from all others.
fn end_of(path: &Path) -> impl Iterator<Item = Component<'_>> {
    path.components().rev().filter(|part| matches!(part, Component::Normal(_))).take(3)
}

/// Whether a device that serves `found` may serve `ours`, of whatever mount namespace the path is.
pub fn may_be(found: &Path, ours: &Path) -> bool {
    // A mount that is gone leaves what lies below it, which may be less than all these names.
    end_of(found).zip(end_of(ours)).all(|(found, ours)| found == ours)
}

/// Whether direct writes to a file are taken as such. Others, tmpfs among them, take them through their cache.
///
/// A list of those that do: one that is taken for less than it is costs speed, one that is taken for more loses writes.
pub fn has_direct_io(file: &File, path: &Path) -> Result<bool> {
    let found = fstatfs(file).context("stat the filesystem of", path)?.filesystem_type();
    if found == statfs::BTRFS_SUPER_MAGIC {
        // What has checksums passes through the cache.
        return Flag::OverwriteInPlace.is_set(file, path);
    }
    Ok([statfs::EXT4_SUPER_MAGIC, statfs::XFS_SUPER_MAGIC].contains(&found))
}

/// The devices of others that were passed over, and what they served.
static WARNED: Mutex<BTreeMap<u32, PathBuf>> = Mutex::new(BTreeMap::new());

fn warn_once(number: u32, path: &Path, error: &Error) {
    let mut warned = WARNED.lock();
    if warned.insert(number, path.to_owned()).as_deref() != Some(path) {
        let path = path.display();
        tracing::warn!(%path, %error, "a loop device is skipped: the filesystem of its file does not answer");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_device_is_chosen_by_the_end_of_its_path() {
        let ours = Path::new("/var/lib/deltapath/pool/volumes/vol-1/bytes/data.img");
        for (found, chosen) in [
            ("/var/lib/deltapath/pool/volumes/vol-1/bytes/data.img", true),
            // Of another mount namespace, or of one that is gone.
            ("/volumes/vol-1/bytes/data.img", true),
            ("/data.img", true),
            ("/volumes/vol-2/bytes/data.img", false),
            ("/volumes/vol-1/bytes/data.img (deleted)", false),
        ] {
            assert_eq!(may_be(Path::new(found), ours), chosen, "{found}");
        }
    }
}
