//! The types that all other crates use: ids that are safe in a path by construction, block and byte positions, sizes as
//! Kubernetes writes them, and every path below a data directory. Nothing here opens a file.
#![cfg_attr(test, allow(clippy::disallowed_methods))]
#![forbid(unsafe_code)]

pub mod age;
mod block;
mod choices;
mod endpoint;
mod extent;
mod foreground;
#[cfg(any(test, feature = "fuzz"))]
pub mod fuzz;
mod ids;
mod layout;
mod quantity;
mod report;
mod stop;

pub use block::{Block, BlockRange, BlockSize, BlockSizeError, ByteRange};
pub use choices::{Choices, MOST_CHOICES};
pub use endpoint::Endpoint;
pub use extent::{Address, Extent, Written};
pub use foreground::{Counter, Foreground, ForegroundWork};
pub use ids::{DataDirKey, GroupId, IdError, KeyError, SnapshotId, VolumeId};
pub use layout::{DataDir, DraftFile, GroupDir, ObjectDir, PoolDir};
pub use quantity::{Quantity, QuantityError};
pub use report::report;
pub use stop::{Stop, Stopped};
