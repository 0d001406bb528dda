//! The messages, clients and servers of the CSI v1 contract, made from `proto/csi.proto`.
#![forbid(unsafe_code)]
#![allow(missing_docs, clippy::all, clippy::undocumented_unsafe_blocks, rustdoc::all)]

tonic::include_proto!("csi.v1");

/// The encoded `FileDescriptorSet` of the contract, with its imports.
pub const FILE_DESCRIPTOR_SET: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/csi.bin"));
