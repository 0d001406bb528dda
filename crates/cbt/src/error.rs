//! What can go wrong with maps, hashes and deltas.

use std::path::PathBuf;

use base::Stopped;

/// An error of the block maps.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The kernel refused a call.
    #[error(transparent)]
    Sys(#[from] files::Error),
    /// A map file is not what was written: its checksum, magic or structure is wrong.
    #[error("block map {} is damaged: {what}", path.display())]
    Damaged {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        what: String,
    },
    /// A map or a hash is damaged, and the data to make it from again was freed.
    #[error(
        "maps or hashes of a deleted snapshot are damaged and its data was freed ({what}): it cannot be a base; \
             take a full backup with GetMetadataAllocated"
    )]
    Lost {
        /// What is damaged.
        what: String,
    },
    /// A map file of a version this build does not know.
    #[error("{} has format version {version}, this build reads {known}: upgrade the driver", path.display())]
    UnknownVersion {
        /// The file.
        path: PathBuf,
        /// Its version.
        version: u32,
        /// The version this build reads.
        known: u32,
    },
    /// The caller disconnected or its deadline passed.
    #[error(transparent)]
    Stopped(#[from] Stopped),
}

impl Error {
    pub(crate) fn damaged(path: &std::path::Path, what: impl Into<String>) -> Self {
        Error::Damaged { path: path.to_owned(), what: what.into() }
    }
}
