//! Makes the bytes of a new volume equal to those of a source on another node. A block that is already in the file counts
//! only if its hash is right. So an interrupted copy continues where it was, wrong blocks are replaced, and no record of
//! progress is needed, which could be wrong.
//!
//! For each segment: get the list of blocks that hold data at the source, punch blocks that hold data only here, compare
//! the hashes of blocks that hold data on both sides, and fetch the rest. Every byte is checked against its hash before
//! it is written. What holds no data inside a block that is fetched is not sent, and holds none here.
//!
//! There are two threads. One talks to the other node, checks hashes and gathers blocks to pieces, the other writes these, so
//! the next blocks arrive while the last ones are written. When the first thread ends, for whatever reason, the second writes what it has and ends too.
//! So everything that arrived whole is in the file before the next try.
//!
//! Both ends are bound by the processor, so messages are small enough for its cache. Memory of a transfer: the bitmaps of one
//! segment on both sides, half a MiB of hashes, a window of 4 MiB for the network and 8 MiB of pieces of 2 MiB each.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use roaring::RoaringBitmap;

use crate::driver::error::{Error, Result};
use crate::driver::transfer::holes;
use crate::driver::transfer::plan::{Plan, portions, runs};
use crate::driver::transfer::throttle::{POLL_INTERVAL, Throttle};
use crate::driver::transfer::write::{Gather, Writer, WriterGone, pieces};
use crate::driver::volumes::incoming::Progress;
use crate::driver::volumes::remote::{Blocks, Opened, Remote, RemoteFault};
use crate::sys::memory::KeepFreed;
use base::{Block, BlockRange, Stop, Stopped, VolumeId};
use cbt::{BlockHash, SEGMENT_BLOCKS, SegmentIndex, hash_each};
use files::{Context, DataRanges, change};

/// Blocks whose hashes are compared at once: half a MiB of hashes. The source refuses more, and more than are fetched at once.
pub const COMPARED: usize = 16 << 10;
/// Bytes per request.
pub(super) const FETCHED: u64 = 64 << 20;
/// Bytes of a message at most, with zeros for its holes.
const WHOLE: u64 = 8 << 20;
/// Bytes that are read and hashed here at a time.
const READ: u64 = 1 << 20;
/// How often progress is logged.
const LOG_EVERY: Duration = Duration::from_secs(10);
const HASH: usize = 32;

/// Why a copy was interrupted.
pub(super) enum Cut {
    /// It continues when the source is available again.
    Unavailable(String),
    /// It cannot continue.
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

impl From<WriterGone> for Cut {
    fn from(_: WriterGone) -> Self {
        Cut::Failed(Error::Stopped(Stopped::Cancelled))
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

/// Fills the file of a volume from a source.
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
    /// Makes the file equal to the source, and syncs it.
    pub fn receive(&mut self) -> Result<(), Cut> {
        let _keep = KeepFreed::begin();
        let writer = Writer::new(self.file, self.path, self.progress);
        let (mut gather, to_write, written) = pieces();
        std::thread::scope(|scope| {
            let writing = scope.spawn(move || writer.write_all(to_write, written));
            let received = self.receive_all(&mut gather);
            let flushed = gather.flush().map_err(Cut::from);
            let received = received.and(flushed);
            drop(gather);
            let written = writing.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
            // If a write failed, its error comes first: it is the reason why the first thread stopped.
            written.map_err(Cut::from).and(received)
        })?;
        Ok(change::sync(self.file, self.path)?)
    }

    /// Receives everything that is not in the file, and passes it to the writer once its hashes are checked.
    fn receive_all(&mut self, gather: &mut Gather) -> Result<(), Cut> {
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
            self.segment(index, &theirs, length, gather)?;
        }
        Ok(())
    }

