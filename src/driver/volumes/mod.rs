//! Volumes as the controller sees them: made, listed, expanded, attached, placed, deleted. Their use on the node is in
//! `node`; the thread that copies one from another node is in `transfer`.

pub(in crate::driver) mod attach;
pub(in crate::driver) mod capacity;
pub(in crate::driver) mod expand;
pub(in crate::driver) mod incoming;
pub(in crate::driver) mod make;
pub(in crate::driver) mod placement;
pub(in crate::driver) mod remote;
