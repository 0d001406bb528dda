//! The bare operations that stand beside: reading and writing of ranges, past the page cache, and a flush in the end.

use std::fs::File;
use std::ops::Range;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use files::AlignedBuffer;
use nix::fcntl::OFlag;

fn create(path: &Path, size: u64) -> File {
    let flags = OFlag::O_DIRECT.bits();
    let file = File::options().write(true).create_new(true).custom_flags(flags).open(path).expect("create");
    file.set_len(size).expect("set the length");
    file
}

/// Copies ranges, this number of them at once.
pub fn copy(from: &Path, to: &Path, ranges: &[Range<u64>], in_flight: usize) -> Duration {
    let began = Instant::now();
    let from = File::options().read(true).custom_flags(OFlag::O_DIRECT.bits()).open(from).expect("open");
    let to = create(to, ranges.last().expect("ranges").end);
    each(ranges, in_flight, |buffer, range| {
        let bytes = buffer.part((range.end - range.start) as usize);
        from.read_exact_at(bytes, range.start).expect("read");
        to.write_all_at(bytes, range.start).expect("write");
    });
    to.sync_all().expect("flush");
    began.elapsed()
}

/// Reads ranges, this number of them at once.
pub fn read(from: &Path, ranges: &[Range<u64>], in_flight: usize) -> Duration {
    let began = Instant::now();
    let from = File::options().read(true).custom_flags(OFlag::O_DIRECT.bits()).open(from).expect("open");
    each(ranges, in_flight, |buffer, range| {
        from.read_exact_at(buffer.part((range.end - range.start) as usize), range.start).expect("read");
    });
    began.elapsed()
}

/// Writes ranges, this number of them at once.
pub fn write(to: &Path, ranges: &[Range<u64>], in_flight: usize) -> Duration {
    let began = Instant::now();
    let to = create(to, ranges.last().expect("ranges").end);
    each(ranges, in_flight, |buffer, range| {
        to.write_all_at(buffer.part((range.end - range.start) as usize), range.start).expect("write");
    });
    to.sync_all().expect("flush");
    began.elapsed()
}

/// Goes through ranges of at most 1 MiB in their order, in this number of threads.
fn each(ranges: &[Range<u64>], threads: usize, work: impl Fn(&mut AlignedBuffer, &Range<u64>) + Sync) {
    let next = AtomicUsize::new(0);
    std::thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(|| {
                let mut buffer = AlignedBuffer::new(1 << 20);
                buffer.fill(1);
                while let Some(range) = ranges.get(next.fetch_add(1, Ordering::Relaxed)) {
                    work(&mut buffer, range);
                }
            });
        }
    });
}
