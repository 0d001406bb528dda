//! Makes the bytes of a new volume like those of a source on another node. What is here already counts only for what its
//! hash says: a copy that was interrupted goes on where it was, and whatever is wrong in the file is replaced. So there is no
//! record of progress, which could be wrong.
//!
//! Segment by segment: ask which blocks hold data there, punch what holds data here alone, compare hashes of what holds data on
//! both sides, fetch the rest. No byte is written whose hash was not looked at.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use roaring::RoaringBitmap;

use super::plan::{Plan, portions, runs};
use super::throttle::{LOOK, Throttle};
use crate::driver::{Error, Result};
use crate::sys::clone;
use base::{Block, BlockRange, BlockSize, Stop, Stopped, VolumeId};
use cbt::{BlockHash, SEGMENT_BLOCKS, SegmentIndex, hash_each};
use files::{Context, DataRanges, change};

/// Blocks whose hashes are compared at once: half a MiB of hashes.
const COMPARED: usize = 16 << 10;
/// Bytes that are asked for at once.
const FETCHED: u64 = 16 << 20;
/// Bytes that are read here at once, to be hashed.
const READ: u64 = 1 << 20;
/// How often progress is logged.
const LOG_EVERY: Duration = Duration::from_secs(10);
const HASH: usize = 32;

/// Why the other node did not give what it was asked for.
#[derive(Debug)]
pub enum RemoteFault {
    /// The node does not answer, or refuses for the moment: to be tried again.
    Unavailable(String),
    /// The source does not exist any more.
    Gone(String),
    /// The source cannot be read.
    Damaged(String),
    /// The node refuses, for a reason that does not pass by itself.
    Refused(String),
    /// The transfer was stopped.
    Stopped,
}

/// What was opened on the other node.
#[derive(Clone, Debug)]
pub struct Opened {
    /// The source's size in bytes.
    pub capacity: u64,
    /// The unit of its maps.
    pub block_size: BlockSize,
    /// Whether deltas are kept of it.
    pub tracking: bool,
    /// Segments that hold data, ascending.
    pub segments: Vec<SegmentIndex>,
    /// Blocks that hold data.
    pub allocated_blocks: u64,
    /// Ids of what is much like it: its volume, and that volume's snapshots.
    pub relatives: Vec<String>,
}

/// The bytes of whole blocks, and a hash of each.
pub type Blocks = (Vec<u8>, Vec<u8>);

/// A source on another node. Each call waits until it is answered, or `stop` says so.
pub trait Remote: Send {
    /// Opens it for the new volume of this id. To be called again after a fault.
    fn open(&mut self, volume_id: &str, stop: &Stop) -> Result<Opened, RemoteFault>;
    /// The blocks of a segment that hold data.
    fn map(&mut self, index: SegmentIndex, stop: &Stop) -> Result<RoaringBitmap, RemoteFault>;
    /// The hashes of blocks, ascending.
    fn hashes(
        &mut self,
        index: SegmentIndex,
        blocks: &RoaringBitmap,
        stop: &Stop,
    ) -> Result<Vec<u8>, RemoteFault>;
    /// Asks for the bytes of blocks, which [`Remote::next`] hands out.
    fn read(&mut self, index: SegmentIndex, blocks: &RoaringBitmap, stop: &Stop) -> Result<(), RemoteFault>;
    /// Whole blocks, and their hashes, in the order in which they were asked for; `None` after the last ones.
    fn next(&mut self, stop: &Stop) -> Result<Option<Blocks>, RemoteFault>;
    /// It is not needed any more.
    fn close(&mut self);
    /// Which node it is on, for messages.
    fn node(&self) -> &str;
}

/// How far it is, for the log and for metrics.
#[derive(Debug, Default)]
pub(super) struct Progress {
    /// Bytes that the source holds.
    pub total: AtomicU64,
    /// Of these, what is known to be here.
    pub done: AtomicU64,
    /// Bytes that came over the network, those among them that were not used.
    pub received: AtomicU64,
}

/// Why a copy ended before its end.
pub(super) enum Cut {
    /// It goes on when the source is available again.
    Unavailable(String),
    /// It cannot go on.
    Failed(Error),
}

impl From<Error> for Cut {
    fn from(error: Error) -> Self {
        Cut::Failed(error)
    }
}

impl From<files::Error> for Cut {
    fn from(error: files::Error) -> Self {
        Cut::Failed(error.into())
    }
}

impl From<Stopped> for Cut {
    fn from(stopped: Stopped) -> Self {
        Cut::Failed(stopped.into())
    }
}

