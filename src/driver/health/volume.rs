//! What is wrong with volumes and with the storage below them, as the controller sees it (`ControllerGetVolumeHealth`,
//! `ControllerListVolumeHealth`, `NodeGetStorageHealth`): records, files, the pool. `node/health.rs` checks volumes in
//! use on the node.
//!
//! A fault is reported as long as it can be found. Only the offset of a failed read is remembered, and each call reads
//! there again.

use std::collections::BTreeMap;
use std::io;
use std::sync::Arc;

use crate::driver::error::{Error, Result};
use crate::driver::health::read_errors::{ReadErrors, first_unreadable};
use crate::driver::locks::LockKey;
use crate::driver::request::page::PageRequest;
use crate::driver::shared::Shared;
use crate::pool;
use crate::store::{self, VolumeRecord};
use base::{ByteRange, VolumeId};

/// Entries of a page at most: each has a few messages of [`MESSAGE`] bytes at most, so it stays under gRPC's 4 MiB.
const MAX_PAGE: usize = 1000;
/// Bytes of a message at most. Kubernetes refuses more than 1024.
const MESSAGE: usize = 512;
/// What kind of trouble a volume is in (`VolumeHealthErrorType`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Trouble {
    /// It can be used, though not as well as it should.
    Degraded,
    /// It cannot be used.
    Inaccessible,
    /// Some of its data is gone.
    DataLoss,
}

/// What is wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Reason {
    /// The volume's record cannot be read, or its `state.json`.
    RecordUnreadable,
    /// The volume's file is missing.
    FileMissing,
    /// The file is shorter than the volume.
    FileTruncated,
    /// The file does not answer.
    FileUnreadable,
    /// Some of the file cannot be read.
    ReadError,
    /// The pool is not mounted.
    PoolNotMounted,
    /// The kernel has shut the pool's filesystem down.
    PoolShutDown,
    /// The pool's filesystem is read-only.
    PoolReadOnly,
    /// A write to the pool fails for another reason, or the file of its image cannot be read.
    PoolWriteError,
    /// The pool, or the disk below its image, is about to be full.
    PoolShortOfSpace,
    /// The file of the pool's image is shorter than the pool.
    PoolImageTruncated,
    /// The pool's filesystem has counted I/O errors.
    PoolIoErrors,
    /// Writes go through a page cache.
    NoDirectIo,
    /// The volume is in use, and its device is not there.
    DeviceGone,
    /// The volume's filesystem is not mounted where it should be.
    NotMounted,
    /// The volume's filesystem does not answer.
    FilesystemShutDown,
    /// The kernel has made the volume's filesystem read-only.
    FilesystemReadOnly,
    /// The volume's filesystem has counted errors.
    FilesystemErrors,
}

impl Reason {
    /// Its name for programs, which is part of the interface, and the trouble that it means for a volume.
    pub fn parts(self) -> (&'static str, Trouble) {
        use Trouble::{DataLoss, Degraded, Inaccessible};
        match self {
            Reason::RecordUnreadable => ("RecordUnreadable", Inaccessible),
            Reason::FileMissing => ("FileMissing", DataLoss),
            Reason::FileTruncated => ("FileTruncated", DataLoss),
            Reason::FileUnreadable => ("FileUnreadable", Inaccessible),
            Reason::ReadError => ("ReadError", DataLoss),
            Reason::PoolNotMounted => ("PoolNotMounted", Inaccessible),
            Reason::PoolShutDown => ("PoolShutDown", Inaccessible),
            Reason::PoolReadOnly => ("PoolReadOnly", Degraded),
            Reason::PoolWriteError => ("PoolWriteError", Degraded),
            Reason::PoolShortOfSpace => ("PoolShortOfSpace", Degraded),
            Reason::PoolImageTruncated => ("PoolImageTruncated", DataLoss),
            Reason::PoolIoErrors => ("PoolIoErrors", Degraded),
            Reason::NoDirectIo => ("NoDirectIO", Degraded),
            Reason::DeviceGone => ("DeviceGone", Inaccessible),
            Reason::NotMounted => ("NotMounted", Inaccessible),
            Reason::FilesystemShutDown => ("FilesystemShutDown", Inaccessible),
            Reason::FilesystemReadOnly => ("FilesystemReadOnly", Degraded),
            Reason::FilesystemErrors => ("FilesystemErrors", Degraded),
        }
    }
}

/// A fault, with a message.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Fault {
    /// For programs.
    pub reason: Reason,
    /// For people.
    pub message: String,
}

/// A volume, and what is wrong with it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VolumeHealth {
    /// The id in the request.
    pub volume_id: String,
    /// Empty if no fault is known. No reason occurs twice.
    pub faults: Vec<Fault>,
}

/// The faults found so far, each reason once.
#[derive(Clone, Debug, Default)]
pub(in crate::driver) struct Faults(BTreeMap<Reason, String>);

