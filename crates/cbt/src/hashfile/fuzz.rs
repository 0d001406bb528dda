//! Fuzz target: hash files as a disk might give them back.
#![allow(missing_docs, clippy::disallowed_methods)]

use super::*;
use crate::segment::fuzz::damage;
use base::fuzz::Input;

/// A file of any bytes, and one whose pages carry checksums that fit: a hash is given only from a page whose
/// checksum is right for its place, and it is the one on disk.
pub fn hashes(bytes: &[u8]) {
    let dir = tempfile::tempdir().expect("temp dir");
    let path = dir.path().join("hashes");
    let (first, second) = bytes.split_at(bytes.len() / 2);
    let mut sound = Vec::new();
    for (number, chunk) in first.chunks(512).take(4).enumerate() {
        let mut page = Page::empty();
        for (slot, bytes) in chunk.chunks(HASH).enumerate() {
            page.bytes[slot * HASH * 7..][..bytes.len()].copy_from_slice(bytes);
        }
        page.seal(number as u64);
        sound.extend_from_slice(&page.bytes[..]);
    }
    let damaged = damage(sound.clone(), &mut Input(second));
    for file in [bytes, &sound, &damaged] {
        std::fs::write(&path, file).expect("write");
        check(&path, file);
    }
    // What is in both at one place must be the same.
    let mut reader = HashReader::new(HashFile::open(&path).expect("open"));
    for block in 0..4 * SLOTS {
        let at = (block / SLOTS) as usize * PAGE + (block % SLOTS) as usize * HASH;
        let written = sound.get(at..at + HASH);
        if let Some(found) = reader.get(Block(block)).expect("get") {
            assert_eq!(Some(&found[..]), written, "the hash of block {block} was never written");
        }
    }
}

fn check(path: &Path, file: &[u8]) {
    let mut reader = HashReader::new(HashFile::open(path).expect("open"));
    let pages = file.len() / PAGE + 2;
    for block in (0..pages as u64 * SLOTS).chain([u64::from(u32::MAX) * SLOTS]) {
        let Some(found) = reader.get(Block(block)).expect("get") else { continue };
        let number = block / SLOTS;
        let page = &file[number as usize * PAGE..][..PAGE];
        let mut hasher = blake3::Hasher::new();
        hasher
            .update(&VERSION.to_le_bytes())
            .update(&number.to_le_bytes())
            .update(&page[..SLOTS as usize * HASH]);
        let sound = [&VERSION.to_le_bytes()[..], &hasher.finalize().as_bytes()[..CHECKSUM]].concat();
        assert_eq!(sound, &page[SLOTS as usize * HASH..], "page {number} is not sound");
        assert_eq!(found, page[(block % SLOTS) as usize * HASH..][..HASH], "block {block}");
    }
}
