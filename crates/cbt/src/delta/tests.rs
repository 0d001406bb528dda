use super::super::hash::hash_block;
use super::super::scan::ToHash;
use super::super::segment::{MapHeader, MapWriter, Relation, SEGMENT_BLOCKS};
use std::time::Duration;

use super::*;
use base::SnapshotId;

const SIZE: BlockSize = BlockSize::MIN;

#[test]
fn what_is_known_decides_and_only_doubt_reads() {
    use Content::{Hashed, Hole, NotHashed};
    let zeros = zero_hash(SIZE);
    let (one, two) = (hash_block(&[1; 4096]), hash_block(&[2; 4096]));
    for (name, base, target, verdict) in [
        ("hole in both", Hole, Hole, Verdict::Same),
        ("same hash", Hashed(one), Hashed(one), Verdict::Same),
        ("other hash", Hashed(one), Hashed(two), Verdict::Differs),
        ("punched", Hashed(one), Hole, Verdict::Differs),
        ("written", Hole, Hashed(one), Verdict::Differs),
        ("zeros written into a hole", Hole, Hashed(zeros), Verdict::Same),
        ("zeros punched out", Hashed(zeros), Hole, Verdict::Same),
        ("base not hashed", NotHashed, Hashed(one), Verdict::Read),
        ("target not hashed", Hashed(one), NotHashed, Verdict::Read),
        ("neither hashed", NotHashed, NotHashed, Verdict::Read),
        ("not hashed against a hole", Hole, NotHashed, Verdict::Read),
    ] {
        assert_eq!(judge(base, target, &zeros), verdict, "{name}");
    }
}

/// A snapshot in a directory: a block's content is a byte, `None` is a hole.
struct Fake {
    dir: tempfile::TempDir,
}

impl Fake {
    /// `hashed` says which blocks have a slot, right or (for `pending` ones) stale.
    fn new(blocks: &[(u64, Option<u8>)], pending: &[u64], stale: Option<u8>) -> Self {
        let dir = tempfile::tempdir().expect("temp dir");
        let object = ObjectDir::new(dir.path());
        std::fs::create_dir(object.bytes()).expect("mkdir");
        let data = File::create(object.data()).expect("data");
        let hashes = HashFile::create(&object.hashes()).expect("hashes");
        let header = MapHeader { block_size: SIZE, blocks: 1 << 32, relative_to: None };
        let mut allocated = MapWriter::create(&object.allocated(), header.clone()).expect("map");
        for (block, content) in blocks {
            let Some(content) = content else { continue };
            data.write_all_at(&[*content; 4096], block * 4096).expect("write");
            allocated.insert(BlockRange::new(*block, block + 1)).expect("insert");
            let slot = if pending.contains(block) { stale } else { Some(*content) };
            if let Some(slot) = slot {
                let number = super::super::hashfile::page_of(Block(*block));
                let mut page = hashes.page(number).expect("page");
                page.set(Block(*block), &hash_block(&[slot; 4096]));
                hashes.write_page(number, &mut page).expect("write");
            }
        }
        allocated.finish().expect("finish");
        write_map(&object.pending(), &header, pending);
        Fake { dir }
    }

    fn side(&self) -> Side {
        self.side_with(&Arc::default())
    }

    fn side_with(&self, fresh: &Arc<FreshHashes>) -> Side {
        Side::open(&ObjectDir::new(self.dir.path()), fresh.clone()).expect("open")
    }

