//! What servers share, each thing once: HTTP for probes and metrics ([`http`]), the places of connections ([`places`]), a log that waits
//! for no reader ([`log`]), sockets ([`authority`], [`socket`]), and answers that are fetched and passed on as bytes ([`upstream`],
//! [`relay`]). As features: connections over TLS whose certificate
//! changes without a restart (`tls`: `certificate`, `mutual`, `ticket`, `listen`), and the streams on them (`streams`); and, so that the
//! driver links none of it, the flags, log and end of a program that only serves (`program`), authorities and what they sign
//! (`certificates`), the lease of an elected replica (`lease`), and what is asked of the Kubernetes API server: who calls and
//! what they may get, and VolumeSnapshots (`kubernetes`: `questions`, `reviews`, `snapshots`).
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
