//! What differs between two snapshots of one volume.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Instant;

use roaring::RoaringBitmap;

pub(super) use loaded::LoadedSegments;
use loaded::{Changed, Segment, changed_on_the_way};

use super::ahead::Readahead;
use super::allocation::Allocation;
use super::fresh::FreshHashes;
use super::hash::zero_hash;
use super::hashfile::{HashFile, HashReader};
use super::segment::{MapFile, SegmentIndex, all_indexes, all_of_a_segment};
use super::walk::{Found, Segments};
use super::{BlockHash, Error, Result};
use base::{Block, BlockRange, BlockSize, ByteRange, ObjectDir, Stop};
use files::Context;

/// One of the two snapshots of a comparison: its maps, its hashes and its bytes, all open, so that
/// its deletion meanwhile does not end the answer.
#[derive(Debug)]
pub struct Side {
    /// Blocks that hold data.
    pub allocated: Allocation,
    /// Blocks whose hash slot does not count yet; `None` where the map is damaged, so that none counts.
    pub pending: Option<MapFile>,
    /// One hash a block.
    pub hashes: HashReader,
    /// The blocks themselves; `None` once the snapshot was deleted and they were freed.
    pub data: Option<File>,
    /// Where they are, for messages.
    pub data_path: PathBuf,
    /// Hashes that `pending` does not vouch for yet; `None` where it is empty.
    pub fresh: Option<Arc<FreshHashes>>,
    /// Writes of slots that came before the kept page of hashes was read; there may have been more.
    writes: u64,
}

impl Side {
    /// Opens the files of a snapshot. `data` is `None` if its data was freed.
    pub fn open(dir: &ObjectDir, fresh: Arc<FreshHashes>) -> Result<Self> {
        let data_path = dir.data();
        let data = match File::open(&data_path) {
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => None,
            opened => Some(opened.context("open", &data_path)?),
        };
        let also = data.as_ref().map(File::try_clone).transpose().context("open", &data_path)?;
        // `pending` before the hashes: a slot is written before its block leaves `pending`.
        let pending = MapFile::open_sound(&dir.pending())?;
        if pending.is_none() && data.is_none() {
            return Err(Error::Lost { what: dir.pending().display().to_string() });
        }
        let is_hashed = pending.as_ref().is_some_and(|pending| pending.indexes().next().is_none());
        Ok(Side {
            fresh: (!is_hashed).then_some(fresh),
            writes: 0,
            allocated: Allocation::new(MapFile::open(&dir.allocated())?, also, &data_path),
            pending,
            hashes: HashReader::new(HashFile::open(&dir.hashes())?),
            data,
            data_path,
        })
    }

    fn segment(&self, index: SegmentIndex) -> Result<SideSegment> {
        Ok(SideSegment { allocated: self.allocated.segment(index)?, pending: self.pending_segment(index)? })
    }

    fn pending_segment(&self, index: SegmentIndex) -> Result<RoaringBitmap> {
        let sound = self.pending.as_ref().map_or(Ok(None), |map| map.sound_segment(index))?;
        match (sound, &self.data) {
            (Some(members), _) => Ok(members),
            (None, Some(_)) => Ok(all_of_a_segment()),
            (None, None) => {
                Err(Error::Lost { what: format!("what is hashed of {}", self.data_path.display()) })
            }
        }
    }

    /// `next` are the pages of the blocks that are compared after this one.
    fn content<N: Iterator<Item = u64>>(
        &mut self,
        segment: &SideSegment,
        within: u32,
        block: Block,
        next: impl FnOnce() -> N,
    ) -> Result<Content> {
        if !segment.allocated.contains(within) {
            return Ok(Content::Hole);
        }
        if segment.pending.contains(within) {
            let Some(writes) = self.fresh.as_ref().and_then(|fresh| fresh.written(block)) else {
                return Ok(Content::NotHashed);
            };
            // The page may have been read before its slot was written.
            if writes != std::mem::replace(&mut self.writes, writes) {
                self.hashes.park();
            }
            return Ok(self.hashes.get_if_readable(block)?.map_or(Content::NotHashed, Content::Hashed));
        }
        match (self.hashes.get_with_next(block, next)?, &self.data) {
            (Some(hash), _) => Ok(Content::Hashed(hash)),
            (None, Some(_)) => Ok(Content::NotHashed),
            // Not one that was still to be hashed when the data went: its page is damaged.
            (None, None) => Err(Error::Lost { what: format!("the hash of block {block}") }),
        }
    }

    /// Gives up the memory it does without.
    fn park(&mut self) {
        self.allocated.map().park();
        self.pending.iter().for_each(MapFile::park);
        self.hashes.park();
    }

