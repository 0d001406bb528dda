//! Volumes that are still copied from another node. Each is in `staging/`, and its `transfer.json` is the record that it will
//! have: while that and the bytes are there, a start leaves it alone. It is not a volume yet, and in no index.

use std::path::Path;
use std::sync::Arc;

use super::{Draft, Result, Store, encode, entries, read_optional};
use crate::store::VolumeRecord;
use crate::sys::slots;
use base::{ObjectDir, VolumeId};
use files::durable;

impl Store {
    /// Makes a draft survive the end of the driver.
    ///
    /// 1. What is in `bytes/` was synced by the pool.
    /// 2. Write and sync `transfer.json`, and its directory: before it a start removes the draft, after it it keeps it.
    pub fn begin_transfer(&self, draft: &Draft, record: &VolumeRecord) -> Result<()> {
        durable::create(&draft.dir.transfer(), &encode(record))?;
        Ok(durable::sync_dir(&self.dir.staging())?)
    }

    /// The transfers that an earlier driver began and did not end.
    pub fn transfers(&self) -> Result<Vec<VolumeRecord>> {
        Ok(entries(&self.dir.staging())?.iter().filter_map(|path| read(path)).collect())
    }

    /// The files of a transfer. The caller makes sure that there is one at a time.
    pub fn transfer_draft(&self, id: &VolumeId) -> Draft {
        self.draft_at(ObjectDir::new(self.dir.staging().join(id.as_str())))
    }

    /// Makes a volume of a transfer whose bytes are whole and synced.
    ///
    /// 1. Make the state, and make `transfer.json` the record. A crash from here on leaves a draft, removed at start: the
    ///    caller got no answer, and transfers it again.
    /// 2. Rename it into place: this is the commit, as of all volumes.
    pub fn commit_transfer(&self, mut draft: Draft, record: VolumeRecord) -> Result<Arc<VolumeRecord>> {
        // One that a crash left between these steps.
        durable::remove(&draft.dir.state())?;
        slots::create(&draft.dir.state())?;
        durable::rename(&draft.dir.transfer(), &draft.dir.record())?;
        durable::rename(draft.dir.path(), self.dir.volume(&record.id).path())?;
        draft.committed = true;
        let record = Arc::new(record);
        self.write(|index| index.add_volume(record.clone()));
        Ok(record)
    }

    /// Ends a transfer that is not wanted any more.
    ///
    /// 1. Remove `transfer.json`: from here on a start removes the rest.
    /// 2. Remove the rest, when the draft is dropped.
    pub fn end_transfer(&self, draft: &Draft) -> Result<()> {
        Ok(self.reserve.spend(|| durable::remove(&draft.dir.transfer()))?)
    }
}

/// The record of the transfer in this directory; `None` where it holds none that could continue.
pub(super) fn read(path: &Path) -> Option<VolumeRecord> {
    let dir = ObjectDir::new(path);
    let record: VolumeRecord = match read_optional(&dir.transfer()) {
        Ok(record) => record?,
        Err(error) => {
            let error = base::report(&error);
            tracing::warn!(path = %path.display(), error, "a transfer cannot continue");
            return None;
        }
    };
    let is_named = path.file_name().is_some_and(|name| name == record.id.as_str());
    let has_bytes = std::fs::metadata(dir.data()).is_ok_and(|data| data.len() == record.capacity);
    (is_named && has_bytes).then_some(record)
}
