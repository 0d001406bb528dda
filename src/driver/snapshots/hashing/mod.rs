//! Hashing after the call. CreateSnapshot returns before the blocks are hashed (they are in `pending.map`), and one thread
//! with low-priority helpers hashes them. Then it compares the blocks that may have changed (`changed.map`) and keeps
//! only those that did, so that a delta only reads the map. Answers to clients are the same before and after: a delta
//! compares blocks without a hash by their bytes, and blocks that were not compared yet by their hashes.

pub(in crate::driver) mod writers;

use std::collections::BTreeMap;
use std::fs::File;
use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

use roaring::RoaringBitmap;

use crate::driver::error::{Error, Result};
use crate::driver::health::read_errors::ReadErrors;
use crate::driver::locks::Key;
use crate::driver::shared::Shared;
use crate::driver::snapshots::history::hold::{Histories, header};
use crate::driver::snapshots::queue::{Next, Part, Queue, TURN, Work};
use crate::store::{Index, SnapshotRecord};
use crate::sys;
use base::{Block, DraftFile, Foreground, ObjectDir};
use cbt::{
    self, Allocation, DeltaScan, Found, HashFile, HashReader, MapFile, MapHeader, MapWriter, Relation,
    SegmentIndex, ToHash,
};
use files::Context;
use files::durable;

/// Bytes hashed in a step. Each step records its progress, so a restart repeats at most one, and then it is another
/// volume's turn. A step ends with two flushes, which delay writers of volumes that flush at that moment.
const STEP: u64 = 256 << 20;

/// Hashes snapshots, compares them with their parents, and frees what is no longer needed.
#[derive(Debug)]
pub struct Hashing {
    pub(in crate::driver) shared: Arc<Shared>,
    pub(in crate::driver) histories: Arc<Histories>,
    pub(in crate::driver) queue: Arc<Queue>,
    /// Hashing pauses while these work.
    pub(in crate::driver) foreground: Arc<Foreground>,
    pub(in crate::driver) read_errors: Arc<ReadErrors>,
}

/// The thread that hashes. Ends soon after it is dropped: it hashes a few more megabytes at most.
#[derive(Debug)]
pub struct HashingThread {
    hashing: Arc<Hashing>,
    thread: Option<std::thread::JoinHandle<()>>,
}

impl HashingThread {
    /// Starts hashing, on all cores.
    pub fn start(hashing: Arc<Hashing>) -> Result<Self> {
        let helpers = rayon::ThreadPoolBuilder::new()
            .thread_name(|number| format!("hash-{number}"))
            .start_handler(|_| sys::lower_priority())
            .build()
            .map_err(std::io::Error::other)
            .context("start the hashing threads of", &hashing.shared.config.data_dir)?;
        let thread = std::thread::Builder::new().name("hashing".into()).spawn({
            let hashing = hashing.clone();
            move || {
                let _ends = EndsProcess;
                hashing.run(&helpers);
            }
        });
        let thread = thread.context("start the hashing thread of", &hashing.shared.config.data_dir)?;
        Ok(HashingThread { hashing, thread: Some(thread) })
    }
}

impl Drop for HashingThread {
    fn drop(&mut self) {
        self.hashing.queue.cease();
        if let Some(thread) = self.thread.take() {
            // It does not panic: that would have ended the process.
            let _ = thread.join();
        }
    }
}

/// Ends the process where the thread that has it panics, as a kill would. Without that thread, deltas stay exact, but what is
/// deleted is never freed. The next start takes its work up.
struct EndsProcess;

impl Drop for EndsProcess {
    fn drop(&mut self) {
        if std::thread::panicking() {
            tracing::error!("the hashing thread panicked, the driver ends: start it again");
            std::process::abort();
        }
    }
}