impl From<RemoteFault> for Cut {
    fn from(fault: RemoteFault) -> Self {
        match fault {
            RemoteFault::Unavailable(why) => Cut::Unavailable(why),
            fault => Cut::Failed(fault.into()),
        }
    }
}

impl From<RemoteFault> for Error {
    fn from(fault: RemoteFault) -> Self {
        match fault {
            RemoteFault::Unavailable(why) => Error::Unavailable(why),
            RemoteFault::Gone(id) => Error::NotFound { kind: "the source", id },
            RemoteFault::Damaged(what) => Error::Damaged(what),
            RemoteFault::Refused(why) => Error::Precondition(why),
            RemoteFault::Stopped => Error::Stopped(Stopped::Cancelled),
        }
    }
}

/// The file of a volume that becomes like a source.
pub(super) struct Receiver<'r> {
    pub file: &'r File,
    pub path: &'r Path,
    pub remote: &'r mut dyn Remote,
    pub opened: &'r Opened,
    pub throttle: &'r Throttle,
    pub progress: &'r Progress,
    pub stop: &'r Stop,
    pub volume_id: &'r VolumeId,
    /// When progress was logged last.
    pub logged: Instant,
}

impl Receiver<'_> {
    /// Makes the file like the source, and syncs it.
    pub fn receive(&mut self) -> Result<(), Cut> {
        let (size, length) = (self.opened.block_size, self.file.metadata().context("stat", self.path)?.len());
        self.progress.total.store(self.opened.allocated_blocks * size.bytes(), Ordering::Relaxed);
        self.progress.done.store(0, Ordering::Relaxed);
        for number in 0..size.blocks_in(length).div_ceil(SEGMENT_BLOCKS) {
            self.stop.check()?;
            // A volume has at most 2^51 blocks.
            let index = SegmentIndex(number as u32);
            let theirs = match self.opened.segments.binary_search(&index) {
                Ok(_) => self.remote.map(index, self.stop)?,
                Err(_) => RoaringBitmap::new(),
            };
            let end = Block(size.blocks_in(self.opened.capacity));
            if theirs.max().is_some_and(|last| index.block(last) >= end) {
                return Err(
                    RemoteFault::Refused(format!("{} has data past its end", self.remote.node())).into()
                );
            }
            self.segment(index, &theirs, length)?;
        }
        Ok(change::sync(self.file, self.path)?)
    }

    fn segment(&mut self, index: SegmentIndex, theirs: &RoaringBitmap, length: u64) -> Result<(), Cut> {
        let plan = Plan::of(theirs, &self.ours(index, length)?);
        for run in runs(&plan.punch, u32::MAX) {
            let bytes = range(index, run).bytes(self.opened.block_size);
            change::punch_hole(self.file, self.path, bytes.start, bytes.len().min(length - bytes.start))?;
        }
        let mut fetch = plan.fetch;
        for portion in portions(plan.compare, COMPARED) {
            let hashes = self.remote.hashes(index, &portion, self.stop)?;
            let differing = self.differing(index, &portion, &hashes)?;
            self.count_done(portion.len() - differing.len());
            fetch |= differing;
        }
        let size = self.opened.block_size.bytes();
        let most = self.throttle.portion(FETCHED.max(size)) / size;
        for portion in portions(fetch, most.max(1) as usize) {
            self.wait(portion.len() * size)?;
            self.fetch(index, &portion)?;
        }
        Ok(())
    }

    /// The blocks of a segment that hold data here.
    fn ours(&self, index: SegmentIndex, length: u64) -> Result<RoaringBitmap> {
        let (size, segment) = (self.opened.block_size, index.blocks());
        let mut within = segment.bytes(size);
        within.end = within.end.min(length);
        let mut ours = RoaringBitmap::new();
        for range in DataRanges::of(self.file, self.path, within) {
            let found = range?.blocks(size);
            ours.insert_range((found.start - segment.start) as u32..(found.end - segment.start) as u32);
        }
        Ok(ours)
    }

    /// Those of our blocks that have other hashes than these.
    fn differing(
        &self,
        index: SegmentIndex,
        blocks: &RoaringBitmap,
        hashes: &[u8],
    ) -> Result<RoaringBitmap, Cut> {
        let mut hashes = whole_hashes(hashes, blocks.len())?;
        let (size, mut differing, mut buffer) = (self.opened.block_size, RoaringBitmap::new(), Vec::new());
        for run in runs(blocks, (READ / size.bytes()).max(1) as u32) {
            self.stop.check()?;
            let bytes = range(index, run.clone()).bytes(size);
            buffer.resize(bytes.len() as usize, 0);
            self.file.read_exact_at(&mut buffer, bytes.start).context_at("read", self.path, bytes.start)?;
            hash_each(&buffer, size, |number, hash| {
                if hashes.next() != Some(&hash) {
                    differing.insert(run.start + number as u32);
                }
            });
        }
        Ok(differing)
    }

    /// Fetches blocks, and writes them once their hashes are right.
    fn fetch(&mut self, index: SegmentIndex, blocks: &RoaringBitmap) -> Result<(), Cut> {
        let size = self.opened.block_size;
        self.remote.read(index, blocks, self.stop)?;
        let mut wanted = blocks.iter();
        while let Some((data, hashes)) = self.remote.next(self.stop)? {
            self.progress.received.fetch_add(data.len() as u64, Ordering::Relaxed);
            let count = data.len() as u64 / size.bytes();
            let came: RoaringBitmap = wanted.by_ref().take(count as usize).collect();
            if count == 0 || !(data.len() as u64).is_multiple_of(size.bytes()) || came.len() != count {
                return Err(
                    RemoteFault::Refused(format!("{} sent incomplete blocks", self.remote.node())).into()
                );
            }
            self.check(index, &came, &data, &hashes)?;
            let mut rest = &data[..];
            for run in runs(&came, u32::MAX) {
                let bytes = range(index, run).bytes(size);
                let (run, behind) = rest.split_at(bytes.len() as usize);
                change::write_at(self.file, self.path, run, bytes.start)?;
                // The disk writes while the next blocks are under way.
                clone::start_writing(self.file, bytes.start, bytes.len());
                rest = behind;
            }
            self.count_done(count);
        }
        match wanted.next() {
            None => Ok(()),
            Some(_) => Err(Cut::Unavailable("the answer was cut short".to_owned())),
        }
    }

    /// Fails where blocks do not have their hashes.
    fn check(
        &self,
        index: SegmentIndex,
        blocks: &RoaringBitmap,
        data: &[u8],
        hashes: &[u8],
    ) -> Result<(), Cut> {
        let mut hashes = whole_hashes(hashes, blocks.len())?;
        let mut wrong = None;
        hash_each(data, self.opened.block_size, |number, hash| {
            if hashes.next() != Some(&hash) && wrong.is_none() {
                wrong = blocks.select(number as u32);
            }
        });
        let Some(wrong) = wrong else { return Ok(()) };
        let bytes = range(index, wrong..wrong + 1).bytes(self.opened.block_size);
        Err(Error::Damaged(format!(
            "bytes {} to {} of the source, as {} sent them, do not match their hash: they are damaged on that node, and no \
             volume was made; run `deltapath verify` there",
            bytes.start,
            bytes.end,
            self.remote.node()
        ))
        .into())
    }

    fn count_done(&mut self, blocks: u64) {
        let bytes = blocks * self.opened.block_size.bytes();
        let done = self.progress.done.fetch_add(bytes, Ordering::Relaxed) + bytes;
        if self.logged.elapsed() >= LOG_EVERY {
            self.logged = Instant::now();
            let bytes = self.progress.total.load(Ordering::Relaxed);
            let (volume_id, from) = (self.volume_id, self.remote.node());
            tracing::info!(%volume_id, from, done, bytes, "a volume is being copied from another node");
        }
    }

    /// Waits until `bytes` may be fetched.
    fn wait(&self, bytes: u64) -> Result<()> {
        let until = Instant::now() + self.throttle.take(bytes, Instant::now());
        loop {
            self.stop.check()?;
            let left = until.saturating_duration_since(Instant::now());
            if left == Duration::ZERO {
                return Ok(());
            }
            std::thread::sleep(left.min(LOOK));
        }
    }
}

fn range(index: SegmentIndex, run: std::ops::Range<u32>) -> BlockRange {
    let start = index.block(run.start);
    BlockRange { start, end: Block(start.0 + run.len() as u64) }
}

/// A hash a block.
fn whole_hashes(hashes: &[u8], blocks: u64) -> Result<std::slice::Iter<'_, BlockHash>, Cut> {
    let (hashes, rest) = hashes.as_chunks::<HASH>();
    match rest.is_empty() && hashes.len() as u64 == blocks {
        true => Ok(hashes.iter()),
        false => Err(RemoteFault::Refused(format!("got {} hashes for {blocks} blocks", hashes.len())).into()),
    }
}
