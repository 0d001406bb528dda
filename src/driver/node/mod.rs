//! Volumes in use on this node: their loop devices, filesystems and targets.
//!
//! `state.json` says where a volume should be; it is written before the kernel is called, so that
//! every mount is explained by a record. What is mounted is read from the kernel: a record
//! without its mount is repaired or dropped.

mod ephemeral;
mod expand;
mod health;
mod publish;
mod stage;
mod stats;

pub use stats::{Stats, Usage};

use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::capacity::Capacity;
use super::devices::{detach, free_unrecorded, shows};
use super::error::shown;
use super::expand::{grow, tune};
use super::health::Health;
use super::locks::{Key, OpGuard};
use super::quiesce::Copier;
use super::shared::{LockedVolume, Shared};
use super::volumes::Volumes;
use super::{Capability, EphemeralParameters, Error, Result};
use crate::store::{self, Staged, VolumeRecord, VolumeState};
use crate::sys::loopdev::{Access, LoopDevice};
use crate::sys::mount;
use base::VolumeId;

/// A NodeStageVolume call, with the fields of its message.
#[derive(Clone, Debug)]
#[allow(missing_docs)]
pub struct StageRequest {
    pub volume_id: String,
    pub staging_path: PathBuf,
    pub capability: Capability,
}

/// A NodePublishVolume call, with the fields of its message.
#[derive(Clone, Debug)]
#[allow(missing_docs)]
pub struct PublishRequest {
    pub volume_id: String,
    pub staging_path: PathBuf,
    pub target_path: PathBuf,
    pub capability: Capability,
    pub read_only: bool,
    /// The parameters of an ephemeral inline volume, from `volume_context`; `None` for other volumes.
    pub ephemeral: Option<EphemeralParameters>,
}

/// The volumes of this node where they are used: devices, filesystems, mounts.
#[derive(Debug)]
pub struct Node {
    pub(super) shared: Arc<Shared>,
    pub(super) volumes: Arc<Volumes>,
    pub(super) capacity: Arc<Capacity>,
    pub(super) copier: Arc<Copier>,
    pub(super) health: Arc<Health>,
}

/// A volume that is locked for a node call.
struct Held {
    record: Arc<VolumeRecord>,
    state: VolumeState,
    /// Whether `state` could be read. If not, it is empty, and must not be used or written.
    known: bool,
    /// The file behind its device.
    data: PathBuf,
    lock: OpGuard,
    _place: Option<OpGuard>,
}

impl Node {
    /// Locks a volume for a node call, and the path where it is mounted.
    fn hold_at(&self, volume_id: &str, path: &Path) -> Result<Held> {
        let held = self.hold(volume_id)?;
        Ok(Held { _place: Some(self.shared.locks.take(Key::Place(path.to_owned()))?), ..held })
    }

    /// Locks a volume for a node call.
    fn hold(&self, volume_id: &str) -> Result<Held> {
        let volume = self.lock_volume(volume_id)?;
        self.shared.truncate_to_record(&volume)?;
        let LockedVolume { record, guard } = volume;
        let state = self.shared.store.volume_state(&record.id)?;
        let data = self.shared.volume_data(&record.id);
        Ok(Held { record, state, known: true, data, lock: guard, _place: None })
    }

    /// The same for unpublish and unstage. `None` if the volume does not exist and nothing is mounted at `path`. A
    /// volume in use cannot be deleted, so if the volume is gone, a mount there is not ours.
    ///
    /// A broken pool must not keep a pod from ending: if it cannot be read, only the kernel's mounts count.
    fn hold_or_gone(&self, volume_id: &str, path: &Path) -> Result<Option<Held>> {
        let LockedVolume { record, guard } = match self.lock_volume(volume_id) {
            Err(Error::NotFound { .. }) if mount::mounted_at(path)?.is_none() => return Ok(None),
            locked => locked?,
        };
        let place = Some(self.shared.locks.take(Key::Place(path.to_owned()))?);
        let (state, known) = match self.shared.store.volume_state(&record.id) {
            Err(store::Error::Sys(error)) => {
                let error = base::report(&error);
                tracing::warn!(volume_id = %record.id, error, "the state of the volume cannot be read");
                (VolumeState::default(), false)
            }
            state => (state?, true),
        };
        let data = self.shared.volume_data(&record.id);
        Ok(Some(Held { record, state, known, data, lock: guard, _place: place }))
    }

    fn lock_volume(&self, volume_id: &str) -> Result<LockedVolume> {
        self.shared.lock_found(|| self.volume_or_ephemeral(volume_id))
    }

    /// Records that a volume was unmounted. A pool that is full or broken may refuse the write, and must not keep a pod
    /// from ending: then the old record stays and names more mounts than exist, as after a crash.
    fn record_undone(&self, held: &Held) -> Result<()> {
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
    fn volume_or_ephemeral(&self, volume_id: &str) -> Result<Arc<VolumeRecord>> {
        match self.shared.store.read(|index| index.ephemeral(volume_id)) {
            Some(record) => Ok(record),
            None => self.shared.volume(volume_id),
        }
    }

    /// Unmounts a volume from `path` when the pool is dead and no record can be read: what the kernel has mounted decides.
    /// Frees the device once it is mounted nowhere.
    fn undo_unrecorded(&self, volume_id: &str, path: &Path, is_target: bool) -> Result<()> {
        let _place = self.shared.locks.take(Key::Place(path.to_owned()))?;
        let volumes = self.shared.store.dir().volumes();
        let device = match volume_id.parse::<VolumeId>() {
            Ok(id) => LoopDevice::find(&self.shared.volume_data(&id))?,
            // An ephemeral volume's handle does not lead to its file, so its device is found by the mount.
            Err(_) => {
                let ours = LoopDevice::all_on(|path| path.starts_with(&volumes))?;
                ours.into_iter().find(|device| shows(path, Some(device)).unwrap_or(false))
            }
        };
        if mount::mounted_at(path)?.is_some() {
            if !shows(path, device.as_ref())? {
                return Err(Error::Precondition(format!(
                    "something else than volume {volume_id} is mounted at {}: unmount it first",
                    path.display()
                )));
            }
            mount::unmount(path)?;
        }
        if is_target {
            stage::remove_target(path)?;
        }
        free_unrecorded(device)
    }
}

/// The place of a volume that `volume_path` names. A path that is not in the record is answered with "not found",
/// so an arbitrary string never reaches the kernel.
fn place<'s>(state: &'s VolumeState, volume_path: &Path) -> Result<(PathBuf, &'s Staged)> {
    let path = mount::resolved(volume_path);
    match state.place(&path) {
        Some(staged) => Ok((path, staged)),
        None => Err(no_volume_at(volume_path)),
    }
}

fn no_volume_at(volume_path: &Path) -> Error {
    Error::NotFound { kind: "the volume at", id: shown(&volume_path.to_string_lossy()) }
}

/// Fails if something other than the volume is mounted at `path`.
fn check_unoccupied(held: &Held, path: &Path) -> Result<()> {
    if mount::mounted_at(path)?.is_none() || shows(path, LoopDevice::find(&held.data)?.as_ref())? {
        return Ok(());
    }
    Err(Error::Precondition(format!("something else is mounted at {}: unmount it first", path.display())))
}

/// The volume's device, attached if it is not yet, and as large as the volume. A device that is left over with
/// another access is replaced, provided that it is not open: two devices on one file do not see each other's writes.
fn attached(held: &Held, access: Access) -> Result<LoopDevice> {
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
