//! Copying the bytes of a volume that may be in use, so that the copy is one that the volume held
//! at one moment.

use std::fs::{self, File};
use std::path::Path;
use std::time::Duration;

use super::{Driver, Error, Result};
use crate::base::{BlockSize, VolumeId};
use crate::pool::Sink;
use crate::store::Frozen;
use crate::sys::blockdev::{self, WriteCounters};
use crate::sys::loopdev::LoopDevice;
use crate::sys::{self, Context, freeze, mount};

/// The longest that a mounted filesystem is held frozen.
const FREEZE_BOUND: Duration = Duration::from_secs(30);
/// Tries to copy a raw device between two of its writes before giving up.
const QUIET_TRIES: usize = 3;

/// A copy in the making: what each try starts from.
struct Copy<'c> {
    source: &'c File,
    target: &'c Path,
    block_size: BlockSize,
}

impl Driver {
    /// Copies a volume's bytes into the new file `target`, whatever is done to the volume meanwhile.
    /// The caller holds the volume's lock. `sink` sees the bytes where the pool reads them; it sees
    /// them again from the start when a try is repeated.
    pub(super) fn copy_live(
        &self,
        id: &VolumeId,
        source: &File,
        target: &Path,
        block_size: BlockSize,
        sink: Option<Sink<'_>>,
    ) -> Result<File> {
        let copy = Copy { source, target, block_size };
        let Some(device) = LoopDevice::find(&self.volume_data(id))? else {
            return self.copy_once(&copy, sink);
        };
        let dev = device.dev()?;
        let mounted = mount::mounts()?.into_iter().find(|mount| mount.dev == dev && !mount.read_only);
        match mounted {
            Some(mounted) => self.copy_frozen(id, &mounted.mount_point, &copy, sink),
            None if self.pool().copies_atomically() => {
                blockdev::flush(&device.path())?;
                self.copy_once(&copy, sink)
            }
            None => self.copy_unwritten(&device, &copy, sink),
        }
    }

    fn copy_once(&self, copy: &Copy<'_>, sink: Option<Sink<'_>>) -> Result<File> {
        Ok(self.pool().copy(copy.source, copy.target, copy.block_size, sink)?)
    }

    /// Freezes the filesystem for the length of the copy. One that somebody else has frozen is
    /// consistent as it is, and theirs to thaw.
    fn copy_frozen(
        &self,
        id: &VolumeId,
        mount_point: &Path,
        copy: &Copy<'_>,
        sink: Option<Sink<'_>>,
    ) -> Result<File> {
        let intent = Frozen {
            version: Frozen::VERSION,
            mount_point: mount_point.to_owned(),
            boot_id: sys::boot_id()?,
        };
        self.store.set_frozen(id, Some(&intent))?;
        let frozen = freeze::Frozen::freeze(mount_point, FREEZE_BOUND);
        let copied = match &frozen {
            Ok(_) => self.copy_once(copy, sink),
            Err(_) => Err(Error::Precondition(format!(
                "the filesystem at {} could not be frozen",
                mount_point.display()
            ))),
        };
        // Thawed before the record goes: a crash in between thaws once more, which harms nobody.
        let thawed = frozen.and_then(|frozen| frozen.map_or(Ok(()), freeze::Frozen::thaw));
        self.store.set_frozen(id, None)?;
        thawed?;
        copied
    }

    /// Copies a raw device on a pool whose copies take time: the counters prove that nothing was
    /// written meanwhile, or the copy is thrown away.
    fn copy_unwritten(
        &self,
        device: &LoopDevice,
        copy: &Copy<'_>,
        mut sink: Option<Sink<'_>>,
    ) -> Result<File> {
        for _ in 0..QUIET_TRIES {
            blockdev::flush(&device.path())?;
            let before = WriteCounters::sample(&device.sysfs())?;
            // Reborrowed by hand: the sink must live on for the next try.
            let sink: Option<Sink<'_>> = match &mut sink {
                Some(sink) => Some(&mut **sink),
                None => None,
            };
            let file = self.copy_once(copy, sink)?;
            let after = WriteCounters::sample(&device.sysfs())?;
            if before == after && before.in_flight == 0 {
                return Ok(file);
            }
            fs::remove_file(copy.target).context("remove the torn copy", copy.target)?;
        }
        Err(Error::Precondition(format!(
            "the device was written during each of {QUIET_TRIES} copies, so none is consistent: pause the \
             writer, use Filesystem mode, or a pool that clones (--pool xfs)"
        )))
    }

    /// Thaws what a dead driver left frozen in this boot, and only that.
    pub(super) fn thaw_leftovers(&self) {
        let ids: Vec<VolumeId> =
            self.store.read(|index| index.volumes_after(None).map(|record| record.id.clone()).collect());
        for id in ids {
            if let Err(error) = self.thaw_leftover(&id) {
                tracing::error!(volume_id = %id, error = super::report(&error), "a volume may be frozen");
            }
        }
    }

    /// Undoes a freeze that was intended and never undone.
    pub(super) fn thaw_leftover(&self, id: &VolumeId) -> Result<()> {
        let Some(frozen) = self.store.frozen(id)? else { return Ok(()) };
        if frozen.boot_id == sys::boot_id()?
            && let Some(device) = LoopDevice::find(&self.volume_data(id))?
        {
            let dev = device.dev()?;
            let ours = mount::mounted_at(&frozen.mount_point)?.is_some_and(|mount| mount.dev == dev);
            if ours {
                freeze::thaw(&frozen.mount_point)?;
                tracing::warn!(volume_id = %id, "thawed what the last driver left frozen");
            }
        }
        Ok(self.store.set_frozen(id, None)?)
    }
}
