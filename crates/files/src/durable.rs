//! Files that are there after a power cut: synced, renamed into place, their directory synced.

use std::fs::{File, TryLockError};
use std::path::Path;
use std::time::{Duration, Instant};

use super::{Context, Error, Result, change, step};
use base::DraftFile;

/// Creates `path`, which must not exist, with `bytes`, and syncs it. The directory entry is
/// durable only after [`sync_dir`].
pub fn write_new(path: &Path, bytes: &[u8]) -> Result<()> {
    let file = change::create_new(path)?;
    change::write(&file, path, bytes)?;
    change::sync(&file, path)
}

/// Replaces `path` by `bytes` as one step: after a crash it holds the old bytes or the new ones.
///
/// 1. Write and sync a new file beside it: a crash leaves the old file and a stray `.new`, which
///    the next replacement overwrites.
/// 2. Rename it over `path`: the file is the old one or the new one, both whole.
/// 3. Sync the directory: from here on the new one survives a power cut.
pub fn replace(path: &Path, bytes: &[u8]) -> Result<()> {
    replace_with(path, &DraftFile::New.of(path), |fresh| write_new(fresh, bytes))
}

/// The same by a file that `write` makes and syncs at `fresh`, in the same directory. If it fails, nothing is left at
/// `fresh`.
pub fn replace_with<E: From<Error>>(
    path: &Path,
    fresh: &Path,
    write: impl FnOnce(&Path) -> Result<(), E>,
) -> Result<(), E> {
    prepare(fresh, write)?;
    Ok(replace_by(fresh, path)?)
}

/// Makes `path`, which must not exist, with `bytes`, as one step: the commit of what the file says.
///
/// 1. Write and sync a new file beside it: a crash leaves a stray `.new`, which the next try overwrites.
/// 2. Rename it to `path` and sync the directory. Where that sync fails the rename is undone, so that an error means
///    that nothing happened.
pub fn create(path: &Path, bytes: &[u8]) -> Result<()> {
    create_with(path, |fresh| write_new(fresh, bytes))
}

/// The same with what `write` makes and syncs.
pub fn create_with(path: &Path, write: impl FnOnce(&Path) -> Result<()>) -> Result<()> {
    let fresh = DraftFile::New.of(path);
    prepare(&fresh, write)?;
    let renamed = rename(&fresh, path);
    if renamed.is_err() {
        let _ = change::remove_file(&fresh);
    }
    renamed
}

/// Has a file written and synced that a rename is to commit. Where that fails nothing is left of it.
pub fn prepare<E: From<Error>>(fresh: &Path, write: impl FnOnce(&Path) -> Result<(), E>) -> Result<(), E> {
    match change::remove_file(fresh) {
        Err(error) if !error.is_not_found() => return Err(error.into()),
        _ => {}
    }
    let written = write(fresh);
    if written.is_err() {
        // Of no use to anybody, and on a full disk it takes the room that others need.
        let _ = change::remove_file(fresh);
    }
    written
}

/// Renames the synced file `fresh` over `path` and syncs their directory. Where that sync fails `path` is the new
/// file, and after a power cut perhaps the old one; unlike [`rename`] this cannot be undone, since the old one
/// has no name any more.
pub fn replace_by(fresh: &Path, path: &Path) -> Result<()> {
    replace_soon_by(fresh, path)?;
    sync_dir(parent(path))
}

/// The same without the sync: for some seconds a power cut may bring the old file back, so it must be as good as the new
/// one. On btrfs the sync of a directory in which a file was renamed commits the whole filesystem, and all who
/// write to it wait meanwhile.
pub fn replace_soon_by(fresh: &Path, path: &Path) -> Result<()> {
    let renamed = change::rename("replace", path, fresh, path);
    if renamed.is_err() {
        let _ = change::remove_file(fresh);
    }
    renamed
}

/// Renames `from` to `to`, which must not exist, and syncs both directories: the commit of an object or of its
/// removal. Where a sync fails the rename is undone, so that an error means that nothing happened.
pub fn rename(from: &Path, to: &Path) -> Result<()> {
    change::rename("rename", from, from, to)?;
    let synced = sync_dir(parent(to)).and_then(|()| match parent(from) == parent(to) {
        true => Ok(()),
        false => sync_dir(parent(from)),
    });
    if synced.is_err() {
        change::rename("undo the rename of", from, to, from)?;
    }
    synced
}

/// Removes a file, if it is there, durably.
pub fn remove(path: &Path) -> Result<()> {
    match change::remove_file(path) {
        Ok(()) => sync_dir(parent(path)),
        Err(error) if error.is_not_found() => Ok(()),
        Err(error) => Err(error),
    }
}

/// Makes the entries of a directory durable.
pub fn sync_dir(path: &Path) -> Result<()> {
    change::sync(&File::open(path).context("open", path)?, path)
}

/// Syncs the filesystem that contains `path` (syncfs(2)).
pub fn sync_filesystem(path: &Path) -> Result<()> {
    step("sync the filesystem of", path, || {
        let file = File::open(path)?;
        nix::unistd::syncfs(&file).map_err(std::io::Error::from)
    })
}

/// Makes a directory that must not exist, open to root alone.
pub fn make_dir(path: &Path) -> Result<()> {
    change::create_dir(path, 0o700)
}

fn parent(path: &Path) -> &Path {
    path.parent().unwrap_or(Path::new("/"))
}

/// How long a start waits for a lock: longer than it takes to start a program.
pub const LOCK_PATIENCE: Duration = Duration::from_secs(1);

/// An exclusive lock on a file, released when the value is dropped or the process ends (flock(2)).
#[derive(Debug)]
pub struct FileLock {
    _file: File,
}

impl FileLock {
    /// Takes the lock; `Ok(None)` when another process holds it for so long. The file is made if missing.
    ///
    /// A process that has ended may seem to hold it for a moment: a program that it was starting has copies of its
    /// descriptors until exec closes them.
    pub fn try_lock(path: &Path, patience: Duration) -> Result<Option<Self>> {
        let file = change::open_or_create(path)?;
        let deadline = Instant::now() + patience;
        loop {
            match file.try_lock() {
                Ok(()) => return Ok(Some(FileLock { _file: file })),
                Err(TryLockError::WouldBlock) if Instant::now() >= deadline => return Ok(None),
                Err(TryLockError::WouldBlock) => {}
                Err(TryLockError::Error(source)) => {
                    return Err(Error { operation: "lock", path: path.to_owned(), at: None, source });
                }
            }
            std::thread::sleep(Duration::from_millis(10));
        }
    }
}
