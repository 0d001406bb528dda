//! Copies the bytes of volumes that may be in use. All copies of a call show the same moment.
//!
//! A mounted filesystem is frozen during the copy. A raw device cannot be frozen. One clone of one device is a single step
//! and needs nothing more, and so are the copies of a group where the pool makes them at once. Several steps (other groups, or a
//! copy that takes time) show one moment only if nothing was written between the first and the last. The devices' write counters
//! tell; if something was written, the copies are discarded and made again.
//!
//! A frozen filesystem and a raw device agree: writes that were acknowledged before the freeze are in both copies, and nothing
//! new gets into the frozen one.

use std::fs::File;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::driver::error::{Error, Result};
use crate::driver::health::read_errors::ReadErrors;
use crate::driver::shared::Shared;
use crate::driver::ungrown;
use crate::pool::{Bytes, Copying, GroupMember};
use crate::sys::blockdev::{self, WriteCounters};
use crate::sys::loopdev::LoopDevice;
use crate::sys::mount::{self, Mount};
use crate::sys::{self, freeze};
use base::{BlockSize, ObjectDir, Stop, Stopped, VolumeId};
use cbt::{HashFile, HashingCopy};

/// The longest time for which a mounted filesystem is frozen.
const FREEZE_BOUND: Duration = Duration::from_secs(30);
/// How often and how long it is tried, at least, to copy raw devices without a write in between.
const QUIET_TRIES: usize = 3;
const QUIET_TIME: Duration = Duration::from_secs(2);
/// If less than this is free, in bytes, a failed write is taken for a lack of space.
const FULL: u64 = 16 << 20;

/// Copies volumes that may be in use.
#[derive(Debug)]
pub(in crate::driver) struct Copier {
    pub(in crate::driver) shared: Arc<Shared>,
    pub(in crate::driver) read_errors: Arc<ReadErrors>,
}

/// A copy to be made of a locked volume.
pub(in crate::driver) struct LiveCopy {
    pub id: VolumeId,
    pub source: Bytes,
    /// The object whose bytes are made.
    pub target: ObjectDir,
    /// The block size of `sink`.
    pub block_size: BlockSize,
    /// Gets the bytes if the pool reads them; all of them again if the copy is repeated.
    pub sink: Option<HashingSink>,
    /// Whether the volume has a device that may be written during the copy.
    pub written: bool,
}

impl LiveCopy {
    fn member(&self) -> GroupMember<'_> {
        GroupMember { source: &self.source, target: &self.target, written: self.written }
    }
}

/// Hashes the bytes of a copy while they are copied.
pub(in crate::driver) struct HashingSink {
    hashing: HashingCopy,
    failed: Option<cbt::Error>,
}

impl HashingSink {
    pub(in crate::driver) fn new(hashes: HashFile, size: BlockSize) -> Self {
        HashingSink { hashing: HashingCopy::new(hashes, size), failed: None }
    }

    /// Hashes whole blocks from byte `offset` on. A failure ends the copy, and [`HashingSink::check`] reports the reason.
    pub(in crate::driver) fn take(&mut self, offset: u64, bytes: &[u8]) -> Result<(), Stopped> {
        self.hashing.take(offset, bytes).map_err(|error| {
            self.failed = Some(error);
            Stopped::Cancelled
        })
    }

    /// Discards the hashes, before the copy is made again.
    pub(in crate::driver) fn start_again(&mut self) -> Result<()> {
        Ok(self.hashing.start_again()?)
    }

    /// Makes the hashes durable.
    pub(in crate::driver) fn sync(&self) -> Result<()> {
        Ok(self.hashing.sync()?)
    }

    /// Returns the error of [`HashingSink::take`], if it failed.
    pub(in crate::driver) fn check(&mut self) -> Result<()> {
        self.failed.take().map_or(Ok(()), |error| Err(error.into()))
    }
}

/// The filesystems that are frozen for a copy. They are thawed in whatever way the copy ends.
struct FrozenVolumes<'c> {
    copier: &'c Copier,
    frozen: Vec<(VolumeId, freeze::Frozen)>,
}

impl Copier {
    /// Copies the bytes of volumes into new files, even while the volumes are in use. All copies show one moment, as
    /// `CreateVolumeGroupSnapshot` demands ("write-order consistency").
    pub(in crate::driver) fn copy_live(&self, copies: &mut [LiveCopy]) -> Result<Vec<File>> {
        let mut held = FrozenVolumes { copier: self, frozen: Vec::new() };
        let mut raw = Vec::new();
        let started = Instant::now();
        for copy in copies.iter_mut() {
            let Some(device) = LoopDevice::find(&self.shared.volume_data(&copy.id))? else { continue };
            let dev = device.dev()?;
            let mut mounts = mount::mounts()?;
            mounts.retain(|mount| mount.is_of(&dev) && !mount.read_only);
            let frozen = |held: &mut FrozenVolumes<'_>| held.freeze(&copy.id, root_of(&copy.id, &mounts)?);
            if mounts.is_empty() || !frozen(&mut held).map_err(|error| self.perhaps_full(error))? {
                copy.written = true;
                raw.push(device);
            }
        }
        let stop = match held.frozen.is_empty() {
            true => Stop::default(),
            false => Stop::at(Some(started + FREEZE_BOUND)),
        };
        let copied = self.copy_together(copies, &raw, &stop);
        held.thaw()?;
        copied.map_err(|error| match error.stopped() {
            None => self.perhaps_full(error),
            Some(_) => Error::Precondition(format!(
                "the copy took longer than the {} s that a filesystem is held frozen: use a pool that clones \
                 (--pool btrfs or xfs)",
                FREEZE_BOUND.as_secs()
            )),
        })
    }

