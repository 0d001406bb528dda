//! Which blocks of a snapshot hold data, and which changed since an earlier one: a client of the SnapshotMetadata API
//! (KEP-3314) for backup tools.
//!
//! # An incremental backup in a cluster
//!
//! Snapshots are named as in Kubernetes. The client finds the driver of a VolumeSnapshot and its SnapshotMetadataService,
//! requests tokens and renews them before they end, and follows changes of the address, the CA and the audience.
//!
//! ```no_run
//! # #[cfg(feature = "kubernetes")]
//! # mod example {
//! use snapshot_metadata_client::{Advice, Client, Error, Options, kube};
//!
//! /// Backs up what changed since the base, whose CSI handle the last backup has kept. Returns the next base.
//! async fn back_up(base: &str, snapshot: &str) -> Result<String, Box<dyn std::error::Error>> {
//!     // The kubeconfig, or in a pod its service account.
//!     let api = kube::Client::try_default().await?;
//!     let client = Client::kubernetes(api, "shop", Options::default());
//!     match copy(client.delta(base, snapshot).await).await {
//!         Ok(()) => {}
//!         // The base is gone, or there is no change tracking: say why, and take all that holds data.
//!         Err(error) if error.advice() == Advice::FullBackup => {
//!             eprintln!("a full backup, since {error}");
//!             copy(client.allocated(snapshot).await).await?;
//!         }
//!         // `Retry`: run this again later. `Stop`: a person has to look.
//!         Err(error) => return Err(error.into()),
//!     }
//!     Ok(client.snapshot_handle(snapshot).await?)
//! }
//!
//! async fn copy(blocks: Result<snapshot_metadata_client::Blocks, Error>) -> Result<(), Error> {
//!     let mut blocks = blocks?;
//!     println!("a volume of {} bytes", blocks.capacity());
//!     while let Some(ranges) = blocks.next().await {
//!         for range in ranges? {
//!             println!("copy {} bytes at {}", range.length, range.offset);
//!         }
//!     }
//!     // Only now is the answer whole, and the backup may be kept.
//!     Ok(())
//! }
//! # }
//! ```
//!
//! Another account's tokens, or those that kubelet keeps in a projected volume:
//!
//! ```no_run
//! # #[cfg(feature = "kubernetes")]
//! # async fn example(api: snapshot_metadata_client::kube::Client) {
//! use snapshot_metadata_client::{Client, Options, Token};
//!
//! let token = Token::ServiceAccount { namespace: "backup".into(), name: "reader".into() };
//! let client = Client::kubernetes(api.clone(), "shop", Options { token, ..Options::default() });
//!
//! let token = Token::File("/var/run/secrets/metadata/token".into());
//! let client = Client::kubernetes(api, "shop", Options { token, ..Options::default() });
//! # }
//! ```
//!
//! # A CSI driver without Kubernetes
//!
//! Snapshots are named by their CSI handles:
//!
//! ```no_run
//! use std::time::Duration;
//!
//! use snapshot_metadata_client::{Client, Policy};
//!
//! # async fn example() -> Result<(), snapshot_metadata_client::Error> {
//! let policy = Policy { retries: 3, idle: Duration::from_secs(60), ..Policy::default() };
//! let client = Client::csi("unix:///run/csi/csi.sock")?.with_policy(policy);
//! let ranges = client.delta("handle-of-monday", "handle-of-tuesday").await?.collect_all().await?;
//! println!("{} bytes changed", ranges.iter().map(|range| range.length).sum::<u64>());
//! # Ok(())
//! # }
//! ```
//!
//! # What it promises
//!
//! - **Never short.** The end of an answer is [`None`] from [`Blocks::next`], after the server said `OK`. A stream that ends
//!   without a status, or with `OK` and without any message, is not an answer.
//! - **Never stopped by a cut.** A stream that is lost continues at the byte after the last range ([`Blocks`] says where that
//!   is not possible). Each new range sets the count of retries back, so only a server that makes no progress ends it.
//! - **Never mixed up.** Over all parts of an answer, ranges are in order, do not overlap and lie in the volume; style and
//!   capacity stay the same. Anything else is [`Error::Invalid`].
//! - **Never silent about the reason.** [`Error::advice`] is what to do; retries are logged with `tracing`.
//!
//! A server that leaves out a change in the middle cannot be noticed by any client.
//!
//! # Features
//!
//! `kubernetes` (default): all that needs a cluster. Without it the crate links neither `kube` nor TLS. It enables
//! k8s-openapi's newest version of the API; of its types only those for tokens are used, which are the same in all.
#![forbid(unsafe_code)]

mod answer;
mod blocks;
mod client;
mod csi;
mod error;
#[cfg(feature = "kubernetes")]
mod kubernetes;
mod query;
mod source;
mod transport;

pub use answer::{Range, Style, Violation};
pub use blocks::Blocks;
pub use client::Client;
pub use error::{Advice, Call, Error};
#[cfg(feature = "kubernetes")]
pub use kube;
#[cfg(feature = "kubernetes")]
pub use kubernetes::{Options, Token};
pub use query::{Policy, Query};

/// The example in the README, compiled.
#[cfg(all(doctest, feature = "kubernetes"))]
#[doc = include_str!("../README.md")]
struct Readme;
