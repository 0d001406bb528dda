//! Rows `scale-volumes`, `scale-chain` and `scale-huge`: many volumes, long chains, and a volume of 64 TiB, each beside a
//! tenth of it, so that growth is seen.

use std::time::{Duration, Instant};

use base::BlockRange;
use cbt::{MapFile, Relation};
use fastrand::Rng;
use proto::{GetCapacityRequest, ListSnapshotsRequest};
use testkit::bench::{median, ms};
use testkit::prelude::*;

use crate::{Row, Table, host, ratio, spread};

/// What ten times as much may cost where the size is no matter, and where each piece costs something: a ratio of 1 or 10,
/// and what a busy machine adds.
const FLAT: f64 = 2.0;
const EACH_PIECE: f64 = 12.0;

const FEW_VOLUMES: usize = 100;
/// Snapshots of each volume.
const EACH: usize = 20;
/// Entries of a page.
const PAGE: i32 = 500;
/// Measured calls of a kind, and those before them.
const CALLS: usize = 50;
const WARM_UP: usize = 5;
const STARTS: usize = 5;

const SHORT_CHAIN: usize = 100;
const CHAIN_SIZE: u64 = 1 << 30;
/// Blocks that change from one snapshot of a chain to the next. They cut the file into extents, and a filesystem's copy costs
/// as many as there are.
const CHANGED: usize = 16;
/// Snapshots whose making, and whose deletion, is measured.
const LAST: usize = 11;

const ROUNDS: usize = 3;

pub async fn run(table: &mut Table) {
    for pool in table.sharing() {
        if table.wants("scale-volumes") {
            many_volumes(table, pool).await;
        }
        if table.wants("scale-chain") {
            long_chain(table, pool).await;
        }
        if table.wants("scale-huge") {
            huge_volume(table, pool).await;
        }
    }
}

/// Adds a row of what a call costs, beside what it costs at a tenth of the size. It may cost `limit` times as much.
fn compare(
    table: &mut Table,
    id: &'static str,
    what: String,
    [many, few]: [&[Duration]; 2],
    of: &str,
    limit: f64,
) {
    let grows = ratio(median(many), median(few));
    table.add(Row {
        id,
        what,
        measured: spread(many, ms),
        beside: format!("{grows:.2} x {of}, {}", ms(median(few))),
        must: must(limit),
        holds: grows <= limit,
    });
}

fn must(limit: f64) -> &'static str {
    if limit == FLAT { "2 x" } else { "12 x" }
}

/// What a driver costs that has much on disk.
#[derive(Default)]
struct Running {
    /// From its start to the first answer of Probe.
    starts: Vec<Duration>,
    /// MiB, and open files, idle after the start.
    memory: u64,
    files: usize,
}

impl Running {
    /// Starts the driver again and again, and waits after the last time until it is idle.
    async fn start(rig: &mut Rig, pool: PoolKind) -> Self {
        let mut starts = Vec::new();
        for _ in 0..STARTS {
            starts.push(host::start_again(rig).await);
            host::idle(rig, pool).await;
        }
        let memory = testkit::process_status(rig.pid(), "VmRSS:") >> 10;
        let files = std::fs::read_dir(format!("/proc/{}/fd", rig.pid())).expect("list").count();
        Running { starts, memory, files }
    }

    fn compare(table: &mut Table, id: &'static str, what: String, many: &Self, few: &Self, of: &str) {
        let grows = ratio(median(&many.starts), median(&few.starts));
        table.add(Row {
            id,
            what,
            measured: format!(
                "{}; {} MiB, {} open files when idle",
                spread(&many.starts, ms),
                many.memory,
                many.files
            ),
            beside: format!(
                "{grows:.2} x {of}, {}; {} MiB, {} open files",
                ms(median(&few.starts)),
                few.memory,
                few.files
            ),
            must: must(EACH_PIECE),
            holds: grows <= EACH_PIECE,
        });
    }
}

/// What calls cost a driver that has many volumes.
struct Crowd {
    create: Vec<Duration>,
    page: Vec<Duration>,
    capacity: Vec<Duration>,
    running: Running,
}

