//! deltapath: a CSI driver with exact changed block tracking. Volumes are sparse files behind loop
//! devices; snapshots carry block maps; deltas cost what changed.
//!
//! The rooms, and the only directions in which they know each other:
//!
//! ```text
//! main -> cli -> { client -> csi, http } -> driver -> { store, pool, cbt } -> sys -> base
//! ```
//!
//! - [`cli`]: a file a subcommand.
//! - [`client`]: a CSI client for any driver. Of [`csi`] it uses the messages alone.
//! - [`http`]: metrics and health.
//! - [`csi`]: gRPC shells: decode, call, encode; errors to codes.
//! - [`driver`]: the behaviour, synchronous.
//! - [`store`]: records on disk. [`pool`]: where bytes live. [`cbt`]: block maps and deltas, pure.
//!   These three do not know each other.
//! - [`sys`]: the kernel; the only `unsafe`.
//! - [`base`]: ids, blocks, quantities, paths.
//!
//! A test (`tests/suite/arrows.rs`) reads the `crate::` paths and fails when one points up.
#![cfg_attr(test, allow(clippy::disallowed_methods))]

pub mod cli;
pub mod csi;
pub mod driver;
#[cfg(any(test, fuzzing))]
pub mod fuzz;
pub mod http;
pub mod pool;
pub mod store;
pub mod sys;
