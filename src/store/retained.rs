//! Deleted snapshots kept as a base for deltas: their records and maps, and their bytes for as long
//! as the pool needs them. No call lists them.

use std::fs;
use std::sync::PoisonError;

use super::{Damage, Deleted, Draft, Error, Index, Result, Retained, SnapshotRecord, Store, Timestamp};
use super::{decode, encode, entries, read_named};
use crate::sys::tree;
use base::{GroupDir, GroupId, ObjectDir, PoolDir, SnapshotId};
use files::Context;
use files::durable;

impl Store {
    /// Makes a snapshot cease to exist for all but deltas from it.
    ///
    /// 1. Write and sync when: a crash leaves a snapshot that exists, and a file that the next deletion
    ///    replaces.
    /// 2. Rename it into `retained/` and sync: from here on it is deleted, also after a crash.
    pub fn retain_snapshot(&self, record: &SnapshotRecord) -> Result<()> {
        let (from, to) = (self.dir.snapshot(&record.id), self.dir.retained_snapshot(&record.id));
        let at = deletion_of(record.created);
        mark(&from, at)?;
        durable::rename(from.path(), to.path())?;
        self.write(|index| index.retain(&record.id, at));
        Ok(())
    }

    /// The same of a group: one rename deletes all its members.
    pub fn retain_group(&self, id: &GroupId, members: &[SnapshotId]) -> Result<()> {
        let (from, to) = (self.dir.group(id), self.dir.retained_group(id));
        let at = deletion_of(
            self.read(|index| index.group(id)).map_or_else(Timestamp::now, |group| group.created),
        );
        for member in members {
            mark(&from.member(member), at)?;
        }
        durable::rename(from.path(), to.path())?;
        self.write(|index| index.retain_group(id, at));
        Ok(())
    }

    /// Forgets a retained snapshot; its files are freed when the answer is dropped. The last member of a group
    /// takes the group with it, in the same rename; so one member leaves at a time, or the directory is taken from under
    /// the one that leaves.
    pub fn remove_retained(&self, record: &SnapshotRecord) -> Result<Draft> {
        let forget = |index: &mut Index| index.remove_retained(&record.id);
        if let Some(group) = &record.group {
            let _leaving = self.leaving.lock().unwrap_or_else(PoisonError::into_inner);
            let dir = self.dir.retained_group(group);
            if entries(&dir.members())?.len() == 1 {
                return self.remove(group.as_str(), &ObjectDir::new(dir.path()), forget);
            }
            return self.remove(record.id.as_str(), &self.snapshot_dir(record), forget);
        }
        self.remove(record.id.as_str(), &self.snapshot_dir(record), forget)
    }

    /// Takes the bytes of a retained snapshot, which are freed when the answer is dropped; `None` when they
    /// are gone already. Its maps stay.
    pub fn take_bytes(&self, record: &SnapshotRecord) -> Result<Option<Draft>> {
        let bytes = ObjectDir::new(self.snapshot_dir(record).bytes());
        match bytes.path().exists() {
            true => self.remove(&format!("{}.bytes", record.id), &bytes, |_| ()).map(Some),
            false => Ok(None),
        }
    }
}

/// Removes deleted groups without members: the last two went at the same time, or a damaged one by hand. By way of
/// `staging/`: half removed, a group would be taken for a snapshot that cannot be read.
pub(super) fn remove_empty(pool: &PoolDir) -> Result<()> {
    for path in entries(&pool.retained())? {
        let members = GroupDir::new(&path).members();
        if members.exists() && entries(&members)?.is_empty() {
            let doomed = pool.staging().join(path.file_name().unwrap_or_default());
            durable::rename(&path, &doomed)?;
            tree::remove(&doomed)?;
        }
    }
    Ok(())
}

/// Now, for an object of that age. None is deleted before it is made: a clock that says so went backwards, and the
/// time it is kept for would be over as soon as the clock is right again.
fn deletion_of(created: Timestamp) -> Timestamp {
    Timestamp::now().max(created)
}

fn mark(dir: &ObjectDir, at: Timestamp) -> Result<()> {
    Ok(durable::replace(&dir.deleted(), &encode(&Deleted { version: Deleted::VERSION, at }))?)
}

/// Reads every retained snapshot of the pool, and returns those that cannot be read. They are left alone: no
/// call needs them.
pub(super) fn read_all(pool: &PoolDir, index: &mut Index) -> Result<Vec<Damage>> {
    let mut damaged = Vec::new();
    for path in entries(&pool.retained())? {
        let group = GroupDir::new(&path);
        let dirs = match group.members().exists() {
            true => entries(&group.members())?,
            false => vec![path],
        };
        for path in dirs {
            match read(&ObjectDir::new(&path)) {
                Ok(Retained { record, .. }) if index.has_sequence(&record) => {
                    let error = Error::DuplicateSequence { path: path.clone(), sequence: record.sequence };
                    damaged.push(Damage { path, error });
                }
                Ok(retained) => index.add_retained(retained),
                Err(error) => {
                    super::keep_place(index, &path);
                    damaged.push(Damage { path, error });
                }
            }
        }
    }
    Ok(damaged)
}

fn read(dir: &ObjectDir) -> Result<Retained> {
    let record: SnapshotRecord = read_named(dir.path(), |record: &SnapshotRecord| record.id.as_str())?;
    let path = dir.deleted();
    let Deleted { at, .. } = decode(&path, &fs::read(&path).context("read", &path)?)?;
    Ok(Retained::new(record.into(), at))
}
