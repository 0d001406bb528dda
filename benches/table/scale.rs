//! Rows "scale": many volumes, long chains, and a volume of 64 TiB, each beside a tenth of it, so that growth is seen.

use std::time::{Duration, Instant};

use base::BlockRange;
use cbt::{MapFile, Relation};
use csi_client::{Client, block_capability, new_volume};
use fastrand::Rng;
use proto::{GetCapacityRequest, ListSnapshotsRequest, ProbeRequest};
use testkit::bench::{median, ms};
use testkit::{PoolKind, Rig};

use crate::{Row, Table, host, ratio};

/// What may be ten times as large and cost as much a piece: a ratio of 1, and what a busy machine adds.
const FLAT: f64 = 2.0;
const EACH: usize = 20;

pub async fn run(table: &mut Table) {
    for pool in crate::SHARING.into_iter().filter(|pool| table.wants_pool(*pool)).collect::<Vec<_>>() {
        many_volumes(table, pool).await;
        long_chain(table, pool).await;
    }
    huge_volume(table).await;
}

/// What calls cost a driver that has many volumes.
struct Crowd {
    /// A call, in the middle.
    create: Duration,
    start: Duration,
    page: Duration,
    capacity: Duration,
    /// MiB, idle after the start.
    memory: u64,
    files: usize,
}

async fn many_volumes(table: &mut Table, pool: PoolKind) {
    let (few, many) = (crowd(pool, 100).await, crowd(pool, 1000).await);
    let grows = [(many.create, few.create), (many.page, few.page), (many.capacity, few.capacity)]
        .map(|(many, few)| ratio(many, few));
    let start = ratio(many.start, few.start);
    table.add(Row {
        id: "scale",
        what: format!("1,000 volumes with {EACH} snapshots each, {}", pool.name()),
        measured: format!(
            "CreateSnapshot {}, start to first Probe {}, a page of 500 of ListSnapshots {}, GetCapacity {}; {} MiB, {} open \
             files",
            ms(many.create),
            ms(many.start),
            ms(many.page),
            ms(many.capacity),
            many.memory,
            many.files
        ),
        beside: format!(
            "100 volumes: {:.2} x, {start:.2} x, {:.2} x, {:.2} x; {} MiB, {} open files",
            grows[0], grows[1], grows[2], few.memory, few.files
        ),
        must: "2 x a call; 12 x the start",
        holds: grows.iter().all(|grows| *grows <= FLAT) && start <= 12.0,
    });
}

async fn crowd(pool: PoolKind, volumes: usize) -> Crowd {
    let mut rig = Rig::start_with(pool, &["--pool-size", "32Gi"], "warn").await;
    let mut ids = Vec::new();
    for number in 0..volumes {
        let request = new_volume(&format!("volume {number}"), 1 << 30, block_capability());
        ids.push(rig.client.create_volume(request).await.expect("CreateVolume").volume_id);
    }
    let mut times = Vec::new();
    for round in 0..EACH {
        for id in &ids {
            let started = Instant::now();
            rig.snapshot(&format!("{id} {round}"), id).await;
            if round + 1 == EACH {
                times.push(started.elapsed());
            }
        }
    }
    assert!(rig.terminate().success(), "the driver failed");
    let started = Instant::now();
    rig.start_again().await;
    rig.client.identity.probe(ProbeRequest {}).await.expect("Probe");
    let start = started.elapsed();
    let (mut pages, mut capacities) = (Vec::new(), Vec::new());
    let mut token = String::new();
    let mut listed = 0;
    loop {
        let started = Instant::now();
        let request = ListSnapshotsRequest { max_entries: 500, starting_token: token, ..Default::default() };
        let page = rig.client.controller.list_snapshots(request).await.expect("ListSnapshots").into_inner();
        pages.push(started.elapsed());
        listed += page.entries.len();
        let started = Instant::now();
        rig.client.controller.get_capacity(GetCapacityRequest::default()).await.expect("GetCapacity");
        capacities.push(started.elapsed());
        token = page.next_token;
        if token.is_empty() {
            break;
        }
    }
    assert_eq!(listed, volumes * EACH);
    let memory = host::status_kib(rig.pid(), "VmRSS:") >> 10;
    let files = std::fs::read_dir(format!("/proc/{}/fd", rig.pid())).expect("list").count();
    rig.finish();
    let [create, page, capacity] = [times, pages, capacities].map(|times| median(&times));
    Crowd { create, start, page, capacity, memory, files }
}

/// What calls for the newest snapshots of a long chain cost.
struct Chain {
    create: Duration,
    /// The same by the filesystem alone.
    bare: Duration,
    /// From the one before, and from the first.
    near: Duration,
    far: Duration,
    delete: Duration,
}

