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
/// Bytes that are asked for at once, in how many ranges at most.
const BYTES: u64 = 8 << 20;
const RANGES: usize = 256;
/// Bytes of a call: of more the kernel may take a part alone (its readahead or the disk's largest request).
const PIECE: u64 = 128 << 10;

/// How far ahead the kernel was asked.
#[derive(Debug, Default)]
pub(super) struct Ahead {
    /// Whether the last read went to the disk.
    slow: bool,
    /// Bytes before it were asked for.
    asked: u64,
}

impl Ahead {
    /// Makes a read of blocks up to byte `end`, and takes its time.
    pub(super) fn timed<T>(&mut self, end: u64, read: impl FnOnce() -> T) -> T {
        let started = Instant::now();
        let done = read();
        self.took(end, started.elapsed());
        done
    }

    fn took(&mut self, end: u64, time: Duration) {
        // What was asked for may still be on its way, and the blocks after it too.
        self.slow = time > SLOW && end >= self.asked;
    }

    /// After a read that went to the disk, asks for the next blocks of files, which will be read in this order.
    pub(super) fn ask<'f, B: Iterator<Item = ByteRange>>(
        &mut self,
        blocks: impl FnOnce() -> B,
        files: impl Iterator<Item = &'f File> + Clone,
    ) {
        if !std::mem::take(&mut self.slow) {
            return;
        }
        let ranges = next_ranges(blocks());
        self.asked = ranges.last().map_or(self.asked, |range| range.end);
        let pieces = ranges.iter().flat_map(|range| {
            let end = move |start| range.end.min(start + PIECE);
            (range.start..range.end)
                .step_by(PIECE as usize)
                .map(move |start| ByteRange { start, end: end(start) })
        });
        for piece in pieces {
            for file in files.clone() {
                // Advice: where the kernel does not take it, the read is as slow as before.
                let _ = posix_fadvise(
                    file,
                    piece.start as i64,
                    piece.len() as i64,
                    PosixFadviseAdvice::POSIX_FADV_WILLNEED,
                );
            }
        }
    }
}

/// What is asked for at once of blocks that ascend: adjacent ones as one range.
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

    /// The ranges that are asked for of blocks of 4 KiB, by their numbers.
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
        assert_eq!((scattered.len(), scattered.last()), (RANGES, Some(&(510, 511))));
        // A block larger than the limit is asked for all the same.
        let large = ByteRange { start: 0, end: 2 * BYTES };
        assert_eq!(next_ranges([large, large].into_iter()), [large]);
    }

    #[test]
    fn the_next_blocks_are_asked_for_after_a_slow_read_of_what_was_not_asked_for() {
        let mut ahead = Ahead { slow: false, asked: 100 };
        for (end, time, slow) in [(50, 2 * SLOW, false), (200, 2 * SLOW, true), (300, SLOW / 2, false)] {
            ahead.took(end, time);
            assert_eq!(ahead.slow, slow, "up to {end} in {time:?}");
        }
    }
}
