//! A filesystem that shares blocks between files, as xfs does: a copy costs the number of extents, and extents show what
//! changed.

use std::fs::File;
use std::path::Path;

use super::backend::{Backend, Bytes, Changes, Copying};
use super::kind::{ImageFormat, Kind, Otherwise};
use super::{Result, probe};
use crate::sys::extents::Extents;
use crate::sys::{clone, loopdev};

pub(super) static KIND: Kind = Kind {
    name: "xfs",
    help: "The data directory's filesystem if it clones files, else an xfs image in it",
    fits: probe::tells_sharing,
    otherwise: Otherwise::Image(ImageFormat {
        filesystem: "xfs",
        mkfs: "mkfs.xfs",
        package: "xfsprogs",
        magic: (0, b"XFSB"),
        // Freed space returns to the host. A copy of an image may be mounted while its original is.
        mount_options: "discard,nouuid",
        options: || {
            let sector = format!("size={}", loopdev::SECTOR);
            ["-q", "-m", "reflink=1", "-s", &sector].map(str::to_owned).to_vec()
        },
        grow: ("xfs_growfs", &[]),
    }),
    open: |_, _| Ok(Box::new(Xfs)),
};

#[derive(Debug)]
struct Xfs;

impl Backend for Xfs {
    fn fill(&self, source: &File, target: &File, target_path: &Path, _: Copying<'_>) -> Result<()> {
        Ok(clone::reflink(source, target, target_path)?)
    }

    fn changes<'f>(
        &self,
        _: Option<u64>,
        before: Option<&'f Bytes>,
        after: &'f File,
        after_path: &'f Path,
    ) -> Result<Changes<'f>> {
        by_extents(before, after, after_path)
    }

    fn compares_bytes(&self) -> bool {
        true
    }

    fn copies_atomically(&self) -> bool {
        true
    }
}

/// The extents of both files, for filesystems that share blocks.
pub(super) fn by_extents<'f>(
    before: Option<&'f Bytes>,
    after: &'f File,
    after_path: &'f Path,
) -> Result<Changes<'f>> {
    let Some(before) = before else { return Ok(Changes::Unknown) };
    Ok(Changes::Extents(
        Box::new(Extents::of(before.file(), before.path())?),
        Box::new(Extents::of(after, after_path)?),
    ))
}
