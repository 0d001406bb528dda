//! Staging: the volume's filesystem, mounted once on the node. A Block volume has nothing to mount;
//! it gets its device when it is published, for only then is it known whether it may be written.

use std::fs;

use super::{Held, StageRequest, attached, detach, filesystem, shows};
use crate::driver::{AccessType, Driver, Error, Result, capability, check_path};
use crate::store::{AccessKind, NodeState, Staged};
use crate::sys::loopdev::{Access, LoopDevice};
use crate::sys::{Context, mount};

impl Driver {
    /// Stages a volume; done already is done.
    ///
    /// 1. Record the intent: a crash from here on leaves a record that unstage and the next stage
    ///    start from.
    /// 2. Attach, format where the volume is blank, mount, grow the filesystem to the device.
    pub fn stage(&self, request: &StageRequest) -> Result<()> {
        check_path("staging_target_path", &request.staging_path)?;
        let kind = request.capability.kind()?;
        let mut held = self.hold(&request.volume_id)?;
        if !held.record.access.contains(&kind) {
            let made_for = &held.record.access;
            return Err(Error::Precondition(format!(
                "volume {} was made for {made_for:?}, it can not be staged as {kind:?}",
                held.record.id
            )));
        }
        let staged = Staged {
            path: request.staging_path.clone(),
            access: kind,
            read_only: request.capability.mode.is_read_only(),
        };
        match &held.state.staged {
            Some(existing) if *existing == staged => {}
            Some(existing) if existing.path != staged.path && !self.is_there(&held, existing)? => {}
            Some(existing) => {
                return Err(Error::Clash {
                    kind: "staged volume",
                    name: held.record.id.to_string(),
                    difference: format!("another path or capability, at {}", existing.path.display()),
                });
            }
            None => {}
        }
        if !request.staging_path.is_dir() {
            let value = request.staging_path.display().to_string();
            let want = "a directory that exists".into();
            return Err(Error::Invalid { field: "staging_target_path", value, want });
        }
        held.state.staged = Some(staged);
        self.store.set_node_state(&held.record.id, &held.state)?;
        match &request.capability.access {
            AccessType::Block => Ok(()),
            AccessType::Mount { fs_type, flags } => self.stage_filesystem(&mut held, request, fs_type, flags),
        }
    }

    /// Whether a staged volume is really there. A Block volume is there while it is published.
    fn is_there(&self, held: &Held, staged: &Staged) -> Result<bool> {
        match staged.access {
            AccessKind::Block => Ok(!held.state.published.is_empty()),
            AccessKind::Filesystem(_) => shows(&staged.path, LoopDevice::find(&held.data)?.as_ref()),
        }
    }

    fn stage_filesystem(
        &self,
        held: &mut Held,
        request: &StageRequest,
        fs_type: &str,
        flags: &capability::MountFlags,
    ) -> Result<()> {
        // Writable also for readers only: an unclean journal is replayed, and the mount refuses them.
        let device = attached(&held.data, Access::ReadWrite)?;
        if shows(&request.staging_path, Some(&device))? {
            return Ok(());
        }
        let fs_type = self.formatted(held, &device, fs_type)?;
        let read_only = request.capability.mode.is_read_only();
        filesystem::mount(&device, &request.staging_path, &fs_type, read_only, flags)?;
        if !read_only && held.record.source.is_some() {
            filesystem::grow(&device, &request.staging_path, &fs_type)?;
        }
        Ok(())
    }

    /// The filesystem on the device, made where there is none and may be one.
    ///
    /// A volume that holds a single block, or was made from something, is never formatted, whatever
    /// `blkid` says. The only exception is a device on which our own mkfs was cut short, which
    /// `node.json` says.
    fn formatted(&self, held: &mut Held, device: &LoopDevice, asked: &str) -> Result<String> {
        let wanted = match (asked, held.record.fs_type()) {
            ("", Some(recorded)) => recorded,
            ("", None) => capability::DEFAULT_FS,
            (asked, _) => asked,
        };
        let blank = held.record.source.is_none() && filesystem::is_blank(&held.data)?;
        if !blank && !held.state.formatting {
            return match filesystem::detect(&device.path())? {
                Some(found) if asked.is_empty() || found == wanted || held.record.source.is_some() => {
                    Ok(found)
                }
                Some(found) => Err(Error::Precondition(format!(
                    "volume {} carries {found}, not {wanted}: ask for fs_type {found}",
                    held.record.id
                ))),
                None => Err(Error::Precondition(format!(
                    "volume {} holds data and no filesystem: it is not formatted over; use it as a Block volume",
                    held.record.id
                ))),
            };
        }
        held.state.formatting = true;
        self.store.set_node_state(&held.record.id, &held.state)?;
        filesystem::make(&device.path(), wanted)?;
        held.state.formatting = false;
        self.store.set_node_state(&held.record.id, &held.state)?;
        Ok(wanted.to_owned())
    }

    /// Undoes a stage; nothing to undo is done.
    pub fn unstage(&self, volume_id: &str, staging_path: &std::path::Path) -> Result<()> {
        if volume_id.is_empty() {
            return Err(Error::Missing { field: "volume_id" });
        }
        check_path("staging_target_path", staging_path)?;
        let Some(mut held) = self.hold_if_there(volume_id)? else { return Ok(()) };
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
        let recorded = held.state.staged.as_ref().is_some_and(|staged| staged.path == staging_path);
        if !recorded && !shows(staging_path, device.as_ref())? {
            return Ok(());
        }
        self.thaw_leftover(&held.record.id)?;
        while shows(staging_path, device.as_ref())? {
            mount::unmount(staging_path)?;
        }
        if let Some(device) = device {
            detach(device)?;
        }
        let formatting = held.state.formatting;
        held.state = NodeState { formatting, ..NodeState::default() };
        self.store.set_node_state(&held.record.id, &held.state)?;
        Ok(())
    }
}

/// Removes a mount target that we made: an empty directory, or the file a device is shown at.
pub(super) fn remove_target(target: &std::path::Path) -> Result<()> {
    let meta = match fs::symlink_metadata(target) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(()),
        meta => meta.context("stat", target)?,
    };
    let removed = match meta.is_dir() {
        true => fs::remove_dir(target),
        false => fs::remove_file(target),
    };
    Ok(removed.context("remove", target)?)
}
