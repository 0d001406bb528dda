//! What docs/algorithm.md and docs/format.md say, beside the files of a real driver.

use std::os::unix::fs::FileExt;
use std::path::Path;

use cbt::{MapFile, SegmentIndex};

use crate::faults::compared;
use testkit::pages::{blocks, read, section};
use testkit::prelude::*;

/// The example of docs/algorithm.md on a real driver, and the bytes of its files as docs/format.md describes them.
#[apply(device_cases)]
async fn the_worked_example_and_the_format_are_as_the_pages_say(
    #[values(PoolKind::Btrfs, PoolKind::Xfs)] pool: PoolKind,
) {
    let mut rig = Rig::start(pool).await;
    let (volume, device) = rig.block_volume("example", 8 * BLOCK as i64).await;
    let mut content = Content::default();
    let members = |path: &Path| -> Vec<u32> {
        MapFile::open(path).expect("open").segment(SegmentIndex(0)).expect("segment").into_iter().collect()
    };
    let page = read("docs/algorithm.md");
    // The blocks in the rows of the page that begin with this name, in order.
    let drawn = |name: &str| -> Vec<Vec<u32>> {
        let rows = page.lines().filter_map(|line| line.strip_prefix(name)?.strip_prefix("  "));
        let blocks =
            |row: &str| row.split_whitespace().take(8).filter_map(|word| word.parse().ok()).collect();
        rows.map(blocks).collect()
    };
    let [at_first, compared_second, compared_third] = &drawn("changed")[..3] else { panic!("{page}") };
    let allocated = &drawn("allocated")[0];
    assert_eq!(at_first, &drawn("pending")[0]);
    for (block, letter) in [(0, b'A'), (1, b'B'), (2, b'C')] {
        content.write(&device, block, 1, letter);
    }
    let first = rig.client.create_snapshot("1", &volume).await.expect("snapshot").snapshot_id;
    for (block, letter) in [(4, b'E'), (2, b'D'), (1, b'B')] {
        content.write(&device, block, 1, letter);
    }
    content.discard(&device, 0, 1);
    let second = rig.client.create_snapshot("2", &volume).await.expect("snapshot").snapshot_id;
    compared(&rig, &[&second]).await;
    assert_eq!(&members(&rig.snapshot_dir(&second).allocated()), allocated, "{pool:?}");
    assert_eq!(&members(&rig.snapshot_dir(&second).changed()), compared_second, "{pool:?}");
    content.write(&device, 5, 1, b'F');
    content.discard(&device, 4, 1);
    content.write(&device, 2, 1, b'C');
    let third = rig.client.create_snapshot("3", &volume).await.expect("snapshot").snapshot_id;
    compared(&rig, &[&third]).await;
    assert_eq!(&members(&rig.snapshot_dir(&third).changed()), compared_third, "{pool:?}");
    let (once, twice) = (&drawn("named once")[0], &drawn("named twice")[0]);
    assert_eq!((&once[..], &twice[..]), (&[0, 5][..], &[2, 4][..]));
    assert_eq!(
        rig.changed(&first, &third).await,
        once.iter().map(|block| u64::from(*block)).collect::<Vec<_>>(),
        "{pool:?}"
    );

    let dir = rig.snapshot_dir(&third);
    let map = std::fs::read(dir.changed()).expect("read");
    let (rest, trailer) = map.split_at(map.len() - 108);
    let number = |bytes: &[u8]| bytes.iter().rev().fold(0, |number, byte| number << 8 | u64::from(*byte));
    assert_eq!(&trailer[..8], b"dpathmap");
    // Where the page says that each field of the trailer is.
    let format = read("docs/format.md");
    let of_maps = section(&format, "Block maps").split("trailer ").nth(1).expect("a trailer");
    let fields = of_maps.lines().skip(1).map_while(|line| {
        let mut words = line.split_whitespace().map(str::parse::<usize>);
        Some((words.next()?.ok()?, words.next()?.ok()?))
    });
    let fields: Vec<_> = fields.collect();
    assert_eq!(fields.iter().map(|(_, length)| length).sum::<usize>(), trailer.len());
    let numbers: Vec<u64> =
        fields[1..6].iter().map(|(at, length)| number(&trailer[*at..at + length])).collect();
    assert_eq!(numbers, [2, BLOCK, 8, 1, 1]);
    assert_eq!(trailer[36..76].trim_ascii_end().split(|byte| *byte == 0).next(), Some(second.as_bytes()));
    let (payloads, table) = rest.split_at(rest.len() - 48);
    let at = number(&table[8..16]) as usize;
    let payload = &payloads[at..][..number(&table[4..8]) as usize];
    assert_eq!(&table[16..], blake3::hash(payload).as_bytes());
    assert_eq!(&trailer[76..], blake3::hash(&map[map.len() - 108 - 48..map.len() - 32]).as_bytes());

    let page = std::fs::read(dir.hashes()).expect("read")[..4096].to_owned();
    assert_eq!(&page[5 * 32..6 * 32], hash_of(&device, 5).as_bytes(), "the slot of block 5");
    assert_eq!(number(&page[4064..4068]), 1);
    let sealed = [&1u32.to_le_bytes()[..], &0u64.to_le_bytes(), &page[..4064]].concat();
    assert_eq!(&page[4068..], &blake3::hash(&sealed).as_bytes()[..28]);

    let state = std::fs::read(rig.pool_dir().join("volumes").join(&volume).join("state.json")).expect("read");
    assert_eq!(state.len(), 2 * 8192);
    let slots = state.chunks(8192).filter_map(|slot| {
        let line = slot.split(|byte| *byte == b'\n').next()?;
        let words: Vec<&str> = std::str::from_utf8(line).ok()?.split(' ').collect();
        let [number, length, hash] = words[..] else { return None };
        let (number, length): (u64, usize) = (number.parse().ok()?, length.parse().ok()?);
        let content = &slot[line.len() + 1..][..length];
        assert!(slot[line.len() + 1 + length..].iter().all(|byte| *byte == 0));
        assert_eq!(blake3::hash(&[&number.to_le_bytes()[..], content].concat()).to_hex().as_str(), hash);
        Some((number, serde_json::from_slice::<serde_json::Value>(content).expect("JSON")))
    });
    let (_, content) = slots.max_by_key(|(number, _)| *number).expect("a slot");
    assert!(content["published"].as_array().is_some_and(|places| places.len() == 1), "{content}");
    rig.detach_and_finish(&volume).await;
}

/// Each example has exactly the fields of its record, with the right types.
#[test]
fn the_examples_in_the_format_are_records() {
    use deltapath::store::{SnapshotRecord, VolumeRecord, VolumeState};
    fn again<T: serde::Serialize + serde::de::DeserializeOwned>(text: &str) -> serde_json::Value {
        let record: T = serde_json::from_str(text).expect("a record");
        serde_json::to_value(record).expect("JSON")
    }
    let page = read("docs/format.md");
    let examples = blocks(&page, "json");
    let [volume, snapshot, state] = examples[..] else { panic!("{} examples", examples.len()) };
    let records =
        [again::<VolumeRecord>(volume), again::<SnapshotRecord>(snapshot), again::<VolumeState>(state)];
    for (example, record) in examples.iter().zip(records) {
        assert_eq!(serde_json::from_str::<serde_json::Value>(example).expect("JSON"), record);
    }
}

fn hash_of(device: &Path, block: u64) -> blake3::Hash {
    let mut bytes = vec![0; BLOCK as usize];
    open_device(device).read_exact_at(&mut bytes, block * BLOCK).expect("read");
    blake3::hash(&bytes)
}
