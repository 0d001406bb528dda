//! Taking and deleting snapshots.

use std::sync::Arc;

use super::error::shown;
use super::locks::Key;
use super::maps::NewSnapshot;
use super::volumes::check_name;
use super::{Driver, Error, Result, SnapshotParameters};
use crate::store::{SnapshotRecord, Timestamp, TupleStyle, VolumeRecord};
use base::{GroupId, SnapshotId, Stop};
use cbt::{self, MapFile, MapHeader, Relation};
use files::Context;
use files::durable;

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

    /// Takes a snapshot, or finds the one that an earlier call of this name took.
    pub fn create_snapshot(
        &self,
        name: &str,
        source_volume_id: &str,
        parameters: &SnapshotParameters,
    ) -> Result<Arc<SnapshotRecord>> {
        check_name("name", name)?;
        if source_volume_id.is_empty() {
            return Err(Error::Missing { field: "source_volume_id" });
        }
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
        self.fit(&volume)?;
        let record = self.new_snapshot(name, None, &volume, parameters.tuple_style)?;
        let draft = self.store.draft_snapshot(&record.id)?;
        let mut new = NewSnapshot { draft: draft.dir().clone(), volume: volume.clone(), record, pending: 0 };
        self.fill_snapshots(std::slice::from_mut(&mut new))?;
        // The chain's lock orders this commit and the merge of a deleted parent.
        let chain = self.locks.wait(Key::Chain(volume.id.clone()));
        let record = self.store.commit_snapshot(draft, new.record)?;
        self.hashing.add(&record, new.pending);
        // The one before may have been kept only until now.
        let doomed = self.settle(&volume.id);
        drop(chain);
        drop(doomed);
        Ok(record)
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
            id: SnapshotId::random().context("draw an id from", "/dev/random".as_ref())?,
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
        let chain = self.locks.wait(Key::Chain(record.volume.clone()));
        let mut doomed = Vec::new();
        let kept =
            self.is_worth_keeping(&record) && Self::could_be_kept(self.store.retain_snapshot(&record))?;
        if !kept {
            self.hand_on(&record);
            doomed.push(self.store.remove_snapshot(&id)?);
            self.hashing.forget(&record);
        }
        doomed.extend(self.settle(&record.volume));
        // Freeing the bytes may take long; nobody has to wait for it.
        drop(chain);
        drop(doomed);
        Ok(())
    }

    /// Hands the changes of a snapshot about to go on to the next one. The caller holds the chain.
    pub(super) fn hand_on(&self, gone: &SnapshotRecord) {
        if let Err(error) = self.hand_changes_on(gone) {
            // Without the link a delta across the gap compares whole maps: slower, and as exact.
            tracing::warn!(snapshot_id = %gone.id, error = base::report(&error), "changes were not handed on");
        }
    }

    /// Merges the changes of a snapshot about to go into those of the next one, which from then on
    /// speaks of the changes since the one before both.
    ///
    /// 1. Write the union beside the next one's map and sync it: a crash leaves a stray file that
    ///    the next merge replaces.
    /// 2. Rename it over the map and sync: the map names the snapshot it is relative to, so both
    ///    change as one. A crash after it leaves a snapshot that nobody's changes are relative to any
    ///    more; deltas from it compare whole maps.
    fn hand_changes_on(&self, gone: &SnapshotRecord) -> Result<()> {
        if !gone.tracking {
            return Ok(());
        }
        let next = self
            .store
            .read(|index| index.line(&gone.volume).find(|record| record.sequence > gone.sequence).cloned());
        let Some(next) = next else { return Ok(()) };
        let next_dir = self.store.snapshot_dir(&next);
        let theirs = MapFile::open(&next_dir.changed())?;
        if theirs.header().relative_to.as_ref().is_none_or(|relation| relation.snapshot != gone.id) {
            return Ok(());
        }
        let ours = MapFile::open(&self.store.snapshot_dir(gone).changed())?;
        // The first there is hands nothing on: no delta leads past it, and the map would grow for ever.
        let relation = ours.header().relative_to.clone();
        let is_known =
            |relation: &Relation| self.store.read(|index| index.known(&relation.snapshot)).is_some();
        let Some(relation) = relation.filter(is_known) else { return Ok(()) };
        // What changed twice may be as it was: no longer exact.
        let relative_to = Some(Relation { exact: false, ..relation });
        let header = MapHeader { relative_to, ..theirs.header().clone() };
        let fresh = next_dir.changed().with_extension("map.new");
        durable::replace_with(&next_dir.changed(), &fresh, |fresh| {
            cbt::write_union(fresh, header, &[&ours, &theirs], &Stop::default())
                .map_err(Error::from)
                .map(drop)
        })?;
        self.hashing.add(&next, self.pending_bytes(&next));
        Ok(())
    }
}
