//! Makes the bytes and maps of a new snapshot, from the pool's copy and the parent's maps.

use std::fs::File;
use std::sync::Arc;

use crate::driver::error::{Error, Result};
use crate::driver::shared::Shared;
use crate::driver::snapshots::history::hold::{Histories, header};
use crate::driver::snapshots::history::parent::Parent;
use crate::driver::snapshots::quiesce::{Copier, HashingSink, LiveCopy};
use crate::pool::{Changes, Copying, Extents};
use crate::store::{SnapshotRecord, VolumeRecord};
use base::{BlockSize, ObjectDir, Stop};
use cbt::{
    self, Candidates, HashFile, HashReader, MapFile, MapHeader, MapWriter, NewMaps, PhysicalDiff, Relation,
    copy_map, scan_allocated, write_changed, write_union, write_written,
};
use files::durable;

/// A snapshot being made.
pub(in crate::driver) struct NewSnapshot {
    /// The draft of its files.
    pub draft: ObjectDir,
    /// The source volume, as it was when it was locked.
    pub volume: Arc<VolumeRecord>,
    /// The draft of its record.
    pub record: SnapshotRecord,
    /// Bytes that are still to be hashed, once it is filled.
    pub pending: u64,
}

/// Fills the drafts of new snapshots.
#[derive(Debug)]
pub(in crate::driver) struct Filler {
    pub(in crate::driver) shared: Arc<Shared>,
    pub(in crate::driver) copier: Arc<Copier>,
    pub(in crate::driver) histories: Arc<Histories>,
}

impl Filler {
    /// Copies the bytes of volumes into the drafts of their snapshots, all as of one moment, and writes their maps. Hashes
    /// are left for later, unless the copy read all bytes.
    pub(in crate::driver) fn fill(&self, snapshots: &mut [NewSnapshot]) -> Result<()> {
        let mut copies = Vec::new();
        for new in &*snapshots {
            copies.push(self.live_copy(new)?);
        }
        let files = self.copier.copy_live(&mut copies)?;
        for ((new, copy), data) in snapshots.iter_mut().zip(copies).zip(files) {
            if let Some(sink) = &copy.sink {
                sink.sync()?;
            }
            new.record.birth = self.shared.pool().birth(&new.draft)?;
            let blocks = self.write_maps(new, &data, copy.sink.is_some())?;
            new.pending = blocks * new.record.block_size.bytes();
        }
        Ok(())
    }

    /// The copy that a snapshot starts with. If the pool reads every byte, they are hashed during the copy.
    fn live_copy(&self, new: &NewSnapshot) -> Result<LiveCopy> {
        let block_size = new.record.block_size;
        let sink = match self.shared.pool().copies_atomically() || !new.record.tracking {
            true => None,
            false => Some(HashingSink::new(HashFile::create(&new.draft.hashes())?, block_size)),
        };
        Ok(LiveCopy {
            id: new.volume.id.clone(),
            source: self.shared.pool().open(&self.shared.store.dir().volume(&new.volume.id))?,
            target: new.draft.clone(),
            block_size,
            sink,
            written: false,
        })
    }

    /// Writes the maps of a snapshot. `pending` is empty if the blocks are `hashed` already. Returns the number of blocks in
    /// `pending`.
    fn write_maps(&self, new: &NewSnapshot, data: &File, hashed: bool) -> Result<u64> {
        let NewSnapshot { draft, volume, record, .. } = new;
        if record.tracking
            && let Some(parent) = self.histories.parent(volume, record)
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
        // The hash slot of a block counts only if `pending` does not list it. So without a copy that hashed, `pending`
        // lists all blocks.
        if hashed {
            MapWriter::create(&draft.pending(), header(record))?.finish()?;
            return Ok(0);
        }
        HashFile::create(&draft.hashes())?;
        copy_map(&draft.pending(), &MapFile::open(&draft.allocated())?, &stop)?;
        Ok(allocated)
    }

    /// The same from the maps of a parent, at a cost that depends on what changed since; `None` if the pool cannot tell what
    /// changed.
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
        // A record that says that the parent was copied after its child is damaged. To trust it would lose every change.
        let since = parent.since.filter(|since| record.birth.is_some_and(|birth| *since < birth));
        if since != parent.since {
            let (parent, since) = (&parent.id, parent.since);
            tracing::error!(%parent, since, birth = record.birth, "the recorded birth of a snapshot is before its parent's, comparing data instead");
        }
        match self.shared.pool().changes(since, parent.bytes.as_ref(), data, &path)? {
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
        // Blocks in the parent's `pending` may have been hashed since it was opened, or not: in the clone their slots
        // do not count, so they are hashed again.
        let changed = MapFile::open(&draft.changed())?;
        let pending = write_union(&draft.pending(), header(record), &[&changed, &parent.pending], &stop)?;
        let how = Copying { sink: None, size: BlockSize::MIN, stop: &stop };
        self.shared.pool().copy_file(parent.hashes.file(), &draft.hashes(), how)?;
        Ok(Some(pending))
    }
}
