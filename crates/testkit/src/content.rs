//! A model of what a test wrote to a volume.

use std::collections::BTreeMap;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;

use csi_client::{BlockList, Tuple};
use files::punch_hole;

use super::BLOCK;

/// The 4 KiB blocks of a volume that were written and not discarded since, by the byte they are
/// filled with: each block is that byte, its own number and zeros; byte 0 means a block of
/// zeros.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Content {
    pub blocks: BTreeMap<u64, u8>,
}

pub fn block_bytes(block: u64, fill: u8) -> Vec<u8> {
    let mut bytes = vec![fill; BLOCK as usize];
    if fill != 0 {
        bytes[..8].copy_from_slice(&block.to_le_bytes());
    }
    bytes
}

pub fn open_device(path: &Path) -> File {
    File::options().read(true).write(true).open(path).expect("open the device")
}

impl Content {
    /// Writes blocks to the device, buffered.
    pub fn write(&mut self, device: &Path, start: u64, count: u64, fill: u8) {
        let file = open_device(device);
        let mut bytes = Vec::with_capacity((count * BLOCK) as usize);
        for block in start..start + count {
            bytes.extend_from_slice(&block_bytes(block, fill));
        }
        file.write_all_at(&bytes, start * BLOCK).expect("write");
        self.blocks.extend((start..start + count).map(|block| (block, fill)));
    }

    pub fn discard(&mut self, device: &Path, start: u64, count: u64) {
        punch_hole(&open_device(device), start * BLOCK, count * BLOCK).expect("discard");
        self.blocks.retain(|block, _| !(start..start + count).contains(block));
    }

    /// Zeroes blocks in the way that leaves unwritten extents where the pool has such.
    pub fn zero(&mut self, device: &Path, start: u64, count: u64) {
        use nix::fcntl::{FallocateFlags, fallocate};
        let flags = FallocateFlags::FALLOC_FL_ZERO_RANGE | FallocateFlags::FALLOC_FL_KEEP_SIZE;
        let (start_at, length) = ((start * BLOCK) as i64, (count * BLOCK) as i64);
        fallocate(open_device(device), flags, start_at, length).expect("zero");
        self.blocks.retain(|block, _| !(start..start + count).contains(block));
    }

    fn fill(&self, block: u64) -> u8 {
        self.blocks.get(&block).copied().unwrap_or(0)
    }

    /// The blocks of `size` bytes that hold data.
    pub fn allocated(&self, size: u64) -> Vec<u64> {
        coarse(self.blocks.keys().copied(), size)
    }

    /// The blocks of `size` bytes whose content differs from that of `base`.
    pub fn changed_since(&self, base: &Content, size: u64) -> Vec<u64> {
        let blocks = self.blocks.keys().chain(base.blocks.keys()).copied();
        let mut differing: Vec<u64> = blocks.filter(|block| self.fill(*block) != base.fill(*block)).collect();
        differing.sort_unstable();
        coarse(differing.into_iter(), size)
    }

    /// Compares `count` blocks from `start` on with a device or file.
    pub fn assert_equals(&self, path: &Path, start: u64, count: u64) {
        self.compare(path, start, count).unwrap_or_else(|difference| panic!("{difference}"));
    }

    /// The same; the difference is an answer.
    pub fn compare(&self, path: &Path, start: u64, count: u64) -> Result<(), String> {
        let failed = |error| format!("{}: {error}", path.display());
        let file = File::open(path).map_err(failed)?;
        let mut found = vec![0; BLOCK as usize];
        for block in start..start + count {
            file.read_exact_at(&mut found, block * BLOCK).map_err(failed)?;
            let fill = self.fill(block);
            if found != block_bytes(block, fill) {
                return Err(format!("block {block} of {} is not as written", path.display()));
            }
        }
        Ok(())
    }
}

fn coarse(blocks: impl Iterator<Item = u64>, size: u64) -> Vec<u64> {
    let mut blocks: Vec<u64> = blocks.map(|block| block * BLOCK / size).collect();
    blocks.dedup();
    blocks
}

/// The blocks of `size` bytes that tuples cover; tuples must lie on block borders.
pub fn blocks_of(list: &BlockList, size: u64) -> Vec<u64> {
    let blocks = |tuple: Tuple| {
        assert_eq!(
            (tuple.offset % size, tuple.size % size),
            (0, 0),
            "{tuple:?} is not whole blocks of {size}"
        );
        tuple.offset / size..(tuple.offset + tuple.size) / size
    };
    list.tuples().flat_map(blocks).collect()
}
