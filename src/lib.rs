//! deltapath: a CSI driver with exact changed block tracking.
pub mod base;
pub mod cbt;
pub mod csi;
pub mod driver;
pub mod pool;
pub mod store;
pub mod sys;
