//! The loop devices of volumes, and where they are mounted.

use std::path::Path;

use crate::driver::devices::filesystem::thaw_unmounted;
use crate::driver::error::{Error, Result};
use crate::driver::locks::OpGuard;
use crate::driver::shared::Shared;
use crate::sys::loopdev::{LoopDevice, backing_path_of};
use crate::sys::{blockdev, btrfs, mount};
use base::VolumeId;

/// Makes sure that the volume is no longer in use, and frees its device. `_lock` keeps others from
/// staging it again.
pub(in crate::driver) fn release_devices(shared: &Shared, id: &VolumeId, _lock: &OpGuard) -> Result<()> {
    let state = shared.store.volume_state(id)?;
    let device = LoopDevice::find(&shared.volume_data(id))?;
    let paths = state.staged.iter().map(|staged| &staged.path);
    for path in paths.chain(state.published.iter().map(|published| &published.target)) {
        if shows(path, device.as_ref())? {
            return Err(in_use(id, &format!("in use at {}", path.display())));
        }
    }
    let Some(device) = device else { return Ok(()) };
    if blockdev::is_claimed(&device.path())? {
        // A filesystem that a user froze still holds the device after its last unmount, until it is thawed. A device
        // node that is mounted somewhere does not hold it: it may be one of another volume, which had this number.
        let dev = device.dev()?;
        if !mount::mounts()?.iter().any(|mount| mount.is_of(&dev)) {
            thaw_unmounted(&device)?;
        }
        if blockdev::is_claimed(&device.path())? {
            let path = device.path();
            return Err(Error::Precondition(format!(
                "volume {id} is in use: a partition, a device mapper or a mount elsewhere holds {}: end that first",
                path.display()
            )));
        }
    }
    detach(device)
}

fn in_use(id: &VolumeId, how: &str) -> Error {
    Error::Precondition(format!("volume {id} is {how}: unpublish and unstage it first"))
}

/// Frees a device. If a process still has it open, the kernel frees it at the last close. That is not an error, since a
/// stage before then uses the device again.
pub(in crate::driver) fn detach(device: LoopDevice) -> Result<()> {
    let path = device.path();
    btrfs::forget(&path)?;
    if !device.detach()? {
        tracing::warn!(device = %path.display(), "a process has the device open; it is freed when that closes it");
    }
    Ok(())
}

/// Frees the device of a volume whose state cannot be read, if it is mounted nowhere.
pub(in crate::driver) fn free_unrecorded(device: Option<LoopDevice>) -> Result<()> {
    match device {
        Some(device) if !is_shown(&device)? => detach(device),
        _ => Ok(()),
    }
}

/// Whether this volume's filesystem or device node is mounted at `path`.
pub(in crate::driver) fn shows(path: &Path, device: Option<&LoopDevice>) -> Result<bool> {
    let Some(device) = device else { return Ok(false) };
    let Some(mounted) = mount::mounted_at(path)? else { return Ok(false) };
    let dev = device.dev()?;
    Ok(mounted.is_of(&dev) || blockdev::number(path).is_some_and(|number| number == dev))
}

/// Whether a device, or a filesystem on it, is mounted anywhere in this mount namespace.
fn is_shown(device: &LoopDevice) -> Result<bool> {
    let dev = device.dev()?;
    let name = device.path().file_name().map(ToOwned::to_owned);
    let shows = |mount: &mount::Mount| {
        mount.is_of(&dev) || (mount.fs_type == "devtmpfs" && mount.root.file_name() == name.as_deref())
    };
    Ok(mount::mounts()?.iter().any(shows))
}

/// Whether another volume of this pool is mounted at `path`. That can happen when the unmount of this volume could not
/// be recorded.
pub(in crate::driver) fn is_of_another(path: &Path, id: &VolumeId, volumes: &Path) -> Result<bool> {
    let Some(mounted) = mount::mounted_at(path)? else { return Ok(false) };
    let dev = blockdev::number(path).or_else(|| mounted.device());
    let serves = dev.and_then(|dev| backing_path_of(&dev));
    Ok(serves.is_some_and(|file| file.starts_with(volumes) && !file.starts_with(volumes.join(id.as_str()))))
}
