//! What differs between two snapshots of one volume.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::time::Instant;

use roaring::RoaringBitmap;

use super::allocation::{Allocation, from_block};
use super::hash::{hash_block, zero_hash};
use super::hashfile::{HashFile, HashReader};
use super::runs::Step;
use super::segment::{MapFile, SEGMENT_BLOCKS, all_indexes, locate, segment_range};
use super::{BlockHash, Error, Result};
use crate::base::{BlockRange, BlockSize, ObjectDir, Stop};
use crate::sys::Context;

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
}

impl Side {
    /// Opens the files of a snapshot. Only a `deleted` one may be without its data.
    pub fn open(dir: &ObjectDir, deleted: bool) -> Result<Self> {
        let data_path = dir.data();
        let data = match File::open(&data_path) {
            Err(error) if deleted && error.kind() == std::io::ErrorKind::NotFound => None,
            opened => Some(opened.context("open", &data_path)?),
        };
        let also = data.as_ref().map(File::try_clone).transpose().context("open", &data_path)?;
        // `pending` before the hashes: a slot is written before its block leaves `pending`.
        let pending = match (MapFile::open(&dir.pending()), &data) {
            (Err(Error::Damaged { path, what }), Some(_)) => {
                tracing::error!(path = %path.display(), what, "a map is damaged, reading the data instead of hashes");
                None
            }
            (Err(Error::Damaged { path, what }), None) => {
                return Err(Error::Lost { what: format!("{}: {what}", path.display()) });
            }
            (opened, _) => Some(opened?),
        };
        Ok(Side {
            allocated: Allocation::new(MapFile::open(&dir.allocated())?, also, &data_path),
            pending,
            hashes: HashReader::new(HashFile::open(&dir.hashes())?),
            data,
            data_path,
        })
    }

    fn segment(&self, index: u32) -> Result<SideSegment> {
        Ok(SideSegment { allocated: self.allocated.segment(index)?, pending: self.pending_segment(index)? })
    }

    fn pending_segment(&self, index: u32) -> Result<RoaringBitmap> {
        let all = || {
            let mut all = RoaringBitmap::new();
            all.insert_range(0..SEGMENT_BLOCKS as u32);
            all
        };
        match self.pending.as_ref().map(|map| map.segment(index)) {
            None => Ok(all()),
            Some(Err(Error::Damaged { path, what })) => match &self.data {
                Some(_) => {
                    tracing::error!(path = %path.display(), what, "a map is damaged, reading the data instead of hashes");
                    Ok(all())
                }
                None => Err(Error::Lost { what: format!("{}: {what}", path.display()) }),
            },
            Some(segment) => segment,
        }
    }

    fn content(&mut self, segment: &SideSegment, within: u32, block: u64) -> Result<Content> {
        if !segment.allocated.contains(within) {
            return Ok(Content::Hole);
        }
        if segment.pending.contains(within) {
            return Ok(Content::NotHashed);
        }
        match (self.hashes.get(block)?, &self.data) {
            (Some(hash), _) => Ok(Content::Hashed(hash)),
            (None, Some(_)) => Ok(Content::NotHashed),
            // Not one that was still to be hashed when the data went: its page is damaged.
            (None, None) => Err(Error::Lost { what: format!("the hash of block {block}") }),
        }
    }

    /// The bytes of a block; past the end of the file it is zeros.
    /// `Ok(false)` where it is gone.
    fn read(&self, block: u64, size: BlockSize, buffer: &mut [u8]) -> Result<bool> {
        let Some(data) = &self.data else { return Ok(false) };
        let mut filled = 0;
        while filled < buffer.len() {
            let offset = block * size.bytes() + filled as u64;
            match data.read_at(&mut buffer[filled..], offset) {
                Ok(0) => break,
                Ok(count) => filled += count,
                Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error).context("read", &self.data_path).map_err(Error::Sys),
            }
        }
        buffer[filled..].fill(0);
        Ok(true)
    }
}

#[derive(Debug, Default)]
struct SideSegment {
    allocated: RoaringBitmap,
    pending: RoaringBitmap,
}

/// What is known of a block's content without reading it.
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
    /// Only the bytes can tell.
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

/// Looks at a stop flag every so many blocks: each may cost two page reads. A block whose bytes are
/// read looks for itself.
const LOOK: u32 = 64;

/// The blocks whose content differs between two snapshots, ascending from a start, found lazily.
///
/// Candidates are the union of the `changed` maps on the way from base to target; without such a
/// way (`changed` is `None`), all blocks that either holds. What changed in one step of the way, which is
/// exact, differs. Of all others only blocks of different content are reported: by hash, by the bytes where
/// a hash is missing. What neither side holds is zeros in both.
pub struct DeltaScan {
    base: Side,
    target: Side,
    changed: Option<Vec<MapFile>>,
    indexes: std::vec::IntoIter<u32>,
    start: u64,
    size: BlockSize,
    zeros: BlockHash,
    segment: Segment,
    buffers: (Vec<u8>, Vec<u8>),
    looked: u32,
}

struct Segment {
    start: u64,
    base: SideSegment,
    target: SideSegment,
    certain: RoaringBitmap,
    candidates: std::iter::Peekable<roaring::bitmap::IntoIter>,
}

/// The blocks of a segment that changed on the way.
#[derive(Default)]
struct Changed {
    /// They differ: they changed in one step of the way, which knows for sure.
    certain: RoaringBitmap,
    /// They may: they changed in several steps, perhaps back, or a step is not sure.
    doubtful: RoaringBitmap,
}

