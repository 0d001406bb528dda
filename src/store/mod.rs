//! The records: what exists, on disk and in memory. The directory is the database: an object
//! exists once its directory is renamed into place. A volume is deleted once it is renamed away, a snapshot once its
//! `deleted.json` is there. This layer reads no block.
//!
//! - Make: build in `staging/`, sync files and directories, rename into place, sync both parents. The rename is the commit.
//! - Remove: rename into `staging/`, sync, forget, then remove the files.
//! - A start empties `staging/`, except for transfers. A record that cannot be read is named in the log and withheld: its object is
//!   neither served nor reported as deleted, and a withheld snapshot keeps its sequence number.
//! - A file is replaced by a rename of a draft next to it (`DraftFile`). Drafts are never read.
//! - `state.json` is written before a mount or a freeze, in place, to two slots in turn: so a volume on a full pool can be
//!   published and unpublished, and every mount is explained after a crash.
//! - A new kind of file in the tree must be added to the audit (`deltapath check`).

mod error;
#[cfg(any(test, feature = "fuzz"))]
pub(crate) mod fuzz;
mod groups;
mod index;
mod json;
mod manifest;
mod records;
mod retained;
mod transfers;

pub use error::{Damage, Error};
pub use groups::GroupDraft;
pub use index::{Index, Retained};
pub use manifest::{LockedDir, Manifest};
pub use records::{
    AccessKind, Attached, Deleted, GroupRecord, Published, SnapshotRecord, Source, Staged, Timestamp, Tuning,
    TupleStyle, VolumeRecord, VolumeState,
};

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use parking_lot::{Mutex, RwLock};
use rayon::prelude::*;
use serde::Serialize;

use json::{decode, encode, read_named, read_optional, read_state, read_volume};

use crate::sys::reserve::Reserve;
use crate::sys::{slots, tree};
use base::{GroupDir, ObjectDir, PoolDir, SnapshotId, VolumeId};
use files::Context;
use files::durable;

/// Records that are read at once at a start.
const READERS: usize = 16;
/// So many records and fewer are read one after another: threads would take longer.
const FEW: usize = 100;

/// A result with the [`Error`] of this layer.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// All records of a pool.
#[derive(Debug)]
pub struct Store {
    dir: PoolDir,
    index: RwLock<Index>,
    damaged: Vec<Damage>,
    damaged_retained: Vec<Damage>,
    /// Why no record could be read: the pool's filesystem is dead.
    dead: Option<String>,
    reserve: Arc<Reserve>,
    /// Held while a member leaves a deleted group, which other members do under locks of their own.
    leaving: Mutex<()>,
}

/// A directory in `staging/` in which an object is being made, or out of which it is being removed.
/// Its files go when it is dropped, unless it was committed.
#[derive(Debug)]
#[must_use = "dropping it removes the files"]
pub struct Draft {
    dir: ObjectDir,
    committed: bool,
    reserve: Arc<Reserve>,
}

impl Draft {
    /// The files of the object to be.
    pub fn dir(&self) -> &ObjectDir {
        &self.dir
    }

    /// Leaves the files where they are.
    pub fn keep(mut self) {
        self.committed = true;
    }
}

impl Drop for Draft {
    fn drop(&mut self) {
        if self.committed {
            return;
        }
        // Tried twice: what stays takes room until the next start.
        let remove = || self.reserve.spend(|| tree::remove(self.dir.path()));
        // The first try may have removed a subvolume, see `tree::remove`.
        let again = || durable::sync_filesystem(self.dir.path()).and_then(|()| remove());
        if let Err(error) = remove().or_else(|_| again()) {
            tracing::warn!(path = %self.dir.path().display(), %error, "an incomplete object could not be removed; the next start removes it");
        }
        // Where this was not enough, what is removed next takes it.
        let _ = self.reserve.take();
    }
}

impl Store {
    /// Reads every record of the pool; what cannot be read is kept aside and named, and does not
    /// stop the rest. Empties `staging/`, except for transfers.
    pub fn open(dir: PoolDir) -> Result<Self> {
        let kinds = [dir.volumes(), dir.snapshots(), dir.groups(), dir.staging()];
        let missing: Vec<_> = kinds.iter().filter(|path| !path.exists()).collect();
        for path in &missing {
            durable::make_dir(path)?;
        }
        if !missing.is_empty() {
            durable::sync_dir(dir.path())?;
        }
        if let Err(error) = empty_staging(&dir) {
            // Its content belongs to no object. A pool that has become read-only can still be read.
            let cause = std::error::Error::source(&error).map(ToString::to_string).unwrap_or_default();
            tracing::error!(%error, cause, "objects that a crash left incomplete could not be removed; the next start tries again");
        }
        Self::survey(dir)
    }

