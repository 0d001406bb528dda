//! The messages, clients and servers of two contracts: CSI v1 here, made from `proto/csi.proto`, and the Kubernetes
//! SnapshotMetadata API in [`kubernetes`], made from `proto/snapshotmetadata.proto`.
#![forbid(unsafe_code)]
#![allow(missing_docs, clippy::all, clippy::undocumented_unsafe_blocks, rustdoc::all)]

tonic::include_proto!("csi.v1");

/// The encoded `FileDescriptorSet` of CSI, with its imports.
pub const FILE_DESCRIPTOR_SET: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/csi.bin"));

/// The Kubernetes SnapshotMetadata API (KEP-3314).
pub mod kubernetes {
    tonic::include_proto!("snapshotmetadata");

    /// The encoded `FileDescriptorSet` of this API.
    pub const FILE_DESCRIPTOR_SET: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/snapshotmetadata.bin"));
}
