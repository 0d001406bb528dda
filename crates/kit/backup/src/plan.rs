//! Which blocks are read together and stored together. Pure.

use std::ops::Range;

use base::ByteRange;

use crate::repository::pack::CELL;
use crate::repository::{BLOCK, SEGMENT, SEGMENT_BLOCKS};

/// Blocks that are stored as one chunk.
pub const CELL_BLOCKS: u32 = (CELL / BLOCK) as u32;
/// Blocks that are read with one request: 1 MiB.
pub const READ_BLOCKS: u32 = 256;
/// Blocks that are not listed and are read all the same, so that two requests become one.
const GAP_BLOCKS: u32 = 8;

/// Blocks of one segment.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Listed {
    /// Which segment.
    pub number: u32,
    /// Its blocks, ascending, disjoint and apart.
    pub blocks: Vec<Range<u32>>,
}

/// Turns ranges of bytes into blocks, segment by segment.
#[derive(Debug)]
pub struct Segments {
    size: u64,
    open: Option<Listed>,
}

impl Segments {
    pub fn new(size: u64) -> Self {
        Segments { size, open: None }
    }

    /// Takes the next range, which begins no earlier than the one before ended, and gives the segments that are whole now.
    pub fn add(&mut self, range: ByteRange) -> Vec<Listed> {
        let mut whole = Vec::new();
        let mut start = range.start / BLOCK;
        let end = range.end.min(self.size).div_ceil(BLOCK);
        while start < end {
            let number = (start * BLOCK / SEGMENT) as u32;
            let first = u64::from(number) * u64::from(SEGMENT_BLOCKS);
            let stop = end.min(first + u64::from(SEGMENT_BLOCKS));
            if self.open.as_ref().is_some_and(|open| open.number != number) {
                whole.extend(self.open.take());
            }
            let open = self.open.get_or_insert_with(|| Listed { number, blocks: Vec::new() });
            let blocks = (start - first) as u32..(stop - first) as u32;
            match open.blocks.last_mut().filter(|last| last.end >= blocks.start) {
                Some(last) => last.end = last.end.max(blocks.end),
                None => open.blocks.push(blocks),
            }
            start = stop;
        }
        whole
    }

    /// The last one.
    pub fn finish(self) -> Option<Listed> {
        self.open
    }
}

/// Adds the rest of each cell of which at least half is listed: then one new chunk takes the place of the old one, instead
/// of a second one next to it.
pub fn widen(listed: &mut Listed, size: u64) {
    let end = (size.div_ceil(BLOCK) - u64::from(listed.number) * u64::from(SEGMENT_BLOCKS))
        .min(SEGMENT_BLOCKS.into());
    let mut wide: Vec<Range<u32>> = Vec::new();
    let mut add = |range: Range<u32>| match wide.last_mut().filter(|last| last.end >= range.start) {
        Some(last) => last.end = last.end.max(range.end),
        None => wide.push(range),
    };
    let cells: Vec<Range<u32>> = cells(&listed.blocks).collect();
    for parts in cells.chunk_by(|a, b| a.start / CELL_BLOCKS == b.start / CELL_BLOCKS) {
        let held: u32 = parts.iter().map(|part| part.end - part.start).sum();
        let first = parts[0].start / CELL_BLOCKS * CELL_BLOCKS;
        match held * 2 >= CELL_BLOCKS {
            true => add(first..(first + CELL_BLOCKS).min(end as u32)),
            false => parts.iter().cloned().for_each(&mut add),
        }
    }
    listed.blocks = wide;
}

/// Ranges cut where cells meet.
pub fn cells(ranges: &[Range<u32>]) -> impl Iterator<Item = Range<u32>> + '_ {
    cut(ranges, CELL_BLOCKS)
}

fn cut(ranges: &[Range<u32>], at: u32) -> impl Iterator<Item = Range<u32>> + '_ {
    ranges.iter().flat_map(move |range| {
        let end = range.end;
        let next = move |start: u32| ((start / at + 1) * at).min(end);
        std::iter::successors(Some(range.start), move |start| Some(next(*start)))
            .take_while(move |start| *start < end)
            .map(move |start| start..next(start))
    })
}

