//! The kernel, one owning type per descriptor or ioctl: loop devices, clones, extents, mounts,
//! freezing, durable files. The only room with `unsafe`. It knows paths and bytes, nothing of CSI,
//! records or block maps.
#![allow(unsafe_code)]

pub mod blockdev;
pub mod clone;
pub mod durable;
pub mod extents;
pub mod freeze;
pub mod loopdev;
pub mod mount;
pub mod program;
pub mod sweep;

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

/// Whether the process may attach devices and mount: it is root.
pub fn is_root() -> bool {
    nix::unistd::geteuid().is_root()
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
}

/// Asks the filesystem that holds `path` for its size and free bytes (statvfs(3)).
pub fn space(path: &Path) -> Result<Space> {
    let stat = nix::sys::statvfs::statvfs(path).context("statvfs", path)?;
    let unit = stat.fragment_size();
    Ok(Space { total: stat.blocks() * unit, available: stat.blocks_available() * unit })
}

/// Raises the limit of open files to what the system allows: every metadata stream holds a few.
pub fn raise_open_files() -> Result<u64> {
    use nix::sys::resource::{Resource, getrlimit, setrlimit};
    let path = Path::new("RLIMIT_NOFILE");
    let (_, most) = getrlimit(Resource::RLIMIT_NOFILE).context("read", path)?;
    setrlimit(Resource::RLIMIT_NOFILE, most, most).context("raise", path)?;
    Ok(most)
}
