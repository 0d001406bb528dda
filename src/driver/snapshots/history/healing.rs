//! Repairs by the hashing thread and by streams: `allocated` maps that do not match the data, and hashes that a
//! deleted snapshot needs before its bytes are removed. An `allocated` map is only replaced under its own lock, `LockKey::Map`,
//! which is taken before that of a `History`; what changes a link is done by a `History`.

use std::fs::File;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use roaring::RoaringBitmap;

use crate::driver::error::Result;
use crate::driver::locks::{LockKey, OpGuard};
use crate::driver::snapshots::history::hold::{Histories, History, header};
use crate::store::SnapshotRecord;
use base::{DraftFile, ObjectDir, Stop};
use cbt::{
    self, HashFile, HashReader, MapFile, MapHeader, MapWriter, Relation, SegmentIndex, scan_allocated,
};
use files::Context;
use files::durable;

impl Histories {
    /// Opens maps. If the `allocated` map of the snapshot is damaged as a whole, makes it again from the data, and opens
    /// them once more.
    pub(in crate::driver) fn healed<T>(
        &self,
        record: &SnapshotRecord,
        stop: &Stop,
        open: impl Fn() -> cbt::Result<T>,
    ) -> cbt::Result<T> {
        match open() {
            Err(cbt::Error::Damaged { path, what })
                if path == self.shared.store.snapshot_dir(record).allocated() =>
            {
                self.write_allocated(record, &what, stop)?;
                open()
            }
            opened => opened,
        }
    }

    /// Makes a damaged `allocated` map of a snapshot again from the data. That may take long, but only callers that need the
    /// map wait.
    ///
    /// 1. Write it next to the damaged one and sync it: a crash leaves a file that the next try replaces.
    /// 2. Rename it over the damaged one.
    pub(in crate::driver) fn write_allocated(
        &self,
        record: &SnapshotRecord,
        what: &str,
        stop: &Stop,
    ) -> cbt::Result<()> {
        let map = self.lock_map(record, stop)?;
        self.write_locked(&map, record, what, stop)
    }

    fn lock_map(&self, record: &SnapshotRecord, stop: &Stop) -> cbt::Result<OpGuard> {
        Ok(self.shared.locks.wait_until(LockKey::Map(record.id.clone()), stop)?)
    }

    fn write_locked(
        &self,
        _map: &OpGuard,
        record: &SnapshotRecord,
        what: &str,
        stop: &Stop,
    ) -> cbt::Result<()> {
        let dir = self.shared.store.snapshot_dir(record);
        let (path, data_path) = (dir.allocated(), dir.data());
        if MapFile::open(&path).and_then(|map| map.count()).is_ok() {
            // Another thread made it meanwhile.
            return Ok(());
        }
        tracing::error!(path = %path.display(), what, "a map is damaged, making it again from the data");
        let data = match File::open(&data_path).context("open", &data_path) {
            Err(error) if error.is_not_found() => {
                return Err(cbt::Error::Lost { what: format!("{}: {what}", path.display()) });
            }
            opened => opened?,
        };
        durable::replace_with(&path, &DraftFile::New.of(&path), |fresh| {
            scan_allocated(&data, &data_path, fresh, header(record), stop).map(drop)
        })
    }

    /// Checks an `allocated` map that was made from the parent's against the data, since an error in one map would be in all
    /// maps that follow. Compares the numbers of blocks if the block sizes match, and the extents otherwise.
    ///
    /// A wrong map is made again. The `changed` maps of the snapshot and of its child may lack the same blocks, so the blocks
    /// are added there and hashed again, and parent and child are checked next.
    pub(in crate::driver) fn check_allocated(&self, record: &SnapshotRecord) -> Result<()> {
        let dir = self.shared.store.snapshot_dir(record);
        let path = dir.data();
        if record.birth.is_none() || !path.exists() {
            return Ok(());
        }
        let data = File::open(&path).context("open", &path)?;
        let meta = data.metadata().context("stat", &path)?;
        let stop = &self.queue.stop;
        let lock = self.lock_map(record, stop)?;
        let map = match MapFile::open(&dir.allocated()) {
            Err(cbt::Error::Damaged { what, .. }) => {
                self.write_locked(&lock, record, &what, stop)?;
                MapFile::open(&dir.allocated())?
            }
            opened => opened?,
        };
        if record.block_size.bytes() == meta.blksize()
            && map.count().ok() == Some(meta.blocks() * 512 / meta.blksize())
        {
            return Ok(());
        }
        let fresh = DraftFile::Checked.of(&dir.allocated());
        durable::remove(&fresh)?;
        scan_allocated(&data, &path, &fresh, header(record), stop)?;
        let wrong = differing(&map, &MapFile::open(&fresh)?)?;
        if wrong.is_empty() {
            return Ok(durable::remove(&fresh)?);
        }
        self.hold([&record.volume]).replace_allocated(&lock, record, &fresh, &wrong)
    }

    /// Frees the bytes of a deleted snapshot, since deltas only need its maps and hashes. Damaged maps and hashes are made
    /// again first, because later there is no data to make them from.
    pub(in crate::driver) fn free_when_sound(&self, record: &SnapshotRecord) -> Result<()> {
        if !self.frees_bytes_of(record) {
            return Ok(());
        }
        let dir = self.shared.store.snapshot_dir(record);
        let count = || MapFile::open(&dir.allocated()).and_then(|map| map.count());
        if let Err(cbt::Error::Damaged { what, .. }) = count() {
            self.write_allocated(record, &what, &self.queue.stop)?;
        }
        let lacking = self.without_hash(&dir)?;
        self.hold([&record.volume]).free_bytes(record, &lacking)
    }

