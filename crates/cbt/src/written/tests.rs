use std::os::unix::fs::FileExt;

use super::*;
use crate::SEGMENT_BLOCKS;

const KIB: u64 = 1024;

fn map(path: &Path, header: &MapHeader, blocks: &[(u64, u64)]) -> MapFile {
    let mut writer = MapWriter::create(path, header.clone()).expect("create");
    for (start, end) in blocks {
        writer.insert(BlockRange::new(*start, *end)).expect("insert");
    }
    writer.finish().expect("finish");
    MapFile::open(path).expect("open")
}

fn runs(map: &MapFile) -> Vec<(u64, u64)> {
    let mut runs: Vec<(u64, u64)> = Vec::new();
    for index in map.indexes() {
        let mut members = map.segment(index).expect("segment").into_iter();
        while let Some(run) = members.next_range() {
            let (first, end) = (index.block(*run.start()).0, index.block(*run.end()).0 + 1);
            match runs.last_mut() {
                Some(last) if last.1 == first => last.1 = end,
                _ => runs.push((first, end)),
            }
        }
    }
    runs
}

/// Blocks of 4 KiB; what was written is given in blocks too.
struct Case<'c> {
    name: &'c str,
    /// What the parent holds.
    parent: &'c [(u64, u64)],
    /// Start, end, and whether it is data.
    written: &'c [(u64, u64, bool)],
    allocated: &'c [(u64, u64)],
    changed: &'c [(u64, u64)],
}

const EDGE: u64 = SEGMENT_BLOCKS;
const BLOCKS: u64 = 1 << 32;

#[test]
fn what_was_written_is_put_over_what_was_there() {
    let cases = [
        Case { name: "nothing", parent: &[(1, 3)], written: &[], allocated: &[(1, 3)], changed: &[] },
        Case {
            name: "overwritten",
            parent: &[(0, 8)],
            written: &[(2, 4, true)],
            allocated: &[(0, 8)],
            changed: &[(2, 4)],
        },
        Case {
            name: "written into a hole",
            parent: &[],
            written: &[(5, 6, true)],
            allocated: &[(5, 6)],
            changed: &[(5, 6)],
        },
        Case {
            name: "punched",
            parent: &[(0, 8)],
            written: &[(2, 4, false)],
            allocated: &[(0, 2), (4, 8)],
            changed: &[(2, 4)],
        },
        Case {
            name: "a hole to the end of the address space only affects data",
            parent: &[(0, 8), (9 * EDGE, 9 * EDGE + 2)],
            written: &[(4, u64::MAX / 4096, false)],
            allocated: &[(0, 4)],
            changed: &[(4, 8), (9 * EDGE, 9 * EDGE + 2)],
        },
        Case {
            name: "a hole where nothing was",
            parent: &[(7 * EDGE, 7 * EDGE + 1)],
            written: &[(0, 6 * EDGE, false)],
            allocated: &[(7 * EDGE, 7 * EDGE + 1)],
            changed: &[],
        },
        Case {
            name: "data before, between and behind the segments of the parent",
            parent: &[(2 * EDGE, 2 * EDGE + 1), (4 * EDGE, 4 * EDGE + 1)],
            written: &[(1, 2, true), (3 * EDGE, 3 * EDGE + 1, true), (9 * EDGE, 9 * EDGE + 1, true)],
            allocated: &[
                (1, 2),
                (2 * EDGE, 2 * EDGE + 1),
                (3 * EDGE, 3 * EDGE + 1),
                (4 * EDGE, 4 * EDGE + 1),
                (9 * EDGE, 9 * EDGE + 1),
            ],
            changed: &[(1, 2), (3 * EDGE, 3 * EDGE + 1), (9 * EDGE, 9 * EDGE + 1)],
        },
        Case {
            name: "over the border of segments",
            parent: &[(EDGE - 1, EDGE)],
            written: &[(EDGE - 2, EDGE + 2, true), (EDGE + 4, EDGE + 5, false)],
            allocated: &[(EDGE - 2, EDGE + 2)],
            changed: &[(EDGE - 2, EDGE + 2)],
        },
        Case {
            name: "past the capacity",
            parent: &[],
            written: &[(BLOCKS - 1, BLOCKS + 5, true), (BLOCKS + 9, BLOCKS + 10, true)],
            allocated: &[(BLOCKS - 1, BLOCKS)],
            changed: &[(BLOCKS - 1, BLOCKS)],
        },
    ];
    for case in cases {
        let dir = tempfile::tempdir().expect("temp dir");
        let header = MapHeader { block_size: BlockSize::MIN, blocks: BLOCKS, relative_to: None };
        let parent = map(&dir.path().join("parent"), &header, case.parent);
        // Blocks of one page are never partial, so the data is not asked.
        let data = File::create(dir.path().join("data")).expect("data");
        let written = case.written.iter().map(|(start, end, data)| {
            let range = ByteRange { start: start * 4096, end: end.saturating_mul(4096) };
            Ok(Written { range, data: *data })
        });
        let (allocated, changed) = (dir.path().join("allocated"), dir.path().join("changed"));
        let maps = NewMaps { allocated: (&allocated, header.clone()), changed: (&changed, header) };
        write_written(&data, dir.path(), maps, &parent, written, &Stop::default()).expect("write");
        assert_eq!(runs(&MapFile::open(&allocated).expect("open")), case.allocated, "{}", case.name);
        assert_eq!(runs(&MapFile::open(&changed).expect("open")), case.changed, "{}", case.name);
    }
}

/// A block of 64 KiB of which a part was punched holds data for as long as a part of it does.
#[test]
fn a_block_punched_in_part_is_looked_at() {
    let dir = tempfile::tempdir().expect("temp dir");
    let size = BlockSize::try_from(64 * KIB).expect("64 KiB");
    let header = MapHeader { block_size: size, blocks: 16, relative_to: None };
    let data = File::options().read(true).write(true).create_new(true).open(dir.path().join("data"));
    let data = data.expect("data");
    data.set_len(16 * size.bytes()).expect("set_len");
    // Of block 0 a part is left, of block 1 nothing, of block 2 all but a part.
    for (start, end) in [(60, 64), (128, 160)] {
        data.write_all_at(&vec![1; ((end - start) * KIB) as usize], start * KIB).expect("write");
    }
    let parent = map(&dir.path().join("parent"), &header, &[(0, 3)]);
    let hole = Written { range: ByteRange { start: 8 * KIB, end: 60 * KIB }, data: false };
    // Block 1 in two steps, neither of which is the whole of it.
    let part = |start, end| Written { range: ByteRange { start: start * KIB, end: end * KIB }, data: false };
    let holes = [hole, part(64, 100), part(100, 128)];
    let more = [
        Written { range: ByteRange { start: 128 * KIB, end: 132 * KIB }, data: true },
        Written { range: ByteRange { start: 160 * KIB, end: 1 << 40 }, data: false },
    ];
    let written = holes.into_iter().chain(more).map(Ok);
    let (allocated, changed) = (dir.path().join("allocated"), dir.path().join("changed"));
    let maps = NewMaps { allocated: (&allocated, header.clone()), changed: (&changed, header) };
    write_written(&data, dir.path(), maps, &parent, written, &Stop::default()).expect("write");
    assert_eq!(runs(&MapFile::open(&allocated).expect("open")), [(0, 1), (2, 3)]);
    assert_eq!(runs(&MapFile::open(&changed).expect("open")), [(0, 3)]);
}
