//! What a data directory is, and who serves it.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::{Error, Result, encode, read_optional, records};
use base::{DataDir, DataDirKey};
use files::change;
use files::durable::{self, FileLock};

/// `DIR/deltapath.json`. Written last when a data directory is made: one without it holds no object
/// yet, at most an image that the next start takes up.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Manifest {
    /// Format version of everything in the directory.
    pub version: u32,
    /// The driver's name: its topology keys and volume handles are known to the cluster by it.
    pub driver_name: String,
    /// Part of the id of every object that is made here. It never changes, whatever the node is called.
    pub key: DataDirKey,
    /// The kind of the pool, a word of `--pool`.
    pub pool: String,
    /// Whether the pool is in `pool.img`.
    pub in_image: bool,
}

impl records::Checked for Manifest {}

impl Manifest {
    /// The version to write.
    pub const VERSION: u32 = records::VERSION;

    /// What a directory says of itself; `None` where it says nothing.
    pub fn read(dir: &DataDir) -> Result<Option<Self>> {
        read_optional(&dir.manifest())
    }
}

/// A data directory that only this process serves, until this value is dropped.
#[derive(Debug)]
pub struct LockedDir {
    dir: DataDir,
    _lock: FileLock,
}

impl LockedDir {
    /// Makes the directory where it is missing and takes its lock, waiting for `patience` where another process holds it.
    pub fn lock(dir: DataDir, patience: Duration) -> Result<Self> {
        change::create_dir_all(dir.path())?;
        match FileLock::try_lock(&dir.lock(), patience)? {
            Some(lock) => Ok(LockedDir { dir, _lock: lock }),
            None => Err(Error::Locked(dir.path().to_owned())),
        }
    }

    /// Its paths, for as long as the lock is held.
    pub fn dir(&self) -> &DataDir {
        &self.dir
    }

    /// What the directory says of itself; `None` for a new one.
    pub fn manifest(&self) -> Result<Option<Manifest>> {
        Manifest::read(&self.dir)
    }

    /// Writes what the directory is.
    pub fn set_manifest(&self, manifest: &Manifest) -> Result<()> {
        Ok(durable::replace(&self.dir.manifest(), &encode(manifest))?)
    }

    /// The error where the directory says otherwise than the flags.
    pub fn mismatch(&self, what: &'static str, found: &str, asked: &str) -> Error {
        Error::Mismatch {
            path: self.dir.path().to_owned(),
            what,
            found: found.to_owned(),
            asked: asked.to_owned(),
        }
    }
}
