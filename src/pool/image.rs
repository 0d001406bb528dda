//! A pool image: attaching it to a loop device, and mounting it.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use super::kind::ImageFormat;
use super::space::{LEAST_HOST, ROOM_FOR_RESERVE};
use super::{Error, Result};
use crate::sys::loopdev::{Access, LoopDevice};
use crate::sys::mount::{self, Flags};
use crate::sys::reserve::Reserve;
use crate::sys::{Space, blockdev, program, space};
use base::DataDir;
use files::durable::{FileLock, LOCK_PATIENCE};
use files::{Context, change};

/// An image that is attached and mounted.
#[derive(Debug)]
pub(super) struct Image {
    pub path: PathBuf,
    pub device: LoopDevice,
    pub mount_point: PathBuf,
    pub format: &'static ImageFormat,
    /// On the disk below.
    pub reserve: Reserve,
    /// No other process may attach the image while this lives.
    _lock: FileLock,
}

impl Image {
    /// The space of the filesystem that holds the image file.
    pub(super) fn host(&self) -> Result<Space> {
        let parent = self.mount_point.parent().unwrap_or(&self.mount_point);
        Ok(space(parent)?)
    }

    /// Takes the reserve on the disk below, unless it is held or the disk is full.
    pub(super) fn take_reserve(&self) -> Result<()> {
        match self.reserve.is_held() || self.host()?.available < ROOM_FOR_RESERVE {
            true => Ok(()),
            false => Ok(self.reserve.take()?),
        }
    }

    /// Makes the image and its filesystem larger. After a crash in between the filesystem has its old size.
    pub(super) fn grow(&self, bytes: u64) -> Result<()> {
        let file = File::options().write(true).open(&self.path).context("open", &self.path)?;
        let length = file.metadata().context("stat", &self.path)?.len() + bytes;
        change::set_len(&file, &self.path, length)?;
        change::sync(&file, &self.path)?;
        self.device.grow_to_file()?;
        let (grow, arguments) = self.format.grow;
        program::run(grow, arguments, &self.mount_point, |code| code == 0)?;
        Ok(())
    }

    /// Attaches and mounts the image, or finds that a former process left it so. The disk below may be full: then a mount finds no
    /// space for what it has to write, so the reserve there is given back first.
    pub(super) fn open(data_dir: &DataDir, mount_point: &Path, format: &'static ImageFormat) -> Result<Self> {
        let (image, reserve) = (&data_dir.pool_image(), Reserve::below_image(data_dir.reserve()));
        let Some(lock) = FileLock::try_lock(image, LOCK_PATIENCE)? else {
            return Err(Error::ImageInUse(image.to_owned()));
        };
        if space(data_dir.path())?.available < LEAST_HOST {
            reserve.give_back()?;
        }
        let device = match LoopDevice::find(image)?.map(LoopDevice::keep).transpose()?.flatten() {
            Some(device) => device,
            None => LoopDevice::attach(image, Access::ReadWrite)?,
        };
        let dev = device.dev()?;
        let is_mounted = mount::mounted_at(mount_point)?.is_some_and(|mounted| mounted.is_of(&dev));
        let mount = || {
            let ImageFormat { filesystem, mount_options, .. } = format;
            mount::mount(&device.path(), mount_point, filesystem, Flags::MS_NOATIME, mount_options)
        };
        let mounted = mount_writable(&device, mount_point, is_mounted, mount);
        if let Err(error) = mounted {
            device.detach()?;
            return Err(error.into());
        }
        let (path, mount_point) = (image.to_owned(), mount_point.to_owned());
        let opened = Image { path, device, mount_point, format, reserve, _lock: lock };
        if let Err(error) = opened.take_reserve() {
            let error = base::report(&error);
            tracing::warn!(
                error,
                "the disk under the pool's image has no reserve for the time when it is full"
            );
        }
        Ok(opened)
    }

    /// Unmounts and detaches it. `Ok(false)` if files on it are in use: then it stays as it is.
    pub(super) fn close(self) -> Result<bool> {
        match mount::unmount(&self.mount_point) {
            Ok(()) => Ok(self.device.detach()?),
            Err(error) if error.errno() == Some(libc::EBUSY) => Ok(false),
            Err(error) => Err(error.into()),
        }
    }
}

/// Whether a filesystem still takes changes: the kernel makes it read-only, or shuts it down, when its disk fails.
fn takes_writes(mount_point: &Path) -> bool {
    match tempfile::tempfile_in(mount_point) {
        Err(error) => !matches!(error.raw_os_error(), Some(libc::EROFS | libc::EIO)),
        Ok(_) => true,
    }
}

/// For how long a mount is tried again. A mount namespace made a moment ago, as for every container that starts, has copies
/// of all mounts until it has given them up. While one is left of a dead filesystem, a mount shows the same one or fails.
const COPIES_END: Duration = Duration::from_secs(5);

/// Mounts a filesystem. One that no longer takes writes is mounted again, unless volumes on it are in use: then reads continue.
fn mount_writable(
    device: &LoopDevice,
    mount_point: &Path,
    mut is_mounted: bool,
    mount: impl Fn() -> files::Result<()>,
) -> files::Result<()> {
    let path = mount_point.display();
    let deadline = Instant::now() + COPIES_END;
    let mut was_unmounted = false;
    loop {
        let mounted = if is_mounted { Ok(()) } else { mount() };
        let may_change = match &mounted {
            Ok(()) => !takes_writes(mount_point),
            Err(_) => blockdev::is_claimed(&device.path())?,
        };
        if !may_change || Instant::now() >= deadline {
            if was_unmounted && !may_change {
                tracing::warn!(%path, "the pool did not take writes, and is remounted");
            }
            return mounted;
        }
        if mounted.is_ok() {
            match mount::unmount(mount_point) {
                Ok(()) => was_unmounted = true,
                Err(error) if error.errno() == Some(libc::EBUSY) => {
                    tracing::error!(
                        %path,
                        "the pool is read-only and cannot be remounted while volumes are in use: unpublish and unstage \
                         them, or unmount them and detach their loop devices by hand, and restart the driver"
                    );
                    return Ok(());
                }
                Err(error) => return Err(error),
            }
        }
        is_mounted = false;
        std::thread::sleep(COPIES_END / 50);
    }
}
