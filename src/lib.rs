//! deltapath: a CSI driver with exact changed block tracking. Volumes are sparse files behind loop
//! devices; snapshots carry block maps; deltas cost what changed.
//!
//! The layers, and the only directions in which they use each other:
//!
//! ```text
//! main -> cli -> { csi, http } -> driver -> { store, pool } -> sys
//! ```
//!
//! - [`cli`]: a file or directory for each subcommand.
//! - [`http`]: metrics and health.
//! - [`csi`]: gRPC shells: decode, call, encode; errors to codes.
//! - [`driver`]: the behaviour, synchronous.
//! - [`store`]: records on disk. [`pool`]: where bytes live. They do not know each other, nor [`cbt`].
//! - [`sys`]: the kernel; the only `unsafe`. `sync`: std's locks, or those of a model checker.
//!
//! What others share is in `crates/`: [`base`], [`files`], [`proto`], [`cbt`], [`serve`] and [`csi_client`]. A
//! test (`tests/suite/arrows.rs`) reads the paths here and fails when one points up.
// They panic where the output is closed: `shell` does not.
#![warn(clippy::print_stdout, clippy::print_stderr)]
#![cfg_attr(test, allow(clippy::disallowed_methods))]

pub mod cli;
pub mod csi;
pub mod driver;
#[cfg(any(test, feature = "fuzz"))]
pub mod fuzz;
pub mod http;
mod metric;
pub mod pool;
pub mod store;
mod sync;
pub mod sys;
