//! Asking the kernel for blocks before they are read, so that many reads are in flight: changed blocks lie scattered,
//! which no readahead of the kernel's own foresees.
//!
//! Only a read that went to the disk shows that it is worth the calls, so blocks that are cached cost nothing more.

use std::fs::File;
use std::time::{Duration, Instant};

use nix::fcntl::{PosixFadviseAdvice, posix_fadvise};

use base::ByteRange;

/// A read that takes longer went to the disk.
const SLOW: Duration = Duration::from_micros(30);
/// Bytes that are asked for at once, in how many ranges at most.
const BYTES: u64 = 8 << 20;
const RANGES: usize = 256;

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
        // What was asked for may still be on its way: the next blocks are, too.
        self.slow = started.elapsed() > SLOW && end >= self.asked;
        done
    }

    /// Asks for the next blocks of files, which will be read in this order, where the last read was slow.
    pub(super) fn ask<'f>(
        &mut self,
        blocks: impl Iterator<Item = ByteRange>,
        files: impl Iterator<Item = &'f File> + Clone,
    ) {
        if !std::mem::take(&mut self.slow) {
            return;
        }
        let (mut bytes, mut ranges) = (0, 0);
        let mut open: Option<ByteRange> = None;
        let ask = |range: ByteRange| {
            for file in files.clone() {
                // Advice: where the kernel does not take it, the read is as slow as before.
                let _ = posix_fadvise(
                    file,
                    range.start as i64,
                    range.len() as i64,
                    PosixFadviseAdvice::POSIX_FADV_WILLNEED,
                );
            }
        };
        for block in blocks {
            match &mut open {
                Some(range) if range.end == block.start => range.end = block.end,
                _ => {
                    open.replace(block).map(&ask);
                    ranges += 1;
                }
            }
            self.asked = block.end;
            bytes += block.len();
            if bytes >= BYTES || ranges >= RANGES {
                break;
            }
        }
        open.map(&ask);
    }
}
