//! Choosing a pool, and making, mounting and leaving one that lives in an image file.

use std::fs::{self, File};
use std::path::{Path, PathBuf};

use super::{Error, Pool, Result, probe};
use crate::base::{DataDir, PoolDir, Quantity};
use crate::sys::durable::{self, FileLock};
use crate::sys::loopdev::{self, Access, LoopDevice};
use crate::sys::mount::{self, Flags};
use crate::sys::{Context, program, space};

/// What `--pool` asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum PoolChoice {
    /// The data directory's own filesystem where it clones files, else an xfs image, else `dir`.
    Auto,
    /// A filesystem that clones files: the data directory's own, or an xfs image in it.
    Xfs,
    /// Plain files; snapshots are sparse copies.
    Dir,
}

impl PoolChoice {
    /// The value as the flag takes it.
    pub fn name(self) -> &'static str {
        match self {
            PoolChoice::Auto => "auto",
            PoolChoice::Xfs => "xfs",
            PoolChoice::Dir => "dir",
        }
    }
}

/// What the flags say about the pool.
#[derive(Clone, Copy, Debug)]
pub struct PoolRequest {
    /// `--pool`.
    pub choice: PoolChoice,
    /// `--pool-size`, for a pool made in an image.
    pub size: Option<Quantity>,
}

/// The part of the host's free space that an image takes by default: a sparse image that could
/// outgrow its host would break every volume at once.
const DEFAULT_SHARE: (u64, u64) = (9, 10);
/// Less than this share of a filesystem, or than so many bytes, is a shortage.
const LOW_SHARE: u64 = 50;
const LOW_BYTES: u64 = 1 << 30;
/// mkfs.xfs makes nothing smaller than 300 MiB.
const MIN_IMAGE: u64 = 300 << 20;

/// What a data directory was made with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Known {
    /// How its pool copies.
    pub pool: Pool,
    /// Whether it lives in an image, or in the data directory's own filesystem.
    pub in_image: bool,
}

/// A pool that is ready for use, and what it takes to leave it.
#[derive(Debug)]
pub struct Home {
    pool: Pool,
    dir: PoolDir,
    image: Option<Image>,
}

/// An image that is attached and mounted.
#[derive(Debug)]
struct Image {
    device: LoopDevice,
    mount_point: PathBuf,
    /// Nobody else may attach the image while this lives.
    _lock: FileLock,
}

impl Home {
    /// Opens the pool of a data directory, making it where there is none. `known` is what the
    /// directory was made with: an image that is gone is not made anew over it.
    ///
    /// `data_dir` must be canonical: its mount is found by path.
    pub fn open(data_dir: &DataDir, request: PoolRequest, known: Option<Known>) -> Result<Self> {
        let (dir, image) = (data_dir.pool(), data_dir.pool_image());
        if !dir.path().exists() {
            durable::make_dir(dir.path())?;
            durable::sync_dir(data_dir.path())?;
        }
        let in_image = |dir: PoolDir| {
            let image = Image::open(&image, dir.path())?;
            Ok(Home { pool: Pool::Reflink, image: Some(image), dir })
        };
        match (known, image.exists()) {
            (Some(Known { in_image: true, .. }), false) => Err(Error::ImageMissing(image)),
            (Some(Known { in_image: true, .. }), true) => in_image(dir),
            (Some(Known { pool, in_image: false }), _) => Ok(Home { pool, dir, image: None }),
            // A start that was cut short after making it.
            (None, true) if request.choice == PoolChoice::Dir => Err(Error::ImageUnwanted(image)),
            (None, true) => in_image(dir),
            (None, false) => match choose(data_dir, &dir, request)? {
                Known { in_image: true, .. } => {
                    make_image(data_dir, request.size)?;
                    in_image(dir)
                }
                Known { pool, .. } => Ok(Home { pool, dir, image: None }),
            },
        }
    }

    /// What to remember of this pool for the next start.
    pub fn known(&self) -> Known {
        Known { pool: self.pool, in_image: self.image.is_some() }
    }

    /// How this pool copies.
    pub fn pool(&self) -> Pool {
        self.pool
    }

