//! Choosing a pool, and making, mounting and leaving one that lives in an image file.

use std::fs::{self, File};
use std::path::{Path, PathBuf};

use super::format::Format;
use super::{Error, Pool, Result, probe};
use crate::sys::btrfs;
use crate::sys::loopdev::{self, Access, LoopDevice, has_direct_io};
use crate::sys::mount::{self, Flags};
use crate::sys::{program, space};
use base::{DataDir, PoolDir, Quantity};
use files::Context;
use files::durable::{self, FileLock, LOCK_PATIENCE};
use files::step;

/// What `--pool` asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum PoolChoice {
    /// The data directory's own filesystem where it is btrfs or clones files, else an image, else `dir`.
    Auto,
    /// btrfs: the data directory's own, or an image in it. Snapshots take constant time.
    Btrfs,
    /// A filesystem that clones files: the data directory's own, or an xfs image in it.
    Xfs,
    /// Plain files; snapshots are sparse copies.
    Dir,
}

impl PoolChoice {
    /// Whether an image of this kind is what was asked for.
    fn takes(self, format: Format) -> bool {
        match self {
            PoolChoice::Auto => true,
            PoolChoice::Btrfs => format == Format::Btrfs,
            PoolChoice::Xfs => format == Format::Xfs,
            PoolChoice::Dir => false,
        }
    }

