//! The history of a volume, locked.

use std::path::Path;
use std::sync::Arc;

use crate::driver::error::Result;
use crate::driver::locks::{LockKey, OpGuard};
use crate::driver::shared::Shared;
use crate::driver::snapshots::queue::Queue;
use crate::store::{self, Draft, GroupDraft, GroupRecord, SnapshotRecord};
use base::{DraftFile, VolumeId};
use cbt::{FreshTable, MapHeader};
use files::durable;

/// The snapshots of all volumes, and how they are linked.
#[derive(Debug)]
pub(in crate::driver) struct Histories {
    pub(in crate::driver) shared: Arc<Shared>,
    /// Snapshots that wait to be hashed.
    pub(in crate::driver) queue: Arc<Queue>,
    /// What is hashed of them, and not recorded yet.
    pub(in crate::driver) fresh: FreshTable,
}

/// The histories of one or more volumes, locked: no other thread changes them.
pub(in crate::driver) struct History<'h> {
    pub(super) histories: &'h Histories,
    /// Declared, and so dropped, before `to_remove`: freeing bytes may take long, and needs no lock.
    _held: Vec<OpGuard>,
    /// Removed objects whose files still exist.
    pub(super) to_remove: Vec<Draft>,
}

impl Histories {
    /// Locks the histories of these volumes, and waits until they are free. Several are locked in the order of their ids, so
    /// two callers cannot block each other.
    pub(in crate::driver) fn hold<'v>(&self, volumes: impl IntoIterator<Item = &'v VolumeId>) -> History<'_> {
        let mut volumes: Vec<_> = volumes.into_iter().collect();
        volumes.sort_unstable();
        volumes.dedup();
        let held =
            volumes.into_iter().map(|id| self.shared.locks.wait(LockKey::History(id.clone()))).collect();
        History { histories: self, _held: held, to_remove: Vec::new() }
    }

    /// Nothing is hashed of a snapshot any more: it is removed.
    pub(super) fn forget(&self, record: &SnapshotRecord) {
        self.queue.forget(record);
        self.fresh.forget(&record.id);
    }
}

impl History<'_> {
    /// Commits a snapshot, and queues it to be hashed.
    pub(in crate::driver) fn add(
        &mut self,
        draft: Draft,
        record: SnapshotRecord,
        pending: u64,
    ) -> Result<Arc<SnapshotRecord>> {
        let record = self.histories.shared.store.commit_snapshot(draft, record)?;
        self.histories.queue.add(&record, pending);
        // The snapshot before may have been kept only until this one.
        self.apply_retention(&record.volume);
        Ok(record)
    }

    /// Commits a group snapshot with its members. Each member comes with the number of its bytes to hash.
    pub(in crate::driver) fn add_group(
        &mut self,
        draft: GroupDraft,
        record: GroupRecord,
        members: Vec<(SnapshotRecord, u64)>,
    ) -> Result<(Arc<GroupRecord>, Vec<Arc<SnapshotRecord>>)> {
        let (members, pending): (Vec<_>, Vec<_>) = members.into_iter().unzip();
        let made: Vec<_> = members.iter().cloned().map(Arc::new).collect();
        let record = self.histories.shared.store.commit_group(draft, record, members)?;
        for (member, pending) in made.iter().zip(pending) {
            self.histories.queue.add(member, pending);
            self.apply_retention(&member.volume);
        }
        Ok((record, made))
    }

    /// Deletes a snapshot. It is retained if it may still be the base of a delta, and removed otherwise.
    pub(in crate::driver) fn delete(&mut self, record: &SnapshotRecord) -> Result<()> {
        let histories = self.histories;
        if !(histories.is_worth_keeping(record) && was_kept(histories.shared.store.retain_snapshot(record))?)
        {
            self.merge_into_next(record);
            self.to_remove.push(histories.shared.store.remove_snapshot(&record.id)?);
            histories.forget(record);
        }
        self.apply_retention(&record.volume);
        Ok(())
    }

    /// Deletes a group snapshot in the same way, with all its members at once.
    pub(in crate::driver) fn delete_group(
        &mut self,
        group: &GroupRecord,
        members: &[Arc<SnapshotRecord>],
    ) -> Result<()> {
        let histories = self.histories;
        let is_wanted = members.iter().any(|member| histories.is_worth_keeping(member));
        if !(is_wanted && was_kept(histories.shared.store.retain_group(&group.id))?) {
            for member in members {
                self.merge_into_next(member);
            }
            self.to_remove.push(histories.shared.store.remove_group(&group.id)?);
            members.iter().for_each(|member| histories.forget(member));
        }
        for member in members {
            self.apply_retention(&member.volume);
        }
        Ok(())
    }

    /// Replaces the `pending` map of a snapshot by the one that `write` writes, after `done` bytes were hashed. Returns
    /// whether the snapshot still exists.
    pub(in crate::driver) fn replace_pending(
        &mut self,
        record: &SnapshotRecord,
        done: u64,
        write: impl FnOnce(&Path) -> Result<()>,
    ) -> Result<bool> {
        let Histories { shared, queue, fresh: _ } = self.histories;
        if shared.store.read(|index| index.known(&record.id)).is_none() {
            return Ok(false);
        }
        let pending = shared.store.snapshot_dir(record).pending();
        let fresh = DraftFile::New.of(&pending);
        durable::prepare(&fresh, write)?;
        durable::replace_soon_by(&fresh, &pending)?;
        queue.progress(record, done);
        Ok(true)
    }

    /// Removes unfinished maps of a snapshot that an earlier driver left. Otherwise they might stay for ever.
    pub(in crate::driver) fn remove_drafts(&mut self, record: &SnapshotRecord) {
        for draft in self.histories.shared.store.snapshot_dir(record).map_drafts() {
            if let Err(error) = durable::remove(&draft) {
                tracing::warn!(path = %draft.display(), error = base::report(&error), "a draft could not be removed");
            }
        }
    }
}

/// The header of a snapshot's maps, except `changed`.
pub(in crate::driver) fn header(record: &SnapshotRecord) -> MapHeader {
    MapHeader {
        block_size: record.block_size,
        blocks: record.block_size.blocks_in(record.capacity),
        relative_to: None,
    }
}

/// Whether a deleted snapshot could be retained. A full pool has no space for the file that marks it as deleted. Then it
/// is removed: deletions must succeed, since they are what frees space.
fn was_kept(outcome: Result<(), store::Error>) -> Result<bool> {
    match outcome {
        Ok(()) => Ok(true),
        Err(store::Error::Sys(error)) if error.is_no_space() => Ok(false),
        Err(error) => Err(error.into()),
    }
}
