//! What the mock's volumes hold. Nothing is stored: which blocks a snapshot changed is computed from the seed, in ascending
//! order from any block on, so a volume of any size with any number of changes costs no memory.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::sync::Arc;

use crate::conformance::ranges::Ranges;
use crate::random;

/// What changed between a snapshot and the one before.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Changes {
    /// `count` of the volume's `blocks`, spread over it.
    Spread { blocks: u64, count: u64, seed: u64 },
    /// These blocks: ascending, disjoint, from and to.
    Listed { ranges: Vec<(u64, u64)>, seed: u64 },
}

impl Changes {
    fn seed(&self) -> u64 {
        match self {
            Changes::Spread { seed, .. } | Changes::Listed { seed, .. } => *seed,
        }
    }

    /// The first changed block at or behind `from`.
    fn next(&self, from: u64) -> Option<u64> {
        match self {
            Changes::Listed { ranges, .. } => {
                let (start, _) = ranges.get(ranges.partition_point(|(_, end)| *end <= from))?;
                Some(from.max(*start))
            }
            Changes::Spread { blocks, count, .. } => {
                if *count == 0 || from >= *blocks {
                    return None;
                }
                // Change number i lies in its own part of the volume, from i * blocks / count on.
                let number = (u128::from(from) * u128::from(*count) / u128::from(*blocks)) as u64;
                (number.saturating_sub(1)..*count)
                    .map(|number| self.place(number))
                    .find(|block| *block >= from)
            }
        }
    }

    /// The block of a spread change.
    fn place(&self, number: u64) -> u64 {
        let Changes::Spread { blocks, count, seed } = self else { return 0 };
        let start = |number: u64| (u128::from(number) * u128::from(*blocks) / u128::from(*count)) as u64;
        let (from, to) = (start(number), start(number + 1));
        from + random::at(*seed, number) % (to - from).max(1)
    }
}

/// All blocks that any of `history` changed, from `from` on, each with the last that did, by its number.
pub(super) struct Blocks {
    history: Vec<Arc<Changes>>,
    /// The next block of each, the lowest first and of one block the newest first.
    heads: BinaryHeap<Reverse<(u64, Reverse<usize>)>>,
}

impl Blocks {
    pub fn new(history: &[Arc<Changes>], from: u64) -> Self {
        let heads =
            history.iter().enumerate().filter_map(|(number, changes)| Some((changes.next(from)?, number)));
        let heads = heads.map(|(block, number)| Reverse((block, Reverse(number)))).collect();
        Blocks { history: history.to_vec(), heads }
    }
}

impl Iterator for Blocks {
    type Item = (u64, usize);

    fn next(&mut self) -> Option<(u64, usize)> {
        let Reverse((block, Reverse(newest))) = *self.heads.peek()?;
        while let Some(Reverse((same, Reverse(number)))) = self.heads.peek().copied() {
            if same != block {
                break;
            }
            self.heads.pop();
            if let Some(next) = self.history[number].next(block + 1) {
                self.heads.push(Reverse((next, Reverse(number))));
            }
        }
        Some((block, newest))
    }
}

/// Runs of blocks, as tuples: from and to, in bytes.
pub(super) struct Tuples {
    blocks: std::iter::Peekable<Blocks>,
    block_size: u64,
    capacity: u64,
    fixed: bool,
}

impl Tuples {
    pub fn new(history: &[Arc<Changes>], offset: u64, block_size: u64, capacity: u64, fixed: bool) -> Self {
        Tuples { blocks: Blocks::new(history, offset / block_size).peekable(), block_size, capacity, fixed }
    }
}

impl Iterator for Tuples {
    type Item = (u64, u64);

    fn next(&mut self) -> Option<(u64, u64)> {
        let (first, _) = self.blocks.next()?;
        let mut end = first + 1;
        while !self.fixed && self.blocks.next_if(|(block, _)| *block == end).is_some() {
            end += 1;
        }
        let end = end * self.block_size;
        // With a fixed size the last one may pass the capacity, as the spec has it.
        let end = if self.fixed { end } else { end.min(self.capacity) };
        Some((first * self.block_size, end))
    }
}

/// Fills a block: the same bytes for the change that wrote it, wherever it is read.
pub(super) fn fill(seed: u64, block: u64, bytes: &mut [u8]) {
    for (word, place) in bytes.chunks_mut(8).zip(0_u64..) {
        // Never zeros.
        let value = (random::at(seed ^ block.rotate_left(32), place) | 1).to_le_bytes();
        word.copy_from_slice(&value[..word.len()]);
    }
}

