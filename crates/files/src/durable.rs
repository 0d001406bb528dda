//! Files that are there after a power cut: synced, renamed into place, their directory synced.

use std::fs::{File, Metadata, TryLockError};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
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
/// 1. Write and sync a new file next to it: a crash leaves the old file and a stray `.new`, which
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
/// 1. Write and sync a new file next to it: a crash leaves a stray `.new`, which the next try overwrites.
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

/// Writes and syncs the draft that a later rename commits. On failure the draft is removed.
///
/// Whatever is at `fresh` before is removed, so the caller must have the directory to itself: the driver holds the lock of its
/// data directory. Next to a user's file the draft is a [`Draft`].
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

/// Gives a synced file the name `path`, in the same directory: an error with EEXIST where that exists. The old name may stay.
pub fn name(file: &Path, path: &Path) -> Result<()> {
    match change::hard_link(file, path) {
        // The filesystem has no links (FAT): two that come at once may replace each other, whole.
        Err(error) if matches!(error.errno(), Some(libc::EPERM | libc::EOPNOTSUPP | libc::ENOSYS)) => {
            match path.symlink_metadata() {
                Ok(_) => return Err(std::io::Error::from_raw_os_error(libc::EEXIST)).context("create", path),
                Err(_) => change::rename("create", path, file, path)?,
            }
        }
        linked => linked?,
    }
    sync_dir(parent(path))
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
    match path.parent() {
        Some(parent) if parent.as_os_str().is_empty() => Path::new("."),
        parent => parent.unwrap_or(Path::new("/")),
    }
}

/// A file that is written as `.NAME.RANDOM.KIND` next to another, where others may be at work, and that replaces it as a whole.
///
/// No other process takes it for its own: its name is random, and it is locked (flock(2)) as long as this value lives. A draft
/// without a lock is of a process that was killed, and the next one for the same file removes it.
#[derive(Debug)]
pub struct Draft {
    file: File,
    path: PathBuf,
}

/// Characters of a name that its draft's name has too: with the rest that is at most 255 bytes.
const DRAFT_NAME: usize = 50;

impl Draft {
    /// An empty file, for reading and writing.
    pub fn beside(path: &Path, kind: &str) -> Result<Self> {
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        let start = format!(".{}.", name.chars().take(DRAFT_NAME).collect::<String>());
        let end = format!(".{kind}");
        clear_drafts(parent(path), &start, &end);
        loop {
            let draft = parent(path).join(format!("{start}{:016x}{end}", fastrand::u64(..)));
            let file = match change::create_new(&draft) {
                Err(error) if error.errno() == Some(libc::EEXIST) => continue,
                // The caller has not asked for a file with the draft's name.
                file => file.map_err(|error| Error { path: path.to_owned(), ..error })?,
            };
            // Where the filesystem has no locks, no process can take one and remove it.
            let is_taken = matches!(file.try_lock(), Err(TryLockError::WouldBlock));
            // One who clears up may have been quicker than the lock.
            if !is_taken && file.metadata().context("look at", &draft)?.nlink() > 0 {
                return Ok(Draft { file, path: draft });
            }
        }
    }

    /// The file.
    pub fn file(&self) -> &File {
        &self.file
    }

    /// Where it is until it is done.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Gives it the owner and the mode of a file that it replaces.
    pub fn take_after(&self, replaced: &Metadata) -> Result<()> {
        let (owner, group) = (Some(replaced.uid()), Some(replaced.gid()));
        let owned =
            step("set the owner of", &self.path, || std::os::unix::fs::fchown(&self.file, owner, group));
        change::set_mode(&self.path, replaced.mode() & 0o7777)?;
        owned
    }

    /// Syncs it and renames it over `path`, in the same directory.
    pub fn replace(self, path: &Path) -> Result<()> {
        change::sync(&self.file, &self.path)?;
        change::rename("replace", path, &self.path, path)?;
        sync_dir(parent(path))
    }

    /// Syncs it and names it `path`, in the same directory: an error with EEXIST where that exists.
    pub fn create(self, path: &Path) -> Result<()> {
        change::sync(&self.file, &self.path)?;
        name(&self.path, path)
    }
}

impl Drop for Draft {
    fn drop(&mut self) {
        // It has no name any more once it was renamed. Of no use to anybody else, and on a full disk it takes the room that
        // others need.
        let _ = change::remove_file(&self.path);
    }
}

/// Removes drafts whose processes are gone, as far as it may.
fn clear_drafts(dir: &Path, start: &str, end: &str) {
    for entry in dir.read_dir().into_iter().flatten().flatten() {
        let name = entry.file_name();
        let random = name.to_str().and_then(|name| name.strip_prefix(start)?.strip_suffix(end));
        let is_draft =
            random.is_some_and(|of| of.len() == 16 && of.bytes().all(|byte| byte.is_ascii_hexdigit()));
        // Locked until it is gone: another may be about to lock what it has just made.
        if is_draft
            && entry.file_type().is_ok_and(|of| of.is_file())
            && let Ok(file) = File::open(entry.path())
            && file.try_lock().is_ok()
        {
            let _ = change::remove_file(&entry.path());
        }
    }
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

#[cfg(test)]
mod tests {
    use super::Draft;

    /// One that cleared up gave its lock back before it removed a draft, which was another's by then.
    #[test]
    fn nobody_removes_a_draft_that_is_held() {
        let dir = tempfile::tempdir().expect("a directory");
        let path = dir.path().join("file");
        let make = || {
            for _ in 0..1000 {
                let draft = Draft::beside(&path, "draft").expect("a draft");
                std::thread::yield_now();
                assert!(draft.path().exists(), "it is gone");
            }
        };
        std::thread::scope(|scope| (0..4).for_each(|_| drop(scope.spawn(make))));
    }
}
