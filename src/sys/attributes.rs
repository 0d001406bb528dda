//! Attributes of an inode, as chattr(1) sets them (ioctl_iflags(2)).

use std::ffi::CString;
use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::path::Path;

use files::{Context, Result, step};

/// `_IOR('f', 1, long)` and `_IOW('f', 2, long)` of `linux/fs.h`. The kernel reads and writes an int.
const GETFLAGS: libc::c_ulong = 0x8008_6601;
const SETFLAGS: libc::c_ulong = 0x4008_6602;

/// An attribute of a file or directory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Flag {
    /// `FS_NOCOW_FL`: overwrites happen in place, except where a snapshot shares the block. New files inherit it from
    /// their directory.
    OverwriteInPlace,
    /// `FS_SYNC_FL`: every write is on the disk before it is acknowledged.
    Synchronous,
}

impl Flag {
    fn bits(self) -> libc::c_int {
        match self {
            Flag::OverwriteInPlace => 0x0080_0000,
            Flag::Synchronous => 0x8,
        }
    }

    /// Whether the attribute is set.
    pub fn is_set(self, file: &File, path: &Path) -> Result<bool> {
        Ok(flags(file).context("read the attributes of", path)? & self.bits() != 0)
    }

    /// Sets or clears the attribute. Takes the lock that writers hold while they send their blocks, so each of them
    /// either has sent all of them by now or sees the new attribute.
    pub fn set(self, file: &File, path: &Path, on: bool) -> Result<()> {
        step("set attributes of", path, || {
            let before = flags(file)?;
            let after = if on { before | self.bits() } else { before & !self.bits() };
            if after == before {
                return Ok(());
            }
            // SAFETY: SETFLAGS reads one int, which lives through the call; the descriptor is open.
            let rc = unsafe { libc::ioctl(file.as_raw_fd(), SETFLAGS, &after) };
            if rc < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
        })
    }
}

/// Sets an extended attribute of a file (xattr(7)).
pub fn set_extended(file: &File, name: &str, value: &[u8]) -> io::Result<()> {
    let name = CString::new(name)?;
    // SAFETY: fsetxattr reads the name, which ends with a zero, and as many bytes of the value as its length says; both
    // live through the call, and the descriptor is open.
    let rc =
        unsafe { libc::fsetxattr(file.as_raw_fd(), name.as_ptr(), value.as_ptr().cast(), value.len(), 0) };
    if rc < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

fn flags(file: &File) -> io::Result<libc::c_int> {
    let mut flags: libc::c_int = 0;
    // SAFETY: GETFLAGS writes one int, mutably borrowed here; the descriptor is open.
    let rc = unsafe { libc::ioctl(file.as_raw_fd(), GETFLAGS, &mut flags) };
    if rc < 0 { Err(io::Error::last_os_error()) } else { Ok(flags) }
}
