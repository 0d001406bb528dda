//! Offsets at which volumes could not be read. Health calls read there again.

use std::collections::BTreeMap;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::Path;

use parking_lot::Mutex;

use crate::driver::error::Error;
use base::{ByteRange, VolumeId};
use files::Context;

/// The bytes from the offset of a failed read that may be damaged: more than one read of a copy or a hash takes.
const READ: u64 = 4 << 20;
/// The bytes read at a time to find the damaged part.
const BLOCK: u64 = 4096;

/// The ranges of volumes where a read failed.
#[derive(Debug, Default)]
pub(in crate::driver) struct ReadErrors(Mutex<BTreeMap<VolumeId, ByteRange>>);

impl ReadErrors {
    /// Takes note of a failed read of a volume or of one of its snapshots, which may share the block. Only the last failure
    /// is kept.
    pub(in crate::driver) fn note(&self, volume: &VolumeId, error: &Error) {
        let Some(error) = error.sys().filter(|error| error.is_unreadable()) else { return };
        let Some(start) = error.at else { return };
        self.set(volume, Some(ByteRange { start, end: start + READ }));
    }

    pub(in crate::driver) fn forget(&self, volume: &VolumeId) {
        self.set(volume, None);
    }

    pub(in crate::driver) fn set(&self, volume: &VolumeId, range: Option<ByteRange>) {
        let mut read_errors = self.0.lock();
        match range {
            Some(range) => read_errors.insert(volume.clone(), range),
            None => read_errors.remove(volume),
        };
    }

    pub(in crate::driver) fn of(&self, volume: &VolumeId) -> Option<ByteRange> {
        self.0.lock().get(volume).copied()
    }
}

/// The first block of a range that cannot be read, with the error. The range is cut at the end of the file.
pub(in crate::driver) fn first_unreadable(
    path: &Path,
    range: ByteRange,
) -> files::Result<Option<(u64, io::Error)>> {
    let file = File::open(path).context("open", path)?;
    let length = file.metadata().context("stat", path)?.len();
    let mut block = [0; BLOCK as usize];
    let mut at = range.start - range.start % BLOCK;
    while at < range.end.min(length) {
        match file.read_at(&mut block, at) {
            Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
            Err(error) => return Ok(Some((at, error))),
            Ok(_) => at += BLOCK,
        }
    }
    Ok(None)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_names_a_place_that_cannot_be_read_is_noted() {
        let read_errors = ReadErrors::default();
        let volume = VolumeId::random(base::DataDirKey::random().expect("key")).expect("id");
        let error = |errno, at| {
            let source = io::Error::from_raw_os_error(errno);
            Error::Sys(files::Error { operation: "read", path: "x".into(), at, source })
        };
        for (errno, at, noted) in [
            (libc::ENOSPC, Some(0), None),
            (libc::EIO, None, None),
            (libc::EIO, Some(8192), Some(8192)),
            (libc::EBADMSG, Some(0), Some(0)),
        ] {
            read_errors.forget(&volume);
            read_errors.note(&volume, &error(errno, at));
            assert_eq!(read_errors.of(&volume).map(|range| range.start), noted, "{errno} {at:?}");
        }
    }

    #[test]
    fn a_range_that_ends_behind_the_file_ends_with_it() {
        let file = tempfile::NamedTempFile::new().expect("temp file");
        file.as_file().set_len(10_000).expect("set_len");
        for range in [(0, 4096), (5000, 1 << 20), (1 << 30, 2 << 30)] {
            let range = ByteRange { start: range.0, end: range.1 };
            assert!(first_unreadable(file.path(), range).expect("it is there").is_none(), "{range:?}");
        }
    }
}
