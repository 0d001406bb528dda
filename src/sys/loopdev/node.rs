//! An open loop device, and the calls that it takes (`linux/loop.h`).

use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};

use linux_raw_sys::ioctl::BLKPG;
use linux_raw_sys::loop_device::{
    LO_FLAGS_AUTOCLEAR, LO_FLAGS_DIRECT_IO, LO_FLAGS_READ_ONLY, LOOP_CLR_FD, LOOP_CONFIGURE, LOOP_CTL_ADD,
    LOOP_CTL_GET_FREE, LOOP_GET_STATUS64, LOOP_SET_CAPACITY, LOOP_SET_DIRECT_IO, LOOP_SET_STATUS64,
    loop_config, loop_info64,
};
use nix::sys::stat::{Mode, SFlag, makedev, mknod};

use super::{Access, FileId, SECTOR, queue, sysfs};
use files::Context;
use files::Result;
use files::step;

/// The device that hands out free loop devices.
pub const CONTROL: &str = "/dev/loop-control";

/// The path of a device, `/dev/loopN`.
pub(super) fn path_of(number: u32) -> PathBuf {
    PathBuf::from(format!("/dev/loop{number}"))
}

/// What a device says of itself.
#[derive(Clone, Copy)]
pub(super) struct Status(loop_info64);

impl Status {
    pub(super) fn backing(&self) -> FileId {
        FileId { device: self.0.lo_device, inode: self.0.lo_inode }
    }

    pub(super) fn access(&self) -> Access {
        match self.0.lo_flags & LO_FLAGS_READ_ONLY as u32 {
            0 => Access::ReadWrite,
            _ => Access::ReadOnly,
        }
    }

    /// Whether the kernel frees it at the last close.
    pub(super) fn goes_at_last_close(&self) -> bool {
        self.0.lo_flags & LO_FLAGS_AUTOCLEAR as u32 != 0
    }
}

/// An open loop device.
pub(super) struct Node {
    file: File,
    path: PathBuf,
}

