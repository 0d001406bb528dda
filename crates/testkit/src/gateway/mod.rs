//! The gateway under test.

pub mod driver;
pub mod world;
