//! What all parts of the driver share: the flags, the records, the pool and the locks on objects, and lookups and checks
//! that more than one part makes.

use std::collections::BTreeMap;
use std::fs::File;
use std::ops::Deref;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::driver::config::Config;
use crate::driver::error::{Error, Result};
use crate::driver::locks::{LockKey, OpGuard, OpLocks};
use crate::driver::ungrown;
use crate::pool::{Backend, OpenPool};
use crate::store::{Attached, LockedDir, SnapshotRecord, Store, VolumeRecord};
use base::VolumeId;
use files::{Context, change};

/// An open data directory.
#[derive(Debug)]
pub(super) struct Shared {
    pub(super) config: Config,
    /// The key of the data directory, which is part of every id made here.
    pub(super) key: base::DataDirKey,
    pub(super) open_pool: OpenPool,
    pub(super) store: Store,
    pub(super) locks: OpLocks,
    /// Held for its lock; dropped last.
    pub(super) _lock: LockedDir,
}

/// A locked volume. No other call works on it until this is dropped.
#[derive(Debug)]
pub(super) struct LockedVolume {
    pub(super) record: Arc<VolumeRecord>,
    pub(super) guard: OpGuard,
}

impl Deref for LockedVolume {
    type Target = VolumeRecord;

    fn deref(&self) -> &VolumeRecord {
        &self.record
    }
}

impl Shared {
    /// What the pool's bytes are stored with.
    pub(super) fn pool(&self) -> &dyn Backend {
        self.open_pool.backend()
    }

    /// The key and value that say which node holds the volumes.
    pub(super) fn topology(&self) -> BTreeMap<String, String> {
        let key = format!("topology.{}/node", self.config.driver_name);
        BTreeMap::from([(key, self.config.node_id.clone())])
    }

    /// Fails if none of the `requisite` topologies of a request is this node; an empty list allows any. `why` is the reason
    /// for the error message.
    pub(super) fn check_topology(&self, requisite: &[BTreeMap<String, String>], why: &str) -> Result<()> {
        let ours = self.topology();
        // A topology without our key does not name a node of ours.
        let fits = |asked: &BTreeMap<String, String>| {
            ours.iter().all(|(key, value)| asked.get(key).is_none_or(|asked| asked == value))
        };
        if requisite.is_empty() || requisite.iter().any(fits) {
            return Ok(());
        }
        Err(Error::Elsewhere(format!(
            "none of the requisite topologies is this node, {}: {why}",
            self.config.node_id
        )))
    }

    /// Fails if nothing new may be made: the disk below the pool is full, or the pool has no room for what a deletion needs.
    pub(super) fn check_room(&self) -> Result<()> {
        self.store.check_alive()?;
        match self.open_pool.host_is_full()? {
            Some(full) => Err(Error::Exhausted(full)),
            None => Ok(self.store.take_reserve()?),
        }
    }

    /// A volume by the id a client sent, which may be any string.
    pub(super) fn volume(&self, id: &str) -> Result<Arc<VolumeRecord>> {
        if id.is_empty() {
            return Err(Error::Missing { field: "volume_id" });
        }
        let Ok(parsed) = id.parse() else { return Err(Error::no_volume(id)) };
        match self.store.read(|index| index.volume(&parsed)) {
            Some(record) => Ok(record),
            None => {
                self.store.check_readable(id)?;
                Err(Error::no_volume(id))
            }
        }
    }

    /// Locks a volume by the id a client sent.
    pub(super) fn lock_volume(&self, id: &str) -> Result<LockedVolume> {
        self.lock_found(|| self.volume(id))
    }

    /// Locks the volume that `find` finds.
    pub(super) fn lock_found(&self, find: impl Fn() -> Result<Arc<VolumeRecord>>) -> Result<LockedVolume> {
        let guard = self.locks.take(LockKey::Volume(find()?.id.clone()))?;
        // It is looked up again, since it may have been deleted before the lock was taken.
        Ok(LockedVolume { record: find()?, guard })
    }

    /// The file of a volume's bytes.
    pub(super) fn volume_data(&self, id: &VolumeId) -> PathBuf {
        self.store.dir().volume(id).data()
    }

    /// Whether there is a volume of this id.
    pub(super) fn is_known(&self, id: &VolumeId) -> bool {
        self.store.read(|index| index.volume(id).is_some())
    }

    /// Undoes what an expansion or a growth that was interrupted left. No device is ever larger than the record says, so a file
    /// that is longer is cut to that, and no written data is lost. An expansion never leaves a file that is shorter.
    pub(super) fn undo_cut_expansion(&self, record: &LockedVolume) -> Result<()> {
        ungrown::undo(&self.store, &record.id)?;
        let path = self.volume_data(&record.id);
        let length = std::fs::metadata(&path).context("stat", &path)?.len();
        check_whole(&path, length, record.capacity)?;
        if length != record.capacity {
            tracing::warn!(volume_id = %record.id, length, capacity = record.capacity, "an expansion was cut short");
            let file = File::options().write(true).open(&path).context("open", &path)?;
            change::set_len(&file, &path, record.capacity)?;
            change::sync(&file, &path)?;
        }
        Ok(())
    }

    /// The node that a volume is attached to. Always `None` without `--enable-attach`: attachments that were made with the flag
    /// have no effect then.
    pub(super) fn attachment<'r>(&self, record: &'r VolumeRecord) -> Option<&'r Attached> {
        record.attached.as_ref().filter(|_| self.config.attach)
    }

    /// A snapshot by the id a client sent, which may be any string.
    pub(super) fn snapshot(&self, id: &str) -> Result<Arc<SnapshotRecord>> {
        self.snapshot_in("snapshot_id", id)
    }

    /// The same for an id in another field of the request.
    pub(super) fn snapshot_in(&self, field: &'static str, id: &str) -> Result<Arc<SnapshotRecord>> {
        if id.is_empty() {
            return Err(Error::Missing { field });
        }
        let Ok(parsed) = id.parse() else { return Err(Error::no_snapshot(id)) };
        match self.store.read(|index| index.snapshot(&parsed)) {
            Some(record) => Ok(record),
            None => {
                self.store.check_readable(id)?;
                Err(Error::no_snapshot(id))
            }
        }
    }
}

/// Fails if the end of an object's bytes is missing. A copy, or a device that is grown over it, would show zeros there as if they
/// had been written.
pub(super) fn check_whole(path: &Path, length: u64, capacity: u64) -> Result<()> {
    match length < capacity {
        true => Err(Error::Damaged(format!(
            "{} has {length} bytes of {capacity}: its end is missing; delete it, and restore what it held from a backup",
            path.display()
        ))),
        false => Ok(()),
    }
}
