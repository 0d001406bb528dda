//! Making and deleting volumes.

use std::path::PathBuf;
use std::sync::Arc;

use crate::driver::devices::attached::release_devices;
use crate::driver::devices::superblock::Superblock;
use crate::driver::error::{Error, OTHER_NAME, Result, shown};
use crate::driver::health::read_errors::ReadErrors;
use crate::driver::locks::{LockKey, OpGuard};
use crate::driver::request::capability::{Capability, is_known_filesystem, kinds};
use crate::driver::request::create::{CreateVolume, SourceRef, check_name, difference};
use crate::driver::request::page::{Page, PageRequest, page};
use crate::driver::request::params::VolumeParameters;
use crate::driver::shared::{LockedVolume, Shared, check_whole};
use crate::driver::snapshots::history::hold::Histories;
use crate::driver::snapshots::quiesce::{Copier, LiveCopy};
use crate::driver::volumes::capacity::{Capacity, Reserved};
use crate::driver::volumes::incoming::TransferTable;
use crate::pool::{self, Bytes, Copying};
use crate::store::{AccessKind, Source, Timestamp, VolumeRecord};
use base::{BlockSize, SnapshotId, Stop, VolumeId};
use files::Context;
use files::change;

/// The volumes of this node, as the controller sees them.
#[derive(Debug)]
pub struct Volumes {
    pub(in crate::driver) shared: Arc<Shared>,
    pub(in crate::driver) copier: Arc<Copier>,
    pub(in crate::driver) histories: Arc<Histories>,
    pub(in crate::driver) capacity: Arc<Capacity>,
    pub(in crate::driver) transfers: Arc<TransferTable>,
    pub(in crate::driver) read_errors: Arc<ReadErrors>,
    /// The number of attachments that are being made.
    pub(in crate::driver) attaching: Reserved,
}

/// An open content source.
pub(in crate::driver) struct Content {
    source: Source,
    bytes: Bytes,
    /// The file of its bytes.
    path: PathBuf,
    capacity: u64,
    block_size: BlockSize,
    tracking: bool,
}

impl Volumes {
    /// A volume by the id a client sent, which may be any string.
    pub fn get(&self, id: &str) -> Result<Arc<VolumeRecord>> {
        self.shared.volume(id)
    }

    /// Lists volumes.
    pub fn list(&self, request: &PageRequest) -> Result<Page<VolumeRecord>> {
        let (limit, after) = (request.limit()?, request.after::<VolumeId>()?);
        self.shared.store.check_alive()?;
        Ok(self.shared.store.read(|index| {
            // Ephemeral volumes are known to kubelet only.
            let listed = index.volumes_after(after.as_ref()).filter(|record| record.ephemeral.is_none());
            page(listed.cloned(), limit, |record| record.id.to_string())
        }))
    }

    /// Makes a volume, or finds the one that an earlier call of this name made.
    pub fn create(&self, request: &CreateVolume) -> Result<Arc<VolumeRecord>> {
        check_name("name", &request.name)?;
        let access = kinds(&request.capabilities, request.parameters.fs_type.as_deref())?;
        let name = self.shared.locks.take(LockKey::VolumeName(request.name.clone()))?;
        // Checked before the volumes: a transfer that becomes a volume in between is found among them.
        self.transfers.check(request, &access)?;
        if let Some(existing) = self.existing(request, &access)? {
            return Ok(existing);
        }
        self.check_topology(request)?;
        let (content, _locked) = match &request.source {
            None => (None, None),
            Some(SourceRef::Snapshot(id)) => {
                let content = self.snapshot_content(id);
                (Some(content.map_err(|error| self.perhaps_elsewhere(error, request))?), None)
            }
            Some(SourceRef::Volume(id)) => {
                let locked = self.shared.lock_volume(id);
                let volume = locked.map_err(|error| self.perhaps_elsewhere(error, request))?;
                (Some(self.volume_content(&volume)?), Some(volume))
            }
        };
        let block_size = request
            .parameters
            .block_size
            .or(content.as_ref().map(|content| content.block_size))
            .unwrap_or(BlockSize::MIN);
        // If the volume is larger than its source, staging grows the filesystem.
        let source = content.as_ref().map(|content| content.capacity);
        let capacity = self.capacity.of_new(source, &access, block_size, request.range)?;
        if let Some(content) = content.as_ref().filter(|content| content.capacity < capacity)
            && access.iter().all(|kind| *kind != AccessKind::Block)
            && let Some(found) = Superblock::read(&content.path)?
        {
            found.check_growth("capacity_range.required_bytes", capacity)?;
        }
        let _room = self.capacity.reserve(capacity)?;
        let record = VolumeRecord {
            version: VolumeRecord::VERSION,
            id: VolumeId::random(self.shared.key).context("draw an id from", "/dev/random".as_ref())?,
            name: request.name.clone(),
            capacity,
            block_size,
            access,
            source: content.as_ref().map(|content| content.source.clone()),
            tracking: request
                .parameters
                .tracking
                .or(content.as_ref().map(|content| content.tracking))
                .unwrap_or(true),
            tuning: request.tuning.clone(),
            attached: None,
            ephemeral: None,
            created: Timestamp::now(),
        };
        self.fill_and_commit(&name, record, content)
    }

