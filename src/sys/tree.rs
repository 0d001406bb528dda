//! Removing trees of files.

use std::fs;
use std::path::Path;

use super::{Context, Result, btrfs, step};

/// Removes a directory and all that is in it. A btrfs subvolume in it goes as a whole, in constant time,
/// whatever the number of extents of its files. A symbolic link is removed, never followed.
pub fn remove(path: &Path) -> Result<()> {
    if btrfs::destroy_subvolume(path)? {
        return Ok(());
    }
    for entry in fs::read_dir(path).context("list", path)? {
        let entry = entry.context("list", path)?;
        let inner = entry.path();
        match entry.file_type().context("stat", &inner)?.is_dir() {
            true => remove(&inner)?,
            false => step("remove", &inner, || fs::remove_file(&inner))?,
        }
    }
    step("remove", path, || fs::remove_dir(path))
}