    /// Removes objects that a crash left half made or half removed, except transfers. No other process may use the pool.
    pub fn clear_leftovers(&self) -> Result<()> {
        empty_staging(&self.dir)
    }

    /// Reads every record of the pool and changes nothing: also where a driver is at work.
    pub fn survey(dir: PoolDir) -> Result<Self> {
        let mut index = Index::default();
        let mut damaged = Vec::new();
        for (path, record) in each(entries(&dir.volumes())?, |path| read_volume(&ObjectDir::new(path))) {
            match record {
                Ok(record) => index.add_volume(Arc::new(record)),
                Err(error) => damaged.push(Damage { path, error }),
            }
        }
        // One that cannot be looked at is there: what was deleted does not come back.
        let is_there = |path: PathBuf| path.try_exists().unwrap_or(true);
        let groups = entries(&dir.groups())?.into_iter().map(GroupDir::new);
        let (deleted_groups, groups): (Vec<_>, Vec<_>) = groups.partition(|dir| is_there(dir.deleted()));
        let mut deleted = Vec::new();
        let live = |path: &PathBuf| match is_there(ObjectDir::new(path).deleted()) {
            true => None,
            false => Some(read_named::<SnapshotRecord>(path, |record| record.id.as_str())),
        };
        for (path, record) in each(entries(&dir.snapshots())?, live) {
            let Some(record) = record else {
                deleted.push(path);
                continue;
            };
            match record {
                Ok(record) if index.has_sequence(&record) => {
                    let error = Error::DuplicateSequence { path: path.clone(), sequence: record.sequence };
                    damaged.push(Damage { path, error });
                }
                Ok(record) => index.add_snapshot(Arc::new(record)),
                Err(error) => {
                    keep_place(&mut index, &path);
                    damaged.push(Damage { path, error });
                }
            }
        }
        groups::read_all(&groups, &mut index, &mut damaged);
        let damaged_retained = retained::read_all(deleted, &deleted_groups, &mut index)?;
        for damage in damaged.iter().chain(&damaged_retained) {
            tracing::error!(path = %damage.path.display(), error = base::report(&damage.error), "a record cannot be read; its object is not served");
        }
        let (index, dead, leaving) = (RwLock::new(index), None, Mutex::default());
        let reserve = Arc::new(Reserve::at(dir.reserve()));
        Ok(Store { dir, index, damaged, damaged_retained, dead, reserve, leaving })
    }

    /// The store of a pool whose filesystem no longer answers: it knows no object, and says so of each.
    pub fn of_dead(dir: PoolDir, why: &Error) -> Self {
        let cause = std::error::Error::source(why).map(ToString::to_string).unwrap_or_default();
        let (index, dead, leaving) = (RwLock::default(), Some(format!("{why}: {cause}")), Mutex::default());
        let reserve = Arc::new(Reserve::at(dir.reserve()));
        Store { dir, index, damaged: Vec::new(), damaged_retained: Vec::new(), dead, reserve, leaving }
    }

    /// Fails if no record could be read, because the pool's filesystem is dead.
    pub fn check_alive(&self) -> Result<()> {
        match &self.dead {
            Some(why) => Err(Error::Dead { path: self.dir.path().to_owned(), why: why.clone() }),
            None => Ok(()),
        }
    }

    /// Takes the room that deletions need on a full pool, unless it is held. Nothing new may be made without it.
    pub fn take_reserve(&self) -> Result<()> {
        Ok(self.reserve.take()?)
    }

    /// The objects whose records could not be read at start.
    pub fn damaged(&self) -> &[Damage] {
        &self.damaged
    }

    /// The deleted snapshots whose records could not be read at start: they are not used as a base.
    pub fn damaged_retained(&self) -> &[Damage] {
        &self.damaged_retained
    }

    /// Fails where the object of this id is there and its record could not be read: it is neither
    /// served nor gone.
    pub fn check_readable(&self, id: &str) -> Result<()> {
        self.check_alive()?;
        match self.damaged.iter().find(|damage| damage.path.file_name().is_some_and(|name| name == id)) {
            Some(damage) => {
                let record = ObjectDir::new(&damage.path).record();
                let remedy = damage.error.remedy(&record);
                Err(Error::Withheld { why: base::report(&damage.error), remedy })
            }
            None => Ok(()),
        }
    }

    /// The files of a snapshot: in a directory of its own, or in that of its group.
    pub fn snapshot_dir(&self, record: &SnapshotRecord) -> ObjectDir {
        match &record.group {
            None => self.dir.snapshot(&record.id),
            Some(group) => self.dir.group(group).member(&record.id),
        }
    }

    /// The paths of this pool.
    pub fn dir(&self) -> &PoolDir {
        &self.dir
    }

