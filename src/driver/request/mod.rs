//! What callers ask for, checked: capabilities, parameters, names, paths, pages of lists. Nothing here reads a record
//! of the store by itself.

pub(in crate::driver) mod capability;
pub(in crate::driver) mod create;
#[cfg(any(test, feature = "fuzz"))]
pub(crate) mod fuzz;
pub(in crate::driver) mod page;
pub(in crate::driver) mod params;
pub(in crate::driver) mod path;
