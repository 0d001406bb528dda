//! Which blocks hold data: making that map, reading it, and making parts of it again.

use std::fs::File;
use std::path::{Path, PathBuf};

use roaring::RoaringBitmap;

use super::segment::{MapFile, MapHeader, MapWriter, locate, segment_range};
use super::{Error, Result};
use crate::base::{BlockRange, BlockSize, ByteRange, Stop};
use crate::sys::extents::DataRanges;

/// Writes the `allocated` map of a file that nobody writes any more; returns the number of its members.
pub fn scan_allocated(
    data: &File,
    data_path: &Path,
    map_path: &Path,
    header: MapHeader,
    stop: &Stop,
) -> Result<u64> {
    let size = header.block_size;
    let within = ByteRange { start: 0, end: header.blocks * size.bytes() };
    let mut writer = MapWriter::create(map_path, header)?;
    let (mut next, mut count) = (0, 0);
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
    /// [`Error::Lost`] where the data is gone.
    pub fn segment(&self, index: u32) -> Result<RoaringBitmap> {
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
        index: u32,
    ) -> Result<RoaringBitmap> {
        let segment = segment_range(index);
        let within = BlockRange { end: segment.end.min(blocks), ..segment }.bytes(size);
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
    indexes: std::vec::IntoIter<u32>,
    start: u64,
    base: u64,
    members: roaring::bitmap::IntoIter,
}

impl AllocatedScan {
    /// Starts at block `start`.
    pub fn new(map: Allocation, start: u64) -> Self {
        let first = locate(start).0;
        let indexes: Vec<u32> = map.map().indexes().filter(|index| *index >= first).collect();
        AllocatedScan {
            map,
            indexes: indexes.into_iter(),
            start,
            base: 0,
            members: RoaringBitmap::new().into_iter(),
        }
    }

    /// The next run, ascending.
    pub fn next_run(&mut self, stop: &Stop) -> Result<Option<BlockRange>> {
        loop {
            if let Some(run) = self.members.next_range() {
                let (start, end) = (u64::from(*run.start()), u64::from(*run.end()) + 1);
                return Ok(Some(BlockRange { start: self.base + start, end: self.base + end }));
            }
            if !self.load_next_segment(stop)? {
                return Ok(None);
            }
        }
    }

    /// Hands out blocks one by one, ascending, `most` of them or all that are left. `Ok(false)` when no more
    /// will follow.
    pub fn next_blocks(&mut self, most: usize, stop: &Stop, mut put: impl FnMut(u64)) -> Result<bool> {
        let mut left = most;
        while left > 0 {
            // Not `next_many`: on a run that ends with its container roaring 0.12.0 overflows in it.
            let before = left;
            for within in self.members.by_ref().take(before) {
                put(self.base + u64::from(within));
                left -= 1;
            }
            if left == before && !self.load_next_segment(stop)? {
                return Ok(false);
            }
        }
        // A stored segment is never empty.
        Ok(self.members.len() > 0 || self.indexes.len() > 0)
    }

    fn load_next_segment(&mut self, stop: &Stop) -> Result<bool> {
        stop.check()?;
        let Some(index) = self.indexes.next() else { return Ok(false) };
        self.base = segment_range(index).start;
        self.members = from_block(self.map.segment(index)?, index, self.start).into_iter();
        Ok(true)
    }
}

/// The members at or past block `start`.
pub(super) fn from_block(mut members: RoaringBitmap, index: u32, start: u64) -> RoaringBitmap {
    let (first, within) = locate(start);
    if index == first {
        members.remove_range(..within);
    }
    members
}
