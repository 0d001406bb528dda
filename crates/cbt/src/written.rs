//! The maps of a new snapshot from those of the one before and from exactly what was written since.

use std::fs::File;
use std::iter::Peekable;
use std::path::Path;

use roaring::RoaringBitmap;

use super::Result;
use super::segment::{MapFile, MapHeader, MapWriter, SegmentIndex, locate};
use base::Written;
use base::{Block, BlockRange, BlockSize, ByteRange, Stop};
use files::DataRanges;

/// Where the two maps go, and what they are about.
pub struct NewMaps<'m> {
    /// The `allocated` map.
    pub allocated: (&'m Path, MapHeader),
    /// The `changed` map, whose header names the parent.
    pub changed: (&'m Path, MapHeader),
}

/// Writes the `allocated` and `changed` maps of a child: the parent's allocation with what was `written`
/// since, ascending, put over it. Costs the change, and a copy of the parent's map.
///
/// The child's `data` is only looked at for blocks of which a part became a hole.
pub fn write_written<I: Iterator<Item = files::Result<Written>>>(
    data: &File,
    data_path: &Path,
    maps: NewMaps<'_>,
    parent: &MapFile,
    written: I,
    stop: &Stop,
) -> Result<()> {
    let size = parent.header().block_size;
    let capacity = maps.allocated.1.blocks * size.bytes();
    let mut parts = Parts { written: written.peekable(), rest: None, capacity };
    let mut before = parent.indexes().peekable();
    let mut allocated = MapWriter::create(maps.allocated.0, maps.allocated.1)?;
    let mut changed = MapWriter::create(maps.changed.0, maps.changed.1)?;
    while let Some(index) = next_segment(&mut parts, before.peek().copied(), size)? {
        stop.check()?;
        before.next_if_eq(&index);
        let mut segment = Segment::new(index, size);
        while let Some(part) = parts.take(segment.bytes.end)? {
            segment.add(part);
        }
        if segment.touched.is_empty() {
            allocated.copy_segment(parent, index)?;
            continue;
        }
        let held = parent.segment(index)?;
        let holds = segment.apply(held.clone(), data, data_path)?;
        changed.insert_segment(index, segment.touched & (held | &holds))?;
        allocated.insert_segment(index, holds)?;
    }
    allocated.finish()?;
    changed.finish()
}

/// The next segment in which something was written or the parent holds something. A hole where the
/// parent holds nothing is passed over: one may reach to the end of the address space.
fn next_segment<I: Iterator<Item = files::Result<Written>>>(
    parts: &mut Parts<I>,
    parent: Option<SegmentIndex>,
    size: BlockSize,
) -> Result<Option<SegmentIndex>> {
    loop {
        let Some(part) = parts.peek()? else { return Ok(parent) };
        let at = locate(size.block_of(part.range.start)).0;
        match parent {
            None if !part.data => parts.skip_to(u64::MAX)?,
            Some(parent) if !part.data && at < parent => {
                parts.skip_to(parent.blocks().bytes(size).start)?;
            }
            parent => return Ok(Some(parent.map_or(at, |parent| parent.min(at)))),
        }
    }
}

/// What was written, cut to the capacity and where the reader likes.
struct Parts<I: Iterator<Item = files::Result<Written>>> {
    written: Peekable<I>,
    rest: Option<Written>,
    capacity: u64,
}

impl<I: Iterator<Item = files::Result<Written>>> Parts<I> {
    fn peek(&mut self) -> Result<Option<Written>> {
        while self.rest.is_none() {
            let Some(next) = self.written.next().transpose()? else { return Ok(None) };
            let range = ByteRange { start: next.range.start, end: next.range.end.min(self.capacity) };
            self.rest = (range.start < range.end).then_some(Written { range, ..next });
        }
        Ok(self.rest)
    }

    /// The next part that starts before `end`, cut there.
    fn take(&mut self, end: u64) -> Result<Option<Written>> {
        let Some(part) = self.peek()?.filter(|part| part.range.start < end) else { return Ok(None) };
        let cut = part.range.end.min(end);
        let after = ByteRange { start: cut, end: part.range.end };
        self.rest = (after.start < after.end).then_some(Written { range: after, ..part });
        Ok(Some(Written { range: ByteRange { start: part.range.start, end: cut }, ..part }))
    }

    /// Drops the part before `start` of the next range.
    fn skip_to(&mut self, start: u64) -> Result<()> {
        if let Some(part) = self.peek()? {
            let range = ByteRange { start: start.max(part.range.start), end: part.range.end };
            self.rest = (range.start < range.end).then_some(Written { range, ..part });
        }
        Ok(())
    }
}

/// What was written in one segment.
struct Segment {
    size: BlockSize,
    index: SegmentIndex,
    bytes: ByteRange,
    /// Blocks of which some byte was written.
    touched: RoaringBitmap,
    /// Blocks that hold data for sure, and blocks that hold none.
    data: RoaringBitmap,
    holes: RoaringBitmap,
    /// Blocks of which a part is a hole.
    partial: RoaringBitmap,
}

impl Segment {
    fn new(index: SegmentIndex, size: BlockSize) -> Self {
        let bytes = index.blocks().bytes(size);
        let empty = RoaringBitmap::new;
        let (touched, data, holes, partial) = (empty(), empty(), empty(), empty());
        Segment { size, index, bytes, touched, data, holes, partial }
    }

    fn within(&self, blocks: BlockRange) -> std::ops::Range<u32> {
        let first = self.index.block(0);
        (blocks.start - first) as u32..(blocks.end - first) as u32
    }

    fn add(&mut self, part: Written) {
        let blocks = part.range.blocks(self.size);
        let within = self.within(blocks);
        self.touched.insert_range(within.clone());
        if part.data {
            self.data.insert_range(within);
            return;
        }
        let whole = BlockRange {
            start: Block(self.size.blocks_in(part.range.start)),
            end: self.size.block_of(part.range.end),
        };
        if whole.start < whole.end {
            let whole = self.within(whole);
            self.holes.insert_range(whole.clone());
            self.partial.insert_range(within.start..whole.start);
            self.partial.insert_range(whole.end..within.end);
        } else {
            self.partial.insert_range(within);
        }
    }

    /// The blocks that hold data now, given those that did.
    fn apply(&self, mut held: RoaringBitmap, data: &File, data_path: &Path) -> Result<RoaringBitmap> {
        held -= &self.holes;
        held |= &self.data;
        for within in &self.partial - &self.data {
            let block = BlockRange::one(self.index.block(within)).bytes(self.size);
            match DataRanges::of(data, data_path, block).next().transpose()? {
                Some(_) => held.insert(within),
                None => held.remove(within),
            };
        }
        Ok(held)
    }
}

#[cfg(test)]
mod tests;