    /// Hashes as the hashing thread does.
    fn hash(&self, fresh: &Arc<FreshHashes>, work: impl FnOnce(&ToHash<'_>, &Stop)) {
        let dir = ObjectDir::new(self.dir.path());
        let data = File::open(dir.data()).expect("open");
        let hashes = HashFile::open_for_update(&dir.hashes()).expect("open");
        let foreground = base::Foreground::default();
        let data_path = dir.data();
        let to_hash = ToHash {
            data: &data,
            data_path: &data_path,
            size: SIZE,
            hashes: &hashes,
            foreground: &foreground,
            fresh,
        };
        work(&to_hash, &Stop::default());
    }

    fn write(&self, block: u64, content: u8) {
        let data = File::options().write(true).open(ObjectDir::new(self.dir.path()).data()).expect("open");
        data.write_all_at(&[content; 4096], block * 4096).expect("write");
    }

    /// Writes other data over all of it: whoever reads it is misled.
    fn spoil(&self) {
        let path = ObjectDir::new(self.dir.path()).data();
        let length = std::fs::metadata(&path).expect("stat").len();
        std::fs::write(path, vec![99; length as usize]).expect("write");
    }
}

fn write_map(path: &std::path::Path, header: &MapHeader, blocks: &[u64]) {
    let mut writer = MapWriter::create(path, header.clone()).expect("map");
    for block in blocks {
        writer.insert(BlockRange::new(*block, block + 1)).expect("insert");
    }
    writer.finish().expect("finish");
}

fn changed(dir: &std::path::Path, blocks: &[u64]) -> MapFile {
    changed_since(dir, blocks, None)
}

fn changed_since(dir: &std::path::Path, blocks: &[u64], exact: Option<bool>) -> MapFile {
    let path = dir.join(SnapshotId::random(base::DataDirKey::random().expect("key")).expect("id").as_str());
    let relative_to = exact.map(|exact| Relation {
        snapshot: SnapshotId::random(base::DataDirKey::random().expect("key")).expect("id"),
        exact,
    });
    let header = MapHeader { block_size: SIZE, blocks: 1 << 32, relative_to };
    write_map(&path, &header, blocks);
    MapFile::open(&path).expect("open")
}

fn runs(scan: &mut DeltaScan) -> Vec<(u64, u64)> {
    let (stop, until) = (Stop::default(), Instant::now() + Duration::from_secs(60));
    let mut runs = Vec::new();
    loop {
        match scan.next_run(&stop, until).expect("scan") {
            Found::Run(run) => runs.push((run.start.0, run.end.0)),
            Found::Nothing => panic!("a minute is over"),
            Found::End => return runs,
        }
    }
}

type Blocks<'b> = &'b [(u64, Option<u8>)];
type Case<'c> = (&'c str, Blocks<'c>, Blocks<'c>, Option<&'c [&'c [u64]]>, &'c [(u64, u64)]);

#[test]
fn only_blocks_of_other_content_are_reported() {
    let far = SEGMENT_BLOCKS + 3;
    let cases: &[Case<'_>] = &[
        ("nothing changed", &[(1, Some(1))], &[(1, Some(1))], Some(&[&[]]), &[]),
        (
            "one rewritten",
            &[(1, Some(1)), (2, Some(1))],
            &[(1, Some(1)), (2, Some(2))],
            Some(&[&[2]]),
            &[(2, 3)],
        ),
        ("changed and changed back", &[(1, Some(1))], &[(1, Some(1))], Some(&[&[1], &[1]]), &[]),
        (
            "two steps, one each",
            &[(1, Some(1)), (2, Some(1))],
            &[(1, Some(3)), (2, Some(3))],
            Some(&[&[1], &[2]]),
            &[(1, 3)],
        ),
        ("punched", &[(4, Some(1))], &[(4, None)], Some(&[&[4]]), &[(4, 5)]),
        ("zeros punched out", &[(4, Some(0))], &[(4, None)], Some(&[&[4]]), &[]),
        ("grew", &[(1, Some(1))], &[(1, Some(1)), (far, Some(1))], Some(&[&[far]]), &[(far, far + 1)]),
        (
            "a gap splits a run",
            &[],
            &[(1, Some(1)), (2, Some(0)), (3, Some(1))],
            Some(&[&[1, 2, 3]]),
            &[(1, 2), (3, 4)],
        ),
        (
            "no way: whole maps",
            &[(1, Some(1)), (far, Some(7))],
            &[(1, Some(2)), (far, Some(7))],
            None,
            &[(1, 2)],
        ),
        ("no way, only in base", &[(9, Some(1))], &[], None, &[(9, 10)]),
    ];
    let scratch = tempfile::tempdir().expect("temp dir");
    for (name, base, target, steps, expected) in cases {
        let all = |blocks: Blocks<'_>| blocks.iter().map(|(block, _)| *block).collect::<Vec<_>>();
        // With every hash there, with none, and with stale ones a clone brought along.
        for (kind, base_pending, target_pending, stale) in [
            ("hashed", vec![], vec![], None),
            ("target pending", vec![], all(target), None),
            ("base pending", all(base), vec![], None),
            ("target pending over the parent's slots", vec![], all(target), Some(1)),
        ] {
            let (base, target) =
                (Fake::new(base, &base_pending, stale), Fake::new(target, &target_pending, stale));
            let maps = steps.map(|steps| steps.iter().map(|step| changed(scratch.path(), step)).collect());
            let mut scan = DeltaScan::new(base.side(), target.side(), maps, Block(0));
            assert_eq!(runs(&mut scan), *expected, "{name}, {kind}");
        }
    }
}

