//! The bytes and maps of a new snapshot: where the pool's copy and the block maps meet.

use std::fs::File;
use std::sync::Arc;

use super::quiesce::LiveCopy;
use super::{Driver, Error, Result};
use crate::pool::{self, Bytes, Changes};
use crate::store::{SnapshotRecord, Source, VolumeRecord};
use crate::sys::extents::Extents;
use base::{BlockSize, ObjectDir, SnapshotId, Stop, Stopped};
use cbt::{
    self, Candidates, HashFile, HashReader, HashingCopy, MapFile, MapHeader, MapWriter, NewMaps,
    PhysicalDiff, Relation, copy_map, scan_allocated, write_changed, write_union, write_written,
};
use files::durable;

/// An earlier snapshot whose content a new one shares most of: its hashes need not be made again.
///
/// All its files are open: it may be deleted while the new one is made.
struct Parent {
    id: SnapshotId,
    /// Marks the moment from which on the new one's writes are to be told (see [`crate::pool::Pool`]).
    since: Option<u64>,
    /// `None` once it was deleted and its bytes were freed.
    bytes: Option<Bytes>,
    allocated: MapFile,
    pending: MapFile,
    hashes: HashFile,
    /// Whether it is of the same volume, so that changes since it are known.
    linked: bool,
}

/// A snapshot being made.
pub(super) struct NewSnapshot {
    /// Its files to be.
    pub draft: ObjectDir,
    /// The volume it is taken of, whose lock the caller holds.
    pub volume: Arc<VolumeRecord>,
    /// Its record to be.
    pub record: SnapshotRecord,
    /// Bytes that are still to be hashed, once it is filled.
    pub pending: u64,
}

/// Hashes the bytes of a copy on their way.
pub(super) struct Pour {
    hashing: HashingCopy,
    failed: Option<cbt::Error>,
}

impl Pour {
    fn new(hashes: HashFile, size: BlockSize) -> Self {
        Pour { hashing: HashingCopy::new(hashes, size), failed: None }
    }

    /// Takes whole blocks from byte `offset` on. After a failure the copy only has to end; the reason is
    /// what [`Pour::check`] tells.
    pub(super) fn take(&mut self, offset: u64, bytes: &[u8]) -> Result<(), Stopped> {
        self.hashing.take(offset, bytes).map_err(|error| {
            self.failed = Some(error);
            Stopped::Cancelled
        })
    }

    /// Forgets what it took, for the copy is made again.
    pub(super) fn start_again(&mut self) -> Result<()> {
        Ok(self.hashing.start_again()?)
    }

    /// Fails with what went wrong, if anything did.
    pub(super) fn check(&mut self) -> Result<()> {
        self.failed.take().map_or(Ok(()), |error| Err(error.into()))
    }
}

impl Driver {
    /// Copies the bytes of volumes into the drafts of their snapshots, all as of one moment, and writes
    /// their maps. What is to be hashed is left for later, save where the copy read it all.
    pub(super) fn fill_snapshots(&self, snapshots: &mut [NewSnapshot]) -> Result<()> {
        let mut copies = Vec::new();
        for new in &*snapshots {
            copies.push(self.live_copy(new)?);
        }
        let files = self.copy_live(&mut copies)?;
        for ((new, copy), data) in snapshots.iter_mut().zip(copies).zip(files) {
            if let Some(pour) = &copy.pour {
                pour.hashing.sync()?;
            }
            new.record.birth = self.pool().birth(&new.draft)?;
            let blocks = self.write_maps(new, &data, copy.pour.is_some())?;
            new.pending = blocks * new.record.block_size.bytes();
        }
        Ok(())
    }

    /// The copy that a snapshot starts with; a pool that reads every byte hashes them on the way.
    fn live_copy(&self, new: &NewSnapshot) -> Result<LiveCopy> {
        let block_size = new.record.block_size;
        let pour = match self.pool().copies_atomically() || !new.record.tracking {
            true => None,
            false => Some(Pour::new(HashFile::create(&new.draft.hashes())?, block_size)),
        };
        Ok(LiveCopy {
            id: new.volume.id.clone(),
            source: self.pool().open(&self.store.dir().volume(&new.volume.id))?,
            target: new.draft.clone(),
            block_size,
            pour,
            written: false,
        })
    }

    /// Whether its blocks are `hashed` by now is what its `pending` says, whose number of members it
    /// returns.
    fn write_maps(&self, new: &NewSnapshot, data: &File, hashed: bool) -> Result<u64> {
        let NewSnapshot { draft, volume, record, .. } = new;
        if record.tracking
            && let Some(parent) = self.parent(volume, record)
        {
            match self.write_maps_from(new, data, hashed, &parent) {
                Ok(Some(pending)) => return Ok(pending),
                Ok(None) => {}
                Err(Error::Cbt(cbt::Error::Damaged { path, what })) => {
                    let path = path.display();
                    tracing::error!(%path, what, "a map of the parent is damaged, hashing everything");
                }
                Err(error) => return Err(error),
            }
            for half_made in [draft.allocated(), draft.changed(), draft.pending()] {
                durable::remove(&half_made)?;
            }
        }
        let stop = Stop::default();
        let allocated = scan_allocated(data, &draft.data(), &draft.allocated(), header(record), &stop)?;
        if !record.tracking {
            return Ok(0);
        }
        MapWriter::create(&draft.changed(), header(record))?.finish()?;
        // A slot counts only outside `pending`: all is, but for what a copy hashed on its way.
        if hashed {
            MapWriter::create(&draft.pending(), header(record))?.finish()?;
            return Ok(0);
        }
        HashFile::create(&draft.hashes())?;
        copy_map(&draft.pending(), &MapFile::open(&draft.allocated())?, &stop)?;
        Ok(allocated)
    }

