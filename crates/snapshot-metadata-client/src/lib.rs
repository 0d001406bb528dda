//! Which blocks of a snapshot hold data, and which changed since an earlier one: a client of the SnapshotMetadata API
//! (KEP-3314) for backup tools.
//!
//! ```no_run
//! use snapshot_metadata_client::{Advice, Client};
//!
//! # async fn example() -> Result<(), snapshot_metadata_client::Error> {
//! let client = Client::csi("unix:///run/csi/csi.sock")?;
//! let mut blocks = match client.delta("handle-of-monday", "handle-of-tuesday").await {
//!     // The base is gone, or the driver has no deltas: what holds data is a full backup.
//!     Err(error) if error.advice() == Advice::FullBackup => client.allocated("handle-of-tuesday").await?,
//!     answer => answer?,
//! };
//! println!("a volume of {} bytes", blocks.capacity());
//! while let Some(ranges) = blocks.next().await {
//!     for range in ranges? {
//!         println!("copy {} bytes at {}", range.length, range.offset);
//!     }
//! }
//! // Only now is the answer whole.
//! # Ok(())
//! # }
//! ```
#![forbid(unsafe_code)]

mod answer;
mod blocks;
mod client;
mod csi;
mod error;
#[cfg(feature = "kubernetes")]
mod kubernetes;

pub use answer::{Range, Style, Violation};
pub use blocks::Blocks;
pub use client::{Client, Policy, Query};
pub use error::{Advice, Call, Error};
#[cfg(feature = "kubernetes")]
pub use kube;
#[cfg(feature = "kubernetes")]
pub use kubernetes::{Options, Token};
