//! Devices and images: reading and writing past the page cache, and which parts hold data.

use std::fs::{File, Metadata, TryLockError};
use std::io::{Seek, SeekFrom};
use std::os::unix::fs::{FileExt, FileTypeExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use base::ByteRange;
use files::{ALIGN, Context, DataRanges, change};
use nix::fcntl::OFlag;
use nix::unistd::AccessFlags;
use serde::{Deserialize, Serialize};

use crate::error::{Error, Result, refused};

/// What a device or image is, so that an interrupted backup continues only with the same one and in the same state.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Identity {
    /// Bytes.
    size: u64,
    /// Device and inode of a file.
    file: (u64, u64),
    /// When a file was changed last (ctime): no program can set that back.
    changed: (i64, i64),
    /// What names a block device: serial numbers, or where it has none, this attachment of it.
    serial: String,
}

impl Identity {
    fn of(file: &File, path: &Path, size: u64) -> Result<Self> {
        let of = file.metadata().context("look at", path)?;
        if !of.file_type().is_block_device() {
            // Its size may be another by now.
            let (file, changed) = ((of.dev(), of.ino()), (of.ctime(), of.ctime_nsec()));
            return Ok(Identity { size: of.len(), file, changed, serial: String::new() });
        }
        Ok(Identity { size, file: (0, 0), changed: (0, 0), serial: serial(of.rdev()) })
    }
}

/// What the kernel calls a block device, which it keeps over restarts; else what no other one has until the next restart.
fn serial(number: u64) -> String {
    let (major, minor) = (nix::sys::stat::major(number), nix::sys::stat::minor(number));
    let dir = PathBuf::from(format!("/sys/dev/block/{major}:{minor}"));
    let read = |names: &[&str]| {
        let read = |name: &&str| std::fs::read_to_string(dir.join(name)).ok();
        let texts = names.iter().filter_map(read).map(|text| text.trim().to_owned());
        texts.filter(|text| !text.is_empty()).collect::<Vec<_>>().join(" ")
    };
    let partition = read(&["partition"]);
    let names = ["dm/uuid", "md/uuid", "wwid", "serial", "device/wwid", "device/serial"];
    let whole: Vec<String> = names.iter().map(|name| format!("../{name}")).collect();
    let serial = match partition.is_empty() {
        true => read(&names),
        false => read(&whole.iter().map(String::as_str).collect::<Vec<_>>()),
    };
    match serial.is_empty() {
        true => {
            format!("{major}:{minor} {}", read(&["diskseq", "../diskseq", "/proc/sys/kernel/random/boot_id"]))
        }
        false => format!("{serial} {partition}"),
    }
}

/// An error where it is neither a block device nor a file: to open a FIFO is to wait for its other end. Else the flag for
/// opening it, should it become one meanwhile. A drive without a medium must not open, so none for a device.
pub fn no_wait(path: &Path) -> Result<OFlag> {
    let kind = std::fs::metadata(path).context("open", path)?.file_type();
    match kind.is_file() {
        true => Ok(OFlag::O_NONBLOCK),
        false if kind.is_block_device() => Ok(OFlag::empty()),
        false => Err(refused!("{} is neither a block device nor a file", path.display())),
    }
}

/// An error where a file cannot be written, or made.
pub fn check_writable(path: &Path) -> Result<()> {
    let options = |path: &Path| File::options().write(true).custom_flags(OFlag::O_NONBLOCK.bits()).open(path);
    match options(path) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
            let dir = path.parent().filter(|dir| !dir.as_os_str().is_empty()).unwrap_or(Path::new("."));
            Ok(nix::unistd::access(dir, AccessFlags::W_OK | AccessFlags::X_OK).context("write to", dir)?)
        }
        opened => Ok(opened.map(drop).context("write to", path)?),
    }
}

/// Another holds the lock on a file.
pub fn in_use(path: &Path) -> Error {
    refused!("another cbt-backup works on {}: wait until it has ended", path.display())
}

/// A device or image that is read.
#[derive(Debug)]
pub struct Device {
    path: PathBuf,
    cached: File,
    /// Past the page cache, where the filesystem can.
    direct: Option<File>,
    size: u64,
    is_block: bool,
    identity: Identity,
}