    /// Whether another program holds a volume's filesystem frozen. It is frozen for a moment to find out.
    pub(in crate::driver) fn is_frozen(&self, id: &VolumeId, mounted: &Mount) -> Result<bool> {
        let mut held = FrozenVolumes { copier: self, frozen: Vec::new() };
        let is_free = held.freeze(id, root_of(id, std::slice::from_ref(mounted))?)?;
        held.thaw()?;
        Ok(!is_free)
    }

    /// Turns EIO into an error about space if the pool is full: a lack of space shows as EIO when the page cache is written
    /// back or flushed.
    fn perhaps_full(&self, error: Error) -> Error {
        let is_io = error.sys().is_some_and(|error| error.errno() == Some(libc::EIO));
        match self.shared.open_pool.free() {
            Ok(free) if is_io && free < FULL => Error::Exhausted(format!(
                "No space left on device: what was written to the volume cannot be stored ({}); delete volumes or \
                 snapshots, or make room on the disk",
                base::report(&error)
            )),
            _ => error,
        }
    }

    /// Makes all copies, and makes them again if they may not show one moment: one of the `raw` devices was written between the first
    /// and the last step.
    fn copy_together(&self, copies: &mut [LiveCopy], raw: &[LoopDevice], stop: &Stop) -> Result<Vec<File>> {
        let one_step = raw.is_empty() || (raw.len() == 1 && self.shared.pool().copies_atomically());
        let started = Instant::now();
        let mut tries = 0;
        while tries < QUIET_TRIES || started.elapsed() < QUIET_TIME {
            stop.check()?;
            tries += 1;
            for device in raw {
                blockdev::flush(&device.path())?;
            }
            let before = if one_step { Vec::new() } else { sample(raw)? };
            let is_quiet = before.iter().all(|counters| counters.in_flight == 0);
            let group: Vec<GroupMember<'_>> = copies.iter().map(LiveCopy::member).collect();
            let at_once = if group.len() > 1 { self.shared.pool().copy_group(&group)? } else { None };
            let (files, show_one_moment) = match at_once {
                Some(copied) => copied,
                None if !is_quiet => continue,
                None => {
                    let copied = copies.iter_mut().map(|copy| self.copy_once(copy, stop));
                    (copied.collect::<Result<_>>()?, false)
                }
            };
            if one_step || show_one_moment || is_quiet && sample(raw)? == before {
                return Ok(files);
            }
            for copy in copies.iter_mut() {
                self.shared.pool().discard(&copy.target)?;
                if let Some(sink) = &mut copy.sink {
                    sink.start_again()?;
                }
            }
        }
        Err(Error::Precondition(match copies.len() {
            1 => format!(
                "the device was written during each of {tries} copies, so none is consistent: pause the writer, \
                 use Filesystem mode, or a pool that clones (--pool btrfs or xfs)"
            ),
            _ => format!(
                "raw devices of the group were written during each of {tries} tries, so no two copies show the \
                 same moment: pause the writer, use Filesystem mode, or a pool that copies a group at once (--pool btrfs)"
            ),
        }))
    }

    fn copy_once(&self, copy: &mut LiveCopy, stop: &Stop) -> Result<File> {
        let copied = self.copy_bytes(copy, stop);
        copied.inspect_err(|error| self.read_errors.note(&copy.id, error))
    }

    fn copy_bytes(&self, copy: &mut LiveCopy, stop: &Stop) -> Result<File> {
        let LiveCopy { source, target, block_size, sink: hashing, written, .. } = copy;
        let Some(hashing) = hashing else {
            let how = Copying { sink: None, size: *block_size, stop };
            return Ok(match written {
                true => self.shared.pool().copy_live(source, target, how)?,
                false => self.shared.pool().copy(source, target, how)?,
            });
        };
        let mut take = |offset: u64, bytes: &[u8]| hashing.take(offset, bytes);
        let how = Copying { sink: Some(&mut take), size: *block_size, stop };
        let copied = self.shared.pool().copy(source, target, how);
        hashing.check()?;
        Ok(copied?)
    }

    /// Thaws what a driver froze since the last boot and did not thaw, and nothing else. Called at start for the driver before,
    /// and at a shutdown that leaves calls behind.
    pub(in crate::driver) fn thaw_leftovers(&self) {
        let ids: Vec<VolumeId> = self
            .shared
            .store
            .read(|index| index.volumes_after(None).map(|record| record.id.clone()).collect());
        for id in ids {
            if let Err(error) = self.thaw_leftover(&id) {
                tracing::error!(volume_id = %id, error = base::report(&error), "a volume may be frozen");
            }
        }
    }

