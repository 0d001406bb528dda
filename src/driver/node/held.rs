//! A volume that is locked for a node call, and its device.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::driver::devices::attached::{detach, shows};
use crate::driver::error::{Error, Result};
use crate::driver::locks::{LockKey, OpGuard};
use crate::driver::node::used::Node;
use crate::driver::shared::LockedVolume;
use crate::driver::volumes::expand::{grow, tune};
use crate::store::{self, VolumeRecord, VolumeState};
use crate::sys::loopdev::{Access, LoopDevice};
use crate::sys::mount;

/// A volume that is locked for a node call.
pub(super) struct Held {
    pub(super) record: Arc<VolumeRecord>,
    pub(super) state: VolumeState,
    /// Whether `state` could be read. If not, it is empty, and must not be used or written.
    pub(super) known: bool,
    /// The file behind its device.
    pub(super) data: PathBuf,
    pub(super) lock: OpGuard,
    _place: Option<OpGuard>,
}

impl Node {
    /// Locks a volume for a node call, and the path where it is mounted.
    pub(super) fn hold_at(&self, volume_id: &str, path: &Path) -> Result<Held> {
        let held = self.hold(volume_id)?;
        Ok(Held { _place: Some(self.shared.locks.take(LockKey::MountPath(path.to_owned()))?), ..held })
    }

    /// Locks a volume for a node call.
    pub(super) fn hold(&self, volume_id: &str) -> Result<Held> {
        let volume = self.lock_volume(volume_id)?;
        self.shared.undo_cut_expansion(&volume)?;
        let LockedVolume { record, guard } = volume;
        let state = self.shared.store.volume_state(&record.id)?;
        let data = self.shared.volume_data(&record.id);
        Ok(Held { record, state, known: true, data, lock: guard, _place: None })
    }

    /// The same for unpublish and unstage. `None` if the volume does not exist and nothing is mounted at `path`. A
    /// volume in use cannot be deleted, so if the volume is gone, a mount there is not ours.
    ///
    /// A broken pool or state must not keep a pod from ending: if it cannot be read, only the kernel's mounts count.
    pub(super) fn hold_or_gone(&self, volume_id: &str, path: &Path) -> Result<Option<Held>> {
        let LockedVolume { record, guard } = match self.lock_volume(volume_id) {
            Err(Error::NotFound { .. }) if mount::mounted_at(path)?.is_none() => return Ok(None),
            locked => locked?,
        };
        let place = Some(self.shared.locks.take(LockKey::MountPath(path.to_owned()))?);
        let (state, known) = match self.shared.store.volume_state(&record.id) {
            Err(error) => {
                let error = base::report(&error);
                tracing::warn!(volume_id = %record.id, error, "the state of the volume cannot be read");
                (VolumeState::default(), false)
            }
            Ok(state) => (state, true),
        };
        let data = self.shared.volume_data(&record.id);
        Ok(Some(Held { record, state, known, data, lock: guard, _place: place }))
    }

    /// Thaws what a driver left frozen. Where it is not known what was frozen, or the filesystem no longer answers, that must not
    /// keep a pod from ending.
    pub(super) fn thaw_leftover(&self, held: &Held) {
        if let Err(error) = self.copier.thaw_leftover(&held.record.id) {
            tracing::error!(volume_id = %held.record.id, error = base::report(&error), "a volume may be frozen");
        }
    }

    pub(super) fn lock_volume(&self, volume_id: &str) -> Result<LockedVolume> {
        self.shared.lock_found(|| self.volume_or_ephemeral(volume_id))
    }

    /// Records that a volume was unmounted. A pool that is full or broken may refuse the write, and must not keep a pod
    /// from ending: then the old record stays and names more mounts than exist, as after a crash.
    pub(super) fn record_undone(&self, held: &Held) -> Result<()> {
        match self.shared.store.set_volume_state(&held.record.id, &held.state) {
            Err(store::Error::Sys(error)) => {
                let error = base::report(&error);
                tracing::warn!(volume_id = %held.record.id, error, "the state of the volume cannot be written; it still names a mount that was removed");
                Ok(())
            }
            recorded => Ok(recorded?),
        }
    }

    /// A volume by its id, or an ephemeral one by the handle that kubelet gave it.
    pub(super) fn volume_or_ephemeral(&self, volume_id: &str) -> Result<Arc<VolumeRecord>> {
        match self.shared.store.read(|index| index.ephemeral(volume_id)) {
            Some(record) => Ok(record),
            None => self.shared.volume(volume_id),
        }
    }
}

/// Fails if something other than the volume is mounted at `path`.
pub(super) fn check_unoccupied(held: &Held, path: &Path) -> Result<()> {
    if mount::mounted_at(path)?.is_none() || shows(path, LoopDevice::find(&held.data)?.as_ref())? {
        return Ok(());
    }
    Err(Error::Precondition(format!("something else is mounted at {}: unmount it first", path.display())))
}

/// The volume's device, attached if it is not yet, and as large as the volume. A device that is left over with
/// another access is replaced, provided that it is not open: two devices on one file do not see each other's writes.
pub(super) fn attached(held: &Held, access: Access) -> Result<LoopDevice> {
    match LoopDevice::find(&held.data)?.map(LoopDevice::keep).transpose()?.flatten() {
        Some(device) if device.access() == access => {
            grow(&device, held.record.capacity)?;
            tune(&device, &held.data, &held.record.tuning)?;
            return Ok(device);
        }
        Some(device) => {
            let path = device.path();
            if !device.detach()? {
                return Err(Error::Precondition(format!(
                    "{} serves the volume for another access, and a process has it open: close it first",
                    path.display()
                )));
            }
        }
        None => {}
    }
    let device = LoopDevice::attach(&held.data, access)?;
    if let Err(error) = tune(&device, &held.data, &held.record.tuning) {
        detach(device)?;
        return Err(error);
    }
    Ok(device)
}
