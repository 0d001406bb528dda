//! deltapath: a CSI driver with exact changed block tracking.
pub mod base;
pub mod cbt;
pub mod sys;
