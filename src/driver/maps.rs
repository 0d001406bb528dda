//! The bytes and maps of a new snapshot: where the pool's copy and the block maps meet.

use std::fs::File;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use super::quiesce::LiveCopy;
use super::{Driver, Error, Result};
use crate::base::{BlockSize, ObjectDir, SnapshotId, Stop, Stopped};
use crate::cbt::{
    self, Candidates, HashFile, HashReader, HashingCopy, MapFile, MapHeader, MapWriter, PhysicalDiff,
};
use crate::store::{SnapshotRecord, Source, VolumeRecord};
use crate::sys::Context;
use crate::sys::extents::Extents;

/// An earlier snapshot whose content a new one shares most of: its hashes need not be made again.
///
/// All its files are open: it may be deleted while the new one is made.
struct Parent {
    id: SnapshotId,
    data: File,
    data_path: PathBuf,
    allocated: MapFile,
    pending: MapFile,
    hashes: HashFile,
    /// Whether it is of the same volume, so that the new one's changes can be told from it on.
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

    /// Fails with what went wrong, if anything did.
    pub(super) fn check(&mut self) -> Result<()> {
        self.failed.take().map_or(Ok(()), |error| Err(error.into()))
    }
}

impl Driver {
    /// Copies the bytes of volumes into the drafts of their snapshots, all as of one moment, and writes
    /// their maps.
    pub(super) fn fill_snapshots(&self, snapshots: &[NewSnapshot]) -> Result<()> {
        let mut copies = Vec::new();
        for new in snapshots {
            copies.push(self.live_copy(new)?);
        }
        let files = self.copy_live(&mut copies)?;
        for ((new, copy), data) in snapshots.iter().zip(copies).zip(files) {
            if let Some(pour) = copy.pour {
                pour.hashing.sync()?;
            }
            self.write_maps(new, &data)?;
        }
        Ok(())
    }

    /// The copy that a snapshot starts with; a pool that reads every byte hashes them on the way.
    fn live_copy(&self, new: &NewSnapshot) -> Result<LiveCopy> {
        let path = self.volume_data(&new.volume.id);
        let block_size = new.record.block_size;
        let pour = match self.pool().copies_atomically() || !new.record.tracking {
            true => None,
            false => Some(Pour::new(HashFile::create(&new.draft.hashes())?, block_size)),
        };
        Ok(LiveCopy {
            id: new.volume.id.clone(),
            source: File::open(&path).context("open", &path)?,
            target: new.draft.data(),
            block_size,
            pour,
        })
    }

    fn write_maps(&self, new: &NewSnapshot, data: &File) -> Result<()> {
        let NewSnapshot { draft, volume, record } = new;
        let stop = Stop::default();
        let path = draft.data();
        let header = MapHeader {
            block_size: record.block_size,
            blocks: record.block_size.blocks_in(record.capacity),
            relative_to: None,
        };
        let census = cbt::scan_allocated(data, &path, &draft.allocated(), header.clone(), &stop)?;
        tracing::debug!(snapshot_id = %record.id, blocks = census.allocated, "allocated blocks found");
        if !record.tracking {
            return Ok(());
        }
        let allocated = MapFile::open(&draft.allocated())?;
        let parent = self.parent(volume, record);
        self.write_changes(draft, data, &allocated, parent, header.clone(), &stop)?;
        // What is still to be hashed stands in `pending`, so a slot that a clone brought along from
        // the parent never counts for a block that changed.
        let pending = MapFile::open(&draft.pending())?;
        let hashes = HashFile::open_for_update(&draft.hashes())?;
        let backlog = self.backlog(pending.count()? * record.block_size.bytes());
        cbt::hash_blocks(data, &path, &pending, &allocated, &hashes, &stop)?;
        drop(backlog);
        std::fs::remove_file(draft.pending()).context("remove", &draft.pending())?;
        MapWriter::create(&draft.pending(), header)?.finish()?;
        Ok(())
    }

