//! Where bytes live: the filesystem of the pool and its way to copy a file. It knows files and
//! paths; it knows no block map and no record.
//!
//! - On btrfs, objects are subvolumes without copy-on-write (NOCOW). A search lists what has a later transaction than the one that
//!   made the parent's copy, so it does not need the parent's data.
//! - A search reports one punched block next to a hole as a hole to the end of the address space. So holes are ranges, and only
//!   segments in which the parent holds data are looked at (`cbt::written`).
//! - If the disk below an image is full, xfs fails the writes and continues. btrfs turns read-only until it is mounted again,
//!   which a start does when nothing uses it. That mount replays a log, so it first gets the space of a reserve (`sys::reserve`).
//! - An image is attached once: it is locked, and its device is found by device and inode number, never by path.

mod choose;
mod copy;
mod error;
mod format;
mod health;
mod image;
mod live;
mod open_pool;
mod probe;
mod space;

pub use choose::PoolRequest;
pub use error::Error;
pub use open_pool::{Known, OpenPool};

use std::fs::File;
use std::path::{Path, PathBuf};

use crate::sys::attributes::Flag;
use crate::sys::btrfs::{self, Subvolume, WrittenSince};
use crate::sys::extents::Extents;
use crate::sys::{clone, tree};
use base::{BlockSize, ObjectDir, PoolKind, Stop};
use files::Context;
use files::change;
use files::durable;

/// A result with the [`Error`] of this layer.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// How a pool copies files, which decides the cost of snapshots.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pool {
    /// btrfs, a subvolume for the bytes of each object: a copy takes constant time, and the tree shows
    /// what was written since.
    Btrfs {
        /// Whether a punched hole leaves a trace in the tree. Without (`no-holes`), extents are compared.
        holes: bool,
        /// Whether a synchronous direct write ends with a flush, as on a device with a cache that cannot write
        /// through it.
        flushes: bool,
    },
    /// The filesystem shares blocks between files: a copy costs the number of extents, and extents
    /// show what changed.
    Xfs,
    /// Plain files: a copy costs the data, holes are kept, and only hashes show what changed.
    Dir,
}

/// Bytes of a copy on their way: the offset and whole blocks from there on.
pub type Sink<'s> = &'s mut dyn FnMut(u64, &[u8]) -> std::result::Result<(), base::Stopped>;

/// The bytes of a volume or a snapshot, open: they stay readable when the object is removed.
#[derive(Debug)]
pub struct Bytes {
    file: File,
    path: PathBuf,
    subvolume: Option<Subvolume>,
}

impl Bytes {
    /// The blocks.
    pub fn file(&self) -> &File {
        &self.file
    }

    /// Where they are, for messages.
    pub fn path(&self) -> &Path {
        &self.path
    }
}

/// What a pool knows of the difference between two files.
pub enum Changes<'f> {
    /// Exactly what was written since; all else is as it was.
    Written(WrittenSince<'f>),
    /// The physical extents of both, to be compared.
    Extents(Extents<'f>, Extents<'f>),
    /// Nothing is known: their content must be compared.
    Unknown,
}

impl Pool {
    /// Makes the empty sparse file of an object, of `length` bytes. Synced.
    pub fn create(self, target: &ObjectDir, length: u64) -> Result<File> {
        match self {
            Pool::Btrfs { .. } => btrfs::create_subvolume(&target.bytes())?,
            Pool::Xfs | Pool::Dir => durable::make_dir(&target.bytes())?,
        }
        let path = target.data();
        let file = change::create_new(&path)?;
        change::set_len(&file, &path, length)?;
        change::sync(&file, &path)?;
        durable::sync_dir(&target.bytes())?;
        Ok(file)
    }

    /// Opens the bytes of an object.
    pub fn open(self, dir: &ObjectDir) -> Result<Bytes> {
        let path = dir.data();
        Ok(Bytes {
            file: File::open(&path).context("open", &path)?,
            path,
            subvolume: match self {
                Pool::Btrfs { .. } => Some(Subvolume::open(&dir.bytes())?),
                Pool::Xfs | Pool::Dir => None,
            },
        })
    }

