//! btrfs or xfs for a pool made in an image: what each costs where they differ.

use std::fs::File;
use std::os::unix::fs::MetadataExt;
use std::time::{Duration, Instant};

use files::punch_hole;

use crate::host;
use crate::{Row, SHARING, Table, ratio, spread};
use fastrand::Rng;
use testkit::bench::{median, ms};
use testkit::{PoolKind, Rig};

const SIZE: u64 = 2 << 30;
const WRITES: usize = 20_000;
const ROUNDS: usize = 5;
/// How long freed space may take to come back to the host.
const PATIENCE: Duration = Duration::from_secs(180);

struct Figures {
    sequential: Vec<f64>,
    before: Vec<f64>,
    after: Vec<f64>,
    snapshot: Vec<Duration>,
    delta: Vec<Duration>,
    /// The share of the image's space that is back on the host, and when.
    returned: (f64, Duration),
}

pub async fn run(table: &mut Table) {
    let [xfs, btrfs] = [measure(SHARING[0]).await, measure(SHARING[1]).await];
    let speed = |value: f64| format!("{:.0} MB/s", value / 1e6);
    let rate = |value: f64| format!("{value:.0}/s");
    for (what, show, btrfs, xfs) in [
        ("sequential write", speed as fn(f64) -> String, &btrfs.sequential, &xfs.sequential),
        ("4 KiB random writes, synced in the end, before a snapshot", rate, &btrfs.before, &xfs.before),
        ("the same after a snapshot", rate, &btrfs.after, &xfs.after),
    ] {
        let share = 100.0 * median(btrfs) / median(xfs);
        add(
            table,
            what,
            spread(btrfs, show),
            format!("{share:.0} % of the xfs image, {}", spread(xfs, show)),
        );
    }
    for (what, btrfs, xfs) in
        [("snapshot after them", &btrfs.snapshot, &xfs.snapshot), ("delta of them", &btrfs.delta, &xfs.delta)]
    {
        let times = ratio(median(btrfs), median(xfs));
        add(table, what, spread(btrfs, ms), format!("{times:.3} x the xfs image, {}", spread(xfs, ms)));
    }
    let share =
        |(share, after): (f64, Duration)| format!("{:.0} % after {} s", 100.0 * share, after.as_secs());
    let times = ratio(btrfs.returned.1, xfs.returned.1);
    let what = "space back on the host after a discard of all";
    add(
        table,
        what,
        share(btrfs.returned),
        format!("{times:.1} x the xfs image's time: {}", share(xfs.returned)),
    );
}

fn add(table: &mut Table, what: &str, measured: String, beside: String) {
    table.add(Row {
        id: "pools",
        what: format!("{what}: btrfs image"),
        measured,
        beside,
        must: "",
        holds: true,
    });
}

async fn measure(pool: PoolKind) -> Figures {
    let mut rig = Rig::start_with(pool, &["--pool-size", "32Gi", "--retain-deleted", "0"], "warn").await;
    let mut random = Rng::with_seed(11);
    let (volume, device) = rig.block_volume("volume", SIZE as i64).await;
    let mut sequential = vec![SIZE as f64 / host::fill(&device, SIZE, &mut random).as_secs_f64()];
    let write = |random: &mut Rng| {
        let offsets: Vec<u64> = (0..WRITES).map(|_| random.u64(0..SIZE / 4096) * 4096).collect();
        let started = Instant::now();
        host::write_blocks(&device, random, &offsets);
        WRITES as f64 / started.elapsed().as_secs_f64()
    };
    let before: Vec<f64> = (0..ROUNDS).map(|_| write(&mut random)).collect();
    let mut base = rig.snapshot("base", &volume).await;
    host::hashed(&rig, &base).await;
    let (mut after, mut snapshot, mut delta) = (Vec::new(), Vec::new(), Vec::new());
    let mut taken = vec![base.clone()];
    for round in 0..ROUNDS {
        after.push(write(&mut random));
        let (target, took) = host::timed(rig.snapshot(&format!("target {round}"), &volume)).await;
        snapshot.push(took);
        host::hashed(&rig, &target).await;
        let (list, took) = host::timed(rig.client.delta(&base, &target, 0, 0)).await;
        list.expect("delta");
        delta.push(took);
        taken.push(target.clone());
        base = target;
    }
    for snapshot in taken {
        rig.client.delete_snapshot(&snapshot).await.expect("delete");
    }
    let image = rig.data_dir().join("pool.img");
    let used = || std::fs::metadata(&image).expect("stat").blocks() * 512;
    let most = used();
    punch_hole(&File::options().write(true).open(&device).expect("open"), 0, SIZE).expect("discard");
    let started = Instant::now();
    let share = || 1.0 - used() as f64 / most as f64;
    while share() < 0.95 && started.elapsed() < PATIENCE {
        tokio::time::sleep(Duration::from_millis(200)).await;
    }
    let returned = (share(), started.elapsed());
    rig.detach(&volume).await;
    // Not before: btrfs leaves the space of what was deleted for two minutes.
    for round in 1..ROUNDS {
        let (volume, device) = rig.block_volume(&format!("filled {round}"), SIZE as i64).await;
        sequential.push(SIZE as f64 / host::fill(&device, SIZE, &mut random).as_secs_f64());
        rig.delete(&volume).await;
        host::idle(&rig, pool).await;
    }
    rig.finish();
    Figures { sequential, before, after, snapshot, delta, returned }
}
