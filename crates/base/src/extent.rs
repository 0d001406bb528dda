//! Parts of a file, as a filesystem lists them.

use super::ByteRange;

/// What an extent says about the bytes of its range.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Address {
    /// The range is, byte for byte, at this address of the filesystem's device. Two files that
    /// exist at once and have a range at one address hold the same bytes there.
    At(u64),
    /// Allocated, never written: reads as zeros.
    Unwritten,
    /// Compressed, inline, encrypted, unaligned or not mapped yet: the address says nothing.
    Opaque,
}

/// A mapped range of a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Extent {
    /// The bytes of the file.
    pub range: ByteRange,
    /// Where they are on the device.
    pub address: Address,
}

/// A range of a file that was written since, or a hole next to one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Written {
    /// The bytes of the file. A hole next to other holes may reach to the end of the address space.
    pub range: ByteRange,
    /// Whether it holds data; else it reads as zeros.
    pub data: bool,
}
