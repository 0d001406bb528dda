//! What a kind of pool says of itself: how it is found on a filesystem, made in an image, and opened.

use std::path::Path;

use super::Result;
use super::backend::Backend;
use crate::sys::loopdev::LoopDevice;
use crate::sys::program;

/// A kind of pool.
#[derive(Debug)]
pub struct Kind {
    /// The word for it in flags, logs, metrics and `deltapath.json`.
    pub name: &'static str,
    /// What `--help` says about it.
    pub help: &'static str,
    /// Whether the filesystem of a directory can be used as it is.
    pub(super) fits: fn(&Path) -> Result<bool>,
    /// What happens if it cannot.
    pub(super) otherwise: Otherwise,
    pub(super) open: Open,
}

/// Opens the pool in a directory; the device is that of its image.
type Open = fn(&Path, Option<&LoopDevice>) -> Result<Box<dyn Backend>>;

/// What happens where the filesystem of a data directory does not fit a kind.
#[derive(Debug)]
pub(super) enum Otherwise {
    /// An image is made.
    Image(ImageFormat),
    /// The kind is refused, for this reason.
    Refuse(&'static str),
}

/// The filesystem in a pool's image.
#[derive(Debug)]
pub(super) struct ImageFormat {
    /// As mount(8) and `/proc/filesystems` call it.
    pub filesystem: &'static str,
    pub mkfs: &'static str,
    /// What to install where `mkfs` is missing.
    pub package: &'static str,
    /// The offset and the bytes of the superblock's magic number.
    pub magic: (u64, &'static [u8]),
    pub mount_options: &'static str,
    /// The arguments of `mkfs` before the file: sectors are as large as those of the loop device.
    pub options: fn() -> Vec<String>,
    /// The program, and its arguments before the mount point, that makes a mounted filesystem fill its device.
    pub grow: (&'static str, &'static [&'static str]),
}

impl Kind {
    pub(super) fn image(&self) -> Option<&ImageFormat> {
        match &self.otherwise {
            Otherwise::Image(format) => Some(format),
            Otherwise::Refuse(_) => None,
        }
    }
}

impl ImageFormat {
    pub(super) fn make(&self, image: &Path) -> Result<()> {
        let options = (self.options)();
        let options: Vec<&str> = options.iter().map(String::as_str).collect();
        program::run(self.mkfs, &options, image, |code| code == 0)?;
        Ok(())
    }
}
