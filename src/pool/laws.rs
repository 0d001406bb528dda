//! What every backend promises, on each kind of the table. Those that need an image need root, and are ignored without.

use std::collections::BTreeSet;
use std::fs::File;
use std::os::unix::fs::FileExt;

use tempfile::TempDir;

use super::{Bytes, Changes, Copying, GroupMember, OpenPool, PoolRequest};
use base::{Address, BlockSize, DataDir, ObjectDir, Quantity, Stop};

const BLOCK: u64 = 4096;
const BLOCKS: u64 = 256;

/// A pool in a directory of its own, and the objects in it.
struct World {
    pool: Option<OpenPool>,
    _dir: TempDir,
}

impl World {
    fn new(kind: &str) -> Self {
        let dir = tempfile::Builder::new().prefix("deltapath-laws-").tempdir().expect("temp dir");
        let path = dir.path().canonicalize().expect("its path");
        let request = PoolRequest { kind: super::named(kind), size: Some(Quantity(512 << 20)) };
        let pool = OpenPool::open(&DataDir::new(&path), request, None).expect("a pool");
        assert_eq!(pool.known().kind.name, kind);
        World { pool: Some(pool), _dir: dir }
    }

    fn pool(&self) -> &OpenPool {
        self.pool.as_ref().expect("an open pool")
    }

    fn object(&self, name: &str) -> ObjectDir {
        let path = self.pool().dir().path().join(name);
        std::fs::create_dir(&path).expect("the object's directory");
        ObjectDir::new(path)
    }

    /// A volume in which each of these blocks is filled with its number.
    fn volume(&self, blocks: &[u64]) -> (ObjectDir, File) {
        let dir = self.object("volume");
        let file = self.pool().backend().create(&dir, BLOCKS * BLOCK).expect("a volume");
        for block in blocks {
            write(&file, *block, *block as u8);
        }
        (dir, file)
    }

    fn open(&self, dir: &ObjectDir) -> Bytes {
        self.pool().backend().open(dir).expect("open")
    }

    fn copy(&self, source: &ObjectDir, name: &str) -> ObjectDir {
        let target = self.object(name);
        let bytes = self.open(source);
        let backend = self.pool().backend();
        let how = Copying { sink: None, size: BlockSize::MIN, stop: &Stop::default() };
        match backend.copies_atomically() {
            true => backend.copy_live(&bytes, &target, how),
            false => backend.copy(&bytes, &target, how),
        }
        .expect("a copy");
        target
    }
}

impl Drop for World {
    fn drop(&mut self) {
        if let Some(pool) = self.pool.take() {
            assert!(pool.close().expect("close"), "the pool is in use");
        }
    }
}

fn write(file: &File, block: u64, byte: u8) {
    file.write_all_at(&[byte; BLOCK as usize], block * BLOCK).expect("write");
    file.sync_all().expect("sync");
}

fn punch(file: &File, block: u64) {
    files::punch_hole(file, block * BLOCK, BLOCK).expect("punch");
    file.sync_all().expect("sync");
}

fn content(bytes: &Bytes) -> Vec<u8> {
    let mut read = vec![0; (BLOCKS * BLOCK) as usize];
    bytes.file().read_exact_at(&mut read, 0).expect("read");
    read
}

/// The law of each kind: `root` where it makes an image.
macro_rules! laws {
    ($($name:ident)*) => { $(
        mod $name {
            #[test_with::root]
            #[test]
            fn btrfs() { super::$name(&super::World::new("btrfs")); }
            #[test_with::root]
            #[test]
            fn xfs() { super::$name(&super::World::new("xfs")); }
            #[test]
            fn dir() { super::$name(&super::World::new("dir")); }
            #[test]
            fn example() { super::$name(&super::World::new("example")); }
        }
    )* };
}

laws! {
    a_copy_holds_the_bytes_of_its_moment
    copies_of_a_group_are_like_others
    all_that_was_written_between_two_copies_is_listed
    bytes_that_are_open_outlive_their_object
    what_is_discarded_can_be_made_again
}

fn a_copy_holds_the_bytes_of_its_moment(world: &World) {
    let (volume, file) = world.volume(&[0, 1, 9, BLOCKS - 1]);
    let before = content(&world.open(&volume));
    let copy = world.copy(&volume, "copy");
    write(&file, 1, 77);
    punch(&file, 9);
    let copied = world.open(&copy);
    assert!(content(&copied) == before, "the copy follows its source");
    assert!(content(&world.open(&volume)) != before);
    assert_eq!(copied.file().metadata().expect("stat").len(), BLOCKS * BLOCK);
    let held = std::os::unix::fs::MetadataExt::blocks(&copied.file().metadata().expect("stat")) * 512;
    assert!(held <= 16 * BLOCK, "{held} bytes: the copy filled holes");
}