/// `None` where a map is damaged, so that every block may have changed.
fn changed_on_the_way(maps: &[MapFile], index: u32, stop: &Stop) -> Result<Option<Changed>> {
    let (mut all, mut doubtful) = (RoaringBitmap::new(), RoaringBitmap::new());
    for map in maps {
        stop.check()?;
        let segment = match map.segment(index) {
            Err(Error::Damaged { path, what }) => {
                tracing::error!(path = %path.display(), what, "a map is damaged, comparing all blocks instead");
                return Ok(None);
            }
            segment => segment?,
        };
        match map.is_exact() {
            true => doubtful |= &all & &segment,
            false => doubtful |= &segment,
        }
        all |= segment;
    }
    Ok(Some(Changed { certain: all - &doubtful, doubtful }))
}

impl Segment {
    fn none() -> Self {
        Segment {
            start: 0,
            base: SideSegment::default(),
            target: SideSegment::default(),
            certain: RoaringBitmap::new(),
            candidates: RoaringBitmap::new().into_iter().peekable(),
        }
    }
}

impl DeltaScan {
    /// Compares from block `start` on. Each map of `changed` covers one step of the way.
    pub fn new(base: Side, target: Side, changed: Option<Vec<MapFile>>, start: u64) -> Self {
        let size = target.allocated.header().block_size;
        let indexes = match &changed {
            Some(maps) => all_indexes(maps.iter()),
            None => all_indexes([base.allocated.map(), target.allocated.map()].into_iter()),
        };
        let first = locate(start).0;
        let indexes: Vec<u32> = indexes.into_iter().filter(|index| *index >= first).collect();
        let block = || vec![0; size.bytes() as usize];
        DeltaScan {
            base,
            target,
            changed,
            indexes: indexes.into_iter(),
            start,
            size,
            zeros: zero_hash(size),
            segment: Segment::none(),
            buffers: (block(), block()),
            looked: 0,
        }
    }

    /// The next run of differing blocks, ascending; runs may end anywhere, also where they go on. After
    /// `until` it looks no further than it must.
    pub fn next_run(&mut self, stop: &Stop, until: Instant) -> Result<Step> {
        let mut run: Option<BlockRange> = None;
        loop {
            let Some(within) = self.segment.candidates.peek().copied() else {
                if let Some(run) = run {
                    return Ok(Step::Run(run));
                }
                if !self.load_next_segment(stop)? {
                    return Ok(Step::End);
                }
                if Instant::now() >= until {
                    return Ok(Step::Pause);
                }
                continue;
            };
            let block = self.segment.start + u64::from(within);
            if let Some(run) = run
                && block != run.end
            {
                return Ok(Step::Run(run));
            }
            if self.is_time_to_look(stop)? && Instant::now() >= until {
                return Ok(run.map_or(Step::Pause, Step::Run));
            }
            let differs = self.differs(within, block, stop)?;
            self.segment.candidates.next();
            match (&mut run, differs) {
                (None, true) => run = Some(BlockRange { start: block, end: block + 1 }),
                (Some(run), true) => run.end = block + 1,
                (Some(run), false) => return Ok(Step::Run(*run)),
                (None, false) => {}
            }
        }
    }

    fn load_next_segment(&mut self, stop: &Stop) -> Result<bool> {
        stop.check()?;
        let Some(index) = self.indexes.next() else { return Ok(false) };
        let mut found = match &self.changed {
            Some(maps) => changed_on_the_way(maps, index, stop)?,
            None => None,
        };
        let (mut base, mut target) = (SideSegment::default(), SideSegment::default());
        if found.as_ref().is_none_or(|found| !found.doubtful.is_empty()) {
            (base, target) = (self.base.segment(index)?, self.target.segment(index)?);
            let either = &base.allocated | &target.allocated;
            match &mut found {
                Some(found) => found.doubtful &= either,
                None => found = Some(Changed { certain: RoaringBitmap::new(), doubtful: either }),
            }
        }
        let Changed { certain, doubtful } = found.unwrap_or_default();
        let candidates = from_block(&certain | doubtful, index, self.start).into_iter().peekable();
        self.segment = Segment { start: segment_range(index).start, base, target, certain, candidates };
        Ok(true)
    }

    fn is_time_to_look(&mut self, stop: &Stop) -> Result<bool> {
        self.looked = (self.looked + 1) % LOOK;
        if self.looked == 0 {
            stop.check()?;
        }
        Ok(self.looked == 0)
    }

    fn differs(&mut self, within: u32, block: u64, stop: &Stop) -> Result<bool> {
        if self.segment.certain.contains(within) {
            return Ok(true);
        }
        let base = self.base.content(&self.segment.base, within, block)?;
        let target = self.target.content(&self.segment.target, within, block)?;
        match judge(base, target, &self.zeros) {
            Verdict::Same => Ok(false),
            Verdict::Differs => Ok(true),
            Verdict::Read => {
                stop.check()?;
                let base_is_read = self.base.read(block, self.size, &mut self.buffers.0)?;
                let target_is_read = self.target.read(block, self.size, &mut self.buffers.1)?;
                if base_is_read && target_is_read {
                    return Ok(self.buffers.0 != self.buffers.1);
                }
                // The data of one is gone. If it was hashed before, its hash tells; if not, it equals nothing:
                // the one case in which too much may be reported.
                let hash = |content: Content, is_read, bytes: &[u8]| match is_read {
                    true => Some(hash_block(bytes)),
                    false => content.hash(&self.zeros),
                };
                let base = hash(base, base_is_read, &self.buffers.0);
                Ok(base.is_none() || base != hash(target, target_is_read, &self.buffers.1))
            }
        }
    }
}

#[cfg(any(test, fuzzing))]
pub(super) mod fuzz;
#[cfg(test)]
mod tests;
