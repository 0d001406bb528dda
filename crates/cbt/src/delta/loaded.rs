//! The segments that a delta has loaded.

use std::collections::VecDeque;

use roaring::RoaringBitmap;

use super::SideSegment;
use crate::Result;
use crate::hashfile::{SLOTS, page_of};
use crate::segment::{MapFile, SegmentIndex};
use base::{Block, Stop};

/// The segment that a [`DeltaScan`] is in, and small ones that follow: in a sparse volume each has a few blocks, and those of
/// many must be on their way from the disk at once.
#[derive(Default)]
pub(crate) struct LoadedSegments {
    pub(super) segments: VecDeque<Segment>,
    /// How many are loaded next: twice as many each time, so that an answer that reads a little loads a little.
    pub(super) at_a_time: usize,
}

impl LoadedSegments {
    /// Memory they take.
    pub(crate) fn bytes(&self) -> usize {
        self.segments.iter().map(|segment| segment.bytes).sum()
    }

    /// The pages with the hashes of blocks that are compared after this one. Some may be of blocks without a hash.
    pub(super) fn pages_after(&self, within: u32) -> impl Iterator<Item = u64> {
        let (first, later) = (self.segments.front(), self.segments.iter().skip(1));
        let first = first.into_iter().flat_map(move |segment| segment.pages_from(u64::from(within) + 1));
        first.chain(later.flat_map(|segment| segment.pages_from(0)))
    }

    /// The blocks after this one whose bytes are read, according to the maps.
    pub(super) fn unhashed_after(&self, within: u32) -> impl Iterator<Item = Block> {
        let (first, later) = (self.segments.front(), self.segments.iter().skip(1));
        let first = first.into_iter().flat_map(move |segment| segment.unhashed_from(within + 1));
        first.chain(later.flat_map(|segment| segment.unhashed_from(0)))
    }
}

/// A segment of a [`DeltaScan`].
pub(super) struct Segment {
    pub(super) index: SegmentIndex,
    /// Memory it takes.
    pub(super) bytes: usize,
    pub(super) base: SideSegment,
    pub(super) target: SideSegment,
    pub(super) certain: RoaringBitmap,
    /// Candidates that are not certain.
    pub(super) compared: RoaringBitmap,
    /// Those of them whose bytes are read, according to the maps.
    pub(super) unhashed: RoaringBitmap,
    pub(super) candidates: std::iter::Peekable<roaring::bitmap::IntoIter>,
}

impl Segment {
    /// The pages with the hashes of blocks that are compared, from this one on.
    fn pages_from(&self, mut from: u64) -> impl Iterator<Item = u64> {
        std::iter::from_fn(move || {
            let next = self.compared.range(u32::try_from(from).ok()?..).next()?;
            let page = page_of(self.index.block(next));
            from = (page + 1) * SLOTS - self.index.blocks().start.0;
            Some(page)
        })
    }

    fn unhashed_from(&self, from: u32) -> impl Iterator<Item = Block> {
        let index = self.index;
        self.unhashed.range(from..).map(move |within| index.block(within))
    }
}

/// The blocks of a segment that changed on the way.
#[derive(Default)]
pub(super) struct Changed {
    /// They differ: they changed in one step of the way, which knows for sure.
    pub(super) certain: RoaringBitmap,
    /// They may: they changed in several steps, perhaps back, or a step is not sure.
    pub(super) doubtful: RoaringBitmap,
}

/// `None` where a map is damaged, so that every block may have changed.
pub(super) fn changed_on_the_way(
    maps: &[MapFile],
    index: SegmentIndex,
    stop: &Stop,
) -> Result<Option<Changed>> {
    let (mut all, mut doubtful) = (RoaringBitmap::new(), RoaringBitmap::new());
    for map in maps {
        stop.check()?;
        let Some(segment) = map.sound_segment(index)? else { return Ok(None) };
        match map.is_exact() {
            true => doubtful |= &all & &segment,
            false => doubtful |= &segment,
        }
        all |= segment;
    }
    Ok(Some(Changed { certain: all - &doubtful, doubtful }))
}
