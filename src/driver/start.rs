//! What a start does, in order. Each step can be cut short by a crash and is made again by the next start; what a dead
//! driver left half done is undone before the first call is served, so that no call meets it.

use std::sync::Arc;

use super::capacity::Reserved;
use super::choices::Choices;
use super::locks::{Key, OpLocks};
use super::transfer::{Sources, Transfers};
use super::{Config, Driver, Error, Result, hashing, health};
use crate::pool::{Known, OpenPool, PoolRequest};
use crate::store::{Claim, Manifest, SnapshotRecord, Store};
use base::DataDir;
use files::Context;
use files::durable::{self, LOCK_PATIENCE};

impl Driver {
    /// Opens a data directory, making it where there is none.
    ///
    /// 1. Lock the directory: nobody else serves it from here on.
    /// 2. Read what it was made with. Another driver name or pool is refused before anything is touched.
    /// 3. Open the pool (`pool/open_pool.rs`): choose and make it in a new directory; attach and mount its image, where a
    ///    dead driver has not left it so; mount one anew that takes no writes any more.
    /// 4. In a new directory, write down what it is. Last, so that a start that is cut short begins again.
    /// 5. Empty `staging/`, save of transfers, and read all records (`store/mod.rs`). What cannot be read is reported and withheld. A pool whose
    ///    filesystem is dead has none: pods can still be ended on it.
    /// 6. Thaw what a dead driver left frozen (`quiesce.rs`): somebody may be waiting for it.
    /// 7. Undo what a copy that was cut short left set on volumes (`quiesce.rs`).
    /// 8. Remove inline volumes that were made and never published (`node/ephemeral.rs`): kubelet need not ask again.
    /// 9. Note the transfers that a dead driver has begun: each goes on with the next CreateVolume (`transfer/mod.rs`).
    ///
    /// Afterwards the hashing thread takes up what is not hashed (`take_up_hashing`), and calls are served. What
    /// an expansion that was cut short left is undone when the volume is used next (`expand.rs`, `truncate_to_record`);
    /// devices and mounts are looked up by each call.
    pub fn open(mut config: Config) -> Result<Self> {
        let claim = Claim::take(DataDir::new(&config.data_dir), LOCK_PATIENCE)?;
        // The pool's mount is found by path, so the path must be the one the kernel shows.
        config.data_dir = config.data_dir.canonicalize().context("resolve", &config.data_dir)?;
        let data_dir = DataDir::new(&config.data_dir);

        let manifest = claim.manifest()?;
        let known = match &manifest {
            Some(Manifest { driver_name, .. }) if *driver_name != config.driver_name => {
                return Err(claim.mismatch("--driver-name", driver_name, &config.driver_name).into());
            }
            Some(manifest) => Some(known_pool(&claim, manifest, config.pool)?),
            None => None,
        };

        let key = match &manifest {
            Some(manifest) => manifest.key,
            None => base::Key::random().context("draw a key from", "/dev/random".as_ref())?,
        };

        let open_pool = OpenPool::open(&data_dir, config.pool, known)?;
        let new = manifest.is_none().then_some(key);
        let store = match open_store(&config, &claim, new, &open_pool) {
            Ok(store) => store,
            Err(error) => {
                // Nobody is left who would unmount the pool.
                if let Err(error) = open_pool.close() {
                    tracing::warn!(error = base::report(&error), "the pool stays mounted");
                }
                return Err(error);
            }
        };
        // A full pool takes no scratch file.
        let cached = open_pool.cached().unwrap_or_default();
        if let Some(cached) = cached {
            tracing::warn!("{cached}");
        }
        let transfer_rate = config.transfer_rate;
        let driver = Driver {
            config,
            key,
            open_pool,
            store,
            cached,
            choices: Choices::default(),
            locks: OpLocks::default(),
            promised: Reserved::default(),
            attaching: Reserved::default(),
            hashing: hashing::Hashing::default(),
            streams: Arc::default(),
            transfers: Transfers::new(transfer_rate),
            sources: Sources::default(),
            suspects: health::Suspects::default(),
            _claim: claim,
        };
        driver.thaw_leftovers();
        driver.end_cut_copies();
        driver.remove_unplaced();
        match driver.store.transfers() {
            Ok(records) => driver.transfers.take_up(records),
            Err(error) => {
                tracing::warn!(error = base::report(&error), "transfers that were cut are not gone on with");
            }
        }
        tracing::info!(
            data_dir = %driver.config.data_dir.display(),
            key = %driver.key,
            pool = %driver.open_pool.pool().kind(),
            place = driver.open_pool.describe(),
            volumes = driver.store.read(|index| index.volume_count()),
            snapshots = driver.store.read(|index| index.snapshot_count()),
            unreadable = driver.store.damaged().len(),
            "data directory opened"
        );
        Ok(driver)
    }

