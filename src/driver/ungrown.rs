//! The copy of a volume that is kept while its unmounted ext4 grows. resize2fs changes a filesystem in no safe order: where it is
//! killed, or the power fails, `e2fsck -p` refuses what is left. Where the pool copies at once, a growth is
//!
//! 1. Copy the bytes to `ungrown/` of the volume, as one step.
//! 2. Check and grow the filesystem, and flush its device.
//! 3. Remove the copy: this is the commit.
//!
//! If a step fails, or the driver ends before the last, the volume gets the bytes of the copy back before it is used next.

use std::fs::File;

use crate::driver::error::{Error, Result};
use crate::pool::{Backend, Copying};
use crate::store::Store;
use crate::sys::loopdev::LoopDevice;
use crate::sys::{blockdev, clone};
use base::{BlockSize, Stop, VolumeId};
use files::{Context, change};

/// Grows the filesystem of a volume by `grow`. Where that fails it is as it was, if the pool copies at once.
pub(super) fn guarded(
    pool: &dyn Backend,
    store: &Store,
    id: &VolumeId,
    grow: impl FnOnce() -> Result<()>,
) -> Result<()> {
    if !pool.copies_atomically() {
        return grow();
    }
    let draft = store.draft_ungrown(id)?;
    let how = Copying { sink: None, size: BlockSize::MIN, stop: &Stop::default() };
    pool.copy(&pool.open(&store.dir().volume(id))?, draft.dir(), how)?;
    store.keep_ungrown(draft, id)?;
    match grow() {
        Ok(()) => Ok(store.remove_ungrown(id)?),
        Err(error) => undo(store, id).and(Err(error)),
    }
}

/// Undoes a growth that was cut short. The caller holds the lock of the volume.
pub(super) fn undo(store: &Store, id: &VolumeId) -> Result<()> {
    let volume = store.dir().volume(id);
    let (kept, data) = (volume.ungrown().data(), volume.data());
    let copy = match File::open(&kept) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(()),
        copy => copy.context("open", &kept)?,
    };
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
    clone::reflink(&copy, &file, &data)?;
    change::sync(&file, &data)?;
    if let Some(device) = &device {
        blockdev::forget(device)?;
    }
    store.remove_ungrown(id)?;
    tracing::warn!(volume_id = %id, "the growth of its filesystem was cut short, and is undone");
    Ok(())
}