    /// Reads bytes of the data; past the end of the file they are zeros.
    fn read(&self, data: &File, buffer: &mut [u8], offset: u64) -> Result<()> {
        let mut filled = 0;
        while filled < buffer.len() {
            match data.read_at(&mut buffer[filled..], offset + filled as u64) {
                Ok(0) => break,
                Ok(count) => filled += count,
                Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {}
                Err(error) => {
                    return Err(error).context_at("read", &self.data_path, offset).map_err(Error::Sys);
                }
            }
        }
        buffer[filled..].fill(0);
        Ok(())
    }

    /// The hash of a block's bytes, which hashing may take over; `None` if they were freed.
    fn hash(
        &self,
        block: Block,
        bytes: ByteRange,
        buffer: &mut Vec<u8>,
        stop: &Stop,
    ) -> Result<Option<BlockHash>> {
        let Some(data) = &self.data else { return Ok(None) };
        let mut hasher = blake3::Hasher::new();
        for part in parts(bytes) {
            stop.check()?;
            buffer.resize(part.len() as usize, 0);
            self.read(data, buffer, part.start)?;
            hasher.update(buffer);
        }
        let hash = *hasher.finalize().as_bytes();
        if let Some(fresh) = &self.fresh {
            fresh.make(block, hash);
        }
        Ok(Some(hash))
    }
}

#[derive(Debug, Default)]
struct SideSegment {
    allocated: RoaringBitmap,
    pending: RoaringBitmap,
}

/// A block's content as far as it is known without reading it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Content {
    /// Reads as zeros.
    Hole,
    Hashed(BlockHash),
    NotHashed,
}

/// Whether two contents differ.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Verdict {
    Same,
    Differs,
    /// The bytes must be compared.
    Read,
}

impl Content {
    fn hash(self, zeros: &BlockHash) -> Option<BlockHash> {
        match self {
            Content::Hole => Some(*zeros),
            Content::Hashed(hash) => Some(hash),
            Content::NotHashed => None,
        }
    }
}

fn judge(base: Content, target: Content, zeros: &BlockHash) -> Verdict {
    match (base.hash(zeros), target.hash(zeros)) {
        (Some(base), Some(target)) if base == target => Verdict::Same,
        (Some(_), Some(_)) => Verdict::Differs,
        _ => Verdict::Read,
    }
}

/// Bytes of a block that are read at once: large blocks take no more memory than small ones, and two that differ at
/// the start are not read to the end.
const AT_ONCE: usize = 64 << 10;

/// Looks at a stop flag and the clock after a number of blocks: each may cost two page reads. A block whose bytes are
/// read looks at the flag for itself.
const LOOK: u32 = 64;

/// Segments are loaded ahead until they take so many bytes, or have so many blocks to compare: as many as are asked for at
/// once.
const AHEAD_BYTES: usize = 128 << 10;
const AHEAD_BLOCKS: u64 = 256;
/// What a bitmap, and each of its containers, takes in memory in addition to the members.
const CONTAINER: usize = 64;

/// The blocks whose content differs between two snapshots, ascending from a start, found lazily.
///
/// Candidates are the union of the `changed` maps on the way from base to target; without such a
/// way (`changed` is `None`), all blocks that either holds. What changed in one step of the way, which is
/// exact, differs. Of all others only blocks of different content are reported: by hash, by the bytes where
/// a hash is missing. What neither side holds is zeros in both.
pub struct DeltaScan {
    sides: Sides,
    changed: Option<Vec<MapFile>>,
    segments: Segments,
    loaded: LoadedSegments,
    looked: u32,
    /// Whether the time was over when the last run was found.
    is_late: bool,
}

struct Sides {
    base: Side,
    target: Side,
    size: BlockSize,
    zeros: BlockHash,
    /// The bytes read of a block, kept for one turn.
    buffers: (Vec<u8>, Vec<u8>),
    ahead: Readahead,
}

impl DeltaScan {
    /// Compares from block `start` on. Each map of `changed` covers one step of the way.
    pub fn new(base: Side, target: Side, changed: Option<Vec<MapFile>>, start: Block) -> Self {
        let size = target.allocated.header().block_size;
        let indexes = match &changed {
            Some(maps) => all_indexes(maps.iter()),
            None => all_indexes([base.allocated.map(), target.allocated.map()].into_iter()),
        };
        DeltaScan {
            sides: Sides {
                base,
                target,
                size,
                zeros: zero_hash(size),
                buffers: Default::default(),
                ahead: Readahead::default(),
            },
            changed,
            segments: Segments::new(indexes, start),
            loaded: LoadedSegments::default(),
            looked: 0,
            is_late: false,
        }
    }

