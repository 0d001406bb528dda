//! Removing trees of files.

use std::fs;
use std::path::Path;

use super::btrfs;
use files::{Context, Result, change, durable};

/// Removes a directory and all that is in it. A btrfs subvolume in it is removed as a whole, in constant time,
/// whatever the number of extents of its files. A symbolic link is removed, never followed.
///
/// A directory that held a subvolume is synced before it is removed, which commits the transaction. Where
/// both are removed in one transaction, and the directory was synced in it before, a power cut after any later sync leaves
/// a log that btrfs fails to replay: the whole filesystem does not mount any more (seen on Linux 6.18).
pub fn remove(path: &Path) -> Result<()> {
    if btrfs::destroy_subvolume(path)? {
        return Ok(());
    }
    let mut held_subvolume = false;
    for entry in fs::read_dir(path).context("list", path)? {
        let entry = entry.context("list", path)?;
        let inner = entry.path();
        match entry.file_type().context("stat", &inner)?.is_dir() {
            true if btrfs::destroy_subvolume(&inner)? => held_subvolume = true,
            true => remove(&inner)?,
            false => change::remove_file(&inner)?,
        }
    }
    if held_subvolume {
        durable::sync_dir(path)?;
    }
    change::remove_dir(path)
}
