//! Volumes in use on this node: their loop devices, filesystems and targets.
//!
//! `state.json` says where a volume should be; it is written before the kernel is called, so that
//! every mount is explained by a record. What is mounted is read from the kernel: a record
//! without its mount is repaired or dropped.

pub(in crate::driver) mod ephemeral;
pub(in crate::driver) mod expand;
pub(in crate::driver) mod health;
pub(in crate::driver) mod held;
pub(in crate::driver) mod publish;
pub(in crate::driver) mod stage;
pub(in crate::driver) mod stats;
pub(in crate::driver) mod used;
