//! Files: errors that name the path, writes that survive a power cut, the fail points before them, which parts of a
//! sparse file hold data, and memory for direct I/O. Nothing here knows what a file is for.
#![cfg_attr(test, allow(clippy::disallowed_methods))]
#![forbid(unsafe_code)]

mod buffer;
pub mod change;
pub mod durable;
pub mod failpoint;
#[cfg(feature = "interleavings")]
pub mod interleavings;
pub mod pattern;
mod ranges;

use std::io;
use std::path::{Path, PathBuf};

pub use buffer::{ALIGN, AlignedBuffer};
pub use ranges::{DataRanges, punch_hole};

/// A call into the kernel that failed: what was attempted, on which path, and the reason.
#[derive(Debug, thiserror::Error)]
#[error("{operation} {}{}", path.display(), at.map(|at| format!(" at byte {at}")).unwrap_or_default())]
pub struct Error {
    /// What was attempted, such as `open` or `attach a loop device to`.
    pub operation: &'static str,
    /// The file, device or directory it was attempted on.
    pub path: PathBuf,
    /// The offset in the file, for reads of a volume's or snapshot's data.
    pub at: Option<u64>,
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

    /// Whether the filesystem no longer answers: the kernel shut it down, or its disk or server failed.
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

    /// The same as "`operation` `path` at byte `offset`".
    fn context_at(self, operation: &'static str, path: &Path, offset: u64) -> Result<T>;
}

impl<T, E: Into<io::Error>> Context<T> for std::result::Result<T, E> {
    fn context(self, operation: &'static str, path: &Path) -> Result<T> {
        #[cfg(feature = "interleavings")]
        interleavings::pass();
        self.map_err(|error| Error { operation, path: path.to_owned(), at: None, source: error.into() })
    }

    fn context_at(self, operation: &'static str, path: &Path, offset: u64) -> Result<T> {
        self.context(operation, path).map_err(|error| Error { at: Some(offset), ..error })
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
