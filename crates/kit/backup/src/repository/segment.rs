//! The map of one segment of a volume: which chunk holds which blocks. Pure: it reads and writes nothing.

use std::collections::HashMap;
use std::ops::Range;

use serde::{Deserialize, Serialize};

use super::pack::{self, PackRef, Packs};
use crate::block::BLOCK;
use crate::error::{Error, Result};

/// Blocks in a segment: 128 MiB. An incremental backup writes the maps of the segments in which something changed, some
/// 16 KiB each, and names the others, one row each in its index.
pub const SEGMENT_BLOCKS: u32 = 32768;
/// Bytes in a segment.
pub const SEGMENT: u64 = SEGMENT_BLOCKS as u64 * BLOCK;

/// Blocks of a segment and the chunk that holds them. `pack` is a place in a table of packs: in memory that of the whole
/// backup, on disk that of the segment.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Extent {
    /// First block, counted from the start of the segment.
    pub start: u32,
    pub blocks: u32,
    pub pack: u32,
    pub chunk: u32,
    /// Blocks of the chunk before the first that is meant.
    pub skip: u32,
}

impl Extent {
    /// The block after the last one.
    pub fn end(&self) -> u32 {
        self.start + self.blocks
    }

    /// The part of it inside `range`, if any.
    pub fn cut(&self, range: &Range<u32>) -> Option<Extent> {
        let (start, end) = (self.start.max(range.start), self.end().min(range.end));
        (start < end).then(|| Extent {
            start,
            blocks: end - start,
            skip: self.skip + (start - self.start),
            ..*self
        })
    }
}

/// The extents of a segment: ascending, disjoint. Blocks in none are zeros.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Segment {
    /// With places in the backup's table of packs.
    pub extents: Vec<Extent>,
}

/// As it is stored: postcard, as a chunk of a pack.
#[derive(Serialize, Deserialize)]
struct Stored {
    packs: Vec<PackRef>,
    extents: Vec<Extent>,
}

impl Segment {
    /// Puts blocks in the place of what was there: `ranges` are cleared, then `extents`, which lie inside them, come in.
    /// Both ascending and disjoint.
    pub fn replace(&mut self, ranges: &[Range<u32>], mut extents: Vec<Extent>) {
        let mut kept = Vec::with_capacity(self.extents.len() + extents.len());
        for extent in &self.extents {
            let mut position = extent.start;
            let from = ranges.partition_point(|range| range.end <= extent.start);
            for range in ranges[from..].iter().take_while(|range| range.start < extent.end()) {
                kept.extend(extent.cut(&(position..range.start.max(position))));
                position = range.end;
            }
            kept.extend(extent.cut(&(position..extent.end().max(position))));
        }
        kept.append(&mut extents);
        kept.sort_unstable_by_key(|extent| extent.start);
        self.extents = kept;
    }

    /// The blocks that another segment holds otherwise, and what it holds there: an empty cut is zeros. `self` is what is
    /// there, `target` what is wanted; both have places in one table of packs.
    pub fn differing(&self, target: &Segment) -> Vec<Range<u32>> {
        let same = |a: &Extent, b: &Extent, at: u32| {
            a.pack == b.pack && a.chunk == b.chunk && a.skip + (at - a.start) == b.skip + (at - b.start)
        };
        let mut edges: Vec<u32> = self
            .extents
            .iter()
            .chain(&target.extents)
            .flat_map(|extent| [extent.start, extent.end()])
            .collect();
        edges.sort_unstable();
        edges.dedup();
        let mut differ: Vec<Range<u32>> = Vec::new();
        for pair in edges.windows(2) {
            let (start, end) = (pair[0], pair[1]);
            let is_same = match (self.at(start), target.at(start)) {
                (None, None) => true,
                (Some(a), Some(b)) => same(a, b, start),
                _ => false,
            };
            match differ.last_mut() {
                _ if is_same => {}
                Some(last) if last.end == start => last.end = end,
                _ => differ.push(start..end),
            }
        }
        differ
    }

    /// The extent that holds a block.
    pub fn at(&self, block: u32) -> Option<&Extent> {
        let next = self.extents.partition_point(|extent| extent.end() <= block);
        self.extents.get(next).filter(|extent| extent.start <= block)
    }

    /// The parts of the extents inside `range`.
    pub fn within(&self, range: &Range<u32>) -> Vec<Extent> {
        let first = self.extents.partition_point(|extent| extent.end() <= range.start);
        let inside = self.extents[first..].iter().take_while(|extent| extent.start < range.end);
        inside.filter_map(|extent| extent.cut(range)).collect()
    }

    pub fn blocks(&self) -> u64 {
        self.extents.iter().map(|extent| u64::from(extent.blocks)).sum()
    }

    /// The packs in use, each once, in the order of first use.
    pub fn packs(&self) -> Vec<u32> {
        let mut packs: Vec<u32> = self.extents.iter().map(|extent| extent.pack).collect();
        packs.sort_unstable();
        packs.dedup();
        packs
    }

