//! The snapshot that a new one builds on.

use crate::driver::error::Result;
use crate::driver::snapshots::history::hold::Histories;
use crate::pool::{self, Bytes};
use crate::store::{SnapshotRecord, Source, VolumeRecord};
use base::SnapshotId;
use cbt::{HashFile, MapFile};

/// An earlier snapshot with mostly the same content as a new one. Blocks that both share are not hashed again.
///
/// All its files are open, since it may be deleted while the new one is made.
pub(in crate::driver) struct Parent {
    pub id: SnapshotId,
    /// The moment since which writes count as changes of the new snapshot (see [`crate::pool::Backend`]).
    pub since: Option<u64>,
    /// `None` if it was deleted and its bytes were freed.
    pub bytes: Option<Bytes>,
    pub allocated: MapFile,
    pub pending: MapFile,
    pub hashes: HashFile,
    /// Whether it is a snapshot of the same volume, so that `changed` can be relative to it.
    pub linked: bool,
}

impl Histories {
    /// The snapshot to build on: the newest of the volume, or else the one that the volume was restored from. It may be a
    /// deleted one. `None` if there is none, or if its maps are damaged: then every block is hashed.
    pub(in crate::driver) fn parent(&self, volume: &VolumeRecord, record: &SnapshotRecord) -> Option<Parent> {
        let (found, linked) = self.shared.store.read(|index| match index.line(&volume.id).next_back() {
            Some(newest) => (Some(newest.clone()), true),
            None => match &volume.source {
                Some(Source::Snapshot(id)) => (index.known(id), false),
                _ => (None, false),
            },
        });
        let found = found.filter(|found| found.block_size == record.block_size && found.tracking)?;
        match self.open_parent(&found, volume, linked) {
            Ok(parent) => Some(parent),
            Err(error) => {
                let error = base::report(&error);
                tracing::warn!(snapshot_id = %found.id, error, "the parent cannot be used, hashing everything");
                None
            }
        }
    }

    fn open_parent(&self, record: &SnapshotRecord, volume: &VolumeRecord, linked: bool) -> Result<Parent> {
        let dir = self.shared.store.snapshot_dir(record);
        let bytes = match self.shared.pool().open(&dir) {
            Err(pool::Error::Sys(error)) if error.is_not_found() => None,
            opened => Some(opened?),
        };
        Ok(Parent {
            id: record.id.clone(),
            since: match linked {
                true => record.birth,
                // A restored volume starts with the parent's content, so writes since it was made count.
                false => self.shared.pool().birth(&self.shared.store.dir().volume(&volume.id))?,
            },
            bytes,
            allocated: MapFile::open(&dir.allocated())?,
            // Opened before the hashes are cloned: a slot is written before its block leaves `pending`.
            pending: MapFile::open(&dir.pending())?,
            hashes: HashFile::open(&dir.hashes())?,
            linked,
        })
    }
}