impl Hashing {
    fn run(&self, helpers: &rayon::ThreadPool) {
        self.take_up();
        self.apply_retention();
        loop {
            // A deletion that needed it may have found no room for it yet.
            let _ = self.shared.store.take_reserve();
            let work = match self.queue.next() {
                Next::Work(work) => work,
                Next::Retention => {
                    self.apply_retention();
                    continue;
                }
                Next::Stop => return,
            };
            match self.work_on(&work, helpers) {
                Ok(true) => self.queue.done(&work),
                Ok(false) => self.queue.go_on(&work),
                Err(error) if error.stopped().is_some() => return,
                // The parent's data of these blocks was freed, so a retry cannot succeed.
                Err(Error::Cbt(cbt::Error::Lost { what })) => {
                    tracing::warn!(snapshot_id = %work.id, what, "not compared with the snapshot before");
                    self.queue.done(&work);
                }
                // Until a retry succeeds, deltas read the data instead.
                Err(error) => {
                    if let Some(record) = self.shared.store.read(|index| index.known(&work.id)) {
                        self.read_errors.note(&record.volume, &error);
                    }
                    let error = error.explain(&self.shared.config.data_dir);
                    tracing::warn!(snapshot_id = %work.id, error, "a snapshot could not be hashed, trying again later");
                    self.queue.put_off(&work);
                }
            }
        }
    }

    /// Queues what the last driver left to be hashed or compared, and removes the maps that it did not finish. Reads a map
    /// of each snapshot, which takes time, so calls are served meanwhile.
    fn take_up(&self) {
        let volumes: Vec<_> = self.shared.store.read(|index| index.lines().cloned().collect());
        for volume in volumes {
            let line: Vec<_> = self.shared.store.read(|index| index.line(&volume).cloned().collect());
            for record in &line {
                self.remove_drafts(record);
                if !record.tracking {
                    continue;
                }
                let bytes = self.histories.pending_bytes(record);
                if bytes > 0 || self.is_to_compare(record) {
                    self.queue.add(record, bytes);
                }
            }
            if self.queue.stop.check().is_err() {
                return;
            }
        }
    }

    fn remove_drafts(&self, record: &SnapshotRecord) {
        let Ok(_map) = self.shared.locks.wait_until(Key::Map(record.id.clone()), &self.queue.stop) else {
            return;
        };
        self.histories.hold([&record.volume]).remove_drafts(record);
    }

    /// Whether the `changed` map of a snapshot was not compared yet.
    fn is_to_compare(&self, record: &SnapshotRecord) -> bool {
        let changed = MapFile::open(&self.shared.store.snapshot_dir(record).changed());
        changed.is_ok_and(|changed| changed.header().relative_to.is_some() && !changed.is_exact())
    }

    /// Applies the retention to all volumes.
    fn apply_retention(&self) {
        let volumes: Vec<_> = self.shared.store.read(|index| index.lines().cloned().collect());
        for volume in volumes {
            let is_retained =
                |index: &Index| index.line(&volume).any(|record| index.retained(&record.id).is_some());
            if self.shared.store.read(is_retained) {
                self.histories.hold([&volume]).apply_retention(&volume);
            }
            if self.queue.stop.check().is_err() {
                return;
            }
        }
    }

    /// Does a step of the work on a snapshot; returns whether it was the last.
    fn work_on(&self, work: &Work, helpers: &rayon::ThreadPool) -> Result<bool> {
        let known = || self.shared.store.read(|index| index.known(&work.id));
        let Some(record) = known() else { return Ok(true) };
        let done = self.work_on_part(work.part, &record, helpers);
        // The snapshot was removed meanwhile.
        if known().is_none() {
            self.histories.fresh.forget(&work.id);
            return Ok(true);
        }
        done
    }

    fn work_on_part(&self, part: Part, record: &SnapshotRecord, helpers: &rayon::ThreadPool) -> Result<bool> {
        match part {
            Part::Changes => self.compare_changes(record, helpers),
            Part::Rest => {
                if !self.hash_snapshot(record, None, helpers)? {
                    return Ok(false);
                }
                self.histories.fresh.forget(&record.id);
                self.histories.check_allocated(record)?;
                self.histories.free_when_sound(record)?;
                Ok(true)
            }
        }
    }

