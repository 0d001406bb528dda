//! Skip maps, which make deltas over long chains cheap. The driver of the tests makes them over 2, 4, 8 and 16 snapshots.

use std::collections::BTreeMap;

use base::ObjectDir;
use cbt::{MapFile, MapWriter, SegmentIndex};

use crate::faults::versions::later_map;
use crate::faults::{until, verify};
use crate::retained::{damage, flip};
use testkit::prelude::*;

/// The snapshots of a chain: what each holds, by its place.
type Chain = BTreeMap<u64, (String, Content)>;

/// What the skip maps of a chain are relative to, by place and level: the first snapshot of a span of 2^level places skips
/// to the first one of the nearest earlier span with a snapshot, unless that is the oldest.
fn wanted(chain: &Chain) -> BTreeMap<(u64, u32), u64> {
    let mut skips = BTreeMap::new();
    for level in ObjectDir::SKIPS {
        let mut firsts = BTreeMap::new();
        chain.keys().for_each(|place| _ = firsts.entry(place >> level).or_insert(*place));
        let firsts: Vec<u64> = firsts.into_values().collect();
        skips.extend(firsts.windows(2).skip(1).map(|pair| ((pair[1], level), pair[0])));
    }
    skips
}

/// The skip maps that are there.
fn found(rig: &Rig, chain: &Chain) -> BTreeMap<(u64, u32), String> {
    let mut skips = BTreeMap::new();
    for (place, (id, _)) in chain {
        for level in ObjectDir::SKIPS {
            if let Ok(map) = MapFile::open(&rig.snapshot_dir(id).skip(level)) {
                let relation = map.header().relative_to.clone().expect("a relation");
                skips.insert((*place, level), relation.snapshot.to_string());
            }
        }
    }
    skips
}

async fn settled(rig: &Rig, chain: &Chain) {
    let wanted: BTreeMap<_, _> =
        wanted(chain).into_iter().map(|(skip, base)| (skip, chain[&base].0.clone())).collect();
    until("all skip maps are there, and no other", || found(rig, chain) == wanted).await;
}

/// Compares the deltas between all pairs whose distance is at least `from`.
async fn exact(rig: &mut Rig, chain: &Chain, from: u64, what: &str) {
    for (base, (base_id, before)) in chain {
        for (target, (target_id, after)) in chain.range(base + from..) {
            let changed = after.changed_since(before, BLOCK);
            assert_eq!(rig.changed(base_id, target_id).await, changed, "{what}: from {base} to {target}");
        }
    }
}

#[apply(every_pool)]
async fn a_delta_over_a_long_chain_is_exact_whatever_becomes_of_its_skip_maps(pool: PoolKind) {
    let mut rig = Rig::start_with(pool, &["--retain-deleted", "0"], "warn").await;
    let (volume, device) = rig.block_volume("volume", 16 * MIB).await;
    let (mut content, mut chain) = (Content::default(), Chain::new());
    for place in 1..=24u64 {
        // Few blocks, so that many change back.
        content.write(&device, place * 5 % 16, 3, (place % 3) as u8);
        content.write(&device, 100 + place, 1, 1);
        content.discard(&device, place * 7 % 16, 1);
        chain.insert(place, (rig.snapshot(&format!("snapshot {place}"), &volume).await, content.clone()));
    }
    settled(&rig, &chain).await;
    exact(&mut rig, &chain, 1, "with all").await;
    // The first ones of spans, and a span whole.
    for place in [4, 8, 9, 14, 15, 16, 24] {
        let (id, _) = chain.remove(&place).expect("it is there");
        rig.client.delete_snapshot(&id).await.expect("delete");
    }
    settled(&rig, &chain).await;
    exact(&mut rig, &chain, 1, "after deletions").await;
    rig.kill();
    let skips: Vec<_> = wanted(&chain).into_keys().collect();
    for (number, (place, level)) in skips.iter().enumerate() {
        let path = rig.snapshot_dir(&chain[place].0).skip(*level);
        match number % 3 {
            0 => std::fs::remove_file(&path).expect("remove"),
            1 => flip(&path, std::fs::metadata(&path).expect("stat").len() - 1),
            _ => {}
        }
    }
    rig.start_again().await;
    exact(&mut rig, &chain, 6, "while they are made again").await;
    settled(&rig, &chain).await;
    verify(&rig);
    // Each payload is damaged: only a part of the map is not believed.
    for (place, level) in &skips {
        flip(&rig.snapshot_dir(&chain[place].0).skip(*level), 0);
    }
    exact(&mut rig, &chain, 6, "damaged").await;
    for (place, level) in &skips {
        later_map(&rig.snapshot_dir(&chain[place].0).skip(*level));
    }
    exact(&mut rig, &chain, 6, "of a later version").await;
    rig.detach_and_finish(&volume).await;
}

/// A map that lists too little is the one fault that makes a delta wrong, and no checksum shows it.
#[apply(device_test)]
async fn verify_finds_a_block_that_a_map_lacks(rig: Rig<Xfs>) {
    let (volume, device) = rig.block_volume("volume", 16 * MIB).await;
    let (mut content, mut chain) = (Content::default(), Chain::new());
    for place in 1..=8u64 {
        content.write(&device, place * 10, 2, 1);
        chain.insert(place, (rig.snapshot(&format!("snapshot {place}"), &volume).await, content.clone()));
    }
    settled(&rig, &chain).await;
    let dir = rig.snapshot_dir(&chain[&8].0);
    for (path, lacking) in [(dir.skip(2), 60), (dir.skip(1), 71), (dir.changed(), 80)] {
        let sound = std::fs::read(&path).expect("read");
        let map = MapFile::open(&path).expect("open");
        let mut members = map.segment(SegmentIndex(0)).expect("read");
        assert!(members.remove(lacking), "{}", path.display());
        std::fs::remove_file(&path).expect("remove");
        let mut writer = MapWriter::create(&path, map.header().clone()).expect("create");
        writer.insert_segment(SegmentIndex(0), members).expect("insert");
        writer.finish().expect("finish");
        let damage = damage(&rig);
        let name = path.file_name().expect("a name").to_string_lossy().into_owned();
        assert_eq!(damage.len(), 1, "{damage:?}");
        assert_eq!(damage[0]["start"], u64::from(lacking) * BLOCK, "{damage:?}");
        assert!(damage[0]["what"].as_str().is_some_and(|what| what.contains(&name)), "{damage:?}");
        std::fs::write(&path, &sound).expect("restore");
    }
    verify(&rig);
    rig.detach(&volume).await;
}
