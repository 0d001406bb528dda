//! Content hashes of blocks.
//!
//! BLAKE3 is a tree over chunks of 1 KiB, and a processor hashes up to 16 chunks side by side. A block of
//! 4 KiB has four, so hashed by itself it leaves most of the lanes empty. [`hash_each`] fills them with
//! the same chunk of many blocks, which makes the very same hashes several times as fast.

use std::sync::OnceLock;

use blake3::IncrementCounter;
use blake3::platform::{MAX_SIMD_DEGREE, Platform};

use base::BlockSize;

/// The BLAKE3 hash of a block's bytes. All zero bytes mean "not known" in a hash file: no
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

/// The size of a chunk (BLAKE3 paper, section 2.1), and of a chaining value.
const CHUNK: usize = 1024;
const VALUE: usize = 32;
/// From this size on a block fills the lanes by itself.
const LARGE: usize = MAX_SIMD_DEGREE * CHUNK;
/// Chunks of the largest block that does not.
const MOST_CHUNKS: usize = 16;

/// The initial value of every chunk and parent (section 2.2): that of SHA-256.
const IV: [u32; 8] =
    [0x6A09_E667, 0xBB67_AE85, 0x3C6E_F372, 0xA54F_F53A, 0x510E_527F, 0x9B05_688C, 0x1F83_D9AB, 0x5BE0_CD19];
/// Domain flags (section 2.3, table 3).
const CHUNK_START: u8 = 1;
const CHUNK_END: u8 = 2;
const PARENT: u8 = 4;
const ROOT: u8 = 8;

/// Hashes the whole blocks of `size` in `bytes`, and passes on the number and hash of each.
pub fn hash_each(bytes: &[u8], size: BlockSize, mut put: impl FnMut(u64, BlockHash)) {
    let size = size.bytes() as usize;
    if size >= LARGE {
        return bytes.chunks_exact(size).zip(0..).for_each(|(block, number)| put(number, hash_block(block)));
    }
    let platform = Platform::detect();
    let mut number = 0;
    for group in bytes.chunks(MAX_SIMD_DEGREE * size) {
        let mut hashes = [[0; VALUE]; MAX_SIMD_DEGREE];
        let hashes = &mut hashes[..group.len() / size];
        side_by_side(platform, group, size, hashes);
        for hash in hashes {
            put(number, *hash);
            number += 1;
        }
    }
}

/// Hashes as many blocks as there are lanes, at most. A block has a power of two of chunks, and fewer
/// than fill the lanes.
fn side_by_side(platform: Platform, group: &[u8], size: usize, hashes: &mut [BlockHash]) {
    let (blocks, chunks) = (hashes.len(), size / CHUNK);
    // The values of one level of all trees: those of a block behind each other.
    let mut values = [0u8; MAX_SIMD_DEGREE * MOST_CHUNKS * VALUE];
    let mut out = [0u8; MAX_SIMD_DEGREE * VALUE];
    for chunk in 0..chunks {
        let mut inputs = [&[0u8; CHUNK]; MAX_SIMD_DEGREE];
        for (input, block) in inputs.iter_mut().zip(group.chunks_exact(size)) {
            *input = block[chunk * CHUNK..][..CHUNK].try_into().expect("a chunk of a whole block");
        }
        let (counter, same) = (chunk as u64, IncrementCounter::No);
        platform.hash_many(&inputs[..blocks], &IV, counter, same, 0, CHUNK_START, CHUNK_END, &mut out);
        for block in 0..blocks {
            let at = (block * chunks + chunk) * VALUE;
            values[at..at + VALUE].copy_from_slice(&out[block * VALUE..][..VALUE]);
        }
    }
    let mut width = chunks;
    while width > 1 {
        width /= 2;
        let flags = if width == 1 { PARENT | ROOT } else { PARENT };
        // In place: the values of a level take half the room of those that it is made from, from the
        // front on.
        for start in (0..blocks * width).step_by(MAX_SIMD_DEGREE) {
            let count = MAX_SIMD_DEGREE.min(blocks * width - start);
            let mut inputs = [&[0u8; 2 * VALUE]; MAX_SIMD_DEGREE];
            for (lane, input) in inputs[..count].iter_mut().enumerate() {
                let at = (start + lane) * 2 * VALUE;
                *input = values[at..at + 2 * VALUE].try_into().expect("two values");
            }
            platform.hash_many(&inputs[..count], &IV, 0, IncrementCounter::No, flags, 0, 0, &mut out);
            values[start * VALUE..][..count * VALUE].copy_from_slice(&out[..count * VALUE]);
        }
    }
    for (hash, value) in hashes.iter_mut().zip(values.chunks_exact(VALUE)) {
        hash.copy_from_slice(value);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The fast way uses an interface of the blake3 crate that it does not promise to keep.
    #[test]
    fn blocks_hashed_side_by_side_have_the_hashes_of_blake3() {
        for size in [4096, 8192, 16384, 65536] {
            for count in [0, 1, 2, 15, 16, 17, 40] {
                let mut bytes = vec![0; count * size];
                blake3::Hasher::new().update(&[7]).finalize_xof().fill(&mut bytes);
                let mut seen = Vec::new();
                let block_size = BlockSize::try_from(size as u64).expect("a power of two");
                hash_each(&bytes, block_size, |number, hash| seen.push((number, hash)));
                let expected = bytes.chunks(size).map(|block| *blake3::hash(block).as_bytes());
                assert_eq!(seen, (0..).zip(expected).collect::<Vec<_>>(), "{count} blocks of {size}");
            }
        }
    }

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
