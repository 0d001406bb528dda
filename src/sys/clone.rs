//! Copies of file ranges: shared (FICLONE) and real (copy_file_range), and holes.

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::path::Path;

use nix::fcntl::{PosixFadviseAdvice, posix_fadvise};

use base::ByteRange;
use files::{Context, Result, step};

/// Bytes that are asked for at once: of more the kernel may take a part alone (its readahead or the disk's largest request).
const PIECE: u64 = 128 << 10;

/// Makes `target` share all blocks of `source` (ioctl_ficlone(2)). Atomic towards writers of
/// `source`, whose dirty pages are written first; both must be on one filesystem.
pub fn reflink(source: &File, target: &File, target_path: &Path) -> Result<()> {
    step("clone blocks into", target_path, || {
        // SAFETY: FICLONE takes a descriptor by value; both descriptors are open.
        let rc = unsafe { libc::ioctl(target.as_raw_fd(), libc::FICLONE, source.as_raw_fd()) };
        if rc < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
    })
}

/// Copies `length` bytes at `offset` to the same offset of `target`, inside the kernel. Short only
/// at the end of `source`.
pub fn copy_range(source: &File, target: &File, offset: u64, length: u64) -> io::Result<u64> {
    let mut copied = 0;
    while copied < length {
        let want = usize::try_from(length - copied).unwrap_or(usize::MAX);
        let (mut from, mut to) = ((offset + copied) as i64, (offset + copied) as i64);
        match nix::fcntl::copy_file_range(source, Some(&mut from), target, Some(&mut to), want) {
            Ok(0) => break,
            Ok(count) => copied += count as u64,
            Err(nix::errno::Errno::EINTR) => {}
            Err(error) => return Err(error.into()),
        }
    }
    Ok(copied)
}

/// Starts to write the dirty pages of a byte range to the disk and waits for nothing (sync_file_range(2)), so
/// that a sync later on finds little left to do. It makes nothing durable; errors are reported by the later sync.
pub fn start_writing(file: &File, offset: u64, length: u64) {
    let (offset, length) = (offset as i64, length as i64);
    // SAFETY: sync_file_range takes numbers alone, and the descriptor is open.
    unsafe { libc::sync_file_range(file.as_raw_fd(), offset, length, libc::SYNC_FILE_RANGE_WRITE) };
}

/// Starts to read a byte range into the page cache and waits for nothing. Advice: where the kernel does not take it, a read
/// of the range is as slow as before.
pub fn start_reading(file: &File, range: ByteRange) {
    for start in (range.start..range.end).step_by(PIECE as usize) {
        let length = PIECE.min(range.end - start) as i64;
        let _ = posix_fadvise(file, start as i64, length, PosixFadviseAdvice::POSIX_FADV_WILLNEED);
    }
}

/// Turns off the kernel's readahead for this descriptor. btrfs reads 4 MiB ahead, and the fsyncs of others wait for that.
/// Advice, as above.
pub fn turn_off_readahead(file: &File) {
    let _ = posix_fadvise(file, 0, 0, PosixFadviseAdvice::POSIX_FADV_RANDOM);
}

/// Drops the written pages of a file from the page cache, and turns off readahead.
///
/// A page that was read of space that was never written makes xfs take that space for data (lseek(2), SEEK_DATA), though
/// it holds zeros.
pub fn read_only_what_is_asked(file: &File, path: &Path) -> Result<()> {
    turn_off_readahead(file);
    posix_fadvise(file, 0, 0, PosixFadviseAdvice::POSIX_FADV_DONTNEED).context("drop the cache of", path)
}
