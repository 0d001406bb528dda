//! What servers share. All of them: HTTP for probes and metrics ([`http`]), limits of connections ([`slots`]), a log that never blocks
//! ([`log`]), sockets ([`authority`], [`socket`]), and answers that are passed on as bytes ([`upstream`], [`relay`]).
//!
//! | Feature | What it has |
//! | --- | --- |
//! | `tls` | connections over TLS whose certificate changes without a restart, and streams: `certificate`, `identity`, `mutual`, `ticket`, `listen`, `streams` |
//! | `program` | flags, log and end of a program that only serves |
//! | `certificates` | certificate authorities and what they sign |
//! | `lease` | the lease of an elected replica |
//! | `kubernetes` | who calls and what they may get, and VolumeSnapshots: `questions`, `reviews`, `snapshots` |
//!
//! The driver uses none of the last four.
// They panic where the output is closed: `shell` does not.
#![warn(clippy::print_stdout, clippy::print_stderr)]
#![cfg_attr(test, allow(clippy::disallowed_methods))]
#![forbid(unsafe_code)]

pub mod authority;
#[cfg(feature = "tls")]
pub mod certificate;
#[cfg(feature = "certificates")]
pub mod certificates;
pub mod http;
#[cfg(feature = "tls")]
pub mod identity;
#[cfg(feature = "lease")]
pub mod lease;
#[cfg(feature = "tls")]
pub mod listen;
pub mod log;
#[cfg(feature = "tls")]
pub mod mutual;
#[cfg(feature = "kubernetes")]
pub mod object;
#[cfg(feature = "program")]
pub mod program;
#[cfg(feature = "kubernetes")]
pub mod questions;
pub mod relay;
#[cfg(feature = "kubernetes")]
pub mod reviews;
pub mod slots;
#[cfg(feature = "kubernetes")]
pub mod snapshots;
pub mod socket;
#[cfg(feature = "tls")]
pub mod streams;
#[cfg(feature = "tls")]
pub mod ticket;
pub mod upstream;