    /// The next run of differing blocks, ascending; a run may end anywhere, also where the next block differs too. After
    /// `until` it looks no further than it must.
    pub fn next_run(&mut self, stop: &Stop, until: Instant) -> Result<Found> {
        if std::mem::take(&mut self.is_late) {
            return Ok(Found::Nothing);
        }
        let mut run: Option<BlockRange> = None;
        loop {
            let candidate = self.loaded.segments.front_mut().and_then(|segment| {
                let within = *segment.candidates.peek()?;
                Some((segment.index.block(within), within))
            });
            let Some((block, within)) = candidate else {
                if let Some(run) = run {
                    return Ok(Found::Run(run));
                }
                if !self.load_next(stop, until)? {
                    return Ok(Found::End);
                }
                // A segment that takes long to load is not given up before a block of it was judged: it may have to be
                // loaded again.
                if self.loaded.segments.is_empty() && Instant::now() >= until {
                    return Ok(Found::Nothing);
                }
                continue;
            };
            if let Some(run) = run
                && block != run.end
            {
                return Ok(Found::Run(run));
            }
            let differs = self.sides.differ(&self.loaded, within, block, stop)?;
            self.loaded.segments.front_mut().and_then(|segment| segment.candidates.next());
            self.segments.next = block + 1;
            match (&mut run, differs) {
                (None, true) => run = Some(BlockRange::one(block)),
                (Some(run), true) => run.end = block + 1,
                (Some(run), false) => return Ok(Found::Run(*run)),
                (None, false) => {}
            }
            self.looked = (self.looked + 1) % LOOK;
            if self.looked == 0 {
                stop.check()?;
                if Instant::now() >= until {
                    self.is_late = run.is_some();
                    return Ok(run.map_or(Found::Nothing, Found::Run));
                }
            }
        }
    }

    /// Moves on to the next segment that has candidates. Loads it, and small ones that follow, if it is not there. `false` at
    /// the end.
    fn load_next(&mut self, stop: &Stop, until: Instant) -> Result<bool> {
        stop.check()?;
        if let Some(done) = self.loaded.segments.pop_front() {
            self.segments.next = done.index.blocks().end;
        }
        if !self.loaded.segments.is_empty() {
            return Ok(true);
        }
        let Some(mut index) = self.segments.current() else { return Ok(false) };
        let (mut bytes, mut compared) = (0, 0);
        loop {
            match self.load(index, stop)? {
                Some(segment) => {
                    (bytes, compared) = (bytes + segment.bytes, compared + segment.compared.len());
                    self.loaded.segments.push_back(segment);
                }
                None if self.loaded.segments.is_empty() => self.segments.next = index.blocks().end,
                None => {}
            }
            let is_enough = self.loaded.segments.len() >= self.loaded.at_a_time
                || bytes >= AHEAD_BYTES
                || compared >= AHEAD_BLOCKS;
            match self.segments.after(index).filter(|_| !is_enough && Instant::now() < until) {
                Some(next) => index = next,
                None => break,
            }
        }
        self.loaded.at_a_time = 2 * self.loaded.segments.len().max(1);
        Ok(true)
    }

    /// Loads a segment; `None` where it has no candidates.
    fn load(&self, index: SegmentIndex, stop: &Stop) -> Result<Option<Segment>> {
        let mut found = match &self.changed {
            Some(maps) => changed_on_the_way(maps, index, stop)?,
            None => None,
        };
        let (mut base, mut target) = (SideSegment::default(), SideSegment::default());
        if found.as_ref().is_none_or(|found| !found.doubtful.is_empty()) {
            (base, target) = (self.sides.base.segment(index)?, self.sides.target.segment(index)?);
            let either = &base.allocated | &target.allocated;
            match &mut found {
                Some(found) => found.doubtful &= either,
                None => found = Some(Changed { certain: RoaringBitmap::new(), doubtful: either }),
            }
        }
        let Changed { certain, doubtful } = found.unwrap_or_default();
        let candidates = self.segments.not_passed(&certain | doubtful, index);
        if candidates.is_empty() {
            return Ok(None);
        }
        let compared = &candidates - &certain;
        let mut unhashed = (&base.pending & &base.allocated) | (&target.pending & &target.allocated);
        unhashed &= &compared;
        let maps = [
            &base.allocated,
            &base.pending,
            &target.allocated,
            &target.pending,
            &certain,
            &compared,
            &unhashed,
            &candidates,
        ];
        let stored: usize = maps.iter().map(|map| map.serialized_size()).sum();
        let containers: u32 = maps.iter().map(|map| map.statistics().n_containers).sum();
        let bytes = stored + size_of::<Segment>() + CONTAINER * (maps.len() + containers as usize);
        let candidates = candidates.into_iter().peekable();
        Ok(Some(Segment { index, bytes, base, target, certain, compared, unhashed, candidates }))
    }

