//! `far`: what grows, from 10 to 100,000 changed blocks and 10,000 snapshots, for a chart on logarithmic scales: a knee shows there.

use std::time::Duration;

use fastrand::Rng;
use testkit::bench::{ms, record_in};
use testkit::prelude::*;

use crate::{Table, host, spread};

const BLOCKS: [usize; 5] = [10, 100, 1_000, 10_000, 100_000];
/// More of them take hours to make.
const SNAPSHOTS: [usize; 4] = [10, 100, 1_000, 10_000];
const ROUNDS: usize = 3;
const SPARSE: u64 = 16 << 40;
/// So small that the copies of the filesystem cost the same, however many there are.
const CHAINED: u64 = 1 << 20;
/// Blocks that change from one snapshot to the next.
const CHANGED: usize = 4;
/// Deltas of a point.
const DELTAS: usize = 50;

pub async fn run(table: &Table) {
    for pool in table.sharing() {
        changed_blocks(pool).await;
        snapshots(pool).await;
    }
}

/// A part of the cell is a point.
fn record(pool: PoolKind, what: &str, points: &[Vec<Duration>]) {
    let cells: Vec<String> = points.iter().map(|times| spread(times, ms)).collect();
    eprintln!("{what}, {}: {}", pool.name(), cells.join("; "));
    record_in("growth by powers of ten", pool.name(), what, &cells.join("; "), "", "", true);
}

/// Right after the snapshot, with nothing cached, blocks that are spread evenly over 16 TiB.
async fn changed_blocks(pool: PoolKind) {
    let mut rig = Rig::start_with(pool, &["--pool-size", "32Gi"], "warn").await;
    let mut random = Rng::with_seed(5);
    let mut points = Vec::new();
    for number in BLOCKS {
        let (volume, device) = rig.block_volume(&format!("{number} blocks"), SPARSE as i64).await;
        let apart = SPARSE / number as u64 / BLOCK * BLOCK;
        let offsets: Vec<u64> = (0..number as u64).map(|block| block * apart).collect();
        host::write_blocks(&device, &mut random, &offsets);
        let mut base = rig.snapshot(&format!("{number} blocks, first"), &volume).await;
        let mut times = Vec::new();
        for round in 0..ROUNDS {
            host::hashed(&rig, &base).await;
            host::write_blocks(&device, &mut random, &offsets);
            host::drop_caches();
            let target = rig.snapshot(&format!("{number} blocks, {round}"), &volume).await;
            let read = host::delta(&mut rig.client, &base, &target).await;
            assert_eq!(read.bytes / BLOCK, number as u64, "a block that changed is missing");
            times.push(read.whole);
            base = target;
        }
        points.push(times);
        rig.detach(&volume).await;
    }
    record(pool, "GetMetadataDelta at once, cold, by changed blocks", &points);
    rig.finish();
}

/// Snapshots of one volume. It is in use, so the pool stays mounted while the driver starts.
async fn snapshots(pool: PoolKind) {
    let mut rig = Rig::start_with(pool, &["--pool-size", "32Gi"], "warn").await;
    let mut random = Rng::with_seed(7);
    let (volume, device) = rig.block_volume("volume", CHAINED as i64).await;
    let offsets: Vec<u64> = (0..CHAINED / BLOCK).map(|block| block * BLOCK).collect();
    host::write_blocks(&device, &mut random, &offsets);
    let (mut taken, mut created, mut deltas, mut starts) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
    for number in SNAPSHOTS {
        let mut creations = Vec::new();
        while taken.len() < number {
            let changed: Vec<u64> = (0..CHANGED).map(|_| offsets[random.usize(..offsets.len())]).collect();
            host::write_blocks(&device, &mut random, &changed);
            let name = taken.len().to_string();
            let (snapshot, took) = host::timed(rig.snapshot(&name, &volume)).await;
            taken.push(snapshot);
            creations.push(took);
        }
        created.push(creations.split_off(creations.len().saturating_sub(DELTAS)));
        host::hashed(&rig, taken.last().expect("one")).await;
        host::idle(&rig, pool).await;
        let mut times = Vec::new();
        for _ in 0..DELTAS {
            let newer = random.usize(1..number);
            let older = random.usize(..newer);
            times.push(host::delta(&mut rig.client, &taken[older], &taken[newer]).await.whole);
        }
        deltas.push(times);
        let mut times = Vec::new();
        for _ in 0..ROUNDS {
            times.push(host::start_again(&mut rig).await);
        }
        starts.push(times);
        // After each number, so that a run that is cut short shows what it has.
        record(pool, "CreateSnapshot, by snapshots of a volume", &created);
        record(pool, "GetMetadataDelta between any two, by snapshots of a volume", &deltas);
        record(pool, "start to first Probe, by snapshots of a volume", &starts);
    }
    rig.detach_and_finish(&volume).await;
}
