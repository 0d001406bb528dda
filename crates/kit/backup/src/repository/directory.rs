//! What lies in the directory of a repository, read without following a link below its top; and files that are written there as one
//! step.

use std::fs::{File, Metadata};
use std::io::ErrorKind;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use bytes::Bytes;
use files::{ALIGN, Context, change, durable};
use object_store::ObjectMeta;

use crate::device::Target;
use crate::error::{Error, Result, refused};

/// Adds what is in a directory and is not a directory; with `shelves` also what is in those of its directories in which packs lie.
/// Any other directory is somebody else's, such as the `lost+found` of a disk, which only root may list.
pub fn walk(dir: &Path, name: &str, shelves: bool, found: &mut Vec<(String, Metadata)>) -> Result<()> {
    let path = dir.join(name);
    let entries = match path.read_dir() {
        // What a link at the top names is on another disk, and that it is not there does not mean that there is nothing.
        Err(error) if error.kind() == ErrorKind::NotFound && path.is_symlink() => {
            return Err(refused!(
                "{} is a symbolic link to what is not there: mount the disk that it names",
                path.display()
            ));
        }
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(()),
        entries => entries.context("list", &path)?,
    };
    for entry in entries {
        let entry = entry.context("list", &path)?;
        // Ours are letters and digits, and others may have any bytes.
        let file_name = entry.file_name();
        let Some(name) = Path::new(name).join(&file_name).to_str().map(str::to_owned) else { continue };
        let is_shelf = shelves && file_name.to_str().is_some_and(|name| super::names::are_digits(name, 2));
        match entry.metadata() {
            Ok(of) if of.is_dir() && is_shelf => walk(dir, &name, false, found)?,
            Ok(of) if of.is_dir() => {}
            Ok(of) => found.push((name, of)),
            // Removed meanwhile.
            Err(error) if error.kind() == ErrorKind::NotFound => {}
            Err(error) => return Err(error).context("look at", &entry.path()).map_err(Error::from),
        }
    }
    Ok(())
}

pub fn meta(name: &str, of: &Metadata) -> ObjectMeta {
    let last_modified = of.modified().unwrap_or(SystemTime::UNIX_EPOCH).into();
    ObjectMeta { location: name.into(), last_modified, size: of.len(), e_tag: None, version: None }
}

/// Writes a file as the store of a directory does, but for the page cache: under another name, synced, renamed, and
/// its directory synced.
pub fn write_large(dir: &Path, path: &Path, parts: &[Bytes]) -> Result<()> {
    let (draft, file) = create_draft(dir, path)?;
    let written = || {
        let target = Target::of(&file, &draft);
        let mut offset = 0;
        for part in parts {
            // What is not a whole block is written through the cache.
            let (blocks, rest) = part.split_at(part.len() / ALIGN * ALIGN);
            for bytes in [blocks, rest].into_iter().filter(|bytes| !bytes.is_empty()) {
                target.write(bytes, offset)?;
                offset += bytes.len() as u64;
            }
        }
        target.sync()
    };
    if let Err(error) = written() {
        // Of no use to anybody, and on a full disk it takes the room that others need.
        let _ = change::remove_file(&draft);
        return Err(error);
    }
    Ok(durable::replace_by(&draft, path)?)
}

/// Makes a file as one step; `false` where it is there.
pub fn create_file(dir: &Path, path: &Path, bytes: &[u8]) -> Result<bool> {
    let (draft, file) = create_draft(dir, path)?;
    let written = change::write(&file, &draft, bytes).and_then(|()| change::sync(&file, &draft));
    let made = written.and_then(|()| durable::name(&draft, path));
    // Gone where it was renamed.
    let _ = change::remove_file(&draft);
    match made {
        Err(error) if error.errno() == Some(nix::libc::EEXIST) => Ok(false),
        made => Ok(made.map(|()| true)?),
    }
}

/// A new file NAME#NUMBER: packs of the same content, which has one name, may be written at once.
fn create_draft(dir: &Path, path: &Path) -> Result<(PathBuf, File)> {
    let mut number = 0;
    loop {
        number += 1;
        let mut draft = path.as_os_str().to_owned();
        draft.push(format!("#{number}"));
        let draft = PathBuf::from(draft);
        #[expect(clippy::disallowed_methods, reason = "inside a step")]
        let created =
            files::step("create", &draft, || File::options().write(true).create_new(true).open(&draft));
        match created {
            Ok(file) => return Ok((draft, file)),
            Err(error) if error.errno() == Some(nix::libc::EEXIST) => {}
            Err(error) if error.is_not_found() => make_parent(dir, path)?,
            Err(error) => return Err(error.into()),
        }
    }
}

/// Makes the directory of an object, durably.
fn make_parent(dir: &Path, path: &Path) -> Result<()> {
    let Some(parent) = path.parent() else { return Ok(()) };
    change::create_dir_all(parent)?;
    for above in parent.ancestors().skip(1).take_while(|above| above.starts_with(dir)) {
        durable::sync_dir(above)?;
    }
    Ok(())
}

/// A file that is locked, and its path.
#[derive(Debug)]
pub struct FileLock {
    file: File,
    path: PathBuf,
}

impl FileLock {
    /// Of a file that is locked by now. It may have been removed in between.
    pub fn of(file: File, path: &Path) -> Result<Self> {
        let lock = FileLock { file, path: path.to_owned() };
        lock.check().map(|()| lock)
    }

    /// The kernel locks a file, and others lock what has its name by then: where that is another file, or none, the lock
    /// keeps no one out.
    pub fn check(&self) -> Result<()> {
        let held = self.file.metadata().context("look at", &self.path)?;
        let is_it = |there: &Metadata| (there.dev(), there.ino()) == (held.dev(), held.ino());
        match self.path.metadata() {
            Ok(there) if is_it(&there) => Ok(()),
            Err(error) if error.kind() != ErrorKind::NotFound => {
                Err(error).context("look at", &self.path).map_err(Error::from)
            }
            _ => {
                let why = format!("another command, or a person, has removed {}", self.path.display());
                Err(Error::LockLost { why })
            }
        }
    }
}
