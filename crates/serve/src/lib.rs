//! What the servers beside the driver share, each thing once: connections over TLS whose certificate changes without a
//! restart ([`certificate`], [`listen`]), answers that are fetched and passed on as bytes ([`upstream`], [`relay`]), metrics and health over HTTP
//! ([`http`]), and the lease of an elected replica ([`lease`], a feature). What a server serves is its own business.
#![cfg_attr(test, allow(clippy::disallowed_methods))]
#![forbid(unsafe_code)]

pub mod certificate;
pub mod http;
#[cfg(feature = "lease")]
pub mod lease;
pub mod listen;
pub mod relay;
pub mod upstream;