    /// Removes maps that the last driver did not write to their end, and queues what it left to be hashed or compared. The
    /// hashing thread does so first, beside calls: it reads a map of each snapshot.
    pub(super) fn take_up_hashing(&self) {
        let volumes: Vec<_> = self.store.read(|index| index.lines().cloned().collect());
        for volume in volumes {
            let line: Vec<_> = self.store.read(|index| index.line(&volume).cloned().collect());
            for record in &line {
                self.remove_drafts(record);
                if !record.tracking {
                    continue;
                }
                let bytes = self.pending_bytes(record);
                if bytes > 0 || self.is_to_compare(record) {
                    self.hashing.add(record, bytes);
                }
            }
            if self.hashing.stop.check().is_err() {
                return;
            }
        }
    }

    /// Removes maps that the last driver did not write to their end, and that nobody may write again.
    fn remove_drafts(&self, record: &SnapshotRecord) {
        let Ok(_map) = self.locks.wait_until(Key::Map(record.id.clone()), &self.hashing.stop) else { return };
        let _history = self.history([&record.volume]);
        let dir = self.store.snapshot_dir(record);
        for (map, end) in [
            (dir.allocated(), "map.new"),
            (dir.allocated(), "map.checked"),
            (dir.pending(), "map.new"),
            (dir.changed(), "map.new"),
            (dir.changed(), "map.compared"),
        ] {
            let draft = map.with_extension(end);
            if let Err(error) = durable::remove(&draft) {
                tracing::warn!(path = %draft.display(), error = base::report(&error), "a draft stays");
            }
        }
    }
}

/// Reads the records of a pool, and writes down first what a `new` data directory is, which gets this key.
fn open_store(config: &Config, claim: &Claim, new: Option<base::Key>, open_pool: &OpenPool) -> Result<Store> {
    if let Some(key) = new {
        claim.set_manifest(&Manifest {
            version: Manifest::VERSION,
            driver_name: config.driver_name.clone(),
            key,
            pool: open_pool.pool().kind(),
            in_image: open_pool.known().in_image,
        })?;
    }
    match Store::open(open_pool.dir().clone()) {
        // Pods must be able to end, which frees the pool for the next start.
        Err(error) if open_pool.is_dead() => {
            tracing::error!(
                error = base::report(&error),
                "the pool no longer answers; what uses its volumes can be undone"
            );
            Ok(Store::of_dead(open_pool.dir().clone(), &error))
        }
        store => Ok(store.map_err(Error::from)?),
    }
}

/// The pool a data directory was made with, unless the flags ask for another.
pub(super) fn known_pool(claim: &Claim, manifest: &Manifest, request: PoolRequest) -> Result<Known> {
    let Manifest { pool: kind, in_image, .. } = *manifest;
    match request.kind.is_none_or(|asked| asked == kind) {
        true => Ok(Known { kind, in_image }),
        false => Err(claim.mismatch("--pool", kind.name(), request.name()).into()),
    }
}