    /// Hashes the blocks that may have changed since the parent, in both, and then keeps those that did.
    fn compare_changes(&self, record: &SnapshotRecord, helpers: &rayon::ThreadPool) -> Result<bool> {
        // If the map is damaged, deltas compare all blocks.
        let Some(changed) = MapFile::open_sound(&self.shared.store.snapshot_dir(record).changed())? else {
            return Ok(true);
        };
        let Some(relation) = changed.header().relative_to.clone().filter(|relation| !relation.exact) else {
            return Ok(true);
        };
        let Some(parent) = self.shared.store.read(|index| index.known(&relation.snapshot)) else {
            return Ok(true);
        };
        for record in [&parent, record] {
            if !self.hash_snapshot(record, Some(&changed), helpers)? {
                return Ok(false);
            }
        }
        helpers.install(|| self.compare(record, &parent))?;
        Ok(true)
    }

    /// Hashes one step of the pending blocks of a snapshot, or only of those in `only`. Returns whether it was the last step.
    ///
    /// 1. Write the slots of the blocks, clear the slots of blocks that are holes now, and sync. The blocks are still in
    ///    `pending`, so after a crash their slots do not count, and they are hashed again.
    /// 2. Replace `pending` by a map without these blocks, by a rename: from here on the slots count. If a power cut brings
    ///    the old map back, the blocks are hashed once more. `free_bytes` rules that out before the data is removed.
    fn hash_snapshot(
        &self,
        record: &SnapshotRecord,
        only: Option<&MapFile>,
        helpers: &rayon::ThreadPool,
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

    /// Keeps in `changed` what differs from the parent.
    ///
    /// 1. Write the new map beside the old one: a crash leaves a file that the next try replaces.
    /// 2. Rename it over the old one. After a crash either may be there: the old one lists the same changes, and perhaps more.
    fn compare(&self, record: &SnapshotRecord, parent: &SnapshotRecord) -> Result<()> {
        let dir = self.shared.store.snapshot_dir(record);
        // Read again: a deletion may have merged another map into it meanwhile, and queued it again.
        let changed = MapFile::open(&dir.changed())?;
        let relation = changed.header().relative_to.clone();
        let Some(relation) = relation.filter(|relation| relation.snapshot == parent.id && !relation.exact)
        else {
            return Ok(());
        };
        let fresh = DraftFile::Compared.of(&dir.changed());
        let written = self.write_compared(&fresh, changed, &relation, parent, record);
        if written.is_err() {
            durable::remove(&fresh)?;
            return written;
        }
        self.histories.hold([&record.volume]).keep_compared(record, &relation, &fresh)
    }

    fn write_compared(
        &self,
        fresh: &Path,
        changed: MapFile,
        relation: &Relation,
        parent: &SnapshotRecord,
        record: &SnapshotRecord,
    ) -> Result<()> {
        let exact = Relation { exact: true, ..relation.clone() };
        let header = MapHeader { relative_to: Some(exact), ..changed.header().clone() };
        durable::remove(fresh)?;
        let mut writer = MapWriter::create(fresh, header)?;
        let stop = &self.queue.stop;
        let mut scan = DeltaScan::new(
            self.histories.side(parent, stop)?,
            self.histories.side(record, stop)?,
            Some(vec![changed]),
            Block(0),
        );
        loop {
            match scan.next_run(stop, Instant::now() + TURN)? {
                Found::Run(run) => writer.insert(run)?,
                Found::Nothing => {}
                Found::End => return Ok(writer.finish()?),
            }
        }
    }

    /// Hashes a step of a snapshot; `None` if nothing is left to hash.
    fn hash_step(
        &self,
        record: &SnapshotRecord,
        only: Option<&MapFile>,
        helpers: &rayon::ThreadPool,
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
            helpers.install(|| to_hash.hash_segment(index, members, stop))?;
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