async fn many_volumes(table: &mut Table, pool: PoolKind) {
    let (few, many) = (crowd(pool, FEW_VOLUMES).await, crowd(pool, 10 * FEW_VOLUMES).await);
    let (id, of) = ("scale-volumes", format!("with {FEW_VOLUMES} volumes"));
    let what = |what: &str| {
        format!("{what}, {} volumes with {EACH} snapshots each, {}", 10 * FEW_VOLUMES, pool.name())
    };
    for (call, many, few) in [
        ("CreateSnapshot", &many.create, &few.create),
        ("a page of 500 of ListSnapshots", &many.page, &few.page),
        ("GetCapacity", &many.capacity, &few.capacity),
    ] {
        compare(table, id, what(call), [many, few], &of, FLAT);
    }
    Running::compare(table, id, what("start to first Probe"), &many.running, &few.running, &of);
}

async fn crowd(pool: PoolKind, volumes: usize) -> Crowd {
    let mut rig = Rig::start_with(pool, &["--pool-size", "32Gi"], "warn").await;
    let mut ids = Vec::new();
    for number in 0..volumes {
        ids.push(rig.volume(&format!("volume {number}"), 1 << 30, block_capability()).await);
    }
    for round in 0..EACH {
        for id in &ids {
            rig.snapshot(&format!("{id} {round}"), id).await;
        }
    }
    host::idle(&rig, pool).await;
    let running = Running::start(&mut rig, pool).await;
    let (mut create, mut page, mut capacity) = (Vec::new(), Vec::new(), Vec::new());
    let mut token = String::new();
    // Calls of one kind at a time, those before the measured ones to warm up.
    for _ in 0..WARM_UP + CALLS {
        let started = Instant::now();
        let request = ListSnapshotsRequest { max_entries: PAGE, starting_token: token, ..Default::default() };
        let list = rig.client.controller.list_snapshots(request).await.expect("ListSnapshots").into_inner();
        page.push(started.elapsed());
        assert_eq!(list.entries.len(), (volumes * EACH).min(PAGE as usize));
        token = list.next_token;
    }
    for _ in 0..WARM_UP + CALLS {
        let started = Instant::now();
        rig.client.controller.get_capacity(GetCapacityRequest::default()).await.expect("GetCapacity");
        capacity.push(started.elapsed());
    }
    for id in ids.iter().step_by(volumes / (WARM_UP + CALLS).min(volumes)).take(WARM_UP + CALLS) {
        create.push(host::timed(rig.snapshot(&format!("{id} {EACH}"), id)).await.1);
    }
    rig.finish();
    let [create, page, capacity] = [create, page, capacity].map(|times| times[WARM_UP..].to_vec());
    Crowd { create, page, capacity, running }
}

/// What calls for a long chain cost, and the filesystem's own operations.
#[derive(Default)]
struct Chain {
    /// Of the newest.
    create: Vec<Duration>,
    copy: Vec<Duration>,
    /// Deltas from the one before, from the first, and between any two.
    near: Vec<Duration>,
    far: Vec<Duration>,
    any: Vec<Duration>,
    /// Of a snapshot in the middle, and of a bare copy that is as old.
    delete: Vec<Duration>,
    remove: Vec<Duration>,
    running: Running,
}