#[test]
fn a_start_inside_drops_what_lies_before_it() {
    let target = Fake::new(&[(1, Some(1)), (5, Some(1)), (6, Some(1)), (SEGMENT_BLOCKS, Some(1))], &[], None);
    let base = Fake::new(&[], &[], None);
    for (start, expected) in [
        (0, vec![(1, 2), (5, 7), (SEGMENT_BLOCKS, SEGMENT_BLOCKS + 1)]),
        (6, vec![(6, 7), (SEGMENT_BLOCKS, SEGMENT_BLOCKS + 1)]),
        (7, vec![(SEGMENT_BLOCKS, SEGMENT_BLOCKS + 1)]),
        (SEGMENT_BLOCKS + 1, vec![]),
    ] {
        assert_eq!(
            runs(&mut DeltaScan::new(base.side(), target.side(), None, Block(start))),
            expected,
            "from {start}"
        );
    }
}

#[test]
fn a_cancelled_scan_ends_with_an_error_also_where_nothing_differs() {
    let blocks: Vec<(u64, Option<u8>)> = (0..4000).map(|block| (block, Some(1))).collect();
    let (base, target) = (Fake::new(&blocks, &[], None), Fake::new(&blocks, &[], None));
    let mut scan = DeltaScan::new(base.side(), target.side(), None, Block(0));
    let stop = Stop::default();
    stop.cancel();
    assert!(matches!(scan.next_run(&stop, Instant::now()), Err(Error::Stopped(_))));
}

/// A long look that finds nothing must not keep what was found before, nor the first message, from its
/// reader.
#[test]
fn a_scan_out_of_time_pauses_and_goes_on_where_it_was() {
    let blocks: Vec<(u64, Option<u8>)> = (0..400).map(|block| (block, Some(1))).collect();
    let mut changed = blocks.clone();
    changed[0].1 = Some(2);
    changed[300].1 = Some(2);
    let (base, target) = (Fake::new(&blocks, &[], None), Fake::new(&changed, &[], None));
    let mut scan = DeltaScan::new(base.side(), target.side(), None, Block(0));
    let (stop, over) = (Stop::default(), Instant::now());
    let (mut runs, mut pauses) = (Vec::new(), 0);
    loop {
        match scan.next_run(&stop, over).expect("scan") {
            Found::Run(run) => runs.push((run.start.0, run.end.0)),
            Found::Nothing => pauses += 1,
            Found::End => break,
        }
    }
    assert_eq!(runs, [(0, 1), (300, 301)]);
    assert!(pauses >= 400 / LOOK, "{pauses} pauses");
}

/// A deleted base whose data was freed: hashes are compared, what was never hashed may be
/// reported, and what was hashed and is damaged ends the answer.
#[test]
fn a_base_without_its_data_answers_from_hashes() {
    let base = Fake::new(&[(1, Some(1)), (2, Some(1)), (3, Some(1)), (6, Some(1)), (7, Some(1))], &[3], None);
    let contents = [(1, Some(1)), (2, Some(2)), (3, Some(1)), (5, Some(0)), (6, Some(1)), (7, Some(2))];
    // Blocks 5, 6 and 7 of the target are not hashed: zeros where the base has a hole, the same, another.
    let target = Fake::new(&contents, &[5, 6, 7], None);
    std::fs::remove_file(ObjectDir::new(base.dir.path()).data()).expect("remove");
    let gone = || Side::open(&ObjectDir::new(base.dir.path()), Arc::default());
    assert_eq!(
        runs(&mut DeltaScan::new(gone().expect("open"), target.side(), None, Block(0))),
        [(2, 4), (7, 8)]
    );
    std::fs::write(ObjectDir::new(base.dir.path()).hashes(), []).expect("cut short");
    let mut scan = DeltaScan::new(gone().expect("open"), target.side(), None, Block(0));
    let until = Instant::now() + Duration::from_secs(60);
    assert!(matches!(scan.next_run(&Stop::default(), until), Err(Error::Lost { .. })));
}

