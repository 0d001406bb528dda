//! Freezing a mounted filesystem (FIFREEZE, FITHAW), never for longer than a bound.

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::thread::JoinHandle;
use std::time::Duration;

use rustix::fs::{AtFlags, StatxFlags, statx};

use super::mount::{Mount, mount_unseen};
use files::failpoint;
use files::{Context, Error, Result, step};

/// `_IOWR('X', 119, int)` of `linux/fs.h`.
const FIFREEZE: libc::c_ulong = 0xC004_5877;
/// `_IOWR('X', 120, int)` of `linux/fs.h`.
const FITHAW: libc::c_ulong = 0xC004_5878;

/// A filesystem held frozen: nothing is written to its device meanwhile.
///
/// Thawed by [`Frozen::thaw`], on drop, and by a watchdog thread when the bound passes.
#[derive(Debug)]
pub struct Frozen {
    release: mpsc::Sender<Command>,
    watchdog: Option<JoinHandle<Outcome>>,
    root: File,
    mount_point: PathBuf,
}

/// Commands to the watchdog.
#[derive(Debug)]
enum Command {
    Thaw,
    NotFrozen,
}

#[derive(Debug)]
enum Outcome {
    InTime(io::Result<()>),
    Expired(io::Result<()>),
}

impl Frozen {
    /// Writes what is dirty and freezes the filesystem with this root. `Ok(None)` when another program
    /// has frozen it: it is theirs to thaw, and consistent as it is.
    pub fn freeze(root: Root, bound: Duration) -> Result<Option<Self>> {
        let Root { file: root, mount_point } = root;
        let mount_point = mount_point.as_path();
        let guarded = root.try_clone().context("open", mount_point)?;
        let place = mount_point.to_owned();
        // The thread is started before the freeze: without it nothing would thaw.
        let (release, released) = mpsc::channel();
        let watchdog = std::thread::Builder::new()
            .name("freeze-watchdog".into())
            .spawn(move || match released.recv_timeout(bound) {
                Ok(Command::NotFrozen) => Outcome::InTime(Ok(())),
                Err(RecvTimeoutError::Timeout) => Outcome::Expired(thaw_fd(&guarded, &place)),
                Ok(Command::Thaw) | Err(RecvTimeoutError::Disconnected) => {
                    Outcome::InTime(thaw_fd(&guarded, &place))
                }
            })
            .context("start the watchdog of", mount_point)?;
        let frozen = Frozen { release, watchdog: Some(watchdog), root, mount_point: mount_point.to_owned() };
        let done = step("freeze", mount_point, || {
            // SAFETY: FIFREEZE ignores its argument; the descriptor is open.
            let rc = unsafe { libc::ioctl(frozen.root.as_raw_fd(), FIFREEZE, 0) };
            if rc < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
        });
        let Err(error) = done else { return Ok(Some(frozen)) };
        frozen.dismiss();
        match error.errno() {
            Some(libc::EBUSY) => Ok(None),
            _ => Err(error),
        }
    }

    /// Ends the watchdog of a filesystem that is not frozen by us.
    fn dismiss(mut self) {
        let _ = self.release.send(Command::NotFrozen);
        if let Some(watchdog) = self.watchdog.take() {
            let _ = watchdog.join();
        }
    }

    /// Thaws. An error when the bound had passed before: what was read meanwhile may be torn.
    pub fn thaw(mut self) -> Result<()> {
        self.finish()
    }

    fn finish(&mut self) -> Result<()> {
        let Some(watchdog) = self.watchdog.take() else { return Ok(()) };
        // A watchdog that has ended already has thawed: its outcome says so.
        let _ = self.release.send(Command::Thaw);
        let failed =
            |operation, source| Err(Error { operation, path: self.mount_point.clone(), at: None, source });
        match watchdog.join() {
            Ok(Outcome::InTime(Ok(()))) => Ok(()),
            // Another program thawed it: data read since may be inconsistent.
            Ok(Outcome::InTime(Err(error))) if error.raw_os_error() == Some(libc::EINVAL) => {
                failed("keep frozen", error)
            }
            // Once more: nothing else would thaw it.
            Ok(Outcome::InTime(Err(_))) => match thaw_fd(&self.root, &self.mount_point) {
                Err(error) if error.raw_os_error() != Some(libc::EINVAL) => failed("thaw", error),
                _ => Ok(()),
            },
            Ok(Outcome::Expired(Ok(()))) => {
                failed("keep frozen for the bound", io::ErrorKind::TimedOut.into())
            }
            // The freeze itself took longer than the bound, so the watchdog found nothing to thaw yet.
            Ok(Outcome::Expired(Err(_))) | Err(_) => match thaw_fd(&self.root, &self.mount_point) {
                Err(error) if error.raw_os_error() != Some(libc::EINVAL) => {
                    failed("thaw after the bound", error)
                }
                _ => failed("keep frozen for the bound", io::ErrorKind::TimedOut.into()),
            },
        }
    }
}

impl Drop for Frozen {
    fn drop(&mut self) {
        if let Err(error) = self.finish() {
            tracing::error!(error = &error as &dyn std::error::Error, "thaw failed");
        }
    }
}

/// The root directory of a mounted filesystem, open.
#[derive(Debug)]
pub struct Root {
    file: File,
    mount_point: PathBuf,
}

impl Root {
    /// Opens the root of a mount. `None` where it is not seen: something else is mounted over it.
    pub fn open(mount: &Mount) -> Result<Option<Self>> {
        let mount_point = mount.mount_point.clone();
        let file = File::open(&mount_point).context("open", &mount_point)?;
        let found = mount_id(&file).context("find the mount of", &mount_point)?;
        Ok((found == mount.id).then_some(Root { file, mount_point }))
    }

    /// Opens the root of the filesystem on a device that is not mounted where it can be seen. An error where another program
    /// has the device open exclusively.
    pub fn unseen(device: &Path, fs_type: &str) -> Result<Self> {
        Ok(Root { file: mount_unseen(device, fs_type)?, mount_point: device.to_owned() })
    }
}

/// Thaws the filesystem with this root, no matter who froze it; `Ok(false)` when it is not frozen.
pub fn thaw(root: &Root) -> Result<bool> {
    match thaw_fd(&root.file, &root.mount_point) {
        Err(error) if error.raw_os_error() == Some(libc::EINVAL) => Ok(false),
        other => other.context("thaw", &root.mount_point).map(|()| true),
    }
}

/// The number of the mount that a file was opened through (statx(2), STATX_MNT_ID).
fn mount_id(file: &File) -> io::Result<u64> {
    Ok(statx(file, c"", AtFlags::EMPTY_PATH, StatxFlags::MNT_ID)?.stx_mnt_id)
}

fn thaw_fd(root: &File, mount_point: &Path) -> io::Result<()> {
    failpoint::pass("thaw", mount_point)?;
    // SAFETY: FITHAW ignores its argument; the descriptor is open.
    let rc = unsafe { libc::ioctl(root.as_raw_fd(), FITHAW, 0) };
    if rc < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}