    /// As it is stored. Every pack in use must be in the table already.
    pub fn encode(&self, packs: &Packs) -> Vec<u8> {
        let used = self.packs();
        let place: HashMap<u32, u32> = used.iter().copied().zip(0..).collect();
        let stored = Stored {
            packs: used.iter().map(|pack| *packs.get(*pack)).collect(),
            extents: self
                .extents
                .iter()
                .map(|extent| Extent { pack: place[&extent.pack], ..*extent })
                .collect(),
        };
        // Numbers and byte strings, into a vector.
        postcard::to_stdvec(&stored).expect("nothing in it that postcard refuses")
    }

    /// Reads what [`Segment::encode`] made, and checks that it holds together. Its packs come into the table.
    pub fn decode(bytes: &[u8], packs: &mut Packs) -> Result<Self> {
        let damaged = |why: &str| Error::damaged("the map of a segment", why);
        let stored: Stored = postcard::from_bytes(bytes).map_err(|error| damaged(&error.to_string()))?;
        pack::check(&stored.packs, "the map of a segment")?;
        let places: Vec<u32> = stored.packs.into_iter().map(|pack| packs.intern(pack)).collect();
        let mut end = 0;
        let mut extents = stored.extents;
        for extent in &mut extents {
            let last = extent.start.checked_add(extent.blocks).filter(|last| *last <= SEGMENT_BLOCKS);
            let pack = usize::try_from(extent.pack).ok().and_then(|pack| places.get(pack));
            let (Some(last), Some(pack)) = (last, pack) else {
                return Err(damaged("an extent lies outside of the segment or in an unknown pack"));
            };
            if extent.start < end || extent.blocks == 0 || extent.skip > SEGMENT_BLOCKS {
                return Err(damaged("its extents overlap"));
            }
            end = last;
            extent.pack = *pack;
        }
        Ok(Segment { extents })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Block by block: pack, chunk and block of the chunk.
    type Model = Vec<Option<(u32, u32, u32)>>;

    fn model(segment: &Segment) -> Model {
        let mut blocks = vec![None; 64];
        for extent in &segment.extents {
            for number in 0..extent.blocks {
                let block = &mut blocks[(extent.start + number) as usize];
                assert_eq!(*block, None, "extents overlap");
                *block = Some((extent.pack, extent.chunk, extent.skip + number));
            }
        }
        blocks
    }

    fn extents(chunk: u32, marks: &[bool]) -> Vec<Extent> {
        let mut extents: Vec<Extent> = Vec::new();
        for (block, _) in (0..).zip(marks).filter(|(_, mark)| **mark) {
            match extents.last_mut().filter(|last| last.end() == block && last.blocks < 5) {
                Some(last) => last.blocks += 1,
                None => {
                    extents.push(Extent { start: block, blocks: 1, pack: chunk % 2, chunk, skip: block % 3 })
                }
            }
        }
        extents
    }

    fn ranges(marks: &[bool]) -> Vec<Range<u32>> {
        let mut ranges: Vec<Range<u32>> = Vec::new();
        for (block, _) in (0..).zip(marks).filter(|(_, mark)| **mark) {
            match ranges.last_mut().filter(|last| last.end == block) {
                Some(last) => last.end += 1,
                None => ranges.push(block..block + 1),
            }
        }
        ranges
    }

    fn marks() -> impl Strategy<Value = Vec<bool>> {
        proptest::collection::vec(any::<bool>(), 64)
    }

    proptest! {
        #[test]
        fn replacing_is_what_a_table_of_blocks_says(rounds in proptest::collection::vec((marks(), marks()), 1..6)) {
            let mut segment = Segment::default();
            let mut wanted: Model = vec![None; 64];
            for (chunk, (listed, zeros)) in (0..).zip(rounds) {
                let written: Vec<bool> = listed.iter().zip(&zeros).map(|(listed, zero)| *listed && !zero).collect();
                let new = extents(chunk, &written);
                for (block, _) in listed.iter().enumerate().filter(|(_, listed)| **listed) {
                    wanted[block] = None;
                }
                for (block, held) in model(&Segment { extents: new.clone() }).into_iter().enumerate() {
                    wanted[block] = held.or(wanted[block]);
                }
                let before = segment.clone();
                segment.replace(&ranges(&listed), new);
                prop_assert_eq!(&model(&segment), &wanted);
                prop_assert!(segment.extents.is_sorted_by_key(|extent| extent.start));
                let differ = model(&before).iter().zip(&wanted).map(|(a, b)| a != b).collect::<Vec<_>>();
                prop_assert_eq!(before.differing(&segment), ranges(&differ));
            }
        }

        #[test]
        fn what_is_stored_comes_back(held in marks()) {
            let mut packs = Packs::default();
            for number in 0..2 {
                packs.intern(PackRef { id: [number; 32], bytes: 100, rows: 1 });
            }
            let segment = Segment { extents: (0..2).flat_map(|chunk| extents(chunk, &held)).take(1).collect() };
            let mut others = Packs::default();
            others.intern(PackRef { id: [9; 32], bytes: 100, rows: 1 });
            let mut back = Segment::decode(&segment.encode(&packs), &mut others).expect("decodes");
            for extent in &mut back.extents {
                extent.pack = u32::from(others.get(extent.pack).id[0]);
            }
            prop_assert_eq!(back, segment);
        }
    }
}
