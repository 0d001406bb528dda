//! The streams of the snapshot metadata service, and the memory that they share.

pub(in crate::driver) mod read;
pub(in crate::driver) mod streams;
