//! Fuzz targets: maps as a disk might give them back.
#![allow(missing_docs, clippy::disallowed_methods)]

use std::collections::BTreeSet;

use super::*;
use crate::allocation::{AllocatedScan, Allocation};
use base::fuzz::Input;
use base::{ByteRange, Stop};

/// A file of any bytes, and one of any payloads, rows and trailer under checksums that fit: what can be read
/// of it is what it says, within the bounds that it says, and can be written again.
pub fn maps(bytes: &[u8]) {
    let dir = tempfile::tempdir().expect("temp dir");
    let path = dir.path().join("map");
    std::fs::write(&path, bytes).expect("write");
    if let Ok(map) = MapFile::open(&path) {
        read(&map);
    }
    let sealed = Sealed::of(bytes);
    std::fs::write(&path, &sealed.bytes).expect("write");
    let Ok(map) = MapFile::open(&path) else { return };
    for (index, payload) in &sealed.payloads {
        let said = RoaringBitmap::deserialize_from(payload.as_slice());
        if let (Ok(found), Some(Ok(said))) = (map.segment(SegmentIndex(*index)), Some(said)) {
            assert_eq!(found, said, "segment {index} is not what its payload says");
        }
    }
    read(&map);
}

/// Everything that is done with a map, on one that could be opened.
fn read(map: &MapFile) {
    let MapHeader { block_size, blocks, .. } = *map.header();
    assert!(i64::try_from(u128::from(blocks) * u128::from(block_size.bytes())).is_ok(), "{blocks} blocks");
    let mut members = 0;
    for index in map.indexes() {
        if let Ok(segment) = map.segment(index) {
            let last = segment.max().map(|last| index.block(last).0);
            assert!(last.is_none_or(|last| last < blocks), "block {last:?} of {blocks}");
            members += segment.len();
        }
    }
    let Ok(count) = map.count() else { return };
    assert_eq!(count, members);
    let copy = map.path().with_extension("copy");
    write_union(&copy, map.header().clone(), &[map, map], &Stop::default()).expect("union");
    let written = MapFile::open(&copy).expect("what was just written");
    assert_eq!((written.header(), written.count().expect("count")), (map.header(), members));
    std::fs::remove_file(&copy).expect("remove");
    let mut scan = AllocatedScan::new(Allocation::new(written, None, &copy), Block(0));
    let (mut end, mut found, mut runs) = (Block(0), 0, 0);
    while let Some(run) = scan.next_run(&Stop::default()).expect("scan") {
        assert!(run.start >= end && !run.is_empty() && run.end <= Block(blocks), "{run:?} after {end}");
        let ByteRange { start, end: bytes } = run.bytes(block_size);
        assert!(start < bytes);
        (end, found, runs) = (run.end, found + run.len(), runs + 1);
        // A bitmap of every second block is a long walk that finds nothing new.
        if runs > 20_000 {
            return;
        }
    }
    assert_eq!(found, members);
}

/// A map of the first half of the input, with the damage of the second: what is read of it is an error, or what
/// was written.
pub fn map_damage(bytes: &[u8]) {
    let (first, second) = bytes.split_at(bytes.len() / 2);
    let dir = tempfile::tempdir().expect("temp dir");
    let path = dir.path().join("map");
    let (header, model) = write(&path, &mut Input(first));
    let map = MapFile::open(&path).expect("what was just written");
    assert_eq!(map.header(), &header);
    assert_eq!(members(&map).expect("what was just written"), model);
    let sound = std::fs::read(&path).expect("read");
    let damaged = damage(sound.clone(), &mut Input(second));
    std::fs::write(&path, &damaged).expect("write");
    let Ok(map) = MapFile::open(&path) else {
        assert!(damaged != sound, "a sound map cannot be opened");
        return;
    };
    assert_eq!(map.header(), &header, "the header lies");
    for index in map.indexes() {
        match map.segment(index) {
            Ok(found) => {
                let range = index.blocks();
                let said: BTreeSet<u64> = found.iter().map(|within| index.block(within).0).collect();
                let wanted: BTreeSet<u64> = model.range(range.start.0..range.end.0).copied().collect();
                assert_eq!(said, wanted, "segment {index} lies");
            }
            Err(error) => assert!(matches!(error, Error::Damaged { .. }), "{error}"),
        }
    }
    let indexes: BTreeSet<SegmentIndex> = model.iter().map(|block| locate(Block(*block)).0).collect();
    assert!(map.indexes().eq(indexes), "a segment appeared or went");
}

