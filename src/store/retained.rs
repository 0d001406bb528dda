//! Deleted snapshots kept as a base for deltas: their records and maps, and their bytes for as long
//! as the pool needs them. They stay where they are; no call lists them.

use std::fs;
use std::path::{Path, PathBuf};

use super::{Damage, Deleted, Draft, Error, Index, Result, Retained, SnapshotRecord, Store, Timestamp};
use super::{decode, each, encode, entries, read_named};
use crate::sys::tree;
use base::{GroupDir, GroupId, ObjectDir, PoolDir};
use files::Context;
use files::durable;

impl Store {
    /// Whether a snapshot is deleted on disk, by whatever process: retained, or removed.
    pub fn is_gone(&self, record: &SnapshotRecord) -> bool {
        let dir = self.snapshot_dir(record);
        let group = record.group.as_ref().map(|group| self.dir.group(group).deleted());
        !dir.path().exists() || dir.deleted().exists() || group.is_some_and(|deleted| deleted.exists())
    }

    /// Makes a snapshot cease to exist for all but deltas from it. Its `deleted.json` is the commit.
    pub fn retain_snapshot(&self, record: &SnapshotRecord) -> Result<()> {
        let at = mark(&self.dir.snapshot(&record.id).deleted(), record.created)?;
        self.write(|index| index.retain(&record.id, at));
        Ok(())
    }

    /// The same of a group: one file deletes all its members.
    pub fn retain_group(&self, id: &GroupId) -> Result<()> {
        let created = self.read(|index| index.group(id)).map_or_else(Timestamp::now, |group| group.created);
        let at = mark(&self.dir.group(id).deleted(), created)?;
        self.write(|index| index.retain_group(id, at));
        Ok(())
    }

    /// Forgets a retained snapshot; its files are freed when the answer is dropped. The last member of a group
    /// takes the group with it, in the same rename; so one member leaves at a time, or the directory is taken from under
    /// the one that leaves.
    pub fn remove_retained(&self, record: &SnapshotRecord) -> Result<Draft> {
        let forget = |index: &mut Index| index.remove_retained(&record.id);
        if let Some(group) = &record.group {
            let _leaving = self.leaving.lock();
            let dir = self.dir.group(group);
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

/// Writes down that an object of that age was deleted now. No object is deleted before it is made: if the clock says so, it went
/// backwards, and the retention would end as soon as the clock is right again.
fn mark(path: &Path, created: Timestamp) -> Result<Timestamp> {
    let at = Timestamp::now().max(created);
    durable::create(path, &encode(&Deleted { version: Deleted::VERSION, at }))?;
    Ok(at)
}

/// Removes deleted groups without members: the last two were removed at the same time, or a damaged one by hand. Each
/// is moved to `staging/` first: a half-removed group would look like one that cannot be read.
pub(super) fn remove_empty(pool: &PoolDir) -> Result<()> {
    for path in entries(&pool.groups())? {
        let group = GroupDir::new(&path);
        if group.deleted().exists() && entries(&group.members())?.is_empty() {
            let gone = pool.staging().join(path.file_name().unwrap_or_default());
            durable::rename(&path, &gone)?;
            tree::remove(&gone)?;
        }
    }
    Ok(())
}

/// Reads the deleted ones of `snapshots` and `groups`, and returns those that cannot be read. They are left alone: no
/// call needs them.
pub(super) fn read_all(
    snapshots: Vec<PathBuf>,
    groups: &[GroupDir],
    index: &mut Index,
) -> Result<Vec<Damage>> {
    let mut damaged = Vec::new();
    let alone = snapshots.into_iter().map(|path| (ObjectDir::new(&path).deleted(), path));
    let mut all: Vec<_> = alone.collect();
    for group in groups {
        all.extend(entries(&group.members())?.into_iter().map(|path| (group.deleted(), path)));
    }
    for ((_, path), retained) in each(all, |(deleted, path)| read(path, deleted)) {
        match retained {
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
    Ok(damaged)
}

fn read(dir: &Path, deleted: &Path) -> Result<Retained> {
    let record: SnapshotRecord = read_named(dir, |record: &SnapshotRecord| record.id.as_str())?;
    let Deleted { at, .. } = decode(deleted, &fs::read(deleted).context("read", deleted)?)?;
    Ok(Retained::new(record.into(), at))
}
