//! Volumes in use on this node: their loop devices, filesystems and targets.
//!
//! `state.json` says where a volume should be; it is written before the kernel is called, so that
//! every mount is explained by a record. What is mounted is read from the kernel: a record
//! without its mount is repaired or dropped.

mod ephemeral;
mod expand;
mod health;
mod held;
mod publish;
mod stage;
mod stats;

pub use stats::{Stats, Usage};

use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::capacity::Capacity;
use super::devices::{free_unrecorded, shows};
use super::error::shown;
use super::health::Health;
use super::locks::Key;
use super::quiesce::Copier;
use super::shared::Shared;
use super::volumes::Volumes;
use super::{Capability, EphemeralParameters, Error, Result};
use crate::store::{Staged, VolumeState};
use crate::sys::loopdev::LoopDevice;
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

impl Node {
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
