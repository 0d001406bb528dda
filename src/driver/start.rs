//! The steps of a start, in order. After a crash in any step the next start does all of them again. What a driver that
//! died left half done is undone before the first call is served.

use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use parking_lot::Mutex;

use crate::driver::config::Config;
use crate::driver::error::{Error, Result};
use crate::driver::health::volume::Health;
use crate::driver::locks::OpLocks;
use crate::driver::metadata::read::Metadata;
use crate::driver::metadata::streams::Streams;
use crate::driver::node::used::Node;
use crate::driver::parts::Driver;
use crate::driver::shared::Shared;
use crate::driver::snapshots::fill::Filler;
use crate::driver::snapshots::hashing::run::Hashing;
use crate::driver::snapshots::hashing::writers::Writers;
use crate::driver::snapshots::history::hold::Histories;
use crate::driver::snapshots::queue::Queue;
use crate::driver::snapshots::quiesce::Copier;
use crate::driver::snapshots::take::Snapshots;
use crate::driver::transfer::send::Sources;
use crate::driver::transfer::throttle::Throttle;
use crate::driver::transfer::transfers::Transfers;
use crate::driver::volumes::capacity::{Capacity, Reserved};
use crate::driver::volumes::incoming::TransferTable;
use crate::driver::volumes::make::Volumes;
use crate::driver::volumes::placement::Placement;
use crate::pool::{self, Known, OpenPool, PoolRequest};
use crate::store::{LockedDir, Manifest, Store};
use base::DataDir;
use cbt::FreshTable;
use files::Context;
use files::durable::LOCK_PATIENCE;

impl Driver {
    /// Opens a data directory, and makes it if there is none.
    ///
    /// 1. Lock the directory: no other driver serves it from here on.
    /// 2. Read its manifest. If the flags name another driver or pool, fail before anything is changed.
    /// 3. Open the pool (`pool/open_pool.rs`): choose and make it in a new directory; attach and mount its image, unless the
    ///    driver before left it mounted; mount it again if it no longer takes writes.
    /// 4. In a new directory, write the manifest. This comes after the pool, so that an interrupted start begins again.
    /// 5. Empty `staging/`, except for transfers, and read all records (`store/mod.rs`). Unreadable records are reported and
    ///    withheld. If the pool's filesystem is dead, no records are read, and pods can still be ended.
    /// 6. Take the room that deletions need on a full pool (`sys/reserve.rs`). Without it nothing new is made.
    /// 7. Thaw what the driver before left frozen (`snapshots/quiesce.rs`), since programs may be waiting for it.
    /// 8. Undo what an interrupted copy, or growth of a filesystem, left on volumes (`snapshots/quiesce.rs`).
    /// 9. Take note of unfinished transfers: each continues with its next CreateVolume (`volumes/incoming.rs`).
    /// 10. Remove inline volumes that were made and never published (`node/ephemeral.rs`): kubelet may never call for them.
    ///
    /// Afterwards the hashing thread hashes what is pending and applies the retention (`Hashing::run`), and calls are served.
    /// What an interrupted expansion left is undone when the volume is used next (`volumes/expand.rs`, `undo_cut_expansion`).
    /// Devices and mounts are looked up by each call.
    pub fn open(mut config: Config) -> Result<Self> {
        let locked = LockedDir::lock(DataDir::new(&config.data_dir), LOCK_PATIENCE)?;
        // The pool's mount is found by path, so the path must be as the kernel shows it.
        config.data_dir = config.data_dir.canonicalize().context("resolve", &config.data_dir)?;
        let data_dir = DataDir::new(&config.data_dir);

        let manifest = locked.manifest()?;
        let known = match &manifest {
            Some(Manifest { driver_name, .. }) if *driver_name != config.driver_name => {
                return Err(locked.mismatch("--driver-name", driver_name, &config.driver_name).into());
            }
            Some(manifest) => Some(known_pool(&locked, manifest, config.pool)?),
            None => None,
        };

        let key = match &manifest {
            Some(manifest) => manifest.key,
            None => base::DataDirKey::random().context("draw a key from", "/dev/random".as_ref())?,
        };

        let open_pool = OpenPool::open(&data_dir, config.pool, known)?;
        let new = manifest.is_none().then_some(key);
        let store = match open_store(&config, &locked, new, &open_pool) {
            Ok(store) => store,
            Err(error) => {
                // Nothing else would unmount the pool.
                if let Err(error) = open_pool.close() {
                    tracing::warn!(error = base::report(&error), "the pool stays mounted");
                }
                return Err(error);
            }
        };
        if store.check_alive().is_ok() {
            take_reserve(&store, &open_pool);
        }
        // On a full pool the test file cannot be written, and then nothing is known.
        let cached = open_pool.cached().unwrap_or_default();
        if let Some(cached) = cached {
            tracing::warn!("{cached}");
        }
        let locks = OpLocks::default();
        let shared = Arc::new(Shared { config, key, open_pool, store, locks, _lock: locked });
        let copier = Arc::new(Copier { shared: shared.clone(), read_errors: Arc::default() });
        copier.thaw_leftovers();
        copier.end_cut_calls();
        let table = Arc::new(TransferTable::new(shared.clone()));
        table.take_up();
        let driver = Driver::of_parts(copier, table, cached);
        driver.node.remove_unplaced();
        tracing::info!(
            data_dir = %shared.config.data_dir.display(),
            key = %shared.key,
            pool = %shared.open_pool.known().kind.name,
            place = shared.open_pool.describe(),
            volumes = shared.store.read(|index| index.volume_count()),
            snapshots = shared.store.read(|index| index.snapshot_count()),
            unreadable = shared.store.damaged().len(),
            "data directory opened"
        );
        Ok(driver)
    }

