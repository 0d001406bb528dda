//! The parts of the driver, and what concerns all of them.

use std::collections::BTreeMap;
use std::sync::Arc;

use crate::driver::config::Config;
use crate::driver::error::{Error, Result};
use crate::driver::health::volume::Health;
use crate::driver::metadata::read::Metadata;
use crate::driver::node::used::Node;
use crate::driver::shared::Shared;
use crate::driver::snapshots::hashing::run::Hashing;
use crate::driver::snapshots::quiesce::Copier;
use crate::driver::snapshots::take::Snapshots;
use crate::driver::transfer::send::Sources;
use crate::driver::transfer::transfers::Transfers;
use crate::driver::volumes::capacity::Capacity;
use crate::driver::volumes::incoming::TransferFigures;
use crate::driver::volumes::make::Volumes;
use crate::driver::volumes::placement::Placement;
use crate::pool::Kind;
use crate::sys;

/// The driver of one data directory. It consists of parts, and each part holds the others that it needs.
#[derive(Debug)]
pub struct Driver {
    pub(super) shared: Arc<Shared>,
    pub(crate) volumes: Arc<Volumes>,
    pub(crate) snapshots: Arc<Snapshots>,
    pub(crate) metadata: Metadata,
    pub(crate) node: Node,
    pub(crate) capacity: Arc<Capacity>,
    pub(crate) health: Arc<Health>,
    pub(crate) hashing: Arc<Hashing>,
    pub(crate) placement: Placement,
    pub(crate) transfers: Arc<Transfers>,
    pub(crate) sources: Sources,
}

/// Figures of a running driver, for its metrics.
#[derive(Clone, Copy, Debug)]
pub struct Figures {
    /// Volumes, including ephemeral ones.
    pub volumes: usize,
    /// Snapshots, including members of groups.
    pub snapshots: usize,
    /// Deleted snapshots kept as a base for deltas.
    pub retained: usize,
    /// Group snapshots.
    pub groups: usize,
    /// Objects whose records could not be read at start.
    pub unreadable: usize,
    /// Volumes with faults of their own; `None` if the pool does not answer.
    pub unhealthy: Option<usize>,
    /// Size of the pool's filesystem in bytes; `None` if it does not answer.
    pub pool_bytes: Option<u64>,
    /// Bytes that can still be written; the host's free space counts too if the image is sparse.
    pub free_bytes: Option<u64>,
    /// Bytes of blocks that are still to be hashed.
    pub hashing_backlog: u64,
    /// Transfers to this node.
    pub transfers: TransferFigures,
}

impl Driver {
    /// Closes the data directory. The pool stays mounted for the next start if volumes still use it, or if calls are still
    /// working.
    pub fn close(self: Arc<Self>) -> Result<()> {
        let shared = self.shared.clone();
        drop(self);
        match Arc::try_unwrap(shared) {
            Ok(shared) => {
                if !shared.open_pool.close()? {
                    tracing::info!("volumes are in use; the pool stays mounted");
                }
            }
            Err(shared) => {
                tracing::warn!("a call is still at work; the pool stays as it is for the next start");
                // The call ends with the process. So does the watchdog that thaws a filesystem which the call froze.
                Copier { shared, read_errors: Arc::default() }.thaw_leftovers();
            }
        }
        Ok(())
    }

    /// The values of its flags.
    pub fn config(&self) -> &Config {
        &self.shared.config
    }

    /// The data directory's key.
    pub fn key(&self) -> base::DataDirKey {
        self.shared.key
    }

    /// Whether the pool is mounted and takes a write. It may have been unmounted, or made read-only after an error.
    pub fn ready(&self) -> Result<()> {
        self.shared.open_pool.check().map_err(|error| {
            let why = Error::from(error).explain(&self.shared.config.data_dir);
            Error::Precondition(match self.shared.open_pool.host_is_full() {
                Ok(Some(full)) => format!("the pool is not usable: {why}. {full}"),
                _ => format!("the pool is not usable: {why}"),
            })
        })
    }

    /// Whether the pool has turned read-only, and opening the data directory again would mend it.
    pub fn must_start_again(&self) -> bool {
        self.shared.open_pool.can_be_remounted().unwrap_or(false)
    }

    /// The current figures.
    pub fn figures(&self) -> Figures {
        let Shared { open_pool, store, .. } = &*self.shared;
        let pool_bytes = sys::space(open_pool.dir().path()).ok().map(|space| space.total);
        let free_bytes = open_pool.free().ok();
        let unhealthy = self.health.unhealthy();
        store.read(|index| Figures {
            volumes: index.volume_count(),
            snapshots: index.snapshot_count(),
            retained: index.retained_count(),
            groups: index.group_count(),
            unreadable: store.damaged().len(),
            unhealthy,
            pool_bytes,
            free_bytes,
            hashing_backlog: self.hashing.queue.backlog(),
            transfers: self.transfers.table.figures(),
        })
    }

    /// The kind of its pool.
    pub fn pool_kind(&self) -> &'static Kind {
        self.shared.open_pool.known().kind
    }

    /// The key and value that say which node holds the volumes.
    pub fn topology(&self) -> BTreeMap<String, String> {
        self.shared.topology()
    }
}
