//! What is wrong with a pool that is in use, and with the image below it.

use std::fs::{self, File};
use std::path::Path;

use super::space::LEAST_HOST;
use super::{Error, OpenPool, Result};
use crate::sys::loopdev::{LoopDevice, has_direct_io};
use crate::sys::{self, blockdev, mount};
use files::Context;

impl OpenPool {
    /// Whether its filesystem no longer answers: the kernel shut it down.
    pub fn is_dead(&self) -> bool {
        fs::metadata(self.dir.path()).context("stat", self.dir.path()).is_err_and(|error| error.is_dead())
    }

    /// Whether its objects cannot be listed, though the kernel may answer for its root from the cache.
    pub fn is_unreadable(&self) -> bool {
        let first = |dir: &Path| fs::read_dir(dir).and_then(|mut entries| entries.next().transpose());
        let dirs = [self.dir.volumes(), self.dir.snapshots()];
        self.is_dead()
            || dirs.iter().any(|dir| first(dir).context("list", dir).is_err_and(|error| error.is_dead()))
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

    /// Whether an image has turned read-only and a start would mount it again: no volume on it is in use, and the disk below has
    /// room for what a mount writes.
    pub fn can_be_remounted(&self) -> Result<bool> {
        let Some(image) = &self.image else { return Ok(false) };
        if !sys::is_read_only(&image.mount_point)? {
            return Ok(false);
        }
        let is_unused = LoopDevice::all_on(|path| path.starts_with(&image.mount_point))?.is_empty();
        Ok(is_unused && (image.reserve.is_held() || image.host()?.available >= LEAST_HOST))
    }

    /// What to know of a pool whose writes cannot pass every page cache by, if so.
    pub fn cached(&self) -> Result<Option<&'static str>> {
        if !self.backend.has_direct_io(self.dir.path())? {
            return Ok(Some("the pool's filesystem has no direct I/O: writes are slower"));
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
}
