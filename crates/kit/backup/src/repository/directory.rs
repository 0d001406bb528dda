//! What lies in the directory of a repository, read without following a link below its top.

use std::fs::{File, Metadata};
use std::io::ErrorKind;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use files::Context;
use object_store::ObjectMeta;

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
        let is_shelf = shelves && file_name.to_str().is_some_and(|name| super::are_digits(name, 2));
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
