//! The locks and threads of the protocols that `make interleavings` plays through: those of std, and there those of a model checker.

#[cfg(feature = "interleavings")]
pub(crate) use shuttle::{
    sync::{Condvar, Mutex, MutexGuard},
    thread,
};
#[cfg(not(feature = "interleavings"))]
pub(crate) use std::{
    sync::{Condvar, Mutex, MutexGuard},
    thread,
};
