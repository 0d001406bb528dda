//! Fuzz target: deltas over any contents, maps and hashes, sound and damaged.
#![allow(missing_docs, clippy::disallowed_methods)]

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::time::Duration;

use super::*;
use crate::SEGMENT_BLOCKS;
use crate::hash::hash_block;
use crate::hashfile::page_of;
use crate::segment::fuzz::{an_id, damage};
use crate::segment::{MapHeader, MapWriter, Relation};
use base::fuzz::Input;

const SIZE: BlockSize = BlockSize::MIN;
const BLOCKS: u64 = 2 * SEGMENT_BLOCKS;

/// What the blocks of a snapshot hold: a byte that fills the block. Those that are missing are holes, which
/// read as zeros.
type Content = BTreeMap<u64, u8>;

/// Somewhere in the first segment, around its end, or behind it.
fn place(number: u8) -> u64 {
    match number % 96 {
        near @ 0..=63 => u64::from(near) * 3,
        far => SEGMENT_BLOCKS - 16 + u64::from(far - 64),
    }
}

fn differing(base: &Content, target: &Content) -> BTreeSet<u64> {
    let read = |content: &Content, block| content.get(&block).copied().unwrap_or(0);
    let blocks = base.keys().chain(target.keys()).copied();
    blocks.filter(|block| read(base, *block) != read(target, *block)).collect()
}

/// Writes the files of a snapshot. Blocks that are pending have a slot that is wrong, as a clone brings along.
fn write_snapshot(dir: &Path, content: &Content, pending: &BTreeSet<u64>) -> ObjectDir {
    let object = ObjectDir::new(dir);
    std::fs::create_dir_all(object.bytes()).expect("mkdir");
    let data = File::create(object.data()).expect("data");
    data.set_len(BLOCKS * SIZE.bytes()).expect("length");
    let hashes = HashFile::create(&object.hashes()).expect("hashes");
    for (block, fill) in content {
        let bytes = [*fill; SIZE.bytes() as usize];
        data.write_all_at(&bytes, block * SIZE.bytes()).expect("write");
        let slot = if pending.contains(block) { [0x5a; 32] } else { hash_block(&bytes) };
        let mut page = hashes.page(page_of(Block(*block))).expect("page");
        page.set(Block(*block), &slot);
        hashes.write_page(page_of(Block(*block)), &mut page).expect("write");
    }
    let all: BTreeSet<u64> = content.keys().copied().collect();
    write_map(&object.allocated(), None, &all);
    write_map(&object.pending(), None, pending);
    object
}

fn write_map(path: &Path, relative_to: Option<Relation>, blocks: &BTreeSet<u64>) {
    let header = MapHeader { block_size: SIZE, blocks: BLOCKS, relative_to };
    let mut writer = MapWriter::create(path, header).expect("map");
    for block in blocks {
        writer.insert(BlockRange::new(*block, block + 1)).expect("insert");
    }
    writer.finish().expect("finish");
}

