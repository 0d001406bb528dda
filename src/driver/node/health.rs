//! What is wrong with a volume on this node (`NodeGetVolumeHealth`): what the controller sees, its device, and its
//! filesystem where that is mounted.

use std::path::{Path, PathBuf};

use crate::driver::devices::attached::shows;
use crate::driver::error::{Error, Result};
use crate::driver::health::volume::{Faults, Reason, VolumeHealth, withheld};
use crate::driver::locks::LockKey;
use crate::driver::node::used::Node;
use crate::driver::request::path::checked_path;
use crate::store::{self, AccessKind, Staged, VolumeRecord, VolumeState};
use crate::sys::loopdev::LoopDevice;
use crate::sys::{self, mount};
use files::Context;

impl Node {
    /// Checks a volume at all places where it is staged and published, or only at the places that the request names; an
    /// empty path names none. Takes no lock, since kubelet calls it every minute, also during a snapshot.
    pub fn volume_health(
        &self,
        volume_id: &str,
        publish_path: &Path,
        staging_path: &Path,
    ) -> Result<VolumeHealth> {
        let mut asked = Vec::new();
        for (field, path) in [("volume_publish_path", publish_path), ("staging_target_path", staging_path)] {
            if !path.as_os_str().is_empty() {
                asked.push(checked_path(field, path)?);
            }
        }
        let record = match self.volume_or_ephemeral(volume_id) {
            Err(Error::Store(error @ store::Error::Withheld { .. })) => {
                return Ok(VolumeHealth {
                    volume_id: volume_id.to_owned(),
                    faults: withheld(&error).into_vec(),
                });
            }
            record => record?,
        };
        let pool = self.health.of_pool();
        let mut faults = self.health.of_volume(&record, &pool);
        // Where a volume should be mounted is recorded in the pool.
        if !pool.cut_off() {
            match self.place_faults(&record, &asked) {
                Ok(found) => faults.append(found),
                // No lock is held, so it may have been deleted meanwhile.
                Err(_) if !self.shared.is_known(&record.id) => return Err(Error::no_volume(volume_id)),
                // A call is at work on it and may be deleting it.
                Err(_) if self.shared.locks.is_held(&LockKey::Volume(record.id.clone())) => {}
                Err(Error::Store(error)) => faults.add(Reason::RecordUnreadable, base::report(&error)),
                // The faults found already say that its file cannot be read.
                Err(_) if !faults.is_empty() => {}
                Err(error) => return Err(error),
            }
        }
        Ok(VolumeHealth { volume_id: volume_id.to_owned(), faults: faults.into_vec() })
    }

    /// What two checks in a row find wrong at the places of a volume, provided that no call works on the volume
    /// meanwhile: such a call may be about to mount what is missing, or to unmount the rest.
    fn place_faults(&self, record: &VolumeRecord, asked: &[PathBuf]) -> Result<Faults> {
        let key = LockKey::Volume(record.id.clone());
        let mut faults = Faults::default();
        for _ in 0..2 {
            let state = self.shared.store.volume_state(&record.id)?;
            faults = self.look_at_places(record, &state, asked)?;
            if faults.is_empty()
                || self.shared.locks.is_held(&key)
                || self.shared.store.volume_state(&record.id)? != state
            {
                return Ok(Faults::default());
            }
        }
        Ok(faults)
    }

    fn look_at_places(
        &self,
        record: &VolumeRecord,
        state: &VolumeState,
        asked: &[PathBuf],
    ) -> Result<Faults> {
        let mut faults = Faults::default();
        let Some(staged) = &state.staged else { return Ok(faults) };
        let is_block = staged.access == AccessKind::Block;
        // Nothing is mounted at the staging path of a Block volume.
        let mounted = (!is_block).then_some(&staged.path);
        let published = state.published.iter().map(|published| &published.target);
        let is_asked = |path: &&PathBuf| asked.is_empty() || asked.contains(path);
        let places: Vec<&PathBuf> = mounted.into_iter().chain(published).filter(is_asked).collect();
        if places.is_empty() {
            return Ok(faults);
        }
        let Some(device) = LoopDevice::find(&self.shared.volume_data(&record.id))? else {
            faults.add(
                Reason::DeviceGone,
                "the volume has no device: it was detached, or lost in a reboot; stage it again",
            );
            return Ok(faults);
        };
        let mut shown = None;
        for place in places {
            match (shows(place, Some(&device))?, is_block) {
                (true, _) => shown = Some(place),
                (false, true) => {
                    let what =
                        format!("the volume's device is gone from {}: publish it again", place.display());
                    faults.add(Reason::DeviceGone, what);
                }
                (false, false) => {
                    let what =
                        format!("the volume is no longer mounted at {}: publish it again", place.display());
                    faults.add(Reason::NotMounted, what);
                }
            }
        }
        if let Some(place) = shown.filter(|_| !is_block) {
            look_at_filesystem(place, staged, &mut faults)?;
        }
        Ok(faults)
    }
}

/// Whether a mounted filesystem answers. One that was shut down still reports its size, so its root is read too.
pub(super) fn answers(place: &Path) -> files::Result<()> {
    std::fs::read_dir(place).and_then(|mut entries| entries.next().transpose()).context("list", place)?;
    sys::space(place).map(drop)
}

/// Adds what the kernel reports as wrong with the filesystem that is mounted at a place.
fn look_at_filesystem(place: &Path, staged: &Staged, faults: &mut Faults) -> Result<()> {
    if let Err(error) = answers(place) {
        let what = format!("the filesystem does not answer: {}", base::report(&error));
        faults.add(Reason::FilesystemShutDown, what);
        return Ok(());
    }
    let Some(mounted) = mount::mounted_at(place)? else { return Ok(()) };
    if mounted.super_read_only && !staged.read_only {
        faults.add(
            Reason::FilesystemReadOnly,
            "the kernel made the filesystem read-only after an error: see the kernel log",
        );
    }
    if let Some(errors) = mounted.errors()? {
        let what = format!("{} has counted errors, {errors} so far: check the filesystem", mounted.fs_type);
        faults.add(Reason::FilesystemErrors, what);
    }
    Ok(())
}
