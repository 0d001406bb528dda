//! What nearly every test and bench of the driver names.

pub use csi_client::{
    Client, block_capability, from_snapshot, from_volume, mount_capability, new_volume, stage_of,
};
pub use tonic::Code;

pub use crate::content::{Content, blocks_of, open_device};
pub use crate::{
    BLOCK, GIB, MIB, PoolKind, Rig, code, is_refused, names, new_volume_from, requests, state_of,
};
