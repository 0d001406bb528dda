//! The messages, clients and servers of six contracts: CSI v1 here, made from `proto/csi.proto`; the Kubernetes
//! SnapshotMetadata API in [`kubernetes`], made from `proto/snapshotmetadata.proto`; two earlier designs of it in
//! [`differential`] and [`deltas`], made from `proto/differentialsnapshot.proto` and `proto/listsnapshotdeltas.proto`; what
//! router and driver say to each other in addition to CSI in [`node`], made from `proto/node.proto`; and what drivers say to each other
//! in [`transfer`], made from `proto/transfer.proto`.
//!
//! And how clients read [`answers`] that are not as they should be.
#![forbid(unsafe_code)]
#![allow(missing_docs, clippy::all, clippy::undocumented_unsafe_blocks, rustdoc::all)]

pub mod answers;

tonic::include_proto!("csi.v1");

/// The encoded `FileDescriptorSet` of CSI, with its imports.
pub const FILE_DESCRIPTOR_SET: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/csi.bin"));

/// The Kubernetes SnapshotMetadata API (KEP-3314).
pub mod kubernetes {
    tonic::include_proto!("snapshotmetadata");

    /// The encoded `FileDescriptorSet` of this API.
    pub const FILE_DESCRIPTOR_SET: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/snapshotmetadata.bin"));
}

/// The DifferentialSnapshot service, an earlier design of KEP-3314.
pub mod differential {
    tonic::include_proto!("differentialsnapshot.v1alpha1");
}

/// What the router asks of a node's driver, in addition to CSI. Private to deltapath.
pub mod node {
    tonic::include_proto!("deltapath.node.v1");
}

/// What one node's driver asks of another's. Private to deltapath.
pub mod transfer {
    tonic::include_proto!("deltapath.transfer.v1");
}

/// The call ListSnapshotDeltas, of another earlier design of KEP-3314.
pub mod deltas {
    tonic::include_proto!("cbt.v1alpha1");
}
