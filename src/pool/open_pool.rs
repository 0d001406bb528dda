//! A pool that is in use: opening it, its health, leaving it.

use std::fs::{self, File};

use super::choose::{Chosen, PoolRequest, choose, in_place, make_image};
use super::format::Format;
use super::image::Image;
use super::{Error, Pool, Result};
use crate::sys::loopdev::has_direct_io;
use crate::sys::{blockdev, mount};
use base::{DataDir, PoolDir, PoolKind};
use files::Context;
use files::durable;

/// What a data directory was made with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Known {
    /// The kind of its pool.
    pub kind: PoolKind,
    /// Whether it is in an image, or in the data directory's own filesystem.
    pub in_image: bool,
}

/// A pool that is ready for use, and what it takes to leave it.
#[derive(Debug)]
pub struct OpenPool {
    pool: Pool,
    pub(super) dir: PoolDir,
    pub(super) image: Option<Image>,
}

impl OpenPool {
    /// Opens the pool of a data directory, making it where there is none. `known` is what the
    /// directory was made with: an image that is gone is not made again.
    ///
    /// `data_dir` must be canonical: its mount is found by path.
    pub fn open(data_dir: &DataDir, request: PoolRequest, known: Option<Known>) -> Result<Self> {
        let (dir, image) = (data_dir.pool(), data_dir.pool_image());
        // A mount point whose filesystem is dead is there, and does not answer.
        if matches!(fs::symlink_metadata(dir.path()), Err(error) if error.kind() == std::io::ErrorKind::NotFound)
        {
            durable::make_dir(dir.path())?;
            durable::sync_dir(data_dir.path())?;
        }
        let in_image = |dir: PoolDir| {
            let format = Format::of_image(&image)?;
            let image = Image::open(&image, dir.path(), format)?;
            let pool = format.pool(dir.path(), &image.device);
            let mut open_pool = OpenPool { pool: Pool::Dir, image: Some(image), dir };
            match pool {
                Ok(pool) => {
                    open_pool.pool = pool;
                    Ok(open_pool)
                }
                Err(error) => {
                    open_pool.close()?;
                    Err(error)
                }
            }
        };
        let untried = data_dir.untried();
        let tried = |open_pool: OpenPool| match durable::remove(&untried) {
            Ok(()) => Ok(open_pool),
            Err(error) => {
                open_pool.close()?;
                Err(error.into())
            }
        };
        let is_made = image.exists();
        match known {
            Some(Known { in_image: true, .. }) if !is_made => return Err(Error::ImageMissing(image)),
            Some(Known { in_image: true, .. }) => return in_image(dir),
            Some(Known { kind, in_image: false }) => {
                return Ok(OpenPool { pool: in_place(kind, &dir)?, dir, image: None });
            }
            None => {}
        }
        if is_made {
            // A start was cut short after making it. One of an unknown format is never replaced.
            let made = Format::of_image(&image)?.kind();
            if request.kind.is_some_and(|kind| kind != made) {
                return Err(Error::ImageUnwanted { image, choice: request.name() });
            }
            // It may be mounted: what the directory is on says nothing then.
            match in_image(dir.clone()) {
                Ok(open_pool) => return tried(open_pool),
                Err(error) if !untried.exists() => return Err(error),
                Err(_) => {}
            }
        }
        let (first, second) = match choose(data_dir, &dir, request)? {
            Chosen::InPlace(pool) => return Ok(OpenPool { pool, dir, image: None }),
            Chosen::Image(first, second) => (first, second),
        };
        if !is_made {
            make_image(data_dir, request.size, first)?;
        }
        match (in_image(dir.clone()), second) {
            // mkfs may know more than the kernel, which then refuses what it made.
            (Err(error), Some(second)) => {
                let (first, second_name) = (first.name(), second.name());
                tracing::warn!(%error, "no {first} image, trying {second_name}");
                durable::remove(&image)?;
                make_image(data_dir, request.size, second)?;
                tried(in_image(dir)?)
            }
            (open_pool, _) => tried(open_pool?),
        }
    }

    /// What to remember of this pool for the next start.
    pub fn known(&self) -> Known {
        Known { kind: self.pool.kind(), in_image: self.image.is_some() }
    }

    /// How this pool copies.
    pub fn pool(&self) -> Pool {
        self.pool
    }

    /// Where objects live.
    pub fn dir(&self) -> &PoolDir {
        &self.dir
    }

    /// Whether its filesystem no longer answers: the kernel shut it down.
    pub fn is_dead(&self) -> bool {
        fs::metadata(self.dir.path()).context("stat", self.dir.path()).is_err_and(|error| error.is_dead())
    }

    /// Fails unless the pool is the one that was opened and takes a write. A full one is well: deletions
    /// still work, and are the way out.
    pub fn check(&self) -> Result<()> {
        if let Some(image) = &self.image {
            let dev = image.device.dev()?;
            if mount::mounted_at(&image.mount_point)?.is_none_or(|mounted| !mounted.is_of(&dev)) {
                return Err(Error::NotMounted(image.mount_point.clone()));
            }
        }
        let written = tempfile::tempfile_in(self.dir.path())
            .and_then(|mut scratch| std::io::Write::write_all(&mut scratch, &[0]));
        match written.context("write a file in", self.dir.path()) {
            Err(error) if !error.is_no_space() => Err(error.into()),
            _ => Ok(()),
        }
    }

    /// What to know of a pool whose writes cannot pass every page cache by, if so.
    pub fn cached(&self) -> Result<Option<&'static str>> {
        // On btrfs the bytes of objects have an attribute for it that other files lack.
        if !matches!(self.pool, Pool::Btrfs { .. }) {
            let path = self.dir.path();
            let scratch = tempfile::tempfile_in(path).context("make a scratch file in", path)?;
            if !has_direct_io(&scratch, path)? {
                return Ok(Some("the pool's filesystem has no direct I/O: writes are slower"));
            }
        }
        let Some(image) = &self.image else { return Ok(None) };
        let file = File::open(&image.path).context("open", &image.path)?;
        Ok((!has_direct_io(&file, &image.path)?)
            .then_some("the filesystem under the pool's image has no direct I/O: writes are slower"))
    }

    /// What is missing of the image, where its file was cut short below the pool.
    pub fn image_cut_short(&self) -> Result<Option<String>> {
        let Some(image) = &self.image else { return Ok(None) };
        let length = fs::metadata(&image.path).context("stat", &image.path)?.len();
        let size = blockdev::size(&image.device.path())?;
        Ok((length < size).then(|| {
            format!("{} has {length} bytes of {size}: the end of the pool is missing", image.path.display())
        }))
    }

    /// How many errors the pool's filesystem has counted, where it does and there are any.
    pub fn errors(&self) -> Result<Option<u64>> {
        match mount::holding(self.dir.path())? {
            Some(mounted) => Ok(mounted.errors()?),
            None => Ok(None),
        }
    }

    /// Where the bytes lie, for people: `in place`, or the image's loop device.
    pub fn describe(&self) -> String {
        match &self.image {
            Some(image) => format!("{} image on {}", image.format.name(), image.device.path().display()),
            None => "in place".to_owned(),
        }
    }

    /// Unmounts and detaches an image. `Ok(false)` when volumes are still in use: then it stays,
    /// and the next start finds it.
    pub fn close(self) -> Result<bool> {
        let Some(image) = self.image else { return Ok(true) };
        match mount::unmount(&image.mount_point) {
            Ok(()) => Ok(image.device.detach()?),
            Err(error) if error.errno() == Some(libc::EBUSY) => Ok(false),
            Err(error) => Err(error.into()),
        }
    }
}
