//! A data directory without a running driver: what `deltapath check` and `deltapath verify` look at.

pub(in crate::driver) mod check;
pub(in crate::driver) mod inspect;
