//! The block, which the repository counts in and devices are read in.

/// The unit of all positions. What a driver lists is rounded out to it.
pub const BLOCK: u64 = 4096;
