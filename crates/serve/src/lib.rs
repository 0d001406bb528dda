//! What servers share, each thing once: HTTP for probes and metrics ([`http`]), and answers that are fetched and passed on as
//! bytes ([`upstream`], [`relay`]). As features, for the driver links neither: connections over TLS whose certificate
//! changes without a restart (`tls`: `certificate`, `listen`), and the lease of an elected replica (`lease`).
#![cfg_attr(test, allow(clippy::disallowed_methods))]
#![forbid(unsafe_code)]

#[cfg(feature = "tls")]
pub mod certificate;
pub mod http;
#[cfg(feature = "lease")]
pub mod lease;
#[cfg(feature = "tls")]
pub mod listen;
pub mod relay;
pub mod upstream;
