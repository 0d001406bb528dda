//! Deleted snapshots are kept as a base for deltas (`--retain-deleted`), so that a backup tool that deletes each
//! snapshot after use still gets the next delta, at low cost.
//!
//! The record, maps and hashes of a deleted snapshot stay. The hashing thread frees its bytes (`history/healing.rs`)
//! once they are hashed. On a pool that compares bytes, the bytes of a volume's newest snapshot also stay until the next
//! one is taken.

use crate::driver::error::Result;
use crate::driver::snapshots::history::hold::{Histories, History};
use crate::store::{Retained, SnapshotRecord};
use base::VolumeId;
use cbt::MapFile;

impl Histories {
    /// Whether a snapshot that is about to be deleted may still be needed as the base of a delta.
    pub(in crate::driver) fn is_worth_keeping(&self, record: &SnapshotRecord) -> bool {
        self.shared.config.retain.count > 0
            && record.tracking
            && self.may_be_a_base(record)
            && !self.is_short()
    }

    /// Whether the pool is short of space, so that nothing is kept that is not needed.
    pub(super) fn is_short(&self) -> bool {
        matches!(self.shared.open_pool.shortage(), Ok(Some(_)))
    }

    /// Whether its volume has a later snapshot, or may get one.
    fn may_be_a_base(&self, record: &SnapshotRecord) -> bool {
        self.shared.store.read(|index| {
            let newest = index.chain(&record.volume).next_back();
            index.volume(&record.volume).is_some()
                || newest.is_some_and(|newest| newest.sequence > record.sequence)
        })
    }

    /// Whether the bytes of a snapshot exist, and are no longer needed once they are hashed.
    pub(in crate::driver) fn frees_bytes_of(&self, record: &SnapshotRecord) -> bool {
        let (is_retained, newest) = self.shared.store.read(|index| {
            let newest = index.line(&record.volume).next_back().map(|newest| newest.id.clone());
            (index.retained(&record.id).is_some(), newest)
        });
        let is_next_base = newest.as_ref() == Some(&record.id) && self.shared.pool().compares_bytes();
        is_retained && !is_next_base && self.shared.store.snapshot_dir(record).bytes().exists()
    }

    /// The number of bytes of a snapshot that are still to be hashed; its capacity if the map cannot be read.
    pub(in crate::driver) fn pending_bytes(&self, record: &SnapshotRecord) -> u64 {
        let path = self.shared.store.snapshot_dir(record).pending();
        let count = MapFile::open(&path).and_then(|map| map.count());
        count.map_or(record.capacity, |count| count * record.block_size.bytes())
    }
}

impl History<'_> {
    /// Forgets the retained snapshots of a volume that exceed `--retain-deleted`, and queues those whose bytes are no longer
    /// needed: the hashing thread frees the bytes once they are hashed.
    pub(in crate::driver) fn apply_retention(&mut self, volume: &VolumeId) {
        let histories = self.histories;
        let (retained, newest) = histories.shared.store.read(|index| {
            let retained: Vec<Retained> = index.retained_of(volume).cloned().collect();
            (retained, index.line(volume).next_back().map(|record| record.id.clone()))
        });
        let limits = histories.shared.config.retain;
        let short = !retained.is_empty() && histories.is_short();
        let is_next_base = |record: &SnapshotRecord| newest.as_ref() == Some(&record.id);
        let is_over = |kept: &Retained| kept.age() > limits.age && !is_next_base(&kept.record);
        let is_wanted = |kept: &Retained| {
            !short && kept.record.tracking && histories.may_be_a_base(&kept.record) && !is_over(kept)
        };
        let wanted: Vec<bool> = retained.iter().map(is_wanted).collect();
        // Snapshots that are removed anyway do not count.
        let mut beyond = wanted.iter().filter(|wanted| **wanted).count().saturating_sub(limits.count);
        for (Retained { record, .. }, wanted) in retained.iter().zip(wanted) {
            let stays = wanted && beyond == 0;
            if wanted {
                beyond = beyond.saturating_sub(1);
            }
            if stays {
                if histories.frees_bytes_of(record) {
                    histories.queue.add(record, histories.pending_bytes(record));
                }
            } else if let Err(error) = self.forget(record) {
                let error = base::report(&error);
                tracing::warn!(snapshot_id = %record.id, error, "a deleted snapshot could not be removed, it stays for now");
            }
        }
    }

    /// Removes a retained snapshot.
    fn forget(&mut self, record: &SnapshotRecord) -> Result<()> {
        self.merge_into_next(record);
        self.to_remove.push(self.histories.shared.store.remove_retained(record)?);
        self.histories.forget(record);
        Ok(())
    }
}
