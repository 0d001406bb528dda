//! Building the maps of a new snapshot: what is allocated, what changed, and the hashes.

use std::fs::File;
use std::iter::Peekable;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::time::Instant;

use rayon::prelude::*;
use roaring::RoaringBitmap;

use super::ahead::Readahead;
use super::fresh::FreshHashes;
use super::hash::hash_each;
use super::hashfile::{HashFile, HashReader, SLOTS, page_of};
use super::segment::{MapFile, MapHeader, MapWriter, SegmentIndex, all_indexes, locate};
use super::walk::Members;
use super::{BlockHash, Result};
use base::{Block, BlockRange, BlockSize, ByteRange, Foreground, Stop};
use files::Context;

/// Bytes read at once for hashing: enough to fill all lanes twice, and still in the core's own cache when
/// they are hashed. A larger block is read whole.
const READ: u64 = 128 << 10;

/// Bytes of a copy that one core hashes at once.
const PARALLEL: usize = 256 << 10;

/// How the blocks that may have changed are found.
pub enum Candidates<'c, I> {
    /// Byte ranges whose place on the disk differs, from the pool.
    Ranges(I),
    /// The child's hashes are all written: compare them with the parent's.
    Hashes {
        /// The parent's hashes.
        parent: &'c mut HashReader,
        /// The blocks of the parent whose hash does not count.
        parent_pending: &'c MapFile,
        /// The child's hashes.
        child: &'c mut HashReader,
    },
}

/// Writes the `changed` map of a child towards its parent, given what each holds: the candidates
/// that hold data on either side, and every block that holds data on one side only. The header
/// names the parent.
pub fn write_changed<I: Iterator<Item = files::Result<ByteRange>>>(
    map_path: &Path,
    header: MapHeader,
    parent: &MapFile,
    child: &MapFile,
    candidates: Candidates<'_, I>,
    stop: &Stop,
) -> Result<()> {
    enum Source<'c, I: Iterator> {
        Ranges(Peekable<I>),
        Hashes(&'c mut HashReader, &'c MapFile, &'c mut HashReader),
    }
    let mut source = match candidates {
        Candidates::Ranges(ranges) => Source::Ranges(BySegment::new(ranges, header.block_size).peekable()),
        Candidates::Hashes { parent, parent_pending, child } => Source::Hashes(parent, parent_pending, child),
    };
    let mut writer = MapWriter::create(map_path, header)?;
    for index in all_indexes([parent, child].into_iter()) {
        stop.check()?;
        let (before, after) = (parent.segment(index)?, child.segment(index)?);
        let mut changed = match &mut source {
            Source::Ranges(ranges) => take_segment(ranges, index)? & (&before | &after),
            Source::Hashes(parent, pending, child) => {
                let mut changed = pending.segment(index)?;
                differing_hashes(index, &before & &after, parent, child, &mut changed)?;
                changed
            }
        };
        changed |= before ^ after;
        writer.insert_segment(index, changed)?;
    }
    writer.finish()
}

/// Adds the members of `both` whose hashes differ or are unknown.
fn differing_hashes(
    index: SegmentIndex,
    both: RoaringBitmap,
    parent: &mut HashReader,
    child: &mut HashReader,
    changed: &mut RoaringBitmap,
) -> Result<()> {
    for within in both {
        let block = index.block(within);
        let (before, after) = (parent.get_if_readable(block)?, child.get(block)?);
        if before.is_none() || before != after {
            changed.insert(within);
        }
    }
    Ok(())
}

/// Drops the segments before `index` and takes the one at it: blocks where neither side holds data
/// cannot have changed.
fn take_segment<I>(segments: &mut Peekable<I>, index: SegmentIndex) -> Result<RoaringBitmap>
where
    I: Iterator<Item = files::Result<(SegmentIndex, RoaringBitmap)>>,
{
    while let Some(item) = segments.next_if(|item| !matches!(item, Ok((at, _)) if *at > index)) {
        let (at, members) = item?;
        if at == index {
            return Ok(members);
        }
    }
    Ok(RoaringBitmap::new())
}

/// Gathers ascending byte ranges into the blocks they touch, a segment at a time.
struct BySegment<I> {
    ranges: I,
    size: BlockSize,
    carry: Option<BlockRange>,
}

impl<I: Iterator<Item = files::Result<ByteRange>>> BySegment<I> {
    fn new(ranges: I, size: BlockSize) -> Self {
        BySegment { ranges, size, carry: None }
    }

    fn next_range(&mut self) -> files::Result<Option<BlockRange>> {
        match self.carry.take() {
            Some(range) => Ok(Some(range)),
            None => Ok(self.ranges.next().transpose()?.map(|range| range.blocks(self.size))),
        }
    }

