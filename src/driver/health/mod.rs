//! What is wrong with volumes and the pool. `node/health.rs` adds what only the node can see.

pub(in crate::driver) mod read_errors;
pub(in crate::driver) mod volume;