    /// Looks something up. The lock covers memory only: no I/O happens under it.
    pub fn read<T>(&self, look: impl FnOnce(&Index) -> T) -> T {
        look(&self.index.read())
    }

    fn write<T>(&self, change: impl FnOnce(&mut Index) -> T) -> T {
        change(&mut self.index.write())
    }

    /// Starts a volume. Its `bytes/` is the pool's to make.
    pub fn draft_volume(&self, id: &VolumeId) -> Result<Draft> {
        self.draft(id.as_str())
    }

    /// Starts a snapshot. Its `bytes/` is the pool's to make.
    pub fn draft_snapshot(&self, id: &SnapshotId) -> Result<Draft> {
        self.draft(id.as_str())
    }

    /// Starts the copy of a volume's bytes that is kept while its filesystem grows. The pool makes it.
    pub fn draft_ungrown(&self, id: &VolumeId) -> Result<Draft> {
        self.draft(&format!("{id}.ungrown"))
    }

    /// Keeps it with the volume.
    pub fn keep_ungrown(&self, mut draft: Draft, id: &VolumeId) -> Result<()> {
        durable::rename(draft.dir.path(), self.dir.volume(id).ungrown().path())?;
        draft.committed = true;
        Ok(())
    }

    /// Removes it: once it is renamed into `staging/` it does not exist any more, also after a crash.
    pub fn remove_ungrown(&self, id: &VolumeId) -> Result<()> {
        self.remove(&format!("{id}.ungrown"), &self.dir.volume(id).ungrown(), |_| {}).map(drop)
    }

    fn draft(&self, name: &str) -> Result<Draft> {
        let dir = ObjectDir::new(self.dir.staging().join(name));
        durable::make_dir(dir.path())?;
        Ok(self.draft_at(dir))
    }

    fn draft_at(&self, dir: ObjectDir) -> Draft {
        Draft { dir, committed: false, reserve: self.reserve.clone() }
    }

    /// Commits a volume whose bytes are written and synced.
    pub fn commit_volume(&self, draft: Draft, record: VolumeRecord) -> Result<Arc<VolumeRecord>> {
        let target = self.dir.volume(&record.id);
        slots::create(&draft.dir.state())?;
        self.commit(draft, &record, &target)?;
        let record = Arc::new(record);
        self.write(|index| index.add_volume(record.clone()));
        Ok(record)
    }

    /// Commits a snapshot whose bytes and maps are written and synced.
    pub fn commit_snapshot(&self, draft: Draft, record: SnapshotRecord) -> Result<Arc<SnapshotRecord>> {
        let target = self.dir.snapshot(&record.id);
        self.commit(draft, &record, &target)?;
        let record = Arc::new(record);
        self.write(|index| index.add_snapshot(record.clone()));
        Ok(record)
    }

    /// Replaces a volume's record: expanded, modified. The old one or the new one survives a
    /// crash, and the new one is there before the call returns. Where only the last sync fails the new one
    /// is there as well: then memory follows the disk, and the caller gets the error. The retry, which finds
    /// nothing to replace, syncs it.
    pub fn update_volume(&self, record: VolumeRecord) -> Result<Arc<VolumeRecord>> {
        let dir = self.dir.volume(&record.id);
        if let Some(there) = self.read(|index| index.volume(&record.id)).filter(|there| **there == record) {
            durable::sync_dir(dir.path())?;
            return Ok(there);
        }
        let replaced = durable::replace(&dir.record(), &encode(&record));
        let there = match &replaced {
            Ok(()) => Ok(record),
            Err(_) => read_volume(&dir),
        };
        if let Ok(there) = &there {
            self.write(|index| index.add_volume(Arc::new(there.clone())));
        }
        replaced?;
        there.map(Arc::new)
    }

    /// Makes an object exist.
    ///
    /// 1. Write and sync the record: a crash leaves a directory in `staging/`, removed at start.
    /// 2. Sync the object's directory, so that no entry is missing after the rename. What is in `bytes/` was
    ///    synced by the pool.
    /// 3. Rename it into place: this is the commit. Before it the object is not there, after it it
    ///    is whole.
    /// 4. Sync both parents: only then does the call return, so a power cut loses nothing that was
    ///    acknowledged.
    fn commit(&self, mut draft: Draft, record: &impl Serialize, target: &ObjectDir) -> Result<()> {
        seal(&draft.dir, record)?;
        durable::rename(draft.dir.path(), target.path())?;
        draft.committed = true;
        Ok(())
    }

    /// Makes a volume cease to exist; its bytes are freed when the answer is dropped.
    pub fn remove_volume(&self, id: &VolumeId) -> Result<Draft> {
        self.remove(id.as_str(), &self.dir.volume(id), |index| index.remove_volume(id))
    }

