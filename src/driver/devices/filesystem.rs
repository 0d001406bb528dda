//! Detects, makes, mounts and grows filesystems on volumes.

use std::fs::File;
use std::iter;
use std::path::Path;

use crate::driver::devices::superblock::Superblock;
use crate::driver::error::{Error, Result};
use crate::driver::request::capability::MountFlags;
use crate::sys::freeze::{self, Root};
use crate::sys::loopdev::LoopDevice;
use crate::sys::mount::{self, Flags};
use crate::sys::{self, blockdev, program};
use base::ByteRange;
use files::Context;
use files::DataRanges;
use files::change;

/// Whether no block of the file holds data.
pub(in crate::driver) fn is_blank(data: &Path) -> Result<bool> {
    let file = File::open(data).context("open", data)?;
    let length = file.metadata().context("stat", data)?.len();
    // Dirty pages in the page cache count too.
    change::sync(&file, data)?;
    let first = DataRanges::of(&file, data, ByteRange { start: 0, end: length }).next();
    Ok(first.transpose()?.is_none())
}

/// The filesystem on a device, as `blkid` knows it.
pub(in crate::driver) fn detect(device: &Path) -> Result<Option<String>> {
    // 2: blkid knows nothing that is on the device.
    let arguments = ["--probe", "--match-tag", "TYPE", "--output", "value"];
    let output = program::run("blkid", &arguments, device, |code| matches!(code, 0 | 2))?;
    let found = String::from_utf8_lossy(&output.stdout).trim().to_owned();
    Ok((!found.is_empty()).then_some(found))
}

/// Makes a filesystem, whatever is on the device.
pub(in crate::driver) fn make(device: &Path, fs_type: &str) -> Result<()> {
    let made = match fs_type {
        "xfs" => program::run("mkfs.xfs", &["-q", "-f"], device, |code| code == 0),
        "btrfs" => program::run("mkfs.btrfs", &["-q", "-f"], device, |code| code == 0),
        // No blocks are reserved for root: the whole volume belongs to the user.
        _ => program::run("mkfs.ext4", &ext4_options(blockdev::size(device)?), device, |code| code == 0),
    };
    made?;
    Ok(blockdev::flush(device)?)
}

/// How an ext4 is made so that it can grow: see [`Superblock`]. mkfs reserves descriptors for 1,024 times the size. More cost little
/// where that is not much: 32,768 times, up to 2 TiB, take 1/64 of the smallest volumes. No reserve is enough for more than
/// 16 TiB, so large ones get `meta_bg`.
fn ext4_options(size: u64) -> Vec<String> {
    const BLOCK: u64 = 4096;
    let mut options = ["-q", "-F", "-m", "0", "-b", "4096"].map(String::from).to_vec();
    let reserve = size.saturating_mul(32768).min(2 << 40);
    if size > 8 << 40 {
        options.extend(["-O", "meta_bg,^resize_inode"].map(String::from));
    } else if reserve > size.saturating_mul(1024) {
        options.extend(["-E".into(), format!("resize={}", reserve / BLOCK)]);
    }
    options
}

pub(in crate::driver) fn mount(
    device: &LoopDevice,
    target: &Path,
    fs_type: &str,
    read_only: bool,
    user: &MountFlags,
) -> Result<()> {
    let (mut flags, mut options) = parse_flags(user);
    if read_only {
        flags |= Flags::MS_RDONLY;
    }
    if fs_type == "xfs" {
        // A clone has the UUID of its source, and may be mounted while the source is.
        options.push("nouuid");
    }
    mount::mount(&device.path(), target, fs_type, flags, &options.join(",")).map_err(|error| {
        match error.errno() {
            Some(libc::EEXIST) if fs_type == "btrfs" => Error::Precondition(
                "the kernel has a btrfs with this UUID already, such as a clone of it (Linux 6.7 and later mount both): unpublish \
                 and unstage the other one first"
                    .into(),
            ),
            Some(libc::EBUSY) => Error::Precondition(format!(
                "the kernel refuses to mount {} at {}: something holds the device exclusively, or it is \
                 mounted elsewhere for another access, perhaps below another mount: undo that first",
                device.path().display(),
                target.display()
            )),
            Some(libc::EUCLEAN) => Error::Precondition(format!(
                "the {fs_type} on {} is damaged: unstage the volume, publish it as a Block volume, and repair it \
                 there (e2fsck, xfs_repair, btrfs check)",
                device.path().display()
            )),
            Some(libc::EINVAL) => Error::Precondition(format!(
                "the kernel refuses to mount {fs_type} at {}: a mount flag that {fs_type} does not have, or damage",
                target.display()
            )),
            _ => error.into(),
        }
    })
}

/// Thaws the filesystem mounted at `path`, if a user froze it and did not thaw it. A frozen filesystem would stay after
/// its last unmount, and keep its device.
pub(in crate::driver) fn thaw(path: &Path) -> Result<()> {
    let Some(mounted) = mount::mounted_at(path)? else { return Ok(()) };
    // A filesystem that was shut down does not open, and a device node that is mounted there cannot be frozen.
    if let Ok(Some(root)) = Root::open(&mounted)
        && freeze::thaw(&root).unwrap_or(false)
    {
        warn_thawed(path);
    }
    Ok(())
}

