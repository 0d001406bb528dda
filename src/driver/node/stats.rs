//! How full a volume is, and how it is, as the node sees it (`NodeGetVolumeStats`).

use std::os::unix::fs::MetadataExt;
use std::path::Path;

use super::{place, shows};
use crate::driver::condition::Condition;
use crate::driver::{Driver, Error, Result};
use crate::store::{AccessKind, VolumeRecord};
use crate::sys::loopdev::LoopDevice;
use crate::sys::{self, mount};
use files::Context;

/// A volume's use, in bytes or inodes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Usage {
    /// All there is.
    pub total: u64,
    /// What is in use.
    pub used: u64,
    /// What can still be used.
    pub available: u64,
}

/// What a look at a volume found.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Stats {
    /// Bytes; `None` where the filesystem does not answer.
    pub bytes: Option<Usage>,
    /// Inodes; `None` for a Block volume, and for a filesystem that has no limit.
    pub inodes: Option<Usage>,
    /// How it is.
    pub condition: Condition,
}

impl Driver {
    /// Looks at a volume that is staged or published at `volume_path`. Takes no lock: it is asked for
    /// every minute, also during a snapshot.
    pub fn stats(&self, volume_id: &str, volume_path: &Path) -> Result<Stats> {
        if volume_id.is_empty() {
            return Err(Error::Missing { field: "volume_id" });
        }
        if volume_path.as_os_str().is_empty() {
            return Err(Error::Missing { field: "volume_path" });
        }
        let record = self.volume_or_ephemeral(volume_id)?;
        match self.look_at(&record, volume_path) {
            // Deleted under the look: without a lock that can be.
            Err(_) if !self.store.dir().volume(&record.id).record().exists() => {
                Err(Error::no_volume(volume_id))
            }
            stats => stats,
        }
    }

    fn look_at(&self, record: &VolumeRecord, volume_path: &Path) -> Result<Stats> {
        let state = self.store.volume_state(&record.id)?;
        let (path, staged) = place(&state, volume_path)?;
        let data = self.volume_data(&record.id);
        let device = LoopDevice::find(&data)?;
        if staged.access == AccessKind::Block {
            let allocated = std::fs::metadata(&data).context("stat", &data)?.blocks() * 512;
            let used = allocated.min(record.capacity);
            let bytes = Usage { total: record.capacity, used, available: record.capacity - used };
            let published = state.published.iter().any(|published| published.target == path);
            let condition = match published && !shows(&path, device.as_ref())? {
                true => Condition::abnormal(format!("the volume's device is gone from {}", path.display())),
                false => Condition::normal("the volume's device is there"),
            };
            return Ok(Stats { bytes: Some(bytes), inodes: None, condition });
        }
        let Some(device) = device else {
            let condition =
                Condition::abnormal("the volume has no device: it was lost in a reboot, stage again".into());
            return Ok(Stats { bytes: None, inodes: None, condition });
        };
        if !shows(&path, Some(&device))? {
            let what = format!("the volume is not mounted at {} any more: publish it again", path.display());
            return Ok(Stats { bytes: None, inodes: None, condition: Condition::abnormal(what) });
        }
        // The root is looked at as well: a filesystem that was shut down still tells its size.
        let answers = std::fs::metadata(&path).context("stat", &path);
        let space = match answers.and_then(|_| sys::space(&path)) {
            Ok(space) => space,
            Err(error) => {
                let what = format!("the filesystem does not answer: {}", base::report(&error));
                return Ok(Stats { bytes: None, inodes: None, condition: Condition::abnormal(what) });
            }
        };
        let bytes = Usage { total: space.total, used: space.used, available: space.available };
        let sys::Inodes { total, available } = space.inodes;
        let inodes = Usage { total, used: total.saturating_sub(available), available };
        Ok(Stats {
            bytes: Some(bytes),
            inodes: (total > 0).then_some(inodes),
            condition: filesystem_condition(&device, &staged.path, staged.read_only)?,
        })
    }
}

/// What the kernel found wrong with a mounted filesystem, if anything.
fn filesystem_condition(device: &LoopDevice, staging: &Path, read_only: bool) -> Result<Condition> {
    if let Some(mounted) = mount::mounted_at(staging)?
        && mounted.super_read_only
        && !read_only
    {
        return Ok(Condition::abnormal(
            "the kernel made the filesystem read-only after an error: see its log".into(),
        ));
    }
    let name = device.path().file_name().map(|name| name.to_owned()).unwrap_or_default();
    let counter = Path::new("/sys/fs/ext4").join(name).join("errors_count");
    let errors = std::fs::read_to_string(counter).ok().and_then(|text| text.trim().parse::<u64>().ok());
    match errors {
        Some(errors) if errors > 0 => {
            Ok(Condition::abnormal(format!("ext4 has counted {errors} errors: run fsck")))
        }
        _ => Ok(Condition::normal("the volume's filesystem is mounted and answers")),
    }
}