async fn long_chain(table: &mut Table, pool: PoolKind) {
    let mut rig = Rig::start_with(pool, &["--pool-size", "32Gi"], "warn").await;
    let mut random = Rng::with_seed(23);
    let (volume, device) = rig.block_volume("volume", CHAIN_SIZE as i64).await;
    let blocks: Vec<u64> = (0..CHAIN_SIZE / 4096).map(|block| block * 4096).collect();
    host::write_blocks(&device, &mut random, &blocks);
    let mut snapshots = vec![rig.snapshot("0", &volume).await];
    let (mut taken, mut chains) = (0, Vec::new());
    for length in [SHORT_CHAIN, 10 * SHORT_CHAIN] {
        let mut chain = Chain::default();
        let (mut in_the_middle, mut at_the_end) = (Vec::new(), Vec::new());
        while snapshots.len() < length {
            let number = snapshots.len();
            // Half of the changes before the snapshot and half before the bare copy; each is the first in every other round.
            let is_measured = number + LAST >= length;
            let is_in_the_middle = (length / 2..length / 2 + LAST).contains(&number);
            if number + LAST == length {
                host::idle(&rig, pool).await;
            }
            for turn in [number % 2, 1 - number % 2] {
                let offsets: Vec<u64> =
                    (0..CHANGED / 2).map(|_| blocks[random.usize(..blocks.len())]).collect();
                host::write_blocks(&device, &mut random, &offsets);
                if turn == 0 {
                    taken += 1;
                    let started = Instant::now();
                    let snapshot = rig.snapshot(&taken.to_string(), &volume).await;
                    if is_measured {
                        chain.create.push(started.elapsed());
                        host::hashed(&rig, &snapshot).await;
                    }
                    snapshots.push(snapshot);
                } else if is_measured || is_in_the_middle {
                    let copy = host::bare_copy(&rig, pool, &rig.volume_dir(&volume), Some(&device));
                    if is_measured {
                        chain.copy.push(copy.took);
                        at_the_end.push(copy);
                    } else {
                        in_the_middle.push(copy);
                    }
                }
            }
        }
        host::hashed(&rig, snapshots.last().expect("one")).await;
        host::idle(&rig, pool).await;
        let newest = snapshots.len() - 1;
        for call in 0..WARM_UP + CALLS {
            let target = newest - call;
            chain.near.push(delta(&mut rig.client, &snapshots[target - 1], &snapshots[target]).await);
            chain.far.push(delta(&mut rig.client, &snapshots[0], &snapshots[target]).await);
            let newer = random.usize(1..=newest);
            let older = random.usize(..newer);
            chain.any.push(delta(&mut rig.client, &snapshots[older], &snapshots[newer]).await);
        }
        // Those at the end first: as long as they are there nobody else's removal frees what they share.
        drop(at_the_end);
        // Not between two of them: btrfs cleans up some twenty seconds later.
        host::idle(&rig, pool).await;
        for copy in in_the_middle {
            chain.remove.push(copy.remove());
        }
        chain.running = Running::start(&mut rig, pool).await;
        for _ in 0..LAST {
            let middle = snapshots.remove(snapshots.len() / 2);
            let started = Instant::now();
            rig.client.delete_snapshot(&middle).await.expect("DeleteSnapshot");
            chain.delete.push(started.elapsed());
        }
        for times in [&mut chain.near, &mut chain.far, &mut chain.any] {
            times.drain(..WARM_UP);
        }
        chains.push(chain);
    }
    let [short, long] = &chains[..] else { unreachable!("two lengths") };
    let (id, of) = ("scale-chain", format!("with {SHORT_CHAIN}"));
    let what = |what: &str| {
        format!(
            "{what}, {} snapshots of a volume, {CHANGED} blocks changed in each, {}",
            10 * SHORT_CHAIN,
            pool.name()
        )
    };
    for (call, bare, [many, few], [bare_many, bare_few]) in [
        ("CreateSnapshot", "a bare copy", [&long.create, &short.create], [&long.copy, &short.copy]),
        (
            "DeleteSnapshot in the middle",
            "removing a bare copy",
            [&long.delete, &short.delete],
            [&long.remove, &short.remove],
        ),
    ] {
        let grows = ratio(median(many), median(few));
        // A filesystem shares extents, and each change makes more of them.
        let bare_grows = ratio(median(bare_many), median(bare_few));
        table.add(Row {
            id,
            what: what(call),
            measured: spread(many, ms),
            beside: format!(
                "{grows:.2} x {of}, {}; {:.1} x {bare}, {}, which grows {bare_grows:.2} x",
                ms(median(few)),
                ratio(median(many), median(bare_many)),
                spread(bare_many, ms)
            ),
            must: "2 x, or 2 x what the bare one grows",
            holds: grows <= FLAT * bare_grows.max(1.0),
        });
    }
    for (call, many, few, limit) in [
        ("a delta from the one before", &long.near, &short.near, FLAT),
        ("a delta from the first", &long.far, &short.far, EACH_PIECE),
    ] {
        compare(table, id, what(call), [many, few], &of, limit);
    }
    let (any, any_of_few) = (median(&long.any), median(&short.any));
    table.add(Row {
        id,
        what: what("a delta between any two"),
        measured: spread(&long.any, ms),
        beside: format!("{:.2} x {of}, {}", ratio(any, any_of_few), ms(any_of_few)),
        must: "4 x; 5 ms",
        holds: any <= 4 * any_of_few && any <= Duration::from_millis(5),
    });
    Running::compare(table, id, what("start to first Probe"), &long.running, &short.running, &of);
    rig.detach_and_finish(&volume).await;
}

