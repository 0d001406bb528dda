//! What sysfs says of a loop device and takes for it. Nothing here opens the device: its filesystem may be dead, or not
//! answer at all.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use super::{Access, sysfs};
use files::Context;
use files::Result;
use files::change;

/// The path of the file that a device serves, as the kernel reports it; `None` when it serves nothing.
pub(super) fn backing_path(number: u32) -> Option<PathBuf> {
    let path = fs::read_to_string(sysfs(number).join("loop/backing_file")).ok()?;
    Some(path.trim_end_matches('\n').into())
}

/// The devices that serve a file, and its path.
pub(super) fn in_use() -> Result<Vec<(u32, PathBuf)>> {
    let block = Path::new("/sys/block");
    let mut used = Vec::new();
    for entry in fs::read_dir(block).context("list", block)? {
        let name = entry.context("list", block)?.file_name();
        let number = name.to_str().and_then(|name| name.strip_prefix("loop")?.parse().ok());
        used.extend(number.and_then(|number| Some((number, backing_path(number)?))));
    }
    Ok(used)
}

/// The numbers of the partitions that a device has in the kernel, whatever it serves.
pub(super) fn partitions(sysfs: &Path) -> Result<Vec<i32>> {
    let mut numbers = Vec::new();
    for entry in fs::read_dir(sysfs).context("list", sysfs)? {
        let path = entry.context("list", sysfs)?.path().join("partition");
        // Other directories have no such file, and a partition may be removed meanwhile.
        let number: Option<i32> = fs::read_to_string(path).ok().and_then(|number| number.trim().parse().ok());
        numbers.extend(number);
    }
    Ok(numbers)
}

/// The device number as mountinfo writes it, `major:minor`.
pub(super) fn dev(sysfs: &Path) -> Result<String> {
    read(&sysfs.join("dev"))
}

/// Whether the device may only be read.
pub(super) fn access(sysfs: &Path) -> Result<Access> {
    Ok(if read(&sysfs.join("ro"))? == "1" { Access::ReadOnly } else { Access::ReadWrite })
}

/// Whether requests pass the page cache of the file by.
pub(super) fn is_direct_io(sysfs: &Path) -> Result<bool> {
    Ok(read(&sysfs.join("loop/dio"))? == "1")
}

/// Has the kernel count the device's requests: that may be switched off, and
/// [`crate::sys::blockdev::WriteCounters`] refuses to prove anything then.
pub(super) fn count_requests(sysfs: &Path) {
    let path = sysfs.join("queue/iostats");
    if read(&path).is_ok_and(|value| value == "1") {
        return;
    }
    if let Err(error) = write(&path, "1") {
        tracing::warn!(path = %path.display(), %error, "the requests of this device cannot be counted");
    }
}

/// Makes sure that a flush of the device reaches its file. An earlier user of this number may have set the device
/// to write-through, which stays with the number: no flush would be sent, and a power cut would lose what was synced.
pub(super) fn pass_flushes_on(sysfs: &Path) -> Result<()> {
    let path = sysfs.join("queue/write_cache");
    let passes = || Ok(read(&path)? == "write back");
    if passes()? {
        return Ok(());
    }
    write(&path, "write back")?;
    match passes()? {
        true => Ok(()),
        false => Err(io::Error::from(io::ErrorKind::Unsupported)).context("turn flushes on in", &path),
    }
}

/// Cuts requests into pages, or lets them be as large as they come.
///
/// A loop device reports a short write, as on a filesystem that becomes full, as
/// complete: the rest is lost, also after a sync. A write of one page is complete or fails.
pub(super) fn cut_into_pages(sysfs: &Path, cut: bool) -> Result<()> {
    let path = sysfs.join("queue/max_sectors_kb");
    if !cut {
        // 0 stands for the kernel's own choice, from Linux 6.2 on.
        return write(&path, "0").or_else(|_| write(&path, &read(&sysfs.join("queue/max_hw_sectors_kb"))?));
    }
    match read(&path)? == PAGE_KIB {
        true => Ok(()),
        false => write(&path, PAGE_KIB),
    }
}

/// Whether requests are cut into pages.
pub(super) fn is_cut_into_pages(sysfs: &Path) -> Result<bool> {
    Ok(read(&sysfs.join("queue/max_sectors_kb"))? == PAGE_KIB)
}

/// The size of a sector of ours, and the least that the kernel takes.
const PAGE_KIB: &str = "4";

fn read(path: &Path) -> Result<String> {
    Ok(fs::read_to_string(path).context("read", path)?.trim().to_owned())
}

fn write(path: &Path, value: &str) -> Result<()> {
    change::write_whole(path, value.as_ref())
}
