//! Every way in which a file or a directory is changed, each a [`step`]. The standard library's own are disallowed
//! (`clippy.toml`), so that none bypasses the fail points.
#![allow(clippy::disallowed_methods)]

use std::fs::{self, DirBuilder, File, OpenOptions, Permissions};
use std::io::Write;
use std::os::unix::fs::{DirBuilderExt, FileExt, OpenOptionsExt, PermissionsExt};
use std::path::Path;

use super::{Result, step};

/// Creates an empty file for reading and writing, open to root alone; fails where `path` exists.
pub fn create_new(path: &Path) -> Result<File> {
    let mut options = OpenOptions::new();
    step("create", path, || options.read(true).write(true).create_new(true).mode(0o600).open(path))
}

/// Opens a file for reading and writing, and makes it where it is missing.
pub fn open_or_create(path: &Path) -> Result<File> {
    let mut options = OpenOptions::new();
    options.read(true).write(true).create(true).truncate(false).mode(0o600);
    step("open", path, || options.open(path))
}

/// Appends bytes to what was written last.
pub fn write(mut file: &File, path: &Path, bytes: &[u8]) -> Result<()> {
    step("write", path, || file.write_all(bytes))
}

/// Writes bytes at an offset.
pub fn write_at(file: &File, path: &Path, bytes: &[u8], offset: u64) -> Result<()> {
    step("write", path, || file.write_all_at(bytes, offset))
}

/// Writes all of a file that is there or not: an attribute in sysfs.
pub fn write_whole(path: &Path, bytes: &[u8]) -> Result<()> {
    step("write", path, || fs::write(path, bytes))
}

/// Cuts a file to a length in bytes, or extends it by a hole.
pub fn set_len(file: &File, path: &Path, length: u64) -> Result<()> {
    step("set the length of", path, || file.set_len(length))
}

/// Gives the blocks of a byte range back to the filesystem; they read as zeros.
pub fn punch_hole(file: &File, path: &Path, offset: u64, length: u64) -> Result<()> {
    step("clear", path, || super::punch_hole(file, offset, length))
}

/// Makes the content and the length of a file durable (fsync(2)).
pub fn sync(file: &File, path: &Path) -> Result<()> {
    step("sync", path, || file.sync_all())
}

/// The same without what is not needed to read it (fdatasync(2)).
pub fn sync_data(file: &File, path: &Path) -> Result<()> {
    step("sync", path, || file.sync_data())
}

/// Renames a file or directory, over what is at `to`. The name of the step is the caller's: what it is for.
pub fn rename(operation: &'static str, shown: &Path, from: &Path, to: &Path) -> Result<()> {
    step(operation, shown, || fs::rename(from, to))
}

/// Gives a file a second name, at `to`, which must not exist.
pub fn hard_link(from: &Path, to: &Path) -> Result<()> {
    step("create", to, || fs::hard_link(from, to))
}

/// Removes a file; an error if it is not there (unlink(2)).
pub fn remove_file(path: &Path) -> Result<()> {
    step("remove", path, || fs::remove_file(path))
}

/// Removes an empty directory.
pub fn remove_dir(path: &Path) -> Result<()> {
    step("remove", path, || fs::remove_dir(path))
}

/// Makes a directory, which must not exist, with a mode.
pub fn create_dir(path: &Path, mode: u32) -> Result<()> {
    step("make the directory", path, || DirBuilder::new().mode(mode).create(path))
}

/// Makes a directory and those above it, where they are missing.
pub fn create_dir_all(path: &Path) -> Result<()> {
    step("make the directory", path, || fs::create_dir_all(path))
}

/// Sets the mode of a file or directory.
pub fn set_mode(path: &Path, mode: u32) -> Result<()> {
    step("set the mode of", path, || fs::set_permissions(path, Permissions::from_mode(mode)))
}
