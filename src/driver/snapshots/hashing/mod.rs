//! Hashing after the call. CreateSnapshot returns before the blocks are hashed (they are in `pending.map`), and one thread
//! with low-priority helpers hashes them. Then it compares the blocks that may have changed (`changed.map`) and keeps
//! only those that did, so that a delta only reads the map. Answers to clients are the same before and after: a delta
//! compares blocks without a hash by their bytes, and blocks that were not compared yet by their hashes.
//!
//! - `run.rs`: the thread, and the comparison.
//! - `step.rs`: what one step hashes.
//! - `writers.rs`: whether volumes are written, for then hashing is slower.

pub(in crate::driver) mod run;
pub(in crate::driver) mod step;
pub(in crate::driver) mod writers;
