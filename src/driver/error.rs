//! The errors of all calls. Each message says what was wrong, with which value, and what to do.
//! [`crate::csi::status`] maps each variant to its gRPC code.

use std::path::Path;

use crate::store::SnapshotRecord;
use crate::sys::{loopdev, program};
use crate::{pool, store};
use base::Stopped;

/// A result with the [`Error`] of this layer.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// An error of the driver.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A required field is empty.
    #[error("{field} is missing")]
    Missing {
        /// The field of the request.
        field: &'static str,
    },
    /// A field has an invalid value.
    #[error("{field} must be {want}, got {value}")]
    Invalid {
        /// The field of the request.
        field: &'static str,
        /// What it holds, cut to a readable length.
        value: String,
        /// What it may hold.
        want: String,
    },
    /// A parameter that this driver does not know.
    #[error("unknown parameter {name}: use one of {known}")]
    UnknownParameter {
        /// Its name.
        name: String,
        /// The known names.
        known: &'static str,
    },
    /// A capability that this driver does not support.
    #[error("{0}")]
    Unsupported(String),
    /// A size or offset outside the possible range.
    #[error("{field} must be {want}, got {value}")]
    OutOfRange {
        /// The field of the request.
        field: &'static str,
        /// What it holds.
        value: i128,
        /// What it may hold.
        want: String,
    },
    /// The object does not exist, or was deleted.
    #[error("{kind} {id} does not exist")]
    NotFound {
        /// What was looked for: `volume`, `snapshot`, `group snapshot`, `node` and so on.
        kind: &'static str,
        /// The id as the client wrote it, cut to a readable length.
        id: String,
    },
    /// The name is taken by an object with other parameters.
    #[error("{kind} {name} already exists with {difference}: {remedy}, or send the same request")]
    Clash {
        /// The kind of the existing object.
        kind: &'static str,
        /// Its name, id or path.
        name: String,
        /// What differs.
        difference: String,
        /// What to do if the request is meant so.
        remedy: &'static str,
    },
    /// Another call works on the same object.
    #[error("another call is in progress on {what}: try again when it is done")]
    Busy {
        /// The object.
        what: String,
    },
    /// The maximum number of them is open already.
    #[error("{what} are open, which is the maximum: try again when one has ended")]
    TooMany {
        /// How many of what.
        what: String,
    },
    /// The volume is being copied from another node.
    #[error("volume {id} is being copied from another node, {progress}: try again when it is done")]
    Copying {
        /// The id that it will have.
        id: String,
        /// The progress of the copy.
        progress: String,
    },
    /// Another node does not answer, or cannot serve the request now.
    #[error("{0}")]
    Unavailable(String),
    /// The data on another node is damaged.
    #[error("{0}")]
    Damaged(String),
    /// A token that no list of this driver returned.
    #[error("starting_token {token} was not issued by this driver: list again without a token")]
    BadToken {
        /// The token, cut to a readable length.
        token: String,
    },
    /// The object is not in the state that the call needs.
    #[error("{0}")]
    Precondition(String),
    /// There is not enough space for the request.
    #[error("{0}")]
    Exhausted(String),
    /// The request can only be served by another node.
    #[error("{0}")]
    Elsewhere(String),
    /// The caller disconnected or its deadline passed.
    #[error(transparent)]
    Stopped(#[from] Stopped),
    /// The records.
    #[error(transparent)]
    Store(#[from] store::Error),
    /// The pool.
    #[error(transparent)]
    Pool(#[from] pool::Error),
    /// The block maps.
    #[error(transparent)]
    Cbt(#[from] cbt::Error),
    /// The kernel.
    #[error(transparent)]
    Sys(#[from] files::Error),
}

impl Error {
    pub(super) fn no_volume(id: &str) -> Self {
        Error::NotFound { kind: "volume", id: shown(id) }
    }

    pub(super) fn no_snapshot(id: &str) -> Self {
        Error::NotFound { kind: "snapshot", id: shown(id) }
    }

    /// Turns a missing file into "snapshot not found": the snapshot was deleted meanwhile.
    pub(super) fn gone_or(error: cbt::Error, record: &SnapshotRecord) -> Self {
        match error {
            cbt::Error::Sys(error) if error.is_not_found() => Error::no_snapshot(record.id.as_str()),
            error => error.into(),
        }
    }

    /// The kernel's error that caused this one, if any.
    pub fn sys(&self) -> Option<&files::Error> {
        match self {
            Error::Sys(error)
            | Error::Store(store::Error::Sys(error))
            | Error::Pool(pool::Error::Sys(error))
            | Error::Cbt(cbt::Error::Sys(error)) => Some(error),
            _ => None,
        }
    }

    /// The error and all its causes in one line, and what to do if the kernel's error alone does not tell. `data_dir` is the
    /// driver's data directory.
    pub fn explain(&self, data_dir: &Path) -> String {
        let line = base::report(self);
        match self.sys().and_then(|error| advice(error, data_dir)) {
            Some(advice) => format!("{line}: {advice}"),
            None => line,
        }
    }

    /// Whether the caller disconnected or its deadline passed, in any layer.
    pub fn stopped(&self) -> Option<Stopped> {
        match self {
            Error::Stopped(stopped)
            | Error::Pool(pool::Error::Stopped(stopped))
            | Error::Cbt(cbt::Error::Stopped(stopped)) => Some(*stopped),
            _ => None,
        }
    }
}

/// What to do about an error of the kernel. Paths outside the data directory belong to kubelet's directories and the mounts
/// there, to devices and to programs.
fn advice(error: &files::Error, data_dir: &Path) -> Option<&'static str> {
    if error.path == Path::new(loopdev::CONTROL) {
        return Some("load the loop module on this node; a container must be privileged");
    }
    if error.operation == program::RUN && error.is_not_found() {
        return Some("install the program on this node");
    }
    match (error.errno()?, error.path.starts_with(data_dir)) {
        (libc::ENOSPC | libc::EDQUOT, true) => Some(
            "the pool or the disk below it is full; delete volumes or snapshots, or free space on the disk",
        ),
        (libc::ENOSPC | libc::EDQUOT, false) => Some("that filesystem is full; free space on it"),
        (libc::EFBIG, true) => {
            Some("larger than the largest file of the pool's filesystem; request a smaller size")
        }
        (libc::ELOOP, _) => {
            Some("somebody put a symbolic link there while the call was at work, and links are not followed")
        }
        (libc::EROFS, true) => Some(
            "the filesystem is read-only; see the kernel log for the cause, then remount it or restart the driver",
        ),
        (libc::EROFS, false) => Some("that filesystem is read-only; see the kernel log for the cause"),
        (libc::EIO | libc::EUCLEAN | libc::EBADMSG, true) => {
            Some("the disk failed, or the filesystem on it was shut down; see the kernel log")
        }
        (libc::EIO | libc::EUCLEAN | libc::EBADMSG, false) => {
            Some("the device or filesystem failed or was shut down; see the kernel log")
        }
        _ => None,
    }
}

/// What to do where a name is taken.
pub(super) const OTHER_NAME: &str = "use another name";

/// A client's string for a message: quoted, and cut where it is long.
pub(super) fn shown(text: &str) -> String {
    const MOST: usize = 128;
    match text.char_indices().nth(MOST) {
        None => format!("{text:?}"),
        Some((at, _)) => format!("{:?}... ({} bytes)", &text[..at], text.len()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// From a bug: when another program's loop device failed, the error blamed the pool's disk.
    #[test]
    fn advice_about_the_pool_is_given_for_paths_of_the_pool() {
        for (path, errno, expected) in [
            ("/data/pool/volumes/x", libc::ENOSPC, Some("the pool or the disk below it is full")),
            ("/kubelet/x", libc::ENOSPC, Some("that filesystem is full")),
            ("/data/pool/volumes/x", libc::EIO, Some("the disk failed")),
            ("/dev/loop15", libc::EIO, Some("the device or filesystem failed")),
            (loopdev::CONTROL, libc::ENOENT, Some("load the loop module")),
            ("/kubelet/x", libc::EFBIG, None),
            ("/data/pool/volumes/x", libc::ENOENT, None),
        ] {
            let source = std::io::Error::from_raw_os_error(errno);
            let error = Error::Sys(files::Error { operation: "open", path: path.into(), at: None, source });
            let said = error.explain(Path::new("/data"));
            let advice = said.strip_prefix(&base::report(&error)).and_then(|rest| rest.strip_prefix(": "));
            assert_eq!(advice.is_some(), expected.is_some(), "{said}");
            assert!(advice.unwrap_or_default().starts_with(expected.unwrap_or_default()), "{said}");
        }
    }
}