/// A volume's life: up to three steps from base to target, each with a map of what may have changed in it. The
/// delta is what differs, and nothing else: with a way and without, whatever is hashed, from any start; and where
/// a file is damaged it is that, or an error. Only where the base's data is gone before it was hashed more may be
/// listed.
pub fn delta(bytes: &[u8]) {
    let mut input = Input(bytes);
    let dir = tempfile::tempdir().expect("temp dir");
    let mut content = Content::new();
    for _ in 0..input.u8() % 24 {
        content.insert(place(input.u8()), input.u8() % 4);
    }
    let base = content.clone();
    let mut steps = Vec::new();
    for number in 0..input.u8() % 4 {
        let before = content.clone();
        for _ in 0..input.u8() % 12 {
            let block = place(input.u8());
            match input.u8() % 6 {
                5 => drop(content.remove(&block)),
                fill => drop(content.insert(block, fill % 4)),
            }
        }
        let mut changed = differing(&before, &content);
        let exact = input.u8() & 1 == 0;
        for _ in 0..if exact { 0 } else { input.u8() % 6 } {
            changed.insert(place(input.u8()));
        }
        // A block that holds data on one side alone may be zeros on both; the maps name it all the same.
        if !exact {
            let one_sided = |block: &u64| before.contains_key(block) != content.contains_key(block);
            changed.extend(before.keys().chain(content.keys()).filter(|block| one_sided(block)));
        }
        let path = dir.path().join(format!("changed-{number}"));
        write_map(&path, Some(Relation { snapshot: an_id(), exact }), &changed);
        steps.push(path);
    }
    let target = content;
    let mut pending_of = |content: &Content| {
        let mask = input.u32();
        let chosen = content.keys().enumerate().filter(|(number, _)| mask >> (number % 32) & 1 == 1);
        chosen.map(|(_, block)| *block).collect::<BTreeSet<u64>>()
    };
    let (base_pending, target_pending) = (pending_of(&base), pending_of(&target));
    let base_dir = write_snapshot(&dir.path().join("base"), &base, &base_pending);
    let target_dir = write_snapshot(&dir.path().join("target"), &target, &target_pending);
    let start = place(input.u8());
    let wanted: BTreeSet<u64> = differing(&base, &target).split_off(&start);
    let whole = !steps.is_empty() || base == target;
    for with_way in [whole, false] {
        let found = run(&base_dir, &target_dir, with_way.then_some(&steps[..]), start);
        assert_eq!(found.expect("nothing is damaged"), wanted, "with a way: {with_way}");
    }
    // Damage one map, and a page of hashes.
    let mut files: Vec<_> = steps.clone();
    for side in [&base_dir, &target_dir] {
        files.extend([side.pending(), side.allocated()]);
    }
    let file = &files[usize::from(input.u8()) % files.len()];
    let hashes = File::options().read(true).write(true).open(base_dir.hashes()).expect("open");
    let page = page_of(Block(place(input.u8()))) * 4096;
    let (sound, mut sound_page) = (std::fs::read(file).expect("read"), vec![0; 4096]);
    let length = hashes.read_at(&mut sound_page, page).expect("read");
    sound_page.truncate(length);
    let mut damaged = damage(sound_page.clone(), &mut input);
    damaged.resize(length, 0);
    hashes.write_all_at(&damaged, page).expect("write");
    std::fs::write(file, damage(sound.clone(), &mut input)).expect("write");
    if let Ok(found) = run(&base_dir, &target_dir, whole.then_some(&steps[..]), start) {
        assert_eq!(found, wanted, "{} is damaged", file.display());
    }
    std::fs::write(file, sound).expect("write");
    hashes.write_all_at(&sound_page, page).expect("write");
    // And free the base's data.
    std::fs::remove_file(base_dir.data()).expect("remove");
    let found = run(&base_dir, &target_dir, whole.then_some(&steps[..]), start).expect("hashes are enough");
    assert!(found.is_superset(&wanted), "{:?} are lost", wanted.difference(&found));
    let beyond: BTreeSet<u64> = found.difference(&wanted).copied().collect();
    assert!(beyond.is_subset(&base_pending), "{beyond:?} are listed and did not change");
}

/// The blocks of a delta, as the driver asks for one: where a map is damaged as a whole, without a way.
fn run(base: &ObjectDir, target: &ObjectDir, steps: Option<&[PathBuf]>, start: u64) -> Result<BTreeSet<u64>> {
    let way = steps.and_then(|steps| steps.iter().map(|path| MapFile::open(path).ok()).collect());
    let side = |dir| Side::open(dir, Default::default());
    let mut scan = DeltaScan::new(side(base)?, side(target)?, way, Block(start));
    let (mut found, mut end) = (BTreeSet::new(), Block(start));
    loop {
        match scan.next_run(&Stop::default(), Instant::now() + Duration::from_secs(60))? {
            Found::Run(run) => {
                assert!(
                    run.start >= end && run.start < run.end && run.end <= Block(BLOCKS),
                    "{run:?} after {end}"
                );
                end = run.end;
                found.extend(run.start.0..run.end.0);
            }
            Found::Nothing => {}
            Found::End => return Ok(found),
        }
    }
}