    fn segment(
        &mut self,
        index: SegmentIndex,
        theirs: &RoaringBitmap,
        length: u64,
        gather: &mut Gather,
    ) -> Result<(), Cut> {
        let ours = self.ours(index, length)?;
        let plan = Plan::of(theirs, &ours);
        for run in runs(&plan.punch, u32::MAX) {
            let bytes = range(index, run).bytes(self.opened.block_size);
            change::punch_hole(self.file, self.path, bytes.start, bytes.len().min(length - bytes.start))?;
        }
        let mut fetch = plan.fetch;
        for portion in portions(plan.compare, COMPARED) {
            let hashes = self.remote.hashes(index, &portion, self.stop)?;
            let differing = self.differing(index, &portion, &hashes)?;
            self.progress.add_done((portion.len() - differing.len()) * self.opened.block_size.bytes());
            self.log();
            fetch |= differing;
        }
        let size = self.opened.block_size.bytes();
        let most = self.throttle.portion(FETCHED.max(size)) / size;
        for portion in portions(fetch, most.max(1) as usize) {
            let before = self.progress.received.load(Ordering::Relaxed);
            let fetched = self.fetch(index, &portion, &ours, gather);
            // How much comes is known only then: holes are not sent.
            self.wait(self.progress.received.load(Ordering::Relaxed) - before)?;
            fetched?;
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

    /// The blocks whose hashes differ from these.
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

    /// Fetches blocks, and passes them to the writer once their hashes are checked. Those among `ours` hold data here, also
    /// where the source may hold none.
    fn fetch(
        &mut self,
        index: SegmentIndex,
        blocks: &RoaringBitmap,
        ours: &RoaringBitmap,
        gather: &mut Gather,
    ) -> Result<(), Cut> {
        let size = self.opened.block_size;
        self.remote.read(index, blocks, self.stop)?;
        let mut wanted = blocks.iter();
        while let Some(Blocks { data, hashes, holes }) = self.remote.next(self.stop)? {
            self.progress.received.fetch_add(data.len() as u64, Ordering::Relaxed);
            let count = hashes.len() / HASH;
            let length = count as u64 * size.bytes();
            let blocks: RoaringBitmap = wanted.by_ref().take(count).collect();
            let parts = holes::parts(length, &holes).filter(|_| length <= WHOLE);
            let whole = parts.as_ref().and_then(|parts| holes::fill(&data, parts));
            let (Some(parts), Some(whole), true) = (&parts, whole, count > 0 && blocks.len() == count as u64)
            else {
                return Err(
                    RemoteFault::Refused(format!("{} sent incomplete blocks", self.remote.node())).into()
                );
            };
            self.check(index, &blocks, &whole, &hashes)?;
            let mut at = 0;
            // Blocks come in ascending order.
            for run in runs(&blocks, u32::MAX) {
                let is_ours = ours.range_cardinality(run.clone()) > 0;
                let bytes = range(index, run).bytes(size);
                for (part, is_hole) in parts {
                    let (start, end) = (part.start.max(at), part.end.min(at + bytes.len()));
                    let offset = bytes.start + start.saturating_sub(at);
                    match is_hole {
                        _ if start >= end => {}
                        false => gather.put(&whole[start as usize..end as usize], offset)?,
                        true => {
                            if is_ours {
                                change::punch_hole(self.file, self.path, offset, end - start)?;
                            }
                            self.progress.add_done(end - start);
                        }
                    }
                }
                at += bytes.len();
            }
            self.log();
        }
        // With a low --transfer-rate it is long until the next blocks arrive.
        gather.flush()?;
        match wanted.next() {
            None => Ok(()),
            Some(_) => Err(Cut::Unavailable("the answer was cut short".to_owned())),
        }
    }

    /// Fails if a block does not match its hash.
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

    /// Logs the progress every [`LOG_EVERY`].
    fn log(&mut self) {
        if self.logged.elapsed() >= LOG_EVERY {
            self.logged = Instant::now();
            let done = self.progress.done.load(Ordering::Relaxed);
            let bytes = self.progress.total.load(Ordering::Relaxed);
            let (volume_id, from) = (self.volume_id, self.remote.node());
            tracing::info!(%volume_id, from, done, bytes, "a volume is being copied from another node");
        }
    }

    /// Waits until more may be fetched after `bytes`.
    fn wait(&self, bytes: u64) -> Result<()> {
        let until = Instant::now() + self.throttle.take(bytes, Instant::now());
        loop {
            self.stop.check()?;
            let left = until.saturating_duration_since(Instant::now());
            if left == Duration::ZERO {
                return Ok(());
            }
            std::thread::sleep(left.min(POLL_INTERVAL));
        }
    }
}

fn range(index: SegmentIndex, run: std::ops::Range<u32>) -> BlockRange {
    let start = index.block(run.start);
    BlockRange { start, end: Block(start.0 + run.len() as u64) }
}

/// Splits the bytes into hashes, and fails unless there is one for each block.
fn whole_hashes(hashes: &[u8], blocks: u64) -> Result<std::slice::Iter<'_, BlockHash>, Cut> {
    let (hashes, rest) = hashes.as_chunks::<HASH>();
    match rest.is_empty() && hashes.len() as u64 == blocks {
        true => Ok(hashes.iter()),
        false => Err(RemoteFault::Refused(format!("got {} hashes for {blocks} blocks", hashes.len())).into()),
    }
}

#[cfg(test)]
mod tests {
    use super::super::write::{GATHERED, PIECES};
    use super::*;
    use base::BlockSize;

    /// Blocks of a message.
    const MESSAGE: u32 = 64;
    const MESSAGES: u32 = 40;
    const BLOCKS: u32 = MESSAGE * MESSAGES;

    fn bytes_of(block: u32) -> [u8; 4096] {
        let mut bytes = [block as u8 | 1; 4096];
        bytes[..4].copy_from_slice(&block.to_le_bytes());
        bytes
    }

    fn hash_of(block: u32) -> BlockHash {
        *blake3::hash(&bytes_of(block)).as_bytes()
    }

    /// A source whose node is away after this number of messages.
    struct Source {
        messages: u32,
        asked: RoaringBitmap,
        left: RoaringBitmap,
        handed_out: u32,
    }

