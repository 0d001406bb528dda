//! The servers of the earlier designs under test.

pub mod aggregation;
pub mod world;
