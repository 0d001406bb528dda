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
    release: mpsc::Sender<Told>,
    watchdog: Option<JoinHandle<Outcome>>,
    mount_point: PathBuf,
}

/// What the watchdog is told.
#[derive(Debug)]
enum Told {
    Thaw,
    NotFrozen,
}

#[derive(Debug)]
enum Outcome {
    InTime(io::Result<()>),
    Expired(io::Result<()>),
}

impl Frozen {
    /// Writes what is dirty and freezes the filesystem of device `dev` (`major:minor`) mounted at
    /// `mount_point`. `Ok(None)` when somebody else has frozen it: it is theirs to thaw, and
    /// consistent as it is.
    pub fn freeze(mount_point: &Path, dev: &str, bound: Duration) -> Result<Option<Self>> {
        let root = open_root(mount_point, dev)?;
        let guarded = root.try_clone().context("open", mount_point)?;
        // Its thread is there before the freeze: without one nobody would thaw.
        let (release, released) = mpsc::channel();
        let watchdog = std::thread::Builder::new()
            .name("freeze-watchdog".into())
            .spawn(move || match released.recv_timeout(bound) {
                Ok(Told::NotFrozen) => Outcome::InTime(Ok(())),
                Err(RecvTimeoutError::Timeout) => Outcome::Expired(thaw_fd(&guarded)),
                Ok(Told::Thaw) | Err(RecvTimeoutError::Disconnected) => Outcome::InTime(thaw_fd(&guarded)),
            })
            .context("start the watchdog of", mount_point)?;
        let frozen = Frozen { release, watchdog: Some(watchdog), mount_point: mount_point.to_owned() };
        // SAFETY: FIFREEZE ignores its argument; the descriptor is open.
        let rc = unsafe { libc::ioctl(root.as_raw_fd(), FIFREEZE, 0) };
        if rc == 0 {
            return Ok(Some(frozen));
        }
        let error = io::Error::last_os_error();
        frozen.dismiss();
        match error.raw_os_error() {
            Some(libc::EBUSY) => Ok(None),
            _ => Err(error).context("freeze", mount_point),
        }
    }

    /// Ends the watchdog of a filesystem that is not frozen by us.
    fn dismiss(mut self) {
        let _ = self.release.send(Told::NotFrozen);
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
        let _ = self.release.send(Told::Thaw);
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

/// Thaws the filesystem of device `dev` mounted at `mount_point`, which a dead process left frozen;
/// fine when it is not frozen.
pub fn thaw(mount_point: &Path, dev: &str) -> Result<()> {
    match thaw_fd(&open_root(mount_point, dev)?) {
        Err(error) if error.raw_os_error() == Some(libc::EINVAL) => Ok(()),
        other => other.context("thaw", mount_point),
    }
}

/// Opens the root of a mount, and makes sure that it is that of `dev`: something else may be mounted
/// over it.
fn open_root(mount_point: &Path, dev: &str) -> Result<File> {
    use std::os::unix::fs::MetadataExt;
    let root = File::open(mount_point).context("open", mount_point)?;
    let device = root.metadata().context("stat", mount_point)?.dev();
    let found = format!("{}:{}", nix::sys::stat::major(device), nix::sys::stat::minor(device));
    match found == dev {
        true => Ok(root),
        false => {
            let other = io::Error::other(format!("device {found} is seen there, not {dev}"));
            Err(other).context("find the filesystem at", mount_point)
        }
    }
}

fn thaw_fd(root: &File) -> io::Result<()> {
    // SAFETY: FITHAW ignores its argument; the descriptor is open.
    let rc = unsafe { libc::ioctl(root.as_raw_fd(), FITHAW, 0) };
    if rc < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}