    fn check_topology(&self, request: &CreateVolume) -> Result<()> {
        self.shared.check_topology(&request.requisite, "volumes are made where the driver runs")
    }

    /// The volume that an earlier call of this name made.
    pub(in crate::driver) fn existing(
        &self,
        request: &CreateVolume,
        access: &[AccessKind],
    ) -> Result<Option<Arc<VolumeRecord>>> {
        let existing = self.shared.store.read(|index| index.volume_named(&request.name));
        let difference = existing.as_ref().and_then(|existing| {
            let elsewhere = || {
                self.check_topology(request)
                    .err()
                    .map(|_| format!("accessible_topology {:?}", self.shared.topology()))
            };
            difference(existing, request, access).or_else(elsewhere)
        });
        match difference {
            None => Ok(existing),
            Some(difference) => Err(Error::Clash {
                kind: "volume",
                name: shown(&request.name),
                difference,
                remedy: OTHER_NAME,
            }),
        }
    }

    /// Makes the bytes of a volume and records it. `_name` keeps others from making one of the same name.
    pub(in crate::driver) fn fill_and_commit(
        &self,
        _name: &OpGuard,
        record: VolumeRecord,
        content: Option<Content>,
    ) -> Result<Arc<VolumeRecord>> {
        self.shared.check_room()?;
        let draft = self.shared.store.draft_volume(&record.id)?;
        let target = draft.dir();
        let file = match content {
            None => self.shared.pool().create(target, record.capacity)?,
            Some(Content { source: Source::Snapshot(id), bytes, block_size, .. }) => {
                let how = Copying { sink: None, size: block_size, stop: &Stop::default() };
                match self.shared.pool().copy(&bytes, target, how) {
                    // Deleted since it was opened: on btrfs that removes the subvolume under the open file.
                    Err(_) if self.shared.store.read(|index| index.snapshot(&id).is_none()) => {
                        return Err(Error::no_snapshot(id.as_str()));
                    }
                    copied => copied?,
                }
            }
            Some(Content { source: Source::Volume(id), bytes, block_size, .. }) => {
                let target = target.clone();
                let copy = LiveCopy { id, source: bytes, target, block_size, sink: None, written: false };
                self.copier.copy_live(&mut [copy])?.remove(0)
            }
        };
        let path = target.data();
        // The volume is larger than its source: the rest reads as zeros. A file of the right length was synced by the
        // pool.
        if file.metadata().context("stat", &path)?.len() != record.capacity {
            change::set_len(&file, &path, record.capacity)?;
            change::sync(&file, &path)?;
        }
        Ok(self.shared.store.commit_volume(draft, record)?)
    }

    /// Deletes a volume that is not in use, or ends the transfer that makes it. Its snapshots stay. An unknown id is not an error.
    pub fn delete(&self, id: &str) -> Result<()> {
        if id.is_empty() {
            return Err(Error::Missing { field: "volume_id" });
        }
        let Ok(id) = id.parse::<VolumeId>() else { return Ok(()) };
        let lock = self.shared.locks.take(LockKey::Volume(id.clone()))?;
        if self.transfers.remove(&id, &lock)? {
            return Ok(());
        }
        let Some(record) = self.shared.store.read(|index| index.volume(&id)) else {
            // A volume whose record cannot be read still exists.
            return Ok(self.shared.store.check_readable(id.as_str())?);
        };
        if let Some(attached) = self.shared.attachment(&record) {
            return Err(Error::Precondition(format!(
                "volume {id} is attached to node {}: call ControllerUnpublishVolume first",
                attached.node_id
            )));
        }
        self.remove_idle(&id, &lock)
    }

