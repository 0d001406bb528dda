//! Row p: many deltas at once.

use std::time::{Duration, Instant};

use fastrand::Rng;
use testkit::bench::{median, ms};
use testkit::prelude::*;

use crate::{Row, Table, host, ratio, spread};

const SIZE: u64 = 1 << 30;
const BLOCK: u64 = 4096;
/// 1 % of the blocks of a volume without holes.
const CHANGED: u64 = SIZE / BLOCK / 100;
const DELTAS: usize = 100;
const ROUNDS: usize = 5;

pub async fn run(table: &mut Table) {
    for pool in table.sharing() {
        let mut rig = Rig::start_with(pool, &["--pool-size", "32Gi"], "warn").await;
        let mut random = Rng::with_seed(19);
        let (volume, device) = rig.block_volume("volume", SIZE as i64).await;
        let mut all: Vec<u64> = (0..SIZE / BLOCK).map(|block| block * BLOCK).collect();
        host::write_blocks(&device, &mut random, &all);
        let mut snapshots = vec![rig.snapshot("0", &volume).await];
        for number in 1..=DELTAS {
            random.shuffle(&mut all);
            host::write_blocks(&device, &mut random, &all[..CHANGED as usize]);
            snapshots.push(rig.snapshot(&number.to_string(), &volume).await);
        }
        for snapshot in &snapshots {
            host::hashed(&rig, snapshot).await;
        }
        let mut clients = Vec::new();
        for _ in 0..DELTAS {
            clients.push(Client::connect(&rig.socket(), Duration::from_secs(10)).await.expect("connect"));
        }
        let (mut one_by_one, mut at_once) = (Vec::new(), Vec::new());
        for _ in 0..ROUNDS {
            let started = Instant::now();
            for (pair, client) in snapshots.windows(2).zip(&mut clients) {
                delta(client.clone(), pair.to_vec()).await;
            }
            one_by_one.push(started.elapsed());
            let started = Instant::now();
            let running: Vec<_> = snapshots
                .windows(2)
                .zip(&clients)
                .map(|(pair, client)| tokio::spawn(delta(client.clone(), pair.to_vec())))
                .collect();
            for delta in running {
                delta.await.expect("a delta");
            }
            at_once.push(started.elapsed());
        }
        let memory = testkit::process_status(rig.pid(), "VmHWM:") >> 10;
        let share = ratio(median(&at_once), median(&one_by_one));
        table.add(Row {
            id: "p",
            what: format!("{DELTAS} deltas at once, of 1 % of 1 GiB each, {}", pool.name()),
            measured: format!("{}, the driver's memory at most {memory} MiB", spread(&at_once, ms)),
            beside: format!("{share:.2} x one after another, {}", ms(median(&one_by_one))),
            must: "1.2 x; 128 MiB",
            holds: share <= 1.2 && memory <= 128,
        });
        rig.detach_and_finish(&volume).await;
    }
}

async fn delta(mut client: Client, pair: Vec<String>) {
    let read = host::delta(&mut client, &pair[0], &pair[1]).await;
    assert_eq!(read.bytes, CHANGED * BLOCK, "not what was changed");
}
