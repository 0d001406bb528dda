//! The records in memory, by every key that calls look them up with.

use std::collections::{BTreeMap, HashMap};
use std::ops::Bound;
use std::sync::Arc;

use super::records::{SnapshotRecord, VolumeRecord};
use crate::base::{SnapshotId, VolumeId};

/// All records by id, by name, and snapshots by their volume.
#[derive(Debug, Default)]
pub struct Index {
    volumes: BTreeMap<VolumeId, Arc<VolumeRecord>>,
    volume_names: HashMap<String, VolumeId>,
    snapshots: BTreeMap<SnapshotId, Arc<SnapshotRecord>>,
    snapshot_names: HashMap<String, SnapshotId>,
    /// The snapshots of each volume, oldest first.
    chains: HashMap<VolumeId, BTreeMap<u64, SnapshotId>>,
}

impl Index {
    pub(super) fn add_volume(&mut self, record: Arc<VolumeRecord>) {
        self.volume_names.insert(record.name.clone(), record.id.clone());
        self.volumes.insert(record.id.clone(), record);
    }

    pub(super) fn remove_volume(&mut self, id: &VolumeId) {
        if let Some(record) = self.volumes.remove(id) {
            self.volume_names.remove(&record.name);
        }
    }

    pub(super) fn add_snapshot(&mut self, record: Arc<SnapshotRecord>) {
        self.snapshot_names.insert(record.name.clone(), record.id.clone());
        let chain = self.chains.entry(record.volume.clone()).or_default();
        chain.insert(record.sequence, record.id.clone());
        self.snapshots.insert(record.id.clone(), record);
    }

    /// Whether another snapshot has this one's place in the order of its volume.
    pub(super) fn has_sequence(&self, record: &SnapshotRecord) -> bool {
        self.chains.get(&record.volume).is_some_and(|chain| chain.contains_key(&record.sequence))
    }

    pub(super) fn remove_snapshot(&mut self, id: &SnapshotId) {
        let Some(record) = self.snapshots.remove(id) else { return };
        self.snapshot_names.remove(&record.name);
        if let Some(chain) = self.chains.get_mut(&record.volume) {
            chain.remove(&record.sequence);
            if chain.is_empty() {
                self.chains.remove(&record.volume);
            }
        }
    }

    /// A volume by id.
    pub fn volume(&self, id: &VolumeId) -> Option<Arc<VolumeRecord>> {
        self.volumes.get(id).cloned()
    }

    /// A volume by the name the CO gave it.
    pub fn volume_named(&self, name: &str) -> Option<Arc<VolumeRecord>> {
        self.volume(self.volume_names.get(name)?)
    }

    /// Volumes in the order of their ids, from behind `after` on. An id that is gone meanwhile
    /// still marks its place.
    pub fn volumes_after(&self, after: Option<&VolumeId>) -> impl Iterator<Item = &Arc<VolumeRecord>> {
        self.volumes.range((behind(after), Bound::Unbounded)).map(|(_, record)| record)
    }

    /// A snapshot by id.
    pub fn snapshot(&self, id: &SnapshotId) -> Option<Arc<SnapshotRecord>> {
        self.snapshots.get(id).cloned()
    }

    /// A snapshot by the name the CO gave it.
    pub fn snapshot_named(&self, name: &str) -> Option<Arc<SnapshotRecord>> {
        self.snapshot(self.snapshot_names.get(name)?)
    }

    /// Snapshots in the order of their ids, from behind `after` on.
    pub fn snapshots_after(&self, after: Option<&SnapshotId>) -> impl Iterator<Item = &Arc<SnapshotRecord>> {
        self.snapshots.range((behind(after), Bound::Unbounded)).map(|(_, record)| record)
    }

    /// The snapshots of a volume, oldest first.
    pub fn chain(&self, volume: &VolumeId) -> impl DoubleEndedIterator<Item = &Arc<SnapshotRecord>> {
        let ids = self.chains.get(volume).into_iter().flat_map(BTreeMap::values);
        ids.filter_map(|id| self.snapshots.get(id))
    }
}

fn behind<K>(after: Option<&K>) -> Bound<&K> {
    after.map_or(Bound::Unbounded, Bound::Excluded)
}
