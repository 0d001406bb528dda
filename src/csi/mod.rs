//! The gRPC shells: each handler decodes a request, calls the driver in a blocking thread, and
//! encodes the answer. Nothing is decided here but codes ([`status`]).

mod authority;
mod controller;
mod decode;
#[cfg(any(test, fuzzing))]
pub(crate) mod fuzz;
mod group_controller;
mod identity;
mod node;
mod rpc;
mod server;
mod snapshot_metadata;
pub mod status;

pub use server::{Endpoint, EndpointError, serve};

/// The messages, clients and servers of the CSI v1 contract, made from `proto/csi.proto`.
#[allow(missing_docs, clippy::all, clippy::undocumented_unsafe_blocks, rustdoc::all)]
pub mod proto {
    tonic::include_proto!("csi.v1");

    /// The encoded `FileDescriptorSet` of the contract, with its imports.
    pub const FILE_DESCRIPTOR_SET: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/csi.bin"));
}