/// Writes what a volume holds into a file, which has the volume's size already.
pub(super) fn write(file: &File, history: &[Arc<Changes>], block_size: u64, capacity: u64) -> io::Result<()> {
    let mut bytes = vec![0; block_size as usize];
    for (block, number) in Blocks::new(history, 0) {
        let start = block * block_size;
        let length = block_size.min(capacity.saturating_sub(start)) as usize;
        fill(history[number].seed(), block, &mut bytes[..length]);
        file.write_all_at(&bytes[..length], start)?;
    }
    Ok(())
}

/// Reads `OFFSET+SIZE` joined by spaces, in bytes, as blocks.
pub(super) fn listed(text: &str, block_size: u64, capacity: u64, seed: u64) -> Result<Changes, String> {
    let mut ranges = Vec::new();
    for part in text.split_whitespace() {
        let wanted = || format!("{part:?} is not a range: write OFFSET+SIZE, as in 0+4096 or 1Mi+64Ki");
        let (offset, size) = part.split_once('+').ok_or_else(wanted)?;
        let number = |text: &str| text.parse::<base::Quantity>().map(|size| size.0).map_err(|_| wanted());
        let (offset, size) = (number(offset)?, number(size)?);
        match offset.checked_add(size) {
            Some(end) if size > 0 && end <= capacity => {
                ranges.push(offset / block_size..end.div_ceil(block_size));
            }
            _ => return Err(format!("{part} is empty or ends past the capacity, {capacity}")),
        }
    }
    let ranges = Ranges::of(ranges).iter().map(|range| (range.start, range.end)).collect();
    Ok(Changes::Listed { ranges, seed })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn spread(blocks: u64, count: u64, seed: u64) -> Arc<Changes> {
        Arc::new(Changes::Spread { blocks, count, seed })
    }

    #[test]
    fn a_spread_has_as_many_blocks_as_was_asked_and_can_be_entered_anywhere() {
        for (blocks, count) in [(1, 1), (10, 10), (10, 3), (1000, 17), (1000, 0), (997, 996)] {
            let history = [spread(blocks, count, 5)];
            let all: Vec<u64> = Blocks::new(&history, 0).map(|(block, _)| block).collect();
            assert_eq!(all.len() as u64, count, "{blocks} {count}");
            assert!(all.windows(2).all(|pair| pair[0] < pair[1]) && all.iter().all(|block| *block < blocks));
            for from in 0..=blocks {
                let rest: Vec<u64> = Blocks::new(&history, from).map(|(block, _)| block).collect();
                let wanted: Vec<u64> = all.iter().copied().filter(|block| *block >= from).collect();
                assert_eq!(rest, wanted, "{blocks} {count} from {from}");
            }
        }
    }

    #[test]
    fn a_history_is_the_union_and_the_newest_wins() {
        let history = [spread(500, 200, 1), spread(500, 300, 2), spread(500, 7, 3)];
        let mut wanted = std::collections::BTreeMap::new();
        for (number, changes) in history.iter().enumerate() {
            wanted.extend(Blocks::new(std::slice::from_ref(changes), 0).map(|(block, _)| (block, number)));
        }
        let found: Vec<(u64, usize)> = Blocks::new(&history, 0).collect();
        assert_eq!(found, wanted.into_iter().collect::<Vec<_>>());
    }

    #[test]
    fn tuples_of_a_huge_volume_start_at_once() {
        let blocks = u64::from(u32::MAX) * 1000;
        let history = [spread(blocks, blocks / 2, 9), spread(blocks, 1_000_000_000, 8)];
        let offset = blocks / 3 * 4096 + 77;
        let first: Vec<(u64, u64)> =
            Tuples::new(&history, offset, 4096, blocks * 4096, false).take(100).collect();
        assert!(first.windows(2).all(|pair| pair[0].1 < pair[1].0));
        assert!(first[0].1 > offset);
    }

    #[test]
    fn listed_ranges_become_blocks_and_the_tail_is_cut() {
        let changes = listed("8Ki+1 0+4096 4096+4096", 4096, 10_000, 1).expect("ranges");
        assert_eq!(changes, Changes::Listed { ranges: vec![(0, 3)], seed: 1 });
        let history = [Arc::new(changes)];
        assert_eq!(Tuples::new(&history, 0, 4096, 10_000, false).collect::<Vec<_>>(), [(0, 10_000)]);
        let fixed: Vec<_> = Tuples::new(&history, 5000, 4096, 10_000, true).collect();
        assert_eq!(fixed, [(4096, 8192), (8192, 12288)]);
        for (text, part) in
            [("x", "OFFSET+SIZE"), ("0+x", "OFFSET+SIZE"), ("0+0", "empty"), ("8Ki+8Ki", "past")]
        {
            assert!(listed(text, 4096, 10_000, 1).expect_err(text).contains(part));
        }
    }
}
