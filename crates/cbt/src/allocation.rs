//! Which blocks hold data: making that map, reading it, and making parts of it again.

use std::fs::File;
use std::path::{Path, PathBuf};

use roaring::RoaringBitmap;

use super::segment::{MapFile, MapHeader, MapWriter, SegmentIndex};
use super::walk::{Members, Segments};
use super::{Error, Result};
use base::{Block, BlockRange, BlockSize, Stop};
use files::DataRanges;

/// Writes the `allocated` map of a file that is no longer written; returns the number of its members.
pub fn scan_allocated(
    data: &File,
    data_path: &Path,
    map_path: &Path,
    header: MapHeader,
    stop: &Stop,
) -> Result<u64> {
    let size = header.block_size;
    let within = BlockRange::new(0, header.blocks).bytes(size);
    let mut writer = MapWriter::create(map_path, header)?;
    let (mut next, mut count) = (Block(0), 0);
    for range in DataRanges::of(data, data_path, within) {
        stop.check()?;
        let blocks = range?.blocks(size);
        // Two ranges of data may meet inside one block.
        let blocks = BlockRange { start: blocks.start.max(next), ..blocks };
        if !blocks.is_empty() {
            writer.insert(blocks)?;
            next = blocks.end;
            count += blocks.len();
        }
    }
    writer.finish()?;
    Ok(count)
}

/// The `allocated` map of a snapshot, with the data that a damaged segment is made from again.
#[derive(Debug)]
pub struct Allocation {
    map: MapFile,
    /// `None` once the snapshot was deleted and its data freed.
    data: Option<File>,
    data_path: PathBuf,
}

impl Allocation {
    /// The map of the snapshot whose blocks are in `data`.
    pub fn new(map: MapFile, data: Option<File>, data_path: &Path) -> Self {
        Allocation { map, data, data_path: data_path.to_owned() }
    }

    /// What the map is about.
    pub fn header(&self) -> &MapHeader {
        self.map.header()
    }

    /// The stored map.
    pub fn map(&self) -> &MapFile {
        &self.map
    }

    /// One segment's members. A damaged one is never trusted: it is found again in the data.
    ///
    /// # Errors
    /// [`Error::Lost`] if the data was freed.
    pub fn segment(&self, index: SegmentIndex) -> Result<RoaringBitmap> {
        match (self.map.segment(index), &self.data) {
            (Err(Error::Damaged { path, what }), Some(data)) => {
                tracing::error!(path = %path.display(), what, "a map is damaged, asking the data instead");
                Self::scan(data, &self.data_path, self.header().block_size, self.header().blocks, index)
            }
            (Err(Error::Damaged { path, what }), None) => {
                Err(Error::Lost { what: format!("{}: {what}", path.display()) })
            }
            (segment, _) => segment,
        }
    }

    /// The blocks of a segment that hold data, of a file of `blocks` blocks.
    pub(super) fn scan(
        data: &File,
        data_path: &Path,
        size: BlockSize,
        blocks: u64,
        index: SegmentIndex,
    ) -> Result<RoaringBitmap> {
        let segment = index.blocks();
        let within = BlockRange { end: segment.end.min(Block(blocks)), ..segment }.bytes(size);
        let mut members = RoaringBitmap::new();
        for range in DataRanges::of(data, data_path, within) {
            let found = range?.blocks(size);
            members.insert_range((found.start - segment.start) as u32..(found.end - segment.start) as u32);
        }
        Ok(members)
    }
}

/// The allocated blocks of a snapshot from a block on, as runs that end at segment borders.
pub struct AllocatedScan {
    map: Allocation,
    segments: Segments,
    segment: Option<Runs>,
}

/// What is left of the segment that an [`AllocatedScan`] is in.
pub(super) struct Runs {
    index: SegmentIndex,
    members: Members,
    /// Memory it takes.
    pub(super) bytes: usize,
}

impl AllocatedScan {
    /// Starts at block `start`.
    pub fn new(map: Allocation, start: Block) -> Self {
        let segments = Segments::new(map.map().indexes().collect(), start);
        AllocatedScan { map, segments, segment: None }
    }

    /// The next run, ascending.
    pub fn next_run(&mut self, stop: &Stop) -> Result<Option<BlockRange>> {
        loop {
            if let Some(segment) = &mut self.segment
                && let Some(run) = segment.members.next_run()
            {
                self.segments.next = run.end;
                return Ok(Some(run));
            }
            if !self.load_next_segment(stop)? {
                return Ok(None);
            }
        }
    }

    /// Hands out blocks one by one, ascending, `most` of them or all that are left. `Ok(false)` when no more
    /// will follow.
    pub fn next_blocks(&mut self, most: usize, stop: &Stop, mut put: impl FnMut(Block)) -> Result<bool> {
        let mut left = most;
        while left > 0 {
            let before = left;
            if let Some(segment) = &mut self.segment {
                // Not `next_many`: on a run that ends with its container roaring 0.12.0 overflows in it.
                for block in segment.members.by_ref().take(before) {
                    put(block);
                    self.segments.next = block + 1;
                    left -= 1;
                }
            }
            if left == before && !self.load_next_segment(stop)? {
                return Ok(false);
            }
        }
        let goes_on =
            |segment: &Runs| !segment.members.is_empty() || self.segments.goes_on_after(segment.index);
        Ok(self.segment.as_ref().is_none_or(goes_on))
    }

    fn load_next_segment(&mut self, stop: &Stop) -> Result<bool> {
        stop.check()?;
        if let Some(done) = self.segment.take() {
            self.segments.next = done.index.blocks().end;
        }
        let Some(index) = self.segments.current() else { return Ok(false) };
        let members = self.segments.not_passed(self.map.segment(index)?, index);
        let bytes = members.serialized_size();
        self.segment = Some(Runs { index, members: Members::new(index, members), bytes });
        Ok(true)
    }

    pub(super) fn work_bytes(&self) -> usize {
        self.map.map().segment_bytes() + MapFile::KEPT
    }

    /// Takes the segment out that the scan is in. Where it is not put back, it is read again.
    pub(super) fn park(&mut self) -> Option<Runs> {
        self.map.map().park();
        self.segment.take()
    }

    pub(super) fn resume(&mut self, segment: Runs) {
        self.segment = Some(segment);
    }
}
