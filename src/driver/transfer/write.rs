//! The writing half of a copy: bytes of blocks whose hashes were checked are joined to pieces, and another thread writes these.

use std::fs::File;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::sync::mpsc::{Receiver as Queue, SyncSender, sync_channel};

use crate::driver::volumes::incoming::Progress;
use crate::sys::clone;
use files::{AlignedBuffer, change};

/// The most bytes that are written at once. Each write past the page cache waits for the disk.
pub(super) const GATHERED: usize = 2 << 20;
/// Pieces of that size: one that is filled, one that is written, and some that wait.
pub(super) const PIECES: usize = 4;

/// Bytes that follow each other in the file, and match their hashes.
pub(super) struct Piece {
    memory: AlignedBuffer,
    length: usize,
    /// Where they go in the file.
    offset: u64,
}

impl Piece {
    fn new() -> Self {
        Piece { memory: AlignedBuffer::new(GATHERED), length: 0, offset: 0 }
    }

    fn bytes(&self) -> &[u8] {
        &self.memory[..self.length]
    }

    /// Takes the beginning of `bytes`, which go to `offset`, and returns what does not fit.
    fn take<'b>(&mut self, bytes: &'b [u8], offset: u64) -> &'b [u8] {
        if self.length == 0 {
            self.offset = offset;
        }
        if self.offset + self.length as u64 != offset {
            return bytes;
        }
        let (taken, rest) = bytes.split_at(bytes.len().min(GATHERED - self.length));
        self.memory[self.length..][..taken.len()].copy_from_slice(taken);
        self.length += taken.len();
        rest
    }
}

/// The writer has ended, since a write failed. That error is the one that counts.
pub(super) struct WriterGone;

/// Joins bytes to pieces for the writer. This is done where their hashes were just checked, while they are in the processor's
/// cache.
pub(super) struct Gather {
    piece: Piece,
    full: SyncSender<Piece>,
    empty: Queue<Piece>,
}

impl Gather {
    /// Adds bytes that go to this offset.
    pub fn put(&mut self, mut bytes: &[u8], mut offset: u64) -> Result<(), WriterGone> {
        loop {
            let rest = self.piece.take(bytes, offset);
            offset += (bytes.len() - rest.len()) as u64;
            bytes = rest;
            if bytes.is_empty() {
                return Ok(());
            }
            self.flush()?;
        }
    }

    /// Hands over what there is, and waits for an empty piece.
    pub fn flush(&mut self) -> Result<(), WriterGone> {
        if self.piece.length == 0 {
            return Ok(());
        }
        let empty = self.empty.recv().map_err(|_| WriterGone)?;
        let full = std::mem::replace(&mut self.piece, empty);
        self.full.send(full).map_err(|_| WriterGone)
    }
}

/// Where pieces are gathered, and for the writer's thread the queue of full ones and the way back of those that are written.
pub(super) fn pieces() -> (Gather, Queue<Piece>, SyncSender<Piece>) {
    let (full, to_write) = sync_channel(PIECES);
    let (written, empty) = sync_channel(PIECES);
    for _ in 1..PIECES {
        // The receiver is here, so this cannot fail.
        let _ = written.send(Piece::new());
    }
    (Gather { piece: Piece::new(), full, empty }, to_write, written)
}

/// Writes what was received, past the page cache where the filesystem can do that: it takes less of the processor, and a
/// copy pushes nothing else out of the cache.
pub(super) struct Writer<'r> {
    file: &'r File,
    path: &'r Path,
    progress: &'r Progress,
    /// `None`: through the page cache.
    direct: Option<File>,
}

impl<'r> Writer<'r> {
    pub fn new(file: &'r File, path: &'r Path, progress: &'r Progress) -> Self {
        let direct = File::options().write(true).custom_flags(libc::O_DIRECT).open(path).ok();
        Writer { file, path, progress, direct }
    }

    /// Writes until nothing more comes, or a write fails.
    pub fn write_all(mut self, full: Queue<Piece>, empty: SyncSender<Piece>) -> files::Result<()> {
        for mut piece in full {
            self.write(piece.bytes(), piece.offset)?;
            piece.length = 0;
            // After the last piece no thread waits for an empty one.
            let _ = empty.send(piece);
        }
        Ok(())
    }

    fn write(&mut self, bytes: &[u8], offset: u64) -> files::Result<()> {
        if let Some(direct) = &self.direct {
            match change::write_at(direct, self.path, bytes, offset) {
                // The filesystem wants another alignment.
                Err(error) if error.errno() == Some(libc::EINVAL) => self.direct = None,
                written => written?,
            }
        }
        if self.direct.is_none() {
            change::write_at(self.file, self.path, bytes, offset)?;
            // The disk writes them while the next blocks arrive.
            clone::start_writing(self.file, offset, bytes.len() as u64);
        }
        self.progress.add_done(bytes.len() as u64);
        Ok(())
    }
}
