//! What can go wrong with records.

use std::path::{Path, PathBuf};

/// An error of the store.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The kernel refused a call.
    #[error(transparent)]
    Sys(#[from] files::Error),
    /// A record is not valid JSON of its kind.
    #[error("record {} cannot be read", path.display())]
    Unreadable {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        source: serde_json::Error,
    },
    /// A record with impossible values.
    #[error("record {} is invalid: {what}", path.display())]
    Impossible {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        what: &'static str,
    },
    /// A record of a version that this build does not know.
    #[error("record {} has format version {version}, this build reads {known}: {}", path.display(), advice(*version, *known))]
    UnknownVersion {
        /// The file.
        path: PathBuf,
        /// Its version.
        version: u32,
        /// The version this build reads.
        known: u32,
    },
    /// A record that belongs to another directory.
    #[error("record {} belongs to {id}: move its directory back", path.display())]
    Misplaced {
        /// The file.
        path: PathBuf,
        /// Whose record it is.
        id: String,
    },
    /// Two snapshots of a volume with one place in its order.
    #[error("snapshot {} has the sequence number {sequence} of another snapshot of its volume: move one away", path.display())]
    DuplicateSequence {
        /// The directory of the one that is not served.
        path: PathBuf,
        /// The number.
        sequence: u64,
    },
    /// A snapshot whose group cannot be served as a whole.
    #[error("group snapshot {} is incomplete", path.display())]
    GroupDamaged {
        /// The group's directory.
        path: PathBuf,
    },
    /// An object that is there and cannot be served.
    #[error("{why}; {remedy}")]
    Withheld {
        /// What was wrong with its record at start.
        why: String,
        /// How it is served again.
        remedy: String,
    },
    /// The filesystem of the pool no longer answers, so nothing is known of any object.
    #[error("the pool at {} does not respond ({why}): stop the pods that use its volumes on this node, and restart the driver", path.display())]
    Dead {
        /// The pool.
        path: PathBuf,
        /// What it answered last.
        why: String,
    },
    /// A data directory that another driver serves.
    #[error("data directory {} is in use by another driver: stop it, or choose another --data-dir", .0.display())]
    Locked(PathBuf),
    /// A data directory that was made for something else.
    #[error("data directory {} was made with {what} {found}, and this driver was started with {asked}: start it with {found}, or choose another --data-dir", path.display())]
    Mismatch {
        /// The data directory.
        path: PathBuf,
        /// What differs.
        what: &'static str,
        /// What the directory says.
        found: String,
        /// What the flags say.
        asked: String,
    },
}

fn advice(version: u32, known: u32) -> &'static str {
    match version < known {
        true => "run the build that made it, or choose another --data-dir",
        false => "upgrade the driver",
    }
}

impl Error {
    /// How the object of a record that could not be read at start is served again.
    pub(super) fn remedy(&self, record: &Path) -> String {
        match self {
            Error::UnknownVersion { .. } => "until then its object is not served".to_owned(),
            // They say what to do.
            Error::Misplaced { .. } | Error::DuplicateSequence { .. } => "then restart the driver".to_owned(),
            _ => format!("repair or remove {} and restart the driver", record.display()),
        }
    }
}

/// An object whose record could not be read at start.
#[derive(Debug)]
pub struct Damage {
    /// The object's directory.
    pub path: PathBuf,
    /// Why.
    pub error: Error,
}