    /// Makes the parts. Each gets the earlier parts that it needs.
    fn of_parts(copier: Arc<Copier>, table: Arc<TransferTable>, cached: Option<&'static str>) -> Self {
        let shared = || copier.shared.clone();
        let read_errors = || copier.read_errors.clone();
        let queue = Arc::<Queue>::default();
        let writers = Writers::new(copier.shared.store.dir().volumes());
        let foreground = Arc::new(base::Foreground::watching(writers));
        let histories =
            Arc::new(Histories { shared: shared(), queue: queue.clone(), fresh: FreshTable::default() });
        let reserved = Reserved::default();
        let capacity = Arc::new(Capacity { shared: shared(), transfers: table.clone(), reserved });
        let volumes = Arc::new(Volumes {
            shared: shared(),
            copier: copier.clone(),
            histories: histories.clone(),
            capacity: capacity.clone(),
            transfers: table.clone(),
            read_errors: read_errors(),
            attaching: Reserved::default(),
        });
        let filler = Filler { shared: shared(), copier: copier.clone(), histories: histories.clone() };
        let snapshots = Arc::new(Snapshots { shared: shared(), histories: histories.clone(), filler });
        let health = Arc::new(Health { shared: shared(), read_errors: read_errors(), cached });
        Driver {
            shared: shared(),
            metadata: Metadata {
                shared: shared(),
                histories: histories.clone(),
                streams: Arc::new(Streams::new(foreground.clone())),
                hinted: AtomicBool::new(false),
            },
            node: Node {
                shared: shared(),
                volumes: volumes.clone(),
                capacity: capacity.clone(),
                copier: copier.clone(),
                health: health.clone(),
            },
            hashing: Arc::new(Hashing {
                shared: shared(),
                histories,
                queue,
                foreground,
                read_errors: read_errors(),
            }),
            placement: Placement { shared: shared(), transfers: table.clone(), choices: Default::default() },
            transfers: Arc::new(Transfers {
                shared: shared(),
                volumes: volumes.clone(),
                capacity: capacity.clone(),
                copier: copier.clone(),
                table,
                throttle: Throttle::new(shared().config.transfer_rate.map(|rate| rate.0)),
                opening: Mutex::default(),
                working: Mutex::default(),
            }),
            sources: Sources::new(shared(), snapshots.clone()),
            volumes,
            snapshots,
            capacity,
            health,
        }
    }
}

/// Reads the records of a pool. First writes the manifest of a `new` data directory, with this key.
fn open_store(
    config: &Config,
    locked: &LockedDir,
    new: Option<base::DataDirKey>,
    open_pool: &OpenPool,
) -> Result<Store> {
    if let Some(key) = new {
        locked.set_manifest(&Manifest {
            version: Manifest::VERSION,
            driver_name: config.driver_name.clone(),
            key,
            pool: open_pool.known().kind.name.to_owned(),
            in_image: open_pool.known().in_image,
        })?;
    }
    match Store::open(open_pool.dir().clone()) {
        // Pods must be able to end: when none uses the pool, the next start can mount it again.
        Err(error) if open_pool.is_unreadable() => {
            tracing::error!(
                error = base::report(&error),
                "the pool does not respond; volumes can still be unpublished and unstaged"
            );
            Ok(Store::of_dead(open_pool.dir().clone(), &error))
        }
        store => Ok(store.map_err(Error::from)?),
    }
}

/// A full pool is served without it, so that there is a way out.
fn take_reserve(store: &Store, open_pool: &OpenPool) {
    let taken = store.take_reserve().map_err(Error::from).or_else(|error| {
        match open_pool.make_room_for_reserve()? {
            true => Ok(store.take_reserve()?),
            false => Err(error),
        }
    });
    if let Err(error) = taken {
        let error = base::report(&error);
        tracing::warn!(error, "nothing new is made until there is room for what deletions may need");
    }
}

/// The pool that a data directory was made with. Fails if the flags ask for another.
pub(super) fn known_pool(locked: &LockedDir, manifest: &Manifest, request: PoolRequest) -> Result<Known> {
    let Manifest { pool: name, in_image, .. } = manifest;
    let Some(kind) = pool::named(name) else {
        return Err(Error::Precondition(format!(
            "{} was made with --pool {name}, which this version does not have: use the version that made it",
            locked.dir().path().display()
        )));
    };
    match request.kind.is_none_or(|asked| asked.name == kind.name) {
        true => Ok(Known { kind, in_image: *in_image }),
        false => Err(locked.mismatch("--pool", kind.name, request.name()).into()),
    }
}
