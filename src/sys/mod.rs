//! The kernel, one owning type per descriptor or ioctl: loop devices, clones, extents, mounts,
//! freezing. The only layer with `unsafe`. It knows paths and bytes, nothing of CSI, records or block maps.
#![allow(unsafe_code)]

pub mod attributes;
pub mod blockdev;
pub mod btrfs;
pub mod clone;
pub mod extents;
pub mod freeze;
pub mod loopdev;
pub mod memory;
pub mod mount;
pub mod program;
pub mod reserve;
pub mod slots;
pub mod sweep;
pub mod tree;

use std::io;
use std::path::Path;

use files::{Context, Result};

/// Whether the process may attach devices and mount: it is root.
pub fn is_root() -> bool {
    nix::unistd::geteuid().is_root()
}

/// Gives the calling thread the lowest priority: for computing (nice(2)) and for I/O
/// (ioprio_set(2)). Without the right to, it keeps its priority.
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

/// The kernel's id of this boot; after a reboot it differs, and earlier devices and mounts no longer exist.
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

/// Whether the filesystem that holds `path` takes no writes.
pub fn is_read_only(path: &Path) -> Result<bool> {
    let stat = nix::sys::statvfs::statvfs(path).context("statvfs", path)?;
    Ok(stat.flags().contains(nix::sys::statvfs::FsFlags::ST_RDONLY))
}

/// Raises the limit of open files to what the system allows: every metadata stream holds a few.
pub fn raise_open_files() -> Result<u64> {
    use nix::sys::resource::{Resource, getrlimit, setrlimit};
    let path = Path::new("RLIMIT_NOFILE");
    let (_, most) = getrlimit(Resource::RLIMIT_NOFILE).context("read", path)?;
    setrlimit(Resource::RLIMIT_NOFILE, most, most).context("raise", path)?;
    Ok(most)
}
