//! The behaviour of the driver: volumes, snapshots, their metadata, and their use on this node. Synchronous code that
//! combines the store, the pool and the block maps. It implements the semantics of CSI; [`crate::csi`] decodes requests,
//! calls it and encodes the answers.

mod attach;
mod capability;
mod capacity;
mod check;
mod devices;
mod error;
mod expand;
mod filesystem;
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
mod placement;
mod queue;
mod quiesce;
mod read_errors;
mod remote;
mod request;
mod shared;
mod snapshots;
mod start;
mod streams;
mod superblock;
mod transfer;
mod transfer_table;
mod volumes;

pub use attach::AttachRequest;
pub use capability::{AccessMode, AccessType, Capability, MountFlags};
pub use capacity::{AvailableCapacity, Capacity};
pub use check::{Discovery, Severity};
pub use error::Error;
pub use expand::Expansion;
pub use groups::Group;
pub use hashing::{Hashing, HashingThread};
pub use health::{Fault, Health, Reason, Trouble, VolumeHealth};
pub use history::Retention;
pub use inspect::{Inspected, Inspection};
pub use list::{Page, PageRequest, SnapshotFilter};
pub use metadata::{Message, Metadata, MetadataRequest, MetadataStream, Turn};
pub use node::{Node, PublishRequest, StageRequest, Stats, Usage};
pub use params::{EphemeralParameters, SnapshotParameters, VolumeParameters, parse_tuning};
pub use placement::{Named, Placement, Space};
pub use remote::{Blocks, Opened, Remote, RemoteFault};
pub use request::{CapacityRange, CreateVolume, SourceRef};
pub use snapshots::Snapshots;
pub use streams::{Share, Streams, WORKING as STREAMS_WORKING};
pub use transfer::{OpenSource, Point, Sources, Transfers};
pub use transfer_table::TransferFigures;
pub use volumes::Volumes;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::pool::{Pool, PoolRequest};
use crate::store::TupleStyle;
use crate::sys;
use base::Quantity;
use quiesce::Copier;
use shared::Shared;

/// A result with the [`Error`] of this layer.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// The values of the flags.
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
    /// `--block-metadata-type`: how tuples are listed if the snapshot has no parameter for it.
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
    /// `--transfer-rate`, per second; `None` for no limit.
    pub transfer_rate: Option<Quantity>,
}

/// The driver of one data directory. It consists of parts, and each part holds the others that it needs.
#[derive(Debug)]
pub struct Driver {
    shared: Arc<Shared>,
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
    pub fn key(&self) -> base::Key {
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

    /// The current figures.
    pub fn figures(&self) -> Figures {
        let Shared { open_pool, store, .. } = &*self.shared;
        let pool_bytes = sys::space(open_pool.dir().path()).ok().map(|space| space.total);
        let free_bytes = open_pool.free().ok();
        store.read(|index| Figures {
            volumes: index.volume_count(),
            snapshots: index.snapshot_count(),
            retained: index.retained_count(),
            groups: index.group_count(),
            unreadable: store.damaged().len(),
            pool_bytes,
            free_bytes,
            hashing_backlog: self.hashing.queue.backlog(),
            transfers: self.transfers.table.figures(),
        })
    }

    /// How the pool copies.
    pub fn pool(&self) -> Pool {
        self.shared.pool()
    }

    /// The key and value that say which node holds the volumes.
    pub fn topology(&self) -> BTreeMap<String, String> {
        self.shared.topology()
    }
}

/// A path from a client, resolved as the kernel shows it. Fails if a mount call could not take it, or if it is a link itself: where
/// kubelet's directory was moved the links are among its parents.
fn checked_path(field: &'static str, path: &Path) -> Result<PathBuf> {
    if path.as_os_str().is_empty() {
        return Err(Error::Missing { field });
    }
    if !sys::mount::is_plain_absolute(path) {
        let value = error::shown(&path.to_string_lossy());
        return Err(Error::Invalid { field, value, want: "an absolute path without `..`".into() });
    }
    let path = sys::mount::resolved(path);
    match sys::mount::is_link(&path) {
        true => Err(Error::Invalid {
            field,
            value: format!("{}, which is a symbolic link", path.display()),
            want: "the path itself, since links are not followed".into(),
        }),
        false => Ok(path),
    }
}
