//! Questions to a block device that is attached already: its size, its write counters, a flush.

use std::fs::{File, OpenOptions};
use std::io::{self, Seek, SeekFrom};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

use nix::fcntl::{PosixFadviseAdvice, posix_fadvise};

use files::{Context, Result, step};

/// Writes what the device's page cache holds to the device, and the device's own cache down.
///
/// All descriptors of a block device share one page cache, so this covers the buffered writes of
/// every process that has it open.
#[expect(clippy::disallowed_methods, reason = "this is the step")]
pub fn flush(device: &Path) -> Result<()> {
    let file = File::open(device).context("open", device)?;
    step("flush", device, || file.sync_all())
}

/// Drops what the device's page cache holds and has written back: it is read again.
pub fn forget(device: &Path) -> Result<()> {
    let file = File::open(device).context("open", device)?;
    posix_fadvise(&file, 0, 0, PosixFadviseAdvice::POSIX_FADV_DONTNEED).context("drop the cache of", device)
}

/// The size of a block device in bytes.
pub fn size(device: &Path) -> Result<u64> {
    let mut file = File::open(device).context("open", device)?;
    file.seek(SeekFrom::End(0)).context("find the size of", device)
}

/// Whether a synchronous write ends with a flush of the device whose sysfs directory is `sysfs`: it has a cache, and can
/// not write one block through it (`Documentation/ABI/stable/sysfs-block`: `queue/write_cache`, `queue/fua`).
pub fn wants_flushes(sysfs: &Path) -> Result<bool> {
    let read = |name: &str| {
        let path = sysfs.join("queue").join(name);
        std::fs::read_to_string(&path).context("read", &path)
    };
    Ok(read("write_cache")?.trim() == "write back" && read("fua")?.trim() == "0")
}

/// Whether the device is mounted or held exclusively (open(2), O_EXCL on a block device).
pub fn is_claimed(device: &Path) -> Result<bool> {
    match OpenOptions::new().read(true).custom_flags(libc::O_EXCL).open(device) {
        Ok(_) => Ok(false),
        Err(error) if error.raw_os_error() == Some(libc::EBUSY) => Ok(true),
        Err(error) => Err(error).context("open", device),
    }
}

/// How many writes a device has taken, and how many are under way. Reads do not show.
///
/// Two equal samples with nothing in flight prove that nothing was written between them
/// (`Documentation/block/stat.rst`: fields 5 write I/Os, 9 in flight, 12 discard I/Os; `sysfs-block`:
/// `inflight` holds reads and writes). Field 9 counts a request until it is accounted, `inflight` only
/// until it is acknowledged, so what the first has beyond the reads of the second counts as writes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WriteCounters {
    /// Writes completed since the device was attached.
    pub writes: u64,
    /// Discards completed since then.
    pub discards: u64,
    /// Writes and discards not completed yet.
    pub in_flight: u64,
}

impl WriteCounters {
    /// Samples the counters of the device whose sysfs directory is `sysfs`. An error where the kernel
    /// does not count: equal samples would prove nothing.
    pub fn sample(sysfs: &Path) -> Result<Self> {
        let read = |name: &str| {
            let path = sysfs.join(name);
            std::fs::read_to_string(&path).context("read", &path)
        };
        let path = sysfs.join("stat");
        if read("queue/iostats")?.trim() != "1" {
            let off = io::Error::new(io::ErrorKind::Unsupported, "queue/iostats is off");
            return Err(off).context("count the writes in", &path);
        }
        let numbers = |text: String| -> Option<Vec<u64>> {
            text.split_ascii_whitespace().map(|word| word.parse().ok()).collect()
        };
        // In flight first: a write that ends between the two reads shows among the completed.
        match (numbers(read("inflight")?).as_deref(), numbers(read("stat")?).as_deref()) {
            (Some([reads, in_flight]), Some([_, _, _, _, writes, _, _, _, all, _, _, discards, ..])) => {
                let in_flight = (*in_flight).max(all.saturating_sub(*reads));
                Ok(WriteCounters { writes: *writes, discards: *discards, in_flight })
            }
            _ => Err(io::Error::from(io::ErrorKind::InvalidData)).context("count the writes in", &path),
        }
    }
}

/// The number of the block device that `path` is a node of, `major:minor`; `None` where it is
/// something else, or does not answer.
pub fn number(path: &Path) -> Option<String> {
    use std::os::unix::fs::{FileTypeExt, MetadataExt};
    let meta = std::fs::metadata(path).ok()?;
    let rdev = meta.rdev();
    let text = || format!("{}:{}", nix::sys::stat::major(rdev), nix::sys::stat::minor(rdev));
    meta.file_type().is_block_device().then(text)
}
