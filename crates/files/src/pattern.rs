//! A test pattern: content that is written to a device, its model, and its comparison with devices and files.
// Written by commands to devices, never by a driver.
#![allow(clippy::disallowed_methods)]

use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::Path;

use crate::punch_hole;
use base::{BlockSize, Stop};

const BLOCK: usize = BlockSize::MIN.bytes() as usize;
/// Blocks compared at once.
const CHUNK: u64 = 256;

/// The content of every 4 KiB block that is not zeros, as the seed it is made from.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Image {
    blocks: BTreeMap<u64, u64>,
}

fn fill(block: u64, seed: u64, bytes: &mut [u8]) {
    let mut random = fastrand::Rng::with_seed(seed ^ block.rotate_left(32));
    for word in bytes.chunks_exact_mut(8) {
        // Never a block of zeros.
        word.copy_from_slice(&(random.u64(..) | 1).to_le_bytes());
    }
}

impl Image {
    /// Writes `count` blocks at `start`, to the device and to the model.
    pub fn write(&mut self, device: &File, start: u64, count: u64, seed: u64) -> io::Result<()> {
        let mut bytes = vec![0; BLOCK * count as usize];
        for (block, chunk) in (start..).zip(bytes.chunks_exact_mut(BLOCK)) {
            fill(block, seed, chunk);
            self.blocks.insert(block, seed);
        }
        device.write_all_at(&bytes, start * BLOCK as u64)
    }

    /// Writes what is there already.
    pub fn rewrite_same(&self, device: &File, block: u64) -> io::Result<()> {
        let Some(seed) = self.blocks.get(&block) else { return Ok(()) };
        let mut bytes = vec![0; BLOCK];
        fill(block, *seed, &mut bytes);
        device.write_all_at(&bytes, block * BLOCK as u64)
    }

    /// Writes zeros over `count` blocks at `start`.
    pub fn zero(&mut self, device: &File, start: u64, count: u64) -> io::Result<()> {
        self.blocks.retain(|block, _| !(start..start + count).contains(block));
        device.write_all_at(&vec![0; BLOCK * count as usize], start * BLOCK as u64)
    }

    /// Discards `count` blocks at `start`.
    pub fn punch(&mut self, device: &File, start: u64, count: u64) -> io::Result<()> {
        self.blocks.retain(|block, _| !(start..start + count).contains(block));
        punch_hole(device, start * BLOCK as u64, count * BLOCK as u64)
    }

    /// The blocks that hold data.
    pub fn allocated(&self) -> Vec<u64> {
        self.blocks.keys().copied().collect()
    }

    /// The blocks whose content differs from that of `base`.
    pub fn changed_since(&self, base: &Image) -> Vec<u64> {
        let mut blocks: Vec<u64> = self.blocks.keys().chain(base.blocks.keys()).copied().collect();
        blocks.sort_unstable();
        blocks.dedup();
        blocks.retain(|block| self.blocks.get(block) != base.blocks.get(block));
        blocks
    }

    /// Compares a device or file of `length` bytes with the model, byte by byte. An error names the
    /// first block that differs.
    pub fn compare(&self, path: &Path, length: u64, stop: &Stop) -> Result<(), Box<dyn std::error::Error>> {
        self.compare_at(path, length, (0..length / BLOCK as u64).step_by(CHUNK as usize), stop)
    }

    /// The same for the parts of 1 MiB that hold data, and `spread` parts that are spread over all.
    pub fn compare_parts(
        &self,
        path: &Path,
        length: u64,
        spread: u64,
        stop: &Stop,
    ) -> Result<(), Box<dyn std::error::Error>> {
        let parts = (length / BLOCK as u64).div_ceil(CHUNK);
        let mut chosen: BTreeSet<u64> = self.blocks.keys().map(|block| block / CHUNK).collect();
        let far = |number: u64| (u128::from(parts) * u128::from(number) / u128::from(spread)) as u64;
        chosen.extend((0..spread.min(parts)).map(far));
        self.compare_at(path, length, chosen.into_iter().map(|part| part * CHUNK), stop)
    }

    fn compare_at(
        &self,
        path: &Path,
        length: u64,
        starts: impl Iterator<Item = u64>,
        stop: &Stop,
    ) -> Result<(), Box<dyn std::error::Error>> {
        let file = File::open(path)?;
        let blocks = length / BLOCK as u64;
        let (mut found, mut wanted) = (vec![0; BLOCK * CHUNK as usize], vec![0; BLOCK * CHUNK as usize]);
        for start in starts {
            stop.check()?;
            let count = CHUNK.min(blocks - start) as usize * BLOCK;
            file.read_exact_at(&mut found[..count], start * BLOCK as u64)?;
            wanted.fill(0);
            for (block, seed) in self.blocks.range(start..start + CHUNK) {
                let at = (block - start) as usize * BLOCK;
                fill(*block, *seed, &mut wanted[at..at + BLOCK]);
            }
            if found[..count] != wanted[..count] {
                let at = found.iter().zip(&wanted).position(|(a, b)| a != b).unwrap_or(0);
                let offset = start * BLOCK as u64 + at as u64;
                return Err(format!("{} differs at byte {offset}", path.display()).into());
            }
        }
        Ok(())
    }
}
