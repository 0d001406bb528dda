//! The gRPC shells: each handler decodes a request, calls the driver in a blocking thread, and
//! encodes the answer. Nothing is decided here but codes ([`status`]).

mod controller;
mod decode;
#[cfg(any(test, feature = "fuzz"))]
pub(crate) mod fuzz;
mod group_controller;
mod identity;
mod node;
mod puller;
mod router;
mod rpc;
mod server;
mod services;
mod snapshot_metadata;
pub mod status;
mod transfer;

pub use router::{RouterError, RouterListener};
pub use serve::mutual::Files as RouterFiles;
pub use server::{EndpointError, serve};