/// Not from an incident. The data of the known side is other than its hashes say: whoever reads it is misled.
#[test]
fn a_side_whose_hash_is_known_is_not_read() {
    let contents = [(1, Some(1)), (2, Some(2)), (3, Some(3))];
    let others = [(1, Some(1)), (2, Some(7)), (3, Some(3))];
    for base_is_known in [true, false] {
        let known = Fake::new(&contents, &[], None);
        let other = Fake::new(&others, &[1, 2, 3], None);
        let data = File::options().write(true).open(ObjectDir::new(known.dir.path()).data()).expect("open");
        data.write_all_at(&[9; 3 * 4096], 4096).expect("write");
        let (base, target) = if base_is_known { (&known, &other) } else { (&other, &known) };
        let mut scan = DeltaScan::new(base.side(), target.side(), None, Block(0));
        assert_eq!(runs(&mut scan), [(2, 3)], "the base is known: {base_is_known}");
    }
}

#[test]
fn the_next_pages_are_those_of_the_blocks_that_are_compared_later() {
    let segment = |index, compared: &[u32]| Segment {
        index: SegmentIndex(index),
        bytes: 0,
        base: SideSegment::default(),
        target: SideSegment::default(),
        certain: RoaringBitmap::new(),
        compared: compared.iter().copied().collect(),
        unhashed: compared.iter().copied().collect(),
        candidates: RoaringBitmap::new().into_iter().peekable(),
    };
    // Page 33,026 of 127 hashes begins in segment 0 and ends in segment 1.
    let first = segment(1, &[0, 1, 40, 126, 127, 600, 601, 5000, 4_194_303]);
    let segments = [first, segment(3, &[7]), segment(4, &[0])].into();
    let loaded = LoadedSegments { segments, at_a_time: 1 };
    for (within, expected) in [
        (0, &[33_026, 33_027, 33_030, 33_065, 66_052, 99_078, 132_104][..]),
        (126, &[33_027, 33_030, 33_065, 66_052, 99_078, 132_104]),
        (127, &[33_030, 33_065, 66_052, 99_078, 132_104]),
        (5000, &[66_052, 99_078, 132_104]),
        (4_194_303, &[99_078, 132_104]),
    ] {
        assert_eq!(loaded.pages_after(within).collect::<Vec<_>>(), expected, "after {within}");
    }
    let blocks: Vec<Block> = loaded.unhashed_after(5000).collect();
    let start = |index| SegmentIndex(index).block(0);
    assert_eq!(blocks, [start(1) + 4_194_303, start(3) + 7, start(4)]);
}

/// The incident: of a delta over a thousand segments with a few blocks in each, the first message came with the last.
#[test]
fn a_scan_over_many_small_segments_stops_when_its_time_is_over() {
    let blocks: Vec<u64> = (0..200).map(|index| SegmentIndex(index).block(5).0).collect();
    let contents = |fill| blocks.iter().map(|block| (*block, Some(fill))).collect::<Vec<_>>();
    let base = Fake::new(&contents(1), &[], None);
    for (fill, differ) in [(1, 0), (2, 200)] {
        let target = Fake::new(&contents(fill), &[], None);
        let maps = vec![changed_since(base.dir.path(), &blocks, Some(false))];
        let mut scan = DeltaScan::new(base.side(), target.side(), Some(maps), Block(0));
        let (mut turns, mut runs) = (0, 0);
        loop {
            match scan.next_run(&Stop::default(), Instant::now()).expect("scan") {
                Found::Run(_) => runs += 1,
                Found::Nothing => turns += 1,
                Found::End => break,
            }
        }
        assert_eq!(runs, differ);
        assert!((2..=4).contains(&turns), "{turns} turns, {differ} differ");
    }
}

