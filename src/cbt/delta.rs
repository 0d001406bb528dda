//! What differs between two snapshots of one volume.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;

use roaring::RoaringBitmap;

use super::hash::zero_hash;
use super::hashfile::{HashFile, HashReader};
use super::scan::from_block;
use super::segment::{MapFile, all_indexes, locate, segment_range};
use super::{BlockHash, Error, Result};
use crate::base::{BlockRange, BlockSize, ObjectDir, Stop};
use crate::sys::Context;

/// One of the two snapshots of a comparison: its maps, its hashes and its bytes, all open, so that
/// its deletion meanwhile does not end the answer.
#[derive(Debug)]
pub struct Side {
    /// Blocks that hold data.
    pub allocated: MapFile,
    /// Blocks whose hash slot does not count yet.
    pub pending: MapFile,
    /// One hash a block.
    pub hashes: HashReader,
    /// The blocks themselves.
    pub data: File,
    /// Where they are, for messages.
    pub data_path: PathBuf,
}

impl Side {
    /// Opens the files of a snapshot.
    pub fn open(dir: &ObjectDir) -> Result<Self> {
        let data_path = dir.data();
        Ok(Side {
            allocated: MapFile::open(&dir.allocated())?,
            pending: MapFile::open(&dir.pending())?,
            hashes: HashReader::new(HashFile::open(&dir.hashes())?),
            data: File::open(&data_path).context("open", &data_path)?,
            data_path,
        })
    }

    fn segment(&self, index: u32) -> Result<SideSegment> {
        Ok(SideSegment { allocated: self.allocated.segment(index)?, pending: self.pending.segment(index)? })
    }

    fn content(&mut self, segment: &SideSegment, within: u32, block: u64) -> Result<Content> {
        if !segment.allocated.contains(within) {
            return Ok(Content::Hole);
        }
        if segment.pending.contains(within) {
            return Ok(Content::NotHashed);
        }
        Ok(self.hashes.get(block)?.map_or(Content::NotHashed, Content::Hashed))
    }

    /// The bytes of a block; past the end of the file it is zeros.
    fn read(&self, block: u64, size: BlockSize, buffer: &mut [u8]) -> Result<()> {
        let mut filled = 0;
        while filled < buffer.len() {
            let offset = block * size.bytes() + filled as u64;
            match self.data.read_at(&mut buffer[filled..], offset) {
                Ok(0) => break,
                Ok(count) => filled += count,
                Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error).context("read", &self.data_path).map_err(Error::Sys),
            }
        }
        buffer[filled..].fill(0);
        Ok(())
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

fn judge(base: Content, target: Content, zeros: &BlockHash) -> Verdict {
    let hash = |content| match content {
        Content::Hole => Some(*zeros),
        Content::Hashed(hash) => Some(hash),
        Content::NotHashed => None,
    };
    match (hash(base), hash(target)) {
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
/// way (`changed` is `None`), all blocks that either holds. Of these only blocks of different
/// content are reported: by hash, by the bytes where a hash is missing. What neither side holds is
/// zeros in both.
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
    candidates: std::iter::Peekable<roaring::bitmap::IntoIter>,
}

impl Segment {
    fn none() -> Self {
        Segment {
            start: 0,
            base: SideSegment::default(),
            target: SideSegment::default(),
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
            None => all_indexes([&base.allocated, &target.allocated].into_iter()),
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

    /// The next run of differing blocks, ascending; runs may end at segment borders.
    pub fn next_run(&mut self, stop: &Stop) -> Result<Option<BlockRange>> {
        let mut run: Option<BlockRange> = None;
        loop {
            let Some(within) = self.segment.candidates.peek().copied() else {
                if run.is_some() {
                    return Ok(run);
                }
                if !self.load_next_segment(stop)? {
                    return Ok(None);
                }
                continue;
            };
            let block = self.segment.start + u64::from(within);
            if let Some(run) = run
                && block != run.end
            {
                return Ok(Some(run));
            }
            let differs = self.differs(within, block, stop)?;
            self.segment.candidates.next();
            match (&mut run, differs) {
                (None, true) => run = Some(BlockRange { start: block, end: block + 1 }),
                (Some(run), true) => run.end = block + 1,
                (Some(run), false) => return Ok(Some(*run)),
                (None, false) => {}
            }
        }
    }

    fn load_next_segment(&mut self, stop: &Stop) -> Result<bool> {
        stop.check()?;
        let Some(index) = self.indexes.next() else { return Ok(false) };
        let (base, target) = (self.base.segment(index)?, self.target.segment(index)?);
        let mut candidates = &base.allocated | &target.allocated;
        if let Some(maps) = &self.changed {
            let mut changed = RoaringBitmap::new();
            for map in maps {
                stop.check()?;
                changed |= map.segment(index)?;
            }
            candidates &= changed;
        }
        let candidates = from_block(candidates, index, self.start).into_iter().peekable();
        self.segment = Segment { start: segment_range(index).start, base, target, candidates };
        Ok(true)
    }

    fn differs(&mut self, within: u32, block: u64, stop: &Stop) -> Result<bool> {
        self.looked += 1;
        if self.looked == LOOK {
            self.looked = 0;
            stop.check()?;
        }
        let base = self.base.content(&self.segment.base, within, block)?;
        let target = self.target.content(&self.segment.target, within, block)?;
        match judge(base, target, &self.zeros) {
            Verdict::Same => Ok(false),
            Verdict::Differs => Ok(true),
            Verdict::Read => {
                stop.check()?;
                self.base.read(block, self.size, &mut self.buffers.0)?;
                self.target.read(block, self.size, &mut self.buffers.1)?;
                Ok(self.buffers.0 != self.buffers.1)
            }
        }
    }
}

#[cfg(test)]
mod tests;