    fn gather(&mut self) -> files::Result<Option<(SegmentIndex, RoaringBitmap)>> {
        let Some(first) = self.next_range()? else { return Ok(None) };
        let (index, _) = locate(first.start);
        let segment = index.blocks();
        let mut members = RoaringBitmap::new();
        self.carry = Some(first);
        while let Some(range) = self.next_range()? {
            if range.start >= segment.end {
                self.carry = Some(range);
                break;
            }
            let end = range.end.min(segment.end);
            members.insert_range((range.start - segment.start) as u32..(end - segment.start) as u32);
            if range.end > segment.end {
                self.carry = Some(BlockRange { start: segment.end, end: range.end });
                break;
            }
        }
        Ok(Some((index, members)))
    }
}

impl<I: Iterator<Item = files::Result<ByteRange>>> Iterator for BySegment<I> {
    type Item = files::Result<(SegmentIndex, RoaringBitmap)>;

    fn next(&mut self) -> Option<Self::Item> {
        self.gather().transpose()
    }
}

/// The bytes that are hashed, and where their hashes go.
pub struct ToHash<'h> {
    /// The blocks.
    pub data: &'h File,
    /// Where they are, for messages.
    pub data_path: &'h Path,
    /// The size of a block.
    pub size: BlockSize,
    /// Takes the hashes; the caller syncs it.
    pub hashes: &'h HashFile,
    /// Gives way to this, after each read.
    pub foreground: &'h Foreground,
    /// What streams have hashed already, and where they find what is hashed here.
    pub fresh: &'h FreshHashes,
}

impl ToHash<'_> {
    /// Hashes blocks of a segment, on all cores of the pool that the caller runs in.
    pub fn hash_segment(&self, index: SegmentIndex, members: RoaringBitmap, stop: &Stop) -> Result<()> {
        let pages = runs_by_page(index, members);
        let all = pages.par_iter().enumerate();
        all.try_for_each_init(
            Default::default,
            |(buffer, ahead): &mut (Vec<u8>, Readahead), (at, (number, runs))| {
                let mut page = self.hashes.page_to_update(*number)?;
                for (within, run) in runs.iter().enumerate() {
                    let put = |block, hash: BlockHash| page.set(block, &hash);
                    if self.hash_run(*run, buffer, ahead, stop, put)? {
                        continue;
                    }
                    let next = || {
                        let later = pages[at + 1..].iter().flat_map(|(_, runs)| runs);
                        runs[within + 1..].iter().chain(later).map(|run| run.bytes(self.size))
                    };
                    ahead.ask(next, std::iter::once(self.data));
                }
                self.hashes.write_page(*number, &mut page)?;
                self.fresh.wrote(index, runs);
                Ok(())
            },
        )
    }

    /// Returns whether others write: then nothing is read ahead.
    fn hash_run(
        &self,
        run: BlockRange,
        buffer: &mut Vec<u8>,
        ahead: &mut Readahead,
        stop: &Stop,
        mut put: impl FnMut(Block, BlockHash),
    ) -> Result<bool> {
        let size = self.size;
        let at_once = (READ / size.bytes()).max(1);
        let mut block = run.start;
        let mut gave_way = false;
        while block < run.end {
            stop.check()?;
            let began = Instant::now();
            let count = at_once.min(run.end - block);
            let bytes = BlockRange { start: block, end: block + count }.bytes(size);
            buffer.resize(bytes.len() as usize, 0);
            let read = ahead.timed(bytes.end, || self.data.read_exact_at(buffer, bytes.start));
            read.context_at("read", self.data_path, bytes.start)?;
            hash_each(buffer, size, |number, hash| put(block + number, hash));
            block = block + count;
            gave_way = self.foreground.give_way(began.elapsed(), stop);
        }
        Ok(gave_way)
    }

    /// Forgets the hashes of blocks that hold no data any more.
    pub fn forget(&self, index: SegmentIndex, members: RoaringBitmap, stop: &Stop) -> Result<()> {
        for (number, runs) in runs_by_page(index, members) {
            stop.check()?;
            let mut page = self.hashes.page_to_update(number)?;
            let blocks = runs.into_iter().flat_map(BlockRange::blocks);
            if blocks.fold(false, |known, block| page.forget(block) | known) {
                self.hashes.write_page(number, &mut page)?;
            }
        }
        Ok(())
    }

    /// Takes over what streams have hashed; returns the blocks.
    pub fn take_fresh(
        &self,
        index: SegmentIndex,
        members: &RoaringBitmap,
        stop: &Stop,
    ) -> Result<RoaringBitmap> {
        let made = self.fresh.take(index, members);
        let taken: RoaringBitmap = made.keys().map(|block| locate(*block).1).collect();
        for (number, runs) in runs_by_page(index, taken.clone()) {
            stop.check()?;
            let mut page = self.hashes.page_to_update(number)?;
            for block in runs.iter().flat_map(|run| run.blocks()) {
                page.set(block, &made[&block]);
            }
            self.hashes.write_page(number, &mut page)?;
            self.fresh.wrote(index, &runs);
        }
        Ok(taken)
    }

    /// Takes over the hashes of blocks that another snapshot shares with this one; returns those that it
    /// had.
    pub fn take_over(
        &self,
        index: SegmentIndex,
        members: RoaringBitmap,
        from: &mut HashReader,
        stop: &Stop,
    ) -> Result<RoaringBitmap> {
        let mut taken = RoaringBitmap::new();
        for (number, runs) in runs_by_page(index, members) {
            stop.check()?;
            let mut page = self.hashes.page_to_update(number)?;
            for block in runs.into_iter().flat_map(BlockRange::blocks) {
                if let Some(hash) = from.get_if_readable(block)? {
                    page.set(block, &hash);
                    taken.insert(locate(block).1);
                }
            }
            self.hashes.write_page(number, &mut page)?;
        }
        Ok(taken)
    }
}

