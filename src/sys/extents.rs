//! The physical extents of a file: FIEMAP.

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::path::Path;

use base::{Address, ByteRange, Extent};
use files::{Context, Result};

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
                return Some(Ok(Extent { range, address: address(&raw) }));
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

fn address(raw: &RawExtent) -> Address {
    const OPAQUE: u32 = EXTENT_UNKNOWN
        | EXTENT_DELALLOC
        | EXTENT_ENCODED
        | EXTENT_ENCRYPTED
        | EXTENT_NOT_ALIGNED
        | EXTENT_INLINE
        | EXTENT_TAIL;
    if raw.flags & OPAQUE != 0 {
        Address::Opaque
    } else if raw.flags & EXTENT_UNWRITTEN != 0 {
        Address::Unwritten
    } else {
        Address::At(raw.physical)
    }
}
