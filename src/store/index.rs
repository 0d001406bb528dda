//! The records in memory, by every key that calls look them up with.

use std::collections::{BTreeMap, HashMap};
use std::ops::{Bound, RangeBounds};
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::records::{GroupRecord, SnapshotRecord, Timestamp, VolumeRecord};
use base::{GroupId, SnapshotId, VolumeId};

/// A deleted snapshot kept as a base for deltas.
#[derive(Clone, Debug)]
pub struct Retained {
    /// Its record.
    pub record: Arc<SnapshotRecord>,
    /// When it was deleted.
    pub deleted: Timestamp,
    /// When this process loaded it.
    pub seen: Instant,
}

impl Retained {
    pub(super) fn new(record: Arc<SnapshotRecord>, deleted: Timestamp) -> Self {
        Retained { record, deleted, seen: Instant::now() }
    }

    /// How long it has been kept. If `deleted` is in the future (wrong clock), count from when this process loaded it.
    pub fn age(&self) -> Duration {
        match self.deleted > Timestamp::now() {
            true => self.seen.elapsed(),
            false => self.deleted.age(),
        }
    }
}

/// Snapshots by their volume and sequence number.
type Lines = HashMap<VolumeId, BTreeMap<u64, SnapshotId>>;

fn enter(lines: &mut Lines, record: &SnapshotRecord) {
    lines.entry(record.volume.clone()).or_default().insert(record.sequence, record.id.clone());
}

fn leave(lines: &mut Lines, record: &SnapshotRecord) {
    if let Some(line) = lines.get_mut(&record.volume) {
        line.remove(&record.sequence);
        if line.is_empty() {
            lines.remove(&record.volume);
        }
    }
}

/// All records by id, by name, and snapshots by their volume.
#[derive(Debug, Default)]
pub struct Index {
    volumes: BTreeMap<VolumeId, Arc<VolumeRecord>>,
    volume_names: HashMap<String, VolumeId>,
    /// Ephemeral inline volumes, by the handle that kubelet gave them.
    ephemeral: HashMap<String, VolumeId>,
    snapshots: BTreeMap<SnapshotId, Arc<SnapshotRecord>>,
    snapshot_names: HashMap<String, SnapshotId>,
    /// Deleted snapshots kept as a base for deltas.
    retained: BTreeMap<SnapshotId, Retained>,
    /// The snapshots of each volume, oldest first, retained ones among them.
    lines: Lines,
    /// The retained ones alone.
    retained_lines: Lines,
    /// The last place of each volume that a snapshot has which cannot be read, and how many there are whose place
    /// is not known either.
    kept_places: (HashMap<VolumeId, u64>, u64),
    groups: BTreeMap<GroupId, Arc<GroupRecord>>,
    group_names: HashMap<String, GroupId>,
}

impl Index {
    pub(super) fn add_volume(&mut self, record: Arc<VolumeRecord>) {
        match &record.ephemeral {
            Some(handle) => self.ephemeral.insert(handle.clone(), record.id.clone()),
            None => self.volume_names.insert(record.name.clone(), record.id.clone()),
        };
        self.volumes.insert(record.id.clone(), record);
    }

    pub(super) fn remove_volume(&mut self, id: &VolumeId) {
        if let Some(record) = self.volumes.remove(id) {
            match &record.ephemeral {
                Some(handle) => self.ephemeral.remove(handle),
                None => self.volume_names.remove(&record.name),
            };
        }
    }

    pub(super) fn add_snapshot(&mut self, record: Arc<SnapshotRecord>) {
        if record.group.is_none() {
            self.snapshot_names.insert(record.name.clone(), record.id.clone());
        }
        enter(&mut self.lines, &record);
        self.snapshots.insert(record.id.clone(), record);
    }

    /// Whether another snapshot has this one's place in the order of its volume.
    pub(super) fn has_sequence(&self, record: &SnapshotRecord) -> bool {
        self.lines.get(&record.volume).is_some_and(|line| line.contains_key(&record.sequence))
    }

    pub(super) fn remove_snapshot(&mut self, id: &SnapshotId) {
        let Some(record) = self.snapshots.remove(id) else { return };
        if record.group.is_none() {
            self.snapshot_names.remove(&record.name);
        }
        leave(&mut self.lines, &record);
    }

    pub(super) fn add_retained(&mut self, retained: Retained) {
        enter(&mut self.lines, &retained.record);
        enter(&mut self.retained_lines, &retained.record);
        self.retained.insert(retained.record.id.clone(), retained);
    }

    /// A snapshot was deleted and is kept as a base for deltas.
    pub(super) fn retain(&mut self, id: &SnapshotId, deleted: Timestamp) {
        let Some(record) = self.snapshots.get(id).cloned() else { return };
        self.remove_snapshot(id);
        self.add_retained(Retained::new(record, deleted));
    }

    /// The same of a group with all its members.
    pub(super) fn retain_group(&mut self, id: &GroupId, deleted: Timestamp) {
        let Some(record) = self.groups.remove(id) else { return };
        self.group_names.remove(&record.name);
        for member in &record.members {
            self.retain(member, deleted);
        }
    }

    /// No new snapshot takes the place of one that cannot be read; `None` where that is not known.
    pub(super) fn keep_place(&mut self, place: Option<(VolumeId, u64)>) {
        let (known, unknown) = &mut self.kept_places;
        match place {
            Some((volume, sequence)) => {
                let last = known.entry(volume).or_default();
                *last = sequence.max(*last);
            }
            None => *unknown += 1,
        }
    }