    /// The maps of both sides, what they come to, and one map of the way at a time.
    pub(super) fn work_bytes(&self) -> usize {
        let map = |map: &MapFile| map.segment_bytes();
        let side = |side: &Side| map(side.allocated.map()) + side.pending.as_ref().map_or(0, map);
        let way = self.changed.iter().flatten().map(map).max().unwrap_or(0);
        let kept = (4 + self.changed.iter().flatten().count()) * MapFile::KEPT;
        3 * (side(&self.sides.base) + side(&self.sides.target)) + 3 * way + kept + 2 * AT_ONCE + AHEAD_BYTES
    }

    /// Gives up the memory it does without, and the loaded segments: where they are not put back, they are read again.
    pub(super) fn park(&mut self) -> Option<LoadedSegments> {
        self.sides.buffers = Default::default();
        self.sides.base.park();
        self.sides.target.park();
        self.changed.iter().flatten().for_each(MapFile::park);
        let mut loaded = std::mem::take(&mut self.loaded);
        loaded.segments.shrink_to_fit();
        (!loaded.segments.is_empty()).then_some(loaded)
    }

    pub(super) fn resume(&mut self, loaded: LoadedSegments) {
        self.loaded = loaded;
    }
}

impl Sides {
    /// Whether a block of the first of the `loaded` segments differs.
    fn differ(&mut self, loaded: &LoadedSegments, within: u32, block: Block, stop: &Stop) -> Result<bool> {
        let segment = &loaded.segments[0];
        if segment.certain.contains(within) {
            return Ok(true);
        }
        let pages = || loaded.pages_after(within);
        let base = self.base.content(&segment.base, within, block, pages)?;
        let target = self.target.content(&segment.target, within, block, pages)?;
        match judge(base, target, &self.zeros) {
            Verdict::Same => Ok(false),
            Verdict::Differs => Ok(true),
            Verdict::Read => {
                let bytes = BlockRange::one(block).bytes(self.size);
                let (known_base, known_target) = (base.hash(&self.zeros), target.hash(&self.zeros));
                let mut ahead = std::mem::take(&mut self.ahead);
                let differ =
                    ahead.timed(bytes.end, || self.read_and_compare(block, known_base, known_target, stop));
                let size = self.size;
                let next = || loaded.unhashed_after(within).map(|block| BlockRange::one(block).bytes(size));
                // Most likely the same side is read of those: one whose hash is known is not.
                let base = self.base.data.iter().filter(|_| known_base.is_none());
                let target = self.target.data.iter().filter(|_| known_target.is_none());
                ahead.ask(next, base.chain(target));
                self.ahead = ahead;
                differ
            }
        }
    }

    /// Compares a block of which at least one hash is not known. A side whose hash is known is not read.
    fn read_and_compare(
        &mut self,
        block: Block,
        known_base: Option<BlockHash>,
        known_target: Option<BlockHash>,
        stop: &Stop,
    ) -> Result<bool> {
        let bytes = BlockRange::one(block).bytes(self.size);
        let (before, after) = &mut self.buffers;
        if let (None, None) = (known_base, known_target)
            && let (Some(base), Some(target)) = (&self.base.data, &self.target.data)
        {
            for part in parts(bytes) {
                stop.check()?;
                before.resize(part.len() as usize, 0);
                after.resize(part.len() as usize, 0);
                self.base.read(base, before, part.start)?;
                self.target.read(target, after, part.start)?;
                if before != after {
                    return Ok(true);
                }
            }
            return Ok(false);
        }
        // Where the data of one is gone and its hash is not known, it equals nothing: the one case in which too much
        // may be reported.
        let hash = |side: &Side, known: Option<BlockHash>, buffer: &mut Vec<u8>| match known {
            Some(hash) => Ok(Some(hash)),
            None => side.hash(block, bytes, buffer, stop),
        };
        let base = hash(&self.base, known_base, before)?;
        let target = hash(&self.target, known_target, after)?;
        Ok(base.is_none() || base != target)
    }
}

fn parts(bytes: ByteRange) -> impl Iterator<Item = ByteRange> {
    let end = move |start| bytes.end.min(start + AT_ONCE as u64);
    (bytes.start..bytes.end).step_by(AT_ONCE).map(move |start| ByteRange { start, end: end(start) })
}

#[cfg(any(test, feature = "fuzz"))]
pub(super) mod fuzz;
mod loaded;
#[cfg(test)]
mod tests;