    /// Removes a volume that is not in use.
    pub(in crate::driver) fn remove_idle(&self, id: &VolumeId, lock: &OpGuard) -> Result<()> {
        release_devices(&self.shared, id, lock)?;
        let _removed = self.shared.store.remove_volume(id)?;
        self.read_errors.forget(id);
        self.histories.hold([id]).apply_retention(id);
        Ok(())
    }

    /// Says which of these capabilities the volume lacks; `None` when it has all. Every volume can be staged as a device and
    /// as a filesystem, whatever it was made for.
    pub fn validate_capabilities(
        &self,
        id: &str,
        capabilities: &[Capability],
        parameters: &VolumeParameters,
    ) -> Result<Option<String>> {
        let record = self.shared.volume(id)?;
        if parameters.block_size.is_some_and(|size| size != record.block_size) {
            return Ok(Some(format!("the volume has blockSize {}", record.block_size)));
        }
        if parameters.tracking.is_some_and(|tracking| tracking != record.tracking) {
            return Ok(Some(format!("the volume has changedBlockTracking {}", record.tracking)));
        }
        let found = match Superblock::read(&self.shared.volume_data(&record.id)) {
            Ok(found) => found.map(|found| found.fs_type),
            // A deletion has taken the file away and takes the record next.
            Err(error) if error.sys().is_some_and(files::Error::is_not_found) => {
                return Err(Error::no_volume(id));
            }
            Err(error) => return Err(error),
        };
        Ok(capabilities.iter().find_map(|capability| match (capability.kind_for(&record), found) {
            (Ok(AccessKind::Filesystem(_)), Some(found)) if !is_known_filesystem(found) => {
                Some(format!("the volume holds {found}: use it as a Block volume"))
            }
            (Ok(AccessKind::Filesystem(_)), Some(found)) => {
                let named = capability.named_filesystem().filter(|named| *named != found)?;
                Some(format!("the volume holds {found}, not {named}"))
            }
            (Ok(_), _) => None,
            (Err(error), _) => Some(error.to_string()),
        }))
    }

    /// A source that is unknown here may be on another node. A caller that names topologies gets the error that makes it try
    /// another one: "Unable to provision in `accessible_topology`", CSI spec, CreateVolume Errors.
    fn perhaps_elsewhere(&self, error: Error, request: &CreateVolume) -> Error {
        let id = match &request.source {
            Some(SourceRef::Snapshot(id)) if id.parse::<SnapshotId>().is_ok() => id,
            Some(SourceRef::Volume(id)) if id.parse::<VolumeId>().is_ok() => id,
            _ => return error,
        };
        if base::DataDirKey::of(id) == Some(self.shared.key) {
            // The id was made here, so the object was deleted.
            return error;
        }
        match error {
            Error::NotFound { kind, .. } if !request.requisite.is_empty() => Error::Elsewhere(format!(
                "{kind} {id} is not on this node, {}: it is on another, or deleted",
                self.shared.config.node_id
            )),
            error => error,
        }
    }

    fn snapshot_content(&self, id: &str) -> Result<Content> {
        let record = self.shared.snapshot(id)?;
        let dir = self.shared.store.snapshot_dir(&record);
        let bytes = match self.shared.pool().open(&dir) {
            // It was deleted since the lookup.
            Err(pool::Error::Sys(error)) if error.is_not_found() => return Err(Error::no_snapshot(id)),
            opened => opened?,
        };
        check_whole(bytes.path(), bytes.length()?, record.capacity)?;
        Ok(Content {
            source: Source::Snapshot(record.id.clone()),
            bytes,
            path: dir.data(),
            capacity: record.capacity,
            block_size: record.block_size,
            tracking: record.tracking,
        })
    }

    fn volume_content(&self, record: &LockedVolume) -> Result<Content> {
        self.shared.undo_cut_expansion(record)?;
        let dir = self.shared.store.dir().volume(&record.id);
        Ok(Content {
            source: Source::Volume(record.id.clone()),
            bytes: self.shared.pool().open(&dir)?,
            path: dir.data(),
            capacity: record.capacity,
            block_size: record.block_size,
            tracking: record.tracking,
        })
    }
}
