//! Room that is kept on a filesystem for calls that give room back. A full one may refuse the rename that a deletion begins
//! with, or a small overwrite.
//!
//! btrfs renames only while it can set aside some 8 MiB of metadata (`btrfs_rename` reserves for ten items, each of them 48
//! nodes), which it lacks where data took all space before metadata got a second chunk. It always removes a file: for that
//! it has a reserve of its own. So this one is a file whose extended attributes fill metadata. Making it while there is space
//! also gives metadata its second chunk. Elsewhere a directory may need a block for one more name: there the file holds data.
//!
//! A second one is on the disk below an image. A mount may have to write what the full disk refused before.

use std::io::{self, Read};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};

use parking_lot::Mutex;

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
const DATA: u64 = 1 << 20;
/// What it takes on the disk below an image: enough for a mount and the deletions after it.
const BELOW_IMAGE: u64 = 32 << 20;

/// The reserve of a filesystem.
#[derive(Debug)]
pub struct Reserve {
    path: PathBuf,
    /// The bytes of the file; `None` for what removals from the filesystem need, whichever it is.
    bytes: Option<u64>,
    is_held: AtomicBool,
    /// Held while it is taken or given back, and while what it gave is used: by one call at a time, or there is too little.
    changing: Mutex<()>,
}

impl Reserve {
    /// The reserve at `path` for removals from its filesystem, not taken yet.
    pub fn at(path: PathBuf) -> Self {
        Reserve { path, bytes: None, is_held: AtomicBool::new(false), changing: Mutex::default() }
    }

    /// The reserve at `path` for an image on its filesystem.
    pub fn below_image(path: PathBuf) -> Self {
        Reserve { bytes: Some(BELOW_IMAGE), ..Reserve::at(path) }
    }

    /// Gives the reserve back, if the file is there.
    pub fn give_back(&self) -> Result<()> {
        self.is_held.store(false, Ordering::Release);
        durable::remove(&self.path)
    }

    /// Whether it is taken.
    pub fn is_held(&self) -> bool {
        self.is_held.load(Ordering::Acquire)
    }

    /// Takes the reserve, unless it is held. Without room for it nothing is changed.
    ///
    /// 1. Make the file next to its place and sync it: a crash leaves a draft, which the next try removes.
    /// 2. Rename it into place.
    pub fn take(&self) -> Result<()> {
        if self.is_held() {
            return Ok(());
        }
        let _changing = self.changing.lock();
        if !self.is_held() {
            if !self.path.try_exists().context("stat", &self.path)? {
                self.make()?;
            }
            self.is_held.store(true, Ordering::Release);
        }
        Ok(())
    }

    /// Makes a change that gives room back, or is needed before one. If there is no room for it, gives the reserve back and
    /// tries again. If the reserve is not held, another call may have given it back without its room being free yet, or may
    /// have used it and freed more since.
    pub fn spend<T>(&self, change: impl Fn() -> Result<T>) -> Result<T> {
        let error = match change() {
            Err(error) if error.is_no_space() => error,
            outcome => return outcome,
        };
        let _changing = self.changing.lock();
        if self.is_held.swap(false, Ordering::AcqRel) {
            let path = self.path.display();
            tracing::warn!(%path, %error, "the pool is full: its reserve is given back for this call, and nothing new is made without it");
            match change::remove_file(&self.path) {
                Err(error) if !error.is_not_found() => return Err(error),
                _ => {}
            }
        }
        // What was removed is free after a commit.
        durable::sync_filesystem(self.dir())?;
        change()
    }

    fn dir(&self) -> &Path {
        self.path.parent().unwrap_or(Path::new("/"))
    }

    fn make(&self) -> Result<()> {
        if self.bytes.is_some() || !btrfs::is_btrfs(self.dir())? {
            let bytes = self.bytes.unwrap_or(DATA);
            return durable::create_with(&self.path, |path| fill_data(path, bytes));
        }
        durable::remove(&DraftFile::New.of(&self.path))?;
        if btrfs::metadata(self.dir())?.room < METADATA + LEAVES {
            return Err(io::Error::from_raw_os_error(libc::ENOSPC))
                .context("take the reserve of", self.dir());
        }
        durable::create_with(&self.path, fill_metadata)
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

/// Makes a file of bytes that no filesystem compresses, a piece at a time.
fn fill_data(path: &Path, bytes: u64) -> Result<()> {
    let file = change::create_new(path)?;
    let mut noise = blake3::Hasher::new().finalize_xof().take(bytes);
    step("fill", path, || io::copy(&mut noise, &mut &file))?;
    change::sync(&file, path)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::cell::Cell;

    /// Of 24 deletions at once on a full pool one failed now and then: another call was giving the reserve back at that moment.
    #[test]
    fn a_change_is_tried_again_also_where_the_reserve_is_not_held() {
        let dir = tempfile::tempdir().expect("temp dir");
        let reserve = Reserve::at(dir.path().join("reserve"));
        let tries = Cell::new(0);
        let change = || {
            tries.set(tries.get() + 1);
            match tries.get() {
                1 => Err(io::Error::from_raw_os_error(libc::ENOSPC)).context("rename", dir.path()),
                _ => Ok(()),
            }
        };
        reserve.spend(change).expect("there is room by now");
        assert_eq!(tries.get(), 2);
    }
}