/// Thaws the filesystem on a device that is no longer mounted. Makes no file: the pool may be full.
pub(in crate::driver) fn thaw_unmounted(device: &LoopDevice) -> Result<()> {
    let device = device.path();
    let Some(fs_type) = detect(&device)? else { return Ok(()) };
    // Where that fails, another program has the device open exclusively, so it is in use.
    if let Ok(root) = Root::unseen(&device, &fs_type)
        && freeze::thaw(&root)?
    {
        warn_thawed(&device);
    }
    Ok(())
}

fn warn_thawed(path: &Path) {
    tracing::warn!(path = %path.display(), "a filesystem that its user left frozen is thawed");
}

/// Splits a client's options into the kernel's flags and the filesystem's own.
fn parse_flags(user: &MountFlags) -> (Flags, Vec<&str>) {
    let mut flags = Flags::empty();
    let mut options = Vec::new();
    for option in user.0.iter().flat_map(|option| option.split(',')) {
        match option {
            "" | "rw" | "defaults" => {}
            "ro" => flags |= Flags::MS_RDONLY,
            "noatime" => flags |= Flags::MS_NOATIME,
            "nodiratime" => flags |= Flags::MS_NODIRATIME,
            "relatime" => flags |= Flags::MS_RELATIME,
            "strictatime" => flags |= Flags::MS_STRICTATIME,
            "lazytime" => flags |= Flags::MS_LAZYTIME,
            "nodev" => flags |= Flags::MS_NODEV,
            "noexec" => flags |= Flags::MS_NOEXEC,
            "nosuid" => flags |= Flags::MS_NOSUID,
            "sync" => flags |= Flags::MS_SYNCHRONOUS,
            "dirsync" => flags |= Flags::MS_DIRSYNC,
            own => options.push(own),
        }
    }
    (flags, options)
}

/// Grows an unmounted ext4 that is smaller than its device, as far as it can grow. To grow a mounted one takes a capability
/// (CAP_SYS_RESOURCE) that a container may lack. A filesystem with errors stays as it is: its files can be read. Blocks that change
/// are written to `kept` before, if it is given.
pub(in crate::driver) fn grow_unmounted(
    device: &Path,
    (found, target): (Superblock, u64),
    kept: Option<&Path>,
) -> Result<()> {
    // 1: the journal was replayed, or a small error was corrected. 4 and more: errors that only a person may correct.
    let check = program::run("e2fsck", &["-f", "-p"], device, |code| code < 32)?;
    if !matches!(check.status.code(), Some(0 | 1)) {
        let said = String::from_utf8_lossy(&check.stdout);
        let said = said.trim().lines().next().unwrap_or_default();
        tracing::warn!(device = %device.display(), said, "the ext4 has errors, so it is mounted at its old size");
        return Ok(());
    }
    let size = (target / found.block).to_string();
    let kept = kept.into_iter().flat_map(|kept| ["-z".as_ref(), kept.as_os_str()]);
    let arguments: Vec<_> = iter::once(size.as_ref()).chain(kept).collect();
    program::run_with("resize2fs", device, &arguments, |code| code == 0)?;
    Ok(blockdev::flush(device)?)
}

/// Grows a mounted filesystem, as [`growth`] says. Whatever grows a frozen one waits, and cannot be ended, until it is thawed.
pub(in crate::driver) fn grow_mounted(
    device: &Path,
    mount_point: &Path,
    (found, target): (Superblock, u64),
) -> Result<()> {
    let size = (target / found.block).to_string();
    match found.fs_type {
        "btrfs" => {
            let size = format!("{}:max", found.member);
            drop(program::run("btrfs", &["filesystem", "resize", &size], mount_point, |code| code == 0)?);
        }
        "xfs" => drop(program::run("xfs_growfs", &["-D", &size], mount_point, |code| code == 0)?),
        _ if found.has_errors => {
            return Err(Error::Precondition(
                "the ext4 has errors, so it does not grow: unpublish and unstage the volume, publish it as a Block \
                 volume, run e2fsck on the device, and stage it as a filesystem again"
                    .into(),
            ));
        }
        _ if !sys::has_capability(sys::CAP_SYS_RESOURCE)? => {
            return Err(Error::Precondition(
                "a mounted ext4 grows only for a driver with the capability CAP_SYS_RESOURCE: run it \
                 privileged, or unpublish and unstage the volume, and it grows when it is staged again"
                    .into(),
            ));
        }
        _ => drop(program::run_with("resize2fs", device, &[&size], |code| code == 0)?),
    }
    Ok(())
}

/// The filesystem on a device and the size in bytes that it is to grow to; `None` if it stays as it is.
pub(in crate::driver) fn growth(device: &Path, fs_type: &str) -> Result<Option<(Superblock, u64)>> {
    let found = Superblock::read(device)?.filter(|found| found.fs_type == fs_type);
    let Some(found) = found else { return Ok(None) };
    Ok(found.growth(blockdev::size(device)?).map(|target| (found, target)))
}
