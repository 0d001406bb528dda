//! The behaviour of the driver: volumes, snapshots, their metadata, and their use on this node. Synchronous code that
//! combines the store, the pool and the block maps. It implements the semantics of CSI; [`crate::csi`] decodes requests,
//! calls it and encodes the answers.

mod audit;
mod config;
mod devices;
mod error;
mod health;
#[cfg(all(test, feature = "interleavings"))]
mod interleavings;
#[cfg(test)]
mod lives;
mod locks;
mod metadata;
mod node;
mod parts;
mod request;
mod shared;
mod snapshots;
mod start;
mod transfer;
mod ungrown;
mod volumes;

#[cfg(any(test, feature = "fuzz"))]
pub(crate) use {request::fuzz, transfer::fuzz::transfer};

pub use audit::check::{Discovery, Severity};
pub use audit::inspect::{Inspected, Inspection};
pub use config::{Config, Retention};
pub use error::{Error, Result};
pub use health::volume::{Fault, Health, Reason, Trouble, VolumeHealth};
pub use metadata::read::{Message, Metadata, MetadataRequest, MetadataStream, Progress};
pub use metadata::streams::{Share, Streams, WORKING as STREAMS_WORKING};
pub use node::stats::{Stats, Usage};
pub use node::used::{Node, PublishRequest, StageRequest};
pub use parts::{Driver, Figures};
pub use request::capability::{AccessMode, AccessType, Capability, MountFlags};
pub use request::create::{CapacityRange, CreateVolume, SourceRef};
pub use request::page::{Page, PageRequest, SnapshotFilter};
pub use request::params::{EphemeralParameters, SnapshotParameters, VolumeParameters, parse_tuning};
pub use snapshots::groups::Group;
pub use snapshots::hashing::run::{Hashing, HashingThread};
pub use snapshots::take::Snapshots;
pub use transfer::receive::COMPARED;
pub use transfer::send::{OpenSource, Point, Sources};
pub use transfer::transfers::Transfers;
pub use volumes::attach::AttachRequest;
pub use volumes::capacity::{AvailableCapacity, Capacity};
pub use volumes::expand::Expansion;
pub use volumes::incoming::TransferFigures;
pub use volumes::make::Volumes;
pub use volumes::placement::{Named, Placement, Space};
pub use volumes::remote::{Blocks, Opened, Remote, RemoteFault};
