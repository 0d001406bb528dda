//! The kernel, one owning type per descriptor or ioctl: loop devices, clones, extents, mounts,
//! freezing, durable files. The only room with `unsafe`. It knows paths and bytes, nothing of CSI,
//! records or block maps.
#![allow(unsafe_code)]

pub mod attributes;
pub mod blockdev;
pub mod btrfs;
pub mod clone;
pub mod durable;
pub mod extents;
pub mod failpoint;
pub mod freeze;
pub mod loopdev;
pub mod memory;
pub mod mount;
pub mod program;
pub mod slots;
pub mod sweep;
pub mod tree;

use std::io;
use std::path::{Path, PathBuf};

/// A call into the kernel that failed: what was attempted, on which path, and the reason.
#[derive(Debug, thiserror::Error)]
#[error("{operation} {}", path.display())]
pub struct Error {
    /// What was attempted, such as `open` or `attach a loop device to`.
    pub operation: &'static str,
    /// The file, device or directory it was attempted on.
    pub path: PathBuf,
    /// What the kernel said.
    pub source: io::Error,
}

/// What a call into the kernel returns.
pub type Result<T, E = Error> = std::result::Result<T, E>;

impl Error {
    /// The error number, where the kernel gave one.
    pub fn errno(&self) -> Option<i32> {
        self.source.raw_os_error()
    }

    /// Whether the filesystem or the quota is full.
    pub fn is_no_space(&self) -> bool {
        matches!(self.errno(), Some(libc::ENOSPC | libc::EDQUOT | libc::EFBIG))
    }

    /// Whether the disk, or the filesystem's own checksums, refuse to give the bytes back.
    pub fn is_unreadable(&self) -> bool {
        matches!(self.errno(), Some(libc::EIO | libc::EUCLEAN | libc::EBADMSG))
    }

    /// Whether the filesystem answers nothing any more: the kernel shut it down, its disk or its server is gone.
    pub fn is_dead(&self) -> bool {
        matches!(self.errno(), Some(libc::EIO | libc::EUCLEAN | libc::ENOTCONN | libc::ESTALE))
    }

    /// Whether the path does not exist.
    pub fn is_not_found(&self) -> bool {
        self.source.kind() == io::ErrorKind::NotFound
    }
}

/// Adds the operation and the path to what the kernel said.
pub trait Context<T> {
    /// Wraps the error as "`operation` `path`".
    fn context(self, operation: &'static str, path: &Path) -> Result<T>;
}

impl<T, E: Into<io::Error>> Context<T> for std::result::Result<T, E> {
    fn context(self, operation: &'static str, path: &Path) -> Result<T> {
        self.map_err(|error| Error { operation, path: path.to_owned(), source: error.into() })
    }
}

/// Makes a change on disk or in the kernel, which [`failpoint`] may kill or fail before: all changes go
/// through here, so that tests interrupt the driver at each of them.
pub fn step<T, E: Into<io::Error>>(
    operation: &'static str,
    path: &Path,
    change: impl FnOnce() -> std::result::Result<T, E>,
) -> Result<T> {
    failpoint::pass(operation, path).and_then(|()| change().map_err(Into::into)).context(operation, path)
}

/// Whether the process may attach devices and mount: it is root.
pub fn is_root() -> bool {
    nix::unistd::geteuid().is_root()
}

/// Makes the calling thread give way to all others: to their computing (nice(2)) and their I/O
/// (ioprio_set(2)). A thread that may not is as fast as the others.
pub fn lower_priority() {
    const LOWEST: libc::c_int = 19;
    const WHO_PROCESS: libc::c_int = 1;
    const CLASS_IDLE: libc::c_int = 3 << 13;
    // SAFETY: setpriority takes three numbers; 0 names the calling thread.
    unsafe { libc::setpriority(libc::PRIO_PROCESS, 0, LOWEST) };
    // SAFETY: ioprio_set takes three numbers; 0 names the calling thread.
    unsafe { libc::syscall(libc::SYS_ioprio_set, WHO_PROCESS, 0, CLASS_IDLE) };
}

/// The capability to grow a mounted ext4 (capabilities(7)).
pub const CAP_SYS_RESOURCE: u32 = 24;

/// Whether the process has a capability in effect (proc_pid_status(5), `CapEff`).
pub fn has_capability(number: u32) -> Result<bool> {
    let path = Path::new("/proc/self/status");
    let text = std::fs::read_to_string(path).context("read", path)?;
    let mask = text.lines().find_map(|line| line.strip_prefix("CapEff:"));
    let mask = mask.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok());
    let mask = mask.ok_or_else(|| io::Error::from(io::ErrorKind::InvalidData)).context("read", path)?;
    Ok(mask & (1 << number) != 0)
}

/// The kernel's id of this boot; another one means that devices and mounts of then are gone.
pub fn boot_id() -> Result<String> {
    let path = Path::new("/proc/sys/kernel/random/boot_id");
    std::fs::read_to_string(path).map(|id| id.trim().to_owned()).context("read", path)
}

/// Room in the filesystem that holds `path`.
#[derive(Clone, Copy, Debug)]
pub struct Space {
    /// Size of the filesystem in bytes.
    pub total: u64,
    /// Bytes an unprivileged writer may still take.
    pub available: u64,
    /// Bytes in use.
    pub used: u64,
    /// Files and directories: how many there can be, are free and are there. All 0 on a filesystem
    /// without a limit.
    pub inodes: Inodes,
}

/// The inodes of a filesystem.
#[derive(Clone, Copy, Debug)]
pub struct Inodes {
    /// All.
    pub total: u64,
    /// Free ones.
    pub available: u64,
}

/// Asks the filesystem that holds `path` for its size, free bytes and inodes (statvfs(3)).
pub fn space(path: &Path) -> Result<Space> {
    let stat = nix::sys::statvfs::statvfs(path).context("statvfs", path)?;
    let unit = stat.fragment_size();
    Ok(Space {
        total: stat.blocks() * unit,
        available: stat.blocks_available() * unit,
        used: stat.blocks().saturating_sub(stat.blocks_free()) * unit,
        inodes: Inodes { total: stat.files(), available: stat.files_free() },
    })
}

/// Raises the limit of open files to what the system allows: every metadata stream holds a few.
pub fn raise_open_files() -> Result<u64> {
    use nix::sys::resource::{Resource, getrlimit, setrlimit};
    let path = Path::new("RLIMIT_NOFILE");
    let (_, most) = getrlimit(Resource::RLIMIT_NOFILE).context("read", path)?;
    setrlimit(Resource::RLIMIT_NOFILE, most, most).context("raise", path)?;
    Ok(most)
}
