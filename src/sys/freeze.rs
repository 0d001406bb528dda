//! Freezing a mounted filesystem (FIFREEZE, FITHAW), never for longer than a bound.

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::thread::JoinHandle;
use std::time::Duration;

use super::{Context, Error, Result};

/// `_IOWR('X', 119, int)` of `linux/fs.h`.
const FIFREEZE: libc::c_ulong = 0xC004_5877;
/// `_IOWR('X', 120, int)` of `linux/fs.h`.
const FITHAW: libc::c_ulong = 0xC004_5878;

/// A filesystem held frozen: nothing is written to its device meanwhile.
///
/// Thawed by [`Frozen::thaw`], on drop, and by a watchdog thread when the bound passes.
#[derive(Debug)]
pub struct Frozen {
    release: Option<mpsc::Sender<()>>,
    watchdog: Option<JoinHandle<Outcome>>,
    mount_point: PathBuf,
}

#[derive(Debug)]
enum Outcome {
    InTime(io::Result<()>),
    Expired(io::Result<()>),
}

impl Frozen {
    /// Writes what is dirty and freezes the filesystem mounted at `mount_point`. `Ok(None)` when
    /// somebody else has frozen it: it is theirs to thaw, and consistent as it is.
    pub fn freeze(mount_point: &Path, bound: Duration) -> Result<Option<Self>> {
        let root = File::open(mount_point).context("open", mount_point)?;
        // SAFETY: FIFREEZE ignores its argument; the descriptor is open.
        let rc = unsafe { libc::ioctl(root.as_raw_fd(), FIFREEZE, 0) };
        if rc < 0 {
            let error = io::Error::last_os_error();
            return match error.raw_os_error() {
                Some(libc::EBUSY) => Ok(None),
                _ => Err(error).context("freeze", mount_point),
            };
        }
        let (release, released) = mpsc::channel();
        let watchdog = std::thread::spawn(move || match released.recv_timeout(bound) {
            Err(RecvTimeoutError::Timeout) => Outcome::Expired(thaw_fd(&root)),
            _ => Outcome::InTime(thaw_fd(&root)),
        });
        Ok(Some(Frozen {
            release: Some(release),
            watchdog: Some(watchdog),
            mount_point: mount_point.to_owned(),
        }))
    }

    /// Thaws. An error when the bound had passed before: what was read meanwhile may be torn.
    pub fn thaw(mut self) -> Result<()> {
        self.finish()
    }

    fn finish(&mut self) -> Result<()> {
        drop(self.release.take());
        let Some(watchdog) = self.watchdog.take() else { return Ok(()) };
        let failed = |operation, source| Err(Error { operation, path: self.mount_point.clone(), source });
        match watchdog.join() {
            Ok(Outcome::InTime(Ok(()))) => Ok(()),
            Ok(Outcome::InTime(Err(error))) => failed("thaw", error),
            Ok(Outcome::Expired(Ok(()))) => {
                failed("keep frozen for the bound", io::ErrorKind::TimedOut.into())
            }
            Ok(Outcome::Expired(Err(error))) => failed("thaw after the bound", error),
            Err(_) => failed("thaw", io::Error::other("the watchdog thread panicked")),
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

/// Thaws a filesystem that a dead process left frozen; fine when it is not frozen.
pub fn thaw(mount_point: &Path) -> Result<()> {
    let root = File::open(mount_point).context("open", mount_point)?;
    match thaw_fd(&root) {
        Err(error) if error.raw_os_error() == Some(libc::EINVAL) => Ok(()),
        other => other.context("thaw", mount_point),
    }
}

fn thaw_fd(root: &File) -> io::Result<()> {
    // SAFETY: FITHAW ignores its argument; the descriptor is open.
    let rc = unsafe { libc::ioctl(root.as_raw_fd(), FITHAW, 0) };
    if rc < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}
