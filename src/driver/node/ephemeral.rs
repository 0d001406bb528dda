//! Ephemeral inline volumes: made, formatted and mounted when they are published, deleted when they are
//! unpublished. Kubelet names them by a handle of its own, and never stages them.

use std::path::{Path, PathBuf};

use crate::driver::devices::attached::{free_unrecorded, shows};
use crate::driver::devices::filesystem;
use crate::driver::devices::filesystem::is_blank;
use crate::driver::error::{Error, Result};
use crate::driver::locks::{LockKey, OpGuard};
use crate::driver::node::held::{Held, check_unoccupied};
use crate::driver::node::publish::make_directory;
use crate::driver::node::used::{Node, PublishRequest, remove_target};
use crate::driver::request::capability::AccessType;
use crate::driver::request::create::{CapacityRange, check_name};
use crate::driver::request::params::EphemeralParameters;
use crate::store::{Staged, Timestamp, Tuning, VolumeRecord, VolumeState};
use crate::sys::loopdev::LoopDevice;
use crate::sys::mount;
use base::{BlockSize, VolumeId};
use files::Context;

impl Node {
    /// Makes the volume, unless an earlier try did, and mounts it at its target. A failed try removes the volume, since
    /// kubelet may never call NodeUnpublishVolume for it; but not a volume that a pod may have written to.
    pub(super) fn publish_ephemeral(
        &self,
        request: &PublishRequest,
        parameters: &EphemeralParameters,
        target: PathBuf,
    ) -> Result<()> {
        let handle = &request.volume_id;
        check_name("volume_id", handle)?;
        if handle.parse::<VolumeId>().is_ok() {
            return Err(Error::Invalid {
                field: "volume_id",
                value: format!("{handle}, the id of a persistent volume"),
                want: "a handle that kubelet made for an ephemeral volume".into(),
            });
        }
        if request.capability.access == AccessType::Block {
            return Err(Error::Unsupported(
                "an ephemeral inline volume is a filesystem, never a device".into(),
            ));
        }
        let name = self.shared.locks.take(LockKey::Ephemeral(handle.clone()))?;
        let _place = self.shared.locks.take(LockKey::MountPath(target.clone()))?;
        let is_new = self.shared.store.read(|index| index.ephemeral(handle)).is_none();
        if is_new {
            self.create_ephemeral(&name, request, parameters)?;
        }
        let mut held = self.hold(handle)?;
        let access = request.capability.kind_for(&held.record)?;
        if !held.record.access.contains(&access) {
            let made = held.record.fs_type().unwrap_or_default();
            return Err(Error::Unsupported(format!(
                "ephemeral volume {handle} was made as {made}, not as {access}"
            )));
        }
        let staged = Staged {
            path: target,
            access,
            read_only: request.read_only || request.capability.is_read_only(),
        };
        let placed = self.place_ephemeral(&mut held, &staged, request);
        let is_unused = || is_new || held.state.formatting || is_blank(&held.data).unwrap_or(false);
        if placed.is_err()
            && is_unused()
            && let Err(error) = self.remove_ephemeral(held)
        {
            tracing::warn!(
                error = base::report(&error),
                "an ephemeral volume that could not be published could not be removed"
            );
        }
        placed
    }

    fn create_ephemeral(
        &self,
        name: &OpGuard,
        request: &PublishRequest,
        parameters: &EphemeralParameters,
    ) -> Result<()> {
        let access = vec![request.capability.kind(None)?];
        let required = parameters.size.map_or(0, |size| size.0);
        let capacity =
            self.capacity.of_new(None, &access, BlockSize::MIN, CapacityRange { required, limit: None })?;
        let _room = self.capacity.reserve(capacity)?;
        let record = VolumeRecord {
            version: VolumeRecord::VERSION,
            id: VolumeId::random(self.shared.key).context("draw an id from", "/dev/random".as_ref())?,
            name: String::new(),
            capacity,
            block_size: BlockSize::MIN,
            access,
            source: None,
            tracking: true,
            tuning: Tuning::default(),
            attached: None,
            ephemeral: Some(request.volume_id.clone()),
            created: Timestamp::now(),
        };
        self.volumes.fill_and_commit(name, record, None).map(drop)
    }