    /// Undoes what a driver left on volumes when it died during a copy, or while a filesystem grew.
    pub(in crate::driver) fn end_cut_calls(&self) {
        let volumes: Vec<_> = self.shared.store.read(|index| index.volumes_after(None).cloned().collect());
        for record in volumes {
            if let Err(error) = ungrown::undo(&self.shared.store, &record.id) {
                let error = base::report(&error);
                tracing::warn!(volume_id = %record.id, error, "its next use undoes the growth of its filesystem, which was cut short");
            }
            let direct = record.tuning.direct_io != Some(false);
            let dir = self.shared.store.dir().volume(&record.id);
            if let Err(error) = self.shared.pool().end_cut_copy(&dir, direct) {
                let error = base::report(&Error::from(error));
                tracing::warn!(volume_id = %record.id, error, "writes of this volume may be slow until the next start");
            }
        }
    }

    /// Thaws a volume whose recorded freeze was never undone, through any mount of its device. The record is removed after
    /// that, or if the device is gone and so nothing can be frozen.
    pub(in crate::driver) fn thaw_leftover(&self, id: &VolumeId) -> Result<()> {
        let Some(boot) = self.shared.store.volume_state(id)?.frozen else { return Ok(()) };
        if boot == sys::boot_id()?
            && let Some(device) = LoopDevice::find(&self.shared.volume_data(id))?
        {
            let dev = device.dev()?;
            let mut mounts = mount::mounts()?;
            mounts.retain(|mount| mount.is_of(&dev));
            if mounts.is_empty() {
                // It may be mounted where this process does not see it, so the record stays for the next try.
                return Ok(());
            }
            if freeze::thaw(&root_of(id, &mounts)?)? {
                tracing::warn!(volume_id = %id, "thawed what a driver left frozen");
            }
        }
        self.set_frozen(id, None)
    }

    /// Records the boot in which a volume is about to be frozen, or that it is thawed.
    fn set_frozen(&self, id: &VolumeId, boot: Option<String>) -> Result<()> {
        Ok(self.shared.store.change_volume_state(id, |state| state.frozen = boot)?)
    }
}

/// The root of a volume's filesystem, through any mount that is not covered by another.
fn root_of(id: &VolumeId, mounts: &[Mount]) -> Result<freeze::Root> {
    let mut failed = None;
    for mount in mounts {
        match freeze::Root::open(mount) {
            Ok(Some(root)) => return Ok(root),
            Ok(None) => {}
            Err(error) => failed = Some(error),
        }
    }
    match failed {
        Some(error) => Err(error.into()),
        None => Err(Error::Precondition(format!(
            "something else is mounted over the filesystem of volume {id} at {}: unmount that first",
            mounts[0].mount_point.display()
        ))),
    }
}

fn sample(devices: &[LoopDevice]) -> Result<Vec<WriteCounters>> {
    devices.iter().map(|device| Ok(WriteCounters::sample(&device.sysfs())?)).collect()
}

impl FrozenVolumes<'_> {
    /// Freezes a volume's filesystem. `Ok(false)` if another program has frozen it: that program may thaw it at any time, so
    /// the volume is treated like a raw device, and not thawed here.
    ///
    /// 1. Thaw what an earlier call left frozen. Otherwise that would be taken for another program's freeze, and its record
    ///    would be removed.
    /// 2. Record the freeze: if the driver dies from here on, the next one thaws.
    /// 3. Freeze.
    fn freeze(&mut self, id: &VolumeId, root: freeze::Root) -> Result<bool> {
        self.copier.thaw_leftover(id)?;
        self.copier.set_frozen(id, Some(sys::boot_id()?))?;
        match freeze::Frozen::freeze(root, FREEZE_BOUND) {
            Ok(Some(frozen)) => {
                self.frozen.push((id.clone(), frozen));
                Ok(true)
            }
            other => {
                self.copier.set_frozen(id, None)?;
                other?;
                Ok(false)
            }
        }
    }

    /// Thaws all. Fails if one was thawed before, since the copies may then be inconsistent.
    fn thaw(mut self) -> Result<()> {
        self.finish()
    }

    /// Thaws all, and removes the record of each freeze only after its thaw succeeded.
    fn finish(&mut self) -> Result<()> {
        let copier = self.copier;
        let mut outcome = Ok(());
        for (id, frozen) in self.frozen.drain(..).rev() {
            let thawed = frozen.thaw().map_err(Error::from);
            // Where the bound had passed it is thawed already, and a record that stays would have it thawed again later.
            let recorded = match &thawed {
                Ok(()) => copier.set_frozen(&id, None),
                Err(_) => copier.thaw_leftover(&id),
            };
            outcome = outcome.and(thawed).and(recorded);
        }
        outcome
    }
}

impl Drop for FrozenVolumes<'_> {
    fn drop(&mut self) {
        if let Err(error) = self.finish() {
            tracing::error!(error = base::report(&error), "thaw failed");
        }
    }
}