    /// The value as the flag takes it.
    pub fn name(self) -> &'static str {
        match self {
            PoolChoice::Auto => "auto",
            PoolChoice::Btrfs => "btrfs",
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
/// With less than this on the disk under an image nothing new is made: its filesystem believes that it has room,
/// and a btrfs that finds out otherwise turns read-only.
const LEAST_HOST: u64 = 16 << 20;
/// mkfs.xfs makes nothing smaller than 300 MiB, mkfs.btrfs nothing smaller than 109 MiB.
const MIN_IMAGE: u64 = 300 << 20;

/// The kinds of pool, as a data directory remembers its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// btrfs, by subvolumes.
    Btrfs,
    /// A filesystem that clones files.
    Reflink,
    /// Plain files.
    Copy,
}

impl Kind {
    fn of(pool: Pool) -> Self {
        match pool {
            Pool::Btrfs { .. } => Kind::Btrfs,
            Pool::Reflink => Kind::Reflink,
            Pool::Copy => Kind::Copy,
        }
    }
}

/// What a data directory was made with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Known {
    /// How its pool copies.
    pub pool: Kind,
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
    path: PathBuf,
    device: LoopDevice,
    mount_point: PathBuf,
    format: Format,
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
            let mut home = Home { pool: Pool::Copy, image: Some(image), dir };
            match pool {
                Ok(pool) => {
                    home.pool = pool;
                    Ok(home)
                }
                Err(error) => {
                    home.close()?;
                    Err(error)
                }
            }
        };
        let untried = data_dir.untried();
        let tried = |home: Home| match durable::remove(&untried) {
            Ok(()) => Ok(home),
            Err(error) => {
                home.close()?;
                Err(error.into())
            }
        };
        match (known, image.exists()) {
            (Some(Known { in_image: true, .. }), false) => Err(Error::ImageMissing(image)),
            (Some(Known { in_image: true, .. }), true) => in_image(dir),
            (Some(Known { pool: kind, in_image: false }), _) => {
                Ok(Home { pool: in_place(kind, &dir)?, dir, image: None })
            }
            // A start that was cut short after making it.
            (None, true) if !request.choice.takes(Format::of_image(&image)?) => {
                Err(Error::ImageUnwanted { image, choice: request.choice.name() })
            }
            (None, is_made) => {
                // It may be mounted: what the directory is on says nothing then.
                match is_made.then(|| in_image(dir.clone())) {
                    Some(Ok(home)) => return tried(home),
                    Some(Err(error)) if !untried.exists() => return Err(error),
                    _ => {}
                }
                let (first, second) = match choose(data_dir, &dir, request)? {
                    Chosen::InPlace(pool) => return Ok(Home { pool, dir, image: None }),
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
                    (home, _) => tried(home?),
                }
            }
        }
    }

    /// What to remember of this pool for the next start.
    pub fn known(&self) -> Known {
        Known { pool: Kind::of(self.pool), in_image: self.image.is_some() }
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

    /// Why nothing new may be made, if there is a reason: the disk under the image is full.
    pub fn host_is_full(&self) -> Result<Option<String>> {
        let Some(image) = &self.image else { return Ok(None) };
        let left = image.host()?.available;
        Ok((left < LEAST_HOST).then(|| {
            format!(
                "No space left on device: the disk under the pool's image has {}; make room on it, or delete volumes \
                 or snapshots, which gives theirs back to it",
                Quantity(left)
            )
        }))
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

impl Image {
    /// The space of the filesystem that the image file lies on.
    fn host(&self) -> Result<crate::sys::Space> {
        let parent = self.mount_point.parent().unwrap_or(&self.mount_point);
        Ok(space(parent)?)
    }

    /// Attaches and mounts the image, or finds that a former process left it so.
    fn open(image: &Path, mount_point: &Path, format: Format) -> Result<Self> {
        let Some(lock) = FileLock::try_lock(image, LOCK_PATIENCE)? else {
            return Err(Error::ImageInUse(image.to_owned()));
        };
        let device = match LoopDevice::find(image)?.map(LoopDevice::keep).transpose()?.flatten() {
            Some(device) => device,
            None => LoopDevice::attach(image, Access::ReadWrite)?,
        };
        let dev = device.dev()?;
        let is_mounted =
            || Ok::<_, Error>(mount::mounted_at(mount_point)?.is_some_and(|mounted| mounted.is_of(&dev)));
        if is_mounted()? && !takes_writes(mount_point) {
            revive(mount_point)?;
        }
        if !is_mounted()? {
            let (name, options) = (format.name(), format.mount_options());
            let mounted = mount::mount(&device.path(), mount_point, name, Flags::MS_NOATIME, options);
            if let Err(error) = mounted {
                device.detach()?;
                return Err(error.into());
            }
        }
        let (path, mount_point) = (image.to_owned(), mount_point.to_owned());
        Ok(Image { path, device, mount_point, format, _lock: lock })
    }
}

/// Whether a filesystem still takes changes: the kernel makes it read-only, or shuts it down, when its disk fails.
fn takes_writes(mount_point: &Path) -> bool {
    match tempfile::tempfile_in(mount_point) {
        Err(error) => !matches!(error.raw_os_error(), Some(libc::EROFS | libc::EIO)),
        Ok(_) => true,
    }
}

/// Unmounts a filesystem that takes no changes any more: mounted anew it may. While volumes on it are in use
/// that cannot be, and reads go on.
fn revive(mount_point: &Path) -> Result<()> {
    let path = mount_point.display();
    match mount::unmount(mount_point) {
        Ok(()) => tracing::warn!(%path, "the pool took no writes, it is mounted anew"),
        Err(error) if error.errno() == Some(libc::EBUSY) => tracing::error!(
            %path,
            "the pool takes no writes, and volumes in use keep it from being mounted anew: unpublish and unstage \
             them, or unmount them and detach their loop devices by hand, and restart the driver"
        ),
        Err(error) => return Err(error.into()),
    }
    Ok(())
}

/// Where a new data directory keeps its bytes.
enum Chosen {
    InPlace(Pool),
    /// And what to try where the kernel refuses the first.
    Image(Format, Option<Format>),
}

/// Decides where a new data directory keeps its bytes.
fn choose(data_dir: &DataDir, dir: &PoolDir, request: PoolRequest) -> Result<Chosen> {
    let on_btrfs = || btrfs::is_btrfs(dir.path());
    let formats: &[Format] = match request.choice {
        PoolChoice::Dir => return copies(data_dir, dir, request.choice),
        PoolChoice::Auto | PoolChoice::Btrfs if on_btrfs()? => {
            return Ok(Chosen::InPlace(in_place(Kind::Btrfs, dir)?));
        }
        PoolChoice::Auto | PoolChoice::Xfs if probe::tells_sharing(dir.path())? => {
            return Ok(Chosen::InPlace(Pool::Reflink));
        }
        PoolChoice::Auto => &Format::AUTO,
        PoolChoice::Btrfs => &[Format::Btrfs],
        PoolChoice::Xfs => &[Format::Xfs],
    };
    let mut possible = Vec::new();
    for format in formats {
        match check_image_possible(*format, request.choice, data_dir) {
            Ok(()) => possible.push(*format),
            Err(error) if request.choice == PoolChoice::Auto => {
                tracing::warn!(reason = %error, "no {} image", format.name());
            }
            Err(error) => return Err(error),
        }
    }
    let mut possible = possible.into_iter();
    match possible.next() {
        Some(first) => Ok(Chosen::Image(first, possible.next())),
        None => {
            tracing::warn!("snapshots will be full copies");
            copies(data_dir, dir, request.choice)
        }
    }
}

/// A pool of plain files, where they can be sparse and say so.
fn copies(data_dir: &DataDir, dir: &PoolDir, choice: PoolChoice) -> Result<Chosen> {
    if probe::tells_holes(dir.path())? {
        return Ok(Chosen::InPlace(Pool::Copy));
    }
    Err(Error::Unavailable {
        choice: choice.name(),
        dir: data_dir.path().to_owned(),
        reason: "its filesystem does not tell data from holes in a sparse file (SEEK_HOLE): choose a --data-dir on \
                 ext4, xfs, btrfs or tmpfs"
            .into(),
    })
}

/// A pool in the data directory's own filesystem.
fn in_place(kind: Kind, dir: &PoolDir) -> Result<Pool> {
    Ok(match kind {
        // Its devices are somebody's, and may be exchanged at any time.
        Kind::Btrfs => Pool::Btrfs { holes: btrfs::records_holes(dir.path())?, flushes: false },
        Kind::Reflink => Pool::Reflink,
        Kind::Copy => Pool::Copy,
    })
}

fn check_image_possible(format: Format, choice: PoolChoice, data_dir: &DataDir) -> Result<()> {
    let unavailable = |reason: String| {
        Err(Error::Unavailable { choice: choice.name(), dir: data_dir.path().to_owned(), reason })
    };
    let ((mkfs, package), name) = (format.mkfs(), format.name());
    if !program::exists(mkfs) {
        return unavailable(format!(
            "its filesystem cannot be used as it is and {mkfs} is missing: install {package}, or use --pool dir"
        ));
    }
    let supported =
        fs::read_to_string("/proc/filesystems").context("read", Path::new("/proc/filesystems"))?;
    if !supported.lines().any(|line| line.trim() == name) {
        return unavailable(format!("this kernel has no {name}: load the module, or use --pool dir"));
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
fn make_image(data_dir: &DataDir, size: Option<Quantity>, format: Format) -> Result<()> {
    let free = space(data_dir.path())?.available;
    let size = match size {
        Some(Quantity(bytes)) => bytes,
        None => free / DEFAULT_SHARE.1 * DEFAULT_SHARE.0,
    };
    // A whole MiB: every sector size divides it.
    let size = size & !((1 << 20) - 1);
    if size < MIN_IMAGE {
        let dir = data_dir.path().to_owned();
        let reason = "a filesystem needs 300Mi; free space on the host, or say --pool-size or --pool dir";
        return Err(Error::Size { dir, size: Quantity(size), reason });
    }
    if size > free {
        tracing::warn!(size, free, "the pool image may outgrow its host's free space");
    }
    let image = data_dir.pool_image();
    let fresh = image.with_extension("img.new");
    durable::remove(&fresh)?;
    let file = durable::create_new(&fresh)?;
    step("set the length of", &fresh, || file.set_len(size))?;
    format.make(&fresh)?;
    step("sync", &fresh, || File::open(&fresh)?.sync_all())?;
    durable::replace(&data_dir.untried(), &[])?;
    durable::rename(&fresh, &image)?;
    Ok(())
}
