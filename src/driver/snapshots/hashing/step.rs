//! A step: which blocks it hashes, which hashes it takes from the parent, and what it leaves pending.

use std::collections::BTreeMap;
use std::fs::File;
use std::path::Path;

use roaring::RoaringBitmap;

use crate::driver::error::{Error, Result};
use crate::driver::snapshots::hashing::run::{Hashing, Helpers, with};
use crate::driver::snapshots::history::hold::header;
use crate::store::SnapshotRecord;
use crate::sys::clone;
use base::ObjectDir;
use cbt::{Allocation, HashFile, HashReader, MapFile, MapHeader, MapWriter, SegmentIndex, ToHash};
use files::Context;

/// Bytes hashed in a step. Each step records its progress, so a restart repeats at most one, and then it is another
/// volume's turn. A step ends with two flushes, which delay writers of volumes that flush at that moment.
const STEP: u64 = 256 << 20;

impl Hashing {
    /// Hashes one step of the pending blocks of a snapshot, or only of those in `only`. Returns whether it was the last step.
    ///
    /// 1. Write the slots of the blocks, clear the slots of blocks that are holes now, and sync. The blocks are still in
    ///    `pending`, so after a crash their slots do not count, and they are hashed again.
    /// 2. Replace `pending` by a map without these blocks, by a rename: from here on the slots count. If a power cut brings
    ///    the old map back, the blocks are hashed once more. `free_bytes` rules that out before the data is removed.
    pub(super) fn hash_snapshot(
        &self,
        record: &SnapshotRecord,
        only: Option<&MapFile>,
        helpers: Helpers<'_>,
    ) -> Result<bool> {
        let dir = self.shared.store.snapshot_dir(record);
        let step = match self.hash_step(record, only, helpers) {
            // The snapshot was removed, or its bytes were freed: nothing is left to hash.
            Err(Error::Cbt(cbt::Error::Sys(error)) | Error::Sys(error))
                if error.is_not_found() && !dir.bytes().exists() =>
            {
                return Ok(true);
            }
            step => step?,
        };
        let Some(step) = step else { return Ok(true) };
        let mut history = self.histories.hold([&record.volume]);
        let is_there = history.replace_pending(record, step.done, |fresh| step.write(fresh))?;
        Ok(step.is_last || !is_there)
    }

    /// Hashes a step of a snapshot; `None` if nothing is left to hash.
    fn hash_step(
        &self,
        record: &SnapshotRecord,
        only: Option<&MapFile>,
        helpers: Helpers<'_>,
    ) -> Result<Option<Rest>> {
        let stop = &self.queue.stop;
        let dir = self.shared.store.snapshot_dir(record);
        let pending = match MapFile::open_sound(&dir.pending())? {
            Some(pending) => pending,
            // The map is damaged, so all blocks count as not hashed.
            None => self.histories.healed(record, stop, || MapFile::open(&dir.allocated()))?,
        };
        let wanted: Vec<SegmentIndex> = match only {
            None => pending.indexes().collect(),
            Some(only) => {
                let mut shared = Vec::new();
                for index in only.indexes() {
                    if !pending.segment_or_all(index)?.is_disjoint(&only.segment_or_all(index)?) {
                        shared.push(index);
                    }
                }
                shared
            }
        };
        if wanted.is_empty() {
            // Returns before the data is opened, since it may have been freed.
            return Ok(None);
        }
        let path = dir.data();
        let data = File::open(&path).context("open", &path)?;
        // Hashing itself asks for what it reads next, except while it gives way.
        clone::turn_off_readahead(&data);
        let also = data.try_clone().context("open", &path)?;
        let allocated = self.histories.healed(record, stop, || MapFile::open(&dir.allocated()))?;
        let allocated = Allocation::new(allocated, Some(also), &path);
        let hashes = HashFile::open_for_update(&dir.hashes())?;
        let size = record.block_size;
        let fresh = self.histories.fresh.of(&record.id);
        fresh.begin_step();
        let to_hash = ToHash {
            data: &data,
            data_path: &path,
            size,
            hashes: &hashes,
            foreground: &self.foreground,
            fresh: &fresh,
        };
        let mut parent = self.hashed_parent(&dir);
        let (mut done, mut is_last) = (0, true);
        let mut taken = BTreeMap::new();
        for index in wanted {
            let held = allocated.segment(index)?;
            let mut pended = pending.segment_or_all(index)?;
            if let Some(only) = only {
                pended &= only.segment_or_all(index)?;
            }
            to_hash.forget(index, &pended - &held, stop)?;
            let mut members = &pended & held;
            if let Some(later) = cut_off(&mut members, (STEP - done) / size.bytes()) {
                pended -= later;
                is_last = false;
            }
            taken.insert(index, pended);
            done += members.len() * size.bytes();
            members -= to_hash.take_fresh(index, &members, stop)?;
            if let Some(parent) = &mut parent {
                let shared = parent.shares(index, &members)?;
                members -= to_hash.take_over(index, shared, &mut parent.hashes, stop)?;
            }
            with(helpers, || to_hash.hash_segment(index, members, stop))?;
            if !is_last {
                break;
            }
        }
        hashes.sync()?;
        Ok(Some(Rest { header: header(record), done, taken, is_last, pending, allocated }))
    }