    /// The same at the cost of what changed since a parent; `None` where the pool cannot tell that.
    fn write_maps_from(
        &self,
        new: &NewSnapshot,
        data: &File,
        hashed: bool,
        parent: &Parent,
    ) -> Result<Option<u64>> {
        let NewSnapshot { draft, record, .. } = new;
        let (stop, path) = (Stop::default(), draft.data());
        let linked_to = parent.linked.then(|| Relation { snapshot: parent.id.clone(), exact: false });
        let changed_header = MapHeader { relative_to: linked_to, ..header(record) };
        let scan = || {
            scan_allocated(data, &path, &draft.allocated(), header(record), &stop)?;
            MapFile::open(&draft.allocated())
        };
        if hashed {
            let mut before = HashReader::new(parent.hashes.try_clone()?);
            let mut after = HashReader::new(HashFile::open(&draft.hashes())?);
            let candidates: Candidates<'_, PhysicalDiff<Extents<'_>, Extents<'_>>> = Candidates::Hashes {
                parent: &mut before,
                parent_pending: &parent.pending,
                child: &mut after,
            };
            let changed = draft.changed();
            write_changed(&changed, changed_header, &parent.allocated, &scan()?, candidates, &stop)?;
            MapWriter::create(&draft.pending(), header(record))?.finish()?;
            return Ok(Some(0));
        }
        // A parent that was copied after its child is a damaged record, whose word would lose every change.
        let since = parent.since.filter(|since| record.birth.is_some_and(|birth| *since < birth));
        if since != parent.since {
            let (parent, since) = (&parent.id, parent.since);
            tracing::error!(%parent, since, birth = record.birth, "the birth of a snapshot cannot be, asking the data instead");
        }
        match self.pool().changes(since, parent.bytes.as_ref(), data, &path)? {
            Changes::Written(written) => {
                let maps = NewMaps {
                    allocated: (&draft.allocated(), header(record)),
                    changed: (&draft.changed(), changed_header),
                };
                write_written(data, &path, maps, &parent.allocated, written, &stop)?;
            }
            Changes::Extents(before, after) => {
                let ranges = Candidates::Ranges(PhysicalDiff::new(before, after));
                let changed = draft.changed();
                write_changed(&changed, changed_header, &parent.allocated, &scan()?, ranges, &stop)?;
            }
            Changes::Unknown => return Ok(None),
        }
        // A slot that the parent had not written when `pending` was opened is in the clone as it was, or
        // written since: still to be hashed here.
        let changed = MapFile::open(&draft.changed())?;
        let pending = write_union(&draft.pending(), header(record), &[&changed, &parent.pending], &stop)?;
        self.pool().copy_file(parent.hashes.file(), &draft.hashes(), BlockSize::MIN, None, &stop)?;
        Ok(Some(pending))
    }

    /// The snapshot to build on: the newest of the volume, else the one that the volume was made
    /// from; a deleted one serves as well. `None` when there is none, or its maps are damaged: then all is
    /// hashed.
    fn parent(&self, volume: &VolumeRecord, record: &SnapshotRecord) -> Option<Parent> {
        let (found, linked) = self.store.read(|index| match index.line(&volume.id).next_back() {
            Some(newest) => (Some(newest.clone()), true),
            None => match &volume.source {
                Some(Source::Snapshot(id)) => (index.known(id), false),
                _ => (None, false),
            },
        });
        let found = found.filter(|found| found.block_size == record.block_size && found.tracking)?;
        match self.open_settled(&found, || self.open_parent(&found, volume, linked)) {
            Ok(parent) => Some(parent),
            Err(error) => {
                let error = base::report(&error);
                tracing::warn!(snapshot_id = %found.id, error, "hashing everything, for the parent cannot be used");
                None
            }
        }
    }

    fn open_parent(&self, record: &SnapshotRecord, volume: &VolumeRecord, linked: bool) -> Result<Parent> {
        let dir = self.store.snapshot_dir(record);
        let bytes = match self.pool().open(&dir) {
            Err(pool::Error::Sys(error)) if error.is_not_found() => None,
            opened => Some(opened?),
        };
        Ok(Parent {
            id: record.id.clone(),
            since: match linked {
                true => record.birth,
                // Its first content is that of its source: what was written since it was made counts.
                false => self.pool().birth(&self.store.dir().volume(&volume.id))?,
            },
            bytes,
            allocated: MapFile::open(&dir.allocated())?,
            // Before the hashes are cloned: a slot is written before its block leaves `pending`.
            pending: MapFile::open(&dir.pending())?,
            hashes: HashFile::open(&dir.hashes())?,
            linked,
        })
    }
}

/// The header of a snapshot's maps, save `changed`.
pub(super) fn header(record: &SnapshotRecord) -> MapHeader {
    MapHeader {
        block_size: record.block_size,
        blocks: record.block_size.blocks_in(record.capacity),
        relative_to: None,
    }
}
