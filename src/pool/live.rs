//! Copying a file while its loop device is written.
//!
//! A clone is one step towards writers: the filesystem holds them off meanwhile. A btrfs subvolume snapshot is not, for
//! btrfs acknowledges a direct write before the block is in its tree, and overwrites in place what no snapshot shares
//! yet. So a block that was rewritten in place could be in the snapshot, and one that was acknowledged before it not.
//! For the length of such a snapshot each write of the file is therefore synchronous: acknowledged when it is on disk,
//! by which it is in the transaction that the snapshot shows, or in a later one. Then so is all that is sent after it.

use std::fs::File;
use std::path::Path;

use super::{Bytes, Pool, Result, Sink};
use crate::sys::attributes::Flag;
use crate::sys::extents::wait_for_writes;
use crate::sys::loopdev::LoopDevice;
use base::{BlockSize, ObjectDir, Stop};

impl Pool {
    /// Copies the bytes of one volume as [`Pool::copy`] does, while they may be written: what the copy holds of a write
    /// it holds of all that was acknowledged before that write was sent. Only where [`Pool::copies_atomically`].
    pub fn copy_live(
        self,
        source: &Bytes,
        target: &ObjectDir,
        size: BlockSize,
        sink: Option<Sink<'_>>,
        stop: &Stop,
    ) -> Result<File> {
        let Pool::Btrfs { flushes, .. } = self else {
            return self.copy(source, target, size, sink, stop);
        };
        let synchronous = SynchronousWrites::begin(source, flushes)?;
        let copied = self.copy(source, target, size, sink, stop);
        synchronous.end()?;
        let copied = copied?;
        // A write may have looked whether it shares its block before the copy was made, and be sent to it after. The
        // end above waited until such a write is under way; it lands before anybody reads the copy.
        wait_for_writes(&source.file, &source.path)?;
        Ok(copied)
    }

    /// Undoes what a driver that was killed during a copy left set on a volume's bytes. `direct` is what its device is
    /// to be.
    pub fn restore_after_copy(self, dir: &ObjectDir, direct: bool) -> Result<()> {
        if !matches!(self, Pool::Btrfs { .. }) {
            return Ok(());
        }
        let bytes = self.open(dir)?;
        if Flag::Synchronous.is_set(&bytes.file, &bytes.path)? {
            tracing::warn!(path = %bytes.path.display(), "a copy of this volume was cut short, its writes are no longer synchronous");
            let device = LoopDevice::find(&bytes.path)?.filter(|_| direct);
            SynchronousWrites { source: &bytes, device, held: true }.end()?;
        }
        Ok(())
    }
}

/// Every write of a file is synchronous while this lives.
struct SynchronousWrites<'b> {
    source: &'b Bytes,
    /// The loop device that is to pass the page cache by again.
    device: Option<LoopDevice>,
    held: bool,
}

impl<'b> SynchronousWrites<'b> {
    /// 1. Make the file synchronous.
    /// 2. Where the filesystem may take a synchronous direct write without a flush, its device having no cache or
    ///    writing through it, have the loop device write through the page cache, where a flush follows each write. Its
    ///    requests under way end before that.
    ///
    /// In this order, and undone in the other: a device that writes through the page cache loses acknowledged
    /// writes on a full filesystem, unless the file is synchronous. So what a driver that is killed leaves is slow
    /// and safe; [`Pool::restore_after_copy`] ends it.
    fn begin(source: &'b Bytes, flushes: bool) -> Result<Self> {
        Flag::Synchronous.set(&source.file, &source.path, true)?;
        let mut begun = SynchronousWrites { source, device: None, held: true };
        if !flushes
            && let Some(device) = LoopDevice::find(&source.path)?
            && device.is_direct_io()?
        {
            begun.device = Some(device.clone());
            device.set_direct_io(false, &source.file)?;
        }
        Ok(begun)
    }

    fn end(mut self) -> Result<()> {
        self.undo()
    }

    fn undo(&mut self) -> Result<()> {
        if std::mem::take(&mut self.held) {
            if let Some(device) = &self.device {
                device.set_direct_io(true, &self.source.file)?;
            }
            Flag::Synchronous.set(&self.source.file, &self.source.path, false)?;
        }
        Ok(())
    }
}

impl Drop for SynchronousWrites<'_> {
    fn drop(&mut self) {
        if let Err(error) = self.undo() {
            let path: &Path = &self.source.path;
            tracing::error!(path = %path.display(), %error, "writes of this volume stay synchronous until the next start");
        }
    }
}
