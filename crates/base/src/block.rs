//! Positions and lengths, in blocks and in bytes.

use std::fmt;
use std::ops::{Add, Sub};

use serde::{Deserialize, Serialize};

/// The size of a block in bytes: a power of two from 4 KiB to 4 MiB.
///
/// Chosen once per volume; every capacity, map and tuple of the volume is a whole number of these.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "u64", into = "u64")]
pub struct BlockSize(u32);

/// A block size that is not a power of two from 4 KiB to 4 MiB.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
#[error("block size {0} is not a power of two from 4096 (4Ki) to 4194304 (4Mi) bytes")]
pub struct BlockSizeError(u64);

impl BlockSize {
    /// 4 KiB, the smallest size and the default.
    pub const MIN: BlockSize = BlockSize(4 << 10);
    /// 4 MiB, the largest size.
    pub const MAX: BlockSize = BlockSize(4 << 20);

    /// Bytes in a block.
    pub const fn bytes(self) -> u64 {
        self.0 as u64
    }

    /// The block that holds byte `offset`.
    pub const fn block_of(self, offset: u64) -> Block {
        Block(offset / self.bytes())
    }

    /// The number of blocks that `bytes` fill, the last one perhaps in part.
    pub const fn blocks_in(self, bytes: u64) -> u64 {
        bytes.div_ceil(self.bytes())
    }

    /// `bytes` rounded up to whole blocks; `None` past [`i64::MAX`], the largest file offset.
    pub fn round_up(self, bytes: u64) -> Option<u64> {
        let rounded = bytes.checked_next_multiple_of(self.bytes())?;
        i64::try_from(rounded).ok().map(|_| rounded)
    }

    /// `bytes` rounded down to whole blocks.
    pub const fn round_down(self, bytes: u64) -> u64 {
        bytes - bytes % self.bytes()
    }
}

impl TryFrom<u64> for BlockSize {
    type Error = BlockSizeError;

    fn try_from(bytes: u64) -> Result<Self, BlockSizeError> {
        let in_range = (Self::MIN.bytes()..=Self::MAX.bytes()).contains(&bytes);
        match u32::try_from(bytes) {
            Ok(size) if in_range && size.is_power_of_two() => Ok(BlockSize(size)),
            _ => Err(BlockSizeError(bytes)),
        }
    }
}

impl From<BlockSize> for u64 {
    fn from(size: BlockSize) -> u64 {
        size.bytes()
    }
}

impl fmt::Display for BlockSize {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// A block of a volume, by its number from the volume's start. Never one of a segment of a map, or of a hash page.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Block(pub u64);

impl Add<u64> for Block {
    type Output = Block;

    fn add(self, blocks: u64) -> Block {
        Block(self.0 + blocks)
    }
}

/// The number of blocks from one to another.
impl Sub for Block {
    type Output = u64;

    fn sub(self, earlier: Block) -> u64 {
        self.0 - earlier.0
    }
}

impl fmt::Display for Block {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// A half-open range of bytes, `start..end`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct ByteRange {
    /// First byte.
    pub start: u64,
    /// The byte after the last one.
    pub end: u64,
}

impl ByteRange {
    /// Length in bytes.
    pub const fn len(self) -> u64 {
        self.end - self.start
    }

    /// Whether it holds no byte.
    pub const fn is_empty(self) -> bool {
        self.start >= self.end
    }

    /// The blocks it touches, the outer ones perhaps in part.
    pub const fn blocks(self, size: BlockSize) -> BlockRange {
        if self.is_empty() {
            return BlockRange::new(0, 0);
        }
        BlockRange { start: size.block_of(self.start), end: Block(size.blocks_in(self.end)) }
    }
}

/// A half-open range of blocks, `start..end`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct BlockRange {
    /// First block.
    pub start: Block,
    /// The block after the last one.
    pub end: Block,
}

impl BlockRange {
    /// The blocks of these numbers.
    pub const fn new(start: u64, end: u64) -> Self {
        BlockRange { start: Block(start), end: Block(end) }
    }

    /// One block.
    pub const fn one(block: Block) -> Self {
        BlockRange { start: block, end: Block(block.0 + 1) }
    }

    /// Each of them, ascending.
    pub fn blocks(self) -> impl Iterator<Item = Block> {
        (self.start.0..self.end.0).map(Block)
    }

    /// Number of blocks.
    pub const fn len(self) -> u64 {
        self.end.0 - self.start.0
    }

    /// Whether it holds no block.
    pub const fn is_empty(self) -> bool {
        self.start.0 >= self.end.0
    }

    /// The bytes these blocks cover.
    pub const fn bytes(self, size: BlockSize) -> ByteRange {
        ByteRange { start: self.start.0 * size.bytes(), end: self.end.0 * size.bytes() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn block_sizes_are_powers_of_two_from_4ki_to_4mi() {
        for good in [4096, 8192, 65536, 4 << 20] {
            assert_eq!(BlockSize::try_from(good).map(BlockSize::bytes), Ok(good));
        }
        for bad in [0, 1, 512, 2048, 4095, 4097, 12288, 8 << 20, u64::MAX] {
            assert_eq!(BlockSize::try_from(bad), Err(BlockSizeError(bad)));
        }
    }

    #[test]
    fn sizes_round_up_to_a_block_and_never_overflow() {
        let size = BlockSize::MIN;
        for (asked, given) in
            [(0, Some(0)), (1, Some(4096)), (4096, Some(4096)), (1 << 20 | 1, Some((1 << 20) + 4096))]
        {
            assert_eq!(size.round_up(asked), given);
        }
        assert_eq!(size.round_up(i64::MAX as u64), None);
        assert_eq!(size.round_up(u64::MAX), None);
    }

    #[test]
    fn a_byte_range_touches_partial_blocks() {
        let blocks = |start, end| ByteRange { start, end }.blocks(BlockSize::MIN);
        assert_eq!(blocks(0, 1), BlockRange::new(0, 1));
        assert_eq!(blocks(4095, 4097), BlockRange::new(0, 2));
        assert_eq!(blocks(4096, 8192), BlockRange::new(1, 2));
        assert!(blocks(5000, 5000).is_empty());
    }
}