impl Faults {
    pub(in crate::driver) fn add(&mut self, reason: Reason, message: impl AsRef<str>) {
        let all = self.0.entry(reason).or_default();
        if !all.is_empty() {
            all.push_str("; ");
        }
        all.push_str(message.as_ref());
    }

    /// Whether any of them makes volumes inaccessible.
    pub(in crate::driver) fn cut_off(&self) -> bool {
        self.0.keys().any(|reason| reason.parts().1 == Trouble::Inaccessible)
    }

    pub(in crate::driver) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    pub(in crate::driver) fn append(&mut self, other: Faults) {
        other.0.into_iter().for_each(|(reason, message)| self.add(reason, message));
    }

    pub(in crate::driver) fn into_vec(self) -> Vec<Fault> {
        let fault = |(reason, message)| Fault { reason, message: cut(message) };
        self.0.into_iter().map(fault).collect()
    }
}

/// Cuts a message to [`MESSAGE`] bytes.
fn cut(mut message: String) -> String {
    const REST: &str = "...";
    if message.len() > MESSAGE {
        let ends = (0..=MESSAGE - REST.len()).rev().find(|at| message.is_char_boundary(*at));
        message.truncate(ends.unwrap_or(0));
        message.push_str(REST);
    }
    message
}

/// Finds what is wrong with volumes and the pool.
#[derive(Debug)]
pub struct Health {
    pub(in crate::driver) shared: Arc<Shared>,
    pub(in crate::driver) read_errors: Arc<ReadErrors>,
    /// What to report about a pool without direct I/O.
    pub(in crate::driver) cached: Option<&'static str>,
}

impl Health {
    /// The faults of a volume, as the controller sees it.
    pub fn of(&self, volume_id: &str) -> Result<VolumeHealth> {
        let faults = match self.shared.volume(volume_id) {
            Ok(record) => self.of_volume(&record, &self.of_pool()),
            Err(Error::Store(error @ store::Error::Withheld { .. })) => withheld(&error),
            Err(error) => return Err(error),
        };
        Ok(VolumeHealth { volume_id: volume_id.to_owned(), faults: faults.into_vec() })
    }

    /// Lists the volumes with faults, including those whose record cannot be read. Also returns the token of the next page,
    /// empty after the last.
    pub fn list(&self, request: &PageRequest) -> Result<(Vec<VolumeHealth>, String)> {
        let (limit, after) = (request.limit()?.min(MAX_PAGE), request.after::<VolumeId>()?);
        self.shared.store.check_alive()?;
        let pool = self.of_pool();
        let records: Vec<Arc<VolumeRecord>> = self.shared.store.read(|index| {
            // Ephemeral volumes are known to kubelet only.
            let listed = index.volumes_after(after.as_ref()).filter(|record| record.ephemeral.is_none());
            listed.cloned().collect()
        });
        let is_behind = |id: &VolumeId| after.as_ref().is_none_or(|after| id > after);
        let volumes = self.shared.store.dir().volumes();
        let damaged = self.shared.store.damaged().iter().filter_map(|damage| {
            let name = damage.path.strip_prefix(&volumes).ok()?.to_str()?;
            name.parse::<VolumeId>().ok().filter(is_behind)
        });
        let readable = records.into_iter().map(|record| (record.id.clone(), Some(record)));
        let mut all: Vec<_> = readable.chain(damaged.map(|id| (id, None))).collect();
        all.sort_unstable_by(|(a, _), (b, _)| a.cmp(b));
        let mut entries: Vec<VolumeHealth> = Vec::new();
        for (id, record) in all {
            let faults = match (record, self.shared.store.check_readable(id.as_str())) {
                (Some(record), _) => self.of_volume(&record, &pool),
                (None, Err(error)) => withheld(&error),
                (None, Ok(())) => Faults::default(),
            };
            if faults.is_empty() {
                continue;
            }
            if let Some(last) = entries.last().filter(|_| entries.len() == limit) {
                let next_token = last.volume_id.clone();
                return Ok((entries, next_token));
            }
            entries.push(VolumeHealth { volume_id: id.to_string(), faults: faults.into_vec() });
        }
        Ok((entries, String::new()))
    }

    /// The number of volumes with faults of their own. `None` while the pool shows no files.
    pub(in crate::driver) fn unhealthy(&self) -> Option<usize> {
        if self.of_pool().cut_off() {
            return None;
        }
        let records: Vec<_> = self.shared.store.read(|index| index.volumes_after(None).cloned().collect());
        let is_unhealthy =
            |record: &&Arc<VolumeRecord>| !self.of_volume(record, &Faults::default()).is_empty();
        Some(records.iter().filter(is_unhealthy).count())
    }

