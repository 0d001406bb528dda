//! The bottom room: the words every other room speaks. Ids that are safe in a path by
//! construction, block and byte positions, sizes as Kubernetes writes them, and every path below a
//! data directory. Nothing here opens a file.

pub mod age;
mod block;
#[cfg(any(test, fuzzing))]
pub(crate) mod fuzz;
mod ids;
mod layout;
mod quantity;
mod stop;

pub use block::{BlockRange, BlockSize, BlockSizeError, ByteRange};
pub use ids::{GroupId, IdError, SnapshotId, VolumeId};
pub use layout::{DataDir, GroupDir, ObjectDir, PoolDir};
pub use quantity::{Quantity, QuantityError};
pub use stop::{Stop, Stopped};