/// Blocks that one request reads.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Read {
    /// All of them.
    pub blocks: Range<u32>,
    pub listed: Vec<Range<u32>>,
}

/// The requests for listed blocks: no longer than 1 MiB, no cell in two of them.
pub fn reads(listed: &[Range<u32>]) -> Vec<Read> {
    let mut reads: Vec<Read> = Vec::new();
    for range in cut(listed, READ_BLOCKS) {
        let is_near = |read: &&mut Read| {
            read.blocks.start / READ_BLOCKS == range.start / READ_BLOCKS
                && range.start - read.blocks.end <= GAP_BLOCKS
        };
        match reads.last_mut().filter(is_near) {
            Some(read) => {
                read.blocks.end = range.end;
                read.listed.push(range);
            }
            None => reads.push(Read { blocks: range.clone(), listed: vec![range] }),
        }
    }
    reads
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn blocks(listed: &[Range<u32>]) -> Vec<u32> {
        listed.iter().cloned().flatten().collect()
    }

    #[test]
    fn bytes_become_blocks_of_segments() {
        let mut segments = Segments::new(2 * SEGMENT + 5000);
        assert_eq!(segments.add(ByteRange { start: 1, end: 2 }), []);
        assert_eq!(segments.add(ByteRange { start: 4000, end: 9000 }), []);
        let first = Listed { number: 0, blocks: vec![0..3, SEGMENT_BLOCKS - 1..SEGMENT_BLOCKS] };
        assert_eq!(segments.add(ByteRange { start: SEGMENT - 1, end: SEGMENT + 1 }), [first]);
        let second = Listed { number: 1, blocks: std::iter::once(0..1).collect() };
        assert_eq!(segments.add(ByteRange { start: 2 * SEGMENT, end: 3 * SEGMENT }), [second]);
        let last = Listed { number: 2, blocks: std::iter::once(0..2).collect() };
        assert_eq!(segments.finish(), Some(last), "the volume ends in the second block");
    }

    #[test]
    #[expect(clippy::single_range_in_vec_init, reason = "lists of one range are meant")]
    fn a_cell_that_is_half_listed_is_stored_anew() {
        let widened = |blocks: &[Range<u32>], size| {
            let mut listed = Listed { number: 0, blocks: blocks.to_vec() };
            widen(&mut listed, size);
            listed.blocks
        };
        let large = SEGMENT;
        for (blocks, wide) in [
            (vec![3..4], vec![3..4]),
            (vec![0..4, 8..12], vec![0..16]),
            (vec![0..4, 8..11], vec![0..4, 8..11]),
            (vec![10..24], vec![10..32]),
            (vec![8..40], vec![0..48]),
        ] {
            assert_eq!(widened(&blocks, large), wide, "{blocks:?}");
        }
        assert_eq!(widened(&[0..9], 10 * BLOCK), [0..10], "not beyond the volume");
    }

    proptest! {
        #[test]
        fn reads_hold_what_is_listed_and_cut_no_cell(marks in proptest::collection::vec(0u8..4, 600)) {
            let listed: Vec<Range<u32>> =
                (0..).zip(&marks).filter(|(_, mark)| **mark == 0).map(|(block, _)| block..block + 1).collect();
            let reads = reads(&listed);
            let held: Vec<u32> = reads.iter().flat_map(|read| blocks(&read.listed)).collect();
            prop_assert_eq!(held, blocks(&listed));
            for read in &reads {
                prop_assert!(read.blocks.end - read.blocks.start <= READ_BLOCKS);
                prop_assert!(read.listed.iter().all(|part| read.blocks.start <= part.start && part.end <= read.blocks.end));
            }
            for pair in reads.windows(2) {
                let (a, b) = (&pair[0].blocks, &pair[1].blocks);
                prop_assert!(a.end <= b.start);
                let shares_a_cell = (a.end - 1) / CELL_BLOCKS == b.start / CELL_BLOCKS;
                prop_assert!(!shares_a_cell || b.start - a.end > GAP_BLOCKS);
            }
        }
    }
}