    /// The snapshot that `changed` is relative to, if its hashes can be used.
    fn hashed_parent(&self, dir: &ObjectDir) -> Option<HashedParent> {
        let changed = MapFile::open(&dir.changed()).ok()?;
        let id = changed.header().relative_to.clone()?.snapshot;
        let parent = self.shared.store.read(|index| index.known(&id))?;
        let dir = self.shared.store.snapshot_dir(&parent);
        // `pending` is opened before the hashes, as everywhere.
        let pending = MapFile::open(&dir.pending()).ok()?;
        let allocated = MapFile::open(&dir.allocated()).ok()?;
        let hashes = HashReader::new(HashFile::open(&dir.hashes()).ok()?);
        Some(HashedParent { changed, pending, allocated, hashes })
    }
}

/// Keeps the first `room` members, and returns the others, if there are any.
fn cut_off(members: &mut RoaringBitmap, room: u64) -> Option<RoaringBitmap> {
    let first = members.select(u32::try_from(room).ok()?)?;
    let mut later = members.clone();
    later.remove_range(..first);
    members.remove_range(first..);
    Some(later)
}

/// The maps and hashes of a parent, whose hashes serve for blocks that its child shares with it.
struct HashedParent {
    changed: MapFile,
    pending: MapFile,
    allocated: MapFile,
    hashes: HashReader,
}

impl HashedParent {
    /// Those of `members` that did not change and whose hash the parent has; none if a map is damaged.
    fn shares(&self, index: SegmentIndex, members: &RoaringBitmap) -> Result<RoaringBitmap> {
        let segments =
            (self.changed.segment(index), self.pending.segment(index), self.allocated.segment(index));
        match segments {
            (Ok(changed), Ok(pending), Ok(allocated)) => Ok(((members & allocated) - changed) - pending),
            _ => Ok(RoaringBitmap::new()),
        }
    }
}

/// The blocks that one step leaves pending.
struct Rest {
    header: MapHeader,
    /// Bytes that the step hashed.
    done: u64,
    /// Blocks that the step removes from `pending`, by segment: those it hashed, and holes.
    taken: BTreeMap<SegmentIndex, RoaringBitmap>,
    /// Whether the step had room for all that was to be hashed.
    is_last: bool,
    /// The blocks that were pending before.
    pending: MapFile,
    allocated: Allocation,
}

impl Rest {
    fn write(&self, fresh: &Path) -> Result<()> {
        let mut writer = MapWriter::create(fresh, self.header.clone())?;
        for index in self.pending.indexes() {
            if let Some(taken) = self.taken.get(&index) {
                writer.insert_segment(index, self.pending.segment_or_all(index)? - taken)?;
                continue;
            }
            match writer.copy_segment(&self.pending, index) {
                Err(cbt::Error::Damaged { .. }) => {
                    writer.insert_segment(index, self.allocated.segment(index)?)?;
                }
                copied => copied?,
            }
        }
        Ok(writer.finish()?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use base::BlockSize;
    use cbt::SEGMENT_BLOCKS;

    #[test]
    fn a_step_takes_what_it_has_room_for() {
        let all = [1, 5, 6, 70_000, 4_194_303];
        for (room, taken) in [(0, 0), (1, 1), (3, 3), (4, 4), (5, 5), (6, 5), (1 << 32, 5)] {
            let mut members = RoaringBitmap::from(all);
            let later = cut_off(&mut members, room);
            assert_eq!(later.is_none(), taken == all.len(), "a step is the last one only if nothing is left");
            assert!(members.iter().eq(all[..taken].iter().copied()), "room for {room}");
            assert!(later.into_iter().flatten().eq(all[taken..].iter().copied()), "room for {room}");
        }
    }

    #[test]
    fn what_a_step_leaves_is_what_is_pending_next() {
        let dir = tempfile::tempdir().expect("temp dir");
        let path = dir.path().join("pending.map");
        let size = BlockSize::MIN;
        let header = MapHeader { block_size: size, blocks: 4 * SEGMENT_BLOCKS, relative_to: None };
        let mut writer = MapWriter::create(&path, header.clone()).expect("create");
        for index in 0..4 {
            writer.insert_segment(SegmentIndex(index), RoaringBitmap::from([index, 9])).expect("insert");
        }
        writer.finish().expect("finish");
        let pending = || MapFile::open(&path).expect("open");
        let allocated = Allocation::new(pending(), None, &path);
        // All blocks of segment 0, one of segment 1, and one that segment 2 does not have.
        let taken = [(0, vec![0, 9]), (1, vec![1]), (2, vec![7])];
        let taken = taken.map(|(index, members)| (SegmentIndex(index), members.into_iter().collect()));
        let rest =
            Rest { header, done: 0, taken: taken.into(), is_last: false, pending: pending(), allocated };
        let fresh = dir.path().join("fresh");
        rest.write(&fresh).expect("write");
        let fresh = MapFile::open(&fresh).expect("open");
        let members = |index| fresh.segment(SegmentIndex(index)).expect("segment").into_iter().collect();
        let left: Vec<Vec<u32>> = (0..4).map(members).collect();
        assert_eq!(left, [vec![], vec![9], vec![2, 9], vec![3, 9]]);
    }
}
