//! Where the bytes of a file lie: FIEMAP, and SEEK_DATA / SEEK_HOLE.

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::path::Path;

use nix::unistd::{Whence, lseek};

use super::{Context, Result};
use crate::base::ByteRange;

/// `_IOWR('f', 11, struct fiemap)` of `linux/fs.h`.
const FS_IOC_FIEMAP: libc::c_ulong = 0xC020_660B;
const FIEMAP_FLAG_SYNC: u32 = 1;

const EXTENT_LAST: u32 = 0x1;
const EXTENT_UNKNOWN: u32 = 0x2;
const EXTENT_DELALLOC: u32 = 0x4;
const EXTENT_ENCODED: u32 = 0x8;
const EXTENT_ENCRYPTED: u32 = 0x80;
const EXTENT_NOT_ALIGNED: u32 = 0x100;
const EXTENT_INLINE: u32 = 0x200;
const EXTENT_TAIL: u32 = 0x400;
const EXTENT_UNWRITTEN: u32 = 0x800;

/// Extents asked for a call: 112 KiB of kernel answers.
const BATCH: usize = 2048;

/// `struct fiemap_extent` of `linux/fiemap.h`.
#[repr(C)]
#[derive(Clone, Copy, Default)]
struct RawExtent {
    logical: u64,
    physical: u64,
    length: u64,
    reserved64: [u64; 2],
    flags: u32,
    reserved: [u32; 3],
}

/// `struct fiemap` of `linux/fiemap.h` with room for a batch of answers.
#[repr(C)]
struct Request {
    start: u64,
    length: u64,
    flags: u32,
    mapped: u32,
    count: u32,
    reserved: u32,
    extents: [RawExtent; BATCH],
}

/// What an extent says about the bytes of its range.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Place {
    /// The range lies, byte for byte, at this address of the filesystem's device. Two files that
    /// exist at once and have a range at one address hold the same bytes there.
    At(u64),
    /// Allocated, never written: reads as zeros.
    Unwritten,
    /// Compressed, inline, encrypted, unaligned or not mapped yet: the address says nothing.
    Opaque,
}

/// A mapped range of a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Extent {
    /// The bytes of the file.
    pub range: ByteRange,
    /// Where they lie.
    pub place: Place,
}

/// Waits for the writes to a file that are under way, also direct ones, which fsync(2) need not wait for.
pub fn wait_for_writes(file: &File, path: &Path) -> Result<()> {
    // FIEMAP_FLAG_SYNC: the kernel waits before it looks at the first extent.
    match Extents::of(file, path)?.next() {
        Some(Err(error)) => Err(error),
        _ => Ok(()),
    }
}

/// The extents of a file in ascending order (FIEMAP), fetched a batch at a time. Dirty pages are
/// written first, so that nothing is still to be mapped.
pub struct Extents<'f> {
    file: &'f File,
    path: &'f Path,
    request: Box<Request>,
    next: usize,
    done: bool,
    length: u64,
}

impl<'f> Extents<'f> {
    /// Starts at the beginning of `file`.
    pub fn of(file: &'f File, path: &'f Path) -> Result<Self> {
        let length = file.metadata().context("stat", path)?.len();
        let request = Box::new(Request {
            start: 0,
            length: u64::MAX,
            flags: FIEMAP_FLAG_SYNC,
            mapped: 0,
            count: BATCH as u32,
            reserved: 0,
            extents: [RawExtent::default(); BATCH],
        });
        Ok(Extents { file, path, request, next: 0, done: length == 0, length })
    }

    fn refill(&mut self) -> Result<()> {
        self.request.mapped = 0;
        self.request.count = BATCH as u32;
        // SAFETY: FS_IOC_FIEMAP writes at most `count` extents behind the header, and `Request` has
        // room for `BATCH` of them; the box is mutably borrowed through the call.
        let rc = unsafe { libc::ioctl(self.file.as_raw_fd(), FS_IOC_FIEMAP, &mut *self.request) };
        if rc < 0 {
            return Err(io::Error::last_os_error()).context("list the extents of", self.path);
        }
        self.next = 0;
        let mapped = &self.request.extents[..self.request.mapped as usize];
        match mapped.last() {
            Some(last) if last.flags & EXTENT_LAST == 0 => {
                self.request.start = last.logical + last.length;
                // The pages were written by the first call.
                self.request.flags = 0;
            }
            _ => self.done = true,
        }
        Ok(())
    }
}

impl Iterator for Extents<'_> {
    type Item = Result<Extent>;

    fn next(&mut self) -> Option<Result<Extent>> {
        loop {
            if self.next < self.request.mapped as usize {
                let raw = self.request.extents[self.next];
                self.next += 1;
                let end = (raw.logical + raw.length).min(self.length);
                if raw.logical >= end {
                    continue;
                }
                let range = ByteRange { start: raw.logical, end };
                return Some(Ok(Extent { range, place: place(&raw) }));
            }
            if self.done {
                return None;
            }
            if let Err(error) = self.refill() {
                self.done = true;
                self.request.mapped = 0;
                return Some(Err(error));
            }
        }
    }
}

fn place(raw: &RawExtent) -> Place {
    const OPAQUE: u32 = EXTENT_UNKNOWN
        | EXTENT_DELALLOC
        | EXTENT_ENCODED
        | EXTENT_ENCRYPTED
        | EXTENT_NOT_ALIGNED
        | EXTENT_INLINE
        | EXTENT_TAIL;
    if raw.flags & OPAQUE != 0 {
        Place::Opaque
    } else if raw.flags & EXTENT_UNWRITTEN != 0 {
        Place::Unwritten
    } else {
        Place::At(raw.physical)
    }
}

/// The ranges of a file that hold data, in ascending order (lseek(2), SEEK_DATA and SEEK_HOLE).
/// Everything between them reads as zeros.
pub struct DataRanges<'f> {
    file: &'f File,
    path: &'f Path,
    position: u64,
    end: u64,
}

impl<'f> DataRanges<'f> {
    /// The data of `file` inside `within`.
    pub fn of(file: &'f File, path: &'f Path, within: ByteRange) -> Self {
        DataRanges { file, path, position: within.start, end: within.end }
    }

    fn seek(&self, whence: Whence) -> Result<Option<u64>> {
        match lseek(self.file, self.position as i64, whence) {
            Ok(offset) => Ok(Some(offset as u64)),
            // No data, or no file, from here on.
            Err(nix::errno::Errno::ENXIO) => Ok(None),
            Err(error) => Err(error).context("seek data in", self.path),
        }
    }

    fn advance(&mut self) -> Result<Option<ByteRange>> {
        if self.position >= self.end {
            return Ok(None);
        }
        let Some(start) = self.seek(Whence::SeekData)?.filter(|start| *start < self.end) else {
            self.position = self.end;
            return Ok(None);
        };
        self.position = start;
        let end = self.seek(Whence::SeekHole)?.unwrap_or(self.end).min(self.end);
        self.position = end;
        Ok(Some(ByteRange { start, end }))
    }
}

impl Iterator for DataRanges<'_> {
    type Item = Result<ByteRange>;

    fn next(&mut self) -> Option<Result<ByteRange>> {
        let item = self.advance().transpose();
        if matches!(item, Some(Err(_))) {
            self.position = self.end;
        }
        item
    }
}
