//! Makes volumes from snapshots and volumes of other nodes. The blocks are copied over the network in the background.
//!
//! - `run.rs`: the thread of a transfer.
//! - `plan.rs`: what to do with each block of a segment; a pure function.
//! - `receive.rs`: makes the bytes of the new volume equal to the source's.
//! - `holes.rs`: what blocks hold no data in, which is neither sent nor written.
//! - `write.rs`: gathers blocks and writes them past the page cache.
//! - `send.rs`: the source's side.
//! - `throttle.rs`: `--transfer-rate`.
//!
//! `driver/volumes/incoming.rs` has the table of transfers and how each ended. `begin.rs` begins, continues and removes
//! transfers. A transfer begins, and continues, when CreateVolume is called with a connection to its source:
//!
//! 1. The source is opened, so that its errors are reported at once.
//! 2. An empty volume is drafted in `staging/`, with a `transfer.json`, so that the next start keeps it
//!    (`store/transfers.rs`).
//! 3. A thread makes its bytes equal to the source's, and syncs them. While the source is unavailable it retries.
//! 4. The draft becomes a volume by a rename, like any volume.
//!
//! A driver that stops or dies leaves the draft, and the next one continues when CreateVolume is called again. The draft
//! is removed if DeleteVolume names it, if the source is gone or damaged, or if CreateVolume is not called for an hour.

pub(in crate::driver) mod begin;
#[cfg(any(test, feature = "fuzz"))]
pub(crate) mod fuzz;
pub(in crate::driver) mod holes;
pub(in crate::driver) mod plan;
pub(in crate::driver) mod receive;
pub(in crate::driver) mod run;
pub(in crate::driver) mod send;
pub(in crate::driver) mod throttle;
pub(in crate::driver) mod transfers;
pub(in crate::driver) mod write;
