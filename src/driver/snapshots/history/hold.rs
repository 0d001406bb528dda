//! The history of a volume: its snapshots in the order they were taken, deleted ones that are retained among them, and
//! the maps that link each to its parent. Code that adds to it, deletes from it or changes a link does so through a
//! [`History`], which holds the lock; readers need none, since files are replaced by rename and the index changes
//! after them.
//!
//! - `parent.rs`: the snapshot that a new one builds on. `driver/fill.rs` writes the link to it into the draft; the commit
//!   makes it count.
//! - `links.rs`: the way from one snapshot to a later one, and how links are merged when a snapshot between is removed.
//! - `retention.rs`: which deleted snapshots stay, and whose bytes are freed.
//! - `healing.rs`: maps and hashes that are damaged or wrong are made again from the data.

mod healing;
mod links;
mod parent;
mod retention;

use std::path::Path;
use std::sync::Arc;

use super::Result;
use super::locks::{Key, OpGuard};
use super::queue::Queue;
use super::shared::Shared;
use crate::store::{Draft, GroupDraft, GroupRecord, SnapshotRecord};
use base::{DraftFile, VolumeId};
use cbt::{FreshTable, MapHeader};
use files::durable;
pub(super) use parent::Parent;
pub use retention::Retention;

/// The snapshots of all volumes, and how they are linked.
#[derive(Debug)]
pub(super) struct Histories {
    pub(super) shared: Arc<Shared>,
    /// Snapshots that wait to be hashed.
    pub(super) queue: Arc<Queue>,
    /// What is hashed of them, and not recorded yet.
    pub(super) fresh: FreshTable,
}

/// The histories of one or more volumes, locked: no other thread changes them.
pub(super) struct History<'h> {
    histories: &'h Histories,
    /// Declared, and so dropped, before `to_remove`: freeing bytes may take long, and needs no lock.
    _held: Vec<OpGuard>,
    /// Removed objects whose files still exist.
    to_remove: Vec<Draft>,
}

impl Histories {
    /// Locks the histories of these volumes, and waits until they are free. Several are locked in the order of their ids, so
    /// two callers cannot block each other.
    pub(super) fn hold<'v>(&self, volumes: impl IntoIterator<Item = &'v VolumeId>) -> History<'_> {
        let mut volumes: Vec<_> = volumes.into_iter().collect();
        volumes.sort_unstable();
        volumes.dedup();
        let held = volumes.into_iter().map(|id| self.shared.locks.wait(Key::History(id.clone()))).collect();
        History { histories: self, _held: held, to_remove: Vec::new() }
    }

    /// Nothing is hashed of a snapshot any more: it is removed.
    fn forget(&self, record: &SnapshotRecord) {
        self.queue.forget(record);
        self.fresh.forget(&record.id);
    }
}

impl History<'_> {
    /// Commits a snapshot, and queues it to be hashed.
    pub(super) fn add(
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
    pub(super) fn add_group(
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
    pub(super) fn delete(&mut self, record: &SnapshotRecord) -> Result<()> {
        let histories = self.histories;
        if !(histories.is_worth_keeping(record)
            && retention::was_kept(histories.shared.store.retain_snapshot(record))?)
        {
            self.hand_on(record);
            self.to_remove.push(histories.shared.store.remove_snapshot(&record.id)?);
            histories.forget(record);
        }
        self.apply_retention(&record.volume);
        Ok(())
    }

    /// Deletes a group snapshot in the same way, with all its members at once.
    pub(super) fn delete_group(
        &mut self,
        group: &GroupRecord,
        members: &[Arc<SnapshotRecord>],
    ) -> Result<()> {
        let histories = self.histories;
        let is_wanted = members.iter().any(|member| histories.is_worth_keeping(member));
        if !(is_wanted && retention::was_kept(histories.shared.store.retain_group(&group.id))?) {
            for member in members {
                self.hand_on(member);
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
    pub(super) fn replace_pending(
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
    pub(super) fn remove_drafts(&mut self, record: &SnapshotRecord) {
        for draft in self.histories.shared.store.snapshot_dir(record).map_drafts() {
            if let Err(error) = durable::remove(&draft) {
                tracing::warn!(path = %draft.display(), error = base::report(&error), "a draft could not be removed");
            }
        }
    }
}

/// The header of a snapshot's maps, except `changed`.
pub(super) fn header(record: &SnapshotRecord) -> MapHeader {
    MapHeader {
        block_size: record.block_size,
        blocks: record.block_size.blocks_in(record.capacity),
        relative_to: None,
    }
}