    /// Makes the bytes of `target` a copy that shares or repeats those of `source`, holes kept, and of
    /// the same length. Synced.
    ///
    /// A pool that has to read every byte hands them to `sink`, rounded out to whole blocks of
    /// `size`; one that shares them never calls it. Bytes are handed out in ascending order.
    pub fn copy(
        self,
        source: &Bytes,
        target: &ObjectDir,
        size: BlockSize,
        sink: Option<Sink<'_>>,
        stop: &Stop,
    ) -> Result<File> {
        let path = target.data();
        if let Some(subvolume) = &source.subvolume {
            subvolume.snapshot(&target.bytes())?;
            let file = File::options().read(true).write(true).open(&path).context("open", &path)?;
            // A source that is copied under write has this attribute (`live.rs`), its copy is to be a plain file.
            Flag::Synchronous.set(&file, &path, false)?;
            return Ok(file);
        }
        durable::make_dir(&target.bytes())?;
        let file = self.copy_file(&source.file, &path, size, sink, stop)?;
        durable::sync_dir(&target.bytes())?;
        Ok(file)
    }

    /// The same for a single file: it shares its blocks where the pool can. Its directory entry is the
    /// caller's to sync.
    pub fn copy_file(
        self,
        source: &File,
        target: &Path,
        size: BlockSize,
        sink: Option<Sink<'_>>,
        stop: &Stop,
    ) -> Result<File> {
        let file = change::create_new(target)?;
        match self {
            Pool::Btrfs { .. } | Pool::Xfs => clone::reflink(source, &file, target)?,
            Pool::Dir => copy::sparse(source, &file, target, size, sink, stop)?,
        }
        change::sync(&file, target)?;
        Ok(file)
    }

    /// Removes a copy that is not wanted.
    pub fn discard(self, target: &ObjectDir) -> Result<()> {
        tree::remove(&target.bytes())?;
        // As in [`tree::remove`]: the object's directory may be the next to go.
        if let Pool::Btrfs { .. } = self {
            durable::sync_dir(target.path())?;
        }
        Ok(())
    }

    /// What marks the moment at which these bytes were copied, for [`Pool::changes`]; `None` where the
    /// bytes themselves are needed for that.
    pub fn birth(self, dir: &ObjectDir) -> Result<Option<u64>> {
        match self {
            Pool::Btrfs { holes: true, .. } => Ok(Some(Subvolume::open(&dir.bytes())?.birth()?)),
            Pool::Btrfs { holes: false, .. } | Pool::Xfs | Pool::Dir => Ok(None),
        }
    }

    /// What may differ between a copy and a later one. `since` is the [`Pool::birth`] of the earlier
    /// one, `before` its bytes; which of both is needed is the pool's matter.
    pub fn changes<'f>(
        self,
        since: Option<u64>,
        before: Option<&'f Bytes>,
        after: &'f File,
        after_path: &'f Path,
    ) -> Result<Changes<'f>> {
        Ok(match (self, since, before) {
            (Pool::Btrfs { holes: true, .. }, Some(since), _) => {
                Changes::Written(WrittenSince::of(after, after_path, since)?)
            }
            (Pool::Btrfs { .. } | Pool::Xfs, _, Some(before)) => {
                Changes::Extents(Extents::of(&before.file, &before.path)?, Extents::of(after, after_path)?)
            }
            _ => Changes::Unknown,
        })
    }

    /// Whether the changes of the next copy can only be listed while the bytes of the last one are there.
    pub fn compares_bytes(self) -> bool {
        matches!(self, Pool::Btrfs { holes: false, .. } | Pool::Xfs)
    }

    /// Whether a copy is one step that writers cannot tear, and shares all blocks.
    pub fn copies_atomically(self) -> bool {
        !matches!(self, Pool::Dir)
    }

    /// What `--pool`, the manifest and metrics call it.
    pub fn kind(self) -> PoolKind {
        match self {
            Pool::Btrfs { .. } => PoolKind::Btrfs,
            Pool::Xfs => PoolKind::Xfs,
            Pool::Dir => PoolKind::Dir,
        }
    }
}