    /// Shows bytes as waiting to be hashed, until the answer is dropped.
    fn backlog(&self, bytes: u64) -> impl Drop + '_ {
        struct Backlog<'d>(&'d Driver, u64);
        impl Drop for Backlog<'_> {
            fn drop(&mut self) {
                self.0.gauges.hashing.fetch_sub(self.1, Ordering::Relaxed);
            }
        }
        self.gauges.hashing.fetch_add(bytes, Ordering::Relaxed);
        Backlog(self, bytes)
    }

    /// Writes `changed`, `pending` and the first state of `hashes`.
    fn write_changes(
        &self,
        draft: &ObjectDir,
        data: &File,
        allocated: &MapFile,
        parent: Option<Parent>,
        header: MapHeader,
        stop: &Stop,
    ) -> Result<()> {
        let linked_to = parent.as_ref().filter(|parent| parent.linked).map(|parent| parent.id.clone());
        let changed_header = MapHeader { relative_to: linked_to, ..header.clone() };
        let hashed_on_the_way = draft.hashes().exists();
        let Some(parent) = parent else {
            MapWriter::create(&draft.changed(), changed_header)?.finish()?;
            if hashed_on_the_way {
                MapWriter::create(&draft.pending(), header)?.finish()?;
            } else {
                HashFile::create(&draft.hashes())?;
                cbt::write_union(&draft.pending(), header, &[allocated], stop)?;
            }
            return Ok(());
        };
        if hashed_on_the_way {
            let mut before = HashReader::new(parent.hashes);
            let mut after = HashReader::new(HashFile::open(&draft.hashes())?);
            let candidates: Candidates<'_, PhysicalDiff<Extents<'_>, Extents<'_>>> = Candidates::Hashes {
                parent: &mut before,
                parent_pending: &parent.pending,
                child: &mut after,
            };
            cbt::write_changed(
                &draft.changed(),
                changed_header,
                &parent.allocated,
                allocated,
                candidates,
                stop,
            )?;
            MapWriter::create(&draft.pending(), header)?.finish()?;
            return Ok(());
        }
        let path = draft.data();
        let extents =
            (self.pool().extents(&parent.data, &parent.data_path)?, self.pool().extents(data, &path)?);
        let (Some(before), Some(after)) = extents else {
            return Err(Error::Precondition("the pool can neither hash on the way nor list extents".into()));
        };
        let ranges = Candidates::Ranges(PhysicalDiff::new(before, after));
        cbt::write_changed(&draft.changed(), changed_header, &parent.allocated, allocated, ranges, stop)?;
        let changed = MapFile::open(&draft.changed())?;
        // A slot the parent had not written is in the clone as it was: still to be hashed here.
        cbt::write_union(&draft.pending(), header, &[&changed, &parent.pending], stop)?;
        self.pool().copy(parent.hashes.file(), &draft.hashes(), BlockSize::MIN, None, stop)?;
        Ok(())
    }

    /// The snapshot to build on: the newest of the volume, else the one that the volume was made
    /// from. `None` when there is none, or it is being deleted, or its maps are damaged: then all is
    /// hashed.
    fn parent(&self, volume: &VolumeRecord, record: &SnapshotRecord) -> Option<Parent> {
        let (found, linked) = self.store.read(|index| match index.chain(&volume.id).next_back() {
            Some(newest) => (Some(newest.clone()), true),
            None => match &volume.source {
                Some(Source::Snapshot(id)) => (index.snapshot(id), false),
                _ => (None, false),
            },
        });
        let found = found.filter(|found| found.block_size == record.block_size && found.tracking)?;
        match Parent::open(&found, &self.store.snapshot_dir(&found), linked) {
            Ok(parent) => Some(parent),
            Err(error) => {
                let error = super::report(&error);
                tracing::warn!(snapshot_id = %found.id, error, "hashing everything, for the parent can not be used");
                None
            }
        }
    }
}

impl Parent {
    fn open(record: &SnapshotRecord, dir: &ObjectDir, linked: bool) -> Result<Self> {
        let data_path = dir.data();
        Ok(Parent {
            id: record.id.clone(),
            data: File::open(&data_path).context("open", &data_path)?,
            data_path,
            allocated: MapFile::open(&dir.allocated())?,
            pending: MapFile::open(&dir.pending())?,
            hashes: HashFile::open(&dir.hashes())?,
            linked,
        })
    }
}
