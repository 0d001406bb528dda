//! Rows a, b, b2, c, i, q: snapshots, deltas and restores of a huge sparse volume; and with nothing in the page cache.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::time::{Duration, Instant};

use base::ByteRange;
use deltapath::sys::extents::Extents;
use files::DataRanges;
use proto::VolumeContentSource;

use crate::host;
use crate::{Row, Table, ratio, spread};
use fastrand::Rng;
use testkit::bench::{median, ms};
use testkit::prelude::*;

pub const GIB: u64 = 1 << 30;
/// The number of pieces that 1 GiB of data is in, spread evenly.
const PIECES: u64 = 4096;
const PIECE: u64 = GIB / PIECES;
/// 1 % of the data, in blocks.
const CHANGED: u64 = GIB / 4096 / 100;
const ROUNDS: usize = 5;

pub const IDS: [&str; 9] = ["a", "b", "b-cold", "b2", "c", "c-cold", "i", "i-cold", "q"];

/// Ours and the bare operation.
type Pair = (Duration, Duration);

/// The figures of one volume size on one pool.
struct Figures {
    first: Vec<Pair>,
    next: Vec<Pair>,
    delete: Vec<Pair>,
    restore: Warmth<Vec<Pair>>,
    clone: Warmth<Vec<Pair>>,
    /// First message, whole stream, bare walk.
    delta: Warmth<Vec<(Duration, Duration, Duration)>>,
    pending: Vec<Pair>,
    allocated: Warmth<Vec<Pair>>,
}

/// With all in the page cache, and with nothing.
#[derive(Default)]
struct Warmth<T> {
    warm: T,
    cold: T,
}

pub async fn run(table: &mut Table) {
    for pool in table.sharing() {
        let huge = measure(pool, 16 << 40).await;
        let small = measure(pool, 16 << 30).await;
        let flag = pool.name();
        for (id, what, ours, theirs) in [
            ("a", "first CreateSnapshot, nothing hashed", &huge.first, &small.first),
            ("a", "CreateSnapshot after 1 % changed", &huge.next, &small.next),
            ("i", "restore", &huge.restore.warm, &small.restore.warm),
            ("i", "clone of the volume", &huge.clone.warm, &small.clone.warm),
            ("i-cold", "restore, cold", &huge.restore.cold, &small.restore.cold),
            ("i-cold", "clone of the volume, cold", &huge.clone.cold, &small.clone.cold),
            ("q", "DeleteSnapshot after 1 % changed", &huge.delete, &small.delete),
        ] {
            let (took, bare) = middle(ours);
            let (took_small, _) = middle(theirs);
            let (times, grows) = (ratio(took, bare), ratio(took, took_small));
            let quick = took <= Duration::from_millis(50);
            table.add(Row {
                id,
                what: format!("{what}, 16 TiB sparse, 1 GiB data, {flag}"),
                measured: spread(&times_of(ours), ms),
                beside: format!(
                    "{times:.2} x the bare {}; {grows:.2} x the same on 16 GiB ({})",
                    ms(bare),
                    ms(took_small)
                ),
                must: if id == "q" { "3 x or 50 ms" } else { "3 x or 50 ms; 1.5 x" },
                holds: (times <= 3.0 || quick) && (id == "q" || grows <= 1.5),
            });
        }
        for (id, cold, samples) in [("b", "", &huge.delta.warm), ("b-cold", ", cold", &huge.delta.cold)] {
            let firsts: Vec<_> = samples.iter().map(|sample| sample.0).collect();
            let wholes: Vec<_> = samples.iter().map(|sample| sample.1).collect();
            let bare: Vec<_> = samples.iter().map(|sample| sample.2).collect();
            let (first, whole, bare) = (median(&firsts), median(&wholes), median(&bare));
            table.add(Row {
                id,
                what: format!("GetMetadataDelta of 1 % ({CHANGED} blocks){cold}, {flag}"),
                measured: format!("{}, first message {}", spread(&wholes, ms), spread(&firsts, ms)),
                beside: format!("{:.3} x a FIEMAP walk of both files, {}", ratio(whole, bare), ms(bare)),
                must: if cold.is_empty() { "10 ms; first 5 ms" } else { "1 x" },
                holds: match cold {
                    "" => whole <= Duration::from_millis(10) && first <= Duration::from_millis(5),
                    _ => whole <= bare,
                },
            });
        }
        let (took, bare) = middle(&huge.pending);
        table.add(Row {
            id: "b2",
            what: format!("the same, no hash made yet, {flag}"),
            measured: spread(&times_of(&huge.pending), ms),
            beside: format!("{:.2} x reading the changed blocks of both, {}", ratio(took, bare), ms(bare)),
            must: "2 x",
            holds: ratio(took, bare) <= 2.0,
        });
        for (id, cold, samples) in
            [("c", "", &huge.allocated.warm), ("c-cold", ", cold", &huge.allocated.cold)]
        {
            let (took, bare) = middle(samples);
            table.add(Row {
                id,
                what: format!("GetMetadataAllocated of 1 GiB in {PIECES} pieces{cold}, {flag}"),
                measured: spread(&times_of(samples), ms),
                beside: format!("{:.3} x a SEEK_DATA/SEEK_HOLE walk, {}", ratio(took, bare), ms(bare)),
                must: if cold.is_empty() { "10 ms" } else { "1 x" },
                holds: took <= if cold.is_empty() { Duration::from_millis(10) } else { bare },
            });
        }
    }
}

