//! Loop devices (loop(4)).
//!
//! A device is known by the file it serves, by device and inode number: a path means another file in
//! another mount namespace, and the nodes of a kind cluster share all loop devices of one kernel.
//! Only devices whose backing file the caller names are ever touched.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use nix::sys::stat::{Mode, SFlag, makedev, mknod};

use super::{Context, Error, Result, step};

const LOOP_CLR_FD: libc::c_ulong = 0x4C01;
const LOOP_SET_STATUS64: libc::c_ulong = 0x4C04;
const LOOP_GET_STATUS64: libc::c_ulong = 0x4C05;
const LOOP_SET_CAPACITY: libc::c_ulong = 0x4C07;
const LOOP_SET_DIRECT_IO: libc::c_ulong = 0x4C08;
const LOOP_CONFIGURE: libc::c_ulong = 0x4C0A;
const LOOP_CTL_GET_FREE: libc::c_ulong = 0x4C82;

const LO_FLAGS_READ_ONLY: u32 = 1;
const LO_FLAGS_AUTOCLEAR: u32 = 4;
const LO_FLAGS_DIRECT_IO: u32 = 16;

const CONTROL: &str = "/dev/loop-control";
/// How long a device that others hold open (udev, a scan) is waited for.
const SETTLE: Duration = Duration::from_secs(5);
/// Sector size of every device, in bytes.
///
/// Left to the kernel it is what direct I/O on the backing file needs, which changes when xfs shares
/// the file's blocks with a clone: a filesystem of 1 KiB blocks made before the first snapshot could
/// not be mounted after it (seen on Linux 6.18). With 4096 it never changes, and direct I/O always
/// works.
pub const SECTOR: u32 = 4096;
/// Tries to win the race for a free device before giving up.
const ATTACH_TRIES: usize = 64;

/// `struct loop_info64` of `linux/loop.h`.
#[repr(C)]
#[derive(Clone, Copy)]
struct LoopInfo64 {
    device: u64,
    inode: u64,
    rdevice: u64,
    offset: u64,
    size_limit: u64,
    number: u32,
    encrypt_type: u32,
    encrypt_key_size: u32,
    flags: u32,
    file_name: [u8; 64],
    crypt_name: [u8; 64],
    encrypt_key: [u8; 32],
    init: [u64; 2],
}

impl LoopInfo64 {
    fn with_flags(flags: u32) -> Self {
        LoopInfo64 {
            device: 0,
            inode: 0,
            rdevice: 0,
            offset: 0,
            size_limit: 0,
            number: 0,
            encrypt_type: 0,
            encrypt_key_size: 0,
            flags,
            file_name: [0; 64],
            crypt_name: [0; 64],
            encrypt_key: [0; 32],
            init: [0; 2],
        }
    }

    fn backing(&self) -> FileId {
        FileId { device: self.device, inode: self.inode }
    }

    fn access(&self) -> Access {
        if self.flags & LO_FLAGS_READ_ONLY != 0 { Access::ReadOnly } else { Access::ReadWrite }
    }
}

/// `struct loop_config` of `linux/loop.h`.
#[repr(C)]
struct LoopConfig {
    fd: u32,
    block_size: u32,
    info: LoopInfo64,
    reserved: [u64; 8],
}

/// Whether a device may be written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// Reads and writes.
    ReadWrite,
    /// Reads only: the kernel refuses every write, whoever asks.
    ReadOnly,
}

