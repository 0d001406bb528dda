//! Taking and deleting snapshots.

use std::collections::BTreeMap;
use std::sync::Arc;

use super::error::shown;
use super::fill::NewSnapshot;
use super::locks::Key;
use super::volumes::check_name;
use super::{Driver, Error, Result, SnapshotParameters};
use crate::store::{SnapshotRecord, Timestamp, TupleStyle, VolumeRecord};
use base::{GroupId, SnapshotId};
use files::Context;

impl Driver {
    /// A snapshot by the id a client sent, which may be any string.
    pub fn snapshot(&self, id: &str) -> Result<Arc<SnapshotRecord>> {
        self.snapshot_in("snapshot_id", id)
    }

    /// The same, naming the field that the id came in.
    pub(super) fn snapshot_in(&self, field: &'static str, id: &str) -> Result<Arc<SnapshotRecord>> {
        if id.is_empty() {
            return Err(Error::Missing { field });
        }
        let Ok(parsed) = id.parse() else { return Err(Error::no_snapshot(id)) };
        match self.store.read(|index| index.snapshot(&parsed)) {
            Some(record) => Ok(record),
            None => {
                self.store.check_readable(id)?;
                Err(Error::no_snapshot(id))
            }
        }
    }

    /// Takes a snapshot, or finds the one that an earlier call of this name took. One of the `requisite` topologies must
    /// be ours; none is no demand.
    pub fn create_snapshot(
        &self,
        name: &str,
        source_volume_id: &str,
        parameters: &SnapshotParameters,
        requisite: &[BTreeMap<String, String>],
    ) -> Result<Arc<SnapshotRecord>> {
        check_name("name", name)?;
        if source_volume_id.is_empty() {
            return Err(Error::Missing { field: "source_volume_id" });
        }
        // Before the name: what an earlier call made can only be used here as well.
        self.check_topology(requisite, "a snapshot can be used where its volume is")?;
        let _name = self.locks.take(Key::SnapshotName(name.to_owned()))?;
        if let Some(existing) = self.store.read(|index| index.snapshot_named(name)) {
            let clash = |difference| Error::Clash { kind: "snapshot", name: shown(name), difference };
            if existing.volume.as_str() != source_volume_id {
                return Err(clash(format!("source_volume_id {}", existing.volume)));
            }
            if existing.tuple_style != parameters.tuple_style {
                return Err(clash("another blockMetadataType".into()));
            }
            return Ok(existing);
        }
        let volume = self.volume(source_volume_id)?;
        let _volume = self.locks.take(Key::Volume(volume.id.clone()))?;
        // Looked up again: it may have been deleted before the lock was ours.
        let volume = self.volume(source_volume_id)?;
        self.take_snapshot(name, volume, parameters)
    }

    fn take_snapshot(
        &self,
        name: &str,
        volume: Arc<VolumeRecord>,
        parameters: &SnapshotParameters,
    ) -> Result<Arc<SnapshotRecord>> {
        self.check_host()?;
        self.truncate_to_record(&volume)?;
        let record = self.new_snapshot(name, None, &volume, parameters.tuple_style)?;
        let draft = self.store.draft_snapshot(&record.id)?;
        let mut new = NewSnapshot { draft: draft.dir().clone(), volume: volume.clone(), record, pending: 0 };
        self.fill_snapshots(std::slice::from_mut(&mut new))?;
        self.history([&volume.id]).add(draft, new.record, new.pending)
    }

    /// The record of a snapshot to be. The caller holds the volume's lock.
    pub(super) fn new_snapshot(
        &self,
        name: &str,
        group: Option<GroupId>,
        volume: &VolumeRecord,
        tuple_style: Option<TupleStyle>,
    ) -> Result<SnapshotRecord> {
        Ok(SnapshotRecord {
            version: SnapshotRecord::VERSION,
            id: SnapshotId::random(self.key).context("draw an id from", "/dev/random".as_ref())?,
            name: name.to_owned(),
            group,
            volume: volume.id.clone(),
            sequence: self.store.read(|index| index.next_sequence(&volume.id)),
            capacity: volume.capacity,
            block_size: volume.block_size,
            tracking: volume.tracking,
            tuple_style,
            created: Timestamp::now(),
            birth: None,
        })
    }

    /// Deletes a snapshot; deltas across it stay exact, and those from it for as long as `--retain-deleted`
    /// says. An unknown id is no error.
    pub fn delete_snapshot(&self, id: &str) -> Result<()> {
        if id.is_empty() {
            return Err(Error::Missing { field: "snapshot_id" });
        }
        let Ok(id) = id.parse::<SnapshotId>() else { return Ok(()) };
        let _guard = self.locks.take(Key::Snapshot(id.clone()))?;
        let Some(record) = self.store.read(|index| index.snapshot(&id)) else {
            // A snapshot whose record cannot be read is not gone.
            return Ok(self.store.check_readable(id.as_str())?);
        };
        if let Some(group) = &record.group {
            return Err(Error::Invalid {
                field: "snapshot_id",
                value: format!("{id}, a member of group snapshot {group}"),
                want: "a snapshot of its own: delete the group with DeleteVolumeGroupSnapshot".into(),
            });
        }
        self.history([&record.volume]).delete(&record)
    }
}