/// Ours alone.
fn times_of(samples: &[Pair]) -> Vec<Duration> {
    samples.iter().map(|sample| sample.0).collect()
}

fn middle(samples: &[Pair]) -> Pair {
    let ours = times_of(samples);
    let bare: Vec<_> = samples.iter().map(|sample| sample.1).collect();
    (median(&ours), median(&bare))
}

/// Writes 1 GiB in pieces of this length, spread evenly.
pub fn fill(device: &Path, size: u64, length: u64, random: &mut Rng) {
    let pieces = GIB / length;
    host::write_pieces(device, pieces, length, size / pieces, random);
}

/// Changes 1 % of that at random places; returns them in order.
pub fn change(device: &Path, size: u64, length: u64, random: &mut Rng) -> Vec<u64> {
    change_part(device, size, length, 1, random)
}

/// The same with a number of percent.
pub fn change_part(device: &Path, size: u64, length: u64, percent: u64, random: &mut Rng) -> Vec<u64> {
    let pieces = GIB / length;
    let mut offsets: Vec<u64> = (0..CHANGED * percent)
        .map(|_| random.u64(0..pieces) * (size / pieces) + random.u64(0..length / 4096) * 4096)
        .collect();
    host::write_blocks(device, random, &offsets);
    offsets.sort_unstable();
    offsets.dedup();
    offsets
}

async fn measure(pool: PoolKind, size: u64) -> Figures {
    let mut rig = Rig::start_with(pool, &["--pool-size", "48Gi"], "warn").await;
    let mut random = Rng::with_seed(7);
    let (mut first, mut next, mut pending) = (vec![], vec![], vec![]);
    let mut delta = Warmth::<Vec<_>>::default();
    let mut allocated = Warmth::<Vec<_>>::default();
    let mut last = None;
    for number in 0..ROUNDS {
        // Twins, for a volume has one first copy. Deleted afterwards, like the copy.
        let (twin, twin_device) = rig.block_volume(&format!("twin {number}"), size as i64).await;
        fill(&twin_device, size, PIECE, &mut random);
        let bare = host::bare_copy(&rig, pool, &rig.volume_dir(&twin), Some(&twin_device));
        let (volume, device) = rig.block_volume(&format!("volume {number}"), size as i64).await;
        fill(&device, size, PIECE, &mut random);
        let (snapshot, took) = host::timed(rig.snapshot(&format!("first {number}"), &volume)).await;
        first.push((took, bare.took));
        drop(bare);
        rig.delete(&twin).await;
        host::hashed(&rig, &snapshot).await;
        if number + 1 < ROUNDS {
            rig.client.delete_snapshot(&snapshot).await.expect("delete");
            rig.delete(&volume).await;
        } else {
            last = Some((volume, device, snapshot));
        }
    }
    let (volume, device, mut base) = last.expect("rounds");
    for round in 0..ROUNDS {
        // Half of the change before the bare copy, so that both have something to flush.
        let mut changed = change(&device, size, PIECE, &mut random);
        let bare = host::bare_copy(&rig, pool, &rig.volume_dir(&volume), Some(&device)).took;
        changed.extend(change(&device, size, PIECE, &mut random));
        let (target, took) = host::timed(rig.snapshot(&format!("next {round}"), &volume)).await;
        next.push((took, bare));
        host::hashed(&rig, &target).await;
        let streamed = stream_delta(&mut rig, &base, &target).await;
        delta.warm.push((streamed.first, streamed.whole, walk(&rig, &[&base, &target])));
        allocated.warm.push((stream_allocated(&mut rig, &target).await, seek(&rig, &target, size)));
        host::drop_caches();
        let streamed = stream_delta(&mut rig, &base, &target).await;
        host::drop_caches();
        delta.cold.push((streamed.first, streamed.whole, walk(&rig, &[&base, &target])));
        host::drop_caches();
        let took = stream_allocated(&mut rig, &target).await;
        host::drop_caches();
        allocated.cold.push((took, seek(&rig, &target, size)));
        changed.sort_unstable();
        changed.dedup();
        let forgotten = [host::forget_hashes(&rig, &base), host::forget_hashes(&rig, &target)];
        // Once before, so that both find all in the cache, maps too.
        stream_delta(&mut rig, &base, &target).await;
        read(&rig, &[&base, &target], &changed);
        let whole = stream_delta(&mut rig, &base, &target).await.whole;
        pending.push((whole, read(&rig, &[&base, &target], &changed)));
        drop(forgotten);
        base = target;
    }
    let of_snapshot = rig.snapshot_dir(&base);
    let restore = make(&mut rig, pool, "restore", size, from_snapshot(&base), &of_snapshot, None).await;
    let of_volume = rig.volume_dir(&volume);
    let clone = make(&mut rig, pool, "clone", size, from_volume(&volume), &of_volume, Some(&device)).await;
    let (mut snapshots, mut copies) = (Vec::new(), Vec::new());
    for round in 0..ROUNDS {
        // A snapshot and a bare copy, each of which alone holds 1 %.
        change(&device, size, PIECE, &mut random);
        snapshots.push(rig.snapshot(&format!("deleted {round}"), &volume).await);
        host::hashed(&rig, &snapshots[round]).await;
        change(&device, size, PIECE, &mut random);
        copies.push(host::bare_copy(&rig, pool, &of_volume, Some(&device)));
    }
    change(&device, size, PIECE, &mut random);
    host::idle(&rig, pool).await;
    let bare: Vec<Duration> = copies.into_iter().map(host::BareCopy::remove).collect();
    host::idle(&rig, pool).await;
    let mut delete = Vec::new();
    for (snapshot, bare) in snapshots.iter().zip(bare) {
        let started = Instant::now();
        rig.client.delete_snapshot(snapshot).await.expect("DeleteSnapshot");
        delete.push((started.elapsed(), bare));
    }
    rig.detach_and_finish(&volume).await;
    Figures { first, next, delete, restore, clone, delta, pending, allocated }
}

