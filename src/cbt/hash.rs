//! Content hashes of blocks.

use std::sync::OnceLock;

use crate::base::BlockSize;

/// The BLAKE3 hash of a block's bytes. All zero bytes stand for "not known" in a hash file: no
/// input is known, or will be found, that hashes to it.
pub type BlockHash = [u8; 32];

/// A slot that holds no hash.
pub(crate) const UNKNOWN: BlockHash = [0; 32];

/// The hash of a block of zeros, which is what a hole reads as.
pub fn zero_hash(size: BlockSize) -> BlockHash {
    // One cell a power of two from MIN to MAX.
    static CELLS: [OnceLock<BlockHash>; 11] = [const { OnceLock::new() }; 11];
    let index = size.bytes().trailing_zeros() - BlockSize::MIN.bytes().trailing_zeros();
    *CELLS[index as usize].get_or_init(|| hash_block(&vec![0; size.bytes() as usize]))
}

/// Hashes one block.
pub(crate) fn hash_block(block: &[u8]) -> BlockHash {
    *blake3::hash(block).as_bytes()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_block_size_has_its_own_zero_hash() {
        let mut size = BlockSize::MIN.bytes();
        let mut seen = Vec::new();
        while size <= BlockSize::MAX.bytes() {
            let block = BlockSize::try_from(size).expect("a power of two in range");
            assert_eq!(zero_hash(block), *blake3::hash(&vec![0; size as usize]).as_bytes());
            assert!(!seen.contains(&zero_hash(block)));
            seen.push(zero_hash(block));
            size *= 2;
        }
    }
}
