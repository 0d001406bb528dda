//! The kinds of pools: how one is found on a filesystem, made in an image, and opened. A new kind is a file beside this one
//! and a row of [`KINDS`].

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;

use super::backend::Backend;
use super::{Error, Result, btrfs, dir, xfs};
use crate::sys::loopdev::LoopDevice;
use crate::sys::program;
use files::Context;

/// Every kind, in the order in which `--pool auto` tries them.
pub static KINDS: &[&Kind] = &[
    &btrfs::KIND,
    &xfs::KIND,
    &dir::KIND,
    #[cfg(test)]
    &super::example::KIND,
];

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
    /// Opens one in a directory: the filesystem of an image on this device, or the directory's own.
    pub(super) open: fn(&Path, Option<&LoopDevice>) -> Result<Box<dyn Backend>>,
}

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
    /// The kind of this name.
    pub fn named(name: &str) -> Option<&'static Kind> {
        KINDS.iter().copied().find(|kind| kind.name == name)
    }

    pub(super) fn image(&self) -> Option<&ImageFormat> {
        match &self.otherwise {
            Otherwise::Image(format) => Some(format),
            Otherwise::Refuse(_) => None,
        }
    }

    /// The kind that an image was made for, by the magic number of its superblock.
    pub(super) fn of_image(image: &Path) -> Result<(&'static Kind, &'static ImageFormat)> {
        let file = File::open(image).context("open", image)?;
        let is_on_it = |format: &ImageFormat| {
            let (offset, magic) = format.magic;
            let mut bytes = vec![0; magic.len()];
            file.read_exact_at(&mut bytes, offset).is_ok() && bytes == magic
        };
        let mut formats = KINDS.iter().filter_map(|kind| Some((*kind, kind.image()?)));
        formats.find(|(_, format)| is_on_it(format)).ok_or_else(|| Error::ImageUnknown(image.to_owned()))
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