/// Nobody reads a block that somebody else has hashed: the data is spoiled in between.
#[test]
fn what_a_stream_has_hashed_is_not_read_again_by_hashing() {
    let contents = [(1, Some(1)), (2, Some(2)), (200, Some(3))];
    let (base, target) = (Fake::new(&[(1, Some(9))], &[], None), Fake::new(&contents, &[1, 2, 200], Some(7)));
    let fresh = Arc::default();
    let maps = vec![changed(base.dir.path(), &[1, 200])];
    let mut scan = DeltaScan::new(base.side(), target.side_with(&fresh), Some(maps), Block(0));
    assert_eq!(runs(&mut scan), [(1, 2), (200, 201)]);
    target.spoil();
    let members: RoaringBitmap = [1, 2, 200].into_iter().collect();
    target.hash(&fresh, |to_hash, stop| {
        let taken = to_hash.take_fresh(SegmentIndex(0), &members, stop).expect("take");
        assert_eq!(
            taken.iter().collect::<Vec<_>>(),
            [1, 200],
            "what the stream has not read is still to be hashed"
        );
    });
    let mut hashes = target.side().hashes;
    let mut slot = |block| hashes.get(Block(block)).expect("get").expect("a hash");
    assert_eq!([slot(1), slot(200)], [hash_block(&[1; 4096]), hash_block(&[3; 4096])]);
    assert_eq!(slot(2), hash_block(&[7; 4096]), "the stale slot");
}

#[test]
fn what_hashing_has_written_meanwhile_is_not_read_again_by_a_stream() {
    let pending = [1, 2, 3, 5, 6];
    let contents = [(1, Some(1)), (2, Some(2)), (3, Some(3)), (5, Some(1)), (6, Some(6))];
    let base = Fake::new(&pending.map(|block| (block, Some(1))), &[], None);
    // A clone has brought the slots of an older snapshot along, and the stream has read their page.
    let target = Fake::new(&contents, &pending, Some(1));
    let fresh = Arc::default();
    let mut side = target.side_with(&fresh);
    assert_eq!(side.hashes.get(Block(3)).expect("get"), Some(hash_block(&[1; 4096])));
    let maps = vec![changed(base.dir.path(), &[1, 2, 3, 5, 6])];
    let mut scan = DeltaScan::new(base.side(), side, Some(maps), Block(0));
    let hash = |blocks: [u32; 2]| {
        target.hash(&fresh, |to_hash, stop| {
            to_hash.hash_segment(SegmentIndex(0), blocks.into(), stop).expect("hash");
        });
        target.spoil();
    };
    hash([1, 3]);
    // Block 2 is read, and is spoiled; block 1 is the same and block 3 another, whatever the data is now.
    let found = scan.next_run(&Stop::default(), Instant::now() + Duration::from_secs(60)).expect("scan");
    assert!(matches!(found, Found::Run(run) if run == BlockRange::new(2, 4)), "{found:?}");
    // The page that the stream has kept lacks what is written next.
    contents.iter().for_each(|(block, content)| target.write(*block, content.expect("a byte")));
    hash([5, 6]);
    assert_eq!(runs(&mut scan), [(6, 7)]);
}

/// What one exact step of the way says is believed without a look; what several say, or one that is not
/// exact, is compared. Both snapshots hold the same, so that a look finds nothing.
#[test]
fn only_what_an_exact_step_alone_says_is_believed() {
    let blocks: Vec<(u64, Option<u8>)> = (0..10).map(|block| (block, Some(1))).collect();
    let (base, target) = (Fake::new(&blocks, &[], None), Fake::new(&blocks, &[], None));
    type Steps<'s> = &'s [(&'s [u64], bool)];
    type Expected<'e> = (&'e str, Steps<'e>, &'e [(u64, u64)]);
    let cases: [Expected<'_>; 5] = [
        ("one that is not exact", &[(&[1, 2], false)], &[]),
        ("one that is", &[(&[1, 2], true)], &[(1, 3)]),
        ("two that are, of different blocks", &[(&[1], true), (&[3], true)], &[(1, 2), (3, 4)]),
        ("changed in both, perhaps back", &[(&[1, 2], true), (&[2], true)], &[(1, 2)]),
        (
            "changed in three, and in one that is not exact",
            &[(&[1, 2], true), (&[1, 4], true), (&[5], false)],
            &[(2, 3), (4, 5)],
        ),
    ];
    for (name, steps, expected) in cases {
        let maps = steps.iter().map(|(blocks, exact)| changed_since(base.dir.path(), blocks, Some(*exact)));
        let mut scan = DeltaScan::new(base.side(), target.side(), Some(maps.collect()), Block(0));
        assert_eq!(runs(&mut scan), expected, "{name}");
    }
}
