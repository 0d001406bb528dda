//! Reads a data directory, whether a driver serves it or not.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use crate::driver::error::{Error, Result};
use crate::driver::start::known_pool;
use crate::pool::{OpenPool, PoolRequest};
use crate::store::{self, LockedDir, Manifest, SnapshotRecord, Store};
use base::{DataDir, ObjectDir, SnapshotId, Stop};
use cbt::{self, Finding, MapFile, Progress};

/// The objects of a data directory, read-only.
#[derive(Debug)]
pub struct Inspection {
    dir: DataDir,
    store: Store,
    /// The pool, mounted for the inspection, and the lock; `None` if a running driver has both.
    own: Option<(OpenPool, LockedDir)>,
}

/// A snapshot to be read.
#[derive(Clone, Debug)]
pub struct Inspected {
    /// The snapshot.
    pub record: Arc<SnapshotRecord>,
    /// Bytes of its blocks that hold data.
    pub bytes: u64,
    /// Bytes of those blocks that have no hash: not yet, or because changes are not tracked.
    pub unhashed: u64,
}

impl Inspection {
    /// Opens a data directory. Without a running driver its pool is mounted, and unmounted by
    /// [`Inspection::close`].
    pub fn open(path: &Path) -> Result<Self> {
        let nothing =
            || Error::Precondition(format!("{} is not a data directory of deltapath", path.display()));
        let path = path.canonicalize().map_err(|_| nothing())?;
        let dir = DataDir::new(&path);
        let Some(manifest) = Manifest::read(&dir)? else { return Err(nothing()) };
        let locked = match LockedDir::lock(dir.clone(), Duration::ZERO) {
            Err(store::Error::Locked(_)) if dir.pool().volumes().exists() => {
                return Ok(Inspection { store: Store::survey(dir.pool())?, dir, own: None });
            }
            Err(store::Error::Locked(_)) => {
                return Err(Error::Precondition(format!(
                    "a driver serves {} and its pool is not mounted here: run this where the driver runs, in \
                     its container",
                    path.display()
                )));
            }
            locked => locked?,
        };
        let request = PoolRequest { kind: None, size: None };
        let known = known_pool(&locked, &manifest, request)?;
        let open_pool = OpenPool::open(&dir, request, Some(known))?;
        match Store::survey(open_pool.dir().clone()) {
            Ok(store) => Ok(Inspection { dir, store, own: Some((open_pool, locked)) }),
            Err(error) => {
                open_pool.close()?;
                Err(error.into())
            }
        }
    }

    /// Unmounts the pool, if [`Inspection::open`] mounted it.
    pub fn close(self) -> Result<()> {
        if let Some((open_pool, _locked)) = self.own {
            open_pool.close()?;
        }
        Ok(())
    }

    /// Whether a driver serves it.
    pub fn is_served(&self) -> bool {
        self.own.is_none()
    }

    pub(in crate::driver) fn data_dir(&self) -> &DataDir {
        &self.dir
    }

    pub(in crate::driver) fn store(&self) -> &Store {
        &self.store
    }

    /// The numbers of volumes, of snapshots, and of retained deleted snapshots.
    pub fn counts(&self) -> (usize, usize, usize) {
        self.store.read(|index| (index.volume_count(), index.snapshot_count(), index.retained_count()))
    }

    /// The snapshots, and how much data each has to read.
    pub fn snapshots(&self) -> Vec<Inspected> {
        let all: Vec<_> = self.store.read(|index| index.snapshots_after(None).cloned().collect());
        let inspected = |record: Arc<SnapshotRecord>| {
            let dir = self.store.snapshot_dir(&record);
            let count = |path: &Path| MapFile::open(path).and_then(|map| map.count());
            let blocks = count(&dir.allocated()).unwrap_or(0);
            let unhashed = if record.tracking { count(&dir.pending()).unwrap_or(blocks) } else { blocks };
            let size = record.block_size.bytes();
            Inspected { bytes: blocks * size, unhashed: unhashed * size, record }
        };
        all.into_iter().map(inspected).collect()
    }

    /// The objects whose records cannot be read, with the reason.
    pub fn unreadable(&self) -> Vec<(String, String)> {
        let described =
            |damage: &store::Damage| (damage.path.display().to_string(), base::report(&damage.error));
        self.store.damaged().iter().map(described).collect()
    }

    /// Compares a snapshot's maps and hashes with its data. `Ok(None)` if it was deleted meanwhile.
    pub fn verify(
        &self,
        id: &SnapshotId,
        progress: Progress<'_>,
        stop: &Stop,
    ) -> Result<Option<Vec<Finding>>> {
        let Some(record) = self.store.read(|index| index.snapshot(id)) else { return Ok(None) };
        let dir = self.store.snapshot_dir(&record);
        let found = match record.tracking {
            true => cbt::scrub(&dir, record.block_size, progress, stop).and_then(|mut found| {
                found.extend(self.verify_links(&dir, stop)?);
                Ok(found)
            }),
            // Without tracking it has no hashes.
            false => cbt::check_maps(&dir, record.block_size, record.capacity, false),
        };
        match found {
            // It was deleted meanwhile.
            Err(cbt::Error::Sys(error)) if error.is_not_found() && self.store.is_gone(&record) => Ok(None),
            found => Ok(Some(found?)),
        }
    }

    /// Compares a snapshot with those that its `changed` and skip maps are relative to.
    fn verify_links(&self, dir: &ObjectDir, stop: &Stop) -> cbt::Result<Vec<Finding>> {
        let mut found = Vec::new();
        for path in [dir.changed()].into_iter().chain(ObjectDir::SKIPS.map(|level| dir.skip(level))) {
            let map = match MapFile::open_sound(&path) {
                Err(cbt::Error::Sys(error)) if error.is_not_found() => continue,
                map => map?,
            };
            let Some(map) = map else { continue };
            let relation = map.header().relative_to.as_ref();
            let base = relation.and_then(|it| self.store.read(|index| index.known(&it.snapshot)));
            let Some(base) = base else { continue };
            match cbt::check_changed(&self.store.snapshot_dir(&base), dir, &map, stop) {
                Ok(lacking) => found.extend(lacking),
                Err(cbt::Error::Stopped(stopped)) => return Err(stopped.into()),
                // The base was removed meanwhile, or what is damaged here is reported already.
                Err(cbt::Error::Sys(error)) if error.is_not_found() => {}
                Err(cbt::Error::Damaged { path, .. }) if path.starts_with(dir.path()) => {}
                Err(error) => {
                    let name = path.file_name().unwrap_or_default().to_string_lossy();
                    let what = format!("{name} was not compared with {}: {}", base.id, base::report(&error));
                    found.push(Finding { what, range: None });
                }
            }
        }
        Ok(found)
    }
}
