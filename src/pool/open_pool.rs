//! A pool that is in use: opening it and leaving it.

use std::fs;

use super::backend::Backend;
use super::choose::{Chosen, PoolRequest, choose, make_image};
use super::image::Image;
use super::kind::Kind;
use super::kinds;
use super::{Error, Result};
use base::{DataDir, PoolDir};
use files::durable;

/// What a data directory was made with.
#[derive(Clone, Copy, Debug)]
pub struct Known {
    /// The kind of its pool.
    pub kind: &'static Kind,
    /// Whether it is in an image, or in the data directory's own filesystem.
    pub in_image: bool,
}

/// A pool that is ready for use, and what it takes to leave it.
#[derive(Debug)]
pub struct OpenPool {
    kind: &'static Kind,
    pub(super) backend: Box<dyn Backend>,
    pub(super) dir: PoolDir,
    pub(super) image: Option<Image>,
}

impl OpenPool {
    /// Opens the pool of a data directory, making it where there is none. `known` is what the
    /// directory was made with: a missing image is not made again.
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
        let in_place = |kind: &'static Kind, dir: PoolDir| {
            Ok(OpenPool { kind, backend: (kind.open)(dir.path(), None)?, dir, image: None })
        };
        let in_image = |dir: PoolDir| {
            let (kind, format) = kinds::of_image(&image)?;
            let image = Image::open(data_dir, dir.path(), format)?;
            match (kind.open)(dir.path(), Some(&image.device)) {
                Ok(backend) => Ok(OpenPool { kind, backend, image: Some(image), dir }),
                Err(error) => {
                    image.close()?;
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
                return in_place(kind, dir);
            }
            None => {}
        }
        if is_made {
            // A start was cut short after making it. One of an unknown format is never replaced.
            let (made, _) = kinds::of_image(&image)?;
            if request.kind.is_some_and(|kind| kind.name != made.name) {
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
            Chosen::InPlace(kind) => return in_place(kind, dir),
            Chosen::Image(first, second) => (first, second),
        };
        if !is_made {
            make_image(data_dir, request.size, first)?;
        }
        match (in_image(dir.clone()), second) {
            // mkfs may know more than the kernel, which then refuses what it made.
            (Err(error), Some(second)) => {
                let (first, second_name) = (first.filesystem, second.filesystem);
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
        Known { kind: self.kind, in_image: self.image.is_some() }
    }

    /// What its bytes are stored with.
    pub fn backend(&self) -> &dyn Backend {
        &*self.backend
    }

    /// Where objects live.
    pub fn dir(&self) -> &PoolDir {
        &self.dir
    }

    /// Where the bytes are, for messages: `in place`, or the image's loop device.
    pub fn describe(&self) -> String {
        match &self.image {
            Some(image) => format!("{} image on {}", image.format.filesystem, image.device.path().display()),
            None => "in place".to_owned(),
        }
    }

    /// Unmounts and detaches an image. `Ok(false)` when volumes are still in use: then it stays,
    /// and the next start finds it.
    pub fn close(self) -> Result<bool> {
        self.image.map_or(Ok(true), Image::close)
    }
}
