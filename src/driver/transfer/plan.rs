//! Pure functions that decide what to do with the blocks of a segment, and in which portions.

use std::ops::Range;

use roaring::RoaringBitmap;

/// What to do so that a segment equals the source's.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct Plan {
    /// Blocks that hold data only here.
    pub punch: RoaringBitmap,
    /// Blocks that hold data on both sides. Those with equal hashes are not transferred.
    pub compare: RoaringBitmap,
    /// Blocks that hold data only at the source.
    pub fetch: RoaringBitmap,
}

impl Plan {
    /// The plan for blocks that hold data at the source and here.
    pub fn of(theirs: &RoaringBitmap, ours: &RoaringBitmap) -> Self {
        Plan { punch: ours - theirs, compare: ours & theirs, fetch: theirs - ours }
    }
}

/// Splits blocks into portions of at most `most`, ascending.
pub(super) fn portions(blocks: RoaringBitmap, most: usize) -> impl Iterator<Item = RoaringBitmap> {
    let mut left = blocks.into_iter();
    std::iter::from_fn(move || {
        // One block at a time, because `next_many` of roaring 0.12.0 overflows on some runs.
        let portion: RoaringBitmap = left.by_ref().take(most).collect();
        (!portion.is_empty()).then_some(portion)
    })
}

/// Splits blocks into runs of adjacent blocks, each of at most `most`, ascending.
pub(super) fn runs(blocks: &RoaringBitmap, most: u32) -> impl Iterator<Item = Range<u32>> + '_ {
    let mut left = blocks.iter();
    let mut rest: Option<Range<u32>> = None;
    std::iter::from_fn(move || {
        let run = match rest.take() {
            Some(run) => run,
            None => left.next_range().map(|run| *run.start()..*run.end() + 1)?,
        };
        let end = run.end.min(run.start.saturating_add(most));
        rest = (end < run.end).then_some(end..run.end);
        Some(run.start..end)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn set(blocks: &[u32]) -> RoaringBitmap {
        blocks.iter().copied().collect()
    }

    #[test]
    fn each_block_has_one_fate() {
        for (theirs, ours, punch, compare, fetch) in [
            (&[][..], &[][..], &[][..], &[][..], &[][..]),
            (&[1, 2, 9], &[], &[], &[], &[1, 2, 9]),
            (&[], &[3, 4], &[3, 4], &[], &[]),
            (&[1, 2, 3, 70_000], &[2, 3, 4], &[4], &[2, 3], &[1, 70_000]),
        ] {
            let plan = Plan { punch: set(punch), compare: set(compare), fetch: set(fetch) };
            assert_eq!(Plan::of(&set(theirs), &set(ours)), plan, "{theirs:?} {ours:?}");
        }
    }

    #[test]
    fn portions_and_runs_hold_every_block_once() {
        let last = (1 << 22) - 1;
        let blocks = set(&[0, 1, 2, 3, 4, 8, 65_535, 65_536, 65_537, last - 1, last]);
        let by_three: Vec<Vec<u32>> = portions(blocks.clone(), 3).map(|part| part.iter().collect()).collect();
        assert_eq!(by_three, [&[0, 1, 2][..], &[3, 4, 8], &[65_535, 65_536, 65_537], &[last - 1, last]]);
        let found: Vec<_> = runs(&blocks, 100).collect();
        assert_eq!(found, [0..5, 8..9, 65_535..65_538, last - 1..last + 1]);
        let short: Vec<_> = runs(&blocks, 2).collect();
        let first = [0..2, 2..4, 4..5, 8..9, 65_535..65_537, 65_537..65_538, last - 1..last + 1];
        assert_eq!(short, first);
        assert_eq!(runs(&RoaringBitmap::new(), 1).count() + portions(RoaringBitmap::new(), 1).count(), 0);
    }
}