/// 64 TiB with 64 Mi allocated blocks would be 256 GiB of data, so the maps of two snapshots of an empty volume are written
/// here, as the driver would have written them, and the hash files stay empty: all that changed is in an exact map.
async fn huge_volume(table: &mut Table, pool: PoolKind) {
    const BLOCKS: u64 = 64 << 40 >> 12;
    const ALLOCATED: u64 = 64 << 20;
    let mut streams = Vec::new();
    for part in [10, 1] {
        let (blocks, allocated) = (BLOCKS / part, ALLOCATED / part);
        let every = blocks / allocated;
        let mut rig = Rig::start_with(pool, &[], "warn").await;
        let (volume, _) = rig.block_volume("volume", (blocks * 4096) as i64).await;
        let base = rig.snapshot("base", &volume).await;
        let target = rig.snapshot("target", &volume).await;
        host::hashed(&rig, &target).await;
        for id in [&base, &target] {
            host::replace_map(&rig.snapshot_dir(id).allocated(), |writer| {
                for block in 0..allocated {
                    writer.insert(BlockRange::new(block * every, block * every + 1)).expect("insert");
                }
            });
        }
        let changed = rig.snapshot_dir(&target).changed();
        let header = MapFile::open(&changed).expect("map").header().clone();
        assert!(matches!(header.relative_to, Some(Relation { exact: true, .. })), "{header:?}");
        host::replace_map(&changed, |writer| {
            for block in (0..allocated).step_by(100) {
                writer.insert(BlockRange::new(block * every, block * every + 1)).expect("insert");
            }
        });
        let (mut lists, mut deltas) = (Vec::new(), Vec::new());
        for _ in 0..ROUNDS {
            let listed = host::allocated(&mut rig.client, &target).await;
            assert_eq!(listed.tuples, allocated);
            lists.push(listed.whole);
            deltas.push(delta(&mut rig.client, &base, &target).await);
        }
        let memory = testkit::process_status(rig.pid(), "VmHWM:") >> 10;
        streams.push((lists, deltas, memory));
        rig.detach_and_finish(&volume).await;
    }
    let [small, huge] = &streams[..] else { unreachable!("two sizes") };
    let grows =
        [(&huge.0, &small.0), (&huge.1, &small.1)].map(|(huge, small)| ratio(median(huge), median(small)));
    table.add(Row {
        id: "scale-huge",
        what: format!(
            "64 TiB with 67,108,864 allocated blocks, 1 % of them changed, maps written by the bench, {}",
            pool.name()
        ),
        measured: format!(
            "allocated {}, delta {}, memory at most {} MiB",
            spread(&huge.0, ms),
            spread(&huge.1, ms),
            huge.2
        ),
        beside: format!("a tenth of it: {:.1} x, {:.1} x; {} MiB", grows[0], grows[1], small.2),
        must: "12 x; 64 MiB",
        holds: grows.iter().all(|grows| *grows <= EACH_PIECE) && huge.2 <= 64,
    });
}

async fn delta(client: &mut Client, base: &str, target: &str) -> Duration {
    let read = host::delta(client, base, target).await;
    assert!(read.tuples > 0, "nothing changed from {base} to {target}");
    read.whole
}
