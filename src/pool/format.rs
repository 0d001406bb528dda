//! The filesystems that a pool image is made with, and their options.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;

use super::{Error, Pool, Result};
use crate::sys::loopdev::LoopDevice;
use crate::sys::{blockdev, btrfs, loopdev, program};
use base::PoolKind;
use files::Context;

/// The filesystem of a pool made in an image.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Format {
    Btrfs,
    Xfs,
}

impl Format {
    /// What `--pool auto` tries, in this order.
    pub(super) const AUTO: [Format; 2] = [Format::Btrfs, Format::Xfs];

    pub(super) fn kind(self) -> PoolKind {
        match self {
            Format::Btrfs => PoolKind::Btrfs,
            Format::Xfs => PoolKind::Xfs,
        }
    }

    pub(super) fn name(self) -> &'static str {
        self.kind().name()
    }

    pub(super) fn mkfs(self) -> (&'static str, &'static str) {
        match self {
            Format::Btrfs => ("mkfs.btrfs", "btrfs-progs"),
            Format::Xfs => ("mkfs.xfs", "xfsprogs"),
        }
    }

    /// How the copies of a pool on it are made.
    pub(super) fn pool(self, mount_point: &Path, device: &LoopDevice) -> Result<Pool> {
        Ok(match self {
            Format::Btrfs => Pool::Btrfs {
                holes: btrfs::records_holes(mount_point)?,
                flushes: blockdev::wants_flushes(&device.sysfs())?,
            },
            Format::Xfs => Pool::Xfs,
        })
    }

    /// Freed space goes back to the host. `nouuid`: a copy of an image may be mounted beside its
    /// original, which btrfs allows by itself.
    pub(super) fn mount_options(self) -> &'static str {
        match self {
            Format::Btrfs => "discard=async",
            Format::Xfs => "discard,nouuid",
        }
    }

    pub(super) fn make(self, image: &Path) -> Result<()> {
        // Sectors as large as those of the loop device it will be mounted through.
        let sector = loopdev::SECTOR.to_string();
        let size = format!("size={sector}");
        let arguments: &[&str] = match self {
            // `^no-holes`: a punched hole must leave an item, for a search to find it. One copy of
            // the metadata: two of them in one file protect against nothing.
            Format::Btrfs => &["-q", "-K", "-O", "^no-holes", "-m", "single", "-d", "single", "-s", &sector],
            Format::Xfs => &["-q", "-m", "reflink=1", "-s", &size],
        };
        program::run(self.mkfs().0, arguments, image, |code| code == 0)?;
        Ok(())
    }

    /// What an image was formatted with, by the magic number of its superblock.
    pub(super) fn of_image(image: &Path) -> Result<Self> {
        let file = File::open(image).context("open", image)?;
        let magic = |offset, expected: &[u8]| {
            let mut bytes = vec![0; expected.len()];
            file.read_exact_at(&mut bytes, offset).is_ok() && bytes == expected
        };
        match (magic(0x1_0040, b"_BHRfS_M"), magic(0, b"XFSB")) {
            (true, _) => Ok(Format::Btrfs),
            (_, true) => Ok(Format::Xfs),
            _ => Err(Error::ImageUnknown(image.to_owned())),
        }
    }
}
