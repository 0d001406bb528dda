//! Files that are there after a power cut: synced, renamed into place, their directory synced.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use nix::fcntl::{Flock, FlockArg};

use super::{Context, Error, Result};

/// Creates `path`, which must not exist, with `bytes`, and syncs it. The directory entry is
/// durable only after [`sync_dir`].
pub fn write_new(path: &Path, bytes: &[u8]) -> Result<()> {
    let mut file = create_new(path)?;
    file.write_all(bytes).context("write", path)?;
    file.sync_all().context("sync", path)
}

/// Creates an empty file for reading and writing; fails where `path` exists.
pub fn create_new(path: &Path) -> Result<File> {
    OpenOptions::new().read(true).write(true).create_new(true).mode(0o600).open(path).context("create", path)
}

/// Replaces `path` by `bytes` as one step: after a crash it holds the old bytes or the new ones.
///
/// 1. Write and sync a new file beside it: a crash leaves the old file and a stray `.new`, which
///    the next replacement overwrites.
/// 2. Rename it over `path`: the file is the old one or the new one, both whole.
/// 3. Sync the directory: from here on the new one survives a power cut.
pub fn replace(path: &Path, bytes: &[u8]) -> Result<()> {
    let fresh = suffixed(path);
    match fs::remove_file(&fresh) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => {
            return Err(error).context("remove", &fresh);
        }
        _ => {}
    }
    let replaced = write_new(&fresh, bytes).and_then(|()| fs::rename(&fresh, path).context("replace", path));
    if replaced.is_err() {
        // Nobody asks for it, and on a full disk it is in the way.
        let _ = fs::remove_file(&fresh);
    }
    replaced?;
    sync_dir(parent(path))
}

fn suffixed(path: &Path) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(".new");
    name.into()
}

/// Renames `from` to `to` and syncs both directories: the commit of an object or of its removal. Where a
/// sync fails the rename is undone, so that an error means that nothing happened.
pub fn rename(from: &Path, to: &Path) -> Result<()> {
    fs::rename(from, to).context("rename", from)?;
    let synced = sync_dir(parent(to)).and_then(|()| match parent(from) == parent(to) {
        true => Ok(()),
        false => sync_dir(parent(from)),
    });
    if synced.is_err() {
        fs::rename(to, from).context("undo the rename of", from)?;
    }
    synced
}

/// Removes a file, if it is there, durably.
pub fn remove(path: &Path) -> Result<()> {
    match fs::remove_file(path) {
        Ok(()) => sync_dir(parent(path)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        Err(error) => Err(error).context("remove", path),
    }
}

/// Makes the entries of a directory durable.
pub fn sync_dir(path: &Path) -> Result<()> {
    File::open(path).and_then(|dir| dir.sync_all()).context("sync", path)
}

/// Makes a directory that must not exist, open to root alone.
pub fn make_dir(path: &Path) -> Result<()> {
    use std::os::unix::fs::DirBuilderExt;
    fs::DirBuilder::new().mode(0o700).create(path).context("make the directory", path)
}

fn parent(path: &Path) -> &Path {
    path.parent().unwrap_or(Path::new("/"))
}

/// An exclusive lock on a file, freed when the value or the process goes (flock(2)).
#[derive(Debug)]
pub struct FileLock {
    _lock: Flock<File>,
}

impl FileLock {
    /// Takes the lock; `Ok(None)` when somebody else holds it. The file is made where missing.
    pub fn try_lock(path: &Path) -> Result<Option<Self>> {
        let file = OpenOptions::new()
            .read(true)
            .write(true)
            .create(true)
            .truncate(false)
            .mode(0o600)
            .open(path)
            .context("open", path)?;
        match Flock::lock(file, FlockArg::LockExclusiveNonblock) {
            Ok(lock) => Ok(Some(FileLock { _lock: lock })),
            Err((_, nix::errno::Errno::EWOULDBLOCK)) => Ok(None),
            Err((_, errno)) => Err(Error { operation: "lock", path: path.to_owned(), source: errno.into() }),
        }
    }
}
