//! The node's part of an expansion: the device, and the filesystem on it.

use std::path::Path;

use crate::driver::devices::attached::shows;
use crate::driver::devices::filesystem;
use crate::driver::devices::superblock::Superblock;
use crate::driver::error::{Error, Result};
use crate::driver::node::held::Held;
use crate::driver::node::used::{Node, place};
use crate::driver::request::capability::Capability;
use crate::driver::request::create::CapacityRange;
use crate::driver::ungrown;
use crate::driver::volumes::expand::grow;
use crate::store::AccessKind;
use crate::sys::loopdev::LoopDevice;
use crate::sys::mount;
use base::Quantity;

impl Node {
    /// Grows the device and the filesystem of a volume that is staged or published at `volume_path` to the volume's size,
    /// and returns the size. Succeeds if they are as large already.
    pub fn expand(
        &self,
        volume_id: &str,
        volume_path: &Path,
        range: CapacityRange,
        capability: Option<&Capability>,
    ) -> Result<u64> {
        if volume_id.is_empty() {
            return Err(Error::Missing { field: "volume_id" });
        }
        if volume_path.as_os_str().is_empty() {
            return Err(Error::Missing { field: "volume_path" });
        }
        let held = self.hold(volume_id)?;
        let (_, staged) = place(&held.state, volume_path)?;
        if let Some(asked) = capability {
            let kind = asked.kind_for(&held.record)?;
            if !asked.fits(&staged.access) {
                return Err(Error::Unsupported(format!(
                    "volume {} is staged as {}, it cannot be expanded as {kind}",
                    held.record.id, staged.access
                )));
            }
        }
        let capacity = held.record.capacity;
        if !range.holds(capacity) {
            let (field, value) = match range.limit {
                Some(limit) if limit < capacity => ("capacity_range.limit_bytes", limit),
                _ => ("capacity_range.required_bytes", range.required),
            };
            let want = format!("{capacity}, the volume's size: ControllerExpandVolume changes it");
            return Err(Error::OutOfRange { field, value: i128::from(value), want });
        }
        let Some(device) = LoopDevice::find(&held.data)? else {
            // A Block volume has a device only while it is published.
            return Ok(capacity);
        };
        grow(&device, capacity)?;
        if let AccessKind::Filesystem(_) = staged.access
            && shows(&staged.path, Some(&device))?
            && let Some(mounted) = mount::mounted_at(&staged.path)?
        {
            if mounted.read_only {
                return Err(Error::Precondition(format!(
                    "volume {} is mounted for reading only: its filesystem grows when it is staged for writing",
                    held.record.id
                )));
            }
            self.grow_mounted(&held, &device, &staged.path, &mounted.fs_type)?;
            if let Some(found) = Superblock::read(&device.path())? {
                found.check_growth("the volume's size", capacity)?;
            }
        }
        Ok(capacity)
    }

    /// Grows an ext4 that is not mounted to the size of its device.
    pub(super) fn grow_unmounted(&self, held: &Held, device: &LoopDevice, fs_type: &str) -> Result<()> {
        let growth = filesystem::growth(&device.path(), fs_type)?.filter(|_| fs_type == "ext4");
        let Some(growth) = growth else { return Ok(()) };
        self.check_room_to_grow(&growth)?;
        let grow = |kept: Option<&Path>| filesystem::grow_unmounted(&device.path(), growth, kept);
        ungrown::guarded(self.shared.pool(), &self.shared.store, &held.record.id, grow)
    }

    /// Fails where the pool may lack room for what a growing filesystem writes. A write that fails on the way leaves an ext4 with errors
    /// that `e2fsck -p` does not repair, and the kernel shuts a mounted filesystem down.
    fn check_room_to_grow(&self, (found, target): &(Superblock, u64)) -> Result<()> {
        let (needs, free) = (found.room_to_grow(*target), self.shared.open_pool.free()?);
        match free < needs {
            true => Err(Error::Exhausted(format!(
                "the pool has {} left, and the {} needs up to {} to grow: make room, then expand it again",
                Quantity(free),
                found.fs_type,
                Quantity(needs)
            ))),
            false => Ok(()),
        }
    }

    /// Grows a mounted filesystem to the size of its device. Fails if its user has frozen it.
    pub(super) fn grow_mounted(
        &self,
        held: &Held,
        device: &LoopDevice,
        mount_point: &Path,
        fs_type: &str,
    ) -> Result<()> {
        let Some(growth) = filesystem::growth(&device.path(), fs_type)? else { return Ok(()) };
        if let Some(mounted) = mount::mounted_at(mount_point)?
            && self.copier.is_frozen(&held.record.id, &mounted)?
        {
            return Err(Error::Precondition(format!(
                "the {fs_type} at {} is frozen, so it does not grow: thaw it (fsfreeze --unfreeze)",
                mount_point.display()
            )));
        }
        self.check_room_to_grow(&growth)?;
        filesystem::grow_mounted(&device.path(), mount_point, growth)
    }
}
