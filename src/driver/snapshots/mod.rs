//! Snapshots, alone and in groups: how they are taken, filled, hashed, kept and deleted. What is read from their maps is in
//! `metadata`.

pub(in crate::driver) mod fill;
pub(in crate::driver) mod groups;
pub(in crate::driver) mod hashing;
pub(in crate::driver) mod history;
pub(in crate::driver) mod queue;
pub(in crate::driver) mod quiesce;
pub(in crate::driver) mod take;
