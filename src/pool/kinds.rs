//! The table of all kinds of pools. A new one is a file next to this one and a row here.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;

use super::kind::{ImageFormat, Kind};
use super::{Error, Result, btrfs, dir, xfs};
use files::Context;

/// Every kind, in the order in which `--pool auto` tries them.
pub static KINDS: &[&Kind] = &[
    &btrfs::KIND,
    &xfs::KIND,
    &dir::KIND,
    #[cfg(test)]
    &super::example::KIND,
];

/// The kind of this name.
pub fn named(name: &str) -> Option<&'static Kind> {
    KINDS.iter().copied().find(|kind| kind.name == name)
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
