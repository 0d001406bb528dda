//! Hashes of snapshots that `pending` does not vouch for yet: those that streams make, and those that hashing has written
//! since a stream opened the maps. They are in memory only, so that no one reads a block that someone else has hashed.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use parking_lot::Mutex;
use roaring::RoaringBitmap;

use super::BlockHash;
use super::segment::{SegmentIndex, locate};
use base::{Block, BlockRange, SnapshotId};

/// The most bytes that those of all snapshots take. Beyond that they are not kept, and blocks are read again.
const MEMORY: usize = 8 << 20;
/// Bytes that a hash takes in a table.
const MADE: usize = 64;
/// Bytes that a block takes in a bitmap, at most.
const WRITTEN: usize = 2;

/// The fresh hashes of all snapshots that are not hashed to the end.
#[derive(Debug, Default)]
pub struct FreshTable {
    of: Mutex<HashMap<SnapshotId, Arc<FreshHashes>>>,
    memory: Arc<AtomicUsize>,
}

impl FreshTable {
    /// Those of a snapshot. A reader takes them before it opens `pending`.
    pub fn of(&self, id: &SnapshotId) -> Arc<FreshHashes> {
        let mut table = self.of.lock();
        let new = || {
            let (state, writes) = Default::default();
            Arc::new(FreshHashes { state, writes, memory: self.memory.clone() })
        };
        table.entry(id.clone()).or_insert_with(new).clone()
    }

    /// Nothing of the snapshot is left to be hashed, or it is gone.
    pub fn forget(&self, id: &SnapshotId) {
        self.of.lock().remove(id);
    }
}

/// The fresh hashes of a snapshot.
#[derive(Debug, Default)]
pub struct FreshHashes {
    state: Mutex<State>,
    /// How often hashing has written slots, so that streams need no lock where it has not.
    writes: AtomicU64,
    /// Bytes that those of all snapshots take.
    memory: Arc<AtomicUsize>,
}

#[derive(Debug, Default)]
struct State {
    /// What streams made, until hashing takes it.
    made: BTreeMap<Block, BlockHash>,
    /// Blocks whose slots hashing has written.
    written: BTreeMap<SegmentIndex, RoaringBitmap>,
    /// Bytes that they take.
    bytes: usize,
}

impl FreshHashes {
    /// Whether there is memory for more bytes.
    fn reserve(&self, state: &mut State, bytes: usize) -> bool {
        if self.memory.fetch_add(bytes, Ordering::Relaxed) + bytes > MEMORY {
            self.memory.fetch_sub(bytes, Ordering::Relaxed);
            return false;
        }
        state.bytes += bytes;
        true
    }

    fn release(&self, state: &mut State, bytes: usize) {
        state.bytes -= bytes;
        self.memory.fetch_sub(bytes, Ordering::Relaxed);
    }

    /// Keeps a hash that a stream made, for hashing.
    pub(super) fn make(&self, block: Block, hash: BlockHash) {
        let mut state = self.state.lock();
        if !state.made.contains_key(&block) && self.reserve(&mut state, MADE) {
            state.made.insert(block, hash);
        }
    }

    /// Takes what streams made of some blocks of a segment.
    pub(super) fn take(&self, index: SegmentIndex, members: &RoaringBitmap) -> BTreeMap<Block, BlockHash> {
        let mut state = self.state.lock();
        let BlockRange { start, end } = index.blocks();
        let is_member = |block: &Block| members.contains(locate(*block).1);
        let blocks: Vec<Block> =
            state.made.range(start..end).map(|(block, _)| *block).filter(is_member).collect();
        let taken: BTreeMap<_, _> =
            blocks.iter().filter_map(|block| state.made.remove_entry(block)).collect();
        self.release(&mut state, taken.len() * MADE);
        taken
    }

    /// The slots of these blocks of a segment are written.
    pub(super) fn wrote(&self, index: SegmentIndex, runs: &[BlockRange]) {
        let mut state = self.state.lock();
        let count: u64 = runs.iter().map(|run| run.end - run.start).sum();
        if !self.reserve(&mut state, count as usize * WRITTEN) {
            return;
        }
        let written = state.written.entry(index).or_default();
        for run in runs {
            let first = locate(run.start).1;
            written.insert_range(first..first + (run.end - run.start) as u32);
        }
        self.writes.fetch_add(1, Ordering::Release);
    }

    /// Whether the slot of a block was written since `pending` was opened, or before. `Some` is the number of writes till now: a page
    /// that is read after it was returned holds the slots of them all.
    pub(super) fn written(&self, block: Block) -> Option<u64> {
        if self.writes.load(Ordering::Acquire) == 0 {
            return None;
        }
        let (index, within) = locate(block);
        let state = self.state.lock();
        let is_written = state.written.get(&index).is_some_and(|written| written.contains(within));
        is_written.then(|| self.writes.load(Ordering::Relaxed))
    }

    /// Forgets which slots were written, unless a stream may ask for them: hashing begins a step, and those of the
    /// steps before count by `pending`. The caller and the table hold it, and a stream each.
    pub fn begin_step(self: &Arc<Self>) {
        if Arc::strong_count(self) > 2 {
            return;
        }
        let mut state = self.state.lock();
        state.written.clear();
        self.writes.store(0, Ordering::Release);
        let bytes = state.bytes - state.made.len() * MADE;
        self.release(&mut state, bytes);
    }
}

impl Drop for FreshHashes {
    fn drop(&mut self) {
        let bytes = self.state.lock().bytes;
        self.memory.fetch_sub(bytes, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_snapshots_share_the_memory_and_give_it_back() {
        let table = FreshTable::default();
        let id = || SnapshotId::random(base::DataDirKey::random().expect("key")).expect("id");
        let (one, other) = (id(), id());
        let most = (MEMORY / MADE) as u64;
        for block in 0..most + 5 {
            table.of(&one).make(Block(block), [1; 32]);
        }
        assert_eq!(table.memory.load(Ordering::Relaxed), MEMORY);
        table.of(&other).make(Block(0), [1; 32]);
        table.of(&other).wrote(SegmentIndex(0), &[BlockRange::new(0, 9)]);
        assert_eq!(table.of(&other).written(Block(0)), None, "there is no memory left");
        let taken = table.of(&one).take(SegmentIndex(0), &(0..most as u32 / 2).collect());
        assert_eq!(taken.len() as u64, most / 2);
        table.of(&other).wrote(SegmentIndex(0), &[BlockRange::new(3, 9)]);
        let written = |block| table.of(&other).written(Block(block));
        assert_eq!([2, 3, 8, 9].map(written), [None, Some(1), Some(1), None]);
        // A stream that holds them needs what was written before.
        let (hashing, stream) = (table.of(&other), table.of(&other));
        hashing.begin_step();
        assert_eq!(written(3), Some(1));
        drop(stream);
        hashing.begin_step();
        assert_eq!(written(3), None);
        drop(hashing);
        table.forget(&one);
        table.forget(&other);
        assert_eq!(table.memory.load(Ordering::Relaxed), 0);
    }
}
