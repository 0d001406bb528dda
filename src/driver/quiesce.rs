//! Copying the bytes of a volume that may be in use, so that the copy is one that the volume held
//! at one moment.

use std::fs::{self, File};
use std::path::Path;
use std::time::{Duration, Instant};

use super::{Driver, Error, Result};
use crate::base::{BlockSize, Stop, VolumeId};
use crate::pool::Sink;
use crate::store::Frozen;
use crate::sys::blockdev::{self, WriteCounters};
use crate::sys::loopdev::LoopDevice;
use crate::sys::mount::{self, Mount};
use crate::sys::{self, Context, freeze};

/// The longest that a mounted filesystem is held frozen.
const FREEZE_BOUND: Duration = Duration::from_secs(30);
/// Tries to copy a raw device between two of its writes before giving up.
const QUIET_TRIES: usize = 3;

/// A copy in the making: what each try starts from.
struct Copy<'c> {
    source: &'c File,
    target: &'c Path,
    block_size: BlockSize,
    sink: Option<Sink<'c>>,
}

impl Copy<'_> {
    /// The sink for one try: it lives on for the next.
    fn sink(&mut self) -> Option<Sink<'_>> {
        match &mut self.sink {
            Some(sink) => Some(&mut **sink),
            None => None,
        }
    }
}

impl Driver {
    /// Copies a volume's bytes into the new file `target`, whatever is done to the volume meanwhile.
    /// The caller holds the volume's lock. `sink` sees the bytes where the pool reads them; it sees
    /// them again from the start when a try is repeated.
    pub(super) fn copy_live<'c>(
        &self,
        id: &VolumeId,
        source: &'c File,
        target: &'c Path,
        block_size: BlockSize,
        sink: Option<Sink<'c>>,
    ) -> Result<File> {
        let mut copy = Copy { source, target, block_size, sink };
        let Some(device) = LoopDevice::find(&self.volume_data(id))? else {
            return self.copy_once(&mut copy, &Stop::default());
        };
        let dev = device.dev()?;
        let mounted = mount::mounts()?.into_iter().find(|mount| mount.dev == dev && !mount.read_only);
        match mounted {
            Some(mounted) => self.copy_frozen(id, &device, &mounted, &mut copy),
            None => self.copy_raw(&device, &mut copy),
        }
    }

    fn copy_once(&self, copy: &mut Copy<'_>, stop: &Stop) -> Result<File> {
        let (source, target, block_size) = (copy.source, copy.target, copy.block_size);
        Ok(self.pool().copy(source, target, block_size, copy.sink(), stop)?)
    }

    /// Freezes the filesystem for the length of the copy.
    ///
    /// 1. Record the intent: a driver that dies from here on is followed by one that thaws.
    /// 2. Freeze, copy, thaw.
    /// 3. Forget the intent, once it is thawed for sure.
    fn copy_frozen(
        &self,
        id: &VolumeId,
        device: &LoopDevice,
        mounted: &Mount,
        copy: &mut Copy<'_>,
    ) -> Result<File> {
        let intent = Frozen { version: Frozen::VERSION, boot_id: sys::boot_id()? };
        self.store.set_frozen(id, Some(&intent))?;
        let stop = Stop::at(Some(Instant::now() + FREEZE_BOUND));
        match freeze::Frozen::freeze(&mounted.mount_point, &mounted.dev, FREEZE_BOUND) {
            Ok(Some(frozen)) => {
                let copied = self.copy_once(copy, &stop);
                frozen.thaw()?;
                self.store.set_frozen(id, None)?;
                copied.map_err(|error| match error.stopped() {
                    None => error,
                    Some(_) => Error::Precondition(format!(
                        "the copy took longer than the {} s that a filesystem is held frozen: use a pool that \
                         clones (--pool xfs)",
                        FREEZE_BOUND.as_secs()
                    )),
                })
            }
            // Somebody else has frozen it, and may thaw it at any time: it is taken like a raw device.
            Ok(None) => {
                self.store.set_frozen(id, None)?;
                self.copy_raw(device, copy)
            }
            Err(error) => {
                self.store.set_frozen(id, None)?;
                Err(error.into())
            }
        }
    }

    /// Copies a device that can not be frozen.
    fn copy_raw(&self, device: &LoopDevice, copy: &mut Copy<'_>) -> Result<File> {
        match self.pool().copies_atomically() {
            true => {
                blockdev::flush(&device.path())?;
                self.copy_once(copy, &Stop::default())
            }
            false => self.copy_unwritten(device, copy),
        }
    }

    /// Copies a device on a pool whose copies take time: the counters prove that nothing was written
    /// meanwhile, or the copy is thrown away.
    fn copy_unwritten(&self, device: &LoopDevice, copy: &mut Copy<'_>) -> Result<File> {
        for _ in 0..QUIET_TRIES {
            blockdev::flush(&device.path())?;
            let before = WriteCounters::sample(&device.sysfs())?;
            let file = self.copy_once(copy, &Stop::default())?;
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

    /// Undoes a freeze that was intended and never undone, through any mount of the volume's device.
    /// The intent is forgotten once that is done, or the device is gone and nothing can be frozen.
    pub(super) fn thaw_leftover(&self, id: &VolumeId) -> Result<()> {
        let Some(frozen) = self.store.frozen(id)? else { return Ok(()) };
        if frozen.boot_id == sys::boot_id()?
            && let Some(device) = LoopDevice::find(&self.volume_data(id))?
        {
            let dev = device.dev()?;
            let Some(mounted) = mount::mounts()?.into_iter().find(|mount| mount.dev == dev) else {
                // Mounted where this process does not see it, perhaps: kept for the next look.
                return Ok(());
            };
            freeze::thaw(&mounted.mount_point, &dev)?;
            tracing::warn!(volume_id = %id, "thawed what the last driver left frozen");
        }
        Ok(self.store.set_frozen(id, None)?)
    }
}