    /// Makes a snapshot cease to exist; its bytes are freed when the answer is dropped.
    pub fn remove_snapshot(&self, id: &SnapshotId) -> Result<Draft> {
        self.remove(id.as_str(), &self.dir.snapshot(id), |index| index.remove_snapshot(id))
    }

    /// 1. Rename the object into `staging/` and sync: from here on it is deleted, also after a crash.
    /// 2. Forget it in memory.
    /// 3. Remove the files, when the answer is dropped: what a crash leaves is removed at start.
    fn remove(&self, name: &str, dir: &ObjectDir, forget: impl FnOnce(&mut Index)) -> Result<Draft> {
        let gone = ObjectDir::new(self.dir.staging().join(name));
        self.reserve.spend(|| match gone.path().try_exists() {
            // Neither its sync nor undoing it had room.
            Ok(true) => durable::sync_filesystem(self.dir.path()),
            _ => durable::rename(dir.path(), gone.path()),
        })?;
        self.write(forget);
        Ok(self.draft_at(gone))
    }

    /// What is done to a volume now.
    pub fn volume_state(&self, id: &VolumeId) -> Result<VolumeState> {
        read_state(&self.dir.volume(id))
    }

    /// Records what is about to be done to a volume, or what was undone.
    pub fn set_volume_state(&self, id: &VolumeId, state: &VolumeState) -> Result<()> {
        let (path, state_bytes) = (self.dir.volume(id).state(), encode(state));
        self.reserve.spend(|| slots::write(&path, &state_bytes))?;
        self.write(|index| {
            if let Some(record) = index.volume(id).filter(|record| record.attached != state.attached) {
                index.add_volume(Arc::new(VolumeRecord {
                    attached: state.attached.clone(),
                    ..(*record).clone()
                }));
            }
        });
        Ok(())
    }

    /// Changes what is recorded of a volume. Of two changes at once one would be lost: the driver locks the volume.
    pub fn change_volume_state(&self, id: &VolumeId, change: impl FnOnce(&mut VolumeState)) -> Result<()> {
        let mut state = self.volume_state(id)?;
        change(&mut state);
        self.set_volume_state(id, &state)
    }
}

/// Continues where one cannot be removed, and returns the last error.
fn empty_staging(dir: &PoolDir) -> Result<()> {
    let left = entries(&dir.staging())?;
    if !left.is_empty() {
        // A driver that was killed may have removed a subvolume a moment ago, see `tree::remove`.
        durable::sync_filesystem(dir.path())?;
    }
    let mut outcome = retained::remove_empty(dir);
    for entry in left {
        if transfers::read(&entry).is_some() {
            continue;
        }
        let removed = match fs::symlink_metadata(&entry).is_ok_and(|meta| meta.is_dir()) {
            true => tree::remove(&entry),
            false => durable::remove(&entry),
        };
        if let Err(error) = removed {
            outcome = Err(error.into());
        }
    }
    outcome
}

/// Steps 1 and 2 of a commit, also for each member of a group.
fn seal(dir: &ObjectDir, record: &impl Serialize) -> Result<()> {
    durable::write_new(&dir.record(), &encode(record))?;
    Ok(durable::sync_dir(dir.path())?)
}

/// A snapshot that cannot be read keeps its place in the order of its volume, since it may become readable: to a later
/// version, or when it was repaired. What is left of its record says which place, as a rule.
fn keep_place(index: &mut Index, dir: &Path) {
    #[derive(serde::Deserialize)]
    struct Place {
        volume: VolumeId,
        sequence: u64,
    }
    let bytes = fs::read(ObjectDir::new(dir).record()).unwrap_or_default();
    let place: Option<Place> = serde_json::from_slice(&bytes).ok();
    let possible = place.filter(|Place { sequence, .. }| *sequence <= SnapshotRecord::LAST_SEQUENCE);
    index.keep_place(possible.map(|Place { volume, sequence }| (volume, sequence)));
}

/// The entries of a directory; none if a start was interrupted before making it.
fn entries(dir: &Path) -> Result<Vec<PathBuf>> {
    let list = match fs::read_dir(dir) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(Vec::new()),
        list => list.context("list", dir)?,
    };
    list.map(|entry| Ok(entry.context("list", dir)?.path())).collect()
}

/// Looks at many directories at once: with thousands of them, a start mostly waits for the disk.
fn each<I: Send, T: Send>(dirs: Vec<I>, look: impl Fn(&I) -> T + Sync) -> Vec<(I, T)> {
    let look = |dir| {
        let seen = look(&dir);
        (dir, seen)
    };
    if dirs.len() > FEW
        && let Ok(readers) = rayon::ThreadPoolBuilder::new().num_threads(READERS).build()
    {
        return readers.install(|| dirs.into_par_iter().map(look).collect());
    }
    dirs.into_iter().map(look).collect()
}

#[cfg(test)]
mod tests;
