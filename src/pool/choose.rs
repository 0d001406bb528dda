//! Where a new data directory keeps its bytes: in its own filesystem, or in an image, which is made here.

use std::fs::{self, File};
use std::path::Path;

use super::kind::{ImageFormat, Kind, Otherwise};
use super::kinds::KINDS;
use super::{Error, Result};
use crate::sys::{loopdev, program, space};
use base::{DataDir, DraftFile, PoolDir, Quantity};
use files::durable;
use files::{Context, change};

/// What the flags say about the pool.
#[derive(Clone, Copy, Debug)]
pub struct PoolRequest {
    /// `--pool`; `None` for `auto`: the data directory's own filesystem where it fits a kind that has images, else an image,
    /// else plain files.
    pub kind: Option<&'static Kind>,
    /// `--pool-size`, for a pool made in an image.
    pub size: Option<Quantity>,
}

impl PoolRequest {
    /// The value of `--pool`.
    pub fn name(self) -> &'static str {
        self.kind.map_or("auto", |kind| kind.name)
    }
}

/// The part of the host's free space that an image takes by default: a sparse image that could
/// outgrow its host would break every volume at once.
const DEFAULT_SHARE: (u64, u64) = (9, 10);
/// mkfs.xfs makes nothing smaller than 300 MiB, mkfs.btrfs nothing smaller than 109 MiB.
const MIN_IMAGE: u64 = 300 << 20;

/// Where a new data directory keeps its bytes.
pub(super) enum Chosen {
    InPlace(&'static Kind),
    /// And what to try where the kernel refuses the first.
    Image(&'static ImageFormat, Option<&'static ImageFormat>),
}

/// Decides where a new data directory keeps its bytes.
pub(super) fn choose(data_dir: &DataDir, dir: &PoolDir, request: PoolRequest) -> Result<Chosen> {
    let asked = || {
        let is_asked = move |kind: &&Kind| request.kind.is_none_or(|asked| asked.name == kind.name);
        KINDS.iter().copied().filter(is_asked)
    };
    for kind in asked().filter(|kind| kind.image().is_some()) {
        if (kind.fits)(dir.path())? {
            return Ok(Chosen::InPlace(kind));
        }
    }
    let mut possible = Vec::new();
    for format in asked().filter_map(Kind::image) {
        match check_image_possible(format, request, data_dir) {
            Ok(()) => possible.push(format),
            Err(error) if request.kind.is_none() => {
                tracing::warn!(reason = %error, "no {} image", format.filesystem);
            }
            Err(error) => return Err(error),
        }
    }
    let mut possible = possible.into_iter();
    if let Some(first) = possible.next() {
        return Ok(Chosen::Image(first, possible.next()));
    }
    if request.kind.is_none() {
        tracing::warn!("snapshots will be full copies");
    }
    let mut reason = "no kind of pool fits it";
    for kind in asked() {
        let Otherwise::Refuse(why) = kind.otherwise else { continue };
        if (kind.fits)(dir.path())? {
            return Ok(Chosen::InPlace(kind));
        }
        reason = why;
    }
    Err(Error::Unavailable { choice: request.name(), dir: data_dir.path().to_owned(), reason: reason.into() })
}

fn check_image_possible(format: &ImageFormat, request: PoolRequest, data_dir: &DataDir) -> Result<()> {
    let unavailable = |reason: String| {
        Err(Error::Unavailable { choice: request.name(), dir: data_dir.path().to_owned(), reason })
    };
    let ImageFormat { filesystem, mkfs, package, .. } = format;
    if !program::exists(mkfs) {
        return unavailable(format!(
            "its filesystem cannot be used as it is and {mkfs} is missing: install {package}, or use --pool dir"
        ));
    }
    let supported =
        fs::read_to_string("/proc/filesystems").context("read", Path::new("/proc/filesystems"))?;
    if !supported.lines().any(|line| line.trim() == *filesystem) {
        return unavailable(format!("this kernel has no {filesystem}: load the module, or use --pool dir"));
    }
    if let Err(error) = loopdev::require() {
        return unavailable(format!("{error}: load the loop module, or use --pool dir"));
    }
    Ok(())
}

/// Makes `pool.img`.
///
/// 1. Make and format it under another name and sync it: a crash leaves a file that the next start replaces.
/// 2. Mark it as untried: a crash leaves a mark of nothing.
/// 3. Rename it into place: it is there whole or not at all.
pub(super) fn make_image(data_dir: &DataDir, size: Option<Quantity>, format: &ImageFormat) -> Result<()> {
    let free = space(data_dir.path())?.available;
    let size = match size {
        Some(Quantity(bytes)) => bytes,
        None => free / DEFAULT_SHARE.1 * DEFAULT_SHARE.0,
    };
    // A whole MiB: every sector size divides it.
    let size = size & !((1 << 20) - 1);
    if size < MIN_IMAGE {
        let dir = data_dir.path().to_owned();
        let reason = "a filesystem needs 300Mi; free space on the host, or use --pool-size or --pool dir";
        return Err(Error::Size { dir, size: Quantity(size), reason });
    }
    if size > free {
        tracing::warn!(size, free, "the pool image may outgrow its host's free space");
    }
    let image = data_dir.pool_image();
    let fresh = DraftFile::New.of(&image);
    durable::remove(&fresh)?;
    let file = change::create_new(&fresh)?;
    change::set_len(&file, &fresh, size)?;
    format.make(&fresh)?;
    change::sync(&File::open(&fresh).context("open", &fresh)?, &fresh)?;
    durable::replace(&data_dir.untried(), &[])?;
    durable::rename(&fresh, &image)?;
    Ok(())
}