impl Device {
    /// Opens it for reading.
    pub fn open(path: &Path) -> Result<Self> {
        let wait = no_wait(path)?;
        let open = |flags: OFlag| File::options().read(true).custom_flags((flags | wait).bits()).open(path);
        let mut cached = open(OFlag::empty()).context("open", path)?;
        let size = cached.seek(SeekFrom::End(0)).context("find the size of", path)?;
        let identity = Identity::of(&cached, path, size)?;
        let is_block = cached.metadata().context("look at", path)?.file_type().is_block_device();
        if is_block && size == 0 {
            return Err(refused!("{} has no medium: it has 0 bytes", path.display()));
        }
        let direct = open(OFlag::O_DIRECT).ok();
        Ok(Device { path: path.to_owned(), cached, direct, size, is_block, identity })
    }

    /// The same for one that no one may write to meanwhile: an error where another `cbt-backup` does.
    pub fn open_alone(path: &Path) -> Result<Self> {
        let device = Self::open(path)?;
        match device.cached.try_lock_shared() {
            Err(TryLockError::WouldBlock) => Err(in_use(path)),
            // Where the filesystem has no locks, none is in the way.
            _ => Ok(device),
        }
    }

    /// What it was when it was opened.
    pub fn identity(&self) -> &Identity {
        &self.identity
    }

    /// Whether a path means the same file.
    pub fn is_at(&self, path: &Path) -> bool {
        let same = |of: Metadata, at: Metadata| (of.dev(), of.ino()) == (at.dev(), at.ino());
        self.cached.metadata().is_ok_and(|of| path.metadata().is_ok_and(|at| same(of, at)))
    }

    /// An error where it is a file that was written to since it was opened.
    pub fn check_unchanged(&self) -> Result<()> {
        match Identity::of(&self.cached, &self.path, self.size)? == self.identity {
            true => Ok(()),
            false => Err(Error::Changed { path: self.path.clone() }),
        }
    }

    pub fn path(&self) -> &Path {
        &self.path
    }

    pub fn size(&self) -> u64 {
        self.size
    }

    /// The parts that hold data, where it is a file. A block device has no holes that show, so it is one part.
    pub fn data(&self) -> Box<dyn Iterator<Item = files::Result<ByteRange>> + '_> {
        let all = ByteRange { start: 0, end: self.size };
        match self.is_block {
            true => Box::new(std::iter::once(Ok(all))),
            false => Box::new(DataRanges::of(&self.cached, &self.path, all)),
        }
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
                    return Err(refused!("{} became shorter while it was read", self.path.display()));
                }
                Ok(count) => done += count,
                Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {}
                // EINVAL: the device wants another alignment for direct reads.
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
            // EINVAL: the device wants another alignment for direct writes.
            Some(Err(error)) if error.errno() != Some(nix::libc::EINVAL) => Err(error.into()),
            _ => Ok(change::write_at(self.cached, self.path, bytes, offset)?),
        }
    }

    /// Makes what was written durable.
    pub fn sync(&self) -> Result<()> {
        Ok(change::sync(self.cached, self.path)?)
    }
}

/// Whether all is zeros. Whole blocks.
pub fn is_zeros(bytes: &[u8]) -> bool {
    const ZEROS: [u8; ALIGN] = [0; ALIGN];
    bytes.chunks(ALIGN).all(|block| *block == ZEROS[..block.len()])
}

#[cfg(test)]
mod tests {
    use super::*;

    /// All that this machine has, partitions too.
    #[test]
    fn no_two_block_devices_have_one_name() {
        let mut names = std::collections::HashMap::new();
        for entry in std::fs::read_dir("/sys/class/block").expect("block devices") {
            let path = entry.expect("entry").path();
            // Others may come and go.
            let Ok(number) = std::fs::read_to_string(path.join("dev")) else { continue };
            let (major, minor) = number.trim().split_once(':').expect("MAJOR:MINOR");
            let number = |text: &str| text.parse().expect("a number");
            let name = serial(nix::sys::stat::makedev(number(major), number(minor)));
            assert!(name.len() > 2, "{}: {name:?}", path.display());
            let other = names.insert(name.clone(), path.clone());
            assert_eq!(other, None, "{name:?} is {} too", path.display());
        }
    }
}