fn members(map: &MapFile) -> Result<BTreeSet<u64>> {
    let mut all = BTreeSet::new();
    for index in map.indexes() {
        all.extend(map.segment(index)?.iter().map(|within| index.block(within).0));
    }
    Ok(all)
}

/// Writes a map of runs, ascending, in up to four segments.
fn write(path: &Path, input: &mut Input<'_>) -> (MapHeader, BTreeSet<u64>) {
    let relative_to =
        (input.u8() & 1 == 0).then(|| Relation { snapshot: an_id(), exact: input.u8() & 1 == 0 });
    let header = MapHeader { block_size: BlockSize::MIN, blocks: 4 * SEGMENT_BLOCKS, relative_to };
    let mut writer = MapWriter::create(path, header.clone()).expect("create");
    let (mut at, mut model) = (0, BTreeSet::new());
    while !input.is_empty() && model.len() < 4000 {
        // Short gaps, and now and then one to the border of the next segment.
        at = match input.u8() {
            gap @ 0..=239 => at + u64::from(gap),
            gap => (at / SEGMENT_BLOCKS + 1) * SEGMENT_BLOCKS - u64::from(gap - 240),
        };
        let end = (at + 1 + u64::from(input.u8())).min(header.blocks);
        if at >= end {
            break;
        }
        writer.insert(BlockRange::new(at, end)).expect("insert");
        model.extend(at..end);
        at = end;
    }
    writer.finish().expect("finish");
    (header, model)
}

/// Overwrites, flips, cuts, repeats and swaps bytes.
pub(crate) fn damage(mut bytes: Vec<u8>, input: &mut Input<'_>) -> Vec<u8> {
    for _ in 0..4 {
        if input.is_empty() || bytes.is_empty() {
            break;
        }
        let kind = input.u8();
        let at = input.u32() as usize % bytes.len();
        match kind % 6 {
            0 => bytes[at] ^= 1 << (input.u8() % 8),
            1 => bytes[at] = input.u8(),
            2 => bytes.truncate(at),
            3 => bytes.extend_from_within(at..),
            4 => bytes.extend_from_slice(input.bytes(64)),
            _ => drop(bytes.drain(..at)),
        }
    }
    bytes
}

pub(crate) fn an_id() -> SnapshotId {
    "snap-0123456789abcdef0123456789abcdef".parse().expect("an id")
}

/// A map file of any payloads, rows and trailer, whose checksums fit.
struct Sealed {
    bytes: Vec<u8>,
    payloads: Vec<(u32, Vec<u8>)>,
}

impl Sealed {
    fn of(bytes: &[u8]) -> Self {
        let mut input = Input(bytes);
        let block_size = match input.u8() {
            odd @ 224.. => u32::from(odd) << (input.u8() % 24),
            log => 4096 << (log % 11),
        };
        let blocks = match input.u8() % 4 {
            0 => input.u64(),
            _ => u64::from(input.u32()),
        };
        let (flags, with_id) = (u32::from(input.u8()), input.u8());
        let (mut file, mut table, mut payloads) = (Vec::new(), Vec::new(), Vec::new());
        let rows = input.u8() % 6;
        let mut next = 0u32;
        for _ in 0..rows {
            let index = match input.u8() {
                255 => input.u32(),
                gap => next.saturating_add(u32::from(gap % 4)),
            };
            next = index.saturating_add(1);
            let length = usize::from(input.u16() % 600);
            let payload = input.bytes(length).to_vec();
            let offset = match input.u8() {
                255 => input.u64(),
                _ => file.len() as u64,
            };
            let checksum = *blake3::hash(&payload).as_bytes();
            file.extend_from_slice(&payload);
            Entry { index: SegmentIndex(index), length: payload.len() as u32, offset, checksum }
                .encode(&mut table);
            payloads.push((index, payload));
        }
        let mut id = [0; ID];
        match with_id {
            0..=99 => {}
            100..=199 => id[..an_id().as_str().len()].copy_from_slice(an_id().as_str().as_bytes()),
            _ => {
                let taken = input.bytes(ID);
                id[..taken.len()].copy_from_slice(taken);
            }
        }
        let mut end = table;
        end.extend(MAGIC);
        end.extend(VERSION.to_le_bytes());
        end.extend(block_size.to_le_bytes());
        end.extend(blocks.to_le_bytes());
        end.extend(u64::from(rows).to_le_bytes());
        end.extend(flags.to_le_bytes());
        end.extend(id);
        let checksum = blake3::hash(&end);
        file.extend(end);
        file.extend(checksum.as_bytes());
        Sealed { bytes: file, payloads }
    }
}
