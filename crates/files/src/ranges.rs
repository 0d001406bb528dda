//! Which parts of a file hold data.

use std::fs::File;
use std::path::Path;

use base::ByteRange;
use nix::fcntl::{FallocateFlags, fallocate};
use nix::unistd::{Whence, lseek};

use super::{Context, Result};

/// Gives the blocks of a byte range back to the filesystem; they read as zeros (fallocate(2)).
#[expect(clippy::disallowed_methods, reason = "`change::punch_hole` is the step")]
pub fn punch_hole(file: &File, offset: u64, length: u64) -> std::io::Result<()> {
    let flags = FallocateFlags::FALLOC_FL_PUNCH_HOLE | FallocateFlags::FALLOC_FL_KEEP_SIZE;
    fallocate(file, flags, offset as i64, length as i64).map_err(std::io::Error::from)
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