    /// The faults of this node's storage: the pool and the disk below it.
    pub fn of_storage(&self) -> Vec<Fault> {
        let mut faults = self.of_pool();
        if !faults.cut_off() {
            match self.shared.open_pool.errors() {
                Ok(Some(errors)) => faults.add(
                    Reason::PoolIoErrors,
                    format!(
                        "the filesystem of the pool has counted errors, {errors} so far: see the kernel log"
                    ),
                ),
                Ok(None) => {}
                Err(error) => tracing::warn!(error = base::report(&error), "the pool's errors are not known"),
            }
            if let Some(cached) = self.cached {
                faults.add(Reason::NoDirectIo, cached);
            }
        }
        faults.into_vec()
    }

    /// The faults of the pool, which affect every volume.
    pub(in crate::driver) fn of_pool(&self) -> Faults {
        let mut faults = Faults::default();
        if let Err(error) = self.shared.open_pool.check() {
            let reason = match &error {
                pool::Error::NotMounted(_) => Reason::PoolNotMounted,
                _ if self.shared.open_pool.is_dead() => Reason::PoolShutDown,
                pool::Error::Sys(error) if error.errno() == Some(libc::EROFS) => Reason::PoolReadOnly,
                _ => Reason::PoolWriteError,
            };
            faults.add(reason, Error::from(error).explain(&self.shared.config.data_dir));
        }
        match self.shared.open_pool.image_cut_short() {
            Ok(Some(what)) => faults.add(Reason::PoolImageTruncated, what),
            Ok(None) => {}
            Err(error) => faults.add(Reason::PoolWriteError, base::report(&error)),
        }
        // If the pool is dead or not mounted, the space found there is not the pool's.
        if !faults.cut_off() {
            match self.shared.open_pool.shortage() {
                Ok(Some(shortage)) => {
                    faults.add(Reason::PoolShortOfSpace, format!("{shortage}: writes will fail"))
                }
                Ok(None) => {}
                Err(error) => faults.add(Reason::PoolWriteError, base::report(&error)),
            }
        }
        faults
    }

    /// The faults of a volume, including those of the pool.
    pub(in crate::driver) fn of_volume(&self, record: &VolumeRecord, pool: &Faults) -> Faults {
        let mut faults = pool.clone();
        // A pool that is not mounted shows no files, but no data is lost.
        if !pool.cut_off() {
            self.look_at_bytes(record, &mut faults);
        }
        faults
    }

    fn look_at_bytes(&self, record: &VolumeRecord, faults: &mut Faults) {
        let path = self.shared.volume_data(&record.id);
        match std::fs::metadata(&path) {
            // No lock is held, so it may have been deleted meanwhile.
            Err(_)
                if self.shared.locks.is_held(&LockKey::Volume(record.id.clone()))
                    || !self.shared.is_known(&record.id) => {}
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                faults.add(Reason::FileMissing, format!("{} is missing", path.display()));
            }
            Err(error) => {
                faults.add(Reason::FileUnreadable, format!("{} cannot be read: {error}", path.display()));
            }
            Ok(meta) if meta.len() < record.capacity => faults.add(
                Reason::FileTruncated,
                format!(
                    "{} has {} bytes of {}: its end is missing",
                    path.display(),
                    meta.len(),
                    record.capacity
                ),
            ),
            Ok(_) => {}
        }
        let Some(range) = self.read_errors.of(&record.id) else { return };
        match first_unreadable(&path, range) {
            Ok(Some((at, error))) => {
                self.read_errors.set(&record.id, Some(ByteRange { start: at, ..range }));
                faults.add(
                    Reason::ReadError,
                    format!(
                        "{} cannot be read at byte {at}: {error}; take a backup of the rest, and write the block \
                         again or restore the volume",
                        path.display()
                    ),
                );
            }
            // The block was written again, or only a snapshot has it.
            Ok(None) => self.read_errors.forget(&record.id),
            Err(error) => {
                tracing::warn!(volume_id = %record.id, error = base::report(&error), "not looked at")
            }
        }
    }
}

pub(in crate::driver) fn withheld(error: &store::Error) -> Faults {
    let mut faults = Faults::default();
    faults.add(Reason::RecordUnreadable, base::report(error));
    faults
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_reason_is_given_once_and_no_message_is_too_long() {
        let mut faults = Faults::default();
        faults.add(Reason::NotMounted, "not at a");
        faults.add(Reason::NotMounted, "not at b");
        faults.add(Reason::ReadError, "\u{e4}".repeat(1000));
        assert!(faults.cut_off());
        let faults = faults.into_vec();
        let reasons: Vec<_> = faults.iter().map(|fault| fault.reason.parts().0).collect();
        assert_eq!(reasons, ["ReadError", "NotMounted"]);
        assert_eq!(faults[1].message, "not at a; not at b");
        let long = &faults[0].message;
        assert!(long.len() <= MESSAGE && long.len() > MESSAGE - 6 && long.ends_with("..."), "{long}");
    }
}