/// The runs of a segment's members, cut where the page of their hashes ends.
fn runs_by_page(index: SegmentIndex, members: RoaringBitmap) -> Vec<(u64, Vec<BlockRange>)> {
    let mut pages: Vec<(u64, Vec<BlockRange>)> = Vec::new();
    let mut members = Members::new(index, members);
    while let Some(BlockRange { start: mut block, end }) = members.next_run() {
        while block < end {
            let page = page_of(block);
            let cut = end.min(Block((page + 1) * SLOTS));
            let run = BlockRange { start: block, end: cut };
            match pages.last_mut() {
                Some((last, runs)) if *last == page => runs.push(run),
                _ => pages.push((page, vec![run])),
            }
            block = cut;
        }
    }
    pages
}

/// Takes the bytes of a copy as they pass and hashes them, so that the data is read once.
pub struct HashingCopy {
    hashes: HashFile,
    size: BlockSize,
}

impl HashingCopy {
    /// Hashes into `hashes`, a new file.
    pub fn new(hashes: HashFile, size: BlockSize) -> Self {
        HashingCopy { hashes, size }
    }

    /// Forgets what it took: the copy starts again, of data that may have changed.
    pub fn start_again(&mut self) -> Result<()> {
        self.hashes.clear()
    }

    /// Makes the hashes durable.
    pub fn sync(&self) -> Result<()> {
        self.hashes.sync()
    }

    /// Takes whole blocks that start at byte `offset`.
    pub fn take(&mut self, offset: u64, bytes: &[u8]) -> Result<()> {
        let size = self.size.bytes() as usize;
        let share = PARALLEL.max(size);
        let hashed: Vec<BlockHash> = bytes
            .par_chunks(share)
            .flat_map_iter(|share| {
                let mut hashes = Vec::with_capacity(share.len() / size);
                hash_each(share, self.size, |_, hash| hashes.push(hash));
                hashes
            })
            .collect();
        let first = self.size.block_of(offset);
        let mut left = BlockRange { start: first, end: first + hashed.len() as u64 };
        while !left.is_empty() {
            let number = page_of(left.start);
            let end = left.end.min(Block((number + 1) * SLOTS));
            let mut page = self.hashes.page_to_update(number)?;
            for block in (BlockRange { end, ..left }).blocks() {
                page.set(block, &hashed[(block - first) as usize]);
            }
            self.hashes.write_page(number, &mut page)?;
            left.start = end;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_gather_by_segment_and_are_cut_at_the_border() {
        let edge = crate::SEGMENT_BLOCKS;
        let size = BlockSize::MIN;
        let bytes = |start: u64, end: u64| Ok(BlockRange::new(start, end).bytes(size));
        let ranges = vec![bytes(1, 3), bytes(edge - 1, 2 * edge + 1), bytes(2 * edge + 5, 2 * edge + 6)];
        let gathered: Vec<(u32, u64, Option<u32>)> = BySegment::new(ranges.into_iter(), size)
            .map(|item| item.map(|(index, members)| (index.0, members.len(), members.max())).expect("no I/O"))
            .collect();
        assert_eq!(
            gathered,
            [(0, 3, Some(edge as u32 - 1)), (1, edge, Some(edge as u32 - 1)), (2, 2, Some(5))]
        );
    }

    #[test]
    fn runs_are_cut_at_hash_pages() {
        let members: RoaringBitmap = (125..130).chain([400]).collect();
        let run = BlockRange::new;
        let expected = vec![(0, vec![run(125, 127)]), (1, vec![run(127, 130)]), (3, vec![run(400, 401)])];
        assert_eq!(runs_by_page(SegmentIndex(0), members), expected);
    }
}
