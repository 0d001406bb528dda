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

/// The members of a segment, in runs or one by one.
pub(super) struct Members {
    index: SegmentIndex,
    rest: roaring::bitmap::IntoIter,
    /// What comes before the rest.
    ahead: Option<BlockRange>,
}

impl Members {
    pub(super) fn new(index: SegmentIndex, members: RoaringBitmap) -> Self {
        Members { index, rest: members.into_iter(), ahead: None }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.ahead.is_none() && self.rest.len() == 0
    }

    /// The next run. To find its end, roaring searches all that is left of a container, up to 4,096 members. So it is asked
    /// only where two members follow each other.
    pub(super) fn next_run(&mut self) -> Option<BlockRange> {
        let mut run = self.ahead.take().or_else(|| self.next_one())?;
        self.ahead = self.next_one();
        if let Some(second) = self.ahead
            && second.start == run.end
        {
            run.end = second.end;
            self.ahead = self.rest.next_range().map(|range| BlockRange {
                start: self.index.block(*range.start()),
                end: self.index.block(*range.end()) + 1,
            });
            if let Some(others) = self.ahead
                && others.start == run.end
            {
                run.end = others.end;
                self.ahead = None;
            }
        }
        Some(run)
    }

    fn next_one(&mut self) -> Option<BlockRange> {
        self.rest.next().map(|within| BlockRange::one(self.index.block(within)))
    }
}

impl Iterator for Members {
    type Item = Block;

    fn next(&mut self) -> Option<Block> {
        let Some(run) = self.ahead else { return self.rest.next().map(|within| self.index.block(within)) };
        let behind = BlockRange { start: run.start + 1, ..run };
        self.ahead = (!behind.is_empty()).then_some(behind);
        Some(run.start)
    }
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

#[cfg(test)]
mod tests {
    use super::*;

    /// Members one by one and in runs give the same, in whatever order they are asked for: single ones, pairs, long runs, and
    /// runs across the containers of a bitmap.
    #[test]
    fn runs_and_members_are_the_same_blocks() {
        let index = SegmentIndex(3);
        let runs =
            [(0, 1), (2, 4), (5, 8), (9, 10), (11, 12), (65530, 65540), (131071, 131072), (131073, 400000)];
        let members: RoaringBitmap = runs.iter().flat_map(|(start, end)| *start..*end).collect();
        let blocks =
            |(start, end): (u32, u32)| BlockRange { start: index.block(start), end: index.block(end) };
        let mut all = Members::new(index, members.clone());
        let found: Vec<BlockRange> = std::iter::from_fn(|| all.next_run()).collect();
        assert_eq!(found, runs.map(blocks));
        assert!(all.is_empty());
        for one_by_one in 0..20 {
            let mut mixed = Members::new(index, members.clone());
            let mut found = Vec::new();
            while let Some(run) = mixed.next_run() {
                found.extend(run.blocks());
                found.extend(mixed.by_ref().take(one_by_one));
            }
            assert!(
                found.iter().copied().eq(members.iter().map(|within| index.block(within))),
                "{one_by_one}"
            );
        }
    }
}
