//! How full a volume is (`NodeGetVolumeStats`). What is wrong with it is reported by `health.rs`.

use std::os::unix::fs::MetadataExt;
use std::path::Path;

use crate::driver::devices::attached::shows;
use crate::driver::error::{Error, Result};
use crate::driver::node::used::{Node, no_volume_at, place};
use crate::store::{AccessKind, VolumeRecord};
use crate::sys;
use crate::sys::loopdev::LoopDevice;
use files::Context;

/// A volume's use, in bytes or inodes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Usage {
    /// In use or not.
    pub total: u64,
    /// In use.
    pub used: u64,
    /// Can still be used.
    pub available: u64,
}

/// How full a volume is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Stats {
    /// Bytes.
    pub bytes: Usage,
    /// Inodes; `None` for a Block volume, and for a filesystem that has no limit.
    pub inodes: Option<Usage>,
}

impl Node {
    /// Measures a volume that is staged or published at `volume_path`. Takes no lock, since kubelet calls it every
    /// minute, also during a snapshot.
    pub fn stats(&self, volume_id: &str, volume_path: &Path) -> Result<Stats> {
        if volume_id.is_empty() {
            return Err(Error::Missing { field: "volume_id" });
        }
        if volume_path.as_os_str().is_empty() {
            return Err(Error::Missing { field: "volume_path" });
        }
        let record = self.volume_or_ephemeral(volume_id)?;
        match self.look_at(&record, volume_path) {
            // No lock is held, so it may have been deleted meanwhile.
            Err(_) if !self.shared.store.dir().volume(&record.id).record().exists() => {
                Err(Error::no_volume(volume_id))
            }
            stats => stats,
        }
    }

    fn look_at(&self, record: &VolumeRecord, volume_path: &Path) -> Result<Stats> {
        let state = self.shared.store.volume_state(&record.id)?;
        let (path, staged) = place(&state, volume_path)?;
        let data = self.shared.volume_data(&record.id);
        if staged.access == AccessKind::Block {
            let allocated = std::fs::metadata(&data).context("stat", &data)?.blocks() * 512;
            let used = allocated.min(record.capacity);
            let bytes = Usage { total: record.capacity, used, available: record.capacity - used };
            return Ok(Stats { bytes, inodes: None });
        }
        // Otherwise the figures would be those of another filesystem.
        if !shows(&path, LoopDevice::find(&data)?.as_ref())? {
            return Err(no_volume_at(volume_path));
        }
        // No lock is held, so it may have been unpublished meanwhile.
        let gone_or = |error: files::Error| match error.is_not_found() {
            true => no_volume_at(volume_path),
            false => error.into(),
        };
        // A filesystem that was shut down still reports its size, so its root is read too.
        std::fs::metadata(&path).context("stat", &path).map_err(gone_or)?;
        let space = sys::space(&path).map_err(gone_or)?;
        let bytes = Usage { total: space.total, used: space.used, available: space.available };
        let sys::Inodes { total, available } = space.inodes;
        let inodes = Usage { total, used: total.saturating_sub(available), available };
        Ok(Stats { bytes, inodes: (total > 0).then_some(inodes) })
    }
}
