//! Deleted snapshots are kept as a base for deltas (`--retain-deleted`), so that a backup tool that deletes each
//! snapshot after use still gets the next delta, at low cost.
//!
//! The record, maps and hashes of a deleted snapshot stay. The hashing thread frees its bytes (`history/healing.rs`)
//! once they are hashed. On a pool that compares bytes, the bytes of a volume's newest snapshot also stay until the next
//! one is taken.

use std::time::Duration;

use super::super::Result;
use super::{Histories, History};
use crate::store::{self, Retained, SnapshotRecord};
use base::{VolumeId, age};
use cbt::MapFile;

/// `--retain-deleted COUNT[:AGE]`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Retention {
    /// The number of deleted snapshots kept for each volume; 0 for none.
    pub count: usize,
    /// How long they are kept.
    pub age: Duration,
}

impl std::str::FromStr for Retention {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let want = "a count, or a count and an age such as 8:30d (units s, m, h, d)";
        let (count, age) = match text.split_once(':') {
            Some((count, text)) => (count, age::parse(text).ok_or(want)?),
            None => (text, Retention::default().age),
        };
        Ok(Retention { count: count.parse().map_err(|_| want)?, age })
    }
}

impl Default for Retention {
    fn default() -> Self {
        Retention { count: 8, age: Duration::from_secs(30 * 24 * 3600) }
    }
}

impl std::fmt::Display for Retention {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}:{}", self.count, age::format(self.age))
    }
}

impl Histories {
    /// Whether a snapshot that is about to be deleted may still be needed as the base of a delta.
    pub(in super::super) fn is_worth_keeping(&self, record: &SnapshotRecord) -> bool {
        self.shared.config.retain.count > 0
            && record.tracking
            && self.may_be_a_base(record)
            && !self.is_short()
    }

    /// Whether the pool is short of space, so that nothing is kept that is not needed.
    fn is_short(&self) -> bool {
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
    pub(in super::super) fn frees_bytes_of(&self, record: &SnapshotRecord) -> bool {
        let (is_retained, newest) = self.shared.store.read(|index| {
            let newest = index.line(&record.volume).next_back().map(|newest| newest.id.clone());
            (index.retained(&record.id).is_some(), newest)
        });
        let is_next_base = newest.as_ref() == Some(&record.id) && self.shared.pool().compares_bytes();
        is_retained && !is_next_base && self.shared.store.snapshot_dir(record).bytes().exists()
    }

    /// The number of bytes of a snapshot that are still to be hashed; its capacity if the map cannot be read.
    pub(in super::super) fn pending_bytes(&self, record: &SnapshotRecord) -> u64 {
        let path = self.shared.store.snapshot_dir(record).pending();
        let count = MapFile::open(&path).and_then(|map| map.count());
        count.map_or(record.capacity, |count| count * record.block_size.bytes())
    }
}

/// Whether a deleted snapshot could be retained. A full pool has no space for the file that marks it as deleted. Then it
/// is removed: deletions must succeed, since they are what frees space.
pub(super) fn was_kept(outcome: Result<(), store::Error>) -> Result<bool> {
    match outcome {
        Ok(()) => Ok(true),
        Err(store::Error::Sys(error)) if error.is_no_space() => Ok(false),
        Err(error) => Err(error.into()),
    }
}

impl History<'_> {
    /// Forgets the retained snapshots of a volume that exceed `--retain-deleted`, and queues those whose bytes are no longer
    /// needed: the hashing thread frees the bytes once they are hashed.
    pub(in super::super) fn apply_retention(&mut self, volume: &VolumeId) {
        let histories = self.histories;
        let (retained, newest) = histories.shared.store.read(|index| {
            let line = || index.line(volume);
            let retained: Vec<Retained> = line().filter_map(|record| index.retained(&record.id)).collect();
            (retained, line().next_back().map(|record| record.id.clone()))
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
        self.hand_on(record);
        self.to_remove.push(self.histories.shared.store.remove_retained(record)?);
        self.histories.forget(record);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_retention_is_a_count_and_an_age() {
        let day = Duration::from_secs(24 * 3600);
        for (text, count, age) in
            [("0", 0, 30 * day), ("8:30d", 8, 30 * day), ("3:90s", 3, Duration::from_secs(90))]
        {
            assert_eq!(text.parse(), Ok(Retention { count, age }), "{text}");
        }
        for bad in ["", ":", "8:", "x", "-1", "8:30", "8:d", "8:30y", "8:30d:1"] {
            assert!(bad.parse::<Retention>().is_err(), "{bad}");
        }
        assert_eq!(Retention::default().to_string(), "8:30d");
    }
}