    /// The allocated blocks of a snapshot that have no hash, because its page is damaged.
    fn without_hash(&self, dir: &ObjectDir) -> Result<Segments> {
        let allocated = MapFile::open(&dir.allocated())?;
        let mut hashes = HashReader::new(HashFile::open(&dir.hashes())?);
        let mut lacking = Segments::new();
        for index in allocated.indexes() {
            self.queue.stop.check()?;
            let unknown = hashes.unknown(index, &allocated.segment(index)?)?;
            if !unknown.is_empty() {
                lacking.push((index, unknown));
            }
        }
        Ok(lacking)
    }
}

impl History<'_> {
    /// Replaces the `allocated` map of a snapshot, which is wrong about the blocks `wrong`, by the map `fresh`.
    ///
    /// 1. Remove the skip maps over the snapshot, which may lack the blocks.
    /// 2. Add the blocks to `pending`, and to `changed` of the snapshot and of its child, which are no longer exact: these
    ///    maps may list too much.
    /// 3. Replace `allocated`. After a crash before this step, the next check finds the wrong map.
    fn replace_allocated(
        &mut self,
        _map: &OpGuard,
        record: &SnapshotRecord,
        fresh: &Path,
        wrong: &Segments,
    ) -> Result<()> {
        let histories = self.histories;
        let store = &histories.shared.store;
        let dir = store.snapshot_dir(record);
        if !fresh.exists() {
            // It is gone if the snapshot was removed meanwhile.
            return Ok(());
        }
        let blocks: u64 = wrong.iter().map(|(_, members)| members.len()).sum();
        tracing::error!(
            snapshot_id = %record.id, blocks,
            "the allocated map does not match the data, making it again; deltas that were listed before may lack these blocks"
        );
        let pending = MapFile::open(&dir.pending())?;
        self.remove_skips_from(record)?;
        let neighbours = store.read(|index| {
            let parent = index.line_in(&record.volume, ..record.sequence).next_back();
            let child = index.line_in(&record.volume, record.sequence + 1..).next();
            [parent.cloned(), child.cloned()]
        });
        for other in neighbours[1].iter().map(|child| &**child).chain([record]) {
            let path = store.snapshot_dir(other).changed();
            if let Ok(changed) = MapFile::open(&path)
                && let Some(relation) = changed.header().relative_to.clone()
            {
                let relative_to = Some(Relation { exact: false, ..relation });
                let header = MapHeader { relative_to, ..changed.header().clone() };
                add_to(&changed, header, wrong, &path)?;
            }
        }
        add_to(&pending, header(record), wrong, &dir.pending())?;
        durable::replace_by(fresh, &dir.allocated())?;
        for record in neighbours.iter().flatten().map(|other| &**other).chain([record]) {
            histories.queue.add(record, histories.pending_bytes(record));
        }
        Ok(())
    }

    /// Frees the bytes of a deleted snapshot, unless they are needed again by now. Blocks in `lacking`, which have no hash,
    /// are hashed again first.
    fn free_bytes(&mut self, record: &SnapshotRecord, lacking: &Segments) -> Result<()> {
        let dir = self.histories.shared.store.snapshot_dir(record);
        if !lacking.is_empty() {
            add_to(&MapFile::open(&dir.pending())?, header(record), lacking, &dir.pending())?;
            // An error, so that it is tried again later: a failing disk may lose the new hashes too.
            let what = "pages of hashes that are needed once the data is freed are damaged".to_owned();
            return Err(cbt::Error::Damaged { path: dir.hashes(), what }.into());
        }
        if self.histories.frees_bytes_of(record) && self.histories.pending_bytes(record) == 0 {
            // Without the data nothing can be hashed again, so a power cut must not bring back an older `pending`.
            durable::sync_dir(dir.path())?;
            self.to_remove.extend(self.histories.shared.store.take_bytes(record)?);
        }
        Ok(())
    }
}

/// Blocks by segment, ascending.
type Segments = Vec<(SegmentIndex, RoaringBitmap)>;

/// The blocks that are in only one of two maps. A damaged segment of the first map counts as empty.
fn differing(claimed: &MapFile, found: &MapFile) -> Result<Segments> {
    let mut indexes: Vec<SegmentIndex> = claimed.indexes().chain(found.indexes()).collect();
    indexes.sort_unstable();
    indexes.dedup();
    let mut differing = Segments::new();
    for index in indexes {
        let members = claimed.sound_segment(index)?.unwrap_or_default() ^ found.segment(index)?;
        if !members.is_empty() {
            differing.push((index, members));
        }
    }
    Ok(differing)
}

/// Replaces a map by its union with these blocks.
fn add_to(map: &MapFile, header: MapHeader, more: &Segments, path: &Path) -> Result<()> {
    durable::replace_with(path, &DraftFile::New.of(path), |fresh| {
        let mut writer = MapWriter::create(fresh, header)?;
        let mut more = more.iter().peekable();
        for index in map.indexes() {
            while let Some((index, members)) = more.next_if(|(other, _)| *other < index) {
                writer.insert_segment(*index, members.clone())?;
            }
            let mut members = map.segment_or_all(index)?;
            if let Some((_, others)) = more.next_if(|(other, _)| *other == index) {
                members |= others;
            }
            writer.insert_segment(index, members)?;
        }
        for (index, members) in more {
            writer.insert_segment(*index, members.clone())?;
        }
        writer.finish().map_err(Into::into)
    })
}
