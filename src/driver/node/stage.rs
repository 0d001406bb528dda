//! Staging mounts the volume's filesystem once on the node. A Block volume has nothing to mount, and it gets its
//! device when it is published: only then is it known whether it may be written.

use std::fs::File;
use std::path::Path;

use crate::driver::devices::attached::{detach, free_unrecorded, is_of_another, shows};
use crate::driver::devices::filesystem;
use crate::driver::error::{Error, Result};
use crate::driver::node::held::{Held, attached, check_unoccupied};
use crate::driver::node::used::{Node, StageRequest};
use crate::driver::request::capability::{
    AccessType, Capability, MountFlags, is_known_filesystem, least_size,
};
use crate::driver::request::path::checked_path;
use crate::driver::ungrown;
use crate::store::{AccessKind, Staged, VolumeState};
use crate::sys::loopdev::{Access, LoopDevice};
use crate::sys::{blockdev, mount};
use base::Quantity;
use files::Context;
use files::change;

impl Node {
    /// Stages a volume; if it is already staged, nothing changes.
    ///
    /// 1. Check the path: a mount of another program is never recorded, so it is never undone.
    /// 2. Record the intent: after a crash from here on, unstage and the next stage find the record.
    /// 3. Attach, format where the volume is blank, grow, mount.
    pub fn stage(&self, request: &StageRequest) -> Result<()> {
        if request.volume_id.is_empty() {
            return Err(Error::Missing { field: "volume_id" });
        }
        let path = checked_path("staging_target_path", &request.staging_path)?;
        let mut held = self.hold_at(&request.volume_id, &path)?;
        let kind = request.capability.kind_for(&held.record)?;
        let staged = Staged { path, access: kind, read_only: request.capability.is_read_only() };
        if let Some(existing) = held.state.staged.as_ref().filter(|existing| **existing != staged)
            && is_in_the_way(&held, existing, &staged)?
        {
            return Err(Error::Clash {
                kind: "staged volume",
                name: held.record.id.to_string(),
                difference: format!(
                    "another path or capability, as {} at {}",
                    existing.access,
                    existing.path.display()
                ),
                remedy: "unstage it first",
            });
        }
        if !staged.path.is_dir() {
            let value = staged.path.display().to_string();
            let want = "a directory that exists".into();
            return Err(Error::Invalid { field: "staging_target_path", value, want });
        }
        if staged.access != AccessKind::Block {
            check_unoccupied(&held, &staged.path)?;
        }
        let before = held.state.staged.replace(staged.clone());
        match &request.capability.access {
            AccessType::Block => {
                forget_formatting(&mut held)?;
                self.shared.store.set_volume_state(&held.record.id, &held.state)?;
                // Staging it as a filesystem failed, and left its device for a retry.
                let is_left = before.is_some_and(|before| before.access != AccessKind::Block);
                if is_left
                    && held.state.published.is_empty()
                    && let Some(device) = LoopDevice::find(&held.data)?
                {
                    detach(device)?;
                }
                Ok(())
            }
            AccessType::Mount { flags, .. } => {
                self.shared.store.set_volume_state(&held.record.id, &held.state)?;
                self.stage_filesystem(&mut held, &staged, &request.capability, flags)
            }
        }
    }

    /// Attaches the volume and mounts its filesystem. The state already names the directory.
    pub(super) fn stage_filesystem(
        &self,
        held: &mut Held,
        staged: &Staged,
        asked: &Capability,
        flags: &MountFlags,
    ) -> Result<()> {
        // Writable even if the volume is only read: the kernel has to replay an unclean journal. The mount is
        // read-only, and refuses writes.
        let device = attached(held, Access::ReadWrite)?;
        // The filesystem may be smaller than the device, after a restore into a larger volume or an expansion
        // while not in use. ext4 is grown before it is mounted, the others after; a retry grows them too if an
        // earlier try stopped between the mount and the growth.
        let fs_type = match mount::mounted_at(&staged.path)? {
            Some(mounted) if shows(&staged.path, Some(&device))? => mounted.fs_type,
            _ => {
                let fs_type = self.formatted(held, &device, staged, asked)?;
                if !staged.read_only {
                    is_grown(held, self.grow_unmounted(held, &device, &fs_type))?;
                    // What could not be undone after a failure must not be mounted.
                    ungrown::undo(&self.shared.store, &held.record.id)?;
                }
                filesystem::mount(&device, &staged.path, &fs_type, staged.read_only, flags)?;
                // A user may have unmounted it while it was frozen: then every write would hang.
                filesystem::thaw(&staged.path)?;
                fs_type
            }
        };
        if !staged.read_only && fs_type != "ext4" {
            is_grown(held, self.grow_mounted(held, &device, &staged.path, &fs_type))?;
        }
        Ok(())
    }

