//! Publishing mounts a staged volume at a target, as a directory or as a block device.

use std::fs::{self};
use std::path::Path;

use crate::driver::devices::attached::{detach, free_unrecorded, is_of_another, shows};
use crate::driver::error::{Error, Result};
use crate::driver::node::health::answers;
use crate::driver::node::held::{Held, attached, check_unoccupied};
use crate::driver::node::used::{Node, PublishRequest, remove_target};
use crate::driver::request::path::checked_path;
use crate::store::{AccessKind, Published, Staged};
use crate::sys::loopdev::{Access, LoopDevice};
use crate::sys::mount;
use files::Context;
use files::change;

impl Node {
    /// Publishes a staged volume; if it is already published, nothing changes.
    ///
    /// 1. Check the target: a mount of another program is never recorded, so it is never undone.
    /// 2. Record the target: after a crash from here on, unpublish finds the record.
    /// 3. Attach (Block), make the target, mount.
    pub fn publish(&self, request: &PublishRequest) -> Result<()> {
        if request.volume_id.is_empty() {
            return Err(Error::Missing { field: "volume_id" });
        }
        let target = checked_path("target_path", &request.target_path)?;
        if let Some(parameters) = &request.ephemeral {
            return self.publish_ephemeral(request, parameters, target);
        }
        if request.staging_path.as_os_str().is_empty() {
            return Err(Error::Precondition(
                "staging_target_path is missing: stage the volume first and set it".into(),
            ));
        }
        let staging_path = checked_path("staging_target_path", &request.staging_path)?;
        let mut held = self.hold_at(&request.volume_id, &target)?;
        let kind = request.capability.kind_for(&held.record)?;
        let staged = held.state.staged.clone().filter(|staged| staged.path == staging_path);
        let Some(staged) = staged else {
            return Err(Error::Precondition(format!(
                "volume {} is not staged at {}: stage it first",
                held.record.id,
                request.staging_path.display()
            )));
        };
        if !request.capability.fits(&staged.access) {
            return Err(Error::Precondition(format!(
                "volume {} is staged as {}, it cannot be published as {kind}",
                held.record.id, staged.access
            )));
        }
        let published = Published {
            target,
            read_only: request.read_only
                || staged.read_only
                || request.capability.is_read_only()
                || self.shared.attachment(&held.record).is_some_and(|attached| attached.read_only),
            shared: request.capability.mode.is_shared(),
        };
        if published.target == staged.path {
            let (value, want) =
                (published.target.display().to_string(), "another path than staging_target_path");
            return Err(Error::Invalid { field: "target_path", value, want: want.into() });
        }
        check_others(&mut held, &staged.access, &published)?;
        check_target(&held, &staged.access, &published.target)?;
        if !held.state.published.contains(&published) {
            held.state.published.push(published.clone());
            self.shared.store.set_volume_state(&held.record.id, &held.state)?;
        }
        match staged.access {
            AccessKind::Block => publish_device(&held, &published),
            AccessKind::Filesystem(_) => publish_directory(&held, &staged, &published),
        }
    }

    /// Unpublishes a volume; if it is not published, nothing changes.
    pub fn unpublish(&self, volume_id: &str, target: &Path) -> Result<()> {
        if volume_id.is_empty() {
            return Err(Error::Missing { field: "volume_id" });
        }
        let target = checked_path("target_path", target)?;
        if self.is_unrecorded(volume_id) {
            return self.undo_unrecorded(volume_id, &target, true);
        }
        let Some(mut held) = self.hold_or_gone(volume_id, &target)? else { return Ok(()) };
        let device = LoopDevice::find(&held.data)?;
        if held.record.ephemeral.is_some() {
            return self.unpublish_ephemeral(held, &target);
        }
        let recorded = held.state.published.iter().any(|published| published.target == target);
        if !recorded && !shows(&target, device.as_ref())? {
            return Ok(());
        }
        // The target is recorded as ours, so it is unmounted even if its filesystem was shut down or its device
        // is gone. The record stays until that succeeds.
        if !is_of_another(&target, &held.record.id, &self.shared.store.dir().volumes())? {
            mount::unmount(&target)?;
            remove_target(&target)?;
        }
        if !held.known {
            return free_unrecorded(device);
        }
        held.state.published.retain(|published| published.target != target);
        let is_block = held.state.staged.as_ref().is_none_or(|staged| staged.access == AccessKind::Block);
        if let Some(device) = device
            && is_block
            && held.state.published.is_empty()
        {
            detach(device)?;
        }
        self.record_undone(&held)
    }
}