    /// 1. Make the target, so that a path that cannot be one is never recorded. A crash leaves an empty directory, and
    ///    the next try uses it.
    /// 2. Record it: after a crash from here on, unpublish finds the record.
    /// 3. Attach, format, mount.
    fn place_ephemeral(&self, held: &mut Held, staged: &Staged, request: &PublishRequest) -> Result<()> {
        let device = LoopDevice::find(&held.data)?;
        if let Some(existing) = held.state.staged.as_ref().filter(|existing| *existing != staged)
            && shows(&existing.path, device.as_ref())?
        {
            return Err(Error::Clash {
                kind: "published volume",
                name: request.volume_id.clone(),
                difference: format!("another path or readonly flag, at {}", existing.path.display()),
                remedy: "unpublish it first",
            });
        }
        check_unoccupied(held, &staged.path)?;
        make_directory(&staged.path)?;
        held.state.staged = Some(staged.clone());
        self.shared.store.set_volume_state(&held.record.id, &held.state)?;
        let AccessType::Mount { flags, .. } = &request.capability.access else { return Ok(()) };
        self.stage_filesystem(held, staged, &request.capability, flags)
    }

    /// Undoes a publish, and deletes the volume. Does nothing if the volume is published at another target.
    ///
    /// A pool that is dead or read-only must not keep a pod from ending: then the volume stays in it.
    pub(super) fn unpublish_ephemeral(&self, held: Held, target: &Path) -> Result<()> {
        if held.state.staged.as_ref().is_some_and(|staged| staged.path != target) {
            return Ok(());
        }
        if !held.known {
            return self.displace(&held, target);
        }
        let id = held.record.id.clone();
        match self.remove_ephemeral(held) {
            Err(error) if self.shared.open_pool.check().is_err() && mount::mounted_at(target)?.is_none() => {
                let error = base::report(&error);
                tracing::error!(volume_id = %id, error, "the pool takes no writes: the volume of a pod that has ended stays in it");
                Ok(())
            }
            removed => removed,
        }
    }

    /// Unmounts the volume, and frees its device.
    fn displace(&self, held: &Held, target: &Path) -> Result<()> {
        let device = LoopDevice::find(&held.data)?;
        self.thaw_leftover(held);
        let is_there = shows(target, device.as_ref())?;
        if is_there {
            filesystem::thaw(target)?;
            mount::unmount(target)?;
        }
        // Without a record only what was mounted says that we made it.
        if (is_there || held.known) && mount::mounted_at(target)?.is_none() {
            remove_target(target)?;
        }
        free_unrecorded(device)
    }

    fn remove_ephemeral(&self, held: Held) -> Result<()> {
        if let Some(staged) = &held.state.staged {
            self.displace(&held, &staged.path)?;
            self.shared.store.set_volume_state(&held.record.id, &VolumeState::default())?;
        }
        self.volumes.remove_idle(&held.record.id, &held.lock)
    }

    /// Removes ephemeral volumes that were made but, because of a crash, never published. Kubelet may never call for them
    /// again.
    pub(in crate::driver) fn remove_unplaced(&self) {
        let ephemeral: Vec<String> = self
            .shared
            .store
            .read(|index| index.volumes_after(None).filter_map(|record| record.ephemeral.clone()).collect());
        for handle in ephemeral {
            let removed = self.hold(&handle).and_then(|held| match held.state.staged {
                None => self.remove_ephemeral(held),
                Some(_) => Ok(()),
            });
            if let Err(error) = removed {
                tracing::warn!(
                    volume_id = handle,
                    error = base::report(&error),
                    "an ephemeral volume that was never published could not be removed"
                );
            }
        }
    }
}