    /// The place of the next snapshot of a volume.
    pub fn next_sequence(&self, volume: &VolumeId) -> u64 {
        let (known, unknown) = &self.kept_places;
        let last = self.line(volume).next_back().map_or(0, |last| last.sequence);
        last.max(known.get(volume).copied().unwrap_or(0)).saturating_add(unknown + 1)
    }

    pub(super) fn remove_retained(&mut self, id: &SnapshotId) {
        if let Some(Retained { record, .. }) = self.retained.remove(id) {
            leave(&mut self.lines, &record);
            leave(&mut self.retained_lines, &record);
        }
    }

    pub(super) fn add_group(&mut self, record: Arc<GroupRecord>, members: Vec<Arc<SnapshotRecord>>) {
        for member in members {
            self.add_snapshot(member);
        }
        self.group_names.insert(record.name.clone(), record.id.clone());
        self.groups.insert(record.id.clone(), record);
    }

    pub(super) fn remove_group(&mut self, id: &GroupId) {
        let Some(record) = self.groups.remove(id) else { return };
        self.group_names.remove(&record.name);
        for member in &record.members {
            self.remove_snapshot(member);
        }
    }

    /// A group snapshot by id.
    pub fn group(&self, id: &GroupId) -> Option<Arc<GroupRecord>> {
        self.groups.get(id).cloned()
    }

    /// A group snapshot by the name the CO gave it.
    pub fn group_named(&self, name: &str) -> Option<Arc<GroupRecord>> {
        self.group(self.group_names.get(name)?)
    }

    /// How many group snapshots there are.
    pub fn group_count(&self) -> usize {
        self.groups.len()
    }

    /// How many snapshots there are, members of groups among them.
    pub fn snapshot_count(&self) -> usize {
        self.snapshots.len()
    }

    /// How many volumes there are, ephemeral ones among them.
    pub fn volume_count(&self) -> usize {
        self.volumes.len()
    }

    /// A volume by id.
    pub fn volume(&self, id: &VolumeId) -> Option<Arc<VolumeRecord>> {
        self.volumes.get(id).cloned()
    }

    /// A volume by the name the CO gave it.
    pub fn volume_named(&self, name: &str) -> Option<Arc<VolumeRecord>> {
        self.volume(self.volume_names.get(name)?)
    }

    /// An ephemeral inline volume by the handle that kubelet gave it.
    pub fn ephemeral(&self, handle: &str) -> Option<Arc<VolumeRecord>> {
        self.volume(self.ephemeral.get(handle)?)
    }

    /// Volumes in the order of their ids, from the one after `after` on. A deleted id
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

    /// Snapshots in the order of their ids, from the one after `after` on.
    pub fn snapshots_after(&self, after: Option<&SnapshotId>) -> impl Iterator<Item = &Arc<SnapshotRecord>> {
        self.snapshots.range((behind(after), Bound::Unbounded)).map(|(_, record)| record)
    }

    /// A deleted snapshot kept as a base for deltas.
    pub fn retained(&self, id: &SnapshotId) -> Option<Retained> {
        self.retained.get(id).cloned()
    }

    /// How many deleted snapshots are kept as a base for deltas.
    pub fn retained_count(&self) -> usize {
        self.retained.len()
    }

    /// A snapshot by id, also a retained one.
    pub fn known(&self, id: &SnapshotId) -> Option<Arc<SnapshotRecord>> {
        self.snapshot(id).or_else(|| self.retained(id).map(|retained| retained.record))
    }

    /// The snapshots of a volume, oldest first, retained ones among them.
    pub fn line(&self, volume: &VolumeId) -> impl DoubleEndedIterator<Item = &Arc<SnapshotRecord>> {
        self.line_in(volume, ..)
    }

    /// Those of them with these sequence numbers.
    pub fn line_in(
        &self,
        volume: &VolumeId,
        sequences: impl RangeBounds<u64>,
    ) -> impl DoubleEndedIterator<Item = &Arc<SnapshotRecord>> {
        let places = self.lines.get(volume).map(|line| line.range(sequences));
        places.into_iter().flatten().filter_map(|(_, id)| {
            self.snapshots.get(id).or_else(|| self.retained.get(id).map(|retained| &retained.record))
        })
    }

    /// The deleted snapshots of a volume that are kept as a base for deltas, oldest first.
    pub fn retained_of(&self, volume: &VolumeId) -> impl Iterator<Item = &Retained> {
        let ids = self.retained_lines.get(volume).into_iter().flat_map(BTreeMap::values);
        ids.filter_map(|id| self.retained.get(id))
    }

    /// The snapshots of a volume by their sequence numbers, retained ones among them.
    pub fn places(&self, volume: &VolumeId) -> Option<&BTreeMap<u64, SnapshotId>> {
        self.lines.get(volume)
    }

    /// The volumes that have snapshots, also only retained ones; the volumes may be deleted.
    pub fn lines(&self) -> impl Iterator<Item = &VolumeId> {
        self.lines.keys()
    }

    /// The snapshots of a volume, oldest first.
    pub fn chain(&self, volume: &VolumeId) -> impl DoubleEndedIterator<Item = &Arc<SnapshotRecord>> {
        let ids = self.lines.get(volume).into_iter().flat_map(BTreeMap::values);
        ids.filter_map(|id| self.snapshots.get(id))
    }
}

fn behind<K>(after: Option<&K>) -> Bound<&K> {
    after.map_or(Bound::Unbounded, Bound::Excluded)
}