/// A backend that copies no group leaves no trace. Whether the copies show one moment is tested by `tests/suite/order.rs`, under write.
fn copies_of_a_group_are_like_others(world: &World) {
    let (volume, file) = world.volume(&[0, 7, BLOCKS - 1]);
    let other = world.copy(&volume, "other");
    write(&file, 7, 70);
    let targets = ["first", "second"].map(|name| world.object(name));
    let sources = [&volume, &other].map(|dir| world.open(dir));
    let members =
        [0, 1].map(|one| GroupMember { source: &sources[one], target: &targets[one], written: one == 1 });
    let made = world.pool().backend().copy_group(&members).expect("copies of a group");
    let Some((files, _)) = made else {
        assert!(targets.iter().all(|target| !target.bytes().exists()), "half made");
        return;
    };
    assert_eq!(files.len(), 2);
    for (source, target) in sources.iter().zip(&targets) {
        assert!(content(&world.open(target)) == content(source));
    }
}

/// An overwrite, a write into a hole, a punched block, a block written twice. Too much may be listed, never too little. A
/// hole may be listed with the holes beside it: blocks that neither copy holds do not count.
fn all_that_was_written_between_two_copies_is_listed(world: &World) {
    let (volume, file) = world.volume(&[3, 4, 5, 100, 101]);
    let first = world.copy(&volume, "first");
    write(&file, 4, 44);
    write(&file, 200, 1);
    punch(&file, 100);
    write(&file, 7, 8);
    write(&file, 7, 9);
    let second = world.copy(&volume, "second");
    let backend = world.pool().backend();
    let since = backend.birth(&first).expect("birth");
    assert!(since.is_none() || since < backend.birth(&second).expect("birth"), "births do not grow");
    let (before, after) = (world.open(&first), world.open(&second));
    let held: BTreeSet<u64> = (0..BLOCKS)
        .filter(|block| {
            let at = (block * BLOCK) as usize;
            content(&before)[at] != 0 || content(&after)[at] != 0
        })
        .collect();
    let before = Some(&before).filter(|_| backend.compares_bytes());
    let changes = backend.changes(since, before, after.file(), after.path()).expect("changes");
    let differ = BTreeSet::from([4, 7, 100, 200]);
    let listed: BTreeSet<u64> = match changes {
        Changes::Written(written) => written
            .map(|part| part.expect("a part").range)
            .flat_map(|range| range.start / BLOCK..range.end.div_ceil(BLOCK).min(BLOCKS))
            .collect(),
        Changes::Extents(before, after) => {
            let places = |extents: super::Extents<'_>| {
                let mut places = vec![None; BLOCKS as usize];
                for extent in extents.map(|extent| extent.expect("an extent")) {
                    for block in extent.range.start / BLOCK..extent.range.end.div_ceil(BLOCK) {
                        places[block as usize] = Some(match extent.address {
                            Address::At(address) => Some(address + block * BLOCK - extent.range.start),
                            _ => None,
                        });
                    }
                }
                places
            };
            let (before, after) = (places(before), places(after));
            // Only the same address proves the same bytes.
            let same = |block: usize| before[block] == after[block] && before[block] != Some(None);
            (0..BLOCKS).filter(|block| !same(*block as usize)).collect()
        }
        Changes::Unknown => {
            assert!(!backend.copies_atomically(), "this backend knows nothing and is not hashed either");
            return;
        }
    };
    let listed: BTreeSet<u64> = &listed & &held;
    assert_eq!(listed, differ);
}

fn bytes_that_are_open_outlive_their_object(world: &World) {
    let (volume, _) = world.volume(&[3]);
    let copy = world.copy(&volume, "copy");
    let (open, before) = (world.open(&copy), content(&world.open(&copy)));
    world.pool().backend().discard(&copy).expect("discard");
    assert!(!copy.data().exists());
    assert!(content(&open) == before);
}

fn what_is_discarded_can_be_made_again(world: &World) {
    let (volume, _) = world.volume(&[3]);
    let copy = world.copy(&volume, "copy");
    let backend = world.pool().backend();
    backend.discard(&copy).expect("discard");
    let how = Copying { sink: None, size: BlockSize::MIN, stop: &Stop::default() };
    backend.copy(&world.open(&volume), &copy, how).expect("a copy");
    assert!(content(&world.open(&copy)) == content(&world.open(&volume)));
}
