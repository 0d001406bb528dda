//! What the driver does: volumes, snapshots, their metadata, and their place on this node. Plain
//! synchronous code that brings the store, the pool and the block maps together. It knows the CSI
//! semantics, not the wire: [`crate::csi`] decodes, calls and encodes.

mod attach;
mod capability;
mod capacity;
mod check;
mod choices;
mod error;
mod expand;
mod fill;
#[cfg(any(test, feature = "fuzz"))]
pub(crate) mod fuzz;
mod groups;
mod hashing;
mod health;
mod history;
mod inspect;
mod list;
mod locks;
mod metadata;
mod node;
mod params;
mod quiesce;
mod snapshots;
mod start;
mod streams;
mod transfer;
mod volumes;

pub use attach::AttachRequest;
pub use capability::{AccessMode, AccessType, Capability, MountFlags};
pub use capacity::{AvailableCapacity, CapacityRange};
pub use check::{Discovery, Severity};
pub use choices::{Named, Room};
pub use error::Error;
pub use expand::Expansion;
pub use groups::Group;
pub use hashing::HashingThread;
pub use health::{Fault, Reason, Trouble, VolumeHealth};
pub use history::Retention;
pub use inspect::{Inspected, Inspection};
pub use list::{Page, PageRequest, SnapshotFilter};
pub use metadata::{Message, MetadataRequest, MetadataStream, Turn};
pub use node::{PublishRequest, StageRequest, Stats, Usage};
pub use params::{EphemeralParameters, SnapshotParameters, VolumeParameters, parse_tuning};
pub use streams::{Share, Streams, WORKING as STREAMS_WORKING};
pub use transfer::{Blocks, OpenSource, Opened, Point, Remote, RemoteFault, TransferFigures};
pub use volumes::{CreateVolume, SourceRef};

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::pool::{OpenPool, Pool, PoolRequest};
use crate::store::{Claim, Store, TupleStyle};
use crate::sys;
use base::{Quantity, VolumeId};
use capacity::Reserved;
use choices::Choices;
use locks::OpLocks;
use transfer::{Sources, Transfers};

/// What this room returns.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// What the flags say.
#[derive(Clone, Debug)]
pub struct Config {
    /// `--driver-name`.
    pub driver_name: String,
    /// `--node-id`.
    pub node_id: String,
    /// `--data-dir`.
    pub data_dir: PathBuf,
    /// `--pool` and `--pool-size`.
    pub pool: PoolRequest,
    /// `--block-metadata-type`: how tuples are listed where the snapshot does not say.
    pub tuple_style: TupleStyle,
    /// `--max-volume-size`.
    pub max_volume_size: Quantity,
    /// `--overcommit`: maximum ratio of provisioned capacity to pool size; `None` for no limit.
    pub overcommit: Option<f64>,
    /// `--enable-attach`.
    pub attach: bool,
    /// `--max-volumes-per-node`; 0 for no limit.
    pub max_volumes: u32,
    /// `--retain-deleted`.
    pub retain: Retention,
    /// `--transfer-rate`, a second; `None` for no limit.
    pub transfer_rate: Option<Quantity>,
}

/// The driver of one data directory.
#[derive(Debug)]
pub struct Driver {
    config: Config,
    /// The data directory's, in every id that is made.
    key: base::Key,
    open_pool: OpenPool,
    store: Store,
    /// What to know of a pool without direct I/O.
    cached: Option<&'static str>,
    choices: Choices,
    locks: OpLocks,
    /// Bytes of volumes in the making.
    promised: Reserved,
    /// Attachments in the making.
    attaching: Reserved,
    hashing: hashing::Hashing,
    streams: Arc<Streams>,
    /// Volumes in the making, of what is on other nodes.
    transfers: Transfers,
    /// What other nodes read.
    sources: Sources,
    /// Volumes whose data could not be read.
    suspects: health::Suspects,
    /// Held for its lock; dropped last.
    _claim: Claim,
}

/// Figures of a running driver, for its metrics.
#[derive(Clone, Copy, Debug)]
pub struct Figures {
    /// Volumes, ephemeral ones among them.
    pub volumes: usize,
    /// Snapshots, members of groups among them.
    pub snapshots: usize,
    /// Deleted snapshots kept as a base for deltas.
    pub retained: usize,
    /// Group snapshots.
    pub groups: usize,
    /// Objects whose records could not be read at start.
    pub unreadable: usize,
    /// Size of the pool's filesystem in bytes; `None` when it does not answer.
    pub pool_bytes: Option<u64>,
    /// Bytes that can still be written, also on the host below a sparse image.
    pub free_bytes: Option<u64>,
    /// Bytes of blocks whose hash is still to be made.
    pub hashing_backlog: u64,
    /// Transfers to this node.
    pub transfers: TransferFigures,
}

impl Driver {
    /// Leaves the data directory. A pool image that volumes still use stays mounted for the next
    /// start.
    pub fn close(self) -> Result<()> {
        if !self.open_pool.close()? {
            tracing::info!("volumes are in use; the pool stays mounted");
        }
        Ok(())
    }

    /// The flags it runs with.
    pub fn config(&self) -> &Config {
        &self.config
    }

    /// The data directory's key.
    pub fn key(&self) -> base::Key {
        self.key
    }

    /// How the pool copies.
    pub fn pool(&self) -> Pool {
        self.open_pool.pool()
    }

    /// Whether the pool is there and takes a write. Whoever unmounted it, or made it read-only after an
    /// error, is noticed.
    pub fn ready(&self) -> Result<()> {
        self.open_pool.check().map_err(|error| {
            let why = Error::from(error).explain(&self.config().data_dir);
            Error::Precondition(match self.open_pool.host_is_full() {
                Ok(Some(full)) => format!("the pool is not usable: {why}. {full}"),
                _ => format!("the pool is not usable: {why}"),
            })
        })
    }

    /// Fails where the disk below the pool is full, so that nothing new may be made.
    fn check_host(&self) -> Result<()> {
        self.store.check_alive()?;
        match self.open_pool.host_is_full()? {
            Some(full) => Err(Error::Exhausted(full)),
            None => Ok(()),
        }
    }

    /// Figures of now.
    pub fn figures(&self) -> Figures {
        let pool_bytes = sys::space(self.open_pool.dir().path()).ok().map(|space| space.total);
        let free_bytes = self.open_pool.free().ok();
        self.store.read(|index| Figures {
            volumes: index.volume_count(),
            snapshots: index.snapshot_count(),
            retained: index.retained_count(),
            groups: index.group_count(),
            unreadable: self.store.damaged().len(),
            pool_bytes,
            free_bytes,
            hashing_backlog: self.hashing.backlog(),
            transfers: self.transfers.figures(),
        })
    }

    /// The key and value that say which node holds the volumes.
    pub fn topology(&self) -> BTreeMap<String, String> {
        let key = format!("topology.{}/node", self.config.driver_name);
        BTreeMap::from([(key, self.config.node_id.clone())])
    }

    fn volume_data(&self, id: &VolumeId) -> PathBuf {
        self.store.dir().volume(id).data()
    }
}

/// A path from a client as the kernel will show it; an error where it could not be handed to a mount
/// call.
fn checked_path(field: &'static str, path: &Path) -> Result<PathBuf> {
    if path.as_os_str().is_empty() {
        return Err(Error::Missing { field });
    }
    if !sys::mount::is_plain_absolute(path) {
        let value = error::shown(&path.to_string_lossy());
        return Err(Error::Invalid { field, value, want: "an absolute path without `..`".into() });
    }
    Ok(sys::mount::resolved(path))
}
