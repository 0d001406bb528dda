//! The third design: VolumeSnapshotDelta, answered by an aggregated API server ([`aggregated`]), which asks the cbt-http
//! ([`sidecar`]) of the driver that DriverDiscovery ([`discovery`]) names.

pub mod aggregated;
mod api;
mod discovery;
mod documents;
mod front_proxy;
mod list;
mod negotiate;
mod resource;
pub mod sidecar;
mod token;
mod wire;

pub use token::PLACEHOLDER;