/// At least one tuple for each block that was changed, less those that were changed twice.
async fn stream_delta(rig: &mut Rig, base: &str, target: &str) -> host::Streamed {
    let read = host::delta(&mut rig.client, base, target).await;
    assert!(read.tuples > CHANGED, "{} tuples", read.tuples);
    read
}

async fn stream_allocated(rig: &mut Rig, id: &str) -> Duration {
    let started = Instant::now();
    let list = rig.client.allocated(id, 0, 0).await.expect("allocated");
    let took = started.elapsed();
    assert_eq!(list.tuples().count(), PIECES as usize);
    took
}

fn seek(rig: &Rig, id: &str, size: u64) -> Duration {
    let path = rig.snapshot_dir(id).data();
    let started = Instant::now();
    let file = File::open(&path).expect("open");
    let found = DataRanges::of(&file, &path, ByteRange { start: 0, end: size }).count();
    let took = started.elapsed();
    assert!(found >= PIECES as usize, "{found} ranges");
    took
}

fn walk(rig: &Rig, snapshots: &[&str]) -> Duration {
    let started = Instant::now();
    for id in snapshots {
        let path = rig.snapshot_dir(id).data();
        let file = File::open(&path).expect("open");
        let extents = Extents::of(&file, &path).expect("extents").count();
        assert!(extents >= PIECES as usize, "{extents} extents");
    }
    started.elapsed()
}

fn read(rig: &Rig, snapshots: &[&str], offsets: &[u64]) -> Duration {
    let files: Vec<File> =
        snapshots.iter().map(|id| File::open(rig.snapshot_dir(id).data()).expect("open")).collect();
    let mut block = vec![0; 4096];
    let started = Instant::now();
    for offset in offsets {
        for file in &files {
            file.read_exact_at(&mut block, *offset).expect("read");
        }
    }
    started.elapsed()
}

async fn make(
    rig: &mut Rig,
    pool: PoolKind,
    name: &str,
    size: u64,
    source: VolumeContentSource,
    dir: &base::ObjectDir,
    device: Option<&Path>,
) -> Warmth<Vec<Pair>> {
    let (mut samples, mut copies) = (Warmth::<Vec<Pair>>::default(), Vec::new());
    for round in 0..2 * ROUNDS {
        let is_cold = round % 2 == 1;
        if is_cold {
            host::drop_caches();
        }
        let bare = host::bare_copy(rig, pool, dir, device);
        let request =
            new_volume_from(&format!("{name} {round}"), size as i64, block_capability(), source.clone());
        if is_cold {
            host::drop_caches();
        }
        let started = Instant::now();
        rig.client.create_volume(request).await.expect("CreateVolume");
        let of_it = if is_cold { &mut samples.cold } else { &mut samples.warm };
        of_it.push((started.elapsed(), bare.took));
        copies.push(bare);
    }
    samples
}
