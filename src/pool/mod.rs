//! Where bytes live: the filesystem of the pool and its way to copy a file. It knows files and
//! paths; it knows no block map and no record.
//!
//! - [`Backend`] is what a storage has to do, [`KINDS`] the table of storages: a file each (`btrfs.rs`, `xfs.rs`, `dir.rs`).
//! - On btrfs, objects are subvolumes without copy-on-write (NOCOW). A search lists what has a later transaction than the one that
//!   made the parent's copy, so it does not need the parent's data.
//! - A search reports one punched block next to a hole as a hole to the end of the address space. So holes are ranges, and only
//!   segments in which the parent holds data are looked at (`cbt::written`).
//! - If the disk below an image is full, xfs fails the writes and continues. btrfs turns read-only until it is mounted again,
//!   which a start does when nothing uses it; the driver then starts itself again. That mount replays a log, so it first gets the space of a reserve (`sys::reserve`).
//! - An image is attached once: it is locked, and its device is found by device and inode number, never by path.

mod backend;
mod btrfs;
mod choose;
mod dir;
mod error;
#[cfg(test)]
mod example;
mod health;
mod image;
mod kind;
mod kinds;
#[cfg(test)]
mod laws;
mod open_pool;
mod probe;
mod space;
mod xfs;

pub use backend::{Backend, Bytes, Changes, Copying, Extents, GroupMember, Sink};
pub use choose::PoolRequest;
pub use error::Error;
pub use kind::Kind;
pub use kinds::{KINDS, named};
pub use open_pool::{Known, OpenPool};

/// A result with the [`Error`] of this layer.
pub type Result<T, E = Error> = std::result::Result<T, E>;