/// Compares a new target with the recorded ones (table of `NodePublishVolume` in the spec), and forgets those at
/// which nothing is mounted any more.
fn check_others(held: &mut Held, kind: &AccessKind, new: &Published) -> Result<()> {
    let device = LoopDevice::find(&held.data)?;
    let mut there = Vec::new();
    for published in std::mem::take(&mut held.state.published) {
        if published == *new || shows(&published.target, device.as_ref())? {
            there.push(published);
        }
    }
    held.state.published = there;
    let others = || held.state.published.iter().filter(|other| *other != new);
    if let Some(other) = others().find(|other| other.target == new.target) {
        return Err(Error::Clash {
            kind: "published volume",
            name: other.target.display().to_string(),
            difference: "another access mode or readonly flag".into(),
            remedy: "unpublish it first",
        });
    }
    for other in others() {
        if !(other.shared && new.shared) {
            return Err(Error::Precondition(format!(
                "volume {} is already published at {}, and its access mode allows one target",
                held.record.id,
                other.target.display()
            )));
        }
        if *kind == AccessKind::Block && other.read_only != new.read_only {
            return Err(Error::Precondition(format!(
                "block volume {} is published at {} for {}: a device cannot be read-only at one target \
                 and writable at another",
                held.record.id,
                other.target.display(),
                if other.read_only { "reading only" } else { "writing" }
            )));
        }
    }
    Ok(())
}

/// Fails if something else is mounted at the target, or if a file or directory there cannot take a volume.
fn check_target(held: &Held, kind: &AccessKind, target: &Path) -> Result<()> {
    check_unoccupied(held, target)?;
    if mount::mounted_at(target)?.is_some() {
        return Ok(());
    }
    let meta = match fs::symlink_metadata(target) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(()),
        meta => meta.context("stat", target)?,
    };
    let (fits, want) = match kind {
        AccessKind::Block => (meta.is_file() && meta.len() == 0, "an empty file, or nothing"),
        AccessKind::Filesystem(_) => (meta.is_dir(), "a directory, or nothing"),
    };
    match fits {
        true => Ok(()),
        false => Err(Error::Invalid {
            field: "target_path",
            value: format!("{}, where something else is", target.display()),
            want: want.into(),
        }),
    }
}

fn publish_device(held: &Held, published: &Published) -> Result<()> {
    let access = if published.read_only { Access::ReadOnly } else { Access::ReadWrite };
    let device = attached(held, access)?;
    if shows(&published.target, Some(&device))? {
        return Ok(());
    }
    let target = &published.target;
    match mount::in_parent(target, change::create_new) {
        Err(error) if error.source.kind() == std::io::ErrorKind::AlreadyExists => {}
        made => drop(made?),
    }
    Ok(mount::bind(&device.path(), &published.target, published.read_only)?)
}

/// Makes the directory of a target, unless it exists.
pub(super) fn make_directory(target: &Path) -> Result<()> {
    match mount::in_parent(target, |place| change::create_dir(place, 0o750)) {
        Err(error) if error.source.kind() == std::io::ErrorKind::AlreadyExists && is_directory(target) => {
            Ok(())
        }
        made => Ok(made?),
    }
}

fn is_directory(path: &Path) -> bool {
    fs::symlink_metadata(path).is_ok_and(|meta| meta.is_dir())
}

fn publish_directory(held: &Held, staged: &Staged, published: &Published) -> Result<()> {
    let staging = staged.path.as_path();
    let device = LoopDevice::find(&held.data)?;
    if !shows(staging, device.as_ref())? {
        return Err(Error::Precondition(format!(
            "volume {} is no longer mounted at {}: stage it again",
            held.record.id,
            staging.display()
        )));
    }
    if shows(&published.target, device.as_ref())? {
        return Ok(());
    }
    check_filesystem(held, staged, published)?;
    make_directory(&published.target)?;
    Ok(mount::bind(staging, &published.target, published.read_only)?)
}

/// Fails if the kernel has shut the staged filesystem down, or made it read-only, after an error: a pod would meet that
/// with its first call or write.
fn check_filesystem(held: &Held, staged: &Staged, published: &Published) -> Result<()> {
    const REMEDY: &str = "see the kernel log, then unpublish and unstage the volume everywhere: the next stage mounts it again";
    let path = &staged.path;
    let broken = |what: String| {
        let what = format!("{what} (volume {}): {REMEDY}", held.record.id);
        Err(std::io::Error::other(what)).context("use the filesystem at", path).map_err(Error::from)
    };
    if let Err(error) = answers(path) {
        return broken(format!("the kernel has shut it down, {}", base::report(&error)));
    }
    let mounted = mount::mounted_at(path)?;
    match mounted.is_some_and(|mounted| mounted.super_read_only) && !staged.read_only && !published.read_only
    {
        true => broken("the kernel has made it read-only after an error".into()),
        false => Ok(()),
    }
}
