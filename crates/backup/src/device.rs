//! Devices and images: reading and writing past the page cache, and which parts hold data.

use std::fs::File;
use std::io::{Seek, SeekFrom};
use std::os::unix::fs::{FileExt, FileTypeExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use base::ByteRange;
use files::{Context, DataRanges, change};
use nix::fcntl::OFlag;

use crate::error::{Error, Result};
use crate::repository::BLOCK;

/// What direct reads must be aligned to, in memory and on the device.
pub const ALIGN: usize = BLOCK as usize;

/// A device or image that is read.
#[derive(Debug)]
pub struct Device {
    path: PathBuf,
    cached: File,
    /// Past the page cache, where the filesystem can.
    direct: Option<File>,
    size: u64,
}

impl Device {
    /// Opens it for reading.
    pub fn open(path: &Path) -> Result<Self> {
        let mut cached = File::open(path).context("open", path)?;
        let kind = cached.metadata().context("look at", path)?.file_type();
        if !kind.is_file() && !kind.is_block_device() {
            return Err(Error::refused(format!("{} is neither a block device nor a file", path.display())));
        }
        let size = cached.seek(SeekFrom::End(0)).context("find the size of", path)?;
        let direct = File::options().read(true).custom_flags(OFlag::O_DIRECT.bits()).open(path).ok();
        Ok(Device { path: path.to_owned(), cached, direct, size })
    }

    /// Its path.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Its size in bytes.
    pub fn size(&self) -> u64 {
        self.size
    }

    /// The parts that hold data, where it is a file. A device has no holes that show, so it is one part.
    pub fn data(&self) -> DataRanges<'_> {
        DataRanges::of(&self.cached, &self.path, ByteRange { start: 0, end: self.size })
    }

    /// Reads at an offset, which is whole blocks, as the length is. What lies behind the end is zeros.
    pub fn read(&self, offset: u64, bytes: &mut [u8]) -> Result<()> {
        let wanted = (bytes.len() as u64).min(self.size.saturating_sub(offset)) as usize;
        let mut done = 0;
        while done < wanted {
            // Past the end a direct read comes back short, and there it is not aligned any more.
            let is_aligned = done % ALIGN == 0;
            let file = self.direct.as_ref().filter(|_| is_aligned).unwrap_or(&self.cached);
            let end = if is_aligned && self.direct.is_some() { bytes.len() } else { wanted };
            match file.read_at(&mut bytes[done..end], offset + done as u64) {
                Ok(0) => {
                    return Err(Error::refused(format!(
                        "{} became shorter while it was read",
                        self.path.display()
                    )));
                }
                Ok(count) => done += count,
                Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {}
                // EINVAL: the device wants another alignment for direct reads than BLOCK.
                Err(error) if error.raw_os_error() == Some(nix::libc::EINVAL) && self.direct.is_some() => {
                    self.cached
                        .read_exact_at(&mut bytes[done..wanted], offset + done as u64)
                        .context("read", &self.path)?;
                    done = wanted;
                }
                Err(source) => {
                    return Err(files::Error {
                        operation: "read",
                        path: self.path.clone(),
                        at: None,
                        source,
                    }
                    .into());
                }
            }
        }
        bytes[wanted..].fill(0);
        Ok(())
    }
}

/// A device or file that is written.
#[derive(Debug)]
pub struct Target<'t> {
    path: &'t Path,
    cached: &'t File,
    /// Past the page cache, where the filesystem can.
    direct: Option<File>,
}

impl<'t> Target<'t> {
    /// Of what is open for writing, and has this path.
    pub fn of(cached: &'t File, path: &'t Path) -> Self {
        let direct = File::options().write(true).custom_flags(OFlag::O_DIRECT.bits()).open(path).ok();
        Target { path, cached, direct }
    }

    /// Its path.
    pub fn path(&self) -> &Path {
        self.path
    }

    /// The file as it was opened.
    pub fn file(&self) -> &File {
        self.cached
    }

    /// Writes at an offset: past the page cache where that, the length and the memory are whole blocks.
    pub fn write(&self, bytes: &[u8], offset: u64) -> Result<()> {
        let is_aligned = [bytes.as_ptr() as usize, bytes.len(), offset as usize]
            .iter()
            .all(|number| number.is_multiple_of(ALIGN));
        let direct = self.direct.as_ref().filter(|_| is_aligned);
        match direct.map(|file| change::write_at(file, self.path, bytes, offset)) {
            Some(Ok(())) => Ok(()),
            // EINVAL: the device wants another alignment for direct writes than BLOCK.
            Some(Err(error)) if error.errno() != Some(nix::libc::EINVAL) => Err(error.into()),
            _ => Ok(change::write_at(self.cached, self.path, bytes, offset)?),
        }
    }

    /// Makes what was written durable.
    pub fn sync(&self) -> Result<()> {
        Ok(change::sync(self.cached, self.path)?)
    }
}

/// Memory for direct reads and writes.
#[derive(Debug, Default)]
pub struct Buffer {
    bytes: Vec<u8>,
    start: usize,
}

impl Buffer {
    /// `length` is in bytes.
    pub fn new(length: usize) -> Self {
        let bytes = vec![0; length + ALIGN];
        let start = bytes.as_ptr().align_offset(ALIGN).min(ALIGN);
        Buffer { bytes, start }
    }

    /// The first bytes of it. Where it is too short it becomes longer, and holds zeros.
    pub fn part(&mut self, length: usize) -> &mut [u8] {
        if self.bytes.len() < self.start + length {
            *self = Buffer::new(length);
        }
        &mut self.bytes[self.start..self.start + length]
    }
}

/// Whether all is zeros. Whole blocks.
pub fn is_zeros(bytes: &[u8]) -> bool {
    const ZEROS: [u8; ALIGN] = [0; ALIGN];
    bytes.chunks(ALIGN).all(|block| *block == ZEROS[..block.len()])
}