/// The device and inode number of a backing file: what it is known by, for a container sees other paths.
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
    backing: FileId,
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
        let flags = LO_FLAGS_DIRECT_IO | if access == Access::ReadOnly { LO_FLAGS_READ_ONLY } else { 0 };
        for _ in 0..ATTACH_TRIES {
            let number = free_number()?;
            let device = open_node(number, access)?;
            let config = LoopConfig {
                fd: file.as_raw_fd() as u32,
                block_size: SECTOR,
                info: LoopInfo64::with_flags(flags),
                reserved: [0; 8],
            };
            let configured = step("attach a loop device to", backing, || {
                // SAFETY: LOOP_CONFIGURE reads one `loop_config`, and `config` is one that lives
                // through the call; both descriptors are open.
                check(unsafe { libc::ioctl(device.as_raw_fd(), LOOP_CONFIGURE, &config) })
            });
            match configured {
                Ok(_) => {
                    let device = LoopDevice { number, backing: id, access };
                    count_writes(number);
                    if let Err(error) = pass_flushes_on(number, access) {
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
        Err(io::Error::from_raw_os_error(libc::EBUSY)).context("find a free loop device for", backing)
    }

    /// The device that serves `backing` now, if there is one.
    pub fn find(backing: &Path) -> Result<Option<Self>> {
        let id = FileId::of(backing)?;
        for number in in_use()? {
            if let Some(info) = status(number)?
                && info.backing() == id
            {
                return Ok(Some(Self { number, backing: id, access: info.access() }));
            }
        }
        Ok(None)
    }

    /// The devices that serve a file now, whoever attached them, by [`LoopDevice::backing_path`]. Others are
    /// not opened.
    pub fn all_on(wanted: impl Fn(&Path) -> bool) -> Result<Vec<Self>> {
        let is_wanted = |number: u32| backing_path(number).is_some_and(|path| wanted(&path));
        let mut devices = Vec::new();
        for number in in_use()? {
            // Looked at again once it is open: only then it keeps its file, and until then the number may have
            // come to serve another one.
            if is_wanted(number)
                && let Some(device) = open_used(number)?
                && is_wanted(number)
                && let Some(info) = get_status(&device, &node(number))?
            {
                devices.push(LoopDevice { number, backing: info.backing(), access: info.access() });
            }
        }
        Ok(devices)
    }

    /// The file it serves.
    pub fn backing(&self) -> FileId {
        self.backing
    }

    /// The path of its file as the kernel tells it: that of the namespace in which it was attached, with
    /// ` (deleted)` behind it once the name is gone. `None` when it was detached meanwhile.
    pub fn backing_path(&self) -> Option<PathBuf> {
        backing_path(self.number)
    }

    /// Undoes a pending lazy detach (the device was detached while somebody held it open), so that
    /// the device does not vanish under its next user. `None` when it is gone already.
    pub fn keep(self) -> Result<Option<Self>> {
        let path = self.path();
        let device = match open_node(self.number, Access::ReadOnly) {
            Ok(device) => device,
            Err(error) if is_gone(&error.source) => return Ok(None),
            Err(error) => return Err(error),
        };
        match get_status(&device, &path)? {
            Some(info) if info.backing() != self.backing => Ok(None),
            Some(mut info) if info.flags & LO_FLAGS_AUTOCLEAR != 0 => {
                info.flags &= !LO_FLAGS_AUTOCLEAR;
                step("keep loop device", &path, || {
                    // SAFETY: LOOP_SET_STATUS64 reads one `loop_info64`, which lives through the call.
                    check(unsafe { libc::ioctl(device.as_raw_fd(), LOOP_SET_STATUS64, &info) })
                })?;
                Ok(Some(self))
            }
            Some(_) => Ok(Some(self)),
            None => Ok(None),
        }
    }

    /// Detaches the device and waits until it is free. `Ok(false)` when somebody still holds it
    /// open: the kernel then frees it at their last close.
    pub fn detach(self) -> Result<bool> {
        let path = self.path();
        {
            let device = match open_node(self.number, Access::ReadOnly) {
                Ok(device) => device,
                Err(error) if is_gone(&error.source) => return Ok(true),
                Err(error) => return Err(error),
            };
            // Checked on the very descriptor that is cleared: the number may serve somebody else's
            // file by now.
            match get_status(&device, &path)? {
                Some(info) if (FileId { device: info.device, inode: info.inode }) == self.backing => {}
                _ => return Ok(true),
            }
            let cleared = step("detach", &path, || {
                // SAFETY: LOOP_CLR_FD takes no argument; the descriptor is open.
                check(unsafe { libc::ioctl(device.as_raw_fd(), LOOP_CLR_FD) })
            });
            match cleared {
                Err(error) if is_gone(&error.source) => return Ok(true),
                cleared => cleared?,
            };
        }
        let deadline = Instant::now() + SETTLE;
        while self.is_attached()? {
            if Instant::now() > deadline {
                return Ok(false);
            }
            std::thread::sleep(Duration::from_millis(2));
        }
        Ok(true)
    }

    fn is_attached(&self) -> Result<bool> {
        if !sysfs(self.number).join("loop/backing_file").exists() {
            return Ok(false);
        }
        Ok(status(self.number)?.is_some_and(|info| info.backing() == self.backing))
    }

    /// Makes the device as large as its backing file is now (LOOP_SET_CAPACITY).
    pub fn grow_to_file(&self) -> Result<()> {
        let path = self.path();
        let device = open_node(self.number, Access::ReadOnly)?;
        step("grow", &path, || {
            // SAFETY: LOOP_SET_CAPACITY takes no argument; the descriptor is open.
            check(unsafe { libc::ioctl(device.as_raw_fd(), LOOP_SET_CAPACITY) }).map(drop)
        })
    }

    /// Whether it passes requests to the backing file past the page cache, from now on
    /// (LOOP_SET_DIRECT_IO). What the cache holds is written first.
    pub fn set_direct_io(&self, direct: bool) -> Result<()> {
        let path = self.path();
        let device = open_node(self.number, Access::ReadOnly)?;
        let number = libc::c_ulong::from(direct);
        step("set direct I/O of", &path, || {
            // SAFETY: LOOP_SET_DIRECT_IO takes a number by value; the descriptor is open.
            check(unsafe { libc::ioctl(device.as_raw_fd(), LOOP_SET_DIRECT_IO, number) }).map(drop)
        })
    }

    /// Whether it does (`loop/dio` in sysfs).
    pub fn is_direct_io(&self) -> Result<bool> {
        let path = self.sysfs().join("loop/dio");
        Ok(std::fs::read_to_string(&path).context("read", &path)?.trim() == "1")
    }

    /// How far the kernel reads ahead, in KiB (`queue/read_ahead_kb` in sysfs).
    pub fn set_read_ahead(&self, kib: u32) -> Result<()> {
        let path = self.sysfs().join("queue/read_ahead_kb");
        step("write", &path, || std::fs::write(&path, kib.to_string()))
    }

    /// `/dev/loopN`.
    pub fn path(&self) -> PathBuf {
        node(self.number)
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
        read_dev(self.number)
    }
}

fn node(number: u32) -> PathBuf {
    PathBuf::from(format!("/dev/loop{number}"))
}

fn sysfs(number: u32) -> PathBuf {
    PathBuf::from(format!("/sys/block/loop{number}"))
}

fn backing_path(number: u32) -> Option<PathBuf> {
    let path = std::fs::read_to_string(sysfs(number).join("loop/backing_file")).ok()?;
    Some(path.trim_end_matches('\n').into())
}

/// The numbers of the devices that serve a file. Free ones are passed over without opening them: an open
/// would race with others' attach and detach calls.
fn in_use() -> Result<Vec<u32>> {
    let block = Path::new("/sys/block");
    let mut numbers = Vec::new();
    for entry in std::fs::read_dir(block).context("list", block)? {
        let name = entry.context("list", block)?.file_name();
        let number = name.to_str().and_then(|name| name.strip_prefix("loop")?.parse().ok());
        numbers.extend(number.filter(|number| sysfs(*number).join("loop/backing_file").exists()));
    }
    Ok(numbers)
}

fn read_dev(number: u32) -> Result<String> {
    let path = sysfs(number).join("dev");
    Ok(std::fs::read_to_string(&path).context("read", &path)?.trim().to_owned())
}

/// Has the kernel count the device's requests: a loop device may come with that switched off, and
/// [`super::blockdev::WriteCounters`] refuses to prove anything then.
fn count_writes(number: u32) {
    let path = sysfs(number).join("queue/iostats");
    if let Err(error) = step("write", &path, || std::fs::write(&path, "1")) {
        tracing::warn!(path = %path.display(), %error, "requests of this device are not counted");
    }
}

/// Makes sure that a flush of the device reaches its file. Whoever had this number before may have said that it writes
/// through its cache, and that stays with the number: no flush would be sent, and a power cut lose what was synced.
fn pass_flushes_on(number: u32, access: Access) -> Result<()> {
    let path = sysfs(number).join("queue/write_cache");
    let passes = || Ok(std::fs::read_to_string(&path).context("read", &path)?.trim() == "write back");
    if access == Access::ReadOnly || passes()? {
        return Ok(());
    }
    step("write", &path, || std::fs::write(&path, "write back"))?;
    match passes()? {
        true => Ok(()),
        false => Err(io::Error::from(io::ErrorKind::Unsupported)).context("turn flushes on in", &path),
    }
}

/// The number of a free device; the kernel makes a new one where all are taken.
fn free_number() -> Result<u32> {
    let path = Path::new(CONTROL);
    const ASK: &str =
        "find a free loop device (is the loop module loaded, and this container privileged?) through";
    let control = OpenOptions::new().read(true).write(true).open(path).context(ASK, path)?;
    // SAFETY: LOOP_CTL_GET_FREE takes no argument and returns a number; the descriptor is open.
    let number = check(unsafe { libc::ioctl(control.as_raw_fd(), LOOP_CTL_GET_FREE) }).context(ASK, path)?;
    Ok(number as u32)
}

/// Opens `/dev/loopN`, making the node where it is missing: the `/dev` of a container is static.
fn open_node(number: u32, access: Access) -> Result<File> {
    let path = node(number);
    let open = || OpenOptions::new().read(true).write(access == Access::ReadWrite).open(&path);
    match open() {
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            let dev = read_dev(number)?;
            let (major, minor) = dev
                .split_once(':')
                .and_then(|(major, minor)| Some((major.parse().ok()?, minor.parse().ok()?)))
                .ok_or_else(|| io::Error::new(io::ErrorKind::InvalidData, dev.clone()))
                .context("read the device number of", &path)?;
            let mode = Mode::from_bits_truncate(0o660);
            let made = step("make the device node", &path, || {
                mknod(&path, SFlag::S_IFBLK, mode, makedev(major, minor))
            });
            match made {
                Err(error) if error.errno() != Some(libc::EEXIST) => Err(error),
                _ => open().context("open", &path),
            }
        }
        other => other.context("open", &path),
    }
}

/// Opens a device that is in use; `None` when it is not any more.
fn open_used(number: u32) -> Result<Option<File>> {
    match open_node(number, Access::ReadOnly) {
        Ok(device) => Ok(Some(device)),
        Err(error) if is_gone(&error.source) || error.is_not_found() => Ok(None),
        Err(error) => Err(error),
    }
}

fn status(number: u32) -> Result<Option<LoopInfo64>> {
    match open_used(number)? {
        Some(device) => get_status(&device, &node(number)),
        None => Ok(None),
    }
}

/// What a device serves; `None` when it serves nothing.
fn get_status(device: &File, path: &Path) -> Result<Option<LoopInfo64>> {
    let mut info = LoopInfo64::with_flags(0);
    // SAFETY: LOOP_GET_STATUS64 writes one `loop_info64`, and `info` is one, mutably borrowed here.
    let rc = unsafe { libc::ioctl(device.as_raw_fd(), LOOP_GET_STATUS64, &mut info) };
    match check(rc) {
        Ok(_) => Ok(Some(info)),
        Err(error) if is_gone(&error) => Ok(None),
        Err(error) => Err(error).context("read the status of", path),
    }
}

/// ENXIO: nothing attached. ENODEV: the device itself is being removed.
fn is_gone(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::ENXIO | libc::ENODEV))
}

fn check(rc: libc::c_int) -> io::Result<libc::c_int> {
    if rc < 0 { Err(io::Error::last_os_error()) } else { Ok(rc) }
}

/// Fails with a clear error where this machine has no loop devices at all.
pub fn require() -> Result<()> {
    let path = Path::new(CONTROL);
    match std::fs::metadata(path) {
        Ok(_) => Ok(()),
        Err(source) => {
            Err(Error { operation: "find (is the loop module loaded?)", path: path.into(), source })
        }
    }
}