    /// The filesystem on the device; a blank device is formatted.
    ///
    /// A volume that holds data, or was made from a source, is never formatted, whatever `blkid` prints. The only
    /// exception is a device on which our own mkfs was interrupted; `state.json` records that.
    fn formatted(
        &self,
        held: &mut Held,
        device: &LoopDevice,
        staged: &Staged,
        asked: &Capability,
    ) -> Result<String> {
        let AccessKind::Filesystem(wanted) = &staged.access else {
            return Err(Error::Precondition("a Block volume has no filesystem".into()));
        };
        // Data that was written to the device but not synced counts too.
        blockdev::flush(&device.path())?;
        let blank = held.record.source.is_none() && filesystem::is_blank(&held.data)?;
        if !blank && !held.state.formatting {
            // A client that named no filesystem takes the one that is there. So does one that restores, since the class of
            // the new volume need not be that of the source.
            let is_open = held.record.source.is_some() || asked.named_filesystem().is_none();
            return match filesystem::detect(&device.path())? {
                Some(found) if found == *wanted || (is_open && is_known_filesystem(&found)) => Ok(found),
                Some(found) => {
                    let remedy = match is_known_filesystem(&found) {
                        true => format!("request fs_type {found}"),
                        false => "use it as a Block volume".into(),
                    };
                    Err(Error::Precondition(format!(
                        "volume {} holds {found}, not {wanted}: {remedy}",
                        held.record.id
                    )))
                }
                None => {
                    let what = match filesystem::is_blank(&held.data)? {
                        true => {
                            "was made from an empty source and is never formatted: create a volume without a source"
                        }
                        false => {
                            "holds data but no filesystem and is never formatted: use it as a Block volume"
                        }
                    };
                    Err(Error::Precondition(format!("volume {} {what}", held.record.id)))
                }
            };
        }
        let least = least_size(std::slice::from_ref(&staged.access));
        if held.record.capacity < least {
            return Err(Error::Precondition(format!(
                "volume {} has {} and is empty; {wanted} needs at least {}: expand it first, or request another fs_type",
                held.record.id,
                Quantity(held.record.capacity),
                Quantity(least)
            )));
        }
        held.state.formatting = true;
        self.shared.store.set_volume_state(&held.record.id, &held.state)?;
        filesystem::make(&device.path(), wanted)?;
        held.state.formatting = false;
        self.shared.store.set_volume_state(&held.record.id, &held.state)?;
        Ok(wanted.clone())
    }

    /// Unstages a volume; if it is not staged, nothing changes.
    pub fn unstage(&self, volume_id: &str, staging_path: &Path) -> Result<()> {
        if volume_id.is_empty() {
            return Err(Error::Missing { field: "volume_id" });
        }
        let path = checked_path("staging_target_path", staging_path)?;
        if self.is_unrecorded(volume_id) {
            return self.undo_unrecorded(volume_id, &path, false);
        }
        let Some(mut held) = self.hold_or_gone(volume_id, &path)? else { return Ok(()) };
        if held.record.ephemeral.is_some() {
            return Ok(());
        }
        let device = LoopDevice::find(&held.data)?;
        for published in &held.state.published {
            if shows(&published.target, device.as_ref())? {
                return Err(Error::Precondition(format!(
                    "volume {} is still published at {}: unpublish it first",
                    held.record.id,
                    published.target.display()
                )));
            }
        }
        let recorded = held.state.staged.as_ref().is_some_and(|staged| staged.path == path);
        if !recorded && !shows(&path, device.as_ref())? {
            return Ok(());
        }
        self.thaw_leftover(&held);
        if !is_of_another(&path, &held.record.id, &self.shared.store.dir().volumes())? {
            filesystem::thaw(&path)?;
            mount::unmount(&path)?;
        }
        if !held.known {
            return free_unrecorded(device);
        }
        if let Some(device) = device {
            detach(device)?;
        }
        let formatting = held.state.formatting;
        let attached = held.state.attached.take();
        held.state = VolumeState { attached, formatting, ..VolumeState::default() };
        self.record_undone(&held)
    }
}

/// A filesystem that does not grow is used at its old size, and NodeExpandVolume returns the error. If the kernel refused a call, a
/// retry may find it well.
fn is_grown(held: &Held, grown: Result<()>) -> Result<()> {
    match grown {
        Err(error) if error.sys().is_none_or(|error| error.errno().is_none()) => {
            let (volume_id, error) = (&held.record.id, base::report(&error));
            tracing::warn!(%volume_id, error, "the filesystem does not grow, and is mounted at its old size");
            Ok(())
        }
        grown => grown,
    }
}

/// Discards what our own mkfs wrote before it was interrupted. From here on the device may hold data of the user,
/// and must never be formatted.
fn forget_formatting(held: &mut Held) -> Result<()> {
    if std::mem::take(&mut held.state.formatting) {
        let file = File::options().write(true).open(&held.data).context("open", &held.data)?;
        change::punch_hole(&file, &held.data, 0, held.record.capacity)?;
        change::sync(&file, &held.data)?;
    }
    Ok(())
}

/// Whether a volume that is recorded as `existing` cannot be staged as `new`. A filesystem that is no longer mounted was lost in a
/// reboot. A Block volume has nothing to lose: it is staged until it is unstaged, but may be staged as a device elsewhere while
/// it is not published.
fn is_in_the_way(held: &Held, existing: &Staged, new: &Staged) -> Result<bool> {
    let is_device = existing.access == AccessKind::Block;
    Ok((is_device && new.access != AccessKind::Block) || is_there(held, existing)?)
}

/// Whether a volume that is recorded as staged is still mounted; for a Block volume, whether it is published.
fn is_there(held: &Held, staged: &Staged) -> Result<bool> {
    let device = LoopDevice::find(&held.data)?;
    match staged.access {
        AccessKind::Filesystem(_) => shows(&staged.path, device.as_ref()),
        AccessKind::Block => {
            for published in &held.state.published {
                if shows(&published.target, device.as_ref())? {
                    return Ok(true);
                }
            }
            Ok(false)
        }
    }
}
