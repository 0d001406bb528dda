//! Questions to a block device that is attached already: its size, its write counters, a flush.

use std::fs::{File, OpenOptions};
use std::io::{Read, Seek, SeekFrom};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

use super::{Context, Result};

/// Writes what the device's page cache holds to the device, and the device's own cache down.
///
/// All descriptors of a block device share one page cache, so this covers the buffered writes of
/// whoever has it open.
pub fn flush(device: &Path) -> Result<()> {
    let file = File::open(device).context("open", device)?;
    file.sync_all().context("flush", device)
}

/// The size of a block device in bytes.
pub fn size(device: &Path) -> Result<u64> {
    let mut file = File::open(device).context("open", device)?;
    file.seek(SeekFrom::End(0)).context("find the size of", device)
}

/// Whether somebody mounts the device or holds it exclusively (open(2), O_EXCL on a block device).
pub fn is_claimed(device: &Path) -> Result<bool> {
    match OpenOptions::new().read(true).custom_flags(libc::O_EXCL).open(device) {
        Ok(_) => Ok(false),
        Err(error) if error.raw_os_error() == Some(libc::EBUSY) => Ok(true),
        Err(error) => Err(error).context("open", device),
    }
}

/// How many writes a device has taken, and how many requests are under way.
///
/// Two equal samples with nothing in flight prove that nothing was written between them
/// (`Documentation/block/stat.rst`: fields 5 write I/Os, 9 in flight, 12 discard I/Os).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WriteCounters {
    /// Writes completed since the device was attached.
    pub writes: u64,
    /// Discards completed since then.
    pub discards: u64,
    /// Requests not completed yet.
    pub in_flight: u64,
}

impl WriteCounters {
    /// Samples the counters of the device whose sysfs directory is `sysfs`.
    pub fn sample(sysfs: &Path) -> Result<Self> {
        let path = sysfs.join("stat");
        let mut text = String::new();
        File::open(&path).and_then(|mut file| file.read_to_string(&mut text)).context("read", &path)?;
        let field = |index: usize| {
            text.split_ascii_whitespace().nth(index).and_then(|word| word.parse().ok()).unwrap_or(0)
        };
        Ok(WriteCounters { writes: field(4), in_flight: field(8), discards: field(11) })
    }
}

/// The number of the block device that `path` is a node of, `major:minor`; `None` where it is
/// something else.
pub fn number(path: &Path) -> Result<Option<String>> {
    use std::os::unix::fs::{FileTypeExt, MetadataExt};
    let meta = std::fs::metadata(path).context("stat", path)?;
    let rdev = meta.rdev();
    let text = || format!("{}:{}", nix::sys::stat::major(rdev), nix::sys::stat::minor(rdev));
    Ok(meta.file_type().is_block_device().then(text))
}
