//! What hashing finds wrong on its way, and mends: `allocated` maps that are not as the data is, and hashes that a
//! deleted snapshot lacks before its bytes go.

use std::fs::File;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use roaring::RoaringBitmap;

use super::super::locks::Key;
use super::super::maps::header;
use super::super::{Driver, Result};
use crate::store::SnapshotRecord;
use base::ObjectDir;
use cbt::{self, HashFile, HashReader, MapFile, MapHeader, MapWriter, Relation, scan_allocated};
use files::Context;
use files::durable;

impl Driver {
    /// Holds the `allocated` map of a snapshot against its data, where it was made from the parent's: a block that is
    /// wrong in one would be wrong in all that follow. Where a block of the map is one of the filesystem's, their number
    /// tells; else all extents are looked at.
    ///
    /// A map that is wrong is made again. What else was made from it is not believed either: the blocks may have changed
    /// since the parent, and until the child; they are to be hashed, and the parent is looked at next.
    ///
    /// 1. Add them to `changed` of both, no longer exact, and to `pending`: all may hold too much.
    /// 2. Replace `allocated`. A crash before it leaves the map to the next snapshot's look.
    pub(super) fn check_allocated(&self, record: &SnapshotRecord) -> Result<()> {
        let dir = self.store.snapshot_dir(record);
        let path = dir.data();
        if record.birth.is_none() || !path.exists() {
            return Ok(());
        }
        let data = File::open(&path).context("open", &path)?;
        let meta = data.metadata().context("stat", &path)?;
        let map = self.healed(record, &self.hashing.stop, || MapFile::open(&dir.allocated()))?;
        if record.block_size.bytes() == meta.blksize()
            && map.count().ok() == Some(meta.blocks() * 512 / meta.blksize())
        {
            return Ok(());
        }
        let fresh = |dir: &ObjectDir| dir.allocated().with_extension("map.checked");
        durable::remove(&fresh(&dir))?;
        scan_allocated(&data, &path, &fresh(&dir), header(record), &self.hashing.stop)?;
        let found = MapFile::open(&fresh(&dir))?;
        let wrong = differing(&map, &found)?;
        let _chain = self.locks.wait(Key::Chain(record.volume.clone()));
        // A deletion may have moved all of them.
        let dir = self.store.snapshot_dir(record);
        if wrong.is_empty() || !fresh(&dir).exists() {
            return Ok(durable::remove(&fresh(&dir))?);
        }
        let blocks: u64 = wrong.iter().map(|(_, members)| members.len()).sum();
        tracing::error!(
            snapshot_id = %record.id, blocks,
            "the allocated map is not as the data is, making it again; deltas that were told may lack these blocks"
        );
        let pending = MapFile::open(&dir.pending())?;
        let neighbours = self.store.read(|index| {
            let line = || index.line(&record.volume);
            let parent = line().rfind(|other| other.sequence < record.sequence);
            let child = line().find(|other| other.sequence > record.sequence);
            [parent.cloned(), child.cloned()]
        });
        for other in neighbours[1].iter().map(|child| &**child).chain([record]) {
            let path = self.store.snapshot_dir(other).changed();
            if let Ok(changed) = MapFile::open(&path)
                && let Some(relation) = changed.header().relative_to.clone()
            {
                let relative_to = Some(Relation { exact: false, ..relation });
                let header = MapHeader { relative_to, ..changed.header().clone() };
                add_to(&changed, header, &wrong, &path)?;
            }
        }
        add_to(&pending, header(record), &wrong, &dir.pending())?;
        durable::replace_by(&fresh(&dir), &dir.allocated())?;
        for record in neighbours.iter().flatten().map(|other| &**other).chain([record]) {
            self.hashing.add(record, self.pending_bytes(record));
        }
        Ok(())
    }

    /// Frees the bytes of a deleted snapshot whose maps and hashes are all that deltas need from now on. What is damaged
    /// of those is made again before: afterwards there is nothing to make it from.
    pub(super) fn free_when_sound(&self, record: &SnapshotRecord) -> Result<()> {
        if !self.frees_bytes_of(record) {
            return Ok(());
        }
        let dir = self.store.snapshot_dir(record);
        let count = || MapFile::open(&dir.allocated()).and_then(|map| map.count());
        if let Err(cbt::Error::Damaged { what, .. }) = count() {
            self.write_allocated(record, &what, &self.hashing.stop)?;
        }
        let lacking = self.without_hash(&dir)?;
        let chain = self.locks.wait(Key::Chain(record.volume.clone()));
        if !lacking.is_empty() {
            let dir = self.store.snapshot_dir(record);
            add_to(&MapFile::open(&dir.pending())?, header(record), &lacking, &dir.pending())?;
            // Later, for a disk that fails may not keep those either.
            let what = "pages of hashes that are needed once the data is freed are damaged".to_owned();
            return Err(cbt::Error::Damaged { path: dir.hashes(), what }.into());
        }
        let mut doomed = None;
        // Another snapshot may need them now.
        if self.frees_bytes_of(record) && self.pending_bytes(record) == 0 {
            doomed = self.store.take_bytes(record)?;
        }
        drop(chain);
        drop(doomed);
        Ok(())
    }

    /// The allocated blocks of a snapshot whose hash is not there, for its page is damaged.
    fn without_hash(&self, dir: &ObjectDir) -> Result<Segments> {
        let allocated = MapFile::open(&dir.allocated())?;
        let mut hashes = HashReader::new(HashFile::open(&dir.hashes())?);
        let mut lacking = Segments::new();
        for index in allocated.indexes() {
            self.hashing.stop.check()?;
            let unknown = hashes.unknown(index, &allocated.segment(index)?)?;
            if !unknown.is_empty() {
                lacking.push((index, unknown));
            }
        }
        Ok(lacking)
    }
}

/// Blocks by segment, ascending.
type Segments = Vec<(u32, RoaringBitmap)>;

/// The blocks that only one of two maps holds. A damaged segment of the first holds none.
fn differing(claimed: &MapFile, found: &MapFile) -> Result<Segments> {
    let mut indexes: Vec<u32> = claimed.indexes().chain(found.indexes()).collect();
    indexes.sort_unstable();
    indexes.dedup();
    let mut differing = Segments::new();
    for index in indexes {
        let members = match claimed.segment(index) {
            Err(cbt::Error::Damaged { .. }) => RoaringBitmap::new(),
            members => members?,
        } ^ found.segment(index)?;
        if !members.is_empty() {
            differing.push((index, members));
        }
    }
    Ok(differing)
}

/// Replaces a map by one that holds these blocks as well.
fn add_to(map: &MapFile, header: MapHeader, more: &Segments, path: &Path) -> Result<()> {
    durable::replace_with(path, &path.with_extension("map.new"), |fresh| {
        let mut writer = MapWriter::create(fresh, header)?;
        let mut more = more.iter().peekable();
        for index in map.indexes() {
            while let Some((index, members)) = more.next_if(|(other, _)| *other < index) {
                writer.insert_segment(*index, members.clone())?;
            }
            let mut members = super::members_or_all(map, index)?;
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
