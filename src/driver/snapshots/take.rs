//! Taking and deleting snapshots.

use std::collections::BTreeMap;
use std::sync::Arc;

use crate::driver::error::{Error, OTHER_NAME, Result, shown};
use crate::driver::locks::LockKey;
use crate::driver::request::create::check_name;
use crate::driver::request::page::{Page, PageRequest, SnapshotFilter, optional, page};
use crate::driver::request::params::SnapshotParameters;
use crate::driver::shared::{LockedVolume, Shared};
use crate::driver::snapshots::fill::{Filler, NewSnapshot};
use crate::driver::snapshots::history::hold::Histories;

use crate::store::{SnapshotRecord, Timestamp, TupleStyle};
use base::{GroupId, SnapshotId, VolumeId};
use files::Context;

/// Takes snapshots, alone and in groups (`groups.rs`), and deletes them.
#[derive(Debug)]
pub struct Snapshots {
    pub(in crate::driver) shared: Arc<Shared>,
    pub(in crate::driver) histories: Arc<Histories>,
    pub(in crate::driver) filler: Filler,
}

impl Snapshots {
    /// A snapshot by the id a client sent, which may be any string.
    pub fn get(&self, id: &str) -> Result<Arc<SnapshotRecord>> {
        self.shared.snapshot(id)
    }

    /// Takes a snapshot, or finds the one that an earlier call of this name took. One of the `requisite` topologies must
    /// be ours; an empty list allows any.
    pub fn create(
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
        // Checked before the name: a snapshot that an earlier call made can only be used here too.
        self.shared.check_topology(requisite, "a snapshot can be used where its volume is")?;
        let _name = self.shared.locks.take(LockKey::SnapshotName(name.to_owned()))?;
        if let Some(existing) = self.shared.store.read(|index| index.snapshot_named(name)) {
            let clash = |difference| Error::Clash {
                kind: "snapshot",
                name: shown(name),
                difference,
                remedy: OTHER_NAME,
            };
            if existing.volume.as_str() != source_volume_id {
                return Err(clash(format!("source_volume_id {}", existing.volume)));
            }
            if existing.tuple_style != parameters.tuple_style {
                return Err(clash("another blockMetadataType".into()));
            }
            return Ok(existing);
        }
        let volume = self.shared.lock_volume(source_volume_id)?;
        self.take_snapshot(name, &volume, parameters)
    }

    fn take_snapshot(
        &self,
        name: &str,
        volume: &LockedVolume,
        parameters: &SnapshotParameters,
    ) -> Result<Arc<SnapshotRecord>> {
        self.shared.check_room()?;
        self.shared.undo_cut_expansion(volume)?;
        let record = self.new_record(name, None, volume, parameters.tuple_style)?;
        let draft = self.shared.store.draft_snapshot(&record.id)?;
        let volume = volume.record.clone();
        let mut new = NewSnapshot { draft: draft.dir().clone(), volume: volume.clone(), record, pending: 0 };
        self.filler.fill(std::slice::from_mut(&mut new))?;
        self.histories.hold([&volume.id]).add(draft, new.record, new.pending)
    }

    /// A record for a new snapshot.
    pub(in crate::driver) fn new_record(
        &self,
        name: &str,
        group: Option<GroupId>,
        volume: &LockedVolume,
        tuple_style: Option<TupleStyle>,
    ) -> Result<SnapshotRecord> {
        Ok(SnapshotRecord {
            version: SnapshotRecord::VERSION,
            id: SnapshotId::random(self.shared.key).context("draw an id from", "/dev/random".as_ref())?,
            name: name.to_owned(),
            group,
            volume: volume.id.clone(),
            sequence: self.shared.store.read(|index| index.next_sequence(&volume.id)),
            capacity: volume.capacity,
            block_size: volume.block_size,
            tracking: volume.tracking,
            tuple_style,
            created: Timestamp::now(),
            birth: None,
        })
    }

    /// Deletes a snapshot. Deltas across it stay exact, and deltas from it stay possible as long as `--retain-deleted`
    /// keeps it. An unknown id is not an error.
    pub fn delete(&self, id: &str) -> Result<()> {
        if id.is_empty() {
            return Err(Error::Missing { field: "snapshot_id" });
        }
        let Ok(id) = id.parse::<SnapshotId>() else { return Ok(()) };
        let _guard = self.shared.locks.take(LockKey::Snapshot(id.clone()))?;
        let Some(record) = self.shared.store.read(|index| index.snapshot(&id)) else {
            // A snapshot whose record cannot be read still exists.
            return Ok(self.shared.store.check_readable(id.as_str())?);
        };
        if let Some(group) = &record.group {
            return Err(Error::Invalid {
                field: "snapshot_id",
                value: format!(
                    "{id}, a member of group snapshot {group}: call DeleteVolumeGroupSnapshot for the group"
                ),
                want: "a snapshot that can be deleted alone".into(),
            });
        }
        self.histories.hold([&record.volume]).delete(&record)
    }

    /// Lists snapshots. For an unknown id the list is empty, as the spec says.
    pub fn list(&self, request: &PageRequest, filter: &SnapshotFilter) -> Result<Page<SnapshotRecord>> {
        let (limit, after) = (request.limit()?, request.after::<SnapshotId>()?);
        self.shared.store.check_alive()?;
        let volume = optional::<VolumeId>(&filter.source_volume_id);
        let only = optional::<SnapshotId>(&filter.snapshot_id);
        let (Ok(volume), Ok(only)) = (volume, only) else {
            return Ok(Page { entries: Vec::new(), next_token: String::new() });
        };
        let token = |record: &SnapshotRecord| record.id.to_string();
        Ok(self.shared.store.read(|index| match (only, volume) {
            (Some(id), volume) => {
                let found = index.snapshot(&id).filter(|record| volume.is_none_or(|id| record.volume == id));
                page(found.into_iter(), limit, token)
            }
            (None, Some(volume)) => {
                let mut of_volume: Vec<_> = index.chain(&volume).cloned().collect();
                of_volume.sort_unstable_by(|a, b| a.id.cmp(&b.id));
                let behind =
                    of_volume.into_iter().filter(|record| after.as_ref().is_none_or(|id| record.id > *id));
                page(behind, limit, token)
            }
            (None, None) => page(index.snapshots_after(after.as_ref()).cloned(), limit, token),
        }))
    }
}
