//! Whether a device holds what is stored of it, by a look at a part of that.

use std::collections::HashSet;
use std::ops::Range;

use files::AlignedBuffer;

use crate::device::{Device, is_zeros};
use crate::error::Result;
use crate::repository::pack::Packs;
use crate::repository::{BLOCK, Extent, Index, Repository, SEGMENT, pieces};

/// At most this many of the segments, spread over all of them.
pub fn some(segments: &[u32], most: usize) -> Vec<u32> {
    segments.iter().copied().step_by(segments.len() / most + 1).collect()
}

/// Where the device has other bytes than the backup, in a few blocks of each of these segments; `None` if no difference is
/// found. With `zeros` blocks that the backup does not have are compared too: they are zeros on the device. A block that is
/// the one of `other` is no difference: a killed restore of `other` onto the backup has written a part of it.
pub fn differs(
    repository: &Repository,
    index: &Index,
    other: Option<&Index>,
    segments: &[u32],
    zeros: bool,
    device: &Device,
) -> Result<Option<u64>> {
    let mut buffer = AlignedBuffer::new(SEGMENT as usize / 1024);
    for number in segments {
        let mut packs = Packs::default();
        let segment = repository.segment_at(index, *number, &mut packs)?;
        let mut found = Vec::new();
        let mut compare = |offset: u64, wanted: Option<&[u8]>, length: usize| {
            let bytes = buffer.part(length);
            device.read(offset, bytes)?;
            // A device may be longer than the volume.
            let length = (length as u64).min(index.about.size - offset) as usize;
            for (at, block) in (0..).step_by(BLOCK as usize).zip(bytes[..length].chunks(BLOCK as usize)) {
                if wanted.map_or(!is_zeros(block), |wanted| wanted[at..at + block.len()] != *block) {
                    found.push(offset + at as u64);
                }
            }
            Ok(())
        };
        let chosen = sample(&segment.extents);
        repository.fetch(pieces(*number, &chosen, &packs), &mut |piece, bytes| {
            compare(piece.offset, Some(bytes), bytes.len())
        })?;
        let start = u64::from(*number) * SEGMENT;
        let blocks = (index.about.size - start).min(SEGMENT).div_ceil(BLOCK) as u32;
        for block in gaps(&segment.extents, blocks).into_iter().filter(|_| zeros) {
            compare(start + u64::from(block) * BLOCK, None, BLOCK as usize)?;
        }
        for offset in found {
            if !other.map_or(Ok(false), |other| holds(repository, other, offset, device))? {
                return Ok(Some(offset));
            }
        }
    }
    Ok(None)
}

/// Whether the device has the block of a backup at an offset.
fn holds(repository: &Repository, index: &Index, offset: u64, device: &Device) -> Result<bool> {
    let (number, block) = ((offset / SEGMENT) as u32, (offset % SEGMENT / BLOCK) as u32);
    let mut packs = Packs::default();
    let segment = repository.segment_at(index, number, &mut packs)?;
    let extents: Vec<Extent> = segment.extents.iter().filter_map(|of| of.cut(&(block..block + 1))).collect();
    let (mut wanted, mut buffer) = (vec![0; BLOCK as usize], AlignedBuffer::new(BLOCK as usize));
    repository.fetch(pieces(number, &extents, &packs), &mut |_, bytes| {
        wanted[..bytes.len()].copy_from_slice(bytes);
        Ok(())
    })?;
    let bytes = buffer.part(BLOCK as usize);
    device.read(offset, bytes)?;
    let length = BLOCK.min(index.about.size - offset) as usize;
    Ok(bytes[..length] == wanted[..length])
}

/// The first, the middle and the last extent, and of each no more than a chunk may have.
fn sample(extents: &[Extent]) -> Vec<Extent> {
    let chosen = [0, extents.len() / 2, extents.len().saturating_sub(1)];
    let chosen: HashSet<usize> = chosen.into_iter().filter(|place| *place < extents.len()).collect();
    let short = |extent: &Extent| extent.cut(&(extent.start..extent.start + 16));
    chosen.into_iter().filter_map(|place| short(&extents[place])).collect()
}

/// Of so many blocks some that no extent has: the first, one in the middle of the middle gap, and the last.
fn gaps(extents: &[Extent], blocks: u32) -> Vec<u32> {
    let ends = std::iter::once(0).chain(extents.iter().map(Extent::end));
    let starts = extents.iter().map(|extent| extent.start).chain([blocks]);
    let gaps: Vec<Range<u32>> =
        ends.zip(starts).map(|(end, next)| end..next).filter(|gap| !gap.is_empty()).collect();
    let Some((first, last)) = gaps.first().zip(gaps.last()) else { return Vec::new() };
    let middle = &gaps[gaps.len() / 2];
    let mut chosen = vec![first.start, middle.start.midpoint(middle.end - 1), last.end - 1];
    chosen.dedup();
    chosen
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A device that holds data where the backup has zeros is another one, also where all of a segment is zeros.
    #[test]
    fn zeros_are_sampled_at_both_ends_and_in_the_middle() {
        let of = |start: u32, blocks: u32| Extent { start, blocks, pack: 0, chunk: 0, skip: 0 };
        for (extents, blocks, wanted) in [
            (vec![], 100, vec![0, 49, 99]),
            (vec![], 1, vec![0]),
            (vec![of(0, 100)], 100, vec![]),
            (vec![of(0, 10)], 100, vec![10, 54, 99]),
            (vec![of(10, 90)], 100, vec![0, 4, 9]),
            (vec![of(10, 10), of(30, 10)], 40, vec![0, 24, 29]),
            (vec![of(1, 98)], 100, vec![0, 99]),
        ] {
            assert_eq!(gaps(&extents, blocks), wanted, "{extents:?} of {blocks}");
        }
    }
}
