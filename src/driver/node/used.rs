//! The volumes that this node uses, and the requests for it.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::driver::devices::attached::{free_unrecorded, shows};
use crate::driver::error::{Error, Result, shown};
use crate::driver::health::volume::Health;
use crate::driver::locks::LockKey;
use crate::driver::request::capability::Capability;
use crate::driver::request::params::EphemeralParameters;
use crate::driver::shared::Shared;
use crate::driver::snapshots::quiesce::Copier;
use crate::driver::volumes::capacity::Capacity;
use crate::driver::volumes::make::Volumes;
use crate::store::{Staged, VolumeState};
use crate::sys::loopdev::LoopDevice;
use crate::sys::mount;
use base::VolumeId;
use files::{Context, change};

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
    pub(in crate::driver) shared: Arc<Shared>,
    pub(in crate::driver) volumes: Arc<Volumes>,
    pub(in crate::driver) capacity: Arc<Capacity>,
    pub(in crate::driver) copier: Arc<Copier>,
    pub(in crate::driver) health: Arc<Health>,
}

impl Node {
    /// Whether there may be a volume of this id, or handle, whose record could not be read.
    pub(super) fn is_unrecorded(&self, volume_id: &str) -> bool {
        let store = &self.shared.store;
        let is_unknown = || store.read(|index| index.ephemeral(volume_id).is_none());
        let is_handle = volume_id.parse::<VolumeId>().is_err();
        store.check_readable(volume_id).is_err() || (is_handle && !store.damaged().is_empty() && is_unknown())
    }

    /// Unmounts a volume from `path` when its record could not be read, or none, since the pool is dead: what the kernel has
    /// mounted decides. Frees the device once it is mounted nowhere.
    pub(super) fn undo_unrecorded(&self, volume_id: &str, path: &Path, is_target: bool) -> Result<()> {
        let _place = self.shared.locks.take(LockKey::MountPath(path.to_owned()))?;
        let volumes = self.shared.store.dir().volumes();
        let device = match volume_id.parse::<VolumeId>() {
            Ok(id) => LoopDevice::find(&self.shared.volume_data(&id))?,
            // An ephemeral volume's handle does not lead to its file, so its device is found by the mount.
            Err(_) => {
                let ours = LoopDevice::all_on(|path| {
                    let id = path.strip_prefix(&volumes).ok().and_then(|below| below.iter().next());
                    id.is_some_and(|id| self.shared.store.check_readable(&id.to_string_lossy()).is_err())
                })?;
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
            if is_target {
                remove_target(path)?;
            }
        }
        free_unrecorded(device)
    }
}

/// The place of a volume that `volume_path` names. A path that is not in the record is answered with "not found",
/// so an arbitrary string never reaches the kernel.
pub(super) fn place<'s>(state: &'s VolumeState, volume_path: &Path) -> Result<(PathBuf, &'s Staged)> {
    let path = mount::resolved(volume_path);
    match state.place(&path) {
        Some(staged) => Ok((path, staged)),
        None => Err(no_volume_at(volume_path)),
    }
}

pub(super) fn no_volume_at(volume_path: &Path) -> Error {
    Error::NotFound { kind: "the volume at", id: shown(&volume_path.to_string_lossy()) }
}

/// Removes a mount target that we made: an empty directory, or the file that a device was mounted on.
pub(super) fn remove_target(target: &Path) -> Result<()> {
    let removed = mount::in_parent(target, |place| {
        let meta = fs::symlink_metadata(place).context("stat", target)?;
        match meta.is_dir() {
            true => change::remove_dir(place),
            // The file that we made was empty, so this is another.
            false if meta.len() > 0 => Ok(()),
            false => change::remove_file(place),
        }
    });
    match removed {
        Err(error) if error.is_not_found() => Ok(()),
        // The directory existed before, and holds files of others.
        Err(error) if error.source.kind() == std::io::ErrorKind::DirectoryNotEmpty => Ok(()),
        removed => Ok(removed?),
    }
}
