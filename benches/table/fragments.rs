//! Row d: a volume in hundreds of thousands of extents, on btrfs.

use std::fs::File;
use std::path::Path;
use std::time::{Duration, Instant};

use deltapath::sys::blockdev;
use deltapath::sys::btrfs::{self, WrittenSince};
use deltapath::sys::extents::Extents;
use deltapath::sys::tree;

use crate::host;
use crate::{Row, Table, ratio, spread};
use fastrand::Rng;
use testkit::bench::{median, ms};
use testkit::prelude::*;

const SIZE: u64 = 4 << 30;
const WRITES: usize = 200_000;
const ROUNDS: usize = 5;

pub async fn run(table: &mut Table) {
    let mut rig = Rig::start_with(PoolKind::Btrfs, &["--pool-size", "40Gi"], "warn").await;
    // Twins: what is measured on one would be done already on the other.
    let (ours, device) = rig.block_volume("ours", SIZE as i64).await;
    let (bare, bare_device) = rig.block_volume("bare", SIZE as i64).await;
    let mut random = Rng::with_seed(9);
    for device in [&device, &bare_device] {
        host::fill(device, SIZE, &mut random);
    }
    let mut base = rig.snapshot("base", &ours).await;
    let mut since = bare_snapshot(&rig, &bare, &bare_device, None).1;
    let (mut snapshots, mut bares, mut deltas) = (vec![], vec![], vec![]);
    let (mut restores, mut bare_restores, mut copies) = (vec![], vec![], vec![]);
    for round in 0..ROUNDS {
        let offsets: Vec<u64> = (0..WRITES).map(|_| random.u64(0..SIZE / 4096) * 4096).collect();
        host::write_blocks(&bare_device, &mut random, &offsets);
        let (took, birth) = bare_snapshot(&rig, &bare, &bare_device, Some(since));
        bares.push(took);
        since = birth;
        host::write_blocks(&device, &mut random, &offsets);
        let (target, took) = host::timed(rig.snapshot(&format!("target {round}"), &ours)).await;
        snapshots.push(took);
        host::hashed(&rig, &target).await;
        let (list, took) = host::timed(rig.client.delta(&base, &target, 0, 0)).await;
        deltas.push((took, list.expect("delta").bytes() / 4096));
        let copy = host::bare_copy(&rig, PoolKind::Btrfs, &rig.snapshot_dir(&target), None);
        bare_restores.push(copy.took);
        copies.push(copy);
        let (name, source) = (format!("restore {round}"), from_snapshot(&target));
        restores.push(host::timed(rig.made_from(&name, SIZE as i64, block_capability(), source)).await.1);
        base = target;
    }
    let path = rig.snapshot_dir(&base).data();
    let extents = Extents::of(&File::open(&path).expect("open"), &path).expect("extents").count();
    let (took, bare_took) = (median(&snapshots), median(&bares));
    table.add(Row {
        id: "d",
        what: format!("CreateSnapshot, 4 GiB in fragments, {WRITES} writes since, btrfs"),
        measured: format!("{}, in {extents} extents", spread(&snapshots, ms)),
        beside: format!("{:.2} x bare flush, ioctl and search {}", ratio(took, bare_took), ms(bare_took)),
        must: "1.5 x",
        holds: ratio(took, bare_took) <= 1.5,
    });
    let together = bare_took;
    let (took, bare_took) = (median(&restores), median(&bare_restores));
    table.add(Row {
        id: "d",
        what: "restore of it".into(),
        measured: spread(&restores, ms),
        beside: format!(
            "{:.2} x bare flush, ioctl and search; {:.2} x the bare ioctl alone, {}",
            ratio(took, together),
            ratio(took, bare_took),
            ms(bare_took)
        ),
        must: "1.5 x of all three",
        holds: ratio(took, together) <= 1.5,
    });
    let took: Vec<Duration> = deltas.iter().map(|delta| delta.0).collect();
    table.add(Row {
        id: "d",
        what: "GetMetadataDelta of the writes".into(),
        measured: format!("{}, {} blocks", spread(&took, ms), deltas[0].1),
        beside: format!("{:.2} x the bare search and snapshot", ratio(median(&took), median(&bares))),
        must: "500 ms",
        holds: median(&took) < Duration::from_millis(500),
    });
    drop(copies);
    rig.detach(&ours).await;
    rig.detach_and_finish(&bare).await;
}

/// Flushes, takes a snapshot of the subvolume, and lists what was written since the last one.
fn bare_snapshot(rig: &Rig, volume: &str, device: &Path, since: Option<u64>) -> (Duration, u64) {
    let scratch = base::ObjectDir::new(rig.pool_dir().join("staging/bench"));
    std::fs::create_dir_all(scratch.path()).expect("mkdir");
    let started = Instant::now();
    blockdev::flush(device).expect("flush");
    let source = rig.volume_dir(volume).bytes();
    let from = File::open(&source).expect("open");
    btrfs::snapshot(&from, &source, &scratch.bytes()).expect("snapshot");
    let birth = btrfs::birth(&scratch.bytes()).expect("birth");
    if let Some(since) = since {
        let path = scratch.data();
        let file = File::open(&path).expect("open");
        let found = WrittenSince::of(&file, &path, since).expect("search").count();
        assert!(found > WRITES / 2, "{found} items");
    }
    let took = started.elapsed();
    tree::remove(scratch.path()).expect("remove");
    (took, birth)
}
