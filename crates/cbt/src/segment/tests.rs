use super::*;
use base::Stop;

fn header(blocks: u64) -> MapHeader {
    MapHeader { block_size: BlockSize::MIN, blocks, relative_to: None }
}

fn write(path: &Path, header: MapHeader, ranges: &[(u64, u64)]) {
    let mut writer = MapWriter::create(path, header).expect("create");
    for (start, end) in ranges {
        writer.insert(BlockRange::new(*start, *end)).expect("insert");
    }
    writer.finish().expect("finish");
}

fn members(map: &MapFile) -> Vec<u64> {
    let mut all = Vec::new();
    for index in map.indexes() {
        all.extend(map.segment(index).expect("segment").iter().map(|within| index.block(within).0));
    }
    all
}

#[test]
fn a_map_reads_back_what_was_written_across_segments() {
    let dir = tempfile::tempdir().expect("temp dir");
    let path = dir.path().join("map");
    let edge = SEGMENT_BLOCKS;
    let id = SnapshotId::random(base::DataDirKey::random().expect("key")).expect("id");
    let header = MapHeader { relative_to: Some(Relation { snapshot: id, exact: true }), ..header(10 * edge) };
    write(&path, header.clone(), &[(0, 1), (edge - 2, edge + 2), (7 * edge, 7 * edge + 1)]);
    let map = MapFile::open(&path).expect("open");
    assert_eq!(map.header(), &header);
    assert_eq!(map.indexes().collect::<Vec<_>>(), [0, 1, 7].map(SegmentIndex));
    assert_eq!(members(&map), [0, edge - 2, edge - 1, edge, edge + 1, 7 * edge]);
    assert_eq!(map.count().expect("count"), 6);
    assert!(map.segment(SegmentIndex(3)).expect("an absent segment is empty").is_empty());
}

#[test]
fn a_flipped_bit_anywhere_is_noticed() {
    let dir = tempfile::tempdir().expect("temp dir");
    let path = dir.path().join("map");
    write(&path, header(1 << 24), &[(3, 9), (SEGMENT_BLOCKS, SEGMENT_BLOCKS + 700)]);
    let sound = std::fs::read(&path).expect("read");
    for bit in 0..sound.len() * 8 {
        let mut bytes = sound.clone();
        bytes[bit / 8] ^= 1 << (bit % 8);
        std::fs::write(&path, &bytes).expect("write");
        let read = MapFile::open(&path)
            .and_then(|map| map.indexes().try_for_each(|index| map.segment(index).map(drop)));
        assert!(read.is_err(), "bit {bit} of {} flipped unnoticed", sound.len() * 8);
    }
}

#[test]
fn a_map_cut_short_is_refused() {
    let dir = tempfile::tempdir().expect("temp dir");
    let path = dir.path().join("map");
    write(&path, header(100), &[(3, 9)]);
    let sound = std::fs::read(&path).expect("read");
    for length in 0..sound.len() {
        std::fs::write(&path, &sound[..length]).expect("write");
        assert!(MapFile::open(&path).is_err(), "cut at {length}");
    }
}

#[test]
fn an_unknown_version_is_refused_by_number() {
    let dir = tempfile::tempdir().expect("temp dir");
    let path = dir.path().join("map");
    write(&path, header(100), &[]);
    let mut bytes = std::fs::read(&path).expect("read");
    let version_at = bytes.len() - TRAILER + 8;
    bytes[version_at] = 9;
    let sum_at = bytes.len() - CHECKSUM;
    let checksum = blake3::hash(&bytes[..sum_at]);
    bytes[sum_at..].copy_from_slice(checksum.as_bytes());
    std::fs::write(&path, &bytes).expect("write");
    let error = MapFile::open(&path).expect_err("version 9");
    assert!(matches!(error, Error::UnknownVersion { version: 9, known: 2, .. }), "{error}");
}

/// A damaged segment under a sound table is copied too: a reader of the copy finds it damaged as well.
#[test]
fn a_copy_is_the_same_byte_for_byte() {
    let dir = tempfile::tempdir().expect("temp dir");
    let paths = ["from", "to"].map(|name| dir.path().join(name));
    write(&paths[0], header(1 << 24), &[(1, 3), (SEGMENT_BLOCKS - 1, SEGMENT_BLOCKS + 9)]);
    for damaged in [false, true] {
        if damaged {
            let mut bytes = std::fs::read(&paths[0]).expect("read");
            bytes[0] ^= 1;
            std::fs::write(&paths[0], bytes).expect("write");
            std::fs::remove_file(&paths[1]).expect("remove");
        }
        let from = MapFile::open(&paths[0]).expect("open");
        copy_map(&paths[1], &from, &Stop::default()).expect("copy");
        let [from, to] = [&paths[0], &paths[1]].map(|path| std::fs::read(path).expect("read"));
        assert_eq!(from, to, "damaged: {damaged}");
    }
}

#[test]
fn a_union_holds_the_members_of_all() {
    let dir = tempfile::tempdir().expect("temp dir");
    let paths = ["a", "b", "union"].map(|name| dir.path().join(name));
    write(&paths[0], header(1 << 24), &[(1, 3)]);
    write(&paths[1], header(1 << 24), &[(2, 5), (SEGMENT_BLOCKS, SEGMENT_BLOCKS + 1)]);
    let (a, b) = (MapFile::open(&paths[0]).expect("a"), MapFile::open(&paths[1]).expect("b"));
    let count = write_union(&paths[2], header(1 << 24), &[&a, &b], &Stop::default()).expect("union");
    assert_eq!(count, 5);
    let union = MapFile::open(&paths[2]).expect("union");
    assert_eq!(members(&union), [1, 2, 3, 4, SEGMENT_BLOCKS]);
}
