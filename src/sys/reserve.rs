//! Room that is kept on a filesystem for calls that give room back. A full one may refuse the rename that a deletion begins
//! with, or a small overwrite.
//!
//! btrfs renames only while it can set aside some 8 MiB of metadata (`btrfs_rename` reserves for ten items, each of them 48
//! nodes), which it lacks where data took all space before metadata got a second chunk. It always removes a file: for that
//! it has a reserve of its own. So this one is a file whose extended attributes fill metadata. Making it while there is space also gives
//! metadata its second chunk. Elsewhere a directory may need a block for one more name: there the file holds data.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};

use super::{attributes, btrfs};
use base::DraftFile;
use files::{Context, Result, change, durable, step};

/// What the file takes of the metadata of a btrfs: more than one rename needs.
const METADATA: u64 = 12 << 20;
/// It is only made where this stays for others. btrfs may fail to commit, and turn read-only, where metadata is filled to
/// the end at once (seen on Linux 6.18).
const LEAVES: u64 = 8 << 20;
/// Metadata that does not even have so much holds only what mkfs gave it.
const LEAST_METADATA: u64 = 32 << 20;
/// A value that fits into a node of any size.
const VALUE: usize = 3800;
/// Values between two commits.
const BATCH: u64 = 256;
/// What the file takes on any other filesystem.
const DATA: usize = 1 << 20;

/// The reserve of a filesystem.
#[derive(Debug)]
pub struct Reserve {
    path: PathBuf,
    is_held: AtomicBool,
    /// Held while it is taken or given back, and while what it gave is used: by one call at a time, or there is too little.
    changing: Mutex<()>,
}

impl Reserve {
    /// The reserve at `path`, not taken yet.
    pub fn at(path: PathBuf) -> Self {
        Reserve { path, is_held: AtomicBool::new(false), changing: Mutex::default() }
    }

    /// Takes the reserve, unless it is held. Without room for it nothing is changed.
    ///
    /// 1. Make the file beside its place and sync it: a crash leaves a draft, which the next try removes.
    /// 2. Rename it into place.
    pub fn take(&self) -> Result<()> {
        if self.is_held.load(Ordering::Acquire) {
            return Ok(());
        }
        let _changing = self.changing.lock().unwrap_or_else(PoisonError::into_inner);
        if !self.is_held.load(Ordering::Acquire) {
            if !self.path.try_exists().context("stat", &self.path)? {
                self.make()?;
            }
            self.is_held.store(true, Ordering::Release);
        }
        Ok(())
    }

    /// Makes a change that gives room back, or is needed before one. If there is no room for it, gives the reserve back and
    /// tries again.
    pub fn spend<T>(&self, change: impl Fn() -> Result<T>) -> Result<T> {
        let was_held = self.is_held.load(Ordering::Acquire);
        let error = match change() {
            Err(error) if error.is_no_space() => error,
            outcome => return outcome,
        };
        let _changing = self.changing.lock().unwrap_or_else(PoisonError::into_inner);
        if self.is_held.swap(false, Ordering::AcqRel) {
            let path = self.path.display();
            tracing::warn!(%path, %error, "the pool is full: its reserve is given back for this call, and nothing new is made without it");
            change::remove_file(&self.path)?;
            // What was removed is free after a commit.
            durable::sync_filesystem(self.dir())?;
        } else if !was_held {
            return Err(error);
        }
        change()
    }

    fn dir(&self) -> &Path {
        self.path.parent().unwrap_or(Path::new("/"))
    }

    fn make(&self) -> Result<()> {
        let fresh = DraftFile::New.of(&self.path);
        let on_btrfs = btrfs::is_btrfs(self.dir())?;
        if on_btrfs {
            durable::remove(&fresh)?;
            if btrfs::metadata(self.dir())?.room < METADATA + LEAVES {
                return Err(io::Error::from_raw_os_error(libc::ENOSPC))
                    .context("take the reserve of", self.dir());
            }
        }
        durable::create_with(&self.path, |fresh| match on_btrfs {
            true => fill_metadata(fresh),
            false => durable::write_new(fresh, &noise()),
        })
    }
}

/// Whether the metadata of the btrfs at `dir` is too small to ever hold a reserve, and can get no more.
pub fn is_metadata_too_small(dir: &Path) -> Result<bool> {
    let metadata = btrfs::metadata(dir)?;
    Ok(metadata.total < LEAST_METADATA && metadata.room < METADATA + LEAVES)
}

fn fill_metadata(path: &Path) -> Result<()> {
    let file = change::create_new(path)?;
    step("fill", path, || {
        for number in 0..METADATA / 4096 {
            // In small transactions, each with as much room as there is.
            if number % BATCH == 0 {
                nix::unistd::syncfs(&file)?;
            }
            attributes::set_extended(&file, &format!("user.{number}"), &[0; VALUE])?;
        }
        nix::unistd::syncfs(&file).map_err(io::Error::from)
    })
}

/// Bytes that no filesystem compresses.
fn noise() -> Vec<u8> {
    let mut bytes = vec![0; DATA];
    blake3::Hasher::new().finalize_xof().fill(&mut bytes);
    bytes
}
