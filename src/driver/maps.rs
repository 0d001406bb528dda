//! The bytes and maps of a new snapshot: where the pool's copy and the block maps meet.

use std::fs::File;
use std::path::PathBuf;

use super::{Driver, Error, Result};
use crate::base::{BlockSize, ObjectDir, SnapshotId, Stop};
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

impl Driver {
    /// Copies the volume's bytes into a draft and writes its maps.
    pub(super) fn fill_snapshot(
        &self,
        draft: &ObjectDir,
        volume: &VolumeRecord,
        record: &SnapshotRecord,
        source: &File,
    ) -> Result<()> {
        let data = self.copy_hashing(draft, volume, record, source)?;
        let stop = Stop::default();
        let path = draft.data();
        let header = MapHeader {
            block_size: record.block_size,
            blocks: record.block_size.blocks_in(record.capacity),
            relative_to: None,
        };
        let census = cbt::scan_allocated(&data, &path, &draft.allocated(), header.clone(), &stop)?;
        tracing::debug!(snapshot_id = %record.id, blocks = census.allocated, "allocated blocks found");
        if !record.tracking {
            return Ok(());
        }
        let allocated = MapFile::open(&draft.allocated())?;
        let parent = self.parent(volume, record);
        self.write_changes(draft, &data, &allocated, parent, header.clone(), &stop)?;
        // What is still to be hashed stands in `pending`, so a slot that a clone brought along from
        // the parent never counts for a block that changed.
        let pending = MapFile::open(&draft.pending())?;
        let hashes = HashFile::open_for_update(&draft.hashes())?;
        cbt::hash_blocks(&data, &path, &pending, &allocated, &hashes, &stop)?;
        std::fs::remove_file(draft.pending()).context("remove", &draft.pending())?;
        MapWriter::create(&draft.pending(), header)?.finish()?;
        Ok(())
    }

    /// Copies the bytes; a pool that reads them all hashes them on the way.
    fn copy_hashing(
        &self,
        draft: &ObjectDir,
        volume: &VolumeRecord,
        record: &SnapshotRecord,
        source: &File,
    ) -> Result<File> {
        let target = draft.data();
        if self.pool().copies_atomically() || !record.tracking {
            return self.copy_live(&volume.id, source, &target, record.block_size, None);
        }
        let hashes = HashFile::create(&draft.hashes())?;
        let mut hashing = HashingCopy::new(&hashes, record.block_size);
        let mut failed: Option<cbt::Error> = None;
        let mut sink = |offset: u64, bytes: &[u8]| {
            hashing.take(offset, bytes).map_err(|error| {
                failed = Some(error);
                // The copy only has to end; the reason is told below.
                crate::base::Stopped::Cancelled
            })
        };
        let copied = self.copy_live(&volume.id, source, &target, record.block_size, Some(&mut sink));
        if let Some(error) = failed {
            return Err(error.into());
        }
        let copied = copied?;
        hashes.sync()?;
        Ok(copied)
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
        match Parent::open(&found, &self.store.dir().snapshot(&found.id), linked) {
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