    /// Where objects live.
    pub fn dir(&self) -> &PoolDir {
        &self.dir
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

    /// Bytes that can still be written: free in the pool, or on the host where a sparse image has less
    /// behind it than it shows.
    pub fn free(&self) -> Result<u64> {
        let inside = space(self.dir.path())?.available;
        Ok(match &self.image {
            None => inside,
            Some(image) => inside.min(image.host()?.available),
        })
    }

    /// What is wrong with the room that is left, if anything: a pool, or the host of a sparse image, that
    /// is about to be full breaks all volumes at once.
    pub fn shortage(&self) -> Result<Option<String>> {
        let low = |space: &crate::sys::Space| space.available < LOW_BYTES.min(space.total / LOW_SHARE);
        let inside = space(self.dir.path())?;
        if low(&inside) {
            return Ok(Some(format!("the pool has {} left", Quantity(inside.available))));
        }
        let Some(image) = &self.image else { return Ok(None) };
        let host = image.host()?;
        Ok(low(&host)
            .then(|| format!("the disk under the pool's image has {} left", Quantity(host.available))))
    }

    /// Where the bytes lie, for people: `in place`, or the image's loop device.
    pub fn describe(&self) -> String {
        match &self.image {
            Some(image) => format!("xfs image on {}", image.device.path().display()),
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

impl Image {
    /// The space of the filesystem that the image file lies on.
    fn host(&self) -> Result<crate::sys::Space> {
        let parent = self.mount_point.parent().unwrap_or(&self.mount_point);
        Ok(space(parent)?)
    }

    /// Attaches and mounts the image, or finds that a former process left it so.
    fn open(image: &Path, mount_point: &Path) -> Result<Self> {
        let Some(lock) = FileLock::try_lock(image)? else {
            return Err(Error::ImageInUse(image.to_owned()));
        };
        let device = match LoopDevice::find(image)?.map(LoopDevice::keep).transpose()?.flatten() {
            Some(device) => device,
            None => LoopDevice::attach(image, Access::ReadWrite)?,
        };
        let mounted = mount::mounted_at(mount_point)?;
        let dev = device.dev()?;
        if mounted.is_none_or(|mounted| !mounted.is_of(&dev)) {
            // `nouuid`: a copy of an image may be mounted beside its original.
            let mounted =
                mount::mount(&device.path(), mount_point, "xfs", Flags::MS_NOATIME, "discard,nouuid");
            if let Err(error) = mounted {
                device.detach()?;
                return Err(error.into());
            }
        }
        Ok(Image { device, mount_point: mount_point.to_owned(), _lock: lock })
    }
}

/// Decides how a new data directory keeps its bytes.
fn choose(data_dir: &DataDir, dir: &PoolDir, request: PoolRequest) -> Result<Known> {
    let in_place = |pool| Known { pool, in_image: false };
    match request.choice {
        PoolChoice::Dir => Ok(in_place(Pool::Copy)),
        _ if probe::tells_sharing(dir.path())? => Ok(in_place(Pool::Reflink)),
        choice => match check_image_possible(choice, data_dir) {
            Ok(()) => Ok(Known { pool: Pool::Reflink, in_image: true }),
            Err(error) if choice == PoolChoice::Auto => {
                tracing::warn!(reason = %error, "snapshots will be full copies");
                Ok(in_place(Pool::Copy))
            }
            Err(error) => Err(error),
        },
    }
}

fn check_image_possible(choice: PoolChoice, data_dir: &DataDir) -> Result<()> {
    let unavailable = |reason: String| {
        Err(Error::Unavailable { choice: choice.name(), dir: data_dir.path().to_owned(), reason })
    };
    if !program::exists("mkfs.xfs") {
        return unavailable(
            "its filesystem does not clone files and mkfs.xfs is missing: install xfsprogs, or use --pool dir"
                .into(),
        );
    }
    let supported =
        fs::read_to_string("/proc/filesystems").context("read", Path::new("/proc/filesystems"))?;
    if !supported.lines().any(|line| line.trim() == "xfs") {
        return unavailable("this kernel has no xfs: load the module, or use --pool dir".into());
    }
    if let Err(error) = loopdev::require() {
        return unavailable(format!("{error}: load the loop module, or use --pool dir"));
    }
    Ok(())
}

/// Makes `pool.img`.
///
/// 1. Make and format it under another name: a crash leaves a file that the next start replaces.
/// 2. Sync it and rename it into place: it is there whole or not at all.
fn make_image(data_dir: &DataDir, size: Option<Quantity>) -> Result<()> {
    let free = space(data_dir.path())?.available;
    let size = match size {
        Some(Quantity(bytes)) => bytes,
        None => free / DEFAULT_SHARE.1 * DEFAULT_SHARE.0,
    };
    // A whole MiB: every sector size divides it.
    let size = size & !((1 << 20) - 1);
    if size < MIN_IMAGE {
        let dir = data_dir.path().to_owned();
        let reason = "mkfs.xfs needs 300Mi; free space on the host, or say --pool-size or --pool dir";
        return Err(Error::Size { dir, size: Quantity(size), reason });
    }
    if size > free {
        tracing::warn!(size, free, "the pool image may outgrow its host's free space");
    }
    let image = data_dir.pool_image();
    let fresh = image.with_extension("img.new");
    durable::remove(&fresh)?;
    let file = durable::create_new(&fresh)?;
    file.set_len(size).context("set the length of", &fresh)?;
    // Sectors as large as those of the loop device it will be mounted through.
    let sector = format!("size={}", loopdev::SECTOR);
    program::run("mkfs.xfs", &["-q", "-m", "reflink=1", "-s", &sector], &fresh, |code| code == 0)?;
    File::open(&fresh).and_then(|file| file.sync_all()).context("sync", &fresh)?;
    durable::rename(&fresh, &image)?;
    Ok(())
}