    impl Source {
        fn new(messages: u32) -> Self {
            let (asked, left) = (RoaringBitmap::new(), RoaringBitmap::new());
            Source { messages, asked, left, handed_out: 0 }
        }
    }

    impl Remote for Source {
        fn open(&mut self, _: &str, _: &Stop) -> Result<Opened, RemoteFault> {
            unreachable!("it is open")
        }

        fn map(&mut self, _: SegmentIndex, _: &Stop) -> Result<RoaringBitmap, RemoteFault> {
            Ok((0..BLOCKS).collect())
        }

        fn hashes(
            &mut self,
            _: SegmentIndex,
            blocks: &RoaringBitmap,
            _: &Stop,
        ) -> Result<Vec<u8>, RemoteFault> {
            Ok(blocks.iter().flat_map(hash_of).collect())
        }

        fn read(&mut self, _: SegmentIndex, blocks: &RoaringBitmap, _: &Stop) -> Result<(), RemoteFault> {
            self.asked |= blocks;
            self.left = blocks.clone();
            Ok(())
        }

        fn next(&mut self, _: &Stop) -> Result<Option<Blocks>, RemoteFault> {
            if self.handed_out == self.messages {
                return Err(RemoteFault::Unavailable("unreachable".to_owned()));
            }
            let blocks: Vec<u32> = self.left.iter().take(MESSAGE as usize).collect();
            self.left.remove_range(..=blocks.last().copied().unwrap_or(0));
            self.handed_out += u32::from(!blocks.is_empty());
            let data = blocks.iter().flat_map(|block| bytes_of(*block)).collect::<Vec<u8>>();
            let hashes = blocks.iter().flat_map(|block| hash_of(*block)).collect::<Vec<u8>>();
            // As a driver that does not leave out holes.
            let message = Blocks { data: data.into(), hashes: hashes.into(), holes: Vec::new() };
            Ok((!blocks.is_empty()).then_some(message))
        }

        fn close(&mut self) {}

        fn node(&self) -> &str {
            "another node"
        }
    }

    fn receive(file: &File, path: &Path, source: &mut Source, progress: &Progress) -> Result<(), Cut> {
        let capacity = u64::from(BLOCKS) * 4096;
        let opened = Opened {
            capacity,
            block_size: BlockSize::MIN,
            tracking: true,
            segments: vec![SegmentIndex(0)],
            allocated_blocks: u64::from(BLOCKS),
            relatives: Vec::new(),
            filesystem: None,
        };
        let volume_id = VolumeId::random(base::DataDirKey::random().expect("key")).expect("id");
        Receiver {
            file,
            path,
            remote: source,
            opened: &opened,
            throttle: &Throttle::new(None),
            progress,
            stop: &Stop::default(),
            volume_id: &volume_id,
            logged: Instant::now(),
        }
        .receive()
    }

    fn empty() -> tempfile::NamedTempFile {
        let file = tempfile::NamedTempFile::new().expect("temp file");
        file.as_file().set_len(u64::from(BLOCKS) * 4096).expect("set_len");
        file
    }

    #[test]
    fn a_failed_write_ends_the_fetch() {
        let file = empty();
        let (read_only, mut source) = (File::open(file.path()).expect("open"), Source::new(MESSAGES));
        let progress = Progress::default();
        let error = match receive(&read_only, Path::new("/proc/none"), &mut source, &progress) {
            Err(Cut::Failed(error)) => error,
            _ => panic!("it cannot be written"),
        };
        assert_eq!(error.sys().and_then(files::Error::errno), Some(libc::EBADF), "{error}");
        // Those that are in pieces, and one for which there is none.
        let gathered = (PIECES * GATHERED) as u32 / (MESSAGE * 4096);
        assert!(source.handed_out <= gathered + 1, "{} messages were fetched", source.handed_out);
        assert_eq!(progress.done.load(Ordering::Relaxed), 0);
    }

    #[test]
    fn all_that_arrived_before_a_cut_is_there_and_not_fetched_again() {
        let file = empty();
        let progress = Progress::default();
        for arrived in [1, 17] {
            let mut source = Source::new(arrived);
            let cut = receive(file.as_file(), file.path(), &mut source, &progress);
            assert!(matches!(cut, Err(Cut::Unavailable(_))), "it is cut");
        }
        let mut source = Source::new(MESSAGES);
        assert!(receive(file.as_file(), file.path(), &mut source, &progress).is_ok());
        assert_eq!(source.asked, (18 * MESSAGE..BLOCKS).collect(), "what was asked for the last time");
        assert_eq!(progress.done.load(Ordering::Relaxed), progress.total.load(Ordering::Relaxed));
        assert_eq!(progress.received.load(Ordering::Relaxed), u64::from(BLOCKS) * 4096, "each byte once");
        let mut found = [0; 4096];
        for block in 0..BLOCKS {
            file.as_file().read_exact_at(&mut found, u64::from(block) * 4096).expect("read");
            assert!(found == bytes_of(block), "block {block}");
        }
    }
}
