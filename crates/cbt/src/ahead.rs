//! Asking the kernel for blocks before they are read, so that many reads are in flight. Changed blocks are scattered, so
//! the kernel's own readahead does not find them.
//!
//! The kernel is asked only after a read that went to the disk: for blocks that are cached the calls would be wasted.

use std::fs::File;
use std::time::{Duration, Instant};

use nix::fcntl::{PosixFadviseAdvice, posix_fadvise};

use base::ByteRange;

/// A read that takes longer went to the disk.
const SLOW: Duration = Duration::from_micros(30);
/// Bytes per request, and the maximum number of ranges. Twice as many are in flight.
const BYTES: u64 = 4 << 20;
const RANGES: usize = 128;
/// Bytes of a call: of more the kernel may take a part alone (its readahead or the disk's largest request).
const PIECE: u64 = 128 << 10;

/// How far ahead reads were requested.
#[derive(Debug, Default)]
pub(super) struct Readahead {
    /// Whether a read since the last call went to the disk, or waited for what is on its way.
    slow: bool,
    /// Bytes before it were read.
    read: u64,
    /// Bytes before it were requested.
    asked: u64,
    /// Bytes before it were requested by the call before the last: once they are read, more is requested.
    before: u64,
}

impl Readahead {
    /// Makes a read of blocks up to byte `end`, and takes its time.
    pub(super) fn timed<T>(&mut self, end: u64, read: impl FnOnce() -> T) -> T {
        let started = Instant::now();
        let done = read();
        self.took(end, started.elapsed());
        done
    }

    fn took(&mut self, end: u64, time: Duration) {
        self.slow |= time > SLOW;
        self.read = end;
    }

    /// After reads that went to the disk, asks for the next blocks of files, which will be read in this order: before the
    /// last of those are read that were asked for, so that the disk always has some to read.
    pub(super) fn ask<'f, B: Iterator<Item = ByteRange>>(
        &mut self,
        blocks: impl FnOnce() -> B,
        files: impl Iterator<Item = &'f File> + Clone,
    ) {
        for range in self.due(blocks) {
            let end = move |start| range.end.min(start + PIECE);
            for start in (range.start..range.end).step_by(PIECE as usize) {
                for file in files.clone() {
                    // Advice: where the kernel does not take it, the read is as slow as before.
                    let _ = posix_fadvise(
                        file,
                        start as i64,
                        (end(start) - start) as i64,
                        PosixFadviseAdvice::POSIX_FADV_WILLNEED,
                    );
                }
            }
        }
    }

    /// What to ask for now.
    fn due<B: Iterator<Item = ByteRange>>(&mut self, blocks: impl FnOnce() -> B) -> Vec<ByteRange> {
        if !self.slow || self.read < self.before {
            return Vec::new();
        }
        self.slow = false;
        let from = self.asked.max(self.read);
        let later = blocks().filter(|block| block.end > from);
        let ranges = next_ranges(later.map(|block| ByteRange { start: block.start.max(from), ..block }));
        if let Some(last) = ranges.last() {
            (self.before, self.asked) = (from, last.end);
        }
        ranges
    }
}

/// The next request, for ascending blocks: adjacent ones as one range.
fn next_ranges(blocks: impl Iterator<Item = ByteRange>) -> Vec<ByteRange> {
    let mut ranges: Vec<ByteRange> = Vec::new();
    let mut bytes = 0;
    for block in blocks {
        let count = ranges.len();
        match ranges.last_mut() {
            Some(range) if range.end == block.start => range.end = block.end,
            _ if count == RANGES => break,
            _ => ranges.push(block),
        }
        bytes += block.len();
        if bytes >= BYTES {
            break;
        }
    }
    ranges
}

#[cfg(test)]
mod tests {
    use super::*;

    const KIB4: u64 = 4096;

    /// The requested ranges of blocks of 4 KiB, by their numbers.
    fn asked(blocks: impl IntoIterator<Item = u64>) -> Vec<(u64, u64)> {
        let bytes = |block| ByteRange { start: block * KIB4, end: (block + 1) * KIB4 };
        let ranges = next_ranges(blocks.into_iter().map(bytes));
        ranges.into_iter().map(|range| (range.start / KIB4, range.end / KIB4)).collect()
    }

    #[test]
    fn adjacent_blocks_are_one_range_and_no_more_is_asked_for_than_the_limits() {
        assert_eq!(asked([]), []);
        assert_eq!(asked([1, 2, 3, 7, 9, 10]), [(1, 4), (7, 8), (9, 11)]);
        assert_eq!(asked(0..1 << 20), [(0, BYTES / KIB4)]);
        let scattered = asked((0..1000).map(|block| 2 * block));
        assert_eq!((scattered.len(), scattered.last()), (RANGES, Some(&(254, 255))));
        // A block larger than the limit is asked for all the same.
        let large = ByteRange { start: 0, end: 2 * BYTES };
        assert_eq!(next_ranges([large, large].into_iter()), [large]);
    }

    /// Reads blocks 0, 1, ... of 4 KiB, slow ones where `slow` says so, and collects what is asked for before each.
    fn asked_while_reading(count: u64, slow: impl Fn(u64) -> bool) -> Vec<(u64, Vec<(u64, u64)>)> {
        let mut ahead = Readahead::default();
        let mut asked = Vec::new();
        for block in 0..count {
            ahead.took((block + 1) * KIB4, if slow(block) { 2 * SLOW } else { SLOW / 2 });
            let bytes = |block| ByteRange { start: block * KIB4, end: (block + 1) * KIB4 };
            let ranges = ahead.due(|| (block + 1..count).map(bytes));
            let ranges: Vec<_> = ranges.iter().map(|range| (range.start / KIB4, range.end / KIB4)).collect();
            if !ranges.is_empty() {
                asked.push((block, ranges));
            }
        }
        asked
    }

    #[test]
    fn the_next_blocks_are_asked_for_before_the_last_of_those_on_their_way_are_read() {
        let batch = BYTES / KIB4;
        assert_eq!(asked_while_reading(10, |_| false), [], "all are cached");
        let all_slow = asked_while_reading(4 * batch, |_| true);
        let expected: [(u64, Vec<(u64, u64)>); 4] = [
            (0, vec![(1, 1 + batch)]),
            // The second at once, and each later one when the one before the last is read.
            (1, vec![(1 + batch, 1 + 2 * batch)]),
            (batch, vec![(1 + 2 * batch, 1 + 3 * batch)]),
            (2 * batch, vec![(1 + 3 * batch, 4 * batch)]),
        ];
        assert_eq!(all_slow, expected);
        // What follows a slow read is asked for, and nothing where the reads after it find all in the cache.
        let one_slow = asked_while_reading(4 * batch, |block| block == 7);
        assert_eq!(one_slow, [(7, vec![(8, 8 + batch)])]);
    }
}
