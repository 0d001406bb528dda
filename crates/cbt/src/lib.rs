//! Changed block tracking, pure: which blocks of a snapshot hold data, which may have changed since
//! another, what their content hashes to, and what truly differs between two. It knows files and
//! blocks; it knows nothing of CSI, records, pools or where a file comes from.
//!
//! A set of blocks ([`MapFile`]) is stored in segments and read one at a time, so no answer ever
//! needs a whole map in memory. The rule above all others: **never report too little**. `changed`
//! sets are supersets by construction; only equal hashes or equal bytes remove a block from one.
#![cfg_attr(test, allow(clippy::disallowed_methods))]
#![forbid(unsafe_code)]

mod ahead;
mod allocation;
mod delta;
mod error;
mod fresh;
mod hash;
mod hashfile;
mod physical;
mod runs;
mod scan;
mod scrub;
mod segment;
mod walk;
mod written;

pub use allocation::{AllocatedScan, Allocation, scan_allocated};
pub use base::{Block, BlockSize, Stop};
pub use delta::{DeltaScan, Side};
pub use error::Error;
pub use fresh::{FreshHashes, FreshTable};
pub use hash::{BlockHash, hash_each, zero_hash};
pub use hashfile::{HashFile, HashReader};
pub use physical::PhysicalDiff;
pub use runs::{Loaded, RunSource, Tuples};
pub use scan::{Candidates, HashingCopy, ToHash, write_changed};
pub use scrub::{Finding, Progress, check_changed, check_maps, scrub};
pub use segment::{
    MapFile, MapHeader, MapWriter, Relation, SEGMENT_BLOCKS, SegmentIndex, copy_map, write_union,
};
pub use walk::Found;
pub use written::{NewMaps, write_written};

/// Fuzz targets of this crate; each is next to the format that it tests.
#[cfg(any(test, feature = "fuzz"))]
pub mod fuzz {
    pub use super::delta::fuzz::delta;
    pub use super::hashfile::fuzz::hashes;
    pub use super::segment::fuzz::{map_damage, maps};
}

/// A result with the [`Error`] of this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;
