//! What is kept of a volume while its unmounted ext4 grows. resize2fs changes a filesystem in no safe order: where it is killed, or
//! the power fails, `e2fsck -p` refuses what is left. A growth is
//!
//! 1. Make `ungrown/` of the volume, as one step. Where the pool copies at once, a copy of the bytes is in it.
//! 2. Check and grow the filesystem, and flush its device. Without a copy, resize2fs keeps each block in `ungrown/blocks` before it
//!    changes it.
//! 3. Remove `ungrown/`: this is the commit.
//!
//! If a step fails, or the driver ends before the last, the volume gets its bytes back before it is used next: all of the copy, or
//! the blocks, by e2undo(8). The blocks are not synced one by one, so only a copy survives a power cut for sure.

use std::fs::File;
use std::path::Path;

use crate::driver::error::{Error, Result};
use crate::pool::{Backend, Copying};
use crate::store::Store;
use crate::sys::loopdev::LoopDevice;
use crate::sys::{blockdev, clone, program};
use base::{BlockSize, Stop, VolumeId};
use files::{Context, change};

/// In `ungrown/`, what the blocks that resize2fs changes held before.
const BLOCKS: &str = "blocks";

/// Grows the filesystem of a volume by `grow`, which gets the file for the blocks that it changes, if no copy is made. Where it
/// fails, the filesystem is as it was.
pub(super) fn guarded(
    pool: &dyn Backend,
    store: &Store,
    id: &VolumeId,
    grow: impl FnOnce(Option<&Path>) -> Result<()>,
) -> Result<()> {
    let volume = store.dir().volume(id);
    let draft = store.draft_ungrown(id)?;
    let copies = pool.copies_atomically();
    if copies {
        let how = Copying { sink: None, size: BlockSize::MIN, stop: &Stop::default() };
        pool.copy(&pool.open(&volume)?, draft.dir(), how)?;
    }
    store.keep_ungrown(draft, id)?;
    let blocks = volume.ungrown().path().join(BLOCKS);
    match grow((!copies).then_some(&blocks)) {
        Ok(()) => Ok(store.remove_ungrown(id)?),
        Err(error) => undo(store, id).and(Err(error)),
    }
}

/// Undoes a growth that was cut short. The caller holds the lock of the volume.
pub(super) fn undo(store: &Store, id: &VolumeId) -> Result<()> {
    let volume = store.dir().volume(id);
    let (ungrown, data) = (volume.ungrown(), volume.data());
    let is_there = |path: &Path| path.try_exists().context("stat", path);
    if !is_there(ungrown.path())? {
        return Ok(());
    }
    let file = File::options().write(true).open(&data).context("open", &data)?;
    let device = LoopDevice::find(&data)?.map(|device| device.path());
    if let Some(device) = &device {
        if blockdev::is_claimed(device)? {
            return Err(Error::Precondition(format!(
                "the growth of the filesystem on {} was cut short, and is not undone while something holds the device: end that first",
                device.display()
            )));
        }
        // What resize2fs wrote last may still be on its way to the file.
        blockdev::flush(device)?;
    }
    let blocks = ungrown.path().join(BLOCKS);
    if is_there(&ungrown.data())? {
        let copy = File::open(ungrown.data()).context("open", &ungrown.data())?;
        clone::reflink(&copy, &file, &data)?;
    } else if is_there(&blocks)? {
        put_back(&blocks, &data)?;
    }
    change::sync(&file, &data)?;
    if let Some(device) = &device {
        blockdev::forget(device)?;
    }
    store.remove_ungrown(id)?;
    tracing::warn!(volume_id = %id, "the growth of its filesystem was cut short, and is undone");
    Ok(())
}

/// Puts blocks back that resize2fs kept. A file of them that cannot be read was cut while it was begun, so nothing had changed yet.
fn put_back(blocks: &Path, data: &Path) -> Result<()> {
    let arguments = ["-f".as_ref(), blocks.as_os_str()];
    match program::run("e2undo", &arguments, data, |code| code == 0) {
        Err(error) if error.errno().is_none() => {
            let error = base::report(&error);
            tracing::warn!(path = %data.display(), error, "what a growth changed is not put back: e2fsck may be needed");
            Ok(())
        }
        put => Ok(put.map(drop)?),
    }
}
