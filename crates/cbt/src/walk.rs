//! Walking through maps, segment by segment, for the next run of blocks.

use roaring::RoaringBitmap;

use super::segment::{SegmentIndex, locate};
use base::{Block, BlockRange};

/// The result of a search for the next run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Found {
    /// A run of blocks.
    Run(BlockRange),
    /// Nothing yet, and the time that was given is over.
    Nothing,
    /// The end.
    End,
}

/// The segments of a scan, and its position.
pub(super) struct Segments {
    indexes: Vec<SegmentIndex>,
    /// All blocks before it were handed out.
    pub(super) next: Block,
}

impl Segments {
    /// From block `start` on through segments, which ascend.
    pub(super) fn new(indexes: Vec<SegmentIndex>, start: Block) -> Self {
        Segments { indexes, next: start }
    }

    /// The segment that comes next, or that `next` is in.
    pub(super) fn current(&self) -> Option<SegmentIndex> {
        let first = locate(self.next).0;
        self.indexes.get(self.indexes.partition_point(|index| *index < first)).copied()
    }

    /// The segment after this one.
    pub(super) fn after(&self, index: SegmentIndex) -> Option<SegmentIndex> {
        self.indexes.get(self.indexes.partition_point(|other| *other <= index)).copied()
    }

    pub(super) fn goes_on_after(&self, index: SegmentIndex) -> bool {
        self.indexes.last().is_some_and(|last| *last > index)
    }

    /// The members of a segment that were not handed out.
    pub(super) fn not_passed(&self, mut members: RoaringBitmap, index: SegmentIndex) -> RoaringBitmap {
        let (first, within) = locate(self.next);
        if index == first {
            members.remove_range(..within);
        }
        members
    }
}
