//! Reading parts of a map: some kilobytes at once, of which the next reads are served.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;

use files::Context;

use crate::{Error, Result};

/// Bytes of the table, and of the payloads, that are read at once: segments of a sparse volume are small, and are mostly
/// read one after another.
pub(super) const WINDOW: usize = 4 << 10;

/// What was read last of the table and of the payloads.
#[derive(Debug, Default)]
pub(super) struct Windows {
    pub(super) rows: Window,
    pub(super) payloads: Window,
}

#[derive(Debug, Default)]
pub(super) struct Window {
    start: u64,
    bytes: Vec<u8>,
}

impl Window {
    /// Bytes of a map, read with those that follow up to `end`.
    pub(super) fn read(
        &mut self,
        file: &File,
        path: &Path,
        start: u64,
        length: usize,
        end: u64,
    ) -> Result<&[u8]> {
        let is_there = start >= self.start && start + length as u64 <= self.start + self.bytes.len() as u64;
        if !is_there {
            let at_once = length.max(WINDOW.min(end.saturating_sub(start) as usize));
            let mut bytes = std::mem::take(&mut self.bytes);
            bytes.resize(at_once, 0);
            if let Err(error) = read_at(file, path, &mut bytes, start) {
                // What is not needed may be what the disk does not give back.
                bytes.truncate(length);
                if at_once == length {
                    return Err(error);
                }
                read_at(file, path, &mut bytes, start)?;
            }
            *self = Window { start, bytes };
        }
        let at = (start - self.start) as usize;
        Ok(&self.bytes[at..at + length])
    }
}

/// Reads bytes of a map. What the disk does not give back is damaged, like what it gives back changed: it can be
/// made again from the data.
pub(super) fn read_at(file: &File, path: &Path, bytes: &mut [u8], offset: u64) -> Result<()> {
    match file.read_exact_at(bytes, offset).context("read", path) {
        Err(error) if error.is_unreadable() => {
            Err(Error::damaged(path, format!("it cannot be read: {error}")))
        }
        read => Ok(read?),
    }
}