async fn long_chain(table: &mut Table, pool: PoolKind) {
    const SIZE: u64 = 1 << 30;
    const CHANGED: usize = 256;
    const LAST: usize = 11;
    let mut rig = Rig::start_with(pool, &["--pool-size", "32Gi"], "warn").await;
    let mut random = Rng::with_seed(23);
    let (volume, device) = rig.block_volume("volume", SIZE as i64).await;
    let blocks: Vec<u64> = (0..SIZE / 4096).map(|block| block * 4096).collect();
    host::write_blocks(&device, &mut random, &blocks);
    let mut snapshots = vec![rig.snapshot("0", &volume).await];
    let mut chains = Vec::new();
    for length in [100, 1000] {
        let (mut create, mut copies, mut near, mut far, mut delete) =
            (vec![], vec![], vec![], vec![], vec![]);
        while snapshots.len() < length {
            let offsets: Vec<u64> = (0..CHANGED).map(|_| blocks[random.usize(..blocks.len())]).collect();
            host::write_blocks(&device, &mut random, &offsets);
            let started = Instant::now();
            let snapshot = rig.snapshot(&snapshots.len().to_string(), &volume).await;
            let took = started.elapsed();
            let newest = snapshots.last().expect("the first").clone();
            snapshots.push(snapshot.clone());
            if snapshots.len() + LAST > length {
                create.push(took);
                // Kept: what is removed goes on being removed behind.
                copies.push(host::bare_copy(&rig, pool, &host::volume_dir(&rig, &volume), Some(&device)));
                host::hashed(&rig, &snapshot).await;
                near.push(delta(&mut rig.client, &newest, &snapshot).await);
                far.push(delta(&mut rig.client, &snapshots[0], &snapshot).await);
            }
        }
        for _ in 0..LAST {
            let middle = snapshots.remove(snapshots.len() / 2);
            let started = Instant::now();
            rig.client.delete_snapshot(&middle).await.expect("DeleteSnapshot");
            delete.push(started.elapsed());
        }
        let bare = copies.iter().map(|copy| copy.took).collect();
        let [create, bare, near, far, delete] = [create, bare, near, far, delete].map(|times| median(&times));
        chains.push(Chain { create, bare, near, far, delete });
    }
    let [short, long] = &chains[..] else { unreachable!("two lengths") };
    let figures = |chain: &Chain| [chain.create, chain.near, chain.delete, chain.far];
    let grows: Vec<f64> =
        figures(long).into_iter().zip(figures(short)).map(|(long, short)| ratio(long, short)).collect();
    let [create, near, delete, far] = figures(long).map(ms);
    // A filesystem shares extents, and each change makes more of them.
    let bare = ratio(long.bare, short.bare);
    table.add(Row {
        id: "scale",
        what: format!("the newest of 1,000 snapshots of a volume, {CHANGED} blocks changed in each, {}", pool.name()),
        measured: format!(
            "CreateSnapshot {create}, delta from the one before {near}, DeleteSnapshot in the middle {delete}, delta from \
             the first {far}"
        ),
        beside: format!(
            "of 100: {:.2} x, {:.2} x, {:.2} x, {:.2} x; bare copies {bare:.2} x, {}",
            grows[0],
            grows[1],
            grows[2],
            grows[3],
            ms(long.bare)
        ),
        must: "2 x; 2 x what bare copies grow for CreateSnapshot and DeleteSnapshot; the last 12 x",
        holds: grows[1] <= FLAT
            && [grows[0], grows[2]].iter().all(|grows| *grows <= FLAT * bare.max(1.0))
            && grows[3] <= 12.0,
    });
    rig.detach(&volume).await;
    rig.finish();
}

/// 64 TiB with 64 Mi allocated blocks would be 256 GiB of data, so the maps of two snapshots of an empty volume are written
/// here, as the driver would have written them, and the hash files stay empty: all that changed is in an exact map.
async fn huge_volume(table: &mut Table) {
    const BLOCKS: u64 = 64 << 40 >> 12;
    const ALLOCATED: u64 = 64 << 20;
    let mut streams = Vec::new();
    for part in [10, 1] {
        let (blocks, allocated) = (BLOCKS / part, ALLOCATED / part);
        let every = blocks / allocated;
        let mut rig = Rig::start_with(PoolKind::Xfs, &[], "warn").await;
        let (volume, _) = rig.block_volume("volume", (blocks * 4096) as i64).await;
        let base = rig.snapshot("base", &volume).await;
        let target = rig.snapshot("target", &volume).await;
        host::hashed(&rig, &target).await;
        for id in [&base, &target] {
            host::replace_map(&host::snapshot_dir(&rig, id).allocated(), |writer| {
                for block in 0..allocated {
                    writer.insert(BlockRange::new(block * every, block * every + 1)).expect("insert");
                }
            });
        }
        let changed = host::snapshot_dir(&rig, &target).changed();
        let header = MapFile::open(&changed).expect("map").header().clone();
        assert!(matches!(header.relative_to, Some(Relation { exact: true, .. })), "{header:?}");
        host::replace_map(&changed, |writer| {
            for block in (0..allocated).step_by(100) {
                writer.insert(BlockRange::new(block * every, block * every + 1)).expect("insert");
            }
        });
        let listed = host::allocated(&mut rig.client, &target).await;
        assert_eq!(listed.tuples, allocated);
        let took = delta(&mut rig.client, &base, &target).await;
        let memory = host::status_kib(rig.pid(), "VmHWM:") >> 10;
        streams.push((listed.whole, took, memory));
        rig.detach(&volume).await;
        rig.finish();
    }
    let [small, huge] = streams[..] else { unreachable!("two sizes") };
    let grows = [ratio(huge.0, small.0), ratio(huge.1, small.1)];
    table.add(Row {
        id: "scale",
        what: "64 TiB with 67,108,864 allocated blocks, 1 % of them changed, maps written by the bench"
            .into(),
        measured: format!("allocated {}, delta {}, memory at most {} MiB", ms(huge.0), ms(huge.1), huge.2),
        beside: format!("a tenth of it: {:.1} x, {:.1} x; {} MiB", grows[0], grows[1], small.2),
        must: "12 x; 64 MiB",
        holds: grows.iter().all(|grows| *grows <= 12.0) && huge.2 <= 64,
    });
}

async fn delta(client: &mut Client, base: &str, target: &str) -> Duration {
    let read = host::delta(client, base, target).await;
    assert!(read.tuples > 0, "nothing changed from {base} to {target}");
    read.whole
}
