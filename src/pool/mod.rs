//! Where bytes live: the filesystem of the pool and its way to copy a file. It knows files and
//! paths; it knows no block map and no record.

mod copy;
mod error;
mod home;
mod probe;

pub use error::Error;
pub use home::{Home, Known, PoolChoice, PoolRequest};

use std::fs::File;
use std::path::Path;

use serde::{Deserialize, Serialize};

use crate::base::{BlockSize, Stop};
use crate::sys::extents::Extents;
use crate::sys::{Context, clone, durable};

/// What this room returns.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// How a pool copies files, which decides what snapshots cost.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Pool {
    /// The filesystem shares blocks between files: a copy costs the number of extents, and extents
    /// tell what changed.
    Reflink,
    /// Plain files: a copy costs the data, holes are kept, and only hashes tell what changed.
    Copy,
}

/// Bytes of a copy on their way: the offset and whole blocks from there on.
pub type Sink<'s> = &'s mut dyn FnMut(u64, &[u8]) -> std::result::Result<(), crate::base::Stopped>;

impl Pool {
    /// Makes an empty sparse file of `length` bytes.
    pub fn create(self, path: &Path, length: u64) -> Result<File> {
        let file = durable::create_new(path)?;
        file.set_len(length).context("set the length of", path)?;
        Ok(file)
    }

    /// Makes `target` a copy of `source` that shares or repeats its bytes, holes kept, and of the
    /// same length. Synced; the directory entry is the caller's to sync.
    ///
    /// A pool that has to read every byte hands them to `sink`, rounded out to whole blocks of
    /// `size`; one that shares them never calls it. Bytes are handed out in ascending order.
    pub fn copy(
        self,
        source: &File,
        target: &Path,
        size: BlockSize,
        sink: Option<Sink<'_>>,
        stop: &Stop,
    ) -> Result<File> {
        let file = durable::create_new(target)?;
        match self {
            Pool::Reflink => clone::reflink(source, &file, target)?,
            Pool::Copy => copy::sparse(source, &file, target, size, sink, stop)?,
        }
        file.sync_all().context("sync", target)?;
        Ok(file)
    }

    /// The extents of a file where they tell what it shares with another; `None` where this pool
    /// shares nothing.
    pub fn extents<'f>(self, file: &'f File, path: &'f Path) -> Result<Option<Extents<'f>>> {
        match self {
            Pool::Reflink => Ok(Some(Extents::of(file, path)?)),
            Pool::Copy => Ok(None),
        }
    }

    /// Whether a copy is one step that writers can not tear.
    pub fn copies_atomically(self) -> bool {
        matches!(self, Pool::Reflink)
    }
}

impl std::fmt::Display for Pool {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Pool::Reflink => "reflink",
            Pool::Copy => "copy",
        })
    }
}
