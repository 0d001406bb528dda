//! Group snapshots on disk: one directory a group, its members inside, so that one rename makes all
//! of them exist and one rename ends them.

use std::sync::Arc;

use super::{Damage, Draft, Error, GroupRecord, Index, Result, SnapshotRecord, Store};
use super::{encode, entries, read_named, seal};
use base::{GroupDir, GroupId, ObjectDir, SnapshotId};
use files::durable;

/// A directory in `staging/` in which a group is being made. Its files go when it is dropped, unless
/// it was committed.
#[derive(Debug)]
#[must_use = "dropping it removes the files"]
pub struct GroupDraft {
    draft: Draft,
    dir: GroupDir,
}

impl GroupDraft {
    /// Starts a member, and returns the files of the snapshot to be.
    pub fn member(&self, id: &SnapshotId) -> Result<ObjectDir> {
        let dir = self.dir.member(id);
        durable::make_dir(dir.path())?;
        Ok(dir)
    }
}

impl Store {
    /// Starts a group.
    pub fn draft_group(&self, id: &GroupId) -> Result<GroupDraft> {
        let dir = GroupDir::new(self.dir.staging().join(id.as_str()));
        durable::make_dir(dir.path())?;
        let draft = self.draft_at(ObjectDir::new(dir.path()));
        durable::make_dir(&dir.members())?;
        Ok(GroupDraft { draft, dir })
    }

    /// Commits a group whose members' bytes and maps are written and synced.
    ///
    /// 1. Write and sync each member's record, and sync its directories: a crash leaves a directory in
    ///    `staging/`, removed at start.
    /// 2. Write and sync the group's record, then sync `members/` and the group's directory, so that no
    ///    entry is missing after the rename.
    /// 3. Rename the group into place and sync both parents: the commit of all members at once.
    pub fn commit_group(
        &self,
        group: GroupDraft,
        record: GroupRecord,
        members: Vec<SnapshotRecord>,
    ) -> Result<Arc<GroupRecord>> {
        let GroupDraft { mut draft, dir } = group;
        for member in &members {
            seal(&dir.member(&member.id), member)?;
        }
        durable::write_new(&dir.record(), &encode(&record))?;
        durable::sync_dir(&dir.members())?;
        durable::sync_dir(dir.path())?;
        durable::rename(dir.path(), self.dir.group(&record.id).path())?;
        draft.committed = true;
        let record = Arc::new(record);
        let members = members.into_iter().map(Arc::new).collect();
        self.write(|index| index.add_group(record.clone(), members));
        Ok(record)
    }

    /// Makes a group and its members cease to exist; their bytes are freed when the answer is dropped.
    pub fn remove_group(&self, id: &GroupId) -> Result<Draft> {
        let dir = ObjectDir::new(self.dir.group(id).path());
        self.remove(id.as_str(), &dir, |index| index.remove_group(id))
    }
}

/// Reads groups. One that is not whole is kept aside and named, its members with it.
pub(super) fn read_all(groups: &[GroupDir], index: &mut Index, damaged: &mut Vec<Damage>) {
    for dir in groups {
        let path = dir.path().to_owned();
        match read(dir, index) {
            Ok((record, members)) => index.add_group(record, members),
            Err(error) => {
                for member in entries(&dir.members()).unwrap_or_default() {
                    super::keep_place(index, &member);
                    let error = Error::GroupDamaged { path: path.clone() };
                    damaged.push(Damage { path: member, error });
                }
                damaged.push(Damage { path, error });
            }
        }
    }
}

fn read(dir: &GroupDir, index: &Index) -> Result<(Arc<GroupRecord>, Vec<Arc<SnapshotRecord>>)> {
    let record: GroupRecord = read_named(dir.path(), |record: &GroupRecord| record.id.as_str())?;
    let mut members = Vec::new();
    for id in &record.members {
        let files = dir.member(id);
        let member: SnapshotRecord = read_named(files.path(), |record: &SnapshotRecord| record.id.as_str())?;
        if member.group.as_ref() != Some(&record.id) {
            return Err(Error::Misplaced { path: files.record(), id: id.to_string() });
        }
        if index.has_sequence(&member) {
            return Err(Error::DuplicateSequence {
                path: files.path().to_owned(),
                sequence: member.sequence,
            });
        }
        members.push(Arc::new(member));
    }
    Ok((Arc::new(record), members))
}