impl Node {
    /// Opens `/dev/loopN`, making the node where it is missing: the `/dev` of a container is static.
    pub(super) fn open(number: u32, access: Access) -> Result<Self> {
        let path = path_of(number);
        let open = || OpenOptions::new().read(true).write(access == Access::ReadWrite).open(&path);
        let file = match open() {
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                make_node(number, &path)?;
                open()
            }
            opened => opened,
        };
        Ok(Node { file: file.context("open", &path)?, path })
    }

    /// Opens a device that is in use; `None` when it is not any more.
    pub(super) fn open_used(number: u32) -> Result<Option<Self>> {
        match Node::open(number, Access::ReadOnly) {
            Ok(node) => Ok(Some(node)),
            Err(error) if is_gone(&error.source) || error.is_not_found() => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Makes the device serve `backing`; its error is EBUSY where it serves a file by now.
    pub(super) fn configure(&self, backing: &File, backing_path: &Path, access: Access) -> Result<()> {
        // SAFETY: an all-zero `loop_config` is valid: it holds integers only.
        let mut config: loop_config = unsafe { std::mem::zeroed() };
        config.fd = backing.as_raw_fd() as u32;
        config.block_size = SECTOR;
        config.info.lo_flags = LO_FLAGS_DIRECT_IO as u32;
        if access == Access::ReadOnly {
            config.info.lo_flags |= LO_FLAGS_READ_ONLY as u32;
        }
        step("attach a loop device to", backing_path, || {
            // SAFETY: LOOP_CONFIGURE reads one `loop_config` that lives through the call; both descriptors are open.
            check(unsafe { libc::ioctl(self.file.as_raw_fd(), LOOP_CONFIGURE.into(), &config) }).map(drop)
        })
    }

    /// What the device serves; `None` when it serves nothing. An error where the filesystem of its file does not answer.
    pub(super) fn status(&self) -> Result<Option<Status>> {
        // SAFETY: an all-zero `loop_info64` is valid: it holds integers only.
        let mut info: loop_info64 = unsafe { std::mem::zeroed() };
        // SAFETY: LOOP_GET_STATUS64 writes one `loop_info64`, mutably borrowed here; the descriptor is open.
        let rc = unsafe { libc::ioctl(self.file.as_raw_fd(), LOOP_GET_STATUS64.into(), &mut info) };
        match check(rc) {
            Ok(_) => Ok(Some(Status(info))),
            Err(error) if is_gone(&error) => Ok(None),
            Err(error) => Err(error).context("read the status of", &self.path),
        }
    }

    /// Undoes a pending lazy detach.
    pub(super) fn keep(&self, mut status: Status) -> Result<()> {
        status.0.lo_flags &= !(LO_FLAGS_AUTOCLEAR as u32);
        step("keep loop device", &self.path, || {
            // SAFETY: LOOP_SET_STATUS64 reads one `loop_info64` that lives through the call; the descriptor is open.
            check(unsafe { libc::ioctl(self.file.as_raw_fd(), LOOP_SET_STATUS64.into(), &status.0) })
                .map(drop)
        })
    }

    /// Makes the device serve nothing, now or at its last close; fine when it serves nothing.
    pub(super) fn clear(&self) -> Result<()> {
        let cleared = step("detach", &self.path, || {
            // SAFETY: LOOP_CLR_FD takes no argument; the descriptor is open.
            check(unsafe { libc::ioctl(self.file.as_raw_fd(), LOOP_CLR_FD.into()) }).map(drop)
        });
        match cleared {
            Err(error) if is_gone(&error.source) => Ok(()),
            cleared => cleared,
        }
    }

    /// Removes the partitions that somebody has added to the device, which the kernel keeps whatever the device serves: what it serves
    /// next could be read through them. An error where one is open. No partition of ours is made: the kernel is never asked
    /// to look for them.
    pub(super) fn remove_partitions(&self, sysfs: &Path) -> Result<()> {
        for number in queue::partitions(sysfs)? {
            let partition = Partition { start: 0, length: 0, number, names: [[0; 64]; 2] };
            let argument = PartitionCall {
                operation: DELETE_PARTITION,
                flags: 0,
                length: size_of::<Partition>() as libc::c_int,
                data: &partition,
            };
            let removed = step("remove the partitions of", &self.path, || {
                // SAFETY: BLKPG reads one `blkpg_ioctl_arg` and the `blkpg_partition` that it points to; both have the layout
                // of `linux/blkpg.h` and live through the call, and the descriptor is open.
                check(unsafe { libc::ioctl(self.file.as_raw_fd(), BLKPG.into(), &argument) }).map(drop)
            });
            match removed {
                // It is gone already.
                Err(error) if is_gone(&error.source) => {}
                removed => removed?,
            }
        }
        Ok(())
    }

    /// Makes the device as large as its file.
    pub(super) fn grow_to_file(&self) -> Result<()> {
        step("grow", &self.path, || {
            // SAFETY: LOOP_SET_CAPACITY takes no argument; the descriptor is open.
            check(unsafe { libc::ioctl(self.file.as_raw_fd(), LOOP_SET_CAPACITY.into()) }).map(drop)
        })
    }

    /// Whether requests pass the page cache of the file by, from now on. What the cache holds is written before, and
    /// what is under way ends.
    pub(super) fn set_direct_io(&self, direct: bool) -> Result<()> {
        let number = libc::c_ulong::from(direct);
        step("set direct I/O of", &self.path, || {
            // SAFETY: LOOP_SET_DIRECT_IO takes a number by value; the descriptor is open.
            check(unsafe { libc::ioctl(self.file.as_raw_fd(), LOOP_SET_DIRECT_IO.into(), number) }).map(drop)
        })
    }

    /// Undoes a `blockdev --setro`, which outlives what the device served.
    pub(super) fn allow_writes(&self) -> Result<()> {
        let read_only: libc::c_int = 0;
        step("allow writes to", &self.path, || {
            // SAFETY: BLKROSET reads one int, which lives through the call; the descriptor is open.
            check(unsafe {
                libc::ioctl(self.file.as_raw_fd(), linux_raw_sys::ioctl::BLKROSET.into(), &read_only)
            })
            .map(drop)
        })
    }

    /// How far the kernel reads ahead (blockdev(8), `--setra`).
    pub(super) fn set_read_ahead(&self, kib: u32) -> Result<()> {
        let sectors = libc::c_ulong::from(kib) * 2;
        step("set the readahead of", &self.path, || {
            // SAFETY: BLKRASET takes a number by value; the descriptor is open.
            check(unsafe {
                libc::ioctl(self.file.as_raw_fd(), linux_raw_sys::ioctl::BLKRASET.into(), sectors)
            })
            .map(drop)
        })
    }
}

/// `struct blkpg_ioctl_arg` of `linux/blkpg.h`.
#[repr(C)]
struct PartitionCall {
    operation: libc::c_int,
    flags: libc::c_int,
    length: libc::c_int,
    data: *const Partition,
}

/// `struct blkpg_partition` of `linux/blkpg.h`; the names at its end are not looked at.
#[repr(C)]
struct Partition {
    start: i64,
    length: i64,
    number: libc::c_int,
    names: [[u8; 64]; 2],
}

/// `BLKPG_DEL_PARTITION` of `linux/blkpg.h`.
const DELETE_PARTITION: libc::c_int = 2;

/// The number of a free device; the kernel makes a new one where all are taken, or where a new one is asked for.
pub(super) fn free_number(is_new: bool) -> Result<u32> {
    let path = Path::new(CONTROL);
    const ASK: &str = "get a free loop device from";
    let control = OpenOptions::new().read(true).write(true).open(path).context(ASK, path)?;
    let number = match is_new {
        // SAFETY: LOOP_CTL_ADD takes a number by value, -1 for any, and returns a number; the descriptor is open.
        true => check(unsafe { libc::ioctl(control.as_raw_fd(), LOOP_CTL_ADD.into(), -1 as libc::c_long) }),
        // SAFETY: LOOP_CTL_GET_FREE takes no argument and returns a number; the descriptor is open.
        false => check(unsafe { libc::ioctl(control.as_raw_fd(), LOOP_CTL_GET_FREE.into()) }),
    };
    Ok(number.context(ASK, path)? as u32)
}

/// Fails with a clear error where this machine has no loop devices at all.
pub fn require() -> Result<()> {
    let path = Path::new(CONTROL);
    std::fs::metadata(path).map(drop).context("find", path)
}

fn make_node(number: u32, path: &Path) -> Result<()> {
    let dev = queue::dev(&sysfs(number))?;
    let (major, minor) = dev
        .split_once(':')
        .and_then(|(major, minor)| Some((major.parse().ok()?, minor.parse().ok()?)))
        .ok_or_else(|| io::Error::new(io::ErrorKind::InvalidData, dev.clone()))
        .context("read the device number of", path)?;
    let mode = Mode::from_bits_truncate(0o660);
    #[expect(clippy::disallowed_methods, reason = "this is the step")]
    let made =
        step("make the device node", path, || mknod(path, SFlag::S_IFBLK, mode, makedev(major, minor)));
    match made {
        Err(error) if error.errno() != Some(libc::EEXIST) => Err(error),
        _ => Ok(()),
    }
}

/// ENXIO: nothing attached. ENODEV: the device itself is being removed.
fn is_gone(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::ENXIO | libc::ENODEV))
}

fn check(rc: libc::c_int) -> io::Result<libc::c_int> {
    if rc < 0 { Err(io::Error::last_os_error()) } else { Ok(rc) }
}
